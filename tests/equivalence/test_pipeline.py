"""A checkpoint of one pipeline continues under another layout; that each equals one process is in
test_layouts.py."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_close
from megalith.train.step import train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify.ranks import LayoutCase, _loader, layout_case

UNTIED = ModelConfig(
    vocab_size=61,
    pad_vocab_to_multiple_of=4,
    hidden_size=24,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=20,
)
TIED = replace(UNTIED, tied_embeddings=True)


def parallel(
    pp: int, *, tp: int = 1, dp: int = 1, sp: bool = False, zero: int = 0, **pipeline: object
) -> ParallelConfig:
    """A layout with a pipeline."""
    return ParallelConfig(
        tp=tp, pp=pp, dp=dp, sp=sp, zero=zero, pipeline=PipelineConfig(**pipeline)
    )  # type: ignore[arg-type]  # by name


def world_of(layout: ParallelConfig) -> int:
    return layout.tp * layout.cp * layout.pp * (layout.dp or 1)


# --- a checkpoint of one layout under another


def two_steps(
    rank: int, world: int, case: LayoutCase, folder: str, load: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps, from the beginning and saved, or from what another layout saved; losses, and
    weights as stored."""
    torch.set_num_threads(1)
    device, root = torch.device("cpu"), Path(folder)
    mesh = (
        build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    trainer = build_trainer(case.run, mesh, device, fill=not load)
    done = 2 if load else 0
    if load:
        open_checkpoint(root / "step_0000002").load_into(checkpoint_entries(trainer), mesh.world)
        trainer.optimizer.set_updates(done)
        all_gather_loaded_params(trainer)
    loader = _loader(case.run, mesh, consumed=12 * done, steps=2)
    losses = [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1).loss for _ in range(2)]
    save_checkpoint(root, done + 2, checkpoint_entries(trainer), {}, mesh.world, config_text="")
    stored = open_checkpoint(root / f"step_{done + 2:07d}")
    return losses, {name: stored.read(name) for name in stored.keys()} if rank == 0 else {}  # noqa: SIM118  # no mapping


MOVES = {
    "pp2 vpp2 to tp2": (parallel(2, vpp=2), ParallelConfig(tp=2)),
    "tp2 to pp2": (ParallelConfig(tp=2), parallel(2)),
    "pp3 with standalone ends to pp2 zb-v": (
        parallel(3, layout="E|t*4|L"),
        parallel(2, schedule="zb-v", vpp=2),
    ),
    "pp2 dp2 zero 1 to one process": (parallel(2, dp=2, zero=1), ParallelConfig()),
    "dp2 zero 2 to pp4": (ParallelConfig(dp=2, zero=2), parallel(4)),
    "pp2 vpp2 to dp2 zero 3": (parallel(2, vpp=2), ParallelConfig(dp=2, zero=3)),
    "dp2 zero 3 to pp2 vpp2": (ParallelConfig(dp=2, zero=3), parallel(2, vpp=2)),
    "dp2 zero 3 to pp2": (ParallelConfig(dp=2, zero=3), parallel(2)),
    "cp2 to one process": (ParallelConfig(cp=2), ParallelConfig()),
    "one process to cp2": (ParallelConfig(), ParallelConfig(cp=2)),
    "pp2 dp2 zero 1 to cp2 dp2 zero 2": (
        parallel(2, dp=2, zero=1),
        ParallelConfig(cp=2, dp=2, zero=2),
    ),
}
AHEAD = {
    "a stage of their own to one process": (parallel(4, layout="E|t*4|mm|L"), ParallelConfig()),
    "one process to a stage of their own": (ParallelConfig(), parallel(4, layout="E|t*4|mm|L")),
    "the last stage to one behind the last layers": (parallel(2), parallel(3, layout="Ett|ttmm|L")),
    "a chunk of their own to the last stage, zero 3": (
        parallel(2, vpp=2, layout="Ett|tt|mm|L"),
        parallel(2, dp=2, zero=3),
    ),
}
IN_EVERY_RUN = ("pp2 vpp2 to tp2", "dp2 zero 3 to pp2 vpp2", "cp2 to one process")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.slow])
        for name in MOVES
    ],
)
def test_a_checkpoint_of_one_layout_continues_under_another(name: str, tmp_path: Path) -> None:
    continues(TIED, MOVES[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.parametrize("tied", [False, True])
def test_mtp_layers_move_between_stages_with_a_checkpoint(
    name: str, tied: bool, tmp_path: Path
) -> None:
    model = replace(TIED, tied_embeddings=tied, mtp=MTPConfig(num_layers=2))
    continues(model, AHEAD[name], tmp_path)
    written = [
        sorted(open_checkpoint(tmp_path / who / "step_0000004").keys())
        for who in ("alone", "moved")
    ]
    assert written[0] == written[1] and "model.mtp.1.layer.mlp.down" in written[0]


def continues(
    model: ModelConfig, move: tuple[ParallelConfig, ParallelConfig], tmp_path: Path
) -> None:
    alone = layout_case(model, ParallelConfig(), 1, micro_batch_size=2)
    first, _ = two_steps(0, 1, alone, str(tmp_path / "alone"), False)
    second, weights = two_steps(0, 1, alone, str(tmp_path / "alone"), True)
    for layout, load, expected in zip(move, (False, True), (first, second), strict=True):
        world = world_of(layout)
        case = layout_case(model, layout, world, micro_batch_size=2)
        moved = str(tmp_path / "moved")
        ranks = (
            run_ranks(two_steps, world, case, moved, load)
            if world > 1
            else [two_steps(0, 1, case, moved, load)]
        )
        losses, stored = ranks[0]
        assert losses == pytest.approx(expected, rel=FP64.relative)
    assert_close(stored, weights, FP64)

"""Microbatches through all stages: the same evaluation and the same run as one process, and copies
that stay equal."""

import weakref
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from megalith.config.parallel import PipelineConfig
from megalith.config.train import TrainRun
from megalith.data.loader import BatchSettings, Loader, MaskSettings
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import RankError
from megalith.kernels.attention import dispatch as attention
from megalith.kernels.attention.scores import Mask, mask_for_torch
from megalith.launch.watchdog import backend_timeout
from megalith.nn.moe import MoE
from megalith.observe.metrics import read_metrics
from megalith.observe.timers import Timers
from megalith.parallel.context import local_slicing
from megalith.parallel.expert import AllToAllDispatcher
from megalith.parallel.mesh import Mesh, build_mesh, build_meta_mesh, build_single_rank_mesh
from megalith.parallel.pipeline import Pipeline
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, FP64
from megalith.train import trainer as trainer_module
from megalith.train.callbacks.replicas import compare_stages
from megalith.train.evaluate import Evaluation, evaluate
from megalith.train.forward_backward import build_step_schedule
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import build_pipeline_model, build_trainer, splits_backward
from megalith.verify.ranks import RaggedRows

CPU = torch.device("cpu")
TIED = {"precision.params": "fp64", "model.tied_embeddings": "true", "model.num_layers": "4"}
PIPELINES = {
    "1f1b": {"parallel.pp": "2"},
    "interleaved": {"parallel.pp": "2", "parallel.pipeline.vpp": "2"},
    "zb-v": {
        "parallel.pp": "2",
        "parallel.pipeline.vpp": "2",
        "parallel.pipeline.schedule": "zb-v",
    },
    "standalone ends": {"parallel.pp": "3", "parallel.pipeline.layout": "E|t*4|L"},
}


def settings(name: str, **others: str) -> dict[str, str]:
    return {**TIED, **PIPELINES[name], **others}


def mesh_of(run: TrainRun, rank: int, world: int) -> Mesh:
    return (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )


def test_without_a_pipeline_microbatches_are_sequential_for_all_settings() -> None:
    for pipeline in (PipelineConfig(), PipelineConfig(schedule="zb-h1", group=7, layout="x")):
        schedule = build_step_schedule(pipeline, 1, 3, overlap=True)
        assert [f"{kind}{microbatch}" for kind, _, microbatch, _ in schedule.ranks[0]] == [
            "F0",
            "B0",
            "F1",
            "B1",
            "F2",
            "B2",
        ]


def test_a_schedule_is_planned_once() -> None:
    first = build_step_schedule(PipelineConfig(vpp=2), 2, 4, overlap=True)
    assert build_step_schedule(PipelineConfig(vpp=2), 2, 4, overlap=True) is first
    assert (
        build_step_schedule(PipelineConfig(vpp=2), 2, 4, overlap=True, forward_only=True)
        is not first
    )


def test_only_training_with_dual_batch_overlap_is_planned_in_pairs() -> None:
    plain, paired = (
        build_step_schedule(PipelineConfig(), 1, 3, overlap=True, paired=each)
        for each in (False, True)
    )
    assert plain.pairs == () and paired.pairs == (frozenset({(0, 1), (0, 2)}),)
    assert "".join(f"{a.kind}{a.microbatch}" for a in paired.ranks[0]) == "F0F1B0F2B1B2"


@pytest.mark.parametrize("paired", [False, True])
def test_passes_that_run_alternately_are_not_timed(paired: bool) -> None:
    schedule = build_step_schedule(PipelineConfig(), 1, 3, overlap=True, paired=paired)
    weight, timers = torch.ones((), requires_grad=True), Timers(level=2)
    pipeline = Pipeline(0, None, torch.device("cpu"), timers=timers)
    pipeline.run(schedule, [lambda microbatch, received: (weight * 2,)])
    assert weight.grad is not None and weight.grad.item() == 6
    assert [*timers.take()] == ([] if paired else ["forward", "backward"])


@pytest.mark.parametrize("asked", [False, True])
def test_expert_all_to_all_switches_microbatches_with_dual_batch_overlap(asked: bool) -> None:
    experts = {"model.moe.num_experts": "4", "model.moe.ffn_hidden_size": "4", "parallel.ep": "2"}
    run = tiny_run(experts | {"parallel.overlap_experts": str(asked).lower()})
    mesh = build_meta_mesh(model_grid(run.parallel, run.model, 2), rank=0)
    built = build_pipeline_model(run, mesh, torch.device("meta"), dtype=torch.float64)
    mixtures = [module for module in built.modules.modules() if isinstance(module, MoE)]
    dispatchers = [
        one for mixture in mixtures for one in (mixture.dispatch, mixture.dispatch_within_capacity)
    ]
    assert len(dispatchers) == 2 * run.model.num_layers
    for dispatch in dispatchers:
        assert (
            isinstance(dispatch, AllToAllDispatcher)
            and (dispatch.overlap_fn is built.dual_batch) == asked
        )


def test_weight_gradients_are_deferred_only_for_split_schedules() -> None:
    assert splits_backward(PipelineConfig(schedule="zb-h1"), 2)
    assert not splits_backward(PipelineConfig(schedule="zb-h1"), 1)
    assert not splits_backward(PipelineConfig(vpp=2), 2)


class _Asked(Exception):
    """How long messages may take."""


def test_message_groups_have_the_backend_timeout() -> None:
    run = tiny_run({**PIPELINES["1f1b"], "parallel.timeout_seconds": "7"})

    def reported(group: object, *, tags: bool, timeout_seconds: float) -> None:
        raise _Asked(timeout_seconds)

    with (
        patch.object(trainer_module, "create_pipeline_groups", reported),
        pytest.raises(_Asked) as requested,
    ):
        build_pipeline_model(run, build_single_rank_mesh(), CPU, dtype=torch.float64)
    assert requested.value.args == (backend_timeout(7),) and requested.value.args[0] > 7


def _evaluate(rank: int, world: int, run: TrainRun) -> Evaluation:
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 20, masked=(3,))
    return evaluate(
        trainer.pipeline_model, rows, MaskSettings(), samples=19, tokenizer=ByteTokenizer()
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_evaluation_is_equal_on_every_rank_of_a_pipeline(name: str) -> None:
    run = tiny_run(settings(name))
    alone = _evaluate(0, 1, tiny_run(TIED))
    for result in run_ranks(_evaluate, run.parallel.pp, run):
        assert result.loss == pytest.approx(alone.loss, rel=FP64.relative)
        assert result.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=FP64.relative)
        assert result.num_labels == alone.num_labels


def _table(rank: int, world: int, run: TrainRun) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps, and what this rank then has of the table that stages share."""
    mesh = mesh_of(run, rank, world)
    trainer = build_trainer(run, mesh, CPU)
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 36, masked=(1, 5))
    loader = Loader(
        rows,
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        mesh.dp,
        consumed=0,
        steps=3,
        device=CPU,
    )
    losses = [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1).loss for _ in range(3)]
    trainer.data.wait_params()
    result = {}
    for chunk in trainer.pipeline_model.chunks:
        for name in ("embed", "head"):
            if hasattr(chunk, name):
                result[name] = getattr(chunk, name).weight.detach().clone()
    return losses, result


@pytest.mark.parametrize("zero", ["0", "1"])
def test_copies_of_a_tied_table_stay_equal_to_the_bit_in_fp32(zero: str) -> None:
    changes = {"precision.params": "fp32", "parallel.dp": "2", "parallel.zero": zero}
    results = run_ranks(_table, 4, tiny_run(settings("1f1b", **changes)))
    tables = [table for _, result in results for table in result.values()]
    assert len(tables) == 4 and all(torch.equal(tables[0], table) for table in tables[1:])
    assert [name for _, result in results for name in result] == ["embed", "embed", "head", "head"]


def test_comparing_every_message_changes_no_bit() -> None:
    plain, compared = (
        run_ranks(
            _table, 2, tiny_run(settings("interleaved", **{"parallel.check_collectives": value}))
        )
        for value in ("false", "true")
    )
    assert plain[0][0] == compared[0][0]
    assert torch.equal(plain[0][1]["embed"], compared[0][1]["embed"])


def test_overlap_changes_no_bit() -> None:
    on, off = (
        run_ranks(_table, 2, tiny_run(settings("interleaved", **{"parallel.overlap": value})))
        for value in ("true", "false")
    )
    assert on[0][0] == off[0][0]
    assert torch.equal(on[1][1]["head"], off[1][1]["head"])


@pytest.mark.parametrize("kept", ["none", "full"])
def test_masks_of_microbatch_are_built_once_and_freed_after_backward(
    kept: str,
) -> None:
    run, built, alive = (
        tiny_run({"recompute.granularity": kept}),
        list[weakref.ref[Tensor]](),
        list[int](),
    )

    def make(mask: Tensor, dtype: torch.dtype) -> Mask:
        alive.append(sum(one() is not None for one in built))
        result = mask_for_torch(mask, dtype)
        built.append(weakref.ref(result.added))
        return result

    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 12, masked=(), masks="alone")
    loader = Loader(
        rows,
        BatchSettings(batch_schedule=constant_batch_size(6), micro_batch_size=2),
        trainer.mesh.dp,
        consumed=0,
        steps=1,
        device=CPU,
    )
    batches = loader.next()
    with patch.object(attention, "mask_for_torch", make):
        train_step(trainer, batches, lr=1e-2, weight_decay=0.1)
    assert run.model.num_layers > 1 and len(batches.microbatches) == 3 and alive == [0, 0, 0]


WIDE = {"precision.params": "bf16", "model.fp32_residual": "true", "model.tied_embeddings": "false"}


def _stream(rank: int, world: int, run: TrainRun) -> tuple[set[torch.dtype], list[float]]:
    """Dtypes of what layers and stages give each other, and losses."""
    seen: set[torch.dtype] = set()

    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        seen.update((given[0].dtype, out.dtype))

    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    for layer in (layer for chunk in trainer.pipeline_model.chunks for layer in chunk.layers):
        layer.register_forward_hook(note)
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 36, masked=(1, 5))
    loader = Loader(
        rows,
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        trainer.mesh.dp,
        consumed=0,
        steps=3,
        device=CPU,
        slicing=local_slicing(run.parallel, trainer.mesh),
    )
    return seen, [
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1).loss for _ in range(3)
    ]


def test_fp32_residual_stream_across_stages_is_bitwise_equal_to_one_process() -> None:
    ((alone, expected),) = run_ranks(
        _stream, 1, tiny_run(settings("1f1b", **WIDE | {"parallel.pp": "1"}))
    )
    assert alone == {torch.float32}
    for seen, losses in run_ranks(_stream, 2, tiny_run(settings("1f1b", **WIDE))):
        assert seen == {torch.float32} and losses == expected
    narrow = WIDE | {"model.fp32_residual": "false"}
    for seen, losses in run_ranks(_stream, 2, tiny_run(settings("1f1b", **narrow))):
        assert seen == {torch.bfloat16} and losses != expected


@pytest.mark.parametrize(
    "layout", [{"parallel.tp": "2", "parallel.sp": "true"}, {"parallel.cp": "2"}], ids=str
)
def test_fp32_residual_stream_is_fp32_under_sequence_parallelism(layout: dict[str, str]) -> None:
    alone = WIDE | {
        "train.global_batch_size": "12",
        "train.micro_batch_size": "2",
        "train.seq_len": "12",
    }
    ((_, expected),) = run_ranks(_stream, 1, tiny_run(alone))
    for seen, losses in run_ranks(_stream, 2, tiny_run(alone | layout)):
        # the rest computes in bf16
        assert seen == {torch.float32} and losses == pytest.approx(expected, rel=2e-3)
    for seen, _ in run_ranks(
        _stream, 2, tiny_run(alone | layout | {"model.fp32_residual": "false"})
    ):
        assert seen == {torch.bfloat16}


def _differ(rank: int, world: int, run: TrainRun) -> None:
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    compare_stages(trainer)
    if rank == 1:
        next(
            param for param in trainer.data.local_params if param.shard.name == "embed.weight"
        ).weight.view(-1)[7] += 1e-9
    compare_stages(trainer)


def test_stages_with_different_tied_tables_are_rejected() -> None:
    with pytest.raises(
        RankError,
        match=r"embed.weight is not the same on pipeline ranks \[0, 1\], which share it. "
        r"Use",
    ):
        run_ranks(_differ, 2, tiny_run(settings("1f1b")))


def _train(rank: int, world: int, run: TrainRun, folder: str) -> None:
    run_training(run, RunFolder(Path(folder)), mesh_of(run, rank, world), CPU, show=False)


def test_resume_under_another_pipeline_and_without_one(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    constant = {"schedule.style": "constant", "schedule.warmup_steps": "0"}
    _train(0, 1, tiny_run({**TIED, **constant}), str(whole))
    for name, steps in (("interleaved", "3"), ("standalone ends", "6")):
        run = tiny_run(settings(name, **constant, **{"train.steps": steps}))
        run_ranks(_train, run.parallel.pp, run, str(parts))
    _train(0, 1, tiny_run({**TIED, **constant}), str(parts))
    expected, result = (
        [row["loss"] for row in read_metrics(path / "metrics.jsonl") if "loss" in row]
        for path in (whole, parts)
    )
    assert result == pytest.approx(expected, rel=CURVE64.relative) and len(result) == 8

"""Mixtures of experts beyond one layout: checkpoints that move, recomputation to the bit,
experts nobody chooses, and balance that is learned. That each layout equals one process is in
test_layouts.py."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.optim import PrecisionConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.data.loader import BatchSettings, Loader
from megalith.data.sample import Sample
from megalith.kernels import grouped_linear
from megalith.kernels import grouped_linear as expert_kernels
from megalith.kernels.grouped_linear import (
    FUSED,
    HAS_GROUPED_MM,
    LOOP,
    GroupedMatmulOps,
    Groups,
    accumulate_grouped_product_,
    select_grouped_matmul_ops,
)
from megalith.parallel import data
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP32_DEEP, FP64, assert_close
from megalith.train.moe import LayerExpertLoad, collect_expert_load, iter_routers
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify.matrix import BIASED_CHOICE, NARROW, NOISY
from megalith.verify.ranks import (
    Gathered,
    LayoutCase,
    _assemble,
    _join_slices,
    _loader,
    _slices,
    layout_case,
)

CPU = torch.device("cpu")


def mesh_of(case: LayoutCase, rank: int, world: int) -> Mesh:
    torch.set_num_threads(1)
    return (
        build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )


def on_ranks(
    function: Any, case: LayoutCase, *others: object
) -> Any:  # Any: whatever it gives back, of rank 0
    """Run it on the case's processes, or here if there is one."""
    if case.world == 1:
        return function(0, 1, case, *others)
    return run_ranks(function, case.world, case, *others)[0]


def case_of(model: ModelConfig, parallel: ParallelConfig) -> LayoutCase:
    world = parallel.tp * parallel.cp * parallel.pp * (parallel.dp or 1)
    return layout_case(model, parallel, world)


# --- checkpoints


def steps_between(
    rank: int, world: int, case: LayoutCase, folder: str, first: int, last: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Steps `first` to `last`, from what was saved before them if there are any; losses, and all
    that is stored."""
    mesh, root = mesh_of(case, rank, world), Path(folder)
    trainer = build_trainer(case.run, mesh, CPU, fill=first == 0)
    if first:
        open_checkpoint(root / f"step_{first:07d}").load_into(
            checkpoint_entries(trainer), mesh.world
        )
        trainer.optimizer.set_updates(first)
        all_gather_loaded_params(trainer)
    loader = _loader(case.run, mesh, consumed=12 * first, steps=last - first)
    losses = [
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1).loss
        for _ in range(last - first)
    ]
    trainer.data.wait_params()
    save_checkpoint(root, last, checkpoint_entries(trainer), {}, mesh.world, config_text="")
    stored = open_checkpoint(root / f"step_{last:07d}")
    return losses, {name: stored.read(name) for name in stored.keys()} if rank == 0 else {}  # noqa: SIM118  # no mapping


ONE = ParallelConfig()
STAGES = ParallelConfig(pp=2, dp=2, ep=2, pipeline=PipelineConfig(schedule="1f1b"))
MOVES = {
    "dp2 etp2 to tp2 sp ep2 etp1": (
        ParallelConfig(dp=2, etp=2),
        ParallelConfig(tp=2, sp=True, ep=2, etp=1),
    ),
    "tp2 sp etp2 to dp2 ep2, zero 2": (
        ParallelConfig(tp=2, sp=True),
        ParallelConfig(dp=2, ep=2, zero=2),
    ),
    "dp3 ep3, zero 1 to pp2 dp2 ep2": (ParallelConfig(dp=3, ep=3, zero=1), STAGES),
    "pp2 dp2 ep2 to dp4 ep2 etp2, zero 1": (STAGES, ParallelConfig(dp=4, ep=2, etp=2, zero=1)),
    "dp4 ep2 etp2, zero 1 to one process": (ParallelConfig(dp=4, ep=2, etp=2, zero=1), ONE),
    "one process to cp2 ep2, zero 2": (ONE, ParallelConfig(cp=2, ep=2, zero=2)),
    "tp2 dp2 sp ep2 etp1, zero 2 to dp3 ep3": (
        ParallelConfig(tp=2, dp=2, sp=True, ep=2, etp=1, zero=2),
        ParallelConfig(dp=3, ep=3),
    ),
    "dp4 ep4 to one process": (ParallelConfig(dp=4, ep=4), ONE),
    "dp4 ep4, zero 3 to dp2 and ep1": (ParallelConfig(dp=4, ep=4, zero=3), ParallelConfig(dp=2)),
}
IN_EVERY_RUN = ("dp2 etp2 to tp2 sp ep2 etp1",)
assert BIASED_CHOICE.moe is not None
EIGHT = replace(
    BIASED_CHOICE,
    moe=replace(
        BIASED_CHOICE.moe, num_experts=8, router=replace(BIASED_CHOICE.moe.router, num_groups=4)
    ),
)
"""As many experts as four ranks can divide."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else [pytest.mark.slow])
        for name in MOVES
    ],
)
def test_experts_of_one_layout_resume_under_another(name: str, tmp_path: Path) -> None:
    """Weights, moments and balancing biases; losses are those of one process that was never
    interrupted."""
    model = EIGHT if "ep4" in name else BIASED_CHOICE
    expected, weights = on_ranks(steps_between, case_of(model, ONE), str(tmp_path / "alone"), 0, 4)
    losses: list[float] = []
    for layout, first in zip(MOVES[name], (0, 2), strict=True):
        case = case_of(model, layout)
        some, stored = on_ranks(steps_between, case, str(tmp_path / "moved"), first, first + 2)
        losses += some
    assert losses == pytest.approx(expected, rel=FP64.relative)
    assert_close(stored, weights, FP64)
    biases = [key for key in weights if key.endswith("balancing_bias")]
    assert len(biases) == 4 and all(
        torch.equal(stored[key], weights[key]) and weights[key].any() for key in biases
    )
    assert {
        f"optimizer.{kind}.layers.0.moe.experts.down" for kind in ("exp_avg", "exp_avg_sq")
    } <= stored.keys()


@pytest.mark.parametrize("zero", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_run_has_bitwise_equal_losses(zero: Any, tmp_path: Path) -> None:
    case = case_of(BIASED_CHOICE, ParallelConfig(dp=2, ep=2, zero=zero))
    whole, kept = on_ranks(steps_between, case, str(tmp_path / "whole"), 0, 4)
    first, _ = on_ranks(steps_between, case, str(tmp_path / "parts"), 0, 2)
    second, again = on_ranks(steps_between, case, str(tmp_path / "parts"), 2, 4)
    assert first + second == whole
    assert all(torch.equal(again[key], kept[key]) for key in kept)


# --- recomputation

AGAIN = [
    RecomputeConfig(granularity="full"),
    RecomputeConfig(granularity="full", method="block"),
    RecomputeConfig(granularity="selective", modules=("mlp",)),
    RecomputeConfig(granularity="selective", modules=("mlp_act",)),
    RecomputeConfig(granularity="selective", modules=("shared_experts",)),
    RecomputeConfig(granularity="selective", modules=("core_attention", "norm", "mlp_act")),
]


def first_step(
    rank: int, world: int, case: LayoutCase, selected_ops: list[RecomputeConfig]
) -> list[tuple[list[Tensor], Any]]:
    """Of each way: every gradient of a step in fp32 as it was applied, and what the experts did."""
    results = []
    for way in selected_ops:
        run = replace(case.run, recompute=way, precision=PrecisionConfig(params="fp32"))
        mesh = mesh_of(case, rank, world)
        trainer = build_trainer(run, mesh, CPU)
        train_step(
            trainer, _loader(run, mesh, consumed=0, steps=1).next(), lr=1e-2, weight_decay=0.0
        )
        gradients = [param.gradient.clone() for param in trainer.data.local_params]
        results.append((gradients, collect_expert_load(trainer.pipeline_model.modules, mesh)))
    return results


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param(BIASED_CHOICE, ONE, marks=pytest.mark.slow),
        pytest.param(NOISY, ONE, marks=pytest.mark.slow),
        (NARROW, ParallelConfig(dp=2, ep=2)),
        pytest.param(
            BIASED_CHOICE, ParallelConfig(tp=2, sp=True, ep=2, etp=1), marks=pytest.mark.slow
        ),
    ],
    ids=["biased choice", "noisy", "narrow ep2", "biased choice tp2 ep2"],
)
def test_recomputation_changes_no_bit_and_counts_nothing_twice(
    model: ModelConfig, parallel: ParallelConfig
) -> None:
    """`mlp` is the whole mixture with its messages; `mlp_act` the shared experts' activation, as
    those of the others are never kept; `shared_experts` all of these; `norm` what the router and
    both kinds of experts read."""
    (kept, uses), *others = on_ranks(
        first_step, case_of(model, parallel), [RecomputeConfig(), *AGAIN]
    )
    assert sum(sum(use.counts) for use in uses) > 0 and all(bool(one.any()) for one in kept)
    for way, (gradients, counted) in zip(AGAIN, others, strict=True):
        assert counted == uses, way
        assert all(torch.equal(local, one) for local, one in zip(gradients, kept, strict=True)), way


def test_evaluation_does_not_change_expert_load_or_bias() -> None:
    case = case_of(BIASED_CHOICE, ONE)
    trainer = build_trainer(case.run, build_single_rank_mesh(), CPU)
    loader = _loader(case.run, trainer.mesh, consumed=0, steps=2)
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0)
    routers = list(iter_routers(trainer.pipeline_model.modules))
    before = [(router.balance.record, router.expert_bias) for router in routers]
    kept = [
        [part.clone() for part in (record.counts, record.losses, bias)]
        for record, bias in before
        if record
    ]  # type: ignore[union-attr]  # a bias is there
    trainer.pipeline_model.forward(loader.next().microbatches)
    after = [[r.balance.record.counts, r.balance.record.losses, r.expert_bias] for r in routers]  # type: ignore[union-attr]  # as before
    assert all(
        torch.equal(a, b)
        for old, new in zip(kept, after, strict=True)
        for a, b in zip(old, new, strict=True)
    )  # type: ignore[arg-type]  # tensors


def test_evaluation_drops_no_tokens_and_adds_no_noise_or_aux_loss() -> None:
    """Experts with hardly any room, noise and heavy losses judge text as those without do."""
    assert NARROW.moe is not None
    plain = replace(NARROW.moe, capacity=CapacityConfig(), aux_loss=AuxLossConfig())
    narrow = replace(
        plain,
        capacity=CapacityConfig(factor=0.2),
        aux_loss=AuxLossConfig(batch_coeff=9.0, z_loss_coeff=9.0),
        router=RouterConfig(jitter=0.5),
    )
    results = []
    for moe in (plain, narrow):
        trainer = build_trainer(
            case_of(replace(NARROW, moe=moe), ONE).run, build_single_rank_mesh(), CPU
        )
        batches = _loader(trainer.run, trainer.mesh, consumed=0, steps=1).next().microbatches
        held_out = [replace(batch, dropout_key=None) for batch in batches]  # as they are read
        results.append(trainer.pipeline_model.forward(held_out))
    assert torch.equal(results[0], results[1]) and bool(results[0].any())


def losses_of(trainers: list[Trainer], steps: int) -> list[list[float]]:
    """Of all trainers, whose steps take turns."""
    loaders = [_loader(trainer.run, trainer.mesh, consumed=0, steps=steps) for trainer in trainers]
    pairs = list(zip(trainers, loaders, strict=True))
    every = [
        [train_step(t, loader.next(), lr=1e-2, weight_decay=0.0).loss for t, loader in pairs]
        for _ in range(steps)
    ]
    return [list(losses) for losses in zip(*every, strict=True)]


def test_two_models_in_one_process_are_independent() -> None:
    """A teacher and a student, or a policy and its reference: neither loads, losses nor biases are
    shared."""
    runs = [case_of(model, ONE).run for model in (BIASED_CHOICE, NARROW, BIASED_CHOICE)]
    alone = [losses_of([build_trainer(run, build_single_rank_mesh(), CPU)], 3)[0] for run in runs]
    assert (
        losses_of([build_trainer(run, build_single_rank_mesh(), CPU) for run in runs], 3) == alone
    )
    assert alone[0] == alone[2] != alone[1]


@contextmanager
def everywhere(matmul_ops: Callable[[Tensor, Tensor, Groups], GroupedMatmulOps]) -> Iterator[None]:
    """Who asks for the fastest matmuls of experts gets these: where they are computed, and where
    they are chosen."""
    with (
        patched(grouped_linear, "select_grouped_matmul_ops", matmul_ops),
        patched(expert_kernels, "select_grouped_matmul_ops", matmul_ops),
    ):
        yield


def test_step_with_grouped_matmuls_matches_a_loop_over_experts() -> None:
    """In fp32, as in float64 matmuls of experts are a loop anyway; the same sums in another
    order."""
    assert BIASED_CHOICE.moe is not None
    # 48 bytes
    case = case_of(replace(BIASED_CHOICE, moe=replace(BIASED_CHOICE.moe, ffn_hidden_size=12)), ONE)
    selected_ops: list[GroupedMatmulOps] = []

    def noted(x: Tensor, w: Tensor, groups: Groups) -> GroupedMatmulOps:
        selected_ops.append(select_grouped_matmul_ops(x, w, groups))
        return selected_ops[-1]

    with everywhere(noted):
        ((grouped, uses),) = first_step(0, 1, case, [RecomputeConfig()])
    with everywhere(lambda *_: LOOP):
        ((one_by_one, others),) = first_step(0, 1, case, [RecomputeConfig()])
    assert (FUSED in selected_ops) == HAS_GROUPED_MM
    assert [use.counts for use in uses] == [use.counts for use in others]
    for local, one in zip(grouped, one_by_one, strict=True):
        assert torch.allclose(local, one, rtol=1e-4, atol=1e-5 * float(one.abs().max()))


GROUPED = {
    "dp2 ep2": ParallelConfig(dp=2, ep=2),
    "dp2 ep2, zero 1": ParallelConfig(dp=2, ep=2, zero=1),
    "dp2 ep2, zero 3": ParallelConfig(dp=2, ep=2, zero=3),
    "dp4 ep2, zero 1": ParallelConfig(dp=4, ep=2, zero=1),
    "dp4 ep2, zero 3": ParallelConfig(dp=4, ep=2, zero=3),
    "dp4 ep2 etp2": ParallelConfig(dp=4, ep=2, etp=2),
}
"""Experts on two ranks: whole, with optimizer state or weights divided over the ranks that hold the
same, in parts."""
GROUPED_IN_EVERY_RUN = ("dp2 ep2",)


@contextmanager
def matmuls(*, grouped: bool) -> Iterator[None]:
    """Matmuls of experts are grouped, which must happen, or none is.

    On CPUs sinks of gradients would add one expert's after the other even so; as on GPUs, theirs
    are grouped, too.
    """
    selected_ops: list[GroupedMatmulOps] = []

    def noted(x: Tensor, w: Tensor, groups: Groups) -> GroupedMatmulOps:
        selected_ops.append(select_grouped_matmul_ops(x, w, groups) if grouped else LOOP)
        return selected_ops[-1]

    ops = FUSED if grouped and HAS_GROUPED_MM else LOOP

    def put(*tensors: Any, matmul_ops: GroupedMatmulOps | None, **options: Any) -> Tensor:
        return accumulate_grouped_product_(*tensors, matmul_ops=ops, **options)

    with everywhere(noted), patched(data, "accumulate_grouped_product_", put):
        yield
    assert selected_ops and (FUSED in selected_ops) == (grouped and HAS_GROUPED_MM)


def steps_in_fp32(
    rank: int, world: int, case: LayoutCase, folder: str, grouped: bool
) -> tuple[list[list[LayerExpertLoad]], dict[str, Tensor]]:
    """Three steps with grouped matmuls, which must be used, or without any: choices, and all that a
    run stores."""
    mesh, root, uses = mesh_of(case, rank, world), Path(folder), []
    with matmuls(grouped=grouped):
        trainer = build_trainer(case.run, mesh, CPU)
        loader = _loader(case.run, mesh, consumed=0, steps=3)
        for _ in range(3):
            train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
            uses.append(collect_expert_load(trainer.pipeline_model.modules, mesh))
    trainer.data.wait_params()
    save_checkpoint(root, 3, checkpoint_entries(trainer), {}, mesh.world, config_text="")
    stored = open_checkpoint(root / "step_0000003")
    return uses, {name: stored.read(name) for name in stored.keys()} if rank == 0 else {}  # noqa: SIM118  # no mapping


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in GROUPED_IN_EVERY_RUN else [pytest.mark.slow])
        for name in GROUPED
    ],
)
def test_ranks_with_grouped_matmuls_match_ranks_with_a_loop_over_experts(
    name: str, tmp_path: Path
) -> None:
    """Choices, weights, balancing biases and both moments after three steps in fp32.

    A sum over 16 or 24 features, in another order, is off by a few times 2^-23 of its terms, and a
    gradient has passed such sums in four layers; with eps = 1e-3 a step of lr = 1e-2 makes at most
    10 times as much of what a gradient is off by, which is not more than it is of the weight.
    """
    assert BIASED_CHOICE.moe is not None
    # 64 bytes, and halves of 32
    model = replace(BIASED_CHOICE, moe=replace(BIASED_CHOICE.moe, ffn_hidden_size=16))
    case = case_of(model, GROUPED[name])
    case = replace(case, run=replace(case.run, precision=PrecisionConfig(params="fp32")))
    uses, stored = on_ranks(steps_in_fp32, case, str(tmp_path / "grouped"), True)
    others, expected = on_ranks(steps_in_fp32, case, str(tmp_path / "loop"), False)
    assert [[use.counts for use in step] for step in uses] == [
        [use.counts for use in step] for step in others
    ]
    moments = {
        f"optimizer.{kind}.layers.0.moe.experts.{w}"
        for kind in ("exp_avg", "exp_avg_sq")
        for w in ("gate_up", "down")
    }
    assert moments <= stored.keys()
    assert_close(stored, expected, FP32_DEEP)


def steps_by(
    rank: int, world: int, case: LayoutCase, folder: str, first: int, last: int, grouped: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """`steps_between`, with grouped matmuls or without any."""
    with matmuls(grouped=grouped):
        return steps_between(rank, world, case, folder, first, last)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True], ids=["loop to grouped", "grouped to loop"])
def test_run_resumes_with_other_expert_matmuls_and_fewer_ranks(first: bool, tmp_path: Path) -> None:
    """What a checkpoint holds knows nothing of how experts were multiplied: in fp32, from four
    ranks with a part of the experts each to one with all, as one process that never changed.
    Bounds as above."""
    model = replace(EIGHT, moe=replace(EIGHT.moe, ffn_hidden_size=16))  # 64 bytes
    alone, before = (case_of(model, layout) for layout in (ONE, ParallelConfig(dp=4, ep=4)))
    wide = PrecisionConfig(params="fp32")
    alone, before = (
        replace(case, run=replace(case.run, precision=wide)) for case in (alone, before)
    )
    expected, weights = on_ranks(steps_by, alone, str(tmp_path / "alone"), 0, 3, False)
    losses, _ = on_ranks(steps_by, before, str(tmp_path / "moved"), 0, 2, first)
    last, stored = on_ranks(steps_by, alone, str(tmp_path / "moved"), 2, 3, not first)
    assert losses + last == pytest.approx(expected, rel=FP32_DEEP.relative)
    assert_close(stored, weights, FP32_DEEP)


# --- experts that nobody chooses


def pushed(
    rank: int, world: int, case: LayoutCase, push: list[float]
) -> tuple[list[Any], Gathered, Gathered, Gathered]:
    """A step whose routers are pushed towards some experts: their use; weights before, gradients,
    weights after."""
    mesh = mesh_of(case, rank, world)
    trainer = build_trainer(case.run, mesh, CPU)
    for slot in trainer.optimizer.slots:
        if slot.shard.name.endswith("router_bias"):
            slot.weight.copy_(torch.tensor(push))
    before = _join_slices(gather_objects(weights_key(trainer), mesh.world))
    train_step(
        trainer, _loader(case.run, mesh, consumed=0, steps=1).next(), lr=1e-2, weight_decay=0.0
    )
    local = _slices([(o.shard, o.gradient) for o in trainer.data.local_params])
    gradients = _join_slices(gather_objects(local, mesh.world))
    use = [one.counts for one in collect_expert_load(trainer.pipeline_model.modules, mesh)]
    return use, before, gradients, _join_slices(gather_objects(weights_key(trainer), mesh.world))


def weights_key(trainer: Trainer) -> Gathered:
    return _slices([(slot.shard, slot.weight) for slot in trainer.optimizer.slots])


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("push", "top_k"),
    [([0.0, 90.0, 0.0, 0.0], 1), ([90.0, 90.0, 0.0, 0.0], 2)],
    ids=["one expert", "one rank"],
)
def test_experts_and_ranks_without_tokens_are_unchanged(
    dispatcher: Any, push: list[float], top_k: int
) -> None:
    router = RouterConfig(score="softmax", norm_topk_prob=top_k > 1, bias=True)
    moe = MoEConfig(num_experts=4, top_k=top_k, ffn_hidden_size=10, router=router)
    model = replace(BIASED_CHOICE, num_layers=2, moe=moe)
    layout = ParallelConfig(dp=2, ep=2, dispatcher=dispatcher)
    use, before, gradients, after = on_ranks(pushed, case_of(model, layout), push)
    _, _, expected, reached = on_ranks(pushed, case_of(model, ONE), push)
    chosen = [value > 0 for value in push]
    assert [[count > 0 for count in counts] for counts in use] == [chosen] * 2
    assert_close(_assemble(after), _assemble(reached), FP64)
    for name in ("layers.0.moe.experts.gate_up", "layers.1.moe.experts.down"):
        assert [bool(part.any()) for part in _assemble(gradients)[name]] == chosen
        assert torch.allclose(
            _assemble(gradients)[name], _assemble(expected)[name], rtol=1e-9, atol=0
        )
        moved = (_assemble(after)[name] != _assemble(before)[name]).flatten(1).any(1)
        assert moved.tolist() == chosen


# --- balance is learned


@dataclass(frozen=True)
class Skewed:
    """Rows in which few tokens are frequent."""

    num_samples: int = 12 * 200
    fingerprint: str = "skewed"

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        draw = np.random.default_rng(k)
        share = 1 / np.arange(4, 65)
        ids = draw.choice(61, 25, p=share / share.sum())
        return Sample(ids, 25)


def violation(balance: AuxLossConfig, router: RouterConfig) -> float:
    """Tokens of the busiest expert over the mean, less 1, over the last 20 of 200 steps
    and the worst layer."""
    moe = MoEConfig(num_experts=8, ffn_hidden_size=10, aux_loss=balance, router=router)
    model = replace(BIASED_CHOICE, num_layers=2, moe=moe, init_std=0.2)
    case = layout_case(model, ONE, 1, micro_batch_size=12, seq_len=24)
    run = replace(case.run, precision=PrecisionConfig(params="fp32"))
    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    loader = Loader(
        Skewed(),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=12),
        trainer.mesh.dp,
        consumed=0,
        steps=200,
        device=CPU,
    )
    total = torch.zeros(2, 8)
    for step in range(200):
        train_step(trainer, loader.next(), lr=3e-3, weight_decay=0.0)
        if step >= 180:
            total += torch.tensor(
                [
                    use.counts
                    for use in collect_expert_load(trainer.pipeline_model.modules, trainer.mesh)
                ]
            )
    return float((total.amax(1) / total.mean(1) - 1).max())


@pytest.mark.slow
def test_each_balancing_method_balances_expert_load() -> None:
    """Of Wang et al. 2024 (arXiv:2408.15664), MaxVio."""
    plain = RouterConfig(score="sigmoid")
    assert violation(AuxLossConfig(), plain) > 0.5
    assert violation(AuxLossConfig(batch_coeff=0.1), plain) < 0.5
    assert (
        violation(AuxLossConfig(), replace(plain, expert_bias=True, expert_bias_update_rate=0.01))
        < 0.5
    )
    assert violation(AuxLossConfig(quantile=True, quantile_ema=0.9), plain) < 0.5

"""One step: the mean over the global batch however it is cut, clipping, updates, and what is not
finite."""

from collections.abc import Sequence
from dataclasses import replace
from shutil import which

import pytest
import torch
from torch import Tensor, nn

from megalith.data.loader import BatchSettings, Loader, StepBatches
from megalith.errors import DataError
from megalith.models.decoder import iter_parameter_specs
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import EXACT, FP32_DEEP, FP64, assert_close
from megalith.train.step import (
    StepHooks,
    StepRequest,
    StepResult,
    Trainer,
    resolve_requests,
    train_step,
)
from megalith.train.trainer import build_trainer, checkpoint_entries
from megalith.verify.ranks import RaggedRows

CPU = torch.device("cpu")
LR, DECAY = 1e-2, 0.1


def build(**settings: str) -> Trainer:
    """The tiny run's trainer, with settings written with __ for the dot."""
    return build_trainer(
        tiny_run({name.replace("__", "."): value for name, value in settings.items()}),
        build_single_rank_mesh(),
        CPU,
    )


def loader(trainer: Trainer, *, steps: int, masked: tuple[int, ...] = (1, 5)) -> Loader:
    """Rows with uneven numbers of labels, some with none."""
    train = trainer.run.train
    rows = RaggedRows(train.seq_len, trainer.run.model.vocab_size, 12 * steps, masked)
    return Loader(
        rows,
        BatchSettings(
            batch_schedule=constant_batch_size(train.global_batch_size),
            micro_batch_size=train.micro_batch_size,
        ),
        build_single_rank_mesh().dp,
        consumed=0,
        steps=steps,
        device=CPU,
    )


def run_steps(trainer: Trainer, steps: int) -> list[StepResult]:
    """Some steps on the same rows for world_group."""
    batches = loader(trainer, steps=steps)
    return [train_step(trainer, batches.next(), lr=LR, weight_decay=DECAY) for _ in range(steps)]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the master weights, by name."""
    return {slot.shard.name: slot.master.detach().clone() for slot in trainer.optimizer.slots}


@pytest.mark.parametrize("rows", [1, 3, 4, 12])
def test_microbatches_of_any_size_give_the_same_loss_and_weights(rows: int) -> None:
    one, many = (
        build(precision__params="fp64"),
        build(precision__params="fp64", train__micro_batch_size=str(rows)),
    )
    expected, result = run_steps(one, 3), run_steps(many, 3)
    for actual, reference in zip(result, expected, strict=True):
        assert actual.loss == pytest.approx(reference.loss, rel=FP64.relative)
        assert actual.grad_norm == pytest.approx(reference.grad_norm, rel=FP64.relative)
    assert_close(weights(many), weights(one), FP64)


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])  # off, below every norm, above every norm
def test_step_matches_mean_loss_clipped_gradient_and_adamw(clip: float) -> None:
    """Against plain autograd on all rows at once, torch's own clipping and its own AdamW."""
    settings = {"precision__params": "fp64", "optim__clip_grad": str(clip), "optim__eps": "1e-3"}
    ours, plain = build(**settings), build(**settings, train__micro_batch_size="12")
    results = run_steps(ours, 2)
    model = plain.model
    for module in model.modules():
        if hasattr(module, "grad_accumulator"):
            module.grad_accumulator = None  # gradients to autograd's own `.grad`
    named = {
        declared.shard: torch.nn.Parameter(getattr(module, name).detach().clone())
        for declared, module, name in iter_parameter_specs(model)
    }
    for declared, module, name in iter_parameter_specs(model):
        setattr(module, name, named[declared.shard])
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for shard, p in named.items() if shard.inputs > 0],
                "weight_decay": DECAY,
            },
            {"params": [p for shard, p in named.items() if shard.inputs == 0], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-3,
    )
    batches = loader(plain, steps=2)
    for result in results:
        step = batches.next()
        (batch,) = step.microbatches
        loss = model.loss(batch.ids, batch.labels, batch.layer_inputs()) / int(
            (batch.labels >= 0).sum()
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(named.values()), clip or float("inf"))
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), rel=FP64.relative)
        assert result.grad_norm == pytest.approx(norm.item(), rel=FP64.relative)
        assert (norm > clip) == (clip < 100)
    assert_close(weights(ours), {shard.name: p.detach() for shard, p in named.items()}, FP64)


@pytest.mark.parametrize("params", ["fp32", "bf16", "fp64", "fp16"])
def test_the_loss_falls_in_every_precision(params: str) -> None:
    trainer = build(precision__params=params, precision__loss_scale__initial="65536")
    step = loader(trainer, steps=1).next()
    losses = [train_step(trainer, step, lr=LR, weight_decay=DECAY).loss for _ in range(8)]
    assert losses[-1] < 0.85 * losses[0]
    for slot in trainer.optimizer.slots:
        assert torch.equal(slot.weight, slot.master.to(slot.weight.dtype))


def test_bf16_stays_close_to_fp32() -> None:
    half, full = build(precision__params="bf16"), build()
    for actual, reference in zip(run_steps(half, 4), run_steps(full, 4), strict=True):
        assert actual.loss == pytest.approx(reference.loss, rel=1e-3)
        assert actual.grad_norm == pytest.approx(reference.grad_norm, rel=2e-2)


def planted_nan(trainer: Trainer) -> None:
    """One weight of the second layer becomes NaN."""
    name = "layers.1.mlp.down"
    (slot,) = [slot for slot in trainer.optimizer.slots if slot.shard.name == name]
    slot.weight.view(-1)[3] = float("nan")


def test_nonfinite_step_changes_nothing() -> None:
    trainer = build()
    run_steps(trainer, 1)
    planted_nan(trainer)
    before, moments = (
        weights(trainer),
        [slot.state["exp_avg"].clone() for slot in trainer.optimizer.slots],
    )
    (result,) = run_steps(trainer, 1)
    assert not result.updated
    assert result.grad_norm != result.grad_norm
    assert_close(weights(trainer), before, EXACT)
    assert all(
        torch.equal(slot.state["exp_avg"], old)
        for slot, old in zip(trainer.optimizer.slots, moments, strict=True)
    )
    assert trainer.optimizer.updates == 1


def test_a_step_that_is_not_finite_can_end_the_run_and_names_the_gradients() -> None:
    trainer = build(optim__nonfinite_grad="raise")
    planted_nan(trainer)
    with pytest.raises(DataError) as caught:
        run_steps(trainer, 1)
    text = str(caught.value)
    assert text.startswith("gradient norm nan: not finite in embed.weight, ")
    assert text.endswith(
        "on rank 0. Reduce schedule.lr, check the data, or set optim.nonfinite_grad=skip."
    )


def test_fp16_overflow_changes_no_weight_and_lowers_the_scale() -> None:
    trainer = build(
        precision__params="fp16",
        precision__loss_scale__initial=str(2.0**40),
        precision__loss_scale__hysteresis="1",
    )
    before = {entry.key: entry.tensor.clone() for entry in checkpoint_entries(trainer)}
    (result,) = run_steps(trainer, 1)
    assert not result.updated
    assert trainer.loss_scale is not None
    assert trainer.loss_scale.scale == 2.0**39
    assert_close({entry.key: entry.tensor for entry in checkpoint_entries(trainer)}, before, EXACT)
    assert trainer.optimizer.updates == 0


@pytest.mark.parametrize("clip", ["0", "0.05"])
def test_loss_scale_does_not_affect_norm_and_update(clip: str) -> None:
    """A power of two changes no digit of what neither overflows nor vanishes; so does one that is
    taken out again."""
    small, large, none = (
        build(precision__params=params, optim__clip_grad=clip, **scale)
        for params, scale in (
            ("fp16", {"precision__loss_scale__constant": "1024"}),
            ("fp16", {"precision__loss_scale__constant": "4096"}),
            ("fp32", {}),
        )
    )
    results = [run_steps(trainer, 4) for trainer in (small, large, none)]
    for one, two, plain in zip(*results, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-3)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert one.loss == pytest.approx(plain.loss, rel=5e-3)
        assert one.grad_norm == pytest.approx(plain.grad_norm, rel=2e-2)


def _blame(rank: int, world: int, zero: str) -> str:
    """The error of a step in which one weight of the last rank is NaN."""
    run = tiny_run({"optim.nonfinite_grad": "raise", "parallel.zero": zero})
    trainer = build_trainer(
        run, build_mesh(model_grid(run.parallel, run.model, world), rank=rank), CPU
    )
    if rank == world - 1:
        # its row of the norm after the layers: what lies before it becomes NaN, on this rank only
        (norm,) = [
            module.weight for name, module in trainer.model.named_modules() if name == "norm"
        ]
        norm.data[3] = float("nan")
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 12, ())
    batches = Loader(
        rows,
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=2),
        trainer.mesh.dp,
        consumed=0,
        steps=1,
        device=CPU,
    )
    try:
        train_step(trainer, batches.next(), lr=LR, weight_decay=DECAY)
    except DataError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("zero", ["0", "1", "2"])
def test_all_ranks_name_the_rank_and_the_parameters_where_a_gradient_was_not_finite_first(
    zero: str,
) -> None:
    texts = run_ranks(_blame, 3, zero)
    assert len(set(texts)) == 1
    assert texts[0].startswith("gradient norm nan: not finite in embed.weight, layers.0.attention")
    assert "on rank 2. Reduce schedule.lr" in texts[0]
    assert "rank 0" not in texts[0] and "rank 1" not in texts[0]


def test_batch_without_labels_does_not_apply_momentum_or_decay() -> None:
    trainer = build()
    steps = loader(trainer, steps=2, masked=tuple(range(12, 24)))
    assert train_step(trainer, steps.next(), lr=LR, weight_decay=DECAY).updated
    before = weights(trainer)
    step = steps.next()
    assert step.num_labels == 0
    result = train_step(trainer, step, lr=LR, weight_decay=DECAY)
    assert (result.loss, result.grad_norm, result.updated, result.empty) == (0.0, 0.0, False, True)
    assert_close(weights(trainer), before, EXACT)


def test_batch_without_labels_does_not_change_loss_scale() -> None:
    """No gradient could have overflown, so it is no reason to try a larger scale."""
    trainer = build(
        precision__params="fp16",
        precision__loss_scale__window="2",
        precision__loss_scale__initial="1024",
    )
    steps = loader(trainer, steps=3, masked=tuple(range(12, 24)))
    assert trainer.loss_scale is not None
    reported = []
    for _ in range(3):
        train_step(trainer, steps.next(), lr=LR, weight_decay=DECAY)
        reported.append((trainer.loss_scale.growth_tracker, trainer.loss_scale.scale))
    first = reported[0][1]
    assert reported == [(1, first), (1, first), (0, 2 * first)]


class _Requesting(StepHooks):
    """Requests given actions in every step."""

    def __init__(self, requests: StepRequest) -> None:
        self.requests = requests

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest:
        return self.requests


@pytest.mark.parametrize("requests", [StepRequest.NONE, StepRequest.SAVE | StepRequest.STOP])
def test_requests_of_a_rank_are_returned_by_the_step(requests: StepRequest) -> None:
    trainer = build()
    batches = loader(trainer, steps=1).next()
    result = train_step(trainer, batches, lr=LR, weight_decay=DECAY, hooks=_Requesting(requests))
    assert result.requests == requests
    assert result.updated


def test_later_request_in_the_order_wins_if_requests_exclude_each_other() -> None:
    none, evaluate, save = StepRequest.NONE, StepRequest.EVALUATE, StepRequest.SAVE
    skip, rerun, rollback = StepRequest.SKIP, StepRequest.RERUN, StepRequest.ROLLBACK
    stop, stop_now = StepRequest.STOP, StepRequest.STOP_NOW
    assert resolve_requests(none) == none
    assert resolve_requests(evaluate | save | skip | stop) == evaluate | save | skip | stop
    assert resolve_requests(evaluate | skip | rerun) == evaluate | rerun
    assert resolve_requests(save | skip | rerun | rollback) == rollback
    assert resolve_requests(rerun | rollback | stop) == stop
    assert resolve_requests(~none) == stop_now


def test_weight_updates_are_applied_in_order_after_the_optimizer() -> None:
    """Clipping rows to a norm, as QK-clip does, beside an update that only records."""
    seen: list[float] = []

    def clip(model: nn.ModuleList, mesh: Mesh) -> None:
        for name, parameter in model.named_parameters():
            if "attention.q" in name:
                parameter.data.clamp_(-0.01, 0.01)

    def record(model: nn.ModuleList, mesh: Mesh) -> None:
        seen.extend(
            float(parameter.detach().abs().max())
            for name, parameter in model.named_parameters()
            if "attention.q" in name
        )

    trainer = replace(build(), weight_updates=(clip, record))
    train_step(trainer, loader(trainer, steps=1).next(), lr=LR, weight_decay=DECAY)
    assert seen
    assert max(seen) <= 0.01


def gradients(trainer: Trainer, step: StepBatches) -> dict[str, Tensor]:
    """Of one step, as applied."""
    train_step(trainer, step, lr=LR, weight_decay=DECAY)
    return {param.shard.name: param.gradient.clone() for param in trainer.data.local_params}


@pytest.mark.slow  # the compiler takes half a minute
@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="needs a C++ compiler: torch.compile"
)
@pytest.mark.skipif(
    " " in torch.__file__, reason="torch.compile does not quote its own folder for the linker"
)
def test_compiled_layers_match_eager_layers() -> None:
    eager, compiled = build(), build(train__compile="true")
    step = loader(eager, steps=1).next()
    expected, result = gradients(eager, step), gradients(compiled, step)
    assert_close(result, expected, FP32_DEEP)


def test_mtp_losses_are_reported_separately_and_trained_on() -> None:
    plain, deep = (
        build(precision__params="fp64"),
        build(precision__params="fp64", model__mtp__num_layers="2"),
    )
    (first,) = run_steps(plain, 1)
    batches = Loader(
        RaggedRows(12, deep.run.model.vocab_size, 36, (1, 5)),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=4, num_mtp_layers=2),
        build_single_rank_mesh().dp,
        consumed=0,
        steps=3,
        device=CPU,
    )
    results = [train_step(deep, batches.next(), lr=LR, weight_decay=DECAY) for _ in range(3)]
    assert first.other_losses == {} and results[0].loss == pytest.approx(
        first.loss, rel=FP64.relative
    )
    assert results[0].grad_norm > first.grad_norm
    for before, after in zip(
        *(result.other_losses.values() for result in results[::2]), strict=True
    ):
        assert 0.0 < after < before

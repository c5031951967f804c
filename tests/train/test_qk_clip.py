"""QK-clip and the largest attention scores in training steps of one process."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.config.model import CrossConfig, MLAConfig, ModelConfig, MTPConfig
from megalith.config.optim import QkClipConfig
from megalith.config.parallel import RecomputeConfig
from megalith.config.train import EMAConfig
from megalith.kernels.attention.scores import MaxScores
from megalith.observe.metrics import read_metrics
from megalith.optim import qk_clip
from megalith.optim.slots import OptimizerSlot
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.qk_clip import ScaledPart, list_attentions
from megalith.testing.inject import patched
from megalith.testing.tiny import tiny_run
from megalith.train.attention_scores import ScoreMonitor
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepHooks, StepRequest, StepResult, StepStats, Trainer, train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import _loader as loader_of
from tests.cases import loop_over

TINY = tiny_run().model
LATENT = MLAConfig(kv_rank=7, nope_dim=5, rope_dim=4, value_dim=3)
DEFAULT = QkClipConfig()
SMALL = {"train.global_batch_size": "4"}  # two microbatches
MODELS: dict[str, ModelConfig] = {
    "grouped queries": replace(TINY, qkv_bias=True),
    "one head per key": replace(TINY, num_kv_heads=4, qkv_bias=True),
    "latent": replace(TINY, num_kv_heads=4, head_dim=None, mla=LATENT),
    "latent queries": replace(TINY, num_kv_heads=4, head_dim=None, mla=replace(LATENT, q_rank=6)),
    "cross-layer": replace(TINY, cross=CrossConfig(memory=1)),
    "mtp": replace(TINY, mtp=MTPConfig(num_layers=1)),
}


def build(
    model: ModelConfig,
    *,
    clip: QkClipConfig | None = DEFAULT,
    logs: bool = True,
) -> Trainer:
    run = tiny_run(SMALL | {"precision.params": "fp64"})
    run = replace(
        run,
        model=model,
        optim=replace(run.optim, qk_clip=clip),
        observe=replace(run.observe, max_attention_logit=logs),
    )
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    draw = torch.Generator().manual_seed(3)
    for slot in trainer.optimizer.slots:
        if slot.shard.name.endswith(("q_bias", "kv_bias")):
            slot.weight.copy_(0.05 * torch.randn(slot.weight.shape, generator=draw))
    return trainer


def run_steps(trainer: Trainer, *, steps: int = 1, lr: float = 0.0) -> list[StepResult]:
    """Run steps on the samples of the first steps of the run."""
    loader = loader_of(trainer.run, trainer.mesh, consumed=0, steps=steps)
    return [train_step(trainer, loader.next(), lr=lr, weight_decay=0.1) for _ in range(steps)]


@contextmanager
def recorded_scores() -> Iterator[list[list[float]]]:
    """Record the largest scores of all heads of all attention modules, one list per step."""
    steps: list[list[float]] = []
    receive = ScoreMonitor.receive

    def record(self: ScoreMonitor, values: list[float]) -> object:
        steps.append(values)
        return receive(self, values)

    with patched(ScoreMonitor, "receive", record):
        yield steps


@contextmanager
def counted_updates() -> Iterator[list[int]]:
    """Record the number of queries of every call that measures scores."""
    updates: list[int] = []
    update = MaxScores.update

    def count(self: MaxScores, row_max: Tensor) -> None:
        updates.append(len(row_max))
        update(self, row_max)

    with patched(MaxScores, "update", count):
        yield updates


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    return {
        slot.shard.name: slot.weight.detach().clone().view(slot.shard.shape)
        for slot in trainer.optimizer.slots
    }


def scale_head(trainer: Trainer, attention: str, head: int, factor: float) -> None:
    """Multiply the queries of one head."""
    for slot in trainer.optimizer.slots:
        if slot.shard.name in {f"{attention}.{word}" for word in ("q", "q_bias", "q_up")}:
            slot.weight.view(slot.shard.shape)[head] *= factor


def check_clipped_head(model: ModelConfig, number: int, head: int) -> None:
    """Scale a head so that its largest score is 400, and take a step at learning rate 0."""
    attention = list_attentions(model)[number]
    trainer = build(model)
    with recorded_scores() as steps:
        run_steps(trainer)
        place = number * 4 + head
        scale_head(trainer, attention.name, head, 400 / steps[0][place])
        before = weights_of(trainer)
        run_steps(trainer)
        after = weights_of(trainer)
        run_steps(trainer)
    _, scaled, clipped = steps
    assert scaled[place] == pytest.approx(400, rel=1e-9)
    assert clipped[place] == pytest.approx(100, rel=1e-6)
    shared = 4 // attention.num_kv_heads
    group = range(head // shared * shared, (head // shared + 1) * shared)
    for other in range(4):
        expected = scaled[number * 4 + other] * (0.25 if other in group else 1.0)
        assert clipped[number * 4 + other] == pytest.approx(expected, rel=1e-9)
    check_other_rows_unchanged(before, after, attention.name, set(group), head // shared)


def check_other_rows_unchanged(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    name: str,
    heads: set[int],
    group: int,
) -> None:
    """Other parameters, heads and values keep their bits; those of the head all change."""
    for key, old in before.items():
        is_changed = old != after[key]
        prefix, _, word = key.rpartition(".")
        if prefix != name or word not in ("q", "q_bias", "kv", "kv_bias", "q_up", "kv_up"):
            assert not is_changed.any(), key
            continue
        if word in ("kv", "kv_bias"):
            assert not is_changed[1].any() and bool(is_changed[0, group].all()), key
            is_changed = is_changed[0]
            others = [other for other in range(len(is_changed)) if other != group]
        else:
            others = [other for other in range(len(is_changed)) if other not in heads]
        assert not is_changed[others].any(), key
        if word == "kv_up":
            nope = LATENT.nope_dim
            assert bool(is_changed[group, :nope].all()) and not is_changed[group, nope:].any()
        elif word.startswith("q"):
            assert bool(is_changed[sorted(heads)].all()), key


@loop_over("name", MODELS)
def test_head_with_score_400_has_100_after_a_step(name: str) -> None:
    number = len(list_attentions(MODELS[name])) - 1
    check_clipped_head(MODELS[name], number, head=2)


def test_balance_divides_the_factor_between_queries_and_keys() -> None:
    for balance in (0.0, 0.3, 1.0):
        trainer = build(TINY, clip=QkClipConfig(threshold=0.01, balance=balance))
        before = weights_of(trainer)
        with recorded_scores() as steps:
            run_steps(trainer)
        after = weights_of(trainer)
        factor = 0.01 / max(steps[0][:2])
        for name, index, power in (("q", (0,), balance), ("kv", (0, 0), 1 - balance)):
            key = f"layers.0.attention.{name}"
            torch.testing.assert_close(after[key][index], before[key][index] * factor**power)


def test_scores_below_the_threshold_change_nothing() -> None:
    plain = build(TINY, clip=None, logs=False)
    clipped = build(TINY)
    results = [run_steps(trainer, steps=3, lr=1e-2) for trainer in (plain, clipped)]
    assert [each.loss for each in results[0]] == [each.loss for each in results[1]]
    assert all(each.largest_score is None for each in results[0])
    assert all(each.largest_score is not None for each in results[1])
    for old, new in zip(weights_of(plain).values(), weights_of(clipped).values(), strict=True):
        assert torch.equal(old, new)


def test_nothing_is_computed_in_steps_that_do_not_need_scores() -> None:
    with counted_updates() as updates:
        run_steps(build(TINY, clip=None, logs=False), steps=2)
        assert updates == []
        trainer = build(TINY, clip=QkClipConfig(every=3), logs=False)
        counts = []
        for _ in range(6):
            run_steps(trainer)
            counts.append(len(updates))
        assert counts == [0, 0, 4, 4, 4, 8]  # layers times microbatches
        trainer = build(TINY)
        batches = loader_of(trainer.run, trainer.mesh, consumed=0, steps=1).next()
        trainer.pipeline_model.forward(batches.microbatches)
        assert len(updates) == 8


class Skip(StepHooks):
    """Requests that every step is skipped."""

    def before_update(self, stats: StepStats) -> StepRequest:
        return StepRequest.SKIP


def test_skipped_step_does_not_clip() -> None:
    trainer = build(TINY, clip=QkClipConfig(threshold=0.01))
    before = weights_of(trainer)
    batches = loader_of(trainer.run, trainer.mesh, consumed=0, steps=1).next()
    result = train_step(trainer, batches, lr=0.0, weight_decay=0.0, hooks=Skip())
    assert not result.updated and result.largest_score is not None
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_scores_of_a_skipped_step_are_not_applied_after_a_rollback() -> None:
    trainer = build(TINY, clip=QkClipConfig(threshold=0.01, every=2), logs=False)
    trainer.optimizer.set_updates(1)
    batches = loader_of(trainer.run, trainer.mesh, consumed=0, steps=1).next()
    skipped = train_step(trainer, batches, lr=0.0, weight_decay=0.0, hooks=Skip())
    assert skipped.largest_score is not None
    trainer.optimizer.set_updates(0)  # as the rollback to an earlier checkpoint does
    before = weights_of(trainer)
    result = train_step(trainer, batches, lr=0.0, weight_decay=0.0)
    assert result.updated and result.largest_score is None
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


RECOMPUTED = {
    "full": RecomputeConfig(granularity="full"),
    "selective": RecomputeConfig(granularity="selective"),
    "checked": RecomputeConfig(granularity="full", check=True),
}


@loop_over("kind", RECOMPUTED)
def test_recomputation_does_not_record_scores_again(kind: str) -> None:
    for model, modules in ((TINY, ()), (MODELS["latent"], ("mla_up_proj",))):
        plain = build(model)
        recompute = RECOMPUTED[kind]
        if kind == "selective" and modules:
            recompute = replace(recompute, modules=modules)
        run = replace(plain.run, recompute=recompute)
        recomputed = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
        with counted_updates() as updates:
            results = run_steps(recomputed)
        assert len(updates) == 2 * 2  # layers times microbatches
        assert results[0].largest_score == run_steps(plain)[0].largest_score


def test_moving_average_includes_the_clipped_weights() -> None:
    run = tiny_run(SMALL | {"precision.params": "fp64"})
    run = replace(
        run,
        optim=replace(run.optim, qk_clip=QkClipConfig(threshold=0.01)),
        train=replace(run.train, ema=EMAConfig(decay=0.0, start_step=1)),
    )
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    run_steps(trainer, steps=2)
    assert trainer.ema is not None
    for slot, average in zip(trainer.optimizer.slots, trainer.ema.averages, strict=True):
        assert torch.equal(slot.master, average), slot.shard.name


def find_unscaled(trainer: Trainer) -> list[str]:
    """Return the parameters whose weights are not the rounded master weights."""
    return [
        slot.shard.name
        for slot in trainer.optimizer.slots
        if not torch.equal(slot.master.to(slot.weight.dtype), slot.weight)
    ]


def clipped_steps() -> tuple[Trainer, list[float]]:
    """Return a run in bf16, and the largest scores of three steps on the same samples."""
    run = tiny_run(SMALL | {"precision.params": "bf16"})
    clip = QkClipConfig(threshold=0.01)
    run = replace(run, optim=replace(run.optim, qk_clip=clip))
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    results = [result for _ in range(3) for result in run_steps(trainer)]
    return trainer, [each.largest_score.score for each in results if each.largest_score is not None]


def test_master_weights_and_weights_are_both_scaled() -> None:
    trainer, scores = clipped_steps()
    assert not find_unscaled(trainer)
    assert len(scores) == 3 and scores[0] > 0.03 and max(scores[1:]) < 0.0101


def test_planted_fault_of_clipping_only_weights_is_rejected() -> None:
    def scale_weight(slot: OptimizerSlot, parts: Sequence[ScaledPart]) -> None:
        sizes = [part.numel for part in parts]
        for part, weight in zip(parts, slot.weight.view(-1).split(sizes), strict=True):
            weight.view(part.shape).mul_(torch.from_numpy(part.factors.copy()))

    with patched(qk_clip, "scale_slot", scale_weight):
        trainer, scores = clipped_steps()
    assert find_unscaled(trainer)
    assert scores[1] < 0.0101
    assert scores[2] > 0.03  # the second update restored the weights from the master weights


def test_planted_fault_of_clipping_only_master_weights_is_rejected() -> None:
    def scale_master(slot: OptimizerSlot, parts: Sequence[ScaledPart]) -> None:
        weight = slot.weight.clone()
        scale_slot(slot, parts)
        slot.weight.copy_(weight)

    scale_slot = qk_clip.scale_slot
    with patched(qk_clip, "scale_slot", scale_master):
        trainer, _ = clipped_steps()
    assert find_unscaled(trainer)


def test_updates_count_the_steps_between_clips_across_a_resume() -> None:
    trainer = build(TINY, clip=QkClipConfig(threshold=0.01, every=2), logs=False)
    assert [each.largest_score is not None for each in run_steps(trainer, steps=3)] == [
        False,
        True,
        False,
    ]
    resumed = build(TINY, clip=QkClipConfig(threshold=0.01, every=2), logs=False)
    resumed.optimizer.set_updates(3)
    assert run_steps(resumed)[0].largest_score is not None


def test_infinite_scores_are_not_clipped() -> None:
    trainer = build(TINY, clip=QkClipConfig(threshold=0.01))
    monitor = trainer.score_monitor
    assert monitor is not None and monitor.clip is not None
    before = weights_of(trainer)
    monitor.receive([math.inf, -math.inf] * 4)
    monitor.clip.apply()
    after = weights_of(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_largest_score_is_logged_with_layer_and_head(tmp_path: Path) -> None:
    short = {"train.steps": "2", "train.eval_steps": "0", "observe.max_attention_logit": "true"}
    run = tiny_run(SMALL | short)
    run_training(
        run, RunFolder(tmp_path), build_single_rank_mesh(), torch.device("cpu"), show=False
    )
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert 0.01 < row["max_attention_logit"] < 0.1
        assert row["max_attention_logit_layer"] in ("layers.0.attention", "layers.1.attention")
        assert row["max_attention_logit_head"] in range(4)

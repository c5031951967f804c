"""Requests of callbacks to skip, rerun, roll back and stop, made on one of two ranks."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.load import find_latest, open_checkpoint
from megalith.config.train import TrainRun
from megalith.data.loader import Loader, StepBatches
from megalith.errors import CallbackError
from megalith.observe.metrics import read_metrics
from megalith.parallel import group
from megalith.parallel.grad_sync import ShardedParam, byte_checksum
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.resume import PreparedRun
from megalith.train.run_folder import RunFolder
from megalith.train.step import MAX_RERUNS, StepRequest, StepStats

CPU = torch.device("cpu")
SKIP, RERUN, ROLLBACK = StepRequest.SKIP, StepRequest.RERUN, StepRequest.ROLLBACK
STOP, STOP_NOW = StepRequest.STOP, StepRequest.STOP_NOW

BASE = {"train.eval_steps": "0", "checkpoint.every": "2", "checkpoint.keep": "none"}
DP = {"parallel.dp": "2"}
FP16 = {"precision.params": "fp16", "precision.loss_scale.initial": "4096"}
EXPERTS = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "10",
    "model.moe.router.expert_bias": "true",
    "parallel.ep": "2",
}
LAYOUTS: dict[str, dict[str, str]] = {
    "tp": {"parallel.tp": "2"},
    "zero1_fp16": DP | FP16 | {"parallel.zero": "1", "precision.loss_scale.window": "3"},
    "zero3": DP | {"parallel.zero": "3"},
    "pp_mtp": {"parallel.pp": "2", "model.mtp.num_layers": "1", "optim.count_zeros": "true"},
    "experts": DP | EXPERTS,
}


def layouts(*names: str) -> list[Any]:
    """All layouts; those that are not named run in `make test-all` only."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.slow) for name in LAYOUTS]


@dataclasses.dataclass
class Plan:
    """What a callback does at which step: requests by event, on one rank or on all."""

    step: int = 0
    rank: int = 1
    after_backward: StepRequest = StepRequest.NONE
    before_update: StepRequest = StepRequest.NONE
    perturb: bool = False
    """Change a gradient of the first run of the step, as a faulty machine does."""
    every_time: bool = False
    """Request again in reruns and after rollbacks."""
    error: bool = False
    other: StepRequest = StepRequest.NONE
    """Requested by the other rank."""
    stop: int = 0
    """Step after which the run stops, once the plan is carried out."""
    stop_now: int = 0
    """The same, without this step."""


class Requesting(Callback):
    """Requests what its plan says, and records what it sees."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.requested = plan, False
        self.stats: list[tuple[int, StepStats]] = []
        self.weights: list[int] = []
        self.microbatches: list[int] = []
        self.rollbacks: list[int] = []

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: StepBatches) -> None:
        self.step = step
        self.microbatches.clear()

    def after_microbatch(self, index: int) -> None:
        self.microbatches.append(index)

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest | None:
        plan, rank = self.plan, self.run.mesh.world.rank
        if self.requested and self.step in (plan.stop, plan.stop_now):
            return STOP if plan.stop else STOP_NOW
        if self.step < plan.step or not plan.step or (self.requested and not plan.every_time):
            return None
        self.requested = True
        if rank != plan.rank:
            return plan.other
        if plan.perturb:
            local_params[0].gradient.view(-1)[0] += 1
        return plan.after_backward

    def before_update(self, stats: StepStats) -> StepRequest | None:
        self.stats.append((self.step, stats))
        if self.step != self.plan.step:
            return None
        if self.plan.error and self.run.mesh.world.rank == self.plan.rank:
            raise ZeroDivisionError("planted")
        differs = self.plan.rank < 0 and self.run.mesh.world.rank == 1
        again = stats.num_reruns > 0 and not self.plan.every_time
        return None if again or differs else self.plan.before_update

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        params = self.run.local_params
        self.run.prepared.trainer.data.wait_params()
        self.weights.append(byte_checksum([param.weight for param in params]))

    def after_rollback(self, step: int) -> None:
        self.rollbacks.append(step)
        self.weights = self.weights[:step]


@dataclasses.dataclass
class Report:
    """What one rank of a run reports."""

    outcome: Outcome
    weights: list[int]
    stats: list[tuple[int, StepStats]]
    rollbacks: list[int]
    microbatches: list[int]
    loss_scale: Any


def _train_rank(
    rank: int, world: int, run: TrainRun, path: Path, plan: Plan
) -> Report | tuple[str, str]:
    """Train on one rank; return its report, or the error and its notes."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callback = Requesting(plan)
    try:
        outcome = run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[callback])
    except CallbackError as error:
        return "CallbackError", str(error)
    except ZeroDivisionError as error:
        return "ZeroDivisionError", "\n".join(error.__notes__)
    scale = callback.run.prepared.trainer.loss_scale
    return Report(
        outcome,
        callback.weights,
        callback.stats,
        callback.rollbacks,
        callback.microbatches,
        None if scale is None else scale.as_json(),
    )


def train(settings: Mapping[str, str], path: Path, plan: Plan | None = None) -> list[Report]:
    """Train on two ranks with a callback that follows a plan."""
    reports = run_ranks(_train_rank, 2, tiny_run(BASE | settings), path, plan or Plan())
    assert all(isinstance(report, Report) for report in reports), reports
    return reports


def saved_state(path: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint of a run."""
    newest = find_latest(path / "checkpoints")
    assert newest is not None
    return open_checkpoint(newest).state


@pytest.mark.parametrize("layout", layouts("zero1_fp16", "pp_mtp"))
def test_skip_on_one_rank_skips_the_update_on_all_ranks(tmp_path: Path, layout: str) -> None:
    for report in train(LAYOUTS[layout], tmp_path, Plan(3, after_backward=SKIP)):
        weights = report.weights
        assert len(weights) == 8
        assert [a == b for a, b in pairwise(weights)] == [False, True] + [False] * 5
    state = saved_state(tmp_path)["train"]
    assert (state["step"], state["consumed_samples"]) == (8, 96)
    assert (state["scheduled_samples"], state["skipped"], state["skipped_in_a_row"]) == (84, 1, 0)
    assert (
        "step 3: skip, requested by callback Requesting (rank 1)"
        in (tmp_path / "log.txt").read_text()
    )


@pytest.mark.parametrize("layout", layouts("zero3", "experts"))
def test_rerun_repeats_the_step_bitwise_and_changes_nothing(tmp_path: Path, layout: str) -> None:
    clean = train(LAYOUTS[layout], tmp_path / "clean")
    rerun = train(LAYOUTS[layout], tmp_path / "rerun", Plan(3, after_backward=RERUN))
    for one, other in zip(clean, rerun, strict=True):
        assert other.weights == one.weights
        assert other.loss_scale == one.loss_scale
        seen = [stats for step, stats in other.stats if step == 3]
        assert [stats.num_reruns for stats in seen] == [0, 1]
        assert dataclasses.replace(seen[1], num_reruns=0) == seen[0]
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("clean", "rerun")
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("layout", ["tp", "zero3"])
def test_rerun_names_the_rank_whose_gradients_differ_and_uses_the_second_result(
    tmp_path: Path, layout: str
) -> None:
    clean = train(LAYOUTS[layout], tmp_path / "clean")
    plan = Plan(3, after_backward=RERUN, perturb=True)
    for one, other in zip(clean, train(LAYOUTS[layout], tmp_path / "rerun", plan), strict=True):
        first, second = (stats for step, stats in other.stats if step == 3)
        assert (first.differing_ranks, second.differing_ranks) == ((), (1,))
        assert first.grad_norm != second.grad_norm
        assert other.weights == one.weights


def _train_without_fifth_batch(
    rank: int, world: int, run: TrainRun, path: Path
) -> Report | tuple[str, str]:
    """Train on data that never contained the samples of step 5."""
    build, read = PreparedRun.build_loader, Loader.next
    num_steps = 0

    def next_without_fifth(loader: Loader) -> StepBatches:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            read(loader)
        return read(loader)

    def one_more_step(prepared: PreparedRun, *of_groups: Any) -> Loader:
        before = prepared.run
        prepared.run = dataclasses.replace(
            before, train=dataclasses.replace(before.train, steps=before.train.steps + 1)
        )
        loader = build(prepared, *of_groups)
        prepared.run = before
        return loader

    with patched(PreparedRun, "build_loader", one_more_step):
        with patched(Loader, "next", next_without_fifth):
            return _train_rank(rank, world, run, path, Plan())


@pytest.mark.parametrize("layout", layouts("zero3", "experts"))
def test_rollback_equals_a_run_without_the_skipped_samples(tmp_path: Path, layout: str) -> None:
    """The run also stops after the rollback and is resumed: the skipped samples stay skipped."""
    run = tiny_run(BASE | LAYOUTS[layout])
    clean = run_ranks(_train_without_fifth_batch, 2, run, tmp_path / "clean")
    path = tmp_path / "rolled_back"
    plan = Plan(5, after_backward=ROLLBACK, other=SKIP, stop=5)
    for report in train(LAYOUTS[layout], path, plan):
        assert report.rollbacks == [4]
        assert (report.outcome.kind, report.outcome.step) == ("stopped", 5)
    log = (path / "log.txt").read_text()
    assert "skip, requested by callback Requesting (rank 0), gives way to rollback" in log
    assert "step 5: rolled back to the checkpoint of step 4; continuing with sample 60" in log
    for report, reference in zip(train(LAYOUTS[layout], path), clean, strict=True):
        assert report.outcome == Outcome("done", 8)
        assert report.weights == reference.weights[5:]
        assert report.loss_scale == reference.loss_scale
    state, expected = saved_state(path), saved_state(tmp_path / "clean")
    assert state["rollbacks"] == [5]
    skipped = {"rollback": [[48, 60]], "steps": {}}
    assert state["train"] == expected["train"] | {
        "consumed_samples": 108,
        "skipped_samples": skipped,
    }
    assert [row["step"] for row in read_metrics(path / "metrics.jsonl")] == [*range(1, 9)]


def test_time_per_step_counts_the_steps_after_a_rollback(tmp_path: Path) -> None:
    settings = DP | {"train.log_every": "6", "train.steps": "6"}
    train(settings, tmp_path, Plan(6, after_backward=ROLLBACK))
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    tokens_per_step = row["tokens"] / 6
    assert row["step_ms"] * row["tokens_per_second"] / 1000 == pytest.approx(
        tokens_per_step, rel=0.01
    )


def test_skipped_samples_stay_skipped_if_the_run_is_killed_after_a_rollback(
    tmp_path: Path,
) -> None:
    path = tmp_path / "killed"
    (first, _) = train(DP, tmp_path / "complete", Plan(5, after_backward=ROLLBACK))
    plan = Plan(5, after_backward=ROLLBACK, stop_now=5)
    (killed, _) = train(DP, path, plan)
    assert killed.outcome == Outcome("stopped", 4, killed.outcome.reason, saved=True)
    (resumed, _) = train(DP, path)
    assert resumed.weights == first.weights[4:]


def test_stop_now_discards_the_step_and_does_not_save(tmp_path: Path) -> None:
    first, second = train(DP, tmp_path, Plan(4, after_backward=STOP_NOW, other=SKIP))
    for report in (first, second):
        assert (report.outcome.step, report.outcome.saved) == (3, False)
        assert len(report.weights) == 3
    assert second.outcome.reason == "requested by callback Requesting"
    assert saved_state(tmp_path)["train"]["step"] == 2
    assert [report.outcome.step for report in train(DP, tmp_path)] == [8, 8]


@pytest.mark.parametrize("layout", ["zero1_fp16", "zero3"])
def test_before_update_sees_equal_values_and_decides_about_the_step(
    tmp_path: Path, layout: str
) -> None:
    settings = LAYOUTS[layout] | {"parallel.check_collectives": str(layout == "zero1_fp16")}
    first, second = train(settings, tmp_path, Plan(3, before_update=SKIP))
    assert first.stats == second.stats
    assert [step for step, _ in first.stats] == [*range(1, 9)]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(stats.loss, stats.grad_norm) for _, stats in first.stats] == [
        (row["loss"], row["grad_norm"]) for row in rows
    ]
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert first.weights[1] == first.weights[2] != first.weights[3]


def test_skip_after_an_overflow_lowers_the_loss_scale(tmp_path: Path) -> None:
    """A requested skip does not hide overflows from loss scaling."""
    settings = DP | {"precision.params": "fp16", "precision.loss_scale.initial": "1e30"}
    clean, _ = train(settings | {"train.steps": "2"}, tmp_path / "clean")
    skip, _ = train(
        settings | {"train.steps": "2"}, tmp_path / "skip", Plan(1, after_backward=SKIP)
    )
    assert skip.loss_scale == clean.loss_scale
    assert skip.loss_scale["scale"] < 1e30


@pytest.mark.parametrize(
    ("plan", "settings", "messages"),
    [
        (
            Plan(3, after_backward=RERUN, every_time=True),
            {},
            [f"the step was rerun {MAX_RERUNS} times", "callback Requesting (rank 1)"],
        ),
        (
            Plan(3, after_backward=ROLLBACK, every_time=True),
            {},
            ["after 3 rollbacks in 1000 steps (from steps 3, 3, 3), and", "max_rollbacks=3"],
        ),
        (
            Plan(1, after_backward=ROLLBACK),
            {},
            ["has no checkpoint yet. Request a rollback only after the first save"],
        ),
        (
            Plan(3, after_backward=ROLLBACK),
            {"checkpoint.every": "0"},
            ["has no checkpoint yet. Set checkpoint.every to a number from 1 to 2"],
        ),
        (
            Plan(3, rank=-1, before_update=SKIP),
            {"parallel.check_collectives": "true"},
            ["callbacks request different actions in before_update", "none on rank 1"],
        ),
    ],
)
def test_misbehaving_callback_ends_the_run_on_all_ranks(
    tmp_path: Path, plan: Plan, settings: dict[str, str], messages: list[str]
) -> None:
    for report in run_ranks(_train_rank, 2, tiny_run(BASE | DP | settings), tmp_path, plan):
        assert isinstance(report, tuple), report
        assert report[0] == "CallbackError"
        for message in messages:
            assert message in report[1]


def test_error_in_before_update_ends_the_run_and_names_callback_event_and_rank(
    tmp_path: Path,
) -> None:
    """The error is raised on rank 1 of a run without collectives after that point."""
    run = tiny_run(BASE | DP | {"train.steps": "3", "checkpoint.every": "0"})
    plan = Plan(3, rank=0, error=True)
    run = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, dp=1))
    ((kind, notes),) = run_ranks(_train_rank, 1, run, tmp_path, plan)
    assert kind == "ZeroDivisionError"
    assert "callback Requesting failed in before_update at step 3 on rank 0" in notes
    assert "Correct the callback, or run without it" in notes


def _count_collectives(rank: int, world: int, run: TrainRun, path: Path, plan: Plan) -> list[str]:
    """Train, with or without a callback that requests nothing; return the collectives."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    names: list[str] = []
    record = group.record_collective

    def note(on: group.Group, name: str, *tensors: torch.Tensor) -> object:
        names.append(name)
        return record(on, name, *tensors)

    callbacks = [Requesting(plan)] if plan.step else []
    with patched(group, "record_collective", note):
        run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)
    return names


def test_callbacks_that_request_nothing_add_no_collective(tmp_path: Path) -> None:
    run = tiny_run(BASE | DP | {"parallel.zero": "1"})
    without = run_ranks(_count_collectives, 2, run, tmp_path / "without", Plan())
    with_callback = run_ranks(_count_collectives, 2, run, tmp_path / "with", Plan(100))
    assert without == with_callback
    assert len(without[0]) > 8


@pytest.mark.parametrize(
    "settings",
    [
        DP,
        {"parallel.pp": "2"},
        {"parallel.pp": "2", "parallel.pipeline.schedule": "zb-h1"},
        {
            "parallel.pp": "2",
            "parallel.pipeline.schedule": "dualpipe-v",
            "parallel.pipeline.vpp": "2",
            "model.num_layers": "4",
        },
    ],
)
def test_after_microbatch_is_called_once_for_each_microbatch(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    for report in train(settings | {"train.steps": "1"}, tmp_path):
        assert sorted(report.microbatches) == [*range(12 // 2 // (2 if settings is DP else 1))]

"""Rollback to a checkpoint before the bad steps: the run equals one whose data never contained the
skipped samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint import commit
from megalith.checkpoint.load import find_latest, open_checkpoint
from megalith.checkpoint.manifest import folder_name
from megalith.config.train import TrainRun
from megalith.data.loader import Loader, StepBatches
from megalith.errors import CallbackError
from megalith.observe.metrics import read_metrics
from megalith.parallel.grad_sync import ShardedParam, byte_checksum
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import BatchSizeSchedule
from megalith.plan.grid import model_grid
from megalith.plan.rollback import (
    RollbackPlan,
    SkippedSamples,
    advance,
    count_read,
    plan_skipped_range,
)
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train import resume
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest, StepStats

CPU = torch.device("cpu")
BASE = {
    "train.eval_steps": "0",
    "train.steps": "9",
    "checkpoint.every": "2",
    "checkpoint.keep": "none",
    "fault_detector.rollback_steps": "3",
    "fault_detector.skip_samples_past_spike": "5",
}
SPIKE = RollbackPlan(7, 7, "loss spike")
"""Requested in step 8: the checkpoint of step 4 is restored, because that of step 6 is too recent,
and the samples of steps 5 to 8 are skipped: 5 samples past step 7 are a part of step 8."""

RAMP = {
    "train.batch_size_schedule": "[{size: 6}, {samples: 24, size: 12}, {samples: 72, size: 18}]",
    "train.global_batch_size": "18",
    "train.micro_batch_size": "1",
}
DROPOUT = {"model.dropout.residual": "0.1"}
FP16 = {"precision.params": "fp16", "precision.loss_scale.window": "3"}
PACKED = {"train.tokens_per_microbatch": "24", "data.overlong": "truncate"}


class Spike(Callback):
    """Requests a rollback once, on one rank, and records the weights after each step."""

    def __init__(self, plan: RollbackPlan | None, *, step: int = 8, stop: int = 0) -> None:
        self.plan, self.step, self.stop = plan, step, stop
        self.weights: dict[int, int] = {}

    def on_start(self, run: RunView) -> None:
        self.run = run

    def before_step(self, step: int, batches: StepBatches) -> None:
        is_last = self.run.mesh.world.rank == self.run.mesh.world.size - 1
        if self.plan is not None and step == self.step:
            plan, self.plan = self.plan, None
            if is_last:
                self.rollback_plan = plan
                self.run.request(StepRequest.ROLLBACK)
        elif self.plan is None and step == self.stop:
            self.run.request(StepRequest.STOP)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        self.run.prepared.trainer.data.wait_params()
        weights = [param.weight for param in self.run.local_params]
        self.weights[finished.step] = byte_checksum(weights)


class WithoutSamples:
    """A dataset that never contained some samples."""

    def __init__(self, dataset: Any, first: int, end: int) -> None:
        self.dataset, self.first, self.end = dataset, first, end
        self.num_samples = dataset.num_samples - (end - first)
        self.fingerprint = dataset.fingerprint
        if hasattr(dataset, "document_lengths"):
            self.document_lengths = lambda k: dataset.document_lengths(self.locate(k))

    def __len__(self) -> int:
        return self.num_samples

    def locate(self, k: int) -> int:
        return k if k < self.first else k + self.end - self.first

    def sample(self, k: int) -> Any:
        return self.dataset.sample(self.locate(k))


def train_as_rank(
    rank: int,
    world: int,
    run: TrainRun,
    path: Path,
    callbacks: Sequence[Spike],
    without: tuple[int, int] | None = None,
) -> dict[int, int]:
    """Train on one rank, several times in a row; return the weights after each step."""

    def build(dataset: Any, *args: Any, **settings: Any) -> Loader:
        assert without is not None
        return Loader(WithoutSamples(dataset, *without), *args, **settings)

    grid = model_grid(run.parallel, run.model, world)
    mesh = build_mesh(grid, rank=rank) if world > 1 else build_single_rank_mesh()
    weights: dict[int, int] = {}
    with patched(resume, "Loader", build if without else Loader):
        for callback in callbacks:
            run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[callback])
            weights |= callback.weights
    return weights


def train(
    settings: Mapping[str, str],
    path: Path,
    *callbacks: Spike,
    world: int = 1,
    without: tuple[int, int] | None = None,
) -> list[dict[int, int]]:
    """Train on some ranks, once per callback."""
    run = tiny_run(BASE | settings | ({"parallel.dp": str(world)} if world > 1 else {}))
    callbacks = callbacks or (Spike(None),)
    if world == 1:
        return [train_as_rank(0, 1, run, path, callbacks, without)]
    return run_ranks(train_as_rank, world, run, path, callbacks, without)


def read_state(path: Path) -> dict[str, Any]:
    """Return the state in the newest checkpoint of a run."""
    newest = find_latest(path / "checkpoints")
    assert newest is not None
    return open_checkpoint(newest).state


def read_skipped(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "skipped.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("settings", "world", "samples"),
    [
        ({}, 1, (48, 96)),
        pytest.param(RAMP, 1, (24, 72), marks=pytest.mark.slow),
        pytest.param(DROPOUT, 1, (48, 96), marks=pytest.mark.slow),
        pytest.param(PACKED, 1, (48, 96), marks=pytest.mark.slow),
        pytest.param(FP16, 1, (48, 96), marks=pytest.mark.slow),
        pytest.param({}, 2, (48, 96), marks=pytest.mark.slow),
        pytest.param(RAMP | {"parallel.zero": "1"}, 2, (24, 72), marks=pytest.mark.slow),
    ],
)
def test_run_equals_one_whose_data_never_contained_the_samples(
    tmp_path: Path, settings: dict[str, str], world: int, samples: tuple[int, int]
) -> None:
    """The run also stops after the rollback and is resumed, and is saved locally."""
    local = {"checkpoint.local.every": "1", "checkpoint.local.folder": str(tmp_path / "local")}
    clean = train(settings, tmp_path / "clean", world=world, without=samples)
    path = tmp_path / "rolled_back"
    callbacks = Spike(SPIKE, stop=6), Spike(None)
    assert train(settings | local, path, *callbacks, world=world) == clean
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(folder / "metrics.jsonl")]
        for folder in (path, tmp_path / "clean")
    ]
    assert losses[0] == losses[1]
    first, end = samples
    assert read_skipped(path) == [
        {
            "step": 8,
            "first_sample": first,
            "num_samples": end - first,
            "cause": "rollback",
            "reason": "loss spike",
        }
    ]
    counters, expected = read_state(path)["train"], read_state(tmp_path / "clean")["train"]
    assert counters["skipped_samples"] == {"rollback": [[first, end]], "steps": {}}
    assert counters["consumed_samples"] == expected["consumed_samples"] + end - first
    log = (path / "log.txt").read_text()
    assert f"rolled back to the checkpoint of step 4; continuing with sample {end}" in log


@pytest.mark.slow
def test_second_rollback_skips_the_samples_of_both(tmp_path: Path) -> None:
    """The second one restores the checkpoint that the first one saved again."""

    class Twice(Spike):
        num_left = 1

        def after_rollback(self, step: int) -> None:
            if self.num_left:
                self.num_left, self.plan = 0, SPIKE

    (clean,) = train({}, tmp_path / "clean", without=(48, 144))
    path = tmp_path / "run"
    assert train({}, path, Twice(SPIKE)) == [clean]
    state = read_state(path)
    assert state["train"]["skipped_samples"] == {"rollback": [[48, 144]], "steps": {}}
    assert state["rollbacks"] == [8, 8]
    assert [(row["first_sample"], row["num_samples"]) for row in read_skipped(path)] == [
        (48, 48),
        (96, 48),
    ]


class NanSamples(Spike):
    """Makes a gradient NaN in every step that begins with a certain sample."""

    def __init__(self, sample: int) -> None:
        super().__init__(None)
        self.sample = sample

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        if self.run.prepared.state.consumed_samples == self.sample:
            local_params[0].gradient.view(-1)[0] = float("nan")


@pytest.mark.parametrize("action", ["rollback", pytest.param("rerun", marks=pytest.mark.slow)])
def test_fault_detector_skips_samples_whose_gradients_are_nan(tmp_path: Path, action: str) -> None:
    """At once, or after reruns have shown that the samples are at fault."""
    (clean,) = train({}, tmp_path / "clean", without=(48, 108))
    settings = {"fault_detector.nonfinite": action, "fault_detector.model_fault": "rollback"}
    path = tmp_path / "faulty"
    callbacks = [NanSamples(84)]
    if action == "rerun":  # one rank cannot shift samples: it ends once for another machine
        train(settings, path, NanSamples(84))
        suspects = path / "suspects.jsonl"
        suspects.write_text(suspects.read_text().replace('"host": "', '"host": "other-'))
    (weights,) = train(settings, path, *callbacks)
    assert {step: weights[step] for step in range(5, 10)} == {
        step: clean[step] for step in range(5, 10)
    }
    (row,) = read_skipped(path)
    assert (row["first_sample"], row["num_samples"], row["step"]) == (48, 60, 8)
    assert "gradient norm nan" in row["reason"]


@pytest.mark.slow
def test_checkpoint_of_a_diverged_model_is_not_restored(tmp_path: Path) -> None:
    train({"train.steps": "6"}, tmp_path, Spike(None))
    state = tmp_path / "checkpoints" / folder_name(4) / "state.json"
    changed = json.loads(state.read_text()) | {"healthy": False}
    state.write_text(json.dumps(changed))
    train({"checkpoint.load_mode": "weights"}, tmp_path, Spike(SPIKE))
    assert "rolled back to the checkpoint of step 2" in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_oldest_checkpoint_is_used_if_none_is_old_enough(tmp_path: Path) -> None:
    settings = {"fault_detector.rollback_steps": "100"}
    train(settings, tmp_path, Spike(SPIKE))
    log = (tmp_path / "log.txt").read_text()
    assert (
        "step 8: no healthy checkpoint is fault_detector.rollback_steps=100 steps before step 7; "
        "the oldest one, of step 2, is used"
    ) in log


@pytest.mark.slow
def test_pinned_checkpoint_of_discarded_steps_is_renamed(tmp_path: Path) -> None:
    class Pin(Spike):
        def before_step(self, step: int, batches: StepBatches) -> None:
            super().before_step(step, batches)
            folder = self.run.folder.checkpoints / folder_name(6)
            if step == 8 and folder.exists():
                (folder / commit.PIN).touch()

    callback = Pin(SPIKE)
    train({"train.steps": "8"}, tmp_path, callback)
    names = {each.name for each in (tmp_path / "checkpoints").iterdir()}
    assert {"step_0000006", "step_0000006.rolled_back"} <= names


class Kill(Exception):
    """Ends a run between the restore of a checkpoint and the next save."""


class KillAfterRestore(Spike):
    """Ends the run in `after_rollback`, before the checkpoint is saved again."""

    collective = True

    def after_rollback(self, step: int) -> None:
        raise Kill


def test_samples_stay_skipped_if_the_run_is_killed_before_the_next_save(tmp_path: Path) -> None:
    (clean,) = train({}, tmp_path / "clean", without=(48, 96))
    path = tmp_path / "killed"
    with pytest.raises(Kill):
        train({}, path, KillAfterRestore(SPIKE))
    with open(path / "skipped.jsonl", "a") as file:
        file.write('{"step": 8, "first_sam')  # a kill truncates the last line
    (resumed,) = train({}, path)
    assert resumed == {step: clean[step] for step in range(5, 10)}


def test_older_checkpoint_skips_the_samples_as_well(tmp_path: Path) -> None:
    """If the checkpoint saved after the rollback is damaged, an older one is loaded."""
    (clean,) = train({}, tmp_path / "clean", without=(48, 96))
    path = tmp_path / "run"
    train({"train.steps": "8"}, path, Spike(SPIKE))
    for step in (4, 6, 8):
        commit.set_aside(path / "checkpoints" / folder_name(step), "damaged")
    (resumed,) = train({}, path)
    assert resumed == {step: clean[step] for step in range(3, 10)}


def test_skipped_steps_are_ranges_that_a_rollback_does_not_repeat(tmp_path: Path) -> None:
    settings = {"train.skip_steps": "[5]"}
    train(settings, tmp_path, Spike(replace(SPIKE, last_bad_step=7)))
    counters = read_state(tmp_path)["train"]
    assert counters["skipped_samples"] == {"rollback": [[48, 96]], "steps": {"5": [48, 60]}}
    assert (counters["step"], counters["skipped"]) == (9, 0)
    rows = read_skipped(tmp_path)
    assert [(row["cause"], row["step"], row["first_sample"]) for row in rows] == [
        ("train.skip_steps", 5, 48),
        ("rollback", 8, 48),
    ]


@pytest.mark.slow
def test_too_many_rollbacks_end_the_run_and_name_the_setting(tmp_path: Path) -> None:
    class EveryTime(Spike):
        def before_update(self, stats: StepStats) -> StepRequest | None:
            if self.run.step + 1 != 8:
                return None
            self.rollback_plan = SPIKE
            return StepRequest.ROLLBACK

    settings = {"fault_detector.max_rollbacks": "1"}
    with pytest.raises(CallbackError, match=r"after 1 rollbacks in 1000 steps \(from steps 8\)"):
        train(settings, tmp_path, EveryTime(None))
    (saved,) = (tmp_path / "checkpoints" / "diverged").glob("step_*")
    state = open_checkpoint(saved).state
    assert (state["healthy"], state["train"]["step"]) == (False, 7)


def test_retention_keeps_a_checkpoint_for_every_rollback(tmp_path: Path) -> None:
    """At any step, a checkpoint is old enough, and not older than about twice that."""
    every, rollback_steps = 10, 35
    for step in range(every, 500, every):
        folder = tmp_path / folder_name(step)
        folder.mkdir()
        kept = {int(each.name.removeprefix("step_")) for each in tmp_path.iterdir()}
        retention = commit.Retention(1, rollback_before=(step + 1 - rollback_steps,))
        complete = {each: tmp_path / folder_name(each) for each in sorted(kept)}
        with patched(commit, "list_complete_checkpoints", lambda _, complete=complete: complete):
            for old in retention.select_old(tmp_path):
                old.rmdir()
        old_enough = [each for each in kept if each <= step + 1 - rollback_steps]
        assert len([*tmp_path.iterdir()]) <= 3
        if step >= 2 * rollback_steps:
            assert old_enough and step - max(old_enough) <= 2 * rollback_steps + 2 * every


def test_plan_reads_each_sample_once_or_never() -> None:
    """Samples after any skipped ranges, read step by step, are all samples but the skipped ones."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(200):
        numbers = torch.randint(0, 60, (6,), generator=generator).tolist()
        skipped = SkippedSamples().merge(
            (min(pair), max(pair)) for pair in zip(numbers[::2], numbers[1::2], strict=True)
        )
        schedule = BatchSizeSchedule((0, 20), (3, 5))
        expected = [k for k in range(200) if not any(a <= k < b for a, b in skipped.ranges)]
        consumed, read = skipped.locate(0), 0
        for _ in range(12):
            assert count_read(skipped, consumed) == read, seed
            size = schedule.get_batch_size(read)
            assert [skipped.locate(read + i) for i in range(size)] == expected[read : read + size]
            consumed = advance(schedule, skipped, consumed=consumed, num_steps=1)
            read += size
        first, end = plan_skipped_range(
            schedule, skipped, consumed=consumed, num_steps=5, skip_samples_past_spike=0
        )
        count = schedule.count_samples(5, consumed=read)
        assert (first, end) == (consumed, skipped.locate(read + count)), seed

"""Runs whose batch size changes: equal to one process under any layout, resumed bitwise, saved at
changes; wrong sizes are rejected."""

from pathlib import Path
from typing import Any

import pytest

from megalith.config.train import TrainRun
from megalith.config.tree import Override
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, assert_close
from megalith.train.callbacks.base import Callback, RunView
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest
from tests.train.test_loop import CPU, checkpoints, hashes, rows, stored, train, train_as_rank

RAMP = "[{size: 6}, {samples: 12, size: 12}, {samples: 36, size: 18}]"
SIZES = [6, 6, 12, 12, 18, 18]
"""Sizes of the first six steps."""

SCHEDULED: dict[str, Override] = {
    "train.batch_size_schedule": RAMP,
    "train.global_batch_size": "18",
    "train.micro_batch_size": "1",
    "train.steps": "6",
    "precision.params": "fp64",
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run on one process."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder, SCHEDULED)
    return folder


def test_sizes_are_logged_and_changes_are_saved(reference: Path) -> None:
    logged = [row for row in rows(reference) if "loss" in row]
    assert [row["batch_size"] for row in logged] == SIZES
    assert logged[-1]["tokens"] == 12 * sum(SIZES)
    assert {2, 4} <= {*checkpoints(reference)}


def test_change_between_regular_saves_is_saved(tmp_path: Path) -> None:
    settings = SCHEDULED | {"checkpoint.every": "5", "checkpoint.keep": "9"}
    train(tmp_path, settings)
    assert checkpoints(tmp_path) == [2, 4, 5, 6]


LAYOUTS = [
    (2, {"parallel.dp": "2"}),
    (2, {"parallel.pp": "2"}),
    pytest.param(3, {"parallel.dp": "3"}, marks=pytest.mark.slow),
    pytest.param(2, {"parallel.tp": "2"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_ramp_up_on_several_ranks_equals_one_process(
    tmp_path: Path, reference: Path, world: int, layout: dict[str, Override]
) -> None:
    run_ranks(train_as_rank, world, tiny_run(SCHEDULED | layout), tmp_path)
    assert_close(stored(tmp_path, 6), stored(reference, 6), CURVE64)
    for row, expected in zip(rows(tmp_path), rows(reference), strict=True):
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-9), row["step"]


@pytest.mark.parametrize(("scaling", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_learning_rate_scales_with_the_batch_size(
    tmp_path: Path, scaling: str, power: float
) -> None:
    settings: dict[str, Override] = {
        "schedule.style": "constant",
        "schedule.warmup_steps": "0",
        "schedule.scale_lr_with_batch_size": scaling,
        "optim.groups": "[{name: norms, match: ['*norm*'], lr: 1e-3}]",
        "train.eval_steps": "0",
        "train.steps": "5",
    }
    train(tmp_path, SCHEDULED | settings)
    logged = rows(tmp_path)
    factors = [(size / 18) ** power for size in SIZES[:5]]
    assert [row["lr"] for row in logged] == pytest.approx([1e-2 * each for each in factors])
    assert [row["lr_norms"] for row in logged] == pytest.approx([1e-3 * each for each in factors])


def test_run_resumes_bitwise_in_the_middle_of_a_ramp(tmp_path: Path, reference: Path) -> None:
    schedule = {"schedule.decay_steps": "6"}
    train(tmp_path, SCHEDULED | schedule | {"train.steps": "3"})
    train(tmp_path, SCHEDULED | schedule)
    assert hashes(tmp_path, 6) == hashes(reference, 6)


@pytest.mark.slow
def test_other_numbers_of_ranks_keep_the_loss_curve(tmp_path: Path, reference: Path) -> None:
    fixed = SCHEDULED | {"schedule.decay_steps": "6"}
    for world, steps in ((2, "2"), (3, "4")):
        settings = fixed | {"train.steps": steps, "parallel.dp": str(world)}
        run_ranks(train_as_rank, world, tiny_run(settings), tmp_path)
    train(tmp_path, fixed)
    assert_close(stored(tmp_path, 6), stored(reference, 6), CURVE64)


def test_only_sizes_of_unread_samples_can_change(tmp_path: Path) -> None:
    schedule = SCHEDULED | {"schedule.style": "constant", "train.eval_steps": "0"}
    train(tmp_path, schedule | {"train.steps": "3"})  # 24 samples
    changed = "[{size: 6}, {samples: 12, size: 12}, {samples: %s, size: 24}]"
    settings = schedule | {"train.global_batch_size": "24", "train.steps": "5"}
    with pytest.raises(ConfigError, match="The batch size can change after sample 24"):
        train(tmp_path, settings | {"train.batch_size_schedule": changed % 20})
    train(tmp_path, settings | {"train.batch_size_schedule": changed % 30})
    sizes = [row["batch_size"] for row in rows(tmp_path) if "loss" in row]
    assert sizes == [6, 6, 12, 12, 24]


def test_skipped_steps_read_their_samples_and_do_not_train(tmp_path: Path) -> None:
    train(tmp_path, {"train.skip_steps": "[2, 3]", "train.steps": "4", "train.eval_steps": "0"})
    logged = [row for row in rows(tmp_path) if "loss" in row]
    assert [(row["step"], row["skipped"]) for row in logged] == [(1, 0), (4, 2)]
    assert [row["tokens"] for row in logged] == [12 * 12, 4 * 12 * 12]


def test_saves_and_evaluations_that_are_due_after_a_skipped_step_are_executed(
    tmp_path: Path,
) -> None:
    settings = {"checkpoint.every": "2", "checkpoint.keep": "9", "train.eval_every": "2"}
    train(tmp_path, settings | {"train.skip_steps": "[2, 3, 6]", "train.steps": "6"})
    assert checkpoints(tmp_path) == [2, 4, 6]
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [2, 4, 6]
    train(tmp_path / "change", SCHEDULED | settings | {"train.skip_steps": "[2]"})
    # The samples of step 2 do not count in the schedule, which changes after steps 3 and 5.
    assert checkpoints(tmp_path / "change") == [2, 3, 4, 5, 6]


class RequestInSkippedStep(Callback):
    """Requests an action on rank 1 in skipped step 2, and records what all ranks execute."""

    def __init__(self, rank: int, requests: StepRequest) -> None:
        self.rank, self.requests = rank, requests
        self.executed: list[tuple[int, StepRequest]] = []

    def on_start(self, run: RunView) -> None:
        if self.rank == 1:
            run.request(StepRequest.SKIP)  # for step 3, the first one that is not skipped

    def before_skipped_step(self, step: int) -> StepRequest:
        return self.requests if self.rank == 1 and step == 2 else StepRequest.NONE

    def after_skipped_step(self, step: int, requests: StepRequest) -> None:
        self.executed.append((step, requests))


def train_with_requests(rank: int, world: int, run: TrainRun, path: Path) -> tuple[Any, ...]:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    callback = RequestInSkippedStep(rank, StepRequest.STOP | StepRequest.EVALUATE)
    outcome = run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[callback])
    resumed = run_training(run, RunFolder(path), mesh, CPU, show=False)
    return outcome.kind, outcome.step, callback.executed, resumed.kind


def test_request_of_one_rank_in_a_skipped_step_is_executed_on_all_ranks(tmp_path: Path) -> None:
    settings = {"train.skip_steps": "[1, 2]", "train.steps": "4", "checkpoint.every": "0"}
    run = tiny_run(settings | {"train.eval_every": "0"})
    expected = [(1, StepRequest.NONE), (2, StepRequest.STOP | StepRequest.EVALUATE)]
    for result in run_ranks(train_with_requests, 2, run, tmp_path):
        assert result == ("stopped", 2, expected, "done")
    assert checkpoints(tmp_path) == [2, 4]
    assert [row["step"] for row in rows(tmp_path) if "eval_loss" in row] == [2, 4]


@pytest.mark.parametrize(
    ("settings", "messages"),
    [
        (
            {"train.batch_size_schedule": "[{size: 5}, {samples: 9, size: 18}]"},
            ("train.batch_size_schedule[0].size=5 is not a multiple of", "[0].size to 4 or 6"),
        ),
        (
            {"train.batch_size_schedule": "[{size: 5}, {samples: 10, size: 7}]"},
            ("[0].size=5 is not", "[1].size=7 is not", "Set train.global_batch_size=7."),
        ),
        (
            {
                "train.batch_size_schedule": "[]",
                "schedule.scale_lr_with_batch_size": "sqrt",
            },
            ("schedule.scale_lr_with_batch_size=sqrt has no effect without",),
        ),
        (
            {"train.skip_steps": "[0, 7]"},
            ("train.skip_steps=[0, 7]: 0, 7 are no steps of the run. Use numbers from 1 to",),
        ),
        ({"train.skip_steps": "[1, 2, 3, 4, 5, 6]"}, ("names all 6 steps of the run",)),
        (
            {"train.steps": str(1 << 40)},
            ("train.steps=1099511627776 of the sizes of train.batch_size_schedule",),
        ),
    ],
)
def test_wrong_sizes_are_reported_together(
    settings: dict[str, Override], messages: tuple[str, ...]
) -> None:
    texts = run_problems(tiny_run(SCHEDULED | {"parallel.dp": "2"} | settings), 2)
    for message in messages:
        assert any(message in text for text in texts), texts


def test_wrong_names_in_entries_are_rejected_with_names_of_entries() -> None:
    for entry, advice in (
        ("sise: 12", "[1].sise=12: there is no such setting. Did you mean {0}size?"),
        ("steps: 3", "[1].steps=3: there is no such setting. Did you mean {0}samples or {0}size?"),
        ("at: 3", "[1].at=3: there is no such setting. Use one of {0}size, {0}samples, {0}tokens."),
    ):
        schedule = f"[{{size: 6}}, {{samples: 12, size: 18, {entry}}}]"
        with pytest.raises(ConfigError) as caught:
            tiny_run(SCHEDULED | {"train.batch_size_schedule": schedule})
        assert str(caught.value).endswith(advice.format("train.batch_size_schedule[1]."))


def test_size_with_fewer_microbatches_than_interleaved_stages_is_rejected() -> None:
    settings = {
        "model.num_layers": "4",
        "parallel.pp": "2",
        "parallel.pipeline.vpp": "2",
        "train.batch_size_schedule": "[{size: 1}, {samples: 10, size: 18}]",
    }
    (text,) = run_problems(tiny_run(SCHEDULED | settings), 2)
    assert text.startswith("train.batch_size_schedule[0].size=1: 1 microbatches per step are fewer")
    assert "Set train.batch_size_schedule[0].size to 2" in text

"""A diverged run keeps its last good checkpoint and names it; overflows of fp16 are not taken for
divergence."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.config.optim import LossScaleConfig
from megalith.config.train import TrainRun
from megalith.errors import DataError
from megalith.optim.loss_scale import LossScale
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train import loop
from megalith.train.callbacks import fault_detection
from megalith.train.callbacks.base import Outcome
from megalith.train.callbacks.fault_detection import describe_last_good_checkpoint, is_divergent
from megalith.train.callbacks.health import find_nonfinite_parameters
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest, StepResult, Trainer, train_step

NAN, INF, NONE = math.nan, math.inf, StepRequest.NONE
DYNAMIC = LossScale(LossScaleConfig(), 1024.0, dynamic=True)
LOWEST = LossScale(LossScaleConfig(), 1.0, dynamic=True, stuck=1)
FIXED = LossScale(LossScaleConfig(), 1024.0, dynamic=False)
CPU = torch.device("cpu")
CONSTANT = {"schedule.style": "constant", "schedule.warmup_steps": "0"}


def train(path: Path, settings: Mapping[str, str], *, show: bool = False) -> Outcome:
    """Run the tiny run on one process, with settings changed."""
    return run_training(
        tiny_run(settings), RunFolder(path), build_single_rank_mesh(), CPU, show=show
    )


def checkpoints(path: Path) -> list[int]:
    """Return the steps that were saved and kept."""
    return sorted(
        int(folder.name.removeprefix("step_")) for folder in (path / "checkpoints").glob("step_*")
    )


@pytest.mark.parametrize(
    ("result", "loss_scale", "divergent"),
    [
        (StepResult(2.0, 1.0, updated=True, requests=NONE), None, False),
        (StepResult(2.0, INF, updated=False, requests=NONE), None, True),
        (StepResult(NAN, NAN, updated=False, requests=NONE), None, True),
        (StepResult(0.0, 0.0, updated=False, requests=NONE, empty=True), None, False),
        (
            StepResult(2.0, 1.0, updated=True, requests=NONE, other_losses={"mtp_1_loss": INF}),
            None,
            True,
        ),
        (StepResult(2.0, INF, updated=False, requests=NONE), DYNAMIC, False),
        (StepResult(NAN, INF, updated=False, requests=NONE), DYNAMIC, True),
        (StepResult(2.0, INF, updated=False, requests=NONE), LOWEST, True),
        (StepResult(2.0, INF, updated=False, requests=NONE), FIXED, True),
    ],
)
def test_divergent_steps_are_those_that_no_lower_loss_scale_avoids(
    result: StepResult, loss_scale: LossScale | None, divergent: bool
) -> None:
    assert is_divergent(result, loss_scale) == divergent


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_parameters_are_found_in_every_dtype(dtype: torch.dtype, value: float) -> None:
    def entry(
        name: str, values: list[float], role: str = "param", *, mine: bool = True
    ) -> CheckpointEntry:
        return CheckpointEntry(
            Shard.full(name, (len(values),)), role, torch.tensor(values, dtype=dtype), mine
        )

    largest = float(torch.finfo(dtype).max)
    entries = [
        entry("finite", [largest, -largest, 0.0]),
        entry("none", []),
        entry("weights", [1.0, value, 2.0]),
        entry("both", [1.0]),
        entry("both", [value], "master"),
        entry("moments", [value], "exp_avg_sq"),
        entry("replica", [value], mine=False),
    ]
    assert find_nonfinite_parameters(entries) == ["both", "weights"]
    assert find_nonfinite_parameters(entries[:2]) == find_nonfinite_parameters([]) == []


def test_advice_names_a_checkpoint_from_before_the_skipped_steps(tmp_path: Path) -> None:
    def advice(last_update: int) -> str:
        return describe_last_good_checkpoint(tmp_path, last_update, 0.01)

    change = "with another setting, for example --schedule.lr 0.005 (0.01 now)"
    assert advice(3) == f"No checkpoint is from before that: start from the beginning {change}."
    for step in (2, 4):
        entries = [CheckpointEntry(Shard.full("w", (2,)), "param", torch.ones(2))]
        save_checkpoint(tmp_path, step, entries, {}, single_rank_group("world"), config_text="")
    assert advice(1) == (
        f"No checkpoint is from before that: start from the beginning {change} and in another "
        "folder (--run NAME)."
    )
    older, newest = tmp_path / "step_0000002", tmp_path / "step_0000004"
    assert advice(3) == (
        f"The last checkpoint from before that is {older}: to continue from it, run the same "
        f"command again {change}, "
        f"and with --run NAME --checkpoint.load {older} --checkpoint.load_mode all."
    )
    assert advice(4) == (
        f"The last checkpoint from before that is {newest}: run the same command again {change}, "
        "and it continues from "
        f"there."
    )


def set_nan(trainer: Trainer) -> None:
    """Make one weight of the first rank NaN."""
    (slot,) = [slot for slot in trainer.optimizer.slots if slot.shard.name == "layers.1.mlp.down"]
    if trainer.mesh.world.rank == 0:
        slot.weight.detach().view(-1)[3] = float("nan")


def nan_before_step(step: int) -> Callable[..., StepResult]:
    """A `train_step` that makes a weight NaN before a step, so that this step and all later ones
    are skipped."""
    count = iter(range(1, 1000))

    def diverging(trainer: Trainer, *arguments: Any, **options: Any) -> StepResult:
        if next(count) == step:
            set_nan(trainer)
        return train_step(trainer, *arguments, **options)

    return diverging


def test_diverged_run_saves_nothing_and_names_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every_step = CONSTANT | {"checkpoint.every": "1", "checkpoint.keep": "2"}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", nan_before_step(4))
        patch.setattr(fault_detection, "MAX_SKIPPED_IN_A_ROW", 4)
        with pytest.raises(DataError) as raised:
            train(tmp_path, every_step, show=True)
    good = tmp_path / "checkpoints" / "step_0000003"
    assert str(raised.value).startswith(
        "4 steps in a row were skipped, the last with loss nan and gradient norm nan ("
    )
    assert str(raised.value).endswith(
        "Reduce schedule.lr, check the data and the settings of the model. The last checkpoint "
        "from before that is "
        f"{good}: run the same command again with another setting, for example --schedule.lr 0.005 "
        "(0.01 now), and it "
        f"continues from there."
    )
    assert checkpoints(tmp_path) == [2, 3]
    assert (
        capsys.readouterr().out.count(
            "step 4: not saved, because its loss or gradient norm is not finite"
        )
        == 1
    )
    assert train(tmp_path, every_step | {"schedule.lr": "0.005"}, show=True) == Outcome("done", 8)
    assert f"resuming {tmp_path} at step 3" in capsys.readouterr().out


def test_run_whose_last_step_has_a_nan_loss_is_an_error_and_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_step", nan_before_step(4))
    with pytest.raises(DataError) as raised:
        train(tmp_path, {"train.steps": "4"})
    text = (
        "the last step, 4, has loss nan and gradient norm nan and is not saved. Reduce "
        "schedule.lr, check the data"
    )
    assert str(raised.value).startswith(text) and "is from before that" not in str(raised.value)
    assert (
        f"The last checkpoint from before that is {tmp_path}/checkpoints/step_0000002: run"
        in str(raised.value)
    )
    assert checkpoints(tmp_path) == [2]


def test_update_that_makes_a_parameter_nan_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(1, 9))

    def diverging(trainer: Trainer, *arguments: Any, **options: Any) -> StepResult:
        result = train_step(trainer, *arguments, **options)
        if next(count) == 4:
            set_nan(trainer)
        return result

    monkeypatch.setattr(loop, "train_step", diverging)
    with pytest.raises(
        DataError, match="step 4 is not saved: NaN or infinite values in layers.1.mlp.down. Reduce"
    ):
        train(tmp_path, {})
    assert checkpoints(tmp_path) == [2]


def test_step_with_an_infinite_gradient_is_not_saved_but_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(1, 9))

    def one_bad_step(*arguments: Any, **options: Any) -> StepResult:
        result = train_step(*arguments, **options)
        return (
            replace(result, grad_norm=float("inf"), updated=False) if next(count) == 4 else result
        )

    monkeypatch.setattr(loop, "train_step", one_bad_step)
    assert train(tmp_path, {"checkpoint.every": "4"}) == Outcome("done", 8)
    assert checkpoints(tmp_path) == [5, 8]


def test_run_stopped_after_a_nan_loss_reports_that_it_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "train_step", nan_before_step(1))
    reason = "time limit; the loss or gradient norm is NaN or infinite"
    assert train(tmp_path, {"train.max_minutes": "0"}) == Outcome("stopped", 1, reason, saved=False)
    assert checkpoints(tmp_path) == []


def _diverge(rank: int, world: int, run: TrainRun, path: Path) -> str:
    with (
        patched(loop, "train_step", nan_before_step(3)),
        patched(fault_detection, "MAX_SKIPPED_IN_A_ROW", 2),
    ):
        try:
            mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
            run_training(run, RunFolder(path), mesh, CPU, show=False)
        except DataError as error:
            return str(error)
    return "no error"


@pytest.mark.slow
def test_all_ranks_end_a_diverged_run_with_the_same_error(tmp_path: Path) -> None:
    texts = run_ranks(
        _diverge, 2, tiny_run(CONSTANT | {"parallel.tp": "2", "checkpoint.every": "1"}), tmp_path
    )
    assert len(set(texts)) == 1
    assert (
        f"The last checkpoint from before that is {tmp_path}/checkpoints/step_0000002: run the same"
        in texts[0]
    )
    assert checkpoints(tmp_path) == [1, 2]

"""A run that continues a Megatron checkpoint: step, samples, schedule, moments; or starts from its
weights; or is rejected."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.chunks import MegatronFolder
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.checkpoint.pickle_interpreter import Record
from megalith.config.tree import Override
from megalith.errors import CheckpointError, ConfigError
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from tests.megatron_folders import TINY_ARGS, build_megatron_folder, megatron_tensors

CPU = torch.device("cpu")
SETTINGS: dict[str, Override] = {
    "train.steps": "6",
    "train.eval_every": "none",
    "train.eval_steps": "0",
    "checkpoint.every": "4",
    "precision.params": "bf16",
}
TABLES = "embed.weight", "head.weight"


def train(path: Path, settings: Mapping[str, Override] | None = None) -> None:
    """The tiny run on one process."""
    run = tiny_run(SETTINGS | (settings or {}))
    run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=True)


def saved(path: Path, step: int = 6) -> Checkpoint:
    """A checkpoint of a run."""
    return open_checkpoint(path / "checkpoints" / f"step_{step:07d}")


def assert_equal_tensors(a: Checkpoint, b: Checkpoint) -> None:
    """Both have the same tensors, bit for bit."""
    assert a.keys() == b.keys()
    for key in a.keys():  # noqa: SIM118 - a method of checkpoints
        assert torch.equal(a.read(key), b.read(key)), key


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with a checkpoint of step 4."""
    path = tmp_path_factory.mktemp("uninterrupted")
    train(path)
    return path


Write = Callable[..., Path]


@pytest.fixture
def write(uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write the checkpoint of step 4 as a Megatron folder, with changed common state."""
    folders: dict[Path, MegatronFolder] = {}
    monkeypatch.setattr("megalith.hf.megatron_checkpoint.read_dcp_folder", folders.__getitem__)

    def write_folder(
        *,
        optimizer: bool = True,
        release: bool = False,
        args: Mapping[str, Any] | None = None,
        common: Mapping[str, Any] | None = None,
    ) -> Path:
        source = saved(uninterrupted, 4)
        tensors = megatron_tensors(source, tiny_run(SETTINGS).model, padded_rows=7)
        tensors = {
            name: values
            for name, values in tensors.items()
            if optimizer or not name.startswith("optimizer.")
        }
        path = tmp_path / "megatron" / ("release" if release else "iter_0000004")
        state = {
            "args": Record("argparse.Namespace", (), TINY_ARGS | dict(args or {})),
            "iteration": 4,
            "checkpoint_version": 3.0,
            "optimizer": {"optimizer": {"param_groups": [{"step": 4, "params": [0]}]}},
            "opt_param_scheduler": {"num_steps": 48},
        }
        folders[path] = build_megatron_folder(path, tensors, state | dict(common or {}))
        content = "release" if release else "4"
        (path.parent / "latest_checkpointed_iteration.txt").write_text(content)
        return path.parent

    return write_folder


def test_load_mode_all_continues_like_the_uninterrupted_run(
    uninterrupted: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write()
    train(tmp_path / "b", {"checkpoint.load": str(source), "checkpoint.load_mode": "all"})
    assert_equal_tensors(saved(tmp_path / "b"), saved(uninterrupted))
    states = [dict(saved(path).state) for path in (tmp_path / "b", uninterrupted)]
    for state in states:
        del state["callbacks"]  # the fault detector has not seen the steps in Megatron
    assert states[0] == states[1]
    output = " ".join(capsys.readouterr().out.split())
    for text in (
        "iter_0000004 at step 4 with its optimizer state: 48 samples consumed, schedule at sample "
        "48, learning rate 0.00345",
        "records neither its data nor its tokenizer, so they are not compared",
        "whose next sample is number 48. Megatron's random state is not loaded",
    ):
        assert text in output
    assert output.count("random state") == 1


@pytest.mark.slow
def test_load_mode_progress_resets_moments(
    write: Write, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write()
    train(tmp_path / "b", {"checkpoint.load": str(source), "checkpoint.load_mode": "progress"})
    ours = {"checkpoint.load": str(uninterrupted / "checkpoints/step_0000004")}
    train(tmp_path / "c", ours | {"checkpoint.load_mode": "progress"})
    assert_equal_tensors(saved(tmp_path / "b"), saved(tmp_path / "c"))
    assert saved(tmp_path / "b").state == saved(tmp_path / "c").state
    assert "at step 4 with a new optimizer state" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_load_mode_weights_starts_at_step_0_from_master_weights(
    write: Write, uninterrupted: Path, tmp_path: Path
) -> None:
    short = {"train.steps": "1", "checkpoint.load": str(write())}
    train(tmp_path / "b", short)
    train(
        tmp_path / "c", short | {"checkpoint.load": str(uninterrupted / "checkpoints/step_0000004")}
    )
    assert_equal_tensors(saved(tmp_path / "b", 1), saved(tmp_path / "c", 1))
    assert saved(tmp_path / "b", 1).state == saved(tmp_path / "c", 1).state


def test_run_without_optimizer_state_continues_only_with_progress(
    write: Write, tmp_path: Path
) -> None:
    settings = {"checkpoint.load": str(write(optimizer=False)), "checkpoint.load_mode": "all"}
    with pytest.raises(CheckpointError) as error:
        train(tmp_path / "b", settings)
    assert (
        "iter_0000004 has no optimizer state: it was saved with --no-save-optim, or released as "
        "weights. To continue with zero moments, set checkpoint.load_mode=progress; to start at "
        "step 0, checkpoint.load_mode=weights." in str(error.value)
    )
    train(tmp_path / "c", settings | {"checkpoint.load_mode": "progress"})
    assert saved(tmp_path / "c").state["optimizer_updates"] == 2


def test_unreadable_optimizer_state_does_not_affect_weights(
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("bucket 0 has 5 elements, expected 8.")

    monkeypatch.setattr("megalith.hf.megatron_checkpoint.read_optimizer", fail)
    settings = {"checkpoint.load": str(write()), "checkpoint.load_mode": "all"}
    with pytest.raises(CheckpointError, match="bucket 0 has 5 elements, expected 8."):
        train(tmp_path / "b", settings)
    train(tmp_path / "c", settings | {"checkpoint.load_mode": "progress"})
    assert [
        record.getMessage() for record in caplog.records if "master" in record.getMessage()
    ] == [
        "only the weights are loaded, not the master weights: bucket 0 has 5 elements, expected 8."
    ]


def test_checkpoint_of_another_model_is_rejected_with_a_table(write: Write, tmp_path: Path) -> None:
    settings = {"checkpoint.load": str(write()), "model.hidden_size": "32"}
    for mode in ("weights", "all"):
        with pytest.raises(CheckpointError) as error:
            train(tmp_path / "b", settings | {"checkpoint.load_mode": mode})
        assert "model.hidden_size" in str(error.value) or "embed.weight is" in str(error.value)


def test_step_that_does_not_exist_is_rejected_with_the_others(write: Write, tmp_path: Path) -> None:
    source = write()
    with pytest.raises(CheckpointError) as error:
        train(tmp_path / "b", {"checkpoint.load": str(source / "iter_0000150")})
    assert str(error.value) == (
        f"{source} has no iteration 150. Use one of its iterations: iter_0000004."
    )


def test_run_without_steps_left_is_rejected(write: Write, tmp_path: Path) -> None:
    settings = {"checkpoint.load": str(write()), "checkpoint.load_mode": "all"}
    with pytest.raises(ConfigError, match=r"train.steps=4: .*iter_0000004 is of step 4"):
        train(tmp_path / "b", settings | {"train.steps": "4"})


def test_released_weights_have_no_step_to_continue_from(write: Write, tmp_path: Path) -> None:
    source = write(release=True)
    with pytest.raises(CheckpointError) as error:
        train(tmp_path / "b", {"checkpoint.load": str(source), "checkpoint.load_mode": "all"})
    assert "release was released as weights only, so there is no step" in str(error.value)


def test_counters_count_skipped_samples_and_missing_updates(write: Write, tmp_path: Path) -> None:
    args = {"consumed_train_samples": 60, "skipped_train_samples": 12}
    source = write(args=args, common={"opt_param_scheduler": {"num_steps": 36}})
    train(
        tmp_path / "b",
        {"checkpoint.load": str(source), "checkpoint.load_mode": "all", "train.steps": "5"},
    )
    assert saved(tmp_path / "b", 5).state["train"] == {
        "step": 5,
        "consumed_samples": 72,
        "scheduled_samples": 48,
        "tokens": 864,
        "skipped": 2,
        "skipped_in_a_row": 0,
    }


@pytest.mark.parametrize(
    ("common", "message"),
    [
        ({"iteration": None}, "its iteration is None, expected a count"),
        ({"iteration": -1}, "its iteration is -1, expected a count"),
        ({"opt_param_scheduler": {"num_steps": 2.5}}, "its num_steps is 2.5, expected a count"),
    ],
)
def test_counters_that_are_not_counts_are_rejected(
    common: Mapping[str, Any], message: str, write: Write, tmp_path: Path
) -> None:
    settings = {"checkpoint.load": str(write(common=common)), "checkpoint.load_mode": "all"}
    with pytest.raises(CheckpointError) as error:
        train(tmp_path / "b", settings)
    assert message in str(error.value) and "checkpoint.load_mode=weights" in str(error.value)

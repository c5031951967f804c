"""The loop resumes to the same bits, goes on under other layouts, refuses what does not fit,
survives a full disk."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.lock import lock_run
from megalith.config.train import TrainRun
from megalith.config.tree import Override
from megalith.data.indexed import IndexedDatasetBuilder
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.costs import step_flops
from megalith.plan.grid import model_grid
from megalith.plan.layers.embedding import head_flops
from megalith.rules.run import run_problems
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, FP64, assert_close
from megalith.train import loop
from megalith.train.callbacks import fault_detection, health, metrics
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepResult, train_step

CPU = torch.device("cpu")
CONSTANT = {"schedule.style": "constant", "schedule.warmup_steps": "0"}


def write_store(path: Path, first: int) -> str:
    """Twenty documents of 13 tokens."""
    with IndexedDatasetBuilder(str(path), np.uint16) as builder:
        for document in range(20):
            builder.add_document(np.arange(13) + first + 5 * document, [13])
        builder.finalize()
    return str(path)


def train(
    path: Path, settings: Mapping[str, Override] | None = None, *, show: bool = False
) -> Outcome:
    """The tiny run on one process, with settings changed."""
    return run_training(
        tiny_run(settings), RunFolder(path), build_single_rank_mesh(), CPU, show=show
    )


def rows(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    clock = (
        "tokens_per_second",
        "step_ms",
        "tflops_per_device",
        "mfu",
        "hfu",
        "memory_gib",
        "time_utc",
    )
    return [
        {name: value for name, value in row.items() if name not in clock}
        for row in read_metrics(path / "metrics.jsonl")
    ]


def hashes(path: Path, step: int) -> dict[str, list[str]]:
    """SHA-256 of every box of one checkpoint."""
    manifest = json.loads((path / "checkpoints" / f"step_{step:07d}" / "manifest.json").read_text())
    return {
        key: [box["sha256"] for box in tensor["boxes"]]
        for key, tensor in manifest["tensors"].items()
    }


def stored(path: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of one checkpoint."""
    checkpoint = open_checkpoint(path / "checkpoints" / f"step_{step:07d}")
    return {key: checkpoint.read(key) for key in checkpoint.manifest.tensors}


def checkpoints(path: Path) -> list[int]:
    """Steps that were saved and kept."""
    return sorted(
        int(folder.name.removeprefix("step_")) for folder in (path / "checkpoints").glob("step_*")
    )


def before_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Callable[[], object]) -> None:
    """Let something happen right before a step is computed."""
    count = iter(range(1, 1000))

    def watched(*arguments: Any, **options: Any) -> StepResult:
        if next(count) == step:
            action()
        return train_step(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", watched)


def test_run_folder_has_settings_metrics_and_the_last_checkpoints(tmp_path: Path) -> None:
    assert train(tmp_path, {"checkpoint.keep": "2"}) == Outcome("done", 8)
    found = rows(tmp_path)
    assert [row["step"] for row in found if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in found if "eval_loss" in row] == [4, 8]
    assert [row["tokens"] for row in found if "loss" in row] == [
        12 * 12 * step for step in range(1, 9)
    ]
    assert found[-2]["loss"] < found[0]["loss"]
    assert checkpoints(tmp_path) == [6, 8]
    assert (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "plots").exists() and not (tmp_path / "tensorboard").exists()
    assert not (tmp_path / "lock.json").exists()


def test_plots_and_events_are_written_on_request(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, {"observe.plots": "true", "observe.tensorboard": "true", "train.steps": "2"})
    assert (tmp_path / "plots" / "loss.png").stat().st_size > 10_000
    assert list((tmp_path / "tensorboard").iterdir())


def test_tensorboard_without_package_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "has_tensorboard", lambda: False)
    with pytest.raises(
        ConfigError,
        match=r"observe.tensorboard=True needs the tensorboard package. Run pip install",
    ):
        train(tmp_path, {"observe.tensorboard": "true"})


def _without_metrics(rank: int, world: int, run: TrainRun, path: Path) -> str:
    def refused(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    with patched(metrics, "MetricsFile", refused), pytest.raises(CheckpointError) as caught:
        train_as_rank(rank, world, run, path)
    return str(caught.value)


@pytest.mark.slow
def test_metrics_that_cannot_be_opened_end_the_run_on_every_rank(tmp_path: Path) -> None:
    """Only the first rank writes them: the others would wait for it."""
    texts = run_ranks(
        _without_metrics, 2, tiny_run({"train.steps": "1", "train.micro_batch_size": "6"}), tmp_path
    )
    assert [text.partition(": ")[0] for text in texts] == ["rank 0"] * 2
    assert all("PermissionError: [Errno 13] Permission denied" in text for text in texts)


def test_run_stopped_after_every_step_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    for step in range(1, 9):
        outcome = train(tmp_path / "parts", {"train.max_minutes": "0"})
        assert outcome == (
            Outcome("stopped", step, "time limit") if step < 8 else Outcome("done", 8)
        )
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "parts", 8) == hashes(tmp_path / "whole", 8)
    assert train(tmp_path / "parts") == Outcome("done", 8)


@pytest.mark.parametrize("sampler", ["cyclic", "cyclic_per_rank"])
def test_cyclic_run_repeats_its_data_and_can_be_extended(tmp_path: Path, sampler: str) -> None:
    fixed = CONSTANT | {
        "train.eval_every": "none",
        "train.eval_steps": "0",
        "data.sampler": sampler,
    }
    # of the 96 that are read
    fixed |= {
        "data.num_train_samples": "20",
        "data.mock_num_documents": "12",
    }
    train(tmp_path / "whole", fixed)
    train(tmp_path / "longer", fixed | {"train.steps": "4"})
    train(tmp_path / "longer", fixed)
    assert rows(tmp_path / "longer") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "longer", 8) == hashes(tmp_path / "whole", 8)
    with pytest.raises(ConfigError, match=f"data.sampler: {sampler} before, sequential now"):
        train(tmp_path / "longer", fixed | {"data.sampler": "sequential"})


def test_extended_run_equals_the_long_run(tmp_path: Path) -> None:
    fixed = {"schedule.decay_steps": "8"}
    train(tmp_path / "whole", fixed)
    train(tmp_path / "longer", fixed | {"train.steps": "4"})
    train(tmp_path / "longer", fixed)
    assert rows(tmp_path / "longer") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "longer", 8) == hashes(tmp_path / "whole", 8)


def test_finished_run_is_reported_and_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert train(tmp_path, show=True) == Outcome("done", 8)
    assert f"{tmp_path} is already at step 8 of 8" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_changed_settings_are_listed_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, {"train.steps": "2"})
    train(tmp_path, {"train.steps": "4", "schedule.lr": "0.02"}, show=True)
    reported = capsys.readouterr().out
    assert "changed since the run was started: train.steps: 2 before, 4 now" in reported
    assert "changed since the run was started: schedule.lr: 0.01 before, 0.02 now" in reported
    assert f"resuming {tmp_path} at step 2" in reported


def train_as_rank(rank: int, world: int, run: TrainRun, path: Path) -> Outcome:
    """One rank of a run on several."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    return run_training(run, RunFolder(path), mesh, CPU, show=False)


def test_run_resumes_under_any_other_layout(tmp_path: Path) -> None:
    """Two ranks share weights and tokens, then one has all, then two divide optimizer state, then
    weights too."""
    fixed = CONSTANT | {"precision.params": "fp64", "optim.eps": "1e-3"}
    train(tmp_path / "whole", fixed)
    layouts = [
        {"parallel.tp": "2", "parallel.sp": "true"},
        {},
        {"parallel.zero": "1"},
        {"parallel.zero": "3"},
    ]
    for number, layout in enumerate(layouts):
        settings = fixed | layout | {"train.steps": str(2 * number + 2)}
        if layout:
            run_ranks(train_as_rank, 2, tiny_run(settings), tmp_path / "moved")
        else:
            train(tmp_path / "moved", settings)
    moved = [row for row in rows(tmp_path / "moved") if "loss" in row]
    whole = [row for row in rows(tmp_path / "whole") if "loss" in row]
    for mine, reference in zip(moved, whole, strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], rel=FP64.relative)
        assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=CURVE64.relative)
    assert_close(stored(tmp_path / "moved", 8), stored(tmp_path / "whole", 8), CURVE64)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_weights_loaded_in_slices_reach_every_rank(tmp_path: Path, params: str) -> None:
    train(tmp_path / "source", {"train.steps": "2"})
    fixed = CONSTANT | {
        "train.steps": "2",
        "train.micro_batch_size": "6",
        "checkpoint.load": str(tmp_path / "source"),
    }
    for zero in ("0", "1"):
        settings = fixed | {"parallel.zero": zero, "precision.params": params}
        run_ranks(train_as_rank, 2, tiny_run(settings), tmp_path / zero)
    whole, divided = rows(tmp_path / "0"), rows(tmp_path / "1")
    for mine, reference in zip(divided, whole, strict=True):
        # the sum of squares is made of other parts
        assert mine.pop("grad_norm", 0.0) == pytest.approx(
            reference.pop("grad_norm", 0.0), rel=1e-12
        )
    assert divided == whole


def flip_bit(file: Path) -> None:
    """Damage one byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_resume_falls_back_to_the_older_checkpoint_when_a_bit_of_the_newest_is_flipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, CONSTANT | {"train.steps": "6"})
    train(run, CONSTANT | {"train.steps": "4"})
    newest = run / "checkpoints" / "step_0000004"
    flip_bit(newest / "__0_0.distcp")
    assert train(run, CONSTANT | {"train.steps": "6", "checkpoint.keep": "1"}) == Outcome("done", 6)
    (record,) = [
        record.getMessage() for record in caplog.records if "skipping" in record.getMessage()
    ]
    assert record.startswith(f"skipping checkpoint step_0000004: {newest}/__0_0.distcp: the ")
    assert ": damaged. SHA-256 expected " in record
    assert record.endswith(f"It was renamed to {newest}.damaged. Resuming from step_0000002.")
    assert [path.name for path in (run / "checkpoints").glob("step_*.damaged")] == [
        "step_0000004.damaged"
    ]
    assert hashes(run, 6) == hashes(whole, 6)


def test_resume_from_a_damaged_checkpoint_without_an_older_one_is_rejected(tmp_path: Path) -> None:
    train(tmp_path, {"train.steps": "2"})
    newest = tmp_path / "checkpoints" / "step_0000002"
    flip_bit(newest / "__0_0.distcp")
    with pytest.raises(
        CheckpointError,
        match=f"{newest}/__0_0.distcp: .*damaged. SHA-256 .*Copy the checkpoint again",
    ):
        train(tmp_path)
    assert checkpoints(tmp_path) == [2], "it is not renamed"


def test_fallback_resets_optimizer_state_that_the_older_checkpoint_does_not_have(
    tmp_path: Path,
) -> None:
    """The damaged checkpoint has moments, and some are filled before the damage is read."""
    fixed = CONSTANT | {"checkpoint.missing_keys": "warn"}
    for name in ("plain", "damaged"):
        train(tmp_path / name, fixed | {"train.steps": "2", "checkpoint.save_optimizer": "false"})
    train(tmp_path / "damaged", fixed | {"train.steps": "4"})
    manifest = open_checkpoint(tmp_path / "damaged" / "checkpoints" / "step_0000004").manifest
    last = max(
        (box for tensor in manifest.tensors.values() for box in tensor.boxes),
        key=lambda box: box.offset,
    )
    with (tmp_path / "damaged" / "checkpoints" / "step_0000004" / last.file).open("r+b") as file:
        file.seek(last.offset + last.nbytes - 1)
        file.write(b"x")
    for name in ("plain", "damaged"):
        train(tmp_path / name, fixed)
    assert hashes(tmp_path / "damaged", 8) == hashes(tmp_path / "plain", 8)


@pytest.mark.slow
def test_two_ranks_fall_back_together_when_one_reads_damage(tmp_path: Path) -> None:
    layout = CONSTANT | {"parallel.tp": "2"}
    for name, steps in (("whole", "6"), ("run", "4")):
        run_ranks(train_as_rank, 2, tiny_run(layout | {"train.steps": steps}), tmp_path / name)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_0000004"
    box = open_checkpoint(checkpoint).manifest.tensors["model.layers.0.mlp.down"].boxes[-1]
    assert box.file == "__1_0.distcp", "which only the second rank reads under this layout"
    with (checkpoint / box.file).open("r+b") as file:
        file.seek(box.offset + box.nbytes - 1)
        file.write(b"x")
    outcomes = run_ranks(
        train_as_rank, 2, tiny_run(layout | {"train.steps": "6"}), tmp_path / "run"
    )
    assert outcomes == [Outcome("done", 6)] * 2
    assert hashes(tmp_path / "run", 6) == hashes(tmp_path / "whole", 6)
    assert (tmp_path / "run" / "checkpoints" / "step_0000004.damaged").is_dir()


def test_resume_warns_of_a_missing_dot_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, {"train.steps": "2"})
    (tmp_path / "checkpoints" / "step_0000002" / ".metadata").unlink()
    assert train(tmp_path, {"train.steps": "3"}) == Outcome("done", 3)
    text = (
        f"{tmp_path}/checkpoints/step_0000002/.metadata: cannot be read (No such file or directory)"
    )
    assert sum(text in record.getMessage() for record in caplog.records) == 1


def test_second_run_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(CheckpointError) as caught:
        train(tmp_path)
    text = str(caught.value)
    assert f"{tmp_path} is in use by process {os.getpid()} on " in text
    assert "Stop that process first, or choose another folder with --run" in text
    train(tmp_path, {"train.steps": "2"})


def test_changed_model_settings_are_rejected(tmp_path: Path) -> None:
    train(tmp_path, {"train.steps": "2"})
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match="model.num_layers: 2 before, 3 now"):
        train(tmp_path, {"model.num_layers": "3"})
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_checkpoint_of_another_model_is_rejected_with_the_differences(tmp_path: Path) -> None:
    train(tmp_path / "a", {"train.steps": "2"})
    (tmp_path / "a" / "config.yaml").unlink()
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "a", {"model.num_layers": "3"})
    text = str(caught.value)
    assert (
        "step_0000002 is a checkpoint of another model" in text
        and "only in this run: model.layers.2." in text
    )
    with pytest.raises(
        CheckpointError,
        match=r"has a different model:\n  field .*\n  model.hidden_size  24          48",
    ):
        train(tmp_path / "b", {"checkpoint.load": str(tmp_path / "a"), "model.hidden_size": "48"})


def test_a_run_can_start_from_the_weights_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", {"precision.params": "bf16"})
    train(tmp_path / "b", {"checkpoint.load": str(tmp_path / "a"), "train.steps": "1"}, show=True)
    assert f"starting from {tmp_path / 'a'}" in capsys.readouterr().out
    last, first = rows(tmp_path / "a")[-2]["loss"], rows(tmp_path / "b")[0]["loss"]
    assert first < last + 0.1
    assert rows(tmp_path / "b")[0]["step"] == 1


def test_skipped_weights_keep_initialization_and_resume_skips_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", {"train.steps": "2"})
    frozen: dict[str, Override] = {
        "train.steps": "1",
        "schedule.lr": "1e-30",
        "schedule.warmup_steps": "0",
    }
    train(tmp_path / "fresh", frozen)
    skip: dict[str, Override] = {
        "checkpoint.load": str(tmp_path / "a"),
        "checkpoint.skip": ["layers.1.*", "norm.*"],
    }
    train(tmp_path / "b", frozen | skip)
    assert (
        "tensors (" in caplog.text
        and "kept their initial values: model.layers.1.attention.kv" in caplog.text
    )
    found, fresh, source = (
        stored(tmp_path / name, step) for name, step in (("b", 1), ("fresh", 1), ("a", 2))
    )
    for name, tensor in found.items():
        if name.startswith("model."):
            kept = name.startswith(("model.layers.1.", "model.norm."))
            assert torch.equal(tensor, fresh[name] if kept else source[name]), name
    train(
        tmp_path / "b",
        skip | {"train.steps": "3", "schedule.lr": "1e-30", "schedule.warmup_steps": "0"},
    )
    assert torch.equal(stored(tmp_path / "b", 3)["model.norm.weight"], fresh["model.norm.weight"])
    assert caplog.text.count("kept their initial values") == 1


def test_resume_compares_models_even_if_only_checkpoints_were_kept(tmp_path: Path) -> None:
    train(tmp_path, {"train.steps": "2"})
    (tmp_path / "config.yaml").unlink()
    change: dict[str, Override] = {"train.steps": "3", "model.rope.theta": "500.0"}
    with pytest.raises(CheckpointError, match=r"model.rope.theta  10000.0     500.0"):
        train(tmp_path, change)
    assert train(tmp_path, change | {"checkpoint.allow_model_changes": "[model.rope]"}).step == 3


def test_resume_with_another_optimizer_needs_a_setting(tmp_path: Path) -> None:
    train(tmp_path, {"train.steps": "2"})
    change: dict[str, Override] = {"train.steps": "4", "optim.kind": "sgd"}
    with pytest.raises(CheckpointError, match="exp_avg_sq of .*; optim.kind=sgd needs momentum"):
        train(tmp_path, change)
    train(
        tmp_path, change | {"checkpoint.missing_keys": "warn", "checkpoint.unexpected_keys": "warn"}
    )
    state = json.loads((tmp_path / "checkpoints" / "step_0000004" / "state.json").read_text())
    assert state["optimizer_updates"] == 2, "moments that began at zero are two updates old"


def test_data_in_another_order_is_rejected(tmp_path: Path) -> None:
    train(tmp_path, {"train.steps": "2"})
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path, {"data.num_train_samples": "1000"})  # some epochs
    text = str(caught.value)
    assert (
        "step_0000002 was trained on other data or in another order:\n  then: pretrain mock" in text
    )
    assert (
        "Use the data and the data.num_train_samples that the run was started with, or "
        "choose "
        "another" in text
    )
    assert "Keep train.tokens_per_microbatch set or unset, as it was" in text


def test_extended_run_continues_with_more_epochs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = CONSTANT | {
        "train.eval_every": "none",
        "train.eval_steps": "0",
        "data.mock_num_documents": "12",
    }
    fixed |= {"checkpoint.every": "0"}
    train(tmp_path / "a", fixed | {"train.steps": "2"})
    train(tmp_path / "a", fixed | {"train.steps": "9"}, show=True)
    reported = capsys.readouterr().out
    assert "train.steps=9 reads 108 samples, and this run's order has " in reported
    assert "more epochs follow, each shuffled separately" in reported
    # Stopped on the way, made shorter, and longer again: what was read stays, whatever is asked for
    # later.
    train(tmp_path / "b", fixed | {"train.steps": "2"})
    assert (
        train(tmp_path / "b", fixed | {"train.steps": "9", "train.max_minutes": "0"}).kind
        == "stopped"
    )
    train(tmp_path / "b", fixed | {"train.steps": "7"}, show=True)
    assert "mtp epochs" not in capsys.readouterr().out
    assert rows(tmp_path / "b") == rows(tmp_path / "a")[:7]
    train(tmp_path / "b", fixed | {"train.steps": "19"})
    assert rows(tmp_path / "b")[:9] == rows(tmp_path / "a")
    assert open_checkpoint(tmp_path / "b" / "checkpoints" / "step_0000019").state[
        "order_longer"
    ] == [108, 228]


def test_error_names_maximum_steps_without_repetition(tmp_path: Path) -> None:
    stores = [write_store(tmp_path / name, start) for name, start in (("x", 1), ("y", 50))]
    fixed: dict[str, Override] = {
        "data.mock": "false",
        "data.path": stores,
        "data.split": "1,0,0",
        "train.eval_every": "none",
    }
    fixed |= {"train.eval_steps": "0"} | CONSTANT
    train(tmp_path / "run", fixed | {"train.steps": "1"})
    text = (
        r"train.steps=100 reads 1200 samples.* each of its \d+ samples only once. Set train.steps "
        r"to at most (\d+): with"
    )
    with pytest.raises(DataError, match=text) as caught:
        train(tmp_path / "run", fixed | {"train.steps": "100"})
    fits = int(re.findall(text, str(caught.value))[0])
    assert 1 < fits < 100
    assert train(tmp_path / "run", fixed | {"train.steps": str(fits)}) == Outcome("done", fits)


def test_too_small_data_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the training data has .* samples, and the run needs 1200"):
        train(tmp_path, {"data.num_train_samples": "96", "train.steps": "100"})


def test_eval_every_0_evaluates_after_the_last_step_only(tmp_path: Path) -> None:
    for value in ("0", "none"):
        train(tmp_path / value, {"train.eval_every": value, "train.steps": "3"})
        assert [row["step"] for row in rows(tmp_path / value) if "eval_loss" in row] == [3]
    tiny = tiny_run({"train.eval_every": "0", "train.eval_steps": "0"})
    assert run_problems(tiny, 1) == []


def test_tokenizer_larger_than_vocabulary_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"model.vocab_size=200 is smaller than the tokenizer's 257 tokens. Set"
    ):
        train(tmp_path, {"model.vocab_size": "200"})
    assert not (tmp_path / "config.yaml").exists()


def failing_saves(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Let saving fail at these steps."""
    save = health.save_checkpoint

    def maybe(folder: Path, step: int, *arguments: Any, **options: Any) -> Any:
        if step in steps:
            raise CheckpointError(f"step {step} was not saved to {folder}. Free some space.")
        return save(folder, step, *arguments, **options)

    monkeypatch.setattr(health, "save_checkpoint", maybe)


def test_failed_save_is_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_saves(monkeypatch, {4})
    assert train(tmp_path, show=True) == Outcome("done", 8)
    assert (
        "the run continues without this checkpoint: step 4 was not saved" in capsys.readouterr().out
    )
    assert checkpoints(tmp_path) == [2, 6, 8]


def test_successful_save_resets_the_count_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_saves(monkeypatch, {2, 6})
    assert train(tmp_path, {"checkpoint.max_save_failures": "2"}).kind == "done"
    assert checkpoints(tmp_path) == [4, 8]


def test_too_many_failures_in_a_row_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_saves(monkeypatch, {4, 6, 8})
    with pytest.raises(CheckpointError, match="step 6 was not saved"):
        train(tmp_path, {"checkpoint.max_save_failures": "2"})
    assert checkpoints(tmp_path) == [2]
    assert rows(tmp_path)[-1]["step"] == 6


def test_the_last_save_has_to_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_saves(monkeypatch, {8})
    with pytest.raises(CheckpointError, match="step 8 was not saved"):
        train(tmp_path)
    assert checkpoints(tmp_path) == [2, 4, 6]


def test_full_disk_does_not_stop_training_or_lose_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files cannot grow beyond 1 kB from step 3 on, and can again at step 7: the same errors as
    from a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    train(tmp_path / "whole")
    count = iter(range(1, 9))

    def limited(*arguments: Any, **options: Any) -> StepResult:
        step = next(count)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if 3 <= step < 7 else soft, hard))
        return train_step(*arguments, **options)

    monkeypatch.setattr(loop, "train_step", limited)
    reported: list[str] = []
    # pytest writes to files, too
    monkeypatch.setattr(loop.StepProgress, "print_line", lambda self, text: reported.append(text))
    try:
        assert train(tmp_path / "full") == Outcome("done", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = "\n".join(reported)
    assert "the run continues without this checkpoint: step 4 was not saved" in text
    assert "Earlier checkpoints are untouched; the newest is step_0000002" in text
    assert "metrics.jsonl cannot be written ([Errno 27] File too large); the run continues" in text
    assert checkpoints(tmp_path / "full") == [2, 8]
    assert rows(tmp_path / "full") == rows(tmp_path / "whole")
    assert hashes(tmp_path / "full", 8) == hashes(tmp_path / "whole", 8)


def test_a_signal_finishes_the_step_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    # noted during step 3, told to all ranks with step 4
    assert train(tmp_path) == Outcome("stopped", 4, "SIGTERM")
    assert checkpoints(tmp_path) == [2, 4]
    assert train(tmp_path) == Outcome("done", 8)
    train(tmp_path.with_name("whole"))
    assert rows(tmp_path) == rows(tmp_path.with_name("whole"))
    assert hashes(tmp_path, 8) == hashes(tmp_path.with_name("whole"), 8)


def test_skipped_step_is_counted_and_does_not_advance_schedules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = iter(range(1, 9))

    def overflowing(*arguments: Any, **options: Any) -> StepResult:
        result = train_step(*arguments, **options)
        return (
            replace(result, grad_norm=float("inf"), updated=False) if next(count) == 3 else result
        )

    monkeypatch.setattr(loop, "train_step", overflowing)
    train(tmp_path, show=True)
    assert "gradient norm inf; no update" in capsys.readouterr().out
    found = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["skipped"] for row in found] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert found[3]["lr"] == found[2]["lr"] != found[1]["lr"]
    assert found[2]["grad_norm"] is None


def test_logged_learning_rate_is_that_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []

    def recorded(*arguments: Any, lr: float, **options: Any) -> StepResult:
        rates.append(lr)
        return train_step(*arguments, lr=lr, **options)

    monkeypatch.setattr(loop, "train_step", recorded)
    train(tmp_path)
    assert len(set(rates)) > 4
    assert [row["lr"] for row in rows(tmp_path) if "loss" in row] == rates


def test_rows_are_logged_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    train(tmp_path, {"train.log_every": "3", "train.eval_every": "none"})
    assert [(row["step"], "loss" in row) for row in rows(tmp_path)] == [
        (3, True),
        (6, True),
        (8, True),
        (8, False),
    ]


def test_hfu_is_reported_with_recomputation(tmp_path: Path) -> None:
    settings = {"train.steps": "2", "observe.peak_tflops": "1e-6", "train.eval_steps": "0"}
    train(tmp_path / "plain", settings)
    assert all("hfu" not in row for row in read_metrics(tmp_path / "plain" / "metrics.jsonl"))
    train(tmp_path / "again", settings | {"recompute.granularity": "full"})
    run = tiny_run(settings)
    length = run.train.seq_len
    useful = step_flops(run.model, tokens=length, squared_lengths=length**2)
    layers = useful - head_flops(run.model, length)
    for row in read_metrics(tmp_path / "again" / "metrics.jsonl"):
        assert row["mfu"] > 10 and row["hfu"] / row["mfu"] == pytest.approx(
            1 + layers / 3 / useful, rel=1e-5
        )


def test_zero_eval_steps_disables_evaluation(tmp_path: Path) -> None:
    train(tmp_path, {"train.eval_steps": "0", "train.eval_every": "none", "train.steps": "2"})
    assert all("eval_loss" not in row for row in rows(tmp_path))


def test_without_regular_checkpoints_the_last_one_is_written(tmp_path: Path) -> None:
    train(tmp_path, {"checkpoint.every": "0"})
    assert checkpoints(tmp_path) == [8]


def test_a_run_that_never_updates_ends_with_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*arguments: Any, **options: Any) -> StepResult:
        return replace(train_step(*arguments, **options), grad_norm=float("nan"), updated=False)

    monkeypatch.setattr(loop, "train_step", nothing)
    monkeypatch.setattr(fault_detection, "MAX_SKIPPED_IN_A_ROW", 3)
    with pytest.raises(
        DataError,
        match=r"3 steps in a row were skipped, .* gradient norm nan .* Reduce schedule.lr",
    ):
        train(tmp_path)


def test_steps_without_update_are_counted_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        loop,
        "train_step",
        lambda *given, **options: replace(train_step(*given, **options), updated=False, empty=True),
    )
    monkeypatch.setattr(fault_detection, "MAX_SKIPPED_IN_A_ROW", 3)
    assert train(tmp_path, {**CONSTANT, "train.steps": "2"}).step == 2
    with pytest.raises(DataError, match="3 steps in a row were skipped"):
        train(tmp_path, {**CONSTANT, "train.steps": "3"})


FP16 = {
    "precision.params": "fp16",
    "precision.loss_scale.window": "3",
    "precision.loss_scale.hysteresis": "1",
    "precision.loss_scale.initial": str(2.0**24),
}


def test_resumed_fp16_run_has_bitwise_equal_loss_scale(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, {**CONSTANT, **FP16})
    train(parts, {**CONSTANT, **FP16, "train.steps": "4"})
    train(parts, {**CONSTANT, **FP16})
    scales = [row["loss_scale"] for row in rows(whole) if "loss_scale" in row]
    assert len(set(scales)) > 2 and scales[0] == 2.0**23  # the first step overflows
    steps = [row for row in rows(whole) if "loss" in row]
    assert [row for row in rows(parts) if "loss" in row] == steps
    assert hashes(parts, 8) == hashes(whole, 8)
    state = open_checkpoint(parts / "checkpoints" / "step_0000008").state
    assert set(state["loss_scale"]) == {"scale", "growth_tracker", "hysteresis_tracker", "stuck"}
    assert state["loss_scale"]["scale"] == scales[-1]


def test_overflow_that_lowers_the_loss_scale_is_saved(tmp_path: Path) -> None:
    """The first step of this fp16 run overflows."""
    assert train(
        tmp_path, CONSTANT | FP16 | {"checkpoint.every": "1", "train.steps": "1"}
    ) == Outcome("done", 1)
    state = open_checkpoint(tmp_path / "checkpoints" / "step_0000001").state
    assert state["loss_scale"]["scale"] == 2.0**23 and state["train"]["skipped"] == 1


def test_overflows_at_the_lowest_loss_scale_end_the_run_with_a_message(tmp_path: Path) -> None:
    lowest = str(2.0**40)  # too much for fp16, and it may not get lower
    settings = {**FP16, "precision.loss_scale.initial": lowest, "precision.loss_scale.min": lowest}
    with pytest.raises(
        DataError,
        match=r"loss scale at its minimum 1.09951e\+12 for 4 steps in a row: gradients are not "
        r"finite whatever the "
        r"scale \(in .*embed.weight.* on rank 0\). Reduce schedule.lr, .* or set "
        r"precision.params=bf16",
    ):
        train(tmp_path, {**settings, "precision.loss_scale.max_overflows": "4"})


def test_zeros_of_the_gradient_are_logged_on_request(tmp_path: Path) -> None:
    train(tmp_path, {"optim.count_zeros": "true"})
    zeros = [row["grad_zeros"] for row in rows(tmp_path) if "grad_zeros" in row]
    assert len(zeros) == 8 and min(zeros) > 24 * 60  # the rows of tokens that do not occur


def test_zero_on_one_rank_runs_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, {"parallel.zero": "1", "train.steps": "1"}, show=True).kind == "done"
    assert "parallel.zero=1 shards nothing: with dp=1" in capsys.readouterr().out


def test_settings_without_effect_are_named_when_a_run_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "parallel.context.kind": "gather",
        "parallel.pipeline.schedule": "gpipe",
        "train.steps": "1",
    }
    assert train(tmp_path, changes, show=True).kind == "done"
    reported = " ".join(capsys.readouterr().out.split())
    assert reported.count("no effect here") == 2
    assert (
        "parallel.context.kind=gather: no effect here, because with parallel.cp=1 "
        "sequences are not split" in reported
    )


def test_printed_messages_are_in_the_log(tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path, {"train.steps": "8", "schedule.lr": "3e-3"})
    text = (tmp_path / "log.txt").read_text()
    assert "saved step_0000008" in text
    assert "changed since the run was started: schedule.lr" in text


def test_run_without_its_checkpoints_restarts_and_keeps_the_old_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "checkpoints").rename(tmp_path / "lost")
    train(tmp_path, show=True)
    assert "has no checkpoint: starting from the beginning" in capsys.readouterr().out
    assert (tmp_path / "metrics.before-1.jsonl").read_text() == before


def test_run_without_its_lock_does_not_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(self: object) -> None:
        raise CheckpointError("taken over by process 7. Use another folder.")

    monkeypatch.setattr(loop.RunLock, "check", taken)
    with pytest.raises(CheckpointError, match="taken over by process 7"):
        train(tmp_path)
    assert checkpoints(tmp_path) == []


class RecordTokens(Callback):
    """Records the number of tokens read after each step."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_start(self, run: RunView) -> None:
        self.state = run.prepared.state

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        self.tokens.append(self.state.tokens)


def work_of_a_step(rank: int, world: int, run: TrainRun, path: Path) -> tuple[int, int]:
    """Useful operations and tokens that one rank counts in its first step."""
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    flops: list[int] = []
    original = metrics.trained_step_flops

    def record_flops(*arguments: Any, **options: Any) -> int:
        flops.append(original(*arguments, **options))
        return flops[-1]

    with patched(metrics, "trained_step_flops", record_flops):
        recorder = RecordTokens()
        run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=[recorder])
    return flops[0], recorder.tokens[0]


@pytest.mark.parametrize("documents", ["false", "true"])
def test_padding_of_document_slicing_does_not_count_as_flops(
    documents: str, tmp_path: Path
) -> None:
    fixed = {
        "train.seq_len": "11",
        "data.document_masking": documents,
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "train.steps": "1",
    }
    shared = {"parallel.cp": "2", "parallel.context.slicing": "document"}
    alone = work_of_a_step(0, 1, tiny_run(fixed), tmp_path / "one")
    for found in run_ranks(work_of_a_step, 2, tiny_run(fixed | shared), tmp_path / "two"):
        assert found == alone
    assert alone[1] == 12 * 11


def test_flops_are_those_of_the_documents_before_slicing(tmp_path: Path) -> None:
    """With windows it matters how long each document is, not only how long they are on average."""
    sft = {
        "data.mock": "false",
        "data.sft.mock_conversations": "15",
        "data.sft.template": "identity",
    }
    sizes = {
        "model.attention.window": "30",
        "train.seq_len": "96",
        "data.sft.overlong": "drop",
        "train.steps": "2",
    }
    reported: list[dict[str, Any]] = []
    right = metrics.trained_step_flops

    def spy(*settings: Any, **documents: Any) -> int:
        reported.append(documents)
        return right(*settings, **documents)

    run = tiny_run(sft | sizes | {"model.max_seq_len": "96", "train.eval_steps": "0"})
    with patched(metrics, "trained_step_flops", spy):
        run_training(run, RunFolder(tmp_path), build_single_rank_mesh(), CPU, show=False)
    assert len(reported) == 2
    for documents in reported:
        assert documents["windowed"] < documents["squared_lengths"] < documents["tokens"] * 96

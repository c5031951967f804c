"""A run that begins at another's step: with a new optimizer or with that one's, under any layout,
or with a refusal."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.config.train import TrainRun
from megalith.config.tree import Override
from megalith.data.loader import BatchSettings, Loader, MaskSettings
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.convert import convert
from megalith.hf.pretrained import locate_source, open_pretrained
from megalith.observe.metrics import read_metrics
from megalith.optim.schedule import learning_rate, schedule_lengths, weight_decay
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, assert_close
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.resume import (
    RunData,
    TrainState,
    build_checked_tokenizer,
    describe_checkpoint_source,
)
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries

CPU = torch.device("cpu")
SHORT: dict[str, Override] = {
    "train.steps": "4",
    "train.eval_every": "none",
    "train.eval_steps": "0",
}
LATER: dict[str, Override] = SHORT | {"train.steps": "6"}
WIDE: dict[str, Override] = {"precision.params": "fp64", "optim.eps": "1e-3"}
EXPERTS: dict[str, Override] = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "10",
}


def train(path: Path, settings: Mapping[str, Override], *, show: bool = False) -> Outcome:
    """The tiny run on one process."""
    return run_training(
        tiny_run(settings), RunFolder(path), build_single_rank_mesh(), CPU, show=show
    )


def train_as_rank(rank: int, world: int, run: TrainRun, path: Path) -> Outcome:
    """One rank of a run on several."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    return run_training(run, RunFolder(path), mesh, CPU, show=False)


def stored(path: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of one checkpoint."""
    checkpoint = open_checkpoint(path / "checkpoints" / f"step_{step:07d}")
    return {key: checkpoint.read(key) for key in checkpoint.manifest.tensors}


def state(path: Path, step: int) -> dict[str, object]:
    """state.json of one checkpoint."""
    document: dict[str, object] = json.loads(
        (path / "checkpoints" / f"step_{step:07d}" / "state.json").read_text()
    )
    return document


def begun_by_hand(
    source: Path, data: RunData, settings: Mapping[str, Override]
) -> dict[str, Tensor]:
    """What the last two steps make of weights from step 4, with AdamW begun anew at that rate and
    those rows."""
    run, mesh, rows = tiny_run(settings), build_single_rank_mesh(), 12
    trainer, before = build_trainer(run, mesh, CPU), stored(source, 4)
    with torch.no_grad():
        for slot in trainer.optimizer.slots:
            weights = before[f"model.{slot.shard.name}"]
            slot.weight.copy_(weights.view_as(slot.weight))
            slot.master.copy_(
                before.get(f"optimizer.master.{slot.shard.name}", weights).view_as(slot.master)
            )
    all_gather_loaded_params(trainer)
    lengths = schedule_lengths(
        run.schedule, batch_schedule=constant_batch_size(rows), total_steps=run.train.steps
    )
    assert data.splits.train is not None
    loader = Loader(
        data.splits.train,
        BatchSettings(
            batch_schedule=constant_batch_size(rows),
            micro_batch_size=2,
            masks=MaskSettings(
                eod=build_checked_tokenizer(run).eod, documents=run.data.document_masking
            ),
        ),
        mesh.dp,
        consumed=4 * rows,
        steps=2,
        device=CPU,
        slicing=local_slicing(run.parallel, mesh),
    )
    for step in (4, 5):
        rate = learning_rate(run.schedule, step * rows, lengths)
        decay = weight_decay(run.schedule, step * rows, lengths)
        train_step(trainer, loader.next(), lr=rate, weight_decay=decay)
    return {entry.key: entry.tensor.detach().clone() for entry in checkpoint_entries(trainer)}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[RunData]:
    """The data of every run that is built."""
    results: list[RunData] = []

    def recorded(splits: object, orders: tuple[int, ...]) -> RunData:
        results.append(RunData(splits, orders))  # type: ignore[arg-type]
        return results[-1]

    monkeypatch.setattr("megalith.train.resume.RunData", recorded)
    return results


@pytest.mark.parametrize("params", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_progress_without_optimizer_state_resets_adamw_at_that_step(
    params: str, tmp_path: Path, kept: list[RunData], capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = LATER | {"precision.params": params}
    train(tmp_path / "a", fixed | {"checkpoint.every": "4"})
    begun = fixed | {
        "checkpoint.load": str(tmp_path / "a/checkpoints/step_0000004"),
        "checkpoint.load_mode": "progress",
    }
    train(tmp_path / "b", begun, show=True)
    reported = capsys.readouterr().out
    assert (
        "step_0000004 at step 4 with a new optimizer state: 48 samples consumed, "
        "schedule at sample 48, learning rate 0.00345" in reported.replace("\n", " ")
    )
    reference, result = begun_by_hand(tmp_path / "a", kept[-1], fixed), stored(tmp_path / "b", 6)
    assert result.keys() == reference.keys()
    for key, tensor in result.items():
        assert torch.equal(tensor.view(-1), reference[key].reshape(-1)), key
    assert not torch.equal(
        result["optimizer.exp_avg_sq.norm.weight"],
        stored(tmp_path / "a", 6)["optimizer.exp_avg_sq.norm.weight"],
    )
    first = next(row for row in read_metrics(tmp_path / "b/metrics.jsonl") if "loss" in row)
    reference_row = next(
        row for row in read_metrics(tmp_path / "a/metrics.jsonl") if row["step"] == 5
    )
    assert [first[name] for name in ("step", "loss", "lr", "tokens")] == [
        reference_row[name] for name in ("step", "loss", "lr", "tokens")
    ]
    assert (
        state(tmp_path / "b", 6)["optimizer_updates"] == 2
        and state(tmp_path / "a", 6)["optimizer_updates"] == 6
    )


def test_load_mode_all_equals_uninterrupted_run(tmp_path: Path) -> None:
    train(tmp_path / "a", LATER | {"checkpoint.every": "4"})
    begun = LATER | {
        "checkpoint.load": str(tmp_path / "a/checkpoints/step_0000004"),
        "checkpoint.load_mode": "all",
    }
    train(tmp_path / "b", begun)
    for key, tensor in stored(tmp_path / "b", 6).items():
        assert torch.equal(tensor, stored(tmp_path / "a", 6)[key]), key
    assert state(tmp_path / "b", 6) == state(tmp_path / "a", 6)


@pytest.mark.slow
def test_run_that_started_with_a_new_optimizer_resumes_its_state(
    tmp_path: Path,
) -> None:
    train(tmp_path / "a", SHORT)
    begun = LATER | {
        "checkpoint.load": str(tmp_path / "a"),
        "checkpoint.load_mode": "progress",
        "checkpoint.every": "1",
    }
    train(tmp_path / "c", begun)
    train(tmp_path / "d", begun | {"train.max_minutes": "0"})
    train(tmp_path / "d", begun)
    for key, tensor in stored(tmp_path / "d", 6).items():
        assert torch.equal(tensor, stored(tmp_path / "c", 6)[key]), key


LAYOUTS: dict[str, dict[str, Override]] = {
    "tp": {"parallel.tp": "2", "parallel.sp": "true"},
    "zero 2": {"parallel.zero": "2"},
    "zero 3": {"parallel.zero": "3"},
    "pp": {"parallel.pp": "2"},
    "zero 1": {"parallel.zero": "1"},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaded_source_is_equal_under_any_layout(layout: str, tmp_path: Path) -> None:
    fixed = LATER | WIDE
    train(tmp_path / "a", fixed | SHORT)
    begun = fixed | {"checkpoint.load": str(tmp_path / "a"), "checkpoint.load_mode": "progress"}
    train(tmp_path / "one", begun)
    run_ranks(train_as_rank, 2, tiny_run(begun | LAYOUTS[layout]), tmp_path / "two")
    assert_close(stored(tmp_path / "two", 6), stored(tmp_path / "one", 6), FP64)


@pytest.mark.slow
def test_experts_are_resharded_over_other_ranks(tmp_path: Path) -> None:
    fixed = LATER | WIDE | EXPERTS
    run_ranks(
        train_as_rank,
        2,
        tiny_run(fixed | SHORT | {"parallel.tp": "2", "parallel.etp": "2"}),
        tmp_path / "a",
    )
    begun = fixed | {"checkpoint.load": str(tmp_path / "a"), "checkpoint.load_mode": "progress"}
    train(tmp_path / "one", begun)
    run_ranks(
        train_as_rank,
        2,
        tiny_run(begun | {"parallel.ep": "2", "parallel.zero": "1"}),
        tmp_path / "two",
    )
    assert_close(stored(tmp_path / "two", 6), stored(tmp_path / "one", 6), FP64)


def test_checkpoint_without_optimizer_state_error_names_settings_that_work(tmp_path: Path) -> None:
    lean = SHORT | {
        "checkpoint.save_optimizer": "false",
        "precision.params": "bf16",
        "checkpoint.every": "4",
    }
    train(tmp_path / "a", lean)
    assert all(key.startswith("model.") for key in stored(tmp_path / "a", 4))
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path / "a", lean | {"train.steps": "6"})
    text = str(caught.value)
    assert (
        "step_0000004 has no optimizer state: its run had checkpoint.save_optimizer=false" in text
    )
    assert (
        "set checkpoint.missing_keys=warn; in another folder, set checkpoint.load to it and "
        "checkpoint.load_mode=pro" in text
    )
    begun: dict[str, Override] = LATER | {
        "precision.params": "bf16",
        "checkpoint.load": str(tmp_path / "a"),
    }
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        train(tmp_path / "b", begun | {"checkpoint.load_mode": "all"})
    train(tmp_path / "b", begun | {"checkpoint.load_mode": "progress"})
    train(
        tmp_path / "a",
        lean
        | {
            "train.steps": "6",
            "checkpoint.missing_keys": "warn",
            "checkpoint.save_optimizer": "true",
        },
    )
    for key, tensor in stored(tmp_path / "b", 6).items():
        assert torch.equal(tensor, stored(tmp_path / "a", 6)[key]), key


@pytest.mark.parametrize(
    ("take", "multiple", "zero"),
    [
        ("all", "100", "0"),
        pytest.param("progress", "7", "0", marks=pytest.mark.slow),
        pytest.param("all", "7", "1", marks=pytest.mark.slow),
    ],
)
def test_loading_supports_other_vocabulary_padding(
    take: str, multiple: str, zero: str, tmp_path: Path
) -> None:
    fixed = LATER | WIDE | {"checkpoint.load": str(tmp_path / "a"), "checkpoint.load_mode": take}
    train(tmp_path / "a", LATER | WIDE | SHORT)
    train(tmp_path / "same", fixed)
    other = fixed | {"model.pad_vocab_to_multiple_of": multiple}
    if zero == "0":
        train(tmp_path / "other", other)
    else:
        run_ranks(train_as_rank, 2, tiny_run(other | {"parallel.zero": zero}), tmp_path / "other")
    before, after, vocab = stored(tmp_path / "same", 6), stored(tmp_path / "other", 6), 257
    assert before["model.embed.weight"].shape != after["model.embed.weight"].shape
    tables = {key for key in before if key.endswith(("embed.weight", "head.weight"))}
    assert len(tables) == 6 and all(not after[key][vocab:].any() for key in tables)
    assert_close(
        {key: one[:vocab] if key in tables else one for key, one in after.items()},
        {key: one[:vocab] if key in tables else one for key, one in before.items()},
        FP64,
    )


@pytest.mark.parametrize("fresh", [True, False])
def test_description_names_start_step_and_end_of_schedule(fresh: bool, tmp_path: Path) -> None:
    train(tmp_path / "a", SHORT | {"train.steps": "2"})
    checkpoint_source = open_checkpoint(locate_source(str(tmp_path / "a")))
    begun, state = (
        LATER | {"checkpoint.load_mode": "all"},
        TrainState.from_json(checkpoint_source.state["train"]),
    )
    reported = describe_checkpoint_source(tiny_run(begun), checkpoint_source, state, fresh=fresh)
    assert ("with a new optimizer state" in reported) == fresh and "train.steps" not in reported
    other = describe_checkpoint_source(
        tiny_run(begun | {"train.global_batch_size": "24"}), checkpoint_source, state, fresh=fresh
    )
    assert (
        "with the changed train.global_batch_size=24, train.steps=6 ends at sample 120 of" in other
    )
    assert other.endswith("the schedule's 144")


def test_checkpoint_without_step_is_rejected(tmp_path: Path) -> None:
    train(tmp_path / "a", SHORT | {"train.steps": "2"})
    source = open_pretrained(locate_source(str(tmp_path / "a")))
    convert(source, tmp_path / "release", "megalith")
    convert(source, tmp_path / "theirs", "huggingface")
    for name, lacks in (
        ("release", "its state lacks train, optimizer_updates"),
        ("theirs", "so there is no step to continue from"),
    ):
        begun = LATER | {
            "checkpoint.load": str(tmp_path / name),
            "checkpoint.load_mode": "progress",
        }
        with pytest.raises(
            CheckpointError,
            match=rf"checkpoint.load_mode=progress with checkpoint.load=.*{name}.*{lacks}",
        ):
            train(tmp_path / "b", begun)
    begun = {
        "checkpoint.load": str(tmp_path / "a"),
        "checkpoint.load_mode": "all",
        "train.steps": "2",
    }
    with pytest.raises(
        ConfigError,
        match=r"train.steps=2: .* is of step 2, where .* Set train.steps to more than 2",
    ):
        train(tmp_path / "b", begun)
    other: dict[str, Override] = {
        "checkpoint.load": str(tmp_path / "a"),
        "checkpoint.load_mode": "progress",
        "seed": "7",
    }
    with pytest.raises(
        CheckpointError,
        match=r"(?s)trained on other data or in another order.* checkpoint.load_mode=weights",
    ):
        train(tmp_path / "b", LATER | other)


def test_contradicting_load_settings_are_reported() -> None:
    alone = run_problems(tiny_run({"checkpoint.load_mode": "progress"}), 1)
    assert (
        len(alone) == 1
        and "checkpoint.load_mode=progress needs checkpoint.load, which is un" in alone[0]
    )
    skips = run_problems(
        tiny_run(
            {
                "checkpoint.load_mode": "all",
                "checkpoint.load": "a",
                "checkpoint.skip": ["head.*"],
            }
        ),
        1,
    )
    assert (
        len(skips) == 1 and "checkpoint.load_mode=all with checkpoint.skip=['head.*']" in skips[0]
    )
    rows: dict[str, Override] = {
        "checkpoint.load_mode": "progress",
        "checkpoint.load": "a",
        "checkpoint.new_rows": "mean",
    }
    (reported,) = run_problems(tiny_run(rows), 1)
    assert (
        "checkpoint.load_mode=progress with checkpoint.new_rows=mean" in reported
        and "remove checkpoint.new_rows" in reported
    )
    adapters = run_problems(
        tiny_run({"checkpoint.load_mode": "progress", "checkpoint.load": "a", "lora.rank": "2"}), 1
    )
    assert any(
        "checkpoint.load_mode=progress with lora.rank=2: new adapters start at step 0" in t
        for t in adapters
    )

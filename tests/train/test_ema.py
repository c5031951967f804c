"""Exponential moving average of the weights: formula, resume, layouts, loading."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.cli.main import main
from megalith.config.train import EMAConfig
from megalith.config.tree import Override
from megalith.data.loader import BatchSettings, Loader
from megalith.errors import CheckpointError
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.workload import plan_workload
from megalith.hf.pretrained import open_pretrained
from megalith.optim.ema import WeightEMA
from megalith.optim.slots import build_slot
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, assert_close
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import load_matrix
from megalith.verify.ranks import RaggedRows, compare_with_one_process, compute_reference

CPU = torch.device("cpu")
SHORT: dict[str, Override] = {
    "train.steps": "4",
    "train.eval_every": "none",
    "train.eval_steps": "0",
    "train.ema.decay": "0.7",
}


def train(path: Path, settings: Mapping[str, Override]) -> Outcome:
    run = tiny_run(settings)
    return run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)


def train_as_rank(rank: int, world: int, settings: Mapping[str, Override], path: Path) -> None:
    run = tiny_run(settings)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)


def stored(path: Path, step: int, prefix: str = "") -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path / "checkpoints" / f"step_{step:07d}")
    names = [key for key in checkpoint.manifest.tensors if key.startswith(prefix)]
    return {key: checkpoint.read(key) for key in names}


@pytest.mark.parametrize("device", [None, "cpu"])
def test_average_follows_its_formula(device: str | None) -> None:
    shard = Shard.full("w", (5,), dtype="bf16")
    slot = build_slot(shard, torch.zeros(5, dtype=torch.bfloat16), ())
    assert device in (None, "cpu")
    config = EMAConfig(decay=0.9, every=2, start_step=3, device="cpu" if device else None)
    ema = WeightEMA([slot], config)
    expected = torch.zeros(5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 10):
        slot.master.normal_(generator=generator)
        ema.update(step)
        if step <= 3:
            expected = slot.master.double()
        elif step % 2 == 0:
            expected = 0.9 * expected + 0.1 * slot.master.double()
        (average,) = ema.averages
        assert average.dtype == torch.float32 and average is not slot.master
        torch.testing.assert_close(average.double(), expected, rtol=0, atol=1e-6)


def test_resumed_run_has_the_same_average_bit_for_bit(tmp_path: Path) -> None:
    settings = SHORT | {"precision.params": "bf16", "train.ema.every": "2"}
    settings["schedule.decay_steps"] = "4"
    train(tmp_path / "whole", settings)
    train(tmp_path / "parts", settings | {"train.steps": "2"})
    train(tmp_path / "parts", settings)
    whole, parts = stored(tmp_path / "whole", 4), stored(tmp_path / "parts", 4)
    assert whole.keys() == parts.keys()
    averages = [key for key in whole if key.startswith("optimizer.ema.")]
    master_weights = [key for key in whole if key.startswith("optimizer.master.")]
    assert len(averages) == len(master_weights) > 0
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert not torch.equal(whole[averages[0]], whole[averages[0].replace("ema", "master")])


@pytest.mark.slow  # rows of the layout matrix in `make test` reshard averages
def test_resume_under_other_layouts_equals_one_process(tmp_path: Path) -> None:
    wide = SHORT | {
        "precision.params": "fp64",
        "optim.eps": "1e-3",
        "schedule.decay_steps": "4",
    }
    train(tmp_path / "one", wide)
    expected = stored(tmp_path / "one", 4)
    layouts: list[dict[str, Override]] = [
        {"parallel.tp": "2", "parallel.sp": "true"},
        {"parallel.dp": "2", "parallel.zero": "3"},
    ]
    for number, layout in enumerate(layouts):
        path = tmp_path / f"{number}"
        train(path, wide | {"train.steps": "2"})
        run_ranks(train_as_rank, 2, wide | layout, path)
        result = stored(path, 4)
        assert_close(result, expected, FP64)


@pytest.fixture
def own_reference() -> Iterator[None]:
    """Compute references of one process in this test only: other tests share theirs."""
    compute_reference.cache_clear()
    yield
    compute_reference.cache_clear()


@pytest.mark.usefixtures("own_reference")
def test_wrong_average_of_a_layout_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def update_in_every_step(ema: WeightEMA, num_updates: int) -> None:
        torch._foreach_lerp_(ema.averages, [slot.master for slot in ema.slots], 0.25)

    (row,) = (row for row in load_matrix() if row.name == "ema, dp2, zero 1")
    monkeypatch.setattr(WeightEMA, "update", update_in_every_step)
    differences = compare_with_one_process(row.case())  # the fault is in the reference process
    failed = {each.what: each.name for each in differences if not each.holds}
    assert failed["checkpoint"].startswith("optimizer.ema.")


def test_skipped_step_does_not_update_the_average() -> None:
    run = tiny_run(SHORT | {"optim.nonfinite_grad": "skip"})
    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    loader = Loader(
        RaggedRows(12, 257, 24, masked=()),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=6),
        trainer.mesh.dp,
        consumed=0,
        steps=2,
        device=CPU,
    )
    ema, param = trainer.ema, trainer.data.local_params[-1]
    assert ema is not None
    before, weight = [average.clone() for average in ema.averages], param.weight.clone()
    param.weight.fill_(torch.inf)
    trainer.data.all_gather_params()
    assert not train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0).updated
    assert all(map(torch.equal, ema.averages, before))
    param.weight.copy_(weight)
    trainer.data.all_gather_params()
    assert train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0).updated
    assert not any(map(torch.equal, ema.averages, before))


def test_checkpoint_without_average_starts_it_from_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without = {key: value for key, value in SHORT.items() if "ema" not in key}
    train(tmp_path, without | {"train.steps": "2", "precision.params": "bf16"})
    train(tmp_path, SHORT | {"train.ema.start_step": "2", "precision.params": "bf16"})
    log = (tmp_path / "log.txt").read_text() + capsys.readouterr().out
    assert "train.ema: the moving average starts from the weights of " in log
    assert "step_0000002, which has none" in log
    average, start = stored(tmp_path, 4, "optimizer.ema."), stored(tmp_path, 2, "optimizer.master.")
    master_weights = stored(tmp_path, 4, "optimizer.master.")
    for key, value in average.items():
        name = key.replace("ema", "master")
        assert not torch.equal(value, start[name]) and not torch.equal(value, master_weights[name])


def test_average_that_the_run_does_not_have_is_an_error(tmp_path: Path) -> None:
    train(tmp_path, SHORT | {"train.steps": "2"})
    without = {key: value for key, value in SHORT.items() if "ema" not in key}
    with pytest.raises(CheckpointError, match="train.ema is unset, and .* has a moving average"):
        train(tmp_path, without)
    train(tmp_path, without | {"checkpoint.unexpected_keys": "warn"})
    assert not stored(tmp_path, 4, "optimizer.ema.")


def test_average_is_saved_without_optimizer_state(tmp_path: Path) -> None:
    train(tmp_path, SHORT | {"train.steps": "2", "checkpoint.save_optimizer": "false"})
    roles = {key.split(".")[1] for key in stored(tmp_path, 2, "optimizer.")}
    assert roles == {"ema"}
    with pytest.raises(CheckpointError, match="has no optimizer state"):
        train(tmp_path, SHORT)


def test_start_step_counts_updates_before_a_reset_of_the_optimizer(tmp_path: Path) -> None:
    settings = SHORT | {
        "precision.params": "bf16",
        "checkpoint.save_optimizer": "false",
        "checkpoint.missing_keys": "warn",
        "train.ema.start_step": "1",
        "train.ema.decay": "0.9999",
    }
    train(tmp_path, settings | {"train.steps": "3"})
    train(tmp_path, settings)
    before, after = stored(tmp_path, 3, "optimizer.ema."), stored(tmp_path, 4, "optimizer.ema.")
    for key, value in after.items():
        weight = stored(tmp_path, 4, f"model.{key.removeprefix('optimizer.ema.')}")
        (weights,) = (each for name, each in weight.items() if name.endswith(key[14:]))
        change = (value - before[key]).abs().max()
        assert change < 0.1 * (weights.float() - before[key]).abs().max(), key


def test_role_ema_reads_the_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", SHORT | {"precision.params": "bf16"})
    path = tmp_path / "run" / "checkpoints" / "step_0000004"
    averages = stored(tmp_path / "run", 4, "optimizer.ema.")
    source = open_pretrained(path, role="ema")
    for key, values in averages.items():
        name, box = key.removeprefix("optimizer.ema."), tuple((0, n) for n in values.shape)
        assert torch.equal(source.weights.read(name, box, torch.float32), values)
    losses = []
    for role in ("param", "ema"):
        words = ["evaluate", str(tmp_path / "run"), "--samples", "12", "--role", role]
        assert main(words) == 0
        losses.append(capsys.readouterr().out)
    assert losses[0] != losses[1]
    target = tmp_path / "average"
    words = ["convert", str(path), str(target), "--to", "megalith", "--role", "ema"]
    assert main(words) == 0
    converted = open_checkpoint(target)
    for key, values in averages.items():
        name = key.replace("optimizer.ema.", "model.")
        assert torch.equal(converted.read(name), values.to(torch.bfloat16))
    capsys.readouterr()
    for words in (["convert", str(target), str(tmp_path / "again")], ["generate", str(target)]):
        assert main([*words, "--role", "ema"]) == 2
        assert "has no moving average of the weights (role ema)" in capsys.readouterr().err


def test_invalid_settings_are_rejected() -> None:
    cases: list[tuple[dict[str, Override], str]] = [
        ({"train.ema.decay": "1.0"}, "train.ema.decay=1.0"),
        ({"train.ema.decay": "-0.1"}, "train.ema.decay=-0.1"),
        ({"train.ema.every": "0"}, "train.ema.every=0"),
        ({"train.ema.every": "9"}, "Set train.ema.every to at most 8."),
        ({"train.ema.start_step": "8"}, "Set train.ema.start_step to at most 7."),
        (
            {"lora.rank": "2", "checkpoint.load": "x"},
            "with lora.rank=2: a moving average of adapters cannot be evaluated",
        ),
    ]
    for settings, text in cases:
        problems = run_problems(tiny_run({"train.ema.decay": "0.9"} | settings), 1)
        assert len(problems) == 1 and text in problems[0], (settings, problems)


def test_memory_estimate_equals_the_built_averages() -> None:
    for settings, nbytes in (({}, None), ({"train.ema.device": "cpu"}, 0)):
        run = tiny_run({"train.ema.decay": "0.9", "precision.params": "bf16"} | settings)
        trainer = build_trainer(run, build_single_rank_mesh(), CPU)
        assert trainer.ema is not None
        built = sum(average.nbytes for average in trainer.ema.averages)
        memory = worst(memory_ledger(plan_workload(run, 1))).memory
        assert memory.ema == (built if nbytes is None else nbytes)

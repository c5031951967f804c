"""Encoded optimizer states in training: layouts, checkpoints of every pair of formats, memory."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.optim import OptimConfig, OptimizerStatesConfig, PrecisionConfig
from megalith.config.tree import Override
from megalith.errors import ConfigError
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.workload import plan_workload
from megalith.observe.metrics import read_metrics
from megalith.optim.encodings import encode_moment
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.plan.state_encodings import (
    select_moment_dtype,
    state_encoding_notes,
    state_encoding_problems,
)
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import Trainer
from megalith.train.trainer import build_optimizer, build_trainer, checkpoint_entries

CPU = torch.device("cpu")
STATES = "precision.optimizer_states"
SETTINGS: dict[str, Override] = {
    "train.steps": "4",
    "train.eval_every": "none",
    "train.eval_steps": "0",
    "train.log_every": "1",
    "checkpoint.every": "2",
    "checkpoint.keep": "none",
    "precision.params": "bf16",
}
FORMATS: dict[str, dict[str, Override]] = {
    "fp32": {},
    "bf16": {
        f"{STATES}.master_weights": "remainder",
        f"{STATES}.first_moment": "bf16",
        f"{STATES}.second_moment": "bf16",
    },
    "int8": {
        f"{STATES}.master_weights": "remainder",
        f"{STATES}.first_moment": "int8",
        f"{STATES}.second_moment": "int8",
    },
    "fp8 and fp16": {
        f"{STATES}.first_moment": "fp8",
        f"{STATES}.second_moment": "fp16",
    },
    "none": {
        f"{STATES}.master_weights": "none",
        f"{STATES}.first_moment": "int8",
        f"{STATES}.second_moment": "int8",
    },
}


def train(folder: Path, settings: Mapping[str, Override]) -> list[float]:
    """Run the tiny run on one process; return the losses."""
    run = tiny_run(SETTINGS | dict(settings))
    run_training(run, RunFolder(folder), build_single_rank_mesh(), CPU, show=False)
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def train_rank(rank: int, world: int, settings: Mapping[str, Override], folder: Path) -> None:
    run = tiny_run(SETTINGS | dict(settings))
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(folder), mesh, CPU, show=False)


def read_step(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step_{step:07d}")
    return {key: checkpoint.read(key) for key in checkpoint.manifest.tensors}


# --- layouts

SIZES: dict[str, Override] = {
    # each rank's rows are whole blocks of 256 elements, also under FSDP
    "model.vocab_size": "512",
    "model.hidden_size": "64",
    "model.head_dim": "16",
    "model.ffn_hidden_size": "64",
    "checkpoint.every": "4",
    "train.micro_batch_size": "6",
}
ZERO1: dict[str, Override] = {"parallel.zero": "1", "parallel.bucket_numel": "9000"}
LAYOUTS: dict[str, dict[str, Override]] = {
    "dp": {"parallel.dp": "2"},
    "zero1": {"parallel.dp": "2", **ZERO1},
    "zero2": {"parallel.dp": "2", "parallel.zero": "2"},
    "zero3": {"parallel.dp": "2", "parallel.zero": "3"},
    "tp": {"parallel.tp": "2"},
}
SHARDED = ("zero1", "zero2")
"""Layouts with the gradients of `dp`, bit by bit."""


def train_layouts(
    rank: int, world: int, settings: Mapping[str, Override], names: list[str], folder: Path
) -> None:
    for name in names:
        train_rank(rank, world, {**settings, **LAYOUTS[name]}, folder / name)


def check_layouts(folder: Path, formats: str, names: list[str]) -> None:
    settings = SIZES | FORMATS[formats]
    losses = train(folder / "one", settings)
    run_ranks(train_layouts, 2, settings, names, folder)
    expected, replicated = read_step(folder / "one", 4), read_step(folder / "dp", 4)
    for name in names:
        rows = read_metrics(folder / name / "metrics.jsonl")
        assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(losses, rel=2e-3)
        tensors = read_step(folder / name, 4)
        assert tensors.keys() == expected.keys()
        for key, tensor in tensors.items():
            if name in SHARDED:
                assert torch.equal(tensor, replicated[key]), (name, key)
            # gradients that differ by rounding flip codes and roundings of bf16 weights
            error = (tensor.double() - expected[key].double()).norm()
            assert error <= 0.05 * expected[key].double().norm(), (name, key)


def test_zero1_divides_the_codes_of_one_process(tmp_path: Path) -> None:
    check_layouts(tmp_path, "int8", ["dp", "zero1"])


@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS)
def test_layouts_match_one_process(tmp_path: Path, formats: str) -> None:
    check_layouts(tmp_path, formats, [*LAYOUTS])


def test_fsdp_rows_that_split_blocks_are_rejected(tmp_path: Path) -> None:
    settings = SETTINGS | FORMATS["int8"] | LAYOUTS["zero3"]
    run = tiny_run(settings)
    shard = replace(Shard.full("layers.0.mlp.down", (24, 20), dtype="bf16"), flat=(0, 240))
    weights = [(shard, torch.zeros(240, dtype=torch.bfloat16))]
    with pytest.raises(ConfigError, match="or parallel.zero to 2 or less"):
        build_optimizer(weights, run.optim, states=run.precision.optimizer_states)


# --- checkpoints


def build(formats: str) -> Trainer:
    """Build a trainer whose states have been updated with random gradients."""
    trainer = build_trainer(tiny_run(SETTINGS | FORMATS[formats]), build_single_rank_mesh(), CPU)
    return trainer


def update(trainer: Trainer, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        gradients = [
            torch.randn(slot.weight.shape, generator=generator) for slot in trainer.optimizer.slots
        ]
        trainer.optimizer.step(gradients, lr=1e-2, weight_decay=0.1)


def save(trainer: Trainer, folder: Path) -> None:
    state = {"optimizer_updates": trainer.optimizer.updates}
    entries = checkpoint_entries(trainer)
    save_checkpoint(folder, 1, entries, state, trainer.mesh.world, config_text="")


def load(trainer: Trainer, folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "step_0000001")
    checkpoint.load_into(checkpoint_entries(trainer), trainer.mesh.world)
    trainer.optimizer.set_updates(int(checkpoint.state["optimizer_updates"]))


@pytest.mark.parametrize("saved", FORMATS)
def test_every_format_loads_into_every_other(
    tmp_path: Path, saved: str, caplog: pytest.LogCaptureFixture
) -> None:
    source = build(saved)
    update(source, 2)
    save(source, tmp_path)
    for formats in FORMATS:
        target = build(formats)
        load(target, tmp_path)
        states = target.run.precision.optimizer_states
        for old, new in zip(source.optimizer.slots, target.optimizer.slots, strict=True):
            master = old.read_master().float()
            if states.master_weights == "none":
                torch.testing.assert_close(new.weight.float(), master, rtol=2**-8, atol=0)
            else:
                assert torch.equal(new.read_master(), master), (formats, new.shard.name)
            assert torch.equal(new.weight, old.weight), (formats, new.shard.name)
            for role in new.state:
                values = old.read_state(role)
                dtype = select_moment_dtype(role, new.shard.inputs, states)
                if dtype != "fp32":
                    encoded = encode_moment(values, dtype, is_unsigned=role == "exp_avg_sq")
                    values = encoded.decode(0, encoded.numel).view(values.shape)
                assert torch.equal(new.read_state(role), values), (formats, new.shard.name, role)
    assert not caplog.records


@pytest.mark.parametrize("formats", FORMATS)
def test_resume_with_the_same_formats_is_bitwise(tmp_path: Path, formats: str) -> None:
    source, resumed = build(formats), build(formats)
    update(source, 2)
    save(source, tmp_path)
    load(resumed, tmp_path)
    for trainer in (source, resumed):
        update(trainer, 3)
    for old, new in zip(source.optimizer.slots, resumed.optimizer.slots, strict=True):
        assert torch.equal(old.weight, new.weight)
        assert torch.equal(old.read_master(), new.read_master())
        for role in old.state:
            assert torch.equal(old.read_state(role), new.read_state(role))


@pytest.mark.parametrize("formats", ["int8", pytest.param("none", marks=pytest.mark.slow)])
def test_run_with_average_and_asynchronous_saves_resumes_bitwise(
    tmp_path: Path, formats: str
) -> None:
    settings: dict[str, Override] = {
        **FORMATS[formats],
        "train.ema.decay": "0.7",
        "observe.param_norm": "true",
        "checkpoint.async_save": "true",
    }
    train(tmp_path / "whole", settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step_0000004")
    (tmp_path / "resumed/checkpoints/latest").unlink(missing_ok=True)
    train(tmp_path / "resumed", settings)
    whole, resumed = read_step(tmp_path / "whole", 4), read_step(tmp_path / "resumed", 4)
    assert whole.keys() == resumed.keys()
    for key, tensor in whole.items():
        assert torch.equal(tensor, resumed[key]), key


# --- memory


def test_ledger_equals_the_stored_bytes() -> None:
    """bf16 weights, remainders, int8 moments and fp32 gradients: 10 bytes per parameter."""
    for formats, nbytes in (("int8", 10), ("bf16", 12), ("fp32", 18), ("none", 8)):
        run = tiny_run(SETTINGS | SIZES | {"model.hidden_size": "256"} | FORMATS[formats])
        trainer = build_trainer(run, build_single_rank_mesh(), CPU)
        assert isinstance(trainer.data, BucketedDataParallel)
        numel, measured = 0, sum(each.nbytes for each in trainer.data.gradients)
        for slot in trainer.optimizer.slots:
            stored = slot.list_stored_tensors().values()
            measured += slot.weight.nbytes + sum(tensor.nbytes for tensor in stored)
            numel += slot.weight.numel()
        ledger = worst(memory_ledger(plan_workload(run, 1))).memory.state
        assert measured == pytest.approx(ledger, rel=0.02), formats
        assert measured == pytest.approx(nbytes * numel, rel=0.02), formats


# --- rules


def list_problems(precision: PrecisionConfig, optim: OptimConfig | None = None) -> list[str]:
    return state_encoding_problems(optim or OptimConfig(), precision)


def test_formats_that_cannot_work_are_rejected() -> None:
    remainder = OptimizerStatesConfig(master_weights="remainder")
    (text,) = list_problems(PrecisionConfig(params="fp32", optimizer_states=remainder))
    assert text == (
        "precision.optimizer_states.master_weights=remainder with precision.params=fp32: "
        "remainders are the low 16 bits of fp32 values whose high 16 bits are bf16 weights. Set "
        "precision.params=bf16, or precision.optimizer_states.master_weights=fp32."
    )
    none = OptimizerStatesConfig(master_weights="none")
    (text,) = list_problems(PrecisionConfig(params="fp16", optimizer_states=none))
    assert "updates are rounded stochastically to bf16 weights. Set precision.params=bf16" in text
    int8 = OptimizerStatesConfig(first_moment="int8", second_moment="int8")
    texts = list_problems(PrecisionConfig(params="fp64", optimizer_states=int8))
    assert len(texts) == 2 and "which is for verification" in texts[0]
    sgd = OptimConfig(kind="sgd", momentum=0.0)
    texts = list_problems(PrecisionConfig(params="bf16", optimizer_states=int8), sgd)
    assert "first_moment=int8: the optimizer (sgd) has no moments. Remove" in texts[0]
    (text,) = list_problems(
        PrecisionConfig(params="bf16", optimizer_states=int8), OptimConfig(kind="lion")
    )
    assert "second_moment=int8: the optimizer (lion) has only exp_avg" in text
    texts = list_problems(
        PrecisionConfig(params="bf16", optimizer_states=int8), OptimConfig(kind="muon")
    )
    assert "with muon: states of rules for whole matrices are fp32" in texts[-1]
    assert not list_problems(PrecisionConfig(params="fp32", optimizer_states=int8))
    settings = {"precision.params": "fp32", f"{STATES}.master_weights": "none"}
    assert "master_weights=none with" in "".join(run_problems(tiny_run(settings), 1))


def test_bf16_second_moments_with_large_beta2_are_noted() -> None:
    states = OptimizerStatesConfig(second_moment="bf16")
    precision = PrecisionConfig(params="bf16", optimizer_states=states)
    assert not state_encoding_notes(OptimConfig(beta2=0.95), precision)
    (note,) = state_encoding_notes(OptimConfig(beta2=0.999), precision)
    assert "0.996 = 1 - 2**-8" in note and "optim.beta2 to 0.95" in note

"""Megatron checkpoints with the interface of `Checkpoint`: which folder is read; tensors
bit for bit."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.checkpoint.format import pieces
from megalith.checkpoint.iterations import list_iterations
from megalith.checkpoint.keys import MASTER, MODEL
from megalith.config.tree import Override, apply_overrides
from megalith.errors import CheckpointError
from megalith.hf.megatron_checkpoint import (
    MegatronCheckpoint,
    is_megatron,
    locate_megatron,
    open_megatron,
    read_megatron_folder,
    read_progress,
)
from megalith.hf.megatron_names import MEGATRON, normalize_tensors
from megalith.hf.pretrained import locate_source, with_optimizer
from megalith.hf.tensor_rules import build_rules, to_parameter_layout
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Box
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.trainer import build_trainer, checkpoint_entries
from tests.megatron_folders import chunked

Extract = Callable[[str], Path]


# --- folders


def test_sources_are_located_by_their_tracker(megatron_folder: Extract) -> None:
    source = megatron_folder("dense_dp_reshardable")
    iteration = source / "iter_0000002"
    assert locate_source(str(source)) == locate_source(str(iteration)) == iteration
    assert locate_megatron(source, 2) == iteration
    assert list(list_iterations(source).values()) == [iteration]
    assert is_megatron(iteration) and not is_megatron(source)


def test_iteration_that_does_not_exist_is_rejected_with_the_others(
    megatron_folder: Extract,
) -> None:
    source = megatron_folder("dense_dp_reshardable")
    for find in (
        partial(locate_megatron, source, 150),
        partial(locate_source, str(source / "iter_0000150")),
    ):
        with pytest.raises(CheckpointError) as error:
            find()
        assert str(error.value) == (
            f"{source} has no iteration 150. Use one of its iterations: iter_0000002."
        )


def test_other_folders_are_not_megatron_checkpoints(tmp_path: Path) -> None:
    for name in ("state.json", "manifest.json", "config.json", "adapter_config.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / ".metadata").touch()
        (folder / "metadata.json").write_text("[]")
        (folder / name).touch()
        assert not is_megatron(folder), name
    assert locate_megatron(tmp_path) is None
    assert locate_megatron(tmp_path / "iter_0000001") is None


# --- state


COUNTERS = {"global_batch_size": 8, "seq_length": 16, "consumed_train_samples": 40}


@pytest.mark.parametrize("value", ["abc", -1, 2.5, float("nan"), True, [1], {"a": 1}, 10**400])
@pytest.mark.parametrize("name", ["train_samples", "train_iters", *COUNTERS])
def test_counters_of_other_types_are_rejected(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"its {name} is .*checkpoint.load_mode=weights"):
        read_progress({"iteration": 5}, COUNTERS | {name: value}, Path("iter_0000005"))


def test_schedule_that_is_no_dict_is_rejected() -> None:
    for schedule in ("abc", [1], 3):
        common = {"iteration": 5, "opt_param_scheduler": schedule}
        with pytest.raises(CheckpointError, match="its opt_param_scheduler is .*expected a dict"):
            read_progress(common, COUNTERS, Path("iter_0000005"))


def test_order_of_samples_is_that_of_the_first_start() -> None:
    for lengths, total in (
        ({"train_iters": 100}, 800),
        ({"train_samples": 900, "train_iters": 112}, 900),
    ):
        state = read_progress({"iteration": 5}, COUNTERS | lengths, Path("iter_0000005"))
        assert state["order_samples"] == total
        assert state["train"]["scheduled_samples"] == 40
    assert "order_samples" not in read_progress({"iteration": 5}, COUNTERS, Path("iter_0000005"))


@pytest.mark.parametrize("value", ["abc", [1], -3, 2.5, 10**400])
def test_number_of_ranks_does_not_affect_the_weights(
    value: object, megatron_folder: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = megatron_folder("dense_tied_fully_reshardable") / "iter_0000002"
    folder = read_megatron_folder(path)
    folder.common["args"].state["world_size"] = value
    monkeypatch.setattr("megalith.hf.megatron_checkpoint.read_dcp_folder", lambda _: folder)
    assert open_megatron(path).manifest.world_size == 1


# --- tensors


def expected_tensors(folder: Path, checkpoint: MegatronCheckpoint) -> dict[str, Tensor]:
    """Our tensors, by the rules, from the full tensors that the fixture's script collected."""
    model = checkpoint.run.model
    reference = {
        re.sub(r"^optimizer\.(master|exp_avg|exp_avg_sq)\.", _state_key, name): values
        for name, values in load_file(folder / "reference.safetensors").items()
    }
    chunks = {name: chunked(name, values) for name, values in reference.items()}
    canonical = normalize_tensors(replace(checkpoint.folder, tensors=chunks), model)
    tensors: dict[str, Tensor] = {}
    for prefix in (MODEL, MASTER, "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
        for rule in build_rules(MEGATRON, model):
            name = f"{'' if prefix == MODEL else prefix}{rule.name}"
            if name not in canonical:
                continue
            key, values = f"{prefix}{rule.parameter}", canonical[name].read()
            whole = tensors.setdefault(key, torch.zeros(checkpoint.shape(key), dtype=values.dtype))
            part = values.view(rule.view)[tuple(slice(*span) for span in rule.at)]
            whole[tuple(slice(*span) for span in rule.box)] = to_parameter_layout(rule, part)
    return tensors


def _state_key(match: re.Match[str]) -> str:
    return f"optimizer.state.{match[1].replace('master', 'param')}."


FIXTURES = (
    "dense_dp_reshardable",
    "dense_singleton",
    "dense_tied_fully_reshardable",
    "moe_dp_reshardable",
    "moe_fully_reshardable",
    "mla_dp_reshardable",
)


@pytest.mark.parametrize("name", FIXTURES)
def test_weights_and_moments_are_equal_bit_for_bit(name: str, megatron_folder: Extract) -> None:
    folder = megatron_folder(name)
    checkpoint = open_megatron(folder / "iter_0000002").with_optimizer()
    expected = expected_tensors(folder, checkpoint)
    assert len(expected) > 40
    assert set(checkpoint.keys()) == set(expected)
    for key, values in expected.items():
        stored = checkpoint.read(key)
        assert stored.dtype == values.dtype and torch.equal(stored, values), key
    assert checkpoint.step == 2
    assert checkpoint.state["optimizer_updates"] == 2
    assert checkpoint.state["order_samples"] == 800
    assert checkpoint.state["train"] == {
        "step": 2,
        "consumed_samples": 16,
        "scheduled_samples": 16,
        "tokens": 256,
        "skipped": 0,
        "skipped_in_a_row": 0,
    }


def load_as_rank(
    rank: int, world: int, path: Path, settings: dict[str, Override]
) -> list[tuple[str, Box, Tensor]]:
    """Load the checkpoint into a trainer of one rank; return its boxes of every tensor."""
    torch.set_num_threads(1)
    run = apply_overrides(tiny_run({"precision.params": "bf16"}), settings)
    source = open_megatron(path)
    run = replace(run, model=source.run.model)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    entries = checkpoint_entries(trainer)
    with_optimizer(source, mesh.world).load_into(
        entries, mesh.world, vocab_size=run.model.vocab_size
    )
    return [(e.key, part.box, part.values.clone()) for e in entries for part in pieces(e)]


LAYOUTS: dict[str, tuple[int, dict[str, Override]]] = {
    "one rank": (1, {}),
    "tp 2": (2, {"parallel.tp": "2"}),
    "pp 2": (2, {"parallel.pp": "2"}),
    "dp 2": (2, {}),
}


FAST = ("dense_dp_reshardable", "tp 2"), ("moe_dp_reshardable", "pp 2")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in FAST else pytest.mark.slow)
        for name in FIXTURES
        for layout in LAYOUTS
    ],
)
def test_layouts_load_every_box_bit_for_bit(
    name: str, layout: str, megatron_folder: Extract
) -> None:
    folder = megatron_folder(name)
    path = folder / "iter_0000002"
    expected = expected_tensors(folder, open_megatron(path).with_optimizer())
    world, settings = LAYOUTS[layout]
    if world == 1:
        ranks = [load_as_rank(0, 1, path, settings)]
    else:
        ranks = run_ranks(load_as_rank, world, path, settings)
    seen = {key: torch.zeros_like(values, dtype=torch.bool) for key, values in expected.items()}
    for key, box, values in (part for parts in ranks for part in parts):
        index = tuple(slice(*span) for span in box)
        assert torch.equal(values, expected[key][index]), (key, box)
        seen[key][index] = True
    assert all(mask.all() for mask in seen.values())

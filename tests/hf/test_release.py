import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict, to_dict
from megalith.errors import CheckpointError
from megalith.hf import release
from megalith.hf.release import parameters, release_run, write_release
from megalith.hf.staging import ConversionOptions
from megalith.rules.run import run_problems


def test_every_weight_is_in_the_release(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "BATCH_NBYTES", 1000)
    tensors = tiny.tensors(tiny.model(tiny.config()))
    written_nbytes: list[int] = []
    nbytes = write_release(
        tmp_path / "x",
        tiny.config(),
        tiny.InMemory(tensors),
        ConversionOptions(on_written=written_nbytes.append),
        config_text="a: 1\n",
        state={"token_ids": {}},
    )
    checkpoint = open_checkpoint(tmp_path / "x")
    assert verify_checkpoint(tmp_path / "x") == []
    assert checkpoint.keys() == sorted(f"model.{name}" for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(f"model.{name}"), tensor)
    assert (checkpoint.config_text, checkpoint.state, checkpoint.step) == (
        "a: 1\n",
        {"token_ids": {}},
        0,
    )
    assert nbytes == sum(written_nbytes) == sum(tensor.nbytes for tensor in tensors.values())
    assert checkpoint.manifest.world_size == 1 and len(list((tmp_path / "x").glob("*.distcp"))) > 3
    assert os.listdir(tmp_path) == ["x"]


def test_weights_are_stored_in_the_requested_dtype(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tensors = tiny.tensors(tiny.model(tiny.config()))
    write_release(
        tmp_path / "x",
        tiny.config(),
        tiny.InMemory(tensors),
        ConversionOptions(torch.bfloat16),
        config_text="",
    )
    checkpoint = open_checkpoint(tmp_path / "x")
    assert torch.equal(checkpoint.read("model.embed.weight"), tensors["embed.weight"].bfloat16())


def test_release_is_created_atomically(tmp_path: Path, tiny: SimpleNamespace) -> None:
    class Broken(tiny.InMemory):  # type: ignore[misc, name-defined]  # a fixture's class
        def read(self, parameter: str, *rest: Any) -> Tensor:
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="x: not written .*No space left.*Free some space"):
        write_release(
            tmp_path / "x",
            tiny.config(),
            Broken(tiny.tensors(tiny.model(tiny.config()))),
            config_text="",
        )
    (tmp_path / "y").write_text("mine")
    with pytest.raises(CheckpointError, match="y already exists"):
        write_release(tmp_path / "y", tiny.config(), Broken({}), config_text="")
    assert os.listdir(tmp_path) == ["y"]


def test_parent_folder_is_synced_at_the_end(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []

    def seen(folder: Path) -> None:
        names.append(os.listdir(folder) if folder == tmp_path else [])

    monkeypatch.setattr(storage, "sync_folder", seen)
    write_release(
        tmp_path / "x",
        tiny.config(),
        tiny.InMemory(tiny.tensors(tiny.model(tiny.config()))),
        config_text="",
    )
    assert "x" in names[-1]


def test_parameters_are_those_of_the_paper_in_the_order_of_the_forward_pass(
    tiny: SimpleNamespace,
) -> None:
    results = [
        (shard.name, shard.shape) for shard in parameters(tiny.config(num_layers=1, mlp_bias=True))
    ]
    assert results == [
        ("embed.weight", (40, 12)),
        ("layers.0.attention_norm.weight", (12,)),
        ("layers.0.attention.q", (6, 2, 12)),
        ("layers.0.attention.kv", (2, 2, 2, 12)),
        ("layers.0.attention.o", (12, 6, 2)),
        ("layers.0.mlp_norm.weight", (12,)),
        ("layers.0.mlp.gate_up", (2, 10, 12)),
        ("layers.0.mlp.gate_up_bias", (2, 10)),
        ("layers.0.mlp.down", (12, 10)),
        ("layers.0.mlp.down_bias", (12,)),
        ("norm.weight", (12,)),
        ("head.weight", (40, 12)),
    ]


def test_release_config_needs_only_a_dataset(tmp_path: Path, tiny: SimpleNamespace) -> None:
    run = release_run("x", tiny.config(), TokenizerConfig(), tmp_path / "x")
    problems = run_problems(run, 1)
    assert len(problems) == 1 and "Set one of data.path" in problems[0]
    assert from_dict(TrainRun, to_dict(run)) == run and run.checkpoint.load == str(tmp_path / "x")

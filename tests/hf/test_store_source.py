"""Hugging Face and Megatron folders at URLs are downloaded before they are read."""

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint.load import open_checkpoint
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.hf import store_source
from megalith.hf.pretrained import check_source_on_machine, locate_source, open_pretrained
from megalith.hf.store_source import download_foreign_folder
from megalith.object_store import parse_url
from tests.train.test_loop import train

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def megatron(megatron_folder: Callable[[str], Path], tmp_path: Path) -> str:
    """URL of a folder that Megatron-core saved: iteration 2."""
    shutil.copytree(megatron_folder("dense_singleton"), tmp_path / "store" / "megatron")
    return f"local://{tmp_path}/store/megatron"


def test_megatron_folder_at_a_url_is_shown_and_converted(
    megatron: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = tmp_path / "store" / "megatron"
    for name in ("", "/iter_0000002"):
        assert main(["checkpoint", "info", f"{megatron}{name}"]) == 0
        assert "  optimizer   fully_reshardable\n" in capsys.readouterr().out
    assert main(["checkpoint", "diff", megatron, str(local)]) == 0
    words = {"local": [str(local)], "url": [megatron], "step": [megatron, "--step", "2"]}
    for name, (source, *options) in words.items():
        target = str(tmp_path / name)
        assert main(["convert", source, target, "--to", "megalith", *options]) == 0
    expected = open_checkpoint(tmp_path / "local")
    for name in ("url", "step"):
        converted = open_checkpoint(tmp_path / name)
        assert converted.keys() == expected.keys()
        for key in sorted(expected.manifest.tensors):
            assert torch.equal(converted.read(key), expected.read(key)), key
    capsys.readouterr()
    assert main(["convert", megatron, str(tmp_path / "none"), "--step", "9"]) == 2
    assert "iter_0000009 has no checkpoint" in capsys.readouterr().err


@pytest.mark.slow
def test_hugging_face_folder_at_a_url_is_loaded_and_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", {"train.steps": "1", "train.eval_steps": "0"})
    model = tmp_path / "store" / "model"
    assert main(["convert", str(tmp_path / "run"), str(model), "--to", "huggingface"]) == 0
    (model / "pytorch_model.bin").write_bytes(b"not downloaded")
    url = f"local://{tmp_path}/store/model"
    path = locate_source(url)
    assert isinstance(path, Path) and not (path / "pytorch_model.bin").exists()
    assert open_pretrained(path).model == open_pretrained(model).model
    load = {"train.steps": "1", "train.eval_steps": "0", "checkpoint.load": url}
    train(tmp_path / "other", load)
    assert main(["convert", url, str(tmp_path / "again"), "--to", "megalith"]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "info", url]) == 2
    assert f"Convert it first: megalith convert {url} OUT" in capsys.readouterr().err


def test_tracker_without_its_iteration_is_rejected(megatron: str, tmp_path: Path) -> None:
    (tmp_path / "store/megatron/latest_checkpointed_iteration.txt").write_text("7")
    text = r"names '7', which does not exist \(iterations: iter_0000002\)\. Use the URL of an iter"
    with pytest.raises(CheckpointError, match=text):
        locate_source(megatron)
    assert download_foreign_folder(parse_url(f"local://{tmp_path}/store/nothing")) is None


def test_folder_that_does_not_fit_is_not_downloaded(
    megatron: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(mkdtemp=lambda prefix: "/nowhere/x")
    monkeypatch.setattr(store_source, "tempfile", usage)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 100))
    with pytest.raises(CheckpointError, match="and /nowhere has 100 B. Free some space, or set"):
        locate_source(megatron)


def test_machine_without_the_downloaded_copy_is_reported(tmp_path: Path) -> None:
    check_source_on_machine("s3://bucket/model", tmp_path)
    check_source_on_machine("model", tmp_path / "none")
    with pytest.raises(CheckpointError, match="Set the environment variable TMPDIR to a folder"):
        check_source_on_machine("s3://bucket/model", tmp_path / "none")

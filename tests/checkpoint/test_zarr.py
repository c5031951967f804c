"""Reading checkpoints in format `zarr`, which old versions of Megatron saved."""

import argparse
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.iterations import detect_megatron_format
from megalith.checkpoint.safe_pickle import Record
from megalith.checkpoint.zarr import read_zarr_folder
from megalith.errors import CheckpointError

DTYPES = {torch.float32: "<f4", torch.bfloat16: "bfloat16", torch.int64: "<i8"}


def write_tensor(folder: Path, values: torch.Tensor, chunks: tuple[int, ...]) -> None:
    """Write a tensor as the zarr library did for Megatron: raw chunks, those at the end of an axis
    padded."""
    folder.mkdir()
    description = {
        "chunks": list(chunks),
        "compressor": None,
        "dtype": DTYPES[values.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(values.shape),
        "zarr_format": 2,
    }
    (folder / ".zarray").write_text(json.dumps(description, indent=4))
    grid = [-(-n // size) for n, size in zip(values.shape, chunks, strict=True)]
    for index in itertools.product(*map(range, grid)):
        padded = torch.full(chunks, 77, dtype=values.dtype)
        part = values[tuple(slice(at * n, at * n + n) for at, n in zip(index, chunks, strict=True))]
        padded[tuple(slice(n) for n in part.shape)] = part
        data = padded.reshape(-1).view(torch.uint8).numpy().tobytes()
        (folder / (".".join(map(str, index)) or "0")).write_bytes(data)


TENSORS = {
    "decoder.layers.mlp.linear_fc1.weight": (torch.randn(4, 10, 6).bfloat16(), (1, 5, 6)),
    "decoder.layers.self_attention.linear_proj.weight": (torch.randn(2, 7, 5), (1, 3, 2)),
    "optimizer.state.exp_avg.embedding.word_embeddings.weight": (torch.randn(9, 4), (2, 4)),
    "step": (torch.tensor(12), ()),
    "empty": (torch.zeros(0, 3), (1, 3)),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return an iteration that a test may damage."""
    folder = tmp_path / "iter_0000012"
    folder.mkdir()
    for name, (values, chunks) in TENSORS.items():
        write_tensor(folder / name, values, chunks)
    (folder / "decoder.layers.mlp.linear_fc1.weight.sync").mkdir()
    (folder / "rng_state").mkdir()
    torch.save([1, 2], folder / "rng_state" / "shard_0.0_1.2.pt")
    torch.save({"args": argparse.Namespace(hidden_size=4), "iteration": 12}, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    return folder


def read_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_zarr_folder(path)
    return str(caught.value)


def change_array(path: Path, name: str = "step", **fields: Any) -> None:
    file = path / name / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_tensors_equal_what_was_written(path: Path) -> None:
    folder = read_zarr_folder(path)
    assert folder.format == "zarr"
    assert folder.tensors.keys() == TENSORS.keys()
    for name, (values, _) in TENSORS.items():
        stored = folder.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(values.shape), values.dtype)
        assert torch.equal(stored.read(), values), name
    fc1 = folder.tensors["decoder.layers.mlp.linear_fc1.weight"]
    assert torch.equal(fc1.read(((1, 3), (2, 9), (0, 6))), TENSORS[fc1.name][0][1:3, 2:9])


def test_common_state_and_objects_are_parsed(path: Path) -> None:
    folder = read_zarr_folder(path)
    args = folder.common["args"]
    assert isinstance(args, Record) and args.state == {"hidden_size": 4}
    assert folder.common["iteration"] == 12
    assert folder.objects["rng_state/shard_0.0_1.2"]() == [1, 2]


def test_folder_without_metadata_json_is_detected(path: Path) -> None:
    (path / "metadata.json").unlink()
    assert detect_megatron_format(path) == "zarr"
    assert read_zarr_folder(path).format == "zarr"


def test_all_damaged_tensors_are_named(path: Path) -> None:
    name = "decoder.layers.self_attention.linear_proj.weight"
    (path / name / "0.1.0").unlink()
    (path / "step" / "0").write_bytes(b"1234")
    error = read_error(path)
    assert f"iter_0000012/{name}: 1 of 18 chunk files are missing, such as 0.1.0" in error
    assert "iter_0000012/step: 0 is 4 bytes, expected 8 → checkpoint incomplete" in error
    assert "Copy the checkpoint again" in error


def test_file_that_is_truncated_after_opening_is_an_error(path: Path) -> None:
    folder = read_zarr_folder(path)
    (path / "step" / "0").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="0 is 4 bytes, expected 8"):
        folder.tensors["step"].read()
    (path / "step" / "0").unlink()
    with pytest.raises(CheckpointError, match="cannot read .*step/0: No such file"):
        folder.tensors["step"].read()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"compressor": {"id": "blosc", "cname": "lz4"}}, "compressor is blosc, and only None"),
        ({"filters": [{"id": "delta"}]}, "filters is"),
        ({"order": "F"}, "order is F, and only C is read"),
        ({"zarr_format": 3}, "zarr_format is 3, and only 2 is read"),
        ({"dimension_separator": "/"}, "dimension_separator is /"),
        ({"dtype": ">f4"}, "dtype is '>f4', expected one of <f8"),
        ({"dtype": [["a", "<f4"]]}, "dtype is"),
        ({"shape": [-1]}, r"shape is \[-1\], expected a list of sizes"),
        ({"shape": 5}, "shape is 5, expected a list of sizes"),
        ({"shape": [2**62]}, "expected a list of sizes"),
        ({"shape": [True]}, "expected a list of sizes"),
        ({"shape": [3], "chunks": [0]}, "has chunks \\[0\\] for shape \\[3\\]"),
        ({"shape": [3], "chunks": []}, "has chunks \\[\\] for shape \\[3\\]"),
        ({"shape": [2**50], "chunks": [1]}, "of 1,125,899,906,842,624 chunk files are missing"),
        ({"shape": [2**30, 2**30], "chunks": [1, 1]}, "chunk files are missing, such as 0.0"),
        ({"shape": [4], "chunks": [2**58]}, "is 8 bytes, expected 2,305,843,009,213,693,952"),
    ],
)
def test_unsupported_and_hostile_descriptions_are_rejected_with_the_reason(
    path: Path, fields: dict[str, Any], text: str
) -> None:
    change_array(path, **fields)
    error = read_error(path)
    assert "iter_0000012/step: " in error
    assert re.search(text, error)


def test_malformed_descriptions_give_only_checkpoint_errors(path: Path) -> None:
    file = path / "step" / ".zarray"
    text = file.read_bytes()
    for content in (b"", b"[]", b"\xff", b"[" * 20_000, b'{"shape": [' + b"1" * 5000 + b"]}"):
        file.write_bytes(content)
        assert "iter_0000012/step" in read_error(path)
    for seed in range(100):
        generator = random.Random(seed)
        mutated = bytearray(text)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        file.write_bytes(mutated)
        try:
            read_zarr_folder(path).tensors["step"].read()
        except CheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_other_folders_are_rejected(path: Path) -> None:
    (path / "common.pt").unlink()
    assert "has no common.pt, which contains its arguments" in read_error(path)
    assert "is not a Megatron checkpoint, expected zarr" in read_error(path / "step")


def test_stored_iteration_that_differs_from_the_folder_is_an_error(path: Path) -> None:
    other = path.rename(path.with_name("iter_0000100"))
    assert "iteration 100 by its name, and its files say 12" in read_error(other)

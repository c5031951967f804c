import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint.safetensors import (
    PlannedTensor,
    TensorInfo,
    allocate_file,
    padded_header,
    read_box,
    read_header,
    show_names,
    write_file,
    write_part,
)
from megalith.errors import CheckpointError

TENSORS: dict[str, Tensor] = {
    "a": torch.arange(15, dtype=torch.float32).view(3, 5),
    "b": torch.arange(7, dtype=torch.bfloat16),
    "c": torch.full((2, 1, 2), 0.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4, dtype=torch.float16),
}


def write(file: Path, tensors: dict[str, Tensor] = TENSORS) -> None:
    plan = [
        PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    ]
    write_file(file, plan, iter(tensors.values()), {"format": "pt"})


def test_safetensors_library_reads_our_files(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors")
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    (length,) = struct.unpack("<Q", (tmp_path / "x.safetensors").read_bytes()[:8])
    assert length % 8 == 0


def test_header_can_be_written_after_data(tmp_path: Path) -> None:
    plan = [
        PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()
    ]
    file = tmp_path / "late.safetensors"
    file.write_bytes(b"\0" * 4096)
    assert write_part(file, 4096, TENSORS.values()).stop == file.stat().st_size
    with file.open("r+b") as out:
        out.write(padded_header(4096, plan, {"format": "pt"}))
    result = load_file(file)
    assert result.keys() == TENSORS.keys() == read_header(file).keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in TENSORS.items())
    with pytest.raises(AssertionError, match="in room for 56"):
        padded_header(64, plan, {})


def test_files_of_safetensors_library_are_read(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file(TENSORS, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header["b"] == TensorInfo(file, "BF16", (7,), header["b"].start)
    assert torch.equal(
        read_box("a", header["a"], (slice(1, 3), slice(2, 4))), TENSORS["a"][1:3, 2:4]
    )
    assert torch.equal(read_box("b", header["b"], (slice(2, 3),)), TENSORS["b"][2:3])
    assert read_box("empty", header["empty"], (slice(None), slice(1, 3))).shape == (0, 2)


def test_views_of_a_larger_tensor_are_written_as_they_are_seen(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"t": TENSORS["a"].t()[1:3]})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["t"], TENSORS["a"].t()[1:3])


@pytest.mark.parametrize(
    ("missing", "names"), [(1, ": c cut off"), (40, ": b, c cut off"), (100, ": a, b, c cut off")]
)
def test_truncated_file_names_missing_tensors(missing: int, names: str, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file)
    data = file.read_bytes()
    file.write_bytes(data[:-missing])
    with pytest.raises(
        CheckpointError,
        match=rf"x.safetensors is {len(data) - missing} bytes, expected {len(data)}: ",
    ):
        read_header(file)
    with pytest.raises(CheckpointError, match=names):
        read_header(file)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10**12) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 4) + b"[12]",
        struct.pack("<Q", 9) + b"not json!",
        struct.pack("<Q", 2000) + b"[" * 2000,
        struct.pack("<Q", 20) + json.dumps({"a": {"shape": 1}}).encode().ljust(20),
        struct.pack("<Q", 70)
        + json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}})
        .encode()
        .ljust(70),
        struct.pack("<Q", 70)
        + json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})
        .encode()
        .ljust(70),
    ],
)
def test_invalid_safetensors_bytes_are_rejected(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(
        CheckpointError, match="x.safetensors is not a safetensors file .*Copy the folder again"
    ):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    "spans, behind, text",
    [
        ([(0, 8), (0, 8)], 0, "b has bytes 0 to 8 of the data, expected from 8 on"),
        ([(0, 8), (4, 12)], 0, "b has bytes 4 to 12 of the data, expected from 8 on"),
        ([(0, 8), (12, 20)], 0, "b has bytes 12 to 20 of the data, expected from 8 on"),
        ([(0, 8), (8, 16)], 3, "has 19 bytes of data, expected 16, as its header says"),
    ],
)
def test_overlapping_or_unused_bytes_are_rejected(
    spans: list[tuple[int, int]], behind: int, text: str, tmp_path: Path
) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": span}
        for name, span in zip("ab", spans, strict=True)
    }
    header, nbytes = json.dumps(entries).encode(), max(stop for _, stop in spans) + behind
    (tmp_path / "x.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(nbytes)
    )
    with pytest.raises(CheckpointError, match=f"{text}.*Copy the folder again"):
        read_header(tmp_path / "x.safetensors")


def test_file_truncated_after_header_read_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file)
    header = read_header(file)
    os.truncate(file, header["a"].start + 4)
    with pytest.raises(
        CheckpointError, match=r"x.safetensors: a cannot be read \(it ends before byte .*Copy"
    ):
        read_box("a", header["a"], (slice(0, 3), slice(0, 5)))
    os.remove(file)
    with pytest.raises(
        CheckpointError, match=r"x.safetensors: a cannot be read \(No such file.*Copy"
    ):
        read_box("a", header["a"], (slice(0, 3), slice(0, 5)))


def test_views_of_files_are_copy_on_write(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    write(file)
    before = file.read_bytes()
    read_box("a", read_header(file)["a"], (slice(0, 2), slice(0, 5))).zero_()
    assert file.read_bytes() == before


def test_parts_written_in_any_order_make_the_file(tmp_path: Path) -> None:
    plan = [
        PlannedTensor(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()
    ]
    starts = allocate_file(tmp_path / "x.safetensors", plan, {"format": "pt"})
    for start, tensor in reversed(list(zip(starts, TENSORS.values(), strict=True))):
        assert (
            write_part(tmp_path / "x.safetensors", start, tensor.split(1)).stop
            == start + tensor.nbytes
        )
    write(tmp_path / "y.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone.safetensors cannot be read"):
        read_header(tmp_path / "gone.safetensors")


def test_an_existing_file_is_never_written_into(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "x.safetensors")


def test_long_lists_of_names_are_cut() -> None:
    assert show_names(["a", "b"]) == "a, b"
    assert show_names(list("abcdefgh"), limit=3) == "a, b, c and 5 more"


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ('{"a": ENTRY, "b": OTHER, "a": ENTRY}', "a"),
        ('{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "dtype"),
    ],
)
def test_a_header_with_repeated_keys_is_rejected(header: str, key: str, tmp_path: Path) -> None:
    for word, offsets in (("ENTRY", [0, 4]), ("OTHER", [4, 8])):
        header = header.replace(
            word, json.dumps({"dtype": "F32", "shape": [1], "data_offsets": offsets})
        )
    data = bytes(8 if "b" in json.loads(header) else 4)
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
    with pytest.raises(CheckpointError, match=f"its header has the key {key} more than once"):
        read_header(tmp_path / "x")

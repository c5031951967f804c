"""Boxes that torch.save or BoxFile wrote, read without a copy."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.safe_pickle import ArchiveTensor, parse_archive
from megalith.checkpoint.save import BoxFile
from megalith.errors import CheckpointError


def archive(value: Any) -> memoryview:
    data = io.BytesIO()
    torch.save(value, data)
    return memoryview(bytearray(data.getvalue()))


def parse(data: memoryview) -> Any:
    value = parse_archive(data, source="the bytes")
    return value.read() if isinstance(value, ArchiveTensor) else value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (2, 1, 5)])
def test_a_plain_tensor_is_a_view_of_the_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = (torch.arange(30.0)[: torch.Size(shape).numel()].view(shape) % 3).to(dtype)
    for shift in (0, 1):  # at any address
        data = memoryview(bytearray(shift) + archive(values).obj)[shift:]
        saved_tensor = parse(data)
        assert torch.equal(saved_tensor, values) and (saved_tensor.shape, saved_tensor.dtype) == (
            shape,
            dtype,
        )
        start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        assert start < saved_tensor.data_ptr() < start + len(data)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(12.0)[3:7],
        torch.zeros(0, 2),
        {"a": 2.5},
        5,
        "text",
    ],
    ids=["turned", "part", "empty", "several", "number", "words"],
)
def test_anything_else_is_as_torch_reads_it(value: Any) -> None:
    saved_tensor = parse(archive(value))
    assert (
        torch.equal(saved_tensor, value)
        if isinstance(value, torch.Tensor)
        else saved_tensor == value
    )


def test_compressed_values_are_rejected() -> None:
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive(torch.arange(600.0)))) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(CheckpointError, match="the bytes: .* is compressed, expected stored"):
        parse(memoryview(packed.getvalue()))


def test_foreign_bytes_raise() -> None:
    for data in (b"", b"PK\3\4", b"\0" * 5000, bytes(archive(torch.ones(9)))[:-40]):
        with pytest.raises(CheckpointError, match="cannot read the bytes: "):
            parse(memoryview(data))


def test_dcp_reads_our_boxes(tmp_path: Path) -> None:
    values = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    with BoxFile(tmp_path / "boxes") as file:
        first = file.add(((0, 4), (0, 6)), [values[:3], values[3:]])
        second = file.add(((2, 6),), [torch.arange(8.0)[::2]])
    data = (tmp_path / "boxes").read_bytes()
    assert len(data) == file.nbytes == second.offset + second.nbytes
    for stored, wanted in ((first, values), (second, torch.arange(8.0)[::2])):
        part = data[stored.offset : stored.offset + stored.nbytes]
        assert torch.equal(torch.load(io.BytesIO(part), weights_only=True), wanted)
        assert torch.equal(parse(memoryview(bytearray(part))), wanted)

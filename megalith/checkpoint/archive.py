"""Reads the archive that `torch.save` makes of one tensor, without copying its values."""

import io
import struct
import zipfile
from typing import IO, Any, cast

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a file in a zip archive, up to its name; contains the lengths of name and extra
field."""


class _Window(io.RawIOBase):
    """File object over memory; unlike BytesIO, without a copy."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._data))[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:  # any writable memory
        into = memoryview(buffer).cast("B")
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)


def parse_saved_tensor(
    data: memoryview,
) -> Any:  # an untrusted file may hold any object that weights_only permits
    """Return what `torch.save` wrote into `data`. A plain tensor is a read-only view; no code is
    executed.

    Raises: Exception: of any kind, if the bytes are something else.
    """
    with torch.serialization.skip_data():  # reads shape and dtype, not the values
        blank = _load(data)
    start = _values_start(data, blank) if _is_plain(blank) else None
    if start is None:
        return _load(data)
    # The address may be unaligned: x86 and ARM support this, and the bytes are copied afterwards.
    return torch.frombuffer(data, dtype=blank.dtype, count=blank.numel(), offset=start).view(
        blank.shape
    )


def _load(data: memoryview) -> Any:  # as above
    return torch.load(cast(IO[bytes], _Window(data)), map_location="cpu", weights_only=True)


def _is_plain(value: Any) -> bool:
    """Return whether the object is a contiguous tensor that fills its storage."""
    return (
        type(value) is Tensor
        and value.numel() > 0
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
    )


def _values_start(data: memoryview, blank: Tensor) -> int | None:
    """Return the offset of a plain tensor's values; None if the archive does not have torch's
    layout."""
    with zipfile.ZipFile(_Window(data)) as archive:
        values = [info for info in archive.infolist() if "/data/" in info.filename]
    if (
        len(values) != 1
        or values[0].compress_type != zipfile.ZIP_STORED
        or values[0].file_size != blank.nbytes
    ):
        return None
    name, extra = _LOCAL_HEADER.unpack_from(data, values[0].header_offset)
    start = values[0].header_offset + 30 + name + extra
    return start if start + blank.nbytes <= len(data) else None

"""The archive that `torch.save` makes of one tensor, read without a copy of its values."""

import io
import struct
import zipfile
from typing import IO, Any, cast

import torch
from torch import Tensor

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a file in a zip archive: what comes before its name, with the lengths of name and extra
field."""


class _Window(io.RawIOBase):
    """Bytes in memory as a file; unlike BytesIO, of any memory and without a copy."""

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


def saved_tensor(
    data: memoryview,
) -> Any:  # what a stranger saved may be anything that weights_only lets pass
    """What `torch.save` put into `data`. A plain tensor is a view of it, not to be written to;
    nothing in it is run.

    Raises:
        Exception: of any kind, if the bytes are something else.
    """
    with torch.serialization.skip_data():  # the tensor's form; its values are not read
        blank = _loaded(data)
    start = _values_start(data, blank) if _is_plain(blank) else None
    if start is None:
        return _loaded(data)
    # At any address, aligned or not: x86 and ARM read either, and what follows is a copy of bytes.
    return torch.frombuffer(data, dtype=blank.dtype, count=blank.numel(), offset=start).view(
        blank.shape
    )


def _loaded(data: memoryview) -> Any:  # as above
    return torch.load(cast(IO[bytes], _Window(data)), map_location="cpu", weights_only=True)


def _is_plain(found: Any) -> bool:
    """Whether it is a tensor that fills its storage in order."""
    return (
        type(found) is Tensor
        and found.numel() > 0
        and found.is_contiguous()
        and found.untyped_storage().nbytes() == found.nbytes
    )


def _values_start(data: memoryview, blank: Tensor) -> int | None:
    """Where the values of a plain tensor begin; None where they do not lie as torch lays them."""
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

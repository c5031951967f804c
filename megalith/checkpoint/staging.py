"""Host memory into which a rank copies the tensors of an asynchronous save: shared with its writer
process, touched before the first save, pinned on GPUs."""

import ctypes
import mmap
import os
import pickle
import tempfile
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry, iter_pieces, lengths, pieces, sha256
from megalith.checkpoint.save import BOX_NBYTES, dtype_name
from megalith.checkpoint.writer import PlannedBox, StagedTensor, WritePlan

MEMORY_FACTOR = 1.1
"""Free memory that a region needs, relative to its size: the specification's margin for page
tables and the messages to the writer."""

_ALIGNMENT = 64
"""Bytes; a cache line, so that copies of neighboring tensors do not share one."""

_POPULATE_NBYTES = 64 * 2**20
"""Bytes that are touched at a time, so that closing does not wait long (heuristic)."""

_COPY_NUMEL = 2**24
"""Elements that are copied at a time, which are decoded before if they are encoded (heuristic)."""

_MADV_POPULATE_WRITE = 23
"""From Linux' mman.h; Python has no name for it."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedEntry:
    """Position of the tensor of an entry in the region."""

    index: int
    """Index in the rank's entries."""
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StagingPlan:
    """Positions of a rank's tensors in the region, and what the writer writes."""

    identity: tuple[object, ...]
    """Equal if another list of entries has the same plan."""

    staged: tuple[StagedEntry, ...]
    write_plan: WritePlan
    nbytes: int
    """Size of the region."""


def entries_identity(entries: Sequence[CheckpointEntry]) -> tuple[object, ...]:
    """Return what the plan of entries depends on; cheap to compute and to compare."""
    return tuple(
        (entry.role, entry.dtype, entry.is_writer, entry.tensor.nbytes, entry.shard)
        for entry in entries
    )


def plan_staging(entries: Sequence[CheckpointEntry]) -> StagingPlan:
    """Plan the positions of all tensors that this rank writes, in the order of the entries."""
    envelopes: dict[tuple[tuple[int, ...], torch.dtype], tuple[bytes, bytes]] = {}
    staged, tensors, position = [], [], 0
    for index, entry in enumerate(entries):
        boxes = []
        if entry.is_writer and entry.tensor.numel():
            assert entry.tensor.dtype == entry.dtype, (entry.key, entry.tensor.dtype)
            position += -position % _ALIGNMENT
            staged.append(StagedEntry(index, position, entry.tensor.nbytes))
            for piece in pieces(entry, max_numel=max(1, BOX_NBYTES // entry.dtype.itemsize)):
                shape = lengths(piece.box)
                if (shape, entry.dtype) not in envelopes:
                    envelopes[shape, entry.dtype] = build_envelope(shape, entry.dtype)
                prefix, suffix = envelopes[shape, entry.dtype]
                boxes.append(PlannedBox(piece.box, position, piece.values.nbytes, prefix, suffix))
                position += piece.values.nbytes
        tensors.append(
            StagedTensor(entry.key, entry.shard.shape, dtype_name(entry.dtype), tuple(boxes))
        )
    return StagingPlan(
        entries_identity(entries),
        tuple(staged),
        WritePlan(tuple(tensors), sha256(pickle.dumps(tensors))),
        position,
    )


class _EnvelopeStream:
    """File object for torch.save that collects the bytes before and after the values, over which
    torch seeks."""

    def __init__(self) -> None:
        self._parts = [bytearray()]
        self._position = 0

    def write(self, data: bytes | memoryview) -> int:
        self._parts[-1] += data
        self._position += len(data)
        return len(data)

    def seek(self, nbytes: int, whence: int) -> int:
        self._parts.append(bytearray())
        self._position += nbytes
        return self._position

    def flush(self) -> None:
        """Do nothing."""

    def split(self) -> tuple[bytes, bytes]:
        prefix, suffix = self._parts
        return bytes(prefix), bytes(suffix)


def build_envelope(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values of a tensor in `torch.save` format; they depend
    only on shape and dtype."""
    stream = _EnvelopeStream()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), cast(BinaryIO, stream))
    return stream.split()


class StagingRegion:
    """Shared memory of one rank, allocated once."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`device`: of the tensors that are copied.

        Raises:
            OSError: the memory cannot be reserved.
        """
        self.nbytes, self._device = max(1, nbytes), device
        self.fd = _create_shared_file(self.nbytes)
        # also closed if an error or a writer that does not end prevents `close`
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self._map = mmap.mmap(self.fd, self.nbytes)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self._tensor.numpy()
        self._stop = threading.Event()
        self._stream = torch.Stream(device=device) if device.type != "cpu" else None
        self._is_pinned = False

    def populate(self) -> None:
        """Touch all pages, which takes longer than a copy into touched ones, and pin them for
        copies from a GPU."""
        libc = ctypes.CDLL(None, use_errno=True)
        address = self._tensor.data_ptr()
        for start in range(0, self.nbytes, _POPULATE_NBYTES):
            if self._stop.is_set():
                return
            nbytes = min(_POPULATE_NBYTES, self.nbytes - start)
            # Before Linux 5.14 the call is not supported; pages are zero, so writing zeros to one
            # byte of each touches them.
            if libc.madvise(
                ctypes.c_void_p(address + start), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE
            ):
                self._array[start : start + nbytes : mmap.PAGESIZE] = 0
        if self._stream is not None:
            with torch.cuda.device(self._device):  # a thread begins with the first GPU
                result = torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0)
            self._is_pinned = int(result) == 0

    def copy(self, plan: StagingPlan, entries: Sequence[CheckpointEntry]) -> torch.Event | None:
        """Copy the tensors of a plan; return the event after which the copy is complete, or None if
        it is complete.

        On a GPU the copies run in a stream of their own, after the work that the current stream has
        now; see `record_updates`.
        """
        if self._stream is None:
            for place in plan.staged:
                start = place.start
                for piece in iter_pieces(entries[place.index], _COPY_NUMEL):
                    values = _flat_bytes(piece.values).numpy()
                    np.copyto(self._array[start : start + len(values)], values)
                    start += len(values)
            return None
        with self._stream:
            for place in plan.staged:
                start = place.start
                for piece in iter_pieces(entries[place.index], _COPY_NUMEL):
                    source = _flat_bytes(piece.values)
                    self._tensor[start : start + source.numel()].copy_(source, non_blocking=True)
                    start += source.numel()
            event = torch.Event(device=self._device)
            event.record(self._stream)
        return event

    def record_updates(self) -> None:
        """Make the copies that follow wait for the kernels that were launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def stop(self) -> None:
        """Let `populate` end early, because the region will not be used any more."""
        self._stop.set()

    def close(self) -> None:
        """Free the memory; the writer may still read its own mapping of it."""
        self._stop.set()
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
            self._is_pinned = False
        self._close_fd()


def _flat_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous()
    return tensor.detach().reshape(-1).view(torch.uint8)


def _create_shared_file(nbytes: int) -> int:
    """Return a descriptor of shared memory without a name; a temporary file where the system has
    none."""
    if hasattr(os, "memfd_create"):  # unlike a file in /dev/shm not limited by that mount's size
        fd = os.memfd_create("megalith-checkpoint")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd

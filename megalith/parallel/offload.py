"""Activation offload: saved activations are kept in host memory between forward and backward.

While an offloaded span of layers runs, the tensors that autograd saves are copied to host memory,
once per storage, however many tensors share it. When backward reaches the layer after the span, the
copies back are started (prefetched). On a GPU copies run on a separate stream, from and to reused
pinned buffers; on a CPU the same code copies to other memory, which saves nothing and shows the
logic.

It is free if a layer's bytes / bandwidth to the host is less than the layer's compute time. Source
of the scheme: Rhu et al. 2016, arXiv:1602.08124 (vDNN).
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class HostMemory:
    """Pool of host buffers for offloaded activations, and the stream of their copies."""

    def __init__(self) -> None:
        self.buffers: dict[int, list[Tensor]] = {}
        """Free buffers, by bytes. Sizes are powers of two, which torch reserves for pinned memory
        anyway, so that batches of varying lengths share buffers."""

        self.taken = 0
        """Number of buffers handed out."""

        self.made = 0
        """Number of buffers allocated."""

        self._streams: dict[torch.device, Any] = {}  # Any: torch.cuda.Stream, which CPU builds lack

    def take(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return a buffer of at least `nbytes` bytes."""
        self.taken += 1
        reserved = 1 << max(nbytes - 1, 0).bit_length()
        free = self.buffers.get(reserved)
        if free:
            return free.pop()
        self.made += 1
        return torch.empty(reserved, dtype=torch.uint8, pin_memory=pinned)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool. A later copy into it follows the last copy out of it on the
        same stream."""
        self.buffers.setdefault(buffer.numel(), []).append(buffer)

    def stream(self, device: torch.device) -> Any:
        """Return the stream for copies from and to this GPU."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class OffloadedStorage:
    """A device storage that was copied to host memory."""

    def __init__(self, storage: torch.UntypedStorage, memory: HostMemory) -> None:
        self.device, self.memory = storage.device, memory
        pinned = self.device.type == "cuda"  # lint: allow cuda-literal: pinned memory is CUDA's
        buffer = memory.take(storage.nbytes(), pinned=pinned)
        self.host = buffer[: storage.nbytes()]
        self.back: Tensor | None = None
        self._copied: Any = None  # Any: torch.cuda.Event
        weakref.finalize(self, memory.give, buffer)
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if self.device.type != "cuda":  # lint: allow cuda-literal: so are side streams
            self.host.copy_(source)
            return
        stream = memory.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # the allocator must not reuse its memory before the copy

    def start_back(self) -> None:
        """Start the copy to the device, unless it has been started."""
        if self.back is not None:
            return
        if self.device.type != "cuda":  # lint: allow cuda-literal: so are side streams
            self.back = self.host.to(self.device, copy=True)
            return
        stream = self.memory.stream(self.device)
        with torch.cuda.stream(stream):
            self.back = self.host.to(self.device, non_blocking=True)
            self._copied = stream.record_event()

    def storage(self) -> torch.UntypedStorage:
        """Return the storage on the device, complete for the current stream."""
        self.start_back()
        assert self.back is not None
        if self._copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._copied)
            self.back.record_stream(current)
            self._copied = None
        return self.back.untyped_storage()


class OffloadedTensor:
    """Replacement for a saved tensor: its offloaded storage and its view of it."""

    def __init__(self, x: Tensor, away: OffloadedStorage) -> None:
        self.away, self.dtype, self.place = (
            away,
            x.dtype,
            (x.storage_offset(), x.size(), x.stride()),
        )
        self.version = x._version
        self._counter = x.detach()  # counts in-place changes of x and its views ...
        self._counter.data = x.new_empty(0)  # ... and does not keep their memory

    def tensor(self) -> Tensor:
        """Return the tensor on the device.

        Raises:
            RuntimeError: the tensor was modified in place after it was saved, which autograd
            rejects without offloading, too.
        """
        if self._counter._version != self.version:
            raise RuntimeError(
                f"an activation of {self.dtype} {list(self.place[1])} that backward needs was "
                "modified by an inplace operation after it was saved: it is at version "
                f"{self._counter._version}, expected {self.version}. Use an operation that is not "
                "in place; without offloading autograd rejects it, too."
            )
        return torch.empty(0, dtype=self.dtype, device=self.away.device).set_(
            self.away.storage(), *self.place
        )


class OffloadedPass:
    """Offloaded activations of one forward and backward pass through a stage."""

    def __init__(
        self, memory: HostMemory, *, min_numel: int, stays: Collection[Tensor] = ()
    ) -> None:
        """`stays`: tensors that stay on the device because all layers share them."""
        self.memory, self.min_numel = memory, min_numel
        self.stays = storages(stays)
        self.spans: dict[int, list[weakref.ref[OffloadedStorage]]] = {}
        self.sent: dict[int, list[tuple[int, int]]] = {}
        """Span -> (elements, bytes) of each storage that it has offloaded."""

        # By storage and version: a storage written to since its last copy needs another one. A
        # storage's id may be reused once the storage is freed; a weak reference reserves the id,
        # not the memory.
        self._copies: dict[
            tuple[int, int], tuple[StorageWeakRef, weakref.ref[OffloadedStorage]]
        ] = {}

    @contextmanager
    def span(self, number: int, layers: Sequence[nn.Module] = ()) -> Iterator[None]:
        """Offload the tensors saved inside the context; the parameters of these layers stay."""
        with saved_tensors_hooks(lambda x: self._pack(number, layers, x), _unpack):
            yield

    def keep(self, tensors: Collection[Tensor]) -> None:
        """Keep these tensors on the device, too."""
        self.stays = self.stays | storages(tensors)

    def fetch(self, number: int) -> None:
        """Start the copies back of span `number`, as far as they are still referenced."""
        for reference in self.spans.get(number, ()):
            away = reference()
            if away is not None:
                away.start_back()

    def _pack(
        self, number: int, layers: Sequence[nn.Module], x: Tensor
    ) -> Tensor | OffloadedTensor:
        storage = x.untyped_storage()
        if x.numel() < self.min_numel or storage._cdata in self.stays:
            return x
        # Checked each time: with zero=3 a layer's full parameters exist only while it runs.
        if any(storage._cdata in storages(layer.parameters()) for layer in layers):
            return x
        key = storage._cdata, x._version
        known = self._copies.get(key)
        away = None if known is None else known[1]()
        if away is None:
            away = OffloadedStorage(storage, self.memory)
            self._copies[key] = StorageWeakRef(storage), weakref.ref(away)
            self.spans.setdefault(number, []).append(weakref.ref(away))
            self.sent.setdefault(number, []).append((x.numel(), storage.nbytes()))
        return OffloadedTensor(x, away)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of the storages of some tensors."""
    return {x.untyped_storage()._cdata for x in tensors}


def _unpack(saved: Tensor | OffloadedTensor) -> Tensor:
    return saved.tensor() if isinstance(saved, OffloadedTensor) else saved


def fetch_when_backward_reaches(x: Tensor, run: OffloadedPass, numbers: Sequence[int]) -> None:
    """Prefetch these spans as soon as the gradient of `x` is known."""
    if x.requires_grad and numbers:
        x.register_hook(lambda gradient: _fetch(run, numbers))


def _fetch(run: OffloadedPass, numbers: Sequence[int]) -> None:
    for number in numbers:
        run.fetch(number)

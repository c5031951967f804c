"""Activations that wait in host memory between forward and backward.

While an offloaded span of layers runs, what autograd saves is copied to host memory, once for each
piece of memory, however many tensors share it. When backward reaches the layer after the span, the
copies start on their way back, so that they are there when they are needed. On a GPU copies run on
a stream of their own, from and to pinned memory that is used again and again; on a CPU the same
code copies to other memory, which saves nothing and shows the logic.

It costs nothing if a layer's bytes / bandwidth to the host is less than the time the layer
computes. Source of the scheme: Rhu et al. 2016, arXiv:1602.08124 (vDNN).
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
    """Where copies wait: buffers of host memory that are used again, and the stream that fills and
    empties them."""

    def __init__(self) -> None:
        self.buffers: dict[int, list[Tensor]] = {}
        """Free ones, by bytes. These are powers of two, which torch reserves for pinned memory
        anyway: so batches of ever other lengths share buffers."""

        self.taken = 0
        """Buffers given out so far."""

        self.made = 0
        """Of these, how many had to be made first."""

        self._streams: dict[torch.device, Any] = {}  # Any: torch.cuda.Stream, which CPU builds lack

    def take(self, nbytes: int, *, pinned: bool) -> Tensor:
        """A buffer of at least so many bytes."""
        self.taken += 1
        reserved = 1 << max(nbytes - 1, 0).bit_length()
        free = self.buffers.get(reserved)
        if free:
            return free.pop()
        self.made += 1
        return torch.empty(reserved, dtype=torch.uint8, pin_memory=pinned)

    def give(self, buffer: Tensor) -> None:
        """It is free again. A later copy into it follows the last one out of it, on the same
        stream."""
        self.buffers.setdefault(buffer.numel(), []).append(buffer)

    def stream(self, device: torch.device) -> Any:
        """For copies from and to this GPU."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class Away:
    """A piece of device memory as a copy in host memory."""

    def __init__(self, storage: torch.UntypedStorage, memory: HostMemory) -> None:
        self.device, self.memory = storage.device, memory
        pinned = self.device.type == "cuda"  # lint: allow cuda-literal: pinned memory is CUDA's
        buffer = memory.take(storage.nbytes(), pinned=pinned)
        self.host = buffer[: storage.nbytes()]
        self.back: Tensor | None = None
        self._arrived: Any = None  # Any: torch.cuda.Event
        weakref.finalize(self, memory.give, buffer)
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        if self.device.type != "cuda":  # lint: allow cuda-literal: so are side streams
            self.host.copy_(source)
            return
        stream = memory.stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host.copy_(source, non_blocking=True)
        source.record_stream(stream)  # its memory is not given to others before it is read

    def start_back(self) -> None:
        """Begin the copy to the device, unless it is under way."""
        if self.back is not None:
            return
        if self.device.type != "cuda":  # lint: allow cuda-literal: so are side streams
            self.back = self.host.to(self.device, copy=True)
            return
        stream = self.memory.stream(self.device)
        with torch.cuda.stream(stream):
            self.back = self.host.to(self.device, non_blocking=True)
            self._arrived = stream.record_event()

    def storage(self) -> torch.UntypedStorage:
        """On the device, complete for the current stream."""
        self.start_back()
        assert self.back is not None
        if self._arrived is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._arrived)
            self.back.record_stream(current)
            self._arrived = None
        return self.back.untyped_storage()


class View:
    """What autograd holds instead of a tensor: where in a piece of memory it was."""

    def __init__(self, x: Tensor, away: Away) -> None:
        self.away, self.dtype, self.place = (
            away,
            x.dtype,
            (x.storage_offset(), x.size(), x.stride()),
        )
        self.version = x._version
        self._counter = x.detach()  # counts what is written to x and its views from now on ...
        self._counter.data = x.new_empty(0)  # ... and does not keep their memory

    def tensor(self) -> Tensor:
        """The tensor, back on the device.

        Raises:
            RuntimeError: it has been written to since it was saved, which autograd refuses without
            offloading, too.
        """
        if self._counter._version != self.version:
            raise RuntimeError(
                f"an activation of {self.dtype} {list(self.place[1])} that backward needs was "
                "modified by an inplace "
                f"operation after it was saved: it is at version {self._counter._version}, "
                f"expected {self.version}. "
                "Use an operation that is not in place; without offloading backward would refuse "
                "it, too."
            )
        return torch.empty(0, dtype=self.dtype, device=self.away.device).set_(
            self.away.storage(), *self.place
        )


class OffloadedPass:
    """One forward pass through a stage, and its backward pass."""

    def __init__(
        self, memory: HostMemory, *, min_numel: int, stays: Collection[Tensor] = ()
    ) -> None:
        """`stays`: tensors that are needed on the device anyway, because all layers share them."""
        self.memory, self.min_numel = memory, min_numel
        self.stays = storages(stays)
        self.spans: dict[int, list[weakref.ref[Away]]] = {}
        self.sent: dict[int, list[tuple[int, int]]] = {}
        """(elements, bytes) of everything each span has sent."""

        # By storage and version: what was written since the last copy needs another one. A
        # storage's number may come again once the storage is gone; a weak reference holds the
        # number, not the memory.
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[Away]]] = {}

    @contextmanager
    def span(self, number: int, layers: Sequence[nn.Module] = ()) -> Iterator[None]:
        """What is saved inside waits in host memory; the parameters of these layers stay."""
        with saved_tensors_hooks(lambda x: self._pack(number, layers, x), _unpack):
            yield

    def keep(self, tensors: Collection[Tensor]) -> None:
        """These stay on the device, too, from now on."""
        self.stays = self.stays | storages(tensors)

    def fetch(self, number: int) -> None:
        """Begin to bring back what span `number` has sent, as far as it is still wanted."""
        for reference in self.spans.get(number, ()):
            away = reference()
            if away is not None:
                away.start_back()

    def _pack(self, number: int, layers: Sequence[nn.Module], x: Tensor) -> Tensor | View:
        storage = x.untyped_storage()
        if x.numel() < self.min_numel or storage._cdata in self.stays:
            return x
        # Asked each time: with zero=3 a layer has its parameters, and other ones, only while it
        # runs.
        if any(storage._cdata in storages(layer.parameters()) for layer in layers):
            return x
        key = storage._cdata, x._version
        known = self._known.get(key)
        away = None if known is None else known[1]()
        if away is None:
            away = Away(storage, self.memory)
            self._known[key] = StorageWeakRef(storage), weakref.ref(away)
            self.spans.setdefault(number, []).append(weakref.ref(away))
            self.sent.setdefault(number, []).append((x.numel(), storage.nbytes()))
        return View(x, away)


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """The numbers of the pieces of memory behind some tensors."""
    return {x.untyped_storage()._cdata for x in tensors}


def _unpack(saved: Tensor | View) -> Tensor:
    return saved.tensor() if isinstance(saved, View) else saved


def fetch_when_backward_reaches(x: Tensor, run: OffloadedPass, numbers: Sequence[int]) -> None:
    """When the gradient of `x` is known, which backward goes on from, begin to bring back these
    spans."""
    if x.requires_grad and numbers:
        x.register_hook(lambda gradient: _fetch(run, numbers))


def _fetch(run: OffloadedPass, numbers: Sequence[int]) -> None:
    for number in numbers:
        run.fetch(number)

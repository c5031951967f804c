"""Activation checkpointing: regions of the model save only their inputs and are recomputed in
backward.

`recompute` is the primitive; `LayerRunner` applies it to whole layers. An activation that only one
operation saves is dropped more cheaply by `register_recompute`, see kernels/linear.py.
Source: Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198,
section 5.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import (
    BitwiseComparison,
    SavedInput,
    fingerprint,
    register_recompute,
    save_entirely,
    split_rows,
    tensors_to_save,
)
from megalith.parallel.collectives import all_gather_no_grad
from megalith.parallel.group import Group
from megalith.plan.recompute import Span, layer_spans

# Activation offload: saved activations are kept in host memory between forward and backward.
#
# While an offloaded span of layers runs, the tensors that autograd saves are copied to host memory,
# once per storage, however many tensors share it. When backward reaches the layer after the span,
# the copies back are started (prefetched). On a GPU copies run on a separate stream, from and to
# reused pinned buffers; on a CPU the same code copies to other memory, which saves nothing and
# shows the logic.
#
# It is free if a layer's bytes / bandwidth to the host is less than the layer's compute time.
# Source of the scheme: Rhu et al. 2016, arXiv:1602.08124 (vDNN).


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

    def start_copy_back(self) -> None:
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
        self.start_copy_back()
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
                away.start_copy_back()

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


Function = Callable[..., Tensor]


def recompute(function: Function, x: Tensor, *others: Tensor, check: bool = False) -> Tensor:
    """Run `function(x, *others)`, saving only `others` and x, or what x is recomputed from, for
    backward.

    Backward runs the function again with gradients and goes through the first pass's graph with the
    second pass's values, so a gradient accumulator gets each contribution once, and parameters
    inside get gradients even if x requires none. Collectives inside run again in the same order.
    Without gradients the function just runs. With `check` the second pass must be bitwise equal to
    the first.
    """
    if not torch.is_grad_enabled():
        return function(x, *others)
    function = _BitwiseChecked(function) if check else function
    saved_x, inputs = tensors_to_save(x)
    region = (
        function
        if saved_x.function is None
        else _RecomputedInput(function, x, saved_x, len(inputs))
    )
    # The second pass may stop at the last saved tensor, unless its result is compared. Its inputs
    # are new tensors, which must be saved in both passes alike.
    with set_checkpoint_early_stop(not check), save_entirely((x, *others)):
        y: Tensor = checkpoint(
            region, *inputs, *others, use_reentrant=False, preserve_rng_state=False
        )
    return y


class _BitwiseChecked:
    """Region whose result must have the same bits on every run."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.first: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self.first is not None:
            return BitwiseComparison(self.function, self.first)(*tensors)
        y = self.function(*tensors)
        self.first = fingerprint(y)
        return y


class _RecomputedInput:
    """Runs a region on its input tensor the first time, and on the recomputed input after that."""

    def __init__(self, function: Function, x: Tensor, saved_x: SavedInput, count: int) -> None:
        self.function, self.saved_x, self.count = function, saved_x, count
        self.first: Tensor | None = x
        self.requires_grad = x.requires_grad

    def __call__(self, *tensors: Tensor) -> Tensor:
        inputs, others = tensors[: self.count], tensors[self.count :]
        x, self.first = self.first, None
        if x is None:
            x = self.saved_x.restore(inputs).requires_grad_(self.requires_grad)
        return self.function(x, *others)


class Recomputed(nn.Module):
    """Module or function of x, other tensors and the layer inputs, whose inner activations are
    recomputed in backward."""

    def __init__(
        self, function: Function, *, check: bool = False, saves_rope_tables: bool = False
    ) -> None:
        """`saves_rope_tables`: the function reads the rotary tables, which are then saved."""
        super().__init__()
        self.function, self.check, self.saves_rope_tables = function, check, saves_rope_tables

    def forward(self, x: Tensor, *others: Tensor | LayerInputs) -> Tensor:
        """Return the function's result; `others` may end with the layer inputs."""
        # contiguous: a view would keep its whole base tensor alive (v as a part of qkv)
        tensors = [other.contiguous() for other in others if isinstance(other, Tensor)]
        last = [other.for_recomputation() for other in others if isinstance(other, LayerInputs)]
        tables = (
            [table for inputs in last for table in inputs.rope] if self.saves_rope_tables else []
        )
        run = partial(_call, self.function, last, len(tables))
        return recompute(run, x, *tensors, *tables, check=self.check)


def _call(
    function: Function, last: Sequence[LayerInputs], num_tables: int, *first: Tensor
) -> Tensor:
    """Call the function on tensors, of which the last `num_tables` are the rotary tables of the
    inputs."""
    if num_tables:
        first, tables = first[:-num_tables], first[-num_tables:]
        last = [replace(inputs, rope=tables) for inputs in last]
    return function(*first, *last)


class RecomputedInChunks(Recomputed):
    """`Recomputed` for an MLP or another function of single tokens, applied to chunks of this
    rank's tokens one after another.

    Under sequence parallel each chunk is gathered and scattered separately; every rank has as many
    chunks. There are always `chunks`, some of them empty if there are fewer tokens: data
    parallelism expects as many gradients of each weight, see `count_forward_passes`.
    """

    def __init__(self, function: Function, chunks: int, *, check: bool = False) -> None:
        super().__init__(function, check=check)
        self.chunks = chunks

    def forward(self, x: Tensor, *others: Tensor | LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]; the function is given the inputs of all tokens beside each
        chunk."""
        parts = split_rows(x, self.chunks)
        return torch.cat([Recomputed.forward(self, part, *others) for part in parts])


def count_forward_passes(model: nn.Module) -> Mapping[nn.Module, int]:
    """Return how often each module inside `RecomputedInChunks` runs in one forward of the model;
    all others run once."""
    regions = [module for module in model.modules() if isinstance(module, RecomputedInChunks)]
    return {
        inner: region.chunks
        for region in regions
        for inner in region.modules()
        if inner is not region
    }


@dataclass(frozen=True, slots=True)
class SpanHook:
    """Position at which hidden states are taken for cross-layer attention of later layers."""

    before: int
    """Index, among the layers that run, of the layer whose input is taken."""

    how: Callable[[Tensor], Tensor]
    """Maps the hidden states to the tensor that later layers read."""

    def after(self, count: int) -> "SpanHook":
        """Return the hook for the layers from number `count` on."""
        return replace(self, before=self.before - count)


@dataclass(frozen=True, slots=True)
class LayerRunner:
    """Runs the layers of a stage or model chunk with activation checkpointing and activation
    offload."""

    recompute: RecomputeConfig
    offload: OffloadConfig
    group: Group
    """Tensor-parallel group over which `recompute.shard_inputs` shards the saved inputs."""

    memory: HostMemory = field(default_factory=HostMemory)
    """Host buffers of offloaded activations."""

    @property
    def reduces_saved_activations(self) -> bool:
        """Whether training recomputes whole layers or offloads their activations."""
        return self.recompute.granularity == "full" or self.offload.layers > 0

    def __call__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        inputs: LayerInputs,
        remember: SpanHook | None = None,
    ) -> tuple[Tensor, LayerInputs]:
        """x [t, h], in the layout of the layers -> [t, h], and the inputs with the cross-layer
        source."""
        if remember is None and not (torch.is_grad_enabled() and self.reduces_saved_activations):
            return _run(layers, inputs, x), inputs
        spans = self._spans(len(layers), None if remember is None else remember.before)
        offloaded = OffloadedPass(
            self.memory, min_numel=self.offload.min_numel, stays=_shared(inputs)
        )
        for number, span in enumerate(spans):
            if remember is not None and span.start == remember.before:
                inputs = replace(inputs, encoder_hidden=remember.how(x))
                offloaded.keep(_shared(inputs))
            part = layers[span.start : span.stop]
            with offloaded.span(number, part) if span.offloaded else nullcontext():
                x = self._run_span(span, part, x, inputs)
            if number > 0 and spans[number - 1].offloaded:
                fetch_when_backward_reaches(x, offloaded, [number - 1])
        return x, inputs

    def _spans(self, count: int, cut: int | None) -> list[Span]:
        if torch.is_grad_enabled():
            return layer_spans(self.recompute, self.offload, count, cut=cut)
        return layer_spans(RecomputeConfig(), OffloadConfig(), count, cut=cut)

    def _run_span(
        self, span: Span, layers: Sequence[nn.Module], x: Tensor, inputs: LayerInputs
    ) -> Tensor:
        if not span.recomputed:
            return _run(layers, inputs, x)
        if self.recompute.shard_inputs:
            shard_saved_input(x, self.group)
        run = partial(_run, layers, inputs.for_recomputation())
        return recompute(run, x, *_shared(inputs), check=self.recompute.check)


def _shared(inputs: LayerInputs) -> tuple[Tensor, ...]:
    """Return the tensors of the inputs that many layers share."""
    return (*inputs.rope, *(() if inputs.encoder_hidden is None else (inputs.encoder_hidden,)))


def _run(layers: Sequence[nn.Module], inputs: LayerInputs, x: Tensor, *shared: Tensor) -> Tensor:
    """Run layers in sequence, with the tensors that they share passed separately where they have to
    be saved."""
    if shared:
        pairs = len(inputs.rope)
        source = next(iter(shared[pairs:]), None)
        inputs = replace(inputs, rope=shared[:pairs], encoder_hidden=source)
    for layer in layers:
        x = layer(x, inputs)
    return x


def shard_saved_input(x: Tensor, group: Group) -> None:
    """Let backward recompute x, equal on all ranks of `group`, from equal slices of which each rank
    saves one.

    The slices are of its elements in order, the last one padded with zeros. Recomputing takes one
    all-gather.
    """
    with torch.no_grad():
        length = -(-x.numel() // group.size)
        flat = x.reshape(-1)
        local_slice = x.new_zeros(length)
        part = flat[group.rank * length : (group.rank + 1) * length]
        local_slice[: part.numel()] = part
    register_recompute(x, partial(_gather_slices, group=group, shape=x.shape), (local_slice,))


def _gather_slices(local_slice: Tensor, *, group: Group, shape: torch.Size) -> Tensor:
    return all_gather_no_grad(local_slice, group)[: shape.numel()].view(shape)


# --- frozen weights: layers without backward


@dataclass(frozen=True, slots=True)
class FrozenLayerRunner:
    """Runs the layers of a chunk; layers below all trained ones run without autograd and save
    nothing."""

    run: LayerRunner
    count: int
    """Number of leading frozen layers; if it is all of the chunk's, the result requires no
    gradient."""

    def __call__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        inputs: LayerInputs,
        span_hook: SpanHook | None = None,
    ) -> tuple[Tensor, LayerInputs]:
        """x [t, h], in the layout of the layers -> [t, h], and the inputs with the cross-layer
        source."""
        training = torch.is_grad_enabled()
        below = span_hook is not None and span_hook.before < self.count
        with torch.no_grad():
            x, inputs = self.run(layers[: self.count], x, inputs, span_hook if below else None)
        rest, later = (
            layers[self.count :],
            None if span_hook is None or below else span_hook.after(self.count),
        )
        return (
            self.run(rest, x.requires_grad_() if training else x, inputs, later)
            if rest
            else (x, inputs)
        )

"""Recomputation: regions of the model that keep their inputs for backward and run once more there.

`recompute` is the one primitive; `LayerRunner` applies it to whole layers. What only a single
reader keeps is dropped more cheaply: by a `RecomputedOutput` input, see kernels/rebuilt.py. Source:
Chen et al. 2016, arXiv:1604.06174; selective: Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.kernels.rebuilt import (
    BitwiseComparison,
    LayerInput,
    RecomputedOutput,
    fingerprint,
    output_tensor,
    recompute_output,
    split_rows,
)
from megalith.kernels.replay import Decided
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.autograd import regather
from megalith.parallel.group import Group
from megalith.parallel.offload import HostMemory, OffloadedPass, fetch_when_backward_reaches
from megalith.plan.recompute import Span, layer_spans

Function = Callable[..., Tensor]


def recompute(function: Function, x: LayerInput, *others: Tensor, check: bool = False) -> Tensor:
    """`function(x, *others)`, of which only x, or what it is rebuilt from, and `others` are kept
    for backward.

    Backward runs the function again, with gradients, and goes through the first pass's graph with
    the second pass's numbers; so a sink is given each product once, and parameters inside get
    gradients whatever x wants. Collectives inside run again, in the same order. Without gradients
    nothing is kept anyway, and the function just runs. With `check` the second pass must give the
    bits of the first.
    """
    if not torch.is_grad_enabled():
        return function(output_tensor(x), *others)
    function = _Compared(function) if check else function
    region, inputs = (
        (_Again(function, x), x.inputs) if isinstance(x, RecomputedOutput) else (function, (x,))
    )
    with set_checkpoint_early_stop(
        not check
    ):  # the second pass ends with what is saved last, unless it is compared
        y: Tensor = checkpoint(
            region, *inputs, *others, use_reentrant=False, preserve_rng_state=False
        )
    return y


class _Compared:
    """A region whose results must have the same bits every time."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.first: Tensor | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        if self.first is not None:
            return BitwiseComparison(self.function, self.first)(*tensors)
        y = self.function(*tensors)
        self.first = fingerprint(y)
        return y


class _Again:
    """Runs a region on the tensor it is given first, and from then on on what that is rebuilt
    from."""

    def __init__(self, function: Function, x: RecomputedOutput) -> None:
        self.function, self.again, self.num_inputs = function, x.again, len(x.inputs)
        self.first: Tensor | None = x.value
        self.like, self.requires_grad = (x.value.shape, x.value.dtype), x.value.requires_grad

    def __call__(self, *tensors: Tensor) -> Tensor:
        inputs, others = tensors[: self.num_inputs], tensors[self.num_inputs :]
        x, self.first = self.first, None
        if x is None:
            x = recompute_output(self.again, inputs, like=self.like).requires_grad_(
                self.requires_grad
            )
        return self.function(x, *others)


class Recomputed(nn.Module):
    """A module or function of x, other tensors and the tokens, whose inner tensors are not kept for
    backward."""

    def __init__(self, function: Function, *, check: bool = False, turns: bool = False) -> None:
        """`turns`: it reads the tables that positions turn by, which are kept as other tensors
        are."""
        super().__init__()
        self.function, self.check, self.turns = function, check, turns

    def forward(self, x: LayerInput, *others: Tensor | PackedSeqParams) -> Tensor:
        """The same result; `others` may end with the tokens."""
        # Made contiguous: a part of a larger tensor would keep all of it (values, of queries, keys
        # and values).
        tensors = [other.contiguous() for other in others if isinstance(other, Tensor)]
        last = [
            replace(other, decided=Decided())
            for other in others
            if isinstance(other, PackedSeqParams)
        ]
        tables = [table for tokens in last for table in tokens.rotary] if self.turns else []
        run = partial(_call, self.function, last, len(tables))
        return recompute(run, x, *tensors, *tables, check=self.check)


def _call(
    function: Function, last: Sequence[PackedSeqParams], num_tables: int, *first: Tensor
) -> Tensor:
    """The function of some tensors, of which the last so many are tables that the tokens come
    with."""
    if num_tables:
        first, tables = first[:-num_tables], first[-num_tables:]
        last = [replace(tokens, rotary=tables) for tokens in last]
    return function(*first, *last)


class RecomputedInChunks(Recomputed):
    """The same of an MLP or another function of each token alone, for one chunk of this rank's
    tokens after another.

    Under sp each chunk is gathered and scattered by itself; every rank has as many. There are
    always `chunks`, some of them without a token where there are fewer tokens: engines expect as
    many gradients of each weight, see `passes_of`.
    """

    def __init__(self, function: Function, chunks: int, *, check: bool = False) -> None:
        super().__init__(function, check=check)
        self.chunks = chunks

    def forward(self, x: LayerInput, *others: Tensor | PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]; the function is given all tokens that others tell of beside each
        chunk."""
        parts = split_rows(x, self.chunks)
        return torch.cat([Recomputed.forward(self, part, *others) for part in parts])


def passes_of(model: nn.Module) -> Mapping[nn.Module, int]:
    """How often each module inside regions of chunks runs in one forward of the model; all others
    run once."""
    regions = [module for module in model.modules() if isinstance(module, RecomputedInChunks)]
    return {
        inner: region.chunks
        for region in regions
        for inner in region.modules()
        if inner is not region
    }


@dataclass(frozen=True, slots=True)
class SpanHook:
    """Where hidden states are taken that later layers look at."""

    before: int
    """The layer, of those that run, whose input is taken."""

    how: Callable[[Tensor], Tensor]
    """What is remembered of them."""

    def after(self, count: int) -> "SpanHook":
        """The same for the layers from number `count` on."""
        return replace(self, before=self.before - count)


@dataclass(frozen=True, slots=True)
class LayerRunner:
    """Runs the layers of a stage, or of one model chunk, and decides what of each is kept for
    backward."""

    recompute: RecomputeConfig
    offload: OffloadConfig
    group: Group
    """Tensor-parallel ranks, over which `recompute.shard_inputs` divides the inputs that are
    kept."""

    memory: HostMemory = field(default_factory=HostMemory)
    """For what is offloaded."""

    def __call__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        tokens: PackedSeqParams,
        remember: SpanHook | None = None,
    ) -> tuple[Tensor, PackedSeqParams]:
        """x [t, h], as the layers have tokens -> [t, h], and the tokens with what was remembered on
        the way."""
        spans = self._spans(len(layers), None if remember is None else remember.before)
        away = OffloadedPass(self.memory, min_numel=self.offload.min_numel, stays=_shared(tokens))
        for number, span in enumerate(spans):
            if remember is not None and span.start == remember.before:
                tokens = replace(tokens, memory=remember.how(x))
                away.keep(_shared(tokens))
            part = layers[span.start : span.stop]
            with away.span(number, part) if span.offloaded else nullcontext():
                x = self._run_span(span, part, x, tokens)
            if number > 0 and spans[number - 1].offloaded:
                fetch_when_backward_reaches(x, away, [number - 1])
        return x, tokens

    def _spans(self, count: int, cut: int | None) -> list[Span]:
        if torch.is_grad_enabled():
            return layer_spans(self.recompute, self.offload, count, cut=cut)
        return layer_spans(RecomputeConfig(), OffloadConfig(), count, cut=cut)

    def _run_span(
        self, span: Span, layers: Sequence[nn.Module], x: Tensor, tokens: PackedSeqParams
    ) -> Tensor:
        if not span.recomputed:
            return _run(layers, tokens, x)
        kept = sharded(x, self.group) if self.recompute.shard_inputs else x
        run = partial(_run, layers, replace(tokens, decided=Decided()))
        return recompute(run, kept, *_shared(tokens), check=self.recompute.check)


def _shared(tokens: PackedSeqParams) -> tuple[Tensor, ...]:
    """What comes with the tokens and is the same tensor for many layers."""
    return (*tokens.rotary, *(() if tokens.memory is None else (tokens.memory,)))


def _run(
    layers: Sequence[nn.Module], tokens: PackedSeqParams, x: Tensor, *shared: Tensor
) -> Tensor:
    """One layer after the other, with what they share given apart where it has to be kept as
    tensors."""
    if shared:
        pairs = len(tokens.rotary)
        tokens = replace(tokens, rotary=shared[:pairs], memory=next(iter(shared[pairs:]), None))
    for layer in layers:
        x = layer(x, tokens)
    return x


def sharded(x: Tensor, group: Group) -> RecomputedOutput:
    """x, the same on every rank of `group`, rebuilt from equal slices of which each rank keeps one.

    The slices are of its elements in order, the last one padded with zeros. One all-gather when it
    is rebuilt.
    """
    with torch.no_grad():
        length = -(-x.numel() // group.size)
        flat = x.reshape(-1)
        mine = x.new_zeros(length)
        part = flat[group.rank * length : (group.rank + 1) * length]
        mine[: part.numel()] = part
    return RecomputedOutput(x, partial(_join, group=group, shape=x.shape), (mine,))


def _join(mine: Tensor, *, group: Group, shape: torch.Size) -> Tensor:
    return regather(mine, group)[: shape.numel()].view(shape)

"""Differentiable collectives, each with its conjugate in backward and a typing rule.

Along each axis of the grid a tensor has one of four types. R (replicated): equal on all ranks, each
rank uses it differently, so its gradients are partial sums. I (invariant): equal on all ranks and
used the same way, so its gradients are equal. V (varying): each rank has its own values. P
(partial): the ranks' values have yet to be summed. Backward exchanges R with P and keeps I and V;
every function below states its pair in `moves`, from which the types of a layout are checked
without running it.

Only functional ops, so they run under torch.compile and, on meta tensors, without a process group.
A group of one rank returns its input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

# registers the meta kernels of the operations below
import torch.distributed._functional_collectives
from torch import Tensor

from megalith.observe.flight import CollectiveRecord
from megalith.parallel.group import (
    Group,
    local_range,
    mark_finished,
    mark_waiting,
    record_collective,
    start_all_gather,
)
from megalith.plan.shards import split_evenly

_ops = torch.ops._c10d_functional
Moves = tuple[str, str]
OverlapFn = Callable[[], None]
"""Called between start and wait of a message, to do other work until the result is needed."""


def _wait(started: Tensor, entry: CollectiveRecord | None) -> Tensor:
    y: Tensor = _ops.wait_tensor(started)
    mark_finished(entry)
    return y


def _sum(x: Tensor, group: Group) -> Tensor:
    entry = record_collective(group, "all_reduce", x)
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.name), entry)


def _gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return every rank's part, concatenated along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        entry = record_collective(group, "all_gather", x)
        out = _wait(start_all_gather(x, group), entry)
    else:  # gloo cannot gather uneven parts: send this rank's part to all ranks
        out = _exchange(
            x.repeat(group.size, *[1] * (x.dim() - 1)),
            group,
            [sizes[group.rank]] * group.size,
            sizes,
        )
    return out.movedim(0, dim)


def _reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return this rank's part, along `dim`, of the sum over ranks."""
    x = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        entry = record_collective(group, "reduce_scatter", x)
        out = _wait(_ops.reduce_scatter_tensor(x, "sum", group.size, group.name), entry)
    else:
        local_size = sizes[group.rank]
        parts = _exchange(x, group, sizes, [local_size] * group.size)
        out = parts.reshape(group.size, local_size, *x.shape[1:]).sum(0)
    return out.movedim(0, dim)


def _exchange(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    entry = record_collective(group, "all_to_all", x, rows=(send, receive))
    return _wait(
        _ops.all_to_all_single(x.contiguous(), list(receive), list(send), group.name), entry
    )


def _slice(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    start, stop = local_range(sizes, group.rank)
    return x.narrow(dim, start, stop - start).contiguous()


class CopyToTP(torch.autograd.Function):
    """I -> R: identity forward, all-reduce backward."""

    moves: ClassVar[Moves] = ("I", "R")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group), None


class ReduceFromTP(torch.autograd.Function):
    """P -> I: all-reduce forward, identity backward."""

    moves: ClassVar[Moves] = ("P", "I")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class AllReduce(torch.autograd.Function):
    """P -> R: all-reduce forward, all-reduce backward."""

    moves: ClassVar[Moves] = ("P", "R")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group), None


class AllGather(torch.autograd.Function):
    """V -> R: all-gather forward, reduce-scatter backward."""

    moves: ClassVar[Moves] = ("V", "R")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class ReduceScatter(torch.autograd.Function):
    """P -> V: reduce-scatter forward, all-gather backward."""

    moves: ClassVar[Moves] = ("P", "V")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _reduce_scatter(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class AllGatherInvariant(torch.autograd.Function):
    """V -> I: all-gather forward, this rank's slice backward."""

    moves: ClassVar[Moves] = ("V", "I")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _slice(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class ScatterToSP(torch.autograd.Function):
    """I -> V: this rank's slice forward, all-gather backward."""

    moves: ClassVar[Moves] = ("I", "V")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _slice(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class AllToAll(torch.autograd.Function):
    """V -> V: all-to-all forward, the inverse all-to-all backward."""

    moves: ClassVar[Moves] = ("V", "V")

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.receive = group, send, receive
        return _exchange(x, group, send, receive)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(dy, ctx.group, ctx.receive, ctx.send), None, None, None


def no_overlap() -> None:
    """Do nothing between start and wait of a message."""


@dataclass(slots=True)
class AsyncAllToAll:
    """An `all_to_all` split into start and wait, with `overlap_fn` called between them, forward and
    backward."""

    group: Group
    send: Sequence[int]
    receive: Sequence[int]
    overlap_fn: OverlapFn = no_overlap
    in_flight: Tensor | None = None
    """Rows in flight in forward; must not be read yet."""

    entry: CollectiveRecord | None = None
    """FlightRecorder record of the message in flight."""

    def start(self, x: Tensor, *, back: bool) -> Tensor:
        """Start the exchange in one direction; the result must not be read before `wait`."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self.entry = record_collective(self.group, "all_to_all", x, rows=(send, receive))
        started: Tensor = _ops.all_to_all_single(
            x.contiguous(), list(receive), list(send), self.group.name
        )
        mark_finished(self.entry)  # it does not block this rank until the wait
        return started

    def wait(self, started: Tensor) -> Tensor:
        """Call `overlap_fn`, then wait for the result of `start` and return it."""
        self.overlap_fn()
        mark_waiting(self.entry)
        return _wait(started, self.entry)


class StartAllToAll(torch.autograd.Function):
    """V -> V: start an exchange forward, wait for the exchange of gradients backward.

    Returns a placeholder with the shape of x that takes no memory: the rows in flight have another
    shape, and autograd would not accept the gradient exchange, which `WaitAllToAll` starts, as
    their gradient.
    """

    moves: ClassVar[Moves] = ("V", "V")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, async_all_to_all: AsyncAllToAll) -> Tensor:
        ctx.async_all_to_all = async_all_to_all
        async_all_to_all.in_flight = async_all_to_all.start(x, back=False)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.async_all_to_all.wait(dx), None, None


class WaitAllToAll(torch.autograd.Function):
    """V -> V: wait for an exchange forward, start the exchange of gradients backward."""

    moves: ClassVar[Moves] = ("V", "V")
    ends: ClassVar[type[torch.autograd.Function]] = StartAllToAll
    """The function with which this one forms a single collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, async_all_to_all: AsyncAllToAll) -> Tensor:
        assert async_all_to_all.in_flight is not None, "wait_all_to_all without start_all_to_all"
        ctx.async_all_to_all, started, async_all_to_all.in_flight = (
            async_all_to_all,
            async_all_to_all.in_flight,
            None,
        )
        return async_all_to_all.wait(started)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.async_all_to_all.start(dy, back=True), None, None


class MarkPartial(torch.autograd.Function):
    """V -> P: mark x as a term of a pending sum over ranks; the values do not change."""

    moves: ClassVar[Moves] = ("V", "P")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    y: Tensor = function.apply(*arguments)
    return y


def copy_to_tp(x: Tensor, group: Group) -> Tensor:
    """Pass x, equal on all ranks, into tensor-parallel work: I -> R; backward sums its gradients
    over `group`."""
    return x if group.size == 1 else _apply(CopyToTP, x, group)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results at the end of tensor-parallel work: P -> I; backward passes
    the same gradient to every rank."""
    return x if group.size == 1 else _apply(ReduceFromTP, x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum partial results that the ranks then use differently: P -> R; backward sums too."""
    return x if group.size == 1 else _apply(AllReduce, x, group)


def all_gather(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' parts along `dim`: V -> R. `sizes`: each rank's length, if they
    differ."""
    if group.size == 1:
        return x
    return _apply(AllGather, x, group, dim, sizes or [x.shape[dim]] * group.size)


def all_gather_no_grad(x: Tensor, group: Group) -> Tensor:
    """Repeat the `all_gather` along dim 0, for a backward that saved only x; no gradient."""
    return x if group.size == 1 else _gather(x, group, 0, [x.shape[0]] * group.size)


def reduce_scatter(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum over ranks and keep this rank's slice along `dim`: P -> V. `sizes`: each rank's length;
    default: even."""
    if group.size == 1:
        return x
    return _apply(ReduceScatter, x, group, dim, sizes or split_evenly(x.shape[dim], group.size))


def all_gather_invariant(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Concatenate the ranks' parts for work that every rank repeats: V -> I; backward keeps this
    rank's slice."""
    if group.size == 1:
        return x
    return _apply(AllGatherInvariant, x, group, dim, sizes or [x.shape[dim]] * group.size)


def scatter_to_sp(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep this rank's slice along `dim` of a tensor that is equal on all ranks: I -> V; backward
    all-gathers."""
    if group.size == 1:
        return x
    return _apply(ScatterToSP, x, group, dim, sizes or split_evenly(x.shape[dim], group.size))


def all_to_all(x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send `send[r]` rows to each rank r and receive `receive[r]` from it: V -> V."""
    return x if group.size == 1 else _apply(AllToAll, x, group, send, receive)


def start_all_to_all(x: Tensor, async_all_to_all: AsyncAllToAll) -> Tensor:
    """Start an `all_to_all` of x without waiting: V -> V. The result is a placeholder for
    `wait_all_to_all`.

    Autograd runs backward in the reverse order of forward, so work between start and wait that does
    not depend on the received rows also lies between start and wait of the gradient exchange.
    """
    return (
        x
        if async_all_to_all.group.size == 1
        else _apply(StartAllToAll, x, async_all_to_all.group, async_all_to_all)
    )


def wait_all_to_all(x: Tensor, async_all_to_all: AsyncAllToAll) -> Tensor:
    """Wait for the rows of `start_all_to_all` and return them: V -> V."""
    return (
        x
        if async_all_to_all.group.size == 1
        else _apply(WaitAllToAll, x, async_all_to_all.group, async_all_to_all)
    )


def mark_partial(x: Tensor, group: Group) -> Tensor:
    """Mark `x` as this rank's term of a sum over `group`: V -> P. Call it where a sharded dimension
    is contracted.

    Free: only meta tensors, on which types are checked, record it.
    """
    return _apply(MarkPartial, x, group) if group.size > 1 and x.is_meta else x


class Collectives(NamedTuple):
    """Implementation of the collectives before and after tensor-parallel work; it depends on the
    devices, results do not, except for the order of sums."""

    all_gather: Callable[[Tensor, Group], Tensor]
    """Equal parts [t, ...] -> all of them [ranks * t, ...]: V -> R."""

    reduce_scatter: Callable[[Tensor, Group], Tensor]
    """Partial sums [ranks * t, ...] -> this rank's equal part [t, ...] of the sum: P -> V."""

    all_reduce: Callable[[Tensor, Group], Tensor]
    """Partial sums -> their sum: P -> I."""

    reset_buffers: Callable[[], None] = lambda: None
    """Let the next call use the same buffers as after every other reset: before and at the end of a
    step that a graph replays. Every rank calls it."""


PROCESS_GROUP = Collectives(all_gather, reduce_scatter, reduce_from_tp)
"""Those of the process group (gloo, NCCL), for any device; the only ones with gradients."""

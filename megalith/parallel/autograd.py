"""Differentiable collectives, each with its conjugate in backward and one typing rule.

A tensor is, along each axis of the grid, one of four types. R: the same on every rank, each rank
uses it for other work (its gradients are parts of a sum). I: the same on every rank, used the same
way (its gradients are equal). V: every rank has its own. P: parts of a sum that is still to be
taken. Backward exchanges R with P and keeps I and V; every function below states its pair in
`moves`, from which a layout's types are checked without running it.

Functional ops only: they run under torch.compile and, on meta tensors, without any process group. A
group of one rank returns its input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

# gives the operations below their kernels for meta tensors
import torch.distributed._functional_collectives
from torch import Tensor

from megalith.observe.flight import CollectiveRecord
from megalith.parallel.group import Group, all_gathered, finished, my_range, note, stands_still_for
from megalith.plan.shards import split_evenly

_ops = torch.ops._c10d_functional
Moves = tuple[str, str]
OverlapFn = Callable[[], None]
"""Called when a message is on its way, before it is waited for; returns when its time has come."""


def _wait(started: Tensor, entry: CollectiveRecord | None) -> Tensor:
    y: Tensor = _ops.wait_tensor(started)
    finished(entry)
    return y


def _sum(x: Tensor, group: Group) -> Tensor:
    entry = note(group, "all_reduce", x)
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.name), entry)


def _gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Every rank's part, joined along `dim`."""
    x = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        entry = note(group, "all_gather", x)
        out = _wait(all_gathered(x, group), entry)
    else:  # gloo cannot gather uneven parts: send my part to everyone
        out = _exchange(
            x.repeat(group.size, *[1] * (x.dim() - 1)),
            group,
            [sizes[group.rank]] * group.size,
            sizes,
        )
    return out.movedim(0, dim)


def _reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """My part, along `dim`, of the sum over ranks."""
    x = x.movedim(dim, 0).contiguous()
    if len(set(sizes)) == 1:
        entry = note(group, "reduce_scatter", x)
        out = _wait(_ops.reduce_scatter_tensor(x, "sum", group.size, group.name), entry)
    else:
        mine = sizes[group.rank]
        parts = _exchange(x, group, sizes, [mine] * group.size)
        out = parts.reshape(group.size, mine, *x.shape[1:]).sum(0)
    return out.movedim(0, dim)


def _exchange(x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    entry = note(group, "all_to_all", x, rows=(send, receive))
    return _wait(
        _ops.all_to_all_single(x.contiguous(), list(receive), list(send), group.name), entry
    )


def _slice(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    start, stop = my_range(sizes, group.rank)
    return x.narrow(dim, start, stop - start).contiguous()


class CopyToTP(torch.autograd.Function):
    """I -> R: nothing forward, sum backward."""

    moves: ClassVar[Moves] = ("I", "R")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.group), None


class ReduceFromTP(torch.autograd.Function):
    """P -> I: sum forward, nothing backward."""

    moves: ClassVar[Moves] = ("P", "I")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class AllReduce(torch.autograd.Function):
    """P -> R: sum forward, sum backward."""

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
    """V -> I: all-gather forward, my slice backward."""

    moves: ClassVar[Moves] = ("V", "I")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _slice(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class ScatterToSP(torch.autograd.Function):
    """I -> V: my slice forward, all-gather backward."""

    moves: ClassVar[Moves] = ("I", "V")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return _slice(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class AllToAll(torch.autograd.Function):
    """V -> V: exchange forward, exchange back backward."""

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
    """Nothing to do meanwhile."""


@dataclass(slots=True)
class AsyncAllToAll:
    """One `all_to_all` whose beginning and end are two functions, with other work between; backward
    as well."""

    group: Group
    send: Sequence[int]
    receive: Sequence[int]
    overlap_fn: OverlapFn = no_overlap
    coming: Tensor | None = None
    """Rows on their way in forward; not to be read yet."""

    entry: CollectiveRecord | None = None
    """Of the message that is on its way."""

    def start(self, x: Tensor, *, back: bool) -> Tensor:
        """InitialValues it in one direction; what is given must not be read before `wait`."""
        send, receive = (self.receive, self.send) if back else (self.send, self.receive)
        self.entry = note(self.group, "all_to_all", x, rows=(send, receive))
        started: Tensor = _ops.all_to_all_single(
            x.contiguous(), list(receive), list(send), self.group.name
        )
        finished(self.entry)  # as far as this rank is held up by it, until it waits
        return started

    def wait(self, started: Tensor) -> Tensor:
        """The same tensor, once it is there."""
        self.overlap_fn()
        stands_still_for(self.entry)
        return _wait(started, self.entry)


class StartAllToAll(torch.autograd.Function):
    """V -> V: start an exchange forward, wait for the one of gradients backward.

    Gives something that looks like x, takes no memory, and stands for the rows on their way: these
    have another shape, so autograd would not let the gradients' message, which `WaitAllToAll`
    starts, pass for their gradient.
    """

    moves: ClassVar[Moves] = ("V", "V")

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, async_all_to_all: AsyncAllToAll) -> Tensor:
        ctx.async_all_to_all = async_all_to_all
        async_all_to_all.coming = async_all_to_all.start(x, back=False)
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.async_all_to_all.wait(dx), None, None


class WaitAllToAll(torch.autograd.Function):
    """V -> V: wait for an exchange forward, start the one of gradients backward."""

    moves: ClassVar[Moves] = ("V", "V")
    ends: ClassVar[type[torch.autograd.Function]] = StartAllToAll
    """Together they are one collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, async_all_to_all: AsyncAllToAll) -> Tensor:
        assert async_all_to_all.coming is not None, "nothing has departed"
        ctx.async_all_to_all, started, async_all_to_all.coming = (
            async_all_to_all,
            async_all_to_all.coming,
            None,
        )
        return async_all_to_all.wait(started)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.async_all_to_all.start(dy, back=True), None, None


class MarkPartial(torch.autograd.Function):
    """V -> P: a declaration that a sum is pending; the numbers stay."""

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
    """Begin work that `group` divides: I -> R. x is the same on every rank; backward sums its
    gradients."""
    return x if group.size == 1 else _apply(CopyToTP, x, group)


def reduce_from_tp(x: Tensor, group: Group) -> Tensor:
    """Finish divided work: P -> I. Sums the ranks' parts; backward hands every rank the same
    gradient."""
    return x if group.size == 1 else _apply(ReduceFromTP, x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum parts that the ranks then use differently: P -> R; backward sums too."""
    return x if group.size == 1 else _apply(AllReduce, x, group)


def all_gather(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Join the ranks' parts along `dim`: V -> R. `sizes`: each rank's length, when they differ."""
    if group.size == 1:
        return x
    return _apply(AllGather, x, group, dim, sizes or [x.shape[dim]] * group.size)


def regather(x: Tensor, group: Group) -> Tensor:
    """What `all_gather` gave along dim 0, for a backward that has kept x alone; no gradient."""
    return x if group.size == 1 else _gather(x, group, 0, [x.shape[0]] * group.size)


def reduce_scatter(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Sum the ranks' parts and keep my slice along `dim`: P -> V. `sizes`: each rank's length;
    default: even."""
    if group.size == 1:
        return x
    return _apply(ReduceScatter, x, group, dim, sizes or split_evenly(x.shape[dim], group.size))


def all_gather_invariant(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Join the ranks' parts for work that every rank repeats: V -> I; backward keeps my slice."""
    if group.size == 1:
        return x
    return _apply(AllGatherInvariant, x, group, dim, sizes or [x.shape[dim]] * group.size)


def scatter_to_sp(
    x: Tensor, group: Group, *, dim: int = 0, sizes: Sequence[int] | None = None
) -> Tensor:
    """Keep my slice along `dim` of a tensor that every rank has: I -> V; backward joins the
    slices."""
    if group.size == 1:
        return x
    return _apply(ScatterToSP, x, group, dim, sizes or split_evenly(x.shape[dim], group.size))


def all_to_all(x: Tensor, group: Group, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Send `send[r]` rows to each rank r and receive `receive[r]` from it: V -> V."""
    return x if group.size == 1 else _apply(AllToAll, x, group, send, receive)


def start_all_to_all(x: Tensor, async_all_to_all: AsyncAllToAll) -> Tensor:
    """Begin an `all_to_all` of x and go on: V -> V. What is given is for `wait_all_to_all` alone.

    Autograd runs backward through what was done later first. So what lies between the two, if the
    rows that arrive do not depend on it, lies between the beginning and the end of the gradients'
    message too.
    """
    return (
        x
        if async_all_to_all.group.size == 1
        else _apply(StartAllToAll, x, async_all_to_all.group, async_all_to_all)
    )


def wait_all_to_all(x: Tensor, async_all_to_all: AsyncAllToAll) -> Tensor:
    """End it: the rows that the ranks have sent me, V -> V."""
    return (
        x
        if async_all_to_all.group.size == 1
        else _apply(WaitAllToAll, x, async_all_to_all.group, async_all_to_all)
    )


def mark_partial(x: Tensor, group: Group) -> Tensor:
    """State that `x` is my part of a sum over `group`: V -> P. Written where a cut dimension is
    contracted.

    Free: only on meta tensors, where types are checked, does it leave a trace.
    """
    return _apply(MarkPartial, x, group) if group.size > 1 and x.is_meta else x

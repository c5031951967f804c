"""Matmuls that hide the communication around them: gathers and sums of tokens, step by step around
a ring of ranks.

Each rank starts a step's message, multiplies what it has meanwhile, and then waits. n ranks take n
steps, and all but one communicate. Source: Wang et al. 2023, "Overlap Communication with Dependent
Computation via Decomposition", ASPLOS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.observe.flight import CollectiveRecord
from megalith.parallel.group import Group, all_gathered, finished, note

_ops = torch.ops._c10d_functional

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [t, i], w) -> [t, o]: `forward` or `input_grad` of kernels/linear.py."""


class Started(NamedTuple):
    """A tensor on its way."""

    x: Tensor
    entry: CollectiveRecord | None = None
    """The note of it, for the report of a hang."""

    def wait(self) -> Tensor:
        """The tensor, when it is there."""
        y: Tensor = _ops.wait_tensor(self.x)
        finished(self.entry)
        return y


def start_sum(x: Tensor, group: Group) -> Started:
    """InitialValues adding up `x` over the group."""
    entry = note(group, "all_reduce", x)
    return Started(_ops.all_reduce(x.contiguous(), "sum", group.name), entry)


def start_gather(x: Tensor, group: Group) -> Started:
    """InitialValues joining the ranks' equal parts [t, ...]: [ranks * t, ...]."""
    entry = note(group, "all_gather", x)
    return Started(all_gathered(x.contiguous(), group), entry)


def start_scatter(x: Tensor, group: Group) -> Started:
    """InitialValues adding up `x` [ranks * t, ...] over the group, of which I get my part [t,
    ...]."""
    entry = note(group, "reduce_scatter", x)
    return Started(_ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name), entry)


def start_passing(x: Tensor, group: Group) -> Started:
    """InitialValues sending `x` [t, ...] to the next rank of the ring, and receiving as much from
    the one before.

    An exchange in which only neighbors have something to say: it needs no order of sends and
    receives.
    """
    send, receive = [0] * group.size, [0] * group.size
    send[(group.rank + 1) % group.size] = receive[(group.rank - 1) % group.size] = x.shape[0]
    entry = note(group, "all_to_all", x, rows=(send, receive))
    return Started(_ops.all_to_all_single(x.contiguous(), receive, send, group.name), entry)


def gather_product(x: Tensor, w: Tensor, group: Group, product: Product) -> tuple[Tensor, Tensor]:
    """All tokens, and their product with my `w`: x [t / ranks, i], my tokens -> [t, i], [t, o].

    The parts travel round: while I multiply one, the next one arrives.
    """
    whole = [x] * group.size
    products = [x] * group.size
    owner, part = group.rank, x
    for step in range(group.size):
        coming = start_passing(part, group) if step < group.size - 1 else None
        whole[owner], products[owner] = part, product(part, w)
        if coming is not None:
            owner, part = (owner - 1) % group.size, coming.wait()
    return torch.cat(whole), torch.cat(products)


def product_scatter(x: Tensor, w: Tensor, group: Group, product: Product) -> Tensor:
    """The sum over the ranks of their products, for my tokens: x [t, i_tp], all tokens -> [t /
    ranks, o].

    A sum travels round to the rank whose tokens it is for: while one is on its way, I multiply for
    the next one.
    """
    parts = x.chunk(group.size)
    travelling: Started | None = None
    for step in range(group.size):
        mine = product(parts[(group.rank - 1 - step) % group.size], w)
        if travelling is not None:
            mine = mine.add_(travelling.wait())
        if step < group.size - 1:
            travelling = start_passing(mine, group)
    return mine


class CollectiveMatmul(NamedTuple):
    """The two products of a ring; what they are fused with depends on the device, never what they
    compute."""

    gathered: Callable[[Tensor, Tensor, Group, Product], tuple[Tensor, Tensor]]
    """(x, w, group, product) -> all tokens, and their product: see `gather_product`."""

    scattered: Callable[[Tensor, Tensor, Group, Product], Tensor]
    """(x, w, group, product) -> the sum of products, for my tokens: see `product_scatter`."""


RING_EXCHANGE = CollectiveMatmul(gather_product, product_scatter)
"""On any device and backend."""

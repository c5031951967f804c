"""Collective matmul: all-gather and reduce-scatter decomposed around a ring and overlapped with the
matmul.

Each rank starts a step's message, multiplies the part that it has, and then waits. n ranks take n
steps, all but one of which communicate. Source: Wang et al. 2023, "Overlap Communication with
Dependent Computation via Decomposition", ASPLOS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.observe.flight import CollectiveRecord
from megalith.parallel.group import Group, mark_finished, record_collective, start_all_gather

_ops = torch.ops._c10d_functional

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [t, i], w) -> [t, o]: `forward` or `input_grad` of kernels/linear.py."""


class PendingCollective(NamedTuple):
    """Result of a collective that has been started."""

    x: Tensor
    entry: CollectiveRecord | None = None
    """Its flight record, for the report of a hang."""

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        y: Tensor = _ops.wait_tensor(self.x)
        mark_finished(self.entry)
        return y


def start_all_reduce(x: Tensor, group: Group) -> PendingCollective:
    """Start an all-reduce of `x` over the group."""
    entry = record_collective(group, "all_reduce", x)
    return PendingCollective(_ops.all_reduce(x.contiguous(), "sum", group.name), entry)


def start_token_gather(x: Tensor, group: Group) -> PendingCollective:
    """Start an all-gather of equal parts [t, ...] -> [ranks * t, ...]."""
    entry = record_collective(group, "all_gather", x)
    return PendingCollective(start_all_gather(x.contiguous(), group), entry)


def start_reduce_scatter(x: Tensor, group: Group) -> PendingCollective:
    """Start a reduce-scatter of `x` [ranks * t, ...] -> this rank's part [t, ...]."""
    entry = record_collective(group, "reduce_scatter", x)
    return PendingCollective(
        _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name), entry
    )


def start_ring_exchange(x: Tensor, group: Group) -> PendingCollective:
    """Start sending `x` [t, ...] to the next rank of the ring and receiving as much from the
    previous one.

    An all-to-all in which only neighbors exchange rows: it needs no order of sends and receives.
    """
    send, receive = [0] * group.size, [0] * group.size
    send[(group.rank + 1) % group.size] = receive[(group.rank - 1) % group.size] = x.shape[0]
    entry = record_collective(group, "all_to_all", x, rows=(send, receive))
    return PendingCollective(
        _ops.all_to_all_single(x.contiguous(), receive, send, group.name), entry
    )


def ring_all_gather_matmul(
    x: Tensor, w: Tensor, group: Group, product: Product
) -> tuple[Tensor, Tensor]:
    """Return all tokens and their product with this rank's `w`: x [t / ranks, i] -> [t, i], [t, o].

    The parts go around the ring: one part is multiplied while the next one is received.
    """
    parts = [x] * group.size
    products = [x] * group.size
    owner, part = group.rank, x
    for step in range(group.size):
        received = start_ring_exchange(part, group) if step < group.size - 1 else None
        parts[owner], products[owner] = part, product(part, w)
        if received is not None:
            owner, part = (owner - 1) % group.size, received.wait()
    return torch.cat(parts), torch.cat(products)


def ring_matmul_reduce_scatter(x: Tensor, w: Tensor, group: Group, product: Product) -> Tensor:
    """Return the sum over ranks of their products, for this rank's tokens: x [t, i_tp], all tokens
    -> [t / ranks, o].

    Each partial sum goes around the ring to the rank that has its tokens; the next part is
    multiplied while it is in flight.
    """
    parts = x.chunk(group.size)
    in_flight: PendingCollective | None = None
    for step in range(group.size):
        partial_sum = product(parts[(group.rank - 1 - step) % group.size], w)
        if in_flight is not None:
            partial_sum = partial_sum.add_(in_flight.wait())
        if step < group.size - 1:
            in_flight = start_ring_exchange(partial_sum, group)
    return partial_sum


class CollectiveMatmul(NamedTuple):
    """Implementation of the two collective matmuls; it depends on the device, their results do
    not."""

    all_gather_matmul: Callable[[Tensor, Tensor, Group, Product], tuple[Tensor, Tensor]]
    """(x, w, group, product) -> all tokens, and their product: see `ring_all_gather_matmul`."""

    matmul_reduce_scatter: Callable[[Tensor, Tensor, Group, Product], Tensor]
    """(x, w, group, product) -> the sum of products, for this rank's tokens: see
    `ring_matmul_reduce_scatter`."""


RING_EXCHANGE = CollectiveMatmul(ring_all_gather_matmul, ring_matmul_reduce_scatter)
"""Messages around a ring, for any device and communication backend."""

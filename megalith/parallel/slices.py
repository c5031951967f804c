"""Asynchronous reduce-scatter and all-gather of one bucket: each rank gets its slice of the sum, or
all slices.

On NVIDIA GPUs these are NCCL's reduce-scatter and all-gather. gloo has neither for a single tensor:
torch emulates them with an all-reduce of a copy, or a gather into a list. So on CPUs every rank
sends each other rank its slice, directly from and into the buffer. Measured, two ranks with 16 MB,
torch 2.13: reduce-scatter 6 ms and 2 ms against 27 ms, all-gather 6 ms against 12 ms.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.parallel.group import Group, record_collective, start_receive, start_send, track_work


@dataclass(slots=True)
class PendingMessages:
    """Messages in flight. After `wait` their targets may be read and their sources written."""

    started: list[dist.Work]

    def wait(self) -> None:
        """Wait until all messages are complete; call it once."""
        for work in self.started:
            work.wait()
        self.started.clear()


@dataclass(slots=True)
class PendingReduceScatter:
    """Reduce-scatter of one bucket that has been started; `wait` returns this rank's slice."""

    works: PendingMessages
    slices: Tensor
    """The bucket as [ranks, numel of a slice]; this rank's slice becomes the sum."""

    received: Tensor | None
    """The other ranks' terms of this rank's slice, [ranks, numel]; None if the library has summed
    them."""

    rank: int

    def wait(self) -> Tensor:
        """Return this rank's slice of the sum, in the memory of the bucket. Ranks are added in rank
        order, whatever the bucket."""
        self.works.wait()
        local_slice = self.slices[self.rank]
        if self.received is None:
            return local_slice
        return _add_in_order_(
            local_slice, self.received[: self.rank], self.received[self.rank + 1 :]
        )


def start_bucket_reduce_scatter(
    bucket: Tensor, group: Group, *, tag: int, dtype: torch.dtype | None = None
) -> PendingReduceScatter:
    """Start a reduce-scatter of `bucket` over `group`; each rank gets the sum of its slice, the
    `rank`-th of equal ones.

    The bucket must not be used until `wait`; after that only this rank's slice is valid. `dtype`:
    dtype of the messages, if not the bucket's; received values are added in the bucket's dtype.
    `tag`: equal on all ranks, and different from everything else in flight in the group.
    """
    slices = bucket.view(group.size, -1)
    if bucket.device.type == "cpu":
        sent = slices if dtype is None else slices.to(dtype)
        received = torch.empty_like(sent)
        return PendingReduceScatter(
            _exchange(sent, received, group, tag), slices, received, group.rank
        )
    if dtype is None:
        entry = record_collective(group, "reduce_scatter", bucket)
        work = dist.reduce_scatter_tensor(
            slices[group.rank], bucket, group=group.handle, async_op=True
        )
        return PendingReduceScatter(
            PendingMessages([track_work(entry, work)]), slices, None, group.rank
        )
    sent = bucket.to(dtype)
    received = torch.empty_like(sent)
    entry = record_collective(group, "all_to_all", sent)
    work = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
    return PendingReduceScatter(
        PendingMessages([track_work(entry, work)]),
        slices,
        received.view(group.size, -1),
        group.rank,
    )


def start_bucket_all_gather(bucket: Tensor, group: Group, *, tag: int) -> PendingMessages:
    """Start an all-gather into `bucket`; each rank's own slice of it is up to date."""
    slices = bucket.view(group.size, -1)
    if bucket.device.type == "cpu":
        return _exchange(slices[group.rank].expand_as(slices), slices, group, tag)
    entry = record_collective(group, "all_gather", bucket)
    work = dist.all_gather_into_tensor(
        bucket, slices[group.rank], group=group.handle, async_op=True
    )
    return PendingMessages([track_work(entry, work)])


def _exchange(sent: Tensor, received: Tensor, group: Group, tag: int) -> PendingMessages:
    """Send row k of `sent` to rank k and receive its row for this rank as row k of `received`; the
    own row is not copied."""
    works: list[dist.Work] = []
    for distance in range(1, group.size):  # no two ranks send to the same one first
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        works.append(start_receive(received[source], group, source, tag=tag))
        works.append(start_send(sent[to], group, to, tag=tag))
    return PendingMessages(works)


def sum_over_members_(x: Tensor, group: Group, members: Sequence[int]) -> Tensor:
    """Sum `x` in place over some ranks of `group`, given by their indices in it; only these ranks
    call this.

    All of them add in the same order, so that they get the same bits. Of two, the first sends
    before it receives: NCCL processes the messages of a pair in order, and two ranks that both
    received first would deadlock.
    """
    if len(members) == 1:
        return x
    received = {member: torch.empty_like(x) for member in sorted(members) if member != group.rank}
    works: list[dist.Work] = []
    for member, part in received.items():
        pair = [(start_send, x), (start_receive, part)]
        for start, message in pair if group.rank < member else reversed(pair):
            works.append(start(message, group, member))
    PendingMessages(works).wait()
    before = [part for member, part in received.items() if member < group.rank]
    return _add_in_order_(x, before, list(received.values())[len(before) :])


def _add_in_order_(
    local: Tensor, before: Sequence[Tensor] | Tensor, after: Sequence[Tensor] | Tensor
) -> Tensor:
    """Add the lower ranks' tensors, then the local one, then the higher ranks', in place: bitwise
    equal on all ranks."""
    if len(before):
        first = before[0].to(local.dtype)
        for other in before[1:]:
            first.add_(other)
        torch.add(first, local, out=local)
    for other in after:
        local.add_(other)
    return local

"""All-to-all exchange of unequal messages between the ranks of a pipeline stage, with which the
pieces of matrices reach their assigned ranks and the update directions come back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megalith.parallel.group import (
    Group,
    record_collective,
    start_receive,
    start_send,
    track_work,
)

MATRIX_TAG = 1 << 24
"""Tags of the messages start here; other messages over the same group have lower ones."""


@dataclass(slots=True)
class PendingExchange:
    """Exchange in flight; `wait` returns the received elements."""

    works: list[dist.Work]
    sent: Tensor
    """Kept until the messages are sent."""

    received: Tensor

    def wait(self) -> Tensor:
        """Wait for all messages; return the elements of all ranks, in rank order."""
        for work in self.works:
            work.wait()
        self.works.clear()
        return self.received


def start_uneven_all_to_all(
    sent: Tensor, send: Sequence[int], receive: Sequence[int], group: Group, *, number: int
) -> PendingExchange:
    """Start sending `send[k]` elements of `sent` to each rank k, and receiving `receive[k]`
    elements from it; collective over `group`, also for a rank without elements.

    sent: [sum(send)], in rank order; it must not be written to before `wait`. `number`: equal on
    all ranks, and different from other exchanges in flight in the group. On CPUs ranks send to each
    other directly, because gloo's all-to-all blocks the calling thread; empty messages are left
    out. Other devices use one collective.
    """
    received = sent.new_empty(sum(receive))
    if group.size == 1:
        received.copy_(sent)
        return PendingExchange([], sent, received)
    if sent.device.type == "cpu":
        return PendingExchange(
            _start_messages(sent.split(list(send)), received.split(list(receive)), group, number),
            sent,
            received,
        )
    entry = record_collective(group, "all_to_all", sent, rows=(send, receive))
    work = dist.all_to_all_single(
        received, sent, list(receive), list(send), group=group.handle, async_op=True
    )
    return PendingExchange([track_work(entry, work)], sent, received)


def _start_messages(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: Group, number: int
) -> list[dist.Work]:
    """Start a message to and from every other rank that has elements; copy the own part."""
    received[group.rank].copy_(sent[group.rank])
    works: list[dist.Work] = []
    tag = MATRIX_TAG + number
    for distance in range(1, group.size):  # no two ranks send to the same one first
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        if received[source].numel():
            works.append(start_receive(received[source], group, source, tag=tag))
        if sent[to].numel():
            works.append(start_send(sent[to], group, to, tag=tag))
    return works

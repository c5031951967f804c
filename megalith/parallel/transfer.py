"""Moves data between ranks: weights as planned by `plan/transfer`, by copies on a rank and one
message at a time between two ranks; and bytes, in messages of bounded size."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megalith.parallel.group import Group, start_receive, start_send
from megalith.plan.shards import Box
from megalith.plan.shared_reads import SharedRead
from megalith.plan.transfer import WeightTransfer

TRANSFER_TAG = 1 << 21
"""Tag of the messages, which other messages over the same group do not have."""


@torch.no_grad()
def execute_transfers(
    transfers: Sequence[WeightTransfer],
    sources: Mapping[str, Sequence[Tensor]],
    targets: Mapping[str, Sequence[Tensor]],
    dtypes: Mapping[str, torch.dtype],
    group: Group,
) -> None:
    """Write the planned boxes into `targets`, in place. All ranks of `group` execute the same plan.

    sources, targets: the boxes that this rank holds and wants, by parameter, in the order of the
    plan; dtypes: in which parameters are sent, that of the senders. A rank takes part in one
    message at a time, so beside the weights it needs at most the memory of one message, which is
    at most a parameter.
    """
    for name, transfer in transfers:
        if transfer.sender == group.rank:
            source = _select(sources[name][transfer.source_index], transfer.source)
            if transfer.receiver == group.rank:
                _select(targets[name][transfer.target_index], transfer.target).copy_(source)
            else:
                _send(source, group, transfer.receiver)
        elif transfer.receiver == group.rank:
            target = _select(targets[name][transfer.target_index], transfer.target)
            _receive(target, dtypes[name], group, transfer.sender)


def _send(source: Tensor, group: Group, receiver: int) -> None:
    """Send a tensor, and free its contiguous copy."""
    part = source.contiguous()
    start_send(part, group, receiver, tag=TRANSFER_TAG).wait()


def _receive(target: Tensor, dtype: torch.dtype, group: Group, sender: int) -> None:
    """Receive a tensor in the dtype of the sender, and free the buffer."""
    buffer = torch.empty(target.shape, dtype=dtype, device=target.device)
    start_receive(buffer, group, sender, tag=TRANSFER_TAG).wait()
    target.copy_(buffer)


def _select(values: Tensor, box: Box) -> Tensor:
    """Return the view of a box in coordinates of the tensor."""
    return values[tuple(slice(*span) for span in box)]


SHARED_BOX_TAG = 1 << 23
"""Tag of the messages of shared boxes."""


def exchange_shared_boxes(
    reads: Sequence[SharedRead], values: Mapping[int, Tensor], group: Group
) -> None:
    """Send the boxes that this rank has read, and receive those that others have read, in place.
    Collective over `group`.

    values: host tensors by number of the box: those that this rank sends and receives.
    """
    work = []
    for read in reads:
        if group.rank == read.reader:
            message = _as_bytes(values[read.box])
            work += [
                start_send(message, group, receiver, tag=SHARED_BOX_TAG)
                for receiver in read.receivers
            ]
        elif group.rank in read.receivers:
            buffer = _as_bytes(values[read.box])
            work.append(start_receive(buffer, group, read.reader, tag=SHARED_BOX_TAG))
    for each in work:
        each.wait()


def _as_bytes(values: Tensor) -> Tensor:
    """Return the elements as uint8 [nbytes]; a view if they are contiguous."""
    return values.contiguous().view(-1).view(torch.uint8)


# --- bytes, in messages of bounded size

BYTES_TAG = 1 << 22
"""Tag of the messages of bytes."""

MESSAGE_NBYTES = 16 * 2**20
"""Largest message, and so the memory of a transfer (heuristic: long enough that the latency of a
message does not matter)."""

ReadBytes = Callable[[int, int], bytes | memoryview]
"""Returns the bytes [start, stop) of what is sent."""


def exchange_bytes(
    read: ReadBytes,
    num_sent: int,
    write: Callable[[memoryview], None],
    num_received: int,
    group: Group,
    *,
    to: int,
    source: int,
    device: torch.device,
) -> None:
    """Send `num_sent` bytes to rank number `to` while receiving `num_received` from rank number
    `source`.

    `device`: of the messages, as the backend of the group requires. Ranks whose `to` and `source`
    form rings may call this together.
    """
    for start in range(0, max(num_sent, num_received), MESSAGE_NBYTES):
        work, buffer = [], None
        if start < num_received:
            nbytes = min(MESSAGE_NBYTES, num_received - start)
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
            work.append(start_receive(buffer, group, source, tag=BYTES_TAG))
        if start < num_sent:
            data = read(start, min(start + MESSAGE_NBYTES, num_sent))
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
            work.append(start_send(message, group, to, tag=BYTES_TAG))
        for each in work:
            each.wait()
        if buffer is not None:
            write(buffer.cpu().numpy().data)


def send_bytes(data: bytes | memoryview, group: Group, to: int, *, device: torch.device) -> None:
    """Send bytes to rank number `to`, which calls `receive_bytes`."""
    exchange_bytes(
        lambda start, stop: data[start:stop],
        len(data),
        lambda _: None,
        0,
        group,
        to=to,
        source=to,
        device=device,
    )


def receive_bytes(nbytes: int, group: Group, source: int, *, device: torch.device) -> memoryview:
    """Receive bytes that rank number `source` sends by `send_bytes`."""
    received = bytearray()
    exchange_bytes(
        lambda _start, _stop: b"",
        0,
        received.extend,
        nbytes,
        group,
        to=source,
        source=source,
        device=device,
    )
    return memoryview(received)

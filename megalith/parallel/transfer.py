"""Moves weights between ranks as planned by `plan/transfer`: copies on a rank, and one message at a
time between two ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.parallel.group import Group, start_receive, start_send
from megalith.plan.shards import Box
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

"""Faulty replacement functions for pipeline stages and their messages; see
`verify/faults/plant.py`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.cross_attention import CrossLayerAttention
from megalith.nn.mtp import MTPBlock, MTPInputs, MTPLayer
from megalith.parallel import grad_sync
from megalith.parallel.bucket_comm import sum_over_members_
from megalith.parallel.group import Group
from megalith.parallel.p2p import StageLink, StageMessage, Tensors
from megalith.parallel.pipeline import Chunk, Pipeline
from megalith.parallel.weight_grad_store import WeightGradStore
from megalith.plan.schedule import Schedule
from megalith.testing.inject import patched


def other_microbatch(self: StageLink, message: StageMessage, tensors: Tensors, target: int) -> None:
    """Swap the forward messages of two microbatches."""
    other = message.microbatch ^ 1
    swapped = message.direction == "forward" and other < self.num_microbatches
    ORIGINAL_SEND(self, message._replace(microbatch=other) if swapped else message, tensors, target)


def other_chunk(
    self: Pipeline, schedule: Schedule, chunks: Sequence[Chunk], boundary: Any = None
) -> None:
    """Swap the second and third model chunk of the first rank."""
    run = [chunks[0], chunks[2], chunks[1]] if self.rank == 0 and len(chunks) == 3 else chunks
    ORIGINAL_RUN(self, schedule, run, boundary)


def never_added(self: WeightGradStore, microbatch: int) -> None:
    """Discard deferred weight gradients."""
    self._deferred.pop(microbatch)


def gradient_of_memory_stays(
    self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """Send zeros as the gradients of everything but the residual stream."""
    if message.direction == "backward":
        tensors = (*tensors[:1], *(torch.zeros_like(other) for other in tensors[1:]))
    ORIGINAL_SEND(self, message, tensors, target)


def stale_memory() -> Callable[[StageLink, StageMessage, Tensors, int], None]:
    """Return a send function that sends the cross-layer source of the previous microbatch."""
    sources: list[Tensors] = []

    def send(self: StageLink, message: StageMessage, tensors: Tensors, target: int) -> None:
        if message.direction == "forward":
            sources.append(tensors[1:])
            tensors = (*tensors[:1], *sources[-2:][0])
        ORIGINAL_SEND(self, message, tensors, target)

    return send


def memory_of_later_tokens(
    self: CrossLayerAttention, x: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs
) -> Tensor:
    """Run cross-layer attention without the causal mask."""
    self.scores = replace(self.scores, causal=False)
    return ORIGINAL_ATTEND(self, x, k, v, inputs)


def skip_middle_replica(x: Tensor, group: Group, members: Sequence[int]) -> Tensor:
    """Sum the gradient of a shared table over the first and last of its stages only."""
    ends = [member for member in members if member in (min(members), max(members))]
    return ORIGINAL_SUM(x, group, ends if group.rank in ends else [group.rank])


def depths_in_other_order(
    self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """Send the states after the residual stream in reverse order."""
    if message.direction == "forward":
        tensors = (*tensors[:1], *reversed(tensors[1:]))
    ORIGINAL_SEND(self, message, tensors, target)


def before_their_norms(
    self: MTPBlock, x: Tensor, mtp_inputs: MTPInputs, inputs: LayerInputs
) -> tuple[Tensor, ...]:
    """Return the hidden states of MTP layers before their norms."""
    states: list[Tensor] = []
    for prediction, (ids, _) in zip(self.layers, mtp_inputs, strict=True):
        assert isinstance(prediction, MTPLayer)
        with watched_inputs(prediction.norm, states):
            x = prediction(x, ids, inputs)
    return tuple(states)


@contextmanager
def watched_inputs(module: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    """Record the inputs of a module."""
    handle = module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        yield
    finally:
        handle.remove()


ORIGINAL_SEND, ORIGINAL_RUN, ORIGINAL_ATTEND = (
    StageLink.send,
    Pipeline.run,
    CrossLayerAttention.attend,
)
ORIGINAL_SUM = sum_over_members_

OWN_STAGE: tuple[tuple[str, str, Callable[[], AbstractContextManager[None]]], ...] = (
    (
        "mtp_copy_not_summed",
        "The gradient of the embedding copy on the MTP stage is not summed.",
        lambda: patched(grad_sync, "sum_over_members_", skip_middle_replica),
    ),
    (
        "depths_in_other_order",
        "The loss receives the hidden states of MTP layers in reverse order.",
        lambda: patched(StageLink, "send", depths_in_other_order),
    ),
    (
        "depths_gradients_kept",
        "Gradients of the hidden states of MTP layers are not sent to their stage.",
        lambda: patched(StageLink, "send", gradient_of_memory_stays),
    ),
    (
        "depths_before_their_norms",
        "The loss receives the hidden states of MTP layers before their norms.",
        lambda: patched(MTPBlock, "states", before_their_norms),
    ),
)
"""(name, mistake, context) of faults with MTP layers on a separate stage; float64 detects all of
them."""

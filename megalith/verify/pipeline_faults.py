"""What faults between stages, and in what they hand on, put in place of the right functions; see
`verify/faults.py`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.kernels.rebuilt import LayerInput
from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.cross_attention import CrossLayerAttention
from megalith.nn.mtp import MTPBlock, MTPInputs, MTPLayer
from megalith.parallel import engine
from megalith.parallel.group import Group
from megalith.parallel.link import StageLink, StageMessage, Tensors
from megalith.parallel.pipeline import Chunk, Pipeline
from megalith.parallel.postpone import WeightGradStore
from megalith.parallel.slices import sum_over_members_
from megalith.plan.schedule import Schedule
from megalith.testing.inject import replaced


def other_microbatch(self: StageLink, message: StageMessage, tensors: Tensors, target: int) -> None:
    """The messages of two microbatches change places on their way forward."""
    other = message.microbatch ^ 1
    swapped = message.direction == "forward" and other < self.num_microbatches
    ORIGINAL_SEND(self, message._replace(microbatch=other) if swapped else message, tensors, target)


def other_chunk(
    self: Pipeline, schedule: Schedule, chunks: Sequence[Chunk], boundary: Any = None
) -> None:
    """The first rank runs its second chunk where its third is due, and the other way round."""
    run = [chunks[0], chunks[2], chunks[1]] if self.rank == 0 and len(chunks) == 3 else chunks
    ORIGINAL_RUN(self, schedule, run, boundary)


def never_added(self: WeightGradStore, microbatch: int) -> None:
    """Weight gradients that were put aside are forgotten."""
    self._deferred.pop(microbatch)


def gradient_of_memory_stays(
    self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """Of what goes back over a border, only the gradient of the residual stream says something."""
    if message.direction == "backward":
        tensors = (*tensors[:1], *(torch.zeros_like(other) for other in tensors[1:]))
    ORIGINAL_SEND(self, message, tensors, target)


def stale_memory() -> Callable[[StageLink, StageMessage, Tensors, int], None]:
    """A way to send with which a microbatch's hidden states go over a border with the memory of the
    one before."""
    kept: list[Tensors] = []

    def send(self: StageLink, message: StageMessage, tensors: Tensors, target: int) -> None:
        if message.direction == "forward":
            kept.append(tensors[1:])
            tensors = (*tensors[:1], *kept[-2:][0])
        ORIGINAL_SEND(self, message, tensors, target)

    return send


def memory_of_later_tokens(
    self: CrossLayerAttention, x: LayerInput, k: Tensor, v: Tensor, tokens: PackedSeqParams
) -> Tensor:
    """Nothing is hidden from a token that looks back."""
    self.scores = replace(self.scores, causal=False)
    return ORIGINAL_ATTEND(self, x, k, v, tokens)


def middle_holder_left_out(x: Tensor, group: Group, members: Sequence[int]) -> Tensor:
    """Of the stages that hold a table only the first and the last add up its gradient."""
    ends = [member for member in members if member in (min(members), max(members))]
    return ORIGINAL_SUM(x, group, ends if group.rank in ends else [group.rank])


def depths_in_other_order(
    self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """What goes onward beside the residual stream comes in the other order."""
    if message.direction == "forward":
        tensors = (*tensors[:1], *reversed(tensors[1:]))
    ORIGINAL_SEND(self, message, tensors, target)


def before_their_norms(
    self: MTPBlock, x: Tensor, mtp_inputs: MTPInputs, tokens: PackedSeqParams
) -> tuple[Tensor, ...]:
    """Depths hand on what their norms read."""
    found: list[Tensor] = []
    for prediction, (ids, _) in zip(self.layers, mtp_inputs, strict=True):
        assert isinstance(prediction, MTPLayer)
        with watched_inputs(prediction.norm, found):
            x = prediction(x, ids, tokens)
    return tuple(found)


@contextmanager
def watched_inputs(module: nn.Module, seen: list[Tensor]) -> Iterator[None]:
    """Note what a module reads."""
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
        "The copy of the table on the stage of multi-token predictions is left out of its sum.",
        lambda: replaced(engine, "sum_over_members_", middle_holder_left_out),
    ),
    (
        "depths_in_other_order",
        "The loss gets the hidden states of multi-token predictions in the other order.",
        lambda: replaced(StageLink, "send", depths_in_other_order),
    ),
    (
        "depths_gradients_kept",
        "Gradients of multi-token predictions' hidden states stay with the loss.",
        lambda: replaced(StageLink, "send", gradient_of_memory_stays),
    ),
    (
        "depths_before_their_norms",
        "The loss gets hidden states of multi-token predictions from before their norms.",
        lambda: replaced(MTPBlock, "states", before_their_norms),
    ),
)
"""Name and mistake of what matters with multi-token predictions on a stage of their own, all of
which numbers find."""

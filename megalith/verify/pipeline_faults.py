"""What faults between stages, and in what they hand on, put in place of the right functions; see `verify/faults.py`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalith.kernels.rebuilt import Input
from megalith.kernels.tokens import Tokens
from megalith.nn.cross_attention import LookingBack
from megalith.parallel.link import Link, Message, Tensors
from megalith.parallel.pipeline import Chunk, Pipeline
from megalith.parallel.postpone import Postponed
from megalith.plan.schedule import Schedule


def other_microbatch(self: Link, message: Message, tensors: Tensors, target: int) -> None:
    """The messages of two microbatches change places on their way forward."""
    other = message.microbatch ^ 1
    swapped = message.direction == "forward" and other < self.num_microbatches
    ORIGINAL_SEND(self, message._replace(microbatch=other) if swapped else message, tensors, target)


def other_chunk(self: Pipeline, schedule: Schedule, chunks: Sequence[Chunk], boundary: Any = None) -> None:
    """The first rank runs its second chunk where its third is due, and the other way round."""
    run = [chunks[0], chunks[2], chunks[1]] if self.rank == 0 and len(chunks) == 3 else chunks
    ORIGINAL_RUN(self, schedule, run, boundary)


def never_added(self: Postponed, microbatch: int) -> None:
    """Weight gradients that were put aside are forgotten."""
    self._aside.pop(microbatch)


def gradient_of_memory_stays(self: Link, message: Message, tensors: Tensors, target: int) -> None:
    """Of what goes back over a border, only the gradient of the residual stream says something."""
    if message.direction == "backward":
        tensors = (*tensors[:1], *(torch.zeros_like(other) for other in tensors[1:]))
    ORIGINAL_SEND(self, message, tensors, target)


def stale_memory() -> Callable[[Link, Message, Tensors, int], None]:
    """A way to send with which a microbatch's hidden states go over a border with the memory of the one before."""
    kept: list[Tensors] = []

    def send(self: Link, message: Message, tensors: Tensors, target: int) -> None:
        if message.direction == "forward":
            kept.append(tensors[1:])
            tensors = (*tensors[:1], *kept[-2:][0])
        ORIGINAL_SEND(self, message, tensors, target)

    return send


def memory_of_later_tokens(self: LookingBack, x: Input, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
    """Nothing is hidden from a token that looks back."""
    self.scores = replace(self.scores, causal=False)
    return ORIGINAL_ATTEND(self, x, k, v, tokens)


ORIGINAL_SEND, ORIGINAL_RUN, ORIGINAL_ATTEND = Link.send, Pipeline.run, LookingBack.attend

"""What faults in attention across ranks put in place of the right functions; see
`verify/faults.py`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.kernels.scores import Scores
from megalith.kernels.span_attention import Result, attend, nothing_found
from megalith.kernels.tokens import Context
from megalith.kernels.visible import VisiblePairs
from megalith.parallel import context as context_parallel
from megalith.parallel.context import seen_of_groups
from megalith.parallel.group import Group
from megalith.plan.context import KeySpans, Numbers, plan_spans
from megalith.testing.inject import replaced


def heads_of_the_first_rank(weight: Tensor | None, group: Group) -> Tensor | None:
    """After an exchange of heads, every rank takes what was learned for those of the first."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., 0, :]


def nothing_found_without_the_extra_score(
    q: Tensor, width: int, sinks: Tensor | None = None, *, off_by_one: bool = False
) -> Result:
    """A ring begins as if only keys took part in softmax."""
    return nothing_found(q, width, sinks)


def one_document_across_ranks(
    queries: Numbers, keys: Numbers, starts: Numbers, **others: Any
) -> KeySpans:
    """Documents begin with the row where keys are of other ranks. `others`: as `plan_spans` has
    them."""
    own = np.array_equal(queries, keys)
    return plan_spans(queries, keys, starts if own else np.zeros_like(starts), **others)


def chunks_of_rows(queries: Numbers, keys: Numbers, starts: Numbers, **others: Any) -> KeySpans:
    """Chunks are counted from the first token of all documents. `others`: as `plan_spans` has
    them."""
    seen, size = plan_spans(queries, keys, starts, **others), others["window"]
    return (
        plan_spans(queries, keys, np.maximum(starts, np.arange(len(starts)) // size * size))
        if size
        else seen
    )


def rows_of_the_first_rank(context: Context, near: int) -> list[VisiblePairs] | None:
    """Masks let see what they let the first rank's tokens see."""
    seen = seen_of_groups(context, near)
    first = context.numbers_of_groups(near)[0]
    return (
        None if seen is None else [VisiblePairs(pairs.visible, first, pairs.keys) for pairs in seen]
    )


def known_to_the_first(context: Context, near: int) -> list[VisiblePairs] | None:
    """Masks hide something on the first rank alone."""
    return seen_of_groups(context, near) if context.rank == 0 else None


class SinksInEveryStep:
    """A ring whose every step lets the sinks take part in softmax once more."""

    def __init__(self) -> None:
        self.first = True
        self.sinks = torch.empty(0)

    def nothing_found(
        self, q: Tensor, width: int, sinks: Tensor | None = None, **others: bool
    ) -> Result:
        """The result before the first step of the ring."""
        result = nothing_found(q, width, sinks, **others)
        self.first, self.sinks = True, result.lse.clone()
        return result

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: KeySpans,
        result: Result,
        scores: Scores,
        *pairs: Any,
    ) -> None:
        """Add one step of the ring to the result, and the sinks again."""
        attend(q, k, v, spans, result, scores, *pairs)
        if not self.first:
            more = torch.logaddexp(result.lse, self.sinks)
            result.out.mul_((result.lse - more).exp_().unsqueeze(-1))
            result.lse.copy_(more)
        self.first = False


@contextmanager
def sinks_in_every_step() -> Iterator[None]:
    """Count the attention sinks once for each step of a ring."""
    steps = SinksInEveryStep()
    with replaced(context_parallel, "nothing_found", steps.nothing_found):
        with replaced(context_parallel, "attend", steps.attend):
            yield

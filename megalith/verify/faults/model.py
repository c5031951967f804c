"""Faulty replacement functions for context-parallel attention, frozen parameters, parameter groups
and the loss; see `verify/faults/plant.py`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.config.lora import LoraConfig
from megalith.kernels.attention.mask import PairMask
from megalith.kernels.attention.scores import Scores
from megalith.kernels.attention.split_kv import (
    PartialAttention,
    attend,
    init_attention_result,
)
from megalith.kernels.packed import ContextShard
from megalith.nn import lora
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import OptimizerSlot, SlotGroup, group_by_rates
from megalith.parallel import context as context_parallel
from megalith.parallel.context import seen_of_groups
from megalith.parallel.cross_entropy import HeadShard, Softmax, softmax_over_ranks
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.group import Group
from megalith.parallel.tensor import TPComm
from megalith.plan.context import KeySpans, Numbers, plan_spans
from megalith.plan.shards import Shard
from megalith.testing.inject import patched


def heads_of_the_first_rank(weight: Tensor | None, group: Group) -> Tensor | None:
    """After the all-to-all over heads, use the first rank's per-head parameters on every rank."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., 0, :]


def nothing_found_without_the_extra_score(
    q: Tensor, width: int, sinks: Tensor | None = None, *, off_by_one: bool = False
) -> PartialAttention:
    """Start ring attention without the additional softmax score."""
    return init_attention_result(q, width, sinks)


def one_document_across_ranks(
    queries: Numbers, keys: Numbers, starts: Numbers, **others: Any
) -> KeySpans:
    """Ignore document boundaries where the keys belong to another rank. `others`: as in
    `plan_spans`."""
    own = np.array_equal(queries, keys)
    return plan_spans(queries, keys, starts if own else np.zeros_like(starts), **others)


def chunks_of_rows(queries: Numbers, keys: Numbers, starts: Numbers, **others: Any) -> KeySpans:
    """Count attention chunks from the first token of all documents. `others`: as in
    `plan_spans`."""
    seen, size = plan_spans(queries, keys, starts, **others), others["window"]
    return (
        plan_spans(queries, keys, np.maximum(starts, np.arange(len(starts)) // size * size))
        if size
        else seen
    )


def rows_of_the_first_rank(context: ContextShard, near: int) -> list[PairMask] | None:
    """Use the attention-mask rows of the first rank's tokens on every rank."""
    seen = seen_of_groups(context, near)
    first = context.numbers_of_groups(near)[0]
    return None if seen is None else [PairMask(pairs.visible, first, pairs.keys) for pairs in seen]


def known_to_the_first(context: ContextShard, near: int) -> list[PairMask] | None:
    """Apply attention masks on the first rank only."""
    return seen_of_groups(context, near) if context.rank == 0 else None


class SinksInEveryStep:
    """Ring attention in which every step adds the attention sinks to the softmax again."""

    def __init__(self) -> None:
        self.first = True
        self.sinks = torch.empty(0)

    def init_attention_result(
        self, q: Tensor, width: int, sinks: Tensor | None = None, **others: bool
    ) -> PartialAttention:
        """Return the result before the first step of the ring."""
        result = init_attention_result(q, width, sinks, **others)
        self.first, self.sinks = True, result.lse.clone()
        return result

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: KeySpans,
        result: PartialAttention,
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
    """Count the attention sinks once per step of the ring."""
    steps = SinksInEveryStep()
    with patched(context_parallel, "init_attention_result", steps.init_attention_result):
        with patched(context_parallel, "attend", steps.attend):
            yield


# Faulty replacement functions for frozen parameters and parameter groups; see
# `verify/faults/plant.py`.


def decaying_frozen(self: BucketedDataParallel) -> Sequence[ShardedParam]:
    """Shrink frozen weights slightly when the gradient sums of a step are complete."""
    for _, weight in self.frozen:
        weight.mul_(0.999)
    return ORIGINAL_FINISH(self)


def rates_of_slot_before(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Update every slot with the rates of the slot before it in the flat buffer."""
    before = [slots[-1], *slots[:-1]] if slots else []
    moved = [replace(slot, rates=other.rates) for slot, other in zip(slots, before, strict=True)]
    return group_by_rates(moved, gradients, lr=lr, weight_decay=weight_decay, groups=groups)


def whole_gradient(weight: Shard, adapters: LoraConfig, tp_comm: TPComm) -> tuple[Shard, Shard]:
    """Declare the replicated half of an adapter as invariant, as if its gradient were complete."""
    a, b = ORIGINAL_ADAPTER(weight, adapters, tp_comm)
    return replace(a, invariant=frozenset(tp_comm.group.axes)), b


ORIGINAL_FINISH, ORIGINAL_ADAPTER = BucketedDataParallel.finish, lora.column_adapter


# Faulty replacement functions for the loss; see `verify/faults/plant.py`.


class LocalLogsumexp(Softmax):
    """Softmax over the whole vocabulary with a logsumexp over the rank's shard."""

    own: Tensor

    def logsumexp(self) -> Tensor:
        """Return the local logsumexp [c]."""
        return self.own.clone()


def logsumexp_of_own_rows(logits: Tensor, labels: Tensor, head: HeadShard) -> Softmax:
    """Return correct probabilities, with the logsumexp for the z-loss of the rank's vocabulary
    shard."""
    softmax = LocalLogsumexp(*softmax_over_ranks(logits, labels, head))
    softmax.own = torch.logsumexp(logits.to(softmax.total.dtype), -1)
    return softmax

"""Saved activations of an MoE layer for one microbatch, and the number of rows of its experts.

Notation: s tokens of this rank, E experts of which each token uses K, d input features of an expert
(h, or the latent size), f inner features of an expert on this rank, r rows of this rank's experts,
e bytes of an activation, w of a statistic, l of a router logit and weight. With balanced experts r
= s·K·etp.

    router              logits or scores                s·E·w, and s·E·l
                        choices and their weights       s·K·(8 + w)
                        with aux losses                 fractions and factors, s·E·w each
    dispatch            permutation indices             8·(3·s·K + s + 2·E)
    experts             input rows                      r·d·e
                        output of gate and up           2·r·f·e
                        weight of each row              r·l
    latent, shared      input of `widen`; shared experts as an MLP, with a gate s·h·e more

The output of the activation is not saved: backward recomputes it from its input. Neither are the
input rows if one rank has all experts: they are gathered again from the tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import DispatcherName
from megalith.plan.parameters import ExpertPart


class SavedActivation(NamedTuple):
    """One tensor that is saved for backward."""

    region: str
    """The submodule of the MoE layer; "order": tensors that a kernel keeps outside of autograd."""

    what: str
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of one MoE layer on one rank."""

    model: ModelConfig
    moe: MoEConfig
    tokens: int
    """s: tokens of the microbatch that this rank routes."""

    sharing: int
    """Number of ranks that the tokens of a microbatch are split over."""

    experts: ExpertPart
    dispatcher: DispatcherName = "alltoall"
    element: int
    """e."""

    wide: int
    """w."""

    crowded: bool = False
    """Whether as many tokens as possible choose the experts of this rank."""

    @property
    def features(self) -> int:
        """d: input features of an expert."""
        return self.moe.latent_size or self.model.hidden_size

    @property
    def inner(self) -> int:
        """f: inner features of an expert on this rank."""
        return self.experts.features(self.moe.ffn_hidden_size)

    @property
    def ranks(self) -> int:
        """Number of ranks that hold one copy of all experts (ep · etp)."""
        return self.experts.ep * self.experts.etp

    @property
    def logit(self) -> int:
        """l: bytes of a router logit."""
        return {"fp32": self.wide, "fp64": 8, "model": self.element}[self.moe.router.dtype]

    @property
    def score(self) -> int:
        """Bytes of a score, which is at least fp32."""
        return max(self.logit, 4)

    @property
    def rows_stay(self) -> bool:
        """Whether backward gathers the expert rows again from this rank's tokens instead of saving
        them."""
        return self.ranks == 1 and not self.moe.apply_router_weight_on_input

    @property
    def limit(self) -> int | None:
        """Expert capacity: the most tokens of a microbatch that an expert computes; None:
        dropless."""
        if self.moe.capacity.factor is None:
            return None
        num_tokens, factor = self.tokens * self.sharing, Fraction(str(self.moe.capacity.factor))
        return min(num_tokens, ceil(factor * num_tokens * self.moe.top_k / self.moe.num_experts))

    @property
    def room(self) -> int | None:
        """Rows of each expert per rank with padding to the capacity factor; None: as many as tokens
        chose it."""
        return (
            None
            if self.limit is None or not self.moe.capacity.pad
            else min(self.tokens, self.limit)
        )

    @property
    def sent(self) -> int:
        """Rows that this rank dispatches, over all experts."""
        return (
            self.tokens * self.moe.top_k if self.room is None else self.moe.num_experts * self.room
        )

    @property
    def rows(self) -> int:
        """r: rows that the local experts compute.

        If `crowded`, every token has a row for each of its choices that can be a local expert.
        """
        all_tokens, local_experts = (
            self.tokens * self.ranks,
            self.moe.num_experts // self.experts.ep,
        )
        if (room := self.room) is not None:
            return local_experts * room * self.ranks
        if not self.crowded:
            return all_tokens * self.moe.top_k // self.experts.ep
        most, each = all_tokens * min(self.moe.top_k, local_experts), self.limit
        if each is None or self.ranks < self.sharing:
            return most
        return min(most, local_experts * each * self.ranks // self.sharing)


def mixture_tensors(m: Mixture) -> Iterator[SavedActivation]:
    """Yield the saved activations of one layer, without its input and the shared experts."""
    yield from _router(m)
    if m.moe.capacity.factor is not None:
        choices = m.tokens * m.moe.top_k
        yield SavedActivation("router", "choices that were taken", choices, choices)
    yield from _losses(m)
    yield from _order(m)
    yield from _experts(m)
    if m.moe.latent_size is not None:
        numel = m.tokens * m.features
        yield SavedActivation("widen", "input", numel, numel * m.element)


def _router(m: Mixture) -> Iterator[SavedActivation]:
    """Yield the router's saved logits or scores, choices and weights."""
    router, every, chosen = m.moe.router, m.tokens * m.moe.num_experts, m.tokens * m.moe.top_k
    if router.jitter > 0:
        numel = m.tokens * m.model.hidden_size
        yield SavedActivation("router", "jitter", numel, numel * m.element)
        yield SavedActivation("router.gate", "input with jitter", numel, numel * m.element)
    yield SavedActivation("router", "choices", chosen, 8 * chosen)
    if router.norm_topk_prob and router.score == "softmax":
        yield SavedActivation("router", "logits", every, every * m.logit)
        yield SavedActivation("router", "weights", chosen, chosen * m.score)
        return
    yield SavedActivation("router", "scores", every, every * m.score)
    if router.score == "sqrt_softplus":
        yield SavedActivation("router", "logits", every, every * m.score)
    if router.norm_topk_prob:
        yield SavedActivation("router", "scores that were chosen", chosen, chosen * m.score)
        yield SavedActivation("router", "their sums", m.tokens, m.tokens * m.score)
    elif m.moe.capacity.factor is not None:
        yield SavedActivation("router", "weights", chosen, chosen * m.logit)


def _losses(m: Mixture) -> Iterator[SavedActivation]:
    """Yield the saved activations of the aux losses."""
    losses, every = m.moe.aux_loss, m.tokens * m.moe.num_experts
    of_shares = [losses.sequence_coeff, losses.batch_coeff, losses.global_batch_coeff]
    score = m.moe.router.score
    single, softplus = score != "softmax", score == "sqrt_softplus"
    keeps_logits = m.logit == m.score and (softplus or (m.moe.router.norm_topk_prob and not single))
    if not keeps_logits and ((single and any(of_shares)) or losses.z_loss_coeff):
        yield SavedActivation("router", "logits, for losses", every, every * m.score)
    if any(of_shares):
        yield SavedActivation("router", "shares", every, every * m.score)
        if score == "sigmoid":
            yield SavedActivation("router", "logs of sigmoids", every, every * m.score)
    for loss in (losses.sequence_coeff, losses.batch_coeff):
        if loss:
            yield SavedActivation("router", "factors", every, every * m.score)
    if losses.global_batch_coeff:
        yield SavedActivation(
            "router", "factors of the step", m.moe.num_experts, m.moe.num_experts * m.score
        )
    if losses.z_loss_coeff:
        yield SavedActivation("router", "sizes of logits", m.tokens, m.tokens * m.score)
        yield SavedActivation("router", "number of tokens", 1, 8)


def _order(m: Mixture) -> Iterator[SavedActivation]:
    """Yield the int64 permutation indices of the tokens that this rank sorts by expert."""
    if m.room is not None:
        yield from _padded_order(m, m.moe.num_experts * m.room)
        return
    gathers = m.dispatcher == "allgather" and m.ranks > 1
    tokens = m.tokens * (m.ranks if gathers else 1)
    rows, local_experts = (
        tokens * m.moe.top_k,
        m.moe.num_experts // (m.experts.ep if gathers else 1),
    )
    yield SavedActivation("", "choice of each row", rows, 8 * rows)
    sent = m.rows if gathers else rows
    ends = 0 if m.ranks > 1 and not gathers else 4 * local_experts
    yield SavedActivation("order", "token of each row", sent, 8 * sent)
    yield SavedActivation("order", "rows of each token", sent, 8 * sent)
    yield SavedActivation(
        "order",
        "first of them, and counts",
        tokens + local_experts,
        8 * (tokens + local_experts) + ends,
    )


def _padded_order(m: Mixture, rows: int) -> Iterator[SavedActivation]:
    """Yield the permutation indices if all experts have the same padded number of rows."""
    choices, others = m.tokens * m.moe.top_k, m.tokens + m.moe.num_experts
    yield SavedActivation("", "choice of each row", rows, 8 * rows)
    yield SavedActivation("", "rows that are filler", rows, rows)
    yield SavedActivation("order", "token of each row", rows, 8 * rows)
    yield SavedActivation(
        "order", "rows of each token, and which are missing", choices, 9 * choices
    )
    yield SavedActivation("order", "first of them, and counts", others, 8 * others)


def _experts(m: Mixture) -> Iterator[SavedActivation]:
    """Yield the saved input rows, the output of gate and up, and the row weights."""
    numel, wide = m.rows * m.features, m.rows * m.inner * (2 if m.model.gated else 1)
    if m.rows_stay:
        tokens = m.tokens * m.features if m.moe.latent_size is not None else 0
        yield from (
            [SavedActivation("experts", "tokens of rows", tokens, tokens * m.element)]
            if tokens
            else []
        )
    else:
        yield SavedActivation("experts", "rows", numel, numel * m.element)
    yield SavedActivation(
        "experts", "gate and up" if m.model.gated else "up", wide, wide * m.element
    )
    yield SavedActivation("experts", "weights", m.rows, m.rows * m.logit)
    if m.moe.apply_router_weight_on_input:
        yield SavedActivation("experts", "rows before their weights", numel, numel * m.element)
        yield SavedActivation("experts", "weights of inputs", m.rows, m.rows * m.element)

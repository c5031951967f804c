"""What a mixture of experts keeps of one microbatch between forward and backward, and how many rows
its experts have.

Notation: s tokens of this rank, E experts of which each token goes to K, d features that experts
read (h, or those of the latent), f inner features of an expert on this rank, r rows that this
rank's experts work on, e bytes of a feature, w of a statistic, l of a logit and of a weight. When
all experts are equally busy r = s·K·etp.

    the router          its logits or scores            s·E·w, and s·E·l
                        the choices, and their weights  s·K·(8 + w)
                        with losses of balance          shares and factors, s·E·w each
    on the way          which row is whose              8·(3·s·K + s + 2·E)
    the experts         their rows                      r·d·e
                        what up gave: gate and up       2·r·f·e
                        the rows' weights               r·l
    latent, shared      what `widen` reads; as an MLP, and with a gate s·h·e more

The activation is never kept: its input is, and backward computes it again. Nor are rows where one
rank has all experts: they are gathered once more from its tokens.
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
    """One tensor that is kept."""

    region: str
    """The module inside the mixture; "order": what operations keep without telling autograd."""

    what: str
    numel: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One layer's experts on one rank."""

    model: ModelConfig
    moe: MoEConfig
    tokens: int
    """s: of the microbatch, that this rank sends to experts."""

    sharing: int
    """Ranks that share the tokens of a microbatch."""

    experts: ExpertPart
    dispatcher: DispatcherName = "alltoall"
    element: int
    """e."""

    wide: int
    """w."""

    crowded: bool = False
    """All tokens have chosen the experts of this rank, as far as they can."""

    @property
    def features(self) -> int:
        """d."""
        return self.moe.latent_size or self.model.hidden_size

    @property
    def inner(self) -> int:
        """f."""
        return self.experts.features(self.moe.ffn_hidden_size)

    @property
    def ranks(self) -> int:
        """That together hold every expert once."""
        return self.experts.ep * self.experts.etp

    @property
    def logit(self) -> int:
        """l."""
        return {"fp32": self.wide, "fp64": 8, "model": self.element}[self.moe.router.dtype]

    @property
    def score(self) -> int:
        """Bytes of a score, which is at least fp32."""
        return max(self.logit, 4)

    @property
    def rows_stay(self) -> bool:
        """Whether experts' rows are gathered from this rank's tokens once more in backward, and not
        kept."""
        return self.ranks == 1 and not self.moe.apply_router_weight_on_input

    @property
    def limit(self) -> int | None:
        """PackedSeqParams of a microbatch that an expert takes."""
        if self.moe.capacity.factor is None:
            return None
        together, factor = self.tokens * self.sharing, Fraction(str(self.moe.capacity.factor))
        return min(together, ceil(factor * together * self.moe.top_k / self.moe.num_experts))

    @property
    def room(self) -> int | None:
        """Rows that each expert has of a rank's tokens, whatever they chose; None: as many as chose
        it."""
        return (
            None
            if self.limit is None or not self.moe.capacity.pad
            else min(self.tokens, self.limit)
        )

    @property
    def sent(self) -> int:
        """Rows that this rank's tokens make, for all experts."""
        return (
            self.tokens * self.moe.top_k if self.room is None else self.moe.num_experts * self.room
        )

    @property
    def rows(self) -> int:
        """r.

        Crowded, each of all tokens has a row for each of its choices that can be of this rank's
        experts.
        """
        every, here = self.tokens * self.ranks, self.moe.num_experts // self.experts.ep
        if (room := self.room) is not None:
            return here * room * self.ranks
        if not self.crowded:
            return every * self.moe.top_k // self.experts.ep
        most, each = every * min(self.moe.top_k, here), self.limit
        if each is None or self.ranks < self.sharing:
            return most
        return min(most, here * each * self.ranks // self.sharing)


def mixture_tensors(m: Mixture) -> Iterator[SavedActivation]:
    """All of one layer's, but what its input and the experts for all tokens keep."""
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
    """Logits or scores that weights are made of, and the weights."""
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
    """Of balance."""
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
    """Which row is whose: int64, of the tokens whose choices this rank puts in order."""
    if m.room is not None:
        yield from _padded_order(m, m.moe.num_experts * m.room)
        return
    gathers = m.dispatcher == "allgather" and m.ranks > 1
    tokens = m.tokens * (m.ranks if gathers else 1)
    rows, mine = tokens * m.moe.top_k, m.moe.num_experts // (m.experts.ep if gathers else 1)
    yield SavedActivation("", "choice of each row", rows, 8 * rows)
    sent = m.rows if gathers else rows
    ends = 0 if m.ranks > 1 and not gathers else 4 * mine
    yield SavedActivation("order", "token of each row", sent, 8 * sent)
    yield SavedActivation("order", "rows of each token", sent, 8 * sent)
    yield SavedActivation(
        "order", "first of them, and counts", tokens + mine, 8 * (tokens + mine) + ends
    )


def _padded_order(m: Mixture, rows: int) -> Iterator[SavedActivation]:
    """The same where every expert has as many rows."""
    choices, others = m.tokens * m.moe.top_k, m.tokens + m.moe.num_experts
    yield SavedActivation("", "choice of each row", rows, 8 * rows)
    yield SavedActivation("", "rows that are filler", rows, rows)
    yield SavedActivation("order", "token of each row", rows, 8 * rows)
    yield SavedActivation(
        "order", "rows of each token, and which are missing", choices, 9 * choices
    )
    yield SavedActivation("order", "first of them, and counts", others, 8 * others)


def _experts(m: Mixture) -> Iterator[SavedActivation]:
    """Their rows, what up gave, and what each row counts."""
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

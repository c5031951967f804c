"""Mixture of experts (MoE): router, token dispatch, experts and shared experts.

Notation: s tokens of this rank, E experts of which each token uses K, d input features of an expert
(h, or the latent size), f inner features of an expert on this rank, r rows of this rank's experts,
e bytes of an activation, w of a statistic, l of a router logit and weight. With balanced experts r
= s·K·etp. One layer saves:

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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from math import ceil

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.parallel import DispatcherName
from megalith.errors import did_you_mean
from megalith.plan.layers.base import (
    Exchange,
    ExpertPart,
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerRecompute,
    LayerSetting,
    Message,
    Passes,
    SavedActivation,
    TPMessages,
    hidden_gradient_numel,
)
from megalith.plan.layers.mlp import mlp_parameters, mlp_position, mlp_tensors, num_inner_copies
from megalith.plan.shards import split_evenly

# --- parameters


def _config(branch: LayerBranch) -> MoEConfig:
    moe = branch.model.moe
    assert moe is not None, "only models with `moe` have layers of this kind"
    return moe


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield the router E·h; experts E·3·d·f with a gate, else E·2·d·f, d = latent_size or h; shared
    experts as an MLP."""
    model, moe, h = branch.model, _config(branch), branch.model.hidden_size
    if moe.router.bias:
        yield HeldParameter("moe.router_bias", moe.num_experts)
    if moe.router.expert_bias:
        yield HeldParameter("moe.balancing_bias", moe.num_experts, frozen=True, counts=False)
    if moe.aux_loss.quantile:
        yield HeldParameter("moe.balancing_offset", moe.num_experts, frozen=True, counts=False)
    yield HeldParameter("moe.router", moe.num_experts, h)
    for one in _expert_parameters(model, moe, rank.expert_part):
        yield replace(one, name=f"moe.experts.{one.name}", cut=True, grid="expert")
    if moe.latent_size is not None:
        yield HeldParameter("moe.latent_in", moe.latent_size, h)
        yield HeldParameter("moe.latent_out", h, moe.latent_size)
    if moe.shared_ffn_hidden_size is not None:
        yield from mlp_parameters("moe.shared", model, _shared_features(moe, rank))
        if moe.shared_gate:
            yield HeldParameter("moe.shared_gate", 1, h)


def _shared_features(moe: MoEConfig, rank: LayerRank) -> int:
    """Return the inner features of the shared experts on this rank."""
    return split_evenly(moe.shared_ffn_hidden_size or 0, rank.tp)[rank.rank]


def _expert_parameters(
    model: ModelConfig, moe: MoEConfig, part: ExpertPart
) -> Iterator[HeldParameter]:
    """Yield this rank's part of all experts' matrices, stacked along rows."""
    num_local_experts, inner, d = (
        moe.num_experts // part.ep,
        part.features(moe.ffn_hidden_size),
        moe.latent_size or model.hidden_size,
    )
    up, wide = ("gate_up", 2 * inner) if model.gated else ("up", inner)
    yield HeldParameter(up, num_local_experts * wide, d)
    if moe.biases:
        yield HeldParameter(f"{up}_bias", num_local_experts * wide)
    yield HeldParameter("down", num_local_experts * d, inner)
    if moe.biases:
        yield HeldParameter("down_bias", num_local_experts * d)


def _position(name: str) -> int:
    """Return 2 for the matrices that read the activation or the sum over experts, else 1."""
    return 2 if name.startswith("latent_out") else mlp_position(name)


# --- saved activations


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


def layer_mixture(setting: LayerSetting) -> Mixture:
    """Return the experts of an MoE layer on a rank."""
    assert setting.model.moe is not None, "only models with `moe` have MoE layers"
    return Mixture(
        model=setting.model,
        moe=setting.model.moe,
        tokens=setting.own_tokens,
        sharing=setting.cp * setting.tp,
        experts=setting.rank.expert_part,
        dispatcher=setting.dispatcher,
        element=setting.element,
        wide=setting.wide,
        crowded=setting.crowded,
    )


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


def _has_aux_losses(losses: AuxLossConfig) -> bool:
    """Return whether the router has losses of its own."""
    coefficients = losses.sequence_coeff, losses.batch_coeff, losses.global_batch_coeff
    return max(*coefficients, losses.z_loss_coeff) > 0


def _reads_only_jittered_input(moe: MoEConfig, recomputed: Sequence[str]) -> bool:
    """Return whether the MoE layer reads its input only with router jitter."""
    if "mlp" in recomputed or moe.router.jitter == 0:
        return False
    return moe.latent_size is None and moe.shared_ffn_hidden_size is None


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    moe, mixture = _config(branch), layer_mixture(setting)
    first = "narrow" if moe.latent_size is not None else "router.gate"
    jittered = _reads_only_jittered_input(moe, recomputed) and not mixture.rows_stay
    rows: list[SavedActivation] = []
    if saves_input and not jittered:
        rows.append(setting.hidden("mlp" if "mlp" in recomputed else f"mlp.{first}"))
    if "mlp" in recomputed:
        return rows
    for row in mixture_tensors(mixture):
        rows.append(row._replace(region=f"mlp.{row.region}".rstrip(".")))
    if moe.shared_ffn_hidden_size is None or "shared_experts" in recomputed:
        return rows
    for row in mlp_tensors(setting, _shared_features(moe, setting.rank), recomputed):
        rows.append(row._replace(region=f"mlp.shared.0.{row.region}"))
    if moe.shared_gate:
        own = setting.own_tokens
        rows.append(SavedActivation("mlp.shared.0", "gate", own, own * setting.element))
        rows.append(setting.hidden("mlp.shared.0", "output before the gate"))
    return rows


def _shared_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str]
) -> list[SavedActivation]:
    """Return the mask of padding, if aux losses save it."""
    t = setting.tokens
    if "mlp" in recomputed or not _has_aux_losses(_config(branch).aux_loss):
        return []
    return [SavedActivation("shared", "which tokens count", t, t)]


def _weight_gradient_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return r · (2 d + 3 f) elements of the experts, s · E of the router, and those of the shared
    experts."""
    moe, m, copies = _config(branch), layer_mixture(setting), num_inner_copies(branch.model)
    experts = m.rows * (2 * m.features + copies * m.inner) + m.tokens * moe.num_experts
    shared = copies * _shared_features(moe, setting.rank) * setting.tokens
    return experts + shared + hidden_gradient_numel(branch, setting)


def _backward_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return the elements inside the experts, with their rows twice, before and after sorting, and
    inside the shared experts."""
    moe, m, copies = _config(branch), layer_mixture(setting), num_inner_copies(branch.model)
    shared = copies * _shared_features(moe, setting.rank) * setting.tokens
    return m.rows * (copies * m.inner + 4 * m.features) + shared


# --- communication


def _tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    """Return the messages of the shared experts; the gate follows their sum, and needs it again."""
    moe, x = _config(branch), (branch.model.hidden_size,)
    repeats = not {"mlp", "shared_experts"}.isdisjoint(recomputed)
    if moe.shared_ffn_hidden_size is None:
        return TPMessages()
    return TPMessages(
        inputs=x,
        weight_inputs=x,
        recomputed_inputs=x if repeats else (),
        sums=1,
        recomputed_sums=int(moe.shared_gate and repeats),
        sum_is_last=not moe.shared_gate,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """Dispatch of tokens to experts and combine of their outputs, for balanced experts, and sums of
    routing statistics.

    The rounds of Sinkhorn balancing are not counted: their number depends on the scores.
    """

    moe: MoEConfig
    hidden_size: int
    tokens: int
    """Tokens of a microbatch that one rank routes."""

    rows: int
    """Rows that one rank dispatches, over all experts."""

    num_sequences: int
    """Documents of a microbatch."""

    ep: int
    etp: int
    dispatcher: DispatcherName
    sharing: int
    """Number of ranks that the tokens of a microbatch are split over."""

    dp: int
    element: int
    """Bytes of an activation."""

    weight: int
    """Bytes of a router logit and weight."""

    overlap: bool

    @property
    def row(self) -> int:
        """Bytes of a token as dispatched."""
        return (self.moe.latent_size or self.hidden_size) * self.element

    def repeats(self, recompute: LayerRecompute) -> tuple[bool, bool]:
        """Return whether routing and dispatch are repeated, and the combine: if a later operation
        needs its sum, or the layer saves it for `latent_out`."""
        alone = "mlp" in recompute.modules
        repeated = recompute.whole or alone
        skips_combine = (alone or recompute.ends_span) and self.moe.latent_size is None
        return repeated, repeated and not skips_combine

    def messages(self, passes: Passes) -> Iterator[Message]:
        """Yield dispatch and combine, forward and backward, and the statistics."""
        if self.ep * self.etp > 1:  # dispatchers of other packages count as alltoall
            gathers = self.dispatcher == "allgather"
            yield from (self._allgather if gathers else self._alltoall)(passes)
        yield from self._routing_statistics(passes)
        num_experts, ranks = self.moe.num_experts, self.dp * self.sharing
        if self.moe.router.expert_bias:
            nbytes = 8 * passes.layers * num_experts
            what = "counts of choices, for the expert bias"
            yield Message("dp_cp_tp", what, "all_reduce", ranks, 1, nbytes)
        if self.moe.aux_loss.quantile:
            nbytes = 8 * passes.layers * (num_experts + 1)
            yield Message("dp_cp_tp", "offsets of experts", "all_reduce", ranks, 1, nbytes)

    def _alltoall(self, passes: Passes) -> Iterator[Message]:
        """Yield T·K·(ep - 1)/ep rows per dispatch and combine, their weights, and E counts of every
        rank; with padding to the capacity, E·room rows and no counts."""
        ep, etp, rows = self.ep, self.etp, self.rows
        forwards, backwards = passes.forwards, passes.forward
        dispatches, combines = forwards + backwards, 2 * passes.forward + passes.outputs_recomputed
        exchanged, counts = dispatches + combines, 0 if self.moe.capacity.pad else forwards
        behind = "the other of a pair" if self.overlap else ""
        row, weight, shared = rows * self.row, rows * self.weight, etp * rows * self.row
        shared_weight, count = etp * rows * self.weight, ep * etp * self.moe.num_experts * 8
        what = "rows to experts and back"
        yield Message("ep_etp", "counts of rows", "all_gather", ep * etp, counts, counts * count)
        yield Message("ep", what, "all_to_all", ep, exchanged, exchanged * row, behind)
        what = "weights of rows"
        yield Message("ep", what, "all_to_all", ep, dispatches, dispatches * weight)
        what = "rows, shared"
        yield Message("etp", what, "all_gather", etp, dispatches, dispatches * shared)
        what = "answers, summed"
        yield Message("etp", what, "reduce_scatter", etp, combines, combines * shared)
        what = "weights of rows, shared"
        yield Message("etp", what, "all_gather", etp, forwards, forwards * shared_weight)
        what = "gradients of weights, summed"
        yield Message("etp", what, "reduce_scatter", etp, backwards, backwards * shared_weight)

    def _allgather(self, passes: Passes) -> Iterator[Message]:
        """Yield all tokens to every rank, with their choices and weights; and the reduce-scatter of
        the outputs."""
        ranks, top_k, forwards = self.ep * self.etp, self.moe.top_k, passes.forwards
        gathers, sums = forwards + passes.forward, 2 * passes.forward + passes.outputs_recomputed
        all_tokens = ranks * self.tokens
        row, choices, weights = (
            all_tokens * nbytes for nbytes in (self.row, top_k * 8, top_k * self.weight)
        )
        axis, calls = "ep_etp", passes.forward
        yield Message(axis, "tokens for experts", "all_gather", ranks, gathers, gathers * row)
        yield Message(axis, "answers, summed", "reduce_scatter", ranks, sums, sums * row)
        yield Message(axis, "choices", "all_gather", ranks, forwards, forwards * choices)
        yield Message(axis, "weights", "all_gather", ranks, forwards, forwards * weights)
        what = "gradients of weights, summed"
        yield Message(axis, what, "reduce_scatter", ranks, calls, calls * weights)

    def _routing_statistics(self, passes: Passes) -> Iterator[Message]:
        """Yield the counts for aux losses among ranks that share a microbatch, and of the global
        batch over all ranks, and, once, the choices for token dropping."""
        losses, forwards, sharing = self.moe.aux_loss, passes.forwards, self.sharing
        counts, calls = 8 * self.moe.num_experts, passes.forward
        all_tokens, what = sharing * self.tokens, "counts of choices"
        if _has_aux_losses(losses):
            nbytes = forwards * self.num_sequences * counts
            yield Message("cp_tp", what, "all_reduce", sharing, forwards, nbytes)
        if losses.global_batch_coeff > 0:
            ranks = sharing * self.dp
            yield Message("dp_cp_tp", what, "all_reduce", ranks, forwards, forwards * counts)
        if losses.quantile:
            nbytes = forwards * all_tokens * self.moe.num_experts * self.weight
            yield Message("cp_tp", "logits", "all_gather", sharing, forwards, nbytes)
        if self.moe.capacity.factor is not None:
            choices = calls * all_tokens * self.moe.top_k
            yield Message("cp_tp", "choices", "all_gather", sharing, calls, choices * 8)
            nbytes = choices * self.weight
            yield Message("cp_tp", "weights of choices", "all_gather", sharing, calls, nbytes)


def _exchange(branch: LayerBranch, setting: LayerSetting) -> Exchange:
    m = layer_mixture(setting)
    return ExpertExchange(
        moe=m.moe,
        hidden_size=branch.model.hidden_size,
        tokens=m.tokens,
        rows=m.sent,
        num_sequences=len(setting.lengths),
        ep=m.experts.ep,
        etp=m.experts.etp,
        dispatcher=setting.dispatcher,
        sharing=m.sharing,
        dp=setting.dp,
        element=setting.element,
        weight=m.logit,
        overlap=setting.overlap_experts,
    )


MOE = LayerKind(
    parameters=_parameters,
    saved_tensors=_saved_tensors,
    shared_tensors=_shared_tensors,
    weight_gradient_numel=_weight_gradient_numel,
    backward_numel=_backward_numel,
    tp_messages=_tp_messages,
    exchange=_exchange,
    position=_position,
)


# --- plan the dispatch of tokens to experts: the token dispatchers, and the rows that each rank
# sends to each other rank

Table = Sequence[Sequence[Sequence[int]]]
"""[etp][ep][experts]: rows for each expert, by the source rank."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """Rows that one rank sends and receives in the dispatch to experts."""

    sent: tuple[int, ...]
    """Rows to each rank along ep; experts are assigned to ranks in contiguous blocks."""

    received: tuple[int, ...]
    """From each rank along ep."""

    gathered: tuple[int, ...]
    """Rows that each rank along etp received, which are all-gathered over etp."""

    chunks: tuple[int, ...]
    """Rows in the order in which they are stored after the exchange: by rank along etp, by source
    rank along ep, by expert."""

    counts: tuple[int, ...]
    """Rows of each local expert."""


def plan_exchange(table: Table, *, ep_rank: int, etp_rank: int) -> ExchangePlan:
    """Return the exchange plan of one rank, from the number of rows per expert of all ranks along
    ep and etp.

    >>> plan_exchange([[[5, 1], [2, 3]]], ep_rank=0, etp_rank=0)  # two ranks with an expert each
    ExchangePlan(sent=(5, 1), received=(5, 2), gathered=(7,), chunks=(5, 2), counts=(7,))
    """
    ranks = len(table[0])
    experts_per_rank = len(table[0][0]) // ranks
    local_experts = slice(ep_rank * experts_per_rank, (ep_rank + 1) * experts_per_rank)
    received_rows = [[list(row[local_experts]) for row in rows] for rows in table]
    sent_rows = table[etp_rank][ep_rank]
    chunks = [list(chunk) for chunk in chain.from_iterable(received_rows)]
    return ExchangePlan(
        sent=tuple(
            sum(sent_rows[rank * experts_per_rank : (rank + 1) * experts_per_rank])
            for rank in range(ranks)
        ),
        received=tuple(sum(row) for row in received_rows[etp_rank]),
        gathered=tuple(sum(map(sum, rows)) for rows in received_rows),
        chunks=tuple(chain.from_iterable(chunks)),
        counts=tuple(map(sum, zip(*chunks, strict=True))),
    )


# --- token dispatchers: the built-in ones, and those of installed packages
#
# A package provides a dispatcher as an entry point of the group `megalith.transports`: the entry
# point's name is the value of `parallel.dispatcher`, and its object is a `Transport` of
# parallel/expert.py.

GROUP = "megalith.transports"

BUILT_IN = ("alltoall", "allgather", "reference")
"""Names of the built-in dispatchers, which a package cannot use."""


def installed_transports() -> Mapping[str, EntryPoint]:
    """Return the dispatchers of other packages by name, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def transport_problems(name: str) -> list[str]:
    """Return an error text if no token dispatcher has this name, else an empty list."""
    if name in BUILT_IN:
        return []
    known = (*BUILT_IN, *sorted(installed_transports()))
    if name in known:
        return []
    return [
        f"parallel.dispatcher={name} is not a known token dispatcher."
        f"{did_you_mean(name, known)} Use one of "
        f"{', '.join(known)}, or install the package that provides it."
    ]

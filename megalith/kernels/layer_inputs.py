"""`LayerInputs`: what every layer receives besides its activations; `LayerCache`, `Attend`, and
routing replay."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from megalith.errors import DataError
from megalith.kernels.attention.scores import MaxScores, ScoreRecord, Scores
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.packed import PackedSeqParams

# --- routing replay: record the experts that tokens were routed to, and route them to the same
# experts again, in this or another model with the same layers
#
# Rollouts and training differ by rounding only, but a different expert choice makes that difference
# large. Source: Ma et al. 2025, arXiv:2510.11370.


class RoutingCapture(NamedTuple):
    """Input and output of a router for one microbatch, of the local tokens."""

    layer: str
    """Name prefix of the layer's parameters."""

    microbatch: int
    hidden: Tensor
    """[t, h], before jitter noise."""

    logits: Tensor
    """[t, E], from which experts were chosen."""

    weights: Tensor
    """[t, k], weights of the experts' outputs, best choice first; 0 where the choice was
    dropped."""

    routers: Mapping[str, Tensor]
    """The router's parameters: weight [E, h], and what it adds to logits or scores, [E] each."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """The routing choices of all local routers in the microbatches of a step."""

    choices: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By layer (name prefix of its parameters) and microbatch: int64 [t, k], of the local tokens,
    before token dropping."""

    followed: bool = False
    """Whether routers replay these choices instead of recording theirs."""

    watch: Callable[[RoutingCapture], None] | None = None
    """Callback that receives the input and output of every router, also during recomputation; None:
    no callback."""

    def for_replay(self) -> "RoutingRecord":
        """Return the same choices for replay."""
        return RoutingRecord(self.choices, followed=True)

    def microbatches(self, layer: str) -> Iterator[int]:
        """Yield the microbatches for which a layer has choices."""
        return (number for name, number in self.choices if name == layer)


@dataclass(frozen=True, slots=True)
class RoutingDecisions:
    """Routing decisions of a part of the model that is recomputed in backward; recomputation reuses
    them.

    If recomputed inputs differ by rounding, for example after sums in no fixed order, a tie could
    be decided differently, and backward would look for a token's gradient at an expert that did not
    process it.
    """

    decisions: dict[str, Tensor] = field(default_factory=dict)
    """By layer: int32 [t, k], the expert, or -1 - its number where it dropped the token."""

    def record(self, layer: str, chosen: Tensor, kept: Tensor) -> None:
        """Record the chosen experts [t, k] and those that keep the token after dropping, negative
        elsewhere."""
        self.decisions[layer] = chosen.where(kept >= 0, -1 - chosen).detach().to(torch.int32)

    def chosen(self, layer: str) -> Tensor | None:
        """Return the chosen experts, int64 [t, k], or None if nothing is recorded."""
        decisions = self.decisions.get(layer)
        return (
            None
            if decisions is None
            else decisions.where(decisions >= 0, -1 - decisions).to(torch.int64)
        )

    def kept(self, layer: str) -> Tensor | None:
        """Return which choices are kept after token dropping, bool [t, k], or None if nothing is
        recorded."""
        decisions = self.decisions.get(layer)
        return None if decisions is None else decisions >= 0


class MicrobatchRouting(NamedTuple):
    """Routing record or replay of one microbatch, also for its recomputation."""

    routing: RoutingRecord
    microbatch: int

    def record(self, layer: str, experts: Tensor) -> None:
        """Record the choices of a layer, experts [t, k]."""
        self.routing.choices[layer, self.microbatch] = experts.detach()

    def show(
        self,
        layer: str,
        hidden: Tensor,
        logits: Tensor,
        weights: Tensor,
        routers: Mapping[str, Tensor],
    ) -> None:
        """Pass the input and output of a layer's router to the callback, as a `RoutingCapture`."""
        if self.routing.watch is not None:
            self.routing.watch(
                RoutingCapture(layer, self.microbatch, hidden, logits, weights, routers)
            )

    def recall(self, layer: str, shape: tuple[int, int]) -> Tensor:
        """Return the recorded choices of a layer, int64 [t, k].

        Raises:
            DataError: no choices were recorded for this microbatch, or for other tokens.
        """
        experts = self.routing.choices.get((layer, self.microbatch))
        if experts is None:
            recorded = sorted(self.routing.microbatches(layer)) or "none"
            raise DataError(
                f"microbatch {self.microbatch}: no choices of {layer} to replay (recorded: "
                f"{recorded}). Record the same "
                f"microbatches first, with the same layers on this rank."
            )
        if experts.shape != shape:
            raise DataError(
                f"microbatch {self.microbatch}: choices of {layer} are {list(experts.shape)}, "
                f"expected {list(shape)}. "
                f"Use the microbatches, model.moe.top_k and layout that they were recorded with."
            )
        return experts


class AttendOptions(TypedDict, total=False):
    """Keyword arguments of `Attend`."""

    scores: Scores
    sinks: Tensor | None
    attention_bias: Tensor | None
    dropout_key: DropoutKey | None
    max_scores: MaxScores | None


class Attend(Protocol):
    """Softmax attention inside each document, from this rank's tokens to all tokens that they may
    see, on any rank."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """q [t, n, d], k [t, g, d], v [t, g, d_v], of this rank's tokens -> [t, n, d_v].

        sinks [n], equal on all ranks that share tokens; each rank computes a partial sum of their
        gradient, as of every weight. `max_scores` records the largest scores of this rank's tokens,
        or of all tokens for some of the heads.
        """


StateStep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x [t, ...], state of each document before its tokens) -> (y [t, ...], state after them)."""


class LayerCache(Protocol):
    """Cache of one layer in text generation: keys and values of attention, or the state of a
    recurrent mixer. The cache decides how they are stored and read."""

    def attend(
        self,
        core: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Store k, v [t, g, d] of the current tokens, and return the attention of q [t, n, d] to
        all tokens of each document. `core` computes it where the cache has no kernel for it."""

    def attend_latent(
        self,
        core: Attend,
        q: Tensor,
        latent: Tensor,
        seq_params: PackedSeqParams,
        *,
        value_size: int,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """`attend` of MLA in the absorbed form: store latent [t, 1, d], which are the keys of all
        heads; their first `value_size` features are the values. q [t, n, d] -> [t, n,
        value_size]."""

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        """Store the rows [t, 1, d] of the current tokens, as `attend_latent` does; return those of
        all tokens that a query attends to, [t_kv, 1, d]."""

    def state(
        self, step: StateStep, x: Tensor, seq_params: PackedSeqParams, *, shape: tuple[int, ...]
    ) -> Tensor:
        """Return y of `step(x, state)` and store the new state [documents, *shape]; before the
        first token of a document its state is zero."""


class AuxLossScale(NamedTuple):
    """Index of a microbatch in its step, and its weight in the step's loss."""

    microbatch: int
    """Index of the microbatch on this rank."""

    microbatches: int
    """Number of microbatches of this rank in the step."""

    weight: float
    """Weight of a mean over the microbatch: `part` / (microbatches of all ranks), times the fp16
    loss scale."""

    part: float = 1.0
    """The microbatch's share of the step's tokens, relative to an even share."""


class RouterInputs(NamedTuple):
    """What expert routers receive besides hidden states."""

    aux_loss_scale: AuxLossScale | None = None
    """Scale of the aux losses of this microbatch; None outside training."""

    first_pass: RoutingDecisions | None = None
    """Routing decisions of the first pass, set where a part of the model is recomputed."""

    routing: MicrobatchRouting | None = None
    """Routing record or replay of this microbatch; None: neither."""


NO_ROUTER_INPUTS = RouterInputs()


class InsertedEmbeddings(NamedTuple):
    """Embeddings that replace those of some tokens, for example image features."""

    embeddings: Tensor
    """[k, h], equal on all tensor-parallel ranks."""

    positions: Tensor
    """int64 [k]: indices of the replaced tokens among the t tokens of this rank's microbatch (of
    its context-parallel part)."""


class ForwardRecorder(Protocol):
    """Records a forward pass, see `infer/recorded_forward`."""

    def record_call(
        self, function: "StepFunction", tensors: Sequence[Tensor], inputs: "LayerInputs"
    ) -> Tensor:
        """Return `function(*tensors, inputs)`, which is called whenever the pass is repeated."""


StepFunction = Callable[..., Tensor]
"""(*tensors, inputs) -> tensor: a part of a layer."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What every layer receives besides its activations [t, h]: `forward(x, inputs)`."""

    seq_params: PackedSeqParams
    """Documents, position ids and masks of the tokens."""

    cache: LayerCache | None = None
    """Cache of the layer's self-attention or recurrent mixer in text generation."""

    cross_cache: LayerCache | None = None
    """KV cache of its cross-layer attention."""

    rope: tuple[Tensor, ...] = ()
    """Cosine and sine [t, pairs] of RoPE, set once per forward by the model; a second pair if some
    layers have other angles."""

    attention_bias: Tensor | None = None
    """[buckets, n]: relative position bias of the local heads by bucket of distance, a parameter of
    the model; None: no relative positions."""

    encoder_hidden: Tensor | None = None
    """Hidden states [t, h] that cross-attention reads, in the layout of `tp_comm`: of these tokens
    after an earlier layer (cross-layer source)."""

    dropout_key: DropoutKey | None = None
    """Key of the dropout masks; None: no dropout, as in evaluation."""

    inserted: InsertedEmbeddings | None = None
    """Embeddings that the first stage inserts before the first layer; None: none."""

    router_inputs: RouterInputs = NO_ROUTER_INPUTS
    """Scale of the aux losses, and routing decisions to record or replay."""

    recorder: ForwardRecorder | None = None
    """Records this forward pass; None: it is not recorded."""

    score_record: ScoreRecord | None = None
    """Records the largest attention scores of a training step; None: they are not computed."""

    def call_in_each_step(self, function: StepFunction, *tensors: Tensor) -> Tensor:
        """Return `function(*tensors, self)`, whose operations depend on the values of the tensors
        or on the lengths of sequences, so that recorded operations cannot be repeated."""
        if self.recorder is None:
            return function(*tensors, self)
        return self.recorder.record_call(function, tensors, self)

    def for_recomputation(self) -> "LayerInputs":
        """Return the inputs of a part of the model that backward recomputes: its routers decide
        once."""
        router_inputs = self.router_inputs._replace(first_pass=RoutingDecisions())
        record = self.score_record
        record = None if record is None else record.for_recomputation()
        return replace(self, router_inputs=router_inputs, score_record=record)

"""`LayerInputs`: what every layer receives besides its activations; `LayerCache` and `Attend`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, TypedDict, Unpack

from torch import Tensor

from megalith.kernels.attention.scores import Scores
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.packed import PackedSeqParams
from megalith.kernels.replay import MicrobatchRouting, RoutingDecisions


class AttendOptions(TypedDict, total=False):
    """Keyword arguments of `Attend`."""

    scores: Scores
    sinks: Tensor | None
    attention_bias: Tensor | None
    dropout_key: DropoutKey | None


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
        gradient, as of every weight.
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
        all tokens of each document, as `core` computes it."""

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

    def for_recomputation(self) -> "LayerInputs":
        """Return the inputs of a part of the model that backward recomputes: its routers decide
        once."""
        router_inputs = self.router_inputs._replace(first_pass=RoutingDecisions())
        return replace(self, router_inputs=router_inputs)

"""Interface of the layer kinds of `plan/layers`, and the values that their functions take and
return; no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.parallel import ContextKind, DispatcherName, OffloadConfig, RecomputeConfig
from megalith.plan.shards import split_evenly, split_heads

# --- parameters

Summed = Literal["sp", "heads", "always"]
"""Which replicas' gradients are summed over tp. "sp": of all tensor-parallel ranks, only with sp,
because without it they do the same work; "heads": of ranks with the same KV heads; "always": of
all."""


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter as one rank holds it."""

    name: str
    """Canonical name, as in its `Shard`."""

    rows: int
    """Rows (outputs) of this rank's matrix; all elements of a vector."""

    columns: int = 1
    """Columns (inputs) of the matrix; 1 for a vector."""

    cut: bool = False
    """Whether tensor-parallel ranks hold different parts; else it is replicated on some or all of
    them. Experts have their own grid and count as split."""

    stacked: bool = False
    """Whether it is stored directly after the previous parameter, because one matmul uses both."""

    summed: Summed = "sp"
    """How the gradients of replicas are summed."""

    frozen: bool = False
    """Whether it has no gradient and no optimizer state."""

    grid: Literal["dense", "expert"] = "dense"
    """Grid of its replicas."""

    counts: bool = True
    """Whether it is a parameter of the model; an expert bias is not, although it is saved: it has
    no gradient, and the dtype of statistics."""

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix."""
        return self.columns > 1

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Share of one tensor-parallel rank of everything that is split."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    kv_copies: int
    """Number of ranks that hold the same KV heads."""


def tensor_part(model: ModelConfig, *, tp: int, rank: int) -> TensorPart:
    """Return the share of tensor-parallel rank `rank`; in latent attention every head has its own
    keys and values."""
    ffn = split_evenly(model.ffn_hidden_size, tp)[rank]
    vocab = split_evenly(model.padded_vocab_size(), tp)[rank]
    if model.mla is not None:
        own = split_evenly(model.num_heads, tp)[rank]
        return TensorPart(heads=own, kv_heads=own, ffn=ffn, vocab=vocab, kv_copies=1)
    heads = split_heads(model.num_heads, model.num_kv_heads, tp)
    copies = tp // len(heads.keys)
    return TensorPart(
        heads=heads.queries[rank],
        kv_heads=heads.keys[rank // copies],
        ffn=ffn,
        vocab=vocab,
        kv_copies=copies,
    )


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Expert shard of one rank, in every layer."""

    ep: int = 1
    """Expert parallel size."""

    etp: int = 1
    """Expert tensor parallel size."""

    etp_rank: int = 0

    def features(self, ffn_hidden_size: int) -> int:
        """Return the inner features of each expert on this rank."""
        return split_evenly(ffn_hidden_size, self.etp)[self.etp_rank]


@dataclass(frozen=True, slots=True)
class LayerRank:
    """Position of one rank among those that split a layer."""

    tp: int = 1
    rank: int = 0
    """Its tensor-parallel rank."""

    experts: ExpertPart | None = None
    """Its expert shard; unset: all experts, each split over tp."""

    @property
    def expert_part(self) -> ExpertPart:
        """Expert shard; if unset, tensor-parallel ranks split each expert."""
        return self.experts or ExpertPart(etp=self.tp, etp_rank=self.rank)


class LayerBranch(NamedTuple):
    """One residual branch of a decoder layer: norm, a layer of some kind, norm."""

    name: Literal["attention", "cross", "mlp"]
    """Its place in the layer, with which the names of its norms begin."""

    kind: "LayerKind"
    """What planning knows about the layer."""

    layer: int
    """Global number of the decoder layer."""

    model: ModelConfig
    """A model in which all layers are as this one (`ModelConfig.at`)."""

    def tensor_part(self, rank: LayerRank) -> TensorPart:
        """Return the share of a rank."""
        return tensor_part(self.model, tp=rank.tp, rank=rank.rank)


# --- FLOPs


def pairs_in_window(length: int, window: int, *, chunked: bool = False) -> int:
    """Return twice the number of (query, key) pairs of a document with a causal window of `window`
    tokens, or with chunks of `window` tokens if `chunked`.

    Doubled to be comparable with length², in which a token's own pair counts half; never more than
    length². Attention that is not causal has twice as many pairs.

    >>> [pairs_in_window(5, window) for window in (1, 2, 4, 5, 9)]
    [10, 18, 25, 25, 25]
    >>> [pairs_in_window(5, window, chunked=True) for window in (1, 2, 4, 5, 9)]
    [5, 9, 17, 25, 25]
    """
    inside = min(window, length)
    if chunked:
        return length // inside * inside**2 + (length % inside) ** 2
    return min(length**2, inside * (inside + 1) + 2 * inside * (length - inside))


def num_attended_pairs(length: int, kind: AttentionConfig) -> int:
    """Return `pairs_in_window` of an attention config; the mean of both sides if the right side
    differs."""
    if kind.window is None:
        return length**2
    before = pairs_in_window(length, kind.window, chunked=kind.chunked)
    if kind.causal or kind.window_right is None:
        return before
    return (before + pairs_in_window(length, kind.window_right + 1)) // 2


class DocumentCounts(NamedTuple):
    """Token counts of some documents."""

    tokens: int
    """Sum of the documents' lengths."""

    squared_lengths: int
    """Sum of the squares of the lengths."""

    windowed: int | None = None
    """Sum of `pairs_in_window`; unset: as if all documents had equal lengths."""

    def doubled_pairs(self, kind: AttentionConfig | None) -> int:
        """Return twice the number of query-key pairs; None: of a layer without a window."""
        if kind is None or self.tokens == 0 or self.squared_lengths == 0:
            return self.squared_lengths
        if self.windowed is not None:
            return self.windowed
        typical = max(1, round(self.squared_lengths / self.tokens))
        pairs = num_attended_pairs(typical, kind)
        return min(self.squared_lengths, round(pairs * self.tokens / typical))


# --- saved activations


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per parameter or activation of one precision."""

    value: int  # weights and activations
    sums: int  # accumulation dtype: gradients, moments, statistics and logits
    master: int


WIDTHS = {
    "fp32": Widths(4, 4, 0),
    "bf16": Widths(2, 4, 4),
    "fp16": Widths(2, 4, 4),
    "fp64": Widths(8, 8, 0),
}


class SavedActivation(NamedTuple):
    """One tensor that is saved for backward."""

    region: str
    """Submodule of a layer, or of the model, that saves it first; "": the layer or model itself."""

    what: str
    numel: int
    """Number of elements."""

    nbytes: int
    """Bytes of its storage, which is larger if the tensor is a view of a larger one."""


def total(rows: Sequence[SavedActivation]) -> int:
    """Return the total bytes of some saved tensors."""
    return sum(row.nbytes for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSetting:
    """Model, dtype, token counts and parallel layout, which determine what the layers of one rank
    save and send for one microbatch."""

    model: ModelConfig
    dtype: Literal["fp32", "bf16", "fp16", "fp64"]
    lengths: tuple[int, ...]
    """Tokens of each document of a microbatch, over all cp ranks."""

    tp: int = 1
    tp_rank: int = 0
    sp: bool = False
    cp: int = 1
    context: ContextKind = "ring"
    a2a: int = 1
    """Size of the all-to-all group of heads, with a2a+ring."""

    dp: int = 1
    experts: ExpertPart | None = None
    """This rank's shard of the experts; unset: all of them, each split over tp."""

    dispatcher: DispatcherName = "alltoall"
    crowded: bool = False
    """Whether as many tokens as possible choose this rank's experts; else the experts are balanced.
    """

    first_layer: int = 0
    """Global number of the stage's first layer; it determines which layers have windows and
    positions."""

    accelerator: bool = False
    """Attention always uses torch's kernel there. Its rows are then an estimate; all others are
    exact."""

    overlap: bool = False
    """Whether communication overlaps computation."""

    overlap_experts: bool = False
    """Whether two microbatches alternate, so that the dispatch of one overlaps the other."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @property
    def tokens(self) -> int:
        """t: tokens of the microbatch on this rank."""
        return sum(self.lengths) // self.cp

    @property
    def own_tokens(self) -> int:
        """Tokens on this rank outside of the tensor-parallel matmuls: t / tp with sp."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def element(self) -> int:
        """e: bytes of an activation."""
        return WIDTHS[self.dtype].value

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return self.wide if self.model.fp32_residual else self.element

    @property
    def wide(self) -> int:
        """w: bytes of a statistic."""
        return WIDTHS[self.dtype].sums

    @property
    def part(self) -> TensorPart:
        """n, g, f and v of this rank."""
        return tensor_part(self.model, tp=self.tp, rank=self.tp_rank)

    @property
    def rank(self) -> LayerRank:
        """Position of this rank."""
        return LayerRank(self.tp, self.tp_rank, self.experts)

    def hidden(self, region: str, what: str = "input") -> SavedActivation:
        """Return a saved tensor with the hidden states of this rank's tokens."""
        numel = self.own_tokens * self.model.hidden_size
        return SavedActivation(region, what, numel, numel * self.element)


# --- communication

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


class Message(NamedTuple):
    """One kind of collective or point-to-point message inside a layer, over some passes."""

    axis: str
    """Axes of its group, joined by _."""

    what: str
    kind: Collective
    ranks: int
    """Group size."""

    calls: int
    nbytes: int
    """Bytes of the whole buffer, over all calls."""

    behind: str = ""
    """Computation that can overlap it; empty: none, it is exposed communication."""


class Passes(NamedTuple):
    """Passes of microbatches through layers of one kind in a step: layers times microbatches."""

    layers: int
    forward: int
    """Forward passes without recomputation, and as many backward passes."""

    recomputed: int
    """Forward passes that backward repeats."""

    outputs_recomputed: int
    """Number of these that repeat the communication of the output, too, because a later operation
    needs the result."""

    @property
    def forwards(self) -> int:
        """All forward passes."""
        return self.forward + self.recomputed


class LayerRecompute(NamedTuple):
    """What backward recomputes of one layer."""

    modules: Sequence[str]
    """Modules that are recomputed selectively."""

    whole: bool
    """Whether the layer is part of a span that is recomputed."""

    ends_span: bool
    """Whether the output of its last branch is not recomputed, because nothing needs it."""


class Exchange(Protocol):
    """Communication of a layer over context-parallel or expert-parallel ranks. Layers with equal
    exchanges are counted together."""

    def repeats(self, recompute: LayerRecompute) -> tuple[bool, bool]:
        """Return whether recomputation repeats it, and its output's part."""
        ...

    def messages(self, passes: Passes) -> Iterator[Message]:
        """Yield its messages in these passes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TPMessages:
    """Communication of one layer over tensor-parallel ranks, in features per token."""

    inputs: tuple[int, ...] = ()
    """Features of each input that the layer gathers in forward, and whose gradient it scatters in
    backward (with sp), or whose gradient it sums (without sp)."""

    weight_inputs: tuple[int, ...] = ()
    """The inputs that matrices read, which backward gathers again with sp."""

    recomputed_inputs: tuple[int, ...] = ()
    """The inputs that selective recomputation gathers again with sp."""

    sums: int = 0
    """Number of outputs of h features that are summed over tp."""

    recomputed_sums: int = 0
    """Number of these that selective recomputation repeats."""

    sum_is_last: bool = True
    """Whether the sum is the last operation of the layer."""


# --- a layer kind


def _no_flops(branch: LayerBranch, counts: DocumentCounts) -> int:
    return 0


def _no_elements(branch: LayerBranch, setting: LayerSetting) -> int:
    return 0


def _no_shared_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str]
) -> list[SavedActivation]:
    return []


def _no_tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    return TPMessages()


def _no_exchange(branch: LayerBranch, setting: LayerSetting) -> Exchange | None:
    return None


def _first_position(name: str) -> int:
    return 1


def hidden_gradient_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return the elements of the input and of the output gradient of a layer: 2 h per token."""
    return 2 * branch.model.hidden_size * setting.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """What planning knows about one kind of layer: pure functions of a branch and of the rank.

    In `branch.model`, and in `setting.model` of `saved_tensors`, all layers are as this one. The
    sequences of names are the modules that backward recomputes.
    """

    parameters: Callable[[LayerBranch, LayerRank], Iterator[HeldParameter]]
    """Parameters in the order in which the module registers them; names without `layers.N.`. Each
    token is multiplied with every matrix once, and with those of K of E experts."""

    saved_tensors: Callable[[LayerBranch, LayerSetting, Sequence[str], bool], list[SavedActivation]]
    """Saved activations; the last argument says whether the layer saves its input."""

    core_flops: Callable[[LayerBranch, DocumentCounts], int] = _no_flops
    """Model FLOPs of forward and backward other than those of its matrices."""

    shared_tensors: Callable[[LayerBranch, LayerSetting, Sequence[str]], list[SavedActivation]] = (
        _no_shared_tensors
    )
    """Saved tensors that all layers of a stage share, such as RoPE tables; equal ones count once.
    """

    weight_gradient_numel: Callable[[LayerBranch, LayerSetting], int] = hidden_gradient_numel
    """Elements of the inputs and output gradients of all matrices, which a deferred weight gradient
    needs."""

    backward_numel: Callable[[LayerBranch, LayerSetting], int] = _no_elements
    """Elements of the gradients inside the layer that backward holds at once."""

    received_numel: Callable[[LayerBranch, LayerSetting], int] = _no_elements
    """Elements that the layer receives from other context-parallel ranks and holds at once."""

    num_input_gradients: int = 2
    """Number of [t, h] gradients that backward of a layer with this branch holds."""

    tp_messages: Callable[[LayerBranch, Sequence[str]], TPMessages] = _no_tp_messages
    """Communication over tensor-parallel ranks; the default is a layer that every rank computes for
    its own tokens."""

    exchange: Callable[[LayerBranch, LayerSetting], Exchange | None] = _no_exchange
    """Communication over context-parallel or expert-parallel ranks."""

    position: Callable[[str], int] = _first_position
    """Position of a parameter in the layer, from 1: a parameter that is computed with later has a
    higher one. `CORE_POSITION` is that of core attention. The name is without that of the branch.
    """

    type_rules: tuple[str, ...] = ()
    """Names of the rules of verify/type_rules.py for its own autograd functions; those of
    collectives need none."""


CORE_POSITION = 3
"""Position of core attention in a layer: after the projections of its inputs."""


# --- norms: RMSNorm and LayerNorm, of the residual stream or inside a residual branch


def norm_parameters(
    name: str, model: ModelConfig, *, size: int | None = None, summed: Summed = "sp"
) -> Iterator[HeldParameter]:
    """Yield a weight and, for LayerNorm, a bias, of `size` features; unset: h."""
    yield HeldParameter(f"{name}.weight", size or model.hidden_size, summed=summed)
    if model.norm == "layer":
        yield HeldParameter(f"{name}.bias", size or model.hidden_size, summed=summed)


def norm_tensors(
    setting: LayerSetting, region: str, *, tokens: int | None = None, features: int | None = None
) -> list[SavedActivation]:
    """Return the saved tensors of a norm inside a residual branch: its input first, then one or two
    statistics."""
    own = setting.own_tokens if tokens is None else tokens
    width = own * (setting.model.hidden_size if features is None else features)
    rows = [
        SavedActivation(region, "input", width, width * setting.element),
        SavedActivation(region, "scale", own, own * setting.wide),
    ]
    if setting.model.norm == "layer":
        rows.append(SavedActivation(region, "mean", own, own * setting.wide))
    return rows


def stream_norm_tensors(setting: LayerSetting, region: str) -> list[SavedActivation]:
    """Return the saved tensors of a norm of the residual stream."""
    read, *statistics = norm_tensors(setting, region)
    return [read._replace(nbytes=read.numel * setting.stream), *statistics]


def residual_norm_tensors(setting: LayerSetting, norm: str) -> list[SavedActivation]:
    """Return the saved tensors of a norm that also adds its input to the residual stream."""
    return [row._replace(what=f"{row.what} of {norm}") for row in stream_norm_tensors(setting, "")]

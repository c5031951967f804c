"""Saved activations of a pipeline stage for one microbatch, tensor by tensor, in bytes.

The rows follow what the kernels save for backward, so that on CPUs their sum equals the measured
memory (observe/meter.py) to the byte. Notation: t tokens of the microbatch on this rank (t / tp
outside of the tensor-parallel matmuls with sp), h hidden, n heads, g KV heads, d head dim, f ffn, v
vocabulary (n, g, f, v of this rank), e bytes per value, w bytes of a statistic. Each tensor is
listed at the first module that saves it. One layer saves:

    attention_norm   input and scale                     (h·e + w)·t
    attention.qkv    input                               h·e·t        not with `norm`
    attention        queries, keys, values               (n + 2 g)·d·e·t
                     probabilities of short documents    n·(query-key pairs of a tile)·e
                     or log-sum-exp of torch's kernel    n·w·t
    attention.out    input                               n·d·e·t      saved by torch's kernel
    (the layer)      mlp_norm's input and scale          (h·e + w)·t
    mlp.gate_up      input                               h·e·t        not with `norm`
    mlp              gate and up                         2·f·e·t      not with `mlp`
    mlp.down         input                               f·e·t        not with `mlp_act` or `mlp`

"not with X": recomputed with X in recompute.modules. MoE layers: estimate/moe.py. Other layer
types differ: a LayerNorm also saves means, w·t; norms after attention and MLP save their own
inputs; a parallel layer saves one input less, and with one norm two; an MLP without a gate f·e·t
instead of 2·f·e·t; windows, softcaps and attention sinks save what torch's kernel saves; QK norms,
gates and latent attention see the functions below. Only estimates are: attention on accelerators;
and, on CPUs, latent attention of documents too short for tiles, whose values have another width
than keys, and relative position biases together with softcap, sinks or attention dropout.

Source of the method: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.parallel import ContextKind, DispatcherName, OffloadConfig, RecomputeConfig
from megalith.estimate.moe import Mixture, mixture_tensors
from megalith.plan.parameters import ExpertPart, TensorPart, tensor_part
from megalith.plan.recompute import Span, layer_spans, mlp_in_chunks, recomputed_modules

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a weight or activation, by dtype."""

WIDE = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of a statistic (accumulation dtype), by dtype."""

TILED_LENGTHS, SHORTEST_TILED = range(64, 2049), 16
"""Document lengths for which CPU attention is tiled; packed documents or bf16 may be shorter."""

KEPT_LENGTH, TILE_ROWS, TILE_SCORES = 512, 64, 1 << 22
"""Constants of kernels/attention/cpu_tiled.py; a test checks that they are equal."""


class SavedTensor(NamedTuple):
    """One tensor that is saved for backward."""

    region: str
    """Submodule of a layer, or of the model, that saves it first; "": the layer or model itself."""

    what: str
    numel: int
    """Number of elements."""

    nbytes: int
    """Bytes of its storage, which is larger if the tensor is a view of a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSetting:
    """Model, dtype, token counts and parallel layout that determine the saved activations."""

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
        return ELEMENT[self.dtype]

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream."""
        return self.wide if self.model.fp32_residual else self.element

    @property
    def wide(self) -> int:
        """w: bytes of a statistic."""
        return WIDE[self.dtype]

    @property
    def part(self) -> TensorPart:
        """n, g, f and v of this rank."""
        return tensor_part(self.model, tp=self.tp, rank=self.tp_rank)

    @property
    def mixture(self) -> Mixture:
        """The experts of an MoE layer on this rank."""
        assert self.model.moe is not None
        return Mixture(
            model=self.model,
            moe=self.model.moe,
            tokens=self.own_tokens,
            sharing=self.cp * self.tp,
            experts=self.experts or ExpertPart(etp=self.tp, etp_rank=self.tp_rank),
            dispatcher=self.dispatcher,
            element=self.element,
            wide=self.wide,
            crowded=self.crowded,
        )


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Saved activations of one microbatch on one rank, in one stage or model chunk."""

    layers: tuple[tuple[SavedTensor, ...], ...]
    """By layer; a span of recomputed layers has all its rows at its first layer."""

    host: tuple[tuple[SavedTensor, ...], ...]
    """By layer: the rows that are offloaded to host memory."""

    ends: tuple[SavedTensor, ...]
    """Rows of the embedding, the last norm and the loss, as far as the stage has them, and of
    tensors that layers share."""

    transient: int
    """Temporary bytes in backward: the largest recomputed part, and what is copied back from the
    host."""

    @property
    def nbytes(self) -> int:
        """Bytes on the device between forward and backward."""
        kept = total(self.ends) + sum(total(rows) for rows in self.layers)
        return kept - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(total(rows) for rows in self.host)


def total(rows: Sequence[SavedTensor]) -> int:
    """Return the total bytes of the rows."""
    return sum(row.nbytes for row in rows)


def stage_activations(
    setting: ActivationSetting,
    *,
    num_layers: int,
    embedding: bool = True,
    loss: bool = True,
    norm: bool | None = None,
    num_mtp_layers: int | None = None,
) -> StageActivations:
    """Return the saved activations of a stage with `num_layers` layers, with or without embedding
    and loss.

    norm, num_mtp_layers: whether the stage has the last norm, and how many MTP layers; unset: those
    that belong to the loss.
    """
    ends = _Ends(
        embedding,
        loss if norm is None else norm,
        loss,
        setting.model.mtp.num_layers * loss if num_mtp_layers is None else num_mtp_layers,
    )
    modules, first = recomputed_modules(setting.recompute), setting.first_layer
    layer_tensors = [
        tuple(layer_rows(setting, modules, first + layer)) for layer in range(num_layers)
    ]
    layers: list[tuple[SavedTensor, ...]] = []
    host: list[tuple[SavedTensor, ...]] = []
    transient = max(
        (_recomputed_bytes(setting, first + n, rows) for n, rows in enumerate(layer_tensors)),
        default=0,
    )
    for span in _layer_spans(setting, num_layers):
        span_tensors = layer_tensors[span.start : span.stop]
        rows = (span_input(setting),) if span.recomputed else span_tensors[0]
        if span.recomputed:
            transient = max(transient, sum(map(total, span_tensors)) - total(rows))
        no_tensors = [()] * (span.stop - span.start - 1)
        layers += [rows, *no_tensors]
        host += [offloaded(setting, span, rows), *no_tensors]
    transient = max(transient, 0) + peak_copied_back(
        [(total(r), total(away)) for r, away in zip(layers, host, strict=True) if r]
    )
    end_tensors = (*_end_rows(setting, num_layers, ends), *_shared_rows(setting, num_layers, ends))
    return StageActivations(tuple(layers), tuple(host), end_tensors, transient)


class _Ends(NamedTuple):
    """Parts of a stage other than its layers."""

    embedding: bool
    norm: bool
    loss: bool
    num_mtp_layers: int


def _recomputed_bytes(setting: ActivationSetting, layer: int, rows: Sequence[SavedTensor]) -> int:
    """Return the bytes that backward recomputes in a layer that saves `rows`; with MLP chunks, of
    one chunk."""
    recomputed = total(layer_rows_without_recompute(setting, layer)) - total(rows)
    if not mlp_in_chunks(setting.recompute, setting.model, layer):
        return recomputed
    model, own = setting.model.at(layer), setting.own_tokens
    inner = total(_mlp_rows(replace(setting, model=model), False))
    return recomputed - inner + inner * -(-own // setting.recompute.mlp_chunks) // own


def _layer_spans(setting: ActivationSetting, num_layers: int) -> list[Span]:
    cut = setting.model.find_cross_layer_source(
        range(setting.first_layer, setting.first_layer + num_layers)
    )
    return layer_spans(setting.recompute, setting.offload, num_layers, cut=cut)


def peak_copied_back(spans: Sequence[tuple[int, int]]) -> int:
    """Return the largest number of bytes that backward holds beyond what forward left on the
    device, because offloaded tensors are copied back.

    spans: (saved bytes, offloaded bytes of these) of each span. While backward is in one span, this
    span and the one before it are on the device, and the later ones are freed.

    >>> [
    ...     peak_copied_back(spans)
    ...     for spans in ([(9, 9), (9, 9), (9, 9), (10, 0)], [(9, 9), (10, 0), (10, 0)])
    ... ]
    [9, 0]
    """
    later = list(accumulate((kept - away for kept, away in reversed(spans)), initial=0))[-2::-1]
    before = [0, *(away for _, away in spans)]
    back = [
        away + earlier - gone
        for (_, away), earlier, gone in zip(spans, before, later, strict=False)
    ]
    return max([0, *back])


def layer_rows_without_recompute(
    setting: ActivationSetting, layer: int | None = None
) -> list[SavedTensor]:
    """Return the saved tensors of a layer without recomputation."""
    return layer_rows(replace(setting, recompute=RecomputeConfig()), (), layer)


def layer_rows(
    setting: ActivationSetting, again: Sequence[str], layer: int | None = None
) -> list[SavedTensor]:
    """Return the saved tensors of a layer (global number; unset: the first of the stage) with the
    modules `again` recomputed."""
    index = setting.first_layer if layer is None else layer
    setting = replace(setting, model=setting.model.at(index))
    model = setting.model
    rows = _attention_branch(setting, index, again) if model.attention_part(index) != "none" else []
    rows += _cross_branch(setting, index, again) if model.uses_cross_layer_source(index) else []
    return rows + (_mlp_branch(setting, index, again) if model.mlp_part(index) != "none" else [])


def _attention_branch(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Return the saved tensors of attention, or of its linear replacement, and of the norms around
    it."""
    model, (before, after, saves_input) = setting.model, _norms_around(setting, again)
    width = setting.own_tokens * model.hidden_size
    rows = _stream_norm_rows(setting, "attention_norm") if before else []
    if saves_input:
        rows.append(
            SavedTensor(_first_reader(model, layer), "input", width, width * setting.element)
        )
    if model.attention_part(layer) == "full":
        rows += _attention_rows(setting, layer, again)
    return rows + (_norm_rows(setting, "attention_out.norm") if after else [])


def _cross_branch(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Return the saved tensors of cross-layer attention, without the shared source hidden states:
    as of attention without a window, without RoPE and with separate projections."""
    model, (before, after, saves_input) = setting.model, _norms_around(setting, again)
    width, kind = setting.own_tokens * model.hidden_size, model.attention
    rows = _residual_norm_rows(setting, "cross_norm") if before else []
    if saves_input:
        rows.append(SavedTensor("cross.queries", "input", width, width * setting.element))
    plain = AttentionConfig(scale=kind.scale, softcap=kind.softcap, causal=kind.causal)
    cross_setting = replace(
        setting, model=replace(model, attention=plain, positions="rope", rope=RopeConfig())
    )
    for row in _attention_rows(cross_setting, layer, again):
        rows.append(row._replace(region=row.region.replace("attention", "cross")))
    return rows + (_norm_rows(setting, "cross_out.norm") if after else [])


def _residual_norm_rows(setting: ActivationSetting, norm: str) -> list[SavedTensor]:
    """Return the saved tensors of a norm that also adds its input to the residual stream."""
    return [
        SavedTensor("", f"{row.what} of {norm}", row.numel, row.nbytes)
        for row in _stream_norm_rows(setting, "")
    ]


def _mlp_branch(setting: ActivationSetting, layer: int, again: Sequence[str]) -> list[SavedTensor]:
    """Return the saved tensors of the MLP, or of its linear replacement, and of the norms around
    it."""
    model, (before, after, saves_input) = setting.model, _norms_around(setting, again)
    width, alone = setting.own_tokens * model.hidden_size, model.attention_part(layer) == "none"
    rows: list[SavedTensor] = []
    if before and alone:
        rows += _stream_norm_rows(setting, "mlp_norm")
    elif before and model.block == "sequential":
        rows += _residual_norm_rows(setting, "mlp_norm")
    elif before and model.block == "parallel":
        rows += _stream_norm_rows(setting, "mlp_norm")[1:]  # the input of attention_norm
    has_own_input = (
        alone or model.block == "sequential" or (before and model.block == "parallel")
    )  # else attention saves the same input
    if model.has_experts(layer):
        reads = saves_input and not (
            _reads_only_jittered_input(model, again) and not setting.mixture.rows_stay
        )
        rows += _mixture_rows(setting, again, kept=has_own_input and reads)
        return rows + (_norm_rows(setting, "mlp_out.norm") if after else [])
    full, up = model.mlp_part(layer) == "full", "mlp.gate_up" if model.gated else "mlp.up"
    if saves_input and has_own_input:
        reader = "mlp" if "mlp" in again else up if full else "mlp.linear"
        rows.append(SavedTensor(reader, "input", width, width * setting.element))
    if full and "mlp" not in again:
        rows += _mlp_rows(setting, "mlp_act" in again)
    return rows + (_norm_rows(setting, "mlp_out.norm") if after else [])


def _reads_only_jittered_input(model: ModelConfig, again: Sequence[str]) -> bool:
    """Return whether the MoE layer reads its input only with router jitter."""
    moe = model.moe
    if moe is None or "mlp" in again or moe.router.jitter == 0:
        return False
    return moe.latent_size is None and moe.shared_ffn_hidden_size is None


def _mixture_rows(
    setting: ActivationSetting, again: Sequence[str], *, kept: bool
) -> list[SavedTensor]:
    """Return the saved tensors of an MoE layer; `kept`: with its input."""
    model, moe, width = (
        setting.model,
        setting.model.moe,
        setting.own_tokens * setting.model.hidden_size,
    )
    assert moe is not None
    first = "narrow" if moe.latent_size is not None else "router.gate"
    reader = "mlp" if "mlp" in again else f"mlp.{first}"
    rows = [SavedTensor(reader, "input", width, width * setting.element)] if kept else []
    if "mlp" in again:
        return rows
    rows += [
        SavedTensor(f"mlp.{region}".rstrip("."), what, numel, nbytes)
        for region, what, numel, nbytes in mixture_tensors(setting.mixture)
    ]
    if moe.shared_ffn_hidden_size is None or "shared_experts" in again:
        return rows
    shared = replace(setting, model=replace(model, ffn_hidden_size=moe.shared_ffn_hidden_size))
    rows += [
        row._replace(region=f"mlp.shared.0.{row.region}")
        for row in _mlp_rows(shared, "mlp_act" in again)
    ]
    if moe.shared_gate:
        own = setting.own_tokens
        rows.append(SavedTensor("mlp.shared.0", "gate", own, own * setting.element))
        rows.append(
            SavedTensor("mlp.shared.0", "output before the gate", width, width * setting.element)
        )
    return rows


def _norms_around(setting: ActivationSetting, again: Sequence[str]) -> tuple[bool, bool, bool]:
    """Return whether there is a norm before, a norm after, and whether the inputs of projections
    are saved."""
    placement = setting.model.norm_placement
    before = placement != "after"
    return before, placement != "before", not (before and "norm" in again)


def _first_reader(model: ModelConfig, layer: int) -> str:
    """Return the submodule of attention that reads the layer's input first."""
    if model.attention_part(layer) == "linear":
        return "attention.linear"
    if model.mla is None:
        return "attention.qkv"
    return "attention.kv_down" if model.mla.q_rank is None else "attention.queries.0"


def _stream_norm_rows(setting: ActivationSetting, region: str) -> list[SavedTensor]:
    """Return the saved tensors of a norm of the residual stream: its input first, then one or two
    statistics."""
    read, *statistics = _norm_rows(setting, region)
    return [read._replace(nbytes=read.numel * setting.stream), *statistics]


def _norm_rows(
    setting: ActivationSetting,
    region: str,
    *,
    tokens: int | None = None,
    features: int | None = None,
) -> list[SavedTensor]:
    """Return the saved tensors of a norm inside a residual branch."""
    own = setting.own_tokens if tokens is None else tokens
    width = own * (setting.model.hidden_size if features is None else features)
    rows = [
        SavedTensor(region, "input", width, width * setting.element),
        SavedTensor(region, "scale", own, own * setting.wide),
    ]
    return rows + (
        [SavedTensor(region, "mean", own, own * setting.wide)]
        if setting.model.norm == "layer"
        else []
    )


def _mlp_rows(setting: ActivationSetting, again: bool) -> list[SavedTensor]:
    """Return the saved tensors between the two matmuls; `again`: the activation is recomputed."""
    inner, e, gated = setting.part.ffn * setting.tokens, setting.element, setting.model.gated
    before = 2 * inner if gated else inner
    rows = [SavedTensor("mlp", "gate and up" if gated else "up", before, before * e)]
    return rows if again else [*rows, SavedTensor("mlp.down", "input", inner, inner * e)]


def span_input(setting: ActivationSetting) -> SavedTensor:
    """Return the input that a span of recomputed layers saves, or its padded shard of 1/tp."""
    numel = setting.own_tokens * setting.model.hidden_size
    if setting.recompute.shard_inputs:
        numel = -(-numel // setting.tp)
    return SavedTensor("", "input of recomputed layers", numel, numel * setting.stream)


def offloaded(
    setting: ActivationSetting, span: Span, rows: Sequence[SavedTensor]
) -> tuple[SavedTensor, ...]:
    """Return the rows that are offloaded to host memory: those of offloaded layers that are large
    enough."""
    return tuple(row for row in rows if span.offloaded and row.numel >= setting.offload.min_numel)


def _end_rows(setting: ActivationSetting, num_layers: int, ends: _Ends) -> Iterator[SavedTensor]:
    """Yield the saved tensors of the embedding, the last norm, the loss and the MTP layers."""
    model, own = setting.model, setting.own_tokens
    if ends.embedding:
        yield from _lookup_rows("embed", setting.tokens)
        if model.positions == "learned":
            yield from _lookup_rows("input_embedding.positions", own)
    yield from _cross_layer_source_rows(setting, num_layers)
    if ends.norm:
        yield from _stream_norm_rows(setting, "norm")
    if ends.loss:
        yield from _head_rows(setting, "")
    for depth in range(model.mtp.num_layers):
        region = f"mtp.layers.{depth}"
        if ends.num_mtp_layers:
            yield from _mtp_rows(setting, region)
        if ends.loss:
            yield from _head_rows(setting, region)


def _cross_layer_source_rows(setting: ActivationSetting, num_layers: int) -> Iterator[SavedTensor]:
    """Yield the source hidden states of cross-layer attention, shared by all layers, and their
    norm.

    The norm reads the same input as the first norm of the next layer; it saves the input only if
    that layer does not.
    """
    model, first = setting.model, setting.first_layer
    if model.cross is None:
        return
    width, spans = setting.own_tokens * model.hidden_size, _layer_spans(setting, num_layers)
    source_layer = model.find_cross_layer_source(range(first, first + num_layers))
    later = [span for span in spans if first + span.start >= model.cross.memory]
    attending = [
        layer
        for span in later
        for layer in range(first + span.start, first + span.stop)
        if model.uses_cross_layer_source(layer)
    ]
    normed = model.norm_placement != "after"
    is_separate = (
        normed or source_layer is None or setting.stream != setting.element
    )  # else the layer's input itself
    if is_separate and (attending or any(span.recomputed for span in later)):
        yield SavedTensor("memory", "what layers look at", width, width * setting.element)
    if source_layer is None or not normed:
        return
    read, *statistics = _stream_norm_rows(setting, "memory_norm")
    next_span = later[0]
    yield from statistics
    if next_span.offloaded or (next_span.recomputed and setting.recompute.shard_inputs):
        yield read


def _lookup_rows(region: str, tokens: int) -> list[SavedTensor]:
    return [
        SavedTensor(region, "rows of the table", tokens, 8 * tokens),
        SavedTensor(region, "which rows are mine", tokens, tokens),
    ]


def _head_rows(setting: ActivationSetting, region: str) -> list[SavedTensor]:
    """Return the gradients that the head computes in forward."""
    width, rows = (
        setting.tokens * setting.model.hidden_size,
        setting.part.vocab * setting.model.hidden_size,
    )
    return [
        SavedTensor(region, "gradient of the head's input", width, width * setting.element),
        SavedTensor(region, "gradient of the head's weight", rows, rows * setting.wide),
    ]


def _mtp_rows(setting: ActivationSetting, region: str) -> Iterator[SavedTensor]:
    """Yield the saved tensors of one MTP layer: a layer like the last one, its inputs and its
    norm."""
    last, width = setting.model.num_layers - 1, 2 * setting.own_tokens * setting.model.hidden_size
    yield from _lookup_rows(f"{region}.embed", setting.tokens)
    if setting.model.positions == "learned":
        yield from _lookup_rows(f"{region}.input_embedding.positions", setting.own_tokens)
    yield from _stream_norm_rows(setting, f"{region}.embed_norm")
    yield from _norm_rows(setting, f"{region}.hidden_norm")
    yield SavedTensor(f"{region}.project", "input", width, width * setting.element)
    if layer_spans(setting.recompute, OffloadConfig(), 1)[0].recomputed:
        yield span_input(setting)
    else:
        for row in layer_rows(setting, recomputed_modules(setting.recompute), last):
            yield row._replace(region=f"{region}.layer.{row.region}".rstrip("."))
    yield from _stream_norm_rows(setting, f"{region}.norm")


def _shared_rows(setting: ActivationSetting, num_layers: int, ends: _Ends) -> Iterator[SavedTensor]:
    """Yield the tensors that several layers share: RoPE tables, the mask of padding, token indices
    for dropout."""
    model, t, first = setting.model, setting.tokens, setting.first_layer
    pairs = model.rotary_size() // 2 * t
    num_mtp_layers = [model.num_layers - 1] if ends.num_mtp_layers else []
    for local in sorted(
        _rope_tables(setting, range(first, first + num_layers))
        | _rope_tables(setting, num_mtp_layers)
    ):
        for what in ("cosines", "sines"):
            yield SavedTensor(
                "shared", f"{what}{' of windows' * local}", pairs, pairs * setting.element
            )
    if _saves_aux_loss(setting, range(first, first + num_layers)) or _saves_aux_loss(
        setting, num_mtp_layers
    ):
        yield SavedTensor("shared", "which tokens count", t, t)
    counts = (num_layers, len(num_mtp_layers))
    spans = [
        span for count in counts for span in layer_spans(setting.recompute, OffloadConfig(), count)
    ]
    dropped = model.dropout.residual > 0 and not all(span.recomputed for span in spans)
    if dropped or (model.dropout.embedding > 0 and (ends.embedding or ends.num_mtp_layers > 0)):
        yield SavedTensor("shared", "numbers of tokens", t, 8 * t)


def _saves_aux_loss(setting: ActivationSetting, layers: Sequence[int]) -> bool:
    """Return whether some of these layers save tensors of aux losses."""
    moe = setting.model.moe
    if moe is None or "mlp" in recomputed_modules(setting.recompute):
        return False
    losses, spans = moe.aux_loss, layer_spans(setting.recompute, OffloadConfig(), len(layers))
    saving_layers = [
        layer for span in spans if not span.recomputed for layer in layers[span.start : span.stop]
    ]
    has_losses = (
        max(
            losses.sequence_coeff,
            losses.batch_coeff,
            losses.global_batch_coeff,
            losses.z_loss_coeff,
        )
        > 0
    )
    return has_losses and any(setting.model.has_experts(layer) for layer in saving_layers)


def _rope_tables(setting: ActivationSetting, layers: Sequence[int]) -> set[bool]:
    """Return the RoPE tables that these layers save (True: the table of windowed layers);
    recomputed layers save all tables."""
    model = setting.model
    own = model.rope.local_theta is not None
    kinds = {own and model.has_window(layer) for layer in layers if model.uses_rope(layer)}
    spans = layer_spans(setting.recompute, OffloadConfig(), len(layers))
    partly_recomputed = [
        layer
        for layer in layers
        if recomputes_up_projections(setting, layer, recomputed_modules(setting.recompute))
    ]
    if model.positions == "rope" and (partly_recomputed or any(span.recomputed for span in spans)):
        kinds = {False, own}
    return kinds


# --- attention


def recomputes_up_projections(setting: ActivationSetting, layer: int, again: Sequence[str]) -> bool:
    """Return whether a layer's latent attention is recomputed from its compressed vectors."""
    model = setting.model
    return (
        "mla_up_proj" in again and model.mla is not None and model.attention_part(layer) == "full"
    )


def _attention_rows(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Return the saved tensors of attention without its input, with core_attention or mla_up_proj
    recomputed if in `again`."""
    model, e, w, part = setting.model, setting.element, setting.wide, setting.part
    inner = part.heads * model.value_size() * setting.tokens
    if recomputes_up_projections(setting, layer, again):
        return [
            *_latent_rows(setting, again=True),
            SavedTensor("attention.out", "input", inner, inner * e),
        ]
    rows = _latent_rows(setting) if model.mla is not None else _qk_norm_rows(setting)
    core = _core_rows(setting, layer, "core_attention" in again)
    saves_output = any(row.what == "output" and row.numel == inner for row in core)
    rows += core
    if model.has_attention_temperature(layer):
        rows.append(
            SavedTensor("attention", "growth of queries", setting.tokens, setting.tokens * w)
        )
    if (
        model.attention.gated
    ):  # the gate saves the output of attention, the projection its own input
        rows += (
            []
            if saves_output
            else [SavedTensor("attention", "output before the gate", inner, inner * e)]
        )
        rows.append(SavedTensor("attention", "gate", inner, inner * w))
        rows += [SavedTensor("attention", "gate, rounded", inner, inner * e)] if e != w else []
        saves_output = False
    return (
        rows if saves_output else [*rows, SavedTensor("attention.out", "input", inner, inner * e)]
    )


def _projection_numel(setting: ActivationSetting) -> int:
    """Return the number of elements of the QKV and gate projection's output."""
    part, gates = setting.part, setting.part.heads if setting.model.attention.gated else 0
    return (part.heads + 2 * part.kv_heads + gates) * setting.model.head_size() * setting.tokens


def _latent_rows(setting: ActivationSetting, *, again: bool = False) -> list[SavedTensor]:
    """Return the saved tensors of latent attention: its compressed vectors before and after their
    norms; if recomputed, also the shared key."""
    sizes, e, own = setting.model.mla, setting.element, setting.own_tokens
    assert sizes is not None
    rows: list[SavedTensor] = []

    for rank, norm, up in (
        (sizes.q_rank, "attention.queries.1", "attention.queries.2"),
        (sizes.kv_rank, "attention.kv_norm", "attention.kv_up"),
    ):
        if rank is not None:
            rows += _norm_rows(setting, norm, features=rank) if sizes.norms else []
            rows.append(
                SavedTensor("attention" if again else up, "input", own * rank, own * rank * e)
            )
    shared = own * sizes.rope_dim
    return [*rows, SavedTensor("attention", "shared key", shared, shared * e)] if again else rows


def _qk_norm_rows(setting: ActivationSetting) -> list[SavedTensor]:
    """Return the saved tensors of the QK norms; unfused norms save their input in fp32, or the
    whole projection."""
    model, t, d, w = setting.model, setting.tokens, setting.model.head_size(), setting.wide
    kind, heads = model.attention.qk_norm, {"q": setting.part.heads, "k": setting.part.kv_heads}
    if kind == "none":
        return []
    rows: list[SavedTensor] = []
    if kind == "head":
        for name, count in heads.items():
            rows += _norm_rows(
                setting, f"attention.norms.{name}_norm", tokens=count * t, features=d
            )
        return rows
    regions = {
        name: f"attention.norms.{name}_norm" if kind == "whole" else "attention" for name in heads
    }
    if setting.element == w:
        rows.append(
            SavedTensor(
                regions["q"],
                "projection",
                _projection_numel(setting),
                _projection_numel(setting) * w,
            )
        )
    for name, count in heads.items():
        width, statistics = count * d * t, t if kind == "whole" else count * t
        if setting.element != w:
            rows.append(SavedTensor(regions[name], "input", width, width * w))
        rows.append(SavedTensor(regions[name], "scale", statistics, statistics * w))
        if kind == "whole":
            element = w if model.zero_centered_gamma else setting.element
            rows.append(SavedTensor(regions[name], "normed", width, width * element))
            if model.zero_centered_gamma:
                rows.append(SavedTensor(regions[name], "1 + weight", count * d, count * d * w))
    return rows


def _core_rows(setting: ActivationSetting, layer: int, again: bool) -> list[SavedTensor]:
    """Return the saved tensors of core attention; its output only if it saves a copy of its own."""
    if again:
        rows = _qkv_rows(setting, setting.part.heads, setting.part.kv_heads)
        if _reads_projection(setting, layer) and not setting.model.has_attention_temperature(layer):
            rows[0] = rows[0]._replace(nbytes=_projection_numel(setting) * setting.element)
        return rows
    if setting.cp > 1:
        return _context_rows(setting, layer)
    return _local_attention_rows(
        setting, layer, setting.part.heads, setting.part.kv_heads, separate=False
    )


def _reads_projection(setting: ActivationSetting, layer: int) -> bool:
    """Return whether keys (and queries without attention temperature) are views of the projection:
    neither normalized nor rotated."""
    model = setting.model
    return model.mla is None and model.attention.qk_norm == "none" and not model.uses_rope(layer)


def _qkv_rows(
    setting: ActivationSetting, heads: int, kv_heads: int, *, tokens: int | None = None
) -> list[SavedTensor]:
    """Return queries, keys and values of `tokens` tokens; unset: of this rank's."""
    t, e = setting.tokens if tokens is None else tokens, setting.element
    keys, values = setting.model.key_size(), setting.model.value_size()
    sizes = {"q": heads * keys * t, "k": kv_heads * keys * t, "v": kv_heads * values * t}
    return [SavedTensor("attention", what, numel, numel * e) for what, numel in sizes.items()]


def _local_attention_rows(
    setting: ActivationSetting, layer: int, heads: int, kv_heads: int, *, separate: bool
) -> list[SavedTensor]:
    """Return the saved tensors of attention over whole documents; `separate`: the next projection
    does not read its output."""
    setting = in_chunks(setting, layer)
    model, e, t = setting.model, setting.element, sum(setting.lengths)
    rows, d, backend = (
        _qkv_rows(setting, heads, kv_heads, tokens=t),
        model.value_size(),
        attention_backend(setting, layer),
    )
    output_name = "output of some heads" if separate else "output"
    if backend == "biased":
        return _biased_rows(setting, layer, heads)
    if backend == "cpu_tiled":
        saves_probabilities = max(setting.lengths) <= KEPT_LENGTH
        numels = (
            _tile_numels(setting.lengths, heads, kv_heads, model.attention.causal)
            if saves_probabilities
            else ()
        )
        return rows + [
            SavedTensor("attention", "probabilities", numel, numel * e) for numel in numels
        ]
    if backend == "split_kv":
        rows.append(SavedTensor("attention", "log-sum", heads * t, heads * t * setting.wide))
        output_name = (
            output_name if separate or _reads_saved_output(setting, heads) else "output by head"
        )
        return [*rows, SavedTensor("attention", output_name, heads * d * t, heads * d * t * e)]
    if _reads_projection(setting, layer) and not separate:
        whole = SavedTensor(
            "attention",
            "queries, keys, values",
            _projection_numel(setting),
            _projection_numel(setting) * e,
        )
        rows = [rows[0], whole] if model.has_attention_temperature(layer) else [whole]
    calls = kernel_lengths(setting.lengths)
    if backend == "plain":
        pairs = heads * sum(length**2 for length in setting.lengths)
        return [*rows, SavedTensor("attention", "probabilities", pairs, pairs * e)]
    for length in calls if len(calls) > 1 else (t,):
        tokens = heads * length
        rows.append(SavedTensor("attention", "log-sum", tokens, tokens * setting.wide))
        rows.append(SavedTensor("attention", output_name, tokens * d, tokens * d * e))
    return rows


def _biased_rows(setting: ActivationSetting, layer: int, heads: int) -> list[SavedTensor]:
    """Return the saved tensors of attention with relative position biases: torch's unfused kernel,
    which copies its inputs for every query head."""
    model, w, t = setting.model, setting.wide, sum(setting.lengths)
    runs, pairs = (
        kernel_lengths(setting.lengths),
        heads * sum(length**2 for length in setting.lengths),
    )
    copies, distances = (
        heads * (2 * model.key_size() + model.value_size()) * t,
        sum(2 * n - 1 for n in runs),
    )
    rows = [
        SavedTensor("attention", "queries, keys, values by head", copies, copies * w),
        SavedTensor("attention", "weights", pairs, pairs * w),
        SavedTensor("attention", "buckets of distances", distances, 8 * distances),
    ]
    hidden = model.attention.causal or _window_hides(model, layer, max(runs))
    num_pairs = sum(n**2 for n in runs)
    masks = [
        SavedTensor("attention", "mask", num_pairs, num_pairs),
        SavedTensor("attention", "queries that see nothing", t, t),
    ]
    return rows + masks if hidden else rows


def _reads_saved_output(setting: ActivationSetting, heads: int) -> bool:
    """Return whether the projection reads the saved output itself and not a copy ordered by
    token."""
    return len(setting.lengths) > len(kernel_lengths(setting.lengths)) or heads == 1


def attention_backend(
    setting: ActivationSetting, layer: int
) -> Literal["biased", "split_kv", "cpu_tiled", "torch", "plain"]:
    """Return the attention backend of a layer, as kernels/attention/dispatch.py selects it; plain:
    torch has
    no fused kernel and saves all scores."""
    setting = in_chunks(setting, layer)
    model, longest = setting.model, max(setting.lengths)
    kind = model.attention
    if model.positions == "relative":
        return "biased"
    if (
        _window_hides(model, layer, longest)
        or kind.softcap is not None
        or kind.sinks
        or kind.off_by_one
        or model.dropout.attention > 0
    ):
        return "split_kv"
    if setting.accelerator:
        return "torch"
    if tiled(setting):
        return "cpu_tiled"
    if model.key_size() == model.value_size():
        return "torch"
    return "split_kv" if longest >= TILED_LENGTHS.stop else "plain"


def _window_hides(model: ModelConfig, layer: int, longest: int) -> bool:
    """Return whether a layer's window masks any token of documents of length `longest` at most."""
    kind = model.attention
    if kind.window is None or not model.has_window(layer):
        return False
    after = kind.window - 1 if kind.window_right is None else kind.window_right
    return kind.window < longest or (not kind.causal and after < longest - 1)


def in_chunks(setting: ActivationSetting, layer: int) -> ActivationSetting:
    """Return the setting with each attention chunk as a document, for layers with chunked
    attention."""
    kind = setting.model.attention
    if not kind.chunked or kind.window is None or not setting.model.has_window(layer):
        return setting
    size, plain = kind.window, replace(kind, window=None, window_layers=(), chunked=False)
    lengths = [
        min(size, length - start) for length in setting.lengths for start in range(0, length, size)
    ]
    return replace(setting, lengths=tuple(lengths), model=replace(setting.model, attention=plain))


def kv_heads_exchanged(kv_heads: int, ranks: int) -> int:
    """Return the KV heads of each of `ranks` ranks after an all-to-all of heads, copies included.

    >>> [kv_heads_exchanged(kv_heads, 4) for kv_heads in (8, 4, 2, 6)]
    [2, 1, 1, 3]
    """
    return lcm(kv_heads, ranks) // ranks


def _context_rows(setting: ActivationSetting, layer: int) -> list[SavedTensor]:
    """Return the saved tensors of context-parallel attention, see parallel/context.py."""
    part, e, w, cp, ranks = setting.part, setting.element, setting.wide, setting.cp, setting.cp
    if setting.context == "a2a+ring":
        ranks = setting.a2a
    elif setting.context != "a2a":
        ranks = 1
    heads, kv_heads = part.heads // ranks, kv_heads_exchanged(part.kv_heads, ranks)
    if setting.context == "a2a":
        return _local_attention_rows(setting, layer, heads, kv_heads, separate=True)
    k, v, t = setting.model.key_size(), setting.model.value_size(), setting.tokens * ranks
    if setting.context == "gather":
        keys = [("keys", kv_heads * k * t * cp), ("values", kv_heads * v * t * cp)]
    else:
        keys = [("keys and values", kv_heads * (k + v) * t)]
    output_name = (
        "output of some heads"
        if ranks > 1
        else "output"
        if _reads_saved_output(setting, heads)
        else "output by head"
    )
    rows = [("q", heads * k * t), *keys, (output_name, heads * v * t)]
    return [
        *(SavedTensor("attention", what, numel, numel * e) for what, numel in rows),
        SavedTensor("attention", "log-sum", heads * t, heads * t * w),
        *_distance_rows(setting, heads),
    ]


def _distance_rows(setting: ActivationSetting, heads: int) -> list[SavedTensor]:
    """Return the relative position biases of all distances, and the bucket of each distance."""
    if setting.model.positions != "relative":
        return []
    distances = 2 * min(setting.model.relative.max_distance, max(setting.lengths) - 1) + 1
    values = heads * distances
    return [
        SavedTensor("attention", "biases of distances", values, values * setting.element),
        SavedTensor("attention", "buckets of distances", distances, 8 * distances),
    ]


def tiled(setting: ActivationSetting) -> bool:
    """Return whether attention over these documents is computed in tiles; else by torch's
    kernel."""
    lengths = kernel_lengths(setting.lengths)
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    shortest = (
        SHORTEST_TILED if setting.dtype == "bf16" or len(lengths) > 1 else TILED_LENGTHS.start
    )
    return not setting.accelerator and shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def kernel_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one length if all documents have the same length and one kernel call computes them,
    else all."""
    return tuple(lengths[:1]) if len(set(lengths)) == 1 else tuple(lengths)


def _tile_numels(lengths: Sequence[int], heads: int, kv_heads: int, causal: bool) -> Iterator[int]:
    """Yield the elements of every tile of probabilities: all query heads of some KV heads, for some
    queries and their keys."""
    call_lengths, shared = kernel_lengths(lengths), heads // kv_heads
    rows = sum(lengths) // sum(call_lengths) * kv_heads
    heads_per_tile = max(1, TILE_SCORES // (shared * TILE_ROWS * max(call_lengths)))
    starts = [0, *accumulate(call_lengths)]
    for head in range(0, rows, heads_per_tile):
        for start in range(0, sum(call_lengths), TILE_ROWS):
            stop = min(start + TILE_ROWS, sum(call_lengths))
            first = starts[bisect_right(starts, start) - 1]
            last = stop if causal else starts[bisect_left(starts, stop)]
            yield min(heads_per_tile, rows - head) * shared * (stop - start) * (last - first)

"""What a stage keeps of one microbatch between forward and backward, tensor by tensor, in bytes.

The rows follow what the kernels save, so that on CPUs their sum equals what a meter finds
(observe/meter.py), to the byte. Notation: t tokens of the microbatch on this rank (t / tp between
the regions that tensor parallelism divides, under sp), h hidden, n heads, g key/value heads, d head
size, f ffn, v vocabulary (n, g, f, v of this rank), e bytes per value, w bytes of a statistic. One
layer keeps, each row where it is kept first:

    attention_norm   its input and a scale               (h·e + w)·t attention.qkv    its input
    h·e·t        not with `norm`: rebuilt from the row above attention        queries, keys, values
    (n + 2 g)·d·e·t
                     probabilities of short documents    n·(pairs of a tile's queries and keys)·e
                     or, by torch's kernel: a log-sum    n·w·t
    attention.out    its input                           n·d·e·t      torch's kernel has it already
    (the layer)      mlp_norm's input and a scale        (h·e + w)·t
    mlp.gate_up      its input                           h·e·t        not with `norm`
    mlp              gate and up                         2·f·e·t      not with `mlp`
    mlp.down         its input                           f·e·t        not with `mlp_act` or `mlp`

Of a mixture of experts, plan/mixtures.py tells. Other kinds of layers keep other rows: a LayerNorm
also means, w·t; norms after attention and MLP their own inputs; a parallel layer one input less,
and with one norm two; an MLP without a gate f·e·t instead of 2·f·e·t; windows, caps and sinks what
torch's kernel keeps; norms of queries and keys, gates and latent attention what the functions below
say. Estimates, and no more, are: attention on accelerators; and, on CPUs, latent attention of
documents too short for tiles, whose values have another width than keys, and biases by distance
together with caps, sinks or dropped weights.

Source of the method: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

from megalith.config.attention import AttentionConfig
from megalith.config.context import ContextKind
from megalith.config.model import ModelConfig
from megalith.config.parallel import DispatcherName
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.rope import RopeConfig
from megalith.plan.mixtures import Mixture, mixture_tensors
from megalith.plan.parameters import ExpertPart, TensorPart, tensor_part
from megalith.plan.recompute import Span, layer_spans, mlp_in_chunks, modules_again

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a weight or activation."""

WIDE = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of a statistic: what sums run in."""

TILED_LENGTHS, SHORTEST_TILED = range(64, 2049), 16
"""PackedSeqParams of documents whose attention is computed in tiles on CPUs; packed or in bf16
they may be shorter."""

KEPT_LENGTH, TILE_ROWS, TILE_SCORES = 512, 64, 1 << 22
"""As in kernels/tiled_attention.py; a test holds them equal."""


class SavedTensor(NamedTuple):
    """One tensor that is kept."""

    region: str
    """The module of a layer, or of the model, that keeps it first; "": the layer or model
    itself."""

    what: str
    numel: int
    """Elements of the tensor."""

    nbytes: int
    """Of the memory behind it, which is more where the tensor is a part of a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSetting:
    """Everything that decides what is kept."""

    model: ModelConfig
    dtype: Literal["fp32", "bf16", "fp16", "fp64"]
    lengths: tuple[int, ...]
    """PackedSeqParams of each document of a microbatch, over all cp ranks."""

    tp: int = 1
    tp_rank: int = 0
    sp: bool = False
    cp: int = 1
    context: ContextKind = "ring"
    a2a: int = 1
    """Neighbors that exchange heads, with a2a+ring."""

    experts: ExpertPart | None = None
    """This rank's part of experts; unset: all of them, each divided over tp."""

    dispatcher: DispatcherName = "alltoall"
    crowded: bool = False
    """All tokens choose this rank's experts, as far as they can; else all are equally busy."""

    first_layer: int = 0
    """Number of the first layer here over all stages; it decides which have windows and
    positions."""

    accelerator: bool = False
    """Attention is always torch's kernel there. Its rows are then an estimate; all others stay
    exact."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    @property
    def tokens(self) -> int:
        """t: of the microbatch, on this rank."""
        return sum(self.lengths) // self.cp

    @property
    def own_tokens(self) -> int:
        """Of these, what a rank has between the regions that tensor parallelism divides."""
        return self.tokens // self.tp if self.sp else self.tokens

    @property
    def element(self) -> int:
        """e."""
        return ELEMENT[self.dtype]

    @property
    def stream(self) -> int:
        """Of the residual stream."""
        return self.wide if self.model.fp32_residual else self.element

    @property
    def wide(self) -> int:
        """w."""
        return WIDE[self.dtype]

    @property
    def part(self) -> TensorPart:
        """n, g, f and v of this rank."""
        return tensor_part(self.model, tp=self.tp, rank=self.tp_rank)

    @property
    def mixture(self) -> Mixture:
        """The experts of a layer that has some."""
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
    """What one microbatch leaves on one rank in one stage, or one model chunk of it."""

    layers: tuple[tuple[SavedTensor, ...], ...]
    """By layer; a span of recomputed layers has all its rows at its first."""

    host: tuple[tuple[SavedTensor, ...], ...]
    """Of these, what waits in host memory."""

    ends: tuple[SavedTensor, ...]
    """Of the embedding, the last norm and the loss, as far as they are in the stage, and the
    rotations of positions."""

    transient: int
    """Bytes that appear for a while in backward: the largest part that runs again, and what comes
    back from the host.
    """

    @property
    def nbytes(self) -> int:
        """On the device, from forward to backward."""
        kept = total(self.ends) + sum(total(rows) for rows in self.layers)
        return kept - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """In host memory."""
        return sum(total(rows) for rows in self.host)


def total(rows: Sequence[SavedTensor]) -> int:
    """Bytes of all."""
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
    """The rows of a stage with so many layers, and with the embedding and the loss or without.

    norm, further: whether the last norm is here, and how many MTP layers;
    unset: with the loss.
    """
    ends = _Ends(
        embedding,
        loss if norm is None else norm,
        loss,
        setting.model.mtp.num_layers * loss if num_mtp_layers is None else num_mtp_layers,
    )
    again, first = modules_again(setting.recompute), setting.first_layer
    each = [tuple(layer_rows(setting, again, first + layer)) for layer in range(num_layers)]
    layers: list[tuple[SavedTensor, ...]] = []
    host: list[tuple[SavedTensor, ...]] = []
    transient = max(
        (_back_in_layer(setting, first + n, rows) for n, rows in enumerate(each)), default=0
    )
    for span in _spans(setting, num_layers):
        inside = each[span.start : span.stop]
        rows = (span_input(setting),) if span.recomputed else inside[0]
        if span.recomputed:
            transient = max(transient, sum(map(total, inside)) - total(rows))
        nothing = [()] * (span.stop - span.start - 1)
        layers += [rows, *nothing]
        host += [offloaded(setting, span, rows), *nothing]
    transient = max(transient, 0) + most_back(
        [(total(r), total(away)) for r, away in zip(layers, host, strict=True) if r]
    )
    kept = (*_ends(setting, num_layers, ends), *_shared(setting, num_layers, ends))
    return StageActivations(tuple(layers), tuple(host), kept, transient)


class _Ends(NamedTuple):
    """What a stage has besides layers."""

    embedding: bool
    norm: bool
    loss: bool
    num_mtp_layers: int


def _back_in_layer(setting: ActivationSetting, layer: int, rows: Sequence[SavedTensor]) -> int:
    """Bytes that backward computes again in a layer that keeps `rows`; where MLPs run in chunks,
    those of one chunk."""
    back = total(whole_layer(setting, layer)) - total(rows)
    if not mlp_in_chunks(setting.recompute, setting.model, layer):
        return back
    model, own = setting.model.at(layer), setting.own_tokens
    inner = total(_mlp_rows(replace(setting, model=model), False))
    return back - inner + inner * -(-own // setting.recompute.mlp_chunks) // own


def _spans(setting: ActivationSetting, num_layers: int) -> list[Span]:
    """How a stage of so many layers runs them."""
    cut = setting.model.has_cross_layer_source_before(
        range(setting.first_layer, setting.first_layer + num_layers)
    )
    return layer_spans(setting.recompute, setting.offload, num_layers, cut=cut)


def most_back(spans: Sequence[tuple[int, int]]) -> int:
    """Bytes that backward has on the device, at most, beyond what forward left there, because they
    come back.

    spans: (bytes kept, bytes of these in host memory) of each. While backward is in one span, that
    and the one before it are back, and those after it are gone.

    >>> most_back([(9, 9), (9, 9), (9, 9), (10, 0)]), most_back([(9, 9), (10, 0), (10, 0)])
    (9, 0)
    """
    later = list(accumulate((kept - away for kept, away in reversed(spans)), initial=0))[-2::-1]
    before = [0, *(away for _, away in spans)]
    back = [
        away + earlier - gone
        for (_, away), earlier, gone in zip(spans, before, later, strict=False)
    ]
    return max([0, *back])


def whole_layer(setting: ActivationSetting, layer: int | None = None) -> list[SavedTensor]:
    """What a layer keeps when nothing is computed again."""
    return layer_rows(replace(setting, recompute=RecomputeConfig()), (), layer)


def layer_rows(
    setting: ActivationSetting, again: Sequence[str], layer: int | None = None
) -> list[SavedTensor]:
    """One layer, numbered over all stages (unset: the first here), of which `again` is computed
    again in backward."""
    index = setting.first_layer if layer is None else layer
    setting = replace(setting, model=setting.model.at(index))
    model = setting.model
    rows = _attention_branch(setting, index, again) if model.attention_part(index) != "none" else []
    rows += _cross_branch(setting, index, again) if model.uses_cross_layer_source(index) else []
    return rows + (_mlp_branch(setting, index, again) if model.mlp_part(index) != "none" else [])


def _attention_branch(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Attention, or the matrix in its place, and the norms around."""
    model, (before, after, kept) = setting.model, _norms_around(setting, again)
    width = setting.own_tokens * model.hidden_size
    rows = _stream_norm_rows(setting, "attention_norm") if before else []
    if kept:
        rows.append(
            SavedTensor(_first_reader(model, layer), "input", width, width * setting.element)
        )
    if model.attention_part(layer) == "full":
        rows += _attention_rows(setting, layer, again)
    return rows + (_norm_rows(setting, "attention_out.norm") if after else [])


def _cross_branch(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Cross attention without the memory, which is one for all layers: as attention without a
    window, whose queries and keys do not turn and are not parts of one projection."""
    model, (before, after, kept) = setting.model, _norms_around(setting, again)
    width, kind = setting.own_tokens * model.hidden_size, model.attention
    rows = _after_adding(setting, "cross_norm") if before else []
    if kept:
        rows.append(SavedTensor("cross.queries", "input", width, width * setting.element))
    plain = AttentionConfig(scale=kind.scale, softcap=kind.softcap, causal=kind.causal)
    looking = replace(
        setting, model=replace(model, attention=plain, positions="rope", rope=RopeConfig())
    )
    for row in _attention_rows(looking, layer, again):
        rows.append(row._replace(region=row.region.replace("attention", "cross")))
    return rows + (_norm_rows(setting, "cross_out.norm") if after else [])


def _after_adding(setting: ActivationSetting, norm: str) -> list[SavedTensor]:
    """What a norm of the residual stream keeps that also adds to it, which its layer asks it
    for."""
    return [
        SavedTensor("", f"{row.what} of {norm}", row.numel, row.nbytes)
        for row in _stream_norm_rows(setting, "")
    ]


def _mlp_branch(setting: ActivationSetting, layer: int, again: Sequence[str]) -> list[SavedTensor]:
    """The MLP, or the matrix in its place, and the norms around."""
    model, (before, after, kept) = setting.model, _norms_around(setting, again)
    width, alone = setting.own_tokens * model.hidden_size, model.attention_part(layer) == "none"
    rows: list[SavedTensor] = []
    if before and alone:
        rows += _stream_norm_rows(setting, "mlp_norm")
    elif before and model.block == "sequential":
        rows += _after_adding(setting, "mlp_norm")
    elif before and model.block == "parallel":
        rows += _stream_norm_rows(setting, "mlp_norm")[1:]  # it reads what attention_norm reads
    own = (
        alone or model.block == "sequential" or (before and model.block == "parallel")
    )  # else attention reads it, too
    if model.has_experts(layer):
        reads = kept and not (_wants_noise(model, again) and not setting.mixture.rows_stay)
        rows += _mixture_rows(setting, again, kept=own and reads)
        return rows + (_norm_rows(setting, "mlp_out.norm") if after else [])
    full, up = model.mlp_part(layer) == "full", "mlp.gate_up" if model.gated else "mlp.up"
    if kept and own:
        reader = "mlp" if "mlp" in again else up if full else "mlp.linear"
        rows.append(SavedTensor(reader, "input", width, width * setting.element))
    if full and "mlp" not in again:
        rows += _mlp_rows(setting, "mlp_act" in again)
    return rows + (_norm_rows(setting, "mlp_out.norm") if after else [])


def _wants_noise(model: ModelConfig, again: Sequence[str]) -> bool:
    """Whether a mixture reads its input with jitter, and nothing else."""
    moe = model.moe
    if moe is None or "mlp" in again or moe.router.jitter == 0:
        return False
    return moe.latent_size is None and moe.shared_ffn_hidden_size is None


def _mixture_rows(
    setting: ActivationSetting, again: Sequence[str], *, kept: bool
) -> list[SavedTensor]:
    """A mixture of experts; `kept`: its input, too."""
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
    """Whether there are norms before, and after; and whether inputs of projections are kept, which
    the first give."""
    placement = setting.model.norm_placement
    before = placement != "after"
    return before, placement != "before", not (before and "norm" in again)


def _first_reader(model: ModelConfig, layer: int) -> str:
    """The part of attention that reads a layer's input first."""
    if model.attention_part(layer) == "linear":
        return "attention.linear"
    if model.mla is None:
        return "attention.qkv"
    return "attention.kv_down" if model.mla.q_rank is None else "attention.queries.0"


def _stream_norm_rows(setting: ActivationSetting, region: str) -> list[SavedTensor]:
    """What a norm of the residual stream keeps: its input, which comes first, and a statistic or
    two."""
    read, *statistics = _norm_rows(setting, region)
    return [read._replace(nbytes=read.numel * setting.stream), *statistics]


def _norm_rows(
    setting: ActivationSetting,
    region: str,
    *,
    tokens: int | None = None,
    features: int | None = None,
) -> list[SavedTensor]:
    """The same of a norm of the model's kind inside a branch."""
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
    """Between the two products; `again`: the activation is computed again."""
    inner, e, gated = setting.part.ffn * setting.tokens, setting.element, setting.model.gated
    before = 2 * inner if gated else inner
    rows = [SavedTensor("mlp", "gate and up" if gated else "up", before, before * e)]
    return rows if again else [*rows, SavedTensor("mlp.down", "input", inner, inner * e)]


def span_input(setting: ActivationSetting) -> SavedTensor:
    """What a span of recomputed layers keeps: its input, or one tp-th of it, padded."""
    numel = setting.own_tokens * setting.model.hidden_size
    if setting.recompute.shard_inputs:
        numel = -(-numel // setting.tp)
    return SavedTensor("", "input of recomputed layers", numel, numel * setting.stream)


def offloaded(
    setting: ActivationSetting, span: Span, rows: Sequence[SavedTensor]
) -> tuple[SavedTensor, ...]:
    """The rows that wait in host memory: those of offloaded layers that are large enough."""
    return tuple(row for row in rows if span.offloaded and row.numel >= setting.offload.min_numel)


def _ends(setting: ActivationSetting, num_layers: int, ends: _Ends) -> Iterator[SavedTensor]:
    """What does not belong to a layer."""
    model, own = setting.model, setting.own_tokens
    if ends.embedding:
        yield from _lookup_rows("embed", setting.tokens)
        if model.positions == "learned":
            yield from _lookup_rows("input_embedding.positions", own)
    yield from _memory_rows(setting, num_layers)
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


def _memory_rows(setting: ActivationSetting, num_layers: int) -> Iterator[SavedTensor]:
    """The memory that layers look at, which all of them share, and its norm where it is taken.

    The norm reads what the first norm of the layer behind it reads, and keeps that only where the
    layer does not.
    """
    model, first = setting.model, setting.first_layer
    if model.cross is None:
        return
    width, spans = setting.own_tokens * model.hidden_size, _spans(setting, num_layers)
    taken = model.has_cross_layer_source_before(range(first, first + num_layers))
    later = [span for span in spans if first + span.start >= model.cross.memory]
    looking = [
        layer
        for span in later
        for layer in range(first + span.start, first + span.stop)
        if model.uses_cross_layer_source(layer)
    ]
    normed = model.norm_placement != "after"
    own = (
        normed or taken is None or setting.stream != setting.element
    )  # else the layer's input itself
    if own and (looking or any(span.recomputed for span in later)):
        yield SavedTensor("memory", "what layers look at", width, width * setting.element)
    if taken is None or not normed:
        return
    read, *statistics = _stream_norm_rows(setting, "memory_norm")
    behind = later[0]
    yield from statistics
    if behind.offloaded or (behind.recomputed and setting.recompute.shard_inputs):
        yield read


def _lookup_rows(region: str, tokens: int) -> list[SavedTensor]:
    return [
        SavedTensor(region, "rows of the table", tokens, 8 * tokens),
        SavedTensor(region, "which rows are mine", tokens, tokens),
    ]


def _head_rows(setting: ActivationSetting, region: str) -> list[SavedTensor]:
    """The gradients that the head forms in forward."""
    width, rows = (
        setting.tokens * setting.model.hidden_size,
        setting.part.vocab * setting.model.hidden_size,
    )
    return [
        SavedTensor(region, "gradient of the head's input", width, width * setting.element),
        SavedTensor(region, "gradient of the head's weight", rows, rows * setting.wide),
    ]


def _mtp_rows(setting: ActivationSetting, region: str) -> Iterator[SavedTensor]:
    """One depth of multi-token prediction: a layer as the last one, and what lies before and after
    it."""
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
        for row in layer_rows(setting, modules_again(setting.recompute), last):
            yield row._replace(region=f"{region}.layer.{row.region}".rstrip("."))
    yield from _stream_norm_rows(setting, f"{region}.norm")


def _shared(setting: ActivationSetting, num_layers: int, ends: _Ends) -> Iterator[SavedTensor]:
    """What several layers keep, once: how positions turn, and which tokens these are, for
    dropout."""
    model, t, first = setting.model, setting.tokens, setting.first_layer
    pairs = model.rotary_size() // 2 * t
    num_mtp_layers = [model.num_layers - 1] if ends.num_mtp_layers else []
    for local in sorted(
        _tables(setting, range(first, first + num_layers)) | _tables(setting, num_mtp_layers)
    ):
        for what in ("cosines", "sines"):
            yield SavedTensor(
                "shared", f"{what}{' of windows' * local}", pairs, pairs * setting.element
            )
    if _balances(setting, range(first, first + num_layers)) or _balances(setting, num_mtp_layers):
        yield SavedTensor("shared", "which tokens count", t, t)
    counts = (num_layers, len(num_mtp_layers))
    spans = [
        span for count in counts for span in layer_spans(setting.recompute, OffloadConfig(), count)
    ]
    dropped = model.dropout.residual > 0 and not all(span.recomputed for span in spans)
    if dropped or (model.dropout.embedding > 0 and (ends.embedding or ends.num_mtp_layers > 0)):
        yield SavedTensor("shared", "numbers of tokens", t, 8 * t)


def _balances(setting: ActivationSetting, layers: Sequence[int]) -> bool:
    """Whether losses of balance are kept in some of these layers."""
    moe = setting.model.moe
    if moe is None or "mlp" in modules_again(setting.recompute):
        return False
    losses, spans = moe.aux_loss, layer_spans(setting.recompute, OffloadConfig(), len(layers))
    kept = [
        layer for span in spans if not span.recomputed for layer in layers[span.start : span.stop]
    ]
    some = (
        max(
            losses.sequence_coeff,
            losses.batch_coeff,
            losses.global_batch_coeff,
            losses.z_loss_coeff,
        )
        > 0
    )
    return some and any(setting.model.has_experts(layer) for layer in kept)


def _tables(setting: ActivationSetting, layers: Sequence[int]) -> set[bool]:
    """The tables that these layers turn by, True: those of windows; layers that run again keep all
    there are."""
    model = setting.model
    own = model.rope.local_theta is not None
    kinds = {own and model.has_window(layer) for layer in layers if model.uses_rope(layer)}
    spans = layer_spans(setting.recompute, OffloadConfig(), len(layers))
    parts = [
        layer for layer in layers if runs_up_again(setting, layer, modules_again(setting.recompute))
    ]
    if model.positions == "rope" and (parts or any(span.recomputed for span in spans)):
        kinds = {False, own}
    return kinds


# --- attention


def runs_up_again(setting: ActivationSetting, layer: int, again: Sequence[str]) -> bool:
    """Whether a layer's latent attention runs again from its short vectors on."""
    model = setting.model
    return (
        "mla_up_proj" in again and model.mla is not None and model.attention_part(layer) == "full"
    )


def _attention_rows(
    setting: ActivationSetting, layer: int, again: Sequence[str]
) -> list[SavedTensor]:
    """Attention without its input, with core_attention computed again, or with all behind the short
    vectors."""
    model, e, w, part = setting.model, setting.element, setting.wide, setting.part
    inner = part.heads * model.value_size() * setting.tokens
    if runs_up_again(setting, layer, again):
        return [
            *_latent_rows(setting, again=True),
            SavedTensor("attention.out", "input", inner, inner * e),
        ]
    rows = _latent_rows(setting) if model.mla is not None else _qk_norm_rows(setting)
    core = _core_rows(setting, layer, "core_attention" in again)
    found = any(row.what == "output" and row.numel == inner for row in core)
    rows += core
    if model.has_attention_temperature(layer):
        rows.append(
            SavedTensor("attention", "growth of queries", setting.tokens, setting.tokens * w)
        )
    if (
        model.attention.gated
    ):  # the gate reads what attention found, and the projection what the gate gives
        rows += (
            [] if found else [SavedTensor("attention", "output before the gate", inner, inner * e)]
        )
        rows.append(SavedTensor("attention", "gate", inner, inner * w))
        rows += [SavedTensor("attention", "gate, rounded", inner, inner * e)] if e != w else []
        found = False
    return rows if found else [*rows, SavedTensor("attention.out", "input", inner, inner * e)]


def _projected(setting: ActivationSetting) -> int:
    """Elements of what the projection for queries, keys, values and gates gives."""
    part, gates = setting.part, setting.part.heads if setting.model.attention.gated else 0
    return (part.heads + 2 * part.kv_heads + gates) * setting.model.head_size() * setting.tokens


def _latent_rows(setting: ActivationSetting, *, again: bool = False) -> list[SavedTensor]:
    """Latent attention: its short vectors before and after their norms; what runs `again` reads the
    key, too."""
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
    """Norms of queries and keys; those in plain operations keep what they read in fp32, or the
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
            SavedTensor(regions["q"], "projection", _projected(setting), _projected(setting) * w)
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
    """Between the projections: what attention itself keeps, its output left out unless it keeps one
    of its own."""
    if again:
        rows = _inputs(setting, setting.part.heads, setting.part.kv_heads)
        if _reads_projection(setting, layer) and not setting.model.has_attention_temperature(layer):
            rows[0] = rows[0]._replace(nbytes=_projected(setting) * setting.element)
        return rows
    if setting.cp > 1:
        return _context_rows(setting, layer)
    return _alone_rows(setting, layer, setting.part.heads, setting.part.kv_heads, separate=False)


def _reads_projection(setting: ActivationSetting, layer: int) -> bool:
    """Whether keys, and queries unless they are scaled by the temperature, are parts of what the
    projection gives: neither normed nor turned."""
    model = setting.model
    return model.mla is None and model.attention.qk_norm == "none" and not model.uses_rope(layer)


def _inputs(
    setting: ActivationSetting, heads: int, kv_heads: int, *, tokens: int | None = None
) -> list[SavedTensor]:
    """Queries, keys and values of some tokens; unset: of mine."""
    t, e = setting.tokens if tokens is None else tokens, setting.element
    keys, values = setting.model.key_size(), setting.model.value_size()
    sizes = {"q": heads * keys * t, "k": kv_heads * keys * t, "v": kv_heads * values * t}
    return [SavedTensor("attention", what, numel, numel * e) for what, numel in sizes.items()]


def _alone_rows(
    setting: ActivationSetting, layer: int, heads: int, kv_heads: int, *, separate: bool
) -> list[SavedTensor]:
    """Attention of whole documents; `separate`: its output is not what the projection after it
    reads."""
    setting = in_chunks(setting, layer)
    model, e, t = setting.model, setting.element, sum(setting.lengths)
    rows, d, backend = (
        _inputs(setting, heads, kv_heads, tokens=t),
        model.value_size(),
        attention_backend(setting, layer),
    )
    found = "output of some heads" if separate else "output"
    if backend == "biased":
        return _biased_rows(setting, layer, heads)
    if backend == "cpu_tiled":
        kept = max(setting.lengths) <= KEPT_LENGTH
        numels = (
            _tile_numels(setting.lengths, heads, kv_heads, model.attention.causal) if kept else ()
        )
        return rows + [
            SavedTensor("attention", "probabilities", numel, numel * e) for numel in numels
        ]
    if backend == "split_kv":
        rows.append(SavedTensor("attention", "log-sum", heads * t, heads * t * setting.wide))
        found = found if separate or _read_as_kept(setting, heads) else "output by head"
        return [*rows, SavedTensor("attention", found, heads * d * t, heads * d * t * e)]
    if _reads_projection(setting, layer) and not separate:
        whole = SavedTensor(
            "attention", "queries, keys, values", _projected(setting), _projected(setting) * e
        )
        rows = [rows[0], whole] if model.has_attention_temperature(layer) else [whole]
    calls = kernel_lengths(setting.lengths)
    if backend == "plain":
        pairs = heads * sum(length**2 for length in setting.lengths)
        return [*rows, SavedTensor("attention", "probabilities", pairs, pairs * e)]
    for length in calls if len(calls) > 1 else (t,):
        tokens = heads * length
        rows.append(SavedTensor("attention", "log-sum", tokens, tokens * setting.wide))
        rows.append(SavedTensor("attention", found, tokens * d, tokens * d * e))
    return rows


def _biased_rows(setting: ActivationSetting, layer: int, heads: int) -> list[SavedTensor]:
    """Attention with biases by distance: torch's unfused kernel, which copies what it reads for
    every query head."""
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
    seen = sum(n**2 for n in runs)
    masks = [
        SavedTensor("attention", "mask", seen, seen),
        SavedTensor("attention", "queries that see nothing", t, t),
    ]
    return rows + masks if hidden else rows


def _read_as_kept(setting: ActivationSetting, heads: int) -> bool:
    """Whether the projection reads the output as it is kept for several rows, and not a copy
    ordered by token."""
    return len(setting.lengths) > len(kernel_lengths(setting.lengths)) or heads == 1


def attention_backend(
    setting: ActivationSetting, layer: int
) -> Literal["biased", "split_kv", "cpu_tiled", "torch", "plain"]:
    """How a layer attends, as kernels/attention.py chooses; plain: torch has no fused kernel, and
    keeps all scores."""
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
    """Whether a layer's window hides any token of documents of at most so many."""
    kind = model.attention
    if kind.window is None or not model.has_window(layer):
        return False
    after = kind.window - 1 if kind.window_right is None else kind.window_right
    return kind.window < longest or (not kind.causal and after < longest - 1)


def in_chunks(setting: ActivationSetting, layer: int) -> ActivationSetting:
    """The same with documents as a layer attends to them: where it does so in chunks, each chunk is
    one."""
    kind = setting.model.attention
    if not kind.chunked or kind.window is None or not setting.model.has_window(layer):
        return setting
    size, plain = kind.window, replace(kind, window=None, window_layers=(), chunked=False)
    lengths = [
        min(size, length - start) for length in setting.lengths for start in range(0, length, size)
    ]
    return replace(setting, lengths=tuple(lengths), model=replace(setting.model, attention=plain))


def kv_heads_exchanged(kv_heads: int, ranks: int) -> int:
    """Key/value heads that each of `ranks` ranks has after an exchange of heads, copies included.

    >>> [kv_heads_exchanged(kv_heads, 4) for kv_heads in (8, 4, 2, 6)]
    [2, 1, 1, 3]
    """
    return lcm(kv_heads, ranks) // ranks


def _context_rows(setting: ActivationSetting, layer: int) -> list[SavedTensor]:
    """Attention over the tokens of other ranks, see parallel/context.py."""
    part, e, w, cp, ranks = setting.part, setting.element, setting.wide, setting.cp, setting.cp
    if setting.context == "a2a+ring":
        ranks = setting.a2a
    elif setting.context != "a2a":
        ranks = 1
    heads, kv_heads = part.heads // ranks, kv_heads_exchanged(part.kv_heads, ranks)
    if setting.context == "a2a":
        return _alone_rows(setting, layer, heads, kv_heads, separate=True)
    k, v, t = setting.model.key_size(), setting.model.value_size(), setting.tokens * ranks
    if setting.context == "gather":
        keys = [("keys", kv_heads * k * t * cp), ("values", kv_heads * v * t * cp)]
    else:
        keys = [("keys and values", kv_heads * (k + v) * t)]
    found = (
        "output of some heads"
        if ranks > 1
        else "output"
        if _read_as_kept(setting, heads)
        else "output by head"
    )
    rows = [("q", heads * k * t), *keys, (found, heads * v * t)]
    return [
        *(SavedTensor("attention", what, numel, numel * e) for what, numel in rows),
        SavedTensor("attention", "log-sum", heads * t, heads * t * w),
        *_distance_rows(setting, heads),
    ]


def _distance_rows(setting: ActivationSetting, heads: int) -> list[SavedTensor]:
    """Of biases by distance: those of every distance that there is, and the bucket of each."""
    if setting.model.positions != "relative":
        return []
    distances = 2 * min(setting.model.relative.max_distance, max(setting.lengths) - 1) + 1
    values = heads * distances
    return [
        SavedTensor("attention", "biases of distances", values, values * setting.element),
        SavedTensor("attention", "buckets of distances", distances, 8 * distances),
    ]


def tiled(setting: ActivationSetting) -> bool:
    """Whether our own attention computes these documents, which it does in tiles; else torch's
    kernel."""
    lengths = kernel_lengths(setting.lengths)
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    shortest = (
        SHORTEST_TILED if setting.dtype == "bf16" or len(lengths) > 1 else TILED_LENGTHS.start
    )
    return not setting.accelerator and shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def kernel_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """One length where all documents have the same, and are computed in one go."""
    return tuple(lengths[:1]) if len(set(lengths)) == 1 else tuple(lengths)


def _tile_numels(lengths: Sequence[int], heads: int, kv_heads: int, causal: bool) -> Iterator[int]:
    """Elements of every tile of probabilities: all query heads of some key/value heads, some
    queries and their keys."""
    together, shared = kernel_lengths(lengths), heads // kv_heads
    rows = sum(lengths) // sum(together) * kv_heads
    at_once = max(1, TILE_SCORES // (shared * TILE_ROWS * max(together)))
    starts = [0, *accumulate(together)]
    for head in range(0, rows, at_once):
        for start in range(0, sum(together), TILE_ROWS):
            stop = min(start + TILE_ROWS, sum(together))
            first = starts[bisect_right(starts, start) - 1]
            last = stop if causal else starts[bisect_left(starts, stop)]
            yield min(at_once, rows - head) * shared * (stop - start) * (last - first)

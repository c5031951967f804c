"""What a stage keeps of one microbatch between forward and backward, tensor by tensor, in bytes.

The rows follow what the kernels save, so that on CPUs their sum equals what a meter finds (observe/meter.py), to the
byte. Notation: t tokens of the microbatch on this rank (t / tp between the regions that tensor parallelism divides,
under sp), h hidden, n heads, g key/value heads, d head size, f ffn, v vocabulary (n, g, f, v of this rank), e bytes per
value, w bytes of a statistic. One layer keeps, each row where it is kept first:

    attention_norm   its input and a scale               (h·e + w)·t
    attention.qkv    its input                           h·e·t        not with `norm`: rebuilt from the row above
    attention        queries, keys, values               (n + 2 g)·d·e·t
                     probabilities of short documents    n·(pairs of a tile's queries and keys)·e
                     or, by torch's kernel: a log-sum    n·w·t
    attention.out    its input                           n·d·e·t      torch's kernel has it already
    (the layer)      mlp_norm's input and a scale        (h·e + w)·t
    mlp.gate_up      its input                           h·e·t        not with `norm`
    mlp              gate and up                         2·f·e·t      not with `mlp`
    mlp.down         its input                           f·e·t        not with `mlp_act` or `mlp`

Source of the method: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import lcm
from typing import Literal, NamedTuple

from megalith.config.context import ContextKind
from megalith.config.model import ModelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.plan.parameters import TensorPart, tensor_part
from megalith.plan.recompute import Span, layer_spans, modules_again

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of a weight or activation."""

WIDE = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""Bytes of a statistic: what sums run in."""

TILED_LENGTHS, SHORTEST_TILED = range(64, 2049), 16
"""Tokens of documents whose attention is computed in tiles on CPUs; packed or in bf16 they may be shorter."""

KEPT_LENGTH, TILE_ROWS, TILE_SCORES = 512, 64, 1 << 22
"""As in kernels/tiled_attention.py; a test holds them equal."""


class Row(NamedTuple):
    """One tensor that is kept."""

    region: str
    """The module of a layer, or of the model, that keeps it first; "": the layer or model itself."""

    what: str
    numel: int
    """Elements of the tensor."""

    nbytes: int
    """Of the memory behind it, which is more where the tensor is a part of a larger one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that decides what is kept."""

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
    """Neighbours that exchange heads, with a2a+ring."""

    accelerator: bool = False
    """Attention is always torch's kernel there. Its rows are then an estimate; all others stay exact."""

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
    def wide(self) -> int:
        """w."""
        return WIDE[self.dtype]

    @property
    def part(self) -> TensorPart:
        """n, g, f and v of this rank."""
        return tensor_part(self.model, tp=self.tp, rank=self.tp_rank)


@dataclass(frozen=True, slots=True)
class StageKept:
    """What one microbatch leaves on one rank in one stage, or one model chunk of it."""

    layers: tuple[tuple[Row, ...], ...]
    """By layer; a span of recomputed layers has all its rows at its first."""

    host: tuple[tuple[Row, ...], ...]
    """Of these, what waits in host memory."""

    ends: tuple[Row, ...]
    """Of the embedding, the last norm and the loss, as far as they are in the stage, and the rotations of positions."""

    transient: int
    """Bytes that appear for a while in backward: the largest part that runs again, and what comes back from the host.
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


def total(rows: Sequence[Row]) -> int:
    """Bytes of all."""
    return sum(row.nbytes for row in rows)


def stage_kept(setting: Setting, *, num_layers: int, embedding: bool = True, loss: bool = True) -> StageKept:
    """The rows of a stage with so many layers, and with the embedding and the loss or without."""
    again = modules_again(setting.recompute)
    layer = tuple(layer_rows(setting, again))
    layers: list[tuple[Row, ...]] = []
    host: list[tuple[Row, ...]] = []
    transient = total(whole_layer(setting)) - total(layer)
    for span in layer_spans(setting.recompute, setting.offload, num_layers):
        rows = (span_input(setting),) if span.recomputed else layer
        if span.recomputed:
            transient = max(transient, (span.stop - span.start) * total(layer) - total(rows))
        nothing = [()] * (span.stop - span.start - 1)
        layers += [rows, *nothing]
        host += [offloaded(setting, span, rows), *nothing]
    transient = max(transient, 0) + most_back(
        [(total(r), total(away)) for r, away in zip(layers, host, strict=True) if r]
    )
    return StageKept(tuple(layers), tuple(host), tuple(_ends(setting, num_layers, embedding, loss)), transient)


def most_back(spans: Sequence[tuple[int, int]]) -> int:
    """Bytes that backward has on the device, at most, beyond what forward left there, because they come back.

    spans: (bytes kept, bytes of these in host memory) of each. While backward is in one span, that and the one before
    it are back, and those after it are gone.

    >>> most_back([(9, 9), (9, 9), (9, 9), (10, 0)]), most_back([(9, 9), (10, 0), (10, 0)])
    (9, 0)
    """
    later = list(accumulate((kept - away for kept, away in reversed(spans)), initial=0))[-2::-1]
    before = [0, *(away for _, away in spans)]
    back = [away + earlier - gone for (_, away), earlier, gone in zip(spans, before, later, strict=False)]
    return max([0, *back])


def whole_layer(setting: Setting) -> list[Row]:
    """What a layer keeps when nothing is computed again."""
    return layer_rows(replace(setting, recompute=RecomputeConfig()), ())


def layer_rows(setting: Setting, again: Sequence[str]) -> list[Row]:
    """One layer, of which the parts `again` are computed again in backward."""
    h, e, t, own, part = setting.model.hidden_size, setting.element, setting.tokens, setting.own_tokens, setting.part
    norm = [("input", own * h, own * h * e), ("scale", own, own * setting.wide)]
    normed = own * h
    inner = part.heads * setting.model.head_size() * t
    rows = [Row("attention_norm", *one) for one in norm]
    if "norm" not in again:
        rows.append(Row("attention.qkv", "input", normed, normed * e))
    core = _core_rows(setting, "core_attention" in again)
    rows += core
    if not any(row.what == "output" and row.numel == inner for row in core):
        rows.append(Row("attention.out", "input", inner, inner * e))
    rows += [Row("", f"{what} of mlp_norm", numel, nbytes) for what, numel, nbytes in norm]
    if "norm" not in again:
        rows.append(Row("mlp" if "mlp" in again else "mlp.gate_up", "input", normed, normed * e))
    if "mlp" not in again:
        rows.append(Row("mlp", "gate and up", 2 * part.ffn * t, 2 * part.ffn * t * e))
        if "mlp_act" not in again:
            rows.append(Row("mlp.down", "input", part.ffn * t, part.ffn * t * e))
    return rows


def span_input(setting: Setting) -> Row:
    """What a span of recomputed layers keeps: its input, or one tp-th of it, padded."""
    numel = setting.own_tokens * setting.model.hidden_size
    if setting.recompute.shard_inputs:
        numel = -(-numel // setting.tp)
    return Row("", "input of recomputed layers", numel, numel * setting.element)


def offloaded(setting: Setting, span: Span, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows that wait in host memory: those of offloaded layers that are large enough."""
    return tuple(row for row in rows if span.offloaded and row.numel >= setting.offload.min_numel)


def _ends(setting: Setting, num_layers: int, embedding: bool, loss: bool) -> Iterator[Row]:
    """What does not belong to a layer."""
    h, e, t, own = setting.model.hidden_size, setting.element, setting.tokens, setting.own_tokens
    if embedding:
        yield Row("embed", "rows of the table", t, 8 * t)
        yield Row("embed", "which rows are mine", t, t)
    if num_layers:
        half = setting.model.head_size() // 2 * t
        yield Row("rotary", "cosines", half, half * e)
        yield Row("rotary", "sines", half, half * e)
    if loss:
        yield Row("norm", "input", own * h, own * h * e)
        yield Row("norm", "scale", own, own * setting.wide)
        yield Row("", "gradient of the head's input", t * h, t * h * e)
        rows = setting.part.vocab * h
        yield Row("", "gradient of the head's weight", rows, rows * setting.wide)


# --- attention


def _core_rows(setting: Setting, again: bool) -> list[Row]:
    """Between the projections: what attention itself keeps, its output left out unless it keeps one of its own."""
    part, d, e, t = setting.part, setting.model.head_size(), setting.element, setting.tokens
    q, k = part.heads * d * t, part.kv_heads * d * t
    if again:
        return [Row("attention", what, numel, numel * e) for what, numel in (("q", q), ("k", k), ("v", k))]
    if setting.cp > 1:
        return _context_rows(setting)
    return _alone_rows(setting, part.heads, part.kv_heads, separate=False)


def _alone_rows(setting: Setting, heads: int, kv_heads: int, *, separate: bool) -> list[Row]:
    """Attention of whole documents; `separate`: its output is not what the projection after it reads."""
    d, e, t = setting.model.head_size(), setting.element, sum(setting.lengths)
    q, k = heads * d * t, kv_heads * d * t
    rows = [Row("attention", what, numel, numel * e) for what, numel in (("q", q), ("k", k), ("v", k))]
    if tiled(setting):
        kept = max(setting.lengths) <= KEPT_LENGTH
        numels = _tile_numels(setting.lengths, heads, kv_heads) if kept else ()
        return rows + [Row("attention", "probabilities", numel, numel * e) for numel in numels]
    calls = kernel_lengths(setting.lengths)
    for length in calls if len(calls) > 1 else (t,):
        tokens = heads * length
        rows.append(Row("attention", "log-sum", tokens, tokens * setting.wide))
        rows.append(Row("attention", "output of some heads" if separate else "output", tokens * d, tokens * d * e))
    return rows


def kv_heads_exchanged(kv_heads: int, ranks: int) -> int:
    """Key/value heads that each of `ranks` ranks has after an exchange of heads, copies included.

    >>> [kv_heads_exchanged(kv_heads, 4) for kv_heads in (8, 4, 2, 6)]
    [2, 1, 1, 3]
    """
    return lcm(kv_heads, ranks) // ranks


def _context_rows(setting: Setting) -> list[Row]:
    """Attention over the tokens of other ranks, see parallel/context.py."""
    part, e, w, cp, ranks = setting.part, setting.element, setting.wide, setting.cp, setting.cp
    if setting.context == "a2a+ring":
        ranks = setting.a2a
    elif setting.context != "a2a":
        ranks = 1
    heads, kv_heads = part.heads // ranks, kv_heads_exchanged(part.kv_heads, ranks)
    if setting.context == "a2a":
        return _alone_rows(setting, heads, kv_heads, separate=True)
    d, t = setting.model.head_size(), setting.tokens * ranks
    if setting.context == "gather":
        keys = [("keys", kv_heads * d * t * cp), ("values", kv_heads * d * t * cp)]
    else:
        keys = [("keys and values", 2 * kv_heads * d * t)]
    rows = [("q", heads * d * t), *keys, ("output" if ranks == 1 else "output of some heads", heads * d * t)]
    return [
        *(Row("attention", what, numel, numel * e) for what, numel in rows),
        Row("attention", "log-sum", heads * t, heads * t * w),
    ]


def tiled(setting: Setting) -> bool:
    """Whether our own attention computes these documents, which it does in tiles; else torch's kernel."""
    lengths = kernel_lengths(setting.lengths)
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    shortest = SHORTEST_TILED if setting.dtype == "bf16" or len(lengths) > 1 else TILED_LENGTHS.start
    return not setting.accelerator and shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def kernel_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """One length where all documents have the same, and are computed in one go."""
    return tuple(lengths[:1]) if len(set(lengths)) == 1 else tuple(lengths)


def _tile_numels(lengths: Sequence[int], heads: int, kv_heads: int) -> Iterator[int]:
    """Elements of every tile of probabilities: all query heads of some key/value heads, some queries and their keys."""
    together, shared = kernel_lengths(lengths), heads // kv_heads
    rows = sum(lengths) // sum(together) * kv_heads
    at_once = max(1, TILE_SCORES // (shared * TILE_ROWS * max(together)))
    starts = [0, *accumulate(together)]
    for head in range(0, rows, at_once):
        for start in range(0, sum(together), TILE_ROWS):
            stop = min(start + TILE_ROWS, sum(together))
            first = starts[bisect_right(starts, start) - 1]
            yield min(at_once, rows - head) * shared * (stop - start) * (stop - first)

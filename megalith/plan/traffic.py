"""What a rank sends in one step, axis by axis, in bytes on the wire, and what that can hide behind.

A collective of a buffer of S bytes over r ranks sends (r - 1)/r · S from each of them in a ring (all-gather,
reduce-scatter, all-to-all), an all-reduce twice as much; a message to another stage sends what it is. Single numbers
(the loss, norms, flags) are left out, and so is the host's own talk.

Notation: t tokens of a microbatch on one rank, h hidden, g key/value heads and n query heads of this rank, d head size,
e bytes per weight or activation, L layers of this rank, M microbatches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from megalith.config.context import ContextKind
from megalith.config.model import ModelConfig
from megalith.plan.activations import kv_heads_exchanged
from megalith.plan.adapters import trained
from megalith.plan.context import kind_of_layer
from megalith.plan.costs import WIDTHS, loss_chunk
from megalith.plan.memory import WIRE_BYTES, boundary_bytes, buffer_plan, gathered_units, keeps_gathered, kept_rows
from megalith.plan.parameters import HeldParameter, tensor_part
from megalith.plan.recompute import layer_spans, modules_again
from megalith.plan.stages import Stage
from megalith.plan.transfers import SENDS, neighbour
from megalith.plan.workload import Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One sort of collective, or of message, that a rank takes part in during a step."""

    axis: str
    """tp, cp, pp or dp."""

    what: str
    """What is sent."""

    kind: Collective
    ranks: int
    """In the group; two for a message."""

    calls: int
    """In one step."""

    nbytes: int
    """On the wire, sent by this rank, of all calls together."""

    behind: str = ""
    """Work that can go on meanwhile; empty: the work that comes next needs it."""


def sent(kind: Collective, nbytes: int, ranks: int) -> float:
    """What one of `ranks` ranks sends when a buffer of `nbytes` goes round.

    >>> sent("all_reduce", 1000, 4), sent("all_gather", 1000, 4), sent("message", 1000, 2)
    (1500.0, 750.0, 1000.0)
    """
    if kind == "message":
        return float(nbytes)
    return nbytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def step_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> list[Traffic]:
    """Everything that the ranks at this place send in one step."""
    rows = [
        *_tensor_traffic(workload, pp_rank),
        *_shared_slices(workload, pp_rank, tp_rank),
        *_context_traffic(workload, pp_rank, tp_rank),
        *_pipeline_traffic(workload, pp_rank),
        *_data_traffic(workload, pp_rank, tp_rank),
    ]
    return [row for row in rows if row.ranks > 1 and row.nbytes > 0]


def _row(axis: str, what: str, kind: Collective, *, ranks: int, calls: int, nbytes: int, behind: str = "") -> Traffic:
    """nbytes: of the whole buffer, all calls together."""
    return Traffic(axis, what, kind, ranks, calls, round(sent(kind, nbytes, ranks)), behind)


# --- tp


def _tensor_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """t · h in and out of every attention and every MLP, forward and backward; and the head's few numbers per token.

    What enters a latent attention is shorter: see `entered_features`.
    """
    run, t, many = workload.run, workload.tokens, workload.num_microbatches
    tp, width, h = run.parallel.tp, WIDTHS[run.precision.params], run.model.hidden_size
    one = t * h * width.value
    stages = runs_of_layers(workload, pp_rank)
    again = [spans_again(workload, stage) for stage in stages]
    spans, inputs, losses = sum(map(len, again)), sum(s.embedding for s in stages), sum(s.loss for s in stages)
    parts = sum(divided_parts(run.model, stage.layers) for stage in stages)
    entered = [x for stage in stages for layer in stage.layers for x in entered_features(run.model, layer)]
    more, left = list[int](), 0  # once more
    for stage, counts in zip(stages, again, strict=True):
        repeated = stage.layers[: sum(counts)]
        more += [x for layer in repeated for x in entered_features(run.model, layer)]
        left += divided_parts(run.model, repeated) - _sums_at_ends(run.model, stage, counts)
    if run.recompute.shard_inputs:
        inputs_again = spans * many
        yield _row(
            "tp", "inputs of layers run again", "all_gather",
            ranks=tp, calls=inputs_again, nbytes=inputs_again * one,
        )  # fmt: skip
    behind = "matmuls" if run.parallel.overlap else ""
    ring = "matmuls" if run.parallel.rings else ""
    if run.parallel.sp:
        thinking = sum(run.model.mlp_part(layer) == "full" for stage in stages for layer in stage.layers)
        inside = thinking if "mlp" in modules_again(run.recompute) else 0
        read = [x for stage in stages for layer in stage.layers for x in entered_features(run.model, layer, read=True)]
        rows: list[tuple[str, Collective, list[int], str]] = [
            ("tokens, gathered", "all_gather", [*entered, *more, *[h] * (inside + losses)], ring),
            ("gradients, gathered", "all_gather", [h] * (parts + inputs), ring),
            ("tokens, gathered again", "all_gather", read, behind),
            ("sums, scattered", "reduce_scatter", [h] * (parts + left + inputs), ring),
            ("gradients, scattered", "reduce_scatter", [*entered, *[h] * losses], behind),
        ]
    else:
        rows = [
            ("sums of activations", "all_reduce", [h] * (parts + left + inputs), ""),
            ("sums of gradients", "all_reduce", [*entered, *[h] * losses], behind),
        ]
    for what, kind, features, hidden in rows:
        nbytes = sum(features) * many * t * width.value
        yield _row("tp", what, kind, ranks=tp, calls=len(features) * many, nbytes=nbytes, behind=hidden)
    chunks = -(-t // loss_chunk(run.model.vocab_size, ranks=tp))
    yield _row(
        "tp", "statistics of logits", "all_reduce",
        ranks=tp, calls=2 * chunks * losses * many, nbytes=3 * t * width.sums * losses * many,
    )  # fmt: skip


def runs_of_layers(workload: Workload, pp_rank: int) -> list[Stage]:
    """A rank's chunks; and each depth that predicts further ahead, which is a layer like the last one between an
    embedding and a loss of its own."""
    chunks, last = workload.chunks(pp_rank), workload.run.model.num_layers - 1
    depth = Stage(range(last, last + 1), embedding=True, loss=True)
    return [*chunks, *[depth] * (workload.run.model.mtp.depths if any(chunk.loss for chunk in chunks) else 0)]


def entered_features(model: ModelConfig, layer: int, *, read: bool = False) -> list[int]:
    """Features of everything that goes from whole to divided work in a layer: h for each part; into latent attention
    short vectors, and the key that all heads share, which no weight reads (`read`: without it)."""
    mla, h = model.mla, model.hidden_size
    attention = [h] if mla is None else [mla.q_rank or h, mla.kv_rank, *([] if read else [mla.rope_dim])]
    return attention * (model.attention_part(layer) == "full") + [h] * (model.mlp_part(layer) == "full")


def divided_parts(model: ModelConfig, layers: Sequence[int]) -> int:
    """Attentions and MLPs of some layers, which tensor-parallel ranks divide."""
    return sum((model.attention_part(n) == "full") + (model.mlp_part(n) == "full") for n in layers)


def _sums_at_ends(model: ModelConfig, stage: Stage, counts: Sequence[int]) -> int:
    """Spans of so many layers, from a stage's first on, whose last act is the sum of a divided part."""
    lasts = [stage.layers[end - 1] for end in accumulate(counts)]
    ends = [model.attention_part(n) if model.mlp_part(n) == "none" else model.mlp_part(n) for n in lasts]
    return ends.count("full")


def spans_again(workload: Workload, stage: Stage) -> list[int]:
    """Layers of each span that runs forward twice; the sum that ends the span is not taken again."""
    if not stage.layers:
        return []
    spans = layer_spans(workload.run.recompute, workload.run.offload, len(stage.layers))
    return [span.stop - span.start for span in spans if span.recomputed]


def _shared_slices(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Once a step: gradients of what several tensor-parallel ranks hold and have each seen a part of the work of."""
    run = workload.run
    tp, wide = run.parallel.tp, WIDTHS[run.precision.params].sums
    held = trained(workload.parameters(pp_rank, tp_rank))
    copies = tensor_part(run.model, tp=tp, rank=tp_rank).kv_copies
    same = [one for one in held if not one.cut]
    heads = sum(one.numel for one in same if one.summed == "heads")
    whole = sum(one.numel for one in same if one.summed == "always" or (one.summed == "sp" and run.parallel.sp))
    yield _row(
        "tp", "gradients of shared heads", "all_reduce",
        ranks=copies, calls=1 if heads else 0, nbytes=heads * wide // workload.shards,
    )  # fmt: skip
    yield _row(
        "tp", "gradients of norms", "all_reduce", ranks=tp, calls=1 if whole else 0,
        nbytes=whole * wide // workload.shards,
    )  # fmt: skip


# --- cp


def _context_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Keys and values of every layer to the ranks that share its tokens, and their gradients back."""
    run = workload.run
    if run.parallel.cp == 1:
        return
    layers: Counter[tuple[ContextKind, int]] = Counter()  # by the key/value heads of one rank
    again: Counter[tuple[ContextKind, int]] = Counter()
    for stage in runs_of_layers(workload, pp_rank):
        repeated = stage.layers[: sum(spans_again(workload, stage))]
        for layer in (layer for layer in stage.layers if run.model.attention_part(layer) == "full"):
            heads = tensor_part(run.model.at(layer), tp=run.parallel.tp, rank=tp_rank).kv_heads
            sort = kind_of_layer(run.parallel.context, layer), heads
            layers[sort], again[sort] = layers[sort] + 1, again[sort] + (layer in repeated)
    if "core_attention" in modules_again(run.recompute):
        again = layers
    for kind, heads in sorted(layers):
        many, once_more = layers[kind, heads], again[kind, heads]
        passes = _Passes(many * workload.num_microbatches, once_more * workload.num_microbatches)
        yield from _exchange(workload, tp_rank, kind, heads, passes)


class _Passes(NamedTuple):
    """Layers times microbatches in a step."""

    all: int
    again: int
    """Of them, those whose attention runs forward twice."""


def _exchange(workload: Workload, tp_rank: int, kind: ContextKind, kv_heads: int, passes: _Passes) -> Iterator[Traffic]:
    """What layers of one kind send in `passes.all` passes forward and backward, and once more forward in some."""
    run, t = workload.run, workload.tokens
    part, k, v = tensor_part(run.model, tp=run.parallel.tp, rank=tp_rank), run.model.key_size(), run.model.value_size()
    width, ring, near = WIDTHS[run.precision.params], workload.grid.size("cp_ring"), workload.grid.size("cp_a2a")
    keys, forwards = kv_heads * (k + v) * t, passes.all + passes.again
    if kind == "gather":
        cp, whole = run.parallel.cp, run.parallel.cp * keys * width.value
        yield _row("cp", "keys and values", "all_gather", ranks=cp, calls=forwards, nbytes=forwards * whole)
        yield _row("cp", "their gradients", "reduce_scatter", ranks=cp, calls=passes.all, nbytes=passes.all * whole)
        return
    behind = "attention" if run.parallel.overlap else ""
    if kind in ("a2a", "a2a+ring"):
        ranks = near if kind == "a2a+ring" else run.parallel.cp
        own_keys = kv_heads_exchanged(kv_heads, ranks)
        there, back = part.heads * k + ranks * own_keys * (k + v), part.heads * v
        # The way back of the results is not taken again where only attention itself is.
        results = forwards if run.recompute.granularity == "full" else passes.all
        sent_features = (forwards + passes.all) * there + (results + passes.all) * back
        calls = forwards + results + 2 * passes.all
        yield _row(
            "cp", "heads for tokens", "all_to_all", ranks=ranks, calls=calls, nbytes=sent_features * t * width.value
        )  # fmt: skip
        keys = own_keys * (k + v) * t * ranks
    if kind in ("ring", "a2a+ring"):
        steps = ring - 1
        nbytes = steps * keys * ((forwards + passes.all) * width.value + passes.all * width.sums)
        calls = steps * (forwards + 2 * passes.all)
        yield _row(
            "cp", "keys, values, their gradients", "message", ranks=ring, calls=calls, nbytes=nbytes, behind=behind
        )


# --- pp


def _pipeline_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """t · h for each microbatch to the next stage, its gradient to the one before; nothing within a rank."""
    schedule, many = workload.schedule, workload.num_microbatches
    behind = "other microbatches" if workload.run.parallel.overlap else ""
    for direction in SENDS:
        targets = [neighbour(schedule, pp_rank, chunk, direction) for chunk in range(schedule.num_chunks)]
        calls = many * sum(target is not None and target[0] != pp_rank for target in targets)
        what = "activations onward" if direction == "forward" else "gradients back"
        nbytes = calls * boundary_bytes(workload)
        yield _row("pp", what, "message", ranks=2, calls=calls, nbytes=nbytes, behind=behind)
    yield from _tied_table(workload, pp_rank)
    yield from _biases(workload, pp_rank)


def _tied_table(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """The gradient of a table that the first and the last stage both hold, to each other holder."""
    run, holders = workload.run, workload.table_holders
    if not run.model.shares_table() or pp_rank not in holders:
        return
    rows = tensor_part(run.model, tp=run.parallel.tp, rank=0).vocab
    others = len(holders) - 1
    nbytes = rows * run.model.hidden_size * WIDTHS[run.precision.params].sums // workload.shards
    yield _row("pp", "gradient of the tied table", "message", ranks=len(holders), calls=others, nbytes=others * nbytes)


def _biases(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """The gradient of the table of relative positions, to each other stage with layers."""
    run, holders = workload.run, workload.bias_holders
    if pp_rank not in holders:
        return
    numel = run.model.relative.buckets * tensor_part(run.model, tp=run.parallel.tp, rank=0).heads
    others = len(holders) - 1
    nbytes = numel * WIDTHS[run.precision.params].sums // workload.shards
    yield _row("pp", "gradient of the biases", "message", ranks=len(holders), calls=others, nbytes=others * nbytes)


# --- dp


def _data_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Gradients over dp and cp, once a step or, with zero=2, each microbatch; with ZeRO the weights come back."""
    run, many = workload.run, workload.num_microbatches
    p, width = run.parallel, WIDTHS[run.precision.params]
    parameters = workload.parameters(pp_rank, tp_rank)
    plan = buffer_plan(workload, trained(parameters))
    calls, ranks, replicas = len(plan.buckets), workload.shards, workload.grid.size("dp_replica")
    backward, forward = ("last backward", "next forward") if p.overlap else ("", "")
    if ranks == 1:
        everyone = workload.dp * p.cp
        nbytes = width.sums * plan.numel
        yield _row("dp", "gradients", "all_reduce", ranks=everyone, calls=calls, nbytes=nbytes, behind=backward)
        return
    if p.zero == 3:
        yield from _sharded_traffic(workload, parameters)
        return
    wire = min(width.sums, WIRE_BYTES[p.reduce_dtype]) if p.reduce_dtype != "fp32" else width.sums
    rounds = many if p.zero == 2 else 1
    if p.zero == 2 and p.overlap:
        backward = "backward"
    yield _row(
        "dp", "gradients", "reduce_scatter", ranks=ranks, calls=rounds * calls, nbytes=rounds * wire * plan.numel,
        behind=backward,
    )  # fmt: skip
    yield _row(
        "dp", "gradients, over replicas", "all_reduce", ranks=replicas, calls=calls,
        nbytes=width.sums * plan.numel // ranks, behind=backward,
    )  # fmt: skip
    yield _row(
        "dp", "updated weights", "all_gather", ranks=ranks, calls=calls, nbytes=width.value * plan.numel, behind=forward
    )


def _sharded_traffic(workload: Workload, parameters: Sequence[HeldParameter]) -> Iterator[Traffic]:
    """zero=3: a layer's weights for each forward and each backward, a table's for forward; gradients each microbatch.

    In pipelines weights are gathered once a step. A parameter whose rows do not divide is sent padded.
    """
    run, ranks, many = workload.run, workload.shards, workload.num_microbatches
    width, units = WIDTHS[run.precision.params], gathered_units(workload, parameters)
    padded, summed = (
        [sum(kept_rows(one, 0, ranks) * one.columns for one in some(unit.parameters)) * ranks for unit in units]
        for some in (list, trained)
    )
    times = [1 if keeps_gathered(workload) else many * (2 if unit.name.startswith("layers.") else 1) for unit in units]
    behind = "the layer before" if run.parallel.overlap else ""
    weights = width.value * sum(numel * count for numel, count in zip(padded, times, strict=True))
    yield _row("dp", "weights", "all_gather", ranks=ranks, calls=sum(times), nbytes=weights, behind=behind)
    yield _row(
        "dp", "gradients", "reduce_scatter", ranks=ranks, calls=many * len(units),
        nbytes=many * width.sums * sum(summed), behind=behind,
    )  # fmt: skip
    yield _row(
        "dp", "gradients, over replicas", "all_reduce", ranks=workload.grid.size("dp_replica"), calls=len(units),
        nbytes=width.sums * sum(summed) // ranks, behind=behind,
    )  # fmt: skip

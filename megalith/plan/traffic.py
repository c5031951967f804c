"""What a rank sends in one step, axis by axis, in bytes on the wire, and what that can hide behind.

A collective of a buffer of S bytes over r ranks sends (r - 1)/r · S from each of them in a ring
(all-gather, reduce-scatter, all-to-all), an all-reduce twice as much; a message to another stage
sends what it is. Single numbers (the loss, norms, flags) are left out, and so is the host's own
talk.

Notation: t tokens of a microbatch on one rank, h hidden, g key/value heads and n query heads of
this rank, d head size, e bytes per weight or activation, L layers of this rank, M microbatches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from megalith.config.context import ContextKind
from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.train import TrainRun
from megalith.plan.activations import kv_heads_exchanged
from megalith.plan.adapters import trained
from megalith.plan.context import kind_of_layer
from megalith.plan.costs import WIDTHS, tokens_of_loss
from megalith.plan.frozen import first_trained_layer
from megalith.plan.memory import (
    WIRE_BYTES,
    GatheredUnit,
    borders,
    boundary_tensors,
    buffer_plan,
    divides,
    gathered_units,
    keeps_gathered,
    mixture_of,
    sharded_rows,
)
from megalith.plan.parameters import tensor_part
from megalith.plan.recompute import layer_spans, mlp_in_chunks, modules_again
from megalith.plan.stages import Stage
from megalith.plan.transfers import SENDS
from megalith.plan.workload import Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One sort of collective, or of message, that a rank takes part in during a step."""

    axis: str
    """tp, cp, pp or dp; of experts ep, etp or edp; or several, joined by _."""

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
        *_expert_traffic(workload, pp_rank),
        *_pipeline_traffic(workload, pp_rank),
        *_data_traffic(workload, pp_rank, tp_rank),
    ]
    return [row for row in rows if row.ranks > 1 and row.nbytes > 0]


def _row(
    axis: str, what: str, kind: Collective, *, ranks: int, calls: int, nbytes: int, behind: str = ""
) -> Traffic:
    """nbytes: of the whole buffer, all calls together."""
    return Traffic(axis, what, kind, ranks, calls, round(sent(kind, nbytes, ranks)), behind)


# --- tp


GATHERED = "tokens, gathered"
"""Also by what runs again."""


def _tensor_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """t · h in and out of every attention and every MLP, forward and backward; and the head's few
    numbers per token.

    What enters a latent attention is shorter: see `gathered_input_features`.
    """
    run, t, many = workload.run, workload.tokens, workload.num_microbatches
    tp, width, h = run.parallel.tp, WIDTHS[run.precision.params], run.model.hidden_size
    one = t * h * width.value
    stages = runs_of_layers(workload, pp_rank)
    again = [spans_again(workload, stage) for stage in stages]
    spans, inputs, losses = (
        sum(map(len, again)),
        sum(s.embedding for s in stages),
        sum(s.loss for s in stages),
    )
    parts = sum(divided_parts(run.model, stage.layers) for stage in stages)
    entered = [
        x
        for stage in stages
        for layer in stage.layers
        for x in gathered_input_features(run.model, layer)
    ]
    more, left, alone = list[int](), 0, modules_again(run.recompute)  # once more
    for stage, counts in zip(stages, again, strict=True):
        repeated = stage.layers[: sum(counts)]
        more += [x for layer in repeated for x in gathered_input_features(run.model, layer)]
        left += divided_parts(run.model, repeated) - _sums_at_ends(run.model, stage, counts)
        gates = sum(_gates(run.model, layer) for layer in stage.layers)
        left += gates if {"mlp", "shared_experts"} & {*alone} else 0
        if "mla_up_proj" in alone:
            more += [x for layer in stage.layers for x in attention_features(run.model, layer)]
    if run.recompute.shard_inputs:
        inputs_again = spans * many
        yield _row(
            "tp",
            "inputs of layers run again",
            "all_gather",
            ranks=tp,
            calls=inputs_again,
            nbytes=inputs_again * one,
        )
    behind = "matmuls" if run.parallel.overlap else ""
    ring = "matmuls" if run.parallel.tp_comm_overlap else ""
    if run.parallel.sp:
        inside = sum(
            _mlp_again(run.model, layer, alone) for stage in stages for layer in stage.layers
        )
        read = [
            x
            for stage in stages
            for layer in stage.layers
            for x in gathered_input_features(run.model, layer, read=True)
        ]
        rows: list[tuple[str, Collective, list[int], str]] = [
            (GATHERED, "all_gather", [*entered, *more, *[h] * (inside + losses)], ring),
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
    divided = sum(
        mlp_in_chunks(run.recompute, run.model, layer) for stage in stages for layer in stage.layers
    )
    num_mtp_layers = divided * (run.recompute.mlp_chunks - 1)
    for what, kind, features, hidden in rows:
        nbytes, calls = (
            sum(features) * many * t * width.value,
            len(features) + num_mtp_layers * (1 + (what == GATHERED)),
        )
        yield _row("tp", what, kind, ranks=tp, calls=calls * many, nbytes=nbytes, behind=hidden)
    chunks = -(-t // tokens_of_loss(run))
    yield _row(
        "tp",
        "statistics of logits",
        "all_reduce",
        ranks=tp,
        calls=2 * chunks * losses * many,
        nbytes=3 * t * width.sums * losses * many,
    )


def runs_of_layers(workload: Workload, pp_rank: int) -> list[Stage]:
    """A rank's chunks; and of each MTP depths a layer like the last one
    behind an embedding of its own, and a loss, where these are."""
    chunks, model = workload.chunks(pp_rank), workload.run.model
    last = model.num_layers - 1
    layers = [Stage(range(last, last + 1), embedding=True)] * sum(
        chunk.num_mtp_layers for chunk in chunks
    )
    losses = [Stage(range(0), loss=True)] * (
        model.mtp.num_layers * sum(chunk.loss for chunk in chunks)
    )
    return [*chunks, *layers, *losses]


def gathered_input_features(model: ModelConfig, layer: int, *, read: bool = False) -> list[int]:
    """Features of everything that goes from whole to divided work in a layer: h for each part;
    into latent attention short vectors, and the key that all heads share, which no weight reads
    (`read`: without it)."""
    h = model.hidden_size
    looking = [h, h] * model.uses_cross_layer_source(layer)  # what looks, and the memory
    return attention_features(model, layer, read=read) + looking + [h] * divides_mlp(model, layer)


def attention_features(model: ModelConfig, layer: int, *, read: bool = False) -> list[int]:
    """The same of a layer's attention alone."""
    mla, h = model.mla, model.hidden_size
    attention = (
        [h] if mla is None else [mla.q_rank or h, mla.kv_rank, *([] if read else [mla.rope_dim])]
    )
    return attention * (model.attention_part(layer) == "full")


def divides_mlp(model: ModelConfig, layer: int) -> bool:
    """Whether tensor-parallel ranks divide a layer's MLP; of a mixture, the experts for all
    tokens."""
    if not model.has_experts(layer):
        return model.mlp_part(layer) == "full"
    return model.moe is not None and model.moe.shared_ffn_hidden_size is not None


def divided_parts(model: ModelConfig, layers: Sequence[int]) -> int:
    """Attentions and MLPs of some layers, which tensor-parallel ranks divide."""
    return sum(
        (model.attention_part(n) == "full")
        + model.uses_cross_layer_source(n)
        + divides_mlp(model, n)
        for n in layers
    )


def _sums_at_ends(model: ModelConfig, stage: Stage, counts: Sequence[int]) -> int:
    """KeySpans of so many layers, from a stage's first on, whose last act is the sum of a divided
    part."""
    lasts = [] if _normed_after(model) else [stage.layers[end - 1] for end in accumulate(counts)]
    return sum(
        model.attention_part(n) == "full"
        if model.mlp_part(n) == "none"
        else divides_mlp(model, n) and not _gates(model, n)
        for n in lasts
    )


def _normed_after(model: ModelConfig) -> bool:
    """Whether a norm keeps what a layer's last branch gives."""
    return model.norm_placement != "before"


def _gates(model: ModelConfig, layer: int) -> bool:
    """Whether a product follows the sum over the parts of the experts for all tokens, and wants
    that sum once more."""
    return model.moe is not None and model.has_experts(layer) and model.moe.shared_gate


def spans_again(workload: Workload, stage: Stage) -> list[int]:
    """Layers of each span that runs forward twice; the sum that ends the span is not taken
    again."""
    if not stage.layers:
        return []
    run, cut = workload.run, workload.run.model.has_cross_layer_source_before(stage.layers)
    spans = layer_spans(run.recompute, run.offload, len(stage.layers), cut=cut)
    return [span.stop - span.start for span in spans if span.recomputed]


def _shared_slices(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Once a step: gradients of what several tensor-parallel ranks hold and have each seen a part
    of the work of."""
    run = workload.run
    tp, wide = run.parallel.tp, WIDTHS[run.precision.params].sums
    held = trained(workload.parameters(pp_rank, tp_rank))
    copies = tensor_part(run.model, tp=tp, rank=tp_rank).kv_copies
    same = [one for one in held if not one.cut]
    heads = sum(one.numel for one in same if one.summed == "heads")
    whole = sum(
        one.numel
        for one in same
        if one.summed == "always" or (one.summed == "sp" and run.parallel.sp)
    )
    yield _row(
        "tp",
        "gradients of shared heads",
        "all_reduce",
        ranks=copies,
        calls=1 if heads else 0,
        nbytes=heads * wide // workload.shards,
    )
    yield _row(
        "tp",
        "gradients of norms",
        "all_reduce",
        ranks=tp,
        calls=1 if whole else 0,
        nbytes=whole * wide // workload.shards,
    )


# --- cp


def _context_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Keys and values of every layer to the ranks that share its tokens, and their gradients
    back."""
    run = workload.run
    if run.parallel.cp == 1:
        return
    layers: Counter[tuple[ContextKind, int]] = Counter()  # by the key/value heads of one rank
    again: Counter[tuple[ContextKind, int]] = Counter()
    for stage in runs_of_layers(workload, pp_rank):
        repeated = stage.layers[: sum(spans_again(workload, stage))]
        for layer in stage.layers:
            attentions = (
                run.model.attention_part(layer) == "full"
            ) + run.model.uses_cross_layer_source(layer)
            heads = tensor_part(run.model.at(layer), tp=run.parallel.tp, rank=tp_rank).kv_heads
            sort = kind_of_layer(run.parallel.context, layer), heads
            layers[sort] += attentions
            again[sort] += attentions * (layer in repeated)
    if {"core_attention", "mla_up_proj"} & {*modules_again(run.recompute)}:
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


def _exchange(
    workload: Workload, tp_rank: int, kind: ContextKind, kv_heads: int, passes: _Passes
) -> Iterator[Traffic]:
    """What layers of one kind send in `passes.all` passes forward and backward, and once more
    forward in some."""
    run, t = workload.run, workload.tokens
    part, k, v = (
        tensor_part(run.model, tp=run.parallel.tp, rank=tp_rank),
        run.model.key_size(),
        run.model.value_size(),
    )
    width, ring, near = (
        WIDTHS[run.precision.params],
        workload.grid.size("cp_ring"),
        workload.grid.size("cp_a2a"),
    )
    keys, forwards = kv_heads * (k + v) * t, passes.all + passes.again
    if kind == "gather":
        cp, whole = run.parallel.cp, run.parallel.cp * keys * width.value
        yield _row(
            "cp", "keys and values", "all_gather", ranks=cp, calls=forwards, nbytes=forwards * whole
        )
        yield _row(
            "cp",
            "their gradients",
            "reduce_scatter",
            ranks=cp,
            calls=passes.all,
            nbytes=passes.all * whole,
        )
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
            "cp",
            "heads for tokens",
            "all_to_all",
            ranks=ranks,
            calls=calls,
            nbytes=sent_features * t * width.value,
        )
        keys = own_keys * (k + v) * t * ranks
    if kind in ("ring", "a2a+ring"):
        steps = ring - 1
        nbytes = steps * keys * ((forwards + passes.all) * width.value + passes.all * width.sums)
        calls = steps * (forwards + 2 * passes.all)
        yield _row(
            "cp",
            "keys, values, their gradients",
            "message",
            ranks=ring,
            calls=calls,
            nbytes=nbytes,
            behind=behind,
        )


# --- experts


def _mlp_again(model: ModelConfig, layer: int, again: Sequence[str]) -> bool:
    """Whether a layer's MLP, or what a mixture has for all tokens, runs again by itself."""
    shared = "shared_experts" in again and model.has_experts(layer)
    return divides_mlp(model, layer) and ("mlp" in again or shared)


def _expert_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Rows to the ranks with their experts and back, forward and backward, when all experts are
    equally busy.

    The rounds of sinkhorn's plan are left out, whose number only the scores know.
    """
    run = workload.run
    model, grid = run.model, workload.grid.experts
    if model.moe is None or grid is None:
        return
    passes = _mixtures(workload, pp_rank)
    if grid.size("ep") * grid.size("etp") > 1:
        gathers = run.parallel.dispatcher == "allgather"  # any other is taken for an exchange
        yield from (_gather_rows if gathers else _exchange_rows)(workload, model.moe, passes)
    yield from _choices_together(workload, model.moe, passes)
    if model.moe.router.expert_bias and passes.all:
        ranks = workload.dp * run.parallel.cp * run.parallel.tp
        counts = passes.all // workload.num_microbatches * model.moe.num_experts
        yield _row(
            "dp_cp_tp",
            "counts of choices, for biases",
            "all_reduce",
            ranks=ranks,
            calls=1,
            nbytes=8 * counts,
        )
    if model.moe.aux_loss.quantile and passes.all:
        ranks = workload.dp * run.parallel.cp * run.parallel.tp
        offsets = passes.all // workload.num_microbatches * (model.moe.num_experts + 1)
        yield _row(
            "dp_cp_tp", "offsets of experts", "all_reduce", ranks=ranks, calls=1, nbytes=8 * offsets
        )


class _Mixtures(NamedTuple):
    """Mixtures times microbatches in a step."""

    all: int
    again: int
    """Of them, those that choose, send and answer once more in backward."""

    back_again: int
    """Of these, those whose answers also come back once more, because something after them reads
    the sum."""


def _mixtures(workload: Workload, pp_rank: int) -> _Mixtures:
    model, alone = workload.run.model, "mlp" in modules_again(workload.run.recompute)
    every = again = back = 0
    for stage in runs_of_layers(workload, pp_rank):
        counts = spans_again(workload, stage)
        lasts = {stage.layers[end - 1] for end in accumulate(counts)}
        repeated = stage.layers if alone else stage.layers[: sum(counts)]
        for layer in (layer for layer in stage.layers if model.has_experts(layer)):
            runs_again = layer in repeated
            ends = (alone or (layer in lasts and not _normed_after(model))) and not _reads_answers(
                model
            )
            every, again, back = every + 1, again + runs_again, back + (runs_again and not ends)
    return _Mixtures(*(count * workload.num_microbatches for count in (every, again, back)))


def _reads_answers(model: ModelConfig) -> bool:
    """Whether something in a mixture reads what it has summed up; shared experts are done
    before."""
    return model.moe is not None and model.moe.latent_size is not None


def own_tokens(workload: Workload) -> int:
    """Of a microbatch, those that one rank sends to experts."""
    p = workload.run.parallel
    return workload.tokens // (p.tp if p.sp else 1)


def _sizes(workload: Workload, moe: MoEConfig) -> tuple[int, int]:
    """Bytes of a token as experts get it, and of a weight."""
    widths = WIDTHS[workload.run.precision.params]
    weight = {"fp32": widths.sums, "fp64": 8, "model": widths.value}[moe.router.dtype]
    return (moe.latent_size or workload.run.model.hidden_size) * widths.value, weight


def _exchange_rows(workload: Workload, moe: MoEConfig, passes: _Mixtures) -> Iterator[Traffic]:
    """T·K·(ep - 1)/ep rows each way and direction, their weights there, and E counts of every
    rank; with as many rows for every expert, E·room and no counts."""
    grid = workload.grid.experts
    assert grid is not None
    ep, etp, rows = grid.size("ep"), grid.size("etp"), mixture_of(workload, 0).sent
    behind = "the other of a pair" if workload.run.parallel.overlap_experts else ""
    row, weight = _sizes(workload, moe)
    there, back = 2 * passes.all + passes.again, 2 * passes.all + passes.back_again
    counts = 0 if moe.capacity.pad else passes.all + passes.again
    yield _row(
        "ep_etp",
        "counts of rows",
        "all_gather",
        ranks=ep * etp,
        calls=counts,
        nbytes=counts * ep * etp * moe.num_experts * 8,
    )
    yield _row(
        "ep",
        "rows to experts and back",
        "all_to_all",
        ranks=ep,
        calls=there + back,
        nbytes=(there + back) * rows * row,
        behind=behind,
    )
    yield _row(
        "ep", "weights of rows", "all_to_all", ranks=ep, calls=there, nbytes=there * rows * weight
    )
    forth = passes.all + passes.again
    shared = etp * rows
    yield _row(
        "etp",
        "rows, shared",
        "all_gather",
        ranks=etp,
        calls=forth + passes.all,
        nbytes=(forth + passes.all) * shared * row,
    )
    answers = 2 * passes.all + passes.back_again
    yield _row(
        "etp",
        "answers, summed",
        "reduce_scatter",
        ranks=etp,
        calls=answers,
        nbytes=answers * shared * row,
    )
    yield _row(
        "etp",
        "weights of rows, shared",
        "all_gather",
        ranks=etp,
        calls=forth,
        nbytes=forth * shared * weight,
    )
    yield _row(
        "etp",
        "gradients of weights, summed",
        "reduce_scatter",
        ranks=etp,
        calls=passes.all,
        nbytes=passes.all * shared * weight,
    )


def _gather_rows(workload: Workload, moe: MoEConfig, passes: _Mixtures) -> Iterator[Traffic]:
    """All tokens to every rank, with their choices and weights; and the sum of the answers back."""
    grid = workload.grid.experts
    assert grid is not None
    ranks = grid.size("ep") * grid.size("etp")
    tokens, forth = ranks * own_tokens(workload), passes.all + passes.again
    row, weight = _sizes(workload, moe)
    rows: list[tuple[str, Collective, int, int]] = [
        ("tokens for experts", "all_gather", forth + passes.all, row),
        ("answers, summed", "reduce_scatter", 2 * passes.all + passes.back_again, row),
        ("choices", "all_gather", forth, moe.top_k * 8),
        ("weights", "all_gather", forth, moe.top_k * weight),
        ("gradients of weights, summed", "reduce_scatter", passes.all, moe.top_k * weight),
    ]
    for what, kind, calls, nbytes in rows:
        yield _row("ep_etp", what, kind, ranks=ranks, calls=calls, nbytes=calls * tokens * nbytes)


def _choices_together(workload: Workload, moe: MoEConfig, passes: _Mixtures) -> Iterator[Traffic]:
    """What ranks that share a microbatch tell each other about choices: counts for the losses of
    balance, and choices where experts refuse some, once; and what all ranks do for the global
    batch."""
    p, losses, forwards = workload.run.parallel, moe.aux_loss, passes.all + passes.again
    sharing, everyone, each = p.cp * p.tp, p.cp * p.tp * workload.dp, 8 * moe.num_experts
    if (
        max(
            losses.sequence_coeff,
            losses.batch_coeff,
            losses.global_batch_coeff,
            losses.z_loss_coeff,
        )
        > 0
    ):
        rows = len(workload.lengths)
        yield _row(
            "cp_tp",
            "counts of choices",
            "all_reduce",
            ranks=sharing,
            calls=forwards,
            nbytes=forwards * rows * each,
        )
    if losses.global_batch_coeff > 0:
        yield _row(
            "dp_cp_tp",
            "counts of choices",
            "all_reduce",
            ranks=everyone,
            calls=forwards,
            nbytes=forwards * each,
        )
    if moe.aux_loss.quantile:
        together = forwards * sharing * own_tokens(workload)
        logits = moe.num_experts * _sizes(workload, moe)[1]
        yield _row(
            "cp_tp", "logits", "all_gather", ranks=sharing, calls=forwards, nbytes=together * logits
        )
    if moe.capacity.factor is not None:
        choices, weight = (
            passes.all * sharing * own_tokens(workload) * moe.top_k,
            _sizes(workload, moe)[1],
        )
        for what, nbytes in (("choices", 8), ("weights of choices", weight)):
            yield _row(
                "cp_tp",
                what,
                "all_gather",
                ranks=sharing,
                calls=passes.all,
                nbytes=choices * nbytes,
            )


# --- pp


def _pipeline_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """t · h for each microbatch to the next stage, its gradient to the one before, and as much
    for a memory that later stages look at, or for each depth on its way to the loss; nothing
    within a rank."""
    many = workload.num_microbatches
    behind = "other microbatches" if workload.run.parallel.overlap else ""
    for direction in SENDS:
        crossed = [
            boundary_tensors(workload, stage) for stage in borders(workload, pp_rank, direction)
        ]
        calls, nbytes = many * sum(map(len, crossed)), many * sum(map(sum, crossed))
        what = "activations onward" if direction == "forward" else "gradients back"
        yield _row("pp", what, "message", ranks=2, calls=calls, nbytes=nbytes, behind=behind)
    yield from _tables(workload, pp_rank)


def _tables(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """The gradient of each table that several stages hold, to each other holder."""
    run = workload.run
    part, h = tensor_part(run.model, tp=run.parallel.tp, rank=0), run.model.hidden_size
    sizes = {
        "embed.weight": ("gradient of the tied table", part.vocab * h),
        "positions.weight": ("gradient of the positions", run.model.max_seq_len * h),
        "relative.weight": ("gradient of the biases", run.model.relative.buckets * part.heads),
    }
    for name, replica_ranks in workload.shared_tables().items():
        what, numel = sizes[name]
        nbytes, others = (
            numel * WIDTHS[run.precision.params].sums // workload.shards,
            len(replica_ranks) - 1,
        )
        if pp_rank in replica_ranks:
            yield _row(
                "pp",
                what,
                "message",
                ranks=len(replica_ranks),
                calls=others,
                nbytes=others * nbytes,
            )


# --- dp


def _data_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Gradients over dp and cp, and of experts over edp, once a step or, with zero=2, each
    microbatch; with ZeRO the weights come back."""
    parameters = workload.parameters(pp_rank, tp_rank)
    if workload.run.parallel.zero == 3 and divides(workload):
        for axis, sort in (("dp", "dense"), ("edp", "expert")):
            units = [
                unit for unit in gathered_units(workload, pp_rank, parameters) if unit.grid == sort
            ]
            yield from _sharded_traffic(workload, axis, units)
        return
    moving, grid = trained(parameters), workload.grid
    plan = buffer_plan(workload, moving)
    for axis, sort, ranks in (
        ("dp", "dense", workload.shards),
        ("edp", "expert", workload.expert_shards),
    ):
        some = [bucket for bucket in plan.buckets if moving[bucket.members[0]].grid == sort]
        if sort == "expert" and grid.experts is None:
            continue
        replica_ranks = (
            grid.size("edp") if sort == "expert" else workload.dp * workload.run.parallel.cp
        )
        numel = sum(bucket.stop - bucket.start for bucket in some)
        yield from _sums(workload, _Sums(axis, len(some), numel, ranks, replica_ranks // ranks))


class _Sums(NamedTuple):
    """The buckets of one grid."""

    axis: str
    calls: int
    numel: int
    ranks: int
    """That divide what ZeRO divides."""

    replicas: int
    """That hold the same of it."""


def _sums(workload: Workload, sums: _Sums) -> Iterator[Traffic]:
    """Gradients of some buckets, and their weights back."""
    run, many = workload.run, workload.num_microbatches
    p, width = run.parallel, WIDTHS[run.precision.params]
    axis, calls, numel, ranks, replicas = sums
    backward, forward = ("last backward", "next forward") if p.overlap else ("", "")
    if ranks == 1:
        nbytes = width.sums * numel
        yield _row(
            axis,
            "gradients",
            "all_reduce",
            ranks=replicas,
            calls=calls,
            nbytes=nbytes,
            behind=backward,
        )
        return
    wire = min(width.sums, WIRE_BYTES[p.reduce_dtype]) if p.reduce_dtype != "fp32" else width.sums
    rounds = many if p.zero == 2 else 1
    if p.zero == 2 and p.overlap:
        backward = "backward"
    yield _row(
        axis,
        "gradients",
        "reduce_scatter",
        ranks=ranks,
        calls=rounds * calls,
        nbytes=rounds * wire * numel,
        behind=backward,
    )
    yield _row(
        axis,
        "gradients, over replicas",
        "all_reduce",
        ranks=replicas,
        calls=calls,
        nbytes=width.sums * numel // ranks,
        behind=backward,
    )
    yield _row(
        axis,
        "updated weights",
        "all_gather",
        ranks=ranks,
        calls=calls,
        nbytes=width.value * numel,
        behind=forward,
    )


def _has_backward(run: TrainRun, unit: GatheredUnit) -> bool:
    """Whether backward gathers what forward has gathered; tables are not read by it. Where it
    gathers ahead, the layer below the last one that it reaches comes, too."""
    if unit.name.startswith("layers."):
        layers = run.lora and lora_layers(run.lora, run.model)
        last = layers[0] if layers else first_trained_layer(run.model, run.optim)
        return int(unit.name.split(".")[1]) >= last - run.parallel.overlap
    return unit.name.startswith("mtp.")


def _sharded_traffic(
    workload: Workload, axis: str, units: Sequence[GatheredUnit]
) -> Iterator[Traffic]:
    """zero=3: a layer's weights for each forward and each backward, a table's for forward;
    gradients each microbatch.

    In pipelines weights are gathered once a step. A parameter whose rows do not divide is sent
    padded. What one rank has for itself is summed over replicas alone.
    """
    if not units:
        return
    run, ranks, many = workload.run, units[0].ranks, workload.num_microbatches
    width, grid = WIDTHS[run.precision.params], workload.grid
    padded, summed = (
        [
            sum(sharded_rows(one, 0, ranks) * one.columns for one in some(unit.parameters))
            * ranks
            for unit in units
        ]
        for some in (list, trained)
    )
    times = [
        1 if keeps_gathered(workload) else many * (2 if _has_backward(run, unit) else 1)
        for unit in units
    ]
    sent_back = sum(numel > 0 for numel in summed)
    behind = "the layer before" if run.parallel.overlap else ""
    weights = width.value * sum(numel * count for numel, count in zip(padded, times, strict=True))
    yield _row(
        axis, "weights", "all_gather", ranks=ranks, calls=sum(times), nbytes=weights, behind=behind
    )
    yield _row(
        axis,
        "gradients",
        "reduce_scatter",
        ranks=ranks,
        calls=many * sent_back,
        nbytes=many * width.sums * sum(summed),
        behind=behind,
    )
    yield _row(
        axis,
        "gradients, over replicas",
        "all_reduce",
        ranks=grid.size(f"{axis}_replica"),
        calls=sent_back,
        nbytes=width.sums * sum(summed) // ranks,
        behind=behind,
    )

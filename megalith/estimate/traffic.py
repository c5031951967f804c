"""Communication volume of a rank in one step, by axis, in bytes sent, and the computation that can
overlap it.

A collective of a buffer of S bytes over r ranks sends (r - 1)/r · S from each rank in a ring
(all-gather, reduce-scatter, all-to-all), an all-reduce twice as much; a message between stages
sends its size. Scalars (the loss, norms, flags) and communication between hosts are not counted.

Notation: t tokens of a microbatch on one rank, h hidden, g KV heads and n query heads of this rank,
d head dim, e bytes per weight or activation, L layers of this rank, M microbatches.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ContextKind
from megalith.config.train import TrainRun
from megalith.estimate.activations import kv_heads_exchanged
from megalith.estimate.memory import (
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
from megalith.estimate.workload import Workload
from megalith.plan.context import kind_of_layer
from megalith.plan.costs import WIDTHS, tokens_of_loss
from megalith.plan.frozen import first_trained_layer, trained
from megalith.plan.p2p import SENDS
from megalith.plan.parameters import tensor_part
from megalith.plan.recompute import layer_spans, mlp_in_chunks, recomputed_modules
from megalith.plan.stages import Stage

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of collective or message of a rank in a step."""

    axis: str
    """tp, cp, pp or dp; of experts ep, etp or edp; or several, joined by _."""

    what: str
    """Description of the data."""

    kind: Collective
    ranks: int
    """Group size; two for a message."""

    calls: int
    """Calls per step."""

    nbytes: int
    """Bytes that this rank sends, over all calls."""

    behind: str = ""
    """Computation that can overlap it; empty: none, it is exposed communication."""


def sent(kind: Collective, nbytes: int, ranks: int) -> float:
    """Return the bytes that one of `ranks` ranks sends in a collective of a buffer of `nbytes`.

    >>> sent("all_reduce", 1000, 4), sent("all_gather", 1000, 4), sent("message", 1000, 2)
    (1500.0, 750.0, 1000.0)
    """
    if kind == "message":
        return float(nbytes)
    return nbytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def step_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> list[Traffic]:
    """Return all communication of the ranks at this position in one step."""
    rows = [
        *_tensor_traffic(workload, pp_rank),
        *_replicated_param_traffic(workload, pp_rank, tp_rank),
        *_context_traffic(workload, pp_rank, tp_rank),
        *_expert_traffic(workload, pp_rank),
        *_pipeline_traffic(workload, pp_rank),
        *_data_traffic(workload, pp_rank, tp_rank),
    ]
    return [row for row in rows if row.ranks > 1 and row.nbytes > 0]


def _row(
    axis: str, what: str, kind: Collective, *, ranks: int, calls: int, nbytes: int, behind: str = ""
) -> Traffic:
    """Return a row; nbytes: of the whole buffer, over all calls."""
    return Traffic(axis, what, kind, ranks, calls, round(sent(kind, nbytes, ranks)), behind)


# --- tp


GATHERED = "tokens, gathered"
"""Row of the all-gather before matmuls, also in recomputation."""


def _tensor_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield t · h before and after every attention and MLP, forward and backward; and the head's
    statistics per token.

    The inputs of latent attention are smaller: see `gathered_input_features`.
    """
    run, t, num_microbatches = workload.run, workload.tokens, workload.num_microbatches
    tp, width, h = run.parallel.tp, WIDTHS[run.precision.params], run.model.hidden_size
    one = t * h * width.value
    stages = stages_with_mtp(workload, pp_rank)
    recomputed_spans = [spans_again(workload, stage) for stage in stages]
    spans, inputs, losses = (
        sum(map(len, recomputed_spans)),
        sum(s.embedding for s in stages),
        sum(s.loss for s in stages),
    )
    parts = sum(divided_parts(run.model, stage.layers) for stage in stages)
    input_features = [
        x
        for stage in stages
        for layer in stage.layers
        for x in gathered_input_features(run.model, layer)
    ]
    recomputed_features, num_recomputed_sums, modules = (
        list[int](),
        0,
        recomputed_modules(run.recompute),
    )
    for stage, counts in zip(stages, recomputed_spans, strict=True):
        repeated = stage.layers[: sum(counts)]
        recomputed_features += [
            x for layer in repeated for x in gathered_input_features(run.model, layer)
        ]
        num_recomputed_sums += divided_parts(run.model, repeated) - _count_sums_at_span_ends(
            run.model, stage, counts
        )
        gates = sum(_gates_shared_experts(run.model, layer) for layer in stage.layers)
        num_recomputed_sums += gates if {"mlp", "shared_experts"} & {*modules} else 0
        if "mla_up_proj" in modules:
            recomputed_features += [
                x for layer in stage.layers for x in attention_features(run.model, layer)
            ]
    if run.recompute.shard_inputs:
        inputs_again = spans * num_microbatches
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
            _mlp_again(run.model, layer, modules) for stage in stages for layer in stage.layers
        )
        weight_input_features = [
            x
            for stage in stages
            for layer in stage.layers
            for x in gathered_input_features(run.model, layer, read=True)
        ]
        rows: list[tuple[str, Collective, list[int], str]] = [
            (
                GATHERED,
                "all_gather",
                [*input_features, *recomputed_features, *[h] * (inside + losses)],
                ring,
            ),
            ("gradients, gathered", "all_gather", [h] * (parts + inputs), ring),
            ("tokens, gathered again", "all_gather", weight_input_features, behind),
            (
                "sums, scattered",
                "reduce_scatter",
                [h] * (parts + num_recomputed_sums + inputs),
                ring,
            ),
            ("gradients, scattered", "reduce_scatter", [*input_features, *[h] * losses], behind),
        ]
    else:
        rows = [
            ("sums of activations", "all_reduce", [h] * (parts + num_recomputed_sums + inputs), ""),
            ("sums of gradients", "all_reduce", [*input_features, *[h] * losses], behind),
        ]
    num_chunked_mlps = sum(
        mlp_in_chunks(run.recompute, run.model, layer) for stage in stages for layer in stage.layers
    )
    num_extra_chunks = num_chunked_mlps * (run.recompute.mlp_chunks - 1)
    for what, kind, features, hidden in rows:
        nbytes, calls = (
            sum(features) * num_microbatches * t * width.value,
            len(features) + num_extra_chunks * (1 + (what == GATHERED)),
        )
        yield _row(
            "tp", what, kind, ranks=tp, calls=calls * num_microbatches, nbytes=nbytes, behind=hidden
        )
    chunks = -(-t // tokens_of_loss(run))
    yield _row(
        "tp",
        "statistics of logits",
        "all_reduce",
        ranks=tp,
        calls=2 * chunks * losses * num_microbatches,
        nbytes=3 * t * width.sums * losses * num_microbatches,
    )


def stages_with_mtp(workload: Workload, pp_rank: int) -> list[Stage]:
    """Return a rank's chunks; and for each MTP layer on it, a layer like the last one with its own
    embedding, and a loss."""
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
    """Return the features of each input that tensor-parallel parts of a layer gather: h for each
    part; for latent attention its compressed vectors, and the key shared by all heads (`read`:
    without it, because no weight reads it)."""
    h = model.hidden_size
    cross_attention = [h, h] * model.uses_cross_layer_source(
        layer
    )  # queries' input, and the source
    return (
        attention_features(model, layer, read=read)
        + cross_attention
        + [h] * divides_mlp(model, layer)
    )


def attention_features(model: ModelConfig, layer: int, *, read: bool = False) -> list[int]:
    """Return the same for a layer's attention alone."""
    mla, h = model.mla, model.hidden_size
    attention = (
        [h] if mla is None else [mla.q_rank or h, mla.kv_rank, *([] if read else [mla.rope_dim])]
    )
    return attention * (model.attention_part(layer) == "full")


def divides_mlp(model: ModelConfig, layer: int) -> bool:
    """Return whether a layer's MLP, or the shared experts of an MoE layer, is split over tp."""
    if not model.has_experts(layer):
        return model.mlp_part(layer) == "full"
    return model.moe is not None and model.moe.shared_ffn_hidden_size is not None


def divided_parts(model: ModelConfig, layers: Sequence[int]) -> int:
    """Return the number of attentions and MLPs of some layers that are split over tp."""
    return sum(
        (model.attention_part(n) == "full")
        + model.uses_cross_layer_source(n)
        + divides_mlp(model, n)
        for n in layers
    )


def _count_sums_at_span_ends(model: ModelConfig, stage: Stage, counts: Sequence[int]) -> int:
    """Return the number of recomputed spans whose last operation is the sum of a split part."""
    lasts = [] if _has_norm_after(model) else [stage.layers[end - 1] for end in accumulate(counts)]
    return sum(
        model.attention_part(n) == "full"
        if model.mlp_part(n) == "none"
        else divides_mlp(model, n) and not _gates_shared_experts(model, n)
        for n in lasts
    )


def _has_norm_after(model: ModelConfig) -> bool:
    """Return whether a norm saves the output of a layer's last branch."""
    return model.norm_placement != "before"


def _gates_shared_experts(model: ModelConfig, layer: int) -> bool:
    """Return whether a gate follows the sum over the parts of the shared experts, and needs it
    again."""
    return model.moe is not None and model.has_experts(layer) and model.moe.shared_gate


def spans_again(workload: Workload, stage: Stage) -> list[int]:
    """Return the layers of each recomputed span; the sum that ends a span is not recomputed."""
    if not stage.layers:
        return []
    run, cut = workload.run, workload.run.model.find_cross_layer_source(stage.layers)
    spans = layer_spans(run.recompute, run.offload, len(stage.layers), cut=cut)
    return [span.stop - span.start for span in spans if span.recomputed]


def _replicated_param_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Yield the gradients of parameters that tensor-parallel ranks replicate, once per step."""
    run = workload.run
    tp, nbytes_per_element = run.parallel.tp, WIDTHS[run.precision.params].sums
    held = trained(workload.parameters(pp_rank, tp_rank))
    copies = tensor_part(run.model, tp=tp, rank=tp_rank).kv_copies
    replicated = [one for one in held if not one.cut]
    heads_numel = sum(one.numel for one in replicated if one.summed == "heads")
    all_ranks_numel = sum(
        one.numel
        for one in replicated
        if one.summed == "always" or (one.summed == "sp" and run.parallel.sp)
    )
    yield _row(
        "tp",
        "gradients of shared heads",
        "all_reduce",
        ranks=copies,
        calls=1 if heads_numel else 0,
        nbytes=heads_numel * nbytes_per_element // workload.shards,
    )
    yield _row(
        "tp",
        "gradients of norms",
        "all_reduce",
        ranks=tp,
        calls=1 if all_ranks_numel else 0,
        nbytes=all_ranks_numel * nbytes_per_element // workload.shards,
    )


# --- cp


def _context_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Yield the keys and values of every layer to the other context-parallel ranks, and their
    gradients."""
    run = workload.run
    if run.parallel.cp == 1:
        return
    layers: Counter[tuple[ContextKind, int]] = Counter()  # by kind and KV heads of one rank
    recomputed_layers: Counter[tuple[ContextKind, int]] = Counter()
    for stage in stages_with_mtp(workload, pp_rank):
        repeated = stage.layers[: sum(spans_again(workload, stage))]
        for layer in stage.layers:
            attentions = (
                run.model.attention_part(layer) == "full"
            ) + run.model.uses_cross_layer_source(layer)
            heads = tensor_part(run.model.at(layer), tp=run.parallel.tp, rank=tp_rank).kv_heads
            kind_and_heads = kind_of_layer(run.parallel.context, layer), heads
            layers[kind_and_heads] += attentions
            recomputed_layers[kind_and_heads] += attentions * (layer in repeated)
    if {"core_attention", "mla_up_proj"} & {*recomputed_modules(run.recompute)}:
        recomputed_layers = layers
    for kind, heads in sorted(layers):
        num_layers, num_recomputed = layers[kind, heads], recomputed_layers[kind, heads]
        passes = _Passes(
            num_layers * workload.num_microbatches, num_recomputed * workload.num_microbatches
        )
        yield from _attention_exchange(workload, tp_rank, kind, heads, passes)


class _Passes(NamedTuple):
    """Passes through attention in a step: layers times microbatches."""

    all: int
    again: int
    """Number of these whose attention is recomputed."""


def _attention_exchange(
    workload: Workload, tp_rank: int, kind: ContextKind, kv_heads: int, passes: _Passes
) -> Iterator[Traffic]:
    """Yield the communication of layers of one kind in `passes.all` forward and backward passes,
    and in recomputed forwards."""
    run, t = workload.run, workload.tokens
    part, k, v = (
        tensor_part(run.model, tp=run.parallel.tp, rank=tp_rank),
        run.model.key_size(),
        run.model.value_size(),
    )
    width, ring, a2a_size = (
        WIDTHS[run.precision.params],
        workload.grid.size("cp_ring"),
        workload.grid.size("cp_a2a"),
    )
    keys, forwards = kv_heads * (k + v) * t, passes.all + passes.again
    if kind == "gather":
        cp, gathered_bytes = run.parallel.cp, run.parallel.cp * keys * width.value
        yield _row(
            "cp",
            "keys and values",
            "all_gather",
            ranks=cp,
            calls=forwards,
            nbytes=forwards * gathered_bytes,
        )
        yield _row(
            "cp",
            "their gradients",
            "reduce_scatter",
            ranks=cp,
            calls=passes.all,
            nbytes=passes.all * gathered_bytes,
        )
        return
    behind = "attention" if run.parallel.overlap else ""
    if kind in ("a2a", "a2a+ring"):
        ranks = a2a_size if kind == "a2a+ring" else run.parallel.cp
        own_keys = kv_heads_exchanged(kv_heads, ranks)
        qkv_features, output_features = part.heads * k + ranks * own_keys * (k + v), part.heads * v
        # Recomputing only core attention does not repeat the all-to-all of its output.
        results = forwards if run.recompute.granularity == "full" else passes.all
        sent_features = (forwards + passes.all) * qkv_features + (
            results + passes.all
        ) * output_features
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
    """Return whether a layer's MLP, or its shared experts, is recomputed by itself."""
    shared = "shared_experts" in again and model.has_experts(layer)
    return divides_mlp(model, layer) and ("mlp" in again or shared)


def _expert_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield the dispatch of tokens to experts and the combine, forward and backward, for balanced
    experts.

    The rounds of Sinkhorn balancing are not counted: their number depends on the scores.
    """
    run = workload.run
    model, grid = run.model, workload.grid.experts
    if model.moe is None or grid is None:
        return
    passes = _count_moe_passes(workload, pp_rank)
    if grid.size("ep") * grid.size("etp") > 1:
        gathers = (
            run.parallel.dispatcher == "allgather"
        )  # dispatchers of other packages count as alltoall
        yield from (_allgather_traffic if gathers else _alltoall_traffic)(
            workload, model.moe, passes
        )
    yield from _routing_stats_traffic(workload, model.moe, passes)
    if model.moe.router.expert_bias and passes.all:
        ranks = workload.dp * run.parallel.cp * run.parallel.tp
        counts = passes.all // workload.num_microbatches * model.moe.num_experts
        yield _row(
            "dp_cp_tp",
            "counts of choices, for the expert bias",
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


class _MoEPasses(NamedTuple):
    """Passes through MoE layers in a step: layers times microbatches."""

    all: int
    again: int
    """Number of these whose routing and dispatch are recomputed."""

    back_again: int
    """Number of these whose combine is repeated too, because a later operation needs the sum."""


def _count_moe_passes(workload: Workload, pp_rank: int) -> _MoEPasses:
    model, recomputes_mlp = workload.run.model, "mlp" in recomputed_modules(workload.run.recompute)
    num_layers = num_recomputed = num_combined_again = 0
    for stage in stages_with_mtp(workload, pp_rank):
        counts = spans_again(workload, stage)
        last_layers = {stage.layers[end - 1] for end in accumulate(counts)}
        repeated = stage.layers if recomputes_mlp else stage.layers[: sum(counts)]
        for layer in (layer for layer in stage.layers if model.has_experts(layer)):
            runs_again = layer in repeated
            skips_combine = (
                recomputes_mlp or (layer in last_layers and not _has_norm_after(model))
            ) and not _reads_combined_output(model)
            num_layers, num_recomputed, num_combined_again = (
                num_layers + 1,
                num_recomputed + runs_again,
                num_combined_again + (runs_again and not skips_combine),
            )
    return _MoEPasses(
        *(
            count * workload.num_microbatches
            for count in (num_layers, num_recomputed, num_combined_again)
        )
    )


def _reads_combined_output(model: ModelConfig) -> bool:
    """Return whether the MoE layer saves its combined output; shared experts are computed
    before."""
    return model.moe is not None and model.moe.latent_size is not None


def own_tokens(workload: Workload) -> int:
    """Return the tokens of a microbatch that one rank routes."""
    p = workload.run.parallel
    return workload.tokens // (p.tp if p.sp else 1)


def _token_and_weight_bytes(workload: Workload, moe: MoEConfig) -> tuple[int, int]:
    """Return the bytes of a token as dispatched, and of a router weight."""
    widths = WIDTHS[workload.run.precision.params]
    weight = {"fp32": widths.sums, "fp64": 8, "model": widths.value}[moe.router.dtype]
    return (moe.latent_size or workload.run.model.hidden_size) * widths.value, weight


def _alltoall_traffic(workload: Workload, moe: MoEConfig, passes: _MoEPasses) -> Iterator[Traffic]:
    """Yield T·K·(ep - 1)/ep rows per dispatch and combine, their weights, and E counts of every
    rank; with padding to the capacity, E·room rows and no counts."""
    grid = workload.grid.experts
    assert grid is not None
    ep, etp, rows = grid.size("ep"), grid.size("etp"), mixture_of(workload, 0).sent
    behind = "the other of a pair" if workload.run.parallel.overlap_experts else ""
    row, weight = _token_and_weight_bytes(workload, moe)
    num_dispatches, num_combines = 2 * passes.all + passes.again, 2 * passes.all + passes.back_again
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
        calls=num_dispatches + num_combines,
        nbytes=(num_dispatches + num_combines) * rows * row,
        behind=behind,
    )
    yield _row(
        "ep",
        "weights of rows",
        "all_to_all",
        ranks=ep,
        calls=num_dispatches,
        nbytes=num_dispatches * rows * weight,
    )
    num_forwards = passes.all + passes.again
    shared = etp * rows
    yield _row(
        "etp",
        "rows, shared",
        "all_gather",
        ranks=etp,
        calls=num_forwards + passes.all,
        nbytes=(num_forwards + passes.all) * shared * row,
    )
    num_etp_sums = 2 * passes.all + passes.back_again
    yield _row(
        "etp",
        "answers, summed",
        "reduce_scatter",
        ranks=etp,
        calls=num_etp_sums,
        nbytes=num_etp_sums * shared * row,
    )
    yield _row(
        "etp",
        "weights of rows, shared",
        "all_gather",
        ranks=etp,
        calls=num_forwards,
        nbytes=num_forwards * shared * weight,
    )
    yield _row(
        "etp",
        "gradients of weights, summed",
        "reduce_scatter",
        ranks=etp,
        calls=passes.all,
        nbytes=passes.all * shared * weight,
    )


def _allgather_traffic(workload: Workload, moe: MoEConfig, passes: _MoEPasses) -> Iterator[Traffic]:
    """Yield all tokens to every rank, with their choices and weights; and the reduce-scatter of the
    outputs."""
    grid = workload.grid.experts
    assert grid is not None
    ranks = grid.size("ep") * grid.size("etp")
    tokens, num_forwards = ranks * own_tokens(workload), passes.all + passes.again
    row, weight = _token_and_weight_bytes(workload, moe)
    rows: list[tuple[str, Collective, int, int]] = [
        ("tokens for experts", "all_gather", num_forwards + passes.all, row),
        ("answers, summed", "reduce_scatter", 2 * passes.all + passes.back_again, row),
        ("choices", "all_gather", num_forwards, moe.top_k * 8),
        ("weights", "all_gather", num_forwards, moe.top_k * weight),
        ("gradients of weights, summed", "reduce_scatter", passes.all, moe.top_k * weight),
    ]
    for what, kind, calls, nbytes in rows:
        yield _row("ep_etp", what, kind, ranks=ranks, calls=calls, nbytes=calls * tokens * nbytes)


def _routing_stats_traffic(
    workload: Workload, moe: MoEConfig, passes: _MoEPasses
) -> Iterator[Traffic]:
    """Yield the counts for aux losses among ranks that share a microbatch, the choices for token
    dropping, once, and the counts of the global batch over all ranks."""
    p, losses, forwards = workload.run.parallel, moe.aux_loss, passes.all + passes.again
    num_sharing, num_ranks, count_bytes = (
        p.cp * p.tp,
        p.cp * p.tp * workload.dp,
        8 * moe.num_experts,
    )
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
            ranks=num_sharing,
            calls=forwards,
            nbytes=forwards * rows * count_bytes,
        )
    if losses.global_batch_coeff > 0:
        yield _row(
            "dp_cp_tp",
            "counts of choices",
            "all_reduce",
            ranks=num_ranks,
            calls=forwards,
            nbytes=forwards * count_bytes,
        )
    if moe.aux_loss.quantile:
        num_tokens = forwards * num_sharing * own_tokens(workload)
        logits = moe.num_experts * _token_and_weight_bytes(workload, moe)[1]
        yield _row(
            "cp_tp",
            "logits",
            "all_gather",
            ranks=num_sharing,
            calls=forwards,
            nbytes=num_tokens * logits,
        )
    if moe.capacity.factor is not None:
        choices, weight = (
            passes.all * num_sharing * own_tokens(workload) * moe.top_k,
            _token_and_weight_bytes(workload, moe)[1],
        )
        for what, nbytes in (("choices", 8), ("weights of choices", weight)):
            yield _row(
                "cp_tp",
                what,
                "all_gather",
                ranks=num_sharing,
                calls=passes.all,
                nbytes=choices * nbytes,
            )


# --- pp


def _pipeline_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield t · h per microbatch to the next stage, its gradient to the previous one, and as much
    for the source of cross-layer attention and for each MTP layer on its way to the loss; none
    within a rank."""
    num_microbatches = workload.num_microbatches
    behind = "other microbatches" if workload.run.parallel.overlap else ""
    for direction in SENDS:
        boundaries = [
            boundary_tensors(workload, stage) for stage in borders(workload, pp_rank, direction)
        ]
        calls, nbytes = (
            num_microbatches * sum(map(len, boundaries)),
            num_microbatches * sum(map(sum, boundaries)),
        )
        what = "activations onward" if direction == "forward" else "gradients back"
        yield _row("pp", what, "message", ranks=2, calls=calls, nbytes=nbytes, behind=behind)
    yield from _shared_table_traffic(workload, pp_rank)


def _shared_table_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield the gradient of each table that several stages hold, to every other stage."""
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
    """Yield gradients over dp and cp, and of experts over edp, once per step or, with zero=2, per
    microbatch; with ZeRO, the all-gather of weights."""
    parameters = workload.parameters(pp_rank, tp_rank)
    if workload.run.parallel.zero == 3 and divides(workload):
        for axis, grid_name in (("dp", "dense"), ("edp", "expert")):
            units = [
                unit
                for unit in gathered_units(workload, pp_rank, parameters)
                if unit.grid == grid_name
            ]
            yield from _sharded_traffic(workload, axis, units)
        return
    trained_parameters, grid = trained(parameters), workload.grid
    plan = buffer_plan(workload, trained_parameters)
    for axis, grid_name, ranks in (
        ("dp", "dense", workload.shards),
        ("edp", "expert", workload.expert_shards),
    ):
        buckets = [
            bucket
            for bucket in plan.buckets
            if trained_parameters[bucket.members[0]].grid == grid_name
        ]
        if grid_name == "expert" and grid.experts is None:
            continue
        num_replicas = (
            grid.size("edp") if grid_name == "expert" else workload.dp * workload.run.parallel.cp
        )
        numel = sum(bucket.stop - bucket.start for bucket in buckets)
        yield from _bucket_traffic(
            workload, _GradientBuckets(axis, len(buckets), numel, ranks, num_replicas // ranks)
        )


class _GradientBuckets(NamedTuple):
    """The gradient buckets of one grid."""

    axis: str
    calls: int
    numel: int
    ranks: int
    """Number of ZeRO shards."""

    replicas: int
    """Number of replicas of each shard."""


def _bucket_traffic(workload: Workload, buckets: _GradientBuckets) -> Iterator[Traffic]:
    """Yield the reduction of the gradients of some buckets, and the all-gather of their weights."""
    run, num_microbatches = workload.run, workload.num_microbatches
    p, width = run.parallel, WIDTHS[run.precision.params]
    axis, calls, numel, ranks, replicas = buckets
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
    element_bytes = (
        min(width.sums, WIRE_BYTES[p.reduce_dtype]) if p.reduce_dtype != "fp32" else width.sums
    )
    rounds = num_microbatches if p.zero == 2 else 1
    if p.zero == 2 and p.overlap:
        backward = "backward"
    yield _row(
        axis,
        "gradients",
        "reduce_scatter",
        ranks=ranks,
        calls=rounds * calls,
        nbytes=rounds * element_bytes * numel,
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
    """Return whether backward gathers a unit that forward has gathered; not lookup tables. With
    prefetching, the layer below the last layer of backward is gathered, too."""
    if unit.name.startswith("layers."):
        layers = run.lora and lora_layers(run.lora, run.model)
        last = layers[0] if layers else first_trained_layer(run.model, run.optim)
        return int(unit.name.split(".")[1]) >= last - run.parallel.overlap
    return unit.name.startswith("mtp.")


def _sharded_traffic(
    workload: Workload, axis: str, units: Sequence[GatheredUnit]
) -> Iterator[Traffic]:
    """Yield zero=3 traffic: a layer's weights per forward and backward, a table's per forward;
    gradients per microbatch.

    In pipelines weights are gathered once per step. A parameter whose rows do not divide evenly is
    padded. Unsharded units are only summed over replicas.
    """
    if not units:
        return
    run, ranks, num_microbatches = workload.run, units[0].ranks, workload.num_microbatches
    width, grid = WIDTHS[run.precision.params], workload.grid
    padded, summed = (
        [
            sum(sharded_rows(one, 0, ranks) * one.columns for one in some(unit.parameters)) * ranks
            for unit in units
        ]
        for some in (list, trained)
    )
    times = [
        1 if keeps_gathered(workload) else num_microbatches * (2 if _has_backward(run, unit) else 1)
        for unit in units
    ]
    num_reduced = sum(numel > 0 for numel in summed)
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
        calls=num_microbatches * num_reduced,
        nbytes=num_microbatches * width.sums * sum(summed),
        behind=behind,
    )
    yield _row(
        axis,
        "gradients, over replicas",
        "all_reduce",
        ranks=grid.size(f"{axis}_replica"),
        calls=num_reduced,
        nbytes=width.sums * sum(summed) // ranks,
        behind=behind,
    )

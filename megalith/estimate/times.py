"""Time of a training step, from its FLOPs and from the bytes that ranks send."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.estimate.buckets import buffer_plan, divides
from megalith.estimate.matrices import (
    list_assigned_rules,
    matrix_rule_rows,
    message_width,
    plan_stage_matrices,
)
from megalith.estimate.memory import (
    WIRE_BYTES,
    GatheredUnit,
    borders,
    boundary_tensors,
    build_layer_setting,
    gathered_units,
    keeps_gathered,
    sharded_rows,
)
from megalith.estimate.workload import Workload, plan_workload
from megalith.plan.batch_assignment import assign_rows
from megalith.plan.batch_schedule import build_batch_schedule, largest_batch_size
from megalith.plan.context import layer_context_kind
from megalith.plan.costs import (
    attention_flops,
    latent_flops,
    layer_flops,
    loss_chunk_size,
    mlp_flops,
    shared_flops,
    step_flops,
)
from megalith.plan.devices import EFFICIENCY, LINK_EFFICIENCY, Device
from megalith.plan.frozen import first_trained_layer, tables_trained, trained, trained_step_flops
from megalith.plan.layers import branches
from megalith.plan.layers.base import (
    WIDTHS,
    Collective,
    Exchange,
    LayerRecompute,
    Message,
    Passes,
    tensor_part,
)
from megalith.plan.layers.embedding import head_flops, head_messages
from megalith.plan.recompute import layer_spans, mlp_in_chunks, recomputed_modules
from megalith.plan.schedule import SENDS
from megalith.plan.stages import Stage

# --- communication volume of a rank in one step, by axis, in bytes sent, and the computation that
# can overlap it
#
# A collective of a buffer of S bytes over r ranks sends (r - 1)/r · S from each rank in a ring
# (all-gather, reduce-scatter, all-to-all), an all-reduce twice as much; a message between stages
# sends its size. Scalars (the loss, norms, flags) and communication between hosts are not counted.
#
# Notation: t tokens of a microbatch on one rank, h hidden, g KV heads and n query heads of this
# rank, d head dim, e bytes per weight or activation, L layers of this rank, M microbatches.


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
        *_tensor_traffic(workload, pp_rank, tp_rank),
        *_replicated_param_traffic(workload, pp_rank, tp_rank),
        *_exchange_traffic(workload, pp_rank, tp_rank),
        *_pipeline_traffic(workload, pp_rank),
        *_data_traffic(workload, pp_rank, tp_rank),
        *_matrix_traffic(workload, pp_rank),
    ]
    return [row for row in rows if row.ranks > 1 and row.nbytes > 0]


def _row(
    axis: str, what: str, kind: Collective, *, ranks: int, calls: int, nbytes: int, behind: str = ""
) -> Traffic:
    """Return a row; nbytes: of the whole buffer, over all calls."""
    return Traffic(axis, what, kind, ranks, calls, round(sent(kind, nbytes, ranks)), behind)


def _traffic(message: Message) -> Traffic:
    """Return the row of a message inside a layer."""
    return _row(
        message.axis,
        message.what,
        message.kind,
        ranks=message.ranks,
        calls=message.calls,
        nbytes=message.nbytes,
        behind=message.behind,
    )


# --- assigned ranks

NEWTON_SCHULZ = "Newton-Schulz steps"
"""Computation that overlaps the exchange with assigned ranks."""


def _matrix_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield what the rank of a stage that sends the most sends to and from assigned ranks."""
    run = workload.run
    axes = [axis for axis in ("dp", "cp", "tp") if workload.grid.size(axis) > 1]
    for rule in list_assigned_rules(run):
        plan = plan_stage_matrices(workload, pp_rank, rule)
        yield Traffic(
            "_".join(axes),
            "matrices to assigned ranks, and directions",
            "all_to_all",
            plan.num_ranks,
            2 * plan.num_waves,
            message_width(run, rule) * max(plan.sent_numels),
            NEWTON_SCHULZ if run.parallel.overlap and rule == "muon" else "",
        )


# --- tp


@dataclass(slots=True)
class _TPCounts:
    """Messages over tp of one rank's layers for one microbatch."""

    inputs: list[int] = field(default_factory=list)
    """Features of each gathered input; see `TPMessages`."""

    weight_inputs: list[int] = field(default_factory=list)
    recomputed_inputs: list[int] = field(default_factory=list)
    sums: int = 0
    recomputed_sums: int = 0
    chunked_mlps: int = 0


def _count_tp_messages(workload: Workload, stages: Sequence[Stage]) -> _TPCounts:
    """Return the messages of all layers; recomputed spans repeat those of forward, except a sum
    that ends the span."""
    run, counts = workload.run, _TPCounts()
    modules = recomputed_modules(run.recompute)
    for stage in stages:
        spans = recomputed_spans(workload, stage)
        for number, layer in enumerate(stage.layers):
            layer_recompute = _layer_recompute(run, spans, number, modules)
            all_messages = [
                branch.kind.tp_messages(branch, modules) for branch in branches(run.model, layer)
            ]
            for messages in all_messages:
                counts.inputs += messages.inputs
                counts.weight_inputs += messages.weight_inputs
                counts.recomputed_inputs += messages.recomputed_inputs
                counts.sums += messages.sums
                counts.recomputed_sums += messages.recomputed_sums
                if layer_recompute.whole:
                    counts.recomputed_inputs += messages.inputs
                    counts.recomputed_sums += messages.sums
            if layer_recompute.ends_span and all_messages:
                last = all_messages[-1]
                counts.recomputed_sums -= last.sums > 0 and last.sum_is_last
            counts.chunked_mlps += mlp_in_chunks(run.recompute, run.model, layer)
    return counts


def _layer_recompute(
    run: TrainRun, spans: Sequence[int], number: int, modules: Sequence[str]
) -> LayerRecompute:
    """Return the recomputation of layer `number` of a stage with these recomputed spans. A norm
    after the last branch needs its output."""
    is_last = number + 1 in accumulate(spans) and run.model.norm_placement == "before"
    return LayerRecompute(modules, number < sum(spans), is_last)


def _tensor_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Yield t · h before and after every attention and MLP, forward and backward; and the head's
    statistics per token.

    The inputs of latent attention are smaller. With sp, sums become reduce-scatters, and inputs are
    gathered before the matmuls.
    """
    run, num_microbatches = workload.run, workload.num_microbatches
    setting, h = build_layer_setting(workload, tp_rank), run.model.hidden_size
    stages = stages_with_mtp(workload, pp_rank)
    embeddings, losses = sum(s.embedding for s in stages), sum(s.loss for s in stages)
    if run.recompute.shard_inputs:
        calls = sum(len(recomputed_spans(workload, stage)) for stage in stages) * num_microbatches
        yield _row(
            "tp",
            "inputs of layers run again",
            "all_gather",
            ranks=setting.tp,
            calls=calls,
            nbytes=calls * setting.tokens * h * setting.element,
        )
    counts = _count_tp_messages(workload, stages)
    sums = [h] * (counts.sums + counts.recomputed_sums + embeddings)
    inputs, heads = counts.inputs, [h] * losses
    behind = "matmuls" if run.parallel.overlap else ""
    ring = "matmuls" if run.parallel.tp_comm_overlap else ""
    extra = counts.chunked_mlps * (run.recompute.mlp_chunks - 1)
    rows: list[tuple[str, Collective, Sequence[int], str, int]] = [
        ("sums of activations", "all_reduce", sums, "", extra),
        ("sums of gradients", "all_reduce", [*inputs, *heads], behind, extra),
    ]
    if run.parallel.sp:
        gathered, given = [*inputs, *counts.recomputed_inputs, *heads], counts.sums + embeddings
        rows = [
            ("tokens, gathered", "all_gather", gathered, ring, 2 * extra),
            ("gradients, gathered", "all_gather", [h] * given, ring, extra),
            ("tokens, gathered again", "all_gather", counts.weight_inputs, behind, extra),
            ("sums, scattered", "reduce_scatter", sums, ring, extra),
            ("gradients, scattered", "reduce_scatter", [*inputs, *heads], behind, extra),
        ]
    for what, kind, features, hidden, extra_calls in rows:
        yield _row(
            "tp",
            what,
            kind,
            ranks=setting.tp,
            calls=(len(features) + extra_calls) * num_microbatches,
            nbytes=sum(features) * num_microbatches * setting.tokens * setting.element,
            behind=hidden,
        )
    yield from map(
        _traffic,
        head_messages(setting, chunk=loss_chunk_size(run), passes=losses * num_microbatches),
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


def recomputed_spans(workload: Workload, stage: Stage) -> list[int]:
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


# --- cp and experts


def _exchange_traffic(workload: Workload, pp_rank: int, tp_rank: int) -> Iterator[Traffic]:
    """Yield the exchanges inside layers over context-parallel and expert-parallel ranks, those of
    equal layers together."""
    run, setting = workload.run, build_layer_setting(workload, tp_rank)
    modules, num_microbatches = recomputed_modules(run.recompute), workload.num_microbatches
    layers: Counter[Exchange] = Counter()
    recomputed: Counter[Exchange] = Counter()
    outputs_recomputed: Counter[Exchange] = Counter()
    for stage in stages_with_mtp(workload, pp_rank):
        spans = recomputed_spans(workload, stage)
        for number, layer in enumerate(stage.layers):
            layer_recompute = _layer_recompute(run, spans, number, modules)
            own = replace(setting, context=layer_context_kind(run.parallel.context, layer))
            for branch in branches(run.model, layer):
                exchange = branch.kind.exchange(branch, own)
                if exchange is not None:
                    repeated, output_repeated = exchange.repeats(layer_recompute)
                    layers[exchange] += 1
                    recomputed[exchange] += repeated
                    outputs_recomputed[exchange] += output_repeated
    for exchange, count in layers.items():
        passes = Passes(
            layers=count,
            forward=count * num_microbatches,
            recomputed=recomputed[exchange] * num_microbatches,
            outputs_recomputed=outputs_recomputed[exchange] * num_microbatches,
        )
        yield from map(_traffic, exchange.messages(passes))


# --- pp


def _pipeline_traffic(workload: Workload, pp_rank: int) -> Iterator[Traffic]:
    """Yield t · h per microbatch to the next stage, its gradient to the previous one, and as much
    for the source of cross-layer attention and for each MTP layer on its way to the loss; none
    within a rank."""
    num_microbatches = workload.num_microbatches
    behind = "other microbatches" if workload.run.parallel.overlap else ""
    for direction in SENDS:
        boundaries = [
            boundary_tensors(workload, stage, direction)
            for stage in borders(workload, pp_rank, direction)
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


# --- cost of activation recomputation: FLOPs that backward repeats, by layer


def repeated_flops(
    run: TrainRun,
    stages: Sequence[Stage],
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the FLOPs of a step spent on recomputation: the forward of whole layers or of the
    selected modules, MTP layers included; a third of what `step_flops` counts for them.

    stages: of the whole pipeline; the other arguments are those of `step_flops`. Layers below every
    trained parameter have no backward, so they are not recomputed; the matmuls of adapters are not
    counted. Source: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    if run.recompute.granularity == "none":
        return 0
    token_counts = _RepeatedTokens(run.model, tokens, squared_lengths, windowed)
    if run.recompute.granularity == "full":
        return sum(token_counts.layer(layer) for layer in _list_recomputed_layers(run, stages)) // 3
    modules = recomputed_modules(run.recompute)
    # mla_up_proj recomputes core attention as well, so it is counted once
    modules = tuple(
        one for one in modules if one != "core_attention" or "mla_up_proj" not in modules
    )
    layers = (layer for stage in stages for layer in _layers_with_backward(stage.layers, run))
    mtp_layers = [run.model.num_layers - 1] * run.model.mtp.num_layers
    return (
        sum(
            token_counts.part(module, layer)
            for layer in (*layers, *mtp_layers)
            for module in modules
        )
        // 3
    )


def _list_recomputed_layers(run: TrainRun, stages: Sequence[Stage]) -> list[int]:
    """Return the numbers of the recomputed layers over all stages; the last layer's once more per
    MTP layer."""
    recomputed_layers = []
    for stage in stages:
        layers = _layers_with_backward(stage.layers, run)
        recomputed_layers += _select_recomputed(run.recompute, layers)
    return (
        recomputed_layers
        + _select_recomputed(run.recompute, [run.model.num_layers - 1]) * run.model.mtp.num_layers
    )


def _select_recomputed(recompute: RecomputeConfig, layers: Sequence[int]) -> list[int]:
    spans = layer_spans(recompute, OffloadConfig(), len(layers))
    return [layer for span in spans if span.recomputed for layer in layers[span.start : span.stop]]


def _layers_with_backward(layers: range, run: TrainRun) -> list[int]:
    """Return the layers from the first adapter, or the first trained parameter, on."""
    if run.lora is not None:
        first = lora_layers(run.lora, run.model)[0]
    else:
        below = not run.optim.trains_all() and not tables_trained(run.model, run.optim)
        first = first_trained_layer(run.model, run.optim) if below else 0
    return [layer for layer in layers if layer >= first]


class _RepeatedTokens(NamedTuple):
    """Token counts of the documents of a step."""

    model: ModelConfig
    tokens: int
    squared_lengths: int
    windowed: int | None

    def layer(self, layer: int) -> int:
        """Return the model FLOPs of one layer."""
        return layer_flops(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )

    def part(self, module: str, layer: int) -> int:
        """Return the model FLOPs of a recomputed module of a layer; 0 for norms and activations."""
        if module in ("mlp", "shared_experts"):
            return (mlp_flops if module == "mlp" else shared_flops)(self.model, layer, self.tokens)
        if module not in ("core_attention", "mla_up_proj"):
            return 0
        count = latent_flops if module == "mla_up_proj" else attention_flops
        return count(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )


@dataclass(frozen=True, slots=True)
class CommunicationTime:
    """Time of one kind of communication in a step, and the computation time that can overlap it."""

    near: bool
    """Whether all ranks of its group are in one node."""

    seconds: float
    room: float
    """Seconds of computation that can overlap it; 0 if the next operation needs the result."""

    @property
    def exposed(self) -> float:
        """Exposed communication time in seconds, at best."""
        return max(0.0, self.seconds - self.room)


def rank_flops(workload: Workload) -> float:
    """Return the model FLOPs of one rank in a step of the largest batch size, averaged over stages,
    without recomputation."""
    run, t = workload.run, workload.run.train
    row = trained_step_flops(
        run.model, run.lora, run.optim, tokens=t.seq_len, squared_lengths=t.seq_len**2
    )
    return largest_batch_size(t) * row / workload.world


def work_seconds(workload: Workload, device: Device) -> float | None:
    """Return the computation time of a step, with recomputation, without bubble and communication;
    None if the device's rate is not known."""
    if device.tflops is None:
        return None
    return (
        rank_flops(workload) * (1 + repeated_share(workload)) / (device.tflops * 1e12 * EFFICIENCY)
    )


@dataclass(frozen=True, slots=True)
class PhaseEstimate:
    """Estimate of the steps of one batch size of train.batch_size_schedule."""

    start: int
    """Consumed samples at its first step."""

    size: int
    """Global batch size."""

    num_steps: int
    num_microbatches: int
    """Largest number of microbatches of a rank in a step."""

    work_seconds: float | None
    """Computation time of a step on the rank with the most rows, without bubble and
    communication; None if the device's rate is not known."""

    idle_ranks: str
    """What unequal shares of the ranks cost; empty if they are equal."""


def estimate_phases(workload: Workload, device: Device) -> list[PhaseEstimate]:
    """Return an estimate of each batch size of a run, in the order of its steps."""
    run, dp = workload.run, workload.grid.size("dp")
    phases = []
    for start, size, num_steps in build_batch_schedule(run.train).list_phases(run.train.steps):
        train = replace(run.train, global_batch_size=size, batch_size_schedule=())
        phase = plan_workload(replace(run, train=train), workload.world)
        idle, seconds = "", work_seconds(phase, device)
        if run.train.tokens_per_microbatch is None:
            assignment = assign_rows(run, size, dp)
            idle = assignment.describe_idle_ranks()
            if seconds is not None:
                most = min(assignment.num_rounds * run.train.micro_batch_size, size)
                seconds *= most * dp / size
        phases.append(PhaseEstimate(start, size, num_steps, phase.num_microbatches, seconds, idle))
    return phases


def communication_time(
    workload: Workload, row: Traffic, *, pp_rank: int, tp_rank: int, device: Device
) -> CommunicationTime | None:
    """Return the time of this communication; None if the device's bandwidths or rate are not
    known."""
    work = work_seconds(workload, device)
    if work is None or device.near_gbs == 0:
        return None
    rank = workload.rank_at(pp_rank, tp_rank)
    span = ("dp", "cp") if row.axis == "dp" else tuple(row.axis.split("_"))
    ranks = workload.grid.find_group(rank, span)
    near = len({one // device.node for one in ranks}) == 1
    rate = (device.near_gbs if near else device.far_gbs) * 1e9 * LINK_EFFICIENCY
    return CommunicationTime(near, row.nbytes / rate, _overlap_share(workload, row) * work)


def _overlap_share(workload: Workload, row: Traffic) -> float:
    """Return the fraction of a step's computation that can overlap this communication; backward is
    two thirds."""
    num_microbatches = workload.num_microbatches
    if row.behind == NEWTON_SCHULZ:
        hidden = (rule.flops_share or 0.0 for rule in matrix_rule_rows(workload))
        return sum(hidden) * (1 - 2 / row.calls)  # all waves but one
    shares = {
        "": 0.0,
        "last backward": 2 / 3 / num_microbatches,
        "backward": 2 / 3,
        "next forward": 1 / 3 / num_microbatches,
        "other microbatches": 1.0,
        "the other of a pair": _paired_share(workload),
        "the layer before": 1.0,
        "attention": attention_share(workload),
        "matmuls": (layer_share(workload.run) - attention_share(workload))
        / 3,  # of inputs' or of weights' gradients
    }
    return shares[row.behind]


def _paired_share(workload: Workload) -> float:
    """Return the fraction of computation that runs in pairs, on the rank with the fewest."""
    schedule = workload.schedule
    return min(map(len, schedule.pairs), default=0) / (
        schedule.num_chunks * schedule.num_microbatches
    )


def attention_share(workload: Workload) -> float:
    """Return core attention's share of the FLOPs of a step."""
    c, length = workload.run.model, workload.run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - step_flops(c, tokens=length, squared_lengths=0, windowed=0) / whole


def layer_share(run: TrainRun) -> float:
    """Return the layers' share of the FLOPs of a step; the head has the rest."""
    c, length = run.model, run.train.seq_len
    whole = step_flops(c, tokens=length, squared_lengths=length**2)
    return 1 - (1 + c.mtp.num_layers) * head_flops(c, length) / whole


def repeated_share(workload: Workload) -> float:
    """Return the recomputed FLOPs as a fraction of the model FLOPs."""
    run, length = workload.run, workload.run.train.seq_len
    useful = trained_step_flops(
        run.model, run.lora, run.optim, tokens=length, squared_lengths=length**2
    )
    return repeated_flops(run, workload.stages, tokens=length, squared_lengths=length**2) / useful

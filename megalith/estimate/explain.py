"""Describe a parallel layout: both grids, all process groups, and the layers and shards of each
rank.

The result is plain data for tables or JSON; `megalith plan explain` prints it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.estimate.matrices import MatrixRuleRow, matrix_rule_rows
from megalith.estimate.memory import build_layer_setting, has_ema_on_device
from megalith.estimate.workload import Workload
from megalith.plan.batch_schedule import largest_batch_size
from megalith.plan.costs import active_parameters, num_parameters
from megalith.plan.frozen import (
    trained,
    trained_layer_flops,
    trained_names,
    trained_step_flops,
    with_adapters,
    with_frozen,
)
from megalith.plan.grid import Grid, expert_grid
from megalith.plan.layers.base import WIDTHS, HeldParameter, tensor_part
from megalith.plan.layers.embedding import head_flops
from megalith.plan.layers.moe import layer_mixture
from megalith.plan.parameters import held_parameters
from megalith.plan.simulate import even_costs, simulate
from megalith.plan.state_encodings import master_weight_nbytes, slice_state_nbytes
from megalith.plan.update_rules import rule_of
from megalith.rules.moe import router_text

LISTED = 8
"""Number of groups of one kind up to which all are listed; of more, the first two and the last."""

PURPOSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tp",), "split every weight matrix"),
    (("tp_kv",), "hold different KV heads"),
    (("tp_copy",), "hold the same KV heads, and sum their gradients"),
    (("cp",), "split the tokens of each row"),
    (("cp_a2a",), "exchange heads for tokens (all-to-all)"),
    (("cp_ring",), "pass keys and values in a ring"),
    (("pp",), "hold the stages of one pipeline"),
    (("dp",), "read different rows"),
    (("dp", "cp"), "sum gradients: same weights, other tokens"),
    (("dp_shard", "cp"), "ZeRO shards"),
    (("dp_replica",), "replicas of the ZeRO shards"),
)
OF_EXPERTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("etp",), "split every expert's matrices"),
    (("ep",), "hold different experts of each layer, and exchange tokens"),
    (("ep", "etp"), "together hold every expert once"),
    (("edp",), "hold the same experts, and sum their gradients"),
    (("edp_shard",), "ZeRO shards of experts"),
)
"""Axes of groups, and what the ranks of such a group do."""


@dataclass(frozen=True, slots=True)
class AxisRow:
    """Size and stride of one axis of a grid."""

    axis: str
    size: int
    stride: int
    """Difference of the ranks of neighbors."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """All groups along some axes."""

    axes: str
    purpose: str
    size: int
    count: int
    examples: tuple[str, ...]
    """All groups, or the first two and the last."""


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage of the pipeline."""

    stage: int
    pp_rank: int
    chunk: int
    layers: str
    embedding: bool
    loss: bool
    parameters: int
    """Parameters over all tensor-parallel ranks, without adapters; replicated parameters count
    once."""

    trained: int
    """Trained parameters of these, or of their adapters."""

    flops_share: float
    """Fraction of the matmul FLOPs of a step; all stages sum to 1."""

    num_mtp_layers: int = 0
    """Number of MTP layers."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """Shares of tensor-parallel ranks with equal shares."""

    tp_ranks: str
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    kv_copies: int
    """Number of ranks that hold the same KV heads."""


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """MoE layers on each rank, with balanced experts."""

    layers: int
    """Number of MoE layers, over all stages."""

    experts: int
    """Experts per layer."""

    experts_here: int
    """Experts per layer on one rank, whole or split over etp."""

    top_k: int
    router: str
    """Description of the router."""

    active: int
    """Active parameters per token."""

    parameters: int
    """Expert parameters of the rank with the most MoE layers."""

    state: int
    """Bytes of these: weights, gradients and optimizer state."""

    rows: int
    """Rows that a rank's experts of one layer compute per microbatch."""

    crowded_rows: int
    """Rows if all tokens choose these experts."""

    exchanged: int
    """Bytes that a rank sends per all-to-all, of four per layer and microbatch; 0 with allgather.
    """

    gathered: int
    """Bytes that a rank sends per all-gather or reduce-scatter with dispatcher=allgather; else 0.
    """


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Microbatches and tokens of one step."""

    rows_per_microbatch: int
    tokens_per_microbatch: int
    """Tokens per microbatch on one rank."""

    microbatches: int
    tokens_per_step: int
    """Tokens per step over all ranks."""

    tokens_in_flight: int
    """Peak number of tokens with saved activations on the first pipeline rank, once for each chunk.
    """

    schedule: str
    bubble: float
    """Idle time as a fraction of computation time, for equal stages and instantaneous messages."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Description of a parallel layout."""

    world: int
    parameters: int
    """Parameters of the whole model, without adapters."""

    trained: int
    """Trained parameters of these, or of their adapters."""

    kind: str
    """Description of the layers."""

    dense: tuple[AxisRow, ...]
    expert: tuple[AxisRow, ...]
    groups: tuple[GroupRow, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[PartRow, ...]
    experts: ExpertsRow | None
    """None: the model has no experts."""

    rhythm: StepSummary

    matrix_rules: tuple[MatrixRuleRow, ...] = ()
    """Update rules per matrix and their assigned ranks."""


def explain(workload: Workload) -> Explanation:
    """Return the description of a run's layout."""
    p = workload.run.parallel
    # Without experts, show the grid that experts would have with ep=1.
    expert = workload.grid.experts or expert_grid(
        world=workload.world, etp=p.tp, ep=1, pp=p.pp, order=p.order
    )
    c = workload.run.model
    parameters, stages = num_parameters(c), tuple(stage_rows(workload))
    # Not the sum of the stages, which count shared tables several times.
    whole = held_parameters(c)
    return Explanation(
        world=workload.world,
        parameters=parameters,
        trained=parameters if trains_all(workload.run) else _num_trained(workload.run, whole),
        kind=kind_text(workload.run.model),
        dense=axis_rows(workload.grid, ("tp", "cp", "dp", "pp")),
        expert=axis_rows(expert, ("etp", "ep", "edp", "pp")),
        groups=tuple(group_rows(workload.grid)),
        stages=stages,
        parts=tuple(part_rows(workload)),
        experts=experts_row(workload),
        rhythm=rhythm(workload),
        matrix_rules=tuple(matrix_rule_rows(workload)),
    )


def kind_text(model: ModelConfig) -> str:
    """Describe the layers of a model in one line.

    >>> heads = {"num_heads": 4, "num_kv_heads": 2}
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2} | heads
    >>> kind_text(ModelConfig(**sizes, ffn_hidden_size=8))
    'sequential, RMSNorm before, 4 heads on 2 KV heads of 2 features, rope, gated silu'
    """
    norm = {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm]
    block = model.block.replace("_one_norm", " with one norm")
    words = [block, f"{norm} {model.norm_placement}", _attention_text(model)]
    positions = {"rope": _rope_text(model), "none": "no positions"}
    words.append(positions.get(model.positions, f"{model.positions} positions"))
    words.append(f"{'gated ' * model.gated}{model.activation}")
    words += [*_mixture_text(model), *_cross_text(model), *_layer_differences_text(model)]
    words += [f"{model.mtp.num_layers} MTP layers"] if model.mtp.num_layers else []
    return ", ".join(words + (["dropout"] if model.dropout.is_enabled() else []))


def _mixture_text(model: ModelConfig) -> Iterator[str]:
    """Describe the experts and the layers that have them."""
    moe, layers = model.moe, model.num_layers
    if moe is None:
        return
    count = sum(model.has_experts(layer) for layer in range(layers))
    where = "" if count == layers else f" in {count} of {layers} layers"
    yield f"{moe.top_k} of {moe.num_experts} experts of {moe.ffn_hidden_size} features{where}"
    if moe.shared_ffn_hidden_size is not None:
        yield f"shared experts of {moe.shared_ffn_hidden_size} features"
    if moe.latent_size is not None:
        yield f"latent size {moe.latent_size}"


def _cross_text(model: ModelConfig) -> Iterator[str]:
    """Describe cross-layer attention."""
    if model.cross is not None:
        count, source_layer = (
            sum(model.uses_cross_layer_source(layer) for layer in range(model.num_layers)),
            model.cross.memory,
        )
        yield (
            f"cross-layer attention to layer {source_layer} in {count} of {model.num_layers} layers"
        )


def _layer_differences_text(model: ModelConfig) -> Iterator[str]:
    """Describe how the layers differ."""
    own, layers = model.layers, [model.at(layer) for layer in range(model.num_layers)]
    for word, pattern in {"attention": own.attention, "MLP": own.mlp}.items():
        parts = Counter(pattern[layer % len(pattern)] for layer in range(len(layers)) if pattern)
        counts = {"replaced by one matrix": parts["linear"], "left out": parts["none"]}
        yield from (
            f"{word} {how} in {count} of {len(layers)} layers"
            for how, count in counts.items()
            if count
        )
    if own.num_kv_heads:
        yield f"{_span([layer.num_kv_heads for layer in layers])} KV heads"
    if own.ffn_hidden_size:
        yield f"{_span([layer.ffn_hidden_size for layer in layers])} features in the MLP"


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)} to {max(counts)}"


def _attention_text(model: ModelConfig) -> str:
    kind, mla = model.attention, model.mla
    if mla is not None:
        text = (
            f"{model.num_heads} latent heads of {mla.nope_dim} + {mla.rope_dim} features from "
            f"{mla.kv_rank}"
        )
    else:
        text = (
            f"{model.num_heads} heads on {model.num_kv_heads} KV heads of "
            f"{model.head_size()} features"
        )
    if kind.window is not None:
        count = sum(model.has_window(layer) for layer in range(model.num_layers))
        where = "" if count == model.num_layers else f" in {count} of {model.num_layers} layers"
        right_text = "" if kind.window_right is None else f" and {kind.window_right} after it"
        text += (
            f", {'chunks' if kind.chunked else 'window'} of {kind.window} tokens{right_text}{where}"
        )
    extras = {
        f"QK norm ({kind.qk_norm})": kind.qk_norm != "none",
        "softcap": kind.softcap is not None,
        "sinks": kind.sinks,
        "softmax off by one": kind.off_by_one,
        "not causal": not kind.causal,
        "gated attention": kind.gated,
    }
    return ", ".join([text, *(word for word, is_set in extras.items() if is_set)])


def _rope_text(model: ModelConfig) -> str:
    rope, layers = model.rope, model.num_layers
    words = ["rope"] + ([rope.scaling] if rope.scaling != "none" else [])
    words += [f"of {model.rotary_size()} features"] if rope.fraction < 1 else []
    skipped = layers - sum(model.uses_rope(layer) for layer in range(layers))
    return " ".join(words + ([f"but in {skipped} of {layers} layers"] if skipped else []))


def axis_rows(grid: Grid, axes: Sequence[str]) -> tuple[AxisRow, ...]:
    """Return the axes of one grid; their sizes multiply to the world size."""
    return tuple(AxisRow(axis, *grid.strides(axis)) for axis in axes)


def group_rows(grid: Grid) -> Iterator[GroupRow]:
    """Yield all kinds of groups with more than one rank; axes with the same ranks as earlier ones
    are skipped, except for experts."""
    listed: set[tuple[int, ...]] = set()
    spans = [*((PURPOSES,) if grid.experts is None else (PURPOSES, OF_EXPERTS))]
    for number, (span, purpose) in (
        (number, row) for number, rows in enumerate(spans) for row in rows
    ):
        listed = set() if number and span == OF_EXPERTS[0][0] else listed
        first = grid.find_group(grid.offset, span)
        if len(first) == 1 or first in listed:
            continue
        listed.add(first)
        groups = grid.groups(span)
        shown = groups if len(groups) <= LISTED else [groups[0], groups[1], groups[-1]]
        yield GroupRow(
            " · ".join(span), purpose, len(first), len(groups), tuple(map(ranks_text, shown))
        )


def experts_row(workload: Workload) -> ExpertsRow | None:
    """Return the description of the experts; None without experts."""
    run, grid = workload.run, workload.grid
    model = run.model
    if model.moe is None or grid.experts is None:
        return None
    most = max(range(run.parallel.pp), key=lambda pp: sum(_list_has_experts(workload, pp)))
    held = [one for one in workload.parameters(most, 0) if one.grid == "expert"]
    part, numel = workload.expert_part(most, 0), sum(one.numel for one in held)
    one = layer_mixture(build_layer_setting(workload, 0))
    exchanges, others = run.parallel.dispatcher != "allgather", part.ep * part.etp - 1
    row = one.features * WIDTHS[run.precision.params].value
    return ExpertsRow(
        layers=sum(model.has_experts(layer) for layer in range(model.num_layers))
        + model.mtp.num_layers * _mtp_has_experts(model),
        experts=model.moe.num_experts,
        experts_here=model.moe.num_experts // part.ep,
        top_k=model.moe.top_k,
        router=router_text(model.moe),
        active=active_parameters(model),
        parameters=numel,
        state=state_bytes(workload, numel),
        rows=one.rows,
        crowded_rows=replace(one, crowded=True).rows,
        exchanged=one.sent * row * (part.ep - 1) // part.ep if exchanges else 0,
        gathered=0 if exchanges else one.tokens * row * others,
    )


def _list_has_experts(workload: Workload, pp_rank: int) -> list[bool]:
    """Return which layers of a pipeline rank have experts."""
    return [
        workload.run.model.has_experts(layer)
        for stage in workload.chunks(pp_rank)
        for layer in stage.layers
    ]


def _mtp_has_experts(model: ModelConfig) -> bool:
    """Return whether MTP layers, which are like the last layer, have experts."""
    return model.has_experts(model.num_layers - 1)


def trains_all(run: TrainRun) -> bool:
    """Return whether no parameter is frozen."""
    return run.lora is None and run.optim.trains_all()


def state_bytes(workload: Workload, numel: int) -> int:
    """Return the bytes of weights, gradients, master weights and moments of `numel` expert
    parameters: in bf16 with AdamW 18 bytes each, 6 + 12 / edp with zero=1, 2 + 16 / edp with
    zero=2."""
    run, ranks = workload.run, workload.expert_shards
    width, zero = WIDTHS[run.precision.params], run.parallel.zero
    rule = next(
        (
            rule_of(one.name, int(one.matrix), run.optim)
            for one in held_parameters(run.model)
            if ".experts." in one.name and one.matrix
        ),
        "",
    )
    states = slice_state_nbytes(numel, 1, rule, run.optim, run.precision)
    unsharded = width.value + (0 if zero == 2 else width.sums)
    average = width.sums if has_ema_on_device(run) else 0
    sharded = master_weight_nbytes(run.precision) + average + (width.sums if zero == 2 else 0)
    is_frozen = run.lora is not None or not any(
        ".experts." in name for name in trained_names(run.model, run.optim)
    )
    return 0 if is_frozen else numel * unsharded + (numel * sharded + states) // ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """Format rank numbers compactly.

    >>> every_eighth = [0, 8, 16, 24, 32]
    >>> [ranks_text(ranks) for ranks in ([0, 1, 2, 3], every_eighth, [3, 7], [0, 1, 8, 9])]
    ['0-3', '0, 8 ... 32', '3, 7', '0, 1, 8, 9']
    """
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4 and len(steps) == 1:
        return f"{ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    if len(ranks) > 8:
        return f"{', '.join(map(str, ranks[:4]))} ... {ranks[-1]}"
    return ", ".join(map(str, ranks))


def stage_rows(workload: Workload) -> Iterator[StageRow]:
    """Yield all stages, first to last."""
    run = workload.run
    c, length = run.model, run.train.seq_len
    whole = trained_step_flops(c, run.lora, run.optim, tokens=length, squared_lengths=length**2)
    each = [
        trained_layer_flops(c, run.lora, layer, run.optim, tokens=length, squared_lengths=length**2)
        for layer in range(c.num_layers)
    ]
    ends = whole - sum(each)
    head = _head_work(run, ends)
    for number, stage in enumerate(workload.stages):
        pp_rank, chunk = workload.schedule.rank_and_chunk(number)
        held = held_parameters(c, stage)
        yield StageRow(
            stage=number,
            pp_rank=pp_rank,
            chunk=chunk,
            layers=layers_text(stage.layers),
            embedding=stage.embedding,
            loss=stage.loss,
            num_mtp_layers=stage.num_mtp_layers,
            parameters=sum(one.numel for one in held if one.counts),
            trained=_num_trained(run, held),
            flops_share=(
                sum(each[layer] for layer in stage.layers)
                + stage.loss * head
                + (stage.num_mtp_layers > 0) * (ends - head)
            )
            / whole,
        )


def _num_trained(run: TrainRun, held: Sequence[HeldParameter]) -> int:
    """Return the number of trained parameters of these, or of their adapters."""
    return sum(
        one.numel
        for one in trained(with_frozen(with_adapters(held, run.model, run.lora), run.optim))
    )


def _head_work(run: TrainRun, ends: int) -> int:
    """Return the head's FLOPs; the remaining FLOPs outside of layers belong to MTP."""
    c, length = run.model, run.train.seq_len
    own = run.lora is None and run.optim.trains(
        "embed.weight" if c.tied_embeddings else "head.weight"
    )
    head = (1 + c.mtp.num_layers) * head_flops(c, length) * (3 if own else 2) // 3
    return min(ends, head) if c.mtp.num_layers else ends


def layers_text(layers: range) -> str:
    """Format layer numbers compactly.

    >>> layers_text(range(3, 6)), layers_text(range(7, 8)), layers_text(range(0))
    ('3-5', '7', 'none')
    """
    if not layers:
        return "none"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def part_rows(workload: Workload) -> Iterator[PartRow]:
    """Yield the shares of tensor-parallel ranks, with equal shares in one row."""
    run, tp = workload.run, workload.run.parallel.tp
    ranks_with: dict[tuple[int, int, int, int, int], list[int]] = {}
    for rank in range(tp):
        part = tensor_part(run.model, tp=tp, rank=rank)
        key = (part.heads, part.kv_heads, part.ffn, part.vocab, part.kv_copies)
        ranks_with.setdefault(key, []).append(rank)
    for key, ranks in ranks_with.items():
        yield PartRow(ranks_text(ranks), *key)


def rhythm(workload: Workload) -> StepSummary:
    """Return the microbatches, tokens in flight and pipeline bubble of a step."""
    t, schedule = workload.run.train, workload.schedule
    alive = most = 0
    for kind, *_ in schedule.ranks[0]:
        alive += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, alive)
    bubble = simulate(schedule, even_costs(schedule.num_stages)).bubble
    return StepSummary(
        rows_per_microbatch=len(workload.lengths),
        tokens_per_microbatch=workload.tokens,
        microbatches=workload.num_microbatches,
        tokens_per_step=largest_batch_size(t) * t.seq_len,
        tokens_in_flight=most * workload.tokens,
        schedule=schedule.name,
        bubble=float(bubble),
    )

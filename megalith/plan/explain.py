"""A layout in words and numbers: both grids, every sort of group, which layers and slices each rank
has.

Everything here is data that prints as a table or as JSON; `megalith plan explain` shows it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.plan.adapters import trained, trained_layer_flops, trained_step_flops, with_adapters
from megalith.plan.costs import WIDTHS, active_parameters, head_flops, num_parameters
from megalith.plan.experts import router_text
from megalith.plan.frozen import trained_names, with_frozen
from megalith.plan.grid import Grid, expert_grid
from megalith.plan.memory import mixture_of
from megalith.plan.parameters import HeldParameter, held_parameters, tensor_part
from megalith.plan.simulate import even_costs, simulate
from megalith.plan.workload import Workload

LISTED = 8
"""Groups of one sort that are all listed; of more, the first two and the last."""

PURPOSES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tp",), "split every weight matrix"),
    (("tp_kv",), "hold different key/value heads"),
    (("tp_copy",), "hold the same key/value heads, and sum their gradients"),
    (("cp",), "share the tokens of each row"),
    (("cp_a2a",), "exchange heads for tokens"),
    (("cp_ring",), "pass keys and values round"),
    (("pp",), "hold the stages of one pipeline"),
    (("dp",), "read different rows"),
    (("dp", "cp"), "sum gradients: same weights, other tokens"),
    (("dp_shard", "cp"), "divide what ZeRO divides"),
    (("dp_replica",), "hold the same of what ZeRO divides"),
)
OF_EXPERTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("etp",), "split every expert's matrices"),
    (("ep",), "divide the experts of each layer, and exchange tokens for them"),
    (("ep", "etp"), "together hold every expert once"),
    (("edp",), "hold the same of experts, and sum its gradients"),
    (("edp_shard",), "divide what ZeRO divides of experts"),
)
"""KeySpans of axes, and what the ranks of such a group do together."""


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One axis of a grid."""

    axis: str
    size: int
    stride: int
    """Rank numbers between neighbors."""


@dataclass(frozen=True, slots=True)
class GroupRow:
    """All groups along one span of axes."""

    axes: str
    purpose: str
    size: int
    count: int
    examples: tuple[str, ...]
    """All of them, or the first two and the last."""


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
    """Of all its tensor-parallel ranks together, without adapters; what several of them hold counts
    once."""

    trained: int
    """Of these, or of the adapters beside them."""

    flops_share: float
    """Of the step's matrix work; all stages together 1."""

    num_mtp_layers: int = 0
    """MTP layers."""


@dataclass(frozen=True, slots=True)
class PartRow:
    """What some tensor-parallel ranks have of everything that is split."""

    tp_ranks: str
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    kv_copies: int
    """Ranks that hold the same key/value heads."""


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """Mixtures of experts, as each rank meets them; all experts equally busy."""

    layers: int
    """That have experts, over all stages."""

    experts: int
    """Of a layer."""

    experts_here: int
    """Of a layer on one rank, whole or a part of each."""

    top_k: int
    router: str
    """How tokens choose, in words."""

    active: int
    """Parameters that a token meets."""

    parameters: int
    """Of the experts of one rank, where that has most layers with experts."""

    state: int
    """Bytes of these: weights, gradients and optimizer state."""

    rows: int
    """That a rank's experts of one layer work on in a microbatch."""

    crowded_rows: int
    """The same if all tokens choose them."""

    exchanged: int
    """Bytes that a rank sends in one exchange of rows, of four in each layer and microbatch; 0
    without."""

    gathered: int
    """The same of one gather of tokens, or sum of answers, where these travel instead."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """One step as a rank lives it."""

    rows_per_microbatch: int
    tokens_per_microbatch: int
    """On one rank."""

    microbatches: int
    tokens_per_step: int
    """Over all ranks."""

    tokens_in_flight: int
    """Of the first pipeline rank, at the height: tokens with activations kept in some chunk, once
    for each chunk."""

    schedule: str
    bubble: float
    """Idle time as a part of computing time, when all stages take equally long and messages no
    time."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A layout."""

    world: int
    parameters: int
    """Of the whole model, without adapters."""

    trained: int
    """Of these, or of the adapters beside them: what has gradients and optimizer state."""

    kind: str
    """What kind of layers it has, in words."""

    dense: tuple[AxisRow, ...]
    expert: tuple[AxisRow, ...]
    groups: tuple[GroupRow, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[PartRow, ...]
    experts: ExpertsRow | None
    """None: there are none."""

    rhythm: Rhythm


def explain(workload: Workload) -> Explanation:
    """Everything about where the work of a run goes."""
    p = workload.run.parallel
    # Experts would be divided over the ranks that share a stage; a model without any has one of
    # each weight.
    expert = workload.grid.experts or expert_grid(
        world=workload.world, etp=p.tp, ep=1, pp=p.pp, order=p.order
    )
    c = workload.run.model
    parameters, stages = num_parameters(c), tuple(stage_rows(workload))
    # Not the stages' sum: tables that several of them hold would count again.
    whole = held_parameters(
        c, tp=1, tp_rank=0, layers=range(c.num_layers), embedding=True, loss=True
    )
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
    )


def kind_text(model: ModelConfig) -> str:
    """What a model's layers are made of, in one line.

    >>> heads = {"num_heads": 4, "num_kv_heads": 2}
    >>> sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 2} | heads
    >>> kind_text(ModelConfig(**sizes, ffn_hidden_size=8))
    'sequential, RMSNorm before, 4 heads on 2 keys of 2 features, rope, gated silu'
    """
    norm = {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm]
    block = model.block.replace("_one_norm", " with one norm")
    words = [block, f"{norm} {model.norm_placement}", _attention_text(model)]
    positions = {"rope": _rope_text(model), "none": "no positions"}
    words.append(positions.get(model.positions, f"{model.positions} positions"))
    words.append(f"{'gated ' * model.gated}{model.activation}")
    words += [*_mixture_text(model), *_cross_text(model), *_unlike_text(model)]
    words += [f"{model.mtp.num_layers} multi-token predictions"] if model.mtp.num_layers else []
    return ", ".join(words + (["dropout"] if model.dropout.drops() else []))


def _mixture_text(model: ModelConfig) -> Iterator[str]:
    """Experts, and where they are."""
    moe, layers = model.moe, model.num_layers
    if moe is None:
        return
    count = sum(model.has_experts(layer) for layer in range(layers))
    where = "" if count == layers else f" in {count} of {layers} layers"
    yield f"{moe.top_k} of {moe.num_experts} experts of {moe.ffn_hidden_size} features{where}"
    if moe.shared_ffn_hidden_size is not None:
        yield f"{moe.shared_ffn_hidden_size} features for all tokens"
    if moe.latent_size is not None:
        yield f"experts on {moe.latent_size} features"


def _cross_text(model: ModelConfig) -> Iterator[str]:
    """Which layers look at a memory."""
    if model.cross is not None:
        count, taken = (
            sum(model.uses_cross_layer_source(layer) for layer in range(model.num_layers)),
            model.cross.memory,
        )
        yield f"a look at what enters layer {taken} in {count} of {model.num_layers} layers"


def _unlike_text(model: ModelConfig) -> Iterator[str]:
    """How layers differ."""
    own, layers = model.layers, [model.at(layer) for layer in range(model.num_layers)]
    for word, pattern in {"attention": own.attention, "MLP": own.mlp}.items():
        parts = Counter(pattern[layer % len(pattern)] for layer in range(len(layers)) if pattern)
        told = {"replaced by one matrix": parts["linear"], "left out": parts["none"]}
        yield from (
            f"{word} {how} in {count} of {len(layers)} layers"
            for how, count in told.items()
            if count
        )
    if own.num_kv_heads:
        yield f"{_span([layer.num_kv_heads for layer in layers])} keys"
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
            f"{model.num_heads} heads on {model.num_kv_heads} keys of {model.head_size()} features"
        )
    if kind.window is not None:
        count = sum(model.has_window(layer) for layer in range(model.num_layers))
        where = "" if count == model.num_layers else f" in {count} of {model.num_layers} layers"
        ahead = "" if kind.window_right is None else f" and {kind.window_right} after it"
        text += f", {'chunks' if kind.chunked else 'window'} of {kind.window} tokens{ahead}{where}"
    extras = {
        f"queries and keys normed ({kind.qk_norm})": kind.qk_norm != "none",
        "scores capped": kind.softcap is not None,
        "sinks": kind.sinks,
        "softmax off by one": kind.off_by_one,
        "looking both ways": not kind.causal,
        "gated attention": kind.gated,
    }
    return ", ".join([text, *(word for word, there in extras.items() if there)])


def _rope_text(model: ModelConfig) -> str:
    rope, layers = model.rope, model.num_layers
    words = ["rope"] + ([rope.scaling] if rope.scaling != "none" else [])
    words += [f"of {model.rotary_size()} features"] if rope.fraction < 1 else []
    skipped = layers - sum(model.uses_rope(layer) for layer in range(layers))
    return " ".join(words + ([f"but in {skipped} of {layers} layers"] if skipped else []))


def axis_rows(grid: Grid, axes: Sequence[str]) -> tuple[AxisRow, ...]:
    """The axes of one grid; the sizes multiply to the world."""
    return tuple(AxisRow(axis, *grid.strides(axis)) for axis in axes)


def group_rows(grid: Grid) -> Iterator[GroupRow]:
    """Every sort of group with more than one rank, once: spans that mean the same ranks as one
    before are left out, but for those of experts."""
    seen: set[tuple[int, ...]] = set()
    spans = [*((PURPOSES,) if grid.experts is None else (PURPOSES, OF_EXPERTS))]
    for number, (span, purpose) in (
        (number, row) for number, rows in enumerate(spans) for row in rows
    ):
        seen = set() if number and span == OF_EXPERTS[0][0] else seen
        first = grid.group_of(grid.offset, span)
        if len(first) == 1 or first in seen:
            continue
        seen.add(first)
        groups = grid.groups(span)
        shown = groups if len(groups) <= LISTED else [groups[0], groups[1], groups[-1]]
        yield GroupRow(
            " · ".join(span), purpose, len(first), len(groups), tuple(map(ranks_text, shown))
        )


def experts_row(workload: Workload) -> ExpertsRow | None:
    """What is to know about experts."""
    run, grid = workload.run, workload.grid
    model = run.model
    if model.moe is None or grid.experts is None:
        return None
    most = max(range(run.parallel.pp), key=lambda pp: sum(_has(workload, pp)))
    held = [one for one in workload.parameters(most, 0) if one.grid == "expert"]
    part, numel = workload.expert_part(most, 0), sum(one.numel for one in held)
    one = mixture_of(workload, 0)
    exchanges, others = run.parallel.dispatcher != "allgather", part.ep * part.etp - 1
    row = one.features * WIDTHS[run.precision.params].value
    return ExpertsRow(
        layers=sum(model.has_experts(layer) for layer in range(model.num_layers))
        + model.mtp.num_layers * _last_has(model),
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


def _has(workload: Workload, pp_rank: int) -> list[bool]:
    """Of the layers of a pipeline rank, which have experts."""
    return [
        workload.run.model.has_experts(layer)
        for stage in workload.chunks(pp_rank)
        for layer in stage.layers
    ]


def _last_has(model: ModelConfig) -> bool:
    """Whether multi-token predictions, which are as the last layer, have experts."""
    return model.has_experts(model.num_layers - 1)


def trains_all(run: TrainRun) -> bool:
    """Whether nothing is frozen."""
    return run.lora is None and run.optim.trains_all()


def state_bytes(workload: Workload, numel: int) -> int:
    """Weights, gradients, master copies and moments of so many parameters of experts: in bf16
    with AdamW 18 bytes each, 6 + 12 / edp with zero=1, 2 + 16 / edp with zero=2."""
    run, ranks = workload.run, workload.expert_shards
    width, zero = WIDTHS[run.precision.params], run.parallel.zero
    moments = {"adamw": 2, "sgd": int(run.optim.momentum > 0)}[run.optim.kind] * width.sums
    whole = width.value + (0 if zero == 2 else width.sums)
    divided = width.master + moments + (width.sums if zero == 2 else 0)
    still = run.lora is not None or not any(
        ".experts." in name for name in trained_names(run.model, run.optim)
    )
    return 0 if still else numel * whole + numel * divided // ranks


def ranks_text(ranks: Sequence[int]) -> str:
    """Rank numbers, short.

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
    """Every stage, first to last."""
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
        pp_rank, chunk = workload.schedule.place_of(number)
        held = held_parameters(
            c,
            tp=1,
            tp_rank=0,
            layers=stage.layers,
            embedding=stage.embedding,
            loss=stage.loss,
            norm=stage.norm,
            num_mtp_layers=stage.num_mtp_layers,
        )
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
    """How many of these numbers, or of those of adapters to them, are trained."""
    return sum(
        one.numel
        for one in trained(with_frozen(with_adapters(held, run.model, run.lora), run.optim))
    )


def _head_work(run: TrainRun, ends: int) -> int:
    """The head's part of what is done outside of layers; multi-token predictions have the rest."""
    c, length = run.model, run.train.seq_len
    own = run.lora is None and run.optim.trains(
        "embed.weight" if c.tied_embeddings else "head.weight"
    )
    head = (1 + c.mtp.num_layers) * head_flops(c, length) * (3 if own else 2) // 3
    return min(ends, head) if c.mtp.num_layers else ends


def layers_text(layers: range) -> str:
    """Layer numbers, short.

    >>> layers_text(range(3, 6)), layers_text(range(7, 8)), layers_text(range(0))
    ('3-5', '7', 'none')
    """
    if not layers:
        return "none"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def part_rows(workload: Workload) -> Iterator[PartRow]:
    """What tensor-parallel ranks have, those with equal parts together."""
    run, tp = workload.run, workload.run.parallel.tp
    ranks_with: dict[tuple[int, int, int, int, int], list[int]] = {}
    for rank in range(tp):
        part = tensor_part(run.model, tp=tp, rank=rank)
        key = (part.heads, part.kv_heads, part.ffn, part.vocab, part.kv_copies)
        ranks_with.setdefault(key, []).append(rank)
    for key, ranks in ranks_with.items():
        yield PartRow(ranks_text(ranks), *key)


def rhythm(workload: Workload) -> Rhythm:
    """Microbatches, tokens in flight and the bubble."""
    t, schedule = workload.run.train, workload.schedule
    alive = most = 0
    for kind, *_ in schedule.ranks[0]:
        alive += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        most = max(most, alive)
    bubble = simulate(schedule, even_costs(schedule.num_stages)).bubble
    return Rhythm(
        rows_per_microbatch=len(workload.lengths),
        tokens_per_microbatch=workload.tokens,
        microbatches=workload.num_microbatches,
        tokens_per_step=t.global_batch_size * t.seq_len,
        tokens_in_flight=most * workload.tokens,
        schedule=schedule.name,
        bubble=float(bubble),
    )

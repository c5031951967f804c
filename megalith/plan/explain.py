"""A layout in words and numbers: both grids, every sort of group, which layers and slices each rank has.

Everything here is data that prints as a table or as JSON; `megalith plan explain` shows it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megalith.plan.costs import num_parameters, step_flops
from megalith.plan.grid import Grid, expert_grid
from megalith.plan.parameters import held_parameters, tensor_part
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
"""Spans of axes, and what the ranks of such a group do together."""


@dataclass(frozen=True, slots=True)
class AxisRow:
    """One axis of a grid."""

    axis: str
    size: int
    stride: int
    """Rank numbers between neighbours."""


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
    """Of all its tensor-parallel ranks together; what several of them hold counts once."""

    flops_share: float
    """Of the step's matrix work; all stages together 1."""


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
class Rhythm:
    """One step as a rank lives it."""

    rows_per_microbatch: int
    tokens_per_microbatch: int
    """On one rank."""

    microbatches: int
    tokens_per_step: int
    """Over all ranks."""

    tokens_in_flight: int
    """Of the first pipeline rank, at the height: tokens with activations kept in some chunk, once for each chunk."""

    schedule: str
    bubble: float
    """Idle time as a part of computing time, when all stages take equally long and messages no time."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A layout."""

    world: int
    parameters: int
    """Of the whole model."""

    dense: tuple[AxisRow, ...]
    expert: tuple[AxisRow, ...]
    groups: tuple[GroupRow, ...]
    stages: tuple[StageRow, ...]
    parts: tuple[PartRow, ...]
    rhythm: Rhythm


def explain(workload: Workload) -> Explanation:
    """Everything about where the work of a run goes."""
    p = workload.run.parallel
    # Experts would be divided over the ranks that share a stage; a model without any has one of each weight.
    expert = expert_grid(world=workload.world, etp=p.tp, ep=1, pp=p.pp, order=p.order)
    return Explanation(
        world=workload.world,
        parameters=num_parameters(workload.run.model),
        dense=axis_rows(workload.grid, ("tp", "cp", "dp", "pp")),
        expert=axis_rows(expert, ("etp", "ep", "edp", "pp")),
        groups=tuple(group_rows(workload.grid)),
        stages=tuple(stage_rows(workload)),
        parts=tuple(part_rows(workload)),
        rhythm=rhythm(workload),
    )


def axis_rows(grid: Grid, axes: Sequence[str]) -> tuple[AxisRow, ...]:
    """The axes of one grid; the sizes multiply to the world."""
    return tuple(AxisRow(axis, *grid.strides(axis)) for axis in axes)


def group_rows(grid: Grid) -> Iterator[GroupRow]:
    """Every sort of group with more than one rank, once: spans that mean the same ranks as one before are left out."""
    seen = set()
    for span, purpose in PURPOSES:
        first = grid.group_of(grid.offset, span)
        if len(first) == 1 or first in seen:
            continue
        seen.add(first)
        groups = grid.groups(span)
        shown = groups if len(groups) <= LISTED else [groups[0], groups[1], groups[-1]]
        yield GroupRow(" · ".join(span), purpose, len(first), len(groups), tuple(map(ranks_text, shown)))


def ranks_text(ranks: Sequence[int]) -> str:
    """Rank numbers, short.

    >>> ranks_text([0, 1, 2, 3]), ranks_text([0, 8, 16, 24, 32]), ranks_text([3, 7]), ranks_text([0, 1, 8, 9])
    ('0-3', '0, 8 ... 32', '3, 7', '0, 1, 8, 9')
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
    head = 6 * c.hidden_size * c.vocab_size
    whole = step_flops(c, tokens=length, squared_lengths=length**2) / length
    layer = (whole - head) / c.num_layers
    for number, stage in enumerate(workload.stages):
        pp_rank, chunk = workload.schedule.place_of(number)
        held = held_parameters(c, tp=1, tp_rank=0, layers=stage.layers, embedding=stage.embedding, loss=stage.loss)
        yield StageRow(
            stage=number,
            pp_rank=pp_rank,
            chunk=chunk,
            layers=layers_text(stage.layers),
            embedding=stage.embedding,
            loss=stage.loss,
            parameters=sum(one.numel for one in held),
            flops_share=(len(stage.layers) * layer + stage.loss * head) / whole,
        )


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
        rows_per_microbatch=t.micro_batch_size,
        tokens_per_microbatch=workload.tokens,
        microbatches=workload.num_microbatches,
        tokens_per_step=t.global_batch_size * t.seq_len,
        tokens_in_flight=most * workload.tokens,
        schedule=schedule.name,
        bubble=float(bubble),
    )

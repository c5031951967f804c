"""Pipeline stages: which layers each has, and where the embedding and the loss are."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from megalith.config.model import ModelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.errors import PlanError
from megalith.plan.schedule import place_of, placement_of, schedule_name, stage_of
from megalith.plan.shards import split_evenly
from megalith.plan.stage_layout import FIELD, Item, mistake, parse_layout, show_layout


@dataclass(frozen=True, slots=True)
class Stage:
    """What one stage computes. One with nothing at all only hands on what it receives."""

    layers: range
    """Numbers of its layers, counted over the whole model."""

    embedding: bool = False
    """Token numbers come in here."""

    loss: bool = False
    """The last norm, the head and the loss are here."""


def whole_model(num_layers: int) -> Stage:
    """The one stage of a model that is not divided."""
    return Stage(range(num_layers), embedding=True, loss=True)


def plan_stages(pipeline: PipelineConfig, *, pp: int, num_layers: int) -> tuple[Stage, ...]:
    """Every stage, first to last: pp · vpp of them; with pp=1 and vpp=1 one that is the whole model.

    `plan/schedule.stage_of` says which of them a rank holds.

    Raises:
        PlanError: the layers do not divide as asked; every reason at once.
    """
    problems = stages_problems(pipeline, pp=pp, num_layers=num_layers)
    if problems:
        raise PlanError(f"{num_layers} layers must be divided otherwise: {' '.join(problems)}")
    if pp * pipeline.vpp == 1:
        return (whole_model(num_layers),)
    if pipeline.layout is not None:
        counts = [_kinds(stage)["t"] for stage in parse_layout(pipeline.layout)]
    else:
        counts = _counts(pipeline, pp, num_layers)
    return _stages(counts)


def stages_of_rank(stages: Sequence[Stage], rank: int, pipeline: PipelineConfig, *, pp: int) -> list[Stage]:
    """The chunks of pipeline rank number `rank`, by chunk number."""
    placement = placement_of(schedule_name(pipeline))
    return [stages[stage_of(rank, chunk, num_ranks=pp, placement=placement)] for chunk in range(len(stages) // pp)]


def stage_of_layer(stages: Sequence[Stage], layer: int) -> int:
    """The stage that has layer number `layer`."""
    return next(number for number, stage in enumerate(stages) if layer in stage.layers)


def table_ranks(stages: Sequence[Stage], pipeline: PipelineConfig, *, pp: int) -> tuple[int, ...]:
    """Pipeline ranks that use the vocabulary table of a tied model: the embedding's and the loss's, ascending.

    They are one rank in a V, whose first and last stage lie together, or without a pipeline.
    """
    placement = placement_of(schedule_name(pipeline))
    used = [number for number, stage in enumerate(stages) if stage.embedding or stage.loss]
    return tuple(sorted({place_of(number, num_ranks=pp, placement=placement)[0] for number in used}))


def bias_ranks(model: ModelConfig, stages: Sequence[Stage], pipeline: PipelineConfig, *, pp: int) -> tuple[int, ...]:
    """Pipeline ranks whose layers read the table of relative positions, ascending; each holds a copy."""
    placement = placement_of(schedule_name(pipeline))
    used = [n for n, stage in enumerate(stages) if model.needs_biases(layers=len(stage.layers), loss=stage.loss)]
    return tuple(sorted({place_of(number, num_ranks=pp, placement=placement)[0] for number in used}))


def layout_of(stages: Sequence[Stage]) -> str:
    """The stages as a layout string.

    >>> layout_of([Stage(range(3), embedding=True), Stage(range(3, 5)), Stage(range(5, 6), loss=True)])
    'Et*3|tt|tL'
    """
    return show_layout(["E" * stage.embedding + "t" * len(stage.layers) + "L" * stage.loss for stage in stages])


def proposed_layout(num_layers: int, num_stages: int) -> str:
    """A layout for any number of layers: the embedding and the loss take the place of a layer each, if there is room.

    >>> proposed_layout(30, 4)
    'Et*7|t*8|t*8|t*7L'
    """
    spare = 2 if num_layers + 2 >= num_stages > 1 else 0
    inside_first = sorted(range(num_stages), key=lambda stage: abs(2 * stage - num_stages + 1))
    counts = [0] * num_stages
    for stage, count in zip(inside_first, split_evenly(num_layers + spare, num_stages), strict=True):
        counts[stage] = count
    for end in (0, -1) if spare else ():
        counts[end] -= 1
    return layout_of(_stages(counts))


def stages_problems(pipeline: PipelineConfig, *, pp: int, num_layers: int) -> list[str]:
    """Everything that keeps layers from being divided as asked, as messages for the user; empty when they can be."""
    num_stages = pp * pipeline.vpp
    if min(pp, pipeline.vpp) < 1 or num_stages == 1:
        return []  # the counts themselves are another rule; a model on one stage is not divided
    ways = _ways(pipeline)
    if len(ways) > 1:
        return [
            f"{', '.join(ways)}: these are {len(ways)} ways to divide the layers. Use one of them, or "
            f"{FIELD}={proposed_layout(num_layers, num_stages)}."
        ]
    if pipeline.layout is not None:
        return _layout_problems(pipeline.layout, pp, pipeline.vpp, num_layers)
    if pipeline.first_layers is not None or pipeline.last_layers is not None:
        return _ends_problems(pipeline, pp, num_layers)
    return _even_problems(pipeline, pp, num_layers)


def _ways(pipeline: PipelineConfig) -> list[str]:
    """The ways of dividing that are asked for, each with its fields and values."""
    ends = {"first_layers": pipeline.first_layers, "last_layers": pipeline.last_layers}
    counted = {"count_embedding": pipeline.count_embedding, "count_loss": pipeline.count_loss}
    given = [f"{FIELD}={pipeline.layout}"] if pipeline.layout is not None else []
    for fields in (
        {name: value for name, value in ends.items() if value is not None},
        {name: "true" for name, value in counted.items() if value},
    ):
        if fields:
            given.append(" and ".join(f"parallel.pipeline.{name}={value}" for name, value in fields.items()))
    return given


# --- even, and with other counts at the ends


def _counts(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[int]:
    """Layers of each stage without a layout; the rules hold."""
    num_stages, vpp = pp * pipeline.vpp, pipeline.vpp
    if pipeline.first_layers is None and pipeline.last_layers is None:
        extra = pipeline.count_embedding + pipeline.count_loss
        counts = [(num_layers + extra) // num_stages] * num_stages
        counts[0] -= pipeline.count_embedding
        counts[-1] -= pipeline.count_loss
        return counts
    placement = placement_of(schedule_name(pipeline))
    by_rank = _by_rank(pipeline, pp, num_layers)
    return [by_rank[place_of(stage, num_ranks=pp, placement=placement)[0]] // vpp for stage in range(num_stages)]


def _by_rank(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[int]:
    """Layers of each rank when the ends have their own counts."""
    first, last = pipeline.first_layers, pipeline.last_layers
    given = [count for count in (first, last) if count is not None]
    others = (num_layers - sum(given)) // max(1, pp - len(given))
    counts = [others] * pp
    counts[0] = others if first is None else first
    counts[-1] = others if last is None else last
    return counts


def _even_problems(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[str]:
    vpp, num_stages = pipeline.vpp, pp * pipeline.vpp
    extra = pipeline.count_embedding + pipeline.count_loss
    total = num_layers + extra
    if total % num_stages == 0:
        return []
    counted = "".join(
        f" + 1 (parallel.pipeline.{name}=true)"
        for name, counts in (("count_embedding", pipeline.count_embedding), ("count_loss", pipeline.count_loss))
        if counts
    )
    fits = [n for n in range(1, min(total, 4 * pp) + 1) if total % (n * vpp) == 0]
    by_degree = f"parallel.pp to one of {fits}, or " if fits else ""
    return [
        f"model.num_layers={num_layers}{counted} does not divide over parallel.pp * parallel.pipeline.vpp = {pp} * "
        f"{vpp} = {num_stages} stages. Set {by_degree}{FIELD}={proposed_layout(num_layers, num_stages)}."
    ]


def _ends_problems(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[str]:
    vpp = pipeline.vpp
    ends = {"first_layers": pipeline.first_layers, "last_layers": pipeline.last_layers}
    given = {f"parallel.pipeline.{name}": count for name, count in ends.items() if count is not None}
    instead = f"{FIELD}={proposed_layout(num_layers, pp * vpp)}"
    if pp == 1:
        return [f"{' and '.join(given)} need parallel.pp > 1, and it is {pp}. Use {instead} instead."]
    problems = [f"{name}={count} must be at least 0. Use 0 or more." for name, count in given.items() if count < 0]
    problems += [
        f"{name}={count} does not divide over the {vpp} chunks of its rank (parallel.pipeline.vpp={vpp}). Set it to "
        f"{count // vpp * vpp} or {-(-count // vpp) * vpp}."
        for name, count in given.items()
        if count >= 0 and count % vpp
    ]
    rest, stages = num_layers - sum(given.values()), (pp - len(given)) * vpp
    if problems or (rest == 0 if stages == 0 else rest >= 0 and rest % stages == 0):
        return problems
    sums = " - ".join([str(num_layers), *map(str, given.values())])
    return [
        f"{' and '.join(f'{name}={count}' for name, count in given.items())} leave {sums} = {rest} of "
        f"model.num_layers={num_layers} for {stages} other stages. Use counts that leave "
        f"{f'0 or a multiple of {stages}' if stages else 'none'}, or {instead}."
    ]


def _stages(counts: Sequence[int]) -> tuple[Stage, ...]:
    starts = [0, *accumulate(counts[:-1])]
    last = len(counts) - 1
    return tuple(
        Stage(range(start, start + count), embedding=stage == 0, loss=stage == last)
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


# --- layout strings


def _layout_problems(text: str, pp: int, vpp: int, num_layers: int) -> list[str]:
    """Everything that is wrong with a layout string; a text that cannot be read has one mistake, where reading ends."""
    try:
        stages = parse_layout(text)
    except PlanError as error:
        return [str(error)]
    num_stages, example = pp * vpp, proposed_layout(num_layers, pp * vpp)
    problems = []
    if len(stages) != num_stages:
        problems.append(
            f"{FIELD}={text} has {len(stages)} stages, but parallel.pp * parallel.pipeline.vpp = {pp} * {vpp} = "
            f"{num_stages}. Use {num_stages - 1} bars, as in {example}, or set parallel.pp and vpp to multiply to "
            f"{len(stages)}."
        )
    items = [item for stage in stages for item in stage]
    problems += _once(text, items, "E", "embedding") + _once(text, items, "L", "loss")
    problems += _at_the_end(text, stages, "E", 0, "before the embedding") if _kinds(items)["E"] == 1 else []
    problems += _at_the_end(text, stages, "L", -1, "after the loss") if _kinds(items)["L"] == 1 else []
    if (found := _kinds(items)["t"]) != num_layers:
        problems.append(
            f"{FIELD}={text} has {found} layers (t), but model.num_layers={num_layers}. Use {num_layers}, as in "
            f"{example}."
        )
    if (first := next((item for item in items if item.kind == "m"), None)) is not None:
        what = "this model has no multi-token prediction layers"
        problems.append(f"{mistake(text, first.position, what)}Use no m.")
    return problems


def _kinds(items: Sequence[Item]) -> Counter[str]:
    return Counter(item.kind for item in items)


def _once(text: str, items: Sequence[Item], kind: str, name: str) -> list[str]:
    found = [item for item in items if item.kind == kind]
    if not found:
        place = "at the beginning" if kind == "E" else "at the end"
        return [f"{FIELD}={text} has no {kind}: the {name} is on no stage. Use one {kind} {place}."]
    if len(found) == 1:
        return []
    what = f"the {name} ({kind}) comes {len(found)} times"
    return [f"{mistake(text, found[1].position, what)}Use {kind} once."]


def _at_the_end(text: str, stages: Sequence[Sequence[Item]], kind: str, end: int, where: str) -> list[str]:
    """Whether the one item of a kind is the first of the first stage (end 0) or the last of the last (end -1)."""
    if stages[end] and stages[end][end].kind == kind:
        return []
    found = next(item for stage in stages for item in stage if item.kind == kind)
    bar = f"a bar, which makes an empty stage {where}" if not stages[end] else f"something {where}"
    side = "first stage begins" if end == 0 else "last stage ends"
    return [f"{mistake(text, found.position, f'there is {bar}')}Use {kind} where the {side}."]

"""Pipeline stages: the layers of each, and the stages of the embedding, the MTP layers and the
loss.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.parallel import PipelineConfig
from megalith.errors import PlanError, did_you_mean
from megalith.plan.schedule import rank_and_chunk, schedule_name, stage_index, stage_placement
from megalith.plan.shards import split_evenly

# Pipeline layout strings: `Et*3|(tt|)*2tL` has the embedding and three layers on its first stage.
#
# layout    meaning of each character
# E t m L   embedding, transformer layer, MTP layer, loss
# |         ends a stage; a stage without items passes its input on
# X*n       X repeated n times, for an item, a bar or a group
# ( )       a group; groups can be nested
# , space   ignored

FIELD = "parallel.pipeline.layout"
ITEMS = "EtmL"
MOST_ITEMS = 1 << 16
"""Limit on the items and bars of one layout: more than any pipeline has."""

SHOWN = 72
"""Characters of a long layout that an error message shows."""


class Item(NamedTuple):
    """One item of an expanded layout and its position in the text."""

    kind: str
    position: int


def parse_layout(text: str) -> list[list[Item]]:
    """Return the items of each stage.

    Raises:
        PlanError: the layout is malformed; the message has a caret under the position.
    """
    groups: list[list[Item]] = [[]]
    opened: list[int] = []
    last: list[Item] = []  # what a following * repeats
    index = 0
    while index < len(text):
        start, character, index = index, text[index], index + 1
        if character in ", ":
            continue
        if character == "(":
            opened.append(start)
            groups.append([])
            last = []
        elif character == "*":
            count, index = _count(text, start, last, room=MOST_ITEMS - sum(map(len, groups)))
            groups[-1] += last * (count - 1)
            last = []
        elif character in ITEMS or character == "|":
            last = [Item(character, start)]
            groups[-1] += last
        elif character == ")" and opened:
            opened.pop()
            last = groups.pop()
            groups[-1] += last
        else:
            raise PlanError(_unknown(text, start))
    if opened:
        raise PlanError(
            f"{format_layout_error(text, opened[-1], 'this ( is never closed')}Use a ) for each (."
        )
    return _stages(groups[0])


def format_layout_error(text: str, position: int, what: str) -> str:
    """Return an error text with a caret under one character of the layout; the fix follows on the
    next line."""
    first = max(0, position - SHOWN // 2) if len(text) > SHOWN else 0
    shown = "".join(
        " " if character.isspace() else character for character in text[first : first + SHOWN]
    )
    return (
        f"{FIELD}={text}: {what}, at character {position + 1}:\n    {shown}\n    "
        f"{' ' * (position - first)}^\n"
    )


def show_layout(stages: Sequence[str]) -> str:
    """Return the shortest layout string of stages given as items, such as ["Ett", "tt", "tt", "L"].

    >>> show_layout(["Ettt", "tt", "tt", "m", "L"])
    'Et*3|tt|tt|m|L'
    """
    parts = []
    for items, run in groupby(stages[:-1]):
        stage = f"{_show_items(items)}|"
        count = sum(1 for _ in run)
        repeated = f"({stage})*{count}" if len(stage) > 1 else f"|*{count}"
        parts.append(repeated if len(repeated) < len(stage) * count else stage * count)
    return "".join(parts) + _show_items(stages[-1])


def _show_items(items: str) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(items)]
    return "".join(f"{kind}*{count}" if count > 2 else kind * count for kind, count in runs)


def _stages(items: Sequence[Item]) -> list[list[Item]]:
    stages: list[list[Item]] = [[]]
    for item in items:
        if item.kind == "|":
            stages.append([])
        else:
            stages[-1].append(item)
    return stages


def _count(text: str, star: int, repeated: Sequence[Item], *, room: int) -> tuple[int, int]:
    """Return the number after a star, and the index after it."""
    if not repeated:
        what = "there is nothing before this * to repeat"
        raise PlanError(f"{format_layout_error(text, star, what)}Use it as in t*3 or (tt|)*2.")
    first = star + 1
    while text[first : first + 1] == " ":
        first += 1
    stop = first
    while stop < len(text) and text[stop] in "0123456789":
        stop += 1
    digits = text[first:stop]
    if not digits or int(digits[:9]) == 0:
        raise PlanError(
            f"{format_layout_error(text, star, 'this * needs a number of at least 1 after it')}"
            "Use it as in "
            "t*3."
        )
    if len(digits) > 9 or len(repeated) * int(digits) > room:
        what = f"{digits} times are more than {MOST_ITEMS} items"
        raise PlanError(f"{format_layout_error(text, star, what)}Use a smaller number.")
    return int(digits), stop


def _unknown(text: str, position: int) -> str:
    character = text[position]
    if character == ")":
        return (
            f"{format_layout_error(text, position, 'this ) has no matching (')}Use a ( for each )."
        )
    fix = "Use only E (embedding), t (layer), m (multi-token prediction), L (loss), |, *n and ( )"
    what = format_layout_error(text, position, f"{character!r} is not an item")
    return f"{what}{fix}.{did_you_mean(character, ITEMS)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """The parts of the model in one stage. A stage without any passes its input on."""

    layers: range
    """Global layer numbers."""

    embedding: bool = False
    """Whether the stage has the input embedding."""

    loss: bool = False
    """Whether the stage has the head and the losses."""

    norm: bool = False
    """Whether the stage has the last norm."""

    num_mtp_layers: int = 0
    """MTP layers, which follow the last norm: all of them, or none."""

    def reads_table(self, model: ModelConfig) -> bool:
        """Return whether the stage reads the embedding table: embedding, MTP layers, or a tied
        head."""
        return self.embedding or self.num_mtp_layers > 0 or (self.loss and model.tied_embeddings)

    def reads_places(self, model: ModelConfig) -> bool:
        """Return whether the stage reads the table of learned positions."""
        return model.positions == "learned" and (self.embedding or self.num_mtp_layers > 0)

    def reads_biases(self, model: ModelConfig) -> bool:
        """Return whether the stage reads the table of relative position biases."""
        return model.needs_relative_biases(layers=len(self.layers) + self.num_mtp_layers)


def single_stage(num_layers: int, depths: int = 0) -> Stage:
    """Return the only stage of a model without pipeline parallelism; `depths`: number of MTP
    layers."""
    return Stage(range(num_layers), embedding=True, loss=True, norm=True, num_mtp_layers=depths)


def plan_stages(
    pipeline: PipelineConfig, *, pp: int, num_layers: int, depths: int = 0
) -> tuple[Stage, ...]:
    """Return all pp · vpp stages, first to last.

    `plan/schedule.stage_index` assigns them to ranks. The `depths` MTP layers are on the stage of
    the loss, or where a layout places them; with MTP layers the last norm is with the last layer,
    else with the loss.

    Raises:
        PlanError: the layers cannot be divided as configured; lists all reasons.
    """
    problems = stages_problems(pipeline, pp=pp, num_layers=num_layers, depths=depths)
    if problems:
        raise PlanError(f"{num_layers} layers must be divided otherwise: {' '.join(problems)}")
    if pp * pipeline.vpp == 1:
        return (single_stage(num_layers, depths),)
    if pipeline.layout is None:
        return _build_stages(_count_layers_by_stage(pipeline, pp, num_layers), depths)
    kinds = [_kinds(stage) for stage in parse_layout(pipeline.layout)]
    place = next((number for number, kind in enumerate(kinds) if kind["m"]), None)
    return _build_stages([kind["t"] for kind in kinds], depths, place=place)


def select_rank_stages(
    stages: Sequence[Stage], rank: int, pipeline: PipelineConfig, *, pp: int
) -> list[Stage]:
    """Return the stages (model chunks) of one pipeline rank."""
    placement = stage_placement(schedule_name(pipeline))
    return [
        stages[stage_index(rank, chunk, num_ranks=pp, placement=placement)]
        for chunk in range(len(stages) // pp)
    ]


def table_stages(
    model: ModelConfig, stages: Sequence[Stage], pipeline: PipelineConfig, *, pp: int
) -> dict[str, tuple[int, ...]]:
    """Return, by lookup table, the pipeline ranks that hold it, ascending; all but one hold a copy.

    In a V, the first and the last stage are on one rank.
    """
    placement = stage_placement(schedule_name(pipeline))
    ranks = [
        rank_and_chunk(number, num_ranks=pp, placement=placement)[0]
        for number in range(len(stages))
    ]
    reads = {
        "embed.weight": [stage.reads_table(model) for stage in stages],
        "positions.weight": [stage.reads_places(model) for stage in stages],
        "relative.weight": [stage.reads_biases(model) for stage in stages],
    }
    return {
        name: tuple(
            sorted({rank for rank, reads_it in zip(ranks, is_read, strict=True) if reads_it})
        )
        for name, is_read in reads.items()
    }


HIDDEN = "hidden"
"""Name of the hidden states between pipeline stages."""

CROSS_LAYER_SOURCE = "cross_layer_source"
"""Name of the source hidden states of cross-layer attention between pipeline stages."""


def mtp_hidden_name(depth: int) -> str:
    """Return the name of the hidden states of an MTP depth (from 1) between pipeline stages."""
    return f"mtp_hidden.{depth}"


class BoundaryTensor(NamedTuple):
    """Named tensor that a pipeline stage sends to the next one for each microbatch.

    The messages, the arguments of the model and the planned traffic are derived from it.
    """

    name: str
    shape: tuple[Literal["t", "h"], ...] = ("t", "h")
    """Dimensions: `t`, the local tokens of the microbatch, and `h`, the hidden size."""

    dtype: Literal["residual", "model"] = "model"
    """`residual`: dtype of the residual stream, fp32 with model.fp32_residual; `model`: that of the
    parameters."""

    requires_grad: bool = True
    """Whether its gradient is sent back to the previous stage."""

    def sizes(self, *, num_tokens: int, hidden_size: int) -> tuple[int, ...]:
        """Return the shape on a rank with this number of tokens."""
        return tuple({"t": num_tokens, "h": hidden_size}[dim] for dim in self.shape)


StageBoundary = tuple[BoundaryTensor, ...]
"""Tensors that are sent across the boundary before a stage, in the order of their messages."""


def stage_boundary(
    model: ModelConfig, stages: Sequence[Stage], number: int, *, depths: int | None = None
) -> StageBoundary:
    """Return what is sent across the boundary before stage `number`; nothing before the first and
    after the last.

    The losses of all MTP layers need the only head, so their hidden states are sent to its stage.
    `depths`: MTP depths that the microbatch has inputs of; unset: all.
    """
    if number in (0, len(stages)):
        return ()
    before = stages[:number]
    num_layers = sum(len(stage.layers) for stage in before)
    num_mtp_layers = sum(stage.num_mtp_layers for stage in before)
    is_normed = any(stage.norm for stage in before)
    tensors = [BoundaryTensor(HIDDEN, dtype="model" if is_normed else "residual")]
    if model.needs_cross_layer_source(num_layers):
        tensors.append(BoundaryTensor(CROSS_LAYER_SOURCE))
    for depth in range(1, 1 + min(num_mtp_layers, num_mtp_layers if depths is None else depths)):
        tensors.append(BoundaryTensor(mtp_hidden_name(depth)))
    return tuple(tensors)


def format_layout(stages: Sequence[Stage]) -> str:
    """Return the layout string of the stages.

    >>> last = Stage(range(5, 6), num_mtp_layers=1, loss=True)
    >>> format_layout([Stage(range(3), embedding=True), Stage(range(3, 5)), last])
    'Et*3|tt|tmL'
    """
    return show_layout(
        [
            "E" * s.embedding + "t" * len(s.layers) + "m" * s.num_mtp_layers + "L" * s.loss
            for s in stages
        ]
    )


def proposed_layout(num_layers: int, num_stages: int, depths: int = 0) -> str:
    """Return a balanced layout: the embedding, the loss and each MTP layer count as one layer, if
    there are enough.

    >>> proposed_layout(30, 4), proposed_layout(30, 4, 1), proposed_layout(4, 4, 2)
    ('Et*7|t*8|t*8|t*7L', 'Et*7|t*9|t*8|t*6mL', 'Et|t|tt|mmL')
    """
    spare = 2 + depths if num_layers + 2 + depths >= num_stages > 1 else 0
    inside_first = sorted(range(num_stages), key=lambda stage: abs(2 * stage - num_stages + 1))
    counts = [0] * num_stages
    for stage, count in zip(
        inside_first, split_evenly(num_layers + spare, num_stages), strict=True
    ):
        counts[stage] = count
    for end, taken in ((0, 1), (-1, 1 + depths)) if spare else ():
        counts[end] -= taken
    while counts[-1] < 0:  # the loss and the MTP layers exceed one stage's share
        counts[-1] += 1
        counts[max(inside_first, key=counts.__getitem__)] -= 1
    return format_layout(_build_stages(counts, depths))


def stages_problems(
    pipeline: PipelineConfig, *, pp: int, num_layers: int, depths: int = 0
) -> list[str]:
    """Return an error text for each reason why the layers and `depths` MTP layers cannot be divided
    as configured."""
    num_stages = pp * pipeline.vpp
    if min(pp, pipeline.vpp) < 1 or num_stages == 1:
        return []  # the counts themselves are another rule; a model on one stage is not divided
    methods, example = (
        _list_division_methods(pipeline),
        proposed_layout(num_layers, num_stages, depths),
    )
    if len(methods) > 1:
        return [
            f"{', '.join(methods)}: these are {len(methods)} methods of dividing the layers. "
            "Use one of them, "
            f"or {FIELD}={example}."
        ]
    if pipeline.layout is not None:
        return _layout_problems(pipeline.layout, pp, pipeline.vpp, num_layers, depths)
    if pipeline.first_layers is not None or pipeline.last_layers is not None:
        return _ends_problems(pipeline, pp, num_layers, example)
    return _even_problems(pipeline, pp, num_layers, example)


def _list_division_methods(pipeline: PipelineConfig) -> list[str]:
    """Return the methods of dividing layers that are configured, each with its fields and
    values."""
    ends = {"first_layers": pipeline.first_layers, "last_layers": pipeline.last_layers}
    counted = {"count_embedding": pipeline.count_embedding, "count_loss": pipeline.count_loss}
    given = [f"{FIELD}={pipeline.layout}"] if pipeline.layout is not None else []
    for fields in (
        {name: value for name, value in ends.items() if value is not None},
        {name: "true" for name, value in counted.items() if value},
    ):
        if fields:
            given.append(
                " and ".join(f"parallel.pipeline.{name}={value}" for name, value in fields.items())
            )
    return given


# --- even, and with other counts at the ends


def _count_layers_by_stage(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[int]:
    """Return the layers of each stage without a layout string; the rules must hold."""
    num_stages, vpp = pp * pipeline.vpp, pipeline.vpp
    if pipeline.first_layers is None and pipeline.last_layers is None:
        extra = pipeline.count_embedding + pipeline.count_loss
        counts = [(num_layers + extra) // num_stages] * num_stages
        counts[0] -= pipeline.count_embedding
        counts[-1] -= pipeline.count_loss
        return counts
    placement = stage_placement(schedule_name(pipeline))
    by_rank = _count_layers_by_rank(pipeline, pp, num_layers)
    return [
        by_rank[rank_and_chunk(stage, num_ranks=pp, placement=placement)[0]] // vpp
        for stage in range(num_stages)
    ]


def _count_layers_by_rank(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[int]:
    """Return the layers of each rank with first_layers or last_layers."""
    first, last = pipeline.first_layers, pipeline.last_layers
    given = [count for count in (first, last) if count is not None]
    others = (num_layers - sum(given)) // max(1, pp - len(given))
    counts = [others] * pp
    counts[0] = others if first is None else first
    counts[-1] = others if last is None else last
    return counts


def _even_problems(pipeline: PipelineConfig, pp: int, num_layers: int, example: str) -> list[str]:
    vpp, num_stages = pipeline.vpp, pp * pipeline.vpp
    extra = pipeline.count_embedding + pipeline.count_loss
    total = num_layers + extra
    if total % num_stages == 0:
        return []
    counted = "".join(
        f" + 1 (parallel.pipeline.{name}=true)"
        for name, counts in (
            ("count_embedding", pipeline.count_embedding),
            ("count_loss", pipeline.count_loss),
        )
        if counts
    )
    fits = [n for n in range(1, min(total, 4 * pp) + 1) if total % (n * vpp) == 0]
    by_degree = f"parallel.pp to one of {fits}, or " if fits else ""
    return [
        f"model.num_layers={num_layers}{counted} does not divide over parallel.pp * "
        f"parallel.pipeline.vpp = {pp} * "
        f"{vpp} = {num_stages} stages. Set {by_degree}{FIELD}={example}."
    ]


def _ends_problems(pipeline: PipelineConfig, pp: int, num_layers: int, example: str) -> list[str]:
    vpp = pipeline.vpp
    ends = {"first_layers": pipeline.first_layers, "last_layers": pipeline.last_layers}
    given = {
        f"parallel.pipeline.{name}": count for name, count in ends.items() if count is not None
    }
    instead = f"{FIELD}={example}"
    if pp == 1:
        return [
            f"{' and '.join(given)} need parallel.pp > 1, and it is {pp}. Use {instead} instead."
        ]
    problems = [
        f"{name}={count} must be at least 0. Use 0 or more."
        for name, count in given.items()
        if count < 0
    ]
    problems += [
        f"{name}={count} does not divide over the {vpp} chunks of its rank "
        f"(parallel.pipeline.vpp={vpp}). Set it to "
        f"{count // vpp * vpp} or {-(-count // vpp) * vpp}."
        for name, count in given.items()
        if count >= 0 and count % vpp
    ]
    rest, stages = num_layers - sum(given.values()), (pp - len(given)) * vpp
    if problems or (rest == 0 if stages == 0 else rest >= 0 and rest % stages == 0):
        return problems
    sums = " - ".join([str(num_layers), *map(str, given.values())])
    return [
        f"{' and '.join(f'{name}={count}' for name, count in given.items())} leave {sums} = {rest} "
        f"of model.num_layers={num_layers} for {stages} other stages. Use counts that leave "
        f"{f'0 or a multiple of {stages}' if stages else 'none'}, or {instead}."
    ]


def _build_stages(
    counts: Sequence[int], depths: int, *, place: int | None = None
) -> tuple[Stage, ...]:
    """Build stages with these layer counts; `place`: the stage of the MTP layers, unset: the
    last."""
    starts, last = [0, *accumulate(counts[:-1])], len(counts) - 1
    norm = (
        max(number for number, count in enumerate(counts) if count)
        if depths and any(counts)
        else last
    )
    return tuple(
        Stage(
            range(start, start + count),
            embedding=stage == 0,
            loss=stage == last,
            norm=stage == norm,
            num_mtp_layers=depths if stage == (last if place is None else place) else 0,
        )
        for stage, (start, count) in enumerate(zip(starts, counts, strict=True))
    )


# --- layout strings


def _layout_problems(text: str, pp: int, vpp: int, num_layers: int, depths: int) -> list[str]:
    """Return the errors of a layout string; only the first if it cannot be parsed."""
    try:
        stages = parse_layout(text)
    except PlanError as error:
        return [str(error)]
    num_stages, example = pp * vpp, proposed_layout(num_layers, pp * vpp, depths)
    problems = []
    if len(stages) != num_stages:
        problems.append(
            f"{FIELD}={text} has {len(stages)} stages, but parallel.pp * parallel.pipeline.vpp = "
            f"{pp} * {vpp} = "
            f"{num_stages}. Use {num_stages - 1} bars, as in {example}, or set parallel.pp and vpp "
            f"to multiply to {len(stages)}."
        )
    items = [item for stage in stages for item in stage]
    problems += _check_occurs_once(text, items, "E", "embedding") + _check_occurs_once(
        text, items, "L", "loss"
    )
    problems += (
        _check_is_at_end(text, stages, "E", 0, "before the embedding")
        if _kinds(items)["E"] == 1
        else []
    )
    problems += (
        _check_is_at_end(text, stages, "L", -1, "after the loss") if _kinds(items)["L"] == 1 else []
    )
    if (num_layout_layers := _kinds(items)["t"]) != num_layers:
        problems.append(
            f"{FIELD}={text} has {num_layout_layers} layers (t), but "
            f"model.num_layers={num_layers}. Use "
            f"{num_layers}, as in "
            f"{example}."
        )
    return problems + _mtp_problems(text, stages, depths, example)


def _mtp_problems(
    text: str, stages: Sequence[Sequence[Item]], depths: int, example: str
) -> list[str]:
    """Check that there are `depths` MTP layers, after the last layer, on one stage other than the
    first."""
    items = [item for stage in stages for item in stage]
    mtp_items = [item for item in items if item.kind == "m"]
    if mtp_items and not depths:
        what = "this model has no multi-token prediction layers"
        return [
            f"{format_layout_error(text, mtp_items[0].position, what)}Use no m, or set "
            f"model.mtp.num_layers={len(mtp_items)}."
        ]
    problems = []
    if len(mtp_items) != depths:
        problems.append(
            f"{FIELD}={text} has {len(mtp_items)} MTP layers (m), but "
            f"model.mtp.num_layers={depths}. "
            f"Use {depths}, as in {example}."
        )
    mtp_stages = [stage for stage in stages if any(item.kind == "m" for item in stage)]
    if len(stages) > 1 and mtp_stages and mtp_stages[0] is stages[0]:
        what = "m needs the output of all layers, so the first stage would be the whole model"
        problems.append(
            f"{format_layout_error(text, mtp_items[0].position, what)}"
            f"Use m on a later stage, as in {example}."
        )
    if len(mtp_stages) > 1:
        second = next(item for item in mtp_stages[1] if item.kind == "m")
        what = "m is on a second stage, but all MTP layers share one copy of the embedding"
        problems.append(
            f"{format_layout_error(text, second.position, what)}"
            f"Use m on one stage, as in {example}."
        )
    layers = [number for number, item in enumerate(items) if item.kind == "t"]
    early = next(
        (
            item
            for number, item in enumerate(items)
            if item.kind == "m" and number < max(layers, default=0)
        ),
        None,
    )
    if early is not None:
        what = "m comes before a layer (t), but needs the output of all layers"
        problems.append(
            f"{format_layout_error(text, early.position, what)}"
            f"Use m after the last t, as in {example}."
        )
    return problems


def _kinds(items: Sequence[Item]) -> Counter[str]:
    return Counter(item.kind for item in items)


def _check_occurs_once(text: str, items: Sequence[Item], kind: str, name: str) -> list[str]:
    matching_items = [item for item in items if item.kind == kind]
    if not matching_items:
        place = "at the beginning" if kind == "E" else "at the end"
        return [f"{FIELD}={text} has no {kind}: the {name} is on no stage. Use one {kind} {place}."]
    if len(matching_items) == 1:
        return []
    what = f"the {name} ({kind}) comes {len(matching_items)} times"
    return [f"{format_layout_error(text, matching_items[1].position, what)}Use {kind} once."]


def _check_is_at_end(
    text: str, stages: Sequence[Sequence[Item]], kind: str, end: int, where: str
) -> list[str]:
    """Check that the item of a kind is the first of the first stage (end 0) or the last of the last
    (end -1)."""
    if stages[end] and stages[end][end].kind == kind:
        return []
    item_of_kind = next(item for stage in stages for item in stage if item.kind == kind)
    bar = f"a bar, which makes an empty stage {where}" if not stages[end] else f"something {where}"
    side = "first stage begins" if end == 0 else "last stage ends"
    return [
        f"{format_layout_error(text, item_of_kind.position, f'there is {bar}')}"
        f"Use {kind} where the {side}."
    ]

"""Pipeline schedules: the order in which each rank runs forward and backward passes, as plain lists
of actions.

The layers are cut into stages. A rank holds `num_chunks` of them, its *chunks*, and works through
`num_microbatches` microbatches per step. Everything here depends on these counts alone; nothing
touches a device. `plan/transfers` adds the messages between ranks, `plan/simulate` runs the result
on paper, `parallel/pipeline` runs it for real.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from megalith.config.pipeline import PipelineConfig, ScheduleName
from megalith.errors import PlanError

Kind = Literal["F", "B", "I", "W", "send_forward", "recv_forward", "send_backward", "recv_backward"]
"""F forward; B whole backward; I backward towards the input only; W the part for the weights, some
time after its I."""

Placement = Literal["loop", "v"]
"""Where stages lie. loop: after the last rank comes the first again. v: chunk 1 comes back from the
last rank."""

V_SCHEDULES: tuple[ScheduleName, ...] = ("zb-v", "dualpipe-v")
"""Schedules that place their two chunks in a V."""

SPLIT_SCHEDULES: tuple[ScheduleName, ...] = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that do the weights' part of a backward apart from the rest of it."""


Step = tuple[Kind, int]
"""(kind, chunk): an action that has not got its microbatch yet."""


class Action(NamedTuple):
    """One thing a rank does. Transfers name the other rank; their chunk is always the one of the
    rank that acts."""

    kind: Kind
    chunk: int
    microbatch: int
    peer: int = -1
    """Pipeline rank at the other end of a transfer; -1 for computing."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank of a pipeline does in one step, in order."""

    name: ScheduleName
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]
    """Actions by pipeline rank."""

    pairs: tuple[frozenset[tuple[int, int]], ...] = ()
    """By pipeline rank, if any: (chunk, microbatch) of each F that is computed together with the
    B after it; see plan/pairs.py."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        return stage_of(rank, chunk, num_ranks=self.num_ranks, placement=self.placement)

    def place_of(self, stage: int) -> tuple[int, int]:
        """(rank, chunk) that holds a stage."""
        return place_of(stage, num_ranks=self.num_ranks, placement=self.placement)


def placement_of(name: ScheduleName) -> Placement:
    """How a schedule places its stages."""
    return "v" if name in V_SCHEDULES else "loop"


def stage_of(rank: int, chunk: int, *, num_ranks: int, placement: Placement = "loop") -> int:
    """The stage that is a rank's chunk. loop: chunk · p + rank; v: every odd chunk runs from the
    last rank back."""
    backwards = placement == "v" and chunk % 2 == 1
    return chunk * num_ranks + (num_ranks - 1 - rank if backwards else rank)


def place_of(stage: int, *, num_ranks: int, placement: Placement = "loop") -> tuple[int, int]:
    """(rank, chunk) that holds a stage; the inverse of `stage_of`."""
    chunk, place = divmod(stage, num_ranks)
    backwards = placement == "v" and chunk % 2 == 1
    return (num_ranks - 1 - place if backwards else place), chunk


def schedule_name(pipeline: PipelineConfig) -> ScheduleName:
    """The schedule a config asks for, with `auto` resolved."""
    if pipeline.schedule != "auto":
        return pipeline.schedule
    return "interleaved" if pipeline.vpp > 1 else "1f1b"


def pipeline_in_use(pipeline: PipelineConfig, pp: int) -> PipelineConfig:
    """The settings that a run obeys: one chunk on one rank is no pipeline, and takes microbatch
    after microbatch."""
    return pipeline if pp * pipeline.vpp > 1 else PipelineConfig()


def build_schedule(
    name: ScheduleName,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group: int | None = None,
    forward_only: bool = False,
) -> Schedule:
    """The computing part of a schedule for every rank; `plan/transfers.with_transfers` adds the
    messages.

    group: interleaved only, see `interleaved_order`; unset: num_ranks. forward_only: the same
    placement without backward passes, for evaluation, where any number of microbatches will do.

    Raises:
        PlanError: the schedule cannot be had with these counts; every reason at once.
    """
    pipeline = PipelineConfig(schedule=name, vpp=num_chunks, group=group)
    problems = schedule_problems(
        pipeline, pp=num_ranks, num_microbatches=num_microbatches, forward_only=forward_only
    )
    if problems:
        raise PlanError(
            f"schedule {name} on {num_ranks} ranks must be set otherwise: {' '.join(problems)}"
        )
    name = schedule_name(pipeline)
    if forward_only:
        ranks = _forward_only(name, num_ranks, num_chunks, num_microbatches, group)
    elif name == "interleaved":
        ranks = _interleaved(num_ranks, num_chunks, num_microbatches, group or num_ranks)
    else:
        rank_lists = {
            "gpipe": gpipe,
            "1f1b": one_f_one_b,
            "zb-h1": zb_h1,
            "zb-v": zb_v,
            "dualpipe-v": dualpipe_v,
        }
        one_rank = rank_lists[name]
        ranks = [one_rank(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return Schedule(
        name, num_ranks, num_chunks, num_microbatches, placement_of(name), tuple(map(tuple, ranks))
    )


def gpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards; every microbatch is alive at once.

    Source: Huang et al. 2018, arXiv:1811.06965, section 2.3.
    """
    del rank, num_ranks  # the same on every rank
    return [*_row("F", num_microbatches), *_row("B", num_microbatches)]


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """1F1B: a few forwards, then forward and backward in turns; at most num_ranks - rank
    microbatches are alive.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.

    >>> [f"{action.kind}{action.microbatch}" for action in one_f_one_b(0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    return in_turns(_row("F", num_microbatches), _row("B", num_microbatches), warmup)


def interleaved_order(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of forwards: `group` microbatches pass through a chunk, then
    the next chunk.

    Backwards run through the same table with the chunks counted from the last. Source: Narayanan et
    al. 2021, arXiv:2104.04473, section 2.2, where the group is the number of ranks.

    >>> interleaved_order(3, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    order = []
    for start in range(0, num_microbatches, group):
        block = range(start, min(start + group, num_microbatches))
        order += [(microbatch, chunk) for chunk in range(num_chunks) for microbatch in block]
    return order


def interleaved_warmup(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, group: int
) -> int:
    """Forwards that a rank runs before its first backward in the interleaved schedule."""
    return min(num_chunks * num_microbatches, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * group)


def zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-H1: 1F1B with backward in two parts; the weights' part of rank r lags r microbatches
    behind, into the bubble.

    Inputs are held as in 1F1B; with what waits for its weights' part, every rank holds what rank 0
    of 1F1B does. Source: Qi et al. 2024, arXiv:2401.10241, section 2.
    """
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    forwards, weights = _row("F", num_microbatches), _row("W", num_microbatches)
    actions = [*forwards[:warmup]]
    for microbatch, towards_input in enumerate(_row("I", num_microbatches)):
        actions += forwards[warmup + microbatch : warmup + microbatch + 1]
        actions.append(towards_input)
        if microbatch >= rank:
            actions.append(weights[microbatch - rank])
    return [*actions, *weights[max(num_microbatches - rank, 0) :]]


def zb_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-V: two chunks per rank, placed in a V; where F, I and W take equally long no rank waits
    once it has begun.

    At most 2 · num_ranks (microbatch, chunk) pairs are alive on a rank, as much memory as rank 0 of
    1F1B has. Source: Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    from_turn = num_ranks - rank  # 1 on the last rank, which holds both sides of the turn
    many = max(
        num_microbatches, 2 * num_ranks - 1
    )  # a shorter step is a longer one without its last microbatches
    steps = _steps("F0") * (2 * from_turn - 1) + _steps("F1 F0") * rank
    steps += _steps("F1 I1 W1") * from_turn
    steps += _steps("F0 I0 W0 F1 I1 W1") * (many - num_ranks)
    steps += _steps("I0 I1") * rank + _steps("I0 W0") * from_turn
    steps += _steps("W1") * rank + _steps("W0") * rank
    return _numbered(steps, num_microbatches)


def dualpipe_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """DualPipe-V: a V whose middle pairs the forward of one chunk with the whole backward of the
    other.

    Made for hiding the messages of one half of a pair behind the computing of the other. Whole
    backwards are split only where a bubble can be filled. At most 2 · num_ranks + 1 (microbatch,
    chunk) pairs are alive on a rank. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; the
    V of github.com/deepseek-ai/DualPipe.
    """
    to_turn = num_ranks - 1 - rank
    many = max(
        num_microbatches, 2 * num_ranks
    )  # a shorter step is a longer one without its last microbatches
    steps = _steps("F0") * (2 * to_turn) + _steps("F0 F1") * (rank + 1)
    steps += _steps("I1 W1 F1") * to_turn
    steps += _steps("F0 B1 F1 B0") * (many - 2 * num_ranks + rank + 1)
    steps += _steps("B1 F1 B0") * to_turn
    ending = [1, 0] * (rank + 1)
    whole, split = ending[: rank + 1], ending[rank + 1 :]
    steps += [("B", chunk) for chunk in whole] + [("I", chunk) for chunk in split]
    waiting = split + [0] * to_turn  # chunks whose weights' part is still to come, oldest first
    for chunk in waiting[:to_turn]:
        steps += [("W", chunk), ("I", 0)]
    steps += [("W", chunk) for chunk in waiting[to_turn:]]
    return _numbered(steps, num_microbatches)


def last_weight_action(actions: Sequence[Action]) -> dict[int, int]:
    """By chunk of one rank: the index of the action after which the chunk's weight gradients of
    this step are whole."""
    return {
        action.chunk: index for index, action in enumerate(actions) if action.kind in ("B", "W")
    }


def schedule_problems(
    pipeline: PipelineConfig,
    *,
    pp: int,
    num_microbatches: int,
    rows: int | None = None,
    forward_only: bool = False,
) -> list[str]:
    """Everything that keeps a schedule from being built, as messages for the user; empty when it
    can be.

    rows: of one microbatch over all data-parallel ranks (train.micro_batch_size · dp), for advice
    in terms of train.global_batch_size; unset: advice in microbatches. forward_only: evaluation,
    which takes any number of them.
    """
    name, vpp, group = schedule_name(pipeline), pipeline.vpp, pipeline.group
    counts = {
        "parallel.pp": pp,
        "parallel.pipeline.vpp": vpp,
        "microbatches per step": num_microbatches,
    }
    if group is not None:
        counts["parallel.pipeline.group"] = group
    problems = [
        f"{field}={count} must be at least 1." for field, count in counts.items() if count < 1
    ]
    if problems:
        return problems
    problems = _chunk_problems(name, vpp)
    if group is not None and name != "interleaved":
        problems.append(
            f"parallel.pipeline.group={group}: schedule {name} does not send microbatches through "
            "its chunks in groups. Leave parallel.pipeline.group unset, or set "
            "parallel.pipeline.schedule=interleaved."
        )
    if name == "interleaved" and not forward_only:
        problems += _group_problems(pp, group, num_microbatches, rows)
    return problems


def _chunk_problems(name: ScheduleName, vpp: int) -> list[str]:
    field = f"parallel.pipeline.vpp={vpp}"
    if name in V_SCHEDULES and vpp != 2:
        return [
            f"{field}: schedule {name} lays two chunks per rank in a V. Set "
            "parallel.pipeline.vpp=2."
        ]
    if name == "interleaved" and vpp == 1:
        return [
            f"{field}: schedule interleaved takes turns between the chunks of a rank, and one "
            "chunk has none to take "
            "turns with. Set parallel.pipeline.vpp to 2 or more, or "
            "parallel.pipeline.schedule=1f1b."
        ]
    if name in ("gpipe", "1f1b", "zb-h1") and vpp > 1:
        return [
            f"{field}: schedule {name} has one chunk per rank. Set parallel.pipeline.vpp=1, or "
            "parallel.pipeline.schedule=interleaved."
        ]
    return []


def _group_problems(
    pp: int, group: int | None, num_microbatches: int, rows: int | None
) -> list[str]:
    """Each group must keep all ranks busy once around the pipeline: pp <= group <= microbatches,
    the last group too."""
    if num_microbatches < pp:
        return [
            f"{num_microbatches} microbatches per step are fewer than parallel.pp={pp}: in "
            "schedule interleaved a "
            "microbatch would be due in the next chunk before it has come around the pipeline. "
            f"{_batch_advice([pp], rows)}, or parallel.pipeline.vpp=1."
        ]
    size = group or pp
    if not pp <= size <= num_microbatches:
        return [
            f"parallel.pipeline.group={size} must be from parallel.pp={pp} (a microbatch has to "
            "come around the "
            f"pipeline before its next chunk) to the {num_microbatches} microbatches of a step. "
            f"Set parallel.pipeline.group={min(max(size, pp), num_microbatches)}."
        ]
    left = num_microbatches % size
    if left == 0 or left >= pp:
        return []
    whole = num_microbatches - left
    field = "parallel.pipeline.group" if group else "parallel.pipeline.group (unset: parallel.pp)"
    return [
        f"{num_microbatches} microbatches per step leave a last group of {left} with "
        f"{field}={size}, fewer than "
        f"parallel.pp={pp}. "
        f"{_batch_advice([whole, whole + pp], rows)}{_other_groups(pp, num_microbatches)}."
    ]


def _other_groups(pp: int, num_microbatches: int) -> str:
    sizes = range(pp, num_microbatches + 1)
    fits = [size for size in sizes if num_microbatches % size == 0 or num_microbatches % size >= pp]
    return f", or parallel.pipeline.group to one of {fits[:6]}"


def _batch_advice(counts: Sequence[int], rows: int | None) -> str:
    if rows is None:
        return f"Use {' or '.join(map(str, counts))} microbatches"
    sizes = " or ".join(str(count * rows) for count in counts)
    return f"Set train.global_batch_size to {sizes}"


def _interleaved(
    num_ranks: int, num_chunks: int, num_microbatches: int, group: int
) -> list[list[Action]]:
    order = interleaved_order(num_microbatches, num_chunks, group)
    forwards = [Action("F", chunk, microbatch) for microbatch, chunk in order]
    backwards = [Action("B", num_chunks - 1 - chunk, microbatch) for microbatch, chunk in order]
    sizes = {
        "num_ranks": num_ranks,
        "num_chunks": num_chunks,
        "num_microbatches": num_microbatches,
        "group": group,
    }
    return [
        in_turns(forwards, backwards, interleaved_warmup(rank, **sizes))
        for rank in range(num_ranks)
    ]


def _forward_only(
    name: ScheduleName, num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None
) -> list[list[Action]]:
    if placement_of(name) == "v":
        return [_forward_v(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    order = interleaved_order(num_microbatches, num_chunks, group or num_ranks)
    return [[Action("F", chunk, microbatch) for microbatch, chunk in order]] * num_ranks


def _forward_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """In a V every second slot brings a new microbatch, so that those that come back fall between
    those that go."""
    slots = []
    for chunk in (0, 1):
        stage = stage_of(rank, chunk, num_ranks=num_ranks, placement="v")
        slots += [
            (2 * microbatch + stage, chunk, microbatch) for microbatch in range(num_microbatches)
        ]
    return [Action("F", chunk, microbatch) for _, chunk, microbatch in sorted(slots)]


@lru_cache(maxsize=8)
def _row(kind: Kind, num_microbatches: int) -> tuple[Action, ...]:
    """The same objects for every rank: there are as many ranks as stages, and a rank's row is as
    long as a step."""
    return tuple(Action(kind, 0, microbatch) for microbatch in range(num_microbatches))


def in_turns(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward until the forwards are done, then the
    other backwards."""
    pairs = zip(forwards[warmup:], backwards)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _steps(text: str) -> list[Step]:
    """`F0 I1` as [("F", 0), ("I", 1)]."""
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return [(kinds[word[0]], int(word[1:])) for word in text.split()]


def _numbered(steps: Iterable[Step], num_microbatches: int) -> list[Action]:
    """Give each (kind, chunk) its next microbatch; a B counts as its I and its W. Those too many
    drop out."""
    counts: Counter[Step] = Counter()
    actions = []
    for kind, chunk in steps:
        first: Kind = "I" if kind == "B" else kind
        microbatch = counts[first, chunk]
        counts[first, chunk] += 1
        if kind == "B":
            counts["W", chunk] += 1
        if microbatch < num_microbatches:
            actions.append(Action(kind, chunk, microbatch))
    return actions

"""Pipeline schedules: the actions of every rank, dual-batch overlap, and the messages between
stages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig, ScheduleName
from megalith.errors import PlanError

Kind = Literal["F", "B", "I", "W", "send_forward", "recv_forward", "send_backward", "recv_backward"]
"""F forward; B full backward; I input gradient only; W weight gradient, some time after its I."""

Placement = Literal["loop", "v"]
"""Placement of stages. loop: chunk by chunk over all ranks; v: chunk 1 runs from the last rank
back."""

V_SCHEDULES: tuple[ScheduleName, ...] = ("zb-v", "dualpipe-v")
"""Schedules that place two chunks per rank in a V."""

SPLIT_SCHEDULES: tuple[ScheduleName, ...] = ("zb-h1", "zb-v", "dualpipe-v")
"""Schedules that defer weight gradients: backward is split into I and W."""


Step = tuple[Kind, int]
"""(kind, chunk): an action without its microbatch number."""


class Action(NamedTuple):
    """One action of a rank. Transfers name the peer rank; the chunk is that of the acting rank."""

    kind: Kind
    chunk: int
    microbatch: int
    peer: int = -1
    """Pipeline rank at the other end of a transfer; -1 for computation."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of all ranks of a pipeline in one step, in order."""

    name: ScheduleName
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]
    """Actions by pipeline rank."""

    pairs: tuple[frozenset[tuple[int, int]], ...] = ()
    """By pipeline rank, with dual-batch overlap: (chunk, microbatch) of each F that is computed
    together with the next B; see plan/schedule.py."""

    stages: tuple[tuple[int, ...], ...] = field(init=False, compare=False)
    """Stage of each chunk by pipeline rank."""

    def __post_init__(self) -> None:
        stages = (
            tuple(
                stage_index(rank, chunk, num_ranks=self.num_ranks, placement=self.placement)
                for chunk in range(self.num_chunks)
            )
            for rank in range(self.num_ranks)
        )
        object.__setattr__(self, "stages", tuple(stages))

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.num_ranks * self.num_chunks

    def rank_and_chunk(self, stage: int) -> tuple[int, int]:
        """Return (rank, chunk) of a stage."""
        return rank_and_chunk(stage, num_ranks=self.num_ranks, placement=self.placement)


def stage_placement(name: ScheduleName) -> Placement:
    """Return the stage placement of a schedule."""
    return "v" if name in V_SCHEDULES else "loop"


def stage_index(rank: int, chunk: int, *, num_ranks: int, placement: Placement = "loop") -> int:
    """Return the stage of a rank's chunk. loop: chunk · p + rank; v: odd chunks run from the last
    rank back."""
    backwards = placement == "v" and chunk % 2 == 1
    return chunk * num_ranks + (num_ranks - 1 - rank if backwards else rank)


def rank_and_chunk(stage: int, *, num_ranks: int, placement: Placement = "loop") -> tuple[int, int]:
    """Return (rank, chunk) of a stage; the inverse of `stage_index`."""
    chunk, place = divmod(stage, num_ranks)
    backwards = placement == "v" and chunk % 2 == 1
    return (num_ranks - 1 - place if backwards else place), chunk


def schedule_name(pipeline: PipelineConfig) -> ScheduleName:
    """Return the schedule of a config, with `auto` resolved."""
    if pipeline.schedule != "auto":
        return pipeline.schedule
    return "interleaved" if pipeline.vpp > 1 else "1f1b"


def effective_pipeline(pipeline: PipelineConfig, pp: int) -> PipelineConfig:
    """Return the pipeline settings that take effect: the defaults if there is only one stage."""
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
    """Build the computation actions of a schedule for every rank; `with_transfers`
    adds messages.

    group: interleaved only, see `interleaved_order`; unset: num_ranks. forward_only: forward passes
    only, for evaluation, with any number of microbatches.

    Raises:
        PlanError: the schedule does not support these counts; lists all reasons.
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
        name,
        num_ranks,
        num_chunks,
        num_microbatches,
        stage_placement(name),
        tuple(map(tuple, ranks)),
    )


def gpipe(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """GPipe: all forwards, then all backwards; all microbatches are in flight at once.

    Source: Huang et al. 2018, arXiv:1811.06965, section 2.3.
    """
    del rank, num_ranks  # the same on every rank
    return [*_list_actions("F", num_microbatches), *_list_actions("B", num_microbatches)]


def one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """1F1B: warmup forwards, alternating forwards and backwards, then cooldown backwards; at most
    num_ranks - rank microbatches are in flight.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.

    >>> [f"{action.kind}{action.microbatch}" for action in one_f_one_b(0, 2, 3)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    return alternate_forward_backward(
        _list_actions("F", num_microbatches), _list_actions("B", num_microbatches), warmup
    )


def interleaved_order(num_microbatches: int, num_chunks: int, group: int) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) in the order of forwards: `group` microbatches per chunk, then the
    next chunk.

    Backwards use the same table with the chunks counted from the last. Source: Narayanan et al.
    2021, arXiv:2104.04473, section 2.2, where the group is the number of ranks.

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
    """Return the number of warmup forwards of a rank in the interleaved schedule."""
    return min(num_chunks * num_microbatches, 2 * (num_ranks - 1 - rank) + (num_chunks - 1) * group)


def zb_h1(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-H1 zero bubble schedule: 1F1B with split backward; W of rank r lags r microbatches behind.

    Activations in flight are those of 1F1B; with the tensors that wait for W, every rank holds as
    much as rank 0 of 1F1B. Source: Qi et al. 2024, arXiv:2401.10241, section 2.
    """
    warmup = min(num_ranks - 1 - rank, num_microbatches)
    forwards, weights = _list_actions("F", num_microbatches), _list_actions("W", num_microbatches)
    actions = [*forwards[:warmup]]
    for microbatch, input_backward in enumerate(_list_actions("I", num_microbatches)):
        actions += forwards[warmup + microbatch : warmup + microbatch + 1]
        actions.append(input_backward)
        if microbatch >= rank:
            actions.append(weights[microbatch - rank])
    return [*actions, *weights[max(num_microbatches - rank, 0) :]]


def zb_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """ZB-V zero bubble schedule: two chunks per rank in a V; without bubble if F, I and W take
    equally long.

    At most 2 · num_ranks (microbatch, chunk) pairs are in flight per rank, as much memory as on
    rank 0 of 1F1B. Source: Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    from_turn = num_ranks - rank  # 1 on the last rank, which holds both sides of the turn
    num_steps = max(num_microbatches, 2 * num_ranks - 1)  # shorter steps drop the last microbatches
    steps = _parse_steps("F0") * (2 * from_turn - 1) + _parse_steps("F1 F0") * rank
    steps += _parse_steps("F1 I1 W1") * from_turn
    steps += _parse_steps("F0 I0 W0 F1 I1 W1") * (num_steps - num_ranks)
    steps += _parse_steps("I0 I1") * rank + _parse_steps("I0 W0") * from_turn
    steps += _parse_steps("W1") * rank + _parse_steps("W0") * rank
    return _number_microbatches(steps, num_microbatches)


def dualpipe_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """DualPipe-V: two chunks in a V; the steady state pairs a forward of one chunk with a backward
    of the other.

    The all-to-all of one half of a pair overlaps with the computation of the other. Backward is
    split only to fill bubbles. At most 2 · num_ranks + 1 (microbatch, chunk) pairs are in flight
    per rank. Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1; the V of
    github.com/deepseek-ai/DualPipe.
    """
    to_turn = num_ranks - 1 - rank
    num_steps = max(num_microbatches, 2 * num_ranks)  # shorter steps drop the last microbatches
    steps = _parse_steps("F0") * (2 * to_turn) + _parse_steps("F0 F1") * (rank + 1)
    steps += _parse_steps("I1 W1 F1") * to_turn
    steps += _parse_steps("F0 B1 F1 B0") * (num_steps - 2 * num_ranks + rank + 1)
    steps += _parse_steps("B1 F1 B0") * to_turn
    cooldown = [1, 0] * (rank + 1)
    full_backward, split = cooldown[: rank + 1], cooldown[rank + 1 :]
    steps += [("B", chunk) for chunk in full_backward] + [("I", chunk) for chunk in split]
    deferred = split + [0] * to_turn  # chunks whose W is still due, oldest first
    for chunk in deferred[:to_turn]:
        steps += [("W", chunk), ("I", 0)]
    steps += [("W", chunk) for chunk in deferred[to_turn:]]
    return _number_microbatches(steps, num_microbatches)


def schedule_problems(
    pipeline: PipelineConfig,
    *,
    pp: int,
    num_microbatches: int,
    rows: int | None = None,
    setting: str = "train.global_batch_size",
    forward_only: bool = False,
) -> list[str]:
    """Return an error text for each reason why the schedule does not support these counts.

    rows: samples of one microbatch over all data-parallel ranks (train.micro_batch_size · dp), for
    advice in terms of `setting`, the global batch size; unset: advice in microbatches.
    forward_only: evaluation, with any number of microbatches.
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
        problems += _group_problems(pp, group, num_microbatches, _BatchUnit(rows, setting))
    return problems


def _chunk_problems(name: ScheduleName, vpp: int) -> list[str]:
    field = f"parallel.pipeline.vpp={vpp}"
    if name in V_SCHEDULES and vpp != 2:
        return [f"{field}: schedule {name} needs two chunks per rank. Set parallel.pipeline.vpp=2."]
    if name == "interleaved" and vpp == 1:
        return [
            f"{field}: schedule interleaved alternates between the chunks of a rank and needs at "
            "least two. "
            "Set parallel.pipeline.vpp to 2 or more, or "
            "parallel.pipeline.schedule=1f1b."
        ]
    if name in ("gpipe", "1f1b", "zb-h1") and vpp > 1:
        return [
            f"{field}: schedule {name} has one chunk per rank. Set parallel.pipeline.vpp=1, or "
            "parallel.pipeline.schedule=interleaved."
        ]
    return []


def _group_problems(
    pp: int, group: int | None, num_microbatches: int, unit: "_BatchUnit"
) -> list[str]:
    """Check that each group fills the pipeline: pp <= group <= microbatches, for the last group
    too."""
    if num_microbatches < pp:
        return [
            f"{num_microbatches} microbatches per step are fewer than parallel.pp={pp}: in "
            "schedule interleaved a "
            "microbatch would be needed in the next chunk before it has passed the pipeline. "
            f"{unit.advise([pp])}, or parallel.pipeline.vpp=1."
        ]
    size = group or pp
    if not pp <= size <= num_microbatches:
        return [
            f"parallel.pipeline.group={size} must be from parallel.pp={pp} (a microbatch has to "
            "pass "
            "the "
            f"pipeline before its next chunk) to the {num_microbatches} microbatches of a step. "
            f"Set parallel.pipeline.group={min(max(size, pp), num_microbatches)}."
        ]
    last_group = num_microbatches % size
    if last_group == 0 or last_group >= pp:
        return []
    full_groups = num_microbatches - last_group
    field = "parallel.pipeline.group" if group else "parallel.pipeline.group (unset: parallel.pp)"
    return [
        f"{num_microbatches} microbatches per step leave a last group of {last_group} with "
        f"{field}={size}, fewer than "
        f"parallel.pp={pp}. "
        f"{unit.advise([full_groups, full_groups + pp])}"
        f"{_other_groups(pp, num_microbatches)}."
    ]


def _other_groups(pp: int, num_microbatches: int) -> str:
    sizes = range(pp, num_microbatches + 1)
    fits = [size for size in sizes if num_microbatches % size == 0 or num_microbatches % size >= pp]
    return f", or parallel.pipeline.group to one of {fits[:6]}"


class _BatchUnit(NamedTuple):
    """The setting in terms of which a number of microbatches is advised."""

    rows: int | None
    """Samples of one microbatch over all data-parallel ranks; None: advice in microbatches."""

    setting: str

    def advise(self, counts: Sequence[int]) -> str:
        """Return the advice to use one of these numbers of microbatches."""
        if self.rows is None:
            return f"Use {' or '.join(map(str, counts))} microbatches"
        return f"Set {self.setting} to {' or '.join(str(count * self.rows) for count in counts)}"


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
        alternate_forward_backward(forwards, backwards, interleaved_warmup(rank, **sizes))
        for rank in range(num_ranks)
    ]


def _forward_only(
    name: ScheduleName, num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None
) -> list[list[Action]]:
    if stage_placement(name) == "v":
        return [_forward_v(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    order = interleaved_order(num_microbatches, num_chunks, group or num_ranks)
    return [[Action("F", chunk, microbatch) for microbatch, chunk in order]] * num_ranks


def _forward_v(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Order forwards in a V: every second slot starts a new microbatch, with returning ones in
    between."""
    slots = []
    for chunk in (0, 1):
        stage = stage_index(rank, chunk, num_ranks=num_ranks, placement="v")
        slots += [
            (2 * microbatch + stage, chunk, microbatch) for microbatch in range(num_microbatches)
        ]
    return [Action("F", chunk, microbatch) for _, chunk, microbatch in sorted(slots)]


@lru_cache(maxsize=8)
def _list_actions(kind: Kind, num_microbatches: int) -> tuple[Action, ...]:
    """Return cached actions of one kind for all microbatches, shared by all ranks."""
    return tuple(Action(kind, 0, microbatch) for microbatch in range(num_microbatches))


def alternate_forward_backward(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> list[Action]:
    """Return `warmup` forwards, then alternating forwards and backwards, then the remaining
    backwards."""
    pairs = zip(forwards[warmup:], backwards)
    steady = [action for pair in pairs for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


def _parse_steps(text: str) -> list[Step]:
    """Parse `F0 I1` into [("F", 0), ("I", 1)]."""
    kinds: dict[str, Kind] = {"F": "F", "B": "B", "I": "I", "W": "W"}
    return [(kinds[word[0]], int(word[1:])) for word in text.split()]


def _number_microbatches(steps: Iterable[Step], num_microbatches: int) -> list[Action]:
    """Give each (kind, chunk) its next microbatch; a B counts as I and W. Excess steps are
    dropped."""
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


# --- dual-batch overlap: run the forward of one microbatch and the backward of another together
#
# The all-to-all of one microbatch overlaps with the computation of the other. `parallel/pipeline`
# alternates between the two; this module decides which actions form a pair. Source: DeepSeek-AI
# 2024, arXiv:2412.19437, section 3.2.1.

PAIRED_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "dualpipe-v")
"""Schedules that alternate forwards and backwards, so that dual-batch overlap is possible."""


def pair_forward_backward(schedule: Schedule) -> Schedule:
    """Return the schedule with pairs of a forward and a backward, and with the warmup that pairs
    need.

    dualpipe-v consists of such pairs already. In the other schedules a forward would be next to the
    backward of the same microbatch on the last rank, so every rank runs more warmup forwards: one
    in the interleaved schedule, which holds one more microbatch of a chunk. In 1f1b it is num_ranks
    - rank: a pair sends the results of both halves when it ends, so a microbatch needs one pair
    time to reach the next stage and another one to return, for each later stage.
    """
    assert schedule.name in PAIRED_SCHEDULES, schedule.name
    if schedule.name == "dualpipe-v":
        return replace(
            schedule, pairs=tuple(_find_chunk_pairs(actions) for actions in schedule.ranks)
        )
    ranks, pairs = [], []
    for rank, actions in enumerate(schedule.ranks):
        forwards = [action for action in actions if action.kind == "F"]
        backwards = [action for action in actions if action.kind == "B"]
        num_extra_warmup = schedule.num_ranks - 1 - rank if schedule.name == "1f1b" else 0
        first = min(actions.index(backwards[0]) + num_extra_warmup, len(forwards))
        ranks.append(tuple(alternate_forward_backward(forwards, backwards, first)))
        pairs.append(frozenset((action.chunk, action.microbatch) for action in forwards[first:]))
    return replace(schedule, ranks=tuple(ranks), pairs=tuple(pairs))


def _find_chunk_pairs(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return the forwards that precede a backward of the other chunk and of another microbatch."""
    return frozenset(
        (one.chunk, one.microbatch)
        for one, other in pairwise(actions)
        if (one.kind, other.kind) == ("F", "B")
        and one.chunk != other.chunk
        and one.microbatch != other.microbatch
    )


def concurrent_actions(schedule: Schedule, rank: int) -> Iterator[tuple[Action, ...]]:
    """Yield the actions of a rank in order: single actions, and pairs of a forward and the next
    backward.

    The two halves of a pair are of different microbatches, so neither needs the other's result.

    >>> from megalith.plan.schedule import build_schedule
    >>> schedule = pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=3))
    >>> [
    ...     "+".join(f"{action.kind}{action.microbatch}" for action in each)
    ...     for each in concurrent_actions(schedule, 0)
    ... ]
    ['F0', 'F1+B0', 'F2+B1', 'B2']
    """
    actions = schedule.ranks[rank]
    return (
        _group_actions(actions, schedule.pairs[rank])
        if schedule.pairs
        else zip(actions, strict=True)
    )


def _group_actions(
    actions: Sequence[Action], pairs: frozenset[tuple[int, int]]
) -> Iterator[tuple[Action, ...]]:
    forward: tuple[Action, ...] = ()
    for action in actions:
        if action.kind == "F" and (action.chunk, action.microbatch) in pairs:
            forward = (action,)
        else:
            yield (*forward, action)
            forward = ()
    if forward:
        yield forward


def pairing_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Return one error text for each setting that prevents parallel.overlap_experts."""
    p, needed = parallel, "parallel.overlap_experts=true"
    if not p.overlap_experts:
        return []
    if model.moe is None:
        return [
            f"{needed} with model.moe=null: there is no token dispatch to overlap. Set "
            "parallel.overlap_experts=false."
        ]
    problems = []
    if p.ep == 1:
        problems.append(
            f"{needed} with parallel.ep={p.ep}: there is no all-to-all to overlap. Set "
            "parallel.ep to a "
            f"divisor of model.moe.num_experts={model.moe.num_experts} above 1, or "
            "parallel.overlap_experts=false."
        )
    if p.dispatcher != "alltoall":
        problems.append(
            f"{needed} with parallel.dispatcher={p.dispatcher}: only an all-to-all can be "
            "overlapped. Set parallel.dispatcher=alltoall, or parallel.overlap_experts=false."
        )
    if p.zero == 3:
        problems.append(
            f"{needed} with parallel.zero={p.zero}: weights are gathered for one pass through a "
            "layer "
            "at a time, and the other microbatch of a pair "
            "would lose them. Set parallel.zero to 2 or less, or "
            "parallel.overlap_experts=false."
        )
    name = schedule_name(effective_pipeline(p.pipeline, p.pp))
    if name not in PAIRED_SCHEDULES:
        problems.append(
            f"{needed} with parallel.pipeline.schedule={name}: it does not alternate forwards "
            "and backwards. "
            f"Set parallel.pipeline.schedule to one of {', '.join(PAIRED_SCHEDULES)}."
        )
    return problems


# --- messages between pipeline ranks: where each is sent, and where its receive is posted
#
# Messages travel on *channels*: (source rank, target rank, direction); forward carries activations
# to the next stage, backward their gradients to the previous one. A channel is a queue: NCCL has no
# tags, so the k-th send matches the k-th receive. Both sides therefore list a channel's messages in
# the order in which the source computes them, and each channel needs its own queue (a process
# group, or tags on gloo): two channels between the same two ranks, as with two ranks or in a V, may
# be interleaved differently on both sides. `plan/check_schedule` checks both.
#
# Stages that are neighbors on one rank (the turn of a V, or a single rank) pass tensors without a
# message.

Direction = Literal["forward", "backward"]

SENDS: dict[Direction, Kind] = {"forward": "send_forward", "backward": "send_backward"}
RECEIVES: dict[Direction, Kind] = {"forward": "recv_forward", "backward": "recv_backward"}

COMPUTES: dict[Direction, tuple[Kind, ...]] = {"forward": ("F",), "backward": ("B", "I")}
"""Actions that consume the messages of a direction and produce its next message."""

AGAINST: dict[Direction, Direction] = {"forward": "backward", "backward": "forward"}
"""Opposite direction: forward messages come from the previous stage."""


class Channel(NamedTuple):
    """Queue of messages from one rank to another."""

    source: int
    target: int
    direction: Direction


def neighbor(
    schedule: Schedule, rank: int, chunk: int, direction: Direction
) -> tuple[int, int] | None:
    """Return (rank, chunk) of the stage that receives this chunk's result: the next stage forward,
    the previous one backward; None at the end."""
    stage = schedule.stages[rank][chunk] + (1 if direction == "forward" else -1)
    return schedule.rank_and_chunk(stage) if 0 <= stage < schedule.num_stages else None


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """Return all channels of the pipeline, in the same order on every rank."""
    all_channels = set()
    for rank in range(schedule.num_ranks):
        for chunk in range(schedule.num_chunks):
            for direction in SENDS:
                target = neighbor(schedule, rank, chunk, direction)
                if target is not None and target[0] != rank:
                    all_channels.add(Channel(rank, target[0], direction))
    return tuple(sorted(all_channels))


def with_transfers(schedule: Schedule, *, overlap: bool = True) -> Schedule:
    """Return the schedule with its messages: `recv_*` posts a receive, and the action that needs it
    waits for it.

    A `send_*` follows the action whose result it sends and is asynchronous too; its buffer is freed
    when it completes. overlap: a receive is posted before the action that precedes its consumer, so
    that communication overlaps with computation, with at most two open receives per rank. Without
    overlap it is posted just before its consumer. If messages are consumed in another order than
    they are sent, receives are posted earlier, in the order of sending. Since no transfer blocks,
    two ranks that send to each other at the same time cannot deadlock. A pair of dual-batch overlap
    counts as one action: its messages come before and after both halves.
    """
    ranks = []
    for rank, (slots, receives) in enumerate(_receives(schedule, overlap)):
        links = _send_targets(schedule, rank)
        listed: list[Action] = []
        posted = 0
        for index, actions in enumerate(concurrent_actions(schedule, rank)):
            while posted < len(slots) and slots[posted] == index:
                listed.append(receives[posted])
                posted += 1
            listed += actions
            for kind, chunk, microbatch, _ in actions:
                link = links.get((kind, chunk))
                if link is not None:
                    listed.append(Action(SENDS[link.direction], chunk, microbatch, link.target))
        ranks.append(tuple(listed))
    return replace(schedule, ranks=tuple(ranks))


class _SendTarget(NamedTuple):
    """Target of a chunk's result, on another rank."""

    direction: Direction
    target: int
    chunk: int
    """Chunk number on the target rank."""


def _send_targets(schedule: Schedule, rank: int) -> dict[tuple[Kind, int], _SendTarget]:
    """Return, by (kind, chunk) of one rank, the results that are sent to another rank."""
    targets: dict[tuple[Kind, int], _SendTarget] = {}
    for direction, producers in COMPUTES.items():
        for chunk in range(schedule.num_chunks):
            place = neighbor(schedule, rank, chunk, direction)
            if place is not None and place[0] != rank:
                targets |= {(kind, chunk): _SendTarget(direction, *place) for kind in producers}
    return targets


def _receives(schedule: Schedule, overlap: bool) -> Iterator[tuple[list[int], list[Action]]]:
    """Yield for each rank the action indices before which receives are posted, ascending, and the
    receives.

    Receives of one index are in the order of their channels.
    """
    num_early = 1 if overlap else 0
    by_channel = _messages(schedule)
    for rank in range(schedule.num_ranks):
        first_use = _needed_at(schedule, rank)
        slots: list[int] = []
        receives: list[Action] = []
        for messages in (
            messages for channel, messages in by_channel.items() if channel.target == rank
        ):
            needs = (
                first_use[kind][chunk][microbatch]
                for kind, chunk, microbatch, _ in reversed(messages)
            )
            slots += [max(first - num_early, 0) for first in accumulate(needs, min)][::-1]
            receives += messages
        order = sorted(range(len(slots)), key=slots.__getitem__)
        yield [slots[at] for at in order], [receives[at] for at in order]


def _needed_at(schedule: Schedule, rank: int) -> dict[Kind, list[list[int]]]:
    """Return, by kind of receive, chunk and microbatch, the index of the action (or pair) that
    consumes it."""
    rows = {
        kind: [[-1] * schedule.num_microbatches for _ in range(schedule.num_chunks)]
        for kind in RECEIVES.values()
    }
    takes = {
        kind: rows[RECEIVES[direction]] for direction, kinds in COMPUTES.items() for kind in kinds
    }
    for index, actions in enumerate(concurrent_actions(schedule, rank)):
        for kind, chunk, microbatch, _ in actions:
            if kind in takes:
                takes[kind][chunk][microbatch] = index
    return rows


def _messages(schedule: Schedule) -> dict[Channel, list[Action]]:
    """Return, by channel, the receive of each message in the order in which the source computes
    them."""
    messages: dict[Channel, list[Action]] = {channel: [] for channel in channels(schedule)}
    for rank, actions in enumerate(schedule.ranks):
        links = _send_targets(schedule, rank)
        outgoing = {
            key: messages[Channel(rank, link.target, link.direction)] for key, link in links.items()
        }
        for kind, chunk, microbatch, _ in actions:
            link = links.get((kind, chunk))
            if link is not None:
                receive = Action(RECEIVES[link.direction], link.chunk, microbatch, rank)
                outgoing[kind, chunk].append(receive)
    return messages

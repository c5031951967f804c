"""Flight recorder: the last collectives of this rank, and the report if one of them hangs."""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any
from weakref import ReferenceType

from megalith.observe.busy import BusyMeter, Instant
from megalith.plan.shards import EXPERT_PARTS, PARTS

RECORDED = 1024
"""Number of recorded collectives: more than a step of a large model has between two waits
(heuristic)."""

PUBLISHED = 64
"""Number of these that a rank sends to the others."""

ROUNDED = 0.05
"""Rounding error of reported ages, in seconds."""

FRAMES_SHOWN = 4
RANKS_SHOWN = 16
"""Maximum lines with ranks in a report; the files beside it list all ranks."""

BACKWARD_LANE = "backward-lane"
"""Name of the thread that runs while the main thread waits in dual-batch overlap."""

_TURNS = "megalith.parallel.pipeline"
_INTERNAL_MODULES = (
    "megalith.parallel.group",
    "megalith.parallel.collectives",
    "megalith.observe.flight",
    "torch",
    "threading",
)


@dataclass(slots=True, eq=False)
class CollectiveRecord:
    """One collective or point-to-point message that this rank started."""

    op: str
    """all_reduce, send, ..."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks of the group, or the two ranks of a message."""

    lane: str
    """Sequence that `number` counts: a group's name; for messages with peer and direction."""

    number: int
    """Number of earlier operations in the lane, the same on every rank."""

    shape: tuple[int, ...] | None
    """None if shapes may differ between ranks."""

    dtype: str
    site: tuple[str, int]
    """File and line of the call."""

    peer: int | None = None
    """Global rank of the other end of a message."""

    rows: tuple[Sequence[int], Sequence[int]] | None = None
    """Rows sent to and received from each rank in an all-to-all; `shape` is then that of one
    row."""

    subject: str = ""
    """Description of the data, such as the weights of an FSDP unit; empty: the call site
    identifies it."""

    started: float = field(default_factory=time.monotonic)
    done: bool = False
    meter: BusyMeter | None = None
    """Measures how long this rank waits for the operation; None: not measured."""
    wait_started: Instant | None = None
    """When this rank began to wait for it, if `meter` measures that."""
    is_waited: bool = False
    """Whether the host waits for it at this time; an operation may also be in flight during
    computation."""
    work: "ReferenceType[Any] | None" = None
    """Handle that the caller waits for."""

    @property
    def finished(self) -> bool:
        """Whether the operation is finished; also if its handle no longer exists."""
        if self.done or self.work is None:
            return self.done
        work = self.work()
        return work is None or bool(work.is_completed())

    def begin_wait(self) -> None:
        """Record that this rank waits from now on."""
        self.is_waited = True
        if self.meter is not None:
            self.wait_started = self.meter.now()

    def end_wait(self) -> None:
        """Record that this rank does not wait any more."""
        self.is_waited = False
        if self.meter is not None and self.wait_started is not None:
            self.meter.add_wait(self.wait_started)
            self.wait_started = None

    def leave_in_flight(self) -> None:
        """Record that this rank has only started the operation, and does not wait for it yet."""
        self.is_waited, self.wait_started = False, None

    def __str__(self) -> str:
        return f"{self.op} {self.number} over {axes_name(self.axes)}"

    def describe(self) -> str:
        """Return operation, data and call site as text."""
        what = (
            f" of {self.dtype.removeprefix('torch.')} {list(self.shape)}"
            if self.shape is not None
            else ""
        )
        rows = (
            f", sending {list(self.rows[0])} and receiving {list(self.rows[1])} rows"
            if self.rows
            else ""
        )
        subject = f", {self.subject}" if self.subject else ""
        return f"{self}{what}{subject}{rows}, at {short_path(self.site[0])}:{self.site[1]}"


class FlightRecorder:
    """Recorder of this rank's collectives, newest last; costs a few microseconds each, and sends
    nothing."""

    def __init__(self) -> None:
        self.entries: deque[CollectiveRecord] = deque(maxlen=RECORDED)
        self.counts: dict[str, int] = {}
        self.compare: Callable[[CollectiveRecord], None] | None = None
        """Compares each operation with the other ranks' (parallel.check_collectives)."""
        self.meter: BusyMeter | None = None
        """Measures the waits of this rank; None: not measured."""

    def enter(
        self,
        op: str,
        axes: tuple[str, ...],
        ranks: tuple[int, ...],
        lane: str,
        *,
        shape: Sequence[int] | None = None,
        dtype: str = "",
        peer: int | None = None,
        rows: tuple[Sequence[int], Sequence[int]] | None = None,
        subject: str = "",
    ) -> CollectiveRecord:
        """Record that this rank starts an operation; the caller marks it done or sets its
        handle."""
        number = self.counts.get(lane, 0)
        self.counts[lane] = number + 1
        size = None if shape is None else tuple(shape)
        entry = CollectiveRecord(
            op, axes, ranks, lane, number, size, dtype, call_site(), peer, rows, subject
        )
        self.entries.append(entry)
        if self.compare is not None:
            self.compare(entry)
        entry.meter = self.meter
        entry.begin_wait()
        return entry

    def unfinished(self) -> list[CollectiveRecord]:
        """Return the operations that have started and not finished, oldest first."""
        return [entry for entry in list(self.entries) if not entry.finished]

    def is_waiting(self) -> bool:
        """Return whether the host waits for an operation at this time."""
        return any(entry.is_waited for entry in list(self.entries))

    def record_torch_collective(self, ranks: tuple[int, ...]) -> None:
        """Record an operation that torch started by itself and the main thread is in."""
        frame = next(_frames(), None)
        if frame is None or not inside_torch() or self.unfinished():
            return
        self.counts["torch"] = 1
        since = self.entries[-1].started if self.entries else time.monotonic()
        site = frame.f_code.co_filename, frame.f_lineno
        self.entries.append(
            CollectiveRecord(
                "torch's own collective", ("all",), ranks, "torch", 0, None, "", site, started=since
            )
        )

    def remove_torch_collectives(self) -> None:
        """Remove the records of torch's own operations, which are never marked as done."""
        for entry in [entry for entry in self.entries if entry.lane == "torch"]:
            self.entries.remove(entry)
        self.counts.pop("torch", None)

    def place(self, rank: int) -> "RankSnapshot":
        """Return a snapshot of this rank for the other ranks."""
        now = time.monotonic()
        recent = list(self.entries)
        reported = [
            *(entry for entry in recent[:-PUBLISHED] if not entry.finished),
            *recent[-PUBLISHED:],
        ]
        events = [
            Event(
                str(entry),
                entry.describe(),
                entry.lane,
                entry.number,
                entry.peer,
                () if entry.finished else entry.ranks,
                round(now - entry.started, 1),
                entry.finished,
            )
            for entry in reported
        ]
        return RankSnapshot(rank, dict(self.counts), events, doing())


@dataclass(frozen=True, slots=True)
class Event:
    """A `CollectiveRecord` as sent to other ranks."""

    name: str
    text: str
    lane: str
    number: int
    peer: int | None
    ranks: tuple[int, ...]
    """Empty if the operation is finished."""
    age_seconds: float
    finished: bool


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """Snapshot of one rank: number of operations by lane, its last operations, and its Python
    frames."""

    rank: int
    counts: Mapping[str, int]
    events: Sequence[Event]
    doing: Sequence[str]
    """Python frames, innermost first."""

    @property
    def waiting(self) -> Event | None:
        """The oldest unfinished operation."""
        return next((event for event in self.events if not event.finished), None)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "RankSnapshot":  # Any: JSON
        """Inverse of `dataclasses.asdict`."""
        events = [Event(**event | {"ranks": tuple(event["ranks"])}) for event in fields["events"]]
        return RankSnapshot(fields["rank"], fields["counts"], events, fields["doing"])


def missing_from(event: Event, rank: int, places: Mapping[int, RankSnapshot]) -> list[int]:
    """Return the ranks that have not started the operation that `rank` is in; ranks without a
    snapshot count as missing."""
    lane = event.lane if event.peer is None else reverse_lane(event.lane, rank)
    others = [other for other in event.ranks if other != rank]
    return [r for r in others if r not in places or places[r].counts.get(lane, 0) <= event.number]


def message_lane(group: str, peer: int, *, sends: bool) -> str:
    """Return the lane of messages to or from `peer`.

    >>> message_lane("3", 7, sends=True), reverse_lane("3 to 7", 2)
    ('3 to 7', '3 from 2')
    """
    return f"{group} {'to' if sends else 'from'} {peer}"


def reverse_lane(lane: str, rank: int) -> str:
    """Return the name of a message lane at the other end; `rank` is this end."""
    group, direction, _ = lane.rsplit(" ", 2)
    return message_lane(group, rank, sends=direction == "from")


def describe_hang(
    places: Mapping[int, RankSnapshot],
    world: int,
    *,
    timeout_seconds: float,
    where: Callable[[int], str] = str,
) -> str:
    """Describe which ranks did not reach which operation, and the position of every rank.

    Returns "" if no rank has waited longer than the timeout any more. `places`: snapshots of the
    ranks that answered. `where`: formats a rank with its coordinates.
    """
    waiting = {rank: place.waiting for rank, place in places.items() if place.waiting is not None}
    if all(event.age_seconds + ROUNDED < timeout_seconds for event in waiting.values()):
        return ""  # the operation was slow and has finished since
    missing_by_rank = {rank: missing_from(event, rank, places) for rank, event in waiting.items()}
    first = max(waiting, key=lambda rank: waiting[rank].age_seconds)
    missing_ranks = sorted(
        {other for others in missing_by_rank.values() for other in others if other not in waiting}
    )
    if missing_ranks:
        waiting_rank = next(
            rank
            for rank in sorted(missing_by_rank, key=lambda r: r != first)
            if set(missing_by_rank[rank]) & set(missing_ranks)
        )
        names = " and ".join(f"rank {where(rank)}" for rank in missing_ranks[:RANKS_SHOWN])
        more = (
            f" and {len(missing_ranks) - RANKS_SHOWN} more"
            if len(missing_ranks) > RANKS_SHOWN
            else ""
        )
        head = f"{names}{more} did not arrive at {waiting[waiting_rank].text}"
    elif any(missing_by_rank.values()):
        waiting_rank = next(
            rank
            for rank in sorted(missing_by_rank, key=lambda r: r != first)
            if missing_by_rank[rank]
        )
        head = f"ranks wait for each other: none of them can reach {waiting[waiting_rank].text}"
    else:
        waiting_rank = first
        head = _describe_stuck_operation(waiting[first], first, places, where)
    since = (
        f"Rank {where(waiting_rank)} has waited there for {waiting[waiting_rank].age_seconds:g} s, "
        "which is longer than "
    )
    lines = [head, f"{since}parallel.timeout_seconds={timeout_seconds:g}.", "Where the ranks are:"]
    return "\n".join(lines + _rank_lines(places, missing_by_rank, world, where))


def _describe_stuck_operation(
    event: Event, rank: int, places: Mapping[int, RankSnapshot], where: Callable[[int], str]
) -> str:
    """Describe a hang that all ranks have reached: with different operations, or stuck below
    Python."""
    for other in event.ranks if event.peer is None else ():
        for other_event in places[other].events:
            if (other_event.lane, other_event.number) == (
                event.lane,
                event.number,
            ) and other_event.text != event.text:
                return (
                    f"rank {where(rank)} is in {event.text}, but rank {where(other)} entered "
                    f"{other_event.text} instead"
                )
    return (
        f"all ranks entered {event.text}, but it does not finish: check the network and the devices"
    )


def _rank_lines(
    places: Mapping[int, RankSnapshot],
    missing_by_rank: Mapping[int, list[int]],
    world: int,
    where: Callable[[int], str],
) -> list[str]:
    """Return one line per rank, missing ranks first; ranks at the same position share a line."""
    shared: dict[str, list[int]] = {}
    missing_ranks = {other for others in missing_by_rank.values() for other in others}
    for rank in sorted(range(world), key=lambda r: (r not in missing_ranks, r)):
        shared.setdefault(_line(places.get(rank)), []).append(rank)
    lines = []
    for text, ranks in list(shared.items())[:RANKS_SHOWN]:
        named = ", ".join(where(rank) for rank in ranks[:3])
        more = f" and {len(ranks) - 3} more" if len(ranks) > 3 else ""
        lines.append(f"  rank{'s' if len(ranks) > 1 else ''} {named}{more}: {text}")
    left_out = sum(len(ranks) for ranks in list(shared.values())[RANKS_SHOWN:])
    return [*lines, f"  and {left_out} more"] if left_out else lines


def _line(place: RankSnapshot | None) -> str:
    if place is None:
        return "does not answer: dead, stopped, or holding the GIL"
    now = f"; now at {' < '.join(place.doing)}" if place.doing else ""
    if place.waiting is not None:
        return f"in {place.waiting.text}, for {place.waiting.age_seconds:g} s"
    return (
        f"in no collective{f', the last was {place.events[-1].name}' if place.events else ''}{now}"
    )


def axes_name(axes: Sequence[str]) -> str:
    """Return the name of axes in the settings' terms; both parts of a split axis become one.

    >>> axes_name(("pp", "dp_replica", "dp_shard", "cp_ring", "tp_copy"))
    'pp_dp_cp_ring_tp_copy'
    >>> axes_name(("edp_replica", "edp_shard"))
    'edp'
    """
    axis_of_parts = {
        parts: axis for axis, parts in (PARTS | EXPERT_PARTS).items() if set(parts) <= set(axes)
    }
    names = [
        next((name for parts, name in axis_of_parts.items() if axis in parts), axis)
        for axis in axes
    ]
    return "_".join(dict.fromkeys(names))


def call_site() -> tuple[str, int]:
    """Return file and line of the code that requested a collective, below the communication
    functions."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and _is_internal(frame):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno


def doing() -> list[str]:
    """Return the innermost frames of the package or the user's code, innermost first."""
    return [
        f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        for frame in islice(_frames(), FRAMES_SHOWN)
    ]


def inside_torch() -> bool:
    """Return whether the main thread is in a function of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _module(frame).startswith("torch.distributed")


def _frames() -> Iterator[FrameType]:
    """Yield the package's or user's frames of the main thread, or of the backward thread if that
    one runs."""
    threads = [thread for thread in threading.enumerate() if thread.name == BACKWARD_LANE]
    stacks = [list(_frames_of(thread)) for thread in (threading.main_thread(), *threads)]
    return iter(
        next((frames for frames in stacks if frames and _module(frames[0]) != _TURNS), stacks[0])
    )


def _frames_of(thread: threading.Thread) -> Iterator[FrameType]:
    """Yield the frames of a thread, innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if not _is_internal(frame):
            yield frame
        frame = frame.f_back


def _is_internal(frame: FrameType) -> bool:
    return _module(frame).startswith(_INTERNAL_MODULES)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def short_path(path: str) -> str:
    """Return a path relative to the package, if it is inside.

    >>> short_path("/usr/lib/python3/site-packages/megalith/train/step.py")
    'megalith/train/step.py'
    """
    before, inside, after = path.rpartition("/megalith/")
    return f"megalith/{after}" if inside and before else path

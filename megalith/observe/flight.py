"""The flight recorder: the last collectives this rank entered, and the report when one of them
never ends."""

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

from megalith.plan.shards import EXPERT_PARTS, PARTS

RECORDED = 1024
"""Collectives that are remembered: more than a step of a large model has between two waits (a
guess)."""

PUBLISHED = 64
"""Of these, how many a rank tells the others about."""

ROUNDED = 0.05
"""Seconds by which an age that is told may be too small."""

FRAMES_SHOWN = 4
RANKS_SHOWN = 16
"""Lines of a report that one rank each has; the files beside it have them all."""

BACKWARD_LANE = "backward-lane"
"""Name of the thread that works while the main thread has given its turn away."""

_TURNS = "megalith.parallel.turns"
_PLUMBING = (
    "megalith.parallel.group",
    "megalith.parallel.autograd",
    "megalith.observe.flight",
    "torch",
    "threading",
)


@dataclass(slots=True, eq=False)
class CollectiveRecord:
    """One collective or message that this rank entered."""

    op: str
    """all_reduce, send, ..."""

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Global ranks of the group; for a message the two ends."""

    lane: str
    """What is counted together: a group's name; for messages with the peer and the direction."""

    number: int
    """How many came before it in its lane: the same on every rank."""

    shape: tuple[int, ...] | None
    """None where ranks may bring different ones."""

    dtype: str
    site: tuple[str, int]
    """File and line that asked for it."""

    peer: int | None = None
    """The other end of a message, a global rank."""

    rows: tuple[Sequence[int], Sequence[int]] | None = None
    """Of an exchange: what is sent to each rank and received from each; `shape` is that of one row
    then."""

    started: float = field(default_factory=time.monotonic)
    done: bool = False
    work: "ReferenceType[Any] | None" = None
    """The handle that its caller waits for; it knows when the operation is finished."""

    @property
    def finished(self) -> bool:
        """Whether this rank is past it; a handle that nobody holds any more is nobody's wait."""
        if self.done or self.work is None:
            return self.done
        work = self.work()
        return work is None or bool(work.is_completed())

    def __str__(self) -> str:
        return f"{self.op} {self.number} over {axes_name(self.axes)}"

    def describe(self) -> str:
        """What it moves and who asked for it."""
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
        return f"{self}{what}{rows}, at {short_path(self.site[0])}:{self.site[1]}"


class Flight:
    """What this rank has entered, newest last; a few microseconds per collective, and nothing is
    sent anywhere."""

    def __init__(self) -> None:
        self.entries: deque[CollectiveRecord] = deque(maxlen=RECORDED)
        self.counts: dict[str, int] = {}
        self.compare: Callable[[CollectiveRecord], None] | None = None
        """Asks the other ranks whether they are about to do the same
        (parallel.check_collectives)."""

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
    ) -> CollectiveRecord:
        """Note that this rank is about to enter an operation; the caller marks it done, or gives it
        its handle."""
        number = self.counts.get(lane, 0)
        self.counts[lane] = number + 1
        size = None if shape is None else tuple(shape)
        entry = CollectiveRecord(
            op, axes, ranks, lane, number, size, dtype, call_site(), peer, rows
        )
        self.entries.append(entry)
        if self.compare is not None:
            self.compare(entry)
        return entry

    def unfinished(self) -> list[CollectiveRecord]:
        """Operations that this rank entered and that are not over, oldest first."""
        return [entry for entry in list(self.entries) if not entry.finished]

    def note_torchs_own(self, ranks: tuple[int, ...]) -> None:
        """Note an operation that the main thread is in and nobody wrote down: torch starts some by
        itself."""
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

    def forget_torchs_own(self) -> None:
        """Take back such notes, which nobody else would ever mark as done."""
        for entry in [entry for entry in self.entries if entry.lane == "torch"]:
            self.entries.remove(entry)
        self.counts.pop("torch", None)

    def place(self, rank: int) -> "RankSnapshot":
        """Where this rank is now, for the others to read."""
        now = time.monotonic()
        recent = list(self.entries)
        told = [
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
            for entry in told
        ]
        return RankSnapshot(rank, dict(self.counts), events, doing())


@dataclass(frozen=True, slots=True)
class Event:
    """An `CollectiveRecord` as it is told to other ranks."""

    name: str
    text: str
    lane: str
    number: int
    peer: int | None
    ranks: tuple[int, ...]
    """Empty when it is over."""
    age_seconds: float
    finished: bool


@dataclass(frozen=True, slots=True)
class RankSnapshot:
    """Where one rank is: how often it entered each lane, its last operations, and what it
    computes."""

    rank: int
    counts: Mapping[str, int]
    events: Sequence[Event]
    doing: Sequence[str]
    """Innermost first."""

    @property
    def waiting(self) -> Event | None:
        """The operation that it has been in for longest."""
        return next((event for event in self.events if not event.finished), None)

    @staticmethod
    def from_json(told: dict[str, Any]) -> "RankSnapshot":  # Any: JSON
        """The inverse of `dataclasses.asdict`."""
        events = [Event(**event | {"ranks": tuple(event["ranks"])}) for event in told["events"]]
        return RankSnapshot(told["rank"], told["counts"], events, told["doing"])


def missing_from(event: Event, rank: int, places: Mapping[int, RankSnapshot]) -> list[int]:
    """Ranks that have not entered the operation that `rank` is in; one without a place has not told
    where it is."""
    lane = event.lane if event.peer is None else reverse_lane(event.lane, rank)
    others = [other for other in event.ranks if other != rank]
    return [r for r in others if r not in places or places[r].counts.get(lane, 0) <= event.number]


def message_lane(group: str, peer: int, *, sends: bool) -> str:
    """The lane of messages to or from `peer`.

    >>> message_lane("3", 7, sends=True), reverse_lane("3 to 7", 2)
    ('3 to 7', '3 from 2')
    """
    return f"{group} {'to' if sends else 'from'} {peer}"


def reverse_lane(lane: str, rank: int) -> str:
    """What the other end of a lane of messages calls it; `rank` is this end."""
    group, direction, _ = lane.rsplit(" ", 2)
    return message_lane(group, rank, sends=direction == "from")


def describe_hang(
    places: Mapping[int, RankSnapshot],
    world: int,
    *,
    timeout_seconds: float,
    where: Callable[[int], str] = str,
) -> str:
    """Who did not arrive, at what, and where every rank is; "" where nobody waits any more for as
    long as that.

    `places`: of every rank that answered. `where`: a rank with its coordinates.
    """
    waiting = {rank: place.waiting for rank, place in places.items() if place.waiting is not None}
    if all(event.age_seconds + ROUNDED < timeout_seconds for event in waiting.values()):
        return ""  # it was slow and has gone on; who waits for a moment now does so all the time
    absent = {rank: missing_from(event, rank, places) for rank, event in waiting.items()}
    first = max(waiting, key=lambda rank: waiting[rank].age_seconds)
    guilty = sorted(
        {other for others in absent.values() for other in others if other not in waiting}
    )
    if guilty:
        victim = next(
            rank
            for rank in sorted(absent, key=lambda r: r != first)
            if set(absent[rank]) & set(guilty)
        )
        names = " and ".join(f"rank {where(rank)}" for rank in guilty[:RANKS_SHOWN])
        more = f" and {len(guilty) - RANKS_SHOWN} more" if len(guilty) > RANKS_SHOWN else ""
        head = f"{names}{more} did not arrive at {waiting[victim].text}"
    elif any(absent.values()):
        victim = next(rank for rank in sorted(absent, key=lambda r: r != first) if absent[rank])
        head = f"ranks wait for each other: none of them can reach {waiting[victim].text}"
    else:
        victim = first
        head = _never_ends(waiting[first], first, places, where)
    since = (
        f"Rank {where(victim)} has waited there for {waiting[victim].age_seconds:g} s, which is "
        "longer than "
    )
    lines = [head, f"{since}parallel.timeout_seconds={timeout_seconds:g}.", "Where the ranks are:"]
    return "\n".join(lines + _lines_of_ranks(places, absent, world, where))


def _never_ends(
    event: Event, rank: int, places: Mapping[int, RankSnapshot], where: Callable[[int], str]
) -> str:
    """All ranks have entered it: either with something else in mind, or something below Python is
    stuck."""
    for other in event.ranks if event.peer is None else ():
        for theirs in places[other].events:
            if (theirs.lane, theirs.number) == (
                event.lane,
                event.number,
            ) and theirs.text != event.text:
                return (
                    f"rank {where(rank)} is in {event.text}, but rank {where(other)} entered "
                    f"{theirs.text} instead"
                )
    return (
        f"all ranks entered {event.text}, but it does not end: look at the network and the devices"
    )


def _lines_of_ranks(
    places: Mapping[int, RankSnapshot],
    absent: Mapping[int, list[int]],
    world: int,
    where: Callable[[int], str],
) -> list[str]:
    """One line per rank, those first that others wait for; many ranks at the same place share
    one."""
    shared: dict[str, list[int]] = {}
    blamed = {other for others in absent.values() for other in others}
    for rank in sorted(range(world), key=lambda r: (r not in blamed, r)):
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
        return "does not answer: dead, stopped, or holding Python's lock"
    now = f"; now at {' < '.join(place.doing)}" if place.doing else ""
    if place.waiting is not None:
        return f"in {place.waiting.text}, for {place.waiting.age_seconds:g} s"
    return (
        f"in no collective{f', the last was {place.events[-1].name}' if place.events else ''}{now}"
    )


def axes_name(axes: Sequence[str]) -> str:
    """Axes in the words of the settings: those that were cut into two count as one where both are
    there.

    >>> axes_name(("pp", "dp_replica", "dp_shard", "cp_ring", "tp_copy"))
    'pp_dp_cp_ring_tp_copy'
    >>> axes_name(("edp_replica", "edp_shard"))
    'edp'
    """
    whole = {
        parts: axis for axis, parts in (PARTS | EXPERT_PARTS).items() if set(parts) <= set(axes)
    }
    names = [next((name for parts, name in whole.items() if axis in parts), axis) for axis in axes]
    return "_".join(dict.fromkeys(names))


def call_site() -> tuple[str, int]:
    """File and line of the code that asked for a collective, below the functions that carry it
    out."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None and _is_plumbing(frame):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno


def doing() -> list[str]:
    """What this rank is at: the innermost frames of ours or of the user's, innermost first."""
    return [
        f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        for frame in islice(_frames(), FRAMES_SHOWN)
    ]


def inside_torch() -> bool:
    """Whether the main thread is in a function of torch.distributed right now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _module(frame).startswith("torch.distributed")


def _frames() -> Iterator[FrameType]:
    """Frames of the main thread, or of the other lane where it waits for its turn, that are ours or
    the user's."""
    lanes = [thread for thread in threading.enumerate() if thread.name == BACKWARD_LANE]
    found = [list(_frames_of(thread)) for thread in (threading.main_thread(), *lanes)]
    return iter(
        next((frames for frames in found if frames and _module(frames[0]) != _TURNS), found[0])
    )


def _frames_of(thread: threading.Thread) -> Iterator[FrameType]:
    """Innermost first."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if not _is_plumbing(frame):
            yield frame
        frame = frame.f_back


def _is_plumbing(frame: FrameType) -> bool:
    return _module(frame).startswith(_PLUMBING)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def short_path(path: str) -> str:
    """A path from the package on, if it is in it.

    >>> short_path("/usr/lib/python3/site-packages/megalith/train/step.py")
    'megalith/train/step.py'
    """
    before, inside, after = path.rpartition("/megalith/")
    return f"megalith/{after}" if inside and before else path

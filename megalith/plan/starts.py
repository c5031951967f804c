"""Starts of a run as pure functions of the lines of `starts.jsonl`: how each ended, crash loops,
the checkpoint with which the next start begins, and hosts that are suspects."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

StartChoice = Literal["newest", "previous_tier", "previous_checkpoint", "reject"]

DELAYS_SECONDS = 0.0, 10.0, 60.0
"""Time before the first, second and third start after a fault with the same cause: a file system or
network may need it to recover (training specification, 17.5)."""

MAX_FAILED_STARTS = 4
"""Starts in a row with the same cause, before a newer checkpoint, after which no other begins: two
with the newest checkpoint, then one of the previous tier, then one of the checkpoint before."""

MIN_FAULTS_OF_SUSPECT = 3
"""Starts that failed on a host after which it is a suspect."""

NOT_FAULTS = frozenset({0, 2, 75, 76})
"""Exit codes after which a start does not count: done, the user must change something, stopped
after a save, and a suspect machine, which fault detection counts separately."""

MAX_NUMBER = 1e12
"""Largest number that is read: 30,000 years in seconds, and more steps than any run has."""

_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StartExit:
    """How a start ended."""

    time: float
    """Seconds since 1970."""
    cause: str
    """One line: done, the reason of a stop, or the first failure."""
    code: int
    step: int | None = None
    """The last finished step, if it is known."""
    rank: int | None = None
    """Rank that failed first."""
    host: str | None = None
    """Host of that rank."""
    elapsed: float | None = None
    """Seconds since the process began, by the monotonic clock; None: another process wrote
    the line."""
    is_consequence: bool = False
    """Whether the failure only shows that another rank has failed."""

    @property
    def is_fault(self) -> bool:
        """Whether the start ended by a fault: no signal, and no error that the user can fix."""
        return self.code not in NOT_FAULTS and self.code < 128

    @property
    def cause_key(self) -> str:
        """The cause without numbers, which differ from start to start.

        >>> StartExit(0.0, "rank 3 was killed by signal 9 (SIGKILL)", 1).cause_key
        'rank # was killed by signal # (SIGKILL)'
        """
        return _NUMBERS.sub("#", self.cause)


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a run."""

    number: int
    time: float
    """When the checkpoint was chosen; seconds since 1970."""
    began: float
    """When the process of rank 0 began."""
    step: int
    """Step of the checkpoint with which it began; 0: from the beginning."""
    newest_step: int
    """Step of the newest checkpoint at that time."""
    world_size: int
    hosts: tuple[str, ...]
    layout: str
    checkpoint: str | None
    tier: str
    """local, persistent, or none."""
    launcher: int | None = None
    """Process id of our launcher, which writes the exit; None: the ranks do."""
    launcher_identity: str = ""
    """Boot id, process namespace, process id and start time of the launcher: after a restart of a
    container, another one may have the same process id. Empty in older records."""
    exit: StartExit | None = None
    """None: the start is running, or was killed before anything was written."""
    is_reset: bool = False
    """Whether --reset-attempts came after it, so that it does not count."""


@dataclass(frozen=True, slots=True)
class StartDecision:
    """Checkpoint with which a start begins, and the delay before it."""

    choice: StartChoice
    num_failed: int
    """Number of starts in a row that ended with the same cause before a newer checkpoint."""
    delay_seconds: float


def parse_starts(rows: Iterable[Mapping[str, Any]]) -> list[Start]:  # Any: JSON
    """Return the starts that the rows of `starts.jsonl` describe, with the exit that has the first
    failure. Rows of other kinds are ignored; the others have no problem that `find_record_problem`
    finds.
    """
    starts: dict[int, Start] = {}
    for row in rows:
        kind = row.get("kind")
        if kind == "start":
            start = _parse_start(row)
            starts[start.number] = start
        elif kind == "exit" and _parse_int(row, "start") in starts:
            number, ended = _parse_int(row, "start"), _parse_exit(row)
            before = starts[number].exit
            if before is None or _precedes(ended, before):
                starts[number] = replace(starts[number], exit=ended)
        elif kind == "reset":
            starts = {number: replace(each, is_reset=True) for number, each in starts.items()}
    return list(starts.values())


def find_record_problem(row: Mapping[str, Any]) -> str:  # Any: JSON
    """Return why a row of `starts.jsonl` cannot be read; empty if it can."""
    try:
        if row.get("kind") == "start":
            _parse_start(row)
        elif row.get("kind") == "exit":
            _parse_int(row, "start")
            _parse_exit(row)
    except KeyError as error:
        return f"it lacks {error.args[0]}"
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def is_number(value: object) -> bool:
    """Return whether a value of JSON is a number that can be computed with.

    >>> [is_number(value) for value in (1, 2.5, True, "1", float("nan"), 1e999, 10**400)]
    [True, True, False, False, False, False, False]
    """
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and -MAX_NUMBER <= value <= MAX_NUMBER  # type: ignore[operator]  # numeric


def _parse_float(row: Mapping[str, Any], name: str) -> float:  # Any: JSON
    if not is_number(row[name]):
        raise ValueError(f"{name} is not a number")
    return float(row[name])


def _parse_int(row: Mapping[str, Any], name: str) -> int:  # Any: JSON
    return int(_parse_float(row, name))


def _parse_optional_int(row: Mapping[str, Any], name: str) -> int | None:  # Any: JSON
    return None if row.get(name) is None else _parse_int(row, name)


def _parse_hosts(row: Mapping[str, Any]) -> tuple[str, ...]:  # Any: JSON
    if not isinstance(row["hosts"], list) or not row["hosts"]:
        raise ValueError("hosts is not a list of names")
    return tuple(map(str, row["hosts"]))


def _parse_start(row: Mapping[str, Any]) -> Start:  # Any: JSON
    checkpoint = row.get("checkpoint")
    return Start(
        number=_parse_int(row, "start"),
        time=_parse_float(row, "time"),
        began=_parse_float(row, "began"),
        step=_parse_int(row, "step"),
        newest_step=_parse_int(row, "newest_step"),
        world_size=_parse_int(row, "world_size"),
        hosts=_parse_hosts(row),
        layout=str(row["layout"]),
        checkpoint=None if checkpoint is None else str(checkpoint),
        tier=str(row["tier"]),
        launcher=_parse_optional_int(row, "launcher"),
        launcher_identity=str(row.get("launcher_identity", "")),
    )


def _parse_exit(row: Mapping[str, Any]) -> StartExit:  # Any: JSON
    host = row.get("host")
    return StartExit(
        time=_parse_float(row, "time"),
        cause=str(row["cause"]),
        code=_parse_int(row, "code"),
        step=_parse_optional_int(row, "step"),
        rank=_parse_optional_int(row, "rank"),
        host=None if host is None else str(host),
        elapsed=None if row.get("elapsed") is None else _parse_float(row, "elapsed"),
        is_consequence=bool(row.get("is_consequence", False)),
    )


def _precedes(one: StartExit, other: StartExit) -> bool:
    """Return whether a failure is the cause of the other one: the earlier one that is not the loss
    of a peer."""
    return (one.is_consequence, one.time) < (other.is_consequence, other.time)


def count_failed_starts(starts: Sequence[Start], newest_step: int) -> int:
    """Return the number of last starts that all ended with the same fault, before there was a
    checkpoint newer than that of step `newest_step`."""
    counted = [start for start in starts if not start.is_reset]
    number = 0
    for start in reversed(counted):
        ended, last = start.exit, counted[-1].exit
        if (
            ended is None
            or last is None
            or not ended.is_fault
            or ended.cause_key != last.cause_key
            or start.newest_step != newest_step
        ):
            break
        number += 1
    return number


def decide_start(
    starts: Sequence[Start], *, newest_step: int, has_older_tier: bool, has_older_checkpoint: bool
) -> StartDecision:
    """Return the checkpoint with which a run starts, from its earlier starts.

    `newest_step`: step of the newest checkpoint. `has_older_tier`: it is a local one, and there is
    a persistent one; `has_older_checkpoint`: there is one before the newest persistent one.
    """
    failed = count_failed_starts(starts, newest_step)
    delay = DELAYS_SECONDS[min(failed, len(DELAYS_SECONDS)) - 1] if failed else 0.0
    if failed >= MAX_FAILED_STARTS:
        return StartDecision("reject", failed, 0.0)
    older: list[StartChoice] = []
    if has_older_tier:
        older.append("previous_tier")
    if has_older_checkpoint:
        older.append("previous_checkpoint")
    if failed < 2 or not older:
        return StartDecision("newest", failed, delay)
    return StartDecision(older[min(failed - 2, len(older) - 1)], failed, delay)


def find_suspect_hosts(starts: Sequence[Start]) -> dict[str, list[Start]]:
    """Return the hosts on which several starts failed, with these starts.

    Starts with a single host do not count: the fault may be in the program.
    """
    named: dict[str, list[Start]] = {}
    for start in starts:
        ended = start.exit
        if start.is_reset or ended is None or not ended.is_fault or ended.host is None:
            continue
        if len(start.hosts) > 1 and not ended.is_consequence:
            named.setdefault(ended.host, []).append(start)
    return {host: each for host, each in named.items() if len(each) >= MIN_FAULTS_OF_SUSPECT}

"""Heartbeats (fault tolerance): every rank writes its progress to shared memory, and another
process ends a rank without progress. Imports no torch.

A heartbeat has 16 bytes: section of the run, a counter, and the time. Hooks of the run write it
without a system call. The launcher reads the heartbeats of its ranks; a rank that torchrun or a
batch system started has a monitor process of its own. Unlike the watchdog, a thread of the rank,
they find a rank that is stopped, that holds the GIL in an endless loop, or that waits for a
file system which does not answer.

A rank that waits in a collective makes no progress either. A thread of the rank reports that it
waits, and the watchdog covers the collective (launch/watchdog.py).
"""

import faulthandler
import json
import math
import mmap
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from megalith import storage

Section = Literal["start", "step", "save", "load", "evaluate", "exit"]
SECTIONS: tuple[Section, ...] = get_args(Section)

_WAITS = struct.Struct("<H")
_HEARTBEAT = struct.Struct("<BxId")  # section, counter, time; after the number of waits
RECORD_NBYTES = _WAITS.size + _HEARTBEAT.size
_TIMEOUTS = struct.Struct(f"<{len(SECTIONS)}d")
HEARTBEAT_NBYTES = RECORD_NBYTES + _TIMEOUTS.size
assert RECORD_NBYTES == 16

MIN_PASSES = 16
"""Passes of a section after which its timeout is computed from their times."""

MIN_TIMEOUT_SECONDS = 60.0
TIMEOUT_FACTOR = 5
"""A learned timeout is this multiple of the longest pass."""

MAX_GAP_SECONDS = 1.0
"""Longest time between two checks that counts as time without progress: after a longer one the
monitor itself, and perhaps the ranks, were stopped."""

STACK_SIGNAL = signal.SIGUSR2
"""Signal on which a rank writes the stacks of its threads; also while the GIL is held."""

STACK_SECONDS = 3.0
"""Longest wait for the stacks."""

MAX_STACK_LINES = 200
MAX_RANKS_SHOWN = 16

HEARTBEATS = "MEGALITH_HEARTBEATS"
"""Variable with the descriptors of the shared memory and of the file of stacks that the launcher
reads."""


# --- rank: writes its heartbeat


@dataclass(slots=True)
class SectionTimes:
    """Longest time without a heartbeat in one section, and number of its passes."""

    passes: int = 0
    longest_seconds: float = 0.0

    def timeout_seconds(self, initial_seconds: float) -> float:
        """Return the time without a heartbeat after which a rank hangs; `initial_seconds`: the
        timeout before `MIN_PASSES`.

        >>> SectionTimes(16, 30.0).timeout_seconds(600.0), SectionTimes(3, 1.0).timeout_seconds(600)
        (150.0, 600)
        """
        if self.passes < MIN_PASSES:
            return initial_seconds
        shortest = min(MIN_TIMEOUT_SECONDS, initial_seconds)
        return max(shortest, TIMEOUT_FACTOR * self.longest_seconds)


def merge_times(
    all_times: Iterable[Mapping[Section, SectionTimes]],
) -> dict[Section, SectionTimes]:
    """Return the largest values of several ranks."""
    merged: dict[Section, SectionTimes] = {}
    for times in all_times:
        for section, each in times.items():
            largest = merged.setdefault(section, SectionTimes())
            largest.passes = max(largest.passes, each.passes)
            largest.longest_seconds = max(largest.longest_seconds, each.longest_seconds)
    return merged


class RankHeartbeat:
    """Heartbeat of this rank: its current section and a counter, with the time."""

    def __init__(self, memory: "memoryview | None" = None) -> None:
        """`memory`: shared with the process that checks it; None: the rank is not monitored."""
        self.is_monitored = memory is not None
        self._memory = memoryview(bytearray(HEARTBEAT_NBYTES)) if memory is None else memory
        self.times: dict[Section, SectionTimes] = {}
        """Longest times without a heartbeat by section."""
        self.section: Section | None = None
        """None before the first heartbeat: until then the rank is not monitored."""
        self._last = 0.0
        self._num_heartbeats = self._num_waits = self._waits_at_last = 0
        self._initial_seconds, self._is_fixed = 0.0, False

    def set_timeouts(
        self,
        initial_seconds: float,
        *,
        fixed_seconds: float | None = None,
        times: Mapping[Section, SectionTimes] | None = None,
    ) -> None:
        """Set the timeouts of all sections, before the first heartbeat.

        `initial_seconds`: before a section has had `MIN_PASSES` passes; `fixed_seconds`: always,
        instead of learned ones; `times`: those of earlier starts of the run.
        """
        self._is_fixed = fixed_seconds is not None
        self._initial_seconds = initial_seconds if fixed_seconds is None else fixed_seconds
        self.times = merge_times([times or {}])
        self._write_timeouts()

    def timeout_seconds(self, section: Section) -> float:
        """Return the timeout of a section."""
        times = self.times.get(section)
        if times is None or self._is_fixed:
            return self._initial_seconds
        return times.timeout_seconds(self._initial_seconds)

    def record(self, section: Section | None = None) -> None:
        """Record progress, in `section` from now on; None: in the current one."""
        now = time.monotonic()
        before, section = self.section, section or self.section or "start"
        # Times that include a wait in a collective are not learned: they depend on other ranks.
        if before is not None and self._num_waits == self._waits_at_last:
            self._learn(before, now - self._last, is_pass=before != "start" or section == "step")
        self.section, self._last, self._waits_at_last = section, now, self._num_waits
        self._num_heartbeats += 1
        code = SECTIONS.index(section) + 1
        _HEARTBEAT.pack_into(
            self._memory, _WAITS.size, code, self._num_heartbeats & 0xFFFFFFFF, now
        )

    def _learn(self, section: Section, seconds: float, *, is_pass: bool) -> None:
        """Count a time between two heartbeats; a start is one pass, however many it has."""
        times = self.times.setdefault(section, SectionTimes())
        times.passes += is_pass
        if seconds > times.longest_seconds:
            times.longest_seconds = seconds
        elif times.passes != MIN_PASSES:
            return
        self._write_timeouts()

    def _write_timeouts(self) -> None:
        timeouts = [self.timeout_seconds(section) for section in SECTIONS]
        _TIMEOUTS.pack_into(self._memory, RECORD_NBYTES, *timeouts)

    @contextmanager
    def within(self, section: Section) -> Iterator[None]:
        """Change to another section inside the context."""
        before = self.section
        self.record(section)
        try:
            yield
        finally:
            if before is None:
                self.stop()
            else:
                self.record(before)

    def stop(self) -> None:
        """End the monitoring of this rank, until the next heartbeat."""
        self.section = None
        _HEARTBEAT.pack_into(self._memory, _WAITS.size, 0, self._num_heartbeats & 0xFFFFFFFF, 0.0)

    def record_wait(self) -> None:
        """Record that this rank waits in a collective; from another thread than `record`."""
        self._num_waits += 1
        _WAITS.pack_into(self._memory, 0, self._num_waits & 0xFFFF)


@contextmanager
def record_waits(heartbeat: RankHeartbeat, is_waiting: Callable[[], bool]) -> Iterator[None]:
    """Record on a separate thread inside the context when this rank waits in a collective."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(_choose_pause(heartbeat)):
            with suppress(Exception):  # a bug must not end the thread
                if is_waiting():
                    heartbeat.record_wait()

    if not heartbeat.is_monitored:
        yield
        return
    thread = threading.Thread(target=run, name="heartbeat-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(timeout=MAX_GAP_SECONDS)


def _choose_pause(heartbeat: RankHeartbeat) -> float:
    """Return the time between two checks for waits: several in the shortest timeout."""
    timeout = min(heartbeat.timeout_seconds(section) for section in SECTIONS)
    return min(1.0, timeout / 8) if timeout else 1.0


def map_heartbeat(fd: int) -> memoryview:
    """Map the shared memory of a heartbeat. It stays mapped until this process ends, because
    another thread may still write to it."""
    return memoryview(mmap.mmap(fd, HEARTBEAT_NBYTES))


@contextmanager
def write_stacks_on_signal(fd: int) -> Iterator[None]:
    """Write the stacks of all threads to a file when `STACK_SIGNAL` arrives, inside the context; in
    the main thread."""
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    try:
        yield
    finally:
        faulthandler.unregister(STACK_SIGNAL)
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # this process is about to end by itself


def create_shared_file(nbytes: int) -> int:
    """Return a descriptor of shared memory without a name; a temporary file where the system has
    none."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("megalith-heartbeats")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


# --- learned times, in the run folder, by world size


def read_times(path: Path, world: int) -> dict[Section, SectionTimes]:
    """Return the times of earlier starts with as many ranks; empty if there are none, or the file
    is damaged."""
    with suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
        stored = _parse_times(path.read_bytes()).get(str(world), {})
        times = {name: SectionTimes(**stored[name]) for name in SECTIONS if name in stored}
        if all(_is_valid(each) for each in times.values()):
            return times
    return {}


def _parse_times(data: bytes) -> dict[str, Any]:  # Any: JSON
    """Return the object of the file.

    Raises:
        ValueError: the file has none.
    """
    parsed = storage.parse_json(data)
    if not isinstance(parsed, dict):
        raise ValueError("not an object")
    return parsed


def _is_valid(times: SectionTimes) -> bool:
    return times.passes >= 0 <= times.longest_seconds and math.isfinite(times.longest_seconds)


def write_times(path: Path, world: int, times: Mapping[Section, SectionTimes]) -> None:
    """Write the times of all sections, and keep those of other numbers of ranks."""
    stored: dict[str, Any] = {}  # Any: JSON
    with suppress(OSError, ValueError):
        stored = _parse_times(path.read_bytes())
    stored[str(world)] = {name: asdict(each) for name, each in times.items()}
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(stored, indent=1) + "\n")
    unfinished.rename(path)


# --- the process that checks heartbeats: the launcher, or the monitor process of a rank


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """State of one rank as its heartbeat shows it."""

    rank: int
    section: Section | None
    num_heartbeats: int
    idle_seconds: float
    """Time without a heartbeat, and without a wait in a collective."""
    timeout_seconds: float

    @property
    def is_hung(self) -> bool:
        """Whether the rank hangs."""
        return self.section is not None and 0 < self.timeout_seconds < self.idle_seconds

    def __str__(self) -> str:
        if self.section is None:
            return "no heartbeat yet"
        return (
            f"{self.section}, heartbeat {self.num_heartbeats}, last progress "
            f"{self.idle_seconds:.1f} s ago"
        )


class HeartbeatReader:
    """Reads the heartbeat of one process, and the stacks that it writes."""

    def __init__(self, fd: int | None = None, stacks_fd: int | None = None) -> None:
        """`fd`, `stacks_fd`: descriptors of the shared memory and of the file of stacks; None:
        create them, for a process that is about to start."""
        self.fd = create_shared_file(HEARTBEAT_NBYTES) if fd is None else fd
        self.stacks_fd = create_shared_file(0) if stacks_fd is None else stacks_fd
        self._memory = mmap.mmap(self.fd, HEARTBEAT_NBYTES)
        self._record = b""
        self._idle_seconds = 0.0
        self._last_check = time.monotonic()

    @property
    def variable(self) -> dict[str, str]:
        """Environment variable of the process that writes the heartbeat."""
        return {HEARTBEATS: f"{self.fd}:{self.stacks_fd}"}

    def check(self, rank: int) -> HeartbeatState:
        """Read the heartbeat and return the state of `rank`."""
        now = time.monotonic()
        elapsed = min(now - self._last_check, MAX_GAP_SECONDS)
        self._last_check = now
        record = self._memory[:RECORD_NBYTES]
        self._idle_seconds = self._idle_seconds + elapsed if record == self._record else 0.0
        self._record = record
        code, num_heartbeats, _ = _HEARTBEAT.unpack_from(record, _WAITS.size)
        if not 0 < code <= len(SECTIONS):
            return HeartbeatState(rank, None, num_heartbeats, self._idle_seconds, 0.0)
        timeouts = _TIMEOUTS.unpack_from(self._memory, RECORD_NBYTES)
        section, timeout = SECTIONS[code - 1], timeouts[code - 1]
        return HeartbeatState(rank, section, num_heartbeats, self._idle_seconds, timeout)

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        os.close(self.fd)
        os.close(self.stacks_fd)


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that hangs."""

    rank: int
    summary: str
    text: str
    """Description with its stacks and the heartbeats of the other ranks."""


class HeartbeatMonitor:
    """Reads the heartbeats of the processes that a launcher has started."""

    def __init__(self) -> None:
        self._readers: dict[int, HeartbeatReader] = {}  # by process id

    def add(self, pid: int, reader: HeartbeatReader) -> None:
        """Add a process that was started with the reader's variable and descriptors."""
        self._readers[pid] = reader

    def remove(self, pid: int) -> None:
        """Release the memory of a process that has ended."""
        reader = self._readers.pop(pid, None)
        if reader is not None:
            reader.close()

    def find_hung_rank(self, pids: Mapping[int, int]) -> HungRank | None:
        """Check the heartbeats of running ranks, and describe the one that hangs, if any.

        `pids`: rank -> process id.
        """
        readers = {rank: self._readers[pid] for rank, pid in pids.items() if pid in self._readers}
        states = [reader.check(rank) for rank, reader in readers.items()]
        hung = find_hung_rank(states)
        if hung is None:
            return None
        pid = pids[hung.rank]
        return describe_hung_rank(hung, states, pid, readers[hung.rank].stacks_fd)

    def close(self) -> None:
        """Release all memory."""
        for pid in [*self._readers]:
            self.remove(pid)


def find_hung_rank(states: Sequence[HeartbeatState]) -> HeartbeatState | None:
    """Return the rank that hangs, if any; of several the one that has been hung for longest."""
    hung = [state for state in states if state.is_hung]
    return max(hung, key=lambda state: state.idle_seconds, default=None)


def read_process_state(pid: int) -> str:
    """Return the state of a process as in Linux's /proc, such as `T (stopped)`; elsewhere
    empty."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.partition(":")[2].strip()
    return ""


def read_stacks(pid: int, stacks_fd: int) -> str:
    """Return the stacks of all threads of a rank; a stopped process is continued for that.

    `stacks_fd`: file that the rank writes them to. If the rank does not answer, the
    text states this.
    """
    is_stopped = read_process_state(pid).startswith(("T", "t"))
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        if is_stopped:  # the signal is handled first, before the rank continues
            os.kill(pid, signal.SIGCONT)
    deadline, text, before = time.monotonic() + STACK_SECONDS, "", None
    while time.monotonic() < deadline and (not text or text != before):
        time.sleep(0.05)
        before, text = text, _read_text(stacks_fd)
    lines = text.strip().splitlines()
    more = ["..."] if len(lines) > MAX_STACK_LINES else []
    return "\n".join([*lines[:MAX_STACK_LINES], *more]) or (
        "none: the process does not handle signals, because it waits in the kernel"
    )


def _read_text(fd: int) -> str:
    with suppress(OSError):
        return os.pread(fd, 1 << 20, 0).decode(errors="replace")
    return ""


def describe_hung_rank(
    hung: HeartbeatState, states: Sequence[HeartbeatState], pid: int, stacks_fd: int
) -> HungRank:
    """Describe a rank that hangs, with its stacks and the heartbeats of the other ranks."""
    state, stacks = read_process_state(pid), read_stacks(pid, stacks_fd)
    others = [each for each in states if each.rank != hung.rank]
    summary = summarize_hung_rank(hung)
    lines = [
        f"rank {hung.rank} {summary}.",
        f"If it is only slow, set parallel.heartbeat_timeout_seconds to more than "
        f"{hung.idle_seconds:.0f}.",
    ]
    lines += [f"State of its process: {state}."] if state else []
    lines += ["Stacks of all its threads:", stacks]
    if others:
        lines += ["Heartbeats of the other ranks of its machine:"]
        lines += [f"  rank {each.rank}: {each}" for each in others[:MAX_RANKS_SHOWN]]
    return HungRank(hung.rank, summary, "\n".join(lines))


def summarize_hung_rank(hung: HeartbeatState) -> str:
    """Describe a rank that hangs in one line."""
    return (
        f"has made no progress for {hung.idle_seconds:.1f} s in section {hung.section}, "
        f"outside of collectives, and was killed (timeout: {hung.timeout_seconds:.1f} s)"
    )

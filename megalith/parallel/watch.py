"""The watch: a thread per rank that notices a collective that never ends, asks all ranks where they
are, ends the run.

While all goes well a rank writes nothing to the store: its watch looks at the flight recorder and
at one key, twenty times per timeout. The first rank that waits too long raises the alarm; every
watch then publishes where its rank is, be it in a collective or not, and the rank that raised the
alarm tells who is missing.
"""

import faulthandler
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from megalith.observe.flight import (
    CollectiveRecord,
    Flight,
    RankSnapshot,
    describe_hang,
    inside_torch,
)
from megalith.parallel.failure import STOPPED_IN_A_HANG, Failure
from megalith.plan.grid import Grid

LOOKS = 20
"""How often a watch looks within one timeout: a hang is reported at most this part of it late."""

MAX_PAUSE_SECONDS = 30.0
GRACE_SECONDS = 2.0
"""How long ranks have to answer the alarm beyond the time between two looks, and to read the
report."""

AXES = ("tp", "cp", "dp", "pp", "etp", "ep")
"""In which order a rank's coordinates are given; those among experts where there are some."""

Answer = TypeVar("Answer")
ALARM, REPORT = "alarm", "report"


@dataclass(slots=True)
class HangWatch:
    """Looks after one rank."""

    flight: Flight
    store: Store
    """A connection of its own: the main thread may be waiting on its."""

    rank: int
    world: int
    timeout_seconds: float
    end: Callable[[Failure, float], object]
    """Leaves a failure for whoever started this process and ends it, from this thread, after so
    many seconds."""

    where: Callable[[int], str] = str
    """A rank with its coordinates, for people."""

    folder: Path | None = None
    """Where stacks and the report go; None: a new one for temporary files."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    inside_torch: int = 0
    """Looks in a row that found the main thread in torch.distributed."""
    on_device: CollectiveRecord | None = None
    """What the device was still at when this watch last looked, and the host past it."""

    alarms: int = 0
    """How many were about something that has ended by itself."""

    said: set[str] = field(default_factory=set)
    """What is in the log already."""

    over: threading.Event = field(default_factory=threading.Event)

    @property
    def pause_seconds(self) -> float:
        """Time between two looks."""
        return min(self.timeout_seconds / LOOKS, MAX_PAUSE_SECONDS)

    @property
    def patience_seconds(self) -> float:
        """How long every rank that can answer has answered by."""
        return 2 * self.pause_seconds + GRACE_SECONDS

    def run(self) -> None:
        """Look until it is over; whatever goes wrong here, this thread goes on looking."""
        while not self.over.wait(self.pause_seconds):
            late = False
            try:
                late = self.is_late()
                winner = _within(self.patience_seconds, partial(self._alarm, late=late))
                if winner is None or self.over.is_set():
                    continue
                report = _within(4 * self.patience_seconds, partial(self._exchange, winner))
            # the process that serves the store is gone or stopped, or a mistake of ours
            except Exception as error:
                report, winner = self._alone(error) if late else "", self.rank
                if not report:
                    if not isinstance(error, RuntimeError):
                        self._say_once(
                            f"the watch of rank {self.rank} failed: {type(error).__name__}: {error}"
                        )
                    continue
            if report:
                self._finish(report, winner)
            else:
                self._go_on(winner)

    def is_late(self) -> bool:
        """Whether this rank has been in some operation for longer than the timeout."""
        if self.on_device is not None:
            self.on_device.done, self.on_device = True, None
        before = time.monotonic() - self.timeout_seconds
        if any(entry.started < before for entry in self.flight.unfinished()):
            return True
        last = self.flight.entries[-1] if self.flight.entries else None
        self.inside_torch = self.inside_torch + 1 if inside_torch() else 0
        if last is None or last.started > before:
            return False
        if (
            self.inside_torch > LOOKS // 2
        ):  # nobody notes what torch starts by itself, as FSDP2 does
            return True
        if self.device.type == "cpu":
            return False
        # The host only starts operations there, and stands still where it reads a number.
        busy = not torch.accelerator.current_stream(
            self.device
        ).query()  # of this thread: the default one
        if busy and last.finished:
            last.done, last.work, self.on_device = False, None, last
        return busy

    def _alarm(self, *, late: bool) -> int | None:
        """The rank that raised the alarm, if any has; `late`: it may be this one."""
        if late:
            return int(self.store.compare_set(self._key(ALARM), "", str(self.rank)))
        key = self._key(ALARM)
        return int(self.store.get(key)) if self.store.check([key]) else None

    def _exchange(self, winner: int) -> str:
        """Publish where this rank is; make the report, or wait for it. It is "" where nobody waits
        any more."""
        self.flight.note_torchs_own(tuple(range(self.world)))
        place = json.dumps(asdict(self.flight.place(self.rank)))
        self.store.set(self._key(f"place/{self.rank}"), place)
        report = self._key(REPORT)
        if winner == self.rank:
            self.store.set(report, self._report(self.patience_seconds))
        if wait_for(self.store, [report], 2 * self.patience_seconds):
            return self.store.get(report).decode()
        return f"rank {winner} noticed a hang, but did not say of what"

    def _report(self, patience: float) -> str:
        keys = [self._key(f"place/{rank}") for rank in range(self.world)]
        wait_for(self.store, keys, patience)  # the report names those that did not answer
        told = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        places = {place.rank: place for place in map(RankSnapshot.from_json, told)}
        return describe_hang(
            places, self.world, timeout_seconds=self.timeout_seconds, where=self.where
        )

    def _key(self, name: str) -> str:
        """In the store: every alarm has its own."""
        return f"{name}/{self.alarms}"

    def _go_on(self, winner: int) -> None:
        """The alarm was about something that has ended by itself: every rank waits for the next
        one."""
        self.alarms += 1
        self.flight.forget_torchs_own()
        if winner == self.rank:
            self._say_once(
                f"rank {self.where(self.rank)} was in an operation for longer than "
                "parallel.timeout_seconds="
                f"{self.timeout_seconds:g}, and has gone on: the ranks are slow, but nothing hangs"
            )

    def _say_once(self, text: str) -> None:
        """In the log, where nobody waits for it."""
        if text not in self.said and self.folder is not None:
            self._log("WARNING", text)
        self.said.add(text)

    def _log(self, level: str, text: str) -> None:
        assert self.folder is not None
        # A full disk must not keep the run from ending.
        with suppress(OSError), (self.folder / "log.txt").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level} {__name__}: {text}\n")

    def _finish(self, report: str, winner: int) -> None:
        """Write everything down and end, whatever becomes of the writing; one rank speaks for
        all."""
        failure = Failure(
            self.rank,
            f"{STOPPED_IN_A_HANG} that rank {winner} reports",
            report,
            time.monotonic_ns(),
        )
        if winner == self.rank:
            failure = replace(failure, summary=report.splitlines()[0], is_report=True)
        try:
            self._write_down(report)
            if winner == self.rank:
                text = (
                    f"{report}\nStacks of all threads: {self.folder}/hang_rank_*.txt. If the ranks "
                    "are only slow, set "
                    f"parallel.timeout_seconds to more than {self.timeout_seconds:g}."
                )
                failure = replace(failure, text=text)
                self._log("ERROR", text)
        finally:
            # The store that the others still read from may end with the process of rank 0.
            self.end(failure, GRACE_SECONDS if self.rank == 0 else 0.0)

    def _write_down(self, report: str) -> None:
        self.folder = self.folder or Path(tempfile.mkdtemp(prefix="megalith-hang-"))
        with suppress(OSError):  # a full disk must not keep the run from ending
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_stacks(self.folder / f"hang_rank_{self.rank}.txt", report)

    def _write_stacks(self, path: Path, report: str) -> None:
        with path.open("w") as file:
            file.write(
                f"{report}\n\nThis is rank {self.where(self.rank)}. What it entered, newest last:\n"
            )
            for entry in list(self.flight.entries):
                file.write(f"  {entry.describe()}{'' if entry.finished else ' (not finished)'}\n")
            file.write("\nStacks of all its threads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _alone(self, error: Exception) -> str:
        """What this rank can say without the others; "" where it does not wait any more."""
        self.flight.note_torchs_own(tuple(range(self.world)))
        waiting = self.flight.place(self.rank).waiting
        if waiting is None:
            return ""
        store = (
            "the store of the ranks does not answer"
            if isinstance(error, RuntimeError)
            else "asking them failed"
        )
        return (
            f"rank {self.where(self.rank)} has waited for {waiting.age_seconds:g} s in "
            f"{waiting.text}, and nobody can "
            f"say for whom: {store} ({_first_line(error)})"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Whether all these keys are in the store by then. Its own wait prints a warning when time is
    up."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives, on a thread of its own: a store whose process was stopped would not even
    say no.

    Raises:
        RuntimeError: it gave nothing in time.
        Exception: whatever it raised.
    """
    answers: SimpleQueue[Answer | Exception] = SimpleQueue()

    def put() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=put, name="watch-asks", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise RuntimeError(f"no answer within {seconds:g} s, expected one at once") from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def backend_timeout(timeout_seconds: float) -> float:
    """How long gloo and NCCL wait: longer than any watch needs, whose report says more than
    theirs."""
    return 1.5 * timeout_seconds + MAX_PAUSE_SECONDS


def name_rank(grid: Grid, rank: int) -> str:
    """A rank with its coordinates along the axes that have more than one.

    >>> from megalith.plan.grid import dense_grid
    >>> name_rank(dense_grid(world=8, tp=2, pp=2), 5)
    '5 (tp=1 dp=0 pp=1)'
    """
    here = grid.coordinates(rank)
    inner = {part for entry in grid.factored for part in (entry.outer, entry.inner)}
    shown = [axis for axis in AXES if axis in here and axis not in inner and grid.size(axis) > 1]
    return f"{rank} ({' '.join(f'{axis}={here[axis]}' for axis in shown)})" if shown else str(rank)


@contextmanager
def watching(watch: HangWatch) -> Iterator[None]:
    """Run the watch on a thread of its own while this lasts."""
    thread = threading.Thread(target=watch.run, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join(timeout=GRACE_SECONDS)  # it may be busy ending this process

"""Hang watch (fault tolerance): detects a collective that never ends or differs between ranks,
reports the state of all ranks, and ends the run.

While nothing hangs a rank writes nothing to the store: its watch checks the flight recorder and one
key, twenty times per timeout. The first rank that waits longer than the timeout raises the alarm;
every watch then publishes its rank's state, and the rank that raised the alarm reports which ranks
are missing.
"""

import faulthandler
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, TypeVar

import torch
from torch._C._distributed_c10d import Store

from megalith.errors import CollectiveError
from megalith.launch.launcher import STOPPED_IN_A_HANG, Failure
from megalith.observe.flight import (
    CollectiveRecord,
    FlightRecorder,
    RankSnapshot,
    axes_name,
    describe_hang,
    inside_torch,
    short_path,
)
from megalith.plan.grid import Grid

LOOKS = 20
"""Checks per timeout: a hang is reported late by at most this fraction of it."""

MAX_PAUSE_SECONDS = 30.0
GRACE_SECONDS = 2.0
"""Time, beyond that between two checks, that ranks have to answer the alarm and to read the
report."""

AXES = ("tp", "cp", "dp", "pp", "etp", "ep")
"""Order of a rank's coordinates in texts; those of the expert grid if there is one."""

Answer = TypeVar("Answer")
ALARM, REPORT = "alarm", "report"


@dataclass(slots=True)
class HangWatch:
    """Hang watch of one rank."""

    flight: FlightRecorder
    store: Store
    """A separate connection: the main thread may be waiting on its own."""

    rank: int
    world: int
    timeout_seconds: float
    end: Callable[[Failure, float], object]
    """Records a failure for the launcher and ends this process, from this thread, after some
    seconds."""

    where: Callable[[int], str] = str
    """Returns a rank with its coordinates, for texts."""

    folder: Path | None = None
    """Folder of stacks and report; None: a new temporary one."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    inside_torch: int = 0
    """Consecutive checks that found the main thread in torch.distributed."""
    on_device: CollectiveRecord | None = None
    """The operation that the device was still running at the last check, after the host had
    returned from it."""

    alarms: int = 0
    """Number of alarms about operations that have ended by themselves."""

    logged: set[str] = field(default_factory=set)
    """Warnings that have been logged."""

    over: threading.Event = field(default_factory=threading.Event)

    @property
    def pause_seconds(self) -> float:
        """Time between two checks."""
        return min(self.timeout_seconds / LOOKS, MAX_PAUSE_SECONDS)

    @property
    def patience_seconds(self) -> float:
        """Time by which every rank that can answer has answered."""
        return 2 * self.pause_seconds + GRACE_SECONDS

    def run(self) -> None:
        """Check until `over` is set; an error in a check does not end this thread."""
        while not self.over.wait(self.pause_seconds):
            late = False
            try:
                late = self.is_late()
                winner = _within(self.patience_seconds, partial(self._find_alarm, late=late))
                if winner is None or self.over.is_set():
                    continue
                report = _within(4 * self.patience_seconds, partial(self._exchange, winner))
            # the process that serves the store has ended or stopped, or this code has a bug
            except Exception as error:
                report, winner = self._report_alone(error) if late else "", self.rank
                if not report:
                    if not isinstance(error, RuntimeError):
                        self._log_once(
                            f"the watch of rank {self.rank} failed: {type(error).__name__}: {error}"
                        )
                    continue
            if report:
                self._finish(report, winner)
                return  # this process goes on if it may be restarted in place
            self._dismiss_alarm(winner)

    def is_late(self) -> bool:
        """Return whether this rank has been in an operation for longer than the timeout."""
        if self.on_device is not None:
            self.on_device.done, self.on_device = True, None
        before = time.monotonic() - self.timeout_seconds
        if any(entry.started < before for entry in self.flight.unfinished()):
            return True
        last = self.flight.entries[-1] if self.flight.entries else None
        self.inside_torch = self.inside_torch + 1 if inside_torch() else 0
        if last is None or last.started > before:
            return False
        # collectives that torch starts itself, as FSDP2 does, are not recorded
        if self.inside_torch > LOOKS // 2:
            return True
        if self.device.type == "cpu":
            return False
        # The host only launches operations there, and blocks where it reads a value.
        # the current stream of this thread is the default one
        busy = not torch.accelerator.current_stream(self.device).query()
        if busy and last.finished:
            last.done, last.work, self.on_device = False, None, last
        return busy

    def is_waiting(self) -> bool:
        """Return whether this rank waits at this time, which `is_late` watches: in an operation
        for other ranks, or for its device."""
        if self.flight.is_waiting() or inside_torch():
            return True
        if self.device.type == "cpu":
            return False
        return not torch.accelerator.current_stream(self.device).query()

    def _find_alarm(self, *, late: bool) -> int | None:
        """Return the rank that raised the alarm, if any; `late`: this rank tries to."""
        if late:
            return int(self.store.compare_set(self._key(ALARM), "", str(self.rank)))
        key = self._key(ALARM)
        return int(self.store.get(key)) if self.store.check([key]) else None

    def _exchange(self, winner: int) -> str:
        """Publish this rank's state, then create or wait for the report; "" if no rank waits any
        more."""
        self.flight.record_torch_collective(tuple(range(self.world)))
        place = json.dumps(asdict(self.flight.place(self.rank)))
        self.store.set(self._key(f"place/{self.rank}"), place)
        report = self._key(REPORT)
        if winner == self.rank:
            self.store.set(report, self._report(self.patience_seconds))
        if wait_for(self.store, [report], 2 * self.patience_seconds):
            return self.store.get(report).decode()
        return f"rank {winner} detected a hang but did not report it"

    def _report(self, patience: float) -> str:
        keys = [self._key(f"place/{rank}") for rank in range(self.world)]
        wait_for(self.store, keys, patience)  # the report names those that did not answer
        snapshots = [json.loads(self.store.get(key)) for key in keys if self.store.check([key])]
        places = {place.rank: place for place in map(RankSnapshot.from_json, snapshots)}
        return describe_hang(
            places, self.world, timeout_seconds=self.timeout_seconds, where=self.where
        )

    def _key(self, name: str) -> str:
        """Return the store key of the current alarm."""
        return f"{name}/{self.alarms}"

    def _dismiss_alarm(self, winner: int) -> None:
        """Dismiss the alarm, whose operation has ended by itself."""
        self.alarms += 1
        self.flight.remove_torch_collectives()
        if winner == self.rank:
            self._log_once(
                f"rank {self.where(self.rank)} was in an operation for longer than "
                "parallel.timeout_seconds="
                f"{self.timeout_seconds:g}, and has left it: the ranks are slow, but not hanging"
            )

    def _log_once(self, text: str) -> None:
        """Write a warning to the log file, once."""
        if text not in self.logged and self.folder is not None:
            self._log("WARNING", text)
        self.logged.add(text)

    def _log(self, level: str, text: str) -> None:
        assert self.folder is not None
        # A full disk must not keep the run from ending.
        with suppress(OSError), (self.folder / "log.txt").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {level} {__name__}: {text}\n")

    def _finish(self, report: str, winner: int) -> None:
        """Write the report and end the process, even if writing fails; one rank reports for all."""
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
            # The store may end with the process of rank 0 while others still read from it.
            self.end(failure, GRACE_SECONDS if self.rank == 0 else 0.0)

    def _write_down(self, report: str) -> None:
        self.folder = self.folder or Path(tempfile.mkdtemp(prefix="megalith-hang-"))
        with suppress(OSError):  # a full disk must not keep the run from ending
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_stacks(self.folder / f"hang_rank_{self.rank}.txt", report)

    def _write_stacks(self, path: Path, report: str) -> None:
        with path.open("w") as file:
            file.write(
                f"{report}\n\nThis is rank {self.where(self.rank)}. Its operations, newest last:\n"
            )
            for entry in list(self.flight.entries):
                file.write(f"  {entry.describe()}{'' if entry.finished else ' (not finished)'}\n")
            file.write("\nStacks of all its threads:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _report_alone(self, error: Exception) -> str:
        """Return a report of this rank only, or "" if it does not wait any more."""
        self.flight.record_torch_collective(tuple(range(self.world)))
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
            f"{waiting.text}, and it is not known for which rank: {store} ({_first_line(error)})"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def wait_for(store: Store, keys: Sequence[str], seconds: float) -> bool:
    """Return whether all keys are in the store within `seconds`. The store's own wait prints a
    warning at a timeout."""
    deadline, pause = time.monotonic() + seconds, 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """Call `ask` on a separate thread and return its result: a store whose process was stopped
    never answers.

    Raises:
        RuntimeError: no result in time.
        Exception: any exception of `ask`.
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
    """Return the timeout of gloo and NCCL: longer than the watch needs, whose report is more
    detailed."""
    return 1.5 * timeout_seconds + MAX_PAUSE_SECONDS


def name_rank(grid: Grid, rank: int) -> str:
    """Return a rank with its coordinates along the axes of more than one rank.

    >>> from megalith.plan.grid import dense_grid
    >>> name_rank(dense_grid(world=8, tp=2, pp=2), 5)
    '5 (tp=1 dp=0 pp=1)'
    """
    coordinates = grid.coordinates(rank)
    inner = {part for entry in grid.factored for part in (entry.outer, entry.inner)}
    shown = [
        axis for axis in AXES if axis in coordinates and axis not in inner and grid.size(axis) > 1
    ]
    return (
        f"{rank} ({' '.join(f'{axis}={coordinates[axis]}' for axis in shown)})"
        if shown
        else str(rank)
    )


@contextmanager
def watching(watch: HangWatch) -> Iterator[None]:
    """Run the watch on a separate thread inside the context."""
    thread = threading.Thread(target=watch.run, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.over.set()
        thread.join(timeout=GRACE_SECONDS)  # it may be ending this process


# parallel.check_collectives: before every collective, the ranks of its group compare fingerprints
# of it.
#
# A rank that starts another operation, or has another shape, makes the others wait forever or sum
# wrong values. Here each rank first writes a fingerprint to the store and reads those of its peers.
# That costs several round trips to the store per collective, so it is for debugging, not for
# training.

PATIENCE_SECONDS = 1.0
"""Time after which absent ranks are checked for waiting on this rank (a deadlock)."""

Fingerprint = Mapping[str, Any]  # Any: JSON


class Fingerprints:
    """Compares each collective of this rank with those of its peers, and detects deadlocks."""

    def __init__(self, store: Store, rank: int, where: Callable[[int], str] = str) -> None:
        self.store, self.rank, self.where = store, rank, where

    def compare(self, entry: CollectiveRecord) -> None:
        """Return when every rank of the group is about to start the same collective.

        A message is compared by its second end, so that it may be sent before its receiver waits
        for it.

        Raises:
            CollectiveError: on every rank of the group, with the collective of each; or the ranks
            wait for each other in different collectives.
        """
        if entry.peer is not None:
            self._compare_message(entry, entry.peer)
            return
        self.store.set(_key(entry, self.rank), json.dumps(fingerprint(entry)))
        # All ranks have reached the previous collective, so none reads the one before it.
        if entry.number >= 2:
            self.store.delete_key(f"{entry.lane}/{entry.number - 2}/{self.rank}")
        self._wait_for_all(entry)
        fingerprints = {rank: json.loads(self.store.get(_key(entry, rank))) for rank in entry.ranks}
        if not fingerprints_match(fingerprints, entry.ranks):
            what = f"number {entry.number} over {axes_name(entry.axes)}"
            self._raise_mismatch(fingerprints, what)

    def _compare_message(self, entry: CollectiveRecord, peer: int) -> None:
        group, sends = entry.lane.rsplit(" ", 2)[0], entry.op == "send"
        ends = (self.rank, peer) if sends else (peer, self.rank)
        keys = [f"{group}/{ends[0]} to {ends[1]}/{entry.number}/{end}" for end in ends]
        local_key, peer_key = keys if sends else reversed(keys)
        arrivals = f"{group}/{ends[0]} to {ends[1]}/{entry.number}"
        self.store.set(local_key, json.dumps(fingerprint(entry)))
        # counted after the write, so the second end finds both fingerprints
        if self.store.add(arrivals, 1) == 1:
            return
        fingerprints = {self.rank: fingerprint(entry), peer: json.loads(self.store.get(peer_key))}
        for key in (*keys, arrivals):
            self.store.delete_key(key)
        if any(
            fingerprints[self.rank][name] != fingerprints[peer][name] for name in ("shape", "dtype")
        ):
            self._raise_mismatch(fingerprints, f"message {entry.number} between them")

    def _wait_for_all(self, entry: CollectiveRecord) -> None:
        keys = [_key(entry, rank) for rank in entry.ranks]
        published = False
        suspected: dict[int, str] | None = None
        # a rank that is only slow is left to the timeout
        while not wait_for(self.store, keys, PATIENCE_SECONDS):
            absent = [
                rank
                for rank, key in zip(entry.ranks, keys, strict=True)
                if not self.store.check([key])
            ]
            waits = {
                "text": entry.describe(),
                "channel": entry.lane,
                "number": entry.number,
                "absent": absent,
            }
            self.store.set(f"waits/{self.rank}", json.dumps(waits))
            published, before, suspected = True, suspected, self._find_cycle([self.rank])
            # Required twice: entries that change during the check may form a false cycle.
            if suspected is not None and suspected == before:
                lines = "\n".join(
                    f"  rank {self.where(rank)}: {text}" for rank, text in suspected.items()
                )
                raise CollectiveError(
                    f"ranks wait for each other in different collectives:\n{lines}\nChange the "
                    "program so that every rank enters the collectives of its groups in the same "
                    "order."
                )
        # overwritten, not deleted: a reader would wait for a missing key
        if published:
            self.store.set(f"waits/{self.rank}", json.dumps(None))

    def _find_cycle(self, path: Sequence[int]) -> dict[int, str] | None:
        """Return a cycle of ranks that wait for each other, from this rank back to it, with their
        collectives; `path`: the ranks so far.

        A rank's entry may be slightly old, but it still waits for the ranks that the store lacks.
        """
        key = f"waits/{path[-1]}"
        waits = json.loads(self.store.get(key)) if self.store.check([key]) else None
        if waits is None:
            return None
        for rank in waits["absent"]:
            if self.store.check([f"{waits['channel']}/{waits['number']}/{rank}"]):
                continue
            if rank == path[0]:
                return {path[-1]: waits["text"]}
            rest = self._find_cycle([*path, rank]) if rank not in path else None
            if rest is not None:
                return {path[-1]: waits["text"], **rest}
        return None

    def _raise_mismatch(self, fingerprints: Mapping[int, Fingerprint], what: str) -> NoReturn:
        """Raise an error with the collective of each rank; equal ones share a line."""
        shared: dict[str, list[str]] = {}
        for rank, fields in fingerprints.items():
            shared.setdefault(str(fields["text"]), []).append(self.where(rank))
        lines = "\n".join(
            f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {t}" for t, ranks in shared.items()
        )
        raise CollectiveError(
            f"ranks {list(fingerprints)} are about to start different operations as "
            f"{what}:\n{lines}\nChange the program so that they enter the same operations, with "
            "the same shapes and dtypes, in the same order."
        )


def fingerprint(entry: CollectiveRecord) -> Fingerprint:
    """Return what has to be equal on all ranks of a collective."""
    site = f"{short_path(entry.site[0])}:{entry.site[1]}"
    rows = None if entry.rows is None else [list(part) for part in entry.rows]
    shape = None if entry.shape is None else list(entry.shape)
    return {
        "op": entry.op,
        "axes": list(entry.axes),
        "shape": shape,
        "dtype": entry.dtype,
        "site": site,
        "rows": rows,
        "subject": entry.subject,
        "text": entry.describe(),
    }


def fingerprints_match(fingerprints: Mapping[int, Fingerprint], ranks: Sequence[int]) -> bool:
    """Return whether the fingerprints of `ranks`, in group order, match.

    If ranks exchange uneven parts, each must send every other rank as many rows as that rank
    expects.
    """
    first = fingerprints[ranks[0]]
    equal_fields = ("op", "axes", "shape", "dtype", "site", "subject")
    if any(
        fields[name] != first[name] for fields in fingerprints.values() for name in equal_fields
    ):
        return False
    if first["rows"] is None:
        return True
    sent, received = ([fingerprints[rank]["rows"][side] for rank in ranks] for side in (0, 1))
    return all(sent[i][j] == received[j][i] for i in range(len(ranks)) for j in range(len(ranks)))


def _key(entry: CollectiveRecord, rank: int) -> str:
    return f"{entry.lane}/{entry.number}/{rank}"

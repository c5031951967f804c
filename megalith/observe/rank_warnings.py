"""Warnings of several ranks: rank 0 prints those with the same text once, with the numbers of the
ranks."""

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

PACKAGE = "megalith"

GATHER_SECONDS = 2.0
"""Time for which rank 0 waits for the same warning of other ranks. Heuristic: most ranks reach the
same line in this time, and a reader of the terminal can wait for it."""

FINISH_SECONDS = 1.0
"""Longest wait for the thread, and of rank 0 for the last warnings of other ranks. Heuristic: ranks
leave the job together."""

POLL_SECONDS = 0.25
"""Time between two reads of the store by rank 0; each is one message to a local port."""

MAX_QUEUED = 1000
"""Warnings of a rank that wait to be sent; the rest is dropped. Heuristic: bound for a rank that
logs faster than the store answers."""

MAX_TEXT = 8000
"""Characters of a warning, with its traceback."""

_COUNT, _NUM_LEFT = "count", "left"


class WarningStore(Protocol):
    """Store through which ranks send warnings; that of the rendezvous."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, and return it."""
        ...

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are set."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""
        ...


class RankWarning(NamedTuple):
    """A warning without its rank; equal ones are printed once."""

    logger: str
    level: int
    text: str


@dataclass(slots=True)
class WarningGroups:
    """Warnings that rank 0 has received and not printed, with their ranks."""

    _ranks: dict[RankWarning, set[int]] = field(default_factory=dict)
    _received: dict[RankWarning, float] = field(default_factory=dict)

    def add(self, warning: RankWarning, rank: int, now: float) -> None:
        """Add the warning of a rank, received at time `now`."""
        self._ranks.setdefault(warning, set()).add(rank)
        self._received.setdefault(warning, now)

    def take(self, before: float) -> list[tuple[RankWarning, list[int]]]:
        """Remove and return the warnings that were first received until a time, with their
        ranks."""
        due = [warning for warning, time in self._received.items() if time <= before]
        for warning in due:
            del self._received[warning]
        return [(warning, sorted(self._ranks.pop(warning))) for warning in due]


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a short text of sorted rank numbers.

    >>> describe_ranks([0, 1, 2, 5]), describe_ranks([3])
    ('ranks 0-2, 5', 'rank 3')
    """
    texts: list[str] = []
    for index, rank in enumerate(ranks):
        if index and rank == ranks[index - 1] + 1:
            texts[-1] = f"{texts[-1].partition('-')[0]}-{rank}"
        else:
            texts.append(str(rank))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


def write_line(text: str) -> None:
    """Write a line to standard error, unless it is closed."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class WarningMerger(logging.Handler):
    """Log handler of one rank that sends warnings to rank 0. A thread sends them, so that the rank
    does not wait for the store; rank 0 prints them, and adds those of other ranks to its log."""

    def __init__(self, store: WarningStore, *, rank: int, world: int) -> None:
        super().__init__(logging.WARNING)
        self._store, self._rank, self._world = store, rank, world
        self._queue: queue.Queue[RankWarning | None] = queue.Queue(MAX_QUEUED)
        self._groups = WarningGroups()
        self._num_received = 0
        self._missing_since: float | None = None
        """Time since which the next warning is announced, but not sent."""

        self._thread = threading.Thread(
            target=self._print_warnings if rank == 0 else self._send_warnings,
            name="rank-warnings",
            daemon=True,
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a message of this rank."""
        warning = RankWarning(record.name, record.levelno, self.format(record)[:MAX_TEXT])
        with suppress(queue.Full):
            self._queue.put_nowait(warning)

    def finish(self, *, waits: bool) -> None:
        """Send or print what is queued, and end the thread. `waits`: rank 0 first waits for the
        last warnings of other ranks, for FINISH_SECONDS at most."""
        try:
            self._queue.put(None, timeout=FINISH_SECONDS)
        except queue.Full:
            return
        self._thread.join(timeout=FINISH_SECONDS)
        if self._thread.is_alive():  # the store does not answer
            return
        try:
            if self._rank > 0:
                self._store.add(_NUM_LEFT, 1)
                return
            deadline = time.monotonic() + FINISH_SECONDS
            while waits and self._store.add(_NUM_LEFT, 0) < self._world - 1:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            self._receive(missing_seconds=0.0)
        except RuntimeError:  # the store has ended: what has been received is printed
            pass
        self._print(self._groups.take(before=time.monotonic()))

    # --- ranks above 0

    def _send_warnings(self) -> None:
        while (warning := self._queue.get()) is not None:
            try:
                number = self._store.add(_COUNT, 1)
                self._store.set(str(number), json.dumps([self._rank, *warning]))
            except RuntimeError:  # rank 0 has ended
                write_line(f"rank {self._rank}: {warning.text}")

    # --- rank 0

    def _print_warnings(self) -> None:
        is_open = True
        next_read = 0.0
        while True:
            try:
                warning = self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                pass
            else:
                if warning is None:
                    return
                self._groups.add(warning, 0, time.monotonic())
            now = time.monotonic()
            if is_open and now >= next_read:
                next_read = now + POLL_SECONDS
                is_open = self._try_to_receive()
            self._print(self._groups.take(before=now - GATHER_SECONDS))

    def _try_to_receive(self) -> bool:
        try:
            self._receive(missing_seconds=GATHER_SECONDS)
        except RuntimeError:
            return False
        return True

    def _receive(self, missing_seconds: float) -> None:
        """Read the warnings that other ranks have sent since the last call. One that is announced
        is omitted after `missing_seconds`: its rank has ended before it was sent.

        Raises:
            RuntimeError: the store does not answer.
        """
        num_sent = self._store.add(_COUNT, 0)
        while self._num_received < num_sent:
            key, now = str(self._num_received + 1), time.monotonic()
            if self._store.check([key]):
                rank, *fields = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._groups.add(RankWarning(*fields), rank, now)
            else:
                self._missing_since = self._missing_since or now
                if now - self._missing_since < missing_seconds:
                    return
            self._num_received += 1
            self._missing_since = None

    def _print(self, warnings: Sequence[tuple[RankWarning, list[int]]]) -> None:
        for warning, ranks in warnings:
            text = warning.text if ranks == [0] else f"{describe_ranks(ranks)}: {warning.text}"
            write_line(text)
            if 0 not in ranks:
                fields = {"name": warning.logger, "levelno": warning.level, "msg": text}
                level = {"levelname": logging.getLevelName(warning.level)}
                record = logging.makeLogRecord(fields | level)
                for handler in logging.getLogger(PACKAGE).handlers:
                    if handler is not self and record.levelno >= handler.level:
                        handler.handle(record)


@contextmanager
def merge_warnings(store: WarningStore, *, rank: int, world: int) -> Iterator[None]:
    """Let rank 0 print the warnings of all ranks inside the context. `store`: a connection on which
    no other thread waits for long, with a prefix of its own."""
    merger = WarningMerger(store, rank=rank, world=world)
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(merger)
    merger.start()
    waits = False
    try:
        yield
        waits = True
    finally:
        logger.removeHandler(merger)
        merger.finish(waits=waits)


def is_merging_warnings() -> bool:
    """Return whether a handler sends the warnings of this process to rank 0."""
    return any(isinstance(each, WarningMerger) for each in logging.getLogger(PACKAGE).handlers)

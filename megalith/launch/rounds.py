"""Rounds of a job with restarts in place: the messages between the launcher and a rank, and the
rank's side of them. Imports no torch.

A round is one rendezvous of all ranks and the training after it. The launcher assigns each process
its rank in a round. After a fault it aborts the round: a thread of each rank closes the rank's
connections to the others, so that its collectives fail; the rank leaves the round and waits for the
next one.
"""

import json
import os
import queue
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from megalith.launch.launcher import (
    FAULT,
    LAUNCHER,
    MAX_SUMMARY,
    RANK_VARIABLES,
    Failure,
    exit_now,
    write_failure,
)

CONTROL = "MEGALITH_CONTROL"
"""Variable with the file descriptor of a rank's socket to the launcher."""

SERVED_STORE = "MEGALITH_STORE"
"""Variable that is set if a process of the launcher serves the store at MASTER_PORT."""

MAX_MESSAGE = 65536
"""Maximum length of a message; texts of failures are shortened to fit."""

ABORT_SECONDS = 0.1
"""Time between two attempts to abort a round: a rank that has not joined it yet opens more
connections."""

MAX_TEXT = 8000
"""Characters of a failure's text in a message, whose encoding as JSON may be six times as long."""


@dataclass(frozen=True, slots=True)
class Round:
    """A rank's place in a round."""

    number: int
    rank: int
    world: int
    reason: str = ""
    """Why the previous round ended; empty in the first one."""

    job_started: float = 0.0
    """`time.monotonic()` when the launcher started the job."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The launcher aborts a round."""

    number: int


@dataclass(frozen=True, slots=True)
class End:
    """The launcher ends the job: no round follows."""


@dataclass(frozen=True, slots=True)
class ReadyForRank:
    """A process without a rank has imported everything."""


@dataclass(frozen=True, slots=True)
class RoundFailure:
    """A rank has left a round because of a failure."""

    number: int
    num_steps: int
    """Number of steps that the rank has finished in the round."""

    failure: dict[str, Any]  # Any: JSON, fields of `Failure`


@dataclass(frozen=True, slots=True)
class HangReport:
    """A rank waits in a collective for longer than the timeout."""

    number: int
    failure: dict[str, Any]  # Any: JSON, fields of `Failure`


Message = Round | Abort | End | ReadyForRank | RoundFailure | HangReport
_KINDS: Mapping[str, type[Message]] = {
    kind.__name__: kind for kind in (Round, Abort, End, ReadyForRank, RoundFailure, HangReport)
}


def encode_message(message: Message) -> bytes:
    """Return a message as JSON."""
    return json.dumps({"kind": type(message).__name__} | asdict(message)).encode()


def decode_message(data: bytes) -> Message:
    """Return the message of `encode_message`."""
    fields = json.loads(data)
    return _KINDS[fields.pop("kind")](**fields)


def shorten_failure(failure: Failure) -> dict[str, Any]:  # Any: JSON
    """Return the fields of a failure, with a text that fits into a message."""
    fields = asdict(failure)
    return fields | {"summary": failure.summary[:MAX_SUMMARY], "text": failure.text[-MAX_TEXT:]}


class OpenedSockets:
    """TCP connections that this process has opened since the object was created, until
    `close_recording`; those of process groups and stores, which have no call that interrupts a
    waiting thread."""

    def __init__(self) -> None:
        self._before = _list_sockets()
        self._opened: frozenset[tuple[int, int]] | None = None

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave out the connections that are opened inside the context."""
        before = _list_sockets()
        yield
        self._before |= _list_sockets() - before

    def close_recording(self) -> None:
        """Leave out the connections that are opened from now on."""
        self._opened = _list_sockets() - self._before

    def shut_down(self) -> None:
        """Shut down the connections that are still open, so that threads that wait for a peer get
        an error."""
        opened = self._opened
        for fd, inode in _list_sockets() - self._before if opened is None else opened:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                is_same = os.fstat(connection.fileno()).st_ino == inode
                is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_same and is_tcp and not listens:
                    connection.shutdown(socket.SHUT_RDWR)


def _list_sockets() -> frozenset[tuple[int, int]]:
    """Return descriptor and inode of every socket of this process."""
    sockets = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return frozenset(sockets)


class RestartClient:
    """A rank's side of the rounds; a thread receives the launcher's messages."""

    def __init__(self, control: socket.socket, environment: MutableMapping[str, str]) -> None:
        """`environment`: receives the variables of this process's rank in each round."""
        self._control, self._environment = control, environment
        self._rounds: queue.SimpleQueue[Round | End] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._aborted = -2
        self._abort: Callable[[], None] | None = None
        self._failure: Failure | None = None
        self.round = Round(-1, -1, 0)
        """The current round."""
        self.num_steps = 0
        """Number of steps that this rank has finished in the round."""
        threading.Thread(target=self._receive, name="restart-control", daemon=True).start()

    @staticmethod
    def from_environment(environment: MutableMapping[str, str]) -> "RestartClient | None":
        """Return the client of a rank that a launcher may restart in place; None otherwise."""
        if CONTROL not in environment:
            return None
        return RestartClient(socket.socket(fileno=int(environment[CONTROL])), environment)

    def _receive(self) -> None:
        while True:
            pause = ABORT_SECONDS if self.is_aborted else None
            if not select.select([self._control], [], [], pause)[0]:
                self._abort_round(self._aborted)  # connections that were opened since
                continue
            data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE, 2)
            match decode_message(data):
                case Round() as assigned:
                    if fds:
                        _replace_output(fds)
                    self._rounds.put(assigned)
                case End() as end:
                    self._rounds.put(end)
                case Abort(number):
                    self._abort_round(number)

    def _abort_round(self, number: int) -> None:
        with self._lock:
            self._aborted = max(self._aborted, number)
            if self._abort is not None and number == self.round.number:
                self._abort()

    def wait_for_round(self) -> Round:
        """Wait until the launcher assigns this process a rank, and return it.

        The process ends if no round follows.
        """
        self._send(ReadyForRank())
        return self._take_round()

    def _take_round(self) -> Round:
        assigned = self._rounds.get()
        if isinstance(assigned, End):
            self._end()
        assert isinstance(assigned, Round)
        with self._lock:
            self.round, self.num_steps, self._failure = assigned, 0, None
        values = (assigned.rank, assigned.world, assigned.rank, assigned.world)
        names = RANK_VARIABLES[: len(values)]
        self._environment.update(zip(names, map(str, values), strict=True))
        return assigned

    def _end(self) -> None:
        """End this process, which has left its round and waits for none."""
        if self._failure is not None:
            write_failure(self._failure, self._environment[LAUNCHER])
        exit_now(FAULT)

    @property
    def is_aborted(self) -> bool:
        """Whether the launcher has aborted the current round."""
        return self._aborted >= self.round.number

    def set_abort(self, abort: Callable[[], None] | None) -> None:
        """Set what the thread calls when the round is aborted; it makes collectives fail."""
        with self._lock:
            self._abort = abort
            if abort is not None and self.is_aborted:
                abort()

    def report_hang(self, failure: Failure, _after_seconds: float) -> None:
        """Report that the ranks wait for one of them; the launcher aborts the round."""
        self._send(HangReport(self.round.number, shorten_failure(failure)))

    def leave(self, failure: Failure) -> Round:
        """Leave the current round and wait for the next one."""
        self._failure = failure
        self._send(RoundFailure(self.round.number, self.num_steps, shorten_failure(failure)))
        return self._take_round()

    def _send(self, message: Message) -> None:
        self._control.send(encode_message(message))


def _replace_output(fds: list[int]) -> None:
    """Make the received descriptors standard output and error: rank 0 uses the terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, fd in zip((1, 2), fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def describe_round(current: Round) -> str:
    """Describe how a round began, for the log."""
    seconds = time.monotonic() - current.job_started
    return f"round {current.number}, {seconds:.0f} s after the start: {current.reason}"

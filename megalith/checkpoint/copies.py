"""Copies of local checkpoints between writer processes: each sends its rank's boxes to the writers
of the peers over its own sockets, while training continues. Imports no torch.

Both ends prove possession of the secret of the run before any data is read. A message is bytes of
a limited length, and nothing in it is executed.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path

from megalith import storage
from megalith.checkpoint.local_table import box_file, explain_full
from megalith.checkpoint.manifest import WrittenPart, dump_part, parse_part
from megalith.errors import CheckpointError

_MAX_HEADER_NBYTES = 4096
_MAX_TABLE_NBYTES = 2**28
_MAX_MESSAGE_NBYTES = 2**24
"""Longest messages that are received (heuristic: a table has about 200 bytes per box, and a chunk
of values 1 MiB)."""

_CONNECT_S = 30.0
"""Seconds for connecting and authentication (heuristic)."""

_EXPECT_S = 120.0
"""Seconds until this rank expects a copy that another rank sends (heuristic: ranks begin a save in
the same step, and copy their tensors into host memory before)."""

_TRANSFER_S = 600.0
"""Seconds for one message of an authenticated connection (heuristic: the default of
checkpoint.writer_timeout_seconds)."""

_WAIT_S = 0.1
"""Seconds between checks whether the rank exists (heuristic)."""

_STORED = b"stored"


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where the writer of a rank receives copies."""

    rank: int
    host: str
    port: int


@dataclass(slots=True)
class _ExpectedCopies:
    """Copies that a rank stores in one save."""

    save: str
    folder: Path
    sources: frozenset[int]
    parts: dict[int, WrittenPart] = field(default_factory=dict)
    problem: str = ""


class CopyServer:
    """Receives the boxes of other ranks and writes them into the folder of the save in progress,
    on threads of its own."""

    def __init__(self, host: str, secret: bytes, report_progress: Callable[[], None]) -> None:
        """`host`: address of this machine at which the peers reach it.

        Raises:
            OSError: no port can be opened there.
        """
        self._secret, self._report_progress = secret, report_progress
        self._socket = socket.create_server((host, 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self._changed = threading.Condition()
        self._expected: _ExpectedCopies | None = None
        threading.Thread(target=self._accept, daemon=True, name="receive-copies").start()

    def expect(self, save: str, folder: Path, sources: Iterable[int]) -> None:
        """Store the copies of a save in a folder from now on; those of other saves are rejected."""
        with self._changed:
            self._expected = _ExpectedCopies(save, folder, frozenset(sources))
            self._changed.notify_all()

    def wait(self, is_rank_alive: Callable[[], bool]) -> dict[int, WrittenPart]:
        """Return the tables of all copies, once they are stored.

        Raises:
            CheckpointError: a copy could not be stored, or the rank has ended.
        """
        expected = self._expected
        assert expected is not None, "`expect` comes first"
        with self._changed:
            while not expected.problem and expected.sources - {*expected.parts}:
                self._changed.wait(_WAIT_S)
                if not is_rank_alive():
                    raise CheckpointError("The rank has ended before all copies were received.")
            if expected.problem:
                raise CheckpointError(expected.problem)
            return dict(expected.parts)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:  # closed by the peer before, or no free file descriptor at this time
                time.sleep(_WAIT_S)
                continue
            accepted.settimeout(_CONNECT_S)
            threading.Thread(target=self._serve, args=(accepted,), daemon=True).start()

    def _serve(self, accepted: socket.socket) -> None:
        """Receive one copy, and answer whether it is stored."""
        # a peer that ends or is not one of this run: the sender or its rank reports it
        with (
            suppress(OSError, EOFError, AuthenticationError),
            _authenticate(accepted, self._secret, is_server=True) as connection,
        ):
            header = json.loads(connection.recv_bytes(_MAX_HEADER_NBYTES))
            expected = self._find_expected(str(header["save"]), int(header["rank"]))
            if expected is None:
                connection.send_bytes(b"this rank does not expect a copy of this save")
                return
            try:
                part = self._receive(connection, expected, int(header["rank"]))
                answer = _STORED
                with self._changed:
                    expected.parts[int(header["rank"])] = part
                    self._changed.notify_all()
            except (OSError, EOFError, CheckpointError, ValueError) as error:
                answer = f"{error}".encode()[:1000] or b"unknown error"
                with self._changed:
                    expected.problem = expected.problem or (
                        f"The copy of rank {header['rank']} was not stored: {error}"
                    )
                    self._changed.notify_all()
            connection.send_bytes(answer)

    def _find_expected(self, save: str, rank: int) -> _ExpectedCopies | None:
        """Return the save in progress, waiting for it if the sender is faster than this rank; None
        if it is another one."""
        deadline = time.monotonic() + _EXPECT_S
        with self._changed:
            while self._expected is None or self._expected.save != save:
                self._report_progress()
                if time.monotonic() > deadline:
                    return None
                self._changed.wait(_WAIT_S)
            return self._expected if rank in self._expected.sources else None

    def _receive(self, connection: Connection, expected: _ExpectedCopies, rank: int) -> WrittenPart:
        """Write the file of a copy; synced to disk on return."""
        table = connection.recv_bytes(_MAX_TABLE_NBYTES)
        part = parse_part(table, expected.folder / f"table of rank {rank}")
        if {*part.files} - {box_file(rank)}:
            raise CheckpointError(f"its files are {sorted(part.files)}, expected {box_file(rank)}.")
        remaining = sum(file.nbytes for file in part.files.values())
        if not remaining:
            return part
        with (
            explain_full(expected.folder.parent.parent),
            storage.open_new(expected.folder / box_file(rank)) as file,
        ):
            while remaining:
                data = connection.recv_bytes(min(remaining, _MAX_MESSAGE_NBYTES))
                file.write(data)
                remaining -= len(data)
                self._report_progress()
            storage.sync_file(file)
        return part


def send_copy(
    peer: PeerAddress,
    secret: bytes,
    save: str,
    rank: int,
    part: WrittenPart,
    chunks: Iterable[bytes | memoryview],
) -> None:
    """Send the boxes of this rank to the writer of a peer; they are stored there on return.

    `chunks`: the bytes of the rank's file.

    Raises:
        CheckpointError: the peer does not answer, or cannot store them.
    """
    try:
        connected = socket.create_connection((peer.host, peer.port), _CONNECT_S)
        with _authenticate(connected, secret, is_server=False) as connection:
            connection.send_bytes(json.dumps({"save": save, "rank": rank}).encode())
            connection.send_bytes(dump_part(part))
            for chunk in chunks:
                if len(chunk):
                    connection.send_bytes(chunk)
            answer = connection.recv_bytes(_MAX_HEADER_NBYTES)
    except (OSError, EOFError, AuthenticationError) as error:
        raise CheckpointError(
            f"The copy for rank {peer.rank} was not sent to {peer.host}:{peer.port}: "
            f"{error or 'the connection was closed'}."
        ) from error
    if answer != _STORED:
        raise CheckpointError(f"rank {peer.rank}: {answer.decode(errors='replace')}")


def _authenticate(connected: socket.socket, secret: bytes, *, is_server: bool) -> Connection:
    """Return the connection, after both ends have proved possession of the secret.

    Raises:
        AuthenticationError, OSError, EOFError: authentication failed.
    """
    with closing(connected):
        _set_timeout(connected, _CONNECT_S)
        connection = Connection(os.dup(connected.fileno()))
        try:
            steps: Sequence[Callable[[Connection, bytes], None]] = (
                (deliver_challenge, answer_challenge)
                if is_server
                else (answer_challenge, deliver_challenge)
            )
            for step in steps:
                step(connection, secret)
            _set_timeout(connected, _TRANSFER_S)
        except BaseException:
            connection.close()
            raise
    return connection


def _set_timeout(connected: socket.socket, seconds: float) -> None:
    """Limit each read and write of the socket's file descriptor, which `Connection` uses without
    Python's timeout."""
    connected.setblocking(True)
    limit = int(seconds).to_bytes(8, "little") + bytes(8)  # struct timeval of 64-bit systems
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)


def find_own_address(environment: Mapping[str, str]) -> str:
    """Return the address at which other machines of the job reach this one: that of the route to
    MASTER_ADDR."""
    master = environment.get("MASTER_ADDR", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((master, 9))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"

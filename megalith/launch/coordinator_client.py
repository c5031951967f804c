"""Client of the coordinator of replica groups; rank 0 of each group has one.

A thread keeps the connection, sends heartbeats, and sends the outstanding request again after a
reconnection, so that a restart of the coordinator only makes the group wait. Waiting ends when the
coordinator has answered: a group never continues alone.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from megalith.errors import ConfigError
from megalith.launch.coordinator_protocol import (
    MAX_MESSAGE_NBYTES,
    MAX_REPLY_NBYTES,
    PROTOCOL,
    CoordinatorMessageError,
    Message,
    decode_message,
    decode_reply,
    encode_message,
    parse_address,
    read_number,
    read_text,
)
from megalith.plan.quorum import Answer, Decision, Epoch, QuorumLimits, Rejection

HEARTBEATS = 10
"""Heartbeats per `timeout_seconds`."""

CONNECT_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 2.0
POLL_SECONDS = 0.2
LEAVE_SECONDS = 5.0
"""Time in which the coordinator has to confirm that a group leaves; without a confirmation, the
group is lost after its timeout. Heuristic, like the others."""

LOG_SECONDS = 30.0

_log = logging.getLogger(__name__)


class CoordinatorInterrupted(Exception):
    """`should_stop` returned True while a request waited for the coordinator."""


class CoordinatorClient:
    """Connection of one group with the coordinator; `close` it, or use it in a `with` statement."""

    def __init__(
        self,
        address: str,
        *,
        limits: QuorumLimits,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare a client; `join` connects it.

        Args:
            address: HOST:PORT of the coordinator.
            limits: limits of the quorum, equal in all groups.
            should_stop: called while a request waits; True interrupts it.

        Raises:
            ConfigError: the address is not valid.
        """
        try:
            self._address = parse_address(address)
        except ValueError as error:
            raise ConfigError(f"replica_group.coordinator: {error}.") from None
        self._limits = limits
        self._should_stop = should_stop
        self._changed = threading.Condition()
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._group = ""
        self._coordinator = ""
        """Id of the coordinator's state, so that another one is not used by mistake."""
        self._incarnation = 0
        self._committed_step = -1
        self._request = 0
        self._outstanding = b""
        self._answers: list[Answer] = []
        """Answer to the newest request, once it has arrived."""
        self._error = ""
        self._closed = threading.Event()

    def join(
        self,
        *,
        group: str,
        addresses: Sequence[str],
        committed_step: int,
        settings: Mapping[str, str],
        state_addresses: Sequence[str] = (),
    ) -> Epoch:
        """Wait for an epoch of which this group is a participant, or which names the group from
        which it must load the newest state before it joins again.

        Args:
            group: id of this group.
            addresses: address of each rank, for the gradient all-reduce.
            committed_step: steps that the state of this group contains.
            settings: settings that have to be equal in all groups.
            state_addresses: address of each rank, for the transfer of its state.

        Raises:
            ConfigError: the coordinator rejects this group.
            CoordinatorInterrupted: `should_stop` returned True.
        """
        self._group = group
        if committed_step < self._committed_step:
            self._begin_incarnation()  # the state registered at the coordinator no longer exists
        self._committed_step = committed_step
        self._start()
        deadline: float | None = None
        while True:
            answer = self._send_request(
                "join",
                addresses=list(addresses),
                state_addresses=list(state_addresses),
                committed_step=committed_step,
                settings=dict(settings),
                limits=asdict(self._limits),
            )
            if isinstance(answer, Epoch):
                return answer
            assert isinstance(answer, Rejection), f"{answer} is not an answer to a join request"
            if deadline is None:
                deadline = time.monotonic() + 2 * self._limits.timeout_seconds
            if not answer.retry or time.monotonic() > deadline:
                raise ConfigError(answer.reason)
            time.sleep(self._limits.timeout_seconds / HEARTBEATS)

    def vote(
        self, *, epoch: int, step: int, ok: bool, last: bool = False, has_state: bool = True
    ) -> Decision:
        """Vote about a step and return the decision.

        A group that votes `ok` keeps what it needs to apply the update until this returns.

        Args:
            epoch: number of the epoch.
            step: number of the step: the committed steps if it is committed too.
            ok: whether this group has the reduced gradients.
            last: this group leaves after the step; it still calls `leave`.
            has_state: False while this group takes part without the state of the step before, which
                it still recovers.

        Raises:
            ConfigError: the coordinator rejects the vote.
            CoordinatorInterrupted: `should_stop` returned True; the step is in doubt, and the group
                has to recover if it joins again.
        """
        try:
            answer = self._send_request(
                "vote", epoch=epoch, step=step, ok=ok, last=last, has_state=has_state
            )
        except CoordinatorInterrupted:
            self._begin_incarnation()
            raise
        if isinstance(answer, Rejection):
            raise ConfigError(answer.reason)
        assert isinstance(answer, Decision), f"{answer} is not an answer to a vote"
        if answer.commit:
            self._committed_step = step
        return answer

    def leave(self) -> None:
        """Tell the coordinator that this group ends, and close the connection."""
        if self._thread is not None and not self._closed.is_set():
            with suppress(ConfigError, CoordinatorInterrupted):
                self._send_request("leave", seconds=LEAVE_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connection without a message; the group counts as lost."""
        with self._changed:
            self._closed.set()
            self._disconnect()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "CoordinatorClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------

    def _send_request(
        self, kind: str, *, seconds: float = float("inf"), **fields: object
    ) -> Answer | None:
        """Send a request, and again after each reconnection, until it is answered; return None if
        that takes longer than `seconds`."""
        started = time.monotonic()
        next_log = started + LOG_SECONDS
        with self._changed:
            self._request += 1
            self._answers = []
            self._outstanding = encode_message(kind, request=self._request, **fields)
            if len(self._outstanding) > MAX_MESSAGE_NBYTES:
                raise ConfigError(
                    f"the {kind} request of replica_group.id={self._group} has "
                    f"{len(self._outstanding)} bytes; at most {MAX_MESSAGE_NBYTES} are possible."
                )
            self._transmit(self._outstanding)
            while not self._answers:
                if self._error:
                    raise ConfigError(self._error)
                if self._closed.is_set():
                    raise CoordinatorInterrupted("the connection with the coordinator was closed")
                if self._should_stop():
                    raise CoordinatorInterrupted(f"the {kind} request was interrupted")
                now = time.monotonic()
                if now - started > seconds:
                    return None
                if now > next_log:
                    next_log = now + LOG_SECONDS
                    self._log_wait(kind, now - started)
                self._changed.wait(POLL_SECONDS)
            self._outstanding = b""
            return self._answers[0]

    def _log_wait(self, kind: str, seconds: float) -> None:
        host, port = self._address
        state = "no connection with" if self._socket is None else "waiting for an answer of"
        _log.warning(
            "%s the coordinator at %s:%d for %.0f s (%s)", state, host, port, seconds, kind
        )

    def _begin_incarnation(self) -> None:
        """Register as a new process when the connection is opened next."""
        with self._changed:
            self._incarnation, self._outstanding = 0, b""
            self._committed_step = -1
            self._disconnect()

    # -- connection ----------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Connect, and read messages, until the client is closed."""
        backoff = POLL_SECONDS / 4
        while not self._closed.is_set() and not self._error:
            try:
                with socket.create_connection(self._address, timeout=CONNECT_SECONDS) as connection:
                    reader = self._handshake(connection)
                    backoff = POLL_SECONDS / 4
                    self._read_replies(connection, reader)
            except (OSError, CoordinatorMessageError) as error:
                _log.debug("connection with the coordinator: %s", error)
            finally:
                with self._changed:
                    self._socket = None
            self._closed.wait(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _handshake(self, connection: socket.socket) -> "LineReader":
        """Exchange hello and welcome, and send the outstanding request again.

        Raises:
            ConnectionError: the client has registered as a new process in the meantime.
        """
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incarnation = self._incarnation
        hello = encode_message(
            "hello",
            protocol=PROTOCOL,
            group=self._group,
            incarnation=incarnation,
            coordinator=self._coordinator,
        )
        connection.sendall(hello)
        reader = LineReader(connection)
        message = reader.read_message(time.monotonic() + CONNECT_SECONDS)
        if message is None:
            raise TimeoutError("no welcome message from the coordinator")
        if message["kind"] == "error":
            self._fail(read_text(message, "reason"))
            return reader
        with self._changed:
            if self._incarnation != incarnation:
                raise ConnectionError("a new process is registered over another connection")
            self._incarnation = read_number(message, "incarnation", least=1)
            self._coordinator = read_text(message, "coordinator")
            self._socket = connection
            if self._outstanding:
                self._transmit(self._outstanding)
        return reader

    def _read_replies(self, connection: socket.socket, reader: "LineReader") -> None:
        """Read messages and send heartbeats until the connection ends."""
        timeout = self._limits.timeout_seconds
        heard = time.monotonic()
        while self._socket is connection and not self._error:
            message = reader.read_message(time.monotonic() + timeout / HEARTBEATS)
            if message is None:
                if time.monotonic() - heard > timeout:
                    raise TimeoutError("the coordinator does not answer heartbeats")
                self._transmit(encode_message("heartbeat"))
                continue
            heard = time.monotonic()
            if message["kind"] == "error":
                self._fail(read_text(message, "reason"))
            elif message["kind"] == "reply":
                request, answer = decode_reply(message)
                with self._changed:
                    if request == self._request and self._outstanding:
                        self._answers = [answer]
                        self._changed.notify_all()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._error = reason
            self._changed.notify_all()

    def _transmit(self, line: bytes) -> None:
        """Send a line if there is a connection; its thread notices an error and connects again."""
        with self._changed:
            if self._socket is not None:
                try:
                    self._socket.sendall(line)
                except OSError:
                    self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None


class LineReader:
    """Reads messages from a connection, each by a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()  # unlike select(), for any number of open files
        self._poll.register(connection, select.POLLIN)
        self._data = bytearray()

    def read_message(self, deadline: float) -> Message | None:
        """Return the next message; None if it is not complete at the deadline.

        Raises:
            OSError: the connection has ended.
            CoordinatorMessageError: the message is not valid.
        """
        while (end := self._data.find(b"\n")) < 0:
            if len(self._data) > MAX_REPLY_NBYTES:
                raise CoordinatorMessageError(f"a message has more than {MAX_REPLY_NBYTES} bytes")
            seconds = max(deadline - time.monotonic(), 0.0)
            if not self._poll.poll(seconds * 1000):
                return None
            data = self._connection.recv(65_536)
            if not data:
                raise ConnectionError("the connection was closed")
            self._data += data
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        return decode_message(line, max_nbytes=MAX_REPLY_NBYTES)

"""Coordinator of replica groups (fault tolerance): a server that applies `plan.quorum` to the
messages of the groups, and stores its state before it answers.

One thread handles all connections. The state is one small file, replaced atomically whenever an
epoch or a commit has to survive a restart. A status page is served on the loopback interface.
"""

import asyncio
import fcntl
import html
import json
import logging
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megalith import storage
from megalith.errors import ConfigError, PlanError
from megalith.launch.coordinator_protocol import (
    MAX_MESSAGE_NBYTES,
    PROTOCOL,
    CoordinatorMessageError,
    Message,
    decode_message,
    encode_message,
    encode_reply,
    read_group,
    read_join,
    read_number,
    read_text,
    read_vote,
)
from megalith.plan.quorum import QuorumReply, QuorumState, Sender

STATE_FILE = "state.jsonl"
"""First line: the record; other lines: commits after it. A power cut may leave an incomplete last
line, whose commit was sent to no group."""

LOCK_FILE = "lock"
STATE_VERSION = 1
MAX_COMMIT_LINES = 10_000
"""Commits after which the file is written anew. Heuristic: 500 KB."""


MAX_CONNECTIONS = 2048
HELLO_SECONDS = 10.0
MAX_UNSENT_NBYTES = 16 << 20
"""Bounds for untrusted input: a connection that does not read its replies is closed. Heuristic."""

UPDATES_PER_TIMEOUT = 50
"""Checks of timeouts per timeout."""

MAX_UPDATE_SECONDS = 0.5

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "[::1]"))
STATUS_SECONDS = 5.0
MAX_STATUS_NBYTES = 8192

_log = logging.getLogger(__name__)

Status = dict[str, Any]  # Any: JSON


class StateFolder:
    """Folder of one coordinator: the lock, and the state that survives a restart."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder, creating it if necessary.

        Raises:
            ConfigError: another coordinator uses it, or it cannot be written to.
        """
        self.path = folder
        self._commits: IO[bytes] | None = None
        self._num_commits = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = open(folder / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"--state={folder} cannot be used ({error}). Choose a folder that can be written."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read(200).strip() or "another process"
            self._lock.close()
            raise ConfigError(
                f"--state={folder} is in use by the coordinator in {holder}. Two coordinators "
                "would commit different steps: stop that one, or choose another folder for another "
                "run."
            ) from None
        self._lock.truncate(0)
        self._lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        self._lock.flush()

    def load(self) -> tuple[str, QuorumState]:
        """Return the id of the state and the quorum; new ones if there are none.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        path = self.path / STATE_FILE
        advice = "Restore it, or delete it if all groups have ended: they then load checkpoints."
        try:
            lines = storage.read_bytes(path, max_nbytes=64 << 20).split(b"\n")
            record = storage.parse_json(lines[0])
            commits = [storage.parse_json(line)["commit"] for line in lines[1:-1]]
        except FileNotFoundError:
            return secrets.token_hex(8), QuorumState()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). {advice}") from None
        if not isinstance(record, dict) or record.get("version") != STATE_VERSION:
            raise ConfigError(f"{path} is not the state of this version of megalith. {advice}")
        try:
            quorum = QuorumState.from_record(record["quorum"], time.monotonic())
            for epoch, step, *without_state in commits:
                quorum.restore_commit(epoch, step, without_state)
            return str(record["id"]), quorum
        except (KeyError, TypeError, ValueError, PlanError) as error:
            raise ConfigError(f"{path}: {error} {advice}") from None

    def store(self, identity: str, quorum: QuorumState) -> None:
        """Replace the state on disk atomically."""
        record = {"version": STATE_VERSION, "id": identity, "quorum": quorum.to_record()}
        if self._commits is not None:
            self._commits.close()
            self._commits = None
        storage.replace_file(self.path / STATE_FILE, json.dumps(record).encode() + b"\n")
        self._commits = open(self.path / STATE_FILE, "ab", buffering=0)  # noqa: SIM115
        self._num_commits = 0

    def append_commit(self, identity: str, quorum: QuorumState) -> None:
        """Store the newest commit, in one line that is on disk when this returns."""
        if self._commits is None or self._num_commits >= MAX_COMMIT_LINES or quorum.epoch is None:
            self.store(identity, quorum)
            return
        without_state = quorum.list_without_state()
        commit = {"commit": [quorum.epoch.number, quorum.committed_step, *without_state]}
        self._commits.write(json.dumps(commit).encode() + b"\n")
        os.fdatasync(self._commits.fileno())
        self._num_commits += 1

    def close(self) -> None:
        """Release the lock."""
        if self._commits is not None:
            self._commits.close()
        self._lock.close()


@dataclass(eq=False)
class GroupConnection:
    """Connection of one process of a group."""

    group: str
    incarnation: int
    writer: asyncio.StreamWriter

    def send(self, line: bytes) -> None:
        """Send a line, or close a connection whose replies are not read."""
        if self.writer.transport.get_write_buffer_size() > MAX_UNSENT_NBYTES:
            self.writer.transport.abort()
        elif not self.writer.is_closing():
            self.writer.write(line)


@dataclass(eq=False, kw_only=True)
class CoordinatorServer:
    """Server of the coordinator; `start` it in an event loop, then wait for `run`."""

    folder: StateFolder
    host: str
    port: int
    """0: any free port."""

    status_port: int
    """Port of the status page on the loopback interface; 0: any free port."""

    lost_groups: tuple[str, ...] = ()
    """Groups whose state the user declares lost."""

    address: str = ""
    status_address: str = ""
    _identity: str = ""
    _quorum: QuorumState = field(default_factory=QuorumState)
    _stored: tuple[int, int | None] = (-1, None)
    """Version and committed step that are on disk."""
    _connections: dict[str, GroupConnection] = field(default_factory=dict)
    _num_connections: int = 0
    _started: float = field(default_factory=time.monotonic)
    _failure: "asyncio.Future[None] | None" = None
    _servers: list[asyncio.Server] = field(default_factory=list)

    async def start(self) -> None:
        """Load the state and open the ports.

        Raises:
            ConfigError: the state is damaged, or a port is in use.
        """
        self._identity, self._quorum = self.folder.load()
        self._failure = asyncio.get_running_loop().create_future()
        self._quorum.remove_lost_groups(self.lost_groups, time.monotonic())
        self._store()
        server = await _listen(self._serve_group, self.host, self.port, "--port")
        self._servers.append(server)
        self.address = _address_of(server)
        status = await _listen(self._serve_status, "127.0.0.1", self.status_port, "--status-port")
        self._servers.append(status)
        self.status_address = _address_of(status)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            ConfigError: the state cannot be stored.
        """
        assert self._failure is not None, "the server has been started"
        ended: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
        try:
            while not ended.done() and not self._failure.done():
                pause = self._quorum.limits.timeout_seconds / UPDATES_PER_TIMEOUT
                await asyncio.wait(
                    [ended, self._failure],
                    timeout=min(pause, MAX_UPDATE_SECONDS),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                self._send(self._quorum.update(time.monotonic()))
            if self._failure.done():
                self._failure.result()
        finally:
            ended.cancel()
            await self.close()

    async def close(self) -> None:
        """Close all connections and ports."""
        for server in self._servers:
            server.close()
        for connection in self._connections.values():
            connection.writer.transport.abort()
        self._servers.clear()

    def describe(self) -> Status:
        """Return the status as a JSON document."""
        now = time.monotonic()
        quorum = self._quorum
        epoch = quorum.epoch
        return {
            "address": self.address,
            "id": self._identity,
            "uptime_seconds": round(now - self._started, 3),
            "epoch": None if epoch is None else epoch.number,
            "is_open": quorum.is_open,
            "participants": list(epoch.participants)
            if epoch is not None and quorum.is_open
            else [],
            "committed_step": quorum.committed_step,
            "committed_by": quorum.list_newest(),
            "num_discarded": quorum.num_discarded,
            "reason": quorum.reason,
            "groups": [
                {
                    "group": group,
                    "state": quorum.describe_member(group, now),
                    "committed_step": member.committed_step,
                    "last_seen_seconds": round(now - member.last_seen, 3),
                    "num_ranks": len(member.addresses),
                }
                for group, member in sorted(quorum.members.items())
            ],
        }

    # -- connections of groups -----------------------------------------------------------------

    async def _serve_group(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection; invalid messages end it with the reason."""
        connection: GroupConnection | None = None
        self._num_connections += 1
        try:
            if self._num_connections > MAX_CONNECTIONS:
                raise CoordinatorMessageError(f"there are {MAX_CONNECTIONS} connections already")
            line = await asyncio.wait_for(_read_line(reader), HELLO_SECONDS)
            connection = self._register(decode_message(line), writer)
            while self._failure is not None and not self._failure.done():
                idle_seconds = max(2 * self._quorum.limits.timeout_seconds, HELLO_SECONDS)
                line = await asyncio.wait_for(_read_line(reader), idle_seconds)
                self._handle(connection, decode_message(line))
        except CoordinatorMessageError as error:
            if not writer.is_closing():
                writer.write(encode_message("error", reason=str(error)))
        except (OSError, EOFError, TimeoutError, ValueError):
            pass  # the end of the connection, or a line without an end
        finally:
            self._num_connections -= 1
            if connection is not None and self._connections.get(connection.group) is connection:
                del self._connections[connection.group]
                now = time.monotonic()
                self._quorum.record_disconnect(connection.group, connection.incarnation, now)
            with suppress(OSError):
                writer.close()

    def _register(self, message: Message, writer: asyncio.StreamWriter) -> GroupConnection:
        """Register a process, or recognize one that connects again.

        Raises:
            CoordinatorMessageError: the message is not valid, or was meant for another coordinator.
        """
        if message["kind"] != "hello":
            raise CoordinatorMessageError("the first message is not hello")
        if (protocol := read_number(message, "protocol")) != PROTOCOL:
            raise CoordinatorMessageError(
                f"the group uses version {protocol} of the messages, the coordinator {PROTOCOL}. "
                "Use the same version of megalith for both"
            )
        group = read_group(message)
        incarnation = read_number(message, "incarnation")
        identity = read_text(message, "coordinator")
        if identity and identity != self._identity:
            raise CoordinatorMessageError(
                f"the coordinator at {self.address} has state that differs from the one that group "
                f"{group} joined (--state={self.folder.path}). Start it again with the folder of "
                "the first one, or restart all groups from a checkpoint"
            )
        if incarnation >= self._quorum.next_incarnation:
            raise CoordinatorMessageError(
                f"incarnation={incarnation} of group {group} is not known"
            )
        if incarnation == 0:
            incarnation = self._quorum.register()
            self._store()
            if self._failure is not None and self._failure.done():
                raise CoordinatorMessageError("the coordinator cannot store its state and stops")
        connection = GroupConnection(group, incarnation, writer)
        self._quorum.record_heartbeat(group, incarnation, time.monotonic())
        connection.send(
            encode_message("welcome", incarnation=incarnation, coordinator=self._identity)
        )
        previous = self._connections.get(group)
        if previous is None or previous.incarnation == incarnation:
            self._connect(connection)
        return connection

    def _connect(self, connection: GroupConnection) -> None:
        """Use a connection for the replies to its group."""
        previous = self._connections.get(connection.group)
        self._connections[connection.group] = connection
        if previous is not None and previous is not connection:
            previous.writer.transport.abort()

    def _handle(self, connection: GroupConnection, message: Message) -> None:
        """Apply one message of a group to the quorum.

        Raises:
            CoordinatorMessageError: the message is not valid.
        """
        now = time.monotonic()
        kind = message["kind"]
        if kind == "heartbeat":
            self._quorum.record_heartbeat(connection.group, connection.incarnation, now)
            connection.send(encode_message("alive"))
            return
        sender = Sender(
            group=connection.group,
            incarnation=connection.incarnation,
            request=read_number(message, "request", least=1),
        )
        if kind == "join":
            replies = self._quorum.join(sender, read_join(message), now)
            member = self._quorum.members.get(sender.group)
            if member is not None and member.incarnation == sender.incarnation:
                self._connect(connection)
        elif kind == "vote":
            replies = self._quorum.vote(sender, read_vote(message), now)
        elif kind == "leave":
            replies = self._quorum.leave(sender, now)
        else:
            raise CoordinatorMessageError(f"kind={kind!r:.100} is not a message of a group")
        self._send(replies, connection)

    def _send(self, replies: list[QuorumReply], source: GroupConnection | None = None) -> None:
        """Store the state if it has changed, then send replies; `source`: the connection of the
        message, which may not be that of its group yet."""
        self._store()
        if self._failure is None or self._failure.done():
            return
        for reply in replies:
            connection = self._connections.get(reply.to.group)
            if source is not None and source.group == reply.to.group:
                connection = source
            if connection is not None and connection.incarnation == reply.to.incarnation:
                connection.send(encode_reply(reply.to.request, reply.answer))

    def _store(self) -> None:
        """Store the state if it has changed; an error ends the server without any reply, so that
        no group receives a decision that a restart would lose."""
        assert self._failure is not None, "the server has been started"
        state = (self._quorum.version, self._quorum.committed_step)
        if state == self._stored or self._failure.done():
            return
        try:
            if state[0] != self._stored[0]:
                self.folder.store(self._identity, self._quorum)
            else:
                self.folder.append_commit(self._identity, self._quorum)
        except OSError as error:
            self._failure.set_exception(
                ConfigError(
                    f"--state={self.folder.path} cannot be written to ({error}), so the "
                    "coordinator stops; the groups wait. Free space there and start it again."
                )
            )
            return
        self._stored = state

    # -- status page ---------------------------------------------------------------------------

    async def _serve_status(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one HTTP request with the status, as a page or as JSON."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), STATUS_SECONDS)
            status, kind, body = self._answer_status(head)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\n"
                f"Content-Length: {len(body)}\r\nX-Content-Type-Options: nosniff\r\n"
                "Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode()
            )
            writer.write(body)
            await asyncio.wait_for(writer.drain(), STATUS_SECONDS)
        except (OSError, EOFError, TimeoutError, ValueError, asyncio.LimitOverrunError):
            pass  # not an HTTP request, or the connection has ended
        finally:
            with suppress(OSError):
                writer.close()

    def _answer_status(self, head: bytes) -> tuple[str, str, bytes]:
        """Return status line, content type and body for the head of a request."""
        lines = head.decode("latin-1").split("\r\n")
        headers = [line.lower() for line in lines[1:]]
        host = next((line[5:].strip() for line in headers if line.startswith("host:")), "")
        if host.rpartition(":")[0] not in LOOPBACK_NAMES and host not in LOOPBACK_NAMES:
            return "403 Forbidden", "text/plain", b"this page is for this machine only\n"
        method, _, rest = lines[0].partition(" ")
        path = rest.partition(" ")[0]
        if method != "GET":
            return "405 Method Not Allowed", "text/plain", b"use GET\n"
        if path == "/status.json":
            return "200 OK", "application/json", json.dumps(self.describe()).encode()
        if path == "/":
            return "200 OK", "text/html", format_page(self.describe()).encode()
        return "404 Not Found", "text/plain", b"use / or /status.json\n"


async def _listen(serve: Any, host: str, port: int, option: str) -> asyncio.Server:  # Any: callback
    """Open a port.

    Raises:
        ConfigError: it is in use or not allowed.
    """
    try:
        return await asyncio.start_server(serve, host, port, limit=MAX_MESSAGE_NBYTES)
    except OSError as error:
        raise ConfigError(
            f"{option}={port} on {host} cannot be opened ({error.strerror or error}). If a "
            f"coordinator runs there already, use it or stop it; otherwise choose another {option}."
        ) from None


def _address_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line.

    Raises:
        EOFError: the connection has ended.
        CoordinatorMessageError: the line is too long.
    """
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        raise CoordinatorMessageError(
            f"a message has more than {MAX_MESSAGE_NBYTES} bytes"
        ) from None


def format_status(status: Status) -> str:
    """Return the status as lines of text."""
    epoch, step = status["epoch"], status["committed_step"]
    lines = [
        f"coordinator {status['address']}, up {status['uptime_seconds']:.0f} s",
        f"epoch {epoch or 'none'} {'open' if status['is_open'] else 'closed'}, "
        f"committed step {'none' if step is None else step}, {status['num_discarded']} discarded",
    ]
    if status["reason"]:
        lines.append(status["reason"])
    lines += [
        f"  {row['group']:<20} {row['state']:<14} step {row['committed_step']:<10} "
        f"{row['num_ranks']} ranks, heartbeat {row['last_seen_seconds']:.1f} s ago"
        for row in status["groups"]
    ]
    return "\n".join(lines)


def format_page(status: Status) -> str:
    """Return the status as a page that reloads itself."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Megalith coordinator'
        '</title><meta http-equiv="refresh" content="2"></head><body><h1>Replica groups</h1><pre>'
        f"{html.escape(format_status(status))}</pre></body></html>"
    )

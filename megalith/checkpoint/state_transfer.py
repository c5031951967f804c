"""Transfer of training state to a replica group that joins (fault tolerance): the boxes of a
snapshot, over sockets, while the source trains.

Every rank of the source copies the boxes that it would save into a staging region at a step
boundary, and serves them from threads. Every rank of the joining group, in whatever layout, reads
the tables of all source ranks, requests the boxes that overlap its own tensors, one after the
other, and checks the SHA-256 of each before it is copied. A damaged box is requested again; after
a lost connection the transfer continues with the boxes that are missing.

    group -> server   {"kind": "open", "run": ..., "name": "state", "step": 120}
    server -> group   {"kind": "wait"} every second until that snapshot exists, then
                      {"kind": "snapshot", "id": ..., "step": 120, "state": {...}, "tensors": {...}}
    group -> server   {"kind": "box", "key": "model.embed.weight", "index": 3}
    server -> group   {"kind": "box", "nbytes": ..., "sha256": ...}, then the bytes
"""

import hmac
import json
import logging
import mmap
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import (
    DTYPES,
    CheckpointEntry,
    TensorPiece,
    decode_for_loading,
    describe_tiling_problem,
    inner_view,
    lengths,
    numel,
    pieces,
    sha256,
    show_box,
)
from megalith.checkpoint.staging import StagingPlan, StagingRegion, entries_identity, plan_staging
from megalith.checkpoint.writer import PlannedBox
from megalith.plan.shards import Box, intersect

MAX_LINE_NBYTES = 256 << 20
"""Limit of a table: a million boxes fit (computed)."""

MAX_REQUEST_NBYTES = 1 << 16
MAX_CONNECTIONS = 1024
"""Bounds for untrusted input. Heuristic."""

MAX_ATTEMPTS = 3
"""How often a box is requested before its source counts as damaged. Heuristic."""

WAIT_SECONDS = 1.0
RECONNECT_SECONDS = 0.2

_log = logging.getLogger(__name__)

Message = dict[str, Any]  # Any: JSON


class StateTransferError(Exception):
    """The state of another replica group was not received; the tensors hold undefined values."""


class SnapshotExpiredError(StateTransferError):
    """The snapshot was replaced or withdrawn: the transfer has to begin again with a newer one."""


@dataclass(frozen=True, slots=True)
class OfferedBox:
    """A box that a source rank offers."""

    key: str
    index: int
    """Position among the boxes of its tensor on that rank."""

    box: Box
    nbytes: int


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """What a source rank offers."""

    id: str
    step: int
    state: Mapping[str, Any]  # JSON
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of every tensor."""

    boxes: tuple[OfferedBox, ...]


@dataclass(frozen=True, slots=True)
class ReceivedState:
    """Result of a transfer."""

    step: int
    state: Mapping[str, Any]  # JSON
    """State besides tensors, as offered by rank 0 of the source."""

    nbytes: int
    """Bytes of all boxes that were received, with repetitions."""

    num_boxes: int
    num_repeated: int
    """Boxes that were requested again because their bytes were damaged."""


# --- source


@dataclass(eq=False, slots=True)
class _StagedMemory:
    """Staging region of the snapshots of one name, used again by the next one."""

    plan: StagingPlan
    region: StagingRegion
    data: memoryview
    num_readers: int = 0
    """Connections that read its snapshot."""


@dataclass(eq=False, slots=True)
class _Snapshot:
    """A snapshot in host memory."""

    id: str
    step: int
    line: bytes
    """The table as a message."""

    boxes: Mapping[str, tuple[PlannedBox, ...]]
    memory: _StagedMemory


class StateServer:
    """Serves snapshots of one rank to joining groups, from threads of its own.

    A snapshot has a name: `state` is the full training state; a group may offer others, such as
    the summed gradients of the steps after it.
    """

    def __init__(self, host: str, run: str, device: torch.device) -> None:
        """Open a port and start to serve.

        Args:
            host: address of this machine that the other groups can reach.
            run: secret or digest shared by the groups of this run; others are rejected.
            device: of the tensors.

        Raises:
            OSError: no port can be opened.
        """
        self._run, self._device = run, device
        self._changed = threading.Condition()
        self._snapshots: dict[tuple[str, int], _Snapshot] = {}
        self._memory: dict[str, _StagedMemory] = {}
        self._staged: list[tuple[tuple[str, int], _Snapshot, torch.Event | None]] = []
        self._newest: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="state-server", daemon=True)
        self._thread.start()

    def is_requested(self, name: str = "state") -> bool:
        """Return whether a group waits for a snapshot that does not exist; this rank's group then
        calls `offer` on all ranks after the same step."""
        with self._changed:
            return self._wanted.get(name, 0) > 0

    @property
    def is_read(self) -> bool:
        """Whether a group reads a snapshot, so that `withdraw` or `offer` would disturb it."""
        with self._changed:
            return any(snapshot.memory.num_readers for snapshot in self._snapshots.values())

    def offer(
        self,
        step: int,
        entries: Sequence[CheckpointEntry],
        state: Mapping[str, Any],  # JSON
        *,
        name: str = "state",
    ) -> None:
        """Copy the tensors that this rank writes to host memory, and serve them as the snapshot of
        `step`. On a GPU the copies run while training continues: call `wait_staged` before the
        tensors change. The snapshot of an older step with the same name ends.

        Raises:
            OSError: the memory cannot be reserved.
        """
        self.withdraw(name)
        memory = self._prepare_memory(name, entries)
        event = memory.region.copy(memory.plan, entries)
        snapshot = _build_snapshot(step, memory, state)
        self._staged.append(((name, step), snapshot, event))
        if event is None:
            self.wait_staged()

    def wait_staged(self) -> None:
        """Wait until the tensors of the offered snapshots are copied, and serve them."""
        for place, snapshot, event in self._staged:
            if event is not None:
                event.synchronize()
            with self._changed:
                self._snapshots[place] = snapshot
                self._newest[place[0]] = snapshot.step
                self._changed.notify_all()
        self._staged.clear()

    def withdraw(self, name: str = "state") -> None:
        """Stop serving the snapshots of a name; transfers of them fail with
        `SnapshotExpiredError`."""
        with self._changed:
            for place in [place for place in self._snapshots if place[0] == name]:
                del self._snapshots[place]
            self._changed.notify_all()

    def decline(self, step: int, name: str = "state") -> None:
        """Offer no snapshot of `step`: transfers of it fail with `SnapshotExpiredError`."""
        with self._changed:
            self._newest[name] = max(step, self._newest.get(name, step))
            self._changed.notify_all()

    def release(self, name: str = "state") -> None:
        """Stop serving the snapshots of a name, and free their memory; the next `offer` reserves it
        again."""
        self.withdraw(name)
        memory = self._memory.pop(name, None)
        if memory is not None:  # threads that read it keep their mapping
            memory.region.close()

    def close(self) -> None:
        """End all transfers, and free the memory."""
        with self._changed:
            self._is_closed = True
            self._snapshots.clear()
            self._changed.notify_all()
            for connection in self._connections:
                _shut_down(connection)
        _shut_down(self._socket)
        self._socket.close()
        self._thread.join()
        for memory in self._memory.values():
            memory.region.close()
        self._memory.clear()

    def _prepare_memory(self, name: str, entries: Sequence[CheckpointEntry]) -> _StagedMemory:
        """Return the staging region of a name: the last one if it fits and is not read any more."""
        memory = self._memory.get(name)
        with self._changed:
            is_free = memory is not None and memory.num_readers == 0
        if memory and is_free and memory.plan.identity == entries_identity(entries):
            return memory
        if memory:  # the threads that read it keep their mapping
            memory.region.close()
        plan = plan_staging(entries)
        region = StagingRegion(plan.nbytes, self._device)
        mapped = memoryview(mmap.mmap(region.fd, region.nbytes))
        self._memory[name] = _StagedMemory(plan, region, mapped)
        return self._memory[name]

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._changed:
                is_full = self._is_closed or len(self._connections) >= MAX_CONNECTIONS
                if not is_full:
                    self._connections.add(connection)
            if is_full:
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it ends or sends an invalid message."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with connection.makefile("rb") as stream:
                self._answer(connection, stream)
        except StateTransferError as error:
            with suppress(OSError):
                _send_message(connection, kind="error", reason=str(error))
        except OSError as error:
            _log.debug("state transfer: %s", error)
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, connection: socket.socket, stream: IO[bytes]) -> None:
        """Answer the messages of a connection.

        Raises:
            StateTransferError: a message is not valid, or of another run.
            OSError: the connection has ended.
        """
        message = _read_message(stream, MAX_REQUEST_NBYTES)
        if message.get("kind") != "open" or not isinstance(message.get("name"), str):
            raise StateTransferError("the first message is not a request to open a snapshot")
        if not hmac.compare_digest(str(message.get("run")).encode(), self._run.encode()):
            raise StateTransferError("the request is of another run")
        step = message.get("step")
        if step is not None and type(step) is not int:
            raise StateTransferError(f"step={step!r:.100} is not an integer")
        snapshot = self._wait_for_snapshot(connection, message["name"], step)
        if snapshot is None:
            _send_message(connection, kind="expired")
            return
        try:
            self._send_boxes(connection, stream, snapshot, (message["name"], snapshot.step))
        finally:
            with self._changed:
                snapshot.memory.num_readers -= 1

    def _send_boxes(
        self,
        connection: socket.socket,
        stream: IO[bytes],
        snapshot: _Snapshot,
        place: tuple[str, int],
    ) -> None:
        """Send the table of a snapshot, and the boxes that are requested, until the connection ends
        or the snapshot is withdrawn."""
        connection.sendall(snapshot.line)
        while True:
            request = _read_message(stream, MAX_REQUEST_NBYTES)
            boxes = snapshot.boxes.get(str(request.get("key")), ())
            index = request.get("index")
            if (
                request.get("kind") != "box"
                or type(index) is not int
                or not -1 < index < len(boxes)
            ):
                raise StateTransferError("the request is not for a box of the snapshot")
            if self._snapshots.get(place) is not snapshot:
                _send_message(connection, kind="expired")
                return
            box = boxes[index]
            values = snapshot.memory.data[box.start : box.start + box.nbytes]
            _send_message(connection, kind="box", nbytes=box.nbytes, sha256=sha256(values))
            connection.sendall(values)

    def _wait_for_snapshot(
        self, connection: socket.socket, name: str, step: int | None
    ) -> _Snapshot | None:
        """Return the snapshot of a step (None: of any), waiting until it is offered; return None if
        it does not exist any more."""
        is_counted = False
        try:
            while True:
                with self._changed:
                    served = [
                        snapshot
                        for (other, at), snapshot in self._snapshots.items()
                        if other == name and step in (None, at)
                    ]
                    if served:
                        served[-1].memory.num_readers += 1
                        return served[-1]
                    if self._is_closed or (step is not None and self._newest.get(name, -1) >= step):
                        return None
                    if step is None and not is_counted:
                        self._wanted[name] = self._wanted.get(name, 0) + 1
                        is_counted = True
                    self._changed.wait(WAIT_SECONDS)
                _send_message(connection, kind="wait")
        finally:
            if is_counted:
                with self._changed:
                    self._wanted[name] -= 1


def _build_snapshot(step: int, memory: _StagedMemory, state: Mapping[str, Any]) -> _Snapshot:
    tensors = memory.plan.write_plan.tensors
    boxes: dict[str, tuple[PlannedBox, ...]] = {}
    table: dict[str, list[Any]] = {}  # Any: JSON
    for tensor in tensors:
        boxes[tensor.key] = (*boxes.get(tensor.key, ()), *tensor.boxes)
        table[tensor.key] = [tensor.shape, tensor.dtype, [b.box for b in boxes[tensor.key]]]
    identity = secrets.token_hex(8)
    line = _encode(kind="snapshot", id=identity, step=step, state=dict(state), tensors=table)
    return _Snapshot(identity, step, line, boxes, memory)


# --- joining group


def request_snapshot(address: str, *, run: str, timeout_seconds: float, name: str = "state") -> int:
    """Wait until a source rank offers a snapshot, and return its step; then all ranks call
    `fetch_state` with it.

    Raises:
        StateTransferError: the source is lost, or takes longer than `timeout_seconds`.
    """
    with _Source(address, run, name, None, timeout_seconds) as source:
        return source.open().step


@torch.no_grad()
def fetch_state(
    addresses: Sequence[str],
    entries: Sequence[CheckpointEntry],
    *,
    run: str,
    step: int,
    timeout_seconds: float,
    name: str = "state",
    rank: int = 0,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> ReceivedState:
    """Fill the tensors of `entries` from a snapshot of another group, in any layout. Not
    collective; memory for one box is used at a time.

    Args:
        addresses: of the `StateServer` of every rank of the source.
        entries: tensors of this rank.
        run: as for `StateServer`.
        step: of the snapshot, equal on all ranks.
        timeout_seconds: time without progress after which the source counts as lost.
        name: of the snapshot.
        rank: this rank, so that ranks begin with different sources.
        is_cancelled: called before each box and each new connection, and while the source has
            not offered the snapshot yet; True ends the transfer.

    Raises:
        SnapshotExpiredError: the source offers a newer snapshot.
        StateTransferError: the source is lost, or its boxes are damaged or incomplete, or the
            transfer was cancelled.
    """
    with decode_for_loading(entries) as decoded:
        wanted: dict[str, list[TensorPiece]] = {}
        for entry in decoded:
            wanted.setdefault(entry.key, []).extend(pieces(entry))
        shapes = {entry.key: entry.shard.shape for entry in entries}
        progress = _Progress(wanted=wanted, shapes=shapes)
        order = [(rank + number) % len(addresses) for number in range(len(addresses))]
        for number in order:
            with _Source(
                addresses[number], run, name, step, timeout_seconds, is_cancelled
            ) as source:
                source.receive(progress)
                if number == 0:
                    assert source.table is not None, "the source was opened"
                    progress.state = source.table.state
        progress.check_coverage()
    return ReceivedState(
        step, progress.state, progress.nbytes, progress.num_boxes, progress.num_repeated
    )


@dataclass(eq=False)
class _Progress:
    """What one rank has received."""

    wanted: Mapping[str, list[TensorPiece]]
    shapes: Mapping[str, tuple[int, ...]]
    received: dict[str, list[Box]] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)  # JSON
    nbytes: int = 0
    num_boxes: int = 0
    num_repeated: int = 0
    buffer: bytearray = field(default_factory=bytearray)

    def list_overlaps(self, sent: OfferedBox) -> list[tuple[TensorPiece, Box]]:
        """Return the pieces of this rank that a box overlaps."""
        shared = [
            (piece, intersect(piece.box, sent.box)) for piece in self.wanted.get(sent.key, ())
        ]
        return [(piece, box) for piece, box in shared if box is not None]

    def store(self, sent: OfferedBox, values: Tensor) -> None:
        """Copy a box whose hash matches into the tensors."""
        source = TensorPiece(sent.box, values)
        for piece, box in self.list_overlaps(sent):
            inner_view(piece, box).copy_(inner_view(source, box))
        self.received.setdefault(sent.key, []).append(sent.box)
        self.num_boxes += 1

    def check_coverage(self) -> None:
        """Check that every element was received.

        Raises:
            StateTransferError: a part of a tensor is missing or was sent twice.
        """
        for key, own in self.wanted.items():
            for piece in own:
                shared = [intersect(piece.box, box) for box in self.received.get(key, ())]
                inside = [box for box in shared if box is not None]
                starts = [start for start, _ in piece.box]
                moved = [
                    tuple((a - start, b - start) for (a, b), start in zip(box, starts, strict=True))
                    for box in inside
                ]
                if problem := describe_tiling_problem(lengths(piece.box), moved):
                    raise StateTransferError(
                        f"{key} {show_box(piece.box)}: the boxes of the source do not fill it: "
                        f"{problem}"
                    )


class _Source:
    """Connection with one rank of the source."""

    def __init__(
        self,
        address: str,
        run: str,
        name: str,
        step: int | None,
        timeout_seconds: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._address, self._run, self._name, self._step = address, run, name, step
        self._is_cancelled = is_cancelled
        self._timeout = timeout_seconds
        self._socket: socket.socket | None = None
        self._stream: IO[bytes] | None = None
        self.table: SnapshotTable | None = None

    def __enter__(self) -> "_Source":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self) -> SnapshotTable:
        """Connect, and return the table of the snapshot.

        Raises:
            SnapshotExpiredError: it does not exist any more.
            StateTransferError: the source is lost, or its answer is not valid.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                self._connect()
                message = self._read_answer()
                while message["kind"] == "wait":
                    self._check_cancelled()
                    if time.monotonic() > deadline:
                        raise StateTransferError(
                            f"{self._address} offered no snapshot within {self._timeout:g} s"
                        )
                    message = self._read_answer()
                break
            except OSError as error:
                self._retry(error, deadline)
        table = _parse_table(message, self._address)
        if self.table is not None and table.id != self.table.id:
            raise SnapshotExpiredError(f"{self._address} has replaced its snapshot")
        self.table = table
        return table

    def receive(self, progress: _Progress) -> None:
        """Receive all boxes that overlap the tensors of this rank, over several connections if one
        is lost.

        Raises:
            StateTransferError: as for `fetch_state`.
        """
        table = self.open()
        for key, (shape, dtype) in table.shapes.items():
            self._check_tensor(progress, key, shape, dtype)
        missing = [sent for sent in table.boxes if progress.list_overlaps(sent)]
        missing.reverse()
        deadline = time.monotonic() + self._timeout
        attempts = 0
        while missing:
            self._check_cancelled()
            sent = missing[-1]
            try:
                is_valid = self._receive_box(sent, progress)
            except OSError as error:
                self._retry(error, deadline)
                self.open()
                continue
            deadline = time.monotonic() + self._timeout
            if is_valid:
                missing.pop()
                attempts = 0
                continue
            attempts += 1
            progress.num_repeated += 1
            if attempts == MAX_ATTEMPTS:
                raise StateTransferError(
                    f"{self._address} sent damaged bytes for {sent.key} {show_box(sent.box)} "
                    f"{MAX_ATTEMPTS} times: their SHA-256 differs. Check the memory and the "
                    "network of that machine."
                )
            _log.warning("%s sent damaged bytes for %s; they are requested again", self, sent.key)

    def __str__(self) -> str:
        return self._address

    def _check_tensor(
        self, progress: _Progress, key: str, shape: tuple[int, ...], dtype: str
    ) -> None:
        """Check that a tensor of the source is the same one here."""
        own = progress.wanted.get(key)
        if not own:
            return
        expected = (progress.shapes[key], own[0].values.dtype)
        if (shape, DTYPES[dtype]) != expected:
            raise StateTransferError(
                f"{self._address}: {key} has shape {list(shape)} and dtype {dtype}, but "
                f"{list(expected[0])} and {expected[1]} here. All groups need the same settings."
            )

    def _receive_box(self, sent: OfferedBox, progress: _Progress) -> bool:
        """Request one box and copy it; return False if its bytes are damaged."""
        if self._socket is None or self._stream is None:
            raise ConnectionError("not connected")
        _send_message(self._socket, kind="box", key=sent.key, index=sent.index)
        message = self._read_answer()
        if message["kind"] != "box" or message.get("nbytes") != sent.nbytes:
            raise StateTransferError(f"{self._address} sent no box of {sent.nbytes} bytes")
        if len(progress.buffer) < sent.nbytes:
            progress.buffer = bytearray(sent.nbytes)
        view = memoryview(progress.buffer)[: sent.nbytes]
        position = 0
        while position < sent.nbytes:
            count = self._stream.readinto(view[position:])  # type: ignore[attr-defined]  # buffered
            if not count:
                raise ConnectionError("the connection was closed")
            position += count
        progress.nbytes += sent.nbytes
        if sha256(view) != message.get("sha256"):
            return False
        assert self.table is not None, "the source was opened"
        dtype = DTYPES[self.table.shapes[sent.key][1]]
        values = torch.frombuffer(view, dtype=dtype).view(lengths(sent.box))
        progress.store(sent, values)
        return True

    def _connect(self) -> None:
        self._close()
        host, _, port = self._address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), self._timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")
        step = self._step if self.table is None else self.table.step
        _send_message(self._socket, kind="open", run=self._run, name=self._name, step=step)

    def _read_answer(self) -> Message:
        assert self._stream is not None, "connected"
        message = _read_message(self._stream, MAX_LINE_NBYTES)
        if message["kind"] == "expired":
            raise SnapshotExpiredError(f"{self._address} does not offer this snapshot any more")
        if message["kind"] == "error":
            reason = str(message.get("reason"))
            raise StateTransferError(f"{self._address} rejected the request: {reason:.300}")
        return message

    def _retry(self, error: OSError, deadline: float) -> None:
        """Wait before a new connection.

        Raises:
            StateTransferError: there was no progress until the deadline.
        """
        self._close()
        self._check_cancelled()
        if time.monotonic() > deadline:
            raise StateTransferError(
                f"{self._address} cannot be reached for {self._timeout:g} s: {error}"
            ) from error
        time.sleep(min(RECONNECT_SECONDS, self._timeout / 10))

    def _check_cancelled(self) -> None:
        """Check that the transfer continues.

        Raises:
            StateTransferError: it was cancelled.
        """
        if self._is_cancelled():
            raise StateTransferError(f"the transfer from {self._address} was cancelled")

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._stream = None


# --- messages


def _encode(**fields: Any) -> bytes:  # Any: JSON
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _send_message(connection: socket.socket, **fields: Any) -> None:  # Any: JSON
    connection.sendall(_encode(**fields))


def _read_message(stream: IO[bytes], max_nbytes: int) -> Message:
    """Return the next message.

    Raises:
        ConnectionError: the connection has ended.
        StateTransferError: the message is too long or not an object with a kind.
    """
    line = stream.readline(max_nbytes + 1)
    if not line.endswith(b"\n"):
        if len(line) > max_nbytes:
            raise StateTransferError(f"a message has more than {max_nbytes} bytes")
        raise ConnectionError("the connection was closed")
    try:
        message = storage.parse_json(line)
    except ValueError as error:
        raise StateTransferError(f"a message is not JSON: {error!s:.100}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise StateTransferError("a message is not an object with the field kind")
    return message


def _parse_table(message: Message, address: str) -> SnapshotTable:
    """Return the table of a snapshot, checked.

    Raises:
        StateTransferError: it is not valid.
    """
    try:
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        boxes: list[OfferedBox] = []
        for key, (shape, dtype, spans) in message["tensors"].items():
            full = tuple(map(int, shape))
            shapes[key] = (full, str(dtype))
            itemsize = DTYPES[dtype].itemsize
            for index, raw in enumerate(spans):
                box = tuple((int(start), int(stop)) for start, stop in raw)
                if len(box) != len(full) or not all(
                    0 <= start < stop <= size for (start, stop), size in zip(box, full, strict=True)
                ):
                    raise ValueError(f"{key} has no box {show_box(box)}")
                boxes.append(OfferedBox(key, index, box, numel(box) * itemsize))
        if message["kind"] != "snapshot" or not isinstance(message["state"], dict):
            raise ValueError("it has no state")
        step = int(message["step"])
        return SnapshotTable(str(message["id"]), step, message["state"], shapes, tuple(boxes))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateTransferError(
            f"{address}: the table of its snapshot is not valid: {error!r}"
        ) from None


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

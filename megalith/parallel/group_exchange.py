"""Sums of gradients over replica groups: a ring all-reduce over TCP sockets, between rank r of each
group and rank r of the others.

Replica groups are separate jobs, so there is no process group over them, and the loss of one must
not end the others. Every epoch (set of participants) has its own connections: an error closes them,
the peers see the closed connections at once, and the next epoch opens new ones.
"""

import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

MAGIC = b"megaring"
"""First bytes of a connection."""

HELLO = struct.Struct("!8s16sQII")
"""Magic, digest of the run, epoch, index of the connecting group, rank."""

HEADER = struct.Struct("!QQQ")
"""Header of each message: epoch, number of the message in the epoch, bytes of the payload."""

PIECE_NBYTES = 8 << 20
"""Bytes that are summed at a time, which bounds the buffers; heuristic: above 1 MiB the time per
byte does not change (measured: loopback, two processes)."""

HELLO_SECONDS = 5.0
"""Time in which a new connection must have identified itself, in total (heuristic)."""

KEEPALIVE_SECONDS = 5
"""Idle time after which the kernel checks that the machine of a peer still exists."""


class GroupExchangeError(Exception):
    """A sum over replica groups failed, because a peer is lost, too slow, or in another epoch."""


class GroupExchange(Protocol):
    """Sums tensors over the participating replica groups, rank r with rank r of the others."""

    @property
    def num_groups(self) -> int:
        """Number of participants of the epoch."""

    @property
    def index(self) -> int:
        """Index of this group among the participants."""

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place over the groups; all groups get the same bits.

        Raises:
            GroupExchangeError: a peer is lost; the tensors hold undefined values.
        """

    def all_gather(self, data: Tensor) -> list[Tensor]:
        """Return `data` (uint8 [nbytes], of equal size in all groups) of every group, in ring
        order.

        Raises:
            GroupExchangeError: a peer is lost.
        """

    def close(self) -> None:
        """Close the connections, so that a sum in progress fails in all groups."""


@dataclass(frozen=True, slots=True)
class RingMember:
    """Position of this rank in the ring of one epoch."""

    epoch: int
    participants: tuple[str, ...]
    """Ids of the groups, in ring order."""
    group: str
    """Id of this group."""
    rank: int
    """Rank of this process within its group."""
    digest: bytes
    """Digest of the run's settings; connections of other runs are rejected."""

    @property
    def index(self) -> int:
        """Index of this group in the ring."""
        return self.participants.index(self.group)

    @property
    def next_group(self) -> str:
        """The group that this one sends to."""
        return self.participants[(self.index + 1) % len(self.participants)]

    @property
    def previous_group(self) -> str:
        """The group that this one receives from."""
        return self.participants[self.index - 1]

    def hello(self) -> bytes:
        """Return the first message of a connection from this group."""
        return HELLO.pack(MAGIC, self.digest, self.epoch, self.index, self.rank)


@dataclass(slots=True)
class PeerListener:
    """Listening socket of one rank, for the connections of all epochs."""

    sock: socket.socket
    waiting: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    """Connections that came before this rank needed them, by epoch and index of the group."""

    @classmethod
    def open(cls, host: str) -> Self:
        """Listen on a free port of `host`, the address of this machine for the other groups."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind((host, 0))
        sock.listen(16)
        return cls(sock)

    @property
    def address(self) -> str:
        """Address as host:port."""
        host, port = self.sock.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def accept(self, member: RingMember, source: str, deadline: float) -> socket.socket:
        """Return the connection of the same rank of group `source` in an epoch; connections of
        earlier epochs and of other runs are closed, others wait.

        Raises:
            GroupExchangeError: there is none before `deadline`.
        """
        key = member.epoch, member.participants.index(source)
        for old in [old for old in self.waiting if old[0] < member.epoch]:
            self.waiting.pop(old).close()
        while key not in self.waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise GroupExchangeError(
                    f"epoch {member.epoch}: group {source} did not connect to rank {member.rank} "
                    f"of group {member.group}"
                )
            try:
                self.sock.settimeout(left)
                connection, _ = self.sock.accept()
            except (TimeoutError, ConnectionAbortedError):
                continue  # a connection that ended before it was accepted
            except OSError as error:
                raise GroupExchangeError(
                    f"epoch {member.epoch}: rank {member.rank} of group {member.group} cannot "
                    f"accept the connection of group {source}: {error}"
                ) from error
            self._identify(connection, member)
        return self.waiting.pop(key)

    def _identify(self, connection: socket.socket, member: RingMember) -> None:
        """Keep a new connection if it is of this run and not of an earlier epoch."""
        try:
            hello = receive_exactly(connection, HELLO.size, seconds=HELLO_SECONDS)
            magic, digest, epoch, index, rank = HELLO.unpack(hello)
        except (OSError, struct.error):
            connection.close()
            return
        is_of_run = magic == MAGIC and digest == member.digest and rank == member.rank
        if not is_of_run or epoch < member.epoch:
            connection.close()
            return
        if (previous := self.waiting.pop((epoch, index), None)) is not None:
            previous.close()
        self.waiting[epoch, index] = connection

    def close(self) -> None:
        """Close the listening socket and all waiting connections."""
        for connection in self.waiting.values():
            connection.close()
        self.waiting.clear()
        self.sock.close()


def connect_ring(
    listener: PeerListener, member: RingMember, next_address: str, *, timeout_seconds: float
) -> "RingExchange":
    """Connect this rank to its neighbors in the ring of an epoch.

    `next_address`: where the same rank of the next group listens.

    Raises:
        GroupExchangeError: a neighbor is lost, or does not connect in time.
    """
    if len(member.participants) == 1:
        return RingExchange(member, None, None, timeout_seconds)
    deadline = time.monotonic() + timeout_seconds
    following = connect_peer(member, member.next_group, next_address, timeout_seconds)
    try:
        previous = listener.accept(member, member.previous_group, deadline)
    except GroupExchangeError:
        following.close()
        raise
    configure_socket(previous, timeout_seconds)
    following.setblocking(False)
    previous.setblocking(False)
    return RingExchange(member, following, previous, timeout_seconds)


def connect_peer(
    member: RingMember, group: str, address: str, timeout_seconds: float
) -> socket.socket:
    """Connect to the same rank of another group, which listens at `address`; the socket blocks.

    Raises:
        GroupExchangeError: the group is lost.
    """
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_seconds)
        configure_socket(connection, timeout_seconds)
        connection.sendall(member.hello())
    except OSError as error:
        raise GroupExchangeError(
            f"epoch {member.epoch}: rank {member.rank} of group {member.group} cannot connect to "
            f"group {group} at {address}: {error}"
        ) from error
    return connection


@dataclass(slots=True)
class RingExchange:
    """Ring all-reduce over the connections of one epoch.

    A piece is cut into one chunk per group. Chunk c starts at group c, and each group on the ring
    adds its own values, so that the order of the sum depends on c alone; the complete chunks then
    go around once more. All groups get the same bits, and each sends 2 (groups - 1) / groups of the
    bytes. Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
    """

    member: RingMember
    following: socket.socket | None
    """Connection to the next group; None if there is only one group."""
    previous: socket.socket | None
    timeout_seconds: float
    """Time without any byte from a peer after which it counts as lost."""
    num_messages: int = 0
    """Messages sent in this epoch."""

    @property
    def num_groups(self) -> int:
        """Number of participants of the epoch."""
        return len(self.member.participants)

    @property
    def index(self) -> int:
        """Index of this group among the participants."""
        return self.member.index

    def all_reduce_(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors in place over the groups; see `GroupExchange`."""
        if self.num_groups == 1:
            return
        try:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                for parts in _cut_into_pieces(same, PIECE_NBYTES // dtype.itemsize):
                    # contiguous host memory for the sockets
                    flat = torch.cat([part.reshape(-1).to("cpu") for part in parts])
                    self._all_reduce_piece_(flat)
                    sums = flat.split([part.numel() for part in parts])
                    for part, total in zip(parts, sums, strict=True):
                        part.copy_(total.view_as(part))
        except BaseException:
            self.close()  # the peers fail at once
            raise

    def all_gather(self, data: Tensor) -> list[Tensor]:
        """Return the data of every group, which goes around the ring; see `GroupExchange`."""
        gathered = [data if n == self.index else data.new_empty(0) for n in range(self.num_groups)]
        try:
            for hop in range(self.num_groups - 1):
                source = (self.index - hop - 1) % self.num_groups
                sent = gathered[(source + 1) % self.num_groups]
                gathered[source] = torch.empty_like(data)
                for start in range(0, data.numel(), PIECE_NBYTES):
                    piece = slice(start, start + PIECE_NBYTES)
                    self._send_and_receive(sent[piece], gathered[source][piece])
        except BaseException:
            self.close()  # the peers fail at once
            raise
        return gathered

    def close(self) -> None:
        """Close the connections; a sum in progress fails in all groups."""
        for connection in (self.following, self.previous):
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _all_reduce_piece_(self, flat: Tensor) -> None:
        """Sum a contiguous tensor in host memory in place."""
        groups, index = self.num_groups, self.index
        size = -(-flat.numel() // groups)
        chunks = [flat[number * size : (number + 1) * size] for number in range(groups)]
        received = torch.empty_like(chunks[0])
        for hop in range(groups - 1):
            chunk = chunks[(index - hop - 1) % groups]
            part = received[: chunk.numel()]
            self._send_and_receive(chunks[(index - hop) % groups], part)
            chunk.add_(part)
        for hop in range(groups - 1):
            self._send_and_receive(
                chunks[(index + 1 - hop) % groups], chunks[(index - hop) % groups]
            )

    def _send_and_receive(self, sent: Tensor, received: Tensor) -> None:
        """Send a chunk to the next group while receiving one from the previous group.

        Raises:
            GroupExchangeError: a peer has closed its connection, or sent nothing for too long.
        """
        assert self.following is not None and self.previous is not None
        payload = _view_bytes(sent)
        header = HEADER.pack(self.member.epoch, self.num_messages, len(payload))
        sender = _Sender(self.following, [memoryview(header), payload])
        receiver = _Receiver(
            self.previous, _view_bytes(received), self.member.epoch, self.num_messages
        )
        self.num_messages += 1
        deadline = time.monotonic() + self.timeout_seconds
        while not (sender.is_done and receiver.is_done):
            if sender.advance() + receiver.advance():
                deadline = time.monotonic() + self.timeout_seconds
                continue
            if (left := deadline - time.monotonic()) <= 0:
                raise GroupExchangeError(self._describe_timeout(sender_done=sender.is_done))
            reads = [] if receiver.is_done else [self.previous]
            writes = [] if sender.is_done else [self.following]
            if not _wait_until_ready(reads, writes, left):  # closed by another thread
                raise GroupExchangeError(f"epoch {self.member.epoch}: aborted")

    def _describe_timeout(self, *, sender_done: bool) -> str:
        member = self.member
        peer = member.previous_group if sender_done else member.next_group
        return (
            f"epoch {member.epoch}: rank {member.rank} of group {peer} did not "
            f"{'send' if sender_done else 'receive'} anything for {self.timeout_seconds:g} s"
        )


class _Sender:
    """Message that is sent in parts, without blocking."""

    def __init__(self, connection: socket.socket, parts: list[memoryview]) -> None:
        self._connection, self._parts = connection, [part for part in parts if len(part)]

    @property
    def is_done(self) -> bool:
        """Whether all bytes are sent."""
        return not self._parts

    def advance(self) -> int:
        """Send what fits into the socket's buffer; return the number of bytes."""
        if not self._parts:
            return 0
        try:
            count = sent = self._connection.sendmsg(self._parts)
        except BlockingIOError:
            return 0
        except (OSError, ValueError) as error:
            raise GroupExchangeError(f"a group closed its connection: {error}") from error
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if count:
            self._parts[0] = self._parts[0][count:]
        return sent


class _Receiver:
    """Message that is received in parts, without blocking; messages of earlier epochs are
    dropped."""

    def __init__(
        self, connection: socket.socket, payload: memoryview, epoch: int, number: int
    ) -> None:
        self._connection, self._epoch, self._number = connection, epoch, number
        self._payload, self._header = payload, bytearray(HEADER.size)
        self._target = memoryview(self._header)
        self._state = "header"

    @property
    def is_done(self) -> bool:
        """Whether the whole message has arrived."""
        return self._state == "done"

    def advance(self) -> int:
        """Receive what has arrived; return the number of bytes."""
        total = 0
        while self._state != "done":
            if not len(self._target):
                self._finish_part()
                continue
            try:
                count = self._connection.recv_into(self._target)
            except BlockingIOError:
                return total
            except (OSError, ValueError) as error:
                raise GroupExchangeError(f"a group closed its connection: {error}") from error
            if count == 0:
                raise GroupExchangeError("a group closed its connection")
            total += count
            self._target = self._target[count:]
        return total

    def _finish_part(self) -> None:
        """Go from the header to the payload, and from the payload to the end."""
        if self._state == "payload":
            self._state = "done"
            return
        if self._state == "dropped":
            self._state, self._target = "header", memoryview(self._header)
            return
        epoch, number, nbytes = HEADER.unpack(self._header)
        if epoch < self._epoch and nbytes <= PIECE_NBYTES:
            self._state, self._target = "dropped", memoryview(bytearray(nbytes))
            return
        if (epoch, number, nbytes) != (self._epoch, self._number, len(self._payload)):
            raise GroupExchangeError(
                f"a group sent message {number} of epoch {epoch} with {nbytes} bytes, and message "
                f"{self._number} of epoch {self._epoch} with {len(self._payload)} bytes was "
                "expected: the groups have different layouts or settings"
            )
        self._state, self._target = "payload", self._payload


def _cut_into_pieces(tensors: Sequence[Tensor], numel: int) -> Iterator[list[Tensor]]:
    """Yield parts of at most `numel` elements together, in order; tensors are contiguous."""
    parts: list[Tensor] = []
    left = numel
    for tensor in tensors:
        # view: a copy would not be summed in place
        rest = tensor.detach().view(-1)
        while rest.numel():
            part, rest = rest[:left], rest[left:]
            parts.append(part)
            left -= part.numel()
            if left == 0:
                yield parts
                parts, left = [], numel
    if parts:
        yield parts


def _view_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    return tensor.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def broadcast_json(
    exchange: GroupExchange,
    value: Mapping[str, Any] | None,  # Any: JSON
) -> dict[str, Any]:
    """Return on all groups the JSON document that one of them sends; `value` is None on the others.

    Raises:
        GroupExchangeError: a group was lost.
    """
    data = bytearray() if value is None else bytearray(json.dumps(value).encode())
    nbytes = torch.tensor([len(data)])
    exchange.all_reduce_([nbytes])
    message = torch.zeros(int(nbytes), dtype=torch.uint8)
    if data:
        message.copy_(torch.frombuffer(data, dtype=torch.uint8))
    exchange.all_reduce_([message])
    received: dict[str, Any] = json.loads(message.numpy().tobytes())
    return received


def configure_socket(connection: socket.socket, timeout_seconds: float) -> None:
    """Send small messages at once, and have the kernel detect the loss of a machine."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_SECONDS,
        "TCP_KEEPINTVL": KEEPALIVE_SECONDS,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": int(timeout_seconds * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # macOS lacks some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _wait_until_ready(
    reads: Sequence[socket.socket], writes: Sequence[socket.socket], seconds: float
) -> bool:
    """Wait until one of the connections can be read or written, or for `seconds`; return False if
    one is closed. Unlike select(), for any number of open files."""
    poll = select.poll()
    events: dict[int, int] = {}
    for connections, event in ((reads, select.POLLIN), (writes, select.POLLOUT)):
        for connection in connections:
            number = connection.fileno()
            if number < 0:
                return False
            events[number] = events.get(number, 0) | event
    for number, event in events.items():
        poll.register(number, event)
    ready = poll.poll(seconds * 1000)
    return not any(event & select.POLLNVAL for _, event in ready)


def receive_exactly(connection: socket.socket, nbytes: int, *, seconds: float) -> bytes:
    """Return the next bytes of a blocking connection; fewer if it was closed.

    Raises:
        OSError: they have not arrived within `seconds`.
    """
    deadline, received = time.monotonic() + seconds, b""
    while len(received) < nbytes:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = connection.recv(nbytes - len(received))
        if not part:
            break
        received += part
    return received

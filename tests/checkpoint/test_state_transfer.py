"""Transfer of a snapshot to a joining replica group: layouts, damage, lost connections."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

import pytest
import torch

from megalith.checkpoint import staging, state_transfer
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.state_transfer import (
    SnapshotExpiredError,
    StateServer,
    StateTransferError,
    fetch_state,
    request_snapshot,
)
from megalith.plan.shards import Shard
from tests.checkpoint.split_entries import build_split_entries

CPU = torch.device("cpu")
SHAPES = {"w": (24, 5), "v": (23,), "scale": ()}
RUN = "digest of the run"
BOX_NBYTES = 128
TIMEOUT = 5.0


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BOX_NBYTES", BOX_NBYTES)


def build_entries(rank: int, world: int, *, dim: int, step: int) -> list[CheckpointEntry]:
    return build_split_entries(SHAPES, rank, world, dim=dim, step=step)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 2 * TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "the condition has not become true"
        time.sleep(0.005)


@contextmanager
def offer(world: int, *, dim: int = 0, step: int = 7) -> Iterator[list[StateServer]]:
    """Servers of the ranks of a source that offer a step."""
    with ExitStack() as stack:
        servers = []
        for rank in range(world):
            server = StateServer("127.0.0.1", RUN, CPU)
            stack.callback(server.close)
            server.offer(step, build_entries(rank, world, dim=dim, step=step), {"step": step})
            servers.append(server)
        yield servers


def fetch(
    addresses: Sequence[str], entries: Sequence[CheckpointEntry], **options: object
) -> state_transfer.ReceivedState:
    settings = {"run": RUN, "step": 7, "timeout_seconds": TIMEOUT} | options
    return fetch_state(addresses, entries, **settings)  # type: ignore[arg-type]  # by name


def assert_equal(entries: Sequence[CheckpointEntry], expected: Sequence[CheckpointEntry]) -> None:
    for entry, other in zip(entries, expected, strict=True):
        assert torch.equal(entry.tensor, other.tensor), entry.key


@pytest.mark.parametrize(("source", "target"), [(1, 1), (3, 2), (2, 3)])
def test_snapshot_is_loaded_in_another_layout(source: int, target: int) -> None:
    with offer(source) as servers:
        addresses = [server.address for server in servers]
        for rank in range(target):
            entries = build_entries(rank, target, dim=1, step=0)
            received = fetch(addresses, entries, rank=rank)
            assert_equal(entries, build_entries(rank, target, dim=1, step=7))
            assert received.state == {"step": 7}
            assert received.num_repeated == 0


def test_flat_range_of_a_parameter_is_loaded() -> None:
    shard = Shard.full("w", (24, 5))
    with offer(2) as servers:
        flat = Shard(name="w", shape=(24, 5), box=shard.box, flat=(7, 61))
        entry = CheckpointEntry(flat, "param", torch.zeros(54))
        fetch([server.address for server in servers], [entry])
    full = build_entries(0, 1, dim=0, step=7)[0].tensor
    assert torch.equal(entry.tensor, full.flatten()[7:61])


def test_source_may_train_during_the_transfer() -> None:
    server = StateServer("127.0.0.1", RUN, CPU)
    try:
        own = build_entries(0, 1, dim=0, step=7)
        server.offer(7, own, {})
        for entry in own:
            entry.tensor.add_(1)
        entries = build_entries(0, 1, dim=0, step=0)
        fetch([server.address], entries)
        assert_equal(entries, build_entries(0, 1, dim=0, step=7))
        memory = server._memory["state"]
        wait_for(lambda: not server.is_read)
        server.offer(8, own, {})
        assert server._memory["state"] is memory  # allocated once
        fetch([server.address], entries, step=8)
        assert_equal(entries, own)
    finally:
        server.close()


@contextmanager
def forward(address: str, edit: Callable[[bytes, int], bytes | None]) -> Iterator[str]:
    """A proxy of a server. `edit` returns what is passed on instead of the bytes that begin at some
    position of all that the server sends; None: the connection is cut."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, _, port = address.rpartition(":")
    position = 0

    def pump(source: socket.socket, target: socket.socket, *, is_answer: bool) -> None:
        nonlocal position
        with suppress(OSError):
            while data := source.recv(64):
                passed: bytes | None = data
                if is_answer:
                    passed = edit(data, position)
                    position += len(data)
                if passed is None:
                    break
                target.sendall(passed)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((host, int(port)))
                for pair, is_answer in (((client, server), False), ((server, client), True)):
                    thread = threading.Thread(
                        target=pump, args=pair, kwargs={"is_answer": is_answer}, daemon=True
                    )
                    thread.start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def flip(data: bytes, index: int) -> bytes:
    """Flip a bit of one byte."""
    changed = bytearray(data)
    changed[index] ^= 1
    return bytes(changed)


def find_values(server: StateServer) -> bytes:
    """The first bytes of the first box."""
    (snapshot,) = server._snapshots.values()
    return bytes(snapshot.memory.data[:8])


def test_damaged_box_is_requested_again() -> None:
    with offer(1) as servers:
        values = find_values(servers[0])
        num_flips = 0

        def damage(data: bytes, position: int) -> bytes:
            nonlocal num_flips
            if values in data and num_flips == 0:
                num_flips += 1
                return flip(data, data.index(values))
            return data

        entries = build_entries(0, 1, dim=0, step=0)
        with forward(servers[0].address, damage) as address:
            received = fetch([address], entries)
        assert num_flips == received.num_repeated == 1
        assert_equal(entries, build_entries(0, 1, dim=0, step=7))


def test_source_that_sends_damaged_boxes_again_and_again_is_rejected() -> None:
    with offer(1) as servers:
        values = find_values(servers[0])

        def damage(data: bytes, position: int) -> bytes:
            return flip(data, data.index(values)) if values in data else data

        with forward(servers[0].address, damage) as address:
            with pytest.raises(StateTransferError) as error:
                fetch([address], build_entries(0, 1, dim=0, step=0))
        assert str(error.value) == (
            f"{address} sent damaged bytes for model.w [0:6, 0:5] 3 times: their SHA-256 differs. "
            "Check the memory and the network of that machine."
        )


def test_lost_connection_continues_with_the_missing_boxes() -> None:
    entries = build_entries(0, 1, dim=0, step=0)
    with offer(1) as servers:
        whole = fetch([servers[0].address], entries)
        cuts = [1500, 2400]

        def cut(data: bytes, position: int) -> bytes | None:
            if cuts and position > cuts[0]:
                cuts.pop(0)
                return None
            return data

        entries = build_entries(0, 1, dim=0, step=0)
        with forward(servers[0].address, cut) as address:
            received = fetch([address], entries)
        assert not cuts
        assert_equal(entries, build_entries(0, 1, dim=0, step=7))
        assert received.num_boxes == whole.num_boxes > 10
        assert received.nbytes == whole.nbytes  # no box was received twice


def test_memory_of_a_transfer_is_that_of_one_box(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Buffer(bytearray):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            sizes.append(nbytes)

    monkeypatch.setattr(state_transfer, "bytearray", Buffer, raising=False)
    with offer(1) as servers:
        fetch([servers[0].address], build_entries(0, 1, dim=0, step=0))
    assert 0 < max(sizes) <= BOX_NBYTES


def test_replaced_or_withdrawn_snapshot_ends_the_transfer() -> None:
    entries = build_entries(0, 1, dim=0, step=0)
    with offer(1) as servers:
        server = servers[0]
        withdrawals = [lambda: server.withdraw()]

        def withdraw(data: bytes, position: int) -> bytes:
            if withdrawals and position > 1500:
                withdrawals.pop()()
            return data

        with forward(server.address, withdraw) as address:
            with pytest.raises(SnapshotExpiredError, match="does not offer this snapshot any more"):
                fetch([address], entries)
        with pytest.raises(SnapshotExpiredError):
            fetch([server.address], entries)
        server.offer(9, build_entries(0, 1, dim=0, step=9), {})
        with pytest.raises(SnapshotExpiredError):
            fetch([server.address], entries)
        fetch([server.address], entries, step=9)
        assert_equal(entries, build_entries(0, 1, dim=0, step=9))


def test_released_or_declined_snapshot_is_not_waited_for() -> None:
    entries = build_entries(0, 1, dim=0, step=0)
    with offer(1) as (server,):
        server.release()
        with pytest.raises(SnapshotExpiredError):
            fetch([server.address], entries)
        server.offer(8, build_entries(0, 1, dim=0, step=8), {})
        assert fetch([server.address], entries, step=8).step == 8
        server.decline(9)
        with pytest.raises(SnapshotExpiredError):
            fetch([server.address], entries, step=9)


def test_cancelled_transfer_ends_although_its_source_is_lost() -> None:
    cancelled = threading.Event()
    with offer(1) as (server,):
        address = server.address
    timer = threading.Timer(0.2, cancelled.set)
    timer.start()
    started = time.monotonic()
    with pytest.raises(StateTransferError, match=f"the transfer from {address} was cancelled"):
        fetch(
            [address],
            build_entries(0, 1, dim=0, step=0),
            timeout_seconds=60,
            is_cancelled=cancelled.is_set,
        )
    assert time.monotonic() - started < 30, "the timeout is longer"
    timer.join()


def test_cancelled_transfer_ends_although_its_source_offers_no_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_transfer, "WAIT_SECONDS", 0.05)
    cancelled = threading.Event()
    server = StateServer("127.0.0.1", RUN, CPU)
    with ThreadPoolExecutor(1) as pool:
        transfer = pool.submit(
            fetch,
            [server.address],
            build_entries(0, 1, dim=0, step=0),
            timeout_seconds=60,
            is_cancelled=cancelled.is_set,
        )
        wait_for(lambda: len(server._connections) == 1)
        cancelled.set()
        error = transfer.exception(30)
        server.close()
    assert str(error) == f"the transfer from {server.address} was cancelled"


def test_joining_group_waits_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "WAIT_SECONDS", 0.05)
    server = StateServer("127.0.0.1", RUN, CPU)
    with ThreadPoolExecutor(1) as pool:
        try:
            assert not server.is_requested()
            with pytest.raises(StateTransferError, match="offered no snapshot within 0.2 s"):
                request_snapshot(server.address, run=RUN, timeout_seconds=0.2)
            waiting = pool.submit(
                request_snapshot, server.address, run=RUN, timeout_seconds=TIMEOUT
            )
            wait_for(server.is_requested)
            server.offer(7, build_entries(0, 1, dim=0, step=7), {})
            assert waiting.result(TIMEOUT) == 7
            wait_for(lambda: not server.is_requested() and not server.is_read)
            server.offer(3, build_entries(0, 1, dim=0, step=3), {}, name="gradients")
            entries = build_entries(0, 1, dim=0, step=0)
            fetch([server.address], entries, step=3, name="gradients")
            fetch([server.address], entries, step=7)
        finally:
            server.close()


def test_lost_source_ends_the_transfer() -> None:
    with offer(2) as servers:
        addresses = [server.address for server in servers]
        servers[1].close()
        with pytest.raises(StateTransferError, match=f"{addresses[1]} cannot be reached for 0.3 s"):
            fetch(addresses, build_entries(0, 1, dim=0, step=0), timeout_seconds=0.3)


def test_incomplete_or_other_state_is_rejected() -> None:
    entries = build_entries(0, 1, dim=0, step=0)
    with offer(2) as servers:
        with pytest.raises(
            StateTransferError, match=r"model.w \[0:24, 0:5\]: the boxes of the sou"
        ):
            fetch([servers[0].address], entries)
        twice = [servers[0].address, servers[0].address, servers[1].address]
        with pytest.raises(StateTransferError, match="is written twice"):
            fetch(twice, entries)
        addresses = [server.address for server in servers]
        other = CheckpointEntry(Shard.full("w", (24, 6)), "param", torch.zeros(24, 6))
        with pytest.raises(StateTransferError) as error:
            fetch(addresses, [other])
        assert str(error.value) == (
            f"{addresses[0]}: model.w has shape [24, 5] and dtype float32, but [24, 6] and "
            "torch.float32 here. All groups need the same settings."
        )
        half = CheckpointEntry(
            Shard.full("w", (24, 5)), "exp_avg", torch.zeros(24, 5, dtype=torch.bfloat16)
        )
        with pytest.raises(StateTransferError, match=r"dtype float32, but \[24, 5\] and torch.bfl"):
            fetch(addresses, [half])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{}\n", "not an object with the field kind"),
        (b"\xff\n", "not JSON"),
        (b"x" * 70_000, "more than 65536 bytes"),
        (b'{"kind": "box"}\n', "the first message is not a request to open a snapshot"),
        (b'{"kind": "open", "name": "state", "run": "x"}\n', "the request is of another run"),
        (
            b'{"kind": "open", "name": "state", "run": "digest of the run", "step": "a"}\n',
            "step='a' is not an integer",
        ),
        (
            b'{"kind": "open", "name": "state", "run": "digest of the run", "step": 7}\n'
            b'{"kind": "box", "key": "model.w", "index": 1000}\n',
            "the request is not for a box of the snapshot",
        ),
    ],
)
def test_invalid_requests_are_rejected(line: bytes, reason: str) -> None:
    with offer(1) as servers:
        host, _, port = servers[0].address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT) as connection:
            connection.sendall(line)
            data = b""
            with suppress(ConnectionError):
                while chunk := connection.recv(65_536):
                    data += chunk
        assert reason in data.decode()
        entries = build_entries(0, 1, dim=0, step=0)
        fetch([servers[0].address], entries)
        assert_equal(entries, build_entries(0, 1, dim=0, step=7))


@pytest.mark.parametrize(
    "answer",
    [
        b'{"kind":"snapshot"}\n',
        b'{"kind":"snapshot","id":"a","step":7,"state":[],"tensors":{}}\n',
        b'{"kind":"snapshot","id":"a","step":7,"state":{},"tensors":{"w":[[2],"object",[]]}}\n',
        b'{"kind":"snapshot","id":"a","step":7,"state":{},'
        b'"tensors":{"w":[[2],"float32",[[[0,3]]]]}}\n',
        b'{"kind":"snapshot","id":"a","step":7,"state":{},'
        b'"tensors":{"w":[[2],"float32",[[[0,1],[0,1]]]]}}\n',
    ],
)
def test_invalid_tables_are_rejected(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(65_536)

        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StateTransferError, match="the table of its snapshot is not valid"):
            fetch([address], build_entries(0, 1, dim=0, step=0))
        thread.join()

"""Sums over replica groups: equal bits in all groups for uneven sizes; a peer that is lost, slow or
in an earlier epoch does not block or change a sum."""

import fcntl
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from megalith.parallel import group_exchange
from megalith.parallel.group_exchange import (
    HEADER,
    GroupExchangeError,
    PeerListener,
    RingExchange,
    RingMember,
    connect_ring,
)

DIGEST = b"d" * 16


def connect_all(
    groups: int, *, epoch: int = 1, listeners: list[PeerListener] | None = None, timeout: float = 5
) -> list[RingExchange]:
    """Return the exchanges of all groups of a ring in this process."""
    opened = listeners or [PeerListener.open("127.0.0.1") for _ in range(groups)]
    names = tuple(f"g{number}" for number in range(groups))

    def connect(number: int) -> RingExchange:
        member = RingMember(epoch, names, names[number], 0, DIGEST)
        following = opened[(number + 1) % groups].address
        return connect_ring(opened[number], member, following, timeout_seconds=timeout)

    with ThreadPoolExecutor(groups) as pool:
        exchanges = [*pool.map(connect, range(groups))]
    if listeners is None:
        for listener in opened:
            listener.close()
    return exchanges


def run_all(exchanges: list[RingExchange], work: Callable[[RingExchange], object]) -> list[object]:
    """Run `work` of all groups at once; return results or errors."""

    def attempt(exchange: RingExchange) -> object:
        try:
            return work(exchange)
        except GroupExchangeError as error:
            return error

    with ThreadPoolExecutor(len(exchanges)) as pool:
        return [*pool.map(attempt, exchanges)]


def tensors_of(group: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(group)
    sizes = [(3,), (5, 7), (), (1,), (0,), (611,)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_all_groups_get_the_same_bits_of_the_sum(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_exchange, "PIECE_NBYTES", 1000)  # several pieces, uneven chunks
    exchanges = connect_all(groups)

    def reduce(exchange: RingExchange) -> list[Tensor]:
        tensors = [*tensors_of(exchange.index), *tensors_of(exchange.index, torch.float64)]
        exchange.all_reduce_(tensors)
        exchange.all_reduce_([tensors[-1]])
        return tensors

    results = run_all(exchanges, reduce)
    summed = [sum(parts) for parts in zip(*(tensors_of(g, torch.float64) for g in range(groups)))]
    for tensors in results:
        assert isinstance(tensors, list)
        for tensor, first in zip(tensors, results[0], strict=True):
            assert torch.equal(tensor, first)
        expected = [*summed[:5], groups * summed[5]]  # the last one was summed twice
        torch.testing.assert_close(tensors[6:], expected, rtol=1e-12, atol=1e-12)
    for exchange in exchanges:
        exchange.close()


def test_sum_over_bfloat16_is_in_place_for_views() -> None:
    exchanges = connect_all(2)

    def reduce(exchange: RingExchange) -> Tensor:
        whole = torch.ones(8, dtype=torch.bfloat16)
        exchange.all_reduce_([whole[2:5]])
        return whole

    for whole in run_all(exchanges, reduce):
        assert isinstance(whole, Tensor)
        assert whole.tolist() == [1, 1, 2, 2, 2, 1, 1, 1]


def test_large_tensors_do_not_deadlock_on_full_socket_buffers() -> None:
    exchanges = connect_all(3)

    def reduce(exchange: RingExchange) -> float:
        tensor = torch.ones(6 << 20)
        exchange.all_reduce_([tensor])
        return float(tensor.min() + tensor.max())

    assert run_all(exchanges, reduce) == [6.0, 6.0, 6.0]


def test_closed_connection_fails_in_all_groups_at_once() -> None:
    exchanges = connect_all(3, timeout=60)

    def reduce(exchange: RingExchange) -> None:
        if exchange.index == 1:
            exchange.close()
            return
        exchange.all_reduce_([torch.ones(100)])

    started = time.monotonic()
    errors = run_all(exchanges, reduce)
    assert time.monotonic() - started < 30
    assert all("closed its connection" in str(errors[group]) for group in (0, 2)), errors


def test_unresponsive_peer_fails_within_the_timeout() -> None:
    exchanges = connect_all(2, timeout=0.2)
    with pytest.raises(GroupExchangeError, match="epoch 1: rank 0 of group g1 did not send any"):
        exchanges[0].all_reduce_([torch.ones(3)])
    with pytest.raises(GroupExchangeError, match="closed its connection"):
        exchanges[1].all_reduce_([torch.ones(3)])


def test_peer_that_is_lost_cannot_be_connected() -> None:
    listener, lost = PeerListener.open("127.0.0.1"), PeerListener.open("127.0.0.1")
    address = lost.address
    lost.close()
    member = RingMember(4, ("a", "b"), "a", 2, DIGEST)
    with pytest.raises(GroupExchangeError, match="epoch 4: rank 2 of group a cannot connect to gr"):
        connect_ring(listener, member, address, timeout_seconds=5)
    with pytest.raises(GroupExchangeError, match="epoch 4: group b did not connect to rank 2 of g"):
        connect_ring(listener, member, listener.address, timeout_seconds=0.2)
    listener.close()


@pytest.mark.parametrize(
    ("digest", "epoch", "rank"), [(b"x" * 16, 2, 0), (DIGEST, 1, 0), (DIGEST, 2, 1)]
)
def test_connections_of_other_runs_epochs_and_ranks_are_closed(
    digest: bytes, epoch: int, rank: int
) -> None:
    listeners = [PeerListener.open("127.0.0.1") for _ in range(2)]
    names = ("g0", "g1")
    host, _, port = listeners[0].address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as stranger,
        socket.create_connection((host, int(port))) as silent,
    ):
        silent.sendall(b"?")
        silent.close()
        stranger.sendall(RingMember(epoch, names, "g1", rank, digest).hello())
        exchanges = connect_all(2, epoch=2, listeners=listeners)
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    results = run_all(exchanges, lambda exchange: exchange.all_reduce_([torch.ones(2)]))
    assert results == [None, None]
    for listener in listeners:
        listener.close()


def test_connection_of_a_later_epoch_waits_until_this_rank_enters_it() -> None:
    listeners = [PeerListener.open("127.0.0.1") for _ in range(2)]
    host, _, port = listeners[0].address.rpartition(":")
    with socket.create_connection((host, int(port))) as early:
        early.sendall(RingMember(9, ("g0", "g1"), "g1", 0, DIGEST).hello())
        exchanges = connect_all(2, epoch=8, listeners=listeners)
        member = RingMember(9, ("g0", "g1"), "g0", 0, DIGEST)
        accepted = listeners[0].accept(member, "g1", time.monotonic() + 5)
        early.sendall(b"!")
        assert accepted.recv(1) == b"!"
    for exchange in exchanges:
        exchange.close()


def test_message_of_an_earlier_epoch_is_dropped() -> None:
    exchanges = connect_all(2, epoch=7)
    following = exchanges[0].following
    assert following is not None
    following.sendall(HEADER.pack(6, 3, 20) + bytes(20))

    def reduce(exchange: RingExchange) -> list[float]:
        tensor = torch.full((5,), float(1 + exchange.index))
        exchange.all_reduce_([tensor])
        return tensor.tolist()

    assert run_all(exchanges, reduce) == [[3.0] * 5] * 2


def test_connections_with_large_descriptors_are_used() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 1024  # select() accepts smaller ones only
    if hard != resource.RLIM_INFINITY and hard <= least + 16:
        pytest.skip("this machine allows no descriptors above 1024")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, least + 16), hard))
    try:
        exchanges = connect_all(2)
        for exchange in exchanges:
            exchange.following = move_descriptor(exchange.following, least)
            exchange.previous = move_descriptor(exchange.previous, least)
        tensors = [torch.ones(1 << 20), torch.ones(1 << 20)]  # more than the buffers hold
        run_all(exchanges, lambda exchange: exchange.all_reduce_([tensors[exchange.index]]))
        assert tensors[0].min() == tensors[1].max() == 2
        for exchange in exchanges:
            exchange.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def move_descriptor(connection: socket.socket | None, least: int) -> socket.socket:
    """Return the connection with a descriptor of at least `least`."""
    assert connection is not None
    moved = socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, least))
    connection.close()
    moved.setblocking(False)
    return moved


def test_connection_that_identifies_itself_too_slowly_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_exchange, "HELLO_SECONDS", 0.3)
    listener = PeerListener.open("127.0.0.1")
    host, _, port = listener.address.rpartition(":")
    member = RingMember(2, ("g0", "g1"), "g0", 0, DIGEST)
    stopped = threading.Event()

    def send_slowly(slow: socket.socket) -> None:
        for byte in RingMember(2, ("g0", "g1"), "g1", 0, DIGEST).hello():
            if stopped.wait(0.1):
                return
            with suppress(OSError):
                slow.sendall(bytes([byte]))

    with (
        socket.create_connection((host, int(port))) as slow,
        socket.create_connection((host, int(port))) as peer,
    ):
        thread = threading.Thread(target=send_slowly, args=(slow,))
        thread.start()
        peer.sendall(RingMember(2, ("g0", "g1"), "g1", 0, DIGEST).hello())
        started = time.monotonic()
        listener.accept(member, "g1", started + 5).close()
        assert time.monotonic() - started < 2, "40 bytes would take 4 s"
        stopped.set()
        thread.join()
    listener.close()
    with pytest.raises(GroupExchangeError, match="rank 0 of group g0 cannot accept the connection"):
        listener.accept(member, "g1", time.monotonic() + 5)


def test_groups_with_different_sizes_are_reported() -> None:
    exchanges = connect_all(2)
    errors = run_all(
        exchanges, lambda exchange: exchange.all_reduce_([torch.ones(4 + 4 * exchange.index)])
    )
    assert any("the groups have different layouts" in str(error) for error in errors), errors
    assert all(isinstance(error, GroupExchangeError) for error in errors)


def test_sum_is_aborted_from_another_thread() -> None:
    exchanges = connect_all(2, timeout=60)
    timer = threading.Timer(0.1, exchanges[0].close)
    timer.start()
    with pytest.raises(GroupExchangeError):
        exchanges[0].all_reduce_([torch.ones(3)])
    timer.join()


def test_random_bytes_on_the_listening_port_do_not_end_a_run() -> None:
    listeners = [PeerListener.open("127.0.0.1") for _ in range(2)]
    host, _, port = listeners[1].address.rpartition(":")
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, struct.pack("!8sQ", b"megaring", 1)):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(data)
    assert len(connect_all(2, listeners=listeners)) == 2

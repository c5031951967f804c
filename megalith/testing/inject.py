"""Planted slowness and faults: a link that takes its time, results unreadable until waited for,
ranks that hang."""

import functools
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

COLLECTIVES = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast",),
    "isend": ("isend",),
    "irecv": ("irecv",),
}
"""Kinds, and their functions in torch.distributed, new names first (before 2.13 some have
another)."""

MESSAGES = ("isend", "irecv")
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Operators of torch.ops._c10d_functional, which differentiable collectives use, and their
kinds."""

SOURCES = ("input", "input_tensor")
TARGETS = ("output", "output_tensor")
"""What those functions call the tensors they read and write; "tensor" where it is one."""


@dataclass(slots=True)
class Transfer:
    """One collective or message over a slow link."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, isend or irecv."""

    group: str
    """Description of its process group: the axes, for groups of a mesh."""

    nbytes: int
    """What this rank puts on the wire in a ring, or the size of the message."""

    started: float
    """`time.perf_counter()` at the start."""

    delay_seconds: float
    """What the link adds after all ranks have arrived."""

    arrived: float = 0.0
    """`time.perf_counter()` when the result was there."""

    exposed_seconds: float = 0.0
    """How long the caller stood still for it."""

    waits: int = 0
    """How often it was waited for."""


@dataclass(slots=True)
class SlowLink:
    """What went over the link so far, in the order in which it was started."""

    latency_seconds: float
    bytes_per_second: float
    poison: bool
    transfers: list[Transfer] = field(default_factory=list)
    lanes: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    """One thread per group, and per peer and direction for messages: each carries one thing after
    the other."""

    def of(self, *kinds: str) -> list[Transfer]:
        """The transfers of these kinds, of all without any."""
        return [transfer for transfer in self.transfers if not kinds or transfer.kind in kinds]

    def added_seconds(self, *kinds: str) -> float:
        """What the link would add to a program that hides nothing, with the lanes used one at a
        time."""
        return sum(transfer.delay_seconds for transfer in self.of(*kinds))

    def exposed_seconds(self, *kinds: str) -> float:
        """How long this rank stood still for its communication, the link's own delay and slower
        ranks included."""
        return sum(transfer.exposed_seconds for transfer in self.of(*kinds))

    def carry(
        self, kind: str, group: Any, lane: str, nbytes: float, finish: Callable[[], object]
    ) -> "Arrival":
        """Let the lane's thread `finish` the real operation, which waits for the other ranks, and
        then take its time.

        `group`: whatever torch takes for one.
        """
        delay = self.latency_seconds + nbytes / self.bytes_per_second
        transfer = Transfer(kind, _description(group), int(nbytes), time.perf_counter(), delay)
        self.transfers.append(transfer)
        thread = self.lanes.setdefault(
            lane, ThreadPoolExecutor(1, thread_name_prefix=f"link-{lane}")
        )
        return Arrival(transfer, thread.submit(_take_time, transfer, finish))


@dataclass(slots=True, weakref_slot=True, eq=False)
class Arrival:
    """Stands in for the `Work` that torch returns; its result is there after `wait`."""

    transfer: Transfer
    done: "Future[None]"
    deliver: Callable[[], object] = lambda: None
    """Puts the result where the caller expects it, on the caller's thread."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Stand still until the result is there."""
        began = time.perf_counter()
        self.done.result(None if timeout is None else timeout.total_seconds())
        self.transfer.exposed_seconds += time.perf_counter() - began
        if self.transfer.waits == 0:
            self.deliver()
        self.transfer.waits += 1
        return True

    def is_completed(self) -> bool:
        """Whether a wait would return at once."""
        return self.done.done()


def _take_time(transfer: Transfer, finish: Callable[[], object]) -> None:
    finish()
    time.sleep(transfer.delay_seconds)
    transfer.arrived = time.perf_counter()


@contextmanager
def slow_link(
    *, latency_seconds: float = 0.0, bytes_per_second: float = float("inf"), poison: bool = False
) -> Iterator[SlowLink]:
    """Let every collective and message of tensors arrive `latency + bytes / bandwidth` after all
    ranks have come to it.

    The delay is slept on a thread of its own, so that it can be hidden behind work on a machine
    with one core. A call that does not ask for a handle stands still for all of it. `poison`: until
    the wait, what the caller has for a result is nan (or -1). With neither latency nor bandwidth it
    only records who started what, and when.

    Collectives of objects and barriers, which no step needs, keep their speed.
    """
    link = SlowLink(latency_seconds, bytes_per_second, poison)
    try:
        with ExitStack() as patches:
            for patch in _detours(link):
                patches.enter_context(patch)
            yield link
    finally:
        for thread in link.lanes.values():
            thread.shutdown(wait=False)


def _detours(link: SlowLink) -> Iterator[AbstractContextManager[None]]:
    """Each function of torch that starts a collective or a message, or waits for one, replaced by
    one over the link."""
    for kind, names in COLLECTIVES.items():
        name = next(name for name in names if hasattr(dist, name))
        slow = _slow(link, kind, getattr(dist, name))
        yield replaced(dist, name, slow)
        yield replaced(distributed_c10d, name, slow)
    functional: Any = torch.ops._c10d_functional  # its operations are attributes that no stub lists
    ops = {name: getattr(functional, name) for name in (*FUNCTIONAL, "wait_tensor")}
    on_the_way: dict[int, tuple[Arrival, Tensor]] = {}  # by the address of the stand-in
    for name in FUNCTIONAL:
        yield replaced(functional, name, _slow_functional(link, name, ops, on_the_way))
    yield replaced(
        functional, "wait_tensor", functools.partial(_slow_wait, ops["wait_tensor"], on_the_way)
    )


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """While this lasts, `owner.name` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _slow(link: SlowLink, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, a function of torch.distributed, over the link."""
    signature = inspect.signature(original)

    def slow(*args: Any, **kwargs: Any) -> Arrival | None:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group")
        ranks = dist.get_world_size(group)
        if ranks == 1 or any(
            isinstance(value, Tensor) and value.is_meta for value in given.values()
        ):
            result: Arrival | None = original(*args, **kwargs)
            return result
        source, target = _ends(given)
        private = _private_copies(kind, given, source, target) if link.poison else {}
        call = given | private | ({} if kind in MESSAGES else {"async_op": True})
        real = original(**call)
        lane = _description(group) + (_direction(kind, given) if kind in MESSAGES else "")
        arrival = link.carry(kind, group, lane, _wire_bytes(kind, source, target, ranks), real.wait)
        if private and kind != "isend":
            arrival.deliver = functools.partial(target.copy_, private[_present(TARGETS, given)])
        if kind in MESSAGES or given.get("async_op"):
            return arrival
        arrival.wait()
        return None

    return slow


def _slow_functional(
    link: SlowLink, name: str, ops: dict[str, Any], on_the_way: dict[int, tuple[Arrival, Tensor]]
) -> Callable[..., Tensor]:
    """A functional collective over the link: its result may be read after `wait_tensor`."""

    def slow(x: Tensor, *args: Any, **out: Tensor) -> Tensor:
        real: Tensor = ops[name](x, *args, **out)
        if x.is_meta:
            return real
        group = _resolve_process_group(args[-1])
        given = torch.full_like(real, _garbage(real)) if link.poison else real
        finish = functools.partial(ops["wait_tensor"], real)
        kind, place = FUNCTIONAL[name], _description(group)
        arrival = link.carry(kind, group, place, _wire_bytes(kind, x, real, group.size()), finish)
        if link.poison:
            arrival.deliver = functools.partial(given.copy_, real)
        on_the_way[given.data_ptr()] = (arrival, real)
        return given

    return slow


def _slow_wait(
    original: Any, on_the_way: dict[int, tuple[Arrival, Tensor]], started: Tensor
) -> Tensor:
    arrival, _ = on_the_way.pop(started.data_ptr(), (None, started))
    if arrival is None:
        result: Tensor = original(started)
        return result
    arrival.wait()
    return started


def _ends(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What a call reads and what it writes; the same tensor where it works in place."""
    if "tensor" in given:
        return given["tensor"], given["tensor"]
    return given[_present(SOURCES, given)], given[_present(TARGETS, given)]


def _present(names: tuple[str, ...], given: dict[str, Any]) -> str:
    return next((name for name in names if name in given), "tensor")


def _private_copies(
    kind: str, given: dict[str, Any], source: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Tensors for the real operation to work on, so that the caller's may hold garbage until it
    waits."""
    if kind == "isend":
        return {}
    read = source.clone()  # before the garbage: it may be a part of the target
    work = read if target is source else torch.empty_like(target)
    target.fill_(_garbage(target))
    return {_present(SOURCES, given): read, _present(TARGETS, given): work}


def _garbage(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else -1


def _wire_bytes(kind: str, source: Tensor, target: Tensor, ranks: int) -> float:
    """What one rank sends in a ring of that many: each step of the ring carries one part of the
    whole."""
    whole = max(source.nbytes, target.nbytes)
    if kind in MESSAGES:
        return whole
    return whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def _direction(kind: str, given: dict[str, Any]) -> str:
    peer = given.get("dst", given.get("src"))
    return f"{kind}{given.get('group_dst', given.get('group_src')) if peer is None else peer}"


def _description(group: Any) -> str:
    """How the group was described when it was made; its name where nobody did."""
    handle: Any = dist.group.WORLD if group is None else group
    text: str = handle.group_desc or handle.group_name
    return text


@contextmanager
def on_call(owner: Any, name: str, number: int, act: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, call number `number` (from 0) of `owner.name` runs `act` with its arguments
    instead."""
    original, calls = getattr(owner, name), iter(range(number + 1))

    def counted(*args: Any, **kwargs: Any) -> Any:
        return (act if next(calls, None) == number else original)(*args, **kwargs)

    with replaced(owner, name, counted):
        yield


def hang(*_: object, **__: object) -> NoReturn:
    """Never return; the interpreter goes on running other threads."""
    threading.Event().wait()
    raise AssertionError("nobody sets this event")


def die(*_: object, **__: object) -> NoReturn:
    """End this process at once, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be ignored")


def skip(*_: object, **__: object) -> None:
    """Do nothing: this rank leaves out a call that the others make."""

"""Injected delays and faults for tests: slow links, results that are unreadable until waited for,
ranks that hang, and symmetric memory without a GPU."""

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
from importlib import import_module
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed import distributed_c10d

from megalith.parallel import tensor_overlap

COLLECTIVES = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all": ("all_to_all_single",),
    "broadcast": ("broadcast",),
    "isend": ("isend",),
    "irecv": ("irecv",),
}
"""Kind -> its functions in torch.distributed, new names first (some are named differently before
2.13)."""

MESSAGES = ("isend", "irecv")
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Operators of torch.ops._c10d_functional, which differentiable collectives use -> their kinds."""

SOURCES = ("input", "input_tensor")
TARGETS = ("output", "output_tensor")
"""Parameter names of the tensors that those functions read and write; "tensor" if it is one."""


@dataclass(slots=True)
class Transfer:
    """One collective or message over a slow link."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, isend or irecv."""

    group: str
    """Description of its process group: the axes, for groups of a mesh."""

    nbytes: int
    """Bytes that this rank sends in a ring, or the size of the message."""

    started: float
    """`time.perf_counter()` at the start."""

    delay_seconds: float
    """Delay that the link adds after all ranks have arrived."""

    arrived: float = 0.0
    """`time.perf_counter()` when the result was complete."""

    exposed_seconds: float = 0.0
    """Time that the caller was blocked on it."""

    waits: int = 0
    """Number of calls of `wait`."""


@dataclass(slots=True)
class SlowLink:
    """Record of all transfers over the link, in the order in which they were started."""

    latency_seconds: float
    bytes_per_second: float
    poison: bool
    transfers: list[Transfer] = field(default_factory=list)
    threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    """One thread per group, and per peer and direction for messages, which processes transfers in
    order."""

    def select(self, *kinds: str) -> list[Transfer]:
        """Return the transfers of these kinds, or all."""
        return [transfer for transfer in self.transfers if not kinds or transfer.kind in kinds]

    def added_seconds(self, *kinds: str) -> float:
        """Return the delay that the link adds to a program without overlap that runs one transfer
        at a time."""
        return sum(transfer.delay_seconds for transfer in self.select(*kinds))

    def exposed_seconds(self, *kinds: str) -> float:
        """Return how long this rank was blocked on communication, including the link's delay and
        slower ranks."""
        return sum(transfer.exposed_seconds for transfer in self.select(*kinds))

    def carry(
        self, kind: str, group: Any, channel: str, nbytes: float, finish: Callable[[], object]
    ) -> "Arrival":
        """Submit `finish`, which waits for the real operation, and then the delay, to the thread of
        `channel`.

        `group`: any group that torch accepts.
        """
        delay = self.latency_seconds + nbytes / self.bytes_per_second
        transfer = Transfer(kind, _description(group), int(nbytes), time.perf_counter(), delay)
        self.transfers.append(transfer)
        thread = self.threads.setdefault(
            channel, ThreadPoolExecutor(1, thread_name_prefix=f"link-{channel}")
        )
        return Arrival(transfer, thread.submit(_finish_with_delay, transfer, finish))


@dataclass(slots=True, weakref_slot=True, eq=False)
class Arrival:
    """Replacement for torch's `Work`; the result is complete after `wait`."""

    transfer: Transfer
    done: "Future[None]"
    deliver: Callable[[], object] = lambda: None
    """Copies the result to the caller's tensor, on the caller's thread."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is complete."""
        began = time.perf_counter()
        self.done.result(None if timeout is None else timeout.total_seconds())
        self.transfer.exposed_seconds += time.perf_counter() - began
        if self.transfer.waits == 0:
            self.deliver()
        self.transfer.waits += 1
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return self.done.done()


def _finish_with_delay(transfer: Transfer, finish: Callable[[], object]) -> None:
    finish()
    time.sleep(transfer.delay_seconds)
    transfer.arrived = time.perf_counter()


@contextmanager
def slow_link(
    *, latency_seconds: float = 0.0, bytes_per_second: float = float("inf"), poison: bool = False
) -> Iterator[SlowLink]:
    """Delay every collective and message of tensors by `latency + bytes / bandwidth` after all
    ranks have started it.

    The delay is slept on a separate thread, so that it can be overlapped with work on a machine
    with one core. A call without `async_op` blocks for all of it. `poison`: until the wait, the
    result holds nan (or -1). With neither latency nor bandwidth it only records the transfers and
    their times.

    Collectives of objects and barriers, which no step needs, are not delayed.
    """
    link = SlowLink(latency_seconds, bytes_per_second, poison)
    try:
        with ExitStack() as patches:
            for patch in _build_patches(link):
                patches.enter_context(patch)
            yield link
    finally:
        for thread in link.threads.values():
            thread.shutdown(wait=False)


def _build_patches(link: SlowLink) -> Iterator[AbstractContextManager[None]]:
    """Yield patches that route each function of torch that starts or waits for a collective or
    message over the link."""
    for kind, names in COLLECTIVES.items():
        name = next(name for name in names if hasattr(dist, name))
        slow = _slow(link, kind, getattr(dist, name))
        yield patched(dist, name, slow)
        yield patched(distributed_c10d, name, slow)
    functional: Any = torch.ops._c10d_functional  # its operators have no type stubs
    ops = {name: getattr(functional, name) for name in (*FUNCTIONAL, "wait_tensor")}
    in_flight: dict[int, tuple[Arrival, Tensor]] = {}  # by the address of the placeholder
    for name in FUNCTIONAL:
        yield patched(functional, name, _slow_functional(link, name, ops, in_flight))
    yield patched(
        functional, "wait_tensor", functools.partial(_slow_wait, ops["wait_tensor"], in_flight)
    )


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set `owner.name` to `value` inside the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _slow(link: SlowLink, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original`, a function of torch.distributed, routed over the link."""
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
        channel = _description(group) + (_direction(kind, given) if kind in MESSAGES else "")
        arrival = link.carry(
            kind, group, channel, _wire_bytes(kind, source, target, ranks), real.wait
        )
        if private and kind != "isend":
            arrival.deliver = functools.partial(target.copy_, private[_present(TARGETS, given)])
        if kind in MESSAGES or given.get("async_op"):
            return arrival
        arrival.wait()
        return None

    return slow


def _slow_functional(
    link: SlowLink, name: str, ops: dict[str, Any], in_flight: dict[int, tuple[Arrival, Tensor]]
) -> Callable[..., Tensor]:
    """Return a functional collective routed over the link: its result may be read after
    `wait_tensor`."""

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
        in_flight[given.data_ptr()] = (arrival, real)
        return given

    return slow


def _slow_wait(
    original: Any, in_flight: dict[int, tuple[Arrival, Tensor]], started: Tensor
) -> Tensor:
    arrival, _ = in_flight.pop(started.data_ptr(), (None, started))
    if arrival is None:
        result: Tensor = original(started)
        return result
    arrival.wait()
    return started


def _ends(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the tensors that a call reads and writes; the same one if it works in place."""
    if "tensor" in given:
        return given["tensor"], given["tensor"]
    return given[_present(SOURCES, given)], given[_present(TARGETS, given)]


def _present(names: tuple[str, ...], given: dict[str, Any]) -> str:
    return next((name for name in names if name in given), "tensor")


def _private_copies(
    kind: str, given: dict[str, Any], source: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Return tensors for the real operation, so that the caller's may hold garbage until the
    wait."""
    if kind == "isend":
        return {}
    read = source.clone()  # before poisoning: it may be a part of the target
    work = read if target is source else torch.empty_like(target)
    target.fill_(_garbage(target))
    return {_present(SOURCES, given): read, _present(TARGETS, given): work}


def _garbage(x: Tensor) -> float | int:
    return float("nan") if x.is_floating_point() else -1


def _wire_bytes(kind: str, source: Tensor, target: Tensor, ranks: int) -> float:
    """Return what one rank sends in a ring of `ranks` ranks: each step carries one part of the
    tensor."""
    whole = max(source.nbytes, target.nbytes)
    if kind in MESSAGES:
        return whole
    return whole * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def _direction(kind: str, given: dict[str, Any]) -> str:
    peer = given.get("dst", given.get("src"))
    return f"{kind}{given.get('group_dst', given.get('group_src')) if peer is None else peer}"


def _description(group: Any) -> str:
    """Return the description of a group, or its name."""
    handle: Any = dist.group.WORLD if group is None else group
    text: str = handle.group_desc or handle.group_name
    return text


@contextmanager
def on_call(owner: Any, name: str, number: int, act: Callable[..., Any]) -> Iterator[None]:
    """Inside the context, call number `number` (from 0) of `owner.name` runs `act` with its
    arguments instead."""
    original, calls = getattr(owner, name), iter(range(number + 1))

    def counted(*args: Any, **kwargs: Any) -> Any:
        return (act if next(calls, None) == number else original)(*args, **kwargs)

    with patched(owner, name, counted):
        yield


def hang(*_: object, **__: object) -> NoReturn:
    """Never return; other threads of the interpreter keep running."""
    threading.Event().wait()
    raise AssertionError("this event is never set")


def die(*_: object, **__: object) -> NoReturn:
    """Kill this process, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be ignored")


def skip(*_: object, **__: object) -> None:
    """Do nothing: this rank skips a call that the others make."""


# --- fused collective matmul without a GPU: torch's fallback of its operators, run on gloo ranks


@contextmanager
def fused_on_cpus() -> Iterator[None]:
    """Make parallel.collective_matmul=fused available on CPUs in this process.

    The operators are called as on GPUs, by name and with the same arguments; their implementation
    is an all-gather and a matmul, or a matmul and a reduce-scatter, in sequence. So it tests our
    calls, not the kernels.
    """
    defined = import_module("torch.distributed._symmetric_memory")
    with (
        torch.library._scoped_library("symm_mem", "FRAGMENT") as library,
        patch.object(tensor_overlap, "find_fusion_obstacle", lambda places: None),
    ):
        library.impl("fused_all_gather_matmul", defined._fused_all_gather_matmul_fallback, "CPU")
        library.impl(
            "fused_matmul_reduce_scatter", defined._fused_matmul_reduce_scatter_fallback, "CPU"
        )
        yield

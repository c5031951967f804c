"""One rank of a job: reads its rank from the environment, joins the other ranks, checks that all
have the same settings."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megalith.errors import ConfigError, RankError
from megalith.launch.launcher import LISTENER, RANK_VARIABLES, in_worker, threads_per_rank
from megalith.launch.rounds import SERVED_STORE
from megalith.launch.watchdog import wait_for
from megalith.observe.flight import FlightRecorder
from megalith.observe.limits import available_cores
from megalith.parallel.group import Group, gather_objects, single_rank_group
from megalith.plan.grid import Grid

_log = logging.getLogger(__name__)

MAX_DIFFERENCES = 10
"""Maximum number of listed settings that differ between ranks."""

JOIN_GRACE_SECONDS = 10.0
"""How much longer than rank 0 the others wait for absent ranks: rank 0 reports which are absent."""


@dataclass(frozen=True, slots=True)
class Worker:
    """Rank and device of this process."""

    rank: int
    world: int
    local_rank: int
    """Rank among those on this machine."""
    local_world: int
    device: torch.device
    backend: str
    """Backend of torch.distributed: gloo for CPU tensors, and nccl for those on a GPU."""
    threads: int | None
    """CPU threads unless set by train.threads; None: torch's default or OMP_NUM_THREADS."""
    listener: int | None = None
    """On rank 0 of our own launcher: the file descriptor that listens at MASTER_PORT."""
    store_port: int | None = None
    """Port at which a process of our own launcher serves the store; None: rank 0 serves it."""

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> "Worker":
        """Read the variables that the launcher has set; without a launcher, this process is the
        only rank.

        Raises:
            ConfigError: only some of the variables are set, one is not a number, or there is no
            such GPU.
        """
        if not in_worker(environment):
            return _worker(rank=0, world=1, local_rank=0, local_world=1, threads=None)
        missing = [name for name in RANK_VARIABLES if name not in environment]
        if missing:
            given = ", ".join(
                f"{name}={environment[name]}" for name in RANK_VARIABLES if name in environment
            )
            raise ConfigError(
                f"{given} is set in the environment, but not {', '.join(missing)}. Use torchrun or "
                "--nproc, which set all of them, or unset them all to run one process."
            )
        rank, world = _number(environment, "RANK", "WORLD_SIZE")
        local_rank, local_world = _number(environment, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        threads = _threads(environment, local_world, first=rank == 0)
        worker = _worker(
            rank=rank, world=world, local_rank=local_rank, local_world=local_world, threads=threads
        )
        if SERVED_STORE in environment:
            return replace(worker, store_port=int(environment["MASTER_PORT"]))
        listener = environment.get(LISTENER)
        return worker if listener is None else replace(worker, listener=int(listener))


def _worker(
    *, rank: int, world: int, local_rank: int, local_world: int, threads: int | None
) -> Worker:
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        if local_rank >= gpus:
            raise ConfigError(
                f"LOCAL_RANK={local_rank}, but this machine has {gpus} GPUs. Use --nproc {gpus} or "
                f"fewer, or set CUDA_VISIBLE_DEVICES to nothing to run on the CPU."
            )
        device, backend = torch.device(f"cuda:{local_rank}"), "cpu:gloo,cuda:nccl"
    return Worker(rank, world, local_rank, local_world, device, backend, threads)


def _number(environment: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """Return an index and a count."""
    place, places = environment[index], environment[count]
    if not place.isdecimal() or not places.isdecimal() or int(place) >= int(places):
        raise ConfigError(
            f"{index}={place} and {count}={places} in the environment are not an index and a "
            f"count. {index} must be one of 0 to {count} - 1: use torchrun or --nproc, which set "
            "both."
        )
    return int(place), int(places)


def _threads(environment: Mapping[str, str], local_world: int, *, first: bool) -> int | None:
    """Return the threads of this rank: its share of the cores, unless the user has set
    OMP_NUM_THREADS."""
    asked, torchrun = environment.get("OMP_NUM_THREADS"), "TORCHELASTIC_RUN_ID" in environment
    if asked is not None and not (torchrun and asked == "1"):
        return None
    threads = threads_per_rank(available_cores(), local_world)
    if torchrun and first and threads > 1:
        _log.warning(
            "torchrun sets OMP_NUM_THREADS=1; using %d threads per rank (train.threads to change)",
            threads,
        )
    return threads


def set_threads(worker: Worker, threads: int | None) -> None:
    """Use `threads` CPU threads in this process; None: the default of `worker`."""
    chosen = threads if threads is not None else worker.threads
    if chosen is not None:
        torch.set_num_threads(chosen)


def open_rendezvous(worker: Worker, *, timeout_seconds: float, prefix: str = "") -> Store | None:
    """Open the rendezvous store and wait until all ranks have joined; None for a job of one rank.

    prefix: of all keys, which distinguishes the rounds of a job that use one store.

    Raises:
        RankError: on every rank, with the ranks that did not join within `timeout_seconds`.
    """
    if worker.world == 1:
        return None
    store = _open_store(worker, timedelta(seconds=timeout_seconds + JOIN_GRACE_SECONDS))
    store = PrefixStore(prefix, store) if prefix else store
    store.set(f"here/{worker.rank}", "")
    if worker.rank == 0:
        keys = [f"here/{rank}" for rank in range(worker.world)]
        wait_for(store, keys, timeout_seconds)  # absent ranks are listed below
        store.set(
            "absent", json.dumps([rank for rank, key in enumerate(keys) if not store.check([key])])
        )
    absent = json.loads(store.get("absent"))
    if absent:
        raise RankError(
            f"ranks {absent} of {worker.world} did not join within "
            f"parallel.timeout_seconds={timeout_seconds:g}. Read their output, and start as many "
            "ranks as the launcher expects."
        )
    return store


def _open_store(worker: Worker, timeout: timedelta) -> Store:
    if worker.store_port is not None:
        port = worker.store_port
        return TCPStore("127.0.0.1", port, None, False, timeout=timeout, wait_for_workers=False)
    if worker.listener is not None:
        return TCPStore(
            "127.0.0.1",
            0,
            None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=worker.listener,
        )
    store: Store = next(iter(rendezvous("env://", worker.rank, worker.world, timeout=timeout)))[0]
    return store


def clone_store(store: Store) -> Store:
    """Return a second connection to the store, for another thread: a waiting connection blocks
    others."""
    cloned: Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    return cloned


def connect(
    worker: Worker,
    *,
    timeout_seconds: float,
    store: Store | None = None,
    flight: FlightRecorder | None = None,
) -> Group:
    """Initialize torch.distributed and return the group of all ranks; a job of one rank has no
    process group.

    Collectives that wait longer than `timeout_seconds` fail. `store` comes from
    `open_rendezvous`, which is called if it is None.
    `flight` records this rank's collectives.
    """
    if worker.device.type != "cpu":
        torch.accelerator.set_device_index(worker.local_rank)
    if worker.world == 1:
        return single_rank_group("world")
    rendezvous_store = (
        store if store is not None else open_rendezvous(worker, timeout_seconds=timeout_seconds)
    )
    assert rendezvous_store is not None
    dist.init_process_group(
        worker.backend,
        store=PrefixStore("groups", rendezvous_store),
        rank=worker.rank,
        world_size=worker.world,
        timeout=timedelta(seconds=timeout_seconds),
    )
    handle = dist.group.WORLD
    assert handle is not None
    return Group(
        ("world",), tuple(range(worker.world)), worker.rank, handle, handle.group_name, flight
    )


def disconnect(worker: Worker, *, failed: bool = False, stays: bool = False) -> None:
    """Destroy the process groups. `failed`: this rank leaves with an error; `stays`: its process
    will join another group."""
    if failed and stays:
        abort_device_groups(worker)
    elif failed and worker.device.type != "cpu":
        # NCCL would wait for operations that cannot finish; process exit closes its connections
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    elif stays:
        # torch does not reset it when an initialization fails, and its peers would not find the
        # names of the next groups
        dist.distributed_c10d._world.group_count = 0


def abort_device_groups(worker: Worker) -> None:
    """Abort the operations of all process groups on a GPU, so that threads that wait for them get
    an error. Gloo's are ended by closing their connections (`OpenedSockets`)."""
    if worker.device.type == "cpu":
        return
    for group in [*dist.distributed_c10d._world.pg_names]:
        abort = getattr(group, "abort", None)
        if abort is not None:
            abort()


def describe_slow_tp(grid: Grid, local_world: int) -> str | None:
    """Return why a grid is slow on machines of `local_world` ranks each; None if tensor parallelism
    stays inside a machine."""
    tp, stride = grid.strides("tp")
    if all(len({rank // local_world for rank in ranks}) == 1 for ranks in grid.groups(("tp",))):
        return None
    fits = [
        size for size in range(1, tp + 1) if tp % size == 0 and local_world % (size * stride) == 0
    ]
    return (
        f"parallel.tp={tp} spans machines of {local_world} ranks each, so every layer waits "
        f"several times for the network. Set parallel.tp to {max(fits, default=1)}, or begin "
        "parallel.order with tp."
    )


def check_consistent_settings(settings: Mapping[str, object], group: Group) -> None:
    """Check that all ranks were started with the same settings; collective.

    Exchanges one hash; only if the hashes differ, the settings.

    Raises:
        ConfigError: on every rank, with the settings that differ and their values.
    """
    text = json.dumps(settings, sort_keys=True, default=str)
    if len(set(gather_objects(hashlib.sha256(text.encode()).hexdigest(), group))) == 1:
        return
    all_settings = [json.loads(str(other)) for other in gather_objects(text, group)]
    names = sorted({name for other in all_settings for name in other})
    lines = [f"  {line}" for name in names if (line := _difference(name, all_settings))]
    more = [f"  and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    listed = "\n".join([*lines[:MAX_DIFFERENCES], *more])
    raise ConfigError(
        f"ranks were started with different settings:\n{listed}\nOn every rank, use the same "
        "command and files."
    )


def _difference(name: str, all_settings: list[dict[str, object]]) -> str:
    """`optim.lr: 0.1 on ranks 0, 2; 0.2 on rank 1`; empty when all agree."""
    ranks: dict[str, list[str]] = {}
    for rank, settings in enumerate(all_settings):
        ranks.setdefault(json.dumps(settings[name]) if name in settings else "not set", []).append(
            str(rank)
        )
    if len(ranks) == 1:
        return ""
    texts = [
        f"{value} on rank{'s' if len(value_ranks) > 1 else ''} {', '.join(value_ranks)}"
        for value, value_ranks in ranks.items()
    ]
    return f"{name}: {'; '.join(texts)}"

"""Supervisor of the engine: starts the process of each replica, or of replicas that share experts,
restarts those that end, and stops them with the server."""

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.launch.launcher import threads_per_rank
from megalith.observe.limits import available_cores
from megalith.serve.client import EngineClient
from megalith.serve.errors import ApiError
from megalith.serve.transport import socket_address

_logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time for the engine processes to end after their last request (heuristic)."""

HEARTBEAT_S = 5.0
RESPONSE_TIMEOUT_S = 600.0
"""A replica that does not respond to heartbeats for so long is killed. It responds between two
steps, and a step of a large model on CPUs can take minutes, so the limit is that of collectives
(heuristic). It is only for processes that hang: one that ends is detected at once."""

MAX_BACKOFF_S = 30.0
"""Longest time before a replica is started again; 1 s at first, then twice as long each time that
it ends before it is ready (heuristic)."""


@dataclass(slots=True)
class EngineSupervisor:
    """The processes of an engine, and its client."""

    client: EngineClient
    settings: dict[str, Any]
    """See `EngineSettings`."""

    is_stopping: bool = False
    _processes: dict[int, asyncio.subprocess.Process] = field(default_factory=dict)
    """By the first replica of a group."""

    _restarting: set[int] = field(default_factory=set)
    """First replicas of groups whose process ends as it should."""

    async def start(self) -> None:
        """Start the process of every group of replicas."""
        for group in self.client.groups:
            await self._start_process(group)

    async def watch(self) -> int | None:
        """Restart groups of replicas that end. Return when the only group, or one that never was
        ready, has ended: all requests fail, and the result is its exit code; None: it was
        stopped."""
        tasks = [asyncio.create_task(self._watch_group(group)) for group in self.client.groups]
        heartbeats = asyncio.create_task(self._check_heartbeats())
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in (*tasks, heartbeats):
                task.cancel()

    async def restart_replica(self, replica: int) -> None:
        """Replace the process of a replica, and of those that share experts with it, by one that
        reads the model again. They get no new requests, and end when those that they have are
        finished.

        Raises:
            ApiError: 409, it is not ready, or has requests that do not finish because the server is
                paused; 500, the new process cannot load the model.
        """
        client, group = self.client, self.client.find_group(replica)
        first, process = group.start, self._processes[group.start]
        if first not in client.router.replicas or first in self._restarting:
            raise ApiError(
                409, f"replica={replica} is not ready: it is being restarted.", "replica"
            )
        check_requests_can_finish(client, replica)
        states = [client.router.replicas[each] for each in group]
        for each in group:
            client.router.drain(each)
        try:
            await client.wait_for(
                lambda: (
                    client.router.replicas.get(first) is not states[0]
                    or not any(state.num_sequences for state in states)
                )
            )
        except asyncio.CancelledError:  # the client disconnected
            for state in states:
                state.is_draining = False
            client.dispatch_waiting()
            raise
        if client.router.replicas.get(first) is states[0]:
            self._restarting.add(first)
            client.stop_replica(first)
        await client.wait_for(
            lambda: (
                self._processes[first] is not process
                and (first in client.router.replicas or first in client.load_errors)
                and first not in client.loading_weights
            )
        )
        if first in client.load_errors:
            raise ApiError(
                500,
                f"replica={replica} cannot load the model: {client.load_errors[first]} It is "
                "tried again; the other replicas have the requests.",
                "replica",
            )

        if "weights" in client.router.replicas[first].differences:
            raise ApiError(
                500,
                f"replica={replica} cannot load the weights of the last update; the log has the "
                "reason. Send POST /update_weights again.",
                "replica",
            )

    async def stop(self) -> None:
        """End the processes, by force if they do not end in time."""
        self.is_stopping = True
        try:
            if self.client.router.replicas and self.client.failed is None:
                await self.client.call("shutdown", timeout_s=STOP_SECONDS)
        except ApiError:
            _logger.warning("the engine does not answer; it is killed")
        await asyncio.gather(*map(_end_process, self._processes.values()))
        await self.client.close()

    async def _start_process(self, group: range) -> None:
        groups = self.client.groups
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megalith.serve.engine_process",
            stdin=asyncio.subprocess.PIPE,
            env=replica_environment(
                os.environ,
                groups.index(group),
                len(groups),
                num_ranks=int(self.settings["nproc"]),
            ),
            start_new_session=True,  # a terminal's Ctrl-C is for the HTTP process
        )
        settings = self.settings | {
            "identities": self.client.start_replica(group.start),
            "replica": group.start if self.client.num_replicas > 1 else None,
        }
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        self._processes[group.start] = process

    async def _watch_group(self, group: range) -> int | None:
        """Restart a group of replicas whenever it ends; see `watch`."""
        backoff_s, first = 1.0, group.start
        while True:
            code = await self._processes[first].wait()
            if self.is_stopping:
                return None
            if not self.client.ready.done():  # its last message may not have arrived
                await asyncio.wait({self.client.ready}, timeout=1)
            if len(self.client.groups) == 1 or first not in self.client.loaded:
                text = "the engine process has ended. Restart the server."
                self.client.fail(ApiError(503, text))
                return code
            if first in self.client.router.replicas:
                backoff_s = 1.0
            if first in self._restarting:
                self._restarting.remove(first)
                self.client.handle_replica_failure(first)
            else:
                _logger.error(
                    "replica %s of the engine ended with code %s; it is restarted in %g s, and its "
                    "requests continue on others",
                    " and ".join(map(str, group)),
                    code,
                    backoff_s,
                )
                self.client.handle_replica_failure(first)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            await self._start_process(group)

    async def _check_heartbeats(self) -> None:
        """Kill replicas that do not respond, so that they are restarted."""
        while self.client.num_replicas > 1:
            await asyncio.sleep(HEARTBEAT_S)
            self.client.expire_waiting()
            if len(self.client.groups) == 1:  # no other has its requests
                continue
            max_heartbeats = int(RESPONSE_TIMEOUT_S / HEARTBEAT_S)
            for replica in self.client.find_unresponsive(max_heartbeats=max_heartbeats):
                _logger.error("replica %d of the engine does not respond; it is killed", replica)
                process = self._processes[self.client.find_group(replica).start]
                if process.returncode is None:
                    process.kill()
            self.client.send_heartbeats()


def check_requests_can_finish(client: EngineClient, replica: int) -> None:
    """Check that the requests of a replica, if it has any, can finish.

    Raises:
        ApiError: 409, the server is paused or suspended.
    """
    group = client.find_group(replica)
    num_sequences = sum(client.router.replicas[each].num_sequences for each in group)
    if client.state.is_paused and num_sequences:
        commands = "/resume" if client.state.suspension is None else "/wake_up, and then /resume,"
        raise ApiError(
            409,
            f"replica={replica} has {num_sequences} sequences, which do not finish while the "
            f"server is {client.state.name}. POST {commands} first.",
            "replica",
        )


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """Wait for the end of a process, whose standard input is closed; kill it if it takes long."""
    assert process.stdin is not None, "it is a pipe"
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


@asynccontextmanager
async def open_engine(settings: dict[str, Any]) -> AsyncIterator[EngineSupervisor]:
    """Start the processes of an engine, for the time of a context; they also end when this process
    does.

    `settings`: see `EngineSettings`, without address, identity and replica; the number of processes
    is that of all replicas.
    """
    num_replicas = settings["parallel"]["dp"]
    num_groups = settings["parallel"]["dp_replicate"] or num_replicas
    group_size = num_replicas // num_groups
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        address = socket_address(Path(folder))
        client = EngineClient(
            address,
            num_replicas=num_replicas,
            group_size=group_size,
            seed=int(settings["engine"]["seed"]),
        )
        of_group = {
            "address": address,
            "nproc": settings.get("nproc", 1) // num_groups,
            "num_replicas": num_replicas,
            "parallel": settings["parallel"] | {"dp": group_size, "dp_replicate": 1},
        }
        supervisor = EngineSupervisor(client, settings | of_group)
        try:
            await supervisor.start()
            yield supervisor
        finally:
            await supervisor.stop()


def replica_environment(
    environment: Mapping[str, str], group: int, num_groups: int, *, num_ranks: int
) -> dict[str, str]:
    """Return the environment of a group of replicas on `num_ranks` ranks: its part of the GPUs, and
    of the cores unless OMP_NUM_THREADS is set."""
    if num_groups == 1:
        return dict(environment)
    threads = threads_per_rank(available_cores(), num_ranks * num_groups)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    first = group * num_ranks
    devices = [str(number) for number in range(first, first + num_ranks)]
    if visible is not None:
        devices = visible.split(",")[first : first + num_ranks]
    own = {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    return {"OMP_NUM_THREADS": str(threads), **environment, **own}

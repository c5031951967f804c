"""A pool of worker processes that tests and proofs borrow as ranks; it stays alive for the whole
run.

Importing torch takes seconds and a call tens of milliseconds, so the workers are started once, on
first use, and each call gives them a fresh gloo process group. A worker that fails, hangs or dies
ends its call with a `RankError`.

On Linux a fork server starts the workers in milliseconds: a process with one thread, which has
imported torch and the modules of this package that the parent has imported. (The parent has threads
and cannot fork safely.) Its workers share its hash seed and what modules read from the environment
during their import. Elsewhere each worker is a new Python process: on macOS, system libraries that
torch loads do not support fork.
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from megalith.errors import RankError
from megalith.launch.launcher import (
    Failure,
    describe,
    die_with_parent,
    exception_failure,
    exit_failure,
    explain_exit,
)
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import Mesh

Result = TypeVar("Result")

GRACE_SECONDS = 2.0
"""How long the other ranks may take to notice that one has failed; their own errors are then shown
too."""

START_SECONDS = 180.0
"""A worker that has not imported torch by then never will; 1 s on an idle machine, 11 s with four
jobs per core."""

OUTPUT_SHOWN = 4000
"""Characters of the failed rank's own output that an error repeats."""


def run_ranks(
    fn: Callable[..., Result], world: int, *args: Any, timeout: float = 60.0
) -> list[Result]:
    """Call `fn(rank, world, *args)` on `world` processes joined by gloo, and return what each rank
    returned.

    `fn` is a function of a module or test file; it finds the default process group initialized.
    Arguments and results are pickled; tensors travel by value.

    Raises:
        RankError: a rank raised, died, or did not finish within `timeout` seconds; the text starts
            with the rank that failed first and its traceback, or shows where every rank hangs.
    """
    return _pool(os.getpid()).run(fn, world, args, timeout=timeout)


def world_group(rank: int, world: int, *axes: str) -> Group:
    """All ranks of this call as one group along `axes`; called in the function that `run_ranks`
    runs."""
    if world == 1:
        return single_rank_group(*axes)
    handle = dist.group.WORLD
    assert handle is not None, "world_group() is for functions that run_ranks runs"
    return Group(
        axes=axes, ranks=tuple(range(world)), rank=rank, handle=handle, name=handle.group_name
    )


@functools.cache
def _pool(
    owner: int,
) -> "RankPool":  # by process, since a fork must not talk through its parent's pipes
    pool = RankPool()
    atexit.register(pool.close)
    return pool


@dataclass(frozen=True, slots=True)
class Call:
    """What one worker is asked to do."""

    module: str
    """Name under which the parent knows the function's module."""

    path: str
    """Its file, since a test file cannot be imported by name."""

    function: str
    rank: int
    world: int
    store: str
    """File through which the ranks of this call find each other."""


@dataclass(slots=True)
class _ForkedProcess:
    """A worker started by the fork server, with the methods of `subprocess.Popen` used here."""

    server: "_Worker"
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                reply = self.server.request(self.pid)
                self.returncode = int(reply) if reply else None
            except (OSError, RankError):  # the fork server has ended, and its workers with it
                self.returncode = -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"worker process {self.pid}", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # the fork server keeps the pid until then
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(slots=True, eq=False)
class _Worker:
    """The parent's view of one worker process, or of the fork server."""

    process: subprocess.Popen[bytes] | _ForkedProcess
    connection: Connection
    folder: Path

    def send(self, *messages: bytes) -> None:
        try:
            for message in messages:
                self.connection.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it is dead: waiting for its answer will say how it ended

    def greet(self) -> bytes:
        """Wait until it has imported what it needs, so that no call pays for that with its time."""
        try:
            if self.connection.poll(START_SECONDS):
                return self.connection.recv_bytes()
            ended = f"was not ready after {START_SECONDS:g} s"
        except (EOFError, ConnectionResetError):
            ended = explain_exit(self._exit_code())
        raise RankError(
            f"a worker process {ended}. Run fewer at once if memory is short. Its "
            f"output:\n{self.output().strip()}"
        )

    def request(self, message: object, *handles: int) -> bytes:
        """Return the reply of the fork server to a request."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # greet() reports its end
                self.connection.send(message)
                for handle in handles:
                    send_handle(self.connection, handle, self.process.pid)
            return self.greet()
        except BaseException:  # Ctrl-C too: the next request must not get this reply
            self.kill()
            raise

    def answer(self, rank: int) -> "Answer":
        """What it sent back, or how it ended without a word."""
        try:
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return Answer("death", exit_failure(rank, self._exit_code()))
        answer: Answer = pickle.loads(message)  # lint: allow pickle-load: we started the sender
        return answer

    def kill(self) -> int:
        self.process.kill()
        self.connection.close()
        return self.process.wait()

    def output(self) -> str:
        """What it printed during this call."""
        return (self.folder / "output").read_text(errors="replace")

    def _exit_code(self) -> int:
        try:
            return self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # it closed the pipe and lives on
            return self.kill()

    def stacks(self) -> str:
        """Where each of its threads is now; asks it to say so."""
        file = self.folder / "stacks"
        before = file.stat().st_size
        self.process.send_signal(signal.SIGUSR2)
        deadline = time.monotonic() + 2.0
        while (
            file.stat().st_size == before
            and time.monotonic() < deadline
            and self.process.poll() is None
        ):
            time.sleep(0.02)
        time.sleep(0.1)  # the rest of the dump follows the first write at once
        return (
            file.read_text(errors="replace")[before:].strip()
            or "no stack: it does not answer signals"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one rank of a call."""

    kind: Literal["result", "failure", "death"]
    """`death`: the process ended, or cannot be used again."""

    value: Any  # whatever the function returned, or a Failure


@dataclass(slots=True)
class RankPool:
    """Worker processes kept for many calls; more are started when a call needs more."""

    workers: list[_Worker] = field(default_factory=list)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="megalith-ranks-")))
    fork_server: _Worker | None = None
    calls: int = 0
    started: int = 0

    def run(
        self, fn: Callable[..., Result], world: int, args: Sequence[Any], *, timeout: float
    ) -> list[Result]:
        """One call of `run_ranks`."""
        messages = self._messages(fn, world, args)
        self._grow(world)
        ranks = dict(enumerate(self.workers[:world]))
        answers: dict[int, Answer] = {}
        try:
            for rank, worker in ranks.items():
                worker.send(*messages[rank])
            _collect(ranks, answers, timeout)
            return _results(ranks, answers, timeout)
        finally:  # after Ctrl-C too
            self._release(ranks, answers)

    def close(self) -> None:
        """End the workers; the pool may be used again."""
        for worker in self.workers:
            worker.connection.close()  # an idle worker ends itself on this
        for worker in self.workers:
            try:
                worker.process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                worker.kill()
        self.workers.clear()
        if self.fork_server is not None:
            self.fork_server.kill()
            self.fork_server = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def _messages(
        self, fn: Callable[..., Any], world: int, args: Sequence[Any]
    ) -> list[tuple[bytes, bytes]]:
        name = fn.__qualname__
        if "<" in name:
            raise TypeError(
                f"{name} cannot be sent to ranks by name. Pass a function defined at module level."
            )
        self.calls += 1
        arguments = pickle.dumps(tuple(args))
        path, store = inspect.getfile(fn), str(self.folder / f"store{self.calls}")
        calls = [Call(fn.__module__, path, name, rank, world, store) for rank in range(world)]
        return [(pickle.dumps(call), arguments) for call in calls]

    def _grow(self, world: int) -> None:
        self.folder.mkdir(exist_ok=True)
        self.workers = [worker for worker in self.workers if worker.process.poll() is None]
        new: list[_Worker] = []
        try:
            while len(self.workers) + len(new) < world:
                new.append(self._start())
            for worker in new:
                worker.greet()
        except BaseException:  # Ctrl-C too
            for worker in new:
                worker.kill()
            raise
        self.workers += new

    def _start(self) -> _Worker:
        if sys.platform != "linux":
            return _execute("serve", self._make_folder())
        if self.fork_server is None or self.fork_server.process.poll() is not None:
            self.fork_server = _execute("run_fork_server", self._make_folder())
            self.fork_server.request(_modules_to_preload())
        return _fork(self.fork_server, self._make_folder())

    def _make_folder(self) -> Path:
        self.started += 1
        folder = self.folder / f"process{self.started}"
        folder.mkdir()
        for name in ("output", "stacks"):
            (folder / name).touch()
        return folder

    def _release(self, ranks: Mapping[int, _Worker], answers: Mapping[int, "Answer"]) -> None:
        """Let the workers of a call go on to the next; if one died or never answered, trust none of
        them."""
        if len(answers) == len(ranks) and all(
            answer.kind != "death" for answer in answers.values()
        ):
            for worker in ranks.values():
                worker.send(RELEASE)
            return
        for worker in ranks.values():
            worker.kill()
        self.workers = [worker for worker in self.workers if worker not in ranks.values()]


PROGRAM = (
    "import sys; from megalith.testing import ranks; getattr(ranks, sys.argv[1])(*sys.argv[2:])"
)
"""What a worker or the fork server runs; this file must not be its `__main__`, or its answers would
name classes the parent lacks."""

RELEASE = b"release"
"""Sent to the ranks when all have answered, so that none closes its connections while a peer still
reads from them."""


def _collect(ranks: Mapping[int, _Worker], answers: dict[int, Answer], timeout: float) -> None:
    """Fill `answers` as they come, until all are there or time is up; a failure leaves the others
    little of it."""
    deadline = time.monotonic() + timeout
    while waiting := [rank for rank in ranks if rank not in answers]:
        ready = wait(
            [ranks[rank].connection for rank in waiting], max(0.0, deadline - time.monotonic())
        )
        if not ready:
            return
        for rank in waiting:
            if ranks[rank].connection in ready:
                answers[rank] = ranks[rank].answer(rank)
                if answers[rank].kind != "result":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _results(
    ranks: Mapping[int, _Worker], answers: Mapping[int, Answer], timeout: float
) -> list[Any]:
    failures: list[Failure] = [
        answer.value for answer in answers.values() if answer.kind != "result"
    ]
    late = {rank: worker for rank, worker in ranks.items() if rank not in answers}
    if failures:
        raise RankError(_failure_text(failures, late, ranks))
    if late:
        raise RankError(_hang_text(late, len(ranks), timeout))
    return [answers[rank].value for rank in ranks]


def _failure_text(
    failures: Sequence[Failure], late: Iterable[int], ranks: Mapping[int, _Worker]
) -> str:
    lines = [
        describe(failures, dict.fromkeys(late, f"was still running {GRACE_SECONDS:g} s later"))
    ]
    for failure in failures:
        output = ranks[failure.rank].output().strip()
        if output:
            lines.append(f"output of rank {failure.rank}:\n{output[-OUTPUT_SHOWN:]}")
    return "\n".join(lines)


def _hang_text(late: Mapping[int, _Worker], world: int, timeout: float) -> str:
    lines = [
        f"{len(late)} of {world} ranks did not finish within {timeout:g} s; this is where they are:"
    ]
    lines += [f"rank {rank}:\n{worker.stacks()}" for rank, worker in late.items()]
    done = sorted(set(range(world)) - set(late))
    lines += [f"ranks {done} had finished."] if done else []
    return "\n".join(lines)


def _modules_to_preload() -> list[str]:
    """What workers import: `torch.manual_seed` the first, and test files the others."""
    names = [name for name in sys.modules if name == "pytest" or name.startswith("megalith.")]
    return ["torch._dynamo", *names]


def _worker_environment() -> dict[str, str]:
    # One thread each, since ranks share the cores; the loopback device, since a laptop's host name
    # may lead nowhere.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = (
        {"GLOO_SOCKET_IFNAME": loopback}
        | os.environ
        | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    )
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return environment


def _execute(function: str, folder: Path) -> _Worker:
    """Start a Python process that calls a function of this module."""
    connection, child_connection = Pipe()
    handle = child_connection.fileno()
    with child_connection, (folder / "output").open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, function, str(handle), str(os.getpid()), str(folder)],
            env=_worker_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[handle],
            process_group=0,  # Ctrl-C is the parent's to handle
        )
    return _Worker(process, connection, folder)


def _fork(server: _Worker, folder: Path) -> _Worker:
    """Have the fork server start a worker."""
    connection, child_connection = Pipe()
    with child_connection:
        message = folder, os.getcwd(), _worker_environment()
        pid = int(server.request(message, child_connection.fileno()))
    return _Worker(_ForkedProcess(server, pid), connection, folder)


def run_fork_server(pipe: str, parent: str, folder: str) -> None:
    """Import what workers need; then, at each request, fork one or reply how one ended."""
    die_with_parent(int(parent))
    server, connection = os.getpid(), Connection(int(pipe))
    for name in connection.recv():
        with suppress(ImportError):  # a worker that needs it reports the error
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else a collection in a worker would copy the memory of all these objects
    connection.send_bytes(b"ready")
    while True:
        request = connection.recv()
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            code = str(os.waitstatus_to_exitcode(status)) if pid else ""
            connection.send_bytes(code.encode())
            continue
        handle = recv_handle(connection)
        pid = os.fork()
        if pid == 0:
            connection.close()
            _serve_after_fork(server, handle, *request)
            return
        os.close(handle)
        connection.send_bytes(str(pid).encode())


def _serve_after_fork(
    server: int, handle: int, folder: Path, directory: str, environment: Mapping[str, str]
) -> None:
    """Make this process what `_execute` would have started, and serve."""
    os.setpgid(0, 0)  # Ctrl-C is the parent's to handle
    with (folder / "output").open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(directory)
    _restore(environment)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    importlib.invalidate_caches()
    serve(str(handle), str(server), str(folder))


def serve(pipe: str, parent: str, folder: str) -> None:
    """The life of a worker: obey one call after the other until the parent closes the pipe."""
    die_with_parent(int(parent))
    connection, stacks = Connection(int(pipe)), Path(folder) / "stacks"
    faulthandler.register(signal.SIGUSR2, file=stacks.open("w"), all_threads=True)
    environment = dict(os.environ)
    connection.send_bytes(b"ready")
    while True:
        try:
            received = connection.recv_bytes()
            call = pickle.loads(received)  # lint: allow pickle-load: our parent sent it
            arguments = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        os.ftruncate(sys.stdout.fileno(), 0)
        answer = _answer_call(call, arguments)
        _send(connection, call.rank, answer)
        if answer.kind == "failure":
            gc.collect()  # a group held by a dead cycle would keep its connections
            _leave()  # at once, so that peers waiting for this rank fail too
        assert connection.recv_bytes() == RELEASE
        # groups in dead cycles end now and here, not on some thread in the middle of another call
        gc.collect()
        _leave()
        gc.freeze()  # what lives on is not looked at again, which keeps the next collection short
        _restore(environment)


def _restore(environment: Mapping[str, str]) -> None:
    """Undo changes of the environment, touching nothing that is as it was: other threads may be
    reading it."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _answer_call(call: Call, arguments: bytes) -> Answer:
    initializing = False
    try:
        _reset()
        function: Any = _load(call.module, call.path)
        for word in call.function.split("."):
            function = getattr(function, word)
        given = pickle.loads(arguments)  # lint: allow pickle-load: from the process that started us
        initializing = True
        dist.init_process_group(
            "gloo",
            init_method=f"file://{call.store}",
            rank=call.rank,
            world_size=call.world,
            timeout=timedelta(minutes=30),  # the parent's timeout is shorter and shows the stacks
        )
        # A rank that fails at once must not leave the group while a peer still initializes.
        dist.barrier(group=dist.group.WORLD)
        return Answer("result", function(call.rank, call.world, *given))
    except BaseException as error:  # SystemExit and a test's skip too: the parent decides
        # When an initialization fails, torch does not reset its count of groups. In the next call
        # this process would wait for its peers under another group name than theirs.
        unusable = initializing and not dist.is_initialized()
        kind: Literal["failure", "death"] = "death" if unusable else "failure"
        return Answer(kind, exception_failure(call.rank, error, frames_to_skip=1))


def _leave() -> None:
    """Close every connection to the other ranks."""
    if "torch.distributed.tensor" in sys.modules:
        # its caches keep device meshes alive, and so their process groups
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


def _reset() -> None:
    """Undo what an earlier call may have changed in this process."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _send(connection: Connection, rank: int, answer: Answer) -> None:
    try:
        message = pickle.dumps(answer)
    except Exception as error:  # whatever the result's own __reduce__ raises
        message = pickle.dumps(Answer("failure", exception_failure(rank, error)))
    connection.send_bytes(message)


def _load(name: str, path: str) -> ModuleType:
    """The module of a function: by name where that leads to the same file, else from its file,
    once."""
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == path:
        return sys.modules[name]
    if name.partition(".")[0] == "megalith":
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(
        "__mp_main__" if name == "__main__" else name, path
    )
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = (
        module  # before it runs: a dataclass looks its module up, and so does pickle
    )
    spec.loader.exec_module(module)
    return module


def destroy_mesh(mesh: Mesh) -> None:
    """Destroy the process groups of a mesh; gloo may abort if they exist at exit."""
    for handle in {group.handle for group in mesh.groups.values() if group.handle is not None}:
        dist.destroy_process_group(handle)

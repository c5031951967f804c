"""Local ranks: start them, pass signals on, end all when one fails, and tell its story once. Loads
no torch.

On several machines `torchrun` does this; the ranks themselves cannot tell the difference (see
parallel/worker.py).
"""

import faulthandler
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megalith.errors import RankError, UserError
from megalith.observe.limits import available_cores
from megalith.parallel.failure import (
    Failure,
    InterruptHandler,
    describe,
    die_with_parent,
    explain_exit,
    failure_of,
    in_order,
)

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""What torchrun, our launcher and the Slurm and Kubernetes files tell each rank."""

LISTENER = "MEGALITH_LISTENER"
"""Tells rank 0 which of its open files listens at MASTER_PORT: a port that was only looked up may
be taken by then."""

LAUNCHER = "MEGALITH_LAUNCHER"
"""Tells a rank that `run_workers` started it: its process number and the folder for records of
failures."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for what a rank failed of; its folder's folder is shared by the ranks of one
machine."""

USER_ERROR, FAULT, STOPPED = 2, 1, 75
"""Exit codes: the user can fix it; our fault; stopped after a save."""

NOTICE_SECONDS = 1.0
"""How long the other ranks have to fail by themselves once one has; their errors are then told,
too."""

GRACE_SECONDS = 5.0
"""How long they then have to obey SIGTERM."""

OUTPUT_SHOWN = 2000
"""Characters of the failed rank's own output that an error repeats."""

FOLDER_PREFIX = "megalith-launch-"
"""Begins the name of a launcher's folder in the directory for temporary files."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that the launcher passes on to its ranks."""

INTERRUPTED = "KeyboardInterrupt"
"""Summary of the failure of a rank that SIGINT ended."""


def in_worker(environment: Mapping[str, str]) -> bool:
    """Whether a launcher, ours or another, has made this process a rank."""
    return any(name in environment for name in RANK_VARIABLES)


def is_ignored_hangup(number: int) -> bool:
    """Whether `number` is SIGHUP and `nohup` has this process ignore it, which must stay so."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def threads_per_rank(cores: int, local_world: int) -> int:
    """CPU threads for each of the ranks that share a machine.

    >>> threads_per_rank(8, 3), threads_per_rank(2, 4)
    (2, 1)
    """
    return max(1, cores // local_world)


def run_workers(
    argv: Sequence[str],
    nproc: int,
    *,
    command: Sequence[str] = (sys.executable, "-m", "megalith"),
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run the same command on `nproc` processes of this machine and wait for all of them.

    Rank 0 has the terminal; what the others print is kept and shown if they fail. When one fails
    the others are ended: SIGTERM after a second, SIGKILL 5 s later. The first SIGINT, SIGTERM or
    SIGHUP to this process is passed on, so that the ranks save and stop; a second one kills them.
    They do not outlive this process, however it ends.

    Returns:
        0 when all are done, 75 when they stopped after a save, 128 + number when a signal ended
        them before that, which one line on standard error then says.

    Raises:
        UserError: the message of the rank that failed first, when the user can fix it. RankError:
        the traceback, or the manner of death, of the rank that failed first; then a line for each
        other.
    """
    with _launch_folder() as folder:
        crew = _Crew([*command, *argv], nproc, folder, environment)
        with _signals_to(crew):
            try:
                crew.start()
                while crew.watch():
                    time.sleep(0.05)  # how late a death is noticed; looking costs microseconds
            finally:  # an error of our own must not leave ranks behind
                crew.kill()
        return crew.outcome()


def worker_main(function: Callable[[], int], environment: Mapping[str, str]) -> int:
    """Run a command as one rank. If `run_workers` started it, a failure is left for the parent to
    tell, once for all.

    Under torchrun the failure goes to its error file too, so that its summary shows the first one,
    and what all ranks would say alike is said by one of them. Ranks end with the process that
    started them.

    Raises:
        RankError: under torchrun, instead of a traceback that only says that another rank is gone.
    """
    launcher = environment.get(LAUNCHER)
    interrupt = InterruptHandler()
    try:
        if launcher is not None:
            die_with_parent(int(launcher.partition(":")[0]))
            faulthandler.enable()  # a crash outside Python shows where it was
            signal.signal(signal.SIGINT, interrupt)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by `_Crew._start_rank`
        elif ERROR_FILE in environment:
            die_with_parent(os.getppid())
        code = function()
        if (
            launcher is not None
        ):  # the result stands: a signal must not turn the exit of Python into a failure
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return code
    except SystemExit:
        raise
    except (
        BaseException
    ) as error:  # KeyboardInterrupt too: the parent knows whether it was asked for
        failure = failure_of(int(environment.get("RANK", 0)), error, frames_to_skip=1)
        if interrupt.received:
            failure = replace(failure, summary=INTERRUPTED)
        elif isinstance(error, UserError):
            failure = replace(
                failure, text=str(error)
            )  # the whole message; where we raised it helps nobody
        if launcher is not None:
            _leave_record(failure, Path(launcher.partition(":")[2]))
            _end(USER_ERROR if isinstance(error, UserError) and not interrupt.received else FAULT)
        if ERROR_FILE not in environment:
            raise
        _tell_torchrun(failure, Path(environment[ERROR_FILE]), error)
        raise


def _tell_torchrun(failure: Failure, file: Path, error: BaseException) -> None:
    """Leave a failure for torchrun's summary; come back when this rank shall print it, too.

    Raises:
        RankError: a line that says that another rank failed first.
    """
    if failure.is_consequence:
        time.sleep(
            NOTICE_SECONDS
        )  # the rank that explains it comes first, and torchrun may end us meanwhile
    file.write_text(_torchrun_record(failure))
    if isinstance(error, UserError) and not _speaks_first(failure.text, file.parent.parent):
        time.sleep(
            NOTICE_SECONDS
        )  # torchrun ends the others with the first that ends, even one in mid-sentence
        raise SystemExit(USER_ERROR)
    if failure.is_consequence:
        raise RankError(
            f"rank {failure.rank} lost another rank, which failed first: {failure.summary[:200]}"
        ) from None


def _speaks_first(text: str, folder: Path) -> bool:
    """Whether no other rank of this machine has said the same; `folder`: torchrun's own for this
    start."""
    name = f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def end_rank(failure: Failure, after_seconds: float, *, environment: Mapping[str, str]) -> NoReturn:
    """End this rank from any of its threads, with a failure that is left at once and told once for
    all ranks."""
    if (launcher := environment.get(LAUNCHER)) is not None:
        _leave_record(failure, Path(launcher.partition(":")[2]))
    elif (file := environment.get(ERROR_FILE)) is not None:
        Path(file).write_text(_torchrun_record(failure))
    if launcher is None and failure.is_report:
        sys.stderr.write(f"megalith: {failure.text}\n")
    time.sleep(after_seconds)
    _end(FAULT)


def _leave_record(failure: Failure, folder: Path) -> None:
    """Write the failure down for `run_workers`."""
    unfinished = folder / f"rank{failure.rank}.tmp"
    unfinished.write_text(json.dumps(asdict(failure)))
    unfinished.rename(folder / f"rank{failure.rank}.json")  # a record is there whole or not at all


def _end(code: int) -> NoReturn:
    """End at once: what Python does at exit could wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _torchrun_record(failure: Failure) -> str:
    """The failure in the form in which torchrun reads it."""
    more = {"py_callstack": failure.text, "timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": failure.summary, "extraInfo": more}})


@dataclass(slots=True)
class _Crew:
    """The ranks of one machine, as their parent sees them."""

    command: list[str]
    nproc: int
    folder: Path
    environment: Mapping[str, str]
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    ended_ns: dict[int, int] = field(default_factory=dict)
    """When each rank was seen to have ended; `time.monotonic_ns()`, as in `Failure`."""
    signals: list[int] = field(default_factory=list)
    """Those that we were sent."""
    failed_ns: int | None = None
    """When the first rank was seen to have failed; from then on we end the others."""
    asked_to_end: bool = False
    """Whether we have sent them SIGTERM."""

    def start(self) -> None:
        """InitialValues every rank."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank in range(self.nproc):
                self._start_rank(rank, server)

    def _start_rank(self, rank: int, server: socket.socket) -> None:
        listener = (server.fileno(),) if rank == 0 else ()
        with self._output(rank).open("wb") as output, _blocked_signals():
            quiet = None if rank == 0 else output
            process = subprocess.Popen(
                self.command,
                env=self._environment(rank, server),
                stdin=subprocess.DEVNULL,
                stdout=quiet,
                stderr=quiet,
                pass_fds=listener,
                process_group=0,  # Ctrl-C reaches us alone, and we pass it on once
            )
        self.processes.append(process)
        for number in self.signals:  # one may come while we are at it
            process.send_signal(number)

    def _environment(self, rank: int, server: socket.socket) -> dict[str, str]:
        threads = str(threads_per_rank(available_cores(), self.nproc))
        loopback = (
            "lo0" if sys.platform == "darwin" else "lo"
        )  # a laptop's host name may lead nowhere
        ours = {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": loopback}
        values = (rank, self.nproc, rank, self.nproc, *server.getsockname())
        told = {name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)}
        told |= {LISTENER: str(server.fileno())} if rank == 0 else {}
        return {**ours, **self.environment, **told, LAUNCHER: f"{os.getpid()}:{self.folder}"}

    def watch(self) -> bool:
        """Look at every rank once, and end the rest when one has failed; True while some rank
        runs."""
        now = time.monotonic_ns()
        new = [
            rank
            for rank, process in enumerate(self.processes)
            if rank not in self.ended_ns and process.poll() is not None
        ]
        self.ended_ns |= dict.fromkeys(new, now)
        if self.failed_ns is None and any(
            self.processes[rank].returncode not in (0, STOPPED) for rank in new
        ):
            self.failed_ns = now
        self._end_the_rest(now)
        return len(self.ended_ns) < self.nproc

    def _end_the_rest(self, now: int) -> None:
        if self.failed_ns is None:
            return
        waited = (now - self.failed_ns) / 1e9
        if waited > NOTICE_SECONDS and not self.asked_to_end and not self.signals:
            self.asked_to_end = True
            self.send(
                signal.SIGTERM
            )  # once: a rank takes a second signal to mean that it must not save
        if waited > NOTICE_SECONDS + GRACE_SECONDS:
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for process in self.processes:
            process.send_signal(number)  # does nothing to one that has ended

    def kill(self) -> None:
        """End every rank that still runs, now."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the first signal on; on a second one end everything."""
        self.signals.append(number)
        self.send(number if len(self.signals) == 1 else signal.SIGKILL)

    def outcome(self) -> int:
        """What all ranks together came to: the exit code, or the error that `run_workers`
        raises."""
        codes = [process.returncode for process in self.processes]
        if all(code in (0, STOPPED) for code in codes):
            return max(codes)
        found = {
            rank: self._failure(rank) for rank, code in enumerate(codes) if code not in (0, STOPPED)
        }
        failures = [failure for failure in found.values() if failure is not None]
        if self.signals and (len(self.signals) > 1 or self._all_interrupted(failures)):
            with suppress(OSError):  # after SIGHUP the terminal may be closed
                sys.stderr.write(
                    f"megalith: interrupted by {signal.Signals(self.signals[0]).name}\n"
                )
                sys.stderr.flush()
            return 128 + self.signals[0]
        first = in_order(failures)[0]
        if codes[first.rank] == USER_ERROR and self._record(first.rank).exists():
            everywhere = [failure.text for failure in failures] == [first.text] * self.nproc
            raise UserError(first.text if everywhere else f"rank {first.rank}: {first.text}")
        told = describe(
            failures, {rank: "was ended because of it" for rank in found if found[rank] is None}
        )
        printed = self._output(first.rank).read_text(errors="replace").strip()[-OUTPUT_SHOWN:]
        raise RankError(f"{told}\noutput of rank {first.rank}:\n{printed}" if printed else told)

    def _failure(self, rank: int) -> Failure | None:
        """How a rank that ended badly failed; None if it was we who ended it."""
        record, code = self._record(rank), self.processes[rank].returncode
        if record.exists():
            return Failure(**json.loads(record.read_text()))
        assert self.failed_ns is not None
        if code in (-signal.SIGTERM, -signal.SIGKILL) and self.ended_ns[rank] > self.failed_ns:
            return None
        said = explain_exit(code)
        return Failure(rank, said, said, self.ended_ns[rank])

    def _all_interrupted(self, failures: list[Failure]) -> bool:
        """Whether the first signal, and nothing else, ended the ranks; some may only have lost an
        interrupted one."""
        summaries = (INTERRUPTED, explain_exit(-self.signals[0]))
        others = [failure for failure in failures if failure.summary not in summaries]
        lost_peer = all(failure.is_consequence for failure in others)
        return not others or (lost_peer and len(others) < len(failures))

    def _record(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.json"

    def _output(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"


@contextmanager
def _launch_folder() -> Iterator[Path]:
    """Create a folder for the records of failures, locked as long as this process lives, and remove
    it at the end.

    Also removes the folders of launchers that were killed.
    """
    _remove_abandoned_folders(Path(tempfile.gettempdir()))
    folder, lock = _create_locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _create_locked_folder() -> tuple[Path, int]:
    """Create the folder and return it with the file descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        with suppress(
            FileNotFoundError
        ):  # another launch took the folder for an abandoned one before it was locked
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(
                OSError
            ):  # a file system without locks: then no launch removes folders of others
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_abandoned_folders(parent: Path) -> None:
    """Remove the folders of this user in `parent` whose lock is free: the launcher that created
    them has died.

    A lock, unlike a process number, is never reused, and is also visible between containers that
    share `parent`.
    """
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a link, a file, a folder of another user, or removed meanwhile
            continue
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # its launcher is alive, or the file system has no locks
            continue
        finally:
            os.close(lock)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block our signals in this thread and in a process that it starts, which unblocks them in
    `worker_main`.

    StopFilter then a signal to a rank stays pending: it could only end the start of Python with a
    traceback.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def _signals_to(crew: _Crew) -> Iterator[None]:
    """Let `crew` answer the signals that would end this process."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python gives signals to the main thread alone
        yield
        return
    handled = [number for number in SIGNALS if not is_ignored_hangup(number)]
    before = {number: signal.signal(number, crew.on_signal) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

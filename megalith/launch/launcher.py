"""Launcher of local ranks: starts them, forwards signals, terminates all when one fails, and
reports the failure once; failure records of ranks, and their report as one text. Imports no torch.

On several machines `torchrun` does this; the ranks behave the same (see launch/worker.py).
"""

import ctypes
import faulthandler
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import NoReturn

from megalith.errors import RankError, UserError
from megalith.launch.heartbeat import HeartbeatMonitor, HeartbeatReader
from megalith.observe.limits import available_cores

# --- failure records of worker processes, and the report of several ranks' failures as one text
#
# One rank's failure makes all others fail, because their peers lose the connection. So failures are
# sorted by cause: the first is shown completely and the others in one line each.

_CONSEQUENCES = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Socket closed|Connection refused|connection was "
    r"likely closed|failed to recv|remote process exited|Timed out waiting|Wait timeout|wait "
    r"timeout|aborted|stopped in a hang",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL, the stores and the watchdog on a rank whose peer has failed."""

STOPPED_IN_A_HANG = "stopped in a hang"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

MAX_SUMMARY = 300
"""Maximum length of the line of a rank that failed after another."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Record of how one rank failed."""

    rank: int
    summary: str
    """One line: the exception and its message, or the exit status of the process."""

    text: str
    """Complete description: the traceback, if there was one."""

    when_ns: int
    """`time.monotonic_ns()` at the failure: the same clock for all processes of a machine."""

    is_report: bool = False
    """Whether the text describes all ranks, so that nothing else is reported."""

    @property
    def is_consequence(self) -> bool:
        """Whether the failure only shows that another rank has failed."""
        return _CONSEQUENCES.search(self.summary) is not None


def exception_failure(rank: int, error: BaseException, *, frames_to_skip: int = 0) -> Failure:
    """Return the record of an exception caught on `rank`, without its outermost `frames_to_skip`
    frames."""
    frames = error.__traceback__
    for _ in range(frames_to_skip):
        frames = frames.tb_next if frames is not None and frames.tb_next is not None else frames
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    summary = " ".join("".join(traceback.format_exception_only(error)).split())
    return Failure(rank, summary, text, time.monotonic_ns())


def exit_failure(rank: int, code: int) -> Failure:
    """Return the record of a process that ended without leaving its own."""
    text = explain_exit(code)
    return Failure(rank, text, text, time.monotonic_ns())


def explain_exit(code: int) -> str:
    """Describe a return code of `subprocess`; negative means a signal.

    >>> explain_exit(-9)
    'was killed by signal 9 (SIGKILL)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({known.get(-code, 'unknown')})"


def sort_failures(failures: Iterable[Failure]) -> list[Failure]:
    """Sort failures, the cause first: the earliest one that is not the loss of a peer."""
    return sorted(failures, key=lambda failure: (failure.is_consequence, failure.when_ns))


def describe(failures: Iterable[Failure], ended: Mapping[int, str] = MappingProxyType({})) -> str:
    """Describe the first failure completely, then each other rank in a line; `ended`: text for each
    rank that did not fail."""
    first, *others = sort_failures(failures)
    if first.is_report:
        return first.text
    lines = [
        f"rank {first.rank} {first.text}" if first.text == first.summary else _with_traceback(first)
    ]
    lines += ["then:"] if others or ended else []
    lines += [f"  rank {other.rank}: {other.summary[:MAX_SUMMARY]}" for other in others]
    lines += [f"  rank {rank}: {words}" for rank, words in ended.items()]
    return "\n".join(lines)


def describe_in_a_line(failures: Sequence[Failure]) -> str:
    """Describe the first of sorted failures in a line.

    >>> describe_in_a_line([Failure(1, "was killed by signal 9 (SIGKILL)", "", 0)])
    'rank 1 was killed by signal 9 (SIGKILL)'
    """
    first = failures[0]
    verb = " " if first.summary.startswith(("was killed", "ended with")) else ": "
    return f"rank {first.rank}{verb}{first.summary[:MAX_SUMMARY]}"


def _with_traceback(failure: Failure) -> str:
    return f"rank {failure.rank} failed first:\n{failure.text}"


class InterruptHandler:
    """SIGINT handler that raises KeyboardInterrupt and records that it did.

    Libraries whose import is interrupted may turn KeyboardInterrupt into another exception.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """Raise KeyboardInterrupt in the main thread."""
        self.received = True
        raise KeyboardInterrupt


class SignalRecorder:
    """Handler that only records that its signal was received, before training has started."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the signal."""
        self.received = True


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent process `parent` ends in any way.

    Linux provides this. Elsewhere a thread checks once a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(
            target=_watch_parent, args=(parent,), daemon=True, name="watch-parent"
        ).start()
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Environment variables that torchrun, this launcher and the Slurm and Kubernetes files set for
each rank."""

LISTENER = "MEGALITH_LISTENER"
"""Variable with the file descriptor of rank 0 that listens at MASTER_PORT: a port that was only
looked up may be taken by then."""

LAUNCHER = "MEGALITH_LAUNCHER"
"""Variable that marks a rank started by `run_workers`: the launcher's process id and the folder for
failure records."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file in which torchrun expects a rank's failure; the ranks of one machine share
the parent of its folder."""

USER_ERROR, FAULT, STOPPED, SUSPECT = 2, 1, 75, 76
"""Exit codes: the user can fix it; internal error; stopped after a save; the same, and the run must
continue on other machines."""

ENDED = 0, STOPPED, SUSPECT
"""Exit codes of ranks that have ended as planned."""

FINAL_CODES = frozenset({USER_ERROR, STOPPED, SUSPECT})
"""Exit codes after which no rank is started again."""

RESTART_DELAYS = (0.0, 10.0, 60.0)
"""Seconds before the first, the second and each later job restart within an hour: a file system or
a network that has failed needs time (training specification, 17.5)."""

RESTART_WINDOW_SECONDS = 3600.0
"""Time after which a job restart does not lengthen the delay before the next one."""

NOTICE_SECONDS = 1.0
"""Time that the other ranks have to fail by themselves after one has, so that their errors are
reported, too."""

GRACE_SECONDS = 5.0
"""Time between SIGTERM and SIGKILL."""

POLL_SECONDS = 0.05
"""Time between two polls of the ranks, and so the delay of noticing an exit; a poll costs
microseconds."""

OUTPUT_SHOWN = 2000
"""Characters of the failed rank's own output that an error repeats."""

FOLDER_PREFIX = "megalith-launch-"
"""Prefix of a launcher's folder in the directory for temporary files."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a job; the launcher forwards the first one to its ranks."""

ENDING_SIGNALS = frozenset(-number for number in SIGNALS)
"""Return codes of ranks that such a signal has ended."""

FORWARDED_SIGNALS = (*SIGNALS, signal.SIGUSR1)
"""All signals that the launcher forwards: SIGUSR1 (train.sigusr1_action) as often as it comes."""

INTERRUPTED = "KeyboardInterrupt"
"""Failure summary of a rank that SIGINT ended."""


def in_worker(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as a rank."""
    return any(name in environment for name in RANK_VARIABLES)


def is_ignored_hangup(number: int) -> bool:
    """Return whether `number` is SIGHUP and this process ignores it (`nohup`), which must stay
    so."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def threads_per_rank(cores: int, local_world: int) -> int:
    """Return the CPU threads of each rank of a machine.

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
    on_failure: Callable[[Failure, int], None] | None = None,
    restarts: int = 0,
    build_ranks: "Callable[..., LocalRanks] | None" = None,
) -> int:
    """Run the same command on `nproc` processes of this machine and wait for all of them.

    Rank 0 uses the terminal; the output of the others is stored and shown if they fail. When one
    fails the others get SIGTERM after a second and SIGKILL 5 s later. The first SIGINT, SIGTERM or
    SIGHUP to this process is forwarded, so that the ranks save and stop; a second one kills them.
    The ranks end when this process ends in any way. `on_failure` receives the failure that came
    first, and the exit code of the job.

    restarts: how often all ranks are started again after a fault (a job restart); never after a
    signal, an error that the user can fix, or a stop after a save. build_ranks: how they are
    supervised, by default `LocalRanks`.

    Returns:
        0 when all are done, 75 when they stopped after a save, 76 when they stopped because of a
        suspect machine, 128 + number when a signal ended them before that, which is reported in one
        line on standard error.

    Raises:
        UserError: the message of the rank that failed first, if the user can fix it. RankError: the
        traceback or exit status of the rank that failed first; then a line for each other.
    """
    build = build_ranks or LocalRanks
    times: list[float] = []
    while True:
        with _launch_folder() as folder:
            words = [*command, *argv]
            ranks = build(words, nproc, folder, environment, on_failure=on_failure)
            with _signals_to(ranks):
                try:
                    ranks.start()
                    while ranks.watch():
                        ranks.wait()
                finally:  # an error in the launcher must not leave ranks running
                    ranks.kill()
            try:
                return ranks.outcome()
            except RankError:
                if len(times) >= restarts or not ranks.is_restartable():
                    raise
                cause = ranks.describe_cause()
        delay = restart_delay(times, time.monotonic())
        pause = f" in {delay:g} s" if delay else ""
        print_launcher_line(f"{cause}; job restart {len(times) + 1} of {restarts}{pause}")
        time.sleep(delay)
        times.append(time.monotonic())


def restart_delay(times: Sequence[float], now: float) -> float:
    """Return the seconds to wait before a job restart; `times`: of the earlier ones.

    >>> restart_delay([], 0.0), restart_delay([10.0], 20.0), restart_delay([10.0], 4000.0)
    (0.0, 10.0, 0.0)
    """
    num_recent = sum(now - each < RESTART_WINDOW_SECONDS for each in times)
    return RESTART_DELAYS[min(num_recent, len(RESTART_DELAYS) - 1)]


def print_launcher_line(text: str) -> None:
    """Print a line of the launcher on standard error."""
    with suppress(OSError):  # after SIGHUP the terminal may be closed
        sys.stderr.write(f"megalith: {text}\n")
        sys.stderr.flush()


def worker_main(function: Callable[[], int], environment: Mapping[str, str]) -> int:
    """Run a command as one rank. If `run_workers` started it, a failure is recorded for the parent,
    which reports it once for all ranks.

    Under torchrun the failure is also written to its error file, so that its summary shows the
    first one, and a message that is equal on all ranks is printed by one of them. Ranks end with
    the process that started them.

    Raises:
        RankError: under torchrun, instead of a traceback that only shows that another rank has
        failed.
    """
    launcher = environment.get(LAUNCHER)
    interrupt = InterruptHandler()
    try:
        if launcher is not None:
            die_with_parent(int(launcher.partition(":")[0]))
            faulthandler.enable()  # a crash outside Python shows where it was
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGUSR1, SignalRecorder())
            # blocked by `LocalRanks._start_rank`
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
        elif ERROR_FILE in environment:
            die_with_parent(os.getppid())
        code = function()
        # the result is final: a signal must not turn the exit of Python into a failure
        if launcher is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
        return code
    except SystemExit:
        raise
    # KeyboardInterrupt too: the parent knows whether it was requested
    except BaseException as error:
        failure = exception_failure(int(environment.get("RANK", 0)), error, frames_to_skip=1)
        if interrupt.received:
            failure = replace(failure, summary=INTERRUPTED)
        elif isinstance(error, UserError):
            failure = replace(failure, text=str(error))  # without the traceback
        if launcher is not None:
            write_failure(failure, launcher)
            exit_now(
                USER_ERROR if isinstance(error, UserError) and not interrupt.received else FAULT
            )
        if ERROR_FILE not in environment:
            raise
        _write_torchrun_error(failure, Path(environment[ERROR_FILE]), error)
        raise


def _write_torchrun_error(failure: Failure, file: Path, error: BaseException) -> None:
    """Write a failure for torchrun's summary; return if this rank should print it, too.

    Raises:
        RankError: a line that says that another rank failed first.
    """
    if failure.is_consequence:
        # the rank that caused it should be first, and torchrun may end this rank before that
        time.sleep(NOTICE_SECONDS)
    write_torchrun_record(failure, file)
    if isinstance(error, UserError) and not _reports_first(failure.text, file.parent.parent):
        # torchrun ends the others when the first one ends, even while one prints
        time.sleep(NOTICE_SECONDS)
        raise SystemExit(USER_ERROR)
    if failure.is_consequence:
        raise RankError(
            f"rank {failure.rank} lost another rank, which failed first: {failure.summary[:200]}"
        ) from None


def _reports_first(text: str, folder: Path) -> bool:
    """Return whether this rank is the first of its machine to report this text; `folder`:
    torchrun's own for this start."""
    name = f"reported-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def end_rank(failure: Failure, after_seconds: float, *, environment: Mapping[str, str]) -> NoReturn:
    """End this rank from any of its threads, with a failure that is recorded at once and reported
    once for all ranks."""
    if (launcher := environment.get(LAUNCHER)) is not None:
        write_failure(failure, launcher)
    elif (file := environment.get(ERROR_FILE)) is not None:
        write_torchrun_record(failure, Path(file))
    if launcher is None and failure.is_report:
        sys.stderr.write(f"megalith: {failure.text}\n")
    time.sleep(after_seconds)
    exit_now(FAULT)


def write_failure(failure: Failure, launcher: str) -> None:
    """Write the failure for `run_workers`; `launcher`: value of the variable `LAUNCHER`."""
    folder = Path(launcher.partition(":")[2])
    unfinished = folder / f"rank{failure.rank}.tmp"
    unfinished.write_text(json.dumps(asdict(failure)))
    unfinished.rename(folder / f"rank{failure.rank}.json")  # atomic: a record is complete or absent


def exit_now(code: int) -> NoReturn:
    """Exit at once: Python's cleanup could wait for ranks that have ended."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write_torchrun_record(failure: Failure, file: Path) -> None:
    """Write a failure to the error file of torchrun."""
    file.write_text(_torchrun_record(failure))


def _torchrun_record(failure: Failure) -> str:
    """Return the failure in torchrun's format."""
    more = {"py_callstack": failure.text, "timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": failure.summary, "extraInfo": more}})


@dataclass(slots=True)
class LocalRanks:
    """Processes of the local ranks, as their parent sees them."""

    command: list[str]
    nproc: int
    folder: Path
    environment: Mapping[str, str]
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    ended_ns: dict[int, int] = field(default_factory=dict)
    """When each rank was found to have ended; `time.monotonic_ns()`, as in `Failure`."""
    signals: list[int] = field(default_factory=list)
    """Signals of `SIGNALS` that this process has received."""
    num_sigusr1: int = 0
    """How often it has received SIGUSR1."""
    failed_ns: int | None = None
    """When the first rank was found to have failed; after that the others are ended."""
    sent_sigterm: bool = False
    """Whether SIGTERM has been sent."""
    on_failure: Callable[[Failure, int], None] | None = None
    """Receives the first failure, and the exit code of the job."""
    heartbeats: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    """Heartbeats of the processes."""

    def start(self) -> None:
        """Start every rank."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            for rank in range(self.nproc):
                self._start_rank(rank, server)

    def _start_rank(self, rank: int, server: socket.socket) -> None:
        listener = (server.fileno(),) if rank == 0 else ()
        variables = {LISTENER: str(server.fileno())} if rank == 0 else {}
        environment = self.build_environment(rank, server.getsockname()) | variables
        self.processes.append(self.start_process(rank, environment, listener))
        self.forward_earlier_signals(self.processes[rank])

    def start_process(
        self, rank: int, environment: Mapping[str, str], pass_fds: tuple[int, ...]
    ) -> "subprocess.Popen[bytes]":
        """Start a process of a rank."""
        heartbeat = HeartbeatReader()
        with self.output(rank).open("ab") as output, _blocked_signals():
            quiet = None if rank == 0 else output
            process = subprocess.Popen(
                self.command,
                env={**environment, **heartbeat.variable},
                stdin=subprocess.DEVNULL,
                stdout=quiet,
                stderr=quiet,
                pass_fds=(*pass_fds, heartbeat.fd, heartbeat.stacks_fd),
                process_group=0,  # Ctrl-C reaches the launcher only, which forwards it once
            )
        self.heartbeats.add(process.pid, heartbeat)
        return process

    def forward_earlier_signals(self, process: "subprocess.Popen[bytes]") -> None:
        """Send a process the signals that were received while the ranks were started."""
        for number in [*self.signals, *([signal.SIGUSR1] if self.num_sigusr1 else [])]:
            process.send_signal(number)

    def build_environment(self, rank: int, address: tuple[str, int]) -> dict[str, str]:
        """Return the environment of a rank; `address`: of the store."""
        threads = str(threads_per_rank(available_cores(), self.nproc))
        # a laptop's host name may not resolve
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        defaults = {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": loopback}
        values = (rank, self.nproc, rank, self.nproc, *address)
        rank_variables = {
            name: str(value) for name, value in zip(RANK_VARIABLES, values, strict=True)
        }
        return {
            **defaults,
            **self.environment,
            **rank_variables,
            LAUNCHER: f"{os.getpid()}:{self.folder}",
        }

    def wait(self) -> None:
        """Wait until the next poll."""
        time.sleep(POLL_SECONDS)

    def find_exits(self, now: int) -> list[int]:
        """Return the ranks that have ended since the last call."""
        new = [
            rank
            for rank, process in enumerate(self.processes)
            if rank not in self.ended_ns and process.poll() is not None
        ]
        self.ended_ns |= dict.fromkeys(new, now)
        return new

    def watch(self) -> bool:
        """Poll every rank once, and end the rest when one has failed; return whether some rank
        runs."""
        now = time.monotonic_ns()
        new = self.find_exits(now)
        if self.failed_ns is None and any(
            self.processes[rank].returncode not in ENDED for rank in new
        ):
            self.failed_ns = now
        if self.failed_ns is None:
            self.kill_hung_rank()
        self.end_the_rest(now)
        return len(self.ended_ns) < self.nproc

    def kill_hung_rank(self) -> None:
        """Kill a rank that makes no progress, after its failure was recorded for it."""
        running = {
            rank: process.pid
            for rank, process in enumerate(self.processes)
            if rank not in self.ended_ns
        }
        hung = self.heartbeats.find_hung_rank(running)
        if hung is None or self.read_record(hung.rank) is not None:
            return
        failure = Failure(hung.rank, hung.summary, hung.text, time.monotonic_ns())
        write_failure(failure, f"{os.getpid()}:{self.folder}")
        self.processes[hung.rank].send_signal(signal.SIGKILL)

    def end_the_rest(self, now: int) -> None:
        """End the ranks that still run some time after one has failed."""
        if self.failed_ns is None:
            return
        waited = (now - self.failed_ns) / 1e9
        if waited > NOTICE_SECONDS and not self.sent_sigterm and not self.signals:
            self.sent_sigterm = True
            self.send(signal.SIGTERM)  # once: after a second signal a rank does not save
        if waited > NOTICE_SECONDS + GRACE_SECONDS:
            self.send(signal.SIGKILL)

    def send(self, number: int) -> None:
        """Send a signal to every running rank."""
        for process in self.processes:
            process.send_signal(number)  # does nothing to one that has ended

    def kill(self) -> None:
        """Kill every running rank and wait for it."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.heartbeats.close()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward the first signal; kill all ranks on a second one. SIGUSR1 does not count."""
        if number == signal.SIGUSR1:
            self.num_sigusr1 += 1
            self.send(number)
            return
        self.signals.append(number)
        self.send(number if len(self.signals) == 1 else signal.SIGKILL)

    def outcome(self) -> int:
        """Return the exit code of the job, or raise the error that `run_workers` raises."""
        codes = [process.returncode for process in self.processes]
        if all(code in ENDED for code in codes):
            return max(codes)
        failure_by_rank = self.failures()
        failures = [failure for failure in failure_by_rank.values() if failure is not None]
        if self.signals and (len(self.signals) > 1 or self._all_interrupted(failures)):
            print_launcher_line(f"interrupted by {signal.Signals(self.signals[0]).name}")
            self._report_interrupt(128 + self.signals[0])
            return 128 + self.signals[0]
        first = sort_failures(failures)[0]
        if self.on_failure is not None:
            is_user_error = codes[first.rank] == USER_ERROR
            self.on_failure(first, USER_ERROR if is_user_error else FAULT)
        if codes[first.rank] == USER_ERROR and self.record(first.rank).exists():
            everywhere = [failure.text for failure in failures] == [first.text] * self.nproc
            raise UserError(first.text if everywhere else f"rank {first.rank}: {first.text}")
        report = describe(
            failures,
            {
                rank: "was ended because of it"
                for rank in failure_by_rank
                if failure_by_rank[rank] is None
            },
        )
        printed = self.output(first.rank).read_text(errors="replace").strip()[-OUTPUT_SHOWN:]
        raise RankError(f"{report}\noutput of rank {first.rank}:\n{printed}" if printed else report)

    def is_restartable(self) -> bool:
        """Return whether the job has failed by a fault, after which it may be started again: no
        signal, no error that the user can fix, and no stop after a save."""
        failures = self.failures()
        if self.signals or any(each.returncode in FINAL_CODES for each in self.processes):
            return False
        return not any(
            failure is not None and self.processes[rank].returncode in ENDING_SIGNALS
            for rank, failure in failures.items()
        )

    def describe_cause(self) -> str:
        """Return the first failure as a line."""
        return describe_in_a_line(sort_failures(each for each in self.failures().values() if each))

    def failures(self) -> dict[int, Failure | None]:
        """Return how each rank failed that did; None if the launcher ended it."""
        return {
            rank: self._failure(rank)
            for rank, process in enumerate(self.processes)
            if process.returncode not in ENDED
        }

    def _report_interrupt(self, code: int) -> None:
        if self.on_failure is not None:
            text = f"interrupted by {signal.Signals(self.signals[0]).name}"
            self.on_failure(Failure(0, text, text, time.monotonic_ns()), code)

    def _failure(self, rank: int) -> Failure | None:
        """Return how a rank failed; None if the launcher ended it."""
        if (recorded := self.read_record(rank)) is not None:
            return recorded
        code = self.processes[rank].returncode
        assert self.failed_ns is not None
        if code in (-signal.SIGTERM, -signal.SIGKILL) and self.ended_ns[rank] > self.failed_ns:
            return None
        text = explain_exit(code)
        return Failure(rank, text, text, self.ended_ns[rank])

    def _all_interrupted(self, failures: list[Failure]) -> bool:
        """Return whether the first signal ended the ranks; some may only have lost a peer that it
        ended."""
        summaries = (INTERRUPTED, explain_exit(-self.signals[0]))
        others = [failure for failure in failures if failure.summary not in summaries]
        lost_peer = all(failure.is_consequence for failure in others)
        return not others or (lost_peer and len(others) < len(failures))

    def read_record(self, rank: int) -> Failure | None:
        """Return the failure that a rank has recorded, if any."""
        record = self.record(rank)
        return Failure(**json.loads(record.read_text())) if record.exists() else None

    def record(self, rank: int) -> Path:
        """Return the file of a rank's failure record."""
        return self.folder / f"rank{rank}.json"

    def output(self, rank: int) -> Path:
        """Return the file of a rank's output."""
        return self.folder / f"rank{rank}.txt"


@contextmanager
def _launch_folder() -> Iterator[Path]:
    """Create a folder for failure records, locked as long as this process lives, and remove it at
    the end.

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
        # another launch may remove the folder as abandoned before it is locked
        with suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            # a file system without locks: no launch removes folders of others
            with suppress(OSError):
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
        except OSError:  # a link, a file, a folder of another user, or removed since the listing
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
    """Block the forwarded signals in this thread and in a process that it starts, which unblocks
    them in `worker_main`.

    Until then a signal to a rank stays pending: it could only end the start of Python with a
    traceback.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


@contextmanager
def _signals_to(ranks: LocalRanks) -> Iterator[None]:
    """Handle the signals that would end this process with `ranks`."""
    # Python handles signals in the main thread only
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handled = [number for number in FORWARDED_SIGNALS if not is_ignored_hangup(number)]
    before = {number: signal.signal(number, ranks.on_signal) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Supervisor of local ranks with restarts in place: after a fault of one rank, the others keep
their processes and join the next round, in which spare or new processes replace dead ones.
Imports no torch.

A fault is the end of a process, a rank that reports that it lost a peer, or a hang. The supervisor
then aborts the round, waits until every rank has left it, kills those that do not, and assigns the
ranks of the next round. While it waits, the processes that replace dead ranks start.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megalith.config.restart import RestartConfig
from megalith.errors import RankError
from megalith.launch.launcher import (
    ENDED,
    ENDING_SIGNALS,
    FAULT,
    POLL_SECONDS,
    USER_ERROR,
    Failure,
    LocalRanks,
    describe_in_a_line,
    exit_failure,
    print_launcher_line,
    sort_failures,
    write_failure,
)
from megalith.launch.rounds import (
    CONTROL,
    MAX_MESSAGE,
    SERVED_STORE,
    Abort,
    End,
    HangReport,
    Message,
    ReadyForRank,
    Round,
    RoundFailure,
    decode_message,
    encode_message,
)
from megalith.plan.restart import choose_remaining_ranks, find_restart_problem

MAX_STARTS = 2
"""Starts of a process for one rank in one restart, after which the rank is given up. Heuristic: the
second one also fails if the rank's device does."""

SPARE_DELAY_SECONDS = 10.0
"""Time after the start of a round until spares that were used are replaced: their imports would
slow the start of the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlacePolicy:
    """Restart policy and layout of the run, for the supervisor."""

    config: RestartConfig
    num_spares: int = 0
    replicas: Callable[[int], Sequence[Sequence[int]]] = lambda world: [range(world)]
    """Returns the ranks of each data-parallel replica of a number of ranks."""

    fits: Callable[[int], bool] = lambda world: False
    """Whether the run can continue with a number of ranks."""


@dataclass(slots=True, eq=False)
class JobProcess:
    """A process of the job, with or without a rank."""

    process: "subprocess.Popen[bytes]"
    control: socket.socket
    started: float
    is_ready: bool = False
    """Whether it waits for its first round."""

    round_failure: RoundFailure | None = None
    """Message with which it has left the current round."""

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None


@dataclass(slots=True)
class Restart:
    """A restart that has begun and has not assigned the next round."""

    deadline: float
    replacements: dict[int, JobProcess] = field(default_factory=dict)
    num_starts: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Ranks for which no process can be started."""

    deaths: dict[int, Failure] = field(default_factory=dict)
    unresponsive: set[int] = field(default_factory=set)
    """Ranks that were killed because they did not leave the round."""


class InPlaceRanks(LocalRanks):
    """Local ranks that are restarted in place."""

    def __init__(
        self,
        command: list[str],
        nproc: int,
        folder: Path,
        environment: Mapping[str, str],
        *,
        policy: InPlacePolicy,
        on_failure: Callable[[Failure, int], None] | None = None,
    ) -> None:
        """`on_failure` also receives the cause of each restart."""
        super().__init__(command, nproc, folder, environment, on_failure=on_failure)
        self.policy = policy
        self.round = 0
        self._members: list[JobProcess] = []  # by rank
        self._spares: list[JobProcess] = []
        self._restart: Restart | None = None
        self._times: list[float] = []
        self._num_rounds_without_step = 0
        self._hang: Failure | None = None
        self._job_started = time.monotonic()
        self._next_refill = self._job_started
        self._num_started_spares = 0
        self._problem: str | None = None
        """Why the job was not restarted in place after its last fault."""
        self._server = socket.create_server(("127.0.0.1", 0))
        self._store: subprocess.Popen[bytes] | None = None

    # --- processes

    def start(self) -> None:
        """Start the store, every rank and the spares."""
        self._start_store()
        for rank in range(self.nproc):
            self._members.append(self._start_member(rank))
            self.processes.append(self._members[rank].process)
            self.forward_earlier_signals(self.processes[rank])
        for rank, member in enumerate(self._members):
            self._assign(member, rank, "")
        for _ in range(self.policy.num_spares):
            self._start_spare()

    def _start_store(self) -> None:
        """Start the process that serves the store, unless it runs."""
        if self._store is not None and self._store.poll() is None:
            return
        fd = self._server.fileno()
        self._store = subprocess.Popen(
            [sys.executable, "-m", "megalith.launch.store", str(fd), str(os.getpid())],
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd,),
            process_group=0,
        )

    def _start_member(self, rank: int) -> JobProcess:
        """Start a process; `rank`: of its output until it is assigned another one."""
        control, rank_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        for each in (control, rank_control):  # 2048 bytes on macOS
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_MESSAGE)
        with rank_control:
            fd = rank_control.fileno()
            variables = {CONTROL: str(fd), SERVED_STORE: "1"}
            environment = self.build_environment(rank, self._server.getsockname()) | variables
            process = self.start_process(rank, environment, (fd,))
        return JobProcess(process, control, time.monotonic())

    def _start_spare(self) -> None:
        # It has an output file of its own, whatever the number of ranks.
        self._spares.append(self._start_member(self.nproc + self._num_started_spares))
        self._num_started_spares += 1

    def _assign(self, member: JobProcess, rank: int, reason: str) -> None:
        """Send a process its rank in the current round, and the standard output of that rank."""
        member.round_failure, member.is_ready = None, False
        place = Round(self.round, rank, self.nproc, reason, self._job_started)
        with self.output(rank).open("ab") as file:
            fds = [1, 2] if rank == 0 else [file.fileno(), file.fileno()]
            with suppress(OSError):  # it has ended
                socket.send_fds(member.control, [encode_message(place)], fds)

    def _list_members(self) -> list[JobProcess]:
        replacements = [] if self._restart is None else [*self._restart.replacements.values()]
        return [*self._members, *self._spares, *replacements]

    def send(self, number: int) -> None:
        """Send a signal to every process of the job. SIGUSR1 is for the current ranks only: others
        would act on it when they become ranks."""
        members = self._members if number == signal.SIGUSR1 else self._list_members()
        for member in members:
            member.process.send_signal(number)

    def kill(self) -> None:
        """Kill every running process and wait for it."""
        members = self._list_members()
        for process in [*(member.process for member in members), *filter(None, [self._store])]:
            process.kill()
            process.wait()
        for member in members:
            member.control.close()
        self._server.close()
        self.heartbeats.close()

    def wait(self) -> None:
        """Wait until a process sends a message or the next poll."""
        select.select([member.control for member in self._list_members()], [], [], POLL_SECONDS)

    # --- supervision

    def watch(self) -> bool:
        """Receive messages, poll every process once, and restart in place after a fault; return
        whether some rank runs."""
        self._receive()
        exits = self.find_exits(time.monotonic_ns())
        if self.failed_ns is None:
            self._supervise(exits)
        self.end_the_rest(time.monotonic_ns())
        return len(self.ended_ns) < self.nproc or self._restart is not None

    def _supervise(self, exits: Sequence[int]) -> None:
        """Begin, continue or complete a restart, or end the job."""
        codes = [self.processes[rank].returncode for rank in exits]
        is_fault = any(code not in ENDED for code in codes)
        has_left = any(member.round_failure is not None for member in self._members)
        if USER_ERROR in codes:
            self._end_job(None)
        elif self._restart is None and (is_fault or has_left or self._hang is not None):
            self._begin_restart()
        if self._restart is not None:
            for rank in exits:
                self._count_death(self._restart, rank)
            self._continue_restart(self._restart)
        elif self.failed_ns is None:
            self.kill_hung_rank()
            self._refill_spares()

    def _receive(self) -> None:
        for member in self._list_members():
            with suppress(BlockingIOError):
                while True:
                    data = member.control.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
                    self._handle(member, decode_message(data))

    def _handle(self, member: JobProcess, message: Message) -> None:
        match message:
            case ReadyForRank():
                member.is_ready = True
            case RoundFailure(number) if number == self.round:
                member.round_failure = message
            case HangReport(number) if number == self.round:
                failure = Failure(**message.failure)
                if self._hang is None or failure.is_report:
                    self._hang = failure

    def _begin_restart(self) -> None:
        """Abort the round, unless no restart is allowed."""
        now = time.monotonic()
        config = self.policy.config
        problem = (
            "a signal has ended the job"
            if self.signals or self._was_ended_by_signal()
            else find_restart_problem(
                self._times,
                now,
                max_in_place=config.max_in_place,
                window_minutes=config.window_minutes,
            )
        )
        if problem is not None:
            self._end_job(problem)
            return
        self._times.append(now)
        self._restart = Restart(now + config.rendezvous_timeout_seconds)
        for member in self._members:
            _send(member, Abort(self.round))

    def _was_ended_by_signal(self) -> bool:
        """Return whether someone ended a rank by SIGTERM, SIGINT or SIGHUP."""
        return any(process.returncode in ENDING_SIGNALS for process in self.processes)

    def _count_death(self, restart: Restart, rank: int) -> None:
        """Record how a rank ended, and start a process in its place."""
        restart.deaths[rank] = self._read_failure(rank)
        self._replace(restart, rank)

    def _read_failure(self, rank: int) -> Failure:
        code = self.processes[rank].returncode
        return self.read_record(rank) or exit_failure(rank, code)

    def _replace(self, restart: Restart, rank: int) -> None:
        """Use a spare for a rank, or start a new process."""
        spares = sorted(
            (spare for spare in self._spares if spare.is_alive),
            key=lambda spare: (not spare.is_ready, spare.started),
        )
        if spares:
            self._spares.remove(spares[0])
            # it has as much time to become ready as a new process
            spares[0].started = time.monotonic()
            restart.replacements[rank] = spares[0]
            return
        restart.num_starts[rank] = restart.num_starts.get(rank, 0) + 1
        if restart.num_starts[rank] > MAX_STARTS:
            restart.lost.add(rank)
            return
        try:
            restart.replacements[rank] = self._start_member(rank)
        except OSError as error:
            print_launcher_line(f"no process can be started in place of rank {rank}: {error}")
            restart.lost.add(rank)

    def _continue_restart(self, restart: Restart) -> None:
        """Assign the next round, if every process has left the old one or ended and every new one
        is ready."""
        if self.signals:
            self._end_job("a signal has ended the job")
            return
        alive = {rank: member for rank, member in enumerate(self._members) if member.is_alive}
        if not alive:
            self._end_job("no rank has survived")
            return
        if any(process.returncode in ENDED for process in self.processes):
            self._end_job("some ranks have ended already")
            return
        now = time.monotonic()
        staying = [rank for rank, member in alive.items() if member.round_failure is None]
        if staying and now > restart.deadline:
            restart.unresponsive.update(staying)
            for rank in staying:
                self.processes[rank].kill()
                self.processes[rank].wait()  # its lock and connections are free after that
            return  # found by the next poll
        self._check_replacements(restart, now)
        is_complete = all(member.is_ready for member in restart.replacements.values())
        if not staying and is_complete:
            self._complete_restart(restart, alive)

    def _check_replacements(self, restart: Restart, now: float) -> None:
        """Replace processes that ended before they were ready, or need too long."""
        timeout = self.policy.config.rendezvous_timeout_seconds
        for rank, member in [*restart.replacements.items()]:
            if member.is_alive and (member.is_ready or now < member.started + timeout):
                continue
            is_late = member.is_alive
            self._end_member(member)
            del restart.replacements[rank]
            if is_late:
                restart.lost.add(rank)  # another one would need as long
            else:
                self._replace(restart, rank)

    def _complete_restart(self, restart: Restart, alive: dict[int, JobProcess]) -> None:
        """Assign the ranks of the next round."""
        num_steps = max(
            member.round_failure.num_steps for member in alive.values() if member.round_failure
        )
        self._num_rounds_without_step = 0 if num_steps else self._num_rounds_without_step + 1
        config = self.policy.config
        problem = find_restart_problem(
            self._times[:-1],
            self._times[-1],
            max_in_place=config.max_in_place,
            window_minutes=config.window_minutes,
            num_rounds_without_step=self._num_rounds_without_step,
        )
        remaining = tuple(range(self.nproc))
        if restart.lost:
            replicas = self.policy.replicas(self.nproc)
            remaining = choose_remaining_ranks(replicas, restart.lost, self.policy.fits)
            if not remaining:
                timeout = config.rendezvous_timeout_seconds
                problem = problem or (
                    f"no process took the place of ranks {sorted(restart.lost)} within "
                    f"restart.rendezvous_timeout_seconds={timeout:g}, and the run cannot continue "
                    "with fewer replicas"
                )
        if problem is not None:
            self._end_job(problem)
            return
        failures = self._list_failures(restart, alive)
        if self.on_failure is not None:
            self.on_failure(failures[0], FAULT)
        reason = self._describe(restart, alive, remaining, failures[0])
        print_launcher_line(reason)
        self._start_round(alive | restart.replacements, remaining, reason)

    def _start_round(
        self, members: dict[int, JobProcess], remaining: Sequence[int], reason: str
    ) -> None:
        """Start the next round; `members`: by their rank in the last one, or that which they
        replace."""
        for member in self._members:
            if member not in members.values():
                self._end_member(member)  # it has ended already
        for rank, member in members.items():
            if rank not in remaining:  # left over by a smaller number of ranks, and warm
                member.is_ready, member.round_failure = True, None
                self._spares.append(member)
        for rank in range(self.nproc):
            self.record(rank).unlink(missing_ok=True)
        self._members = [members[rank] for rank in remaining]
        self.processes = [member.process for member in self._members]
        self.nproc = len(remaining)
        self.ended_ns.clear()
        self._restart = self._hang = None
        self.round += 1
        self._next_refill = time.monotonic() + SPARE_DELAY_SECONDS
        self._start_store()
        for rank, member in enumerate(self._members):
            self._assign(member, rank, reason)

    def _list_failures(self, restart: Restart, alive: dict[int, JobProcess]) -> list[Failure]:
        """Return the failures of the round, the cause first."""
        left = [
            Failure(**member.round_failure.failure)
            for member in alive.values()
            if member.round_failure
        ]
        deaths = [
            failure for rank, failure in restart.deaths.items() if rank not in restart.unresponsive
        ]
        hangs = [] if self._hang is None else [self._hang]
        return [*hangs, *sort_failures([*deaths, *left])]

    def _end_member(self, member: JobProcess) -> None:
        """End a process, and release what belongs to it."""
        member.process.kill()
        member.process.wait()
        member.control.close()
        self.heartbeats.remove(member.process.pid)

    def _describe(
        self,
        restart: Restart,
        alive: dict[int, JobProcess],
        remaining: Sequence[int],
        cause: Failure,
    ) -> str:
        """Return the cause of a restart and the changes of the ranks, as a line."""
        shown = cause.summary if cause.is_report else describe_in_a_line([cause])
        replaced = [rank for rank in restart.replacements if rank in remaining]
        num_kept = sum(rank in remaining for rank in alive)
        parts = [f"{num_kept} of {self.nproc} ranks keep their processes"]
        parts += [f"ranks {sorted(replaced)} are replaced"] if replaced else []
        if restart.unresponsive:
            ranks = sorted(restart.unresponsive)
            parts.append(f"ranks {ranks} did not leave their step and were killed")
        if len(remaining) < self.nproc:
            parts.append(f"the run continues on {len(remaining)} of {self.nproc} ranks")
        number = f"restart {self.round + 1} in place"
        return f"{shown}; {number}: {', '.join(parts)}"

    def _refill_spares(self) -> None:
        """Start spares in place of those that were used or have ended."""
        if time.monotonic() < self._next_refill:
            return
        self._next_refill = time.monotonic() + SPARE_DELAY_SECONDS
        for spare in [spare for spare in self._spares if not spare.is_alive]:
            self._spares.remove(spare)
            self._end_member(spare)
        while len(self._spares) < self.policy.num_spares and not self.signals:
            self._start_spare()

    def _end_job(self, problem: str | None) -> None:
        """End the job, because no restart follows; ranks that have left the round report why."""
        self._problem = problem
        self.failed_ns = min(self.ended_ns.values(), default=time.monotonic_ns())
        if self._hang is not None:
            write_failure(self._hang, f"{os.getpid()}:{self.folder}")
            self.send(signal.SIGKILL)  # they wait in a collective
        if self._restart is not None:
            for member in self._restart.replacements.values():
                self._end_member(member)
        for spare in self._spares:
            self._end_member(spare)
        self._restart, self._spares = None, []
        for member in self._members:
            _send(member, End())

    # --- the end of the job

    def outcome(self) -> int:
        """Return the exit code of the job, or raise the error that `run_workers` raises, with the
        reason why no restart followed."""
        try:
            return super().outcome()
        except RankError as error:
            if self._problem is None:
                raise
            raise RankError(f"{error}\nNo restart in place followed: {self._problem}.") from None


def _send(member: JobProcess, message: Message) -> None:
    with suppress(OSError):  # it has ended
        member.control.send(encode_message(message), socket.MSG_DONTWAIT)

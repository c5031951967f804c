"""Starts of a run: the lines of `starts.jsonl`, the checkpoint with which a start begins after
earlier ones have failed, and hosts that are suspects."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megalith.checkpoint.lock import identify_process
from megalith.errors import CheckpointError, RankError, UserError
from megalith.launch.launcher import FAULT, LAUNCHER, USER_ERROR, exception_failure
from megalith.launch.rounds import Round
from megalith.observe.limits import read_host_name
from megalith.parallel.group import Group, gather_objects, raise_on_all_ranks
from megalith.plan.starts import (
    MAX_FAILED_STARTS,
    Start,
    StartDecision,
    decide_start,
    find_suspect_hosts,
)
from megalith.train.start_records import (
    STARTS,
    append_record,
    read_process_start,
    read_records,
    read_starts,
)

SUSPECTS = "suspects.jsonl"
"""File of the run folder: one line for each suspect, with host, device, rank and reason."""

RECURRING = "recurring"
"""Kind of a suspect on which several starts failed."""

INTERRUPTED_CODE = 130
"""Exit code after Ctrl-C."""

_log = logging.getLogger(__name__)


class StartLog:
    """Writes the start and the exit of this process's run to `starts.jsonl`, and decides with which
    checkpoint a start begins."""

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        escalates: bool = False,
        environment: Mapping[str, str] | None = None,
        current_round: Round | None = None,
    ) -> None:
        """`escalates`: begin with an older checkpoint, or not at all, if earlier starts have failed
        with the same cause. `environment`: of the process, which identifies its launcher.
        `current_round`: of a job that may be restarted in place; each round is a start."""
        self.job_started = None if current_round is None else current_round.job_started
        """`time.monotonic()` from which train.max_minutes counts; None: from the first step on."""
        self.folder, self.rank, self.escalates = folder, rank, escalates
        launcher = (environment or {}).get(LAUNCHER)
        self.launcher = None if launcher is None else int(launcher.partition(":")[0])
        """Process id of our launcher, which waits before it starts ranks again, and writes how they
        ended."""
        self._launcher_identity = "" if self.launcher is None else identify_process(self.launcher)
        self.began, self._began_monotonic = (
            (time.time(), time.monotonic())
            if current_round is not None and current_round.number > 0
            else read_process_start()
        )
        self.number = 0
        """Number of this start, from 1; 0: it is not recorded yet."""

    @property
    def elapsed(self) -> float:
        """Seconds since this process began, by the monotonic clock."""
        return time.monotonic() - self._began_monotonic

    def decide(
        self, world: Group, *, newest_step: int, has_older_tier: bool, has_older_checkpoint: bool
    ) -> StartDecision:
        """Return the checkpoint with which the run starts, after the delay before that. Collective;
        the last three arguments count on rank 0.

        Raises:
            CheckpointError: on every rank: the run is in a crash loop.
        """

        def decide_on_first_rank() -> StartDecision | None:
            if self.rank != 0 or not self.escalates:
                return None
            starts, problems = read_starts(self.folder)
            for problem in problems:
                _log.warning(problem)
            decision = decide_start(
                starts,
                newest_step=newest_step,
                has_older_tier=has_older_tier,
                has_older_checkpoint=has_older_checkpoint,
            )
            if decision.choice == "reject":
                raise CheckpointError(describe_crash_loop(self.folder, starts, decision))
            if decision.choice != "newest" and starts[-1].exit is not None:
                _log.warning(
                    "the last %d starts ended with the same cause (%.200s) before a checkpoint "
                    "newer than step %d: this start uses the %s",
                    decision.num_failed,
                    starts[-1].exit.cause,
                    newest_step,
                    decision.choice.replace("_", " "),
                )
            _report_suspects(self.folder, starts)
            return decision

        decision = raise_on_all_ranks(decide_on_first_rank, world)[0]
        if decision is None:
            return StartDecision("newest", 0, 0.0)
        if decision.delay_seconds and self.launcher is None:
            if self.rank == 0:
                _log.warning("waiting %g s after the last fault", decision.delay_seconds)
            time.sleep(decision.delay_seconds)  # on every rank, so that none waits for a message
        return decision

    def write_start(
        self,
        world: Group,
        *,
        step: int,
        newest_step: int,
        layout: str,
        checkpoint: str | None,
        tier: str,
    ) -> None:
        """Write the line of this start on rank 0, and set its number. Collective."""
        hosts = gather_objects(read_host_name(), world)
        number = 0
        if self.rank == 0:
            records, _ = read_records(self.folder / STARTS)
            numbers = [each.get("start") for each in records if each.get("kind") == "start"]
            number = 1 + max((each for each in numbers if isinstance(each, int)), default=0)
            self._append(
                {
                    "kind": "start",
                    "start": number,
                    "time": round(time.time(), 3),
                    "began": round(self.began, 3),
                    "step": step,
                    "newest_step": newest_step,
                    "world_size": world.size,
                    "hosts": list(dict.fromkeys(map(str, hosts))),
                    "layout": layout,
                    "checkpoint": checkpoint,
                    "tier": tier,
                    "launcher": self.launcher,
                    "launcher_identity": self._launcher_identity,
                }
            )
        numbers_of_ranks = gather_objects(number, world)
        assert isinstance(numbers_of_ranks[0], int), "rank 0 has sent it"
        self.number = numbers_of_ranks[0]

    @contextmanager
    def record_failure(self) -> Iterator[None]:
        """Write an error that ends this rank, unless our launcher writes it. An error that ends all
        ranks, or that only shows that another rank has failed, is written by rank 0 alone."""
        try:
            yield
        except BaseException as error:
            if self.launcher is None and self.number:
                self._write_failure(error)
            raise

    def _write_failure(self, error: BaseException) -> None:
        failure = exception_failure(self.rank, error)
        is_consequence = failure.is_consequence or isinstance(error, RankError)
        code = USER_ERROR if isinstance(error, UserError) else FAULT
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED_CODE
        if self.rank == 0 or not (is_consequence or code == USER_ERROR):
            self.write_exit(failure.summary, code, rank=self.rank, is_consequence=is_consequence)

    def write_exit(
        self,
        cause: str,
        code: int,
        *,
        step: int | None = None,
        rank: int | None = None,
        is_consequence: bool = False,
    ) -> None:
        """Write how this start ended."""
        self._append(
            {
                "kind": "exit",
                "start": self.number,
                "time": round(time.time(), 3),
                "elapsed": round(self.elapsed, 3),
                "cause": cause[:500],
                "code": code,
                "step": step,
                "rank": rank,
                "host": read_host_name(),
                "is_consequence": is_consequence,
            }
        )

    def _append(self, record: Mapping[str, Any]) -> None:  # Any: JSON
        try:
            append_record(self.folder / STARTS, record)
        except OSError as error:
            _log.warning(
                "%s cannot be written (%s); the run continues", self.folder / STARTS, error
            )


def describe_crash_loop(folder: Path, starts: Sequence[Start], decision: StartDecision) -> str:
    """Return the error of a start that is rejected, with the table of the attempts."""
    attempts = starts[-decision.num_failed :]
    rows = [("start", "time", "ranks", "hosts", "checkpoint", "step", "cause of the exit")]
    for start in attempts:
        assert start.exit is not None, "it has failed"
        rows.append(
            (
                str(start.number),
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.time)),
                str(start.world_size),
                describe_hosts(start.hosts),
                f"{start.checkpoint or 'none'} ({start.tier})" if start.checkpoint else "none",
                str(start.step),
                start.exit.cause[:100],
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = "\n".join(
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return (
        f"{folder}: the last {decision.num_failed} starts ended with the same cause before there "
        f"was a newer checkpoint, also with older ones, so this start is rejected:\n{table}\n"
        f"Remove the cause (see {folder / 'log.txt'}), and run the same command again with "
        f"--reset-attempts; {MAX_FAILED_STARTS} more starts are possible then."
    )


def describe_hosts(hosts: Sequence[str]) -> str:
    """Return a short text of the hosts of a job.

    >>> describe_hosts(["n1", "n2", "n3"])
    'n1 and 2 more'
    """
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"


def append_suspect(folder: Path, *, host: str, rank: int | None, step: int, reason: str) -> None:
    """Write a host to `suspects.jsonl` because its faults recur, unless it is there already."""
    records, _ = read_records(folder / SUSPECTS)
    if any(each.get("host") == host and each.get("kind") == RECURRING for each in records):
        return
    record = {
        "time": round(time.time(), 3),
        "step": step,
        "kind": RECURRING,
        "rank": rank,
        "host": host,
        "device": None,
        "coordinates": {},
        "reason": reason,
        "exits": False,
    }
    append_record(folder / SUSPECTS, record)


def _report_suspects(folder: Path, starts: Sequence[Start]) -> None:
    """Log and record the hosts on which several starts failed."""
    for host, named in find_suspect_hosts(starts).items():
        reason = f"named by faults of starts {', '.join(str(each.number) for each in named)}"
        _log.warning("host %s is a suspect: %s", host, reason)
        last = named[-1].exit
        try:
            append_suspect(
                folder,
                host=host,
                rank=None if last is None else last.rank,
                step=named[-1].step,
                reason=reason,
            )
        except OSError as error:
            _log.warning("%s cannot be written (%s)", folder / SUSPECTS, error)

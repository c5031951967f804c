"""Simulates the pipeline schedules of all ranks, to verify that they do not deadlock.

It checks the order of actions and messages and the live activations, but no values. Messages are
simulated twice: matched by tags, as in gloo, and as queues of blocking operations, as in NCCL.
"""

from dataclasses import dataclass
from fractions import Fraction

from megalith.config.parallel import PipelineConfig, ScheduleName
from megalith.plan.check_schedule import queue_problems
from megalith.plan.p2p import with_transfers
from megalith.plan.schedule import (
    Schedule,
    build_schedule,
    pair_forward_backward,
    schedule_name,
    schedule_problems,
)
from megalith.plan.simulate import Costs, find_problems, peak_activation_memory, simulate


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """Properties of a pipeline step, and whether it can run."""

    name: ScheduleName
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    problems: tuple[str, ...]
    """Violated rules, or rank and action of a deadlock; empty: verified."""

    num_actions: int = 0
    """Actions of all ranks, including messages."""

    num_messages: int = 0

    bubble: Fraction | None = None
    """Idle time over compute time; None: the schedule cannot run."""

    bubble_of_total: Fraction | None = None
    """Idle time over total time."""

    peak_live: tuple[Fraction, ...] = ()
    """Per rank: the largest number of microbatches whose activations are live; one of v chunks
    counts 1/v."""

    @property
    def ok(self) -> bool:
        """Whether the schedule completes with gloo and with NCCL."""
        return not self.problems

    def summary(self) -> str:
        """Return a one-line summary."""
        where = f"{self.name} on {self.num_ranks} ranks, {self.num_microbatches} microbatches"
        if self.bubble_of_total is None:
            return f"{where}: cannot run"
        live = [float(peak) for peak in self.peak_live]
        span = f"{max(live):g}" if max(live) == min(live) else f"{min(live):g} to {max(live):g}"
        return (
            f"{where}: {self.num_actions:,} actions, {self.num_messages:,} messages, no deadlock "
            "with tags (gloo) or "
            f"without (NCCL); bubble {float(self.bubble_of_total):.1%} of the step; at most {span} "
            "live microbatches per rank"
        )


def check_schedule(
    pipeline: PipelineConfig,
    *,
    pp: int,
    num_microbatches: int,
    rows: int | None = None,
    overlap: bool = True,
    paired: bool = False,
    costs: Costs | None = None,
) -> ScheduleReport:
    """Build the schedules of training and evaluation, and simulate them.

    `rows`: see `plan/schedule.schedule_problems`. `overlap`: parallel.overlap, which determines
    where receives are posted. `paired`: parallel.overlap_experts, which computes microbatches in
    pairs; the simulation shows no speedup. `costs`: of the stages; unset: F, I and W take equally
    long, and messages no time.
    """
    name = schedule_name(pipeline)
    problems = schedule_problems(pipeline, pp=pp, num_microbatches=num_microbatches, rows=rows)
    if problems:
        return ScheduleReport(name, pp, pipeline.vpp, num_microbatches, tuple(problems))
    training, evaluation = (
        build_schedule(
            name,
            num_ranks=pp,
            num_chunks=pipeline.vpp,
            num_microbatches=num_microbatches,
            group=pipeline.group,
            forward_only=forward_only,
        )
        for forward_only in (False, True)
    )
    lists = pair_forward_backward(training) if paired else training, evaluation
    report, other = (check_lists(with_transfers(each, overlap=overlap), costs) for each in lists)
    return report if other.ok else other


def check_lists(schedule: Schedule, costs: Costs | None = None) -> ScheduleReport:
    """Simulate a given schedule, which includes its messages, with tags and without."""
    sizes = schedule.name, schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
    problems = find_problems(schedule) or queue_problems(schedule)
    if problems:
        return ScheduleReport(*sizes, tuple(problems))
    result = simulate(schedule, costs)
    return ScheduleReport(
        *sizes,
        problems=(),
        num_actions=sum(map(len, schedule.ranks)),
        num_messages=len(result.messages()),
        bubble=result.bubble,
        bubble_of_total=result.bubble_of_total,
        peak_live=tuple(
            Fraction(peak) / schedule.num_chunks for peak in peak_activation_memory(schedule)
        ),
    )

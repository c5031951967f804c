"""Rollbacks: which checkpoint a run returns to after bad steps, and which samples it skips; no
torch.

Skipped samples are consumed without a step that trains on them, so the order of the others does
not change. Batch-size schedule and dropout count only the samples that are not skipped, so a run
after a rollback equals one whose data never contained the skipped samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from megalith.config.fault_detection import FaultDetectorConfig
from megalith.plan.batch_schedule import BatchSizeSchedule


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """The steps whose update or samples are bad, for a rollback that a callback requests."""

    first_bad_step: int
    """First step that must be undone, such as that of a loss spike."""

    last_bad_step: int
    """Last step whose samples must be skipped; at most the step that requests the rollback."""

    reason: str = ""
    """Why the samples are skipped, for skipped.jsonl; empty: a callback requested it."""

    skips_samples: bool = True
    """False: the samples are good, so the steps are repeated with them."""


def combine_plans(plans: Sequence[RollbackPlan]) -> RollbackPlan | None:
    """Return one plan for several faults: one that repeats steps with their samples, if there is
    one, because then a machine is at fault; else the steps of all. None if there are no plans.

    >>> combine_plans([RollbackPlan(7, 8), RollbackPlan(5, 5, "loss spike")])
    RollbackPlan(first_bad_step=5, last_bad_step=8, reason='loss spike', skips_samples=True)
    """
    if not plans:
        return None
    chosen = [plan for plan in plans if not plan.skips_samples] or plans
    earliest = min(chosen, key=lambda plan: plan.first_bad_step)
    return replace(earliest, last_bad_step=max(plan.last_bad_step for plan in chosen))


@dataclass(frozen=True, slots=True)
class SkippedSamples:
    """Ranges of samples that a run skips: disjoint, in increasing order.

    >>> skipped = SkippedSamples().add(4, 8).add(10, 12)
    >>> [skipped.locate(number) for number in range(8)]
    [0, 1, 2, 3, 8, 9, 12, 13]
    >>> [skipped.count_before(position) for position in (4, 6, 8, 11, 20)]
    [0, 2, 4, 5, 6]
    """

    ranges: tuple[tuple[int, int], ...] = ()
    """First sample and end of each range; the end is not skipped."""

    def __bool__(self) -> bool:
        """Return whether any samples are skipped."""
        return bool(self.ranges)

    def add(self, first: int, end: int) -> Self:
        """Return the ranges with the samples from `first` to before `end`."""
        assert 0 <= first <= end, (first, end)
        if first == end:
            return self
        apart = [each for each in self.ranges if each[1] < first or end < each[0]]
        joined = [each for each in self.ranges if each not in apart]
        first = min([first, *(each[0] for each in joined)])
        end = max([end, *(each[1] for each in joined)])
        return type(self)(tuple(sorted([*apart, (first, end)])))

    def merge(self, ranges: Iterable[tuple[int, int]]) -> Self:
        """Return the ranges together with others."""
        merged = self
        for first, end in ranges:
            merged = merged.add(first, end)
        return merged

    def count_before(self, position: int) -> int:
        """Return the number of skipped samples before `position`."""
        return sum(max(0, min(end, position) - first) for first, end in self.ranges)

    def locate(self, number: int) -> int:
        """Return the position of a sample: that of index `number` among the samples that are not
        skipped."""
        position = number
        for first, end in self.ranges:
            if position < first:
                break
            position += end - first
        return position

    def locate_end(self, number: int) -> int:
        """Return the end of the first `number` samples that are not skipped."""
        return self.locate(number - 1) + 1 if number else 0


NO_SAMPLES = SkippedSamples()
"""No skipped samples."""


def count_read(skipped: SkippedSamples, consumed: int) -> int:
    """Return how many of the first `consumed` samples are not skipped: the position in the
    batch-size schedule.

    >>> count_read(SkippedSamples(((4, 8),)), 10)
    6
    """
    return consumed - skipped.count_before(consumed)


def advance(
    schedule: BatchSizeSchedule, skipped: SkippedSamples, *, consumed: int, num_steps: int
) -> int:
    """Return the number of consumed samples after `num_steps` more steps.

    >>> schedule = BatchSizeSchedule(starts=(0, 4), sizes=(2, 4))
    >>> advance(schedule, SkippedSamples(((2, 8),)), consumed=2, num_steps=2)
    14
    """
    read = count_read(skipped, consumed)
    return skipped.locate(read + schedule.count_samples(num_steps, consumed=read))


@dataclass(frozen=True, slots=True)
class RollbackTarget:
    """The checkpoint that a run returns to."""

    step: int

    is_recent: bool
    """Whether it is later than requested, because no older healthy checkpoint exists."""


def choose_checkpoint(
    healthy: Mapping[int, bool], plan: RollbackPlan, *, rollback_steps: int
) -> RollbackTarget | None:
    """Return the newest healthy checkpoint at least `rollback_steps` before the first bad step;
    otherwise the oldest healthy one before that step; None if there is none.

    healthy: of each complete checkpoint, by step.

    >>> checkpoints = {100: True, 200: True, 250: False, 300: True}
    >>> choose_checkpoint(checkpoints, RollbackPlan(320, 321), rollback_steps=100)
    RollbackTarget(step=200, is_recent=False)
    >>> choose_checkpoint(checkpoints, RollbackPlan(150, 150), rollback_steps=100)
    RollbackTarget(step=100, is_recent=True)
    """
    before = sorted(step for step, good in healthy.items() if good and step < plan.first_bad_step)
    old_enough = [step for step in before if step <= plan.first_bad_step - rollback_steps]
    if old_enough:
        return RollbackTarget(old_enough[-1], is_recent=False)
    return RollbackTarget(before[0], is_recent=True) if before else None


def plan_skipped_range(
    schedule: BatchSizeSchedule,
    skipped: SkippedSamples,
    *,
    consumed: int,
    num_steps: int,
    skip_samples_past_spike: int,
) -> tuple[int, int]:
    """Return the samples to skip, first and end: those of the steps from the checkpoint to the last
    bad step, and at least `skip_samples_past_spike` more, up to the end of a step.

    consumed: samples that the checkpoint's run had consumed; num_steps: steps that read samples
    since then, up to the last bad step; skipped: ranges that were skipped in the meantime.

    >>> schedule = BatchSizeSchedule(starts=(0,), sizes=(4,))
    >>> plan_skipped_range(
    ...     schedule, SkippedSamples(), consumed=40, num_steps=3, skip_samples_past_spike=5
    ... )
    (40, 60)
    """
    end = advance(schedule, skipped, consumed=consumed, num_steps=num_steps)
    least = end + skip_samples_past_spike
    while end < least:
        end = advance(schedule, skipped, consumed=end, num_steps=1)
    return consumed, end


def list_rollback_limits(settings: FaultDetectorConfig, step: int) -> tuple[int, ...]:
    """Return the latest steps that rollbacks after step `step` may restore: one per kind of fault
    that leads to a rollback.

    >>> settings = FaultDetectorConfig(spike="rollback", replica_check_every=30)
    >>> list_rollback_limits(settings, 270)
    (171, 240)
    """
    limits = []
    if "rollback" in (settings.nonfinite, settings.spike, settings.model_fault):
        limits.append(step + 1 - settings.rollback_steps)
    if every := settings.replica_check_every:
        limits.append((step - 1) // every * every)  # the last comparison without a difference
    return tuple(limits)

"""Numeric fault detection: spikes of a step's statistics, and the cause of a fault from reruns of
its step.

A rerun repeats forward and backward with the same weights, samples and random keys, so its
gradients have the same bits unless a machine computes wrongly (silent data corruption). A rerun
with shifted samples gives each data-parallel rank the samples of its neighbor: a wrong value moves
with the samples if the model or its data causes it, and stays on the rank if a machine does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Literal

from megalith.config.fault_detection import FaultAction, FaultDetectorConfig

MIN_ACCEPTED_STEPS = 32
"""Accepted steps before spikes are detected; also the steps without detection after a change of the
batch size or of the optimizer."""

MAX_SPIKES_IN_A_ROW = 32
"""Spikes in a row after which the window is reset: the level of the run has changed (heuristic:
skipped ones end the run after 20)."""

SPIKE_FACTOR = 1.5
"""A spike is larger than this times the median."""

MIN_EXCESS = {"zero_share": 0.1}
"""Least difference between a spike of a statistic and the median (heuristic: the gradients of rare
tokens and of experts without tokens are zero in some steps only)."""

MAD_TO_SIGMA = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation (MAD)."""

SPIKE_RATE_STEPS = 1000
"""Steps over which the rate of spikes is logged."""

# --- spikes


@dataclass(frozen=True, slots=True)
class Spike:
    """A value far above its recent ones."""

    name: str
    value: float
    median: float
    threshold: float

    def __str__(self) -> str:
        return (
            f"{self.name} {self.value:.6g} (threshold {self.threshold:.6g}, median "
            f"{self.median:.6g})"
        )


@dataclass(frozen=True, slots=True)
class StepHistory:
    """Statistics of the last accepted steps, by name, and the recent spikes."""

    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """The oldest value first; those of skipped and discarded steps and of spikes are not
    accepted."""

    spike_steps: tuple[int, ...] = ()
    """Steps with a spike among the last `SPIKE_RATE_STEPS`."""

    num_in_a_row: int = 0
    """Number of spikes in a row, up to the last step."""

    def accept(self, statistics: Mapping[str, float], *, window: int) -> "StepHistory":
        """Return the history with one more accepted step."""
        values = {
            name: (*self.values.get(name, ()), value)[-window:]
            for name, value in statistics.items()
            if math.isfinite(value)
        }
        return replace(self, values={**self.values, **values}, num_in_a_row=0)

    def add_spike(self, step: int) -> "StepHistory":
        """Return the history with a spike in `step`; after `MAX_SPIKES_IN_A_ROW` without its
        values."""
        recent = tuple(each for each in self.spike_steps if step - SPIKE_RATE_STEPS < each < step)
        steps, in_a_row = (*recent, step), self.num_in_a_row + 1
        if in_a_row >= MAX_SPIKES_IN_A_ROW:
            return StepHistory(spike_steps=steps)
        return replace(self, spike_steps=steps, num_in_a_row=in_a_row)

    def without_values(self) -> "StepHistory":
        """Return the history after a change that changes the statistics, such as of the batch
        size."""
        return StepHistory(spike_steps=self.spike_steps)

    def spike_rate(self, step: int) -> float:
        """Return the share of steps with a spike among the last `SPIKE_RATE_STEPS` before and
        including `step`."""
        num_spikes = sum(step - SPIKE_RATE_STEPS < each <= step for each in self.spike_steps)
        return num_spikes / max(1, min(step, SPIKE_RATE_STEPS))


def find_spikes(
    history: StepHistory, statistics: Mapping[str, float], *, sigmas: float
) -> tuple[Spike, ...]:
    """Return the finite statistics of a step that are spikes.

    The threshold is the median plus `sigmas` robust standard deviations, and at least
    `SPIKE_FACTOR` times the median and `MIN_EXCESS` above it. Source of the robust deviation:
    Rousseeuw and Croux 1993, "Alternatives to the median absolute deviation".

    >>> history = StepHistory({"loss": tuple(2 + 0.01 * (step % 5) for step in range(32))})
    >>> [str(spike) for spike in find_spikes(history, {"loss": 3.5}, sigmas=6)]
    ['loss 3.5 (threshold 3.03, median 2.02)']
    """
    spikes = []
    for name, value in statistics.items():
        accepted = history.values.get(name, ())
        if len(accepted) < MIN_ACCEPTED_STEPS or not math.isfinite(value):
            continue
        middle = median(accepted)
        excess = max((SPIKE_FACTOR - 1) * abs(middle), MIN_EXCESS.get(name, 0.0))
        if value <= middle + excess:
            continue  # in most steps; the deviation takes as long as the median
        sigma = MAD_TO_SIGMA * median([abs(each - middle) for each in accepted])
        threshold = middle + max(sigmas * sigma, excess)
        if value > threshold:
            spikes.append(Spike(name, value, middle, threshold))
    return tuple(spikes)


# --- cause of a fault


@dataclass(frozen=True, slots=True)
class RankGradients:
    """Measurements of one rank in one run of a step: its gradients before they are reduced over
    ranks, and its losses."""

    bits: tuple[int, ...]
    """Sums over the bits of the gradients per reduction, and of the losses; equal if all are."""

    norm: float = 0.0
    """L2 norm of the gradients; NaN or infinite if any element is. 0 if it was not recorded."""

    loss: float = 0.0
    """Sum of the losses of this rank."""

    nonfinite: tuple[str, ...] = ()
    """Parameters whose gradient is not finite."""

    reduced_bits: tuple[int, ...] = ()
    """Sums over the bits of the shards that this rank updates, after the reduction."""

    @property
    def is_finite(self) -> bool:
        """Whether gradients and losses have no NaN or infinite values."""
        return math.isfinite(self.norm) and math.isfinite(self.loss) and not self.nonfinite

    def is_equal(self, other: "RankGradients", tolerance: float | None) -> bool:
        """Return whether two measurements are equal: bitwise, or with `tolerance` up to a relative
        difference of norm and loss."""
        if tolerance is None or self.bits == other.bits:
            return self.bits == other.bits
        return _is_close(self.norm, other.norm, tolerance) and _is_close(
            self.loss, other.loss, tolerance
        )

    def is_worse(self, other: "RankGradients") -> bool:
        """Return whether this is less plausible than another measurement of the same samples: not
        finite, or larger. A loss decides first, because expert parallelism sends wrong gradients to
        other ranks."""
        if math.isfinite(self.loss) != math.isfinite(other.loss):
            return not math.isfinite(self.loss)
        if self.is_finite != other.is_finite:
            return not self.is_finite
        return (self.norm, abs(self.loss)) > (other.norm, abs(other.loss))


def _is_close(value: float, other: float, tolerance: float) -> bool:
    """Return whether two values are equal up to a relative difference, or both not finite."""
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.isfinite(value) == math.isfinite(other)
    return math.isclose(value, other, rel_tol=tolerance)


@dataclass(frozen=True, slots=True)
class StepRun:
    """Forward and backward of a step, once."""

    ranks: tuple[RankGradients, ...]
    """By rank."""

    shift: int = 0
    """1 if the samples were shifted (`SampleShift`), else 0."""


@dataclass(frozen=True, slots=True)
class SampleShift:
    """Data-parallel rank `i` computes the samples of rank `i - num_ranks` in a shifted rerun."""

    num_ranks: int
    """A whole expert-parallel group is shifted, because its ranks compute together; within it, if
    there is no other."""

    is_exact: bool
    """Whether the same samples give the same bits on other ranks."""

    def list_cycles(self, group: Sequence[int]) -> list[list[int]]:
        """Return the ranks of a data-parallel group that give their samples to one another, each
        to the next.

        >>> SampleShift(2, is_exact=True).list_cycles([0, 1, 2, 3])
        [[0, 2], [1, 3]]
        """
        step = math.gcd(self.num_ranks, len(group))
        cycles = []
        for first in range(step):
            places = [(first + turn * self.num_ranks) for turn in range(len(group) // step)]
            cycles.append([group[place % len(group)] for place in places])
        return cycles


def plan_sample_shift(dp: int, expert_group_dp_ranks: Sequence[int]) -> SampleShift:
    """Return the shift of the samples in a rerun.

    expert_group_dp_ranks: data-parallel ranks of one expert-parallel group, which receive tokens of
    one another. If it has all of them, experts get their tokens in another order, and with it
    other rounding errors.

    >>> plan_sample_shift(4, [0]).num_ranks, plan_sample_shift(4, [2, 3]).num_ranks
    (1, 2)
    >>> plan_sample_shift(2, [0, 1])
    SampleShift(num_ranks=1, is_exact=False)
    """
    size = len(set(expert_group_dp_ranks))
    if size > 1 and (size == dp or dp % size):
        return SampleShift(1, is_exact=False)
    return SampleShift(size, is_exact=True)


Cause = Literal["none", "transient", "persistent", "state", "model", "undecided"]
"""none: no rank differs, and the checks pass; transient: a machine computed wrongly once;
persistent: it does so repeatedly; state: the memory of a machine has optimizer state that
training cannot produce; model: the model or its data; undecided: there is no other rank that could
compute the samples."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a fault, or the next run that is needed to find it."""

    cause: Cause | None
    """None: not known yet."""

    ranks: tuple[int, ...] = ()
    """Ranks at fault; for `undecided`, those whose own values are not plausible, or all."""

    shift: int = 0
    """Shift of the samples in the next run, if the cause is not known yet."""


def diagnose_runs(
    runs: Sequence[StepRun],
    passes: Sequence[bool],
    dp_groups: Sequence[Sequence[int]],
    *,
    max_reruns: int,
    tolerance: float | None = None,
    shift_tolerance: float | None = None,
) -> Diagnosis:
    """Return the cause of a fault of a step from its runs so far.

    `passes`: whether the statistics of each run pass the checks; `dp_groups`: the ranks of each
    data-parallel group in the order of the shift (`SampleShift.list_cycles`); `tolerance`: see
    `RankGradients.is_equal`; `shift_tolerance`: the same between ranks, if experts of all
    data-parallel ranks compute together. The first runs have `shift` 0; at most `max_reruns` reruns
    are requested.
    """
    last = runs[-1]
    if len(runs) == 1:
        return Diagnosis(None)
    if last.shift:
        if shift_tolerance is not None and _all_losses_are_wrong(runs[-2], last, dp_groups):
            return Diagnosis("undecided", _list_implausible_ranks(last))
        return _compare_shifted(runs[-2], last, dp_groups, tolerance or shift_tolerance)
    differing = _list_differing_ranks(runs[-2], last, tolerance)
    if not differing:
        if passes[-1]:
            suspects = _list_ever_differing(runs, tolerance)
            return Diagnosis("transient" if suspects else "none", suspects)
        if len(dp_groups[0]) == 1 or len(runs) > max_reruns:
            return Diagnosis("undecided", _list_implausible_ranks(last))
        return Diagnosis(None, shift=1)
    if passes[-1] and not all(passes[:-1]):
        return Diagnosis("transient", _list_ever_differing(runs, tolerance))
    if len(runs) == 2:
        return Diagnosis(None)  # which of the two is wrong?
    return _compare_three(runs, passes, tolerance, max_reruns)


def _compare_three(
    runs: Sequence[StepRun], passes: Sequence[bool], tolerance: float | None, max_reruns: int
) -> Diagnosis:
    """Return the cause of three or more runs, of which the last two differ."""
    suspects = _list_ever_differing(runs, tolerance)
    if not _list_differing_ranks(runs[0], runs[-1], tolerance):
        if passes[-1]:
            return Diagnosis("transient", suspects)  # the second run was wrong
    elif len(runs) <= max_reruns and not passes[-1]:
        return Diagnosis(None)
    return Diagnosis("persistent", suspects)  # its results differ each time


def _compare_shifted(
    run: StepRun,
    shifted: StepRun,
    dp_groups: Sequence[Sequence[int]],
    tolerance: float | None,
) -> Diagnosis:
    """Return the cause from a run and one with the samples shifted by one data-parallel rank."""
    ranks: set[int] = set()
    for group in dp_groups:
        # The samples of rank `source` have been computed by its neighbor, too.
        pairs = [*pairwise(group), (group[-1], group[0])]
        different = [
            (source, target)
            for source, target in pairs
            if not run.ranks[source].is_equal(shifted.ranks[target], tolerance)
        ]
        if len(group) == 2:
            ranks |= _find_worse_rank(run, shifted, different)
        else:
            ranks |= _find_common_ranks(different)
    if ranks:
        return Diagnosis("persistent", tuple(sorted(ranks)))
    return Diagnosis("model")


def _all_losses_are_wrong(
    run: StepRun, shifted: StepRun, dp_groups: Sequence[Sequence[int]]
) -> bool:
    """Return whether no loss of some data-parallel group is finite in both runs: expert
    parallelism has sent wrong activations to all ranks, so they do not show their source."""
    return any(
        not any(math.isfinite(each.ranks[rank].loss) for each in (run, shifted) for rank in group)
        for group in dp_groups
    )


def _find_worse_rank(
    run: StepRun, shifted: StepRun, different: Sequence[tuple[int, int]]
) -> set[int]:
    """Return which of two ranks has the worse results for the samples on which they differ; both if
    that depends on the samples."""
    return {
        source if run.ranks[source].is_worse(shifted.ranks[target]) else target
        for source, target in different
    }


def _find_common_ranks(different: Sequence[tuple[int, int]]) -> set[int]:
    """Return the fewest ranks that explain all different pairs: a faulty rank differs from the
    neighbors on both sides.

    >>> _find_common_ranks([(0, 1), (1, 2)])
    {1}
    """
    remaining, ranks = list(different), set[int]()
    while remaining:
        counts = {
            rank: sum(rank in pair for pair in remaining) for pair in remaining for rank in pair
        }
        most = max(counts.values())
        # a pair alone: either of the two may be wrong
        chosen = {min(rank for rank, count in counts.items() if count == most)}
        if most == 1:
            chosen = set(counts)
        ranks |= chosen
        remaining = [pair for pair in remaining if not chosen & set(pair)]
    return ranks


def _list_differing_ranks(run: StepRun, other: StepRun, tolerance: float | None) -> tuple[int, ...]:
    """Return the ranks whose measurements differ between two runs with the same samples: before
    the reduction, or if none does, after it."""
    pairs = list(enumerate(zip(run.ranks, other.ranks, strict=True)))
    local = tuple(rank for rank, (one, two) in pairs if not one.is_equal(two, tolerance))
    if local or tolerance is not None:
        return local
    return tuple(rank for rank, (one, two) in pairs if one.reduced_bits != two.reduced_bits)


def _list_ever_differing(runs: Sequence[StepRun], tolerance: float | None) -> tuple[int, ...]:
    ranks: set[int] = set()
    for one, two in pairwise(runs):
        ranks.update(_list_differing_ranks(one, two, tolerance))
    return tuple(sorted(ranks))


def _list_implausible_ranks(run: StepRun) -> tuple[int, ...]:
    """Return the ranks with values that are not finite; all ranks if there are none."""
    ranks = tuple(rank for rank, each in enumerate(run.ranks) if not each.is_finite)
    return ranks or tuple(range(len(run.ranks)))


MOMENT_FACTOR = 100.0
"""Factor between the bound of Adam's moments and values that are taken to be corrupt (heuristic:
larger than any change of beta1 and beta2 on resume, smaller than flips of the upper exponent
bits)."""


def bound_moment_ratio(beta1: float, beta2: float) -> float:
    """Return the largest |exp_avg| / sqrt(exp_avg_sq) that Adam's averages of any gradients have.

    By the Cauchy-Schwarz inequality, the sum of (1 - beta1) * beta1**i * g_i is at most that times
    the root of the sum of (1 - beta2) * beta2**i * g_i**2; infinite if beta1**2 >= beta2.

    >>> f"{bound_moment_ratio(0.9, 0.95):.3f} {bound_moment_ratio(0.9, 0.999):.3f}"
    '1.165 7.270'
    """
    if beta1**2 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


# --- actions

FailedCheck = Literal["nonfinite", "spike"]
"""Check that the statistics of a step fail."""


@dataclass(frozen=True, slots=True)
class SuspectExit:
    """An earlier exit of the run because of a suspect machine."""

    step: int
    hosts: frozenset[str]
    """Hosts of the ranks at fault."""


Action = Literal["update", "skip", "rerun", "rollback", "stop", "exit", "exit_again"]
"""Action for a step. update: apply it; exit: discard it and end the run for other machines;
exit_again: the fault recurs after an exit, so the user must act; stop: end the run with an
error."""

_ACTIONS: Mapping[str, Action] = {"warn": "update", "skip": "skip", "rollback": "rollback"}


def choose_first_action(action: FaultAction) -> Action:
    """Return the action for a step whose first run has failed a check, if `action` is set."""
    if action in ("rerun", "stop"):
        return action
    return _ACTIONS[action]


def choose_action(
    diagnosis: Diagnosis,
    config: FaultDetectorConfig,
    *,
    failed_check: FailedCheck | None,
    step: int,
    hosts: Sequence[str],
    exits: Iterable[SuspectExit],
) -> Action:
    """Return the action for a step whose fault has a known cause.

    `failed_check`: of the first run; None: reruns of a step that passed the checks.
    `hosts`: by rank. `exits`: earlier exits of this run. A fault that has caused an exit before is
    not repaired by another one.
    """
    if diagnosis.cause in ("none", "transient"):
        return "update"
    earlier = [each for each in exits if each.step == step]
    if diagnosis.cause in ("persistent", "state"):
        suspects = {hosts[rank] for rank in diagnosis.ranks}
        repeats = any(suspects & each.hosts for each in earlier)
        return "exit_again" if repeats or len(earlier) > 1 else "exit"
    # Unset, the usual case of a fault that no other rank can check is the model.
    decides = config.spike if failed_check == "spike" else config.nonfinite
    if diagnosis.cause == "undecided" and decides == "rerun":
        suspects = {hosts[rank] for rank in diagnosis.ranks}
        if not earlier:
            return "exit"
        if any(suspects & each.hosts for each in earlier):
            return "exit_again"
    return "stop" if config.model_fault == "stop" else _ACTIONS[config.model_fault]

"""Training state besides tensors: counters, and the samples that are skipped.

There are no random states, because random numbers are keyed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalith.plan.rollback import NO_SAMPLES, SkippedSamples, count_read

_COUNTERS = (
    "step",
    "consumed_samples",
    "scheduled_samples",
    "tokens",
    "skipped",
    "skipped_in_a_row",
)
"""Counters of `TrainState` that every checkpoint stores."""


@dataclass(slots=True)
class TrainState:
    """Counters of one run, saved with every checkpoint."""

    step: int = 0
    """Number of finished steps."""

    consumed_samples: int = 0
    """Number of rows read or skipped: the position in the data."""

    scheduled_samples: int = 0
    """Number of rows of steps that updated the weights: the position in the schedules."""

    tokens: int = 0
    """Number of tokens read."""

    skipped: int = 0
    """Number of steps without an update, because a gradient was not finite, there were no labels,
    or train.skip_steps names the step."""

    skipped_in_a_row: int = 0
    """Number of skipped steps since the last update."""

    rolled_back_samples: SkippedSamples = NO_SAMPLES
    """Rows that are never trained on, because of rollbacks."""

    skipped_steps: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Rows, first and end, of each step of train.skip_steps that was skipped. After a rollback that
    skips samples, these rows stay skipped, and the step is not skipped again."""

    @property
    def skipped_samples(self) -> SkippedSamples:
        """Rows that are never trained on, because of rollbacks and train.skip_steps."""
        return self.rolled_back_samples.merge(self.skipped_steps.values())

    @property
    def read_samples(self) -> int:
        """Number of consumed rows that are not skipped: the position in the batch-size schedule."""
        return count_read(self.skipped_samples, self.consumed_samples)

    def skip_step(self, *, samples: int, tokens: int) -> tuple[int, int]:
        """Count a step whose samples were read and not trained on; return them, first and end."""
        first, position = self.consumed_samples, self.read_samples
        end = self.skipped_samples.locate_end(position + samples)
        self.step += 1
        self.skipped_steps = {**self.skipped_steps, self.step: (first, end)}
        self.consumed_samples = self.skipped_samples.locate(position)
        self.tokens += tokens
        self.skipped += 1
        return first, end

    def count_step(self, *, samples: int, tokens: int, updated: bool) -> None:
        """Count a finished step."""
        self.step += 1
        self.consumed_samples = self.skipped_samples.locate(self.read_samples + samples)
        self.tokens += tokens
        if updated:
            self.scheduled_samples += samples
            self.skipped_in_a_row = 0
        else:
            self.skipped += 1
            self.skipped_in_a_row += 1

    def skip_samples(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Skip ranges of rows, first and end, because of a rollback; rows before the current
        position are read already."""
        position = self.consumed_samples
        later = ((max(first, position), end) for first, end in ranges if end > position)
        self.rolled_back_samples = self.rolled_back_samples.merge(later)
        self.consumed_samples = self.skipped_samples.locate(self.read_samples)

    @property
    def last_update(self) -> int:
        """The last step that updated the weights."""
        return self.step - self.skipped_in_a_row

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Return the counters as JSON: this object's state_dict."""
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        if self.skipped_samples:
            counters["skipped_samples"] = {
                "rollback": [list(each) for each in self.rolled_back_samples.ranges],
                "steps": {str(step): list(each) for step, each in self.skipped_steps.items()},
            }
        return counters

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "TrainState":  # Any: whatever JSON holds
        """Return the counters of `as_json`."""
        state = TrainState()
        state.restore(saved)
        return state

    def restore(self, saved: dict[str, Any]) -> None:  # Any: whatever JSON holds
        """Set the counters to those of `as_json`; checkpoints before 2026-11-21 have no
        `skipped_in_a_row`."""
        counters = {"skipped_in_a_row": 0} | saved
        for name in _COUNTERS:
            setattr(self, name, int(counters[name]))
        skipped = saved.get("skipped_samples", {"rollback": (), "steps": {}})
        self.rolled_back_samples = NO_SAMPLES.merge(map(tuple, skipped["rollback"]))
        self.skipped_steps = {int(step): tuple(each) for step, each in skipped["steps"].items()}

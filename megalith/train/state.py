"""The training state besides tensors: counters. There are no random states, because random numbers
are keyed."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Counters of one run, saved with every checkpoint."""

    step: int = 0
    """Number of finished steps."""

    consumed_samples: int = 0
    """Number of rows read: the position in the data."""

    scheduled_samples: int = 0
    """Number of rows of steps that updated the weights: the position in the schedules."""

    tokens: int = 0
    """Number of tokens read."""

    skipped: int = 0
    """Number of steps without an update, because a gradient was not finite or there were no
    labels."""

    skipped_in_a_row: int = 0
    """Number of skipped steps since the last update."""

    def as_json(self) -> dict[str, int]:
        """Return the counters as JSON: this object's state_dict."""
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "TrainState":  # Any: whatever JSON holds
        """Return the counters of `as_json`; checkpoints before 2026-11-21 have no
        `skipped_in_a_row`."""
        counters = {"skipped_in_a_row": 0} | saved
        return TrainState(**{name: int(counters[name]) for name in TrainState.__slots__})

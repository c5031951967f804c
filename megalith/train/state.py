"""What a run carries from step to step besides tensors: counters, and nothing random, since randomness is keyed."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class TrainState:
    """Counters of one run; saved with every checkpoint."""

    step: int = 0
    """Steps done."""

    consumed_samples: int = 0
    """Rows read; the place in the data."""

    scheduled_samples: int = 0
    """Rows of steps that changed the weights; the place in the schedules."""

    tokens: int = 0
    """Tokens read."""

    skipped: int = 0
    """Steps that changed nothing, because a gradient was not finite."""

    def as_json(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "TrainState":  # Any: whatever JSON holds
        """The counters that `as_json` gave."""
        return TrainState(**{name: int(saved[name]) for name in TrainState.__slots__})

"""What a run carries from step to step besides tensors: counters, and nothing random, since
randomness is keyed."""

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
    """PackedSeqParams read."""

    skipped: int = 0
    """Steps that changed nothing, because a gradient was not finite."""

    skipped_in_a_row: int = 0
    """The last of them, with no update since."""

    def as_json(self) -> dict[str, int]:
        """Plain numbers."""
        return asdict(self)

    @staticmethod
    def from_json(saved: dict[str, Any]) -> "TrainState":  # Any: whatever JSON holds
        """The counters that `as_json` gave; `skipped_in_a_row`, which checkpoints before 2026-11-21
        lack, may miss."""
        found = {"skipped_in_a_row": 0} | saved
        return TrainState(**{name: int(found[name]) for name in TrainState.__slots__})

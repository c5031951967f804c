"""Callback that logs the lowest loss so far; it is part of the checkpoint."""

from collections.abc import Mapping
from typing import Any

from megalith.train.callbacks.base import Callback, FinishedStep, StepMetrics


class LowestLoss(Callback):
    """Adds `lowest_loss`, the lowest training loss of the run so far, to metrics.jsonl."""

    def __init__(self) -> None:
        self.lowest = float("inf")

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Compare the loss, which is equal on all ranks, with the lowest one."""
        self.lowest = min(self.lowest, float(finished.result.loss))
        metrics["lowest_loss"] = self.lowest

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with."""
        return {"lowest": self.lowest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the lowest loss of an earlier start."""
        self.lowest = state["lowest"]

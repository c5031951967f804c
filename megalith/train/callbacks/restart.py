"""Progress of a rank in a round, for restarts in place."""

from megalith.launch.rounds import RestartClient, describe_round
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics


class RoundProgress(Callback):
    """Counts the finished steps of a round, and logs why it began."""

    def __init__(self, client: RestartClient) -> None:
        self._client = client

    def on_start(self, run: RunView) -> None:
        """Log why the last round ended."""
        if self._client.round.reason:
            run.log(f"{describe_round(self._client.round)}; continuing after step {run.step}")

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Count the step."""
        self._client.num_steps += 1

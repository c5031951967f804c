"""Callbacks that log gradient norms and stop early: `--callback examples.callback:EarlyStop`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from megalith.config.fields import Ge
from megalith.parallel.grad_sync import ShardedParam
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.step import StepRequest
from megalith.train.suites import SuiteResults


class LayerGradientNorms(Callback):
    """Logs the norm of the gradient shards that this rank holds of each layer, before clipping."""

    def on_start(self, run: RunView) -> None:
        """Receive the run."""
        self.run, self.norms = run, dict[str, float]()

    def after_backward(self, local_params: Sequence[ShardedParam]) -> None:
        """Sum the squares of each layer; reading them waits for the device."""
        squares: dict[str, float] = {}
        for param in local_params if self.run.is_logged(self.run.step + 1) else ():
            layer = "_".join(param.shard.name.split(".")[:2])
            squares[layer] = squares.get(layer, 0.0) + float(param.gradient.square().sum())
        self.norms = {f"grad_norm_{layer}": total**0.5 for layer, total in squares.items()}

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Add the norms to metrics.jsonl."""
        metrics |= self.norms


class EarlyStop(Callback):
    """Stops the run when the loss on held-out text no longer improves."""

    @dataclass(frozen=True)
    class Config:
        """Settings: --callbacks.EarlyStop.patience 5."""

        patience: Annotated[int, Ge(1)] = 3  # evaluations without a better loss

    config: Config
    best, num_worse = float("inf"), 0

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> StepRequest | None:
        """Compare the loss, which is equal on all ranks, with the best one."""
        if not isinstance(loss := metrics.get("eval_loss"), float):  # only other suites are due
            return None
        self.num_worse = 0 if loss < self.best else self.num_worse + 1
        self.best = min(self.best, loss)
        return StepRequest.STOP if self.num_worse >= self.config.patience else None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues with."""
        return {"best": self.best, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the best loss of an earlier start."""
        self.best, self.num_worse = state["best"], state["num_worse"]

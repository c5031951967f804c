"""Settings of the detection of numeric faults: spikes, NaN or infinite values, reruns, rollbacks,
comparison of replicas and the device health check."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megalith.config.fields import Ge, Gt, Le

FaultAction = Literal["warn", "skip", "rerun", "rollback", "stop"]
"""Action after a fault is detected, before the update of its step."""

ModelFaultAction = Literal["warn", "skip", "rollback", "stop"]
"""Action after reruns have attributed a fault to the model or its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDetectorConfig:
    """Detection of numeric faults, and the actions after them."""

    nonfinite: FaultAction | None = None
    """Action if the loss or the gradient norm is NaN or infinite. warn: log it, and leave gradients
    that are not finite to `optim.nonfinite_grad`; skip: no update; rerun: find the cause by
    repeating the step, and if no machine is at fault, apply `model_fault`; rollback: continue
    from an earlier checkpoint without the samples; stop: end the run. fp16 overflows lower the loss
    scale instead. Unset: rerun, then skip."""

    spike: FaultAction = "warn"
    """Action if the loss, the gradient norm or the largest logit is far above its recent values:
    as `nonfinite`."""

    model_fault: ModelFaultAction = "skip"
    """Action if reruns show that the model or its data is at fault, not a machine."""

    sigmas: Annotated[float, Gt(0), Le(1e6)] = 6.0
    """Spike threshold: standard deviations above the median of the window, estimated as 1.4826 *
    median absolute deviation. A spike is also above 1.5 * median. Source: 6 of OLMo-core."""

    window: Annotated[int, Ge(32), Le(100_000)] = 128
    """Number of accepted steps with which a step is compared; no spike is detected before 32."""

    check_update_size: bool = False
    """Measure the L2 norm of each update, log it as `update_norm`, and detect its spikes, such as
    after a bit flip in optimizer state. The update is applied then, so only rollback and stop act
    on it; skip and rerun log it. Needs memory for a copy of the master weights."""

    rerun_every: Annotated[int, Ge(0)] = 0
    """Steps between reruns that compare the bits of the gradients, for silent data
    corruption that changes no statistic visibly. Each doubles the time of its step. 0: none."""

    report_stats: bool = False
    """Write the distribution of the differences per parameter in reruns to rerun_stats.jsonl."""

    rollback_steps: Annotated[int, Ge(0)] = 100
    """Rollback: the least number of steps between the checkpoint and the fault. Source:
    arXiv:2204.02311, section 5.1."""

    skip_samples_past_spike: Annotated[int, Ge(0)] = 0
    """Rollback: number of samples after the step of the fault that are skipped, in addition to
    those from the checkpoint to that step."""

    suspect_steps: Annotated[int, Ge(0)] = 20
    """Steps after a resume from a local checkpoint in which a NaN or infinite value makes the run
    repeat them from the newest persistent checkpoint, once, before any cause is sought: a copy may
    have been damaged."""

    max_rollbacks: Annotated[int, Ge(0)] = 3
    """Rollbacks within 1,000 steps after which another one ends the run with exit code 2."""

    replica_check_every: Annotated[int, Ge(0)] = 0
    """Steps between comparisons of weights, master weights and moments over ranks that hold copies;
    1000 is common. 0: weights only, once at the start."""

    repair_replicas: bool = False
    """Overwrite a replica that differs with a correct one; without it, roll back."""

    health_check_every: Annotated[int | None, Ge(0)] = None
    """Steps between device health checks, which also run at the start and after a fault: matrix
    products with known bits, memory patterns and copy bandwidth. 0: only at the start and after a
    fault. Unset: no health checks."""

    @property
    def uses_reruns(self) -> bool:
        """Whether some step may be repeated."""
        reruns = self.nonfinite in (None, "rerun") or self.spike == "rerun"
        return reruns or self.rerun_every > 0

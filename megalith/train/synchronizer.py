"""Synchronization of the steps of a job with the other replica groups of its run: none, sums of
gradients (train/replica_groups.py), or rounds of DiLoCo (train/diloco.py)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.data.loader import Loader, StepBatches
from megalith.plan.replica_groups import SINGLE_GROUP, GroupShare

BuildLoader = Callable[[GroupShare, Sequence[int] | None], Loader]
"""Builds the loader of the remaining steps from the share of this group in each global batch, and
the samples of the first step (None: all)."""


class GroupState(Protocol):
    """State of this group between two steps, which other groups may load."""

    @property
    def step(self) -> int:
        """Number of finished steps."""

    @property
    def batch_size(self) -> int:
        """Global batch size of the next step."""

    @property
    def num_counts(self) -> int:
        """Number of label counts of a global batch (`Loader.num_counts`)."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of what must be equal in all groups that have the same step, by name."""

    def entries(self) -> Sequence[CheckpointEntry]:
        """Return this rank's tensors."""

    def export(self) -> dict[str, Any]:  # Any: JSON
        """Return the state besides tensors, equal on all ranks."""

    def adopt(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from the state of another group, whose tensors are in those of `entries`.
        Collective over the group's mesh."""

    def list_routing_sums(self) -> list[Tensor]:
        """Return the routing statistics of this rank's last step, which are summed in place with
        its gradients."""

    def create_zero_sums(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return gradients and routing statistics, losses and largest logit of a step without
        samples."""

    def replay(self, gradients: Sequence[Tensor], *, scale: float, updated: bool) -> None:
        """Repeat the update of a step that other groups have computed, from its summed gradients,
        which have this loss scale, and routing statistics. Collective over the group's mesh."""


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums of a step over the replica groups, for one rank."""

    losses: Tensor
    requests: Sequence[float]
    """Number of groups with each kind of shared request."""
    max_logit: Tensor | None
    failed: bool = False
    """Whether a group was lost; the sums are those of this group then."""


class StepSynchronizer(Protocol):
    """Synchronizes the steps of this job with those of other groups. All methods are collective
    over the mesh of the job, except `sum_step`."""

    @property
    def is_writer(self) -> bool:
        """Whether this job writes the checkpoints."""

    @property
    def changes_epoch(self) -> bool:
        """Whether other groups compute the next step, for which `enter` must be called."""

    @property
    def allows_reruns(self) -> bool:
        """Whether this job may repeat forward and backward of a step."""

    @property
    def allows_rollbacks(self) -> bool:
        """Whether this job may continue from an earlier checkpoint."""

    def enter(self) -> None:
        """Wait until this job may compute the next step. If it has missed steps, it continues from
        the state of another group."""

    def build_loader(self, build: BuildLoader) -> Loader:
        """Return the loader of the samples of this job."""

    def read_batches(self, loader: Loader) -> StepBatches:
        """Return the batches of this job in the next step, with the counts of all samples that
        share its update."""

    def sum_step(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        scale: float,
    ) -> StepSums:
        """Sum gradients, which have this loss scale, in place over the groups, and return the sums
        of the other values; max_logit: float64 [1]."""

    def commit(self, step: int, *, ok: bool, last: bool = False) -> bool:
        """Vote about step number `step`; return whether all groups apply its update. Otherwise it
        is repeated after `enter`. `last`: this job ends after the step."""

    def note_update(self, *, updated: bool) -> None:
        """Note whether the committed step has changed the weights."""

    def skip_step(self, requests: Sequence[float]) -> Sequence[float] | None:
        """Agree on a step that is not trained on, after the loader of the samples that follow it
        was built. Return the number of groups with each kind of shared request; None: the step is
        repeated after `enter`."""

    def after_step(self) -> bool:
        """Send and apply what is due after a finished step; return whether the samples of this
        job have changed, for which it needs another loader."""


class SingleJob:
    """Steps of a job that trains alone."""

    is_writer = allows_reruns = allows_rollbacks = True
    changes_epoch = False

    def enter(self) -> None:
        """Do nothing."""

    def build_loader(self, build: BuildLoader) -> Loader:
        """Return the loader of all samples."""
        return build(SINGLE_GROUP, None)

    def read_batches(self, loader: Loader) -> StepBatches:
        """Return the batches of the next step."""
        return loader.next()

    def sum_step(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        scale: float,
    ) -> StepSums:
        """Return the values of this job."""
        return StepSums(losses, requests, max_logit)

    def commit(self, step: int, *, ok: bool, last: bool = False) -> bool:
        """Return True."""
        return True

    def note_update(self, *, updated: bool) -> None:
        """Do nothing."""

    def skip_step(self, requests: Sequence[float]) -> Sequence[float] | None:
        """Return the requests of this job."""
        return requests

    def after_step(self) -> bool:
        """Return False."""
        return False


SINGLE_JOB = SingleJob()
"""Synchronizer of a job that trains alone."""

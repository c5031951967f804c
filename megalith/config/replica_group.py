"""Settings of replica groups: jobs that hold the full model and train together."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroupConfig:
    """Replica group: this job is one of several that hold the full model and train together. Each
    has its own ranks, launcher and run folder; the loss of one does not end the others.

    The samples of every global batch are divided over the groups that take part in the step, so
    that the batch size, the order of the data and the losses do not depend on their number.
    """

    coordinator: Annotated[str, Example("127.0.0.1:29700")]
    """Address HOST:PORT of the coordinator, which `megalith coordinate` runs."""

    id: str
    """Id of this group, unique among the groups. The participating group with the lowest id (in
    alphabetical order) writes the checkpoints."""

    min_groups: Annotated[int, Ge(1)] = 1
    """Groups that a step needs; with fewer, all wait."""

    max_groups: Annotated[int | None, Ge(1)] = None
    """Groups that may take part; others wait until one is lost. Unset: no limit."""

    timeout_seconds: Annotated[float, Ge(1), Le(86400)] = 60.0
    """Time without a message after which another group counts as lost; longer than a save and an
    evaluation take, and shorter than parallel.timeout_seconds."""

    mode: Literal["sync", "diloco"] = "sync"
    """sync: gradients are summed over the groups in every step. diloco: not available yet."""

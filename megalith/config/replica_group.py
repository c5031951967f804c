"""Settings of replica groups: jobs that hold the full model and train together."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Gt, Le, Lt

DeltaDtype = Literal["fp32", "bf16", "int8"]
"""Dtype in which groups send how far their weights have moved."""


ReplicaGroupMode = Literal["sync", "diloco"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DilocoConfig:
    """DiLoCo: groups train on their own for some steps, then an outer optimizer moves the weights
    of all groups by the mean of their changes."""

    sync_every: Annotated[int, Ge(1)] = 100
    """Inner steps between two synchronizations of a parameter."""

    outer_lr: Annotated[float, Gt(0)] = 0.7
    """Learning rate of the outer optimizer, SGD with Nesterov momentum."""

    outer_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Momentum of the outer optimizer. 0, with outer_lr 1: local SGD."""

    num_fragments: Annotated[int, Ge(1)] = 1
    """Parts of the model, divided by layers, that are synchronized one after the other within
    `sync_every` steps (streaming DiLoCo)."""

    fragment_delay: Annotated[int, Ge(0)] = 0
    """Steps that continue while a fragment is exchanged, before the result is applied."""

    fragment_mixing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Part of a group's own weights that is kept when the result of a fragment is applied."""

    delta_dtype: DeltaDtype = "fp32"
    """Dtype of the changes that are sent. fp32: that of the master weights; bf16; int8: with a
    scale per block of `int8_block_size`. What rounding removes is added to the next change (error
    feedback)."""

    int8_block_size: Annotated[int, Ge(8)] = 256
    """Elements per scale of int8 changes."""


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

    mode: ReplicaGroupMode = "sync"
    """sync: gradients are summed over the groups in every step. diloco: groups train on their own
    shares of the samples, and synchronize weights every `diloco.sync_every` steps."""

    diloco: DilocoConfig = DilocoConfig()

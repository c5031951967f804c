"""Interface of data parallelism (`GradSync`), and sums of the gradients that tensor-parallel ranks
or pipeline stages share.

Implementations: parallel/data.py (parallel.zero 0, 1 and 2) and parallel/fsdp.py (3).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.parallel.bucket_comm import sum_over_members_
from megalith.parallel.consistency import (
    check_consistent_across_ranks,
    check_shared_consistent_across_ranks,
)
from megalith.parallel.group import Group, all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.plan.shards import PARTS, Shard, gradient_sum_axes

_log = logging.getLogger(__name__)

SHARD_AXES = ("dp_shard", *PARTS["cp"])
"""Axes over which ZeRO shards parameters."""

TP_REDUCE_AXES = (("tp_copy",), ("tp_kv",), ("tp_kv", "tp_copy"))
"""Sets of tensor-parallel axes over which a gradient may have to be summed."""


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """The part of a parameter that this rank updates: its shard, weight and fp32 or float64
    gradient, both in the same layout."""

    shard: Shard
    weight: Tensor
    gradient: Tensor


class GradSync(Protocol):
    """Interface of data parallelism: gradient reduction and weight all-gather, however weights,
    gradients and optimizer state are sharded.

    One step: `begin_step`; forward and backward of every microbatch; `finish`; the optimizer writes
    `ShardedParam.weight`; `all_gather_params`. Optimizer, clipping and checkpoints use (Shard,
    tensor) pairs only. All methods are collective: every rank of the mesh calls them at the same
    point of its program.
    """

    @property
    def local_params(self) -> Sequence[ShardedParam]:
        """Return every shard that this rank updates, in the order of registration, without empty
        ones.

        All ranks that hold a parameter together own each of its elements, once per group along the
        axes of `copies`. The tensors keep their memory for the life of this object; gradients are
        valid from `finish` to the next `begin_step`.
        """

    @property
    def frozen(self) -> Sequence[tuple[Shard, Tensor]]:
        """Return this rank's shards of the parameters that are not trained, in the order of
        registration, without empty ones.

        These are the parameters whose `requires_grad` was False at construction: they have no
        gradient, no optimizer state and no part in the gradient norm. Only initialization and
        checkpoint loading write them, before `all_gather_params`.
        """

    def begin_step(self, microbatches: int) -> None:
        """Start a step of this many backward passes."""

    def finish(self) -> Sequence[ShardedParam]:
        """Wait for the gradients of the step and return `local_params`, each gradient summed over
        all ranks that hold the same box."""

    def all_gather_params(self) -> None:
        """Send the weights in `local_params` to all ranks that compute with them, after every
        update or other write. May return before the all-gather is complete: layers wait for the
        weights that they read."""

    def wait_params(self) -> None:
        """Wait until all weights of the model are up to date; only readers other than forward need
        this."""

    def nonfinite(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank was NaN or infinite before the
        reduction in the last finished step. Empty unless built with `watch`. Not collective."""

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Return sums over the bytes of this rank's weights, each with the ranks on which it must
        be equal."""


Parameters = Sequence[tuple[Shard, nn.Module, str]]
"""Shard, module and attribute name of each parameter."""


def split_trained_and_frozen(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return the trained and the frozen parameters."""
    trained = [entry for entry in parameters if getattr(entry[1], entry[2]).requires_grad]
    return trained, [entry for entry in parameters if not getattr(entry[1], entry[2]).requires_grad]


def can_shard_weights(mesh: Mesh) -> bool:
    """Return whether several ranks compute with the same weights, dense or expert ones, so that
    ZeRO can shard them."""
    return mesh.shard.size > 1 or (
        mesh.grid.experts is not None and mesh.over("edp_shard").size > 1
    )


def all_reduce_shared_gradients(local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
    """Sum gradients over the tensor-parallel ranks, then over the pipeline stages, that hold the
    same slices.

    One all-reduce per set of tensor-parallel axes. Stages add in a fixed order, so that their
    copies stay bitwise equal.
    """
    for axes in TP_REDUCE_AXES:
        group = mesh.over(*axes)
        shared = [param.gradient for param in local_params if tp_reduce_axes(param.shard) == axes]
        if group.size == 1 or not shared:
            continue
        message = all_reduce_(torch.cat([gradient.flatten() for gradient in shared]), group)
        for gradient, part in zip(shared, message.split([g.numel() for g in shared]), strict=True):
            gradient.copy_(part.view_as(gradient))
    # by name: stages register shared tables in different orders
    for param in sorted(local_params, key=lambda param: param.shard.name):
        sum_over_members_(param.gradient, mesh.pp, _stages(param.shard))


def check_slices_consistent_across_ranks(local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
    """Check that the ranks of `all_reduce_shared_gradients` sum the same slices; collective.

    Raises:
        PlanError: the slices differ.
    """
    local_slices = [
        (param.shard, f"elements {param.shard.flat or (0, param.shard.numel)}")
        for param in local_params
    ]
    for axes in TP_REDUCE_AXES:
        summed = {
            shard.name: place for shard, place in local_slices if tp_reduce_axes(shard) == axes
        }
        check_consistent_across_ranks(summed, mesh.over(*axes))
    shared = {
        shard.name: f"{place}, held by stages {shard.stages}"
        for shard, place in local_slices
        if _stages(shard)[1:]
    }
    check_shared_consistent_across_ranks(shared, mesh.pp)


def warn_unused_params(unused: Sequence[str]) -> bool:
    """Log a warning on this rank that names up to ten parameters without a gradient in a step, and
    return whether there are any."""
    if unused:
        more = f" and {len(unused) - 10} more" if len(unused) > 10 else ""
        _log.warning(
            "%s%s had no gradient in this step, so it is zero on this rank (this warning is logged "
            "once)",
            ", ".join(unused[:10]),
            more,
        )
    return bool(unused)


def byte_checksum(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the bytes of all tensors; equal tensors have equal sums."""
    return sum(
        int(tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors
    )


def tp_reduce_axes(shard: Shard) -> tuple[str, ...]:
    """Return the tensor-parallel axes over which the gradient of `shard` is summed."""
    return tuple(axis for axis in ("tp_kv", "tp_copy") if axis in gradient_sum_axes(shard))


def _stages(shard: Shard) -> tuple[int, ...]:
    """Stages over which its gradient is summed; a separate function so that verify/faults/plant.py
    can
    break this sum alone."""
    return shard.stages

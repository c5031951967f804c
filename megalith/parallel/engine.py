"""What training asks of data parallelism, and what both engines do: sums of the slices that other
axes share.

The engines are in `parallel/data.py` (parallel.zero 0, 1 and 2) and `parallel/fsdp.py` (3).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megalith.parallel.alike import (
    check_consistent_across_ranks,
    check_shared_consistent_across_ranks,
)
from megalith.parallel.group import Group, all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.slices import sum_over_members_
from megalith.plan.shards import PARTS, Shard, summed_over

_log = logging.getLogger(__name__)

SHARD_AXES = ("dp_shard", *PARTS["cp"])
"""Axes along which slices differ under ZeRO."""

TENSOR_SUMS = (("tp_copy",), ("tp_kv",), ("tp_kv", "tp_copy"))
"""Sets of tensor-parallel axes over which a gradient may have to be summed."""


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """What this rank updates of a parameter: its slice, its weights and its fp32 or float64
    gradient, in one layout."""

    shard: Shard
    weight: Tensor
    gradient: Tensor


class GradSync(Protocol):
    """What training asks of data parallelism, however weights, gradients and optimizer state are
    divided.

    One step: `begin_step`; forward and backward of every microbatch; `finish`; the optimizer writes
    `ShardedParam.weight`; `all_gather_params`. Optimizer, clipping and checkpoints see (Shard,
    tensor) pairs only. Every method is collective: all ranks of the mesh call it at the same place
    of their program.
    """

    @property
    def local_params(self) -> Sequence[ShardedParam]:
        """Every slice that this rank updates, in the order of registration; empty ones are left
        out.

        All ranks that hold a parameter own each of its elements, once per group along the axes of
        `copies`. Tensors keep their memory for the life of the engine; gradients are valid from
        `finish` to the next `begin_step`.
        """

    @property
    def frozen(self) -> Sequence[tuple[Shard, Tensor]]:
        """What this rank holds of the parameters that are not trained, in the order of
        registration; empty slices are left out. Those are the parameters whose `requires_grad`
        was False when the engine was built: they have no gradient, no optimizer state and no
        part in the norm. Written only by whoever fills or loads weights, before
        `all_gather_params`."""

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""

    def finish(self) -> Sequence[ShardedParam]:
        """Wait for the gradients of the step: `local_params`, each gradient summed over every
        rank that holds the same box."""

    def all_gather_params(self) -> None:
        """Give the weights in `local_params` to all ranks that compute with them. May return before
        they have arrived: the layers wait for what they read. After every update, and after
        anything else has written them."""

    def wait_params(self) -> None:
        """Wait until every weight of the model is the one that was published; needed by readers
        other than forward."""

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradient on this rank was not finite before any rank's
        was added, in the step that `finish` ended; for engines that were built to watch, else
        empty. Not collective."""

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Sums over the bytes of weights that this rank holds, and the ranks on which each must be
        the same."""


Parameters = Sequence[tuple[Shard, nn.Module, str]]
"""Shard, module and attribute of each."""


def divide_frozen(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Those that are trained, and those that are not."""
    trained = [one for one in parameters if getattr(one[1], one[2]).requires_grad]
    return trained, [one for one in parameters if not getattr(one[1], one[2]).requires_grad]


def divides(mesh: Mesh) -> bool:
    """Whether several ranks compute with the same weights and may divide them: dense ones, or
    experts."""
    return mesh.shard.size > 1 or (
        mesh.grid.experts is not None and mesh.over("edp_shard").size > 1
    )


def sum_shared_slices(local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
    """Sum gradients over the tensor-parallel ranks, then over the stages, that hold the same
    slices.

    One message per set of tensor-parallel axes. Stages add in their order, so that their copies
    stay the same.
    """
    for axes in TENSOR_SUMS:
        group = mesh.over(*axes)
        shared = [o.gradient for o in local_params if tensor_axes(o.shard) == axes]
        if group.size == 1 or not shared:
            continue
        message = all_reduce_(torch.cat([gradient.flatten() for gradient in shared]), group)
        for gradient, part in zip(shared, message.split([g.numel() for g in shared]), strict=True):
            gradient.copy_(part.view_as(gradient))
    for one in sorted(
        local_params, key=lambda one: one.shard.name
    ):  # stages have their tables in other orders
        sum_over_members_(one.gradient, mesh.pp, _stages(one.shard))


def check_slices_consistent_across_ranks(local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
    """Make sure that the ranks of `sum_shared_slices` add up the same slices of the same
    parameters; collective.

    Raises:
        PlanError: they do not.
    """
    mine = [(o.shard, f"elements {o.shard.flat or (0, o.shard.numel)}") for o in local_params]
    for axes in TENSOR_SUMS:
        summed = {shard.name: place for shard, place in mine if tensor_axes(shard) == axes}
        check_consistent_across_ranks(summed, mesh.over(*axes))
    shared = {
        shard.name: f"{place}, held by stages {shard.stages}"
        for shard, place in mine
        if _stages(shard)[1:]
    }
    check_shared_consistent_across_ranks(shared, mesh.pp)


def warn_of_zeros(unused: Sequence[str]) -> bool:
    """Warn on this rank of parameters without any gradient in a step, naming ten at most; whether
    there were any."""
    if unused:
        more = f" and {len(unused) - 10} more" if len(unused) > 10 else ""
        _log.warning(
            "%s%s had no part in the loss of this step: their gradients are zero on this rank "
            "(said once)",
            ", ".join(unused[:10]),
            more,
        )
    return bool(unused)


def sum_of_bytes(tensors: Sequence[Tensor]) -> int:
    """Of all tensors together; equal tensors have equal sums."""
    return sum(int(one.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for one in tensors)


def tensor_axes(shard: Shard) -> tuple[str, ...]:
    """Tensor-parallel axes over which its gradient is summed."""
    return tuple(axis for axis in ("tp_kv", "tp_copy") if axis in summed_over(shard))


def _stages(shard: Shard) -> tuple[int, ...]:
    """Stages over which its gradient is summed; apart, so that verify/faults.py can break this sum
    alone."""
    return shard.stages

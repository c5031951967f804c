"""Faulty replacement functions for mixture of experts; see `verify/faults/plant.py`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.routing import Choice, count_choices
from megalith.nn.init import init_param_
from megalith.nn.moe import Experts
from megalith.nn.router import LoadBalancing, Router, RoutingStats
from megalith.parallel.collectives import AsyncAllToAll
from megalith.parallel.data import ShardGroups, shard_groups
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import Init
from megalith.plan.shards import Shard
from megalith.testing.inject import patched

# --- gradients and weights


def division_of_dense(zero: int, mesh: Mesh, grid: str = "dense") -> ShardGroups:
    """Reduce expert gradients over the ranks of the dense grid."""
    return shard_groups(zero, mesh)


def division_by_ep_alone(zero: int, mesh: Mesh, grid: str = "dense") -> ShardGroups:
    """Use the expert grid only if ep > 1."""
    return shard_groups(zero, mesh, grid if mesh.over("ep").size > 1 else "dense")


def init_as_if_first_experts(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
    """Initialize a rank's experts as if they were the first ones."""
    first = Shard.full(
        shard.name, tuple(stop - start for start, stop in shard.box), inputs=shard.inputs
    )
    init_param_(
        parameter,
        replace(first, flat=shard.flat) if shard.grid == "expert" else shard,
        init,
        seed=seed,
    )


def without_replicas_of_rows() -> AbstractContextManager[None]:
    """Under zero 3, reduce neither sharded rows nor unsharded experts over replicas."""
    from megalith.parallel import fsdp  # torch's FSDP takes 0.5 s to import

    return patched(fsdp, "start_all_reduce_", lambda x, group: None)


def whole_experts_overwritten() -> AbstractContextManager[None]:
    """Under zero 3, overwrite the accumulated gradient of unsharded experts with each
    microbatch's."""
    from megalith.parallel import fsdp

    put = fsdp.Unit._put

    def overwrite(self: fsdp.Unit, name: str, gradient: Tensor) -> None:
        rounds = self._rounds[name]
        self._rounds[name] = rounds if isinstance(self, fsdp.ShardedUnit) else 0
        put(self, name, gradient)
        self._rounds[name] = rounds + 1

    return patched(fsdp.Unit, "_put", overwrite)


# --- dispatch and combine


def parts_of_own_rank(x: Tensor, group: Group, *, sizes: Sequence[int] | None = None) -> Tensor:
    """Return the local rows without the sum over ranks."""
    each = sizes or [len(x) // len(group.ranks)] * len(group.ranks)
    return x.narrow(0, sum(each[: group.rank]), each[group.rank])


def never_undone(sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Combine expert outputs in the order in which experts computed them."""
    return [sizes[chunk] for chunk in order], list(range(len(order)))


def read_early(self: AsyncAllToAll, started: Tensor) -> Tensor:
    """Return zeros, as if rows were read before they arrived."""
    early = torch.zeros_like(started)
    ORIGINAL_WAIT(self, started)
    return early


def weighted_twice(self: Experts, sent: DispatchedTokens) -> Tensor:
    """Multiply expert outputs by the router weights a second time."""
    return ORIGINAL_EXPERTS(self, sent) * sent.weights.unsqueeze(1)


def refused_by_each_rank(self: Router, choice: Choice, inputs: LayerInputs) -> Choice:
    """Apply the expert capacity per rank, without the tokens of the ranks that share it."""
    with patched(self, "sharing", single_rank_group(*self.sharing.axes)):
        return ORIGINAL_WITHIN_CAPACITY(
            self, choice, replace(inputs, seq_params=replace(inputs.seq_params, context=None))
        )


ORIGINAL_EXPERTS, ORIGINAL_WAIT, ORIGINAL_WITHIN_CAPACITY = (
    Experts.forward,
    AsyncAllToAll.wait,
    Router.within_capacity,
)


# --- balance


def counted_before_refusal(
    self: LoadBalancing, choice: Choice, asked: Tensor, logits: Tensor, inputs: LayerInputs
) -> Choice:
    """Count the router's choices before token dropping."""
    balanced = ORIGINAL_BALANCE(self, choice, asked, logits, inputs)
    record, share = self.record, inputs.router_inputs.aux_loss_scale
    if record is not None and share is not None:
        valid = self.tp_comm.select_local(inputs.seq_params.valid)
        one, experts = torch.zeros_like(valid), self.moe.num_experts
        record.counts[share.microbatch] = count_choices(
            asked, one, valid, sequences=1, num_experts=experts
        )[0]
    return balanced


def scaled_by_sharing_ranks(self: LoadBalancing, *arguments: object) -> list[tuple[int, Tensor]]:
    """Multiply the aux loss by the number of ranks that share tokens."""
    return [(kind, loss * self.sharing.size) for kind, loss in ORIGINAL_LOSSES(self, *arguments)]  # type: ignore[arg-type]  # as they came


def offsets_of_own(self: Router, logits: Tensor, inputs: LayerInputs) -> None:
    """Compute expert offsets from the rank's own tokens."""
    sharing, self.sharing = self.sharing, single_rank_group(*self.sharing.axes)
    ORIGINAL_OFFSETS(self, logits, inputs)
    self.sharing = sharing


def step_of_own_tokens(
    self: LoadBalancing,
    shares: Tensor,
    counts: Tensor,
    valid: Tensor,
    inputs: LayerInputs,
    record: RoutingStats,
) -> Tensor:
    """Compute the aux loss over the global batch from the rank's own microbatches only."""
    with patched(self, "everyone", self.sharing):
        return ORIGINAL_GLOBAL_LOSS(self, shares, counts, valid, inputs, record)


def own_counts_alone(x: Tensor, group: Group) -> Tensor:
    """Return the local counts without the sum over ranks."""
    return x


def counted_again(
    self: LoadBalancing, choice: Choice, asked: Tensor, logits: Tensor, inputs: LayerInputs
) -> Choice:
    """Count a microbatch again when backward recomputes it."""
    balanced = ORIGINAL_BALANCE(self, choice, asked, logits, inputs)
    record: RoutingStats | None = self.record
    if (
        record is not None
        and inputs.router_inputs.aux_loss_scale is not None
        and torch._C._current_graph_task_id() != -1
    ):
        record.counts[inputs.router_inputs.aux_loss_scale.microbatch] *= 2
    return balanced


ORIGINAL_BALANCE, ORIGINAL_LOSSES, ORIGINAL_OFFSETS = (
    LoadBalancing.__call__,
    LoadBalancing.losses,
    Router.note_offsets,
)
ORIGINAL_GLOBAL_LOSS = LoadBalancing.global_loss

"""Planted faults in mixtures of experts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs
from megalith.kernels.routing import Choice, count_choices
from megalith.nn import moe as nn_moe
from megalith.nn.moe import Experts, LoadBalancing, Router, RoutingStats
from megalith.parallel import data, expert
from megalith.parallel.collectives import AsyncAllToAll
from megalith.parallel.data import ShardGroups
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import Init
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.train import moe, trainer
from megalith.train.objective import LossNormalizer
from megalith.verify.faults.plant import Original, replaces

# --- gradients and weights


@replaces(data, "shard_groups", "dp, ep")
def experts_summed_over_dp(
    original: Original, zero: int, mesh: Mesh, grid: str = "dense"
) -> ShardGroups:
    """Expert gradients are summed over the data-parallel ranks of dense weights."""
    groups: ShardGroups = original(zero, mesh)
    return groups


@replaces(data, "shard_groups", "dp, etp")
def etp_alone_on_dense_grid(
    original: Original, zero: int, mesh: Mesh, grid: str = "dense"
) -> ShardGroups:
    """Without ep, experts use the dense grid, although etp differs from tp."""
    groups: ShardGroups = original(zero, mesh, grid if mesh.over("ep").size > 1 else "dense")
    return groups


@replaces(trainer, "init_param_", "dp, ep")
def experts_drawn_by_place(
    original: Original, parameter: Tensor, shard: Shard, init: Init, *, seed: int
) -> None:
    """The initial weights of an expert depend on the number of local experts."""
    if shard.grid == "expert":
        shape = tuple(stop - start for start, stop in shard.box)
        shard = replace(Shard.full(shard.name, shape, inputs=shard.inputs), flat=shard.flat)
    original(parameter, shard, init, seed=seed)


# --- dispatch and combine


@replaces(expert, "reduce_scatter", "dp, etp", found_by="types")
def etp_sum_removed(
    original: Original, x: Tensor, group: Group, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Expert outputs are not summed over etp."""
    each = sizes or [len(x) // len(group.ranks)] * len(group.ranks)
    return x.narrow(0, sum(each[: group.rank]), each[group.rank])


@replaces(expert, "mark_partial", "dp, etp", found_by="types")
def etp_part_not_declared(original: Original, x: Tensor, group: Group) -> Tensor:
    """Partial expert outputs over etp are not declared partial, but summed."""
    return x


@replaces(expert, "invert_chunk_order", "dp, ep")
def answers_in_wrong_order(
    original: Original, sizes: Sequence[int], order: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Expert outputs are combined in the order in which they were computed."""
    return [sizes[chunk] for chunk in order], list(range(len(order)))


@replaces(AsyncAllToAll, "wait", "dp, ep")
def rows_read_early(original: Original, self: AsyncAllToAll, started: Tensor) -> Tensor:
    """Experts read dispatched tokens before the all-to-all is complete."""
    early = torch.zeros_like(started)
    original(self, started)
    return early


@replaces(Experts, "forward", "dp, experts")
def experts_weighted_twice(original: Original, self: Experts, sent: DispatchedTokens) -> Tensor:
    """Expert outputs are multiplied by router weights twice."""
    y: Tensor = original(self, sent)
    return y * sent.weights.unsqueeze(1)


@replaces(Router, "within_capacity", "cp, capacity")
def refused_by_each_rank(
    original: Original, self: Router, choice: Choice, inputs: LayerInputs
) -> Choice:
    """Expert capacity is applied per rank instead of over the ranks that share tokens."""
    seq_params = replace(inputs.seq_params, context=None)
    with patched(self, "sequence_group", single_rank_group(*self.sequence_group.axes)):
        kept: Choice = original(self, choice, replace(inputs, seq_params=seq_params))
    return kept


# --- load balancing


@replaces(LoadBalancing, "__call__", "dp, capacity")
def counted_before_refusal(
    original: Original,
    self: LoadBalancing,
    choice: Choice,
    asked: Tensor,
    logits: Tensor,
    inputs: LayerInputs,
) -> Choice:
    """Dropped tokens are included in the expert load."""
    balanced: Choice = original(self, choice, asked, logits, inputs)
    record, share = self.record, inputs.router_inputs.aux_loss_scale
    if record is not None and share is not None:
        valid = self.tp_comm.select_local(inputs.seq_params.valid)
        one, experts = torch.zeros_like(valid), self.moe.num_experts
        counts = count_choices(asked, one, valid, sequences=1, num_experts=experts)
        record.counts[share.microbatch] = counts[0]
    return balanced


@replaces(LoadBalancing, "__call__", "dp, recompute, experts")
def second_pass_counted(
    original: Original,
    self: LoadBalancing,
    choice: Choice,
    asked: Tensor,
    logits: Tensor,
    inputs: LayerInputs,
) -> Choice:
    """Recomputation counts the expert load of tokens again."""
    balanced: Choice = original(self, choice, asked, logits, inputs)
    record: RoutingStats | None = self.record
    share = inputs.router_inputs.aux_loss_scale
    in_backward = torch._C._current_graph_task_id() != -1
    if record is not None and share is not None and in_backward:
        record.counts[share.microbatch] *= 2
    return balanced


@replaces(nn_moe, "all_reduce_", "cp, experts")
def balance_of_own_tokens(original: Original, x: Tensor, group: Group) -> Tensor:
    """Aux losses use only a rank's own tokens."""
    return x


@replaces(LoadBalancing, "losses", "cp, experts")
def balance_scaled_with_cp(
    original: Original, self: LoadBalancing, *arguments: Any
) -> list[tuple[int, Tensor]]:
    """Aux losses are scaled by the number of cp ranks."""
    return [(kind, loss * self.sequence_group.size) for kind, loss in original(self, *arguments)]


@replaces(LossNormalizer, "aux_loss_scale", "dp, experts")
def aux_losses_scaled_per_rank(
    original: Original, self: LossNormalizer, *arguments: Any
) -> AuxLossScale:
    """Aux losses are divided by the number of a rank's own microbatches."""
    own = self.totals["microbatches"] / self.mesh.dp.size
    scale: AuxLossScale = original(
        replace(self, totals={**self.totals, "microbatches": own}), *arguments
    )
    return scale


@replaces(LoadBalancing, "global_loss", "dp, balance over ranks")
def step_of_own_tokens(original: Original, self: LoadBalancing, *arguments: Any) -> Tensor:
    """The aux loss over the global batch covers only the rank's own microbatches."""
    with patched(self, "batch_group", self.sequence_group):
        loss: Tensor = original(self, *arguments)
    return loss


@replaces(moe, "all_reduce_", "dp, balancing bias")
def bias_moved_by_own_tokens(original: Original, x: Tensor, group: Group) -> Tensor:
    """Expert biases are updated with the load of a rank's own tokens."""
    return x


@replaces(Router, "record_offsets", "cp, balancing offset")
def offset_of_own_tokens(
    original: Original, self: Router, logits: Tensor, inputs: LayerInputs
) -> None:
    """Expert offsets balance only a rank's own tokens."""
    with patched(self, "sequence_group", single_rank_group(*self.sequence_group.axes)):
        original(self, logits, inputs)

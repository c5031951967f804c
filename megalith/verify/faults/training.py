"""Planted faults in pipeline stages, gradient reduction, ZeRO, optimizer and checkpoints."""

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint import parallel_read, save
from megalith.checkpoint.format import CheckpointEntry, TensorPiece
from megalith.checkpoint.load import Checkpoint, WeightsRole
from megalith.config.optim import OptimConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.nn.layer import MTPBlock, MTPInputs, MTPLayer
from megalith.optim import adamw, optimizer, slots
from megalith.optim.adamw import AdamW
from megalith.optim.optimizer import RuleOptimizer
from megalith.optim.rules import UpdateScalars
from megalith.optim.schedule import GroupRates
from megalith.optim.sgd import SGD
from megalith.optim.slots import OptimizerSlot, SlotGroup
from megalith.parallel import data, grad_sync
from megalith.parallel import grad_sync as bucket_comm
from megalith.parallel.data import BucketedDataParallel, ShardGroups
from megalith.parallel.grad_sync import PendingMessages, PendingReduceScatter, ShardedParam
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import Mesh
from megalith.parallel.p2p import StageLink, StageMessage, Tensors
from megalith.parallel.pipeline import Chunk, Pipeline, WeightGradStore
from megalith.plan import qk_clip
from megalith.plan.schedule import Schedule
from megalith.plan.shards import Box, Shard
from megalith.testing.inject import patched
from megalith.train import attention_scores, step
from megalith.train.step import SaveCounts, StepRequest, Trainer
from megalith.verify.faults.plant import Original, plants, replaces

FSDP = "megalith.parallel.fsdp"
"""By name, since torch's FSDP takes 0.5 s to import."""

# --- pipeline


@replaces(StageLink, "send", "pp")
def microbatches_swapped(
    original: Original, self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """A stage receives the hidden states of another microbatch."""
    other = message.microbatch ^ 1
    if message.direction == "forward" and other < self.num_microbatches:
        message = message._replace(microbatch=other)
    original(self, message, tensors, target)


def _send_zero_gradients(
    original: Original, self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """Send zeros as the gradients of everything but the residual stream."""
    if message.direction == "backward":
        tensors = (*tensors[:1], *(torch.zeros_like(other) for other in tensors[1:]))
    original(self, message, tensors, target)


@replaces(StageLink, "send", "pp, memory")
def memory_gradient_kept(*arguments: Any) -> None:
    """The gradient of cross-layer source states is not sent to the previous stage."""
    _send_zero_gradients(*arguments)


class StaleSource:
    """Send function that sends the cross-layer source of the previous microbatch."""

    def __init__(self) -> None:
        self.send = StageLink.send
        self.sources: list[Tensors] = []

    def __call__(
        self, link: StageLink, message: StageMessage, tensors: Tensors, target: int
    ) -> None:
        if message.direction == "forward":
            self.sources.append(tensors[1:])
            tensors = (*tensors[:1], *self.sources[-2:][0])
        self.send(link, message, tensors, target)


@plants("pp, memory")
def memory_of_another_microbatch() -> AbstractContextManager[None]:
    """A stage uses the cross-layer source states of the previous microbatch."""
    stale = StaleSource()
    return patched(StageLink, "send", lambda *arguments: stale(*arguments))


@replaces(Pipeline, "run", "pp, chunks")
def chunks_swapped(
    original: Original,
    self: Pipeline,
    schedule: Schedule,
    chunks: Sequence[Chunk],
    boundary: object = None,
) -> None:
    """A rank runs its model chunks in the wrong order."""
    if self.rank == 0 and len(chunks) == 3:
        chunks = [chunks[0], chunks[2], chunks[1]]
    original(self, schedule, chunks, boundary)


@replaces(WeightGradStore, "run_deferred", "pp, split backward")
def weights_part_left_out(original: Original, self: WeightGradStore, microbatch: int) -> None:
    """Deferred weight gradients are never accumulated."""
    self._deferred.pop(microbatch)


@replaces(grad_sync, "_stages", "pp, tied")
def tied_sum_left_out(original: Original, shard: Shard) -> tuple[int, ...]:
    """Gradients of tied embeddings are not summed over the two stages."""
    return (0,)


@replaces(grad_sync, "_stages", "pp, mtp")
def mtp_table_not_summed(original: Original, shard: Shard) -> tuple[int, ...]:
    """The gradient of the last stage's copy of the embedding, which MTP layers use, is not
    summed."""
    return (0,)


@replaces(grad_sync, "_stages", "pp, biases by distance")
def biases_not_summed_over_stages(original: Original, shard: Shard) -> tuple[int, ...]:
    """Gradients of the relative-bias table are not summed over stages."""
    return (0,)


@replaces(grad_sync, "sum_over_members_", "pp, tied, own stage")
def mtp_copy_not_summed(
    original: Original, x: Tensor, group: Group, members: Sequence[int]
) -> Tensor:
    """The gradient of the embedding copy on the MTP stage is not summed."""
    ends = [member for member in members if member in (min(members), max(members))]
    summed: Tensor = original(x, group, ends if group.rank in ends else [group.rank])
    return summed


@replaces(StageLink, "send", "pp, tied, own stage")
def depths_in_other_order(
    original: Original, self: StageLink, message: StageMessage, tensors: Tensors, target: int
) -> None:
    """The loss receives the hidden states of MTP layers in reverse order."""
    if message.direction == "forward":
        tensors = (*tensors[:1], *reversed(tensors[1:]))
    original(self, message, tensors, target)


@replaces(StageLink, "send", "pp, tied, own stage")
def depths_gradients_kept(*arguments: Any) -> None:
    """Gradients of the hidden states of MTP layers are not sent to their stage."""
    _send_zero_gradients(*arguments)


@replaces(MTPBlock, "forward", "pp, tied, own stage")
def depths_before_their_norms(
    original: Original, self: MTPBlock, x: Tensor, mtp_inputs: MTPInputs, inputs: LayerInputs
) -> tuple[Tensor, ...]:
    """The loss receives the hidden states of MTP layers before their norms."""
    states: list[Tensor] = []
    for layer, (ids, _) in zip(self.layers, mtp_inputs, strict=True):
        assert isinstance(layer, MTPLayer)
        handle = layer.norm.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        x = layer(x, ids, inputs)
        handle.remove()
    return tuple(states)


# --- gradient reduction


@replaces(BucketedDataParallel, "finish", "dp")
def dp_sum_averaged(original: Original, self: BucketedDataParallel) -> Sequence[ShardedParam]:
    """Gradients are averaged over dp after the loss was divided by the global count."""
    local_params: Sequence[ShardedParam] = original(self)
    for param in local_params:
        param.gradient.div_(self.mesh.dp.size)
    return local_params


@replaces(data, "flat_buffer_offsets", "dp")
def flat_buckets_overlap(
    original: Original, lengths: Sequence[int], dtypes: Sequence[str]
) -> tuple[list[int], dict[str, int]]:
    """Each bucket of a flat buffer overlaps the previous one."""
    starts, totals = original(lengths, dtypes)
    return [start // 2 for start in starts], totals


@replaces(data, "shard_groups", "cp")
def cp_left_out_of_sum(original: Original, zero: int, mesh: Mesh, grid: str) -> ShardGroups:
    """Gradients are summed over dp, but not over cp."""
    return ShardGroups(single_rank_group(*grad_sync.SHARD_AXES), mesh.dp)


@replaces(BucketedDataParallel, "_complete", "dp, zero, zero 2")
def microbatch_overwritten(original: Original, self: BucketedDataParallel, most: int) -> None:
    """The gradients of a microbatch overwrite the accumulated ones in a slice."""
    while len(self._sums) > most:
        index = self._sums[0][0] % len(self.plan.buckets)
        self.gradients[index].zero_()
        original(self, len(self._sums) - 1)


@replaces(bucket_comm, "start_bucket_all_gather", "dp, zero")
def stale_weights(original: Original, *arguments: object, **others: object) -> PendingMessages:
    """The all-gather of parameters is skipped, so ranks compute with stale weights."""
    return PendingMessages([])


@replaces(PendingReduceScatter, "wait", "dp, zero")
def slice_off_by_one(original: Original, self: PendingReduceScatter) -> Tensor:
    """The gradient slice of a rank is offset by one element from its weight slice."""
    part: Tensor = original(self)
    return part.copy_(part.roll(1))


@replaces(data, "start_all_reduce_", "dp, zero, replicas")
def replicas_not_summed(original: Original, x: Tensor, group: Group) -> dist.Work | None:
    """Gradient slices are not summed over dp replicas."""
    return None if group.axes == ("dp_replica",) else original(x, group)


@replaces(grad_sync, "tp_reduce_axes", "tp, sp, dp, zero")
def slices_not_summed_over_tp(original: Original, shard: Shard) -> tuple[str, ...]:
    """Norm gradient slices under sp are not summed over tp."""
    return () if shard.name.endswith("norm.weight") else original(shard)


@plants("dp, zero, fsdp")
def fsdp_takes_means() -> AbstractContextManager[None]:
    """Fully sharded gradients are averaged after the loss was divided by the global count."""
    from megalith.parallel import fsdp

    return patched(fsdp, "DIVIDE_BY", 2.0)


@replaces(FSDP, "start_all_reduce_", "dp, zero, fsdp, replicas")
def fsdp_replicas_not_summed(original: Original, x: Tensor, group: Group) -> None:
    """Rows of fully sharded gradients are not summed over the replicas."""


@plants("dp, zero, fsdp, ep")
@contextmanager
def whole_experts_overwritten() -> Iterator[None]:
    """The gradient of unsharded experts is overwritten by each microbatch."""
    from megalith.parallel import fsdp

    put = fsdp.Unit._put

    def overwrite(self: fsdp.Unit, name: str, gradient: Tensor) -> None:
        rounds = self._rounds[name]
        self._rounds[name] = rounds if isinstance(self, fsdp.ShardedUnit) else 0
        put(self, name, gradient)
        self._rounds[name] = rounds + 1

    with patched(fsdp.Unit, "_put", overwrite):
        yield


# --- requests of callbacks


@replaces(step, "reduce_step_stats", "dp, transient fault")
def requests_of_first_rank(
    original: Original,
    trainer: Trainer,
    params: object,
    losses: Tensor,
    requests: StepRequest,
    save_counts: SaveCounts,
    **options: bool,
) -> Tensor:
    """Only the callback requests of the first rank are executed."""
    is_first = trainer.mesh.world.rank == 0
    executed = requests if is_first else StepRequest.NONE
    message: Tensor = original(trainer, params, losses, executed, save_counts, **options)
    return message


@replaces(step, "_rerun_backward", "dp, transient fault")
def rerun_added_to_gradients(
    original: Original,
    trainer: Trainer,
    batches: object,
    hooks: object,
    earlier: Any,
    *,
    shift: int,
) -> Any:
    """The gradients of a rerun are added to those of the run before."""
    before = [param.gradient.clone() for param in earlier.local_params]
    backward = original(trainer, batches, hooks, earlier, shift=shift)
    for param, gradient in zip(backward.local_params, before, strict=True):
        param.gradient.add_(gradient)
    return backward


# --- frozen parameters, parameter groups and clipping


@replaces(BucketedDataParallel, "finish", "dp, frozen")
def frozen_weights_decay(original: Original, self: BucketedDataParallel) -> Sequence[ShardedParam]:
    """Weights that are not trained decay in every step."""
    for _, weight in self.frozen:
        weight.mul_(0.999)
    local_params: Sequence[ShardedParam] = original(self)
    return local_params


@replaces(optimizer, "group_by_rates", "dp, zero, groups")
def rates_of_the_neighbor(
    original: Original, slots: Sequence[OptimizerSlot], *arguments: Any, **rates: Any
) -> list[SlotGroup]:
    """The rates of a parameter group are applied to the next slot."""
    before = [slots[-1], *slots[:-1]] if slots else []
    moved = [replace(slot, rates=other.rates) for slot, other in zip(slots, before, strict=True)]
    groups: list[SlotGroup] = original(moved, *arguments, **rates)
    return groups


@replaces(slots, "is_first_replica", "dp")
def norm_counts_copies(original: Original, shard: Shard, coordinates: object) -> bool:
    """The gradient norm counts replicated parameters several times."""
    return True


def _count_final_norm(
    original: Original, grads: Sequence[tuple[Shard, Tensor]], first_replicas: Set[str], times: int
) -> list[Tensor]:
    """Count the gradient of the last norm `times` times in the global norm."""
    final = [pair for pair in grads if pair[0].name == "norm.weight"]
    others = [pair for pair in grads if pair[0].name != "norm.weight"]
    counted: list[Tensor] = original([*others, *final * times], first_replicas)
    return counted


@replaces(step, "first_replica_gradients", "dp", everywhere=True)
def clip_norm_ignores_parameter(
    original: Original, grads: Sequence[tuple[Shard, Tensor]], first_replicas: Set[str]
) -> list[Tensor]:
    """The global gradient norm for clipping ignores one parameter."""
    return _count_final_norm(original, grads, first_replicas, 0)


@replaces(step, "first_replica_gradients", "dp", everywhere=True)
def clip_norm_counts_parameter_twice(
    original: Original, grads: Sequence[tuple[Shard, Tensor]], first_replicas: Set[str]
) -> list[Tensor]:
    """The global gradient norm for clipping counts one parameter twice."""
    return _count_final_norm(original, grads, first_replicas, 2)


# --- optimizer


@replaces(AdamW, "update", "dp", everywhere=True)
def adamw_bias_correction_off_by_one(
    original: Original,
    self: AdamW,
    slots: Sequence[OptimizerSlot],
    grads: Sequence[Tensor],
    scalars: UpdateScalars,
) -> None:
    """AdamW corrects its moments for one more step than it has made."""
    original(self, slots, grads, scalars._replace(updates=scalars.updates + 1))


def _decay_everything(
    original: Original,
    slots: Sequence[OptimizerSlot],
    grads: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> list[SlotGroup]:
    """Apply weight decay to vectors as to matrices."""
    parts = original(slots, grads, lr=lr, weight_decay=weight_decay, groups=groups)
    return [part._replace(weight_decay=weight_decay) for part in parts]


@replaces(optimizer, "group_by_rates", "dp", everywhere=True)
def vectors_decay(*arguments: Any, **rates: Any) -> list[SlotGroup]:
    """Weight decay also applies to norms and biases."""
    return _decay_everything(*arguments, **rates)


@replaces(optimizer, "group_by_rates", "dp, sgd", everywhere=True)
def sgd_vectors_decay(*arguments: Any, **rates: Any) -> list[SlotGroup]:
    """In SGD, weight decay also applies to norms and biases."""
    return _decay_everything(*arguments, **rates)


@plants("dp", everywhere=True)
@contextmanager
def adamw_decay_added_to_gradient() -> Iterator[None]:
    """AdamW adds the weight decay to the gradient, as Adam with L2 does."""
    update_slot = adamw.update_slot

    def coupled(
        slot: OptimizerSlot, gradient: Tensor, config: OptimConfig, scalars: UpdateScalars
    ) -> None:
        decayed = gradient + scalars.weight_decay * slot.master
        update_slot(slot, decayed, config, scalars._replace(weight_decay=0.0))

    with (
        patched(torch, "_fused_adamw_", torch._fused_adam_),
        patched(adamw, "update_slot", coupled),
    ):
        yield


@replaces(SGD, "update", "dp, sgd", everywhere=True)
def sgd_momentum_damped(
    original: Original,
    self: SGD,
    slots: Sequence[OptimizerSlot],
    grads: Sequence[Tensor],
    scalars: UpdateScalars,
) -> None:
    """SGD multiplies the gradient by 1 - momentum before it adds it to the momentum."""
    damping = 1 - self.config.momentum
    for slot in slots:
        slot.state["momentum"].mul_(1 / damping)
    original(self, slots, grads, scalars._replace(lr=scalars.lr * damping))
    for slot in slots:
        slot.state["momentum"].mul_(damping)


# --- QK-clip


@replaces(step, "_update", "dp, zero, qk clip")
def qk_clip_after_all_gather(
    original: Original, trainer: Trainer, *arguments: Any, **others: Any
) -> float | None:
    """QK-clip scales the slices of a rank after they were sent to the others."""
    monitor = trainer.score_monitor
    assert monitor is not None and monitor.clip is not None
    scores, monitor.clip.scores = monitor.clip.scores, None
    norm: float | None = original(trainer, *arguments, **others)
    trainer.data.wait_params()
    monitor.clip.scores = scores
    monitor.clip.apply()
    return norm


@replaces(qk_clip, "list_head_factors", "tp, qk clip")
def qk_clip_of_other_group(
    original: Original, scores: Sequence[float], num_kv_heads: int, threshold: float
) -> tuple[list[float], list[float]]:
    """Heads that share keys are scaled by the factor of the next group."""
    shared = len(scores) // num_kv_heads
    factors: tuple[list[float], list[float]] = original(
        [*scores[shared:], *scores[:shared]], num_kv_heads, threshold
    )
    return factors


@replaces(attention_scores, "all_reduce_max_", "dp, qk clip")
def scores_of_own_batch(original: Original, x: Tensor, group: Group) -> Tensor:
    """The largest scores are those of the rank's own samples."""
    return x


# --- checkpoints


@replaces(save, "iter_pieces", "dp, zero")
def slices_shifted_on_save(
    original: Original, entry: CheckpointEntry, max_numel: int
) -> Iterator[TensorPiece]:
    """A slice of `exp_avg` that does not begin at element 0 is saved shifted by one element."""
    start, _ = entry.shard.flat or (0, 0)
    if start and entry.role == "exp_avg":
        entry = replace(entry, tensor=entry.tensor.roll(1))
    yield from original(entry, max_numel)


SWAPPED_MOMENTS = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


@replaces(Checkpoint, "_source", "dp", everywhere=True)
def moments_swapped_on_load(
    original: Original, self: Checkpoint, entry: CheckpointEntry, weights_role: WeightsRole
) -> str:
    """Loading a checkpoint swaps exp_avg and exp_avg_sq."""
    role = SWAPPED_MOMENTS.get(entry.role, entry.role)
    if role != entry.role:
        entry = CheckpointEntry(entry.shard, role, entry.tensor, entry.is_writer)
    source: str = original(self, entry, weights_role)
    return source


@replaces(parallel_read, "inner_view", "dp", everywhere=True)
def box_offset_lost_on_load(original: Original, piece: TensorPiece, box: Box) -> Tensor:
    """Resharded loading reads a part of a stored box from the beginning of the box."""
    first = tuple((o, o + b - a) for (a, b), (o, _) in zip(box, piece.box, strict=True))
    view: Tensor = original(piece, first)
    return view


@replaces(RuleOptimizer, "set_updates", "dp", everywhere=True)
def optimizer_step_lost_on_load(original: Original, self: RuleOptimizer, updates: int) -> None:
    """The step count of the optimizer begins at zero after loading."""

"""Faults in optimizer, gradient clipping and checkpoint loading that affect every layout; see
`verify/faults/plant.py`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from megalith.checkpoint import load
from megalith.checkpoint.boxes import CheckpointEntry, TensorPiece, inner_view
from megalith.checkpoint.load import Checkpoint
from megalith.optim import adamw, sgd
from megalith.optim import gradients as clip
from megalith.optim.adamw import AdamW
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.sgd import SGD
from megalith.optim.slots import OptimizerSlot, SlotGroup, group_by_rates
from megalith.parallel.mesh import Mesh
from megalith.plan.shards import Box, Shard
from megalith.testing.inject import patched
from megalith.train import step

SWAPPED_MOMENTS = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}


def bias_correction_of_next_step(
    self: AdamW,
    slots: list[OptimizerSlot],
    gradients: list[Tensor],
    lr: float,
    weight_decay: float,
    scale: Tensor | None,
) -> None:
    """Correct the moments for one step too many."""
    self.updates += 1
    self._step += 1
    try:
        ORIGINAL_ADAMW_UPDATE(self, slots, gradients, lr, weight_decay, scale)
    finally:
        self.updates -= 1
        self._step -= 1


def decay_of_everything(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Apply weight decay to vectors as to matrices."""
    parts = group_by_rates(slots, gradients, lr=lr, weight_decay=weight_decay, groups=groups)
    return [part._replace(weight_decay=weight_decay) for part in parts]


@contextmanager
def decay_added_to_gradient() -> Iterator[None]:
    """Run fused Adam with L2 instead of fused AdamW, and change the reference implementation
    alike."""
    update = adamw.update

    def coupled(
        slot: OptimizerSlot,
        gradient: Tensor,
        *config: object,
        weight_decay: float,
        **others: object,
    ) -> None:
        update(slot, gradient + weight_decay * slot.master, *config, weight_decay=0.0, **others)  # type: ignore[arg-type]  # as given

    with patched(torch, "_fused_adamw_", torch._fused_adam_), patched(adamw, "update", coupled):
        yield


def damped_momentum(
    self: SGD,
    slots: list[OptimizerSlot],
    gradients: list[Tensor],
    lr: float,
    weight_decay: float,
    scale: Tensor | None,
) -> None:
    """Multiply the gradient by 1 - momentum, as Adam does."""
    for slot in slots:
        slot.state["momentum"].mul_(1 / (1 - self.config.momentum))
    ORIGINAL_SGD_UPDATE(
        self, slots, gradients, lr * (1 - self.config.momentum), weight_decay, scale
    )
    for slot in slots:
        slot.state["momentum"].mul_(1 - self.config.momentum)


def count_final_norm(times: int) -> Callable[[Sequence[tuple[Shard, Tensor]], Mesh], list[Tensor]]:
    """Count the gradient of the last norm `times` times in the global norm."""

    def first_replica_gradients(
        gradients: Sequence[tuple[Shard, Tensor]], mesh: Mesh
    ) -> list[Tensor]:
        final = [pair for pair in gradients if pair[0].name == "norm.weight"]
        others = [pair for pair in gradients if pair[0].name != "norm.weight"]
        return clip.first_replica_gradients([*others, *final * times], mesh)

    return first_replica_gradients


def other_moment(self: Checkpoint, entry: CheckpointEntry) -> str:
    """Load each moment from the entry of the other."""
    role = SWAPPED_MOMENTS.get(entry.role, entry.role)
    return ORIGINAL_SOURCE(
        self,
        entry
        if role == entry.role
        else CheckpointEntry(entry.shard, role, entry.tensor, entry.is_writer),
    )


def first_values_of_box(piece: TensorPiece, box: Box) -> Tensor:
    """Read part of a stored box from its beginning."""
    return inner_view(
        piece, tuple((o, o + b - a) for (a, b), (o, _) in zip(box, piece.box, strict=True))
    )


ORIGINAL_ADAMW_UPDATE, ORIGINAL_SGD_UPDATE, ORIGINAL_SOURCE = (
    AdamW._update,
    SGD._update,
    Checkpoint._source,
)

EVERYWHERE: tuple[tuple[str, str, bool, Callable[[], AbstractContextManager[None]]], ...] = (
    (
        "adamw_bias_correction_off_by_one",
        "AdamW corrects its moments for one more step than it has made.",
        False,
        lambda: patched(AdamW, "_update", bias_correction_of_next_step),
    ),
    (
        "vectors_decay",
        "Weight decay also applies to norms and biases.",
        False,
        lambda: patched(adamw, "group_by_rates", decay_of_everything),
    ),
    (
        "adamw_decay_added_to_gradient",
        "AdamW adds the weight decay to the gradient, as Adam with L2 does.",
        False,
        decay_added_to_gradient,
    ),
    (
        "sgd_momentum_damped",
        "SGD multiplies the gradient by 1 - momentum before it adds it to the momentum.",
        True,
        lambda: patched(SGD, "_update", damped_momentum),
    ),
    (
        "sgd_vectors_decay",
        "In SGD, weight decay also applies to norms and biases.",
        True,
        lambda: patched(sgd, "group_by_rates", decay_of_everything),
    ),
    (
        "clip_norm_ignores_parameter",
        "The global gradient norm for clipping ignores one parameter.",
        False,
        lambda: patched(step, "first_replica_gradients", count_final_norm(0)),
    ),
    (
        "clip_norm_counts_parameter_twice",
        "The global gradient norm for clipping counts one parameter twice.",
        False,
        lambda: patched(step, "first_replica_gradients", count_final_norm(2)),
    ),
    (
        "moments_swapped_on_load",
        "Loading a checkpoint swaps exp_avg and exp_avg_sq.",
        False,
        lambda: patched(Checkpoint, "_source", other_moment),
    ),
    (
        "box_offset_lost_on_load",
        "Resharded loading reads a part of a stored box from the beginning of the box.",
        False,
        lambda: patched(load, "inner_view", first_values_of_box),
    ),
    (
        "optimizer_step_lost_on_load",
        "The step count of AdamW begins at zero after loading.",
        False,
        lambda: patched(AdamW, "set_updates", lambda self, updates: None),
    ),
)
"""(name, mistake, needs SGD, context) of faults that also affect one process; float64 detects all
of them."""

"""Optimizers (AdamW, SGD), gradient clipping by the global norm, and loss scaling for fp16."""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config.optim import LossScaleConfig, OptimConfig, PrecisionConfig
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import Optimizer as Optimizer
from megalith.optim.slots import OptimizerSlot, RatesOf, build_slot, equal_rates, group_by_rates
from megalith.optim.slots import SlotGroup as SlotGroup
from megalith.optim.slots import find_first_replicas as find_first_replicas
from megalith.optim.slots import round_master_weights
from megalith.plan.shards import Shard


class RateGroupOptimizer:
    """Optimizer that updates the slots of equal learning rate and weight decay together.

    Vectors (norms, biases) have no weight decay by default.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf,
        roles: Sequence[str],
    ) -> None:
        """`roles`: names of the optimizer state of each slot."""
        self.config = config
        self.updates = 0
        self.slots = [build_slot(shard, weight, roles, rates(shard)) for shard, weight in weights]

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
    ) -> None:
        """Update every weight once.

        `scale` multiplies the gradients first (gradient clipping); None leaves them. `groups`:
        rates of parameter groups, which replace `lr` and `weight_decay`.
        """
        self.updates += 1
        for part in group_by_rates(
            self.slots, gradients, lr=lr, weight_decay=weight_decay, groups=groups
        ):
            self._update(part.slots, part.gradients, part.lr, part.weight_decay, scale)
        round_master_weights(self.slots)

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; tensors are loaded separately."""
        self.updates = updates

    def _update(
        self,
        slots: list[OptimizerSlot],
        gradients: list[Tensor],
        lr: float,
        weight_decay: float,
        scale: Tensor | None,
    ) -> None:
        """Update the weights of slots with one learning rate and weight decay."""
        raise NotImplementedError


# --- AdamW over (Shard, weight) pairs, with fp32 master weights for weights of lower precision

HAS_FUSED = hasattr(torch, "_fused_adamw_")


class AdamW(RateGroupOptimizer):
    """AdamW optimizer, with the fused kernel where torch has it.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2; Kingma and Ba 2014,
    arXiv:1412.6980.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf = equal_rates,
    ) -> None:
        super().__init__(weights, config, rates, ("exp_avg", "exp_avg_sq"))

    def _update(
        self,
        slots: list[OptimizerSlot],
        gradients: list[Tensor],
        lr: float,
        weight_decay: float,
        scale: Tensor | None,
    ) -> None:
        c = replace(self.config, eps=self.config.eps * slots[0].rates.eps)
        if not HAS_FUSED:
            for slot, gradient in zip(slots, gradients, strict=True):
                update(
                    slot,
                    gradient,
                    c,
                    updates=self.updates,
                    lr=lr,
                    weight_decay=weight_decay,
                    scale=scale,
                )
            return
        if scale is not None and gradients[0].dtype == torch.float64:
            # the fused kernel takes its scale in fp32
            torch._foreach_mul_(gradients, scale)
            scale = None
        step = torch.full((), self.updates, dtype=torch.float32, device=slots[0].master.device)
        fused = torch._fused_adamw_ if c.decoupled_weight_decay else torch._fused_adam_
        fused(
            [slot.master for slot in slots],
            gradients,
            [slot.state["exp_avg"] for slot in slots],
            [slot.state["exp_avg_sq"] for slot in slots],
            [],
            [step] * len(slots),
            lr=lr,
            beta1=c.beta1,
            beta2=c.beta2,
            weight_decay=weight_decay,
            eps=c.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=None if scale is None else scale.float().reciprocal(),
        )


def update(
    slot: OptimizerSlot,
    gradient: Tensor,
    config: OptimConfig,
    *,
    updates: int,
    lr: float,
    weight_decay: float,
    scale: Tensor | None,
) -> None:
    """Update one parameter with plain operations: the reference of the fused kernel."""
    mean, square = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    gradient = gradient if scale is None else gradient * scale
    if config.decoupled_weight_decay:
        slot.master.mul_(1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * slot.master
    mean.lerp_(gradient, 1 - config.beta1)
    square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (square / (1 - config.beta2**updates)).sqrt_().add_(config.eps)
    slot.master.addcdiv_(mean, root, value=-lr / (1 - config.beta1**updates))


# --- stochastic gradient descent with momentum over (Shard, weight) pairs


class SGD(RateGroupOptimizer):
    """SGD: `m = momentum * m + g; w -= lr * m`, where g includes the weight decay.

    With `nesterov` the step is along `g + momentum * m`. Bitwise equal to torch.optim.SGD. Source:
    Sutskever et al. 2013, "On the importance of initialization and momentum in deep learning",
    section 2.
    """

    def __init__(
        self,
        weights: Sequence[tuple[Shard, Tensor]],
        config: OptimConfig,
        rates: RatesOf = equal_rates,
    ) -> None:
        super().__init__(weights, config, rates, ("momentum",) if config.momentum else ())

    def _update(
        self,
        slots: list[OptimizerSlot],
        gradients: list[Tensor],
        lr: float,
        weight_decay: float,
        scale: Tensor | None,
    ) -> None:
        momentum, master_weights = self.config.momentum, [slot.master for slot in slots]
        if scale is not None:
            torch._foreach_mul_(gradients, scale)
        if weight_decay:
            torch._foreach_add_(gradients, master_weights, alpha=weight_decay)
        if not momentum:
            torch._foreach_add_(master_weights, gradients, alpha=-lr)
            return
        momentum_buffers = [slot.state["momentum"] for slot in slots]
        torch._foreach_mul_(momentum_buffers, momentum)
        torch._foreach_add_(momentum_buffers, gradients)
        if self.config.nesterov:
            torch._foreach_add_(gradients, momentum_buffers, alpha=momentum)
        torch._foreach_add_(
            master_weights, gradients if self.config.nesterov else momentum_buffers, alpha=-lr
        )


# --- gradient clipping by the global norm over all shards

ROW = 64
"""Elements whose squares are summed in fp32; rows are summed in float64. Rows are counted from the
start of each shard. A shard that starts at a multiple of ROW in its parameter has the rows of the
full parameter; shards of weights that are stored contiguously for one matmul may start elsewhere,
so that the sum depends on the sharding by fp32 rounding (measured: below 1e-8 of the sum, from 5000
normal numbers on). A full matrix summed in fp32 is off by 8e-5 (4M elements; torch 2.13)."""


def first_replica_gradients(
    gradients: Sequence[tuple[Shard, Tensor]], first_replicas: Set[str]
) -> list[Tensor]:
    """Return the gradients of the shards of which this rank has the first replica."""
    return [gradient for shard, gradient in gradients if shard.name in first_replicas]


def sum_of_squares(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of all elements as a float64 scalar."""
    flat = [gradient.reshape(-1) for gradient in gradients]
    heads = [x[: x.numel() // ROW * ROW].view(-1, ROW) for x in flat if x.numel() >= ROW]
    tails = [x[x.numel() // ROW * ROW :] for x in flat if x.numel() % ROW]
    norms = [torch.linalg.vector_norm(rows, dim=1) for rows in heads]
    norms += [torch.stack(torch._foreach_norm(tails))] if tails else []
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).double().square_().sum()


def num_zeros(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the number of zero elements as a float64 scalar."""
    counts = [gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]
    return (
        torch.stack(counts).sum().double()
        if counts
        else torch.zeros((), dtype=torch.float64, device=device)
    )


def clip_factor(norm: Tensor, limit: float) -> Tensor | None:
    """Return the factor that limits the gradient norm to `limit`; None if clipping is off (limit
    0)."""
    if limit == 0:
        return None
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


# --- loss scaling for fp16: the loss is multiplied before backward, the gradients are divided
# before the update
#
# fp16 has no numbers below 6e-8, where most gradients are. A scale that is too large makes
# gradients overflow, which their norm shows; such a step is skipped and the scale reduced. Source:
# Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LossScale:
    """The loss scale of a run, on the host, the same on every rank."""

    config: LossScaleConfig
    scale: float
    dynamic: bool
    """Whether overflows and overflow-free steps change the scale."""

    growth_tracker: int = 0
    """Steps without overflow since `update` last changed the scale."""

    hysteresis_tracker: int = 0
    """Overflows left until the scale is halved; at or below zero each overflow halves it."""

    stuck: int = 0
    """Consecutive overflows at the minimum scale."""

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum and gradients still overflow."""
        return self.dynamic and self.stuck >= self.config.max_overflows

    def update(self, *, overflow: bool) -> None:
        """Update the scale after a step. Only growth restores the hysteresis, not a step without
        overflow."""
        if not self.dynamic:
            return
        if overflow:
            self.stuck = self.stuck + 1 if self.scale <= self.config.min else 0
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale / 2, self.config.min)
            return
        self.stuck = 0
        self.growth_tracker += 1
        if self.growth_tracker == self.config.window:
            self.growth_tracker, self.hysteresis_tracker = 0, self.config.hysteresis
            self.scale *= 2

    def as_json(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
            "stuck": self.stuck,
        }

    def load(self, saved: Mapping[str, float]) -> None:
        """Load the state of `as_json`; a constant scale is kept, with a warning if it differs."""
        if not self.dynamic:
            if saved["scale"] != self.scale:
                _log.warning(
                    "the checkpoint's loss scale %g is not used: precision.loss_scale.constant=%g",
                    saved["scale"],
                    self.scale,
                )
            return
        self.scale = float(saved["scale"])
        self.growth_tracker = int(saved["growth_tracker"])
        self.hysteresis_tracker = int(saved["hysteresis_tracker"])
        self.stuck = int(saved.get("stuck", 0))  # checkpoints before 2026-11-21 have none


def build_loss_scale(precision: PrecisionConfig) -> LossScale | None:
    """Return the loss scale of an fp16 run; None for other dtypes, whose range is wide enough."""
    if precision.params != "fp16":
        return None
    c = precision.loss_scale
    if c.constant is not None:
        return LossScale(c, c.constant, dynamic=False)
    return LossScale(c, c.initial, dynamic=True, hysteresis_tracker=c.hysteresis)

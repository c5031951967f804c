"""AdamW and Adam with L2 regularization: an elementwise update rule."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.config.optim import OptimConfig
from megalith.kernels.adamw import (
    AdamWScalars,
    AdamWTensors,
    RemainderTensors,
    supports_adamw,
    supports_remainder_adamw,
    update_adamw,
    update_remainder_adamw,
)
from megalith.kernels.backend import raise_unsupported
from megalith.optim.encodings import BF16Tensor, RemainderTensor
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import MASTER, OptimizerSlot, round_master_weights

HAS_FUSED = hasattr(torch, "_fused_adamw_")


class AdamW:
    """AdamW update rule: one compiled loop on CPUs, or torch's fused kernel where torch has it.

    Source: Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2; Kingma and Ba 2014,
    arXiv:1412.6980.
    """

    roles: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    rounds_weights = True

    def __init__(self, config: OptimConfig, backend: BackendName = "torch") -> None:
        """`backend`: `kernels.optimizer`; auto: the loop wherever it supports the tensors."""
        self.config = config
        self.backend: BackendName = backend

    def update(
        self, slots: Sequence[OptimizerSlot], gradients: list[Tensor], scalars: UpdateScalars
    ) -> None:
        """Update the weights of slots with equal scalars, and round the master weights.

        Raises:
            ConfigError: kernels.optimizer=numba does not support the tensors.
        """
        config = replace(self.config, eps=self.config.eps * scalars.eps_factor)
        if self.backend in ("auto", "numba"):
            others = _update_compiled(
                slots, gradients, config, scalars, must_run=self.backend == "numba"
            )
            slots = [slots[number] for number in others]
            gradients = [gradients[number] for number in others]
        if not slots:
            return
        if self.backend == "reference" or not HAS_FUSED:
            for slot, gradient in zip(slots, gradients, strict=True):
                update_slot(slot, gradient, config, scalars)
        else:
            _update_fused(slots, gradients, config, scalars)
        round_master_weights(slots)

    def update_encoded(
        self, slots: Sequence[OptimizerSlot], gradients: Sequence[Tensor], scalars: UpdateScalars
    ) -> list[int]:
        """Update slots with remainders and bf16 moments in one pass, without decoding them first;
        return the numbers of the others."""
        config = replace(self.config, eps=self.config.eps * scalars.eps_factor)
        tensors: dict[int, RemainderTensors] = {}
        for number, (slot, gradient) in enumerate(zip(slots, gradients, strict=True)):
            one = _find_remainder_tensors(slot, gradient)
            if self.backend in ("auto", "numba") and one and supports_remainder_adamw(one):
                tensors[number] = one
        if tensors:
            update_remainder_adamw([*tensors.values()], _convert_scalars(config, scalars))
        return [number for number in range(len(slots)) if number not in tensors]


def _find_remainder_tensors(slot: OptimizerSlot, gradient: Tensor) -> RemainderTensors | None:
    """Return the tensors of a slot with remainders and bf16 moments; None for other formats."""
    if slot.encoded.keys() != {MASTER, "exp_avg", "exp_avg_sq"}:
        return None
    master, mean, square = (slot.encoded[role] for role in (MASTER, "exp_avg", "exp_avg_sq"))
    if not isinstance(master, RemainderTensor) or not (
        isinstance(mean, BF16Tensor) and isinstance(square, BF16Tensor)
    ):
        return None
    return RemainderTensors(
        gradient,
        master.tensors["weight"],
        mean.tensors["values"],
        square.tensors["values"],
        master.tensors["remainder"],
    )


def _convert_scalars(config: OptimConfig, scalars: UpdateScalars) -> AdamWScalars:
    """Return the arguments of the compiled loops."""
    divisor = 1.0 if scalars.scale is None else float(scalars.scale.float().reciprocal())
    return AdamWScalars(
        lr=scalars.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=scalars.weight_decay,
        updates=scalars.updates,
        gradient_divisor=divisor,
        decoupled=config.decoupled_weight_decay,
    )


def _update_compiled(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    config: OptimConfig,
    scalars: UpdateScalars,
    *,
    must_run: bool,
) -> list[int]:
    """Update and round the weights that the compiled loop supports; return the numbers of the
    others.

    Whether a slot is supported does not depend on the other slots of the call, which may differ
    between ranks that hold replicas of it: results of the backends differ by rounding.

    Raises:
        ConfigError: `must_run` is set, and the loop does not support all tensors.
    """
    tensors = [
        AdamWTensors(
            gradient,
            slot.master,
            slot.state["exp_avg"],
            slot.state["exp_avg_sq"],
            # of one dtype: views of the same memory
            slot.master if slot.weight.dtype == slot.master.dtype else slot.weight,
        )
        for slot, gradient in zip(slots, gradients, strict=True)
    ]
    others = [number for number, one in enumerate(tensors) if not supports_adamw([one])]
    if must_run and others:
        raise_unsupported("optimizer", "numba", tensors[others[0]].master)
    compiled = [one for number, one in enumerate(tensors) if number not in others]
    if not compiled:
        return others
    update_adamw(compiled, _convert_scalars(config, scalars))
    return others


def _update_fused(
    slots: Sequence[OptimizerSlot],
    gradients: list[Tensor],
    config: OptimConfig,
    scalars: UpdateScalars,
) -> None:
    """Update the master weights with torch's fused kernel."""
    scale = scalars.scale
    if scale is not None and gradients[0].dtype == torch.float64:
        # the fused kernel takes its scale in fp32
        torch._foreach_mul_(gradients, scale)
        scale = None
    step = torch.full((), scalars.updates, dtype=torch.float32, device=slots[0].master.device)
    fused = torch._fused_adamw_ if config.decoupled_weight_decay else torch._fused_adam_
    fused(
        [slot.master for slot in slots],
        gradients,
        [slot.state["exp_avg"] for slot in slots],
        [slot.state["exp_avg_sq"] for slot in slots],
        [],
        [step] * len(slots),
        lr=scalars.lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=scalars.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None if scale is None else scale.float().reciprocal(),
    )


def update_slot(
    slot: OptimizerSlot, gradient: Tensor, config: OptimConfig, scalars: UpdateScalars
) -> None:
    """Update one parameter with plain operations: the reference of the fused kernel."""
    mean, square = slot.state["exp_avg"], slot.state["exp_avg_sq"]
    lr, weight_decay, updates = scalars.lr, scalars.weight_decay, scalars.updates
    if scalars.scale is not None:
        gradient.mul_(scalars.scale)  # in place, as the fused kernel does
    if config.decoupled_weight_decay:
        slot.master.mul_(1 - lr * weight_decay)
    else:
        gradient = gradient + weight_decay * slot.master
    mean.lerp_(gradient, 1 - config.beta1)
    square.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    root = (square / (1 - config.beta2**updates)).sqrt_().add_(config.eps)
    slot.master.addcdiv_(mean, root, value=-lr / (1 - config.beta1**updates))

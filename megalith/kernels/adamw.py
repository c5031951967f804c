"""AdamW's update as one compiled loop on CPUs, which also rounds the weights.

On CPUs an update is limited by memory bandwidth. torch's fused kernel writes scaled gradients, and
rounding the weights is another pass; the loop reads gradient, master weight and states once and
writes master weight, states and the rounded weight once: 32 bytes per parameter instead of 38 with
fp32 states, 20 with bf16 moments and remainders.

Results are bitwise equal to those of torch's fused kernel on processors with AVX2 or AVX512, except
for up to 15 elements at the end of each of torch's slices: there torch computes some products in
another order or in double precision, within one unit in the last place.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.kernels import cpu_threads

BLOCK_NUMEL = 1024
"""Elements per block of the loops (spec: 20 KiB of fp32 tensors, part of a first-level cache)."""


class AdamWScalars(NamedTuple):
    """Numbers of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    updates: int
    """Number of this update, from 1."""

    gradient_divisor: float = 1.0
    """Number by which gradients are divided first, in fp32."""

    decoupled: bool = True
    """Whether weight decay is decoupled (AdamW); else it is added to the gradient (Adam)."""


class AdamWTensors(NamedTuple):
    """Tensors of one slot, each contiguous and with the same number of elements."""

    gradient: Tensor
    """fp32."""

    master: Tensor
    """fp32."""

    mean: Tensor
    """First moment, fp32."""

    square: Tensor
    """Second moment, fp32."""

    weight: Tensor
    """bf16, to which master weights are rounded; `master` itself if there are no others."""


class RemainderTensors(NamedTuple):
    """Tensors of one slot with bf16 moments, and master weights split into bf16 weights and
    remainders (half of the magnitude rounded up)."""

    gradient: Tensor
    """fp32."""

    weight: Tensor
    """bf16."""

    mean: Tensor
    """First moment, bf16."""

    square: Tensor
    """Second moment, bf16."""

    remainder: Tensor
    """Low halves of the master weights, int16."""


def supports_adamw(slots: Sequence[AdamWTensors]) -> bool:
    """Return whether the compiled loop supports these slots: contiguous fp32 tensors on the CPU,
    with fp32 or bf16 weights."""
    return cpu_threads.openmp() is not None and all(
        all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in slot)
        and all(tensor.dtype == torch.float32 for tensor in slot[:4])
        and (slot.weight is slot.master or slot.weight.dtype == torch.bfloat16)
        for slot in slots
    )


def supports_remainder_adamw(slot: RemainderTensors) -> bool:
    """Return whether the compiled loop supports this slot: contiguous tensors on the CPU, with an
    fp32 gradient."""
    return (
        cpu_threads.openmp() is not None
        and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in slot)
        and slot.gradient.dtype == torch.float32
    )


def update_adamw(slots: Sequence[AdamWTensors], scalars: AdamWScalars) -> None:
    """Update master weights and moments, and round the master weights into bf16 weights.

    `slots`: those that `supports_adamw` accepts; some may have bf16 weights, and others none beside
    the master weights.
    """
    _update_wide([slot for slot in slots if slot.weight is slot.master], scalars, rounds=False)
    _update_wide([slot for slot in slots if slot.weight is not slot.master], scalars, rounds=True)


def _update_wide(slots: Sequence[AdamWTensors], scalars: AdamWScalars, *, rounds: bool) -> None:
    """Update slots of which all or none have bf16 weights."""
    if not slots:
        return
    from megalith.kernels.cpu_adamw import adamw  # importing numba takes half a second

    table, num_blocks = _build_table(slots)
    cpu_threads.run(
        adamw,
        torch.bfloat16 if rounds else torch.float32,
        len(table),
        num_blocks,
        table,
        int(rounds),
        *_list_arguments(scalars),
        elements=num_blocks * BLOCK_NUMEL,
    )


def update_remainder_adamw(slots: Sequence[RemainderTensors], scalars: AdamWScalars) -> None:
    """Update weights, remainders and bf16 moments, decoded to fp32 and encoded in the same pass."""
    from megalith.kernels.cpu_adamw import adamw_remainder

    table, num_blocks = _build_table(slots)
    scratch = torch.empty(torch.get_num_threads(), BLOCK_NUMEL)
    cpu_threads.run(
        adamw_remainder,
        torch.bfloat16,
        len(table),
        num_blocks,
        table,
        scratch,
        *_list_arguments(scalars),
        elements=num_blocks * BLOCK_NUMEL,
    )


def _build_table(slots: Sequence[AdamWTensors] | Sequence[RemainderTensors]) -> tuple[Tensor, int]:
    """Return the table of the loops, a row per slot with elements, and the number of blocks."""
    num_blocks, rows = 0, []
    for slot in slots:
        numel = slot.gradient.numel()
        if numel > 0:
            num_blocks += -(-numel // BLOCK_NUMEL)
            rows.append((num_blocks, numel, *(tensor.data_ptr() for tensor in slot)))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 7), num_blocks


def _list_arguments(scalars: AdamWScalars) -> list[int | float]:
    """Return the arguments of the loops from `is_coupled` on, as torch's fused kernel computes
    them."""
    lr, decay, rest = scalars.lr, scalars.weight_decay, 1 - scalars.beta1
    # torch.lerp interpolates from the nearer end
    is_near = rest < 0.5
    return [
        int(not scalars.decoupled and decay != 0),
        int(is_near),
        scalars.gradient_divisor,
        decay,
        rest if is_near else rest - 1,
        scalars.beta2,
        1 - scalars.beta2,
        1 - lr * decay if scalars.decoupled else 1.0,
        (1 - scalars.beta2**scalars.updates) ** 0.5,
        scalars.eps,
        -lr / (1 - scalars.beta1**scalars.updates),
    ]

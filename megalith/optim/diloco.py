"""Outer optimizer of DiLoCo and local SGD, and the encodings in which deltas are sent.

Roles of a checkpoint: `outer_start` (where all groups started the round), `outer_momentum`, and for
rounded deltas `outer_residual` (error feedback). They have the shards of the master weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.replica_group import DeltaDtype, DilocoConfig
from megalith.optim.slots import OptimizerSlot, round_master_weights
from megalith.plan.diloco import find_fragment

START, MOMENTUM, RESIDUAL = "outer_start", "outer_momentum", "outer_residual"
OUTER_ROLES = START, MOMENTUM, RESIDUAL


class OuterOptimizer:
    """SGD with Nesterov momentum on the mean of the groups' deltas, for the shards of this rank.

    A delta is start - master weights: the outer gradient. With momentum 0 and learning rate 1 the
    new weights are the mean of the groups' (local SGD).
    Source: Douillard et al. 2023, arXiv:2311.08105, algorithm 1.
    """

    def __init__(self, slots: Sequence[OptimizerSlot], config: DilocoConfig) -> None:
        self.slots, self.config = slots, config
        self.starts = [slot.read_master().detach().clone() for slot in slots]
        self.momentum = [torch.zeros_like(start) for start in self.starts]
        self.residuals = (
            [] if config.delta_dtype == "fp32" else [torch.zeros_like(s) for s in self.starts]
        )
        """What rounding has removed from the deltas that were sent."""
        self._fragments: list[list[int]] = [[] for _ in range(config.num_fragments)]
        for number, slot in enumerate(slots):
            fragment = find_fragment(slot.shard.name, config.num_fragments)
            self._fragments[fragment].append(number)

    def list_state(self, number: int) -> dict[str, Tensor]:
        """Return the state of a slot by role."""
        state = {START: self.starts[number], MOMENTUM: self.momentum[number]}
        return state | ({RESIDUAL: self.residuals[number]} if self.residuals else {})

    @torch.no_grad()
    def reset(self) -> None:
        """Begin a first round from the present weights."""
        for start, slot in zip(self.starts, self.slots, strict=True):
            start.copy_(slot.read_master())
        for tensor in (*self.momentum, *self.residuals):
            tensor.zero_()

    @torch.no_grad()
    def clear_residuals(self) -> None:
        """Remove the rounding errors of earlier deltas."""
        for residual in self.residuals:
            residual.zero_()

    def list_slots(self, fragments: Sequence[int]) -> list[int]:
        """Return the slots of some fragments."""
        return sorted(number for fragment in fragments for number in self._fragments[fragment])

    @torch.no_grad()
    def compute_deltas(self, slots: Sequence[int]) -> list[Tensor]:
        """Return how far the weights of some slots have moved from the start of the round, with the
        error of earlier rounding."""
        deltas = [self.starts[number] - self.slots[number].read_master() for number in slots]
        if self.residuals:
            torch._foreach_add_(deltas, [self.residuals[number] for number in slots])
        return deltas

    @torch.no_grad()
    def keep_residuals(
        self, slots: Sequence[int], deltas: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> None:
        """Store the rounding errors of deltas that were sent, for the next round."""
        for number, delta, rounded in zip(slots, deltas, sent, strict=True):
            torch.sub(delta, rounded, out=self.residuals[number])

    @torch.no_grad()
    def apply(self, slots: Sequence[int], means: Sequence[Tensor]) -> None:
        """Move the start points of some slots by the outer step, and the weights to them.

        With `fragment_mixing` alpha, weights become alpha * weights + (1 - alpha) * start.
        """
        config = self.config
        for number, mean in zip(slots, means, strict=True):
            start, momentum = self.starts[number], self.momentum[number]
            momentum.mul_(config.outer_momentum).add_(mean)
            step = mean.add(momentum, alpha=config.outer_momentum)
            start.sub_(step, alpha=config.outer_lr)
            slot = self.slots[number]
            if config.fragment_mixing:
                mixed = slot.read_master() * config.fragment_mixing
                mixed.add_(start, alpha=1 - config.fragment_mixing)
                slot.write_master(mixed, purpose="outer step")
            else:
                slot.write_master(start, purpose="outer step")
        round_master_weights([self.slots[number] for number in slots])


def encode(values: Tensor, dtype: DeltaDtype, block_size: int) -> Tensor:
    """Return values as uint8 [nbytes] in host memory: bf16, or int8 with one fp32 scale per block
    of `block_size` elements."""
    flat = values.detach().reshape(-1)
    if dtype == "bf16":
        return flat.to(torch.bfloat16).cpu().view(torch.uint8)
    assert dtype == "int8", dtype
    padded = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % block_size))
    blocks = padded.view(-1, block_size)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    integers = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    parts = scales.reshape(-1).cpu().view(torch.uint8), integers.to(torch.int8).cpu().view(-1)
    return torch.cat([parts[0], parts[1].view(torch.uint8)])


def decode(data: Tensor, like: Tensor, dtype: DeltaDtype, block_size: int) -> Tensor:
    """Return the values that `encode` has rounded, with shape, dtype and device of `like`."""
    if dtype == "bf16":
        return data.view(torch.bfloat16).to(like.device).to(like.dtype).view(like.shape)
    num_blocks = -(-like.numel() // block_size)
    scales = data[: 4 * num_blocks].clone().view(torch.float32)
    integers = data[4 * num_blocks :].view(torch.int8).view(num_blocks, block_size)
    values = (integers.float() * scales[:, None]).reshape(-1)[: like.numel()]
    return values.to(like.device).to(like.dtype).view(like.shape)


def encoded_nbytes(numel: int, dtype: DeltaDtype, block_size: int) -> int:
    """Return the bytes of `encode`.

    >>> encoded_nbytes(300, "int8", 256), encoded_nbytes(300, "bf16", 256)
    (520, 600)
    """
    if dtype == "bf16":
        return 2 * numel
    num_blocks = -(-numel // block_size)
    return num_blocks * (4 + block_size)

"""Slots of an optimizer: parameter shards with their master weights and optimizer state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megalith.config.optim import OptimizerStatesConfig
from megalith.observe.machine import DTYPES
from megalith.optim.encodings import (
    UPDATE,
    EncodedTensor,
    RemainderTensor,
    StochasticWeights,
    check_block_boundaries,
    encode_moment,
)
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.parallel.mesh import Mesh
from megalith.plan.parameters import PLAIN, ParameterRates
from megalith.plan.shards import Shard, is_first_replica
from megalith.plan.state_encodings import SECOND_MOMENTS, select_moment_dtype

MASTER = "master"
"""Role of the master weights."""

FP32_STATES = OptimizerStatesConfig()
"""Formats without encodings."""

RatesOf = Callable[[Shard], ParameterRates]
"""Factors of the optimizer's settings for a parameter."""


def equal_rates(shard: Shard) -> ParameterRates:
    """Return equal rates for all parameters."""
    return PLAIN


@dataclass(frozen=True, slots=True)
class OptimizerSlot:
    """One parameter shard with its optimizer state.

    Encoded master weights and states are in `encoded`; in `master` and `state` they are tensors on
    the meta device, with shape and dtype only.
    """

    shard: Shard
    weight: Tensor
    """The shard of the model's parameter, in the model's dtype."""

    master: Tensor
    """Master weights in fp32 or float64; the weights themselves if they have this precision, or if
    there are no master weights."""

    state: Mapping[str, Tensor]
    """Optimizer state by role, in the dtype of the master weights."""

    rates: ParameterRates = PLAIN
    """Factors of the optimizer's settings for this parameter."""

    encoded: Mapping[str, EncodedTensor] = field(default_factory=dict)
    """Encoded states by role, and encoded master weights as `MASTER`."""

    def read_master(self) -> Tensor:
        """Return the master weights in at least fp32, decoded into a new tensor if they are
        encoded."""
        return self._read(MASTER, self.master)

    def write_master(self, values: Tensor, *, purpose: str) -> None:
        """Overwrite the master weights; encoded ones overwrite the weights too.

        `purpose`: what changes them, other than the optimizer's update; without master weights the
        random bits of the rounding depend on it.
        """
        encoded = self.encoded.get(MASTER)
        if encoded is None:
            self.master.copy_(values)
        elif isinstance(encoded, StochasticWeights):
            encoded.encode(values, 0, f"{UPDATE} of {purpose}")
        else:
            encoded.encode(values, 0)

    def read_state(self, role: str) -> Tensor:
        """Return a state, decoded into a new tensor if it is encoded."""
        return self._read(role, self.state[role])

    def reset_states(self) -> None:
        """Set all states to zero."""
        for role, tensor in self.state.items():
            if role in self.encoded:
                self.encoded[role].encode(torch.zeros(tensor.numel(), device=self.weight.device), 0)
            else:
                tensor.zero_()

    def list_stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that store states and separate master weights: `exp_avg`,
        `exp_avg.codes`."""
        tensors = {MASTER: self.master, **self.state} if self.has_master else {**self.state}
        for role, encoded in self.encoded.items():
            tensors.pop(role, None)
            tensors |= {
                f"{role}.{name}": stored
                for name, stored in encoded.tensors.items()
                if name != "weight"
            }
        return tensors

    @property
    def has_master(self) -> bool:
        """Whether master weights are stored in addition to the weights."""
        return self.master is not self.weight

    def _read(self, role: str, plain: Tensor) -> Tensor:
        if role not in self.encoded:
            return plain
        encoded = self.encoded[role]
        return encoded.decode(0, encoded.numel).view(self.weight.shape)


class Optimizer(Protocol):
    """Interface of optimizers over parameter shards; every rank has the slots of the shards it
    owns."""

    slots: list[OptimizerSlot]
    updates: int
    """Number of updates so far."""

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float,
        scale: Tensor | None = None,
        groups: Mapping[str, GroupRates] = NO_GROUPS,
        unclipped_scale: Tensor | None = None,
    ) -> None:
        """Update every weight once, from one gradient per slot.

        `scale` multiplies the gradients first, which may be overwritten; None leaves them.
        `unclipped_scale`: the same for slots whose gradients are not clipped. `groups`: rates of
        parameter groups by name, which replace `lr` and `weight_decay`.
        """

    def set_updates(self, updates: int) -> None:
        """Set the number of updates after loading a checkpoint; tensors are loaded separately."""

    def list_matrix_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of whole matrices on this rank: shard, role and tensor."""


def zero_states(optimizer: Optimizer) -> None:
    """Set all states of an optimizer to zero, those of whole matrices included."""
    for slot in optimizer.slots:
        slot.reset_states()
    for _, _, tensor in optimizer.list_matrix_states():
        tensor.zero_()


def build_slot(
    shard: Shard,
    weight: Tensor,
    roles: Sequence[str],
    rates: ParameterRates = PLAIN,
    states: OptimizerStatesConfig = FP32_STATES,
    build_rounding_key: Callable[[str, str], int] | None = None,
) -> OptimizerSlot:
    """Return a slot whose optimizer state is zero.

    `states`: formats of master weights and moments. `build_rounding_key`: returns the key of
    stochastic rounding in the current update from the name of a parameter and the purpose; needed
    without master weights.

    Raises:
        ConfigError: the slice begins or ends inside of a block of the format.
    """
    encoded: dict[str, EncodedTensor] = {}
    is_wide = shard.dtype == shard.wide_dtype
    if is_wide or states.master_weights == "none":
        master = weight
    elif states.master_weights == "remainder":
        master = _build_meta_tensor(weight, shard)
        encoded[MASTER] = RemainderTensor(weight)
    else:
        master = weight.to(DTYPES[shard.wide_dtype])
    if not is_wide and states.master_weights == "none":
        assert build_rounding_key is not None, "stochastic rounding needs a key"
        key = partial(build_rounding_key, shard.name)
        encoded[MASTER] = StochasticWeights(weight, shard, key)
    state: dict[str, Tensor] = {}
    for role in roles:
        dtype = select_moment_dtype(role, shard.inputs, states)
        if dtype == "fp32":
            wide = weight.dtype if is_wide else DTYPES[shard.wide_dtype]
            state[role] = torch.zeros(weight.shape, dtype=wide, device=weight.device)
            continue
        check_block_boundaries(shard, dtype)
        state[role] = _build_meta_tensor(weight, shard)
        zeros = torch.zeros(weight.numel(), device=weight.device)
        encoded[role] = encode_moment(zeros, dtype, is_unsigned=role in SECOND_MOMENTS)
    return OptimizerSlot(shard, weight, master, state, rates, encoded)


def _build_meta_tensor(weight: Tensor, shard: Shard) -> Tensor:
    return torch.empty(weight.shape, dtype=DTYPES[shard.wide_dtype], device="meta")


def round_master_weights(slots: Sequence[OptimizerSlot]) -> None:
    """Copy the master weights into the weights, where these have lower precision and are not part
    of the master weights."""
    low_precision = [slot for slot in slots if slot.has_master and MASTER not in slot.encoded]
    if low_precision:
        torch._foreach_copy_(
            [slot.weight for slot in low_precision], [slot.master for slot in low_precision]
        )


class SlotGroup(NamedTuple):
    """Slots with the same learning rate and weight decay."""

    slots: list[OptimizerSlot]
    gradients: list[Tensor]
    lr: float
    weight_decay: float


def group_by_rates(
    slots: Sequence[OptimizerSlot],
    gradients: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
) -> list[SlotGroup]:
    """Group slots and gradients by learning rate and weight decay; those with weight decay come
    first."""
    groups_of_slots = []
    for decays in (True, False):
        indices_by_rates: dict[ParameterRates, list[int]] = {}
        for number, slot in enumerate(slots):
            if (slot.shard.inputs > 0 or slot.rates.vector_decays) == decays:
                indices_by_rates.setdefault(slot.rates, []).append(number)
        for rates, indices in indices_by_rates.items():
            decay = groups[rates.decay_of].weight_decay if rates.decay_of else weight_decay
            groups_of_slots.append(
                SlotGroup(
                    [slots[i] for i in indices],
                    [gradients[i] for i in indices],
                    (groups[rates.lr_of].lr if rates.lr_of else lr) * rates.lr,
                    decay * rates.decay if decays else 0.0,
                )
            )
    return groups_of_slots


def find_first_replicas(shards: Iterable[Shard], mesh: Mesh) -> frozenset[str]:
    """Return the names of the shards of which this rank has the first replica."""
    return frozenset(shard.name for shard in shards if is_first_replica(shard, mesh.coordinates))

"""Fused collective matmul on torch's symmetric memory: matmuls that read the other GPUs' memory
directly.

The only module that uses torch's symmetric memory, a private interface. The ring exchange of
parallel/tensor_overlap.py is the reference: same arguments, and same results except for the order
of sums. The decomposition is that of Wang et al. 2023 (see there), with copies by the GPUs' copy
engines instead of messages.
"""

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from megalith.config.parallel import CollectiveMatmulName
from megalith.errors import ConfigError
from megalith.kernels.linear import PLAIN
from megalith.observe.machine import has_symmetric_memory
from megalith.parallel.group import Group, gather_objects, mark_finished, record_collective
from megalith.parallel.tensor_overlap import RING_EXCHANGE, CollectiveMatmul, Product

_log = logging.getLogger(__name__)

_MODULE = "torch.distributed._symmetric_memory"
_GPU = "cuda"  # lint: allow cuda-literal: the fused operators are CUDA's


def symm_mem_all_gather_matmul(
    x: Tensor, w: Tensor, group: Group, product: Product
) -> tuple[Tensor, Tensor]:
    """Return all tokens and their product with this rank's `w`: x [t / ranks, i] -> [t, i], [t,
    o]; around a ring if the matmul is not plain."""
    if not _is_plain(product):
        return RING_EXCHANGE.all_gather_matmul(x, w, group, product)
    entry = record_collective(group, "fused_all_gather_matmul", x)
    gathered_x, (y,) = _operators().fused_all_gather_matmul(
        x, [_right_factor(w, product)], 0, group.name, return_A=True
    )
    mark_finished(entry)
    return gathered_x, y


def symm_mem_matmul_reduce_scatter(x: Tensor, w: Tensor, group: Group, product: Product) -> Tensor:
    """Return the sum over ranks of their products, for this rank's tokens: x [t, i_tp], all tokens
    -> [t / ranks, o].

    Each product is rounded to the dtype of `x`, and their sum, taken in fp32 or better, is rounded
    once more. Around a ring if the matmul is not plain.
    """
    if not _is_plain(product):
        return RING_EXCHANGE.matmul_reduce_scatter(x, w, group, product)
    entry = record_collective(group, "fused_matmul_reduce_scatter", x)
    local_sum: Tensor = _operators().fused_matmul_reduce_scatter(
        x, _right_factor(w, product), "sum", 0, group.name
    )
    mark_finished(entry)
    return local_sum


FUSED = CollectiveMatmul(symm_mem_all_gather_matmul, symm_mem_matmul_reduce_scatter)


def _right_factor(w: Tensor, product: Product) -> Tensor:
    """Return B of `product(x, w) = x @ B`: the operators take matrices, not functions."""
    return w.t() if product == PLAIN.forward else w


def _is_plain(product: Product) -> bool:
    return product in (PLAIN.forward, PLAIN.input_grad)


def _operators() -> Any:  # operators that torch describes at run time
    import_module(_MODULE)  # defines the operators
    return torch.ops.symm_mem


# --- availability


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Device of one rank, as far as it determines whether fused collective matmul is available."""

    rank: int
    device: str
    """cpu, cuda."""

    host: str = ""
    gpu: int = 0
    reads: tuple[int, ...] = ()
    """GPUs of the same machine whose memory this rank's GPU can read."""

    has_operators: bool = True


def why_not_fused(places: Sequence[RankDevice]) -> str | None:
    """Return why a group cannot use fused collective matmul, or None if it can. Equal on all ranks,
    given all devices."""
    first = places[0]
    for place in places:
        if place.device != _GPU:
            return (
                f"rank {place.rank} computes on {place.device}, and fused matmuls need NVIDIA GPUs"
            )
        if not place.has_operators:
            return (
                f"the torch {torch.__version__} of rank {place.rank} has no symmetric memory "
                "for GPUs"
            )
        if place.host != first.host:
            return (
                f"rank {first.rank} is on {first.host} and rank {place.rank} on {place.host}, "
                f"and a GPU reads the memory of its own machine only"
            )
    for reader in places:
        for other in places:
            if reader.rank != other.rank and reader.gpu == other.gpu:
                return f"ranks {reader.rank} and {other.rank} both compute on GPU {reader.gpu}"
            if reader.gpu != other.gpu and other.gpu not in reader.reads:
                return (
                    f"GPU {reader.gpu} of {reader.host} cannot read the memory of GPU {other.gpu}"
                )
    return None


def choose_collective_matmul(
    name: CollectiveMatmulName, group: Group, device: torch.device
) -> CollectiveMatmul:
    """Select the collective matmul of `group` on `device`; all ranks of the group call this, with
    the same result.

    Raises:
        ConfigError: on every rank of the group: parallel.collective_matmul=fused is not available.
    """
    if name == "ring_exchange" or group.size == 1 or (name == "auto" and device.type != _GPU):
        return RING_EXCHANGE
    places = gather_objects(my_place(group.ranks[group.rank], device), group)
    reason = why_not_fused([place for place in places if isinstance(place, RankDevice)])
    if reason is not None and name == "fused":
        raise ConfigError(
            f"parallel.collective_matmul={name} is not available to ranks {list(group.ranks)}: "
            f"{reason}. Set parallel.collective_matmul to auto or ring_exchange."
        )
    if group.rank == 0:
        selected = "fused" if reason is None else f"ring_exchange, because {reason}"
        _log.info(
            "parallel.collective_matmul=%s: ranks %s use %s",
            name,
            list(group.ranks),
            selected,
        )
    if reason is not None:
        return RING_EXCHANGE
    _enable_symmetric_memory(group)
    return FUSED


def my_place(rank: int, device: torch.device) -> RankDevice:
    """Return the device of this process."""
    if device.type != _GPU:
        return RankDevice(rank, device.type)
    gpu = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != gpu)
    # Without this check the first matmul would kill the process on machines whose GPUs cannot
    # reach each other.
    reads = tuple(other for other in others if torch.cuda.can_device_access_peer(gpu, other))
    return RankDevice(rank, device.type, socket.gethostname(), gpu, reads, has_symmetric_memory())


def _enable_symmetric_memory(group: Group) -> None:
    """Enable symmetric memory for the group, in versions of torch that require it."""
    enable = getattr(import_module(_MODULE), "enable_symm_mem_for_group", None)
    # a version of torch that marks it as deprecated needs no call
    if enable is not None and not hasattr(enable, "__deprecated__"):
        enable(group.name)

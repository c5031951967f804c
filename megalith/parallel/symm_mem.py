"""Matmuls that torch fuses with the collective around them, reading the other GPUs' memory while
they multiply.

The only file of the product that knows torch's symmetric memory, whose interface is private. The
messages of parallel/rings.py are the reference: same arguments, and the same results but for the
order of sums. It is the decomposition of Wang et al. 2023 (see there), with copies by the GPUs'
copy engines instead of messages.
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
from megalith.kernels.linear import forward, input_grad
from megalith.observe.capabilities import has_symmetric_memory
from megalith.parallel.group import Group, finished, gather_objects, note
from megalith.parallel.rings import RING_EXCHANGE, CollectiveMatmul, Product

_log = logging.getLogger(__name__)

_MODULE = "torch.distributed._symmetric_memory"
_GPU = "cuda"  # lint: allow cuda-literal: the fused operators are CUDA's


def fused_gather_product(
    x: Tensor, w: Tensor, group: Group, product: Product
) -> tuple[Tensor, Tensor]:
    """All tokens, and their product with my `w`: x [t / ranks, i], my tokens -> [t, i], [t, o]."""
    entry = note(group, "fused_all_gather_matmul", x)
    whole, (y,) = _operators().fused_all_gather_matmul(
        x, [_factor(w, product)], 0, group.name, return_A=True
    )
    finished(entry)
    return whole, y


def fused_product_scatter(x: Tensor, w: Tensor, group: Group, product: Product) -> Tensor:
    """The sum over the ranks of their products, for my tokens: x [t, i_tp], all tokens -> [t /
    ranks, o].

    Each product is rounded to the dtype of `x`, and their sum, which is taken in fp32 or better,
    once more.
    """
    entry = note(group, "fused_matmul_reduce_scatter", x)
    mine: Tensor = _operators().fused_matmul_reduce_scatter(
        x, _factor(w, product), "sum", 0, group.name
    )
    finished(entry)
    return mine


FUSED = CollectiveMatmul(fused_gather_product, fused_product_scatter)


def _factor(w: Tensor, product: Product) -> Tensor:
    """B of `product(x, w) = x @ B`: the operators take matrices, not functions."""
    assert product in (forward, input_grad), f"{product} is no plain matmul"
    return w.t() if product is forward else w


def _operators() -> Any:  # operators that torch describes at run time
    import_module(_MODULE)  # it defines them
    return torch.ops.symm_mem


# --- whether they can serve


@dataclass(frozen=True, slots=True)
class RankDevice:
    """Where one rank computes, as far as it matters for reading the memory of others."""

    rank: int
    device: str
    """cpu, cuda."""

    host: str = ""
    gpu: int = 0
    reads: tuple[int, ...] = ()
    """GPUs of its machine whose memory its own can read."""

    has_operators: bool = True


def why_not_fused(places: Sequence[RankDevice]) -> str | None:
    """What keeps a group from fused products; None: nothing does. The same on every rank, given
    everyone's place."""
    first = places[0]
    for place in places:
        if place.device != _GPU:
            return (
                f"rank {place.rank} computes on {place.device}, and fused products need NVIDIA GPUs"
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
    for mine in places:
        for other in places:
            if mine.rank != other.rank and mine.gpu == other.gpu:
                return f"ranks {mine.rank} and {other.rank} both compute on GPU {mine.gpu}"
            if mine.gpu != other.gpu and other.gpu not in mine.reads:
                return f"GPU {mine.gpu} of {mine.host} cannot read the memory of GPU {other.gpu}"
    return None


def choose_collective_matmul(
    wanted: CollectiveMatmulName, group: Group, device: torch.device
) -> CollectiveMatmul:
    """How the rings of `group` multiply on `device`; every rank of the group calls this, and all
    get the same answer.

    Raises:
        ConfigError: on every rank of the group: fused products are asked for, and something keeps
        it from them.
    """
    if wanted == "ring_exchange" or group.size == 1 or (wanted == "auto" and device.type != _GPU):
        return RING_EXCHANGE
    places = gather_objects(my_place(group.ranks[group.rank], device), group)
    reason = why_not_fused([place for place in places if isinstance(place, RankDevice)])
    if reason is not None and wanted == "fused":
        raise ConfigError(
            f"parallel.collective_matmul={wanted} cannot serve the ranks {list(group.ranks)}: "
            f"{reason}. Set parallel.collective_matmul to auto or ring_exchange."
        )
    if group.rank == 0:
        found = "fused" if reason is None else f"ring_exchange, because {reason}"
        _log.info(
            "parallel.collective_matmul=%s: the rings of ranks %s use %s",
            wanted,
            list(group.ranks),
            found,
        )
    if reason is not None:
        return RING_EXCHANGE
    _introduce(group)
    return FUSED


def my_place(rank: int, device: torch.device) -> RankDevice:
    """Where this process computes."""
    if device.type != _GPU:
        return RankDevice(rank, device.type)
    gpu = torch.cuda.current_device() if device.index is None else device.index
    others = (other for other in range(torch.cuda.device_count()) if other != gpu)
    # Without this question the first product would end the process on machines whose GPUs cannot
    # reach each other.
    reads = tuple(other for other in others if torch.cuda.can_device_access_peer(gpu, other))
    return RankDevice(rank, device.type, socket.gethostname(), gpu, reads, has_symmetric_memory())


def _introduce(group: Group) -> None:
    """Tell symmetric memory of the group, where this torch does not find out by itself."""
    enable = getattr(import_module(_MODULE), "enable_symm_mem_for_group", None)
    if enable is not None and not hasattr(
        enable, "__deprecated__"
    ):  # a torch that marks it so needs no call
        enable(group.name)

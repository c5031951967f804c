"""Collective matmul: all-gather and reduce-scatter decomposed around a ring and overlapped with the
matmul.

Each rank starts the message of a step, multiplies the chunk that it holds, and then waits. n ranks
take n steps, all but one of which communicate. Source: Wang et al. 2023, "Overlap Communication
with Dependent Computation via Decomposition", ASPLOS.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.parallel import CollectiveMatmulName
from megalith.errors import ConfigError
from megalith.kernels.linear import (
    PLAIN,
    Context,
    GradAccumulator,
    MatmulOps,
    WeightMatmul,
    reference_linear,
    save,
    saved_input,
    stacked,
    weight_gradients,
)
from megalith.observe.flight import CollectiveRecord
from megalith.observe.machine import has_symmetric_memory
from megalith.parallel.group import (
    Group,
    gather_objects,
    mark_finished,
    mark_in_flight,
    mark_waiting,
    record_collective,
    start_all_gather,
)

_ops = torch.ops._c10d_functional

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [t, i], w) -> [t, o]: `forward` or `input_grad` of `MatmulOps`."""


class PendingCollective(NamedTuple):
    """Result of a collective that has been started."""

    x: Tensor
    entry: CollectiveRecord | None = None
    """Its flight record, for the report of a hang."""

    def wait(self) -> Tensor:
        """Wait for the tensor and return it."""
        mark_waiting(self.entry)
        y: Tensor = _ops.wait_tensor(self.x)
        mark_finished(self.entry)
        return y


def start_all_reduce(x: Tensor, group: Group) -> PendingCollective:
    """Start an all-reduce of `x` over the group."""
    entry = record_collective(group, "all_reduce", x)
    return PendingCollective(
        _ops.all_reduce(x.contiguous(), "sum", group.name), mark_in_flight(entry)
    )


def start_token_gather(x: Tensor, group: Group) -> PendingCollective:
    """Start an all-gather of equal parts [t, ...] -> [ranks * t, ...]."""
    entry = record_collective(group, "all_gather", x)
    return PendingCollective(start_all_gather(x.contiguous(), group), mark_in_flight(entry))


def start_reduce_scatter(x: Tensor, group: Group) -> PendingCollective:
    """Start a reduce-scatter of `x` [ranks * t, ...] -> this rank's part [t, ...]."""
    entry = record_collective(group, "reduce_scatter", x)
    return PendingCollective(
        _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name),
        mark_in_flight(entry),
    )


def start_ring_exchange(x: Tensor, group: Group) -> PendingCollective:
    """Start sending `x` [t, ...] to the next rank of the ring and receiving as much from the
    previous one.

    An all-to-all in which only neighbors exchange rows: it needs no order of sends and receives.
    """
    send, receive = [0] * group.size, [0] * group.size
    send[(group.rank + 1) % group.size] = receive[(group.rank - 1) % group.size] = x.shape[0]
    entry = record_collective(group, "all_to_all", x, rows=(send, receive))
    return PendingCollective(
        _ops.all_to_all_single(x.contiguous(), receive, send, group.name), mark_in_flight(entry)
    )


def ring_all_gather_matmul(
    x: Tensor, w: Tensor, group: Group, product: Product
) -> tuple[Tensor, Tensor]:
    """Return all tokens and their product with this rank's `w`: x [t / ranks, i] -> [t, i], [t, o].

    The parts go around the ring: one part is multiplied while the next one is received.
    """
    parts = [x] * group.size
    products = [x] * group.size
    owner, part = group.rank, x
    for step in range(group.size):
        received = start_ring_exchange(part, group) if step < group.size - 1 else None
        parts[owner], products[owner] = part, product(part, w)
        if received is not None:
            owner, part = (owner - 1) % group.size, received.wait()
    return torch.cat(parts), torch.cat(products)


def ring_matmul_reduce_scatter(x: Tensor, w: Tensor, group: Group, product: Product) -> Tensor:
    """Return the sum over ranks of their products, for this rank's tokens: x [t, i_tp], all tokens
    -> [t / ranks, o].

    Each partial sum goes around the ring to the rank that has its tokens; the next part is
    multiplied while it is in flight.
    """
    parts = x.chunk(group.size)
    in_flight: PendingCollective | None = None
    for step in range(group.size):
        partial_sum = product(parts[(group.rank - 1 - step) % group.size], w)
        if in_flight is not None:
            partial_sum = partial_sum.add_(in_flight.wait())
        if step < group.size - 1:
            in_flight = start_ring_exchange(partial_sum, group)
    return partial_sum


class CollectiveMatmul(NamedTuple):
    """Implementation of the two collective matmuls; it depends on the device, their results do
    not."""

    all_gather_matmul: Callable[[Tensor, Tensor, Group, Product], tuple[Tensor, Tensor]]
    """(x, w, group, product) -> all tokens, and their product: see `ring_all_gather_matmul`."""

    matmul_reduce_scatter: Callable[[Tensor, Tensor, Group, Product], Tensor]
    """(x, w, group, product) -> the sum of products, for this rank's tokens: see
    `ring_matmul_reduce_scatter`."""


RING_EXCHANGE = CollectiveMatmul(ring_all_gather_matmul, ring_matmul_reduce_scatter)
"""Messages around a ring, for any device and communication backend."""


# --- linear layers of tensor-parallel work whose communication is overlapped with their own matmuls
#
# Results are bitwise equal to `TPComm.prepare_input` or `reduce_output` composed with the matmul,
# except for collective matmuls, which add in another order.


class OverlappedTPComm(Protocol):
    """Communication of tensor-parallel work that is overlapped with matmuls."""

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks."""

    def prepare_input(self, x: Tensor) -> Tensor:
        """Input communication without a matmul."""

    def reduce_output(self, x: Tensor) -> Tensor:
        """Output communication without a matmul."""

    def all_gather_matmul(self, x: Tensor, w: Tensor, product: Product) -> tuple[Tensor, Tensor]:
        """Return all tokens [t, i], gathered from x, and their product [t, o] with `w`."""

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, product: Product) -> PendingCollective:
        """Start the sum over ranks of `product(x, w)`, for this rank's tokens; x has all tokens."""

    def start_regather(self, x: Tensor) -> PendingCollective:
        """Start gathering all tokens once more, in backward."""


def all_gather_linear(x: Tensor, matmul: WeightMatmul, tp_comm: OverlappedTPComm) -> Tensor:
    """Compute `matmul(tp_comm.prepare_input(x))` with overlapped communication.

    Backward gathers the tokens again during the matmul for dx, and reduces dx during the matmul for
    the weight gradients.
    """
    y: Tensor = AllGatherLinearFunction.apply(
        x, tp_comm, matmul.grad_accumulator, matmul.matmul_ops, *matmul.parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


def linear_reduce_scatter(x: Tensor, matmul: WeightMatmul, tp_comm: OverlappedTPComm) -> Tensor:
    """Compute `tp_comm.reduce_output(matmul(x))` with overlapped communication."""
    y: Tensor = LinearReduceScatterFunction.apply(
        x, tp_comm, matmul.grad_accumulator, matmul.matmul_ops, *matmul.parameters
    )  # type: ignore[no-untyped-call]  # torch's own
    return y


class AllGatherLinearFunction(Function):
    """Autograd function of `all_gather_linear`."""

    reference = staticmethod(
        lambda x, tp_comm, grad_accumulator, matmul_ops, *parameters: reference_linear(
            tp_comm.prepare_input(x), parameters
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        tp_comm: OverlappedTPComm,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i], in the layout of `tp_comm` -> y [t, o]."""
        save(ctx, x, parameters, ctx.needs_input_grad[4:])
        ctx.grad_accumulator, ctx.matmul_ops, ctx.tp_comm = grad_accumulator, matmul_ops, tp_comm
        return tp_comm.all_gather_matmul(x, stacked(parameters), matmul_ops.forward)[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx in the layout of `tp_comm`, and dw to the gradient accumulator or the
        parameters."""
        needs_dw = ctx.needs_input_grad[4:]
        saved = ctx.saved_tensors  # read once: a recomputed region returns them only once
        parameters, inputs = saved[: len(needs_dw)], saved[len(needs_dw) :]
        local_x = saved_input(ctx, needs_dw, inputs)
        tokens: PendingCollective | None = (
            None if local_x is None else ctx.tp_comm.start_regather(local_x)
        )
        dx: PendingCollective | None = None
        if ctx.needs_input_grad[0]:
            dx = ctx.tp_comm.matmul_reduce_scatter(
                dy, stacked(parameters), ctx.matmul_ops.input_grad
            )
        grads = weight_gradients(
            ctx, parameters, needs_dw, None if tokens is None else tokens.wait(), dy
        )
        return None if dx is None else dx.wait(), None, None, None, *grads


class LinearReduceScatterFunction(Function):
    """Autograd function of `linear_reduce_scatter`."""

    reference = staticmethod(
        lambda x, tp_comm, grad_accumulator, matmul_ops, *parameters: tp_comm.reduce_output(
            reference_linear(x, parameters)
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        tp_comm: OverlappedTPComm,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i_tp] -> y [t, o], in the layout of `tp_comm`."""
        save(ctx, x, parameters, ctx.needs_input_grad[4:])
        ctx.grad_accumulator, ctx.matmul_ops, ctx.tp_comm = grad_accumulator, matmul_ops, tp_comm
        return tp_comm.matmul_reduce_scatter(x, stacked(parameters), matmul_ops.forward).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy, in the layout of `tp_comm` -> dx [t, i_tp], and dw to the gradient accumulator or the
        parameters."""
        needs_dw, saved = ctx.needs_input_grad[4:], ctx.saved_tensors
        parameters, inputs = saved[: len(needs_dw)], saved[len(needs_dw) :]
        gathered_dy, dx = ctx.tp_comm.all_gather_matmul(
            dy, stacked(parameters), ctx.matmul_ops.input_grad
        )
        x = saved_input(ctx, needs_dw, inputs)
        return (
            dx,
            None,
            None,
            None,
            *weight_gradients(ctx, parameters, needs_dw, x, gathered_dy),
        )


# --- fused collective matmul on torch's symmetric memory: matmuls that read the other GPUs' memory
# directly
#
# Torch's symmetric memory, a private interface, is used here and in parallel/nvls.py. The ring
# exchange of parallel/tensor_overlap.py is the reference: same arguments, and same results except
# for the order of sums. The decomposition is that of Wang et al. 2023 (see there), with copies by
# the GPUs' copy engines instead of messages.

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


def find_fusion_obstacle(places: Sequence[RankDevice]) -> str | None:
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
    places = gather_objects(local_rank_device(group.ranks[group.rank], device), group)
    reason = find_fusion_obstacle([place for place in places if isinstance(place, RankDevice)])
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


def local_rank_device(rank: int, device: torch.device) -> RankDevice:
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

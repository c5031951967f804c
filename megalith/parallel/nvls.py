"""NVLS collectives of inference layers: NVLink multicast in torch's symmetric memory.

Every rank has a buffer, and all buffers of a group have one multicast address: the NVSwitch sends a
store there to all of them, and answers a load with the sum of their values. A message is thus sent
once, whatever the number of ranks, without the steps of a ring, which dominate the time of the
small messages of decode. The process group is the reference: same arguments, and same results
except for the order of sums. Source: Klenk et al. 2020, "An In-Network Architecture for
Accelerating Shared-Memory Multiprocessor Collectives", ISCA.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from megalith.config.serve import CollectivesName
from megalith.errors import ConfigError
from megalith.kernels.triton.launch import has_triton
from megalith.parallel.collectives import PROCESS_GROUP, Collectives
from megalith.parallel.group import Group, gather_objects, mark_finished, record_collective

_log = logging.getLogger(__name__)

_MODULE = "torch.distributed._symmetric_memory"
_GPU = "cuda"  # lint: allow cuda-literal: NVLink connects NVIDIA GPUs

OPERATORS = (
    "multimem_all_gather_out",
    "multimem_all_reduce_",
    "multimem_one_shot_all_reduce_out",
)
"""Operators of `torch.ops.symm_mem` that are used."""

ALIGNMENT = 16
"""Every rank's part of a message has a multiple of this many bytes."""

HALF_BYTES = 64 << 20
"""Largest message; the buffer has two halves. 4,096 tokens of 8,192 features in bf16."""

SUMMED_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes that the switch adds."""

ONE_SHOT_SIZES = tuple(1 << power for power in range(13, 22))
"""Bytes of the messages, 8 KiB to 2 MiB, with which the one-shot limit is measured."""

TIMED_CALLS = 20
"""Calls per measurement."""


# --- availability


@dataclass(frozen=True, slots=True)
class DeviceCapabilities:
    """What determines whether one rank can use NVLS collectives."""

    rank: int
    device: str
    """cpu, cuda."""

    gpu: int = 0
    compute_capability: tuple[int, int] = (0, 0)
    """Generation of the GPU."""

    multicast: bool = False
    """Whether GPU and driver support multicast addresses."""

    nvlink_domain: str = ""
    """Machine whose GPUs NVSwitches connect."""

    missing: str = ""
    """What this rank's installation lacks."""

    free_bytes: int = 0
    """Free memory of the GPU."""

    mapping_error: str = ""
    """Why its buffer has no multicast address; known after the attempt."""


def nvls_unavailable_reason(capabilities: Sequence[DeviceCapabilities], nbytes: int) -> str | None:
    """Return why a group cannot use NVLS collectives with buffers of `nbytes`, or None if it can.
    Equal on all ranks, given all capabilities."""
    for each in capabilities:
        if (problem := _device_problem(each, nbytes)) is not None:
            return problem
    first = capabilities[0]
    gpus: dict[int, int] = {}
    for each in capabilities:
        if each.nvlink_domain != first.nvlink_domain:
            return (
                f"rank {first.rank} is on {first.nvlink_domain} and rank {each.rank} on "
                f"{each.nvlink_domain}, and NVLink multicast needs one machine"
            )
        if (other := gpus.setdefault(each.gpu, each.rank)) != each.rank:
            return f"ranks {other} and {each.rank} both compute on GPU {each.gpu}"
    for each in capabilities:
        if each.mapping_error:
            return f"rank {each.rank} has no multicast address: {each.mapping_error}"
    return None


def _device_problem(each: DeviceCapabilities, nbytes: int) -> str | None:
    """Return why one rank cannot use NVLS collectives, whatever the others have."""
    if each.device != _GPU:
        return f"rank {each.rank} computes on {each.device}, and NVLS needs NVIDIA GPUs"
    if each.missing:
        return f"rank {each.rank} has no {each.missing}"
    if each.compute_capability < (9, 0):
        major, minor = each.compute_capability
        return (
            f"the GPU of rank {each.rank} has compute capability {major}.{minor}, and NVLS needs "
            "9.0 (Hopper) or later"
        )
    if not each.multicast:
        return f"GPU or driver of rank {each.rank} do not support multicast, which needs NVSwitches"
    if each.free_bytes < nbytes:
        return (
            f"the GPU of rank {each.rank} has {each.free_bytes} free bytes, and the buffer takes "
            f"{nbytes}"
        )
    return None


def local_capabilities(rank: int, device: torch.device) -> DeviceCapabilities:
    """Return the capabilities of this process."""
    if device.type != _GPU:
        return DeviceCapabilities(rank, device.type)
    gpu = torch.cuda.current_device() if device.index is None else device.index
    missing = find_missing()
    return DeviceCapabilities(
        rank,
        device.type,
        gpu,
        torch.cuda.get_device_capability(gpu),
        not missing and _has_multicast(gpu),
        socket.gethostname(),
        missing,
        torch.cuda.mem_get_info(gpu)[0],
    )


def find_missing() -> str:
    """Return the first thing that the installation lacks; empty if it is complete."""
    if not has_triton():
        return "Triton"
    if find_spec(_MODULE) is None:
        return f"{_MODULE} in torch {torch.__version__}"
    operators = _operators()
    unknown = [name for name in OPERATORS if not hasattr(operators, name)]
    return f"torch.ops.symm_mem.{unknown[0]} in torch {torch.__version__}" if unknown else ""


def _operators() -> Any:  # operators that torch describes at run time
    import_module(_MODULE)  # defines the operators
    return torch.ops.symm_mem


def _has_multicast(gpu: int) -> bool:
    module = import_module(_MODULE)
    return bool(module._SymmetricMemory.has_multicast_support(module.DeviceType.CUDA, gpu))


def choose_collectives(name: CollectivesName, group: Group, device: torch.device) -> Collectives:
    """Select the collectives of `group` on `device`; all ranks of the group call this, with the
    same result.

    Raises:
        ConfigError: on every rank of the group: parallel.collectives=nvls is not available.
    """
    if name == "process_group" or group.size == 1:
        return PROCESS_GROUP
    capabilities = local_capabilities(group.ranks[group.rank], device)
    reason, buffer = _find_group_reason(capabilities, group), None
    if reason is None:
        buffer, mapping_error = _try_to_allocate(group, device)
        reason = _find_group_reason(replace(capabilities, mapping_error=mapping_error), group)
    if reason is not None and name == "nvls":
        raise ConfigError(
            f"parallel.collectives=nvls is not available to ranks {list(group.ranks)}: {reason}. "
            "Set parallel.collectives to auto or process_group."
        )
    if group.rank == 0:
        selected = "nvls" if reason is None else f"process_group, because {reason}"
        _log.info("parallel.collectives=%s: ranks %s use %s", name, list(group.ranks), selected)
    if reason is not None or buffer is None:
        return PROCESS_GROUP
    nvls = NvlsCollectives(group, buffer)
    nvls.one_shot_limit = measure_one_shot_limit(nvls, device)
    return nvls.collectives


def _find_group_reason(capabilities: DeviceCapabilities, group: Group) -> str | None:
    """Return the reason of `nvls_unavailable_reason` for the whole group. Collective."""
    gathered = gather_objects(capabilities, group)
    known = [each for each in gathered if isinstance(each, DeviceCapabilities)]
    return nvls_unavailable_reason(known, 2 * HALF_BYTES)


# --- collectives


@dataclass(frozen=True, slots=True)
class MulticastBuffer:
    """Symmetric memory of one rank, with the multicast address of all ranks' memories."""

    memory: Tensor
    """uint8: this rank's memory."""

    multicast_address: int
    """Where a store goes to all ranks' memories, and a load returns the sum of their values."""

    barrier: Callable[[], None]
    """Lets work that is queued later on this GPU start when all ranks have done the work that they
    had queued before the barrier."""


def allocate_multicast_buffer(
    group: Group, device: torch.device, nbytes: int
) -> MulticastBuffer | None:
    """Allocate symmetric memory; None if it has no multicast address. Collective."""
    module = import_module(_MODULE)
    memory: Tensor = module.empty(nbytes, dtype=torch.uint8, device=device)
    handle = module.rendezvous(memory, group.name)
    address = int(handle.multicast_ptr)
    return MulticastBuffer(memory, address, handle.barrier) if address else None


def _try_to_allocate(group: Group, device: torch.device) -> tuple[MulticastBuffer | None, str]:
    """Return the buffer, or None and why there is none."""
    try:
        buffer = allocate_multicast_buffer(group, device, 2 * HALF_BYTES)
    except RuntimeError as error:  # gathered, so that all ranks use the process group
        return None, str(error).splitlines()[0]
    return buffer, "" if buffer is not None else "symmetric memory was mapped without multicast"


class NvlsCollectives:
    """Collectives of one group over multicast.

    Calls alternate between the halves of the buffer. A rank writes to a half again two calls later,
    after the barrier of the call between, which every rank reaches only when it has read the half;
    so one barrier per call suffices. A replayed graph always uses the halves of its capture, so
    steps start with the first half: `reset_buffers` adds a barrier after an odd number of calls.
    Messages that do not fit use the process group; the decision depends on shape and dtype alone,
    which all ranks have in common.
    """

    def __init__(self, group: Group, buffer: MulticastBuffer, one_shot_limit: int = 0) -> None:
        """`one_shot_limit`: bytes up to which every rank loads a whole sum, instead of the sum of
        its part."""
        self.group, self.buffer, self.one_shot_limit = group, buffer, one_shot_limit
        self.half_bytes = buffer.memory.numel() // 2
        self.process_group_calls: Counter[str] = Counter()
        """Calls that used the process group, by reason."""
        self._num_calls = 0

    @property
    def collectives(self) -> Collectives:
        """The functions that layers call."""
        return Collectives(
            self.all_gather, self.reduce_scatter, self.all_reduce, self.reset_buffers
        )

    def reset_buffers(self) -> None:
        """Let the next call use the first half; waits for the ranks that read it, if the last call
        used it."""
        if self._num_calls % 2:
            self.buffer.barrier()
            self._num_calls += 1

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Concatenate the ranks' equal parts: x [t, ...] -> [ranks * t, ...]."""
        problem = find_message_problem(x, x.nbytes, x.nbytes * group.size, self.half_bytes)
        if not self._can_send("all-gather", group, problem):
            return PROCESS_GROUP.all_gather(x, group)
        entry = record_collective(group, "nvls_all_gather", x)
        gathered, _ = self._next_half(x, (group.size * x.shape[0], *x.shape[1:]))
        _operators().multimem_all_gather_out(_align(x), group.name, gathered)
        y = gathered.clone()
        mark_finished(entry)
        return y

    def reduce_scatter(self, x: Tensor, group: Group) -> Tensor:
        """Sum over ranks and keep this rank's equal part: x [ranks * t, ...] -> [t, ...]."""
        problem = find_sum_problem(x, group.size, self.half_bytes)
        if not self._can_send("reduce-scatter", group, problem):
            return PROCESS_GROUP.reduce_scatter(x, group)
        # Triton is imported where it is used.
        from megalith.kernels.triton.multicast import sum_multicast

        entry = record_collective(group, "nvls_reduce_scatter", x)
        half, address = self._next_half(x, x.shape)
        half.copy_(x)
        self.buffer.barrier()
        y = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
        sum_multicast(address + group.rank * y.nbytes, y)
        mark_finished(entry)
        return y

    def all_reduce(self, x: Tensor, group: Group) -> Tensor:
        """Sum over ranks: x -> the sum, on every rank."""
        problem = find_sum_problem(x, 1, self.half_bytes)
        if not self._can_send("all-reduce", group, problem):
            return PROCESS_GROUP.all_reduce(x, group)
        entry = record_collective(group, "nvls_all_reduce", x)
        y = self._all_reduce(x, one_shot=x.nbytes <= self.one_shot_limit)
        mark_finished(entry)
        return y

    def _all_reduce(self, x: Tensor, *, one_shot: bool) -> Tensor:
        half, _ = self._next_half(x, x.shape)
        half.copy_(x)
        if not one_shot:
            _operators().multimem_all_reduce_(half, "sum", self.group.name)
            return half.clone()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _operators().multimem_one_shot_all_reduce_out(half, "sum", self.group.name, y)
        return y

    def _next_half(self, x: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
        """Return a tensor of the dtype of x in the current half, and its multicast address."""
        offset = (self._num_calls % 2) * self.half_bytes
        self._num_calls += 1
        nbytes = torch.Size(shape).numel() * x.element_size()
        view = self.buffer.memory[offset : offset + nbytes].view(x.dtype).view(*shape)
        return view, self.buffer.multicast_address + offset

    def _can_send(self, name: str, group: Group, problem: str | None) -> bool:
        """Return whether a message can be sent over multicast; count it if not."""
        assert group == self.group, "collectives are those of one group"
        if problem is None:
            return True
        reason = f"{name}: {problem}"
        if not self.process_group_calls[reason] and group.rank == 0:
            _log.info("parallel.collectives: messages of %s use the process group", reason)
        self.process_group_calls[reason] += 1
        return False


def find_message_problem(x: Tensor, part: int, total: int, half_bytes: int) -> str | None:
    """Return why a message of parts of `part` bytes, together `total`, cannot be sent over
    multicast; None if it can. Depends only on what is equal on all ranks."""
    if x.requires_grad and torch.is_grad_enabled():
        return "a gradient is needed"
    if part == 0 or part % ALIGNMENT:
        return f"parts are empty or no multiple of {ALIGNMENT} bytes"
    if total > half_bytes:
        return f"more than {half_bytes} bytes"
    return None


def find_sum_problem(x: Tensor, parts: int, half_bytes: int) -> str | None:
    """Return why x, of `parts` equal parts, cannot be summed over multicast; None if it can."""
    if x.dtype not in SUMMED_DTYPES:
        return f"the switch does not add {x.dtype}"
    if x.shape[0] % parts:
        return f"rows do not divide by {parts}"
    return find_message_problem(x, x.nbytes // parts, x.nbytes, half_bytes)


def _align(x: Tensor) -> Tensor:
    """Return x, contiguous and at an address that is a multiple of the alignment."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


# --- one-shot limit


def measure_one_shot_limit(nvls: NvlsCollectives, device: torch.device) -> int:
    """Measure both all-reduces and return the one-shot limit of the group. Collective."""
    times: dict[int, tuple[float, float]] = {}
    for nbytes in ONE_SHOT_SIZES:
        x = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
        times[nbytes] = (
            _time_all_reduce(nvls, x, one_shot=True),
            _time_all_reduce(nvls, x, one_shot=False),
        )
    gathered = gather_objects(times, nvls.group)
    return find_one_shot_limit([each for each in gathered if isinstance(each, dict)])


def _time_all_reduce(nvls: NvlsCollectives, x: Tensor, *, one_shot: bool) -> float:
    """Return the milliseconds of several calls, after as many without a clock."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for clock in (None, start):
        if clock is not None:
            clock.record()
        for _ in range(TIMED_CALLS):
            nvls._all_reduce(x, one_shot=one_shot)
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def find_one_shot_limit(times: Sequence[Mapping[int, tuple[float, float]]]) -> int:
    """Return the largest message up to which one shot is the faster of (one shot, two shots) on the
    slowest rank; 0 if there is none. Equal on all ranks, given all times.

    >>> find_one_shot_limit([{8: (1.0, 2.0), 16: (2.0, 2.5)}, {8: (1.5, 1.8), 16: (3.0, 2.5)}])
    8
    """
    limit = 0
    for nbytes in sorted(times[0]):
        one, two = (max(each[nbytes][index] for each in times) for index in range(2))
        if one > two:
            break
        limit = nbytes
    return limit

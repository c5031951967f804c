"""Multicast without GPUs: the buffers of all ranks are rows of one tensor, which their processes or
threads share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.parallel import nvls
from megalith.parallel.group import Group
from megalith.parallel.nvls import DeviceCapabilities, MulticastBuffer

ADDRESS = 1 << 40
"""Multicast address of the first byte of the buffers."""


class SimulatedMulticast:
    """One rank's view of the buffers: the operators of `torch.ops.symm_mem` and our kernel, with
    the arguments of those on GPUs."""

    def __init__(self, parts: Tensor, rank: int, barrier: Callable[[], None]) -> None:
        """`parts`: uint8 [ranks, bytes]."""
        self.parts, self.rank, self.barrier = parts, rank, barrier
        self.buffer = MulticastBuffer(parts[rank], ADDRESS, barrier)

    def peers(self, local: Tensor) -> Tensor:
        """What all ranks have at the place of `local`, which lies in this rank's buffer."""
        start = local.data_ptr() - self.parts[self.rank].data_ptr()
        assert 0 <= start <= start + local.nbytes <= self.parts.shape[1]
        values = self.parts[:, start : start + local.nbytes].view(local.dtype)
        return values.view(len(self.parts), *local.shape)

    def multimem_all_gather_out(self, x: Tensor, name: str, out: Tensor) -> Tensor:
        """Store x in its rows of `out`, on all ranks."""
        assert x.is_contiguous() and x.data_ptr() % 16 == 0
        self.barrier()
        rows = slice(self.rank * x.shape[0], (self.rank + 1) * x.shape[0])
        self.peers(out)[:, rows] = x
        self.barrier()
        return out

    def multimem_one_shot_all_reduce_out(
        self, x: Tensor, op: str, name: str, out: Tensor
    ) -> Tensor:
        """Load the sum over ranks of x."""
        assert op == "sum"
        self.barrier()
        out.copy_(self.peers(x).double().sum(0))
        self.barrier()
        return out

    def multimem_all_reduce_(self, x: Tensor, op: str, name: str) -> Tensor:
        """Load the sum over ranks of a part of x, and store it on all ranks."""
        assert op == "sum"
        self.barrier()
        chunks = self.peers(x).view(len(self.parts), -1).tensor_split(len(self.parts), dim=1)
        chunks[self.rank][:] = chunks[self.rank].double().sum(0)
        self.barrier()
        return x

    def sum_multicast(self, multicast_address: int, out: Tensor) -> None:
        """Stand in for the kernel, whose own test runs it in the interpreter."""
        start = multicast_address - ADDRESS
        values = self.parts[:, start : start + out.nbytes].view(out.dtype)
        out.copy_(values.double().sum(0).view(out.shape))


def map_parts(path: Path, ranks: int, nbytes: int) -> Tensor:
    """Map the buffers of all ranks from a file."""
    mapped = torch.from_file(str(path), shared=True, size=ranks * nbytes, dtype=torch.uint8)
    return mapped.view(ranks, nbytes)


@contextmanager
def simulate_multicast(group: Group, path: Path, nbytes: int) -> Iterator[SimulatedMulticast]:
    """Let this process use NVLS collectives on CPUs, with buffers of `nbytes`.

    The operators are defined for CPUs under their own names, so that torch checks the arguments.
    """
    simulated = SimulatedMulticast(
        map_parts(path, group.size, nbytes), group.rank, lambda: dist.barrier(group=group.handle)
    )
    with (
        torch.library._scoped_library("symm_mem", "FRAGMENT") as library,
        patch.object(nvls, "_device_problem", lambda capabilities, nbytes: None),
        patch.object(
            nvls,
            "local_capabilities",
            lambda rank, device: DeviceCapabilities(rank, device.type, gpu=rank),
        ),
        patch.object(nvls, "allocate_multicast_buffer", lambda *arguments: simulated.buffer),
        patch.object(nvls, "measure_one_shot_limit", lambda *arguments: 256),
        patch("megalith.kernels.triton.multicast.sum_multicast", simulated.sum_multicast),
    ):
        for name in nvls.OPERATORS:
            library.impl(name, getattr(simulated, name), "CPU")
        yield simulated

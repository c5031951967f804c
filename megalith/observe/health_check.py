"""Health check of a device: matrix products with known bits, memory patterns, and the speed of
products and copies, in less than two seconds."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megalith.observe.limits import read_host_name
from megalith.plan.device_health import DeviceHealth

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class CheckSizes:
    """Sizes of the operations of a health check."""

    product: int
    """Rows and columns of the products."""

    pattern_nbytes: int
    """Block of memory that patterns are written to."""

    copy_nbytes: int
    """Block whose copy is timed."""


CPU_SIZES = CheckSizes(192, 8 * 2**20, 16 * 2**20)
"""0.2 s together (measured: one CPU core, torch 2.13)."""

ACCELERATOR_SIZES = CheckSizes(4096, 2**30, 2**28)
"""Heuristic: a product fills a GPU, and takes a few milliseconds."""

EXACT_SIZE = 128
"""Rows and columns of a product whose sums are exact in every dtype: terms of -1, 0 and 1."""

CHUNK = 251 * 2**14
"""Bytes of a product that are summed at a time, so that the sum needs little memory."""

PATTERNS = 0x55, 0xAA, 0x00, 0xFF
"""Bytes written to the memory block: each bit is set and cleared, next to equal and other bits."""

NUM_TIMED = 3
"""Repetitions of a timed operation, of which the fastest counts."""


def check_device(device: torch.device, dtypes: Sequence[torch.dtype]) -> DeviceHealth:
    """Run the health check of this rank's device; products for which it has no free memory are left
    out. dtypes: those of the run's products."""
    bits: dict[str, int] = {}
    errors: list[str] = []
    speeds: dict[str, float] = {}
    sizes = CPU_SIZES if device.type == CPU else ACCELERATOR_SIZES
    size = sizes.product
    for dtype in dict.fromkeys(dtypes):
        name = f"matmul {str(dtype).removeprefix('torch.')}"
        try:
            left, right = (fill_fixed(size, shift, dtype, device) for shift in (0, 1))
            bits[name] = sum_product_bits(left, right)
            seconds = time_operation(partial(torch.matmul, left, right), device)
            is_right = is_exact(dtype, device)
        except torch.OutOfMemoryError:
            bits.pop(name, None)
            continue
        speeds[name] = 2 * size**3 / seconds / 1e9
        if not is_right:
            errors.append(f"{name} of whole numbers is wrong")
    errors += check_memory(sizes.pattern_nbytes, device)
    speeds["memory copy"] = measure_copy(sizes.copy_nbytes, device)
    return DeviceHealth(read_host_name(), describe_device_type(device), bits, tuple(errors), speeds)


def describe_device_type(device: torch.device) -> str:
    """Describe the properties on which the bits of results depend: the model of the device, on a
    CPU also the number of threads, and the version of torch."""
    if device.type == CPU:
        name = f"{_read_cpu_model()}, {torch.get_num_threads()} threads"
    else:
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"


def _read_cpu_model() -> str:
    """Return the model of the CPU, as the operating system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def fill_fixed(size: int, shift: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed values [size, size] between -1 and 1 that use all bits of the mantissa."""
    numbers = torch.arange(size * size, dtype=torch.int64) + 1
    # Multiplicative hashing with the golden ratio: Knuth, The Art of Computer Programming, 6.4.
    hashed = (numbers * 2654435761 + shift * 40503) % 2**32
    values = hashed.double() / 2**31 - 1
    return values.view(size, size).to(device, dtype)


def sum_product_bits(left: Tensor, right: Tensor) -> int:
    """Return the sum over the bytes of a matrix product, each byte weighted by its place modulo
    251, so that two flipped bits do not cancel."""
    product = (left @ right).contiguous().view(-1).view(torch.uint8)
    weights = torch.arange(CHUNK, device=product.device) % 251 + 1
    sums = [(part.long() * weights[: part.numel()]).sum() for part in product.split(CHUNK)]
    return int(torch.stack(sums).sum())


def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a product of whole numbers, whose sums are exact in every dtype, is right."""
    numbers = torch.arange(EXACT_SIZE * EXACT_SIZE, dtype=torch.int64)
    left = ((numbers * 7919) % 3 - 1).view(EXACT_SIZE, EXACT_SIZE)
    right = ((numbers * 104729 + 1) % 3 - 1).view(EXACT_SIZE, EXACT_SIZE).t().contiguous()
    expected = left @ right
    product = left.to(device, dtype) @ right.to(device, dtype)
    return torch.equal(product.cpu().long(), expected)


def check_memory(nbytes: int, device: torch.device) -> list[str]:
    """Write patterns to a block of free memory and read them; return the errors. A block that
    cannot be allocated is not tested."""
    try:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:
        return []
    errors = []
    for pattern in PATTERNS:
        block.fill_(pattern)
        if num_wrong := count_wrong_bytes(block, pattern):
            errors.append(f"memory pattern 0x{pattern:02x}: {num_wrong} of {nbytes} bytes changed")
    del block
    if device.type != CPU:
        torch.cuda.empty_cache()  # the block is returned to the device
    return errors


def count_wrong_bytes(block: Tensor, pattern: int) -> int:
    """Return how many bytes of a block differ from the pattern written to it."""
    return int((block != pattern).sum())


def measure_copy(nbytes: int, device: torch.device) -> float:
    """Return the speed of a copy within the device's memory, in GB/s."""
    try:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
    except RuntimeError:  # no free memory
        return 0.0
    return nbytes / time_operation(lambda: target.copy_(source), device) / 1e9


def time_operation(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs, after one that is not timed."""
    seconds = []
    for _ in range(NUM_TIMED + 1):
        started = time.perf_counter()
        run()
        if device.type != CPU:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return max(min(seconds[1:]), 1e-9)

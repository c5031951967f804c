"""Limits of small-batch matmuls: up to how many rows the compiled kernel is faster than torch on
this machine, measured once and cached in the user's cache folder; on GPUs also the fastest tile
size of the Triton kernel."""

import hashlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.kernels import linear
from megalith.kernels.linear_small_batch import (
    MAX_MEASURED_ROWS,
    NO_ROW_COUNTS,
    SmallBatchLimits,
    can_use,
    small_batch_linear,
)

KERNEL_VERSION = 1
"""Part of the cache key; increased when the speed of the kernel changes."""

MEASURED_ROWS = (1, 2, 4, 8, 16, MAX_MEASURED_ROWS)
MEASURED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
TILE_ROWS = 8
"""Number of rows for which tile sizes are compared."""

NUM_TILES = 4
"""Number of `TILES` of kernels/triton/small_batch.py."""

MAX_MEASURED_SHAPES = 2
"""Number of weight shapes that are measured: those with the most weights dominate."""

DEFAULT_SECONDS = 0.3

CPU = torch.device("cpu")


class DeviceSizes(NamedTuple):
    """Sizes of measurements on a kind of device."""

    shapes: tuple[tuple[int, int], ...]
    """Weight shapes [o, i] that are measured by default."""

    max_weights: int
    """Of larger matrices the first outputs are measured, which take the same time per weight."""

    weight_bytes: int
    """Bytes of weights of each dtype, read in turn, so that they are not in the core's own cache or
    in that of a GPU."""

    calls: int
    """Calls per measurement: on a GPU they are asynchronous, and several hide the launch."""


CPU_SIZES = DeviceSizes(((1024, 1024), (4096, 1024)), 1 << 20, 1 << 24, 1)
GPU_SIZES = DeviceSizes(((4096, 4096), (14336, 4096)), 1 << 26, 1 << 28, 10)


def load_or_measure_limits(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    folder: Path | None = None,
    device: torch.device = CPU,
) -> SmallBatchLimits:
    """Return the cached limits of this machine for weights of these shapes [o, i], or measure them.

    The cache key contains the CPU model and the number of threads, or the GPU, the versions of
    torch and of the compiler, and the shapes. Concurrent processes agree on the limits of the one
    that finishes first. A file that cannot be read is measured anew; a folder that cannot be
    written is not an error. `shapes`: unset: those of `DeviceSizes`; `folder`: unset:
    `user_cache_folder`.
    """
    if device.type != "cpu" and not _is_supported(device):
        return NO_ROW_COUNTS
    shapes = _sizes(device).shapes if shapes is None else shapes
    path = (folder or user_cache_folder()) / f"small_batch_{_cache_key(shapes, device)}.json"
    cached = _read_limits(path)
    if cached is not None:
        return cached
    limits = measure_limits(shapes, device=device)
    return _store_limits(path, limits)


def _sizes(device: torch.device) -> DeviceSizes:
    return CPU_SIZES if device.type == "cpu" else GPU_SIZES


def _is_supported(device: torch.device) -> bool:
    x = torch.empty(1, 1, device=device)
    return can_use(x, x)


def user_cache_folder() -> Path:
    """Return the folder for cached measurements of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megalith"


def describe_limits(limits: SmallBatchLimits) -> str:
    """Describe the limits in one line."""
    rows_by_dtype = {"fp32": limits.fp32, "bf16": limits.bf16, "int8": limits.int8}
    rows_by_dtype |= {"fp16": limits.fp16} if limits.fp16 else {}
    parts = [
        f"{name} {'never' if rows == 0 else f'up to {rows} rows'}"
        for name, rows in rows_by_dtype.items()
    ]
    return f"small-batch matmul kernel: {', '.join(parts)}"


def measure_limits(
    shapes: Sequence[tuple[int, int]] | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    device: torch.device = CPU,
) -> SmallBatchLimits:
    """Measure up to how many rows the kernel is faster than torch, by dtype of the weights.

    `seconds`: limit of the measurement, without the compilation of the kernel on its first use; on
    GPUs of each tile size, too. The limit of a dtype is the one with the smallest geometric mean of
    times over the measured row counts, so one disturbed measurement rarely changes it.
    """
    if not _is_supported(device):
        return NO_ROW_COUNTS
    sizes = _sizes(device)
    clipped = {
        (max(1, min(o, sizes.max_weights // i)), i)
        for o, i in (sizes.shapes if shapes is None else shapes)
    }
    largest = sorted(clipped, key=math.prod, reverse=True)[:MAX_MEASURED_SHAPES]
    dtypes = dict(MEASURED_DTYPES)
    tile = 0
    if device.type != "cpu":
        dtypes["fp16"] = torch.float16
        tile = choose_tile(largest, seconds, device)
    each = seconds / len(dtypes)
    return SmallBatchLimits(
        **{
            name: _measure_limit(dtype, largest, each, device, tile)
            for name, dtype in dtypes.items()
        },
        tile=tile,
    )


def choose_tile(shapes: Sequence[tuple[int, int]], seconds: float, device: torch.device) -> int:
    """Return the index of the tile size with the smallest sum of times over the shapes, in bf16."""
    times = []
    for tile in range(NUM_TILES):
        total = 0.0
        for shape in shapes:
            weights = _build_weights(shape, torch.bfloat16, device)
            pair = _MatmulPair(TILE_ROWS, weights, tile)
            pair.kernel(weights[0])  # compiles the kernel
            total += pair.measure(seconds / NUM_TILES / len(shapes))[0]
        times.append(total)
    return times.index(min(times))


def _measure_limit(
    dtype: torch.dtype,
    shapes: Sequence[tuple[int, int]],
    seconds: float,
    device: torch.device,
    tile: int,
) -> int:
    if device.type == "cpu":  # compiles the kernel
        _MatmulPair(1, [torch.ones(1, 8, dtype=dtype)], 0).measure(0.0)
    stop = time.perf_counter() + seconds
    weights = {shape: _build_weights(shape, dtype, device) for shape in shapes}
    if device.type != "cpu":
        for matrices, rows in itertools.product(weights.values(), MEASURED_ROWS):
            _MatmulPair(rows, matrices, tile).measure(0.0)
        stop = time.perf_counter() + seconds
    speedups, measured = dict[int, float](), (stop - time.perf_counter()) / len(MEASURED_ROWS)
    for rows in MEASURED_ROWS:
        kernel = reference = 0.0
        for matrices in weights.values():
            times = _MatmulPair(rows, matrices, tile).measure(measured / len(shapes))
            kernel, reference = kernel + times[0], reference + times[1]
        speedups[rows] = math.log(reference / kernel)
    return choose_limit(speedups)


def choose_limit(speedups: dict[int, float]) -> int:
    """Return the limit with the largest sum of log speedups of the row counts up to it; 0: none is
    positive. `speedups`: by row count, ascending.

    >>> choose_limit({1: -0.1, 4: 0.9, 8: 0.6, 16: -0.2})
    8
    """
    total, best, limit = 0.0, 0.0, 0
    for rows, speedup in speedups.items():
        total += speedup
        if total > best:
            best, limit = total, rows
    return limit


def _build_weights(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    largest = _sizes(device).weight_bytes // (math.prod(shape) * dtype.itemsize)
    return list(torch.ones(max(1, min(16, largest)), *shape, dtype=dtype, device=device))


class _MatmulPair:
    """The kernel and torch, which multiply the same operands."""

    def __init__(self, rows: int, weights: Sequence[Tensor], tile: int) -> None:
        w = weights[0]
        x_dtype = w.dtype
        if w.dtype == torch.int8:
            x_dtype = torch.float32 if w.device.type == "cpu" else torch.bfloat16
        self._x = torch.ones(rows, w.shape[1], dtype=x_dtype, device=w.device)
        self._scales = torch.ones(w.shape[0], device=w.device) if w.dtype == torch.int8 else None
        self._weights, self._tile = weights, tile
        self._num_calls = _sizes(w.device).calls

    def kernel(self, w: Tensor) -> Tensor:
        """Multiply by the kernel."""
        return small_batch_linear(self._x, w, self._scales, tile=self._tile)

    def torch(self, w: Tensor) -> Tensor:
        """Multiply by torch."""
        y = linear.torch_forward(self._x, w.to(self._x.dtype))
        return y if self._scales is None else y * self._scales

    def measure(self, seconds: float) -> tuple[float, float]:
        """Return the shortest times of the kernel and of torch, measured in turns, at least
        once."""
        contenders: tuple[Callable[[Tensor], Tensor], ...] = (self.kernel, self.torch)
        shortest, number = [math.inf, math.inf], 0
        stop = time.perf_counter() + seconds
        while number < 1 or time.perf_counter() < stop:
            for k, contender in enumerate(contenders):
                first = (2 * number + k) * self._num_calls
                shortest[k] = min(shortest[k], self._time(contender, first))
            number += 1
        return shortest[0], shortest[1]

    def _time(self, contender: Callable[[Tensor], Tensor], first: int) -> float:
        device = self._x.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for call in range(first, first + self._num_calls):
            contender(self._weights[call % len(self._weights)])
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return (time.perf_counter() - start) / self._num_calls


def _cache_key(shapes: Sequence[tuple[int, int]], device: torch.device) -> str:
    parts = [KERNEL_VERSION, *_machine_parts(device), torch.__version__, sorted(set(shapes))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _machine_parts(device: torch.device) -> list[object]:
    """Return what the speed of a device and its kernel depends on."""
    if device.type == "cpu":
        return [_cpu_model(), torch.get_num_threads(), version("numba")]
    module = torch.get_device_module(device)
    return [module.get_device_name(device), version("triton")]


def _cpu_model() -> str:
    import llvmlite.binding  # comes with numba, which takes long to import

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line for line in lines if line.startswith(("model name", "CPU part"))]
    features = llvmlite.binding.get_host_cpu_features().flatten()
    return f"{names[:1]} {llvmlite.binding.get_host_cpu_name()} {features}"


def _read_limits(path: Path) -> SmallBatchLimits | None:
    try:
        values = json.loads(path.read_text())
        limits = SmallBatchLimits(**values)
    except (OSError, ValueError, TypeError):  # missing, damaged, or of another version
        return None
    valid = all(
        type(rows) is int and 0 <= rows <= MAX_MEASURED_ROWS for rows in asdict(limits).values()
    )
    valid = valid and limits.tile < NUM_TILES
    return limits if valid else None


def _store_limits(path: Path, limits: SmallBatchLimits) -> SmallBatchLimits:
    """Store the limits unless another process has stored its own; return those stored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp") as file:
            json.dump(asdict(limits), file)
            file.flush()
            try:
                os.link(file.name, path)  # fails if the file exists
            except FileExistsError:
                stored = _read_limits(path)
                if stored is not None:
                    return stored
                replacement = f"{file.name}.new"
                os.link(file.name, replacement)
                os.replace(replacement, path)
    except OSError:  # for example a read-only home: measured again in the next process
        return limits
    return limits

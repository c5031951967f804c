"""Limits of small-batch matmuls: up to how many rows the compiled kernel is faster than torch on
this machine, measured once and cached in the user's cache folder."""

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

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
MAX_MEASURED_SHAPES = 2
"""Number of weight shapes that are measured: those with the most weights dominate."""

MAX_MEASURED_WEIGHTS = 1 << 20
"""Of larger matrices the first outputs are measured, which take the same time per weight."""

WEIGHT_BYTES = 1 << 24
"""Bytes of weights of each dtype, read in turn, so that they are not in the core's own cache."""

DEFAULT_SHAPES = ((1024, 1024), (4096, 1024))
"""Weight shapes [o, i] that `megalith doctor` measures."""

DEFAULT_SECONDS = 0.3


def load_or_measure_limits(
    shapes: Sequence[tuple[int, int]] = DEFAULT_SHAPES, *, folder: Path | None = None
) -> SmallBatchLimits:
    """Return the cached limits of this machine for weights of these shapes [o, i], or measure them.

    The cache key contains the CPU model, the number of threads, the versions of torch and numba,
    and the shapes. Concurrent processes agree on the limits of the one that finishes first. A file
    that cannot be read is measured anew; a folder that cannot be written is not an error.
    `folder`: unset: `user_cache_folder`.
    """
    path = (folder or user_cache_folder()) / f"small_batch_{_cache_key(shapes)}.json"
    cached = _read_limits(path)
    if cached is not None:
        return cached
    limits = measure_limits(shapes)
    return _store_limits(path, limits)


def user_cache_folder() -> Path:
    """Return the folder for cached measurements of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megalith"


def describe_limits(limits: SmallBatchLimits) -> str:
    """Describe the limits in one line."""
    parts = [
        f"{name} {'never' if rows == 0 else f'up to {rows} rows'}"
        for name, rows in asdict(limits).items()
    ]
    return f"small-batch matmul kernel: {', '.join(parts)}"


def measure_limits(
    shapes: Sequence[tuple[int, int]] = DEFAULT_SHAPES, *, seconds: float = DEFAULT_SECONDS
) -> SmallBatchLimits:
    """Measure up to how many rows the kernel is faster than torch, by dtype of the weights.

    `seconds`: limit of the measurement, without the compilation of the kernel on its first use.
    The limit of a dtype is the one with the smallest geometric mean of times over the measured row
    counts, so one disturbed measurement rarely changes it.
    """
    if not can_use(torch.empty(1, 1), torch.empty(1, 1)):
        return NO_ROW_COUNTS
    clipped = {(max(1, min(o, MAX_MEASURED_WEIGHTS // i)), i) for o, i in shapes}
    largest = sorted(clipped, key=math.prod, reverse=True)[:MAX_MEASURED_SHAPES]
    each = seconds / len(MEASURED_DTYPES)
    return SmallBatchLimits(
        **{name: _measure_limit(dtype, largest, each) for name, dtype in MEASURED_DTYPES.items()}
    )


def _measure_limit(dtype: torch.dtype, shapes: Sequence[tuple[int, int]], seconds: float) -> int:
    warm_x = torch.ones(1, 8, dtype=torch.float32 if dtype == torch.int8 else dtype)
    scale = torch.ones(1) if dtype == torch.int8 else None
    small_batch_linear(warm_x, torch.ones(1, 8, dtype=dtype), scale)  # compiles the kernel
    stop = time.perf_counter() + seconds
    weights = {shape: _build_weights(shape, dtype) for shape in shapes}
    speedups, measured = dict[int, float](), (stop - time.perf_counter()) / len(MEASURED_ROWS)
    for rows in MEASURED_ROWS:
        kernel = reference = 0.0
        for matrices in weights.values():
            times = _measure_pair(rows, matrices, measured / len(shapes))
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


def _build_weights(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    count = max(1, min(16, WEIGHT_BYTES // (math.prod(shape) * dtype.itemsize)))
    return list(torch.ones(count, *shape, dtype=dtype))


def _measure_pair(rows: int, weights: Sequence[Tensor], seconds: float) -> tuple[float, float]:
    """Return the shortest times of the kernel and of torch, measured in turns."""
    dtype = weights[0].dtype
    x = torch.ones(rows, weights[0].shape[1], dtype=torch.float32 if dtype == torch.int8 else dtype)
    scales = torch.ones(weights[0].shape[0]) if dtype == torch.int8 else None
    contenders: tuple[Callable[[Tensor], object], ...] = (
        partial(_multiply_by_kernel, x, scales),
        partial(_multiply_by_torch, x, scales),
    )
    shortest, number = [math.inf, math.inf], 0
    stop = time.perf_counter() + seconds
    while number < 1 or time.perf_counter() < stop:
        for k, contender in enumerate(contenders):
            start = time.perf_counter()
            contender(weights[(2 * number + k) % len(weights)])
            shortest[k] = min(shortest[k], time.perf_counter() - start)
        number += 1
    return shortest[0], shortest[1]


def _multiply_by_kernel(x: Tensor, scales: Tensor | None, w: Tensor) -> Tensor:
    return small_batch_linear(x, w, scales)


def _multiply_by_torch(x: Tensor, scales: Tensor | None, w: Tensor) -> Tensor:
    y = linear.torch_forward(x, w.to(x.dtype))
    return y if scales is None else y * scales


def _cache_key(shapes: Sequence[tuple[int, int]]) -> str:
    parts = [
        KERNEL_VERSION,
        _cpu_model(),
        torch.get_num_threads(),
        torch.__version__,
        version("numba"),
        sorted(set(shapes)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


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

"""Description of a machine: cores, memory, disk, GPUs and network links, and its measured speed."""

import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from megalith.observe.capabilities import cpu_features
from megalith.observe.limits import available_cores, available_memory

Format = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: dict[Format, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
GIB = 2**30


# --- description


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator."""

    name: str
    memory_gib: float
    peers: tuple[int, ...]
    """GPUs whose memory it can access directly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """One network interface to other machines."""

    name: str
    gbit_per_second: float | None
    """Speed of the link; None if the system does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware and software of a machine, without measurements."""

    system: str
    python: str
    torch: str
    cpu: str
    cores: int
    """Number of cores this process may use."""

    memory_gib: float
    """Memory this process may use."""

    disk_free_gib: float
    """Free space in the current folder."""

    open_files: int | None
    """Maximum number of open files of a process; None: no limit."""

    gpus: tuple[Gpu, ...]
    links: tuple[NetworkLink, ...]


def read_machine(folder: str | Path = ".") -> Machine:
    """Return the description of this machine, without measurements; `folder`: whose free disk space
    is reported."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        cpu=str(cpu_features().get("cpu_name") or platform.processor() or platform.machine()),
        cores=available_cores(),
        memory_gib=available_memory() / GIB,
        disk_free_gib=shutil.disk_usage(folder).free / GIB,
        open_files=_open_files(),
        gpus=_gpus(),
        links=_links(),
    )


def _open_files() -> int | None:
    import resource  # not on Windows, where the rest of this file still works

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _gpus() -> tuple[Gpu, ...]:
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return tuple(
        Gpu(
            name=torch.cuda.get_device_name(device),
            memory_gib=torch.cuda.get_device_properties(device).total_memory / GIB,
            peers=tuple(
                p for p in devices if p != device and torch.cuda.can_device_access_peer(device, p)
            ),
        )
        for device in devices
    )


def _links() -> tuple[NetworkLink, ...]:
    network = Path(
        "/sys/class/net"
    )  # Linux: interfaces with a device are hardware, the others virtual
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    names = [name for name in names if (network / name / "device").exists() or not network.exists()]
    return tuple(NetworkLink(name=name, gbit_per_second=_link_speed(name)) for name in names)


def _link_speed(name: str) -> float | None:
    try:
        speed = int(
            Path("/sys/class/net", name, "speed").read_text()
        )  # Mbit/s, or -1 when the driver does not know
    except (OSError, ValueError):
        return None
    return speed / 1000 if speed > 0 else None


# --- measurements


def measured_peak_flops(dtype: torch.dtype, *, device: str = "cpu") -> float:
    """Measure floating-point operations per second of square matmuls on torch's current threads, in
    about a second.

    Returns the fastest of all sizes and repetitions, because interference only makes matmuls
    slower. On CPUs MFU is relative to this measurement, because their clocks and units differ too
    much for a table.
    """
    best, size, largest = 0.0, 256, 2048 if device == "cpu" else 8192
    while size <= largest:
        a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        fastest = min(_seconds(partial(torch.matmul, a, b), device=device))
        best = max(best, 2 * size**3 / fastest)
        size = (
            2 * size if 8 * fastest < 0.4 else largest + 1
        )  # the next size takes eight times as long
    return best


def measured_bandwidth(*, device: str = "cpu") -> float:
    """Measure bytes per second of a copy between buffers larger than any cache; each byte counts as
    read and written."""
    numel = (
        2**25 if available_memory() > 4 * GIB else 2**23
    )  # 128 MiB each, or 32 MiB on small machines
    source, target = (torch.zeros(numel, device=device) for _ in range(2))
    return (
        2
        * source.nbytes
        / statistics.median(_seconds(partial(target.copy_, source), device=device))
    )


def _seconds(work: Callable[[], object], *, device: str, budget: float = 0.15) -> list[float]:
    """Return the times of `work`, repeated for `budget` seconds and at least 5 times.

    Short work is repeated that long too: on a busy machine a few milliseconds may all be slow.
    """
    times: list[float] = []
    while len(times) < 6 or sum(times) < budget:
        start = time.perf_counter()
        work()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times[1:]  # the first one allocates and loads


# Dense peaks in TFLOP/s with fp32 sums, from the makers' data sheets (their "sparse" figures are
# twice these): H100 and H200 2023, Blackwell 2024, A100 2020, L40S, L4 and Ada 2022-2023, Ampere
# 2020-2021, V100 2017. fp32 is that of the plain units, because torch uses TF32 only when asked to.
_PEAKS: tuple[tuple[str, dict[Format, float]], ...] = (
    (r"GB200", {"fp64": 40, "fp32": 80, "bf16": 2450, "fp16": 2450}),
    (r"B200", {"fp64": 37, "fp32": 75, "bf16": 2250, "fp16": 2250}),
    (r"H100 PCIe", {"fp64": 51, "fp32": 51, "bf16": 756, "fp16": 756}),
    (r"H100 NVL", {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835}),
    (r"H200 NVL", {"fp64": 60, "fp32": 60, "bf16": 835, "fp16": 835}),
    (r"H100|H200|GH200", {"fp64": 67, "fp32": 67, "bf16": 989.4, "fp16": 989.4}),
    (r"A100", {"fp64": 19.5, "fp32": 19.5, "bf16": 312, "fp16": 312}),
    (r"L40S", {"fp32": 91.6, "bf16": 362, "fp16": 362}),
    (r"L4\b", {"fp32": 30.3, "bf16": 121, "fp16": 121}),
    (r"A10\b", {"fp32": 31.2, "bf16": 125, "fp16": 125}),
    (r"RTX 4090", {"fp32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    (r"RTX 3090(?! Ti)", {"fp32": 35.6, "bf16": 71, "fp16": 71}),
    (r"V100", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak operations per second of a GPU by its torch name; None for unknown GPUs and
    dtypes."""
    for pattern, rates in _PEAKS:
        if re.search(pattern, device_name):
            return next(
                (rate * 1e12 for name, rate in rates.items() if DTYPES[name] == dtype), None
            )
    return None


def device_peak_tflops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak TFLOP/s that MFU is relative to: measured on a CPU, from the table on a
    GPU."""
    if device.type == "cpu":
        return measured_peak_flops(dtype) / 1e12
    peak = peak_flops(torch.cuda.get_device_name(device), dtype)
    return None if peak is None else peak / 1e12


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory of this process in GiB: device memory on a GPU, else resident
    memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    largest = resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_maxrss  # kilobytes on Linux, bytes on macOS
    return largest * (1 if sys.platform == "darwin" else 1024) / GIB

"""Description of a machine: cores, memory, disk, GPUs and network links, its measured speed, and
the capabilities of this installation."""

import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from megalith.kernels import cpu_threads
from megalith.kernels.attention.sdpa import has_varlen
from megalith.kernels.linear import HAS_BF16_KERNELS
from megalith.kernels.triton import launch
from megalith.observe.limits import available_cores, available_memory

# Capabilities of this installation, detected by attributes, because version numbers do not
# identify builds.


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A feature of torch, the machine or an optional package, and whether it is available."""

    present: bool

    purpose: str
    """What it is used for."""

    fix: str
    """How to install it."""


def capabilities() -> dict[str, Capability]:
    """Return everything that the package uses from torch, the machine and optional packages, by
    name."""
    return _torch_capabilities() | _kernel_capabilities() | _tool_capabilities()


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses on a CPU; None if there is
    none."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def cpu_features() -> dict[str, object]:
    """Return torch's CPU capabilities by name; empty if this torch version has no such function."""
    read = getattr(torch.cpu, "get_capabilities", None)
    return dict(read()) if read is not None else {}


def has_symmetric_memory() -> bool:
    """Return whether torch has symmetric memory and matmuls fused with collectives."""
    name = "torch.distributed._symmetric_memory"
    if not dist.is_available() or not torch.cuda.is_available() or find_spec(name) is None:
        return False
    module, operators = import_module(name), torch.ops.symm_mem
    wanted = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    # Older versions of torch have no get_backend.
    backend = getattr(module, "get_backend", lambda device: "unknown")
    return all(hasattr(operators, operator) for operator in wanted) and backend("cuda") is not None


def _torch_capabilities() -> dict[str, Capability]:
    other_torch = "install a torch build that has it"
    distributed = dist.is_available()
    return {
        "gloo": Capability(
            present=distributed and dist.is_gloo_available(),
            purpose="several ranks on CPUs",
            fix=other_torch,
        ),
        "nccl": Capability(
            present=distributed and dist.is_nccl_available(),
            purpose="several ranks on NVIDIA GPUs",
            fix=other_torch,
        ),
        "NVIDIA GPU": Capability(
            present=torch.cuda.is_available(),
            purpose="training on NVIDIA GPUs",
            fix="use a machine with one",
        ),
        "functional collectives": Capability(
            present=hasattr(torch.ops, "_c10d_functional")
            and hasattr(torch.ops._c10d_functional, "all_gather_into_tensor"),
            purpose="tensor-parallel layers",
            fix=other_torch,
        ),
        "fused AdamW": Capability(
            present=hasattr(torch, "_fused_adamw_"),
            purpose="one pass over the weights per step",
            fix=other_torch,
        ),
        "symmetric memory": Capability(
            present=has_symmetric_memory(),
            purpose="parallel.collective_matmul=fused, on GPUs that read each other's memory",
            fix="use parallel.collective_matmul=ring_exchange, or a CUDA build of torch on a "
            "machine with "
            "GPUs",
        ),
        "bf16 instructions": Capability(
            present=torch.cuda.is_available()
            or any(bool(on) for key, on in cpu_features().items() if "bf16" in key),
            purpose="bf16 faster than fp32",
            fix="use precision.params=fp32 on this machine",
        ),
        "bf16 CPU kernels": Capability(
            present=HAS_BF16_KERNELS,
            purpose="bf16 matmuls on CPUs; without them they are computed in fp32 "
            "(kernels.matmul=upcast)",
            fix="use precision.params=fp32 on this machine",
        ),
    }


def _kernel_capabilities() -> dict[str, Capability]:
    return {
        "compiled loops": Capability(
            present=cpu_threads.openmp() is not None,
            purpose="norms, gates, rotations and losses in one pass over memory on CPUs",
            fix="use a torch build that brings GNU's OpenMP, as those for Linux do",
        ),
        "Triton": Capability(
            present=launch.has_triton(),
            purpose="the same on GPUs, and flex_attention for caps and sinks",
            fix="install torch's CUDA build, or run `pip install triton`",
        ),
        "varlen attention": Capability(
            present=has_varlen(),
            purpose="documents of many lengths, and windows, in one call on GPUs",
            fix="use a newer torch, whose varlen_attn takes windows",
        ),
    }


def _tool_capabilities() -> dict[str, Capability]:
    packages = {
        "spmd_types": (
            "the type check of `megalith verify`",
            "run `pip install spmd_types==0.3.1`",
        ),
        "transformers": ("comparison with Hugging Face models", "run `pip install 'megalith[hf]'`"),
        "tensorboard": (
            "TensorBoard events beside metrics.jsonl",
            "run `pip install 'megalith[tensorboard]'`",
        ),
    }
    optional = {
        name: Capability(present=find_spec(name) is not None, purpose=purpose, fix=fix)
        for name, (purpose, fix) in packages.items()
    }
    compiler = Capability(
        present=cpp_compiler() is not None,
        purpose="train.compile=true on CPUs",
        fix="install one, for example `apt install g++`",
    )
    return {"C++ compiler": compiler} | optional


Format = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FORMATS: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
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
    # Linux: interfaces with a device are hardware, the others virtual
    network = Path("/sys/class/net")
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    names = [name for name in names if (network / name / "device").exists() or not network.exists()]
    return tuple(NetworkLink(name=name, gbit_per_second=_link_speed(name)) for name in names)


def _link_speed(name: str) -> float | None:
    try:
        # Mbit/s, or -1 when the driver does not know
        speed = int(Path("/sys/class/net", name, "speed").read_text())
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
        # the next size takes eight times as long
        size = 2 * size if 8 * fastest < 0.4 else largest + 1
    return best


def measured_bandwidth(*, device: str = "cpu") -> float:
    """Measure bytes per second of a copy between buffers larger than any cache; each byte counts as
    read and written."""
    # 128 MiB each, or 32 MiB on small machines
    numel = 2**25 if available_memory() > 4 * GIB else 2**23
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
    # kilobytes on Linux, bytes on macOS
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest * (1 if sys.platform == "darwin" else 1024) / GIB


# --- measurements and advice about a machine for `megalith doctor`

BYTES_PER_PARAMETER = 16  # fp32 weights, gradients and AdamW's two means
OF_GPUS = "nccl", "symmetric memory"
"""Capabilities that only machines with GPUs need."""

MEASURED_FORMATS: tuple[Format, ...] = "fp32", "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Measured rates of one device."""

    device: str
    threads: int | None
    """Number of CPU threads; None on a GPU."""

    tflops: dict[Format, float]
    peak_tflops: dict[Format, float | None]
    """Peak rates of the data sheet; None if unknown, as for every CPU."""

    bandwidth_gb_per_second: float


def measure(device: str) -> DeviceRates:
    """Measure one device; a CPU with torch's default number of threads."""
    name = "" if device == "cpu" else torch.cuda.get_device_name(device)
    peaks = {key: peak_flops(name, DTYPES[key]) for key in MEASURED_FORMATS}
    return DeviceRates(
        device=device,
        threads=torch.get_num_threads() if device == "cpu" else None,
        tflops={
            key: measured_peak_flops(DTYPES[key], device=device) / 1e12 for key in MEASURED_FORMATS
        },
        peak_tflops={key: None if peak is None else peak / 1e12 for key, peak in peaks.items()},
        bandwidth_gb_per_second=measured_bandwidth(device=device) / 1e9,
    )


def advise(
    machine: Machine, available: dict[str, Capability], rates: list[DeviceRates]
) -> list[str]:
    """Return advice about model sizes, missing capabilities and settings, in sentences."""
    memory = max([gpu.memory_gib for gpu in machine.gpus], default=machine.memory_gib)
    # guess: the rest is for activations and everything else
    largest = 0.7 * memory * 2**30 / BYTES_PER_PARAMETER
    where = "one GPU" if machine.gpus else "this machine"
    advice = [
        f"A model of up to about {largest / 1e9:.2g}B parameters can be trained in fp32 in the "
        f"memory of {where}."
    ]
    if not machine.gpus:
        advice.append(
            "There is no NVIDIA GPU: everything runs, on the CPU. Use small models, such as "
            "tiny_cpu."
        )
    for name, capability in available.items():
        wanted = name != "NVIDIA GPU" and (name not in OF_GPUS or bool(machine.gpus))
        if wanted and not capability.present:
            advice.append(f"{name} is missing, needed for {capability.purpose}: {capability.fix}.")
    for rate in rates:
        if rate.tflops["bf16"] < rate.tflops["fp32"]:
            advice.append(
                f"bf16 is slower than fp32 on {rate.device}: use precision.params=fp32 there."
            )
        if rate.threads is not None and rate.threads < machine.cores:
            advice.append(
                f"torch uses {rate.threads} of {machine.cores} cores here. Set "
                f"OMP_NUM_THREADS={machine.cores}, or let `megalith train` divide the cores among "
                "its ranks."
            )
    if machine.disk_free_gib < 10:
        advice.append(
            f"Only {machine.disk_free_gib:.1f} GiB of disk are free here: set checkpoint.keep=1."
        )
    if machine.open_files is not None and machine.open_files < 1024:
        advice.append(
            f"A process may open only {machine.open_files} files. Run `ulimit -n 4096` for many "
            "ranks."
        )
    return advice

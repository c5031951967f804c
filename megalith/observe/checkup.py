"""Measurements and advice about a machine for `megalith doctor`."""

from dataclasses import dataclass

import torch

from megalith.observe.capabilities import Capability
from megalith.observe.machine import (
    DTYPES,
    Format,
    Machine,
    measured_bandwidth,
    measured_peak_flops,
    peak_flops,
)

BYTES_PER_PARAMETER = 16  # fp32 weights, gradients and AdamW's two means
OF_GPUS = ("nccl", "symmetric memory")
"""Capabilities that only machines with GPUs need."""

MEASURED_FORMATS: tuple[Format, ...] = ("fp32", "bf16")


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
    largest = (
        0.7 * memory * 2**30 / BYTES_PER_PARAMETER
    )  # guess: the rest is for activations and everything else
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

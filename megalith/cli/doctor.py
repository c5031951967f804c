"""`megalith doctor`: what this machine offers, how fast it is, and what is missing for what."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.observe.capabilities import Capability, capabilities
from megalith.observe.machine import (
    DTYPES,
    Format,
    Machine,
    measured_bandwidth,
    measured_peak_flops,
    peak_flops,
    read_machine,
)

BYTES_PER_PARAMETER = 16  # fp32 weights, gradients and AdamW's two means
MEASURED_FORMATS: tuple[Format, ...] = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What this machine offers: cores, memory, GPUs, links, measured rates, and what is missing for what."""

    measure: bool = True
    """Measure matrix products and memory bandwidth, about three seconds."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What was measured on one device."""

    device: str
    threads: int | None
    """CPU threads; None on a GPU."""

    tflops: dict[Format, float]
    peak_tflops: dict[Format, float | None]
    """What the maker promises; None where no table has it, as for every CPU."""

    bandwidth_gb_per_second: float


def main(argv: list[str]) -> int:
    """Run `megalith doctor`."""
    options = parse_options(DoctorOptions, argv, prog="megalith doctor")
    machine, found = read_machine(), capabilities()
    rates = [measure("cpu"), *(measure(f"cuda:{i}") for i in range(len(machine.gpus)))] if options.measure else []
    advice = advise(machine, found, rates)
    if options.json:
        print_json(report(machine, found, rates, advice))
    else:
        print_report(machine, found, rates, advice)
    return 0


def measure(device: str) -> Rates:
    """Measure one device; a CPU with as many threads as torch uses by itself."""
    name = "" if device == "cpu" else torch.cuda.get_device_name(device)
    peaks = {key: peak_flops(name, DTYPES[key]) for key in MEASURED_FORMATS}
    return Rates(
        device=device,
        threads=torch.get_num_threads() if device == "cpu" else None,
        tflops={key: measured_peak_flops(DTYPES[key], device=device) / 1e12 for key in MEASURED_FORMATS},
        peak_tflops={key: None if peak is None else peak / 1e12 for key, peak in peaks.items()},
        bandwidth_gb_per_second=measured_bandwidth(device=device) / 1e9,
    )


def advise(machine: Machine, found: dict[str, Capability], rates: list[Rates]) -> list[str]:
    """What this machine is good for and what it lacks, in sentences."""
    memory = max([gpu.memory_gib for gpu in machine.gpus], default=machine.memory_gib)
    largest = 0.7 * memory * 2**30 / BYTES_PER_PARAMETER  # guess: the rest is for activations and everything else
    where = "one GPU" if machine.gpus else "this machine"
    advice = [
        f"A model of up to about {largest / 1e9:.2g}B parameters can be trained in fp32 in the memory of {where}."
    ]
    if not machine.gpus:
        advice.append("There is no NVIDIA GPU: everything runs, on the CPU. Use small models, such as tiny_cpu.")
    for name, capability in found.items():
        wanted = name != "NVIDIA GPU" and (name != "nccl" or bool(machine.gpus))
        if wanted and not capability.present:
            advice.append(f"{name} is missing, needed for {capability.purpose}: {capability.fix}.")
    for rate in rates:
        if rate.tflops["bf16"] < rate.tflops["fp32"]:
            advice.append(f"bf16 is slower than fp32 on {rate.device}: use precision.params=fp32 there.")
        if rate.threads is not None and rate.threads < machine.cores:
            advice.append(
                f"torch uses {rate.threads} of {machine.cores} cores here. Set OMP_NUM_THREADS={machine.cores}, "
                f"or let `megalith train` divide the cores among its ranks."
            )
    if machine.disk_free_gib < 10:
        advice.append(f"Only {machine.disk_free_gib:.1f} GiB of disk are free here: set checkpoint.keep=1.")
    if machine.open_files is not None and machine.open_files < 1024:
        advice.append(f"A process may open only {machine.open_files} files. Run `ulimit -n 4096` for many ranks.")
    return advice


def report(
    machine: Machine, found: dict[str, Capability], rates: list[Rates], advice: list[str]
) -> dict[str, Any]:  # Any: JSON
    """The whole report as one JSON document."""
    return {
        "machine": asdict(machine),
        "capabilities": {name: asdict(capability) for name, capability in found.items()},
        "rates": [asdict(rate) for rate in rates],
        "advice": advice,
    }


def print_report(machine: Machine, found: dict[str, Capability], rates: list[Rates], advice: list[str]) -> None:
    """The whole report for a person."""
    console = Console(highlight=False)
    console.print(_machine_table(machine))
    if rates:
        console.print(_rates_table(rates))
    table = Table("what", "here", "for", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, capability in found.items():
        table.add_row(name, "yes" if capability.present else "[bold]no[/]", capability.purpose)
    console.print(table)
    for sentence in advice:
        console.print(f"- {sentence}", markup=False)


def _machine_table(machine: Machine) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    links = [
        f"{link.name} ({'speed unknown' if link.gbit_per_second is None else f'{link.gbit_per_second:g} Gbit/s'})"
        for link in machine.links
    ]
    rows = {
        "system": f"{machine.system}, Python {machine.python}, torch {machine.torch}",
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "memory": f"{machine.memory_gib:.1f} GiB",
        "disk free here": f"{machine.disk_free_gib:.1f} GiB",
        "open files": "no limit" if machine.open_files is None else str(machine.open_files),
        "GPUs": "none" if not machine.gpus else "",
        "links": ", ".join(links) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for index, gpu in enumerate(machine.gpus):
        peers = f", reads {', '.join(map(str, gpu.peers))} directly" if gpu.peers else ""
        table.add_row(f"GPU {index}", f"{gpu.name}, {gpu.memory_gib:.1f} GiB{peers}")
    return table


def _rates_table(rates: list[Rates]) -> Table:
    table = Table("measured on", box=box.SIMPLE_HEAD, pad_edge=False)
    for key in MEASURED_FORMATS:
        table.add_column(f"{key} TFLOP/s", justify="right")
    table.add_column("memory GB/s", justify="right")
    for rate in rates:
        threads = f", {rate.threads} threads" if rate.threads else ""
        cells = [_with_peak(rate.tflops[key], rate.peak_tflops[key]) for key in MEASURED_FORMATS]
        table.add_row(f"{rate.device}{threads}", *cells, f"{rate.bandwidth_gb_per_second:.1f}")
    return table


def _with_peak(tflops: float, peak: float | None) -> str:
    return f"{tflops:.3g}" if peak is None else f"{tflops:.3g} of {peak:g}"

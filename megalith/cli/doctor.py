"""`megalith doctor`: hardware, measured speed, and available features of this machine."""

from __future__ import annotations  # the types below import torch, which --help does not need

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json

if TYPE_CHECKING:
    from megalith.observe.machine import Capability, DeviceRates, Machine


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Show cores, memory, GPUs, network links, measured speed, and available features of this
    machine."""

    measure: bool = True
    """Measure matmul speed and memory bandwidth, which takes about three seconds, and when the
    kernel of small-batch matmuls is faster than torch."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run `megalith doctor`."""
    options = parse_options(DoctorOptions, argv, prog="megalith doctor")
    from megalith.kernels.small_batch_limits import describe_limits, load_or_measure_limits
    from megalith.observe.machine import advise, capabilities, measure, read_machine

    machine, features = read_machine(), capabilities()
    rates = (
        [measure("cpu"), *(measure(f"cuda:{i}") for i in range(len(machine.gpus)))]
        if options.measure
        else []
    )
    advice = advise(machine, features, rates)
    limits = load_or_measure_limits() if options.measure else None
    if options.json:
        print_json(
            report(machine, features, rates, advice)
            | {"small_batch_limits": None if limits is None else asdict(limits)}
            | {"kernels": [asdict(backend) for backend in list_backends(machine)]}
        )
    else:
        print_report(machine, features, rates, advice)
        if limits is not None:
            Console(highlight=False).print(f"- {describe_limits(limits)}", markup=False)
        Console(highlight=False).print(_backends_table(list_backends(machine)))
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """Kernel backend of an operation, and whether it is available on this machine."""

    operation: str
    backend: str
    takes: str
    deterministic: str
    here: str  # lint: allow vague-variable: key of the JSON report


def list_backends(machine: Machine) -> list[BackendRow]:
    """Return every backend that `kernels.OPERATION` can select."""
    from megalith.kernels.backend import unavailable_backends
    from megalith.plan.kernels import GPU, find_backend_spec, list_backend_specs

    missing = unavailable_backends()
    rows = []
    for op, name, takes, deterministic in list_backend_specs():
        absent = (
            "no GPU"
            if find_backend_spec(op, name).device == GPU and not machine.gpus
            else missing.get(name)
        )
        available = "yes" if absent is None else f"no: {absent}"
        rows.append(
            BackendRow(
                operation=op, backend=name, takes=takes, deterministic=deterministic, here=available
            )
        )
    return rows


def report(
    machine: Machine, features: dict[str, Capability], rates: list[DeviceRates], advice: list[str]
) -> dict[str, Any]:  # Any: JSON
    """Return the whole report as one JSON document."""
    return {
        "machine": asdict(machine),
        "capabilities": {name: asdict(capability) for name, capability in features.items()},
        "rates": [asdict(rate) for rate in rates],
        "advice": advice,
    }


def print_report(
    machine: Machine, features: dict[str, Capability], rates: list[DeviceRates], advice: list[str]
) -> None:
    """Print the whole report as tables."""
    console = Console(highlight=False)
    console.print(_machine_table(machine))
    if rates:
        console.print(_rates_table(rates))
    table = Table("feature", "available", "purpose", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, capability in features.items():
        table.add_row(name, "yes" if capability.present else "[bold]no[/]", capability.purpose)
    console.print(table)
    for sentence in advice:
        console.print(f"- {sentence}", markup=False)


def _machine_table(machine: Machine) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    links = [
        f"{link.name} (speed unknown)"
        if link.gbit_per_second is None
        else f"{link.name} ({link.gbit_per_second:g} Gbit/s)"
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


def _backends_table(backends: list[BackendRow]) -> Table:
    table = Table(
        "kernels.",
        "backend",
        "supports",
        "deterministic",
        "available",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for backend in backends:
        table.add_row(
            backend.operation, backend.backend, backend.takes, backend.deterministic, backend.here
        )
    return table


def _rates_table(rates: list[DeviceRates]) -> Table:
    table = Table("measured on", box=box.SIMPLE_HEAD, pad_edge=False)
    for key in rates[0].tflops:
        table.add_column(f"{key} TFLOP/s", justify="right")
    table.add_column("memory GB/s", justify="right")
    for rate in rates:
        threads = f", {rate.threads} threads" if rate.threads else ""
        cells = [_with_peak(rate.tflops[key], rate.peak_tflops[key]) for key in rate.tflops]
        table.add_row(f"{rate.device}{threads}", *cells, f"{rate.bandwidth_gb_per_second:.1f}")
    return table


def _with_peak(tflops: float, peak: float | None) -> str:
    return f"{tflops:.3g}" if peak is None else f"{tflops:.3g} of {peak:g}"

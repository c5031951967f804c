"""What the machine has and how fast it is."""

import time
from pathlib import Path

import pytest
import torch

from megalith.observe import machine as subject
from megalith.observe.machine import (
    measured_bandwidth,
    measured_peak_flops,
    peak_flops,
    read_machine,
)


def test_the_machine_is_described(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.cores >= 1
    assert 0 < machine.memory_gib < 1e6
    assert machine.disk_free_gib > 0
    assert machine.torch == torch.__version__
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert all(link.name != "lo" for link in machine.links)


def test_measured_rates_count_the_operations_of_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "_seconds", lambda work, device: [2.0, 1.0, 4.0])
    assert measured_peak_flops(torch.float32) == 2 * 256**3, (
        "the fastest, and the next size is not tried"
    )
    monkeypatch.setattr(subject, "available_memory", lambda: 2**30)
    assert measured_bandwidth() == 2 * 4 * 2**23 / 2, "the median, read and written"


def test_matmul_size_grows_while_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def seconds(work: object, device: str) -> list[float]:
        sizes.append(len(work.args[0]))  # type: ignore[attr-defined]  # a partial of torch.matmul
        return [1e-3]

    monkeypatch.setattr(subject, "_seconds", seconds)
    assert measured_peak_flops(torch.float32) == 2 * 2048**3 / 1e-3
    assert sizes == [256, 512, 1024, 2048]


def test_work_is_repeated_for_a_while_and_the_first_is_not_counted() -> None:
    calls: list[int] = []
    assert len(subject._seconds(lambda: calls.append(1), device="cpu", budget=0.0)) == 5
    assert len(calls) == 6
    times = subject._seconds(lambda: time.sleep(0.002), device="cpu", budget=0.03)
    assert len(times) > 5
    assert 0.02 < sum(times) < 0.2


@pytest.mark.parametrize(
    "name, dtype, teraflops",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.0),
        ("NVIDIA H100 NVL", torch.bfloat16, 835.0),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA B200", torch.bfloat16, 2250.0),
        ("NVIDIA GB200", torch.bfloat16, 2450.0),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA L40S", torch.bfloat16, 362.0),
        ("NVIDIA L4", torch.bfloat16, 121.0),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-32GB", torch.float16, 125.0),
    ],
)
def test_known_gpus_have_their_dense_peak(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("AMD EPYC", torch.float32),
        ("Tesla V100", torch.bfloat16),
        ("NVIDIA A10G", torch.bfloat16),
        ("NVIDIA L40", torch.bfloat16),
    ],
)
def test_unknown_devices_and_formats_have_no_peak(name: str, dtype: torch.dtype) -> None:
    assert peak_flops(name, dtype) is None


def test_peaks_of_this_process_are_known_on_a_cpu() -> None:
    cpu = torch.device("cpu")
    assert 0.01 < subject.peak_memory_gib(cpu) < 1000
    peak = subject.device_peak_tflops(cpu, torch.float32)
    assert peak is not None
    assert peak > 0.001

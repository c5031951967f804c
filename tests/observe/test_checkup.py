"""A check-up of the machine."""

from dataclasses import replace

import pytest

from megalith.observe import machine as checkup
from megalith.observe.machine import (
    Capability,
    DeviceRates,
    Gpu,
    Machine,
    advise,
    capabilities,
    read_machine,
)

RATES = DeviceRates(
    device="cpu",
    threads=4,
    tflops={"fp32": 0.2, "bf16": 0.4},
    peak_tflops={"fp32": None, "bf16": None},
    bandwidth_gb_per_second=20.0,
)


def machine(**changes: object) -> Machine:
    return replace(
        read_machine(),
        cores=4,
        memory_gib=16.0,
        disk_free_gib=100.0,
        open_files=4096,
        gpus=(),
        **changes,
    )  # type: ignore[arg-type]  # the test names fields


def advice(
    found: dict[str, Capability] | None = None, rates: DeviceRates = RATES, **changes: object
) -> str:
    present = {
        name: replace(capability, present=True) for name, capability in capabilities().items()
    }
    return "\n".join(advise(replace(machine(), **changes), present | (found or {}), [rates]))  # type: ignore[arg-type]  # same


def test_measuring_gives_rates_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "measured_peak_flops", lambda dtype, device: 2e11)
    monkeypatch.setattr(checkup, "measured_bandwidth", lambda device: 3e10)
    rates = checkup.measure("cpu")
    assert rates.tflops == {"fp32": 0.2, "bf16": 0.2}
    assert rates.bandwidth_gb_per_second == 30.0
    assert rates.peak_tflops == {"fp32": None, "bf16": None}


def test_machine_with_all_capabilities_gets_only_model_size_advice() -> None:
    gpu = Gpu(name="NVIDIA H200", memory_gib=139.0, peers=(1,))
    text = advice(gpus=(gpu, gpu))
    assert (
        text
        == "A model of up to about 6.5B parameters can be trained in fp32 in the memory of one GPU."
    )


def test_missing_capability_is_reported_with_purpose_and_fix() -> None:
    compiler = Capability(present=False, purpose="train.compile=true on CPUs", fix="install one")
    assert "C++ compiler is missing, needed for train.compile=true on CPUs: install one." in advice(
        {"C++ compiler": compiler}
    )


def test_cpu_machine_does_not_require_gpu_capabilities() -> None:
    missing = Capability(present=False, purpose="several ranks on NVIDIA GPUs", fix="x")
    text = advice({"nccl": missing, "symmetric memory": missing, "NVIDIA GPU": missing})
    assert "There is no NVIDIA GPU" in text
    assert "missing" not in text
    gpu = Gpu(name="NVIDIA H200", memory_gib=139.0, peers=())
    assert "nccl is missing" in advice({"nccl": missing}, gpus=(gpu,))


def test_slow_bf16_idle_cores_a_full_disk_and_few_files_are_named() -> None:
    slow = replace(RATES, threads=1, tflops={"fp32": 0.2, "bf16": 0.1})
    text = advice(rates=slow, disk_free_gib=3.0, open_files=256)
    assert "bf16 is slower than fp32 on cpu: use precision.params=fp32 there." in text
    assert "torch uses 1 of 4 cores here. Set OMP_NUM_THREADS=4" in text
    assert "Only 3.0 GiB of disk are free here" in text
    assert "A process may open only 256 files" in text

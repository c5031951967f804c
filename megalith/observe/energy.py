"""Energy counters, and the state of a GPU: NVML of NVIDIA GPUs, RAPL of CPUs."""

import math
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")

EnergyCounter = Callable[[], float]
"""Returns the joules that a device has used since the counter was opened; NaN if it cannot be
read."""


def open_nvml_counter(device: torch.device) -> EnergyCounter | None:
    """Return the counter of a GPU; None if nvidia-ml-py is missing, or the driver or the GPU has
    no counter."""
    if find_spec("pynvml") is None:
        return None
    import pynvml

    nvml: Any = pynvml  # Any: the package has no types
    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        start = nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # measurements do not end a run: no driver, no library, another API
        return None

    def read() -> float:
        try:
            used = nvml.nvmlDeviceGetTotalEnergyConsumption(handle) - start
        except Exception:
            return math.nan
        return float(used) / 1000

    return read


def describe_gpu_health(device: torch.device) -> str:
    """Return clocks, temperature, reasons of throttling and counts of errors of a GPU as text, as
    far as NVML provides them; empty if nvidia-ml-py is missing."""
    if find_spec("pynvml") is None:
        return ""
    import pynvml

    nvml: Any = pynvml  # Any: the package has no types
    try:
        nvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except Exception:  # a report does not end a run: no driver, no library, another API
        return ""

    def count_nvlink_errors(counter: str) -> int:
        kind = getattr(nvml, f"NVML_NVLINK_ERROR_DL_{counter}")
        links = range(nvml.NVML_NVLINK_MAX_LINKS)
        active = [link for link in links if is_active_nvlink(nvml, handle, link)]
        if not active:
            raise LookupError("this GPU has no active NVLink")
        return sum(int(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind)) for link in active)

    def count_ecc_errors() -> int:
        kinds = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))

    sm = getattr(nvml, "NVML_CLOCK_SM", 1)
    readings: dict[str, Callable[[], object]] = {
        "SM clock {} MHz": lambda: nvml.nvmlDeviceGetClockInfo(handle, sm),
        "of at most {} MHz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, sm),
        "{} degrees C": lambda: nvml.nvmlDeviceGetTemperature(handle, 0),
        "throttling {}": lambda: hex(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        "{} uncorrected ECC errors": count_ecc_errors,
        "{} PCIe replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle),
        "{} NVLink replays": lambda: count_nvlink_errors("REPLAY"),
        "{} NVLink recoveries": lambda: count_nvlink_errors("RECOVERY"),
        "{} NVLink CRC errors": lambda: count_nvlink_errors("CRC_FLIT"),
    }
    texts = []
    for text, read in readings.items():
        with suppress(Exception):  # this GPU or driver does not provide it
            texts.append(text.format(read()))
    return ", ".join(texts)


_ABSENT_LINK_ERRORS = 2, 3
"""NVML_ERROR_INVALID_ARGUMENT and NVML_ERROR_NOT_SUPPORTED: a GPU has fewer links than NVML allows
(A100: 12 of 18)."""


def is_active_nvlink(nvml: Any, handle: Any, link: int) -> bool:  # Any: the package has no types
    """Return whether a GPU has an NVLink of this number that is active.

    Raises:
        Exception: an error of NVML, except that there is no such link.
    """
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
    except nvml.NVMLError as error:
        if getattr(error, "value", None) in _ABSENT_LINK_ERRORS:
            return False
        raise


class RaplCounter:
    """Counter of all CPU packages of this machine."""

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._ranges = [_read_number(path / "max_energy_range_uj") for path in packages]
        self._last = [_read_number(path / "energy_uj") for path in packages]
        self._microjoules = 0

    def __call__(self) -> float:
        """Return the joules since the counter was opened; called more often than a counter wraps
        around, which takes minutes."""
        try:
            values = [_read_number(path / "energy_uj") for path in self._packages]
        except (OSError, ValueError):
            return math.nan
        for last, current, limit in zip(self._last, values, self._ranges, strict=True):
            self._microjoules += current - last + (limit if current < last else 0)
        self._last = values
        return self._microjoules / 1e6


def open_rapl_counter(folder: Path = POWERCAP) -> EnergyCounter | None:
    """Return the counter of the CPU packages; None if there is none or it is not readable."""
    try:
        # intel-rapl:0:0 is a part of a package; a zone named psys contains the packages
        packages = [
            path
            for path in sorted(folder.glob("intel-rapl:*"))
            if (path / "name").read_text().startswith("package")
        ]
        return RaplCounter(packages) if packages else None
    except (OSError, ValueError):
        return None


def _read_number(path: Path) -> int:
    return int(path.read_text())

"""Comparison of device health checks over the ranks of a run: wrong bits, and slow devices; no
torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

SLOW = 0.8
"""Speed relative to the median of the ranks of one device type below which a device is reported
(heuristic)."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Result of the health check of one rank's device."""

    host: str
    device_type: str
    """Devices of one type compute equal bits."""

    bits: Mapping[str, int] = field(default_factory=dict)
    """Checksum of each result, such as a matrix product in bf16, by name; without those for which
    the device had no memory."""

    errors: tuple[str, ...] = ()
    """Results that are wrong on any device, such as a memory pattern that has changed."""

    speeds: Mapping[str, float] = field(default_factory=dict)
    """Speed of each operation, by name; larger is faster."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A device that differs from those of the other ranks."""

    rank: int
    kind: Literal["bits", "speed"]
    """bits: it computes wrongly, so the run must continue on other machines."""

    reason: str


def find_outliers(devices: Sequence[DeviceHealth]) -> list[Outlier]:
    """Return the devices with wrong bits or a low speed, by rank.

    A checksum is wrong if more than half of the ranks of the device type have another one; without
    a majority, all of these ranks are outliers.

    >>> devices = [DeviceHealth("a", "cpu", {"matmul fp32": bits}) for bits in (7, 7, 9)]
    >>> [(each.rank, each.reason) for each in find_outliers(devices)]
    [(2, 'matmul fp32 has different bits than on rank 0, a device of the same type')]
    """
    outliers = [
        Outlier(rank, "bits", error) for rank, each in enumerate(devices) for error in each.errors
    ]
    ranks_by_type: dict[str, list[int]] = {}
    for rank, each in enumerate(devices):
        ranks_by_type.setdefault(each.device_type, []).append(rank)
    for ranks in ranks_by_type.values():
        outliers += _find_wrong_bits(devices, ranks)
        outliers += _find_slow(devices, ranks)
    return sorted(outliers, key=lambda each: (each.rank, each.kind, each.reason))


def _find_wrong_bits(devices: Sequence[DeviceHealth], ranks: Sequence[int]) -> list[Outlier]:
    """Return the ranks of one device type whose results differ in bits from most."""
    outliers = []
    for name in sorted({name for rank in ranks for name in devices[rank].bits}):
        checksums = {rank: devices[rank].bits[name] for rank in ranks if name in devices[rank].bits}
        ((common, count),) = Counter(checksums.values()).most_common(1)
        if count == len(checksums):
            continue
        has_majority = 2 * count > len(checksums)
        for rank, checksum in checksums.items():
            if has_majority and checksum == common:
                continue
            other = next(each for each, value in checksums.items() if value != checksum)
            which = "" if has_majority else "; which one is wrong is unknown"
            reason = (
                f"{name} has different bits than on rank {other}, a device of the same type{which}"
            )
            outliers.append(Outlier(rank, "bits", reason))
    return outliers


def _find_slow(devices: Sequence[DeviceHealth], ranks: Sequence[int]) -> list[Outlier]:
    """Return the ranks of one device type that are slower than most."""
    outliers = []
    for name in sorted({name for rank in ranks for name in devices[rank].speeds}):
        speeds = {
            rank: devices[rank].speeds[name] for rank in ranks if name in devices[rank].speeds
        }
        typical = median(speeds.values())
        outliers += [
            Outlier(rank, "speed", f"{name}: {speed / typical:.2f} of the median speed")
            for rank, speed in speeds.items()
            if speed < SLOW * typical
        ]
    return outliers

"""Number of cores and amount of memory that this process may use; without torch, for launchers."""

import os
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores this process may use: its affinity, and its container's quota."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _control_group("cpu.max").partition(" ")
    return min(allowed, max(1, round(int(quota) / int(period)))) if quota.isdigit() else allowed


def available_memory() -> int:
    """Return the bytes of memory this process may use: the machine's, or its container's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _control_group(name: str) -> str:
    """Return a cgroup limit of the container of this process; empty if there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""

"""How many cores and how much memory this process may use; without torch, so that a launcher can
ask early."""

import os
from pathlib import Path


def available_cores() -> int:
    """Cores this process may use: its affinity, and the quota of its container."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _control_group("cpu.max").partition(" ")
    return min(allowed, max(1, round(int(quota) / int(period)))) if quota.isdigit() else allowed


def available_memory() -> int:
    """Bytes of memory this process may use: the machine's, or the limit of its container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _control_group("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _control_group(name: str) -> str:
    """A limit that Linux sets for the container this process runs in; empty where there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""

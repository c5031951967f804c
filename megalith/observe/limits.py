"""Number of cores and amount of memory that this process may use, and the name of its machine;
without torch, for launchers."""

import os
import socket
from collections.abc import Mapping
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


def free_memory() -> int:
    """Return the bytes of memory that are free or hold cached files: of the machine, or of the
    container of this process. Where the system does not report it (macOS), half of all memory."""
    total = available_memory()
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total // 2
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else total // 2
    used = _control_group("memory.current")
    if not used.isdigit():
        return free
    stats = dict(line.split() for line in _control_group("memory.stat").splitlines())
    file_pages = int(stats.get("inactive_file", 0)) + int(stats.get("active_file", 0))
    return max(0, min(free, total - int(used) + file_pages))


def _control_group(name: str) -> str:
    """Return a cgroup limit of the container of this process; empty if there is none."""
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


HOST = "MEGALITH_HOST"
"""Variable with the name of this machine in reports, where the host name is not that of the machine
but that of a container (launch/kubernetes.yaml)."""


def read_host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine as the user can exclude it from a job.

    >>> read_host_name({"MEGALITH_HOST": "node-7.example"})
    'node-7.example'
    """
    return environment.get(HOST) or socket.gethostname()

"""The process keeps freed memory where the C library supports it."""

import ctypes
import platform
import subprocess
import sys

import pytest

from megalith.kernels.cpu_threads import keep_freed_memory, return_freed_memory

FAULTS = """
import resource, sys, torch
from megalith.kernels.cpu_threads import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def step():
    torch.ones(10 << 20)  # 40 MiB: beyond the 32 MiB up to which glibc may keep blocks by itself
for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


RESIDENT = """
import torch
from pathlib import Path
from megalith.kernels.cpu_threads import keep_freed_memory, return_freed_memory
keep_freed_memory()
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20
blocks = [torch.ones(10 << 20) for _ in range(8)]
before = resident()
last = blocks.pop()
blocks.clear()
kept = before - resident()
assert return_freed_memory()
print(kept, before - resident())
"""


def page_faults(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_reused_without_page_faults() -> None:
    assert page_faults("keep") < 100 < page_faults("default")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the function")
def test_freed_memory_is_returned_on_request() -> None:
    command = [sys.executable, "-c", RESIDENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, returned = map(int, done.stdout.split())
    assert kept < 100 and returned > 260  # of 280 MiB


def test_other_c_libraries_are_not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False
    assert return_freed_memory() is False

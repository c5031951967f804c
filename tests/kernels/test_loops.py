"""Building blocks of the numba loops match torch: rounding, exp and maxima."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads

if cpu_threads.openmp() is None:
    pytest.skip(f"no OpenMP library to call on {sys.platform}", allow_module_level=True)

from numba import njit

from megalith.kernels import cpu_numba
from megalith.kernels.cpu_numba import address, exp, narrow, row_max, wide

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    3.4e38,
    -3.4e38,
    1e-40,
    float("inf"),
    float("-inf"),
    float("nan"),
    -float("nan"),
]


@njit  # type: ignore[untyped-decorator]  # numba's own
def _narrow_all(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = narrow(values[i], out)


@njit  # type: ignore[untyped-decorator]
def _wide_all(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = wide(values[i])


@njit  # type: ignore[untyped-decorator]
def _exp_all(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = exp(values[i])


def every_kind_of_number() -> Tensor:
    bits = torch.randint(
        -(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)
    ).int()
    # exactly between two bf16 numbers
    ties = (torch.arange(-300, 300, dtype=torch.int32) << 16) + 0x3F808000
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), torch.tensor(SPECIAL)])


def test_rounding_to_bf16_matches_torch() -> None:
    values = every_kind_of_number()
    out = np.empty(len(values), np.uint16)
    _narrow_all(values.numpy(), out)
    ours = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    expected = values.bfloat16()
    assert torch.equal(ours.isnan(), expected.isnan())
    rest = ~expected.isnan()
    assert torch.equal(ours.view(torch.int16)[rest], expected.view(torch.int16)[rest])


def test_bf16_is_read_exactly() -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = np.empty(len(values), np.float32)
    _wide_all(values.view(torch.int16).numpy().view(np.uint16), out)
    assert torch.equal(torch.from_numpy(out).nan_to_num(1.5), values.float().nan_to_num(1.5))


def test_exp_is_accurate_to_a_few_ulp() -> None:
    values = torch.linspace(-87, 88, 100_001)
    out = np.empty(len(values), np.float32)
    _exp_all(values.numpy(), out)
    exact = values.double().exp()
    error = (torch.from_numpy(out).double() - exact).abs() / exact
    assert bool((error <= 1.5e-7 + 4e-8 * values.abs()).all())


def test_exp_of_extremes_is_tiny_large_or_nan() -> None:
    out = np.empty(5, np.float32)
    _exp_all(np.array([-1e4, -np.inf, 1e4, np.inf, np.nan], np.float32), out)
    assert out[0] == out[1] < 2e-38
    assert 1e38 < out[2] == out[3] < np.inf
    assert np.isnan(out[4])


@pytest.mark.parametrize("length", [1, 5, 16, 33, 257])
def test_row_maximum_matches_torch(length: int) -> None:
    row = torch.randn(length, generator=torch.Generator().manual_seed(length))
    for values in (row, -row.abs(), row.abs(), torch.full_like(row, float("-inf"))):
        assert row_max(values.numpy()) == values.max().item()


def test_nan_propagates() -> None:
    row = torch.tensor([1.0, float("nan"), 3.0])
    assert np.isnan(row_max(row.numpy()))


def test_a_loop_is_compiled_once_per_dtype() -> None:
    assert address("swiglu", torch.float32) == address("swiglu", torch.float32)
    assert address("swiglu", torch.float32) != address("swiglu", torch.bfloat16)


def test_read_only_installation_compiles_without_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, kept = cpu_numba._compile, []

    def refuse_to_keep(loop: cpu_threads.Loop, dtype: torch.dtype, *, keep: bool) -> int:
        kept.append(keep)
        if keep:
            raise RuntimeError(
                "cannot cache function 'swiglu': no locator available for file 'loops.py'"
            )
        return real(loop, dtype, keep=False)

    monkeypatch.setattr(cpu_numba, "_compile", refuse_to_keep)
    assert address.__wrapped__("swiglu", torch.float32) != 0
    assert kept == [True, False]


def test_compilation_is_reported_only_with_a_cold_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    lines: list[str] = []
    with cpu_threads.CompilationProgress(lines.append):
        assert address.__wrapped__("swiglu", torch.float32) != 0
        assert lines == ["compiling CPU kernels (first run on this machine only)..."]
    with cpu_threads.CompilationProgress(lines.append):
        assert address.__wrapped__("swiglu", torch.float32) != 0
    assert len(lines) == 1 and list(tmp_path.rglob("*.nbc"))


def test_progress_of_compilation_is_reported_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    times = iter([100.0, 101.0, 106.0, 107.0, 112.5])
    monkeypatch.setattr(cpu_threads.time, "monotonic", lambda: next(times))
    with cpu_threads.CompilationProgress(lines.append):
        for _ in range(5):
            cpu_threads.report_compilation(cached=False)
    cpu_threads.report_compilation(cached=True)  # outside the block: not reported
    assert lines == [
        "compiling CPU kernels (in every run: numba has no folder to cache them in)...",
        "compiling CPU kernels: 2 done in 6 s",
        "compiling CPU kernels: 4 done in 12 s",
    ]


TWO_AT_ONCE = """
import sys, time
from pathlib import Path
import torch
from numba.core.caching import IndexDataCacheFile
from megalith.kernels import cpu_numba as loops
from megalith.kernels.activation import swiglu

folder, mine = Path(sys.argv[1]), sys.argv[2]
save_index, save_data = IndexDataCacheFile._save_index, IndexDataCacheFile._save_data

def tell(what):
    (folder / what).touch()

def wait_for(what):
    deadline = time.monotonic() + 60
    while not (folder / what).exists():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)

def index_in_turn(self, overloads):
    if mine == "bfloat16":
        tell("both have read the index")
        wait_for("float32 has its number")
        save_index(self, overloads)
    else:
        wait_for("both have read the index")
        save_index(self, overloads)
        tell("float32 has its number")

def data_in_turn(self, name, data):
    if mine == "float32":
        wait_for("bfloat16 has its code")
    save_data(self, name, data)
    tell(f"{mine} has its code")

IndexDataCacheFile._save_index, IndexDataCacheFile._save_data = index_in_turn, data_in_turn
loops.address("swiglu", getattr(torch, mine))
wait_for("float32 has its code")
loops.address.cache_clear()
x = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0)).to(getattr(torch, mine))[:2048]
torch.testing.assert_close(swiglu(x), swiglu(x, kernel="reference"))
"""
"""One of two processes that compile a loop for the first time, in the order in which they harm each
other most."""


@pytest.mark.slow
def test_concurrent_compilation_of_two_dtypes_keeps_both_in_the_cache(
    tmp_path: Path,
) -> None:
    signal_folder, cache_folder = tmp_path / "signals", tmp_path / "kept"
    signal_folder.mkdir()
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache_folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_AT_ONCE, str(signal_folder)]
    both = [
        subprocess.Popen(
            [*command, dtype],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for dtype in ("float32", "bfloat16")
    ]
    try:
        stderr_texts = [process.communicate(timeout=120)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], stderr_texts
    assert len(list(cache_folder.rglob("*.nbc"))) == 2

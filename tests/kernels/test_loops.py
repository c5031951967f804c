"""What the compiled loops are written with: rounding, exp and maxima that mean what torch's mean."""

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu

if cpu.openmp() is None:
    pytest.skip(f"no OpenMP library to call on {sys.platform}", allow_module_level=True)

from numba import njit

from megalith.kernels import loops
from megalith.kernels.loops import address, exp, largest_of, narrow, wide

SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.4e38, -3.4e38, 1e-40, float("inf"), float("-inf"), float("nan"), -float("nan")]


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
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)).int()
    ties = (torch.arange(-300, 300, dtype=torch.int32) << 16) + 0x3F808000  # exactly between two bf16 numbers
    return torch.cat([bits.view(torch.float32), ties.view(torch.float32), torch.tensor(SPECIAL)])


def test_rounding_to_bf16_is_that_of_torch() -> None:
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


def test_exp_is_right_to_a_few_units_in_the_last_place() -> None:
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
def test_the_largest_is_that_of_torch(length: int) -> None:
    row = torch.randn(length, generator=torch.Generator().manual_seed(length))
    for values in (row, -row.abs(), row.abs(), torch.full_like(row, float("-inf"))):
        assert largest_of(values.numpy()) == values.max().item()


def test_a_nan_is_never_overlooked() -> None:
    row = torch.tensor([1.0, float("nan"), 3.0])
    assert np.isnan(largest_of(row.numpy()))


def test_a_loop_is_compiled_once_per_dtype() -> None:
    assert address("swiglu", torch.float32) == address("swiglu", torch.float32)
    assert address("swiglu", torch.float32) != address("swiglu", torch.bfloat16)


def test_a_read_only_installation_compiles_without_keeping_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept = loops._compile, []

    def refuse_to_keep(loop: cpu.Loop, dtype: torch.dtype, *, keep: bool) -> int:
        kept.append(keep)
        if keep:
            raise RuntimeError("cannot cache function 'swiglu': no locator available for file 'loops.py'")
        return real(loop, dtype, keep=False)

    monkeypatch.setattr(loops, "_compile", refuse_to_keep)
    assert address.__wrapped__("swiglu", torch.float32) != 0
    assert kept == [True, False]

"""Small-batch matmuls match float64, do not depend on other rows, and are used only when selected;
their limits are measured once."""

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads, linear_small_batch, small_batch_limits
from megalith.kernels.grouped_linear import (
    SmallBatchMatmulOps,
    build_groups,
    grouped_linear,
    reference_grouped_linear,
    select_grouped_matmul_ops,
)
from megalith.kernels.linear import find_small_batch_kernel, forward, linear
from megalith.kernels.linear_small_batch import (
    ALL_ROW_COUNTS,
    NO_ROW_COUNTS,
    SmallBatchLimits,
    can_use,
    small_batch_grouped_linear,
    small_batch_linear,
    small_batch_matmul,
)
from megalith.kernels.small_batch_limits import (
    choose_limit,
    describe_limits,
    load_or_measure_limits,
    measure_limits,
)
from tests.cases import loop_over

if cpu_threads.openmp() is None:
    pytest.skip(f"no OpenMP library to call on {sys.platform}", allow_module_level=True)

# weights and inputs of each supported combination, and the largest error relative to the sum of the
# magnitudes of the products: fp32 sums; rounding of y to bf16
COMBINATIONS = {
    "fp32": (torch.float32, torch.float32, 1e-6),
    "bf16": (torch.bfloat16, torch.bfloat16, 2**-8),
    "int8": (torch.int8, torch.float32, 1e-6),
    "int8 of bf16": (torch.int8, torch.bfloat16, 2**-8),
}
SIZES = ((64, 96), (17, 70), (33, 1), (1, 31), (9, 515), (70, 7))
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33)


def build(kind: str, t: int, o: int, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
    w_dtype, x_dtype, _ = COMBINATIONS[kind]
    draw = torch.Generator().manual_seed(1000 * t + o + i)
    x = torch.randn(t, i, generator=draw).to(x_dtype)
    if w_dtype != torch.int8:
        return x, torch.randn(o, i, generator=draw).to(w_dtype), None
    w = torch.randint(-127, 128, (o, i), generator=draw, dtype=torch.int8)
    return x, w, torch.rand(o, generator=draw)


def assert_close_to_float64(y: Tensor, x: Tensor, w: Tensor, scales: Tensor | None) -> None:
    tolerance = 2**-8 if x.dtype == torch.bfloat16 else 1e-6
    factors = 1.0 if scales is None else scales.double()
    expected = x.double() @ w.double().t() * factors
    magnitude = x.double().abs() @ w.double().abs().t() * factors
    assert y.dtype == x.dtype and y.shape == expected.shape
    assert ((y.double() - expected).abs() <= tolerance * magnitude).all()


@pytest.mark.parametrize("kind", COMBINATIONS)
@loop_over("size", SIZES)
def test_kernel_matches_float64(kind: str, size: tuple[int, int]) -> None:
    for t in ROWS:
        x, w, scales = build(kind, t, *size)
        assert_close_to_float64(small_batch_linear(x, w, scales), x, w, scales)


@pytest.mark.parametrize("kind", COMBINATIONS)
@loop_over("size", SIZES)
def test_bits_of_a_row_do_not_depend_on_other_rows(kind: str, size: tuple[int, int]) -> None:
    x, w, scales = build(kind, 33, *size)
    alone = torch.cat([small_batch_linear(row, w, scales) for row in x.split(1)])
    for t in ROWS:
        for start in (0, 33 - t):
            part = small_batch_linear(x[start : start + t], w, scales)
            assert torch.equal(part, alone[start : start + t]), (t, start)


@pytest.mark.parametrize("kind", COMBINATIONS)
def test_bits_of_an_output_do_not_depend_on_the_number_of_outputs_and_threads(kind: str) -> None:
    x, w, scales = build(kind, 5, 700, 130)
    whole = small_batch_linear(x, w, scales)
    for first, last in ((0, 1), (3, 20), (690, 700)):
        some = None if scales is None else scales[first:last]
        assert torch.equal(small_batch_linear(x, w[first:last], some), whole[:, first:last])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(small_batch_linear(x, w, scales), whole), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", COMBINATIONS)
def test_strided_operands_match_contiguous_ones(kind: str) -> None:
    x, w, scales = build(kind, 6, 20, 50)
    expected = small_batch_linear(x, w, scales)
    spread_w = torch.zeros(20, 64, dtype=w.dtype)[:, 3:53].copy_(w)
    every_second = torch.zeros(6, 100, dtype=x.dtype)[:, ::2].copy_(x)
    transposed = x.t().contiguous().t()
    wide_rows = torch.zeros(6, 77, dtype=x.dtype)[:, 5:55].copy_(x)
    for strided in (every_second, transposed, wide_rows):
        assert torch.equal(small_batch_linear(strided, spread_w, scales), expected)
    one_row = x[:1].expand(6, -1)
    assert torch.equal(small_batch_linear(one_row, w, scales), expected[:1].expand(6, -1))


@pytest.mark.parametrize("kind", COMBINATIONS)
def test_nan_and_infinity_reach_their_row_only(kind: str) -> None:
    for t in (1, 3, 6):
        for bad in (float("nan"), float("inf")):
            x, w, scales = build(kind, t, 12, 40)
            clean = small_batch_linear(x, w, scales)
            x[t - 1, 39] = bad
            y = small_batch_linear(x, w, scales)
            assert torch.equal(y[: t - 1], clean[: t - 1])
            assert not y[t - 1][w[:, 39] != 0].isfinite().any()


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_nan_in_a_weight_row_reaches_its_output_only(kind: str) -> None:
    x, w, _ = build(kind, 6, 12, 40)
    w[7, 0] = float("nan")
    assert small_batch_linear(x, w).isnan().any(0).tolist() == [o == 7 for o in range(12)]


def test_empty_operands_give_empty_or_zero_outputs() -> None:
    assert small_batch_linear(torch.randn(0, 8), torch.randn(5, 8)).shape == (0, 5)
    assert small_batch_linear(torch.randn(3, 8), torch.randn(0, 8)).shape == (3, 0)
    assert torch.equal(small_batch_linear(torch.randn(3, 0), torch.randn(5, 0)), torch.zeros(3, 5))


@pytest.mark.parametrize("kind", COMBINATIONS)
@loop_over("counts", [(3, 0, 1, 5), (0, 0), (1,), (0, 17, 2), (4, 4, 4, 4)])
def test_grouped_kernel_equals_one_matmul_per_expert(kind: str, counts: tuple[int, ...]) -> None:
    x, w, scales = build(kind, sum(counts), 19 * len(counts), 45)
    y = small_batch_grouped_linear(x, w, counts, scales)
    each_scales = [None] * len(counts) if scales is None else scales.split(19)
    parts = zip(x.split(counts), w.split(19), each_scales, strict=True)
    expected = torch.cat([small_batch_linear(rows, w_e, s_e) for rows, w_e, s_e in parts])
    assert torch.equal(y, expected)


# --- selection


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of every call of the kernel."""
    calls: list[int] = []
    real = linear_small_batch._multiply

    def record(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        calls.append(x.shape[0])
        return real(x, *arguments, **options)

    monkeypatch.setattr(linear_small_batch, "_multiply", record)
    return calls


LIMITS = SmallBatchLimits(fp32=4, bf16=2, int8=8)


def test_linear_uses_the_kernel_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, w = count_calls(monkeypatch), torch.randn(6, 10)
    with torch.inference_mode():
        for t in (1, 4, 5):
            linear(torch.randn(t, 10), [w])
        assert calls == []
        with small_batch_matmul(LIMITS):
            for t in (1, 4, 5):
                linear(torch.randn(t, 10), [w])
                linear(torch.randn(t, 10).bfloat16(), [w.bfloat16()])
        assert calls == [1, 1, 4]
        with small_batch_matmul(ALL_ROW_COUNTS):
            linear(torch.randn(100, 10), [w])
        with small_batch_matmul(ALL_ROW_COUNTS), small_batch_matmul(NO_ROW_COUNTS):
            linear(torch.randn(1, 10), [w])
    assert calls == [1, 1, 4, 100]


def test_training_never_uses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x, w = count_calls(monkeypatch), torch.randn(2, 10), torch.randn(6, 10)
    with small_batch_matmul(ALL_ROW_COUNTS):
        linear(x, [w.requires_grad_()]).sum().backward()
        with torch.no_grad():
            linear(x, [w])
        groups = build_groups((1, 1))
        grouped_linear(x, torch.randn(6, 10).requires_grad_(), groups).sum().backward()
    assert calls == []


def test_kernel_rejects_unsupported_operands() -> None:
    x, w = torch.randn(2, 10), torch.randn(6, 10)
    with small_batch_matmul(ALL_ROW_COUNTS), torch.inference_mode():
        assert find_small_batch_kernel(x, w, 2) is not None
        assert find_small_batch_kernel(x, w.bfloat16(), 2) is None
        assert find_small_batch_kernel(x.double(), w.double(), 2) is None
        assert find_small_batch_kernel(x.half(), w.half(), 2) is None
        assert torch.equal(forward(x.double(), w.double()), x.double() @ w.double().t())
        columns = w.t().contiguous().t()
        assert not can_use(x, columns)
        torch.testing.assert_close(forward(x, columns), x @ w.t())
        with torch.inference_mode(False):
            assert find_small_batch_kernel(x, w, 2) is None
    with torch.inference_mode():
        assert find_small_batch_kernel(x, w, 2) is None


def test_experts_with_few_rows_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch)
    x, w = torch.randn(7, 32), torch.randn(3 * 16, 32)
    few, many = build_groups((4, 0, 3)), build_groups((5, 0, 2))
    with small_batch_matmul(LIMITS), torch.inference_mode():
        assert isinstance(select_grouped_matmul_ops(x, w, few), SmallBatchMatmulOps)
        assert not isinstance(select_grouped_matmul_ops(x, w, many), SmallBatchMatmulOps)
        y = grouped_linear(x, w, few)
    assert calls == [7]
    torch.testing.assert_close(y, reference_grouped_linear(x, w, few))


# --- limits


def test_limit_maximizes_the_mean_speedup() -> None:
    assert choose_limit({1: -0.1, 2: 0.2, 4: 0.5, 8: 0.3, 16: -0.1, 32: -0.4}) == 8
    assert choose_limit({1: -0.1, 2: -0.2, 4: -0.5}) == 0
    assert choose_limit({1: 0.5, 2: -0.1, 4: 0.5, 8: 0.5}) == 8
    assert choose_limit({}) == 0


def test_limits_are_measured_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_limits([(8, 8)], seconds=0.0)  # compiles the kernels
    start = time.perf_counter()
    limits = measure_limits([(128, 64)], seconds=0.05)
    # three dtypes with six row counts each; a busy machine may take several times as long
    assert time.perf_counter() - start < 2.0
    assert all(rows in (0, *small_batch_limits.MEASURED_ROWS) for rows in asdict(limits).values())


def measured(monkeypatch: pytest.MonkeyPatch, limits: SmallBatchLimits) -> list[int]:
    calls: list[int] = []

    def measure(shapes: Any, *, device: torch.device) -> SmallBatchLimits:
        calls.append(len(shapes))
        return limits

    monkeypatch.setattr(small_batch_limits, "measure_limits", measure)
    return calls


def test_limits_are_cached_by_shapes_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(monkeypatch, LIMITS)
    for _ in range(2):
        assert load_or_measure_limits([(8, 8), (16, 8)], folder=tmp_path) == LIMITS
    assert load_or_measure_limits([(16, 8), (8, 8), (8, 8)], folder=tmp_path) == LIMITS
    assert calls == [2]
    load_or_measure_limits([(8, 8)], folder=tmp_path)
    monkeypatch.setattr(small_batch_limits, "_cpu_model", lambda: "another CPU")
    load_or_measure_limits([(8, 8)], folder=tmp_path)
    monkeypatch.setattr(torch, "__version__", "another torch")
    load_or_measure_limits([(8, 8)], folder=tmp_path)
    assert calls == [2, 1, 1, 1]
    assert not list(tmp_path.glob("*.tmp*"))


DAMAGED: tuple[str, ...] = (
    *("", "{", "[]", "null", '{"fp32": 1}', '{"fp32": 1, "bf16": 2, "int8": "3"}'),
    *('{"fp32": -1, "bf16": 2, "int8": 3}', '{"fp32": 1, "bf16": 2, "int8": 3, "fp64": 4}'),
)


def test_damaged_cache_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(monkeypatch, LIMITS)
    load_or_measure_limits([(8, 8)], folder=tmp_path)
    (file,) = tmp_path.iterdir()
    for number, text in enumerate(DAMAGED):
        file.write_text(text)
        assert load_or_measure_limits([(8, 8)], folder=tmp_path) == LIMITS
        assert len(calls) == number + 2 and json.loads(file.read_text()) == asdict(LIMITS)


def test_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, LIMITS)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert load_or_measure_limits([(8, 8)], folder=blocked / "cache") == LIMITS


def test_concurrent_processes_agree_on_the_first_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, numbers = threading.Barrier(4), iter(range(1, 5))

    def measure(shapes: Any, *, device: torch.device) -> SmallBatchLimits:
        number = next(numbers)
        barrier.wait()  # all have read the empty cache
        return SmallBatchLimits(fp32=number, bf16=number, int8=number)

    monkeypatch.setattr(small_batch_limits, "measure_limits", measure)
    results: list[SmallBatchLimits] = []

    def load() -> None:
        results.append(load_or_measure_limits([(8, 8)], folder=tmp_path))

    threads = [threading.Thread(target=load) for _ in range(4)]
    run_all(threads)
    assert len(results) == 4 and len(set(results)) == 1
    assert not list(tmp_path.glob("*.tmp*"))


def run_all(threads: list[threading.Thread]) -> None:
    steps: tuple[Callable[[threading.Thread], None], ...] = (
        threading.Thread.start,
        threading.Thread.join,
    )
    for step in steps:
        for thread in threads:
            step(thread)


def test_limits_are_described() -> None:
    text = "small-batch matmul kernel: fp32 up to 4 rows, bf16 never, int8 up to 8 rows"
    assert describe_limits(SmallBatchLimits(fp32=4, bf16=0, int8=8)) == text

"""Triton small-batch matmuls match float64, do not depend on other rows, and are selected by
measured limits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.kernels import small_batch_limits
from megalith.kernels.linear import find_small_batch_kernel, linear
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
    NUM_TILES,
    choose_tile,
    describe_limits,
    load_or_measure_limits,
    measure_limits,
)
from megalith.testing.tiny import triton_device
from tests.kernels.triton_interpreter import patch_language_once, use_triton

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

# dtypes of weights and inputs, and the largest error relative to the sum of the magnitudes of the
# products: fp32 sums; rounding of y to bf16 (the interpreter truncates) and to fp16
COMBINATIONS = {
    "fp32": (torch.float32, torch.float32, 1e-6),
    "bf16": (torch.bfloat16, torch.bfloat16, 2**-7),
    "fp16": (torch.float16, torch.float16, 2**-10),
    "int8": (torch.int8, torch.float32, 1e-6),
    "int8 of bf16": (torch.int8, torch.bfloat16, 2**-7),
}


@pytest.fixture(autouse=True)
def select_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalith.kernels.triton import small_batch

    use_triton(monkeypatch)
    if DEVICE is not None and DEVICE.type == "cpu":
        patch_language_once(monkeypatch)
        monkeypatch.setattr(small_batch, "MIN_STEPS", 1)  # few inputs have several parts


def build(kind: str, t: int, o: int, i: int) -> tuple[Tensor, Tensor, Tensor | None]:
    w_dtype, x_dtype, _ = COMBINATIONS[kind]
    draw = torch.Generator().manual_seed(1000 * t + o + i)
    x = torch.randn(t, i, generator=draw).to(DEVICE, x_dtype)
    if w_dtype != torch.int8:
        return x, torch.randn(o, i, generator=draw).to(DEVICE, w_dtype), None
    w = torch.randint(-127, 128, (o, i), generator=draw, dtype=torch.int8).to(DEVICE)
    return x, w, (0.01 + torch.rand(o, generator=draw)).to(DEVICE)


def assert_close(kind: str, y: Tensor, x: Tensor, w: Tensor, scales: Tensor | None) -> None:
    factors = torch.ones(1, device=DEVICE) if scales is None else scales
    expected = x.double() @ w.double().t() * factors
    magnitude = x.double().abs() @ w.double().abs().t() * factors
    assert y.dtype == x.dtype and y.shape == expected.shape
    assert ((y.double() - expected).abs() <= COMBINATIONS[kind][2] * magnitude).all()


SIZES = [(1, 65, 300), (5, 64, 129), (17, 33, 1), (33, 70, 257)]
"""Rows, outputs and inputs; several tiles, parts of inputs, and groups of rows."""


@pytest.mark.parametrize("kind", COMBINATIONS)
@pytest.mark.parametrize("size", SIZES)
def test_matmul_matches_float64(kind: str, size: tuple[int, int, int]) -> None:
    x, w, scales = build(kind, *size)
    assert_close(kind, small_batch_linear(x, w, scales), x, w, scales)


@pytest.mark.parametrize("tile", range(1, 4))
def test_every_tile_size_matches_float64(tile: int) -> None:
    x, w, scales = build("int8", 3, 40, 600)
    assert_close("int8", small_batch_linear(x, w, scales, tile=tile), x, w, scales)


@pytest.mark.parametrize("kind", ["fp32", "int8 of bf16"])
def test_bits_of_a_row_do_not_depend_on_other_rows(kind: str) -> None:
    x, w, scales = build(kind, 33, 20, 300)
    whole = small_batch_linear(x, w, scales)
    for t in (1, 5, 17):
        for start in (0, 33 - t):
            part = small_batch_linear(x[start : start + t], w, scales)
            assert torch.equal(part, whole[start : start + t]), (t, start)


def test_strided_operands_match_contiguous_ones() -> None:
    x, w, scales = build("int8", 4, 20, 50)
    expected = small_batch_linear(x, w, scales)
    spread_w = torch.zeros(20, 64, dtype=w.dtype, device=DEVICE)[:, 3:53].copy_(w)
    wide_rows = torch.zeros(4, 77, device=DEVICE)[:, 5:55].copy_(x)
    for strided in (x.t().contiguous().t(), wide_rows, torch.zeros(4, 100)[:, ::2].to(x).copy_(x)):
        assert torch.equal(small_batch_linear(strided, spread_w, scales), expected)


def test_nan_reaches_its_row_and_its_output_only() -> None:
    x, w, _ = build("fp32", 3, 12, 40)
    clean = small_batch_linear(x, w)
    x[1, 39] = float("nan")
    y = small_batch_linear(x, w)
    assert torch.equal(y[::2], clean[::2]) and y[1].isnan().all()
    x, w, _ = build("fp32", 3, 12, 40)
    w[7, 0] = float("nan")
    assert small_batch_linear(x, w).isnan().any(0).tolist() == [o == 7 for o in range(12)]


@pytest.mark.parametrize("kind", ["fp32", "int8 of bf16"])
@pytest.mark.parametrize("counts", [(3, 0, 1, 5), (0, 17, 2), (1,), (0, 0)])
def test_grouped_matmul_equals_one_matmul_per_expert(kind: str, counts: tuple[int, ...]) -> None:
    x, w, scales = build(kind, sum(counts), 19 * len(counts), 300)
    y = small_batch_grouped_linear(x, w, counts, scales)
    each_scales = [None] * len(counts) if scales is None else scales.split(19)
    parts = zip(x.split(counts), w.split(19), each_scales, strict=True)
    expected = torch.cat([small_batch_linear(rows, w_e, s_e) for rows, w_e, s_e in parts])
    assert torch.equal(y, expected)


if DEVICE.type == "cuda":

    @pytest.mark.parametrize("kind", COMBINATIONS)
    @pytest.mark.parametrize("shape", [(4096, 4096), (14336, 4096), (1000, 14336)])
    def test_sizes_of_models_match_float64(kind: str, shape: tuple[int, int]) -> None:
        x, w, scales = build(kind, 32, *shape)
        for tile in range(NUM_TILES):
            whole = small_batch_linear(x, w, scales, tile=tile)
            assert_close(kind, whole, x, w, scales)
            for t in (1, 3, 16, 17):
                part = small_batch_linear(x[:t], w, scales, tile=tile)
                assert torch.equal(part, whole[:t]), t


def test_parts_of_the_inputs_depend_on_the_matrix_only() -> None:
    from megalith.kernels.triton.small_batch import TILES, divide_inputs

    assert len(TILES) == NUM_TILES
    for outputs in (1, 100, 5000, 100_000):
        for inputs in (1, 128, 1000, 14336):
            parts, steps = divide_inputs(outputs, inputs, 64, 128)
            assert 1 <= parts <= 16
            assert (parts - 1) * steps * 128 < inputs <= parts * steps * 128


def test_linear_uses_the_kernel_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalith.kernels.triton import small_batch

    calls: list[tuple[int, int]] = []
    multiply = small_batch.multiply

    def record(x: Tensor, w: Tensor, scales: object, counts: object, tile: int) -> Tensor:
        calls.append((x.shape[0], tile))
        return multiply(x, w, None, None, tile)

    monkeypatch.setattr(small_batch, "multiply", record)
    x, w, _ = build("fp16", 5, 6, 10)
    limits = SmallBatchLimits(fp32=0, bf16=0, int8=0, fp16=4, tile=2)
    with torch.inference_mode(), small_batch_matmul(limits):
        for t in (1, 4, 5):
            linear(x[:t], [w])
        assert find_small_batch_kernel(x.float(), w.float(), 1) is None
        with small_batch_matmul(ALL_ROW_COUNTS):
            assert find_small_batch_kernel(x.float(), w.float(), 1000) is not None
            assert find_small_batch_kernel(x.double(), w.double(), 1) is None
            assert not can_use(x, w.t().contiguous().t())
    assert calls == [(1, 2), (4, 2)]


SMALL_SIZES = small_batch_limits.DeviceSizes(((8, 16),), 1 << 10, 1 << 10, 2)


def test_tile_size_and_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DEVICE is not None
    monkeypatch.setattr(small_batch_limits, "_sizes", lambda _: SMALL_SIZES)
    monkeypatch.setattr(small_batch_limits, "MEASURED_ROWS", (1, 17))
    tiles: list[int] = []
    real = small_batch_linear

    def record(x: Tensor, w: Tensor, scales: Tensor | None = None, *, tile: int = 0) -> Tensor:
        tiles.append(tile)
        return real(x, w, scales, tile=tile)

    monkeypatch.setattr(small_batch_limits, "small_batch_linear", record)
    assert choose_tile([(8, 16)], 0.0, DEVICE) in range(NUM_TILES)
    assert set(tiles) == set(range(NUM_TILES))
    limits = measure_limits(seconds=0.0, device=DEVICE)
    assert {limits.fp32, limits.bf16, limits.int8, limits.fp16} <= {0, 1, 17}


def test_limits_of_a_gpu_are_cached_with_its_tile_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, limits = torch.device("cuda"), SmallBatchLimits(fp32=1, bf16=2, int8=3, fp16=4, tile=3)
    measured: list[object] = []

    def measure(shapes: object, *, device: torch.device) -> SmallBatchLimits:
        measured.append(shapes)
        return limits

    monkeypatch.setattr(small_batch_limits, "_machine_parts", lambda device: [device.type])
    monkeypatch.setattr(small_batch_limits, "measure_limits", measure)
    monkeypatch.setattr(small_batch_limits, "_is_supported", lambda _: False)
    assert load_or_measure_limits(folder=tmp_path, device=gpu) == NO_ROW_COUNTS
    monkeypatch.setattr(small_batch_limits, "_is_supported", lambda _: True)
    for _ in range(2):
        assert load_or_measure_limits(folder=tmp_path, device=gpu) == limits
    assert measured == [small_batch_limits.GPU_SIZES.shapes]
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"tile": 3', '"tile": 4'))
    assert load_or_measure_limits(folder=tmp_path, device=gpu) == limits
    assert len(measured) == 2 and '"tile": 3' in file.read_text()
    assert "int8 up to 3 rows, fp16 up to 4 rows" in describe_limits(limits)

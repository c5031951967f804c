"""Weight-only int8 against the dequantized weights."""

import pytest
import torch

from megalith.kernels.grouped_linear import Groups, reference_grouped_linear
from megalith.kernels.linear_small_batch import (
    ALL_ROW_COUNTS,
    NO_ROW_COUNTS,
    SmallBatchLimits,
    small_batch_matmul,
)
from megalith.precision.int8 import (
    Int8GroupedMatmulOps,
    Int8MatmulOps,
    dequantize_int8,
    quantize_int8,
)


def test_quantization_error_is_at_most_half_a_step_of_each_channel() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(9, 33, generator=generator) * 10.0 ** torch.randint(
            -6, 6, (9, 1), generator=generator
        )
        weight[3] = 0.0
        quantized = quantize_int8(weight)
        error = (dequantize_int8(quantized, torch.float64) - weight.double()).abs()
        assert (error <= quantized.scales.double()[:, None] * (0.5 + 1e-5)).all(), seed
        assert int(quantized.values.abs().amax()) == 127, seed
        assert not dequantize_int8(quantized)[3].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_rejected(value: float) -> None:
    with pytest.raises(ValueError, match="a value is NaN or infinite"):
        quantize_int8(torch.tensor([[1.0, value]]))


@pytest.mark.parametrize("limits", [ALL_ROW_COUNTS, NO_ROW_COUNTS], ids=["kernel", "torch"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
def test_matmuls_equal_those_of_the_dequantized_weight(
    limits: SmallBatchLimits, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    quantized = quantize_int8(torch.randn(70, 33, generator=generator))
    ops, grouped_ops = Int8MatmulOps(), Int8GroupedMatmulOps()
    ops.scales = grouped_ops.scales = quantized.scales
    weight = dequantize_int8(quantized, torch.float64)
    for rows in (0, 1, 7, 40):
        x = torch.randn(rows, 33, generator=generator, dtype=torch.float64).to(dtype)
        groups = Groups((rows // 2, rows - rows // 2))
        with torch.inference_mode(), small_batch_matmul(limits):
            y = ops.forward(x, quantized.values)
            grouped_y = grouped_ops.forward(x, quantized.values, groups)
        torch.testing.assert_close(
            y.double(), x.double() @ weight.T, atol=tolerance, rtol=tolerance
        )
        expected = reference_grouped_linear(x.double(), weight, groups)
        torch.testing.assert_close(grouped_y.double(), expected, atol=tolerance, rtol=tolerance)


def test_converting_a_part_of_the_rows_at_a_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized = quantize_int8(torch.randn(70, 33, generator=torch.Generator().manual_seed(2)))
    ops = Int8MatmulOps()
    ops.scales = quantized.scales
    x = torch.randn(40, 33, dtype=torch.float64)
    expected = ops.forward(x, quantized.values)
    monkeypatch.setattr("megalith.precision.int8.MAX_DEQUANTIZED_ELEMENTS", 40)
    torch.testing.assert_close(ops.forward(x, quantized.values), expected, atol=1e-12, rtol=1e-12)

"""Norms: gradients, rounding as published weights expect, and saved tensors."""

from functools import partial

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.kernels.norm import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    reference_add_layer_norm,
    reference_add_rms_norm,
    reference_layer_norm,
    reference_rms_norm,
    rms_norm,
)

EPS = 1e-5


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def wants(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return seeded(*shape, seed=seed, dtype=dtype).requires_grad_()


def test_gradients_match_finite_differences() -> None:
    x, residual, weight = wants(5, 7), wants(5, 7, seed=1), wants(7, seed=2)
    assert torch.autograd.gradcheck(partial(rms_norm, eps=EPS), (x, weight))
    assert torch.autograd.gradcheck(partial(add_rms_norm, eps=EPS), (x, residual, weight))


def test_equals_torch() -> None:
    x, weight = seeded(5, 7), seeded(7, seed=1)
    torch.testing.assert_close(
        rms_norm(x, weight, EPS), torch.nn.functional.rms_norm(x, (7,), weight, EPS)
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("h", [7, 64, 129])
def test_result_and_gradients_equal_the_reference(
    dtype: torch.dtype, tolerance: float, h: int
) -> None:
    inputs = [wants(33, h, dtype=dtype), wants(h, seed=1, dtype=dtype)]
    dy = seeded(33, h, seed=2, dtype=dtype)
    y, expected = rms_norm(inputs[0], inputs[1], EPS), reference_rms_norm(inputs[0], inputs[1], EPS)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    for actual, reference in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    ):
        assert actual.dtype == dtype
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_all_backends_match_the_reference(
    dtype: torch.dtype, tolerance: float, kernel: Kernel
) -> None:
    t, h = 211, 97  # large enough for the compiled loops
    x, residual, weight = (
        wants(t, h, dtype=dtype),
        wants(t, h, seed=1, dtype=dtype),
        wants(h, seed=2, dtype=dtype),
    )
    dys = [seeded(t, h, seed=3, dtype=dtype), seeded(t, h, seed=4, dtype=dtype)]
    ours = add_rms_norm(x, residual, weight, EPS, kernel=kernel)
    expected = add_rms_norm(x, residual, weight, EPS, kernel="reference")
    actual = [*ours, *torch.autograd.grad(ours, (x, residual, weight), dys)]
    reference = [*expected, *torch.autograd.grad(expected, (x, residual, weight), dys)]
    actual.append(torch.autograd.grad(rms_norm(x, weight, EPS, kernel=kernel), x, dys[0])[0])
    reference.append(torch.autograd.grad(reference_rms_norm(x, weight, EPS), x, dys[0])[0])
    for a, b in zip(actual, reference):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_strided_rows_match_contiguous_rows(kernel: Kernel) -> None:
    wide, weight = wants(211, 194, dtype=torch.float32), wants(97, dtype=torch.float32)
    x, dy = wide[:, 1::2], seeded(97, 211, seed=1, dtype=torch.float32).t()
    (actual,) = torch.autograd.grad(rms_norm(x, weight, EPS, kernel=kernel), wide, dy)
    (reference,) = torch.autograd.grad(reference_rms_norm(x, weight, EPS), wide, dy)
    torch.testing.assert_close(actual, reference)


def test_fp32_weight_keeps_bf16_activations_in_bf16() -> None:
    x, weight = seeded(211, 97, dtype=torch.bfloat16), seeded(97, seed=1, dtype=torch.float32)
    y = rms_norm(x, weight, EPS)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, reference_rms_norm(x, weight, EPS))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_nan_affects_only_its_row(kernel: Kernel) -> None:
    x = seeded(211, 97, dtype=torch.float32)
    x[5, 7] = float("nan")
    bad = rms_norm(x, torch.ones(97), EPS, kernel=kernel).isnan()
    assert bool(bad[5].all())
    assert int(bad.sum()) == 97


@pytest.mark.parametrize("t", [64, 1024])
def test_normalized_row_is_rounded_before_the_weight_is_applied(t: int) -> None:
    x, weight = seeded(t, 32, dtype=torch.bfloat16), seeded(32, seed=1, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    rounded_twice = wide.bfloat16() * weight
    rounded_once = (wide * weight.float()).bfloat16()
    assert not torch.equal(rounded_twice, rounded_once)
    # sums in another order: a rare last bit
    assert (rms_norm(x, weight, EPS) != rounded_twice).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_residual_norm_matches_separate_operations(dtype: torch.dtype) -> None:
    inputs = [
        wants(9, 16, dtype=dtype),
        wants(9, 16, seed=1, dtype=dtype),
        wants(16, seed=2, dtype=dtype),
    ]
    dys = [seeded(9, 16, seed=3, dtype=dtype), seeded(9, 16, seed=4, dtype=dtype)]
    x, residual, weight = inputs
    ours, expected = (
        add_rms_norm(x, residual, weight, EPS),
        reference_add_rms_norm(x, residual, weight, EPS),
    )
    for actual, reference in zip(ours, expected):
        torch.testing.assert_close(actual, reference)
    tolerance = {torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    for actual, reference in zip(
        torch.autograd.grad(ours, inputs, dys), torch.autograd.grad(expected, inputs, dys)
    ):
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


def test_backward_saves_x_and_one_number_per_row() -> None:
    x, weight, kept = wants(9, 16, dtype=torch.float32), wants(16, dtype=torch.float32), []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        rms_norm(x, weight, EPS)
    assert sorted(saved.numel() for saved in kept) == [9, 16, 9 * 16]


def test_inputs_are_not_modified() -> None:
    x, weight, dy = wants(9, 16), wants(16, seed=1), seeded(9, 16, seed=2)
    copies = [a.detach().clone() for a in (x, weight, dy)]
    torch.autograd.grad(rms_norm(x, weight, EPS), (x, weight), dy)
    assert all(torch.equal(a, b) for a, b in zip((x, weight, dy), copies))


def test_rows_of_zeros_stay_finite() -> None:
    x, weight = torch.zeros(2, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = rms_norm(x, weight, EPS)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_shapes_on_meta_device() -> None:
    x = torch.empty(5, 8, device="meta", requires_grad=True)
    weight = torch.empty(8, device="meta", requires_grad=True)
    total, y = add_rms_norm(x, rms_norm(x, weight, EPS), weight, EPS)
    assert total.shape == y.shape == (5, 8)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (8,)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_zero_centered_weight_adds_one_under_every_backend(
    dtype: torch.dtype, tolerance: float, kernel: Kernel
) -> None:
    t, h = 211, 97
    x, residual, weight = (
        wants(t, h, dtype=dtype),
        wants(t, h, seed=1, dtype=dtype),
        wants(h, seed=2, dtype=dtype),
    )
    dys = [seeded(t, h, seed=3, dtype=dtype), seeded(t, h, seed=4, dtype=dtype)]
    ours, expected = (
        add_rms_norm(x, residual, weight, EPS, zero_centered=True, kernel=each)
        for each in (kernel, "reference")
    )
    for a, b in zip(ours, expected):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    pairs = (torch.autograd.grad(each, (x, residual, weight), dys) for each in (ours, expected))
    for a, b in zip(*pairs):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("t", [64, 1024])
def test_zero_centered_norm_rounds_once_like_gemma(t: int) -> None:
    x, weight = seeded(t, 32, dtype=torch.bfloat16), seeded(32, seed=1, dtype=torch.bfloat16)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    expected = (wide * (1.0 + weight.float())).bfloat16()
    rounded_twice = (wide.bfloat16() * (1.0 + weight)).bfloat16()
    result = rms_norm(x, weight, EPS, zero_centered=True)
    assert (result != expected).float().mean() < 1e-3 < (rounded_twice != expected).float().mean()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_of_every_norm_match_finite_differences(zero_centered: bool) -> None:
    x, residual, weight, bias = wants(5, 7), wants(5, 7, seed=1), wants(7, seed=2), wants(7, seed=3)
    rms, layer, add = (
        partial(each, eps=EPS, zero_centered=zero_centered)
        for each in (rms_norm, layer_norm, add_layer_norm)
    )
    assert torch.autograd.gradcheck(rms, (x, weight))
    assert torch.autograd.gradcheck(layer, (x, weight, bias))
    assert torch.autograd.gradcheck(add, (x, residual, weight, bias))


def test_layer_norm_equals_torch() -> None:
    x, weight, bias = seeded(5, 7), seeded(7, seed=1), seeded(7, seed=2)
    expected = torch.nn.functional.layer_norm(x, (7,), weight, bias, EPS)
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), expected)
    torch.testing.assert_close(layer_norm(x, weight - 1, bias, EPS, zero_centered=True), expected)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layer_norm_and_its_gradients_equal_the_reference(
    dtype: torch.dtype, tolerance: float, zero_centered: bool
) -> None:
    x, residual = wants(33, 65, dtype=dtype), wants(33, 65, seed=1, dtype=dtype)
    weight, bias = wants(65, seed=2, dtype=dtype), wants(65, seed=3, dtype=dtype)
    dys = [seeded(33, 65, seed=4, dtype=dtype), seeded(33, 65, seed=5, dtype=dtype)]
    ours = add_layer_norm(x, residual, weight, bias, EPS, zero_centered=zero_centered)
    expected = reference_add_layer_norm(x, residual, weight, bias, EPS, zero_centered=zero_centered)
    alone = layer_norm(x, weight, bias, EPS, zero_centered=zero_centered)
    alone_expected = reference_layer_norm(x, weight, bias, EPS, zero_centered=zero_centered)
    inputs = [x, residual, weight, bias]
    actual = [
        *ours,
        alone,
        *torch.autograd.grad(ours, inputs, dys),
        *torch.autograd.grad(alone, [x], dys[:1]),
    ]
    reference = [*expected, alone_expected, *torch.autograd.grad(expected, inputs, dys)]
    reference += torch.autograd.grad(alone_expected, [x], dys[:1])
    for a, b in zip(actual, reference, strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def test_layer_norm_saves_x_and_two_fp32_numbers_per_row() -> None:
    x, weight, bias = (wants(*shape, dtype=torch.bfloat16) for shape in ((9, 16), (16,), (16,)))
    kept: list[Tensor] = []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        layer_norm(x, weight, bias, EPS)
    assert sorted((saved.numel(), saved.dtype.itemsize) for saved in kept) == [
        (9, 4),
        (9, 4),
        (16, 2),
        (9 * 16, 2),
    ]


def test_layer_norm_does_not_modify_inputs_or_gradients() -> None:
    x, residual, weight, bias = (
        wants(9, 16),
        wants(9, 16, seed=1),
        wants(16, seed=2),
        wants(16, seed=3),
    )
    dys = seeded(9, 16, seed=4), seeded(9, 16, seed=5)
    copies = [a.detach().clone() for a in (x, residual, weight, bias, *dys)]
    torch.autograd.grad(
        add_layer_norm(x, residual, weight, bias, EPS), (x, residual, weight, bias), dys
    )
    assert all(torch.equal(a, b) for a, b in zip((x, residual, weight, bias, *dys), copies))


def test_layer_norm_of_strided_rows_and_meta_tensors() -> None:
    weight, bias = seeded(5, seed=1), seeded(5, seed=2)
    x = wants(5, 9)
    (actual,) = torch.autograd.grad(
        layer_norm(x.t(), weight, bias, EPS), x, seeded(5, 9, seed=3).t()
    )
    (reference,) = torch.autograd.grad(
        reference_layer_norm(x.t(), weight, bias, EPS), x, seeded(5, 9, seed=3).t()
    )
    torch.testing.assert_close(actual, reference)
    meta = torch.empty(9, 5, device="meta", requires_grad=True)
    total, y = add_layer_norm(meta, meta, weight.float().to("meta"), bias.float().to("meta"), EPS)
    y.sum().backward()
    assert total.shape == y.shape == (9, 5)


def test_layer_norms_weight_gradients_are_summed_in_fp32() -> None:
    x, weight, bias = (
        seeded(*shape).bfloat16().requires_grad_() for shape in ((1000, 40), (40,), (40,))
    )
    dy = seeded(1000, 40, seed=1).bfloat16()
    actual = torch.autograd.grad(layer_norm(x, weight, bias, 1e-5), (weight, bias), dy)
    x, weight, bias = (each.detach().double().requires_grad_() for each in (x, weight, bias))
    reference = torch.autograd.grad(
        reference_layer_norm(x, weight, bias, 1e-5), (weight, bias), dy.double()
    )
    for a, b in zip(actual, reference, strict=True):
        assert (a - b).abs().max() <= 5e-3 * b.abs().max(), "rounded once, at the end"

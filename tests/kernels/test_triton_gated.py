"""Triton kernels of gated and weighted activations match their references, including gradients."""

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from megalith.config.model import Activation
from megalith.kernels.activation import (
    SIGMOIDS,
    GatedActivation,
    gated,
    reference_gated,
    reference_swiglu,
    reference_weighted_activate,
    reference_weighted_gated,
    swiglu,
    weighted_activate,
    weighted_gated,
)
from megalith.kernels.triton import launch
from megalith.testing.tiny import triton_device

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCES = [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GATES = [
    *(GatedActivation(name) for name in ACTIVATIONS),
    GatedActivation("quick_gelu", clamp=1.2, up_offset=1.0),
]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the programs would not be asked."""
    monkeypatch.setattr(launch, "can_use", lambda *tensors: True)
    monkeypatch.setattr("megalith.kernels.cpu_threads.should_use", lambda *tensors: False)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * x).to(DEVICE, dtype).requires_grad_()


def same(mine: Tensor, theirs: Tensor, inputs: tuple[Tensor, ...], tolerance: float) -> None:
    dy = seeded(*mine.shape, seed=9, dtype=mine.dtype).detach()
    pairs = zip(
        (mine, *torch.autograd.grad(mine, inputs, dy)),
        (theirs, *torch.autograd.grad(theirs, inputs, dy)),
        strict=True,
    )
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("gate", GATES)
def test_gates_equal_the_reference(
    gate: GatedActivation, dtype: torch.dtype, tolerance: float
) -> None:
    x = seeded(23, 2 * 131, dtype=dtype)
    same(gated(x, gate), reference_gated(x, gate), (x,), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_swiglu_of_wide_and_strided_rows_equals_the_reference(
    dtype: torch.dtype, tolerance: float
) -> None:
    x = seeded(7, 2 * 2500, dtype=dtype)
    for given in (x, x[::2], x[:, ::5]):
        same(swiglu(given), reference_swiglu(given.double()).to(dtype), (x,), 2 * tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("gate", GATES[-3:])
def test_weighted_gates_equal_the_reference(
    gate: GatedActivation, dtype: torch.dtype, tolerance: float
) -> None:
    x, w = seeded(23, 2 * 131, dtype=dtype), seeded(23, seed=1)
    same(weighted_gated(x, w, gate), reference_weighted_gated(x, w, gate), (x, w), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("activation", ["squared_relu", "gelu"])
def test_weighted_activations_equal_the_reference(
    activation: Activation, dtype: torch.dtype, tolerance: float
) -> None:
    x, w = seeded(5, 2500, dtype=dtype), seeded(5, seed=1, dtype=dtype)
    actual, reference = (
        weighted_activate(x, w, activation),
        reference_weighted_activate(x, w, activation),
    )
    same(actual, reference, (x, w), tolerance)


def test_activation_constants_match_the_numba_loops() -> None:
    from megalith.kernels.triton.layers import CUBES

    assert {name: pytest.approx(numbers, rel=1e-9) for name, numbers in SIGMOIDS.items()} == CUBES


def test_large_gates_neither_overflow_nor_lose_a_nan() -> None:
    row = torch.tensor(
        [[-1e30, -1e4, 1e4, 1e30, math.nan, *([1.0] * 5)]], device=DEVICE
    ).requires_grad_()
    for name in SIGMOIDS:
        y = gated(row, GatedActivation(name))
        torch.testing.assert_close(y[0, :4], row[0, :4].clamp(min=0))
        (grad,) = torch.autograd.grad(y.sum(), row)
        torch.testing.assert_close(grad[0, :4], torch.tensor([0.0, 0.0, 1.0, 1.0], device=DEVICE))
        assert y[0, 4].isnan() and grad[0, 4].isnan()

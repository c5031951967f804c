"""Triton norms match their references, including gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
from megalith.kernels.triton import launch
from megalith.testing.tiny import triton_device

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

TOLERANCES = [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)]
ADDED: dict[
    str, tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Tensor, Tensor]]]
] = {
    "rms": (add_rms_norm, reference_add_rms_norm),
    "layer": (add_layer_norm, reference_add_layer_norm),
}
ALONE: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "rms": (rms_norm, reference_rms_norm),
    "layer": (layer_norm, reference_layer_norm),
}
# several rows in one program, and odd, wide and single ones
SHAPES = [
    (37, 131),
    (3, 2100),
    (1, 3),
]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the programs would not be asked."""
    monkeypatch.setattr(launch, "can_use", lambda *tensors: True)
    monkeypatch.setattr("megalith.kernels.cpu_threads.should_use", lambda *tensors: False)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype).requires_grad_()


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert mine.dtype == theirs.dtype
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_after_an_addition_equals_the_reference(
    kind: str, zero_centered: bool, shape: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    x, residual = seeded(*shape, dtype=dtype), seeded(*shape, seed=1, dtype=dtype)
    affine = [seeded(shape[1], seed=2 + i, dtype=dtype) for i in range(1 if kind == "rms" else 2)]
    actual, reference = (
        f(x, residual, *affine, 1e-5, zero_centered=zero_centered) for f in ADDED[kind]
    )
    douts = [seeded(*shape, seed=5 + i, dtype=dtype).detach() for i in range(2)]
    for a, b in zip(actual, reference, strict=True):
        close(a, b, tolerance)
    inputs = x, residual, *affine
    for a, b in zip(
        torch.autograd.grad(actual, inputs, douts),
        torch.autograd.grad(reference, inputs, douts),
        strict=True,
    ):
        close(a, b, 2 * tolerance)


def test_one_norm_alone_takes_strided_rows_and_many_of_them() -> None:
    x, weight, bias = seeded(20, 600), seeded(100, seed=1), seeded(100, seed=2)
    rows = x.view(20, 6, 100)[:, 1::2].flatten(0, 1)
    strided = x.t()[:100]
    for given in (rows, strided[:, ::2].t()):
        for (ours, plain), affine in ((ALONE["rms"], [weight]), (ALONE["layer"], [weight, bias])):
            actual, reference = (norm(given, *affine, 1e-6) for norm in (ours, plain))
            close(actual, reference, 3e-6)
            dy = seeded(*actual.shape, seed=3).detach()
            for a, b in zip(
                torch.autograd.grad(actual, (x, *affine), dy),
                torch.autograd.grad(reference, (x, *affine), dy),
            ):
                close(a, b, 1e-5)


def test_partial_sums_of_the_weight_gradient_cover_every_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megalith.kernels.triton.layers.PROGRAMS", 3)
    x, weight = seeded(151, 100), seeded(100, seed=1)
    grads = [
        torch.autograd.grad(rms_norm(x, weight, 1e-6, kernel=kernel).square().sum(), (x, weight))
        for kernel in ("auto", "reference")
    ]
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-5)


def test_residual_stream_of_a_wider_dtype_keeps_its_dtype() -> None:
    x, residual, weight = (
        seeded(3, 40, dtype=torch.bfloat16),
        seeded(3, 40, seed=1),
        seeded(40, seed=2),
    )
    (actual, _), (reference, _) = (
        add_rms_norm(x, residual, weight, 1e-5),
        reference_add_rms_norm(x, residual, weight, 1e-5),
    )
    assert actual.dtype == reference.dtype == torch.float32
    assert torch.equal(actual, reference)

"""Weighted activations: the activation times a weight, and gradients of both."""

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.config.model import Activation
from megalith.kernels.activation import (
    SIGMOIDS,
    GatedActivation,
    activate,
    gated,
    reference_weighted_activate,
    reference_weighted_gated,
    weighted_activate,
    weighted_gated,
)

GATES = [
    GatedActivation("silu"),
    GatedActivation("gelu_tanh"),
    GatedActivation("quick_gelu", clamp=2.0, up_offset=1.0),
    GatedActivation("gelu", clamp=1.5),
]
TOLERANCES = [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert mine.dtype == theirs.dtype
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_weighted_gates_match_finite_differences(gate: GatedActivation) -> None:
    inputs = seeded(5, 6).requires_grad_(), seeded(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: weighted_gated(x, w, gate), inputs)


def test_gradients_of_a_weighted_activation_match_finite_differences() -> None:
    inputs = seeded(5, 6).requires_grad_(), seeded(5, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: weighted_activate(x, w, "squared_relu"), inputs)
    assert torch.autograd.gradcheck(lambda x, w: weighted_activate(x, w, "gelu"), inputs)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("wide_weights", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("gate", GATES)
def test_weighted_gates_equal_the_reference(
    gate: GatedActivation, dtype: torch.dtype, tolerance: float, wide_weights: bool, kernel: Kernel
) -> None:
    x, dy = (
        seeded(67, 2 * 131, dtype=dtype).mul_(3).requires_grad_(),
        seeded(67, 131, seed=1, dtype=dtype),
    )
    w = seeded(
        67, seed=2, dtype=torch.promote_types(dtype, torch.float32) if wide_weights else dtype
    ).requires_grad_()
    expected, y = reference_weighted_gated(x, w, gate), weighted_gated(x, w, gate, kernel=kernel)
    close(y, expected, tolerance)
    for actual, reference in zip(
        torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True
    ):
        close(actual, reference, tolerance)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("activation", ["squared_relu", "silu"])
def test_weighted_activations_equal_the_reference(
    activation: Activation, dtype: torch.dtype, tolerance: float, kernel: Kernel
) -> None:
    x, dy = seeded(67, 131, dtype=dtype).requires_grad_(), seeded(67, 131, seed=1, dtype=dtype)
    w = seeded(67, seed=2, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    expected, y = (
        reference_weighted_activate(x, w, activation),
        weighted_activate(x, w, activation, kernel=kernel),
    )
    close(y, expected, tolerance)
    for actual, reference in zip(
        torch.autograd.grad(y, (x, w), dy), torch.autograd.grad(expected, (x, w), dy), strict=True
    ):
        close(actual, reference, tolerance)


@pytest.mark.parametrize("gate", [GatedActivation(name) for name in SIGMOIDS])
def test_weights_of_one_change_nothing(gate: GatedActivation) -> None:
    x, ones = seeded(67, 2 * 131, dtype=torch.float32), torch.ones(67)
    assert torch.equal(weighted_gated(x, ones, gate), gated(x, gate))
    assert torch.equal(weighted_activate(x, ones, "squared_relu"), activate(x, "squared_relu"))


def test_no_rows_give_no_rows() -> None:
    x, w = torch.empty(0, 6, requires_grad=True), torch.empty(0, requires_grad=True)
    (
        weighted_gated(x, w, GATES[0]).sum() + weighted_activate(x, w, "squared_relu").sum()
    ).backward()
    assert x.grad is not None and w.grad is not None
    assert (x.grad.shape, w.grad.shape) == ((0, 6), (0,))


def test_nan_propagates() -> None:
    x, w = torch.full((64, 256), float("nan")), torch.ones(64)
    assert bool(weighted_activate(x, w, "squared_relu").isnan().all())
    assert bool(weighted_gated(x, w, GATES[0]).isnan().all())


@pytest.mark.parametrize("which", ["gated", "activate"])
def test_only_the_inputs_are_saved_and_inputs_are_not_modified(which: str) -> None:
    x, w, kept = seeded(5, 6).requires_grad_(), seeded(5, seed=1).requires_grad_(), []
    copies = x.detach().clone(), w.detach().clone()

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = (
            weighted_gated(x, w, GATES[2])
            if which == "gated"
            else weighted_activate(x, w, "squared_relu")
        )
    assert [saved.data_ptr() for saved in kept] == [x.data_ptr(), w.data_ptr()]
    dy = torch.ones_like(y)
    y.backward(dy)
    assert torch.equal(x, copies[0]) and torch.equal(w, copies[1])
    assert bool((dy == 1).all())


def test_shapes_on_meta_device() -> None:
    x, w = (
        torch.empty(5, 6, device="meta", requires_grad=True),
        torch.empty(5, device="meta", requires_grad=True),
    )
    y = weighted_gated(x, w, GATES[2]) + weighted_activate(x, w, "squared_relu")[:, :3]
    y.sum().backward()
    assert y.shape == (5, 3)
    assert w.grad is not None and w.grad.shape == (5,)

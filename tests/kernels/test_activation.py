"""Activations and gates match the published formulas, with right gradients up to the clamp's
boundaries."""

from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megalith.config.kernels import Kernel
from megalith.config.model import Activation
from megalith.kernels.activation import (
    SIGMOIDS,
    GatedActivation,
    activate,
    gated,
    reference_activate,
    reference_gated,
    swiglu,
)

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
GPT_OSS = GatedActivation("quick_gelu", clamp=7.0, up_offset=1.0)
GATES = [
    *(GatedActivation(activation) for activation in ACTIVATIONS),
    GPT_OSS,
    GatedActivation("gelu", clamp=1.5),
    GatedActivation("relu", 0.7, 0.5),
]


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert mine.dtype == theirs.dtype
    assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_activations_match_torch_and_transformers() -> None:
    x = 3 * seeded(40)
    for name, expected in {
        "silu": functional.silu(x),
        "gelu": functional.gelu(x),
        "gelu_tanh": functional.gelu(x, approximate="tanh"),
        "quick_gelu": x * torch.sigmoid(1.702 * x),
        "relu": functional.relu(x),
        "squared_relu": functional.relu(x) ** 2,
    }.items():
        torch.testing.assert_close(activate(x, name), expected)  # type: ignore[arg-type]  # a key of the dict above
        torch.testing.assert_close(reference_activate(x, name), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "apart", "at"),
    [("quick_gelu", 0.0203, 2.27), ("gelu_tanh", 4.73e-4, 2.70)],
    ids=lambda value: str(value),
)
def test_gelu_variants_differ_and_kernels_do_not_confuse_them(
    other: Activation, apart: float, at: float
) -> None:
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    for one in (activate, reference_activate):
        gap = (one(x, "gelu") - one(x, other)).abs()
        assert gap.max().item() == pytest.approx(apart, rel=5e-3)
        assert abs(x[gap.argmax()].item()) == pytest.approx(at, abs=0.01)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_match_finite_differences(activation: Activation) -> None:
    assert torch.autograd.gradcheck(
        lambda x: activate(x, activation), (2 * seeded(5, 6).requires_grad_(),)
    )
    assert torch.autograd.gradcheck(
        lambda x: gated(x, GatedActivation(activation)), (2 * seeded(5, 6).requires_grad_(),)
    )


@pytest.mark.parametrize("gate", GATES[len(ACTIVATIONS) :])
def test_gradients_of_clamped_gates_match_finite_differences(gate: GatedActivation) -> None:
    x = gate.clamp * 2 * seeded(9, 6) if gate.clamp else seeded(9, 6)
    assert torch.autograd.gradcheck(lambda x: gated(x, gate), (x.requires_grad_(),))


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("rows", [1, 2000])
def test_the_gate_is_clamped_above_only_and_up_on_both_sides(kernel: Kernel, rows: int) -> None:
    row = (
        torch.tensor([[7.5, -9.0, 1.0, 1.0, 7.0, 1.0, 2.0, 7.5, -7.5, -7.0]])
        .repeat(rows, 1)
        .requires_grad_()
    )
    y = gated(row, GPT_OSS, kernel=kernel)
    gate, up = torch.tensor([7.0, -9.0, 1.0, 1.0, 7.0]), torch.tensor([1.0, 2.0, 7.0, -7.0, -7.0])
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    torch.testing.assert_close(y[-1], expected)
    (grad,) = torch.autograd.grad(y.sum(), row)
    cut_off = [True, False, False, False, False, False, False, True, True, False]
    assert (grad[-1] == 0).tolist() == cut_off, "0 beyond the border, not on it"


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_and_its_gradient_equal_the_reference(
    dtype: torch.dtype, tolerance: float, gate: GatedActivation
) -> None:
    gate_up, dy = (
        (3 * seeded(67, 2 * 131, dtype=dtype)).requires_grad_(),
        seeded(67, 131, seed=1, dtype=dtype),
    )
    expected = reference_gated(gate_up, gate)
    (reference,) = torch.autograd.grad(expected, gate_up, dy, retain_graph=True)
    kernels: tuple[Kernel, ...] = ("auto", "torch") if gate.activation in SIGMOIDS else ("auto",)
    for kernel in kernels:
        y = gated(gate_up, gate, kernel=kernel)
        close(y, expected, tolerance)
        close(torch.autograd.grad(y, gate_up, dy)[0], reference, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_rounds_once_in_every_dtype(
    dtype: torch.dtype, tolerance: float, activation: Activation
) -> None:
    x, dy = (3 * seeded(11, 65, dtype=dtype)).requires_grad_(), seeded(11, 65, seed=1, dtype=dtype)
    y, expected = activate(x, activation), reference_activate(x, activation)
    close(y, expected, tolerance)
    close(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0], tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2000])
@pytest.mark.parametrize("activation", SIGMOIDS)
def test_large_gates_neither_overflow_nor_turn_nan(
    dtype: torch.dtype, rows: int, activation: Activation
) -> None:
    row = torch.tensor([[-1e30, -1e4, -100.0, 100.0, 1e4, 1e30, *([1.0] * 6)]], dtype=dtype)
    gate_up = row.repeat(rows, 1).requires_grad_()
    y = gated(gate_up, GatedActivation(activation), kernel="auto" if rows > 1 else "torch")
    torch.testing.assert_close(
        y[-1, 1:5].float(), row[0, 1:5].clamp(min=0).float(), atol=1e-30, rtol=0
    )
    (grad,) = torch.autograd.grad(y.sum(), gate_up)
    torch.testing.assert_close(
        grad[-1, 1:5].float(), torch.tensor([0.0, 0.0, 1.0, 1.0]), atol=1e-30, rtol=0
    )
    if rows > 1:
        assert not bool(y.isnan().any() or grad.isnan().any())


def test_silu_without_limits_is_swiglu() -> None:
    gate_up = seeded(5, 6)
    torch.testing.assert_close(gated(gate_up, GatedActivation("silu")), swiglu(gate_up))


@pytest.mark.parametrize("which", ["gated", "activate"])
def test_only_the_input_is_saved_and_inputs_are_not_modified(which: str) -> None:
    x, kept = seeded(5, 6).requires_grad_(), []
    copy = x.detach().clone()

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = gated(x, GPT_OSS) if which == "gated" else activate(x, "squared_relu")
    assert [saved.data_ptr() for saved in kept] == [x.data_ptr()]
    dy = torch.ones_like(y)
    y.backward(dy)
    assert torch.equal(x, copy)
    assert bool((dy == 1).all())


def test_shapes_on_meta_device() -> None:
    x = torch.empty(5, 6, device="meta", requires_grad=True)
    y = gated(x, GPT_OSS) * 2 + activate(x, "gelu_tanh")[:, :3]
    y.sum().backward()
    assert y.shape == (5, 3)
    assert x.grad is not None

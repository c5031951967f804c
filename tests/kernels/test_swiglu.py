"""SwiGLU: silu of the gate times up; backward saves only the input."""

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.kernels.activation import reference_swiglu, swiglu


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def test_gradients_match_finite_differences() -> None:
    assert torch.autograd.gradcheck(swiglu, (seeded(5, 6).requires_grad_(),))


def test_the_gate_is_the_first_half() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]], dtype=torch.float64)
    torch.testing.assert_close(
        swiglu(gate_up)[0], torch.tensor([0.0, 2 / (1 + torch.e**-2) * 3], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("f", [1, 7, 65])
def test_result_and_gradient_equal_the_reference(
    dtype: torch.dtype, tolerance: float, f: int
) -> None:
    gate_up, dy = (
        (3 * seeded(11, 2 * f, dtype=dtype)).requires_grad_(),
        seeded(11, f, seed=1, dtype=dtype),
    )
    y, expected = swiglu(gate_up), reference_swiglu(gate_up)
    assert y.dtype == dtype
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    (actual,), (reference,) = (
        torch.autograd.grad(y, gate_up, dy),
        torch.autograd.grad(expected, gate_up, dy),
    )
    assert actual.dtype == dtype
    assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_all_backends_match_the_reference(
    dtype: torch.dtype, tolerance: float, kernel: Kernel
) -> None:
    gate_up, dy = (
        (5 * seeded(67, 2 * 131, dtype=dtype)).requires_grad_(),
        seeded(67, 131, seed=1, dtype=dtype),
    )
    y, expected = swiglu(gate_up, kernel=kernel), swiglu(gate_up, kernel="reference")
    assert (y - expected).abs().max() <= tolerance * expected.abs().max()
    (actual,), (reference,) = (
        torch.autograd.grad(y, gate_up, dy),
        torch.autograd.grad(expected, gate_up, dy),
    )
    assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2000])
def test_large_gates_neither_overflow_nor_turn_nan(dtype: torch.dtype, rows: int) -> None:
    row = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    gate_up = row.repeat(rows, 1).requires_grad_()
    y = swiglu(gate_up)
    torch.testing.assert_close(
        y[-1].float(), torch.tensor([0.0, 0.0, 100.0, 1e4], dtype=dtype).float(), atol=1e-33, rtol=0
    )
    (grad,) = torch.autograd.grad(y.sum(), gate_up)
    torch.testing.assert_close(
        grad[-1, :4].float(), torch.tensor([0.0, 0.0, 1.0, 1.0]), atol=1e-33, rtol=0
    )


def test_only_the_input_is_saved_and_inputs_are_not_modified() -> None:
    gate_up, dy, kept = seeded(5, 6).requires_grad_(), seeded(5, 3, seed=1), []
    copies = gate_up.detach().clone(), dy.clone()

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = swiglu(gate_up)
    assert [saved.data_ptr() for saved in kept] == [gate_up.data_ptr()]
    y.backward(dy)
    assert torch.equal(gate_up, copies[0])
    assert torch.equal(dy, copies[1])


def test_shapes_on_meta_device() -> None:
    gate_up = torch.empty(5, 6, device="meta", requires_grad=True)
    y = swiglu(gate_up)
    assert y.shape == (5, 3)
    y.sum().backward()
    assert gate_up.grad is not None
    assert gate_up.grad.shape == (5, 6)

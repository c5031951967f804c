"""Linear layers: one matmul over stacked weights, and gradient accumulators."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.linear import (
    MIN_ONEDNN_MULTIPLICATIONS,
    MatmulOps,
    add_product_,
    forward,
    input_grad,
    linear,
    reference_linear,
    stacked,
)
from megalith.testing.tolerance import FP32, assert_equals


class Recorder:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.matmul_ops: list[tuple[Tensor, Tensor]] = []

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        self.matmul_ops.append((x, dy))

    def gradient(self, dw: Tensor) -> None:
        raise AssertionError("a linear layer hands over products")

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        raise AssertionError("a linear layer hands over products")


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def wants(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return seeded(*shape, seed=seed, dtype=dtype).requires_grad_()


def test_gradients_match_finite_differences() -> None:
    x, q, kv = wants(5, 3), wants(4, 3, seed=1), wants(2, 3, seed=2)
    assert torch.autograd.gradcheck(lambda *a: linear(a[0], a[1:]), (x, q, kv))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_result_and_gradients_equal_the_reference(dtype: torch.dtype) -> None:
    ours = [
        wants(7, 5, dtype=dtype),
        wants(6, 5, seed=1, dtype=dtype),
        wants(3, 5, seed=2, dtype=dtype),
    ]
    plain = [a.detach().clone().requires_grad_() for a in ours]
    dy = seeded(7, 9, seed=3, dtype=dtype)
    y = linear(ours[0], ours[1:])
    expected = reference_linear(plain[0], plain[1:])
    torch.testing.assert_close(y, expected)
    for actual, reference in zip(
        torch.autograd.grad(y, ours, dy), torch.autograd.grad(expected, plain, dy)
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, reference)


def test_adjacent_weights_are_stacked_as_a_view() -> None:
    storage = seeded(9, 5)
    q, kv = storage[:6], storage[6:]
    together = stacked([q, kv])
    assert together.data_ptr() == storage.data_ptr()
    assert torch.equal(together, storage)


@pytest.mark.parametrize("order", ["swapped", "gap", "strangers", "transposed"])
def test_weights_that_are_not_adjacent_are_copied(order: str) -> None:
    storage = seeded(10, 5)
    pairs = {
        "swapped": (storage[6:], storage[:6]),
        "gap": (storage[:6], storage[7:]),
        "strangers": (storage[:6].clone(), storage[6:].clone()),
        "transposed": (seeded(5, 5).t(), storage[:5]),
    }
    pair = pairs[order]
    together = stacked(pair)
    assert torch.equal(together, torch.cat(pair))
    assert together.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr()


def test_weights_of_one_storage_train_as_two_parameters() -> None:
    storage = seeded(9, 5)
    q, kv = torch.nn.Parameter(storage[:6]), torch.nn.Parameter(storage[6:])
    x, dy = seeded(7, 5, seed=1), seeded(7, 9, seed=2)
    linear(x, [q, kv]).backward(dy)
    assert q.grad is not None
    assert kv.grad is not None
    torch.testing.assert_close(torch.cat([q.grad, kv.grad]), dy.t() @ x)


def test_gradient_accumulator_gets_x_and_dy_and_autograd_none() -> None:
    x, w, dy, grad_accumulator = wants(5, 3), wants(4, 3, seed=1), seeded(5, 4, seed=2), Recorder()
    linear(x, [w], grad_accumulator=grad_accumulator).backward(dy)
    assert w.grad is None
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dy @ w)
    [(kept_x, kept_dy)] = grad_accumulator.matmul_ops
    assert torch.equal(kept_x, x)
    assert torch.equal(kept_dy, dy)


def test_dx_is_computed_before_the_gradient_accumulator_is_called() -> None:
    order: list[str] = []

    class NotedOps(MatmulOps):
        def input_grad(self, dy: Tensor, w: Tensor) -> Tensor:
            order.append("dx")
            return super().input_grad(dy, w)

    class Noting(Recorder):
        def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
            order.append("dw")

    linear(
        wants(5, 3), [wants(4, 3)], grad_accumulator=Noting(), matmul_ops=NotedOps()
    ).sum().backward()
    assert order == ["dx", "dw"]


def test_matmul_ops_can_be_replaced() -> None:
    class Scaled(MatmulOps):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return 2 * super().forward(x, w)

        def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
            return 3 * super().weight_grad(dy, x)

    x, w, dy = wants(5, 3), wants(4, 3, seed=1), seeded(5, 4, seed=2)
    y = linear(x, [w], matmul_ops=Scaled())
    torch.testing.assert_close(y, 2 * x @ w.t())
    y.backward(dy)
    torch.testing.assert_close(w.grad, 3 * dy.t() @ x)


def test_frozen_weights_get_no_gradient_and_no_accumulator_call() -> None:
    x, frozen, trained = wants(5, 3), seeded(4, 3, seed=1), wants(2, 3, seed=2)
    dx, dw = torch.autograd.grad(linear(x, [frozen, trained]).sum(), (x, trained))
    torch.testing.assert_close(dx, torch.cat([frozen, trained]).sum(0).expand(5, 3))
    torch.testing.assert_close(dw, x.sum(0).expand(2, 3))
    grad_accumulator = Recorder()
    linear(x, [frozen], grad_accumulator=grad_accumulator).sum().backward()
    assert grad_accumulator.matmul_ops == []


def test_the_first_layer_computes_no_gradient_for_its_input() -> None:
    class WithoutInputGrad(MatmulOps):
        def input_grad(self, dy: Tensor, w: Tensor) -> Tensor:
            raise AssertionError("dx is not needed")

    linear(seeded(5, 3), [wants(4, 3)], matmul_ops=WithoutInputGrad()).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_accumulated_in_fp32(dtype: torch.dtype) -> None:
    total = seeded(4, 3, dtype=torch.float32)
    x, dy = seeded(6, 3, seed=1, dtype=dtype), seeded(6, 4, seed=2, dtype=dtype)
    expected = total + (dy.t() @ x).float()
    assert add_product_(total, x, dy) is total
    torch.testing.assert_close(total, expected)

    class Halved(MatmulOps):
        def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
            return super().weight_grad(dy, x) / 2

    add_product_(total, x, dy, Halved())
    torch.testing.assert_close(total, expected + (dy.t() @ x / 2).float())


def test_meta_device_allocates_no_memory() -> None:
    storage = torch.empty(9, 5, device="meta")
    q, kv = torch.nn.Parameter(storage[:6]), torch.nn.Parameter(storage[6:])
    x = torch.empty(7, 5, device="meta", requires_grad=True)
    y = linear(x, [q, kv])
    assert y.shape == (7, 9)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (7, 5)
    assert kv.grad is not None
    assert kv.grad.shape == (3, 5)


def test_second_derivative_raises_an_error() -> None:
    x, w = wants(5, 3), wants(4, 3)
    (dx,) = torch.autograd.grad(linear(x, [w]).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_onednn_matmuls_match_mkl() -> None:
    x, w, dy = (
        seeded(*shape, seed=n, dtype=torch.float32)
        for n, shape in enumerate([(300, 201), (190, 201), (300, 190)])
    )
    assert x.shape[0] * w.numel() >= MIN_ONEDNN_MULTIPLICATIONS
    assert_equals("y", forward(x, w), x @ w.t(), FP32)
    assert_equals("dx", input_grad(dy, w), dy @ w, FP32)
    strided = seeded(201, 300, dtype=torch.float32).t()
    assert_equals("y of a transposed x", forward(strided, w), strided @ w.t(), FP32)

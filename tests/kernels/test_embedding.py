"""Vocabulary-parallel embedding: each rank looks up its own rows; gradients are summed in a fixed
order."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith.kernels.embedding import add_rows_, embedding, reference_embedding
from megalith.kernels.linear import MatmulOps

IDS = torch.tensor([0, 3, 6, 3, 1, 6, 3])


def table(rows: int = 7, *, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )


class Recorder:
    """A sink that keeps rows."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        raise AssertionError("an embedding hands over rows")

    def gradient(self, dw: Tensor) -> None:
        raise AssertionError("an embedding hands over rows")

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        self.given.append((rows, dy))


def test_lookup_and_gradient_equal_torch() -> None:
    ours, reference = table().requires_grad_(), table().requires_grad_()
    dy = torch.randn(7, 4, dtype=torch.float64)
    y, expected = embedding(IDS, ours), torch.nn.functional.embedding(IDS, reference)
    assert torch.equal(y, expected)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(ours.grad, reference.grad)


def test_table_shard_matches_the_reference() -> None:
    ours, reference = table(3).requires_grad_(), table(3).requires_grad_()
    y, expected = embedding(IDS, ours, first_row=2), reference_embedding(IDS, reference, 2)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, reference.grad)


def test_uneven_table_shards_sum_to_the_full_lookup() -> None:
    whole, cuts = table(), [0, 3, 5, 7]
    parts = [embedding(IDS, whole[a:b], first_row=a) for a, b in pairwise(cuts)]
    assert torch.equal(torch.stack(parts).sum(0), whole[IDS])
    assert [int((part != 0).any(1).sum()) for part in parts] == [2, 3, 2]


def test_ids_of_other_ranks_get_no_gradient() -> None:
    part = table(2).requires_grad_()
    embedding(IDS, part, first_row=3).sum().backward()
    assert part.grad is not None
    assert part.grad.tolist() == [[3.0] * 4, [0.0] * 4]


def test_gradient_accumulator_gets_local_rows_and_zeros_for_other_ranks() -> None:
    part, grad_accumulator, dy = (
        table(3).requires_grad_(),
        Recorder(),
        torch.ones(7, 4, dtype=torch.float64),
    )
    embedding(IDS, part, first_row=3, grad_accumulator=grad_accumulator).backward(dy)
    assert part.grad is None
    [(rows, given)] = grad_accumulator.given
    assert rows.tolist() == [0, 0, 0, 0, 0, 0, 0]
    assert given[:, 0].tolist() == [0, 1, 0, 1, 0, 0, 1]
    total = add_rows_(torch.zeros(3, 4), rows, given)
    assert total[:, 0].tolist() == [3, 0, 0]


def test_a_frequent_token_is_summed_in_fp32() -> None:
    weight = table(2, dtype=torch.bfloat16).requires_grad_()
    embedding(torch.ones(1000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad[1, 0].item() == 1000.0  # added one by one in bf16 it would stop at 256


def test_repeated_rows_add_in_the_same_order_every_time() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, dy = (
        torch.randint(0, 5, (999,), generator=generator),
        torch.randn(999, 3, generator=generator),
    )
    first = add_rows_(torch.zeros(5, 3), rows, dy)
    assert all(torch.equal(first, add_rows_(torch.zeros(5, 3), rows, dy)) for _ in range(5))
    in_order = torch.zeros(5, 3)
    for row, value in zip(rows.tolist(), dy):
        in_order[row] += value
    assert torch.equal(first, in_order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_on_meta_device(dtype: torch.dtype) -> None:
    weight = torch.empty(7, 4, device="meta", dtype=dtype, requires_grad=True)
    y = embedding(IDS.to("meta"), weight, first_row=2)
    assert (y.shape, y.dtype) == ((7, 4), dtype)
    y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == (7, 4)

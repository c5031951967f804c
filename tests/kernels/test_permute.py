"""Permutation of tokens to rows sorted by expert and back, and its gradients."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.routing import (
    RowPermutation,
    expert_major,
    gather_row_weights,
    gather_rows,
    invert_chunk_order,
    permute,
    permute_choices,
    permute_choices_padded,
    reference_permute,
    reference_unpermute,
    sort_chunks,
    unpermute,
)

# of logits 2 1 0 -1, 1.5 2.5 .5 -.5, 3 0 1 .5, 0 1 -1 2
FOUR_TOKENS = torch.tensor([[0, 1], [1, 0], [0, 2], [3, 1]])


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def random_choices(t: int, k: int, experts: int, *, dropped: float = 0.0, seed: int = 0) -> Tensor:
    """[t, k] different experts, some of them -1."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.rand(t, experts, generator=draw).argsort(1)[:, :k]
    return chosen.masked_fill(torch.rand(t, k, generator=draw) < dropped, -1)


def three_orders(t: int = 13, k: int = 3, experts: int = 7) -> list[RowPermutation]:
    chosen = random_choices(t, k, experts)
    dropped = random_choices(t, k, experts, dropped=0.4)
    return [
        permute_choices(chosen, experts),
        permute_choices(dropped, experts),
        permute_choices_padded(chosen, experts, capacity=5),
    ]


def test_rows_are_sorted_by_expert_then_by_token() -> None:
    order = permute_choices(FOUR_TOKENS, 4, num_rows=8)
    assert order.counts.tolist() == [3, 3, 1, 1]
    assert order.tokens.tolist() == [0, 1, 2, 0, 1, 3, 2, 3]
    weights = torch.tensor(
        [[0.731059, 0.268941], [0.731059, 0.268941], [0.880797, 0.119203], [0.731059, 0.268941]]
    )
    expected = [0.731059, 0.268941, 0.880797, 0.268941, 0.731059, 0.268941, 0.119203, 0.731059]
    assert gather_row_weights(weights, order).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_every_choice_that_is_not_dropped_has_one_row_of_its_expert(dropped: float) -> None:
    chosen = random_choices(23, 4, 9, dropped=dropped)
    order = permute_choices(chosen, 9)
    flat = chosen.flatten()
    assert sorted(order.choices.tolist()) == (flat >= 0).nonzero().flatten().tolist()
    assert torch.equal(flat[order.choices], torch.repeat_interleave(torch.arange(9), order.counts))
    assert torch.equal(order.tokens, order.choices // 4)
    for expert in range(9):
        token_numbers = order.tokens[flat[order.choices] == expert]
        assert torch.equal(token_numbers, token_numbers.sort().values)
    assert torch.equal(order.choices[order.rows], order.choices.sort().values)


def test_known_number_of_rows_gives_the_same_permutation() -> None:
    chosen = random_choices(11, 3, 5, dropped=0.3)
    counted, with_known_count = (
        permute_choices(chosen, 5),
        permute_choices(chosen, 5, num_rows=int((chosen >= 0).sum())),
    )
    for field in ("counts", "choices", "tokens", "rows", "starts"):
        assert torch.equal(getattr(counted, field), getattr(with_known_count, field))


def test_padding_gives_every_expert_its_capacity_and_drops_the_last() -> None:
    order = permute_choices_padded(FOUR_TOKENS, 4, capacity=2)
    assert order.counts.tolist() == [2, 2, 2, 2]
    assert order.filler is not None
    assert order.filler.tolist() == [False] * 4 + [False, True, False, True]
    kept = order.tokens[~order.filler]
    # token 2 for expert 0 and token 3 for expert 1 came third
    assert kept.tolist() == [
        0,
        1,
        0,
        1,
        2,
        3,
    ]
    x = seeded(4, 5)
    assert (permute(x, order)[order.filler] == 0).all()
    assert gather_row_weights(torch.ones(4, 2), order).tolist() == [1, 1, 1, 1, 1, 0, 1, 0]
    times = torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64).unsqueeze(1)
    torch.testing.assert_close(unpermute(permute(x, order), order), times * x)


def test_padding_rows_do_not_change_the_output() -> None:
    chosen, x, dy = random_choices(13, 3, 7, dropped=0.2), seeded(13, 4), seeded(13, 4, seed=1)
    results = []
    for order in (permute_choices(chosen, 7), permute_choices_padded(chosen, 7, capacity=20)):
        rows, scale = (
            x.clone().requires_grad_(),
            torch.arange(7).repeat_interleave(order.counts).unsqueeze(1) + 1.0,
        )
        y = unpermute(permute(rows, order) * scale, order)
        (dx,) = torch.autograd.grad(y, rows, dy)
        results.append((y, dx))
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("which", [0, 1, 2], ids=["all", "dropped", "padded"])
def test_gradients_match_finite_differences(which: int) -> None:
    order = three_orders()[which]
    assert torch.autograd.gradcheck(lambda x: permute(x, order), (seeded(13, 2).requires_grad_(),))
    rows = seeded(len(order.choices), 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: unpermute(x, order), (rows,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["all", "dropped", "padded"])
def test_moves_and_gradients_equal_the_reference(dtype: torch.dtype, which: int) -> None:
    order = three_orders()[which]
    r = len(order.choices)
    for ours, plain, given, back in [
        (
            permute,
            reference_permute,
            seeded(13, 33, dtype=dtype),
            seeded(r, 33, seed=1, dtype=dtype),
        ),
        (
            unpermute,
            reference_unpermute,
            seeded(r, 33, dtype=dtype),
            seeded(13, 33, seed=1, dtype=dtype),
        ),
    ]:
        actual, reference = given.clone().requires_grad_(), given.clone().double().requires_grad_()
        y, expected = ours(actual, order), plain(reference, order)
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected.to(dtype))
        (dx,), (dx_expected,) = (
            torch.autograd.grad(y, actual, back),
            torch.autograd.grad(expected, reference, back.double()),
        )
        torch.testing.assert_close(dx, dx_expected.to(dtype))


def test_permute_and_unpermute_with_normalized_weights_is_the_identity() -> None:
    order = permute_choices(random_choices(17, 4, 6), 6)
    x, dy = seeded(17, 3).requires_grad_(), seeded(17, 3, seed=1)
    y = unpermute(permute(x, order) / 4, order)
    torch.testing.assert_close(y, x)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx, dy)


@pytest.mark.parametrize("features", [1, 16, 33])
def test_rows_are_summed_in_fp32_in_the_order_of_choices(features: int) -> None:
    order = permute_choices(torch.tensor([[3, 2, 1, 0]]), 4)
    rows = torch.tensor([[1.0], [1.0], [1.0], [256.0]]).repeat(1, features).bfloat16()
    # 259, rounded once; added in bf16 it would still be 256
    assert (unpermute(rows, order) == 260).all()
    mixed = torch.tensor([[0.0], [-1e8], [1e8], [1.0]]).repeat(1, features)
    # 1 + 1e8 - 1e8, where in the order of rows it would be 1
    assert (unpermute(mixed, order) == 0).all()


def test_a_tokens_weights_get_the_gradients_of_their_rows() -> None:
    order = three_orders()[1]
    weights = seeded(13, 3).requires_grad_()
    rows = gather_row_weights(weights, order)
    (grad,) = torch.autograd.grad(
        rows, weights, torch.arange(1.0, len(rows) + 1, dtype=torch.float64)
    )
    expected = torch.zeros(39, dtype=torch.float64)
    expected[order.choices] = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)
    assert torch.equal(grad.flatten(), expected)


def test_permute_and_unpermute_save_no_features() -> None:
    kept: list[Tensor] = []
    order, x = three_orders()[0], seeded(13, 3).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda saved: saved):
        unpermute(permute(x, order), order)
    assert kept == []


@pytest.mark.parametrize("t", [0, 5])
def test_no_rows_give_zeros_and_gradients(t: int) -> None:
    order = permute_choices(torch.full((t, 2), -1), 3)
    x = seeded(t, 4).requires_grad_()
    y = unpermute(permute(x, order), order)
    assert torch.equal(y, torch.zeros(t, 4, dtype=torch.float64))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.zeros(t, 4, dtype=torch.float64))
    assert order.counts.tolist() == [0, 0, 0]


def test_the_rows_can_be_gathered_again() -> None:
    order, x = three_orders()[2], seeded(13, 4)
    assert torch.equal(gather_rows(x, order), permute(x, order))


def test_shapes_on_meta_device() -> None:
    order = permute_choices(torch.empty(6, 2, dtype=torch.int64, device="meta"), 4, num_rows=12)
    x = torch.empty(6, 3, device="meta", requires_grad=True)
    rows = permute(x, order)
    assert rows.shape == (12, 3)
    unpermute(rows, order).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (6, 3)


def test_chunks_are_sorted_by_expert_and_restored() -> None:
    sizes = [2, 0, 1, 3, 4, 1]  # rank 0: experts 0, 1, 2; rank 1: the same
    rows = torch.arange(11.0, dtype=torch.float64).unsqueeze(1).repeat(1, 2).requires_grad_()
    order = expert_major(2, 3)
    y = sort_chunks(rows, sizes, order)
    assert y[:, 0].tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9, 2, 10]
    assert torch.equal(sort_chunks(y, *invert_chunk_order(sizes, order)), rows)
    (grad,) = torch.autograd.grad(y, rows, y.detach())
    assert torch.equal(grad, rows)


def test_sorting_chunks_passes_the_finite_difference_test() -> None:
    sizes, order = [2, 0, 1, 3], [3, 0, 2, 1]
    assert torch.autograd.gradcheck(
        lambda x: sort_chunks(x, sizes, order), (seeded(6, 2).requires_grad_(),)
    )

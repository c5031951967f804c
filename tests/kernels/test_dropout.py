"""Dropout: rate and independence of hashed masks, equal for every backend and layout."""

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.kernels.dropout import dropout, dropped_features, dropped_weights, reference_dropout
from megalith.plan.keys import key

KEY = key(1, "dropout", "residual", 3)
NUMBERS = 4096 * 10**6 + torch.arange(512)
KERNELS: tuple[Kernel, ...] = ("auto", "torch", "reference")


def seeded(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )


def correlation(a: Tensor, b: Tensor, p: float) -> float:
    """Between two masks, in standard deviations of what independent ones have."""
    return float(((a.double() - p) * (b.double() - p)).sum() / (p * (1 - p) * a.numel() ** 0.5))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropped_share_is_p_per_token_and_per_feature(p: float) -> None:
    dropped = dropped_features(p, KEY, NUMBERS, 0, 768).double()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(dropped.mean() - p) < 4 * sigma / dropped.numel() ** 0.5
    for means, count in ((dropped.mean(1), 768), (dropped.mean(0), 512)):
        deviations = (means - p) * count**0.5 / sigma
        assert 0.9 < deviations.std() < 1.1 and deviations.abs().max() < 6


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_tokens_steps_layers_and_runs_are_independent(p: float) -> None:
    mask = dropped_features(p, KEY, NUMBERS, 0, 256)
    others = {
        "next layer": dropped_features(p, key(1, "dropout", "residual", 4), NUMBERS, 0, 256),
        "another place": dropped_features(p, key(1, "dropout", "embedding", 3), NUMBERS, 0, 256),
        "another run": dropped_features(p, key(2, "dropout", "residual", 3), NUMBERS, 0, 256),
        "a step later": dropped_features(p, KEY, NUMBERS + 2**20, 0, 256),
        "far away": dropped_features(p, KEY, NUMBERS + 2**32, 0, 256),
    }
    for name, other in others.items():
        assert abs(correlation(mask, other, p)) < 4, name
    for shift in (1, 2, 16, 128):
        assert abs(correlation(mask[shift:], mask[:-shift], p)) < 4, f"tokens {shift} apart"
        assert abs(correlation(mask[:, shift:], mask[:, :-shift], p)) < 4, f"features {shift} apart"
        assert abs(correlation(mask[shift:, shift:], mask[:-shift, :-shift], p)) < 4, (
            f"diagonals {shift} apart"
        )


def test_no_two_tokens_of_many_have_the_same_mask() -> None:
    masks = dropped_features(0.5, KEY, torch.arange(20_000), 0, 48).to(torch.int64)
    assert len(set((masks << torch.arange(48)).sum(1).tolist())) == 20_000


@pytest.mark.parametrize(
    ("dtype", "t"), [(torch.float64, 33), (torch.float32, 211), (torch.bfloat16, 211)]
)
@pytest.mark.parametrize("first", [0, 5])
def test_all_backends_have_equal_masks_and_scale(dtype: torch.dtype, t: int, first: int) -> None:
    x, numbers = seeded(t, 97, dtype=dtype), torch.arange(t) * 977
    dropped = dropped_features(0.3, KEY, numbers, first, 97)
    expected = (x.double() / 0.7).masked_fill(dropped, 0.0)
    for kernel in KERNELS:
        y = dropout(x, 0.3, KEY, numbers, first_feature=first, kernel=kernel)
        assert y.dtype == dtype
        assert torch.equal(y == 0, dropped)
        torch.testing.assert_close(
            y.double(), expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=0
        )
    assert torch.equal(
        *(dropout(x, 0.3, KEY, numbers, kernel=kernel) for kernel in ("auto", "torch"))
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_backward_uses_the_forward_mask_and_saves_only_token_numbers(kernel: Kernel) -> None:
    x, numbers, kept = seeded(211, 97, dtype=torch.float32).requires_grad_(), torch.arange(211), []

    def note(saved: Tensor) -> Tensor:
        kept.append(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = dropout(x, 0.2, KEY, numbers, kernel=kernel)
    dy = torch.rand(211, 97) + 0.5
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx == 0, y == 0)
    torch.testing.assert_close(dx, reference_dropout(dy, 0.2, KEY, numbers))
    if kernel != "reference":
        assert [saved.data_ptr() for saved in kept] == [numbers.data_ptr()]


def test_gradients_match_finite_differences() -> None:
    x, numbers = seeded(5, 7).requires_grad_(), torch.arange(5)
    assert torch.autograd.gradcheck(lambda x: dropout(x, 0.4, KEY, numbers), (x,))


def test_masks_of_slices_are_slices_of_the_mask() -> None:
    x = seeded(64, 48)
    whole = dropout(x, 0.3, KEY, NUMBERS[:64])
    assert torch.equal(dropout(x[20:30], 0.3, KEY, NUMBERS[20:30]), whole[20:30])
    assert torch.equal(
        dropout(x[:, 20:30], 0.3, KEY, NUMBERS[:64], first_feature=20), whole[:, 20:30]
    )


def by_hand(p: float, number: int, feature: int) -> bool:
    """The definition in Python's integers, for key 7."""
    z = (number * 0x9E3779B97F4A7C15 + 7) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    z = z ^ z >> 31
    low, high = z % 2**32, z >> 32
    y = (low + feature * 0x9E3779B9) % 2**32
    y = (y ^ y >> 16) * 0x85EBCA6B % 2**32 ^ high
    y = (y ^ y >> 15) * 0xC2B2AE35 % 2**32
    y = y ^ y >> 16
    return (y + 2**31) % 2**32 < p * 2**32


def test_masks_match_a_reference_in_python_integers() -> None:
    numbers = [-1, 0, 1, 2**40, 2**62]
    result = dropped_features(0.3, 7, torch.tensor(numbers), 2**20, 50)
    assert result.tolist() == [
        [by_hand(0.3, number, 2**20 + j) for j in range(50)] for number in numbers
    ]


def test_dropped_nan_becomes_zero_and_p_zero_returns_the_input() -> None:
    x = torch.full((64, 200), float("nan"))
    y = dropout(x, 0.5, KEY, torch.arange(64))
    assert 0.4 < y.isnan().float().mean() < 0.6
    assert bool((y[~y.isnan()] == 0).all())
    assert dropout(x, 0.0, KEY, torch.arange(64)) is x


def test_attention_dropout_depends_only_on_head_query_and_key() -> None:
    queries, keys = torch.arange(100, 140), torch.arange(80, 140)
    whole = dropped_weights(0.3, KEY, queries, keys, range(6))
    assert whole.shape == (6, 40, 60)
    assert abs(whole.double().mean() - 0.3) < 4 * (0.21 / whole.numel()) ** 0.5
    part = dropped_weights(0.3, KEY, queries[7:20], keys[30:], range(2, 4))
    assert torch.equal(part, whole[2:4, 7:20, 30:])
    for name, a, b in (
        ("heads", whole[1:], whole[:-1]),
        ("queries", whole[:, 1:], whole[:, :-1]),
        ("keys", whole[:, :, 1:], whole[:, :, :-1]),
        ("diagonals", whole[:, 1:, 1:], whole[:, :-1, :-1]),
    ):
        assert abs(correlation(a, b, 0.3)) < 4, name


def test_shapes_on_meta_device() -> None:
    x = torch.empty(5, 6, device="meta", requires_grad=True)
    dropout(x, 0.1, KEY, torch.empty(5, dtype=torch.int64, device="meta")).sum().backward()
    assert x.grad is not None

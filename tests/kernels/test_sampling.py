"""Gumbel-max sampling: keyed noise, its distribution, and the one-pass loop against the
reference."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels import cpu_threads
from megalith.kernels.sampling import (
    GumbelArgmax,
    gumbel_argmax,
    gumbel_noise,
    hash_tokens,
    reference_gumbel_argmax,
)
from megalith.plan.keys import key
from tests.cases import loop_over

needs_loops = pytest.mark.skipif(cpu_threads.openmp() is None, reason="no OpenMP library to call")


def keys_of(rows: int, seed: int = 1) -> list[int]:
    return [key(seed, "sample", "0", position) for position in range(rows)]


def random_logits(rows: int, v: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, v, generator=torch.Generator().manual_seed(seed)) * scale


def assert_equal(result: GumbelArgmax, expected: GumbelArgmax) -> None:
    """The ids are equal, and the values within rounding of float64."""
    assert result.ids.tolist() == expected.ids.tolist()
    assert result.num_masked.tolist() == expected.num_masked.tolist()
    torch.testing.assert_close(
        result.values, expected.values, rtol=1e-13, atol=1e-13, equal_nan=True
    )


def test_noise_has_the_moments_of_a_gumbel_distribution_and_is_uncorrelated() -> None:
    noise = gumbel_noise(torch.tensor(keys_of(50)), torch.arange(20_000))
    count = noise.numel()
    assert abs(noise.mean() - 0.5772157) < 4 * 1.2825 / count**0.5
    assert abs(noise.var() - math.pi**2 / 6) < 4 * 2.7 / count**0.5
    below = torch.tensor([(noise < x).double().mean() for x in (-1.0, 0.0, 1.0, 3.0, 8.0)])
    expected = torch.tensor([-1.0, 0.0, 1.0, 3.0, 8.0]).neg().exp().neg().exp()
    deviation = (below - expected).abs() / (expected * (1 - expected) / count).sqrt()
    assert deviation.max() < 4
    uniform = noise.neg().exp().neg().exp() - 0.5
    for rows, columns in ((1, 0), (0, 1), (1, 1), (7, 64)):
        product = uniform[rows:, columns:] * uniform[: 50 - rows, : 20_000 - columns]
        assert abs(product.mean()) * 12 * product.numel() ** 0.5 < 4, (rows, columns)


def test_hash_is_that_of_splitmix64() -> None:
    # the outputs of splitmix64 for the seed 1234567; its first state is one step after the seed
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    hashes = hash_tokens(torch.tensor([1234567]), torch.arange(1, 4))[0].tolist()
    assert [value % 2**64 for value in hashes] == expected


def test_noise_of_a_slice_is_that_of_the_vocabulary() -> None:
    keys = torch.tensor(keys_of(3))
    noise = gumbel_noise(keys, torch.arange(100))
    assert torch.equal(gumbel_noise(keys[1:], torch.arange(40, 60)), noise[1:, 40:60])
    assert bool(noise.isfinite().all())


CASES = [
    *((temperature, torch.float32) for temperature in (0.0, 1e-9, 0.7, 3.0, 1e6)),
    (0.7, torch.bfloat16),
]
"""Temperature and dtype."""


def special_logits(v: int) -> dict[str, Tensor]:
    """Rows that are difficult for a search with bounds."""
    mixed = random_logits(5, v, scale=10.0)
    masked = torch.where(random_logits(5, v, seed=2) > -2.0, float("-inf"), mixed)
    return {
        "mixed": mixed,
        "flat": torch.full((5, v), 7.25),
        "ascending": torch.linspace(-20, 20, v).expand(5, -1).contiguous(),
        "descending": torch.linspace(20, -20, v).expand(5, -1).contiguous(),
        "masked": masked,
        "large": mixed * 1e36,
        "far below zero": mixed - 1e5,
        "equal in pairs": mixed.round(),
    }


@needs_loops
@loop_over("v", [2048, 2501])
def test_loop_selects_the_token_of_the_reference(v: int) -> None:
    for name, logits in special_logits(v).items():
        for temperature, dtype in CASES:
            x, arguments = logits.to(dtype), (keys_of(5, seed=v), [temperature] * 5)
            expected = reference_gumbel_argmax(x, *arguments)
            try:
                assert_equal(gumbel_argmax(x, *arguments), expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, T={temperature}, {dtype}") from error


@needs_loops
def test_bound_of_the_noise_is_never_below_it() -> None:
    from numba import njit

    from megalith.kernels import cpu_numba

    @njit
    def bound_all(hashes: Any, out: Any) -> None:
        for i in range(len(hashes)):
            out[i] = cpu_numba.gumbel_bound(hashes[i])

    random = hash_tokens(torch.tensor([5]), torch.arange(100_000))[0]
    shifts = torch.arange(100_000) % 50
    # small hashes, which have the largest noise, and the extremes
    small = (random >> 14).bitwise_and((1 << 50) - 1) >> shifts
    hashes = torch.cat([random, small, torch.tensor([0, 1, -1, 1 << 33, (1 << 33) - 1])])
    bounds = torch.empty(len(hashes))
    bound_all(hashes.numpy().view("uint64"), bounds.numpy())
    w = ((hashes >> 12).bitwise_and((1 << 52) - 1).double() + 0.5) * 2.0**-52
    noise = -(-(1 - w).log()).log()
    assert bool((bounds.double() + 1e-5 > noise).all())
    assert (bounds[:100_000] - noise[:100_000])[noise[:100_000] > 4].max() < 0.08


@needs_loops
def test_rows_are_read_with_their_stride_and_their_own_temperature() -> None:
    wide = random_logits(4, 9100)
    wide[:, 9000:] = 1e4
    temperatures = [1.0, 0.0, 0.5, 2.0]
    result = gumbel_argmax(wide[:, :9000], keys_of(4), temperatures)
    assert_equal(result, reference_gumbel_argmax(wide[:, :9000], keys_of(4), temperatures))
    for row in range(4):
        alone = gumbel_argmax(wide[row : row + 1, :9000], [keys_of(4)[row]], [temperatures[row]])
        assert alone.ids[0] == result.ids[row] and alone.values[0] == result.values[row]


@needs_loops
def test_rows_of_any_strides_are_read() -> None:
    logits, keys, temperatures = random_logits(9000, 3), keys_of(3), [1.0] * 3
    for x in (logits.T, logits[:, :1].T.expand(3, -1), random_logits(3, 18_000)[:, ::2]):
        assert_equal(
            gumbel_argmax(x, keys, temperatures), reference_gumbel_argmax(x, keys, temperatures)
        )
    one_row = logits[:, :1].T[:, :8500].expand(1, -1)
    assert_equal(
        gumbel_argmax(one_row, keys[:1], [1.0]), reference_gumbel_argmax(one_row, keys[:1], [1.0])
    )


@loop_over("v", [101, 30_001])
def test_slices_of_the_vocabulary_have_the_same_winner(v: int) -> None:
    logits, keys, temperatures = random_logits(6, v), keys_of(6), [1.0, 0.0, 0.3, 1.0, 2.0, 0.0]
    logits[1, [7, v // 2 + 3, v - 1]] = logits.max() + 1  # equal logits in each slice
    complete = gumbel_argmax(logits, keys, temperatures)
    for borders in ([0, v // 2, v], [0, 10, v // 3, v - 1, v]):
        slices = [
            gumbel_argmax(logits[:, first:last], keys, temperatures, first_token=first)
            for first, last in itertools.pairwise(borders)
        ]
        winner = torch.stack([part.values for part in slices]).argmax(0)
        ids = torch.stack([part.ids for part in slices])[winner, torch.arange(6)]
        assert torch.equal(ids, complete.ids)
    assert complete.ids[1] == 7


@loop_over("v", [64, 9000])
def test_greedy_selects_the_first_of_equal_logits_without_noise(v: int) -> None:
    logits = torch.full((3, v), -1.0)
    logits[0, [5, 9, v - 1]] = 2.0
    logits[1, [3, 7]] = torch.tensor([-0.0, 0.0])
    result = gumbel_argmax(logits, keys_of(3), [0.0] * 3)
    assert result.ids.tolist() == [5, 3, 0]
    assert result.values.tolist() == [2.0, 0.0, -1.0]


@loop_over("v", [64, 9000])
def test_invalid_and_masked_rows_are_reported_per_row(v: int) -> None:
    logits = random_logits(6, v)
    logits[0, 3] = float("nan")
    logits[1, v - 1] = float("inf")
    logits[2] = float("-inf")
    logits[3, :10] = float("-inf")
    logits[4, 0] = -float("nan")
    for temperature in (0.0, 1.0):
        result = gumbel_argmax(logits, keys_of(6), [temperature] * 6)
        assert result.ids[[0, 1, 2, 4]].tolist() == [-1] * 4
        assert result.values.isnan().tolist() == [True, True, False, False, True, False]
        assert result.values[2] == float("-inf")
        assert result.ids[3] >= 10 and result.ids[5] >= 0
        assert result.num_masked[2:4].tolist() == [v, 10] and result.num_masked[5] == 0


def test_float64_logits_are_compared_in_float64() -> None:
    logits = torch.zeros(1, 9000, dtype=torch.float64)
    logits[0, 77] = 1e-12
    assert gumbel_argmax(logits, [1], [0.0]).ids.tolist() == [77]
    assert gumbel_argmax(logits, [1], [1e-14]).ids.tolist() == [77]


def test_token_depends_on_the_key_only() -> None:
    logits = torch.zeros(40, 5000)
    ids = gumbel_argmax(logits, keys_of(40), [1.0] * 40).ids.tolist()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = gumbel_argmax(logits, [keys_of(40)[i] for i in order], [1.0] * 40).ids.tolist()
    assert shuffled == [ids[i] for i in order] and len(set(ids)) > 35

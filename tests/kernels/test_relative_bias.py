"""Relative position bias: the buckets of T5, one lookup per distance, and attention with biases."""

import math

import pytest
import torch
from torch import Tensor

from megalith.kernels.attention.scores import (
    Distances,
    PairBiases,
    biases_by_distance,
    distance_biases,
    distance_buckets,
    reference_biases,
)


def by_formula(distance: int, *, num_buckets: int, max_distance: int, causal: bool) -> int:
    """The paper's rule for one pair."""
    first, far = 0, max(-distance, 0)
    if not causal:
        num_buckets //= 2
        first, far = num_buckets if distance > 0 else 0, abs(distance)
    exact = num_buckets // 2
    if far < exact:
        return first + far
    share = math.log(far / exact) / math.log(max_distance / exact)
    return first + min(num_buckets - 1, exact + math.floor(share * (num_buckets - exact) + 1e-9))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (12, 60), (4, 7)])
def test_short_distances_have_a_bucket_each_and_long_ones_share(
    num_buckets: int, max_distance: int, causal: bool
) -> None:
    distances = list(range(-200, 200))
    result = distance_buckets(
        torch.tensor(distances), num_buckets=num_buckets, max_distance=max_distance, causal=causal
    )
    expected = [
        by_formula(d, num_buckets=num_buckets, max_distance=max_distance, causal=causal)
        for d in distances
    ]
    assert result.tolist() == expected


def test_golden_buckets_of_t5() -> None:
    distances = torch.tensor(
        [-200, -128, -127, -64, -20, -16, -15, -8, -7, -1, 0, 1, 7, 8, 15, 16, 64, 127, 128, 200]
    )
    both = distance_buckets(distances, num_buckets=32, max_distance=128, causal=False).tolist()
    assert both == [15, 15, 15, 14, 10, 10, 9, 8, 7, 1, 0, 17, 23, 24, 25, 26, 30, 31, 31, 31]
    back = distance_buckets(distances, num_buckets=32, max_distance=128, causal=True).tolist()
    assert back == [31, 31, 31, 26, 17, 16, 15, 8, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (12, 60), (4, 7)])
def test_buckets_match_transformers(num_buckets: int, max_distance: int, causal: bool) -> None:
    reference = pytest.importorskip(
        "transformers.models.t5.modeling_t5"
    ).T5Attention._relative_position_bucket
    distances = torch.arange(-5000, 5001)
    expected = reference(
        distances, bidirectional=not causal, num_buckets=num_buckets, max_distance=max_distance
    )
    result = distance_buckets(
        distances, num_buckets=num_buckets, max_distance=max_distance, causal=causal
    )
    assert torch.equal(result, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 7), (1, 40), (60, 60)])
def test_lookup_by_distance_matches_lookup_by_pair(queries: int, keys: int, causal: bool) -> None:
    table = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    actual, naive = (
        make(table, queries, keys, max_distance=20, causal=causal)
        for make in (distance_biases, reference_biases)
    )
    assert torch.equal(actual, naive) and actual.shape == (3, queries, keys)
    weights = torch.randn(3, queries, keys, dtype=torch.float64)
    grads = [torch.autograd.grad((biases * weights).sum(), table)[0] for biases in (actual, naive)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_meta_table_gives_shapes() -> None:
    table = torch.empty(8, 3, device="meta")
    biases: Tensor = distance_biases(table, 2, 5, max_distance=20, causal=True)
    assert biases.shape == (3, 2, 5) and biases.is_meta


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [20, 59])
def test_biases_by_distance_match_biases_by_pair(reach: int, causal: bool) -> None:
    """Tokens of all numbers, taken from anywhere; a reach within which buckets differ
    no more changes nothing."""
    table = torch.randn(8, 3, dtype=torch.float64)
    pairs = reference_biases(table, 60, 60, max_distance=20, causal=causal)
    values = biases_by_distance(table, reach, max_distance=20, causal=causal)
    queries, keys = torch.tensor([0, 7, 58, 3]), torch.tensor([59, 1, 8, 2, 30])
    result = PairBiases(values, Distances(queries, keys, reach)).of_row(1)
    assert values.shape == (3, 2 * reach + 1)
    assert torch.equal(result, pairs[:, queries][:, :, keys])


def test_meta_table_gives_values_of_all_distances() -> None:
    values = biases_by_distance(torch.empty(8, 3, device="meta"), 5, max_distance=20, causal=True)
    biases = PairBiases(values, Distances(torch.arange(4), torch.arange(4), 5)).of_row(1)
    assert values.shape == (3, 11) and biases.is_meta and biases.shape == (3, 1, 1)

"""Logit statistics: of labeled tokens only, summed over microbatches, and reset when taken."""

import math

import pytest
import torch
from torch import Tensor

from megalith.parallel.cross_entropy import (
    CrossEntropyResult,
    LogitStats,
    LossWithLogitStats,
    VocabShard,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
)
from megalith.parallel.group import single_rank_group


def measured(logsumexp: list[float], largest: list[float]) -> CrossEntropyResult:
    return CrossEntropyResult(torch.zeros(()), torch.tensor(logsumexp), torch.tensor(largest))


def test_microbatches_are_summed_without_unlabeled_tokens() -> None:
    seen = LogitStats()
    seen.record(measured([2.0, 9.0], [1.5, 8.0]), torch.tensor([4, -1]), 0.5)
    seen.record(measured([1.0, 3.0], [0.5, 2.5]), torch.tensor([0, 1]), 0.5)
    z, largest = seen.pop()
    assert z is not None and largest is not None
    assert (float(z), float(largest)) == (0.5 * (4 + 1 + 9), 2.5)
    assert seen.pop() == (None, None)


def test_microbatch_without_labels_has_no_largest_logit() -> None:
    seen = LogitStats()
    seen.record(measured([2.0], [1.5]), torch.tensor([-1]), 0.5)
    seen.record(measured([], []), torch.tensor([], dtype=torch.int64), 0.5)
    z, largest = seen.pop()
    assert z is not None and largest is not None
    assert float(z) == 0.0 and float(largest) == -math.inf


def test_loss_is_not_changed_by_logit_stats() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (6, 7))
    labels, words = (
        torch.tensor([0, 1, -1, 6, 2, 2]),
        {"vocab": VocabShard(single_rank_group("tp"), 0, 7)},
    )
    watched = LossWithLogitStats(linear_cross_entropy_with_stats, 0.25)
    result: Tensor = watched(x, weight, labels, **words)
    assert result.item() == linear_cross_entropy(x, weight, labels, **words, z_loss=0.25).item()
    z, largest = watched.logit_stats.pop()
    assert z is not None and largest is not None
    assert result.item() - linear_cross_entropy(x, weight, labels, **words).item() == pytest.approx(
        float(z)
    )
    assert float(largest) == (x @ weight.T)[labels >= 0].max().item()

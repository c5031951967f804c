"""What the values of stored tensors look like: how they are spread, and whether all of them are
numbers."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from megalith.checkpoint.load import Checkpoint
from megalith.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Of the finite elements of one tensor; nan where it has none."""

    mean: float
    std: float
    """From the mean, over all of them."""

    least: float
    largest: float
    not_finite: int
    """Elements that are nan or infinite."""


def names_matching(checkpoint: Checkpoint, only: str) -> list[str]:
    """Names of tensors that a pattern fits, sorted.

    Raises:
        CheckpointError: there are none.
    """
    names = [name for name in sorted(checkpoint.manifest.tensors) if fnmatchcase(name, only)]
    if not names:
        raise CheckpointError(
            f"--only={only} matches none of the tensors of {checkpoint.path}. Use a pattern such "
            "as model.*, which all weights have."
        )
    return names


def statistics_of(checkpoint: Checkpoint, name: str) -> Statistics:
    """Reads one stored box at a time, adds up in float64.

    Raises:
        CheckpointError: a file is damaged.
    """
    count, not_finite, mean, squares = 0, 0, 0.0, 0.0
    least, largest = math.inf, -math.inf
    for stored in checkpoint.manifest.tensors[name].boxes:
        values = _finite(checkpoint.read(name, stored.box))
        not_finite += math.prod(stop - start for start, stop in stored.box) - values.numel()
        if not values.numel():
            continue
        own, more = float(values.mean()), values.numel()
        # Of two parts: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm",
        # equation 2.1.
        squares += float((values - own).square().sum()) + (own - mean) ** 2 * count * more / (
            count + more
        )
        mean += (own - mean) * more / (count + more)
        count += more
        least, largest = min(least, float(values.min())), max(largest, float(values.max()))
    if not count:
        return Statistics(
            mean=math.nan, std=math.nan, least=math.nan, largest=math.nan, not_finite=not_finite
        )
    return Statistics(
        mean=mean,
        std=math.sqrt(squares / count),
        least=least,
        largest=largest,
        not_finite=not_finite,
    )


def values_that_are_no_numbers(checkpoint: Checkpoint) -> list[str]:
    """A line for every tensor with elements that are nan or infinite.

    Raises:
        CheckpointError: a file is damaged.
    """
    found = {
        name: statistics_of(checkpoint, name).not_finite
        for name in sorted(checkpoint.manifest.tensors)
    }
    return [
        f"{name}: {count:,} of {math.prod(checkpoint.shape(name)):,} elements are nan or infinite"
        for name, count in found.items()
        if count
    ]


def _finite(values: Tensor) -> Tensor:
    values = values.double()
    return values[torch.isfinite(values)]

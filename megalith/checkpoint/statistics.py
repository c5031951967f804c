"""Statistics of the values of stored tensors: mean, spread, and NaN or infinite elements."""

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from megalith.checkpoint.load import Checkpoint
from megalith.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Statistics of the finite elements of one tensor; NaN if it has none."""

    mean: float
    std: float
    """Population standard deviation."""

    least: float
    largest: float
    not_finite: int
    """Number of elements that are NaN or infinite."""


def match_tensor_names(checkpoint: Checkpoint, only: str) -> list[str]:
    """Return the sorted names of tensors that match a pattern.

    Raises:
        CheckpointError: no tensor matches.
    """
    names = [name for name in sorted(checkpoint.manifest.tensors) if fnmatchcase(name, only)]
    if not names:
        raise CheckpointError(
            f"--only={only} matches none of the tensors of {checkpoint.path}. Use a pattern such "
            "as model.*, which all weights have."
        )
    return names


def compute_statistics(checkpoint: Checkpoint, name: str) -> Statistics:
    """Compute the statistics of a tensor, one stored box at a time, in float64.

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
        box_mean, box_count = float(values.mean()), values.numel()
        # Combine two parts: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise
        # algorithm", equation 2.1.
        squares += float((values - box_mean).square().sum()) + (
            box_mean - mean
        ) ** 2 * count * box_count / (count + box_count)
        mean += (box_mean - mean) * box_count / (count + box_count)
        count += box_count
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


def list_nonfinite_tensors(checkpoint: Checkpoint) -> list[str]:
    """Return a line for every tensor with NaN or infinite elements.

    Raises:
        CheckpointError: a file is damaged.
    """
    nonfinite_counts = {
        name: compute_statistics(checkpoint, name).not_finite
        for name in sorted(checkpoint.manifest.tensors)
    }
    return [
        f"{name}: {count:,} of {math.prod(checkpoint.shape(name)):,} elements are nan or infinite"
        for name, count in nonfinite_counts.items()
        if count
    ]


def _finite(values: Tensor) -> Tensor:
    values = values.double()
    return values[torch.isfinite(values)]

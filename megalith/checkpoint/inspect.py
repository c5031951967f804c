"""Compares two checkpoints tensor by tensor, and computes statistics of stored tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from megalith.checkpoint.load import Checkpoint
from megalith.errors import CheckpointError

Kind = Literal["same", "only in a", "only in b", "shape", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """Comparison of one tensor of two checkpoints."""

    name: str
    kind: Kind
    """`same`: all elements differ by at most the tolerance, also between dtypes."""

    a: str | None
    """Shape and dtype in the first checkpoint."""

    b: str | None
    """Shape and dtype in the second checkpoint."""

    largest: float = 0.0
    """Largest absolute difference of two elements; inf if one of them is NaN."""

    differing: int = 0
    """Number of elements that differ by more than the tolerance."""

    numel: int = 0


def compare_checkpoints(
    a: Checkpoint, b: Checkpoint, *, atol: float = 0.0, only: str = "*"
) -> Iterator[TensorComparison]:
    """Compare the tensors of both checkpoints whose names match `only`, in any layouts, by
    name.

    Reads one box at a time: at most two stored boxes and their intersections are in memory.

    Raises:
        CheckpointError: a file is damaged, or no tensor matches.
    """
    names = [name for name in sorted({*a.keys(), *b.keys()}) if fnmatchcase(name, only)]
    if not names:
        raise CheckpointError(
            f"--only={only} matches none of the tensors of {a.path} and {b.path}. Use a pattern "
            "such as model.*, which all weights have."
        )
    for name in names:
        yield _compare(a, b, name, atol)


def _compare(a: Checkpoint, b: Checkpoint, name: str, atol: float) -> TensorComparison:
    in_a, in_b = (_describe(each, name) for each in (a, b))
    if in_a is None or in_b is None:
        return TensorComparison(
            name=name, kind="only in b" if in_a is None else "only in a", a=in_a, b=in_b
        )
    if a.shape(name) != b.shape(name):
        return TensorComparison(name=name, kind="shape", a=in_a, b=in_b)
    largest, differing, numel = 0.0, 0, 0
    for stored in a.manifest.tensors[name].boxes:
        gap = _gap(a.read(name, stored.box), b.read(name, stored.box))
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        differing += int((gap > atol).sum())
        numel += gap.numel()
    kind: Kind = "values" if differing else "same"
    return TensorComparison(
        name=name, kind=kind, a=in_a, b=in_b, largest=largest, differing=differing, numel=numel
    )


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """Return absolute differences in float64; 0 between equal infinities and two NaNs, inf if one
    is NaN."""
    x, y = x.double(), y.double()
    gap = torch.where(x == y, 0.0, (x - y).abs())
    gap = torch.where(x.isnan() & y.isnan(), 0.0, gap)
    return torch.nan_to_num(gap, nan=torch.inf, posinf=torch.inf)


def _describe(checkpoint: Checkpoint, name: str) -> str | None:
    tensor = checkpoint.manifest.tensors.get(name)
    return None if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"


# --- statistics of the values of stored tensors: mean, spread, and NaN or infinite elements


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

"""Merges of models that were fine-tuned from one base: task vectors and TIES, box by box.

A task vector is the difference between the weights of a fine-tuned model and those of its base.
Sources: Ilharco et al. 2022, arXiv:2212.04089 (task arithmetic); Yadav et al. 2023,
arXiv:2306.01708 (TIES: trim, elect sign, disjoint mean).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from megalith.checkpoint.format import divide
from megalith.checkpoint.save import BOX_NBYTES
from megalith.hf.pretrained import Pretrained
from megalith.plan.shards import Box
from megalith.posttrain.average import (
    WeightsOutput,
    add_weighted,
    list_shapes,
    list_weight_outputs,
    read_finite,
)

MergeMethod = Literal["task", "ties"]
"""task: base + scale * sum of weighted task vectors; ties: base + scale * disjoint mean of trimmed
task vectors."""

_BIN_BITS = 16
"""Bits of a float64 that one pass of `find_kth_largest` resolves: its table has 0.5 MiB."""

# --- pure functions


def find_kth_largest(read_blocks: Callable[[], Iterable[Tensor]], k: int) -> float:
    """Return the `k`-th largest absolute value (from 1) of finite float64 blocks, exactly.

    The blocks are read four times, and one is in memory at a time: the bits of non-negative floats
    have the order of their values, and each pass counts the next 16 bits (radix selection).
    """
    prefix, rank = 0, k
    for shift in range(64 - _BIN_BITS, -1, -_BIN_BITS):
        counts = torch.zeros(1 << _BIN_BITS, dtype=torch.int64)
        for block in read_blocks():
            bits = block.reshape(-1).abs().view(torch.int64)
            if shift < 64 - _BIN_BITS:
                bits = bits[(bits >> (shift + _BIN_BITS)) == prefix]
            counts += torch.bincount(
                (bits >> shift) & ((1 << _BIN_BITS) - 1), minlength=len(counts)
            )
        at_least = counts.flip(0).cumsum(0)
        index = int(torch.searchsorted(at_least, rank))
        rank -= int(at_least[index - 1]) if index else 0
        prefix = prefix << _BIN_BITS | (len(counts) - 1 - index)
    return float(torch.tensor(prefix, dtype=torch.int64).view(torch.float64))


def trim_(delta: Tensor, threshold: float) -> Tensor:
    """Set elements whose absolute value is below `threshold` to zero, in place."""
    return delta.masked_fill_(delta.abs() < threshold, 0.0)


def compute_disjoint_mean(
    parts: Sequence[Callable[[], Tensor]], coefficients: Sequence[float]
) -> Tensor:
    """Return the disjoint mean of TIES: for each element the weighted mean of those values that
    have the sign of the weighted sum; 0 where the sum is 0. One part is in memory at a time."""
    sign = add_weighted(parts, coefficients, torch.float64).sign_()
    total, weight = torch.zeros_like(sign), torch.zeros_like(sign)
    for read, coefficient in zip(parts, coefficients, strict=True):
        values = read()
        elected = (values.sign() == sign) & (sign != 0)
        total.add_(values.where(elected, 0.0), alpha=coefficient)
        weight.add_(elected, alpha=coefficient)
    return total.div_(weight.masked_fill_(weight == 0, 1.0))


# --- models


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """How task vectors are merged."""

    method: MergeMethod
    coefficients: Sequence[float]
    """Weight of each model's task vector."""

    scale: float = 1.0
    density: float = 0.2
    """Fraction of the elements of each tensor of a task vector that TIES does not trim: the largest
    ones."""


@dataclass(frozen=True, slots=True)
class MergedWeights:
    """Weights of a base plus merged task vectors, from master weights where these are stored."""

    base: Pretrained
    models: Sequence[Pretrained]
    settings: MergeSettings
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the parameters."""

    _thresholds: dict[tuple[int, str], float] = field(default_factory=dict, repr=False)
    """Model number and parameter -> smallest absolute value that is not trimmed."""

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype of the base."""
        return self.base.weights.dtype(parameter)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of the merged weights."""
        settings = self.settings
        parts = [
            partial(self._read_delta, number, parameter, box) for number in range(len(self.models))
        ]
        if settings.method == "task":
            merged = add_weighted(parts, settings.coefficients, torch.float64)
        else:
            merged = compute_disjoint_mean(parts, settings.coefficients)
        base = read_finite(self.base.weights, parameter, box, torch.float64)
        return torch.add(base, merged, alpha=settings.scale, out=merged).to(dtype)

    def _read_delta(self, number: int, parameter: str, box: Box) -> Tensor:
        """Return a box of a model's task vector, trimmed if the method is TIES."""
        delta = self._read_task_vector(number, parameter, box)
        if self.settings.method == "task" or self.settings.density == 1:
            return delta
        return trim_(delta, self._find_threshold(number, parameter))

    def _read_task_vector(self, number: int, parameter: str, box: Box) -> Tensor:
        tuned = read_finite(self.models[number].weights, parameter, box, torch.float64)
        return tuned - read_finite(self.base.weights, parameter, box, torch.float64)

    def _find_threshold(self, number: int, parameter: str) -> float:
        """Return the smallest absolute value of a task vector that is not trimmed."""
        key = number, parameter
        if key not in self._thresholds:
            shape = self.shapes[parameter]
            full = tuple((0, size) for size in shape)
            k = max(1, math.ceil(self.settings.density * math.prod(shape)))
            boxes = list(divide(full, BOX_NBYTES // torch.float64.itemsize))
            if len(boxes) == 1:
                whole = [self._read_task_vector(number, parameter, full)]
                self._thresholds[key] = find_kth_largest(lambda: whole, k)
            else:
                self._thresholds[key] = find_kth_largest(
                    lambda: (self._read_task_vector(number, parameter, box) for box in boxes), k
                )
        return self._thresholds[key]


def merge_models(
    base: Pretrained, models: Sequence[Pretrained], settings: MergeSettings
) -> WeightsOutput:
    """Return the merge of models that were fine-tuned from `base`; tokenizer and settings are those
    of the first model."""
    weights = MergedWeights(base, models, settings, list_shapes(base))
    made_from = {
        "method": settings.method,
        "base": str(base.path.absolute()),
        "sources": [str(model.path.absolute()) for model in models],
        "weights": list(settings.coefficients),
        "scale": settings.scale,
    } | ({"density": settings.density} if settings.method == "ties" else {})
    return WeightsOutput(
        models[0],
        list_weight_outputs(models[0].model, weights, [base, *models]),
        made_from=made_from,
    )

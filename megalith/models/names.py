"""How another library's tensors map to ours: each is a box of one of our parameters, seen with other dims.

The map is a list of values, so that reading, writing, dry runs and tests all follow the same rules.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.config.model import ModelConfig
from megalith.plan.shards import Box


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of theirs. Its elements in row-major order are those of `box` in ours."""

    name: str
    """Theirs."""

    shape: tuple[int, ...]
    """Theirs; every dim is one or several neighbouring dims of the box."""

    parameter: str | None
    """Our name; None: it is zero, because their model has a bias where ours has none."""

    box: Box
    """Its part of our parameter; for zeros, its own extent."""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture of theirs, and all that differs from the others."""

    architecture: str
    """As config.json names it."""

    model_type: str
    """The same in configs that name no architecture."""

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Contents of config.json -> ours; raises ConfigError with every field that cannot be kept."""

    write_config: Callable[[ModelConfig], dict[str, Any]]
    """Ours -> config.json; raises ConfigError with every field that it has no words for."""

    rules: Callable[[ModelConfig], list[TensorRule]]
    """All tensors of the architecture, in the order of the forward pass."""

    ignored: re.Pattern[str]
    """Tensors of old files that hold nothing to keep."""

    tied: str
    """The tensor that a model with tied embeddings may have or leave out."""


def slices(rule: TensorRule, part: Box) -> tuple[slice, ...]:
    """Where `part`, which lies inside the rule's box, is in their tensor.

    >>> rule = TensorRule("k", (6, 4), "kv", ((0, 1), (0, 2), (0, 3), (0, 4)))
    >>> slices(rule, ((0, 1), (1, 2), (0, 3), (2, 4)))
    (slice(3, 6, None), slice(2, 4, None))
    """
    spans = iter(zip(rule.box, part, strict=True))
    found = []
    for size in rule.shape:
        first, stop, covered, numel = 0, 1, 1, 1
        while covered < size:
            (origin, end), (a, b) = next(spans)
            first, stop = first * (end - origin) + a - origin, (stop - 1) * (end - origin) + b - origin
            covered, numel = covered * (end - origin), numel * (b - a)
        assert stop - first == numel, (rule, part)  # cuts of heads and runs of memory never leave gaps within a dim
        found.append(slice(first, stop))
    return tuple(found)


def by_parameter(rules: Sequence[TensorRule]) -> dict[str, list[TensorRule]]:
    """The rules of each parameter of ours."""
    found: dict[str, list[TensorRule]] = {}
    for rule in rules:
        if rule.parameter is not None:
            found.setdefault(rule.parameter, []).append(rule)
    return found


def extent(rules: Sequence[TensorRule]) -> tuple[int, ...]:
    """Shape of a parameter of ours as far as their tensors fill it: without padded rows."""
    return tuple(max(stop for _, stop in spans) for spans in zip(*(rule.box for rule in rules), strict=True))


def rule(
    name: str, parameter: str | None, lengths: Sequence[int], *, shape: Sequence[int], part: int | None = None
) -> TensorRule:
    """A rule for the whole of a parameter of `lengths`, or for its `part`th slice along a new first dim."""
    box = tuple((0, length) for length in lengths)
    assert math.prod(shape) == math.prod(lengths), name
    return TensorRule(name, tuple(shape), parameter, box if part is None else ((part, part + 1), *box))

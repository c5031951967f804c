"""How another library's tensors map to ours: a part of each, seen with other dims, is a box of one
of our parameters.

The map is a list of values, so that reading, writing, dry runs and tests all follow the same rules.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.plan.shards import Box

BALANCING_BIAS = ".balancing_bias"
"""How parameters end that steps move by a thousandth: beyond a quarter bf16 has no such steps, so
they stay wide."""

BALANCING_OFFSET = ".balancing_offset"
"""How parameters end that are taken off logits before experts are chosen: narrowed, others would be
chosen."""


def dtype_to_write(parameter: str, stored: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """What a parameter of ours is written in, in folders of theirs and of ours; `asked` unset: as
    it is stored."""
    if asked is None:
        return stored
    return (
        torch.promote_types(asked, stored)
        if parameter.endswith((BALANCING_BIAS, BALANCING_OFFSET))
        else asked
    )


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A part of one tensor of theirs: `theirs.view(view)[at]`, its dims in our order, is `box` of
    our parameter."""

    name: str
    """Theirs."""

    shape: tuple[int, ...]
    """Theirs, as stored."""

    parameter: str | None
    """Our name; None: it is zero, because their model has a bias where ours has none."""

    box: Box
    """The part of our parameter; for zeros, its own extent."""

    view: tuple[int, ...]
    """Their tensor with each of its dims as one or several."""

    at: Box
    """The part of the view; other rules have the rest, if there is any."""

    dims: tuple[int | None, ...]
    """For each of our dims, which dim of the view it is; None: one of length 1 that they lack."""

    @property
    def whole(self) -> bool:
        """Whether it is the only rule of its tensor."""
        return self.at == tuple((0, size) for size in self.view)

    @property
    def in_order(self) -> bool:
        """Whether the elements of the view come in the order of those of our box."""
        return [dim for dim in self.dims if dim is not None] == list(range(len(self.view)))


def no_copies(config: ModelConfig) -> list[TensorRule]:
    """Nothing is stored twice."""
    return []


def as_promised(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """A config that holds whatever the tensors are called."""
    return config


@dataclass(frozen=True, slots=True)
class Outer:
    """An architecture of theirs that has one of text inside, and more beside it that is not read
    here."""

    architecture: str
    """As config.json names it."""

    model_type: str
    """The same in configs that name no architecture."""

    section: str
    """Of config.json, where the inner model's is."""

    prefix: str
    """What begins the names of the inner model's tensors."""

    others: re.Pattern[str]
    """Names of all other tensors, which are left where they are."""


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

    prefix: str = ""
    """What begins the names of most tensors, and is missing in some files."""

    copies: Callable[[ModelConfig], list[TensorRule]] = no_copies
    """Tensors that repeat a whole parameter; a folder may lack them, ours have them."""

    joined: Callable[[ModelConfig], list[TensorRule]] | None = None
    """The same where a layer's experts share tensors, as in the memory of transformers 5; unset:
    there are no experts, or no other way."""

    in_transformers: bool = True
    """Whether `from_pretrained` reads what is written without code of the model's own."""

    outer: Outer | None = None
    """An architecture whose folders may be read as this one; it is never written."""

    settle: Callable[[ModelConfig, Collection[str]], ModelConfig] = as_promised
    """What the names of a folder's tensors decide, because its config.json may promise what is not
    there."""


class Region(NamedTuple):
    """Where a box of ours is in a tensor of theirs: `theirs[slices].view(view)[at]`, and then its
    dims in our order."""

    slices: tuple[slice, ...]
    """One run of each of their dims."""

    view: tuple[int, ...]
    at: tuple[slice, ...]


def region_of(rule: TensorRule, part: Box) -> Region:
    """Where `part`, which lies inside the rule's box, is in their tensor.

    >>> keys = rule("k", "kv", (2, 3, 4), shape=(6, 4), part=0)
    >>> region_of(keys, ((0, 1), (1, 2), (0, 3), (2, 4))).slices
    (slice(3, 6, None), slice(2, 4, None))
    """
    spans = list(rule.at)
    for dim, (start, stop), (origin, _) in zip(rule.dims, part, rule.box, strict=True):
        if dim is not None:
            first = rule.at[dim][0] + start - origin
            spans[dim] = (first, first + stop - start)
    groups = [_run(rule.view[dims], spans[dims]) for dims in _groups(rule)]
    view = tuple(size for _, sizes, _ in groups for size in sizes)
    return Region(
        tuple(run for run, _, _ in groups),
        view,
        tuple(span for _, _, inner in groups for span in inner),
    )


def _groups(rule: TensorRule) -> list[slice]:
    """The dims of the view that make up each of their dims."""
    groups, start = [], 0
    for size in rule.shape:
        stop, length = start, 1
        while length < size or stop == start:
            length *= rule.view[stop]
            stop += 1
        assert length == size, rule
        groups.append(slice(start, stop))
        start = stop
    assert all(size == 1 for size in rule.view[start:]), rule
    return [*groups[:-1], slice(groups[-1].start, len(rule.view))]


def _run(
    sizes: Sequence[int], spans: Sequence[tuple[int, int]]
) -> tuple[slice, tuple[int, ...], tuple[slice, ...]]:
    """The shortest run of one dim of theirs that has the spans of the dims it is made of; its dims;
    the spans in it."""
    outer = next((i for i, (start, stop) in enumerate(spans) if stop - start > 1), len(spans) - 1)
    first = sum(
        start * math.prod(sizes[i + 1 :]) for i, (start, _) in enumerate(spans[: outer + 1])
    )
    count, inner = spans[outer][1] - spans[outer][0], math.prod(sizes[outer + 1 :])
    view = (*[1] * outer, count, *sizes[outer + 1 :])
    return (
        slice(first, first + count * inner),
        view,
        (
            *[slice(0, 1)] * outer,
            slice(0, count),
            *(slice(start, stop) for start, stop in spans[outer + 1 :]),
        ),
    )


def in_our_order(rule: TensorRule, values: Tensor) -> Tensor:
    """A part of the rule's view, dim by dim, with the dims of our parameter: a view of it."""
    kept = [dim for dim in rule.dims if dim is not None]
    dropped = [dim for dim in range(len(rule.view)) if dim not in kept]
    values = values.permute(*kept, *dropped).flatten(len(kept)) if dropped else values.permute(kept)
    values = values.squeeze(-1) if dropped else values
    for dim, theirs in enumerate(rule.dims):
        values = values.unsqueeze(dim) if theirs is None else values
    return values


def in_their_order(rule: TensorRule, values: Tensor) -> Tensor:
    """A part of our parameter, dim by dim, with the dims of the rule's view: a view of it."""
    kept = [dim for dim in rule.dims if dim is not None]
    squeezed = values.squeeze([dim for dim, theirs in enumerate(rule.dims) if theirs is None])
    found = squeezed.permute(sorted(range(len(kept)), key=kept.__getitem__))
    for dim in sorted(set(range(len(rule.view))) - set(kept)):
        found = found.unsqueeze(dim)
    return found


def by_tensor(rules: Sequence[TensorRule]) -> dict[str, list[TensorRule]]:
    """The rules of each tensor of theirs."""
    found: dict[str, list[TensorRule]] = {}
    for one in rules:
        found.setdefault(one.name, []).append(one)
    return found


def by_parameter(rules: Sequence[TensorRule]) -> dict[str, list[TensorRule]]:
    """The rules of each parameter of ours."""
    found: dict[str, list[TensorRule]] = {}
    for rule in rules:
        if rule.parameter is not None:
            found.setdefault(rule.parameter, []).append(rule)
    return found


def rules_of(family: Family, config: ModelConfig, names: Collection[str]) -> list[TensorRule]:
    """The rules of a folder that has tensors of these names."""
    if family.joined is not None and any(name.endswith(".experts.gate_up_proj") for name in names):
        return family.joined(config)
    return family.rules(config)


def as_stored(rules: Sequence[TensorRule], prefix: str, names: Collection[str]) -> list[TensorRule]:
    """The rules, without the prefix where none of a folder's names has it."""
    if not prefix or any(name.startswith(prefix) for name in names):
        return list(rules)
    return [replace(one, name=one.name.removeprefix(prefix)) for one in rules]


def extent(rules: Sequence[TensorRule]) -> tuple[int, ...]:
    """Shape of a parameter of ours as far as their tensors fill it: without padded rows."""
    return tuple(
        max(stop for _, stop in spans) for spans in zip(*(rule.box for rule in rules), strict=True)
    )


def rule(
    name: str,
    parameter: str | None,
    lengths: Sequence[int],
    *,
    shape: Sequence[int],
    part: int | None = None,
) -> TensorRule:
    """A rule for a whole tensor of theirs: a parameter of `lengths`, or its `part`th slice along
    one more first dim."""
    assert math.prod(shape) == math.prod(lengths), name
    if part is None:
        return piece(
            name, parameter, tuple((0, length) for length in lengths), shape=shape, view=lengths
        )
    box = ((part, part + 1), *((0, length) for length in lengths))
    return piece(name, parameter, box, shape=shape, view=lengths, dims=(None, *range(len(lengths))))


def piece(
    name: str,
    parameter: str | None,
    box: Box,
    *,
    shape: Sequence[int],
    view: Sequence[int],
    at: Box | None = None,
    dims: Sequence[int | None] | None = None,
) -> TensorRule:
    """A rule for a part of a tensor of theirs; unset: all of it, its dims in the order of ours."""
    found = TensorRule(
        name,
        tuple(shape),
        parameter,
        box,
        tuple(view),
        at or tuple((0, size) for size in view),
        tuple(range(len(box))) if dims is None else tuple(dims),
    )
    for dim, (start, stop) in zip(found.dims, found.box, strict=True):
        theirs = (0, 1) if dim is None else found.at[dim]
        assert theirs[1] - theirs[0] == stop - start, found
    return found

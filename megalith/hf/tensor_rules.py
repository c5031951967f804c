"""Rules that map Hugging Face tensors to parameters: a part of a tensor, seen with other dims, is a
box of a parameter.

The rules are plain values, which reading, writing, dry runs and tests share.
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
"""Suffix of expert biases, which change by 0.001 per step: above 0.25 bf16 cannot represent such a
step, so they are stored in fp32."""

BALANCING_OFFSET = ".balancing_offset"
"""Suffix of offsets subtracted from router logits: in a narrower dtype other experts would be
selected."""


def dtype_to_write(
    parameter: str, stored: torch.dtype, requested: torch.dtype | None
) -> torch.dtype:
    """Return the dtype in which a parameter is written; `requested` unset: the dtype in which it is
    stored."""
    if requested is None:
        return stored
    return (
        torch.promote_types(requested, stored)
        if parameter.endswith((BALANCING_BIAS, BALANCING_OFFSET))
        else requested
    )


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A part of one Hugging Face tensor: `tensor.view(view)[at]`, with its dims reordered, is `box`
    of a parameter."""

    name: str
    """Name of the Hugging Face tensor."""

    shape: tuple[int, ...]
    """Shape of the Hugging Face tensor as stored."""

    parameter: str | None
    """Name of the parameter; None: the tensor is zero, a bias that this model does not have."""

    box: Box
    """The part of the parameter; for zeros, the extent of the part itself."""

    view: tuple[int, ...]
    """Shape of the tensor with some of its dims split."""

    at: Box
    """The part of the view; other rules cover the rest."""

    dims: tuple[int | None, ...]
    """Dim of the view for each dim of the parameter; None: a dim of size 1 that the tensor does not
    have."""

    @property
    def covers_tensor(self) -> bool:
        """Whether the rule covers the whole tensor."""
        return self.at == tuple((0, size) for size in self.view)

    @property
    def keeps_order(self) -> bool:
        """Whether the elements of the view have the same order as those of the box."""
        return [dim for dim in self.dims if dim is not None] == list(range(len(self.view)))


def no_copied_tensors(config: ModelConfig) -> list[TensorRule]:
    """Return no rules: the family stores no parameter twice."""
    return []


def keep_config(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Return the config unchanged: it does not depend on the names of the tensors."""
    return config


@dataclass(frozen=True, slots=True)
class WrapperFamily:
    """A multimodal architecture that contains a supported text model; its other parts are not
    read."""

    architecture: str
    """Name in `architectures` of config.json."""

    model_type: str
    """model_type, used for configs without `architectures`."""

    section: str
    """Field of config.json that contains the config of the text model."""

    prefix: str
    """Prefix of the tensor names of the text model."""

    others: re.Pattern[str]
    """Names of the tensors that are not read."""


@dataclass(frozen=True, slots=True)
class Family:
    """A Hugging Face architecture: how its config and tensors are read and written."""

    architecture: str
    """Name in `architectures` of config.json."""

    model_type: str
    """model_type, used for configs without `architectures`."""

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """Return the ModelConfig of a config.json; raises ConfigError with every unsupported field."""

    write_config: Callable[[ModelConfig], dict[str, Any]]
    """Return the config.json of a ModelConfig; raises ConfigError with every setting that cannot be
    expressed."""

    rules: Callable[[ModelConfig], list[TensorRule]]
    """Return the rules of all tensors, in the order of the forward pass."""

    ignored: re.Pattern[str]
    """Tensors without parameters in old files."""

    tied: str
    """The head tensor, which files of models with tied embeddings may contain or omit."""

    prefix: str = ""
    """Prefix of most tensor names, which some files omit."""

    copies: Callable[[ModelConfig], list[TensorRule]] = no_copied_tensors
    """Return the rules of tensors that repeat a parameter: optional when reading, always
    written."""

    fused_rules: Callable[[ModelConfig], list[TensorRule]] | None = None
    """Return the rules for fused expert tensors, as in transformers 5; None: no experts, or no such
    format."""

    in_transformers: bool = True
    """Whether `from_pretrained` loads exported folders without custom code."""

    wrapper: WrapperFamily | None = None
    """A multimodal architecture whose folders can be read as this one; never written."""

    adjust_config: Callable[[ModelConfig, Collection[str]], ModelConfig] = keep_config
    """Correct a config by the tensors that the folder contains."""


class TensorSlice(NamedTuple):
    """Location of a box in a Hugging Face tensor: `tensor[slices].view(view)[at]`, with its dims
    reordered."""

    slices: tuple[slice, ...]
    """A slice of each dim of the tensor."""

    view: tuple[int, ...]
    at: tuple[slice, ...]


def locate_box(rule: TensorRule, part: Box) -> TensorSlice:
    """Return the location of `part`, a box inside the box of the rule, in the tensor.

    >>> keys = rule("k", "kv", (2, 3, 4), shape=(6, 4), part=0)
    >>> locate_box(keys, ((0, 1), (1, 2), (0, 3), (2, 4))).slices
    (slice(3, 6, None), slice(2, 4, None))
    """
    spans = list(rule.at)
    for dim, (start, stop), (origin, _) in zip(rule.dims, part, rule.box, strict=True):
        if dim is not None:
            first = rule.at[dim][0] + start - origin
            spans[dim] = (first, first + stop - start)
    groups = [_run(rule.view[dims], spans[dims]) for dims in _groups(rule)]
    view = tuple(size for _, sizes, _ in groups for size in sizes)
    return TensorSlice(
        tuple(hf_slice for hf_slice, _, _ in groups),
        view,
        tuple(span for _, _, inner in groups for span in inner),
    )


def _groups(rule: TensorRule) -> list[slice]:
    """Return the dims of the view that each dim of the tensor consists of."""
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
    """Return the shortest slice of one tensor dim that contains the spans of its view dims, its
    view, and the spans in that view."""
    outer_dim = next(
        (i for i, (start, stop) in enumerate(spans) if stop - start > 1), len(spans) - 1
    )
    first = sum(
        start * math.prod(sizes[i + 1 :]) for i, (start, _) in enumerate(spans[: outer_dim + 1])
    )
    count, inner_size = spans[outer_dim][1] - spans[outer_dim][0], math.prod(sizes[outer_dim + 1 :])
    view = (*[1] * outer_dim, count, *sizes[outer_dim + 1 :])
    return (
        slice(first, first + count * inner_size),
        view,
        (
            *[slice(0, 1)] * outer_dim,
            slice(0, count),
            *(slice(start, stop) for start, stop in spans[outer_dim + 1 :]),
        ),
    )


def to_parameter_layout(rule: TensorRule, values: Tensor) -> Tensor:
    """Return a view of a part of the tensor (dims of the rule's view) with the dims of the
    parameter."""
    kept_dims = [dim for dim in rule.dims if dim is not None]
    dropped_dims = [dim for dim in range(len(rule.view)) if dim not in kept_dims]
    values = (
        values.permute(*kept_dims, *dropped_dims).flatten(len(kept_dims))
        if dropped_dims
        else values.permute(kept_dims)
    )
    values = values.squeeze(-1) if dropped_dims else values
    for dim, view_dim in enumerate(rule.dims):
        values = values.unsqueeze(dim) if view_dim is None else values
    return values


def to_tensor_layout(rule: TensorRule, values: Tensor) -> Tensor:
    """Return a view of a part of the parameter with the dims of the rule's view."""
    kept_dims = [dim for dim in rule.dims if dim is not None]
    squeezed = values.squeeze([dim for dim, view_dim in enumerate(rule.dims) if view_dim is None])
    result = squeezed.permute(sorted(range(len(kept_dims)), key=kept_dims.__getitem__))
    for dim in sorted(set(range(len(rule.view))) - set(kept_dims)):
        result = result.unsqueeze(dim)
    return result


def group_by_tensor(rules: Sequence[TensorRule]) -> dict[str, list[TensorRule]]:
    """Group rules by tensor."""
    by_name: dict[str, list[TensorRule]] = {}
    for rule in rules:
        by_name.setdefault(rule.name, []).append(rule)
    return by_name


def group_by_parameter(rules: Sequence[TensorRule]) -> dict[str, list[TensorRule]]:
    """Group rules by parameter."""
    by_name: dict[str, list[TensorRule]] = {}
    for rule in rules:
        if rule.parameter is not None:
            by_name.setdefault(rule.parameter, []).append(rule)
    return by_name


def select_rules(family: Family, config: ModelConfig, names: Collection[str]) -> list[TensorRule]:
    """Return the rules of a folder, which depend on whether its expert tensors are fused."""
    if family.fused_rules is not None and any(
        name.endswith(".experts.gate_up_proj") for name in names
    ):
        return family.fused_rules(config)
    return family.rules(config)


def strip_missing_prefix(
    rules: Sequence[TensorRule], prefix: str, names: Collection[str]
) -> list[TensorRule]:
    """Return the rules, without the prefix if none of the tensor names has it."""
    if not prefix or any(name.startswith(prefix) for name in names):
        return list(rules)
    return [replace(rule, name=rule.name.removeprefix(prefix)) for rule in rules]


def unpadded_shape(rules: Sequence[TensorRule]) -> tuple[int, ...]:
    """Return the shape of a parameter that the tensors fill: without padded rows."""
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
    """Return the rule of a whole tensor: a parameter of shape `lengths`, or slice `part` of its
    additional first dim."""
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
    """Return the rule of a part of a tensor; `at` unset: the whole view, `dims` unset: the same
    order of dims."""
    result = TensorRule(
        name,
        tuple(shape),
        parameter,
        box,
        tuple(view),
        at or tuple((0, size) for size in view),
        tuple(range(len(box))) if dims is None else tuple(dims),
    )
    for dim, (start, stop) in zip(result.dims, result.box, strict=True):
        span = (0, 1) if dim is None else result.at[dim]
        assert span[1] - span[0] == stop - start, result
    return result


# Tensor rules that several families share and Llama does not have: LayerNorm with bias, and MLPs
# without a gate.


def layer_norm_rules(hf_name: str, parameter: str, size: int) -> list[TensorRule]:
    """Return the rules of a LayerNorm over `size` features."""
    return [
        rule(f"{hf_name}.{part}", f"{parameter}.{part}", (size,), shape=(size,))
        for part in ("weight", "bias")
    ]


def ungated_rules(config: ModelConfig, up: str, down: str, parameter: str) -> list[TensorRule]:
    """Return the rules of an MLP without a gate, whose linear layers are named `up` and `down`."""
    h, f = config.hidden_size, config.ffn_hidden_size
    rules = [
        rule(f"{up}.weight", f"{parameter}.up", (f, h), shape=(f, h)),
        rule(f"{down}.weight", f"{parameter}.down", (h, f), shape=(h, f)),
    ]
    if config.mlp_bias:
        rules += [
            rule(f"{up}.bias", f"{parameter}.up_bias", (f,), shape=(f,)),
            rule(f"{down}.bias", f"{parameter}.down_bias", (h,), shape=(h,)),
        ]
    return rules

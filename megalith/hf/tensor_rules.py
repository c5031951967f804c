"""Rules that map Hugging Face tensors to parameters: a part of a tensor, seen with other dims, is a
box of a parameter.

A family has a table of tensors, whose dims are written as in einops (`(n d) h`); `build_rules`
expands it to the rules of a model. The rules are plain values, which reading, writing, dry runs and
tests share.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.hf.config_fields import read_setting
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


class TensorSlice(NamedTuple):
    """Location of a box in a Hugging Face tensor: `tensor[slices].view(view)[at]`, with its dims
    reordered."""

    slices: tuple[slice, ...]
    """A slice of each dim of the tensor."""

    view: tuple[int, ...]
    at: tuple[slice, ...]


def locate_box(rule: TensorRule, part: Box) -> TensorSlice:
    """Return the location of `part`, a box inside the box of the rule, in the tensor.

    >>> keys = TensorRow("k", "kv", "(g d) h", "[0] g d h").build({"g": 2, "d": 3, "h": 4})
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


# --- table of tensors


class _Dim(NamedTuple):
    """A dim of the view of a tensor: sum of sizes, and the part of it that the rule covers."""

    size: str
    start: str
    stop: str


@dataclass(frozen=True, slots=True)
class TensorRow:
    """A row of a family's table: a Hugging Face tensor, or a part of it, and its parameter.

    `dims` lists the dims of the tensor; a dim in parentheses is split, `3[1:3]` is a part of a dim
    of size 3, and `n+g` the sum of two sizes. `box` lists the dims of the parameter, unset in the
    same order; `[1]` is an index of a dim that the tensor does not have. `[expert]` stands for the
    number of an expert, for each of which the row is repeated: in the name, and first in the box.

    >>> TensorRow("k", "kv", "(g d) h", "[0] g d h").build({"g": 2, "d": 3, "h": 4}).box
    ((0, 1), (0, 2), (0, 3), (0, 4))
    """

    name: str
    parameter: str
    dims: str
    box: str = ""
    when: str = ""
    """Setting that the model must have for the tensor to exist (`qkv_bias`, `moe.top_k=1`,
    `!tied_embeddings`)."""

    zeros: str = ""
    """Setting with which the tensor exists without its parameter, filled with zeros."""

    per_group: bool = False
    """Whether the first two dims of the view are KV groups and the query heads of each, which
    together are the first dim of the parameter."""

    def build(self, sizes: Mapping[str, int]) -> TensorRule:
        """Return the rule for dims of these sizes; of expert 0 if the row is repeated."""
        groups = _parse_dims(self.dims)
        dims = [dim for group in groups for dim in group]
        view = tuple(_evaluate(dim.size, sizes) for dim in dims)
        at = tuple((_evaluate(dim.start, sizes), _evaluate(dim.stop, sizes)) for dim in dims)
        box = [(0, stop - start) for start, stop in at]
        positions: list[int | None] = list(range(len(dims)))
        if self.box:
            names, spans = [dim.size for dim in dims], box
            positions, box = [], []
            for token in self.box.replace(EXPERT, "[0]").split():
                is_index = token.startswith("[")
                index = int(token[1:-1]) if is_index else names.index(token)
                positions.append(None if is_index else index)
                box.append((index, index + 1) if is_index else spans[index])
        shape = tuple(math.prod(_evaluate(dim.size, sizes) for dim in group) for group in groups)
        return TensorRule(self.name, shape, self.parameter, tuple(box), view, at, tuple(positions))


EXPERT = "[expert]"


@lru_cache
def _parse_dims(text: str) -> tuple[tuple[_Dim, ...], ...]:
    """Return the dims of a tensor, each as the dims it is split into."""
    groups = re.findall(r"\(([^)]*)\)|(\S+)", text)
    return tuple(
        tuple(_parse_dim(token) for token in (split or single).split()) for split, single in groups
    )


def _parse_dim(token: str) -> _Dim:
    size, _, part = token.rstrip("]").partition("[")
    start, colon, stop = part.partition(":")
    if not part:
        return _Dim(size, "0", size)
    return _Dim(size, start, stop if colon else f"{start}+1")


def _evaluate(expression: str, sizes: Mapping[str, int]) -> int:
    """Return the sum of sizes and numbers in an expression such as `n+g`."""
    return sum(int(name) if name.isdigit() else sizes[name] for name in expression.split("+"))


def _holds(condition: str, config: ModelConfig) -> bool:
    """Return whether a model has the setting of a condition."""
    setting, _, expected = condition.removeprefix("!").partition("=")
    value = read_setting(config, setting)
    return (str(value) == expected if expected else bool(value)) != condition.startswith("!")


LayerCondition = Callable[[ModelConfig, int], bool]


def has_attention(config: ModelConfig, layer: int) -> bool:
    """Return whether the layer has attention."""
    return config.attention_part(layer) == "full"


def has_mlp(config: ModelConfig, layer: int) -> bool:
    """Return whether the layer has an MLP, and no experts."""
    return config.mlp_part(layer) == "full" and not config.has_experts(layer)


def has_experts(config: ModelConfig, layer: int) -> bool:
    """Return whether the layer has a mixture of experts."""
    return config.has_experts(layer)


def in_every_layer(config: ModelConfig, layer: int) -> bool:
    """Return true: the tensors are in every layer."""
    return True


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The tensors of one module of a layer: its Hugging Face name, the name of ours, and rows with
    names inside the module."""

    name: str
    parameter: str
    rows: tuple[TensorRow, ...]
    when: LayerCondition = in_every_layer
    """Returns whether a layer has the module."""


@dataclass(frozen=True, slots=True)
class TensorTable:
    """All tensors of a family, in the order of the forward pass."""

    layer: tuple[TensorGroup, ...]
    embedding: tuple[TensorRow, ...]
    head: tuple[TensorRow, ...]
    """The last norm and the output head."""

    layers: str = "model.layers"
    """Prefix of the names of a layer's tensors, before its number."""

    mtp_layers: str = ""
    """Prefix of the names of an MTP layer's tensors, before its number; empty: MTP layers are
    numbered after the last layer."""

    mtp_transformer_layer: str = ""
    """Name of the transformer layer in an MTP layer, after a dot; empty: its tensors have no prefix
    of their own."""

    mtp_input: tuple[TensorRow, ...] = ()
    """Tensors of an MTP layer before those of its transformer layer."""

    mtp_output: tuple[TensorRow, ...] = ()
    """Tensors of an MTP layer after those of its transformer layer."""

    mtp_copies: tuple[TensorRow, ...] = ()
    """Tensors of an MTP layer that repeat parameters outside of it."""


def build_rules(table: TensorTable, config: ModelConfig) -> list[TensorRule]:
    """Return the rules of a model, in the order of the forward pass."""
    rules = _expand(table.embedding, config)
    for layer in range(config.num_layers):
        rules += _layer_rules(table, config, layer, f"{table.layers}.{layer}", f"layers.{layer}")
    rules += _expand(table.head, config)
    for depth in range(config.mtp.num_layers if table.mtp_input else 0):
        name, parameter = f"{table.layers}.{config.num_layers + depth}", f"mtp.{depth}"
        if table.mtp_layers:
            name = f"{table.mtp_layers}.{depth}"
        rules += _expand(table.mtp_input, config, name, parameter)
        inner = f"{name}{table.mtp_transformer_layer}"
        rules += _layer_rules(table, config, config.num_layers - 1, inner, f"{parameter}.layer")
        rules += _expand(table.mtp_output, config, name, parameter)
    return rules


def build_copy_rules(table: TensorTable, config: ModelConfig) -> list[TensorRule]:
    """Return the rules of tensors that repeat a parameter."""
    depths = range(config.mtp.num_layers)
    return [
        rule
        for depth in depths
        for rule in _expand(table.mtp_copies, config, f"{table.layers}.{config.num_layers + depth}")
    ]


def _layer_rules(
    table: TensorTable, config: ModelConfig, layer: int, name: str, parameter: str
) -> list[TensorRule]:
    layer_config = config.at(layer)
    groups = [group for group in table.layer if group.when(config, layer)]
    return [
        rule
        for group in groups
        for rule in _expand(
            group.rows, layer_config, f"{name}.{group.name}", f"{parameter}.{group.parameter}"
        )
    ]


def _expand(
    rows: Iterable[TensorRow], config: ModelConfig, name: str = "", parameter: str = ""
) -> list[TensorRule]:
    """Return the rules of the rows that the model has, with prefixes of names; rows of experts are
    repeated for each of them."""
    sizes = _dim_sizes(config)
    present = [
        row
        for row in rows
        if any(_holds(condition, config) for condition in (row.when, row.zeros) if condition)
        or not row.when
    ]
    rules: list[TensorRule] = []
    for is_repeated, group in groupby(present, lambda row: EXPERT in row.name):
        unnamed = [(row, _build_present(row, config, sizes)) for row in group]
        for expert in range(sizes["e"] if is_repeated else 1):
            rules += [
                _named(part, row, (name, parameter), expert)
                for row, rule in unnamed
                for part in (_split_groups(rule) if row.per_group else [rule])
            ]
    return rules


def _split_groups(rule: TensorRule) -> list[TensorRule]:
    """Return a rule for each KV group of a rule whose view starts with KV groups and query heads;
    one rule if each group has one query head.

    >>> row = TensorRow("qkv", "q", "(g r+2[0:r] d)", per_group=True)
    >>> [part.box for part in _split_groups(row.build({"g": 2, "r": 3, "d": 4}))]
    [((0, 3), (0, 4)), ((3, 6), (0, 4))]
    """
    (_, num_groups), (start, stop), *others = rule.at
    num_heads, dims = stop - start, range(1, len(rule.view))
    if num_heads == 1:
        box = ((0, num_groups), *((0, b - a) for a, b in others))
        return [replace(rule, box=box, dims=(0, *dims[1:]))]
    return [
        replace(
            rule,
            at=((group, group + 1), *rule.at[1:]),
            box=((group * num_heads, (group + 1) * num_heads), *((0, b - a) for a, b in others)),
            dims=tuple(dims),
        )
        for group in range(num_groups)
    ]


def _build_present(row: TensorRow, config: ModelConfig, sizes: Mapping[str, int]) -> TensorRule:
    """Return the rule of a tensor of the model; without its parameter if the model lacks it."""
    rule = row.build(sizes)
    if not row.zeros or _holds(row.when, config):
        return rule
    box = tuple((0, size) for size in rule.shape)
    return TensorRule(rule.name, rule.shape, None, box, rule.shape, box, tuple(range(len(box))))


def _named(rule: TensorRule, row: TensorRow, prefixes: tuple[str, str], expert: int) -> TensorRule:
    """Return a rule with full names, and the box of an expert."""
    name, parameter = (f"{prefix}." if prefix else "" for prefix in prefixes)
    box = rule.box
    if row.box.startswith(EXPERT):
        box = ((expert, expert + 1), *box[1:])
    return TensorRule(
        name + rule.name.replace(EXPERT, str(expert)),
        rule.shape,
        None if rule.parameter is None else parameter + rule.parameter,
        box,
        rule.view,
        rule.at,
        rule.dims,
    )


def _dim_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of named dims: h hidden, n heads, g KV heads, r query heads per KV head, d
    head dim, f ffn, v vocab, e experts."""
    sizes = {
        "v": config.vocab_size,
        "h": config.hidden_size,
        "n": config.num_heads,
        "g": config.num_kv_heads,
        "r": config.num_heads // config.num_kv_heads,
        "d": config.head_size(),
        "f": config.ffn_hidden_size,
        "positions": config.max_seq_len,
    }
    if (moe := config.moe) is not None:
        sizes |= {
            "e": moe.num_experts,
            "moe_f": moe.ffn_hidden_size,
            "shared_f": moe.shared_ffn_hidden_size or 0,
            "expert_h": moe.latent_size or config.hidden_size,
        }
    if (mla := config.mla) is not None:
        sizes |= {
            "kv_rank": mla.kv_rank,
            "q_rank": mla.q_rank or 0,
            "nope_d": mla.nope_dim,
            "rope_d": mla.rope_dim,
            "value_d": mla.value_dim,
        }
    return sizes


# --- tensors of Llama, which most families share


def layer_norm(name: str, parameter: str) -> TensorGroup:
    """Return the tensors of a LayerNorm: weight and bias."""
    rows = tuple(TensorRow(part, part, "h") for part in ("weight", "bias"))
    return TensorGroup(name, parameter, rows)


def rms_norm(name: str, parameter: str, when: LayerCondition = in_every_layer) -> TensorGroup:
    """Return the tensor of an RMSNorm."""
    return TensorGroup(name, parameter, (TensorRow("weight", "weight", "h"),), when)


HEAD = "lm_head.weight"
EMBEDDING = (TensorRow("model.embed_tokens.weight", "embed.weight", "v h"),)
FINAL_NORM = TensorRow("model.norm.weight", "norm.weight", "h")
UNTIED_HEAD = TensorRow(HEAD, "head.weight", "v h", when="!tied_embeddings")

ROTARY_BUFFERS = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Tensors without parameters: conversions of 2023 stored the rotary frequencies."""

INPUT_NORM = rms_norm("input_layernorm", "attention_norm")
MLP_NORM = rms_norm("post_attention_layernorm", "mlp_norm")

ATTENTION_WEIGHTS = (
    TensorRow("q_proj.weight", "q", "(n d) h"),
    TensorRow("k_proj.weight", "kv", "(g d) h", "[0] g d h"),
    TensorRow("v_proj.weight", "kv", "(g d) h", "[1] g d h"),
    TensorRow("o_proj.weight", "o", "h (n d)"),
    TensorRow("q_norm.weight", "q_norm.weight", "d", when="attention.qk_norm=head"),
    TensorRow("k_norm.weight", "k_norm.weight", "d", when="attention.qk_norm=head"),
    TensorRow("q_norm.weight", "q_norm.weight", "(n d)", when="attention.qk_norm=whole"),
    TensorRow("k_norm.weight", "k_norm.weight", "(g d)", when="attention.qk_norm=whole"),
)
ATTENTION_BIASES = (
    TensorRow("q_proj.bias", "q_bias", "(n d)", when="qkv_bias", zeros="output_bias"),
    TensorRow("k_proj.bias", "kv_bias", "(g d)", "[0] g d", when="qkv_bias", zeros="output_bias"),
    TensorRow("v_proj.bias", "kv_bias", "(g d)", "[1] g d", when="qkv_bias", zeros="output_bias"),
    TensorRow("o_proj.bias", "o_bias", "h", when="output_bias", zeros="qkv_bias"),
)
"""Biases of families with one field for all four: missing ones are exported as zeros."""

ATTENTION = TensorGroup(
    "self_attn", "attention", (*ATTENTION_WEIGHTS, *ATTENTION_BIASES), has_attention
)
ATTENTION_WITH_QKV_BIAS = TensorGroup(
    "self_attn",
    "attention",
    (*ATTENTION_WEIGHTS, *(replace(row, zeros="") for row in ATTENTION_BIASES)),
)
"""Attention whose output projection has no bias."""

GATED_MLP = TensorGroup(
    "mlp",
    "mlp",
    (
        TensorRow("gate_proj.weight", "gate_up", "f h", "[0] f h"),
        TensorRow("up_proj.weight", "gate_up", "f h", "[1] f h"),
        TensorRow("down_proj.weight", "down", "h f"),
        TensorRow("gate_proj.bias", "gate_up_bias", "f", "[0] f", when="mlp_bias"),
        TensorRow("up_proj.bias", "gate_up_bias", "f", "[1] f", when="mlp_bias"),
        TensorRow("down_proj.bias", "down_bias", "h", when="mlp_bias"),
    ),
    has_mlp,
)


def ungated_mlp(up: str, down: str) -> TensorGroup:
    """Return the tensors of an MLP without a gate, whose linear layers are named `up` and
    `down`."""
    return TensorGroup(
        "mlp",
        "mlp",
        (
            TensorRow(f"{up}.weight", "up", "f h"),
            TensorRow(f"{down}.weight", "down", "h f"),
            TensorRow(f"{up}.bias", "up_bias", "f", when="mlp_bias"),
            TensorRow(f"{down}.bias", "down_bias", "h", when="mlp_bias"),
        ),
        has_mlp,
    )


def llama_tensors(*layer: TensorGroup) -> TensorTable:
    """Return the table of a family whose tensors outside of layers are named as in Llama; `layer`
    unset: as in Llama, too."""
    groups = layer or (INPUT_NORM, ATTENTION, MLP_NORM, GATED_MLP)
    return TensorTable(groups, EMBEDDING, (FINAL_NORM, UNTIED_HEAD))

"""QK-clip: the attention modules of a model, and the factor of every row of their query and key
projections, from the largest score of each head. Source: Kimi Team 2025, arXiv:2507.20534, section
2.1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.optim import QkClipConfig
from megalith.config.train import TrainRun
from megalith.plan.shards import Shard, split_range_into_boxes

Factors = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Heads of one attention module."""

    name: str
    """Prefix of its parameters, such as layers.3.attention."""

    num_heads: int
    num_kv_heads: int
    mla: MLAConfig | None = None
    """Sizes of MLA; None: standard attention."""


def list_attentions(model: ModelConfig) -> tuple[AttentionHeads, ...]:
    """Return the attention modules of a model in the order of its layers, those of cross-layer
    attention and MTP layers included.

    >>> from megalith.config.model import MTPConfig
    >>> model = ModelConfig(vocab_size=64, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1,
    ...     ffn_hidden_size=8, mtp=MTPConfig(num_layers=1))
    >>> [attention.name for attention in list_attentions(model)]
    ['layers.0.attention', 'mtp.0.layer.attention']
    """
    last = model.num_layers - 1
    layers = [(f"layers.{layer}", layer) for layer in range(model.num_layers)]
    layers += [(f"mtp.{depth}.layer", last) for depth in range(model.mtp.num_layers)]
    return tuple(heads for name, layer in layers for heads in _list_layer(model, name, layer))


def _list_layer(model: ModelConfig, name: str, layer: int) -> Iterator[AttentionHeads]:
    """Yield the attention modules of layer number `layer` over all stages."""
    num_heads, num_kv_heads = model.num_heads, model.at(layer).num_kv_heads
    if model.attention_part(layer) == "full":
        yield AttentionHeads(f"{name}.attention", num_heads, num_kv_heads, model.mla)
    if model.uses_cross_layer_source(layer):
        yield AttentionHeads(f"{name}.cross", num_heads, num_kv_heads)


def head_factor(score: float, threshold: float) -> float:
    """Return the factor of a head's scores, given its largest score; 1 if it is not above the
    threshold, or if no pair was visible.

    >>> head_factor(400.0, 100.0), head_factor(50.0, 100.0), head_factor(-math.inf, 100.0)
    (0.25, 1.0, 1.0)
    """
    return threshold / score if threshold < score < math.inf else 1.0


def list_head_factors(
    scores: Sequence[float], num_kv_heads: int, threshold: float
) -> tuple[list[float], list[float]]:
    """Return the factor of each query head and of each KV head: all query heads that share a KV
    head get the smallest factor among them.

    >>> list_head_factors([400.0, 50.0, 200.0, 50.0], 2, 100.0)
    ([0.25, 0.25, 0.5, 0.5], [0.25, 0.5])
    """
    shared = len(scores) // num_kv_heads
    factors = [head_factor(score, threshold) for score in scores]
    groups = [min(factors[start : start + shared]) for start in range(0, len(factors), shared)]
    return [group for group in groups for _ in range(shared)], groups


def row_factors(
    attention: AttentionHeads, parameter: str, scores: Sequence[float], clip: QkClipConfig
) -> Factors | None:
    """Return the factors of a parameter of an attention module, of the leading dims of its shape;
    None if QK-clip does not change the parameter.

    `parameter`: its full name; `scores`: the largest score of each query head of the model.
    """
    prefix, _, word = parameter.rpartition(".")
    if prefix != attention.name:
        return None
    queries, groups = list_head_factors(scores, attention.num_kv_heads, clip.threshold)
    query = np.array(queries) ** clip.balance
    if attention.mla is not None:
        return _latent_factors(attention.mla, word, np.array(queries), clip.balance)
    if word in ("q", "q_bias"):
        return query
    if word in ("kv", "kv_bias"):
        key = np.array(groups) ** (1 - clip.balance)
        return np.stack([key, np.ones_like(key)])
    return None


def _latent_factors(
    sizes: MLAConfig, word: str, factors: Factors, balance: float
) -> Factors | None:
    """Return the factors [n, features] of a projection of MLA, from those of the heads' scores.

    The rotary key is shared by all heads, so that the rotary part of the queries gets the whole
    factor.
    """
    query, key = (factors[:, None] ** power for power in (balance, 1 - balance))
    if word in ("q", "q_up"):
        rotary = np.repeat(factors[:, None], sizes.rope_dim, axis=1)
        return np.concatenate([np.repeat(query, sizes.nope_dim, axis=1), rotary], axis=1)
    if word == "kv_up":
        values = np.ones((len(factors), sizes.value_dim))
        return np.concatenate([np.repeat(key, sizes.nope_dim, axis=1), values], axis=1)
    return None


class ScaledPart(NamedTuple):
    """Part of a slice of a parameter: consecutive elements that form a box."""

    shape: tuple[int, ...]
    factors: Factors
    """Factors of the elements, which can be broadcast to `shape`."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def split_factors(shard: Shard, factors: Factors) -> list[ScaledPart]:
    """Return the parts of a slice in the order of its elements, with the factors of the leading
    dims restricted to each.

    >>> shard = Shard("q", (2, 2, 3), ((1, 2), (0, 2), (0, 3)), flat=(0, 3))
    >>> [(part.shape, part.factors.item()) for part in split_factors(shard, np.array([1, 0.5]))]
    [((1, 1, 3), 0.5)]
    """
    start, stop = shard.flat or (0, shard.numel)
    parts = []
    for box in split_range_into_boxes(shard.box_shape, start, stop):
        index = tuple(
            slice(origin + first, origin + last)
            for (first, last), (origin, _) in zip(box, shard.box, strict=True)
        )
        local = factors[index[: factors.ndim]]
        shape = tuple(last - first for first, last in box)
        parts.append(
            ScaledPart(shape, local.reshape(local.shape + (1,) * (len(shape) - local.ndim)))
        )
    return parts


class LargestScore(NamedTuple):
    """Largest attention score of a step."""

    score: float
    attention: str
    """Name of the attention module, such as layers.3.attention."""

    head: int
    """Index of the query head in the model."""


def find_largest_score(
    attentions: Sequence[AttentionHeads], scores: Sequence[Sequence[float]]
) -> LargestScore | None:
    """Return the largest of the scores of all heads of all attention modules; None if no pair was
    visible. NaN counts as the largest."""
    candidates = [
        LargestScore(score, attention.name, head)
        for attention, row in zip(attentions, scores, strict=True)
        for head, score in enumerate(row)
        if score != -math.inf
    ]
    return max(candidates, key=lambda each: (math.isnan(each.score), each.score), default=None)


def qk_clip_problems(run: TrainRun) -> list[str]:
    """Return the messages of settings that QK-clip and the log of attention scores do not work
    with."""
    clip, model = run.optim.qk_clip, run.model
    names = ["optim.qk_clip"] if clip is not None else []
    names += ["observe.max_attention_logit=true"] if run.observe.max_attention_logit else []
    if not names:
        return []
    off = " and ".join(
        ["optim.qk_clip=none"] * (clip is not None)
        + ["observe.max_attention_logit=false"] * run.observe.max_attention_logit
    )
    attentions, problems = list_attentions(model), []
    if model.plugins.attention is not None:
        problems.append(
            f"{' and '.join(names)} with model.plugins.attention={model.plugins.attention}: only "
            "the built-in attention returns its largest scores. Remove model.plugins.attention, or "
            f"set {off}."
        )
    if not attentions:
        problems.append(
            f"{' and '.join(names)} with model.layers.attention="
            f"[{', '.join(model.layers.attention)}]: no layer has queries and keys. Set "
            f"model.layers.attention to full for some layer, or set {off}."
        )
    return problems if clip is None else [*problems, *_clip_problems(run, attentions)]


NORMS = {
    "head": "the QK norm of each head",
    "whole": "the QK norm over all heads",
    "l2": "the L2 norm of each head",
}
"""What bounds attention scores, by model.attention.qk_norm."""


def _clip_problems(run: TrainRun, attentions: Sequence[AttentionHeads]) -> list[str]:
    """Return the messages of settings that QK-clip does not work with."""
    problems, norm, group = [], run.model.attention.qk_norm, run.replica_group
    if norm != "none":
        problems.append(
            f"optim.qk_clip with model.attention.qk_norm={norm}: {NORMS[norm]} already bounds the "
            "attention scores, and removes any scale of queries and keys. Set optim.qk_clip=none, "
            "or model.attention.qk_norm=none."
        )
    if run.lora is not None:
        problems.append(
            "optim.qk_clip with lora: the projections of queries and keys are frozen, and only "
            "their adapters are trained and saved. Set optim.qk_clip=none."
        )
    frozen = [
        name
        for attention in attentions
        for name in _scaled_parameters(attention)
        if not run.optim.trains(name)
    ]
    if frozen:
        problems.append(
            f"optim.qk_clip with frozen {frozen[0]}"
            f"{f' and {len(frozen) - 1} more' if frozen[1:] else ''}: QK-clip scales the "
            "projections of queries and keys in every layer. Train them (optim.trained, "
            "optim.frozen), or set optim.qk_clip=none."
        )
    if group is not None and group.mode == "sync":
        problems.append(
            "optim.qk_clip with replica_group.mode=sync: the largest scores are not exchanged "
            "between groups, whose weights would differ. Set optim.qk_clip=none, or "
            "replica_group.mode=diloco."
        )
    return problems


def _scaled_parameters(attention: AttentionHeads) -> list[str]:
    """Return the names of the matrices of an attention module that QK-clip scales."""
    words = ["q", "kv"]
    if attention.mla is not None:
        words = ["q" if attention.mla.q_rank is None else "q_up", "kv_up"]
    return [f"{attention.name}.{word}" for word in words]

"""Embedding, output head and MTP layers: parameters, FLOPs, saved activations and messages."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import (
    HeldParameter,
    LayerRank,
    LayerSetting,
    Message,
    SavedActivation,
    norm_parameters,
    norm_tensors,
    stream_norm_tensors,
    tensor_part,
)


def token_table(
    model: ModelConfig, rank: LayerRank, *, name: str = "embed.weight"
) -> HeldParameter:
    """Return the table of token embeddings, or the weight of the output head: v·h."""
    vocab = tensor_part(model, tp=rank.tp, rank=rank.rank).vocab
    return HeldParameter(name, vocab, model.hidden_size, cut=True)


def position_tables(model: ModelConfig) -> list[HeldParameter]:
    """Return the table of learned positions, if the model has one."""
    if model.positions != "learned":
        return []
    return [HeldParameter("positions.weight", model.max_seq_len, model.hidden_size, cut=False)]


def bias_table(model: ModelConfig, rank: LayerRank) -> HeldParameter:
    """Return the table of relative position biases: buckets·n."""
    heads = tensor_part(model, tp=rank.tp, rank=rank.rank).heads
    return HeldParameter("relative.weight", model.relative.buckets, heads, cut=True)


def embedding_tensors(setting: LayerSetting, prefix: str = "") -> Iterator[SavedActivation]:
    """Yield the saved tensors of the lookup of tokens and of learned positions."""
    yield from _lookup_tensors(f"{prefix}embed", setting.tokens)
    if setting.model.positions == "learned":
        yield from _lookup_tensors(f"{prefix}input_embedding.positions", setting.own_tokens)


def _lookup_tensors(region: str, tokens: int) -> Iterator[SavedActivation]:
    yield SavedActivation(region, "rows of the table", tokens, 8 * tokens)
    yield SavedActivation(region, "which rows are mine", tokens, tokens)


# --- output head and loss: logits and their cross-entropy are computed in chunks of tokens, and the
# gradients of both in forward

TYPE_RULE = "VocabularyRule"
"""Rule of verify/type_rules.py for the autograd functions of the vocabulary-parallel loss."""


def head_flops(model: ModelConfig, tokens: int) -> int:
    """Return the model FLOPs of the output head, without padded vocabulary rows."""
    return 6 * tokens * model.hidden_size * model.vocab_size


def head_tensors(setting: LayerSetting, region: str = "") -> list[SavedActivation]:
    """Return the gradients that the head computes in forward."""
    h = setting.model.hidden_size
    width, rows = setting.tokens * h, setting.part.vocab * h
    return [
        SavedActivation(region, "gradient of the head's input", width, width * setting.element),
        SavedActivation(region, "gradient of the head's weight", rows, rows * setting.wide),
    ]


def head_messages(setting: LayerSetting, *, chunk: int, passes: int) -> Iterator[Message]:
    """Yield the sums of three statistics per token over the vocabulary shards, in two calls per
    chunk of `chunk` tokens."""
    chunks = -(-setting.tokens // chunk)
    yield Message(
        "tp",
        "statistics of logits",
        "all_reduce",
        setting.tp,
        2 * chunks * passes,
        3 * setting.tokens * setting.wide * passes,
    )


# --- multi-token prediction (MTP): a decoder layer like the last one, a projection of 2·h·h, and
# three norms; it shares the embedding and the head of the model


def mtp_parameters(model: ModelConfig, layer: Iterable[HeldParameter]) -> Iterator[HeldParameter]:
    """Yield the parameters of one MTP layer; `layer`: those of its decoder layer."""
    for word in ("embed_norm", "hidden_norm", "norm"):
        yield from norm_parameters(word, model)
    yield HeldParameter("project", model.hidden_size, 2 * model.hidden_size)
    for one in layer:
        yield replace(one, name=f"layer.{one.name}")


def mtp_projection_flops(model: ModelConfig, tokens: int) -> int:
    """Return the model FLOPs of the projection."""
    return 6 * tokens * 2 * model.hidden_size**2


def mtp_tensors(
    setting: LayerSetting, region: str, layer: Iterable[SavedActivation]
) -> Iterator[SavedActivation]:
    """Yield the saved tensors of one MTP layer; `layer`: those of its decoder layer."""
    width = 2 * setting.own_tokens * setting.model.hidden_size
    yield from embedding_tensors(setting, f"{region}.")
    yield from stream_norm_tensors(setting, f"{region}.embed_norm")
    yield from norm_tensors(setting, f"{region}.hidden_norm")
    yield SavedActivation(f"{region}.project", "input", width, width * setting.element)
    yield from layer
    yield from stream_norm_tensors(setting, f"{region}.norm")

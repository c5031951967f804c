"""Embedding of tokens and positions, and the table of relative position biases."""

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import (
    HeldParameter,
    LayerRank,
    LayerSetting,
    SavedActivation,
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

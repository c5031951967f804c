"""Every parameter that one rank holds, by name and size, in the order in which the model declares them; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from megalith.config.model import ModelConfig
from megalith.plan.shards import split_evenly, split_heads


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter as one rank holds it."""

    name: str
    """Canonical name, as in its `Shard`."""

    rows: int
    """Of this rank's box as it lies in memory: outputs; all elements of a vector."""

    columns: int
    """Inputs; 1 for a vector."""

    cut: bool
    """Whether the box differs between tensor-parallel ranks; else all of them hold the whole."""

    stacked: bool = False
    """It lies right below the parameter before it, because one matmul reads both."""

    @property
    def numel(self) -> int:
        """Elements of this rank's box."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What one tensor-parallel rank has of everything that is split."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    kv_copies: int
    """Ranks that hold the same key/value heads."""


def tensor_part(model: ModelConfig, *, tp: int, rank: int) -> TensorPart:
    """The share of tensor-parallel rank number `rank`."""
    heads = split_heads(model.num_heads, model.num_kv_heads, tp)
    copies = tp // len(heads.keys)
    return TensorPart(
        heads=heads.queries[rank],
        kv_heads=heads.keys[rank // copies],
        ffn=split_evenly(model.ffn_hidden_size, tp)[rank],
        vocab=split_evenly(model.padded_vocab_size(), tp)[rank],
        kv_copies=copies,
    )


def layer_parameters(model: ModelConfig, index: int, part: TensorPart) -> list[HeldParameter]:
    """The parameters of layer number `index`, counted over all stages."""
    h, d, f = model.hidden_size, model.head_size(), part.ffn
    kv_cut = part.kv_copies == 1
    query, keys = part.heads * d, 2 * part.kv_heads * d
    rows = [
        ("attention_norm.weight", h, 1, False, False),
        ("attention.q", query, h, True, False),
        ("attention.kv", keys, h, kv_cut, True),
        *([("attention.q_bias", query, 1, True, False)] if model.qkv_bias else []),
        *([("attention.kv_bias", keys, 1, kv_cut, False)] if model.qkv_bias else []),
        ("attention.o", h, query, True, False),
        *([("attention.o_bias", h, 1, False, False)] if model.output_bias else []),
        ("mlp_norm.weight", h, 1, False, False),
        ("mlp.gate_up", 2 * f, h, True, False),
        *([("mlp.gate_up_bias", 2 * f, 1, True, False)] if model.mlp_bias else []),
        ("mlp.down", h, f, True, False),
        *([("mlp.down_bias", h, 1, False, False)] if model.mlp_bias else []),
    ]
    return [
        HeldParameter(f"layers.{index}.{name}", height, width, cut, stacked)
        for name, height, width, cut, stacked in rows
    ]


def held_parameters(
    model: ModelConfig, *, tp: int, tp_rank: int, layers: Sequence[int], embedding: bool, loss: bool
) -> list[HeldParameter]:
    """Everything of some layers, of the embedding if it is here, and of the last norm and the head if the loss is here.

    A tied head is the embedding's parameter; on a stage without the embedding it is a second copy of it.
    """
    part, h = tensor_part(model, tp=tp, rank=tp_rank), model.hidden_size
    held = [HeldParameter("embed.weight", part.vocab, h, cut=True)] if embedding else []
    for index in layers:
        held += layer_parameters(model, index, part)
    if loss:
        held.append(HeldParameter("norm.weight", h, 1, cut=False))
        if not (model.tied_embeddings and embedding):
            name = "embed.weight" if model.tied_embeddings else "head.weight"
            held.append(HeldParameter(name, part.vocab, h, cut=True))
    return held

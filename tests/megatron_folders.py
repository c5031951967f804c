"""Megatron folders in memory, made from Megalith checkpoints by the rules in reverse."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.checkpoint.load import Checkpoint
from megalith.config.model import ModelConfig
from megalith.hf.megatron_names import MEGATRON
from megalith.hf.tensor_rules import build_rules, to_tensor_layout

PREFIXES = {
    "model.": "",
    "optimizer.master.": "optimizer.state.param.",
    "optimizer.exp_avg.": "optimizer.state.exp_avg.",
    "optimizer.exp_avg_sq.": "optimizer.state.exp_avg_sq.",
}
"""Prefixes of keys in our checkpoints and in Megatron's."""

TINY_ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 20,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 6,
    "seq_length": 12,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "swiglu": True,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 257,
    "padded_vocab_size": 264,
    "make_vocab_size_divisible_by": 8,
    "tokenizer_type": "NullTokenizer",
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "world_size": 8,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 12,
    "micro_batch_size": 1,
    "train_iters": 6,
    "consumed_train_samples": 48,
    "skipped_train_samples": 0,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "lr": 0.01,
    "seed": 1234,
}
"""Arguments of Megatron for the model of `tiny_run`."""


def megatron_tensors(
    checkpoint: Checkpoint, model: ModelConfig, *, padded_rows: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint as Megatron names and lays them out; tables get
    `padded_rows` rows of ones after the vocabulary."""
    tensors: dict[str, Tensor] = {}
    for ours, megatron in PREFIXES.items():
        for rule in build_rules(MEGATRON, model):
            key = f"{ours}{rule.parameter}"
            if key not in checkpoint.manifest.tensors:
                continue
            name = f"{megatron}{rule.name}"
            shape = rule.shape
            if rule.parameter in ("embed.weight", "head.weight"):
                shape = (shape[0] + padded_rows, *shape[1:])
            whole = tensors.setdefault(name, torch.ones(shape, dtype=checkpoint.dtype(key)))
            part = whole[: rule.shape[0]].view(rule.view)
            part = part[tuple(slice(*span) for span in rule.at)]
            part.copy_(to_tensor_layout(rule, checkpoint.read(key, rule.box)))
    return tensors


def chunked(name: str, values: Tensor, parts: int = 2) -> ChunkedTensor:
    """Return a tensor that is stored as chunks along its first dim."""
    chunks, start = [], 0
    for part in values.tensor_split(parts):
        if len(part):
            box = ((start, start + len(part)), *((0, size) for size in values.shape[1:]))
            chunks.append(TensorChunk(box, part.clone))
            start += len(part)
    return ChunkedTensor(name, tuple(values.shape), values.dtype, chunks)


def build_megatron_folder(
    path: Path, tensors: Mapping[str, Tensor], common: Mapping[str, Any]
) -> MegatronFolder:
    """Return a folder with these tensors; `path` gets the files by which it is recognized."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (path / ".metadata").write_bytes(b"")
    chunks = {name: chunked(name, values) for name, values in tensors.items()}
    return MegatronFolder(path, "torch_dist", chunks, common)

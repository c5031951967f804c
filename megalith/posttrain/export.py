"""Export of LoRA adapters to folders that the `peft` library loads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import show_dtype
from megalith.checkpoint.safetensors import PlannedTensor, write_file
from megalith.config.lora import lora_layers, lora_targets
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.convert import Move, copy_auxiliary_files
from megalith.hf.folder import TOKENIZER_FILES
from megalith.hf.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdaptedWeights,
    Adapters,
    PeftLayer,
    find_peft_layers,
)
from megalith.hf.pretrained import Pretrained, find_export_family
from megalith.hf.staging import prepare_staging

TAKEN_FOR_EXPERTS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures in which PEFT 0.21, with transformers 5, treats the MLP of every layer as experts:
adapters of dense layers would be ignored with a warning."""


def plan_peft(source: Pretrained) -> list[PeftLayer]:
    """Return the linear layers of transformers that the source's adapters belong to.

    Raises:
        ConfigError: the source has no adapters, or PEFT cannot express some of them.
    """
    weights = source.weights
    if not isinstance(weights, AdaptedWeights):
        raise ConfigError(
            f"--to=peft: {source.path} holds a model, not adapters. Use --to huggingface, or the "
            f"folder of a run that trained adapters (lora.rank)."
        )
    family = find_export_family(source)
    lora = weights.adapters.lora
    targets = lora_targets(lora, source.model)
    parts = find_peft_layers(family, source.model, targets, lora_layers(lora, source.model))
    if family.architecture in TAKEN_FOR_EXPERTS and any(
        ".mlp." in part.parameter for part in parts
    ):
        raise ConfigError(
            f"--to=peft: in {family.architecture} PEFT treats every MLP as experts, and would "
            f"ignore adapters of lora.targets={list(targets)}. Use --to huggingface, which merges "
            "them, or train with lora.targets of attention only."
        )
    return parts


def write_peft(path: Path, source: Pretrained, *, dtype: torch.dtype | None = None) -> int:
    """Write adapter_model.safetensors and adapter_config.json, and return the bytes of the tensors.

    `dtype` unset means fp32. After a run on conversations the tokenizer and its chat template are
    included. The folder appears complete or not at all.

    Raises:
        CheckpointError: the path exists, or writing failed.
        ConfigError: as for `plan_peft`.
        DataError: the tokenizer no longer exists.
    """
    parts = plan_peft(source)
    weights = source.weights
    auxiliary_files = (
        copy_auxiliary_files(source, {}, to_huggingface=True) if source.tuning() else {}
    )
    assert isinstance(weights, AdaptedWeights)
    dtype_to_write = dtype or torch.float32
    plan = _planned(parts, weights.adapters.lora.rank, dtype_to_write)
    staging = prepare_staging(path)
    try:
        storage.make_folder(staging)
        write_file(
            staging / ADAPTER_WEIGHTS,
            plan,
            _tensors(parts, weights.adapters, dtype_to_write),
            {"format": "pt"},
        )
        document = json.dumps(peft_config(parts, weights), indent=2) + "\n"
        storage.write_new(staging / ADAPTER_CONFIG, document.encode())
        for name in auxiliary_files.keys() & set(TOKENIZER_FILES):
            storage.write_new(staging / name, auxiliary_files[name])
        storage.sync_folder(staging)
        storage.rename(staging, path)
        storage.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: not written ({error}). Free some space, or choose another target."
        ) from error
    finally:
        storage.remove_tree(staging)
    return sum(planned.nbytes for planned in plan)


def plan_peft_moves(source: Pretrained, dtype: torch.dtype | None) -> list[Move]:
    """Return every tensor that `write_peft` writes with the adapter it comes from, without reading
    values.

    Raises:
        ConfigError: as for `plan_peft`.
    """
    parts, weights = plan_peft(source), source.weights
    assert isinstance(weights, AdaptedWeights)
    target_dtype, moves = dtype or torch.float32, []
    plan = _planned(parts, weights.adapters.lora.rank, target_dtype)
    for index, planned in enumerate(plan):
        part, letter = parts[index // 2], "ab"[index % 2]
        box = "" if part.part is None else f"[{part.part}]"
        source_name, source_dtype = (
            f"{part.parameter}.lora_{letter}{box}",
            show_dtype(torch.float32),
        )
        moves.append(
            Move(
                source_name,
                planned.name,
                planned.shape,
                source_dtype,
                show_dtype(target_dtype),
                planned.nbytes,
            )
        )
    return moves


def _planned(parts: list[PeftLayer], rank: int, dtype: torch.dtype) -> list[PlannedTensor]:
    """Return the planned tensors: A and B of each linear layer."""
    plan = []
    for part in parts:
        plan += [
            PlannedTensor(part.key("A"), dtype, (rank, part.shape[1])),
            PlannedTensor(part.key("B"), dtype, (part.shape[0], rank)),
        ]
    return plan


def peft_config(parts: list[PeftLayer], weights: AdaptedWeights) -> dict[str, Any]:
    """Return the contents of adapter_config.json."""
    lora = weights.adapters.lora
    whole = lora.alpha == int(lora.alpha)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(weights.base_path),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if whole else lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": sorted({part.module.rsplit(".", 1)[1] for part in parts}),
        "layers_to_transform": None if lora.layers is None else sorted(set(lora.layers)),
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _tensors(parts: list[PeftLayer], adapters: Adapters, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield A and B of every linear layer, in order."""
    for part in parts:
        for word in "ab":
            values = adapters.read(f"{part.parameter}.lora_{word}")
            values = values if part.part is None else values[part.part]
            outputs_or_rank = adapters.lora.rank if word == "a" else part.shape[0]
            yield values.reshape(outputs_or_rank, -1).to(dtype)

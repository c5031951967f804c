"""Adapters for others: a folder that the `peft` library loads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import show_dtype
from megalith.checkpoint.safetensors import Planned, write_file
from megalith.config.lora import lora_layers, lora_targets
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdaptedWeights,
    Adapters,
    PeftPart,
    peft_parts,
)
from megalith.models.companions import copy_auxiliary_files
from megalith.models.convert import Move
from megalith.models.hf import TOKENIZER_FILES
from megalith.models.pretrained import Pretrained, find_family_of
from megalith.models.staging import staging_of

TAKEN_FOR_EXPERTS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures of which PEFT 0.21, under transformers 5, takes the MLP of every layer for
experts: it would load adapters of those without experts as nothing, with no more than a warning."""


def plan_peft(source: Pretrained) -> list[PeftPart]:
    """The linear layers of transformers that the source's adapters belong to.

    Raises:
        ConfigError: the source has no adapters, or some that PEFT has no form for.
    """
    weights = source.weights
    if not isinstance(weights, AdaptedWeights):
        raise ConfigError(
            f"--to=peft: {source.path} holds a model and no adapters. Use --to huggingface, or the "
            f"folder of a run that trained adapters (lora.rank)."
        )
    family = find_family_of(source)
    lora = weights.adapters.lora
    targets = lora_targets(lora, source.model)
    parts = peft_parts(family, source.model, targets, lora_layers(lora, source.model))
    if family.architecture in TAKEN_FOR_EXPERTS and any(
        ".mlp." in part.parameter for part in parts
    ):
        raise ConfigError(
            f"--to=peft: of {family.architecture} PEFT takes every MLP for experts, and would "
            "leave out adapters of "
            f"lora.targets={list(targets)}. Use --to huggingface, which merges them, or set "
            "lora.targets to matrices "
            f"of attention when training."
        )
    return parts


def write_peft(path: Path, source: Pretrained, *, dtype: torch.dtype | None = None) -> int:
    """Write adapter_model.safetensors and adapter_config.json; returns the bytes of the tensors.

    `dtype` unset keeps fp32. After a run on conversations the tokenizer goes with them, with the
    template they were tuned with. The folder appears whole or not at all.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
        ConfigError: as for `plan_peft`.
        DataError: the tokenizer is gone.
    """
    parts = plan_peft(source)
    weights = source.weights
    carried_along = copy_auxiliary_files(source, {}, theirs=True) if source.tuning() else {}
    assert isinstance(weights, AdaptedWeights)
    kept = dtype or torch.float32
    plan = _planned(parts, weights.adapters.lora.rank, kept)
    staging = staging_of(path)
    try:
        storage.make_folder(staging)
        write_file(
            staging / ADAPTER_WEIGHTS,
            plan,
            _tensors(parts, weights.adapters, kept),
            {"format": "pt"},
        )
        document = json.dumps(peft_config(parts, weights), indent=2) + "\n"
        storage.write_new(staging / ADAPTER_CONFIG, document.encode())
        for name in carried_along.keys() & set(TOKENIZER_FILES):
            storage.write_new(staging / name, carried_along[name])
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


def peft_moves(source: Pretrained, dtype: torch.dtype | None) -> list[Move]:
    """Every tensor that `write_peft` writes, and the adapter of ours that it is, or is a part of;
    reads no values.

    Raises:
        ConfigError: as for `plan_peft`.
    """
    parts, weights = plan_peft(source), source.weights
    assert isinstance(weights, AdaptedWeights)
    kept, moves = dtype or torch.float32, []
    plan = _planned(parts, weights.adapters.lora.rank, kept)
    for place, planned in enumerate(plan):
        part, word = parts[place // 2], "ab"[place % 2]
        box = "" if part.part is None else f"[{part.part}]"
        ours, wide = f"{part.parameter}.lora_{word}{box}", show_dtype(torch.float32)
        moves.append(
            Move(ours, planned.name, planned.shape, wide, show_dtype(kept), planned.nbytes)
        )
    return moves


def _planned(parts: list[PeftPart], rank: int, dtype: torch.dtype) -> list[Planned]:
    """A and B of each linear layer."""
    plan = []
    for part in parts:
        plan += [
            Planned(part.key("A"), dtype, (rank, part.shape[1])),
            Planned(part.key("B"), dtype, (part.shape[0], rank)),
        ]
    return plan


def peft_config(parts: list[PeftPart], weights: AdaptedWeights) -> dict[str, Any]:
    """adapter_config.json."""
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


def _tensors(parts: list[PeftPart], adapters: Adapters, dtype: torch.dtype) -> Iterator[Tensor]:
    """A and B of every part, in order."""
    for part in parts:
        for word in "ab":
            values = adapters.read(f"{part.parameter}.lora_{word}")
            values = values if part.part is None else values[part.part]
            outputs_or_rank = adapters.lora.rank if word == "a" else part.shape[0]
            yield values.reshape(outputs_or_rank, -1).to(dtype)

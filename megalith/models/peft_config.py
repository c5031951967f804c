"""Reader of adapter_config.json of the peft library: every field is interpreted, without effect, or
rejected."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.config.lora import LoraConfig
from megalith.errors import CheckpointError
from megalith.models.hf import check_links, read_json

UNDERSTOOD = frozenset(
    ("r", "lora_alpha", "target_modules", "layers_to_transform", "base_model_name_or_path")
)
"""Fields that are interpreted; any valid value is supported."""

PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, True, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_pattern": (None, "", [], "layers", ["layers"]),
    "modules_to_save": (None, []),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "exclude_modules": (None, [], ""),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False, None),
    "arrow_config": (None,),
    "use_bdlora": (False, None),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "kasa_config": (None,),
    "megatron_config": (None,),
    "enable_lora": (None,),
}
"""Fields that change what adapters or base compute -> the values with which they are plain LoRA."""

WITHOUT_EFFECT = frozenset(
    (
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
        "merge_weights",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",  # parameters of the initializations that init_lora_weights names
    )
)
"""Fields that do not change what trained adapters compute."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """Contents of an adapter_config.json."""

    lora: LoraConfig
    """Rank and scale; targets are in `modules`."""

    modules: str | tuple[str, ...] | None
    """Names or name suffixes of linear layers, or a regular expression; None: all modules that have
    tensors."""

    layers: frozenset[int] | None
    """Indices of the adapted layers; None: all."""

    base: Any  # JSON
    """base_model_name_or_path"""

    def adapts(self, module: str, layer: int) -> bool:
        """Return whether a linear layer is adapted, as far as the config determines it."""
        if self.layers is not None and layer not in self.layers:
            return False
        if isinstance(self.modules, str):
            return self.modules == "all-linear" or re.fullmatch(self.modules, module) is not None
        return self.modules is None or any(
            f".{module}".endswith(f".{name}") for name in self.modules
        )


def read_peft_config(file: Path) -> PeftConfig:
    """Read an adapter_config.json.

    Raises:
        CheckpointError: the adapters are not plain LoRA, or fields are unknown; each is named. Or
            links lead out of the folder.
    """
    check_links(file.parent, storage.list_names(file.parent))
    raw = read_json(file)
    problems = [
        f"{name}={raw[name]!r:.80}"
        for name, plain_values in PLAIN.items()
        if name in raw and raw[name] not in plain_values
    ]
    rank, alpha, modules, layers = (
        raw.get(n) for n in ("r", "lora_alpha", "target_modules", "layers_to_transform")
    )
    layers = [layers] if type(layers) is int else layers
    valid = {
        "r": type(rank) is int and rank > 0,
        "lora_alpha": isinstance(alpha, int | float) and 0 < alpha < math.inf,
        "target_modules": _is_expression(modules) or _are_all(modules, str),
        "layers_to_transform": layers is None or (bool(layers) and _are_all(layers, int)),
    }
    problems += [
        f"{name}={raw.get(name)!r:.80}" for name, is_valid in valid.items() if not is_valid
    ]
    if problems:
        raise CheckpointError(
            f"{file}: {', '.join(problems)}: these adapters do not compute W + scale · B · A. "
            f"Use plain LoRA adapters, or merge them with PEFT and use the merged model."
        )
    known = UNDERSTOOD | PLAIN.keys() | WITHOUT_EFFECT
    unknown = [
        f"{name}={value!r:.80}"
        for name, value in raw.items()
        if name not in known and value is not None
    ]
    if unknown:
        raise CheckpointError(
            f"{file}: {', '.join(unknown)}: unknown fields, which may change what the adapters "
            "compute. "
            f"Remove them if they do not, or merge them with PEFT and use the merged model."
        )
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    return PeftConfig(
        lora=LoraConfig(
            rank=rank, alpha=float(alpha), rslora=bool(raw.get("use_rslora")), targets=()
        ),
        modules=tuple(modules) if isinstance(modules, list) else modules,
        layers=None if layers is None else frozenset(layers),
        base=raw.get("base_model_name_or_path"),
    )


def _is_expression(modules: Any) -> bool:  # JSON
    """Return whether `modules` is a regular expression or None."""
    try:
        return modules is None or (isinstance(modules, str) and re.compile(modules) is not None)
    except re.error:
        return False


def _are_all(values: Any, kind: type) -> bool:  # JSON
    return isinstance(values, list) and all(type(value) is kind for value in values)

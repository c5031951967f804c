"""LoRA adapters: read from checkpoints or PEFT folders (adapter_config.json), and the weights of a
model with adapters merged."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import CheckpointEntry, decode_for_loading, lengths, pieces
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.safetensors import DTYPES, TensorInfo, read_box, read_header, show_names
from megalith.config.lora import (
    STACKED,
    LoraConfig,
    find_lora_target,
    has_adapters,
    lora_layers,
    lora_matrices,
    lora_targets,
)
from megalith.config.model import ModelConfig
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.family import Family
from megalith.hf.folder import PIECE_NBYTES, Weights, check_links, read_json
from megalith.hf.release import parameters
from megalith.hf.tensor_rules import TensorRule
from megalith.plan.shards import Box
from megalith.storage import StoragePath

# Reader of adapter_config.json of the peft library: every field is interpreted, without effect, or
# rejected.

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


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a PEFT folder."""

RECORD = "adapters"
"""Key in the state of a checkpoint that holds only adapters: the base weights they belong to."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA matrices A and B of all adapted parameters."""

    path: StoragePath
    lora: LoraConfig
    """Rank, scale and targets."""

    names: frozenset[str]
    """Names such as `layers.0.attention.q.lora_a`."""

    read: Callable[[str], Tensor]
    """Read a full matrix on the host, in fp32 or float64."""


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """Weights with merged adapters: W + scale · B · A."""

    path: StoragePath
    """Folder of the adapters."""

    model_config: ModelConfig
    base: Weights
    base_path: Path
    adapters: Adapters

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype of the base weights."""
        return self.base.dtype(parameter)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a parameter, merged in fp32 or wider."""
        if f"{parameter}.lora_a" not in self.adapters.names:
            return self.base.read(parameter, box, dtype)
        compute_dtype = torch.promote_types(dtype, torch.float32)
        weight, product = (
            self.base.read(parameter, box, compute_dtype),
            self._product(parameter, box, compute_dtype),
        )
        # Not in place on `weight`, which may be a view of a file.
        return torch.add(weight, product, alpha=self.adapters.lora.scale, out=product).to(dtype)

    def fill(self, entries: Sequence[CheckpointEntry]) -> None:
        """Load the boxes of `entries`, a piece at a time."""
        for entry in entries:
            with decode_for_loading([entry]) as decoded:
                for piece in pieces(decoded[0], max_numel=PIECE_NBYTES // 8):
                    piece.values.copy_(self.read(entry.shard.name, piece.box, piece.values.dtype))

    def _product(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of B · A."""
        a, b = (self.adapters.read(f"{parameter}.lora_{word}").to(dtype) for word in "ab")
        outputs = b.ndim - 1
        b = b[tuple(slice(start, stop) for start, stop in box[:outputs])]
        stacked = parameter.rsplit(".", 1)[1] in STACKED
        a = a[slice(*box[0])] if stacked else a
        for dim, (start, stop) in enumerate(box[outputs:], start=a.ndim - len(box) + outputs):
            a = a.narrow(dim, start, stop - start)
        left = b.flatten(1, -2) if stacked else b.flatten(0, -2)
        right = a.flatten(2) if stacked else a.flatten(1)
        return (left @ right).view(lengths(box))


def fingerprint(weights: Weights, model: ModelConfig) -> str:
    """Return a hash of the name and the first values of every parameter as stored.

    It does not depend on the location of the files, and changes once training changes any of these
    values.
    """
    digest = blake2b(digest_size=16)
    for shard in parameters(model):
        box = tuple(
            (0, min(length, size))
            for length, size in zip(shard.shape, _corner(len(shard.shape)), strict=True)
        )
        values = weights.read(shard.name, box, weights.dtype(shard.name)).to(torch.float64)
        digest.update(
            f"{shard.name} {shard.shape[1:]}".encode() + values.contiguous().numpy().tobytes()
        )
    return digest.hexdigest()


def _corner(dims: int) -> tuple[int, ...]:
    return (*[1] * (dims - 2), 4, 64)[-dims:]


# --- checkpoints


@dataclass(frozen=True, slots=True)
class _CheckpointReader:
    """Reads adapters from a checkpoint, from their master weights if there are any."""

    checkpoint: Checkpoint

    def __call__(self, name: str) -> Tensor:
        master = f"optimizer.master.{name}"
        stored = master if master in self.checkpoint.manifest.tensors else f"model.{name}"
        return self.checkpoint.read(
            stored, dtype=torch.promote_types(self.checkpoint.dtype(stored), torch.float32)
        )


def checkpoint_adapters(checkpoint: Checkpoint) -> Adapters:
    """Return the adapters in a checkpoint of a run that trained adapters.

    Raises:
        CheckpointError: its config.yaml does not describe them.
    """
    try:
        lora = from_dict(LoraConfig, parse_stored_settings(checkpoint.config_text)["lora"])
    except (yaml.YAMLError, ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.yaml'} does not describe adapters "
            f"({type(error).__name__}: {error}). Use a "
            f"checkpoint that `megalith train` wrote."
        ) from error
    names = frozenset(
        key.removeprefix("model.")
        for key in checkpoint.keys()  # noqa: SIM118  # not a mapping
        if key.startswith("model.")
    )

    return Adapters(checkpoint.path, lora, names, _CheckpointReader(checkpoint))


# --- PEFT folders


@dataclass(frozen=True, slots=True)
class PeftLayer:
    """A linear layer of transformers, and the parameter that contains its matrix."""

    module: str
    """`model.layers.0.self_attn.k_proj`"""

    parameter: str
    part: int | None
    """Index of the matrix, if `parameter` stacks several."""

    shape: tuple[int, int]
    """Output and input features."""

    @property
    def layer(self) -> int:
        """Index of the layer."""
        return int(self.parameter.split(".")[1])

    def key(self, word: str) -> str:
        """Return the key of adapter matrix `A` or `B` in a PEFT file."""
        return f"base_model.model.{self.module}.lora_{word}.weight"


def find_peft_layers(
    family: Family,
    model: ModelConfig,
    targets: Sequence[str],
    layers: Collection[int] | None = None,
) -> list[PeftLayer]:
    """Return the linear layers of transformers that are adapted, in `layers`; unset: in all.

    Raises:
        ConfigError: the family stores a target fused with another matrix, or transposed.
    """
    parts, unsupported = [], {}
    for rule in family.rules(model):
        word = find_lora_target(rule.parameter or "")
        if word is None or word not in targets:
            continue
        if not _is_linear(rule):
            unsupported[word] = rule.name
            continue
        assert rule.parameter is not None
        part = rule.box[0][0] if word in STACKED else None
        shape = rule.shape[0], rule.shape[1]
        part_of_target = PeftLayer(rule.name.removesuffix(".weight"), rule.parameter, part, shape)
        parts += [part_of_target] if layers is None or part_of_target.layer in layers else []
    if unsupported:
        shown = "; ".join(f"{word} is in {name}" for word, name in unsupported.items())
        raise ConfigError(
            f"lora.targets={list(targets)}: {family.architecture} stores matrices fused or "
            f"transposed ({shown}), for which PEFT has different adapters. "
            "Use `megalith convert --to huggingface`, which merges "
            f"adapters into the weights, or train with other lora.targets."
        )
    return parts


def _is_linear(rule: TensorRule) -> bool:
    """Return whether a tensor is one matrix of a parameter with outputs as rows, in the same
    order."""
    view_dims = [dim for dim in rule.dims if dim is not None]
    return (
        rule.covers_tensor
        and view_dims == list(range(len(rule.view)))
        and rule.name.endswith(".weight")
        and len(rule.shape) == 2
    )


def peft_adapters(path: Path, family: Family, model: ModelConfig) -> Adapters:
    """Return the adapters in a PEFT folder of a model.

    Targets and layers are those with any adapter; other matrices of an adapted parameter or layer
    get zero adapters.

    Raises:
        CheckpointError: tensors belong to another model, are missing although the config requires
            them, or have a wrong shape; each is named.
    """
    config = read_peft_config(path / ADAPTER_CONFIG)
    stored = read_header(path / ADAPTER_WEIGHTS)
    parts = []
    for word in lora_matrices(model):
        try:
            parts += find_peft_layers(family, model, [word])
        except ConfigError:  # PEFT cannot adapt this matrix; its tensors are unexpected below
            continue
    if config.modules is None:
        parts_with_adapters = [
            part for part in parts if part.key("A") in stored or part.key("B") in stored
        ]
    else:
        parts_with_adapters = [part for part in parts if config.adapts(part.module, part.layer)]
    _check_stored(path, parts_with_adapters, stored, config.lora.rank)
    words, layers = (
        {part.parameter.rsplit(".", 1)[1] for part in parts_with_adapters},
        sorted({part.layer for part in parts_with_adapters}),
    )
    lora = replace(
        config.lora,
        targets=tuple(word for word in lora_matrices(model) if word in words),
        layers=None if len(layers) == model.num_layers else tuple(layers),
    )
    shapes = {shard.name: shard.shape for shard in parameters(model)}
    read = _PeftReader(parts_with_adapters, stored, shapes, lora.rank)
    return Adapters(path, lora, adapter_names(lora, model), read)


def _check_stored(
    path: Path, parts: Sequence[PeftLayer], stored: Mapping[str, TensorInfo], rank: int
) -> None:
    expected = {part.key("A"): (rank, part.shape[1]) for part in parts}
    expected |= {part.key("B"): (part.shape[0], rank) for part in parts}
    problems = (
        [f"missing: {show_names(missing_keys)}"]
        if (missing_keys := sorted(expected.keys() - stored.keys()))
        else []
    )
    problems += (
        [f"unexpected: {show_names(unexpected_keys)}"]
        if (unexpected_keys := sorted(stored.keys() - expected.keys()))
        else []
    )
    problems += [
        f"{name} is {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name].shape != shape
    ]
    problems += [
        f"{name} is stored as {info.dtype}"
        for name, info in stored.items()
        if info.dtype not in DTYPES
    ]
    if not parts:
        problems.append("no adapters of matrices of this model")
    if problems:
        raise CheckpointError(
            f"{path / ADAPTER_WEIGHTS} is for another base: {'; '.join(problems[:4])}. Use the "
            "model that the adapters "
            f"were trained with."
        )


@dataclass(frozen=True, slots=True)
class _PeftReader:
    """Reads adapters from a PEFT file."""

    parts: Sequence[PeftLayer]
    stored: Mapping[str, TensorInfo]
    shapes: Mapping[str, tuple[int, ...]]
    rank: int

    def __call__(self, name: str) -> Tensor:
        parameter, _, word = name.rpartition(".lora_")
        shape = adapter_shape(self.shapes[parameter], parameter, self.rank, word)
        values = torch.zeros(shape)
        for part in self.parts:
            if part.parameter == parameter:
                key = part.key(word.upper())
                target = values if part.part is None else values[part.part]
                target.copy_(
                    read_box(key, self.stored[key], (slice(None), slice(None))).view(target.shape)
                )
        return values


def adapter_names(lora: LoraConfig, model: ModelConfig) -> frozenset[str]:
    """Return the names of all adapters that a run with these settings trains."""
    owners = [shard.name for shard in parameters(model) if has_adapters(shard.name, lora, model)]
    return frozenset(f"{name}.lora_{word}" for name in owners for word in "ab")


def check_adapter_names(adapters: Adapters, lora: LoraConfig, model: ModelConfig) -> None:
    """Check that adapters are those of a model.

    Raises:
        CheckpointError: some are missing or unexpected, for example those of a deeper model.
    """
    expected = adapter_names(lora, model)
    problems = (
        [f"missing: {show_names(missing_keys)}"]
        if (missing_keys := sorted(expected - adapters.names))
        else []
    )
    problems += (
        [f"not of this model: {show_names(unexpected_keys)}"]
        if (unexpected_keys := sorted(adapters.names - expected))
        else []
    )
    if problems:
        raise CheckpointError(
            f"{adapters.path} holds adapters of another model: {'; '.join(problems)}. Use "
            "adapters of a "
            "model with the same layers, or set lora.* and model.* to the stored values."
        )


def adapter_shape(weight: tuple[int, ...], parameter: str, rank: int, word: str) -> tuple[int, ...]:
    """Return the shape of A or B of a full parameter."""
    name = parameter.rsplit(".", 1)[1]
    inputs = 2 if name == "o" else 1
    if word == "b":
        return *weight[: len(weight) - inputs], rank
    return (*weight[:1], rank, *weight[-inputs:]) if name in STACKED else (rank, *weight[-inputs:])


def describe_adapter_differences(
    adapters: Adapters, wanted: LoraConfig, model: ModelConfig
) -> list[str]:
    """Return how adapters differ from those that a run would train, as messages."""
    pairs = {
        "rank": (adapters.lora.rank, wanted.rank),
        "alpha": (adapters.lora.alpha, wanted.alpha),
        "rslora": (adapters.lora.rslora, wanted.rslora),
        "targets": (lora_targets(adapters.lora, model), lora_targets(wanted, model)),
        "layers": (lora_layers(adapters.lora, model), lora_layers(wanted, model)),
    }
    return [
        f"lora.{name} is {stored} in the adapters and {expected} in this run"
        for name, (stored, expected) in pairs.items()
        if stored != expected
    ]

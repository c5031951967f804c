"""Adapters that were trained beside a model: reading them, ours or PEFT's, and the model's weights
with them added."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
import yaml
from torch import Tensor

from megalith.checkpoint.boxes import CheckpointEntry, lengths, pieces
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.safetensors import DTYPES, TensorInfo, read_box, read_header, show_names
from megalith.config.lora import (
    STACKED,
    LoraConfig,
    has_adapters,
    lora_layers,
    lora_matrices,
    lora_targets,
    matrix_of,
)
from megalith.config.model import ModelConfig
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.errors import CheckpointError, ConfigError
from megalith.models.hf import PIECE_NBYTES, Weights
from megalith.models.names import Family, TensorRule
from megalith.models.peft_config import read_peft_config
from megalith.models.release import parameters
from megalith.plan.shards import Box

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What a PEFT folder holds."""

RECORD = "adapters"
"""In the state of a checkpoint that holds adapters alone: which weights they belong to."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The A and B of every matrix that has them."""

    path: Path
    lora: LoraConfig
    """Rank, scale and targets."""

    names: frozenset[str]
    """`layers.0.attention.q.lora_a` and so on."""

    read: Callable[[str], Tensor]
    """One of them, whole, on the host, in fp32 or float64."""


@dataclass(frozen=True, slots=True)
class AdaptedWeights:
    """A model's weights with adapters added to them: W + scale · B · A."""

    path: Path
    """Of the adapters."""

    model_config: ModelConfig
    base: Weights
    base_path: Path
    adapters: Adapters

    def dtype(self, parameter: str) -> torch.dtype:
        """The base's."""
        return self.base.dtype(parameter)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of a parameter, added up in fp32 or wider."""
        if f"{parameter}.lora_a" not in self.adapters.names:
            return self.base.read(parameter, box, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        weight, product = self.base.read(parameter, box, wide), self._product(parameter, box, wide)
        return torch.add(weight, product, alpha=self.adapters.lora.scale, out=product).to(
            dtype
        )  # never into the base

    def fill(self, entries: Sequence[CheckpointEntry]) -> None:
        """Fill the tensors of `entries`, a piece at a time."""
        for entry in entries:
            for piece in pieces(entry, max_numel=PIECE_NBYTES // 8):
                piece.values.copy_(self.read(entry.shard.name, piece.box, piece.values.dtype))

    def _product(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """A box of B · A."""
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
    """A hash of the names and of the first few values of every parameter, as they are stored:
    the same for a model wherever its files are, and another one once training has moved any of
    these values."""
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


# --- ours


@dataclass(frozen=True, slots=True)
class _OurReader:
    """Reads adapters out of a checkpoint, the most exact that it has."""

    checkpoint: Checkpoint

    def __call__(self, name: str) -> Tensor:
        master = f"optimizer.master.{name}"
        stored = master if master in self.checkpoint.manifest.tensors else f"model.{name}"
        return self.checkpoint.read(
            stored, dtype=torch.promote_types(self.checkpoint.dtype(stored), torch.float32)
        )


def checkpoint_adapters(checkpoint: Checkpoint) -> Adapters:
    """Those in a checkpoint of a run that trained adapters.

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

    return Adapters(checkpoint.path, lora, names, _OurReader(checkpoint))


# --- PEFT's


@dataclass(frozen=True, slots=True)
class PeftPart:
    """One linear layer of transformers, and which of our matrices it is."""

    module: str
    """`model.layers.0.self_attn.k_proj`"""

    parameter: str
    part: int | None
    """Which of the matrices in `parameter`, where it is several."""

    shape: tuple[int, int]
    """Outputs and inputs."""

    @property
    def layer(self) -> int:
        """Its number."""
        return int(self.parameter.split(".")[1])

    def key(self, word: str) -> str:
        """Of its adapter `A` or `B`, in a file of PEFT's."""
        return f"base_model.model.{self.module}.lora_{word}.weight"


def peft_parts(
    family: Family,
    model: ModelConfig,
    targets: Sequence[str],
    layers: Collection[int] | None = None,
) -> list[PeftPart]:
    """The linear layers of transformers that are our targets, in some layers; unset: in all.

    Raises:
        ConfigError: the family keeps one of them as a part of another, or transposed.
    """
    found, refused = [], {}
    for rule in family.rules(model):
        word = matrix_of(rule.parameter or "")
        if word is None or word not in targets:
            continue
        if not _is_linear(rule):
            refused[word] = rule.name
            continue
        assert rule.parameter is not None
        part = rule.box[0][0] if word in STACKED else None
        shape = (rule.shape[0], rule.shape[1])
        one = PeftPart(rule.name.removesuffix(".weight"), rule.parameter, part, shape)
        found += [one] if layers is None or one.layer in layers else []
    if refused:
        named = "; ".join(f"{word} is in {name}" for word, name in refused.items())
        raise ConfigError(
            f"lora.targets={list(targets)}: {family.architecture} keeps matrices together or "
            f"transposed ({named}), and "
            "PEFT's adapters of these are others than ours. Use `megalith convert --to "
            "huggingface`, which merges "
            f"adapters into the weights, or set lora.targets to others when training."
        )
    return found


def _is_linear(rule: TensorRule) -> bool:
    """Whether a tensor of theirs is one matrix of ours with outputs as rows, in our order."""
    kept = [dim for dim in rule.dims if dim is not None]
    return (
        rule.whole
        and kept == list(range(len(rule.view)))
        and rule.name.endswith(".weight")
        and len(rule.shape) == 2
    )


def peft_adapters(path: Path, family: Family, model: ModelConfig) -> Adapters:
    """The adapters in a PEFT folder of a model; what is adapted nowhere is no target, layers
    without any are not among its layers, and where one of several matrices in a parameter is
    adapted, or one layer of several, the others are by zero.

    Raises:
        CheckpointError: tensors are of another model, missing where its config promises them, or of
            the wrong shape; each is named.
    """
    config = read_peft_config(path / ADAPTER_CONFIG)
    stored = read_header(path / ADAPTER_WEIGHTS)
    parts = []
    for word in lora_matrices(model):
        try:
            parts += peft_parts(family, model, [word])
        except (
            ConfigError
        ):  # a matrix that PEFT cannot have adapted as we do, so its tensors are surplus below
            continue
    if config.modules is None:
        there = [part for part in parts if part.key("A") in stored or part.key("B") in stored]
    else:
        there = [part for part in parts if config.adapts(part.module, part.layer)]
    _check_stored(path, there, stored, config.lora.rank)
    words, layers = (
        {part.parameter.rsplit(".", 1)[1] for part in there},
        sorted({part.layer for part in there}),
    )
    lora = replace(
        config.lora,
        targets=tuple(word for word in lora_matrices(model) if word in words),
        layers=None if len(layers) == model.num_layers else tuple(layers),
    )
    shapes = {shard.name: shard.shape for shard in parameters(model)}
    read = _PeftReader(there, stored, shapes, lora.rank)
    return Adapters(path, lora, adapter_names(lora, model), read)


def _check_stored(
    path: Path, parts: Sequence[PeftPart], stored: Mapping[str, TensorInfo], rank: int
) -> None:
    wanted = {part.key("A"): (rank, part.shape[1]) for part in parts}
    wanted |= {part.key("B"): (part.shape[0], rank) for part in parts}
    problems = (
        [f"missing: {show_names(missing)}"]
        if (missing := sorted(wanted.keys() - stored.keys()))
        else []
    )
    problems += (
        [f"unknown here: {show_names(extra)}"]
        if (extra := sorted(stored.keys() - wanted.keys()))
        else []
    )
    problems += [
        f"{name} is {list(stored[name].shape)}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and stored[name].shape != shape
    ]
    problems += [
        f"{name} is stored as {info.dtype}"
        for name, info in stored.items()
        if info.dtype not in DTYPES
    ]
    if not parts:
        problems.append("it has no adapter of this model's matrices")
    if problems:
        raise CheckpointError(
            f"{path / ADAPTER_WEIGHTS} is for another base: {'; '.join(problems[:4])}. Use the "
            "model that the adapters "
            f"were trained with."
        )


@dataclass(frozen=True, slots=True)
class _PeftReader:
    """Reads adapters of ours out of a file of PEFT's."""

    parts: Sequence[PeftPart]
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
                place = values if part.part is None else values[part.part]
                place.copy_(
                    read_box(key, self.stored[key], (slice(None), slice(None))).view(place.shape)
                )
        return values


def adapter_names(lora: LoraConfig, model: ModelConfig) -> frozenset[str]:
    """`layers.0.attention.q.lora_a` and so on: all that a run with these settings trains."""
    owners = [shard.name for shard in parameters(model) if has_adapters(shard.name, lora, model)]
    return frozenset(f"{name}.lora_{word}" for name in owners for word in "ab")


def check_names(found: Adapters, lora: LoraConfig, model: ModelConfig) -> None:
    """Refuse adapters that are not those of a model, matrix by matrix.

    Raises:
        CheckpointError: some are missing or surplus, as those of a deeper model are.
    """
    wanted = adapter_names(lora, model)
    problems = (
        [f"missing: {show_names(missing)}"] if (missing := sorted(wanted - found.names)) else []
    )
    problems += (
        [f"not of this model: {show_names(extra)}"]
        if (extra := sorted(found.names - wanted))
        else []
    )
    if problems:
        raise CheckpointError(
            f"{found.path} holds adapters of another model: {'; '.join(problems)}. Use those of a "
            "model with the same "
            f"layers, or set lora.* and model.* to what is there."
        )


def adapter_shape(weight: tuple[int, ...], parameter: str, rank: int, word: str) -> tuple[int, ...]:
    """Of A or B beside a whole parameter."""
    name = parameter.rsplit(".", 1)[1]
    inputs = 2 if name == "o" else 1
    if word == "b":
        return (*weight[: len(weight) - inputs], rank)
    return (*weight[:1], rank, *weight[-inputs:]) if name in STACKED else (rank, *weight[-inputs:])


def same_adapters(found: Adapters, wanted: LoraConfig, model: ModelConfig) -> list[str]:
    """How adapters differ from those that a run would train, as texts."""
    pairs = {
        "rank": (found.lora.rank, wanted.rank),
        "alpha": (found.lora.alpha, wanted.alpha),
        "rslora": (found.lora.rslora, wanted.rslora),
        "targets": (lora_targets(found.lora, model), lora_targets(wanted, model)),
        "layers": (lora_layers(found.lora, model), lora_layers(wanted, model)),
    }
    return [
        f"lora.{name} is {there} there and {here} here"
        for name, (there, here) in pairs.items()
        if there != here
    ]

"""LoRA: settings of low-rank adapters beside frozen weights, and their rules."""

import math
from dataclasses import dataclass
from typing import Annotated

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.fields import Example, Ge, Gt, Lt
from megalith.config.model import ModelConfig
from megalith.errors import did_you_mean

EVERY = "linear"
"""Target that selects every linear layer of attention and MLP."""


STACKED = {"kv": 2, "gate_up": 2}
"""Parameters that stack several matrices, each with its own A and B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: only A and B of each target are trained, and its weight acts as W + scale
    · B · A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: Annotated[int, Ge(1), Example(16)] = 16
    """Rank of the adapters."""

    alpha: Annotated[float, Gt(0)] = 32.0
    """Scaling: the adapter's output is multiplied by alpha / rank."""

    rslora: bool = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank) instead (arXiv:2312.03732)."""

    targets: tuple[str, ...] = (EVERY,)
    """Linear layers that get adapters: q, kv, o, gate, gate_up or up, down; for MLA q or q_down
    and q_up, kv_down, kv_up, o; linear selects all that the model has."""

    layers: tuple[int, ...] | None = None
    """Layers that get adapters, numbered from 0. Unset: all."""

    dropout: Annotated[float, Ge(0), Lt(1), Example(0.05)] = 0.0
    """Dropout probability of the adapters' input in training; the frozen weight's input is not
    dropped."""

    load: str | None = None
    """Initialize from these adapters, a PEFT folder or a run with the same rank and targets.
    Unset: B is zero, so that training starts at the base model."""

    @property
    def scale(self) -> float:
        """Factor applied to B · A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_matrices(model: ModelConfig) -> tuple[str, ...]:
    """Return the linear layers of a layer of this model that can have adapters, in the order of
    the forward pass."""
    if model.mla is None:
        inputs: tuple[str, ...] = ("q", "kv", *(("gate",) if model.attention.gated else ()))
    else:
        inputs = (*(("q",) if model.mla.q_rank is None else ("q_down", "q_up")), "kv_down", "kv_up")
    return (*inputs, "o", "gate_up" if model.gated else "up", "down")


def lora_targets(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """Return the linear layers that get adapters, in the order of the forward pass."""
    return tuple(
        name for name in lora_matrices(model) if name in lora.targets or EVERY in lora.targets
    )


def lora_layers(lora: LoraConfig, model: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of the layers that get adapters."""
    return (
        tuple(range(model.num_layers)) if lora.layers is None else tuple(sorted(set(lora.layers)))
    )


def has_adapters(parameter: str, lora: LoraConfig, model: ModelConfig) -> bool:
    """Return whether a parameter, given by its canonical name, has adapters."""
    matrix = find_lora_target(parameter)
    if matrix is None:
        return False
    return int(parameter.split(".")[1]) in lora_layers(lora, model) and matrix in lora_targets(
        lora, model
    )


def find_lora_target(parameter: str) -> str | None:
    """Return the target name of a parameter, given by its canonical name; None for experts and
    parameters outside layers.

    >>> find_lora_target("layers.3.mlp.down"), find_lora_target("layers.3.moe.experts.down")
    ('down', None)
    """
    parts = parameter.split(".")  # layers, a number, attention or mlp, a matrix
    return parts[3] if len(parts) == 4 and parts[0] == "layers" else None


def adapts_any_layer(lora: LoraConfig, model: ModelConfig) -> bool:
    """Return whether any of the selected layers has one of the targets: parts can be left out,
    and experts have no adapters."""
    targets = set(lora_targets(lora, model))
    mlp_targets = targets & {"gate_up", "up", "down"}
    return any(
        (mlp_targets and model.mlp_part(layer) == "full" and not model.has_experts(layer))
        or (targets - mlp_targets and model.attention_part(layer) == "full")
        for layer in lora_layers(lora, model)
    )


def lora_problems(
    lora: LoraConfig | None, model: ModelConfig, checkpoint: CheckpointConfig, *, compiled: bool
) -> list[str]:
    """Return the violated rules of LoRA as error messages."""
    if lora is None:
        return []
    known = (*lora_matrices(model), EVERY)
    problems = []
    if lora.layers is not None and not (
        lora.layers and set(lora.layers) <= set(range(model.num_layers))
    ):
        problems.append(
            f"lora.layers={list(lora.layers)}: model.num_layers={model.num_layers} has layers 0 to "
            f"{model.num_layers - 1}. Use one or more of them, or remove lora.layers to adapt all."
        )
    if not lora.targets:
        problems.append(
            f"lora.targets={list(lora.targets)} selects nothing to train. Use one or more of "
            f"{list(known)}."
        )
    for name in lora.targets:
        if name not in known:
            problems.append(
                f"lora.targets={name}: this model has no such target for "
                f"adapters.{did_you_mean(name, known)} "
                f"Use one or more of {list(known)}."
            )
    if not problems and not adapts_any_layer(lora, model):
        problems.append(
            f"lora.targets={list(lora.targets)}: none of the selected layers has such a linear "
            "layer (experts cannot have adapters). Use a target in attention, or set lora.layers "
            "to other layers."
        )
    if checkpoint.load is None:
        problems.append(
            f"checkpoint.load={checkpoint.load} with lora.rank={lora.rank}: adapters need a "
            "pretrained model. Set checkpoint.load to a run, a checkpoint or a Hugging Face "
            "folder."
        )
    if checkpoint.skip or checkpoint.missing_keys != "error":
        problems.append(
            f"checkpoint.skip={list(checkpoint.skip)} and "
            f"checkpoint.missing_keys={checkpoint.missing_keys} "
            "with lora.rank="
            f"{lora.rank}: weights that are not loaded would stay random. Remove checkpoint.skip "
            "and set checkpoint.missing_keys=error."
        )
    if checkpoint.load_mode != "weights":
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with lora.rank={lora.rank}: new "
            "adapters start at step 0. Set checkpoint.load_mode=weights, and lora.load to start "
            "from trained adapters."
        )
    problems += _router_loss_problems(lora, model)
    if compiled:
        problems.append(
            f"train.compile={compiled} with lora.rank={lora.rank}: compiling layers with "
            "adapters is not supported. Set train.compile=false."
        )
    return problems


def _router_loss_problems(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Reject losses of routers, which are frozen: they would only change the adapters below
    them."""
    if model.moe is None:
        return []
    losses = ("sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff")
    weights = {f"aux_loss.{name}": getattr(model.moe.aux_loss, name) for name in losses}
    return [
        f"model.moe.{name}={weight} with lora.rank={lora.rank}: routers are frozen, so the loss "
        "would only change the adapters below them. "
        f"Set model.moe.{name}=0."
        for name, weight in weights.items()
        if weight > 0
    ]

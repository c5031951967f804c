"""LoRA: small matrices that are trained beside frozen ones."""

import math
from dataclasses import dataclass

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.model import ModelConfig
from megalith.config.suggest import did_you_mean

EVERY = "linear"
"""Stands for every matrix of attention and MLP."""


STACKED = {"kv": 2, "gate_up": 2}
"""Parameters that are several matrices, one after the other; each has an A and a B of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Train two thin matrices beside each target, and nothing else: its weight acts as W + scale ·
    B · A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 16
    """Features between A and B."""

    alpha: float = 32.0
    """The product is scaled by alpha / rank, so that the rank can change and the learning rate
    stay."""

    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps large ranks from standing still
    (arXiv:2312.03732)."""

    targets: tuple[str, ...] = (EVERY,)
    """Matrices of a layer: q, kv, o, gate, gate_up or up, down; of latent attention q or q_down
    and q_up, kv_down, kv_up, o; linear stands for all that the model has."""

    layers: tuple[int, ...] | None = None
    """Layers that get adapters, by number from 0; unset: all."""

    dropout: float = 0.0
    """While training, the probability that A misses a feature of a token; W always sees all of
    them."""

    load: str | None = None
    """Start from these adapters, a PEFT folder or a run with the same rank and targets; unset: B
    is zero, so that the run begins at the base model."""

    @property
    def scale(self) -> float:
        """Of B · A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_matrices(model: ModelConfig) -> tuple[str, ...]:
    """Matrices of a layer of this model that can have adapters, in the order of the forward
    pass."""
    if model.mla is None:
        inputs: tuple[str, ...] = ("q", "kv", *(("gate",) if model.attention.gated else ()))
    else:
        inputs = (*(("q",) if model.mla.q_rank is None else ("q_down", "q_up")), "kv_down", "kv_up")
    return (*inputs, "o", "gate_up" if model.gated else "up", "down")


def lora_targets(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """The matrices that get adapters, in the order of the forward pass."""
    return tuple(
        name for name in lora_matrices(model) if name in lora.targets or EVERY in lora.targets
    )


def lora_layers(lora: LoraConfig, model: ModelConfig) -> tuple[int, ...]:
    """Numbers of the layers that get adapters."""
    return (
        tuple(range(model.num_layers)) if lora.layers is None else tuple(sorted(set(lora.layers)))
    )


def has_adapters(parameter: str, lora: LoraConfig, model: ModelConfig) -> bool:
    """Whether adapters are trained beside a parameter, by its canonical name."""
    matrix = matrix_of(parameter)
    if matrix is None:
        return False
    return int(parameter.split(".")[1]) in lora_layers(lora, model) and matrix in lora_targets(
        lora, model
    )


def matrix_of(parameter: str) -> str | None:
    """The word for a layer's matrix that may have adapters, by its canonical name; None: experts,
    and what is in no layer.

    >>> matrix_of("layers.3.mlp.down"), matrix_of("layers.3.moe.experts.down")
    ('down', None)
    """
    parts = parameter.split(".")  # layers, a number, attention or mlp, a matrix
    return parts[3] if len(parts) == 4 and parts[0] == "layers" else None


def adapts_something(lora: LoraConfig, model: ModelConfig) -> bool:
    """Whether any of the chosen layers has one of the targets: parts can be left out, and experts
    have no adapters."""
    targets = set(lora_targets(lora, model))
    of_mlp = targets & {"gate_up", "up", "down"}
    return any(
        (of_mlp and model.mlp_part(layer) == "full" and not model.has_experts(layer))
        or (targets - of_mlp and model.attention_part(layer) == "full")
        for layer in lora_layers(lora, model)
    )


def lora_problems(
    lora: LoraConfig | None, model: ModelConfig, checkpoint: CheckpointConfig, *, compiled: bool
) -> list[str]:
    """What keeps a run from training adapters as asked, as messages for the user."""
    if lora is None:
        return []
    known = (*lora_matrices(model), EVERY)
    problems = []
    if lora.rank < 1:
        problems.append(f"lora.rank={lora.rank} must be at least 1. Use 16.")
    if not 0 < lora.alpha < math.inf:
        problems.append(f"lora.alpha={lora.alpha} must be above 0. Use twice lora.rank.")
    if not 0 <= lora.dropout < 1:
        problems.append(
            f"lora.dropout={lora.dropout} must be a probability, at least 0 and below 1. Use 0.05."
        )
    if lora.layers is not None and not (
        lora.layers and set(lora.layers) <= set(range(model.num_layers))
    ):
        problems.append(
            f"lora.layers={list(lora.layers)}: model.num_layers={model.num_layers} has layers 0 to "
            f"{model.num_layers - 1}. Use one or more of them, or leave it unset for all."
        )
    if not lora.targets:
        problems.append(
            f"lora.targets={list(lora.targets)} leaves nothing to train. Use one or more of "
            f"{list(known)}."
        )
    for name in lora.targets:
        if name not in known:
            problems.append(
                f"lora.targets={name}: no matrix of this model that can have "
                f"adapters.{did_you_mean(name, known)} "
                f"Use one or more of {list(known)}."
            )
    if not problems and not adapts_something(lora, model):
        problems.append(
            f"lora.targets={list(lora.targets)}: none of the layers that get adapters has such a "
            "matrix, and experts "
            f"have no adapters. Use one of attention, or set lora.layers to others."
        )
    if checkpoint.load is None:
        problems.append(
            f"checkpoint.load={checkpoint.load} with lora.rank={lora.rank}: adapters are trained "
            "beside weights that "
            "have learned already. Set checkpoint.load to a run, a checkpoint or a Hugging Face "
            "folder."
        )
    if checkpoint.skip or checkpoint.missing_keys != "error":
        problems.append(
            f"checkpoint.skip={list(checkpoint.skip)} and "
            f"checkpoint.missing_keys={checkpoint.missing_keys} "
            "with lora.rank="
            f"{lora.rank}: weights that are not loaded would stay as they were drawn. Set "
            "checkpoint.skip to nothing "
            f"and checkpoint.missing_keys=error."
        )
    if checkpoint.load_mode != "weights":
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with lora.rank={lora.rank}: adapters "
            "that begin "
            "have no step to go on "
            "at. Set checkpoint.load_mode=weights, and lora.load for adapters that have learned "
            "already."
        )
    problems += _balance_problems(lora, model)
    if compiled:
        problems.append(
            f"train.compile={compiled} with lora.rank={lora.rank}: layers with adapters are not "
            "compiled yet. Set "
            f"train.compile=false."
        )
    return problems


def _balance_problems(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Losses for routers, which stay as they are: only what is trained below them would feel
    any."""
    if model.moe is None:
        return []
    losses = ("sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff")
    weights = {f"aux_loss.{name}": getattr(model.moe.aux_loss, name) for name in losses}
    return [
        f"model.moe.{name}={weight} with lora.rank={lora.rank}: routers are not trained, and the "
        "loss would move the "
        f"layers below them. Set model.moe.{name}=0."
        for name, weight in weights.items()
        if weight > 0
    ]

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
    """Train two thin matrices beside each target, and nothing else: its weight acts as W + scale · B · A.

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    rank: int = 16
    """Features between A and B."""

    alpha: float = 32.0
    """The product is scaled by alpha / rank, so that the rank can change and the learning rate stay."""

    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, which keeps large ranks from standing still (arXiv:2312.03732)."""

    targets: tuple[str, ...] = (EVERY,)
    """Matrices of every layer: q, kv, o, gate, gate_up or up, down; linear stands for all that the model has."""

    load: str | None = None
    """Start from these adapters, a PEFT folder or a run with the same rank and targets; unset: B is zero, so that the
    run begins at the base model."""

    @property
    def scale(self) -> float:
        """Of B · A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def lora_matrices(model: ModelConfig) -> tuple[str, ...]:
    """Matrices of a layer of this model that can have adapters; none of latent attention, whose keys and values are
    multiplied in two orders."""
    attention = () if model.mla is not None else ("q", "kv", *(("gate",) if model.attention.gated else ()), "o")
    return (*attention, "gate_up" if model.gated else "up", "down")


def lora_targets(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """The matrices that get adapters, in the order of the forward pass."""
    return tuple(name for name in lora_matrices(model) if name in lora.targets or EVERY in lora.targets)


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
    if not lora.targets:
        problems.append(f"lora.targets={list(lora.targets)} leaves nothing to train. Use one or more of {list(known)}.")
    for name in lora.targets:
        if name not in known:
            problems.append(
                f"lora.targets={name}: no matrix of this model that can have adapters.{did_you_mean(name, known)} "
                f"Use one or more of {list(known)}."
            )
    if checkpoint.load is None:
        problems.append(
            f"checkpoint.load={checkpoint.load} with lora.rank={lora.rank}: adapters are trained beside weights that "
            f"have learnt already. Set checkpoint.load to a run, a checkpoint or a Hugging Face folder."
        )
    if checkpoint.skip or checkpoint.missing != "error":
        problems.append(
            f"checkpoint.skip={list(checkpoint.skip)} and checkpoint.missing={checkpoint.missing} with lora.rank="
            f"{lora.rank}: weights that are not loaded would stay as they were drawn. Set checkpoint.skip to nothing "
            f"and checkpoint.missing=error."
        )
    if compiled:
        problems.append(
            f"train.compile={compiled} with lora.rank={lora.rank}: layers with adapters are not compiled yet. Set "
            f"train.compile=false."
        )
    return problems

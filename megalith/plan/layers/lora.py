"""LoRA: two matrices A and B beside a frozen matrix of attention or of an MLP."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalith.config.lora import STACKED, LoraConfig, has_adapters, lora_targets
from megalith.config.model import ModelConfig
from megalith.plan.layers.base import HeldParameter

FROM_X = ("q", "kv", "gate", "q_down", "kv_down")
"""Matrices of attention that read the layer's input."""


def with_adapters(
    held: Sequence[HeldParameter], model: ModelConfig, lora: LoraConfig | None
) -> list[HeldParameter]:
    """Return the parameters of a rank, frozen, and those of their adapters; unchanged without
    `lora`.

    If a matrix is split along outputs, B is split the same way; if along inputs, A is. The other
    one is replicated.
    """
    if lora is None:
        return list(held)
    parameters: list[HeldParameter] = []
    for one in held:
        if has_adapters(one.name, lora, model):
            parameters += _adapter_pair(one, lora.rank)
        parameters.append(replace(one, frozen=True))
    return parameters


def _adapter_pair(one: HeldParameter, rank: int) -> Iterator[HeldParameter]:
    word = one.name.rsplit(".", 1)[1]
    a = HeldParameter(f"{one.name}.lora_a", STACKED.get(word, 1) * rank, one.columns)
    b = HeldParameter(f"{one.name}.lora_b", one.rows, rank)
    if word in ("o", "down"):
        yield replace(a, cut=one.cut)
        yield b
    else:
        yield a
        yield replace(b, cut=one.cut, summed=one.summed)


def is_lora_a(one: HeldParameter) -> bool:
    """Return whether a parameter is the matrix A of an adapter, which reads the adapted matrix's
    input."""
    return one.name.endswith(".lora_a")


def adapted_matrix(one: HeldParameter) -> str:
    """Return the last part of the name of a matrix, or of the matrix of an adapter."""
    return one.name.removesuffix(".lora_a").rsplit(".", 1)[1]


def lora_input_gradients(config: ModelConfig, lora: LoraConfig) -> dict[str, bool]:
    """Return, by matrix and for core attention, whether an adapter of the same layer comes before
    it."""
    targets = set(lora_targets(lora, config))
    reading = targets & {*FROM_X, "q_up", "kv_up"}
    up = config.block == "sequential" and bool(reading or "o" in targets)
    return {
        **dict.fromkeys(FROM_X, False),
        "q_up": "q_down" in targets,
        "kv_up": "kv_down" in targets,
        "core": bool(reading - {"gate"}),
        "o": bool(reading),
        "gate_up": up,
        "up": up,
        "down": up or bool(targets & {"gate_up", "up"}),
    }

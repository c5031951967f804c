"""What a rank holds when adapters are trained beside frozen weights; no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalith.config.lora import STACKED, LoraConfig, has_adapters
from megalith.config.model import ModelConfig
from megalith.plan.parameters import HeldParameter


def with_adapters(held: Sequence[HeldParameter], model: ModelConfig, lora: LoraConfig | None) -> list[HeldParameter]:
    """The parameters of a rank, frozen, and those of their adapters; without `lora` as they are.

    Of a matrix cut by outputs, B is cut as it is; of one cut by inputs, A is. The other half is whole on every rank.
    """
    if lora is None:
        return list(held)
    found: list[HeldParameter] = []
    for one in held:
        if has_adapters(one.name, lora, model):
            found += _pair(one, lora.rank)
        found.append(replace(one, frozen=True))
    return found


def trained(parameters: Sequence[HeldParameter]) -> list[HeldParameter]:
    """Those that have gradients and optimizer state."""
    return [one for one in parameters if not one.frozen]


def _pair(one: HeldParameter, rank: int) -> Iterator[HeldParameter]:
    word = one.name.rsplit(".", 1)[1]
    a = HeldParameter(f"{one.name}.lora_a", STACKED.get(word, 1) * rank, one.columns)
    b = HeldParameter(f"{one.name}.lora_b", one.rows, rank)
    if word in ("o", "down"):
        yield replace(a, cut=one.cut)
        yield b
    else:
        yield a
        yield replace(b, cut=one.cut, summed=one.summed)

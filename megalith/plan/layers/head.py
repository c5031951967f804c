"""Output head and loss: logits and their cross-entropy are computed in chunks of tokens, and the
gradients of both in forward."""

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import LayerSetting, Message, SavedActivation

TYPE_RULE = "VocabularyRule"
"""Rule of verify/type_rules.py for the autograd functions of the vocabulary-parallel loss."""


def head_flops(model: ModelConfig, tokens: int) -> int:
    """Return the model FLOPs of the output head, without padded vocabulary rows."""
    return 6 * tokens * model.hidden_size * model.vocab_size


def head_tensors(setting: LayerSetting, region: str = "") -> list[SavedActivation]:
    """Return the gradients that the head computes in forward."""
    h = setting.model.hidden_size
    width, rows = setting.tokens * h, setting.part.vocab * h
    return [
        SavedActivation(region, "gradient of the head's input", width, width * setting.element),
        SavedActivation(region, "gradient of the head's weight", rows, rows * setting.wide),
    ]


def head_messages(setting: LayerSetting, *, chunk: int, passes: int) -> Iterator[Message]:
    """Yield the sums of three statistics per token over the vocabulary shards, in two calls per
    chunk of `chunk` tokens."""
    chunks = -(-setting.tokens // chunk)
    yield Message(
        "tp",
        "statistics of logits",
        "all_reduce",
        setting.tp,
        2 * chunks * passes,
        3 * setting.tokens * setting.wide * passes,
    )

"""Sampling settings of text generation."""

from dataclasses import dataclass
from typing import Annotated

from megalith.config.fields import Example, Ge, Gt, Le


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Sampling parameters, applied in the order temperature, top_k, top_p."""

    max_new_tokens: Annotated[int, Ge(1)] = 256
    """Maximum number of tokens to generate. Generation also stops at the model's context length
    and at the end-of-document token."""

    temperature: Annotated[float, Ge(0), Example(1.0)] = 1.0
    """Logits are divided by the temperature: values below 1 make unlikely tokens rarer; 0 is
    greedy decoding."""

    top_k: Annotated[int | None, Ge(1), Example(50)] = None
    """Sample from the k most likely tokens, including ties with the last of them. Unset: all
    tokens."""

    top_p: Annotated[float | None, Gt(0), Le(1), Example(0.9)] = None
    """Sample from the smallest set of most likely tokens whose total probability is at least
    top_p (Holtzman et al. 2019, arXiv:1904.09751). Unset: all tokens."""

    seed: int = 1234
    """Random seed. The same seed, prompt and position give the same sample, independent of other
    texts in the batch."""

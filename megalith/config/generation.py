"""Sampling settings of text generation."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Sampling parameters, applied in the order temperature, top_k, top_p."""

    max_new_tokens: int = 256
    """Maximum number of tokens to generate. Generation also stops at the model's context length
    and at the end-of-document token."""

    temperature: float = 1.0
    """Logits are divided by the temperature: values below 1 make unlikely tokens rarer; 0 is
    greedy decoding."""

    top_k: int | None = None
    """Sample from the k most likely tokens, including ties with the last of them. Unset: all
    tokens."""

    top_p: float | None = None
    """Sample from the smallest set of most likely tokens whose total probability is at least
    top_p (Holtzman et al. 2019, arXiv:1904.09751). Unset: all tokens."""

    seed: int = 1234
    """Random seed. The same seed, prompt and position give the same sample, independent of other
    texts in the batch."""


def sample_problems(sample: SampleConfig) -> list[str]:
    """Return the violated rules as error messages."""
    problems = []
    if sample.max_new_tokens < 1:
        problems.append(
            f"max_new_tokens={sample.max_new_tokens} must be at least 1. Set it to the number of "
            "tokens to generate."
        )
    if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
        problems.append(
            f"temperature={sample.temperature} must be at least 0 (0 is greedy decoding). Use 1."
        )
    if sample.top_k is not None and sample.top_k < 1:
        problems.append(f"top_k={sample.top_k} must be at least 1. Use 50, or remove it.")
    if sample.top_p is not None and not 0 < sample.top_p <= 1:
        problems.append(
            f"top_p={sample.top_p} must be above 0 and at most 1. Use 0.9, or remove it."
        )
    return problems

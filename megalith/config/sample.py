"""How the next token is chosen."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    """Sampling: temperature first, then top_k, then top_p, then one draw."""

    max_new_tokens: int = 256
    """Tokens to write at most; the model's context and its end-of-document token may end a text
    earlier."""

    temperature: float = 1.0
    """Scores are divided by it: below 1 bolder choices get rarer; 0 always takes the best token."""

    top_k: int | None = None
    """Choose among this many best tokens, and those that equal the last of them; unset: all."""

    top_p: float | None = None
    """Choose among the best tokens that together have this probability (Holtzman et al. 2019,
    arXiv:1904.09751); unset: all."""

    seed: int = 1234
    """The same seed, prompt and place give the same draw, whatever else is generated beside it."""


def sample_problems(sample: SampleConfig) -> list[str]:
    """Every rule that this config breaks, as texts."""
    problems = []
    if sample.max_new_tokens < 1:
        problems.append(
            f"max_new_tokens={sample.max_new_tokens} must be at least 1. Use the number of tokens "
            "to write."
        )
    if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
        problems.append(
            f"temperature={sample.temperature} must be 0 (always the best token) or more. Use 1."
        )
    if sample.top_k is not None and sample.top_k < 1:
        problems.append(f"top_k={sample.top_k} must be at least 1. Use 50, or leave it out.")
    if sample.top_p is not None and not 0 < sample.top_p <= 1:
        problems.append(
            f"top_p={sample.top_p} must be above 0 and at most 1. Use 0.9, or leave it out."
        )
    return problems

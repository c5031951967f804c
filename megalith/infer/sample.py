"""Sampling of the next token from logits, with keyed random numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.generation import SampleConfig
from megalith.errors import CheckpointError
from megalith.plan.keys import key


def sample_tokens(
    logits: Tensor, sample: SampleConfig, positions: Sequence[tuple[int, int]]
) -> list[int]:
    """Sample one token for each row of logits [b, v]; positions[i] is the (sequence, position) of
    row i's token.

    Random numbers are keyed by (seed, sequence, position) and computed on the host, so a sample
    does not depend on other rows, and is the same on every rank. Temperature 0 selects the largest
    logit, the first of equal ones.

    Raises:
        CheckpointError: a logit is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        invalid = next(
            position
            for position, row in zip(positions, logits, strict=True)
            if not bool(torch.isfinite(row).all())
        )
        raise CheckpointError(
            f"sequence {invalid[0]}: the logits at token {invalid[1]} are not finite, so the "
            "weights "
            "have probably diverged. Use an earlier checkpoint."
        )
    if sample.temperature == 0:
        best: list[int] = logits.argmax(-1).tolist()
        return best
    filtered = filter_logits(logits.to("cpu", torch.float64) / sample.temperature, sample)
    noise = torch.stack(
        [_exponential(sample.seed, *position, size=logits.shape[1]) for position in positions]
    )
    sampled: list[int] = (
        (filtered - noise.log()).argmax(-1).tolist()
    )  # Gumbel-max trick: argmax of exp(logit) / Exp(1)
    return sampled


def filter_logits(logits: Tensor, sample: SampleConfig) -> Tensor:
    """Return logits [b, v] with -inf for tokens outside of top_k, and then top_p. The most likely
    token always remains."""
    if sample.top_k is not None and sample.top_k < logits.shape[-1]:
        lowest = logits.topk(sample.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if sample.top_p is not None and sample.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        removed = before > sample.top_p
        removed[:, 0] = False
        logits = logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
    return logits


def _exponential(seed: int, sequence: int, position: int, *, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(key(seed, "sample", str(sequence), position))
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)

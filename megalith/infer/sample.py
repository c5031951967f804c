"""Choosing the next token from scores; no generator state, only keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.config.sample import SampleConfig
from megalith.errors import CheckpointError
from megalith.plan.keys import key


def choose(scores: Tensor, sample: SampleConfig, places: Sequence[tuple[int, int]]) -> list[int]:
    """One token for each row of scores [b, v]; places[i] is the (sequence, position) of row i's
    token.

    The draw is keyed by (seed, sequence, position) and made on the host, so it does not depend on
    the other rows, and is the same on every rank that has the same scores. Temperature 0 takes the
    best, the first of equals, and draws nothing.

    Raises:
        CheckpointError: a score is not finite.
    """
    if not bool(torch.isfinite(scores).all()):
        where = next(
            place
            for place, row in zip(places, scores, strict=True)
            if not bool(torch.isfinite(row).all())
        )
        raise CheckpointError(
            f"sequence {where[0]}: the scores at token {where[1]} are not finite, so the weights "
            "must have diverged. "
            f"Use an earlier checkpoint."
        )
    if sample.temperature == 0:
        best: list[int] = scores.argmax(-1).tolist()
        return best
    kept = keep_likely(scores.to("cpu", torch.float64) / sample.temperature, sample)
    noise = torch.stack(
        [_exponential(sample.seed, *place, size=scores.shape[1]) for place in places]
    )
    drawn: list[int] = (
        (kept - noise.log()).argmax(-1).tolist()
    )  # exp(score) / Exp(1) is largest with softmax's odds
    return drawn


def keep_likely(scores: Tensor, sample: SampleConfig) -> Tensor:
    """Scores [b, v] with -inf where top_k, and then top_p, leave a token out. The best token always
    stays."""
    if sample.top_k is not None and sample.top_k < scores.shape[-1]:
        lowest = scores.topk(sample.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, float("-inf"))
    if sample.top_p is not None and sample.top_p < 1:
        ordered, order = scores.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        surplus = before > sample.top_p
        surplus[:, 0] = False
        scores = scores.masked_fill(surplus.scatter(-1, order, surplus), float("-inf"))
    return scores


def _exponential(seed: int, sequence: int, position: int, *, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(key(seed, "sample", str(sequence), position))
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)

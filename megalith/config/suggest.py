"""Suggest the closest existing names for an unknown one ("did you mean")."""

from collections.abc import Iterable
from difflib import SequenceMatcher

MAX_LENGTH = 200
"""Maximum number of characters of a name that is compared: the comparison takes quadratic time,
and existing names are shorter."""


def nearest(name: str, candidates: Iterable[str], *, limit: int = 3) -> list[str]:
    """Return the candidates most similar to `name`, best first.

    Dotted names are compared whole and by their last part, so `tp` and `paralel.tp` both find
    `parallel.tp`.
    """
    if len(name) > MAX_LENGTH:
        return []
    scores = {candidate: _similarity(name, candidate) for candidate in candidates}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:limit]
    threshold = max(
        [0.6, *(scores[candidate] - 0.1 for candidate in best)]
    )  # 0.6: difflib's default cutoff; 0.1: heuristic
    return [candidate for candidate in best if scores[candidate] >= threshold]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean a or b?"`, or an empty string if no candidate is similar; appended
    to an error message."""
    similar = nearest(name, candidates)
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def _similarity(a: str, b: str) -> float:
    """Return a similarity from 0 to 1: the mean of those of the whole names and of their last
    parts."""
    a, b = a.lower(), b.lower()
    whole = SequenceMatcher(None, a, b).ratio()
    last = SequenceMatcher(None, a.rpartition(".")[2], b.rpartition(".")[2]).ratio()
    return (whole + last) / 2

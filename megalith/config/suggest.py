"""The names closest to one that does not exist: "did you mean"."""

from collections.abc import Iterable
from difflib import SequenceMatcher

MAX_LENGTH = 200
"""Characters of a name that is compared with others: the comparison takes quadratic time, and no
name is as long."""


def nearest(name: str, candidates: Iterable[str], *, limit: int = 3) -> list[str]:
    """Candidates that look like `name`, best first; only those about as near as the best.

    Dotted names are compared whole and by their last part, so `tp` and `paralel.tp` both find
    `parallel.tp`.
    """
    if len(name) > MAX_LENGTH:
        return []
    scores = {candidate: _likeness(name, candidate) for candidate in candidates}
    best = sorted(scores, key=lambda candidate: (-scores[candidate], candidate))[:limit]
    enough = max(
        [0.6, *(scores[candidate] - 0.1 for candidate in best)]
    )  # 0.6: difflib's own cut-off; 0.1: a guess
    return [candidate for candidate in best if scores[candidate] >= enough]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`" Did you mean a or b?"`, or nothing when no candidate is close; to be put behind a
    sentence."""
    found = nearest(name, candidates)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _likeness(a: str, b: str) -> float:
    """0 to 1: the mean of how alike the whole names and their last parts are."""
    a, b = a.lower(), b.lower()
    whole = SequenceMatcher(None, a, b).ratio()
    last = SequenceMatcher(None, a.rpartition(".")[2], b.rpartition(".")[2]).ratio()
    return (whole + last) / 2

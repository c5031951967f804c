"""Errors for users: each message states the field, its value, the reason, and a value that works;
suggestions for unknown names.

The user can fix a `UserError`, so a command prints its text without a traceback and exits with 2.
Any other exception is a bug and keeps its traceback.
"""

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any

MAX_PROBLEMS = 100
"""Maximum number of problems in one message. Heuristic: more are not read, and finding the nearest
name for each takes time."""


class UserError(Exception):
    """Error that the user can fix. The text is the complete message: field, value, reason, a value
    that works."""


class ConfigError(UserError):
    """A field, flag, recipe or combination of them that is not valid."""


class DataError(UserError):
    """A data file, corpus or tokenizer that is missing, damaged or does not fit the run."""


class DivergenceError(DataError):
    """A run whose model has diverged; raised on every rank, so that its state can be saved."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, in use, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose tensors cannot be read as they were saved; raised on every rank that loads
    it."""

    def __init__(self, reason: str, path: Any = None, advice: str = "") -> None:
        # `path` is a `storage.StoragePath`, whose module imports this one.
        super().__init__(f"{reason}{advice}")
        self.reason = reason
        """Which file is damaged, and how, without advice."""
        self.path = path
        """The checkpoint's folder."""


class CallbackError(UserError):
    """An error in a callback that ends the run; raised on every rank."""


class RollbackLimitError(CallbackError):
    """A run that has been rolled back too often; raised on every rank."""


class PlanError(UserError):
    """A layout, schedule or placement that cannot be planned."""


class RankError(Exception):
    """A worker process failed; the text starts with the traceback of that rank."""


class CollectiveError(Exception):
    """Ranks of one group are about to start different collectives, which would hang."""


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ConfigError that lists every problem, so that the user sees all of them at once.

    Raises:
        ConfigError: `problems` is not empty.
    """
    if not problems:
        return
    if len(problems) == 1:
        raise ConfigError(problems[0])
    lines = "\n".join(
        f"  {number}. {problem}" for number, problem in enumerate(problems[:MAX_PROBLEMS], 1)
    )
    lines += (
        f"\n  ... and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    )
    raise ConfigError(f"{len(problems)} settings must be changed before this can run:\n{lines}")


# --- suggestions for unknown names ("did you mean")

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
    # 0.6: difflib's default cutoff; 0.1: heuristic
    threshold = max([0.6, *(scores[candidate] - 0.1 for candidate in best)])
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

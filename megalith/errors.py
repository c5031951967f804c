"""Errors for users: each message states the field, its value, the reason, and a value that works.

The user can fix a `UserError`, so a command prints its text without a traceback and exits with 2.
Any other exception is a bug and keeps its traceback.
"""

from collections.abc import Sequence
from pathlib import Path

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


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, in use, or belongs to another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint whose tensors cannot be read as they were saved; raised on every rank that loads
    it."""

    def __init__(self, reason: str, path: Path | None = None, advice: str = "") -> None:
        super().__init__(f"{reason}{advice}")
        self.reason = reason
        """Which file is damaged, and how, without advice."""
        self.path = path
        """The checkpoint's folder."""


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

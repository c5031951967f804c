"""All ranks succeed, or all raise the same error: one rank's full disk must not leave the others waiting."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from megalith.errors import CheckpointError, UserError
from megalith.parallel.group import Group, gather_objects

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What one rank's work came to."""

    value: T | None
    failure: str | None = None


def together(work: Callable[[], T], world: Group) -> list[T]:
    """Every rank's result of its own `work`, in rank order.

    Raises:
        CheckpointError: on every rank with the same text, when it failed on any; chained to the rank's own error there.
    """
    cause: Exception | None = None
    try:
        mine = _Outcome(work())
    except Exception as error:  # whatever it was, the other ranks must hear of it before this one ends
        cause = error
        mine = _Outcome(None, _describe(error, world))
    outcomes = [cast(_Outcome[T], outcome) for outcome in gather_objects(mine, world)]
    failures = list(dict.fromkeys(outcome.failure for outcome in outcomes if outcome.failure is not None))
    if failures:
        raise CheckpointError("\n".join(failures)) from cause
    return [cast(T, outcome.value) for outcome in outcomes]  # no failure: every value is set


def _describe(error: Exception, world: Group) -> str:
    """The error in words, with what would help."""
    if isinstance(error, UserError):
        return str(error)
    where = f"rank {world.ranks[world.rank]}: " if world.size > 1 else ""
    return f"{where}{type(error).__name__}: {error}.{_remedy(error)}"


def _remedy(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return " Free some space, or set checkpoint.keep to a lower number."
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return " Make the folder writable, or choose another one with --run."
    return ""

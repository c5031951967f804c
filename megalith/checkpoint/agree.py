"""All ranks succeed, or all raise the same error: one rank's full disk must not leave the others
waiting."""

import errno
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from megalith.errors import CheckpointError, RankError, UserError
from megalith.parallel.group import Group, gather_objects

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _RankOutcome(Generic[T]):
    """What one rank's work came to."""

    value: T | None
    failure: str | None = None
    """What a person can do something about, in words."""

    bug: str | None = None
    """The traceback of anything else."""


def raise_on_all_ranks(work: Callable[[], T], world: Group) -> list[T]:
    """Every rank's result of its own `work`, in rank order.

    Raises:
        CheckpointError: on every rank with the same text, when a rank's folder, disk or settings
            did not allow it (a UserError or OSError); chained to the rank's own error there.
        RankError: a rank failed otherwise, which is a fault of ours; the text starts with the
            traceback of the first such rank. The rank itself raises the error it met.
    """
    cause: Exception | None = None
    try:
        mine = _RankOutcome(work())
    except (
        Exception
    ) as error:  # whatever it was, the other ranks must hear of it before this one ends
        cause = error
        mine = _failed(error, world)
    outcomes = [cast(_RankOutcome[T], outcome) for outcome in gather_objects(mine, world)]
    if cause is not None and mine.bug is not None:
        raise cause
    _raise_the_worst(outcomes, world, cause)
    return [cast(T, outcome.value) for outcome in outcomes]  # no failure: every value is set


def _failed(error: Exception, world: Group) -> _RankOutcome[T]:
    if isinstance(error, UserError | OSError):
        return _RankOutcome(None, failure=_describe(error, world))
    return _RankOutcome(None, bug="".join(traceback.format_exception(error)).rstrip())


def _raise_the_worst(
    outcomes: Sequence[_RankOutcome[T]], world: Group, cause: Exception | None
) -> None:
    """Raise if any rank failed: a fault of ours first, as what others met may only follow from
    it."""
    for rank, outcome in zip(world.ranks, outcomes, strict=True):
        if outcome.bug is not None:
            raise RankError(
                f"{outcome.bug}\n"
                f"This was rank {rank}; rank {world.ranks[world.rank]} ends because of it."
            )
    failures = list(
        dict.fromkeys(outcome.failure for outcome in outcomes if outcome.failure is not None)
    )
    if failures:
        raise CheckpointError("\n".join(failures)) from cause


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

"""Consistency across ranks: ranks that sum gradients have the same parameters, and an error on one
rank is raised on all.

A sum over slices that do not coincide gives wrong numbers without an error, so the layouts are
compared once, before the first step.
"""

import errno
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import zip_longest
from typing import Generic, TypeVar, cast

from megalith.errors import CheckpointError, PlanError, RankError, UserError
from megalith.parallel.group import Group, gather_objects

Places = Mapping[str, str]
"""Parameter name -> text that describes its position, in the rank's order of parameters."""


def check_consistent_across_ranks(places: Places, group: Group) -> None:
    """Check that every rank of `group` has the same parameters in the same order and at the same
    positions; collective.

    Raises:
        PlanError: on all ranks of the group; it names two ranks and the first parameter that
        differs.
    """
    if _is_single_or_meta(group):
        return
    digest = blake2b(repr(list(places.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    layouts = [
        list(other.items())
        for other in gather_objects(dict(places), group)
        if isinstance(other, dict)
    ]
    index = next(index for index, other in enumerate(layouts) if other != layouts[0])
    _raise_difference(layouts[0], layouts[index], (group.ranks[0], group.ranks[index]))


def check_shared_consistent_across_ranks(places: Places, group: Group) -> None:
    """Check that each parameter that several ranks of `group` have lies at the same position on all
    of them; collective. Ranks may have other parameters that the others lack.

    Raises:
        PlanError: on all ranks of the group.
    """
    if _is_single_or_meta(group):
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, other in zip(group.ranks, gather_objects(dict(places), group), strict=True):
        assert isinstance(other, dict)
        for name, place in other.items():
            first_rank, first_place = first.setdefault(name, (rank, place))
            if first_place != place:
                _raise_difference([(name, first_place)], [(name, place)], (first_rank, rank))


def _is_single_or_meta(group: Group) -> bool:
    return group.size == 1 or group.handle is None


def _raise_difference(
    first: Sequence[tuple[str, str]], second: Sequence[tuple[str, str]], ranks: tuple[int, int]
) -> None:
    nothing = ("no parameter", "there")
    one, other = next((a, b) for a, b in zip_longest(first, second, fillvalue=nothing) if a != b)
    raise PlanError(
        f"ranks {ranks[0]} and {ranks[1]} sum the gradients of parameters that they lay out "
        f"differently; the first difference is {' '.join(one)} on rank {ranks[0]} and "
        f"{' '.join(other)} on rank {ranks[1]}. Run the same version with the same settings on "
        "all ranks."
    )


# Errors across ranks: if one rank fails, all ranks raise the same error instead of waiting for
# it.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _RankOutcome(Generic[T]):
    """Result or error of one rank's work."""

    value: T | None
    failure: str | None = None
    """Message of an error that a user can fix."""

    bug: str | None = None
    """Traceback of any other error."""


def raise_on_all_ranks(work: Callable[[], T], world: Group) -> list[T]:
    """Run `work` on every rank and return the results in rank order. Collective over `world`.

    Raises:
        CheckpointError: on every rank with the same text, if a rank raised a UserError or OSError;
            chained to the original error on that rank.
        RankError: a rank raised another error, which is a bug; the text starts with the traceback
            of the first such rank. That rank raises its original error.
    """
    cause: Exception | None = None
    try:
        local_outcome = _RankOutcome(work())
    except Exception as error:  # any error must reach the other ranks before this rank ends
        cause = error
        local_outcome = _failed(error, world)
    outcomes = [cast(_RankOutcome[T], outcome) for outcome in gather_objects(local_outcome, world)]
    if cause is not None and local_outcome.bug is not None:
        raise cause
    _raise_first_failure(outcomes, world, cause)
    return [cast(T, outcome.value) for outcome in outcomes]  # no failure: every value is set


def _failed(error: Exception, world: Group) -> _RankOutcome[T]:
    if isinstance(error, UserError | OSError):
        return _RankOutcome(None, failure=_describe(error, world))
    return _RankOutcome(None, bug="".join(traceback.format_exception(error)).rstrip())


def _raise_first_failure(
    outcomes: Sequence[_RankOutcome[T]], world: Group, cause: Exception | None
) -> None:
    """Raise if any rank failed; bugs first, because other ranks' errors may be consequences."""
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
    """Return the error message with advice."""
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

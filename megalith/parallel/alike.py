"""Ranks that rely on having laid out their parameters alike compare them once, before the first
step.

A sum over slices that do not coincide is a wrong number without an error, so nobody takes it on
trust.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest

from megalith.errors import PlanError
from megalith.parallel.group import Group, gather_objects

Places = Mapping[str, str]
"""By parameter, in the order in which a rank has them: where it lies, in words."""


def check_consistent_across_ranks(places: Places, group: Group) -> None:
    """Make sure that every rank of `group` has the same parameters, in one order, at the same
    places; collective.

    Raises:
        PlanError: on all of them, naming two ranks and the first parameter that differs.
    """
    if _is_paper(group):
        return
    digest = blake2b(repr(list(places.items())).encode()).hexdigest()
    if len(set(gather_objects(digest, group))) == 1:
        return
    found = [
        list(other.items())
        for other in gather_objects(dict(places), group)
        if isinstance(other, dict)
    ]
    place = next(place for place, other in enumerate(found) if other != found[0])
    _refuse(found[0], found[place], (group.ranks[0], group.ranks[place]))


def check_shared_consistent_across_ranks(places: Places, group: Group) -> None:
    """The same for ranks that have other parameters otherwise: those of which several have one lie
    alike.

    Raises:
        PlanError: on all ranks of the group.
    """
    if _is_paper(group):
        return
    first: dict[str, tuple[int, str]] = {}
    for rank, other in zip(group.ranks, gather_objects(dict(places), group), strict=True):
        assert isinstance(other, dict)
        for name, where in other.items():
            holder, there = first.setdefault(name, (rank, where))
            if there != where:
                _refuse([(name, there)], [(name, where)], (holder, rank))


def _is_paper(group: Group) -> bool:
    """Whether there is nobody to ask."""
    return group.size == 1 or group.handle is None


def _refuse(
    mine: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]], ranks: tuple[int, int]
) -> None:
    nothing = ("nothing", "at all")
    one, other = next((a, b) for a, b in zip_longest(mine, theirs, fillvalue=nothing) if a != b)
    raise PlanError(
        f"parameters lie differently on ranks {ranks[0]} and {ranks[1]}, which add them up: first "
        f"{' '.join(one)} on "
        f"rank {ranks[0]} and {' '.join(other)} on rank {ranks[1]}. Run the same version with the "
        "same settings on all."
    )

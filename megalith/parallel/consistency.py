"""Check that ranks which sum gradients have the same parameters in the same layout.

A sum over slices that do not coincide gives wrong numbers without an error, so the layouts are
compared once, before the first step.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest

from megalith.errors import PlanError
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

"""Ranks with different parameter layouts raise an error before they sum gradients."""

import pytest

from megalith.errors import RankError
from megalith.parallel.group import (
    Group,
    check_consistent_across_ranks,
    check_shared_consistent_across_ranks,
    single_rank_group,
)
from megalith.testing.ranks import run_ranks, world_group

PLACES = {"embed.weight": "at elements 0 to 8", "norm.weight": "at elements 8 to 10"}


def _compare(rank: int, world: int, changed: dict[str, str], shared: bool) -> bool:
    group = world_group(rank, world, "dp")
    local = PLACES | (changed if rank == 1 else {})
    (check_shared_consistent_across_ranks if shared else check_consistent_across_ranks)(
        local, group
    )
    return True


@pytest.mark.parametrize("shared", [False, True])
def test_equal_layouts_pass(shared: bool) -> None:
    assert run_ranks(_compare, 3, {}, shared) == [True] * 3


@pytest.mark.parametrize("shared", [False, True])
def test_error_names_ranks_and_the_first_parameter_that_differs(shared: bool) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_compare, 3, {"norm.weight": "at elements 64 to 66"}, shared)
    assert (
        "ranks 0 and 1 sum the gradients of parameters that they lay out differently; the first "
        "difference is norm.weight at elements 8 to 10 on rank 0 and norm.weight at elements 64 to "
        "66 on rank 1. Run the same version with the same settings on all ranks."
    ) in str(caught.value)


def test_missing_parameter_is_an_error_unless_only_shared_ones_are_compared() -> None:
    with pytest.raises(
        RankError, match="no parameter there on rank 0 and extra at element 10 on rank 1"
    ):
        run_ranks(_compare, 2, {"extra": "at element 10"}, False)
    assert run_ranks(_compare, 2, {"extra": "at element 10"}, True) == [True, True]


def test_meta_groups_and_groups_of_one_are_not_compared() -> None:
    paper = Group(axes=("dp",), ranks=(0, 1), rank=0, name="paper")
    for group in (paper, single_rank_group("dp")):
        check_consistent_across_ranks(PLACES, group)
        check_shared_consistent_across_ranks(PLACES, group)

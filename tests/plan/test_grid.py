"""Tests of megalith/plan/grid.py."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest

from megalith.errors import PlanError
from megalith.plan.grid import (
    Grid,
    dense_grid,
    dense_problems,
    divisors,
    expert_grid,
    stage_problems,
)
from tests.cases import loop_over


def first(grid: Grid, axes: str, count: int = 4) -> list[list[int]]:
    return [list(group) for group in grid.groups(axes.split())[:count]]


def test_16_ranks_tp2_pp4_dp2_in_the_default_order() -> None:
    grid = dense_grid(world=16, tp=2, pp=4)
    assert grid.size("dp") == 2
    assert first(grid, "tp", 2) == [[0, 1], [2, 3]]
    assert first(grid, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert first(grid, "pp", 9) == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_8_ranks_tp4_cp2() -> None:
    assert first(dense_grid(world=8, tp=4, cp=2), "cp", 9) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_16_ranks_tp2_cp2_pp2_dp2() -> None:
    grid = dense_grid(world=16, tp=2, cp=2, pp=2)
    assert first(grid, "cp", 3) == [[0, 2], [1, 3], [4, 6]]
    assert first(grid, "dp", 5) == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert first(grid, "dp cp", 3) == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert first(grid, "tp cp", 1) == [[0, 1, 2, 3]]
    assert first(grid, "tp pp", 2) == [[0, 1, 8, 9], [2, 3, 10, 11]]
    assert first(grid, "pp", 1) == [[0, 8]]
    assert first(grid, "cp dp", 9) == first(grid, "dp cp", 9)


def test_16_ranks_ep4_etp1_pp2() -> None:
    grid = expert_grid(world=16, ep=4, pp=2)
    assert first(grid, "ep", 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert first(grid, "edp", 2) == [[0, 4], [1, 5]]
    assert first(grid, "etp ep pp", 1) == [[0, 1, 2, 3, 8, 9, 10, 11]]
    assert first(grid, "etp", 2) == [[0], [1]]


EXAMPLES = {
    "ranks of a tensor-parallel pair have different experts": (
        8,
        {"tp": 2},
        {"ep": 2},
        {"ep": "01 23 45 67", "edp": "0246 1357", "tp": "01 23 45 67", "dp": "0246 1357"},
    ),
    "experts fold over tp, cp and dp": (
        8,
        {"tp": 2, "cp": 2},
        {"ep": 8},
        {"cp": "02 13 46 57", "ep": "01234567", "edp": "0 1 2 3 4 5 6 7"},
    ),
    "experts are divided themselves, in two stages": (
        8,
        {"tp": 2, "pp": 2},
        {"etp": 2, "ep": 2},
        {"ep": "02 13 46 57", "etp": "01 23 45 67", "etp ep": "0123 4567", "pp": "04 15 26 37"},
    ),
    "each expert on two ranks of four": (
        4,
        {},
        {"ep": 2},
        {"ep": "01 23", "edp": "02 13", "dp": "0123"},
    ),
    "each expert on one rank of four": (
        4,
        {"tp": 2},
        {"ep": 4},
        {"ep": "0123", "edp": "0 1 2 3", "dp": "02 13"},
    ),
}


@pytest.mark.parametrize(
    ("world", "degrees", "expert_degrees", "expected"), EXAMPLES.values(), ids=EXAMPLES
)
def test_expert_groups_match_manual_ones(
    world: int, degrees: dict[str, Any], expert_degrees: dict[str, Any], expected: dict[str, str]
) -> None:
    """Of every axis, on whichever of the two grids has it; pipelines are those of both."""
    pp = degrees.get("pp", 1)
    dense, experts = (
        dense_grid(world=world, **degrees),
        expert_grid(world=world, pp=pp, **expert_degrees),
    )
    for axes, groups in expected.items():
        grids = [grid for grid in (dense, experts) if set(axes.split()) <= set(grid.axes)]
        assert grids
        for grid in grids:
            assert (
                " ".join("".join(map(str, group)) for group in grid.groups(axes.split())) == groups
            ), axes
    assert stage_problems(dense, experts) == []


def test_dp_is_outermost_if_the_order_puts_it_last() -> None:
    grid = dense_grid(world=8, tp=2, pp=2, order="TP-cp-ep-pp-dp")
    assert first(grid, "pp", 9) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert first(grid, "dp", 9) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def random_grid(rng: random.Random) -> Grid:
    sizes = [rng.choice([1, 2, 3, 4, 8]) for _ in range(4)]
    tp, cp, pp, dp = sizes
    order = "-".join(rng.sample(["tp", "cp", "ep", "dp", "pp"], 5))
    offset = rng.choice([0, 7])
    if rng.random() < 0.5:
        return dense_grid(world=tp * cp * pp * dp, tp=tp, cp=cp, pp=pp, order=order, offset=offset)
    return expert_grid(world=tp * cp * pp * dp, etp=tp, ep=cp, pp=pp, order=order, offset=offset)


@loop_over("seed", range(60))
def test_groups_partition_the_world_and_differ_only_along_their_axes(seed: int) -> None:
    rng = random.Random(seed)
    grid = random_grid(rng)
    assert [grid.rank_at(grid.coordinates(rank)) for rank in grid.ranks] == list(grid.ranks)
    for count in range(len(grid.axes) + 1):
        axes = rng.sample(grid.axes, count)
        groups = grid.groups(axes)
        assert sorted(rank for group in groups for rank in group) == list(grid.ranks)
        assert [group[0] for group in groups] == sorted(group[0] for group in groups)
        for group in rng.sample(groups, min(3, len(groups))):
            assert list(group) == sorted(group)
            places = [grid.coordinates(rank) for rank in group]
            assert all(
                len({place[axis] for place in places}) == 1
                for axis in grid.axes
                if axis not in axes
            )
            assert len({tuple(place[axis] for axis in axes) for place in places}) == len(group)
            assert grid.find_group(group[-1], axes) == group


@loop_over("seed", range(20))
def test_a_group_of_two_axes_is_the_union_of_the_groups_of_one(seed: int) -> None:
    grid = random_grid(random.Random(seed))
    for one, other in combinations(grid.axes, 2):
        for group in grid.groups([one, other])[:5]:
            joined = {
                rank
                for member in grid.find_group(group[0], [one])
                for rank in grid.find_group(member, [other])
            }
            assert set(group) == joined


def test_axis_is_its_size_and_stride() -> None:
    grid = dense_grid(world=48, tp=2, cp=3, pp=4, order="cp-dp-tp-pp")
    assert [grid.strides(axis) for axis in ("cp", "dp", "tp", "pp")] == [
        (3, 1),
        (2, 3),
        (2, 6),
        (4, 12),
    ]
    for axis in grid.axes:
        size, stride = grid.strides(axis)
        assert grid.find_group(0, [axis]) == tuple(range(0, size * stride, stride))
    assert grid.table() == "cp 3 (stride 1) · dp 2 (stride 3) · tp 2 (stride 6) · pp 4 (stride 12)"


def test_4096_ranks_tp8_pp4() -> None:
    grid = dense_grid(world=4096, tp=8, pp=4)
    assert len(grid.groups(["dp"])) == 32
    assert grid.find_group(4095, ["pp"]) == (1023, 2047, 3071, 4095)
    assert grid.coordinates(4095) == {"tp": 7, "cp": 0, "dp": 127, "pp": 3}


def test_a_factored_axis_is_two_axes_and_still_has_its_old_name() -> None:
    plain = dense_grid(world=24, tp=4, pp=2, order="dp-tp-pp", offset=5)
    grid = plain.factor(axis="tp", outer=("tp_kv", 2), inner=("tp_copy", 2))
    assert grid.axes == ("dp", "tp_copy", "tp_kv", "pp", "cp")
    assert grid.groups(["tp"]) == plain.groups(["tp"])
    assert grid.groups(["tp_kv", "tp_copy"]) == plain.groups(["tp"])
    assert grid.groups(["tp", "dp"]) == plain.groups(["tp", "dp"])
    assert grid.strides("tp") == plain.strides("tp") == (4, 3)
    assert (grid.strides("tp_copy"), grid.strides("tp_kv")) == ((2, 3), (2, 6))
    assert grid.find_group(5, ["tp_copy"]) == (5, 8)
    assert grid.find_group(5, ["tp_kv"]) == (5, 11)
    for rank in plain.ranks:
        result = grid.coordinates(rank)
        assert {axis: result[axis] for axis in plain.axes} == plain.coordinates(rank)
        assert result["tp"] == result["tp_kv"] * 2 + result["tp_copy"]
        assert grid.rank_at(result) == grid.rank_at(plain.coordinates(rank)) == rank


def test_a_part_of_a_factored_axis_can_be_factored_again() -> None:
    grid = dense_grid(world=16, tp=8).factor(axis="tp", outer=("a", 2), inner=("b", 4))
    grid = grid.factor(axis="b", outer=("c", 2), inner=("d", 2))
    assert grid.axes[:3] == ("d", "c", "a")
    assert grid.strides("tp") == (8, 1) and grid.strides("b") == (4, 1)
    assert grid.coordinates(7) == {
        "d": 1,
        "c": 1,
        "a": 1,
        "b": 3,
        "tp": 7,
        "dp": 0,
        "cp": 0,
        "pp": 0,
    }
    assert grid.rank_at({"tp": 6, "dp": 1}) == 14


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"axis": "sp"}, "axis='sp' cannot be factored. Choose one of"),
        (
            {"outer": ("tp_kv", 3)},
            r"tp=4 is not tp_kv · tp_copy = 3 · 2. Choose tp_kv from \[1, 2, 4\]",
        ),
        ({"outer": ("dp", 2)}, "choose two names other than"),
        ({"outer": ("tp_copy", 2)}, "choose two names other than"),
    ],
)
def test_invalid_factoring_is_rejected(arguments: dict[str, Any], text: str) -> None:
    wanted: dict[str, Any] = {
        "axis": "tp",
        "outer": ("tp_kv", 2),
        "inner": ("tp_copy", 2),
        **arguments,
    }
    with pytest.raises(PlanError, match=text):
        dense_grid(world=8, tp=4).factor(**wanted)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (
            {"world": 6, "tp": 4},
            [
                "world_size=6 is not parallel.tp · parallel.cp · parallel.pp = 4·1·1 times an "
                "integer: use 4 or 8 processes, or set parallel.tp to one of [1, 2, 3, 6]."
            ],
        ),
        ({"world": 2, "tp": 4}, ["use 4 processes, or set parallel.tp to one of [1, 2]"]),
        (
            {"world": 12, "tp": 4, "pp": 2},
            [
                "use 8 or 16 processes, or set parallel.tp to one of [1, 2, 3, 6], or set "
                "parallel.pp to one of [1, 3]"
            ],
        ),
        (
            {"world": 7, "tp": 2, "cp": 3, "pp": 5},
            ["choose tp, cp, pp so that they multiply to a divisor of 7"],
        ),
        (
            {"world": 8, "tp": 2, "dp": 3},
            [
                "tp · cp · pp · dp = 2·1·1·3 = 6 is not world_size=8",
                "Use 6 processes",
                "(then it is 4)",
            ],
        ),
        ({"world": 4, "dp": 0}, ["parallel.dp=0 must be at least 1"]),
        ({"world": 0, "tp": 0, "cp": -1}, ["parallel.tp=0", "parallel.cp=-1", "world_size=0"]),
        (
            {"world": 4, "tp": 2, "order": "tp-xp-dp-tp"},
            ["unknown axis 'xp'", "tp occurs more than once"],
        ),
        ({"world": 4, "order": "tp--dp"}, ["parallel.order='tp--dp': an axis name is empty"]),
        (
            {"world": 4, "tp": 2, "order": ""},
            ["an axis name is empty", "has no tp, whose size is 2. Add tp to it."],
        ),
        ({"world": 8, "tp": 3, "order": "tp-cp"}, ["one of [1, 2, 4, 8]", "has no dp"]),
    ],
)
def test_all_problems_of_a_dense_grid_are_reported_together(
    arguments: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        dense_grid(**arguments)
    for text in texts:
        assert text in str(caught.value)
    assert all(problem in str(caught.value) for problem in dense_problems(**arguments))


def test_an_expert_grid_names_the_product_and_the_degrees_that_fit() -> None:
    with pytest.raises(PlanError) as caught:
        expert_grid(world=8, ep=3)
    assert (
        "world_size=8 is not parallel.etp · parallel.ep · parallel.pp = 1·3·1 times an integer: "
        "use 6 or 9 processes, or set parallel.ep to one of [1, 2, 4, 8]."
    ) in str(caught.value)


def test_an_axis_of_size_one_may_be_left_out_of_the_order() -> None:
    assert dense_grid(world=4, tp=2, order="dp-tp").strides("tp") == (2, 2)
    with pytest.raises(
        PlanError, match="parallel.order=dp-tp has no pp, whose size is 2. Add pp to it."
    ):
        dense_grid(world=4, tp=2, pp=2, order="dp-tp")


def test_both_grids_must_form_the_same_pipelines() -> None:
    dense = dense_grid(world=16, tp=2, cp=2, pp=2)
    assert stage_problems(dense, expert_grid(world=16, ep=4, pp=2)) == []
    last = "tp-cp-ep-dp-pp"
    assert all(
        stage_problems(
            dense_grid(world=24, tp=tp, cp=cp, pp=pp, order=last),
            expert_grid(world=24, ep=ep, pp=pp, order=last),
        )
        == []
        for tp, cp, pp, ep in [(2, 1, 2, 4), (1, 3, 2, 2), (3, 2, 4, 6), (1, 1, 1, 24)]
    )
    inner = "tp-cp-ep-pp-dp"
    problems = stage_problems(
        dense_grid(world=16, tp=2, cp=2, pp=2, order=inner),
        expert_grid(world=16, ep=2, pp=2, order=inner),
    )
    assert (
        "dense tp 2 (stride 1) · cp 2 (stride 2) · pp 2 (stride 4) · dp 2 (stride 8)" in problems[0]
    )
    assert (
        "expert etp 1 (stride 1) · ep 2 (stride 1) · pp 2 (stride 2) · edp 4 (stride 4)"
        in problems[0]
    )
    assert "Put pp last in parallel.order" in problems[0]


def test_every_order_of_the_axes_gives_a_grid() -> None:
    for order in permutations(["tp", "cp", "ep", "dp", "pp"]):
        grid = dense_grid(world=24, tp=2, cp=3, pp=2, order="-".join(order))
        assert grid.axes == tuple(axis for axis in order if axis != "ep")


def test_unknown_names_ranks_and_coordinates_are_rejected() -> None:
    grid = dense_grid(world=8, tp=2, offset=4)
    with pytest.raises(PlanError, match="rank=3 is not in this grid. Pass one of ranks 4 to 11"):
        grid.coordinates(3)
    with pytest.raises(PlanError, match="no axis 'ep', only tp, cp, dp, pp"):
        grid.groups(["dp", "ep"])
    factored = grid.factor(axis="tp", outer=("tp_kv", 1), inner=("tp_copy", 2))
    with pytest.raises(PlanError, match=r"no axis 'tp_kw' \(did you mean tp_kv\?\)"):
        factored.strides("tp_kw")
    with pytest.raises(PlanError, match=r"dp is missing \(0 to 3\)"):
        grid.rank_at({"tp": 1})
    with pytest.raises(PlanError, match="tp=2 is not in 0 to 1; dp=-1 is not in 0 to 3"):
        grid.rank_at({"tp": 2, "dp": -1})
    with pytest.raises(PlanError, match="no axis 'xp'"):
        grid.rank_at({"tp": 1, "dp": 0, "xp": 1})
    with pytest.raises(PlanError, match="tp=1 means tp_copy=1, but tp_copy=0"):
        factored.rank_at({"tp": 1, "tp_copy": 0, "dp": 0})
    assert grid.rank_at({"tp": 1, "dp": 3}) == 11


def test_divisors_are_complete_and_fast_for_huge_numbers() -> None:
    for number in range(200):
        assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]
    assert divisors(10**30)[:3] == [1, 2, 4] and divisors(10**30)[-1] == 10**30
    assert divisors(-4) == []


def test_only_degrees_and_worlds_that_the_rest_of_a_run_accepts_are_recommended() -> None:
    def even_dp(degrees: Mapping[str, int], world: int) -> bool:
        return world // (degrees["tp"] * degrees["cp"] * degrees["pp"]) % 2 == 0

    (text,) = dense_problems(world=12, tp=5, fits=even_dp)
    assert text.endswith(
        "= 5·1·1 times an integer: use 10 or 20 processes, or set parallel.tp to one of [1, 2, 3, "
        "6]."
    )
    (text,) = dense_problems(world=7, tp=2, fits=lambda degrees, world: world == 4)
    assert text.endswith(
        "use 4 processes, or choose tp, cp, pp so that they multiply to a divisor of 7."
    )
    (text,) = dense_problems(world=7, tp=2, fits=lambda degrees, world: degrees["tp"] == 7)
    assert text.endswith(
        "times an integer: set parallel.tp to 7, or choose tp, cp, pp so that they multiply to a "
        "divisor of 7."
    )
    (text,) = dense_problems(world=7, tp=2, fits=lambda degrees, world: False)
    assert "use 6 or 8 processes" in text, "a fix must be suggested"


def test_grid_describes_how_experts_divide_its_ranks() -> None:
    experts = expert_grid(world=8, ep=8)
    grid = replace(dense_grid(world=8, tp=2, cp=2), experts=experts)
    assert grid.groups(["cp"]) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert grid.groups(["ep"]) == [tuple(range(8))]
    assert grid.find_group(5, ["edp"]) == (5,)
    assert grid.size("ep") == 8 and grid.strides("ep") == (8, 1)
    here = grid.coordinates(5)
    assert (here["tp"], here["ep"], here["edp"]) == (1, 5, 0)
    assert grid.rank_at(here) == 5
    assert grid.factor(axis="tp", outer=("tp_kv", 1), inner=("tp_copy", 2)).experts == experts

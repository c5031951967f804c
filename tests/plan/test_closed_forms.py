"""Tests of megalith/plan/closed_forms.py: the formulas are exactly what the simulation finds."""

from fractions import Fraction

import pytest

from megalith.config.pipeline import ScheduleName
from megalith.plan.closed_forms import bubble_fraction, idle_time, most_held
from megalith.plan.live import peak_held
from megalith.plan.schedule import build_schedule
from megalith.plan.simulate import Number, even_costs, simulate
from megalith.plan.transfers import with_transfers

COSTS: list[tuple[Number, Number, Number]] = [
    (1, 1, 1), (2, 3, 1), (3, 2, 1), (1, 3, 2), (1, 1, 3), (Fraction(5, 3), Fraction(7, 2), Fraction(1, 6)),
]  # fmt: skip
NAMES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_and_memory_are_exactly_the_formulas(name: ScheduleName, chunks: int, p: int) -> None:
    compared = 0
    for m in (1, p, 2 * p, 2 * p + 1, 6 * p):
        if name == "interleaved" and m % p:
            continue
        sizes = {"num_ranks": p, "num_chunks": chunks, "num_microbatches": m}
        schedule = with_transfers(build_schedule(name, num_ranks=p, num_chunks=chunks, num_microbatches=m))
        for forward, backward_input, backward_weight in COSTS:
            parts = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
            idle = idle_time(name, num_ranks=p, num_microbatches=m, **parts)
            if idle is not None:
                result = simulate(schedule, even_costs(schedule.num_stages, **parts))
                assert result.idle == (idle,) * p
                compared += 1
        fraction = bubble_fraction(name, **sizes)
        assert fraction is None or fraction == simulate(schedule).bubble
        held = [most_held(name, rank, **sizes) for rank in range(p)]
        assert None in held or tuple(held) == peak_held(schedule)
    assert compared >= 3


def test_zb_v_has_no_gap_once_begun_when_all_parts_take_equally_long() -> None:
    for p, m in [(2, 3), (4, 8), (5, 9), (6, 30)]:
        result = simulate(build_schedule("zb-v", num_ranks=p, num_chunks=2, num_microbatches=m))
        assert [result.waits(rank)[1] for rank in range(p)] == [0] * p


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (2, 2, 1), (3, 4, 2), (1, 3, 2)])
def test_dualpipe_v_has_at_most_the_published_bubble(f: int, i: int, w: int) -> None:
    for p in (2, 3, 4, 8):
        costs = even_costs(2 * p, forward=f, backward_input=i, backward_weight=w)
        result = simulate(build_schedule("dualpipe-v", num_ranks=p, num_chunks=2, num_microbatches=4 * p), costs)
        pair, backward = f + i + w, i + w  # a pair that shares nothing takes as long as its parts
        assert max(result.idle) <= (p - 1) * (pair + backward - 3 * w)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    assert bubble_fraction("1f1b", num_ranks=4, num_chunks=1, num_microbatches=8) == Fraction(3, 8)
    assert bubble_fraction("interleaved", num_ranks=4, num_chunks=2, num_microbatches=8) == Fraction(3, 16)
    assert bubble_fraction("zb-h1", num_ranks=4, num_chunks=1, num_microbatches=8) == Fraction(1, 8)


def test_where_there_is_no_formula_none_is_given() -> None:
    assert idle_time("interleaved", num_ranks=4, num_microbatches=10) is None
    assert idle_time("zb-v", num_ranks=4, num_microbatches=8, forward=2) is None
    assert idle_time("zb-h1", num_ranks=4, num_microbatches=3) is None
    assert bubble_fraction("dualpipe-v", num_ranks=4, num_chunks=2, num_microbatches=7) is None
    assert most_held("zb-v", 0, num_ranks=4, num_chunks=2, num_microbatches=7) is None

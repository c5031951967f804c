"""Tests of megalith/plan/simulate.py."""

from fractions import Fraction

from megalith.plan.schedule import build_schedule, with_transfers
from megalith.plan.simulate import peak_activation_memory, peak_microbatches_in_flight


def test_1f1b_holds_one_microbatch_more_per_stage_to_come() -> None:
    schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=8)
    assert peak_microbatches_in_flight(schedule) == ((4,), (3,), (2,), (1,))
    assert peak_activation_memory(with_transfers(schedule)) == (4, 3, 2, 1)


def test_gpipe_holds_every_microbatch() -> None:
    assert peak_activation_memory(build_schedule("gpipe", num_ranks=2, num_microbatches=5)) == (
        5,
        5,
    )


def test_interleaving_saves_the_published_factor_of_activations() -> None:
    for p, v, factor in [(4, 2, "1.375"), (8, 4, "1.21875"), (8, 2, "1.4375")]:
        schedule = build_schedule("interleaved", num_ranks=p, num_chunks=v, num_microbatches=4 * p)
        assert Fraction(peak_activation_memory(schedule)[0]) == p * v * Fraction(factor)


def test_zb_h1_holds_what_the_first_rank_of_1f1b_does_and_inputs_as_1f1b() -> None:
    schedule = build_schedule("zb-h1", num_ranks=4, num_microbatches=8)
    assert peak_activation_memory(schedule) == (4, 4, 4, 4)
    assert peak_activation_memory(schedule, for_weights=[0] * 4) == (4, 3, 2, 1)
    assert peak_activation_memory(schedule, activations=[10] * 4, for_weights=[5] * 4) == (
        40,
        35,
        30,
        25,
    )


def test_v_schedule_has_equal_live_activations_on_every_rank() -> None:
    schedule = build_schedule("zb-v", num_ranks=3, num_chunks=2, num_microbatches=12)
    assert peak_activation_memory(schedule) == (6, 6, 6)
    assert peak_activation_memory(schedule, activations=[2, 2, 2, 0, 0, 0]) == tuple(
        2 * row[0] for row in peak_microbatches_in_flight(schedule)
    )

"""A rank is a straggler after three low scores in a row; noise, short sections and other work are
not."""

import random

from megalith.plan.stragglers import (
    NUM_REPORTS,
    BusyTimes,
    Straggler,
    StragglerHistory,
    StragglerReport,
)

TIMES = {"data": 0.01, "forward": 1.0, "backward": 2.0, "optimizer": 0.5}


def add(
    history: StragglerHistory, ranks: list[BusyTimes], work: list[int] | None = None
) -> StragglerReport:
    return history.add(ranks, work or [0] * len(ranks))


def slowed(section: str, factor: float) -> dict[str, float]:
    return TIMES | {section: factor * TIMES[section]}


def test_slow_rank_is_reported_once_after_three_reports_in_a_row() -> None:
    for section in ("forward", "backward", "optimizer"):
        history = StragglerHistory()
        ranks: list[BusyTimes] = [TIMES, slowed(section, 2.0), TIMES]
        reports = [add(history, ranks) for _ in range(5)]
        numbers = [len(report.slower_than_others) for report in reports]
        assert numbers == [0, 0, 1, 0, 0], (section, numbers)
        (straggler,) = reports[NUM_REPORTS - 1].slower_than_others
        time = TIMES[section]
        assert straggler == Straggler(1, section, 0.5, 2 * time, time)
        assert all(report.slowest_rank == 1 for report in reports)
        assert not any(report.slower_than_before for report in reports), "it has always been slow"


def test_rank_that_becomes_slower_is_reported_by_both_references() -> None:
    history = StragglerHistory()
    add(history, [TIMES, TIMES])
    reports = [add(history, [TIMES, slowed("forward", 2.0)]) for _ in range(3)]
    for slow in (reports[-1].slower_than_others, reports[-1].slower_than_before):
        assert [(each.rank, each.section) for each in slow] == [(1, "forward")]


def test_ranks_that_all_become_slower_are_only_slower_than_before() -> None:
    history = StragglerHistory()
    add(history, [TIMES, TIMES])
    reports = [add(history, [slowed("backward", 1.5)] * 2) for _ in range(3)]
    assert reports[-1].slower_than_others == ()
    assert [each.rank for each in reports[-1].slower_than_before] == [0, 1]


def test_recovery_resets_the_count() -> None:
    history = StragglerHistory()
    slow: list[BusyTimes] = [TIMES, slowed("forward", 2.0)]
    for ranks in (slow, slow, [TIMES, TIMES], slow, slow):
        assert add(history, ranks).slower_than_others == ()
    assert len(add(history, slow).slower_than_others) == 1
    assert add(history, [TIMES, TIMES]).slower_than_others == ()
    assert [len(add(history, slow).slower_than_others) for _ in range(3)] == [0, 0, 1]


def test_short_section_and_small_delay_are_not_reported() -> None:
    for ranks in ([TIMES, slowed("data", 5.0)], [TIMES, slowed("forward", 1.2)]):
        history = StragglerHistory()
        assert not any(add(history, ranks).slower_than_others for _ in range(5))


def test_only_ranks_with_the_same_work_are_compared() -> None:
    history = StragglerHistory()
    head = slowed("forward", 3.0)  # the last stage computes the loss
    ranks: list[BusyTimes] = [TIMES, TIMES, head, slowed("forward", 6.0)]
    reports = [add(history, ranks, [0, 0, 1, 1]) for _ in range(3)]
    assert [each.rank for each in reports[-1].slower_than_others] == [3]
    alone = StragglerHistory()
    assert not any(add(alone, [TIMES, head], [0, 1]).slower_than_others for _ in range(5))


def test_change_of_work_resets_the_history() -> None:
    history = StragglerHistory()
    add(history, [TIMES, TIMES])
    history.reset()
    assert not any(add(history, [slowed("forward", 2.0)] * 2).slower_than_before for _ in range(5))


def test_noise_is_not_reported_as_straggler() -> None:
    """The median of 100 steps that vary by 25 % varies by 3 %."""
    for seed in range(50):
        rng = random.Random(seed)
        history = StragglerHistory()
        for _ in range(30):
            ranks = [
                {name: time * rng.lognormvariate(0.0, 0.03) for name, time in TIMES.items()}
                for _ in range(8)
            ]
            report = add(history, [*ranks])
            assert not report.slower_than_others and not report.slower_than_before, seed

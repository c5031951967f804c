"""Starts of a run: crash loops lead to older tiers, older checkpoints and a rejection; hosts on
which several starts fail are suspects."""

import math
import random
from typing import Any

import pytest

from megalith.plan.starts import (
    DELAYS_SECONDS,
    Start,
    decide_start,
    find_record_problem,
    find_suspect_hosts,
    parse_starts,
)

KILLED = "was killed by signal 9 (SIGKILL)"


def start_row(number: int, **changes: object) -> dict[str, Any]:
    """Return the line of a start."""
    return {
        "kind": "start",
        "start": number,
        "time": 100.0 * number,
        "began": 100.0 * number - 3,
        "step": 12,
        "newest_step": 12,
        "world_size": 4,
        "hosts": ["n1", "n2"],
        "layout": "tp=1",
        "checkpoint": "step_0000012",
        "tier": "persistent",
    } | changes


def exit_row(number: int, cause: str = KILLED, code: int = 1, **changes: object) -> dict[str, Any]:
    """Return the line of an exit."""
    row = {"kind": "exit", "start": number, "time": 100.0 * number + 50, "cause": cause}
    return row | {"code": code, "rank": 1, "host": "n2"} | changes


def failed_starts(number: int, **changes: object) -> list[Start]:
    """Return starts that all ended with the same fault."""
    rows = [row for n in range(1, number + 1) for row in (start_row(n, **changes), exit_row(n))]
    return parse_starts(rows)


def choose(starts: list[Start], *, tier: bool = True, older: bool = True, step: int = 12) -> str:
    """Return what the next start begins with."""
    return decide_start(
        starts, newest_step=step, has_older_tier=tier, has_older_checkpoint=older
    ).choice


def test_crash_loop_uses_the_previous_tier_then_the_previous_checkpoint_and_is_rejected() -> None:
    choices = [choose(failed_starts(number)) for number in range(6)]
    older = ["previous_tier", "previous_checkpoint"]
    assert choices == ["newest", "newest", *older, "reject", "reject"]
    without_local = [choose(failed_starts(number), tier=False) for number in range(5)]
    assert without_local == ["newest", "newest", *["previous_checkpoint"] * 2, "reject"]
    only_one = [choose(failed_starts(number), tier=False, older=False) for number in range(5)]
    assert only_one == ["newest"] * 4 + ["reject"]


def test_delays_grow_with_the_number_of_failed_starts() -> None:
    decisions = [
        decide_start(
            failed_starts(number), newest_step=12, has_older_tier=True, has_older_checkpoint=True
        )
        for number in range(5)
    ]
    assert [each.num_failed for each in decisions] == [0, 1, 2, 3, 4]
    assert [each.delay_seconds for each in decisions] == [0.0, *DELAYS_SECONDS, 0.0]


@pytest.mark.parametrize(
    "last",
    [
        exit_row(4, "RuntimeError: another cause"),
        exit_row(4, "done", 0),
        exit_row(4, "SIGTERM", 75),
        exit_row(4, "the message says what to change", 2),
        exit_row(4, "interrupted by SIGINT", 130),
        {"kind": "reset", "time": 1.0},
        {"kind": "an event of a later version"},  # so no exit is known
    ],
)
def test_only_faults_with_the_same_cause_in_a_row_count(last: dict[str, Any]) -> None:
    rows = [row for n in (1, 2, 3) for row in (start_row(n), exit_row(n))]
    starts = parse_starts([*rows, start_row(4), last])
    assert choose(starts) == "newest"


def test_numbers_in_a_cause_do_not_make_it_another_one() -> None:
    rows = [
        row
        for n in (1, 2)
        for row in (start_row(n), exit_row(n, f"RuntimeError: 0x{n}f at step {n}", rank=n))
    ]
    assert choose(parse_starts(rows)) == "previous_tier"


def test_a_newer_checkpoint_ends_a_crash_loop() -> None:
    assert choose(failed_starts(3), step=14) == "newest"
    mixed = parse_starts(
        [
            start_row(1),
            exit_row(1),
            start_row(2),
            exit_row(2),
            start_row(3, newest_step=14),
            exit_row(3),
        ]
    )
    assert choose(mixed, step=14) == "newest"


def test_the_cause_of_a_start_is_the_first_failure_that_is_no_consequence() -> None:
    rows = [
        start_row(1),
        exit_row(1, "connection closed by peer", rank=0, time=1.0, is_consequence=True),
        exit_row(1, "RuntimeError: later", rank=3, time=9.0),
        exit_row(1, "RuntimeError: first", rank=2, time=8.0),
    ]
    for seed in range(6):
        shuffled = rows[:1] + random.Random(seed).sample(rows[1:], 3)
        (start,) = parse_starts(shuffled)
        assert start.exit is not None and start.exit.rank == 2, seed


def test_a_host_named_by_faults_of_three_starts_is_a_suspect() -> None:
    assert list(find_suspect_hosts(failed_starts(3))) == ["n2"]
    assert not find_suspect_hosts(failed_starts(2))
    assert not find_suspect_hosts(failed_starts(3, hosts=["n2"])), "the fault may be the program's"


def test_damaged_rows_are_described() -> None:
    missing = {"kind": "start", "start": 1}
    assert find_record_problem(missing) == "it lacks time"
    assert find_record_problem(start_row(1, time="soon")) == "time is not a number"
    for number in (math.inf, math.nan, 10**400, True, None):
        assert find_record_problem(start_row(1, step=number)) == "step is not a number"
        assert find_record_problem(exit_row(1, code=number)) == "code is not a number"
    for hosts in ([], "n1", None, 3):
        assert find_record_problem(start_row(1, hosts=hosts)) == "hosts is not a list of names"
    assert find_record_problem({"kind": "exit", "start": 1, "time": 2}) == "it lacks cause"
    assert not find_record_problem(start_row(1)) and not find_record_problem(exit_row(1))
    assert not find_record_problem({"kind": "of a later version"})

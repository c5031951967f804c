"""Tests of megalith/testing/tiny.py."""

import random

from megalith.testing.tiny import NAMES, random_schedule


def test_random_schedules_cover_every_kind_and_depend_on_the_seed() -> None:
    results = [random_schedule(random.Random(seed)) for seed in range(60)]
    assert {schedule.name for schedule in results} == set(NAMES)
    assert {schedule.num_ranks for schedule in results} == set(range(1, 9))
    assert results[7] == random_schedule(random.Random(7))
    assert random_schedule(random.Random(1), "zb-v").name == "zb-v"

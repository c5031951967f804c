"""Batch-size schedules: golden values, counts against a simulation, and rules."""

import random

import pytest

from megalith.config.train import BatchSizeConfig, LoopConfig
from megalith.errors import PlanError
from megalith.plan.batch_schedule import (
    BatchSizeSchedule,
    batch_schedule_problems,
    build_batch_schedule,
    constant_batch_size,
    largest_batch_size,
    parse_step_schedule,
    plan_linear_rampup,
)


def random_schedule(rng: random.Random) -> BatchSizeSchedule:
    """A schedule of one to five sizes, which may also shrink."""
    count = rng.randint(1, 5)
    starts = (0, *sorted(rng.sample(range(1, 200), count - 1)))
    return BatchSizeSchedule(starts, tuple(rng.randint(1, 40) for _ in range(count)))


def megatron_rampup_size(consumed: int, start: int, increment: int, num: int, size: int) -> int:
    """The batch size in Megatron's linear ramp-up."""
    if consumed > num or start == size:
        return size
    return start + int(consumed / (num / ((size - start) // increment))) * increment


def test_linear_rampup_has_the_golden_sizes() -> None:
    schedule = plan_linear_rampup(start=4, increment=4, num_samples=24, size=16)
    golden = {0: 4, 7: 4, 8: 8, 15: 8, 16: 12, 24: 16, 25: 16, 10**9: 16}
    assert {consumed: schedule.get_batch_size(consumed) for consumed in golden} == golden


def test_linear_rampup_equals_the_formula_of_megatron() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        start, increment, steps = (rng.randint(1, 12) for _ in range(3))
        size, num = start + increment * steps, rng.randint(1, 300)
        schedule = plan_linear_rampup(start=start, increment=increment, num_samples=num, size=size)
        for consumed in range(320):
            expected = megatron_rampup_size(consumed, start, increment, num, size)
            assert schedule.get_batch_size(consumed) == expected, (seed, consumed)


def test_rampup_from_the_full_size_is_constant() -> None:
    schedule = plan_linear_rampup(start=8, increment=4, num_samples=24, size=8)
    assert schedule == constant_batch_size(8) and schedule.is_constant
    immediate = plan_linear_rampup(start=4, increment=4, num_samples=0, size=8)
    assert immediate == constant_batch_size(8)


def test_step_schedule_has_the_golden_start() -> None:
    schedule = parse_step_schedule("0:768 250B:1536", seq_len=8192)
    assert schedule == BatchSizeSchedule((0, 30_517_578), (768, 1536))
    assert [schedule.get_batch_size(consumed) for consumed in (30_517_577, 30_517_578)] == [
        768,
        1536,
    ]
    assert parse_step_schedule("1.5k:8, 0:4", seq_len=10) == BatchSizeSchedule((0, 150), (4, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5:768", "no size applies from token 0 on. Add a pair such as 0:256."),
        ("", "no size applies from token 0 on"),
        ("0:4 x:8", "x:8 is no pair of a threshold and a size of at least 1"),
        ("0:4 9:0", "9:0 is no pair"),
        ("0:4 0.5:8", "0.5:8 is no pair"),
        ("0:4 100:8 110:16", "two sizes apply from sample 3 on"),
    ],
)
def test_wrong_step_schedules_are_rejected(text: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_step_schedule(text, seq_len=32)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("start", "increment", "message"),
    [
        (20, 4, "is larger than --global-batch-size 16. Use a first size of at most 16."),
        (4, 5, "Use an increment that divides 12, or --global-batch-size 14 or 19."),
        (0, 4, "must be at least 1"),
        (4, 0, "must be at least 1"),
    ],
)
def test_wrong_rampups_are_rejected(start: int, increment: int, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_linear_rampup(start=start, increment=increment, num_samples=24, size=16)
    assert message in str(caught.value)


def test_counts_of_samples_and_steps_equal_a_simulation() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        schedule, consumed = random_schedule(rng), rng.randint(0, 250)
        position, positions = consumed, [consumed]
        for _ in range(40):
            position += schedule.get_batch_size(position)
            positions.append(position)
        for num_steps, expected in enumerate(positions):
            read = schedule.count_samples(num_steps, consumed=consumed)
            assert read == expected - consumed, (seed, num_steps)
            assert schedule.count_steps(read, consumed=consumed) == num_steps, (seed, num_steps)
            if num_steps:
                assert schedule.count_steps(read - 1, consumed=consumed) == num_steps - 1, seed
        first = rng.randint(0, 40)  # a schedule has no state: it continues anywhere
        middle = positions[first]
        rest = schedule.count_samples(40 - first, consumed=middle)
        assert middle + rest == positions[40], seed


def test_schedules_differ_from_the_first_changed_size_on() -> None:
    before = BatchSizeSchedule((0, 80), (4, 8))
    assert before.find_difference(BatchSizeSchedule((0, 80, 90), (4, 8, 8))) is None
    assert before.find_difference(BatchSizeSchedule((0, 80, 200), (4, 8, 12))) == 200
    assert before.find_difference(BatchSizeSchedule((0, 60), (4, 8))) == 60
    assert before.find_difference(constant_batch_size(8)) == 0


def loop_config(*entries: BatchSizeConfig, size: int = 8) -> LoopConfig:
    """A training loop with these entries."""
    return LoopConfig(steps=9, global_batch_size=size, seq_len=16, batch_size_schedule=entries)


def test_tokens_are_converted_to_samples() -> None:
    train = loop_config(
        BatchSizeConfig(size=12),
        BatchSizeConfig(size=2, tokens=100),
        BatchSizeConfig(size=8, samples=7),
    )
    assert batch_schedule_problems(train) == []
    assert build_batch_schedule(train) == BatchSizeSchedule((0, 6, 7), (12, 2, 8))
    assert largest_batch_size(train) == 12 and largest_batch_size(loop_config()) == 8


def test_all_wrong_entries_are_reported_with_values_that_work() -> None:
    train = loop_config(
        BatchSizeConfig(size=2, samples=3),
        BatchSizeConfig(size=4),
        BatchSizeConfig(size=4, samples=20, tokens=9),
        BatchSizeConfig(size=6, samples=5),
        BatchSizeConfig(size=6, tokens=15),
    )
    texts = batch_schedule_problems(train)
    expected = (
        "train.batch_size_schedule[0].samples=3: the first size applies from the start of the run. "
        "Set train.batch_size_schedule[0].samples=0.",
        "train.batch_size_schedule[1]: it has no start. Set train.batch_size_schedule[1].samples",
        "train.batch_size_schedule[2]: samples=20 and tokens=9 are two starts. Remove one",
        "train.batch_size_schedule[2].tokens=9 = sample 0 must be after the start of the entry "
        "before it, sample 0. Set train.batch_size_schedule[2].tokens to 16 or more.",
        "train.batch_size_schedule[4].tokens=15 = sample 0 must be after",
        "train.global_batch_size=8 must be the last size of train.batch_size_schedule, 6. Set "
        "train.global_batch_size=6.",
    )
    assert len(texts) == len(expected), texts
    for text, start in zip(texts, expected, strict=True):
        assert text.startswith(start), text

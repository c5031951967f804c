"""Random operations on the scheduler, compared with a naive model and a simulated block pool."""

import pytest

from tests.cases import loop_over
from tests.plan.serving.executor import CONFIGS, Workload, make_config


def run_all(
    num_operations: int, seeds: range, *, max_in_flight: int = 1, **options: object
) -> dict[str, int]:
    """Run the workload over all configurations and block sizes; return the summed counts."""
    totals: dict[str, int] = {}
    for seed in seeds:
        for number, name in enumerate(CONFIGS):
            for block_size in (1, 3, 16):
                config = make_config(name, block_size=block_size, **options)
                workload = Workload(
                    config,
                    1000 * seed + 20 * number + block_size,
                    max_in_flight=max_in_flight,
                )
                workload.run(num_operations)
                for key, count in workload.counts.items():
                    totals[key] = totals.get(key, 0) + count
    return totals


def test_random_operations_match_the_naive_model() -> None:
    totals = run_all(84, range(1))  # 8 configurations, 3 block sizes: 2,016 operations
    events = ("hit", "fork", "copies", "preempted", "discard", "abort", "reset")
    for event in (*events, "accepted", "rejected"):
        assert totals.get(event, 0) > 0, f"no {event} occurred: {totals}"


def test_random_operations_with_several_steps_in_flight_match_the_naive_model() -> None:
    totals = run_all(42, range(1), max_in_flight=3)
    for event in ("in_flight", "hit", "fork", "preempted", "discard", "abort", "accepted"):
        assert totals.get(event, 0) > 0, f"no {event} occurred: {totals}"


def test_random_operations_with_kv_offloading_match_the_naive_model() -> None:
    """Small pools, so that many blocks are evicted, and few or many blocks in host memory."""
    totals: dict[str, int] = {}
    for num_host_blocks, max_in_flight in ((5, 1), (90, 1), (20, 3)):
        counts = run_all(
            40,
            range(1),
            max_in_flight=max_in_flight,
            num_tokens=62,
            num_host_blocks=num_host_blocks,
        )
        for key, count in counts.items():
            totals[key] = totals.get(key, 0) + count
    for event in ("offloads", "loads", "failed_loads", "requeued", "preempted", "discard", "reset"):
        assert totals.get(event, 0) > 0, f"no {event} occurred: {totals}"


@pytest.mark.slow
@loop_over("seed", range(4))
def test_many_random_operations_match_the_naive_model(seed: int) -> None:
    run_all(150, range(seed + 100, seed + 101))
    run_all(70, range(seed + 100, seed + 101), max_in_flight=2 + seed % 3)
    run_all(
        70,
        range(seed + 100, seed + 101),
        max_in_flight=1 + seed % 3,
        num_tokens=62,
        num_host_blocks=30,
    )

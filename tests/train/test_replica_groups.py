"""Replica groups: equal to one process for any number of groups; groups that are killed and join
again change nothing; settings that do not work with groups are rejected."""

import json
import random
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megalith.config.tree import Override
from megalith.errors import ConfigError
from megalith.launch.coordinator_client import CoordinatorClient, CoordinatorInterrupted
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, assert_close
from megalith.train.replica_group_settings import connect_coordinator, list_compared_settings
from tests.train.replica_group_jobs import (
    CommitTimes,
    GroupProcesses,
    Kill,
    RunningCoordinator,
    group_run,
    train_and_lose,
    train_group,
)
from tests.train.test_loop import rows, stored, train

FP64: dict[str, Override] = {"precision.params": "fp64", "train.micro_batch_size": "1"}


def counts(min_groups: int, max_groups: int) -> dict[str, Override]:
    """Return the limits of the number of groups; the first epoch begins with `max_groups`."""
    return {
        "replica_group.min_groups": str(min_groups),
        "replica_group.max_groups": str(max_groups),
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run on one process."""
    folder = tmp_path_factory.mktemp("reference")
    train(folder, FP64)
    return folder


def assert_equal_runs(path: Path, reference: Path, steps: int, groups: int) -> None:
    """Assert that all steps of all groups, and the last checkpoint, equal those of one process."""
    expected = {row["step"]: row for row in rows(reference) if "loss" in row}
    seen = set()
    for group in range(groups):
        for file in sorted((path / f"g{group}").glob("metrics*.jsonl")):
            for row in rows_of(file):
                seen.add(row["step"])
                for name in ("loss", "grad_norm", "lr"):
                    want = expected[row["step"]][name]
                    assert row[name] == pytest.approx(want, rel=1e-9), (file, row["step"], name)
                assert row["tokens"] == expected[row["step"]]["tokens"]
    assert seen == set(range(1, steps + 1))
    assert_close(stored(path, steps), stored(reference, steps), CURVE64)


def rows_of(file: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in lines if "loss" in row]


LAYOUTS = [
    (2, 2, {}),
    pytest.param(3, 3, {}, marks=pytest.mark.slow),
    pytest.param(2, 4, {"parallel.dp": "2", "parallel.zero": "1"}, marks=pytest.mark.slow),
    pytest.param(2, 4, {"parallel.tp": "2"}, marks=pytest.mark.slow),
    pytest.param(3, 6, {"parallel.pp": "2"}, marks=pytest.mark.slow),
    pytest.param(2, 4, {"parallel.dp": "2", "parallel.zero": "3"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("groups", "world", "layout"), LAYOUTS)
def test_groups_equal_one_process(
    tmp_path: Path, reference: Path, groups: int, world: int, layout: dict[str, Override]
) -> None:
    settings = FP64 | layout | counts(groups, groups)
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, groups, settings, tmp_path
        assert run_ranks(train_group, world, *arguments, timeout=120) == ["done"] * world
    assert_equal_runs(tmp_path, reference, 8, groups)


def test_lost_groups_join_again_and_only_their_samples_are_computed_again(
    tmp_path: Path, reference: Path
) -> None:
    losses = {
        "g1": [Kill(2, "before_exchange"), Kill(6, "after_vote")],
        "g0": [Kill(4, "before_vote")],
    }
    settings = FP64 | counts(2, 3) | {"checkpoint.every": "0"}
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path, losses, 3
        results = run_ranks(train_and_lose, 3, *arguments, timeout=120)
    assert_equal_runs(tmp_path, reference, 8, 3)
    assert "loaded the state of step" in (tmp_path / "g0" / "log.txt").read_text()
    recomputed = results[2][0]  # g2 was never lost
    assert recomputed[2] == (1, 4, 7, 10), "a third of 12 samples, those of g1"
    assert all(len(samples) <= 6 for samples in recomputed.values()), recomputed


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [{"parallel.dp": "2", "parallel.zero": "1"}, {"parallel.tp": "2"}]
)
def test_lost_groups_of_two_ranks_join_again(
    tmp_path: Path, reference: Path, layout: dict[str, Override]
) -> None:
    losses = {"g1": [Kill(2, "before_vote")], "g0": [Kill(5, "after_vote")]}
    settings = FP64 | counts(1, 2) | layout | {"checkpoint.every": "0"}
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path, losses, 2
        run_ranks(train_and_lose, 4, *arguments, timeout=200)
    assert_equal_runs(tmp_path, reference, 8, 2)


def test_groups_wait_for_the_coordinator(tmp_path: Path, reference: Path) -> None:
    coordinator = RunningCoordinator(tmp_path / "coordinator")
    address = coordinator.address
    restarted: list[RunningCoordinator] = []

    def restart() -> None:
        while (coordinator.status["committed_step"] or 0) < 3:
            time.sleep(0.02)
        coordinator.close()
        step = count_rows(tmp_path)
        time.sleep(0.5)
        steps_without_coordinator.append(count_rows(tmp_path) - step)
        port = int(address.rpartition(":")[2])
        restarted.append(RunningCoordinator(tmp_path / "coordinator", port))

    steps_without_coordinator: list[int] = []
    thread = threading.Thread(target=restart)
    thread.start()
    arguments = address, 2, FP64 | counts(2, 2), tmp_path
    assert run_ranks(train_group, 2, *arguments, timeout=120) == ["done"] * 2
    thread.join()
    restarted[0].close()
    assert steps_without_coordinator[0] <= 1, "a step continued without the coordinator"
    assert_equal_runs(tmp_path, reference, 8, 2)


def count_rows(path: Path) -> int:
    """Return the number of logged steps of group g0."""
    return len(rows_of(path / "g0" / "metrics.jsonl"))


def test_fewer_than_min_groups_wait_for_more(tmp_path: Path, reference: Path) -> None:
    losses = {"g1": [Kill(3, "before_vote")], "g0": [Kill(5, "before_exchange")]}
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, FP64 | counts(2, 2), tmp_path, losses, 2
        results = run_ranks(train_and_lose, 2, *arguments, timeout=120)
    assert [sizes for _, sizes in results] == [{2}, {2}], "a group continued alone"
    assert_equal_runs(tmp_path, reference, 8, 2)


def test_group_with_other_settings_is_rejected(tmp_path: Path) -> None:
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        run = group_run(coordinator.address, "g0", FP64 | counts(2, 2), tmp_path)
        assert run.replica_group is not None
        first = connect_coordinator(run.replica_group)
        settings = list_compared_settings(run, 1)
        arguments = {
            "group": "g0",
            "addresses": ["127.0.0.1:9"],
            "committed_step": 0,
            "state_addresses": ["127.0.0.1:9"],
        }
        waiting = threading.Thread(
            target=partial(_join_until_closed, first, settings=settings, **arguments)
        )
        waiting.start()
        while not coordinator.status["groups"]:
            time.sleep(0.02)
        other = group_run(
            coordinator.address, "g1", FP64 | counts(2, 2) | {"schedule.lr": "0.5"}, tmp_path
        )
        assert other.replica_group is not None
        with (
            connect_coordinator(other.replica_group) as second,
            pytest.raises(ConfigError, match="schedule.lr"),
        ):
            settings = list_compared_settings(other, 1)
            second.join(settings=settings, **arguments | {"group": "g1"})
        first.close()
        waiting.join()


def _join_until_closed(client: CoordinatorClient, **arguments: Any) -> None:
    with suppress(CoordinatorInterrupted):
        client.join(**arguments)


def test_settings_that_change_no_weights_may_differ_between_groups(tmp_path: Path) -> None:
    one = group_run("127.0.0.1:1", "a", {"train.log_every": "2"}, tmp_path)
    two = group_run("127.0.0.1:2", "b", {"observe.plots": "true", "train.threads": "2"}, tmp_path)
    assert list_compared_settings(one, 2) == list_compared_settings(two, 2)
    assert list_compared_settings(one, 2) != list_compared_settings(one, 3)
    other = group_run("127.0.0.1:1", "a", {"seed": "5"}, tmp_path)
    assert list_compared_settings(one, 2) != list_compared_settings(other, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coordinator": "here"}, "replica_group.coordinator: 'here' is not HOST:PORT, such as"),
        ({"id": "a/b"}, "replica_group.id='a/b' is not an id. Use up to 63 letters"),
        ({"min_groups": "3", "max_groups": "2"}, "max_groups=2 is smaller than replica_group.min_"),
        ({"timeout_seconds": "700"}, "timeout_seconds=700 is not shorter than parallel.timeout_s"),
        ({"data.sampler": "cyclic"}, "data.sampler=cyclic with replica_group: the samples of a st"),
        ({"train.balance_rows": "true"}, "Set train.balance_rows=false."),
        (
            {"fault_detector.spike": "rerun"},
            "fault_detector.spike=rerun with replica_group: a s",
        ),
        ({"fault_detector.rerun_every": "5"}, "Set fault_detector.rerun_every=0."),
    ],
)
def test_settings_that_do_not_work_with_groups_are_reported(
    settings: dict[str, Override], message: str
) -> None:
    complete = {"coordinator": "127.0.0.1:29700", "id": "a"} | settings
    named = {
        name if "." in name else f"replica_group.{name}": value for name, value in complete.items()
    }
    texts = run_problems(tiny_run(named), 1)
    assert any(message in text for text in texts), texts


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("sync", "aux_loss.global_batch_coeff=0.1 with replica_group: every layer would exchange"),
        ("diloco", "router.expert_bias=true with replica_group.mode=diloco: it changes in every"),
    ],
)
def test_expert_loads_that_groups_do_not_sum_are_reported(mode: str, message: str) -> None:
    settings: dict[str, Override] = {
        "replica_group.coordinator": "127.0.0.1:29700",
        "replica_group.id": "a",
        "replica_group.mode": mode,
        "model.moe.num_experts": "4",
        "model.moe.top_k": "2",
        "model.moe.ffn_hidden_size": "8",
        "model.moe.router.score": "sigmoid",
        "model.moe.router.expert_bias": "true",
        "model.moe.aux_loss.global_batch_coeff": "0.1",
    }
    texts = run_problems(tiny_run(settings), 1)
    assert [message in text for text in texts] == [True], texts


def test_reruns_are_rejected_only_where_groups_sum_gradients() -> None:
    settings = {"replica_group.coordinator": "127.0.0.1:29700", "replica_group.id": "a"}
    settings |= {"fault_detector.spike": "rerun", "replica_group.mode": "diloco"}
    assert run_problems(tiny_run(settings), 1) == []
    settings["fault_detector.spike"] = "rollback"
    (text,) = run_problems(tiny_run(settings), 1)
    assert "a group cannot take back the rounds that the others have applied" in text


@dataclass(frozen=True)
class KilledRun:
    """Measurements of a run whose groups were killed."""

    num_kills: int
    num_discarded: int
    """Steps that were computed again in part."""
    step_seconds: float
    recovery_seconds: list[float]
    """Time from each kill to the next committed step."""


def run_with_kills(
    path: Path, settings: dict[str, Override], kills: dict[str, list[Kill]], seconds: float
) -> KilledRun:
    """Run three groups until all have ended; start killed ones again."""
    with RunningCoordinator(path / "coordinator") as coordinator, CommitTimes(coordinator) as times:
        processes = GroupProcesses(coordinator.address, settings, path)
        try:
            for group in ("g0", "g1", "g2"):
                processes.start(group, kills[group])
            deadline = time.monotonic() + seconds
            while processes.exit_codes != {0}:
                assert time.monotonic() < deadline, (processes.exit_codes, coordinator.status)
                processes.wait_for_any(1.0)
                processes.restart_killed(kills, coordinator.committed_step)
        finally:
            processes.kill_all()
    recoveries = times.measure_recoveries(processes.kill_times)
    return KilledRun(len(recoveries), times.num_discarded, times.step_seconds, recoveries)


@pytest.mark.slow
def test_thirty_kills_and_joins_equal_one_process(tmp_path: Path) -> None:
    steps, rng = 240, random.Random(15)
    settings = FP64 | {
        "train.steps": str(steps),
        "train.eval_steps": "0",
        "train.global_batch_size": "6",
        "checkpoint.every": "100",
    }
    train(tmp_path / "reference", settings)
    timeout = 5
    settings |= counts(1, 3) | {"replica_group.timeout_seconds": str(timeout)}
    kills: dict[str, list[Kill]] = {f"g{number}": [] for number in range(3)}
    for step in range(5, 230, 5):
        phase = rng.choice(["before_exchange", "before_vote", "after_vote"])
        kills[rng.choice([*kills])].append(Kill(step + rng.randrange(3), phase))
    killed = run_with_kills(tmp_path, settings, kills, 900)
    assert killed.num_kills >= 30, "some groups are away when theirs is due"
    assert_equal_runs(tmp_path, tmp_path / "reference", steps, 3)
    assert killed.num_discarded <= killed.num_kills, "at most one step is lost per kill"
    assert max(killed.recovery_seconds) <= 3 * killed.step_seconds + timeout, killed


@pytest.mark.slow
def test_stopped_group_is_removed_and_joins_again_when_it_continues(tmp_path: Path) -> None:
    steps, timeout = 80, 2.0
    settings = FP64 | {
        "train.steps": str(steps),
        "train.eval_steps": "0",
        "train.global_batch_size": "6",
        "checkpoint.every": "0",
    }
    train(tmp_path / "reference", settings)
    settings |= counts(1, 3) | {"replica_group.timeout_seconds": str(timeout)}
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        processes = GroupProcesses(coordinator.address, settings, tmp_path, pause_seconds=0.1)

        def wait_for_step(step: int, seconds: float) -> None:
            deadline = time.monotonic() + seconds
            while coordinator.committed_step < step:
                assert time.monotonic() < deadline, coordinator.status
                time.sleep(0.01)

        try:
            for group in ("g0", "g1", "g2"):
                processes.start(group)
            wait_for_step(10, 120)
            processes.send_signal("g1", signal.SIGSTOP)
            step = coordinator.committed_step
            # the exchange of its peers ends after the timeout, and so does the vote that it misses
            wait_for_step(step + 3, 3 * timeout)
            states = {row["group"]: row["state"] for row in coordinator.status["groups"]}
            assert states["g1"] == "lost", states
            assert coordinator.status["num_discarded"] == 1
            processes.send_signal("g1", signal.SIGCONT)
            deadline = time.monotonic() + 120
            while processes.exit_codes != {0}:
                assert time.monotonic() < deadline, (processes.exit_codes, coordinator.status)
                processes.wait_for_any(1.0)
        finally:
            processes.kill_all()
    assert_equal_runs(tmp_path, tmp_path / "reference", steps, 3)
    assert "loaded the state of step" in (tmp_path / "g1" / "log.txt").read_text()

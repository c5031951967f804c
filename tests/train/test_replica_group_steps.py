"""Steps of replica groups: expert bias, sequence packing, skipped steps, failed votes and groups
that stop equal one process; other data and a lack of memory are reported."""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint import state_transfer
from megalith.checkpoint.state_transfer import StateServer
from megalith.config.tree import Override
from megalith.errors import CallbackError, RankError
from megalith.launch.coordinator import CoordinatorServer, GroupConnection
from megalith.launch.coordinator_protocol import Message
from megalith.launch.heartbeat import HeartbeatReader, RankHeartbeat, map_heartbeat
from megalith.parallel.group_exchange import RingExchange
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.quorum import Epoch
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, assert_close
from megalith.train import replica_group_settings
from megalith.train.callbacks.base import Callback, FinishedStep, StepMetrics
from megalith.train.loop import run_training
from megalith.train.replica_group_ranks import FinishedRunError
from megalith.train.replica_group_settings import connect_coordinator
from megalith.train.replica_groups import ReplicaGroups
from megalith.train.resume import PreparedRun
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepHooks, StepRequest, StepStats, train_step
from megalith.train.synchronizer import SingleJob
from tests.train.replica_group_jobs import (
    TIMEOUT_SECONDS,
    Kill,
    LostGroupError,
    RunningCoordinator,
    group_run,
    patch_phases,
    train_and_lose,
    train_group,
)
from tests.train.test_diloco import DILOCO, EXACT_RULE, SGD, run_groups, select_weights
from tests.train.test_loop import rows, stored, train, write_store
from tests.train.test_replica_groups import FP64, assert_equal_runs, counts, rows_of

CPU = torch.device("cpu")
EXPERTS: dict[str, Override] = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "8",
    "model.moe.router.score": "sigmoid",
    "model.moe.aux_loss.batch_coeff": "0.01",
}
EXPERT_BIAS = EXPERTS | {
    "model.moe.router.expert_bias": "true",
    "model.moe.router.expert_bias_update_rate": "0.05",
}
QUANTILE = EXPERTS | {"model.moe.aux_loss.quantile": "true"}
PACKING: dict[str, Override] = {
    "train.tokens_per_microbatch": "24",
    "data.overlong": "truncate",
    "train.skip_steps": "[6]",
}


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        pytest.param(EXPERT_BIAS | PACKING, 8, id="expert bias, packing and a skipped step"),
        pytest.param(EXPERT_BIAS | PACKING, 30, id="long", marks=pytest.mark.slow),
        pytest.param(QUANTILE, 30, id="quantile", marks=pytest.mark.slow),
        pytest.param(EXPERT_BIAS | {"parallel.ep": "2"}, 30, id="ep", marks=pytest.mark.slow),
    ],
)
def test_lost_groups_change_nothing(
    tmp_path: Path, settings: dict[str, Override], steps: int
) -> None:
    settings = {"train.eval_steps": "0", "train.steps": str(steps)} | settings
    train(tmp_path / "one", FP64 | settings | {"parallel.ep": "1"})
    size = int(str(settings.get("parallel.ep", "1")))
    losses = {
        "g1": [Kill(2, "before_exchange")],
        "g0": [Kill(steps // 2, "after_vote")],
    }
    layout: dict[str, Override] = {"parallel.dp": str(size)}
    settings = FP64 | settings | layout | counts(2, 2) | {"checkpoint.every": "0"}
    settings["replica_group.timeout_seconds"] = "60"  # on a slow machine it joins within a tenth
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path, losses, 2
        results = run_ranks(train_and_lose, 2 * size, *arguments, timeout=200)
    assert len(results[0][0][2]) == 6, "group g0 computes half of 12 samples again"
    skipped = 6 if "train.skip_steps" in settings else None
    assert_equal_runs_but(tmp_path, tmp_path / "one", steps, skipped)
    if steps > 8:  # in a short run, the others may have finished before the state is loaded
        for group in ("g0", "g1"):
            assert "loaded the state of step" in (tmp_path / group / "log.txt").read_text()


def assert_equal_runs_but(path: Path, reference: Path, steps: int, skipped: int | None) -> None:
    """Assert that two groups equal one process; `skipped`: a step without a loss."""
    expected = {row["step"]: row for row in rows(reference) if "loss" in row}
    seen = set()
    for file in sorted(path.glob("g*/metrics*.jsonl")):
        for row in rows_of(file):
            seen.add(row["step"])
            moe = [name for name in row if name.startswith("moe_")]
            for name in ("loss", "grad_norm", "lr", *moe):
                want = expected[row["step"]][name]
                assert row[name] == pytest.approx(want, rel=1e-9), (file, row["step"], name)
            assert row["tokens"] == expected[row["step"]]["tokens"]
    assert seen == {*range(1, steps + 1)} - {skipped}
    assert_close(stored(path, steps), stored(reference, steps), CURVE64)


@pytest.mark.slow
def test_diloco_skips_steps_and_packs_samples_as_one_process_does(tmp_path: Path) -> None:
    settings = SGD | PACKING | {"train.skip_steps": "[3]"}
    weights = run_groups(tmp_path / "group", settings | DILOCO | counts(1, 1), 1, 1)
    train(tmp_path / "one", settings)
    expected = select_weights(stored(tmp_path / "one", 4))
    assert_close(select_weights(weights), expected, EXACT_RULE)


def _count_sums(
    rank: int, world: int, address: str, settings: dict[str, Override], path: Path
) -> int:
    """Train as one of two groups of one rank; return the number of sums over the groups."""
    all_reduce, calls = RingExchange.all_reduce_, [0]

    def count(self: RingExchange, tensors: Sequence[torch.Tensor]) -> None:
        calls[0] += 1
        all_reduce(self, tensors)

    with patched(RingExchange, "all_reduce_", count):
        assert train_group(rank, world, address, 2, settings, path) == "done"
    return calls[0]


def test_step_has_one_sum_and_one_vote_per_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    handle = CoordinatorServer._handle

    def count(self: CoordinatorServer, connection: GroupConnection, message: Message) -> None:
        kinds.append(str(message["kind"]))
        handle(self, connection, message)

    monkeypatch.setattr(CoordinatorServer, "_handle", count)
    steps = 8
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, FP64 | counts(2, 2), tmp_path
        num_sums = run_ranks(_count_sums, 2, *arguments, timeout=60)
    first_epoch = 2  # what each group has, and the counts of the first step
    assert num_sums == [steps + first_epoch] * 2
    requests = {kind: kinds.count(kind) for kind in kinds if kind != "heartbeat"}
    assert requests == {"join": 2, "vote": 2 * steps, "leave": 2}


class _StepOfGroups(SingleJob):
    """Synchronizer that allows what replica groups allow."""

    allows_reruns = allows_rollbacks = False


class _Requests(StepHooks):
    """Requests something before each update."""

    def __init__(self, requests: StepRequest) -> None:
        self.requests = requests

    def before_update(self, stats: StepStats) -> StepRequest:
        return self.requests


def test_step_of_groups_is_neither_rerun_nor_rolled_back(tmp_path: Path) -> None:
    run = PreparedRun(
        tiny_run(), RunFolder(tmp_path), build_single_rank_mesh(), CPU, lambda line: None
    )
    loader = run.build_loader()
    step = partial(train_step, run.trainer, lr=1e-2, weight_decay=0.0, synchronizer=_StepOfGroups())
    result = step(loader.next(), hooks=_Requests(StepRequest.RERUN))
    assert result.updated and result.num_reruns == 0
    with pytest.raises(CallbackError, match="requested a rollback, which is not possible with rep"):
        step(loader.next(), hooks=_Requests(StepRequest.ROLLBACK))


class StopAt(Callback):
    """Stops the run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        return StepRequest.STOP if finished.step == self.step else None


def _train_with_failed_vote(
    rank: int,
    world: int,
    address: str,
    settings: dict[str, Override],
    path: Path,
    stops: int,
    stop_step: int,
) -> str:
    """Train as one of two groups of one rank; group g1 votes once against step 3, and a callback of
    group `stops` requests to stop after a step."""
    run = group_run(address, f"g{rank}", settings, path)
    commit, has_failed = ReplicaGroups.commit, [rank == 0]

    def fail_once(self: ReplicaGroups, step: int, *, ok: bool, last: bool = False) -> bool:
        fails, has_failed[0] = not has_failed[0] and step == 3, has_failed[0] or step == 3
        return commit(self, step, ok=ok and not fails, last=last)

    callbacks = [StopAt(stop_step)] if rank == stops else []
    with patched(ReplicaGroups, "commit", fail_once):
        mesh, folder = build_single_rank_mesh(), RunFolder(path / f"g{rank}")
        return run_training(run, folder, mesh, CPU, show=False, callbacks=callbacks).kind


@pytest.mark.parametrize(
    ("stops", "stop_step"),
    [
        (0, 5),
        pytest.param(1, 5, marks=pytest.mark.slow),
        pytest.param(0, 2, marks=pytest.mark.slow, id="request in the discarded step"),
    ],
)
def test_group_that_stops_discards_no_step_and_failed_vote_computes_no_sample_again(
    tmp_path: Path, stops: int, stop_step: int
) -> None:
    train(tmp_path / "one", FP64)
    settings = FP64 | counts(1, 2) | {"checkpoint.every": "1"}  # group 0 saves, until it stops
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path, stops, stop_step
        kinds = run_ranks(_train_with_failed_vote, 2, *arguments, timeout=60)
        assert coordinator.status["num_discarded"] == 1, "only the step of the failed vote"
    assert kinds[stops] == "stopped" and kinds[1 - stops] == "done"
    assert_equal_runs(tmp_path, tmp_path / "one", 8, 2)


def _train_on_store(
    rank: int, world: int, address: str, settings: dict[str, Override], path: Path
) -> str:
    own = {"data.path": [str(path / f"store{rank}")]}
    run = group_run(address, f"g{rank}", settings | own, path)
    mesh, folder = build_single_rank_mesh(), RunFolder(path / f"g{rank}")
    return run_training(run, folder, mesh, CPU, show=False).kind


def test_groups_with_other_data_are_rejected(tmp_path: Path) -> None:
    for rank in range(2):
        write_store(tmp_path / f"store{rank}", 1 + 7 * rank)
    settings = FP64 | counts(1, 2)
    settings |= {"data.mock": "false", "data.split": "1,0,0", "train.eval_steps": "0"}
    settings |= {"train.steps": "2", "train.eval_every": "none"}
    text = (
        r"replica_group.id=g1: the data of this group is not that of replica group g0, with which "
        r"it would train step 1. Use the same files for data.\* in all groups."
    )
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path
        with pytest.raises(RankError, match=text):
            run_ranks(_train_on_store, 2, *arguments, timeout=60)


def _lose_without_memory(
    rank: int, world: int, address: str, settings: dict[str, Override], path: Path
) -> None:
    """Train as one of three groups, of which g0 has no memory for a copy of its state, and g1 is
    lost in step 3."""
    offer = StateServer.offer

    def fail(self: StateServer, *arguments: Any, **options: Any) -> None:
        if rank == 0:
            raise OSError("no space left")
        offer(self, *arguments, **options)

    with patched(StateServer, "offer", fail):
        losses = {"g1": [Kill(3, "before_vote")]}
        train_and_lose(rank, world, address, settings, path, losses, 3)


@pytest.mark.slow
def test_group_without_memory_for_a_copy_trains_on(tmp_path: Path) -> None:
    train(tmp_path / "one", FP64)
    settings = FP64 | counts(2, 3) | {"checkpoint.every": "0"}
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings, tmp_path
        run_ranks(_lose_without_memory, 3, *arguments, timeout=120)
    assert_equal_runs(tmp_path, tmp_path / "one", 8, 3)
    log = (tmp_path / "g0" / "log.txt").read_text()
    assert "cannot serve its state to a group that joins: no space left" in log
    assert "from replica group g2" in (tmp_path / "g1" / "log.txt").read_text()


def _resume_behind(
    rank: int, world: int, address: str, settings: dict[str, Override], path: Path
) -> str:
    """Train as a group that saves to a folder of its own."""
    own = {"checkpoint.folder": str(path / f"checkpoints{rank}")}
    run = group_run(address, f"g{rank}", settings | own, path)
    mesh, folder = build_single_rank_mesh(), RunFolder(path / f"g{rank}")
    return run_training(run, folder, mesh, CPU, show=False).kind


@pytest.mark.slow
def test_group_that_starts_behind_a_resumed_one_loads_its_state(tmp_path: Path) -> None:
    train(tmp_path / "one", FP64)
    settings = FP64 | counts(1, 1) | {"checkpoint.every": "4"}

    def lose(groups: ReplicaGroups, step: int, phase: str) -> None:
        if step == 6:
            raise LostGroupError

    with RunningCoordinator(tmp_path / "first") as coordinator, patch_phases(lose):
        arguments = coordinator.address, settings, tmp_path
        with pytest.raises(LostGroupError):
            _resume_behind(0, 1, *arguments)
    settings |= counts(1, 2)
    with RunningCoordinator(tmp_path / "second") as coordinator:
        arguments = coordinator.address, settings, tmp_path
        assert run_ranks(_resume_behind, 2, *arguments, timeout=60) == ["done"] * 2
    assert "loaded the state of step 4" in (tmp_path / "g1" / "log.txt").read_text()
    expected = {row["step"]: row["loss"] for row in rows_of(tmp_path / "one" / "metrics.jsonl")}
    for number in range(2):
        for row in rows_of(tmp_path / f"g{number}" / "metrics.jsonl"):
            assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-9)


def _build_state(step: int) -> Any:
    """The state of a group without tensors."""
    return SimpleNamespace(step=step, entries=list, export=dict)


def _offer_without_memory_on_rank_1(rank: int, world: int, path: Path) -> tuple[bool, int]:
    """Offer a state; return whether this rank offers it again, and its newest declined step."""

    def fail(self: StateServer, *arguments: Any, **options: Any) -> None:
        if rank == 1:
            raise OSError("no space left")

    run = group_run("127.0.0.1:9", "g0", FP64 | counts(1, 1) | {"parallel.dp": "2"}, path)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank, timeout_seconds=60)
    lines: list[str] = []
    coordinator: Any = None if rank else _FailingCoordinator()  # Any: it lacks methods
    groups = ReplicaGroups(run, mesh, coordinator, lines.append)
    with patched(StateServer, "offer", fail):
        groups._offer_state(_build_state(3))
    groups.close()
    assert "cannot serve its state to a group that joins: rank 1: no space left" in lines[0]
    return groups._offers_state, groups._server._newest["state"]


def test_group_serves_no_state_if_one_rank_has_no_memory_for_the_copy(tmp_path: Path) -> None:
    assert run_ranks(_offer_without_memory_on_rank_1, 2, tmp_path, timeout=60) == [(False, 3)] * 2


def test_closed_group_does_not_continue_to_load_a_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_transfer, "WAIT_SECONDS", 0.05)
    run = group_run("127.0.0.1:9", "g0", FP64 | counts(1, 1), tmp_path)
    coordinator: Any = _FailingCoordinator()  # Any: it lacks methods
    groups = ReplicaGroups(run, build_single_rank_mesh(), coordinator, lambda line: None)
    source = StateServer("127.0.0.1", groups._digest.hex(), CPU)  # it offers nothing
    epoch = Epoch(
        number=1,
        participants=("g0", "g1"),
        step=4,
        addresses={},
        state_addresses={"g1": (source.address,)},
    )
    groups._begin_catch_up(epoch, "g1", _build_state(0))
    assert groups._catch_up is not None
    groups.close()
    error = groups._catch_up.future.exception(timeout=TIMEOUT_SECONDS / 2)
    assert str(error) == f"the transfer from {source.address} was cancelled"
    source.close()


class _FailingCoordinator:
    """Coordinator whose requests raise an error that is not one of users."""

    def join(self, **_: object) -> Epoch:
        raise OSError("the store does not answer")

    def close(self) -> None:
        pass


def _join_and_fail(rank: int, world: int, path: Path) -> str:
    run = group_run("127.0.0.1:9", "g0", FP64 | counts(1, 1) | {"parallel.dp": "2"}, path)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank, timeout_seconds=60)
    coordinator: Any = None if rank else _FailingCoordinator()  # Any: it lacks methods
    groups = ReplicaGroups(run, mesh, coordinator, lambda line: None)
    try:
        groups.enter(SimpleNamespace(step=0))  # type: ignore[arg-type] - joins before more is read
    except RankError as error:
        return str(error)
    finally:
        groups.close()
    return ""


def test_error_of_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    texts = run_ranks(_join_and_fail, 2, tmp_path, timeout=60)
    assert texts == ["rank 0: OSError: the store does not answer"] * 2


def test_error_of_the_store_does_not_end_a_waiting_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(replica_group_settings, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(replica_group_settings, "list_complete_checkpoints", fail)
    assert not replica_group_settings.FinishedRunCheck(Path("runs/a/checkpoints"), 8)()


def test_group_that_waits_for_others_is_not_hung(tmp_path: Path) -> None:
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        run = group_run(coordinator.address, "g0", FP64 | counts(2, 2), tmp_path)
        assert run.replica_group is not None
        reader = HeartbeatReader()
        heartbeat = RankHeartbeat(map_heartbeat(reader.fd))
        heartbeat.set_timeouts(1.0, fixed_seconds=1.0)
        client = connect_coordinator(run.replica_group)
        groups = ReplicaGroups(
            run, build_single_rank_mesh(), client, lambda line: None, heartbeat=heartbeat
        )
        heartbeat.record("start")
        waiting = threading.Thread(target=_enter_until_closed, args=(groups,))
        waiting.start()  # there is no other group
        states = _check_for(reader, seconds=2.0)
        groups.close()
        waiting.join()
        assert not any(states), "the group waits for others"
        assert heartbeat.times == {} or heartbeat.times["start"].passes == 0, "no wait is learned"
        assert any(_check_for(reader, seconds=2.0)), "without a wait it is found"
        reader.close()


def _enter_until_closed(groups: ReplicaGroups) -> None:
    with suppress(FinishedRunError):
        groups.enter(SimpleNamespace(step=0))  # type: ignore[arg-type] - joins before more is read


def _check_for(reader: HeartbeatReader, seconds: float) -> Sequence[bool]:
    """Return whether the rank hangs, in checks over some time."""
    states, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        states.append(reader.check(0).is_hung)
        time.sleep(0.05)
    return states

"""DiLoCo between replica groups: exact cases, lost groups, rounded deltas, and the bytes sent."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith.config.replica_group import DilocoConfig
from megalith.config.tree import Override
from megalith.optim.diloco import OuterOptimizer, decode, encode, encoded_nbytes
from megalith.optim.slots import OptimizerSlot, build_slot
from megalith.parallel.group_exchange import RingExchange
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.diloco import SyncSchedule, sync_nbytes
from megalith.plan.shards import Shard
from megalith.rules.run import run_problems
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import Tolerance, assert_close
from megalith.train import diloco
from megalith.train.diloco import DilocoSync, RoundState
from megalith.train.loop import run_training
from megalith.train.replica_groups import ReplicaGroups
from megalith.train.run_folder import RunFolder
from tests.train.replica_group_jobs import (
    LostGroupError,
    RunningCoordinator,
    group_run,
    train_group,
)
from tests.train.test_loop import stored, train
from tests.train.test_replica_groups import counts

CPU = torch.device("cpu")
EXACT_RULE = Tolerance("diloco", 1e-12, "float64; the order of sums differs")
SGD: dict[str, Override] = {
    "precision.params": "fp64",
    "train.micro_batch_size": "1",
    "optim.kind": "sgd",
    "optim.momentum": "0",
    "optim.clip_grad": "0",
    "schedule.lr": "0.05",
    "train.eval_steps": "0",
    "train.steps": "4",
}
DILOCO: dict[str, Override] = {
    "replica_group.mode": "diloco",
    "replica_group.diloco.sync_every": "1",
    "replica_group.diloco.outer_lr": "1",
    "replica_group.diloco.outer_momentum": "0",
}


def run_groups(
    path: Path, settings: Mapping[str, Override], groups: int = 2, world: int = 2
) -> dict[str, torch.Tensor]:
    """Train with replica groups and return the tensors of the last checkpoint."""
    path.mkdir(exist_ok=True)
    with RunningCoordinator(path / "coordinator") as coordinator:
        arguments = coordinator.address, groups, dict(settings), path
        assert run_ranks(train_group, world, *arguments, timeout=120) == ["done"] * world
    return stored(path, int(str(settings["train.steps"])))


def select_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in tensors.items() if key.startswith("model.")}


LAYOUTS = [
    (2, 2, {}),
    pytest.param(2, 4, {"parallel.dp": "2", "parallel.zero": "1"}, marks=pytest.mark.slow),
    pytest.param(2, 4, {"parallel.dp": "2", "parallel.zero": "3"}, marks=pytest.mark.slow),
    pytest.param(2, 4, {"parallel.tp": "2"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("groups", "world", "layout"), LAYOUTS)
def test_one_inner_step_of_sgd_equals_data_parallelism(
    tmp_path: Path, groups: int, world: int, layout: dict[str, Override]
) -> None:
    weights = run_groups(tmp_path / "two", SGD | DILOCO | layout | counts(2, 2), groups, world)
    train(tmp_path / "one", SGD)
    assert_close(select_weights(weights), select_weights(stored(tmp_path / "one", 4)), EXACT_RULE)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"replica_group.diloco.num_fragments": "2", "replica_group.diloco.sync_every": "2"},
    ],
    ids=["one fragment", "two fragments"],
)
def test_one_group_with_outer_rate_one_trains_as_without(
    tmp_path: Path, change: dict[str, Override]
) -> None:
    settings = SGD | {"optim.momentum": "0.9"}
    weights = run_groups(tmp_path / "group", settings | DILOCO | change | counts(1, 1), 1, 1)
    train(tmp_path / "one", settings)
    expected = select_weights(stored(tmp_path / "one", 4))
    assert_close(select_weights(weights), expected, EXACT_RULE)


def _train_and_lose(
    rank: int, world: int, address: str, settings: Any, path: Path, losses: Mapping[str, int]
) -> list[str]:
    """Train as a group of one rank. A group of `losses` is lost once, before this vote (1: the
    first one) about its second round. Return the lines of each start."""
    run = group_run(address, f"g{rank}", settings, path)
    lines: list[str] = []
    num_votes = 0
    commit_round = ReplicaGroups.commit_round

    def lose(self: ReplicaGroups, number: int, *, ok: bool) -> bool:
        nonlocal num_votes
        num_votes += number == 2
        if number == 2 and losses.get(self.config.id) == num_votes:
            raise LostGroupError
        return commit_round(self, number, ok=ok)

    def start() -> str:
        mesh = build_single_rank_mesh()
        return run_training(run, RunFolder(path / f"g{rank}"), mesh, CPU, show=False).kind

    try:
        with patched(ReplicaGroups, "commit_round", lose):
            lines.append(start())
    except LostGroupError:
        lines.append(start())
    return [*lines, (path / f"g{rank}" / "log.txt").read_text()]


@pytest.mark.parametrize(
    ("delay", "every", "line"),
    [
        (0, 0, "round 0: loaded the state of round 1 from replica group g0"),
        (1, 0, "round 0: loaded the state of round 1 from replica group g0"),
        (0, 2, "resuming"),  # from the checkpoint, and repeats the steps of the round
    ],
)
def test_lost_group_joins_the_round_again(
    tmp_path: Path, delay: int, every: int, line: str
) -> None:
    settings = SGD | {
        "replica_group.mode": "diloco",
        "replica_group.diloco.sync_every": "2",
        "replica_group.diloco.fragment_delay": str(delay),
        "replica_group.diloco.delta_dtype": "bf16",
        "train.steps": "12",
        "checkpoint.every": str(every),
    }
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings | counts(2, 2), tmp_path, {"g1": 1}
        (first, log), (second, other_log) = run_ranks(_train_and_lose, 2, *arguments, timeout=120)
    assert (first, second) == ("done", "done")
    assert "discarded in epoch" in log
    assert line in other_log
    weights = stored(tmp_path, 12)
    assert all(tensor.isfinite().all() for tensor in weights.values())
    for key, weight in select_weights(weights).items():
        start = weights[key.replace("model.", "optimizer.outer_start.", 1)]
        assert torch.equal(start, weight), "the last step is synchronized"


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_group_that_has_just_joined_continues_if_its_source_is_lost(
    tmp_path: Path, dtype: str
) -> None:
    """g1 loads the round of g0, which is lost before the vote, and then loads that of g1."""
    settings = SGD | {
        "replica_group.mode": "diloco",
        "replica_group.diloco.sync_every": "2",
        "replica_group.diloco.delta_dtype": dtype,
        "train.steps": "6",
        "checkpoint.every": "0",
    }
    with RunningCoordinator(tmp_path / "coordinator") as coordinator:
        arguments = coordinator.address, settings | counts(2, 2), tmp_path, {"g1": 1, "g0": 2}
        (first, log), (second, other_log) = run_ranks(_train_and_lose, 2, *arguments, timeout=120)
    assert (first, second) == ("done", "done")
    assert "loaded the state of round 1 from replica group g0" in other_log
    assert "loaded the state of round 1 from replica group g1" in log
    assert all(tensor.isfinite().all() for tensor in stored(tmp_path, 6).values())


def _count_sent(rank: int, world: int, address: str, settings: Any, path: Path) -> int:
    """Train as a group of one rank; return the bytes that it has sent to the other group since the
    first step, after the epoch had begun."""
    sent = [0]
    send, enter = RingExchange._send_and_receive, ReplicaGroups.enter

    def enter_and_reset(self: ReplicaGroups, state: Any) -> None:
        enter(self, state)
        sent[0] = 0

    def count(self: RingExchange, data: torch.Tensor, received: torch.Tensor) -> None:
        sent[0] += data.nbytes
        send(self, data, received)

    run = group_run(address, f"g{rank}", settings, path)
    with (
        patched(RingExchange, "_send_and_receive", count),
        patched(ReplicaGroups, "enter", enter_and_reset),
    ):
        run_training(run, RunFolder(path / f"g{rank}"), build_single_rank_mesh(), CPU, show=False)
    return sent[0]


@pytest.mark.slow
def test_twenty_inner_steps_send_a_twentieth_of_the_bytes(tmp_path: Path) -> None:
    settings = SGD | {"train.steps": "20", "replica_group.diloco.sync_every": "20"} | counts(2, 2)
    nbytes: dict[str, int] = {}
    for name, change in {
        "sync": {},
        "fp32": {"replica_group.mode": "diloco"},
        "int8": {
            "replica_group.mode": "diloco",
            "replica_group.diloco.delta_dtype": "int8",
        },
    }.items():
        path = tmp_path / name
        path.mkdir()
        with RunningCoordinator(path / "coordinator") as coordinator:
            arguments = coordinator.address, settings | change, path
            nbytes[name] = max(run_ranks(_count_sent, 2, *arguments, timeout=120))
    assert nbytes["fp32"] <= nbytes["sync"] / 20
    assert nbytes["int8"] < nbytes["fp32"] / 6, "8 bits and scales instead of float64"


def build_slots(count: int = 3) -> list[OptimizerSlot]:
    generator = torch.Generator().manual_seed(0)
    return [
        build_slot(
            Shard.full(f"layers.{n}.w", (40,), dtype="fp64"),
            torch.randn(40, generator=generator, dtype=torch.float64),
            (),
        )
        for n in range(count)
    ]


def test_outer_step_equals_sgd_with_nesterov_momentum() -> None:
    slots = build_slots(1)
    outer = OuterOptimizer(slots, DilocoConfig(outer_lr=0.7, outer_momentum=0.9))
    expected = torch.nn.Parameter(slots[0].master.clone())
    sgd = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(4):
        slots[0].master.add_(torch.sin(torch.arange(40.0) + step))
        (delta,) = outer.compute_deltas([0])
        expected.grad = delta.clone()
        sgd.step()
        outer.apply([0], [delta])
        torch.testing.assert_close(slots[0].master, expected.detach(), rtol=1e-14, atol=0)


def test_fragment_keeps_a_part_of_the_own_weights() -> None:
    slots = build_slots()
    config = DilocoConfig(num_fragments=2, fragment_mixing=0.25, outer_lr=1, outer_momentum=0)
    outer = OuterOptimizer(slots, config)
    before = [slot.master.clone() for slot in slots]
    for slot in slots:
        slot.master.add_(1.0)
    assert outer.list_slots([0]) == [0, 2] and outer.list_slots([1]) == [1]
    deltas = outer.compute_deltas([0, 2])
    outer.apply([0, 2], [delta / 2 for delta in deltas])  # the other group has not moved
    for number in (0, 2):
        expected = before[number] + 0.25 * 1.0 + 0.75 * 0.5
        torch.testing.assert_close(slots[number].master, expected, rtol=1e-14, atol=0)
    assert torch.equal(slots[1].master, before[1] + 1)


@pytest.mark.parametrize("dtype,error", [("bf16", 2**-8), ("int8", 0.501 / 127)])
def test_error_feedback_sends_all_changes_in_the_end(dtype: Any, error: float) -> None:
    config = DilocoConfig(delta_dtype=dtype, int8_block_size=16, outer_lr=1, outer_momentum=0)
    slots = build_slots()
    outer = OuterOptimizer(slots, config)
    total = [torch.zeros_like(slot.master) for slot in slots]
    sent_total = [torch.zeros_like(slot.master) for slot in slots]
    for step in range(8):
        for number, slot in enumerate(slots):
            change = torch.cos(torch.arange(40.0).double() * (step + number + 1))
            slot.master.sub_(change)
            total[number] += change
        deltas = outer.compute_deltas([0, 1, 2])
        sent = []
        for delta in deltas:
            data = encode(delta, dtype, 16)
            assert data.numel() == encoded_nbytes(40, dtype, 16)
            sent.append(decode(data, delta, dtype, 16))
            assert (sent[-1] - delta).abs().max() <= error * delta.abs().max()
        outer.keep_residuals([0, 1, 2], deltas, sent)
        outer.apply([0, 1, 2], sent)
        for number in range(3):
            sent_total[number] += sent[number]
    for number in range(3):
        difference = total[number] - sent_total[number]
        torch.testing.assert_close(difference, outer.residuals[number], rtol=0, atol=1e-12)
        assert difference.abs().max() < 2 * error * 2, "the error does not grow with the steps"


def test_group_that_joins_does_not_send_the_rounding_errors_of_its_source() -> None:
    slots = build_slots(1)
    outer = OuterOptimizer(slots, DilocoConfig(delta_dtype="bf16"))
    outer.residuals[0].fill_(1.0)

    class Source:
        step = 4

        def adopt(self, state: Mapping[str, Any]) -> None:
            self.adopted = state

    source: Any = Source()
    state = RoundState(source, 0, lambda step: 0, outer)
    state.adopt({"diloco_rounds": 2})
    assert state.rounds == 2 and not outer.residuals[0].any()


class ExcludedGroup:
    """Groups and state of a group that was excluded from round 2, and loads the state of another
    one in which round 4 is not applied yet."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(diloco=DilocoConfig(sync_every=2))
        self.step, self.votes, self.weights = 4, [], []
        self.state: Any = self

    def start_exchange(self, work: Any) -> Any:
        ring = SimpleNamespace(num_groups=2, index=0, all_reduce_=self._add_other_group)
        result = work(ring)
        return SimpleNamespace(result=lambda: result)

    def _add_other_group(self, tensors: list[torch.Tensor]) -> None:
        if tensors[0].shape == (2,):
            self.weights.append(float(tensors[0][0]))
            tensors[0][1] = 1.0

    def finish_exchange(self, future: Any) -> Any:
        return future.result()

    def commit_round(self, number: int, *, ok: bool) -> bool:
        self.votes.append(number)
        return len(self.votes) > 1

    def enter(self, state: Any) -> None:
        self.step, state.rounds = 8, 3


def build_sync(groups: ExcludedGroup, steps: int) -> DilocoSync:
    """The rounds of a run with one weight."""
    nothing = SimpleNamespace(wait=lambda: None, wait_params=lambda: None)
    trainer: Any = SimpleNamespace(
        outer=OuterOptimizer(build_slots(1), DilocoConfig()),
        run=SimpleNamespace(train=SimpleNamespace(steps=steps)),
        write_guard=nothing,
        data=nothing,
        timers=SimpleNamespace(section=lambda name: nullcontext()),
    )
    return DilocoSync(trainer, cast(Any, groups), cast(Any, groups))


def test_excluded_group_takes_part_in_the_round_of_the_state_that_it_loads() -> None:
    groups = ExcludedGroup()
    sync = build_sync(groups, steps=20)
    sync.state.rounds = 1
    with patched(diloco, "all_gather_loaded_params", lambda trainer: None):
        assert sync.after_step()
    assert groups.votes == [2, 4] and sync.state.rounds == 4
    assert groups.weights == [1.0, 0.0]


class EndedEpoch(ExcludedGroup):
    """Groups whose epoch ends with the vote about round 2."""

    def __init__(self) -> None:
        super().__init__()
        self.config.diloco = DilocoConfig(sync_every=2, fragment_delay=1)
        self.changes_epoch, self.num_entered = False, 0

    def start_exchange(self, work: Any) -> Any:
        assert not self.changes_epoch, "the connections of the epoch are closed"
        return super().start_exchange(work)

    def commit_round(self, number: int, *, ok: bool) -> bool:
        self.votes.append(number)
        self.changes_epoch = number == 2
        return True

    def enter(self, state: Any) -> None:
        self.changes_epoch, self.num_entered = False, self.num_entered + 1


def test_fragments_of_the_last_step_are_sent_in_the_epoch_that_follows_the_last_vote() -> None:
    groups = EndedEpoch()
    sync = build_sync(groups, steps=5)
    with patched(diloco, "all_gather_loaded_params", lambda trainer: None):
        assert not sync.after_step()  # sends the round of step 4
        groups.step = 5
        assert sync.after_step()
    assert groups.votes == [2, 3] and groups.num_entered == 1


def test_schedule_counts_the_rounds_that_it_applies() -> None:
    for every, fragments, delay in ((1, 1, 0), (6, 2, 2), (7, 3, 1), (5, 5, 0)):
        schedule = SyncSchedule(every, fragments, delay, num_steps=40)
        applied = 0
        sends: dict[int, int] = {}
        for step in range(1, 40):
            if schedule.list_sends(step):
                assert len(schedule.list_sends(step)) == 1
                at = schedule.find_apply_step(step)
                sends[at] = sends.get(at, 0) + 1
            applied += sends.get(step, 0)
            assert schedule.count_rounds(step) == applied, (every, fragments, delay, step)
            if sends.get(step):
                assert schedule.list_sends(schedule.find_sent_step(step))
        assert schedule.list_sends(40) == [*range(fragments)]


def test_bytes_of_a_round_follow_the_formula() -> None:
    arguments = {"numel": 10_000, "num_groups": 4, "num_fragments": 2, "block_size": 100}
    assert sync_nbytes(delta_dtype="fp32", **arguments) == 2 * 3 / 4 * 20_000
    assert sync_nbytes(delta_dtype="bf16", **arguments) == 3 * 10_000
    assert sync_nbytes(delta_dtype="int8", **arguments) == 3 * (5_000 + 200)


@pytest.mark.parametrize(
    "change,text",
    [
        (
            {"num_fragments": "4", "sync_every": "3"},
            r"diloco\.num_fragments=4 with .*sync_every=3: .* to at most 3\.",
        ),
        (
            {"num_fragments": "2", "sync_every": "6", "fragment_delay": "3"},
            r"diloco\.fragment_delay=3: the next fragment is sent after 3 steps .* at most 2\.",
        ),
    ],
)
def test_fragments_that_overlap_are_rejected(change: Mapping[str, str], text: str) -> None:
    settings = {f"replica_group.diloco.{name}": value for name, value in change.items()}
    run = tiny_run(
        settings
        | {
            "replica_group.mode": "diloco",
            "replica_group.id": "a",
            "replica_group.coordinator": "127.0.0.1:1",
        }
    )
    assert re.search(text, "\n".join(run_problems(run, 1)))

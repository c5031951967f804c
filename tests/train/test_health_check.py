"""Device health check: wrong bits end the run for other machines, and slow devices are reported."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.train import TrainRun
from megalith.errors import DataError
from megalith.observe import health_check
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.device_health import DeviceHealth, find_outliers
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import health_check as callbacks
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.start_records import read_starts
from megalith.train.step import StepRequest

CPU = torch.device("cpu")
BASE = {
    "train.eval_steps": "0",
    "train.steps": "4",
    "checkpoint.every": "0",
    "fault_detector.health_check_every": "2",
}


def _train_rank(
    rank: int, world: int, run: TrainRun, path: Path, faulty: int, first: int
) -> Outcome | str:
    """Train on one rank; the products of rank `faulty` are wrong from its check number `first`."""
    num_checks = 0
    product_bits = health_check.sum_product_bits

    def flip(left: Tensor, right: Tensor) -> int:
        nonlocal num_checks
        num_checks += 1
        flipped = left.clone()
        if rank == faulty and num_checks >= first:
            flipped.view(torch.uint8)[3, 3] ^= 1
        return product_bits(flipped, right)

    grid = model_grid(run.parallel, run.model, world)
    mesh = build_mesh(grid, rank=rank) if world > 1 else build_single_rank_mesh()
    with patched(health_check, "sum_product_bits", flip):
        try:
            return run_training(run, RunFolder(path), mesh, CPU, show=False)
        except DataError as error:
            return str(error)


def train(
    settings: Mapping[str, str], path: Path, *, faulty: int = -1, first: int = 1, world: int = 3
) -> list[Outcome | str]:
    run = tiny_run(BASE | {"parallel.dp": str(world)} | settings)
    return run_ranks(_train_rank, world, run, path, faulty, first)


def read_suspects(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "suspects.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_flipped_bit_of_one_rank_saves_the_state_and_ends_the_run_for_other_machines(
    tmp_path: Path,
) -> None:
    """Its check at the start passes, that after step 2 does not; the latter state is saved."""
    clean = train({}, tmp_path / "clean")
    assert {outcome.kind for outcome in clean if isinstance(outcome, Outcome)} == {"done"}
    path = tmp_path / "faulty"
    outcomes = train({}, path, faulty=1, first=2)
    reason = "matmul float32 has different bits than on rank 0, a device of the same type"
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcome
        assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", 2, True)
        assert "device health check: rank 1 (host " in outcome.reason and reason in outcome.reason
    (suspect,) = read_suspects(path)
    assert (suspect["kind"], suspect["rank"], suspect["exits"]) == ("health_check", 1, True)
    assert suspect["reason"] == reason
    # the same host again at the same step: the user must exclude it
    for error in train({}, path, faulty=1):
        assert isinstance(error, str)
        assert "The run has ended at this step before because of the same host" in error
    assert {outcome.kind for outcome in train({}, path) if isinstance(outcome, Outcome)} == {"done"}


@pytest.mark.slow
def test_wrong_device_is_found_before_the_first_step(tmp_path: Path) -> None:
    for outcome in train({}, tmp_path, faulty=2, world=3):
        assert isinstance(outcome, Outcome)
        assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", 0, False)


class _StopAfterStep2(Callback):
    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        return StepRequest.STOP if finished.step == 1 else None


def _train_until_wrong_product(
    path: Path, num_correct: int, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Train on one rank, whose first `num_correct` checks pass: at the start and every 2 steps."""
    num_checks = 0

    def is_exact(dtype: torch.dtype, device: torch.device) -> bool:
        nonlocal num_checks
        num_checks += 1
        return num_checks <= num_correct

    with patched(health_check, "is_exact", is_exact):
        run, mesh = tiny_run(BASE), build_single_rank_mesh()
        return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def test_wrong_product_on_one_rank_ends_the_run_for_other_machines(tmp_path: Path) -> None:
    outcome = _train_until_wrong_product(tmp_path, 1)
    assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", 2, True)
    assert read_suspects(tmp_path)[0]["reason"] == "matmul float32 of whole numbers is wrong"


@pytest.mark.parametrize("step, callbacks", [(4, ()), (2, (_StopAfterStep2(),))])
def test_wrong_product_after_the_last_step_ends_the_run_for_other_machines(
    tmp_path: Path, step: int, callbacks: Sequence[Callback]
) -> None:
    """No step follows, because the run has done all its steps or is stopped."""
    outcome = _train_until_wrong_product(tmp_path, step // 2, callbacks)
    assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", step, True)
    assert "matmul float32 of whole numbers is wrong" in outcome.reason
    ((start,), _) = read_starts(tmp_path)
    assert start.exit is not None
    assert (start.exit.code, start.exit.cause) == (76, outcome.reason)
    assert [each["step"] for each in read_suspects(tmp_path)] == [step]


def test_damaged_memory_is_an_error() -> None:
    def count(block: Tensor, pattern: int) -> int:
        block[5] ^= 0 if pattern != 0xAA else 4
        return count_wrong(block, pattern)

    count_wrong = health_check.count_wrong_bytes
    with patched(health_check, "count_wrong_bytes", count):
        errors = health_check.check_memory(1000, CPU)
    assert errors == ["memory pattern 0xaa: 1 of 1000 bytes changed"]
    assert health_check.check_memory(1000, CPU) == []
    exact = [health_check.is_exact(dtype, CPU) for dtype in (torch.bfloat16, torch.float64)]
    assert exact == [True, True]


def _exchange(rank: int, world: int) -> tuple[str, ...]:
    """Check messages of two ranks, of which rank 0 sends a wrong byte."""
    run = tiny_run({"parallel.dp": "2"})
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    start_send = callbacks.start_send

    def damage(x: Tensor, *arguments: Any) -> Any:
        sent = x.clone()
        sent[7] += rank == 0
        return start_send(sent, *arguments)

    with patched(callbacks, "start_send", damage):
        health = callbacks._check_messages(DeviceHealth("host", "cpu"), CPU, mesh.world)
    assert health.speeds["message"] > 0
    return health.errors


@pytest.mark.slow
def test_damaged_message_names_its_sender() -> None:
    assert run_ranks(_exchange, 2) == [(), ("1 bytes of the message from rank 0 are wrong",)]


def test_outliers_are_compared_within_a_device_type() -> None:
    devices = [
        DeviceHealth("a", "cpu", {"matmul": 1}, speeds={"copy": 10.0}),
        DeviceHealth("b", "cpu", {"matmul": 1}, speeds={"copy": 7.9}),
        DeviceHealth("c", "cpu", {"matmul": 1}, speeds={"copy": 10.0}),
        DeviceHealth("d", "gpu", {"matmul": 2}, speeds={"copy": 99.0}),
    ]
    (slow,) = find_outliers(devices)
    assert (slow.rank, slow.kind) == (1, "speed")
    assert slow.reason == "copy: 0.79 of the median speed"
    pair = [DeviceHealth("a", "cpu", {"matmul": bits}) for bits in (1, 2)]
    assert [each.reason for each in find_outliers(pair)] == [
        f"matmul has different bits than on rank {rank}, a device of the same type; which one is "
        "wrong is unknown"
        for rank in (1, 0)
    ]


def test_devices_without_memory_for_a_product_are_not_wrong() -> None:
    devices = [DeviceHealth(host, "gpu", {"matmul bfloat16": 7}) for host in "ab"]
    assert find_outliers([*devices, DeviceHealth("c", "gpu")]) == []

    def fail(*_arguments: object) -> int:
        raise torch.OutOfMemoryError("no free memory")

    with patched(health_check, "sum_product_bits", fail):
        health = health_check.check_device(CPU, [torch.float32])
    assert health.bits == {} and health.errors == () and set(health.speeds) == {"memory copy"}


def test_sum_of_product_bits_does_not_depend_on_the_chunk() -> None:
    left, right = (health_check.fill_fixed(48, shift, torch.float32, CPU) for shift in (0, 1))
    whole = health_check.sum_product_bits(left, right)
    with patched(health_check, "CHUNK", 251 * 4):
        assert health_check.sum_product_bits(left, right) == whole

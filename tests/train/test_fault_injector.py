"""Fault injection: each kind of injected fault occurs on its rank, as often as `times` sets."""

import math
import os
import random
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megalith.config.fault_injection import FaultInjectorConfig
from megalith.config.tree import apply_overrides
from megalith.data.loader import StepBatches
from megalith.errors import DataError, RankError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import fault_injector
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.callbacks.fault_injector import (
    FaultInjector,
    flip_bit,
    read_injected_faults,
)
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
SHORT = {
    "fault_detector.nonfinite": "skip",  # no reruns, which would repair the step
    "train.steps": "4",
    "train.eval_every": "none",
    "train.eval_steps": "0",
    "checkpoint.every": "2",
}


def fault_settings(**fault: object) -> dict[str, str]:
    """Return the settings of a short run with an injected fault."""
    given = {"confirm": True, **fault}
    return SHORT | {f"fault_injector.{name}": str(value).lower() for name, value in given.items()}


def train(path: Path, *callbacks: Callback, **fault: object) -> Outcome:
    """Run the tiny run with an injected fault on one process."""
    run = tiny_run(fault_settings(**fault))
    assert run_problems(run, 1) == []
    mesh = build_single_rank_mesh()
    return run_training(run, RunFolder(path), mesh, CPU, show=False, callbacks=callbacks)


def inject_in_process(rank: int, world: int, folder: Path, kind: str, by_timer: bool) -> str:
    """Inject a fault of a process with the callback alone; return that the process survived."""
    if rank != world - 1:
        time.sleep(0 if world == 1 else 60)
    time_of_fault = {"seconds": 0.05} if by_timer else {"step": 1}
    config = FaultInjectorConfig(kind=cast(Any, kind), confirm=True, rank=rank, **time_of_fault)
    view = SimpleNamespace(
        mesh=SimpleNamespace(world=SimpleNamespace(rank=rank)),
        step=0,
        folder=RunFolder(folder),
        log=lambda line: None,
        chunks=(),
    )
    injector = FaultInjector(config)
    injector.on_start(cast(RunView, view))
    if by_timer:
        time.sleep(30)
    injector.before_step(1, cast(StepBatches, None))
    return "survived"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("exception", "RuntimeError: this error was injected by fault_injector.kind=exception"),
        ("kill", "was killed by signal 9 (SIGKILL)"),
        pytest.param("segfault", "was killed by signal 11 (SIGSEGV)", marks=pytest.mark.slow),
    ],
)
def test_fault_of_a_process_ends_its_rank(tmp_path: Path, kind: str, text: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(inject_in_process, 1, tmp_path, kind, False)
    assert text in str(error.value)
    (fault,) = read_injected_faults(tmp_path, 0)
    assert (fault["kind"], fault["step"], fault["host"]) == (kind, 1, socket.gethostname())


@pytest.mark.slow
def test_fault_after_seconds_occurs_outside_of_steps(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="was killed by signal 9"):
        run_ranks(inject_in_process, 1, tmp_path, "kill", True)


@pytest.mark.parametrize(
    "kind",
    ["hang", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("stop", "hang_with_gil"))],
)
def test_hanging_rank_does_not_return(tmp_path: Path, kind: str) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(inject_in_process, 1, tmp_path, kind, False, timeout=0.7)
    assert len(read_injected_faults(tmp_path, 0)) == 1
    # only a thread that waits without the GIL leaves the others running
    assert ("_act" in str(error.value)) == (kind != "stop"), str(error.value)


def test_lost_link_shuts_down_tcp_connections_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        local = socket.socketpair()
        run_in_child(lambda: fault_injector.shut_down_connections())
        assert accepted.recv(1) == b"", "the other end sees the connection closed"
        local[0].send(b"x")
        assert local[1].recv(1) == b"x"
        for each in (client, accepted, *local):
            each.close()


def run_in_child(function: Any) -> None:
    """Call a function in a forked process, which shares the sockets of this one."""
    process = os.fork()
    if process == 0:
        try:
            function()
        finally:
            os._exit(0)
    os.waitpid(process, 0)


class Gradients(Callback):
    """Records the gradient norm and the number of non-finite gradients of each step."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        self.norms[finished.step] = finished.result.grad_norm


@pytest.mark.parametrize(
    ("target", "times", "wrong_steps"),
    [
        ("gradient", 1, {3}),
        pytest.param("gradient", 0, {3, 4}, marks=pytest.mark.slow),
        pytest.param("activation", 1, {3}, marks=pytest.mark.slow),
        ("moment", 1, {4}),  # the update of step 3 spreads it
    ],
)
def test_nan_occurs_from_its_step_on(
    tmp_path: Path, target: str, times: int, wrong_steps: set[int]
) -> None:
    recorded = Gradients()
    with suppress(DataError):  # a divergent last step is not saved
        train(tmp_path / "run", recorded, kind="nan", step=3, target=target, times=times)
    assert {s for s, norm in recorded.norms.items() if not math.isfinite(norm)} == wrong_steps
    assert len(read_injected_faults(tmp_path / "run", 0)) == 1


def test_bit_flip_of_a_weight_changes_one_element_and_the_losses_after_it(tmp_path: Path) -> None:
    train(tmp_path / "with", kind="bit_flip", step=3, target="weight", bit=22, seed=5)
    run, mesh = tiny_run(SHORT), build_single_rank_mesh()
    run_training(run, RunFolder(tmp_path / "without"), mesh, CPU, show=False)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("with", "without")
    ]
    assert losses[0][:2] == losses[1][:2] and losses[0][2] != losses[1][2]


def test_bit_flip_of_a_stored_file_is_found_by_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, kind="bit_flip", step=4, target="file")
    run = tiny_run(SHORT | {"train.steps": "6"})
    run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)
    assert "skipping checkpoint step_0000004" in (path / "log.txt").read_text()


def test_full_disk_fails_the_save_of_its_step_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run"
    train(path, kind="full_disk", step=2)
    names = sorted(each.name for each in (path / "checkpoints").glob("step_*"))
    assert names == ["step_0000004"]
    assert [row["step"] for row in read_metrics(path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_slow_rank_sleeps_in_proportion_to_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(fault_injector.time, "sleep", pauses.append)
    train(tmp_path / "run", kind="slow", step=2, times=2, factor=3)
    assert len(pauses) == 2 * 6 and all(pause > 0 for pause in pauses)


def _train_ranks(rank: int, world: int, path: Path) -> None:
    run = apply_overrides(
        tiny_run({"parallel.dp": "2"}), fault_settings(kind="kill", rank=1, step=3)
    )
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)


@pytest.mark.slow
def test_one_fault_occurs_once_over_all_starts(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9"):
        run_ranks(_train_ranks, 2, tmp_path / "run")
    run_ranks(_train_ranks, 2, tmp_path / "run")
    assert len(read_injected_faults(tmp_path / "run", 1)) == 1
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "section",
    ["save", *(pytest.param(each, marks=pytest.mark.slow) for each in ("backward", "evaluate"))],
)
def test_fault_of_a_section_occurs_there(tmp_path: Path, section: str) -> None:
    more = {"train.eval_steps": "1", "train.eval_every": "2"}
    run = tiny_run(fault_settings(kind="exception", step=1, section=section) | more)
    path = tmp_path / "run"
    with pytest.raises(RuntimeError, match="injected by fault_injector"):
        run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)
    (fault,) = read_injected_faults(path, 0)
    assert fault["step"] == (1 if section == "backward" else 2)
    assert not list((path / "checkpoints").glob("step_*"))


def test_flip_bit_is_its_own_inverse_for_each_dtype() -> None:
    choice = random.Random(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8):
        value = torch.tensor(3).to(dtype)
        for bit in range(8 * value.element_size()):
            changed = value.clone()
            flip_bit(changed, choice, bit)
            assert not torch.equal(changed, value), (dtype, bit)
            flip_bit(changed, choice, bit)
            assert torch.equal(changed, value), (dtype, bit)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            {"kind": "kill", "step": 2},
            "fault_injector.kind=kill injects a fault into the run. Set "
            "fault_injector.confirm=true if that is intended, or fault_injector=none.",
        ),
        (
            {"kind": "kill", "step": 2, "rank": 3, "confirm": True},
            "fault_injector.rank=3: the run has 1 ranks. Use a rank from 0 to 0.",
        ),
        (
            {"kind": "kill", "confirm": True},
            "fault_injector.kind=kill has no time. Set fault_injector.step to a step from 1 to 4.",
        ),
        (
            {"kind": "kill", "step": 2, "seconds": 3, "confirm": True},
            "fault_injector.step=2 and "
            "fault_injector.seconds=3 are two times. Set one of them to none.",
        ),
        (
            {"kind": "kill", "step": 9, "confirm": True},
            "fault_injector.step=9: the run ends at train.steps=4. Use a step from 1 to 4.",
        ),
        (
            {"kind": "nan", "step": 2, "confirm": True, "target": "file"},
            "fault_injector.target=file"
            ": fault_injector.kind=nan changes tensors. Set fault_injector.kind=bit_flip.",
        ),
        (
            {"kind": "slow", "step": 2, "confirm": True, "section": "save"},
            "fault_injector.section="
            "save: the fault fault_injector.kind=slow lasts for a step. Set "
            "fault_injector.section=step.",
        ),
        (
            {"kind": "kill", "step": 2, "confirm": True, "section": "evaluate"},
            "fault_injector.section=evaluate: the run does not evaluate before its last step. Set "
            "train.eval_every to at least 1, or fault_injector.section=step.",
        ),
    ],
)
def test_faults_that_a_run_cannot_have_are_rejected(fault: Mapping[str, object], text: str) -> None:
    settings = {f"fault_injector.{name}": str(value).lower() for name, value in fault.items()}
    assert run_problems(tiny_run(SHORT | settings), 1) == [text]


def test_lines_that_a_kill_has_truncated_count_as_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "injected_faults.jsonl"
    file.write_text('{"rank": 0}\n[]\n{"kind": "kill"}\nx\n{"rank": 0, "ki')
    assert read_injected_faults(tmp_path, 0) == [{"rank": 0}]

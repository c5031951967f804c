"""Two torchrun agents of one rank each, as on two machines, compute what one process computes, also
if the second one joins and dies during the run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.testing.tolerance import CURVE64, FP64
from megalith.train.callbacks.base import Callback, FinishedStep, StepMetrics
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SETTINGS = {"precision.params": "fp64", "optim.eps": "1e-3"}


class SlowSteps(Callback):
    """Slows down a run, so that machines can join and leave it."""

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        """Wait for a tenth of a second."""
        time.sleep(0.1)


def agent(port: int, words: list[str], *, nodes: str = "2") -> "subprocess.Popen[str]":
    """One machine's torchrun. Without the `--`, Python 3.11 takes our --run for a short form of its
    --run-path."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        nodes,
        "--monitor-interval",
        "0.5",
        "--max-restarts",
        "3",
        "--rdzv-conf",
        "last_call_timeout=2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
    ]
    place = [
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-id",
        "tiny",
        "--local-addr",
        "127.0.0.1",
    ]
    return subprocess.Popen(
        [sys.executable, *launcher, *place, "-m", "--", "megalith", "train", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def losses(folder: Path, name: str) -> list[Any]:
    """One column of metrics.jsonl."""
    return [row[name] for row in read_metrics(folder / "metrics.jsonl") if name in row]


@pytest.mark.slow  # two agents and two ranks, each of which imports torch: 10 s on two idle cores
@pytest.mark.parametrize(
    "layout", [{"parallel.dp": "2"}, {"parallel.tp": "2", "parallel.sp": "true"}]
)
def test_two_agents_equal_one_process(tmp_path: Path, layout: dict[str, str]) -> None:
    run_training(
        tiny_run(SETTINGS),
        RunFolder(tmp_path / "one"),
        build_single_rank_mesh(),
        torch.device("cpu"),
        show=False,
    )
    file = tiny_yaml(tmp_path / "tiny.yaml", SETTINGS | layout)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [agent(port, [str(file), "--run", str(tmp_path / "two")]) for _ in range(2)]
    try:
        output = [process.communicate(timeout=200)[0] for process in agents]
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], output
    assert sum("done at step 8" in text for text in output) == 1, output
    for name, relative in (
        ("loss", FP64.relative),
        ("eval_loss", FP64.relative),
        ("grad_norm", CURVE64.relative),
    ):
        assert losses(tmp_path / "two", name) == pytest.approx(
            losses(tmp_path / "one", name), rel=relative
        )
        assert losses(tmp_path / "two", name)


def wait_until(is_true: Callable[[], bool], agents: "list[subprocess.Popen[str]]") -> None:
    """Wait at most two minutes for a condition, while the agents run."""
    end = time.monotonic() + 120
    while not is_true():
        assert time.monotonic() < end, "timeout"
        assert all(process.poll() is None for process in agents), "an agent ended"
        time.sleep(0.2)


def kill_machine(process: "subprocess.Popen[str]") -> None:
    """Kill an agent and its ranks, as the failure of a machine does."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow  # three rendezvous and restarts of the ranks: a minute on idle cores
def test_machine_joins_and_dies_and_the_loss_curve_is_that_of_one_process(tmp_path: Path) -> None:
    settings = SETTINGS | {
        "train.steps": "80",
        "train.global_batch_size": "7",
        "train.micro_batch_size": "1",
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "checkpoint.every": "5",
        "checkpoint.keep": "1",
    }
    run_training(
        tiny_run(settings),
        RunFolder(tmp_path / "one"),
        build_single_rank_mesh(),
        torch.device("cpu"),
        show=False,
    )
    file, folder = tiny_yaml(tmp_path / "tiny.yaml", settings), tmp_path / "elastic"
    words = [str(file), "--run", str(folder), "--callback", f"{__name__}:{SlowSteps.__name__}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    log = folder / "log.txt"
    agents = [agent(port, words, nodes="1:2")]
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and log.exists(), agents)
        agents.append(agent(port, words, nodes="1:2"))
        wait_until(lambda: "dp=2: 1 of 2 ranks idle" in log.read_text(), agents)
        joined_at = len(losses(folder, "loss"))
        wait_until(lambda: len(losses(folder, "loss")) > joined_at + 7, agents)
        kill_machine(agents[1])
        text = agents[0].communicate(timeout=200)[0]
    finally:
        for process in agents:
            process.kill()
    assert agents[0].returncode == 0 and "done at step 80" in text, text
    assert losses(folder, "loss") == pytest.approx(
        losses(tmp_path / "one", "loss"), rel=CURVE64.relative
    )

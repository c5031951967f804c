"""Two torchrun agents of one rank each, as on two machines, compute what one process computes."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.testing.tolerance import CURVE64, FP64
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SETTINGS = {"precision.params": "fp64", "optim.eps": "1e-3"}


def agent(port: int, words: list[str]) -> "subprocess.Popen[str]":
    """One machine's torchrun. Without the `--`, Python 3.11 takes our --run for a short form of its
    --run-path."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
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

"""`megalith routing`: a real run's trace, as tables, as JSON and as a plot."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megalith.cli.main import main
from megalith.config.moe import MoEConfig
from megalith.config.train import TrainRun
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SETTINGS = {
    "train.steps": "2",
    "train.eval_steps": "0",
    "train.eval_every": "none",
    "checkpoint.every": "0",
    "observe.routing_trace": "2",
    "model.num_layers": "3",
}


def trained(folder: Path, captures: str) -> Path:
    """A run of two steps."""
    run: TrainRun = tiny_run(SETTINGS | {"observe.routing_captures": captures})
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=6, layers=(True, False, True))
    run_training(
        replace(run, model=replace(run.model, moe=moe)),
        RunFolder(folder),
        build_single_rank_mesh(),
        CPU,
        show=False,
    )
    return folder


CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "tiny", "[hidden, routers]")


def test_tables_show_layers_and_pairs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routing", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [" ".join(line.split()[:2]) for line in lines]
    assert starts[:3] == ["layer tokens", "layers.0 288", "layers.2 288"]
    assert {"layers.0 layers.2", "layers.0 layers.0", "layers.2 layers.2"} <= {*starts}
    assert lines[-1] == f"drew {run / 'plots' / 'routing.png'}"
    assert (run / "plots" / "routing.png").read_bytes().startswith(b"\x89PNG")


def test_routers_predict_the_experts_of_their_own_layer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["routing", str(run), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in output["layers"]] == ["layers.0", "layers.2"]
    assert all(
        sum(layer["shares"]) == pytest.approx(1) and layer["tokens"] == 288
        for layer in output["layers"]
    )
    (pair,) = output["pairs"]
    assert (pair["layer"], pair["following"], pair["tokens"]) == ("layers.0", "layers.2", 288)
    results = {(one["layer"], one["router"]): one["hits"] for one in output["routers"]}
    assert results["layers.0", "layers.0"] > 0.97 and results["layers.2", "layers.2"] > 0.97, (
        "but for bf16"
    )
    assert 0.5 <= results["layers.0", "layers.2"] < 0.97


def test_missing_captures_are_mentioned_in_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["routing", str(trained(tmp_path / "plain", "[]"))]) == 0
    assert (
        "routers: not captured (set observe.routing_captures to hidden routers)"
        in capsys.readouterr().out
    )


def test_run_without_a_trace_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = tiny_run(SETTINGS | {"observe.routing_trace": "0"})
    run_training(dense, RunFolder(tmp_path / "dense"), build_single_rank_mesh(), CPU, show=False)
    assert main(["routing", str(tmp_path / "dense")]) == 2
    assert (
        "has model.moe=null, so it has no experts. Use a run with model.moe."
        in capsys.readouterr().err
    )
    folder = trained(tmp_path / "plain", "[]")
    (folder / "routing" / "rank_00000.jsonl").unlink()
    assert main(["routing", str(folder)]) == 2
    assert (
        "no routing trace in this folder (rank_00000.jsonl, ...). Run with observe.routing_trace=1."
        in capsys.readouterr().err
    )

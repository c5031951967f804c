"""The recipe moe_tiny."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from megalith.plan.costs import num_parameters
from megalith.recipes import build_recipe
from megalith.rules.run import run_problems


def test_moe_tiny_uses_expert_parallelism_over_two_processes() -> None:
    run = build_recipe("moe_tiny")
    assert run.parallel.ep == 2 and run_problems(run, world=2) == []
    assert 1e6 < num_parameters(run.model) < 3e6
    assert run.train.steps * run.train.global_batch_size * run.train.seq_len < 0.5e6


@pytest.mark.slow  # 30 s on one busy core
def test_fifty_steps_on_two_processes_learn_and_log_expert_load(tmp_path: Path) -> None:
    """From the loss of a guess, ln v, with a vocabulary that so few tokens fill."""
    small = {
        "model.vocab_size": "64",
        "tokenizer.vocab_size": "64",
        "model.hidden_size": "64",
        "model.num_layers": "4",
        "model.ffn_hidden_size": "96",
        "model.moe.ffn_hidden_size": "48",
        "train.seq_len": "64",
        "train.steps": "50",
        "train.eval_every": "50",
        "train.eval_steps": "1",
        "schedule.warmup_steps": "5",
        "observe.plots": "false",
        "data.mock_num_documents": "200",
        "train.log_every": "1",
        "checkpoint.every": "50",
    }
    words = [word for name, value in small.items() for word in (f"--{name}", value)]
    command = [
        sys.executable,
        "-m",
        "megalith",
        "train",
        "moe_tiny",
        "--nproc",
        "2",
        "--run",
        str(tmp_path / "run"),
    ]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert abs(losses[0] - math.log(64)) < 0.2 and losses[-1] < losses[0] - 0.3, (
        losses[0],
        losses[-1],
    )
    output = next(row for row in rows if "moe_max_load" in row)
    assert {
        "moe_batch_loss",
        "moe_z_loss",
        "moe_entropy",
        "moe_idle_experts",
        "moe_layers_1_load",
    } <= output.keys()
    assert "moe_layers_0_load" not in output, "the first layer has no experts"

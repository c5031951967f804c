"""Tests of megalith/cli/pack.py."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megalith.cli.data import main
from megalith.errors import ConfigError, DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SFT = {
    "data.mock": "false",
    "data.sft.mock_conversations": "25",
    "data.sft.template": "identity",
    "train.seq_len": "120",
    "model.max_seq_len": "120",
    "data.sft.overlong": "drop",
    "train.global_batch_size": "4",
    "train.steps": "3",
    "schedule.style": "constant",
    "train.eval_every": "none",
    "train.eval_steps": "0",
}


def packed(tmp_path: Path, *words: str) -> str:
    recipe, output = tiny_yaml(tmp_path / "run.yaml", SFT), str(tmp_path / "packs.npz")
    assert main(["pack", str(recipe), "--output", output, *words]) == 0
    return output


def test_a_run_reads_the_rows_that_were_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = packed(tmp_path)
    printed = capsys.readouterr().out
    assert (
        "rows of 120 tokens" in printed
        and f"use it with --data.sft.packs {output}" in printed
        and "####" in printed
    )
    run = tiny_run({**SFT, "data.sft.packs": output})
    run_training(
        run, RunFolder(tmp_path / "run"), build_single_rank_mesh(), torch.device("cpu"), show=False
    )
    fills = [
        float(row["fill"] or 0)
        for row in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if "fill" in row
    ]
    assert len(fills) == 3 and min(fills) > 0.5


def test_run_with_packs_is_evaluated_on_validation_conversations(tmp_path: Path) -> None:
    run = tiny_run(
        SFT | {"data.sft.packs": packed(tmp_path), "train.eval_every": "3", "train.eval_steps": "1"}
    )
    run_training(
        run, RunFolder(tmp_path / "run"), build_single_rank_mesh(), torch.device("cpu"), show=False
    )
    assert any("eval_loss" in row for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))


def test_same_seed_gives_the_same_packs_and_json_has_the_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = dict(np.load(packed(tmp_path, "--json")))
    printed = json.loads(capsys.readouterr().out)
    assert (
        printed["rows"] >= printed["fewest"]
        and printed["conversations"] == len(first["documents"]) == first["starts"][-1]
    )
    assert sum(count for *_, count in printed["histogram"]) == printed["rows"]
    assert printed["mean"] == pytest.approx(printed["conversations"] / printed["rows"])
    again = dict(np.load(packed(tmp_path, "--overwrite")))
    assert all((first[name] == again[name]).all() for name in first)
    other = dict(np.load(packed(tmp_path, "--overwrite", "--seed", "7")))
    assert not np.array_equal(first["documents"], other["documents"])


def test_invalid_packing_is_rejected(tmp_path: Path) -> None:
    output = packed(tmp_path)
    with pytest.raises(ConfigError, match=r"packs.npz already exists. Pass --overwrite"):
        packed(tmp_path)
    with pytest.raises(
        ConfigError, match=r"reads no conversations \(data.sft.path=\[\]\). Set data.sft.path"
    ):
        main(["pack", str(tiny_yaml(tmp_path / "text.yaml")), "--output", str(tmp_path / "x")])
    with pytest.raises(
        ConfigError, match=r"train.tokens_per_microbatch=240: .* a file of packs is not used"
    ):
        packed(
            tmp_path,
            "--overwrite",
            "--train.tokens_per_microbatch",
            "240",
            "--train.micro_batch_size",
            "1",
        )
    with pytest.raises(DataError, match=r"cannot be written .* Choose another path"):
        main(["pack", str(tmp_path / "run.yaml"), "--output", f"{output}/inside"])
    with pytest.raises(
        ConfigError,
        match=r"prepare is not a subcommand of `megalith data`. Did you mean `megalith prepare`",
    ):
        main(["prepare"])

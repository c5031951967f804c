"""The recipe lora_tiny continues from sft_tiny, on ranks as in one process."""

from dataclasses import replace
from pathlib import Path

import torch

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.recipes import build_recipe
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

SHORT = {
    "train.steps": "2",
    "train.global_batch_size": "2",
    "train.micro_batch_size": "2",
    "train.eval_steps": "0",
}


def small(run: TrainRun, folder: Path) -> TrainRun:
    """Two steps of a smaller model."""
    model: ModelConfig = replace(run.model, hidden_size=24, num_layers=2, ffn_hidden_size=20)
    checkpoint = replace(
        run.checkpoint, load=run.checkpoint.load and str(folder / run.checkpoint.load)
    )
    return replace(apply_overrides(run, SHORT), model=model, checkpoint=checkpoint)


def test_adapters_train_on_the_base_run(tmp_path: Path) -> None:
    for recipe in (build_recipe("sft_tiny"), build_recipe("lora_tiny")):
        path = tmp_path / "runs" / recipe.name
        run_training(
            small(recipe, tmp_path),
            RunFolder(path),
            build_single_rank_mesh(),
            torch.device("cpu"),
            show=False,
        )
    rows = [row for row in read_metrics(tmp_path / "runs/lora_tiny/metrics.jsonl") if "loss" in row]
    assert len(rows) == 2 and all(0 < float(row["supervised_share"] or 0) < 1 for row in rows)


def test_model_of_lora_tiny_is_that_of_its_base() -> None:
    assert (
        build_recipe("lora_tiny").model == build_recipe("sft_tiny").model
        and build_recipe("lora_tiny").checkpoint.load == "runs/sft_tiny"
    )

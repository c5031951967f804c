"""A tiny training run for tests, with all components of a real one, that takes a fraction of a
second."""

from collections.abc import Mapping
from pathlib import Path

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.train import LoopConfig, ObserveConfig, TrainRun
from megalith.config.tree import Override, apply_overrides, save_yaml


def tiny_run(overrides: Mapping[str, Override] | None = None) -> TrainRun:
    """Return a run of eight steps of 12 rows (dp 1, 2, 3 and 6 divide them) on mock data, with
    dotted settings overridden.

    Sizes are no powers of two, the vocabulary is padded, and heads share keys; evaluates and saves
    every other step. Plots, TensorBoard files and the measurement of the machine's peak, which cost
    more than the run, are off.
    """
    run = TrainRun(
        name="tiny",
        model=ModelConfig(
            vocab_size=257,
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            ffn_hidden_size=20,
            max_seq_len=32,
        ),
        data=DataConfig(mock=True, mock_num_documents=300, mock_max_tokens=60),
        train=LoopConfig(
            steps=8,
            global_batch_size=12,
            micro_batch_size=2,
            seq_len=12,
            eval_every=4,
            eval_steps=1,
            threads=1,
        ),
        schedule=ScheduleConfig(lr=1e-2, warmup_steps=1),
        checkpoint=CheckpointConfig(every=2),
        observe=ObserveConfig(tensorboard=False, plots=False, peak_tflops=1.0),
    )
    return apply_overrides(run, overrides or {})


def tiny_yaml(path: Path, overrides: Mapping[str, Override] | None = None) -> Path:
    """Write `tiny_run` as a YAML file, for commands."""
    save_yaml(tiny_run(overrides), path)
    return path

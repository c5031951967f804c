"""Shared parts of recipes of published models: pretraining on mock data until text is given.

Learning rates are those of the authors where published, and ours where a recipe says so.
"""

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import PrecisionConfig, ScheduleConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun

ALONE = ParallelConfig()


def pretraining(
    name: str,
    model: ModelConfig,
    schedule: ScheduleConfig,
    *,
    seq_len: int = 4096,
    global_batch_size: int = 512,
    steps: int = 100_000,
    parallel: ParallelConfig = ALONE,
) -> TrainRun:
    """Return a pretraining run of a published model from random weights; for text, pass
    `--data.mock false --data.path PREFIX`."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=model.vocab_size),
        train=LoopConfig(steps=steps, global_batch_size=global_batch_size, seq_len=seq_len),
        schedule=schedule,
        parallel=parallel,
        precision=PrecisionConfig(params="bf16"),
        checkpoint=CheckpointConfig(every=1000),
    )


def warmed_cosine(lr: float, *, warmup: int = 2000) -> ScheduleConfig:
    """Return a schedule of linear warmup and cosine decay to 10 % of the peak."""
    return ScheduleConfig(lr=lr, min_lr=lr / 10, warmup_steps=warmup)

"""Adapters for the small model that answers sums: seconds on any machine, once `sft_tiny` has been
trained."""

from dataclasses import replace

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.lora import LoraConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.sft import SFTConfig
from megalith.config.train import TrainRun
from megalith.recipes.sft_tiny import sft_tiny


def lora_tiny() -> TrainRun:
    """More sums, of which adapters beside the weights of runs/sft_tiny learn; these stay as they
    are.

    Set `data.sft.path` and `checkpoint.load` to tune a model of your own, whose folder or
    checkpoint is its recipe.
    """
    base = sft_tiny()
    return replace(
        base,
        name="lora_tiny",
        lora=LoraConfig(rank=8, alpha=16.0, dropout=0.05),
        data=DataConfig(sft=SFTConfig(mock_conversations=1200, template="chatml")),
        train=replace(base.train, steps=40, eval_every=20),
        schedule=ScheduleConfig(lr=5e-3, min_lr=5e-4, warmup_steps=0.125),
        checkpoint=CheckpointConfig(every=20, load="runs/sft_tiny"),
    )

"""LoRA adapters for the small arithmetic model of `sft_tiny`; trains in seconds after
`sft_tiny`."""

from dataclasses import replace

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.lora import LoraConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.sft import SFTConfig
from megalith.config.train import TrainRun
from megalith.recipes.sft_tiny import sft_tiny


def lora_tiny() -> TrainRun:
    """LoRA fine-tuning of the frozen model of runs/sft_tiny on more sums.

    To tune your own model, set `data.sft.path` and `checkpoint.load`; the recipe is the model's run
    folder or checkpoint.
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

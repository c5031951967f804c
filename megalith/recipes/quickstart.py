"""Recipe of `megalith quickstart`: a small GPT on text, trained in minutes on two CPU cores."""

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun


def quickstart() -> TrainRun:
    """Small GPT of `megalith quickstart`.

    1.0M tokens; the command replaces the mock data with its own corpus and tokenizer.
    """
    vocab_size = 4096
    return TrainRun(
        name="quickstart",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=160,
            num_layers=5,
            num_heads=5,
            num_kv_heads=5,
            ffn_hidden_size=448,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(
            steps=976,
            global_batch_size=4,
            micro_batch_size=2,
            seq_len=256,
            eval_every=244,
            eval_steps=16,
        ),
        schedule=ScheduleConfig(lr=2.5e-3, min_lr=1e-4, warmup_steps=0.0615),
    )

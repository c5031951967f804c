"""First run: a small model on mock data; trains in seconds on any machine."""

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun


def tiny_cpu() -> TrainRun:
    """Small model that learns to count in half a minute on a CPU.

    Uses mock data, so nothing is downloaded.
    """
    return TrainRun(
        name="tiny_cpu",
        model=ModelConfig(
            vocab_size=257,  # byte tokenizer: 256 bytes and the end-of-document token
            hidden_size=256,
            num_layers=6,
            num_heads=8,
            num_kv_heads=4,
            ffn_hidden_size=768,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True, mock_num_documents=1000, mock_max_tokens=512),
        train=LoopConfig(
            steps=40,
            global_batch_size=8,
            micro_batch_size=4,
            seq_len=128,
            eval_every=20,
            eval_steps=2,
        ),
        schedule=ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0.125),
        checkpoint=CheckpointConfig(every=20),
    )

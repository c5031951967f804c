"""SmolLM: a deep and narrow model for phones and laptops. Source: the model card of SmolLM-135M, Hugging Face, 2024."""

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import PrecisionConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun


def smollm_135m() -> TrainRun:
    """SmolLM 135M: deep and narrow.

    600B tokens, the last fifth of them with a falling learning rate.
    """
    vocab_size = 49_152
    return TrainRun(
        name="smollm_135m",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            ffn_hidden_size=1536,
            max_seq_len=2048,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(steps=600_000, global_batch_size=512, micro_batch_size=8, seq_len=2048, log_every=10),
        schedule=ScheduleConfig(
            lr=3e-3, style="wsd", warmup_steps=5000, wsd_decay_steps=120_000, wsd_decay_style="linear"
        ),
        precision=PrecisionConfig(params="bf16"),
    )

"""SmolLM: small models for phones and laptops. Source: the model cards of SmolLM-135M (2024) and
SmolLM3-3B (2025)."""

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import PrecisionConfig
from megalith.config.rope import RopeConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.recipes.published import pretraining


def smollm_135m() -> TrainRun:
    """SmolLM 135M: deep and narrow.

    600B tokens, the last fifth with a decaying learning rate.
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
        train=LoopConfig(
            steps=600_000, global_batch_size=512, micro_batch_size=8, seq_len=2048, log_every=10
        ),
        schedule=ScheduleConfig(
            lr=3e-3,
            style="wsd",
            warmup_steps=5000,
            wsd_decay_steps=120_000,
            wsd_decay_style="linear",
        ),
        precision=PrecisionConfig(params="bf16"),
    )


def smollm3_3b() -> TrainRun:
    """SmolLM3 3B: no RoPE in every fourth layer.

    2.4 million tokens per step, 11T in total, the last tenth with a decaying learning rate. The
    context is that of the final model, 65,536 tokens; its theta was 50,000 while rows had 4096.
    """
    model = ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        ffn_hidden_size=11_008,
        max_seq_len=65_536,
        norm_eps=1e-6,
        rope=RopeConfig(theta=5_000_000.0, skip=(False, False, False, True)),
        tied_embeddings=True,
    )
    schedule = ScheduleConfig(
        lr=2e-4, style="wsd", warmup_steps=2000, wsd_decay_steps=472_000, wsd_decay_style="linear"
    )
    return pretraining("smollm3_3b", model, schedule, global_batch_size=576, steps=4_720_000)

"""Phi-3 in its smallest size. Source: Abdin et al. 2024, arXiv:2404.14219."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def phi3_mini() -> TrainRun:
    """Phi-3 mini (4k) on 2 GPUs (tp 2); the learning rate is ours."""
    model = ModelConfig(
        vocab_size=32_064,
        hidden_size=3072,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        ffn_hidden_size=8192,
        max_seq_len=4096,
        attention=AttentionConfig(window=2047),
    )
    return pretraining(
        "phi3_mini", model, warmed_cosine(3e-4), parallel=ParallelConfig(tp=2, sp=True)
    )

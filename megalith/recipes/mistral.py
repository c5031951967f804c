"""Mistral 7B, in the size that its paper gives. Source: Jiang et al. 2023, arXiv:2310.06825."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def mistral_7b() -> TrainRun:
    """Mistral 7B (v0.1) over 2 GPUs: every layer sees the last 4096 tokens, and rows are twice as
    long.

    The learning rate, which the authors did not tell, is ours.
    """
    model = ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14_336,
        max_seq_len=32_768,
        attention=AttentionConfig(window=4096),
    )
    return pretraining(
        "mistral_7b",
        model,
        warmed_cosine(3e-4),
        seq_len=8192,
        parallel=ParallelConfig(tp=2, sp=True),
    )

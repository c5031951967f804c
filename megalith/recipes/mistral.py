"""Mistral 7B with the sizes of its paper. Source: Jiang et al. 2023, arXiv:2310.06825."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def mistral_7b() -> TrainRun:
    """Mistral 7B (v0.1) on 2 GPUs: sliding window of 4096 tokens in every layer, rows of twice that
    length.

    The learning rate is not in the paper; it is ours.
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

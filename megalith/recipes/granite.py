"""Granite 3 in its smallest dense size. Source: the release of Granite 3, IBM, 2024 and 2025."""

from megalith.config.attention import AttentionConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def granite_2b() -> TrainRun:
    """Granite 3 2B: scaled embeddings, attention scores, residuals and logits; the learning rate
    is ours."""
    model = ModelConfig(
        vocab_size=49_155,
        hidden_size=2048,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=8192,
        max_seq_len=131_072,
        rope=RopeConfig(theta=5_000_000.0),
        attention=AttentionConfig(scale=1 / 64),
        dropout=DropoutConfig(attention=0.1),
        embedding_scale=12.0,
        residual_scale=0.22,
        logit_scale=1 / 8,
        tied_embeddings=True,
    )
    return pretraining("granite_2b", model, warmed_cosine(4e-4))

"""StarCoder2 in its smallest size. Source: Lozhkov et al. 2024, arXiv:2402.19173."""

from megalith.config.attention import AttentionConfig
from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def starcoder2_3b() -> TrainRun:
    """StarCoder2 3B: two KV heads, sliding window in every layer, ungated MLP. The learning rate
    is ours."""
    model = ModelConfig(
        vocab_size=49_152,
        hidden_size=3072,
        num_layers=30,
        num_heads=24,
        num_kv_heads=2,
        ffn_hidden_size=12_288,
        max_seq_len=16_384,
        norm="layer",
        rope=RopeConfig(theta=999_999.4420358813),
        attention=AttentionConfig(window=4096),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1),
        tied_embeddings=True,
        init_std=0.018042,
    )
    return pretraining("starcoder2_3b", model, warmed_cosine(3e-4))

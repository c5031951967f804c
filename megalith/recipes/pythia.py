"""Pythia, trained as its authors did. Source: Biderman et al. 2023, arXiv:2304.01373, section 2 and
appendix E."""

from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def pythia_160m() -> TrainRun:
    """Pythia 160M: parallel attention and MLP, RoPE on a quarter of the features; 143000 steps
    of 2M tokens."""
    model = ModelConfig(
        vocab_size=50_304,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        ffn_hidden_size=3072,
        max_seq_len=2048,
        norm="layer",
        block="parallel",
        rope=RopeConfig(fraction=0.25),
        activation="gelu",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )
    schedule = warmed_cosine(6e-4, warmup=1430)
    return pretraining(
        "pythia_160m", model, schedule, seq_len=2048, global_batch_size=1024, steps=143_000
    )

"""Qwen3 in three of its published sizes. Source: Yang et al. 2025, arXiv:2505.09388."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def qwen3_0_6b() -> TrainRun:
    """Qwen3 0.6B: heads of size 128, QK norm, tied embeddings.

    The learning rate is ours: the report says only that theirs follows scaling laws.
    """
    model = ModelConfig(
        vocab_size=151_936,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=3072,
        max_seq_len=40_960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        attention=AttentionConfig(qk_norm="head"),
        tied_embeddings=True,
    )
    return pretraining("qwen3_0_6b", model, warmed_cosine(6e-4))


def qwen3_8b() -> TrainRun:
    """Qwen3 8B on 2 GPUs (tp 2); the learning rate is ours."""
    model = ModelConfig(
        vocab_size=151_936,
        hidden_size=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=12_288,
        max_seq_len=40_960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        attention=AttentionConfig(qk_norm="head"),
    )
    return pretraining(
        "qwen3_8b", model, warmed_cosine(3e-4), parallel=ParallelConfig(tp=2, sp=True)
    )


def qwen3_30b_a3b() -> TrainRun:
    """Qwen3 30B-A3B on 16 GPUs: ep 8, with 16 of the 128 experts of each layer per GPU, and 2
    pipeline stages.

    3.4B of 30.5B parameters are active per token. Aux loss over the global batch, as in the report;
    its coefficient and the learning rate are ours.
    """
    model = ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_hidden_size=6144,
        max_seq_len=40_960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        attention=AttentionConfig(qk_norm="head"),
        moe=MoEConfig(
            num_experts=128,
            top_k=8,
            ffn_hidden_size=768,
            aux_loss=AuxLossConfig(global_batch_coeff=1e-3),
        ),
    )
    parallel = ParallelConfig(ep=8, pp=2, zero=1)
    return pretraining("qwen3_30b_a3b", model, warmed_cosine(3e-4), parallel=parallel)

"""Qwen1.5-MoE, Qwen2 and Qwen3 in some of their published sizes.

Sources: Yang et al. 2024, arXiv:2407.10671; Yang et al. 2025, arXiv:2505.09388.
"""

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.small import pretraining, warmed_cosine


def qwen2_7b() -> TrainRun:
    """Qwen2 7B on 2 GPUs (tp 2): 28 query heads with biases, 4 KV heads. Qwen2.5 7B has the same
    sizes."""
    model = ModelConfig(
        vocab_size=152_064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        ffn_hidden_size=18_944,
        max_seq_len=32_768,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        qkv_bias=True,
    )
    return pretraining(
        "qwen2_7b", model, warmed_cosine(3e-4), parallel=ParallelConfig(tp=2, sp=True)
    )


def qwen1_5_moe_a2_7b() -> TrainRun:
    """Qwen1.5-MoE-A2.7B on 8 GPUs: ep 4, with 15 of the 60 experts of each layer per GPU, and 2
    pipeline stages.

    2.7B of 14.3B parameters are active per token. Four shared experts are one gated MLP; the aux
    loss coefficient is that of the released config.
    """
    model = ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden_size=5632,
        max_seq_len=8192,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        qkv_bias=True,
        moe=MoEConfig(
            num_experts=60,
            top_k=4,
            ffn_hidden_size=1408,
            shared_ffn_hidden_size=5632,
            shared_gate=True,
            router=RouterConfig(norm_topk_prob=False),
            aux_loss=AuxLossConfig(batch_coeff=0.001),
        ),
    )
    parallel = ParallelConfig(ep=4, pp=2, zero=1)
    return pretraining("qwen1_5_moe_a2_7b", model, warmed_cosine(3e-4), parallel=parallel)


# Qwen3 in three of its published sizes. Source: Yang et al. 2025, arXiv:2505.09388.


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

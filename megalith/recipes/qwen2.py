"""Qwen2 7B and Qwen1.5-MoE-A2.7B. Source: Yang et al. 2024, arXiv:2407.10671.

The reports give no learning rates; those here are ours.
"""

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


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

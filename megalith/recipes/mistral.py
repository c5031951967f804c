"""Mistral 7B and Mixtral 8x7B with the sizes of their papers.

Sources: Jiang et al. 2023, arXiv:2310.06825; Jiang et al. 2024, arXiv:2401.04088.
"""

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.small import pretraining, warmed_cosine


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


# Mixtral 8x7B with the sizes of its paper. Source: Jiang et al. 2024, arXiv:2401.04088.


def mixtral_8x7b() -> TrainRun:
    """Mixtral 8x7B on 32 GPUs: ep 8, one expert of each layer per GPU, and 4 pipeline stages.

    12.9B of 46.7B parameters are active per token. The learning rate is not in the paper and is
    ours; the aux loss coefficient is that of the released config.
    """
    model = ModelConfig(
        vocab_size=32_000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14_336,
        max_seq_len=32_768,
        rope=RopeConfig(theta=1_000_000.0),
        moe=MoEConfig(
            num_experts=8, top_k=2, ffn_hidden_size=14_336, aux_loss=AuxLossConfig(batch_coeff=0.02)
        ),
    )
    parallel = ParallelConfig(ep=8, pp=4, zero=1)
    return pretraining("mixtral_8x7b", model, warmed_cosine(3e-4), parallel=parallel)

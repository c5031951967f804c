"""Mixtral 8x7B, in the size that its paper gives. Source: Jiang et al. 2024, arXiv:2401.04088."""

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def mixtral_8x7b() -> TrainRun:
    """Mixtral 8x7B over 32 GPUs: an expert of each layer on each of 8, the layers in 4 stages.

    A token meets 12.9 of 46.7 billion parameters. The learning rate, which the authors did not
    tell, is ours; the weight of the balancing loss is that of the released settings.
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

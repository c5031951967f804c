"""OLMoE with the sizes of its paper. Source: Muennighoff et al. 2024, arXiv:2409.02060."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def olmoe_7b() -> TrainRun:
    """OLMoE 1B-7B on 8 GPUs: ep 8, with 8 of the 64 experts of each layer per GPU.

    1.3B of 6.9B parameters are active per token. 4 million tokens per step, the learning rate and
    the aux losses are those of the paper (appendix B).
    """
    model = ModelConfig(
        vocab_size=50_304,
        hidden_size=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden_size=1024,
        max_seq_len=4096,
        attention=AttentionConfig(qk_norm="whole"),
        moe=MoEConfig(
            num_experts=64,
            top_k=8,
            ffn_hidden_size=1024,
            router=RouterConfig(norm_topk_prob=False),
            aux_loss=AuxLossConfig(batch_coeff=0.01, z_loss_coeff=0.001),
        ),
    )
    parallel = ParallelConfig(ep=8, zero=1)
    return pretraining(
        "olmoe_7b", model, warmed_cosine(4e-4), global_batch_size=1024, parallel=parallel
    )

"""DeepSeek-V2 and V3 with the sizes of their reports.

Source: DeepSeek-AI 2024, arXiv:2405.04434 (V2, section 3.1; V2-Lite, appendix B) and
arXiv:2412.19437 (V3).
"""

from dataclasses import replace

from megalith.config.model import MLAConfig, ModelConfig, MTPConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.recipes.small import pretraining, warmed_cosine


def deepseek_v2_lite() -> TrainRun:
    """DeepSeek-V2-Lite on 8 GPUs: ep 8, with 8 of the 64 experts of each layer per GPU.

    2.7B of 15.7B parameters are active per token. Batch size, learning rate and load balancing are
    those of the report, which decayed the learning rate in two steps and used rows of 4096 tokens
    before context extension.
    """
    model = ModelConfig(
        vocab_size=102_400,
        hidden_size=2048,
        num_layers=27,
        num_heads=16,
        num_kv_heads=16,
        ffn_hidden_size=10_944,
        max_seq_len=4096,
        norm_eps=1e-6,
        init_std=0.006,
        rope=RopeConfig(interleaved=True),
        mla=MLAConfig(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
        moe=MoEConfig(
            num_experts=64,
            top_k=6,
            ffn_hidden_size=1408,
            layers=(False, *(True,) * 26),
            shared_ffn_hidden_size=2 * 1408,
            router=RouterConfig(norm_topk_prob=False),
            aux_loss=AuxLossConfig(sequence_coeff=1e-3),
        ),
    )
    parallel = ParallelConfig(ep=8, zero=1)
    return pretraining(
        "deepseek_v2_lite", model, warmed_cosine(4.2e-4), global_batch_size=4608, parallel=parallel
    )


def deepseek_v2() -> TrainRun:
    """DeepSeek-V2 on 128 GPUs or more: ep 8, with 20 of the 160 experts of each layer per GPU, and
    16 pipeline stages.

    21.4B of 235.7B parameters are active per token, with experts from 3 of 8 groups. Layout, final
    batch size, learning rate and aux losses are those of the report, which started with a quarter
    of the batch, decayed the learning rate in two steps, and also balanced computation and
    communication of devices.
    """
    model = ModelConfig(
        vocab_size=102_400,
        hidden_size=5120,
        num_layers=60,
        num_heads=128,
        num_kv_heads=128,
        ffn_hidden_size=12_288,
        max_seq_len=4096,
        norm_eps=1e-6,
        init_std=0.006,
        rope=RopeConfig(interleaved=True),
        mla=MLAConfig(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
        moe=MoEConfig(
            num_experts=160,
            top_k=6,
            ffn_hidden_size=1536,
            layers=(False, *(True,) * 59),
            shared_ffn_hidden_size=2 * 1536,
            router=RouterConfig(
                norm_topk_prob=False,
                routed_scaling_factor=16.0,
                num_groups=8,
                topk_groups=3,
                group_score="max",
            ),
            aux_loss=AuxLossConfig(sequence_coeff=3e-3),
        ),
    )
    # The output head costs as much compute as 1.5 layers.
    stages = PipelineConfig(layout=f"Ettt|{'tttt|' * 13}ttt|ttL")
    parallel = ParallelConfig(ep=8, pp=16, pipeline=stages, zero=1)
    run = pretraining(
        "deepseek_v2", model, warmed_cosine(2.4e-4), global_batch_size=9216, parallel=parallel
    )
    return replace(run, recompute=RecomputeConfig(granularity="full"))


def deepseek_v3() -> TrainRun:
    """DeepSeek-V3 on 1024 GPUs or more: ep 64, with 4 of the 256 experts of each layer per GPU, and
    16 pipeline stages.

    37.6B of 671.0B parameters are active per token, without the MTP layer. Batch size, learning
    rate and load balancing as in sections 4.2 and 4.3 of the report, which used 2048 GPUs and a
    long constant phase before the decay. Rows have 4096 tokens, as before context extension.
    """
    model = ModelConfig(
        vocab_size=129_280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        ffn_hidden_size=18_432,
        max_seq_len=4096,
        norm_eps=1e-6,
        init_std=0.006,
        rope=RopeConfig(interleaved=True),
        mla=MLAConfig(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
        moe=MoEConfig(
            num_experts=256,
            top_k=8,
            ffn_hidden_size=2048,
            layers=(*(False,) * 3, *(True,) * 58),
            shared_ffn_hidden_size=2048,
            router=RouterConfig(
                score="sigmoid",
                routed_scaling_factor=2.5,
                num_groups=8,
                topk_groups=4,
                expert_bias=True,
            ),
            aux_loss=AuxLossConfig(sequence_coeff=1e-4),
        ),
        mtp=MTPConfig(num_layers=1, loss_weight=0.3),
    )
    # The last stage has one layer, the head and the MTP layer, which computes the head again.
    stages = PipelineConfig(layout=f"Etttt|{'tttt|' * 14}tmL")
    parallel = ParallelConfig(ep=64, pp=16, pipeline=stages, zero=1)
    run = pretraining(
        "deepseek_v3", model, warmed_cosine(2.2e-4), global_batch_size=15_360, parallel=parallel
    )
    return replace(run, recompute=RecomputeConfig(granularity="full"))

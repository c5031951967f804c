"""DeepSeek-V3, in the size that its report gives. Source: DeepSeek-AI 2024, arXiv:2412.19437."""

from dataclasses import replace

from megalith.config.mla import MLAConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import BalanceConfig, MoEConfig, RouterConfig
from megalith.config.mtp import MTPConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.config.recompute import RecomputeConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def deepseek_v3() -> TrainRun:
    """DeepSeek-V3 over 1024 GPUs or more: 4 of the 256 experts of each layer on each of 64, the layers in 16 stages.

    A token meets 37.6 of 671.0 billion parameters, those of the further prediction not counted. Batch, learning rate
    and balance as in sections 4.2 and 4.3 of the report, which trained on 2048 GPUs and held the rate for long before
    it fell. As there, rows are 4096 tokens long before positions are stretched.
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
            experts=256, top_k=8, ffn_hidden_size=2048, layers=(*(False,) * 3, *(True,) * 58),
            shared_ffn_hidden_size=2048,
            router=RouterConfig(score="sigmoid", scale=2.5, groups=8, top_groups=4, balancing_bias=True),
            balance=BalanceConfig(sequence=1e-4),
        ),
        mtp=MTPConfig(depths=1, loss_weight=0.3),
    )  # fmt: skip
    # The last stage has one layer beside the head and the prediction, which is a layer and the head once more.
    stages = PipelineConfig(layout=f"Etttt|{'tttt|' * 14}tL")
    parallel = ParallelConfig(ep=64, pp=16, pipeline=stages, zero=1)
    run = pretraining("deepseek_v3", model, warmed_cosine(2.2e-4), global_batch_size=15_360, parallel=parallel)
    return replace(run, recompute=RecomputeConfig(granularity="full"))

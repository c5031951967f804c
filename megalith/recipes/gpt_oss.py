"""gpt-oss 20B with the sizes of its model card. Source: OpenAI 2025, arXiv:2508.10925."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def gpt_oss_20b() -> TrainRun:
    """gpt-oss 20B on 8 GPUs: ep 8, with 4 of the 32 experts of each layer per GPU.

    4.2B of 20.9B parameters, including embeddings, are active per token. Training settings are not
    published: the learning rate and the aux loss are ours.
    """
    model = ModelConfig(
        vocab_size=201_088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn_hidden_size=2880,
        max_seq_len=131_072,
        rope=RopeConfig(
            theta=150_000.0,
            scaling="yarn",
            factor=32.0,
            original_max_position=4096,
            whole_pairs=False,
        ),
        attention=AttentionConfig(window=128, window_layers=(True, False), sinks=True),
        activation="quick_gelu",
        activation_clamp=7.0,
        up_offset=1.0,
        qkv_bias=True,
        output_bias=True,
        moe=MoEConfig(
            num_experts=32,
            top_k=4,
            ffn_hidden_size=2880,
            biases=True,
            router=RouterConfig(bias=True),
            aux_loss=AuxLossConfig(batch_coeff=0.01),
        ),
    )
    parallel = ParallelConfig(ep=8, zero=1)
    return pretraining("gpt_oss_20b", model, warmed_cosine(3e-4), parallel=parallel)

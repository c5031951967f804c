"""GPT-2, gpt-oss 20B and Pythia in some of their published sizes.

Sources: Radford et al. 2019; OpenAI 2025, arXiv:2508.10925; Biderman et al. 2023, arXiv:2304.01373.
"""

from megalith.config.model import AttentionConfig, DropoutConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.small import pretraining, warmed_cosine


def gpt2_124m() -> TrainRun:
    """GPT-2 small: learned position embeddings, LayerNorm, biases, dropout.

    The learning rate is not in the paper; it is that of the same size in Brown et al. 2020,
    arXiv:2005.14165, table 2.1.
    """
    model = ModelConfig(
        vocab_size=50_257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        ffn_hidden_size=3072,
        max_seq_len=1024,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1),
        tied_embeddings=True,
    )
    return pretraining("gpt2_124m", model, warmed_cosine(6e-4), seq_len=1024)


# gpt-oss 20B with the sizes of its model card. Source: OpenAI 2025, arXiv:2508.10925.


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


# Pythia, trained as its authors did. Source: Biderman et al. 2023, arXiv:2304.01373, section 2 and
# appendix E.


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

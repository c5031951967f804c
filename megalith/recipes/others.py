"""OLMo 2, OLMoE, Phi-3, Granite 3, SmolLM and StarCoder2 in some of their published sizes.

Rows, batch sizes, learning rates and the warmup over 8.4 billion tokens are those of the configs
released with the weights.
"""

from megalith.config.data import DataConfig
from megalith.config.model import AttentionConfig, DropoutConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.optim import PrecisionConfig, ScheduleConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.recipes.small import pretraining, warmed_cosine


def olmo2_1b() -> TrainRun:
    """OLMo 2 1B: 2 million tokens per step."""
    model = _model(hidden=2048, layers=16, heads=16, ffn=8192)
    return pretraining("olmo2_1b", model, warmed_cosine(4e-4, warmup=4000), global_batch_size=512)


def olmo2_7b() -> TrainRun:
    """OLMo 2 7B on 2 GPUs (tp 2): 4 million tokens per step."""
    model = _model(hidden=4096, layers=32, heads=32, ffn=11_008)
    parallel = ParallelConfig(tp=2, sp=True)
    return pretraining(
        "olmo2_7b", model, warmed_cosine(3e-4), global_batch_size=1024, parallel=parallel
    )


def olmo2_13b() -> TrainRun:
    """OLMo 2 13B on 4 GPUs (tp 4): 8 million tokens per step."""
    model = _model(hidden=5120, layers=40, heads=40, ffn=13_824)
    parallel = ParallelConfig(tp=4, sp=True)
    return pretraining(
        "olmo2_13b",
        model,
        warmed_cosine(3e-4, warmup=1000),
        global_batch_size=2048,
        parallel=parallel,
    )


def _model(*, hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=100_352,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_hidden_size=ffn,
        max_seq_len=4096,
        norm_eps=1e-6,
        norm_placement="after",
        rope=RopeConfig(theta=500_000.0),
        attention=AttentionConfig(qk_norm="whole"),
    )


# OLMoE with the sizes of its paper. Source: Muennighoff et al. 2024, arXiv:2409.02060.


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


# Phi-3 in its smallest size. Source: Abdin et al. 2024, arXiv:2404.14219.


def phi3_mini() -> TrainRun:
    """Phi-3 mini (4k) on 2 GPUs (tp 2); the learning rate is ours."""
    model = ModelConfig(
        vocab_size=32_064,
        hidden_size=3072,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        ffn_hidden_size=8192,
        max_seq_len=4096,
        attention=AttentionConfig(window=2047),
    )
    return pretraining(
        "phi3_mini", model, warmed_cosine(3e-4), parallel=ParallelConfig(tp=2, sp=True)
    )


# Granite 3 in its smallest dense size. Source: the release of Granite 3, IBM, 2024 and 2025.


def granite_2b() -> TrainRun:
    """Granite 3 2B: scaled embeddings, attention scores, residuals and logits; the learning rate
    is ours."""
    model = ModelConfig(
        vocab_size=49_155,
        hidden_size=2048,
        num_layers=40,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=8192,
        max_seq_len=131_072,
        rope=RopeConfig(theta=5_000_000.0),
        attention=AttentionConfig(scale=1 / 64),
        dropout=DropoutConfig(attention=0.1),
        embedding_scale=12.0,
        residual_scale=0.22,
        logit_scale=1 / 8,
        tied_embeddings=True,
    )
    return pretraining("granite_2b", model, warmed_cosine(4e-4))


# SmolLM: small models for phones and laptops. Source: the model cards of SmolLM-135M (2024) and
# SmolLM3-3B (2025).


def smollm_135m() -> TrainRun:
    """SmolLM 135M: deep and narrow.

    600B tokens, the last fifth with a decaying learning rate.
    """
    vocab_size = 49_152
    return TrainRun(
        name="smollm_135m",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=576,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            ffn_hidden_size=1536,
            max_seq_len=2048,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(
            steps=600_000, global_batch_size=512, micro_batch_size=8, seq_len=2048, log_every=10
        ),
        schedule=ScheduleConfig(
            lr=3e-3,
            style="wsd",
            warmup_steps=5000,
            wsd_decay_steps=120_000,
            wsd_decay_style="linear",
        ),
        precision=PrecisionConfig(params="bf16"),
    )


def smollm3_3b() -> TrainRun:
    """SmolLM3 3B: no RoPE in every fourth layer.

    2.4 million tokens per step, 11T in total, the last tenth with a decaying learning rate. The
    context is that of the final model, 65,536 tokens; its theta was 50,000 while rows had 4096.
    """
    model = ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        num_layers=36,
        num_heads=16,
        num_kv_heads=4,
        ffn_hidden_size=11_008,
        max_seq_len=65_536,
        norm_eps=1e-6,
        rope=RopeConfig(theta=5_000_000.0, skip=(False, False, False, True)),
        tied_embeddings=True,
    )
    schedule = ScheduleConfig(
        lr=2e-4, style="wsd", warmup_steps=2000, wsd_decay_steps=472_000, wsd_decay_style="linear"
    )
    return pretraining("smollm3_3b", model, schedule, global_batch_size=576, steps=4_720_000)


# StarCoder2 in its smallest size. Source: Lozhkov et al. 2024, arXiv:2402.19173.


def starcoder2_3b() -> TrainRun:
    """StarCoder2 3B: two KV heads, sliding window in every layer, ungated MLP. The learning rate
    is ours."""
    model = ModelConfig(
        vocab_size=49_152,
        hidden_size=3072,
        num_layers=30,
        num_heads=24,
        num_kv_heads=2,
        ffn_hidden_size=12_288,
        max_seq_len=16_384,
        norm="layer",
        rope=RopeConfig(theta=999_999.4420358813),
        attention=AttentionConfig(window=4096),
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1),
        tied_embeddings=True,
        init_std=0.018042,
    )
    return pretraining("starcoder2_3b", model, warmed_cosine(3e-4))

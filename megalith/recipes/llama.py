"""Llama 2, Llama 3.1 and 3.2, and Llama 4 Scout in their published sizes.

Sources: Touvron et al. 2023, arXiv:2307.09288; Grattafiori et al. 2024, arXiv:2407.21783; Meta
2025, "The Llama 4 herd".
"""

from dataclasses import replace

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.optim import OptimConfig, PrecisionConfig, ScheduleConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.recipes.small import pretraining, warmed_cosine

_VOCAB_SIZE = 128_256
_CONTEXT = 131_072  # reached with RoPE scaling; pretraining uses 8192 tokens


def llama3_1b() -> TrainRun:
    """Llama 3.2 1B, with tied embeddings."""
    model = ModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=8192,
        max_seq_len=_CONTEXT,
        rope=_rope(factor=32.0),
        tied_embeddings=True,
    )
    # The published 1B model was distilled; we use the learning rate of the 8B model.
    return _run("llama3_1b", model, ParallelConfig(), global_batch_size=512, lr=3e-4, min_lr=3e-6)


def llama3_8b() -> TrainRun:
    """Llama 3.1 8B on 2 GPUs (tp 2)."""
    model = ModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14_336,
        max_seq_len=_CONTEXT,
        rope=_rope(factor=8.0),
    )
    return _run(
        "llama3_8b",
        model,
        ParallelConfig(tp=2, sp=True),
        global_batch_size=512,
        lr=3e-4,
        min_lr=3e-6,
    )


def llama3_70b() -> TrainRun:
    """Llama 3.1 70B on 8 GPUs.

    Up to 2048 replicas, each on the GPUs of one node.
    """
    model = ModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        ffn_hidden_size=28_672,
        max_seq_len=_CONTEXT,
        rope=_rope(factor=8.0),
    )
    return _run(
        "llama3_70b",
        model,
        ParallelConfig(tp=8, sp=True),
        global_batch_size=2048,
        lr=1.5e-4,
        min_lr=1.5e-6,
    )


def llama3_405b() -> TrainRun:
    """Llama 3.1 405B on 128 GPUs per replica: tp 8, pp 16.

    Trained on 16,384 GPUs with 16 million tokens a step; the first and the last stage have one
    layer less each (arXiv:2407.21783, section 3.3.2). For rows of 131,072 tokens: parallel.cp=16,
    train.global_batch_size=128.
    """
    model = ModelConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=16_384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        ffn_hidden_size=53_248,
        max_seq_len=_CONTEXT,
        rope=_rope(factor=8.0),
    )
    stages = PipelineConfig(vpp=4, count_embedding=True, count_loss=True)
    parallel = ParallelConfig(tp=8, sp=True, pp=16, pipeline=stages, zero=1)
    run = _run("llama3_405b", model, parallel, global_batch_size=2048, lr=8e-5, min_lr=8e-7)
    # With this, at less than 1 % more compute, it fits in 80 GB; see `megalith plan estimate
    # llama3_405b --world 16384`.
    return replace(
        run, recompute=RecomputeConfig(granularity="selective", modules=("norm", "mlp_act"))
    )


def _rope(*, factor: float) -> RopeConfig:
    return RopeConfig(theta=500_000.0, scaling="llama3", factor=factor)


def _run(
    name: str,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    global_batch_size: int,
    lr: float,
    min_lr: float,
) -> TrainRun:
    """Warmup of 8000 steps and cosine decay to 1 % of the peak, as published; the number of
    steps is ours."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=_VOCAB_SIZE),
        train=LoopConfig(steps=100_000, global_batch_size=global_batch_size, seq_len=8192),
        schedule=ScheduleConfig(lr=lr, min_lr=min_lr, warmup_steps=8000),
        parallel=parallel,
        precision=PrecisionConfig(params="bf16"),
        checkpoint=CheckpointConfig(every=1000),
    )


# Llama 2 in two of its published sizes. Source: Touvron et al. 2023, arXiv:2307.09288, section
# 2.2.
#
# Learning rates, warmup, eps, batches of 4 million tokens and 2 trillion tokens in total are those
# of the paper.


def llama2_7b() -> TrainRun:
    """Llama 2 7B on 2 GPUs (tp 2)."""
    model = _model(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11_008)
    return _llama2_run("llama2_7b", model, ParallelConfig(tp=2, sp=True), lr=3e-4)


def llama2_70b() -> TrainRun:
    """Llama 2 70B on 8 GPUs (tp 8): the first Llama with grouped-query attention.

    From 16 data-parallel replicas on, which shard the optimizer state, it fits in 80 GB.
    """
    model = _model(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28_672)
    return _llama2_run("llama2_70b", model, ParallelConfig(tp=8, sp=True, zero=1), lr=1.5e-4)


def _model(*, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        max_seq_len=4096,
    )


def _llama2_run(name: str, model: ModelConfig, parallel: ParallelConfig, *, lr: float) -> TrainRun:
    run = pretraining(
        name, model, warmed_cosine(lr), global_batch_size=1024, steps=477_000, parallel=parallel
    )
    return replace(run, optim=OptimConfig(eps=1e-5))


# Llama 4 Scout (text model) with the sizes of its release. Source: Meta 2025, "The Llama 4
# herd".

_THREE_OF_FOUR = (True, True, True, False)


def llama4_scout() -> TrainRun:
    """Llama 4 Scout without its vision encoder, on 64 GPUs: tp 4, ep 16 with one expert of each
    layer per GPU, and 4 pipeline stages.

    17.2B of 107.8B parameters are active per token. Rows have the length of an attention chunk.
    Training settings are not published: the learning rate and the aux loss are ours.
    """
    model = ModelConfig(
        vocab_size=202_048,
        hidden_size=5120,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=None,
        ffn_hidden_size=16_384,
        max_seq_len=10_485_760,
        rope=RopeConfig(
            theta=500_000.0,
            interleaved=True,
            skip=(False, False, False, True),
            skip_growth=0.1,
            scaling="llama3",
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position=8192,
        ),
        attention=AttentionConfig(
            qk_norm="l2",
            qk_norm_layers=_THREE_OF_FOUR,
            window=8192,
            window_layers=_THREE_OF_FOUR,
            chunked=True,
        ),
        moe=MoEConfig(
            num_experts=16,
            top_k=1,
            ffn_hidden_size=8192,
            shared_ffn_hidden_size=8192,
            apply_router_weight_on_input=True,
            router=RouterConfig(score="sigmoid", norm_topk_prob=False),
            aux_loss=AuxLossConfig(batch_coeff=0.001),
        ),
    )
    parallel = ParallelConfig(tp=4, sp=True, ep=16, etp=1, pp=4, zero=1)
    return pretraining("llama4_scout", model, warmed_cosine(3e-4), seq_len=8192, parallel=parallel)

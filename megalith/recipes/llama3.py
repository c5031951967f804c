"""Llama 3.1 and 3.2 in their published sizes, with the learning rates of Grattafiori et al. 2024,
arXiv:2407.21783.

They train on mock data unless text is given: `--data.mock false --data.path PREFIX` and a
tokenizer.
"""

from dataclasses import replace

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import PrecisionConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.config.recompute import RecomputeConfig
from megalith.config.rope import RopeConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun

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

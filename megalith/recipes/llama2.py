"""Llama 2 in two of its published sizes. Source: Touvron et al. 2023, arXiv:2307.09288, section
2.2.

Learning rates, warmup, eps, batches of 4 million tokens and 2 trillion tokens in total are those of
the paper.
"""

from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def llama2_7b() -> TrainRun:
    """Llama 2 7B on 2 GPUs (tp 2)."""
    model = _model(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11_008)
    return _run("llama2_7b", model, ParallelConfig(tp=2, sp=True), lr=3e-4)


def llama2_70b() -> TrainRun:
    """Llama 2 70B on 8 GPUs (tp 8): the first Llama with grouped-query attention.

    From 16 data-parallel replicas on, which shard the optimizer state, it fits in 80 GB.
    """
    model = _model(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28_672)
    return _run("llama2_70b", model, ParallelConfig(tp=8, sp=True, zero=1), lr=1.5e-4)


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


def _run(name: str, model: ModelConfig, parallel: ParallelConfig, *, lr: float) -> TrainRun:
    run = pretraining(
        name, model, warmed_cosine(lr), global_batch_size=1024, steps=477_000, parallel=parallel
    )
    return replace(run, optim=OptimConfig(eps=1e-5))

"""Llama models of 6M to 350M parameters for benchmarks, experiments and one GPU.

They train on mock data unless text is given: `--data.mock false --data.path PREFIX` and a
tokenizer.
"""

from typing import Literal

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import PrecisionConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun


def llama_6m() -> TrainRun:
    """Llama with 6M parameters for benchmarks: 8 rows of 256 tokens per step."""
    model = ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden_size=640,
        max_seq_len=512,
    )
    train = LoopConfig(steps=1000, global_batch_size=8, micro_batch_size=8, seq_len=256)
    return _on_mock(
        "llama_6m", model, train, ScheduleConfig(lr=2e-3, min_lr=2e-4, warmup_steps=0.05)
    )


def llama_29m() -> TrainRun:
    """Llama with 29M parameters for benchmarks: 4 rows of 512 tokens per step."""
    model = ModelConfig(
        vocab_size=4096,
        hidden_size=512,
        num_layers=8,
        num_heads=8,
        num_kv_heads=4,
        ffn_hidden_size=1536,
        max_seq_len=1024,
    )
    train = LoopConfig(steps=2000, global_batch_size=4, micro_batch_size=4, seq_len=512)
    return _on_mock(
        "llama_29m", model, train, ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0.05)
    )


def llama_125m() -> TrainRun:
    """Llama with the size of GPT-2 small."""
    return _gpt2_sized(
        "llama_125m",
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        ffn_hidden_size=2048,
        lr=6e-4,
        min_lr=6e-5,
    )


def llama_350m() -> TrainRun:
    """Llama with the size of GPT-2 medium."""
    return _gpt2_sized(
        "llama_350m",
        hidden_size=1024,
        num_layers=24,
        num_heads=16,
        ffn_hidden_size=2736,
        lr=3e-4,
        min_lr=3e-5,
    )


def _gpt2_sized(
    name: str,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    ffn_hidden_size: int,
    lr: float,
    min_lr: float,
) -> TrainRun:
    """Return a Llama run with the depth, width and vocabulary of a GPT-2 model.

    Learning rates and the batch of half a million tokens are those of GPT-3 (arXiv:2005.14165,
    table 2.1).
    """
    model = ModelConfig(
        vocab_size=50_257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_hidden_size=ffn_hidden_size,
        max_seq_len=2048,
        tied_embeddings=True,
    )
    train = LoopConfig(
        steps=20_000, global_batch_size=512, micro_batch_size=8, seq_len=1024, log_every=10
    )
    schedule = ScheduleConfig(lr=lr, min_lr=min_lr, warmup_steps=0.035)
    return _on_mock(name, model, train, schedule, params="bf16")


def _on_mock(
    name: str,
    model: ModelConfig,
    train: LoopConfig,
    schedule: ScheduleConfig,
    *,
    params: Literal["fp32", "bf16"] = "fp32",
) -> TrainRun:
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=model.vocab_size),
        train=train,
        schedule=schedule,
        precision=PrecisionConfig(params=params),
    )

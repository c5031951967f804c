"""Small runs: the first run, quickstart, tiny SFT, LoRA and MoE runs, and Llama models of 6M to
350M parameters.

They train on mock data unless text is given: `--data.mock false --data.path PREFIX` and a
tokenizer.
"""

from dataclasses import replace
from typing import Literal

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig, SFTConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.optim import PrecisionConfig, ScheduleConfig
from megalith.config.parallel import ParallelConfig
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


# First run: a small model on mock data; trains in seconds on any machine.


def tiny_cpu() -> TrainRun:
    """Small model that learns to count in half a minute on a CPU.

    Uses mock data, so nothing is downloaded.
    """
    return TrainRun(
        name="tiny_cpu",
        model=ModelConfig(
            vocab_size=257,  # byte tokenizer: 256 bytes and the end-of-document token
            hidden_size=256,
            num_layers=6,
            num_heads=8,
            num_kv_heads=4,
            ffn_hidden_size=768,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True, mock_num_documents=1000, mock_max_tokens=512),
        train=LoopConfig(
            steps=40,
            global_batch_size=8,
            micro_batch_size=4,
            seq_len=128,
            eval_every=20,
            eval_steps=2,
        ),
        schedule=ScheduleConfig(lr=1e-3, min_lr=1e-4, warmup_steps=0.125),
        checkpoint=CheckpointConfig(every=20),
    )


# Recipe of `megalith quickstart`: a small GPT on text, trained in minutes on two CPU cores.


def quickstart() -> TrainRun:
    """Small GPT of `megalith quickstart`.

    1.0M tokens; the command replaces the mock data with its own corpus and tokenizer.
    """
    vocab_size = 4096
    return TrainRun(
        name="quickstart",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=160,
            num_layers=5,
            num_heads=5,
            num_kv_heads=5,
            ffn_hidden_size=448,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(
            steps=976,
            global_batch_size=4,
            micro_batch_size=2,
            seq_len=256,
            eval_every=244,
            eval_steps=16,
        ),
        schedule=ScheduleConfig(lr=2.5e-3, min_lr=1e-4, warmup_steps=0.0615),
    )


# A small mixture of experts on two processes; trains in minutes on two CPU cores.


def moe_tiny() -> TrainRun:
    """Eight experts and a shared expert, with ep 2: run with `--nproc 2`.

    Uses mock data; docs/howto/experts.md shows how to train on the corpus of `megalith quickstart`.
    """
    vocab_size = 4096
    return TrainRun(
        name="moe_tiny",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=384,
            max_seq_len=512,
            tied_embeddings=True,
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                ffn_hidden_size=128,
                shared_ffn_hidden_size=128,
                shared_gate=True,  # as in Qwen2-MoE, to which it can be exported
                layers=(
                    False,
                    True,
                    True,
                    True,
                ),  # as in DeepSeek-V3, the first layer is dense
                aux_loss=AuxLossConfig(batch_coeff=0.01, z_loss_coeff=1e-3),
            ),
        ),
        parallel=ParallelConfig(ep=2),
        data=DataConfig(mock=True, mock_num_documents=2000),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(
            steps=400,
            global_batch_size=4,
            micro_batch_size=2,
            seq_len=256,
            eval_every=200,
            eval_steps=8,
        ),
        schedule=ScheduleConfig(lr=2.5e-3, min_lr=1e-4, warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=200),
    )


# Fine-tuning on mock conversations; trains in a minute on two CPU cores, without downloads.


def sft_tiny() -> TrainRun:
    """Supervised fine-tuning on packed conversations about sums of two digits.

    The number of steps is measured (2-core x86-64, 2026-11): after 60, answers have the right form
    and end; after 400, 11 of 12 repeat the question and half of the sums are correct (held-out loss
    0.06). To tune your own model, set `data.sft.path`, `checkpoint.load` and a tokenizer.
    """
    return TrainRun(
        name="sft_tiny",
        model=ModelConfig(
            vocab_size=257,  # byte tokenizer: 256 bytes and the end-of-document token
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=384,
            max_seq_len=512,
            tied_embeddings=True,
        ),
        data=DataConfig(sft=SFTConfig(mock_conversations=600, template="chatml")),
        train=LoopConfig(
            steps=400,
            global_batch_size=8,
            micro_batch_size=4,
            seq_len=320,
            eval_every=100,
            eval_steps=1,
        ),
        schedule=ScheduleConfig(lr=2e-3, min_lr=2e-4, warmup_steps=0.0125),
        checkpoint=CheckpointConfig(every=100),
    )


# LoRA adapters for the small arithmetic model of `sft_tiny`; trains in seconds after
# `sft_tiny`.


def lora_tiny() -> TrainRun:
    """LoRA fine-tuning of the frozen model of runs/sft_tiny on more sums.

    To tune your own model, set `data.sft.path` and `checkpoint.load`; the recipe is the model's run
    folder or checkpoint.
    """
    base = sft_tiny()
    return replace(
        base,
        name="lora_tiny",
        lora=LoraConfig(rank=8, alpha=16.0, dropout=0.05),
        data=DataConfig(sft=SFTConfig(mock_conversations=1200, template="chatml")),
        train=replace(base.train, steps=40, eval_every=20),
        schedule=ScheduleConfig(lr=5e-3, min_lr=5e-4, warmup_steps=0.125),
        checkpoint=CheckpointConfig(every=20, load="runs/sft_tiny"),
    )


# Shared parts of recipes of published models: pretraining on mock data until text is given.
#
# Learning rates are those of the authors where published, and ours where a recipe says so.

ALONE = ParallelConfig()


def pretraining(
    name: str,
    model: ModelConfig,
    schedule: ScheduleConfig,
    *,
    seq_len: int = 4096,
    global_batch_size: int = 512,
    steps: int = 100_000,
    parallel: ParallelConfig = ALONE,
) -> TrainRun:
    """Return a pretraining run of a published model from random weights; for text, pass
    `--data.mock false --data.path PREFIX`."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(mock=True),
        tokenizer=TokenizerConfig(kind="null", vocab_size=model.vocab_size),
        train=LoopConfig(steps=steps, global_batch_size=global_batch_size, seq_len=seq_len),
        schedule=schedule,
        parallel=parallel,
        precision=PrecisionConfig(params="bf16"),
        checkpoint=CheckpointConfig(every=1000),
    )


def warmed_cosine(lr: float, *, warmup: int = 2000) -> ScheduleConfig:
    """Return a schedule of linear warmup and cosine decay to 10 % of the peak."""
    return ScheduleConfig(lr=lr, min_lr=lr / 10, warmup_steps=warmup)

"""Checkpoints of runs with random weights and optimizer state, to be written as Megatron
checkpoints."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import DataConfig, TokenizerConfig
from megalith.config.model import MLAConfig, ModelConfig, RopeConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.optim import OptimConfig, PrecisionConfig, ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.config.tree import dump_yaml
from megalith.hf.release import parameters
from megalith.observe.machine import DTYPES
from megalith.parallel.group import single_rank_group
from megalith.train.state import TrainState

DENSE = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    ffn_hidden_size=10,
    max_seq_len=64,
    pad_vocab_to_multiple_of=4,
)

MOE = replace(
    DENSE,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=6,
        shared_ffn_hidden_size=4,
        router=RouterConfig(score="sigmoid", expert_bias=True),
    ),
)
LATER_MOE = replace(MOE, moe=replace(MOE.moe, layers=(False, True, True)))
MLA = replace(
    DENSE,
    num_kv_heads=6,
    rope=RopeConfig(interleaved=True),
    mla=MLAConfig(
        kv_rank=8, q_rank=6, nope_dim=4, rope_dim=2, value_dim=3, norm_eps=DENSE.norm_eps
    ),
)


def build_run(model: ModelConfig, *, params: str = "bf16") -> TrainRun:
    """Return the settings of a run that has trained 7 of 40 steps."""
    return TrainRun(
        name="run",
        model=model,
        data=DataConfig(mock=True),
        train=LoopConfig(steps=40, global_batch_size=8, micro_batch_size=2, seq_len=32),
        schedule=ScheduleConfig(
            lr=1e-3, min_lr=1e-4, warmup_steps=4, style="wsd", wsd_decay_steps=10
        ),
        tokenizer=TokenizerConfig(kind="null", vocab_size=model.vocab_size),
        optim=OptimConfig(beta2=0.98),
        precision=PrecisionConfig(params=params),
    )


def save_run(
    folder: Path, run: TrainRun, *, optimizer: bool = True, seed: int = 0
) -> dict[str, Tensor]:
    """Save `step_0000007` of a run with random values; return them by key."""
    generator = torch.Generator().manual_seed(seed)
    dtype = DTYPES[run.precision.params]
    entries = []
    for shard in parameters(run.model):
        rows = run.model.vocab_size if shard.name in ("embed.weight", "head.weight") else None
        wide = _random(shard.shape, generator, rows)
        is_buffer = shard.name.endswith("balancing_bias")
        weight_dtype = DTYPES[shard.dtype] if is_buffer else dtype
        stored = replace(shard, dtype="fp32" if is_buffer else run.precision.params)
        entries.append(CheckpointEntry(stored, "param", wide.to(weight_dtype)))
        if is_buffer or not optimizer:
            continue
        if weight_dtype != torch.float32:
            entries.append(CheckpointEntry(stored, "master", wide))
        for role in ("exp_avg", "exp_avg_sq"):
            entries.append(CheckpointEntry(stored, role, _random(shard.shape, generator, rows)))
    state = TrainState(step=7, consumed_samples=56, scheduled_samples=48, tokens=56 * 32, skipped=1)
    save_checkpoint(
        folder,
        7,
        entries,
        {
            "train": state.as_json(),
            "optimizer_updates": 6,
            "data": "none",
            "order_samples": 320,
            "tokenizer": "none",
        },
        single_rank_group("world"),
        config_text=dump_yaml(run),
    )
    return {entry.key: entry.tensor for entry in entries}


def _random(shape: tuple[int, ...], generator: torch.Generator, rows: int | None) -> Tensor:
    """Return random values; rows of padding are zero."""
    values = torch.randn(shape, generator=generator)
    if rows is not None:
        values[rows:] = 0
    return values

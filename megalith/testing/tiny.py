"""Tiny runs, models and pipeline schedules for tests, with all components of real ones."""

import os
import random
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.observe import ObserveConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.parallel import ScheduleName
from megalith.config.train import LoopConfig, TrainRun
from megalith.config.tree import Override, apply_overrides, save_yaml
from megalith.kernels.triton import launch
from megalith.plan.schedule import Schedule, build_schedule
from megalith.plan.shards import Shard


def tiny_run(overrides: Mapping[str, Override] | None = None) -> TrainRun:
    """Return a run of eight steps of 12 rows (dp 1, 2, 3 and 6 divide them) on mock data, with
    dotted settings overridden.

    Sizes are no powers of two, the vocabulary is padded, and heads share keys; evaluates and saves
    every other step. Plots, TensorBoard files and the measurement of the machine's peak, which cost
    more than the run, are off.
    """
    run = TrainRun(
        name="tiny",
        model=ModelConfig(
            vocab_size=257,
            hidden_size=24,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=6,
            ffn_hidden_size=20,
            max_seq_len=32,
        ),
        data=DataConfig(mock=True, mock_num_documents=300, mock_max_tokens=60),
        train=LoopConfig(
            steps=8,
            global_batch_size=12,
            micro_batch_size=2,
            seq_len=12,
            eval_every=4,
            eval_steps=1,
            threads=1,
        ),
        schedule=ScheduleConfig(lr=1e-2, warmup_steps=1),
        checkpoint=CheckpointConfig(every=2),
        observe=ObserveConfig(tensorboard=False, plots=False, peak_tflops=1.0),
    )
    return apply_overrides(run, overrides or {})


def tiny_yaml(path: Path, overrides: Mapping[str, Override] | None = None) -> Path:
    """Write `tiny_run` as a YAML file, for commands."""
    save_yaml(tiny_run(overrides), path)
    return path


# --- a model whose parameter sizes are not divisible by any number of ranks


class OddSizedModel(nn.Module):
    """Model with a parameter of one element, one with fewer rows than ranks, an unused one, and one
    larger than several buckets."""

    SHARDS = (
        Shard.full("one", (1,), inputs=0, dtype="fp64"),
        Shard.full("matrix", (2, 3), dtype="fp64"),
        Shard.full("unused", (5,), inputs=0, dtype="fp64"),
        Shard.full("long", (300,), inputs=0, dtype="fp64"),
    )

    one: nn.Parameter
    matrix: nn.Parameter
    long: nn.Parameter

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        for shard in self.SHARDS:
            ones = torch.ones(shard.matrix_shape, dtype=torch.float64, device=device)
            self.register_parameter(shard.name, nn.Parameter(ones))

    def forward(self, factor: float) -> Tensor:
        """Return a loss whose gradients are `gradients(factor)`."""
        return factor * (self.one.sum() + 2 * self.matrix.sum() + 3 * self.long.sum())

    @staticmethod
    def gradients(factor: float) -> dict[str, float]:
        """Return the gradient value of every element of each parameter."""
        return {"one": factor, "matrix": 2 * factor, "unused": 0.0, "long": 3 * factor}


# --- random pipeline schedules for property tests

NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")


def random_schedule(
    rng: random.Random, name: ScheduleName | None = None, *, forward_only: bool = False
) -> Schedule:
    """Return a random schedule, or one of the given name, with up to 8 ranks, 4 chunks and 32
    microbatches, in groups of any valid size."""
    chosen: ScheduleName = name if name is not None else rng.choice(NAMES)
    p, group = rng.randint(1, 8), None
    m = rng.randint(p if chosen == "interleaved" else 1, 32)
    chunks = {"interleaved": rng.randint(2, 4), "zb-v": 2, "dualpipe-v": 2}.get(chosen, 1)
    if chosen == "interleaved":
        group = rng.choice([size for size in range(p, m + 1) if m % size == 0 or m % size >= p])
    return build_schedule(
        chosen,
        num_ranks=p,
        num_chunks=chunks,
        num_microbatches=m,
        group=group,
        forward_only=forward_only,
    )


# Device for tests of Triton kernels: a GPU, or a CPU with Triton's interpreter in a separate
# process.

INTERPRET = "TRITON_INTERPRET"
"""Variable that Triton reads when a kernel is defined: it must be 1 before the first import, for
the whole process."""


def triton_device() -> torch.device | None:
    """Return the device on which this process can run Triton kernels, or None."""
    if not launch.has_triton():
        return None
    if os.environ.get(INTERPRET) == "1":
        return torch.device("cpu")
    has_gpu = torch.cuda.is_available()
    cuda = torch.device("cuda")  # lint: allow cuda-literal: Triton programs run nowhere else
    return cuda if has_gpu else None

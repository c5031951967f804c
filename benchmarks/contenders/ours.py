"""Our training step, as `megalith train` runs it: the same trainer, the same `train_step`."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megalith.config.optim import PrecisionConfig
from megalith.config.train import TrainRun
from megalith.data.loader import MaskSettings, StepBatches, build_batch
from megalith.data.sample import Sample
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer

LR, WEIGHT_DECAY = 1e-4, 0.1
"""Of all contenders; they decide no speed."""


def random_step(run: TrainRun, device: torch.device, *, seed: int = 0) -> StepBatches:
    """One step's rows of random tokens, all of them with a label."""
    train, vocab = run.train, run.model.vocab_size
    draw = np.random.default_rng(seed)
    rows = [
        Sample(draw.integers(0, vocab, train.seq_len + 1), train.seq_len + 1)
        for _ in range(train.global_batch_size)
    ]
    size = train.micro_batch_size
    batches = [
        build_batch(rows[first : first + size], MaskSettings(), device=device)
        for first in range(0, len(rows), size)
    ]
    return StepBatches(batches, sum(batch.num_labels for batch in batches))


class Ours:
    """Holds a trainer; `step()` is one optimizer update."""

    def __init__(self, run: TrainRun, batches: StepBatches, device: torch.device) -> None:
        self.trainer: Trainer = build_trainer(run, build_single_rank_mesh(), device)
        self.batches = batches

    def step(self) -> float:
        """One update; the loss before it."""
        return train_step(self.trainer, self.batches, lr=LR, weight_decay=WEIGHT_DECAY).loss

    def weights(self) -> dict[str, Tensor]:
        """Every parameter in the shape of the paper, by name."""
        return {
            param.shard.name: param.weight.view(param.shard.shape)
            for param in self.trainer.data.local_params
        }


def with_precision(run: TrainRun, params: str) -> TrainRun:
    """The run in fp32 or bf16."""
    assert params == "fp32" or params == "bf16"
    return replace(run, precision=PrecisionConfig(params=params))

"""A custom training loop: two models in one process, without the command line or global state.

Run it with `python examples/train.py`; it needs no data and takes seconds.
"""

from dataclasses import replace

import torch

from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.data.build import build_datasets
from megalith.data.loader import Loader, MaskSettings
from megalith.optim.schedule import learning_rate, schedule_lengths
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer

HEADS = {"num_heads": 4, "num_kv_heads": 2}
SIZES = {"hidden_size": 64, "num_layers": 2, "ffn_hidden_size": 128}
MODEL = ModelConfig(vocab_size=257, max_seq_len=64, **SIZES, **HEADS)
SMALL = TrainRun(
    name="small",
    model=MODEL,
    data=DataConfig(mock=True, mock_num_documents=500, mock_max_tokens=256),
    train=LoopConfig(steps=30, global_batch_size=8, micro_batch_size=4, seq_len=64),
    schedule=ScheduleConfig(lr=4e-3, warmup_steps=3),
)
DEEP = replace(SMALL, name="deep", model=replace(MODEL, num_layers=4, tied_embeddings=True))


def train(run: TrainRun) -> list[float]:
    """Train one model from its initial weights and return the loss of every step."""
    mesh, cpu, loop = build_single_rank_mesh(), torch.device("cpu"), run.train
    trainer = build_trainer(run, mesh, cpu)
    samples = {"train_samples": loop.steps * loop.global_batch_size}
    tokens = {"seq_len": loop.seq_len, "vocab_size": run.model.vocab_size, "eod": 256}
    held_out = {"valid_samples": 0, "test_samples": 0}
    data = build_datasets(run.data, seed=run.seed, **tokens, **samples, **held_out)
    assert data.train is not None
    batch = {"global_batch_size": loop.global_batch_size, "micro_batch_size": loop.micro_batch_size}
    masks, position = MaskSettings(eod=256), {"consumed": 0, "steps": loop.steps}
    loader = Loader(data.train, masks, mesh.dp, device=cpu, **batch, **position)
    lengths = schedule_lengths(
        run.schedule, global_batch_size=loop.global_batch_size, total_steps=loop.steps
    )
    losses = []
    for step in range(loop.steps):
        lr = learning_rate(run.schedule, step * loop.global_batch_size, lengths)
        losses.append(train_step(trainer, loader.next(), lr=lr, weight_decay=0.1).loss)
    return losses


if __name__ == "__main__":
    for run in (SMALL, DEEP):
        losses = train(run)
        print(f"{run.name}: loss {losses[0]:.3f} to {losses[-1]:.3f}")

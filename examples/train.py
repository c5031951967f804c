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
from megalith.data.loader import BatchSettings, Loader, MaskSettings
from megalith.data.sample import SampleSettings
from megalith.optim.schedule import learning_rate, schedule_lengths
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.batch_schedule import build_batch_schedule
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
    samples = SampleSettings.of_run(run, eod=256)
    data = build_datasets(run.data, samples, train_samples=loop.steps * loop.global_batch_size)
    assert data.train is not None
    batches = BatchSettings.of_run(run, MaskSettings(eod=256))
    loader = Loader(data.train, batches, mesh.dp, consumed=0, steps=loop.steps, device=cpu)
    lengths = schedule_lengths(
        run.schedule, batch_schedule=build_batch_schedule(loop), total_steps=loop.steps
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

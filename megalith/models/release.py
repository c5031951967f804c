"""Writing a release: a checkpoint of ours that holds weights only, read from anywhere, a few parameters at a time."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith import storage
from megalith.checkpoint.boxes import Entry
from megalith.checkpoint.format import folder_name, merge_tensors
from megalith.checkpoint.save import Written, commit, write_boxes
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.errors import CheckpointError
from megalith.models.decoder import Decoder, declared_parameters
from megalith.models.hf import Weights, check_absent
from megalith.models.jobs import done_in_order
from megalith.parallel.mesh import mesh_of_one
from megalith.plan.shards import Shard

BATCH_NBYTES = 256 * 2**20
"""Length of a file, about; twice as much is in memory (guess)."""


def parameters(model: ModelConfig) -> list[Shard]:
    """Every parameter of a model, whole, in the order of the forward pass."""
    return [declared.shard for declared, _, _ in declared_parameters(Decoder(model, mesh_of_one()))]


def release_run(name: str, model: ModelConfig, tokenizer: TokenizerConfig, path: Path) -> TrainRun:
    """Settings to go on training such a release from; they name no data yet."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(),
        tokenizer=tokenizer,
        train=LoopConfig(steps=1000, global_batch_size=8, seq_len=min(2048, model.max_seq_len)),
        schedule=ScheduleConfig(lr=1e-5, warmup_steps=50),  # a usual rate for models that have learnt already
        checkpoint=CheckpointConfig(load=str(path.absolute())),
    )


def write_release(
    path: Path,
    model: ModelConfig,
    weights: Weights,
    *,
    config_text: str,
    dtype: torch.dtype | None = None,
    state: Mapping[str, Any] | None = None,  # JSON
    companions: Mapping[str, bytes] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
    workers: int = 1,
) -> int:
    """Write the checkpoint folder `path`; returns its bytes of weights. It appears whole or not at all.

    `dtype` unset keeps that of each parameter; `companions` are files beside them, by name; `wrote` is
    told the bytes of each file as it is finished; several `workers` need weights that can be pickled.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
    """
    check_absent(path)
    work = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    staging = work / f"{folder_name(0)}.tmp"
    nbytes = 0
    try:
        storage.make_folder(staging)
        batches = _batches(model, weights, dtype)
        jobs = [partial(_write_batch, staging, number, batch, weights) for number, batch in enumerate(batches)]
        parts = []
        for part, size in done_in_order(jobs, workers):
            parts.append(part)
            nbytes += size
            wrote(size)
        written = Written(
            merge_tensors(part.tensors for part in parts), {k: v for part in parts for k, v in part.files.items()}
        )
        for name, contents in (companions or {}).items():
            storage.write_new(staging / name, contents)
        finished, _ = commit(staging, 0, [written], dict(state or {}), config_text)
        storage.rename(finished, path)
    except OSError as error:
        raise CheckpointError(f"{path}: not written ({error}). Free some space, or choose another target.") from error
    finally:
        storage.remove_tree(work)
    return nbytes


Batch = list[tuple[Shard, torch.dtype]]
"""Parameters of one file, and what they are stored as."""


def _batches(model: ModelConfig, weights: Weights, dtype: torch.dtype | None) -> list[Batch]:
    """Every parameter, in lists of a bounded size."""
    batches: list[Batch] = [[]]
    nbytes = 0
    for shard in parameters(model):
        stored = dtype or weights.dtype(shard.name)
        if nbytes >= BATCH_NBYTES:
            batches.append([])
            nbytes = 0
        batches[-1].append((shard, stored))
        nbytes += shard.numel * stored.itemsize
    return batches


def _write_batch(staging: Path, number: int, batch: Batch, weights: Weights) -> tuple[Written, int]:
    """One file of parameters, and the bytes of these."""
    entries = [Entry(shard, "param", weights.read(shard.name, shard.box, stored)) for shard, stored in batch]
    return write_boxes(staging, number, entries), sum(entry.tensor.nbytes for entry in entries)

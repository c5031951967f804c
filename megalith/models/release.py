"""Writing a release: a checkpoint of ours that holds weights only, read from anywhere, a few parameters at a time."""

import secrets
from collections.abc import Callable, Iterator, Mapping
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
    companions: Mapping[str, Path] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> int:
    """Write the checkpoint folder `path`; returns its bytes of weights. It appears whole or not at all.

    `dtype` unset keeps that of each parameter; `companions` are copied under their names, `wrote` is
    told the bytes of each parameter.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
    """
    check_absent(path)
    work = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    staging = work / f"{folder_name(0)}.tmp"
    nbytes = 0
    try:
        storage.make_folder(staging)
        parts = []
        for number, batch in enumerate(_batches(model, weights, dtype)):
            parts.append(write_boxes(staging, number, batch))
            nbytes += sum(entry.tensor.nbytes for entry in batch)
            for entry in batch:
                wrote(entry.tensor.nbytes)
        written = Written(
            merge_tensors(part.tensors for part in parts), {k: v for part in parts for k, v in part.files.items()}
        )
        for name, source in (companions or {}).items():
            storage.write_new(staging / name, storage.read_bytes(source))
        finished, _ = commit(staging, 0, [written], dict(state or {}), config_text)
        storage.rename(finished, path)
    except OSError as error:
        raise CheckpointError(f"{path}: not written ({error}). Free some space, or choose another target.") from error
    finally:
        storage.remove_tree(work)
    return nbytes


def _batches(model: ModelConfig, weights: Weights, dtype: torch.dtype | None) -> Iterator[list[Entry]]:
    """Every parameter, read, in lists of a bounded size."""
    batch: list[Entry] = []
    for shard in parameters(model):
        batch.append(Entry(shard, "param", weights.read(shard.name, shard.box, dtype or weights.dtype(shard.name))))
        if sum(entry.tensor.nbytes for entry in batch) >= BATCH_NBYTES:
            yield batch
            batch = []
    if batch:
        yield batch

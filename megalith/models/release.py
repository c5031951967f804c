"""Writing a release: a checkpoint of ours that holds weights only, read from anywhere, a few parameters at a time."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith import storage
from megalith.checkpoint.boxes import divide
from megalith.checkpoint.format import StoredFile, StoredTensor, folder_name, merge_tensors
from megalith.checkpoint.save import BOX_NBYTES, BoxFile, Written, commit, dtype_name
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.errors import CheckpointError
from megalith.models.decoder import Decoder, declared_parameters
from megalith.models.hf import Weights, require_room
from megalith.models.jobs import batches, done_in_order
from megalith.models.names import dtype_to_write
from megalith.models.staging import staging_of
from megalith.parallel.mesh import mesh_of_one
from megalith.plan.shards import Box, Shard

BATCH_NBYTES = 256 * 2**20
"""Length of a file, about (guess)."""


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

    `dtype` unset keeps that of each parameter; `companions` are files beside them; `wrote` is told the bytes of
    each parameter, by any of the `workers`, threads that have a few of the source's bytes in memory each.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
    """
    work = staging_of(path)
    staging = work / f"{folder_name(0)}.tmp"
    content = [(one, dtype_to_write(one.name, weights.dtype(one.name), dtype)) for one in parameters(model)]
    nbytes = sum(map(_nbytes, content))
    try:
        storage.make_folder(staging)
        require_room(work, nbytes)
        jobs = [
            partial(_write_batch, staging, number, batch, weights, wrote)
            for number, batch in enumerate(batches(content, _nbytes, BATCH_NBYTES))
        ]
        parts = list(done_in_order(jobs, workers))
        written = Written(
            merge_tensors(part.tensors for part in parts), {k: v for part in parts for k, v in part.files.items()}
        )
        for name, contents in (companions or {}).items():
            storage.write_new(staging / name, contents)
        finished, _ = commit(staging, 0, [written], dict(state or {}), config_text)
        storage.rename(finished, path)
        storage.sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: not written ({error}). Free some space, or choose another target.") from error
    finally:
        storage.remove_tree(work)
    return nbytes


Item = tuple[Shard, torch.dtype]
"""A parameter, and what it is stored as."""


def _nbytes(item: Item) -> int:
    return item[0].numel * item[1].itemsize


def _write_batch(
    staging: Path,
    number: int,
    batch: Sequence[Item],
    weights: Weights,
    wrote: Callable[[int], None],
) -> Written:
    """One file of parameters."""
    tensors = {}
    with BoxFile(staging / f"__{number}_0.distcp") as file:
        for shard, dtype in batch:
            boxes = []
            for box in divide(shard.box, BOX_NBYTES // dtype.itemsize):
                boxes.append(file.add(box, [weights.read(shard.name, part, dtype) for part in _slices(box)]))
            tensors[f"model.{shard.name}"] = StoredTensor(shard.shape, dtype_name(dtype), tuple(boxes))
            wrote(shard.numel * dtype.itemsize)
    return Written(tensors, {file.name: StoredFile(file.nbytes)})


def _slices(box: Box) -> list[Box]:
    """Of a few matrices in one parameter, as keys and values or gate and up are, each: others have them apart."""
    (start, stop), *rest = box
    few = len(rest) > 1 and stop - start <= 4
    return [((i, i + 1), *rest) for i in range(start, stop)] if few else [box]

"""Writing a release: a checkpoint of ours that holds weights only, read from anywhere, a few
parameters at a time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith import storage
from megalith.checkpoint.boxes import divide
from megalith.checkpoint.format import (
    StoredBox,
    StoredFile,
    StoredTensor,
    folder_name,
    merge_tensors,
    sha256,
)
from megalith.checkpoint.save import BOX_NBYTES, BoxFile, WrittenFiles, commit, dtype_name
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.models.decoder import Decoder, declared_parameters
from megalith.models.hf import Weights, require_room
from megalith.models.jobs import batches, done_in_order
from megalith.models.journal import Attempt, ConversionJournal
from megalith.models.names import dtype_to_write
from megalith.models.staging import publish, work_on
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
        schedule=ScheduleConfig(lr=1e-5, warmup_steps=0.05),  # a usual rate for pretrained models
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
    auxiliary_files: Mapping[str, bytes] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
    workers: int = 1,
    attempt: Attempt | None = None,
) -> int:
    """Write the checkpoint folder `path`; returns its bytes of weights. It appears whole or not at
    all.

    `dtype` unset keeps that of each parameter; `auxiliary_files` are files beside them; `wrote` is
    told the bytes of each parameter, by any of the `workers`, threads that have a few of the
    source's bytes in memory each. With an `attempt`, what an earlier one of the same kind left is
    gone on with.

    Raises:
        CheckpointError: the path exists, or the disk refused something.
    """
    with work_on(path, attempt) as work:
        staging = work.folder / f"{folder_name(0)}.tmp"
        content = [
            (one, dtype_to_write(one.name, weights.dtype(one.name), dtype))
            for one in parameters(model)
        ]
        found = [
            (f"__{number}_0.distcp", batch)
            for number, batch in enumerate(batches(content, _nbytes, BATCH_NBYTES))
        ]
        before = _files_before(staging, {name for name, _ in found}, work.journal)
        require_room(
            work.folder,
            sum(sum(map(_nbytes, batch)) for name, batch in found if name not in before),
        )
        jobs = [
            partial(
                _write_batch, staging / name, batch, weights, wrote, work.journal, before.get(name)
            )
            for name, batch in found
        ]
        parts = list(done_in_order(jobs, workers))
        written = WrittenFiles(
            merge_tensors(part.tensors for part in parts),
            {k: v for part in parts for k, v in part.files.items()},
        )
        for name, contents in (auxiliary_files or {}).items():
            storage.write_new(staging / name, contents)
        finished, _ = commit(staging, 0, [written], dict(state or {}), config_text)
        publish(work, finished, path)
    return sum(map(_nbytes, content))


def _files_before(
    staging: Path, names: Collection[str], journal: ConversionJournal
) -> dict[str, WrittenFiles]:
    """The files of parameters that an earlier attempt had written whole, if it says so; anything
    else is removed."""
    finished = staging.with_suffix("")
    if finished.exists():  # it was killed after its last file, and before the folder had its name
        storage.rename(finished, staging)
    if not staging.exists():
        storage.make_folder(staging)
    found = {name: _recorded(name, journal.found(name)) for name in names}
    for name in storage.list_names(staging):
        if found.get(name) is None:
            storage.remove_file(staging / name)
    return {
        name: part for name, part in found.items() if part is not None and (staging / name).exists()
    }


def _recorded(name: str, record: Any) -> WrittenFiles | None:  # JSON
    """What a line of a journal says of a file; None: nothing."""
    try:
        tensors = {
            key: StoredTensor(
                tuple(shape),
                dtype,
                tuple(
                    StoredBox(tuple((a, b) for a, b in box), name, *place) for box, *place in boxes
                ),
            )
            for key, (shape, dtype, boxes) in record["tensors"].items()
        }
        return WrittenFiles(tensors, {name: StoredFile(record["nbytes"])})
    except (TypeError, KeyError, ValueError):  # no such line, or none that this build writes
        return None


def _record(part: WrittenFiles, name: str) -> dict[str, Any]:  # JSON
    """The same for the journal."""
    tensors = {
        key: (
            one.shape,
            one.dtype,
            [(box.box, box.offset, box.nbytes, box.sha256) for box in one.boxes],
        )
        for key, one in part.tensors.items()
    }
    return {"nbytes": part.files[name].nbytes, "tensors": tensors}


def _is_whole(file: Path, part: WrittenFiles) -> bool:
    """Whether a file holds what was written into it."""
    boxes = [box for tensor in part.tensors.values() for box in tensor.boxes]
    return storage.file_nbytes(file) == part.files[file.name].nbytes and all(
        sha256(storage.mapped(file, box.offset, box.nbytes)) == box.sha256 for box in boxes
    )


Item = tuple[Shard, torch.dtype]
"""A parameter, and what it is stored as."""


def _nbytes(item: Item) -> int:
    return item[0].numel * item[1].itemsize


def _write_batch(
    path: Path,
    batch: Sequence[Item],
    weights: Weights,
    wrote: Callable[[int], None],
    journal: ConversionJournal,
    before: WrittenFiles | None,
) -> WrittenFiles:
    """One file of parameters, unless it is there already, as `before` says."""
    if before is not None and _is_whole(path, before):
        wrote(sum(map(_nbytes, batch)))
        return before
    storage.remove_file(path)
    tensors = {}
    with BoxFile(path) as file:
        for shard, dtype in batch:
            boxes = []
            for box in divide(shard.box, BOX_NBYTES // dtype.itemsize):
                boxes.append(
                    file.add(box, [weights.read(shard.name, part, dtype) for part in _slices(box)])
                )
            tensors[f"model.{shard.name}"] = StoredTensor(
                shard.shape, dtype_name(dtype), tuple(boxes)
            )
            wrote(shard.numel * dtype.itemsize)
    part = WrittenFiles(tensors, {file.name: StoredFile(file.nbytes)})
    journal.add(file.name, _record(part, file.name))
    return part


def _slices(box: Box) -> list[Box]:
    """Of a few matrices in one parameter, as keys and values or gate and up are, each: others have
    them apart."""
    (start, stop), *rest = box
    few = len(rest) > 1 and stop - start <= 4
    return [((i, i + 1), *rest) for i in range(start, stop)] if few else [box]

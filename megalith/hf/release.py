"""Write weights from any source as a checkpoint that contains weights only, a few parameters at a
time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megalith import storage
from megalith.checkpoint.format import (
    StoredBox,
    StoredFile,
    StoredTensor,
    divide,
    folder_name,
    merge_tensors,
    sha256,
)
from megalith.checkpoint.save import BOX_NBYTES, BoxFile, WrittenFiles, commit, dtype_name
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig, TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.hf.folder import Weights, check_free_space
from megalith.hf.staging import (
    CONVERSION,
    ConversionJournal,
    ConversionOptions,
    open_staging,
    publish,
    run_in_order,
    split_by_nbytes,
)
from megalith.hf.tensor_rules import dtype_to_write
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.shards import Box, Shard

BATCH_NBYTES = 256 * 2**20
"""Approximate size of a file (heuristic)."""


def parameters(model: ModelConfig) -> list[Shard]:
    """Return the full shard of every parameter of a model, in the order of the forward pass."""
    return [
        spec.shard
        for spec, _, _ in iter_parameter_specs(
            Decoder(build_context(model, build_single_rank_mesh()))
        )
    ]


def release_run(name: str, model: ModelConfig, tokenizer: TokenizerConfig, path: Path) -> TrainRun:
    """Return settings to train from such a checkpoint; they name no dataset yet."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(),
        tokenizer=tokenizer,
        train=LoopConfig(steps=1000, global_batch_size=8, seq_len=min(2048, model.max_seq_len)),
        schedule=ScheduleConfig(lr=1e-5, warmup_steps=0.05),  # common for pretrained models
        checkpoint=CheckpointConfig(load=str(path.absolute())),
    )


def write_release(
    path: Path,
    model: ModelConfig,
    weights: Weights,
    options: ConversionOptions = CONVERSION,
    *,
    config_text: str,
    state: Mapping[str, Any] | None = None,  # JSON
    auxiliary_files: Mapping[str, bytes] | None = None,
) -> int:
    """Write the checkpoint folder `path` and return the bytes of its weights. The folder appears
    complete or not at all. `auxiliary_files` are written beside the weights.

    Raises:
        CheckpointError: the path exists, or writing failed.
    """
    with open_staging(path, options.attempt) as work:
        staging = work.folder / f"{folder_name(0)}.tmp"
        items = [
            (shard, dtype_to_write(shard.name, weights.dtype(shard.name), options.dtype))
            for shard in parameters(model)
        ]
        files = [
            (f"__{number}_0.distcp", batch)
            for number, batch in enumerate(split_by_nbytes(items, _nbytes, BATCH_NBYTES))
        ]
        finished_files = _find_finished_files(staging, {name for name, _ in files}, work.journal)
        check_free_space(
            work.folder,
            sum(sum(map(_nbytes, batch)) for name, batch in files if name not in finished_files),
        )
        jobs = [
            partial(
                _write_batch,
                staging / name,
                batch,
                weights,
                options.on_written,
                work.journal,
                finished_files.get(name),
            )
            for name, batch in files
        ]
        parts = list(run_in_order(jobs, options.workers))
        written = WrittenFiles(
            merge_tensors(part.tensors for part in parts),
            {k: v for part in parts for k, v in part.files.items()},
        )
        for name, contents in (auxiliary_files or {}).items():
            storage.write_new(staging / name, contents)
        finished, _ = commit(staging, 0, [written], dict(state or {}), config_text)
        publish(work, finished, path)
    return sum(map(_nbytes, items))


def _find_finished_files(
    staging: Path, names: Collection[str], journal: ConversionJournal
) -> dict[str, WrittenFiles]:
    """Return the files that an interrupted conversion finished, according to its journal; other
    files are removed."""
    finished = staging.with_suffix("")
    if finished.exists():  # killed between writing the last file and renaming the folder
        storage.rename(finished, staging)
    if not staging.exists():
        storage.make_folder(staging)
    recorded = {name: _parse_record(name, journal.get(name)) for name in names}
    for name in storage.list_names(staging):
        if recorded.get(name) is None:
            storage.remove_file(staging / name)
    return {
        name: part
        for name, part in recorded.items()
        if part is not None and (staging / name).exists()
    }


def _parse_record(name: str, record: Any) -> WrittenFiles | None:  # JSON
    """Parse the journal record of a file; None: there is no valid one."""
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
    except (TypeError, KeyError, ValueError):  # no record, or one of another version
        return None


def _make_record(part: WrittenFiles, name: str) -> dict[str, Any]:  # JSON
    """Return the journal record of a file."""
    tensors = {
        key: (
            tensor.shape,
            tensor.dtype,
            [(box.box, box.offset, box.nbytes, box.sha256) for box in tensor.boxes],
        )
        for key, tensor in part.tensors.items()
    }
    return {"nbytes": part.files[name].nbytes, "tensors": tensors}


def _is_complete(file: Path, part: WrittenFiles) -> bool:
    boxes = [box for tensor in part.tensors.values() for box in tensor.boxes]
    return storage.file_nbytes(file) == part.files[file.name].nbytes and all(
        sha256(storage.mapped(file, box.offset, box.nbytes)) == box.sha256 for box in boxes
    )


Item = tuple[Shard, torch.dtype]
"""A parameter, and the dtype in which it is written."""


def _nbytes(item: Item) -> int:
    return item[0].numel * item[1].itemsize


def _write_batch(
    path: Path,
    batch: Sequence[Item],
    weights: Weights,
    on_written: Callable[[int], None],
    journal: ConversionJournal,
    finished: WrittenFiles | None,
) -> WrittenFiles:
    """Write one file of parameters, unless `finished` describes a valid one."""
    if finished is not None and _is_complete(path, finished):
        on_written(sum(map(_nbytes, batch)))
        return finished
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
            on_written(shard.numel * dtype.itemsize)
    part = WrittenFiles(tensors, {file.name: StoredFile(file.nbytes)})
    journal.add(file.name, _make_record(part, file.name))
    return part


def _slices(box: Box) -> list[Box]:
    """Split a box of a few stacked matrices, such as keys and values: other formats store them
    separately."""
    (start, stop), *rest = box
    is_stacked = len(rest) > 1 and stop - start <= 4
    return [((i, i + 1), *rest) for i in range(start, stop)] if is_stacked else [box]

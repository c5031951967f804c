"""Files of tensor boxes that a conversion writes with several threads, and resumes after an
interruption.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import (
    StoredBox,
    StoredFile,
    StoredTensor,
    merge_tensors,
    numel,
    sha256,
)
from megalith.checkpoint.save import BoxFile, WrittenFiles, dtype_name
from megalith.hf.folder import check_free_space
from megalith.hf.staging import ConversionJournal, ConversionOptions, run_in_order, split_by_nbytes
from megalith.plan.shards import Box


@dataclass(frozen=True, slots=True, eq=False)
class BoxesToWrite:
    """Boxes of one tensor that are written into one file, and how to read their values."""

    key: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""

    dtype: torch.dtype
    boxes: tuple[Box, ...]
    read: Callable[[Box], Sequence[Tensor]]
    """Return the values of a box, in `dtype`: tensors whose concatenated elements are those of the
    box."""

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(map(numel, self.boxes)) * self.dtype.itemsize


def split_into_files(
    items: Sequence[BoxesToWrite], least: int
) -> list[tuple[str, Sequence[BoxesToWrite]]]:
    """Split items into files of at least `least` bytes, except for the last; return each with its
    name."""
    batches = split_by_nbytes(items, lambda item: item.nbytes, least)
    return [(f"__{number}_0.distcp", batch) for number, batch in enumerate(batches)]


def write_box_files(
    staging: Path,
    files: Sequence[tuple[str, Sequence[BoxesToWrite]]],
    options: ConversionOptions,
    journal: ConversionJournal,
    *,
    hashes: bool = True,
) -> WrittenFiles:
    """Write files into a folder; those that an interrupted conversion finished are checked and
    kept, and all other files in the folder are removed. `hashes`: whether boxes are hashed.

    Raises:
        CheckpointError: too little space is free, the boxes do not tile their tensors, or a source
            is damaged.
        OSError: writing failed.
    """
    finished_files = _find_finished_files(staging, {name for name, _ in files}, journal)
    unfinished = [batch for name, batch in files if name not in finished_files]
    check_free_space(staging.parent, sum(item.nbytes for batch in unfinished for item in batch))
    jobs = [
        partial(
            _write_file,
            staging / name,
            batch,
            options.on_written,
            journal,
            finished_files.get(name),
            hashes=hashes,
        )
        for name, batch in files
    ]
    parts = list(run_in_order(jobs, options.workers))
    return WrittenFiles(
        merge_tensors(part.tensors for part in parts),
        {name: file for part in parts for name, file in part.files.items()},
    )


def _find_finished_files(
    staging: Path, names: Collection[str], journal: ConversionJournal
) -> dict[str, WrittenFiles]:
    """Return the files that an interrupted conversion finished, according to its journal; other
    files are removed."""
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
                    StoredBox(tuple((a, b) for a, b in box), name, *location)
                    for box, *location in boxes
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
        not box.sha256 or sha256(storage.mapped(file, box.offset, box.nbytes)) == box.sha256
        for box in boxes
    )


def _write_file(
    path: Path,
    batch: Sequence[BoxesToWrite],
    on_written: Callable[[int], None],
    journal: ConversionJournal,
    finished: WrittenFiles | None,
    *,
    hashes: bool,
) -> WrittenFiles:
    """Write one file, unless `finished` describes a valid one."""
    if finished is not None and _is_complete(path, finished):
        on_written(sum(item.nbytes for item in batch))
        return finished
    storage.remove_file(path)
    boxes: dict[str, list[StoredBox]] = {item.key: [] for item in batch}
    with BoxFile(path, hashes=hashes) as file:
        for item in batch:
            for box in item.boxes:
                boxes[item.key].append(file.add(box, item.read(box)))
            on_written(item.nbytes)
    tensors = {
        item.key: StoredTensor(item.shape, dtype_name(item.dtype), tuple(boxes[item.key]))
        for item in batch
    }
    part = WrittenFiles(tensors, {file.name: StoredFile(file.nbytes)})
    journal.add(file.name, _make_record(part, file.name))
    return part

"""Table of a local checkpoint (`local.json`), and how a rank's folder is completed; without torch,
for the writer processes of asynchronous saves."""

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from megalith import storage
from megalith.checkpoint.manifest import (
    DTYPE_NAMES,
    STATE,
    StoredBox,
    WrittenPart,
    dump_part,
    folder_name,
    manifest_digest,
    parse_part,
    sha256,
)
from megalith.errors import CheckpointError
from megalith.plan.shards import Box
from megalith.plan.tiers import LocalFolder

TABLE = "local.json"
FORMAT = 1
"""Format version of a local checkpoint."""


@dataclass(frozen=True, slots=True)
class LocalTable:
    """Content of `local.json`."""

    run: str
    rank: int
    step: int
    save: str
    """Identifies the save on all ranks."""

    folder: str
    """Identifies this folder."""

    world_size: int
    lineage: tuple[int, ...]
    """Steps from which the run had been rolled back."""

    state_sha256: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of every tensor of the checkpoint, on whichever rank."""

    parts: Mapping[int, WrittenPart]
    """Boxes in this folder, by the rank that saved them."""

    def as_local_folder(self) -> LocalFolder:
        """Return what recovery is planned with."""
        boxes: dict[str, set[Box]] = {}
        for part in self.parts.values():
            for key, tensor in part.tensors.items():
                boxes.setdefault(key, set()).update(stored.box for stored in tensor.boxes)
        shapes = {key: shape for key, (shape, _) in self.tensors.items()}
        return LocalFolder(
            self.folder, self.rank, self.step, self.save, self.world_size, shapes, boxes
        )

    def stored_boxes(self) -> dict[tuple[str, Box], StoredBox]:
        """Return the position of every box in this folder."""
        return {
            (key, stored.box): stored
            for part in self.parts.values()
            for key, tensor in part.tensors.items()
            for stored in tensor.boxes
        }


def dump_table(table: LocalTable) -> bytes:
    """Return the text of `local.json`."""
    raw = {
        "format": FORMAT,
        "run": table.run,
        "rank": table.rank,
        "step": table.step,
        "save": table.save,
        "folder": table.folder,
        "world_size": table.world_size,
        "lineage": list(table.lineage),
        "state_sha256": table.state_sha256,
        "tensors": {key: [list(shape), dtype] for key, (shape, dtype) in table.tensors.items()},
        "parts": {str(rank): json.loads(dump_part(part)) for rank, part in table.parts.items()},
    }
    return json.dumps(raw | {"sha256": manifest_digest(raw)}).encode()


def parse_table(data: bytes, path: Path) -> LocalTable:
    """Parse and validate the table in `data`, which is not trusted.

    Raises:
        CheckpointError: `path` is not a table, has a newer format, or was changed.
    """
    try:
        raw = storage.parse_json(data)
        digest = raw.pop("sha256")
        if int(raw["format"]) > FORMAT:
            raise ValueError(f"format {raw['format']}, expected at most {FORMAT}")
        if manifest_digest(raw) != digest:
            raise ValueError("its SHA-256 differs: the file was changed after it was saved")
        tensors = {
            str(key): (tuple(map(int, shape)), str(dtype))
            for key, (shape, dtype) in raw["tensors"].items()
        }
        if unknown := {dtype for _, dtype in tensors.values()} - {*DTYPE_NAMES}:
            raise ValueError(f"dtypes {', '.join(sorted(unknown))}, expected known ones")
        return LocalTable(
            str(raw["run"]),
            int(raw["rank"]),
            int(raw["step"]),
            str(raw["save"]),
            str(raw["folder"]),
            int(raw["world_size"]),
            tuple(map(int, raw["lineage"])),
            str(raw["state_sha256"]),
            tensors,
            {
                int(rank): parse_part(json.dumps(part).encode(), path)
                for rank, part in raw["parts"].items()
            },
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: this is not the table of a local checkpoint ({type(error).__name__}: "
            f"{error}). Its boxes are not used."
        ) from error


def box_file(rank: int) -> str:
    """Return the name that `write_boxes` gives to a rank's file."""
    return f"__{rank}_0.distcp"


SPACE_ADVICE = (
    "Free some space, set checkpoint.local.keep or checkpoint.local.replication_factor to a lower "
    "number, or set checkpoint.local.folder to a local disk."
)


@contextmanager
def explain_full(folder: Path) -> Iterator[None]:
    """Report a full file system with the settings that help."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckpointError(f"{folder} is full ({error.strerror}). {SPACE_ADVICE}") from error


def commit_local_folder(staging: Path, table: LocalTable, state: bytes) -> None:
    """Write state and table into the temporary folder of a rank, and rename it to its final name.

    Raises:
        CheckpointError: the file system is full.
    """
    folder = staging.parent
    table = replace(table, state_sha256=sha256(state))
    with explain_full(folder.parent):
        storage.write_new(staging / STATE, state)
        storage.write_new(staging / TABLE, dump_table(table))
    storage.sync_folder(staging)
    target = folder / folder_name(table.step)
    if storage.exists(target):
        storage.remove_tree(target)
    storage.rename(staging, target)
    storage.sync_folder(folder)

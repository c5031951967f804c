"""Staging folders of conversions: weights are written beside the target under a name that
identifies the process, and renamed when complete; the journal and the jobs of a conversion.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from megalith import storage
from megalith.checkpoint.format import MANIFEST
from megalith.errors import CheckpointError

# Journal of a conversion: a line for each finished piece, from which an interrupted conversion is
# resumed.

NAME = "journal.jsonl"

Recipe = Mapping[str, str]
"""What determines every byte of a conversion, by readable names: its source and its settings."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a conversion treats the work of an interrupted one with the same recipe."""

    recipe: Recipe
    restart: bool = False
    """Discard the work of an interrupted conversion."""

    take_over: bool = False
    """Also resume a conversion that may still be running on another machine."""

    keep: bool = False
    """Keep finished pieces if this conversion fails; resumed ones are always kept."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """How a conversion writes the tensors of a model."""

    dtype: torch.dtype | None = None
    """Dtype to write; unset: that of each parameter."""

    on_written: Callable[[int], None] = lambda nbytes: None
    """Called with the bytes of each tensor, from any worker."""

    workers: int = 1
    """Threads that write concurrently; each holds a few tensors in memory."""

    attempt: Attempt | None = None
    """Reuse the finished parts of an interrupted conversion with the same settings."""


CONVERSION = ConversionOptions()


class ConversionJournal:
    """The finished pieces of a conversion, by name. Thread-safe."""

    def __init__(
        self, path: Path | None, done: Mapping[str, Any] | None = None
    ) -> None:  # Any: JSON
        """`path` unset: no file is written."""
        self._path, self._done, self._lock = path, dict(done or {}), threading.Lock()

    def __len__(self) -> int:
        return len(self._done)

    def reopen(self, folder: Path) -> "ConversionJournal":
        """Return the journal in a renamed folder; a truncated last line is terminated and
        ignored."""
        if storage.read_bytes(folder / NAME)[-1:] != b"\n":
            storage.append_line(folder / NAME, b"")
        return ConversionJournal(folder / NAME, self._done)

    def get(self, name: str) -> Any | None:  # JSON
        """Return the record of a finished piece, or None."""
        return self._done.get(name)

    def add(self, name: str, record: Any) -> None:  # JSON
        """Record that a piece is finished.

        Raises:
            OSError: writing failed.
        """
        with self._lock:
            if self._path is not None:
                storage.append_line(
                    self._path, json.dumps([name, record], separators=(",", ":")).encode()
                )
            self._done[name] = record


def begin_journal(folder: Path, recipe: Recipe) -> ConversionJournal:
    """Create an empty journal in a new folder."""
    storage.append_line(folder / NAME, json.dumps(dict(recipe)).encode())
    return ConversionJournal(folder / NAME)


def read_journal(folder: Path) -> tuple[Recipe, ConversionJournal] | None:
    """Read the complete lines of the journal of an interrupted conversion; None: there is no
    readable one."""
    try:
        first, *lines = storage.read_bytes(folder / NAME).split(b"\n")
        recipe = storage.parse_json(first)
    except (OSError, ValueError):
        return None
    if not isinstance(recipe, dict):
        return None
    done = {}
    for line in lines[:-1]:  # the last element is empty or a truncated line
        try:
            name, record = storage.parse_json(line)
        except (ValueError, TypeError):
            continue
        done[str(name)] = record
    return {str(name): str(value) for name, value in recipe.items()}, ConversionJournal(
        folder / NAME, done
    )


def describe_changes(before: Recipe, now: Recipe) -> list[str]:
    """Return how two recipes differ, a line each."""
    names = dict.fromkeys((*now, *before))
    return [
        f"{name}: {before.get(name, 'nothing')} before, {now.get(name, 'nothing')} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


INSIDES = MANIFEST, "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
"""Files of which every folder of weights has one; other programs also write files named like a
manifest."""

OWN_FIELD = re.compile(rb'"world_size"\s*:')
"""Field in the first lines of Megalith's manifests."""

Owner = Literal["gone", "here", "elsewhere"]
"""Process that created a staging folder: ended, running on this machine, or unknown because it is
on another machine."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingWork:
    """A staging folder, and the journal of its finished pieces."""

    folder: Path
    """Its contents are moved to the target at the end, and it is removed."""

    journal: ConversionJournal


@contextmanager
def open_staging(path: Path, attempt: Attempt | None) -> Iterator[StagingWork]:
    """Provide a staging folder for `path`; work of an interrupted conversion with the same recipe
    is resumed.

    The folder is removed at the end; after an error or Ctrl-C it stays if finished pieces are to be
    kept.

    Raises:
        CheckpointError: see `prepare_staging`; or an interrupted conversion had other settings or
            another source.
    """
    interrupted = None if attempt is None or attempt.restart else _find_resumable(path, attempt)
    folder, journal = (
        prepare_staging(path, interrupted[0] if interrupted else None),
        ConversionJournal(None),
    )
    is_kept = False
    try:
        if interrupted is not None:
            storage.rename(interrupted[0], folder)
            journal = interrupted[1]  # its pieces count even if the next line fails
            journal = journal.reopen(folder)
            log.warning(
                "%s: resuming an interrupted conversion with %d finished pieces", path, len(journal)
            )
        else:
            storage.make_folder(folder)
            journal = journal if attempt is None else begin_journal(folder, attempt.recipe)
        yield StagingWork(folder, journal)
    except (OSError, CheckpointError, KeyboardInterrupt) as error:
        keep = attempt is not None and (attempt.keep or interrupted is not None)
        # otherwise nothing can be resumed
        is_kept = keep and len(journal) > 0 and not os.path.lexists(path)
        if is_kept:
            log.warning(
                "%s: %d finished pieces are kept. Run the same command again to resume",
                folder,
                len(journal),
            )
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path}: not written ({error}). Free some space, or choose another target."
            ) from error
        raise
    finally:
        if not is_kept:
            storage.remove_tree(folder)


def publish(work: StagingWork, finished: Path, path: Path) -> None:
    """Rename the finished folder to `path`, durably, and remove the staging folder.

    Raises:
        CheckpointError: the path was created by another process.
    """
    check_target(path)
    storage.rename(finished, path)
    storage.remove_tree(work.folder)
    storage.sync_folder(path.parent)


def _find_resumable(path: Path, attempt: Attempt) -> tuple[Path, ConversionJournal] | None:
    """Return the most advanced interrupted conversion to resume.

    Raises:
        CheckpointError: it had another source or other settings.
    """
    check_target(path)
    with _converted_os_errors(path):
        candidates = [
            (folder, content)
            for folder, owner in find_staging_folders(path)
            if (owner == "gone" or (owner == "elsewhere" and attempt.take_over))
            and (content := read_journal(folder)) is not None
            and len(content[1])
        ]
    matching = [
        (folder, journal)
        for folder, (recipe, journal) in candidates
        if not describe_changes(recipe, attempt.recipe)
    ]
    if candidates and not matching:
        folder, (recipe, journal) = max(candidates, key=lambda item: len(item[1][1]))
        lines = "\n".join(f"  {line}" for line in describe_changes(recipe, attempt.recipe))
        raise CheckpointError(
            f"{folder}: an interrupted conversion to {path} with {len(journal)} finished pieces "
            "had "
            f"another source or other settings:\n{lines}\nUse these settings to resume it, or pass "
            "--restart to start again."
        )
    return max(matching, key=lambda item: len(item[1]), default=None)


def prepare_staging(path: Path, keep: Path | None = None) -> Path:
    """Return a staging folder to be created; renaming it to `path` is the last step.

    Folders of ended processes are removed, except `keep`; a warning names folders whose process may
    still run.

    Raises:
        CheckpointError: see `check_target`; or file access failed.
    """
    check_target(path)
    with _converted_os_errors(path):
        for folder, owner in find_staging_folders(path):
            if folder == keep:
                continue
            if owner == "gone":
                storage.remove_tree(folder)
                log.warning("%s: removed; it was left by a conversion that was killed", folder)
            elif owner == "here":
                text = (
                    "%s: another conversion to %s is running, or a process with the same id. "
                    "Remove the folder if"
                )
                log.warning(f"{text} that process is not a conversion", folder, path)
            else:
                text = (
                    "%s: another conversion to %s is running on another machine, or was killed. "
                    "If it was killed, remove the folder"
                )
                log.warning(f"{text}, or pass --take-over to resume it", folder, path)
    return path.with_name(f".{path.name}.tmp-{_machine_id()}-{os.getpid()}-{secrets.token_hex(4)}")


def check_target(path: Path) -> None:
    """Check that nothing exists at the target, and that it is not inside other weights.

    Raises:
        CheckpointError: the path exists or is not accessible, or it is below a file, a checkpoint
            or a model.
    """
    with _converted_os_errors(path):
        _check_path(path)


@contextmanager
def _converted_os_errors(path: Path) -> Iterator[None]:
    """Convert OSErrors to CheckpointErrors.

    Raises:
        CheckpointError: the operating system reported an error.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: not written ({error}). Choose another target, or change its permissions."
        ) from error


def _check_path(path: Path) -> None:
    if path.exists() or path.is_symlink():  # also a dangling link
        raise CheckpointError(
            f"{path} already exists and is not overwritten. Choose another target, or remove it."
        )
    for folder in path.absolute().parents:
        if folder.is_file():
            raise CheckpointError(
                f"{path} is below {folder}, which is a file. Choose another target."
            )
        if any((folder / name).is_file() and _marks_weights(folder / name) for name in INSIDES):
            raise CheckpointError(
                f"{path} is inside {folder}, which is a checkpoint or a model; copying or removing "
                f"that would include it. Choose a target outside of it."
            )
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
            raise CheckpointError(
                f"{path} is among the checkpoints of the run {folder.parent}, which would treat it "
                f"as one of them. Choose a target outside of {folder}."
            )


def _marks_weights(file: Path) -> bool:
    """Return whether a file marks a folder of weights; unreadable manifests are taken for other
    programs' files."""
    try:
        return (
            file.name != MANIFEST or OWN_FIELD.search(storage.read_range(file, 0, 4096)) is not None
        )
    except OSError:
        return False


def find_staging_folders(path: Path) -> list[tuple[Path, Owner]]:
    """Return the staging folders of unfinished conversions to `path`, and the state of their
    processes."""
    pattern = re.compile(
        rf"\.{re.escape(path.name)}\.tmp-(?:(?P<machine>.+)-(?P<process>\d+)-)?[0-9a-f]{{8}}"
    )
    folders = []
    for name in storage.list_names(path.parent):
        match = pattern.fullmatch(name)
        if match is not None:
            folders.append((path.with_name(name), _find_owner(match["machine"], match["process"])))
    return folders


def _find_owner(machine: str | None, process: str) -> Owner:
    if machine != _machine_id():
        return "elsewhere"
    return "here" if _is_running(int(process)) else "gone"


def _machine_id() -> str:
    """Return an identifier of this machine for file names: the host name, and a hash that
    distinguishes machines with equal names.

    The hash is of the boot id and the process namespace, or on other systems than Linux of the
    network card.
    """
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        identity = str(uuid.getnode())
    name = re.sub(r"[^\w.]", "_", socket.gethostname())[:24] or "unknown"
    return f"{name}.{hashlib.sha256(identity.encode()).hexdigest()[:8]}"


def _is_running(process: int) -> bool:
    """Return whether another process of this machine has that number."""
    if process == os.getpid():  # an earlier process had the number of this one
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


# Independent jobs of a conversion, run one after another or by several threads.
#
# Reading, casting, hashing and writing release the GIL, so threads run them concurrently.

Item = TypeVar("Item")
Done = TypeVar("Done")


def split_by_nbytes(
    items: Sequence[Item], nbytes: Callable[[Item], int], least: int
) -> list[list[Item]]:
    """Split items into lists of at least `least` bytes each, except for the last.

    >>> split_by_nbytes([3, 1, 4, 1, 5], lambda size: size, 4)
    [[3, 1], [4], [1, 5]]
    """
    lists: list[list[Item]] = []
    remaining = 0
    for item in items:
        if remaining <= 0:
            lists.append([])
            remaining = least
        lists[-1].append(item)
        remaining -= nbytes(item)
    return lists


def run_in_order(jobs: Sequence[Callable[[], Done]], workers: int) -> Iterator[Done]:
    """Yield the results of the jobs in order. After an error or an interrupt, pending jobs are
    canceled."""
    if workers == 1 or len(jobs) == 1:
        for job in jobs:
            yield job()
        return
    pool = ThreadPoolExecutor(min(workers, len(jobs)), thread_name_prefix="convert")
    try:
        for future in [pool.submit(job) for job in jobs]:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)

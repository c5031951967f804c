"""Where a folder of weights is written until it is whole: beside its place, under a name that says
by whom."""

import hashlib
import logging
import os
import re
import secrets
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megalith import storage
from megalith.checkpoint.format import MANIFEST
from megalith.errors import CheckpointError
from megalith.models.journal import Attempt, ConversionJournal, begin_journal, changed, read_journal

INSIDES = (MANIFEST, "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
"""Files of which a folder of weights has one; a manifest may be anybody's, a web page's for one."""

OWN_FIELD = re.compile(rb'"world_size"\s*:')
"""What a manifest of ours has in its first lines."""

Owner = Literal["gone", "here", "elsewhere"]
"""Who began a folder: a process of this machine that is no more, or that works; or one that cannot
be asked."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagingWork:
    """A folder to write in, and what of it is whole already."""

    folder: Path
    """Its contents are moved to the target at the end, and it is removed."""

    journal: ConversionJournal


@contextmanager
def work_on(path: Path, attempt: Attempt | None) -> Iterator[StagingWork]:
    """A place to write what will be `path`; what an earlier attempt of the same kind left is gone
    on with.

    When it ends, the place is removed; after an error or Ctrl-C too, unless some of it is whole,
    and was so before or is to be kept.

    Raises:
        CheckpointError: see `staging_of`; or what an earlier attempt left is of another source or
        has other settings.
    """
    left = None if attempt is None or attempt.restart else _left_for(path, attempt)
    folder, journal = staging_of(path, left[0] if left else None), ConversionJournal(None)
    kept = False
    try:
        if left is not None:
            storage.rename(left[0], folder)
            journal = left[1]  # whole pieces, even if the next line fails
            journal = journal.moved_to(folder)
            log.warning(
                "%s: going on where a conversion was ended: %d pieces are there", path, len(journal)
            )
        else:
            storage.make_folder(folder)
            journal = journal if attempt is None else begin_journal(folder, attempt.recipe)
        yield StagingWork(folder, journal)
    except (OSError, CheckpointError, KeyboardInterrupt) as error:
        keep = attempt is not None and (attempt.keep or left is not None)
        kept = keep and len(journal) > 0 and not os.path.lexists(path)  # else nobody could go on
        if kept:
            log.warning(
                "%s: %d pieces stay. Run the same again to go on with them", folder, len(journal)
            )
        if isinstance(error, OSError):
            raise CheckpointError(
                f"{path}: not written ({error}). Free some space, or choose another target."
            ) from error
        raise
    finally:
        if not kept:
            storage.remove_tree(folder)


def publish(work: StagingWork, finished: Path, path: Path) -> None:
    """Give what is finished its name, which is on the disk when this returns; nothing else is left.

    Raises:
        CheckpointError: another has written something there in the meantime.
    """
    check_target(path)
    storage.rename(finished, path)
    storage.remove_tree(work.folder)
    storage.sync_folder(path.parent)


def _left_for(path: Path, attempt: Attempt) -> tuple[Path, ConversionJournal] | None:
    """What there is to go on with: the furthest of several.

    Raises:
        CheckpointError: it is of another source, or has other settings.
    """
    check_target(path)
    with _refusals_told(path):
        found = [
            (folder, read)
            for folder, owner in leftovers(path)
            if (owner == "gone" or (owner == "elsewhere" and attempt.take_over))
            and (read := read_journal(folder)) is not None
            and len(read[1])
        ]
    same = [
        (folder, journal)
        for folder, (recipe, journal) in found
        if not changed(recipe, attempt.recipe)
    ]
    if found and not same:
        folder, (recipe, journal) = max(found, key=lambda item: len(item[1][1]))
        lines = "\n".join(f"  {line}" for line in changed(recipe, attempt.recipe))
        raise CheckpointError(
            f"{folder}: a conversion to {path} was ended when {len(journal)} pieces were whole, of "
            "another source or "
            f"with other settings:\n{lines}\nUse those again to go on with it, or pass --restart "
            "to begin anew."
        )
    return max(same, key=lambda item: len(item[1]), default=None)


def staging_of(path: Path, keep: Path | None = None) -> Path:
    """A folder to write in, still to be made; renaming it to `path` is the last step.

    What an earlier attempt left there is removed, if nobody can be at work in it any more, and told
    if that is unknown; `keep` stays.

    Raises:
        CheckpointError: see `check_target`; or the disk refused something.
    """
    check_target(path)
    with _refusals_told(path):
        for folder, owner in leftovers(path):
            if folder == keep:
                continue
            if owner == "gone":
                storage.remove_tree(folder)
                log.warning("%s: removed, left by a conversion that was killed", folder)
            elif owner == "here":
                text = (
                    "%s: another conversion to %s works there, or a process with its number. "
                    "Remove it if"
                )
                log.warning(f"{text} that one does something else", folder, path)
            else:
                text = (
                    "%s: another conversion to %s works there, or was killed. Remove it if "
                    "none does"
                )
                log.warning(f"{text}, or pass --take-over to go on with it", folder, path)
    return path.with_name(f".{path.name}.tmp-{_machine()}-{os.getpid()}-{secrets.token_hex(4)}")


def check_target(path: Path) -> None:
    """Refuse to write where something is already, or inside of other weights.

    Raises:
        CheckpointError: the path exists or may not be looked at, or what is above it is a file, a
            checkpoint or a model.
    """
    with _refusals_told(path):
        _check_place(path)


@contextmanager
def _refusals_told(path: Path) -> Iterator[None]:
    """What a disk refuses, in words.

    Raises:
        CheckpointError: it refused something.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: not written ({error}). Choose another target, or set its rights."
        ) from error


def _check_place(path: Path) -> None:
    if path.exists() or path.is_symlink():  # a link to nothing, too
        raise CheckpointError(
            f"{path} exists already and is left as it is. Choose another target, or remove it."
        )
    for folder in path.absolute().parents:
        if folder.is_file():
            raise CheckpointError(
                f"{path} would lie inside {folder}, which is a file. Choose another target."
            )
        if any((folder / name).is_file() and _is_of_weights(folder / name) for name in INSIDES):
            raise CheckpointError(
                f"{path} would lie inside {folder}, which is a checkpoint or a model itself: "
                "whoever checks, copies or "
                f"removes that would meet it. Choose a target outside of it."
            )
        if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
            raise CheckpointError(
                f"{path} would lie among the checkpoints of the run {folder.parent}, which takes "
                "them for its own. "
                f"Choose a target outside of {folder}."
            )


def _is_of_weights(file: Path) -> bool:
    """Whether a file with a name of ours is one of ours; a manifest that may not be read is a
    stranger's."""
    try:
        return (
            file.name != MANIFEST or OWN_FIELD.search(storage.read_range(file, 0, 4096)) is not None
        )
    except OSError:
        return False


def leftovers(path: Path) -> list[tuple[Path, Owner]]:
    """Folders that conversions to `path` began and did not end, and what is known of who did."""
    pattern = re.compile(
        rf"\.{re.escape(path.name)}\.tmp-(?:(?P<machine>.+)-(?P<process>\d+)-)?[0-9a-f]{{8}}"
    )
    found = []
    for name in storage.list_names(path.parent):
        match = pattern.fullmatch(name)
        if match is not None:
            found.append((path.with_name(name), _owner(match["machine"], match["process"])))
    return found


def _owner(machine: str | None, process: str) -> Owner:
    if machine != _machine():
        return "elsewhere"
    return "here" if _at_work(int(process)) else "gone"


def _machine() -> str:
    """This machine, as a part of a file's name: its own, and what differs where two on a shared
    disk have the same one.

    That is when it was started, and where its processes are counted; elsewhere than on Linux its
    network card.
    """
    try:
        which = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink(
            "/proc/self/ns/pid"
        )
    except OSError:
        which = str(uuid.getnode())
    name = re.sub(r"[^\w.]", "_", socket.gethostname())[:24] or "unknown"
    return f"{name}.{hashlib.sha256(which.encode()).hexdigest()[:8]}"


def _at_work(process: int) -> bool:
    """Whether another process of this machine has that number."""
    if process == os.getpid():  # an earlier process whose number we have now
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True

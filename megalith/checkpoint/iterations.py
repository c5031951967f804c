"""Folders of Megatron checkpoints: their format, the iteration that a tracker file names, and the
non-tensor state (`common.pt`)."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.chunks import MegatronFormat
from megalith.checkpoint.safe_pickle import read_archive
from megalith.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
"""File of a run's folder that names the newest iteration."""

BACKEND = "metadata.json"
"""File of an iteration that names its format; Megatron writes it last."""

COMMON = "common.pt"
"""File with the non-tensor state: arguments, iteration, scheduler."""

RELEASE = "release"
"""Folder of weights without an iteration, and the name for it in the tracker file."""

COPY = "Copy the checkpoint again, with all of its files, or use another iteration."

_BACKENDS: Mapping[str, MegatronFormat] = {
    "torch_dist": "torch_dist",
    "torch_dcp": "torch_dcp",
    "fsdp_dtensor": "fsdp_dtensor",
    "zarr": "zarr",
}
_BACKEND_VERSION = 1
_ITERATION_NAME = re.compile(r"iter_(\d{7,18})")
_TRACKER_NBYTES = 1024
"""Maximum length of a tracker file. Heuristic: it contains one number."""

_MAX_SHOWN = 8
"""Maximum number of iterations or problems that an error lists. Heuristic."""

_log = logging.getLogger(__name__)


def detect_megatron_format(path: Path) -> MegatronFormat | None:
    """Return the format of a Megatron checkpoint, or of the newest one in a run's folder; None if
    the folder is something else, such as a checkpoint of Megalith.

    Raises:
        CheckpointError: it is a Megatron checkpoint whose format is not read, or whose save was
            interrupted; or no iteration of the run can be used.
    """
    detected = _detect_iteration_format(path)
    if detected is None and _is_run_folder(path):
        return _detect_iteration_format(locate_iteration(path))
    return detected


def _detect_iteration_format(path: Path) -> MegatronFormat | None:
    """Return the format of one iteration's folder; None if it is something else."""
    names = _list_names(path)
    if layout.MANIFEST in names:
        return None
    if BACKEND in names:
        return _read_backend(path, names)
    if layout.METADATA in names:
        if COMMON in names:
            raise CheckpointError(
                f"{path} has no {BACKEND}, which Megatron writes last: the save was interrupted. "
                f"{COPY}"
            )
        return "torch_dcp"
    if any(name.startswith("mp_rank_") for name in names):
        return "torch"
    if any((path / name / ".zarray").is_file() for name in names):
        return "zarr"
    return None


def _read_backend(path: Path, names: list[str]) -> MegatronFormat:
    """Return the format that `metadata.json` names. A damaged one is replaced by what the other
    files say, with a warning."""
    file = path / BACKEND
    try:
        content = storage.parse_json(storage.read_text(file, max_nbytes=2**20))
        if not isinstance(content, dict) or not isinstance(content.get("sharded_backend"), str):
            raise ValueError("expected an object with a sharded_backend")
    except (OSError, ValueError, RecursionError) as error:
        if layout.METADATA in names:
            _log.warning(
                "%s cannot be read (%s); %s is there, so the folder is read as torch_dist",
                file,
                error,
                layout.METADATA,
            )
            return "torch_dist"
        raise CheckpointError(f"{file} cannot be read ({error}). {COPY}") from error
    name, version = content["sharded_backend"], content.get("sharded_backend_version", 1)
    if name not in _BACKENDS:
        raise CheckpointError(
            f"{file}: sharded_backend is {name[:80]!r}, which is not read. Convert the checkpoint "
            f"with Megatron to {', '.join(_BACKENDS)}."
        )
    if version != _BACKEND_VERSION:
        raise CheckpointError(
            f"{file}: {name} of version {str(version)[:40]}, and this build reads version "
            f"{_BACKEND_VERSION}. Save the checkpoint with another version of Megatron."
        )
    return _BACKENDS[name]


def _is_run_folder(path: Path) -> bool:
    """Return whether a folder holds iterations."""
    return (path / TRACKER).is_file() or bool(list_iterations(path))


def list_iterations(path: Path) -> dict[str, Path]:
    """Return the folders of iterations by name, oldest first, `release` before all."""
    names = [name for name in _list_names(path) if _ITERATION_NAME.fullmatch(name)]
    names.sort(key=lambda name: int(name.removeprefix("iter_")))
    folders = {name: path / name for name in (RELEASE, *names)}
    return {name: folder for name, folder in folders.items() if folder.is_dir()}


def _list_names(path: Path) -> list[str]:
    try:
        return storage.list_names(path)
    except NotADirectoryError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Set the path to a folder that this user "
            "may read."
        ) from error


def locate_iteration(path: Path, step: int | None = None) -> Path:
    """Return the folder of an iteration (unset: the one that the tracker file names) of the run in
    `path`, or `path` itself if it is an iteration.

    A tracker file that is missing, damaged, or names a missing folder is reported in a warning,
    and the newest iteration whose files look complete is used.

    Raises:
        CheckpointError: there is no such iteration; lists those that exist.
    """
    if _detect_iteration_format(path) is not None:
        match = _ITERATION_NAME.fullmatch(path.absolute().name)
        if step is not None and match is not None and int(match[1]) != step:
            raise CheckpointError(
                f"{path} is not iteration {step}. Use its parent folder, or omit the step."
            )
        return path
    iterations = list_iterations(path)
    if step is not None:
        folder = iterations.get(_folder_name(step))
        if folder is not None:
            return folder
        raise CheckpointError(f"{path} has no iteration {step}. {_describe(iterations)}")
    if not iterations:
        raise CheckpointError(
            f"{path} has no Megatron checkpoint: no iter_NNNNNNN folder, no {RELEASE}, no "
            f"{BACKEND}. Set the path to a run's folder or to one of its iterations."
        )
    named, problem = _read_tracker(path)
    if named in iterations:
        return iterations[named]
    limit = _iteration_number(named) if named not in (None, RELEASE) else None
    usable = [
        folder
        for name, folder in reversed(iterations.items())
        if (limit is None or _iteration_number(name) < limit) and _looks_complete(folder)
    ]
    problem = problem or f"tracker file names {named}, which does not exist"
    if not usable:
        raise CheckpointError(
            f"{path}: {problem}, and no {'older ' if limit is not None else ''}iteration is "
            f"complete. {_describe(iterations)}"
        )
    _log.warning("%s: %s; scanned directory, using %s", path, problem, usable[0].name)
    return usable[0]


def _read_tracker(path: Path) -> tuple[str | None, str]:
    """Return the folder that the tracker file names, or None and the problem of the file."""
    try:
        data = storage.read_bytes(path / TRACKER, max_nbytes=_TRACKER_NBYTES)
    except FileNotFoundError:
        return None, f"{TRACKER} is missing"
    except OSError as error:
        return None, f"{TRACKER} cannot be read ({error.strerror or error})"
    text = data.decode("latin1").strip(" \t\r\n\0")
    if text == RELEASE:
        return RELEASE, ""
    if re.fullmatch(r"[0-9]{1,18}", text):
        return _folder_name(int(text)), ""
    return None, f"tracker file contains {text[:40]!r}"


def _folder_name(step: int) -> str:
    return f"iter_{step:07d}"


def _iteration_number(name: str) -> int:
    """Return the number in a folder's name; -1 for `release`."""
    match = _ITERATION_NAME.fullmatch(name)
    return -1 if match is None else int(match[1])


def _looks_complete(folder: Path) -> bool:
    """Return whether the format of an iteration is readable, with a warning if not."""
    try:
        if _detect_iteration_format(folder) is not None:
            return True
        problem = "no checkpoint in it"
    except CheckpointError as error:
        problem = str(error)
    _log.warning("skipping %s: %s", folder, problem)
    return False


def _describe(iterations: Mapping[str, Path]) -> str:
    """Return a sentence that lists the newest iterations."""
    if not iterations:
        return "It has no iterations. Set the path to the folder that Megatron saved into (--save)."
    names = list(iterations)[::-1]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return f"Use one of its iterations: {', '.join(names[:_MAX_SHOWN])}{more}."


def list_problems(problems: Sequence[str]) -> str:
    """Return the first problems of a checkpoint's files, one on each line, and how many follow."""
    lines = "\n".join(f"  {problem}" for problem in problems[:_MAX_SHOWN])
    more = len(problems) - _MAX_SHOWN
    return f"{lines}\n  and {more} more" if more > 0 else lines


# --- non-tensor state


def read_common(path: Path) -> dict[str, Any] | None:  # values of a parsed pickle
    """Return the contents of `common.pt`; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or does not contain a dict of names.
    """
    file = path / COMMON
    if not os.path.lexists(file):
        return None
    if not file.is_file():  # opening a pipe would wait for its writer
        raise CheckpointError(f"cannot read {file}: it is not a regular file. {COPY}")
    return check_common(read_archive(file), str(file))


def check_common(value: object, source: str) -> dict[str, Any]:  # as above
    """Return the value after checking that it is a dict of names.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CheckpointError(
            f"{source}: found {type(value).__name__}, expected a dict of names, as Megatron saves "
            f"it. {COPY}"
        )
    return cast(dict[str, Any], value)


def check_iteration(path: Path, common: Mapping[str, Any]) -> None:  # as above
    """Check that a folder's name and its stored iteration agree.

    Raises:
        CheckpointError: they differ; names both.
    """
    match, stored = _ITERATION_NAME.fullmatch(path.absolute().name), common.get("iteration")
    if match is None or type(stored) is not int or stored == int(match[1]):
        return
    raise CheckpointError(
        f"{path}: the folder is iteration {int(match[1])} by its name, and its files say "
        f"{stored}. Rename it to {_folder_name(max(stored, 0))} if it was renamed; otherwise copy "
        "the checkpoint again."
    )

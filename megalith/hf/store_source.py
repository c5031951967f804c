"""Hugging Face and Megatron folders in object stores: their files are downloaded to a temporary
folder of this machine, which is removed at the end of the process."""

import atexit
import functools
import logging
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megalith import storage
from megalith.checkpoint.iterations import RELEASE, TRACKER
from megalith.checkpoint.manifest import MANIFEST, parse_step_name, show_bytes
from megalith.errors import CheckpointError
from megalith.hf.folder import AUXILIARY_FILES, CONFIG
from megalith.hf.peft import ADAPTER_CONFIG
from megalith.object_store import StorePath, list_object_lengths

CHUNK_NBYTES = 2**26
"""Bytes of one request (heuristic: as long as the objects of a checkpoint)."""

_ITERATION = re.compile(rf"iter_\d{{7,18}}|{RELEASE}")
_HF_FILE = re.compile(
    r".*\.(json|safetensors)|" + "|".join(re.escape(name) for name in AUXILIARY_FILES)
)
"""Files of a Hugging Face folder that are read: not those of other frameworks."""

_log = logging.getLogger(__name__)


def download_foreign_folder(source: StorePath) -> Path | None:
    """Return a local copy of the Hugging Face folder, Megatron iteration or folder of iterations
    that a URL names; None if it names something else.

    Of a folder of iterations only the one that its tracker names is copied.

    Raises:
        CheckpointError: the files do not fit on the disk, or the folder has no usable tracker.
        OSError: the store cannot be read.
    """
    names = storage.list_names(source)
    if MANIFEST in names or any(parse_step_name(name) is not None for name in names):
        return None
    if _ITERATION.fullmatch(source.name):
        return _download(source, "") / source.name if names else None
    if TRACKER in names:
        named = storage.read_bytes(source / TRACKER, max_nbytes=1024).decode(errors="replace")
        text = named.strip()
        iteration = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
        if not _ITERATION.fullmatch(iteration) or iteration not in names:
            iterations = ", ".join(name for name in names if _ITERATION.fullmatch(name)) or "none"
            raise CheckpointError(
                f"{source / TRACKER} names {text[:80]!r}, which does not exist (iterations: "
                f"{iterations}). Use the URL of an iteration, such as {source}/iter_0001000."
            )
        return _download(source / iteration, "") / iteration
    if is_hugging_face(source):
        return _download(source, _HF_FILE.pattern) / source.name
    return None


def is_hugging_face(source: StorePath) -> bool:
    """Return whether a URL names a Hugging Face model or adapters.

    Raises:
        OSError: the store cannot be read.
    """
    names = storage.list_names(source)
    return MANIFEST not in names and (CONFIG in names or ADAPTER_CONFIG in names)


@functools.cache
def _download(source: StorePath, pattern: str) -> Path:
    """Copy the objects under a prefix, or those directly under it whose names match a pattern, to a
    new temporary folder with the name of the prefix; return its parent.

    Raises:
        CheckpointError: there is too little space.
    """
    lengths = {
        path.url.removeprefix(f"{source.url}/"): nbytes
        for path, nbytes in list_object_lengths(source).items()
    }
    if pattern:
        lengths = {name: each for name, each in lengths.items() if re.fullmatch(pattern, name)}
    parent = Path(tempfile.mkdtemp(prefix="megalith-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    needed, free = sum(lengths.values()), storage.free_nbytes(parent)
    if needed > free:
        raise CheckpointError(
            f"{source} is downloaded before it is read; that needs {show_bytes(needed)}, and "
            f"{parent.parent} has {show_bytes(free)}. Free some space, or set the environment "
            "variable TMPDIR to a folder with more."
        )
    _log.info("downloading %s, %s, to %s", source, show_bytes(needed), parent)
    folder = parent / source.name
    folder.mkdir()
    _copy_objects(source, folder, lengths)
    return parent


def _copy_objects(source: StorePath, folder: Path, lengths: Mapping[str, int]) -> None:
    """Copy objects to files of the same names.

    Raises:
        CheckpointError: a name leads out of the folder.
    """
    for name, nbytes in lengths.items():
        if any(part in ("", ".", "..") for part in name.split("/")):
            raise CheckpointError(f"{source}/{name}: this name leads out of the folder. Remove it.")
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with storage.open_new(target) as file:
            for start in range(0, nbytes, CHUNK_NBYTES):
                part = min(CHUNK_NBYTES, nbytes - start)
                file.write(storage.read_range(source / name, start, part))


def check_downloaded(source: str, path: Path) -> None:
    """Check that this machine has the downloaded copy of a folder.

    Raises:
        CheckpointError: it has not, because rank 0 is on another machine.
    """
    if path.is_dir():
        return
    raise CheckpointError(
        f"{source} was downloaded to {path} on the machine of rank 0, and another machine of the "
        "run has no such folder. Set the environment variable TMPDIR to a folder that all machines "
        f"share, or copy {source} to such a folder and pass that."
    )

"""Markers of readers: a process that reads a checkpoint of another run, or from a URL, announces it
by a file `.reading-ID` beside the checkpoint, so that the run's retention does not delete it.

This is best effort: a reader that may not write there is not announced. Imports no torch.
"""

import contextlib
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megalith import storage
from megalith.checkpoint.lock import SILENT_S, measure_silence
from megalith.checkpoint.manifest import parse_step_name
from megalith.object_store import StoreOptions, StorePath
from megalith.storage import StoragePath

RENEW_S = 30.0
"""Seconds after which a reader renews its marker (heuristic: a quarter of the time after which it
is ignored)."""

_MARKER = re.compile(r"\.reading-[0-9a-f]{8}")
_MAX_NBYTES = 4096
_OPTIONS = StoreOptions(retries=2, timeout_seconds=20.0)
"""Requests for markers are given up early, because readers and retention work without."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def mark_reading(path: StoragePath) -> Iterator[None]:
    """Announce that this process reads the checkpoint in `path`, until the end of `with`."""
    folder = _with_short_waits(path.parent)
    marker = folder / f".reading-{secrets.token_hex(4)}"
    if parse_step_name(path.name) is None or not _write(marker, path.name):
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(
        target=_renew, args=(marker, path.name, stop), name="reading-marker", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):  # it is ignored after SILENT_S
            storage.remove_file(marker)


def list_being_read(folder: StoragePath) -> set[str]:
    """Return the names of the checkpoints in `folder` that other processes read now."""
    return {name for name, silence in _list_markers(folder).values() if silence < SILENT_S}


def remove_stale_markers(folder: StoragePath) -> None:
    """Delete the markers of readers that were killed; a failure is ignored."""
    for marker, (_, silence) in _list_markers(folder).items():
        if silence >= SILENT_S:
            with contextlib.suppress(OSError):
                storage.remove_file(marker)


def _renew(marker: StoragePath, name: str, stop: threading.Event) -> None:
    while not stop.wait(RENEW_S):
        _write(marker, name)


def _write(marker: StoragePath, name: str) -> bool:
    """Write a marker; return whether that succeeded."""
    text = json.dumps({"checkpoint": name, "renewed": time.time()}).encode()
    try:
        storage.replace_file(marker, text)
    except OSError as error:
        _log.debug("%s cannot be written, so a run may delete %s: %s", marker, name, error)
        return False
    return True


def _list_markers(folder: StoragePath) -> dict[StoragePath, tuple[str, float]]:
    """Return the checkpoint of each marker, and the seconds since its last renewal: by the clock of
    a disk; for a store by the clocks of reader and run, which may differ."""
    folder = _with_short_waits(folder)
    markers: dict[StoragePath, tuple[str, float]] = {}
    try:
        names = [name for name in storage.list_names(folder) if _MARKER.fullmatch(name)]
    except OSError:
        return {}
    for name in names:
        path = folder / name
        try:
            raw = storage.parse_json(storage.read_bytes(path, max_nbytes=_MAX_NBYTES))
            silence = (
                measure_silence(path)
                if isinstance(path, Path)
                else abs(time.time() - float(raw["renewed"]))
            )
            markers[path] = str(raw["checkpoint"]), silence
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it was just removed, or is no marker
    return markers


def _with_short_waits(path: StoragePath) -> StoragePath:
    return replace(path, options=_OPTIONS) if isinstance(path, StorePath) else path

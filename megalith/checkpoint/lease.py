"""Lease of a folder in an object store: an object that names the one run that writes there, renewed
every 10 seconds, so that two runs do not save to one URL. Imports no torch.

A run also holds the lock of its run folder, which is on a disk; the lease protects against a run
with another folder and the same `checkpoint.folder`.
"""

import contextlib
import json
import logging
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

from megalith import object_store, storage
from megalith.checkpoint.lock import (
    BEAT_S,
    SILENT_S,
    LockHolder,
    create_holder,
    is_running,
    is_this_machine,
    parse_holder,
)
from megalith.errors import CheckpointError
from megalith.object_store import StoreOptions, StorePath

LEASE = "lease.json"

OBSERVE_S = 2.5 * BEAT_S
"""Seconds for which a lease that seems stale is observed, because clocks differ: it would be
renewed twice."""

_MAX_NBYTES = 2**16
_RENEWAL = StoreOptions(retries=2, timeout_seconds=BEAT_S)
"""A renewal is given up before the next one is due."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Content of a lease."""

    holder: LockHolder
    run_folder: str
    """Run folder of the holder."""

    inode: int
    """File number of the run folder, which distinguishes folders of one path on several
    machines."""

    renewed: float
    """Seconds since 1970, by the clock of the holder."""

    def describe(self) -> str:
        """Return the run and process that hold the lease."""
        where = f" (run {self.run_folder})" if self.run_folder else ""
        return f"process {self.holder.pid} on {self.holder.host}{where}"


class StoreLease:
    """Lease of a folder in a store, until `release` or the end of this process."""

    def __init__(self, path: StorePath, record: LeaseRecord) -> None:
        """`path`: of the object, which names this process already."""
        self.path, self._record = path, record
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="store-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Check that this process still holds the lease.

        Raises:
            CheckpointError: the lease names another process, is gone, or cannot be read.
        """
        try:
            record = _read(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error.strerror}), so another run may write to "
                f"{self.path.parent} as well. Make it readable, or set checkpoint.folder to "
                "another URL."
            ) from error
        if record is not None and record.holder == self._record.holder:
            return
        by = "was deleted" if record is None else f"now names {record.describe()}"
        raise CheckpointError(
            f"{self.path.parent}: this run lost its lease; {LEASE} {by}. Only one run may write "
            "there: stop the other one and run this again, or set checkpoint.folder to another "
            "URL."
        )

    def release(self) -> None:
        """Stop the renewal and delete the lease; a failure is ignored, because it becomes stale."""
        self._stop.set()
        self._thread.join()
        path = replace(self.path, options=_RENEWAL)
        with contextlib.suppress(OSError):
            record = _read(path)
            if record is not None and record.holder == self._record.holder:
                storage.remove_file(path)

    def _renew(self) -> None:
        path = replace(self.path, options=_RENEWAL)
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next renewal tries again
                record = _read(path)
                if record is not None and record.holder == self._record.holder:
                    storage.replace_file(path, _dump(self._record))

    def __enter__(self) -> "StoreLease":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def acquire_lease(folder: StorePath, run_folder: Path | None) -> StoreLease:
    """Acquire the lease of a folder in a store for this process.

    run_folder: whose lock this process holds, so that the lease of an earlier process of the same
    run is over; None: it is no run.

    Raises:
        CheckpointError: another run holds the lease, and is alive or may be; it is named.
        OSError: the store cannot be used.
    """
    path = folder / LEASE
    record = LeaseRecord(
        create_holder(),
        "" if run_folder is None else str(run_folder.absolute()),
        0 if run_folder is None else run_folder.stat().st_ino,
        0.0,
    )
    if not object_store.create_object(path, _dump(record)):
        other = _read(path)
        # After an error, the object may be this process's own.
        if other is not None and other.holder != record.holder:
            _check_holder_is_dead(path, other, record)
            _log.warning(
                "taking over the lease of %s from %s, which has ended", folder, other.describe()
            )
        storage.replace_file(path, _dump(record))
        stored = _read(path)
        if stored is None or stored.holder != record.holder:
            raise CheckpointError(
                f"{folder}: another run acquired its lease at the same time. Set checkpoint.folder "
                "to another URL."
            )
    return StoreLease(path, record)


def _check_holder_is_dead(path: StorePath, other: LeaseRecord, own: LeaseRecord) -> None:
    """Raise if the process that holds the lease is alive, or may be."""
    if own.run_folder and (own.run_folder, own.inode) == (other.run_folder, other.inode):
        return  # this process holds the lock of that run folder
    who = f"{path.parent} is being written by {other.describe()}"
    advice = "Stop that run, or set checkpoint.folder to another URL"
    if is_this_machine(other.holder):
        if is_running(other.holder):
            raise CheckpointError(f"{who}. {advice}. (lease: {path})")
        return
    silence = abs(time.time() - other.renewed)
    if silence < SILENT_S:
        raise CheckpointError(
            f"{who}, renewed {silence:.0f} s ago. {advice}; if it is gone, run this again in "
            f"{SILENT_S - silence:.0f} s, or delete {path}."
        )
    _log.info("observing the lease %s for %.0f s, because clocks may differ", path, OBSERVE_S)
    time.sleep(OBSERVE_S)
    if _read(path) != other:
        raise CheckpointError(f"{who}, renewed just now. {advice}.")


def _dump(record: LeaseRecord) -> bytes:
    return json.dumps(asdict(replace(record, renewed=time.time()))).encode()


def _read(path: StorePath) -> LeaseRecord | None:
    """Return the content of a lease; None if there is none, or the object is none.

    Raises:
        OSError: the store cannot be read.
    """
    try:
        raw = storage.parse_json(storage.read_bytes(path, max_nbytes=_MAX_NBYTES))
        holder = parse_holder(raw["holder"])
        return LeaseRecord(holder, str(raw["run_folder"]), int(raw["inode"]), float(raw["renewed"]))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None

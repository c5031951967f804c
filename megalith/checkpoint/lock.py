"""Lock of a run folder: a file that names the one process that writes, with a heartbeat for other
machines."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from megalith import storage
from megalith.errors import CheckpointError

NAME = "lock.json"

BEAT_S = 10.0
"""Seconds between heartbeats."""

SILENT_S = 120.0
"""Seconds without heartbeat after which a lock of another machine is stale (heuristic: long stalls
of shared disks)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Process that holds the lock of a run folder."""

    id: str
    host: str
    machine: str
    """Boot id and process namespace: if equal, process ids are comparable."""

    pid: int
    started: str
    """Start time of the process in kernel ticks, which distinguishes processes with a reused id."""


class HeldLease(Protocol):
    """Lease of another folder that the run writes to."""

    def check(self) -> None:
        """Check that this process still holds it."""

    def release(self) -> None:
        """Give it up."""


class RunLock:
    """Lock of a run folder, until `release` or the end of this process."""

    def __init__(self, folder: Path, holder: LockHolder) -> None:
        self.path, self.holder = folder / NAME, holder
        self._leases: list[HeldLease] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def add_lease(self, lease: HeldLease) -> None:
        """Check and release a lease with the lock."""
        self._leases.append(lease)

    def check(self) -> None:
        """Check that this process still holds the lock and its leases, for example after it was
        suspended.

        Raises:
            CheckpointError: the lock names another process, is gone, or cannot be read.
        """
        try:
            holder = _read(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error}), so another run may write to "
                f"{self.path.parent} as well. Make it readable, or choose another folder with "
                "--run."
            ) from error
        if holder == self.holder:
            for lease in self._leases:
                lease.check()
            return
        by = (
            "was deleted or overwritten"
            if holder is None
            else f"now names process {holder.pid} on {holder.host}"
        )
        raise CheckpointError(
            f"{self.path.parent}: this run (process {self.holder.pid} on {self.holder.host}) lost "
            f"its lock; {self.path.name} {by}. Only one run may write there: stop the other one "
            "and run this again, or choose another folder with --run."
        )

    def release(self) -> None:
        """Release the leases, stop the heartbeat and remove the lock file."""
        while self._leases:
            self._leases.pop().release()
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError), _locked_holder(self.path) as holder:
            if holder in (self.holder, None):
                self.path.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next heartbeat tries again
                if _read(self.path) == self.holder:
                    os.utime(self.path)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def create_holder() -> LockHolder:
    """Return a new holder: this process, with an id of its own."""
    pid = os.getpid()
    return LockHolder(secrets.token_hex(8), socket.gethostname(), _machine(), pid, _started(pid))


def lock_run(folder: Path) -> RunLock:
    """Lock the run folder for this process, creating it if necessary; released at the end of
    `with`.

    Raises:
        CheckpointError: another process that is alive, or had a recent heartbeat, holds the lock;
            it is named.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        with _locked_holder(path) as old_holder:
            if old_holder is not None:
                _check_holder_is_dead(folder, old_holder)
                _log.warning(
                    "taking over the lock of %s from process %d on %s, which has ended",
                    folder,
                    old_holder.pid,
                    old_holder.host,
                )
            holder = create_holder()
            storage.replace_file(path, json.dumps(asdict(holder)).encode())
        return RunLock(folder, holder)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written to ({error}). Make it writable, or choose another folder "
            "with --run."
        ) from error


def _check_holder_is_dead(folder: Path, holder: LockHolder) -> None:
    """Raise if the process that holds the lock is alive, or may be."""
    who = f"{folder} is in use by process {holder.pid} on {holder.host}"
    if holder.machine == _machine():
        if is_running(holder):
            raise CheckpointError(
                f"{who}. Stop that process first, or choose another folder with --run. (lock: "
                f"{folder / NAME})"
            )
        return
    silent = measure_silence(folder / NAME)
    if silent < SILENT_S:
        raise CheckpointError(
            f"{who}, heard of {max(silent, 0):.0f} s ago. Stop that run, or choose another folder "
            f"with --run; if it is gone, run this again in {SILENT_S - silent:.0f} s, or delete "
            f"{folder / NAME}."
        )


def find_running_process(folder: Path) -> LockHolder:
    """Return the process that holds the lock of a run folder, and is alive.

    A process of another machine is alive if its last heartbeat is recent.

    Raises:
        CheckpointError: there is none.
    """
    path = folder / NAME
    again = f"Start it with `megalith train {folder}`"
    holder = _read(path)
    if holder is None:
        raise CheckpointError(f"{folder} is not running: it has no {NAME}. {again}.")
    if holder.machine == _machine():
        if not is_running(holder):
            raise CheckpointError(
                f"{folder} is not running: process {holder.pid} on {holder.host}, which holds its "
                f"lock, has ended. {again}."
            )
        return holder
    if (silent := measure_silence(path)) >= SILENT_S:
        raise CheckpointError(
            f"{folder} is not running: process {holder.pid} on {holder.host} was last heard of "
            f"{silent:.0f} s ago, and writes a heartbeat every {BEAT_S:.0f} s. {again}, or check "
            "that machine."
        )
    return holder


@contextlib.contextmanager
def _locked_holder(path: Path) -> Iterator[LockHolder | None]:
    """Read the lock under a file lock, so that no other process of this machine changes it at the
    same time."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Some cluster disks have no file locks; then two runs that start at the same time may
            # both get the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_open_at(handle, path):
                # Otherwise the file was replaced or deleted while this process waited.
                yield _read(path)
                return
        finally:
            os.close(handle)


def _is_open_at(handle: int, path: Path) -> bool:
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _read(path: Path) -> LockHolder | None:
    """Return the holder in the file; None if it is new, or if a crash left it incomplete."""
    try:
        return parse_holder(storage.parse_json(storage.read_bytes(path)))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def parse_holder(fields: Mapping[str, Any]) -> LockHolder:  # Any: JSON
    """Return the holder that fields of JSON describe.

    Raises:
        KeyError, TypeError, ValueError: they describe none.
    """
    return LockHolder(
        **{name: kind(fields[name]) for name, kind in LockHolder.__annotations__.items()}
    )


def is_this_machine(holder: LockHolder) -> bool:
    """Return whether a process is of this machine, so that `is_running` is meaningful."""
    return holder.machine == _machine()


def is_running(holder: LockHolder) -> bool:
    """Return whether a process of this machine is alive."""
    if not Path("/proc/self/stat").exists():  # not Linux: only the process id is checked
        try:
            os.kill(holder.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return holder.started == _started(holder.pid) != ""


def identify_process(pid: int) -> str:
    """Return a text that no other process has, also not one that gets the same id later: boot id,
    process namespace, process id and start time."""
    return f"{_machine()} {pid} {_started(pid)}"


def _started(pid: int) -> str:
    """Return the start time of a process in kernel ticks; empty if there is none or it is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    try:
        return (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + " "
            + os.readlink("/proc/self/ns/pid")
        )
    except OSError:
        return socket.gethostname()


def measure_silence(path: Path) -> float:
    """Return the seconds since the last heartbeat by the clock of the disk, since machines' clocks
    may differ."""
    probe = path.with_name(f"{path.name}.probe-{secrets.token_hex(4)}")
    storage.write_new(probe, b"")
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()

"""One writer per run folder: a file that names it, with a heartbeat for those who cannot see its
process."""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from megalith import storage
from megalith.errors import CheckpointError

NAME = "lock.json"

BEAT_S = 10.0
"""Seconds between heartbeats."""

SILENT_S = 120.0
"""A holder on another machine that was silent for so long is taken for dead (guess: long stalls of
shared disks)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Holder:
    """Who writes to a run folder."""

    id: str
    host: str
    machine: str
    """Boot and process namespace: equal means that process numbers mean the same."""

    pid: int
    started: str
    """When that process began, as the kernel counts: a number that was given out again is another
    process."""


class RunLock:
    """A run folder that is ours until `release`, or until this process ends in whatever way."""

    def __init__(self, folder: Path, holder: Holder) -> None:
        self.path, self.holder = folder / NAME, holder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Make sure that nobody took the folder over while this process was, say, suspended.

        Raises:
            CheckpointError: the lock names somebody else now, is gone, or cannot be read.
        """
        try:
            found = _read(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({error}), so another run may write to "
                f"{self.path.parent} as well. Make it readable, or choose another folder with "
                "--run."
            ) from error
        if found == self.holder:
            return
        by = (
            "was deleted or overwritten"
            if found is None
            else f"now names process {found.pid} on {found.host}"
        )
        raise CheckpointError(
            f"{self.path.parent}: this run (process {self.holder.pid} on {self.holder.host}) lost "
            f"its lock; {self.path.name} {by}. Only one run may write there: stop the other one "
            "and run this again, or choose another folder with --run."
        )

    def release(self) -> None:
        """Give the folder back."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(FileNotFoundError), _alone_with(self.path) as found:
            if found in (self.holder, None):
                self.path.unlink()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the next beat tries again
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


def lock_run(folder: Path) -> RunLock:
    """Take the run folder (made if it does not exist) for this process; released at the end of
    `with`.

    Raises:
        CheckpointError: another process that is alive, or was heard of lately, writes there; it is
        named.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        with _alone_with(path) as found:
            if found is not None:
                _refuse_if_alive(folder, found)
                _log.warning(
                    "taking over %s from process %d on %s, which is gone",
                    folder,
                    found.pid,
                    found.host,
                )
            mine = Holder(
                secrets.token_hex(8),
                socket.gethostname(),
                _machine(),
                os.getpid(),
                _started(os.getpid()),
            )
            storage.replace_file(path, json.dumps(asdict(mine)).encode())
        return RunLock(folder, mine)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written to ({error}). Make it writable, or choose another folder "
            "with --run."
        ) from error


def _refuse_if_alive(folder: Path, found: Holder) -> None:
    """Raise if the process that holds the lock is alive, or may be."""
    who = f"{folder} is in use by process {found.pid} on {found.host}"
    if found.machine == _machine():
        if _is_running(found):
            raise CheckpointError(
                f"{who}. Stop that process first, or choose another folder with --run. (lock: "
                f"{folder / NAME})"
            )
        return
    silent = _silence_s(folder / NAME)
    if silent < SILENT_S:
        raise CheckpointError(
            f"{who}, heard of {max(silent, 0):.0f} s ago. Stop that run, or choose another folder "
            f"with --run; if it is gone, run this again in {SILENT_S - silent:.0f} s, or delete "
            f"{folder / NAME}."
        )


@contextlib.contextmanager
def _alone_with(path: Path) -> Iterator[Holder | None]:
    """What the lock says, read and maybe changed while no other process of this machine does the
    same."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        try:
            # Some cluster disks have no locks; then two starts in the same millisecond are not told
            # apart.
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_open_at(handle, path):  # else it was replaced or deleted while we waited
                yield _read(path)
                return
        finally:
            os.close(handle)


def _is_open_at(handle: int, path: Path) -> bool:
    try:
        return os.fstat(handle).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _read(path: Path) -> Holder | None:
    """Who the file names; None when it is new, or what a crash in the middle of writing left."""
    try:
        found = storage.parse_json(storage.read_bytes(path))
        return Holder(**{name: kind(found[name]) for name, kind in Holder.__annotations__.items()})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _is_running(found: Holder) -> bool:
    if not Path("/proc/self/stat").exists():  # not Linux: the number alone must do
        try:
            os.kill(found.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return found.started == _started(found.pid) != ""


def _started(pid: int) -> str:
    """Start of a process in the kernel's ticks; empty when there is none, or it is dead and not yet
    collected."""
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


def _silence_s(path: Path) -> float:
    """Seconds since the last heartbeat, both ends by the clock of the disk: those of two machines
    may differ."""
    probe = path.with_name(f"{path.name}.probe-{secrets.token_hex(4)}")
    storage.write_new(probe, b"")
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink()

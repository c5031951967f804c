"""The heartbeat of a rank, and its monitor process under torchrun or a batch system; under our
launcher the launcher reads it. Imports no torch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from megalith.launch.heartbeat import (
    HEARTBEATS,
    MAX_GAP_SECONDS,
    HeartbeatReader,
    HeartbeatState,
    RankHeartbeat,
    describe_hung_rank,
    map_heartbeat,
    write_stacks_on_signal,
)
from megalith.launch.launcher import (
    ERROR_FILE,
    LAUNCHER,
    Failure,
    die_with_parent,
    in_worker,
    write_torchrun_record,
)

POLL_SECONDS = 0.5
"""Time between two checks of a monitor process."""


@contextmanager
def open_heartbeat(environment: Mapping[str, str]) -> Iterator[RankHeartbeat]:
    """Open this rank's heartbeat, which the launcher that `environment` describes checks, or under
    torchrun or a batch system a new monitor process. A process without other ranks is not
    monitored."""
    if LAUNCHER in environment and HEARTBEATS in environment:
        fd, stacks_fd = map(int, environment[HEARTBEATS].split(":"))
        with write_stacks_on_signal(stacks_fd):
            yield RankHeartbeat(map_heartbeat(fd))
    elif LAUNCHER not in environment and in_worker(environment):
        reader = HeartbeatReader()
        rank = int(environment["RANK"])
        with (
            closing(reader),
            write_stacks_on_signal(reader.stacks_fd),
            _monitor_process(reader.fd, reader.stacks_fd, rank),
        ):
            yield RankHeartbeat(map_heartbeat(reader.fd))
    else:
        yield RankHeartbeat()


@contextmanager
def _monitor_process(fd: int, stacks_fd: int, rank: int) -> Iterator[None]:
    """Run the monitor process of this rank."""
    package = str(Path(__file__).resolve().parent.parent.parent)
    folders = dict.fromkeys(os.path.abspath(folder) for folder in (*sys.path, package))
    process = subprocess.Popen(
        # -P: a file in the working folder, such as signal.py, hides no module
        [sys.executable, "-P", "-m", "megalith.launch.heartbeat_process"]
        + [str(each) for each in (fd, stacks_fd, os.getpid(), rank)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(fd, stacks_fd),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        start_new_session=True,  # a signal to the group of the ranks does not end it
    )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat_rank{rank}.json"


def _write_state(folder: Path | None, state: HeartbeatState) -> None:
    """Write the state of a rank for the monitors of the other ranks of its machine."""
    if folder is not None:
        with suppress(OSError):
            _heartbeat_file(folder, state.rank).write_text(json.dumps(asdict(state)))


def _read_states(folder: Path | None) -> list[HeartbeatState]:
    """Return what the monitors of this machine have written."""
    states = []
    for path in sorted(folder.glob("heartbeat_rank*.json")) if folder is not None else ():
        with suppress(OSError, ValueError, TypeError):
            states.append(HeartbeatState(**json.loads(path.read_text())))
    return states


def monitor_rank(fd: int, stacks_fd: int, pid: int, rank: int) -> None:
    """Check the heartbeat of the rank that started this process, until either ends. Kill a rank
    that hangs, after its failure was written for torchrun and to standard error."""
    reader = HeartbeatReader(fd, stacks_fd)
    error_file = os.environ.get(ERROR_FILE)
    folder = Path(error_file).parent.parent if error_file else None  # torchrun's own for this start
    last_write = 0.0
    while os.getppid() == pid:
        state = reader.check(rank)
        if time.monotonic() - last_write > MAX_GAP_SECONDS:
            last_write = time.monotonic()
            _write_state(folder, state)
        if state.is_hung:
            hung = describe_hung_rank(state, _read_states(folder), pid, stacks_fd)
            failure = Failure(rank, hung.summary, hung.text, time.monotonic_ns())
            if error_file is not None:
                with suppress(OSError):
                    write_torchrun_record(failure, Path(error_file))
            with suppress(OSError):  # the process that reads it may have ended
                sys.stderr.write(f"megalith: {hung.text}\n")
                sys.stderr.flush()
            if os.getppid() == pid:  # else another process may have its id by now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(min(POLL_SECONDS, (state.timeout_seconds or 8.0) / 8))


def main(arguments: Sequence[str]) -> None:
    """Run the monitor process of a rank."""
    fd, stacks_fd, pid, rank = map(int, arguments)
    die_with_parent(pid)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    monitor_rank(fd, stacks_fd, pid, rank)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Files of JSON lines in a run folder that are only appended to, and the lines of `starts.jsonl`;
no torch."""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.checkpoint.lock import identify_process
from megalith.errors import CheckpointError
from megalith.launch.launcher import Failure
from megalith.observe.limits import read_host_name
from megalith.plan.starts import Start, find_record_problem, parse_starts

STARTS = "starts.jsonl"
"""File of the run folder: one line for each start and for each exit."""

_log = logging.getLogger(__name__)


def append_record(path: Path, record: Mapping[str, Any]) -> None:  # Any: JSON
    """Append a line of JSON to a file, after a line break if a killed process has left an
    incomplete line."""
    line = json.dumps(record).encode()
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
    storage.append_line(path, line)


def read_records(path: Path) -> tuple[list[dict[str, Any]], list[str]]:  # Any: JSON
    """Return the records of a file of JSON lines, and a message for each line that is not one; no
    records if the file is missing or cannot be read. An incomplete last line is left out."""
    try:
        lines = storage.read_bytes(path).splitlines(keepends=True)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"{path} cannot be read ({error.strerror or error})"]
    records, problems = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = storage.parse_json(line)
            if not isinstance(record, dict):
                raise ValueError("it is not an object")
            records.append(record)
        except ValueError as error:
            if number < len(lines) or line.endswith(b"\n"):
                problems.append(f"{path}: line {number} is ignored ({error})")
    return records, problems


def read_starts(folder: Path) -> tuple[list[Start], list[str]]:
    """Return the starts of a run, and what could not be read."""
    records, problems = read_records(folder / STARTS)
    valid: list[dict[str, Any]] = []  # Any: JSON
    for record in records:
        if problem := find_record_problem(record):
            text = f"{folder / STARTS}: {json.dumps(record):.80} is ignored ({problem})"
            problems.append(text)
        else:
            valid.append(record)
    return parse_starts(valid), problems


def reset_attempts(folder: Path) -> bool:
    """Exclude earlier starts of a run from crash-loop detection; return whether it had any.
    Their lines stay, because `megalith report` reads them.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = folder / STARTS
    try:
        if not path.exists():
            return False
        append_record(path, {"kind": "reset", "time": round(time.time(), 3)})
    except OSError as error:
        raise CheckpointError(
            f"--reset-attempts: {path} cannot be written ({error.strerror}). Make it a file that "
            "this user may write, or rename it."
        ) from error
    return True


def record_failure_of_launch(folder: Path, failure: Failure, code: int) -> None:
    """Write how the last start ended, for a launcher: the cause of a job whose ranks have ended.
    Does nothing if the start is not one of this launcher, or has ended already."""
    starts, _ = read_starts(folder)
    if starts and starts[-1].launcher_identity == identify_process(os.getpid()):
        _append_exit(folder, starts[-1], failure, code)


def record_failure_of_rank(folder: Path, failure: Failure, code: int, *, began: float) -> None:
    """Write how the last start ended, for a process that ends this rank. Does nothing if our
    launcher writes it, or the start was written before this rank began, or has ended already."""
    starts, _ = read_starts(folder)
    if starts and starts[-1].launcher is None and starts[-1].time >= began:
        _append_exit(folder, starts[-1], failure, code)


def _append_exit(folder: Path, start: Start, failure: Failure, code: int) -> None:
    """Write how a start ended, unless that is known."""
    if start.exit is not None:
        return
    record = {
        "kind": "exit",
        "start": start.number,
        "time": round(time.time(), 3),
        "cause": failure.summary[:500],
        "code": code,
        "rank": failure.rank,
        "host": read_host_name(),
        "is_consequence": failure.is_consequence,
    }
    try:
        append_record(folder / STARTS, record)
    except OSError as error:
        _log.warning("%s cannot be written (%s)", folder / STARTS, error)


def read_process_start() -> tuple[float, float]:
    """Return when this process began, in seconds since 1970 and of the monotonic clock; now, if
    the system does not provide it."""
    age = 0.0
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        age = max(0.0, uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        age = 0.0
    return time.time() - age, time.monotonic() - age

"""Request files: how `megalith request` asks a running job for an action, and how rank 0 replies.

`requests/ACTION.json` in the run folder is a request, `requests/ACTION.result.json` its result.
A request names the lock of the job that it is for (lock.json), so a job never executes a request
that was meant for an earlier one, whatever the clocks say. Imports no torch.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from megalith import storage
from megalith.checkpoint.lock import LockHolder
from megalith.errors import ConfigError

ACTIONS = ("save", "evaluate", "profile", "stop")
"""Actions that can be requested."""

Status = Literal["done", "failed"]
"""How a request ended."""

MAX_NBYTES = 2**16
"""Largest request that is read; real ones have about 200 bytes."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request for an action of a running job."""

    id: str
    action: str
    lock: str
    """Id of the lock of the job that executes it."""

    pid: int
    """Process of `megalith request`, on `host`."""

    host: str
    created: float
    """Seconds since 1970; only shown."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Result of a request."""

    id: str
    action: str
    status: Status
    step: int
    """Number of finished steps when the request was executed or failed."""

    message: str
    metrics: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """Metrics of an evaluation."""


def write_request(folder: Path, action: str, holder: LockHolder) -> RunRequest:
    """Write a request for the job that holds the lock of the run folder.

    Raises:
        ConfigError: a request for this action is already pending.
    """
    request = RunRequest(
        secrets.token_hex(8), action, holder.id, os.getpid(), socket.gethostname(), time.time()
    )
    path = _request_path(folder, action)
    path.parent.mkdir(exist_ok=True)
    pending = read_request(folder, action)
    if pending is not None and pending.lock != holder.id:  # of a job that has ended
        storage.remove_file(path)
    temporary = path.with_name(f"{path.name}.tmp-{request.id}")
    storage.write_new(temporary, json.dumps(asdict(request)).encode())
    try:
        _link(temporary, path)
    except FileExistsError:
        pending = read_request(folder, action)
        by = "" if pending is None else f" (of {pending}, {_age(pending):.0f} s ago)"
        raise ConfigError(
            f"{folder}: a request to {action} is already pending{by}. Wait until it is executed, "
            f"or remove {path}."
        ) from None
    finally:
        storage.remove_file(temporary)
    return request


def _link(source: Path, target: Path) -> None:
    """Give a complete file a second name; unlike a rename, this fails if the name exists."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if target.exists():
            raise FileExistsError(target) from None
        storage.rename(source, target)


def _age(request: RunRequest) -> float:
    return max(0.0, time.time() - request.created)


def read_request(folder: Path, action: str) -> RunRequest | None:
    """Return the pending request for an action; None if there is none.

    Raises:
        ConfigError: the file is not a request.
    """
    path = _request_path(folder, action)
    try:
        values = storage.parse_json(storage.read_bytes(path, max_nbytes=MAX_NBYTES))
        types = RunRequest.__annotations__
        request = RunRequest(**{name: kind(values[name]) for name, kind in types.items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a request ({error!r:.100}). Remove it, and use `megalith request "
            f"{folder} {action}`."
        ) from error
    if request.action != action:
        raise ConfigError(
            f"{path} requests to {request.action}. Remove it, and use `megalith request {folder} "
            f"{action}`."
        )
    return request


def list_requests(folder: Path) -> list[str]:
    """Return the names of the files in requests/ that are neither results nor incomplete, without
    .json, in the order of ACTIONS."""
    names = storage.list_names(requests_folder(folder))
    actions = [name.removesuffix(".json") for name in names if name.endswith(".json")]
    return sorted(
        (action for action in actions if not action.endswith(".result")),
        key=lambda action: ACTIONS.index(action) if action in ACTIONS else len(ACTIONS),
    )


def remove_request(folder: Path, action: str) -> None:
    """Remove the pending request for an action, if there is one."""
    storage.remove_file(_request_path(folder, action))


def write_result(folder: Path, result: RequestResult) -> None:
    """Write the result of a request, and remove the request."""
    text = json.dumps(asdict(result), default=str)
    storage.replace_file(_result_path(folder, result.action), text.encode())
    with contextlib.suppress(ConfigError):  # another file took its place
        pending = read_request(folder, result.action)
        if pending is not None and pending.id == result.id:
            remove_request(folder, result.action)


def read_result(folder: Path, request: RunRequest) -> RequestResult | None:
    """Return the result of a request; None if there is none yet, or it cannot be read now, as while
    a network disk is replacing it."""
    try:
        values = storage.parse_json(storage.read_bytes(_result_path(folder, request.action)))
        result = RequestResult(**values)
    except (OSError, ValueError, TypeError):
        return None
    return result if result.id == request.id else None


def requests_folder(folder: Path) -> Path:
    """Return the folder of the requests of a run."""
    return folder / "requests"


def _request_path(folder: Path, action: str) -> Path:
    return requests_folder(folder) / f"{action}.json"


def _result_path(folder: Path, action: str) -> Path:
    return requests_folder(folder) / f"{action}.result.json"

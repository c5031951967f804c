"""`megalith request`: ask a running training job to save, evaluate, profile or stop, through a file
in its folder."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from megalith.checkpoint.lock import find_running_process
from megalith.cli.arguments import parse_options
from megalith.cli.evaluate import find_run
from megalith.cli.output import print_json
from megalith.errors import CheckpointError, ConfigError
from megalith.train.request_files import (
    RequestResult,
    RunRequest,
    read_result,
    remove_request,
    write_request,
)

POLL_SECONDS = 0.2

FAILED = 1
"""Exit code if the action failed, or was not executed in time."""


@dataclass(frozen=True, kw_only=True)
class RequestCommand:
    """Ask a running training job for an action, which all of its ranks execute after the same step.

    save: write a checkpoint and continue; evaluate: run all evaluations; profile: profile the next
    steps (profile.steps, profile.ranks); stop: save and exit with code 75.
    """

    run: Positional[str]
    """Folder of a run: a path, or its name under runs/."""

    action: Positional[Literal["save", "evaluate", "profile", "stop"]]
    """What the job is to do."""

    wait: float | None = None
    """Wait up to this number of seconds for the result; unset: do not wait."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code: 1 if the action failed or was not executed in
    time."""
    command = parse_options(RequestCommand, argv, prog="megalith request")
    if command.wait is not None and not 0 <= command.wait < float("inf"):
        raise ConfigError(f"--wait={command.wait} must be at least 0. Use a number of seconds.")
    folder = find_run(command.run)
    holder = find_running_process(folder)
    request = write_request(folder, command.action, holder)
    result = None
    if command.wait is not None:
        result = wait_for_result(folder, request, seconds=command.wait)
    if command.json:
        print_json(_describe(folder, request, result))
    elif result is not None:
        print(f"{folder}: step {result.step}: {result.message}")
    else:
        print(
            f"{folder}: requested to {request.action}; process {holder.pid} on {holder.host} does "
            "so after its current step"
        )
    if result is None and command.wait is not None:
        print(
            f"megalith request: no result after --wait={command.wait:g} seconds; the request "
            f"stays pending in {folder}/requests. Use a longer --wait, or read log.txt.",
            file=sys.stderr,
        )
        return FAILED
    return FAILED if result is not None and result.status == "failed" else 0


def wait_for_result(folder: Path, request: RunRequest, *, seconds: float) -> RequestResult | None:
    """Return the result of a request; None if it is not executed in time. If the job ends without
    a result, the request is removed."""
    deadline = time.monotonic() + seconds
    while True:
        is_running = _is_running(folder, request)
        if (result := read_result(folder, request)) is not None:
            return result
        if not is_running:
            remove_request(folder, request.action)
            message = "the job ended without executing the request"
            return RequestResult(request.id, request.action, "failed", 0, message)
        if time.monotonic() >= deadline:
            return None
        time.sleep(POLL_SECONDS)


def _is_running(folder: Path, request: RunRequest) -> bool:
    """Return whether the job that a request is for is running."""
    try:
        return find_running_process(folder).id == request.lock
    except CheckpointError:
        return False


def _describe(
    folder: Path, request: RunRequest, result: RequestResult | None
) -> dict[str, Any]:  # Any: JSON
    """Return the document of --json."""
    document: dict[str, Any] = {"run": str(folder), "action": request.action, "id": request.id}
    if result is None:
        return document | {"status": "pending"}
    return document | {
        "status": result.status,
        "step": result.step,
        "message": result.message,
        "metrics": dict(result.metrics),
    }

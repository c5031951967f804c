"""`megalith coordinate`: run the coordinator of replica groups, or show the status of a running
one."""

import asyncio
import json
import signal
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.cli.arguments import parse_options
from megalith.cli.output import print_json
from megalith.errors import ConfigError
from megalith.launch.coordinator import CoordinatorServer, StateFolder, format_status

STATUS_SECONDS = 5.0

FAILED = 1
"""Exit code if no coordinator answers."""

LARGEST_PORT = 65_535


@dataclass(frozen=True, kw_only=True)
class CoordinateCommand:
    """Run the coordinator of replica groups: it decides which groups train together, and which
    steps are committed. The groups name it in replica_group.coordinator.

    It may be stopped and started again at any time; the groups wait. It has no access control, so
    open its port to the machines of the groups only.
    """

    host: str = "127.0.0.1"
    """Address at which groups connect; 0.0.0.0: all networks of this machine."""

    port: int = 29700
    """Port at which groups connect; 0: any free port."""

    status_port: int = 29701
    """Port of the status page, on this machine only; 0: any free port."""

    state: Path = Path("coordinator")
    """Folder with the state that survives a restart; one per run."""

    lost_groups: tuple[str, ...] = ()
    """Groups that will not return and that the others wait for, because only they have the newest
    step; the others continue from an older one."""

    status: bool = False
    """Show the status of the coordinator that runs on this machine, and exit."""

    json: bool = False
    """Print one JSON document: the status, or the addresses of the coordinator that starts."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    command = parse_options(CoordinateCommand, argv, prog="megalith coordinate")
    for name, port in (("port", command.port), ("status-port", command.status_port)):
        if not 0 <= port <= LARGEST_PORT:
            raise ConfigError(
                f"--{name}={port} is not a port. Use 0 to {LARGEST_PORT}, e.g. 29700."
            )
    if command.status:
        return show_status(command)
    folder = StateFolder(command.state)
    try:
        return asyncio.run(run_server(command, folder))
    finally:
        folder.close()


async def run_server(command: CoordinateCommand, folder: StateFolder) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the state cannot be read or stored, or a port is in use.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    server = CoordinatorServer(
        folder=folder,
        host=command.host,
        port=command.port,
        status_port=command.status_port,
        lost_groups=command.lost_groups,
    )
    try:
        await server.start()
        if command.json:
            addresses = {"address": server.address, "status_address": server.status_address}
            print_json(addresses | {"state": str(command.state)})
        else:
            print(f"coordinator of replica groups: replica_group.coordinator={server.address}")
            print(f"status: http://{server.status_address}/   state: {command.state}", flush=True)
        sys.stdout.flush()
        await server.run(stop)
    finally:
        await server.close()
    print("megalith coordinate: stopped; the groups wait until it runs again", file=sys.stderr)
    return 0


def show_status(command: CoordinateCommand) -> int:
    """Print the status of the coordinator on this machine."""
    address = f"127.0.0.1:{command.status_port}"
    try:
        with urllib.request.urlopen(
            f"http://{address}/status.json", timeout=STATUS_SECONDS
        ) as page:
            status: dict[str, Any] = storage.parse_json(page.read(16 << 20))  # Any: JSON
        text = format_status(status)
    except (OSError, ValueError, KeyError, TypeError, urllib.error.URLError) as error:
        print(
            f"megalith coordinate: no coordinator answers at --status-port={command.status_port} "
            f"({error}). Start one with `megalith coordinate`, or name its --status-port.",
            file=sys.stderr,
        )
        return FAILED
    print(json.dumps(status, indent=2) if command.json else text)
    return 0

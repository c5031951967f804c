"""Sockets between the HTTP process and the engine processes: pyzmq over ipc, in a folder that only
this user can read."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.errors import ConfigError

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "zmq": "pyzmq",
    "msgpack": "msgpack",
    "prometheus_client": "prometheus-client",
}
"""Packages of the dependency group `serve`, by module name."""

MAX_PATH_BYTES = 100
"""Maximum length of a socket's path: 104 bytes on macOS, 108 on Linux."""


def check_packages(command: str) -> None:
    """Check that the dependency group `serve` is installed.

    Raises:
        ConfigError: a package is missing; the message has the command that installs it.
    """
    missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f'{command} needs {", ".join(missing)}. Install with: pip install "megalith[serve]".'
        )


def socket_address(folder: Path) -> str:
    """Return the address of the HTTP process's socket in a folder.

    Raises:
        ConfigError: the path is too long for a socket.
    """
    path = folder / "engine.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"{path}: too long for a socket. Set TMPDIR to a folder with a short path, such as "
            "/tmp."
        )
    return f"ipc://{path}"


def bind_client_socket(address: str) -> "zmq.asyncio.Socket":
    """Return the socket of the HTTP process, for its event loop: messages have two parts, the
    identity of an engine process and a frame."""
    import zmq
    import zmq.asyncio

    socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
    _set_options(socket)
    socket.bind(address)
    return socket


def connect_engine_socket(address: str, identity: str) -> "zmq.Socket[bytes]":
    """Return the socket of an engine process."""
    import zmq

    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    _set_options(socket)
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(address)
    return socket


def receive_frames(socket: "zmq.Socket[bytes]", *, wait_s: float | None) -> list[bytes]:
    """Return all frames that have arrived; wait up to `wait_s` seconds for the first, None: until
    there is one."""
    import zmq

    frames: list[bytes] = []
    if not socket.poll(None if wait_s is None else int(wait_s * 1000)):
        return frames
    while True:
        try:
            parts = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return frames
        frames.append(parts[0] if len(parts) == 1 else b"")  # no message has several parts


def _set_options(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
    import zmq

    # Without a limit in zmq, so that the engine never blocks and no token is dropped: the number of
    # requests bounds the messages, and the HTTP process reads all of them at once.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)  # milliseconds, for the last message of a process

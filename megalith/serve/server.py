"""Runs a server: starts the engine processes, serves HTTP, and drains at SIGTERM."""

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn  # lint: allow optional-import: imported by a function after check_packages

from megalith.config.server import ServeConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.serve.app import build_app
from megalith.serve.client import LoadError
from megalith.serve.errors import ApiError
from megalith.serve.http_protocol import StreamProtocol
from megalith.serve.metrics import HttpMetrics
from megalith.serve.model_info import freeze_objects
from megalith.serve.state import ServerState
from megalith.serve.supervisor import STOP_SECONDS, EngineSupervisor, open_engine

_logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Server without signal handlers: `Lifecycle` has them."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signal handlers as they are."""
        yield


def open_listener(config: ServeConfig) -> socket.socket:
    """Return the bound socket of a server.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is TCP, not 0
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)  # as uvicorn's default backlog
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"--port={config.port}: another program listens on {config.host}:{config.port}. "
                "Stop it, or use another port; 0 chooses a free one."
            ) from None
        raise ConfigError(
            f"--host={config.host} --port={config.port}: cannot listen there ({error.strerror}). "
            "Use 127.0.0.1, or an address of this machine, and a port above 1023."
        ) from None
    return listener


@dataclass(slots=True)
class Lifecycle:
    """Start and end of a server."""

    state: ServerState
    http: HttpServer
    engine: EngineSupervisor
    show: Callable[[str], None]
    load_error: str | None = None
    """Why the engine process cannot load the model."""

    exit_code: int = 0
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def run(self, listener: socket.socket) -> None:
        """Serve until a signal, or until the engine process ends."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._tasks += [
            asyncio.create_task(self._wait_ready()),
            asyncio.create_task(self._watch_engine()),
        ]
        try:
            await self.http.serve(sockets=[listener])
        finally:
            self.engine.is_stopping = True
            for task in self._tasks:
                task.cancel()

    async def _wait_ready(self) -> None:
        try:
            info = await self.state.client.ready
            await asyncio.to_thread(self.state.set_model, info)
            freeze_objects()
        except LoadError as error:
            self.load_error = str(error)
            self.http.should_exit = True
            return
        except ApiError:  # the engine process ended: `_watch_engine` reports it
            return
        assert self.state.model is not None, "set above"
        template = "chat template " + info.template["name"] if info.template else "no chat template"
        self.show(
            f"ready: model {self.state.model.name}, context {info.max_model_len} tokens, up to "
            f"{info.max_num_seqs} sequences per step, {template}"
        )

    async def _watch_engine(self) -> None:
        code = await self.engine.watch()
        if code is None:
            return
        if self.load_error is None:
            _logger.error("the engine process ended with code %s", code)
            self.exit_code = 1
        self.http.should_exit = True

    def _on_signal(self, number: int) -> None:
        if self.state.is_draining:  # the second signal; the engine process ends with this one
            os._exit(128 + number)
        self.state.is_draining = True
        self.show(
            f"{signal.Signals(number).name}: finishing {self.state.client.num_sequences} sequences "
            f"within {self.state.config.drain_timeout_s:g} s; a second signal exits at once"
        )
        self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        client = self.state.client
        try:
            if self.state.model is not None:
                await client.drain(timeout_s=self.state.config.drain_timeout_s)
        except (ApiError, TimeoutError):  # they did not finish in time
            client.abort_all(
                ApiError(503, "the server was shut down before the request was finished.")
            )
        self.http.should_exit = True


async def serve(
    config: ServeConfig,
    listener: socket.socket,
    engine_settings: dict[str, Any],
    show: Callable[[str], None],
) -> int:
    """Serve a model until a signal ends the server; returns the exit code.

    `engine_settings`: see `EngineSettings`, without the address; `show` gets lines for the user.

    Raises:
        CheckpointError: the model cannot be served.
    """
    async with open_engine(engine_settings) as engine:
        state = ServerState(
            config, engine.client, HttpMetrics(str(engine_settings["served_model_name"])), engine
        )
        http = HttpServer(
            uvicorn.Config(
                build_app(state),
                http=StreamProtocol,
                log_level="warning",
                access_log=False,
                lifespan="off",
                server_header=False,
                timeout_graceful_shutdown=int(STOP_SECONDS),
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        scheme = "http" if config.ssl_certfile is None else "https"
        host, port = listener.getsockname()[:2]
        shown_host = f"[{host}]" if ":" in host else host
        show(f"listening on {scheme}://{shown_host}:{port}; the model is loading")
        lifecycle = Lifecycle(state, http, engine, show)
        await lifecycle.run(listener)
    if lifecycle.load_error is not None:
        raise CheckpointError(lifecycle.load_error)
    return lifecycle.exit_code

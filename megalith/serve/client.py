"""Client of the engine process: starts it, sends requests, and distributes its outputs to the
streams of the event loop."""

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config.generation import SamplingParams
from megalith.config.serve import Pooling
from megalith.serve.errors import ApiError
from megalith.serve.model_info import ModelInfo
from megalith.serve.protocol import (
    AbortRequest,
    AddRequest,
    Codec,
    EngineCall,
    LoadFailed,
    Message,
    PromptResult,
    ProtocolError,
    Ready,
    Reply,
    RequestRejected,
    StepOutputs,
    TokenUpdate,
)
from megalith.serve.transport import bind_client_socket, socket_address

if TYPE_CHECKING:
    import zmq.asyncio

_logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time for the engine process to end after its last request (heuristic)."""


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """One prompt of a generation."""

    token_ids: list[int]
    params: SamplingParams
    pooling: Pooling | None = None
    """Return an embedding instead of tokens."""

    adapter: str | None = None
    """Name of a LoRA adapter; None: the base model."""


@dataclass(slots=True)
class Generation:
    """Outputs of the requests of one HTTP request: one for each prompt.

    Outputs that are not read yet wait here, at most those of the requests; the engine never waits
    for a reader.
    """

    num_unfinished: int
    """Choices of all prompts that have not ended."""

    prompts: list[PromptResult | None]
    """By prompt, known before its first update."""

    _updates: list[tuple[int, TokenUpdate]] = field(default_factory=list)
    _error: ApiError | None = None
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, *, timeout: float | None = None) -> list[tuple[int, TokenUpdate]]:
        """Wait for updates and return all, as (prompt index, update); none after `timeout`
        seconds.

        Raises:
            ApiError: a request failed.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return []
        self._event.clear()
        if self._error is not None:
            raise self._error
        updates, self._updates = self._updates, []
        for _, update in updates:
            self.num_unfinished -= update.finish_reason is not None
            if update.finish_reason == "error":
                raise ApiError(_error_status(update), update.error or "the request failed")
        return updates

    def put(self, prompt: int, update: TokenUpdate) -> None:
        """Add an update of a prompt."""
        self._updates.append((prompt, update))
        self._event.set()

    def fail(self, error: ApiError) -> None:
        """End with an error."""
        self._error = error
        self._event.set()


def _error_status(update: TokenUpdate) -> int:
    """Return the HTTP status of a failed request."""
    if update.is_timeout:
        return 408
    return 400 if update.is_request_error else 500


@dataclass(slots=True)
class _InFlightRequest:
    """A request that the engine has not finished."""

    generation: Generation
    uid: str
    """X-Request-Id of its HTTP request."""

    prompt: int
    num_choices: int
    num_prompt_tokens: int


class EngineClient:
    """Sends requests to an engine process over a socket."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.asyncio.Socket = bind_client_socket(address)
        self._codec = Codec()
        self._requests: dict[int, _InFlightRequest] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_requests = self._num_calls = 0
        self.num_sequences = self.num_prompt_tokens = 0
        """Choices and prompt tokens of all unfinished requests."""
        self.info: ModelInfo | None = None
        """Set when the model is loaded."""
        self.ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read())
        self.failed: ApiError | None = None
        """Set when the engine process has ended."""

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[PromptRequest], *, uid: str
    ) -> AsyncIterator[Generation]:
        """Start the requests of a generation; leaving the context aborts unfinished ones."""
        if self.failed is not None:
            raise self.failed
        arrival_time = time.monotonic()
        generation = Generation(
            sum(request.params.n for request in requests), [None] * len(requests)
        )
        numbers = []
        for index, request in enumerate(requests):
            number = self._num_requests
            self._num_requests += 1
            numbers.append(number)
            self._requests[number] = _InFlightRequest(
                generation, uid, index, request.params.n, len(request.token_ids)
            )
            self.num_sequences += request.params.n
            self.num_prompt_tokens += len(request.token_ids)
            name = uid if len(requests) == 1 else f"{uid}-{index}"
            self._send(
                AddRequest(
                    number,
                    name,
                    request.token_ids,
                    request.params.to_dict(),
                    arrival_time,
                    request.pooling,
                    request.adapter,
                )
            )
        try:
            yield generation
        finally:
            for number in numbers:
                if number in self._requests:
                    self._finish(number)
                    self._send(AbortRequest(number))

    async def call(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = 60.0,
    ) -> dict[str, Any]:
        """Call a command of the engine and return its result.

        Raises:
            ApiError: 503, the engine has ended or does not answer; else the command failed.
        """
        if self.failed is not None:
            raise self.failed
        call_id = self._num_calls
        self._num_calls += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._send(EngineCall(call_id, command, arguments or {}))
        try:
            async with asyncio.timeout(timeout_s):
                result = await future
        except TimeoutError:
            raise ApiError(503, f"the engine does not answer within {timeout_s} s.") from None
        finally:
            self._calls.pop(call_id, None)
        if "error" in result:
            raise ApiError(int(result["status"]), str(result["error"]))
        return result

    def abort(self, uid: str | None) -> int:
        """End the requests with a name, None: all, with finish reason abort; returns how many."""
        numbers = [
            number for number, request in self._requests.items() if uid in (None, request.uid)
        ]
        for number in numbers:
            self._send(AbortRequest(number))  # the engine answers with the end of each choice
        return len(numbers)

    def abort_all(self, error: ApiError) -> None:
        """Abort all requests; their readers get the error."""
        for number, request in list(self._requests.items()):
            self._finish(number)
            request.generation.fail(error)
            self._send(AbortRequest(number))

    def fail(self, error: ApiError) -> None:
        """End all requests and calls, because the engine process has ended."""
        self.failed = error
        for number, request in list(self._requests.items()):
            self._finish(number)
            request.generation.fail(error)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        if not self.ready.done():
            self.ready.set_exception(error)

    async def close(self) -> None:
        """Close the socket."""
        self._reader.cancel()
        self._socket.close()

    def _send(self, message: Message) -> None:
        self._socket.send(self._codec.encode(message))  # the socket has no limit: sent at once

    async def _read(self) -> None:
        while True:
            parts = await self._socket.recv_multipart()
            try:
                if len(parts) != 1:
                    raise ProtocolError(f"{len(parts)} parts")
                self._handle(self._codec.decode(parts[0]))
            except ProtocolError as error:
                _logger.warning("dropped a message of the engine: %s", error)
            except Exception:  # the reader must continue
                _logger.exception("a message of the engine cannot be handled")

    def _handle(self, message: Message) -> None:
        match message:
            case StepOutputs(prompts, updates):
                for item in prompts:
                    self._put_prompt(PromptResult(*item))
                for item in updates:
                    self._put_update(TokenUpdate(*item))
            case RequestRejected(request_id, status, text):
                request = self._requests.get(request_id)
                if request is not None:
                    self._finish(request_id)
                    request.generation.fail(ApiError(status, text))
            case Reply(call_id, result):
                call = self._calls.get(call_id)
                if call is not None and not call.done():
                    call.set_result(result)
            case Ready(info):
                self.info = ModelInfo(**info)
                self.ready.set_result(self.info)
            case LoadFailed(text):
                self.ready.set_exception(LoadError(text))
            case _:
                raise ProtocolError(f"unexpected {message!r:.100}")

    def _put_prompt(self, result: PromptResult) -> None:
        request = self._requests.get(result.request_id)
        if request is not None:
            request.generation.prompts[request.prompt] = result

    def _put_update(self, update: TokenUpdate) -> None:
        request = self._requests.get(update.request_id)
        if request is None:  # aborted
            return
        request.generation.put(request.prompt, update)
        if update.finish_reason is not None:
            request.num_choices -= 1
            self.num_sequences -= 1
            if request.num_choices == 0:
                self._finish(update.request_id)

    def _finish(self, number: int) -> None:
        """Remove a request."""
        request = self._requests.pop(number)
        self.num_sequences -= request.num_choices
        self.num_prompt_tokens -= request.num_prompt_tokens


class LoadError(Exception):
    """The engine process cannot load the model; the text is for the user."""


@dataclass(slots=True)
class EngineProcess:
    """A running engine process and its client."""

    client: EngineClient
    process: asyncio.subprocess.Process
    is_stopping: bool = False

    async def watch(self) -> int | None:
        """Wait for the end of the process; end all requests and return the exit code if it was not
        stopped."""
        code = await self.process.wait()
        if self.is_stopping:
            return None
        await asyncio.wait({self.client.ready}, timeout=1)  # its last message may not have arrived
        self.client.fail(ApiError(503, "the engine process has ended. Restart the server."))
        return code

    async def stop(self) -> None:
        """End the process, by force if it does not end in time."""
        self.is_stopping = True
        assert self.process.stdin is not None, "it is a pipe"
        try:
            if self.client.info is not None and self.client.failed is None:
                await self.client.call("shutdown", timeout_s=STOP_SECONDS)
            self.process.stdin.close()
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except (ApiError, TimeoutError):
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
        finally:
            await self.client.close()


@asynccontextmanager
async def open_engine(settings: dict[str, Any]) -> AsyncIterator[EngineProcess]:
    """Start an engine process, for the time of a context; it also ends when this process does.

    `settings`: see `EngineSettings`, without the address.
    """
    with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
        address = socket_address(Path(folder))
        client = EngineClient(address)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "megalith.serve.engine_process",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for the HTTP process
        )
        engine = EngineProcess(client, process)
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(json.dumps(settings | {"address": address}).encode() + b"\n")
        try:
            yield engine
        finally:
            await engine.stop()

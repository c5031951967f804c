"""The HTTP application: routes, keys, request ids, errors, and responses to clients that may
disconnect."""

import asyncio
import base64
import hashlib
import logging
import re
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from fastapi import (  # lint: allow optional-import: imported by functions after check_packages
    FastAPI,
    Request,
    Response,
)
from fastapi.middleware.cors import (  # lint: allow optional-import: as fastapi above
    CORSMiddleware,
)

from megalith.serve.access import (
    AsgiMessage,
    KeyLimiter,
    Receive,
    Send,
    check_api_key,
    check_origin,
)
from megalith.serve.chat import create_chat_completion
from megalith.serve.completions import create_completion
from megalith.serve.embeddings import create_embeddings
from megalith.serve.errors import ApiError, http_error, internal_error
from megalith.serve.generation import ChunkWriter
from megalith.serve.http_protocol import find_chunk_writer
from megalith.serve.legacy import generate_legacy
from megalith.serve.limits import check_content_type, parse_body, read_body
from megalith.serve.models import (
    abort,
    get_health,
    get_model,
    get_ready,
    get_version,
    list_models,
    load_lora_adapter,
    pause,
    render_metrics,
    reset_prefix_cache,
    restart_replica,
    resume,
    suspend,
    unload_lora_adapter,
    update_weights,
    wake_up,
)
from megalith.serve.responses import create_response
from megalith.serve.sse import DONE, HEADERS, event, json_bytes
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.tokenization import detokenize, get_tokenizer_info, tokenize

_logger = logging.getLogger(__name__)

Result: TypeAlias = dict[str, Any] | AsyncGenerator[bytes, None]  # JSON, or the events of a stream
EndpointFunction: TypeAlias = Callable[[ServerState, RequestContext], Coroutine[Any, Any, Result]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route: method, paths and function."""

    method: str
    paths: tuple[str, ...]
    function: EndpointFunction
    summary: str
    needs_key: bool = True
    has_body: bool = True
    """Whether a POST or PUT request has a JSON body."""

    runs_model: bool = False
    """Whether --max-requests-per-key limits it."""


ENDPOINTS = (
    Endpoint(
        "POST",
        ("/v1/chat/completions", "/chat/completions"),
        create_chat_completion,
        "next message of a conversation",
        runs_model=True,
    ),
    Endpoint(
        "POST",
        ("/v1/completions", "/completions"),
        create_completion,
        "continuations of prompts",
        runs_model=True,
    ),
    Endpoint(
        "POST",
        ("/v1/embeddings", "/embeddings"),
        create_embeddings,
        "embeddings of texts",
        runs_model=True,
    ),
    Endpoint(
        "POST",
        ("/v1/responses", "/responses"),
        create_response,
        "Responses API, without stored responses",
        runs_model=True,
    ),
    Endpoint(
        "PUT", ("/api",), generate_legacy, "text generation API of Megatron-LM", runs_model=True
    ),
    Endpoint("GET", ("/v1/models",), list_models, "served models"),
    Endpoint("GET", ("/v1/models/{name:path}",), get_model, "one model"),
    Endpoint("POST", ("/tokenize",), tokenize, "token ids of a text or a conversation"),
    Endpoint("POST", ("/detokenize",), detokenize, "text of token ids"),
    Endpoint("GET", ("/tokenizer_info",), get_tokenizer_info, "special tokens, chat template"),
    Endpoint(
        "GET",
        ("/health", "/v1/health"),
        get_health,
        "liveness: 200 while the server runs",
        False,
    ),
    Endpoint("GET", ("/ready",), get_ready, "200 while requests are accepted", False),
    Endpoint("GET", ("/version",), get_version, "version of the server"),
    Endpoint(
        "POST",
        ("/v1/load_lora_adapter",),
        load_lora_adapter,
        "serve a LoRA adapter, {lora_name, lora_path} (--enable-admin)",
    ),
    Endpoint(
        "POST",
        ("/v1/unload_lora_adapter",),
        unload_lora_adapter,
        "end serving an adapter, {lora_name} (--enable-admin)",
    ),
    Endpoint(
        "POST",
        ("/update_weights",),
        update_weights,
        "replace the weights, {path, mode} (--enable-admin)",
    ),
    Endpoint("POST", ("/abort",), abort, "end requests in flight (--enable-admin)"),
    Endpoint(
        "POST",
        ("/restart_replica",),
        restart_replica,
        "replace a replica by one that reads the model again, {replica} (--enable-admin)",
    ),
    Endpoint(
        "POST",
        ("/pause",),
        pause,
        "no step until /resume; requests wait (--enable-admin)",
        has_body=False,
    ),
    Endpoint("POST", ("/resume",), resume, "continue (--enable-admin)", has_body=False),
    Endpoint(
        "POST",
        ("/suspend",),
        suspend,
        "pause, and release device memory, {kv_cache, offload_weights} (--enable-admin)",
    ),
    Endpoint(
        "POST",
        ("/wake_up",),
        wake_up,
        "restore the device memory; the server is paused then (--enable-admin)",
        has_body=False,
    ),
    Endpoint(
        "POST",
        ("/reset_prefix_cache",),
        reset_prefix_cache,
        "empty the prefix cache (--enable-admin)",
        has_body=False,
    ),
)


CHAT_PAGE = Path(__file__).parent / "chat_page.html"
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""What the chat page may do, beside its own script and style."""


class ClientDisconnectedError(Exception):
    """The client closed the connection before its response was complete."""


def build_app(state: ServerState) -> FastAPI:
    """Return the ASGI application."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for endpoint in ENDPOINTS:
        for path in endpoint.paths:
            app.add_route(path, _build_handler(state, endpoint), methods=[endpoint.method])

    async def get_metrics(request: Request) -> Response:
        return await _respond(state, request, partial(_metrics_response, state), needs_key=True)

    async def reject(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        problem = http_error(status, "", request.url.path)
        return _error_response(state, problem, _read_request_id(request.headers))

    app.add_route("/metrics", get_metrics, methods=["GET"])
    if state.config.chat_page:
        page = CHAT_PAGE.read_text()
        headers = chat_page_headers(page)

        async def get_chat_page(request: Request) -> Response:
            return Response(page, headers=headers, media_type="text/html")

        app.add_route("/", get_chat_page, methods=["GET"])
    for status in (404, 405):
        app.add_exception_handler(status, reject)
    _add_middleware(app, state)
    return app


def _add_middleware(app: FastAPI, state: ServerState) -> None:
    """Add the limit of requests per key, and CORS around it, so that pages can read its errors."""
    config = state.config

    def reject_key(error: ApiError, headers: Mapping[str, str]) -> Response:
        state.metrics.count_rejected("key_limit")
        return _error_response(state, error, _read_request_id(headers))

    if config.max_requests_per_key is not None:
        app.add_middleware(
            KeyLimiter,
            keys=config.api_key,
            max_requests=config.max_requests_per_key,
            paths=frozenset(
                path for endpoint in ENDPOINTS if endpoint.runs_model for path in endpoint.paths
            ),
            reject=reject_key,
        )
    if config.cors_origins:
        # Without credentials (cookies): a page sends the key in the Authorization header.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=sorted({endpoint.method for endpoint in ENDPOINTS}),
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )


def _build_handler(
    state: ServerState, endpoint: Endpoint
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request, request_id: str) -> Response:
        body: dict[str, Any] = {}
        if endpoint.method != "GET":
            check_origin(request.headers, state.config.cors_origins)
        if endpoint.method != "GET" and endpoint.has_body:
            state.check_ready()  # before a large body is read
            body = await _read_json(state, request)
        writer = find_chunk_writer(request.scope)
        context = RequestContext(request_id, request.url.path, body, writer)
        result = await run_until_disconnect(
            _start(endpoint.function(state, context)), request.receive
        )
        if isinstance(result, dict) and _is_large(result):
            return await asyncio.to_thread(_json_response, result, request_id)
        if isinstance(result, dict):
            return _json_response(result, request_id)
        return EventStream(*result, state=state, request_id=request_id, writer=writer)

    async def handle(request: Request) -> Response:
        return await _respond(state, request, respond, needs_key=endpoint.needs_key)

    return handle


async def _respond(
    state: ServerState,
    request: Request,
    respond: Callable[[Request, str], Awaitable[Response]],
    *,
    needs_key: bool,
) -> Response:
    """Return the response of an endpoint, or of its error."""
    request_id = _read_request_id(request.headers)
    try:
        if needs_key:
            check_api_key(request.headers, state.config.api_key)
        return await respond(request, request_id)
    except ApiError as error:
        return _error_response(state, error, request_id)
    except ClientDisconnectedError:
        _record_disconnect(state, request_id)
        return Response(status_code=499)  # not sent
    except Exception:  # a bug: the client gets no details
        _logger.exception("request %s failed", request_id)
        return _error_response(state, internal_error(request_id), request_id)


async def _metrics_response(state: ServerState, request: Request, request_id: str) -> Response:
    return Response(
        await render_metrics(state),
        media_type="text/plain; version=0.0.4",
        headers={"X-Request-Id": request_id},
    )


async def _start(
    function: Coroutine[Any, Any, Result],
) -> dict[str, Any] | tuple[bytes, AsyncGenerator[bytes, None]]:
    """Return JSON, or the first event of a stream and the stream. Errors before the first event
    are responses with a status."""
    result = await function
    if isinstance(result, dict):
        return result
    try:
        return await anext(result), result
    except BaseException:
        await result.aclose()
        raise


async def run_until_disconnect(coroutine: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Return the result of a coroutine; cancel it when the client disconnects.

    Raises:
        ClientDisconnectedError: the client disconnected.
    """
    task = asyncio.create_task(coroutine)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_json(state: ServerState, request: Request) -> dict[str, Any]:
    check_content_type(request.headers)
    body = await read_body(
        _iter_body(request.receive),
        request.headers,
        max_bytes=state.config.max_body_bytes,
        timeout_s=state.config.body_timeout_s,
    )
    return await parse_body(body)


async def _iter_body(receive: Receive) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        more = message.get("more_body", False)
        yield message.get("body", b"")


class EventStream(Response):
    """Response that sends the events of a stream until it ends or the client disconnects.

    A slow client delays its own events only: `send` waits for its connection, and outputs that are
    generated in that time become one event.
    """

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        *,
        state: ServerState,
        request_id: str,
        writer: ChunkWriter | None = None,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers=HEADERS | {"X-Request-Id": request_id}
        )
        del self.headers["content-length"]
        self._first, self._events = first, events
        self._state, self._request_id, self._writer = state, request_id, writer

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await run_until_disconnect(self._send(send), receive)
        except ClientDisconnectedError:
            _record_disconnect(self._state, self._request_id)

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._events) as events:
            await send(start)
            try:
                await self._send_events(send, self._first)
                async for data in events:
                    await self._send_events(send, data)
            except ApiError as error:
                await send(_chunk(self._error_event(error)))
            except Exception:  # a bug: the client gets no details
                _logger.exception("request %s failed", self._request_id)
                await send(_chunk(self._error_event(internal_error(self._request_id))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send, data: bytes) -> None:
        if self._writer is not None and data.endswith(DONE):
            self._writer.hold(data)
        else:
            await send(_chunk(data))

    def _error_event(self, error: ApiError) -> bytes:
        self._state.metrics.count_error(error.status)
        return event(error.body())


def _chunk(data: bytes) -> AsgiMessage:
    return {"type": "http.response.body", "body": data, "more_body": True}


def chat_page_headers(page: str) -> dict[str, str]:
    """Return the headers of the chat page, which allow its inline script and style by their
    hashes."""
    policy = CONTENT_SECURITY_POLICY
    for tag in ("script", "style"):
        _, _, rest = page.partition(f"<{tag}>")
        digest = hashlib.sha256(rest.partition(f"</{tag}>")[0].encode()).digest()
        policy += f"; {tag}-src 'sha256-{base64.b64encode(digest).decode()}'"
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _read_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's X-Request-Id if it is short and printable, else a new one."""
    given = headers.get("x-request-id", "")
    return given if re.fullmatch(r"[!-~]{1,128}", given) else uuid.uuid4().hex


def _is_large(result: dict[str, Any]) -> bool:
    """Whether a response may have many numbers, and is encoded on another thread: log-probs or
    embeddings."""
    choices = result.get("choices", ())
    return "data" in result or any(choice.get("logprobs") is not None for choice in choices)


def _json_response(data: dict[str, Any], request_id: str, status: int = 200) -> Response:
    return Response(
        json_bytes(data), status, {"X-Request-Id": request_id}, media_type="application/json"
    )


def _error_response(state: ServerState, error: ApiError, request_id: str) -> Response:
    state.metrics.count_error(error.status)
    _logger.info("request %s: status %d: %.500s", request_id, error.status, error.message)
    response = _json_response(error.body(), request_id, error.status)
    response.headers.update(error.headers)
    return response


def _record_disconnect(state: ServerState, request_id: str) -> None:
    state.metrics.count_disconnect()
    _logger.info("request %s: status 499: the client disconnected", request_id)

"""Batch files of the OpenAI API: JSON lines with requests and with responses, without HTTP."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megalith import storage
from megalith.config.server import ServeConfig
from megalith.errors import CheckpointError, DataError
from megalith.serve.chat import create_chat_completion
from megalith.serve.client import LoadError
from megalith.serve.completions import create_completion
from megalith.serve.embeddings import create_embeddings
from megalith.serve.errors import ApiError, internal_error
from megalith.serve.limits import check_document
from megalith.serve.metrics import HttpMetrics
from megalith.serve.responses import create_response
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.supervisor import open_engine

_logger = logging.getLogger(__name__)

FUNCTIONS = {
    "/v1/completions": create_completion,
    "/v1/chat/completions": create_chat_completion,
    "/v1/embeddings": create_embeddings,
    "/v1/responses": create_response,
}
"""Endpoints that a request of a batch can name."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]  # JSON


def read_batch(text: str, name: str) -> list[BatchRequest]:
    """Return the requests of a batch file; empty lines are skipped.

    Raises:
        DataError: a line is no request, or two have the same custom_id; the line is named.
    """
    requests: list[BatchRequest] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            request = _read_line(line, f"{name}:{number}")
            if request.custom_id in lines:
                raise DataError(
                    f"{name}:{number}: custom_id={request.custom_id!r:.60} is also in line "
                    f"{lines[request.custom_id]}. Use another one."
                )
            lines[request.custom_id] = number
            requests.append(request)
    if not requests:
        raise DataError(f"{name}: there are no requests. Use one JSON object per line.")
    return requests


def _read_line(line: str, where: str) -> BatchRequest:
    example = '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {...}}'
    try:
        data = storage.parse_json(line)
        check_document(data, "line")
    except (ValueError, ApiError) as error:
        raise DataError(f"{where}: not valid JSON ({error}). Use {example}.") from None
    if not isinstance(data, dict):
        raise DataError(f"{where}: not a JSON object. Use {example}.")
    custom_id, url, body = data.get("custom_id"), data.get("url"), data.get("body")
    if not isinstance(custom_id, str):
        raise DataError(f"{where}: custom_id={custom_id!r:.60} must be a string. Use {example}.")
    if data.get("method", "POST") != "POST":
        raise DataError(f"{where}: method={data['method']!r:.60} must be POST.")
    if url not in FUNCTIONS:
        raise DataError(f"{where}: url={url!r:.60} must be one of {', '.join(FUNCTIONS)}.")
    if not isinstance(body, dict):
        raise DataError(f"{where}: body={body!r:.60} must be an object. Use {example}.")
    if body.get("stream"):
        raise DataError(f"{where}: body.stream=true is not possible in a batch. Remove it.")
    return BatchRequest(custom_id, url, body)


async def run_batch(
    config: ServeConfig,
    engine_settings: dict[str, Any],
    requests: Sequence[BatchRequest],
    write: Callable[[dict[str, Any]], None],
) -> int:
    """Process the requests; `write` gets each response as it is complete. Returns the number of
    requests that failed.

    Raises:
        CheckpointError: the model cannot be served.
    """
    async with open_engine(engine_settings) as engine:
        state = ServerState(
            config, engine.client, HttpMetrics(str(engine_settings["served_model_name"]))
        )
        watcher = asyncio.create_task(engine.watch())
        try:
            info = await engine.client.ready
        except (LoadError, ApiError) as error:
            raise CheckpointError(str(error)) from None
        state.set_model(info)
        # as many requests as the replicas run; the largest has n sequences
        slots = asyncio.Semaphore(max(1, info.max_num_seqs) * engine.client.num_replicas)

        async def process(request: BatchRequest) -> bool:
            async with slots:
                line = await _process(state, request)
            write(line)
            return line["error"] is not None

        failed = await asyncio.gather(*map(process, requests))
        watcher.cancel()
        return sum(failed)


async def _process(state: ServerState, request: BatchRequest) -> dict[str, Any]:
    """Return the output line of a request."""
    request_id = uuid.uuid4().hex
    failure: ApiError | None = None
    try:
        body = await _execute(state, RequestContext(request_id, request.url, request.body))
    except ApiError as error:
        failure = error
    except Exception:  # a bug: the other requests continue
        _logger.exception("request %s failed", request.custom_id)
        failure = internal_error(request_id)
    if failure is not None:
        body = failure.body()
    status = 200 if failure is None else failure.status
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": request.custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None if failure is None else failure.body()["error"],
    }


async def _execute(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the response of a request, which waits while no replica is ready.

    Raises:
        ApiError: the request failed.
    """
    client = state.client
    while True:
        await client.wait_for(lambda: bool(client.router.replicas) or client.failed is not None)
        try:
            body = await FUNCTIONS[context.path](state, context)
        except ApiError as error:  # all replicas may have failed before it was sent
            if client.router.replicas or client.failed is not None or error.status != 503:
                raise
        else:
            assert isinstance(body, dict), "a batch has no streams"
            return body

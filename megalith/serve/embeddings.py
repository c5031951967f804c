"""POST /v1/embeddings: pooled hidden states of texts."""

import asyncio
import base64
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.config.generation import SamplingParams
from megalith.serve.choices import collect_choices
from megalith.serve.completions import EncodedPrompt, encode_prompts
from megalith.serve.errors import ApiError, invalid
from megalith.serve.generation import PromptRequest
from megalith.serve.model_info import ServedModel
from megalith.serve.protocol import PromptResult
from megalith.serve.sampling_fields import count_unknown, fit_context, read_int, read_params
from megalith.serve.state import RequestContext, ServerState

MAX_INPUTS = 2048
"""Texts of a request, as in the OpenAI API."""

REQUEST_FIELDS = ("deadline_s", "cache_salt")
"""Fields of `SamplingParams` that do not belong to sampling."""

FIELDS = frozenset((*REQUEST_FIELDS, "model", "input", "dimensions", "encoding_format", "user"))
ENCODING_FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A valid request with encoded inputs."""

    model: ServedModel
    inputs: list[EncodedPrompt]
    params: SamplingParams
    dimensions: int | None
    """First values that are returned, scaled to length 1 again; None: all."""

    uses_base64: bool
    """Return little-endian fp32 in base64 instead of lists of numbers."""


async def create_embeddings(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the embeddings of the inputs, in order.

    Raises:
        ApiError: the request is invalid or cannot be processed.
    """
    request = await parse_embedding_request(state, context.body)
    num_tokens = sum(len(item.token_ids) for item in request.inputs)
    state.check_capacity(len(request.inputs), num_tokens)
    pooling = state.config.pooling
    adapter = request.model.adapter
    prompts = [
        PromptRequest(item.token_ids, request.params, pooling, adapter) for item in request.inputs
    ]
    async with state.client.generate(prompts, uid=context.request_id) as generation:
        await collect_choices(generation)
    data = await asyncio.to_thread(_encode_all, generation.prompts, request)
    return {
        "object": "list",
        "data": data,
        "model": request.model.name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


async def parse_embedding_request(state: ServerState, body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return the request of a JSON body.

    Raises:
        ApiError: it is invalid.
    """
    model = state.find_model(body.get("model"))
    count_unknown(body, FIELDS, state)
    size = model.info.hidden_size
    dimensions = read_int(body, "dimensions", at_least=1, at_most=size, default=None)
    encoding_format = body.get("encoding_format") or "float"
    if encoding_format not in ENCODING_FORMATS:
        raise invalid(
            f"encoding_format={encoding_format!r:.60} must be float or base64. Use float.",
            "encoding_format",
        )
    value = body.get("input")
    if isinstance(value, list) and len(value) > MAX_INPUTS and not isinstance(value[0], int):
        raise invalid(
            f"input has {len(value)} texts; the limit is {MAX_INPUTS}. Send several requests.",
            "input",
        )
    fields = {name: body.get(name) for name in REQUEST_FIELDS} | {"max_tokens": 0}
    params = read_params(fields, model, state, logprobs=(None, "logprobs"))
    inputs = await encode_prompts(value, model, name="input")
    for item in inputs:
        fit_context(params, len(item.token_ids), model, fields, prompt_field="input")
    return EmbeddingRequest(model, inputs, params, dimensions, encoding_format == "base64")


def _encode_all(
    results: Sequence[PromptResult | None], request: EmbeddingRequest
) -> list[dict[str, Any]]:
    """Return the `data` of the response.

    Raises:
        ApiError: 503, an input was aborted.
    """
    data = []
    for index, result in enumerate(results):
        if result is None or result.embedding is None:
            raise ApiError(503, f"input[{index}] was aborted. Send the request again.")
        values = truncate_embedding(result.embedding, request.dimensions)
        encoded: Any = values
        if request.uses_base64:
            encoded = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()
        data.append({"object": "embedding", "index": index, "embedding": encoded})
    return data


def truncate_embedding(embedding: bytes, dimensions: int | None) -> list[float]:
    """Return the first values of an embedding (little-endian fp32), scaled to length 1."""
    values = struct.unpack(f"<{len(embedding) // 4}f", embedding)
    if dimensions is None:
        return list(values)
    length = math.hypot(*values[:dimensions]) or 1.0
    return [value / length for value in values[:dimensions]]

"""Fields that completions and chat requests share: sampling parameters, and how the response is
sent."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megalith.config.generation import SamplingParams, sampling_problems
from megalith.errors import ConfigError
from megalith.serve.errors import ApiError, invalid, invalid_field
from megalith.serve.model_info import ServedModel
from megalith.serve.state import ServerState

_logger = logging.getLogger(__name__)

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "deadline_s",
    "structured_outputs",
    "cache_salt",
)
"""Fields of `SamplingParams` that have the same name in requests."""

COMMON_FIELDS = (
    *SAMPLING_FIELDS,
    "model",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "stream",
    "stream_options",
    "streaming_interval",
    "truncate_to_fit",
    "return_prompt_tokens",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)
"""Fields of both kinds of requests; the last ones change nothing for a single server."""


def check_unsupported(
    body: Mapping[str, Any], supported: Mapping[str, Sequence[Any]], endpoint: str
) -> None:
    """Check fields of the OpenAI API of which only some values are supported.

    Raises:
        ApiError: a field has another value.
    """
    for name, values in supported.items():
        if name in body and body[name] not in values:
            advice = f"Use {values[1]!r}, or remove it." if len(values) > 1 else "Remove it."
            raise invalid(
                f"{name}={body[name]!r:.100} is not supported by {endpoint}. {advice}", name
            )


def count_unknown(body: Mapping[str, Any], known: Collection[str], state: ServerState) -> None:
    """Count and log the fields that no endpoint knows; they are ignored."""
    unknown = sorted(body.keys() - known)
    if unknown:
        state.metrics.count_ignored(len(unknown))
        _logger.debug("ignored the fields %.200s", ", ".join(map(repr, unknown)))


def read_bool(body: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field, false if it is missing.

    Raises:
        ApiError: it is no boolean.
    """
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name}={value!r:.60} must be true or false. Use false.", name)
    return bool(value)


def read_int(
    body: Mapping[str, Any], name: str, *, at_least: int, at_most: int, default: int | None
) -> int | None:
    """Return an integer field.

    Raises:
        ApiError: it is not an integer of the range.
    """
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or not at_least <= value <= at_most:
        raise invalid(
            f"{name}={value!r:.60} must be an integer from {at_least} to {at_most}. "
            f"Use {at_least}.",
            name,
        )
    return value


def read_stream_options(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether to stream, and whether to send the usage at the end of the stream.

    Raises:
        ApiError: the fields are invalid.
    """
    stream, options = read_bool(body, "stream"), body.get("stream_options")
    if options is None:
        return stream, False
    if not isinstance(options, dict):
        raise invalid(
            f'stream_options={options!r:.60} must be an object, such as {{"include_usage": true}}.',
            "stream_options",
        )
    if not stream:
        raise invalid("stream_options needs stream=true. Remove it.", "stream_options")
    return stream, read_bool(options, "include_usage")


class RequestOptions(NamedTuple):
    """The model of a request that generates text, and how its response is sent."""

    model: ServedModel
    stream: bool
    include_usage: bool
    interval: int
    """Tokens between two chunks of a choice."""


def read_options(
    body: Mapping[str, Any],
    state: ServerState,
    *,
    endpoint: str,
    known: Collection[str],
    unsupported: Mapping[str, Sequence[Any]],
) -> RequestOptions:
    """Return the options of a request; `known`: fields of the endpoint; `unsupported`: those of
    which only some values are supported.

    Raises:
        ApiError: the model is not served, or a field is invalid.
    """
    model = state.find_model(body.get("model"))
    check_unsupported(body, unsupported, endpoint)
    count_unknown(body, known, state)
    stream, include_usage = read_stream_options(body)
    interval = read_int(body, "streaming_interval", at_least=1, at_most=1024, default=1)
    return RequestOptions(model, stream, include_usage, interval or 1)


def max_tokens_name(body: Mapping[str, Any]) -> str:
    """Return the field that limits the number of tokens: max_tokens has two names."""
    return "max_tokens" if body.get("max_tokens") is not None else "max_completion_tokens"


def read_params(
    body: Mapping[str, Any],
    model: ServedModel,
    state: ServerState,
    *,
    logprobs: tuple[Any, str],
    echoes: bool = False,
) -> SamplingParams:
    """Return the sampling parameters of a request; max_new_tokens is None if it sets no limit.

    `logprobs`: value and name of the field with the number of log-probs; `echoes`: whether the
    log-probs of the prompt are needed too.

    Raises:
        ApiError: a parameter is invalid; its name is the `param` of the error.
    """
    use_defaults = state.config.generation_defaults == "model"
    data: dict[str, Any] = dict(model.info.generation_defaults) if use_defaults else {}
    data |= {name: body[name] for name in SAMPLING_FIELDS if body.get(name) is not None}
    name = max_tokens_name(body)
    data["max_new_tokens"] = body.get(name)
    data["logprobs"] = logprobs[0]
    data["prompt_logprobs"] = logprobs[0] if echoes else None
    try:
        params = SamplingParams.from_dict(data)
    except ConfigError as error:
        raise invalid(str(error)) from None
    problems = sampling_problems(params, vocab_size=model.info.vocab_size)
    if problems:
        raise invalid_field(problems[0], {"max_new_tokens": name, "logprobs": logprobs[1]})
    limits = [
        limit for limit in (params.deadline_s, state.config.request_timeout_s) if limit is not None
    ]
    return replace(params, deadline_s=min(limits, default=None))


def fit_context(
    params: SamplingParams,
    num_prompt_tokens: int,
    model: ServedModel,
    body: Mapping[str, Any],
    *,
    prompt_field: str,
) -> SamplingParams:
    """Return the parameters for a prompt, whose tokens and new tokens must fit the context.

    Raises:
        ApiError: they do not, and the request does not set truncate_to_fit.
    """
    max_model_len = model.info.max_model_len
    num_remaining_tokens = max_model_len - num_prompt_tokens
    if num_remaining_tokens < (params.max_new_tokens != 0):
        raise ApiError(
            400,
            f"{prompt_field} has {num_prompt_tokens} tokens, but the context of the model is "
            f"{max_model_len} tokens including new ones. Use a shorter one.",
            prompt_field,
            "context_length_exceeded",
        )
    if params.max_new_tokens is None or params.max_new_tokens <= num_remaining_tokens:
        return params
    if body.get(max_tokens_name(body)) is None or read_bool(body, "truncate_to_fit"):
        return replace(
            params,
            max_new_tokens=num_remaining_tokens,
            min_tokens=min(params.min_tokens, num_remaining_tokens),
        )
    name = max_tokens_name(body)
    raise ApiError(
        400,
        f"{name}={params.max_new_tokens} and {num_prompt_tokens} prompt tokens do not fit the "
        f"context of the model, {max_model_len} tokens. Set {name} to {num_remaining_tokens} or "
        "less, or truncate_to_fit=true.",
        name,
        "context_length_exceeded",
    )

"""Settings of the HTTP server: `ServeConfig`, and `ServeRun` with the engine behind it."""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Gt, Le, range_problems
from megalith.config.kernels import KernelSetting
from megalith.config.serve import (
    EngineConfig,
    InferenceParallelConfig,
    Pooling,
    combination_problems,
    dp_replicate_problems,
    parallel_problems,
)
from megalith.errors import did_you_mean

MIB = 2**20

REASONING_PARSERS = ("deepseek-r1", "gpt-oss", "nemotron-v3", "qwen3")
TOOL_CALL_PARSERS = ("gpt-oss", "hermes", "json", "llama3-json", "qwen3-coder")
"""Formats in which models write reasoning and tool calls; gpt-oss is for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """HTTP server: address, names, keys and limits."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""

    port: Annotated[int, Ge(0), Le(65535), Example(5000)] = 5000
    """TCP port; 0 chooses a free one, which is printed."""

    served_model_name: str | None = None
    """Name of the model in requests. Unset: the name of its folder."""

    api_key: tuple[str, ...] = ()
    """Keys, one of which a request must send as `Authorization: Bearer KEY`; better in the
    environment variable MEGALITH_API_KEY, which other users of this machine cannot read. None: no
    keys."""

    max_queue: Annotated[int, Ge(1), Example(1024)] = 1024
    """Maximum number of waiting sequences (prompts times n) beyond those that run; more are
    rejected with status 429."""

    max_queue_tokens: Annotated[int, Ge(1), Example(4_194_304)] = 4 * MIB
    """Maximum number of prompt tokens of all unfinished requests; more are rejected with status
    429. A single request is always allowed."""

    request_timeout_s: Annotated[float | None, Gt(0), Example(600.0)] = None
    """Requests that take longer end with status 408. Unset: no limit."""

    body_timeout_s: Annotated[float, Gt(0), Example(60.0)] = 60.0
    """A client that takes longer to send a request body gets status 408."""

    max_body_bytes: Annotated[int, Ge(1), Example(32 * MIB)] = 32 * MIB
    """Maximum size of a request body; larger ones are rejected with status 413."""

    drain_timeout_s: Annotated[float, Ge(0), Example(30.0)] = 30.0
    """After SIGTERM, requests in flight have this many seconds to finish."""

    ssl_certfile: str | None = None
    """Certificate file (PEM) for TLS."""

    ssl_keyfile: str | None = None
    """File with the private key of the certificate."""

    generation_defaults: Literal["model", "none"] = "model"
    """model: sampling parameters that a request leaves out have the values of the model's
    generation_config.json; none: the defaults of the OpenAI API."""

    chat_page: bool = True
    """Serve a web page for chats at `/`."""

    pooling: Pooling = "last"
    """Embedding of a text: the hidden state of its last token, or the mean over its tokens. Models
    are trained for one of them."""

    parsers: tuple[str, ...] = ()
    """Formats in which the model writes reasoning (deepseek-r1, gpt-oss, nemotron-v3 or qwen3) and
    tool calls (gpt-oss, hermes, json, llama3-json or qwen3-coder). None: all text is content."""

    enable_admin: bool = False
    """Serve the control endpoints: POST /abort, /pause, /resume, /suspend, /wake_up,
    /update_weights, /reset_prefix_cache, /restart_replica, /v1/load_lora_adapter and
    /v1/unload_lora_adapter. Needs api_key."""

    max_requests_per_key: Annotated[int | None, Ge(1), Example(16)] = None
    """Maximum number of concurrent requests of each API key that run the model; more are rejected
    with status 429. Unset: no limit."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server (CORS), such as https://example.com; *: all.
    None: only pages of this server."""

    log_requests: bool = False
    """Log prompts. They are never logged otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRun:
    """Settings of `megalith serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: InferenceParallelConfig = field(default_factory=InferenceParallelConfig)
    server: ServeConfig = field(default_factory=ServeConfig)
    kernels: KernelSetting = "auto"
    """Kernel backends. auto: the fastest on this machine; torch: torch operations; reference:
    plain definitions; or a backend per operation, such as kernels.small_batch_matmul."""


def serve_problems(run: ServeRun) -> list[str]:
    """Return a message for every invalid setting of a server."""
    server = run.server
    problems = range_problems(run) + combination_problems(run.engine)
    # replicas do not depend on each other, but for experts
    problems += parallel_problems(run.engine, replace(run.parallel, dp=1, dp_replicate=None))
    problems += dp_replicate_problems(run.engine, run.parallel)
    if (server.ssl_certfile is None) != (server.ssl_keyfile is None):
        problems.append(
            f"--ssl-certfile={server.ssl_certfile} with --ssl-keyfile={server.ssl_keyfile}: TLS "
            "needs both files. Pass both options, or none."
        )
    for name, path in (("cert", server.ssl_certfile), ("key", server.ssl_keyfile)):
        if path is not None and not Path(path).is_file():
            problems.append(f"--ssl-{name}file={path}: no such file. Pass a PEM file.")
    for key in server.api_key:
        if not key or not key.isascii() or not key.isprintable() or key.strip() != key:
            problems.append(
                "--api-key: a key must have only printable ASCII characters without spaces around "
                "them. Use for example the output of `openssl rand -hex 32`."
            )
            break
    if server.max_requests_per_key is not None and not server.api_key:
        problems.append(
            f"--max-requests-per-key={server.max_requests_per_key}: there are no keys. Pass "
            "--api-key too, or omit it."
        )
    if server.enable_admin and not server.api_key:
        problems.append(
            "--enable-admin: there are no keys, so everyone could stop the server. Pass --api-key "
            "too, or omit it."
        )
    for origin in server.cors_origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*]+", origin):
            problems.append(
                f"--cors-origins={origin}: must be * or an origin without a path, such as "
                "https://example.com or http://localhost:3000."
            )
    for entry in run.engine.adapters:
        if entry.partition("=")[0] == server.served_model_name:
            problems.append(
                f"--engine.adapters={entry}: {server.served_model_name} is the name of the base "
                "model. Use another name, or set --served-model-name."
            )
    problems += _parser_problems(server.parsers)
    if server.served_model_name == "":
        problems.append("--served-model-name is empty. Pass a name, or omit it.")
    return problems


def _parser_problems(names: tuple[str, ...]) -> list[str]:
    """Return the messages about unknown parsers, and about several of a kind."""
    known = (*REASONING_PARSERS, *TOOL_CALL_PARSERS)
    problems = [
        f"--parsers={name}: there is no such parser.{did_you_mean(name, known)} Reasoning: "
        f"{', '.join(REASONING_PARSERS)}; tool calls: {', '.join(TOOL_CALL_PARSERS)}."
        for name in names
        if name not in known
    ]
    for kind, options in (("reasoning", REASONING_PARSERS), ("tool calls", TOOL_CALL_PARSERS)):
        selected = [name for name in names if name in options]
        if len(selected) > 1:
            problems.append(
                f"--parsers={' '.join(selected)}: these are all for {kind}. Use one of them."
            )
    return problems

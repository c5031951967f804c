"""`megalith serve`: serve a model with the OpenAI API."""

import asyncio
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.generate import DTYPES
from megalith.config.serve import Pooling
from megalith.config.server import ServeConfig, ServeRun, serve_problems
from megalith.config.tree import apply_overrides, to_dict
from megalith.errors import raise_all

API_KEY_VARIABLE = "MEGALITH_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve the model of a run, a checkpoint, or a Hugging Face folder with the OpenAI API.

    Settings of the engine and of kernels are options too, such as --engine.max_num_seqs 16,
    --engine.cache.memory_fraction 0.5 or --kernels torch; docs/howto/serve.md explains them.
    """

    source: Positional[str]
    """Folder of a run (its latest checkpoint), a checkpoint, or a Hugging Face model; or the
    name of a run under runs/."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""

    port: int = 5000
    """TCP port; 0 chooses a free one, which is printed."""

    served_model_name: str | None = None
    """Name of the model in requests; default: the name of its folder."""

    api_key: tuple[str, ...] = ()
    """Keys, one of which a request must send; better in the environment variable
    MEGALITH_API_KEY, which other users of this machine cannot read."""

    max_queue: int = 1024
    """Maximum number of waiting sequences; more requests get status 429."""

    max_queue_tokens: int = 4_194_304
    """Maximum number of prompt tokens of all unfinished requests."""

    request_timeout_s: float | None = None
    """Requests that take longer end with status 408; default: no limit."""

    max_body_bytes: int = 33_554_432
    """Maximum size of a request body."""

    drain_timeout: float = 30.0
    """Seconds for requests in flight to finish after SIGTERM."""

    ssl_certfile: str | None = None
    """Certificate file (PEM) for TLS."""

    ssl_keyfile: str | None = None
    """File with the private key of the certificate."""

    nproc: int = 1
    """Number of processes that share the model: tensor parallel, in parallel.pp pipeline stages."""

    template: str | None = None
    """Chat template: chatml, llama3, identity, nemotron-h-aligned, nemotron-nano-v2, or a Jinja
    file; default: that of the fine-tuning run, else the model's."""

    parsers: tuple[str, ...] = ()
    """Formats in which the model writes reasoning (deepseek-r1, nemotron-v3 or qwen3) and tool
    calls (hermes, json, llama3-json or qwen3-coder)."""

    generation_defaults: Literal["model", "none"] = "model"
    """model: sampling parameters that a request leaves out have the values of the model's
    generation_config.json; none: those of the OpenAI API."""

    pooling: Pooling = "last"
    """Embedding of a text: the hidden state of its last token, or the mean over its tokens."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Compute dtype; default: bf16 on a GPU, fp32 on a CPU."""

    base: str | None = None
    """For adapters: their base model; default: the one that the adapters name."""

    chat_page: bool = True
    """Serve a web page for chats at /."""

    enable_admin: bool = False
    """Serve the control endpoints: POST /abort, /pause, /resume, /reset_prefix_cache,
    /v1/load_lora_adapter and /v1/unload_lora_adapter; needs --api-key."""

    max_requests_per_key: int | None = None
    """Maximum number of concurrent requests of each API key that run the model; default: no
    limit."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server (CORS), such as https://example.com; *: all."""

    log_requests: bool = False
    """Log prompts."""


def main(argv: list[str]) -> int:
    """Run `megalith serve`."""
    rest, overrides = split_overrides(argv, ServeRun)
    options = parse_options(ServeOptions, rest, prog="megalith serve", root=ServeRun)
    server = build_config(options)
    if server.served_model_name is None:
        server = replace(server, served_model_name=Path(options.source).resolve().name)
    run = apply_overrides(ServeRun(server=server), overrides)
    problems = serve_problems(run)
    if options.nproc < 1:
        problems.append(
            f"--nproc={options.nproc} must be at least 1. Use the number of processes to start."
        )
    raise_all(problems)
    from megalith.serve.transport import check_packages

    check_packages("megalith serve")
    from megalith.serve.server import open_listener, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = {
        "source": options.source,
        "engine": to_dict(run.engine),
        "parallel": to_dict(run.parallel),
        "kernels": to_dict(run)["kernels"],
        "served_model_name": run.server.served_model_name,
        "base": options.base,
        "dtype": DTYPES[options.dtype] if options.dtype else None,
        "template": options.template,
        "log_requests": run.server.log_requests,
        "nproc": options.nproc,
    }
    return asyncio.run(serve(run.server, open_listener(run.server), settings, show))


def build_config(options: ServeOptions) -> ServeConfig:
    """Return the settings of the HTTP server."""
    from_environment = os.environ.get(API_KEY_VARIABLE)
    return ServeConfig(
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        api_keys=options.api_key or ((from_environment,) if from_environment else ()),
        max_queue=options.max_queue,
        max_queue_tokens=options.max_queue_tokens,
        request_timeout_s=options.request_timeout_s,
        max_body_bytes=options.max_body_bytes,
        drain_timeout_s=options.drain_timeout,
        generation_defaults=options.generation_defaults,
        pooling=options.pooling,
        parsers=options.parsers,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        chat_page=options.chat_page,
        enable_admin=options.enable_admin,
        max_requests_per_key=options.max_requests_per_key,
        cors_origins=options.cors_origins,
        log_requests=options.log_requests,
    )


def show(text: str) -> None:
    """Print a line about the server at once."""
    print(text, flush=True)

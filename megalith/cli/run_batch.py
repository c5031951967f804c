"""`megalith run-batch`: process a file of OpenAI requests without a server."""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megalith import storage
from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.serve import ModelOptions
from megalith.config.server import ServeConfig, ServeRun
from megalith.config.tree import apply_overrides
from megalith.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class RunBatchOptions(ModelOptions):
    """Process a batch file of the OpenAI API: one JSON object per line with custom_id, url
    (/v1/completions, /v1/chat/completions, /v1/embeddings or /v1/responses) and body.

    Settings of the engine and of kernels are options too, such as --engine.max_num_seqs 16.
    """

    input: str
    """Batch file; - is standard input."""

    output: str
    """New file for the responses, one JSON object per line in the order of completion; - is
    standard output."""

    served_model_name: str | None = None
    """Name of the model in requests; default: the name of its folder."""

    generation_defaults: Literal["model", "none"] = "model"
    """model: sampling parameters that a request leaves out have the values of the model's
    generation_config.json; none: those of the OpenAI API."""


def main(argv: list[str]) -> int:
    """Run `megalith run-batch`; exits with 1 if a request failed."""
    rest, overrides = split_overrides(argv, ServeRun)
    options = parse_options(RunBatchOptions, rest, prog="megalith run-batch", root=ServeRun)
    server = ServeConfig(
        served_model_name=options.served_model_name,
        generation_defaults=options.generation_defaults,
        max_queue=1_000_000,  # the file is the queue
        max_queue_tokens=2**40,
    )
    run = apply_overrides(ServeRun(server=server), overrides)
    options.check_settings(run)
    from megalith.serve.transport import check_packages

    check_packages("megalith run-batch")
    from megalith.serve.batch import read_batch, run_batch

    requests = read_batch(read_input(options.input), options.input)
    if options.output != "-" and Path(options.output).exists():
        raise ConfigError(
            f"--output={options.output}: the file exists. Remove it, or use another name."
        )
    settings = options.engine_settings(run)
    num_failed = asyncio.run(
        run_batch(run.server, settings, requests, lambda line: write_line(options.output, line))
    )
    print(f"{len(requests)} requests, {num_failed} failed", file=sys.stderr)
    return int(num_failed > 0)


def read_input(name: str) -> str:
    """Return the text of the batch file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return sys.stdin.read() if name == "-" else storage.read_text(Path(name), allow_pipe=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"--input={name}: {reason}. Use a JSON lines file.") from None


def write_line(name: str, line: dict[str, Any]) -> None:
    """Append a line to the output."""
    text = json.dumps(line, ensure_ascii=False)
    if name == "-":
        print(text, flush=True)
    else:
        storage.append_line(Path(name), text.encode())

"""`megalith serve`: serve a model with the OpenAI API."""

import asyncio
import logging
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.generate import DTYPES
from megalith.config.serve import InferenceParallelConfig, process_count_problems
from megalith.config.server import ServeConfig, ServeRun, serve_problems
from megalith.config.tree import apply_overrides, to_dict
from megalith.errors import raise_all

API_KEY_VARIABLE = "MEGALITH_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options about the model that a server or a batch runs."""

    source: Positional[str]
    """Folder of a run (its latest checkpoint), a checkpoint, or a Hugging Face model; or the
    name of a run under runs/."""

    template: str | None = None
    """Chat template: chatml, llama3, identity, nemotron-h-aligned, nemotron-nano-v2, or a Jinja
    file; default: that of the fine-tuning run, else the model's."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Compute dtype; default: bf16 on a GPU, fp32 on a CPU."""

    base: str | None = None
    """For adapters: their base model; default: the one that the adapters name."""

    nproc: int = 1
    """Number of processes: parallel.dp replicas of the model, each tensor parallel in parallel.pp
    pipeline stages."""

    def check_settings(self, run: ServeRun) -> None:
        """Check the settings, and that the processes can share the model.

        Raises:
            CheckpointError: there are several processes, and the model cannot be read.
            ConfigError: it lists all problems.
        """
        problems = serve_problems(run)
        if self.nproc == 1 and not process_count_problems(run.parallel, 1):
            raise_all(problems)
            return
        # the model needs torch, whose memory this process does not have to use
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as process:
            process.submit(check_source, self, run.parallel, problems).result()

    def engine_settings(self, run: ServeRun, **more: Any) -> dict[str, Any]:
        """Return the settings of the engine process as plain data; `more`: those of a server."""
        return {
            "source": self.source,
            "engine": to_dict(run.engine),
            "parallel": to_dict(run.parallel),
            "kernels": to_dict(run)["kernels"],
            "base": self.base,
            "dtype": DTYPES[self.dtype] if self.dtype else None,
            "nproc": self.nproc,
            "template": self.template,
            "served_model_name": run.server.served_model_name or Path(self.source).resolve().name,
            **more,
        }


def check_source(
    options: ModelOptions, parallel: InferenceParallelConfig, problems: list[str]
) -> None:
    """Check that the processes of a server can share its model; see `open_source`."""
    from megalith.infer.layout import open_source

    open_source(
        options.source, options.nproc, base=options.base, parallel=parallel, problems=problems
    )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ModelOptions, ServeConfig):
    """Serve the model of a run, a checkpoint, or a Hugging Face folder with the OpenAI API.

    Settings of the engine and of kernels are options too, such as --engine.max_num_seqs 16,
    --engine.cache.memory_fraction 0.5 or --kernels torch; docs/howto/serve.md explains them.
    """


def main(argv: list[str]) -> int:
    """Run `megalith serve`."""
    rest, overrides = split_overrides(argv, ServeRun)
    options = parse_options(ServeOptions, rest, prog="megalith serve", root=ServeRun)
    server = build_config(options)
    if server.served_model_name is None:
        server = replace(server, served_model_name=Path(options.source).resolve().name)
    run = apply_overrides(ServeRun(server=server), overrides)
    options.check_settings(run)
    from megalith.serve.transport import check_packages

    check_packages("megalith serve")
    from megalith.serve.server import open_listener, serve

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = options.engine_settings(run, log_requests=run.server.log_requests)
    return asyncio.run(serve(run.server, open_listener(run.server), settings, show))


def build_config(options: ServeOptions) -> ServeConfig:
    """Return the settings of the HTTP server."""
    config = ServeConfig(**{each.name: getattr(options, each.name) for each in fields(ServeConfig)})
    key = os.environ.get(API_KEY_VARIABLE)
    return replace(config, api_key=(key,)) if key and not config.api_key else config


def show(text: str) -> None:
    """Print a line about the server at once."""
    print(text, flush=True)

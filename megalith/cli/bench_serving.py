"""`megalith bench serve`, `bench throughput` and `bench latency`: speed of text generation."""

import asyncio
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from megalith.cli.arguments import parse_options, split_overrides
from megalith.cli.generate import DTYPES
from megalith.cli.output import print_json
from megalith.cli.serve import API_KEY_VARIABLE
from megalith.config.serve import InferenceParallelConfig
from megalith.config.server import ServeRun, serve_problems
from megalith.config.tree import apply_overrides, to_dict
from megalith.errors import ConfigError, raise_all

SUBCOMMANDS = {
    "serve": "latency and throughput of a running server",
    "throughput": "output tokens per second of many requests in this process",
    "latency": "latency of one batch in this process",
}


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Send random requests to a running server as streams, and measure TTFT, TPOT, ITL and E2E
    latency. The API key is read from the environment variable MEGALITH_API_KEY."""

    base_url: str = "http://127.0.0.1:5000"
    """Address of the server."""

    model: str | None = None
    """Name of the model; default: the first that the server lists."""

    num_prompts: int = 100
    """Number of requests."""

    request_rate: float = math.inf
    """Mean number of requests per second (Poisson arrivals); default: all at once."""

    max_concurrency: int = 256
    """Maximum number of requests in flight."""

    input_len: int = 128
    """Prompt tokens per request."""

    output_len: int = 64
    """Output tokens per request."""

    vocab_size: int = 250
    """Prompts are random token ids below this number."""

    seed: int = 1234
    """Seed of the prompts and arrivals."""

    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class BenchEngineOptions:
    """Generate from random prompts in this process, all at once, and measure throughput and
    latencies. Settings of the engine and of kernels are options too, such as
    --engine.max_num_seqs 16."""

    source: Positional[str]
    """Folder of a run (its latest checkpoint), a checkpoint, or a Hugging Face model; or the
    name of a run under runs/."""

    num_prompts: int | None = None
    """Number of requests; default: 100 for throughput, 8 for latency."""

    input_len: int = 128
    """Prompt tokens per request."""

    output_len: int = 64
    """Output tokens per request."""

    repeats: int = 3
    """Number of measurements; the last one is printed, earlier ones with --json."""

    dtype: Literal["fp32", "bf16", "fp64"] | None = None
    """Compute dtype; default: bf16 on a GPU, fp32 on a CPU."""

    seed: int = 1234
    """Seed of the prompts."""

    timeline: Path | None = None
    """File for a plot of the last measurement, .png, .svg or .pdf, or .txt: which sequences each
    step prefilled, decoded and preempted."""

    json: bool = False
    """Print one JSON document."""


def main(subcommand: str, argv: list[str]) -> int:
    """Run a subcommand of `megalith bench`; exits with 1 if a request failed."""
    if subcommand == "serve":
        return bench_serve(argv)
    return bench_engine(subcommand, argv)


def check_sizes(**sizes: float | None) -> list[str]:
    """Return a message for every size that is not above 0."""
    return [
        f"--{name.replace('_', '-')}={value} must be above 0. Use 8."
        for name, value in sizes.items()
        if value is not None and not value > 0
    ]


def bench_serve(argv: list[str]) -> int:
    """Measure a server."""
    options = parse_options(BenchServeOptions, argv, prog="megalith bench serve")
    raise_all(
        check_sizes(
            num_prompts=options.num_prompts,
            request_rate=options.request_rate,
            max_concurrency=options.max_concurrency,
            input_len=options.input_len,
            output_len=options.output_len,
            vocab_size=options.vocab_size,
        )
    )
    from megalith.serve.benchmark import BenchmarkWorkload, Target, measure_server

    workload = BenchmarkWorkload(
        num_prompts=options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        request_rate=options.request_rate,
        vocab_size=options.vocab_size,
        seed=options.seed,
    )
    target = Target(options.base_url, options.model, os.environ.get(API_KEY_VARIABLE))
    summary = asyncio.run(measure_server(target, workload, max_concurrency=options.max_concurrency))
    return report([summary], as_json=options.json)


def bench_engine(subcommand: str, argv: list[str]) -> int:
    """Measure an engine in this process."""
    rest, overrides = split_overrides(argv, ServeRun)
    options = parse_options(
        BenchEngineOptions, rest, prog=f"megalith bench {subcommand}", root=ServeRun
    )
    run = apply_overrides(ServeRun(), overrides)
    raise_all(
        serve_problems(run)
        + check_sizes(
            num_prompts=options.num_prompts,
            input_len=options.input_len,
            output_len=options.output_len,
            repeats=options.repeats,
        )
    )
    if run.parallel != InferenceParallelConfig():
        raise ConfigError(
            f"parallel={to_dict(run.parallel)}: this command measures one process. Remove the "
            "settings of parallel, or use megalith bench serve."
        )
    import torch

    from megalith.infer.llm import LLM
    from megalith.infer.timeline import EngineTimeline, check_suffix
    from megalith.serve.benchmark import BenchmarkWorkload, TokenTimes, measure_engine

    dtype: torch.dtype | None = getattr(torch, DTYPES[options.dtype]) if options.dtype else None
    if options.timeline is not None:
        check_suffix(options.timeline)
    times, timeline = TokenTimes(), EngineTimeline()
    llm = LLM(
        options.source,
        config=run.engine,
        dtype=dtype,
        kernels=run.kernels,
        callbacks=[times, timeline],
    )
    summaries = []
    for repeat in range(options.repeats):
        workload = BenchmarkWorkload(
            num_prompts=options.num_prompts or (8 if subcommand == "latency" else 100),
            input_len=options.input_len,
            output_len=options.output_len,
            request_rate=math.inf,
            vocab_size=llm.generator.model.config.vocab_size,
            seed=options.seed + repeat,  # other prompts, which are not in the prefix cache
        )
        summaries.append(measure_engine(llm, times, timeline, workload))
    if options.timeline is not None:
        timeline.write(options.timeline)
    return report(summaries, as_json=options.json)


def report(summaries: list[dict[str, Any]], *, as_json: bool) -> int:
    """Print the last measurement, or all as JSON; returns the exit code."""
    last = summaries[-1]
    if as_json:
        print_json({**last, "repeats": summaries})
        return int(last["num_failed"] > 0)
    console = Console()
    console.print(
        f"{last['num_requests']} requests ({last['num_failed']} failed) in "
        f"{last['seconds']:.2f} s: "
        f"{last['output_tokens_per_second']:.1f} output tokens/s, "
        f"{last['requests_per_second']:.2f} requests/s"
    )
    table = Table("latency (ms)", "p50", "p90", "p99", box=box.SIMPLE)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = ["-" if value is None else f"{value:.1f}" for value in last[name].values()]
        table.add_row(name.removesuffix("_ms").upper(), *values)
    console.print(table)
    return int(last["num_failed"] > 0)

"""Latency and throughput of a server or of an engine in this process.

TTFT: arrival to first token; TPOT: (end - first token) / (tokens - 1); ITL: time between two
emissions; E2E: arrival to end.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megalith.config.generation import SamplingParams
from megalith.errors import ConfigError, DataError
from megalith.infer.timeline import EngineTimeline

if TYPE_CHECKING:  # a benchmark of a server does not load torch
    from megalith.infer.llm import LLM
    from megalith.infer.outputs import RequestOutput, TokenOutput
    from megalith.plan.serving.scheduler import SchedulerStats, StepPlan

QUANTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestTimes:
    """When a request arrived and its tokens were emitted, in seconds."""

    arrival_time: float
    emissions: list[float] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens that were generated; an emission may have several."""

    finished: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkWorkload:
    """Requests of a benchmark: random prompts of one length."""

    num_prompts: int
    input_len: int
    output_len: int
    request_rate: float
    """Requests per second, with exponential distances (a Poisson process); infinite: all at
    once."""

    vocab_size: int
    """Prompts have token ids below this."""

    seed: int = 1234

    def prompts(self) -> list[list[int]]:
        """Return the token ids of the prompts."""
        generator = random.Random(self.seed)
        return [
            [generator.randrange(self.vocab_size) for _ in range(self.input_len)]
            for _ in range(self.num_prompts)
        ]

    def arrivals(self) -> list[float]:
        """Return the arrival times, in seconds after the start.

        >>> workload = BenchmarkWorkload(num_prompts=3, input_len=1, output_len=1,
        ...     request_rate=float("inf"), vocab_size=9)
        >>> workload.arrivals()
        [0.0, 0.0, 0.0]
        """
        generator = random.Random(self.seed + 1)
        times, now = [], 0.0
        for _ in range(self.num_prompts):
            times.append(now)
            now += generator.expovariate(1) / self.request_rate
        return times


def quantile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile with linear interpolation, None of no values.

    >>> quantile([1.0, 2.0, 4.0], 75)
    3.0
    """
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(requests: Sequence[RequestTimes], seconds: float) -> dict[str, Any]:
    """Return throughput and percentiles of the latencies in milliseconds; requests that failed are
    counted only."""
    done = [request for request in requests if request.error is None and request.emissions]
    samples: Mapping[str, list[float]] = {
        "ttft_ms": [each.emissions[0] - each.arrival_time for each in done],
        "tpot_ms": [
            (each.finished - each.emissions[0]) / (each.num_tokens - 1)
            for each in done
            if each.num_tokens > 1
        ],
        "itl_ms": [b - a for each in done for a, b in pairwise(each.emissions)],
        "e2e_ms": [each.finished - each.arrival_time for each in done],
    }
    num_tokens = sum(each.num_tokens for each in done)
    result: dict[str, Any] = {
        "num_requests": len(requests),
        "num_failed": len(requests) - len(done),
        "seconds": seconds,
        "output_tokens": num_tokens,
        "requests_per_second": len(done) / seconds,
        "output_tokens_per_second": num_tokens / seconds,
    }
    for name, values in samples.items():
        scaled = [1000 * value for value in values]
        result[name] = {f"p{percent}": quantile(scaled, percent) for percent in QUANTILES}
    return result


# --- a server


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure."""

    base_url: str
    model: str | None = None
    """None: the first that the server lists."""

    api_key: str | None = None


async def measure_server(
    target: Target, workload: BenchmarkWorkload, *, max_concurrency: int
) -> dict[str, Any]:
    """Send the requests of a workload as streams and return the summary.

    Raises:
        ConfigError: the URL is no http URL.
        DataError: the server cannot be reached, or lists no model.
    """
    model = target.model or await _find_model(target)
    slots = asyncio.Semaphore(max_concurrency)
    started = time.monotonic()

    async def send(prompt: list[int], delay: float) -> RequestTimes:
        await asyncio.sleep(max(0.0, started + delay - time.monotonic()))
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": workload.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times = RequestTimes(time.monotonic())
        async with slots:
            await _read_stream(target, body, times)
        return times

    pairs = zip(workload.prompts(), workload.arrivals(), strict=True)
    requests = await asyncio.gather(*(send(prompt, delay) for prompt, delay in pairs))
    return summarize(requests, time.monotonic() - started)


async def _find_model(target: Target) -> str:
    async with _open(target, "GET", "/v1/models", b"") as (status, lines):
        text = "".join([line async for line in lines])
    try:
        name: str = json.loads(text)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise DataError(
            f"--base-url={target.base_url}: GET /v1/models has status {status}: {text:.200}. Use "
            "the address that `megalith serve` prints."
        ) from None
    return name


async def _read_stream(target: Target, body: dict[str, Any], times: RequestTimes) -> None:
    """Send a request, and record when its tokens are emitted."""
    try:
        data = json.dumps(body).encode()
        async with _open(target, "POST", "/v1/completions", data) as (status, lines):
            async for line in lines:
                if status != 200 or '"error"' in line:
                    times.error = line
                elif line.startswith("data: {"):
                    _record_event(json.loads(line[6:]), times)
    except (OSError, asyncio.IncompleteReadError, DataError) as error:
        times.error = str(error)
    times.finished = times.emissions[-1] if times.emissions else time.monotonic()


def _record_event(event: dict[str, Any], times: RequestTimes) -> None:
    if event["choices"]:
        times.emissions.append(time.monotonic())
    if event.get("usage"):
        times.num_tokens = event["usage"]["completion_tokens"]


@asynccontextmanager
async def _open(
    target: Target, method: str, path: str, body: bytes
) -> AsyncIterator[tuple[int, AsyncIterator[str]]]:
    """Send an HTTP/1.1 request; yield the status and the lines of the response."""
    url = urlsplit(target.base_url)
    if url.scheme != "http" or url.hostname is None:
        raise ConfigError(
            f"--base-url={target.base_url}: must be an http URL, such as http://127.0.0.1:5000."
        )
    try:
        reader, writer = await asyncio.open_connection(url.hostname, url.port or 80, limit=2**24)
    except OSError as error:
        raise DataError(
            f"--base-url={target.base_url}: no server answers ({error.strerror}). Start one with "
            "`megalith serve`."
        ) from None
    try:
        key = "" if target.api_key is None else f"Authorization: Bearer {target.api_key}\r\n"
        head = (
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status_line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        is_chunked = any(
            header.lower().replace(" ", "") == "transfer-encoding:chunked" for header in headers
        )
        yield int(status_line.split()[1]), _iter_lines(reader, is_chunked=is_chunked)
    finally:
        writer.close()


async def _iter_lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[str]:
    """Yield the lines of a body."""
    pending = b""
    while True:
        if is_chunked:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = (await reader.readexactly(size + 2))[:-2]
        else:
            data = await reader.read(1 << 16)
        if not data:
            break
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            yield line.decode()
    if pending:
        yield pending.decode()


# --- an engine in this process


class TokenTimes:
    """Engine callback that records when tokens are generated."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestTimes] = {}

    def on_request(self, request: "RequestOutput") -> None:
        """Record the arrival."""
        self.requests[request.request_id] = RequestTimes(request.timings.arrival_time)

    def on_step(self, plan: "StepPlan", stats: "SchedulerStats", seconds: float) -> None:
        """Steps are not recorded."""

    def on_token(self, output: "TokenOutput") -> None:
        """Record a token."""
        times = self.requests[output.request_id]
        times.error = output.error or times.error
        if output.token is not None:
            times.emissions.append(time.monotonic())
            times.num_tokens += 1

    def on_finish(self, request: "RequestOutput") -> None:
        """Record the end."""
        self.requests[request.request_id].finished = time.monotonic()


def measure_engine(
    llm: "LLM", times: TokenTimes, timeline: EngineTimeline, workload: BenchmarkWorkload
) -> dict[str, Any]:
    """Generate all prompts of a workload at once and return the summary; `times` and `timeline`:
    callbacks of the engine."""
    params = SamplingParams(max_new_tokens=workload.output_len, ignore_eos=True, temperature=0)
    llm.generate(workload.prompts()[:1], SamplingParams(max_new_tokens=2))  # compiles kernels
    llm.engine.scheduler.reset_prefix_cache()
    times.requests.clear()
    timeline.clear()
    started = time.monotonic()
    llm.generate(workload.prompts(), params)
    return summarize(list(times.requests.values()), time.monotonic() - started)

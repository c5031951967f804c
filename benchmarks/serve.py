"""`megalith serve` on this CPU, beside the engine without a server, an echo endpoint in the same
framework, and `transformers serve`.

    python benchmarks/serve.py [--model 29m] [--threads 2] [--rounds 5] [--json]

- Output tokens per second of 64 concurrent streams, against `LLM` with the same requests.
- Median TTFT at 8 streams minus that of `LLM`, over that of an echo endpoint.
- Output tokens per second at 16 streams, against `transformers serve --continuous-batching`.
- Arrival of a request at the idle engine to its first step, over a round trip of pyzmq.

Servers are processes of their own, the clients share one. Contenders take turns in every round; a
figure is the median over the rounds of a ratio of the same round, with quartiles. Each system has
the dtype in which it is faster. The server tokenizes and sends text; its text is compared with that
of `LLM` first. "Computing" is the CPU time of all processes of a contender, the client's included:
the figure to read on a busy machine, where the number of processes decides on the share of the
CPU; it is exact with --threads 1 only, since waiting threads spin. "HTTP process" is the CPU time
of the process that has the port, per output token.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders.ctranslate2_llama import save_tokenizer, token_name
from contenders.http import HttpPeer, send_all, serve_echo, serve_megalith, serve_transformers
from engine import DTYPES, VOCAB, Load, build_load, save_llama
from paired import Spread, spread, take_turns, times_as_fast

from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig, InferenceParallelConfig
from megalith.config.tree import to_dict
from megalith.infer.llm import LLM
from megalith.infer.outputs import RequestOutput
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.serve.generation import PromptRequest
from megalith.serve.supervisor import open_engine

STREAMS_OFFLINE, STREAMS_TTFT, STREAMS_PEER = 64, 8, 16
TTFT_TOKENS = 4
WAKE_UPS = 30
BAR_OFFLINE, BAR_ECHO, BAR_PEER, BAR_WAKE_UP = 0.9, 3.0, 2.0, 3.0
ZMQ_ECHO = """
import sys, zmq
socket = zmq.Context.instance().socket(zmq.DEALER)
socket.connect(sys.argv[1])
while True:
    socket.send(socket.recv())
"""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured ratio and its bar."""

    name: str
    ratio: Spread
    bar: float
    is_minimum: bool
    details: dict[str, float]
    computing: Spread | None = None
    """The same ratio of CPU times."""

    @property
    def holds(self) -> bool:
        """Whether the median reaches the bar."""
        median = self.ratio.median
        return median >= self.bar if self.is_minimum else median <= self.bar

    def print(self) -> None:
        """Print the figure and its parts."""
        for name, value in self.details.items():
            print(f"  {name:36} {value:9.2f}")
        sign = ">=" if self.is_minimum else "<="
        print(f"{'holds ' if self.holds else 'MISSED'} {self.name}: {self.ratio} {sign} {self.bar}")
        if self.computing is not None:
            print(f"       the same, computing: {self.computing}")


class Contender:
    """The server and the engine without a server, in one dtype."""

    def __init__(self, folder: str, dtype: str, peer: HttpPeer) -> None:
        self.llm = LLM(folder, dtype=DTYPES[dtype], config=EngineConfig(max_num_seqs=64))
        self.peer = peer

    def generate(self, load: Load) -> list[RequestOutput]:
        """Generate without a server."""
        self.llm.engine.scheduler.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_new_tokens=load.new_tokens, ignore_eos=True)
        return self.llm.generate(load.prompts, params)

    def send(self, load: Load) -> list[Any]:  # StreamResult
        """Generate with the server."""
        self.peer.post("/reset_prefix_cache")
        return send_all(self.peer, texts(load), load.new_tokens)


def texts(load: Load) -> list[str]:
    """Return the prompts as texts of the benchmark's tokenizer."""
    return [" ".join(map(token_name, prompt)) for prompt in load.prompts]


def fastest(seconds: dict[str, list[float]], prefix: str) -> str:
    """Return the contender of a system with the smallest median."""
    names = [name for name in seconds if name.startswith(f"{prefix} ")]
    return min(names, key=lambda name: statistics.median(seconds[name]))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a contender does in a round."""

    run: Callable[[], object]
    peer: HttpPeer | None
    """The server that it uses."""

    def measure_cpu(self) -> list[float]:
        """Run it, and return the CPU time of this process, and of the processes of the server, that
        which has the port first."""
        started = self._cpu_seconds()
        self.run()
        return [end - start for start, end in zip(started, self._cpu_seconds(), strict=True)]

    def _cpu_seconds(self) -> list[float]:
        return [time.process_time(), *([] if self.peer is None else self.peer.cpu_seconds())]


def compare_speed(
    name: str, contenders: Mapping[str, Turn], load: Load, bar: float, rounds: int
) -> Figure:
    """Return the output tokens per second of the server over those of the other system."""
    cpu_seconds: dict[str, list[float]] = {key: [] for key in contenders}
    http_seconds: dict[str, list[float]] = {key: [] for key in contenders}

    def measure(key: str) -> None:
        client, *server = contenders[key].measure_cpu()
        cpu_seconds[key].append(client + sum(server))
        http_seconds[key] += server[:1]

    calls = {key: partial(measure, key) for key in contenders}
    seconds = dict(take_turns(calls, rounds=rounds, warmup=1).seconds)
    other = next(key for key in contenders if not key.startswith("server ")).split()[0]
    pair = fastest(seconds, "server"), fastest(seconds, other)
    num_tokens = len(load.prompts) * load.new_tokens
    details = {}
    for key, values in seconds.items():
        details[f"{key}, tokens/s"] = num_tokens / statistics.median(values)
        details[f"{key}, computing s"] = statistics.median(cpu_seconds[key][1:])
        if http_seconds[key] and key.startswith("server "):
            seconds_per_token = statistics.median(http_seconds[key][1:]) / num_tokens
            details[f"{key}, HTTP process, us/token"] = 1e6 * seconds_per_token
    computing = times_as_fast(*(cpu_seconds[key][1:] for key in pair))
    ratio = times_as_fast(*(seconds[key] for key in pair))
    return Figure(name, ratio, bar, True, details, computing)


def compare_offline(contenders: dict[str, Contender], load: Load, rounds: int) -> Figure:
    """Compare the server with the engine without a server."""
    for dtype, contender in contenders.items():
        expected = [output.outputs[0].text for output in contender.generate(load)]
        received = [result.text() for result in contender.send(load)]
        num_same = sum(a == b for a, b in zip(expected, received, strict=True))
        print(f"{dtype}: {num_same} of {len(expected)} texts are those of LLM")
    calls = {}
    for dtype, contender in contenders.items():
        calls[f"server {dtype}"] = Turn(partial(contender.send, load), contender.peer)
        calls[f"LLM {dtype}"] = Turn(partial(contender.generate, load), None)
    name = f"{len(load.prompts)} streams, server / LLM"
    return compare_speed(name, calls, load, BAR_OFFLINE, rounds)


def compare_ttft(contender: Contender, load: Load, rounds: int) -> Figure:
    """Compare what the server adds to the TTFT with an echo endpoint."""
    values: dict[str, list[float]] = {"server": [], "LLM": [], "echo": []}
    with serve_echo() as echo:

        def measure_server() -> None:
            results = contender.send(load)
            values["server"].append(statistics.median(result.ttft for result in results))

        def measure_offline() -> None:
            outputs = contender.generate(load)
            values["LLM"].append(statistics.median(output.timings.ttft or 0 for output in outputs))

        def measure_echo() -> None:
            results = send_all(echo, texts(load), load.new_tokens)
            values["echo"].append(statistics.median(result.ttft for result in results))

        turns = {"server": measure_server, "LLM": measure_offline, "echo": measure_echo}
        take_turns(turns, rounds=rounds, warmup=1)
    rows = zip(values["server"][1:], values["LLM"][1:], values["echo"][1:], strict=True)
    ratio = spread([(server - offline) / echo for server, offline, echo in rows])
    details = {f"{key}, ms": 1000 * statistics.median(row[1:]) for key, row in values.items()}
    name = f"median TTFT of {len(load.prompts)} streams, (server - LLM) / echo"
    return Figure(name, ratio, BAR_ECHO, False, details)


def compare_peer(
    contenders: dict[str, Contender], folder: str, load: Load, options: argparse.Namespace
) -> Figure:
    """Compare the server with `transformers serve`."""
    with ExitStack() as stack:
        calls = {}
        for dtype, contender in contenders.items():
            calls[f"server {dtype}"] = Turn(partial(contender.send, load), contender.peer)
            peer = stack.enter_context(serve_transformers(folder, dtype, load.new_tokens))
            send = partial(send_all, peer, texts(load), load.new_tokens)
            calls[f"transformers {dtype}"] = Turn(send, peer)
        name = f"{len(load.prompts)} streams, server / transformers serve"
        return compare_speed(name, calls, load, BAR_PEER, options.rounds)


async def compare_wake_up(folder: str) -> Figure:
    """Compare arrival to first step of an idle engine process with a round trip of pyzmq."""
    settings = {"source": folder, "engine": to_dict(EngineConfig())}
    settings |= {"parallel": to_dict(InferenceParallelConfig()), "served_model_name": "bench"}
    params = SamplingParams(max_new_tokens=1, temperature=0)
    values: dict[str, list[float]] = {"engine": [], "pyzmq": []}
    async with open_engine(settings) as engine:
        await engine.client.ready
        with tempfile.TemporaryDirectory() as socket_folder:
            address = f"ipc://{socket_folder}/echo.sock"
            process = subprocess.Popen([sys.executable, "-c", ZMQ_ECHO, address])
            socket = open_socket(address)
            for number in range(WAKE_UPS):
                await asyncio.sleep(0.02)  # both processes are idle
                before = await read_queue_seconds(engine.client)
                request = PromptRequest([number % 8 + 1] * 8, params)
                async with engine.client.generate([request], uid="wake-up") as generation:
                    while generation.num_unfinished:
                        await generation.next()
                values["engine"].append(await read_queue_seconds(engine.client) - before)
                time.sleep(0.02)
                started = time.perf_counter()
                socket.send(b"x" * 200)
                socket.recv()
                values["pyzmq"].append(time.perf_counter() - started)
            process.kill()
            process.wait()
            socket.close()
    return wake_up_figure({key: row[3:] for key, row in values.items()})


def wake_up_figure(values: dict[str, list[float]]) -> Figure:
    """Return the ratio of the two times, from all pairs but the first."""
    ratio = spread([a / b for a, b in zip(values["engine"], values["pyzmq"], strict=True)])
    details = {f"{key}, ms": 1000 * statistics.median(row) for key, row in values.items()}
    name = "idle engine to first step / pyzmq round trip"
    return Figure(name, ratio, BAR_WAKE_UP, False, details)


def open_socket(address: str) -> Any:  # zmq.Socket[bytes]
    """Return a socket on which one round trip was made."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.bind(address)
    socket.send(b"")
    socket.recv()
    return socket


async def read_queue_seconds(client: Any) -> float:  # EngineClient
    """Return the sum over all requests of the time from arrival to the first step."""
    text = (await client.call("metrics"))["text"]
    lines = [line for line in text.splitlines() if "request_queue_time_seconds_sum" in line]
    return float(lines[0].rsplit(" ", 1)[1])


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="29m", choices=VOCAB)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", default="offline,ttft,peer,wake_up")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # of the servers
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        save_llama(options.model, folder)
        save_tokenizer(Path(folder), VOCAB[options.model])
        for measure in options.figures.split(","):
            figures.append(measure_figure(measure, folder, options))
            figures[-1].print()
    if options.json:
        print(json.dumps([asdict(figure) | {"holds": figure.holds} for figure in figures]))


def measure_figure(measure: str, folder: str, options: argparse.Namespace) -> Figure:
    """Return one figure."""
    if measure == "wake_up":
        return asyncio.run(compare_wake_up(folder))

    def load(num_streams: int, new_tokens: int) -> Load:
        return build_load(options.model, num_streams, new_tokens)

    with ExitStack() as stack:
        contenders = {
            dtype: Contender(
                folder,
                dtype,
                stack.enter_context(serve_megalith(folder, dtype)),
            )
            for dtype in options.dtypes.split(",")[: 1 if measure == "ttft" else None]
        }
        if measure == "offline":
            requests = load(STREAMS_OFFLINE, options.new_tokens)
            return compare_offline(contenders, requests, options.rounds)
        if measure == "peer":
            requests = load(STREAMS_PEER, options.new_tokens)
            return compare_peer(contenders, folder, requests, options)
        (contender,) = contenders.values()
        return compare_ttft(contender, load(STREAMS_TTFT, TTFT_TOKENS), options.rounds)


if __name__ == "__main__":
    main()

"""Servers in processes of their own, and a client that sends streaming requests to them at once and
costs little CPU time itself."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

START_SECONDS = 300.0
API_KEY = "bench"
"""Key of our server; the others ignore it."""

ECHO = """
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
app = FastAPI()
@app.post("/v1/completions")
async def echo(request: Request):
    body = await request.json()
    async def events():
        for _ in range(body["max_tokens"]):
            yield 'data: {"choices": [{"index": 0, "text": "t1"}]}\\n\\n'
        yield 'data: {"usage": {"completion_tokens": %d}}\\n\\n' % body["max_tokens"]
    return StreamingResponse(events(), media_type="text/event-stream")
uvicorn.run(app, port=PORT, log_level="warning")
"""
"""Server without a model, in the framework of ours."""


@dataclass(frozen=True, slots=True)
class HttpPeer:
    """A running server."""

    port: int
    process: "subprocess.Popen[bytes]"
    model: str
    fields: Mapping[str, Any]
    """Of every request to this server."""

    def cpu_seconds(self) -> list[float]:
        """Return the CPU time of all processes of the server, that which has the port first."""
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
        return [each.user + each.system for each in times]

    def post(self, path: str) -> None:
        """Send a request without a body."""
        url = f"http://127.0.0.1:{self.port}{path}"
        headers = {"Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(url, headers=headers, method="POST")
        urllib.request.urlopen(request, timeout=60).read()


@dataclass(slots=True)
class StreamResult:
    """What a client received."""

    ttft: float = 0.0
    """Seconds from sending the request to its first event."""

    data: bytes = b""

    def num_tokens(self) -> int:
        """Return the number of output tokens that the server counted.

        Raises:
            ValueError: the stream is no complete response.
        """
        counts = re.findall(rb'"completion_tokens": ?(\d+)', self.data)
        if not counts:
            raise ValueError(f"no usage in {self.data[-500:]!r}")
        return int(counts[-1])

    def text(self) -> str:
        """Return the text of all events."""
        events = [line[6:] for line in self.data.splitlines() if line.startswith(b"data: {")]
        choices = [json.loads(event).get("choices") for event in events]
        return "".join(choice[0]["text"] for choice in choices if choice)


@contextmanager
def serve_megalith(folder: str, dtype: str) -> Iterator[HttpPeer]:
    """Serve a folder with `megalith serve` while the context lasts."""
    options = ["--dtype", dtype, "--served-model-name", "bench", "--enable-admin"]
    options += ["--api-key", API_KEY]
    fields = {"ignore_eos": True, "stream_options": {"include_usage": True}}
    command = ["-m", "megalith", "serve", folder, *options, "--port"]
    with _serve(command, "/ready", "bench", fields) as peer:
        yield peer


@contextmanager
def serve_transformers(folder: str, dtype: str, new_tokens: int) -> Iterator[HttpPeer]:
    """Serve a folder with `transformers serve` and its continuous batching, of which the first
    request sets the generation parameters."""
    generation = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": -1}
    fields = {"generation_config": json.dumps(generation | {"pad_token_id": 0})}
    name = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    program = "from transformers.cli.transformers import main; main()"
    options = ["--continuous-batching", "--cb-max-memory-percent", "0.05", "--device", "cpu"]
    command = ["-c", program, "serve", folder, *options, "--dtype", name, "--port"]
    with _serve(command, "/health", folder, fields) as peer:
        yield peer


@contextmanager
def serve_echo() -> Iterator[HttpPeer]:
    """Serve events without a model."""
    port = _free_port()
    with _run([sys.executable, "-c", ECHO.replace("PORT", str(port))]) as process:
        _wait_ready(port, "/v1/completions", process)
        yield HttpPeer(port, process, "echo", {})


@contextmanager
def _serve(
    arguments: Sequence[str], ready: str, model: str, fields: Mapping[str, Any]
) -> Iterator[HttpPeer]:
    port = _free_port()
    with _run([sys.executable, *arguments, str(port)]) as process:
        _wait_ready(port, ready, process)
        yield HttpPeer(port, process, model, fields)


@contextmanager
def _run(command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_ready(port: int, path: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait for a status below 500."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).read()
            return
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise TimeoutError(f"{process.args} is not ready after {START_SECONDS} s")


def send_all(peer: HttpPeer, prompts: Sequence[str], max_tokens: int) -> list[StreamResult]:
    """Send a streaming request for each prompt at once and return the results."""
    bodies = [
        {"model": peer.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        | {"stream": True, **peer.fields}
        for prompt in prompts
    ]

    async def send() -> list[StreamResult]:
        return await asyncio.gather(*(_read_stream(peer.port, body) for body in bodies))

    results = asyncio.run(send())
    for result in results:
        if result.num_tokens() != max_tokens:
            raise ValueError(f"{result.num_tokens()} tokens instead of {max_tokens}")
    return results


async def _read_stream(port: int, body: dict[str, Any]) -> StreamResult:
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {API_KEY}\r\nContent-Length: {len(data)}\r\n"
        "Connection: close\r\n\r\n"
    )
    result, received = StreamResult(), bytearray()
    started = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + data)
    while chunk := await reader.read(1 << 16):
        received += chunk
        if not result.ttft and b"data: " in received:
            result.ttft = time.perf_counter() - started
    writer.close()
    # Events are never split between chunks of the transfer encoding, whose sizes are on own lines.
    result.data = bytes(received)
    return result

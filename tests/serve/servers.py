"""A tiny model on disk, and server processes that serve it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.tree import dump_yaml
from megalith.hf.release import release_run
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig(
    vocab_size=257,
    hidden_size=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_hidden_size=10,
    max_seq_len=256,
    init_std=0.5,
)
"""Its tokens are bytes."""

TOKENIZER = TokenizerConfig()


def make_run(
    folder: Path,
    config: ModelConfig = CONFIG,
    tokenizer: TokenizerConfig = TOKENIZER,
    *,
    seed: int = 1,
) -> Path:
    """Write a run with one checkpoint of random weights."""
    model = Decoder(build_context(config, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=seed)
    entries = [
        CheckpointEntry(spec.shard, "param", getattr(module, name))
        for spec, module, name in iter_parameter_specs(model)
    ]
    text = dump_yaml(release_run("run", config, tokenizer, folder))
    save_checkpoint(
        folder / "checkpoints", 7, entries, {}, single_rank_group("world"), config_text=text
    )
    return folder


@dataclass
class Server:
    """A server process."""

    process: "subprocess.Popen[str]"
    url: str
    lines: list[str] = field(default_factory=list)
    """Output so far."""

    client: httpx2.Client = field(default_factory=lambda: httpx2.Client(timeout=60))

    def get(self, path: str, **options: Any) -> httpx2.Response:
        """Send a GET request."""
        return self.client.get(self.url + path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx2.Response:
        """Send a POST request with a JSON body."""
        return self.client.post(self.url + path, json=body, **options)

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics: name with labels but model_name -> value."""
        samples = {}
        for line in self.get("/metrics").raise_for_status().text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = re.sub(r',?model_name="[^"]*"', "", name).replace("{}", "")
                samples[name.replace("{,", "{").removeprefix("megalith_")] = float(value)
        return samples

    def wait_idle(self) -> dict[str, float]:
        """Return the metrics when no sequence runs or waits."""
        for _ in range(600):
            samples = self.metrics()
            if samples["num_requests_running"] + samples["num_requests_waiting"] == 0:
                return samples
            time.sleep(0.02)
        raise AssertionError(f"sequences still run: {samples}")

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def start_server(run: Path, *options: str) -> Server:
    """Start `megalith serve` on a free port; returns when it accepts requests."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megalith", "serve", str(run), "--port", "0", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    server = Server(process, "")
    for line in process.stdout:
        server.lines.append(line)
        if match := re.search(r"listening on (\S+);", line):
            server.url = match.group(1)
        if line.startswith("ready"):
            break
    else:
        raise AssertionError(f"the server ended with {process.wait()}: {''.join(server.lines)}")
    threading.Thread(target=server.lines.extend, args=(process.stdout,), daemon=True).start()
    return server


@contextmanager
def running_server(run: Path, *options: str) -> Iterator[Server]:
    """A server for the time of a context."""
    server = start_server(run, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()

"""benchmarks/serve.py and engine.py compare systems that generate the same tokens."""

import json
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_server_benchmark_compares_equal_texts_and_prints_every_figure(run_benchmark: Run) -> None:
    arguments = "--model tiny --rounds 1 --new-tokens 4 --threads 1 --dtypes fp32 --json"
    done = run_benchmark("serve.py", *arguments.split(), "--figures", "offline,ttft,wake_up")
    assert done.returncode == 0, done.stderr
    assert "fp32: 64 of 64 texts are those of LLM" in done.stdout
    offline, ttft, wake_up = json.loads(done.stdout.splitlines()[-1])
    assert offline["details"]["server fp32, tokens/s"] > 0
    assert offline["holds"] == (offline["ratio"]["median"] >= 0.9)
    assert ttft["details"].keys() == {"server, ms", "LLM, ms", "echo, ms"}
    assert wake_up["holds"] == (wake_up["ratio"]["median"] <= 3)


@pytest.mark.slow
def test_engine_benchmark_compares_equal_tokens_and_prefix_hits(run_benchmark: Run) -> None:
    arguments = "--models tiny --requests 1 --new-tokens 4 --rounds 1 --threads 1 --dtypes fp32"
    done = run_benchmark("engine.py", *arguments.split())
    assert done.returncode == 0, done.stderr
    assert "tiny, 1 requests: the same tokens" in done.stdout
    assert "TTFT without / with a prefix hit: " in done.stdout

"""A server whose engine runs on two tensor-parallel ranks, or on two pipeline stages."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx2
import pytest

from megalith.cli.main import main
from tests.serve.servers import Server, running_server

PROMPT = {
    "model": "tiny",
    "prompt": "The quick brown fox",
    "max_tokens": 24,
    "seed": 5,
    "n": 2,
    "logprobs": 2,
}


def children(pid: int) -> list[int]:
    """Process ids of the children of a process, but multiprocessing's."""
    command = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(pid)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "resource_tracker" not in line]


@pytest.mark.parametrize("layout", [(), ("--parallel.pp", "2")])
def test_two_ranks_serve_the_completions_of_one_process(
    layout: tuple[str, ...], run: Path, new_run: Path, server: Server
) -> None:
    expected = server.post("/v1/completions", PROMPT).raise_for_status().json()["choices"]
    options = ("--nproc", "2", *layout, "--served-model-name", "tiny")
    with running_server(run, *options, "--enable-admin", "--api-key", "one") as ranks:
        ranks.client.headers["Authorization"] = "Bearer one"
        answers = [ranks.post("/v1/completions", PROMPT).raise_for_status() for _ in range(2)]
        for answer in answers:
            for choice, other in zip(answer.json()["choices"], expected, strict=True):
                assert choice["text"] == other["text"]
                logprobs = choice["logprobs"]["token_logprobs"]
                assert logprobs == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)
        late = ranks.post("/v1/completions", PROMPT | {"deadline_s": 1e-6})
        assert late.status_code == 408 and "deadline_s=1e-06" in late.json()["error"]["message"]
        with pytest.raises(httpx2.ReadTimeout):
            ranks.post("/v1/completions", PROMPT | {"max_tokens": 200}, timeout=0.05)
        assert ranks.wait_idle()["num_requests_running"] == 0
        check_suspended_stream(ranks)
        for path, version in ((new_run, 1), (run, 2)):
            updated = ranks.post("/update_weights", {"path": str(path), "mode": "recompute"})
            assert updated.json() == {"status": "ok", "weight_version": version}
            texts = [
                choice["text"] for choice in ranks.post("/v1/completions", PROMPT).json()["choices"]
            ]
            assert (texts == [choice["text"] for choice in expected]) == (path == run)
        assert ranks.stop() == 0, ranks.lines


def check_suspended_stream(ranks: Server) -> None:
    """All ranks are suspended and woken up while they have a request."""
    body = PROMPT | {"max_tokens": 200, "n": 1}
    expected = ranks.post("/v1/completions", body).json()["choices"][0]["text"]
    for kv_cache in ("offload", "recompute"):
        stream = body | {"stream": True, "cache_salt": kv_cache}
        with ranks.client.stream("POST", ranks.url + "/v1/completions", json=stream) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            suspension = {"kv_cache": kv_cache, "offload_weights": True}
            assert ranks.post("/suspend", suspension).json() == {"status": "ok"}
            assert ranks.metrics()["engine_suspended"] == 1
            assert ranks.post("/wake_up").json() == {"status": "ok"}
            assert ranks.post("/resume").json() == {"status": "ok"}
            received += lines
        chunks = [json.loads(line[6:]) for line in received if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_server_fails_requests_when_a_rank_is_killed(run: Path) -> None:
    with running_server(run, "--nproc", "2", "--served-model-name", "tiny") as server:
        statuses: list[int] = []

        def complete() -> None:
            body = PROMPT | {"max_tokens": 230, "n": 64}
            while not statuses or statuses[-1] == 200:
                statuses.append(server.post("/v1/completions", body).status_code)

        thread = threading.Thread(target=complete)
        thread.start()
        while not statuses:
            time.sleep(0.01)
        (launcher,) = children(server.process.pid)
        os.kill(children(launcher)[-1], signal.SIGKILL)
        thread.join(60)
        assert statuses[-1] == 503
        assert server.process.wait(20) == 1


def test_ranks_end_with_the_http_process(run: Path) -> None:
    with running_server(run, "--nproc", "2", "--served-model-name", "tiny") as server:
        (launcher,) = children(server.process.pid)
        ranks = children(launcher)
        assert len(ranks) == 2
        server.process.kill()
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in (launcher, *ranks)):
            assert time.monotonic() < deadline, "a process outlives the server"
            time.sleep(0.05)


def test_impossible_number_of_ranks_is_reported(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), "--port", "0", "--nproc", "5"]) == 2
    error = capfd.readouterr().err
    assert "--nproc=5: this number of processes cannot share" in error
    assert "Set --nproc to one of 1, 2, 4, 6" in error

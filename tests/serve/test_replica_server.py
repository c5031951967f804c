"""A server with two replicas: routing, failure and restart."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from megalith.cli.main import main
from megalith.serve.supervisor import replica_environment
from tests.serve.servers import Server, running_server
from tests.serve.test_ranks import children

KEY = {"Authorization": "Bearer secret"}
COMPLETION = {
    "model": "tiny",
    "prompt": "The quick brown fox",
    "max_tokens": 24,
    "seed": 5,
    "n": 2,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def replicas(run: Path) -> Iterator[Server]:
    """A server of the model under the name tiny, with two replicas."""
    options = ["--served-model-name", "tiny", "--api-key", "secret", "--enable-admin"]
    with running_server(run, "--nproc", "2", "--parallel.dp", "2", *options) as server:
        server.client.headers.update(KEY)
        wait_for_replicas(server, 2)
        yield server


def wait_for_replicas(server: Server, count: int) -> None:
    """Wait until so many replicas are ready, whichever they are."""
    ready: set[int] = set()
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        samples = server.metrics()
        ready = {
            index for index in range(4) if f'num_requests_running{{engine="{index}"}}' in samples
        }
        if len(ready) == count:
            return
        time.sleep(0.05)
    raise AssertionError(f"the replicas {ready} are ready, not {count}: {server.lines}")


class Stream:
    """A stream of a completion, read on a thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.text: dict[int, str] = {}
        self.logprobs: list[float] = []
        self.finish_reasons: set[str] = set()
        self.has_started, self.is_done = threading.Event(), False
        self._executor = ThreadPoolExecutor(1)
        self._reading = self._executor.submit(self._read, server.url, body)

    def _read(self, url: str, body: dict[str, Any]) -> None:
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=body | {"stream": True}, headers=KEY, timeout=60
        ) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    self.is_done = True
                elif line.startswith("data: "):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        index = choice["index"]
                        self.text[index] = self.text.get(index, "") + choice["text"]
                        self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                        self.finish_reasons |= {choice["finish_reason"]} - {None}
                    self.has_started.set()

    def finish(self) -> None:
        """Wait for the end."""
        self._reading.result(60)
        self._executor.shutdown()
        assert self.is_done, f"the stream ended without [DONE]: {self.text}"


def make_bodies(count: int) -> list[dict[str, Any]]:
    """Seeded requests with penalties, choices and stop strings."""
    options: list[dict[str, Any]] = [
        {"n": 2, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"logprobs": 1, "min_tokens": 50},
        {"stop": ["\\x00\\x01"], "temperature": 1.3},
    ]
    return [
        {"model": "tiny", "prompt": f"request {number}", "max_tokens": 230, "seed": number}
        | {"ignore_eos": True}
        | options[number % len(options)]
        for number in range(count)
    ]


def test_replicas_serve_the_completions_of_one_engine(replicas: Server, server: Server) -> None:
    expected = server.post("/v1/completions", COMPLETION).raise_for_status().json()["choices"]
    for _ in range(3):  # on both replicas
        answer = replicas.post("/v1/completions", COMPLETION).raise_for_status().json()
        for choice, other in zip(answer["choices"], expected, strict=True):
            assert choice["text"] == other["text"]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)


def test_request_hits_the_replica_that_has_its_prefix(replicas: Server) -> None:
    prompts = [letter * 100 for letter in "abcdef"]
    for round_number in range(3):
        for prompt in prompts if round_number != 1 else reversed(prompts):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            usage = replicas.post("/v1/completions", body).raise_for_status().json()["usage"]
            cached = 96 if round_number else 0
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    samples = replicas.metrics()
    hits = [samples[f'prefix_cache_hits_total{{engine="{index}"}}'] for index in (0, 1)]
    assert min(hits) >= 96 * 2, "one replica has all requests"
    assert replicas.post("/reset_prefix_cache").status_code == 200
    usage = replicas.post("/v1/completions", body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_streams_of_a_killed_replica_continue_with_the_same_text(replicas: Server) -> None:
    bodies = make_bodies(9)
    undisturbed = [Stream(replicas, body) for body in bodies]
    for stream in undisturbed:
        stream.finish()
    streams = [Stream(replicas, body) for body in bodies]
    for stream in streams:
        assert stream.has_started.wait(30)
    assert replicas.post("/pause").status_code == 200
    samples = replicas.metrics()
    running = [samples[f'num_requests_running{{engine="{index}"}}'] for index in (0, 1)]
    assert min(running) > 0, "a replica has no requests"
    suspension = {"kv_cache": "offload", "offload_weights": True}
    assert replicas.post("/suspend", suspension).status_code == 200
    os.kill(children(replicas.process.pid)[0], signal.SIGKILL)
    wait_for_replicas(replicas, 1)
    assert replicas.get("/health").status_code == 200
    assert "the server is suspended" in replicas.get("/ready").json()["error"]["message"]
    assert replicas.post("/resume").status_code == 409
    assert replicas.post("/wake_up").status_code == 200
    assert "the server is paused" in replicas.get("/ready").json()["error"]["message"]
    assert replicas.post("/resume").status_code == 200
    for stream, expected in zip(streams, undisturbed, strict=True):
        stream.finish()
        assert stream.text == expected.text
        assert stream.finish_reasons == expected.finish_reasons
        assert stream.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.slow
def test_replica_is_restarted_while_requests_run(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    body = make_bodies(1)[0]
    expected = replicas.post("/v1/completions", body).json()["choices"]
    before = children(replicas.process.pid)
    answers: list[bool] = []
    is_restarted = threading.Event()

    def complete() -> None:
        with httpx2.Client(headers=KEY, timeout=120) as client:
            while not is_restarted.wait(0.3):
                response = client.post(f"{replicas.url}/v1/completions", json=body)
                choices = response.raise_for_status().json()["choices"]
                texts = [choice["text"] for choice in choices]
                answers.append(texts == [choice["text"] for choice in expected])

    with ThreadPoolExecutor(1) as executor:
        completions = executor.submit(complete)
        try:
            response = replicas.post("/restart_replica", {"replica": 1}, timeout=120)
        finally:
            is_restarted.set()
        assert response.raise_for_status().json() == {"status": "ok"}
        completions.result(120)
    assert len(answers) > 1 and all(answers)
    after = children(replicas.process.pid)
    assert len(after) == 2 and len(set(before) & set(after)) == 1
    wait_for_replicas(replicas, 2)


def test_invalid_replica_is_reported(replicas: Server) -> None:
    for replica in (2, -1, True, "0", None):
        response = replicas.post("/restart_replica", {"replica": replica})
        assert response.status_code == 400
        assert "the replicas are 0 to 1. Use one" in response.json()["error"]["message"]


@pytest.mark.slow
def test_replica_that_is_restarted_has_the_updated_weights(
    replicas: Server, run: Path, new_run: Path
) -> None:
    wait_for_replicas(replicas, 2)
    body = make_bodies(1)[0]

    def complete() -> list[str]:
        choices = replicas.post("/v1/completions", body).raise_for_status().json()["choices"]
        return [choice["text"] for choice in choices]

    old = complete()
    update = {"path": str(new_run), "mode": "recompute"}
    version = replicas.post("/update_weights", update).raise_for_status().json()["weight_version"]
    absent = {"path": str(new_run / "absent")}
    assert replicas.post("/update_weights", absent).status_code == 400
    os.kill(children(replicas.process.pid)[0], signal.SIGKILL)
    wait_for_replicas(replicas, 1)
    wait_for_replicas(replicas, 2)
    new = [complete() for _ in range(4)]  # on both replicas
    assert new == [new[0]] * 4 and new[0] != old
    update = {"path": str(run), "mode": "recompute"}
    restored = replicas.post("/update_weights", update).raise_for_status().json()
    assert restored["weight_version"] == version + 1 and complete() == old


@pytest.mark.slow
def test_no_request_is_lost_under_load_and_the_replica_comes_back(replicas: Server) -> None:
    wait_for_replicas(replicas, 2)
    bodies = make_bodies(8)
    expected = [replicas.post("/v1/completions", body).json()["choices"] for body in bodies]
    answers: list[Any] = []

    def complete(number: int) -> None:
        with httpx2.Client(headers=KEY, timeout=120) as client:
            for _ in range(2):
                response = client.post(f"{replicas.url}/v1/completions", json=bodies[number])
                answers.append((number, response.status_code, response.json()))

    with ThreadPoolExecutor(8) as executor:
        completions = [executor.submit(complete, number) for number in range(8)]
        deadline = time.monotonic() + 120
        while len(answers) < 3:
            assert time.monotonic() < deadline, f"{len(answers)} requests are complete"
            time.sleep(0.005)
        os.kill(children(replicas.process.pid)[0], signal.SIGKILL)
        for each in completions:
            each.result(120)
    assert len(answers) == 16
    for number, status, answer in answers:
        assert status == 200, answer
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [choice["text"] for choice in expected[number]]
    wait_for_replicas(replicas, 2)
    assert replicas.stop() == 0, replicas.lines


def test_impossible_number_of_replicas_is_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # in a thread: torch is loaded
    monkeypatch.setattr(
        "megalith.cli.serve.ProcessPoolExecutor",
        lambda *, max_workers, mp_context: ThreadPoolExecutor(max_workers),
    )
    for words, text in (
        (
            ["--nproc", "6", "--parallel.dp", "2", "--parallel.pp", "2"],
            "parallel.pp=2 and parallel.dp=2 with --nproc=6: every stage and every data-parallel "
            "replica has equally many processes. Set --nproc to a multiple of 4, such as 4.",
        ),
        (
            ["--nproc", "2", "--parallel.dp", "2", "--parallel.tp", "2"],
            "tp x pp x dp is the number of processes. Set --nproc to 4.",
        ),
    ):
        assert main(["serve", str(run), "--port", "0", *words]) == 2
        assert text in capfd.readouterr().err
    assert main(["chat", str(run), "--parallel.dp", "2"]) == 2
    assert "parallel.dp=2: this command runs one replica" in capfd.readouterr().err


def test_replicas_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalith.serve.supervisor.available_cores", lambda: 8)
    environments = [replica_environment({"A": "b"}, index, 2, num_ranks=2) for index in range(2)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == ["0,1", "2,3"]
    assert all(each["OMP_NUM_THREADS"] == "2" and each["A"] == "b" for each in environments)
    given = {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "7,6,5,4"}
    second = replica_environment(given, 1, 2, num_ranks=2)
    assert second == {"OMP_NUM_THREADS": "5", "CUDA_VISIBLE_DEVICES": "5,4"}
    assert replica_environment(given, 0, 1, num_ranks=2) == given

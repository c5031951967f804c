"""Keys, a full queue, drain, and the ends of servers."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from megalith.infer.llm import LLM
from tests.serve.servers import Server, running_server

COMPLETIONS = "/v1/completions"
LONG = {"model": "run", "prompt": "x", "max_tokens": 250, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def limited(run: Path) -> Iterator[Server]:
    """A server with a key and a short queue."""
    options = ["--served-model-name", "run", "--api-key", "secret", "--max-queue", "2"]
    options += ["--engine.max-num-seqs", "2", "--max-body-bytes", "2000", "--no-chat-page"]
    options += ["--pooling", "mean"]
    with running_server(run, *options) as server:
        server.client.headers["Authorization"] = "Bearer secret"
        yield server


def post_in_thread(server: Server, body: dict[str, Any]) -> "tuple[threading.Thread, list[Any]]":
    """Send a request; its response will be in the list."""
    responses: list[Any] = []
    headers = {"Authorization": "Bearer secret"}

    def send() -> None:
        url = server.url + COMPLETIONS
        with suppress(httpx2.RemoteProtocolError):  # the server exited
            responses.append(httpx2.post(url, json=body, headers=headers, timeout=60))

    thread = threading.Thread(target=send)
    thread.start()
    return thread, responses


def wait_for_load(server: Server, num_sequences: int) -> None:
    """Wait until the engine has at least this number of sequences."""
    for _ in range(500):
        samples = server.metrics()
        if samples["num_requests_running"] + samples["num_requests_waiting"] >= num_sequences:
            return
        time.sleep(0.01)
    raise AssertionError("the load is not reached")


def test_key_is_required_except_for_health(limited: Server) -> None:
    for key in ("", "wrong"):
        with openai.OpenAI(base_url=f"{limited.url}/v1", api_key=key or "none") as client:
            with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
                client.models.list()
    for path, status in (("/metrics", 401), ("/version", 401), ("/health", 200), ("/ready", 200)):
        assert httpx2.get(limited.url + path).status_code == status
    with openai.OpenAI(base_url=f"{limited.url}/v1", api_key="secret") as client:
        assert [model.id for model in client.models.list()] == ["run"]


def test_chat_page_can_be_off(limited: Server) -> None:
    response = limited.get("/")
    assert response.status_code == 404
    assert response.json()["error"]["message"].startswith("'/': there is no such endpoint.")


def test_option_selects_mean_pooling(limited: Server, llm: LLM) -> None:
    for _ in range(2):  # the second time the prefix is cached
        response = limited.post("/v1/embeddings", {"model": "run", "input": "abc" * 20})
        (item,) = response.json()["data"]
        (expected,) = llm.embed("abc" * 20, pooling="mean")
        assert item["embedding"] == pytest.approx(expected, abs=1e-5)


def test_body_limit_of_the_option_applies(limited: Server) -> None:
    response = limited.post(COMPLETIONS, LONG | {"prompt": "x" * 2000})
    assert response.status_code == 413 and "2000 bytes" in response.json()["error"]["message"]

    def chunks() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(30):
            yield b" " * 100

    response = limited.client.post(
        limited.url + COMPLETIONS, content=chunks(), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


def test_full_queue_is_429_with_retry_after(limited: Server) -> None:
    url = f"{limited.url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        client.models.list()  # connects, which would take a part of the time of the requests
        running = [post_in_thread(limited, LONG | {"n": 2}) for _ in range(2)]
        wait_for_load(limited, 3)  # a waiting request has one sequence until its prompt is read
        response = limited.post(COMPLETIONS, LONG)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="run", prompt="x")
    assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert "the queue is full" in response.json()["error"]["message"]
    for thread, responses in running:
        thread.join()
        assert [len(choice["text"]) > 0 for choice in responses[0].json()["choices"]] == [True] * 2
    assert limited.metrics()['requests_rejected_total{reason="queue_full"}'] == 2


def test_signal_finishes_requests_and_rejects_new_ones(limited: Server) -> None:
    expected = limited.post(COMPLETIONS, LONG).json()["choices"][0]["text"]
    thread, responses = post_in_thread(limited, LONG)
    wait_for_load(limited, 1)
    url, body = limited.url + COMPLETIONS, LONG | {"stream": True}
    with limited.client.stream("POST", url, json=body) as response:
        lines = response.iter_lines()
        parts = [next(lines)]
        limited.process.terminate()
        time.sleep(0.05)
        with httpx2.Client(headers={"Authorization": "Bearer secret"}) as client:
            ready = client.get(limited.url + "/ready")
            rejected = client.post(url, json=LONG)
        parts += list(lines)
    assert ready.status_code == rejected.status_code == 503
    assert "shutting down" in rejected.json()["error"]["message"]
    assert "data: [DONE]" in parts[-2:]
    thread.join()
    assert responses[0].json()["choices"][0]["text"] == expected
    assert limited.process.wait(30) == 0


@pytest.mark.slow
def test_requests_that_do_not_finish_in_time_are_aborted(run: Path) -> None:
    with running_server(run, "--drain-timeout-s", "0") as server:
        name = server.get("/v1/models").json()["data"][0]["id"]
        assert name == "run"
        thread, responses = post_in_thread(server, LONG | {"n": 64})
        wait_for_load(server, 64)
        assert server.stop() == 0
        thread.join()
        assert responses[0].status_code == 503
        assert "shut down before" in responses[0].json()["error"]["message"]


@pytest.mark.slow
def test_second_signal_exits_at_once(run: Path) -> None:
    with running_server(run) as server:
        thread, responses = post_in_thread(server, LONG | {"n": 64})
        wait_for_load(server, 64)
        server.process.terminate()
        time.sleep(0.2)
        server.process.terminate()
        assert server.process.wait(10) == 128 + 15
        thread.join(10)
        assert not responses


@pytest.mark.slow
def test_death_of_the_engine_ends_requests_and_the_server(run: Path) -> None:
    import psutil

    with running_server(run) as server:
        thread, responses = post_in_thread(server, LONG | {"n": 64})
        wait_for_load(server, 64)
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        thread.join(10)
        assert responses[0].status_code == 503
        assert "engine process has ended" in responses[0].json()["error"]["message"]
        assert server.process.wait(20) == 1


@pytest.mark.slow
def test_death_of_the_http_process_ends_the_engine(run: Path) -> None:
    import psutil

    with running_server(run) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        server.process.kill()
        engine.wait(10)


@pytest.mark.slow
def test_model_that_cannot_be_served_is_reported(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with 2: (.|\n)*megalith serve: .*nothing"):
        with running_server(tmp_path / "nothing"):
            pass

"""Control endpoints, the limit of requests per key, and web pages of other origins."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from megalith.config.generation import SamplingParams
from megalith.infer.llm import LLM
from megalith.serve.access import KeyLimiter
from megalith.serve.errors import ApiError
from tests.serve.servers import Server, running_server

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
PAGE = "https://page.example"
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def controlled(run: Path) -> Iterator[Server]:
    """A server with control endpoints, two keys, and one request per key at a time."""
    options = ["--served-model-name", "tiny", "--template", "chatml", "--enable-admin"]
    options += ["--api-key", "one", "two", "--max-requests-per-key", "1", "--cors-origins", PAGE]
    with running_server(run, *options) as server:
        server.client.headers["Authorization"] = "Bearer one"
        yield server


@pytest.fixture
def paused(controlled: Server) -> Iterator[Server]:
    """The server, paused until the end of the test."""
    controlled.wait_idle()
    assert controlled.post("/pause").json() == {"status": "ok"}
    yield controlled
    controlled.post("/abort", {"all": True}).raise_for_status()
    controlled.post("/resume").raise_for_status()
    controlled.wait_idle()


def send(
    server: Server, path: str, **body: Any
) -> "tuple[threading.Thread, list[httpx2.Response]]":
    """Send a request with the X-Request-Id r1 and wait until the engine has it; its response will
    be in the list."""
    responses: list[httpx2.Response] = []
    headers = {"Authorization": "Bearer one", "X-Request-Id": "r1"}

    def post() -> None:
        url, document = server.url + path, {"model": "tiny"} | body
        responses.append(httpx2.post(url, json=document, headers=headers, timeout=60))

    thread = threading.Thread(target=post)
    thread.start()
    for _ in range(1000):
        if server.metrics()["num_requests_waiting"] >= 1:
            return thread, responses
        time.sleep(0.02)
    raise AssertionError("the engine has no waiting request")


def test_requests_wait_while_the_server_is_paused(paused: Server) -> None:
    thread, responses = send(paused, COMPLETIONS, prompt="x", max_tokens=5, ignore_eos=True)
    ready = paused.get("/ready")
    assert ready.status_code == 503
    assert "paused: requests wait until POST /resume" in ready.json()["error"]["message"]
    assert paused.get("/health").status_code == 200
    samples = paused.metrics()
    assert samples["engine_paused"] == 1 and samples["num_requests_running"] == 0
    assert not responses
    paused.post("/resume").raise_for_status()
    thread.join(60)
    assert responses[0].json()["usage"]["completion_tokens"] == 5
    assert paused.get("/ready").status_code == 200 and paused.metrics()["engine_paused"] == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_aborted_request_ends_with_finish_reason_abort(
    paused: Server, path: str, stream: bool
) -> None:
    thread, responses = send(paused, path, prompt="x", messages=HELLO, n=2, stream=stream)
    assert paused.post("/abort", {"request_id": "r1"}).json()["num_aborted"] == 1
    thread.join(60)
    (response,) = responses
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"abort"') == 2
    assert stream == response.text.endswith("data: [DONE]\n\n")
    assert paused.metrics()["num_requests_waiting"] == 0


def test_aborted_embedding_is_an_error(paused: Server) -> None:
    thread, responses = send(paused, EMBEDDINGS, input=["x", "y"])
    assert paused.post("/abort", {"all": True}).json()["num_aborted"] == 2
    thread.join(60)
    assert responses[0].status_code == 503
    assert "input[0] was aborted" in responses[0].json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_response_is_failed(paused: Server, stream: bool) -> None:
    thread, responses = send(paused, "/v1/responses", input="x", stream=stream)
    assert paused.post("/abort", {"request_id": "r1"}).json()["num_aborted"] == 1
    thread.join(60)
    assert ("event: response.failed\n" in responses[0].text) == stream
    assert '"status":"failed"' in responses[0].text
    error = '"error":{"code":"server_error","message":"the request was aborted."}'
    assert error in responses[0].text


def test_client_of_a_running_stream_gets_finish_reason_abort(controlled: Server) -> None:
    with openai.OpenAI(base_url=f"{controlled.url}/v1", api_key="one", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=200,
            n=32,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "r2"},
        )
        first = next(stream)
        assert controlled.post("/abort", {"request_id": "r2"}).json()["num_aborted"] == 1
        reasons = [chunk.choices[0].finish_reason for chunk in (first, *stream)]
    assert [reason for reason in reasons if reason] == ["abort"] * 32
    assert controlled.wait_idle()["kv_cache_usage_perc"] == 0


# --- suspension


@pytest.fixture
def suspended(controlled: Server) -> Iterator[Server]:
    """The server, suspended from the running state until the end of the test."""
    controlled.wait_idle()
    assert controlled.post("/suspend", {}).json() == {"status": "ok"}
    yield controlled
    controlled.post("/abort", {"all": True}).raise_for_status()
    controlled.post("/wake_up").raise_for_status()
    controlled.post("/resume").raise_for_status()
    controlled.wait_idle()


def test_requests_wait_while_the_server_is_suspended(suspended: Server) -> None:
    thread, responses = send(suspended, COMPLETIONS, prompt="x", max_tokens=5, ignore_eos=True)
    ready = suspended.get("/ready")
    assert ready.status_code == 503
    text = "the server is suspended: requests wait until POST /wake_up, and then POST /resume."
    assert text in ready.json()["error"]["message"]
    assert suspended.get("/health").status_code == 200
    samples = suspended.metrics()
    assert samples["engine_suspended"] == samples["engine_paused"] == 1
    for path, body, text in (
        (
            "/resume",
            {},
            "resume: the engine is suspended (kv_cache=offload, offload_weights=false)",
        ),
        ("/suspend", {"kv_cache": "recompute"}, "the engine is suspended with kv_cache=offload"),
    ):
        rejected = suspended.post(path, body)
        assert rejected.status_code == 409 and text in rejected.json()["error"]["message"]
        assert "Call wake_up first" in rejected.json()["error"]["message"]
    for path in ("/suspend", "/pause", "/wake_up", "/wake_up"):  # repeated, or without effect
        assert suspended.post(path, {}).json() == {"status": "ok"}
    samples = suspended.metrics()
    assert (samples["engine_suspended"], samples["engine_paused"]) == (0, 1)
    assert "the server is paused" in suspended.get("/ready").json()["error"]["message"]
    assert not responses
    suspended.post("/resume").raise_for_status()
    thread.join(60)
    assert responses[0].json()["usage"]["completion_tokens"] == 5
    assert suspended.get("/ready").status_code == 200


def test_weights_are_updated_while_the_server_is_suspended(controlled: Server, run: Path) -> None:
    expected = complete(controlled)
    controlled.post("/pause").raise_for_status()
    body = {"kv_cache": "recompute", "offload_weights": True}
    controlled.post("/suspend", body).raise_for_status()
    updated = controlled.post("/update_weights", {"path": str(run), "mode": "recompute"})
    assert updated.raise_for_status().json()["status"] == "ok"
    controlled.post("/wake_up").raise_for_status()
    controlled.post("/resume").raise_for_status()
    assert complete(controlled) == expected


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"kv_cache": "ofload"}, "kv_cache='ofload': there is no such mode. Did you mean offload"),
        ({"kv_cache": 1}, "kv_cache=1 must be a text, such as 'offload'"),
        ({"offload_weights": 1}, "offload_weights=1 must be true or false"),
    ],
)
def test_invalid_suspensions_are_rejected(
    controlled: Server, body: dict[str, Any], text: str
) -> None:
    response = controlled.post("/suspend", body)
    assert response.status_code == 400 and text in response.json()["error"]["message"]
    assert controlled.get("/ready").status_code == 200


# --- weight updates


def complete(server: Server) -> str:
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 12, "temperature": 0}
    response = server.post(COMPLETIONS, body).raise_for_status()
    return str(response.json()["choices"][0]["text"])


def test_weights_are_updated_while_requests_wait(
    controlled: Server, run: Path, new_run: Path
) -> None:
    expected = [complete(controlled)]
    model = controlled.get("/v1/models").json()["data"][0]
    version = model["weight_version"]
    reply = controlled.post("/update_weights", {"path": str(new_run)})
    assert reply.json() == {"status": "ok", "weight_version": version + 1}
    model = controlled.get("/v1/models").json()["data"][0]
    assert (model["weight_version"], model["root"]) == (version + 1, str(new_run))
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    (output,) = LLM(new_run).generate("abc", greedy)
    expected.append(output.outputs[0].text)
    assert complete(controlled) == expected[1] != expected[0]
    body = {"path": str(run), "mode": "keep"}
    assert controlled.post("/update_weights", body).json()["weight_version"] == version + 2
    assert complete(controlled) == expected[0]


def test_streams_in_flight_are_finished_before_a_drained_update(
    controlled: Server, run: Path
) -> None:
    version = controlled.get("/v1/models").json()["data"][0]["weight_version"]
    with openai.OpenAI(base_url=f"{controlled.url}/v1", api_key="one", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        updated = controlled.post("/update_weights", {"path": str(run)})
        assert updated.json()["weight_version"] == version + 1
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"


def test_paused_server_updates_weights_without_draining(paused: Server, run: Path) -> None:
    version = paused.get("/v1/models").json()["data"][0]["weight_version"]
    thread, responses = send(paused, COMPLETIONS, prompt="x", max_tokens=5, ignore_eos=True)
    # the request has not started, so there is nothing to finish
    updated = paused.post("/update_weights", {"path": str(run)})
    assert updated.json()["weight_version"] == version + 1
    assert not responses
    paused.post("/resume").raise_for_status()
    thread.join(60)
    assert responses[0].json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({}, "path=None must be a text, such as 'runs/rl'"),
        ({"path": "runs/none"}, "runs/none: no such folder"),
        ({"path": "runs/rl", "mode": 1}, "mode=1 must be a text, such as 'drain'"),
        ({"path": "runs/rl", "mode": "kep"}, "mode='kep': there is no such mode of weight updates"),
    ],
)
def test_invalid_weight_updates_are_rejected(
    controlled: Server, body: dict[str, Any], text: str
) -> None:
    controlled.wait_idle()
    response = controlled.post("/update_weights", body)
    assert response.status_code == 400 and text in response.json()["error"]["message"]


# --- abort


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "request_id=None with all=False: send the X-Request-Id"),
        ({"request_id": "r1", "all": True}, 400, "request_id='r1' with all=True"),
        ({"request_id": 3}, 400, "request_id=3 with all=False"),
        ({"all": 1}, 400, "all=1 must be true or false"),
        ({"request_id": "r9"}, 404, "request_id='r9': no request in flight has this X-Request-Id"),
    ],
)
def test_invalid_aborts_are_rejected(
    controlled: Server, body: dict[str, Any], status: int, text: str
) -> None:
    response = controlled.post("/abort", body)
    assert response.status_code == status and text in response.json()["error"]["message"]


# --- concurrent requests of a key


def test_key_has_a_limited_number_of_requests(paused: Server) -> None:
    thread, responses = send(paused, CHAT, messages=HELLO, max_tokens=3, stream=True)
    body = {"model": "tiny", "input": "x"}
    rejected = paused.post(EMBEDDINGS, body, headers={"X-Request-Id": "r3"})
    error = rejected.json()["error"]
    assert (rejected.status_code, error["code"]) == (429, "key_limit")
    assert "1 requests in flight, its limit (--max-requests-per-key)" in error["message"]
    assert rejected.headers["retry-after"] == "1" and rejected.headers["x-request-id"] == "r3"
    assert paused.metrics()['requests_rejected_total{reason="key_limit"}'] >= 1
    assert paused.post("/tokenize", {"prompt": "x"}).status_code == 200  # does not run the model
    paused.post("/resume").raise_for_status()
    thread.join(60)
    assert responses[0].status_code == 200
    assert paused.post(EMBEDDINGS, body).status_code == 200


def test_client_that_has_its_response_may_send_the_next_request() -> None:
    none: Any = None
    scope = {"type": "http", "path": "/a", "headers": [(b"authorization", b"Bearer k")]}
    sent: list[str] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        for more in (True, False):
            await send({"type": "http.response.body", "body": b"", "more_body": more})

    def reject(error: ApiError, headers: Any) -> Any:
        async def send_status(scope: Any, receive: Any, send: Any) -> None:
            sent.append(str(error.status))

        return send_status

    limiter = KeyLimiter(
        answer, keys=("k",), max_requests=1, paths=frozenset(["/a"]), reject=reject
    )

    async def send(message: Any) -> None:
        sent.append("part" if message["more_body"] else "end")
        if sent.count("end") < 2:  # the client sends a request when it has got this message
            await limiter(scope, none, send)

    asyncio.run(limiter(scope, none, send))
    assert sent == ["part", "429", "end"] * 2


def test_other_key_has_its_own_limit(paused: Server) -> None:
    thread, _ = send(paused, COMPLETIONS, prompt="x", max_tokens=3)
    wrong = paused.post(COMPLETIONS, {}, headers={"Authorization": "Bearer three"})
    assert wrong.status_code == 401
    other = paused.post(COMPLETIONS, {"model": "no"}, headers={"Authorization": "Bearer two"})
    assert other.status_code == 404  # of the endpoint
    paused.post("/resume").raise_for_status()
    thread.join(60)


# --- CORS


def test_page_of_an_allowed_origin_may_send_requests(controlled: Server) -> None:
    preflight = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    url = controlled.url + CHAT
    response = httpx2.options(url, headers=preflight)  # browsers send no key
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in response.headers
    answer = controlled.post(
        CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 2}, headers={"Origin": PAGE}
    )
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    rejected = httpx2.post(url, json={}, headers={"Origin": PAGE})  # a page can read the error
    assert rejected.status_code == 401
    assert rejected.headers["access-control-allow-origin"] == PAGE


def test_requests_of_pages_of_other_sites_are_rejected(controlled: Server, server: Server) -> None:
    headers = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
    for target, path in (
        (server, COMPLETIONS),
        (server, "/tokenize"),
        (controlled, COMPLETIONS),
        (controlled, "/resume"),
    ):
        response = target.post(path, body, headers=headers)
        assert response.status_code == 403, path
        message = response.json()["error"]["message"]
        assert "Origin='https://other.example': web pages of other sites may not use" in message
    assert server.post(COMPLETIONS, body, headers={"Sec-Fetch-Site": "cross-site"}).is_error
    allowed = controlled.post(COMPLETIONS, body, headers={**headers, "Origin": PAGE})
    assert allowed.status_code == 200
    own = {"Origin": server.url, "Sec-Fetch-Site": "same-origin"}
    assert server.post(COMPLETIONS, body, headers=own).status_code == 200


def test_control_endpoints_are_off_by_default(server: Server) -> None:
    response = server.post("/pause")
    assert response.status_code == 404
    assert "/pause needs the server option --enable-admin" in response.json()["error"]["message"]


def test_other_origins_are_not_allowed(controlled: Server, server: Server) -> None:
    preflight = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    response = httpx2.options(controlled.url + CHAT, headers=preflight)
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers
    # without the option, the server answers as if there were no CORS
    response = httpx2.options(server.url + CHAT, headers={**preflight, "Origin": PAGE})
    assert response.status_code == 405
    response = server.get("/v1/models", headers={"Origin": PAGE})
    assert not [name for name in response.headers if name.startswith("access-control")]

"""Servers whose data-parallel ranks share the experts of a model (DP attention)."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.config.moe import CapacityConfig, MoEConfig
from tests.serve.servers import CONFIG, Server, make_run, running_server
from tests.serve.test_ranks import children
from tests.serve.test_replica_server import KEY, Stream, make_bodies, wait_for_replicas

EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig())
OPTIONS = ("--served-model-name", "tiny", "--api-key", "secret", "--enable-admin")


@pytest.fixture(scope="module")
def moe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model with experts."""
    return make_run(tmp_path_factory.mktemp("experts") / "run", replace(CONFIG, moe=EXPERTS))


@pytest.fixture(scope="module")
def new_moe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this model with other weights."""
    return make_run(
        tmp_path_factory.mktemp("experts") / "new", replace(CONFIG, moe=EXPERTS), seed=9
    )


@pytest.fixture(scope="module")
def sharing(moe_run: Path) -> Iterator[Server]:
    """A server with two data-parallel ranks that share experts."""
    layout = ("--nproc", "2", "--parallel.dp", "2", "--parallel.dp_replicate", "1")
    with running_server(moe_run, *layout, *OPTIONS) as server:
        server.client.headers.update(KEY)
        yield server


@pytest.fixture(scope="module")
def expected(moe_run: Path) -> list[list[dict[str, Any]]]:
    """Choices of `make_bodies` on one process."""
    with running_server(moe_run, *OPTIONS) as server:
        server.client.headers.update(KEY)
        return [complete(server, body) for body in make_bodies(6)]


def complete(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a request."""
    choices: list[dict[str, Any]]
    choices = server.post("/v1/completions", body).raise_for_status().json()["choices"]
    return choices


def texts(choices: list[dict[str, Any]]) -> dict[int, str]:
    """Return the text of each choice."""
    return {choice["index"]: choice["text"] for choice in choices}


def test_ranks_that_share_experts_have_the_texts_of_one_process(
    sharing: Server, expected: list[list[dict[str, Any]]]
) -> None:
    bodies = make_bodies(6)
    assert texts(complete(sharing, bodies[0])) == texts(expected[0])  # the other rank is idle
    streams = [Stream(sharing, body) for body in bodies[:3]]
    with ThreadPoolExecutor(3) as executor:
        answers = list(executor.map(lambda body: complete(sharing, body), bodies[3:]))
    for stream, choices in zip(streams, expected[:3], strict=True):
        stream.finish()
        assert stream.text == texts(choices)
    assert [texts(answer) for answer in answers] == [texts(each) for each in expected[3:]]
    samples = sharing.metrics()
    for rank in (0, 1):
        assert samples[f'generation_tokens_total{{engine="{rank}"}}'] > 0
        assert samples[f'num_requests_running{{engine="{rank}"}}'] == 0


def test_requests_of_both_ranks_end_at_their_deadline(sharing: Server) -> None:
    for _ in range(2):  # one on each rank
        late = sharing.post("/v1/completions", make_bodies(1)[0] | {"deadline_s": 0.02})
        assert late.status_code == 408 and "deadline_s=0.02" in late.json()["error"]["message"]
    for _ in range(2):
        assert len(complete(sharing, make_bodies(1)[0] | {"max_tokens": 1})) == 2


def test_both_ranks_are_paused_and_suspended(
    sharing: Server, expected: list[list[dict[str, Any]]]
) -> None:
    streams = [Stream(sharing, body) for body in make_bodies(3)]
    for stream in streams:
        assert stream.has_started.wait(30)
    for path, body in (
        ("/pause", None),
        ("/suspend", {"kv_cache": "recompute", "offload_weights": True}),
    ):
        assert sharing.post(path, body).raise_for_status().json() == {"status": "ok"}
    samples = sharing.metrics()
    assert [samples[f'engine_suspended{{engine="{rank}"}}'] for rank in (0, 1)] == [1, 1]
    running = [samples[f'num_requests_waiting{{engine="{rank}"}}'] for rank in (0, 1)]
    assert min(running) > 0, "a rank has no requests"
    for path in ("/wake_up", "/resume"):
        assert sharing.post(path).raise_for_status().json() == {"status": "ok"}
    for stream, choices in zip(streams, expected, strict=False):
        stream.finish()
        assert stream.text == texts(choices)


@pytest.mark.parametrize("mode", ["drain", pytest.param("recompute", marks=pytest.mark.slow)])
def test_weights_of_both_ranks_are_updated(
    mode: str,
    sharing: Server,
    moe_run: Path,
    new_moe_run: Path,
    expected: list[list[dict[str, Any]]],
) -> None:
    bodies = make_bodies(6)
    streams = [Stream(sharing, body) for body in bodies[:3]]
    for stream in streams:
        assert stream.has_started.wait(30)
    update = {"path": str(new_moe_run), "mode": mode}
    sharing.post("/update_weights", update).raise_for_status()
    changed = [texts(complete(sharing, body)) for body in bodies[3:]]
    assert all(text != texts(other) for text, other in zip(changed, expected[3:], strict=True))
    for stream, choices in zip(streams, expected, strict=False):
        stream.finish()
        assert (stream.text == texts(choices)) == (mode == "drain")
    absent = sharing.post("/update_weights", {"path": "runs/absent", "mode": mode})
    assert absent.status_code == 400
    sharing.post("/update_weights", {"path": str(moe_run), "mode": mode}).raise_for_status()
    again = [texts(complete(sharing, body)) for body in bodies[3:]]
    assert again == [texts(choices) for choices in expected[3:]]


def test_commands_that_need_several_engines_are_rejected(sharing: Server) -> None:
    for path, body, text in (
        ("/restart_replica", {"replica": 1}, "this server has one engine. Start it"),
        (
            "/v1/load_lora_adapter",
            {"lora_name": "a", "lora_path": "b"},
            "max_adapters=0: the engine holds no adapters",
        ),
    ):
        response = sharing.post(path, body)
        assert response.status_code == 400 and text in response.json()["error"]["message"]


def test_server_whose_ranks_share_experts_stops_after_its_requests(
    sharing: Server, expected: list[list[dict[str, Any]]]
) -> None:
    streams = [Stream(sharing, body) for body in make_bodies(2)]
    for stream in streams:
        assert stream.has_started.wait(30)
    assert sharing.stop() == 0, sharing.lines
    for stream, choices in zip(streams, expected, strict=False):
        stream.finish()
        assert stream.text == texts(choices)


@pytest.mark.slow
def test_streams_continue_on_another_group_when_a_rank_is_killed(
    moe_run: Path, expected: list[list[dict[str, Any]]]
) -> None:
    layout = ("--nproc", "4", "--parallel.dp", "4", "--parallel.dp_replicate", "2")
    with running_server(moe_run, *layout, *OPTIONS) as server:
        server.client.headers.update(KEY)
        wait_for_replicas(server, 4)
        streams = [Stream(server, body) for body in make_bodies(6)]
        for stream in streams:
            assert stream.has_started.wait(60)
        assert server.post("/pause").status_code == 200
        samples = server.metrics()
        running = [samples[f'num_requests_running{{engine="{index}"}}'] for index in range(4)]
        assert min(running) > 0, "a rank has no requests"
        ranks = [rank for child in children(server.process.pid) for rank in children(child)]
        assert len(ranks) == 4
        os.kill(ranks[1], signal.SIGKILL)
        wait_for_replicas(server, 2)
        assert server.post("/resume").status_code == 200
        for stream, choices in zip(streams, expected, strict=True):
            stream.finish()
            assert stream.text == texts(choices)
        wait_for_replicas(server, 4)
        response = server.post("/restart_replica", {"replica": 3}, timeout=180)
        assert response.raise_for_status().json() == {"status": "ok"}
        wait_for_replicas(server, 4)
        assert texts(complete(server, make_bodies(1)[0])) == texts(expected[0])

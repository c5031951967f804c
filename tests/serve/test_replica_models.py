"""Adapters and weight updates of replicas with fake engines."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megalith.serve.errors import ApiError
from megalith.serve.protocol import AbortRequest, EngineCall, Reply, RequestRejected
from megalith.serve.supervisor import EngineSupervisor
from tests.serve.test_replicas import (
    Cluster,
    FakeEngine,
    FakeProcess,
    prompt_request,
    read,
    run_cluster,
    start_fake_processes,
    wait_until,
)


def test_adapter_of_a_continued_request_is_sent_with_the_hash_of_its_weights() -> None:
    async def test(cluster: Cluster) -> None:
        client, request = cluster.client, replace(prompt_request(), adapter="de")
        async with client.generate([request], uid="a") as generation:
            first = await cluster.engines[0].receive_request()
            assert (first.adapter, first.adapter_fingerprint) == ("de", None)
            client.handle_replica_failure(0)
            # no weights were used: those of any replica will do
            again = await cluster.engines[1].receive_request()
            assert again.adapter_fingerprint is None
            await cluster.engines[1].send_tokens(again.request_id, (0, 10, "a", "stop"))
            await read(generation)
        engine = await cluster.start(0)
        async with client.generate([request, request], uid="b") as generation:
            messages = [await each.receive_request() for each in cluster.engines.values()]
            number = messages[0].request_id
            await engine.send_tokens(number, (0, 10, "a", None))
            await wait_until(lambda: bool(client._requests[number].choices[0].token_ids))
            client._fingerprints["de"] = b"second"  # later requests use other weights
            client.handle_replica_failure(0)
            again = await cluster.engines[1].receive_request()
            assert (again.request_id, again.adapter_fingerprint) == (number, b"first")
            text = "adapter=de: the first tokens"
            await cluster.engines[1].send(RequestRejected(number, 409, text))
            with pytest.raises(ApiError, match=text) as raised:
                await read(generation)
            assert raised.value.status == 409

    run_cluster(test)


def test_hash_is_that_of_the_weights_that_generated_the_first_tokens() -> None:
    async def test(cluster: Cluster) -> None:
        client, request = cluster.client, replace(prompt_request(), adapter="de")
        for replica in (0, 1):
            client.router.drain(replica)
        async with client.generate([request], uid="a"):  # it waits
            arguments = {"lora_name": "de", "lora_path": "new"}
            call = asyncio.create_task(client.call("load_adapter", arguments))
            for engine in cluster.engines.values():
                await engine.answer({"fingerprint": b"second"})
            await call
            for replica in (0, 1):
                client.router.drain(replica, is_draining=False)
            client.dispatch_waiting()
            number = (await cluster.engines[0].receive_request()).request_id
            await cluster.engines[0].send_tokens(number, (0, 10, "a", None))
            await wait_until(lambda: client._requests[number].has_tokens)
            client.handle_replica_failure(0)
            again = await cluster.engines[1].receive_request()
            assert again.adapter_fingerprint == b"second"

    run_cluster(test)


LOAD = {"lora_name": "sql", "lora_path": "new"}
LOADED = {"fingerprint": b"f" * 32}


@pytest.mark.parametrize(
    "name, previous, undone",
    [
        ("sql", None, ("unload_adapter", {"lora_name": "sql"})),
        ("sql", "old", ("load_adapter", {"lora_name": "sql", "lora_path": "old"})),
        ("de", None, ("load_adapter", {"lora_name": "de", "lora_path": "german"})),
    ],
)
def test_adapter_that_one_replica_cannot_load_is_undone_on_the_others(
    name: str, previous: str | None, undone: tuple[str, dict[str, Any]]
) -> None:
    async def test(cluster: Cluster) -> None:
        async def load(path: str, *answers: dict[str, Any]) -> None:
            arguments = {"lora_name": name, "lora_path": path}
            calls = asyncio.create_task(cluster.client.call("load_adapter", arguments))
            for replica, answer in enumerate(answers):
                await cluster.engines[replica].answer(answer)
            await calls

        if previous is not None:
            await load(previous, LOADED, LOADED)
        with pytest.raises(ApiError, match="all are in use") as raised:
            await load("new", LOADED, {"error": "all are in use", "status": 429})
        assert raised.value.status == 429
        message = await cluster.engines[0].answer({})
        assert (message.command, message.arguments) == undone
        stats = asyncio.create_task(cluster.client.call_replicas("stats"))
        for engine in cluster.engines.values():  # the replica that failed has nothing to undo
            assert (await engine.answer({})).command == "stats"
        await stats

    run_cluster(test)


def test_adapter_is_undone_on_a_replica_that_does_not_answer_in_time() -> None:
    async def test(cluster: Cluster) -> None:
        with pytest.raises(ApiError, match="does not answer within 0.01 s") as raised:
            await cluster.client.call("unload_adapter", {"lora_name": "de"}, timeout_s=0.01)
        assert raised.value.status == 503
        for engine in cluster.engines.values():
            assert (await engine.answer({})).command == "unload_adapter"
            assert (await engine.answer(LOADED)).arguments["lora_path"] == "german"

    run_cluster(test)


def test_command_reaches_a_replica_that_gets_ready_while_it_is_executed() -> None:
    async def test(cluster: Cluster) -> None:
        client, first = cluster.client, cluster.engines[0]
        for command, arguments in (
            ("load_adapter", LOAD),
            ("unload_adapter", {"lora_name": "sql"}),
        ):
            if command == "load_adapter":
                client.handle_replica_failure(1)
            call = asyncio.create_task(client.call(command, arguments))
            message = await first.receive()
            assert isinstance(message, EngineCall) and message.command == command
            if command == "unload_adapter":  # it fails after it got the command
                client.handle_replica_failure(1)
            second = await cluster.start(1)
            if command == "unload_adapter":
                assert (await second.answer(LOADED)).command == "load_adapter"  # as it was
            await first.send(Reply(message.call_id, LOADED))
            again = await second.answer(LOADED)
            assert (again.command, again.arguments) == (command, arguments)
            await call
        client.handle_replica_failure(1)
        call = asyncio.create_task(client.call("pause"))
        message = await first.receive()
        assert isinstance(message, EngineCall) and message.command == "pause"
        second = await cluster.start(1)
        assert (await second.answer({})).command == "pause"
        await first.send(Reply(message.call_id, {}))
        await call

    run_cluster(test)


FAILED = {"error": "no such file", "status": 400, "has_mixed_weights": False}


async def start_update(
    cluster: Cluster, path: str, *answers: dict[str, Any]
) -> asyncio.Task[dict[str, Any]]:
    """Update the weights, which the replicas answer."""
    arguments = {"path": path, "mode": "drain"}
    call = asyncio.create_task(cluster.client.call("update_weights", arguments))
    message = await cluster.engines[0].answer({"path": f"/{path}"})
    assert (message.command, message.arguments) == ("locate_weights", arguments)
    for engine, answer in zip(cluster.engines.values(), answers, strict=False):
        message = await engine.answer(answer)
        assert message.command == "update_weights"
        assert message.arguments == {"path": f"/{path}", "mode": "drain"}
    return call


async def answer_undo(engine: FakeEngine, path: str, answer: dict[str, Any]) -> None:
    """Answer the command that loads the previous weights."""
    message = await engine.answer(answer)
    assert message.command == "update_weights"
    assert message.arguments == {"path": path, "mode": "recompute"}


@pytest.mark.parametrize("is_mixed", [False, True])
def test_weights_that_one_replica_cannot_load_are_undone_on_the_others(is_mixed: bool) -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.engines.values()
        failed = FAILED | {"has_mixed_weights": is_mixed}
        for previous in ("m", "/new"):  # at the start, and after an update
            with pytest.raises(ApiError, match="no such file"):
                await (await start_update(cluster, "other", {}, failed))
            for engine in (first, second)[: 1 + is_mixed]:
                await answer_undo(engine, previous, {})
            await (await start_update(cluster, "new", {}, {}))

    run_cluster(test)


def test_restarted_replica_gets_no_requests_before_it_has_the_updated_weights(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        client, first = cluster.client, cluster.engines[0]
        await (await start_update(cluster, "new", {}, {}))
        for answer in (FAILED, {}):
            client.handle_replica_failure(1)
            restarted = await cluster.start(1)
            assert (await restarted.answer({})).command == "unload_adapter"
            assert client.loading_weights == {1}
            for number in range(3):
                async with client.generate([prompt_request()], uid=str(number)):
                    await first.receive_request()
                assert isinstance(await first.receive(), AbortRequest)
            await answer_undo(restarted, "/new", answer)
            await wait_until(lambda: not client.loading_weights)
            differs = client.router.replicas[1].differences == {"weights"}
            assert (
                differs == (answer is FAILED) == ("the weights of replica 1 differ" in caplog.text)
            )
            caplog.clear()
        client.router.replicas[1].differences.add("weights")
        await (await start_update(cluster, "new", {}, {}))
        assert not client.router.replicas[1].differences

    run_cluster(test)


def test_replicas_get_requests_if_the_weights_of_all_differ() -> None:
    async def test(cluster: Cluster) -> None:
        client, engine = cluster.client, cluster.engines[0]
        call = await start_update(cluster, "new")
        assert (await engine.answer({})).arguments == {"path": "/new", "mode": "drain"}
        call.cancel()  # the client disconnects
        await answer_undo(engine, "m", FAILED)
        await wait_until(lambda: not client.loading_weights)
        assert client.router.replicas[0].differences == {"weights"}
        async with client.generate([prompt_request()], uid="a"):
            await engine.receive_request()

    run_cluster(test, 1)


def test_replica_without_the_updated_weights_is_not_reported_as_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        processes: dict[int, Any] = {0: FakeProcess(), 1: FakeProcess()}
        supervisor = EngineSupervisor(client, {}, _processes=processes)
        start_fake_processes(monkeypatch, cluster)
        watch = asyncio.create_task(supervisor.watch())
        await (await start_update(cluster, "new", {}, {}))
        restart = asyncio.create_task(supervisor.restart_replica(1))
        assert isinstance(await cluster.engines[1].receive(), EngineCall)  # shutdown
        processes[1].kill()
        await wait_until(lambda: client.loading_weights == {1})
        assert (await cluster.engines[1].answer({})).command == "unload_adapter"
        assert not restart.done()
        await answer_undo(cluster.engines[1], "/new", FAILED)
        with pytest.raises(ApiError, match="replica=1 cannot load the weights of the last update"):
            await restart
        watch.cancel()

    run_cluster(test)

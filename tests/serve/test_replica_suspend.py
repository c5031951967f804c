"""Suspension of replicas."""

import asyncio
from typing import Any

import pytest

from megalith.serve.errors import ApiError
from megalith.serve.protocol import EngineCall
from megalith.serve.supervisor import EngineSupervisor
from tests.serve.test_replicas import Cluster, prompt_request, run_cluster, wait_until

OFFLOAD = {"kv_cache": "offload", "offload_weights": False}
FAILED = {"error": "no memory", "status": 503}


async def start_call(
    cluster: Cluster, command: str, *answers: dict[str, Any]
) -> asyncio.Task[dict[str, Any]]:
    """Call a command, which the replicas answer."""
    arguments = OFFLOAD if command == "suspend" else {}
    call = asyncio.create_task(cluster.client.call(command, arguments))
    for engine, answer in zip(cluster.engines.values(), answers or ({}, {}), strict=True):
        message = await engine.answer(answer)
        assert (message.command, message.arguments) == (command, arguments)
    return call


async def call_all(cluster: Cluster, command: str, *answers: dict[str, Any]) -> None:
    """Call a command, which the replicas answer, and wait for its result."""
    await (await start_call(cluster, command, *answers))


def test_replica_that_is_restarted_is_suspended_as_the_others() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        suspension = {"kv_cache": "recompute", "offload_weights": True}

        async def call(command: str, answer: dict[str, Any], **arguments: Any) -> None:
            calls = asyncio.create_task(client.call(command, arguments))
            for engine in cluster.engines.values():
                message = await engine.answer(answer)
                assert (message.command, message.arguments) == (command, arguments)
            await calls

        async def restart() -> None:
            client.handle_replica_failure(1)
            cluster.engines[1] = await cluster.start(1)

        with pytest.raises(ApiError, match="no host memory") as raised:
            await call("suspend", {"error": "no host memory", "status": 503}, **suspension)
        assert raised.value.status == 503
        await call("resume", {})  # it is not suspended
        await call("suspend", {}, **suspension)
        await restart()
        message = await cluster.engines[1].answer({})
        assert (message.command, message.arguments) == ("suspend", suspension)
        for command, arguments, text in (
            ("resume", {}, "resume: the engine is suspended .*Call wake_up first, then resume"),
            ("suspend", {"kv_cache": "persist"}, "suspended with kv_cache=recompute, offload"),
        ):
            with pytest.raises(ApiError, match=text) as raised:  # before it is sent
                await client.call(command, arguments)
            assert raised.value.status == 409
        await call("wake_up", {})
        await restart()
        assert (await cluster.engines[1].answer({})).command == "pause"
        await call("resume", {})
        await restart()
        await call("stats", {})

    run_cluster(test)


@pytest.mark.parametrize(
    ("earlier", "command", "undo"),
    [
        ([], "suspend", [("wake_up", {}), ("resume", {})]),
        (["pause"], "suspend", [("wake_up", {})]),
        (["suspend"], "wake_up", [("suspend", OFFLOAD)]),
    ],
)
def test_command_that_one_replica_cannot_execute_is_undone_on_the_others(
    earlier: list[str], command: str, undo: list[tuple[str, dict[str, Any]]]
) -> None:
    async def test(cluster: Cluster) -> None:
        for each in earlier:
            await call_all(cluster, each)
        before = cluster.client.state
        call = await start_call(cluster, command, {}, FAILED)
        for expected in undo:
            assert not call.done()
            message = await cluster.engines[0].answer({})
            assert (message.command, message.arguments) == expected
        with pytest.raises(ApiError, match="no memory"):
            await call
        assert cluster.client.state == before
        await call_all(cluster, "stats")  # the other replica gets nothing

    run_cluster(test)


def test_command_that_a_replica_does_not_answer_in_time_is_undone() -> None:
    async def test(cluster: Cluster) -> None:
        with pytest.raises(ApiError, match="does not answer within"):
            await cluster.client.call("suspend", OFFLOAD, timeout_s=0.01)
        for engine in cluster.engines.values():
            commands = [(await engine.answer({})).command for _ in range(3)]
            assert commands == ["suspend", "wake_up", "resume"]

    run_cluster(test)


def test_restarted_replica_that_cannot_be_suspended_gets_no_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        await call_all(cluster, "suspend")
        client.handle_replica_failure(1)
        engine = await cluster.start(1)
        assert (await engine.answer(FAILED)).command == "suspend"
        await wait_until(lambda: client.router.replicas[1].differences == {"state"})
        text = (
            "replica 1 is running and not suspended, as the others are; it gets no new requests "
            "until it is restarted or a later command succeeds: no memory"
        )
        assert text in caplog.text and "other adapters" not in caplog.text
        for number in range(3):
            async with client.generate([prompt_request()], uid=str(number)):
                await cluster.engines[0].receive_request()
            await cluster.engines[0].receive()  # it is aborted
        await call_all(cluster, "suspend")
        assert not client.router.replicas[1].differences

    run_cluster(test)


def test_replica_whose_state_could_not_be_restored_gets_requests_after_a_later_command(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        client, (first, second) = cluster.client, cluster.engines.values()
        call = await start_call(cluster, "suspend", {}, FAILED)
        answers = [await first.answer(FAILED) for _ in range(2)]
        assert [each.command for each in answers] == ["wake_up", "resume"]
        with pytest.raises(ApiError, match="no memory"):
            await call
        assert client.state.name == "running" and "replica 0 is suspended and not" in caplog.text
        differences = [state.differences for state in client.router.replicas.values()]
        assert differences == [{"state"}, set()]
        resume = asyncio.create_task(client.call("resume"))
        assert (await second.answer({})).command == "resume"
        assert [(await first.answer({})).command for _ in range(2)] == ["wake_up", "resume"]
        await resume
        assert not client.router.replicas[0].differences

    run_cluster(test)


def test_single_group_keeps_its_state_if_the_one_before_cannot_be_restored() -> None:
    async def test(cluster: Cluster) -> None:
        client, engine = cluster.client, cluster.engines[0]
        with pytest.raises(ApiError, match="does not answer within"):
            await client.call("suspend", OFFLOAD, timeout_s=0.01)
        assert (await engine.answer({})).command == "suspend"
        assert [(await engine.answer(FAILED)).command for _ in range(2)] == ["wake_up", "resume"]
        await wait_until(lambda: client.state.name == "suspended")
        with pytest.raises(ApiError, match="resume: the engine is suspended"):
            await client.call("resume")
        for command in ("wake_up", "resume"):
            call = asyncio.create_task(client.call(command))
            assert (await engine.answer({})).command == command
            await call
        async with client.generate([prompt_request()], uid="a"):
            await engine.receive_request()

    run_cluster(test, 2, 2)


def test_commands_that_change_the_state_are_executed_one_after_another() -> None:
    async def test(cluster: Cluster) -> None:
        client, (first, second) = cluster.client, cluster.engines.values()
        suspend = asyncio.create_task(client.call("suspend", OFFLOAD))
        await asyncio.sleep(0)
        resume = asyncio.create_task(client.call("resume"))
        cancelled = asyncio.create_task(client.call("pause"))
        assert (await second.answer(FAILED)).command == "suspend"
        cancelled.cancel()
        assert [(await first.answer({})).command for _ in range(2)] == ["suspend", "wake_up"]
        assert not suspend.done()
        assert (await first.answer({})).command == "resume"
        with pytest.raises(ApiError, match="no memory"):
            await suspend
        for engine in (first, second):
            assert (await engine.answer({})).command == "resume"
        await resume

    run_cluster(test)


def test_shutdown_does_not_wait_for_commands() -> None:
    async def test(cluster: Cluster) -> None:
        client, (first, second) = cluster.client, cluster.engines.values()
        suspend = asyncio.create_task(client.call("suspend", OFFLOAD))
        assert (await first.answer({})).command == "suspend"
        await client.drain(timeout_s=10)
        assert (await first.receive()) == EngineCall(2, "drain")
        later = asyncio.create_task(client.call("pause"))
        assert (await second.answer(FAILED)).command == "suspend"
        assert (await second.receive()) == EngineCall(3, "drain")
        with pytest.raises(ApiError, match="no memory"):
            await suspend
        with pytest.raises(ApiError, match="pause: the server is shutting down"):
            await later
        assert client.state.name == "running"

    run_cluster(test)


def test_weights_of_a_suspended_server_are_released_without_waking_it_up() -> None:
    async def test(cluster: Cluster) -> None:
        await call_all(cluster, "suspend")
        more = {"kv_cache": "offload", "offload_weights": True}
        call = asyncio.create_task(cluster.client.call("suspend", more))
        for engine in cluster.engines.values():
            message = await engine.answer({})
            assert (message.command, message.arguments) == ("suspend", more)
        await call
        await call_all(cluster, "wake_up")

    run_cluster(test)


def test_replica_whose_suspension_fails_after_a_later_command_was_sent_differs() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        await call_all(cluster, "suspend")
        client.handle_replica_failure(1)
        restarted = await cluster.start(1)
        wake_up = asyncio.create_task(client.call("wake_up"))
        assert (await cluster.engines[0].answer({})).command == "wake_up"
        assert (await restarted.answer(FAILED)).command == "suspend"
        assert (await restarted.answer({})).command == "wake_up"  # without effect
        await wake_up
        assert client.state.name == "paused"
        assert client.router.replicas[1].differences == {"state"}  # it is running
        resume = asyncio.create_task(client.call("resume"))
        for engine in cluster.engines.values():
            assert (await engine.answer({})).command == "resume"
        await resume
        assert not client.router.replicas[1].differences

    run_cluster(test)


def test_state_before_a_command_is_restored_if_its_client_disconnects() -> None:
    async def test(cluster: Cluster) -> None:
        call = asyncio.create_task(cluster.client.call("pause"))
        first, second = cluster.engines.values()
        assert (await first.answer({})).command == "pause"
        call.cancel()
        assert (await second.answer({})).command == "pause"
        for engine in (first, second):
            assert (await engine.answer({})).command == "resume"
        with pytest.raises(asyncio.CancelledError):
            await call
        assert cluster.client.state.name == "running"

    run_cluster(test)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("pause", "1 sequences, which do not finish while the server is paused. POST /resume f"),
        ("suspend", "while the server is suspended. POST /wake_up, and then /resume, first"),
    ],
)
def test_replica_whose_requests_do_not_finish_is_not_restarted(command: str, text: str) -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        process: Any = None
        supervisor = EngineSupervisor(client, {}, _processes={0: process})
        async with client.generate([prompt_request()], uid="a"):
            await cluster.engines[0].receive_request()
            await call_all(cluster, command)
            with pytest.raises(ApiError, match=text) as raised:
                async with asyncio.timeout(10):
                    await supervisor.restart_replica(0)
            assert raised.value.status == 409
            assert not client.router.replicas[0].is_draining

    run_cluster(test)

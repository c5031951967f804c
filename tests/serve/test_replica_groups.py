"""Replicas that share experts with fake engines: the first one of a group receives the messages of
all, and they fail together."""

import asyncio
from typing import Any

import pytest

from megalith.serve.errors import ApiError
from megalith.serve.protocol import AddRequest, CacheReport, EngineCall, ExpireRequest, Heartbeat
from megalith.serve.supervisor import EngineSupervisor
from tests.serve.test_replicas import (
    Cluster,
    FakeProcess,
    prompt_request,
    read,
    run_cluster,
    start_fake_processes,
    wait_until,
)


async def receive_request(cluster: Cluster, replica: int) -> AddRequest:
    """Return the next request of a replica, which the first one of its group receives."""
    message = await cluster.engines[replica // 2 * 2].receive_request()
    assert message.dp_rank == replica % 2
    return message


def test_first_replica_of_a_group_receives_the_requests_of_all() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with (
            client.generate([prompt_request()], uid="a") as first,
            client.generate([prompt_request([9])], uid="b") as second,
        ):
            for replica, generation in ((0, first), (1, second)):
                message = await receive_request(cluster, replica)
                report = CacheReport(0, [replica], [], 5 + replica)
                update = (0, 10 + replica, "a", "stop")
                engine = cluster.engines[replica]
                await engine.send_tokens(message.request_id, update, cache=report)
                assert await read(generation) == [update]
        states = client.router.replicas
        assert [states[each].block_keys for each in range(4)] == [{0}, {1}, set(), set()]
        assert [states[each].num_active_blocks for each in range(4)] == [5, 6, 0, 0]

    run_cluster(test, 4, 2)


def test_group_gets_a_command_once_and_each_replica_those_about_itself() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        for number, command in ((0, "pause"), (2, "reset_prefix_cache")):
            call = asyncio.create_task(client.call_replicas(command))
            for index, first in enumerate((0, 2)):
                message = await cluster.engines[first].answer({"a": first})
                assert message == EngineCall(number + index, command)
            assert await call == [{"a": 0}, {"a": 2}]
        stats = asyncio.create_task(client.poll_replicas("stats"))
        for replica in range(4):
            message = await cluster.engines[replica // 2 * 2].answer({"a": replica})
            assert (message.command, message.dp_rank) == ("stats", replica % 2)
        assert await stats == [{"a": replica} for replica in range(4)]
        client.send_heartbeats()
        for replica in range(4):
            heartbeat = await cluster.engines[replica // 2 * 2].receive()
            assert heartbeat == Heartbeat(replica % 2)
            if replica != 3:
                await cluster.engines[replica].send(heartbeat)
        await wait_until(lambda: client.find_unresponsive(max_heartbeats=1) == [3])
        client.handle_replica_failure(3)
        engine = await cluster.start(2)  # it gets the state of the others, once
        assert (await engine.answer({})).command == "pause"
        client.send_heartbeats()
        assert [await engine.receive() for _ in range(2)] == [Heartbeat(0), Heartbeat(1)]

    run_cluster(test, 4, 2)


def test_requests_of_a_failed_group_continue_on_another_group() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with (
            client.generate([prompt_request(seed=1)], uid="a") as first,
            client.generate([prompt_request([9], seed=1)], uid="b") as second,
        ):
            messages = [await receive_request(cluster, replica) for replica in (0, 1)]
            await cluster.engines[1].send_tokens(messages[1].request_id, (0, 10, "a", None))
            await wait_until(lambda: client._requests[1].choices[0].token_ids == [10])
            client.handle_replica_failure(1)
            assert sorted(client.router.replicas) == [2, 3]
            again = [await receive_request(cluster, replica) for replica in (2, 3)]
            assert [message.progress for message in again] == [[[[], None]], [[[10], None]]]
            for replica in (0, 1):  # dropped
                late = (0, 99, "late", None)
                await cluster.engines[replica].send_tokens(messages[replica].request_id, late)
            for replica, message in zip((2, 3), again, strict=True):
                await cluster.engines[replica].send_tokens(message.request_id, (0, 5, "b", "stop"))
            assert await read(first) == [(0, 5, "b", "stop")]
            assert await read(second) == [(0, 10, "a", None), (0, 5, "b", "stop")]

    run_cluster(test, 4, 2)


def test_request_of_a_later_replica_of_a_group_ends_at_its_deadline() -> None:
    async def test(cluster: Cluster) -> None:
        client, engine = cluster.client, cluster.engines[0]
        late = prompt_request(deadline_s=0.05)
        async with client.generate([late], uid="a"), client.generate([late, late], uid="b"):
            first, second, third = [await engine.receive_request() for _ in range(3)]
            assert [first.dp_rank, second.dp_rank, third.dp_rank] == [0, 1, 0]
            assert await engine.receive() == ExpireRequest(second.request_id)  # not of the others
            client.send_heartbeats()
            assert await engine.receive() == Heartbeat(0)
        assert not client._requests

    run_cluster(test, 2, 2)


def test_request_that_waits_for_the_only_group_ends_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megalith.serve.supervisor.HEARTBEAT_S", 0.01)

    async def test(cluster: Cluster) -> None:
        supervisor = EngineSupervisor(cluster.client, {})
        for each in (0, 1):
            cluster.client.router.drain(each)
        late = prompt_request(deadline_s=0.05)
        heartbeats = asyncio.create_task(supervisor._check_heartbeats())
        async with cluster.client.generate([late], uid="a") as generation:
            with pytest.raises(ApiError, match="deadline_s=0.05: the request was not finished"):
                await read(generation)
        heartbeats.cancel()

    run_cluster(test, 2, 2)


def test_restart_of_a_replica_drains_and_replaces_its_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        processes: dict[int, Any] = {0: FakeProcess(), 2: FakeProcess()}
        supervisor = EngineSupervisor(client, {}, _processes=processes)
        start_fake_processes(monkeypatch, cluster)
        watch = asyncio.create_task(supervisor.watch())
        async with client.generate([prompt_request()], uid="a") as generation:
            message = await receive_request(cluster, 0)
            restart = asyncio.create_task(supervisor.restart_replica(1))
            await wait_until(lambda: client.router.replicas[0].is_draining)
            assert client.router.replicas[1].is_draining
            async with client.generate([prompt_request()], uid="b"):
                await receive_request(cluster, 2)
            await cluster.engines[0].send_tokens(message.request_id, (0, 1, "", "stop"))
            await read(generation)
        shutdown = await cluster.engines[0].receive()
        assert isinstance(shutdown, EngineCall) and shutdown.command == "shutdown"
        with pytest.raises(ApiError, match="replica=0 is not ready: it is being restarted"):
            await supervisor.restart_replica(0)
        processes[0].kill()
        async with asyncio.timeout(10):
            await restart
        assert sorted(client.router.replicas) == [0, 1, 2, 3] and not caplog.records
        processes[2].kill()
        await wait_until(lambda: "replica 2 and 3 of the engine ended with code" in caplog.text)
        supervisor.is_stopping = True
        processes[0].kill()
        assert await watch is None

    run_cluster(test, 4, 2)


def test_end_of_the_only_group_ends_the_server() -> None:
    async def test(cluster: Cluster) -> None:
        process: Any = FakeProcess()
        process.kill()
        supervisor = EngineSupervisor(cluster.client, {}, _processes={0: process})
        assert await supervisor.watch() == -9
        assert cluster.client.failed is not None

    run_cluster(test, 2, 2)

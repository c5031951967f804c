"""States of an engine, and of the replicas of a server."""

import asyncio
from typing import Any

import pytest

from megalith.plan.serving.engine_state import EngineState, InvalidStateError, Suspension
from megalith.serve.errors import ApiError
from tests.serve.test_replicas import Cluster, run_cluster

OFFLOAD = Suspension("offload")
STATES = {
    "running": EngineState(),
    "paused": EngineState(is_paused=True),
    "suspended": EngineState(is_paused=True, suspension=OFFLOAD),
}


@pytest.mark.parametrize(
    ("state", "after"),
    [
        ("running", {"pause": "paused", "resume": "running", "wake_up": "running"}),
        ("paused", {"pause": "paused", "resume": "running", "wake_up": "paused"}),
        ("suspended", {"pause": "suspended", "resume": None, "wake_up": "paused"}),
    ],
)
def test_commands_change_the_state(state: str, after: dict[str, str | None]) -> None:
    assert STATES[state].name == state
    assert STATES[state].suspend(OFFLOAD) == STATES["suspended"]
    for command, expected in after.items():
        if expected is None:
            with pytest.raises(InvalidStateError, match="the engine is suspended"):
                getattr(STATES[state], command)()
        else:
            assert getattr(STATES[state], command)() == STATES[expected]


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

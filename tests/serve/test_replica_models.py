"""Adapters and weight updates of replicas with fake engines."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megalith.serve.errors import ApiError
from megalith.serve.protocol import AbortRequest, RequestRejected
from tests.serve.test_replicas import Cluster, prompt_request, read, run_cluster, wait_until


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


def test_weights_that_one_replica_cannot_load_are_undone_on_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed = {"error": "no such file", "status": 400}

    async def test(cluster: Cluster) -> None:
        client, first = cluster.client, cluster.engines[0]

        async def update(path: str, *answers: dict[str, Any]) -> None:
            arguments = {"path": path, "mode": "drain"}
            call = asyncio.create_task(client.call("update_weights", arguments))
            for engine, answer in zip(cluster.engines.values(), answers, strict=True):
                message = await engine.answer(answer)
                assert (message.command, message.arguments) == ("update_weights", arguments)
            await call

        for previous in ("m", "new"):  # at the start, and after an update
            with pytest.raises(ApiError, match="no such file"):
                await update("other", {}, failed)
            message = await first.answer({})
            assert message.arguments == {"path": previous, "mode": "recompute"}
            await update("new", {}, {})
        client.handle_replica_failure(1)
        restarted = await cluster.start(1)
        assert (await restarted.answer(failed)).arguments["path"] == "new"
        await wait_until(lambda: client.router.replicas[1].differences == {"weights"})
        assert "replica 1 has other weights than the others, and gets no new requ" in caplog.text
        for number in range(3):
            async with client.generate([prompt_request()], uid=str(number)):
                await first.receive_request()
            assert isinstance(await first.receive(), AbortRequest)
        await update("new", {}, {})
        assert not client.router.replicas[1].differences

    run_cluster(test)

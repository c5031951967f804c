"""Replicas of the engine with fake engines: routing, failure and restart."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio

from megalith.config.generation import SamplingParams
from megalith.config.server import ServeConfig
from megalith.serve import batch
from megalith.serve.client import EngineClient
from megalith.serve.errors import ApiError
from megalith.serve.generation import Generation, PromptRequest
from megalith.serve.metrics import HttpMetrics, merge_metrics
from megalith.serve.model_info import ModelInfo
from megalith.serve.models import get_ready, render_metrics, restart_replica
from megalith.serve.protocol import (
    AbortRequest,
    AddRequest,
    CacheReport,
    Codec,
    EngineCall,
    Heartbeat,
    LoadFailed,
    Message,
    PromptResult,
    Ready,
    Reply,
    StepOutputs,
    TokenUpdate,
    to_array,
)
from megalith.serve.state import RequestContext, ServerState
from megalith.serve.supervisor import HEARTBEAT_S, EngineSupervisor
from megalith.serve.transport import socket_address

INFO = ModelInfo(
    path="m",
    tokenizer={"kind": "byte"},
    template=None,
    template_error="none",
    turn_end_ids=[],
    turn_end_texts=[],
    max_model_len=100,
    max_prompt_characters=None,
    vocab_size=257,
    hidden_size=12,
    max_num_seqs=4,
    generation_defaults={},
    block_size=2,
    adapters={"de": "german"},
    adapter_fingerprints={"de": b"first"},
)
PROMPT = [1, 2, 3, 4, 5]


class FakeEngine:
    """The engine's end of the socket of one replica."""

    def __init__(self, address: str, identity: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.codec = Codec()

    async def send(self, message: Message) -> None:
        await self.socket.send(self.codec.encode(message))

    async def receive(self) -> Message:
        async with asyncio.timeout(10):
            return self.codec.decode(await self.socket.recv())

    async def receive_request(self) -> AddRequest:
        message = await self.receive()
        assert isinstance(message, AddRequest), message
        return message

    async def answer(self, result: dict[str, Any]) -> EngineCall:
        """Answer the next call."""
        message = await self.receive()
        assert isinstance(message, EngineCall), message
        await self.send(Reply(message.call_id, result))
        return message

    async def send_tokens(
        self, number: int, *updates: tuple[int, int | None, str, Any], cache: Any = None
    ) -> None:
        """Send (choice, token, text, finish reason) of a request, after its prompt."""
        items = [
            to_array(TokenUpdate(number, choice, token, text, None, reason, None, None, False))
            for choice, token, text, reason in updates
        ]
        report = None if cache is None else to_array(cache)
        prompt: list[object] = to_array(PromptResult(number, 2, None, None))
        await self.send(StepOutputs([prompt], items, report))


class Cluster:
    """A client with fake replicas."""

    def __init__(self, client: EngineClient, address: str) -> None:
        self.client, self.address = client, address
        self.engines: dict[int, FakeEngine] = {}

    async def start(self, replica: int) -> FakeEngine:
        """Start the group of a replica, or start it again; it is ready. Returns its first one."""
        group = self.client.find_group(replica)
        identities = self.client.start_replica(replica)
        self.engines |= {
            each: FakeEngine(self.address, identity)
            for each, identity in zip(group, identities, strict=True)
        }
        await self.engines[group.start].send(Ready(asdict(INFO)))
        await wait_until(lambda: set(group) <= set(self.client.router.replicas))
        return self.engines[group.start]


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the client process its messages until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def run_cluster(
    test: Callable[[Cluster], Awaitable[None]], num_replicas: int = 2, group_size: int = 1
) -> None:
    """Run a test with fake replicas, all of them ready."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            address = socket_address(Path(folder))
            client = EngineClient(address, num_replicas=num_replicas, group_size=group_size, seed=7)
            cluster = Cluster(client, address)
            try:
                for group in client.groups:
                    await cluster.start(group.start)
                await test(cluster)
            finally:
                for engine in cluster.engines.values():
                    engine.socket.close()
                await client.close()

    asyncio.run(run())


def start_fake_processes(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    """Let a supervisor start fake processes."""

    async def start_process(self: EngineSupervisor, group: range) -> None:
        process: Any = FakeProcess()
        self._processes[group.start] = process
        await cluster.start(group.start)

    monkeypatch.setattr(EngineSupervisor, "_start_process", start_process)


def prompt_request(token_ids: list[int] | None = None, **params: Any) -> PromptRequest:
    return PromptRequest(token_ids or PROMPT, SamplingParams(**params))


async def read(generation: Generation) -> list[tuple[int, int | None, str, str | None]]:
    """Return (choice, token, text, finish reason) of all updates until the end."""
    outputs = []
    async with asyncio.timeout(10):
        while generation.num_unfinished:
            for _, update in await generation.next():
                outputs.append((update.choice, update.token, update.text, update.finish_reason))
    return outputs


def test_request_continues_on_another_replica_after_the_tokens_that_were_received() -> None:
    async def test(cluster: Cluster) -> None:
        first, second = cluster.engines[0], cluster.engines[1]
        request = prompt_request(n=3, seed=5, prompt_logprobs=1)
        async with cluster.client.generate([request], uid="a") as generation:
            message = await first.receive_request()
            assert message.progress is None and message.params["prompt_logprobs"] == 1
            await first.send_tokens(
                message.request_id, (0, 10, "a", None), (1, 20, "b", "stop"), (2, 30, "", None)
            )
            await wait_until(lambda: cluster.client.num_sequences == 2)
            cluster.client.handle_replica_failure(0)
            again = await second.receive_request()
            assert again.progress == [[[10], None], [[20], "stop"], [[30], None]]
            assert "prompt_logprobs" not in again.params  # received
            assert (again.request_id, again.prompt_token_ids) == (message.request_id, PROMPT)
            assert again.arrival_time == message.arrival_time and again.params["seed"] == 5
            await first.send_tokens(message.request_id, (0, 99, "late", None))  # dropped
            await second.send_tokens(
                message.request_id,
                (1, None, "", "abort"),  # has ended before
                (0, 11, "c", "stop"),
                (2, 31, "d", "length"),
            )
            assert await read(generation) == [
                (0, 10, "a", None),
                (1, 20, "b", "stop"),
                (2, 30, "", None),
                (0, 11, "c", "stop"),
                (2, 31, "d", "length"),
            ]
            assert generation.prompts[0] is not None
        assert (cluster.client.num_sequences, cluster.client.num_prompt_tokens) == (0, 0)
        assert cluster.client.router.replicas[1].load == 0

    run_cluster(test)


def test_request_without_tokens_is_sent_again_with_its_derived_seed() -> None:
    async def test(cluster: Cluster) -> None:
        request = prompt_request(n=2, prompt_logprobs=0)
        async with cluster.client.generate([request], uid="a"):
            message = await cluster.engines[0].receive_request()
            async with cluster.client.generate([prompt_request()], uid="b"):
                other = await cluster.engines[1].receive_request()
                assert other.params["seed"] != message.params["seed"]
            assert await cluster.engines[1].receive() == AbortRequest(other.request_id)
            cluster.client.handle_replica_failure(0)
            again = await cluster.engines[1].receive_request()
            assert again.params == message.params
            assert again.progress == [[[], None], [[], None]]

    run_cluster(test)


def test_request_whose_replica_fails_twice_fails() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[0].receive_request()
            client.handle_replica_failure(0)
            await cluster.engines[1].receive_request()
            client.handle_replica_failure(1)
            with pytest.raises(ApiError, match="the request may be the cause") as raised:
                await read(generation)
            assert raised.value.status == 500
        assert (client.num_sequences, client.num_prompt_tokens) == (0, 0)

    run_cluster(test)


def test_accepted_request_waits_while_no_replica_is_ready_and_new_ones_are_rejected() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[0].receive_request()
            client.handle_replica_failure(1)
            client.handle_replica_failure(0)
            with pytest.raises(ApiError, match="no replica of the engine is ready") as raised:
                async with client.generate([prompt_request()], uid="b"):
                    pass
            assert raised.value.status == 503 and raised.value.headers == {"Retry-After": "1"}
            with pytest.raises(ApiError, match="no replica of the engine is ready"):
                await client.call("stats")
            engine = await cluster.start(0)
            message = await engine.receive_request()
            await engine.send_tokens(message.request_id, (0, 10, "a", "stop"))
            assert await read(generation) == [(0, 10, "a", "stop")]

    run_cluster(test)


def test_request_without_a_replica_ends_at_its_deadline() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        client.handle_replica_failure(1)
        async with (
            client.generate([prompt_request(deadline_s=0.01)], uid="a") as generation,
            client.generate([prompt_request(deadline_s=60)], uid="b"),
        ):
            await asyncio.sleep(0.02)
            client.expire_waiting()  # its replica does it
            assert client.num_sequences == 2
            client.handle_replica_failure(0)
            client.expire_waiting()
            with pytest.raises(ApiError, match="deadline_s=0.01: .* no replica") as raised:
                await read(generation)
            assert raised.value.status == 408 and client.num_sequences == 1

    run_cluster(test)


def test_aborts_reach_the_replica_or_end_a_request_that_none_has() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request(n=2)], uid="a") as generation:
            message = await cluster.engines[0].receive_request()
            assert client.abort("a") == 1 and client.abort("b") == 0
            assert await cluster.engines[0].receive() == AbortRequest(message.request_id)
            client.handle_replica_failure(0)  # before its answer
            aborted = [(0, None, "", "abort"), (1, None, "", "abort")]
            assert await read(generation) == aborted
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[1].receive_request()
            client.handle_replica_failure(1)
            assert client.abort(None) == 1  # no replica has it
            assert await read(generation) == aborted[:1]
        async with asyncio.timeout(10):
            engine = await cluster.start(1)
            async with client.generate([prompt_request()], uid="c"):
                message = await engine.receive_request()
            assert await engine.receive() == AbortRequest(message.request_id)

    run_cluster(test)


def test_request_goes_to_the_replica_that_has_its_prefix() -> None:
    async def test(cluster: Cluster) -> None:
        client, second = cluster.client, cluster.engines[1]
        keys = client._compute_block_keys(prompt_request())
        assert len(keys) == 2  # of 5 tokens in blocks of 2
        salted = client._compute_block_keys(prompt_request(cache_salt="tenant"))
        assert not set(keys) & set(salted)
        assert client._compute_block_keys(prompt_request(prompt_logprobs=0)) == []
        for number in range(2):  # without a cached prefix in turn
            async with client.generate([prompt_request([9])], uid="a") as generation:
                message = await cluster.engines[number].receive_request()
                report = CacheReport(0, keys if number else [], [], 3)
                await cluster.engines[number].send_tokens(
                    message.request_id, (0, 1, "", "stop"), cache=report
                )
                await read(generation)
        assert client.router.replicas[1].num_active_blocks == 3
        for sequence in (1, 3):  # the second time a report is lost
            async with client.generate([prompt_request()], uid="a") as generation:
                message = await second.receive_request()
                report = CacheReport(sequence, [5], [], 3)
                await second.send_tokens(message.request_id, (0, 1, "", "stop"), cache=report)
                await read(generation)
        assert client.router.replicas[1].block_keys == set()
        call = await second.answer({"keys": keys[:1], "next_sequence": 4})
        assert call.command == "list_blocks"
        await wait_until(lambda: client.router.replicas[1].block_keys == {keys[0]})

    run_cluster(test)


def test_commands_reach_all_replicas_and_those_that_are_restarted() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client

        async def call(command: str, results: list[dict[str, Any]], **arguments: Any) -> Any:
            calls = asyncio.create_task(client.call_replicas(command, arguments))
            if command == "update_weights":
                message = await cluster.engines[0].answer({"path": "/new"})
                assert (message.command, message.arguments) == ("locate_weights", arguments)
                arguments["path"] = "/new"
            for replica, result in enumerate(results):
                message = await cluster.engines[replica].answer(result)
                assert (message.command, message.arguments) == (command, arguments)
            return await calls

        assert await call("stats", [{"a": 1}, {"a": 2}]) == [{"a": 1}, {"a": 2}]
        loaded = {"fingerprint": b"f" * 32}
        await call("load_adapter", [loaded, loaded], lora_name="sql", lora_path="folder")
        await call("update_weights", [{}, {}], path="new", mode="drain")
        await call("unload_adapter", [{}, {}], lora_name="de")
        await call("load_adapter", [loaded, loaded], lora_name="fr", lora_path="folder")
        await call("unload_adapter", [{}, {}], lora_name="fr")
        await call("pause", [{}, {}])
        with pytest.raises(ApiError, match="it failed") as raised:
            await call("stats", [{}, {"error": "it failed", "status": 429}])
        assert raised.value.status == 429

        stats = asyncio.create_task(client.call_replicas("stats"))
        await cluster.engines[0].answer({"a": 1})
        client.handle_replica_failure(1)  # it does not answer
        assert await stats == [{"a": 1}]
        engine = await cluster.start(1)
        restored = [await engine.answer({}) for _ in range(4)]
        assert [(each.command, each.arguments) for each in restored] == [
            ("unload_adapter", {"lora_name": "de"}),  # before: it belongs to the old weights
            ("update_weights", {"path": "/new", "mode": "recompute"}),
            ("load_adapter", {"lora_name": "sql", "lora_path": "folder"}),
            ("pause", {}),
        ]
        adapted = PromptRequest(PROMPT, SamplingParams(), adapter="sql")
        assert client._compute_block_keys(adapted) != client._compute_block_keys(prompt_request())

    run_cluster(test)


@pytest.mark.parametrize("text", ["", "# HELP a text\n# TYPE a gauge\na 1.0\n"])
def test_replica_that_does_not_respond_delays_no_metrics_and_no_readiness(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.serve.client.POLL_SECONDS", 0.05)

    async def test(cluster: Cluster) -> None:
        state = ServerState(ServeConfig(), cluster.client, HttpMetrics("tiny"))
        state.set_model(await cluster.client.ready)
        metrics = asyncio.create_task(render_metrics(state))
        assert (await cluster.engines[1].answer({"text": text})).command == "metrics"
        async with asyncio.timeout(10):
            assert text in await metrics
        ready = asyncio.create_task(get_ready(state, RequestContext("r", "/ready")))
        await asyncio.sleep(0.1)  # none has answered: the first answer counts
        assert not ready.done()
        assert (await cluster.engines[1].answer({"state": "paused"})).command == "stats"
        with pytest.raises(ApiError, match="the server is paused"):
            async with asyncio.timeout(10):
                await ready
        assert not cluster.client._calls

    run_cluster(test)


def test_calls_of_a_failed_replica_are_forgotten() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        client.stop_replica(1)
        client._put_cache(1, CacheReport(7, [], [], 0))  # requests a list of blocks
        assert len(client._calls) == 2 and len(client._block_calls) == 1
        client.handle_replica_failure(1)
        assert not client._calls and not client._block_calls

    run_cluster(test)


def test_cancelled_restart_sends_the_requests_that_wait_to_the_replica() -> None:
    async def test(cluster: Cluster) -> None:
        client, first = cluster.client, cluster.engines[0]
        client.handle_replica_failure(1)
        none: Any = None
        supervisor = EngineSupervisor(client, {}, _processes={0: none})
        async with client.generate([prompt_request()], uid="a"):
            await first.receive_request()
            restart = asyncio.create_task(supervisor.restart_replica(0))
            await wait_until(lambda: client.router.replicas[0].is_draining)
            async with client.generate([prompt_request([9])], uid="b"):
                restart.cancel()
                assert (await first.receive_request()).prompt_token_ids == [9]

    run_cluster(test)


def test_batch_uses_all_replicas_and_waits_while_none_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[dict[str, Any]] = []

    async def finish(engine: FakeEngine, count: int) -> None:
        for _ in range(count):
            message = await engine.receive_request()
            await engine.send_tokens(message.request_id, (0, 10, "a", "stop"))

    async def test(cluster: Cluster) -> None:
        client = cluster.client
        supervisor = EngineSupervisor(client, {})

        @asynccontextmanager
        async def open_cluster(settings: dict[str, Any]) -> AsyncIterator[EngineSupervisor]:
            yield supervisor

        async def watch(self: EngineSupervisor) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(batch, "open_engine", open_cluster)
        monkeypatch.setattr(EngineSupervisor, "watch", watch)
        for replica in (0, 1):
            client.handle_replica_failure(replica)
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        requests = [
            batch.BatchRequest(str(number), "/v1/completions", body) for number in range(10)
        ]
        settings = {"served_model_name": "tiny"}
        config = ServeConfig(served_model_name="tiny")
        run = asyncio.create_task(batch.run_batch(config, settings, requests, lines.append))
        await asyncio.sleep(0.05)
        assert not lines and client.num_sequences == 0
        engine = await cluster.start(0)
        await wait_until(lambda: client.num_sequences == 2 * INFO.max_num_seqs)
        await finish(engine, 10)
        async with asyncio.timeout(10):
            assert await run == 0

    run_cluster(test)
    assert [line["response"]["status_code"] for line in lines] == [200] * 10


def test_batch_request_waits_if_all_replicas_fail_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[str] = []

    async def test(cluster: Cluster) -> None:
        client = cluster.client

        async def complete(state: ServerState, context: RequestContext) -> dict[str, Any]:
            attempts.append(context.path)
            if len(attempts) == 1:
                for replica in (0, 1):
                    client.handle_replica_failure(replica)
            client.check_available()
            return {}

        monkeypatch.setitem(batch.FUNCTIONS, "/v1/completions", complete)
        state = ServerState(ServeConfig(), client, HttpMetrics("tiny"))
        request = batch.BatchRequest("1", "/v1/completions", {})
        process = asyncio.create_task(batch._process(state, request))
        await wait_until(lambda: len(attempts) == 1)
        await cluster.start(1)
        assert (await process)["error"] is None and len(attempts) == 2
        for replica in (0, 1):
            client.handle_replica_failure(replica)
        process = asyncio.create_task(batch._process(state, request))
        await asyncio.sleep(0.01)
        client.fail(ApiError(503, "the engine process has ended."))  # no replica gets ready
        async with asyncio.timeout(10):
            assert (await process)["response"]["status_code"] == 503

    run_cluster(test)


def test_replica_that_does_not_answer_heartbeats_is_unresponsive() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        for _ in range(3):
            client.send_heartbeats()
            assert await cluster.engines[0].receive() == Heartbeat()
            await cluster.engines[0].send(Heartbeat())
        await wait_until(lambda: client.find_unresponsive(max_heartbeats=1) == [1])
        assert client.find_unresponsive(max_heartbeats=3) == [1]
        assert client.find_unresponsive(max_heartbeats=4) == []

    run_cluster(test)


def test_drain_waits_for_requests_whose_replica_fails() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[0].receive_request()
            drain = asyncio.create_task(client.drain(timeout_s=10))
            for replica in (0, 1):
                assert (await cluster.engines[replica].answer({})).command == "drain"
            client.handle_replica_failure(0)
            again = await cluster.engines[1].receive_request()
            assert again.progress is not None and not drain.done()
            await cluster.engines[1].send_tokens(again.request_id, (0, 1, "", "stop"))
            await read(generation)
        await drain
        async with client.generate([prompt_request()], uid="a"):
            with pytest.raises(TimeoutError):
                await client.drain(timeout_s=0.01)

    run_cluster(test)


def test_replica_that_cannot_load_the_model_again_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(cluster: Cluster) -> None:
        await cluster.engines[1].send(LoadFailed("why"))
        await wait_until(lambda: "replica 1 cannot load the model: why" in caplog.text)

    run_cluster(test)


def test_restart_of_a_replica_drains_it_and_reports_that_it_cannot_load() -> None:
    async def test(cluster: Cluster) -> None:
        client, first = cluster.client, cluster.engines[0]
        none: Any = None
        supervisor = EngineSupervisor(client, {}, _processes={0: none, 1: none})
        async with client.generate([prompt_request()], uid="a") as generation:
            message = await first.receive_request()
            restart = asyncio.create_task(supervisor.restart_replica(0))
            for _ in range(2):  # the drained one has fewer sequences
                async with client.generate([prompt_request()], uid="b"):
                    await cluster.engines[1].receive_request()
                assert isinstance(await cluster.engines[1].receive(), AbortRequest)
            await first.send_tokens(message.request_id, (0, 1, "", "stop"))
            await read(generation)
        stopped = await first.receive()
        assert isinstance(stopped, EngineCall) and stopped.command == "shutdown"
        with pytest.raises(ApiError, match="replica=0 is not ready: it is being") as raised:
            await supervisor.restart_replica(0)
        assert raised.value.status == 409
        client.handle_replica_failure(0)
        engine = FakeEngine(cluster.address, client.start_replica(0)[0])
        process: Any = object()
        supervisor._processes[0] = process
        await engine.send(LoadFailed("there are no weights."))
        with pytest.raises(ApiError, match="replica=0 cannot load the model: there are") as raised:
            await restart
        assert raised.value.status == 500
        engine.socket.close()

    run_cluster(test)


class FakeProcess:
    """A process of the supervisor that ends when it is killed."""

    def __init__(self) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    def kill(self) -> None:
        self.returncode = -9
        self._ended.set()

    async def wait(self) -> int | None:
        await self._ended.wait()
        return self.returncode


def test_supervisor_kills_a_replica_that_does_not_answer_and_restarts_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    seconds_to_kill: list[float] = []
    sleep = asyncio.sleep

    async def sleep_shortly(seconds: float) -> None:
        if seconds >= 1 and seconds != HEARTBEAT_S:
            waits.append(seconds)
        await sleep(0.001)

    async def test(cluster: Cluster) -> None:
        client = cluster.client
        processes: list[Any] = [FakeProcess(), FakeProcess()]
        supervisor = EngineSupervisor(client, {}, _processes=dict(enumerate(processes)))

        async def start_process(self: EngineSupervisor, group: range) -> None:
            replica = group.start
            process: Any = FakeProcess()
            processes.append(process)
            self._processes[replica] = process
            if len(waits) < 3:  # it does not get ready
                process.kill()
            elif len(waits) == 3:
                await cluster.start(replica)

        async def answer_heartbeats(engine: FakeEngine) -> None:
            while True:
                if await engine.receive() == Heartbeat():
                    await engine.send(Heartbeat())

        monkeypatch.setattr(EngineSupervisor, "_start_process", start_process)
        answers = asyncio.create_task(answer_heartbeats(cluster.engines[0]))
        watch = asyncio.create_task(supervisor.watch())
        send_heartbeats = client.send_heartbeats

        def count_heartbeats() -> None:
            if processes[1].returncode is None:
                seconds_to_kill.append(HEARTBEAT_S)
            send_heartbeats()

        monkeypatch.setattr(client, "send_heartbeats", count_heartbeats)
        await wait_until(lambda: len(processes) == 5 and 1 in client.router.replicas)
        assert processes[1].returncode == -9 and processes[0].returncode is None
        assert sum(seconds_to_kill) == 600, "a step can take minutes"
        assert waits == [1.0, 2.0, 4.0]
        processes[4].kill()  # it was ready: the time begins again
        await wait_until(lambda: len(waits) == 4)
        assert waits[3] == 1.0
        supervisor.is_stopping = True
        processes[0].kill()
        assert await watch is None
        answers.cancel()

    monkeypatch.setattr("megalith.serve.supervisor.asyncio.sleep", sleep_shortly)
    run_cluster(test)
    assert "replica 1 of the engine does not respond; it is killed" in caplog.text
    assert "replica 1 of the engine ended with code -9; it is restarted in 1 s" in caplog.text


def test_engine_that_never_was_ready_ends_the_server() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        process: Any = FakeProcess()
        other: Any = FakeProcess()
        supervisor = EngineSupervisor(client, {}, _processes={0: process, 1: other})
        client.loaded.discard(1)
        other.kill()
        async with client.generate([prompt_request()], uid="a") as generation:
            assert await supervisor.watch() == -9
            with pytest.raises(ApiError, match="the engine process has ended") as raised:
                await read(generation)
            assert raised.value.status == 503

    run_cluster(test)


def test_server_with_one_replica_cannot_restart_it() -> None:
    async def test(cluster: Cluster) -> None:
        state = ServerState(ServeConfig(enable_admin=True), cluster.client, HttpMetrics("tiny"))
        state.set_model(await cluster.client.ready)
        with pytest.raises(ApiError, match="this server has one engine. Start"):
            await restart_replica(state, RequestContext("r", "/restart_replica", {"replica": 0}))

    run_cluster(test, num_replicas=1)


def test_metrics_of_replicas_are_one_group_per_metric() -> None:
    def text(engine: int) -> str:
        return (
            f'# HELP a text\n# TYPE a gauge\na{{engine="{engine}"}} 1.0\n'
            f'# HELP b text\n# TYPE b counter\nb_total{{engine="{engine}"}} 2.0\n'
        )

    assert merge_metrics([text(0), text(1)]) == (
        '# HELP a text\n# TYPE a gauge\na{engine="0"} 1.0\na{engine="1"} 1.0\n'
        '# HELP b text\n# TYPE b counter\nb_total{engine="0"} 2.0\nb_total{engine="1"} 2.0\n'
    )
    assert merge_metrics([text(0)]) == text(0) and merge_metrics([]) == ""

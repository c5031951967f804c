"""Replicas of the engine: routing, loss and restart; with fake engines, and with a real server."""

import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2
import pytest
import zmq.asyncio

from megalith.cli.main import main
from megalith.config.generation import SamplingParams
from megalith.config.server import ServeConfig
from megalith.serve.client import EngineClient, Generation, PromptRequest
from megalith.serve.errors import ApiError
from megalith.serve.metrics import HttpMetrics, merge_metrics
from megalith.serve.model_info import ModelInfo
from megalith.serve.models import restart_replica
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
from tests.serve.servers import Server, running_server
from tests.serve.test_ranks import children

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
        """Start a replica, or start it again; it is ready."""
        engine = FakeEngine(self.address, self.client.start_replica(replica))
        self.engines[replica] = engine
        await engine.send(Ready(asdict(INFO)))
        await wait_until(lambda: replica in self.client.router.replicas)
        return engine


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the client process its messages until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def run_cluster(test: Callable[[Cluster], Awaitable[None]], num_replicas: int = 2) -> None:
    """Run a test with fake replicas, all of them ready."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            address = socket_address(Path(folder))
            client = EngineClient(address, num_replicas=num_replicas, seed=7)
            cluster = Cluster(client, address)
            try:
                for replica in range(num_replicas):
                    await cluster.start(replica)
                await test(cluster)
            finally:
                for engine in cluster.engines.values():
                    engine.socket.close()
                await client.close()

    asyncio.run(run())


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
            cluster.client.lose_replica(0)
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
            cluster.client.lose_replica(0)
            again = await cluster.engines[1].receive_request()
            assert again.params == message.params
            assert again.progress == [[[], None], [[], None]]

    run_cluster(test)


def test_request_that_loses_its_replica_twice_fails() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[0].receive_request()
            client.lose_replica(0)
            await cluster.engines[1].receive_request()
            client.lose_replica(1)
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
            client.lose_replica(1)
            client.lose_replica(0)
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
        client.lose_replica(1)
        async with (
            client.generate([prompt_request(deadline_s=0.01)], uid="a") as generation,
            client.generate([prompt_request(deadline_s=60)], uid="b"),
        ):
            await asyncio.sleep(0.02)
            client.expire_waiting()  # its replica does it
            assert client.num_sequences == 2
            client.lose_replica(0)
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
            client.lose_replica(0)  # before its answer
            aborted = [(0, None, "", "abort"), (1, None, "", "abort")]
            assert await read(generation) == aborted
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[1].receive_request()
            client.lose_replica(1)
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
            for replica, result in enumerate(results):
                message = await cluster.engines[replica].answer(result)
                assert (message.command, message.arguments) == (command, arguments)
            return await calls

        assert await call("stats", [{"a": 1}, {"a": 2}]) == [{"a": 1}, {"a": 2}]
        loaded = {"fingerprint": b"f" * 32}
        await call("load_adapter", [loaded, loaded], lora_name="sql", lora_path="folder")
        await call("unload_adapter", [{}, {}], lora_name="de")
        await call("load_adapter", [loaded, loaded], lora_name="fr", lora_path="folder")
        await call("unload_adapter", [{}, {}], lora_name="fr")
        await call("pause", [{}, {}])
        with pytest.raises(ApiError, match="it failed") as raised:
            await call("stats", [{}, {"error": "it failed", "status": 429}])
        assert raised.value.status == 429

        stats = asyncio.create_task(client.call_replicas("stats"))
        await cluster.engines[0].answer({"a": 1})
        client.lose_replica(1)  # it does not answer
        assert await stats == [{"a": 1}]
        engine = await cluster.start(1)
        restored = [await engine.answer({}) for _ in range(3)]
        assert [(each.command, each.arguments) for each in restored] == [
            ("load_adapter", {"lora_name": "sql", "lora_path": "folder"}),
            ("unload_adapter", {"lora_name": "de"}),
            ("pause", {}),
        ]
        adapted = PromptRequest(PROMPT, SamplingParams(), adapter="sql")
        assert client._compute_block_keys(adapted) != client._compute_block_keys(prompt_request())

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
            client.lose_replica(1)
            call = asyncio.create_task(client.call(command, arguments))
            message = await first.receive()
            assert isinstance(message, EngineCall) and message.command == command
            second = await cluster.start(1)
            if command == "unload_adapter":
                assert (await second.answer(LOADED)).command == "load_adapter"  # as it was
            await first.send(Reply(message.call_id, LOADED))
            again = await second.answer(LOADED)
            assert (again.command, again.arguments) == (command, arguments)
            await call
        client.lose_replica(1)
        call = asyncio.create_task(client.call("pause"))
        message = await first.receive()
        assert isinstance(message, EngineCall) and message.command == "pause"
        second = await cluster.start(1)
        assert (await second.answer({})).command == "pause"
        await first.send(Reply(message.call_id, {}))
        await call

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


def test_drain_waits_for_requests_that_lose_their_replica() -> None:
    async def test(cluster: Cluster) -> None:
        client = cluster.client
        async with client.generate([prompt_request()], uid="a") as generation:
            await cluster.engines[0].receive_request()
            drain = asyncio.create_task(client.drain(timeout_s=10))
            for replica in (0, 1):
                assert (await cluster.engines[replica].answer({})).command == "drain"
            client.lose_replica(0)
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
        client.lose_replica(0)
        engine = FakeEngine(cluster.address, client.start_replica(0))
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
    sleep = asyncio.sleep

    async def sleep_shortly(seconds: float) -> None:
        if seconds >= 1 and seconds != HEARTBEAT_S:
            waits.append(seconds)
        await sleep(0.001)

    async def test(cluster: Cluster) -> None:
        client = cluster.client
        processes: list[Any] = [FakeProcess(), FakeProcess()]
        supervisor = EngineSupervisor(client, {}, _processes=dict(enumerate(processes)))

        async def start_process(self: EngineSupervisor, replica: int) -> None:
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
        await wait_until(lambda: len(processes) == 5 and 1 in client.router.replicas)
        assert processes[1].returncode == -9 and processes[0].returncode is None
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
    assert "replica 1 of the engine does not answer; it is killed" in caplog.text
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
        with pytest.raises(ApiError, match="this server has one replica. Start it with --par"):
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


# --- a server with two replicas

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
        wait_for_replicas(server, {0, 1})
        yield server


def wait_for_replicas(server: Server, expected: set[int]) -> None:
    """Wait until these replicas are ready."""
    ready: set[int] = set()
    for _ in range(1200):
        samples = server.metrics()
        ready = {
            index for index in (0, 1) if f'num_requests_running{{engine="{index}"}}' in samples
        }
        if ready == expected:
            return
        time.sleep(0.05)
    raise AssertionError(f"the replicas {ready} are ready, not {expected}: {server.lines}")


class Stream:
    """A stream of a completion, read on a thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.text: dict[int, str] = {}
        self.logprobs: list[float] = []
        self.finish_reasons: set[str] = set()
        self.has_started, self.is_done = threading.Event(), False
        self._thread = threading.Thread(target=self._read, args=(server.url, body))
        self._thread.start()

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
        self._thread.join(60)
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
    os.kill(children(replicas.process.pid)[0], signal.SIGKILL)
    wait_for_replicas(replicas, {1})
    assert replicas.get("/health").status_code == 200
    assert replicas.get("/ready").status_code == 503  # paused
    assert replicas.post("/resume").status_code == 200
    for stream, expected in zip(streams, undisturbed, strict=True):
        stream.finish()
        assert stream.text == expected.text
        assert stream.finish_reasons == expected.finish_reasons
        assert stream.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.slow
def test_replica_is_restarted_while_requests_run(replicas: Server) -> None:
    wait_for_replicas(replicas, {0, 1})
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

    thread = threading.Thread(target=complete)
    thread.start()
    response = replicas.post("/restart_replica", {"replica": 1}, timeout=120)
    assert response.raise_for_status().json() == {"status": "ok"}
    is_restarted.set()
    thread.join(120)
    assert len(answers) > 1 and all(answers)
    after = children(replicas.process.pid)
    assert len(after) == 2 and len(set(before) & set(after)) == 1
    wait_for_replicas(replicas, {0, 1})


def test_invalid_replica_is_reported(replicas: Server) -> None:
    for replica in (2, -1, True, "0", None):
        response = replicas.post("/restart_replica", {"replica": replica})
        assert response.status_code == 400
        assert "the replicas are 0 to 1. Use one" in response.json()["error"]["message"]


@pytest.mark.slow
def test_no_request_is_lost_under_load_and_the_replica_comes_back(replicas: Server) -> None:
    wait_for_replicas(replicas, {0, 1})
    bodies = make_bodies(8)
    expected = [replicas.post("/v1/completions", body).json()["choices"] for body in bodies]
    answers: list[Any] = []

    def complete(number: int) -> None:
        with httpx2.Client(headers=KEY, timeout=120) as client:
            for _ in range(2):
                response = client.post(f"{replicas.url}/v1/completions", json=bodies[number])
                answers.append((number, response.status_code, response.json()))

    threads = [threading.Thread(target=complete, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while len(answers) < 3:
        time.sleep(0.005)
    os.kill(children(replicas.process.pid)[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(answers) == 16
    for number, status, answer in answers:
        assert status == 200, answer
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [choice["text"] for choice in expected[number]]
    wait_for_replicas(replicas, {0, 1})
    assert replicas.stop() == 0, replicas.lines


def test_impossible_number_of_replicas_is_reported(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, text in (
        (["--nproc", "3", "--parallel.dp", "2"], "parallel.dp=2 with --nproc=3: every replica has"),
        (
            ["--nproc", "2", "--parallel.dp", "2", "--parallel.tp", "2"],
            "tp x pp x dp is the number of processes. Set --nproc to 4.",
        ),
    ):
        assert main(["serve", str(run), "--port", "0", *words]) == 2
        assert text in capfd.readouterr().err
    assert main(["chat", str(run), "--parallel.dp", "2"]) == 2
    assert "parallel.dp=2: this command runs one replica" in capfd.readouterr().err

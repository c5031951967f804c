"""Messages, the engine process's loop, and its metrics, without HTTP."""

import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from megalith.config.generation import SamplingParams, StructuredOutputsParams
from megalith.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from megalith.config.server import ServeConfig, ServeRun, serve_problems
from megalith.data.tokenizer import ByteTokenizer, NullTokenizer
from megalith.errors import ConfigError, DataError
from megalith.infer import engine
from megalith.infer.llm import LLM
from megalith.infer.suspend import ReleasedStorage
from megalith.plan.serving.engine_state import EngineState
from megalith.plan.serving.request_routing import compute_block_keys
from megalith.serve import metrics as serving_metrics
from megalith.serve import transport
from megalith.serve.access import check_api_key
from megalith.serve.app import ENDPOINTS, EventStream
from megalith.serve.batch import read_batch
from megalith.serve.benchmark import BenchmarkWorkload, RequestTimes, summarize
from megalith.serve.choices import iterate_deltas, run_if_large
from megalith.serve.engine_process import count_prompt_characters
from megalith.serve.errors import ApiError
from megalith.serve.generation import Generation
from megalith.serve.metrics import AccessLog, EngineMetrics, HttpMetrics
from megalith.serve.model_info import ModelInfo, build_served_model
from megalith.serve.models import pause, reset_prefix_cache, resume
from megalith.serve.protocol import (
    AbortRequest,
    AddRequest,
    CacheReport,
    Codec,
    EngineCall,
    Heartbeat,
    LoadFailed,
    Message,
    ProtocolError,
    Ready,
    Reply,
    RequestRejected,
    StepOutputs,
    TokenUpdate,
)
from megalith.serve.sampling_fields import read_params
from megalith.serve.server import open_listener
from megalith.serve.state import RequestContext, ServerState
from tests.serve.peers import Peer, request
from tests.serve.servers import ROOT

MESSAGES: tuple[Message, ...] = (
    AddRequest(1, "uid", [1, 2], {"temperature": 0.5}, 3.5, None),
    AddRequest(1, "uid", [1, 2], {"max_new_tokens": 0}, 3.5, "mean"),
    AddRequest(1, "uid", [1, 2], {}, 3.5, None, "sql"),
    AddRequest(1, "uid", [1, 2], {}, 3.5, None, None, [[[5, 6], None], [[], "stop"]]),
    Heartbeat(),
    AbortRequest(1),
    EngineCall(2, "stats"),
    EngineCall(2, "unload_adapter", {"lora_name": "sql"}),
    Reply(2, {"a": [1, None]}),
    Ready({"path": "x"}),
    LoadFailed("why"),
    RequestRejected(1, 400, "why"),
    StepOutputs([[1, 0, None, b"1234"]], [[1, 0, 97, "a", None, None, None, None, False]]),
    StepOutputs([], [], [3, [2**63 - 1], [1], 7]),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_is_unchanged_by_encoding(message: Message) -> None:
    codec = Codec()
    assert codec.decode(codec.encode(message)) == message


BAD_FRAMES = (
    b"",
    b"\xc1",
    b"\x80\x04\x95",  # the start of a pickle
    msgpack.packb({"a": 1}),
    msgpack.packb([]),
    msgpack.packb(["20"]),
    msgpack.packb([99, 1]),
    msgpack.packb([21]),
    msgpack.packb([21, "1"]),
    msgpack.packb([21, True]),
    msgpack.packb([20, 1, "uid", "text", {}, 0.0, None, None, None, None, None, 0]),
    msgpack.packb([20, 1, "uid", [1], {}, None, None, None, None, None, 0]),
    msgpack.packb([20, 1, "uid", [1], {}, 0.0, 3, None, None, None, 0]),
    msgpack.packb([20, 1, "uid", [1], {}, 0.0, None, 3, None, None, 0]),
    msgpack.packb([20, 1, "uid", [1], {}, 0.0, None, None, 3, None, 0]),
    msgpack.packb([30, 1, "stats", 2, 0]),
)


@pytest.mark.parametrize("frame", BAD_FRAMES)
def test_malformed_frame_is_a_protocol_error(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        Codec().decode(frame)


def test_loop_drops_malformed_frames_and_answers_commands(peer: Peer) -> None:
    for frame in BAD_FRAMES:
        peer.socket.send(frame)
    peer.socket.send_multipart([b"two", b"parts"])
    peer.send(EngineCall(1, "invented"))
    peer.send(LoadFailed("not a message to the engine"))
    peer.send(request(5))
    prompt, updates = peer.read_request()
    assert prompt.request_id == 5 and len(updates) == 3
    assert updates[-1].finish_reason == "length"
    stats = peer.call(7, "stats")
    assert stats["num_requests"] == 0 and stats["num_used_blocks"] == 0
    assert "megalith_generation_tokens_total" in peer.call(8, "metrics")["text"]
    assert peer.call(9, "reset_prefix_cache") == {}


def test_invalid_request_is_rejected_with_its_problem(peer: Peer) -> None:
    for params, text in (({"top_p": 2.0}, "top_p=2.0"), ({"nothing": 1}, "no such sampling")):
        peer.send(request(1, **params))
        message = peer.receive()
        assert isinstance(message, RequestRejected) and message.status == 400
        assert text in message.message
    peer.send(replace(request(2), prompt_token_ids=[999]))
    message = peer.receive()
    assert isinstance(message, RequestRejected) and "token 999" in message.message


def test_failed_step_ends_its_requests_and_not_the_loop(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures = peer.server.engine.step, [RuntimeError("secret detail")]

    def fail_once() -> Any:
        if failures:
            raise failures.pop()
        return step()

    monkeypatch.setattr(peer.server.engine, "step", fail_once)
    peer.send(request(1))
    _, updates = peer.read_request()
    assert updates[-1].finish_reason == "error" and updates[-1].error is not None
    assert "RuntimeError" in updates[-1].error and "secret" not in updates[-1].error
    peer.send(request(2))
    assert len(peer.read_request()[1]) == 3


def test_failed_command_does_not_end_the_loop(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(peer.server.engine.scheduler, "reset_prefix_cache", fail)
    result = peer.call(1, "reset_prefix_cache")
    text = "internal error in reset_prefix_cache: RuntimeError"
    assert result == {"error": text, "status": 500}
    peer.send(request(2))
    assert len(peer.read_request()[1]) == 3


def test_drain_answers_when_the_last_request_is_finished(peer: Peer) -> None:
    peer.send(request(1, max_new_tokens=30))
    peer.send(EngineCall(2, "drain"))
    peer.send(request(3))
    kinds = []
    while "Reply" not in kinds:
        kinds.append(type(peer.receive()).__name__)
    assert kinds.count("RequestRejected") == 1 and kinds[-1] == "Reply"
    assert kinds.count("StepOutputs") == 30
    # still, also on ranks without the requests whose grammars are compiled
    assert peer.call(4, "pause") == {} and peer.call(5, "stats")["state"] == "running"
    peer.send(request(6))
    assert peer.receive() == RequestRejected(6, 503, "the server is shutting down")


def test_draining_engine_continues_the_request_of_a_lost_replica(peer: Peer) -> None:
    peer.send(request(1, max_new_tokens=4))
    _, updates = peer.read_request()
    tokens = [update.token for update in updates]
    peer.send(request(2, max_new_tokens=30))
    peer.send(EngineCall(3, "drain"))
    first = replace(request(4, max_new_tokens=4), progress=[[tokens[:2], None]])
    peer.send(first)
    continued: list[int | None] = []
    while not isinstance(message := peer.receive(), Reply):
        assert isinstance(message, StepOutputs) and message.cache is None
        items = [TokenUpdate(*item) for item in message.updates]
        continued += [update.token for update in items if update.request_id == 4]
    assert continued == tokens[2:]


def test_replica_reports_the_blocks_of_its_prefix_cache(run: Path) -> None:
    config = EngineConfig(cache=CacheConfig(num_blocks=6))
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(Path(folder), LLM(run, config=config), reports_cache=True)
        stored: set[int] = set()
        reports: list[CacheReport] = []
        for number in range(3):  # the pool has room for two
            prompt = [number] * 40
            peer.send(replace(request(number, max_new_tokens=2), prompt_token_ids=prompt))
            for _ in range(2):
                message = peer.receive()
                assert isinstance(message, StepOutputs) and message.cache is not None
                reports.append(CacheReport(*message.cache))
                stored = stored.difference(reports[-1].removed) | {*reports[-1].stored}
            assert set(compute_block_keys(prompt, 16, b"")) <= stored
        assert [report.sequence for report in reports] == list(range(6))
        assert any(report.removed for report in reports)
        assert [report.num_active_blocks for report in reports] == [3, 0] * 3
        listed = peer.call(1, "list_blocks")
        assert set(listed["keys"]) == stored and listed["next_sequence"] == 6
        peer.call(2, "reset_prefix_cache")
        peer.send(request(4, max_new_tokens=1))
        message = peer.receive()
        assert isinstance(message, StepOutputs) and message.cache is not None
        assert set(CacheReport(*message.cache).removed) == stored
        peer.close()


def test_drain_of_a_suspended_engine_finishes_requests(peer: Peer) -> None:
    suspension = {"kv_cache": "offload", "offload_weights": True}
    peer.send(EngineCall(1, "suspend", suspension))
    assert peer.receive() == Reply(1, {})
    assert peer.call(2, "stats")["state"] == "suspended"
    peer.send(request(1, deadline_s=0.01))
    message = peer.receive()  # deadlines pass
    assert isinstance(message, StepOutputs) and TokenUpdate(*message.updates[0]).is_timeout
    peer.send(request(2))
    peer.send(EngineCall(3, "drain"))
    peer.send(EngineCall(4, "suspend", suspension))
    updates: list[TokenUpdate] = []
    replies: list[Reply] = []
    while len(replies) < 2:
        message = peer.receive()
        if isinstance(message, StepOutputs):
            updates += [TokenUpdate(*item) for item in message.updates]
        else:
            assert isinstance(message, Reply)
            replies.append(message)
    assert [each.call_id for each in replies] == [4, 3]
    assert replies[0].result["status"] == 409
    assert "suspend: the server is shutting down" in replies[0].result["error"]
    assert len(updates) == 3 and updates[-1].finish_reason == "length"


def test_drain_fails_requests_if_the_engine_cannot_wake_up(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.send(EngineCall(1, "suspend", {"kv_cache": "offload", "offload_weights": True}))
    assert peer.receive() == Reply(1, {})
    peer.send(request(2))

    def fail(self: ReleasedStorage) -> None:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(ReleasedStorage, "allocate", fail)
        peer.send(EngineCall(3, "wake_up"))
        reply = peer.receive()
        assert isinstance(reply, Reply) and reply.result["status"] == 503
        assert peer.call(4, "stats")["state"] == "suspended"
        peer.send(EngineCall(5, "drain"))
        _, (update,) = peer.read_request()
        assert update.finish_reason == "error"
        assert "wake_up: the device memory does not suffice" in str(update.error)
        assert peer.receive() == Reply(5, {})
        peer.send(replace(request(6), progress=[[[1], None]]))  # of a replica that ended
        text = "the server is shutting down, and its engine could not wake up"
        assert peer.receive() == RequestRejected(6, 503, text)


def test_suspended_engine_waits_for_messages_also_if_it_is_not_paused(peer: Peer) -> None:
    engine, server = peer.server.engine, peer.server
    peer.send(EngineCall(1, "suspend", {"kv_cache": "offload", "offload_weights": False}))
    assert peer.receive() == Reply(1, {})
    peer.send(request(2))
    assert peer.call(3, "stats")["num_waiting"] == 1
    server._state = EngineState()  # as after a drain whose wake-up failed
    assert engine.has_unfinished and not server._can_step and server._wait_s() is None
    peer.call(4, "wake_up")
    assert len(peer.read_request()[1]) == 3


def test_abort_releases_blocks_before_the_next_step(peer: Peer) -> None:
    peer.send(request(1, max_new_tokens=200))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(AbortRequest(1))
    peer.send(AbortRequest(77))
    updates = list[Message]()
    message = peer.receive()
    while not (isinstance(message, StepOutputs) and message.updates[-1][5] == "abort"):
        updates.append(message)
        message = peer.receive()
    assert len(updates) < 190
    assert peer.call(2, "stats")["num_used_blocks"] == 0


def test_drain_of_a_paused_engine_finishes_requests(peer: Peer) -> None:
    peer.call(1, "pause")
    peer.send(request(1))
    assert peer.call(2, "stats")["num_waiting"] == 1  # no outputs before
    peer.send(EngineCall(3, "drain"))
    peer.send(EngineCall(4, "pause"))  # the drain goes on
    replies: list[Message] = []
    updates: list[TokenUpdate] = []
    while Reply(3, {}) not in replies:  # the pause is answered before or after the first step
        message = peer.receive()
        if isinstance(message, StepOutputs):
            updates += [TokenUpdate(*item) for item in message.updates]
        else:
            replies.append(message)
    assert replies == [Reply(4, {}), Reply(3, {})]
    assert len(updates) == 3 and updates[-1].finish_reason == "length"


def test_other_requests_run_while_a_grammar_is_compiled(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    grammars, released = peer.server.engine.grammars, threading.Event()
    assert grammars is not None
    compile_now = grammars.compile

    def compile_later(structure: StructuredOutputsParams) -> Any:
        assert released.wait(60)
        return compile_now(structure)

    monkeypatch.setattr(grammars, "compile", compile_later)
    for number, regex in ((1, "[a-c]{3}"), (2, "("), (3, "d")):
        peer.send(request(number, structured_outputs={"regex": regex}))
    peer.send(request(4))
    _, updates = peer.read_request()
    assert {update.request_id for update in updates} == {4}
    peer.send(AbortRequest(3))
    _, updates = peer.read_request()
    assert [update.finish_reason for update in updates] == ["abort"]
    peer.send(EngineCall(9, "drain"))
    assert peer.call(5, "stats")["num_requests"] == 0
    released.set()
    outputs: dict[int, str] = {}
    rejected = None
    while not isinstance(message := peer.receive(), Reply):  # of the drain
        if isinstance(message, RequestRejected):
            rejected = message
        else:
            assert isinstance(message, StepOutputs)
            for item in message.updates:
                update = TokenUpdate(*item)
                text = outputs.get(update.request_id, "")
                outputs[update.request_id] = text + update.text
    assert rejected is not None and (rejected.request_id, rejected.status) == (2, 400)
    assert rejected.message.startswith("structured_outputs.regex is not valid: unclosed group")
    assert outputs.keys() == {1} and re.fullmatch("[a-c]{3}", outputs[1])


def test_requests_that_end_before_their_grammar_is_compiled_are_answered(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    grammars, released = peer.server.engine.grammars, threading.Event()
    assert grammars is not None
    compile_now, compiled = grammars.compile, list[str | None]()

    def compile_later(structure: StructuredOutputsParams) -> Any:
        if threading.current_thread() is not peer.thread:
            compiled.append(structure.regex)
        assert released.wait(60)
        return compile_now(structure)

    monkeypatch.setattr(grammars, "compile", compile_later)
    for number, regex in enumerate(("a", "b", "c", "a", "d")):  # two are compiled at a time
        peer.send(request(number, structured_outputs={"regex": regex}, n=2))
    peer.send(request(5, structured_outputs={"regex": "e"}, deadline_s=0.01))
    ended = {}
    for number in (5, 0, 2):
        if number != 5:
            peer.send(AbortRequest(number))
        prompt, updates = peer.read_request()
        assert {prompt.request_id, *(each.request_id for each in updates)} == {number}
        ended[number] = updates
    assert [update.choice for update in ended[0]] == [0, 1]
    assert {each.finish_reason for each in ended[0] + ended[2]} == {"abort"}
    (expired,) = ended[5]
    assert expired.is_timeout and "deadline_s=0.01" in (expired.error or "")
    peer.send(EngineCall(9, "drain"))
    released.set()
    texts: dict[int, str] = {}
    while not isinstance(message := peer.receive(), Reply):
        assert isinstance(message, StepOutputs)
        for update in (TokenUpdate(*item) for item in message.updates):
            texts[update.request_id] = texts.get(update.request_id, "") + update.text
    assert texts == {1: "bb", 3: "aa", 4: "dd"}
    assert sorted(map(str, compiled)) == ["a", "b", "d"]


def test_metrics_measure_the_latency_of_a_slow_model(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = EngineMetrics("tiny", AccessLog(log_prompts=False))
    llm = LLM(run, callbacks=[metrics])
    runner, clock = llm.engine.runner, SimpleNamespace(now=0.0)
    execute = runner.execute

    def execute_slowly(*args: Any) -> Any:
        clock.now += 0.25
        return execute(*args)

    for module in (engine, serving_metrics):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(runner, "execute", execute_slowly)
    llm.generate([[1, 2]], SamplingParams(max_new_tokens=6, ignore_eos=True))
    text = metrics.render(llm.engine.scheduler.make_stats())
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def value(name: str) -> float:
        return float(samples[f'megalith_{name}{{model_name="tiny"}}'])

    assert value("time_to_first_token_seconds_sum") == 0.25
    assert value("inter_token_latency_seconds_count") == 5
    assert value("inter_token_latency_seconds_sum") == 5 * 0.25


def test_metrics_count_drafts_by_position(run: Path) -> None:
    metrics = EngineMetrics("tiny", AccessLog(log_prompts=False))
    config = EngineConfig(speculation=SpeculationConfig(method="ngram", num_draft_tokens=3))
    llm = LLM(run, config=config, callbacks=[metrics])
    for _ in range(2):  # counters go on
        llm.generate([[1, 2] * 9], SamplingParams(max_new_tokens=40, temperature=0.0))
        stats = llm.engine.scheduler.make_stats()
        text = metrics.render(stats)
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def value(name: str, labels: str = "") -> float:
        return float(samples[f'megalith_spec_decode_{name}_total{{model_name="tiny"{labels}}}'])

    assert value("num_drafts") == stats.num_drafts > 0
    assert value("num_draft_tokens") == sum(stats.num_draft_tokens_per_pos)
    per_position = [
        value("num_accepted_tokens_per_pos", f',position="{position}"')
        for position in range(len(stats.num_accepted_tokens_per_pos))
    ]
    assert per_position == list(stats.num_accepted_tokens_per_pos)
    assert value("num_accepted_tokens") == sum(per_position) > 0


def test_error_after_the_first_event_ends_the_stream_without_done() -> None:
    async def fail() -> Any:
        yield b"data: 2\n\n"
        raise ApiError(500, "it failed")

    async def read() -> bytes:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        none: Any = None
        state = ServerState(ServeConfig(), none, HttpMetrics("tiny"))
        stream = EventStream(b"data: 1\n\n", fail(), state=state, request_id="r")
        await stream({}, receive, send)
        assert not sent[-1]["more_body"]
        return b"".join(message.get("body", b"") for message in sent)

    assert asyncio.run(read()) == (
        b'data: 1\n\ndata: 2\n\ndata: {"error":{"message":"it failed","type":"server_error",'
        b'"param":null,"code":null}}\n\n'
    )


def test_stream_is_closed_if_the_client_disconnects_before_its_start() -> None:
    closed = []

    async def generate_events() -> Any:
        try:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"
        finally:
            closed.append(True)

    async def start() -> None:
        async def send(message: Any) -> None:
            raise OSError("the client is gone")

        async def receive() -> Any:
            await asyncio.sleep(60)

        none: Any = None
        state = ServerState(ServeConfig(), none, HttpMetrics("tiny"))
        events = generate_events()
        stream = EventStream(await anext(events), events, state=state, request_id="r")
        with pytest.raises(OSError, match="the client is gone"):
            await stream({}, receive, send)
        assert closed

    asyncio.run(start())


def test_control_request_is_rejected_while_the_server_shuts_down() -> None:
    client: Any = SimpleNamespace(failed=None)
    state = ServerState(ServeConfig(enable_admin=True), client, HttpMetrics("tiny"))
    state.is_draining = True
    for function in (pause, resume, reset_prefix_cache):
        with pytest.raises(ApiError, match="the server is shutting down") as raised:
            asyncio.run(function(state, RequestContext("r", "/path")))
        assert raised.value.status == 503


def test_outputs_that_waited_are_one_delta() -> None:
    async def read() -> list[Any]:
        generation = Generation(1, [None])
        for _ in range(50):
            generation.put(0, TokenUpdate(0, 0, 97, "a", None, None, None, None, False))
        generation.put(0, TokenUpdate(0, 0, 98, "b", None, "context", None, None, False))
        return [batch async for batch in iterate_deltas(generation, interval=1)]

    ((((key, delta),)),) = asyncio.run(read())
    assert key == (0, 0) and delta.text == "a" * 50 + "b"
    assert len(delta.token_ids) == 51 and delta.finish_reason == "length"


def test_batch_file_with_an_invalid_line_is_rejected() -> None:
    good = '{"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "x"}}'
    assert [request.custom_id for request in read_batch(good + "\n\n", "f")] == ["1"]
    for line, text in (
        ("{", "f:2: not valid JSON"),
        ("[]", "f:2: not a JSON object"),
        (good, "f:2: custom_id='1' is also in line 1"),
        ('{"url": "/v1/completions"}', "custom_id=None must be a string"),
        ('{"custom_id": "2", "url": "/v1/files", "body": {}}', "url='/v1/files' must be one of"),
        ('{"custom_id": "2", "method": "GET"}', "method='GET' must be POST"),
        ('{"custom_id": "2", "url": "/v1/completions"}', "body=None must be an object"),
        (good.replace('"1"', '"2"').replace('"x"', '"x", "stream": true'), "stream=true"),
    ):
        with pytest.raises(DataError) as raised:
            read_batch(f"{good}\n{line}", "f")
        assert text in str(raised.value)


def test_generation_defaults_apply_to_fields_that_a_request_leaves_out() -> None:
    info = ModelInfo(
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
        generation_defaults={"temperature": 0.5, "top_k": 7},
    )
    none: Any = None
    model = build_served_model("m", info)
    for choice, temperature, top_k in (("model", 0.9, 7), ("none", 0.9, None)):
        config = replace(ServeConfig(), generation_defaults=choice, request_timeout_s=9.0)  # type: ignore[arg-type]  # one of the literals
        state = ServerState(config, none, HttpMetrics("m"))
        params = read_params({"temperature": 0.9}, model, state, logprobs=(None, "logprobs"))
        assert (params.temperature, params.top_k) == (temperature, top_k)
        assert params.deadline_s == 9.0


def test_http_process_does_not_load_torch() -> None:
    code = "import sys, megalith.serve.server, megalith.serve.batch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_benchmark_counts_latencies_from_token_times() -> None:
    request = RequestTimes(1.0, [1.5, 1.6, 1.8], num_tokens=5, finished=2.5)
    failed = RequestTimes(1.0, error="no")
    summary = summarize([request, failed], 2.0)
    assert summary["num_failed"] == 1 and summary["output_tokens_per_second"] == 2.5
    assert summary["ttft_ms"]["p50"] == 500 and summary["e2e_ms"]["p99"] == 1500
    assert summary["tpot_ms"]["p90"] == 250
    assert summary["itl_ms"]["p50"] == pytest.approx(150)


def test_arrivals_are_a_poisson_process() -> None:
    workload = BenchmarkWorkload(
        num_prompts=4000, input_len=1, output_len=1, request_rate=5.0, vocab_size=9
    )
    gaps = [b - a for a, b in pairwise(workload.arrivals())]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    # 5 standard errors: 1 / sqrt(4000) of the mean, and sqrt(8 / 4000) of the variance
    assert mean == pytest.approx(0.2, rel=0.08) and variance == pytest.approx(0.04, rel=0.23)


def test_documentation_has_the_endpoints_of_the_server() -> None:
    page = (ROOT / "docs" / "howto" / "serve.md").read_text()
    rows = re.findall(r"^\| `(?:GET|POST|PUT) .* \|$", page, re.MULTILINE)
    expected = [
        "| `GET /` | chat page |",
        "| `GET /metrics` | metrics in the format of Prometheus |",
    ]
    for endpoint in ENDPOINTS:
        paths = ", ".join(f"`{endpoint.method} {path}`" for path in endpoint.paths)
        expected.append(f"| {paths} | {endpoint.summary} |")
    assert sorted(rows) == sorted(expected)


def test_only_the_exact_key_is_accepted() -> None:
    keys = ("one", "two")
    check_api_key({"authorization": "Bearer two"}, keys)
    check_api_key({}, ())
    for given in ("", "Bearer", "Bearer on", "Bearer ones", "one", "Basic one", "Bearer \u00e9"):
        with pytest.raises(ApiError) as raised:
            check_api_key({"authorization": given}, keys)
        assert raised.value.status == 401 and raised.value.code == "invalid_api_key"


def test_port_in_use_is_reported() -> None:
    with open_listener(ServeConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: another program listens"):
            open_listener(ServeConfig(port=port))
    with pytest.raises(ConfigError, match="cannot listen there"):
        open_listener(ServeConfig(host="192.0.2.1", port=0))


@pytest.mark.parametrize(
    "config, text",
    [
        (ServeConfig(port=70000), "server.port=70000"),
        (ServeConfig(max_queue=0), "server.max_queue=0"),
        (ServeConfig(api_key=("a b ",)), "--api-key: a key must have"),
        (ServeConfig(ssl_certfile="x.pem"), "--ssl-keyfile=None: TLS needs both"),
        (ServeConfig(max_requests_per_key=0, api_key=("k",)), "server.max_requests_per_key=0"),
        (ServeConfig(enable_admin=True), "--enable-admin: there are no keys, so everyone could"),
        (ServeConfig(max_requests_per_key=2), "--max-requests-per-key=2: there are no keys"),
        (ServeConfig(cors_origins=("example.com",)), "--cors-origins=example.com: must be * or"),
        (ServeConfig(cors_origins=("https://a.b/",)), "--cors-origins=https://a.b/: must be"),
        (ServeConfig(cors_origins=("https://*",)), "--cors-origins=https://*: must be"),
        (ServeConfig(served_model_name=""), "--served-model-name is empty"),
    ],
)
def test_invalid_settings_are_reported(config: ServeConfig, text: str) -> None:
    assert any(text in problem for problem in serve_problems(ServeRun(server=config)))


def test_missing_packages_are_reported_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "find_spec", lambda name: None if name == "zmq" else object())
    with pytest.raises(
        ConfigError, match=r'needs pyzmq. Install with: pip install "megalith\[serve\]"'
    ):
        transport.check_packages("megalith serve")


def test_many_logprobs_are_built_on_another_thread() -> None:
    async def build(num_positions: int) -> bool:
        thread = await run_if_large(threading.current_thread, num_positions)
        return thread is threading.main_thread()

    assert asyncio.run(build(255)) and not asyncio.run(build(256))


def test_characters_of_a_context_are_those_of_its_longest_token() -> None:
    assert count_prompt_characters(ByteTokenizer(), 10) == 10 * len("<|endoftext|>")
    assert count_prompt_characters(NullTokenizer(12), 10) is None

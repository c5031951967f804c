"""Streamed events: their bytes, and which of them are sent without the reader of a generation."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import h11
import pytest
from openai import BaseModel
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from megalith.config.generation import SamplingParams
from megalith.config.server import ServeConfig
from megalith.data.tokenizer import ByteTokenizer
from megalith.infer.outputs import TokenOutput
from megalith.serve.chat import ChatRequest, EncodedConversation, _ChatResponse
from megalith.serve.choices import iterate_deltas
from megalith.serve.completions import CompletionRequest, EncodedPrompt, _CompletionResponse
from megalith.serve.engine_server import make_update_array
from megalith.serve.errors import ApiError
from megalith.serve.generation import DirectStream, Generation
from megalith.serve.http_protocol import StreamConnection
from megalith.serve.metrics import HttpMetrics
from megalith.serve.protocol import TokenUpdate, to_array
from megalith.serve.responses import ResponsesRequest, _Response
from megalith.serve.sampling_fields import RequestOptions
from megalith.serve.sse import DONE, TextEvent, event
from megalith.serve.state import ServerState
from megalith.serve.token_text import TokenTexts
from megalith.serve.tools import OutputFormat

TEXTS = ("a", " b", "é", "日本", "🧱", '"\\/', "\n\t\r", "\x00\x1f\x7f", "\u2028\u2029", "\ufffd")
WEATHER = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'
Steps = Sequence[Sequence[TokenUpdate]]
"""Updates of each step of the engine."""


def update(
    text: str, *, choice: int = 0, token: int = 97, logprobs: Any = None, end: Any = None
) -> TokenUpdate:
    """A token with its text, the last of its choice with a finish reason."""
    return TokenUpdate(0, choice, token, text, logprobs, end, None, None, False)


class Client:
    """Stands for the client of an engine: one generation, which the test fills."""

    failed = None

    def __init__(self, num_choices: int) -> None:
        self.generation = Generation(num_choices, [None])

    @asynccontextmanager
    async def generate(self, requests: Any, *, uid: str) -> AsyncIterator[Generation]:
        yield self.generation


class ChunkRecorder:
    """Records the chunks of a stream."""

    def __init__(self) -> None:
        self.is_ready = True
        self.chunks: list[bytes] = []
        self.num_written = 0

    def write(self, data: bytes) -> None:
        """Record a chunk that is sent without the reader."""
        self.chunks.append(data)
        self.num_written += 1

    def hold(self, data: bytes) -> None:
        """Record the last chunk."""
        self.chunks.append(data)


async def read_stream(
    stream: AsyncGenerator[bytes, None], generation: Generation, steps: Steps, writer: ChunkRecorder
) -> None:
    """Read a stream while the engine makes its steps; one at a time is read completely."""

    async def read() -> None:
        async for data in stream:
            writer.chunks.append(data)

    reader = asyncio.create_task(read())
    for step in steps:
        for _ in range(5):
            await asyncio.sleep(0)
        for each in step:
            generation.add(0, each)
        generation.deliver()
    await reader


def build_state(num_choices: int) -> tuple[ServerState, Generation, Any]:
    """The state of a server, the only generation of its client, and its model."""
    client: Any = Client(num_choices)
    model: Any = SimpleNamespace(name='a "model" é', adapter=None, tokenizer=ByteTokenizer())
    state = ServerState(ServeConfig(), client, HttpMetrics("m"))
    state.texts = TokenTexts(model.tokenizer)
    return state, client.generation, model


def stream_completion(
    steps: Steps, writer: ChunkRecorder, *, is_direct: bool, usage: bool = True, **params: Any
) -> list[bytes]:
    """The events of a completion."""

    async def run() -> None:
        sampling = SamplingParams(**params)
        state, generation, model = build_state(sampling.n)
        options = RequestOptions(model, stream=True, include_usage=usage, interval=1)
        request = CompletionRequest(options, [EncodedPrompt([1], None)], [sampling], False, False)
        stream = _CompletionResponse(request, state).stream("u", writer if is_direct else None)
        await read_stream(stream, generation, steps, writer)

    asyncio.run(run())
    return split_events(writer)


def stream_chat(
    steps: Steps,
    writer: ChunkRecorder,
    *,
    is_direct: bool,
    output: OutputFormat | None = None,
    has_reasoning: bool = False,
    num_top: int | None = None,
    **params: Any,
) -> list[bytes]:
    """The events of a chat completion."""

    async def run() -> None:
        sampling = SamplingParams(**params)
        state, generation, model = build_state(sampling.n)
        conversation = EncodedConversation(
            model, [1], sampling, output or OutputFormat(), has_reasoning
        )
        options = RequestOptions(model, stream=True, include_usage=True, interval=1)
        request = ChatRequest(conversation, options, num_top, False)
        stream = _ChatResponse(request, state).stream("u", writer if is_direct else None)
        await read_stream(stream, generation, steps, writer)

    asyncio.run(run())
    return split_events(writer)


def split_events(writer: ChunkRecorder) -> list[bytes]:
    """The events of all chunks but the last, [DONE]."""
    events = b"".join(writer.chunks).split(b"\n\n")
    assert events[-2:] == [DONE.strip(), b""]
    return [each + b"\n\n" for each in events[:-2]]


def mask(events: Sequence[bytes]) -> list[Any]:
    """The JSON of events without what differs between two streams."""
    documents = [json.loads(each.removeprefix(b"data: ")) for each in events]
    for document in documents:
        document["id"] = document["created"] = None
        for choice in document["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                call["id"] = None
    return documents


def check_bytes(events: Sequence[bytes], schema: type[BaseModel]) -> None:
    """Check that events are the encoded form of their JSON, which the official client reads
    without a loss."""
    for each in events:
        document = json.loads(each.removeprefix(b"data: "))
        assert event(document) == each
        dumped = schema.construct(**document).model_dump(exclude_unset=True, by_alias=True)
        assert dumped == document


def test_event_with_a_text_has_the_bytes_of_an_encoded_event() -> None:
    for seed in range(100):
        generator = random.Random(seed)
        text = "".join(
            chr(generator.choice((32, 34, 92, 0x7F, 0x2028, 0xE9, 0x1F9F1))) for _ in "12345"
        )
        name = "".join(generator.choice(TEXTS) for _ in range(3))

        def build(content: str, name: str = name) -> dict[str, Any]:
            return {"model": name, "choices": [{"delta": {"content": content}}], "usage": None}

        assert TextEvent(build).encode(text) == event(build(text)), seed


def test_unpaired_surrogate_in_a_text_is_an_error_in_both_forms() -> None:
    text_event = TextEvent(lambda text: {"text": text})
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        text_event.encode("\ud800")
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        event({"text": "\ud800"})


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("usage", [True, False])
def test_directly_sent_completion_has_the_bytes_of_a_read_one(n: int, usage: bool) -> None:
    steps = [[update(text, choice=choice) for choice in range(n)] for text in (*TEXTS, "")]
    steps.append([update("end", choice=choice, end="length") for choice in range(n)])
    direct, read = ChunkRecorder(), ChunkRecorder()
    events = stream_completion(steps, direct, is_direct=True, usage=usage, n=n)
    assert mask(events) == mask(stream_completion(steps, read, is_direct=False, usage=usage, n=n))
    check_bytes(events, Completion)
    assert direct.num_written == len(TEXTS) - 2 and read.num_written == 0
    documents = mask(events)
    assert [list(document) for document in documents[:-1]] == [list(documents[0])] * (
        len(documents) - 1
    )
    for choice in range(n):
        texts = [
            each["text"]
            for document in documents
            for each in document["choices"]
            if each["index"] == choice
        ]
        assert texts == [*TEXTS, "end"]
    if usage:
        assert documents[-1]["usage"]["completion_tokens"] == n * (len(TEXTS) + 2)


def test_tokens_of_a_choice_in_one_step_are_one_event() -> None:
    steps = [[update("a")], [update("b")], [update("c"), update(""), update("d")]]
    writer = ChunkRecorder()
    events = mask(stream_completion([*steps, [update("", end="stop")]], writer, is_direct=True))
    texts = [choice["text"] for document in events for choice in document["choices"]]
    assert texts == ["a", "b", "cd", ""] and writer.num_written == 1
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_logprobs_are_sent_by_the_reader() -> None:
    logprobs = [97, -0.5, [[97, -0.5], [98, -float("inf")]]]
    steps = [[update("a", logprobs=logprobs)] for _ in range(4)]
    steps.append([update("a", logprobs=logprobs, end="length")])
    writer = ChunkRecorder()
    events = stream_completion(steps, writer, is_direct=True, logprobs=1)
    check_bytes(events, Completion)
    assert writer.num_written == 0
    (choice,) = mask(events)[2]["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -9999.0}],
        "text_offset": [2],
    }
    writer = ChunkRecorder()
    events = stream_chat(steps, writer, is_direct=True, num_top=1, logprobs=1)
    check_bytes(events, ChatCompletionChunk)
    assert writer.num_written == 0
    content = mask(events)[2]["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("a", [97])]


@pytest.mark.parametrize("n", [1, 3])
def test_directly_sent_chat_has_the_bytes_of_a_read_one(n: int) -> None:
    steps = [[update(text, choice=choice) for choice in range(n)] for text in (*TEXTS, "")]
    steps.append([update("", choice=choice, end="stop") for choice in range(n)])
    direct = ChunkRecorder()
    events = stream_chat(steps, direct, is_direct=True, n=n)
    assert mask(events) == mask(stream_chat(steps, ChunkRecorder(), is_direct=False, n=n))
    check_bytes(events, ChatCompletionChunk)
    assert direct.num_written == len(TEXTS) - 1
    documents = mask(events)
    for choice in range(n):
        deltas = [
            each["delta"]
            for document in documents
            for each in document["choices"]
            if each["index"] == choice
        ]
        assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
        assert [delta["content"] for delta in deltas[1:-1]] == list(TEXTS)
    assert documents[-1]["usage"]["completion_tokens"] == n * (len(TEXTS) + 2)


def test_tool_calls_and_reasoning_are_sent_directly_when_they_are_complete() -> None:
    output = OutputFormat(
        schemas={"weather": {}},
        tool_choice="auto",
        reasoning_parser="deepseek-r1",
        tool_call_parser="hermes",
    )
    text = "I think</think>Let me look: " + WEATHER
    steps = [[update(char)] for char in text]
    steps.append([update("", end="stop")])
    direct = ChunkRecorder()
    events = stream_chat(steps, direct, is_direct=True, output=output, has_reasoning=True)
    read = stream_chat(steps, ChunkRecorder(), is_direct=False, output=output, has_reasoning=True)
    assert mask(events) == mask(read) and direct.num_written > 15
    for each in events:
        assert event(json.loads(each.removeprefix(b"data: "))) == each
    deltas = [choice["delta"] for document in mask(events) for choice in document["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I think"
    assert "".join(delta.get("content", "") for delta in deltas).strip() == "Let me look:"
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Zürich"}
    assert mask(events)[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_directly_sent_response_has_the_events_of_a_read_one() -> None:
    def stream(writer: ChunkRecorder, *, is_direct: bool) -> list[Any]:
        async def run() -> None:
            state, generation, model = build_state(1)
            conversation = EncodedConversation(model, [1], SamplingParams(), OutputFormat(), False)
            echoed = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
            options = RequestOptions(model, stream=True, include_usage=False, interval=1)
            request = ResponsesRequest(conversation, options, None, echoed)
            stream = _Response(request, state).stream("u", writer if is_direct else None)
            steps = [[update(text)] for text in TEXTS]
            await read_stream(stream, generation, [*steps, [update("", end="stop")]], writer)

        asyncio.run(run())
        lines = b"".join(writer.chunks).decode().split("\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    direct = ChunkRecorder()
    events = stream(direct, is_direct=True)
    read = stream(ChunkRecorder(), is_direct=False)
    assert direct.num_written == len(TEXTS) - 1
    assert [each["type"] for each in events] == [each["type"] for each in read]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each.get("delta") for each in events] == [each.get("delta") for each in read]
    usage = events[-1]["response"]["usage"]
    assert usage == read[-1]["response"]["usage"] and usage["output_tokens"] == len(TEXTS) + 1


def join_texts(updates: Sequence[tuple[int, TokenUpdate]]) -> bytes:
    """The text of updates."""
    return "".join(each.text for _, each in updates).encode()


def test_slow_client_gets_the_updates_of_its_reader_in_order() -> None:
    writer = ChunkRecorder()

    async def run() -> list[str]:
        generation = Generation(1, [None])
        generation.direct = DirectStream(
            writer,
            lambda updates: None if updates[-1][1].finish_reason else join_texts(updates),
        )
        texts: list[str] = []
        client_reads = asyncio.Event()

        async def read() -> None:
            async for batch in iterate_deltas(generation, interval=1):
                texts.extend(delta.text for _, delta in batch)
                writer.chunks += [delta.text.encode() for _, delta in batch]
                await client_reads.wait()

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        generation.put(0, update("a"))
        writer.is_ready = False
        generation.put(0, update("b"))
        generation.put(0, update("c"))
        await asyncio.sleep(0)
        writer.is_ready = True
        generation.put(0, update("d"))  # the reader does not wait: it is still sending
        client_reads.set()
        for _ in range(5):
            await asyncio.sleep(0)
        generation.put(0, update("e"))
        generation.put(0, update("f", end="length"))
        await reader
        return texts

    assert asyncio.run(run())[0] == "bc"
    assert b"".join(writer.chunks) == b"abcdef"
    assert writer.chunks == [b"a", b"bc", b"d", b"e", b"f"]


def test_error_while_updates_are_encoded_reaches_the_reader() -> None:
    def fail(updates: Any) -> bytes:
        raise ValueError("cannot be encoded")

    async def run() -> None:
        generation = Generation(1, [None])
        generation.direct = DirectStream(ChunkRecorder(), fail)
        reader = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        generation.put(0, update("a"))
        with pytest.raises(ValueError, match="cannot be encoded"):
            await reader

    asyncio.run(run())


def test_failed_generation_ends_its_reader_after_updates_that_were_sent_directly() -> None:
    async def run() -> list[bytes]:
        generation, writer = Generation(1, [None]), ChunkRecorder()
        generation.direct = DirectStream(writer, lambda updates: b"x" * len(updates))
        reader = asyncio.create_task(generation.next())
        await asyncio.sleep(0)
        generation.put(0, update("a"))
        generation.fail(ApiError(503, "it ended"))
        with pytest.raises(ApiError, match="it ended"):
            await reader
        return writer.chunks

    assert asyncio.run(run()) == [b"x"]


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock advances only while it waits, so that a slow machine changes
    nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now, selector = 0.0, self._selector  # type: ignore[attr-defined]  # of asyncio
        select = selector.select

        def advance(timeout: float | None = None) -> Any:
            self._now += timeout or 0.0
            return select(0)

        selector.select = advance

    def time(self) -> float:
        """Return the time of this clock in seconds."""
        return self._now


def test_wait_ends_when_nothing_was_sent_for_its_time() -> None:
    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        generation, writer = Generation(1, [None]), ChunkRecorder()
        sent = b"x"
        generation.direct = DirectStream(writer, lambda updates: sent)
        durations = []
        for _ in range(2):
            started = loop.time()
            for delay in (0.03, 0.06):  # each restarts the wait of 0.05 s, or not
                loop.call_later(delay, generation.put, 0, update("a"))
            assert await generation.next(timeout=0.05) == []
            durations.append(loop.time() - started)
            await asyncio.sleep(0.02)  # for the last update
            if generation._updates:
                await generation.next()
            sent = b""
        generation.close()
        return durations

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(run()) == pytest.approx([0.11, 0.05])


def test_array_of_an_output_is_that_of_its_update() -> None:
    output = TokenOutput(9, 1, 97, "a", None, "stop", "b", "failed", is_request_error=True)
    expected = TokenUpdate(3, 1, 97, "a", None, "stop", "b", "failed", False, True)
    assert make_update_array(output, 3, is_timeout=True) == to_array(expected)


# --- HTTP/1.1


def exchange(connection: h11.Connection, request: bytes, response: h11.Response) -> list[bytes]:
    """The bytes of a response with some chunks, and what happens after its end."""
    connection.receive_data(request)
    while connection.next_event() is not h11.NEED_DATA:
        if connection.their_state is h11.DONE or connection.their_state is h11.MUST_CLOSE:
            break
    chunks = [b"", b"a", b"data: b\n\n", b"x" * 70_000, b""]
    events = [response, *(h11.Data(data=data) for data in chunks), h11.EndOfMessage()]
    return [bytes(connection.send(each) or b"") for each in events]


@pytest.mark.parametrize(
    ("request_line", "headers"),
    [
        (b"POST / HTTP/1.1", []),
        (b"GET / HTTP/1.1", [("transfer-encoding", "chunked")]),
        (b"GET / HTTP/1.1", [("content-length", "70010")]),
        (b"GET / HTTP/1.0", []),
    ],
)
def test_chunks_have_the_bytes_of_h11(request_line: bytes, headers: list[tuple[str, str]]) -> None:
    request = request_line + b"\r\nHost: a\r\nContent-Length: 0\r\n\r\n"
    response = h11.Response(status_code=200, headers=[("x-request-id", "1"), *headers])
    connection, reference = StreamConnection(h11.SERVER), h11.Connection(h11.SERVER)
    head, empty, first, *expected = exchange(reference, request, response)
    # the head is sent with what follows it
    parts = exchange(connection, request, response)
    assert parts == [b"", empty, head + first, *expected] and not empty
    assert connection.our_state is reference.our_state
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"after the end"))


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_part_of_a_body_has_the_bytes_of_its_event(version: bytes) -> None:
    request = b"GET / HTTP/" + version + b"\r\nHost: a\r\n\r\n"
    outputs = []
    for connection in (StreamConnection(h11.SERVER), h11.Connection(h11.SERVER)):
        connection.receive_data(request)
        connection.next_event()
        output = bytes(connection.send(h11.Response(status_code=200, headers=[])) or b"")
        for data in (b"a", b"", b"b"):
            if isinstance(connection, StreamConnection):
                output += connection.encode_chunk(data)
            else:
                output += connection.send(h11.Data(data=data)) or b""
        outputs.append(output + (connection.send(h11.EndOfMessage()) or b""))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_last_part_of_a_body_is_sent_with_its_end(version: bytes) -> None:
    connection, reference = StreamConnection(h11.SERVER), h11.Connection(h11.SERVER)
    for each in (connection, reference):
        each.receive_data(b"GET / HTTP/" + version + b"\r\nHost: a\r\n\r\n")
        each.next_event()
    response = h11.Response(status_code=200, headers=[])
    assert connection.send(response) == b""
    connection.hold(b"data: [DONE]\n\n")
    assert connection.send(h11.Data(data=b"")) == b""
    events = [response, h11.Data(data=b"data: [DONE]\n\n"), h11.EndOfMessage()]
    expected = b"".join(reference.send(each) or b"" for each in events)
    assert connection.send(h11.EndOfMessage()) == expected


def test_connection_sends_several_responses() -> None:
    connection, reference = StreamConnection(h11.SERVER), h11.Connection(h11.SERVER)
    request = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    for headers in ([], [("content-length", "70010")], []):
        response = h11.Response(status_code=200, headers=headers)
        parts = exchange(connection, request, response)
        assert b"".join(parts) == b"".join(exchange(reference, request, response))
        connection.start_next_cycle()
        reference.start_next_cycle()

"""Endpoints of a running server, compared with the model in this process."""

import asyncio
import base64
import hashlib
import json
import math
import random
import re
import socket
import threading
import time
from typing import Any

import httpx2
import openai
import pytest

from megalith.cli.main import main
from megalith.config.generation import SamplingParams
from megalith.infer.llm import LLM
from megalith.infer.outputs import RequestOutput
from tests.serve.servers import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
PROMPT_OF_HELLO = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
ONLY_A = {"model": "tiny", "allowed_token_ids": [97], "temperature": 0}
"""Every token of the output is "a"."""


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    """The JSON response of a request that succeeds."""
    response = server.post(path, {"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def read_events(text: str) -> list[Any]:
    """The JSON data of server-sent events, without the [DONE] at the end."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def stream(server: Server, path: str, **body: Any) -> list[Any]:
    """The events of a stream."""
    response = server.post(path, {"model": "tiny", "stream": True} | body)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    assert response.headers["cache-control"] == "no-cache"
    return read_events(response.text)


def generate(llm: LLM, prompt: str | list[int], **params: Any) -> RequestOutput:
    """The same request in this process."""
    (output,) = llm.generate([prompt], SamplingParams(**params))
    return output


# --- completions


def test_completion_equals_generation_in_this_process(server: Server, llm: LLM) -> None:
    params: dict[str, Any] = {"seed": 3, "n": 2, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    document = post(server, COMPLETIONS, prompt=["hello", "a"], max_tokens=7, **params)
    expected = [generate(llm, text, max_new_tokens=7, **params) for text in ("hello", "a")]
    completions = [completion for output in expected for completion in output.outputs]
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in document["choices"]] == [c.text for c in completions]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length"] * 4
    assert document["object"] == "text_completion" and document["id"].startswith("cmpl-")
    usage = document["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 28)
    assert usage["total_tokens"] == 34


def test_top_k_above_the_vocabulary_is_all_tokens(server: Server) -> None:
    body: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "seed": 3, "temperature": 1.5}
    texts = [
        post(server, COMPLETIONS, **body, top_k=k)["choices"][0]["text"] for k in (0, 2**31 - 1)
    ]
    assert texts[0] == texts[1]


def test_default_is_sixteen_tokens(server: Server) -> None:
    document = post(server, COMPLETIONS, prompt="x", ignore_eos=True)
    assert document["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169], ["hé"], [[104, 195, 169]]])
def test_prompt_has_four_shapes(server: Server, prompt: Any) -> None:
    document = post(server, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
    (choice,) = document["choices"]
    assert choice["text"] == "hé" and choice["finish_reason"] == "length"
    assert document["usage"]["prompt_tokens"] == 3
    assert document["usage"]["completion_tokens"] == 0


def test_echoed_logprobs_have_equal_lengths_and_null_first(server: Server, llm: LLM) -> None:
    document = post(
        server, COMPLETIONS, prompt="hello", echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    logprobs = document["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    assert logprobs["tokens"][:5] == list("hello")
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    output = generate(llm, "hello", max_new_tokens=3, temperature=0, logprobs=2, prompt_logprobs=2)
    assert output.prompt_logprobs is not None
    expected = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    for value, entry in zip(logprobs["token_logprobs"][1:], expected, strict=True):
        assert math.isclose(value, entry.logprob, abs_tol=1e-4)
    for top, value in zip(logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:]):
        assert value <= max(top.values()) and 2 <= len(top) <= 3
    # a client that scores text calls a token greedy if its log-prob is the largest
    assert logprobs["token_logprobs"][5] == max(logprobs["top_logprobs"][5].values())
    assert logprobs["text_offset"][:6] == [0, 1, 2, 3, 4, 5]


def test_logprobs_without_echo_have_no_null(server: Server) -> None:
    document = post(server, COMPLETIONS, prompt="hello", logprobs=0, max_tokens=3)
    logprobs = document["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {3}
    assert None not in logprobs["token_logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [1, 1, 1]


def test_stop_string_ends_and_is_reported(server: Server) -> None:
    document = post(server, COMPLETIONS, prompt="x", stop="aaa", max_tokens=9, **ONLY_A)
    (choice,) = document["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "aaa")
    assert document["usage"]["completion_tokens"] == 3


def test_cached_prompt_tokens_are_reported(server: Server) -> None:
    prompt = "a prompt of no other test " * 2
    counts = [
        post(server, COMPLETIONS, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
        for _ in range(2)
    ]
    assert [count["cached_tokens"] for count in counts] == [0, 48]


def test_token_ids_are_returned_on_request(server: Server) -> None:
    (choice,) = post(
        server, COMPLETIONS, prompt="xy", max_tokens=2, return_prompt_tokens=True, **ONLY_A
    )["choices"]
    assert choice["prompt_token_ids"] == [120, 121] and choice["generation_token_ids"] == [97, 97]


def test_max_tokens_are_truncated_on_request(server: Server) -> None:
    document = post(
        server,
        COMPLETIONS,
        prompt="x" * 250,
        max_tokens=100,
        truncate_to_fit=True,
        ignore_eos=True,
    )
    assert document["usage"]["completion_tokens"] == 6
    assert document["choices"][0]["finish_reason"] == "length"


# --- streams


@pytest.mark.parametrize("interval", [1, 3])
def test_stream_equals_the_complete_response(server: Server, interval: int) -> None:
    body: dict[str, Any] = {"prompt": ["hello", "z"], "n": 2, "seed": 5, "max_tokens": 20}
    body |= {"logprobs": 1, "echo": True}
    expected = post(server, COMPLETIONS, **body)
    options = {"stream_options": {"include_usage": True}, "streaming_interval": interval}
    *events, last = stream(server, COMPLETIONS, **body, **options)
    assert last["choices"] == [] and all(event["usage"] is None for event in events)
    usage, expected_usage = last["usage"], expected["usage"]
    del usage["prompt_tokens_details"], expected_usage["prompt_tokens_details"]
    assert usage == expected_usage
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    for choice in expected["choices"]:
        streamed = [event["choices"][0] for event in events]
        parts = [part for part in streamed if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}
        for name, values in choice["logprobs"].items():
            joined = [value for part in parts for value in part["logprobs"][name]]
            if name == "token_logprobs":
                assert joined[1:] == pytest.approx(values[1:], abs=1e-4)
                assert joined[0] is values[0] is None
            elif name != "top_logprobs":
                assert joined == values


def transcript(response: httpx2.Response) -> str:
    """The text of a stream with a fixed id and time."""
    text = re.sub(r'"id":"(\w+)-\w+"', r'"id":"\1-0"', response.text)
    return re.sub(r'"created":\d+', '"created":0', text)


def test_golden_completion_stream(server: Server) -> None:
    body = ONLY_A | {"prompt": "x", "max_tokens": 1, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    head = (
        'data: {"id":"cmpl-0","object":"text_completion","created":0,"model":"tiny",'
        '"system_fingerprint":null,"choices":'
    )
    assert transcript(server.post(COMPLETIONS, body)) == (
        f'{head}[{{"index":0,"text":"a","logprobs":null,"finish_reason":"length",'
        '"stop_reason":null}],"usage":null}\n\n'
        f'{head}[],"usage":{{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )


def test_golden_chat_stream(server: Server) -> None:
    body = ONLY_A | {"messages": HELLO, "max_tokens": 1, "stream": True}
    head = (
        'data: {"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"tiny",'
        '"system_fingerprint":null,"choices":[{"index":0,"delta":'
    )
    assert transcript(server.post(CHAT, body)) == (
        f'{head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{"content":"a"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}{{}},"logprobs":null,"finish_reason":"length","stop_reason":null}}]}}\n\n'
        "data: [DONE]\n\n"
    )


# --- chat


def test_chat_message_equals_generation_of_the_rendered_prompt(server: Server, llm: LLM) -> None:
    document = post(server, CHAT, messages=HELLO, seed=1, max_completion_tokens=6, n=2)
    output = generate(llm, PROMPT_OF_HELLO, seed=1, max_new_tokens=6, n=2)
    messages = [choice["message"] for choice in document["choices"]]
    assert [message["content"] for message in messages] == [c.text for c in output.outputs]
    assert messages[0]["role"] == "assistant" and messages[0]["refusal"] is None
    assert document["object"] == "chat.completion"
    assert document["usage"]["prompt_tokens"] == len(PROMPT_OF_HELLO)


def test_chat_logprobs_have_bytes_and_top_tokens(server: Server) -> None:
    (choice,) = post(
        server, CHAT, messages=HELLO, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]  # greedy
        assert len(entry["bytes"]) == 1


def test_content_parts_and_developer_role_render_as_text_and_system(server: Server) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    tokens = post(server, "/tokenize", messages=messages)["tokens"]
    assert bytes(tokens).decode() == "<|im_start|>system\nbe<|im_end|>\n" + PROMPT_OF_HELLO


# --- the other endpoints


def test_models_name_the_served_one(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 256 and model["object"] == "model"
    assert server.get("/v1/models/tiny").json() == model
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    document = post(server, "/tokenize", prompt="héllo")
    assert document == {"tokens": list("héllo".encode()), "count": 6, "max_model_len": 256}
    assert post(server, "/detokenize", tokens=document["tokens"])["prompt"] == "héllo"
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and "<|im_start|>" in info["chat_template"]


def test_health_ready_and_version_answer(server: Server) -> None:
    assert [server.get(path).status_code for path in ("/health", "/ready", "/version")] == [200] * 3


def test_request_id_of_the_client_is_returned(server: Server) -> None:
    response = server.get("/v1/models", headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    response = server.get("/v1/models", headers={"X-Request-Id": "a b"})
    assert response.headers["x-request-id"] != "a b"


def test_legacy_api_returns_the_prompt_with_its_continuation(server: Server, llm: LLM) -> None:
    body: dict[str, Any] = {"prompts": ["ab", "c"], "tokens_to_generate": 4, "random_seed": 6}
    response = server.client.put(server.url + "/api", json=body | {"logprobs": True, "top_k": 9})
    document = response.json()
    for index, prompt in enumerate(body["prompts"]):
        output = generate(llm, prompt, max_new_tokens=4, seed=6, top_k=9).outputs[0]
        assert document["text"][index] == prompt + output.text
        assert document["tokens"][index] == list(prompt.encode()) + output.token_ids
        assert len(document["logprobs"][index]) == len(prompt) + 3
    for change, param, text in (
        ({"prompts": []}, "prompts", "a list of 1 to 128 strings"),
        ({"beam_width": 2}, "beam_width", "Beam search is not supported"),
        ({"max_len": 9}, "max_len", "Use tokens_to_generate"),
        ({"top_p_decay": 0.5}, "top_p_decay", "not supported"),
        ({"temperature": 0}, "temperature", "Use top_k=1"),
        ({"temperature": 101}, "temperature", "at most 100"),
        ({"top_k": 1001}, "top_k", "from 0 to 1000"),
        ({"random_seed": -1}, "random_seed", "random_seed=-1"),
        ({"tokens_to_generate": 0}, "tokens_to_generate", "needs logprobs=true"),
        ({"tokens_to_generate": 999}, "tokens_to_generate", "Set tokens_to_generate to 254"),
        ({"add_BOS": True}, "add_BOS", "no such token"),
    ):
        response = server.client.put(server.url + "/api", json=body | change)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == param, error
        assert text in error["message"]


# --- invalid requests


def completion(**fields: Any) -> dict[str, Any]:
    """A completion request with some fields replaced."""
    return {"model": "tiny", "prompt": "x", "max_tokens": 1} | fields


def chat(**fields: Any) -> dict[str, Any]:
    """A chat request with some fields replaced."""
    return {"model": "tiny", "messages": HELLO, "max_tokens": 1} | fields


NESTED: Any = "x"
for _ in range(70):
    NESTED = [NESTED]

BAD_REQUESTS: tuple[tuple[str, Any, int, str | None, str], ...] = (
    (COMPLETIONS, completion(model="gpt"), 404, "model", "has no such model. Use 'tiny'"),
    (COMPLETIONS, {"prompt": "x"}, 400, "model", "model is missing. Use 'tiny'"),
    (COMPLETIONS, {"model": "tiny"}, 400, "prompt", "prompt is missing"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt", "empty list"),
    (COMPLETIONS, completion(prompt=[[]]), 400, "prompt", "prompt[0] has 0 tokens"),
    (COMPLETIONS, completion(prompt=3), 400, "prompt", "prompt is 3, but must be a string"),
    (COMPLETIONS, completion(prompt=["a", None]), 400, "prompt", "prompt[1] is None"),
    (COMPLETIONS, completion(prompt=[1, 300]), 400, "prompt", "prompt[1]=300: token ids"),
    (COMPLETIONS, completion(prompt=[1, True]), 400, "prompt", "other values than ids"),
    (COMPLETIONS, completion(prompt="a\ud800"), 400, "prompt", "unpaired surrogate (\\ud800)"),
    (COMPLETIONS, completion(prompt=NESTED), 400, "prompt", "nested more than 64 levels"),
    (COMPLETIONS, completion(prompt="x" * 256), 400, "prompt", "has 256 tokens, but the context"),
    (COMPLETIONS, completion(max_tokens=256), 400, "max_tokens", "Set max_tokens to 255 or less"),
    (COMPLETIONS, completion(max_tokens=-1), 400, "max_tokens", "max_tokens=-1 must be at least 0"),
    (COMPLETIONS, completion(max_tokens="9"), 400, "max_tokens", "max_tokens=9 must be an integer"),
    (COMPLETIONS, completion(temperature=-1), 400, "temperature", "temperature=-1"),
    (COMPLETIONS, completion(temperature="hot"), 400, "temperature", "a finite number"),
    (COMPLETIONS, completion(top_p=1.5), 400, "top_p", "top_p=1.5"),
    (COMPLETIONS, completion(top_k=-2), 400, "top_k", "top_k=-2"),
    (COMPLETIONS, completion(n=129), 400, "n", "n=129"),
    (COMPLETIONS, completion(n=10**6), 400, "n", "n=1000000"),
    (COMPLETIONS, completion(n=True), 400, "n", "n=True must be an integer"),
    (COMPLETIONS, completion(prompt=["x"] * 20, n=100), 400, "n", "2000 sequences"),
    (COMPLETIONS, completion(best_of=2), 400, "best_of", "best_of=2 must be n=1"),
    (COMPLETIONS, completion(suffix="y"), 400, "suffix", "suffix='y' is not supported"),
    (COMPLETIONS, completion(logprobs=21), 400, "logprobs", "logprobs=21 must be"),
    (COMPLETIONS, completion(logprobs=True), 400, "logprobs", "logprobs=True must be"),
    (COMPLETIONS, completion(stop=["a"] * 17), 400, "stop", "stop has 17 texts"),
    (COMPLETIONS, completion(stop="a" * 10_000), 400, "stop", "has 10000 characters"),
    (COMPLETIONS, completion(stop=[""]), 400, "stop", "stop[0] is an empty text"),
    (COMPLETIONS, completion(stop=3), 400, "stop", "stop=3 must be a list of strings"),
    (COMPLETIONS, completion(logit_bias={"900": 1}), 400, "logit_bias", "the token id 900"),
    (COMPLETIONS, completion(logit_bias={"x": 1}), 400, "logit_bias", "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": 200}), 400, "logit_bias", "logit_bias[1]=200"),
    (COMPLETIONS, completion(seed=2**70), 400, "seed", "seed="),
    (COMPLETIONS, completion(echo="yes"), 400, "echo", "echo='yes' must be true or false"),
    (COMPLETIONS, completion(stream=1), 400, "stream", "stream=1 must be true or false"),
    (COMPLETIONS, completion(stream_options={}), 400, "stream_options", "needs stream=true"),
    (COMPLETIONS, completion(streaming_interval=0), 400, "streaming_interval", "from 1 to 1024"),
    (COMPLETIONS, completion(presence_penalty=3), 400, "presence_penalty", "presence_penalty=3"),
    (COMPLETIONS, completion(repetition_penalty=0), 400, "repetition_penalty", "above 0"),
    (COMPLETIONS, completion(min_tokens=2), 400, "min_tokens", "max_tokens=1"),
    (COMPLETIONS, completion(deadline_s=1e-9), 408, None, "deadline_s=1e-09"),
    (CHAT, chat(messages=None), 400, "messages", "messages is missing"),
    (CHAT, chat(messages=[]), 400, "messages", "messages=[] must be a list of messages"),
    (CHAT, chat(messages=["hi"]), 400, "messages", "messages[0]='hi' must be an object"),
    (CHAT, chat(messages=[{"role": "boss", "content": ""}]), 400, "messages", "role='boss'"),
    (CHAT, chat(messages=[{"role": "user"}]), 400, "messages", "content=None must be a string"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        400,
        "messages",
        "type='image_url' is not supported",
    ),
    (CHAT, chat(top_k=2**70), 400, "top_k", "Set top_k to 2147483647 or less."),
    (CHAT, chat(max_tokens=None, min_tokens=2**70), 400, "min_tokens", "Set min_tokens to 2147483"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs=true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "top_logprobs=21 must be"),
    (CHAT, chat(logprobs=3), 400, "logprobs", "logprobs=3 must be true or false"),
    (CHAT, chat(functions=[{"name": "f"}]), 400, "functions", "is not supported by"),
    (
        CHAT,
        chat(chat_template_kwargs={"messages": []}),
        400,
        "chat_template_kwargs",
        "cannot set messages",
    ),
    (CHAT, chat(chat_template_kwargs={"a": "x" * 5000}), 400, "chat_template_kwargs", "4096"),
    (CHAT, chat(stop=["a"] * 16), 400, "stop", "the chat template adds 1; the"),
    *(
        (path, request, 400, request_field, "has 4000 characters, but the context of the model is")
        for path, request, request_field in (
            (COMPLETIONS, completion(prompt=["x", "x" * 4000]), "prompt"),
            ("/tokenize", {"prompt": "x" * 4000}, "prompt"),
        )
    ),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": "x" * 4000}]),
        400,
        "messages",
        "characters, but the context of the model is 256 tokens, which have at most 3328",
    ),
    ("/tokenize", {"prompt": 3}, 400, "prompt", "prompt=3 must be a string"),
    ("/detokenize", {}, 400, "tokens", "tokens is missing"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens", "tokens[0]=-1"),
    ("/v1/nothing", {}, 404, None, "there is no such endpoint"),
    ("/health", {}, 405, None, "the method is not allowed"),
)


@pytest.mark.parametrize("streams", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bad_requests_name_the_field_and_change_no_other_request(
    server: Server, llm: LLM, streams: bool
) -> None:
    body = {"model": "tiny", "prompt": "good", "max_tokens": 200, "seed": 8, "ignore_eos": True}
    good: list[httpx2.Response] = []
    other = threading.Thread(
        target=lambda: good.append(httpx2.post(server.url + COMPLETIONS, json=body, timeout=60))
    )
    other.start()
    failures = []
    for path, request, status, param, text in BAD_REQUESTS:
        if streams and path in (COMPLETIONS, CHAT) and "stream_options" not in request:
            request = {"stream": True} | request
        data = json.dumps(request).encode()
        response = server.client.post(
            server.url + path, content=data, headers={"Content-Type": "application/json"}
        )
        error = response.json()["error"] if response.status_code >= 400 else {"message": ""}
        if (
            response.status_code != status
            or text not in error["message"]
            or error.get("param") != param
        ):
            failures.append(f"{path} {request!r:.100}: {response.status_code} {error}")
    assert not failures, "\n".join(failures)
    other.join()
    expected = generate(llm, "good", max_new_tokens=200, seed=8, ignore_eos=True)
    assert good[0].json()["choices"][0]["text"] == expected.outputs[0].text


@pytest.mark.parametrize(
    "content, content_type, status, text",
    [
        (b"", "application/json", 400, "the body is empty"),
        (b"{", "application/json", 400, "the body is not JSON"),
        (b"\xff\xfe\x00", "application/json", 400, "the body is not JSON"),
        (b"[1]", "application/json", 400, "must be an object"),
        (b'{"a": ' + b"[" * 100_000, "application/json", 400, "the body is not JSON"),
        (b"{}", "", 415, "Content-Type='' is not supported: send JSON with Content-Type: app"),
        (b"{}", "text/plain", 415, "Content-Type='text/plain' is not supported"),
        (b'{"prompt": NaN}', "application/json", 400, "prompt: the number nan is not finite"),
        (b'{"metadata": {"a": [-1e999]}}', "application/json", 400, "metadata: the number -inf is"),
        (b"x" * (33 * 2**20), "application/json", 413, "more than 33554432 bytes"),
    ],
    ids=["empty", "truncated", "binary", "list", "deep", "no_type", "type", "nan", "inf", "large"],
)
def test_bad_bodies_are_rejected(
    server: Server, content: bytes, content_type: str, status: int, text: str
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    with httpx2.Client(timeout=60) as client:
        response = client.post(server.url + COMPLETIONS, content=content, headers=headers)
    assert response.status_code == status and text in response.json()["error"]["message"]


def test_masks_that_exclude_each_other_are_an_error_of_the_request(server: Server) -> None:
    body = {"model": "tiny", "prompt": "x", "allowed_token_ids": [256], "min_tokens": 2}
    response = server.post(COMPLETIONS, body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "allowed_token_ids and min_tokens=2 mask all tokens" in message


def test_slow_reader_delays_no_other_client_and_loses_nothing(server: Server, llm: LLM) -> None:
    body = {"model": "tiny", "prompt": "slow", "n": 32, "max_tokens": 50, "logprobs": 20, "seed": 4}
    body |= {"ignore_eos": True, "stream": True}
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        data = json.dumps(body).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        wait_for_sample(server, "num_requests_running", 32)
        server.wait_idle()  # all tokens are generated although nobody reads
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.endswith(b"0\r\n\r\n")
    chunks = re.findall(rb"[0-9a-f]+\r\n((?:data: .*\n\n)+)\r\n", received)
    texts = [""] * 32
    for event in read_events(b"".join(chunks).decode()):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    output = generate(llm, "slow", n=32, max_new_tokens=50, seed=4, ignore_eos=True)
    assert texts == [completion.text for completion in output.outputs]


FIELDS = (
    "prompt messages max_tokens temperature top_p top_k min_p n seed stop stream logprobs echo "
    "top_logprobs logit_bias min_tokens presence_penalty stop_token_ids stream_options best_of "
    "suffix tools tool_choice response_format structured_outputs parallel_tool_calls "
    "chat_template_kwargs deadline_s cache_salt tokens "
    "prompts tokens_to_generate random_seed allowed_token_ids bad_words truncate_to_fit "
    "input instructions dimensions encoding_format text reasoning include store metadata"
)


def random_value(generator: random.Random, depth: int = 0) -> Any:
    """A random JSON value, often a valid one."""
    choices: list[Any] = [None, True, -1, 0, 1, 2, 0.5, 1e308, -1e308, 2**70, "", "x", "a\u0000b"]
    choices += ["\ud800", "user", "x" * 5000, float("nan"), float("inf"), [], {}]
    if depth < 3 and generator.random() < 0.4:
        items = [random_value(generator, depth + 1) for _ in range(generator.randrange(4))]
        if generator.random() < 0.5:
            return items
        names = ["role", "content", "type", "text", "1", "include_usage", "regex", "json"]
        return {generator.choice(names): item for item in items}
    return generator.choice(choices)


@pytest.mark.parametrize(
    "num_requests", [150, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_random_requests_never_cause_a_500(server: Server, num_requests: int) -> None:
    generator = random.Random(3)
    paths = [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/api", "/v1/responses"]
    paths.append("/v1/embeddings")
    failures = []
    for _ in range(num_requests):
        path = generator.choice(paths)
        body = completion(messages=HELLO, input="x", max_output_tokens=1)
        for name in generator.sample(FIELDS.split(), generator.randrange(1, 4)):
            body[name] = random_value(generator)
        if type(body["max_tokens"]) is int:
            body["max_tokens"] = min(body["max_tokens"], 2)
        data = json.dumps(body).encode()
        if generator.random() < 0.1:
            data = data[: generator.randrange(len(data))]
        response = server.client.request(
            "PUT" if path == "/api" else "POST",
            server.url + path,
            content=data,
            headers={"Content-Type": "application/json"},
        )
        if response.status_code >= 500:
            failures.append(f"{path} {data!r:.300}: {response.text}")
    assert not failures, "\n".join(failures[:5])
    assert server.wait_idle()["kv_cache_usage_perc"] == 0


def test_unknown_fields_are_ignored_and_counted(server: Server) -> None:
    before = server.metrics()["ignored_fields_total"]
    post(server, COMPLETIONS, prompt="x", max_tokens=1, invented=1, other=2, user="me")
    assert server.metrics()["ignored_fields_total"] == before + 2


# --- chat page


def test_chat_page_may_run_its_own_code_only(server: Server) -> None:
    response = server.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    policy = dict(
        part.strip().split(" ", 1)
        for part in response.headers["content-security-policy"].split(";")
    )
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert policy == {
        **{"default-src": "'none'", "connect-src": "'self'", "img-src": "data:"},
        **{"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'"},
        **{"require-trusted-types-for": "'script'", "trusted-types": "'none'"},
    }
    assert server.post("/", {}).status_code == 405


def test_chat_page_is_self_contained(server: Server) -> None:
    text = server.get("/").text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r"<(?:script|link|img|iframe)[^>]* (?:src|href)=\"(?!data:)", text)
    assert set(re.findall(r"https?://[\w.]+", text)) == {"http://www.w3.org"}  # SVG's namespace


# --- clients that disconnect, and metrics


def test_disconnect_aborts_and_frees_all_blocks(server: Server) -> None:
    before = server.wait_idle()
    body = {"model": "tiny", "prompt": "x", "n": 32, "max_tokens": 250, "ignore_eos": True}
    with httpx2.stream(
        "POST", server.url + COMPLETIONS, json=body | {"stream": True}, timeout=60
    ) as response:
        next(response.iter_raw())
    wait_for_sample(server, "client_disconnects_total", before["client_disconnects_total"] + 1)
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_for_sample(server, "num_requests_running", 32)
    wait_for_sample(server, "client_disconnects_total", before["client_disconnects_total"] + 2)
    after = server.wait_idle()
    assert after["kv_cache_usage_perc"] == 0
    aborted = 'request_success_total{finished_reason="abort"}'
    assert after[aborted] - before.get(aborted, 0) == 64
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 2 * 32 * 250


def wait_for_sample(server: Server, name: str, value: float) -> None:
    """Wait until a metric has a value."""
    for _ in range(600):
        samples = server.metrics()
        if samples[name] >= value:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} is {samples[name]}")


def test_metrics_agree_with_a_scripted_workload(server: Server) -> None:
    before = server.wait_idle()
    for length in (1, 4, 9):
        post(server, COMPLETIONS, prompt="m" * length, max_tokens=length, n=2, ignore_eos=True)
    stream(server, CHAT, messages=HELLO, max_tokens=5, **ONLY_A)
    server.post(COMPLETIONS, {"model": "other", "prompt": "x"})
    after = server.wait_idle()
    prompt = len(PROMPT_OF_HELLO)
    expected = {
        "prompt_tokens_total": 1 + 4 + 9 + prompt,
        "generation_tokens_total": 2 * (1 + 4 + 9) + 5,
        'request_success_total{finished_reason="length"}': 7,
        'request_errors_total{code="404"}': 1,
        "time_to_first_token_seconds_count": 4,
        "e2e_request_latency_seconds_count": 4,
        "request_queue_time_seconds_count": 4,
        "request_prefill_time_seconds_count": 4,
        "request_decode_time_seconds_count": 4,
        "inter_token_latency_seconds_count": 2 * (0 + 3 + 8) + 4,
        "request_prompt_tokens_sum": 1 + 4 + 9 + prompt,
        "request_generation_tokens_sum": 2 * (1 + 4 + 9) + 5,
        "iteration_tokens_total_sum": 1 + 4 + 9 + prompt + 2 * (0 + 3 + 8) + 4,
    }
    cached = after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"]
    expected["iteration_tokens_total_sum"] -= int(cached)
    change = {name: after[name] - before.get(name, 0) for name in expected}
    assert change == expected
    ttft = after["time_to_first_token_seconds_sum"] - before["time_to_first_token_seconds_sum"]
    parts = ("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum")
    assert ttft == pytest.approx(sum(after[part] - before[part] for part in parts))


def test_benchmark_measures_a_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "5", "--input-len", "4", "--output-len", "6", "--request-rate", "50"]
    assert main(["bench", "serve", "--base-url", server.url, *words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["num_failed"], summary["output_tokens"]) == (0, 30)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = list(summary[name].values())
        assert 0 < values[0] <= values[1] <= values[2]
    assert summary["e2e_ms"]["p99"] >= summary["ttft_ms"]["p99"]
    assert main(["bench", "serve", "--base-url", server.url + "/nothing"]) == 2
    assert "GET /v1/models has status 404" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", "ftp://x"]) == 2
    assert "must be an http URL" in capsys.readouterr().err


# --- the official client


def test_client_reads_completions_chats_and_models(server: Server, llm: LLM) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "megalith"
        text = client.completions.create(
            model="tiny", prompt="hello", max_tokens=6, seed=2, logprobs=2, echo=True
        )
        expected = generate(llm, "hello", seed=2, max_new_tokens=6).outputs[0].text
        assert text.choices[0].text == "hello" + expected
        assert text.choices[0].logprobs is not None and text.usage is not None
        assert text.usage.completion_tokens == 6
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            seed=2,
            logprobs=True,
            top_logprobs=2,
        )
        message = answer.choices[0]
        assert message.logprobs is not None and message.logprobs.content is not None
        assert len(message.logprobs.content) == 6
        streamed = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=6,
            seed=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(streamed)
        content = [c.choices[0].delta.content for c in chunks if c.choices]
        assert "".join(part or "" for part in content) == message.message.content
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 6


def test_client_raises_its_error_classes(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no such model"):
            client.completions.create(model="gpt", prompt="x")
        with pytest.raises(openai.BadRequestError, match="top_p=2") as raised:
            client.completions.create(model="tiny", prompt="x", top_p=2)
        assert raised.value.param == "top_p"


def test_concurrent_streams_of_the_async_client_equal_single_requests(
    server: Server, llm: LLM
) -> None:
    async def read(client: openai.AsyncOpenAI, index: int) -> str:
        parts = []
        async for chunk in await client.completions.create(
            model="tiny", prompt=f"{index}", max_tokens=8 + index, seed=index, stream=True
        ):
            parts.append(chunk.choices[0].text)
        return "".join(parts)

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(read(client, index) for index in range(12)))

    texts = asyncio.run(read_all())
    for index, text in enumerate(texts):
        output = generate(llm, f"{index}", max_new_tokens=8 + index, seed=index)
        assert text == output.outputs[0].text

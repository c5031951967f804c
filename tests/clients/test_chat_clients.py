"""langchain-openai and litellm return the text of the engine, complete and streamed."""

import asyncio
from typing import Any

import litellm
import pytest
from langchain_openai import ChatOpenAI

MESSAGES = [
    {"role": "system", "content": "Answer in French, é."},
    {"role": "user", "content": "What is 2 + 3?"},
]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def expected(reference: Any) -> str:  # of conftest.py
    """The greedy answer of the engine without a server."""
    text: str = reference.ask(messages=MESSAGES, max_new_tokens=NUM_TOKENS)
    assert len(text) > 10
    return text


@pytest.fixture(scope="module")
def langchain_model(reference: Any) -> ChatOpenAI:
    """The served model as a chat model of langchain."""
    return ChatOpenAI(
        model="tiny",
        base_url=f"{reference.url}/v1",
        temperature=0,
        max_completion_tokens=NUM_TOKENS,
        max_retries=0,
    )


@pytest.fixture(scope="module")
def litellm_options(reference: Any) -> dict[str, Any]:
    """Arguments of litellm's completion."""
    return {
        "model": "openai/tiny",
        "api_base": f"{reference.url}/v1",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "max_retries": 0,
    }


def test_langchain_invoke_returns_text_usage_and_finish_reason(
    langchain_model: ChatOpenAI, expected: str
) -> None:
    message = langchain_model.invoke(MESSAGES)
    assert message.content == expected
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] == NUM_TOKENS
    assert message.response_metadata["finish_reason"] == "length"


def test_langchain_streams_the_same_text_in_several_chunks(
    langchain_model: ChatOpenAI, expected: str
) -> None:
    chunks = list(langchain_model.stream(MESSAGES, stream_usage=True))
    assert "".join(str(chunk.content) for chunk in chunks) == expected
    assert sum(bool(chunk.content) for chunk in chunks) > 5
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage["output_tokens"] == NUM_TOKENS


def test_langchain_batches_async_requests(langchain_model: ChatOpenAI, expected: str) -> None:
    messages = asyncio.run(langchain_model.abatch([MESSAGES] * 3))
    assert [message.content for message in messages] == [expected] * 3


def test_litellm_completion_returns_text_and_usage(
    litellm_options: dict[str, Any], expected: str
) -> None:
    response = litellm.completion(**litellm_options)
    assert response.choices[0].message.content == expected
    assert response.choices[0].finish_reason == "length"
    assert response.usage.completion_tokens == NUM_TOKENS


def test_litellm_streams_the_same_text_in_several_chunks(
    litellm_options: dict[str, Any], expected: str
) -> None:
    chunks = list(litellm.completion(stream=True, **litellm_options))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(texts) == expected
    assert sum(map(bool, texts)) > 5


def test_litellm_maps_an_unknown_model_to_not_found(litellm_options: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError, match="this server has no such model. Use 'tiny'"):
        litellm.completion(**litellm_options | {"model": "openai/unknown"})

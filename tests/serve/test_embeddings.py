"""POST /v1/embeddings of a running server, compared with the model in this process."""

import asyncio
import base64
import math
import struct
from typing import Any

import openai
import pytest

from megalith.infer.llm import LLM
from megalith.serve.embeddings import truncate_embedding
from tests.serve.servers import CONFIG, Server

EMBEDDINGS = "/v1/embeddings"


def embed(server: Server, **body: Any) -> dict[str, Any]:
    """The JSON response of a request that succeeds."""
    response = server.post(EMBEDDINGS, {"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def test_client_reads_embeddings_in_both_formats(server: Server, llm: LLM) -> None:
    texts = ["hello", "h", "hello"]
    expected = llm.embed(texts)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        by_default = client.embeddings.create(model="tiny", input=texts)  # asks for base64
        as_numbers = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for response in (by_default, as_numbers):
        assert [item.index for item in response.data] == [0, 1, 2]
        assert (response.object, response.model) == ("list", "tiny")
        assert (response.usage.prompt_tokens, response.usage.total_tokens) == (11, 11)
        for item, values in zip(response.data, expected, strict=True):
            assert item.embedding == pytest.approx(values, abs=1e-5)
            assert math.hypot(*item.embedding) == pytest.approx(1, abs=1e-6)


def test_base64_is_little_endian_fp32(server: Server) -> None:
    values = embed(server, input="abc")["data"][0]["embedding"]
    text = embed(server, input="abc", encoding_format="base64")["data"][0]["embedding"]
    assert struct.unpack("<12f", base64.b64decode(text)) == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("value", ["hé", [104, 195, 169], ["hé"], [[104, 195, 169]]])
def test_input_has_four_shapes(server: Server, llm: LLM, value: Any) -> None:
    document = embed(server, input=value)
    (item,) = document["data"]
    assert item["embedding"] == pytest.approx(llm.embed("hé")[0], abs=1e-5)
    assert document["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_dimensions_truncate_and_scale_to_unit_length(server: Server, llm: LLM) -> None:
    (expected,) = llm.embed("abc")
    length = math.hypot(*expected[:5])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        by_default = client.embeddings.create(model="tiny", input="abc", dimensions=5)
    for values in (
        by_default.data[0].embedding,
        embed(server, input="abc", dimensions=5)["data"][0]["embedding"],
    ):
        assert values == pytest.approx([x / length for x in expected[:5]], abs=1e-5)
    assert truncate_embedding(struct.pack("<3f", 0, 0, 1), 2) == [0, 0]


def test_concurrent_requests_of_the_async_client_equal_single_ones(
    server: Server, llm: LLM
) -> None:
    texts = [f"text {index} " * index for index in range(1, 20)]

    async def embed_all() -> list[list[float]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            create = client.embeddings.create
            long = client.completions.create(model="tiny", prompt="x", max_tokens=200, n=3)
            _, *results = await asyncio.gather(
                long, *(create(model="tiny", input=text) for text in texts)
            )
            return [result.data[0].embedding for result in results]

    for embedding, expected in zip(asyncio.run(embed_all()), llm.embed(texts), strict=True):
        assert embedding == pytest.approx(expected, abs=1e-5)


def body(**fields: Any) -> dict[str, Any]:
    """A request with some fields replaced."""
    return {"model": "tiny", "input": "x"} | fields


@pytest.mark.parametrize(
    ("request_body", "status", "param", "text"),
    [
        ({"model": "tiny"}, 400, "input", "input is missing"),
        (body(model="gpt"), 404, "model", "has no such model"),
        (body(input=[]), 400, "input", "input is an empty list"),
        (body(input=3), 400, "input", "input is 3, but must be a string or a list of token ids"),
        (body(input=["a", None]), 400, "input", "input[1] is None"),
        (body(input=[[300]]), 400, "input", "input[0][0]=300: token ids"),
        (body(input=["x"] * 2049), 400, "input", "input has 2049 texts; the limit is 2048"),
        (body(input=["x"] * 1025), 400, "n", "1025 sequences"),
        (body(input="x" * 257), 400, "input", "input has 257 tokens, but the context"),
        (body(dimensions=0), 400, "dimensions", "dimensions=0 must be an integer from 1 to 12"),
        (body(dimensions=CONFIG.hidden_size + 1), 400, "dimensions", "dimensions=13"),
        (body(encoding_format="int8"), 400, "encoding_format", "must be float or base64"),
        (body(encoding_format=["float"]), 400, "encoding_format", "must be float or base64"),
        (body(deadline_s=1e-9), 408, None, "deadline_s=1e-09"),
        (body(deadline_s=-1), 400, "deadline_s", "deadline_s=-1"),
    ],
)
def test_invalid_requests_name_the_field(
    server: Server, request_body: Any, status: int, param: str | None, text: str
) -> None:
    response = server.post(EMBEDDINGS, request_body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert text in error["message"]


def test_context_may_be_full(server: Server, llm: LLM) -> None:
    (item,) = embed(server, input="x" * 256)["data"]
    assert item["embedding"] == pytest.approx(llm.embed("x" * 256)[0], abs=1e-5)

"""Many clients at once, some of which disconnect, and random requests."""

import asyncio
import json
from typing import Any

import httpx2
import psutil
import pytest

from megalith.config.generation import SamplingParams
from megalith.infer.llm import LLM
from tests.serve.servers import Server

COMPLETIONS = "/v1/completions"


def request_of(index: int) -> dict[str, Any]:
    """A request of mixed length."""
    length = 1 + (index * 37) % 120
    return {
        "model": "tiny",
        "prompt": [(index * 7 + position) % 256 for position in range(length)],
        "max_tokens": 1 + (index * 11) % 60,
        "seed": index,
        "ignore_eos": True,
    }


async def read_stream(client: httpx2.AsyncClient, index: int, *, disconnects: bool) -> str:
    """The text of a stream; part of it if the client disconnects."""
    text = ""
    async with client.stream("POST", COMPLETIONS, json=request_of(index) | {"stream": True}) as r:
        assert r.status_code == 200
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
                if disconnects:
                    return text
    return text


async def read_plain(client: httpx2.AsyncClient, index: int) -> str:
    """The text of a response."""
    response = await client.post(COMPLETIONS, json=request_of(index))
    text: str = response.json()["choices"][0]["text"]
    return text


async def send_all(url: str, num_streams: int, num_plain: int) -> list[str]:
    """The texts of all requests, of which every tenth stream disconnects."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        streams = [
            read_stream(client, index, disconnects=index % 10 == 0) for index in range(num_streams)
        ]
        plain = [read_plain(client, index) for index in range(num_streams, num_streams + num_plain)]
        return await asyncio.gather(*streams, *plain)


@pytest.mark.slow
def test_streams_under_load_equal_generation_in_this_process(server: Server, llm: LLM) -> None:
    num_streams, num_plain = 256, 64
    requests = [request_of(index) for index in range(num_streams + num_plain)]
    outputs = llm.generate(
        [request["prompt"] for request in requests],
        [
            SamplingParams(max_new_tokens=r["max_tokens"], seed=r["seed"], ignore_eos=True)
            for r in requests
        ],
    )
    expected = [output.outputs[0].text for output in outputs]
    process = psutil.Process(server.process.pid)
    resident = []
    for _ in range(3):
        texts = asyncio.run(send_all(server.url, num_streams, num_plain))
        for index, (text, whole) in enumerate(zip(texts, expected, strict=True)):
            if index < num_streams and index % 10 == 0:
                assert whole.startswith(text), index
            else:
                assert text == whole, index
        samples = server.wait_idle()
        assert samples["kv_cache_usage_perc"] == 0
        family = [process, *process.children()]
        resident.append(sum(one.memory_info().rss for one in family))
    assert resident[2] <= resident[1] * 1.02

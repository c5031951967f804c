"""`LLM` and `AsyncLLM`: results in the order of the prompts, streams, abort, errors that name the
prompt."""

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams, StructuredOutputsParams
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import ConfigError, DataError
from megalith.infer.llm import LLM, AsyncLLM
from megalith.infer.load import TextGenerator
from tests.infer.engines import SAMPLED, build, run

PROMPTS = ["abc", [97, 98], "x"]


@pytest.fixture
def generator(tiny: SimpleNamespace) -> TextGenerator:
    model = tiny.model(tiny.config(vocab_size=257), dtype=torch.float64)
    return TextGenerator(model, ByteTokenizer(), frozenset())


def tokens(generator: TextGenerator, prompt: list[int], params: SamplingParams) -> list[int]:
    return run(build(generator.model), [(prompt, params)])[0].outputs[0].token_ids


def test_results_are_in_the_order_of_the_prompts(generator: TextGenerator) -> None:
    llm = LLM(generator)
    params = [SAMPLED, replace(SAMPLED, max_new_tokens=3), replace(SAMPLED, seed=5)]
    outputs = llm.generate(PROMPTS, params)
    for prompt, output, own in zip(PROMPTS, outputs, params, strict=True):
        ids = list(prompt.encode()) if isinstance(prompt, str) else prompt
        assert output.prompt_token_ids == ids
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
        (completion,) = output.outputs
        assert completion.token_ids == tokens(generator, ids, own)
        decoded = bytes(token for token in completion.token_ids if token < 256)
        assert completion.text == decoded.decode(errors="replace")
        assert output.timings.ttft is not None and output.timings.finished is not None
    assert llm.generate([]) == []
    (one,) = llm.generate("abc", SAMPLED)
    (same,) = llm.generate([97, 98, 99], SAMPLED)
    assert one.outputs[0].token_ids == same.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_requests_without_a_seed_have_seeds_of_their_own(generator: TextGenerator) -> None:
    outputs = LLM(generator).generate(["abc"] * 3, replace(SAMPLED, seed=None))
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (["a", 5.5], SAMPLED, DataError, r"prompts\[1\]=5.5 is a float: must be text or a list of"),
        (["a", [1, "b"]], SAMPLED, DataError, r"prompts\[1\]=\[1, 'b'\] is a list"),
        (["a", [True]], SAMPLED, DataError, r"prompts\[1\]=\[True\] is a list"),
        (["a", b"b"], SAMPLED, DataError, r"prompts\[1\]=b'b' is a bytes"),
        (["a", None], SAMPLED, DataError, r"prompts\[1\]=None is a NoneType"),
        (None, SAMPLED, DataError, "prompts=None is a NoneType: must be text, a list of token ids"),
        (b"abc", SAMPLED, DataError, "prompts=b'abc' is a bytes: must be text"),
        (5, SAMPLED, DataError, "prompts=5 is a int: must be text"),
        (["a"], None, ConfigError, "params=None is a NoneType: must be SamplingParams. Use for"),
        (["a"], {"n": 1}, ConfigError, "params={'n': 1} is a dict: must be SamplingParams"),
        (["a", "b"], [SAMPLED, 5], ConfigError, r"params\[1\]=5 is a int: must be SamplingParams"),
        (["a", [257]], SAMPLED, DataError, r"prompts\[1\]: the prompt has token 257"),
        (["a", "b"], [SAMPLED], ConfigError, "params has 1 entries for 2 prompts. Pass one"),
        (["a"], replace(SAMPLED, n=0), ConfigError, r"prompts\[0\]: n=0 must be at least 1"),
    ],
)
def test_invalid_requests_are_rejected_and_leave_nothing_behind(
    prompts: Any, params: Any, error: type[Exception], message: str, generator: TextGenerator
) -> None:
    llm = LLM(generator)
    with pytest.raises(error, match=message):
        llm.generate(prompts, params)
    assert not llm.engine.has_unfinished
    assert llm.engine.scheduler.make_stats().num_used_blocks == 0


def test_reduced_number_of_new_tokens_is_reported_once_per_request(
    generator: TextGenerator, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(generator)
    context = llm.engine.max_model_len
    fits, long = (replace(SAMPLED, max_new_tokens=count) for count in (context - 3, context - 2))
    caplog.clear()
    outputs = llm.generate(["abc", "xyz"], [fits, long])
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage() == (
        f"prompts[1]: max_new_tokens={context - 2} is reduced to {context - 3}, because the "
        f"context is {context} tokens including the prompt of 3. Use a shorter prompt or fewer new "
        "tokens."
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [context - 3] * 2

    async def main() -> None:
        async with AsyncLLM(generator) as engine:
            caplog.clear()
            await engine.generate("xyz", long)

    asyncio.run(main())
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith(f"request 0: max_new_tokens={context - 2} is reduced")


def test_streams_of_several_tasks_are_those_of_requests_alone(generator: TextGenerator) -> None:
    async def collect(llm: AsyncLLM, prompt: str) -> tuple[list[int], str]:
        outputs = [output async for output in llm.stream(prompt, SAMPLED)]
        assert [one.finish_reason for one in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason == "length"
        ids = [one.token for one in outputs if one.token is not None]
        return ids, "".join(one.text for one in outputs)

    async def main() -> list[Any]:
        async with AsyncLLM(generator) as llm:
            streams = [collect(llm, prompt) for prompt in ("abc", "x", "yz")]
            return [*await asyncio.gather(*streams), await llm.generate("abc", SAMPLED)]

    *streams, result = asyncio.run(main())
    for (ids, _), prompt in zip(streams, ("abc", "x", "yz"), strict=True):
        assert ids == tokens(generator, list(prompt.encode()), SAMPLED)
    assert (result.outputs[0].token_ids, result.outputs[0].text) == streams[0]


def test_cancelled_and_abandoned_requests_release_their_blocks(generator: TextGenerator) -> None:
    long = replace(SAMPLED, max_new_tokens=90)

    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            async for _ in llm.stream("abc", long):
                break  # the consumer stops
            task = asyncio.create_task(llm.generate("abc", long))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            kept = await llm.generate("x", SAMPLED)
            assert kept.outputs[0].token_ids == tokens(generator, [120], SAMPLED)
            engine = llm.engine
        assert not engine.has_unfinished
        assert engine.scheduler.make_stats().num_used_blocks == 0

    asyncio.run(main())


def test_an_invalid_request_is_an_error_of_its_task_only(generator: TextGenerator) -> None:
    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            good = asyncio.create_task(llm.generate("abc", SAMPLED))
            with pytest.raises(ConfigError, match=r"top_p=2 must be at most 1"):
                await llm.generate("abc", replace(SAMPLED, top_p=2))
            assert (await good).outputs[0].token_ids == tokens(generator, [97, 98, 99], SAMPLED)
        with pytest.raises(ConfigError, match="the engine is closed: create a new AsyncLLM"):
            await llm.generate("abc", SAMPLED)

    asyncio.run(main())


def test_an_idle_engine_does_not_run(generator: TextGenerator) -> None:
    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            await llm.generate("abc", SAMPLED)
            calls: list[int] = []
            llm.engine.step = lambda: calls.append(1) or []  # type: ignore[method-assign]
            await asyncio.sleep(0.1)
            assert calls == []
            del llm.engine.step

    asyncio.run(main())


def test_a_request_cancelled_before_it_is_added_is_aborted(generator: TextGenerator) -> None:
    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            plain = llm.engine.step

            def slow() -> Any:
                time.sleep(0.1)
                return plain()

            llm.engine.step = slow  # type: ignore[method-assign]
            first = asyncio.create_task(llm.generate("x", replace(SAMPLED, max_new_tokens=4)))
            await asyncio.sleep(0.05)
            second = asyncio.create_task(llm.generate("abc", replace(SAMPLED, max_new_tokens=80)))
            await asyncio.sleep(0.01)
            second.cancel()
            await first
            llm.engine.step = plain  # type: ignore[method-assign]
            await llm.generate("x", replace(SAMPLED, max_new_tokens=4))
            assert not llm.engine.has_unfinished

    asyncio.run(main())


def test_the_engine_outlives_an_event_loop_that_closes(generator: TextGenerator) -> None:
    llm = AsyncLLM(generator)

    async def leave() -> None:
        llm_stream = llm.stream("abc", replace(SAMPLED, max_new_tokens=80))
        await anext(llm_stream)

    asyncio.run(leave())
    result = asyncio.run(llm.generate("abc", SAMPLED))
    assert result.outputs[0].token_ids == tokens(generator, [97, 98, 99], SAMPLED)
    llm.close()


def test_an_error_of_the_engine_ends_its_requests_and_not_the_thread(
    generator: TextGenerator,
) -> None:
    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            schedule = llm.engine.scheduler.schedule

            def fails(**options: Any) -> Any:
                llm.engine.scheduler.schedule = schedule  # type: ignore[method-assign]
                raise ValueError("planted")

            llm.engine.scheduler.schedule = fails  # type: ignore[assignment,method-assign]
            with pytest.raises(ValueError, match="planted"):
                await llm.generate("abc", SAMPLED)
            result = await llm.generate("abc", SAMPLED)
            assert result.outputs[0].token_ids == tokens(generator, [97, 98, 99], SAMPLED)

    asyncio.run(main())


def test_chat_uses_a_template(generator: TextGenerator) -> None:
    llm = LLM(replace(generator, stops=frozenset({256})))
    messages: Any = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, SAMPLED, template_name="chatml")
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ByteTokenizer().decode(output.prompt_token_ids) == text
    with pytest.raises(DataError, match="has no chat template.* set template_name to one of"):
        llm.chat(messages, SAMPLED)


def test_structured_output_of_chats_and_tasks(generator: TextGenerator) -> None:
    pytest.importorskip("llguidance")
    structure = StructuredOutputsParams(choice=("a<|im_end|>b",))  # has the text that ends a turn
    params = replace(SAMPLED, structured_outputs=structure)
    messages: Any = [{"role": "user", "content": "hi"}]
    output = LLM(generator).chat(messages, params, template_name="chatml")
    assert output.outputs[0].text == "a<|im_end|>b"

    async def main() -> None:
        async with AsyncLLM(generator) as llm:
            assert (await llm.generate("x", params)).outputs[0].text == "a<|im_end|>b"
            for wrong, message in (
                (StructuredOutputsParams(regex="("), "structured_outputs.regex is not valid: unc"),
                (StructuredOutputsParams(), "structured_outputs must have exactly one of json"),
            ):
                with pytest.raises(ConfigError, match=message):
                    await llm.generate("x", replace(params, structured_outputs=wrong))

    asyncio.run(main())

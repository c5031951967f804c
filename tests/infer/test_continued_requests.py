"""A request that another engine has started continues with the tokens, the text and the end that it
would have had there."""

from collections.abc import Sequence
from typing import Any

import pytest

from megalith.config.generation import SamplingParams, StructuredOutputsParams
from megalith.config.model import AttentionConfig, RopeConfig
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import DataError
from megalith.infer.engine import InferenceEngine
from megalith.infer.outputs import Completion, RequestOutput, TokenOutput
from megalith.infer.requests import ChoiceProgress
from tests.infer.conftest import config, model
from tests.infer.engines import build

PROMPT = list(b"The quick brown fox")
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"logprobs": 2},
    "choices": {"n": 3},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.9, "presence_penalty": 0.3},
    "min_tokens": {"min_tokens": 9, "logit_bias": ((256, 6.0),), "ignore_eos": False},
    "stop": {"n": 2, "stop": ("e", "zz", "\ufffd\ufffd\ufffd"), "min_tokens": 4},
    "bad words": {"bad_words": ("a", "th")},
    "regex": {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3}(xyz|[0-9]{4,9})k")},
}


ENGINES: dict[str, dict[str, Any]] = {
    "drafts": {"speculation": "ngram"},
    "window": {"attention": AttentionConfig(window=5, window_layers=(True, False))},
    "longrope": {
        "head_dim": 4,
        "rope": RopeConfig(
            scaling="longrope",
            factor=4.0,
            original_max_position=24,  # reached during the output
            short_factors=(1.0, 1.0),
            long_factors=(3.0, 9.0),
        ),
    },
    "dynamic rope": {
        "head_dim": 4,
        "rope": RopeConfig(scaling="dynamic", factor=4.0, original_max_position=24),
    },
}


def make_engine(*, speculation: str = "none", **fields: Any) -> InferenceEngine:
    """An engine of a model whose tokens are bytes; `fields`: of its config."""
    decoder = model(config(vocab_size=257, **fields))
    return build(decoder, tokenizer=ByteTokenizer(), eos=frozenset([256]), speculation=speculation)


def collect(
    engine: InferenceEngine, params: SamplingParams, progress: Sequence[ChoiceProgress] = ()
) -> tuple[RequestOutput, list[TokenOutput]]:
    """Run a request to its end; returns it, and its outputs."""
    number = engine.add_request(PROMPT, params, progress=progress)
    request, outputs = engine.output_of(number), list[TokenOutput]()
    while engine.has_unfinished:
        outputs += engine.step()
    engine.scheduler.check()
    return request, outputs


def describe(completion: Completion) -> tuple[object, ...]:
    return (
        completion.token_ids,
        completion.text,
        completion.finish_reason,
        completion.stop_reason,
    )


@pytest.mark.parametrize("name", CASES)
def test_request_continues_on_another_engine(name: str) -> None:
    if name == "regex":
        pytest.importorskip("llguidance")
    params = SamplingParams(**{"max_new_tokens": 14, "seed": 3, "ignore_eos": True} | CASES[name])
    expected, outputs = collect(make_engine(), params)
    other = make_engine()
    collect(other, SamplingParams(max_new_tokens=3))  # its request numbers differ
    longest = max(len(completion.token_ids) for completion in expected.outputs)
    for length in {0, 1, 2, longest // 2, longest - 1}:
        progress, text = [], []
        for completion in expected.outputs:
            count = max(length - completion.index, min(length, 1))
            has_ended = count >= len(completion.token_ids)
            token_ids = completion.token_ids[:count]
            progress.append(
                ChoiceProgress(token_ids, completion.finish_reason if has_ended else None)
            )
            before = [each for each in outputs if each.choice == completion.index][:count]
            text.append("".join(each.text for each in before))
        if all(each.finish_reason is not None for each in progress):
            continue
        continued, later = collect(other, params, progress)
        assert (continued.timings.ttft is None) == (length > 0)
        for index, completion in enumerate(continued.outputs):
            reference = expected.outputs[index]
            new = [each for each in later if each.choice == index]
            assert completion.token_ids == reference.token_ids, (name, length, index)
            assert text[index] + "".join(each.text for each in new) == reference.text
            assert completion.finish_reason == reference.finish_reason
            if progress[index].finish_reason is None:
                assert describe(completion) == describe(reference)
                num_new = len(reference.token_ids) - len(progress[index].token_ids)
                assert len([each for each in new if each.token is not None]) == num_new
                later_logprobs = reference.logprobs[len(progress[index].token_ids) :]
                for each, logprobs in zip(new, later_logprobs, strict=params.logprobs is not None):
                    assert each.logprobs is not None
                    assert each.logprobs.logprob == pytest.approx(logprobs.logprob, abs=1e-5)
            else:
                assert not new


@pytest.mark.parametrize("name", ENGINES)
def test_every_kind_of_engine_continues_requests(name: str) -> None:
    params = SamplingParams(max_new_tokens=14, seed=3, ignore_eos=True, temperature=0.7)
    expected, _ = collect(make_engine(**ENGINES[name]), params)
    (reference,) = expected.outputs
    for length in (1, 6, 13):
        progress = [ChoiceProgress(reference.token_ids[:length])]
        continued, later = collect(make_engine(**ENGINES[name]), params, progress)
        assert describe(continued.outputs[0]) == describe(reference)
        assert [each.token for each in later] == reference.token_ids[length:]


def test_progress_that_nothing_can_follow_is_rejected() -> None:
    engine = make_engine()
    params = SamplingParams(max_new_tokens=2, seed=3, ignore_eos=True)
    with pytest.raises(DataError, match=r"progress\[0\]: the choice ends with its token 7 \(len"):
        engine.add_request(PROMPT, params, progress=[ChoiceProgress([8, 7])])
    with pytest.raises(DataError, match="progress has 2 choices, but n=1. Pass one for each"):
        engine.add_request(PROMPT, params, progress=[ChoiceProgress([8]), ChoiceProgress([8])])
    assert not engine.has_unfinished
    engine.scheduler.check()

"""Embeddings of the engine are the pooled hidden states of one forward pass over the prompt,
whatever else is in the batch."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import AttentionConfig, MLAConfig
from megalith.config.serve import Pooling
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.infer.engine import InferenceEngine
from megalith.infer.llm import LLM
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import RequestOutput
from megalith.infer.pooling import HiddenStatePooler
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from tests.infer.engines import SAMPLED, build, check_logprobs
from tests.infer.test_engine import LONG, blocks_for_one

EMBEDDING = SamplingParams(max_new_tokens=0)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"attention": AttentionConfig(window=5, window_layers=(True, False))},
    "MLA": {
        "mla": MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
        "num_kv_heads": 6,
    },
    "LongRoPE": {"rope": LONG, "head_dim": 4},
}
SETTINGS: list[dict[str, Any]] = [
    {"block_size": 1, "max_num_batched_tokens": 64},
    {"block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 5, "pool": 1.1}
    | {"min_prefill_chunk_tokens": 1},
    {"block_size": 16, "max_num_batched_tokens": 19, "batching": "static", "max_num_seqs": 9},
]


@torch.no_grad()
def forward_embedding(model: Decoder, ids: Sequence[int], pooling: Pooling) -> list[float]:
    """The embedding from one forward pass."""
    inputs = LayerInputs(seq_params_from_rows(1, len(ids)))
    hidden = model.hidden_states(torch.tensor(list(ids)), inputs).double()
    pooled = hidden[-1] if pooling == "last" else hidden.mean(0)
    values: list[float] = torch.nn.functional.normalize(pooled, dim=0).tolist()
    return values


Request = tuple[list[int], SamplingParams, Pooling | None]


def random_requests(seed: int) -> list[Request]:
    """Embeddings next to generation; many share a prefix, and some are equal."""
    draw = random.Random(seed)
    shared = [draw.randrange(37) for _ in range(40)]
    requests: list[Request] = []
    for index in range(8):
        prompt = shared[: draw.randint(1, 40)]
        prompt += [draw.randrange(37) for _ in range(draw.randint(0, 8))]
        pooling: Pooling | None = draw.choice([None, None, "last", "mean", "mean"])
        params = replace(SAMPLED, max_new_tokens=draw.randint(1, 5), seed=index)
        requests.append((prompt, params if pooling is None else EMBEDDING, pooling))
    return [*requests, (shared, EMBEDDING, "mean"), (shared, EMBEDDING, "last")]


def run(engine: InferenceEngine, requests: Sequence[Request], seed: int) -> list[RequestOutput]:
    """Run requests that arrive at random steps to their end."""
    draw = random.Random(seed)
    arrivals = sorted(draw.randint(0, 12) for _ in requests)
    results: list[RequestOutput] = []
    step = 0
    while len(results) < len(requests) or engine.has_unfinished:
        while len(results) < len(requests) and arrivals[len(results)] <= step:
            prompt, params, pooling = requests[len(results)]
            number = engine.add_request(prompt, params, pooling=pooling)
            results.append(engine.output_of(number))
        engine.step()
        step += 1
        assert step < 2000, "the engine makes no progress"
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_one_forward_pass_in_any_batch(
    kind: str, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    num_cached_tokens = 0
    for seed, settings in enumerate(SETTINGS):
        requests = random_requests(seed)
        settings = dict(settings)
        pool = settings.pop("pool", None)
        if pool is not None:
            settings["num_blocks"] = blocks_for_one(model, settings, pool)
        engine = build(model, max_model_len=64, **settings)
        outputs = run(engine, requests, seed)
        for (prompt, _, pooling), output in zip(requests, outputs, strict=True):
            if pooling is None:
                assert output.embedding is None
                if kind != "LongRoPE":  # tested in test_engine.py
                    check_logprobs(model, output)
                continue
            expected = forward_embedding(model, prompt, pooling)
            assert output.embedding == pytest.approx(expected, abs=1e-9), (seed, pooling)
            (completion,) = output.outputs
            assert (completion.token_ids, completion.finish_reason) == ([], "stop")
            num_cached_tokens += output.num_cached_tokens
            assert pooling == "last" or output.num_cached_tokens == 0
        assert engine.scheduler.make_stats().num_used_blocks == 0
    assert num_cached_tokens > 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_preempted_embedding_is_that_of_one_forward_pass(
    kind: str, pooling: Pooling, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    settings: dict[str, Any] = {"block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 5}
    settings["num_blocks"] = blocks_for_one(model, settings, 1.0)
    engine = build(model, max_model_len=64, **settings)
    prompt = [5 * number % 37 for number in range(50)]
    output = engine.output_of(engine.add_request(prompt, EMBEDDING, pooling=pooling))
    for _ in range(3):
        engine.step()
    urgent = replace(SAMPLED, priority=-1)
    engine.add_request(prompt[:9:-1], urgent)
    while engine.has_unfinished:
        engine.step()
    assert output.num_preemptions > 0
    assert output.embedding == pytest.approx(forward_embedding(model, prompt, pooling), abs=1e-9)


def test_preempted_prompt_is_added_once() -> None:
    hidden = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    for pooling, expected in (("last", hidden[-1]), ("mean", hidden.mean(0))):
        pooler = HiddenStatePooler(pooling)  # type: ignore[arg-type]  # a Pooling
        for start, stop in ((0, 3), (3, 5), (0, 4), (4, 6), (6, 7)):
            pooler.add(start, hidden[start:stop])
        normalized = torch.nn.functional.normalize(expected, dim=0)
        assert pooler.embedding() == pytest.approx(normalized.tolist(), abs=1e-6)


def test_mean_is_bitwise_independent_of_chunks() -> None:
    hidden = torch.randn(100, 5, generator=torch.Generator().manual_seed(1))
    embeddings = []
    for size in (1, 7, 64, 100):
        pooler = HiddenStatePooler("mean")
        for start in range(0, 100, size):
            pooler.add(start, hidden[start : start + size])
        embeddings.append(pooler.embedding())
    assert all(embedding == embeddings[0] for embedding in embeddings)


def test_row_that_fails_ends_its_own_embedding_only(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(model)
    execute = engine.runner.execute

    def fail_for_request_1(plan: Any, *rest: Any) -> Any:
        if any(row.seq_id == 1 for row in plan.rows):
            raise RuntimeError("planted")
        return execute(plan, *rest)

    monkeypatch.setattr(engine.runner, "execute", fail_for_request_1)
    requests: list[Request] = [([4, 2], EMBEDDING, "mean"), ([5], EMBEDDING, "last")]
    requests += [([6, 1, 3], EMBEDDING, "mean")]
    first, failed, last = run(engine, requests, 0)
    assert failed.embedding is None and "planted" in str(failed.outputs[0].error)
    for output in (first, last):
        expected = forward_embedding(model, output.prompt_token_ids, "mean")
        assert output.embedding == pytest.approx(expected, abs=1e-9)


def test_embed_returns_unit_vectors_in_order(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257), dtype=torch.float64)
    llm = LLM(TextGenerator(model, ByteTokenizer(), frozenset()))
    for pooling in ("last", "mean"):
        embeddings = llm.embed(["abc", [97], "abcabc"], pooling=pooling)  # type: ignore[arg-type]  # a Pooling
        for text, embedding in zip(("abc", "a", "abcabc"), embeddings, strict=True):
            expected = forward_embedding(model, text.encode(), pooling)  # type: ignore[arg-type]  # a Pooling
            assert embedding == pytest.approx(expected, abs=1e-9)
            assert sum(value**2 for value in embedding) == pytest.approx(1)
    with pytest.raises(DataError, match=r"prompts\[1\]: the prompt has 97 tokens, but"):
        llm.embed(["a", "x" * 97])
    assert not llm.engine.has_unfinished


def test_embedding_without_a_direction_is_an_error(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    llm = LLM(TextGenerator(model, ByteTokenizer(), frozenset()))
    with pytest.raises(CheckpointError, match=r"prompts\[0\]: the pooled hidden state has length"):
        llm.embed("a")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_new_tokens": 3}, "max_new_tokens=3 with pooling=last: .* Set max_new_tokens to 0"),
        ({"n": 2}, "n=2 with pooling=last: .* Set n to 1"),
        ({"prompt_logprobs": 0}, "prompt_logprobs=0 with pooling=last: .* to None"),
    ],
)
def test_sampling_is_rejected_with_pooling(
    tiny: SimpleNamespace, changes: dict[str, Any], text: str
) -> None:
    engine = build(tiny.model(tiny.config()))
    with pytest.raises(ConfigError, match=text):
        engine.add_request([1], replace(EMBEDDING, **changes), pooling="last")

"""The engine gives every request the tokens and log-probs of one forward pass over its sequence,
whatever else is in the batch."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import (
    AttentionConfig,
    MLAConfig,
    RelativeConfig,
    RopeConfig,
)
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import ConfigError, DataError
from megalith.infer.batch_invariance import check_batch_invariance, logprob_values
from megalith.infer.cache import plan_cache
from megalith.infer.engine import InferenceEngine
from megalith.infer.outputs import RequestOutput
from megalith.kernels import cpu_threads
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.serving.cache_layout import count_required_blocks
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import layout_case
from tests.infer.engines import (
    GREEDY,
    SAMPLED,
    ReferenceProposer,
    build,
    check_logprobs,
    count_accepted,
    run,
)
from tests.test_plugins import RECURRENT

WINDOW = AttentionConfig(window=5, window_layers=(True, False))
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"attention": WINDOW},
    "window with sinks and softcap": {"attention": replace(WINDOW, sinks=True, softcap=2.0)},
    "chunks": {"attention": replace(WINDOW, chunked=True)},
    "MLA": {
        "mla": MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
        "num_kv_heads": 6,
    },
    "learned positions": {"positions": "learned"},
    "relative": {"positions": "relative", "relative": RelativeConfig(buckets=8)},
    "experts": {
        "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig())
    },
}


def random_requests(
    seed: int, vocab: int, *, count: int = 8, longest: int = 40
) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of mixed lengths, several with a common prefix; greedy and sampled, some with n > 1,
    penalties or prompt log-probs."""
    draw = random.Random(seed)
    shared = [draw.randrange(vocab) for _ in range(longest)]
    requests = []
    for index in range(count):
        length = draw.randint(1, longest)
        prompt = shared[: draw.randint(0, length)]
        prompt += [draw.randrange(vocab) for _ in range(max(1, length - len(prompt)))]
        params = SamplingParams(
            max_new_tokens=draw.randint(1, 16),
            temperature=draw.choice([0.0, 0.7, 1.3]),
            seed=100 + index,
            logprobs=0,
            n=draw.choice([1, 1, 1, 3]),
            top_k=draw.choice([None, 5]),
            top_p=draw.choice([None, 0.9]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            prompt_logprobs=draw.choice([None, None, 0]),
        )
        requests.append((prompt, params))
    return requests


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


def alone(engine_of: Any, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """Every request in an engine of its own."""
    return [run(engine_of(), [request])[0] for request in requests]


def used_blocks(engine: InferenceEngine) -> int:
    return engine.scheduler.make_stats().num_used_blocks


SETTINGS: list[dict[str, Any]] = [
    {"block_size": 1, "max_num_batched_tokens": 64},
    {
        "block_size": 3,
        "max_num_batched_tokens": 7,
        "min_prefill_chunk_tokens": 1,
        "max_num_seqs": 5,
    },
    {"block_size": 16, "max_num_batched_tokens": 19, "batching": "static", "max_num_seqs": 9},
    {"block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 6, "pool": 1.3},
    {"block_size": 3, "max_num_batched_tokens": 33, "prefix_caching": False, "pool": 1.6}
    | {"max_num_seqs": 20},
]


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_of_one_forward_pass_in_any_batch(
    kind: str, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    requests = random_requests(len(kind), model.config.vocab_size)
    reference = alone(lambda: build(model, prefix_caching=False), requests)
    for output in reference:
        check_logprobs(model, output)
    preempted = cached = 0
    num_drafts = num_accepted = 0
    for number, settings in enumerate(SETTINGS):
        settings = dict(settings)
        pool = settings.pop("pool", None)
        if pool is not None:
            settings["num_blocks"] = blocks_for_one(model, settings, pool)
        if (number + list(KINDS).index(kind)) % 2:
            settings["proposer"] = ReferenceProposer(reference, seed=number)
        engine = build(model, max_model_len=64, **settings)
        draw = random.Random(number)
        arrivals = {index: draw.randint(0, 12) for index in range(len(requests))}
        outputs = run(engine, requests, arrivals)
        assert tokens_of(outputs) == tokens_of(reference), settings
        for output in outputs:
            check_logprobs(model, output)
        preempted += sum(output.num_preemptions for output in outputs)
        cached += sum(output.num_cached_tokens for output in outputs)
        assert used_blocks(engine) == 0
        drafted, accepted = count_accepted(engine)
        num_drafts += drafted
        num_accepted += accepted
    assert preempted > 0 and cached > 0
    assert 0 < num_accepted < num_drafts


def blocks_for_one(model: Any, settings: dict[str, Any], factor: float) -> int:
    """Blocks for `factor` sequences of 64 tokens."""
    groups = plan_cache(model.config, tp=1, element_size=8).layout.groups
    chunk = settings["max_num_batched_tokens"]
    return int(count_required_blocks(groups, settings["block_size"], 64, chunk=chunk) * factor)


LONG = RopeConfig(
    scaling="longrope",
    factor=6.0,
    original_max_position=16,
    short_factors=(1.0, 1.0),
    long_factors=(3.0, 9.0),
)
ROPE_SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 5, "min_prefill_chunk_tokens": 1, "max_num_seqs": 3},
    {"num_blocks": 26, "max_model_len": 60},
]


def test_longrope_beyond_the_original_length_equals_one_forward_pass(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(rope=LONG, head_dim=4), dtype=torch.float64)
    prompts = [[8, 3], list(range(16)), list(range(30)), [*range(14), 5]]
    requests = [(prompt, replace(SAMPLED, max_new_tokens=25)) for prompt in prompts]
    reference = alone(lambda: build(model), requests)
    for settings in ROPE_SETTINGS:
        engine = build(model, proposer=ReferenceProposer(reference), **settings)
        for _ in range(2):  # the second time with cached prefixes
            outputs = run(engine, requests, {2: 3})
            assert tokens_of(outputs) == tokens_of(reference)
            for output in outputs:
                check_logprobs(model, output, by_prefix=True)
        num_drafts, num_accepted = count_accepted(engine)
        assert 0 < num_accepted < num_drafts


def test_dynamic_rope_does_not_depend_on_chunks_and_preemption(tiny: SimpleNamespace) -> None:
    rope = RopeConfig(scaling="dynamic", factor=4.0, original_max_position=6)
    model = tiny.model(tiny.config(rope=rope, head_dim=4), dtype=torch.float64)
    requests = [(list(range(length)), SAMPLED) for length in (2, 5, 12, 30)]
    reference = alone(lambda: build(model), requests)
    num_preempted = 0
    for settings in ROPE_SETTINGS:
        engine = build(model, proposer=ReferenceProposer(reference), **settings)
        outputs = run(engine, requests, {2: 3})
        assert count_accepted(engine) == (0, 0)  # frequencies depend on the length at each step
        num_preempted += sum(output.num_preemptions for output in outputs)
        assert tokens_of(outputs) == tokens_of(reference)
        for output, expected in zip(outputs, reference, strict=True):
            for one, other in zip(
                output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True
            ):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
    assert num_preempted


def test_a_conversation_computes_only_its_new_tokens(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(model, block_size=4)
    prompt = [3, 1, 4, 1, 5, 9]
    previous: list[int] = []
    for turn in range(4):
        (output,) = run(engine, [(prompt, replace(SAMPLED, max_new_tokens=5))])
        check_logprobs(model, output)
        # the blocks that are full after the previous turn, whose last token was not processed
        assert output.num_cached_tokens == max(0, len(previous) - 1) // 4 * 4
        previous = [*prompt, *output.outputs[0].token_ids]
        prompt = [*previous, 7 + turn, 20 - turn]


def test_other_salts_share_no_prefix(tiny: SimpleNamespace) -> None:
    engine = build(tiny.model(tiny.config()))
    prompt = list(range(20))
    cached = []
    for salt in ("a", "b", None, "a", "b", None):
        params = replace(GREEDY, max_new_tokens=1, cache_salt=salt)
        cached.append(run(engine, [(prompt, params)])[0].num_cached_tokens)
    assert cached == [0, 0, 0, 16, 16, 16]


def test_choices_share_the_prompt_and_have_random_numbers_of_their_own(
    tiny: SimpleNamespace,
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(model, block_size=4, max_num_seqs=8)
    (output,) = run(engine, [(list(range(18)), replace(SAMPLED, n=5))])
    check_logprobs(model, output)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 5
    one = run(build(model), [(list(range(18)), SAMPLED)])[0]
    assert one.outputs[0].token_ids == output.outputs[0].token_ids
    # fewer rows than choices
    few = run(build(model, max_num_seqs=2), [(list(range(18)), replace(SAMPLED, n=5))])
    assert tokens_of(few) == tokens_of([output])


def test_aborted_requests_release_their_blocks_and_change_no_other(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = [(list(range(length)), SAMPLED) for length in (3, 9, 20, 5)]
    reference = alone(lambda: build(model), requests)
    engine = build(model, max_num_batched_tokens=8, max_num_seqs=4, min_prefill_chunk_tokens=1)
    numbers = [engine.add_request(*request) for request in requests]
    results = [engine.output_of(number) for number in numbers]
    for step in range(40):
        if step == 1:  # in the middle of its prompt, and before its first step
            engine.abort(numbers[2])
            engine.abort(numbers[3])
        if step == 6:
            engine.abort(numbers[0])
        engine.step()
    assert [result.outputs[0].finish_reason for result in results] == [
        "abort",
        "length",
        "abort",
        "abort",
    ]
    assert results[1].outputs[0].token_ids == reference[1].outputs[0].token_ids
    aborted = results[0].outputs[0].token_ids
    assert aborted == reference[0].outputs[0].token_ids[: len(aborted)]
    assert not engine.has_unfinished and used_blocks(engine) == 0


def test_a_text_ends_at_a_stop_at_its_length_or_at_the_end_of_the_context(
    tiny: SimpleNamespace,
) -> None:
    model = tiny.model(tiny.config(max_seq_len=16), dtype=torch.float64)
    prompts = [[5, 17, 36, 3, 14], [8], list(range(1, 12))]
    free = [one[0] for one in tokens_of(run(build(model), [(p, GREEDY) for p in prompts]))]
    assert [len(tokens) for tokens in free] == [11, 15, 5]
    stop = free[1][6]
    engine = build(model, eos=frozenset({stop}))
    outputs = run(engine, [(prompt, replace(GREEDY, max_new_tokens=13)) for prompt in prompts])
    for tokens, output in zip(free, outputs, strict=True):
        end = tokens.index(stop) + 1 if stop in tokens else len(tokens)
        assert output.outputs[0].token_ids == tokens[: min(end, 13)]
        expected = "stop" if stop in tokens[:13] else "context"
        assert output.outputs[0].finish_reason == expected
    (last,) = run(build(model), [([8], replace(GREEDY, max_new_tokens=3))])
    assert last.outputs[0].finish_reason == "length"
    (scored,) = run(
        build(model), [([8, 3, 2], SamplingParams(max_new_tokens=0, prompt_logprobs=1))]
    )
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    check_logprobs(model, scored)


def test_an_error_in_the_forward_pass_fails_only_the_request_that_causes_it(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = [(list(range(length)), SAMPLED) for length in (3, 9, 20)]
    reference = alone(lambda: build(model), requests)
    plain = model.forward

    def fails(ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if 19 in ids.tolist() and len(ids) > 1:  # the last token of the third prompt
            raise RuntimeError("out of memory")
        return plain(ids, *rest, **options)

    monkeypatch.setattr(model, "forward", fails)
    engine = build(model)
    outputs = run(engine, requests)
    assert tokens_of(outputs[:2]) == tokens_of(reference[:2])
    (failed,) = outputs[2].outputs
    assert failed.finish_reason == "error" and failed.token_ids == []
    assert failed.error is not None and "RuntimeError: out of memory. Send it" in str(failed.error)
    assert used_blocks(engine) == 0
    monkeypatch.undo()
    again = run(engine, requests)
    assert tokens_of(again) == tokens_of(reference)
    for output in again:
        check_logprobs(model, output)


def test_a_deadline_ends_a_request(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build(tiny.model(tiny.config()))
    number = engine.add_request([1, 2], replace(GREEDY, deadline_s=60.0), arrival_time=0.0)
    result = engine.output_of(number)
    engine.step()
    (completion,) = result.outputs
    assert completion.finish_reason == "error"
    assert str(completion.error).startswith("deadline_s=60.0: the request was not finished")
    assert not engine.has_unfinished


def test_tokens_are_returned_as_soon_as_they_are_sampled(tiny: SimpleNamespace) -> None:
    engine = build(tiny.model(tiny.config()))
    for prompt in ([1, 2], [3]):
        engine.add_request(prompt, GREEDY)
    steps = [engine.step() for _ in range(3)]
    assert [sorted(one.request_id for one in step) for step in steps] == [[0, 1]] * 3


def test_a_window_frees_its_blocks(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(attention=AttentionConfig(window=5)))
    engine = build(model, block_size=4, max_num_batched_tokens=8, max_num_seqs=1)
    engine.add_request(list(range(30)), replace(GREEDY, max_new_tokens=30))
    used = []
    while engine.has_unfinished:
        engine.step()
        used.append(used_blocks(engine))
    assert max(used) <= -(-(5 + 8) // 4) + 1
    assert max(used[8:]) <= 3  # in decoding


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt has 0 tokens: pass at least one"),
        ([1] * 96, "the prompt has 96 tokens, but the context is 96 tokens .* at most 95 tokens"),
        ([1, 37], "the prompt has token 37, but the ids of the model are below 37. Use the tok"),
        ([-1], "the prompt has token -1"),
    ],
)
def test_invalid_prompts_are_rejected(
    prompt: list[int], message: str, tiny: SimpleNamespace
) -> None:
    engine = build(tiny.model(tiny.config()))
    with pytest.raises(DataError, match=message):
        engine.add_request(prompt, GREEDY)
    assert not engine.has_unfinished


def test_invalid_parameters_are_rejected(tiny: SimpleNamespace) -> None:
    engine = build(tiny.model(tiny.config()))
    with pytest.raises(ConfigError, match=r"top_p=2 must be[\s\S]*logit_bias has the token id 37"):
        engine.add_request([1], SamplingParams(top_p=2, logit_bias=((37, 1.0),)))
    with pytest.raises(ConfigError, match=r"stop=\['x'\]: the model has no tokenizer"):
        engine.add_request([1], SamplingParams(stop=("x",)))


def test_a_pool_that_is_too_small_is_rejected(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    with pytest.raises(ConfigError, match=r"num_blocks=3 of 4 tokens cannot hold a seq.* Set"):
        build(model, num_blocks=3, max_model_len=60)
    engine = build(model, num_blocks=3)
    assert engine.max_model_len == 12
    with pytest.raises(ConfigError, match=r"max_model_len=97 is more than model.max_seq_len=96"):
        build(model, max_model_len=97)


def test_generation_computes_no_gradients(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    run(build(model), [([1, 2], GREEDY)])
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bytes_of_the_cache_equal_the_formula(tiny: SimpleNamespace) -> None:
    for kind, changes in KINDS.items():
        model = tiny.model(tiny.config(**changes), dtype=torch.float32)
        engine = build(model, num_blocks=40, max_model_len=32)
        run(engine, [([1, 2], GREEDY)])
        cache = engine.runner.cache
        assert cache.num_bytes == cache.plan.bytes_per_token * 40 * 4, kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_log_probs_have_the_same_bits_in_any_batch(
    dtype: torch.dtype, tiny: SimpleNamespace
) -> None:
    if not cpu_threads.openmp():
        pytest.skip("the kernels need torch's OpenMP library")
    sizes = {"hidden_size": 96, "ffn_hidden_size": 160, "attention": WINDOW}
    model = tiny.model(tiny.config(**sizes, init_std=0.1), dtype=dtype)
    requests = random_requests(3, model.config.vocab_size, count=24)
    reference = alone(lambda: build(model, batch_invariant=True, prefix_caching=False), requests)
    preempted = cached = num_accepted = 0
    for number, settings in enumerate(SETTINGS):
        settings = dict(settings)
        pool = settings.pop("pool", None)
        if pool is not None:
            settings["num_blocks"] = blocks_for_one(model, settings, pool)
        draw = random.Random(number)
        if number % 2:
            settings["proposer"] = ReferenceProposer(reference, seed=number)
        engine = build(model, max_model_len=64, batch_invariant=True, **settings)
        outputs = run(engine, requests, {index: draw.randint(0, 12) for index in range(24)})
        for one, other in zip(outputs, reference, strict=True):
            assert logprob_values(one) == logprob_values(other), settings
        assert tokens_of(outputs) == tokens_of(reference)
        preempted += sum(output.num_preemptions for output in outputs)
        cached += sum(output.num_cached_tokens for output in outputs)
        num_accepted += count_accepted(engine)[1]
    assert preempted > 0 and cached > 0 and num_accepted > 0


def test_model_in_training_mode_is_switched_to_evaluation_with_a_warning(
    tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model(tiny.config()).train()
    build(model)
    assert not model.training and "the model is in training mode; it is switched" in caplog.text
    caplog.clear()
    build(model)
    assert caplog.text == ""


def test_batch_invariance_is_checked_at_the_start(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(hidden_size=96), dtype=torch.float32)
    check_batch_invariance(build(model, batch_invariant=True))
    # float64 matmuls are torch's, whose order of addition depends on the number of rows
    with pytest.raises(ConfigError, match="batch_invariant=true: on this machine the log-probs"):
        check_batch_invariance(build(tiny.model(tiny.config(positions="relative"))))


def test_a_failed_step_does_not_advance_recurrent_states_twice() -> None:
    run_config = layout_case(RECURRENT, ParallelConfig(), 1).run
    model = build_trainer(run_config, build_single_rank_mesh(), torch.device("cpu")).model
    requests = [([5 * n % 61 for n in range(length)], SAMPLED) for length in (3, 9, 20)]
    engine = build(model)
    plain, calls = model.forward, list[int]()

    def fails(ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        outputs = plain(ids, *rest, **options)
        calls.append(len(ids))
        if len(calls) == 6:
            raise RuntimeError("once, after all layers")
        return outputs

    model.forward = fails
    outputs = run(engine, requests)
    del model.forward
    assert max(calls[6:9]) == 1, "the rows of the failed step are executed one by one"
    for output in outputs:
        check_logprobs(model, output)


def test_copies_of_shared_blocks_survive_a_failed_step(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    (reference,) = run(build(model), [([4, 2, 7], replace(SAMPLED, n=3))])
    for number in range(2, 6):
        plain, calls = model.forward, list[int]()

        def fails(
            ids: torch.Tensor,
            *rest: Any,
            plain: Any = plain,
            calls: list[int] = calls,
            **options: Any,
        ) -> Any:
            calls.append(len(ids))
            outputs = plain(ids, *rest, **options)
            if len(calls) == number:  # noqa: B023  # called in this iteration
                raise RuntimeError("once")
            return outputs

        model.forward = fails
        (output,) = run(build(model), [([4, 2, 7], replace(SAMPLED, n=3))])
        del model.forward
        assert tokens_of([output]) == tokens_of([reference])
        check_logprobs(model, output)


def test_a_long_row_that_fails_is_executed_in_two_parts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    plain = model.forward

    def fails(ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if len(ids) > 12:
            raise RuntimeError("out of memory")
        return plain(ids, *rest, **options)

    model.forward = fails
    (output,) = run(build(model), [(list(range(20)), SAMPLED)])
    del model.forward
    assert output.outputs[0].finish_reason == "length"
    check_logprobs(model, output)


def test_an_interrupted_step_leaves_the_engine_usable(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(model)
    number = engine.add_request([1, 2, 3], SAMPLED)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    del model.forward
    engine.abort(number)
    (output,) = run(engine, [([1, 2, 3], SAMPLED)])
    check_logprobs(model, output)


class Raises:
    """A callback whose methods fail."""

    def __getattr__(self, name: str) -> Any:
        def method(*_: Any) -> None:
            raise ValueError(name)

        return method


def test_an_error_in_sampling_or_in_a_callback_does_not_stop_the_engine(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(model)
    engine._callbacks = (Raises(),)
    (reference,) = run(engine, [([1, 2, 3], SAMPLED)])
    check_logprobs(model, reference)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("in sampling")

    with monkeypatch.context() as patch:
        patch.setattr("megalith.infer.step_results.sample_tokens", fails)
        (failed,) = run(engine, [([1, 2, 3], SAMPLED)])
    assert "ValueError: in sampling" in str(failed.outputs[0].error)
    assert used_blocks(engine) == 0
    assert tokens_of(run(engine, [([1, 2, 3], SAMPLED)])) == tokens_of([reference])


def test_cached_tokens_are_counted_without_a_generated_token(tiny: SimpleNamespace) -> None:
    engine = build(tiny.model(tiny.config()))
    prompt = list(range(20))
    run(engine, [(prompt, replace(GREEDY, max_new_tokens=1))])
    (output,) = run(engine, [(prompt, replace(GREEDY, max_new_tokens=0))])
    assert output.num_cached_tokens == 16

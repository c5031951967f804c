"""Tensor- and expert-parallel ranks generate the tokens of one process."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import ConfigError
from megalith.infer.layout import generation_layout
from megalith.infer.logprobs import TokenLogprobs
from megalith.nn.moe import Router
from megalith.observe.flight import FlightRecorder
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import GREEDY, SAMPLED, build, count_accepted, run

PROMPTS = [[5, 17, 36, 3, 14], [8], list(range(1, 12))]
SCORED = SamplingParams(
    max_new_tokens=12, seed=9, n=2, top_k=20, top_p=0.95, logprobs=0, prompt_logprobs=0
)
Generated = list[tuple[list[int], list[float]]]


def generate(model: Any, params: SamplingParams, **engine: Any) -> Generated:
    """Generated and log-probs of every choice."""
    outputs = run(build(model, **engine), [(prompt, params) for prompt in PROMPTS], {2: 2})
    return [
        (one.token_ids, [each.logprob for each in one.logprobs])
        for output in outputs
        for one in output.outputs
    ]


def on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, params: SamplingParams
) -> Generated:
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    model = make(config, mesh, dtype=torch.float64)
    settings = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "speculation": "ngram"}
    return generate(model, params, **settings)


def check_ranks(world: int, config: ModelConfig, tiny: SimpleNamespace) -> None:
    expected = generate(tiny.model(config, dtype=torch.float64), SCORED)
    results = run_ranks(on_a_rank, world, config, tiny.model, SCORED)
    assert results[0] == results[-1]
    for (ids, logprobs), (reference_ids, reference) in zip(results[0], expected, strict=True):
        assert ids == reference_ids
        assert logprobs == pytest.approx(reference, abs=1e-9)


@pytest.mark.parametrize(("tp", "kv_heads"), [(2, 2), (2, 1), (3, 3)])
def test_every_rank_generates_the_tokens_of_one_process(
    tp: int, kv_heads: int, tiny: SimpleNamespace
) -> None:
    check_ranks(tp, tiny.config(num_kv_heads=kv_heads), tiny)


MIXED = [
    SCORED,
    replace(SCORED, temperature=0.0, logprobs=4, prompt_logprobs=3, n=1),
    replace(SCORED, min_p=0.05, top_k=None, top_p=None, repetition_penalty=1.3, min_tokens=8),
    replace(SCORED, top_k=None, logprobs=5, logprobs_mode="processed", frequency_penalty=0.5),
    replace(SCORED, top_k=None, top_p=None, logit_bias=((30, 4.0), (2, -5.0))),
    replace(SCORED, allowed_token_ids=(1, 8, 20, 33, 36), top_p=None),
]


def generate_with_drafts(model: Any, draft_model: Any, method: str) -> tuple[list[Any], int]:
    """Outputs of requests with other parameters each, and the number of accepted drafts."""
    drafts = {"draft_model": draft_model} if method == "draft_model" else {"speculation": method}
    engine = build(
        model, eos=frozenset([4, 30]), max_num_batched_tokens=24, max_num_seqs=9, **drafts
    )
    requests = [(prompt, params) for params in MIXED for prompt in PROMPTS]
    outputs = run(engine, requests, {2: 2, 7: 4})
    results = [
        (output.prompt_logprobs, [(one.token_ids, one.logprobs) for one in output.outputs])
        for output in outputs
    ]
    return results, count_accepted(engine)[1]


def draft_on_a_rank(
    rank: int, world: int, configs: tuple[ModelConfig, ModelConfig], make: Any, method: str
) -> tuple[list[Any], int]:
    grid = model_grid(generation_layout(configs[0], world), configs[0], world)
    mesh = build_mesh(grid, rank=rank)
    models = [make(config, mesh, dtype=torch.float64) for config in configs]
    return generate_with_drafts(*models, method)


def same_logprobs(actual: TokenLogprobs, expected: TokenLogprobs) -> bool:
    return (actual.token, actual.rank, list(actual.top_logprobs)) == (
        expected.token,
        expected.rank,
        list(expected.top_logprobs),
    ) and list(actual.top_logprobs.values()) == pytest.approx(
        list(expected.top_logprobs.values()), abs=1e-9
    )


@pytest.mark.parametrize(
    ("tp", "method"), [(2, "draft_model"), (3, "draft_model"), (2, "mtp"), (3, "ngram")]
)
def test_ranks_draft_and_sample_from_slices_of_the_vocabulary(
    tp: int, method: str, tiny: SimpleNamespace
) -> None:
    """The slices of the model and the draft model differ; at tp 3 the last one of the draft model
    is padding."""
    heads = {"num_kv_heads": 3 if tp == 3 else 2}
    config = tiny.config(mtp=MTPConfig(num_layers=2 if method == "mtp" else 0), **heads)
    draft_config = tiny.config(vocab_size=41, pad_vocab_to_multiple_of=64, num_layers=1, **heads)
    configs = config, draft_config
    models = [tiny.model(each, dtype=torch.float64) for each in configs]
    expected, num_accepted = generate_with_drafts(*models, method)
    results = run_ranks(draft_on_a_rank, tp, configs, tiny.model, method)
    assert all(result == results[0] for result in results)
    assert results[0][1] == num_accepted > 0
    for (prompt, choices), (prompt_reference, references) in zip(
        results[0][0], expected, strict=True
    ):
        assert all(map(same_logprobs, prompt, prompt_reference))
        for (ids, logprobs), (reference_ids, reference) in zip(choices, references, strict=True):
            assert ids == reference_ids
            assert all(map(same_logprobs, logprobs, reference))


def record_collectives(
    rank: int, world: int, config: ModelConfig, make: Any
) -> list[tuple[int, int]]:
    """Numbers of rows of each decode step, and of elements that its largest collective returns."""
    flight = FlightRecorder()
    grid = model_grid(generation_layout(config, world), config, world)
    mesh = build_mesh(grid, rank=rank, flight=flight)
    engine = build(make(config, mesh, dtype=torch.float64), max_num_batched_tokens=64)
    for params in MIXED:
        engine.add_request([5, 17, 36], replace(params, prompt_logprobs=None, n=1))
    engine.step()
    steps = []
    for _ in range(5):
        flight.entries.clear()
        engine.step()
        assert {entry.rows for entry in flight.entries} == {None}
        sizes = [math.prod(entry.shape or ()) * world for entry in flight.entries]
        steps.append((len(MIXED), max(sizes)))
    return steps


def test_no_collective_of_a_decode_step_moves_the_logits(tiny: SimpleNamespace) -> None:
    v = 6000
    steps, *others = run_ranks(record_collectives, 2, tiny.config(vocab_size=v), tiny.model)
    assert others == [steps] and len(steps) == 5
    for num_rows, num_elements in steps:
        # one row has a flat distribution, for which top_p needs all its logits
        assert 0 < num_elements < 2 * v < num_rows * v


ROUTER = RouterConfig(score="sigmoid", expert_bias=True, jitter=0.3)
EXPERTS = MoEConfig(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=7,
    shared_ffn_hidden_size=5,
    shared_gate=True,
    router=ROUTER,
    aux_loss=AuxLossConfig(batch_coeff=0.1),
    capacity=CapacityConfig(factor=0.3),
)


@pytest.mark.parametrize("moe", [EXPERTS, replace(EXPERTS, num_experts=5)])
def test_expert_parallel_ranks_generate_the_tokens_of_one_process(
    moe: MoEConfig, tiny: SimpleNamespace
) -> None:
    config = tiny.config(moe=moe)
    assert (generation_layout(config, 2).ep, generation_layout(config, 2).etp) == (
        (2, 1) if moe is EXPERTS else (1, None)
    )
    check_ranks(2, config, tiny)


def test_generation_neither_counts_nor_drops_tokens_in_experts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(moe=EXPERTS), dtype=torch.float64)
    result = generate(model, GREEDY)
    assert all(
        router.balance.record is None for router in model.modules() if isinstance(router, Router)
    )
    for changes in ({"capacity": CapacityConfig()}, {"router": replace(ROUTER, jitter=0.0)}):
        other = tiny.model(tiny.config(moe=replace(EXPERTS, **changes)), dtype=torch.float64)
        assert generate(other, GREEDY) == result


def rejects_deadline(rank: int, world: int, config: ModelConfig, make: Any) -> str:
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    engine = build(make(config, mesh, dtype=torch.float64))
    with pytest.raises(ConfigError) as caught:
        engine.add_request([1], replace(SAMPLED, deadline_s=5.0))
    return str(caught.value)


def test_deadlines_need_one_clock(tiny: SimpleNamespace) -> None:
    for text in run_ranks(rejects_deadline, 2, tiny.config(), tiny.model):
        assert text.startswith("deadline_s=5.0: the clocks of parallel ranks differ")

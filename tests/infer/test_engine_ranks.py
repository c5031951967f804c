"""Tensor- and expert-parallel ranks generate the tokens of one process."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import ConfigError
from megalith.infer.load import generation_layout
from megalith.nn.moe import Router
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import GREEDY, SAMPLED, build, run

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
        assert text.startswith("deadline_s=5.0: the clocks of tensor-parallel ranks differ")

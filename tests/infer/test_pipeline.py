"""Pipeline stages generate the tokens of one process, with as many steps in flight as stages."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import AttentionConfig, CrossConfig, MLAConfig, ModelConfig
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.serve import InferenceParallelConfig
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import generation_layout
from megalith.infer.load import connect_stages
from megalith.infer.outputs import RequestOutput
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, check_logprobs, run

CPU = torch.device("cpu")
MODELS: dict[str, dict[str, Any]] = {
    "full": {"num_layers": 4},
    "windows, tied": {
        "num_layers": 5,
        "attention": AttentionConfig(window=5, window_layers=(True, True, False, True, False)),
        "tied_embeddings": True,
    },
    "cross-layer attention": {"num_layers": 4, "cross": CrossConfig(memory=1)},
    "MLA, experts": {
        "num_layers": 3,
        "mla": MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
        "num_kv_heads": 6,
        "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig()),
    },
}
PREEMPTING = {"num_blocks": 26, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 6}


def make_requests(seed: int) -> tuple[list[tuple[list[int], SamplingParams]], dict[int, int]]:
    """Requests of all kinds that arrive at random steps; some share a prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(37) for _ in range(9)]
    requests, arrivals = [], {}
    for index in range(10):
        prompt = [draw.randrange(37) for _ in range(draw.randint(1, 20))]
        if draw.random() < 0.4:
            prompt = shared + prompt
        params = SamplingParams(
            max_new_tokens=draw.choice([1, 5, 14]),
            temperature=draw.choice([0.0, 1.0]),
            seed=index,
            n=draw.choice([1, 1, 3]),
            logprobs=0,
            prompt_logprobs=draw.choice([None, 0]),
            repetition_penalty=draw.choice([1.0, 1.2]),
        )
        if index == 4:
            params = replace(params, max_new_tokens=0, n=1, prompt_logprobs=0)
        requests.append((prompt, params))
        arrivals[index] = draw.randint(0, 12)
    return requests, arrivals


def build_stage(
    rank: int, world: int, config: ModelConfig, make: Any, pp: int, **engine: Any
) -> InferenceEngine:
    """Engine of a pipeline stage, of float64."""
    layout = generation_layout(config, world, InferenceParallelConfig(pp=pp))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    return build(model, link=connect_stages(model, mesh.pp, CPU), **engine)


def run_stage(
    rank: int, world: int, config: ModelConfig, make: Any, pp: int, seed: int, engine: Any
) -> tuple[list[RequestOutput], int]:
    stage = build_stage(rank, world, config, make, pp, **engine)
    outputs = run(stage, *make_requests(seed))
    stage.scheduler.check()
    assert stage.scheduler.make_stats().num_used_blocks == 0
    return outputs, stage.scheduler.make_stats().num_preemptions


def values_of(output: RequestOutput) -> list[Any]:
    return [(one.token_ids, one.finish_reason) for one in output.outputs]


@pytest.mark.parametrize(
    ("name", "world", "pp", "settings"),
    [
        ("full", 2, 2, {"block_size": 3, "max_num_batched_tokens": 7, "max_num_seqs": 7}),
        ("windows, tied", 3, 3, PREEMPTING),
        ("cross-layer attention", 2, 2, {}),
        ("MLA, experts", 4, 2, PREEMPTING | {"num_blocks": 13, "speculation": "ngram"}),
    ],
)
def test_stages_generate_the_tokens_of_one_process(
    name: str, world: int, pp: int, settings: dict[str, Any], tiny: SimpleNamespace
) -> None:
    config = tiny.config(**MODELS[name])
    model = tiny.model(config, dtype=torch.float64)
    requests, arrivals = make_requests(len(name))
    expected = run(build(model), requests, arrivals)
    results = run_ranks(run_stage, world, config, tiny.model, pp, len(name), settings)
    for outputs, num_preemptions in results:
        assert [values_of(output) for output in outputs] == [values_of(one) for one in expected]
        assert num_preemptions == results[0][1]
        assert (num_preemptions > 0) == ("num_blocks" in settings)
    for output in results[0][0]:
        check_logprobs(model, output)


def abort_in_flight(
    rank: int, world: int, config: ModelConfig, make: Any
) -> tuple[list[RequestOutput], int]:
    """Abort a request and end another one by length while steps are in flight."""
    stage = build_stage(rank, world, config, make, world)
    params = SamplingParams(max_new_tokens=12, seed=3, logprobs=0)
    numbers = [
        stage.add_request([5, 7, 9 + index], replace(params, seed=index)) for index in range(4)
    ]
    outputs = [stage.output_of(number) for number in numbers]
    most_in_flight = step = 0
    while stage.has_unfinished:
        stage.step()
        most_in_flight = max(most_in_flight, len(stage._in_flight))
        step += 1
        if step == 6:
            stage.abort(numbers[1])
    assert stage.scheduler.make_stats().num_used_blocks == 0
    return outputs, most_in_flight


def test_requests_are_aborted_while_their_step_is_in_flight(tiny: SimpleNamespace) -> None:
    config = tiny.config(num_layers=3)
    model = tiny.model(config, dtype=torch.float64)
    params = SamplingParams(max_new_tokens=12, seed=3, logprobs=0)
    expected = run(
        build(model),
        [([5, 7, 9 + index], replace(params, seed=index)) for index in range(4)],
    )
    for outputs, most_in_flight in run_ranks(abort_in_flight, 3, config, tiny.model):
        assert most_in_flight == 2, "after a step, one less than the stages are in flight"
        assert outputs[1].outputs[0].finish_reason == "abort"
        tokens = outputs[1].outputs[0].token_ids
        assert tokens == expected[1].outputs[0].token_ids[: len(tokens)]
        for index in (0, 2, 3):
            assert values_of(outputs[index]) == values_of(expected[index])

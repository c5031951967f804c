"""Sequence-parallel ranks, and data-parallel ranks that share experts, generate the tokens of one
process."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.serve import InferenceParallelConfig
from megalith.errors import RankError
from megalith.infer.load import connect_stages, find_expert_peers, generation_layout
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, check_logprobs, run
from tests.infer.test_pipeline import PREEMPTING, make_requests, values_of

CPU = torch.device("cpu")
EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig())
SETTINGS = PREEMPTING | {"num_blocks": 16, "speculation": "ngram"}


def run_rank(
    rank: int,
    world: int,
    config: ModelConfig,
    make: Any,
    parallel: InferenceParallelConfig,
    seed: int,
    fault: str | None = None,
) -> list[Any]:
    """Outputs of the requests of this rank: those with its index modulo dp. `fault`: all but the
    first data-parallel rank have no requests; idle: they do not execute the steps of the first."""
    layout = generation_layout(config, world, parallel)
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    engine = build(
        model,
        link=connect_stages(model, mesh.pp, CPU),
        expert_peers=find_expert_peers(layout, mesh),
        **SETTINGS,
    )
    if fault == "idle":
        agree = engine.runner.agree_on_step
        engine.runner.agree_on_step = lambda **flags: (  # type: ignore[method-assign]
            agree(**flags)[0],
            flags["has_rows"],
        )
    requests, arrivals = make_requests(seed)
    own = range(mesh.dp.rank, len(requests), mesh.dp.size)
    if fault is not None:
        own, arrivals = (own if mesh.dp.rank == 0 else range(0)), dict.fromkeys(arrivals, 0)
    outputs = run(
        engine,
        [requests[index] for index in own],
        {number: arrivals[index] * (1 + mesh.dp.rank) for number, index in enumerate(own)},
    )
    engine.scheduler.check()
    assert engine.scheduler.make_stats().num_used_blocks == 0
    return list(zip(own, outputs, strict=True))


@pytest.mark.parametrize(
    ("world", "parallel", "moe"),
    [
        (2, InferenceParallelConfig(sp=True), None),
        (2, InferenceParallelConfig(sp=True), EXPERTS),
        (2, InferenceParallelConfig(dp=2), EXPERTS),
        (4, InferenceParallelConfig(dp=2, pp=2), EXPERTS),
        (4, InferenceParallelConfig(dp=2, sp=True), EXPERTS),
        (2, InferenceParallelConfig(dp=2), replace(EXPERTS, num_experts=5)),
    ],
)
def test_ranks_generate_the_tokens_of_one_process(
    world: int,
    parallel: InferenceParallelConfig,
    moe: MoEConfig | None,
    tiny: SimpleNamespace,
) -> None:
    config = tiny.config(moe=moe)
    model = tiny.model(config, dtype=torch.float64)
    expected = run(build(model), make_requests(world)[0])
    results = run_ranks(run_rank, world, config, tiny.model, parallel, world)
    seen = set()
    for outputs in results:
        for index, output in outputs:
            assert values_of(output) == values_of(expected[index]), index
            seen.add(index)
    assert seen == set(range(len(expected)))
    for _, output in results[0]:
        check_logprobs(model, output)


def test_expert_ranks_of_two_data_parallel_ranks_share_the_experts(tiny: SimpleNamespace) -> None:
    config = tiny.config(moe=EXPERTS)
    layout = generation_layout(config, 4, InferenceParallelConfig(dp=2))
    assert (layout.tp, layout.ep, layout.etp) == (2, 4, 1)
    dense = generation_layout(tiny.config(), 4, InferenceParallelConfig(dp=2))
    assert (dense.tp, dense.ep) == (2, 1)


def test_idle_rank_that_skips_the_experts_is_caught(tiny: SimpleNamespace) -> None:
    """Planted fault 23: the other ranks wait for its tokens."""
    config, parallel = tiny.config(moe=EXPERTS), InferenceParallelConfig(dp=2)
    results = run_ranks(run_rank, 2, config, tiny.model, parallel, 2, "no requests")
    assert results[0] and not results[1]
    with pytest.raises(RankError):
        run_ranks(run_rank, 2, config, tiny.model, parallel, 2, "idle", timeout=8)

"""Sequence-parallel ranks, and data-parallel ranks that share experts, generate the tokens of one
process."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.serve import (
    EngineConfig,
    InferenceParallelConfig,
    parallel_problems,
)
from megalith.errors import RankError
from megalith.infer.layout import generation_layout, inference_layout_problems
from megalith.infer.load import connect_stages, find_expert_group
from megalith.kernels.triton import launch
from megalith.parallel import nvls
from megalith.parallel.collectives import PROCESS_GROUP, Collectives
from megalith.parallel.group import Group
from megalith.parallel.mesh import build_mesh
from megalith.parallel.nvls import choose_collectives
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, check_logprobs, run
from tests.infer.test_pipeline import PREEMPTING, make_requests, values_of
from tests.parallel.multicast import simulate_multicast

CPU = torch.device("cpu")
EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig())
LATENT = MLAConfig(
    kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3
)  # decode is absorbed, prefill not
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
        expert_group=find_expert_group(layout, mesh),
        **SETTINGS,
    )
    if fault == "idle":
        reduce_flags = engine.runner.reduce_step_flags
        engine.runner.reduce_step_flags = lambda **flags: (  # type: ignore[method-assign]
            reduce_flags(**flags)[0],
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
    ("world", "parallel", "changes"),
    [
        (2, InferenceParallelConfig(sp=True), {}),
        (2, InferenceParallelConfig(sp=True), {"moe": EXPERTS}),
        (2, InferenceParallelConfig(sp=True), {"mla": LATENT, "num_kv_heads": 6}),
        (
            3,
            InferenceParallelConfig(sp=True),
            {"mla": replace(LATENT, q_rank=5), "num_kv_heads": 6, "ffn_hidden_size": 12},
        ),
        (2, InferenceParallelConfig(dp=2), {"moe": EXPERTS}),
        (4, InferenceParallelConfig(dp=2, pp=2), {"moe": EXPERTS}),
        (  # with a sharded KV cache
            4,
            InferenceParallelConfig(dp=2, sp=True),
            {"moe": EXPERTS, "num_kv_heads": 1},
        ),
        (2, InferenceParallelConfig(dp=2), {"moe": replace(EXPERTS, num_experts=5)}),
    ],
)
def test_ranks_generate_the_tokens_of_one_process(
    world: int,
    parallel: InferenceParallelConfig,
    changes: dict[str, Any],
    tiny: SimpleNamespace,
) -> None:
    config = tiny.config(**changes)
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


def count_calls(collectives: Collectives, calls: Counter[str]) -> Collectives:
    """The collectives, whose calls are counted."""

    def count(name: str, x: torch.Tensor, group: Group) -> torch.Tensor:
        calls[name] += 1
        result: torch.Tensor = getattr(collectives, name)(x, group)
        return result

    names = "all_gather", "reduce_scatter", "all_reduce"
    return collectives._replace(**{name: partial(count, name) for name in names})


def run_collectives(
    rank: int,
    world: int,
    config: ModelConfig,
    make: Any,
    sp: bool,
    kind: Literal["process_group", "no sum", "nvls"],
    path: Path,
) -> tuple[list[Any], Counter[str]]:
    """Values of all outputs, and the calls of layers; in float64, which the simulated switch adds,
    too."""
    layout = generation_layout(config, world, InferenceParallelConfig(sp=sp))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    calls: Counter[str] = Counter()
    chosen = PROCESS_GROUP
    with (
        simulate_multicast(mesh.tp, path, 1 << 14),
        patch.object(nvls, "SUMMED_DTYPES", (torch.float64,)),
    ):
        if kind == "nvls":
            chosen = choose_collectives("nvls", mesh.tp, CPU)
            subject = chosen.all_reduce.__self__  # type: ignore[attr-defined]  # a method
        if kind == "no sum":
            chosen = chosen._replace(all_reduce=lambda x, group: x)
        chosen = count_calls(chosen, calls)
        engine = build(
            make(config, mesh, parallel=layout, dtype=torch.float64, collectives=chosen),
            **SETTINGS,
        )
        outputs = run(engine, make_requests(world)[0])
    assert kind != "nvls" or not subject.process_group_calls
    return [values_of(output) for output in outputs], calls


@pytest.mark.parametrize("sp", [False, True])
def test_layers_communicate_through_the_collectives(
    sp: bool, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    config = tiny.config()
    expected = run(build(tiny.model(config, dtype=torch.float64)), make_requests(2)[0])
    results = run_ranks(
        run_collectives, 2, config, tiny.model, sp, "process_group", tmp_path / "parts"
    )
    for values, calls in results:
        assert values == [values_of(output) for output in expected]
        assert set(calls) == ({"all_gather", "reduce_scatter"} if sp else {"all_reduce"})


def test_missing_sum_changes_the_tokens(tiny: SimpleNamespace, tmp_path: Path) -> None:
    """Planted fault: collectives without communication."""
    arguments = tiny.config(), tiny.model, False
    right, wrong = (
        run_ranks(run_collectives, 2, *arguments, kind, tmp_path / "parts")[0][0]
        for kind in ("process_group", "no sum")
    )
    assert right != wrong


@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("sp", [False, True])
def test_nvls_and_process_group_generate_the_same_bits(
    sp: bool, tiny: SimpleNamespace, tmp_path: Path
) -> None:
    """A sum of two values has one order."""
    arguments = tiny.config(), tiny.model, sp
    one, other = (
        run_ranks(run_collectives, 2, *arguments, kind, tmp_path / "parts")
        for kind in ("process_group", "nvls")
    )
    assert one == other and one[0][1]


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
    with pytest.raises(RankError, match="did not finish within 8 s(?s:.*)reduce_step_flags"):
        run_ranks(run_rank, 2, config, tiny.model, parallel, 2, "idle", timeout=8)


def run_second_round(rank: int, world: int, config: ModelConfig, make: Any) -> list[list[int]]:
    """Tokens of requests without a seed; in the second round only the first rank has some."""
    layout = generation_layout(config, world, InferenceParallelConfig(dp=2))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    group = find_expert_group(layout, mesh)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    engine = build(model, expert_group=group, dp=mesh.dp)
    request = ([5, 6, 7], SamplingParams(max_new_tokens=6))
    outputs = run(engine, [request])
    engine.start_round()
    outputs += run(engine, [request] * (1 - rank))
    return [output.outputs[0].token_ids for output in outputs]


def test_ranks_without_requests_take_part_in_a_second_round(tiny: SimpleNamespace) -> None:
    first, second = run_ranks(run_second_round, 2, tiny.config(moe=EXPERTS), tiny.model)
    assert len(first) == 2 and len(second) == 1
    assert len({tuple(tokens) for tokens in (*first, *second)}) == 3, "equal seeds"


@pytest.mark.parametrize(
    ("engine", "parallel", "message"),
    [
        (
            EngineConfig(batching="static"),
            InferenceParallelConfig(pp=2),
            "batching=static with parallel.pp=2: a batch has one step in flight. Set batching to "
            "continuous, or parallel.pp to 1.",
        ),
        (
            EngineConfig(max_adapters=2),
            InferenceParallelConfig(dp=2),
            "max_adapters=2 with parallel.dp=2: data-parallel ranks would load in different "
            "steps. Set max_adapters to 0, or parallel.dp to 1.",
        ),
        (
            EngineConfig(max_adapters=2),
            InferenceParallelConfig(sp=True),
            "max_adapters=2 with parallel.sp=true: adapters need all tokens on every rank.",
        ),
    ],
)
def test_settings_that_a_layout_does_not_support_are_reported(
    engine: EngineConfig, parallel: InferenceParallelConfig, message: str
) -> None:
    (problem,) = parallel_problems(engine, parallel)
    assert problem.startswith(message)


def test_invalid_number_of_data_parallel_ranks_is_reported(tiny: SimpleNamespace) -> None:
    (problem,) = inference_layout_problems(tiny.config(), 2, InferenceParallelConfig(dp=0))
    assert problem.startswith("parallel.dp=0 must be at least 1")

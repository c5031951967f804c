"""Drafts of a draft model and of MTP layers on pipeline stages, sequence-parallel ranks, and
data-parallel ranks that share experts: the tokens of one process, and its drafts."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.moe import MoEConfig
from megalith.config.serve import (
    CacheConfig,
    EngineConfig,
    InferenceParallelConfig,
    SpeculationConfig,
)
from megalith.errors import RankError
from megalith.infer import load
from megalith.infer.build import build_engine
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import build_generation_mesh, generation_layout, open_source
from megalith.infer.load import (
    build_draft_mesh,
    connect_stages,
    find_expert_group,
    load_text_generator,
)
from megalith.infer.mtp_drafts import MTPProposer
from megalith.infer.runner import ModelRunner
from megalith.infer.speculative import DraftLengthController
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, check_logprobs, count_accepted, run
from tests.infer.test_parallel_layouts import CPU, EXPERTS
from tests.infer.test_pipeline import PREEMPTING, make_requests, values_of
from tests.infer.test_quantize import save

EXACT = torch.float64
SETTINGS = PREEMPTING | {"num_blocks": 18}
ALONE = [
    ([5, 9, 2, 7 + index], SamplingParams(max_new_tokens=12, seed=index)) for index in range(2)
]
"""Requests that data-parallel ranks have one at a time."""


def slow(*values: object) -> Any:
    """Parameters of tests that `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def build_rank(
    config: ModelConfig, make: Any, mesh: Mesh, parallel: InferenceParallelConfig, method: str
) -> InferenceEngine:
    """Engine of a rank, of float64; the draft model is the model itself."""
    layout = generation_layout(config, mesh.world.size, parallel)
    model = make(config, mesh, parallel=layout, dtype=EXACT)
    drafts: dict[str, Any] = {"speculation": method}
    if method == "draft_model":
        draft_mesh = build_draft_mesh(config, mesh)
        drafts = {"draft_config": config}
        if mesh.rank in draft_mesh.grid.ranks:
            layout_of_draft = generation_layout(config, mesh.tp.size)
            drafts["draft_model"] = make(config, draft_mesh, parallel=layout_of_draft, dtype=EXACT)
    return build(
        model,
        link=connect_stages(model, mesh.pp, CPU),
        expert_group=find_expert_group(layout, mesh),
        **SETTINGS,
        **drafts,
    )


def run_rank(
    rank: int,
    world: int,
    config: ModelConfig,
    make: Any,
    parallel: InferenceParallelConfig,
    method: str,
    fault: bool = False,
) -> tuple[list[Any], tuple[int, int], int]:
    """Outputs of the requests of this rank, the drafts of one request alone, and its number;
    `fault`: ranks without drafts do not execute the MTP layers."""
    if fault:
        MTPProposer._count_chunks = lambda self, count: 0  # type: ignore[method-assign]
        ModelRunner.reduce_max = lambda self, value: value  # type: ignore[method-assign]
    mesh_layout = generation_layout(config, world, parallel)
    mesh = build_mesh(model_grid(mesh_layout, config, world), rank=rank)
    engine = build_rank(config, make, mesh, parallel, method)
    alone = mesh.dp.rank
    run(engine, ALONE[alone : alone + 1])
    drafts = count_accepted(engine)
    engine.scheduler.reset_prefix_cache()
    requests, arrivals = make_requests(world)
    own = range(alone, len(requests), mesh.dp.size)
    outputs = run(
        engine,
        [requests[index] for index in own],
        {number: arrivals[index] * (1 + alone) for number, index in enumerate(own)},
    )
    engine.scheduler.check()
    assert engine.scheduler.make_stats().num_used_blocks == 0
    check_no_drafts_are_kept(engine)
    if parallel.pp > 1 and parallel.dp == 1:
        abort_in_flight(engine)
        check_no_drafts_are_kept(engine)
    return list(zip(own, outputs, strict=True)), drafts, alone


def abort_in_flight(engine: InferenceEngine) -> None:
    """Abort requests while a step of theirs is in flight, after different numbers of steps."""
    for num_steps in (4, 5):
        numbers = [engine.add_request(*ALONE[0]) for _ in range(6)]
        for _ in range(num_steps):
            engine.step()
        assert engine._in_flight, "no step is in flight"
        for number in numbers:
            engine.abort(number)
        while engine.has_unfinished:
            engine.step()


def check_no_drafts_are_kept(engine: InferenceEngine) -> None:
    """Check that ended sequences have no drafts, hidden states or blocks."""
    speculator = engine._speculator
    assert speculator is not None and not getattr(speculator, "_received", {})
    if speculator.proposer is not None:
        proposer: Any = speculator.proposer
        assert proposer._cache._manager.allocator.num_used == 0
        assert not getattr(proposer, "_hidden_states", {})


PP = InferenceParallelConfig(pp=2)
SP = InferenceParallelConfig(sp=True)
DP = InferenceParallelConfig(dp=2)


@pytest.mark.parametrize("method", ["draft_model", "mtp"])
@pytest.mark.parametrize(
    ("world", "parallel", "moe", "kv_heads"),
    [
        (2, PP, None, 2),
        (2, SP, None, 2),
        (2, DP, EXPERTS, 2),
        slow(4, replace(SP, pp=2), None, 2),
        slow(4, InferenceParallelConfig(dp=2, pp=2), EXPERTS, 2),
        slow(4, InferenceParallelConfig(dp=2, sp=True), EXPERTS, 1),
        slow(3, InferenceParallelConfig(pp=3), EXPERTS, 2),
    ],
)
def test_ranks_generate_the_tokens_and_drafts_of_one_process(
    method: str,
    world: int,
    parallel: InferenceParallelConfig,
    moe: MoEConfig | None,
    kv_heads: int,
    tiny: SimpleNamespace,
) -> None:
    mtp = MTPConfig(num_layers=2 if method == "mtp" else 0)
    config = tiny.config(moe=moe, num_kv_heads=kv_heads, mtp=mtp, num_layers=3)
    model = tiny.model(config, dtype=EXACT)
    drafts: dict[str, Any] = {"speculation": method}
    if method == "draft_model":
        drafts = {"draft_model": tiny.model(config, dtype=EXACT)}
    expected = run(build(model), make_requests(world)[0])
    expected_drafts = []
    for request in ALONE:
        engine = build(model, **drafts)
        run(engine, [request])
        expected_drafts.append(count_accepted(engine))
    assert all(num_drafts > 0 for num_drafts, _ in expected_drafts)
    seen = set()
    for outputs, counts, alone in run_ranks(run_rank, world, config, tiny.model, parallel, method):
        assert counts == expected_drafts[alone]
        for index, output in outputs:
            assert values_of(output) == values_of(expected[index]), index
            check_logprobs(model, output)
            seen.add(index)
    assert seen == set(range(len(expected)))


def generate_loaded(
    rank: int, world: int, path: Path, draft: Path, parallel: InferenceParallelConfig
) -> list[tuple[list[int], int]]:
    """Tokens and number of drafts of a request with each method; the weights are read."""
    results = []
    for speculation in (
        SpeculationConfig(method="draft_model", draft_model=str(draft)),
        SpeculationConfig(method="mtp"),
    ):
        config = EngineConfig(speculation=speculation, cache=CacheConfig(num_blocks=16))
        source = open_source(str(path), world, parallel=parallel)
        mesh = build_generation_mesh(source.model, parallel, rank=rank, world=world)
        generator = load_text_generator(source, mesh, CPU, EXACT, config=config, parallel=parallel)
        is_last = mesh.pp.rank == mesh.pp.size - 1
        assert (generator.draft_model is not None) == (
            is_last and speculation.method == "draft_model"
        )
        engine = build_engine(generator, config)
        assert engine._speculator is not None
        engine._speculator.lengths = DraftLengthController(4, measures_time=False)
        (output,) = run(engine, ALONE[:1])
        engine.runner.close()
        results.append((output.outputs[0].token_ids, count_accepted(engine)[0]))
    return results


@pytest.mark.parametrize("tied", [False, slow(True)])
def test_weights_of_drafts_are_loaded_on_the_last_stage(
    tied: bool, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config(vocab_size=257, mtp=MTPConfig(num_layers=1), tied_embeddings=tied)
    path = save(tmp_path / "model", tiny.model(config))
    draft = save(tmp_path / "draft", tiny.model(tiny.config(vocab_size=257, moe=EXPERTS)))
    alone = InferenceParallelConfig()
    expected = generate_loaded(0, 1, path, draft, alone)
    assert all(num_drafts > 0 for _, num_drafts in expected)
    for result in run_ranks(generate_loaded, 2, path, draft, PP):
        assert result == expected


def list_warnings(rank: int, world: int, path: Path, draft: Path) -> list[str]:
    """Warnings while a model and its draft model are loaded on data-parallel ranks."""
    parallel = InferenceParallelConfig(dp=world)
    config = EngineConfig(
        speculation=SpeculationConfig(method="draft_model", draft_model=str(draft))
    )
    source = open_source(str(path), world, parallel=parallel)
    mesh = build_generation_mesh(source.model, parallel, rank=rank, world=world)
    texts: list[str] = []
    with patch.object(load.logger, "warning", lambda text, *values: texts.append(text % values)):
        load_text_generator(source, mesh, CPU, EXACT, config=config, parallel=parallel)
    return texts


def test_experts_of_a_draft_model_on_every_data_parallel_rank_are_reported(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    models = [tiny.model(tiny.config(vocab_size=257, moe=moe)) for moe in (None, EXPERTS)]
    dense, experts = (save(tmp_path / str(i), model) for i, model in enumerate(models))
    warning = (
        "4 experts are divided over 1 of 2 tensor- and data-parallel ranks, so that some ranks "
        "hold the same experts"
    )
    assert run_ranks(list_warnings, 2, dense, experts) == [[warning]] * 2
    assert run_ranks(list_warnings, 2, experts, dense) == [[]] * 2


@pytest.mark.slow  # waits for the timeout
def test_rank_that_skips_the_experts_of_mtp_layers_is_caught(tiny: SimpleNamespace) -> None:
    """Planted fault: the other ranks wait for its tokens."""
    config = tiny.config(moe=EXPERTS, mtp=MTPConfig(num_layers=2))
    with pytest.raises(RankError, match="did not finish within 8 s"):
        run_ranks(run_rank, 2, config, tiny.model, DP, "mtp", True, timeout=8)

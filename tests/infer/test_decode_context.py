"""Decode context parallelism: ranks that share a KV head store a part of its tokens each, and
generate the tokens of one process."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig, MTPConfig, RelativeConfig
from megalith.config.moe import CapacityConfig, MoEConfig
from megalith.config.serve import CacheConfig, EngineConfig, InferenceParallelConfig
from megalith.infer.batch_invariance import check_batch_invariance
from megalith.infer.build import build_engine
from megalith.infer.cache import plan_cache
from megalith.infer.layout import generation_layout
from megalith.infer.load import TextGenerator, connect_stages
from megalith.infer.outputs import RequestOutput
from megalith.kernels import cpu_threads
from megalith.kernels.attention import paged
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.serving.cache_layout import count_required_blocks
from megalith.testing.ranks import run_ranks
from tests.infer.engines import ReferenceProposer, build, count_accepted, run
from tests.infer.test_engine import random_requests, tokens_of

CPU = torch.device("cpu")
WINDOW = AttentionConfig(window=5, window_layers=(True, False), sinks=True, softcap=2.0)
MLA = MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3)


@dataclass(frozen=True)
class Case:
    """A model on `world` ranks, and the settings of its engine."""

    world: int
    model: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    pool: float = 1.0
    """Blocks, relative to those of a sequence of 64 tokens."""

    pp: int = 1
    has_drafts: bool = False
    """Whether tokens of the run of one process are proposed, and sometimes wrong ones."""

    draft: dict[str, Any] | None = None
    """Changes of the model that proposes drafts."""

    def settings(self, model: ModelConfig) -> dict[str, Any]:
        """Settings of the engine, whose pool forces preemptions."""
        settings = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "block_size": 4} | self.engine
        tp = self.world // self.pp
        plan = plan_cache(model, tp=tp, element_size=8)
        num_blocks = count_required_blocks(
            plan.layout.groups,
            plan.round_block_size(settings["block_size"]),
            64,
            chunk=settings["max_num_batched_tokens"],
        )
        return settings | {"num_blocks": int(num_blocks * self.pool), "max_model_len": 64}


@dataclass(frozen=True)
class RankResult:
    outputs: list[RequestOutput]
    num_bytes: int
    num_tokens: int
    """Tokens that the pool holds."""

    num_accepted: int
    description: str


def generate(model: Any, case: Case, **engine: Any) -> RankResult:
    """Random arrivals with common prefixes, several choices, and preemptions."""
    stage = build(model, **engine)
    requests = random_requests(case.world, model.config.vocab_size)
    draw = random.Random(case.world)
    arrivals = {index: draw.randint(0, 12) for index in range(len(requests))}
    outputs = run(stage, requests, arrivals)
    stage.scheduler.check()
    assert stage.scheduler.make_stats().num_used_blocks == 0
    cache = stage.runner.cache
    num_tokens = cache.num_blocks * cache.block_size
    accepted = count_accepted(stage)[1]
    return RankResult(outputs, cache.num_bytes, num_tokens, accepted, stage.describe())


def use_keys_of_another_head(patch: pytest.MonkeyPatch, model: Any, mesh: Mesh) -> None:
    """Planted fault 21: the ranks that merge their attention have different KV heads."""
    model.kv_replicas = mesh.over("tp_kv")


def merge_without_weights(patch: pytest.MonkeyPatch, model: Any, mesh: Mesh) -> None:
    """Planted fault 22: the mean of the ranks' outputs, without log-sum-exp weights."""
    patch.setattr(
        paged, "merge_partial_attention", lambda parts, sinks=None: parts[..., :-1].mean(0)
    )


Plant = Callable[[pytest.MonkeyPatch, Any, Mesh], None]


def on_a_rank(
    rank: int,
    world: int,
    case: Case,
    tiny_model: Any,
    tiny_config: Any,
    expected: list[RequestOutput],
    plant: Plant | None,
) -> RankResult:
    config = tiny_config(**case.model)
    layout = generation_layout(config, world, InferenceParallelConfig(pp=case.pp))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = tiny_model(config, mesh, parallel=layout, dtype=torch.float64)
    extra: dict[str, Any] = {}
    if case.has_drafts:
        extra["proposer"] = ReferenceProposer(expected)
    if case.draft is not None:
        draft_config = tiny_config(**case.model | case.draft)
        extra["draft_model"] = tiny_model(draft_config, mesh, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, model, mesh)
        link = connect_stages(model, mesh.pp, CPU)
        return generate(model, case, link=link, **extra, **case.settings(config))


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    """Log-probs of the prompts and of all choices."""
    return [
        one.logprob
        for output in outputs
        for logprobs in (output.prompt_logprobs or [], *(each.logprobs for each in output.outputs))
        for one in logprobs
    ]


def check_case(case: Case, tiny: SimpleNamespace, plant: Plant | None = None) -> None:
    config, dtype = tiny.config(**case.model), case.engine.get("cache_dtype", "auto")
    model = tiny.model(config, dtype=torch.float64)
    requests = random_requests(case.world, config.vocab_size)
    expected = run(build(model, prefix_caching=False, cache_dtype=dtype), requests)
    results = run_ranks(on_a_rank, case.world, case, tiny.model, tiny.config, expected, plant)
    for result in results:
        assert tokens_of(result.outputs) == tokens_of(expected), "tokens of a rank"
        assert logprobs_of(result.outputs) == pytest.approx(logprobs_of(expected), abs=1e-9)
    outputs, tp = results[0].outputs, case.world // case.pp
    assert sum(output.num_cached_tokens for output in outputs) > 0
    has_drafts = case.has_drafts or case.draft is not None or "speculation" in case.engine
    assert (results[0].num_accepted > 0) == has_drafts
    num_ranks = tp if config.mla is not None else tp // config.num_kv_heads
    assert f"tokens sharded over {num_ranks} ranks in" in results[0].description
    if case.pp == 1:
        assert sum(output.num_preemptions for output in outputs) > 0
        total = plan_cache(config, tp=1, element_size=8, dtype=dtype).bytes_per_token
        for result in results:
            assert result.num_bytes * tp == total * result.num_tokens


CASES = {
    "1 KV head, windows and sinks": Case(
        2,
        {"num_kv_heads": 1, "attention": WINDOW},
        {"block_size": 3, "max_num_batched_tokens": 16},
        pool=1.2,
        has_drafts=True,
    ),
    "2 KV heads": Case(4, {"num_kv_heads": 2, "num_heads": 6}, {"max_num_batched_tokens": 40}),
    "MLA": Case(3, {"mla": MLA, "num_kv_heads": 6}, {"block_size": 1}),
}
SLOW_CASES = {
    "int8": Case(2, {"num_kv_heads": 1}, {"cache_dtype": "int8"}),
    "chunks": Case(2, {"num_kv_heads": 1, "attention": replace(WINDOW, chunked=True)}),
    "gathered keys": Case(
        2,
        {"num_kv_heads": 1, "positions": "relative", "relative": RelativeConfig(buckets=8)},
        has_drafts=True,
    ),
    "MLA, ranks of unequal numbers of heads": Case(
        4, {"mla": MLA, "num_kv_heads": 6}, has_drafts=True
    ),
    "draft model": Case(2, {"num_kv_heads": 1}, draft={"num_layers": 1}),
    "MTP": Case(2, {"num_kv_heads": 1, "mtp": MTPConfig(num_layers=2)}, {"speculation": "mtp"}),
    "pipeline stages": Case(4, {"num_kv_heads": 1, "num_layers": 3, "attention": WINDOW}, pp=2),
    "experts": Case(
        4,
        {
            "num_kv_heads": 2,
            "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=7, capacity=CapacityConfig()),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_divide_the_tokens_generate_those_of_one_process(
    name: str, tiny: SimpleNamespace
) -> None:
    check_case(CASES[name], tiny)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_every_kind_of_model_and_draft_with_divided_tokens(
    name: str, tiny: SimpleNamespace
) -> None:
    check_case(SLOW_CASES[name], tiny)


@pytest.mark.parametrize("plant", [use_keys_of_another_head, merge_without_weights])
def test_planted_faults_of_divided_tokens_are_caught(plant: Plant, tiny: SimpleNamespace) -> None:
    case = replace(CASES["2 KV heads"], model={"num_kv_heads": 2, "num_heads": 4, "head_dim": 4})
    with pytest.raises(AssertionError, match="tokens of a rank"):
        check_case(case, tiny, plant)


def check_invariance(rank: int, world: int, config: ModelConfig, make: Any) -> bool:
    layout = generation_layout(config, world)
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, dtype=torch.float32)
    engine = build(model, batch_invariant=True, max_num_seqs=9, max_num_batched_tokens=32)
    check_batch_invariance(engine)
    return "sharded over 2 ranks" in engine.describe()


@pytest.mark.slow
@pytest.mark.skipif(cpu_threads.openmp() is None, reason="torch has no GOMP interface")
def test_divided_tokens_do_not_depend_on_the_batch(tiny: SimpleNamespace) -> None:
    config = tiny.config(num_kv_heads=1, head_dim=16)
    assert run_ranks(check_invariance, 2, config, tiny.model) == [True, True]


@pytest.mark.parametrize("replicate", [False, True])
def test_bytes_per_token_are_those_of_all_ranks_divided_by_their_number(
    replicate: bool, tiny: SimpleNamespace
) -> None:
    models = tiny.config(num_kv_heads=2), tiny.config(mla=MLA, num_kv_heads=6)
    for config, tp, num_copies in ((models[0], 4, 2), (models[0], 2, 1), (models[1], 4, 4)):
        total = plan_cache(config, tp=1, element_size=2).bytes_per_token
        plan = plan_cache(config, tp=tp, element_size=2, replicate_kv_heads=replicate)
        num_ranks = tp // num_copies if replicate else tp
        assert plan.bytes_per_token * num_ranks == total
        assert plan.block_multiple == (1 if replicate else num_copies)
        assert plan.round_block_size(15) == (16 if plan.block_multiple > 1 else 15)


def build_with_settings(
    rank: int, world: int, config: ModelConfig, make: Any, replicate: bool
) -> tuple[int, str]:
    """Bytes per token of the cache of an engine, and its description."""
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    model = make(config, mesh, dtype=torch.float64).eval()
    generator = TextGenerator(
        model,
        None,  # type: ignore[arg-type]  # no text
        frozenset(),
        ranks=mesh.world,
        replicate_kv_heads=replicate,
    )
    engine = build_engine(generator, EngineConfig(cache=CacheConfig(num_blocks=9, block_size=3)))
    run(engine, random_requests(0, 5, count=1, longest=4))
    cache = engine.runner.cache
    assert cache.num_bytes % (9 * cache.block_size) == 0
    return cache.num_bytes // (9 * cache.block_size), engine.describe()


@pytest.mark.parametrize("replicate", [False, True])
def test_engine_divides_the_tokens_unless_kv_heads_are_replicated(
    replicate: bool, tiny: SimpleNamespace
) -> None:
    config = tiny.config(num_kv_heads=1)
    total = plan_cache(config, tp=1, element_size=8).bytes_per_token
    expected = (
        (total, "blocks of 3 tokens in")
        if replicate
        else (
            total // 2,
            "blocks of 4 tokens sharded over 2 ranks in",
        )
    )
    for nbytes, description in run_ranks(build_with_settings, 2, config, tiny.model, replicate):
        assert nbytes == expected[0] and expected[1] in description

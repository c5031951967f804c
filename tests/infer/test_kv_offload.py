"""KV offloading: prefixes that return from host memory give the tokens of a run without a cache."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig
from megalith.config.serve import CacheConfig, EngineConfig, InferenceParallelConfig, KVCacheDtype
from megalith.errors import ConfigError
from megalith.infer import build as build_module
from megalith.infer.build import build_engine
from megalith.infer.cache import PagedKVCache, plan_cache
from megalith.infer.engine import InferenceEngine
from megalith.infer.kv_offload import HostBlockPool, plan_host_blocks
from megalith.infer.layout import generation_layout
from megalith.infer.load import TextGenerator, connect_stages
from megalith.infer.outputs import RequestOutput
from megalith.infer.runner import ModelRunner
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.serving.block_allocator import BlockCopy
from megalith.plan.serving.host_cache import HostCache
from megalith.plan.serving.scheduler import SchedulerStats, StepPlan
from megalith.testing.ranks import run_ranks
from tests.infer.engines import CPU, SAMPLED, build, check_logprobs, run
from tests.infer.test_engine import KINDS, alone, tokens_of

MLA = MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3)
Requests = list[tuple[list[int], SamplingParams]]


def make_requests() -> Requests:
    """Three conversations of which each turn continues the prompt of the one before."""
    turns = [[(7 * index + 3 * token) % 37 for token in range(30)] for index in range(3)]
    return [
        (turns[index][: 18 + 4 * turn], replace(SAMPLED, max_new_tokens=5, seed=10 * turn + index))
        for turn in range(3)
        for index in range(3)
    ]


REQUESTS = make_requests()
SPACED = {index: 3 * index for index in range(len(REQUESTS))}
"""Steps of arrival, so that requests overlap."""


def num_blocks_for(model: Decoder, num_sequences: float, block_size: int = 4) -> int:
    """Return a pool for some of the conversations, so that the others are evicted."""
    num_groups = len(plan_cache(model.config, tp=1, element_size=8).layout.groups)
    return int(num_groups * (40 // block_size) * num_sequences)


def build_small(model: Decoder, *, num_host_blocks: int = 400, **engine: Any) -> InferenceEngine:
    """Return an engine whose pool is smaller than the conversations together."""
    settings: dict[str, Any] = {
        "num_blocks": num_blocks_for(model, 1.4),
        "max_num_batched_tokens": 24,
        "max_num_seqs": 4,
        "max_model_len": 36,
        "min_prefill_chunk_tokens": 1,
    }
    return build(model, num_host_blocks=num_host_blocks, **settings | engine)


def stats_of(engine: InferenceEngine) -> SchedulerStats:
    engine.scheduler.check()
    return engine.scheduler.make_stats()


def check_offloading(
    model: Decoder, *, tokens: list[list[list[int]]] | None = None, **engine: Any
) -> SchedulerStats:
    """Run the conversations with a small pool; all log-probs are those of one forward pass, and the
    tokens those of another run."""
    offloading = build_small(model, **engine)
    outputs = run(offloading, REQUESTS, SPACED)
    for output in outputs:
        check_logprobs(model, output)
    assert tokens in (None, tokens_of(outputs))
    stats = stats_of(offloading)
    assert stats.num_used_blocks == 0
    assert stats.num_offloaded_blocks > 0 and stats.num_loaded_blocks > 0
    cached = sum(output.num_cached_tokens for output in outputs)
    assert 0 < stats.host_hit_tokens <= stats.prefix_hit_tokens
    assert cached <= stats.prefix_hit_tokens
    return stats


@pytest.mark.parametrize("kind", ["full", "window", "chunks", "MLA"])
def test_log_probs_are_those_of_one_forward_pass_with_hits_in_host_memory(
    kind: str, tiny: SimpleNamespace
) -> None:
    """Once with much host memory, once with little, so that blocks are dropped there too."""
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    reference = tokens_of(alone(lambda: build(model, prefix_caching=False), REQUESTS))
    check_offloading(
        model, tokens=reference, block_size=3, num_blocks=num_blocks_for(model, 1.4, 3)
    )
    stats = check_offloading(model, tokens=reference, num_host_blocks=num_blocks_for(model, 1))
    assert stats.num_offloaded_blocks > stats.num_host_blocks


@pytest.mark.parametrize("settings", [{"speculation": "ngram"}, {"draft_model": True}])
def test_drafts_do_not_change_with_hits_in_host_memory(
    settings: dict[str, Any], tiny: SimpleNamespace
) -> None:
    """A draft model has no prefix cache; it processes the prompt that the model does not."""
    model = tiny.model(tiny.config(), dtype=torch.float64)
    if "draft_model" in settings:
        settings = {"draft_model": tiny.model(tiny.config(num_layers=1), dtype=torch.float64)}
    check_offloading(model, **settings)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_quantized_blocks_return_with_their_scales(
    dtype: KVCacheDtype, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    reference = alone(lambda: build(model, prefix_caching=False, cache_dtype=dtype), REQUESTS)
    engine = build_small(model, cache_dtype=dtype)
    outputs = run(engine, REQUESTS, SPACED)
    assert tokens_of(outputs) == tokens_of(reference)
    for output, expected in zip(outputs, reference, strict=True):
        values, others = output.outputs[0].logprobs, expected.outputs[0].logprobs
        assert [one.logprob for one in values] == pytest.approx([o.logprob for o in others])
    assert stats_of(engine).host_hit_tokens > 0


def test_hits_are_those_of_a_pool_that_holds_everything(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    plain = build(model, num_blocks=400, max_model_len=36)
    expected = [run(plain, [request])[0].num_cached_tokens for request in REQUESTS]
    engine = build_small(model)
    cached, loaded = [], []
    for request in REQUESTS:
        before = stats_of(engine).num_loaded_blocks
        cached.append(run(engine, [request])[0].num_cached_tokens)
        loaded.append(stats_of(engine).num_loaded_blocks - before)
    assert cached == expected
    stats = stats_of(engine)
    assert stats.prefix_hit_tokens == sum(cached)
    assert stats.host_hit_tokens == 4 * stats.num_loaded_blocks == 4 * sum(loaded)
    assert stats.num_used_host_blocks == stats.num_offloaded_blocks  # none was dropped or doubled
    assert stats.num_host_blocks == 400


# --- failures


def test_failed_copies_are_misses(tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    calls = {"_offload": 0, "_load": 0}
    for name in calls:
        plain = getattr(HostBlockPool, name)

        def fail_often(*arguments: Any, plain: Any = plain, name: str = name) -> None:
            calls[name] += 1
            if calls[name] % 3 == 1:
                raise torch.OutOfMemoryError("planted")
            plain(*arguments)

        monkeypatch.setattr(HostBlockPool, name, fail_often)
    check_offloading(model)
    assert calls["_offload"] > 1 and calls["_load"] > 1


def test_failed_load_changes_no_other_request(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build_small(model)
    run(engine, REQUESTS[:3])

    def fail(*arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(HostBlockPool, "_load", fail)
    before = stats_of(engine)
    # the second one hits nothing, and is in the same step as the first
    outputs = run(engine, [REQUESTS[3], ([36, 35], SAMPLED)])
    for output in outputs:
        check_logprobs(model, output)
    assert "KV cache blocks were not loaded" in caplog.text
    stats = stats_of(engine)
    assert stats.num_loaded_blocks == stats.host_hit_tokens == 0
    hit = outputs[0].num_cached_tokens
    assert stats.prefix_hit_tokens - before.prefix_hit_tokens == hit
    monkeypatch.undo()
    output = run(engine, [REQUESTS[4]])[0]
    check_logprobs(model, output)
    assert stats_of(engine).num_loaded_blocks > 0


def test_interrupted_transfer_discards_the_step(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build_small(model)
    run(engine, REQUESTS[:3])
    number = engine.add_request(*REQUESTS[3])
    output = engine.output_of(number)

    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostBlockPool, "_load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    check_logprobs(model, output)
    assert stats_of(engine).num_used_blocks == 0


def test_abort_after_a_load_leaves_no_block(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build_small(model)
    run(engine, REQUESTS[:3])
    number = engine.add_request(*REQUESTS[3])
    engine.step()
    assert stats_of(engine).num_loaded_blocks > 0
    engine.abort(number)
    assert stats_of(engine).num_used_blocks == 0
    for output in run(engine, REQUESTS[3:6]):
        check_logprobs(model, output)


# --- weight updates and planted faults


def check_weight_update(model: Decoder) -> None:
    engine = build_small(model)
    unrelated: Requests = [([36 - index] * 28, SAMPLED) for index in range(2)]
    run(engine, REQUESTS[:3] + unrelated, {1: 10, 2: 20, 3: 30, 4: 40})
    assert stats_of(engine).num_used_host_blocks > 0
    new = {
        spec.shard.name: getattr(module, name).detach().reshape(spec.shard.shape) * 0.8
        for spec, module, name in iter_parameter_specs(model)
    }
    engine.update_weights(new)
    outputs = run(engine, REQUESTS[3:6])
    for output in outputs:
        check_logprobs(model, output)
        assert output.num_cached_tokens == 0
    assert stats_of(engine).num_loaded_blocks == 0


def test_weight_update_empties_host_memory(tiny: SimpleNamespace) -> None:
    check_weight_update(tiny.model(tiny.config(), dtype=torch.float64))


def keep_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "reset", lambda self: None)


def load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBlockPool, "_load", lambda *arguments: None)


def load_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass reads the blocks before they arrive."""
    execute = ModelRunner.execute

    def planted(self: ModelRunner, plan: StepPlan, *rest: Any) -> Any:
        logits = execute(self, plan, *rest)
        assert self._host_pool is not None
        self._host_pool.transfer((), plan.loads)
        return logits

    def transfer(self: ModelRunner, plan: StepPlan) -> list[BlockCopy]:
        assert self._host_pool is not None
        return self._host_pool.transfer(plan.offloads, ())

    monkeypatch.setattr(ModelRunner, "transfer_blocks", transfer)
    monkeypatch.setattr(ModelRunner, "execute", planted)


def offload_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step overwrites the blocks before they are copied."""
    execute = ModelRunner.execute

    def planted(self: ModelRunner, plan: StepPlan, *rest: Any) -> Any:
        logits = execute(self, plan, *rest)
        assert self._host_pool is not None
        self._host_pool.transfer(plan.offloads, ())
        return logits

    def transfer(self: ModelRunner, plan: StepPlan) -> list[BlockCopy]:
        assert self._host_pool is not None
        return self._host_pool.transfer((), plan.loads)

    monkeypatch.setattr(ModelRunner, "transfer_blocks", transfer)
    monkeypatch.setattr(ModelRunner, "execute", planted)


def load_the_next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    load = HostBlockPool._load

    def planted(self: HostBlockPool, pools: Any, copies: list[BlockCopy]) -> None:
        load(self, pools, [replace(copy, source=copy.source ^ 1) for copy in copies])

    monkeypatch.setattr(HostBlockPool, "_load", planted)


def lose_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    block_words = PagedKVCache.block_words
    monkeypatch.setattr(PagedKVCache, "block_words", lambda self: block_words(self)[:-1])


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[Decoder], object]]] = {
    "entry of old weights": (keep_host_memory, check_weight_update),
    "load not executed": (load_nothing, check_offloading),
    "load not awaited": (load_after_the_step, check_offloading),
    "offload after overwrite": (offload_after_the_step, check_offloading),
    "wrong block": (load_the_next_block, check_offloading),
    "layer not copied": (lose_the_last_layer, check_offloading),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tiny.model(tiny.config(), dtype=torch.float64))


# --- ranks


def run_on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, pp: int, num_blocks: int
) -> tuple[list[RequestOutput], SchedulerStats]:
    """Run the conversations on a rank of tp and pp; loads fail on the last rank only."""
    layout = generation_layout(config, world, InferenceParallelConfig(pp=pp))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    engine = build_small(
        model, link=connect_stages(model, mesh.pp, CPU), num_blocks=num_blocks, max_num_seqs=6
    )
    load, num_calls = HostBlockPool._load, 0

    def fail_once(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if rank == world - 1 and num_calls == 1:
            raise RuntimeError("planted")
        load(*arguments)

    HostBlockPool._load = fail_once  # type: ignore[method-assign]  # in a process of its own
    try:
        outputs = run(engine, REQUESTS, SPACED)
        unrelated: Requests = [([36 - index] * 30, REQUESTS[0][1]) for index in range(2)]
        run(engine, unrelated)
        num_loaded = stats_of(engine).num_loaded_blocks
        number = engine.add_request(*REQUESTS[6])
        engine.step()
        assert stats_of(engine).num_loaded_blocks > num_loaded
        assert engine.is_unfinished(number)
        engine.abort(number)  # with pipeline stages, while its step is in flight
        while engine.has_unfinished:
            engine.step()
    finally:
        HostBlockPool._load = load  # type: ignore[method-assign]  # restored
    assert num_calls > 1
    return outputs, stats_of(engine)


@pytest.mark.parametrize(
    ("world", "pp", "changes"),
    [
        (2, 1, {"num_kv_heads": 1}),  # ranks divide the tokens of a block
        (
            3,
            3,
            {
                "num_layers": 4,
                "attention": AttentionConfig(window=9, window_layers=(True,) * 3 + (False,)),
            },
        ),
        (4, 2, {"num_layers": 3}),
    ],
)
def test_ranks_copy_their_parts_in_the_order_of_the_steps(
    world: int, pp: int, changes: dict[str, Any], tiny: SimpleNamespace
) -> None:
    config = tiny.config(**changes)
    model = tiny.model(config, dtype=torch.float64)
    expected = alone(lambda: build(model, prefix_caching=False), REQUESTS)
    num_blocks = num_blocks_for(model, 1.6)
    results = run_ranks(run_on_a_rank, world, config, tiny.model, pp, num_blocks)
    for outputs, stats in results:
        assert tokens_of(outputs) == tokens_of(expected)
        assert stats == results[0][1]
        assert stats.num_used_blocks == 0 < stats.host_hit_tokens
    for output in results[0][0]:
        check_logprobs(model, output)


# --- settings


def host_settings(host_gb: float, **cache: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_blocks=14, block_size=4, host_gb=host_gb, **cache), max_model_len=36
    )


def test_setting_determines_the_blocks_in_host_memory(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    generator = TextGenerator(model, None, frozenset())  # type: ignore[arg-type]  # no text
    nbytes = 4 * plan_cache(model.config, tp=1, element_size=8).bytes_per_token
    engine = build_engine(generator, host_settings(50.5 * nbytes / 2**30))
    assert engine.runner.num_host_blocks == stats_of(engine).num_host_blocks == 50
    assert "50 blocks in host memory" in engine.describe()
    run(engine, REQUESTS[:4], SPACED)
    assert stats_of(engine).num_loaded_blocks > 0
    assert engine.runner._host_pool is not None
    assert engine.runner._host_pool.num_bytes == 50 * nbytes
    assert build_engine(generator, host_settings(0)).runner.num_host_blocks == 0


def test_unusable_host_memory_is_rejected(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    generator = TextGenerator(model, None, frozenset())  # type: ignore[arg-type]  # no text
    with pytest.raises(ConfigError) as error:
        build_engine(generator, host_settings(1e-7))
    assert str(error.value) == (
        "cache.host_gb=1e-07 is less than a block of 4 tokens, which has 0.000488 MiB. Set "
        "cache.host_gb to 4.8e-07 or more, or to 0."
    )
    assert build_engine(generator, host_settings(4.8e-07)).runner.num_host_blocks == 1
    monkeypatch.setattr(build_module, "free_memory", lambda: 3 * 2**30)
    with pytest.raises(ConfigError) as error:
        build_engine(generator, host_settings(4.0))
    assert str(error.value) == (
        "cache.host_gb=4.0: only 3 GiB of host memory are free, without those of the model and its "
        "KV cache. Set cache.host_gb to 2.99 or less."
    )
    with pytest.raises(ConfigError) as error:
        build_engine(generator, host_settings(1.0, prefix_caching=False))
    assert str(error.value) == (
        "cache.host_gb=1.0 with cache.prefix_caching=false: only blocks of the prefix cache are "
        "offloaded, and it is not used. Set cache.host_gb to 0."
    )


def test_model_without_a_prefix_cache_is_rejected(tiny: SimpleNamespace) -> None:
    plan = replace(plan_cache(tiny.config(), tp=1, element_size=4), has_states=True)
    with pytest.raises(ConfigError, match="cache.host_gb=1.0 with this model: only blocks of the"):
        plan_host_blocks(CacheConfig(host_gb=1.0), plan, num_ranks=1, free_bytes=1 << 40)


def test_memory_that_cannot_be_allocated_is_rejected(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_cache(tiny.config(), tp=1, element_size=4)
    cache = PagedKVCache(plan, num_blocks=4, block_size=16)

    def fail(*sizes: int, **options: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(ConfigError) as error:
        HostBlockPool(cache, 2**20, CPU)
    assert str(error.value) == (
        "cache.host_gb: 1 GiB of host memory cannot be allocated (out of memory). Set "
        "cache.host_gb lower."
    )


def test_large_pools_have_several_allocations_and_transfers(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are copied between the right allocations in several buffers."""
    monkeypatch.setattr("megalith.infer.kv_offload.CHUNK_NBYTES", 5000)
    monkeypatch.setattr("megalith.infer.kv_offload.STAGING_NBYTES", 2500)
    check_offloading(tiny.model(tiny.config(), dtype=torch.float64))

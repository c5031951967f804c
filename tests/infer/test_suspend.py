"""A suspended engine has released its device memory, and continues with the same tokens."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.data import TokenizerConfig
from megalith.config.generation import SamplingParams
from megalith.config.model import AttentionConfig, MLAConfig, ModelConfig, MTPConfig
from megalith.config.serve import CacheConfig, EngineConfig, GraphConfig, InferenceParallelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.infer.engine import InferenceEngine
from megalith.infer.graphs import StepGraphs
from megalith.infer.layout import generation_layout
from megalith.infer.llm import LLM, AsyncLLM
from megalith.infer.load import connect_stages
from megalith.infer.outputs import RequestOutput
from megalith.infer.refit import WeightUpdater
from megalith.infer.suspend import EngineMemoryError, ReleasedStorage
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.models.decoder import Decoder
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.serving.engine_state import InvalidStateError, KVCacheMode
from megalith.testing.ranks import run_ranks, world_group
from tests.infer.engines import SAMPLED, build, check_logprobs, count_accepted, run
from tests.infer.lora_folders import save_adapter
from tests.infer.test_kv_offload import REQUESTS, SPACED, build_small
from tests.infer.test_load import save
from tests.infer.test_pipeline import make_requests
from tests.infer.test_refit import PROMPTS, finish, start, weights_of

MODES: tuple[KVCacheMode, ...] = ("persist", "offload", "recompute")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _undefined_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory that is allocated again, which otherwise might have its previous content."""
    fill_allocated_memory(monkeypatch.setattr)


def fill_allocated_memory(replace_attribute: Callable[..., None]) -> None:
    allocate = ReleasedStorage.allocate

    def allocate_and_fill(self: ReleasedStorage) -> None:
        allocate(self)
        self.storage.fill_(255)  # NaN in every floating-point format

    replace_attribute(ReleasedStorage, "allocate", allocate_and_fill)


def list_pools(engine: InferenceEngine) -> list[Tensor]:
    """Blocks and states of the model and of its drafts."""
    caches = [engine.runner.cache]
    proposer: Any = None if engine._speculator is None else engine._speculator.proposer
    if hasattr(proposer, "_kv_cache"):
        caches.append(proposer._kv_cache)
    if hasattr(proposer, "_runner"):
        caches.append(proposer._runner.cache)
    return [
        part
        for cache in caches
        for blocks in cache._pool.values()
        for part in blocks
        if part is not None
    ]


def count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(each.untyped_storage().nbytes() for each in tensors)


def suspend_and_wake_up(engine: InferenceEngine, mode: KVCacheMode) -> None:
    """Suspend an engine and check that its memory is released in between."""
    pools, weights = list_pools(engine), list(engine.runner.model.parameters())
    num_bytes = count_bytes(pools)
    engine.suspend(kv_cache=mode, offload_weights=mode != "persist")
    if engine.can_step:  # returns what steps in flight generated
        assert engine.step()
    assert engine.is_suspended and not engine.can_step and engine.step() == []
    assert count_bytes(pools) == (num_bytes if mode == "persist" else 0)
    assert (count_bytes(weights) == 0) == (mode != "persist")
    engine.wake_up()
    assert not engine.is_suspended
    assert count_bytes(pools) == num_bytes and count_bytes(weights) > 0
    engine.scheduler.check()


def run_suspended(
    engine: InferenceEngine,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    arrivals: dict[int, int],
    mode: KVCacheMode,
) -> list[RequestOutput]:
    """Run requests to their end as `run`, suspended after some of the first steps."""
    results: list[RequestOutput] = []
    step = 0
    order = sorted(range(len(requests)), key=lambda index: arrivals.get(index, 0))
    while len(results) < len(requests) or engine.has_unfinished:
        while len(results) < len(order) and arrivals.get(order[len(results)], 0) <= step:
            prompt, params = requests[order[len(results)]]
            results.append(engine.output_of(engine.add_request(prompt, params)))
        engine.step()
        step += 1
        if step in (3, 7, 12, 13):
            suspend_and_wake_up(engine, mode)
        assert step < 500, "the engine makes no progress"
    assert engine.scheduler.make_stats().num_used_blocks == 0
    return [result for _, result in sorted(zip(order, results, strict=True))]


def check_same(output: RequestOutput, expected: RequestOutput, tolerance: float) -> None:
    """Check that tokens are the same, and log-probs up to a tolerance."""

    def close(values: Sequence[Any] | None) -> Any:
        return pytest.approx([one.logprob for one in values or ()], abs=tolerance)

    for one, other in zip(output.outputs, expected.outputs, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert [each.logprob for each in one.logprobs] == close(other.logprobs)
    prompt = [one.logprob for one in output.prompt_logprobs or ()]
    assert prompt == close(expected.prompt_logprobs)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "windows": (
        {"attention": AttentionConfig(window=5, window_layers=(True, False))},
        {"speculation": "ngram"},
    ),
    "MLA": (
        {"mla": MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3), "num_kv_heads": 6},
        {"block_size": 3},
    ),
    "MTP": ({"mtp": MTPConfig(num_layers=2)}, {"speculation": "mtp"}),
    "draft model": ({}, {"draft_model": {"num_layers": 1}}),
    "int8": ({}, {"cache_dtype": "int8", "num_blocks": 26}),
    "fp8, MTP": (
        {"mtp": MTPConfig(num_layers=1)},
        {"cache_dtype": "fp8_e4m3", "speculation": "mtp"},
    ),
}
SMALL_STEPS = {"max_num_batched_tokens": 12, "max_num_seqs": 6}
"""Prompts are prefilled in chunks."""


def build_case(name: str, tiny: SimpleNamespace) -> InferenceEngine:
    model, engine = CASES[name]
    engine = SMALL_STEPS | engine
    if "draft_model" in engine:
        draft_config = tiny.config(**engine["draft_model"])
        engine = engine | {"draft_model": tiny.model(draft_config, dtype=torch.float64)}
    return build(tiny.model(tiny.config(**model), dtype=torch.float64), **engine)


QUICK = ("dense", "windows", "fp8, MTP")
"""Cases of `make test`; the others are in `make test-all`."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_suspended_engine_generates_the_same_tokens(name: str, tiny: SimpleNamespace) -> None:
    requests, arrivals = make_requests(len(name))
    reference = build_case(name, tiny)
    expected = run(reference, requests, arrivals)
    for mode in MODES if name == "dense" else MODES[1:]:
        engine = build_case(name, tiny)
        outputs = run_suspended(engine, requests, arrivals, mode)
        for output, other in zip(outputs, expected, strict=True):
            check_same(output, other, 1e-9 if mode == "recompute" else 0.0)
        if mode != "recompute":  # the caches of drafts are complete, too
            assert count_accepted(engine) == count_accepted(reference)
        preempted = engine.scheduler.make_stats().num_preemptions
        assert (preempted > reference.scheduler.make_stats().num_preemptions) == (
            mode == "recompute"
        )


def test_release_returns_memory_to_the_system(tiny: SimpleNamespace) -> None:
    keep_freed_memory()  # as a process that also trains
    engine = build(tiny.model(tiny.config(num_layers=1)), num_blocks=1 << 22)
    run(engine, [(PROMPTS[0], SAMPLED)])
    pools = list_pools(engine)
    with torch.inference_mode():
        for each in pools:
            each.zero_()  # pages that were never written are not resident
    num_bytes = count_bytes(pools)
    assert num_bytes == 512 << 20  # other memory of the process varies by 15 MiB
    before = read_resident_bytes()
    engine.suspend()
    assert before - read_resident_bytes() > 0.9 * num_bytes
    engine.wake_up()


def read_resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


# --- planted faults


def generate_interrupted(
    engine: InferenceEngine, mode: KVCacheMode, prompts: Sequence[list[int]]
) -> list[list[int]]:
    """Tokens of requests that are suspended after a step, and then of the first one again."""
    numbers = [engine.add_request(prompt, SAMPLED) for prompt in prompts]
    outputs = [engine.output_of(number) for number in numbers]
    engine.step()
    engine.suspend(kv_cache=mode)
    engine.wake_up()
    while engine.can_step:
        engine.step()
    outputs += run(engine, [(prompts[0], SAMPLED)])
    return [output.outputs[0].token_ids for output in outputs]


LONG = [list(range(1, 30)), [5, 17, 36, 3, 14, 2, 9, 9, 1]]
"""With chunks of 12 tokens, the first prompt is half prefilled after a step."""


def plant_missing_copies(engine: InferenceEngine, patch: pytest.MonkeyPatch) -> None:
    def copy_the_first(self: ReleasedStorage) -> None:
        for device, host in list(self._pair_spans())[:1]:
            device[: len(device) // 2].copy_(host[: len(host) // 2])

    patch.setattr(ReleasedStorage, "copy_back", copy_the_first)


def plant_old_prefix_cache(engine: InferenceEngine, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.scheduler, "reset_prefix_cache", lambda: None)


def plant_half_prefilled_request(engine: InferenceEngine, patch: pytest.MonkeyPatch) -> None:
    preempt_all = engine.scheduler.preempt_all

    def preempt_decoding() -> None:
        states = engine.scheduler._running
        kept = [each for each in states if each.num_computed_tokens < each.num_prompt_tokens]
        assert kept, "no request is half prefilled"
        states[:] = [each for each in states if each not in kept]
        preempt_all()
        states[:] = kept

    patch.setattr(engine.scheduler, "preempt_all", preempt_decoding)


@pytest.mark.parametrize(
    ("mode", "plant"),
    [
        ("offload", plant_missing_copies),
        ("recompute", plant_old_prefix_cache),
        ("recompute", plant_half_prefilled_request),
    ],
)
def test_a_planted_fault_is_caught(
    mode: KVCacheMode, plant: Any, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> InferenceEngine:
        model = tiny.model(tiny.config(), dtype=torch.float64)
        return build(model, max_num_batched_tokens=12, max_num_seqs=4)

    reference = run(make(), [(prompt, SAMPLED) for prompt in (*LONG, LONG[0])])
    expected = [output.outputs[0].token_ids for output in reference]
    assert generate_interrupted(make(), mode, LONG) == expected
    engine = make()
    plant(engine, monkeypatch)
    assert generate_interrupted(engine, mode, LONG) != expected


# --- states


@pytest.fixture
def engine(tiny: SimpleNamespace) -> InferenceEngine:
    return build(tiny.model(tiny.config(), dtype=torch.float64))


def test_repeated_commands_have_no_effect(engine: InferenceEngine) -> None:
    engine.wake_up()
    start(engine, 2)
    for _ in range(2):
        engine.suspend(kv_cache="offload", offload_weights=True)
    with pytest.raises(
        InvalidStateError,
        match="suspend with kv_cache=persist, offload_weights=false: the engine is suspended with "
        "kv_cache=offload, offload_weights=true. Call wake_up first",
    ):
        engine.suspend(kv_cache="persist")
    for _ in range(2):
        engine.wake_up()
    assert engine.can_step and finish(engine)


def test_unknown_mode_is_rejected(engine: InferenceEngine) -> None:
    mode: Any = "ofload"
    message = "kv_cache='ofload': there is no such mode. Did you mean offload.*Use one of persist, "
    with pytest.raises(ConfigError, match=message):
        engine.suspend(kv_cache=mode)
    assert not engine.is_suspended


@pytest.mark.parametrize("mode", MODES)
def test_requests_are_added_and_ended_while_suspended(
    mode: KVCacheMode, engine: InferenceEngine
) -> None:
    expected = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    outputs = start(engine, 3)
    engine.suspend(kv_cache=mode, offload_weights=True)
    late = engine.output_of(engine.add_request(PROMPTS[0], SAMPLED))
    expiring = engine.output_of(engine.add_request(PROMPTS[1], replace(SAMPLED, deadline_s=0.001)))
    assert engine.next_deadline is not None and not engine.can_step
    time.sleep(0.002)
    (expired,) = engine.step()
    assert expired.finish_reason == "error" and "deadline_s=0.001" in str(expired.error)
    assert expiring.finished and engine.next_deadline is None
    (aborted,) = engine.abort(outputs[1].request_id)
    assert aborted.finish_reason == "abort"
    engine.scheduler.check()
    assert engine.step() == [] and engine.has_unfinished
    engine.wake_up()
    finish(engine)
    tokens = [output.outputs[0].token_ids for output in (outputs[0], outputs[2], late)]
    reference = [expected[index].outputs[0].token_ids for index in (0, 2, 0)]
    assert tokens == reference
    assert len(outputs[1].outputs[0].token_ids) == 3


def build_static(tiny: SimpleNamespace, **settings: Any) -> InferenceEngine:
    """An engine whose steps are replayed."""
    model = tiny.model(tiny.config(), dtype=torch.float64)
    return build(model, graphs=GraphConfig(mode="static_replay"), **settings)


def graphs_of(engine: InferenceEngine) -> StepGraphs:
    assert engine.runner.graphs is not None
    return engine.runner.graphs


def fail_to_allocate(self: ReleasedStorage) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes")


def test_engine_that_cannot_be_restored_stays_suspended(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    outputs = start(engine, 3)
    engine.suspend(offload_weights=True)
    message = (
        r"wake_up: the device memory does not suffice \(.*7 bytes\). Free memory, such as that"
    )
    with monkeypatch.context() as patch, pytest.raises(EngineMemoryError, match=message):
        patch.setattr(ReleasedStorage, "allocate", fail_to_allocate)
        engine.wake_up()
    assert engine.is_suspended and count_bytes(list_pools(engine)) == 0
    engine.wake_up()
    finish(engine)
    assert [one.outputs[0].token_ids for one in outputs] == [
        one.outputs[0].token_ids for one in expected
    ]


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_engine_that_cannot_be_suspended_continues(
    mode: KVCacheMode, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_static(tiny)
    expected = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    outputs = start(engine, 3)
    stored = engine.scheduler.cache.allocator.list_stored()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *_, **__: fail_to_allocate(None))  # type: ignore[arg-type]
        with pytest.raises(EngineMemoryError, match="suspend: the host memory does not suffice"):
            engine.suspend(kv_cache=mode, offload_weights=True)
    assert not engine.is_suspended and count_bytes(list_pools(engine)) > 0
    assert engine.scheduler.cache.allocator.list_stored() == stored
    assert graphs_of(engine).is_captured
    assert engine.scheduler.make_stats().num_preemptions == 0
    finish(engine)
    assert [one.outputs[0].token_ids for one in outputs] == [
        one.outputs[0].token_ids for one in expected
    ]


def test_other_errors_are_not_reported_as_missing_memory(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.suspend(offload_weights=True)

    def fail(self: ReleasedStorage) -> None:
        raise RuntimeError("storage that is not resizable")

    monkeypatch.setattr(ReleasedStorage, "allocate", fail)
    with pytest.raises(RuntimeError, match="storage that is not resizable"):
        engine.wake_up()


def test_graphs_are_captured_when_the_engine_wakes_up(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_static(tiny)
    expected = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    outputs, graphs = start(engine, 3), graphs_of(engine)

    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    replays = dict(graphs._replays)
    engine.suspend(kv_cache="persist")  # no address changes
    assert graphs._replays == replays
    engine.suspend(kv_cache="persist", offload_weights=True)
    assert not graphs.is_captured
    with monkeypatch.context() as patch, pytest.raises(EngineMemoryError, match="wake_up: the dev"):
        patch.setattr(graphs, "_capture", fail)
        engine.wake_up()
    assert engine.is_suspended and not graphs.is_captured
    assert count_bytes(list(engine.runner.model.parameters())) == 0
    engine.wake_up()
    assert graphs._replays.keys() == replays.keys()
    finish(engine)
    for output, other in zip(outputs, expected, strict=True):
        check_same(output, other, 1e-9)


def test_memory_that_cannot_be_released_is_found_before_the_release(
    engine: InferenceEngine,
) -> None:
    *_, last = engine.runner.model.parameters()
    last.data = torch.from_numpy(last.detach().numpy().copy())
    outputs = start(engine, 3)
    message = "suspend: a storage of .* cannot be released, because .* or use offload_weights=false"
    with pytest.raises(EngineMemoryError, match=message):
        engine.suspend(offload_weights=True)
    assert not engine.is_suspended
    assert all(one.untyped_storage().nbytes() for one in engine.runner.model.parameters())
    finish(engine)
    assert all(output.finished for output in outputs)


# --- other features


def count_feature(engine: InferenceEngine, name: str) -> int:
    """How often a feature acted."""
    if name == "graphs":
        return graphs_of(engine).num_replays.total()
    if name == "recorded":
        assert engine.runner.recorded is not None
        return engine.runner.recorded.num_replays
    return engine.scheduler.make_stats().num_loaded_blocks


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", ["graphs", "recorded", "host blocks"])
def test_suspended_engine_continues_with_other_features(
    name: str, mode: KVCacheMode, tiny: SimpleNamespace
) -> None:
    graphs: Any = "static_replay" if name == "graphs" else "recorded"
    settings: dict[str, Any] = {"graphs": GraphConfig(mode=graphs)}

    def make() -> InferenceEngine:
        num_host_blocks = 400 if name == "host blocks" else 0
        model = tiny.model(tiny.config(), dtype=torch.float64)
        return build_small(model, num_host_blocks=num_host_blocks, **settings)

    expected = run(make(), REQUESTS, SPACED)
    engine = make()
    outputs = run_suspended(engine, REQUESTS, SPACED, mode)  # suspended before step 14
    for output, other in zip(outputs, expected, strict=True):
        check_same(output, other, 1e-9)
    num_before = count_feature(engine, name)
    assert num_before > 0
    suspend_and_wake_up(engine, mode)
    run(engine, REQUESTS[:3])
    if mode == "recompute" and name == "host blocks":  # nothing is kept
        assert count_feature(engine, name) == num_before
    else:
        assert count_feature(engine, name) > num_before


# --- weight updates


def test_suspension_after_a_failed_update_releases_the_weights_again(
    engine: InferenceEngine,
) -> None:
    expected = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    outputs, weights = start(engine, 3), list(engine.runner.model.parameters())
    for _ in range(2):
        engine.suspend(offload_weights=True)
        assert count_bytes(weights) == count_bytes(list_pools(engine)) == 0
        with pytest.raises(CheckpointError):
            engine.update_weights({}, mode="keep")
        assert count_bytes(weights) > 0 and engine.is_suspended
    engine.suspend(offload_weights=True)
    engine.wake_up()
    finish(engine)
    for output, other in zip(outputs, expected, strict=True):
        check_same(output, other, 1e-9)


@pytest.mark.parametrize("offload_weights", [False, True])
@pytest.mark.parametrize(
    ("kv_cache", "update"),
    [
        ("recompute", "recompute"),
        ("offload", "recompute"),
        ("offload", "keep"),
        ("persist", "keep"),
    ],
)
def test_weights_are_updated_while_suspended(
    kv_cache: KVCacheMode, update: Any, offload_weights: bool, tiny: SimpleNamespace
) -> None:
    """The cycle of reinforcement learning; as an update of an engine that is not suspended."""

    def make(scale: float) -> Decoder:
        model = tiny.model(tiny.config(), dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale)
        return model

    new = make(0.8)
    results = []
    for suspends in (False, True):
        model = make(1.0)
        engine = build(model, max_num_seqs=4)
        outputs = start(engine, 5)
        if suspends:
            engine.suspend(kv_cache=kv_cache, offload_weights=offload_weights)
        engine.update_weights(weights_of(new), mode=update)
        if suspends:
            assert engine.is_suspended and count_bytes(list(model.parameters())) > 0
            assert (count_bytes(list_pools(engine)) > 0) == (kv_cache == "persist")
        engine.wake_up()
        finish(engine)
        for parameter, expected in zip(model.parameters(), new.parameters(), strict=True):
            assert torch.equal(parameter, expected)
        assert all(one.outputs[0].weight_versions == [(0, 0), (5, 1)] for one in outputs)
        results.append([one.outputs[0] for one in outputs])
        (fresh,) = run(engine, [(PROMPTS[0], SAMPLED)])
        check_logprobs(new, fresh)  # no block of the old weights is reused
    for plain, suspended in zip(*results, strict=True):
        assert plain.token_ids == suspended.token_ids
        assert [one.logprob for one in plain.logprobs] == pytest.approx(
            [one.logprob for one in suspended.logprobs], abs=1e-9
        )


@pytest.mark.parametrize(
    ("kv_cache", "update", "message"),
    [
        (
            "offload",
            "drain",
            "mode=drain: the engine is suspended, so the requests in flight do not",
        ),
        ("recompute", "drain", "Use mode=recompute, or call wake_up first"),
        (
            "recompute",
            "keep",
            "mode=keep: the engine is suspended with kv_cache=recompute, so there",
        ),
    ],
)
def test_update_mode_that_a_suspended_engine_cannot_keep_is_rejected(
    kv_cache: KVCacheMode, update: Any, message: str, engine: InferenceEngine
) -> None:
    weights = weights_of(engine.runner.model, scale=0.8)
    outputs = start(engine, 3)
    engine.suspend(kv_cache=kv_cache)
    with pytest.raises(ConfigError, match=message):
        engine.update_weights(weights, mode=update)
    assert engine.weight_version == 0
    for output in outputs:
        engine.abort(output.request_id)
    engine.add_request(PROMPTS[0], SAMPLED)
    engine.update_weights(weights, mode=update)  # no request has started
    engine.wake_up()
    finish(engine)
    assert engine.weight_version == 1


# --- LLM


@pytest.fixture
def run_folder(tmp_path: Path, tiny: SimpleNamespace) -> Path:
    model = tiny.model(tiny.config(vocab_size=300))
    return save(tmp_path / "run", model, TokenizerConfig())


def config_of(**changes: Any) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(num_blocks=64), max_model_len=64, **changes)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"max_adapters": 2}])
def test_all_weights_of_a_loaded_model_are_offloaded(
    settings: dict[str, Any], run_folder: Path, tmp_path: Path
) -> None:
    llm = LLM(run_folder, config=config_of(**settings))
    adapter = None
    if "max_adapters" in settings:
        adapter = "a"
        llm.load_adapter(adapter, save_adapter(tmp_path / "adapter", run_folder, seed=1))
    (expected,) = llm.generate([PROMPTS[0]], SAMPLED, adapter=adapter)
    llm.suspend(kv_cache="recompute", offload_weights=True)
    weights = list(llm.engine.runner.list_memory(llm.engine.scheduler.cache.allocator).weights)
    assert len(weights) > len(list(llm.generator.model.parameters()))
    assert count_bytes(weights) == 0
    with pytest.raises(
        InvalidStateError, match="the engine is suspended, so it generates nothing. Call wake_up"
    ):
        llm.generate([PROMPTS[0]], SAMPLED)
    if adapter is not None:  # it stays loaded when the engine is restored
        llm.load_adapter("b", save_adapter(tmp_path / "b", run_folder, seed=2))
    llm.wake_up()
    (output,) = llm.generate([PROMPTS[0]], SAMPLED, adapter=adapter)
    check_same(output, expected, 0.0)
    assert output.num_cached_tokens == 0
    if adapter is not None:
        (other,) = llm.generate([PROMPTS[0]], SAMPLED, adapter="b")
        assert other.outputs[0].token_ids != output.outputs[0].token_ids


def test_cached_prefixes_are_kept_in_host_memory(run_folder: Path) -> None:
    llm = LLM(
        run_folder, config=replace(config_of(), cache=CacheConfig(block_size=4, num_blocks=64))
    )
    (expected,) = llm.generate([PROMPTS[0]], SAMPLED)
    llm.suspend()
    llm.wake_up()
    (output,) = llm.generate([PROMPTS[0]], SAMPLED)
    assert output.num_cached_tokens == 8
    check_same(output, expected, 1e-5)


def test_streams_of_tasks_wait_while_suspended(run_folder: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(run_folder, config=config_of()) as llm:
            expected = await llm.generate(PROMPTS[0], SAMPLED)
            stream = llm.stream(PROMPTS[0], SAMPLED)
            outputs = [await anext(stream)]
            await llm.suspend(offload_weights=True)
            late = asyncio.create_task(llm.generate(PROMPTS[1], SAMPLED))
            expiring = await llm.generate(PROMPTS[2], replace(SAMPLED, deadline_s=0.05))
            assert "deadline_s=0.05" in str(expiring.outputs[0].error)
            assert not late.done()
            with pytest.raises(InvalidStateError, match="Call wake_up first"):
                await llm.suspend()
            await llm.wake_up()
            outputs += [output async for output in stream]
            assert [each.token for each in outputs] == expected.outputs[0].token_ids
            assert (await late).outputs[0].finish_reason == "length"

    asyncio.run(main())


# --- ranks


def run_on_a_rank(
    rank: int, world: int, config: ModelConfig, make: Any, pp: int, mode: KVCacheMode
) -> list[RequestOutput]:
    layout = generation_layout(config, world, InferenceParallelConfig(pp=pp))
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64)
    link = connect_stages(model, mesh.pp, CPU) if pp > 1 else None
    engine = build(model, link=link, **SMALL_STEPS)
    fill_allocated_memory(setattr)
    requests, arrivals = make_requests(7)
    return run_suspended(engine, requests, arrivals, mode)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_ranks_generate_the_same_tokens(mode: KVCacheMode, pp: int, tiny: SimpleNamespace) -> None:
    config = tiny.config()
    requests, arrivals = make_requests(7)
    expected = run(build(tiny.model(config, dtype=torch.float64)), requests, arrivals)
    for outputs in run_ranks(run_on_a_rank, 2, config, tiny.model, pp, mode):
        for output, other in zip(outputs, expected, strict=True):
            check_same(output, other, 1e-9)


def fail_on_a_rank(rank: int, world: int, config: ModelConfig, make: Any) -> tuple[str, int]:
    """The memory of the second rank does not suffice: no rank is restored."""
    mesh = build_mesh(model_grid(generation_layout(config, world), config, world), rank=rank)
    model = make(config, mesh, dtype=torch.float64)
    updater = WeightUpdater(model, world_group(rank, world, "world"))
    engine = build(model, updater=updater)
    start(engine, 3)
    engine.suspend()
    allocate = ReleasedStorage.allocate
    if rank == 1:
        ReleasedStorage.allocate = fail_to_allocate  # type: ignore[method-assign]
    with pytest.raises(EngineMemoryError) as caught:
        engine.wake_up()
    num_bytes = count_bytes(list_pools(engine))
    ReleasedStorage.allocate = allocate  # type: ignore[method-assign]
    engine.wake_up()
    finish(engine)
    return str(caught.value), num_bytes


def test_ranks_are_restored_together(tiny: SimpleNamespace) -> None:
    for message, num_bytes in run_ranks(fail_on_a_rank, 2, tiny.config(), tiny.model):
        assert "wake_up: the device memory does not suffice" in message
        assert num_bytes == 0

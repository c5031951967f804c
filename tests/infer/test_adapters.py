"""Rows with different LoRA adapters have the tokens of models with each adapter merged, and
loading, eviction and the prefix cache follow the weights of an adapter, not its name."""

import asyncio
import re
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.lora import LoraConfig
from megalith.config.model import MLAConfig, ModelConfig, MTPConfig
from megalith.config.moe import MoEConfig
from megalith.config.serve import (
    CacheConfig,
    EngineConfig,
    InferenceParallelConfig,
    SpeculationConfig,
    engine_problems,
)
from megalith.errors import CheckpointError, ConfigError, DataError
from megalith.hf.peft import ADAPTER_CONFIG
from megalith.infer.adapters import AdapterManager, ReplacedAdapterError
from megalith.infer.build import build_engine
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import build_generation_mesh, open_source
from megalith.infer.llm import LLM, AsyncLLM, load_generator
from megalith.infer.load import TextGenerator, load_text_generator
from megalith.infer.outputs import RequestOutput
from megalith.infer.requests import ChoiceProgress
from megalith.models.decoder import Decoder
from megalith.nn.batched_lora import AdapterGroup, BatchedLora
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.serving.scheduler import PlannedRow
from megalith.testing.ranks import run_ranks
from tests.infer.conftest import config as tiny_config
from tests.infer.conftest import model as tiny_model
from tests.infer.engines import SAMPLED, check_logprobs, run
from tests.infer.lora_folders import LORA, save_adapter, save_peft_adapter
from tests.infer.test_quantize import save

CPU = torch.device("cpu")
POOL = CacheConfig(block_size=4, num_blocks=22)
ENGINE = EngineConfig(
    cache=POOL,
    max_model_len=64,
    max_num_batched_tokens=9,
    max_num_seqs=6,
    min_prefill_chunk_tokens=1,
    max_adapters=2,
)
"""Chunked prompts, and a pool that forces preemption."""

SHARED = [3 * number % 37 for number in range(20)]
SCORED = replace(SAMPLED, prompt_logprobs=0, seed=3)
REQUESTS: list[tuple[list[int], SamplingParams, str | None]] = [
    (SHARED, SAMPLED, "a"),
    (SHARED, SAMPLED, None),
    (SHARED, SAMPLED, "b"),
    ([*SHARED, 7, 8], SAMPLED, "a"),
    ([5, *SHARED], SCORED, "b"),
    ([9, *SHARED[:11]], SCORED, None),
    ([4, 2], replace(SAMPLED, n=2), "a"),
    ([*SHARED, 5], SAMPLED, None),
]


def slow(*values: object) -> Any:
    """Parameters of tests that `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


@dataclass(frozen=True)
class Folders:
    """A base model and adapters of it, on disk."""

    base: Path
    adapters: dict[str, Path]

    def engine(self, config: EngineConfig = ENGINE, **fields: Any) -> InferenceEngine:
        """An engine with all adapters that fit."""
        names = list(self.adapters)[: config.max_adapters]
        entries = tuple(f"{name}={self.adapters[name]}" for name in names)
        config = replace(config, adapters=entries)
        fields = {"dtype": torch.float64} | fields
        return build_engine(load_generator(self.base, config=config, **fields), config)

    def merged(self, name: str | None) -> Decoder:
        """The model with an adapter merged into its weights."""
        path = self.base if name is None else self.adapters[name]
        return load_generator(path, dtype=torch.float64).model


def make_folders(folder: Path, model_config: ModelConfig) -> Folders:
    base = save(folder / "base", tiny_model(model_config))
    adapters = {
        "a": save_adapter(folder / "a", base, seed=1),
        "b": save_adapter(folder / "b", base, seed=2, lora=replace(LORA, rank=2, rslora=True)),
    }
    return Folders(base, adapters)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("lora")
    made = make_folders(folder, tiny_config(vocab_size=257))
    made.adapters["b"] = save_peft_adapter(folder / "peft", made.base, seed=2)
    made.adapters["c"] = save_adapter(folder / "c", made.base, seed=3)
    return made


def run_requests(
    engine: InferenceEngine,
    requests: Sequence[tuple[list[int], SamplingParams, str | None]],
    arrivals: dict[int, int] | None = None,
) -> list[RequestOutput]:
    pairs = [(prompt, params) for prompt, params, _ in requests]
    return run(engine, pairs, arrivals, [name for _, _, name in requests])


def check_mixed_batch(folders: Folders, config: EngineConfig = ENGINE) -> list[RequestOutput]:
    """Check the log-probs of requests with and without adapters, and their tokens against an engine
    of the merged model."""
    outputs = run_requests(
        folders.engine(config), REQUESTS, {1: 1, 2: 2, 3: 5, 4: 12, 5: 12, 6: 12, 7: 7}
    )
    for name in ("a", "b", None):
        model = folders.merged(name)
        plain = replace(ENGINE, max_adapters=0, cache=CacheConfig(num_blocks=200))
        alone = build_engine(TextGenerator(model, None, frozenset()), plain)  # type: ignore[arg-type]  # no text
        for output, (prompt, params, own) in zip(outputs, REQUESTS, strict=True):
            if own == name:
                check_logprobs(model, output)
                (expected,) = run(alone, [(prompt, params)])
                tokens = [one.token_ids for one in output.outputs]
                assert tokens == [one.token_ids for one in expected.outputs]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs[:3]}) == 3
    return outputs


def test_rows_of_a_mixed_batch_have_the_tokens_of_merged_models(folders: Folders) -> None:
    outputs = check_mixed_batch(folders)
    assert sum(output.num_preemptions for output in outputs) > 0
    assert outputs[3].num_cached_tokens > 0 and outputs[7].num_cached_tokens > 0


MLA = MLAConfig(q_rank=5, kv_rank=8, rope_dim=2, nope_dim=4, value_dim=4)
MODELS: dict[str, dict[str, Any]] = {
    "mla": {"mla": MLA, "num_kv_heads": 6},
    "experts": {"moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8)},
    "biases": {"gated": False, "qkv_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("kind", ["mla", slow("experts"), slow("biases")])
def test_layers_of_every_kind_add_the_adapters(kind: str, tmp_path: Path) -> None:
    check_mixed_batch(make_folders(tmp_path, tiny_config(vocab_size=257, **MODELS[kind])))


@pytest.mark.parametrize("method", ["ngram", "mtp", slow("draft_model")])
def test_drafts_are_verified_with_the_adapter(
    method: Any, folders: Folders, tmp_path: Path
) -> None:
    if method == "mtp":
        mtp = MTPConfig(num_layers=2)
        folders = make_folders(tmp_path, tiny_config(vocab_size=257, mtp=mtp))
    draft = str(folders.base) if method == "draft_model" else None
    speculation = SpeculationConfig(method=method, draft_model=draft)
    engine = folders.engine(replace(ENGINE, speculation=speculation, cache=CacheConfig()))
    few = replace(SAMPLED, allowed_token_ids=(5, 6))
    requests = [([5, 6] * 5, few, name) for name in ("a", None, "b")]
    outputs = run_requests(engine, requests)
    plain = folders.engine(replace(ENGINE, cache=CacheConfig()))
    for output, expected in zip(outputs, run_requests(plain, requests), strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    stats = engine.scheduler.make_stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


# --- tensor-parallel ranks and pipeline stages


def generate_on_rank(rank: int, world: int, folders: Folders, pp: int = 1) -> list[Any]:
    parallel = InferenceParallelConfig(pp=pp)
    source = open_source(str(folders.base), world, parallel=parallel)
    mesh = build_generation_mesh(source.model, parallel, rank=rank, world=world)
    config = replace(ENGINE, adapters=tuple(f"{n}={p}" for n, p in folders.adapters.items()))
    engine = build_engine(
        load_text_generator(source, mesh, CPU, torch.float64, config=config), config
    )
    with pytest.raises(CheckpointError, match="no such folder"):
        engine.load_adapter("d", "runs/absent")
    outputs = run_requests(engine, REQUESTS[:6], {1: 1, 4: 2})
    return [
        (one.token_ids, [each.logprob for each in one.logprobs])
        for output in outputs
        for one in output.outputs
    ]


@pytest.mark.parametrize(("kind", "pp"), [(None, 1), (None, 2), slow("mla", 1)])
def test_ranks_generate_the_tokens_of_one_process(
    kind: str | None, pp: int, tmp_path: Path
) -> None:
    model_config = tiny_config(vocab_size=257, **({} if kind is None else MODELS[kind]))
    folders = make_folders(tmp_path, model_config)
    expected = generate_on_rank(0, 1, folders)
    results = run_ranks(generate_on_rank, 2, folders, pp)
    assert results[0] == results[1]
    for (tokens, logprobs), (reference, values) in zip(results[0], expected, strict=True):
        assert tokens == reference
        assert logprobs == pytest.approx(values, abs=1e-9)


# --- cost, bits, int8


def test_no_adapter_code_runs_in_a_step_without_adapters(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = folders.engine()
    plain = run_requests(build_plain(folders), [REQUESTS[1]])
    calls: list[str] = []
    monkeypatch.setattr(BatchedLora, "_add", lambda self, *rest: calls.append(self.name))
    (output,) = run_requests(engine, [REQUESTS[1]])
    assert calls == []
    assert output.outputs[0].token_ids == plain[0].outputs[0].token_ids
    run_requests(engine, [REQUESTS[0]])
    layers = {name for name in calls if name.startswith("layers.0.")}
    assert layers == {f"layers.0.{name}" for name in PARTS}


PARTS = ("attention.q", "attention.o", "mlp.gate_up", "mlp.down")
"""First weights of the linear layers."""


def build_plain(folders: Folders) -> InferenceEngine:
    config = replace(ENGINE, max_adapters=0)
    return build_engine(load_generator(folders.base, dtype=torch.float64, config=config), config)


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_batch_invariant_log_probs_have_the_same_bits_with_adapters(
    dtype: torch.dtype, folders: Folders
) -> None:
    config = replace(ENGINE, batch_invariant=True, cache=replace(POOL, prefix_caching=False))
    engine = folders.engine(config, dtype=dtype)
    requests = [request for request in REQUESTS if request[1].n == 1]
    alone = [run_requests(engine, [request])[0] for request in requests]
    together = run_requests(engine, requests)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_int8_weights_have_adapters_in_the_dtype_of_the_model(folders: Folders) -> None:
    config = replace(ENGINE, quantization="int8", max_adapters=3, cache=CacheConfig())
    engine = folders.engine(config)
    plain = folders.engine(replace(config, quantization="none"))
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    for name in (None, "a", "b"):
        (output,) = run_requests(engine, [(SHARED, params, name)])
        (expected,) = run_requests(plain, [(SHARED, params, name)])
        assert output.prompt_logprobs is not None and expected.prompt_logprobs is not None
        values = [one.logprob for one in output.prompt_logprobs]
        assert values == pytest.approx([one.logprob for one in expected.prompt_logprobs], abs=1.5)
        assert values != [one.logprob for one in expected.prompt_logprobs]


# --- prefix cache


def count_cached(engine: InferenceEngine, name: str | None) -> int:
    (output,) = run_requests(engine, [(SHARED, replace(SAMPLED, max_new_tokens=1), name)])
    return output.num_cached_tokens


def check_prefix_cache(folders: Folders) -> None:
    """Blocks belong to the weights of an adapter: neither to its name nor to its number."""
    engine = folders.engine(replace(ENGINE, max_adapters=3, cache=CacheConfig(block_size=4)))
    assert [count_cached(engine, name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [count_cached(engine, name) for name in (None, "a", "b")] == [16, 16, 16]
    engine.load_adapter("b", str(folders.adapters["c"]))  # other weights under this name
    engine.unload_adapter("c")
    outputs = run_requests(engine, [(SHARED, SAMPLED, "b")])
    check_logprobs(folders.merged("c"), outputs[0])
    assert outputs[0].num_cached_tokens == 0
    engine.load_adapter("other", str(folders.adapters["a"]))  # the same weights, another name
    assert count_cached(engine, "other") == 16
    engine.load_adapter("b", str(folders.adapters["b"]))
    assert count_cached(engine, "b") == 16


def test_prefix_cache_depends_on_the_weights_of_an_adapter(folders: Folders) -> None:
    check_prefix_cache(folders)


# --- planted faults: number 25, and number 5 for adapters


def shift_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 25: a row has the adapter of the row after it."""
    plain = AdapterManager._group_tokens

    def planted(
        self: AdapterManager, rows: Sequence[PlannedRow], states: Any
    ) -> list[AdapterGroup]:
        shifted = [*rows[1:], rows[0]]
        adapters = {
            row.seq_id: states[other.seq_id] for row, other in zip(rows, shifted, strict=True)
        }
        return plain(self, rows, adapters)

    monkeypatch.setattr(AdapterManager, "_group_tokens", planted)


def salt_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 5: the hash of a block does not depend on the weights of its adapter."""
    monkeypatch.setattr(
        "megalith.infer.adapters.compute_fingerprint", lambda lora, values: b"\0" * 32
    )


def salt_with_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 5: the hash of a block depends on the name of its adapter instead of its weights."""
    load = AdapterManager.load

    def planted(self: AdapterManager, name: str, path: str) -> None:
        load(self, name, path)
        self._in_memory[self._names[name].number].fingerprint = name.encode()

    monkeypatch.setattr(AdapterManager, "load", planted)


Check = Callable[[Folders], object]
FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Check]] = {
    "adapter of an adjacent row": (shift_adapters, check_mixed_batch),
    "salt without the weights": (salt_without_weights, check_prefix_cache),
    "salt of the name": (salt_with_name, check_prefix_cache),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(folders)


# --- loading and unloading under load


def test_loading_and_unloading_under_load_change_no_other_row(folders: Folders) -> None:
    engine = folders.engine(replace(ENGINE, max_adapters=4))
    requests = [request for request in REQUESTS if request[1].n == 1]
    outputs = [
        engine.output_of(engine.add_request(prompt, params, adapter=name))
        for prompt, params, name in requests
    ]
    a, b, c = (str(folders.adapters[name]) for name in "abc")
    changes = [
        lambda: engine.load_adapter("a", c),  # other weights, while rows use the old ones
        lambda: engine.unload_adapter("b"),
        lambda: engine.load_adapter("d", b),
        lambda: engine.unload_adapter("a"),
        lambda: engine.load_adapter("a", a),
        lambda: engine.unload_adapter("d"),
    ]
    for change in changes:
        for _ in range(3):
            engine.step()
        change()
    assert engine.has_unfinished
    while engine.has_unfinished:
        engine.step()
    for output, (_, _, name) in zip(outputs, requests, strict=True):
        check_logprobs(folders.merged(name), output)
    assert engine.runner.adapters is not None
    assert set(engine.runner.adapters.paths) == {"a", "c"}


def test_least_recently_used_adapter_without_requests_is_evicted(folders: Folders) -> None:
    engine = folders.engine(replace(ENGINE, max_num_batched_tokens=64))
    manager = engine.runner.adapters
    assert manager is not None
    short = replace(SAMPLED, max_new_tokens=3)
    engine.load_adapter("c", str(folders.adapters["c"]))  # evicts a
    reads: list[str] = []
    read = manager._read
    manager._read = lambda path: reads.append(path) or read(path)  # type: ignore[method-assign,func-returns-value]
    for name in ("c", "b", "a"):  # a evicts c
        (output,) = run_requests(engine, [(SHARED, short, name)])
        check_logprobs(folders.merged(name), output)
    assert reads == [str(folders.adapters["a"])]
    assert set(manager.paths) == {"a", "b", "c"} and len(manager._in_memory) == 2
    engine.add_request(SHARED, short, adapter="a")
    engine.add_request(SHARED, short, adapter="b")
    message = "adapter=c: all max_adapters=2 adapters in memory have requests in flight. Try again"
    with pytest.raises(DataError, match=message):
        engine.add_request(SHARED, short, adapter="c")
    with pytest.raises(DataError, match=message.replace("=c", "=d")):
        engine.load_adapter("d", str(folders.adapters["c"]))
    while engine.has_unfinished:
        engine.step()
    assert count_cached(engine, "c") > 0


def test_evicted_adapter_frees_its_memory(folders: Folders) -> None:
    engine = folders.engine(replace(ENGINE, max_adapters=1))
    manager = engine.runner.adapters
    assert manager is not None
    (adapter,) = manager._in_memory.values()
    matrices = [weakref.ref(each.a) for each in adapter.matrices.values()]
    assert len(matrices) == 8
    del adapter
    engine.load_adapter("c", str(folders.adapters["c"]))
    assert not any(matrix() is not None for matrix in matrices)


def test_rejected_and_aborted_requests_release_their_adapter(folders: Folders) -> None:
    engine = folders.engine()
    manager = engine.runner.adapters
    assert manager is not None
    with pytest.raises(DataError):
        engine.add_request([], SAMPLED, adapter="a")
    number = engine.add_request(SHARED, SAMPLED, adapter="a")
    engine.step()
    engine.unload_adapter("a")
    assert len(manager._in_memory) == 2
    engine.abort(number)
    assert [adapter.num_requests for adapter in manager._in_memory.values()] == [0]


def test_files_that_changed_after_an_eviction_are_reported(
    folders: Folders, tmp_path: Path
) -> None:
    engine = folders.engine(replace(ENGINE, max_adapters=1))
    shutil.copytree(folders.adapters["b"], tmp_path / "x")
    engine.load_adapter("x", str(tmp_path / "x"))
    engine.load_adapter("c", str(folders.adapters["c"]))
    shutil.rmtree(tmp_path / "x")
    shutil.copytree(save_peft_adapter(tmp_path / "new", folders.base, seed=9), tmp_path / "x")
    with pytest.raises(CheckpointError, match="adapter=x: .* has other weights than when it was"):
        engine.add_request(SHARED, SAMPLED, adapter="x")
    engine.load_adapter("x", str(tmp_path / "x"))
    assert count_cached(engine, "x") == 0


# --- LLM and AsyncLLM


def test_prompts_of_one_call_may_have_different_adapters(folders: Folders) -> None:
    config = replace(ENGINE, max_adapters=2)
    llm = LLM(folders.base, config=config, dtype=torch.float64)
    llm.load_adapter("a", folders.adapters["a"])
    prompts = [SHARED, SHARED, SHARED]
    outputs = llm.generate(prompts, SAMPLED, adapter=["a", None, "a"])
    for output, name in zip(outputs, ("a", None, "a"), strict=True):
        check_logprobs(folders.merged(name), output)
    (output,) = llm.generate([SHARED], SAMPLED, adapter="a")
    assert output.outputs[0].token_ids == outputs[0].outputs[0].token_ids
    with pytest.raises(ConfigError, match="adapter has 1 entries for 3 prompts. Pass one name"):
        llm.generate(prompts, SAMPLED, adapter=["a"])
    unknown = r"prompts\[1\]: adapter='A': there is no such adapter.*Did you mean.*Loaded: a\."
    with pytest.raises(DataError, match=re.compile(unknown, re.IGNORECASE)):
        llm.generate(prompts, SAMPLED, adapter=["a", "A", None])
    assert not llm.engine.has_unfinished
    llm.unload_adapter("a")
    with pytest.raises(DataError, match=r"adapter='a': there is no such adapter. Loaded: none\."):
        llm.unload_adapter("a")


def test_tasks_load_and_use_adapters(folders: Folders) -> None:
    async def main() -> None:
        generator = load_generator(folders.base, dtype=torch.float64, config=ENGINE)
        async with AsyncLLM(generator, config=ENGINE) as llm:
            running = asyncio.create_task(llm.generate(SHARED, SAMPLED))
            await llm.load_adapter("a", folders.adapters["a"])
            output = await llm.generate(SHARED, SAMPLED, adapter="a")
            check_logprobs(folders.merged("a"), output)
            tokens = [one.token async for one in llm.stream(SHARED, SAMPLED, adapter="a")]
            assert tokens == output.outputs[0].token_ids
            check_logprobs(folders.merged(None), await running)
            with pytest.raises(CheckpointError, match="no such folder"):
                await llm.load_adapter("b", "runs/absent")
            await llm.unload_adapter("a")
            with pytest.raises(DataError, match="there is no such adapter"):
                await llm.generate(SHARED, SAMPLED, adapter="a")

    asyncio.run(main())


# --- errors


def change_json(folder: Path, old: str, new: str) -> None:
    file = folder / ADAPTER_CONFIG
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_adapters_that_cannot_be_used_are_rejected(folders: Folders, tmp_path: Path) -> None:
    engine = folders.engine(replace(ENGINE, max_lora_rank=3))
    other = make_folders(tmp_path / "other", tiny_config(vocab_size=257, num_layers=3))
    wide = make_folders(tmp_path / "wide", tiny_config(vocab_size=257, ffn_hidden_size=14))
    large = save_adapter(tmp_path / "large", folders.base, seed=1, lora=LoraConfig(rank=4))
    peft = save_peft_adapter(tmp_path / "wide_peft", wide.base, seed=1)
    shutil.copytree(peft, tmp_path / "unnamed")
    change_json(tmp_path / "unnamed", str(wide.base), "someone/model")
    shutil.copytree(folders.adapters["b"], tmp_path / "dora")
    change_json(tmp_path / "dora", '"use_rslora": false', '"use_dora": true')
    cases = {
        "runs/absent": "runs/absent: no such folder, neither as a path nor under runs/",
        str(folders.base): "holds a model, not adapters. Use a run that trained adapters",
        str(large): "rank 4 is above max_lora_rank=3. Set max_lora_rank to 4.",
        str(other.adapters["a"]): f"were trained with {other.base}, whose weights differ from",
        str(peft): f"were trained with {wide.base}, whose weights differ from those of",
        str(tmp_path / "unnamed"): "is for another base: .* is .*14.*, expected .*10",
        str(tmp_path / "dora"): "use_dora=True: these adapters do not compute W",
    }
    for path, message in cases.items():
        with pytest.raises(CheckpointError, match=message):
            engine.load_adapter("x", path)
    with pytest.raises(ConfigError, match="lora_name='' is empty. Use a name"):
        engine.load_adapter("", str(folders.adapters["a"]))
    assert engine.runner.adapters is not None
    assert set(engine.runner.adapters.paths) == {"a", "b"}


def test_weights_that_are_not_finite_are_rejected(folders: Folders, tmp_path: Path) -> None:
    path = save_adapter(tmp_path, folders.base, seed=1, scale=float("inf"))
    with pytest.raises(CheckpointError, match=r"layers\.0\..*lora_a has NaN or infinite values"):
        folders.engine().load_adapter("x", str(path))


def test_engine_without_adapters_rejects_them(folders: Folders) -> None:
    engine = build_plain(folders)
    message = "max_adapters=0: the engine holds no adapters. Set max_adapters to"
    for call in (
        lambda: engine.load_adapter("a", str(folders.adapters["a"])),
        lambda: engine.unload_adapter("a"),
        lambda: engine.add_request(SHARED, SAMPLED, adapter="a"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    generator = load_generator(folders.base, dtype=torch.float64)
    with pytest.raises(ConfigError, match="max_adapters=2: the model was loaded without adapters"):
        build_engine(generator, ENGINE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adapters": ("a=x",)}, "adapters=a=x with max_adapters=0, which holds none. Set"),
        ({"adapters": ("a",), "max_adapters": 1}, "adapters=a: must be NAME=FOLDER, such as"),
        ({"adapters": ("=x",), "max_adapters": 1}, "adapters==x: must be NAME=FOLDER, such as"),
        ({"adapters": ("a=x", "a=y"), "max_adapters": 2}, "a occurs twice. Use different names."),
        ({"max_adapters": -1}, "max_adapters=-1 must be at least 0"),
        ({"max_lora_rank": 0}, "max_lora_rank=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_reported(settings: dict[str, Any], message: str) -> None:
    (problem,) = engine_problems(EngineConfig(**settings))
    assert message in problem


def test_chunks_of_mlps_are_rejected(folders: Folders) -> None:
    source, mesh = open_source(str(folders.base), 1), build_single_rank_mesh()
    with pytest.raises(ConfigError, match="--mlp-chunks=2 with max_adapters=2: chunks of MLPs"):
        load_text_generator(source, mesh, CPU, torch.float32, mlp_chunks=2, config=ENGINE)


# --- requests that another engine has started


def test_request_is_not_continued_with_other_weights_of_its_adapter(folders: Folders) -> None:
    engine = folders.engine()
    assert engine.runner.adapters is not None
    own, other = (engine.runner.adapters.fingerprints[name] for name in "ab")
    output = run_requests(engine, [(SHARED, SAMPLED, "a")])[0].outputs[0]
    progress = [ChoiceProgress(output.token_ids[:5])]

    def resume(fingerprint: bytes) -> int:
        return engine.add_request(
            SHARED, SAMPLED, adapter="a", adapter_fingerprint=fingerprint, progress=progress
        )

    continued = engine.output_of(resume(own))
    while engine.has_unfinished:
        engine.step()
    assert continued.outputs[0].token_ids == output.token_ids
    text = "adapter=a: the first tokens of this request were generated with other weights"
    with pytest.raises(ReplacedAdapterError, match=text):
        resume(other)
    assert not engine.has_unfinished

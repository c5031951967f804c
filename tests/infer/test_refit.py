"""Weights of a running engine are replaced in place, all of them or none."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.readers import list_being_read
from megalith.config.data import TokenizerConfig
from megalith.config.generation import SamplingParams
from megalith.config.lora import LoraConfig
from megalith.config.model import MTPConfig
from megalith.config.serve import CacheConfig, EngineConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.convert import convert
from megalith.hf.peft import AdaptedWeights, Adapters
from megalith.hf.pretrained import CheckpointWeights, mark_sources, open_pretrained
from megalith.infer.engine import InferenceEngine
from megalith.infer.llm import LLM, AsyncLLM
from megalith.infer.outputs import RequestOutput
from megalith.infer.refit import TrainingWeights, UpdateMode, WeightUpdater
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.parallel.group import single_rank_group
from tests.infer.engines import SAMPLED, build, check_logprobs, count_accepted, run
from tests.infer.lora_folders import save_adapter
from tests.infer.test_load import save

PROMPTS = [[5, 17, 36, 3, 14, 2, 9, 9, 1], [8], list(range(1, 12))]


def weights_of(model: Decoder, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Copies of all parameters of a model on one rank, scaled, by name."""
    return {
        spec.shard.name: getattr(module, name).detach().reshape(spec.shard.shape) * scale
        for spec, module, name in iter_parameter_specs(model)
    }


def storages(model: Decoder) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.fixture
def pair(tiny: SimpleNamespace) -> tuple[Decoder, Decoder]:
    """Two models of the same kind with different weights."""
    old, new = (tiny.model(tiny.config(), dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.8)
    return old, new


def generate(engine: InferenceEngine) -> list[list[int]]:
    outputs = run(engine, [(prompt, SAMPLED) for prompt in PROMPTS])
    return [output.outputs[0].token_ids for output in outputs]


def start(
    engine: InferenceEngine, steps: int, lengths: tuple[int, int, int] = (20, 20, 20)
) -> list[RequestOutput]:
    """Add the prompts, which generate `lengths` tokens, and execute some steps."""
    numbers = [
        engine.add_request(prompt, replace(SAMPLED, max_new_tokens=length))
        for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    outputs = [engine.output_of(number) for number in numbers]
    for _ in range(steps):
        engine.step()
    return outputs


def finish(engine: InferenceEngine) -> list[int]:
    """Execute steps to the end; returns the request of every token."""
    numbers = []
    while engine.has_unfinished:
        numbers += [output.request_id for output in engine.step()]
    engine.scheduler.check()
    return numbers


def test_drain_finishes_the_requests_that_have_started_with_the_old_weights(
    pair: tuple[Decoder, Decoder],
) -> None:
    old, new = pair
    expected, expected_new = generate(build(old)), generate(build(new))
    assert expected != expected_new
    engine = build(old, max_num_seqs=2)  # the third prompt waits, also when the second one ends
    pointers = storages(old)
    outputs = start(engine, 3, (20, 12, 20))
    engine.update_weights(weights_of(new), mode="drain")
    assert [output.finished for output in outputs] == [True, True, False]
    assert engine.weight_version == 1 and storages(old) == pointers
    assert finish(engine).count(0) == 20 - 3  # those generated during the update are returned too
    tokens = [output.outputs[0].token_ids for output in outputs]
    assert tokens == [expected[0], expected[1][:12], expected_new[2]]
    versions = [output.outputs[0].weight_versions for output in outputs]
    assert versions == [[(0, 0)], [(0, 0)], [(0, 1)]]


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_requests_in_flight_continue_with_the_new_weights(
    mode: UpdateMode, pair: tuple[Decoder, Decoder]
) -> None:
    old, new = pair
    engine = build(old, max_num_seqs=4)
    outputs = start(engine, 5)
    engine.update_weights(weights_of(new), mode=mode)
    finish(engine)
    for output in outputs:
        (completion,) = output.outputs
        assert completion.weight_versions == [(0, 0), (5, 1)] and len(completion.token_ids) == 20
        assert output.num_preemptions == (mode == "recompute")
        tail = replace(
            completion, token_ids=completion.token_ids[5:], logprobs=completion.logprobs[5:]
        )
        ids = [*output.prompt_token_ids, *completion.token_ids[:5]]
        suffix = RequestOutput(0, ids, [tail], output.timings)
        if mode == "recompute":  # log-probs are those of the new weights alone
            check_logprobs(new, suffix)
        elif len(ids) > 6:  # keys and values are those of the old ones
            with pytest.raises(AssertionError):
                check_logprobs(new, suffix)


def test_recompute_starts_prompt_logprobs_anew(pair: tuple[Decoder, Decoder]) -> None:
    old, new = pair
    engine = build(old, max_num_batched_tokens=12, max_num_seqs=4)
    scored = replace(SAMPLED, prompt_logprobs=0)
    output = engine.output_of(engine.add_request(list(range(1, 30)), scored))
    engine.step()
    assert output.prompt_logprobs and not output.outputs[0].token_ids
    engine.update_weights(weights_of(new), mode="recompute")
    finish(engine)
    check_logprobs(new, output)


def test_recompute_starts_embeddings_anew(pair: tuple[Decoder, Decoder]) -> None:
    old, new = pair
    embeddings = []
    for model in (new, old):
        engine = build(model, max_num_batched_tokens=12, max_num_seqs=4)
        params = SamplingParams(max_new_tokens=0)
        number = engine.add_request(list(range(1, 30)), params, pooling="mean")
        output = engine.output_of(number)
        engine.step()
        if model is old:
            engine.update_weights(weights_of(new), mode="recompute")
        finish(engine)
        embeddings.append(output.embedding)
    assert embeddings[0] is not None and embeddings[0] == embeddings[1]


@pytest.mark.parametrize("mode", ["drain", "recompute", "keep"])
def test_prefix_cache_is_emptied_by_an_update(
    mode: UpdateMode, pair: tuple[Decoder, Decoder]
) -> None:
    """A request after the update reuses no keys and values of the old weights, neither those of
    finished requests nor those of requests that were in flight."""
    old, new = pair
    engine = build(old)
    generate(engine)
    start(engine, 2)
    engine.update_weights(weights_of(new), mode=mode)
    finish(engine)
    (output,) = run(engine, [(PROMPTS[0], SAMPLED)])
    check_logprobs(new, output)
    (again,) = run(engine, [(PROMPTS[0], SAMPLED)])
    assert again.num_cached_tokens > 0


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_drafts_are_verified_with_the_new_weights(method: str, tiny: SimpleNamespace) -> None:
    """MTP layers are updated with the model; a draft model keeps its weights."""
    config = tiny.config(mtp=MTPConfig(num_layers=method == "mtp"))
    old, new = (tiny.model(config, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.8)
    draft_model = tiny.model(tiny.config(), dtype=torch.float64)
    before = weights_of(draft_model)
    drafts: dict[str, Any] = {"speculation": "mtp"}
    if method == "draft_model":
        drafts = {"draft_model": draft_model}
    engine = build(old, max_num_seqs=4, **drafts)
    outputs = start(engine, 4)
    engine.update_weights(weights_of(new), mode="recompute")
    finish(engine)
    for output in outputs:
        (completion,) = output.outputs
        (_, start_version), (boundary, _) = completion.weight_versions
        assert start_version == 0 and len(completion.token_ids) == 20
        tail = replace(
            completion,
            token_ids=completion.token_ids[boundary:],
            logprobs=completion.logprobs[boundary:],
        )
        ids = [*output.prompt_token_ids, *completion.token_ids[:boundary]]
        check_logprobs(new, RequestOutput(0, ids, [tail], output.timings))
    assert count_accepted(engine)[0] > 0
    updated, expected = weights_of(old), weights_of(new)
    assert all(torch.equal(updated[name], expected[name]) for name in expected)
    assert any(name.startswith("mtp.") for name in expected) == (method == "mtp")
    assert all(torch.equal(each, before[name]) for name, each in weights_of(draft_model).items())


# --- sources


def config_of(**changes: Any) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(num_blocks=64), max_model_len=64, **changes)


def save_scaled(folder: Path, model: Decoder, scale: float) -> Path:
    """Save a checkpoint of scaled weights; the model keeps its own."""
    plain = weights_of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
        path = save(folder, model, TokenizerConfig())
        for spec, module, name in iter_parameter_specs(model):
            getattr(module, name).view(spec.shard.shape).copy_(plain[spec.shard.name])
    return path


@pytest.fixture
def runs(tmp_path: Path, tiny: SimpleNamespace) -> tuple[Path, Path]:
    """Checkpoints with different weights."""
    model = tiny.model(tiny.config(vocab_size=300))
    return save_scaled(tmp_path / "old", model, 1.0), save_scaled(tmp_path / "new", model, 0.7)


@pytest.mark.parametrize("kind", ["checkpoint", "huggingface", "tensors"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_updated_model_equals_one_that_is_loaded(
    kind: str, quantization: Any, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    config = config_of(quantization=quantization)
    llm, expected = LLM(runs[0], config=config), LLM(runs[1], config=config)
    pointers = storages(llm.generator.model)
    source: Any = runs[1].parent if kind == "checkpoint" else runs[1]
    if kind == "huggingface":
        source = tmp_path / "hf"
        convert(open_pretrained(runs[1]), source, "huggingface")
    elif kind == "tensors":
        source = weights_of(LLM(runs[1], config=config_of()).generator.model)
    llm.update_weights(source)
    assert storages(llm.generator.model) == pointers
    for one, other in zip(
        llm.generator.model.parameters(), expected.generator.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)
    params = SamplingParams(max_new_tokens=8, seed=3)
    tokens, expected_tokens = (
        each.generate([[5, 6, 7]], params)[0].outputs[0].token_ids for each in (llm, expected)
    )
    assert tokens == expected_tokens


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (
        lambda weights: dict(list(weights.items())[1:]),
        r"the tensors cannot replace the weights; missing parameters: embed.weight. ",
    ),
    "unexpected": (
        lambda weights: {**weights, "layers.9.q": torch.zeros(2)},
        r"unexpected parameters: layers.9.q. Use weights of the same model",
    ),
    "shape": (
        lambda weights: {**weights, "embed.weight": weights["embed.weight"][:-1]},
        r"other shapes: embed.weight is \[39, 12\], expected \[40, 12\]",
    ),
    "nan": (
        lambda weights: {**weights, "embed.weight": weights["embed.weight"] / 0},
        r"embed.weight has NaN or infinite values",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_tensors_change_nothing(damage: str, pair: tuple[Decoder, Decoder]) -> None:
    old, new = pair
    engine = build(old)
    before = weights_of(old)
    outputs = start(engine, 3)
    apply, message = DAMAGES[damage]
    with pytest.raises(CheckpointError, match=message):
        engine.update_weights(apply(weights_of(new)))
    assert all(torch.equal(each, before[name]) for name, each in weights_of(old).items())
    assert engine.weight_version == 0
    assert not outputs[0].finished  # it is checked before requests are drained
    finish(engine)
    assert outputs[0].outputs[0].weight_versions == [(0, 0)]
    (hit,) = run(engine, [(PROMPTS[0], SAMPLED)])
    assert hit.num_cached_tokens > 0


def test_damaged_files_and_other_models_change_nothing(
    runs: tuple[Path, Path], tmp_path: Path, tiny: SimpleNamespace
) -> None:
    llm = LLM(runs[0], config=config_of())
    before = weights_of(llm.generator.model)
    other = save(
        tmp_path / "other", tiny.model(tiny.config(vocab_size=300, num_layers=3)), TokenizerConfig()
    )
    file = max((each for each in runs[1].iterdir()), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for path, message in (
        (other, r"num_layers\s+3\s+2"),
        (runs[1], "damaged. SHA-256 expected"),
        (tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(CheckpointError, match=message):
            llm.update_weights(path)
    assert all(
        torch.equal(each, before[name]) for name, each in weights_of(llm.generator.model).items()
    )
    assert llm.engine.weight_version == 0


def test_unknown_mode_is_rejected(pair: tuple[Decoder, Decoder]) -> None:
    engine = build(pair[0])
    mode: Any = "dran"
    with pytest.raises(
        ConfigError,
        match="mode='dran': there is no such mode of weight updates. Did you mean drain",
    ):
        engine.update_weights(weights_of(pair[1]), mode=mode)


def test_mtp_layers_that_are_not_loaded_are_not_updated(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(vocab_size=300, mtp=MTPConfig(num_layers=1)))
    old, new = (
        save_scaled(tmp_path / name, model, scale) for name, scale in (("old", 1.0), ("new", 0.7))
    )
    llm = LLM(old, config=config_of())
    assert not llm.generator.model.config.mtp.num_layers
    for source in (new, weights_of(model, scale=0.7)):
        llm.update_weights(source)
        updated, expected = weights_of(llm.generator.model), weights_of(model, scale=0.7)
        assert all(torch.allclose(each, expected[name]) for name, each in updated.items())


def test_int8_engine_is_not_updated_from_a_mesh(runs: tuple[Path, Path]) -> None:
    llm = LLM(runs[0], config=config_of(quantization="int8"))
    source = TrainingWeights([], single_rank_group("world"))
    with pytest.raises(CheckpointError, match="engine.quantization=int8: .*Update from a check"):
        llm.update_weights(source)


def test_adapters_belong_to_the_weights_of_their_base(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    old, new = (
        save_adapter(tmp_path / f"adapter{index}", path, seed=1) for index, path in enumerate(runs)
    )
    llm = LLM(runs[0], config=config_of(max_adapters=1))
    with pytest.raises(ConfigError, match="max_adapters=1: adapters are compared with the files"):
        llm.update_weights(weights_of(llm.generator.model))
    llm.load_adapter("a", old)
    with pytest.raises(ConfigError, match="max_adapters=1: adapters are loaded or in use"):
        llm.update_weights(runs[1])
    llm.unload_adapter("a")
    llm.update_weights(runs[1])
    with pytest.raises(CheckpointError, match="whose weights differ from those of"):
        llm.load_adapter("a", old)
    llm.load_adapter("a", new)
    (output,) = llm.generate([[5, 6, 7]], SAMPLED, adapter="a")
    assert output.outputs[0].weight_versions == [(0, 1)]


def test_streams_of_tasks_end_with_the_old_weights_of_a_drained_update(
    runs: tuple[Path, Path],
) -> None:
    async def main() -> None:
        async with AsyncLLM(runs[0], config=config_of()) as llm:
            stream = llm.stream([5, 6, 7], SAMPLED)
            outputs = [await anext(stream)]
            await llm.update_weights(runs[1])
            outputs += [output async for output in stream]
            assert [output.weight_version for output in outputs] == [0] * 20
            output = await llm.generate([5, 6, 7], SAMPLED)
            assert output.outputs[0].weight_versions == [(0, 1)]

    asyncio.run(main())


# --- failures in the middle


class FailingWeights:
    """Reads of the second pass fail after some parameters."""

    def __init__(self, weights: CheckpointWeights, num_reads: int) -> None:
        self._weights, self._num_reads = weights, num_reads

    def dtype(self, parameter: str) -> torch.dtype:
        return self._weights.dtype(parameter)

    def read(self, parameter: str, box: Any, dtype: torch.dtype) -> Tensor:
        self._num_reads -= 1
        if self._num_reads < 0:
            raise CheckpointError("the disk is gone")
        return self._weights.read(parameter, box, dtype)


def fail_in_the_middle(monkeypatch: pytest.MonkeyPatch, *, restores: bool) -> None:
    """Let the files of new weights vanish after a few parameters are written."""
    write = WeightUpdater._write
    calls: list[int] = []

    def planted(self: WeightUpdater, weights: Any) -> None:
        calls.append(1)
        fails = len(calls) == 1 or not restores
        write(self, FailingWeights(weights, 3) if fails else weights)

    monkeypatch.setattr(WeightUpdater, "_write", planted)


def test_old_weights_are_restored_from_their_files(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(runs[0], config=config_of())
    before = weights_of(llm.generator.model)
    params = SamplingParams(max_new_tokens=8, seed=3)
    expected = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    fail_in_the_middle(monkeypatch, restores=True)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        llm.update_weights(runs[1])
    assert all(
        torch.equal(each, before[name]) for name, each in weights_of(llm.generator.model).items()
    )
    assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == expected
    assert llm.engine.weight_version == 0


def test_a_mixture_of_weights_generates_nothing(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(runs[0], config=config_of())
    engine = llm.engine
    number = engine.add_request([5, 6, 7], SAMPLED)
    output = engine.output_of(number)
    engine.step()
    with monkeypatch.context() as patch:
        fail_in_the_middle(patch, restores=False)
        with pytest.raises(CheckpointError, match="the disk is gone"):
            engine.update_weights(runs[1], mode="keep")
    message = "the last weight update failed in the middle .*Update the weights again"
    with pytest.raises(CheckpointError, match=message):
        engine.add_request([5, 6, 7], SAMPLED)
    assert [each.finish_reason for each in engine.step()] == ["error"]
    assert "could not be restored" in str(output.outputs[0].error)
    llm.update_weights(runs[1])
    assert llm.generate([[5, 6, 7]], SAMPLED)[0].outputs[0].finish_reason == "length"


def test_checkpoint_of_an_update_is_marked_until_it_is_written(
    runs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLM(runs[0], config=config_of()).engine
    path = runs[1]
    marked: list[set[str]] = []
    write = WeightUpdater._write

    def write_marked(self: WeightUpdater, weights: Any) -> None:
        marked.append(list_being_read(path.parent))
        write(self, weights)

    monkeypatch.setattr(WeightUpdater, "_write", write_marked)
    engine.update_weights(path)
    assert marked == [{path.name}]
    assert list_being_read(path.parent) == set()


def test_adapters_and_their_base_are_marked(runs: tuple[Path, Path]) -> None:
    """Both are checkpoints of runs, which may delete them."""
    base = open_pretrained(runs[0])
    adapters = Adapters(runs[1], LoraConfig(rank=1), frozenset(), torch.tensor)
    weights = AdaptedWeights(runs[1], base.model, base.weights, base.path, adapters)
    with mark_sources([replace(base, weights=weights)]):
        assert [list_being_read(run.parent) for run in runs] == [{run.name} for run in runs]

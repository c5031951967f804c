"""Recorded forward passes: the bits of eager ones, and what cannot be recorded."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.config.model import RopeConfig
from megalith.config.serve import EngineConfig, GraphConfig, engine_problems
from megalith.errors import ConfigError
from megalith.infer import recorded_forward
from megalith.infer.build import build_engine, check_mode_is_not_recorded
from megalith.infer.engine import InferenceEngine
from megalith.infer.outputs import RequestOutput
from megalith.infer.recorded_forward import MAX_TOKENS, RecordedForwards
from megalith.kernels.attention.kv_blocks import allocate_blocks
from megalith.kernels.attention.paged import (
    PagedKeys,
    PagedMetadata,
    RecordedAttention,
    record_attention,
)
from megalith.kernels.attention.scores import PLAIN
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.linear_small_batch import ALL_ROW_COUNTS, NO_ROW_COUNTS, SmallBatchLimits
from megalith.kernels.packed import seq_params_from_rows
from tests.infer.engines import build, run
from tests.infer.test_engine import KINDS, random_requests
from tests.infer.test_quantize import load, save


def generate(
    engine: InferenceEngine, requests: Sequence[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    arrivals = {index: 3 * index for index in range(len(requests))}
    return run(engine, requests, arrivals)


def results(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        [(one.token_ids, [each.logprob for each in one.logprobs or ()]) for one in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [
        (torch.float32, ALL_ROW_COUNTS),
        (torch.bfloat16, NO_ROW_COUNTS),
        (torch.bfloat16, ALL_ROW_COUNTS),
        (torch.float64, NO_ROW_COUNTS),
    ],
    ids=["fp32", "bf16 torch", "bf16", "fp64"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_passes_give_the_bits_of_eager_ones(
    kind: str, dtype: torch.dtype, limits: SmallBatchLimits, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=dtype)
    requests = random_requests(3, model.config.vocab_size, count=6)
    outputs = []
    for is_recorded in (False, True):
        engine = build(model, max_num_batched_tokens=21, max_num_seqs=9, speculation="ngram")
        engine.runner.limits = limits
        recorded = engine.runner.recorded
        assert recorded is not None
        if not is_recorded:
            engine.runner.recorded = None
        outputs.append(results(generate(engine, requests)))
        assert recorded.failure is None
        assert (recorded.num_replays > 8) == is_recorded
    assert outputs[0] == outputs[1]


def generate_long_prompts(
    tiny: SimpleNamespace, dtype: torch.dtype, *, is_recorded: bool = True
) -> list[Any]:
    """Return the results of prompts of 40 tokens, whose attention gathers keys, one by one."""
    model = tiny.model(tiny.config(), dtype=dtype)
    engine = build(model, prefix_caching=False, max_num_batched_tokens=64)
    if not is_recorded:
        engine.runner.recorded = None
    params = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True, logprobs=1)
    prompts = [[(7 * seed + 3 * i) % 37 for i in range(40)] for seed in range(3)]
    return [results(run(engine, [(prompt, params)])) for prompt in prompts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_attention_has_the_bits_of_eager_attention(
    dtype: torch.dtype, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate_long_prompts(tiny, dtype, is_recorded=False)
    repeat, repeated = RecordedAttention.__call__, list[tuple[int, bool]]()

    def observe(self: RecordedAttention, metadata: PagedMetadata, slots: Tensor) -> bool:
        is_repeated = repeat(self, metadata, slots)
        repeated.append((metadata.num_tokens, is_repeated))
        return is_repeated

    monkeypatch.setattr(RecordedAttention, "__call__", observe)
    assert generate_long_prompts(tiny, dtype) == expected
    assert set(repeated) == {(1, True), (40, False)}

    def store_in_first_slot(self: RecordedAttention, metadata: PagedMetadata, slots: Tensor) -> Any:
        return repeat(self, metadata, torch.zeros_like(slots))

    monkeypatch.setattr(RecordedAttention, "__call__", store_in_first_slot)
    assert generate_long_prompts(tiny, dtype) != expected


def test_attention_of_other_kernels_is_called_in_each_step() -> None:
    def record(dtype: torch.dtype, **settings: Any) -> RecordedAttention | None:
        q, k = torch.randn(3, 4, 8).to(dtype), torch.randn(3, 4, 8).to(dtype)
        blocks = allocate_blocks((2, 4, 4, 8), q, settings.pop("cache_dtype", dtype))
        sinks, out = settings.pop("sinks", None), settings.pop("out", torch.empty_like(q))
        scores = settings.pop("scores", PLAIN)
        q = settings.pop("q", q)
        paged = PagedKeys((q,), (blocks,), blocks)
        return record_attention(paged, (k, k), scores, sinks, out, **settings)

    assert isinstance(record(torch.float32), RecordedAttention)
    assert isinstance(record(torch.bfloat16, kernel="numba"), RecordedAttention)
    assert isinstance(record(torch.float32, sinks=torch.zeros(4)), RecordedAttention)
    assert record(torch.float32, kernel="torch") is None
    assert record(torch.float64) is None
    assert record(torch.float32, cache_dtype=torch.int8) is None
    assert record(torch.float32, q=torch.randn(3, 8, 8)[:, ::2]) is None
    assert record(torch.float32, out=torch.empty(4, 3, 8).transpose(0, 1)) is None
    assert record(torch.bfloat16, sinks=torch.zeros(4, dtype=torch.bfloat16)) is None
    assert record(torch.float32, scores=replace(PLAIN, off_by_one=True)) is None


def test_a_model_that_cannot_be_recorded_runs_eagerly(tiny: SimpleNamespace) -> None:
    rope = RopeConfig(skip=(False, True), skip_growth=0.5, skip_step=3)
    model = tiny.model(tiny.config(rope=rope), dtype=torch.float64)
    requests = random_requests(3, model.config.vocab_size, count=4)
    eager = build(model)
    eager.runner.recorded = None
    engine = build(model)
    assert results(generate(engine, requests)) == results(generate(eager, requests))
    recorded = engine.runner.recorded
    assert recorded is not None and recorded.num_replays == 0
    assert "reads a tensor that is allocated in each step" in str(recorded.failure)


def test_moved_weights_are_recorded_again(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = random_requests(4, model.config.vocab_size, count=3)
    engine = build(model, prefix_caching=False)
    before = results(generate(engine, requests))
    for parameter in {id(each): each for each in model.parameters()}.values():
        old = parameter.data
        parameter.data = old.clone()
        old.fill_(float("nan"))
    assert results(generate(engine, requests)) == before
    recorded = engine.runner.recorded
    assert recorded is not None and recorded.failure is None


def test_weights_updated_in_place_are_used(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = random_requests(4, model.config.vocab_size, count=3)
    engine = build(model, prefix_caching=False)
    generate(engine, requests)
    with torch.no_grad():
        next(model.layers.parameters()).mul_(-3)
    expected = build(model, prefix_caching=False)
    expected.runner.recorded = None
    assert results(generate(engine, requests)) == results(generate(expected, requests))


class _Layers(torch.nn.Module):
    """Layers of one matrix, in place of those of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4, dtype=torch.float64) * 2)

    def run(
        self, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        return x @ self.weight, inputs

    def add_positions(
        self, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        return x @ self.weight + inputs.seq_params.position_ids[:, None], inputs

    def branch_on_value(
        self, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        return (x @ self.weight if float(x.sum()) > 0 else -x), inputs

    def return_source(
        self, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        return x @ self.weight, replace(inputs, encoder_hidden=x + 1)


def inputs_of(x: Tensor, start: int) -> LayerInputs:
    seq_params = seq_params_from_rows(1, len(x))
    return LayerInputs(replace(seq_params, position_ids=torch.arange(start, start + len(x))))


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("run", None),
        ("add_positions", "reads a tensor that is allocated in each step"),
        ("branch_on_value", "returns a value to Python"),
        ("return_source", "a later stage reads a tensor of these layers"),
    ],
)
@torch.inference_mode()
def test_what_depends_on_the_step_is_found_while_recording(method: str, reason: str | None) -> None:
    layers = _Layers()
    recorded = RecordedForwards([layers.weight])
    forward = getattr(layers, method)
    for step in range(5):
        x = torch.full((3, 4), (-1.0) ** step + step, dtype=torch.float64)
        inputs = inputs_of(x, step)
        y, outputs = recorded.run(forward, x, inputs, [])
        expected, expected_inputs = forward(x, inputs, [])
        assert torch.equal(y, expected)
        if expected_inputs.encoder_hidden is not None:
            assert torch.equal(outputs.encoder_hidden, expected_inputs.encoder_hidden)
    assert recorded.num_replays == (3 if reason is None else 0)
    assert recorded.failure is None if reason is None else reason in str(recorded.failure)


def test_the_setting_of_graphs_decides_whether_passes_are_recorded(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    requests = random_requests(4, model.config.vocab_size, count=2)
    for mode, description in (
        ("auto", "recorded, up to 64 tokens"),
        ("recorded", "recorded, up to 64 tokens"),
        ("none", "none"),
    ):
        engine = build(model, graphs=GraphConfig(mode=mode))
        assert engine.describe().endswith(f"graphs: {description}")
        generate(engine, requests)
        counts = engine.runner.count_graph_steps()
        assert (counts != {}) == (mode != "none")
        if counts:
            assert counts["graph_steps"]["recorded"] > 0


@pytest.mark.parametrize("mode", ["none", "recorded"])
def test_settings_of_buckets_are_rejected_without_buckets(mode: Any) -> None:
    config = EngineConfig(
        graphs=GraphConfig(mode=mode, prefills="mixed", num_buckets=4), batch_invariant=True
    )
    assert engine_problems(config) == [
        f"graphs.{name} with graphs.mode={mode}, which has no buckets. Set graphs.mode to auto, or "
        f"leave graphs.{name.partition('=')[0]} unset."
        for name in ("num_buckets=4", "prefills=mixed")
    ]


def test_settings_of_buckets_without_effect_are_reported(
    tmp_path: Path, tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    generator = load(save(tmp_path, tiny.model(tiny.config(vocab_size=300))), "none")
    with caplog.at_level(logging.WARNING, logger="megalith.infer.build"):
        build_engine(generator, EngineConfig(graphs=GraphConfig(prefills="mixed")))
    assert "graphs.prefills=mixed has no effect without CUDA graphs" in caplog.messages


def test_int8_weights_are_recorded(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)))
    model = load(path, "int8", torch.float32).model
    requests = random_requests(5, 300, count=3)
    outputs = []
    for mode in ("auto", "none"):
        engine = build(model, graphs=GraphConfig(mode=mode))
        engine.runner.limits = ALL_ROW_COUNTS
        outputs.append(results(generate(engine, requests)))
        recorded = engine.runner.recorded
        assert (recorded is not None) == (mode == "auto")
        assert recorded is None or (recorded.failure is None and recorded.num_replays > 0)
    assert outputs[0] == outputs[1]


def test_recorded_mode_is_rejected_where_passes_are_not_recorded(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    generator = load(save(tmp_path, tiny.model(tiny.config(vocab_size=300))), "none")
    config = EngineConfig(graphs=GraphConfig(mode="recorded"))
    assert build_engine(generator, config).runner.recorded is not None
    with pytest.raises(ConfigError, match="graphs.mode=recorded on cpu with 2 processes: .* auto"):
        check_mode_is_not_recorded(config, torch.device("cpu"), num_ranks=2)


@torch.inference_mode()
def test_results_of_earlier_steps_do_not_change() -> None:
    layers = _Layers()
    recorded = RecordedForwards([layers.weight])
    results = []
    for step in range(4):
        x = torch.full((2, 4), float(step), dtype=torch.float64)
        results.append(recorded.run(layers.run, x, inputs_of(x, 0), [])[0])
    assert [float(y[0, 0]) for y in results] == [0, 2, 4, 6]


@torch.inference_mode()
def test_recordings_have_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = _Layers()
    recorded = RecordedForwards([layers.weight])

    def run_passes(counts: Sequence[int]) -> int:
        before = recorded.num_replays
        for count in counts:
            x = torch.full((count, 4), float(count), dtype=torch.float64)
            y, _ = recorded.run(layers.run, x, inputs_of(x, 0), [])
            assert torch.equal(y, 2 * x)
        return recorded.num_replays - before

    assert run_passes([8, 8, 8]) == 1
    per_token = recorded.num_bytes // 8
    assert per_token == 2 * 4 * 8  # input and output
    monkeypatch.setattr(recorded_forward, "MAX_BYTES", 20 * per_token)
    assert run_passes([4, 4, 6, 6, 8, 4, 6]) == 3  # 18 tokens
    assert run_passes([5, 5, 5]) == 1  # drops 8, the least recently used
    assert recorded.num_bytes == 15 * per_token
    assert run_passes([4, 6, 5]) == 3
    assert run_passes([30, 30, 30]) == 0  # alone larger
    assert recorded.max_tokens == 29
    assert run_passes([4, 6, 5]) == 3


@torch.inference_mode()
def test_passes_over_many_tokens_are_not_recorded() -> None:
    layers = _Layers()
    recorded = RecordedForwards([layers.weight])
    x = torch.ones(MAX_TOKENS + 1, 4, dtype=torch.float64)
    for _ in range(3):
        recorded.run(layers.run, x, inputs_of(x, 0), [])
    assert recorded.num_replays == 0

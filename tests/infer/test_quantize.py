"""Models whose weights are loaded as int8."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.config.data import TokenizerConfig
from megalith.config.generation import SamplingParams
from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.serve import EngineConfig, InferenceParallelConfig, Quantization
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.release import release_run
from megalith.infer import quantize
from megalith.infer.build import build_engine
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import build_generation_mesh, open_source
from megalith.infer.llm import LLM
from megalith.infer.load import load_text_generator
from megalith.infer.quantize import iter_quantized_weights, iter_row_boxes
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.shards import Shard, split_evenly
from megalith.precision.int8 import dequantize_int8, quantize_int8
from megalith.testing.ranks import run_ranks
from tests.infer.engines import build, run

CPU = torch.device("cpu")
INT8 = EngineConfig(quantization="int8")
PARAMS = SamplingParams(max_new_tokens=7, seed=1234, logprobs=0)
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied_embeddings": True},
    "untied": {"tied_embeddings": False},
    "experts": {
        "moe": MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8, shared_ffn_hidden_size=5)
    },
    "mla": {"mla": MLAConfig(kv_rank=8, rope_dim=2, nope_dim=4, value_dim=4), "num_kv_heads": 6},
}


def save(folder: Path, model: Decoder) -> Path:
    entries = [
        CheckpointEntry(spec.shard, "param", getattr(module, name))
        for spec, module, name in iter_parameter_specs(model)
    ]
    text = dump_yaml(release_run("tiny", model.config, TokenizerConfig(), folder))
    return save_checkpoint(
        folder, 1, entries, {}, single_rank_group("world"), config_text=text
    ).path


def load(path: Path, quantization: Quantization, dtype: torch.dtype = torch.float64) -> Any:
    return load_text_generator(
        open_source(str(path), 1),
        build_single_rank_mesh(),
        CPU,
        dtype,
        config=EngineConfig(quantization=quantization),
    )


def generate(model: Decoder) -> list[Any]:
    return run_prompts(build(model))


def run_prompts(engine: InferenceEngine) -> list[Any]:
    outputs = run(engine, [([5, 6, 7, 8], PARAMS), ([9] * 30, PARAMS)])
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


def check_equal(actual: list[Any], expected: list[Any], tolerance: float = 1e-9) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
        actual, expected, strict=True
    ):
        assert tokens == expected_tokens
        for one, other in zip(logprobs, expected_logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_int8_model_equals_the_model_with_dequantized_weights(
    kind: str, tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "PIECE_ELEMENTS", 50)
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300, **MODELS[kind])))
    quantized, reference = load(path, "int8").model, load(path, "none").model
    names = set()
    for weights in iter_quantized_weights(quantized):
        names |= {shard.name for shard in weights.shards}
    assert ("head.weight" in names) == (kind != "tied")
    changed = 0
    for spec, module, name in iter_parameter_specs(reference):
        parameter = getattr(module, name)
        if spec.shard.name in names:
            rounded = dequantize_int8(quantize_int8(parameter.detach().float()), torch.float64)
            changed += not torch.equal(parameter, rounded)
            parameter.data.copy_(rounded)
    assert changed == len(names) > 0
    check_equal(generate(quantized), generate(reference))


def generate_on_rank(
    rank: int, world: int, path: Path, config: ModelConfig, parallel: InferenceParallelConfig
) -> list[Any]:
    mesh = build_generation_mesh(config, parallel, rank=rank, world=world)
    source = open_source(str(path), world, parallel=parallel)
    generator = load_text_generator(
        source, mesh, CPU, torch.float64, config=INT8, parallel=parallel
    )
    engine = build_engine(generator, INT8)
    outputs = run_prompts(engine)
    engine.runner.close()
    return outputs


@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("untied", InferenceParallelConfig()),
        ("untied", InferenceParallelConfig(pp=2)),
        ("experts", InferenceParallelConfig()),
        ("experts", InferenceParallelConfig(sp=True)),
    ],
)
def test_int8_weights_do_not_depend_on_the_layout(
    kind: str, parallel: InferenceParallelConfig, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config(vocab_size=300, **MODELS[kind])
    path = save(tmp_path, tiny.model(config))
    expected = generate(load(path, "int8").model)
    for outputs in run_ranks(generate_on_rank, 2, path, config, parallel):
        check_equal(outputs, expected)


def test_int8_weights_take_a_quarter_of_the_memory_of_fp32(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)))
    model = load(path, "int8", torch.float32).model
    quantized = {
        id(getattr(weights.module, name))
        for weights in iter_quantized_weights(model)
        for name in weights.names
    }
    for parameter in model.parameters():
        assert parameter.element_size() == (1 if id(parameter) in quantized else 4)
    assert len(quantized) == 2 * len(("q", "kv", "o", "gate_up", "down")) + len(("head",))


def test_batch_invariant_engine_runs_with_int8_weights(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    path = save(tmp_path, tiny.model(tiny.config(vocab_size=300)))
    config = EngineConfig(quantization="int8", batch_invariant=True)
    llm = LLM(path, config=config)
    prompts = [[5, 6, 7, 8], [9] * 30]
    together = llm.generate(prompts, PARAMS)
    for prompt, output in zip(prompts, together, strict=True):
        (alone,) = llm.generate([prompt], PARAMS)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_row_boxes_divide_a_shard_in_order() -> None:
    shard = Shard.full("w", (4, 3, 5)).split_dim(0, split_evenly(4, 2), 1, ("tp",))
    shard = replace(shard, box=(shard.box[0], shard.box[1], (1, 3)))
    boxes = list(iter_row_boxes(shard, 10))
    assert boxes == [
        ((2, 3), (0, 2), (0, 5)),
        ((2, 3), (2, 3), (0, 5)),
        ((3, 4), (0, 1), (0, 5)),
        ((3, 4), (1, 3), (0, 5)),
    ]


def test_unusable_quantization_is_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=300))
    path = save(tmp_path, model)
    with pytest.raises(ConfigError, match="kernels.experts=reference: it has no int8 weights"):
        LLM(path, config=EngineConfig(quantization="int8"), kernels="reference")
    with pytest.raises(ConfigError, match="engine.quantization=int8: the model was loaded with"):
        build_engine(load(path, "none"), EngineConfig(quantization="int8"))
    with pytest.raises(
        ConfigError,
        match="on CPUs and NVIDIA GPUs, not on meta. Set quantization to none",
    ):
        load_text_generator(
            open_source(str(path), 1),
            build_single_rank_mesh(),
            torch.device("meta"),
            torch.float32,
            config=INT8,
        )
    with torch.no_grad():
        model.get_parameter("layers.0.mlp.down.down").fill_(float("nan"))
    damaged = save(tmp_path / "damaged", model)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down.*cannot be quantized to int8"):
        load(damaged, "int8")

"""Relative position bias: one table for all layers, sharded by heads; with it layers match the
encoder of T5."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config.model import AttentionConfig, ModelConfig, RelativeConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.kernels.layer_inputs import Attend, LayerInputs
from megalith.kernels.packed import seq_params_from_lengths, seq_params_from_queries
from megalith.models.decoder import (
    Decoder,
    allocate,
    build_chunks,
    initialize,
    iter_parameter_specs,
)
from megalith.nn.build import build_context
from megalith.nn.embedding import NoBias, RelativeBias
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.verify.matrix import RELATIVE


def of_t5(name: str, parameters: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """The value of a parameter of ours, in the encoder of transformers."""
    n, d, h = config.num_heads, config.head_size(), config.hidden_size
    ends = {
        "embed.weight": "shared",
        "norm.weight": "encoder.final_layer_norm",
        "relative.weight": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    }
    if name in ends:
        return parameters[f"{ends[name]}.weight"]
    _, number, part = name.split(".", 2)
    reference = f"encoder.block.{number}.layer"

    def attention(word: str) -> Tensor:
        return parameters[f"{reference}.0.SelfAttention.{word}.weight"]

    match part:
        case "attention.kv":
            return torch.stack([attention(word).view(n, d, h) for word in "kv"])
        case "attention.q" | "attention.o":
            return attention(part[-1])
    words = {
        "attention_norm.weight": "0.layer_norm",
        "mlp_norm.weight": "1.layer_norm",
        "mlp.up": "1.DenseReluDense.wi",
        "mlp.down": "1.DenseReluDense.wo",
    }
    return parameters[f"{reference}.{words[part]}.weight"]


def test_bidirectional_layers_with_relative_bias_match_the_t5_encoder() -> None:
    transformers = pytest.importorskip("transformers")
    settings = {
        "vocab_size": 61,
        "d_model": 24,
        "d_kv": 5,
        "num_heads": 3,
        "d_ff": 17,
        "num_layers": 3,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 11,
    }
    reference = transformers.T5EncoderModel(transformers.T5Config(**settings)).eval().double()
    config = ModelConfig(
        vocab_size=61,
        pad_vocab_to_multiple_of=1,
        hidden_size=24,
        num_layers=3,
        num_heads=3,
        num_kv_heads=3,
        head_dim=5,
        ffn_hidden_size=17,
        gated=False,
        activation="relu",
        norm_eps=1e-6,
        positions="relative",
        tied_embeddings=True,
        relative=RelativeConfig(buckets=8, max_distance=11),
        attention=AttentionConfig(causal=False, scale=1.0),
    )
    model = Decoder(build_context(config, build_single_rank_mesh(), dtype=torch.float64))
    allocate(model, torch.device("cpu"))
    with torch.no_grad():
        for declared, module, name in iter_parameter_specs(model):
            parameter = getattr(module, name)
            parameter.copy_(
                of_t5(declared.shard.name, reference.state_dict(), config).reshape(parameter.shape)
            )
    ids = torch.randint(61, (2, 15), generator=torch.Generator().manual_seed(0))
    expected = reference(input_ids=ids).last_hidden_state
    result = model.hidden_states(
        ids.flatten(), LayerInputs(seq_params_from_lengths([15, 15]))
    ).view(expected.shape)
    assert (result - expected).abs().max() < 1e-5  # its norms have fp32 inside
    packed = model.hidden_states(ids.flatten()[:24], LayerInputs(seq_params_from_lengths([15, 9])))
    alone = reference(input_ids=ids[1:, :9]).last_hidden_state[0]
    assert (packed - torch.cat([expected[0], alone])).abs().max() < 1e-5


def test_a_rank_has_the_columns_of_its_heads() -> None:
    parts = []
    for rank in range(4):
        mesh = build_meta_mesh(model_grid(ParallelConfig(tp=4), RELATIVE, 4), rank=rank)
        table = RelativeBias(RELATIVE, build_context(RELATIVE, mesh))
        shard = table.param_specs["weight"].shard  # type: ignore[union-attr]
        parts.append(shard.box)
        assert (
            shard.name == "relative.weight"
            and shard.shape == (8, 6)
            and shard.matrix_shape == shard.box_shape
        )
    assert parts == [((0, 8), (0, 2)), ((0, 8), (2, 4)), ((0, 8), (4, 5)), ((0, 8), (5, 6))]


def chunks(pp: int, rank: int, **pipeline: object) -> list[Decoder]:
    parallel = ParallelConfig(pp=pp, pipeline=PipelineConfig(**pipeline))  # type: ignore[arg-type]
    mesh = build_meta_mesh(model_grid(parallel, RELATIVE, pp), rank=rank)
    return build_chunks(build_context(RELATIVE, mesh, parallel))


def test_each_stage_has_a_copy_and_chunks_of_a_rank_share_it() -> None:
    first, second = chunks(2, 0, vpp=2)
    assert isinstance(first.relative, RelativeBias) and isinstance(second.relative, RelativeBias)
    assert first.relative.weight is second.relative.weight
    named = [d.shard for chunk in (first, second) for d, _, _ in iter_parameter_specs(chunk)]
    (shard,) = [shard for shard in named if shard.name == "relative.weight"]
    assert shard.stages == (0, 1)
    (empty,) = chunks(3, 0, layout="E|tt|ttL")
    assert isinstance(empty.relative, NoBias) and not list(empty.relative.parameters())
    (middle,) = chunks(3, 1, layout="E|tt|ttL")
    assert middle.relative.param_specs["weight"].shard.stages == (1, 2)  # type: ignore[union-attr]


def test_decoding_with_kv_cache_uses_distances_from_the_query(layers: SimpleNamespace) -> None:
    """A cache holds earlier keys, so the first query of a part is not the first token."""
    config = replace(RELATIVE, num_layers=1)
    model = Decoder(build_context(config, build_single_rank_mesh(), dtype=torch.float64))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=3)
    nn.init.normal_(model.relative.weight)  # type: ignore[arg-type]

    class SpanHook:
        def __init__(self) -> None:
            self.kept: list[tuple[Tensor, Tensor]] = []

        def attend(
            self, core: Attend, q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
        ) -> Tensor:
            self.kept.append((k, v))
            k, v = (torch.cat(part) for part in zip(*self.kept))
            return core(q, k, v, *others, **options)

    ids, cache = torch.arange(20) * 3, SpanHook()
    whole = model.hidden_states(ids, LayerInputs(seq_params_from_lengths([20])))
    parts = [
        model.hidden_states(
            ids[start:stop], LayerInputs(seq_params_from_queries([(stop - start, stop)])), [cache]
        )
        for start, stop in ((0, 7), (7, 8), (8, 20))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import rms_norm

from megalith.config.model import LayerPart, LayersConfig, MLAConfig
from megalith.config.parallel import RecomputeConfig, RecomputedModule
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import register_recompute
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import iter_parameter_specs
from megalith.nn.attention import Attention
from megalith.nn.build import build_context, init_param_
from megalith.nn.dropout import RecomputedCore
from megalith.nn.layer import SequentialBlock, select_block_class
from megalith.nn.mla import LatentAttention, no_recompute
from megalith.nn.mlp import GatedMLP
from megalith.nn.rope import RotaryEmbedding
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import Init
from megalith.testing.tolerance import FP64, assert_equals


def test_a_layer_adds_attention_and_then_the_mlp_each_to_its_own_normalized_input(
    layers: SimpleNamespace,
) -> None:
    config = layers.config()
    block = layers.build(SequentialBlock, config)
    x, tokens = layers.inputs(9), layers.layer_inputs(config, [5, 4])
    w = layers.weights(block)
    middle = x + block.attention(
        rms_norm(x, (18,), w["attention_norm.weight"], config.norm_eps), tokens
    )
    expected = middle + block.mlp(rms_norm(middle, (18,), w["mlp_norm.weight"], config.norm_eps))
    assert_equals("block", block(x, tokens), expected, FP64)


def test_parameters_are_named_by_their_module_path(layers: SimpleNamespace) -> None:
    block = layers.build(
        SequentialBlock, layers.config(qkv_bias=False, output_bias=False, mlp_bias=False)
    )
    assert list(layers.weights(block)) == [
        "attention_norm.weight",
        "attention.q",
        "attention.kv",
        "attention.o",
        "mlp_norm.weight",
        "mlp.gate_up",
        "mlp.down",
    ]
    assert isinstance(block.attention, Attention) and isinstance(block.mlp, GatedMLP)


def test_recomputed_modules_are_the_selected_ones(layers: SimpleNamespace) -> None:
    config, mesh = layers.config(), build_single_rank_mesh()

    def built(*modules: RecomputedModule) -> SequentialBlock:
        recompute = RecomputeConfig(granularity="selective", modules=modules)
        return SequentialBlock("layers.0", config, build_context(config, mesh, recompute=recompute))

    plain, all_of_it = built(), built("core_attention", "norm", "mlp", "mlp_act")
    assert not isinstance(plain.mlp, Recomputed) and plain.attention_norm.register is None
    assert isinstance(all_of_it.mlp, Recomputed) and isinstance(
        all_of_it.attention.core, RecomputedCore
    )
    assert all_of_it.attention_norm.register is all_of_it.mlp_norm.register is register_recompute
    names = [
        [declared.shard.name for declared, _, _ in iter_parameter_specs(block)]
        for block in (plain, all_of_it)
    ]
    assert names[0] == names[1]


SHORT = MLAConfig(kv_rank=7, q_rank=8, nope_dim=5, rope_dim=4, value_dim=3)


def test_recomputed_mla_up_projection_contains_no_recomputed_module(
    layers: SimpleNamespace,
) -> None:
    config, mesh = layers.config(num_heads=4, num_kv_heads=4, mla=SHORT), build_single_rank_mesh()
    for modules in (("core_attention",), ("core_attention", "mla_up_proj")):
        again = RecomputeConfig(granularity="selective", modules=modules)
        context = build_context(config, mesh, recompute=again)
        layer = SequentialBlock("layers.0", config, context).attention
        assert isinstance(layer, LatentAttention)
        assert isinstance(layer.core, RecomputedCore) == ("mla_up_proj" not in modules)
        assert (layer.around is no_recompute) == ("mla_up_proj" not in modules)


def test_layer_with_linear_replacement_or_without_a_part(layers: SimpleNamespace) -> None:
    x = layers.inputs(9)
    kinds: list[tuple[LayerPart, LayerPart]] = [
        ("full", "none"),
        ("none", "full"),
        ("linear", "full"),
        ("full", "linear"),
    ]
    for attention, mlp in kinds:
        config = layers.config(layers=LayersConfig(attention=(attention,), mlp=(mlp,)))
        tokens, block = (
            layers.layer_inputs(config, [5, 4]),
            layers.build(select_block_class(config, 0), config),
        )
        w, expected = layers.weights(block), x
        for word, part in (("attention", attention), ("mlp", mlp)):
            assert any(name.startswith(word) for name in w) == (part != "none")
            if part == "none":
                continue
            normed = rms_norm(expected, (18,), w[f"{word}_norm.weight"], config.norm_eps)
            if part == "linear":
                expected = expected + normed @ w[f"{word}.linear"].T + w[f"{word}.linear_bias"]
            else:
                expected = expected + (
                    block.attention(normed, tokens) if word == "attention" else block.mlp(normed)
                )
        assert_equals("block", block(x, tokens), expected, FP64)


def test_layer_with_its_own_sizes(layers: SimpleNamespace) -> None:
    config = layers.config(
        num_layers=2, layers=LayersConfig(num_kv_heads=(3, 1), ffn_hidden_size=(11, 5))
    )
    mesh = build_single_rank_mesh()
    second = SequentialBlock("layers.1", config, build_context(config, mesh).at_layer(1))
    shapes = {
        declared.shard.name: declared.shard.shape for declared, _, _ in iter_parameter_specs(second)
    }
    assert shapes["layers.1.attention.kv"] == (2, 1, 4, 18) and shapes["layers.1.mlp.gate_up"] == (
        2,
        5,
        18,
    )


def test_fp32_residual_keeps_small_updates(layers: SimpleNamespace) -> None:
    mesh = build_single_rank_mesh()
    kinds: list[dict[str, Any]] = [
        {},
        {"norm": "layer", "norm_placement": "around"},
        {"norm_placement": "after"},
        {"block": "parallel"},
        {"block": "parallel_one_norm"},
        {"zero_centered_gamma": True, "layers": LayersConfig(mlp=("linear",))},
    ]
    for kind in kinds:
        config = layers.config(fp32_residual=True, **kind)
        result = {}
        for dtype in (torch.bfloat16, torch.float64):
            block = select_block_class(config, 0)(
                "layers.0", config, build_context(config, mesh, dtype=dtype)
            )
            block.to_empty(device="cpu")
            for declared, module, name in iter_parameter_specs(block):
                init_param_(getattr(module, name), declared.shard, Init(0.1, offset=0.1), seed=2)
            tokens = RotaryEmbedding(config, dtype).add_to(
                LayerInputs(seq_params_from_lengths([9]))
            )
            x = (
                (100 * layers.inputs(9))
                .to(torch.promote_types(dtype, torch.float32))
                .requires_grad_()
            )
            y = block(x, tokens)
            (y - x.detach()).square().sum().backward()
            assert y.dtype == x.dtype and {parameter.dtype for parameter in block.parameters()} == {
                dtype
            }
            assert all(parameter.grad is not None for parameter in block.parameters())
            assert x.grad is not None
            result[dtype] = (y - x).detach().double(), x.grad.double()
        for narrow, wide in zip(result[torch.bfloat16], result[torch.float64], strict=True):
            assert (narrow - wide).norm() < 0.06 * wide.norm(), kind

"""First values by name, and muP: activations stay as large in wide models, and learn at the same
rate."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from megalith.config.model import LayersConfig, ModelConfig, MuPConfig
from megalith.config.optim import OptimConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.parameters import (
    PLAIN,
    InitialValues,
    ParameterRates,
    initial_values,
    mup_factors,
)
from megalith.train.trainer import build_optimizer

MODEL = ModelConfig(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=96
)
MUP = replace(MODEL, mup=MuPConfig(base_hidden_size=16), embedding_init_std=0.5)
WIDTHS = (64, 128, 256, 512)


def starts(model: ModelConfig) -> dict[str, tuple[float, bool]]:
    result = iter_parameter_specs(Decoder(build_context(model, build_single_rank_mesh())))
    return {
        declared.shard.name: (declared.init.std, declared.init.uniform) for declared, _, _ in result
    }


def test_default_init_scales_only_output_projections() -> None:
    result = starts(MODEL)
    assert {std for name, (std, _) in result.items() if name.endswith((".o", ".down"))} == {
        0.02 / math.sqrt(4)
    }
    of_24, _ = starts(replace(MODEL, num_layers=24))["layers.0.attention.o"]
    assert of_24 == pytest.approx(0.0028868, abs=5e-8)
    assert (
        result["embed.weight"]
        == result["head.weight"]
        == result["layers.1.attention.kv"]
        == (0.02, False)
    )
    assert result["norm.weight"] == (0.0, False)


def test_embedding_tables_may_have_their_own_std() -> None:
    result = starts(replace(MODEL, embedding_init_std=0.5, positions="learned"))
    assert result["embed.weight"] == result["positions.weight"] == (0.5, False) and result[
        "head.weight"
    ] == (0.02, False)


def test_xavier_counts_the_inputs_and_outputs_of_one_matrix() -> None:
    result = starts(
        replace(MODEL, init="xavier_uniform", layers=LayersConfig(mlp=("full", "linear")))
    )
    expected = {
        "attention.q": 64 + 64,
        "attention.kv": 64 + 64,
        "mlp.gate_up": 64 + 96,
        "mlp.down": 96 + 64,
    }
    assert {name: result[f"layers.0.{name}"] for name in expected} == {
        name: (math.sqrt(2 / fans), True) for name, fans in expected.items()
    }
    assert result["layers.1.mlp.linear"] == (math.sqrt(2 / 128), True) and result[
        "embed.weight"
    ] == (
        0.02,
        False,
    )
    experts = initial_values(
        replace(MODEL, init="xavier_uniform"),
        "layers.0.moe.experts.gate_up",
        (8, 2, 96, 64),
        1,
        0.02,
    )
    assert experts == InitialValues(math.sqrt(2 / 160), uniform=True)


def test_first_matching_init_pattern_applies_even_to_biases() -> None:
    given = (("layers.1.*.down", 0.3), ("*.down", 0.4), ("*_bias", 0.5))
    result = starts(replace(MODEL, init_overrides=given, mlp_bias=True))
    assert (result["layers.1.mlp.down"], result["layers.0.mlp.down"]) == (
        (0.3, False),
        (0.4, False),
    )
    assert result["layers.0.mlp.down_bias"] == (0.5, False) and result["layers.0.attention.o"] == (
        0.01,
        False,
    )


def test_mup_scales_init_of_layers_but_not_of_embedding_and_head() -> None:
    result = starts(MUP)
    assert result["layers.0.attention.q"] == (0.02 / 2, False) and result["layers.0.mlp.down"] == (
        0.02 / 2 / 2,
        False,
    )
    assert result["embed.weight"] == result["head.weight"] == (0.5, False)
    assert starts(
        replace(MUP, mup=MuPConfig(base_hidden_size=64), embedding_init_std=None)
    ) == starts(MODEL)


def test_mup_scales_matrix_rates_of_adam_and_vector_rates_of_sgd() -> None:
    names = {
        "layers.0.mlp.down": 1,
        "layers.0.attention_norm.weight": 0,
        "embed.weight": 1,
        "head.weight": 1,
    }
    slower, faster = ParameterRates(lr=0.25, eps=0.25), ParameterRates(lr=4.0)
    plain = replace(MUP, embedding_init_std=None)
    assert [mup_factors(plain, "adamw", *one) for one in names.items()] == [
        slower,
        PLAIN,
        PLAIN,
        PLAIN,
    ]
    assert [mup_factors(plain, "sgd", *one) for one in names.items()] == [
        PLAIN,
        faster,
        faster,
        faster,
    ]
    assert mup_factors(MUP, "adamw", "layers.0.attention.q.lora_a", 1) == PLAIN
    assert all(
        mup_factors(MODEL, kind, *one) == PLAIN
        for kind in ("adamw", "sgd")
        for one in names.items()
    )


def test_mup_attention_scale_uses_head_size_unless_given() -> None:
    at_base = replace(MUP, mup=MuPConfig(base_hidden_size=16, base_head_dim=16))
    assert MUP.softmax_scale() == 1 / 16 and at_base.softmax_scale() == 4 / 16 == 1 / math.sqrt(16)
    half = MuPConfig(base_hidden_size=16, attention_scale_power=0.5)
    assert replace(MUP, mup=half).softmax_scale() == 1 / 4 and MODEL.softmax_scale() is None
    assert replace(MUP, attention=replace(MUP.attention, scale=0.3)).softmax_scale() == 0.3


def size_of(x: torch.Tensor) -> float:
    """The root of its mean square."""
    return x.square().mean().sqrt().item()


def trained(width: int, *, mup: bool, steps: int, lr: float) -> tuple[dict[str, float], float]:
    """Mean sizes of what each part gives, and the loss, after some steps on one batch."""
    config = ModelConfig(
        vocab_size=64,
        hidden_size=width,
        num_layers=2,
        num_heads=width // 8,
        num_kv_heads=width // 8,
        ffn_hidden_size=2 * width,
        init_std=0.1,
        mup=MuPConfig(base_hidden_size=32, base_head_dim=8) if mup else None,
    )
    model = Decoder(build_context(config, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    params = [
        (declared.shard, getattr(module, name))
        for declared, module, name in iter_parameter_specs(model)
    ]
    optimizer = build_optimizer(
        params, OptimConfig(), lambda shard: mup_factors(config, "adamw", shard.name, shard.inputs)
    )
    ids = torch.randint(0, 64, (4 * 17,), generator=torch.Generator().manual_seed(3)).view(4, 17)
    inputs, labels, tokens = (
        ids[:, :-1].flatten(),
        ids[:, 1:].flatten(),
        LayerInputs(seq_params_from_rows(4, 16)),
    )
    for _ in range(steps):
        model.zero_grad()
        (model.loss(inputs, labels, tokens) / labels.numel()).backward()
        optimizer.step([weight.grad for _, weight in params], lr=lr, weight_decay=0.0)
    sizes: dict[str, float] = {}
    for name in ("layers.0.attention", "layers.1.mlp", "layers.1"):
        part = model.get_submodule(name)
        part.register_forward_hook(lambda _, __, out, name=name: sizes.update({name: size_of(out)}))
    with torch.no_grad():
        x = model.hidden_states(inputs, tokens)
        sizes["scores"] = size_of(model.head.vocab.logit_transform.scores(x @ model.head.weight.T))
        return sizes, model.loss(inputs, labels, tokens).item() / labels.numel()


def test_mup_keeps_activation_sizes_equal_over_widths() -> None:
    """The coordinate check of arXiv:2203.03466, appendix D.1."""
    narrowest, *wider = (trained(width, mup=True, steps=3, lr=0.02)[0] for width in WIDTHS)
    grown = [{name: result[name] / narrowest[name] for name in narrowest} for result in wider]
    assert all(0.5 < growth < 1.6 for parts in grown for growth in parts.values()), grown
    plain, widest = (
        trained(width, mup=False, steps=3, lr=0.02)[0] for width in (WIDTHS[0], WIDTHS[-1])
    )
    assert all(
        widest[name] > 2 * plain[name] for name in ("layers.0.attention", "layers.1.mlp", "scores")
    ), widest


def test_under_mup_a_wider_model_is_no_worse_at_the_same_rate() -> None:
    losses = [trained(width, mup=True, steps=12, lr=0.02)[1] for width in (32, 64, 128)]
    assert all(wide <= narrow for narrow, wide in pairwise(losses)), losses


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_each_weight_is_updated_at_its_own_rate(kind: str) -> None:
    config = replace(MUP, vocab_size=8, num_layers=1)
    model = Decoder(build_context(config, build_single_rank_mesh()))
    params = [
        (declared.shard, torch.ones(declared.shard.matrix_shape))
        for declared, _, _ in iter_parameter_specs(model)
    ]
    optim_config = OptimConfig(kind=kind, momentum=0.0)  # type: ignore[arg-type]  # one of the two
    optimizer = build_optimizer(
        params, optim_config, lambda shard: mup_factors(config, kind, shard.name, shard.inputs)
    )
    optimizer.step([torch.ones_like(weight) for _, weight in params], lr=0.01, weight_decay=0.0)
    for shard, weight in params:
        step = 0.01 * mup_factors(config, kind, shard.name, shard.inputs).lr
        torch.testing.assert_close(weight, torch.full_like(weight, 1 - step), rtol=0, atol=1e-6)


def test_tables_with_their_own_std_do_not_decay() -> None:
    own = replace(MODEL, embedding_init_std=0.5)
    for model, kind, rate in ((own, "adamw", 1.0), (MUP, "adamw", 1.0), (MUP, "sgd", 4.0)):
        assert [
            mup_factors(model, kind, name, 1) for name in ("embed.weight", "positions.weight")
        ] == [ParameterRates(lr=rate, decay=0.0)] * 2
        assert all(
            mup_factors(model, kind, name, 1).decay == 1.0
            for name in ("head.weight", "layers.0.mlp.down")
        )

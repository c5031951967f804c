from typing import Literal

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.kernels.linear import recompute_recipe, register_recompute
from megalith.models.decoder import iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.nn.norm import LayerNorm, Norm, RMSNorm, build_norm
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run

Kind = Literal["rms", "layer"]
EVERY = [(kind, zero_centered) for kind in ("rms", "layer") for zero_centered in (False, True)]


def config(kind: Kind, zero_centered: bool) -> ModelConfig:
    return ModelConfig(
        **{name: getattr(tiny_run().model, name) for name in ModelConfig.__slots__}
        | {"norm": kind, "zero_centered_gamma": zero_centered, "norm_eps": 1e-5}
    )


def norm(
    dtype: torch.dtype = torch.float32, kind: Kind = "rms", zero_centered: bool = False
) -> Norm:
    built = build_norm(
        "layers.3.mlp_norm",
        7,
        config(kind, zero_centered),
        build_context(config(kind, zero_centered), build_single_rank_mesh(), dtype=dtype),
        invariant=frozenset({"tp_kv"}),
    )
    built.to_empty(device="cpu")
    for declared, module, name in iter_parameter_specs(built):
        init_param_(module.get_parameter(name), declared.shard, declared.init, seed=0)
    return built


def test_norm_class_follows_the_config() -> None:
    assert type(norm()) is RMSNorm and type(norm(kind="layer")) is LayerNorm


@pytest.mark.parametrize(("kind", "zero_centered"), EVERY)
def test_initial_norm_has_unit_scale(kind: Kind, zero_centered: bool) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = norm(torch.float64, kind, zero_centered)(x)
    expected = (
        torch.layer_norm(x, (7,), eps=1e-5)
        if kind == "layer"
        else torch.rms_norm(x, (7,), eps=1e-5)
    )
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("kind", "zero_centered"), EVERY)
def test_features_are_scaled_and_shifted(kind: Kind, zero_centered: bool) -> None:
    built, x = norm(torch.float64, kind, zero_centered), torch.randn(5, 7, dtype=torch.float64)
    plain = built(x).detach()
    with torch.no_grad():
        built.weight.copy_(torch.arange(7.0))
        if isinstance(built, LayerNorm):
            built.bias.fill_(3.0)
    shift = 3.0 if kind == "layer" else 0.0
    torch.testing.assert_close(
        built(x).detach(), plain * (torch.arange(7.0) + zero_centered) + shift
    )


@pytest.mark.parametrize(("kind", "zero_centered"), EVERY)
def test_fused_residual_norm_gives_sum_norm_and_gradients(kind: Kind, zero_centered: bool) -> None:
    built, draw = norm(torch.float64, kind, zero_centered), torch.Generator().manual_seed(0)
    x, residual, dsum, dy = (
        torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(4)
    )
    inputs = [x.requires_grad_(), residual.requires_grad_(), *built.parameters()]
    total, normed = built.add_and_normalize(x, residual)
    got, plain = (total, normed), (x + residual, built(x + residual))
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, (dsum, dy)), torch.autograd.grad(plain, inputs, (dsum, dy))
    )


@pytest.mark.parametrize(("kind", "zero_centered"), EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_output_has_the_dtype_of_the_input(
    dtype: torch.dtype, kind: Kind, zero_centered: bool
) -> None:
    assert norm(dtype, kind, zero_centered)(torch.ones(2, 7, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_parameters_are_replicated_vectors_under_their_names(kind: Kind) -> None:
    shards = [declared.shard for declared, _, _ in iter_parameter_specs(norm(kind=kind))]
    names = ["layers.3.mlp_norm.weight", "layers.3.mlp_norm.bias"][: 1 if kind == "rms" else 2]
    assert [shard.name for shard in shards] == names
    for shard in shards:
        assert (shard.shape, shard.cut) == ((7,), ())
        assert (shard.inputs, shard.invariant) == (0, frozenset({"tp_kv"})), (
            "a vector, whose gradient every rank of tp_kv has whole"
        )


@pytest.mark.parametrize(("kind", "zero_centered"), EVERY)
def test_recomputed_norm_output_is_bitwise_equal(kind: Kind, zero_centered: bool) -> None:
    built, draw = norm(kind=kind, zero_centered=zero_centered), torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 7, generator=draw) for _ in range(2))
    plain, (total, after) = built(x), built.add_and_normalize(x, residual)
    built.register = register_recompute
    for result, value, source in (
        (built(x), plain, x),
        (built.add_and_normalize(x, residual)[1], after, total),
    ):
        recipe = recompute_recipe(result)
        assert recipe is not None and torch.equal(result, value)
        assert torch.equal(recipe.inputs[0], source)
        assert torch.equal(recipe.function(*recipe.inputs), value)

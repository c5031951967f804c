from typing import Literal

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.kernels.rebuilt import Rebuilt, value_of
from megalith.models.decoder import declared_parameters
from megalith.nn.init import fill
from megalith.nn.norm import LayerNorm, Norm, RMSNorm, build_norm
from megalith.testing.tiny import tiny_run

Kind = Literal["rms", "layer"]
EVERY = [(kind, zero_centred) for kind in ("rms", "layer") for zero_centred in (False, True)]


def config(kind: Kind, zero_centred: bool) -> ModelConfig:
    return ModelConfig(
        **{name: getattr(tiny_run().model, name) for name in ModelConfig.__slots__}
        | {"norm": kind, "norm_zero_centred": zero_centred, "norm_eps": 1e-5}
    )


def norm(
    dtype: torch.dtype = torch.float32, kind: Kind = "rms", zero_centred: bool = False
) -> Norm:
    made = build_norm(
        "layers.3.mlp_norm",
        7,
        config(kind, zero_centred),
        invariant=frozenset({"tp_kv"}),
        dtype=dtype,
    )
    made.to_empty(device="cpu")
    for declared, module, name in declared_parameters(made):
        fill(module.get_parameter(name), declared.shard, declared.init, seed=0)
    return made


def test_the_config_says_which_norm_it_is() -> None:
    assert type(norm()) is RMSNorm and type(norm(kind="layer")) is LayerNorm


@pytest.mark.parametrize(("kind", "zero_centred"), EVERY)
def test_at_the_start_a_norm_only_norms(kind: Kind, zero_centred: bool) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = value_of(norm(torch.float64, kind, zero_centred)(x))
    expected = (
        torch.layer_norm(x, (7,), eps=1e-5)
        if kind == "layer"
        else torch.rms_norm(x, (7,), eps=1e-5)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("kind", "zero_centred"), EVERY)
def test_features_are_scaled_and_shifted(kind: Kind, zero_centred: bool) -> None:
    made, x = norm(torch.float64, kind, zero_centred), torch.randn(5, 7, dtype=torch.float64)
    plain = value_of(made(x)).detach()
    with torch.no_grad():
        made.weight.copy_(torch.arange(7.0))
        if isinstance(made, LayerNorm):
            made.bias.fill_(3.0)
    shift = 3.0 if kind == "layer" else 0.0
    torch.testing.assert_close(
        value_of(made(x)).detach(), plain * (torch.arange(7.0) + zero_centred) + shift
    )


@pytest.mark.parametrize(("kind", "zero_centred"), EVERY)
def test_after_adding_gives_the_sum_and_its_norm_and_all_gradients(
    kind: Kind, zero_centred: bool
) -> None:
    made, draw = norm(torch.float64, kind, zero_centred), torch.Generator().manual_seed(0)
    x, residual, dsum, dy = (
        torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(4)
    )
    inputs = [x.requires_grad_(), residual.requires_grad_(), *made.parameters()]
    total, normed = made.after_adding(x, residual)
    got, plain = (total, value_of(normed)), (x + residual, value_of(made(x + residual)))
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, (dsum, dy)), torch.autograd.grad(plain, inputs, (dsum, dy))
    )


@pytest.mark.parametrize(("kind", "zero_centred"), EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_answers_in_the_dtype_it_was_asked_in(
    dtype: torch.dtype, kind: Kind, zero_centred: bool
) -> None:
    assert value_of(norm(dtype, kind, zero_centred)(torch.ones(2, 7, dtype=dtype))).dtype == dtype


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_its_parameters_are_whole_vectors_under_their_names(kind: Kind) -> None:
    shards = [declared.shard for declared, _, _ in declared_parameters(norm(kind=kind))]
    names = ["layers.3.mlp_norm.weight", "layers.3.mlp_norm.bias"][: 1 if kind == "rms" else 2]
    assert [shard.name for shard in shards] == names
    for shard in shards:
        assert (shard.shape, shard.cut) == ((7,), ())
        assert (shard.inputs, shard.invariant) == (0, frozenset({"tp_kv"})), (
            "a vector, whose gradient every rank of tp_kv has whole"
        )


@pytest.mark.parametrize(("kind", "zero_centred"), EVERY)
def test_a_result_that_its_reader_rebuilds_has_the_same_bits_alone_and_after_adding(
    kind: Kind, zero_centred: bool
) -> None:
    made, draw = norm(kind=kind, zero_centred=zero_centred), torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 7, generator=draw) for _ in range(2))
    plain, (total, after) = made(x), made.after_adding(x, residual)
    made.again = Rebuilt
    for found, value, source in (
        (made(x), plain, x),
        (made.after_adding(x, residual)[1], value_of(after), total),
    ):
        assert isinstance(found, Rebuilt) and torch.equal(found.value, value)
        assert torch.equal(found.inputs[0], source) and torch.equal(
            found.again(*found.inputs), value
        )

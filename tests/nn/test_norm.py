import pytest
import torch

from megalith.kernels.rebuilt import Rebuilt, value_of
from megalith.models.decoder import declared_parameters
from megalith.nn.init import fill
from megalith.nn.norm import RMSNorm


def norm(dtype: torch.dtype = torch.float32) -> RMSNorm:
    made = RMSNorm("layers.3.mlp_norm", 7, eps=1e-5, invariant=frozenset({"tp_kv"}), dtype=dtype)
    made.to_empty(device="cpu")
    ((declared, _, _),) = declared_parameters(made)
    fill(made.get_parameter("weight"), declared.shard, declared.init, seed=0)
    return made


def test_each_token_is_divided_by_its_root_mean_square_and_scaled() -> None:
    made, x = norm(), torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert (made.get_parameter("weight") == 1).all()
    with torch.no_grad():
        made.get_parameter("weight").copy_(torch.arange(7.0))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * torch.arange(7.0)
    torch.testing.assert_close(made(x), expected)


def test_after_adding_gives_the_sum_and_its_norm_and_both_gradients() -> None:
    made, draw = norm(torch.float64), torch.Generator().manual_seed(0)
    x, residual, dsum, dy = (torch.randn(5, 7, generator=draw, dtype=torch.float64) for _ in range(4))
    weight = made.get_parameter("weight")
    inputs = [x.requires_grad_(), residual.requires_grad_(), weight]
    total, normed = made.after_adding(x, residual)
    got, plain = (total, value_of(normed)), (x + residual, made(x + residual))
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(
        torch.autograd.grad(got, inputs, (dsum, dy)), torch.autograd.grad(plain, inputs, (dsum, dy))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_answers_in_the_dtype_it_was_asked_in(dtype: torch.dtype) -> None:
    assert norm(dtype)(torch.ones(2, 7, dtype=dtype)).dtype == dtype


def test_its_parameter_is_a_whole_vector_under_its_name() -> None:
    ((declared, _, _),) = declared_parameters(norm())
    shard = declared.shard
    assert (shard.name, shard.shape, shard.cut) == ("layers.3.mlp_norm.weight", (7,), ())
    assert (shard.inputs, shard.invariant) == (0, frozenset({"tp_kv"})), (
        "a vector, whose gradient every rank of tp_kv has whole"
    )


def test_a_result_that_its_reader_rebuilds_has_the_same_bits_alone_and_after_adding() -> None:
    made, draw = norm(), torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 7, generator=draw) for _ in range(2))
    plain, (total, after) = made(x), made.after_adding(x, residual)
    made.again = Rebuilt
    for found, value, source in ((made(x), plain, x), (made.after_adding(x, residual)[1], value_of(after), total)):
        assert isinstance(found, Rebuilt) and torch.equal(found.value, value)
        assert torch.equal(found.inputs[0], source) and torch.equal(found.again(*found.inputs), value)

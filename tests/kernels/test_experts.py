"""Grouped experts match a loop over experts and save less for backward."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.kernels.activation import GatedActivation, weighted_activate, weighted_gated
from megalith.kernels.grouped_linear import (
    BATCHED,
    FUSED,
    HAS_GROUPED_MM,
    LOOP,
    Groups,
    Inner,
    Matrix,
    build_groups,
    equal_groups,
    experts,
    grouped_matmul_ops_by_name,
    reference_experts,
    reference_with_bias,
    row_experts,
    with_bias,
)
from megalith.kernels.linear import RegisterRecompute, register_recompute
from megalith.kernels.routing import (
    RowPermutation,
    gather_row_weights,
    gather_rows,
    permute,
    permute_choices,
    permute_choices_padded,
    unpermute,
)

E, H, F = 4, 6, 3
UNEVEN = (5, 0, 1, 3)
SWIGLU: Inner = partial(weighted_gated, gate=GatedActivation("silu"))
CLAMPED: Inner = partial(
    weighted_gated, gate=GatedActivation("quick_gelu", clamp=0.7, up_offset=1.0)
)
SQUARED: Inner = partial(weighted_activate, activation="squared_relu")


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def wants(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return seeded(*shape, seed=seed, dtype=dtype).requires_grad_()


def inputs(
    r: int, *, wide: int = 2 * F, biases: bool = False, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Rows, weights, both matrices, and maybe both biases."""
    shapes = [(r, H), (r,), (E * wide, H), (E * H, F)] + ([(E * wide,), (E * H,)] if biases else [])
    return [wants(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def run(
    function: Callable[..., Tensor],
    groups: Groups,
    inner: Inner,
    rows: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *biases: Tensor,
) -> Tensor:
    up_bias, down_bias = biases or (None, None)
    return function(rows, weights, groups, Matrix(up, up_bias), Matrix(down, down_bias), inner)


@pytest.mark.parametrize("inner", [SWIGLU, CLAMPED, SQUARED], ids=["swiglu", "clamped", "ungated"])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("counts", [UNEVEN, (0, 9, 0, 0), (0, 0, 0, 0)], ids=str)
def test_grouped_experts_match_a_loop_over_experts(
    inner: Inner, biases: bool, counts: tuple[int, ...]
) -> None:
    given = inputs(sum(counts), wide=F if inner is SQUARED else 2 * F, biases=biases)
    dy = seeded(sum(counts), H, seed=9)
    y, expected = (
        run(each, build_groups(counts), inner, *given) for each in (experts, reference_experts)
    )
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    ours, reference = (torch.autograd.grad(each, given, dy) for each in (y, expected))
    for actual, other in zip(ours, reference):
        torch.testing.assert_close(actual, other, rtol=1e-12, atol=1e-12)


class Total:
    """A sink that adds up what is ready."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros_like(weight)
        self.calls = 0

    def gradient(self, dw: Tensor) -> None:
        self.total += dw
        self.calls += 1


@pytest.mark.parametrize("counts", [UNEVEN, (0, 0, 0, 0)], ids=str)
def test_reference_gradients_go_to_the_same_accumulators(counts: tuple[int, ...]) -> None:
    given, dy = inputs(sum(counts), biases=True), seeded(sum(counts), H, seed=9)
    expected = torch.autograd.grad(
        run(reference_experts, build_groups(counts), SWIGLU, *given), given, dy
    )
    rows, weights, up, down, up_bias, down_bias = given
    sinks = Total(up), Total(down)
    both = Matrix(up, up_bias, cast(Any, sinks[0])), Matrix(down, down_bias, cast(Any, sinks[1]))
    experts(rows, weights, build_groups(counts), *both, SWIGLU, kernel="reference").backward(dy)
    results = [
        rows.grad,
        weights.grad,
        sinks[0].total,
        sinks[1].total,
        up_bias.grad,
        down_bias.grad,
    ]
    for actual, reference in zip(results, expected, strict=True):
        assert actual is not None
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)
    assert (
        up.grad is None
        and down.grad is None
        and [grad_accumulator.calls for grad_accumulator in sinks] == [1, 1]
    )


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(
    "groups", [build_groups((2, 0, 1, 1)), equal_groups(E, 1)], ids=["uneven", "equal"]
)
def test_gradients_match_finite_differences(biases: bool, groups: Groups) -> None:
    assert torch.autograd.gradcheck(partial(run, experts, groups, SWIGLU), inputs(4, biases=biases))


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("biases", [False, True])
def test_low_precision_error_is_within_rounding(
    dtype: torch.dtype, close: float, biases: bool
) -> None:
    given = inputs(9, biases=biases, dtype=dtype)
    given[1] = given[1].detach().float().requires_grad_()  # routers compute in fp32
    plain = [each.detach().double().requires_grad_() for each in given]
    y, expected = (
        run(experts, build_groups(UNEVEN), SWIGLU, *given),
        run(experts, build_groups(UNEVEN), SWIGLU, *plain),
    )
    assert y.dtype == dtype
    results = zip(
        [y, *torch.autograd.grad(y.sum(), given)],
        [expected, *torch.autograd.grad(expected.sum(), plain)],
    )
    for number, (actual, reference) in enumerate(results):
        assert (actual - reference).abs().max() <= close * reference.abs().max(), number


def test_experts_without_rows_get_zero_gradients() -> None:
    given = inputs(9, biases=True)
    run(experts, build_groups(UNEVEN), SWIGLU, *given).sum().backward()
    for each in given[2:]:
        assert each.grad is not None
        assert (each.grad.view(E, -1)[1] == 0).all()
        assert (each.grad.view(E, -1)[[0, 2, 3]] != 0).any(1).all()


def kept_bytes(again: RegisterRecompute | None) -> int:
    """What backward of a case keeps beside its inputs."""
    kept: dict[int, int] = {}
    given = inputs(9)

    def note(saved: Tensor) -> Tensor:
        kept[saved.data_ptr()] = saved.nbytes
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        experts(
            given[0],
            given[1],
            build_groups(UNEVEN),
            Matrix(given[2]),
            Matrix(given[3]),
            SWIGLU,
            register=again,
        )
    return sum(kept.values()) - sum(each.nbytes for each in given)


def test_backward_saves_the_up_projection_and_recomputes_the_activation() -> None:
    assert kept_bytes(register_recompute) == 8 * 9 * 2 * F
    assert kept_bytes(None) == 8 * 9 * 3 * F


def test_saving_the_activation_gives_equal_bits() -> None:
    results = []
    for again in (register_recompute, None):
        given = inputs(9)
        y = experts(
            given[0],
            given[1],
            build_groups(UNEVEN),
            Matrix(given[2]),
            Matrix(given[3]),
            SWIGLU,
            register=again,
        )
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def plain_layer(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Every token asks each of its experts, one after the other."""
    ups, downs = up.view(E, -1, H), down.view(E, H, -1)
    out = []
    for token, numbers, shares in zip(x, chosen.tolist(), weights):
        total = torch.zeros_like(token)
        for expert, share in zip(numbers, shares):
            if expert >= 0:
                gate, other = (ups[expert] @ token).chunk(2)
                total = total + share * (downs[expert] @ (gate * torch.sigmoid(gate) * other))
        out.append(total)
    return torch.stack(out)


def our_layer(
    order: RowPermutation, x: Tensor, weights: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    rows = register_recompute(permute(x, order), partial(gather_rows, order=order), (x,))
    y = experts(
        rows,
        gather_row_weights(weights, order),
        build_groups(order.counts),
        Matrix(up),
        Matrix(down),
        SWIGLU,
    )
    return unpermute(y, order)


@pytest.mark.parametrize("dropped", [0.0, 0.4])
def test_moe_layer_matches_a_loop_over_experts(dropped: float) -> None:
    draw = torch.Generator().manual_seed(1)
    chosen = torch.rand(7, E, generator=draw).argsort(1)[:, :2]
    chosen = chosen.masked_fill(torch.rand(7, 2, generator=draw) < dropped, -1)
    given = [wants(7, H), wants(7, 2, seed=1), wants(E * 2 * F, H, seed=2), wants(E * H, F, seed=3)]
    y, expected = (
        our_layer(permute_choices(chosen, E), *given),
        plain_layer(given[0], chosen, *given[1:]),
    )
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = seeded(7, H, seed=4)
    for actual, reference in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, given, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("biases", [False, True])
def test_experts_padded_to_capacity_match_token_dropping(
    biases: bool,
) -> None:
    chosen = torch.rand(9, E, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :2]
    padded = permute_choices_padded(chosen, E, capacity=4)
    assert padded.missing is not None
    assert 0 < padded.missing.sum() < chosen.numel()
    dropped = permute_choices(chosen.flatten().masked_fill(padded.missing, -1).view_as(chosen), E)
    given = [wants(9, H), wants(9, 2, seed=1), *inputs(9, biases=biases)[2:]]
    dy, results = seeded(9, H, seed=4), []
    for order, groups in ((padded, equal_groups(E, 4)), (dropped, build_groups(dropped.counts))):
        rows, weights = permute(given[0], order), gather_row_weights(given[1], order)
        y = unpermute(run(experts, groups, SWIGLU, rows, weights, *given[2:]), order)
        results.append([y, *torch.autograd.grad(y, given, dy)])
    for actual, reference in zip(*results):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
def test_expert_biases_match_the_reference(weighted: bool) -> None:
    y, bias, weights = seeded(9, H), wants(E, H, seed=1), wants(9, seed=2) if weighted else None
    given = [bias] if weights is None else [bias, weights]
    ours = with_bias(y.clone(), bias, build_groups(UNEVEN), weights)
    expected = reference_with_bias(y, bias, build_groups(UNEVEN), weights)
    torch.testing.assert_close(ours, expected)
    dy = seeded(9, H, seed=3)
    for actual, reference in zip(
        torch.autograd.grad(ours, given, dy), torch.autograd.grad(expected, given, dy)
    ):
        torch.testing.assert_close(actual, reference)


def test_without_bias_the_input_is_returned() -> None:
    y = seeded(9, H)
    assert with_bias(y, None, build_groups(UNEVEN)) is y


def test_expert_of_each_row() -> None:
    assert row_experts(build_groups(UNEVEN), torch.empty(9, 1)).tolist() == [0] * 5 + [2] + [3] * 3


def test_explicit_grouped_matmul_is_used_or_rejected() -> None:
    x, w, groups = torch.ones(6, 8), torch.ones(3 * 4, 8), build_groups([1, 2, 3])
    assert grouped_matmul_ops_by_name("loop", x, w, groups) is LOOP
    assert grouped_matmul_ops_by_name("batched", x, w, equal_groups(3, 2)) is BATCHED
    with pytest.raises(
        ConfigError,
        match="kernels.experts=batched: supported inputs: everything; equally many rows for every",
    ):
        grouped_matmul_ops_by_name("batched", x, w, groups)
    with pytest.raises(
        ConfigError,
        match="kernels.experts=grouped: .* Set kernels.experts to loop, which supports this",
    ):
        grouped_matmul_ops_by_name("grouped", x.double(), w.double(), groups)
    if HAS_GROUPED_MM:
        assert grouped_matmul_ops_by_name("grouped", x, w, groups) is FUSED

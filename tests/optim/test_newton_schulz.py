"""Orthogonalization: published ranges of singular values, special matrices, batches."""

import math

import pytest
import torch
from torch import Tensor

from megalith.optim.newton_schulz import (
    COEFFICIENT_SETS,
    orthogonalize,
    select_coefficients,
)
from megalith.testing.tolerance import BF16, EXACT, FP64, assert_equals
from tests.cases import loop_over

SHAPES = [(1, 1), (5, 5), (3, 8), (8, 3), (1, 7), (7, 1)]


def draw_matrices(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def apply_steps(values: Tensor, name: str, num_steps: int) -> Tensor:
    """Apply the polynomials to singular values."""
    for a, b, c in select_coefficients(name, num_steps):
        values = values * (a + b * values**2 + c * values**4)
    return values


@pytest.mark.parametrize(
    ("name", "num_steps", "lowest", "highest"),
    [
        ("simple", 5, 0.68183, 1.13436),
        ("quintic", 5, 0.97775, 1.03178),
        ("cans", 5, 0.88437, 1.11984),
        ("deepseek_v4", 10, 1.00000, 1.00054),
        ("polar_express", 8, 1.0, 1.0),
        ("polar_express", 5, 0.8704, 1.1236),
    ],
)
def test_singular_values_from_001_to_1_end_in_the_published_range(
    name: str, num_steps: int, lowest: float, highest: float
) -> None:
    values = apply_steps(torch.logspace(-2, 0, 200_001, dtype=torch.float64), name, num_steps)
    places = 4 if (name, num_steps) == ("polar_express", 5) else 5
    assert round(float(values.min()), places) == lowest
    assert round(float(values.max()), places) == highest
    if num_steps == 8:
        assert float((values - 1).abs().max()) < 1e-12


def test_published_scalars_of_the_quintic_set() -> None:
    values = apply_steps(torch.tensor([0.01, 0.5, 1.0], dtype=torch.float64), "quintic", 5)
    assert [round(float(value), 6) for value in values] == [1.018025, 0.985869, 0.978346]


@loop_over("name", COEFFICIENT_SETS)
def test_matrix_keeps_its_singular_vectors_and_gets_the_polynomial_of_its_values(name: str) -> None:
    for shape in SHAPES:
        matrix = draw_matrices(shape)
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        values = apply_steps(s / matrix.norm(), name, 7)
        result = orthogonalize(matrix.unsqueeze(0), select_coefficients(name, 7))[0]
        assert_equals(f"{name} {shape}", result, u @ values.diag() @ vh, FP64)


def test_steps_beyond_the_set_repeat_the_last_triple_or_start_again() -> None:
    for name, repeats in (
        ("polar_express", True),
        ("cans", True),
        ("deepseek_v4", True),
        ("quintic", False),
        ("simple", False),
        ("aol", False),
    ):
        triples = COEFFICIENT_SETS[name]
        beyond = select_coefficients(name, len(triples) + 2)[len(triples) :]
        assert beyond == ([triples[-1]] * 2 if repeats else [triples[0], triples[1 % len(triples)]])
    assert select_coefficients("deepseek_v4", 10)[-2:] == [(2.0, -1.5, 0.5)] * 2


@loop_over("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zero_matrix_gives_zero_and_tiny_matrix_is_not_lost(dtype: torch.dtype) -> None:
    coefficients = select_coefficients("quintic", 5)
    zero = torch.zeros(2, 4, 6, dtype=dtype)
    for gram in (False, True):
        assert torch.equal(orthogonalize(zero, coefficients, gram=gram), zero)
    # fp32 squares of these entries are zero
    tiny = torch.full((1, 3, 4), 1e-30).to(dtype)
    assert bool((orthogonalize(tiny, coefficients) != 0).all())
    assert orthogonalize(torch.zeros(0, 4, 6), coefficients).shape == (0, 4, 6)


def test_rank_1_matrix_keeps_rank_1() -> None:
    u, v = draw_matrices((6, 1)), draw_matrices((1, 4), seed=1)
    direction = (u / u.norm()) @ (v / v.norm())
    coefficients = select_coefficients("polar_express", 8)
    for gram in (False, True):
        result = orthogonalize((u @ v).unsqueeze(0), coefficients, gram=gram)[0]
        assert_equals("rank 1", result, direction, FP64)


@loop_over("shape", SHAPES)
def test_gram_form_equals_the_plain_form_in_float64(shape: tuple[int, int]) -> None:
    matrices = draw_matrices((3, *shape))
    for num_steps in (1, 2, 5):
        coefficients = select_coefficients("quintic", num_steps)
        plain = orthogonalize(matrices, coefficients)
        error = (orthogonalize(matrices, coefficients, gram=True) - plain).abs().max()
        assert float(error) < 1e-12


def test_gram_form_in_bf16_is_as_close_to_orthogonal_as_the_plain_form() -> None:
    matrices = draw_matrices((1, 32, 96))
    coefficients = select_coefficients("quintic", 5)
    reference = orthogonalize(matrices, coefficients)
    plain, gram = (
        (orthogonalize(matrices.bfloat16(), coefficients, gram=gram).double() - reference).norm()
        for gram in (False, True)
    )
    assert float(gram) < 1.5 * float(plain)


@loop_over("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_result_of_a_matrix_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    coefficients = select_coefficients("quintic", 5)
    for shape in ((3, 12, 20), (3, 20, 12), (2, 96, 160)):
        matrices = draw_matrices(shape).to(dtype)
        batch = orthogonalize(matrices, coefficients)
        last = orthogonalize(matrices[1:], coefficients)
        assert_equals(f"{shape}", last, batch[1:].contiguous(), EXACT)


@loop_over("dtype", [torch.float64, torch.bfloat16])
def test_large_matrices_computed_by_blocks_equal_plain_steps(dtype: torch.dtype) -> None:
    coefficients = select_coefficients("quintic", 2)
    for shape in ((2, 513, 514), (1, 514, 513)):
        matrices = draw_matrices(shape).to(dtype)
        for matrix, result in zip(matrices, orthogonalize(matrices, coefficients), strict=True):
            x = (matrix / matrix.norm()).double()
            for a, b, c in coefficients:
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            tolerance = {torch.float64: FP64, torch.bfloat16: BF16}[dtype]
            assert_equals(f"{shape}", result.double(), x, tolerance)


def test_input_is_not_overwritten() -> None:
    matrices = draw_matrices((2, 4, 6))
    before = matrices.clone()
    for gram in (False, True):
        orthogonalize(matrices, select_coefficients("simple", 3), gram=gram)
        assert torch.equal(matrices, before)


def test_nan_stays_in_its_matrix() -> None:
    matrices = draw_matrices((2, 4, 6))
    matrices[0, 1, 2] = math.nan
    result = orthogonalize(matrices, select_coefficients("simple", 3))
    assert bool(result[0].isnan().all())
    assert bool(result[1].isfinite().all())

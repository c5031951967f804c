"""Comparisons say how far apart two results are, which entry is worst, and refuse what proves
nothing."""

import math

import pytest
import torch
from torch import Tensor

from megalith.testing.tolerance import (
    BF16,
    EXACT,
    FP32,
    FP64,
    TOLERANCES,
    Tolerance,
    assert_close,
    assert_equals,
    compare,
    cosine,
    relative_error,
)


def reference() -> Tensor:
    return torch.tensor([[1.0, -4.0, 0.5], [2.0, 3.0, 0.0]], dtype=torch.float64)


def off_by(amount: float) -> Tensor:
    x = reference()
    x[1, 0] += amount
    return x


def test_the_error_is_measured_against_the_largest_entry() -> None:
    assert relative_error(off_by(0.02), reference()) == pytest.approx(0.02 / 4.0)


@pytest.mark.parametrize(
    ("a", "b", "error"),
    [
        (torch.zeros(3), torch.zeros(3), 0.0),
        (torch.tensor([0.0, 1e-30]), torch.zeros(2), math.inf),
        (torch.zeros(2), torch.tensor([0.0, 1e-30]), 1.0),
        (torch.tensor([math.nan]), torch.ones(1), math.inf),
        (torch.ones(1), torch.tensor([math.nan]), math.inf),
        (torch.ones(1), torch.tensor([math.inf]), math.inf),
        (torch.ones(2), torch.ones(2, 1), math.inf),
        (torch.empty(0, 3), torch.empty(0, 3), 0.0),
        (torch.tensor(2.0), torch.tensor(2), 0.0),
    ],
)
def test_the_error_of_odd_inputs(a: Tensor, b: Tensor, error: float) -> None:
    assert relative_error(a, b) == pytest.approx(error)


def test_a_difference_that_rounding_in_fp32_would_hide_is_measured() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert relative_error(one + 1e-12, one) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("tolerance", [FP64, FP32, BF16])
def test_a_difference_inside_the_tolerance_passes_and_one_outside_names_place_values_and_reason(
    tolerance: Tolerance,
) -> None:
    allowed = tolerance.relative * 4.0
    assert_equals("down", off_by(0.9 * allowed), reference(), tolerance)
    with pytest.raises(
        AssertionError, match=rf"down: .*instead of 2 at \[1, 0\].*{tolerance.name}: "
    ):
        assert_equals("down", off_by(1.1 * allowed), reference(), tolerance)


def test_an_all_zero_reference_proves_nothing_in_float64() -> None:
    with pytest.raises(AssertionError, match=r"q: the reference is all zero"):
        assert_equals("q", torch.zeros(2), torch.zeros(2), FP64)
    assert_equals("q", torch.zeros(2), torch.zeros(2), FP32)


def test_bf16_also_asks_for_the_direction() -> None:
    b = torch.tensor([1.0] + [0.01] * 99)
    a = torch.tensor([1.0] + [-0.009] * 99)  # every entry within 2 % of the largest
    assert relative_error(a, b) < BF16.relative
    with pytest.raises(AssertionError, match=r"cosine 0\.98\d+, must be at least 0\.999"):
        assert_equals("x", a, b, BF16)


def test_the_cosine_of_zeros_is_one_only_with_zeros() -> None:
    assert cosine(torch.zeros(2), torch.zeros(2)) == 1.0
    assert cosine(torch.zeros(2), torch.ones(2)) == 0.0
    assert cosine(torch.ones(2), -torch.ones(2)) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
    ],
)
def test_exact_means_the_same_bits_and_dtype(a: Tensor, b: Tensor) -> None:
    assert_equals("x", a, a.clone(), EXACT)
    with pytest.raises(AssertionError, match=r"x: .*expected the same bits as"):
        assert_equals("x", a, b, EXACT)


def test_exact_accepts_equal_nans_and_any_memory_order() -> None:
    x = torch.tensor([[math.nan, 1.0], [2.0, 3.0]])
    assert_equals("x", x.T, x.T.contiguous(), EXACT)
    assert_equals("x", torch.empty(0), torch.empty(0), EXACT)


def test_other_shapes_are_named() -> None:
    with pytest.raises(AssertionError, match=r"x: shape \[2\], expected \[3\]"):
        assert_equals("x", torch.ones(2), torch.ones(3), FP32)


def test_compare_names_the_worst_the_zeros_and_the_unpaired() -> None:
    actual = {"a": off_by(1e-3), "b": off_by(4e-3), "z": torch.zeros(3), "only": torch.ones(1)}
    result = compare(
        actual, {"a": reference(), "b": reference(), "z": torch.zeros(3), "empty": torch.empty(0)}
    )
    assert (result.worst, result.zeros, result.unpaired) == ("b", ("z",), ("empty", "only"))
    assert result.error == pytest.approx(1e-3)
    assert (
        str(result)
        == "worst b: 1.00e-03 of its largest entry; all zero: z; in one set only: empty, only"
    )


def test_a_comparison_is_within_a_tolerance_only_when_complete() -> None:
    same, zero = {"a": reference()}, {"a": torch.zeros(2)}
    assert compare(same, same).within(FP64)
    assert compare({"a": off_by(1e-8)}, same).within(FP32)
    assert not compare({"a": off_by(1e-8)}, same).within(FP64)
    assert not compare(zero, zero).within(FP64)
    assert compare(zero, zero).within(FP32)
    assert not compare({}, same).within(FP32)
    assert not compare({**same, "b": reference()}, same).within(FP32)


def test_comparison_of_nothing_is_reported() -> None:
    assert str(compare({}, {})) == "nothing compared"


def test_sets_of_tensors_fail_on_their_worst_entry_or_other_names() -> None:
    names = {"a": reference(), "b": reference()}
    assert_close(names, names, EXACT)
    with pytest.raises(AssertionError, match=r"^b: "):
        assert_close({"a": off_by(0.1), "b": off_by(0.2)}, names, FP32)
    with pytest.raises(
        AssertionError, match=r"only one of the two sets has c; expected the same names"
    ):
        assert_close({**names, "c": reference()}, names, FP32)


def test_every_tolerance_has_a_name_and_a_reason() -> None:
    assert list(TOLERANCES) == ["exact", "fp64", "curve64", "fp32", "fp32_deep", "parity", "bf16"]
    assert all(len(tolerance.why) > 40 for tolerance in TOLERANCES.values())
    assert FP64.relative == 1e-9
    assert FP64.nonzero

"""Recomputed inputs of linear layers: recomputed once in backward, bit by bit, and only if
needed."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalith.kernels.linear import (
    SavedInput,
    derive_recompute,
    fingerprint,
    linear,
    pass_recompute,
    recompute_recipe,
    register_checked_recompute,
    register_recompute,
    save_entirely,
    split_rows,
)
from megalith.kernels.norm import rms_norm
from megalith.testing.tolerance import EXACT, assert_equals


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Norm:
    """A norm that counts how often it is computed."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        self.calls += 1
        return rms_norm(x, weight, 1e-5)


def gradients(
    norm: Norm, *, discard: bool, frozen: bool = False
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Of x, the norm's weight and the layer's, if it is not frozen; and the shapes that were
    kept."""
    x, scale = seeded(7, 5).requires_grad_(), seeded(5, seed=1).requires_grad_()
    w = seeded(3, 5, seed=2).requires_grad_(not frozen)
    shapes: list[tuple[int, ...]] = []

    def note(saved: Tensor) -> Tensor:
        shapes.append((saved.data_ptr(), *saved.shape))
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        y = norm(x, scale)
        z = linear(register_recompute(y, norm, (x, scale)) if discard else y, [w])
    kept = [shape for shape in shapes if shape[0] == y.data_ptr()]
    leaves = [x, scale] + ([] if frozen else [w])
    return list(torch.autograd.grad(z.square().sum(), leaves)), kept


def test_recomputed_input_is_not_saved_and_gradients_are_bitwise_equal() -> None:
    plain, kept = gradients(Norm(), discard=False)
    norm = Norm()
    discarded, left = gradients(norm, discard=True)
    assert len(kept) == 1 and left == [] and norm.calls == 2
    for actual, reference in zip(discarded, plain, strict=True):
        assert_equals("gradient", actual, reference, EXACT)


def test_nothing_is_recomputed_for_a_frozen_weight() -> None:
    norm = Norm()
    own_gradients, left = gradients(norm, discard=True, frozen=True)
    plain, kept = gradients(Norm(), discard=False, frozen=True)
    assert norm.calls == 1 and left == kept == []
    assert_equals("dx", own_gradients[0], plain[0], EXACT)


def test_second_backward_recomputes_again() -> None:
    norm, x, w = Norm(), seeded(7, 5).requires_grad_(), seeded(3, 5, seed=2).requires_grad_()
    ones = torch.ones(5)
    z = linear(register_recompute(norm(x, ones), norm, (x, ones)), [w])
    first = torch.autograd.grad(z.sum(), [x, w], retain_graph=True)
    second = torch.autograd.grad(z.sum(), [x, w])
    assert norm.calls == 3
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_composed_outputs_are_recomputed_by_both_functions() -> None:
    x = seeded(4, 6)
    doubled = register_recompute(x * 2, lambda x: x * 2, (x,))
    longer = derive_recompute(doubled, torch.cat([doubled] * 2), lambda y: torch.cat([y, y]))
    recipe = recompute_recipe(longer)
    assert recipe is not None and recipe.inputs == (x,)
    assert torch.equal(recipe.function(*recipe.inputs), longer)
    first = derive_recompute(x, x[:1].clone(), lambda x: x[:1])
    recipe = recompute_recipe(first)
    assert recipe is not None and torch.equal(recipe.function(*recipe.inputs), first)


def test_recipes_belong_to_one_tensor_and_end_with_it() -> None:
    x = seeded(4, 6)
    doubled = register_recompute(x * 2, lambda x: x * 2, (x,))
    recipe, alive = recompute_recipe(doubled), weakref.ref(doubled)
    assert recompute_recipe(x) is recompute_recipe(doubled.view(-1)) is None
    copied = pass_recompute(doubled, doubled.view_as(doubled))
    assert recompute_recipe(copied) == recipe
    assert pass_recompute(x, doubled) is doubled and recompute_recipe(doubled) == recipe
    assert derive_recompute(x, x, torch.clone) is x and recompute_recipe(x) is None
    with save_entirely((x, doubled)):
        assert recompute_recipe(doubled) is None
    assert recompute_recipe(doubled) == recipe and recompute_recipe(x) is None
    del doubled, copied
    assert alive() is None
    with torch.no_grad():
        assert recompute_recipe(register_recompute(x * 2, lambda x: x * 2, (x,))) is None


def test_recomputed_input_of_another_shape_or_dtype_raises_an_error() -> None:
    w = seeded(3, 5, seed=2).requires_grad_()
    for wrong in (lambda x: x[1:], lambda x: x.double()):
        y = linear(register_recompute(seeded(7, 5), wrong, (seeded(7, 5),)), [w])
        with pytest.raises(RuntimeError, match="must return the same tensor"):
            y.sum().backward()


def test_wrong_recomputation_changes_the_gradient() -> None:
    w = seeded(3, 5, seed=2).requires_grad_()
    right, wrong = seeded(7, 5), seeded(7, 5, seed=9)
    (expected,) = torch.autograd.grad(linear(right, [w]).sum(), w)
    (result,) = torch.autograd.grad(
        linear(register_recompute(right, lambda x: x, (wrong,)), [w]).sum(), w
    )
    with pytest.raises(AssertionError, match="expected the same bits"):
        assert_equals("w", result, expected, EXACT)


def test_checked_recomputation_with_other_bits_raises_an_error() -> None:
    w, x = seeded(3, 5, seed=2).requires_grad_(), seeded(7, 5)
    linear(register_checked_recompute(x * 2, lambda x: x * 2, (x,)), [w]).sum().backward()
    y = linear(register_checked_recompute(x * 2, lambda x: x * 2.0000002, (x,)), [w])
    with pytest.raises(RuntimeError, match="did not give the same bits a second time"):
        y.sum().backward()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_fingerprint_depends_on_values_and_order(dtype: torch.dtype) -> None:
    x = (
        (torch.arange(30).view(5, 6) % 7 > 3).to(dtype)
        if dtype == torch.bool
        else torch.arange(30).view(5, 6).to(dtype)
    )
    assert torch.equal(fingerprint(x), fingerprint(x.clone()))
    assert torch.equal(fingerprint(x[:, 1:4]), fingerprint(x[:, 1:4].contiguous()))
    for place in range(30):
        other = x.clone().view(-1)
        other[place] = ~other[place] if dtype == torch.bool else other[place] + 1
        assert not torch.equal(fingerprint(x), fingerprint(other.view(5, 6)))
    assert not torch.equal(fingerprint(x), fingerprint(x.T.contiguous()))


def test_recomputation_error_names_both_shapes_and_dtypes() -> None:
    x = seeded(4, 3)
    assert torch.equal(SavedInput(torch.clone, x.shape, x.dtype).restore([x]), x)
    with pytest.raises(
        RuntimeError,
        match=r"recomputed torch.float32 \[3, 4\] where forward computed torch.float32 \[4, 3\]",
    ):
        SavedInput(torch.t, x.shape, x.dtype).restore([x])
    with pytest.raises(
        RuntimeError, match=r"float64 \[4, 3\] where .* must return the same tensor"
    ):
        SavedInput(Tensor.double, x.shape, x.dtype).restore([x])


def test_split_rows_of_recomputed_output() -> None:
    x = seeded(8, 2)
    doubled = register_recompute(2 * x, lambda x: 2 * x, (x,))
    assert [len(part) for part in split_rows(x, 3)] == [3, 3, 2]
    assert [len(part) for part in split_rows(x[:2], 3)] == [1, 1, 0]
    for part, expected in zip(split_rows(doubled, 3), (2 * x).split([3, 3, 2]), strict=True):
        recipe = recompute_recipe(part)
        assert recipe is not None and recipe.inputs == (x,)
        assert_equals("value", part, expected, EXACT)
        assert_equals("recomputed", recipe.function(*recipe.inputs), expected, EXACT)

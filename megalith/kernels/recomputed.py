"""Recomputed outputs: tensors that need not be saved for backward, because they can be recomputed
from others.

Examples: a norm's output from its input, which the norm saves anyway; all tokens from each rank's
part; a full tensor from its shards. The function that computes such a tensor registers how; a
function that saves the tensor for backward calls `tensors_to_save` and gets the inputs of the
recomputation instead. It saves them with `save_for_backward`, so hooks on saved tensors (memory
statistics, activation offload) see what is saved. Source of the idea: Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class RecomputeRecipe(NamedTuple):
    """How to recompute a tensor bit by bit."""

    function: Callable[..., Tensor]
    """Recomputes the tensor from `inputs`; may call collectives, on all ranks alike."""

    inputs: tuple[Tensor, ...]
    """Tensors to save for the recomputation."""


# An entry lives as long as its tensor. It is no attribute of the tensor, because copies and views
# must not inherit it.
_recipes = WeakTensorKeyDictionary()

RegisterRecompute = Callable[[Tensor, Callable[..., Tensor], tuple[Tensor, ...]], Tensor]
"""`register_recompute` or `register_checked_recompute`."""


def register_recompute(
    x: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Tensor:
    """Let backward recompute x as `function(*inputs)` instead of saving it; returns x.

    Without gradients nothing is registered; torch.compile decides itself what it recomputes.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _recipes[x] = RecomputeRecipe(function, inputs)
    return x


def register_checked_recompute(
    x: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Tensor:
    """`register_recompute` that compares the bits of each recomputation with those of x."""
    return register_recompute(x, BitwiseComparison(function, fingerprint(x)), inputs)


def derive_recompute(x: Tensor, y: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Let backward recompute y, which is `function(x)`, from x or from what x is recomputed from;
    returns y."""
    if y is x:
        return y
    recipe = recompute_recipe(x)
    if recipe is None:
        return register_recompute(y, function, (x,))
    return register_recompute(y, partial(_compose, recipe.function, function), recipe.inputs)


def pass_recompute(x: Tensor, y: Tensor) -> Tensor:
    """Let backward recompute y, which has the values of x, as it recomputes x; returns y."""
    recipe = recompute_recipe(x)
    return y if recipe is None or y is x else register_recompute(y, *recipe)


def recompute_recipe(x: Tensor) -> RecomputeRecipe | None:
    """Return how x is recomputed in backward; None: it has to be saved."""
    if torch.compiler.is_compiling() or not _recipes:
        return None
    recipe: RecomputeRecipe | None = _recipes.get(x)
    return recipe


@contextmanager
def save_entirely(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside this context, functions save these tensors themselves, not what they are recomputed
    from."""
    recipes = [(x, recipe) for x in tensors if (recipe := recompute_recipe(x)) is not None]
    for x, _ in recipes:
        del _recipes[x]
    try:
        yield
    finally:
        for x, recipe in recipes:
            _recipes[x] = recipe


class SavedInput(NamedTuple):
    """How backward obtains a tensor of forward from the tensors that were saved instead of it."""

    function: Callable[..., Tensor] | None
    """Recomputes the tensor; None: it was saved itself."""

    shape: torch.Size
    dtype: torch.dtype

    def restore(self, saved: Sequence[Tensor]) -> Tensor:
        """Return the tensor; raises RuntimeError if its shape or dtype differs from forward."""
        if self.function is None:
            return saved[0]
        with torch.no_grad():
            x = self.function(*saved)
        if (x.shape, x.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"backward recomputed {x.dtype} {list(x.shape)} where forward computed "
                f"{self.dtype} {list(self.shape)}: {self.function} must return the same tensor "
                "whenever it is called with the same inputs."
            )
        return x


def tensors_to_save(x: Tensor) -> tuple[SavedInput, tuple[Tensor, ...]]:
    """Return the tensors to save for backward instead of x, and how x is restored from them."""
    recipe = recompute_recipe(x)
    if recipe is None:
        return SavedInput(None, x.shape, x.dtype), (x,)
    return SavedInput(recipe.function, x.shape, x.dtype), recipe.inputs


def split_rows(x: Tensor, count: int) -> Sequence[Tensor]:
    """Split x [t, ...] along the rows into `count` parts, the first of them one row longer if they
    do not divide evenly.

    Each part of a recomputed output recomputes the entire output.
    """
    each, longer = divmod(x.shape[0], count)
    sizes = [each + (number < longer) for number in range(count)]
    parts = x.split(sizes)
    if recompute_recipe(x) is None:
        return parts
    starts = [sum(sizes[:number]) for number in range(count)]
    return [
        derive_recompute(x, part, partial(torch.narrow, dim=0, start=start, length=size))
        for part, start, size in zip(parts, starts, sizes, strict=True)
    ]


def fingerprint(x: Tensor) -> Tensor:
    """Return two sums over the bits of x, int64 [2]: they detect any change of one value, and
    nearly any change of several."""
    int_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(-1).view(int_dtype).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * place).sum()])


@dataclass(frozen=True, slots=True)
class BitwiseComparison:
    """A function whose results must have the same bits as the first result."""

    function: Callable[..., Tensor]
    expected: Tensor
    """Fingerprint of the first result."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result; synchronizes with the device."""
        y = self.function(*inputs)
        if not torch.equal(fingerprint(y), self.expected):
            raise RuntimeError(
                f"recompute.check: {self.function} of {[list(x.shape) for x in inputs]} did not "
                "give the same bits a second time. It is not deterministic, or its inputs were "
                "modified, so gradients would be wrong. Set recompute.granularity=none until that "
                "is fixed."
            )
        return y


def _compose(
    first: Callable[..., Tensor], second: Callable[[Tensor], Tensor], *inputs: Tensor
) -> Tensor:
    return second(first(*inputs))

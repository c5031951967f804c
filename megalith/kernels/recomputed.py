"""`RecomputedOutput`: a tensor that need not be saved for backward, because it can be recomputed
from others.

Examples: a norm's output from its input, which the norm saves anyway; all tokens from each rank's
part; a full tensor from its shards. Layers save the `inputs` with `save_for_backward`, so hooks on
saved tensors (memory statistics, activation offload) see what is saved. Source of the idea:
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecomputedOutput:
    """A tensor of the autograd graph, and how to recompute it bit by bit."""

    value: Tensor
    """The tensor, through which gradients flow."""

    again: Callable[..., Tensor]
    """Recomputes the value from `inputs`; may call collectives, on all ranks alike."""

    inputs: tuple[Tensor, ...]
    """Tensors to save for the recomputation."""

    def then(self, value: Tensor, function: Callable[[Tensor], Tensor]) -> "RecomputedOutput":
        """Return `value`, the result of `function` on this output, recomputed by both functions in
        sequence."""
        return RecomputedOutput(value, partial(_compose, self.again, function), self.inputs)


RecomputedOutputFactory = Callable[
    [Tensor, Callable[..., Tensor], tuple[Tensor, ...]], RecomputedOutput
]
"""Constructor of a layer's recomputed output: `RecomputedOutput` or `recompute_checked`."""


def recompute_checked(
    value: Tensor, again: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> RecomputedOutput:
    """Return a `RecomputedOutput` that compares the bits of each recomputation with those of the
    value."""
    return RecomputedOutput(value, BitwiseComparison(again, fingerprint(value)), inputs)


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


LayerInput = Tensor | RecomputedOutput
"""Input of a layer whose backward needs it."""


def output_tensor(x: LayerInput) -> Tensor:
    """Return the tensor itself, for layers that do not save it or save it entirely."""
    return x.value if isinstance(x, RecomputedOutput) else x


def as_recomputed(x: LayerInput) -> RecomputedOutput:
    """Return any input as a `RecomputedOutput`; a tensor is its own input."""
    return x if isinstance(x, RecomputedOutput) else RecomputedOutput(x, _identity, (x,))


def split_rows(x: LayerInput, count: int) -> Sequence[LayerInput]:
    """Split x [t, ...] along the rows into `count` parts, the first of them one row longer if they
    do not divide evenly.

    Each part of a recomputed output recomputes the entire output.
    """
    each, longer = divmod(output_tensor(x).shape[0], count)
    sizes = [each + (number < longer) for number in range(count)]
    if isinstance(x, Tensor):
        return x.split(sizes)
    cuts = (
        partial(torch.narrow, dim=0, start=sum(sizes[:number]), length=sizes[number])
        for number in range(count)
    )
    return [x.then(part, cut) for part, cut in zip(x.value.split(sizes), cuts, strict=True)]


def recompute_output(
    again: Callable[..., Tensor], inputs: Sequence[Tensor], *, like: tuple[torch.Size, torch.dtype]
) -> Tensor:
    """Recompute an output in backward; raises RuntimeError if its shape or dtype differs from
    forward."""
    with torch.no_grad():
        x = again(*inputs)
    if (x.shape, x.dtype) != like:
        raise RuntimeError(
            f"backward recomputed {x.dtype} {list(x.shape)} where forward computed {like[1]} "
            f"{list(like[0])}: {again} must return the same tensor whenever it is called with the "
            "same inputs."
        )
    return x


def _identity(x: Tensor) -> Tensor:
    return x


def _compose(
    first: Callable[..., Tensor], second: Callable[[Tensor], Tensor], *inputs: Tensor
) -> Tensor:
    return second(first(*inputs))

"""`RecomputedOutput`: a tensor that its readers need not keep for backward, since it can be
computed again from other ones.

A norm's output from its input, which the norm keeps anyway; all tokens from each rank's part; a
whole tensor from slices. Readers keep the `inputs` through `save_for_backward`, so whatever looks
after saved tensors (a meter, a copy in host memory) sees what is really kept. Source of the idea:
Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecomputedOutput:
    """A tensor with its place in the graph, and how to get the same bits again."""

    value: Tensor
    """The tensor, through which gradients flow."""

    again: Callable[..., Tensor]
    """Gives the value once more when called with `inputs`; may communicate, on all ranks alike."""

    inputs: tuple[Tensor, ...]
    """What has to be kept for that."""

    def then(self, value: Tensor, function: Callable[[Tensor], Tensor]) -> "RecomputedOutput":
        """`value`, which is `function` of mine, rebuilt by one call after the other."""
        return RecomputedOutput(
            value, partial(_one_after_the_other, self.again, function), self.inputs
        )


RecomputedOutputFactory = Callable[
    [Tensor, Callable[..., Tensor], tuple[Tensor, ...]], RecomputedOutput
]
"""How a layer that can rebuild its result makes it known: `RecomputedOutput` or `checked`."""


def recompute_checked(
    value: Tensor, again: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> RecomputedOutput:
    """`RecomputedOutput`, and each time the value is computed again its bits are compared with
    the first time's."""
    return RecomputedOutput(value, BitwiseComparison(again, fingerprint(value)), inputs)


def fingerprint(x: Tensor) -> Tensor:
    """Two sums over the bits of x, int64 [2]: any change of one value shows, and nearly any change
    of several."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(-1).view(whole).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * place).sum()])


@dataclass(frozen=True, slots=True)
class BitwiseComparison:
    """A function whose results must have the bits of one that is known."""

    function: Callable[..., Tensor]
    expected: Tensor
    """Its fingerprint."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The result; waits for the device."""
        y = self.function(*inputs)
        if not torch.equal(fingerprint(y), self.expected):
            raise RuntimeError(
                f"recompute.check: {self.function} of {[list(x.shape) for x in inputs]} did not "
                "give the same bits a "
                "second time. Something in it is not deterministic, or has changed what it reads, "
                "so gradients would "
                f"be wrong. Set recompute.granularity=none until that is mended"
            )
        return y


LayerInput = Tensor | RecomputedOutput
"""What layers take whose backward needs their input."""


def output_tensor(x: LayerInput) -> Tensor:
    """The tensor itself, for readers that keep nothing, or keep it whole."""
    return x.value if isinstance(x, RecomputedOutput) else x


def as_recomputed(x: LayerInput) -> RecomputedOutput:
    """Any input, as one: a tensor is rebuilt from itself."""
    return x if isinstance(x, RecomputedOutput) else RecomputedOutput(x, _itself, (x,))


def split_rows(x: LayerInput, count: int) -> Sequence[LayerInput]:
    """The rows of x [t, ...] in `count` parts, the first of them one row longer where they do not
    divide.

    A part of what is rebuilt is cut from the whole, which is rebuilt for each.
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
    """The value once more, in backward; it must have the shape and dtype it had."""
    with torch.no_grad():
        x = again(*inputs)
    if (x.shape, x.dtype) != like:
        raise RuntimeError(
            f"backward computed {x.dtype} {list(x.shape)} again where forward had {like[1]} "
            f"{list(like[0])}: "
            f"{again} must be made to give the same tensor whenever it is called with the same "
            "inputs"
        )
    return x


def _itself(x: Tensor) -> Tensor:
    return x


def _one_after_the_other(
    first: Callable[..., Tensor], second: Callable[[Tensor], Tensor], *inputs: Tensor
) -> Tensor:
    return second(first(*inputs))

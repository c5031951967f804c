"""Named tolerances, each with its reason, and comparisons of tensors that name the worst entry."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest allowed max|a - b| / max|b|, with its reason."""

    name: str
    relative: float
    why: str
    nonzero: bool = False
    """Whether an all-zero reference fails: a missing gradient equals another missing gradient."""

    cosine: float | None = None
    """Smallest allowed cosine of the angle between a and b; None: not checked."""


EXACT = Tolerance(
    "exact",
    0.0,
    "the same operations on the same numbers in the same order: resume, recompute, reload, the "
    "same layout twice",
)
FP64 = Tolerance(
    "fp64",
    1e-9,
    "float64 turns rounding into about 1e-15, so a step of any layout that differs by more has a "
    "bug",
    nonzero=True,
)
CURVE64 = Tolerance(
    "curve64",
    1e-8,
    "float64 over tens of steps: Adam divides tiny gradients by their own size, which enlarges "
    "their rounding",
)
FP32 = Tolerance(
    "fp32",
    1e-5,
    "2^-23 is 1.2e-7 per operation; sums of a few hundred terms in another order stay below a "
    "hundred times that",
)
FP32_DEEP = Tolerance(
    "fp32_deep",
    1e-4,
    "gradients that passed several layers in fp32: each layer's reordered sums add to the last "
    "one's",
)
PARITY = Tolerance(
    "parity",
    1e-5,
    "another implementation of the same formulas in fp32, whose sums run in another order",
)
BF16 = Tolerance(
    "bf16",
    2e-2,
    "bf16 keeps 8 significant bits, 0.4 % per operation; the direction must still be right",
    cosine=0.999,
)
TOLERANCES: Mapping[str, Tolerance] = {
    tolerance.name: tolerance for tolerance in (EXACT, FP64, CURVE64, FP32, FP32_DEEP, PARITY, BF16)
}


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return max|a - b| / max|b| in float64; infinite for other shapes, NaN, or when b is zero and
    a is not."""
    if a.shape != b.shape:
        return math.inf
    if a.numel() == 0:
        return 0.0
    ours, reference = _double(a), _double(b)
    difference, largest = float((ours - reference).abs().max()), float(reference.abs().max())
    if not math.isfinite(difference) or not math.isfinite(largest):
        return math.inf
    if largest == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / largest


def matmul_bound(a: Tensor, b: Tensor) -> Tensor:
    """Return the error bound of each element of `a @ b` if products are summed in fp32 and the sum
    is rounded to a's dtype.

    u |a @ b| + 1.01 n 2^-24 |a| @ |b|, where u is the rounding of the result and n the length of
    the sums, in any order; 1.01 covers the terms of second order. Source: Higham 2002, Accuracy and
    Stability of Numerical Algorithms, section 3.5.
    """
    unit, length = torch.finfo(a.dtype).eps / 2, a.shape[-1]
    exact, magnitude = _double(a) @ _double(b), _double(a).abs() @ _double(b).abs()
    return unit * exact.abs() + 1.01 * length * 2.0**-24 * magnitude


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of the angle between two tensors as vectors; 1 if both are zero."""
    ours, reference = _double(a).flatten(), _double(b).flatten()
    length = float(ours.norm() * reference.norm())
    return float(ours @ reference) / length if length > 0.0 else float(torch.equal(ours, reference))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Distance of a set of named tensors from a reference."""

    worst: str
    """Name of the entry with the largest error; "" if there is nothing to compare."""

    error: float
    """Its max|a - b| / max|b|."""

    zeros: tuple[str, ...] = ()
    """Names whose reference is all zero, so that equality is not informative."""

    unpaired: tuple[str, ...] = ()
    """Names in only one of the two sets."""

    def within(self, tolerance: Tolerance) -> bool:
        """Return whether all names pair up and every entry is within the tolerance."""
        return (
            self.error <= tolerance.relative
            and not self.unpaired
            and not (tolerance.nonzero and self.zeros)
        )

    def __str__(self) -> str:
        parts = (
            [f"worst {self.worst}: {self.error:.2e} of its largest entry"]
            if self.worst
            else ["nothing compared"]
        )
        parts += [f"all zero: {', '.join(self.zeros)}"] if self.zeros else []
        parts += [f"in one set only: {', '.join(self.unpaired)}"] if self.unpaired else []
        return "; ".join(parts)


def compare(actual: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> Comparison:
    """Compare two sets of named tensors entry by entry, each against its own largest element."""
    shared = [name for name in reference if name in actual]
    errors = {name: relative_error(actual[name], reference[name]) for name in shared}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Comparison(
        worst=worst,
        error=errors.get(worst, 0.0),
        zeros=tuple(
            name for name in shared if reference[name].numel() and not reference[name].any()
        ),
        unpaired=tuple(sorted(set(actual) ^ set(reference))),
    )


def assert_equals(name: str, a: Tensor, b: Tensor, tolerance: Tolerance) -> None:
    """Fail unless a is close enough to b; the message has the worst entry and the tolerance.

    Raises:
        AssertionError: too far apart, other shapes, NaN, or (if the tolerance requires it) an
        all-zero reference. `EXACT` compares bits and dtypes, so that NaN equals NaN and 0.0 differs
        from -0.0.
    """
    if a.shape != b.shape:
        raise AssertionError(f"{name}: shape {list(a.shape)}, expected {list(b.shape)}")
    if tolerance == EXACT:
        if a.dtype != b.dtype or not _same_bits(a, b):
            raise AssertionError(
                f"{name}: {a.dtype} {_worst_entry(a, b)}, expected the same bits as {b.dtype}"
            )
        return
    if tolerance.nonzero and b.numel() and not b.any():
        raise AssertionError(
            f"{name}: the reference is all zero, so equality proves nothing. Pass other data."
        )
    error = relative_error(a, b)
    if error > tolerance.relative:
        allowed = f"{tolerance.relative:g} ({tolerance.name}: {tolerance.why})"
        raise AssertionError(
            f"{name}: max|a-b|/max|b| is {error:.3g}, {_worst_entry(a, b)}; expected at most "
            f"{allowed}"
        )
    if tolerance.cosine is not None and b.numel() and cosine(a, b) < tolerance.cosine:
        raise AssertionError(
            f"{name}: cosine {cosine(a, b):.6f}, must be at least {tolerance.cosine}"
        )


def assert_close(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: Tolerance
) -> None:
    """Call `assert_equals` for two sets of named tensors, which must have the same names.

    Raises:
        AssertionError: the names differ, or an entry does; the worst entry is named.
    """
    unpaired = sorted(set(actual) ^ set(reference))
    if unpaired:
        raise AssertionError(
            f"only one of the two sets has {', '.join(unpaired)}; expected the same names"
        )
    for name in sorted(reference, key=lambda name: -relative_error(actual[name], reference[name])):
        assert_equals(name, actual[name], reference[name], tolerance)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    ours, reference = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(ours, reference)


def _worst_entry(a: Tensor, b: Tensor) -> str:
    """Describe where two tensors of one shape differ most, NaN first."""
    difference = (_double(a) - _double(b)).abs().flatten()
    if difference.numel() == 0:
        return "no entries"
    place = int(difference.argmax())  # a NaN counts as the largest
    index: Sequence[int] = [int(i) for i in torch.unravel_index(torch.tensor(place), a.shape)]
    return (
        f"{a.flatten()[place].item():.9g} instead of {b.flatten()[place].item():.9g} at "
        f"{list(index)}"
    )


def _double(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)

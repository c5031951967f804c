"""Two checkpoints, tensor by tensor: what only one of them has, and how far the values of the
others are apart."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor

from megalith.checkpoint.load import Checkpoint
from megalith.errors import CheckpointError

Kind = Literal["same", "only in a", "only in b", "shape", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """One tensor of two checkpoints."""

    name: str
    kind: Kind
    """`same`: every element within the tolerance, whatever the two dtypes."""

    a: str | None
    """Shape and dtype in the first."""

    b: str | None
    """The same in the second."""

    largest: float = 0.0
    """Largest absolute difference of two elements; inf where one of them is no number."""

    differing: int = 0
    """Elements that are further apart than the tolerance."""

    numel: int = 0


def compare_checkpoints(
    a: Checkpoint, b: Checkpoint, *, atol: float = 0.0, only: str = "*"
) -> Iterator[TensorComparison]:
    """Every tensor of either whose name matches `only`, in the order of names; whichever layouts
    they were saved in.

    Reads a box at a time: at most two stored boxes and what they meet are in memory.

    Raises:
        CheckpointError: a file is damaged, or no tensor of either matches.
    """
    names = [name for name in sorted({*a.keys(), *b.keys()}) if fnmatchcase(name, only)]
    if not names:
        raise CheckpointError(
            f"--only={only} matches none of the tensors of {a.path} and {b.path}. Use a pattern "
            "such as model.*, which all weights have."
        )
    for name in names:
        yield _compare(a, b, name, atol)


def _compare(a: Checkpoint, b: Checkpoint, name: str, atol: float) -> TensorComparison:
    here, there = (_describe(each, name) for each in (a, b))
    if here is None or there is None:
        return TensorComparison(
            name=name, kind="only in b" if here is None else "only in a", a=here, b=there
        )
    if a.shape(name) != b.shape(name):
        return TensorComparison(name=name, kind="shape", a=here, b=there)
    largest, differing, numel = 0.0, 0, 0
    for stored in a.manifest.tensors[name].boxes:
        gap = _gap(a.read(name, stored.box), b.read(name, stored.box))
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        differing += int((gap > atol).sum())
        numel += gap.numel()
    kind: Kind = "values" if differing else "same"
    return TensorComparison(
        name=name, kind=kind, a=here, b=there, largest=largest, differing=differing, numel=numel
    )


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """Absolute differences in float64; 0 between equal infinities and between nan and nan, inf
    where one is nan."""
    x, y = x.double(), y.double()
    gap = torch.where(x == y, 0.0, (x - y).abs())
    gap = torch.where(x.isnan() & y.isnan(), 0.0, gap)
    return torch.nan_to_num(gap, nan=torch.inf, posinf=torch.inf)


def _describe(checkpoint: Checkpoint, name: str) -> str | None:
    tensor = checkpoint.manifest.tensors.get(name)
    return None if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"

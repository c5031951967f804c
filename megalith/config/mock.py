"""How long made-up documents are."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MockLengths:
    """Lengths of the mock corpus, in tokens with the one that ends a document."""

    kind: Literal["uniform", "lognormal", "file"] = "uniform"
    """uniform: from 1 token on, as in Megatron; lognormal: many short and few long ones, as real
    texts are; file: those that stand in `path`, from the first again after the last."""
    mean: float | None = None
    """Of lognormal lengths, before those that are too short or too long are moved to the nearest
    end; unset: for the other kinds, which have none."""
    sigma: float = 1.0
    """Of the logarithms of lognormal lengths."""
    shortest: int = 1
    """Lognormal lengths are not below this; data.mock_max_tokens ends them above."""
    path: str | None = None
    """A file of whole numbers with blanks, commas or new lines between them; unset: for the other
    kinds."""


def mock_problems(lengths: MockLengths, *, most: int, used: bool) -> list[str]:
    """Every rule that this config breaks, as texts; `most`: tokens of the longest document. Touches
    no file."""
    usual, name = MockLengths(), "data.mock_lengths"
    if not used:
        return (
            []
            if lengths == usual
            else [f"{name}.kind={lengths.kind} without data.mock=true. Set it, or remove it."]
        )
    read = {"lognormal": ("mean", "sigma", "shortest"), "file": ("path",)}.get(lengths.kind, ())
    problems = [
        f"{name}.{field}={getattr(lengths, field)} with {name}.kind={lengths.kind}, which does not "
        "read it. Remove it, "
        f"or set {name}.kind={'file' if field == 'path' else 'lognormal'}."
        for field in ("mean", "sigma", "shortest", "path")
        if field not in read and getattr(lengths, field) != getattr(usual, field)
    ]
    if lengths.kind == "file" and lengths.path is None:
        problems.append(
            f"{name}.kind={lengths.kind} without {name}.path. Set it to a file of lengths."
        )
    if lengths.kind != "lognormal":
        return problems
    if lengths.mean is None or not (math.isfinite(lengths.mean) and 1 <= lengths.mean <= most):
        problems.append(
            f"{name}.mean={lengths.mean} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    if not (math.isfinite(lengths.sigma) and lengths.sigma >= 0):
        problems.append(f"{name}.sigma={lengths.sigma} must be 0 or more. Use 1.0.")
    if not 1 <= lengths.shortest <= most:
        problems.append(
            f"{name}.shortest={lengths.shortest} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    return problems

"""Settings of the document lengths of mock data."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MockLengths:
    """Distribution of document lengths in mock data, in tokens including the end-of-document
    token."""

    kind: Literal["uniform", "lognormal", "file"] = "uniform"
    """Distribution. uniform: from 1 token to data.mock_max_tokens, as in Megatron; lognormal:
    many short and few long documents, as in real text; file: the lengths listed in `path`,
    repeated."""
    mean: float | None = None
    """lognormal: mean length in tokens, before lengths are clamped to the valid range. Unset
    with the other kinds."""
    sigma: float = 1.0
    """lognormal: standard deviation of the logarithm of the lengths."""
    shortest: int = 1
    """lognormal: minimum length in tokens; the maximum is data.mock_max_tokens - 1."""
    path: str | None = None
    """file: a text file of whole numbers separated by spaces, commas or newlines. Unset with the
    other kinds."""


def mock_problems(lengths: MockLengths, *, most: int, used: bool) -> list[str]:
    """Return the violated rules as error messages; `most` is the longest document in tokens.
    Accesses no file."""
    defaults, name = MockLengths(), "data.mock_lengths"
    if not used:
        return (
            []
            if lengths == defaults
            else [f"{name}.kind={lengths.kind} needs data.mock=true. Set it, or remove {name}."]
        )
    read = {"lognormal": ("mean", "sigma", "shortest"), "file": ("path",)}.get(lengths.kind, ())
    problems = [
        f"{name}.{field}={getattr(lengths, field)} is not used by {name}.kind={lengths.kind}. "
        f"Remove it, or set {name}.kind={'file' if field == 'path' else 'lognormal'}."
        for field in ("mean", "sigma", "shortest", "path")
        if field not in read and getattr(lengths, field) != getattr(defaults, field)
    ]
    if lengths.kind == "file" and lengths.path is None:
        problems.append(
            f"{name}.kind={lengths.kind} needs {name}.path. Set it to a file of lengths."
        )
    if lengths.kind != "lognormal":
        return problems
    if lengths.mean is None or not (math.isfinite(lengths.mean) and 1 <= lengths.mean <= most):
        problems.append(
            f"{name}.mean={lengths.mean} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    if not (math.isfinite(lengths.sigma) and lengths.sigma >= 0):
        problems.append(f"{name}.sigma={lengths.sigma} must be at least 0. Use 1.0.")
    if not 1 <= lengths.shortest <= most:
        problems.append(
            f"{name}.shortest={lengths.shortest} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    return problems

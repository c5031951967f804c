"""Matrices of a parameter, as update rules per matrix (Muon, SOAP, Adafactor) see them: global
shapes, the same under every layout; no torch."""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Literal, NamedTuple

from megalith.plan.shards import Box

MatrixSplit = Literal["matrices", "heads", "fused"]
"""matrices: each matrix of the paper; heads: projections of attention by head; fused: key with
value, and gate with up, as one."""

STACKED_WORDS = ("kv", "gate_up")
"""Parameters that stack two matrices of the same shape along a dim of their own."""

HEAD_DIMS = {"q": 0, "gate": 0, "kv": 1, "o": 1, "q_up": 0, "kv_up": 0}
"""Projections of attention: the dim of their heads."""

ADAPTERS = ("lora_a", "lora_b")
"""Last words of the names of LoRA adapters."""


class WeightMatrix(NamedTuple):
    """One weight matrix of a parameter."""

    parameter: str
    """Name of the parameter."""

    box: Box
    """Box of the global parameter whose elements, in row-major order, are the matrix."""

    rows: int
    """Outputs."""

    columns: int
    """Inputs."""

    state_name: str
    """Name under which the states of all equal matrices of the parameter are stored: that of the
    parameter, with `.key` or `.value` if its matrices have different shapes."""

    state_index: int
    """Number of this matrix among those with this state name."""

    state_count: int
    """Number of matrices with this state name."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """FLOPs of one Newton-Schulz step: 4 m² n + 2 m³, with m the shorter side."""
        m, n = sorted((self.rows, self.columns))
        return 4 * m * m * n + 2 * m**3


def split_into_matrices(
    name: str,
    shape: Sequence[int],
    inputs: int,
    *,
    split: MatrixSplit = "matrices",
    nope_dim: int | None = None,
) -> list[WeightMatrix]:
    """Return the matrices of a parameter of this global shape, whose last `inputs` dims are inputs.
    Together they are the whole parameter, each element once.

    Every expert is a matrix. So are keys and values, gate and up projections, unless `split` is
    `fused`; `kv_up` of latent attention has a key part, the first `nope_dim` features of each head,
    and a value part. Adapters are split as their weights are by `matrices`.

    >>> kv = split_into_matrices("layers.0.attention.kv", (2, 4, 8, 64), 1)
    >>> [(one.box[0], one.rows, one.columns, one.state_index, one.state_count) for one in kv]
    [((0, 1), 32, 64, 0, 2), ((1, 2), 32, 64, 1, 2)]
    >>> o = split_into_matrices("layers.0.attention.o", (64, 4, 8), 2, split="heads")
    >>> [(one.box[1], one.rows, one.columns) for one in o[:2]]
    [((0, 1), 64, 8), ((1, 2), 64, 8)]
    """
    assert 0 < inputs < len(shape), (name, shape, inputs)
    last = name.rsplit(".", 1)[-1]
    word = name.split(".")[-2] if last in ADAPTERS else last
    split = "matrices" if last in ADAPTERS else split
    split_dims = _split_dims(name, word, shape, split)
    has_key_part = word == "kv_up" and nope_dim is not None and split != "fused"
    feature_dim = len(shape) - inputs - 1
    parts: list[tuple[str, tuple[int, int] | None]] = [("", None)]
    if has_key_part and last != "lora_a" and feature_dim > 0:
        parts = [(".key", (0, nope_dim or 0)), (".value", (nope_dim or 0, shape[feature_dim]))]
    matrices: list[WeightMatrix] = []
    for suffix, features in parts:
        spans = [
            [(i, i + 1) for i in range(n)] if dim in split_dims else [(0, n)]
            for dim, n in enumerate(shape)
        ]
        if features is not None:
            spans[feature_dim] = [features]
        boxes = list(product(*spans))
        for index, box in enumerate(boxes):
            sizes = [stop - start for start, stop in box]
            rows, columns = prod(sizes[:-inputs]), prod(sizes[-inputs:])
            matrices.append(
                WeightMatrix(name, box, rows, columns, name + suffix, index, len(boxes))
            )
    return matrices


def _split_dims(name: str, word: str, shape: Sequence[int], split: MatrixSplit) -> set[int]:
    """Return the dims along which every index has a matrix of its own."""
    num_expert_dims = int(".experts." in name)
    dims = set(range(num_expert_dims))
    if word in STACKED_WORDS and split != "fused" and shape[num_expert_dims] == 2:
        dims.add(num_expert_dims)
    if split == "heads" and word in HEAD_DIMS and len(shape) > 2:
        dims.add(HEAD_DIMS[word])
    return dims

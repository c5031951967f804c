"""LoRA adapters of requests: each token of an inference step has at most one of several adapters.

The tokens of a step are grouped by adapter; each group adds scale · (x Aᵀ) Bᵀ to the output of the
frozen matrix, where `nn/lora.py` adds it. Source: Chen et al. 2023, arXiv:2310.18547, section 4.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.config.lora import STACKED, LoraConfig
from megalith.kernels.linear import linear
from megalith.parallel.tensor import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalith.plan.shards import Shard


class OutputColumns(NamedTuple):
    """Output features of a linear layer to which one matrix B adds."""

    start: int
    b: Tensor
    """[features, r]"""


class LoraMatrices(NamedTuple):
    """This rank's part of one adapter of a linear layer."""

    a: Tensor
    """[parts · r, i]: the matrices A one after the other."""

    columns: Sequence[OutputColumns]
    """Of each A, in order."""

    scale: float


class AdapterGroup(NamedTuple):
    """The tokens of a step that have one adapter."""

    matrices: Mapping[str, LoraMatrices]
    """By name of the first weight of a linear layer."""

    tokens: Tensor | None
    """Indices [t_group]; None: all tokens of the step."""

    keys: Tensor | None
    """Indices among the tokens to which the rows attend, one row after the other, for MLA; None:
    all."""


@dataclass(slots=True)
class StepAdapters:
    """The adapters of the current step, which all linear layers of a model share."""

    groups: Sequence[AdapterGroup] = ()
    """Empty: no token has an adapter."""


LinearLayer = ColumnParallelLinear | RowParallelLinear | ReplicatedLinear
MakeShards = Callable[[Shard, LoraConfig], tuple[Shard, Shard]]
"""Returns the shards of A and B of a weight: `column_adapter`, `row_adapter` or `whole_adapter`."""


class BatchedLora(nn.Module):
    """A linear layer with the adapters of each token: x [t, i] -> y [t, o], sharded as its base.

    Every rank has all tokens. Without adapters in the step it only calls its base.
    """

    def __init__(
        self,
        base: LinearLayer,
        step: StepAdapters,
        make_shards: MakeShards,
        *,
        reduce_features: Callable[[Tensor], Tensor],
    ) -> None:
        """`reduce_features`: sums x Aᵀ [t, r] over ranks that hold parts of the inputs."""
        super().__init__()
        self.base, self.step = base, step
        self._make_shards, self._reduce_features = make_shards, reduce_features
        specs = base.__dict__["param_specs"].values()
        self._weights = [spec.shard for spec in specs if spec.shard.inputs]
        self.name = self._weights[0].name
        self._reads_keys = self.name.endswith(".kv_up")  # MLA projects the latents that it gathers

    @property
    def is_adapted(self) -> bool:
        """Whether a token of this step has an adapter of this layer."""
        return any(self.name in group.matrices for group in self.step.groups)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i] -> [t, o]."""
        y: Tensor = self.base(x)
        for group in self.step.groups:
            matrices = group.matrices.get(self.name)
            if matrices is not None:
                self._add(y, x, matrices, group.keys if self._reads_keys else group.tokens)
        return y

    def _add(self, y: Tensor, x: Tensor, matrices: LoraMatrices, index: Tensor | None) -> None:
        """Add an adapter to the rows `index` of y [t, o] in place."""
        features = linear(x if index is None else x[index], [matrices.a])
        features = self._reduce_features(features) * matrices.scale
        parts = features.chunk(len(matrices.columns), dim=-1)
        for part, (start, b) in zip(parts, matrices.columns, strict=True):
            columns = y.narrow(-1, start, b.shape[0])
            if index is None:
                columns.add_(linear(part, [b]))
            else:
                columns.index_add_(0, index, linear(part, [b]))

    def accumulated_parameters(self) -> list[nn.Parameter]:
        """Return the frozen weights, as the rows of one matrix."""
        return self.base.accumulated_parameters()

    def build_matrices(
        self, lora: LoraConfig, names: frozenset[str], read: Callable[[Shard], Tensor]
    ) -> LoraMatrices | None:
        """Return this rank's part of an adapter; None if it does not adapt this layer.

        `names`: those of all its matrices, such as `layers.0.attention.q.lora_a`; `read`: returns
        the local part of one as a matrix.
        """
        parts: list[Tensor] = []
        columns: list[OutputColumns] = []
        start = 0
        for weight in self._weights:
            num_rows = weight.matrix_shape[0]
            if f"{weight.name}.lora_a" in names:
                a, b = self._make_shards(weight, lora)
                parts.append(read(a))
                count = STACKED.get(weight.name.rsplit(".", 1)[1], 1)
                for number, part in enumerate(read(b).chunk(count)):
                    columns.append(OutputColumns(start + number * (num_rows // count), part))
            start += num_rows
        return LoraMatrices(torch.cat(parts), columns, lora.scale) if parts else None

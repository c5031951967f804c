"""`BuildContext`: what a layer needs to be complete when its constructor returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.lora import LoraConfig, has_adapters
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.grouped_linear import GroupedMatmulOps
from megalith.kernels.linear import PLAIN, MatmulOps
from megalith.nn.lora import ColumnLora, ReplicatedLora, RowLora
from megalith.parallel.collectives import OverlapFn, no_overlap
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import (
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    ReplicatedLinear,
    RowParallelLinear,
    SequenceParallelComm,
    TensorParallelComm,
    TPComm,
    default_loss,
    register_param,
)
from megalith.parallel.tensor_overlap import RING_EXCHANGE, CollectiveMatmul
from megalith.plan.frozen import first_backward_layer
from megalith.plan.parameters import initial_values
from megalith.plan.shards import Shard

NO_RECOMPUTE, NO_OFFLOAD = RecomputeConfig(), OffloadConfig()


def plain_matmul_ops(weight: str) -> MatmulOps:
    """Return plain matmuls for every linear layer."""
    return PLAIN


def fastest_matmul_ops(weight: str) -> None:
    """Select the fastest grouped matmuls for the rows of each call."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything besides its own config that a layer needs: an argument of every layer's
    constructor, `Layer(name, config, context)`."""

    model: ModelConfig
    """The whole model; a layer's own config may differ from it."""

    mesh: Mesh
    parallel: ParallelConfig
    tp_comm: TPComm
    """Tensor-parallel or sequence-parallel communication."""

    dtype: torch.dtype = torch.float32
    """Dtype of parameters and of activations inside layers."""

    backends: Backends = AUTO
    recompute: RecomputeConfig = NO_RECOMPUTE
    offload: OffloadConfig = NO_OFFLOAD
    lora: LoraConfig | None = None
    """Adapters of the layers; the other parameters are then frozen."""

    optim: OptimConfig = TRAIN_ALL
    """Names of the parameters that are trained."""

    build_loss: Callable[[Backends], Callable[..., Tensor]] = default_loss
    """Builds the training loss of one output head, summed over tokens."""

    build_matmul_ops: Callable[[str], MatmulOps] = plain_matmul_ops
    """Builds the matmuls of one linear layer, given the name of its first weight."""

    build_grouped_matmul_ops: Callable[[str], GroupedMatmulOps | None] = fastest_matmul_ops
    """Builds the matmuls of one weight of all experts, given its name; None: the fastest."""

    overlap_fn: OverlapFn = no_overlap
    """Called while messages of the token dispatch are in flight (dual-batch overlap)."""

    prefill_mlp_chunks: int = 1
    """Chunks in which MLPs of an inference model process prompts."""

    replica_ranks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Pipeline ranks that hold a copy of a table which several stages use, by name."""

    layer: int = 0
    """Index of the layer over all stages, which determines its kind."""

    dropout_layer: int = 0
    """Index that keys the layer's dropout masks and routing noise."""

    def at_layer(self, index: int, dropout_layer: int | None = None) -> "BuildContext":
        """Return the context of a layer, numbered over all stages."""
        return replace(
            self, layer=index, dropout_layer=index if dropout_layer is None else dropout_layer
        )

    @property
    def first_backward_layer(self) -> int | None:
        """First layer that backward has to reach; None: it reaches the embedding."""
        return first_backward_layer(self.model, self.optim, self.lora)

    def spec(self, shard: Shard, init: Init) -> ParameterSpec:
        """Return the specification of a parameter: the pipeline ranks that hold it, the initial
        distribution that the model sets, and whether it is trained."""
        initial = initial_values(self.model, shard.name, shard.shape, shard.inputs, init.std)
        stages = self.replica_ranks.get(shard.name) or (self.mesh.pp.rank,)
        return ParameterSpec(
            replace(shard, stages=stages),
            replace(init, std=initial.std, uniform=initial.uniform),
            trained=self.lora is None and self.optim.trains(shard.name),
        )

    def register_param(self, module: nn.Module, name: str, shard: Shard, init: Init) -> None:
        """Register the parameter `name` of `module` on the meta device."""
        register_param(module, name, self.spec(shard, init), dtype=self.dtype)

    def column_linear(
        self, weights: Sequence[tuple[Shard, Init]], biases: Sequence[tuple[Shard, Init]] = ()
    ) -> ColumnParallelLinear | ColumnLora:
        """Build a linear layer with sharded output features, with its adapters."""
        linear = ColumnParallelLinear(
            [self.spec(*weight) for weight in weights],
            [self.spec(*bias) for bias in biases],
            self.tp_comm,
            dtype=self.dtype,
            matmul_ops=self.build_matmul_ops(weights[0][0].name),
        )
        adapted = [shard for shard, _ in weights if self._has_adapters(shard)]
        if self.lora is None or not adapted:
            return linear
        names = [shard.name.rsplit(".", 1)[1] for shard in adapted]
        return ColumnLora(linear, names, self.lora, self.backends, dtype=self.dtype)

    def row_linear(
        self, weight: tuple[Shard, Init], bias: tuple[Shard, Init] | None = None
    ) -> RowParallelLinear | RowLora:
        """Build a linear layer with sharded input features, with its adapter."""
        linear = RowParallelLinear(
            self.spec(*weight),
            None if bias is None else self.spec(*bias),
            self.tp_comm,
            dtype=self.dtype,
            matmul_ops=self.build_matmul_ops(weight[0].name),
        )
        if self.lora is None or not self._has_adapters(weight[0]):
            return linear
        return RowLora(linear, self.lora, self.backends, dtype=self.dtype)

    def replicated_linear(self, shard: Shard, init: Init) -> ReplicatedLinear | ReplicatedLora:
        """Build a linear layer with a replicated weight, with its adapter."""
        linear = ReplicatedLinear(
            self.spec(shard, init), dtype=self.dtype, matmul_ops=self.build_matmul_ops(shard.name)
        )
        if self.lora is None or not self._has_adapters(shard):
            return linear
        return ReplicatedLora(linear, self.tp_comm, self.lora, self.backends, dtype=self.dtype)

    def _has_adapters(self, shard: Shard) -> bool:
        return self.lora is not None and has_adapters(shard.name, self.lora, self.model)


def build_context(
    model: ModelConfig,
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
    *,
    tp_comm: TPComm | None = None,
    collective_matmul: CollectiveMatmul = RING_EXCHANGE,
    **fields: Any,
) -> BuildContext:
    """Return the context of a model's layers; by default with the communication that `parallel`
    selects. `collective_matmul` is used if `parallel` overlaps communication with matmuls; `fields`
    are the other fields of `BuildContext`."""
    parallel = parallel or ParallelConfig()
    if tp_comm is None and parallel.sp and mesh.tp.size > 1:
        tp_comm = SequenceParallelComm(
            mesh.tp,
            overlap=parallel.overlap,
            collective_matmul=collective_matmul if parallel.tp_comm_overlap else None,
        )
    tp_comm = tp_comm or TensorParallelComm(mesh.tp, overlap=parallel.overlap)
    return BuildContext(model=model, mesh=mesh, parallel=parallel, tp_comm=tp_comm, **fields)

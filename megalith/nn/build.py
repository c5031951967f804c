"""`BuildContext`: the constructor argument from which a layer takes groups, kernel backends,
recomputation, LoRA and precision; and weight initialization."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.lora import LoraConfig, find_lora_target, has_adapters, lora_matrices
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.grouped_linear import GroupedMatmulOps
from megalith.kernels.linear import PLAIN, MatmulOps
from megalith.nn.batched_lora import BatchedLora, StepAdapters
from megalith.nn.lora import (
    ColumnLora,
    ReplicatedLora,
    RowLora,
    column_adapter,
    row_adapter,
    whole_adapter,
)
from megalith.parallel.collectives import PROCESS_GROUP, Collectives, OverlapFn, no_overlap
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
from megalith.plan.keys import key
from megalith.plan.parameters import initial_values
from megalith.plan.shards import Box, Shard, intersect, split_range_into_boxes

ColumnLinear = ColumnParallelLinear | ColumnLora | BatchedLora
RowLinear = RowParallelLinear | RowLora | BatchedLora
"""Linear layers without or with adapters, those of training or of requests."""

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

    step_adapters: StepAdapters | None = None
    """Adapters of the tokens of an inference step, in every layer that `lora` could adapt."""

    optim: OptimConfig = TRAIN_ALL
    """Names of the parameters that are trained."""

    build_loss: Callable[[Backends], Callable[..., Tensor]] = default_loss
    """Builds the training loss of one output head, summed over tokens."""

    build_matmul_ops: Callable[[str], MatmulOps] = plain_matmul_ops
    """Builds the matmuls of a linear layer, a router or the output head, given the name of its
    first weight; a router with plain matmuls uses `moe.router.dtype`."""

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
    ) -> ColumnLinear:
        """Build a linear layer with sharded output features, with its adapters."""
        linear = ColumnParallelLinear(
            [self.spec(*weight) for weight in weights],
            [self.spec(*bias) for bias in biases],
            self.tp_comm,
            dtype=self.dtype,
            matmul_ops=self.build_matmul_ops(weights[0][0].name),
        )
        if (step := self._find_step_adapters(weights[0][0])) is not None:
            make_shards = partial(column_adapter, tp_comm=self.tp_comm)
            return BatchedLora(linear, step, make_shards, reduce_features=_return_unchanged)
        adapted = [shard for shard, _ in weights if self._has_adapters(shard)]
        if self.lora is None or not adapted:
            return linear
        names = [shard.name.rsplit(".", 1)[1] for shard in adapted]
        return ColumnLora(linear, names, self.lora, self.backends, dtype=self.dtype)

    def row_linear(
        self, weight: tuple[Shard, Init], bias: tuple[Shard, Init] | None = None
    ) -> RowLinear:
        """Build a linear layer with sharded input features, with its adapter."""
        linear = RowParallelLinear(
            self.spec(*weight),
            None if bias is None else self.spec(*bias),
            self.tp_comm,
            dtype=self.dtype,
            matmul_ops=self.build_matmul_ops(weight[0].name),
        )
        if (step := self._find_step_adapters(weight[0])) is not None:
            make_shards = partial(row_adapter, tp_comm=self.tp_comm)
            reduce_features = self.tp_comm.reduce_output
            return BatchedLora(linear, step, make_shards, reduce_features=reduce_features)
        if self.lora is None or not self._has_adapters(weight[0]):
            return linear
        return RowLora(linear, self.lora, self.backends, dtype=self.dtype)

    def replicated_linear(
        self, shard: Shard, init: Init
    ) -> ReplicatedLinear | ReplicatedLora | BatchedLora:
        """Build a linear layer with a replicated weight, with its adapter."""
        linear = ReplicatedLinear(
            self.spec(shard, init), dtype=self.dtype, matmul_ops=self.build_matmul_ops(shard.name)
        )
        if (step := self._find_step_adapters(shard)) is not None:
            return BatchedLora(linear, step, whole_adapter, reduce_features=_return_unchanged)
        if self.lora is None or not self._has_adapters(shard):
            return linear
        return ReplicatedLora(linear, self.tp_comm, self.lora, self.backends, dtype=self.dtype)

    def _has_adapters(self, shard: Shard) -> bool:
        return self.lora is not None and has_adapters(shard.name, self.lora, self.model)

    def _find_step_adapters(self, shard: Shard) -> StepAdapters | None:
        """Return the adapters of the tokens if a linear layer can have some."""
        can_adapt = find_lora_target(shard.name) in lora_matrices(self.model)
        return self.step_adapters if can_adapt else None


def _return_unchanged(features: Tensor) -> Tensor:
    """Return features that were computed from all inputs."""
    return features


def build_context(
    model: ModelConfig,
    mesh: Mesh,
    parallel: ParallelConfig | None = None,
    *,
    tp_comm: TPComm | None = None,
    collective_matmul: CollectiveMatmul = RING_EXCHANGE,
    collectives: Collectives = PROCESS_GROUP,
    **fields: Any,
) -> BuildContext:
    """Return the context of a model's layers; by default with the communication that `parallel`
    selects. `collective_matmul` is used if `parallel` overlaps communication with matmuls,
    `collectives` otherwise; `fields` are the other fields of `BuildContext`."""
    parallel = parallel or ParallelConfig()
    if tp_comm is None and parallel.sp and mesh.tp.size > 1:
        tp_comm = SequenceParallelComm(
            mesh.tp,
            overlap=parallel.overlap,
            collective_matmul=collective_matmul if parallel.tp_comm_overlap else None,
            collectives=collectives,
        )
    tp_comm = tp_comm or TensorParallelComm(
        mesh.tp, overlap=parallel.overlap, collectives=collectives
    )
    return BuildContext(model=model, mesh=mesh, parallel=parallel, tp_comm=tp_comm, **fields)


# --- weight initialization: equal for a name and a seed under every parallel layout, drawn tile by
# tile

TILE = (128, 512)
"""Rows and columns of the last two dims that one generator draws; fixed, because it determines the
values."""


def init_param_(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
    """Initialize the local box of `parameter`, or a flat range of it, in place.

    The global tensor is divided into tiles; each tile is drawn by a new generator keyed by (seed,
    name, tile), on the CPU and in fp32; only tiles that intersect the local box are drawn. So a
    value depends only on the seed, the name and its position.
    """
    start, stop = shard.flat or (0, shard.numel)
    local_boxes = split_range_into_boxes(shard.box_shape, start, stop)
    shapes = [[b - a for a, b in box] for box in local_boxes]
    with torch.no_grad():
        parts = (
            parameter.view(-1).split([math.prod(shape) for shape in shapes]) if local_boxes else ()
        )
        for box, shape, part in zip(local_boxes, shapes, parts, strict=True):
            global_box = tuple(
                (o + a, o + b) for (o, _), (a, b) in zip(shard.box, box, strict=True)
            )
            _fill_box(part.view(shape), global_box, shard, init, seed=seed)


def _fill_box(values: Tensor, box: Box, shard: Shard, init: Init, *, seed: int) -> None:
    """Initialize one box of a parameter."""
    if init.std == 0:
        values.fill_(init.offset)
    else:
        for tile in _tiles(shard.shape, box):
            overlap = intersect(tile, box)
            if overlap is not None:
                drawn = (
                    _draw(shard.name, tile, seed, uniform=init.uniform)
                    .mul_(init.std)
                    .add_(init.offset)
                )
                values[_within(overlap, box)] = drawn[_within(overlap, tile)].to(values.dtype)
    if init.rows is not None:
        values[max(0, init.rows - box[0][0]) :].zero_()


def _tiles(shape: tuple[int, ...], box: Box) -> Iterator[Box]:
    """Yield every tile of a tensor that may intersect a box of it."""
    sizes = [1] * len(shape)
    for dim, size in zip(range(len(shape) - 1, -1, -1), reversed(TILE), strict=False):
        sizes[dim] = size
    spans = []
    for (start, stop), length, size in zip(box, shape, sizes, strict=True):
        firsts = range(start // size * size, stop, size)
        spans.append([(first, min(first + size, length)) for first in firsts])
    yield from _product(spans)


def _product(spans: list[list[tuple[int, int]]]) -> Iterator[Box]:
    if not spans:
        yield ()
        return
    for span in spans[0]:
        for rest in _product(spans[1:]):
            yield (span, *rest)


def _draw(name: str, tile: Box, seed: int, *, uniform: bool) -> Tensor:
    """Draw a tile with variance 1."""
    generator = torch.Generator().manual_seed(
        key(seed, "init", name, *(start for start, _ in tile))
    )
    sizes = [stop - start for start, stop in tile]
    if uniform:
        return torch.rand(sizes, generator=generator).mul_(2).sub_(1).mul_(math.sqrt(3))
    return torch.randn(sizes, generator=generator)


def _within(part: Box, whole: Box) -> tuple[slice, ...]:
    return tuple(slice(p[0] - w[0], p[1] - w[0]) for p, w in zip(part, whole, strict=True))

"""Data parallelism with bucketed gradient reduction that is overlapped with backward, and ZeRO 1
and 2.

Weights and gradients lie in flat buffers, one per dtype. With ZeRO (a distributed optimizer) each
rank owns an equal slice of every bucket, updates its weights there, and all-gathers them during the
next forward.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.config.parallel import ParallelConfig
from megalith.kernels.embedding import add_rows_
from megalith.kernels.grouped_linear import GroupedMatmulOps, Groups, accumulate_grouped_product_
from megalith.kernels.linear import PLAIN, MatmulOps, add_product_, mm
from megalith.observe.machine import DTYPES
from megalith.parallel.grad_sync import (
    SHARD_AXES,
    ParamAllGather,
    Parameters,
    PendingReduceScatter,
    ShardedParam,
    SharedGradients,
    byte_checksum,
    check_slices_consistent_across_ranks,
    split_trained_and_frozen,
    start_bucket_reduce_scatter,
    sum_bits,
    tp_reduce_axes,
    warn_unused_params,
)
from megalith.parallel.group import (
    Group,
    check_consistent_across_ranks,
    single_rank_group,
    start_all_reduce_,
)
from megalith.parallel.mesh import Mesh
from megalith.parallel.pipeline import WeightGradStore
from megalith.parallel.recompute import count_forward_passes
from megalith.parallel.tensor import TensorParallel
from megalith.plan.buckets import (
    BucketPlan,
    BucketSlice,
    bucket_slice,
    flat_buffer_offsets,
    local_bucket_parts,
    plan_buckets,
)
from megalith.plan.shards import Shard
from megalith.plan.state_encodings import BUCKET_ALIGNMENT
from megalith.plan.update_rules import is_hidden_matrix

SLICES_OVER = {"dense": SHARD_AXES, "expert": ("edp_shard",)}
REPLICAS_OVER = {"dense": ("dp_replica",), "expert": ("edp_replica",)}
"""Grid -> axes over which its parameters are sharded, and over which the shards are replicated."""

IN_FLIGHT = 2
"""Bucket reductions in flight at once; each holds a receive buffer. Two, so that the link is never
idle between two."""


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Groups over which the parameters of one grid are sharded and replicated."""

    slices: Group
    """Ranks that own different slices; one rank if nothing is sharded."""

    replicas: Group
    """Ranks that own the same slices and compute other tokens."""


def shard_groups(zero: int, mesh: Mesh, grid: str = "dense") -> ShardGroups:
    """Return how `parallel.zero` shards the parameters of a grid; 2 and 3 shard as 1 does.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.
    """
    slices, replicas = SLICES_OVER[grid], REPLICAS_OVER[grid]
    if zero == 0 or mesh.over(*slices).size == 1:
        return ShardGroups(single_rank_group(*slices), mesh.over(*replicas, *slices))
    return ShardGroups(mesh.over(*slices), mesh.over(*replicas))


@dataclass(frozen=True, slots=True)
class Stack:
    """Weights whose gradient one matmul writes, as one contiguous matrix in one bucket."""

    numbers: tuple[int, ...]
    bucket: int
    start: int
    stop: int
    """Elements, counted from the start of the bucket."""

    columns: int

    @property
    def rows(self) -> int:
        """Output features of all its weights."""
        return (self.stop - self.start) // self.columns


@dataclass(frozen=True, slots=True)
class Frozen:
    """Weights of a matmul that are not trained and not in the buffer."""

    rows: int


class BucketGradAccumulator:
    """Gradient accumulator that writes the weight gradient of one layer directly into the flat
    buffer.

    The first contribution of a step overwrites the old values, so that the buffer need not be
    zeroed.
    """

    def __init__(
        self, parts: Sequence[Stack | Frozen], data_parallel: "BucketedDataParallel"
    ) -> None:
        """`parts`: the rows of the layer's matrix, in order."""
        self.stacks, self.data_parallel = (
            tuple(part for part in parts if isinstance(part, Stack)),
            data_parallel,
        )
        self.columns = self.stacks[0].columns
        self.row_counts = [part.rows for part in parts]
        self.trained = [isinstance(part, Stack) for part in parts]

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        """Add `dy.T @ x`: x [t, i], dy [t, o]."""
        for stack, part in self._split_by_stack(dy.split(self.row_counts, dim=1)):
            total = self.data_parallel.total(stack)
            if not self.data_parallel.is_fresh(stack.numbers):
                add_product_(total, x, part, matmul_ops)
            elif matmul_ops is PLAIN and total.dtype == dy.dtype:
                mm(part.t(), x, out=total)
            else:
                total.copy_(matmul_ops.weight_grad(part, x))
            self.data_parallel.contributed(stack.numbers)

    def grouped_product(
        self, x: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps | None
    ) -> None:
        """Add each expert's `dy.T @ x`: x [r, i], dy [r, o], for one parameter."""
        (stack,) = self.stacks
        total = self.data_parallel.total(stack)
        accumulate_grouped_product_(
            total,
            x,
            dy,
            groups,
            fresh=self.data_parallel.is_fresh(stack.numbers),
            matmul_ops=matmul_ops,
        )
        self.data_parallel.contributed(stack.numbers)

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready: dw [o, i]."""
        for stack, part in self._split_by_stack(dw.view(-1, self.columns).split(self.row_counts)):
            total = self.data_parallel.total(stack)
            if self.data_parallel.is_fresh(stack.numbers):
                total.copy_(part)
            else:
                total.add_(part)
            self.data_parallel.contributed(stack.numbers)

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`."""
        (stack,) = self.stacks
        total = self.data_parallel.total(stack)
        if self.data_parallel.is_fresh(stack.numbers):
            total.zero_()
        add_rows_(total, rows, dy)
        self.data_parallel.contributed(stack.numbers)

    def _split_by_stack(self, parts: Sequence[Tensor]) -> Iterator[tuple[Stack, Tensor]]:
        """Yield each stack with its part of the gradient; parts of frozen weights are dropped."""
        return zip(
            self.stacks,
            (part for part, trained in zip(parts, self.trained, strict=True) if trained),
            strict=True,
        )


class BucketedDataParallel:
    """Data parallelism: keeps weights and gradients in flat buffers and sums gradients over all
    ranks with the same slice.

    Weight matrices pass their gradients through gradient accumulators, other parameters through
    autograd hooks. A parameter is ready after its last contribution of the step; a bucket whose
    parameters are ready starts its reduction over dp and cp, in the order of the plan on every
    rank, while backward continues. Slices that tensor-parallel ranks or stages share are summed
    over those ranks at the end, as their `Shard`s say. Gradients are summed, never averaged: the
    loss has been scaled already.

    zero=1: the reduction is a reduce-scatter, and the updated slices are all-gathered bucket by
    bucket in the order of the next forward, whose layers wait for their weights. zero=2: the
    gradients of a bucket are freed after their reduction, in every microbatch. Buckets then contain
    only parameters that are summed over the same tensor-parallel axes, so that slices coincide on
    ranks whose other parameters have other sizes.

    Frozen parameters (`requires_grad` was False) have their own memory on every rank and take no
    part in this.

    Sources: Li et al. 2020, arXiv:2006.15704, section 3.2 (overlap); Rajbhandari et al. 2019,
    arXiv:1910.02054 (ZeRO).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        mesh: Mesh,
        config: ParallelConfig,
        *,
        device: torch.device,
        compiled: bool = False,
        watch: bool = False,
        weight_grads: Sequence[WeightGradStore] = (),
        alignment: int = BUCKET_ALIGNMENT,
    ) -> None:
        """`compiled`: the chunks of `model` are compiled; gradients are then added by hooks, and
        `all_gather_params` waits, because a compiled graph cannot wait for a gather. `watch`:
        record which gradients are NaN or infinite before they are reduced. `weight_grads`: stores
        of deferred weight gradients, by chunk of `model`; empty: nothing is deferred. `alignment`:
        parameters and slices start at a multiple of this many elements."""
        self.mesh, self.overlap, self._watch = mesh, config.overlap, watch
        self._records_bits, self._records_norms = False, watch
        self.reduce_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else None
        """Dtype of the reduction messages; None: that of the gradients, which is at least fp32."""
        trained, frozen = split_trained_and_frozen(parameters)
        self.shards = [shard for shard, _, _ in trained]
        grids = sorted({"dense", *(shard.grid for shard, _, _ in parameters)})
        self.divisions = {grid: shard_groups(config.zero, mesh, grid) for grid in grids}
        self.divided = max(each.slices.size for each in self.divisions.values()) > 1
        """Whether weights are sharded: a rank updates less than it computes with."""
        self.drops_gradients = config.zero == 2 and self.divided
        """Whether gradients are sharded (ZeRO-2): those of a bucket are freed once reduced."""
        self._aligns_matrices = config.bucket_alignment == "matrices" and self.divided
        runs = self._find_runs(model, trained)
        self.plan: BucketPlan = self._plan_buckets(runs.values(), config.bucket_numel, alignment)
        first_shards = [self._first(index) for index in range(len(self.plan.buckets))]
        lengths = [bucket.stop - bucket.start for bucket in self.plan.buckets]
        self.weights = _allocate_buckets(lengths, [shard.dtype for shard in first_shards], device)
        """Weights of each bucket; those of one dtype lie in one flat buffer."""
        places = [
            self._in_bucket(self.weights[slot.bucket], slot.bucket, slot.start, slot.stop)
            for slot in self.plan.slots
        ]
        self.parameters = _move_params_into(places, model, trained)
        self.frozen = _allocate_frozen(model, frozen, device)
        slices = [self._division(index).slices for index in range(len(self.plan.buckets))]
        if self.drops_gradients:
            lengths = [length // group.size for length, group in zip(lengths, slices, strict=True)]
        wide_dtypes = [shard.wide_dtype for shard in first_shards]
        self.gradients = _allocate_buckets(lengths, wide_dtypes, device)
        """Gradients of each bucket, under ZeRO-2 of this rank's slice of it."""
        self.local_params = self._build_local_params()
        self._compare_layouts()
        self._shared_gradients = SharedGradients(self.local_params, mesh)
        self._buffers: list[Tensor | None] = [
            None if self.drops_gradients else gradients for gradients in self.gradients
        ]
        chunks = list(model) if isinstance(model, nn.ModuleList) else [model]
        parts = {layer: self._parts(layer, own) for layer, own in runs.items() if own}
        self._uses = self._connect({} if compiled else parts, chunks, weight_grads)
        self._begin(0)
        self._sums: deque[tuple[int, PendingReduceScatter]] = deque()
        self._running: list[dist.Work] = []
        self._warned_unused = False
        self.param_all_gather = ParamAllGather(self.weights, self.plan, slices)
        self._waits_in_forward = self.divided and self.overlap and not compiled
        if self._waits_in_forward:
            for chunk in chunks:
                self.param_all_gather.wait_in(chunk, self.parameters)

    # --- one step

    def begin_step(self, microbatches: int) -> None:
        """Start a step of this many backward passes."""
        self._begin(microbatches)

    def _begin(self, microbatches: int) -> None:
        self._rounds = microbatches if self.drops_gradients else 1
        each = 1 if self.drops_gradients else microbatches
        self._expected = [uses * each for uses in self._uses]
        self._left = list(self._expected)
        self._fresh = [True] * len(self.shards)
        self._waiting = [len(bucket.members) for bucket in self.plan.buckets]
        self._next = 0  # counts sums: bucket `_next % buckets` in round `_next // buckets`
        self._took_part: set[int] = set()
        self._norms: list[tuple[int, tuple[Tensor, ...]]] = []
        self._bits: list[Tensor] = []

    def total(self, stack: Stack) -> Tensor:
        """Return the buffer that accumulates the gradient of these weights: [rows, columns]."""
        buffer = self._buffer(stack.bucket)
        return buffer[stack.start : stack.stop].view(-1, stack.columns)

    def is_fresh(self, numbers: Sequence[int]) -> bool:
        """Return whether these slots still hold old values; the caller overwrites them now."""
        fresh = self._fresh[numbers[0]]
        for number in numbers:
            self._fresh[number] = False
        return fresh

    def contributed(self, numbers: Sequence[int]) -> None:
        """Record one more contribution to these parameters; start the reduction of every complete
        bucket."""
        for number in numbers:
            self._left[number] -= 1
            if self._left[number] == 0:
                self._waiting[self.plan.slots[number].bucket] -= 1
        if not self.overlap and not self.drops_gradients:
            return
        count = len(self._waiting)
        while self._next < count * self._rounds and self._waiting[self._next % count] == 0:
            self._start_next()
            if not self.overlap:
                self._complete(0)

    def finish(self) -> Sequence[ShardedParam]:
        """Wait for all reductions; return this rank's slices with their complete gradients.

        A parameter that had no part in the loss gets zeros and is reduced like any other; the first
        step with such parameters logs a warning. Without overlap every reduction of zero 0 and 1
        starts here; under zero 1 `IN_FLIGHT` of them are in flight at once.
        """
        # a layer that forward skipped has not waited, and its weights are about to be overwritten
        self.wait_params()
        while self._next < len(self.plan.buckets) * self._rounds:
            self._start_next()
        self._complete(0)
        self._check_counts()
        unused = [
            shard.name for number, shard in enumerate(self.shards) if number not in self._took_part
        ]
        self._warned_unused = self._warned_unused or warn_unused_params(unused)
        for work in self._running:
            work.wait()
        self._running.clear()
        self._shared_gradients.all_reduce()
        return self.local_params

    def _check_counts(self) -> None:
        """Assert that no contribution came after the reduction of its bucket had started: it would
        be lost."""
        # under ZeRO-2 the counts are those of the next microbatch
        least = self._expected if self.drops_gradients else [0] * len(self._left)
        extra = [
            n
            for n, (left, at_least) in enumerate(zip(self._left, least, strict=True))
            if left < at_least
        ]
        assert not extra, (
            "more gradient contributions than backward passes: "
            f"{[self.shards[n].name for n in extra[:5]]}"
        )

    def _start_next(self) -> None:
        """Start the next reduction; parameters of its bucket without a contribution get zeros."""
        index = self._next % len(self.plan.buckets)
        buffer, members = self._buffer(index), self.plan.buckets[index].members
        for number in members:
            if self._fresh[number]:
                self._view(number).zero_()
            else:
                self._took_part.add(number)
        if self._records_bits:
            self._bits.append(sum_bits(buffer))
        if self._records_norms:
            self._norms.append(
                (index, torch._foreach_norm([self._view(number) for number in members]))
            )
        division = self._division(index)
        if self.divided:
            started = start_bucket_reduce_scatter(
                buffer, division.slices, tag=2 * self._next, dtype=self.reduce_dtype
            )
            self._sums.append((self._next, started))
            self._renew(index)
            self._complete(IN_FLIGHT)
        elif (work := start_all_reduce_(buffer, division.replicas)) is not None:
            self._running.append(work)
        self._next += 1

    def _renew(self, index: int) -> None:
        """Prepare a bucket whose reduction has started for the next microbatch (ZeRO-2)."""
        if not self.drops_gradients:
            return
        self._buffers[index] = None
        for number in self.plan.buckets[index].members:
            self._fresh[number] = True
            self._left[number] += self._expected[number]  # below that if some came early
        self._waiting[index] = sum(
            self._left[number] > 0 for number in self.plan.buckets[index].members
        )

    def _complete(self, most: int) -> None:
        """Wait for the oldest reductions until at most `most` are in flight, and start the
        all-reduce of their slices over the replicas."""
        while len(self._sums) > most:
            number, started = self._sums.popleft()
            microbatch, index = divmod(number, len(self.plan.buckets))
            part = started.wait()
            if self.drops_gradients:
                local_gradient = self.gradients[index]
                part = local_gradient.copy_(part) if microbatch == 0 else local_gradient.add_(part)
            if microbatch == self._rounds - 1:
                work = start_all_reduce_(part, self._division(index).replicas)
                self._running += [] if work is None else [work]

    def nonfinite(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank was NaN or infinite before the
        reduction."""
        nonfinite = [
            self.plan.buckets[index].members[place]
            for index, norms in self._norms
            for place in torch.stack(norms).isfinite().logical_not().nonzero().flatten().tolist()
        ]
        return [self.shards[number].name for number in sorted(set(nonfinite))]

    def record_local_gradients(self, *, bits: bool, norms: bool) -> None:
        """Set what following steps record of this rank's gradients before they are reduced."""
        self._records_bits, self._records_norms = bits, norms or self._watch

    def local_gradient_bits(self) -> list[Tensor]:
        """Return the recorded sums over the bits of each bucket, in the order of the
        reductions."""
        return self._bits

    def local_gradient_norm(self) -> float:
        """Return the norm of this rank's gradients before their reductions; 0 if not recorded."""
        norms = [norm.double() for _, bucket_norms in self._norms for norm in bucket_norms]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    # --- weights

    def all_gather_params(self) -> None:
        """All-gather the updated weights; forward waits where it reads them."""
        self.wait_params()
        if not self.divided:
            return  # the weights were updated where they are read
        self.param_all_gather.start()
        if not self._waits_in_forward:
            self.wait_params()

    def wait_params(self) -> None:
        """Wait until all weights are up to date."""
        self.param_all_gather.wait_params()

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Return sums over the bytes of the weights; ranks that compute other tokens with them have
        the same."""
        self.wait_params()
        weights = [
            (shard, weight.data) for shard, weight in zip(self.shards, self.parameters, strict=True)
        ]
        weights_by_grid = {
            grid: [weight for shard, weight in (*weights, *self.frozen) if shard.grid == grid]
            for grid in self.divisions
        }
        return [
            (byte_checksum(tensors), self._same_weights_group(grid))
            for grid, tensors in weights_by_grid.items()
        ]

    def gathered_weights(self) -> Sequence[tuple[Shard, Tensor]]:
        """Return all trained weights under ZeRO, where each rank updates slices of them."""
        if not self.divided:
            return []
        return [
            (shard, weight.data) for shard, weight in zip(self.shards, self.parameters, strict=True)
        ]

    # --- layout

    def _find_runs(
        self, model: nn.Module, trained: Parameters
    ) -> dict[TensorParallel, list[tuple[int, ...]]]:
        """Return the numbers of the trained weights that lie one after the other in each layer's
        matmul."""
        number_of = {
            id(getattr(module, name)): number for number, (_, module, name) in enumerate(trained)
        }
        kinds = [self._kind(shard) for shard in self.shards]
        return {
            layer: _runs(
                [number_of.get(id(weight)) for weight in layer.accumulated_parameters()], kinds
            )
            for layer in model.modules()
            if isinstance(layer, TensorParallel)
        }

    def _plan_buckets(
        self, runs: Iterable[Sequence[tuple[int, ...]]], bucket_numel: int, alignment: int
    ) -> BucketPlan:
        return plan_buckets(
            [shard.numel for shard in self.shards],
            bucket_numel=bucket_numel,
            align=alignment,
            end_align=alignment
            * lcm(*(division.slices.size for division in self.divisions.values())),
            alone=[
                n for n, shard in enumerate(self.shards) if self.divided and len(shard.stages) > 1
            ],
            contiguous=list({run for own in runs for run in own if len(run) > 1}),
            kinds=[self._kind(shard) for shard in self.shards],
            whole_in={
                self._kind(shard): self.divisions[shard.grid].slices.size
                for shard in self.shards
                if self._is_aligned(shard)
            },
        )

    def _kind(self, shard: Shard) -> tuple[str, ...]:
        """Return what all parameters of a bucket have in common: the grid, the dtype, the axes over
        which their slices are summed, and whether they must be whole in a slice."""
        several = (axis for axis in tp_reduce_axes(shard) if self.mesh.over(axis).size > 1)
        aligned = ("matrices",) if self._is_aligned(shard) else ()
        return shard.grid, shard.dtype, *(several if self.divided else ()), *aligned

    def _is_aligned(self, shard: Shard) -> bool:
        """Return whether slices may not end inside this parameter."""
        return self._aligns_matrices and is_hidden_matrix(shard.name, shard.inputs)

    def _division(self, index: int) -> ShardGroups:
        """Return the groups of a bucket."""
        return self.divisions[self._first(index).grid]

    def _first(self, index: int) -> Shard:
        """Return the first parameter of a bucket; all have the same grid."""
        return self.shards[self.plan.buckets[index].members[0]]

    def _in_bucket(self, tensor: Tensor, index: int, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of the plan, of a tensor that holds one bucket."""
        first = self.plan.buckets[index].start
        return tensor[start - first : stop - first]

    def _build_local_params(self) -> list[ShardedParam]:
        if not self.divided:
            return [
                ShardedParam(
                    shard,
                    parameter.data,
                    self._in_bucket(
                        self.gradients[slot.bucket], slot.bucket, slot.start, slot.stop
                    ).view(shard.matrix_shape),
                )
                for shard, parameter, slot in zip(
                    self.shards, self.parameters, self.plan.slots, strict=True
                )
            ]
        groups = [self._division(index).slices for index in range(len(self.plan.buckets))]
        return [
            self._local_part(part)
            for part in local_bucket_parts(
                self.plan, [(group.rank, group.size) for group in groups]
            )
        ]

    def _compare_layouts(self) -> None:
        """Check that all ranks of a reduction sum the same parameters at the same positions.

        Positions are counted within buckets and among those of one grid: ranks that hold the same
        experts may have dense slices of other sizes.
        """
        for grid in self.divisions:
            grid_buckets = [
                index for index in range(len(self.plan.buckets)) if self._first(index).grid == grid
            ]
            places = {}
            for count, index in enumerate(grid_buckets):
                start = self.plan.buckets[index].start
                for number in self.plan.buckets[index].members:
                    slot = self.plan.slots[number]
                    place = (
                        f"at elements {slot.start - start} to {slot.stop - start} of bucket {count}"
                    )
                    places[self.shards[number].name] = place
            check_consistent_across_ranks(places, self._same_weights_group(grid))
        check_slices_consistent_across_ranks(self.local_params, self.mesh)

    def _same_weights_group(self, grid: str) -> Group:
        """Return the ranks that compute other tokens with the same weights of a grid."""
        return self.mesh.over(*SLICES_OVER[grid], *REPLICAS_OVER[grid])

    def _local_part(self, part: BucketSlice) -> ShardedParam:
        shard = self.shards[part.number]
        local_shard = replace(shard, flat=part.flat, cut=(*shard.cut, *SLICES_OVER[shard.grid]))
        index = part.bucket
        weight = self._in_bucket(self.weights[index], index, part.start, part.stop)
        if not self.drops_gradients:
            gradient = self._in_bucket(self.gradients[index], index, part.start, part.stop)
            return ShardedParam(local_shard, weight, gradient)
        slices = self._division(index).slices
        first, _ = bucket_slice(self.plan.buckets[index], slices.rank, slices.size)
        gradient = self.gradients[index][part.start - first : part.stop - first]
        return ShardedParam(local_shard, weight, gradient)

    def _buffer(self, index: int) -> Tensor:
        """Return the unreduced gradients of a bucket; under ZeRO-2 a temporary buffer."""
        buffer = self._buffers[index]
        if buffer is None:
            bucket = self.plan.buckets[index]
            numel, gradients = bucket.stop - bucket.start, self.gradients[index]
            # the bits of padding must be known if they are recorded
            buffer = (
                gradients.new_zeros(numel) if self._records_bits else gradients.new_empty(numel)
            )
            self._buffers[index] = buffer
        return buffer

    def _view(self, number: int) -> Tensor:
        slot = self.plan.slots[number]
        flat = self._in_bucket(self._buffer(slot.bucket), slot.bucket, slot.start, slot.stop)
        return flat.view_as(self.parameters[number])

    def _stack(self, numbers: Sequence[int]) -> Stack:
        first, last = self.plan.slots[numbers[0]], self.plan.slots[numbers[-1]]
        start = self.plan.buckets[first.bucket].start
        columns = self.shards[numbers[0]].matrix_shape[-1]
        return Stack(tuple(numbers), first.bucket, first.start - start, last.stop - start, columns)

    def _parts(self, layer: TensorParallel, runs: Sequence[Sequence[int]]) -> list[Stack | Frozen]:
        """Return the rows of a layer's matrix: the trained ones in as few stacks as its runs allow,
        and the frozen ones."""
        run_from = {id(self.parameters[run[0]]): run for run in runs}
        inside = {id(self.parameters[number]) for run in runs for number in run[1:]}
        return [
            self._stack(run_from[id(weight)]) if id(weight) in run_from else Frozen(weight.shape[0])
            for weight in layer.accumulated_parameters()
            if id(weight) not in inside
        ]

    def _connect(
        self,
        layers: dict[TensorParallel, list[Stack | Frozen]],
        chunks: Sequence[nn.Module],
        weight_grads: Sequence[WeightGradStore],
    ) -> list[int]:
        """Register gradient accumulators and hooks; return how often each parameter contributes in
        one microbatch."""
        uses, passes = (
            [0] * len(self.shards),
            {k: v for chunk in chunks for k, v in count_forward_passes(chunk).items()},
        )
        stores = {
            layer: store
            for chunk, store in zip(chunks, weight_grads, strict=False)
            for layer in chunk.modules()
        }
        for layer, parts in layers.items():
            grad_accumulator = BucketGradAccumulator(parts, self)
            store = stores.get(layer)
            layer.grad_accumulator = (
                grad_accumulator if store is None else store.wrap(grad_accumulator)
            )
            for number in (number for stack in grad_accumulator.stacks for number in stack.numbers):
                uses[number] += passes.get(layer, 1)
        held = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks]
        for number, parameter in enumerate(self.parameters):
            if uses[number] == 0:
                parameter.register_post_accumulate_grad_hook(self._hook(number))
                # each chunk has a backward of its own
                uses[number] = sum(id(parameter) in each for each in held)
        return uses

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        # The garbage collector does not see the hooks of a parameter that torch references: a
        # strong reference in a hook would keep this object forever, with its process groups, their
        # threads and their sockets.
        self_ref = weakref.ref(self)

        def add(parameter: Tensor) -> None:
            owner = self_ref()
            assert owner is not None and parameter.grad is not None
            total = owner._view(number)
            if owner.is_fresh((number,)):
                total.copy_(parameter.grad)
            else:
                total.add_(parameter.grad)
            parameter.grad = None
            owner.contributed((number,))

        return add


def _runs(numbers: Sequence[int | None], kinds: Sequence[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """Split the weights of one matmul where their kind changes and at frozen ones (None)."""
    runs: list[tuple[int, ...]] = []
    before: int | None = None
    for number in numbers:
        if number is not None and before is not None and kinds[before] == kinds[number]:
            runs[-1] = (*runs[-1], number)
        elif number is not None:
            runs.append((number,))
        before = number
    return runs


def _allocate_buckets(
    lengths: Sequence[int], dtypes: Sequence[str], device: torch.device
) -> list[Tensor]:
    """Return the memory of each bucket, in one flat buffer per dtype."""
    starts, totals = flat_buffer_offsets(lengths, dtypes)
    buffers = {
        name: torch.zeros(numel, dtype=DTYPES[name], device=device)
        for name, numel in totals.items()
    }
    return [
        buffers[name][start : start + length]
        for start, length, name in zip(starts, lengths, dtypes, strict=True)
    ]


def _allocate_frozen(
    model: nn.Module, frozen: Parameters, device: torch.device
) -> list[tuple[Shard, Tensor]]:
    """Give every frozen parameter memory of its own; return them."""
    memory = [
        torch.zeros(shard.numel, dtype=DTYPES[shard.dtype], device=device) for shard, _, _ in frozen
    ]
    params = _move_params_into(memory, model, frozen)
    return [(shard, param.data) for (shard, _, _), param in zip(frozen, params, strict=True)]


def _move_params_into(
    places: Sequence[Tensor], model: nn.Module, parameters: Parameters
) -> list[nn.Parameter]:
    """Move every parameter into its memory; a parameter that two layers share stays shared."""
    moved: dict[int, nn.Parameter] = {}
    new = []
    for (shard, module, name), place in zip(parameters, places, strict=True):
        old = getattr(module, name)
        view = place.view(shard.matrix_shape)
        if not old.is_meta:
            view.copy_(old.detach())
        moved[id(old)] = nn.Parameter(view, requires_grad=old.requires_grad)
        new.append(moved[id(old)])
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and id(old) in moved:
                module._parameters[name] = moved[id(old)]
    return new

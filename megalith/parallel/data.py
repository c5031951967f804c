"""Data parallelism: weights and gradients in flat buffers, gradients summed bucket by bucket while
backward goes on.

With ZeRO the ranks that sum also divide: each owns an equal slice of every bucket, updates its
weights there, and sends them to the others while the next forward runs.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.kernels.embedding import add_rows_
from megalith.kernels.grouped_linear import Groups, put_grouped_product_
from megalith.kernels.linear import add_product_, weight_grad
from megalith.kernels.matmul import mm
from megalith.parallel.alike import check_consistent_across_ranks
from megalith.parallel.engine import (
    SHARD_AXES,
    Parameters,
    ShardedParam,
    check_slices_consistent_across_ranks,
    divide_frozen,
    sum_of_bytes,
    sum_shared_slices,
    tensor_axes,
    warn_of_zeros,
)
from megalith.parallel.group import Group, alone, start_all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.publish import ParamAllGather
from megalith.parallel.recompute import passes_of
from megalith.parallel.slices import SliceSum, start_sum
from megalith.parallel.tensor import TensorParallel
from megalith.plan.buckets import (
    BucketPlan,
    BucketSlice,
    local_bucket_parts,
    plan_buckets,
    slice_of,
)
from megalith.plan.shards import Shard

SLICES_OVER = {"dense": SHARD_AXES, "expert": ("edp_shard",)}
REPLICAS_OVER = {"dense": ("dp_replica",), "expert": ("edp_replica",)}
"""By grid: axes along which ranks divide the slices of what they all compute with, and along which
they repeat them."""

IN_FLIGHT = 2
"""Sums of buckets on their way at once; each holds what it receives. Two, so that the link never
waits for the next."""


@dataclass(frozen=True, slots=True)
class Division:
    """Which ranks divide optimizer state and gradients of what lies on a grid, and which hold the
    same slices."""

    slices: Group
    """Ranks that own different slices; alone when nothing is divided."""

    replicas: Group
    """Ranks that own the same slices and computed other tokens."""


def division_of(zero: int, mesh: Mesh, grid: str = "dense") -> Division:
    """How ranks divide what lies on a grid under `parallel.zero`; 2 and 3 as 1.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.
    """
    slices, replicas = SLICES_OVER[grid], REPLICAS_OVER[grid]
    if zero == 0 or mesh.over(*slices).size == 1:
        return Division(alone(*slices), mesh.over(*replicas, *slices))
    return Division(mesh.over(*slices), mesh.over(*replicas))


@dataclass(frozen=True, slots=True)
class Stack:
    """Weights whose gradient one product writes, as one matrix without gaps in one bucket."""

    numbers: tuple[int, ...]
    bucket: int
    start: int
    stop: int
    """Elements, counted from the start of the bucket."""

    columns: int

    @property
    def rows(self) -> int:
        """Outputs of all its weights."""
        return (self.stop - self.start) // self.columns


@dataclass(frozen=True, slots=True)
class Frozen:
    """Weights of a matmul that are not trained, and have no place in the buffer."""

    rows: int


class BucketGradAccumulator:
    """Puts the gradient of one layer's weights straight into their slots of the flat buffer.

    The first contribution of a step overwrites what the step before left there, so that nothing has
    to be zeroed.
    """

    def __init__(self, parts: Sequence[Stack | Frozen], engine: "BucketedDataParallel") -> None:
        """`parts`: the rows of the layer's matrix, in order."""
        self.stacks, self.engine = tuple(part for part in parts if isinstance(part, Stack)), engine
        self.columns = self.stacks[0].columns
        self.rows_of = [part.rows for part in parts]
        self.trained = [isinstance(part, Stack) for part in parts]

    def product(self, x: Tensor, dy: Tensor) -> None:
        """Add `dy.T @ x`: x [t, i], dy [t, o]."""
        for stack, part in self._shares(dy.split(self.rows_of, dim=1)):
            total = self.engine.total(stack)
            if not self.engine.is_fresh(stack.numbers):
                add_product_(total, x, part)
            elif total.dtype == dy.dtype:
                mm(part.t(), x, out=total)
            else:
                total.copy_(weight_grad(part, x))
            self.engine.contributed(stack.numbers)

    def grouped_product(self, x: Tensor, dy: Tensor, groups: Groups) -> None:
        """Add each expert's `dy.T @ x`: x [r, i], dy [r, o], for one parameter."""
        (stack,) = self.stacks
        total = self.engine.total(stack)
        put_grouped_product_(total, x, dy, groups, fresh=self.engine.is_fresh(stack.numbers))
        self.engine.contributed(stack.numbers)

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready: dw [o, i]."""
        for stack, part in self._shares(dw.view(-1, self.columns).split(self.rows_of)):
            total = self.engine.total(stack)
            if self.engine.is_fresh(stack.numbers):
                total.copy_(part)
            else:
                total.add_(part)
            self.engine.contributed(stack.numbers)

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`."""
        (stack,) = self.stacks
        total = self.engine.total(stack)
        if self.engine.is_fresh(stack.numbers):
            total.zero_()
        add_rows_(total, rows, dy)
        self.engine.contributed(stack.numbers)

    def _shares(self, parts: Sequence[Tensor]) -> Iterator[tuple[Stack, Tensor]]:
        """Each stack with its part; what belongs to frozen weights is nobody's."""
        return zip(
            self.stacks,
            (part for part, trained in zip(parts, self.trained, strict=True) if trained),
            strict=True,
        )


class BucketedDataParallel:
    """Holds a model's weights and gradients in flat buffers and sums the gradients over every rank
    with the same slice.

    Weight matrices hand their gradients over through sinks, other parameters through autograd. A
    parameter is ready after its last contribution of the step; a bucket whose parameters are ready
    starts its sum over dp and cp, in the order of the plan on every rank, while backward goes on.
    Slices that tensor-parallel ranks or stages share are summed over those ranks at the end, as
    their `Shard`s say. Sums, never means: the loss was scaled once.

    zero=1: the sum of a bucket ends as one slice per rank, and the updated slices are sent back
    bucket by bucket in the order of the next forward, whose layers wait for what they read. zero=2:
    a bucket's gradients live until they are summed, after every microbatch. Buckets then hold only
    parameters that are summed over the same tensor-parallel axes, so that slices of ranks whose
    other parameters have other sizes still coincide.

    Frozen parameters (`requires_grad` was False) have memory of their own on every rank, and no
    part in any of this.

    Sources: Li et al. 2020, arXiv:2006.15704, section 3.2 (overlap); Rajbhandari et al. 2019,
    arXiv:1910.02054 (ZeRO).
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        mesh: Mesh,
        *,
        device: torch.device,
        gradient_dtype: torch.dtype,
        bucket_numel: int,
        overlap: bool,
        sinks: bool = True,
        zero: int = 0,
        reduce_dtype: torch.dtype | None = None,
        chunks: Sequence[nn.Module] = (),
        watch: bool = False,
    ) -> None:
        """`reduce_dtype`: what gradients travel in; None: what they are. `chunks`: the parts of
        the model whose forward is called; without any, `all_gather_params` waits. `watch`: note
        which gradients are not finite before they are summed."""
        self.mesh, self.overlap, self.reduce_dtype, self.watch = mesh, overlap, reduce_dtype, watch
        trained, frozen = divide_frozen(parameters)
        self.shards = [shard for shard, _, _ in trained]
        grids = sorted({"dense", *(shard.grid for shard, _, _ in parameters)})
        self.divisions = {grid: division_of(zero, mesh, grid) for grid in grids}
        sizes = [division.slices.size for division in self.divisions.values()]
        self.divided = max(sizes) > 1
        """Whether a rank owns less than it computes with."""
        self.drops_gradients = zero == 2 and self.divided
        """A rank keeps the gradients of its own slices only, and of a bucket until it has been
        summed."""
        layers = [layer for layer in model.modules() if isinstance(layer, TensorParallel)]
        number_of = {
            id(getattr(module, name)): number for number, (_, module, name) in enumerate(trained)
        }
        kinds = [self._kind(shard) for shard in self.shards]
        runs = {
            layer: _runs(
                [number_of.get(id(weight)) for weight in layer.accumulated_parameters()], kinds
            )
            for layer in layers
        }
        self.plan: BucketPlan = plan_buckets(
            [shard.numel for shard in self.shards],
            bucket_numel=bucket_numel,
            end_align=64 * lcm(*sizes),
            alone=[
                n for n, shard in enumerate(self.shards) if self.divided and len(shard.stages) > 1
            ],
            together=list({run for layer in layers for run in runs[layer] if len(run) > 1}),
            kinds=kinds,
        )
        # A stage that only hands on what it receives has no parameters, and of their dtype there is
        # nothing to store.
        dtype = getattr(trained[0][1], trained[0][2]).dtype if trained else gradient_dtype
        self.weights = torch.zeros(self.plan.numel, dtype=dtype, device=device)
        places = [self.weights[slot.start : slot.stop] for slot in self.plan.slots]
        self.parameters = _move_into(places, model, trained)
        apart = [
            torch.zeros(shard.numel, dtype=getattr(m, name).dtype, device=device)
            for shard, m, name in frozen
        ]
        still = _move_into(apart, model, frozen)
        self.frozen = [(shard, one.data) for (shard, _, _), one in zip(frozen, still, strict=True)]
        self.kept, numel = self._places_of_gradients()
        self.gradients = torch.zeros(numel, dtype=gradient_dtype, device=device)
        self.local_params = self._build_local_params()
        self._compare_layouts()
        self._buffers: list[Tensor | None] = [
            None if self.drops_gradients else self.gradients[bucket.start : bucket.stop]
            for bucket in self.plan.buckets
        ]
        parts = {layer: self._parts(layer, runs[layer]) for layer in layers if runs[layer]}
        self._uses = self._connect(
            parts, list(model) if isinstance(model, nn.ModuleList) else [model], sinks
        )
        self._begin(0)
        self._sums: deque[tuple[int, SliceSum]] = deque()
        self._running: list[dist.Work] = []
        self._told = False
        slices = [self._division(index).slices for index in range(len(self.plan.buckets))]
        self.param_all_gather = ParamAllGather(self.weights, self.plan, slices)
        self._waits_in_forward = self.divided and overlap and bool(chunks)
        if self._waits_in_forward:
            for chunk in chunks:
                self.param_all_gather.wait_in(chunk, self.parameters)

    # --- one step

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""
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

    def total(self, stack: Stack) -> Tensor:
        """Where the gradient of these weights is added up now: [rows, columns]."""
        buffer = self._buffer(stack.bucket)
        return buffer[stack.start : stack.stop].view(-1, stack.columns)

    def is_fresh(self, numbers: Sequence[int]) -> bool:
        """Whether these slots still hold what was there before; the caller overwrites them now."""
        fresh = self._fresh[numbers[0]]
        for number in numbers:
            self._fresh[number] = False
        return fresh

    def contributed(self, numbers: Sequence[int]) -> None:
        """Note one more contribution to these parameters; start every bucket that is full."""
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
        """Wait for all sums; every slice of mine with its whole gradient.

        A parameter that had no part in the loss gets zeros, and takes part in the sums like any
        other; the first step with such parameters is told about. Without overlap every sum of zero
        0 and 1 starts here, behind no backward; under zero 1 `IN_FLIGHT` of them are still on their
        way at once, so that the link does not wait between two.
        """
        # a layer that forward left out has not waited, and its weights are about to be overwritten
        self.wait_params()
        while self._next < len(self.plan.buckets) * self._rounds:
            self._start_next()
        self._complete(0)
        self._check_counts()
        unused = [
            shard.name for number, shard in enumerate(self.shards) if number not in self._took_part
        ]
        self._told = self._told or warn_of_zeros(unused)
        for work in self._running:
            work.wait()
        self._running.clear()
        sum_shared_slices(self.local_params, self.mesh)
        return self.local_params

    def _check_counts(self) -> None:
        """A contribution that came after its bucket was on its way would be lost, or lose
        others."""
        least = (
            self._expected if self.drops_gradients else [0] * len(self._left)
        )  # ZeRO-2 expects the next round
        surplus = [
            n
            for n, (left, at_least) in enumerate(zip(self._left, least, strict=True))
            if left < at_least
        ]
        assert not surplus, (
            f"more gradients than backward passes: {[self.shards[n].name for n in surplus[:5]]}"
        )

    def _start_next(self) -> None:
        """InitialValues the next sum; parameters of its bucket that had no part are zero."""
        index = self._next % len(self.plan.buckets)
        buffer, members = self._buffer(index), self.plan.buckets[index].members
        for number in members:
            if self._fresh[number]:
                self._view(number).zero_()
            else:
                self._took_part.add(number)
        if self.watch:
            self._norms.append(
                (index, torch._foreach_norm([self._view(number) for number in members]))
            )
        division = self._division(index)
        if self.divided:
            started = start_sum(
                buffer, division.slices, tag=2 * self._next, dtype=self.reduce_dtype
            )
            self._sums.append((self._next, started))
            self._renew(index)
            self._complete(IN_FLIGHT)
        elif (work := start_all_reduce_(buffer, division.replicas)) is not None:
            self._running.append(work)
        self._next += 1

    def _renew(self, index: int) -> None:
        """Expect the next microbatch's contributions to a bucket whose sum has started (ZeRO-2)."""
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
        """Wait for the oldest sums until at most so many are on their way, and hand their slices on
        to the replicas."""
        while len(self._sums) > most:
            number, started = self._sums.popleft()
            turn, index = divmod(number, len(self.plan.buckets))
            part = started.wait()
            if self.drops_gradients:
                first, _ = self._slice(index)
                kept = self.gradients[first : first + part.numel()]
                part = kept.copy_(part) if turn == 0 else kept.add_(part)
            if turn == self._rounds - 1:
                work = start_all_reduce_(part, self._division(index).replicas)
                self._running += [] if work is None else [work]

    def nonfinite(self) -> list[str]:
        """Names of parameters whose gradient here was not finite before any other rank's was added;
        needs `watch`."""
        bad = [
            self.plan.buckets[index].members[place]
            for index, norms in self._norms
            for place in torch.stack(norms).isfinite().logical_not().nonzero().flatten().tolist()
        ]
        return [self.shards[number].name for number in sorted(set(bad))]

    # --- weights

    def all_gather_params(self) -> None:
        """Send my slices of the updated weights to the ranks that compute with them; forward waits
        where it reads."""
        self.wait_params()
        if not self.divided:
            return  # the weights were updated where they are read
        self.param_all_gather.start()
        if not self._waits_in_forward:
            self.wait_params()

    def wait_params(self) -> None:
        """Wait until the weights of all slices have arrived."""
        self.param_all_gather.wait_params()

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Sums over the bytes of the weights; ranks that compute other tokens with them have the
        same."""
        self.wait_params()
        weights = [
            (shard, one.data) for shard, one in zip(self.shards, self.parameters, strict=True)
        ]
        held = {
            grid: [one for shard, one in (*weights, *self.frozen) if shard.grid == grid]
            for grid in self.divisions
        }
        return [(sum_of_bytes(tensors), self._alike(grid)) for grid, tensors in held.items()]

    # --- where things lie

    def _kind(self, shard: Shard) -> tuple[str, ...]:
        """What all parameters of a bucket have in common: over which ranks their slices are
        summed."""
        several = (axis for axis in tensor_axes(shard) if self.mesh.over(axis).size > 1)
        return shard.grid, *(several if self.divided else ())

    def _division(self, index: int) -> Division:
        """Which ranks divide a bucket."""
        return self.divisions[self._first(index).grid]

    def _first(self, index: int) -> Shard:
        """A parameter of a bucket, which has one grid."""
        return self.shards[self.plan.buckets[index].members[0]]

    def _places_of_gradients(self) -> tuple[list[int], int]:
        """Where the gradients of each bucket start, and how many there are in all; of my slices
        alone under ZeRO-2."""
        lengths = [
            (bucket.stop - bucket.start)
            // (self._division(index).slices.size if self.drops_gradients else 1)
            for index, bucket in enumerate(self.plan.buckets)
        ]
        return list(accumulate(lengths, initial=0))[:-1], sum(lengths)

    def _build_local_params(self) -> list[ShardedParam]:
        if not self.divided:
            return [
                ShardedParam(
                    shard,
                    parameter.data,
                    self.gradients[slot.start : slot.stop].view(shard.matrix_shape),
                )
                for shard, parameter, slot in zip(
                    self.shards, self.parameters, self.plan.slots, strict=True
                )
            ]
        places = [self._division(index).slices for index in range(len(self.plan.buckets))]
        return [
            self._local_part(part)
            for part in local_bucket_parts(self.plan, [(one.rank, one.size) for one in places])
        ]

    def _compare_layouts(self) -> None:
        """Make sure that what is summed in one message is the same thing on all ranks of the sum.

        Places are told within buckets and among those of one grid: ranks that hold the same experts
        may have dense slices of other sizes between them.
        """
        for grid in self.divisions:
            mine = [
                index for index in range(len(self.plan.buckets)) if self._first(index).grid == grid
            ]
            places = {}
            for count, index in enumerate(mine):
                start = self.plan.buckets[index].start
                for number in self.plan.buckets[index].members:
                    slot = self.plan.slots[number]
                    here = (
                        f"at elements {slot.start - start} to {slot.stop - start} of bucket {count}"
                    )
                    places[self.shards[number].name] = here
            check_consistent_across_ranks(places, self._alike(grid))
        check_slices_consistent_across_ranks(self.local_params, self.mesh)

    def _alike(self, grid: str) -> Group:
        """Ranks that compute other tokens with the same slices of what lies on a grid."""
        return self.mesh.over(*SLICES_OVER[grid], *REPLICAS_OVER[grid])

    def _local_part(self, part: BucketSlice) -> ShardedParam:
        shard = self.shards[part.number]
        mine = replace(shard, flat=part.flat, cut=(*shard.cut, *SLICES_OVER[shard.grid]))
        kept, first = self._slice(part.bucket)
        start = kept + part.start - first
        gradient = self.gradients[start : start + part.stop - part.start]
        return ShardedParam(mine, self.weights[part.start : part.stop], gradient)

    def _slice(self, index: int) -> tuple[int, int]:
        """Where my slice of a bucket starts: in `gradients`, and in the flat buffer of all
        weights."""
        slices, bucket = self._division(index).slices, self.plan.buckets[index]
        start, _ = slice_of(bucket, slices.rank, slices.size)
        return self.kept[index] + (0 if self.drops_gradients else start - bucket.start), start

    def _buffer(self, index: int) -> Tensor:
        """The gradients of a bucket before they are summed; under ZeRO-2 memory that goes when they
        have been."""
        buffer = self._buffers[index]
        if buffer is None:
            bucket = self.plan.buckets[index]
            buffer = self.gradients.new_empty(bucket.stop - bucket.start)
            self._buffers[index] = buffer
        return buffer

    def _view(self, number: int) -> Tensor:
        slot = self.plan.slots[number]
        start = self.plan.buckets[slot.bucket].start
        return self._buffer(slot.bucket)[slot.start - start : slot.stop - start].view(
            self.shards[number].matrix_shape
        )

    def _stack(self, numbers: Sequence[int]) -> Stack:
        first, last = self.plan.slots[numbers[0]], self.plan.slots[numbers[-1]]
        start = self.plan.buckets[first.bucket].start
        columns = self.shards[numbers[0]].matrix_shape[-1]
        return Stack(tuple(numbers), first.bucket, first.start - start, last.stop - start, columns)

    def _parts(self, layer: TensorParallel, runs: Sequence[Sequence[int]]) -> list[Stack | Frozen]:
        """The rows of a layer's matrix: what is trained in as few pieces as its runs allow, and
        what is not."""
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
        sinks: bool,
    ) -> list[int]:
        """Let gradients come here; returns how often each parameter contributes in one
        microbatch."""
        uses, passes = (
            [0] * len(self.shards),
            {k: v for chunk in chunks for k, v in passes_of(chunk).items()},
        )
        for layer, parts in layers.items():
            if sinks:
                layer.grad_accumulator = BucketGradAccumulator(parts, self)
                for number in (
                    number for stack in layer.grad_accumulator.stacks for number in stack.numbers
                ):
                    uses[number] += passes.get(layer, 1)
        held = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks]
        for number, parameter in enumerate(self.parameters):
            if uses[number] == 0:
                parameter.register_post_accumulate_grad_hook(self._hook(number))
                uses[number] = sum(
                    id(parameter) in each for each in held
                )  # each chunk has a backward of its own
        return uses

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        # A parameter that torch refers to, too, hides its hooks from the garbage collector: a
        # strong reference in one would keep this object for ever, and with it process groups, their
        # threads and their sockets.
        mine = weakref.ref(self)

        def add(parameter: Tensor) -> None:
            owner = mine()
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
    """The weights of one matmul, cut where their kind changes, and at those that are frozen
    (None)."""
    runs: list[tuple[int, ...]] = []
    before: int | None = None
    for number in numbers:
        if number is not None and before is not None and kinds[before] == kinds[number]:
            runs[-1] = (*runs[-1], number)
        elif number is not None:
            runs.append((number,))
        before = number
    return runs


def _move_into(
    places: Sequence[Tensor], model: nn.Module, parameters: Parameters
) -> list[nn.Parameter]:
    """Give every parameter its place as memory; a parameter that two layers share stays shared."""
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

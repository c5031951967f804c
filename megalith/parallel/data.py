"""Data parallelism: weights and gradients in flat buffers, gradients summed bucket by bucket while backward goes on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.kernels.embedding import add_rows_
from megalith.kernels.linear import add_product_, weight_grad
from megalith.parallel.group import all_reduce_, start_all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import TensorParallel
from megalith.plan.buckets import BucketPlan, plan_buckets
from megalith.plan.shards import Shard, summed_over


@dataclass(frozen=True, slots=True)
class Owned:
    """A parameter that this rank holds: its slice, its weights and its fp32 or float64 gradient, in one layout."""

    shard: Shard
    weight: Tensor
    gradient: Tensor


class FlatSink:
    """Puts the gradient of one stack of weights straight into their slots of the flat buffer.

    The first contribution of a step overwrites what the step before left there, so that nothing has to be zeroed.
    """

    def __init__(self, numbers: Sequence[int], total: Tensor, engine: "DataParallel") -> None:
        self.numbers, self.total, self.engine = tuple(numbers), total, engine

    def product(self, x: Tensor, dy: Tensor) -> None:
        """Add `dy.T @ x`: x [t, i], dy [t, o]."""
        if not self.engine.is_fresh(self.numbers):
            add_product_(self.total, x, dy)
        elif self.total.dtype == dy.dtype:
            torch.mm(dy.t(), x, out=self.total)
        else:
            self.total.copy_(weight_grad(dy, x))
        self.engine.contributed(self.numbers)

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready: dw [o, i]."""
        if self.engine.is_fresh(self.numbers):
            self.total.copy_(dw.view_as(self.total))
        else:
            self.total.add_(dw.view_as(self.total))
        self.engine.contributed(self.numbers)

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`."""
        if self.engine.is_fresh(self.numbers):
            self.total.zero_()
        add_rows_(self.total, rows, dy)
        self.engine.contributed(self.numbers)


class DataParallel:
    """Holds a model's weights and gradients and sums the gradients over every rank that has the same slice.

    Weight matrices hand their gradients over through sinks, other parameters through autograd. A parameter is ready
    after its last contribution of the step; a bucket whose parameters are ready starts its sum over dp and cp, in the
    order of the plan on every rank, while backward goes on. Slices that tensor-parallel ranks share are summed over
    those ranks at the end, as their `Shard`s say. Sums, never means: the loss was scaled once.

    Source of the overlap: Li et al. 2020, arXiv:2006.15704, section 3.2.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[tuple[Shard, nn.Module, str]], mesh: Mesh, *, device: torch.device,
        gradient_dtype: torch.dtype, bucket_numel: int, overlap: bool, sinks: bool = True,
    ) -> None:  # fmt: skip
        self.mesh, self.overlap = mesh, overlap
        self.shards = [shard for shard, _, _ in parameters]
        layers = [layer for layer in model.modules() if isinstance(layer, TensorParallel)]
        number_of = {id(getattr(module, name)): number for number, (_, module, name) in enumerate(parameters)}
        stacks = {layer: [number_of[id(weight)] for weight in layer.sunk()] for layer in layers}
        self.plan: BucketPlan = plan_buckets(
            [shard.numel for shard in self.shards], bucket_numel=bucket_numel,
            together=list({tuple(stack) for stack in stacks.values() if len(stack) > 1}),
        )  # fmt: skip
        dtype = getattr(parameters[0][1], parameters[0][2]).dtype
        self.weights = torch.zeros(self.plan.numel, dtype=dtype, device=device)
        self.gradients = torch.zeros(self.plan.numel, dtype=gradient_dtype, device=device)
        self.parameters = _move_into(self.weights, model, parameters, self.plan)
        self.owned = [
            Owned(shard, parameter.data, self._view(number))
            for number, (shard, parameter) in enumerate(zip(self.shards, self.parameters, strict=True))
        ]
        self._uses = [0] * len(self.shards)
        sunk: set[int] = set()
        for layer, stack in stacks.items():
            if sinks:
                layer.sink = FlatSink(stack, self._matrix(stack), self)
                sunk.update(stack)
                for number in stack:
                    self._uses[number] += 1
        for number, parameter in enumerate(self.parameters):
            if number not in sunk:
                parameter.register_post_accumulate_grad_hook(self._hook(number))
                self._uses[number] = 1
        self._left = [0] * len(self.shards)
        self._fresh = [True] * len(self.shards)
        self._waiting: list[int] = []
        self._next_bucket = 0
        self._running: list[dist.Work] = []

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""
        self._left = [uses * microbatches for uses in self._uses]
        self._fresh = [True] * len(self.shards)
        self._waiting = [len(bucket.members) for bucket in self.plan.buckets]
        self._next_bucket = 0

    def is_fresh(self, numbers: Sequence[int]) -> bool:
        """Whether these slots still hold the step before; the caller overwrites them now."""
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
        while self.overlap and self._next_bucket < len(self._waiting) and self._waiting[self._next_bucket] == 0:
            self._start_next()

    def finish(self) -> list[Owned]:
        """Wait for all sums; every parameter with its slice and its whole gradient.

        A parameter that had no part in the loss gets zeros, and takes part in the sums like any other.
        """
        for number, fresh in enumerate(self._fresh):
            if fresh:
                self.owned[number].gradient.zero_()
        while self._next_bucket < len(self.plan.buckets):
            self._start_next()
        for work in self._running:
            work.wait()
        self._running.clear()
        self._sum_shared_slices()
        return self.owned

    def publish(self) -> None:
        """Updated weights are already where every rank reads them: nothing is sharded over dp."""

    def _start_next(self) -> None:
        bucket = self.plan.buckets[self._next_bucket]
        work = start_all_reduce_(self.gradients[bucket.start : bucket.stop], self.mesh.dp_cp)
        if work is not None:
            self._running.append(work)
        self._next_bucket += 1

    def _sum_shared_slices(self) -> None:
        """Sum over the tensor-parallel ranks that hold the same slice, one message per set of axes."""
        for axes in (("tp_copy",), ("tp_kv",), ("tp_kv", "tp_copy")):
            group = self.mesh.over(*axes)
            shared = [o.gradient for o in self.owned if _tensor_axes(o.shard) == axes]
            if group.size == 1 or not shared:
                continue
            message = all_reduce_(torch.cat([gradient.flatten() for gradient in shared]), group)
            for gradient, part in zip(shared, message.split([g.numel() for g in shared]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def _view(self, number: int) -> Tensor:
        slot = self.plan.slots[number]
        return self.gradients[slot.start : slot.stop].view(self.shards[number].matrix_shape)

    def _matrix(self, stack: Sequence[int]) -> Tensor:
        """The gradient slots of a stack of weights as one matrix."""
        first, last = self.plan.slots[stack[0]], self.plan.slots[stack[-1]]
        columns = self.shards[stack[0]].matrix_shape[-1]
        return self.gradients[first.start : last.stop].view(-1, columns)

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            total = self.owned[number].gradient
            if self.is_fresh((number,)):
                total.copy_(parameter.grad)
            else:
                total.add_(parameter.grad)
            parameter.grad = None
            self.contributed((number,))

        return add


def _tensor_axes(shard: Shard) -> tuple[str, ...]:
    return tuple(axis for axis in ("tp_kv", "tp_copy") if axis in summed_over(shard))


def _move_into(
    weights: Tensor, model: nn.Module, parameters: Sequence[tuple[Shard, nn.Module, str]], plan: BucketPlan
) -> list[nn.Parameter]:
    """Give every parameter its slot of `weights` as memory; a parameter that two layers share stays shared."""
    moved: dict[int, nn.Parameter] = {}
    new = []
    for (shard, module, name), slot in zip(parameters, plan.slots, strict=True):
        old = getattr(module, name)
        view = weights[slot.start : slot.stop].view(shard.matrix_shape)
        if not old.is_meta:
            view.copy_(old.detach())
        moved[id(old)] = nn.Parameter(view)
        new.append(moved[id(old)])
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and id(old) in moved:
                module._parameters[name] = moved[id(old)]
    return new

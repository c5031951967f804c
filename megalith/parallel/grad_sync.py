"""Interface of data parallelism (`GradSync`), and sums of the gradients that tensor-parallel ranks
or pipeline stages share.

Implementations: parallel/data.py (parallel.zero 0, 1 and 2) and parallel/fsdp.py (3).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.parallel.group import (
    Group,
    all_reduce_,
    check_consistent_across_ranks,
    check_shared_consistent_across_ranks,
    record_collective,
    start_receive,
    start_send,
    track_work,
)
from megalith.parallel.mesh import Mesh
from megalith.plan.buckets import BucketPlan
from megalith.plan.shards import PARTS, Shard, gradient_sum_axes

# Asynchronous reduce-scatter of gradients and all-gather of updated weights, one bucket at a
# time.
#
# On NVIDIA GPUs these are NCCL's reduce-scatter and all-gather. gloo has neither for a single
# tensor: torch emulates them with an all-reduce of a copy, or a gather into a list. So on CPUs
# every rank sends each other rank its slice, directly from and into the buffer. Measured, two ranks
# with 16 MB, torch 2.13: reduce-scatter 6 ms and 2 ms against 27 ms, all-gather 6 ms against 12 ms.


@dataclass(slots=True)
class PendingMessages:
    """Messages in flight. After `wait` their targets may be read and their sources written."""

    started: list[dist.Work]

    def wait(self) -> None:
        """Wait until all messages are complete; call it once."""
        for work in self.started:
            work.wait()
        self.started.clear()


@dataclass(slots=True)
class PendingReduceScatter:
    """Reduce-scatter of one bucket that has been started; `wait` returns this rank's slice."""

    works: PendingMessages
    slices: Tensor
    """The bucket as [ranks, numel of a slice]; this rank's slice becomes the sum."""

    received: Tensor | None
    """The other ranks' terms of this rank's slice, [ranks, numel]; None if the library has summed
    them."""

    rank: int

    def wait(self) -> Tensor:
        """Return this rank's slice of the sum, in the memory of the bucket. Ranks are added in rank
        order, for any bucket."""
        self.works.wait()
        local_slice = self.slices[self.rank]
        if self.received is None:
            return local_slice
        return _add_in_order_(
            local_slice, self.received[: self.rank], self.received[self.rank + 1 :]
        )


def start_bucket_reduce_scatter(
    bucket: Tensor, group: Group, *, tag: int, dtype: torch.dtype | None = None
) -> PendingReduceScatter:
    """Start a reduce-scatter of `bucket` over `group`; each rank gets the sum of its slice, the
    `rank`-th of equal ones.

    The bucket must not be used until `wait`; after that only this rank's slice is valid. `dtype`:
    dtype of the messages, if not the bucket's; received values are added in the bucket's dtype.
    `tag`: equal on all ranks, and different from everything else in flight in the group.
    """
    slices = bucket.view(group.size, -1)
    if bucket.device.type == "cpu":
        sent = slices if dtype is None else slices.to(dtype)
        received = torch.empty_like(sent)
        return PendingReduceScatter(
            _exchange(sent, received, group, tag), slices, received, group.rank
        )
    if dtype is None:
        entry = record_collective(group, "reduce_scatter", bucket)
        work = dist.reduce_scatter_tensor(
            slices[group.rank], bucket, group=group.handle, async_op=True
        )
        return PendingReduceScatter(
            PendingMessages([track_work(entry, work)]), slices, None, group.rank
        )
    sent = bucket.to(dtype)
    received = torch.empty_like(sent)
    entry = record_collective(group, "all_to_all", sent)
    work = dist.all_to_all_single(received, sent, group=group.handle, async_op=True)
    return PendingReduceScatter(
        PendingMessages([track_work(entry, work)]),
        slices,
        received.view(group.size, -1),
        group.rank,
    )


def start_bucket_all_gather(bucket: Tensor, group: Group, *, tag: int) -> PendingMessages:
    """Start an all-gather into `bucket`; each rank's own slice of it is up to date."""
    slices = bucket.view(group.size, -1)
    if bucket.device.type == "cpu":
        return _exchange(slices[group.rank].expand_as(slices), slices, group, tag)
    entry = record_collective(group, "all_gather", bucket)
    work = dist.all_gather_into_tensor(
        bucket, slices[group.rank], group=group.handle, async_op=True
    )
    return PendingMessages([track_work(entry, work)])


def _exchange(sent: Tensor, received: Tensor, group: Group, tag: int) -> PendingMessages:
    """Send row k of `sent` to rank k and receive its row for this rank as row k of `received`; the
    own row is not copied."""
    works: list[dist.Work] = []
    for distance in range(1, group.size):  # no two ranks send to the same one first
        to, source = (group.rank + distance) % group.size, (group.rank - distance) % group.size
        works.append(start_receive(received[source], group, source, tag=tag))
        works.append(start_send(sent[to], group, to, tag=tag))
    return PendingMessages(works)


def sum_over_members_(x: Tensor, group: Group, members: Sequence[int]) -> Tensor:
    """Sum `x` in place over some ranks of `group`, given by their indices in it; only these ranks
    call this.

    All of them add in the same order, so that they get the same bits. Of two, the first sends
    before it receives: NCCL processes the messages of a pair in order, and two ranks that both
    received first would deadlock.
    """
    if len(members) == 1:
        return x
    received = {member: torch.empty_like(x) for member in sorted(members) if member != group.rank}
    works: list[dist.Work] = []
    for member, part in received.items():
        pair = [(start_send, x), (start_receive, part)]
        for start, message in pair if group.rank < member else reversed(pair):
            works.append(start(message, group, member))
    PendingMessages(works).wait()
    before = [part for member, part in received.items() if member < group.rank]
    return _add_in_order_(x, before, list(received.values())[len(before) :])


def _add_in_order_(
    local: Tensor, before: Sequence[Tensor] | Tensor, after: Sequence[Tensor] | Tensor
) -> Tensor:
    """Add the lower ranks' tensors, then the local one, then the higher ranks', in place: bitwise
    equal on all ranks."""
    if len(before):
        first = before[0].to(local.dtype)
        for other in before[1:]:
            first.add_(other)
        torch.add(first, local, out=local)
    for other in after:
        local.add_(other)
    return local


# --- all-gather of updated weights, bucket by bucket, overlapped with the next forward pass


class ParamAllGather:
    """All-gather of weights bucket by bucket; in each every rank of a group has updated its own
    slice.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.1.
    """

    def __init__(
        self, weights: Sequence[Tensor], plan: BucketPlan, slices: Sequence[Group]
    ) -> None:
        """`weights`, `slices`: of each bucket, its memory and the group over which it is
        sharded."""
        self.weights, self.plan, self.slices = weights, plan, slices
        self.pending: dict[int, PendingMessages] = {}
        """Bucket -> its messages, in the order in which they were started."""

    def start(self) -> None:
        """Start the all-gather of every bucket; the previous one must be complete."""
        # reversed: the last bucket holds the first layers
        for index in reversed(range(len(self.plan.buckets))):
            # .data: autograd need not count this as an in-place change
            self.pending[index] = start_bucket_all_gather(
                self.weights[index].data, self.slices[index], tag=2 * index + 1
            )

    def wait_params(self) -> None:
        """Wait until all weights are complete."""
        self._wait_buckets(list(self.pending))

    def wait_in(self, chunk: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Register forward hooks on `chunk`: each layer waits for its own weights before its
        forward, and the chunk waits for the rest after its forward.

        The head is not called as a module: its loss or logits are computed from the output of the
        chunk. `parameters`: all parameters of the buffer, in the order of the plan.
        """
        bucket_of = {
            id(parameter): slot.bucket
            for parameter, slot in zip(parameters, self.plan.slots, strict=True)
        }
        for module in _layers(chunk):
            module.register_forward_pre_hook(self._wait_hook(module, bucket_of))
        chunk.register_forward_hook(self._wait_hook(chunk, bucket_of))

    def _wait_hook(self, module: nn.Module, bucket_of: dict[int, int]) -> Callable[..., None]:
        """Return a hook that waits for the buckets of a module's weights, in the order of their
        messages."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buckets = sorted({bucket_of[id(parameter)] for parameter in trained}, reverse=True)

        def wait(*_: object) -> None:
            if self.pending:
                self._wait_buckets(buckets)

        return wait

    def _wait_buckets(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            works = self.pending.pop(index, None)
            if works is not None:
                works.wait()


def _layers(chunk: nn.Module) -> list[nn.Module]:
    """Return the modules that forward calls: the children of a chunk, and the items of its module
    lists."""
    return [
        layer
        for child in chunk.children()
        for layer in (child if isinstance(child, nn.ModuleList) else [child])
    ]


_log = logging.getLogger(__name__)

SHARD_AXES = ("dp_shard", *PARTS["cp"])
"""Axes over which ZeRO shards parameters."""

TP_REDUCE_AXES = (("tp_copy",), ("tp_kv",), ("tp_kv", "tp_copy"))
"""Sets of tensor-parallel axes over which a gradient may have to be summed."""


@dataclass(frozen=True, slots=True)
class ShardedParam:
    """The part of a parameter that this rank updates: its shard, weight and fp32 or float64
    gradient, both in the same layout."""

    shard: Shard
    weight: Tensor
    gradient: Tensor


class GradSync(Protocol):
    """Interface of data parallelism: gradient reduction and weight all-gather, however weights,
    gradients and optimizer state are sharded.

    One step: `begin_step`; forward and backward of every microbatch; `finish`; the optimizer writes
    `ShardedParam.weight`; `all_gather_params`. Optimizer, clipping and checkpoints use (Shard,
    tensor) pairs only. All methods are collective: every rank of the mesh calls them at the same
    point of its program.
    """

    @property
    def local_params(self) -> Sequence[ShardedParam]:
        """Return every shard that this rank updates, in the order of registration, without empty
        ones.

        All ranks that hold a parameter together own each of its elements, once per group along the
        axes of `copies`. The tensors keep their memory for the life of this object; gradients are
        valid from `finish` to the next `begin_step`.
        """

    @property
    def frozen(self) -> Sequence[tuple[Shard, Tensor]]:
        """Return this rank's shards of the parameters that are not trained, in the order of
        registration, without empty ones.

        These are the parameters whose `requires_grad` was False at construction: they have no
        gradient, no optimizer state and no part in the gradient norm. Only initialization and
        checkpoint loading write them, before `all_gather_params`.
        """

    def begin_step(self, microbatches: int) -> None:
        """Start a step of this many backward passes."""

    def finish(self) -> Sequence[ShardedParam]:
        """Wait for the gradients of the step and return `local_params`, each gradient summed over
        all ranks that hold the same box."""

    def all_gather_params(self) -> None:
        """Send the weights in `local_params` to all ranks that compute with them, after every
        update or other write. May return before the all-gather is complete: layers wait for the
        weights that they read."""

    def wait_params(self) -> None:
        """Wait until all weights of the model are up to date; only readers other than forward need
        this."""

    def nonfinite(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank was NaN or infinite before the
        reduction in the last finished step. Empty unless it was recorded. Not collective."""

    def record_local_gradients(self, *, bits: bool, norms: bool) -> None:
        """Set what following steps record of this rank's gradients before they are reduced. `bits`:
        sums over their bits; `norms`: norms and `nonfinite`, always recorded if built with
        `watch`."""

    def local_gradient_bits(self) -> list[Tensor]:
        """Return the recorded sums over the bits of the last finished step, int64 [], one per
        reduction. Not collective."""

    def local_gradient_norm(self) -> float:
        """Return the L2 norm of this rank's gradients before their reductions in the last finished
        step; NaN or infinite if they are. 0 unless it was recorded. Not collective."""

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Return sums over the bytes of this rank's weights, each with the ranks on which it must
        be equal."""

    def gathered_weights(self) -> Sequence[tuple[Shard, Tensor]]:
        """Return the weights that forward reads and of which this rank updates only slices; valid
        after `wait_params`. Empty if weights are updated, or gathered, where they are used."""


Parameters = Sequence[tuple[Shard, nn.Module, str]]
"""Shard, module and attribute name of each parameter."""


def split_trained_and_frozen(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """Return the trained and the frozen parameters."""
    trained = [entry for entry in parameters if getattr(entry[1], entry[2]).requires_grad]
    return trained, [entry for entry in parameters if not getattr(entry[1], entry[2]).requires_grad]


def can_shard_weights(mesh: Mesh) -> bool:
    """Return whether several ranks compute with the same weights, dense or expert ones, so that
    ZeRO can shard them."""
    return mesh.shard.size > 1 or (
        mesh.grid.experts is not None and mesh.over("edp_shard").size > 1
    )


class SharedGradients:
    """The gradients whose slices several tensor-parallel ranks or pipeline stages hold."""

    def __init__(self, local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
        self.stages = mesh.pp
        self.by_group: list[tuple[Group, list[ShardedParam]]] = []
        for axes in TP_REDUCE_AXES:
            shared = [param for param in local_params if tp_reduce_axes(param.shard) == axes]
            if shared and mesh.over(*axes).size > 1:
                self.by_group.append((mesh.over(*axes), shared))
        # by name: stages register shared tables in different orders
        in_order = sorted(local_params, key=lambda param: param.shard.name)
        self.by_stages = [(param, _stages(param.shard)) for param in in_order]

    def all_reduce(self) -> None:
        """Sum the gradients over the tensor-parallel ranks, then over the pipeline stages.

        One all-reduce per set of tensor-parallel axes. Stages add in a fixed order, so that their
        copies stay bitwise equal.
        """
        for group, params in self.by_group:
            shared = [param.gradient for param in params]
            message = all_reduce_(torch.cat([gradient.flatten() for gradient in shared]), group)
            parts = message.split([gradient.numel() for gradient in shared])
            for gradient, part in zip(shared, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        for param, stages in self.by_stages:
            sum_over_members_(param.gradient, self.stages, stages)


def check_slices_consistent_across_ranks(local_params: Sequence[ShardedParam], mesh: Mesh) -> None:
    """Check that the ranks of `SharedGradients` sum the same slices; collective.

    Raises:
        PlanError: the slices differ.
    """
    local_slices = [
        (param.shard, f"elements {param.shard.flat or (0, param.shard.numel)}")
        for param in local_params
    ]
    for axes in TP_REDUCE_AXES:
        summed = {
            shard.name: place for shard, place in local_slices if tp_reduce_axes(shard) == axes
        }
        check_consistent_across_ranks(summed, mesh.over(*axes))
    shared = {
        shard.name: f"{place}, held by stages {shard.stages}"
        for shard, place in local_slices
        if _stages(shard)[1:]
    }
    check_shared_consistent_across_ranks(shared, mesh.pp)


def warn_unused_params(unused: Sequence[str]) -> bool:
    """Log a warning on this rank that names up to ten parameters without a gradient in a step, and
    return whether there are any."""
    if unused:
        more = f" and {len(unused) - 10} more" if len(unused) > 10 else ""
        _log.warning(
            "%s%s had no gradient in this step, so it is zero on this rank (this warning is logged "
            "once)",
            ", ".join(unused[:10]),
            more,
        )
    return bool(unused)


def byte_checksum(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the bytes of all tensors; equal tensors have equal sums."""
    return sum(
        int(tensor.contiguous().view(torch.uint8).sum(dtype=torch.int64)) for tensor in tensors
    )


_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sum_bits(tensor: Tensor) -> Tensor:
    """Return a sum over the bits of a contiguous tensor, int64 []: any single change of a bit
    changes it. Comparable between tensors with the same offset in their memory.

    Adds words of 8 bytes, modulo 2**64: 3 ms for 29M fp32 values, 0.03 times a sum over bytes
    (measured on one CPU core, torch 2.13).
    """
    values = tensor.detach().view(-1)
    values = values.view(_WORD_DTYPES[values.element_size()])
    per_word = 8 // values.element_size()
    start = min(-values.storage_offset() % per_word, values.numel())  # words are aligned
    stop = start + (values.numel() - start) // per_word * per_word
    parts = [values[:start], values[stop:]]
    if stop > start:
        parts.append(values[start:stop].view(torch.int64))
    return torch.stack(
        [part.sum(dtype=torch.int64) for part in parts if part.numel()]
        or [values.new_zeros((), dtype=torch.int64)]
    ).sum()


def byte_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a sum over the bits of each tensor; the host waits for the device once."""
    if not tensors:
        return []
    sums = torch.stack([sum_bits(tensor.contiguous()) for tensor in tensors])
    return [int(each) for each in sums.tolist()]


def tp_reduce_axes(shard: Shard) -> tuple[str, ...]:
    """Return the tensor-parallel axes over which the gradient of `shard` is summed."""
    return tuple(axis for axis in ("tp_kv", "tp_copy") if axis in gradient_sum_axes(shard))


def _stages(shard: Shard) -> tuple[int, ...]:
    """Return the stages over which the gradient of `shard` is summed. A separate function, so that
    verify/faults/plant.py can break this sum alone."""
    return shard.stages

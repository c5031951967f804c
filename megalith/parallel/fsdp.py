"""ZeRO-3: weights, gradients and optimizer state all divided over ranks, by torch's FSDP2 (`fully_shard`).

Every rank keeps some rows of every matrix. A layer's weights are gathered before its forward and before its backward,
and freed after each; its gradients are summed to the ranks that keep the rows. The only file that knows DTensor.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megalith.errors import PlanError
from megalith.parallel.alike import require_alike
from megalith.parallel.engine import (
    SHARD_AXES,
    Owned,
    Parameters,
    divide_frozen,
    require_alike_slices,
    sum_of_bytes,
    sum_shared_slices,
    warn_of_zeros,
)
from megalith.parallel.group import Group, finished, note, on_its_way, start_all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import VocabEmbedding, VocabHead
from megalith.plan.fsdp import padded_numel, rows_of
from megalith.plan.shards import Shard

DIVIDE_BY = 1.0
"""What FSDP2 divides its sums by. Left alone it takes means; but the loss was divided once, by all ranks' labels."""


class FullySharded:
    """The engine of parallel.zero=3; what training asks of it is written at `Engine` in parallel/engine.py.

    The layers, the embedding and the head are each gathered together; the last norm, and a table that embedding and
    head share, stay gathered from the forward of their chunk to the end of its backward. Gradients are summed after
    every microbatch, so that only those of one layer are ever held whole, and my rows of them are added up in fp32.
    Several replicas of the whole division (HSDP) sum once per step, each layer as soon as its last microbatch is done
    and the layers behind it have been sent.

    Sources: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.3; Zhao et al. 2023, arXiv:2304.11277.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], parameters: Parameters, mesh: Mesh, *,
        device: torch.device, gradient_dtype: torch.dtype, keep_gathered: bool = False, watch: bool = False,
        overlap: bool = True,
    ) -> None:  # fmt: skip
        """`keep_gathered`: free weights at the end of the step only, for pipelines, which run a chunk many times in it.
        `watch`: note which gradients are not finite before they are summed. `overlap`: gather what backward needs next
        and sum over replicas while it computes."""
        self.mesh = mesh
        self.sums = SumsInOrder(mesh.over("dp_replica"), overlap=overlap)
        self.units = [Unit(module, self.sums) for chunk in chunks for module in (*_inner_units(chunk), chunk)]
        unit_of: dict[int, Unit] = {}
        for unit in self.units:  # a chunk comes after the units inside it, and gets what they leave
            for module in unit.module.modules():
                unit_of.setdefault(id(module), unit)
        _refuse_shared_chunks(chunks)
        trained, frozen = divide_frozen(parameters)
        for part in (trained, frozen):
            require_alike({shard.name: f"as {shard.matrix_shape} of {shard.shape}" for shard, _, _ in part}, mesh.dp_cp)
        for chunk in chunks:
            fully_shard_chunk(chunk, mesh.shard, device, gradient_dtype=gradient_dtype, keep_gathered=keep_gathered)
        places: dict[int, list[tuple[Shard, nn.Parameter]]] = {}
        for shard, module, name in trained:
            mine = rows_of(shard, mesh.shard.rank, mesh.shard.size, SHARD_AXES)
            places.setdefault(id(unit_of[id(module)]), []).append((mine, getattr(module, name)))
        found: dict[str, Owned] = {}
        for unit in self.units:
            found |= unit.connect(places.get(id(unit), []), mesh.shard, gradient_dtype=gradient_dtype, watch=watch)
        self.sums.units = _as_backward_ends(self.units, chunks)
        for chunk in chunks if not overlap else ():
            _gather_nothing_ahead(chunk)
        self.owned = [found[shard.name] for shard, _, _ in trained if shard.name in found]
        self.frozen = _my_rows(frozen, mesh.shard)
        require_alike_slices(self.owned, mesh)
        self._told = False

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""
        self.sums.started = 0
        for unit in self.units:
            unit.begin_step(microbatches)

    def finish(self) -> Sequence[Owned]:
        """My rows of every gradient, summed over every rank that holds the same box; zeros where there was none.

        The first step in which a unit had no part in the loss is told about, unless an earlier step gathered the unit:
        then FSDP2 sends zeros, as for what was left out inside a unit, which cannot be told from gradients.
        """
        unused = [name for unit in self.units for name in unit.unused()]
        self._told = self._told or warn_of_zeros(unused)
        for unit in self.units:
            unit.close()
        self.sums.start(ready_only=False)
        self.sums.wait()
        self._free()
        sum_shared_slices(self.owned, self.mesh)
        return self.owned

    def publish(self) -> None:
        """Let the next forward gather the weights anew: the optimizer wrote to the rows that are sent."""
        self._free()

    def settle(self) -> None:
        """Nothing to wait for: weights are gathered where they are used."""

    def nonfinite(self) -> list[str]:
        """Names of parameters whose gradient here was not finite before any other rank's was added; needs `watch`."""
        return sorted({name for unit in self.units for name, finite in unit.seen if not bool(finite)})

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """A sum over the bytes of my rows; replicas have the same."""
        held = [*(owned.weight for owned in self.owned), *(rows for _, rows in self.frozen)]
        return [(sum_of_bytes(held), self.mesh.over("dp_replica"))]

    def _free(self) -> None:
        for unit in self.units:
            unit.fsdp.reshard()


class SumsInOrder:
    """Sums of the units' gradients over replicas: in one order, whatever part a unit had in the loss of a replica."""

    def __init__(self, group: Group, *, overlap: bool) -> None:
        self.group, self.overlap = group, overlap
        self.units: Sequence[Unit] = ()
        self.started = 0
        self._running: list[dist.Work] = []

    def start(self, *, ready_only: bool) -> None:
        """Start what is next, as far as units are ready, or all that is left."""
        while self.started < len(self.units) and not (ready_only and not self.units[self.started].ready):
            gradient = self.units[self.started].gradient
            work = start_all_reduce_(gradient, self.group) if gradient.numel() else None
            self._running += [] if work is None else [work]
            self.started += 1

    def wait(self) -> None:
        """Until all are there."""
        for work in self._running:
            work.wait()
        self._running.clear()


class Unit:
    """Parameters that are gathered together, and the fp32 or float64 gradient of my rows of them."""

    def __init__(self, module: nn.Module, sums: SumsInOrder) -> None:
        self.module, self.sums = module, sums
        self.gradient = torch.empty(0)
        self.names: list[str] = []
        self.seen: list[tuple[str, Tensor]] = []
        """Whether each gradient of this step was finite here before it was summed; empty unless watched."""
        self._expected = self._rounds = 0
        self._sum: Tensor | None = None
        self._read = 0
        self._finite: Tensor | None = None

    @property
    def fsdp(self) -> FSDPModule:
        """The module, once `fully_shard` has changed its class."""
        assert isinstance(self.module, FSDPModule), self.module
        return self.module

    def connect(
        self, parameters: Sequence[tuple[Shard, nn.Parameter]], group: Group, *, gradient_dtype: torch.dtype,
        watch: bool,
    ) -> dict[str, Owned]:  # fmt: skip
        """Let FSDP2 sum the gradients of these rows over `group`, through us. By name: what is mine, empty rows left
        out; weights where FSDP2 sends them from, gradients one after the other in one buffer."""
        self.fsdp.set_custom_all_gather(Gather(group))  # type: ignore[arg-type]  # theirs is a private class
        if not parameters:
            return {}
        self.names = [mine.name for mine, _ in parameters]
        weights = [_local(parameter) for _, parameter in parameters]
        numels = [weight.numel() for weight in weights]
        self.gradient = torch.zeros(sum(numels), dtype=gradient_dtype, device=weights[0].device)
        owned = {}
        for (mine, parameter), weight, part in zip(parameters, weights, self.gradient.split(numels), strict=True):
            assert mine.flat is not None and mine.flat[1] - mine.flat[0] == weight.numel(), (mine, weight.shape)
            sent = padded_numel(mine, group.size)
            parameter.register_post_accumulate_grad_hook(partial(self._add, mine.name, part, sent))
            if weight.numel():
                owned[mine.name] = Owned(mine, weight, part.view_as(weight))
        self.fsdp.set_gradient_divide_factor(DIVIDE_BY)
        self.fsdp.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        self.fsdp.set_reduce_scatter_unused_params(True)  # else what is sent depends on what forward used
        self.fsdp.set_custom_reduce_scatter(Sum(group, self if watch else None))  # type: ignore[arg-type]  # the same
        self.fsdp.set_all_reduce_hook(self._arrived)
        return owned

    def begin_step(self, microbatches: int) -> None:
        """Expect this many sums."""
        self._expected, self._rounds = microbatches, 0
        self.seen.clear()

    def unused(self) -> list[str]:
        """Names of its parameters, if none of them has had a gradient in this step."""
        return self.names if self._rounds == 0 else []

    @property
    def ready(self) -> bool:
        """Whether all its gradients of the step have come, or can come no more."""
        return not self.names or self._rounds == self._expected

    def close(self) -> None:
        """No gradient of the step comes any more; a unit without any has zeros."""
        if self._rounds == 0:
            self.gradient.zero_()

    def look_at(self, message: Tensor, ranks: int) -> None:
        """Note where the gradients of all rows, [ranks, what each of them keeps], are finite before they are summed."""
        self._finite = message.view(ranks, -1).isfinite().all(0)

    def _arrived(self, message: Tensor) -> None:
        """Take the sums of one microbatch before FSDP2 rounds them to the weights' dtype.

        They lie one after the other, each padded to what the first rank keeps. FSDP2 then visits the parameters in
        that order, so `_add` knows which is which.
        """
        self._sum, self._read = message, 0
        for x in (message, self._finite) if message.is_cuda else ():
            if x is not None:  # allocated on the stream that sums, and read on this one
                x.record_stream(torch.cuda.current_stream())

    def _add(self, name: str, gradient: Tensor, sent: int, parameter: Tensor) -> None:
        """Add the next part of the message, of `sent` elements, to a gradient."""
        assert self._sum is not None, name
        part = self._sum[self._read : self._read + gradient.numel()]
        if self._rounds == 0:
            gradient.copy_(part)
        else:
            gradient.add_(part)
        if self._finite is not None:
            self.seen.append((name, self._finite[self._read : self._read + sent].all()))
        parameter.grad = None
        self._read += sent
        if self._read == self._sum.numel():
            self._sum = None
            self._rounds += 1
            if self.sums.overlap:
                self.sums.start(ready_only=True)


class Gather:
    """FSDP2's all-gather, noted for the report of a hang."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Every rank's input, in the order of ranks."""
        entry = note(self.group, "all_gather", input_tensor)
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        finished(entry) if work is None else on_its_way(entry, work)
        return work


class Sum:
    """FSDP2's reduce-scatter, noted for the report of a hang."""

    def __init__(self, group: Group, watched_by: Unit | None) -> None:
        self.group, self.watched_by = group, watched_by

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:  # fmt: skip
        """My part of the sum of all ranks' inputs."""
        if self.watched_by is not None:
            self.watched_by.look_at(input_tensor, self.group.size)
        entry = note(self.group, "reduce_scatter", input_tensor)
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        finished(entry) if work is None else on_its_way(entry, work)
        return work


def fully_shard_chunk(
    chunk: nn.Module, group: Group, device: torch.device, *, gradient_dtype: torch.dtype, keep_gathered: bool
) -> None:
    """Cut the parameters of a model on the meta device over `group`, and give my rows of them memory: zeros.

    The chunk frees nothing after forward: its head is asked for the loss when forward has returned.
    """
    assert group.handle is not None, "a group of one rank has nothing to divide"
    ranks = DeviceMesh.from_group(group.handle, device.type, mesh_dim_names=("shard",))
    assert ranks.get_local_rank() == group.rank, (ranks, group)
    policy = MixedPrecisionPolicy(reduce_dtype=gradient_dtype, cast_forward_inputs=False)
    for module in list(_inner_units(chunk)):
        fully_shard(module, mesh=ranks, reshard_after_forward=not keep_gathered, mp_policy=policy)
        if isinstance(module, VocabEmbedding | VocabHead) and isinstance(module, FSDPModule):
            module.set_unshard_in_backward(False)  # their backward does not read the table
        if isinstance(module, VocabHead):
            register_fsdp_forward_method(module, "loss")
            register_fsdp_forward_method(module, "best")
    fully_shard(chunk, mesh=ranks, reshard_after_forward=False, mp_policy=policy)
    if keep_gathered:
        assert isinstance(chunk, FSDPModule)
        chunk.set_reshard_after_backward(False)
    _give_memory(chunk, device)


def divide_for_forward(
    chunks: Sequence[nn.Module], parameters: Parameters, mesh: Mesh, *,
    device: torch.device, keep_gathered: bool = False,
) -> list[tuple[Shard, Tensor]]:  # fmt: skip
    """Divide the weights of a model on the meta device over `mesh.shard` for forward passes alone.

    Returns my rows of each, for the caller to fill; weights of which I have no row are left out. Unlike
    `FullySharded` it makes no room for gradients, and no backward may follow. `keep_gathered`: as there.
    """
    _refuse_shared_chunks(chunks)
    require_alike({shard.name: f"as {shard.matrix_shape} of {shard.shape}" for shard, _, _ in parameters}, mesh.dp_cp)
    group = mesh.shard
    for chunk in chunks:
        fully_shard_chunk(chunk, group, device, gradient_dtype=torch.float32, keep_gathered=keep_gathered)
        for module in (*_inner_units(chunk), chunk):
            assert isinstance(module, FSDPModule), module
            module.set_custom_all_gather(Gather(group))  # type: ignore[arg-type]  # theirs is a private class
    return _my_rows(parameters, group)


def _my_rows(parameters: Parameters, group: Group) -> list[tuple[Shard, Tensor]]:
    """My rows of each; weights of which I have no row are left out."""
    mine = [
        (rows_of(shard, group.rank, group.size, SHARD_AXES), _local(getattr(module, name)))
        for shard, module, name in parameters
    ]
    return [(shard, rows) for shard, rows in mine if rows.numel()]


def _refuse_shared_chunks(chunks: Sequence[nn.Module]) -> None:
    """Each chunk is cut by itself, so no two of a rank may share a weight."""
    held = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks]
    if sum(map(len, held)) > len(set().union(*held)):
        raise PlanError(
            f"parallel.zero=3 with {len(chunks)} chunks on one rank that share the table of the vocabulary: each chunk "
            f"is cut by itself. Set model.tied_embeddings=false and model.mtp.depths=0, parallel.pipeline.vpp=1, or "
            f"parallel.zero=2."
        )


def _as_backward_ends(units: Sequence[Unit], chunks: Sequence[nn.Module]) -> list[Unit]:
    """The last layer first; a chunk's own parameters, of which both ends may have a part, after all inside it."""
    unit_of = {id(unit.module): unit for unit in units}
    return [
        unit_of[id(module)] for chunk in reversed(chunks) for module in (*reversed(list(_inner_units(chunk))), chunk)
    ]


def _gather_nothing_ahead(chunk: nn.Module) -> None:
    """Let backward gather what it needs when it needs it. FSDP2 has no switch for that, but may be told what to gather
    ahead: here the chunk's own parameters, which are there."""
    for module in (*_inner_units(chunk), chunk):
        assert isinstance(module, FSDPModule) and isinstance(chunk, FSDPModule)
        module.set_modules_to_backward_prefetch([chunk])


def _inner_units(chunk: nn.Module) -> Iterator[nn.Module]:
    """What is gathered apart from the rest of a chunk: its layers, and tables that are used in one place."""
    uses = Counter(id(table.weight) for table in chunk.modules() if isinstance(table, VocabEmbedding | VocabHead))
    for child in chunk.children():
        if isinstance(child, VocabEmbedding | VocabHead) and uses[id(child.weight)] == 1:
            yield child
        if isinstance(child, nn.ModuleList):
            yield from child


def _give_memory(chunk: nn.Module, device: torch.device) -> None:
    """Memory for every parameter; one that two modules share stays shared."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in chunk.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    chunk.to_empty(device=device)
    for (first, its_name), *others in places.values():
        parameter = first.get_parameter(its_name)
        _local(parameter).zero_()
        for module, name in others:
            module.register_parameter(name, parameter)


def _local(parameter: nn.Parameter) -> Tensor:
    """My rows, as a plain tensor."""
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        return parameter.to_local()

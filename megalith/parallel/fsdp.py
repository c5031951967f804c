"""ZeRO-3 (FSDP): weights, gradients and optimizer state sharded over ranks, by torch's FSDP2
(`fully_shard`).

Every rank keeps some rows of every matrix. A layer's weights are all-gathered before its forward
and before its backward, and freed after each; its gradients are reduce-scattered. Experts are
sharded over the ranks that hold the same ones, all other weights over dp and cp. The only module
that uses DTensor.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from megalith.errors import PlanError
from megalith.kernels.linear import RecomputeRecipe, recompute_recipe, register_recompute
from megalith.parallel.data import SLICES_OVER, ShardGroups, shard_groups
from megalith.parallel.grad_sync import (
    Parameters,
    ShardedParam,
    SharedGradients,
    byte_checksum,
    check_slices_consistent_across_ranks,
    split_trained_and_frozen,
    sum_bits,
    warn_unused_params,
)
from megalith.parallel.group import (
    Group,
    check_consistent_across_ranks,
    mark_finished,
    record_collective,
    start_all_reduce_,
    track_work,
)
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import VocabParallelEmbedding, VocabParallelHead
from megalith.plan.shards import Shard, padded_numel, shard_rows

DIVIDE_BY = 1.0
"""Divisor of FSDP2's gradient sums. Its default averages, but the loss has been divided by the
global number of labels already."""


ShardGroupsByGrid = Mapping[str, ShardGroups]
"""Grid -> the groups over which its parameters are sharded and replicated."""


class FullyShardedDataParallel:
    """Data parallelism of parallel.zero=3; see `GradSync` in parallel/grad_sync.py.

    FSDP units are the layers, their experts, the embedding and the head; the final norm, and a
    table that embedding and head share, stay gathered from the forward of their chunk to the end of
    its backward. Gradients are reduce-scattered after every microbatch, so that only those of one
    layer are unsharded at a time, and this rank's rows are accumulated in fp32. With several
    replicas of the sharding group (HSDP) gradients are all-reduced once per step, each layer as
    soon as its last microbatch is done and the layers behind it have been sent. Experts that no
    other rank holds are not sharded, and neither are frozen vectors, which the run may read and
    move.

    Sources: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.3; Zhao et al. 2023,
    arXiv:2304.11277.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        parameters: Parameters,
        mesh: Mesh,
        *,
        device: torch.device,
        keep_gathered: bool = False,
        watch: bool = False,
        overlap: bool = True,
    ) -> None:
        """`keep_gathered`: free weights only at the end of the step, for pipelines, which run a
        chunk many times in it. `watch`: record which gradients are NaN or infinite before they are
        reduced. `overlap`: prefetch the weights of backward and overlap the all-reduce over
        replicas with it."""
        self.mesh, self.divisions = mesh, shard_groups_by_grid(parameters, mesh)
        self.sums = OrderedAllReduces(overlap=overlap)
        parts = [part for chunk in chunks for part in (*_inner_parts(chunk), chunk)]
        names = name_units(parts, parameters)
        self.units = [
            _unit(part, self.divisions, self.sums, name)
            for part, name in zip(parts, names, strict=True)
        ]
        unit_of: dict[int, Unit] = {}
        for unit in self.units:  # outer modules come after inner ones and get the rest
            for module in unit.module.modules():
                unit_of.setdefault(id(module), unit)
        trained, frozen = split_trained_and_frozen(parameters)
        for part in (trained, frozen):
            _check_consistent_across_ranks(part, mesh)
        _check_one_dtype_per_unit([(shard, unit_of[id(module)]) for shard, module, _ in trained])
        _shard_chunks(
            chunks, parameters, self.divisions, device=device, keep_gathered=keep_gathered
        )
        places: dict[int, list[tuple[Shard, nn.Parameter]]] = {}
        for shard, module, name in trained:
            local_shard = _local_rows_of(shard, self.divisions[shard.grid])
            places.setdefault(id(unit_of[id(module)]), []).append(
                (local_shard, getattr(module, name))
            )
        local_params_by_name: dict[str, ShardedParam] = {}
        for unit in self.units:
            local_params_by_name |= unit.connect(places.get(id(unit), []))
        self.sums.units = _in_backward_order(self.units, chunks)
        for chunk in chunks if not overlap else ():
            _disable_prefetch(chunk)
        self.local_params = [
            local_params_by_name[shard.name]
            for shard, _, _ in trained
            if shard.name in local_params_by_name
        ]
        self.frozen = _local_rows(frozen, self.divisions)
        check_slices_consistent_across_ranks(self.local_params, mesh)
        self._shared_gradients = SharedGradients(self.local_params, mesh)
        self._warned_unused = False
        self._watch = watch
        self.record_local_gradients(bits=False, norms=False)

    def begin_step(self, microbatches: int) -> None:
        """Start a step of this many backward passes."""
        self.sums.started = 0
        for unit in self.units:
            unit.begin_step(microbatches)

    def finish(self) -> Sequence[ShardedParam]:
        """Return this rank's rows of every gradient, summed over all ranks that hold the same box;
        zeros if there was none.

        The first step in which a unit had no part in the loss logs a warning, unless an earlier
        step gathered the unit: FSDP2 then sends zeros, as for an unused parameter inside a unit,
        which cannot be distinguished from gradients.
        """
        unused = [name for unit in self.units for name in unit.unused()]
        self._warned_unused = self._warned_unused or warn_unused_params(unused)
        for unit in self.units:
            unit.close()
        self.sums.start(ready_only=False)
        self.sums.wait()
        self._free()
        self._shared_gradients.all_reduce()
        return self.local_params

    def all_gather_params(self) -> None:
        """Reshard all weights, so that the next forward gathers the updated rows."""
        self._free()

    def wait_params(self) -> None:
        """Do nothing: weights are gathered where they are used."""

    def nonfinite(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank was NaN or infinite before the
        reduction."""
        return sorted(
            {name for unit in self.units for name, finite in unit.finite_flags if not bool(finite)}
        )

    def record_local_gradients(self, *, bits: bool, norms: bool) -> None:
        """Set what following steps record of this rank's gradients before they are reduced."""
        for unit in self.units:
            unit.records_bits, unit.records_norms = bits, norms or self._watch

    def local_gradient_bits(self) -> list[Tensor]:
        """Return the recorded sums over the bits of each message, in the order of the units."""
        return [bits for unit in self.units for bits in unit.bits]

    def local_gradient_norm(self) -> float:
        """Return the norm of this rank's gradients before their reductions; 0 if not recorded."""
        norms = [norm.double() for unit in self.units for norm in unit.norms]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """Return a sum over the bytes of this rank's rows of each grid; replicas have the same."""
        held: dict[str, list[Tensor]] = {grid: [] for grid in self.divisions}
        for shard, rows in (
            *((local_params.shard, local_params.weight) for local_params in self.local_params),
            *self.frozen,
        ):
            held[shard.grid].append(rows)
        return [(byte_checksum(rows), self.divisions[grid].replicas) for grid, rows in held.items()]

    def gathered_weights(self) -> Sequence[tuple[Shard, Tensor]]:
        """Return none: weights are gathered for the time in which they are used."""
        return []

    def _free(self) -> None:
        for unit in self.units:
            unit.free()


class OrderedAllReduces:
    """All-reduces of the units' gradients over replicas, in the same order on all ranks, whichever
    units had a part in the loss."""

    def __init__(self, *, overlap: bool) -> None:
        self.overlap = overlap
        self.units: Sequence[Unit] = ()
        self.started = 0
        self._running: list[dist.Work] = []

    def start(self, *, ready_only: bool) -> None:
        """Start the next all-reduces, as far as units are ready, or all that remain."""
        while self.started < len(self.units) and not (
            ready_only and not self.units[self.started].ready
        ):
            unit = self.units[self.started]
            work = (
                start_all_reduce_(unit.gradient, unit.division.replicas)
                if unit.gradient.numel()
                else None
            )
            self._running += [] if work is None else [work]
            self.started += 1

    def wait(self) -> None:
        """Wait until all are complete."""
        for work in self._running:
            work.wait()
        self._running.clear()


class Unit:
    """Parameters that are not sharded on this rank, and their fp32 or float64 gradient."""

    def __init__(
        self, module: nn.Module, division: ShardGroups, sums: OrderedAllReduces, name: str
    ) -> None:
        self.module, self.division, self.sums, self.name = module, division, sums, name
        self.gradient = torch.empty(0)
        self.names: list[str] = []
        self.finite_flags: list[tuple[str, Tensor]] = []
        """Whether each gradient of this step was finite here before it was summed; empty unless
        norms are recorded."""
        self.bits: list[Tensor] = []
        """Sums over the bits of the gradients of this step before they were summed."""
        self.norms: list[Tensor] = []
        """Norms of these gradients."""
        self.records_bits = False
        self.records_norms = False
        self._expected = 0
        self._rounds: dict[str, int] = {}
        self._parts: dict[str, Tensor] = {}

    def connect(self, parameters: Sequence[tuple[Shard, nn.Parameter]]) -> dict[str, ShardedParam]:
        """Register hooks that accumulate the gradients of these parameters in one buffer. Returns
        name -> local parameter, without empty ones."""
        if not parameters:
            return {}
        weights = {shard.name: _local(parameter) for shard, parameter in parameters}
        device = next(iter(weights.values())).device
        self.names, numels = list(weights), [weight.numel() for weight in weights.values()]
        dtype = gradient_dtype([shard for shard, _ in parameters])
        self.gradient = torch.zeros(sum(numels), dtype=dtype, device=device)
        self._parts = dict(zip(self.names, self.gradient.split(numels), strict=True))
        self._rounds = dict.fromkeys(self.names, 0)
        for shard, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_grad_hook(self, shard))
        return {
            shard.name: ShardedParam(
                shard, weights[shard.name], self._parts[shard.name].view_as(weights[shard.name])
            )
            for shard, _ in parameters
            if weights[shard.name].numel()
        }

    def begin_step(self, microbatches: int) -> None:
        """Start a step with this many gradients of each parameter."""
        self._expected, self._rounds = microbatches, dict.fromkeys(self.names, 0)
        self.finite_flags.clear()
        self.bits.clear()
        self.norms.clear()

    def unused(self) -> list[str]:
        """Return the names of parameters without a gradient in this step."""
        return [name for name, rounds in self._rounds.items() if rounds == 0]

    @property
    def ready(self) -> bool:
        """Whether all gradients of the step have been added."""
        return all(rounds == self._expected for rounds in self._rounds.values())

    def close(self) -> None:
        """Zero the gradients of parameters without one in this step."""
        for name in self.unused():
            self._parts[name].zero_()

    def free(self) -> None:
        """Do nothing: nothing has been gathered."""

    def add(self, shard: Shard, parameter: Tensor) -> None:
        """Add `parameter.grad` to the gradient."""
        assert parameter.grad is not None, shard.name
        if self.records_norms:
            self.finite_flags.append((shard.name, parameter.grad.isfinite().all()))
        self.record(parameter.grad)
        self._put(shard.name, parameter.grad.flatten())
        parameter.grad = None
        self._start_ready_sums()

    def record(self, message: Tensor) -> None:
        """Record bits and norm of a gradient, or of a message of several, before its reduction."""
        if self.records_bits:
            self.bits.append(sum_bits(message.contiguous()))
        if self.records_norms:
            dtype = torch.float32 if message.element_size() < 4 else None
            self.norms.append(torch.linalg.vector_norm(message, dtype=dtype))

    def _put(self, name: str, gradient: Tensor) -> None:
        """Add to the gradient; the first contribution of a step overwrites the old values."""
        if self._rounds[name] == 0:
            self._parts[name].copy_(gradient)
        else:
            self._parts[name].add_(gradient)
        self._rounds[name] += 1

    def _start_ready_sums(self) -> None:
        if self.ready and self.sums.overlap:
            self.sums.start(ready_only=True)


class ShardedUnit(Unit):
    """FSDP unit: parameters that are sharded and all-gathered together, and the gradient of this
    rank's rows."""

    def __init__(
        self, module: nn.Module, division: ShardGroups, sums: OrderedAllReduces, name: str
    ) -> None:
        super().__init__(module, division, sums, name)
        self._sum: Tensor | None = None
        self._read = 0
        self._finite: Tensor | None = None

    @property
    def fsdp(self) -> FSDPModule:
        """The module as an `FSDPModule`, after `fully_shard` has changed its class."""
        assert isinstance(self.module, FSDPModule), self.module
        return self.module

    def connect(self, parameters: Sequence[tuple[Shard, nn.Parameter]]) -> dict[str, ShardedParam]:
        """Register FSDP2's custom collectives and hooks for these rows; the weights are FSDP2's
        local shards."""
        group = self.division.slices
        self.fsdp.set_custom_all_gather(AllGatherParams(group, self.name))  # type: ignore[arg-type]  # its type is a private class
        local_params = super().connect(parameters)
        if not parameters:
            return local_params
        for shard, _ in parameters:
            numel = self._parts[shard.name].numel()
            assert shard.flat is not None and shard.flat[1] - shard.flat[0] == numel, (shard, numel)
        self.fsdp.set_gradient_divide_factor(DIVIDE_BY)
        self.fsdp.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in the reduction
        # otherwise the message depends on what forward used
        self.fsdp.set_reduce_scatter_unused_params(True)
        reduce_gradients = ReduceGradients(group, self)
        self.fsdp.set_custom_reduce_scatter(reduce_gradients)  # type: ignore[arg-type]  # the same
        self.fsdp.set_all_reduce_hook(self._take_reduced)
        return local_params

    def unused(self) -> list[str]:
        """Return the names of all parameters if none of them had a gradient in this step."""
        return self.names if not any(self._rounds.values()) else []

    def free(self) -> None:
        """Reshard: keep this rank's rows only."""
        self.fsdp.reshard()

    def record_message(self, message: Tensor, ranks: int) -> None:
        """Record the gradients of all rows, [ranks, rows of each rank], before they are reduced."""
        self.record(message)
        if self.records_norms:
            self._finite = message.view(ranks, -1).isfinite().all(0)

    def _take_reduced(self, message: Tensor) -> None:
        """Take the reduced gradients of one microbatch before FSDP2 casts them to the weights'
        dtype.

        They are concatenated, each padded to the size of the first rank's rows. FSDP2 then visits
        the parameters in that order, which `add` relies on.
        """
        self._sum, self._read = message, 0
        for x in (message, self._finite) if message.is_cuda else ():
            if x is not None:  # allocated on the reduction stream, read on this one
                x.record_stream(torch.cuda.current_stream())

    def add(self, shard: Shard, parameter: Tensor) -> None:
        """Add the next part of the message to a gradient."""
        assert self._sum is not None, shard.name
        numel, sent = (
            self._parts[shard.name].numel(),
            padded_numel(shard, self.division.slices.size),
        )
        self._put(shard.name, self._sum[self._read : self._read + numel])
        if self.records_norms and self._finite is not None:
            self.finite_flags.append(
                (shard.name, self._finite[self._read : self._read + sent].all())
            )
        parameter.grad = None
        self._read += sent
        if self._read == self._sum.numel():
            self._sum = None
            self._start_ready_sums()


def _grad_hook(unit: Unit, shard: Shard) -> Callable[[Tensor], None]:
    # The garbage collector does not see the hooks of a parameter that torch references: a strong
    # reference in a hook would keep the unit forever, with its process groups.
    unit_ref = weakref.ref(unit)

    def add(parameter: Tensor) -> None:
        owner = unit_ref()
        assert owner is not None, shard.name
        owner.add(shard, parameter)

    return add


class AllGatherParams:
    """FSDP2's all-gather, recorded in the flight recorder and compared by
    parallel.check_collectives."""

    def __init__(self, group: Group, unit_name: str) -> None:
        self.group, self.subject = group, f"weights of {unit_name}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the memory of a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All-gather the ranks' inputs, in the order of ranks."""
        entry = record_collective(self.group, "all_gather", input_tensor, subject=self.subject)
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        mark_finished(entry) if work is None else track_work(entry, work)
        return work


class ReduceGradients:
    """FSDP2's reduce-scatter, recorded in the flight recorder and compared by
    parallel.check_collectives."""

    def __init__(self, group: Group, unit: ShardedUnit) -> None:
        self.group, self.unit = group, unit
        self.subject = f"gradients of {unit.name}"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the memory of a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce-scatter the ranks' inputs."""
        self.unit.record_message(input_tensor, self.group.size)
        entry = record_collective(self.group, "reduce_scatter", input_tensor, subject=self.subject)
        work: dist.Work | None = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        mark_finished(entry) if work is None else track_work(entry, work)
        return work


def fully_shard_chunk(
    chunk: nn.Module,
    divisions: ShardGroupsByGrid,
    device: torch.device,
    *,
    unsharded: Set[nn.Parameter],
    reduce_dtype: torch.dtype,
    keep_gathered: bool,
) -> None:
    """Shard the parameters of a chunk on the meta device, all but `unsharded`, and allocate
    this rank's rows: zeros.

    The chunk itself does not reshard after forward: the loss of its head is computed after forward
    has returned.
    """
    ranks = {
        grid: _device_mesh(each.slices, device)
        for grid, each in divisions.items()
        if each.slices.size > 1
    }
    if not ranks:  # a stage without experts in a run that shards only experts
        _allocate_params(chunk, device)
        return
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    shard = partial(fully_shard, mp_policy=policy, ignored_params={*unsharded})
    for module in list(_inner_parts(chunk)):
        over = ranks.get(_grid_of(module))
        if over is None:
            continue
        shard(module, mesh=over, reshard_after_forward=not keep_gathered)
        if _grid_of(module) == "expert":
            _keep_recompute_recipes(module)
        plain = isinstance(module, VocabParallelHead) and module.reads_table_again
        if (
            isinstance(module, VocabParallelEmbedding | VocabParallelHead)
            and isinstance(module, FSDPModule)
            and not plain
        ):
            module.set_unshard_in_backward(False)  # their backward does not read the table
        if isinstance(module, VocabParallelHead):
            for method in ("loss", "token_losses", "best"):
                register_fsdp_forward_method(module, method)
            _unshard_for_token_losses(module)
    # Even without parameters to shard, FSDP2 counts forward and backward passes by this module.
    shard(chunk, mesh=ranks.get("dense", next(iter(ranks.values()))), reshard_after_forward=False)
    if keep_gathered:
        assert isinstance(chunk, FSDPModule)
        chunk.set_reshard_after_backward(False)
    _allocate_params(chunk, device)


def _unshard_for_token_losses(head: VocabParallelHead) -> None:
    """Gather the table of a head before backward, too, once `token_losses` has been used with
    gradients: its backward reads the table."""
    token_losses = head.token_losses

    def unshard_in_backward(x: Tensor, labels: Tensor) -> Tensor:
        if isinstance(head, FSDPModule) and torch.is_grad_enabled():
            head.set_unshard_in_backward(True)
        return token_losses(x, labels)

    setattr(head, "token_losses", unshard_in_backward)  # noqa: B010  # mypy: not a method


def _device_mesh(group: Group, device: torch.device) -> DeviceMesh:
    """Return the group as a DeviceMesh."""
    assert group.handle is not None, group
    ranks = DeviceMesh.from_group(group.handle, device.type, mesh_dim_names=("shard",))
    assert ranks.get_local_rank() == group.rank, (ranks, group)
    return ranks


class _HiddenFromFSDP:
    """Wrapper that hides tensors from FSDP2."""

    def __init__(self, recipe: RecomputeRecipe) -> None:
        self.recipe = recipe


def _keep_recompute_recipes(experts: nn.Module) -> None:
    """Let backward recompute the input rows of experts although FSDP2 passes copies of them.

    FSDP2 replaces the tensors among a unit's inputs, to reduce the unit's gradients when theirs are
    complete.
    """

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        recipe = recompute_recipe(args[0].rows)
        return args if recipe is None else (*args, _HiddenFromFSDP(recipe))

    def after(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not isinstance(args[-1], _HiddenFromFSDP):
            return args
        register_recompute(args[0].rows, *args[-1].recipe)
        return args[:-1]

    experts.register_forward_pre_hook(before, prepend=True)  # before FSDP2's own
    experts.register_forward_pre_hook(after)


def shard_groups_by_grid(parameters: Parameters, mesh: Mesh) -> ShardGroupsByGrid:
    """Return how the parameters of each grid are sharded."""
    return {
        grid: shard_groups(3, mesh, grid)
        for grid in sorted({"dense", *(shard.grid for shard, _, _ in parameters)})
    }


def shard_for_forward(
    chunks: Sequence[nn.Module],
    parameters: Parameters,
    mesh: Mesh,
    *,
    device: torch.device,
    keep_gathered: bool = False,
) -> list[tuple[Shard, Tensor]]:
    """Shard the weights of a model on the meta device as `FullyShardedDataParallel` does, for
    forward passes only.

    Returns this rank's rows of each, to be initialized by the caller, without empty ones. Unlike
    `FullyShardedDataParallel` it allocates no gradients, and no backward may follow.
    `keep_gathered`: as there.
    """
    divisions = shard_groups_by_grid(parameters, mesh)
    _check_consistent_across_ranks(parameters, mesh)
    _shard_chunks(chunks, parameters, divisions, device=device, keep_gathered=keep_gathered)
    parts = [part for chunk in chunks for part in (*_inner_parts(chunk), chunk)]
    for module, name in zip(parts, name_units(parts, parameters), strict=True):
        if isinstance(module, FSDPModule):
            group = divisions[_grid_of(module)].slices
            module.set_custom_all_gather(AllGatherParams(group, name))  # type: ignore[arg-type]  # its type is a private class
    return _local_rows(parameters, divisions)


def _shard_chunks(
    chunks: Sequence[nn.Module],
    parameters: Parameters,
    divisions: ShardGroupsByGrid,
    *,
    device: torch.device,
    keep_gathered: bool,
) -> None:
    """Shard every chunk, without gradient hooks."""
    _reject_shared_chunks(chunks)
    replicated = {
        getattr(module, name)
        for shard, module, name in parameters
        if _is_unsharded(shard, module, name, divisions)
    }
    for chunk in chunks:
        fully_shard_chunk(
            chunk,
            divisions,
            device,
            unsharded=replicated,
            reduce_dtype=gradient_dtype([shard for shard, _, _ in parameters]),
            keep_gathered=keep_gathered,
        )


def _is_unsharded(shard: Shard, module: nn.Module, name: str, divisions: ShardGroupsByGrid) -> bool:
    """Whether this rank keeps its complete box of a parameter."""
    trained: bool = getattr(module, name).requires_grad
    return divisions[shard.grid].slices.size == 1 or (shard.inputs == 0 and not trained)


def _local_rows_of(shard: Shard, division: ShardGroups) -> Shard:
    """Return this rank's rows, if several ranks shard them."""
    group = division.slices
    return (
        shard
        if group.size == 1
        else shard_rows(shard, group.rank, group.size, SLICES_OVER[shard.grid])
    )


def _local_rows(parameters: Parameters, divisions: ShardGroupsByGrid) -> list[tuple[Shard, Tensor]]:
    """Return this rank's rows of each parameter, without empty ones."""
    local_parts = [
        (
            shard
            if _is_unsharded(shard, module, name, divisions)
            else _local_rows_of(shard, divisions[shard.grid]),
            module,
            name,
        )
        for shard, module, name in parameters
    ]
    local_rows = [(shard, _local(getattr(module, name))) for shard, module, name in local_parts]
    return [(shard, rows) for shard, rows in local_rows if rows.numel()]


def _check_consistent_across_ranks(parameters: Parameters, mesh: Mesh) -> None:
    """Check that ranks that shard parameters have the same ones; collective."""
    for grid, group in (
        ("dense", mesh.dp_cp),
        *((("expert", mesh.over("edp")),) if mesh.grid.experts else ()),
    ):
        texts = {
            shard.name: f"as {shard.matrix_shape} of {shard.shape}"
            for shard, _, _ in parameters
            if shard.grid == grid
        }
        check_consistent_across_ranks(texts, group)


def gradient_dtype(shards: Sequence[Shard]) -> torch.dtype:
    """Return the dtype in which the gradients of these parameters are reduced and summed."""
    return torch.float64 if any(shard.wide_dtype == "fp64" for shard in shards) else torch.float32


def _check_one_dtype_per_unit(trained: Sequence[tuple[Shard, Unit]]) -> None:
    """Reject trained parameters of several dtypes in one FSDP unit, which FSDP2 cannot reduce.

    Raises:
        PlanError: a sharded unit has such parameters.
    """
    shards: dict[int, dict[str, Shard]] = {}
    for shard, unit in trained:
        if isinstance(unit, ShardedUnit):
            shards.setdefault(id(unit), {}).setdefault(shard.dtype, shard)
    for by_dtype in shards.values():
        if len(by_dtype) > 1:
            names = " and ".join(f"{shard.name} in {dtype}" for dtype, shard in by_dtype.items())
            raise PlanError(
                f"parallel.zero=3 with the trained parameters {names} in one layer: FSDP reduces "
                "the gradients of a layer in one message, which needs one dtype. Set "
                "parallel.zero=2, or register them in one dtype."
            )


def _reject_shared_chunks(chunks: Sequence[nn.Module]) -> None:
    """Reject chunks of one rank that share a weight: each chunk is sharded separately."""
    held = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks]
    if sum(map(len, held)) > len(set().union(*held)):
        raise PlanError(
            f"parallel.zero=3 with {len(chunks)} chunks on one rank that share the vocabulary's "
            "table: each chunk is sharded separately. Set model.tied_embeddings=false and "
            "model.mtp.num_layers=0, parallel.pipeline.vpp=1, or parallel.zero=2."
        )


def _unit(
    module: nn.Module, divisions: ShardGroupsByGrid, sums: OrderedAllReduces, name: str
) -> Unit:
    """Return the unit of a module: sharded or not."""
    division = divisions[_grid_of(module)]
    return (ShardedUnit if division.slices.size > 1 else Unit)(module, division, sums, name)


def name_units(modules: Sequence[nn.Module], parameters: Parameters) -> list[str]:
    """Return a name of each FSDP unit, for the flight recorder: the common part of the names of
    its parameters. `modules`: those of the units, inner ones first."""
    owners: dict[int, int] = {}
    for number, unit_module in enumerate(modules):
        for module in unit_module.modules():
            owners.setdefault(id(module), number)
    names: list[list[str]] = [[] for _ in modules]
    for shard, module, _ in parameters:
        names[owners[id(module)]].append(shard.name)
    return [describe_unit(unit_names) for unit_names in names]


def describe_unit(names: Sequence[str]) -> str:
    """Return the common part of the names of a unit's parameters.

    >>> describe_unit(["layers.3.attention.q", "layers.3.mlp.up"])
    'layers.3'
    >>> describe_unit(["final_norm.weight", "mtp.0.norm"])
    'final_norm.weight and 1 more'
    """
    if not names:
        return "a unit without parameters"
    levels = zip(*(name.split(".") for name in names), strict=False)
    shared = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, levels)]
    if shared:
        return ".".join(shared)
    return f"{names[0]} and {len(names) - 1} more"


def _in_backward_order(units: Sequence[Unit], chunks: Sequence[nn.Module]) -> list[Unit]:
    """Return the units in the order in which backward ends: last layer first, after its experts; a
    chunk's own parameters after everything inside it."""
    unit_of = {id(unit.module): unit for unit in units}
    order: list[nn.Module] = []
    for chunk in reversed(chunks):
        order += _experts_outside_layers(chunk)
        for layer in reversed(list(_inner_units(chunk))):
            order += [*_experts_in(layer), layer]
        order.append(chunk)
    return [unit_of[id(module)] for module in order]


def _disable_prefetch(chunk: nn.Module) -> None:
    """Disable prefetching in backward. FSDP2 has no switch for that, but takes a list of what to
    prefetch: here the chunk's own parameters, which are gathered already."""
    for module in (*_inner_parts(chunk), chunk):
        if isinstance(module, FSDPModule):
            assert isinstance(chunk, FSDPModule)
            module.set_modules_to_backward_prefetch([chunk])


def _inner_parts(chunk: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered separately from the rest of a chunk, inner ones first."""
    for unit in _inner_units(chunk):
        yield from _experts_in(unit)
        yield unit
    yield from _experts_outside_layers(chunk)


def _experts_outside_layers(chunk: nn.Module) -> list[nn.Module]:
    """Return the experts outside the chunk's layers: those of MTP layers."""
    inside = {id(part) for unit in _inner_units(chunk) for part in _experts_in(unit)}
    return [part for part in _experts_in(chunk) if id(part) not in inside]


def _inner_units(chunk: nn.Module) -> Iterator[nn.Module]:
    """Yield the chunk's layers, and its tables that are used in one place."""
    uses = Counter(
        id(table.weight)
        for table in chunk.modules()
        if isinstance(table, VocabParallelEmbedding | VocabParallelHead)
    )
    for child in chunk.children():
        if (
            isinstance(child, VocabParallelEmbedding | VocabParallelHead)
            and uses[id(child.weight)] == 1
        ):
            yield child
        if isinstance(child, nn.ModuleList):
            yield from (part for part in child if not isinstance(part, VocabParallelHead))


def _experts_in(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules inside that have only expert parameters."""
    for child in layer.children():
        grids = _grids_in(child)
        if grids == {"expert"}:
            yield child
        elif "expert" in grids:
            yield from _experts_in(child)


def _grid_of(module: nn.Module) -> str:
    """Return the grid of a module's parameters, without those of units inside it."""
    return "expert" if _grids_in(module) == {"expert"} else "dense"


def _grids_in(module: nn.Module) -> set[str]:
    """Return the grids of all parameters inside."""
    specs_by_module = (each.__dict__.get("param_specs", {}) for each in module.modules())
    return {spec.shard.grid for specs in specs_by_module for spec in specs.values()}


def _allocate_params(chunk: nn.Module, device: torch.device) -> None:
    """Allocate every parameter; one that two modules share stays shared."""
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
    """Return this rank's rows, or the full parameter if not sharded, as a plain tensor."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data

"""ZeRO-3: weights, gradients and optimizer state all divided over ranks, by torch's FSDP2
(`fully_shard`).

Every rank keeps some rows of every matrix. A layer's weights are gathered before its forward and
before its backward, and freed after each; its gradients are summed to the ranks that keep the rows.
Experts are divided over the ranks that hold the same ones, everything else over dp and cp. The only
file that knows DTensor.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
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
from megalith.kernels.rebuilt import RecomputedOutput
from megalith.parallel.alike import check_consistent_across_ranks
from megalith.parallel.data import SLICES_OVER, Division, division_of
from megalith.parallel.engine import (
    Parameters,
    ShardedParam,
    check_slices_consistent_across_ranks,
    divide_frozen,
    sum_of_bytes,
    sum_shared_slices,
    warn_of_zeros,
)
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.group import Group, finished, note, on_its_way, start_all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import VocabEmbedding, VocabHead
from megalith.plan.fsdp import padded_numel, rows_of
from megalith.plan.shards import Shard

DIVIDE_BY = 1.0
"""What FSDP2 divides its sums by. Left alone it takes means; but the loss was divided once, by all
ranks' labels."""


Divisions = Mapping[str, Division]
"""Of each grid."""


class FullyShardedDataParallel:
    """The engine of parallel.zero=3; what training asks of it is written at `GradSync` in
    parallel/engine.py.

    The layers, their experts, the embedding and the head are each gathered together; the last norm,
    and a table that embedding and head share, stay gathered from the forward of their chunk to the
    end of its backward. Gradients are summed after every microbatch, so that only those of one
    layer are ever held whole, and my rows of them are added up in fp32. Several replicas of the
    whole division (HSDP) sum once per step, each layer as soon as its last microbatch is done and
    the layers behind it have been sent. Experts that no other rank holds stay here whole, and so do
    vectors that are not trained, which the run may want to read and to move.

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
        gradient_dtype: torch.dtype,
        keep_gathered: bool = False,
        watch: bool = False,
        overlap: bool = True,
    ) -> None:
        """`keep_gathered`: free weights at the end of the step only, for pipelines, which run a
        chunk many times in it. `watch`: note which gradients are not finite before they are
        summed. `overlap`: gather what backward needs next and sum over replicas while it
        computes."""
        self.mesh, self.divisions = mesh, divisions_of(parameters, mesh)
        self.sums = SumsInOrder(overlap=overlap)
        parts = [part for chunk in chunks for part in (*_inner_parts(chunk), chunk)]
        self.units = [_unit(part, self.divisions, self.sums) for part in parts]
        unit_of: dict[int, Unit] = {}
        for unit in self.units:  # a whole comes after the parts inside it, and gets what they leave
            for module in unit.module.modules():
                unit_of.setdefault(id(module), unit)
        trained, frozen = divide_frozen(parameters)
        for part in (trained, frozen):
            _check_consistent_across_ranks(part, mesh)
        _divide(
            chunks,
            parameters,
            self.divisions,
            device=device,
            gradient_dtype=gradient_dtype,
            keep_gathered=keep_gathered,
        )
        places: dict[int, list[tuple[Shard, nn.Parameter]]] = {}
        for shard, module, name in trained:
            mine = _mine(shard, self.divisions[shard.grid])
            places.setdefault(id(unit_of[id(module)]), []).append((mine, getattr(module, name)))
        found: dict[str, ShardedParam] = {}
        for unit in self.units:
            found |= unit.connect(
                places.get(id(unit), []), gradient_dtype=gradient_dtype, watch=watch
            )
        self.sums.units = _as_backward_ends(self.units, chunks)
        for chunk in chunks if not overlap else ():
            _gather_nothing_ahead(chunk)
        self.local_params = [found[shard.name] for shard, _, _ in trained if shard.name in found]
        self.frozen = _my_rows(frozen, self.divisions)
        check_slices_consistent_across_ranks(self.local_params, mesh)
        self._told = False

    def begin_step(self, microbatches: int) -> None:
        """Expect this many backward passes before `finish`."""
        self.sums.started = 0
        for unit in self.units:
            unit.begin_step(microbatches)

    def finish(self) -> Sequence[ShardedParam]:
        """My rows of every gradient, summed over every rank that holds the same box; zeros where
        there was none.

        The first step in which a unit had no part in the loss is told about, unless an earlier step
        gathered the unit: then FSDP2 sends zeros, as for what was left out inside a unit, which
        cannot be told from gradients.
        """
        unused = [name for unit in self.units for name in unit.unused()]
        self._told = self._told or warn_of_zeros(unused)
        for unit in self.units:
            unit.close()
        self.sums.start(ready_only=False)
        self.sums.wait()
        self._free()
        sum_shared_slices(self.local_params, self.mesh)
        return self.local_params

    def all_gather_params(self) -> None:
        """Let the next forward gather the weights anew: the optimizer wrote to the rows that are
        sent."""
        self._free()

    def wait_params(self) -> None:
        """Nothing to wait for: weights are gathered where they are used."""

    def nonfinite(self) -> list[str]:
        """Names of parameters whose gradient here was not finite before any other rank's was added;
        needs `watch`."""
        return sorted(
            {name for unit in self.units for name, finite in unit.seen if not bool(finite)}
        )

    def checksums(self) -> Sequence[tuple[int, Group]]:
        """A sum over the bytes of my rows of what lies on each grid; replicas have the same."""
        held: dict[str, list[Tensor]] = {grid: [] for grid in self.divisions}
        for shard, rows in (
            *((local_params.shard, local_params.weight) for local_params in self.local_params),
            *self.frozen,
        ):
            held[shard.grid].append(rows)
        return [(sum_of_bytes(rows), self.divisions[grid].replicas) for grid, rows in held.items()]

    def _free(self) -> None:
        for unit in self.units:
            unit.free()


class SumsInOrder:
    """Sums of the units' gradients over replicas: in one order, whatever part a unit had in the
    loss of a replica."""

    def __init__(self, *, overlap: bool) -> None:
        self.overlap = overlap
        self.units: Sequence[Unit] = ()
        self.started = 0
        self._running: list[dist.Work] = []

    def start(self, *, ready_only: bool) -> None:
        """InitialValues what is next, as far as units are ready, or all that is left."""
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
        """StopFilter all are there."""
        for work in self._running:
            work.wait()
        self._running.clear()


class Unit:
    """Parameters that this rank has whole, and their fp32 or float64 gradient."""

    def __init__(self, module: nn.Module, division: Division, sums: SumsInOrder) -> None:
        self.module, self.division, self.sums = module, division, sums
        self.gradient = torch.empty(0)
        self.names: list[str] = []
        self.seen: list[tuple[str, Tensor]] = []
        """Whether each gradient of this step was finite here before it was summed; empty unless
        watched."""
        self._expected = 0
        self._rounds: dict[str, int] = {}
        self._parts: dict[str, Tensor] = {}
        self._watch = False

    def connect(
        self,
        parameters: Sequence[tuple[Shard, nn.Parameter]],
        *,
        gradient_dtype: torch.dtype,
        watch: bool,
    ) -> dict[str, ShardedParam]:
        """Let the gradients of these parameters come here, one after the other in one buffer. By
        name: what is mine, empty rows left out."""
        self._watch = watch
        if not parameters:
            return {}
        weights = {mine.name: _local(parameter) for mine, parameter in parameters}
        device = next(iter(weights.values())).device
        self.names, numels = list(weights), [weight.numel() for weight in weights.values()]
        self.gradient = torch.zeros(sum(numels), dtype=gradient_dtype, device=device)
        self._parts = dict(zip(self.names, self.gradient.split(numels), strict=True))
        self._rounds = dict.fromkeys(self.names, 0)
        for mine, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(_calling(self, mine))
        return {
            mine.name: ShardedParam(
                mine, weights[mine.name], self._parts[mine.name].view_as(weights[mine.name])
            )
            for mine, _ in parameters
            if weights[mine.name].numel()
        }

    def begin_step(self, microbatches: int) -> None:
        """Expect this many gradients of each."""
        self._expected, self._rounds = microbatches, dict.fromkeys(self.names, 0)
        self.seen.clear()

    def unused(self) -> list[str]:
        """Names of its parameters that have not had a gradient in this step."""
        return [name for name, rounds in self._rounds.items() if rounds == 0]

    @property
    def ready(self) -> bool:
        """Whether all its gradients of the step have come, or can come no more."""
        return all(rounds == self._expected for rounds in self._rounds.values())

    def close(self) -> None:
        """No gradient of the step comes any more; what had none is zero."""
        for name in self.unused():
            self._parts[name].zero_()

    def free(self) -> None:
        """Nothing has been gathered."""

    def add(self, mine: Shard, parameter: Tensor) -> None:
        """Add what backward left at a parameter to its gradient."""
        assert parameter.grad is not None, mine.name
        if self._watch:
            self.seen.append((mine.name, parameter.grad.isfinite().all()))
        self._put(mine.name, parameter.grad.flatten())
        parameter.grad = None
        self._go_on()

    def _put(self, name: str, gradient: Tensor) -> None:
        """The first gradient of a step overwrites what the step before left."""
        if self._rounds[name] == 0:
            self._parts[name].copy_(gradient)
        else:
            self._parts[name].add_(gradient)
        self._rounds[name] += 1

    def _go_on(self) -> None:
        if self.ready and self.sums.overlap:
            self.sums.start(ready_only=True)


class ShardedUnit(Unit):
    """Parameters that ranks divide and gather together, and the gradient of my rows of them."""

    def __init__(self, module: nn.Module, division: Division, sums: SumsInOrder) -> None:
        super().__init__(module, division, sums)
        self._sum: Tensor | None = None
        self._read = 0
        self._finite: Tensor | None = None

    @property
    def fsdp(self) -> FSDPModule:
        """The module, once `fully_shard` has changed its class."""
        assert isinstance(self.module, FSDPModule), self.module
        return self.module

    def connect(
        self,
        parameters: Sequence[tuple[Shard, nn.Parameter]],
        *,
        gradient_dtype: torch.dtype,
        watch: bool,
    ) -> dict[str, ShardedParam]:
        """Let FSDP2 sum the gradients of these rows, through us; weights are where FSDP2 sends them
        from."""
        group = self.division.slices
        self.fsdp.set_custom_all_gather(AllGatherParams(group))  # type: ignore[arg-type]  # theirs is a private class
        local_params = super().connect(parameters, gradient_dtype=gradient_dtype, watch=watch)
        if not parameters:
            return local_params
        for mine, _ in parameters:
            numel = self._parts[mine.name].numel()
            assert mine.flat is not None and mine.flat[1] - mine.flat[0] == numel, (mine, numel)
        self.fsdp.set_gradient_divide_factor(DIVIDE_BY)
        self.fsdp.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        self.fsdp.set_reduce_scatter_unused_params(
            True
        )  # else what is sent depends on what forward used
        self.fsdp.set_custom_reduce_scatter(ReduceGradients(group, self if watch else None))  # type: ignore[arg-type]  # the same
        self.fsdp.set_all_reduce_hook(self._arrived)
        return local_params

    def unused(self) -> list[str]:
        """Names of its parameters, if none of them has had a gradient in this step."""
        return self.names if not any(self._rounds.values()) else []

    def free(self) -> None:
        """Keep my rows only."""
        self.fsdp.reshard()

    def look_at(self, message: Tensor, ranks: int) -> None:
        """Note where the gradients of all rows, [ranks, what each of them keeps], are finite before
        they are summed."""
        self._finite = message.view(ranks, -1).isfinite().all(0)

    def _arrived(self, message: Tensor) -> None:
        """Take the sums of one microbatch before FSDP2 rounds them to the weights' dtype.

        They lie one after the other, each padded to what the first rank keeps. FSDP2 then visits
        the parameters in that order, so `add` knows which is which.
        """
        self._sum, self._read = message, 0
        for x in (message, self._finite) if message.is_cuda else ():
            if x is not None:  # allocated on the stream that sums, and read on this one
                x.record_stream(torch.cuda.current_stream())

    def add(self, mine: Shard, parameter: Tensor) -> None:
        """Add the next part of the message to a gradient."""
        assert self._sum is not None, mine.name
        numel, sent = self._parts[mine.name].numel(), padded_numel(mine, self.division.slices.size)
        self._put(mine.name, self._sum[self._read : self._read + numel])
        if self._finite is not None:
            self.seen.append((mine.name, self._finite[self._read : self._read + sent].all()))
        parameter.grad = None
        self._read += sent
        if self._read == self._sum.numel():
            self._sum = None
            self._go_on()


def _calling(unit: Unit, mine: Shard) -> Callable[[Tensor], None]:
    # A parameter that torch refers to, too, hides its hooks from the garbage collector: a strong
    # reference in one would keep the unit for ever, and with it process groups.
    its = weakref.ref(unit)

    def add(parameter: Tensor) -> None:
        owner = its()
        assert owner is not None, mine.name
        owner.add(mine, parameter)

    return add


class AllGatherParams:
    """FSDP2's all-gather, noted for the report of a hang."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Every rank's input, in the order of ranks."""
        entry = note(self.group, "all_gather", input_tensor)
        work: dist.Work | None = dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        finished(entry) if work is None else on_its_way(entry, work)
        return work


class ReduceGradients:
    """FSDP2's reduce-scatter, noted for the report of a hang."""

    def __init__(self, group: Group, watched_by: ShardedUnit | None) -> None:
        self.group, self.watched_by = group, watched_by

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a message."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
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
    chunk: nn.Module,
    divisions: Divisions,
    device: torch.device,
    *,
    whole: Set[nn.Parameter],
    gradient_dtype: torch.dtype,
    keep_gathered: bool,
) -> None:
    """Cut the parameters of a model on the meta device over the ranks that divide them, all but
    those in `whole`, and give my rows of them memory: zeros.

    The chunk frees nothing after forward: its head is asked for the loss when forward has returned.
    """
    ranks = {
        grid: _ranks(each.slices, device)
        for grid, each in divisions.items()
        if each.slices.size > 1
    }
    if not ranks:  # a stage without experts, where only these have ranks to be divided over
        _give_memory(chunk, device)
        return
    policy = MixedPrecisionPolicy(reduce_dtype=gradient_dtype, cast_forward_inputs=False)
    cut = partial(fully_shard, mp_policy=policy, ignored_params={*whole})
    for module in list(_inner_parts(chunk)):
        over = ranks.get(_grid_of(module))
        if over is None:
            continue
        cut(module, mesh=over, reshard_after_forward=not keep_gathered)
        if _grid_of(module) == "expert":
            _expose_recomputed_outputs(module)
        plain = isinstance(module, VocabHead) and module.reads_table_again
        if (
            isinstance(module, VocabEmbedding | VocabHead)
            and isinstance(module, FSDPModule)
            and not plain
        ):
            module.set_unshard_in_backward(False)  # their backward does not read the table
        if isinstance(module, VocabHead):
            register_fsdp_forward_method(module, "loss")
            register_fsdp_forward_method(module, "best")
    # Where it has nothing to divide it is still what FSDP2 counts forward and backward passes by.
    cut(chunk, mesh=ranks.get("dense", next(iter(ranks.values()))), reshard_after_forward=False)
    if keep_gathered:
        assert isinstance(chunk, FSDPModule)
        chunk.set_reshard_after_backward(False)
    _give_memory(chunk, device)


def _ranks(group: Group, device: torch.device) -> DeviceMesh:
    """The same ranks, as FSDP2 wants them."""
    assert group.handle is not None, group
    ranks = DeviceMesh.from_group(group.handle, device.type, mesh_dim_names=("shard",))
    assert ranks.get_local_rank() == group.rank, (ranks, group)
    return ranks


class _Aside:
    """Something that FSDP2 does not look into."""

    def __init__(self, rows: RecomputedOutput) -> None:
        self.rows = rows


def _expose_recomputed_outputs(experts: nn.Module) -> None:
    """Let FSDP2 see the rows that experts read, also where they are rebuilt in backward: it
    sends a unit's gradients when those of all tensors among the unit's inputs are there, and
    would take the rows' weights for all of them."""

    def take_apart(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (sent,) = args
        rows = sent.rows
        return (
            (sent._replace(rows=rows.value), _Aside(rows))
            if isinstance(rows, RecomputedOutput)
            else args
        )

    def put_together(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(args) == 1:
            return args
        sent, aside = args
        assert isinstance(sent, DispatchedTokens) and isinstance(sent.rows, Tensor)
        return (sent._replace(rows=replace(aside.rows, value=sent.rows)),)

    experts.register_forward_pre_hook(take_apart, prepend=True)  # before FSDP2's own
    experts.register_forward_pre_hook(put_together)


def divisions_of(parameters: Parameters, mesh: Mesh) -> Divisions:
    """How ranks divide what lies on each grid."""
    return {
        grid: division_of(3, mesh, grid)
        for grid in sorted({"dense", *(shard.grid for shard, _, _ in parameters)})
    }


def divide_for_forward(
    chunks: Sequence[nn.Module],
    parameters: Parameters,
    mesh: Mesh,
    *,
    device: torch.device,
    keep_gathered: bool = False,
) -> list[tuple[Shard, Tensor]]:
    """Divide the weights of a model on the meta device over the ranks that
    `FullyShardedDataParallel` divides them over, for forward passes alone.

    Returns my rows of each, for the caller to fill; weights of which I have no row are left out.
    Unlike `FullyShardedDataParallel` it makes no room for gradients, and no backward may follow.
    `keep_gathered`: as there.
    """
    divisions = divisions_of(parameters, mesh)
    _check_consistent_across_ranks(parameters, mesh)
    _divide(
        chunks,
        parameters,
        divisions,
        device=device,
        gradient_dtype=torch.float32,
        keep_gathered=keep_gathered,
    )
    for module in (part for chunk in chunks for part in (*_inner_parts(chunk), chunk)):
        if isinstance(module, FSDPModule):
            group = divisions[_grid_of(module)].slices
            module.set_custom_all_gather(AllGatherParams(group))  # type: ignore[arg-type]  # theirs is a private class
    return _my_rows(parameters, divisions)


def _divide(
    chunks: Sequence[nn.Module],
    parameters: Parameters,
    divisions: Divisions,
    *,
    device: torch.device,
    gradient_dtype: torch.dtype,
    keep_gathered: bool,
) -> None:
    """Cut every chunk, and leave the hooks and sums to the caller."""
    _refuse_shared_chunks(chunks)
    stays = {
        getattr(module, name)
        for shard, module, name in parameters
        if _stays(shard, module, name, divisions)
    }
    for chunk in chunks:
        fully_shard_chunk(
            chunk,
            divisions,
            device,
            whole=stays,
            gradient_dtype=gradient_dtype,
            keep_gathered=keep_gathered,
        )


def _stays(shard: Shard, module: nn.Module, name: str, divisions: Divisions) -> bool:
    """Whether this rank keeps all of its box of a parameter."""
    trained: bool = getattr(module, name).requires_grad
    return divisions[shard.grid].slices.size == 1 or (shard.inputs == 0 and not trained)


def _mine(shard: Shard, division: Division) -> Shard:
    """My rows, where several ranks divide them."""
    group = division.slices
    return (
        shard
        if group.size == 1
        else rows_of(shard, group.rank, group.size, SLICES_OVER[shard.grid])
    )


def _my_rows(parameters: Parameters, divisions: Divisions) -> list[tuple[Shard, Tensor]]:
    """My rows of each; weights of which I have no row are left out."""
    mine = [
        (
            shard
            if _stays(shard, module, name, divisions)
            else _mine(shard, divisions[shard.grid]),
            module,
            name,
        )
        for shard, module, name in parameters
    ]
    held = [(shard, _local(getattr(module, name))) for shard, module, name in mine]
    return [(shard, rows) for shard, rows in held if rows.numel()]


def _check_consistent_across_ranks(parameters: Parameters, mesh: Mesh) -> None:
    """Make sure that ranks that divide something have the same of it; collective."""
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


def _refuse_shared_chunks(chunks: Sequence[nn.Module]) -> None:
    """Each chunk is cut by itself, so no two of a rank may share a weight."""
    held = [{id(parameter) for parameter in chunk.parameters()} for chunk in chunks]
    if sum(map(len, held)) > len(set().union(*held)):
        raise PlanError(
            f"parallel.zero=3 with {len(chunks)} chunks on one rank that share the table of the "
            "vocabulary: each chunk "
            "is cut by itself. Set model.tied_embeddings=false and model.mtp.num_layers=0, "
            "parallel.pipeline.vpp=1, or "
            f"parallel.zero=2."
        )


def _unit(module: nn.Module, divisions: Divisions, sums: SumsInOrder) -> Unit:
    """What gathers the parameters of a part, or has them."""
    division = divisions[_grid_of(module)]
    return (ShardedUnit if division.slices.size > 1 else Unit)(module, division, sums)


def _as_backward_ends(units: Sequence[Unit], chunks: Sequence[nn.Module]) -> list[Unit]:
    """The last layer first, behind its experts; a chunk's own parameters, of which both ends may
    have a part, after all inside it."""
    unit_of = {id(unit.module): unit for unit in units}
    order: list[nn.Module] = []
    for chunk in reversed(chunks):
        order += _experts_apart(chunk)
        for layer in reversed(list(_inner_units(chunk))):
            order += [*_experts_in(layer), layer]
        order.append(chunk)
    return [unit_of[id(module)] for module in order]


def _gather_nothing_ahead(chunk: nn.Module) -> None:
    """Let backward gather what it needs when it needs it. FSDP2 has no switch for that, but may
    be told what to gather ahead: here the chunk's own parameters, which are there."""
    for module in (*_inner_parts(chunk), chunk):
        if isinstance(module, FSDPModule):
            assert isinstance(chunk, FSDPModule)
            module.set_modules_to_backward_prefetch([chunk])


def _inner_parts(chunk: nn.Module) -> Iterator[nn.Module]:
    """What is gathered apart from the rest of a chunk, parts of a part before it."""
    for unit in _inner_units(chunk):
        yield from _experts_in(unit)
        yield unit
    yield from _experts_apart(chunk)


def _experts_apart(chunk: nn.Module) -> list[nn.Module]:
    """Experts outside its layers: of MTP layers."""
    inside = {id(part) for unit in _inner_units(chunk) for part in _experts_in(unit)}
    return [part for part in _experts_in(chunk) if id(part) not in inside]


def _inner_units(chunk: nn.Module) -> Iterator[nn.Module]:
    """Its layers, and tables that are used in one place."""
    uses = Counter(
        id(table.weight)
        for table in chunk.modules()
        if isinstance(table, VocabEmbedding | VocabHead)
    )
    for child in chunk.children():
        if isinstance(child, VocabEmbedding | VocabHead) and uses[id(child.weight)] == 1:
            yield child
        if isinstance(child, nn.ModuleList):
            yield from child


def _experts_in(layer: nn.Module) -> Iterator[nn.Module]:
    """The largest modules inside that have parameters of experts and nothing else."""
    for child in layer.children():
        grids = _grids_in(child)
        if grids == {"expert"}:
            yield child
        elif "expert" in grids:
            yield from _experts_in(child)


def _grid_of(module: nn.Module) -> str:
    """On which grid the parameters of a part lie, but for those of parts inside it."""
    return "expert" if _grids_in(module) == {"expert"} else "dense"


def _grids_in(module: nn.Module) -> set[str]:
    """Grids of all parameters inside."""
    notes = (each.__dict__.get("declared", {}) for each in module.modules())
    return {declared.shard.grid for note in notes for declared in note.values()}


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
    """My rows, or all there is, as a plain tensor."""
    with torch.no_grad():
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data

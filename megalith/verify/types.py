"""Type check of a layout: is every gradient reduced as it must be?

The model is built on meta tensors at several ranks of a world of any size, without a process group,
and runs forward and backward as in a training step. A checker tracks which of four types (R, I, V,
P: see parallel/collectives.py) every tensor has along every axis of the grid. See
docs/concepts/types.md.

Only this file and verify/type_rules.py use the checker library, `spmd_types`; training never
imports it. tests/verify/test_types_contract.py checks what we rely on in it.
"""

import functools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import spmd_types as checker
import torch
from spmd_types import I, MeshAxis, R, SpmdTypeError, V
from spmd_types import PerMeshAxisLocalSpmdType as Type
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import (
    ContextConfig,
    ContextKind,
    OffloadConfig,
    ParallelConfig,
    RecomputeConfig,
)
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict, to_dict
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import (
    TokenPermutation,
    seq_params_from_lengths,
    seq_params_from_slices,
    with_masks,
    with_padding,
)
from megalith.kernels.routing import Choice
from megalith.models.decoder import Decoder, build_chunks, iter_parameter_specs
from megalith.nn.build import NO_OFFLOAD, NO_RECOMPUTE, build_context
from megalith.nn.layer import Layer
from megalith.nn.moe import Experts
from megalith.parallel import expert
from megalith.parallel import expert as dispatchers
from megalith.parallel import recompute as recomputation
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import Mesh, build_meta_mesh
from megalith.parallel.recompute import FrozenLayerRunner
from megalith.plan.context import WHOLE, Slicing, layer_context_kind, plan_slices
from megalith.plan.frozen import first_trained_layer
from megalith.plan.grid import Grid, model_grid
from megalith.plan.layers import plugins_without_layer_kind
from megalith.plan.layers.moe import BUILT_IN
from megalith.plan.parameters import layer_parameters
from megalith.plan.schedule import rank_and_chunk, schedule_name, stage_index, stage_placement
from megalith.plan.shards import DATA_AXES, DENSE_AXES, EXPERT_AXES, EXPERT_PARTS, PARTS, Shard
from megalith.plan.stages import Stage, StageBoundary, plan_stages, stage_boundary
from megalith.testing.inject import patched
from megalith.train.objective import LossNormalizer, LossTerm, sum_lm_losses
from megalith.verify.faults.plant import find_fault, plant_fault
from megalith.verify.type_rules import IN_WORDS, axes_here, find_types, installed_rules

WORDS = (
    (
        r"Are you missing a collective or a reinterpret/convert call\? e\.g\.,",
        "Is a collective missing? For example:",
    ),
    (r"convert\(tensor, (\S+), src=I, dst=R\)", r"copy_to_tp over \1"),
    (r"all_reduce\(tensor, (\S+), src=P, dst=I\)", r"reduce_from_tp over \1"),
    (r"all_reduce\(tensor, (\S+), src=P, dst=R\)", r"all_reduce over \1"),
    (r"reinterpret\(loss, (\S+), src=V, dst=P\)", r"mark_partial over \1"),
    (
        r"^ *convert\(tensor, \S+, src=[IR], dst=P\).*\n?",
        "",
    ),  # zeros on all ranks but 0: we have no such operation
)
"""Replacements of terms in the checker's messages by our function names."""


# --- report


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Type error at one place of the model, on one or more ranks."""

    where: str
    """Module that was running, or the phase outside of modules."""

    what: str
    """Reason of the error."""

    detail: str = ""
    """Operation and types of its operands, on the first of these ranks."""

    ranks: tuple[int, ...]
    """Ranks with this problem."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.where} (rank {ranks}): {self.what}" + (
            f"\n{self.detail}" if self.detail else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeReport:
    """Result of the type check of a layout."""

    world: int
    """World size of the layout."""

    axes: dict[str, int]
    """Ranks along each axis, along its two parts where both have several, and along the expert
    axes."""

    ranks: tuple[int, ...]
    """Ranks at which the model was built and run."""

    parameters: int
    """Checked parameters per rank."""

    collectives: dict[str, int]
    """Calls of each differentiable collective in a forward pass, such as `all_gather over tp`;
    backward runs the conjugates."""

    problems: tuple[Problem, ...]
    """Empty if every gradient is reduced correctly."""

    untyped: tuple[str, ...] = ()
    """Operations of training that this check does not cover, one sentence each; float64
    verification does."""

    seconds: float
    """Wall time without imports."""

    peak_gib: float
    """Peak memory of the process, including imports."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def unproved(self) -> tuple[str, ...]:
        """Axes of one rank, over which collectives are no-ops, so that nothing is checked."""
        return tuple(axis for axis in PARTS if self.axes[axis] == 1)


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """Settings of a run with which layers are built, besides the model and its layout."""

    recompute: RecomputeConfig = NO_RECOMPUTE
    offload: OffloadConfig = NO_OFFLOAD
    lora: LoraConfig | None = None
    optim: OptimConfig = TRAIN_ALL
    """Its frozen parameters."""

    @classmethod
    def of_run(cls, run: TrainRun) -> Self:
        """Return those of a run."""
        return cls(run.recompute, run.offload, run.lora, run.optim)


DEFAULT_TRAINING = TrainingSettings()


def type_check(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world: int,
    ranks: Sequence[int] | None = None,
    training: TrainingSettings = DEFAULT_TRAINING,
    masked: bool = False,
) -> TypeReport:
    """Check a layout of `world` ranks at some of its ranks; unset: the first, a middle one and the
    last.

    In a pipeline, every kind of stage is checked at each of them. Every second position uses
    documents of uneven lengths instead of rows. What `training.recompute` runs again in backward is
    checked again. With `masked`, tokens have attention masks. Patches
    `torch.autograd.Function.apply` while it runs. In a process with other computing threads, use
    `type_check_in_child` instead.

    Raises:
        PlanError: the degrees do not multiply to the world size, or a rank is not in it.
    """
    started, requested_dispatcher = time.perf_counter(), parallel.dispatcher
    parallel = (
        parallel if requested_dispatcher in BUILT_IN else replace(parallel, dispatcher="alltoall")
    )
    grid = model_grid(parallel, model, world)
    num_frozen_layers = first_trained_layer(model, training.optim)
    positions = (
        representative_positions(grid, parallel, model, num_frozen_layers)
        if ranks is None
        else rank_positions(grid, parallel, model, ranks, num_frozen_layers)
    )
    problems_by_key: dict[tuple[str, str], Problem] = {}
    calls: dict[Kind, Counter[str]] = {}
    names: set[str] = set()
    for number, (rank, chunk) in enumerate(positions):
        rank_model = _build(
            model,
            parallel,
            grid,
            rank,
            chunk,
            training,
            documents=number % 2 == 1,
            masked=masked,
        )
        names |= rank_model.shards.keys()
        kind = stage_kind(
            plan_all_stages(parallel, model),
            _stage_number(grid, parallel, rank, chunk),
            parallel.context,
            model,
        )
        counts = calls[kind] = Counter[str]()
        for problem in [
            *_shard_problems(rank_model, model, parallel, training),
            *_plan_problems(rank_model, model),
            *_run(rank_model, counts),
        ]:
            known = problems_by_key.setdefault((problem.where, problem.what), problem)
            problems_by_key[problem.where, problem.what] = _also_on(known, rank)
    counts = sum(calls.values(), Counter[str]())
    return TypeReport(
        world=world,
        axes=_sizes(grid),
        ranks=tuple(dict.fromkeys(rank for rank, _ in positions)),
        parameters=len(names),
        collectives={
            _translate_message(name, grid): number for name, number in sorted(counts.items())
        },
        problems=tuple(problems_by_key.values()),
        untyped=tuple(untyped(training, model, dispatcher=requested_dispatcher)),
        seconds=time.perf_counter() - started,
        peak_gib=_peak_gib(),
    )


def untyped(
    training: TrainingSettings, model: ModelConfig, *, dispatcher: str = "alltoall"
) -> list[str]:
    """Return the operations of these settings without types: they copy or compare bytes, or depend
    on values."""
    recompute, offload = training.recompute, training.offload
    planned = model.moe is not None and model.moe.aux_loss.sinkhorn
    is_used = {
        f"offload.layers={offload.layers}: copies to host memory and back": offload.layers > 0,
        "recompute.shard_inputs: the type of an input that is all-gathered again is not "
        "checked": recompute.shard_inputs,
        "recompute.check: compares values, which meta tensors do not have": recompute.check,
        f"parallel.dispatcher={dispatcher}: external package; checked with alltoall": dispatcher
        not in BUILT_IN,
        "model.moe.aux_loss.sinkhorn: iterates until values converge; checked with top-k "
        "routing": planned,
    }
    for setting in plugins_without_layer_kind(model):
        is_used[f"{setting}: has no `layer_kind`; planning counts the built-in layer"] = True
    if recompute.granularity == "selective" and (
        as_recomputed := {"norm", "mlp_act"} & {*recompute.modules}
    ):
        is_used[f"recompute.modules={sorted(as_recomputed)}: outputs recomputed in backward"] = True
    return [text for text, used in is_used.items() if used]


def representative_ranks(grid: Grid) -> tuple[int, ...]:
    """Return the first rank, the one in the middle of every axis, and the last, without
    duplicates."""
    middle = grid.rank_at(
        {axis: size // 2 for axis, size in zip(grid.axes, grid.sizes, strict=True)}
    )
    return tuple(dict.fromkeys((grid.ranks[0], middle, grid.ranks[-1])))


Kind = tuple[
    tuple[bool, bool, int, bool],
    frozenset[tuple[ContextKind, ModelConfig, bool, bool]],
    StageBoundary,
    StageBoundary,
]
"""Properties in which stages differ: embedding, last norm, MTP layers and loss; types of layers;
states received and sent."""


def stage_kind(
    stages: Sequence[Stage], number: int, context: ContextConfig, model: ModelConfig
) -> Kind:
    """Return the kind of a stage; layers differ in context parallelism, parts and sizes."""
    stage = stages[number]
    layers = frozenset(
        (
            layer_context_kind(context, layer),
            model.at(layer),
            model.has_experts(layer),
            model.uses_cross_layer_source(layer),
        )
        for layer in stage.layers
    )
    parts = stage.embedding, stage.norm, stage.num_mtp_layers, stage.loss
    return (
        parts,
        layers,
        stage_boundary(model, stages, number),
        stage_boundary(model, stages, number + 1),
    )


def plan_all_stages(parallel: ParallelConfig, model: ModelConfig) -> tuple[Stage, ...]:
    """Return every stage of the layout."""
    return plan_stages(
        parallel.pipeline, pp=parallel.pp, num_layers=model.num_layers, depths=model.mtp.num_layers
    )


def representative_positions(
    grid: Grid, parallel: ParallelConfig, model: ModelConfig, num_frozen: int = 0
) -> list[tuple[int, int]]:
    """Return (rank, chunk) of every kind of stage at the first, middle and last position of all
    other axes.

    Stages within the first `num_frozen` layers, which are frozen, are separate kinds.
    """
    placement = stage_placement(schedule_name(parallel.pipeline))
    stages = plan_all_stages(parallel, model)
    first_of_kind: dict[tuple[Kind, bool], int] = {}
    for number, stage in enumerate(stages):
        kind = stage_kind(stages, number, parallel.context, model), stage.layers.stop <= num_frozen
        first_of_kind.setdefault(kind, number)
    positions = []
    for rank in representative_ranks(grid):
        for number in first_of_kind.values():
            pipeline_rank, chunk = rank_and_chunk(
                number, num_ranks=parallel.pp, placement=placement
            )
            positions.append((grid.rank_at(grid.coordinates(rank) | {"pp": pipeline_rank}), chunk))
    return list(dict.fromkeys(positions))


def rank_positions(
    grid: Grid,
    parallel: ParallelConfig,
    model: ModelConfig,
    ranks: Sequence[int],
    num_frozen: int = 0,
) -> list[tuple[int, int]]:
    """Return (rank, chunk) of every kind of stage on these ranks."""
    stages = plan_all_stages(parallel, model)
    positions = []
    for rank in ranks:
        chunk_of_kind: dict[tuple[Kind, bool], int] = {}
        for chunk in range(parallel.pipeline.vpp):
            number = _stage_number(grid, parallel, rank, chunk)
            kind = (
                stage_kind(stages, number, parallel.context, model),
                stages[number].layers.stop <= num_frozen,
            )
            chunk_of_kind.setdefault(kind, chunk)
        positions += [(rank, chunk) for chunk in sorted(chunk_of_kind.values())]
    return positions


def _stage_number(grid: Grid, parallel: ParallelConfig, rank: int, chunk: int) -> int:
    """Return the stage of a chunk of a rank."""
    placement = stage_placement(schedule_name(parallel.pipeline))
    return stage_index(
        grid.coordinates(rank)["pp"], chunk, num_ranks=parallel.pp, placement=placement
    )


def _sizes(grid: Grid) -> dict[str, int]:
    sizes = {axis: grid.size(axis) for axis in (*PARTS, *(["pp"] if grid.size("pp") > 1 else []))}
    divided = [parts for parts in PARTS.values() if min(map(grid.size, parts)) > 1]
    experts = (
        {} if grid.experts is None else {axis: grid.size(axis) for axis in ("edp", "ep", "etp")}
    )
    return sizes | {part: grid.size(part) for parts in divided for part in parts} | experts


def _also_on(problem: Problem, rank: int) -> Problem:
    ranks = tuple(sorted({*problem.ranks, rank}))
    return Problem(where=problem.where, what=problem.what, detail=problem.detail, ranks=ranks)


def _peak_gib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # bytes on macOS, KiB elsewhere
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


# --- model of one rank on meta tensors


@dataclass(frozen=True, slots=True)
class PaperBatch:
    """One microbatch of meta tensors."""

    ids: Tensor
    labels: Tensor
    inputs: LayerInputs
    mtp_inputs: tuple[tuple[Tensor, Tensor], ...] = ()
    """(ids, labels) of every MTP depth."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank of the layout: groups without processes, and its model chunks on meta tensors."""

    mesh: Mesh
    chunks: nn.ModuleList
    """All chunks of the rank: the checked one may use an embedding of another."""

    chunk: int
    batch: PaperBatch
    hidden: Mapping[str, Type]
    """Expected types of hidden states between layers and between stages."""

    received: Mapping[str, Tensor]
    """Tensors from the previous stage by name; empty on the first stage."""

    gradients: Mapping[str, Tensor]
    """Gradients from the next stage by name; empty on the last stage."""

    @property
    def model(self) -> Decoder:
        """The chunk that is checked."""
        chunk = self.chunks[self.chunk]
        assert isinstance(chunk, Decoder)
        return chunk

    @property
    def shards(self) -> dict[str, Shard]:
        """Shard of every parameter by name."""
        return _shards_of(self.model)


def _build(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    rank: int,
    chunk: int,
    training: TrainingSettings,
    *,
    documents: bool,
    masked: bool = False,
) -> RankModel:
    """Build one rank outside of the check, which would reject operations on tensors without types.

    It is built as in training, except for what `untyped` lists.
    """
    mesh = build_meta_mesh(grid, rank=rank)
    chunks = _chunks(model, mesh, parallel, training)
    split = parallel.sp and mesh.tp.size > 1
    hidden = {axis: V if axis in DATA_AXES or split else I for axis in DENSE_AXES}
    batch = paper_batch(
        parts=mesh.tp.size,
        documents=documents,
        slicing=local_slicing(parallel, mesh),
        num_mtp_layers=model.mtp.num_layers,
        balanced=model.moe is not None and not model.moe.aux_loss.sinkhorn,
        masked=masked,
    )
    count = batch.inputs.seq_params.num_tokens // (mesh.tp.size if split else 1)
    stages, number = plan_all_stages(parallel, model), _stage_number(grid, parallel, rank, chunk)
    received, gradients = (
        {
            tensor.name: torch.empty(
                tensor.sizes(num_tokens=count, hidden_size=model.hidden_size),
                dtype=torch.bfloat16,
                device="meta",
                requires_grad=is_input and tensor.requires_grad,
            )
            for tensor in stage_boundary(model, stages, number + (not is_input))
        }
        for is_input in (True, False)
    )
    return RankModel(mesh, nn.ModuleList(chunks), chunk, batch, hidden, received, gradients)


def _chunks(
    model: ModelConfig,
    mesh: Mesh,
    parallel: ParallelConfig,
    training: TrainingSettings,
) -> list[Decoder]:
    return build_chunks(
        build_context(
            model,
            mesh,
            parallel,
            dtype=torch.bfloat16,
            recompute=replace(training.recompute, check=False),
            lora=training.lora,
            optim=training.optim,
        )
    )


def paper_batch(
    *,
    parts: int,
    documents: bool,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
    balanced: bool = False,
    masked: bool = False,
) -> PaperBatch:
    """Return eight tokens per rank, plus padding: two rows, or documents of uneven lengths.

    `balanced`: with the inputs of aux losses; `masked`: with padding and a mask for all documents
    but the second.
    """
    count = 8 * parts * slicing.ranks
    lengths = [3, 1, count - 4] if documents else [count // 2] * 2
    if slicing.ranks > 1:
        slices = plan_slices(lengths, row=count if documents else count // 2, slicing=slicing)
        seq_params = seq_params_from_slices(slices, slicing, device="meta")
    else:
        seq_params = seq_params_from_lengths(lengths, device="meta")
    if masked:
        masks = [torch.empty(n, n, dtype=torch.bool, device="meta") for n in lengths]
        seq_params = with_masks(seq_params, [masks[0], None, *masks[2:]])
        seq_params = with_padding(seq_params, torch.empty(count, dtype=torch.bool, device="meta"))
    ids, labels, numbers, *others = (
        torch.empty(seq_params.num_tokens, dtype=torch.int64, device="meta")
        for _ in range(3 + 2 * num_mtp_layers)
    )
    pairs = tuple(zip(others[0::2], others[1::2], strict=True))
    inputs = LayerInputs(
        seq_params,
        dropout_key=DropoutKey(0, numbers),
        router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0) if balanced else None),
    )
    return PaperBatch(ids, labels, inputs, pairs)


def mesh_axes(grid: Grid, names: Sequence[str] = DENSE_AXES) -> dict[str, MeshAxis]:
    """Return the checker's axes of the grid: (size, stride). It ignores axes of one rank."""
    return {axis: MeshAxis.of(*grid.strides(axis)) for axis in names}


@contextmanager
def experts_on_their_grid(grid: Grid) -> Iterator[None]:
    """Type operations between dispatch and combine along the expert axes.

    A rank's own tokens, V on every axis, are V on every axis of the other grid; tokens that ranks
    share are rejected there.
    """
    if grid.experts is None:
        yield
        return
    axes, dense = mesh_axes(grid, EXPERT_AXES), mesh_axes(grid)
    with ExitStack() as undo:
        for kind, method in EXPERT_WORK:
            undo.enter_context(
                patched(kind, method, _within(axes, getattr(kind, method), back=dense))
            )
        yield


EXPERT_WORK: tuple[tuple[type, str], ...] = (
    (expert.LocalDispatcher, "__call__"),
    (expert.AllToAllDispatcher, "__call__"),
    (expert.AllGatherDispatcher, "__call__"),
    (Experts, "forward"),
    (expert.PendingAllToAll, "wait"),
    (expert.LocalCombiner, "combine"),
    (expert.AllToAllCombiner, "combine"),
    (expert.AllGatherCombiner, "combine"),
    (dispatchers.ReferenceDispatcher, "__call__"),
    (dispatchers.ReferenceCombiner, "combine"),
)
"""Methods that run on the expert grid."""


def _within(
    axes: dict[str, MeshAxis], function: Callable[..., Any], *, back: dict[str, MeshAxis]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with checker.set_current_mesh(axes):
            inputs = [_read_in(axes, argument) for argument in arguments]
            result = function(*inputs)
        return _read_in(back, result) if function.__name__ == "combine" else result

    return run


def _read_in(axes: dict[str, MeshAxis], value: Any) -> Any:
    """Convert tensors to another factorization of the ranks."""
    if isinstance(value, Choice):
        return Choice(*(_read_in(axes, part) for part in value))
    if not isinstance(value, Tensor):
        return value
    with checker.set_current_mesh(axes):
        mesh = checker.current_mesh()
        types = checker.get_local_type(value)
        return (
            value if mesh is None or types.keys() <= mesh else checker.reinterpret_mesh(value, mesh)
        )


# --- initial types


def declare(model: nn.Module, grid: Grid) -> None:
    """Set the types of parameters from their `Shard`s: V if sharded; else I if declared invariant,
    else R.

    The type V is derived, never declared: a replicated weight declared V would type-check, and its
    gradient would never be summed. Other tensors of modules are constants that all ranks compute
    alike: R.
    """
    for declared, module, name in iter_parameter_specs(model):
        of_expert = declared.shard.grid == "expert"
        with checker.set_current_mesh(mesh_axes(grid, EXPERT_AXES)) if of_expert else nullcontext():
            checker.assert_type(
                getattr(module, name), _by_axis(functools.partial(_parameter_type, declared.shard))
            )
    for module in model.modules():
        for value in (*module.__dict__.values(), *module.buffers(recurse=False)):
            if isinstance(value, Tensor):
                checker.assert_type(value, _by_axis(lambda _: R))


def declare_inputs(batch: PaperBatch) -> None:
    """Set the types of a batch: V over dp and cp, R over tp.

    The tokens of all cp ranks (`PackedSeqParams.whole`), their order and their masks are replicated
    over cp.
    """
    seq_params = batch.inputs.seq_params
    tensors = [getattr(seq_params, field.name) for field in fields(seq_params)]
    context = seq_params.context
    local, shared = (
        ((), ()) if context is None else (_orders(context.neighbors), _orders(context.all_ranks))
    )
    visible = seq_params.whole.visible
    masks = () if visible is None else (visible.keys, visible.pairs, visible.rows)
    local, shared = (
        (local, (*shared, *masks)) if context is not None else ((*local, *masks), shared)
    )
    if context is not None:
        whole = context.whole
        shared = *shared, whole.position_ids, whole.document_ids, whole.valid
    mtp_inputs = [value for pair in batch.mtp_inputs for value in pair]
    for value in (
        batch.ids,
        batch.labels,
        *mtp_inputs,
        *tensors,
        *(batch.inputs.dropout_key or ()),
        *local,
    ):
        if isinstance(value, Tensor):
            checker.assert_type(value, _by_axis(lambda axis: V if axis in DATA_AXES else R))
    for value in shared:
        if isinstance(value, Tensor):
            checker.assert_type(value, _by_axis(lambda axis: V if axis in PARTS["dp"] else R))


def _orders(join: TokenPermutation) -> tuple[Tensor, Tensor]:
    return join.order, join.back


def _by_axis(type_along: Callable[[str], Type]) -> dict[MeshAxis, Type]:
    return {axis: type_along(name) for name, axis in axes_here().items()}


def _parameter_type(shard: Shard, axis: str) -> Type:
    if axis in shard.cut:
        return V
    return I if axis in shard.invariant else R


def _shards_of(model: nn.Module) -> dict[str, Shard]:
    return {declared.shard.name: declared.shard for declared, _, _ in iter_parameter_specs(model)}


def _shard_problems(
    rank_model: RankModel,
    model: ModelConfig,
    parallel: ParallelConfig,
    training: TrainingSettings,
) -> Iterator[Problem]:
    """Check `Shard.cut`: ranks along a cut axis must have different boxes, and along others the
    same.

    The checker relies on `cut` and accepts V anywhere.
    """
    grid, rank = rank_model.mesh.grid, rank_model.mesh.rank
    coordinates = grid.coordinates(rank)
    training = replace(training, recompute=NO_RECOMPUTE)
    axes = DENSE_AXES if grid.experts is None else DENSE_AXES + EXPERT_AXES
    for axis in (axis for axis in axes if grid.size(axis) > 1):
        step = (coordinates[axis] + 1) % grid.size(axis) - coordinates[axis]
        neighbor = rank + step * grid.strides(axis)[1]
        other = build_meta_mesh(grid, rank=neighbor)
        neighbor_shards = _shards_of(_chunks(model, other, parallel, training)[rank_model.chunk])
        for name, shard in rank_model.shards.items():
            if axis not in (EXPERT_AXES if shard.grid == "expert" else DENSE_AXES):
                continue
            same, cut = shard.box == neighbor_shards[name].box, axis in shard.cut
            if same == cut and shard.numel > 0:
                what = (
                    f"its shard is {'cut' if cut else 'whole'} along {axis}, but the next rank "
                    f"along it has {'the same' if same else 'another'} box. Use Shard.split_dim "
                    "with exactly the axes "
                    "that shard it, because they determine the reduction of gradients."
                )
                yield Problem(where=name, what=what, ranks=(rank,))


def _plan_problems(rank_model: RankModel, model: ModelConfig) -> Iterator[Problem]:
    """Compare the parameters of the stage's layers with those that `plan/layers` counts, from which
    memory and communication are estimated. Experts are on another grid and are not compared."""
    if plugins_without_layer_kind(model):
        return
    tp, rank = rank_model.mesh.tp, rank_model.mesh.rank
    for layer in rank_model.model.stage.layers:
        planned = {
            one.name: one.numel
            for one in layer_parameters(model, layer, tp=tp.size, tp_rank=tp.rank)
            if one.grid == "dense"
        }
        built = {
            name: shard.numel
            for name, shard in rank_model.shards.items()
            if name.startswith(f"layers.{layer}.") and shard.grid == "dense"
        }
        for name in sorted(planned.keys() | built.keys()):
            if ".lora_" not in name and planned.get(name) != built.get(name):
                what = (
                    f"the layer has {built.get(name, 'no')} elements of it, but planning counts "
                    f"{planned.get(name, 'none')}. Correct the `parameters` of its layer kind "
                    "(plan/layers); a plug-in names its own as the attribute `layer_kind`."
                )
                yield Problem(where=name, what=what, ranks=(rank,))


# --- run


class TypeWatch:
    """Tracks the running module, and checks the types of hidden states between layers."""

    def __init__(self, place: RankModel) -> None:
        self.path: list[str] = []
        self.hidden = place.hidden
        first = place.model.stage.layers.start
        for local_name, module in place.model.named_modules():
            name = re.sub(
                r"(?<=^layers\.)\d+", lambda number: str(int(number[0]) + first), local_name
            )
            if name:
                module.register_forward_pre_hook(functools.partial(self._before_forward, name))
                module.register_forward_hook(functools.partial(self._after_forward, name))

    def where(self, phase: str) -> str:
        """Return the innermost running module, else the phase."""
        return self.path[-1] if self.path else phase

    def _before_forward(self, name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.path.append(name)
        if isinstance(module, Layer):
            expect(f"hidden states before {name}", given[0], self.hidden)

    def _after_forward(
        self, name: str, module: nn.Module, given: tuple[Tensor, ...], out: Tensor
    ) -> None:
        if isinstance(module, Layer) or name == "norm":
            expect(f"hidden states after {name}", out, self.hidden)
        self.path.pop()


@dataclass(eq=False)
class TypedRecompute:
    """Recomputed region whose new tensors in the second pass get the types of the first."""

    function: Callable[..., Tensor]
    watch: TypeWatch
    first: list[Mapping[Any, Type]] | None = None  # keys: the checker's
    mode: TorchFunctionMode | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run the region, in the first pass or in a recomputation."""
        if self.first is None:
            self.first, self.mode = (
                [checker.get_local_type(x) for x in tensors],
                _get_current_function_mode(),
            )
            return self.function(*tensors)
        path = list(self.watch.path)
        assert self.mode is not None, "a recomputed region ran outside of the check"
        try:
            with self.mode:  # the checker does not look inside `backward` by itself
                for x, types in zip(tensors, self.first, strict=True):
                    checker.assert_type(x, dict(types))
                return self.function(*tensors)
        except SpmdTypeError:
            raise
        # torch stops a recomputation early by an exception, so modules are not exited
        except BaseException:
            self.watch.path[:] = path
            raise


@contextmanager
def second_passes_typed(watch: TypeWatch) -> Iterator[None]:
    """Type every recomputed region in this context."""

    original = recomputation.recompute

    def typed_recompute(
        function: Callable[..., Tensor], x: Tensor, *others: Tensor, check: bool = False
    ) -> Tensor:
        return original(TypedRecompute(function, watch), x, *others, check=check)

    with patched(recomputation, "recompute", typed_recompute):
        yield


def expect(what: str, x: Tensor, expected: Mapping[str, Type]) -> None:
    """Raise an error unless `x` has the expected types."""
    types = find_types(x)
    for name, axis in axes_here().items():
        if types.get(name) is not expected[name]:
            raise SpmdTypeError(
                f"{what} must be {IN_WORDS[expected[name]]} over {axis!r}, but they are "
                f"{IN_WORDS[types.get(name)]}."
            )


def _run(rank_model: RankModel, counts: Counter[str]) -> Iterator[Problem]:
    """Run forward and backward at one position, up to the first problem."""
    watch, axes = TypeWatch(rank_model), mesh_axes(rank_model.mesh.grid)
    phase = "loss"
    try:
        with (
            installed_rules(counts),
            second_passes_typed(watch),
            experts_on_their_grid(rank_model.mesh.grid),
            checker.traceback_filtering("off"),  # no advice about the library's own settings
            typecheck(),
            checker.set_current_mesh(axes),
        ):
            declare(rank_model.chunks, rank_model.mesh.grid)
            declare_inputs(rank_model.batch)
            for x in (*rank_model.received.values(), *rank_model.gradients.values()):
                checker.assert_type(x, _by_axis(rank_model.hidden.__getitem__))
            ends = _forward(rank_model)
            phase, forward = "backward", counts.copy()
            roots = [
                (x, dx)
                for x, dx in zip(ends, rank_model.gradients.values() or (None,), strict=True)
                if x.requires_grad
            ]
            if len(roots) == 1:  # only a single root may be a partial sum
                roots[0][0].backward(roots[0][1])
            elif roots:  # empty for a stage below all adapters
                torch.autograd.backward([x for x, _ in roots], [dx for _, dx in roots])
            counts.clear()
            counts.update(forward)  # without those of recomputation
    except SpmdTypeError as error:
        what, detail = (
            _translate_message(text, rank_model.mesh.grid)
            for text in (str(error.args[0]), error.context or "")
        )
        yield Problem(
            where=watch.where(phase), what=what, detail=detail, ranks=(rank_model.mesh.rank,)
        )
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
            # An operation without a meta kernel, or one that reads values: a bug of ours.
            raise
        yield Problem(
            where=watch.where(phase), what=f"shape mismatch: {error}", ranks=(rank_model.mesh.rank,)
        )
    else:
        yield from _without_gradient(rank_model)


def _forward(rank_model: RankModel) -> tuple[Tensor, ...]:
    """Return the roots of backward: this rank's part of the mean loss, or the states for the next
    stage."""
    batch, model = rank_model.batch, rank_model.model
    arguments: dict[str, Any] = {  # Any: keyword arguments
        "received": rank_model.received,
        "mtp_inputs": batch.mtp_inputs,
    }
    if not model.stage.loss:
        tensors = model(batch.ids, batch.inputs, **arguments)
        for name, x in tensors.items():
            expect(f"{name} for the next stage", x, rank_model.hidden)
        return tuple(tensors[name] for name in rank_model.gradients)
    outputs = model.outputs(batch.ids, batch.inputs, **arguments)
    losses = sum_lm_losses(outputs, batch.labels, batch.mtp_inputs)
    for loss in losses:
        expect("losses", loss, {axis: V if axis in DATA_AXES else I for axis in DENSE_AXES})
    names = [f"loss {number}" for number in range(len(losses))]
    normalizer = LossNormalizer(
        dict.fromkeys(names, LossTerm("labels")), {"labels": 1000}, rank_model.mesh
    )
    return (normalizer.scale_loss(dict(zip(names, losses, strict=True))),)


def _without_gradient(rank_model: RankModel) -> Iterator[Problem]:
    # With frozen first layers, nothing before this stage is trained.
    is_needed = not isinstance(rank_model.model.run_layers, FrozenLayerRunner)
    for name, x in rank_model.received.items() if is_needed else ():
        if x.requires_grad and x.grad is None:
            what = f"{name} of the previous stage got no gradient. Use it in this stage."
            yield Problem(where=name, what=what, ranks=(rank_model.mesh.rank,))
    for declared, module, name in iter_parameter_specs(rank_model.model):
        parameter = getattr(module, name)
        if parameter.requires_grad and parameter.grad is None:
            yield Problem(
                where=declared.shard.name,
                what="this parameter got no gradient. Use it in the loss, or remove it.",
                ranks=(rank_model.mesh.rank,),
            )


def _translate_message(text: str, grid: Grid) -> str:
    """Replace the checker's names of axes and collectives: tp for `MeshAxis(8:1)`, reduce_from_tp
    for a P -> I sum."""
    names = {part: part for part in DENSE_AXES + EXPERT_AXES}
    for axis, parts in (PARTS if grid.experts is None else PARTS | EXPERT_PARTS).items():
        text = text.replace("_".join(parts), axis)
        if min(map(grid.size, parts)) == 1:  # then the other part is the whole axis
            names |= dict.fromkeys(parts, axis)
    representative_ranks = mesh_axes(grid) | (
        mesh_axes(grid, EXPERT_AXES) if grid.experts is not None else {}
    )
    for name, mesh_axis in representative_ranks.items():
        text = text.replace(repr(mesh_axis), names[name])
        text = re.sub(rf"\b{name}\b", names[name], text)
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text.strip()


# --- in a child process


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """Input of the child process."""

    model: ModelConfig
    parallel: ParallelConfig
    world: int
    ranks: tuple[int, ...] | None = None
    training: TrainingSettings = DEFAULT_TRAINING
    fault: str | None = None


PROGRAM = "from megalith.verify.types import answer; answer()"
"""Code of the child. This file must not be its `__main__`, or its classes would exist twice."""


def type_check_in_child(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world: int,
    ranks: Sequence[int] | None = None,
    training: TrainingSettings = DEFAULT_TRAINING,
    fault: str | None = None,
    timeout_seconds: float = 600.0,
) -> TypeReport:
    """Run `type_check` in a child process, which the checker may modify; with a planted fault, if
    named.

    Raises:
        PlanError: the degrees do not multiply to the world size, or a rank is not in it.
        ConfigError: there is no such fault.
    """
    grid = model_grid(parallel, model, world)
    for rank in ranks or ():
        grid.coordinates(rank)  # rejects invalid ranks before a process is started
    if fault is not None:
        find_fault(fault)
    request = ChildRequest(
        model=model,
        parallel=parallel,
        world=world,
        ranks=None if ranks is None else tuple(ranks),
        training=training,
        fault=fault,
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(to_dict(request)),
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the type check ended with exit code {done.returncode}; its standard error "
            f"is:\n{done.stderr}"
        )
    return from_dict(TypeReport, json.loads(done.stdout))


def answer() -> None:
    """Main function of the child: read a request as JSON from standard input, write a report to
    standard output."""
    request = from_dict(ChildRequest, json.load(sys.stdin))
    with plant_fault(request.fault):
        report = type_check(
            request.model,
            request.parallel,
            world=request.world,
            ranks=request.ranks,
            training=request.training,
        )
    json.dump(to_dict(report), sys.stdout)

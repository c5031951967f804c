"""The type check of a layout: does every gradient meet the sum it needs?

The model is built on meta tensors at several places of a world of any size, without a process
group, and run forward and backward as a training step does, while a checker follows which of four
types (R, I, V, P: see parallel/autograd.py) every tensor has along every axis of the grid.
docs/concepts/types.md tells the story.

This file and verify/type_rules.py alone know the checker library, `spmd_types`; training never
loads it. What we rely on in it is held by tests/verify/test_types_contract.py.
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
from typing import Any

import spmd_types as checker
import torch
from spmd_types import I, MeshAxis, R, SpmdTypeError, V
from spmd_types import PerMeshAxisLocalSpmdType as Type
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from megalith.config.context import ContextConfig, ContextKind
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.tree import from_dict, to_dict
from megalith.kernels.masks import with_masks, with_padding
from megalith.kernels.rebuilt import LayerInput
from megalith.kernels.routing import Choice
from megalith.kernels.tokens import (
    BalanceShare,
    DropoutKey,
    Join,
    PackedSeqParams,
    tokens_of_lengths,
    tokens_of_slices,
)
from megalith.models.decoder import KEEP_ALL, KEEP_HERE, Decoder, build_chunks, declared_parameters
from megalith.nn.block import Layer
from megalith.nn.frozen import BelowTrained, freeze
from megalith.nn.lora import attach_adapters
from megalith.nn.moe.experts import Experts
from megalith.parallel import expert, transports
from megalith.parallel import recompute as recomputation
from megalith.parallel.context import my_slicing
from megalith.parallel.mesh import Mesh, mesh_on_paper, model_grid
from megalith.plan.context import WHOLE, Slicing, kind_of_layer, plan_slices
from megalith.plan.frozen import first_trained_layer
from megalith.plan.grid import Grid
from megalith.plan.schedule import place_of, placement_of, schedule_name, stage_of
from megalith.plan.shards import DATA_AXES, DENSE_AXES, EXPERT_AXES, EXPERT_PARTS, PARTS, Shard
from megalith.plan.stages import Stage, StageBoundary, plan_stages, stage_boundary
from megalith.plan.transports import BUILT_IN
from megalith.testing.inject import replaced
from megalith.train.loss import normalize_losses_by_labels
from megalith.verify.faults import fault_named, planted
from megalith.verify.type_rules import IN_WORDS, axes_here, installed_rules, types_of

WORDS = (
    (
        r"Are you missing a collective or a reinterpret/convert call\? e\.g\.,",
        "Is a collective missing? For example:",
    ),
    (r"convert\(tensor, (\S+), src=I, dst=R\)", r"enter over \1"),
    (r"all_reduce\(tensor, (\S+), src=P, dst=I\)", r"leave over \1"),
    (r"all_reduce\(tensor, (\S+), src=P, dst=R\)", r"all_reduce over \1"),
    (r"reinterpret\(loss, (\S+), src=V, dst=P\)", r"partial over \1"),
    (
        r"^ *convert\(tensor, \S+, src=[IR], dst=P\).*\n?",
        "",
    ),  # zeros everywhere but on rank 0: we have no such thing
)
"""What the checker's advice is called here."""


# --- the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that does not type-check, found at one place of the model on one or more ranks."""

    where: str
    """The module that was running, or the phase outside of modules."""

    what: str
    """Why it is refused."""

    detail: str = ""
    """The operation and the types of what it was given, on the first of these ranks."""

    ranks: tuple[int, ...]
    """Ranks that found it."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.where} (rank {ranks}): {self.what}" + (
            f"\n{self.detail}" if self.detail else ""
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeReport:
    """What the type check of a layout found."""

    world: int
    """Ranks of the layout."""

    axes: dict[str, int]
    """Ranks along each axis, and along its two parts where both have several; with experts, along
    theirs, too."""

    ranks: tuple[int, ...]
    """The places of the world at which the model was built and run."""

    parameters: int
    """Parameters whose gradients were followed, per rank."""

    collectives: dict[str, int]
    """Calls of each differentiable collective in a forward pass, as `gather over tp`; backward runs
    the conjugates."""

    problems: tuple[Problem, ...]
    """Empty when every gradient meets the sum it needs."""

    unseen: tuple[str, ...] = ()
    """What training does and this check does not: left to the proof in float64, one sentence
    each."""

    seconds: float
    """Of wall time, without importing."""

    peak_gib: float
    """Largest memory of the process that checked, imports included."""

    @property
    def ok(self) -> bool:
        """No problem was found."""
        return not self.problems

    @property
    def unproved(self) -> tuple[str, ...]:
        """Axes of one rank: every collective over them is free, so the check has nothing to say
        about them."""
        return tuple(axis for axis in PARTS if self.axes[axis] == 1)


def type_check(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world: int,
    ranks: Sequence[int] | None = None,
    recompute: RecomputeConfig = KEEP_ALL,
    offload: OffloadConfig = KEEP_HERE,
    lora: LoraConfig | None = None,
    optim: OptimConfig = TRAIN_ALL,
    masked: bool = False,
) -> TypeReport:
    """Check a layout of `world` ranks at some of its ranks; unset: the first, one in the middle and
    the last.

    In a pipeline, every kind of stage there is checked at each of them. Every second place reads
    documents of uneven lengths instead of rows. What `recompute` runs again in backward is checked
    a second time there. With `masked`, tokens have masks. Replaces `torch.autograd.Function.apply`
    while it runs, and puts it back. Not for a process that computes in other threads: use
    `type_check_in_child` there.

    Raises:
        PlanError: the degrees do not multiply to the world size, or a rank is not in it.
    """
    started, asked = time.perf_counter(), parallel.dispatcher
    parallel = parallel if asked in BUILT_IN else replace(parallel, dispatcher="alltoall")
    grid = model_grid(parallel, model, world)
    still = first_trained_layer(model, optim)
    chosen = (
        spots(grid, parallel, model, still)
        if ranks is None
        else spots_of(grid, parallel, model, ranks, still)
    )
    found: dict[tuple[str, str], Problem] = {}
    calls: dict[Kind, Counter[str]] = {}
    names: set[str] = set()
    for number, (rank, chunk) in enumerate(chosen):
        place = _build(
            model,
            parallel,
            grid,
            rank,
            chunk,
            recompute=recompute,
            documents=number % 2 == 1,
            lora=lora,
            optim=optim,
            masked=masked,
        )
        names |= place.shards.keys()
        kind = kind_of(
            stages_of(parallel, model),
            _stage_number(grid, parallel, rank, chunk),
            parallel.context,
            model,
        )
        counts = calls[kind] = Counter[str]()
        for problem in [
            *_shard_problems(place, model, parallel, lora, optim),
            *_run(place, counts),
        ]:
            known = found.setdefault((problem.where, problem.what), problem)
            found[problem.where, problem.what] = _also_on(known, rank)
    counts = sum(calls.values(), Counter[str]())
    return TypeReport(
        world=world,
        axes=_sizes(grid),
        ranks=tuple(dict.fromkeys(rank for rank, _ in chosen)),
        parameters=len(names),
        collectives={_in_our_words(name, grid): number for name, number in sorted(counts.items())},
        problems=tuple(found.values()),
        unseen=tuple(unseen(recompute, offload, model, dispatcher=asked)),
        seconds=time.perf_counter() - started,
        peak_gib=_peak_gib(),
    )


def unseen(
    recompute: RecomputeConfig,
    offload: OffloadConfig,
    model: ModelConfig | None = None,
    *,
    dispatcher: str = "alltoall",
) -> list[str]:
    """What of these settings has no types: it moves or compares bytes, and sums nothing; or asks
    for numbers."""
    planned = model is not None and model.moe is not None and model.moe.aux_loss.sinkhorn
    found = {
        f"offload.layers={offload.layers}: copies to host memory and back": offload.layers > 0,
        "recompute.shard_inputs: an input put together from slices is "
        "taken for what it was": recompute.shard_inputs,
        "recompute.check: compares bits, of which there are none here": recompute.check,
        f"parallel.dispatcher={dispatcher}: is of another package; an exchange instead": dispatcher
        not in BUILT_IN,
        "model.moe.aux_loss.sinkhorn: turns until numbers settle; experts are chosen by scores "
        "instead": planned,
    }
    if recompute.granularity == "selective" and (
        as_recomputed := {"norm", "mlp_act"} & {*recompute.modules}
    ):
        found[
            f"recompute.modules={sorted(as_recomputed)}: what one reader computes again for itself"
        ] = True
    return [text for text, there in found.items() if there]


def places(grid: Grid) -> tuple[int, ...]:
    """The first rank, the one in the middle of every axis, and the last, each once."""
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
"""Kinds of stages that differ in what they compute: with the embedding, the last norm, further
predictions, the loss; with which layers; and what comes in, and goes on."""


def kind_of(
    stages: Sequence[Stage], number: int, context: ContextConfig, model: ModelConfig
) -> Kind:
    """Which kind a stage is of; layers differ in how they see other ranks' tokens, and in their
    parts and sizes."""
    stage = stages[number]
    layers = frozenset(
        (
            kind_of_layer(context, layer),
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


def stages_of(parallel: ParallelConfig, model: ModelConfig) -> tuple[Stage, ...]:
    """Every stage of the layout."""
    return plan_stages(
        parallel.pipeline, pp=parallel.pp, num_layers=model.num_layers, depths=model.mtp.num_layers
    )


def spots(
    grid: Grid, parallel: ParallelConfig, model: ModelConfig, still: int = 0
) -> list[tuple[int, int]]:
    """(rank, chunk) of a stage of every kind, at the first, the middle and the last place of all
    other axes; stages whose layers are all among the first `still`, which are not trained, are
    kinds of their own."""
    placement = placement_of(schedule_name(parallel.pipeline))
    stages = stages_of(parallel, model)
    first_of_kind: dict[tuple[Kind, bool], int] = {}
    for number, stage in enumerate(stages):
        kind = kind_of(stages, number, parallel.context, model), stage.layers.stop <= still
        first_of_kind.setdefault(kind, number)
    found = []
    for rank in places(grid):
        for number in first_of_kind.values():
            pipeline_rank, chunk = place_of(number, num_ranks=parallel.pp, placement=placement)
            found.append((grid.rank_at(grid.coordinates(rank) | {"pp": pipeline_rank}), chunk))
    return list(dict.fromkeys(found))


def spots_of(
    grid: Grid, parallel: ParallelConfig, model: ModelConfig, ranks: Sequence[int], still: int = 0
) -> list[tuple[int, int]]:
    """(rank, chunk) of every kind of stage that these ranks hold."""
    stages = stages_of(parallel, model)
    found = []
    for rank in ranks:
        chunk_of_kind: dict[tuple[Kind, bool], int] = {}
        for chunk in range(parallel.pipeline.vpp):
            number = _stage_number(grid, parallel, rank, chunk)
            kind = (
                kind_of(stages, number, parallel.context, model),
                stages[number].layers.stop <= still,
            )
            chunk_of_kind.setdefault(kind, chunk)
        found += [(rank, chunk) for chunk in sorted(chunk_of_kind.values())]
    return found


def _stage_number(grid: Grid, parallel: ParallelConfig, rank: int, chunk: int) -> int:
    """Which stage a chunk of a rank is."""
    placement = placement_of(schedule_name(parallel.pipeline))
    return stage_of(grid.coordinates(rank)["pp"], chunk, num_ranks=parallel.pp, placement=placement)


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
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes there, KiB elsewhere


# --- what a rank has, on paper


@dataclass(frozen=True, slots=True)
class PaperBatch:
    """One microbatch without numbers."""

    ids: Tensor
    labels: Tensor
    tokens: PackedSeqParams
    mtp_inputs: tuple[tuple[Tensor, Tensor], ...] = ()
    """(ids, labels) of every MTP depth."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """One rank of the layout: its groups without processes, one chunk of its model without
    memory."""

    mesh: Mesh
    chunks: nn.ModuleList
    """Every chunk of the rank: the one that is checked may use a table of another."""

    chunk: int
    batch: PaperBatch
    hidden: Mapping[str, Type]
    """What hidden states have to be between layers and between stages."""

    received: tuple[Tensor, ...]
    """Hidden states from the stage before, and what was handed on with them: a memory, or the
    hidden states of multi-token predictions; nothing where the embedding makes them."""

    gradients: tuple[Tensor, ...]
    """What the next stage sends back; nothing where the loss is."""

    @property
    def model(self) -> Decoder:
        """The chunk that is checked."""
        chunk = self.chunks[self.chunk]
        assert isinstance(chunk, Decoder)
        return chunk

    @property
    def shards(self) -> dict[str, Shard]:
        """My slice of every parameter, by name."""
        return _shards_of(self.model)


def _build(
    model: ModelConfig,
    parallel: ParallelConfig,
    grid: Grid,
    rank: int,
    chunk: int,
    *,
    recompute: RecomputeConfig,
    documents: bool,
    lora: LoraConfig | None = None,
    optim: OptimConfig = TRAIN_ALL,
    masked: bool = False,
) -> RankModel:
    """Build one rank, outside of the check: an operation on a tensor without types would be refused
    in it.

    As training does, but for what has nothing to do without numbers: see `unseen`.
    """
    mesh = mesh_on_paper(grid, rank=rank)
    chunks = _chunks(model, mesh, parallel, replace(recompute, check=False), lora, optim)
    stage = chunks[chunk].stage
    split = parallel.sp and mesh.tp.size > 1
    hidden = {axis: V if axis in DATA_AXES or split else I for axis in DENSE_AXES}
    batch = paper_batch(
        parts=mesh.tp.size,
        documents=documents,
        slicing=my_slicing(parallel, mesh),
        num_mtp_layers=model.mtp.num_layers,
        balanced=model.moe is not None and not model.moe.aux_loss.sinkhorn,
        masked=masked,
    )
    count = batch.tokens.num_tokens // (mesh.tp.size if split else 1)
    stages, number = stages_of(parallel, model), _stage_number(grid, parallel, rank, chunk)
    received, gradients = (
        ()
        if end
        else tuple(
            torch.empty(
                count, model.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=wants
            )
            for _ in range(1 + over.memory + over.num_mtp_hidden)
        )
        for end, over, wants in (
            (stage.embedding, stage_boundary(model, stages, number), True),
            (stage.loss, stage_boundary(model, stages, number + 1), False),
        )
    )
    return RankModel(mesh, nn.ModuleList(chunks), chunk, batch, hidden, received, gradients)


def _chunks(
    model: ModelConfig,
    mesh: Mesh,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    lora: LoraConfig | None,
    optim: OptimConfig,
) -> list[Decoder]:
    chunks = build_chunks(model, mesh, parallel, dtype=torch.bfloat16, recompute=recompute)
    attach_adapters(chunks, model, lora)
    freeze(chunks, model, optim)
    return chunks


def paper_batch(
    *,
    parts: int,
    documents: bool,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
    balanced: bool = False,
    masked: bool = False,
) -> PaperBatch:
    """Eight tokens for each of `parts` ranks, or a few more for padding: two rows, or documents of
    uneven lengths.

    `balanced`: as in training, with what keeps experts busy; `masked`: with a mask for all
    documents but the second, and padding.
    """
    count = 8 * parts * slicing.ranks
    lengths = [3, 1, count - 4] if documents else [count // 2] * 2
    if slicing.ranks > 1:
        slices = plan_slices(lengths, row=count if documents else count // 2, slicing=slicing)
        tokens = tokens_of_slices(slices, slicing, device="meta")
    else:
        tokens = tokens_of_lengths(lengths, device="meta")
    if masked:
        masks = [torch.empty(n, n, dtype=torch.bool, device="meta") for n in lengths]
        tokens = with_masks(tokens, [masks[0], None, *masks[2:]])
        tokens = with_padding(tokens, torch.empty(count, dtype=torch.bool, device="meta"))
    ids, labels, numbers, *others = (
        torch.empty(tokens.num_tokens, dtype=torch.int64, device="meta")
        for _ in range(3 + 2 * num_mtp_layers)
    )
    pairs = tuple(zip(others[0::2], others[1::2], strict=True))
    dropout, context = DropoutKey(0, numbers), tokens.context
    if context is not None:
        context = replace(context, whole=replace(context.whole, dropout=dropout))
    balance = BalanceShare(0, 1, 1.0) if balanced else None
    return PaperBatch(
        ids, labels, replace(tokens, dropout=dropout, context=context, balance=balance), pairs
    )


def mesh_axes(grid: Grid, names: Sequence[str] = DENSE_AXES) -> dict[str, MeshAxis]:
    """The axes of the grid as the checker knows them: (size, stride). It ignores those of one
    rank."""
    return {axis: MeshAxis.of(*grid.strides(axis)) for axis in names}


@contextmanager
def experts_on_their_grid(grid: Grid) -> Iterator[None]:
    """Let what lies between a dispatcher's two ends be typed along the axes that experts are
    divided over.

    A rank's own tokens, V on every axis, are V on every axis of the other grid as well; those that
    ranks share are refused there.
    """
    if grid.experts is None:
        yield
        return
    axes, dense = mesh_axes(grid, EXPERT_AXES), mesh_axes(grid)
    with ExitStack() as undo:
        for kind, method in EXPERT_WORK:
            undo.enter_context(
                replaced(kind, method, _within(axes, getattr(kind, method), back=dense))
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
    (transports.ReferenceDispatcher, "__call__"),
    (transports.ReferenceCombiner, "combine"),
)
"""What happens on the experts' grid."""


def _within(
    axes: dict[str, MeshAxis], function: Callable[..., Any], *, back: dict[str, MeshAxis]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        with checker.set_current_mesh(axes):
            given = [_read_in(axes, one) for one in arguments]
            found = function(*given)
        return _read_in(back, found) if function.__name__ == "back" else found

    return run


def _read_in(axes: dict[str, MeshAxis], value: Any) -> Any:
    """A tensor, or several, as another factorization of the ranks sees them."""
    if isinstance(value, Choice):
        return Choice(*(_read_in(axes, one) for one in value))
    if not isinstance(value, Tensor):
        return value
    with checker.set_current_mesh(axes):
        mesh = checker.current_mesh()
        types = checker.get_local_type(value)
        return (
            value if mesh is None or types.keys() <= mesh else checker.reinterpret_mesh(value, mesh)
        )


# --- what everything starts as


def declare(model: nn.Module, grid: Grid) -> None:
    """Type the parameters, read off their `Shard`s: V where the box is cut; where it is whole, I if
    declared, else R.

    So V is never a layer's own word: a whole weight called V would type-check, and its gradient
    would never be summed. Other tensors that modules keep are constants that every rank computes
    alike: R.
    """
    for declared, module, name in declared_parameters(model):
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
    """Type a batch: every dp and cp rank has its own, every tensor-parallel rank the same for
    different work.

    The order of all tokens that cp ranks share is known to each of them, and the same; so are their
    masks.
    """
    tensors = [getattr(batch.tokens, field.name) for field in fields(batch.tokens)]
    context = batch.tokens.context
    near, everyone = (
        ((), ()) if context is None else (_orders(context.neighbors), _orders(context.everyone))
    )
    visible = batch.tokens.whole.visible
    masks = () if visible is None else (visible.keys, visible.pairs, visible.rows)
    near, everyone = (
        (near, (*everyone, *masks)) if context is not None else ((*near, *masks), everyone)
    )
    mtp_inputs = [value for pair in batch.mtp_inputs for value in pair]
    for value in (
        batch.ids,
        batch.labels,
        *mtp_inputs,
        *tensors,
        *(batch.tokens.dropout or ()),
        *near,
    ):
        if isinstance(value, Tensor):
            checker.assert_type(value, _by_axis(lambda axis: V if axis in DATA_AXES else R))
    for value in everyone:
        if isinstance(value, Tensor):
            checker.assert_type(value, _by_axis(lambda axis: V if axis in PARTS["dp"] else R))


def _orders(join: Join) -> tuple[Tensor, Tensor]:
    return join.order, join.back


def _by_axis(type_along: Callable[[str], Type]) -> dict[MeshAxis, Type]:
    return {axis: type_along(name) for name, axis in axes_here().items()}


def _parameter_type(shard: Shard, axis: str) -> Type:
    if axis in shard.cut:
        return V
    return I if axis in shard.invariant else R


def _shards_of(model: nn.Module) -> dict[str, Shard]:
    return {declared.shard.name: declared.shard for declared, _, _ in declared_parameters(model)}


def _shard_problems(
    place: RankModel,
    model: ModelConfig,
    parallel: ParallelConfig,
    lora: LoraConfig | None,
    optim: OptimConfig,
) -> Iterator[Problem]:
    """Shards that call themselves cut along an axis where the next rank has the same box, or the
    other way round.

    The checker believes `cut`, and takes V for anything; so the boxes themselves have to bear it
    out.
    """
    grid, rank = place.mesh.grid, place.mesh.rank
    here = grid.coordinates(rank)
    every = DENSE_AXES if grid.experts is None else DENSE_AXES + EXPERT_AXES
    for axis in (axis for axis in every if grid.size(axis) > 1):
        step = (here[axis] + 1) % grid.size(axis) - here[axis]
        neighbor = rank + step * grid.strides(axis)[1]
        other = mesh_on_paper(grid, rank=neighbor)
        theirs = _shards_of(_chunks(model, other, parallel, KEEP_ALL, lora, optim)[place.chunk])
        for name, mine in place.shards.items():
            if axis not in (EXPERT_AXES if mine.grid == "expert" else DENSE_AXES):
                continue
            same, cut = mine.box == theirs[name].box, axis in mine.cut
            if same == cut and mine.numel > 0:
                what = (
                    f"its shard is {'cut' if cut else 'whole'} along {axis}, but the next rank "
                    "there holds "
                    f"{'the same' if same else 'another'} box. Use cut_dim with exactly the axes "
                    "that divide it: the "
                    f"sum of gradients is read off them."
                )
                yield Problem(where=name, what=what, ranks=(rank,))


# --- running it


class TypeWatch:
    """Knows which module is running, and holds hidden states between layers to what they have to
    be."""

    def __init__(self, place: RankModel) -> None:
        self.path: list[str] = []
        self.hidden = place.hidden
        first = place.model.stage.layers.start
        for local_name, module in place.model.named_modules():
            name = re.sub(
                r"(?<=^layers\.)\d+", lambda number: str(int(number[0]) + first), local_name
            )
            if name:
                module.register_forward_pre_hook(functools.partial(self._enters, name))
                module.register_forward_hook(functools.partial(self._leaves, name))

    def where(self, phase: str) -> str:
        """The innermost module that has begun and not ended, else the phase."""
        return self.path[-1] if self.path else phase

    def _enters(self, name: str, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.path.append(name)
        if isinstance(module, Layer):
            expect(f"hidden states before {name}", given[0], self.hidden)

    def _leaves(self, name: str, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(module, Layer) or name == "norm":
            expect(f"hidden states after {name}", out, self.hidden)
        self.path.pop()


@dataclass(eq=False)
class TypedTwice:
    """A region that backward runs again: torch gives the second pass new tensors, which have the
    types of the first."""

    function: Callable[..., Tensor]
    watch: TypeWatch
    first: list[Mapping[Any, Type]] | None = None  # keys: as the checker has them
    mode: TorchFunctionMode | None = None

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Run it, in the first pass or in a later one."""
        if self.first is None:
            self.first, self.mode = (
                [checker.get_local_type(x) for x in tensors],
                _get_current_function_mode(),
            )
            return self.function(*tensors)
        path = list(self.watch.path)
        assert self.mode is not None, "a region ran outside of the check"
        try:
            with (
                self.mode
            ):  # to the checker `backward` is one call, inside which it does not look by itself
                for x, types in zip(tensors, self.first, strict=True):
                    checker.assert_type(x, dict(types))
                return self.function(*tensors)
        except SpmdTypeError:
            raise
        except (
            BaseException
        ):  # torch ends a second pass as soon as it has what it needs: modules are left behind
            self.watch.path[:] = path
            raise


@contextmanager
def second_passes_typed(watch: TypeWatch) -> Iterator[None]:
    """Let every region that is computed again keep its types."""

    plain = recomputation.recompute

    def again(
        function: Callable[..., Tensor], x: LayerInput, *others: Tensor, check: bool = False
    ) -> Tensor:
        return plain(TypedTwice(function, watch), x, *others, check=check)

    with replaced(recomputation, "recompute", again):
        yield


def expect(what: str, x: Tensor, wanted: Mapping[str, Type]) -> None:
    """Refuse `x` unless its types are the wanted ones: nothing crosses a border on trust."""
    found = types_of(x)
    for name, axis in axes_here().items():
        if found.get(name) is not wanted[name]:
            raise SpmdTypeError(
                f"{what} must be {IN_WORDS[wanted[name]]} over {axis!r}, but they are "
                f"{IN_WORDS[found.get(name)]}."
            )


def _run(place: RankModel, counts: Counter[str]) -> Iterator[Problem]:
    """Forward and backward at one place. What follows a problem is not looked at: it would be
    guesswork."""
    watch, axes = TypeWatch(place), mesh_axes(place.mesh.grid)
    phase = "loss"
    try:
        with (
            installed_rules(counts),
            second_passes_typed(watch),
            experts_on_their_grid(place.mesh.grid),
            checker.traceback_filtering(
                "off"
            ),  # else messages end with advice about the library's own settings
            typecheck(),
            checker.set_current_mesh(axes),
        ):
            declare(place.chunks, place.mesh.grid)
            declare_inputs(place.batch)
            for x in (*place.received, *place.gradients):
                checker.assert_type(x, _by_axis(place.hidden.__getitem__))
            ends = _forward(place)
            phase, forward = "backward", counts.copy()
            roots = [
                (x, dx)
                for x, dx in zip(ends, place.gradients or (None,), strict=True)
                if x.requires_grad
            ]
            if (
                len(roots) == 1
            ):  # the only one that may be a partial sum, which the checker lets `backward` have
                roots[0][0].backward(roots[0][1])
            elif roots:  # none of a stage below every adapter
                torch.autograd.backward([x for x, _ in roots], [dx for _, dx in roots])
            counts.clear()
            counts.update(forward)  # without those of second passes
    except SpmdTypeError as error:
        what, detail = (
            _in_our_words(text, place.mesh.grid)
            for text in (str(error.args[0]), error.context or "")
        )
        yield Problem(where=watch.where(phase), what=what, detail=detail, ranks=(place.mesh.rank,))
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensor" in str(error):
            # an operation without a meta kernel, or one that reads numbers: a fault of ours, not of
            # the layout
            raise
        yield Problem(
            where=watch.where(phase), what=f"shapes do not fit: {error}", ranks=(place.mesh.rank,)
        )
    else:
        yield from _without_gradient(place)


def _forward(place: RankModel) -> tuple[Tensor, ...]:
    """What backward starts from: this rank's part of the mean loss; before the last stage, what the
    next one gets."""
    batch, stage, given = place.batch, place.model.stage, place.model.received(place.received)
    if not stage.loss:
        found = place.model(batch.ids, batch.tokens, mtp_inputs=batch.mtp_inputs, **given)
        ends = found if isinstance(found, tuple) else (found,)
        for x, what in zip(ends, _names(place), strict=False):
            expect(f"{what} for the next stage", x, place.hidden)
        return ends
    losses = place.model.losses(
        batch.ids, batch.labels, batch.tokens, mtp_inputs=batch.mtp_inputs, **given
    )
    for loss in losses:
        expect("losses", loss, {axis: V if axis in DATA_AXES else I for axis in DENSE_AXES})
    return (
        normalize_losses_by_labels(
            losses, num_labels=[1000] * len(losses), weight=1.0, mesh=place.mesh
        ),
    )


def _names(place: RankModel) -> Iterator[str]:
    """What stages hand on."""
    yield "hidden states"
    depths = place.model.config.mtp.num_layers
    yield from [f"hidden states of depth {depth}" for depth in range(1, depths + 1)] or ["memory"]


def _without_gradient(place: RankModel) -> Iterator[Problem]:
    wanted = not isinstance(
        place.model.run_layers, BelowTrained
    )  # else nothing before these layers is trained
    for x, where in zip(place.received if wanted else (), _names(place), strict=False):
        if x.grad is None:
            what = f"no gradient reached the {where} of the stage before. Use them in the stage."
            yield Problem(where=where, what=what, ranks=(place.mesh.rank,))
    for declared, module, name in declared_parameters(place.model):
        parameter = getattr(module, name)
        if parameter.requires_grad and parameter.grad is None:
            yield Problem(
                where=declared.shard.name,
                what="no gradient reached this parameter. Use it in the loss, or remove it.",
                ranks=(place.mesh.rank,),
            )


def _in_our_words(text: str, grid: Grid) -> str:
    """The checker's text with our names of axes and collectives: tp for `MeshAxis(8:1)`, leave for
    a P -> I sum."""
    names = {part: part for part in DENSE_AXES + EXPERT_AXES}
    for axis, parts in (PARTS if grid.experts is None else PARTS | EXPERT_PARTS).items():
        text = text.replace("_".join(parts), axis)
        if min(map(grid.size, parts)) == 1:  # then only one part is left, and is all of it
            names |= dict.fromkeys(parts, axis)
    places = mesh_axes(grid) | (mesh_axes(grid, EXPERT_AXES) if grid.experts is not None else {})
    for name, place in places.items():
        text = text.replace(repr(place), names[name])
        text = re.sub(rf"\b{name}\b", names[name], text)
    for theirs, ours in WORDS:
        text = re.sub(theirs, ours, text, flags=re.MULTILINE)
    return text.strip()


# --- in a process of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a child process is asked."""

    model: ModelConfig
    parallel: ParallelConfig
    world: int
    ranks: tuple[int, ...] | None = None
    recompute: RecomputeConfig = KEEP_ALL
    offload: OffloadConfig = KEEP_HERE
    lora: LoraConfig | None = None
    optim: OptimConfig = TRAIN_ALL
    fault: str | None = None


PROGRAM = "from megalith.verify.types import answer; answer()"
"""What the child runs. This file must not be its `__main__`, or there would be two of each
class."""


def type_check_in_child(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    world: int,
    ranks: Sequence[int] | None = None,
    recompute: RecomputeConfig = KEEP_ALL,
    offload: OffloadConfig = KEEP_HERE,
    lora: LoraConfig | None = None,
    optim: OptimConfig = TRAIN_ALL,
    fault: str | None = None,
    timeout_seconds: float = 600.0,
) -> TypeReport:
    """`type_check` in a process of its own, which the checker may change as it likes; with a fault
    planted, if named.

    Raises:
        PlanError: the degrees do not multiply to the world size, or a rank is not in it.
        ConfigError: there is no such fault.
    """
    grid = model_grid(parallel, model, world)
    for rank in ranks or ():
        grid.coordinates(rank)  # refuses a rank that is not there, before a process is started
    if fault is not None:
        fault_named(fault)
    question = Question(
        model=model,
        parallel=parallel,
        world=world,
        ranks=None if ranks is None else tuple(ranks),
        recompute=recompute,
        offload=offload,
        lora=lora,
        optim=optim,
        fault=fault,
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(to_dict(question)),
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the type check ended with code {done.returncode}; this is what it "
            f"said:\n{done.stderr}"
        )
    return from_dict(TypeReport, json.loads(done.stdout))


def answer() -> None:
    """The life of the child: a question as JSON on standard input, a report as JSON on standard
    output."""
    question = from_dict(Question, json.load(sys.stdin))
    with planted(question.fault):
        report = type_check(
            question.model,
            question.parallel,
            world=question.world,
            ranks=question.ranks,
            recompute=question.recompute,
            offload=question.offload,
            lora=question.lora,
            optim=question.optim,
        )
    json.dump(to_dict(report), sys.stdout)

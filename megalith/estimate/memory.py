"""Memory ledger: the peak memory of every rank in a step, in bytes, computed from the settings.

Notation: t tokens of a microbatch on one rank, padding included, h hidden, n heads, g KV heads, d
head dim, f ffn, v vocabulary (n, g, f, v of this rank), e bytes per weight or activation, N
parameters of this rank, D ZeRO shards.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from megalith.config.parallel import ContextKind
from megalith.config.train import TrainRun
from megalith.estimate.buckets import buffer_plan, divides, zero_shard_counts
from megalith.estimate.matrices import (
    count_state_numels,
    list_assigned_rules,
    plan_stage_matrices,
    update_nbytes,
)
from megalith.estimate.workload import Workload, stage_activations
from megalith.plan.buckets import local_bucket_parts
from megalith.plan.context import layer_context_kind
from megalith.plan.costs import loss_chunk_size
from megalith.plan.devices import (
    CONTEXT,
    FAR_COMMUNICATOR,
    NEAR_COMMUNICATOR,
    SLACK,
    WORKSPACE,
    Device,
)
from megalith.plan.frozen import trained
from megalith.plan.layers import branches
from megalith.plan.layers.base import (
    WIDTHS,
    ExpertPart,
    HeldParameter,
    LayerSetting,
    total,
)
from megalith.plan.parameters import distinct_ranks
from megalith.plan.schedule import SENDS, Direction, Kind, concurrent_actions, neighbor
from megalith.plan.stages import Stage, stage_boundary
from megalith.plan.state_encodings import (
    master_weight_nbytes,
    slice_state_nbytes,
)
from megalith.plan.update_rules import rule_of

WIRE_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a gradient element sent with parallel.reduce_dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Peak memory of one rank by category, in bytes."""

    weights: int
    """e · N, each parameter starting at a multiple of 64 elements; N / D with zero=3."""

    gradients: int
    """Flat gradient buffer: 4 · N, or 8 · N in fp64; N / D with zero >= 2."""

    master: int
    """fp32 master weights of 16-bit weights: 4 · N, 2 · N as remainders; N / D with zero >= 1."""

    moments: int
    """AdamW's moments, 8 · N in fp32, or the momentum of SGD or Muon, 4 · N; N / D with zero >= 1.
    Of SOAP, NorMuon and AdaMuon, the states of the matrices assigned to the rank with the most."""

    ema: int = 0
    """Moving average of the weights (train.ema) on the device: 4 · N; N / D with zero >= 1."""

    activations: int
    """Saved activations of layers, for all microbatches in flight."""

    loss: int
    """Output head: gradients computed in forward, and a chunk of logits."""

    working: int
    """Temporary tensors of the current layer: gradients of activations, recomputed and gathered
    tensors; or, if more, those of the exchange with assigned ranks in the update."""

    messages: int
    """Tensors sent between pipeline stages."""

    library: int = 0
    """Device context, communicators and matmul workspaces."""

    slack: int = 0
    """Memory that the allocator holds between tensors (fragmentation)."""

    @property
    def state(self) -> int:
        """Memory held from step to step."""
        return self.weights + self.gradients + self.master + self.moments + self.ema

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class PlaceMemory:
    """Memory ledger of the ranks at one (pp, tp) position."""

    pp_rank: int
    tp_rank: int
    memory: RankMemory
    in_flight: int
    """Forward passes through a chunk whose activations are saved at the peak."""

    moment: str
    """Action at the peak."""

    host: int
    """Peak bytes of activations offloaded to host memory; not part of the ledger."""


class ChunkActivations(NamedTuple):
    """Activations of one microbatch in one chunk, in bytes."""

    layers: int
    """Saved from forward to backward."""

    for_weights: int
    """Still held for the deferred weight gradient of a split backward."""

    loss: int
    """Saved by the head from forward to backward."""

    recompute_nbytes: int
    """Temporary in backward, for the largest recomputed part."""

    host: int
    """Offloaded to host memory from forward to backward."""


def memory_ledger(workload: Workload, device: Device | None = None) -> list[PlaceMemory]:
    """Return the ledger of every (pp, tp) position; tensor-parallel ranks with equal shares appear
    once.

    device: adds the memory of its software; without one, tensors only.
    """
    return [place_memory(workload, pp, tp, device) for pp, tp in distinct_places(workload)]


def worst(ledger: Sequence[PlaceMemory]) -> PlaceMemory:
    """Return the position with the most memory."""
    return max(ledger, key=lambda place: place.memory.total)


def crowded_bytes(workload: Workload, device: Device | None = None) -> int | None:
    """Return the memory of the worst rank if as many tokens as possible choose its experts; None
    without experts."""
    if workload.run.model.moe is None:
        return None
    return worst(memory_ledger(replace(workload, crowded=True), device)).memory.total


def distinct_places(workload: Workload) -> list[tuple[int, int]]:
    """Return (pp rank, tp rank) of all distinct positions; of tensor-parallel ranks with equal
    shares the first."""
    run = workload.run
    tp, places = run.parallel.tp, []
    for pp in range(run.parallel.pp):
        parts = [workload.expert_part(pp, rank) for rank in range(tp)]
        places += [(pp, rank) for rank in distinct_ranks(run.model, tp=tp, experts=parts)]
    return places


class ZeroShard(NamedTuple):
    """One of the ranks at a position, which hold different ZeRO shards."""

    shard_rank: int = 0
    """Its rank among the ZeRO shards of dense parameters."""

    expert_rank: int = 0
    """Its rank among the ZeRO shards of the same experts."""

    experts: ExpertPart | None = None
    """Its expert shard; unset: the largest at the position."""


ANY = ZeroShard()


def place_memory(
    workload: Workload,
    pp_rank: int,
    tp_rank: int,
    device: Device | None = None,
    *,
    sharer: ZeroShard = ANY,
) -> PlaceMemory:
    """Return the ledger of the ranks at one position, or of one ZeRO shard of them."""
    accelerator = device is not None and device.accelerator
    held = workload.parameters(pp_rank, tp_rank, experts=sharer.experts)
    state = _state(workload, pp_rank, held, sharer, accelerator=accelerator)
    peak = _find_activation_peak(workload, pp_rank, tp_rank, accelerator=accelerator)
    tensors = replace(
        state,
        activations=peak.layers,
        loss=peak.loss,
        working=state.working + peak.working,
        messages=_message_bytes(workload, pp_rank),
    )
    moment, exchanged = peak.moment, update_nbytes(workload, pp_rank)
    if exchanged > tensors.total - tensors.state:
        # activations and buffers of gradient reduction are freed before the update
        tensors = replace(state, working=exchanged)
        moment = "update"
    memory = tensors if device is None else _add_device_overhead(tensors, workload, device)
    return PlaceMemory(pp_rank, tp_rank, memory, peak.in_flight, moment, peak.host)


# --- what stays from step to step


def _state(
    workload: Workload,
    pp_rank: int,
    parameters: Sequence[HeldParameter],
    sharer: ZeroShard,
    *,
    accelerator: bool,
) -> RankMemory:
    """Return weights, gradients, optimizer state, and ZeRO's temporary buffers as `working`."""
    run, divided = workload.run, divides(workload)
    width, zero = WIDTHS[run.precision.params], run.parallel.zero if divided else 0
    frozen, trained_parameters = [one for one in parameters if one.frozen], trained(parameters)
    unbuffered_bytes = sum(
        one.numel * (width.value if one.counts else width.sums) for one in frozen
    )
    if zero == 3:
        local = [_sharded_numel(workload, one, sharer) for one in trained_parameters]
        buffer = gradients = sum(local)
        unbuffered_bytes = sum(
            _sharded_numel(workload, one, sharer) * (width.value if one.counts else width.sums)
            for one in frozen
        )
    else:
        plan = buffer_plan(workload, trained_parameters)
        slices, numbers = (
            zero_shard_counts(workload, plan, trained_parameters),
            {"dense": sharer.shard_rank, "expert": sharer.expert_rank},
        )
        lengths = [bucket.stop - bucket.start for bucket in plan.buckets]
        buffer = sum(lengths)
        gradients = (
            sum(n // s for n, s in zip(lengths, slices, strict=True)) if zero == 2 else buffer
        )
        ranks = [numbers[trained_parameters[bucket.members[0]].grid] for bucket in plan.buckets]
        local = [0] * len(trained_parameters)
        for part in local_bucket_parts(plan, list(zip(ranks, slices, strict=True))):
            local[part.number] = part.stop - part.start
        if zero == 0:
            local = [one.numel for one in trained_parameters]
    num_local = sum(local)
    moments = sum(
        slice_state_nbytes(
            count,
            int(one.matrix),
            rule_of(one.name, int(one.matrix), run.optim),
            run.optim,
            run.precision,
        )
        for count, one in zip(local, trained_parameters, strict=True)
    )
    matrix_states = sum(
        max(count_state_numels(run, rule, plan_stage_matrices(workload, pp_rank, rule)))
        for rule in list_assigned_rules(run)
    )
    return RankMemory(
        weights=width.value * buffer + unbuffered_bytes,
        gradients=width.sums * gradients,
        master=master_weight_nbytes(run.precision) * num_local,
        moments=moments + width.sums * matrix_states,
        ema=width.sums * num_local if has_ema_on_device(run) else 0,
        activations=0,
        loss=0,
        working=_sharding_bytes(workload, pp_rank, parameters, accelerator=accelerator),
        messages=0,
    )


def has_ema_on_device(run: TrainRun) -> bool:
    """Return whether a moving average of the weights occupies device memory."""
    return run.train.ema is not None and run.train.ema.device is None


IN_FLIGHT = 2
"""Number of bucket reductions in flight at once under ZeRO."""


def _sharding_bytes(
    workload: Workload, pp_rank: int, parameters: Sequence[HeldParameter], *, accelerator: bool
) -> int:
    """Return the temporary memory of ZeRO.

    zero=1: receive buffers of the buckets in flight, which NCCL does not need, and bf16 copies for
    sending. zero=2: also these buckets themselves, and the one that backward fills. zero=3: the
    gathered weights of the current layer, its experts, and the next layer (in pipelines all of
    them), and the gradient of one, twice.
    """
    width, p = WIDTHS[workload.run.precision.params], workload.run.parallel
    if p.zero == 0 or not divides(workload):
        return 0
    if p.zero < 3:
        buckets = buffer_plan(workload, trained(parameters)).buckets
        largest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
        received = 0 if accelerator else width.sums
        beside = IN_FLIGHT * (2 * WIRE_BYTES["bf16"] if p.reduce_dtype == "bf16" else received)
        return largest * (beside + (width.sums * (IN_FLIGHT + 1) if p.zero == 2 else 0))
    gathered = [unit for unit in gathered_units(workload, pp_rank, parameters) if unit.ranks > 1]
    dense, expert = (
        sorted(
            (unit.numel for unit in gathered if not unit.root and unit.grid == grid), reverse=True
        )
        for grid in ("dense", "expert")
    )
    most = max(
        (sum(one.numel for one in trained(unit.parameters)) for unit in gathered if not unit.root),
        default=0,
    )
    inner = dense + expert if keeps_gathered(workload) else dense[:2] + expert[:1]
    at_once = sum(unit.numel for unit in gathered if unit.root) + sum(inner)
    return width.value * at_once + (width.value + width.sums) * most


def _sharded_numel(workload: Workload, one: HeldParameter, sharer: ZeroShard) -> int:
    """Return the elements of a parameter that a rank stores under zero=3; frozen vectors are not
    sharded."""
    if one.frozen and not one.matrix:
        return one.numel
    rank = sharer.shard_rank if one.grid == "dense" else sharer.expert_rank
    return sharded_rows(one, rank, workload.num_zero_shards(one)) * one.columns


def sharded_rows(one: HeldParameter, rank: int, ranks: int) -> int:
    """Return the rows of a matrix, or elements of a vector, that a rank stores under zero=3; the
    last ranks store the remainder.

    >>> [sharded_rows(HeldParameter("w", 5, 4, cut=False), rank, 4) for rank in range(4)]
    [2, 2, 1, 0]
    """
    each = -(-one.rows // ranks)
    return min(max(one.rows - rank * each, 0), each)


class GatheredUnit(NamedTuple):
    """Parameters that zero=3 gathers together."""

    name: str
    parameters: tuple[HeldParameter, ...]
    root: bool
    """The remaining parameters of a chunk: gathered from forward to the end of backward."""

    grid: str = "dense"
    ranks: int = 1
    """Number of shards."""

    @property
    def numel(self) -> int:
        """Elements of all shards."""
        return sum(one.numel for one in self.parameters)


def gathered_units(
    workload: Workload, pp_rank: int, parameters: Sequence[HeldParameter]
) -> list[GatheredUnit]:
    """Return the units that zero=3 gathers: each layer without its experts, these, and each table
    that is used once; the root unit has the last norm and tables used twice. Frozen vectors are not
    sharded."""
    tables = _used_once(workload, pp_rank)
    units: dict[tuple[str, str], list[HeldParameter]] = {}
    for one in parameters:
        words = one.name.split(".")
        is_separate = words[0] == "layers" or one.grid == "expert"
        name = ".".join(words[:2]) if is_separate else one.name if one.name in tables else ""
        if one.matrix or not one.frozen:
            units.setdefault((name, one.grid), []).append(one)
    return [
        GatheredUnit(name, tuple(held), name == "", grid, workload.num_zero_shards(held[0]))
        for (name, grid), held in units.items()
    ]


def _used_once(workload: Workload, pp_rank: int) -> set[str]:
    """Return the vocabulary tables that a rank uses once: each MTP layer uses the embedding table
    once, inside a larger unit, and the head once more on the stage of the loss."""
    model, stages = workload.run.model, workload.chunks(pp_rank)
    depths, head = model.mtp.num_layers, "embed.weight" if model.tied_embeddings else "head.weight"
    uses = Counter({"embed.weight": 0, "head.weight": 0})
    for stage in stages:
        uses["embed.weight"] += stage.embedding + 2 * (stage.num_mtp_layers > 0)
        uses[head] += (1 + depths) * stage.loss
    return {name for name, count in uses.items() if count == 1}


def keeps_gathered(workload: Workload) -> bool:
    """Return whether zero=3 frees gathered weights only at the end of a step: pipelines run each
    chunk many times per step."""
    return workload.run.parallel.pp * workload.run.parallel.pipeline.vpp > 1


# --- what comes and goes within a step


def build_layer_setting(
    workload: Workload,
    tp_rank: int,
    *,
    kind: ContextKind | None = None,
    accelerator: bool = False,
    first_layer: int = 0,
) -> LayerSetting:
    """Return the setting of the layers of one rank; every row counts as one document. kind: kind of
    context parallelism; unset: that of the run."""
    run = workload.run
    return LayerSetting(
        model=run.model,
        dtype=run.precision.params,
        lengths=workload.lengths,
        dp=workload.dp,
        tp=run.parallel.tp,
        tp_rank=tp_rank,
        sp=run.parallel.sp,
        cp=run.parallel.cp,
        context=kind or run.parallel.context.kind,
        a2a=workload.grid.size("cp_a2a"),
        experts=workload.expert_part(0, tp_rank),
        dispatcher=run.parallel.dispatcher,
        crowded=workload.crowded,
        first_layer=first_layer,
        accelerator=accelerator,
        overlap=run.parallel.overlap,
        overlap_experts=run.parallel.overlap_experts,
        recompute=run.recompute,
        offload=run.offload,
    )


def chunk_activations(
    workload: Workload, stage: Stage, tp_rank: int, *, accelerator: bool
) -> ChunkActivations:
    """Return the activations of one microbatch in one chunk. If layers use different kinds of
    context parallelism, each counts its share."""
    kinds = Counter(
        layer_context_kind(workload.run.parallel.context, layer)
        for layer in all_layers(workload, stage)
    )
    if not kinds:
        kinds[workload.run.parallel.context.kind] = 1
    layers = recompute_nbytes = loss = host = 0.0
    for kind, count in kinds.items():
        first = stage.layers.start if stage.layers else 0
        setting = build_layer_setting(
            workload, tp_rank, kind=kind, accelerator=accelerator, first_layer=first
        )
        activations = stage_activations(
            setting,
            num_layers=len(stage.layers),
            embedding=stage.embedding,
            loss=stage.loss,
            norm=stage.norm,
            num_mtp_layers=stage.num_mtp_layers,
        )
        part = count / kinds.total()
        head = total(
            [row for row in activations.ends if row.what.startswith("gradient of the head")]
        )
        layers, loss = layers + part * (activations.nbytes - head), loss + part * head
        recompute_nbytes, host = (
            max(recompute_nbytes, activations.transient),
            host + part * activations.host_bytes,
        )
    return ChunkActivations(
        round(layers),
        _deferred_bytes(workload, stage, tp_rank),
        round(loss),
        round(recompute_nbytes),
        round(host),
    )


def all_layers(workload: Workload, stage: Stage) -> list[int]:
    """Return the layer numbers of a stage; MTP layers count as the last layer."""
    return [*stage.layers, *[workload.run.model.num_layers - 1] * stage.num_mtp_layers]


def _deferred_bytes(workload: Workload, stage: Stage, tp_rank: int) -> int:
    """Return the inputs and output gradients of all weights, which deferred weight gradients need,
    and the head's gradient. An MTP layer has t · 4 h more."""
    model, setting = workload.run.model, build_layer_setting(workload, tp_rank)
    numel = (stage.embedding + 4 * stage.num_mtp_layers) * model.hidden_size * setting.tokens
    for layer in all_layers(workload, stage):
        for branch in branches(model, layer):
            numel += branch.kind.weight_gradient_numel(branch, setting)
    head = (1 + model.mtp.num_layers) * setting.part.vocab * model.hidden_size
    return numel * setting.element + stage.loss * head * setting.wide


def working_bytes(workload: Workload, stage: Stage, tp_rank: int, kind: Kind) -> int:
    """Return the temporary memory of a pass through a chunk, beside saved activations.

    Forward: with the loss, the head's input [t, h] and a chunk of logits, in the model's dtype and
    fp32. Backward: the gradients of one layer's activations, which are those inside its largest
    branch and 2 h per token, or 3 h with cross-layer attention. With cp the keys and values of
    other ranks.
    """
    run, num_gradients, inside, others = workload.run, 2, 0, 0
    setting = build_layer_setting(workload, tp_rank)
    layers = all_layers(workload, stage)
    for layer in layers:
        context = layer_context_kind(run.parallel.context, layer)
        own = replace(setting, context=context)
        for branch in branches(run.model, layer):
            one = branch.kind
            inside = max(inside, one.backward_numel(branch, own))
            others = max(others, one.received_numel(branch, own) * own.element)
            num_gradients = max(num_gradients, one.num_input_gradients)
    width = setting.tokens * run.model.hidden_size
    if kind != "F":
        return (inside + num_gradients * width) * setting.element + others if layers else 0
    chunk = min(setting.tokens, loss_chunk_size(run))
    logits = chunk * setting.part.vocab * (setting.element + setting.wide)
    head = width * setting.element + logits if stage.loss else 0
    return max(head, others)


@dataclass(frozen=True, slots=True)
class _ActivationPeak:
    """The moment of a step with the peak activation memory of a rank."""

    layers: int
    loss: int
    working: int
    in_flight: int
    moment: str
    host: int = 0
    """Peak over the step."""

    @property
    def total(self) -> int:
        return self.layers + self.loss + self.working


def _find_activation_peak(
    workload: Workload, pp_rank: int, tp_rank: int, *, accelerator: bool
) -> _ActivationPeak:
    """Walk through a rank's actions and return the peak of activation memory."""
    stages = workload.chunks(pp_rank)
    activations = [
        chunk_activations(workload, stage, tp_rank, accelerator=accelerator) for stage in stages
    ]
    kinds: tuple[Kind, ...] = ("F", "B", "I", "W")
    working = {
        kind: [
            working_bytes(workload, stage, tp_rank, kind)
            + (one.recompute_nbytes if kind in ("B", "I") else 0)
            for stage, one in zip(stages, activations, strict=True)
        ]
        for kind in kinds
    }
    layers = loss = in_flight = host = most_host = 0
    best: _ActivationPeak | None = None
    # With dual-batch overlap, both halves of a pair hold their temporary tensors at once.
    needed = [
        sum(working[kind][chunk] for kind, chunk, _, _ in actions)
        for actions in concurrent_actions(workload.schedule, pp_rank)
        for _ in actions
    ]
    for number, (kind, chunk, microbatch, _) in enumerate(workload.schedule.ranks[pp_rank]):
        if kind == "F":
            layers, loss, in_flight = (
                layers + activations[chunk].layers,
                loss + activations[chunk].loss,
                in_flight + 1,
            )
            host += activations[chunk].host
            most_host = max(most_host, host)
        total = layers + loss + needed[number]
        if best is None or total > best.total:
            words = {
                "F": "forward",
                "B": "backward",
                "I": "backward (inputs)",
                "W": "backward (weights)",
            }
            moment = f"{words[kind]} of microbatch {microbatch} in chunk {chunk}, action {number}"
            best = _ActivationPeak(layers, loss, needed[number], in_flight, moment)
        if kind in ("B", "I"):
            host -= activations[chunk].host
        if kind == "I":
            layers, loss = (
                layers - activations[chunk].layers + activations[chunk].for_weights,
                loss - activations[chunk].loss,
            )
        elif kind == "W":
            layers, in_flight = layers - activations[chunk].for_weights, in_flight - 1
        elif kind == "B":
            layers, loss, in_flight = (
                layers - activations[chunk].layers,
                loss - activations[chunk].loss,
                in_flight - 1,
            )
    assert best is not None
    return replace(best, host=most_host)


def boundary_tensors(workload: Workload, stage: int, direction: Direction) -> list[int]:
    """Return the bytes of each tensor sent across the boundary before a stage per microbatch; under
    sp each rank has 1/tp of the tokens."""
    run, width = workload.run, WIDTHS[workload.run.precision.params]
    num_tokens = workload.tokens // (run.parallel.tp if run.parallel.sp else 1)
    residual = width.sums if run.model.fp32_residual else width.value
    return [
        math.prod(tensor.sizes(num_tokens=num_tokens, hidden_size=run.model.hidden_size))
        * (residual if tensor.dtype == "residual" else width.value)
        for tensor in stage_boundary(run.model, workload.stages, stage)
        if tensor.requires_grad or direction == "forward"
    ]


def borders(workload: Workload, pp_rank: int, direction: Direction) -> list[int]:
    """Return the boundaries across which this rank sends in a direction, by the stages after
    them."""
    schedule, boundaries = workload.schedule, list[int]()
    for chunk in range(schedule.num_chunks):
        target = neighbor(schedule, pp_rank, chunk, direction)
        if target is not None and target[0] != pp_rank:
            boundaries.append(schedule.stages[pp_rank][chunk] + (direction == "forward"))
    return boundaries


def _message_bytes(workload: Workload, pp_rank: int) -> int:
    """Return the buffers for messages: what is sent, and once or, with overlap, twice what is
    received."""
    each = [
        max(
            (
                sum(boundary_tensors(workload, stage, direction))
                for stage in borders(workload, pp_rank, direction)
            ),
            default=0,
        )
        for direction in SENDS
    ]
    return sum(each) * (3 if workload.run.parallel.overlap else 2)


def _add_device_overhead(tensors: RankMemory, workload: Workload, device: Device) -> RankMemory:
    """Add the memory of the device's context, libraries and allocator."""
    if not device.accelerator:
        return tensors
    grid = workload.grid
    spans = [("tp",), ("cp",), ("dp", "cp"), ("pp",), ("dp", "cp", "tp", "pp")]
    spans += [] if grid.experts is None else [("ep",), ("etp",), ("ep", "etp"), ("edp",)]
    groups = {ranks for span in spans if len(ranks := grid.find_group(grid.offset, span)) > 1}
    far = sum(ranks[-1] - grid.offset >= device.node for ranks in groups)
    library = CONTEXT + WORKSPACE + far * FAR_COMMUNICATOR + (len(groups) - far) * NEAR_COMMUNICATOR
    return replace(tensors, library=int(library), slack=int(SLACK * tensors.total))

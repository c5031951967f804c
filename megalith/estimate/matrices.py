"""Matrices of a pipeline stage as its ranks hold them, with their assigned ranks, and the cost of
their update rules: FLOPs, messages and memory."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.estimate.buckets import buffer_plan, divides, zero_shard_counts
from megalith.estimate.workload import Workload
from megalith.plan.assigned_ranks import AssignedRanksPlan, HeldPart, plan_assigned_ranks
from megalith.plan.batch_schedule import largest_batch_size
from megalith.plan.buckets import local_bucket_parts
from megalith.plan.frozen import trained, trained_step_flops, with_adapters, with_frozen
from megalith.plan.layers.base import WIDTHS, ExpertPart, HeldParameter, tensor_part
from megalith.plan.matrices import HEAD_DIMS, WeightMatrix, split_into_matrices
from megalith.plan.parameters import held_parameters
from megalith.plan.shards import DENSE_AXES, Box, split_evenly
from megalith.plan.update_rules import list_per_matrix_rules, rule_of

ASSIGNED_RULES = ("muon", "soap")
"""Built-in rules whose directions are computed on assigned ranks."""

# --- shapes


def model_of(model: ModelConfig, name: str) -> ModelConfig:
    """Return the model of the layer that has this parameter; MTP layers are like the last one."""
    words = name.split(".")
    layer = int(words[1]) if words[0] == "layers" else model.num_layers - 1
    return model.at(layer)


def parameter_shape(model: ModelConfig, whole: HeldParameter) -> tuple[tuple[int, ...], int]:
    """Return the global shape of a matrix, and the number of its input dims."""
    own, word = model_of(model, whole.name), whole.name.rsplit(".", 1)[1]
    rows, columns, heads = whole.rows, whole.columns, own.num_heads
    if whole.grid == "expert" and own.moe is not None:
        experts, halves = own.moe.num_experts, (2,) if word == "gate_up" else ()
        inner = rows // experts // (2 if halves else 1)
        return (experts, *halves, inner, columns), 1
    if word == "kv":
        groups = own.num_kv_heads
        return (2, groups, rows // (2 * groups), columns), 1
    if word == "o":
        return (rows, heads, columns // heads), 2
    if word in HEAD_DIMS:
        return (heads, rows // heads, columns), 1
    if word == "gate_up":
        return (2, rows // 2, columns), 1
    return (rows, columns), 1


def held_box(
    model: ModelConfig,
    one: HeldParameter,
    shape: Sequence[int],
    *,
    tp: int,
    tp_rank: int,
    ep_rank: int,
    experts: ExpertPart,
) -> tuple[tuple[int, int], ...]:
    """Return the box of a matrix that a rank holds."""
    box = [(0, size) for size in shape]
    word = one.name.rsplit(".", 1)[1]
    if one.grid == "expert":
        inner = len(shape) - (1 if word == "down" else 2)
        box[0] = _span(split_evenly(shape[0], experts.ep), ep_rank)
        box[inner] = _span(split_evenly(shape[inner], experts.etp), experts.etp_rank)
    elif word in HEAD_DIMS and (one.cut or word == "kv"):
        own = model_of(model, one.name)
        parts = [tensor_part(own, tp=tp, rank=rank) for rank in range(tp)]
        if word == "kv":
            copies = parts[0].kv_copies
            box[1] = _span([part.kv_heads for part in parts[::copies]], tp_rank // copies)
        else:
            box[HEAD_DIMS[word]] = _span([part.heads for part in parts], tp_rank)
    elif one.cut:
        dim = 1 if word in ("gate_up", "down") else 0
        box[dim] = _span(split_evenly(shape[dim], tp), tp_rank)
    return tuple(box)


def _span(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return start and stop of part number `rank`."""
    ends = [0, *accumulate(sizes)]
    return ends[rank], ends[rank + 1]


# --- the plan of a stage


def list_assigned_rules(run: TrainRun) -> list[str]:
    """Return the update rules of a run that use assigned ranks."""
    return [rule for rule in list_per_matrix_rules(run.optim) if rule in ASSIGNED_RULES]


@lru_cache(maxsize=64)
def plan_stage_matrices(workload: Workload, pp_rank: int, rule: str) -> AssignedRanksPlan:
    """Return the matrices of an update rule on one pipeline rank, and their assigned ranks, as the
    run plans them."""
    run = workload.run
    shapes = {
        one.name: parameter_shape(run.model, one)
        for one in list_whole_parameters(workload, pp_rank)
        if rule_of(one.name, int(one.matrix), run.optim) == rule
    }
    nope_dim = None if run.model.mla is None else run.model.mla.nope_dim
    split = run.optim.muon.split if rule == "muon" else "matrices"
    matrices: list[WeightMatrix] = []
    for name, (shape, inputs) in sorted(shapes.items()):
        matrices += split_into_matrices(name, shape, inputs, split=split, nope_dim=nope_dim)
    return plan_assigned_ranks(
        matrices,
        list_held_parts(workload, pp_rank, {name: shape for name, (shape, _) in shapes.items()}),
        itemsize=WIDTHS[run.precision.params].sums,
    )


def list_whole_parameters(workload: Workload, pp_rank: int) -> list[HeldParameter]:
    """Return the trained parameters of a pipeline rank, not split over other ranks."""
    run = workload.run
    held: dict[str, HeldParameter] = {}
    for stage in workload.chunks(pp_rank):
        held |= {one.name: one for one in held_parameters(run.model, stage)}
    return trained(with_frozen(with_adapters(list(held.values()), run.model, run.lora), run.optim))


def list_held_parts(
    workload: Workload, pp_rank: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[Mapping[str, HeldPart]]:
    """Return the parts of these parameters on each rank of a stage, in the order of its group."""
    grid = workload.grid
    find_slices = lru_cache(maxsize=None)(_SlicedParameters)
    held: list[Mapping[str, HeldPart]] = []
    for rank in grid.find_group(workload.rank_at(pp_rank, 0), DENSE_AXES):
        at = grid.coordinates(rank)
        experts = workload.expert_part(pp_rank, at["tp"])
        if grid.experts is not None:
            experts = ExpertPart(experts.ep, experts.etp, at["etp"])
        slices = find_slices(workload, pp_rank, at["tp"], experts)
        shard_rank = at["dp_shard"] * workload.run.parallel.cp + at["cp"]
        held.append(slices.list_parts(shapes, shard_rank, at.get("edp_shard", 0), at.get("ep", 0)))
    return held


class _SlicedParameters:
    """Parameters of the ranks with the same tensor-parallel and expert-tensor-parallel rank, and
    their ZeRO slices."""

    def __init__(self, workload: Workload, pp_rank: int, tp_rank: int, experts: ExpertPart) -> None:
        self.workload, self.tp_rank, self.experts = workload, tp_rank, experts
        self.parameters = trained(workload.parameters(pp_rank, tp_rank, experts=experts))
        self.zero = workload.run.parallel.zero if divides(workload) else 0
        self.plan = buffer_plan(workload, self.parameters) if self.zero in (1, 2) else None
        self._boxes: dict[tuple[int, str], Box] = {}

    def list_parts(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        shard_rank: int,
        expert_shard_rank: int,
        ep_rank: int,
    ) -> dict[str, HeldPart]:
        """Return the parts of one rank."""
        ranks = {"dense": shard_rank, "expert": expert_shard_rank}
        flats: dict[int, tuple[int, int]] = {}
        if self.plan is not None:
            counts = zero_shard_counts(self.workload, self.plan, self.parameters)
            places = [
                (ranks[self.parameters[bucket.members[0]].grid], count)
                for bucket, count in zip(self.plan.buckets, counts, strict=True)
            ]
            flats = {part.number: part.flat for part in local_bucket_parts(self.plan, places)}
        parts: dict[str, HeldPart] = {}
        for number, one in enumerate(self.parameters):
            if one.name not in shapes or (self.plan is not None and number not in flats):
                continue
            flat = flats.get(number)
            if self.zero == 3:
                each = -(-one.rows // self.workload.num_zero_shards(one))
                start = min(ranks[one.grid] * each, one.rows)
                stop = min(start + each, one.rows)
                if start == stop:
                    continue
                flat = (start * one.columns, stop * one.columns)
            parts[one.name] = HeldPart(self._box(one, shapes[one.name], ep_rank), flat)
        return parts

    def _box(self, one: HeldParameter, shape: tuple[int, ...], ep_rank: int) -> Box:
        key = ep_rank, one.name
        if key not in self._boxes:
            run = self.workload.run
            self._boxes[key] = held_box(
                run.model,
                one,
                shape,
                tp=run.parallel.tp,
                tp_rank=self.tp_rank,
                ep_rank=ep_rank,
                experts=self.experts,
            )
        return self._boxes[key]


# --- cost


@dataclass(frozen=True, slots=True)
class MatrixRuleRow:
    """Assigned ranks and cost of one update rule per matrix, on the pipeline rank with the most
    matrices."""

    rule: str
    matrices: int
    """Matrices of the stage."""

    ranks: int
    """Ranks of the stage, over which they are divided."""

    fewest: int
    """Matrices of the rank with the fewest."""

    most: int

    imbalance: float
    """Cost of the most expensive rank, relative to the mean."""

    largest: float
    """Cost of the most expensive matrix, relative to the mean of the ranks: no assignment of whole
    matrices has a lower imbalance, if above 1."""

    flops_share: float | None
    """FLOPs of the Newton-Schulz steps of all ranks, relative to the training FLOPs of a step; None
    for rules without them."""

    waves: int
    nbytes: int
    """Bytes that a rank sends in a step at most: pieces of matrices and of their directions."""

    state: int
    """Bytes of the states of whole matrices on a rank at most."""


def matrix_rule_rows(workload: Workload) -> Iterator[MatrixRuleRow]:
    """Yield the update rules per matrix that use assigned ranks."""
    run = workload.run
    for rule in list_assigned_rules(run):
        plans = [plan_stage_matrices(workload, pp, rule) for pp in range(run.parallel.pp)]
        plan = max(plans, key=lambda each: len(each.matrices))
        counts = Counter(plan.ranks)
        mean = sum(plan.costs) / plan.num_ranks
        steps = run.optim.muon.ns_steps if rule == "muon" else None
        flops = sum(sum(each.costs) for each in plans)
        yield MatrixRuleRow(
            rule=rule,
            matrices=len(plan.matrices),
            ranks=plan.num_ranks,
            fewest=min(counts[rank] for rank in range(plan.num_ranks)),
            most=max(counts.values(), default=0),
            imbalance=plan.imbalance,
            largest=max((one.cost for one in plan.matrices), default=0) / max(mean, 1),
            flops_share=None if steps is None else steps * flops / _training_flops(run),
            waves=plan.num_waves,
            nbytes=message_width(run, rule) * max(plan.sent_numels),
            state=WIDTHS[run.precision.params].sums
            * max(count_state_numels(run, rule, plan), default=0),
        )


def _training_flops(run: TrainRun) -> int:
    """Return the model FLOPs of a step over all ranks."""
    length, rows = run.train.seq_len, largest_batch_size(run.train)
    return trained_step_flops(
        run.model,
        run.lora,
        run.optim,
        tokens=rows * length,
        squared_lengths=rows * length**2,
    )


def message_width(run: TrainRun, rule: str) -> int:
    """Return the bytes of an element of a piece in a message."""
    params = run.precision.params
    if params == "fp64" or rule != "muon":
        return WIDTHS[params].sums
    dtype = run.optim.muon.dtype or ("fp32" if params == "fp32" else "bf16")
    return {"fp32": 4, "bf16": 2}[dtype]


def count_state_numels(run: TrainRun, rule: str, plan: AssignedRanksPlan) -> list[int]:
    """Return the elements of the states of whole matrices on each rank."""
    numels = [0] * plan.num_ranks
    for matrix, rank in zip(plan.matrices, plan.ranks, strict=True):
        numels[rank] += _state_numel(run, rule, matrix)
    return numels


def _state_numel(run: TrainRun, rule: str, matrix: WeightMatrix) -> int:
    """Return the elements of the states of one matrix: of SOAP both moments, and factor and basis
    of each side; of NorMuon one per neuron; of AdaMuon one per element."""
    if rule == "soap":
        limit = run.optim.soap.max_precondition_dim
        sides = [size for size in (matrix.rows, matrix.columns) if size <= limit]
        return 2 * matrix.numel + sum(2 * size * size for size in sides)
    neurons = max(matrix.rows, matrix.columns)
    return {"normuon": neurons, "adamuon": matrix.numel}.get(run.optim.muon.second_moment or "", 0)


def update_nbytes(workload: Workload, pp_rank: int) -> int:
    """Return the temporary bytes of the exchange with assigned ranks at most: of two waves, the
    messages and the stacked matrices, and twice the matrices for the Newton-Schulz steps of one."""
    run, most = workload.run, 0
    for rule in list_assigned_rules(run):
        plan = plan_stage_matrices(workload, pp_rank, rule)
        numels = [[0] * plan.num_waves for _ in range(plan.num_ranks)]
        for matrix, rank, wave in zip(plan.matrices, plan.ranks, plan.waves, strict=True):
            numels[rank][wave] += matrix.numel
        largest = max((numel for waves in numels for numel in waves), default=0)
        copies = 2 if plan.num_ranks == 1 else 4 * (2 if run.parallel.overlap else 1)
        most = max(most, message_width(run, rule) * largest * (copies + 2))
    return most

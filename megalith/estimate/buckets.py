"""Layout of the flat gradient buffers of a rank, as data parallelism plans them."""

from collections.abc import Sequence
from math import lcm

from megalith.estimate.workload import Workload
from megalith.plan.buckets import BucketPlan, plan_buckets
from megalith.plan.layers.base import HeldParameter, tensor_part
from megalith.plan.state_encodings import block_alignment
from megalith.plan.update_rules import is_hidden_matrix


def buffer_plan(workload: Workload, parameters: Sequence[HeldParameter]) -> BucketPlan:
    """Return the layout of the flat gradient buffer for these parameters; weights have the same
    layout.

    Under ZeRO a bucket holds only parameters that are summed over the same ranks, and a table that
    two stages share has its own bucket, so that shards of ranks with other sizes coincide.
    """
    run, divided = workload.run, divides(workload)
    aligns = divided and run.parallel.bucket_alignment == "matrices"
    aligned = [aligns and is_hidden_matrix(one.name, int(one.matrix)) for one in parameters]
    kinds = [
        (one.grid, _kind(workload, one) if divided else "", is_aligned)
        for one, is_aligned in zip(parameters, aligned, strict=True)
    ]
    stacks: list[list[int]] = []
    for number, one in enumerate(parameters):
        if one.stacked and kinds[number] == kinds[number - 1]:
            stacks[-1].append(number)
        else:
            stacks.append([number])
    shared = workload.shared_tables() if divided else {}
    align = block_alignment(run.precision.optimizer_states)
    return plan_buckets(
        [one.numel for one in parameters],
        bucket_numel=run.parallel.bucket_numel,
        align=align,
        end_align=align * lcm(workload.shards, workload.expert_shards),
        alone=[number for number, one in enumerate(parameters) if one.name in shared],
        contiguous=[stack for stack in stacks if len(stack) > 1],
        kinds=kinds,
        whole_in={
            kind: workload.num_zero_shards(one)
            for one, kind, is_aligned in zip(parameters, kinds, aligned, strict=True)
            if is_aligned
        },
    )


def divides(workload: Workload) -> bool:
    """Return whether ZeRO shards anything: a rank owns less than it computes with."""
    return max(workload.shards, workload.expert_shards) > 1


def zero_shard_counts(
    workload: Workload, plan: BucketPlan, parameters: Sequence[HeldParameter]
) -> list[int]:
    """Return the number of ZeRO shards of each bucket, whose parameters are all on one grid."""
    return [workload.num_zero_shards(parameters[bucket.members[0]]) for bucket in plan.buckets]


def _kind(workload: Workload, one: HeldParameter) -> str:
    """Return over which tensor-parallel ranks the gradient is summed; "": none."""
    run = workload.run
    copies = tensor_part(run.model, tp=run.parallel.tp, rank=0).kv_copies
    if one.cut or (one.summed == "sp" and not run.parallel.sp):
        return ""
    return (
        "those with the same heads" if one.summed == "heads" or copies == run.parallel.tp else "all"
    )

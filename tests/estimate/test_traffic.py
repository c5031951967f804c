"""Tests of megalith/estimate/times.py: what real ranks give their collectives is what the plan
says."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.data.loader import MaskSettings, StepBatches, build_batch
from megalith.data.sample import Sample
from megalith.estimate.memory import crowded_bytes, memory_ledger, worst
from megalith.estimate.times import Traffic, sent, step_traffic
from megalith.estimate.workload import plan_workload
from megalith.kernels import routing
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import build_mesh
from megalith.plan.devices import DEVICES
from megalith.plan.grid import model_grid
from megalith.recipes import resolve
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import destroy_mesh, run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train import step
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer

FLAGS = 95
"""Bytes of messages that carry single numbers, such as that of a step, which the plan leaves
out."""

Sums = dict[tuple[str, str, int], tuple[int, int]]
"""(axis, kind, ranks) -> calls and bytes."""


def recorded(rank: int, world: int, run: TrainRun) -> Sums:
    """What one step of one rank sends, as its collectives are given it."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    rows, length = run.train.micro_batch_size, run.train.seq_len
    ids = np.arange(length + 1) % run.model.vocab_size
    sample = Sample(ids=ids, num_valid=length + 1)
    batch = build_batch(
        [sample] * rows,
        MaskSettings(),
        device=torch.device("cpu"),
        slicing=local_slicing(run.parallel, mesh),
        num_mtp_layers=run.model.mtp.num_layers,
    )
    many = run.train.global_batch_size // (rows * mesh.dp.size)
    # The message with the statistics of the step is left out.
    with slow_link() as link, patched(step, "all_reduce_", lambda x, group: x):
        batches = StepBatches(
            [batch] * many, rows * length * many, tuple(n * many for n in batch.num_mtp_labels)
        )
        train_step(trainer, batches, lr=1e-3, weight_decay=0.0)
        trainer.data.wait_params()
    result: Sums = defaultdict(lambda: (0, 0))
    sizes = {"_".join(span): group.size for span, group in mesh.groups.items()}
    for transfer in link.transfers:
        if transfer.nbytes > FLAGS and transfer.kind != "irecv":
            size = sizes.get(transfer.group, 2)  # channels between stages are named after the two
            key = transfer.group[:2], transfer.kind, size
            calls, nbytes = result[key]
            result[key] = calls + 1, nbytes + transfer.nbytes
    destroy_mesh(mesh)
    return dict(result)


def in_turn(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Experts in turn, so that all are equally busy."""
    t, experts = scores.shape
    return torch.arange(t * count).view(t, count) % experts


def recorded_in_turn(rank: int, world: int, run: TrainRun) -> Sums:
    """`recorded`, all experts equally busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "top_k_indices", in_turn)
        return recorded(rank, world, run)


def without_axes(sums: Sums) -> dict[tuple[str, int], tuple[int, int]]:
    """By kind and ranks alone: groups of both grids that are of the same ranks have one name."""
    result: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for (_, kind, ranks), (calls, nbytes) in sums.items():
        result[kind, ranks] = result[kind, ranks][0] + calls, result[kind, ranks][1] + nbytes
    return dict(result)


MOE = {
    "model.moe.num_experts": "32",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "4",
    "train.micro_batch_size": "1",
    "train.seq_len": "64",
    "train.global_batch_size": "4",
}
SP = {"parallel.tp": "2", "parallel.sp": "true"}
AGAIN = {"recompute.granularity": "selective"}
SHARED = {"model.moe.shared_ffn_hidden_size": "6", "model.moe.shared_gate": "true"}
BIASES = {"model.moe.router.score": "sigmoid", "model.moe.router.expert_bias": "true"}
EXPERTS = [
    (2, MOE | {"parallel.ep": "2"}),
    (4, MOE | SP | SHARED | {"parallel.ep": "2", "parallel.etp": "2"}),
    (4, MOE | {"parallel.ep": "4", "parallel.dispatcher": "allgather", "precision.params": "bf16"}),
    (2, MOE | {"parallel.ep": "2", "recompute.granularity": "full", "model.moe.latent_size": "12"}),
    (2, MOE | SHARED | {"parallel.ep": "2", "recompute.granularity": "full"}),
    (2, MOE | SP | {"parallel.ep": "2", "parallel.etp": "1", "recompute.granularity": "full"}),
    (2, MOE | SP | SHARED | {"recompute.granularity": "full"}),
    (2, MOE | SP | SHARED | {"recompute.granularity": "selective", "recompute.modules": "[mlp]"}),
    (
        2,
        MOE
        | {"parallel.ep": "2", "recompute.granularity": "selective", "recompute.modules": "[mlp]"},
    ),
    (
        4,
        MOE
        | {
            "parallel.ep": "2",
            "parallel.cp": "2",
            "parallel.zero": "1",
            "model.moe.aux_loss.batch_coeff": "0.1",
        },
    ),
    (
        4,
        MOE
        | {"parallel.ep": "2", "parallel.zero": "2", "model.moe.aux_loss.global_batch_coeff": "0.1"}
        | BIASES,
    ),
    (4, MOE | {"parallel.etp": "2", "parallel.pp": "2", "model.moe.layers": "[false, true]"}),
    (4, MOE | {"parallel.ep": "2", "parallel.zero": "3", "model.hidden_size": "98"}),
    (
        2,
        MOE
        | SP
        | SHARED
        | {"recompute.granularity": "selective", "recompute.modules": "[shared_experts]"},
    ),
    (
        2,
        MOE
        | {"parallel.cp": "2", "model.moe.capacity.factor": "2.0", "recompute.granularity": "full"},
    ),
    (2, MOE | {"parallel.ep": "2", "parallel.cp": "2", "model.moe.capacity.factor": "2.0"}),
    (4, MOE | {"parallel.ep": "2", "parallel.cp": "2", "model.moe.aux_loss.quantile": "true"}),
    (
        2,
        MOE
        | {
            "parallel.ep": "2",
            "model.moe.capacity.factor": "2.0",
            "model.moe.capacity.pad": "true",
        },
    ),
    (
        2,
        MOE
        | {"parallel.ep": "2", "recompute.granularity": "full", "model.norm_placement": "around"},
    ),
    (2, MOE | SP | SHARED | {"recompute.granularity": "full", "model.norm_placement": "after"}),
    (2, MOE | SP | SHARED | AGAIN | {"recompute.modules": "[mlp, shared_experts]"}),
]


def assert_plan_of_experts_holds(world: int, settings: dict[str, str]) -> None:
    run = tiny_run(settings | {"parallel.bucket_numel": "2000"})
    for rank, result in enumerate(run_ranks(recorded_in_turn, world, run)):
        real, expected = without_axes(result), without_axes(planned(run, world, rank))
        assert {key: calls for key, (calls, _) in real.items()} == {
            key: calls for key, (calls, _) in expected.items()
        }
        for key, (calls, nbytes) in real.items():
            assert abs(nbytes - expected[key][1]) <= calls, (rank, key)


@pytest.mark.parametrize("world, settings", [EXPERTS[0], EXPERTS[1], EXPERTS[2], EXPERTS[9]])
def test_measured_expert_traffic_matches_the_plan(world: int, settings: dict[str, str]) -> None:
    assert_plan_of_experts_holds(world, settings)


@pytest.mark.slow
@pytest.mark.parametrize("world, settings", EXPERTS)
def test_measured_expert_traffic_under_every_axis_matches_the_plan(
    world: int, settings: dict[str, str]
) -> None:
    assert_plan_of_experts_holds(world, settings)


def planned(run: TrainRun, world: int, rank: int) -> Sums:
    """The same from the plan."""
    workload = plan_workload(run, world)
    place = workload.grid.coordinates(rank)
    result: Sums = defaultdict(lambda: (0, 0))
    for row in step_traffic(workload, place["pp"], place["tp"]):
        kind, more, less = on_gloo(row, run.parallel.zero)
        # A group is described by the first span that means its ranks: over cp alone, gradients are
        # summed over "cp".
        axis = "cp" if row.axis == "dp" and workload.dp == 1 else row.axis
        # a message is recorded with the group it goes through
        ranks = run.parallel.pp if axis == "pp" else row.ranks
        calls, nbytes = result[axis, kind, ranks]
        result[axis, kind, ranks] = calls + row.calls * more, nbytes + round(row.nbytes * less)
    return dict(result)


def on_gloo(row: Traffic, zero: int) -> tuple[str, int, float]:
    """What a CPU's collectives make of it: kind, calls for one call, and what the recorder counts
    of a byte."""
    if row.axis == "cp" and row.kind == "message":
        # an exchange in which all but one part are empty
        return (
            "all_to_all",
            1,
            (row.ranks - 1) / row.ranks,
        )
    if row.axis in ("dp", "edp") and row.kind in ("reduce_scatter", "all_gather") and zero < 3:
        return "isend", row.ranks - 1, 1.0
    return {"message": "isend"}.get(row.kind, row.kind), 1, 1.0


def assert_plan_holds(world: int, settings: dict[str, str]) -> None:
    run = tiny_run(settings | {"parallel.bucket_numel": "2000"})
    for rank, result in enumerate(run_ranks(recorded, world, run)):
        expected = planned(run, world, rank)
        assert {key: calls for key, (calls, _) in result.items()} == {
            key: calls for key, (calls, _) in expected.items()
        }
        for key, (calls, nbytes) in result.items():
            # each call's bytes are rounded
            assert abs(nbytes - expected[key][1]) <= calls, (
                rank,
                key,
            )


UNLIKE = {
    "model.num_layers": "3",
    "model.layers.attention": "[full, linear, none]",
    "model.num_kv_heads": "4",
    "model.layers.num_kv_heads": "[2, 4]",
    "model.layers.mlp": "[linear, full, full]",
}
TENSOR = [
    (2, UNLIKE | {"parallel.tp": "2", "parallel.sp": "true", "recompute.granularity": "full"}),
    (2, SP | {"recompute.granularity": "full", "model.norm_placement": "around"}),
    (2, {"parallel.dp": "2"}),
    (3, {"parallel.dp": "3", "train.micro_batch_size": "1"}),
    (2, {"parallel.tp": "2"}),
    (2, {"parallel.tp": "2", "parallel.sp": "true"}),
    (4, {"parallel.tp": "4", "parallel.sp": "true", "precision.params": "bf16"}),
    (4, {"parallel.tp": "2", "parallel.dp": "2", "model.tied_embeddings": "true"}),
    (
        3,
        {
            "parallel.tp": "3",
            "parallel.sp": "true",
            "model.num_heads": "8",
            "model.num_kv_heads": "4",
        },
    ),
    (
        6,
        {
            "parallel.tp": "3",
            "parallel.zero": "1",
            "model.num_heads": "8",
            "model.num_kv_heads": "4",
        },
    ),
]
ZERO = [
    (2, {"parallel.zero": "1"}),
    (3, {"parallel.zero": "2", "train.micro_batch_size": "1", "precision.params": "bf16"}),
    (4, {"parallel.zero": "1", "parallel.dp_replicate": "2", "train.micro_batch_size": "1"}),
    (2, {"parallel.zero": "1", "parallel.reduce_dtype": "bf16"}),
]
# a norm is sent alone, and must not look like a flag
WIDE = {
    "parallel.zero": "3",
    "model.hidden_size": "98",
}
SHARDED = [
    (2, WIDE),
    (3, WIDE | {"train.micro_batch_size": "1", "model.tied_embeddings": "true"}),
    (4, WIDE | {"parallel.dp_replicate": "2", "train.micro_batch_size": "1"}),
    (4, WIDE | {"parallel.pp": "2", "precision.params": "bf16"}),
    (4, WIDE | {"parallel.tp": "2", "parallel.sp": "true", "recompute.granularity": "full"}),
]
LOWER = {"optim.frozen": "[embed.weight, 'layers.0.*']"}
CHOSEN = [
    (2, LOWER | {"parallel.zero": "1"}),
    (2, {"parallel.zero": "2", "optim.trained": "['*.mlp.down', '*.attention.kv']"}),
    (2, LOWER),
    (2, WIDE | LOWER),
    (4, WIDE | LOWER | {"parallel.dp_replicate": "2", "train.micro_batch_size": "1"}),
    (2, WIDE | LOWER | {"parallel.overlap": "false", "model.num_layers": "3"}),
    (2, WIDE | {"optim.trained": "['layers.2.*']", "model.num_layers": "3"}),
    (4, WIDE | LOWER | {"parallel.pp": "2"}),
    (2, WIDE | {"optim.frozen": "['layers.1.*', head.weight]"}),
]
CONTEXT = [
    (2, {"parallel.cp": "2"}),
    (3, {"parallel.cp": "3", "precision.params": "bf16"}),
    (2, {"parallel.cp": "2", "parallel.context.kind": "gather"}),
    (2, {"parallel.cp": "2", "parallel.context.kind": "a2a"}),
    (
        4,
        {
            "parallel.cp": "4",
            "parallel.context.kind": "a2a+ring",
            "parallel.context.a2a": "2",
            "train.seq_len": "16",
        },
    ),
    (
        4,
        {
            "parallel.cp": "4",
            "parallel.context.kind": "a2a+ring",
            "parallel.context.a2a": "2",
            "train.seq_len": "16",
            "model.num_heads": "6",
            "model.num_kv_heads": "3",
        },
    ),
    (2, {"parallel.cp": "2", "recompute.granularity": "full"}),
    (2, UNLIKE | {"parallel.cp": "2", "recompute.granularity": "full"}),
    (2, {"parallel.cp": "2", "parallel.context.kind": "a2a", "recompute.granularity": "selective"}),
]
IN_A_V = {"parallel.pipeline.schedule": "zb-v"}
PIPELINE = [
    (2, {"parallel.pp": "2", "precision.params": "bf16", "model.fp32_residual": "true"}),
    (2, {"parallel.pp": "2"}),
    (
        2,
        {
            "parallel.pp": "2",
            "parallel.pipeline.schedule": "zb-h1",
            "model.tied_embeddings": "true",
        },
    ),
    (2, {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"}),
    (2, {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"} | IN_A_V),
    (4, {"parallel.pp": "2", "parallel.tp": "2", "parallel.sp": "true"}),
]


SHORT = {
    "model.mla.kv_rank": "7",
    "model.mla.nope_dim": "5",
    "model.mla.rope_dim": "4",
    "model.mla.value_dim": "3",
    "model.num_kv_heads": "8",
    "model.head_dim": "null",
    "parallel.tp": "2",
}
UP = {"recompute.granularity": "selective", "recompute.modules": "[mla_up_proj]"}
LATENT = [
    (2, SHORT | {"parallel.sp": "true", "model.mla.q_rank": "9", "model.mtp.num_layers": "1"}),
    (2, SHORT | {"model.mla.q_rank": "9"}),
    (2, SHORT | {"parallel.sp": "true", "recompute.granularity": "full"}),
    (2, SHORT | {"parallel.sp": "true", "model.mla.q_rank": "9"} | UP),
    (2, SHORT | {"model.mla.q_rank": "9"} | UP),
    (2, SHORT | {"parallel.tp": "1", "parallel.cp": "2"} | UP),
    (2, SHORT | {"parallel.tp": "1", "parallel.cp": "2", "parallel.context.kind": "a2a"} | UP),
]
DEPTHS = {"model.mtp.num_layers": "2"}
FEW = {"model.mtp.num_layers": "1"}
"""Whose losses, summed over all ranks, are few numbers."""

OWN = {"parallel.pp": "3", "parallel.pipeline.layout": "Ett|mm|L", "model.num_layers": "2"}
MTP_MODEL = [
    (2, DEPTHS | {"parallel.tp": "2", "parallel.sp": "true", "recompute.granularity": "full"}),
    (2, DEPTHS | {"parallel.tp": "2"}),
    (2, DEPTHS | {"parallel.cp": "2"}),
    (2, DEPTHS | {"parallel.pp": "2"}),
    (
        2,
        DEPTHS
        | {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"}
        | IN_A_V,
    ),
    (
        4,
        {
            "model.mtp.num_layers": "1",
            "parallel.pp": "2",
            "parallel.tp": "2",
            "parallel.sp": "true",
        },
    ),  # few flags
    (2, DEPTHS | WIDE),
    (2, DEPTHS | {"model.positions": "learned", "parallel.pp": "2"}),
    (2, DEPTHS | {"model.positions": "relative", "parallel.cp": "2"}),
    (3, DEPTHS | OWN | {"precision.params": "bf16", "model.fp32_residual": "true"}),
    (3, DEPTHS | OWN | {"model.tied_embeddings": "true", "model.positions": "learned"}),
    (
        6,
        OWN
        | FEW
        | {"parallel.tp": "2", "parallel.sp": "true", "parallel.pipeline.layout": "Et|tm|L"},
    ),
    (6, OWN | FEW | {"parallel.cp": "2", "parallel.pipeline.layout": "E|tt|mL"}),
    (
        2,
        DEPTHS
        | OWN
        | {
            "parallel.pp": "2",
            "parallel.pipeline.vpp": "2",
            "parallel.pipeline.layout": "Et|t|mm|L",
        },
    ),
]


BACK = {"model.cross.memory": "1", "model.num_layers": "4", "model.qkv_bias": "true"}
LOOKING = [
    (
        4,
        BACK
        | {
            "parallel.pp": "2",
            "parallel.tp": "2",
            "parallel.sp": "true",
            "recompute.granularity": "full",
        },
    ),
    (2, BACK | {"parallel.pp": "2", "precision.params": "bf16", "model.fp32_residual": "true"}),
    (
        2,
        BACK
        | {
            "parallel.pp": "2",
            "parallel.pipeline.vpp": "2",
            "model.cross.layers": "[true, true, false]",
        },
    ),
    (2, BACK | {"parallel.tp": "2"}),
    (
        2,
        BACK
        | {"parallel.cp": "2", "parallel.context.kind": "a2a", "recompute.granularity": "full"},
    ),
    (
        2,
        BACK
        | {
            "parallel.tp": "2",
            "parallel.sp": "true",
            "recompute.granularity": "full",
            "recompute.num_layers": "2",
        },
    ),
]


@pytest.mark.parametrize(
    "world, settings",
    [
        TENSOR[0],
        TENSOR[1],
        TENSOR[4],
        ZERO[2],
        CONTEXT[0],
        PIPELINE[3],
        MTP_MODEL[0],
        CHOSEN[1],
        LATENT[0],
        LATENT[3],
        LOOKING[0],
    ],
)
def test_measured_traffic_of_a_step_matches_the_plan(world: int, settings: dict[str, str]) -> None:
    assert_plan_holds(world, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world, settings",
    TENSOR + ZERO + SHARDED + CHOSEN + CONTEXT + PIPELINE + MTP_MODEL + LATENT + LOOKING,
)
def test_measured_traffic_under_every_axis_matches_the_plan(
    world: int, settings: dict[str, str]
) -> None:
    assert_plan_holds(world, settings)


@pytest.mark.slow
@pytest.mark.parametrize("sp", ["true", "false"])
@pytest.mark.parametrize(
    "again",
    [
        {"recompute.granularity": "full", "recompute.num_layers": "2"},
        {"recompute.granularity": "full", "recompute.method": "block"},
        {"recompute.granularity": "selective", "recompute.modules": "[mlp]"},
        {
            "recompute.granularity": "selective",
            "recompute.modules": "[mlp]",
            "recompute.mlp_chunks": "3",
        },
        {
            "recompute.granularity": "selective",
            "recompute.modules": "[norm, core_attention, mlp_act]",
        },
    ],
)
def test_recomputation_repeats_its_communication(sp: str, again: dict[str, str]) -> None:
    assert_plan_holds(2, {"parallel.tp": "2", "parallel.sp": sp} | again)


def test_shared_inputs_of_recomputed_layers_are_gathered() -> None:
    assert_plan_holds(
        2, {"parallel.tp": "2", "recompute.granularity": "full", "recompute.shard_inputs": "true"}
    )


def test_tables_of_the_experts_page_match_the_plan() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "experts.md").read_text()
    run = resolve("qwen3_30b_a3b")
    for dispatcher in ("alltoall", "allgather"):
        sent_by_ep = []
        for ep in ("2", "4", "8", "16"):
            layout = {"parallel.dispatcher": dispatcher, "parallel.ep": ep}
            workload = plan_workload(apply_overrides(run, dict(layout)), 64)
            sums = sum(
                row.nbytes for row in step_traffic(workload, 0, 0) if row.axis.startswith("ep")
            )
            sent_by_ep.append(f"{sums / 2**30 / workload.num_microbatches / 24:.2f}")
        assert f"| `{dispatcher}`, GiB | {' | '.join(sent_by_ep)} |" in page
    workload, device = plan_workload(run, 64), DEVICES["h100"]
    even, crowded = (
        worst(memory_ledger(workload, device)).memory.total,
        crowded_bytes(workload, device),
    )
    assert (
        crowded is not None and f"{crowded / 2**30:.0f} GiB instead of {even / 2**30:.0f}" in page
    )


def test_a_ring_sends_all_but_one_part() -> None:
    assert sent("reduce_scatter", 900, 3) == sent("all_gather", 900, 3) == 600
    assert sent("all_reduce", 900, 3) == 1200
    assert sent("message", 900, 2) == 900

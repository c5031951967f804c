"""Tests of megalith/estimate/memory.py: the ledger is what a really built rank takes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn

from megalith.config.train import TrainRun
from megalith.config.tree import apply_overrides
from megalith.data.loader import MaskSettings, StepBatches, build_batch
from megalith.data.sample import Sample
from megalith.estimate import memory
from megalith.estimate.memory import (
    ZeroShard,
    chunk_activations,
    crowded_bytes,
    distinct_places,
    gathered_units,
    keeps_gathered,
    memory_ledger,
    place_memory,
    working_bytes,
    worst,
)
from megalith.estimate.workload import Workload, plan_workload
from megalith.models.decoder import build_chunks, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.observe.machine import DTYPES
from megalith.optim.optimizer import RuleOptimizer
from megalith.parallel.context import local_slicing
from megalith.parallel.data import IN_FLIGHT as SUMS_IN_FLIGHT
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.mesh import build_mesh, build_meta_mesh
from megalith.plan.devices import DEVICES, device_named
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import ExpertPart
from megalith.plan.parameters import layer_parameters
from megalith.plan.simulate import peak_activation_memory
from megalith.plan.stages import single_stage
from megalith.recipes import resolve
from megalith.testing.meter import measure_saved_activations
from megalith.testing.ranks import destroy_mesh, run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer

GIB = 2**30
UNEVEN = {
    "model.num_heads": "8",
    "model.num_kv_heads": "4",
    "model.hidden_size": "48",
    "model.ffn_hidden_size": "41",
}


def built_state(workload: Workload, rank: int) -> tuple[int, int, int, int]:
    """Bytes of the weights, gradients, master weights and moments of one rank, built without
    memory."""
    run = workload.run
    mesh = build_meta_mesh(model_grid(run.parallel, run.model, workload.world), rank=rank)
    dtype = DTYPES[run.precision.params]
    context = build_context(
        run.model, mesh, run.parallel, dtype=dtype, lora=run.lora, optim=run.optim
    )
    model = nn.ModuleList(build_chunks(context))
    data = BucketedDataParallel(
        model,
        [(one.shard, module, name) for one, module, name in iter_parameter_specs(model)],
        mesh,
        replace(run.parallel, overlap=False),
        device=torch.device("meta"),
    )

    slots = RuleOptimizer(
        [(param.shard, param.weight) for param in data.local_params], run.optim
    ).slots
    master_weights = sum(slot.master.nbytes for slot in slots if slot.master is not slot.weight)
    moments = sum(tensor.nbytes for slot in slots for tensor in slot.state.values())
    still = sum(weight.nbytes for _, weight in data.frozen)
    weights, gradients = (
        sum(each.nbytes for each in buckets) for buckets in (data.weights, data.gradients)
    )
    return weights + still, gradients, master_weights, moments


EXPERTS = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "9",
    "model.moe.router.score": "sigmoid",
    "model.moe.router.expert_bias": "true",
    "model.moe.shared_ffn_hidden_size": "7",
    "train.micro_batch_size": "1",
}
OWN = {
    "parallel.pp": "3",
    "parallel.pipeline.layout": "Ettt|mm|L",
    "model.num_layers": "3",
    "model.mtp.num_layers": "2",
}
WITH_SP = {"parallel.tp": "2", "parallel.sp": "true"}


@pytest.mark.parametrize(
    "world, settings",
    [
        (1, EXPERTS),
        (4, EXPERTS | {"parallel.ep": "2", "parallel.zero": "1", "precision.params": "bf16"}),
        (4, EXPERTS | {"parallel.ep": "4", "parallel.zero": "2"}),
        (4, EXPERTS | {"parallel.ep": "2", "parallel.zero": "2", "parallel.dp_replicate": "2"}),
        (8, EXPERTS | WITH_SP | {"parallel.ep": "2", "parallel.etp": "1", "parallel.zero": "1"}),
        (8, EXPERTS | WITH_SP | {"parallel.ep": "2", "parallel.zero": "2", "parallel.pp": "2"}),
        (
            4,
            EXPERTS
            | {
                "parallel.etp": "2",
                "parallel.cp": "2",
                "parallel.zero": "1",
                "model.moe.layers": "[false, true]",
            },
        ),
        (4, EXPERTS | {"parallel.ep": "2", "lora.rank": "2", "parallel.zero": "1"}),
        (1, {}),
        (2, {"precision.params": "bf16"}),
        (4, {"parallel.tp": "4", "parallel.sp": "true"}),
        (3, {"parallel.tp": "3"} | UNEVEN),
        (
            6,
            {
                "parallel.tp": "3",
                "parallel.sp": "true",
                "parallel.zero": "1",
                "precision.params": "bf16",
            }
            | UNEVEN,
        ),
        (
            4,
            {
                "parallel.tp": "2",
                "parallel.zero": "1",
                "model.attention.qk_norm": "head",
                "model.mtp.num_layers": "1",
            },
        ),
        (
            4,
            {
                "parallel.tp": "4",
                "parallel.sp": "true",
                "model.attention.qk_norm": "whole",
                "model.positions": "learned",
            },
        ),
        (
            2,
            {
                "parallel.pp": "2",
                "model.mtp.num_layers": "2",
                "model.norm": "layer",
                "model.gated": "false",
            },
        ),
        (3, {"parallel.zero": "1", "train.micro_batch_size": "1"}),
        (4, {"parallel.zero": "2", "parallel.cp": "2", "precision.params": "bf16"}),
        (4, {"parallel.zero": "1", "parallel.dp_replicate": "2", "train.micro_batch_size": "1"}),
        (
            4,
            {
                "parallel.zero": "1",
                "parallel.tp": "2",
                "parallel.sp": "true",
                "model.num_kv_heads": "1",
            },
        ),
        (
            8,
            {
                "parallel.zero": "1",
                "parallel.tp": "4",
                "parallel.sp": "true",
                "model.qkv_bias": "true",
            },
        ),
        (2, {"parallel.pp": "2", "precision.params": "fp64"}),
        (4, {"lora.rank": "3", "parallel.tp": "2", "parallel.sp": "true", "parallel.zero": "1"}),
        (
            3,
            {
                "lora.rank": "2",
                "lora.targets": "[q, down]",
                "parallel.tp": "3",
                "precision.params": "bf16",
            }
            | UNEVEN,
        ),
        (
            4,
            {"lora.rank": "5", "parallel.zero": "2", "parallel.pp": "2", "model.num_kv_heads": "1"},
        ),
        (4, {"parallel.pp": "2", "model.tied_embeddings": "true", "parallel.zero": "1"}),
        (
            4,
            {
                "optim.frozen": "['*.attention.q', '*.mlp.down']",
                "parallel.tp": "2",
                "parallel.zero": "1",
            },
        ),
        (4, {"optim.trained": "['*.attention.kv']", "parallel.pp": "2", "parallel.zero": "2"}),
        (
            4,
            EXPERTS
            | {
                "optim.frozen": "['*.experts.*', embed.weight]",
                "parallel.ep": "2",
                "parallel.zero": "1",
            },
        ),
        (
            4,
            {
                "parallel.pp": "2",
                "parallel.pipeline.vpp": "2",
                "model.num_layers": "4",
                "parallel.tp": "2",
            },
        ),
        (2, {"parallel.pp": "2", "parallel.pipeline.layout": "Ettt|L", "model.num_layers": "3"}),
        (3, OWN),
        (
            6,
            OWN
            | {
                "parallel.tp": "2",
                "model.tied_embeddings": "true",
                "parallel.pipeline.layout": "Ett|tmm|L",
            },
        ),
        (
            6,
            OWN
            | {
                "parallel.zero": "1",
                "model.positions": "learned",
                "parallel.pipeline.layout": "E|ttt|mmL",
            },
        ),
    ],
)
def test_model_state_matches_a_built_rank(world: int, settings: dict[str, str]) -> None:
    workload = plan_workload(tiny_run(settings | {"parallel.bucket_numel": "900"}), world)
    shard = workload.grid.size("dp_shard") * workload.run.parallel.cp
    for rank in range(world):
        place = workload.grid.coordinates(rank)
        local = place["dp_shard"] * workload.run.parallel.cp + place["cp"]
        sharer = ZeroShard(local if workload.shards == shard else 0)
        if workload.grid.experts is not None:
            part = ExpertPart(
                workload.run.parallel.ep, workload.grid.experts.size("etp"), place["etp"]
            )
            sharer = ZeroShard(
                sharer.shard_rank, place["edp_shard"] if workload.run.parallel.zero else 0, part
            )
        result = place_memory(workload, place["pp"], place["tp"], sharer=sharer)
        m = result.memory
        assert (m.weights, m.gradients, m.master, m.moments) == built_state(workload, rank), rank


def sharded_state(rank: int, world: int, run: TrainRun) -> tuple[int, int, int, int]:
    """Bytes of what one rank keeps under zero=3, which can only be built on real ranks."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    slots, param = trainer.optimizer.slots, trainer.data.local_params
    master_weights = sum(slot.master.nbytes for slot in slots if slot.master is not slot.weight)
    moments = sum(tensor.nbytes for slot in slots for tensor in slot.state.values())
    destroy_mesh(mesh)
    still = sum(weight.nbytes for _, weight in trainer.data.frozen)
    return (
        sum(o.weight.nbytes for o in param) + still,
        sum(o.gradient.nbytes for o in param),
        master_weights,
        moments,
    )


@pytest.mark.slow  # the first use of FSDP2 loads torch's compiler
@pytest.mark.parametrize(
    "world, settings",
    [
        (3, {"train.micro_batch_size": "1", "precision.params": "bf16"}),
        (4, {"parallel.tp": "2", "parallel.sp": "true", "model.tied_embeddings": "true"}),
        (4, {"parallel.pp": "2", "parallel.cp": "2"}),
        (
            2,
            {
                "model.mtp.num_layers": "1",
                "model.tied_embeddings": "false",
                "train.micro_batch_size": "1",
            },
        ),
        (6, OWN | {"model.tied_embeddings": "true"}),
        (6, OWN | {"parallel.pipeline.layout": "Ett|tmm|L", "model.tied_embeddings": "false"}),
        (3, {"lora.rank": "2", "train.micro_batch_size": "1"}),
        (3, {"optim.frozen": "[embed.weight, 'layers.0.*']", "train.micro_batch_size": "1"}),
        (4, EXPERTS | {"parallel.ep": "2", "precision.params": "bf16"}),
        (
            2,
            EXPERTS
            | {
                "parallel.ep": "2",
                "model.mtp.num_layers": "1",
                "model.moe.router.expert_bias": "true",
            },
        ),
        (2, EXPERTS | {"parallel.tp": "2", "parallel.sp": "true", "parallel.etp": "1"}),
    ],
)
def test_fully_sharded_state_matches_real_ranks(world: int, settings: dict[str, str]) -> None:
    run = tiny_run({"parallel.zero": "3"} | settings)
    workload = plan_workload(run, world)
    for rank, result in enumerate(run_ranks(sharded_state, world, run)):
        place = workload.grid.coordinates(rank)
        shard_rank = place["dp_shard"] * run.parallel.cp + place["cp"]
        sharer = ZeroShard(shard_rank)
        if workload.grid.experts is not None:
            part = ExpertPart(run.parallel.ep, workload.grid.experts.size("etp"), place["etp"])
            sharer = ZeroShard(shard_rank, place["edp_shard"], part)
        m = place_memory(workload, place["pp"], place["tp"], sharer=sharer).memory
        assert (m.weights, m.gradients, m.master, m.moments) == result, rank


def test_pipelines_hold_all_weights_of_a_step_under_zero_3() -> None:
    sharded = {"parallel.zero": "3", "train.micro_batch_size": "1", "model.num_layers": "16"}
    flat, staged = (
        plan_workload(tiny_run(sharded | more), 4) for more in ({}, {"parallel.pp": "2"})
    )
    layer = sum(one.numel for one in layer_parameters(flat.run.model, 0))
    units = gathered_units(staged, 0, staged.parameters(0, 0))
    assert [unit.root for unit in units] == [False] * 9, "a table and eight layers"
    assert sum(unit.numel for unit in units) == 320 * 24 + 8 * layer
    assert keeps_gathered(staged) and not keeps_gathered(flat)
    assert [unit.name for unit in gathered_units(flat, 0, flat.parameters(0, 0)) if unit.root] == [
        ""
    ], "the last norm"


@pytest.mark.parametrize(
    "settings, states, per_parameter",
    [
        ({}, 1, 18),
        ({"precision.params": "fp32"}, 1, 16),
        ({"parallel.zero": "1"}, 64, 6 + 12 / 64),
        ({"parallel.zero": "2"}, 64, 2 + 16 / 64),
        ({"parallel.zero": "3"}, 64, 18 / 64),
        ({"optim.kind": "sgd"}, 1, 14),
        ({"optim.kind": "sgd", "optim.momentum": "0"}, 1, 10),
    ],
)
def test_bytes_per_parameter_are_the_published_ones(
    settings: dict[str, str], states: int, per_parameter: float
) -> None:
    """Rajbhandari et al. 2019, arXiv:1910.02054, figure 1: 2 + 2 + 12 with 16-bit gradients; ours
    are fp32."""
    run = apply_overrides(
        resolve("llama3_8b"), {"parallel.tp": "1", "parallel.sp": "false"} | settings
    )
    workload = plan_workload(run, 64)
    state = place_memory(workload, 0, 0).memory.state
    assert state == pytest.approx(8_030_261_248 * per_parameter, rel=1e-4)
    assert states == (workload.shards if run.parallel.zero else 1)


@pytest.mark.parametrize("zero, each", [("0", 18), ("1", 6 + 12 / 8), ("2", 2 + 16 / 8)])
def test_experts_are_divided_over_the_ranks_that_hold_the_same_ones(zero: str, each: float) -> None:
    """Spread over 64 ranks by ep 8, an expert's parameters have edp 8 ranks to divide what ZeRO
    does."""
    moe = {
        "model.moe.num_experts": "64",
        "model.moe.ffn_hidden_size": "1024",
        "model.hidden_size": "1024",
    }
    run = tiny_run(moe | {"parallel.ep": "8", "parallel.zero": zero, "precision.params": "bf16"})
    run = apply_overrides(run, {"train.global_batch_size": "64", "train.micro_batch_size": "1"})
    workload = plan_workload(run, 64)
    routed = 8 * 3 * 1024 * 1024 * run.model.num_layers
    dense = sum(one.numel for one in workload.parameters(0, 0) if one.grid == "dense")
    of_dense = {"0": 18, "1": 6 + 12 / 64, "2": 2 + 16 / 64}[zero]
    expected = routed * each + dense * of_dense
    assert place_memory(workload, 0, 0).memory.state == pytest.approx(expected, rel=1e-3)


def test_experts_that_all_tokens_choose_take_more_and_only_where_they_are_divided() -> None:
    def both(settings: dict[str, str], world: int) -> tuple[int, int | None]:
        workload = plan_workload(tiny_run(EXPERTS | settings), world)
        return worst(memory_ledger(workload)).memory.total, crowded_bytes(workload)

    even, crowded = both({"parallel.ep": "4"}, 4)
    assert crowded is not None and crowded > even
    alone, here = both({}, 1)
    assert here == alone, "all rows are here anyway"
    assert crowded_bytes(plan_workload(tiny_run({}), 1)) is None
    again, still = both({"parallel.ep": "4", "recompute.granularity": "full"}, 4)
    assert still is not None and still > again, "what is computed again is there for a while"


def test_the_70b_model_on_8_ranks_and_the_405b_model_on_16384() -> None:
    (place,) = memory_ledger(plan_workload(resolve("llama3_70b"), 8))
    assert place.memory.state == pytest.approx(18 * 70_553_706_496 / 8, rel=2e-4)
    ledger = memory_ledger(
        plan_workload(apply_overrides(resolve("llama3_405b"), {"parallel.cp": "4"}), 16_384)
    )
    assert len(ledger) == 16, "tensor-parallel ranks with equal parts are one sort"
    assert worst(ledger).pp_rank == 1, "most in flight of the stages that have all their layers"
    states = sum(place.memory.state for place in ledger)
    assert states * 8 == pytest.approx(405_853_388_800 * (6 + 12 / 128), rel=1e-3)


def test_activations_of_a_70b_layer_match_a_manual_calculation() -> None:
    """bf16, tp 8 with sp: per token and rank, 8 query heads and 1 key/value head of 128, 3584 of
    28,672 features."""
    norms, inputs = 2 * (2 * 8192 + 4) / 8, 2 * 2 * 8192 / 8
    queries, keys, values, output, log_sums = 2 * 8 * 128, 2 * 128, 2 * 128, 2 * 8 * 128, 4 * 8
    attention, mlp = queries + keys + values + output + log_sums, 2 * 2 * 3584 + 2 * 3584
    layer = norms + inputs + attention + mlp
    assert layer == 34_337
    workload = plan_workload(resolve("llama3_70b"), 8)
    ends = 8 + 1 + 2 * 128 + (2 * 8192 + 4) / 8  # numbers of tokens, rotations, the last norm
    kept = chunk_activations(workload, single_stage(80), 0, accelerator=True)
    assert kept.layers == 8192 * (80 * layer + ends)
    assert kept.loss == 2 * 8192 * 8192 + 4 * 8192 * 128_256 // 8


def test_numbers_in_the_docs_are_current() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "concepts" / "memory.md").read_text()
    run, ledgers = resolve("llama3_8b"), {}
    for zero in "0123":
        workload = plan_workload(apply_overrides(run, {"parallel.zero": zero}), 64)
        ledgers[zero] = place_memory(workload, 0, 0, DEVICES["h100"]).memory
        assert f"{ledgers[zero].state / GIB:.1f} GiB" in page
    for name in ("weights", "gradients", "master", "moments"):
        numbers = " +".join(f"{getattr(memory, name) / GIB:.1f}" for memory in ledgers.values())
        assert re.search(rf"{name} +{numbers}", page), name
    rest = " +".join(f"{(memory.total - memory.state) / GIB:.1f}" for memory in ledgers.values())
    assert re.search(rf"the rest +{rest}", page)
    selective = {"recompute.granularity": "selective"}
    for settings in (
        {},
        selective | {"recompute.modules": "[norm]"},
        selective | {"recompute.modules": "[norm, mlp_act]"},
        selective | {"recompute.modules": "[mlp]"},
        {"recompute.granularity": "full"},
    ):
        workload = plan_workload(apply_overrides(run, settings), 2)
        kept = chunk_activations(workload, single_stage(32), 0, accelerator=True).layers
        assert f"| {kept / 8192 / 32 / 1000:.0f} |" in page, settings


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_peak_activations_match_the_simulator(schedule: str) -> None:
    workload = plan_workload(
        tiny_run(
            {
                "parallel.pp": "2",
                "parallel.pipeline.schedule": schedule,
                "train.micro_batch_size": "1",
            }
        ),
        2,
    )
    kept = [chunk_activations(workload, stage, 0, accelerator=False) for stage in workload.stages]
    held = peak_activation_memory(
        workload.schedule,
        activations=[one.layers + one.loss for one in kept],
        for_weights=[one.for_weights for one in kept],
    )
    for rank, most in enumerate(held):
        result = place_memory(workload, rank, 0).memory
        assert result.activations + result.loss <= most
        if schedule != "zb-h1":  # what works may be largest at another moment than what is kept
            assert result.activations + result.loss == most


def metered_peak(rank: int, world: int, run: TrainRun) -> int:
    """The most that autograd keeps on this rank in a step."""
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    length, rows = run.train.seq_len, run.train.micro_batch_size
    sample = Sample(ids=np.arange(length + 1) % run.model.vocab_size, num_valid=length + 1)
    batch = build_batch(
        [sample] * rows,
        MaskSettings(),
        device=torch.device("cpu"),
        slicing=local_slicing(run.parallel, mesh),
    )
    many = run.train.global_batch_size // (rows * mesh.dp.size)
    with measure_saved_activations(*trainer.pipeline_model.chunks) as meter:
        train_step(trainer, StepBatches([batch] * many, many), lr=0.0, weight_decay=0.0)
    destroy_mesh(mesh)
    return meter.peak


@pytest.mark.parametrize(
    "world, settings",
    [
        (1, {}),
        (2, {"parallel.tp": "2", "parallel.sp": "true"}),
        (2, {"parallel.cp": "2"}),
        (
            2,
            {"parallel.cp": "2", "parallel.context.slicing": "document", "train.seq_len": "9"},
        ),  # of 12 with padding
        (2, {"parallel.pp": "2", "model.num_layers": "5", "parallel.pipeline.first_layers": "2"}),
        (2, {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"}),
        (
            2,
            {
                "parallel.pp": "2",
                "parallel.pipeline.schedule": "gpipe",
                "recompute.granularity": "full",
            },
        ),
    ],
)
def test_peak_activations_match_measured_memory_of_ranks(
    world: int, settings: dict[str, str]
) -> None:
    run = tiny_run({"train.global_batch_size": "24"} | settings)
    workload = plan_workload(run, world)
    for rank, result in enumerate(run_ranks(metered_peak, world, run)):
        place = workload.grid.coordinates(rank)
        memory = place_memory(workload, place["pp"], place["tp"]).memory
        # The plan counts a rank's rotations of positions once for each chunk in flight, as the
        # chunks keep them.
        assert memory.activations + memory.loss == result, rank


@pytest.mark.parametrize("pp, vpp, factor", [(4, 2, 1.375), (8, 4, 1.21875), (8, 2, 1.4375)])
def test_interleaving_has_the_published_factor_of_activations_in_flight(
    pp: int, vpp: int, factor: float
) -> None:
    """1 + (p - 1)/(p v) times those of p microbatches. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, sec. 4."""
    plain = {
        "parallel.pp": str(pp),
        "model.num_layers": str(pp * vpp),
        "train.micro_batch_size": "1",
    }
    plain |= {"train.global_batch_size": "24"}
    one, more = (
        place_memory(plan_workload(tiny_run(plain | {"parallel.pipeline.vpp": str(v)}), pp), 0, 0)
        for v in (1, vpp)
    )
    assert one.in_flight == pp
    assert more.in_flight / vpp == pp * factor


def test_tensors_shrink_with_the_axes_that_shard_them() -> None:
    base = {"train.micro_batch_size": "2", "model.num_kv_heads": "4"}
    sizes = {
        name: worst(memory_ledger(plan_workload(tiny_run(base | settings), world))).memory
        for name, world, settings in (
            ("one", 1, {}),
            ("tp", 2, {"parallel.tp": "2"}),
            ("sp", 2, {"parallel.tp": "2", "parallel.sp": "true"}),
            ("full", 1, {"recompute.granularity": "full"}),
            ("cp", 2, {"parallel.cp": "2"}),
        )
    }
    assert sizes["one"].activations > sizes["tp"].activations > sizes["sp"].activations
    assert sizes["full"].activations < sizes["one"].activations / 3
    assert sizes["cp"].activations < sizes["one"].activations


def test_recomputed_activations_exist_temporarily() -> None:
    plain, full, pairs = (
        chunk_activations(
            plan_workload(tiny_run(settings), 1), single_stage(2), 0, accelerator=False
        )
        for settings in (
            {},
            {"recompute.granularity": "full"},
            {"recompute.granularity": "full", "recompute.num_layers": "2"},
        )
    )
    assert plain.recompute_nbytes == 0
    # A layer keeps its input, which is there already, and the rest; two layers keep one input less
    # between them.
    assert full.recompute_nbytes > 0.8 * (plain.layers - full.layers) / 2
    assert pairs.recompute_nbytes > 1.8 * full.recompute_nbytes


def test_dual_batch_overlap_needs_the_memory_of_both_microbatches() -> None:
    settings = EXPERTS | {
        "parallel.ep": "2",
        "train.global_batch_size": "16",
        "recompute.granularity": "full",
    }
    plain, paired = (
        plan_workload(tiny_run(settings | {"parallel.overlap_experts": value}), 2)
        for value in ("false", "true")
    )
    stage = paired.chunks(0)[0]
    recompute_nbytes = chunk_activations(paired, stage, 0, accelerator=False).recompute_nbytes
    forward, backward = (working_bytes(paired, stage, 0, kind) for kind in ("F", "B"))
    assert place_memory(plain, 0, 0).memory.working == max(forward, backward + recompute_nbytes)
    assert place_memory(paired, 0, 0).memory.working == forward + backward + recompute_nbytes


def test_offloaded_activations_are_counted_in_host_memory() -> None:
    away = {
        "offload.layers": "2",
        "offload.min_numel": "1",
        "model.num_layers": "3",
        "train.micro_batch_size": "1",
    }
    plain, offloaded = (
        place_memory(
            plan_workload(tiny_run(settings | {"parallel.pp": "2", "model.num_layers": "6"}), 2),
            0,
            0,
        )
        for settings in ({"train.micro_batch_size": "1"}, away)
    )
    assert plain.host == 0 and plain.in_flight == 2
    assert offloaded.host > 0
    assert plain.memory.activations - offloaded.memory.activations == offloaded.host
    assert offloaded.host / plain.memory.activations == pytest.approx(2 / 3, rel=0.1), (
        "two of three layers"
    )


def test_device_overhead_is_listed_separately() -> None:
    workload = plan_workload(resolve("llama3_70b"), 16)
    plain, h100 = (memory_ledger(workload, device)[0].memory for device in (None, DEVICES["h100"]))
    assert plain.library == plain.slack == 0 and h100.library > 0.6 * GIB
    assert h100.slack == int(0.04 * (h100.total - h100.library - h100.slack))
    cpu = device_named("cpu", world=16, host_memory=64 * GIB)
    assert memory_ledger(workload, cpu)[0].memory.library == 0


def test_positions_with_unequal_shares_are_listed_separately() -> None:
    workload = plan_workload(tiny_run({"parallel.tp": "3"} | UNEVEN), 3)
    assert distinct_places(workload) == [(0, 0), (0, 1), (0, 2)]
    assert worst(memory_ledger(workload)).tp_rank == 0
    even = replace(workload, run=tiny_run({"parallel.tp": "2"}))
    assert len(distinct_places(even)) <= 2


def test_gradient_reductions_in_flight_match_the_engine() -> None:
    assert memory.IN_FLIGHT == SUMS_IN_FLIGHT


@pytest.mark.parametrize("kind", ["F", "B"])
def test_layer_that_gathers_keys_needs_memory_for_them(
    kind: Literal["F", "B"],
) -> None:
    cut = {"parallel.cp": "2", "model.num_layers": "2"}
    settings = {
        "all": {"parallel.context.kind": "gather"},
        "one": {"parallel.context.kind": "a2a", "parallel.context.layers": "[a2a, gather]"},
        "none": {"parallel.context.kind": "a2a"},
    }
    needed = {}
    for name, context in settings.items():
        workload = plan_workload(tiny_run(cut | context), 2)
        stage = replace(workload.stages[0], loss=False)
        needed[name] = working_bytes(workload, stage, 0, kind)
    assert needed["one"] == needed["all"] > needed["none"]

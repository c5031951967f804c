"""Tests of megalith/estimate/matrices.py: shapes, parts, assigned ranks and bytes are those of the
run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megalith.config.optim import MuonConfig, OptimConfig
from megalith.estimate.matrices import (
    count_state_numels,
    held_box,
    list_whole_parameters,
    matrix_rule_rows,
    message_width,
    parameter_shape,
    plan_stage_matrices,
    update_nbytes,
)
from megalith.estimate.memory import memory_ledger
from megalith.estimate.times import step_traffic
from megalith.estimate.workload import Workload, plan_workload
from megalith.models.decoder import build_chunks, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.optim import assigned_ranks
from megalith.optim.assigned_ranks import AssignedMatrices
from megalith.optim.optimizer import RuleOptimizer
from megalith.parallel.mesh import build_mesh, build_meta_mesh
from megalith.plan.assigned_ranks import AssignedRanksPlan
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import ExpertPart
from megalith.plan.update_rules import is_hidden_matrix
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import parse_row

CPU = torch.device("cpu")


def workload_of(words: str) -> Workload:
    row = parse_row("matrices", words, words)
    return plan_workload(row.case().run, row.world)


@pytest.mark.parametrize(
    "words",
    ["shared tp4", "uneven tp4", "latent tp3", "heterogeneous tp2 pp2", "narrow dp4 ep2 etp2"],
)
def test_shapes_and_boxes_are_those_of_the_models_shards(words: str) -> None:
    workload = workload_of(words)
    model, parallel = workload.run.model, workload.run.parallel
    for rank in workload.grid.ranks:
        mesh = build_meta_mesh(workload.grid, rank=rank)
        chunks = build_chunks(build_context(model, mesh, parallel, dtype=torch.float32))
        shards = {
            one.shard.name: one.shard for one, *_ in iter_parameter_specs(nn.ModuleList(chunks))
        }
        at = workload.grid.coordinates(rank)
        experts = workload.expert_part(at["pp"], at["tp"])
        if workload.grid.experts is not None:
            experts = ExpertPart(experts.ep, experts.etp, at["etp"])
        local = {one.name: one for one in workload.parameters(at["pp"], at["tp"], experts=experts)}
        for one in list_whole_parameters(workload, at["pp"]):
            if not is_hidden_matrix(one.name, int(one.matrix)):
                continue
            shard = shards[one.name]
            shape, inputs = parameter_shape(model, one)
            assert (shape, inputs) == (shard.shape, shard.inputs), one.name
            box = held_box(
                model,
                local[one.name],
                shape,
                tp=parallel.tp,
                tp_rank=at["tp"],
                ep_rank=at.get("ep", 0),
                experts=experts,
            )
            assert box == shard.box, f"{one.name}, rank {rank}"


def _train(rank: int, world: int, words: str) -> tuple[AssignedRanksPlan, int]:
    """Return the plan of a run, and the elements that this rank sends in an update."""
    run = parse_row("matrices", words, words).case().run
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, CPU)
    optimizer = trainer.optimizer
    assert isinstance(optimizer, RuleOptimizer)
    (updater,) = optimizer._updaters.values()
    assert isinstance(updater, AssignedMatrices)
    sent: list[int] = []

    def start(
        original: Any, message: torch.Tensor, send: Sequence[int], *rest: Any, **options: Any
    ) -> Any:  # Any: as of the original
        sent.append(sum(send))
        return original(message, send, *rest, **options)

    original = assigned_ranks.start_uneven_all_to_all
    with patched(
        assigned_ranks,
        "start_uneven_all_to_all",
        lambda *arguments, **options: start(original, *arguments, **options),
    ):
        gradients = [torch.ones_like(slot.master) for slot in optimizer.slots]
        optimizer.step(gradients, lr=0.1, weight_decay=0.0)
    return updater.matrices.plan, sum(sent)


@pytest.mark.parametrize(
    "words",
    [
        "shared tp4 muon",
        pytest.param("latent tp3 dp2 zero1 muon", marks=pytest.mark.slow),
        pytest.param("narrow dp4 ep2 etp2 zero2 muon rows=1", marks=pytest.mark.slow),
        pytest.param("four tied tp2 pp2 muon by-heads", marks=pytest.mark.slow),
        pytest.param("uneven cp2 dp2 zero3 soap rows=1", marks=pytest.mark.slow),
        pytest.param("tiny dp4 replicate=2 zero1 muon", marks=pytest.mark.slow),
        pytest.param(
            "tiny tp2 dp2 zero2 muon parallel.bucket_alignment=matrices", marks=pytest.mark.slow
        ),
    ],
)
def test_assigned_ranks_and_sent_elements_are_those_of_the_run(words: str) -> None:
    workload = workload_of(words)
    (rule,) = {workload.run.optim.kind}
    for rank, (plan, num_sent) in enumerate(run_ranks(_train, workload.world, words)):
        stage = workload.grid.coordinates(rank)["pp"]
        expected = plan_stage_matrices(workload, stage, rule)
        assert (plan.matrices, plan.ranks, plan.waves) == (
            expected.matrices,
            expected.ranks,
            expected.waves,
        )
        group_rank = workload.grid.find_group(rank, ("dp", "cp", "tp")).index(rank)
        assert num_sent == expected.sent_numels[group_rank]


def test_buckets_aligned_to_matrices_leave_messages_between_tensor_parallel_ranks_only() -> None:
    """Each rank of dp has whole matrices, or the tp pieces of whole ones."""
    words = "tiny dp2 zero1 muon parallel.bucket_alignment=matrices"
    alone, with_tp = workload_of(words), workload_of(f"{words} tp2")
    assert set(plan_stage_matrices(alone, 0, "muon").sent_numels) == {0}
    plan = plan_stage_matrices(with_tp, 0, "muon")
    for matrix, of_matrix in zip(plan.matrices, plan.replicas, strict=True):
        ranks = [rank for replicas in of_matrix for rank in replicas.ranks]
        assert ranks in ([0, 1], [2, 3]), matrix.parameter
    assert sum(plan.sent_numels) == sum(matrix.numel for matrix in plan.matrices)


def test_step_traffic_has_a_row_for_the_exchange_with_assigned_ranks() -> None:
    workload = workload_of("tiny tp2 dp2 zero1 muon")
    plan = plan_stage_matrices(workload, 0, "muon")
    (row,) = [row for row in step_traffic(workload, 0, 0) if row.kind == "all_to_all"]
    assert (row.axis, row.ranks, row.calls) == ("dp_tp", 4, 2 * plan.num_waves)
    assert row.nbytes == 8 * max(plan.sent_numels)
    assert row.behind == "Newton-Schulz steps"
    alone = workload_of("tiny muon")
    assert [row for row in step_traffic(alone, 0, 0) if row.kind == "all_to_all"] == []


def test_messages_have_the_dtype_of_the_rule() -> None:
    run = workload_of("tiny muon").run
    bf16 = replace(run, precision=replace(run.precision, params="bf16"))
    wide = replace(bf16, optim=OptimConfig(kind="muon", muon=MuonConfig(dtype="fp32")))
    assert [message_width(each, "muon") for each in (run, bf16, wide)] == [8, 2, 4]
    assert message_width(bf16, "soap") == 4


def test_newton_schulz_share_is_that_of_all_matrices() -> None:
    workload = workload_of("tiny muon")
    (row,) = matrix_rule_rows(workload)
    costs = sum(one.cost for one in plan_stage_matrices(workload, 0, "muon").matrices)
    assert row.matrices == 14 and row.fewest == row.most == 14 and row.ranks == 1
    # 144 tokens per step, far fewer than in a real run
    assert row.flops_share == pytest.approx(5 * costs / (6 * 144 * 9400), rel=0.2)


def test_ledger_counts_states_of_whole_matrices_and_the_exchange() -> None:
    plain, adamuon, soap = (
        workload_of(f"tiny dp2 {words}") for words in ("muon", "adamuon", "soap")
    )
    moments = [memory_ledger(each)[0].memory.moments for each in (plain, adamuon, soap)]
    states = [
        max(count_state_numels(each.run, rule, plan_stage_matrices(each, 0, rule)))
        for each, rule in ((adamuon, "muon"), (soap, "soap"))
    ]
    assert moments[1] - moments[0] == 8 * states[0]
    numels = [one.numel for one in plan_stage_matrices(plain, 0, "muon").matrices]
    assert moments[2] == moments[0] - 8 * sum(numels) + 8 * states[1]
    assert update_nbytes(plain, 0) > 0 and update_nbytes(workload_of("tiny dp2"), 0) == 0

"""Tests of megalith/estimate/workload.py."""

import pytest
from torch import nn

from megalith.errors import PlanError
from megalith.estimate.workload import plan_workload
from megalith.models.decoder import build_chunks, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.context import Slicing, plan_slices
from megalith.testing.tiny import tiny_run


def test_tokens_and_microbatches_of_a_rank() -> None:
    run = tiny_run({"parallel.cp": "2", "train.micro_batch_size": "1"})
    workload = plan_workload(run, 6)
    assert (workload.dp, workload.tokens, workload.num_microbatches) == (3, 6, 4)
    assert workload.shards == 1
    sharded = plan_workload(
        tiny_run({"parallel.cp": "2", "train.micro_batch_size": "1", "parallel.zero": "1"}), 6
    )
    assert sharded.shards == 6


@pytest.mark.parametrize(
    ("settings", "multiple", "row"),
    [
        ({"parallel.cp": "2", "parallel.context.slicing": "document"}, 4, 12),
        ({"parallel.cp": "2", "parallel.context.slicing": "document", "parallel.tp": "3"}, 4, 12),
        (
            {
                "parallel.cp": "2",
                "parallel.context.slicing": "document",
                "parallel.tp": "2",
                "parallel.sp": "true",
            },
            8,
            16,
        ),
        ({"parallel.context.slicing": "document"}, 1, 11),
        ({"parallel.cp": "2"}, 1, 11),
    ],
)
def test_padding_of_documents_is_work_for_every_rank(
    settings: dict[str, str], multiple: int, row: int
) -> None:
    run = tiny_run({"train.seq_len": "11", "train.global_batch_size": "24"} | settings)
    workload = plan_workload(run, 12)
    assert (workload.document_multiple, workload.row_tokens) == (multiple, row)
    assert workload.tokens == 2 * row // run.parallel.cp
    slices = plan_slices(
        [11, 11],
        row=11,
        slicing=Slicing(ranks=2, by="document", multiple=run.parallel.tp if run.parallel.sp else 1),
    )
    assert multiple == 1 or slices.num_tokens == workload.tokens * 2


def test_replicas_divide_among_fewer_ranks() -> None:
    run = tiny_run(
        {"parallel.zero": "2", "parallel.dp_replicate": "3", "train.micro_batch_size": "1"}
    )
    assert plan_workload(run, 6).shards == 2


def test_a_tied_table_is_held_once_by_a_rank_that_has_both_ends() -> None:
    tied = {"model.tied_embeddings": "true", "parallel.pp": "2", "model.num_layers": "8"}
    loop = plan_workload(tiny_run(tied), 2)
    assert loop.table_stages == (0, 1)
    assert [one.name for rank in (0, 1) for one in loop.parameters(rank, 0)].count(
        "embed.weight"
    ) == 2
    v = plan_workload(
        tiny_run(tied | {"parallel.pipeline.schedule": "zb-v", "parallel.pipeline.vpp": "2"}), 2
    )
    assert v.table_stages == (0,)
    assert [one.name for one in v.parameters(0, 0)].count("embed.weight") == 1


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_mtp_layers_share_the_embedding_table_as_in_the_model(tied: str, schedule: str) -> None:
    settings = {
        "model.mtp.num_layers": "2",
        "model.tied_embeddings": tied,
        "parallel.pp": "2",
        "model.num_layers": "4",
    }
    chunks = {
        "parallel.pipeline.schedule": schedule,
        "parallel.pipeline.vpp": "2" if schedule == "zb-v" else "1",
    }
    run = tiny_run(settings | chunks)
    workload = plan_workload(run, 2)
    for rank in range(2):
        built = nn.ModuleList(
            build_chunks(
                build_context(run.model, build_meta_mesh(workload.grid, rank=rank), run.parallel)
            )
        )
        real = [
            (d.shard.name, getattr(module, name).numel())
            for d, module, name in iter_parameter_specs(built)
        ]
        assert sorted(real) == sorted((one.name, one.numel) for one in workload.parameters(rank, 0))
        assert ("embed.weight" in dict(real)) == (rank in workload.table_stages)


def test_the_first_rank_at_a_place() -> None:
    workload = plan_workload(tiny_run({"parallel.tp": "2", "parallel.pp": "2"}), 8)
    assert [workload.rank_at(pp, tp) for pp in (0, 1) for tp in (0, 1)] == [0, 1, 4, 5]


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "zb-v"])
def test_pipeline_settings_have_no_effect_on_one_rank(schedule: str) -> None:
    run = tiny_run({"parallel.pipeline.schedule": schedule, "parallel.pipeline.group": "7"})
    assert plan_workload(run, 1).schedule == plan_workload(tiny_run({}), 1).schedule


def test_a_run_that_cannot_be_laid_out_is_rejected() -> None:
    with pytest.raises(PlanError):
        plan_workload(tiny_run({"parallel.tp": "4"}), 6)


def test_packs_are_counted_as_full_of_the_longest_documents() -> None:
    packed = {
        "train.micro_batch_size": "1",
        "train.seq_len": "11",
        "train.tokens_per_microbatch": "20",
    }
    by_document = {"parallel.cp": "2", "parallel.context.slicing": "document"}
    workload = plan_workload(tiny_run(packed | by_document), 4)
    assert (workload.row_tokens, workload.lengths, workload.tokens) == (12, (12, 12, 12, 4), 20)
    assert workload.num_microbatches == 2, "twelve documents, three in a pack, on two ranks"
    interleaved = {"parallel.pp": "4", "parallel.pipeline.vpp": "2", "model.num_layers": "8"}
    assert plan_workload(tiny_run(packed | interleaved), 8).num_microbatches == 8, (
        "as many as the pipeline wants"
    )

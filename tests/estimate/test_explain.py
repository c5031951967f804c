"""Tests of megalith/estimate/explain.py."""

from dataclasses import replace

import pytest

from megalith.config.model import MLAConfig, MTPConfig
from megalith.config.tree import apply_overrides
from megalith.estimate.explain import explain, group_rows, kind_text, layers_text, ranks_text
from megalith.estimate.workload import Workload, plan_workload
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.costs import num_parameters
from megalith.recipes import resolve
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import VARIANTS


def big() -> Workload:
    """The published 405B layout with rows shared by 4 ranks."""
    return plan_workload(apply_overrides(resolve("llama3_405b"), {"parallel.cp": "4"}), 16_384)


def test_both_grids_multiply_to_the_world() -> None:
    layout = explain(big())
    assert [(row.axis, row.size, row.stride) for row in layout.dense] == [
        ("tp", 8, 1),
        ("cp", 4, 8),
        ("dp", 32, 32),
        ("pp", 16, 1024),
    ]
    assert [(row.axis, row.size, row.stride) for row in layout.expert] == [
        ("etp", 8, 1),
        ("ep", 1, 8),
        ("edp", 128, 8),
        ("pp", 16, 1024),
    ]
    assert layout.parameters == 405_853_388_800


def test_experts_have_a_grid_of_their_own_over_the_same_ranks() -> None:
    layout = explain(plan_workload(resolve("deepseek_v3"), 2048))
    assert [(row.axis, row.size, row.stride) for row in layout.expert] == [
        ("etp", 1, 1),
        ("ep", 64, 1),
        ("edp", 2, 64),
        ("pp", 16, 128),
    ]
    groups = {row.axes: row for row in layout.groups}
    assert groups["ep"].examples[0] == "0-63" and groups["edp"].examples[0] == "0, 64"
    assert "8 of 256 experts of 2048 features in 58 of 61 layers" in layout.kind
    e = layout.experts
    assert e is not None and (e.layers, e.experts_here) == (59, 4)
    assert e.parameters == 4 * 4 * 3 * 7168 * 2048, "four layers of four experts"
    assert e.state == e.parameters * (6 + 12 // 2)
    assert e.exchanged == 4096 * 8 * 63 // 64 * 7168 * 2
    assert (e.rows, e.crowded_rows) == (4096 * 8, 4096 * 64 * 4)
    run = resolve("deepseek_v3")
    gathers = replace(run, parallel=replace(run.parallel, dispatcher="allgather"))
    other = explain(plan_workload(gathers, 2048)).experts
    assert (
        other is not None
        and (other.exchanged, other.gathered) == (0, 4096 * 63 * 7168 * 2)
        and e.gathered == 0
    )


def test_expert_groups_are_listed() -> None:
    settings = {
        "model.moe.num_experts": "4",
        "model.moe.ffn_hidden_size": "8",
        "train.micro_batch_size": "1",
    }
    run = tiny_run(
        settings
        | {"parallel.tp": "2", "parallel.sp": "true", "parallel.ep": "2", "parallel.pp": "2"}
    )
    rows = {row.axes: row.examples for row in group_rows(plan_workload(run, 8).grid)}
    assert rows["etp"] == ("0, 1", "2, 3", "4, 5", "6, 7")
    assert rows["ep"] == ("0, 2", "1, 3", "4, 6", "5, 7")
    assert rows["ep · etp"] == ("0-3", "4-7")
    assert explain(plan_workload(tiny_run({}), 1)).experts is None


def test_groups_of_a_small_world_are_all_listed() -> None:
    settings = {
        "parallel.tp": "2",
        "parallel.cp": "2",
        "parallel.pp": "2",
        "train.micro_batch_size": "1",
    }
    rows = {row.axes: row for row in group_rows(plan_workload(tiny_run(settings), 16).grid)}
    assert rows["tp"].examples[:2] == ("0, 1", "2, 3") and rows["tp"].count == 8
    assert rows["cp"].examples[:3] == ("0, 2", "1, 3", "4, 6")
    assert rows["dp"].examples[:2] == ("0, 4", "1, 5")
    assert rows["pp"].examples == tuple(f"{rank}, {rank + 8}" for rank in range(8))
    assert rows["dp · cp"].examples[0] == "0, 2, 4, 6"
    assert "cp_ring" not in rows, "the same ranks as cp"


def test_groups_are_those_that_the_mesh_makes() -> None:
    settings = {
        "parallel.tp": "4",
        "parallel.zero": "1",
        "parallel.dp_replicate": "2",
        "train.micro_batch_size": "1",
    }
    workload = plan_workload(tiny_run(settings), 16)
    mesh = build_meta_mesh(workload.grid, rank=0)
    for row in group_rows(workload.grid):
        group = mesh.over(*row.axes.split(" · "))
        assert ranks_text(group.ranks) == row.examples[0] and group.size == row.size
    names = [row.axes for row in group_rows(workload.grid)]
    assert names == ["tp", "tp_kv", "tp_copy", "dp", "dp_shard · cp", "dp_replica"]


def test_many_groups_are_shortened_to_the_first_two_and_the_last() -> None:
    rows = {row.axes: row for row in explain(big()).groups}
    assert rows["tp"].count == 2048 and rows["tp"].examples == ("0-7", "8-15", "16376-16383")
    assert rows["pp"].examples[0] == "0, 1024 ... 15360"
    assert rows["dp · cp"].size == 128


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"parallel.pp": "2"},
        {"parallel.pipeline.vpp": "2", "parallel.pp": "2", "model.num_layers": "8"},
    ],
)
def test_stages_have_every_parameter_and_all_the_work(settings: dict[str, str]) -> None:
    workload = plan_workload(
        tiny_run({"model.tied_embeddings": "false"} | settings), workload_world(settings)
    )
    stages = explain(workload).stages
    assert sum(row.parameters for row in stages) == num_parameters(workload.run.model)
    assert sum(row.flops_share for row in stages) == pytest.approx(1)
    assert stages[0].embedding and stages[-1].loss
    assert [(row.pp_rank, row.chunk) for row in stages] == [
        workload.schedule.rank_and_chunk(n) for n in range(len(stages))
    ]


def workload_world(settings: dict[str, str]) -> int:
    return int(settings.get("parallel.pp", "1"))


def test_mtp_and_loss_stages_are_listed_separately() -> None:
    own = {"model.mtp.num_layers": "2", "parallel.pp": "4", "model.num_layers": "2"}
    last = explain(
        plan_workload(tiny_run(own | {"parallel.pipeline.layout": "E|t|t|mmL"}), 4)
    ).stages
    apart = explain(
        plan_workload(tiny_run(own | {"parallel.pipeline.layout": "E|tt|mm|L"}), 4)
    ).stages
    assert [row.num_mtp_layers for row in last] == [0, 0, 0, 2] and [
        row.num_mtp_layers for row in apart
    ] == [
        0,
        0,
        2,
        0,
    ]
    assert sum(row.flops_share for row in apart) == pytest.approx(1)
    assert apart[2].flops_share + apart[3].flops_share == pytest.approx(last[3].flops_share)
    assert apart[2].flops_share > apart[1].flops_share, (
        "of two layers, without a multi-token prediction's own products"
    )


def test_the_405b_stages_are_the_published_ones() -> None:
    stages = explain(big()).stages
    assert [row.layers for row in stages[:2]] == ["0", "1-2"] and stages[-1].layers == "125"
    assert len(stages) == 64 and {(row.pp_rank, row.chunk) for row in stages[:17]} >= {
        (0, 0),
        (15, 0),
        (0, 1),
    }


def test_unequal_shares_have_separate_rows_and_equal_ones_one() -> None:
    (even,) = explain(big()).parts
    assert (even.tp_ranks, even.heads, even.kv_heads, even.vocab) == ("0-7", 16, 1, 128_256 // 8)
    uneven = {
        "parallel.tp": "3",
        "model.num_heads": "8",
        "model.num_kv_heads": "4",
        "model.hidden_size": "48",
    }
    parts = explain(plan_workload(tiny_run(uneven), 3)).parts
    assert [part.heads for part in parts] == [4, 2, 2]
    shared = explain(plan_workload(tiny_run({"parallel.tp": "4"}), 4)).parts[0]
    assert shared.kv_copies == 2


def test_the_rhythm_of_a_step() -> None:
    rhythm = explain(big()).rhythm
    assert rhythm.tokens_per_step == 16_777_216 and rhythm.microbatches == 64
    assert rhythm.tokens_per_microbatch == 2048
    assert rhythm.bubble == pytest.approx(15 / (4 * 64)), (
        "(p - 1)/(v m), arXiv:2104.04473, section 2.2"
    )
    assert rhythm.tokens_in_flight == (2 * 15 + 3 * 16 + 1) * 2048


def test_numbers_in_words() -> None:
    assert ranks_text([0, 1]) == "0, 1" and ranks_text([2, 3, 4]) == "2-4"
    assert ranks_text([0, 4, 8]) == "0, 4, 8" and ranks_text([0, 4, 8, 12, 16]) == "0, 4 ... 16"
    assert ranks_text([0, 1, 4, 5, 8, 9, 12, 13, 16]) == "0, 1, 4, 5 ... 16"
    assert (layers_text(range(0)), layers_text(range(2, 3)), layers_text(range(2, 5))) == (
        "none",
        "2",
        "2-4",
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "normed around",
            "window of 5 tokens in 2 of 4 layers, QK norm (head), softcap",
        ),
        (
            "parallel",
            "parallel, LayerNorm before, 6 heads on 2 KV heads of 6 features, rope of 2 "
            "features, gelu",
        ),
        ("one norm", "parallel with one norm, LayerNorm before"),
        ("learned positions", "learned positions, gelu_tanh, dropout"),
        ("sinks", "window of 4 tokens in 2 of 4 layers, sinks, rope yarn, gated quick_gelu"),
        (
            "heterogeneous",
            "attention replaced by one matrix in 1 of 4 layers, attention left out in 1 of 4 "
            "layers, "
            "MLP replaced by one matrix in 1 of 4 layers, 4 to 8 KV heads, 9 to 22 "
            "features in the MLP",
        ),
        ("cross-layer", "gated silu, cross-layer attention to layer 1 in 2 of 4 layers"),
        ("gated", "QK norm (l2), gated attention, rope but in 2 of 4 layers"),
    ],
)
def test_kind_text_describes_the_layers(name: str, words: str) -> None:
    assert words in kind_text(VARIANTS[name])


def test_kind_text_describes_mla_and_mtp() -> None:
    model = replace(
        VARIANTS["sinks"],
        mla=MLAConfig(kv_rank=8, nope_dim=6, rope_dim=4),
        mtp=MTPConfig(num_layers=2),
    )
    text = kind_text(model)
    assert "6 latent heads of 6 + 4 features from 8" in text and "2 MTP layers" in text


def test_windowed_layers_have_less_of_the_work() -> None:
    changes = {
        "model.attention.window": "4",
        "model.attention.window_layers": "[true, false]",
        "parallel.pp": "2",
    }
    first, last = explain(plan_workload(tiny_run(changes | {"model.num_layers": "2"}), 2)).stages
    assert (
        first.flops_share < last.flops_share
        and first.flops_share + last.flops_share == pytest.approx(1)
    )


def test_trained_parameters_are_all_or_the_adapters() -> None:
    plain = explain(plan_workload(tiny_run({"parallel.tp": "2"}), 2))
    assert plain.trained == plain.parameters
    few = {"lora.rank": "2", "lora.targets": "[down]", "checkpoint.load": "base"}
    adapted = explain(plan_workload(tiny_run(few | {"parallel.tp": "2", "parallel.pp": "2"}), 4))
    assert adapted.trained == 2 * 2 * (24 + 20) and adapted.parameters == plain.parameters
    assert [row.trained for row in adapted.stages] == [2 * (24 + 20)] * 2
    assert sum(row.flops_share for row in adapted.stages) == pytest.approx(1.0)


@pytest.mark.parametrize("tied", ["true", "false"])
def test_trained_parameter_count_does_not_depend_on_stages_with_a_tied_table(
    tied: str,
) -> None:
    chosen = {
        "model.num_layers": "4",
        "model.mtp.num_layers": "1",
        "model.tied_embeddings": tied,
        "optim.frozen": "[layers.0.*]",
        "train.global_batch_size": "8",
    }
    alone = explain(plan_workload(tiny_run(chosen), 1))
    assert alone.trained == alone.stages[0].trained < alone.parameters
    for layout in ("Ett|tt||mL", "E|t*4|m|L"):
        apart = {"parallel.pp": "4", "parallel.pipeline.layout": layout}
        assert explain(plan_workload(tiny_run(chosen | apart), 4)).trained == alone.trained

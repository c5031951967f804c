"""The matrix contains every axis, schedule, kind of context parallelism and their combinations; no
row violates a rule."""

from collections.abc import Iterable
from itertools import product

import pytest

from megalith.config.lora import LoraConfig
from megalith.config.parallel import ContextKind, ParallelConfig, PipelineConfig, ScheduleName
from megalith.errors import ConfigError
from megalith.plan.context import KINDS
from megalith.plan.frozen import first_trained_layer, trained_names
from megalith.plan.schedule import SPLIT_SCHEDULES, V_SCHEDULES, schedule_name
from megalith.plan.stages import plan_stages
from megalith.rules.run import run_problems
from megalith.verify.matrix import (
    MODELS,
    VARIANTS,
    Layout,
    load_matrix,
    matrix_rows,
    parse_parallel,
    parse_row,
    row_length,
)
from megalith.verify.ranks import balances_by_microbatch, balances_over_ranks
from tests.cases import loop_over

MATRIX = load_matrix()
SAMPLE = [row for row in MATRIX if row.sample]


def area(name: str) -> list[Layout]:
    rows = [row for row in MATRIX if row.area == name]
    assert rows, name
    return rows


def kinds(row: Layout) -> set[ContextKind]:
    p = row.parallel
    return {*(p.context.layers or (p.context.kind,))} if p.cp > 1 else set()


def row_schedule(row: Layout) -> ScheduleName | None:
    p = row.parallel
    return schedule_name(p.pipeline) if p.pp * p.pipeline.vpp > 1 else None


def schedules(rows: Iterable[Layout]) -> set[ScheduleName | None]:
    return {row_schedule(row) for row in rows if row.parallel.pp > 1}


def size(row: Layout, axis: str) -> int:
    return getattr(row.parallel, axis) or 1


def test_row_names_are_unique_and_rows_have_at_most_12_processes() -> None:
    assert len({row.name for row in MATRIX}) == len(MATRIX)
    assert {2, 3, 4, 5, 6, 8, 12} <= {row.world for row in MATRIX} <= set(range(1, 13))


@loop_over("row", MATRIX)
def test_no_row_violates_a_rule(row: Layout) -> None:
    assert run_problems(row.case().run, row.world) == []


@pytest.mark.parametrize("rows", [MATRIX, SAMPLE], ids=["all", "sample"])
def test_every_feature_is_in_the_matrix_and_in_its_sample(rows: list[Layout]) -> None:
    layouts = [row.parallel for row in rows]
    assert {row.masks for row in rows} >= {None, "alone"}
    for axis in ("tp", "cp", "pp", "dp"):
        assert {getattr(p, axis) for p in layouts} >= {1, 2, 3}
    assert schedules(rows) >= {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {kind for row in rows for kind in kinds(row)} == {*KINDS}
    assert {p.zero for p in layouts} == {0, 1, 2, 3} and any(p.dp_replicate > 1 for p in layouts)
    assert {p.context.slicing for p in layouts if p.cp > 1} == {"row", "document"}
    assert {p.overlap for p in layouts} == {p.sp for p in layouts} == {True, False}
    assert any(p.order.startswith("dp") for p in layouts)
    assert any(p.tp_comm_overlap for p in layouts) and any(row.documents for row in rows)
    assert any(p.pp > 1 and row.model.tied_embeddings for row, p in zip(rows, layouts))
    assert any(row.model.num_kv_heads < row.parallel.tp for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(row.offload.layers for row in rows)
    assert any(p.pipeline.layout and "||" in p.pipeline.layout for p in layouts)


def features(row: Layout) -> set[str]:
    """Names of the features of a row."""
    p, again = row.parallel, row.recompute
    names: dict[str, object] = {
        "sp": p.sp,
        "documents": row.documents,
        "token budget": row.budget is not None,
        "LoRA": row.lora is not None,
        "MLA": row.model.mla is not None,
        "experts": row.model.moe is not None,
        "tp overlap": p.tp_comm_overlap,
        "MLP in chunks": again.mlp_chunks > 1,
        "offload": row.offload.layers,
        f"recompute {again.granularity}": True,
        f"recompute {again.granularity} {again.method}": again.granularity == "full",
        f"ZeRO {p.zero}": True,
    }
    axes = {axis for axis in ("tp", "cp", "pp", "dp", "ep") if size(row, axis) > 1}
    return (
        {name for name, has in names.items() if has} | axes | kinds(row) | {str(row_schedule(row))}
    )


PIPELINES = ("1f1b", "interleaved", "gpipe", "zb-h1", *V_SCHEDULES)
ZERO = ("ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3")
RECOMPUTE = (
    "recompute full uniform",
    "recompute full block",
    "recompute selective",
    "MLP in chunks",
    "offload",
)
COMBINATIONS = [
    *product(V_SCHEDULES, ("sp", "dp", "documents", "token budget", "LoRA", "experts", *RECOMPUTE)),
    *product(KINDS, (*PIPELINES, "tp", "sp", "pp", "MLA", "experts", "ep", "documents")),
    *product(KINDS, ("dp",), ZERO),
    *product(("MLA", "experts"), PIPELINES),
    *product(("LoRA",), ("experts",), ("tp", "cp", "pp", "dp", "ep", "ZeRO 1", "ZeRO 2", "ZeRO 3")),
    *product(("tp overlap",), (*ZERO, "documents", "token budget", "ep", "cp", "pp")),
]


def test_every_combination_of_features_has_a_row() -> None:
    results = [features(row) for row in MATRIX]
    missing = [names for names in COMBINATIONS if not any({*names} <= each for each in results)]
    assert missing == []


@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_combination_without_a_row_violates_a_rule(schedule: ScheduleName) -> None:
    """Schedules that defer weight gradients have no rows with ZeRO 3."""
    chunks = " vpp2" if schedule in V_SCHEDULES else ""
    row = parse_row("pipeline", schedule, f"four pp2 dp2 {schedule}{chunks} zero3")
    assert not any({schedule, "ZeRO 3"} <= features(each) for each in MATRIX)
    assert any("defers weight gradients" in text for text in run_problems(row.case().run, 4))


def test_matrix_has_layouts_that_the_sample_is_too_small_for() -> None:
    layouts = [row.parallel for row in MATRIX]
    assert any(p.pipeline.first_layers is not None for p in layouts)
    assert any(p.pipeline.count_embedding for p in layouts)
    for three in (("tp", "pp", "dp"), ("tp", "cp", "pp"), ("tp", "cp", "dp"), ("cp", "pp", "dp")):
        assert any(
            all(size(row, axis) > 1 for axis in three) and row.parallel.zero for row in MATRIX
        ), three


def test_sharded_gradients_are_combined_with_schedules_recompute_and_replicas() -> None:
    sharded = [row for row in MATRIX if row.parallel.zero == 2]
    tied = schedules(row for row in sharded if row.model.tied_embeddings)
    assert tied >= {"interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {row.recompute.granularity for row in sharded if row.offload.layers} == {
        "full",
        "selective",
    }
    assert any(p.pp == 1 and p.pipeline.vpp > 1 for p in (row.parallel for row in sharded))
    assert any(
        p.pp > 1 and 1 < p.dp_replicate < (p.dp or 1) for p in (row.parallel for row in MATRIX)
    )


def test_rows_are_sorted_by_number_of_processes() -> None:
    assert [row.world for row in matrix_rows(sample=False)] == sorted(row.world for row in MATRIX)
    assert len(matrix_rows(sample=True)) == len(SAMPLE) < len(MATRIX) / 3


@pytest.mark.parametrize("variant", ["heterogeneous", "gated", "normed after"])
def test_layer_variants_are_combined_with_recomputation_of_documents(variant: str) -> None:
    rows = [row for row in MATRIX if row.model == VARIANTS[variant] and row.documents]
    again = [row for row in rows if row.recompute.granularity != "none"]
    assert len(again) >= 2 and any(row.recompute.granularity == "full" for row in again)
    assert all(any(size(row, axis) > 1 for row in again) for axis in ("tp", "cp", "pp"))


# --- areas


def test_experts_are_combined_with_every_axis_and_every_dispatcher() -> None:
    rows = area("experts")
    layouts = [row.parallel for row in rows]
    assert {p.ep for p in layouts} == {1, 2, 3, 4} and {p.etp for p in layouts} == {None, 1, 2}
    assert {p.dispatcher for p in layouts} == {"alltoall", "allgather", "reference"}
    assert {p.zero for p in layouts} == {0, 1, 2, 3}
    for axis in ("tp", "cp", "pp", "dp"):
        assert any(size(row, axis) > 1 and row.parallel.ep > 1 for row in rows), axis
    assert schedules(rows) == {*PIPELINES}
    assert {row.rows for row in rows} == {1, 2, 3} and any(row.documents for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(p.dp_replicate > 1 for p in layouts) and any(
        p.order.startswith("dp") for p in layouts
    )
    assert any(p.etp not in (None, p.tp) and p.ep == 1 for p in layouts)
    few = [row for row in rows if row.sample]
    assert {row.parallel.dispatcher for row in few} == {"alltoall", "allgather"}
    assert {row.parallel.zero for row in few} >= {0, 1, 2}
    assert all(any(size(row, axis) > 1 for row in few) for axis in ("tp", "cp", "pp", "dp", "etp"))


def test_aux_loss_over_the_global_batch_is_tested_with_dp_and_ep() -> None:
    rows = [
        row for row in area("experts") if balances_over_ranks(row.model) and size(row, "dp") > 1
    ]
    assert {row.parallel.ep for row in rows} == {1, 2} and {row.rows for row in rows} == {1, 2}
    moes = [(row.model.moe, row.documents) for row in rows if row.model.moe]
    assert not any(balances_by_microbatch(moe, documents=documents) for moe, documents in moes)


def test_mla_with_experts_and_mtp_is_tested_under_every_axis() -> None:
    rows = [
        row
        for row in area("experts")
        if row.model.mla and row.model.moe and row.model.mtp.num_layers
    ]
    assert all(any(size(row, axis) > 1 for row in rows) for axis in ("tp", "cp", "pp", "dp", "ep"))
    assert {row.parallel.zero for row in rows} >= {1, 2, 3} and any(row.documents for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(
        row.parallel.overlap_experts and "mla_up_proj" in row.recompute.modules for row in rows
    )
    assert sum(row.sample for row in rows) == 1


def test_sinkhorn_routing_is_combined_with_stages_all_gather_and_top_2() -> None:
    planned = [row for row in area("experts") if row.model.moe and row.model.moe.aux_loss.sinkhorn]
    two = [row for row in planned if row.model.moe and row.model.moe.top_k == 2]
    assert any(size(row, "pp") > 1 and size(row, "tp") > 1 and not row.parallel.etp for row in two)
    assert any(row.parallel.dispatcher == "allgather" for row in two) and len(two) < len(planned)
    assert all(row.model.moe.shared_ffn_hidden_size for row in two if row.model.moe)


def test_attention_masks_are_combined_with_every_axis_and_every_kind_of_cp() -> None:
    rows = area("attention masks")
    assert {row.masks for row in rows} == {"beside", "alone"} and any(row.documents for row in rows)
    for axis in ("tp", "cp", "pp", "dp", "ep"):
        assert any(size(row, axis) > 1 for row in rows), axis
    assert {kind for row in rows for kind in kinds(row)} == {*KINDS}
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert all(row.case().masks == row.masks for row in rows)


def test_frozen_parameters_and_groups_are_combined_with_every_axis_and_zero_level() -> None:
    rows = area("frozen parameters and groups")
    frozen = [row for row in rows if not row.optim.trains_all()]
    groups = [row for row in rows if row.optim.groups]
    for some in (frozen, groups):
        assert {row.parallel.zero for row in some} == {0, 1, 2, 3}
    for axis in ("tp", "cp", "pp", "ep"):
        assert any(size(row, axis) > 1 for row in frozen), axis
    assert any(row.recompute.granularity == "full" for row in frozen)
    assert any(row.model.tied_embeddings and "embed.weight" in row.optim.frozen for row in frozen)
    assert any(row.model.mup for row in groups) and any(row.optim.decayed_vectors for row in groups)
    assert {0, 2, 4} <= {first_trained_layer(row.model, row.optim) for row in rows}
    assert any("head.weight" not in trained_names(row.model, row.optim) for row in rows)


def test_mtp_stages_are_combined_with_every_axis_schedule_and_zero_level() -> None:
    rows = area("mtp stages")
    for row in rows:
        p, num_mtp_layers = row.parallel, row.model.mtp.num_layers
        stages = plan_stages(
            p.pipeline, pp=p.pp, num_layers=row.model.num_layers, depths=num_mtp_layers
        )
        (place,) = (stage for stage in stages if stage.num_mtp_layers)
        assert num_mtp_layers and not (place.loss and place.norm), row.name
    assert {row.parallel.zero for row in rows} == {0, 1, 2, 3}
    assert {row.parallel.sp for row in rows} == {False, True}
    assert all(any(size(row, axis) > 1 for row in rows) for axis in ("tp", "cp", "dp", "ep", "pp"))
    assert {row.parallel.pipeline.schedule for row in rows} == {
        "auto",
        "gpipe",
        "zb-h1",
        "zb-v",
        "dualpipe-v",
    }
    assert [row.world for row in rows if row.sample] == [3]


# --- the rows of matrix.yaml


def test_row_is_parsed_to_settings_and_a_case() -> None:
    row = parse_row(
        "pipeline",
        "some",
        "four num_layers=6 tied tp3 dp2 pp2 vpp3 zb-h1 zero2 rows=2 documents full lora.rank=2"
        " smoothing=0.1 optim.frozen=[*.q,norm.*] layout=E|t*6|L sample",
    )
    p = row.parallel
    assert (p.tp, p.cp, p.pp, p.dp, p.zero, p.pipeline.vpp) == (3, 1, 2, 2, 2, 3)
    assert (p.pipeline.schedule, p.pipeline.layout) == ("zb-h1", "E|t*6|L")
    assert row.model.tied_embeddings and row.model.num_layers == 6 and row.model.num_kv_heads == 2
    assert row.optim.frozen == ("*.q", "norm.*") and row.sample and row.lora == LoraConfig(rank=2)
    case = row.case()
    assert row.world == case.world == 12 and case.run.train.micro_batch_size == 2
    assert case.run.data.document_masking and case.run.recompute.granularity == "full"
    assert case.run.train.label_smoothing == 0.1 and case.run.checkpoint.load == "base"
    plain = parse_row("pipeline", "plain", "four cp2")
    assert plain.world == 2 and plain.case().run.checkpoint.load is None


def test_later_words_take_precedence_and_keep_other_settings() -> None:
    row = parse_row("lora", "some", "tiny tp2 parts modules=[mlp] lora lora.dropout=0.2")
    assert row.recompute.granularity == "selective" and row.recompute.modules == ("mlp",)
    assert row.lora == LoraConfig(rank=3, dropout=0.2)
    assert parse_parallel("tp2 pp2 vpp2 zb-v") == ParallelConfig(
        tp=2, pp=2, dp=1, pipeline=PipelineConfig(vpp=2, schedule="zb-v")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fuor tp2", "some, name: fuor is not a model of the matrix. Did you mean four?"),
        ("four tp2 zbv", "zbv is not a word of matrix.yaml. Did you mean zb-v?"),
        ("four tp2 parallel.ttp=3", "ttp"),
        ("four tpx", "tpx"),
    ],
)
def test_unknown_model_or_word_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.").replace("?", r"\?")):
        parse_row("some", "name", text)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [("", 12), ("tp4 sp", 12), ("cp2", 12), ("cp2 tp2 sp", 16), ("cp4", 16), ("cp3 tp2", 12)],
)
def test_rows_are_long_enough_for_context_parallel_slices(words: str, tokens: int) -> None:
    parallel = parse_parallel(words)
    assert row_length(parallel) == tokens
    parts = 2 * parallel.cp * (parallel.tp if parallel.sp else 1)
    assert tokens % parts == 0 or parallel.cp == 1


def test_models_have_the_sizes_that_rows_rely_on() -> None:
    assert MODELS["shared"].num_kv_heads < 4 and MODELS["uneven"].num_heads % 4
    assert MODELS["biased"].mlp_bias and MODELS["four"].num_layers == 4
    assert all(any(row.model == model for row in MATRIX) for model in MODELS.values())

"""The matrix has every axis and every kind of it, breaks no rule, and its sample has everything
once."""

import pytest

from megalith.config.parallel import ContextKind, ScheduleName
from megalith.plan.schedule import schedule_name
from megalith.rules.run import run_problems
from megalith.verify.matrix import MATRIX, matrix_rows
from megalith.verify.rows import Layout
from megalith.verify.tiny_models import VARIANTS
from tests.cases import loop_over

SAMPLE = [row for row in MATRIX if row.sample]


def kinds(row: Layout) -> set[ContextKind]:
    p = row.parallel
    return {*(p.context.layers or (p.context.kind,))} if p.cp > 1 else set()


def test_every_row_has_a_name_of_its_own_and_few_processes() -> None:
    assert len({(row.area, row.name) for row in MATRIX}) == len(MATRIX)
    assert len({row.name for row in MATRIX}) == len(MATRIX)
    assert all(1 <= row.world <= 12 for row in MATRIX)
    assert {row.world for row in MATRIX} >= {2, 3, 4, 5, 6, 8, 12}


@loop_over("row", MATRIX)
def test_no_row_breaks_a_rule(row: Layout) -> None:
    assert run_problems(row.case().run, row.world) == []


@pytest.mark.parametrize("rows", [MATRIX, SAMPLE], ids=["all", "sample"])
def test_everything_is_in_it_and_in_its_sample(rows: list[Layout]) -> None:
    layouts = [row.parallel for row in rows]
    assert {row.masks for row in rows} >= {None, "alone"}
    for axis in ("tp", "cp", "pp", "dp"):
        assert {getattr(p, axis) for p in layouts} >= {1, 2, 3}
    schedules: set[ScheduleName] = {schedule_name(p.pipeline) for p in layouts if p.pp > 1}
    assert schedules >= {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {kind for row in rows for kind in kinds(row)} == {"ring", "gather", "a2a", "a2a+ring"}
    assert {p.zero for p in layouts} == {0, 1, 2, 3} and any(p.dp_replicate > 1 for p in layouts)
    assert {p.context.slicing for p in layouts if p.cp > 1} == {"row", "document"}
    assert {p.overlap for p in layouts} == {True, False} and any(
        p.order.startswith("dp") for p in layouts
    )
    assert (
        any(p.sp for p in layouts)
        and any(p.tp_comm_overlap for p in layouts)
        and any(row.documents for row in rows)
    )
    assert any(p.pp > 1 and row.model.tied_embeddings for row, p in zip(rows, layouts, strict=True))
    assert any(row.model.num_kv_heads < row.parallel.tp for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(row.offload.layers for row in rows)
    assert any(p.pipeline.layout and "||" in p.pipeline.layout for p in layouts)


def test_the_whole_matrix_has_what_the_sample_is_too_small_for() -> None:
    layouts = [row.parallel for row in MATRIX]
    assert any(p.pipeline.schedule == "gpipe" for p in layouts)
    assert any(p.pipeline.first_layers is not None for p in layouts)
    assert any(p.pipeline.count_embedding for p in layouts)
    for three in (("tp", "pp", "dp"), ("tp", "cp", "pp"), ("tp", "cp", "dp"), ("cp", "pp", "dp")):
        assert any(
            all((getattr(p, axis) or 1) > 1 for axis in three) and p.zero for p in layouts
        ), three


def test_what_divides_gradients_meets_what_delays_repeats_or_moves_them() -> None:
    divided = [row for row in MATRIX if row.parallel.zero == 2]
    tied = {schedule_name(row.parallel.pipeline) for row in divided if row.model.tied_embeddings}
    assert tied >= {"interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {row.recompute.granularity for row in divided if row.offload.layers} == {
        "full",
        "selective",
    }
    assert any(p.pp == 1 and p.pipeline.vpp > 1 for p in (row.parallel for row in divided))
    assert any(
        p.pp > 1 and 1 < p.dp_replicate < (p.dp or 1) for p in (row.parallel for row in MATRIX)
    )


def test_rows_come_in_the_order_of_their_processes() -> None:
    assert [row.world for row in matrix_rows(sample=False)] == sorted(row.world for row in MATRIX)
    assert len(matrix_rows(sample=True)) == len(SAMPLE) < len(MATRIX) / 3


@pytest.mark.parametrize("variant", ["heterogeneous", "gated", "normed after"])
def test_kinds_of_layers_meet_documents_that_run_again(variant: str) -> None:
    rows = [row for row in MATRIX if row.model == VARIANTS[variant] and row.documents]
    again = [row for row in rows if row.recompute.granularity != "none"]
    assert len(again) >= 2 and any(row.recompute.granularity == "full" for row in again)
    assert all(any(getattr(row.parallel, axis) > 1 for row in again) for axis in ("tp", "cp", "pp"))

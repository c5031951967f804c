"""Rows of chosen parameters have every way to divide state and every part of a model frozen, and
break no rule."""

from megalith.plan.frozen import first_trained_layer, trained_names
from megalith.rules.run import run_problems
from megalith.verify.feature_rows import chosen_parameters
from megalith.verify.matrix import MATRIX

ROWS = list(chosen_parameters())


def test_rows_are_in_the_matrix_and_break_no_rule() -> None:
    assert [row for row in MATRIX if row.area == "chosen parameters"] == ROWS
    assert [text for row in ROWS for text in run_problems(row.case().run, row.world)] == []


def test_every_way_to_divide_meets_frozen_weights_and_groups() -> None:
    frozen = [row for row in ROWS if not row.optim.trains_all()]
    groups = [row for row in ROWS if row.optim.groups]
    assert (
        {row.parallel.zero for row in frozen}
        == {row.parallel.zero for row in groups}
        == {0, 1, 2, 3}
    )
    for axis in ("tp", "cp", "pp", "ep"):
        assert any(getattr(row.parallel, axis) > 1 for row in frozen), axis
    assert any(row.recompute.granularity == "full" for row in frozen)
    assert any(row.model.tied_embeddings and "embed.weight" in row.optim.frozen for row in frozen)
    assert any(row.model.mup for row in groups) and any(row.optim.decayed_vectors for row in groups)


def test_some_rows_freeze_what_comes_first_and_some_what_comes_last() -> None:
    firsts = {first_trained_layer(row.model, row.optim) for row in ROWS}
    assert {0, 2, 4} <= firsts
    assert any("head.weight" not in trained_names(row.model, row.optim) for row in ROWS)

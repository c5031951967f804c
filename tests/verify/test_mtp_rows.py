"""Rows with multi-token predictions elsewhere: under every axis, and never where the last layers
and the loss are both."""

from megalith.plan.stages import plan_stages
from megalith.verify.feature_rows import mtp_stage_rows
from megalith.verify.matrix import MATRIX


def test_no_row_has_mtp_layers_on_a_stage_with_layers_and_loss() -> None:
    rows = list(mtp_stage_rows())
    for row in rows:
        p, depths = row.parallel, row.model.mtp.num_layers
        stages = plan_stages(p.pipeline, pp=p.pp, num_layers=row.model.num_layers, depths=depths)
        (place,) = (stage for stage in stages if stage.num_mtp_layers)
        assert depths and not (place.loss and place.norm), row.name
    assert {row.name for row in rows} <= {row.name for row in MATRIX}


def test_together_they_have_every_axis_every_schedule_and_all_of_zero() -> None:
    layouts = [row.parallel for row in mtp_stage_rows()]
    assert {p.zero for p in layouts} == {0, 1, 2, 3} and {p.sp for p in layouts} == {False, True}
    assert all(
        any(getattr(p, axis) > 1 for p in layouts) for axis in ("tp", "cp", "dp", "ep", "pp")
    )
    assert {p.pipeline.schedule for p in layouts} == {
        "auto",
        "gpipe",
        "zb-h1",
        "zb-v",
        "dualpipe-v",
    }
    assert [row.world for row in mtp_stage_rows() if row.sample] == [3]

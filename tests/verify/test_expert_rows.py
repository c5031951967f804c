"""Rows with experts have every axis, every way to send tokens, latent attention, and plans of all
ranks."""

from megalith.plan.schedule import schedule_name
from megalith.verify.moe_rows import expert_rows
from megalith.verify.ranks import balances_by_microbatch, balances_over_ranks

ROWS = list(expert_rows())


def test_experts_meet_every_axis_and_every_way_to_send_tokens() -> None:
    rows = ROWS
    layouts = [row.parallel for row in rows]
    assert {p.ep for p in layouts} == {1, 2, 3, 4} and {p.etp for p in layouts} == {None, 1, 2}
    assert {p.dispatcher for p in layouts} == {"alltoall", "allgather", "reference"} and {
        p.zero for p in layouts
    } == {
        0,
        1,
        2,
        3,
    }
    for axis in ("tp", "cp", "pp", "dp"):
        assert any((getattr(p, axis) or 1) > 1 and p.ep > 1 for p in layouts), axis
    schedules = {schedule_name(p.pipeline) for p in layouts if p.pp > 1}
    assert schedules == {"1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}
    assert {row.rows for row in rows} == {1, 2, 3} and any(row.documents for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(p.dp_replicate > 1 for p in layouts) and any(
        p.order.startswith("dp") for p in layouts
    )
    assert any(p.etp not in (None, p.tp) and p.ep == 1 for p in layouts), "the original's fault"
    over_ranks = [
        row for row in rows if balances_over_ranks(row.model) and (row.parallel.dp or 1) > 1
    ]
    assert {row.parallel.ep for row in over_ranks} == {1, 2} and {
        row.rows for row in over_ranks
    } == {1, 2}
    mixtures = [(row.model.moe, row.documents) for row in over_ranks if row.model.moe]
    assert not any(balances_by_microbatch(moe, documents=documents) for moe, documents in mixtures)
    few = [row.parallel for row in rows if row.sample]
    assert {p.dispatcher for p in few} == {"alltoall", "allgather"} and {p.zero for p in few} >= {
        0,
        1,
        2,
    }
    assert all(
        any((getattr(p, axis) or 1) > 1 for p in few) for axis in ("tp", "cp", "pp", "dp", "etp")
    )


def test_latent_attention_with_experts_and_mtp_is_tested_under_every_axis() -> None:
    rows = [row for row in ROWS if row.model.mla and row.model.moe and row.model.mtp.num_layers]
    assert all(
        any((getattr(row.parallel, axis) or 1) > 1 for row in rows)
        for axis in ("tp", "cp", "pp", "dp", "ep")
    )
    assert {row.parallel.zero for row in rows} >= {1, 2, 3} and any(row.documents for row in rows)
    assert {row.recompute.granularity for row in rows} == {"none", "full", "selective"}
    assert any(
        row.parallel.overlap_experts and "mla_up_proj" in row.recompute.modules for row in rows
    )
    assert sum(row.sample for row in rows) == 1


def test_plans_of_all_ranks_meet_stages_slices_gathers_and_two_choices() -> None:
    planned = [row for row in ROWS if row.model.moe and row.model.moe.aux_loss.sinkhorn]
    two = [row for row in planned if row.model.moe and row.model.moe.top_k == 2]
    assert any(
        row.parallel.pp > 1 and row.parallel.tp > 1 and row.parallel.etp is None for row in two
    )
    assert any(row.parallel.dispatcher == "allgather" for row in two) and len(two) < len(planned)
    assert all(row.model.moe.shared_ffn_hidden_size for row in two if row.model.moe)

"""Rows that one rank sends are rows that another receives."""

import random

import pytest

from megalith.plan.layers.moe import plan_exchange


@pytest.mark.parametrize(("etp", "ep", "each"), [(1, 1, 3), (1, 3, 2), (2, 2, 1), (3, 2, 4)])
def test_every_sent_row_is_received_and_counted_once(etp: int, ep: int, each: int) -> None:
    draw = random.Random(f"{etp} {ep} {each}")
    table = [
        [[draw.choice([0, 0, 1, 5]) for _ in range(ep * each)] for _ in range(ep)]
        for _ in range(etp)
    ]
    plans = {
        (a, b): plan_exchange(table, etp_rank=a, ep_rank=b) for a in range(etp) for b in range(ep)
    }
    for (a, b), plan in plans.items():
        assert plan.received == tuple(plans[a, source].sent[b] for source in range(ep))
        assert plan.gathered == tuple(sum(plans[other, b].received) for other in range(etp))
        assert sum(plan.chunks) == sum(plan.counts) == sum(plan.gathered)
        local = range(b * each, (b + 1) * each)
        assert plan.counts == tuple(sum(row[e] for rows in table for row in rows) for e in local)
        assert plan.chunks == tuple(row[e] for rows in table for row in rows for e in local)


def test_ranks_without_any_row_have_a_plan() -> None:
    plan = plan_exchange([[[0, 0], [0, 0]]], ep_rank=1, etp_rank=0)
    assert (plan.sent, plan.received, plan.counts) == ((0, 0), (0, 0), (0,))

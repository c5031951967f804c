"""Tests of megalith/plan/layers/moe.py; that real ranks save so much,
tests/estimate/test_activations.py
says."""

from dataclasses import replace

import pytest

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig
from megalith.plan.layers.base import ExpertPart
from megalith.plan.layers.moe import Mixture, mixture_tensors

MOE = MoEConfig(num_experts=12, top_k=3, ffn_hidden_size=10)
MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    moe=MOE,
)
ONE = Mixture(model=MODEL, moe=MOE, tokens=16, sharing=1, experts=ExpertPart(), element=2, wide=4)


def kept(m: Mixture) -> dict[str, int]:
    return {one.what: one.nbytes for one in mixture_tensors(m)}


def test_balanced_experts_have_one_row_per_choice() -> None:
    assert ONE.rows == 48
    assert replace(ONE, experts=ExpertPart(ep=4)).rows == 48, "as many come as go"
    assert replace(ONE, experts=ExpertPart(ep=4, etp=2)).rows == 96, (
        "ranks that share an expert share its rows"
    )


@pytest.mark.parametrize(
    ("ep", "rows"), [(1, 48), (2, 2 * 48), (4, 4 * 48), (6, 6 * 32), (12, 12 * 16)]
)
def test_unbalanced_experts_have_all_possible_rows(ep: int, rows: int) -> None:
    """A token goes to an expert once: a rank with two experts gets two of its three choices."""
    assert replace(ONE, experts=ExpertPart(ep=ep), crowded=True).rows == rows


def test_capacity_bounds_the_rows_of_unbalanced_experts() -> None:
    crowded = replace(ONE, experts=ExpertPart(ep=4), crowded=True)
    limited = replace(crowded, moe=replace(MOE, capacity=CapacityConfig(factor=1.25)))
    assert limited.rows == 4 * 3 * 5, (
        "of each of four microbatches, ceil(1.25 · 16 · 3 / 12) for each of three experts"
    )
    shared = replace(limited, sharing=4)
    assert shared.rows == 3 * 20, "of one microbatch that four ranks share"
    assert (
        replace(limited, moe=replace(MOE, capacity=CapacityConfig(factor=99.0))).rows
        == crowded.rows
    )


def test_padded_experts_have_equally_many_rows_of_every_rank() -> None:
    padded = replace(MOE, capacity=CapacityConfig(factor=1.25, pad=True))
    assert replace(ONE, moe=padded).rows == 12 * 5
    assert replace(ONE, moe=padded, experts=ExpertPart(ep=4, etp=2)).rows == 3 * 5 * 8
    assert replace(ONE, moe=padded, sharing=4).rows == 12 * 16, (
        "all of a rank's tokens, as 20 may be taken of four's"
    )


def test_experts_save_their_inputs_and_up_projections() -> None:
    result = kept(replace(ONE, experts=ExpertPart(ep=4)))
    assert (
        result["rows"] == 48 * 24 * 2
        and result["gate and up"] == 48 * 20 * 2
        and result["weights"] == 48 * 4
    )
    halves = kept(replace(ONE, experts=ExpertPart(etp=2)))
    assert halves["gate and up"] == result["gate and up"], "twice the rows, half of the features"
    assert halves["rows"] == 2 * result["rows"]
    plain = kept(replace(ONE, model=replace(MODEL, gated=False)))
    assert plain["up"] == 48 * 10 * 2 and "gate and up" not in plain


def test_latent_experts_have_fewer_features() -> None:
    result = kept(replace(ONE, moe=replace(MOE, latent_size=6), experts=ExpertPart(ep=4)))
    assert result["rows"] == 48 * 6 * 2 and result["input"] == 16 * 6 * 2


def test_rows_that_no_message_brought_are_gathered_once_more() -> None:
    assert ONE.rows_stay and "rows" not in kept(ONE)
    assert kept(replace(ONE, moe=replace(MOE, latent_size=6)))["tokens of rows"] == 16 * 6 * 2
    assert "rows" in kept(
        replace(ONE, moe=replace(MOE, top_k=1, apply_router_weight_on_input=True))
    )


def test_aux_losses_save_their_inputs() -> None:
    def more(balance: AuxLossConfig) -> int:
        some = replace(ONE, moe=replace(MOE, aux_loss=balance))
        return sum(kept(some).values()) - sum(kept(ONE).values())

    every = 16 * 12 * 4
    assert (
        more(AuxLossConfig(batch_coeff=0.1)) == more(AuxLossConfig(sequence_coeff=0.1)) == 2 * every
    )
    assert more(AuxLossConfig(global_batch_coeff=0.1)) == every + 12 * 4
    assert more(AuxLossConfig(z_loss_coeff=0.1)) == 16 * 4 + 8


def test_allgather_dispatcher_sorts_the_choices_of_all_ranks() -> None:
    exchange, gather = (
        kept(replace(ONE, experts=ExpertPart(ep=4), dispatcher=name))
        for name in ("alltoall", "allgather")
    )
    assert gather["choice of each row"] == 4 * exchange["choice of each row"] == 4 * 48 * 8
    assert gather["rows"] == exchange["rows"]

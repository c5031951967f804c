"""Tests of tests/plan/closed_forms.py: formulas are exactly what the simulation finds, or give
published figures."""

from fractions import Fraction

import pytest

from megalith.config.parallel import ScheduleName
from megalith.plan.schedule import build_schedule, with_transfers
from megalith.plan.simulate import Number, even_costs, peak_activation_memory, simulate
from tests.plan.closed_forms import (
    GptLayer,
    bubble_fraction,
    gpt_attention_again,
    gpt_first_stage_bytes,
    gpt_layer_bytes,
    idle_time,
    peak_in_flight,
)

COSTS: list[tuple[Number, Number, Number]] = [
    (1, 1, 1),
    (2, 3, 1),
    (3, 2, 1),
    (1, 3, 2),
    (1, 1, 3),
    (Fraction(5, 3), Fraction(7, 2), Fraction(1, 6)),
]
NAMES: list[tuple[ScheduleName, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("zb-h1", 1),
    ("zb-v", 2),
    ("dualpipe-v", 2),
]


@pytest.mark.parametrize(("name", "chunks"), NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_and_memory_match_the_formulas_exactly(
    name: ScheduleName, chunks: int, p: int
) -> None:
    compared = 0
    for m in (1, p, 2 * p, 2 * p + 1, 6 * p):
        if name == "interleaved" and m % p:
            continue
        sizes = {"num_ranks": p, "num_chunks": chunks, "num_microbatches": m}
        schedule = with_transfers(
            build_schedule(name, num_ranks=p, num_chunks=chunks, num_microbatches=m)
        )
        for forward, backward_input, backward_weight in COSTS:
            parts = {
                "forward": forward,
                "backward_input": backward_input,
                "backward_weight": backward_weight,
            }
            idle = idle_time(name, num_ranks=p, num_microbatches=m, **parts)
            if idle is not None:
                result = simulate(schedule, even_costs(schedule.num_stages, **parts))
                assert result.idle == (idle,) * p
                compared += 1
        fraction = bubble_fraction(name, **sizes)
        assert fraction is None or fraction == simulate(schedule).bubble
        held = [peak_in_flight(name, rank, **sizes) for rank in range(p)]
        assert None in held or tuple(held) == peak_activation_memory(schedule)
    assert compared >= 3


def test_zb_v_has_no_bubble_after_warmup_with_equal_costs() -> None:
    for p, m in [(2, 3), (4, 8), (5, 9), (6, 30)]:
        result = simulate(build_schedule("zb-v", num_ranks=p, num_chunks=2, num_microbatches=m))
        assert [result.waits(rank)[1] for rank in range(p)] == [0] * p


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (2, 2, 1), (3, 4, 2), (1, 3, 2)])
def test_dualpipe_v_has_at_most_the_published_bubble(f: int, i: int, w: int) -> None:
    for p in (2, 3, 4, 8):
        costs = even_costs(2 * p, forward=f, backward_input=i, backward_weight=w)
        result = simulate(
            build_schedule("dualpipe-v", num_ranks=p, num_chunks=2, num_microbatches=4 * p), costs
        )
        pair, backward = f + i + w, i + w  # a pair that shares nothing takes as long as its parts
        assert max(result.idle) <= (p - 1) * (pair + backward - 3 * w)


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    assert bubble_fraction("1f1b", num_ranks=4, num_chunks=1, num_microbatches=8) == Fraction(3, 8)
    assert bubble_fraction(
        "interleaved", num_ranks=4, num_chunks=2, num_microbatches=8
    ) == Fraction(3, 16)
    assert bubble_fraction("zb-h1", num_ranks=4, num_chunks=1, num_microbatches=8) == Fraction(1, 8)


def test_where_there_is_no_formula_none_is_given() -> None:
    assert idle_time("interleaved", num_ranks=4, num_microbatches=10) is None
    assert idle_time("zb-v", num_ranks=4, num_microbatches=8, forward=2) is None
    assert idle_time("zb-h1", num_ranks=4, num_microbatches=3) is None
    assert bubble_fraction("dualpipe-v", num_ranks=4, num_chunks=2, num_microbatches=7) is None
    assert peak_in_flight("zb-v", 0, num_ranks=4, num_chunks=2, num_microbatches=7) is None


GIB = 2**30
LARGE = {
    "22B": GptLayer(length=2048, sequences=4, hidden_size=6144, num_heads=64),
    "175B": GptLayer(length=2048, sequences=1, hidden_size=12288, num_heads=96),
    "530B": GptLayer(length=2048, sequences=1, hidden_size=20480, num_heads=128),
    "1T": GptLayer(length=2048, sequences=1, hidden_size=25600, num_heads=160),
}
"""The four models of Korthikanti et al. 2022, table 3."""


@pytest.mark.parametrize(
    ("name", "tp_only", "sp_selective"),
    [("22B", 1.234, 0.199), ("175B", 0.539, 0.0996), ("530B", 0.820, 0.166), ("1T", 1.025, 0.2075)],
)
def test_a_gpt_layer_keeps_the_published_bytes_at_tp_8(
    name: str, tp_only: float, sp_selective: float
) -> None:
    layer = LARGE[name]
    assert gpt_layer_bytes(layer, tp=8, again="nothing") / GIB == pytest.approx(tp_only, abs=6e-4)
    assert gpt_layer_bytes(layer, tp=8, sp=True, again="core_attention") / GIB == pytest.approx(
        sp_selective, abs=3e-4
    )


@pytest.mark.parametrize(
    ("name", "scores", "saved", "more"), [("175B", 80, 0.70, 0.027), ("530B", 64, 0.65, 0.016)]
)
def test_selective_recomputation_saves_the_published_part(
    name: str, scores: int, saved: float, more: float
) -> None:
    layer = LARGE[name]
    whole, left = (gpt_layer_bytes(layer, again=again) for again in ("nothing", "core_attention"))
    assert whole == layer.features * (34 + scores) and left == layer.features * 34
    assert 1 - left / whole == pytest.approx(saved, abs=5e-3)
    assert gpt_attention_again(layer) == pytest.approx(more, abs=5e-4)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_setting_has_its_published_formula(tp: int) -> None:
    layer = GptLayer(length=96, sequences=3, hidden_size=64, num_heads=4)
    scores = Fraction(5 * 4 * 96, 64)
    sbh = layer.features
    assert gpt_layer_bytes(layer, tp=tp, again="nothing") == sbh * (
        10 + Fraction(24, tp) + scores / tp
    )
    assert gpt_layer_bytes(layer, tp=tp, sp=True, again="nothing") == sbh * (34 + scores) / tp
    assert gpt_layer_bytes(layer, tp=tp, again="core_attention") == sbh * (10 + Fraction(24, tp))
    assert gpt_layer_bytes(layer, tp=tp, sp=True, again="core_attention") == Fraction(34 * sbh, tp)
    assert gpt_layer_bytes(layer, tp=tp, again="everything") == 2 * sbh
    assert gpt_layer_bytes(layer, tp=tp, sp=True, again="everything") == Fraction(2 * sbh, tp)


def test_the_first_stage_keeps_all_layers_once_and_interleaved_more() -> None:
    layer, sizes = LARGE["175B"], {"vocab_size": 51200, "tp": 8}
    sbh, each = (
        layer.features,
        gpt_layer_bytes(LARGE["175B"], tp=8, sp=True, again="core_attention"),
    )
    flat = gpt_first_stage_bytes(layer, 96, num_ranks=8, again="core_attention", **sizes)
    assert flat == 96 * each + sbh
    interleaved = gpt_first_stage_bytes(
        layer, 96, num_ranks=8, num_chunks=3, again="core_attention", **sizes
    )
    assert interleaved - flat == 96 * each * Fraction(7, 24)
    alone = gpt_first_stage_bytes(layer, 96, again="core_attention", **sizes)
    norm_and_head, logits = Fraction(2 * 2 * sbh, 8), Fraction(4 * 2048 * 51200, 8)
    assert alone == 96 * each + Fraction(sbh, 8) + norm_and_head + logits

"""The loss scale: its trace over overflows, what a checkpoint keeps of it, and when it gives up."""

import logging

import pytest

from megalith.config.optim import LossScaleConfig, PrecisionConfig
from megalith.optim.loss_scale import LossScale, build_loss_scale
from tests.cases import loop_over


def build(**settings: float) -> LossScale:
    scale = build_loss_scale(PrecisionConfig(params="fp16", loss_scale=LossScaleConfig(**settings)))  # type: ignore[arg-type]
    assert scale is not None
    return scale


def trace(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step."""
    results = []
    for overflow in overflows:
        scale.update(overflow=overflow == "1")
        results.append(scale.scale)
    return results


def test_loss_scale_matches_megatron_after_overflows() -> None:
    scale = build(initial=8, min=1, window=3, hysteresis=2)
    assert trace(scale, "0001110100011") == [8, 8, 16, 16, 8, 4, 4, 2, 2, 2, 4, 4, 2]


def test_a_good_step_does_not_restore_the_hysteresis_and_growth_does() -> None:
    scale = build(initial=8, min=1, window=2, hysteresis=2)
    assert trace(scale, "101") == [8, 8, 4]
    assert trace(scale, "00") == [4, 8]
    assert trace(scale, "1") == [8]


def test_the_scale_stays_above_its_minimum() -> None:
    assert trace(build(initial=6, min=2, window=9, hysteresis=1), "1111") == [3, 2, 2, 2]


def test_defaults_start_at_2_to_the_32() -> None:
    scale = build()
    assert (scale.scale, scale.dynamic) == (2.0**32, True)
    assert trace(scale, "11") == [2.0**32, 2.0**31]


def test_a_constant_scale_stays() -> None:
    scale = build(constant=128.0)
    assert trace(scale, "1010") == [128.0] * 4
    assert not scale.exhausted


def test_other_formats_have_no_loss_scale() -> None:
    assert all(
        build_loss_scale(PrecisionConfig(params=params)) is None
        for params in ("fp32", "bf16", "fp64")
    )


def test_run_ends_after_too_many_overflows_at_the_minimum_scale() -> None:
    scale = build(initial=4, min=1, window=5, hysteresis=1, max_overflows=3)
    trace(scale, "11")  # these lowered it
    assert (scale.scale, scale.exhausted) == (1.0, False)
    trace(scale, "11")
    assert not scale.exhausted
    trace(scale, "0")
    assert scale.stuck == 0
    trace(scale, "111")
    assert scale.exhausted


@loop_over("cut", range(14))
def test_a_run_continues_where_it_was_saved(cut: int) -> None:
    overflows = "0001110100011"
    first = build(initial=8, min=1, window=3, hysteresis=2)
    before = trace(first, overflows[:cut])
    second = build(initial=1024, min=1, window=3, hysteresis=2)
    second.load(first.as_json())
    assert set(first.as_json()) == {"scale", "growth_tracker", "hysteresis_tracker", "stuck"}
    assert before + trace(second, overflows[cut:]) == [8, 8, 16, 16, 8, 4, 4, 2, 2, 2, 4, 4, 2]


def test_loading_into_a_constant_scale_warns_and_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    scale = build(constant=128.0)
    with caplog.at_level(logging.WARNING):
        scale.load(build().as_json())
    assert scale.scale == 128.0
    assert "loss scale 4.29497e+09 is not used: precision.loss_scale.constant=128" in caplog.text


def test_overflows_at_minimum_scale_are_counted_across_a_restart() -> None:
    first = build(initial=1, min=1, hysteresis=1, max_overflows=3)
    trace(first, "11")
    second, old = (build(initial=1, min=1, hysteresis=1, max_overflows=3) for _ in range(2))
    second.load(first.as_json())
    old.load({name: value for name, value in first.as_json().items() if name != "stuck"})
    for scale in (second, old):
        trace(scale, "1")
    assert (second.exhausted, old.exhausted, old.stuck) == (True, False, 1)

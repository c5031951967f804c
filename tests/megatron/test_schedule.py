"""Tests of megalith/megatron/schedule.py."""

import pytest

from megalith.optim.schedule import learning_rate, schedule_lengths, schedule_problems
from tests.megatron.conftest import Translate


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (
            "--lr-decay-style cosine --min-lr 1e-5 --lr-warmup-iters 5",
            ("cosine", 1e-5, 5, None, None),
        ),
        (
            "--lr-decay-style inverse-square-root --lr-warmup-fraction 0.1",
            ("inverse_square_root", 0.0, 5, None, None),
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 10", ("wsd", 0.0, 0, None, 10)),
        ("--lr-decay-iters 40 --lr-warmup-fraction 0.1", ("linear", 0.0, 4, 40, None)),
        ("--lr-decay-iters 50", ("linear", 0.0, 0, None, None)),
        (
            "--lr-decay-style constant --min-lr 1e-5 --lr-decay-iters 40",
            ("constant", 0.0, 0, None, None),
        ),
        (
            "--lr-decay-style cosine --lr-wsd-decay-iters 10 --lr-warmup-init 1e-6",
            ("cosine", 0.0, 0, None, None),
        ),
    ],
)
def test_what_a_style_reads_is_copied_and_the_rest_is_left_out(
    tiny: Translate, added: str, expected: tuple[object, ...]
) -> None:
    done = tiny(added)
    assert done.run is not None and done.refusals(strict=True) == []
    s = done.run.schedule
    assert (s.style, s.min_lr, s.warmup_steps, s.decay_steps, s.wsd_decay_steps) == expected
    assert schedule_problems(s, done.run.train.steps) == []


def test_wsd_decay_style_has_the_default_of_megatron(tiny: Translate) -> None:
    default = tiny("--lr-decay-style WSD --lr-wsd-decay-iters 10").run
    given = tiny("--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-wsd-decay-style minus_sqrt").run
    assert default is not None and default.schedule.wsd_decay_style == "exponential"
    assert given is not None and given.schedule.wsd_decay_style == "minus_sqrt"


def test_lengths_in_samples_become_steps(tiny: Translate) -> None:
    added = (
        "--train-samples 600 --lr-decay-samples 480 --lr-warmup-samples 60 --lr-decay-style cosine"
    )
    done = tiny(added, without=("--train-iters",))
    assert done.run is not None and done.refusals(strict=True) == []
    assert (done.run.schedule.decay_steps, done.run.schedule.warmup_steps) == (80, 10)


def test_warmup_that_ends_inside_a_step_is_rounded_and_reported(tiny: Translate) -> None:
    done = tiny("--train-samples 600 --lr-warmup-samples 62", without=("--train-iters",))
    assert done.run is not None and done.run.schedule.warmup_steps == 10
    assert (
        "--lr-warmup-samples 62: 10.3333 steps are rounded to 10" in done.refusals(strict=True)[0]
    )


def test_steps_and_samples_do_not_mix(tiny: Translate) -> None:
    done = tiny("--lr-warmup-samples 60 --lr-decay-samples 100")
    assert len(done.problems) == 2
    assert (
        "--lr-decay-samples 100: this run counts in --train-iters. Use --lr-decay-iters."
        in done.problems
    )
    both = tiny("--lr-warmup-fraction 0.1 --lr-warmup-iters 3").problems
    assert "--lr-warmup-fraction 0.1 and --lr-warmup-iters: expected one of them" in both[0]


def test_a_growing_weight_decay_needs_both_ends(tiny: Translate) -> None:
    run = tiny(
        "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2"
    ).run
    assert run is not None
    s = run.schedule
    assert (s.weight_decay_style, s.weight_decay, s.end_weight_decay) == ("cosine", 0.1, 0.2)
    half = tiny("--weight-decay-incr-style linear --start-weight-decay 0").problems
    assert "--end-weight-decay is missing" in half[0]
    assert "the weight decay is constant" in tiny("--start-weight-decay 0.1").problems[0]


def test_the_learning_rate_of_a_step_is_megatrons(tiny: Translate) -> None:
    """Max 1, min 0.1, 10 steps of warm-up, decay over 100: values of Megatron's formulas, counted
    in samples."""
    added = (
        "--train-iters 120 --lr 1 --min-lr 0.1 --lr-warmup-iters 10 --lr-decay-iters 100 "
        "--lr-decay-style"
    )
    expected = {"linear": (0.5, 0.82, 0.55, 0.1), "cosine": (0.5, 0.914058, 0.55, 0.1)}
    for style, rates in expected.items():
        run = tiny(f"{added} {style}").run
        assert run is not None
        lengths = schedule_lengths(run.schedule, global_batch_size=6, total_steps=120)
        found = [learning_rate(run.schedule, step * 6, lengths) for step in (5, 28, 55, 101)]
        assert found == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize(
    ("added", "refusal"),
    [
        ("--rampup-batch-size 2 2 60", "a batch size that changes"),
        ("--fp8-format hybrid --fp8-recipe delayed", "8-bit"),
        ("--embedding-weights-in-fp32", "embeddings in fp32 beside bf16"),
        ("--dataloader-type external", "samples come from code that Megatron is given"),
        ("--exp-avg-dtype bf16", "optimizer states of other formats"),
    ],
)
def test_what_changes_the_numbers_is_refused_when_strict(
    tiny: Translate, added: str, refusal: str
) -> None:
    assert tiny(added).refusals(strict=False) == []
    assert len(strict := tiny(added).refusals(strict=True)) == 1 and refusal in strict[0]

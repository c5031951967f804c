"""Tests of megalith/megatron/positions.py."""

import math

import pytest

from megalith.config.model import RelativeConfig
from megalith.rules.run import model_problems
from tests.megatron.conftest import Translate

YARN = "--position-embedding-type yarn --rotary-scaling-factor 40"
SECTIONS = "--position-embedding-type mrope --mrope-section 4 2 2"


def test_rope_scaling_is_llama3s_and_a_factor_of_its_own_is_explained(tiny: Translate) -> None:
    scaled = tiny("--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32")
    assert scaled.run is not None
    rope = scaled.run.model.rope
    assert (rope.theta, rope.scaling, rope.factor) == (500_000.0, "llama3", 32.0)
    assert any(
        entry.verdict == "explained" and "scale by 8" in entry.text for entry in scaled.entries
    )
    plain = tiny("--rope-scaling-factor 32").run
    assert plain is not None and plain.model.rope.scaling == "none"


def test_the_old_spelling_of_rotary_positions_is_understood(tiny: Translate) -> None:
    old = "--use-rotary-position-embeddings --no-position-embedding"
    done = tiny(old, without=("--position-embedding-type",))
    assert done.refusals(strict=True) == []
    assert done.run is not None and done.run.model.positions == "rope"


@pytest.mark.parametrize(
    ("kind", "ours"), [("learned_absolute", "learned"), ("none", "none"), ("rope", "rope")]
)
def test_kinds_of_positions(tiny: Translate, kind: str, ours: str) -> None:
    run = tiny(f"--position-embedding-type {kind} --rotary-base 500").run
    assert run is not None and run.model.positions == ours
    assert run.model.rope.theta == (500.0 if kind == "rope" else 10_000.0), (
        "nobody else reads how to turn"
    )
    default = tiny(without=("--position-embedding-type",)).run
    assert default is not None and default.model.positions == "learned"


def test_how_rotary_positions_turn(tiny: Translate) -> None:
    run = tiny(
        "--rotary-percent 0.5 --rotary-interleaved --rotary-seq-len-interpolation-factor 4"
    ).run
    assert run is not None
    rope = run.model.rope
    assert (rope.fraction, rope.interleaved, rope.scaling, rope.factor) == (
        0.5,
        True,
        "linear",
        4.0,
    )


@pytest.mark.parametrize(
    ("typed", "skip"),
    [("2", (False, True)), ("[1,0]", (True, False)), ("[1]*2", (True,)), ("8", (False,))],
)
def test_layers_without_positions(tiny: Translate, typed: str, skip: tuple[bool, ...]) -> None:
    run = tiny(f"--no-rope-freq {typed}").run
    assert run is not None and run.model.rope.skip == skip


@pytest.mark.parametrize(
    ("added", "refusal"),
    [
        (
            f"{YARN} --rotary-percent 0.5",
            "--rotary-percent 0.5: Megatron's yarn turns all features, whatever this",
        ),
        (
            f"{YARN} --rotary-interleaved",
            "Megatron fails over it with --position-embedding-type yarn. Remove it",
        ),
        (
            f"{SECTIONS} --rotary-interleaved",
            "Megatron fails over it with --position-embedding-type mrope. Remove it",
        ),
        (f"{SECTIONS} --mrope-interleaved", "--mrope-interleaved: Megatron has no such argument."),
        (
            "--position-embedding-type mrope",
            "--mrope-section is missing: Megatron needs it. Pass --mrope-section",
        ),
        (
            "--position-embedding-type mrope --mrope-section 4,2,2",
            "--mrope-section 4,2,2 must be counts of pairs. Use --mrope-section 16 24 24.",
        ),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor 2: positions are scaled in two ways. Remove one",
        ),
    ],
)
def test_positions_that_cannot_be_had_are_refused(
    tiny: Translate, added: str, refusal: str
) -> None:
    (message,) = tiny(added).refusals(strict=False)
    assert refusal in message


def test_yarn_is_megatrons(tiny: Translate) -> None:
    more = (
        "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 30 --yarn-beta-slow 2 "
        "--mscale 0.5"
    )
    done = tiny(
        f"{YARN} {more} --mscale-all-dim 0.25 --no-yarn-correction-range-round-to-int "
        "--rotary-base 500"
    )
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    rope, sharper = done.run.model.rope, [1 + 0.1 * mscale * math.log(40) for mscale in (0.5, 0.25)]
    assert done.run.model.positions == "rope" and (rope.scaling, rope.factor, rope.theta) == (
        "yarn",
        40.0,
        500.0,
    )
    assert (rope.original_max_position, rope.beta_fast, rope.beta_slow, rope.whole_pairs) == (
        16,
        30.0,
        2.0,
        False,
    )
    assert rope.attention_factor == pytest.approx(sharper[0] / sharper[1], rel=1e-15)
    assert not any("decides nothing" in entry.text for entry in done.entries)


def test_yarn_has_megatrons_defaults(tiny: Translate) -> None:
    done = tiny(YARN)
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    rope = done.run.model.rope
    assert (rope.original_max_position, rope.beta_fast, rope.beta_slow, rope.whole_pairs) == (
        4096,
        32.0,
        1.0,
        True,
    )
    # gpt-oss: factor 32 gives 1.3465736
    run = tiny("--position-embedding-type yarn --rotary-scaling-factor 32").run
    assert run is not None and run.model.rope.attention_factor == pytest.approx(1.3465736, abs=1e-7)


def test_yarn_by_a_factor_of_one_is_rope_and_reads_no_other_scaling(tiny: Translate) -> None:
    run = tiny("--position-embedding-type yarn --rotary-base 500").run
    assert run is not None and run.model.positions == "rope"
    assert (run.model.rope.scaling, run.model.rope.attention_factor, run.model.rope.theta) == (
        "none",
        None,
        500.0,
    )
    done = tiny(f"{YARN} --use-rope-scaling --rotary-seq-len-interpolation-factor 2")
    assert done.run is not None and (done.run.model.rope.scaling, done.run.model.rope.factor) == (
        "yarn",
        40.0,
    )
    assert [entry.text for entry in done.entries].count(
        "decides nothing beside the other arguments"
    ) == 2
    run = tiny("--position-embedding-type yarn --rotary-scaling-factor 0.5").run
    assert run is not None and "model.rope.factor=0.5" in model_problems(run)[0]


def test_positions_of_three_kinds_have_their_sections(tiny: Translate) -> None:
    done = tiny(f"{SECTIONS} --rotary-seq-len-interpolation-factor 2 --no-rope-freq 2")
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    rope = done.run.model.rope
    assert (done.run.model.positions, rope.sections, rope.scaling, rope.factor) == (
        "rope",
        (4, 2, 2),
        "linear",
        2.0,
    )
    assert rope.skip == (False, True)
    run = tiny("--position-embedding-type mrope --mrope-section 2 1 1 --rotary-percent 0.5").run
    assert run is not None and run.model.rope.fraction == 0.5 and model_problems(run) == []
    run = tiny("--position-embedding-type mrope --mrope-section 2 1 1").run
    assert (
        run is not None
        and "must be three counts of feature pairs with sum 8" in model_problems(run)[0]
    )
    plain = tiny("--mrope-section 4 2 2 --yarn-beta-fast 3").run
    assert plain is not None and (plain.model.rope.sections, plain.model.rope.beta_fast) == (
        (),
        32.0,
    )


def test_relative_positions_are_refused_because_a_gpt_of_megatrons_has_none_then(
    tiny: Translate,
) -> None:
    sizes = "--relative-attention-num-buckets 16 --relative-attention-max-distance 64"
    for added in ("", sizes):
        assert tiny(f"--position-embedding-type relative {added}").refusals(strict=False) == [
            "--position-embedding-type relative: belongs to BERT or T5; pretrain_gpt.py does not "
            "read it and trains "
            "without positions. Use --position-embedding-type none."
        ]
    assert tiny("--position-embedding-type none").refusals(strict=True) == []
    assert (
        tiny("--position-embedding-type relative --use-rotary-position-embeddings").refusals(
            strict=True
        )
        == []
    )
    done = tiny(sizes)
    assert (
        done.run is not None
        and done.run.model.relative == RelativeConfig()
        and done.refusals(strict=True) == []
    )
    texts = [
        (entry.verdict, entry.text) for entry in done.entries if entry.flag.startswith("--relative")
    ]
    assert texts == [("not mapped", "belongs to BERT or T5; pretrain_gpt.py does not read it")] * 2

"""Tests of megalith/config/megatron/positions.py."""

import pytest

from megalith.config.relative import RelativeConfig
from megalith.train.rules import model_problems
from tests.config.megatron.conftest import Translate


def test_rope_scaling_is_llama3s_and_a_factor_of_its_own_is_explained(tiny: Translate) -> None:
    scaled = tiny("--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32")
    assert scaled.run is not None
    rope = scaled.run.model.rope
    assert (rope.theta, rope.scaling, rope.factor) == (500_000.0, "llama3", 32.0)
    assert any(entry.verdict == "explained" and "scale by 8" in entry.text for entry in scaled.entries)
    plain = tiny("--rope-scaling-factor 32").run
    assert plain is not None and plain.model.rope.scaling == "none"


def test_the_old_spelling_of_rotary_positions_is_understood(tiny: Translate) -> None:
    old = "--use-rotary-position-embeddings --no-position-embedding"
    done = tiny(old, without=("--position-embedding-type",))
    assert done.refusals(strict=True) == []
    assert done.run is not None and done.run.model.positions == "rope"


@pytest.mark.parametrize(("kind", "ours"), [("learned_absolute", "learned"), ("none", "none"), ("rope", "rope")])
def test_kinds_of_positions(tiny: Translate, kind: str, ours: str) -> None:
    run = tiny(f"--position-embedding-type {kind} --rotary-base 500").run
    assert run is not None and run.model.positions == ours
    assert run.model.rope.theta == (500.0 if kind == "rope" else 10_000.0), "nobody else reads how to turn"
    default = tiny(without=("--position-embedding-type",)).run
    assert default is not None and default.model.positions == "learned"


def test_how_rotary_positions_turn(tiny: Translate) -> None:
    run = tiny("--rotary-percent 0.5 --rotary-interleaved --rotary-seq-len-interpolation-factor 4").run
    assert run is not None
    rope = run.model.rope
    assert (rope.fraction, rope.interleaved, rope.scaling, rope.factor) == (0.5, True, "linear", 4.0)


@pytest.mark.parametrize(
    ("typed", "skip"), [("2", (False, True)), ("[1,0]", (True, False)), ("[1]*2", (True,)), ("8", (False,))]
)
def test_layers_without_positions(tiny: Translate, typed: str, skip: tuple[bool, ...]) -> None:
    run = tiny(f"--no-rope-freq {typed}").run
    assert run is not None and run.model.rope.skip == skip


@pytest.mark.parametrize(
    ("added", "refusal"),
    [
        ("--position-embedding-type yarn", "--position-embedding-type yarn: positions like these are not known here"),
        ("--position-embedding-type mrope", "Use --position-embedding-type rope, learned_absolute, relative or none"),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor 2: positions are scaled in two ways. Remove one",
        ),
    ],
)
def test_positions_that_are_not_known_are_refused(tiny: Translate, added: str, refusal: str) -> None:
    (said,) = tiny(added).refusals(strict=False)
    assert refusal in said


def test_relative_positions_have_their_buckets(tiny: Translate) -> None:
    run = tiny("--position-embedding-type relative").run
    assert run is not None and run.model.positions == "relative" and run.model.relative == RelativeConfig()
    sizes = "--relative-attention-num-buckets 16 --relative-attention-max-distance 64"
    done = tiny(f"--position-embedding-type relative {sizes}")
    assert done.run is not None and done.run.model.relative == RelativeConfig(buckets=16, max_distance=64)
    assert model_problems(done.run) == [] and done.refusals(strict=True) == []
    done = tiny(sizes)
    assert done.run is not None and done.run.model.relative == RelativeConfig()
    assert [entry.verdict for entry in done.entries if entry.flag.startswith("--relative")] == ["already"] * 2

"""Tests of megalith/megatron/attention.py."""

import math

import pytest

from megalith.rules.run import model_problems
from tests.megatron.conftest import Translate

LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 12 "
    "--qk-pos-emb-head-dim 8 "
    "--v-head-dim 10 --qk-layernorm --norm-epsilon 1e-6"
)


@pytest.mark.parametrize(
    ("added", "kind"),
    [
        ("", "none"),
        ("--qk-layernorm", "head"),
        ("--qk-l2-norm", "l2"),
        ("--qk-l2-norm --qk-layernorm", "l2"),
    ],
)
def test_norms_of_queries_and_keys(tiny: Translate, added: str, kind: str) -> None:
    run = tiny(added).run
    assert run is not None and run.model.attention.qk_norm == kind


def test_gates_and_sinks(tiny: Translate) -> None:
    run = tiny("--attention-output-gate --softmax-type learnable").run
    assert run is not None and run.model.attention.gated and run.model.attention.sinks
    attention = tiny("--softmax-type off-by-one").run.model.attention
    assert attention.off_by_one and not attention.sinks


@pytest.mark.parametrize(
    ("added", "window", "layers"),
    [
        ("--window-size 127,0", 128, ()),
        ("--window-size (3,0) --window-attn-skip-freq 2", 4, (True, False)),
        ("--window-size 3,0 --window-attn-skip-freq [0,1]", 4, (False, True)),
        ("--window-size 3,0 --window-attn-skip-freq [1]*2", 4, (True,)),
        ("--window-size 3,5", 4, ()),
        ("--window-size -1,0", None, ()),
        ("--window-attn-skip-freq 2", None, ()),
    ],
)
def test_windows_count_the_token_itself_and_leave_out_every_so_manieth_layer(
    tiny: Translate, added: str, window: int | None, layers: tuple[bool, ...]
) -> None:
    run = tiny(added).run
    assert run is not None
    assert (run.model.attention.window, run.model.attention.window_layers) == (window, layers)
    assert model_problems(run) == []


@pytest.mark.parametrize("typed", ["128", "1,2,3", "-2,0", "a,b"])
def test_a_window_that_cannot_be_read_is_a_problem(tiny: Translate, typed: str) -> None:
    assert tiny(f"--window-size {typed}").problems == (
        f"--window-size {typed} must be two counts of at least -1. Use --window-size 127,0 for 128 "
        "tokens.",
    )


def test_latent_attention_is_translated_with_its_yarn(tiny: Translate) -> None:
    added = f"{LATENT} --rotary-scaling-factor 40 --mscale 0.5 --mscale-all-dim 1.0"
    done = tiny(added, without=("--group-query-attention", "--num-query-groups"))
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    model = done.run.model
    mla, rope = model.mla, model.rope
    assert mla is not None
    assert (mla.kv_rank, mla.q_rank, mla.nope_dim, mla.rope_dim, mla.value_dim) == (
        16,
        24,
        12,
        8,
        10,
    )
    assert (mla.norm_eps, mla.yarn_mscale, model.num_kv_heads, model.head_dim) == (
        1e-6,
        1.0,
        6,
        None,
    )
    assert (rope.scaling, rope.factor, rope.original_max_position, rope.interleaved) == (
        "yarn",
        40.0,
        4096,
        True,
    )
    assert rope.attention_factor == (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)


def test_latent_attention_is_plain_where_nothing_scales(tiny: Translate) -> None:
    without = ("--group-query-attention", "--num-query-groups", "--disable-bias-linear")
    for added in (LATENT, f"{LATENT} --rope-type rope --rotary-scaling-factor 40"):
        run = tiny(added, without=without).run
        assert run is not None and run.model.mla is not None
        assert (
            run.model.rope.scaling,
            run.model.rope.attention_factor,
            run.model.mla.yarn_mscale,
        ) == (
            "none",
            None,
            None,
        )
        assert not run.model.qkv_bias and run.model.output_bias and model_problems(run) == []


@pytest.mark.parametrize(
    ("added", "flag", "sharper"),
    [
        (
            "--rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 0.7",
            "--mscale-all-dim",
            0.07 * math.log(40) + 1,
        ),
        ("--use-mup --mup-base-hidden-size 48 --mup-base-head-dim 5", "--use-mup", 1.0),
        (
            "--use-mup --rotary-scaling-factor 40 --mscale-all-dim 1",
            "--use-mup",
            0.1 * math.log(40) + 1,
        ),
    ],
)
def test_scores_of_latent_attention_are_scaled_where_megatron_scales_them(
    tiny: Translate, added: str, flag: str, sharper: float
) -> None:
    """By the sharpness squared over the root of the features: under rope, too, and whatever muP
    says."""
    done = tiny(f"{LATENT} {added}", without=("--group-query-attention", "--num-query-groups"))
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    assert (
        done.run.model.softmax_scale()
        == done.run.model.attention.scale
        == pytest.approx(sharper**2 / 20**0.5)
    )
    assert done.run.model.mla is not None and done.run.model.mla.yarn_mscale is None
    assert any(
        entry.setting == "model.attention.scale" and entry.flag.startswith(flag)
        for entry in done.entries
    )


def test_latent_attention_turns_all_features_of_positions(tiny: Translate) -> None:
    without = ("--group-query-attention", "--num-query-groups")
    (message,) = tiny(f"{LATENT} --rope-type rope --rotary-percent 0.5", without=without).refusals(
        strict=False
    )
    assert (
        "--rotary-percent 0.5: latent attention here turns all features that it keeps for positions"
        in message
    )
    yarn = tiny(f"{LATENT} --rotary-percent 0.5", without=without)
    assert yarn.refusals(strict=True) == [], "which Megatron's yarn does not read"
    every = tiny(f"{LATENT} --no-rope-freq 2", without=without)
    assert (
        every.run is not None
        and every.run.model.rope.skip == ()
        and every.refusals(strict=True) == []
    )
    assert any("turns in every layer, whatever this says" in entry.text for entry in every.entries)


def test_latent_attention_norms_its_vectors_as_the_model_norms(tiny: Translate) -> None:
    done = tiny(
        f"{LATENT} --normalization LayerNorm",
        without=("--group-query-attention", "--num-query-groups"),
    )
    assert (
        done.run is not None and done.refusals(strict=True) == [] and model_problems(done.run) == []
    )
    assert done.run.model.norm == "layer" and done.run.model.mla is not None
    bare = tiny(
        LATENT.replace("--qk-layernorm ", ""),
        without=("--group-query-attention", "--num-query-groups"),
    )
    assert (
        bare.run is not None and bare.refusals(strict=True) == [] and model_problems(bare.run) == []
    )
    assert (
        bare.run.model.mla is not None
        and not bare.run.model.mla.norms
        and bare.run.model.mla.norm_eps == 1e-6
    )


@pytest.mark.parametrize(
    ("added", "refusal"),
    [
        ("--group-query-attention", "--group-query-attention: latent attention has no such thing"),
        (
            "--attention-output-gate",
            "--attention-output-gate: latent attention has no such thing. Remove it",
        ),
        (
            "--position-embedding-type none",
            "positions like these are not known in latent attention",
        ),
    ],
)
def test_what_latent_attention_cannot_have_is_refused(
    tiny: Translate, added: str, refusal: str
) -> None:
    (message,) = tiny(f"{LATENT} {added}", without=("--group-query-attention",)).refusals(
        strict=False
    )
    assert refusal in message

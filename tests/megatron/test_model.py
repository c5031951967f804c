"""Model settings from Megatron's arguments."""

import math

import pytest

from megalith.config.kernels import KernelsConfig
from megalith.config.model import ModelConfig, MuPConfig, RelativeConfig
from megalith.rules.run import model_problems
from tests.megatron.conftest import Translate


def test_sizes_are_copied(tiny: Translate) -> None:
    run = tiny("--kv-channels 20 --norm-epsilon 1e-6 --init-method-std 0.01").run
    assert run is not None
    model = run.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == (2, 96, 6, 20)
    assert (model.max_seq_len, model.norm_eps, model.init_std) == (64, 1e-6, 0.01)


def test_kv_heads_follow_the_query_groups_only_with_grouped_queries(tiny: Translate) -> None:
    grouped, alone = tiny().run, tiny(without=("--group-query-attention",))
    assert grouped is not None and grouped.model.num_kv_heads == 3
    assert alone.run is not None and alone.run.model.num_kv_heads == 6
    assert any(
        "--num-query-groups" in entry.flag and "only" in entry.text for entry in alone.entries
    )
    default = tiny(without=("--num-query-groups",)).run
    # Megatron's default of the number of groups
    assert default is not None and default.model.num_kv_heads == 1


@pytest.mark.parametrize(
    ("hidden", "width"),
    [
        (96, 256),
        (768, 2048),
        (1000, 2624),
        (1024, 2688),
        (4096, 10880),
        (5120, 13632),
        (8192, 21824),
    ],
)
def test_default_ffn_size_is_that_of_megatron(tiny: Translate, hidden: int, width: int) -> None:
    run = tiny(f"--hidden-size {hidden}", without=("--ffn-hidden-size",)).run
    assert run is not None
    assert run.model.ffn_hidden_size == width == int((4 * hidden * 2 / 3) / 64) * 64


def test_biases_are_the_default(tiny: Translate) -> None:
    off, on, qkv = (
        tiny().run,
        tiny(without=("--disable-bias-linear",)).run,
        tiny("--add-qkv-bias").run,
    )
    assert off is not None and on is not None and qkv is not None
    assert [off.model.qkv_bias, off.model.output_bias, off.model.mlp_bias] == [False, False, False]
    assert [on.model.qkv_bias, on.model.output_bias, on.model.mlp_bias] == [True, True, True]
    assert [qkv.model.qkv_bias, qkv.model.output_bias, qkv.model.mlp_bias] == [True, False, False]


def test_fp32_residual_is_translated(tiny: Translate) -> None:
    narrow, wide = tiny().run, tiny("--fp32-residual-connection").run
    assert narrow is not None and not narrow.model.fp32_residual
    assert wide is not None and wide.model.fp32_residual


def test_embeddings_are_tied_unless_untied(tiny: Translate) -> None:
    tied, untied = tiny(without=("--untie-embeddings-and-output-weights",)).run, tiny().run
    assert tied is not None and tied.model.tied_embeddings
    assert untied is not None and not untied.model.tied_embeddings


def test_activation_is_the_named_one_or_gelu(
    tiny: Translate,
) -> None:
    def mlp(added: str, *without: str) -> tuple[str, bool]:
        run = tiny(added, without=without).run
        assert run is not None
        return run.model.activation, run.model.gated

    assert mlp("") == ("silu", True)
    assert mlp("", "--swiglu") == ("gelu", False), "without biases there is nothing to fuse"
    assert mlp("", "--swiglu", "--disable-bias-linear") == ("gelu_tanh", False)
    assert mlp("--no-bias-gelu-fusion", "--swiglu", "--disable-bias-linear") == ("gelu", False)
    assert mlp("--squared-relu", "--swiglu") == ("squared_relu", False)
    assert mlp("--quick-geglu", "--swiglu") == ("quick_gelu", True)


def test_default_ffn_size_is_four_times_the_hidden_size(tiny: Translate) -> None:
    run = tiny(without=("--swiglu", "--ffn-hidden-size")).run
    assert run is not None and run.model.ffn_hidden_size == 4 * 96


def test_gate_limits_need_a_gated_activation(tiny: Translate) -> None:
    limits = "--activation-func-clamp-value 7 --glu-linear-offset 1"
    gated, plain = tiny(limits).run, tiny(limits, without=("--swiglu",)).run
    assert gated is not None and (gated.model.activation_clamp, gated.model.up_offset) == (7.0, 1.0)
    assert plain is not None and (plain.model.activation_clamp, plain.model.up_offset) == (
        None,
        0.0,
    )


def test_norms_are_those_of_megatron(tiny: Translate) -> None:
    default, centered = tiny(without=("--normalization",)).run, tiny("--apply-layernorm-1p").run
    assert default is not None and default.model.norm == "layer"
    assert centered is not None and (centered.model.norm, centered.model.zero_centered_gamma) == (
        "rms",
        True,
    )


def test_default_dropout_is_that_of_megatron(tiny: Translate) -> None:
    run = tiny(without=("--hidden-dropout", "--attention-dropout")).run
    assert run is not None
    dropout = run.model.dropout
    assert (dropout.embedding, dropout.residual, dropout.attention) == (0.1, 0.1, 0.1)
    off = tiny().run
    assert off is not None and not off.model.dropout.is_enabled()


def test_multi_token_prediction(tiny: Translate) -> None:
    two, none = (
        tiny("--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3").run,
        tiny("--mtp-num-layers 0").run,
    )
    assert two is not None and (two.model.mtp.num_layers, two.model.mtp.loss_weight) == (2, 0.3)
    assert none is not None and none.model.mtp.num_layers == 0
    assert tiny("--mtp-hsm").refusals(strict=True) == [], "asks for nothing without depths"


@pytest.mark.parametrize(
    ("layout", "output"),
    [
        ("E|tt|m*2|L", "it has a stage that contains only m"),
        ("E|t,t|(mm)|L", "it has a stage that contains only m"),
        ("E(t|)*2m,m|L", "it has a stage that contains only m"),
        ("E|t|tmm|L", "it has no stage that contains only m"),
        ("E(t|)*2(|mm)L", "it has no stage that contains only m"),
    ],
)
def test_layout_places_the_mtp_layers(tiny: Translate, layout: str, output: str) -> None:
    stages = f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout {layout}"
    done = tiny(f"--mtp-num-layers 2 --mtp-standalone {stages}")
    assert done.refusals(strict=True) == []
    assert done.run is not None and done.run.parallel.pipeline.layout == layout
    assert any(
        entry.flag == "--mtp-standalone" and entry.text.endswith(output) for entry in done.entries
    )
    alone = tiny("--mtp-num-layers 1 --mtp-standalone")
    assert alone.run is not None and alone.run.parallel.pipeline.layout is None


def test_gpt2_is_translated_as_a_whole(tiny: Translate) -> None:
    without = (
        "--swiglu",
        "--normalization",
        "--position-embedding-type",
        "--disable-bias-linear",
        "--ffn-hidden-size",
    )
    done = tiny(
        without=(*without, "--untie-embeddings-and-output-weights", "--group-query-attention")
    )
    assert done.run is not None and done.refusals(strict=True) == []
    model = done.run.model
    assert (model.norm, model.positions, model.activation, model.gated) == (
        "layer",
        "learned",
        "gelu_tanh",
        False,
    )
    assert model.tied_embeddings and model.mlp_bias and model.output_bias and model.qkv_bias


@pytest.mark.parametrize(
    ("added", "without", "refusal"),
    [
        (
            "--num-experts 8 --moe-router-padding-for-fp8",
            (),
            "--moe-router-padding-for-fp8: not implemented: it pads",
        ),
        ("--mtp-num-layers 1 --mtp-hsm", (), "--mtp-hsm: not implemented: MTP"),
        ("--spec my.module spec", (), "--spec my.module spec: not implemented"),
    ],
)
def test_flags_of_another_model_are_rejected(
    tiny: Translate, added: str, without: tuple[str, ...], refusal: str
) -> None:
    refusals = tiny(added, without=without).refusals(strict=False)
    assert len(refusals) == 1 and refusal in refusals[0]


@pytest.mark.parametrize(
    "added", ["--num-experts 0", "--rotary-percent 1", "--mtp-num-layers 0", "--optimizer adam"]
)
def test_value_that_matches_our_behavior_is_not_rejected(tiny: Translate, added: str) -> None:
    assert tiny(added).refusals(strict=True) == []


def test_all_missing_sizes_are_reported_together(tiny: Translate) -> None:
    missing = (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
    )
    problems = tiny(without=missing).problems
    assert [problem.split()[0] for problem in problems] == list(missing)
    assert all("Megatron needs it. Pass" in problem for problem in problems)


def test_disabled_fused_kernels_are_translated(tiny: Translate) -> None:
    done = tiny("--no-rope-fusion --no-bias-swiglu-fusion --attention-backend unfused")
    assert done.run is not None and done.refusals(strict=True) == []
    assert done.run.kernels == KernelsConfig(
        rope="torch", activation="torch", attention="reference"
    )
    others = tiny("--no-bias-swiglu-fusion --attention-backend flash", without=("--swiglu",))
    assert (
        others.run is not None
        and others.run.kernels == "auto"
        and others.refusals(strict=True) == []
    )


# --- attention


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


def test_attention_gate_and_sinks(tiny: Translate) -> None:
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
def test_window_includes_the_query_and_skips_every_nth_layer(
    tiny: Translate, added: str, window: int | None, layers: tuple[bool, ...]
) -> None:
    run = tiny(added).run
    assert run is not None
    assert (run.model.attention.window, run.model.attention.window_layers) == (window, layers)
    assert model_problems(run) == []


@pytest.mark.parametrize("typed", ["128", "1,2,3", "-2,0", "a,b"])
def test_invalid_window_is_reported(tiny: Translate, typed: str) -> None:
    assert tiny(f"--window-size {typed}").problems == (
        f"--window-size {typed} must be two counts of at least -1. Use --window-size 127,0 for 128 "
        "tokens.",
    )


def test_mla_with_yarn_is_translated(tiny: Translate) -> None:
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


def test_mla_without_scaling_is_plain(tiny: Translate) -> None:
    without = "--group-query-attention", "--num-query-groups", "--disable-bias-linear"
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
def test_mla_score_scale_is_that_of_megatron(
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


def test_mla_rotates_all_rotary_features(tiny: Translate) -> None:
    without = "--group-query-attention", "--num-query-groups"
    (message,) = tiny(f"{LATENT} --rope-type rope --rotary-percent 0.5", without=without).refusals(
        strict=False
    )
    assert "--rotary-percent 0.5: MLA rotates all of its rotary features" in message
    yarn = tiny(f"{LATENT} --rotary-percent 0.5", without=without)
    assert yarn.refusals(strict=True) == [], "which Megatron's yarn does not read"
    every = tiny(f"{LATENT} --no-rope-freq 2", without=without)
    assert (
        every.run is not None
        and every.run.model.rope.skip == ()
        and every.refusals(strict=True) == []
    )
    assert any("applies rotary positions in every layer" in entry.text for entry in every.entries)


def test_mla_uses_the_norm_of_the_model(tiny: Translate) -> None:
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
        ("--group-query-attention", "--group-query-attention: MLA does not support it"),
        (
            "--attention-output-gate",
            "--attention-output-gate: MLA does not support it. Remove it",
        ),
        (
            "--position-embedding-type none",
            "MLA supports only rotary positions",
        ),
    ],
)
def test_flags_that_mla_does_not_support_are_rejected(
    tiny: Translate, added: str, refusal: str
) -> None:
    (message,) = tiny(f"{LATENT} {added}", without=("--group-query-attention",)).refusals(
        strict=False
    )
    assert refusal in message


# --- positions


YARN = "--position-embedding-type yarn --rotary-scaling-factor 40"
SECTIONS = "--position-embedding-type mrope --mrope-section 4 2 2"


def test_rope_scaling_is_llama3_and_another_factor_is_explained(tiny: Translate) -> None:
    scaled = tiny("--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32")
    assert scaled.run is not None
    rope = scaled.run.model.rope
    assert (rope.theta, rope.scaling, rope.factor) == (500_000.0, "llama3", 32.0)
    assert any(
        entry.verdict == "explained" and "scale by 8" in entry.text for entry in scaled.entries
    )
    plain = tiny("--rope-scaling-factor 32").run
    assert plain is not None and plain.model.rope.scaling == "none"


def test_old_flag_of_rotary_positions_is_translated(tiny: Translate) -> None:
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


def test_rotary_settings_are_translated(tiny: Translate) -> None:
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
            "--rotary-percent 0.5: Megatron's YaRN rotates all features and ignores it",
        ),
        (
            f"{YARN} --rotary-interleaved",
            "Megatron fails with it and --position-embedding-type yarn. Remove it",
        ),
        (
            f"{SECTIONS} --rotary-interleaved",
            "Megatron fails with it and --position-embedding-type mrope. Remove it",
        ),
        (f"{SECTIONS} --mrope-interleaved", "--mrope-interleaved: Megatron has no such argument."),
        (
            "--position-embedding-type mrope",
            "--mrope-section is missing: Megatron needs it. Pass --mrope-section",
        ),
        (
            "--position-embedding-type mrope --mrope-section 4,2,2",
            "--mrope-section 4,2,2 must be numbers of feature pairs. Use --mrope-section 16 24 24.",
        ),
        (
            "--use-rope-scaling --rotary-seq-len-interpolation-factor 2",
            "--rotary-seq-len-interpolation-factor 2: only one kind of scaling is supported",
        ),
    ],
)
def test_unsupported_positions_are_rejected(tiny: Translate, added: str, refusal: str) -> None:
    (message,) = tiny(added).refusals(strict=False)
    assert refusal in message


def test_yarn_is_translated(tiny: Translate) -> None:
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
    assert not any("has no effect with" in entry.text for entry in done.entries)


def test_yarn_defaults_are_those_of_megatron(tiny: Translate) -> None:
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


def test_yarn_with_factor_one_is_rope(tiny: Translate) -> None:
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
        "has no effect with the other arguments"
    ) == 2
    run = tiny("--position-embedding-type yarn --rotary-scaling-factor 0.5").run
    assert run is not None and "model.rope.factor=0.5" in model_problems(run)[0]


def test_mrope_sections_are_translated(tiny: Translate) -> None:
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


def test_relative_positions_are_rejected(
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


# --- initial


def model(tiny: Translate, added: str) -> ModelConfig:
    run = tiny(added).run
    assert run is not None
    return run.model


def test_init_standard_deviations_are_copied(tiny: Translate) -> None:
    outputs = model(tiny, "--embedding-init-method-std 0.5 --init-method-xavier-uniform")
    assert (outputs.embedding_init_std, outputs.init, outputs.init_std) == (
        0.5,
        "xavier_uniform",
        0.02,
    )


def test_mup_has_a_base_and_its_factors(tiny: Translate) -> None:
    assert model(tiny, "--mup-base-hidden-size 24").mup is None
    assert model(tiny, "--use-mup").mup == MuPConfig(base_hidden_size=96)
    assert model(tiny, "--use-mup --mup-width-mult 4").mup == MuPConfig(base_hidden_size=24)
    added = "--use-mup --mup-base-hidden-size 24 --mup-base-head-dim 8 --mup-attn-scale-power 0.5 "
    outputs = model(tiny, added + "--mup-embedding-mult 3 --mup-output-mult 0.5")
    assert outputs.mup == MuPConfig(base_hidden_size=24, base_head_dim=8, attention_scale_power=0.5)
    assert outputs.embedding_scale == 3.0
    assert outputs.logit_scale / outputs.width_factor() == 0.5, "what Megatron multiplies by"

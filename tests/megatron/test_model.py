"""Tests of megalith/megatron/model.py."""

import pytest

from megalith.config.kernels import KernelsConfig
from tests.megatron.conftest import Translate


def test_sizes_are_copied(tiny: Translate) -> None:
    run = tiny("--kv-channels 20 --norm-epsilon 1e-6 --init-method-std 0.01").run
    assert run is not None
    model = run.model
    assert (model.num_layers, model.hidden_size, model.num_heads, model.head_dim) == (2, 96, 6, 20)
    assert (model.max_seq_len, model.norm_eps, model.init_std) == (64, 1e-6, 0.01)


def test_key_value_heads_follow_the_groups_only_when_queries_are_grouped(tiny: Translate) -> None:
    grouped, alone = tiny().run, tiny(without=("--group-query-attention",))
    assert grouped is not None and grouped.model.num_kv_heads == 3
    assert alone.run is not None and alone.run.model.num_kv_heads == 6
    assert any(
        "--num-query-groups" in entry.flag and "only" in entry.text for entry in alone.entries
    )
    default = tiny(without=("--num-query-groups",)).run
    assert (
        default is not None and default.model.num_kv_heads == 1
    )  # Megatron's default of the number of groups


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
def test_the_width_of_the_mlp_is_megatrons_when_it_is_left_out(
    tiny: Translate, hidden: int, width: int
) -> None:
    run = tiny(f"--hidden-size {hidden}", without=("--ffn-hidden-size",)).run
    assert run is not None
    assert run.model.ffn_hidden_size == width == int((4 * hidden * 2 / 3) / 64) * 64


def test_biases_are_on_unless_switched_off(tiny: Translate) -> None:
    off, on, qkv = (
        tiny().run,
        tiny(without=("--disable-bias-linear",)).run,
        tiny("--add-qkv-bias").run,
    )
    assert off is not None and on is not None and qkv is not None
    assert [off.model.qkv_bias, off.model.output_bias, off.model.mlp_bias] == [False, False, False]
    assert [on.model.qkv_bias, on.model.output_bias, on.model.mlp_bias] == [True, True, True]
    assert [qkv.model.qkv_bias, qkv.model.output_bias, qkv.model.mlp_bias] == [True, False, False]


def test_the_residual_stream_is_wide_where_it_is_asked_to_be(tiny: Translate) -> None:
    narrow, wide = tiny().run, tiny("--fp32-residual-connection").run
    assert narrow is not None and not narrow.model.fp32_residual
    assert wide is not None and wide.model.fp32_residual


def test_embeddings_are_tied_unless_untied(tiny: Translate) -> None:
    tied, untied = tiny(without=("--untie-embeddings-and-output-weights",)).run, tiny().run
    assert tied is not None and tied.model.tied_embeddings
    assert untied is not None and not untied.model.tied_embeddings


def test_the_activation_is_the_one_that_is_named_and_gelu_without_a_gate_else(
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


def test_a_plain_mlp_is_four_times_as_wide_as_the_model(tiny: Translate) -> None:
    run = tiny(without=("--swiglu", "--ffn-hidden-size")).run
    assert run is not None and run.model.ffn_hidden_size == 4 * 96


def test_limits_of_a_gate_are_read_with_one(tiny: Translate) -> None:
    limits = "--activation-func-clamp-value 7 --glu-linear-offset 1"
    gated, plain = tiny(limits).run, tiny(limits, without=("--swiglu",)).run
    assert gated is not None and (gated.model.activation_clamp, gated.model.up_offset) == (7.0, 1.0)
    assert plain is not None and (plain.model.activation_clamp, plain.model.up_offset) == (
        None,
        0.0,
    )


def test_norms_are_megatrons(tiny: Translate) -> None:
    default, centered = tiny(without=("--normalization",)).run, tiny("--apply-layernorm-1p").run
    assert default is not None and default.model.norm == "layer"
    assert centered is not None and (centered.model.norm, centered.model.zero_centered_gamma) == (
        "rms",
        True,
    )


def test_dropout_that_was_left_out_is_megatrons(tiny: Translate) -> None:
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
        ("E|tt|m*2|L", "with m on a stage of its own"),
        ("E|t,t|(mm)|L", "with m on a stage of its own"),
        ("E(t|)*2m,m|L", "with m on a stage of its own"),
        ("E|t|tmm|L", "which has no stage with m and nothing else"),
        ("E(t|)*2(|mm)L", "which has no stage with m and nothing else"),
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
            "--moe-router-padding-for-fp8: not yet: it rounds",
        ),
        ("--mtp-num-layers 1 --mtp-hsm", (), "--mtp-hsm: not yet: multi-token predictions"),
        ("--spec my.module spec", (), "--spec my.module spec: not yet"),
    ],
)
def test_what_would_train_another_network_is_refused(
    tiny: Translate, added: str, without: tuple[str, ...], refusal: str
) -> None:
    refusals = tiny(added, without=without).refusals(strict=False)
    assert len(refusals) == 1 and refusal in refusals[0]


@pytest.mark.parametrize(
    "added", ["--num-experts 0", "--rotary-percent 1", "--mtp-num-layers 0", "--optimizer adam"]
)
def test_a_value_that_asks_for_nothing_is_not_refused(tiny: Translate, added: str) -> None:
    assert tiny(added).refusals(strict=True) == []


def test_every_size_that_is_missing_is_named_at_once(tiny: Translate) -> None:
    missing = (
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
    )
    problems = tiny(without=missing).problems
    assert [problem.split()[0] for problem in problems] == list(missing)
    assert all("Megatron needs it. Pass" in problem for problem in problems)


def test_fused_ways_that_are_turned_off_are_here_too(tiny: Translate) -> None:
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

"""Tests of megalith/config/megatron/model.py."""

import pytest

from tests.config.megatron.conftest import Translate


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
    assert any("--num-query-groups" in entry.flag and "only" in entry.text for entry in alone.entries)
    default = tiny(without=("--num-query-groups",)).run
    assert default is not None and default.model.num_kv_heads == 1  # Megatron's default of the number of groups


@pytest.mark.parametrize(("hidden", "width"), [(96, 256), (1000, 2624), (4096, 10880)])
def test_the_width_of_the_mlp_is_megatrons_when_it_is_left_out(tiny: Translate, hidden: int, width: int) -> None:
    run = tiny(f"--hidden-size {hidden}", without=("--ffn-hidden-size",)).run
    assert run is not None
    assert run.model.ffn_hidden_size == width == int((4 * hidden * 2 / 3) / 64) * 64


def test_biases_are_on_unless_switched_off(tiny: Translate) -> None:
    off, on, qkv = tiny().run, tiny(without=("--disable-bias-linear",)).run, tiny("--add-qkv-bias").run
    assert off is not None and on is not None and qkv is not None
    assert [off.model.qkv_bias, off.model.output_bias, off.model.mlp_bias] == [False, False, False]
    assert [on.model.qkv_bias, on.model.output_bias, on.model.mlp_bias] == [True, True, True]
    assert [qkv.model.qkv_bias, qkv.model.output_bias, qkv.model.mlp_bias] == [True, False, False]


def test_embeddings_are_tied_unless_untied(tiny: Translate) -> None:
    tied, untied = tiny(without=("--untie-embeddings-and-output-weights",)).run, tiny().run
    assert tied is not None and tied.model.tied_embeddings
    assert untied is not None and not untied.model.tied_embeddings


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
    assert tiny(old, without=("--position-embedding-type",)).refusals(strict=True) == []


@pytest.mark.parametrize(
    ("added", "without", "refusal"),
    [
        ("", ("--swiglu",), "--swiglu (left out): the MLP here is SwiGLU"),
        ("", ("--normalization",), "--normalization LayerNorm (left out): the norm here is RMSNorm"),
        ("", ("--position-embedding-type",), "learned_absolute (left out): positions here are rotary"),
        ("--position-embedding-type yarn", (), "--position-embedding-type yarn: positions here are rotary"),
        ("--normalization LayerNorm", (), "Use --normalization RMSNorm"),
        ("--qk-layernorm", (), "--qk-layernorm: not yet: norms of queries and keys"),
        ("--num-experts 8", (), "--num-experts 8: not yet: mixture of experts"),
        ("--multi-latent-attention", (), "not yet: multi-latent attention"),
        ("--rotary-percent 0.5", (), "--rotary-percent 0.5: rotary positions turn all features"),
        ("--mtp-num-layers 1", (), "predicting several tokens"),
        ("--squared-relu", (), "other activations than SwiGLU"),
        ("--window-size 128,0", (), "--window-size 128,0: not yet"),
        ("--spec my.module spec", (), "--spec my.module spec: not yet"),
    ],
)
def test_what_would_train_another_network_is_refused(
    tiny: Translate, added: str, without: tuple[str, ...], refusal: str
) -> None:
    refusals = tiny(added, without=without).refusals(strict=False)
    assert len(refusals) == 1 and refusal in refusals[0]


@pytest.mark.parametrize("added", ["--num-experts 0", "--rotary-percent 1", "--mtp-num-layers 0", "--optimizer adam"])
def test_a_value_that_asks_for_nothing_is_not_refused(tiny: Translate, added: str) -> None:
    assert tiny(added).refusals(strict=True) == []


def test_every_size_that_is_missing_is_named_at_once(tiny: Translate) -> None:
    missing = ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    problems = tiny(without=missing).problems
    assert [problem.split()[0] for problem in problems] == list(missing)
    assert all("Megatron needs it. Pass" in problem for problem in problems)

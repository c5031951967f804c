"""Every rule of a network names the field, its value, the reason and a value that would work."""

import math
from dataclasses import replace
from typing import Any

import pytest

from megalith.config.model import (
    AttentionConfig,
    LayersConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    MuPConfig,
    RelativeConfig,
    RopeConfig,
)
from megalith.config.moe import MoEConfig
from megalith.rules.model import network_problems
from megalith.verify.matrix import VARIANTS
from tests.cases import loop_over

SOUND = ModelConfig(
    vocab_size=100,
    hidden_size=48,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=64,
    max_seq_len=64,
)
MLA = MLAConfig(kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4)


def rope(**changed: Any) -> dict[str, Any]:  # Any: values of settings
    return {"rope": RopeConfig(**changed)}


def attention(**changed: Any) -> dict[str, Any]:  # Any: values of settings
    return {"attention": AttentionConfig(**changed)}


def relative(**changed: Any) -> dict[str, Any]:  # Any: values of settings
    return {"positions": "relative", "relative": RelativeConfig(**changed)}


def latent(**changed: Any) -> dict[str, Any]:  # Any: values of settings
    return {"mla": replace(MLA, **changed), "num_kv_heads": 8}


CASES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"num_layers": 0},
        "model.num_layers=0 must be at least 1",
        "Set model.num_layers to 1 or more",
    ),
    ({"head_dim": 0}, "model.head_dim=0 must be at least 1", "Set model.head_dim to 1 or more"),
    (
        attention(window=0),
        "model.attention.window=0 must be at least 1",
        "Set model.attention.window to 1 or more",
    ),
    (
        latent(kv_rank=0),
        "model.mla.kv_rank=0 must be at least 1",
        "Set model.mla.kv_rank to 1 or more",
    ),
    (
        latent(q_rank=-1),
        "model.mla.q_rank=-1 must be at least 1",
        "Set model.mla.q_rank to 1 or more",
    ),
    (
        attention(causal=False, window=4, window_right=-1),
        "model.attention.window_right=-1 must be at least 0",
        "Set model.attention.window_right to 0 or more",
    ),
    (
        attention(causal=False, window=4, window_right=1, chunked=True),
        "model.attention.window_right=1 with model.attention.chunked=true",
        "remove model.attention.window_right",
    ),
    (
        attention(window=4, window_right=1),
        "model.attention.window_right=1",
        "model.attention.causal=false",
    ),
    (
        {"mtp": MTPConfig(num_layers=-1)},
        "model.mtp.num_layers=-1 must be at least 0",
        "to 0 or more",
    ),
    (
        {"mtp": MTPConfig(num_layers=1, loss_weight=-0.1)},
        "model.mtp.loss_weight=-0.1 must be a finite number",
        "to 0 or more",
    ),
    ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be a finite number above 0", "Use 1e-05"),
    (
        attention(softcap=-1.0),
        "model.attention.softcap=-1.0 must be a finite number above 0",
        "Use 50.0",
    ),
    (
        relative(buckets=7),
        "model.relative.buckets=7 must be a multiple of 2",
        "Set model.relative.buckets to 6 or 32",
    ),
    (
        {**relative(buckets=10), **attention(causal=False)},
        "model.relative.buckets=10 must be a multiple of 4",
        "Set model.relative.buckets to 8 or 32",
    ),
    (
        relative(max_distance=16),
        "model.relative.max_distance=16 must be more than the 16 distances",
        "Set model.relative.max_distance to 128 or so",
    ),
    (
        {**latent(), "positions": "relative"},
        "model.positions=relative with model.mla",
        "Set model.positions to rope or none",
    ),
    (
        attention(sinks=True, off_by_one=True),
        "model.attention.sinks=true with model.attention.off_by_one=true",
        "Set one of them to false",
    ),
    (
        attention(scale=math.nan),
        "model.attention.scale=nan must be a finite number above 0",
        "Use 0.125",
    ),
    ({"logit_softcap": 0.0}, "model.logit_softcap=0.0 must be a finite number above 0", "Use 30.0"),
    (
        {"activation_clamp": math.inf},
        "model.activation_clamp=inf must be a finite number above 0",
        "Use 7.0",
    ),
    ({"up_offset": math.inf}, "model.up_offset=inf must be a finite number", "Use 0.0"),
    (
        rope(scaling="yarn", beta_slow=0.0),
        "model.rope.beta_slow=0.0 must be a finite number above 0",
        "Use 1.0",
    ),
    (
        {"num_kv_heads": 3},
        "model.num_kv_heads=3 does not divide model.num_heads=8",
        "one of [1, 2, 4, 8]",
    ),
    (
        {"hidden_size": 50},
        "model.hidden_size=50 is not a multiple of model.num_heads=8",
        "to 48 or 56, or set",
    ),
    (
        attention(qk_norm="whole") | {"norm": "layer"},
        "model.attention.qk_norm=whole with model.norm=layer",
        "Set model.attention.qk_norm=head, or model.norm=rms",
    ),
    (
        latent() | attention(qk_norm="head", sinks=True) | {"qkv_bias": True},
        "model.attention.qk_norm=head, model.attention.sinks=true, model.qkv_bias=true with "
        "model.mla",
        "Set model.attention.qk_norm=none, model.attention.sinks=false, model.qkv_bias=false, or "
        "remove model.mla",
    ),
    (
        latent() | attention(gated=True),
        "model.attention.gated=true with model.mla",
        "Set model.attention.gated=false",
    ),
    ({"mla": MLA}, "model.num_kv_heads=4 with model.mla", "Set model.num_kv_heads=8"),
    (latent() | {"head_dim": 6}, "model.head_dim=6 with model.mla", "Set model.head_dim=null"),
    (
        latent() | {"positions": "learned"},
        "model.positions=learned with model.mla",
        "to rope or none",
    ),
    (latent(rope_dim=5), "model.mla.rope_dim=5 is odd", "Set model.mla.rope_dim to 6"),
    (
        latent(yarn_mscale=1.0),
        "model.mla.yarn_mscale=1.0 with model.rope.scaling=none",
        "Set model.rope.scaling=yarn",
    ),
    (
        latent(yarn_mscale=1.0) | rope(scaling="yarn") | attention(scale=0.2),
        "model.mla.yarn_mscale=1.0 with model.attention.scale=0.2",
        "Set model.attention.scale=null, or remove it",
    ),
    (
        attention(qk_norm_eps=1e-6),
        "model.attention.qk_norm_eps=1e-06 with model.attention.qk_norm=none",
        "=head",
    ),
    (
        attention(qk_norm="l2", qk_norm_eps=0.0),
        "model.attention.qk_norm_eps=0.0 must be a finite number",
        "1e-06",
    ),
    (
        rope(theta=5e5, skip=(True, False)) | {"positions": "none"},
        "model.rope.theta=500000.0, model.rope.skip=[true, false] with model.positions=none",
        "Set model.positions=rope, or remove them",
    ),
    (
        rope(factor=4.0, scaling="linear") | {"positions": "none"},
        "model.rope.scaling=linear, model.rope.factor=4.0 with model.positions=none: "
        "no effect, because these settings are",
        "Set model.positions=rope, or remove them",
    ),
    (
        rope(factor=4.0),
        "model.rope.factor=4.0 with model.rope.scaling=none",
        "one of linear, dynamic, llama3, yarn",
    ),
    (
        rope(scaling="linear", original_max_position=16),
        "model.rope.original_max_position=16 with",
        "dynamic, llama3",
    ),
    (
        rope(scaling="yarn", low_freq_factor=2.0, high_freq_factor=3.0),
        "model.rope.low_freq_factor=2.0, model.rope.high_freq_factor=3.0 with "
        "model.rope.scaling=yarn",
        "Set model.rope.scaling=llama3, or remove them",
    ),
    (
        rope(scaling="llama3", beta_fast=16.0, beta_slow=2.0, whole_pairs=False),
        "model.rope.beta_fast=16.0, model.rope.beta_slow=2.0, model.rope.whole_pairs=false with",
        "Set model.rope.scaling=yarn",
    ),
    (
        {"mtp": MTPConfig(loss_weight=0.3)},
        "model.mtp.loss_weight=0.3 with model.mtp.num_layers=0",
        "model.mtp.num_layers to 1 or more",
    ),
    (
        rope(scaling="yarn", theta=1.0),
        "model.rope.theta=1.0 with model.rope.scaling=yarn must be above 1",
        "10000.0",
    ),
    (
        rope(scaling="dynamic", original_max_position=16, fraction=0.4),
        "model.rope.scaling=dynamic with 2 rotary features",
        "or use 4 rotary features or more",
    ),
    (
        rope(
            scaling="longrope",
            short_factors=(1.0, 2.0),
            long_factors=(1.0, 0.5, 2.0, 4.0),
            original_max_position=16,
        ),
        "model.rope.short_factors=[1.0, 2.0], model.rope.long_factors=[1.0, 0.5, 2.0, 4.0] with "
        "model.rope.scaling=longrope",
        "must be 3 numbers, one for each rotary feature pair",
    ),
    (
        rope(
            scaling="longrope",
            short_factors=(1.0,) * 3,
            long_factors=(1.0, 0.0, 2.0),
            original_max_position=16,
        ),
        "model.rope.long_factors[1]=0.0 must be a finite number above 0",
        "Use 1",
    ),
    (
        rope(scaling="longrope", short_factors=(1.0,) * 3, long_factors=(2.0,) * 3),
        "model.rope.original_max_position=8192 and model.max_seq_len=64",
        "from 2 to 64",
    ),
    (
        rope(short_factors=(1.0,) * 3),
        "model.rope.short_factors=[1.0, 1.0, 1.0] with model.rope.scaling=none",
        "Set model.rope.scaling=longrope",
    ),
    (
        rope(skip=(True, True)),
        "model.rope.skip=[true, true] leaves every layer",
        "Set model.positions=none",
    ),
    (
        attention(window=8, window_layers=(False,)),
        "model.attention.window=8 with model.attention.window_layers=[fal",
        "to [true, false] for every other layer",
    ),
    (rope(fraction=0.0), "model.rope.fraction=0.0 must be a finite number above 0", "Use 1.0"),
    (rope(fraction=math.nan), "model.rope.fraction=nan must be a finite number above 0", "Use 1.0"),
    (rope(fraction=1.5), "model.rope.fraction=1.5 must be at most 1", "to 1 or less"),
    ({"head_dim": 5}, "model.head_dim=5 is odd", "Set model.head_dim to 6"),
    ({"head_dim": 1}, "model.head_dim=1 is odd", "Set model.head_dim to 2"),
    (
        rope(fraction=0.5),
        "model.rope.fraction=0.5 of 6 features per head is 3",
        "Set model.rope.fraction to 0.7",
    ),
    (
        rope(fraction=0.1),
        "model.rope.fraction=0.1 of 6 features per head is 0",
        "Set model.rope.fraction to 0.4",
    ),
    (
        rope(scaling="llama3", low_freq_factor=5.0),
        "model.rope.low_freq_factor=5.0 must be at most",
        "Use 1.0 and 4.0",
    ),
    (
        rope(scaling="yarn", beta_slow=33.0),
        "model.rope.beta_slow=33.0 must be at most",
        "Use 1.0 and 32.0",
    ),
    (
        rope(scaling="linear", factor=0.5),
        "model.rope.factor=0.5 with model.rope.scaling=linear must be at least 1",
        "Use 8.0",
    ),
    (
        rope(scaling="dynamic"),
        "model.rope.original_max_position=8192 and model.max_seq_len=64",
        "at most 64",
    ),
    (
        rope(attention_factor=1.2),
        "model.rope.attention_factor=1.2 with model.rope.scaling=none",
        "Set model.rope.scaling=yarn",
    ),
    (
        rope(sections=(1, 1)),
        "model.rope.sections=[1, 1] must be three counts of feature pairs with sum 3",
        "[1, 1, 1]",
    ),
    (
        attention(window=4, window_layers=(True, False, False)) | rope(skip=(False,) * 4),
        "model.attention.window_layers has 3 and model.rope.skip has 4 values for "
        "model.num_layers=2",
        "Use 2 values or fewer",
    ),
    (
        attention(window_layers=(True, False)),
        "model.attention.window_layers=[true, false] with model.attention.window=null",
        "Set model.attention.window to 4096",
    ),
    (
        {"block": "parallel_one_norm", "norm_placement": "after"},
        "model.block=parallel_one_norm with model.norm_placement=after",
        "or model.block=parallel",
    ),
    (
        {"layers": LayersConfig(ffn_hidden_size=(64, 0))},
        "model.layers.ffn_hidden_size[1]=0 must be at least 1",
        "1 or",
    ),
    (
        {"layers": LayersConfig(ffn_hidden_size=(8, 96))},
        "model.ffn_hidden_size=64 with model.layers.ffn_hidden_size=[8, 96] must be the largest",
        "Set model.ffn_hidden_size to 96",
    ),
    (
        {"layers": LayersConfig(num_kv_heads=(4, 3))},
        "model.layers.num_kv_heads=[4, 3] does not divide",
        "[1, 2, 4, 8",
    ),
    (
        latent() | {"layers": LayersConfig(num_kv_heads=(8,))},
        "model.layers.num_kv_heads=[8] with model.mla",
        "Remove model.layers.num_kv_heads",
    ),
    (
        {"layers": LayersConfig(mlp=("full", "none", "full"))},
        "model.layers.mlp has 3 values for model.num_layers=2",
        "Use 2 values or fewer",
    ),
    (
        {"layers": LayersConfig(attention=("full", "none"), mlp=("none",)), "num_layers": 3},
        "model.layers.attention=[full, none] and model.layers.mlp=[none] leave layer 1 without",
        "to full or linear",
    ),
    (
        {"layers": LayersConfig(attention=("full", "none")), "block": "parallel_one_norm"},
        "model.layers.attention=[full, none] and model.layers.mlp=[] with "
        "model.block=parallel_one_norm",
        "to sequential or parallel, or use linear",
    ),
    (
        {"embedding_init_std": -1.0},
        "model.embedding_init_std=-1.0 must be a finite number of at least 0",
        "to 0 or more",
    ),
    (
        {"init_overrides": (("*.o", -1.0),)},
        "model.init_overrides[0][1]=-1.0 must be a finite number of at",
        "to 0 or more",
    ),
    (
        {"init_overrides": (("*.mlp.*", 0.1), ("*.fc1", 0.2))},
        "model.init_overrides=[[*.mlp.*, 0.1], [*.fc1, 0.2]]: no parameter is called *.fc1",
        "as embed.weight or la",
    ),
    (
        {"mup": MuPConfig(base_hidden_size=0)},
        "model.mup.base_hidden_size=0 must be at least 1",
        "to 1 or more",
    ),
    (
        {"mup": MuPConfig(base_hidden_size=16), "init": "xavier_uniform"},
        "model.init=xavier_uniform with model.mup",
        "Set model.init=normal, or remove model.mup",
    ),
    (
        {"mup": MuPConfig(base_hidden_size=16, base_head_dim=6)} | attention(scale=0.3),
        "model.mup.base_head_dim=6 with model.attention.scale=0.3",
        "Set model.attention.scale=null",
    ),
    (
        {"gated": False, "activation_clamp": 7.0, "up_offset": 1.0},
        "model.activation_clamp=7.0, model.up_offset=1.0 with model.gated=false",
        "Set model.gated=true, or remove",
    ),
]


@pytest.mark.parametrize(
    ("changed", "problem_text", "fix"), CASES, ids=[problem_text for _, problem_text, _ in CASES]
)
def test_violated_rule_names_setting_and_valid_value(
    changed: dict[str, Any], problem_text: str, fix: str
) -> None:
    (problem,) = network_problems(replace(SOUND, **changed))
    assert problem_text in problem and fix in problem and problem.endswith("."), problem


def test_valid_models_violate_no_rule() -> None:
    assert network_problems(SOUND) == []
    assert network_problems(replace(SOUND, **latent(q_rank=8))) == []
    assert network_problems(replace(SOUND, head_dim=5, positions="none")) == []
    assert (
        network_problems(replace(SOUND, **rope(scaling="dynamic", original_max_position=64))) == []
    ), "as read"
    for name, model in VARIANTS.items():
        assert network_problems(model) == [], name


def test_all_violated_rules_are_reported_together() -> None:
    model = replace(
        SOUND, num_kv_heads=3, logit_softcap=-1.0, up_offset=1.0, gated=False, **rope(fraction=2.0)
    )
    assert len(network_problems(model)) == 4


@loop_over("head", range(2, 40))
def test_suggested_rotary_fraction_covers_whole_pairs(head: int) -> None:
    for features in range(head + 1):
        model = replace(
            SOUND, head_dim=head, rope=RopeConfig(fraction=(features + 0.5) / (head + 1))
        )
        for problem in network_problems(model):
            proposed = float(problem.split("fraction to ")[1].split(",")[0])
            assert network_problems(replace(model, rope=RopeConfig(fraction=proposed))) == [], (
                problem
            )


@pytest.mark.parametrize(
    "changed",
    [
        rope(scaling="linear", factor=0.5),
        rope(factor=2.0),
        {"init_overrides": (("nothing", 0.1),)},
        {"moe": MoEConfig(num_experts=4, top_k=1, ffn_hidden_size=6)},
    ],
)
def test_pretrained_models_are_checked_by_inference_rules_only(
    changed: Any,
) -> None:
    model = replace(SOUND, **changed)
    assert network_problems(model) and network_problems(model, trains=False) == []
    (problem,) = network_problems(replace(model, num_heads=0), trains=False)
    assert "model.num_heads=0 must be at least 1" in problem
    problems = network_problems(
        replace(model, moe=MoEConfig(num_experts=4, top_k=5, ffn_hidden_size=6)), trains=False
    )
    assert problems == [
        "model.moe.top_k=5 is more than model.moe.num_experts=4. Set model.moe.top_k to 4 or less."
    ]

"""Arguments of Megatron's checkpoints, in both directions."""

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest

from megalith.config.model import (
    AttentionConfig,
    DropoutConfig,
    LayersConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    MuPConfig,
    RopeConfig,
)
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.family import canonical
from megalith.hf.megatron_args import (
    UNSUPPORTED,
    TranslatedArgs,
    model_to_args,
    translate_args,
)

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 96,
    "max_position_embeddings": 128,
    "seq_length": 128,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "padded_vocab_size": 1024,
    "tensor_model_parallel_size": 2,
}
"""Arguments of a small Llama."""


@dataclass
class Namespace:
    """A record, as the parser of pickles returns it."""

    state: dict[str, Any] = field(default_factory=dict)


def translate(**changes: Any) -> TranslatedArgs:
    """Translate `ARGS` with changes."""
    return translate_args(Namespace(ARGS | changes))


def model_of(**changes: Any) -> ModelConfig:
    """Return the model of `ARGS` with changes."""
    return translate(**changes).require_model("iter_0000001")


def test_arguments_of_a_llama_are_its_settings() -> None:
    model = model_of()
    assert (model.num_layers, model.hidden_size, model.num_heads) == (4, 64, 8)
    assert (model.num_kv_heads, model.head_size(), model.ffn_hidden_size) == (2, 8, 96)
    assert (model.norm, model.norm_eps, model.gated, model.activation) == (
        "rms",
        1e-6,
        True,
        "silu",
    )
    assert not (model.qkv_bias or model.output_bias or model.mlp_bias or model.tied_embeddings)
    assert (model.positions, model.max_seq_len, model.vocab_size) == ("rope", 128, 1024)


def test_missing_arguments_have_the_defaults_of_megatron() -> None:
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    args = {name: ARGS[name] for name in names} | {"padded_vocab_size": 64}
    model = translate_args(args).require_model("iter_0000001")
    assert (model.norm, model.positions, model.ffn_hidden_size) == ("layer", "learned", 256)
    assert (model.num_kv_heads, model.activation, model.gated) == (8, "gelu_tanh", False)
    assert model.qkv_bias and model.output_bias and model.mlp_bias and model.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ({"add_bias_linear": True}, "output_bias", True),
        ({"disable_bias_linear": True, "add_bias_linear": None}, "output_bias", False),
        ({"add_qkv_bias": True}, "qkv_bias", True),
        ({"apply_layernorm_1p": True}, "zero_centered_gamma", True),
        ({"swiglu": False, "squared_relu": True}, "activation", "squared_relu"),
        ({"swiglu": False, "add_bias_linear": True}, "activation", "gelu_tanh"),
        (
            {"swiglu": False, "add_bias_linear": True, "bias_gelu_fusion": False},
            "activation",
            "gelu",
        ),
        ({"qk_layernorm": True}, "attention.qk_norm", "head"),
        ({"softmax_type": "learnable"}, "attention.sinks", True),
        ({"window_size": (127, 0)}, "attention.window", 128),
        ({"window_size": [15, 0], "window_attn_skip_freq": 2}, "attention.window", 16),
        ({"no_rope_freq": [0, 0, 0, 1]}, "rope.skip", (False, False, False, True)),
        ({"rotary_percent": 0.5}, "rope.fraction", 0.5),
        ({"use_rope_scaling": True, "rope_scaling_factor": 8.0}, "rope.scaling", "llama3"),
        ({"mtp_num_layers": 1}, "mtp.num_layers", 1),
        ({"encoder_num_layers": 4, "num_layers": None}, "num_layers", 4),
        ({"layernorm_epsilon": 1e-3, "norm_epsilon": None}, "norm_eps", 1e-3),
    ],
)
def test_arguments_become_settings(changes: dict[str, Any], setting: str, value: object) -> None:
    node: object = model_of(**changes)
    for name in setting.split("."):
        node = getattr(node, name)
    assert node == value


def test_arguments_of_experts_become_settings() -> None:
    model = model_of(
        num_experts=8,
        moe_ffn_hidden_size=32,
        moe_layer_freq=[0, 1, 1, 1],
        moe_router_topk=3,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.01, 0.02],
        moe_shared_expert_intermediate_size=48,
    )
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.top_k, model.moe.ffn_hidden_size) == (8, 3, 32)
    assert [model.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    assert model.moe.router.expert_bias and model.moe.shared_ffn_hidden_size == 48
    assert (model.moe.aux_loss.sequence_coeff, model.moe.aux_loss.global_batch_coeff) == (
        0.01,
        0.02,
    )


# --- vocabulary and tokenizer


@pytest.mark.parametrize(
    ("changes", "tokenizer_vocab", "expected"),
    [
        ({}, None, (1024, 1024)),
        ({}, 1000, (1000, 1024)),
        ({"vocab_size": 1001}, None, (1001, 1024)),
        ({"padded_vocab_size": None, "vocab_size": 1001}, None, (1001, 1024)),
        (
            {"padded_vocab_size": None, "vocab_size": 1001, "make_vocab_size_divisible_by": 4},
            None,
            (1001, 1008),
        ),
    ],
)
def test_padded_vocabulary_keeps_its_rows(
    changes: dict[str, Any], tokenizer_vocab: int | None, expected: tuple[int, int]
) -> None:
    translated = translate_args(ARGS | changes, tokenizer_vocab=tokenizer_vocab)
    model = translated.require_model("iter_0000001")
    assert (model.vocab_size, model.padded_vocab_size()) == expected


def test_vocabulary_above_its_rows_and_a_missing_one_are_errors() -> None:
    (problem,) = translate(vocab_size=2000).problems
    assert problem.startswith("args.vocab_size=2000 tokens need more rows than")
    (problem,) = translate(padded_vocab_size=None).problems
    assert problem.startswith("args.padded_vocab_size is missing, and so is args.vocab_size")


def test_tokenizer_is_read_or_the_reason_given() -> None:
    translated = translate(tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/t")
    assert translated.tokenizer is not None
    assert (translated.tokenizer.kind, translated.tokenizer.path) == ("huggingface", "/t")
    null = translate(tokenizer_type="NullTokenizer", vocab_size=1000).tokenizer
    assert null is not None
    assert (null.kind, null.vocab_size) == ("null", 1000)
    missing = translate()
    assert missing.model is not None and missing.tokenizer is None
    assert missing.tokenizer_problem.startswith("args.tokenizer_type=GPT2BPETokenizer has no files")


# --- progress and the run

TRAINING: dict[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "train_iters": 100,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 10,
    "weight_decay": 0.1,
    "seed": 7,
    "bf16": True,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 1000,
    "consumed_train_samples": 320,
    "consumed_valid_samples": 32,
    "skipped_train_samples": 0,
    "iteration": 15,
    "pipeline_model_parallel_size": 4,
    "save": "/checkpoints",
}


def test_training_arguments_become_a_run_without_layout_and_folders() -> None:
    translated = translate(**TRAINING)
    assert translated.run_problems == ()
    run = translated.run
    assert run is not None
    assert run.model == translated.model
    assert (run.train.steps, run.train.global_batch_size, run.seed) == (100, 16, 7)
    assert (run.schedule.lr, run.parallel.pp, run.parallel.tp) == (1e-3, 1, 1)


def test_values_that_the_training_script_computes_do_not_contradict_the_others() -> None:
    """Megatron stores both ends of a constant weight decay, and the steps of a run in samples."""
    constant = {"start_weight_decay": 0.1, "end_weight_decay": 0.1}
    run = translate(**TRAINING, **constant, weight_decay_incr_style="constant").run
    assert run is not None and run.schedule.weight_decay == 0.1
    in_samples = TRAINING | {"train_samples": 1600, "lr_decay_samples": 1600, "lr_decay_iters": 100}
    in_samples |= {"lr_warmup_samples": 160, "lr_warmup_iters": 0}
    translated = translate(**in_samples)
    assert translated.run_problems == ()
    run = translated.run
    assert run is not None and run.train.steps == 100
    fraction = translate(**TRAINING | {"lr_warmup_fraction": 0.1, "lr_warmup_iters": 80})
    assert fraction.run_problems == ()
    other = translate(**TRAINING, start_weight_decay=0.2, end_weight_decay=0.1)
    assert any("--start-weight-decay 0.2" in problem for problem in other.run_problems)


def test_progress_is_read_from_the_arguments_and_the_common_state() -> None:
    common = {"iteration": 20, "checkpoint_version": 3.0}
    progress = translate_args(ARGS | TRAINING, common=common).progress
    assert (progress.step, progress.checkpoint_version) == (20, 3.0)
    assert (progress.consumed_samples, progress.consumed_valid_samples) == (320, 32)
    assert (progress.skipped_samples, progress.global_batch_size, progress.train_steps) == (
        0,
        16,
        100,
    )
    assert progress.schedule["lr_decay_style"] == "cosine"
    wrong = translate(consumed_train_samples="many", iteration=-1).progress
    assert (wrong.step, wrong.consumed_samples) == (0, None)
    huge = translate_args(
        ARGS | TRAINING | {"train_iters": 10**400}, common={"checkpoint_version": 10**400}
    )
    assert huge.run is None and any("--train-iters" in text for text in huge.run_problems)
    assert huge.progress.checkpoint_version == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimizer", "adam_mini"),
        ("lr_decay_style", "cosine2"),
        ("tokenizer_type", "QwenTokenizer"),
        ("data_path", ["--x"]),
        ("weight_decay", "x"),
        ("clip_grad", math.nan),
    ],
)
def test_arguments_of_training_do_not_affect_the_model(name: str, value: object) -> None:
    expected = translate_args(ARGS | TRAINING)
    translated = translate_args(ARGS | TRAINING | {name: value})
    assert translated.problems == ()
    assert translated.model == expected.model
    assert any(name in text.replace("-", "_") for text in translated.run_problems)


# --- untrusted values


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_layers", "x", "args.num_layers='x': expected a whole number for --num-layers"),
        ("num_layers", 2.5, "args.num_layers=2.5: expected a whole number"),
        ("num_layers", True, "args.num_layers=True: expected a whole number"),
        ("num_layers", [4], r"args.num_layers=\[4\]: expected a whole number"),
        ("num_layers", 0, "args.num_layers=0: expected a size from 1 to"),
        ("hidden_size", -64, "args.hidden_size=-64: expected a size from 1 to"),
        ("hidden_size", 1 << 40, "args.hidden_size=1099511627776: expected a size"),
        ("padded_vocab_size", "x", "args.padded_vocab_size='x': expected"),
        ("num_experts", -1, "args.num_experts=-1: expected a size from 0 to"),
        ("norm_epsilon", math.nan, "args.norm_epsilon=nan: expected a number"),
        ("norm_epsilon", 10**400, "args.norm_epsilon=1000.*: expected a number"),
        ("num_layers", 10**400, "args.num_layers=1000"),
        ("norm_epsilon", "1", "args.norm_epsilon='1': expected a number"),
        ("swiglu", "yes", r"args.swiglu='yes': expected true or false \(--swiglu\)"),
        ("add_bias_linear", 1, "args.add_bias_linear=1: expected true or false"),
        ("normalization", object(), "args.normalization=<object object at"),
        ("normalization", "BatchNorm", "BatchNorm: Megatron has no such choice"),
        ("moe_aux_loss_coeff", ["--swiglu"], "args.moe_aux_loss_coeff="),
        ("window_size", "--swiglu", "args.window_size='--swiglu': expected text"),
    ],
)
def test_wrong_values_are_errors_that_name_the_argument(
    name: str, value: object, text: str
) -> None:
    translated = translate(**{name: value})
    assert translated.model is None and translated.run is None
    with pytest.raises(CheckpointError, match=text):
        translated.require_model("iter_0000001")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hybrid_override_pattern", "M*M*"),
        ("spec", ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]),
        ("apply_residual_connection_post_layernorm", True),
        ("heterogeneous_layers_config_path", "/a.json"),
        ("experimental_attention_variant", "gated_delta_net"),
    ],
)
def test_architectures_without_a_setting_are_errors(name: str, value: object) -> None:
    (problem,) = translate(**{name: value}).problems
    assert problem.startswith(f"args.{name}=")


def test_architectures_without_a_setting_are_ignored_if_they_have_no_effect() -> None:
    """Values of every checkpoint, and MTP settings of a model without MTP layers."""
    defaults = dict.fromkeys(name.removeprefix("--").replace("-", "_") for name in UNSUPPORTED)
    switches = ("apply_residual_connection_post_layernorm", "is_hybrid_model", "enable_gpt_oss")
    defaults |= dict.fromkeys(switches, False)
    defaults |= {"hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0}
    for number in (None, 0):
        mtp = {"mtp_num_layers": number, "mtp_use_repeated_layer": True}
        assert translate(**defaults | mtp).problems == ()
    (problem,) = translate(mtp_num_layers=2, mtp_use_repeated_layer=True).problems
    assert problem.startswith("args.mtp_use_repeated_layer=True: ")


def test_sizes_that_contradict_each_other_are_an_error() -> None:
    (problem,) = translate(num_query_groups=3).problems
    assert problem.startswith("model.num_kv_heads=3 does not divide model.num_heads=8")


def test_arguments_of_no_flag_are_listed() -> None:
    assert translate(new_option=3, other_option=False, world_size=4).unknown == ("new_option",)


def test_args_of_another_type_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="args is list, expected the arguments of Megatron"):
        translate_args([1, 2])
    assert translate_args(MappingProxyType(ARGS)).model is not None


# --- arguments of a model

LLAMA = model_of()
GELU = {"gated": False, "activation": "gelu_tanh"}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
MOE = MoEConfig(num_experts=4, ffn_hidden_size=32)
MLA = MLAConfig(kv_rank=16, q_rank=8, nope_dim=8, rope_dim=4, value_dim=8, norm_eps=1e-6)
YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_position=32)
MLA_YARN = RopeConfig(
    interleaved=True, scaling="yarn", factor=40.0, original_max_position=4096, attention_factor=1.0
)
EXPRESSIBLE = {
    "llama": LLAMA,
    "gpt": replace(LLAMA, **GELU, **BIASES, norm="layer", positions="learned"),
    "exact gelu": replace(LLAMA, gated=False, activation="gelu", num_kv_heads=8),
    "geglu": replace(LLAMA, activation="quick_gelu", activation_clamp=7.0, up_offset=1.0),
    "squared relu": replace(LLAMA, gated=False, activation="squared_relu", positions="none"),
    "qkv bias": replace(LLAMA, qkv_bias=True, zero_centered_gamma=True, tied_embeddings=True),
    "attention": replace(
        LLAMA,
        attention=AttentionConfig(
            qk_norm="head",
            sinks=True,
            gated=True,
            window=16,
            window_layers=(True, False, True, True),
        ),
    ),
    "l2": replace(LLAMA, attention=AttentionConfig(qk_norm="l2", off_by_one=True)),
    "llama3": replace(LLAMA, rope=RopeConfig(scaling="llama3", factor=4.0)),
    "linear": replace(LLAMA, rope=RopeConfig(scaling="linear", factor=2.0, interleaved=True)),
    "yarn": replace(LLAMA, rope=YARN),
    "yarn without factor": replace(LLAMA, rope=replace(YARN, attention_factor=1.0)),
    "nope": replace(LLAMA, rope=RopeConfig(skip=(False, True), fraction=0.5)),
    "mrope": replace(LLAMA, rope=RopeConfig(sections=(1, 1, 2))),
    "mla": replace(
        LLAMA, mla=MLA, head_dim=None, num_kv_heads=8, rope=RopeConfig(interleaved=True)
    ),
    "mla yarn": replace(
        LLAMA, mla=replace(MLA, yarn_mscale=1.0), head_dim=None, num_kv_heads=8, rope=MLA_YARN
    ),
    "moe": replace(LLAMA, moe=MOE),
    "deepseek": replace(
        LLAMA,
        moe=replace(
            MOE,
            layers=(False, True, True, True),
            shared_ffn_hidden_size=16,
            shared_gate=True,
            router=RouterConfig(
                score="sigmoid",
                expert_bias=True,
                num_groups=2,
                topk_groups=1,
                routed_scaling_factor=2.5,
            ),
        ),
    ),
    "moe biases": replace(
        LLAMA, **BIASES, moe=replace(MOE, biases=True, router=RouterConfig(bias=True))
    ),
    "unnormalized": replace(LLAMA, moe=replace(MOE, router=RouterConfig(norm_topk_prob=False))),
    "mtp": replace(LLAMA, mtp=MTPConfig(num_layers=2, loss_weight=0.3)),
    "heterogeneous": replace(
        LLAMA,
        layers=LayersConfig(
            attention=("full", "linear", "none"),
            mlp=("linear", "full", "full", "none"),
            num_kv_heads=(1, 2, 2, 2),
            ffn_hidden_size=(96, 96, 40),
        ),
    ),
    "mup": replace(LLAMA, mup=MuPConfig(base_hidden_size=32), logit_scale=3.0, embedding_scale=3.0),
}


@pytest.mark.parametrize("model", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
def test_arguments_of_a_model_give_the_same_model(model: ModelConfig) -> None:
    args = model_to_args(model)
    returned = translate_args(Namespace(args)).require_model("iter_0000001")
    assert replace(canonical(returned), mlp_bias=False) == replace(canonical(model), mlp_bias=False)
    assert returned.padded_vocab_size() == model.padded_vocab_size()
    plain = (str, int, float, bool, type(None), list)
    assert all(isinstance(value, plain) for value in args.values())


def test_training_settings_of_a_model_return() -> None:
    model = replace(
        LLAMA,
        dropout=DropoutConfig(attention=0.1, residual=0.2, embedding=0.2),
        init_std=0.01,
        embedding_init_std=0.5,
        moe=replace(
            MOE,
            aux_loss=AuxLossConfig(sequence_coeff=0.1, global_batch_coeff=0.2, z_loss_coeff=1e-3),
            capacity=CapacityConfig(factor=1.5, drop="last", pad=True),
            router=RouterConfig(jitter=0.1, dtype="fp64", expert_bias_update_rate=1e-2),
        ),
    )
    returned = translate_args(model_to_args(model)).require_model("iter_0000001")
    assert returned.dropout == model.dropout
    assert (returned.init_std, returned.embedding_init_std) == (0.01, 0.5)
    assert returned.moe is not None and model.moe is not None
    assert returned.moe.aux_loss == model.moe.aux_loss
    assert returned.moe.capacity == model.moe.capacity
    assert (returned.moe.router.jitter, returned.moe.router.dtype) == (0.1, "fp64")


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (replace(LLAMA, logit_softcap=30.0), "model.logit_softcap=30.0"),
        (replace(LLAMA, embedding_scale=2.0), "model.embedding_scale=2.0"),
        (replace(LLAMA, norm_placement="after"), "model.norm_placement='after'"),
        (replace(LLAMA, block="parallel"), "model.block='parallel'"),
        (replace(LLAMA, output_bias=True), "model.mlp_bias=False"),
        (replace(LLAMA, attention=AttentionConfig(qk_norm="whole")), "qk_norm='whole'"),
        (replace(LLAMA, attention=AttentionConfig(softcap=5.0)), "model.attention.softcap=5.0"),
        (replace(LLAMA, activation="relu"), "model.activation='relu'"),
    ],
)
def test_settings_that_megatron_cannot_express_are_named(model: ModelConfig, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_to_args(model)
    assert field in str(caught.value)
    assert "cannot express this setting" in str(caught.value)


ODD_VALUES = (
    "x",
    "--swiglu",
    "[" * 2000,
    "9" * 5000,
    "1" * 12,
    "$HOME",
    -1,
    0,
    1,
    2**31,
    2**70,
    1.5,
    math.nan,
    math.inf,
    True,
    [],
    [1, "x"],
    [[1]],
    {"a": 1},
    b"x",
    object(),
)
"""Values of no sensible type or range."""

MORE_ARGS = {
    "num_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_router_load_balancing_type": "aux_loss",
    "mtp_num_layers": 1,
    "window_size": (7, 0),
    "window_attn_skip_freq": 2,
    "no_rope_freq": 2,
    "heterogeneous_layers_config_encoded_json": "",
    "heterogeneous_layers_config_path": "",
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 1.0,
    "multi_latent_attention": False,
    "make_vocab_size_divisible_by": 128,
    "mup_width_mult": 1.0,
    "use_mup": False,
    "use_rope_scaling": True,
    "mrope_section": None,
    "start_weight_decay": None,
}


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: repr(value)[:12])
def test_no_value_raises_an_unexpected_error(value: object) -> None:
    args = ARGS | MORE_ARGS | TRAINING
    for name in ARGS | MORE_ARGS:
        translated = translate_args(args | {name: value})
        assert (translated.model is None) == bool(translated.problems), name
        assert all(len(problem) <= 1000 for problem in translated.problems)

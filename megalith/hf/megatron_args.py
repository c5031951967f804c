"""Arguments stored in Megatron-LM's checkpoints: the model, tokenizer and run that they describe,
and the arguments of a model that is written as such a checkpoint.

Arguments become the words of a command line, which `megalith.megatron` translates, so that a
checkpoint and a launch script with the same arguments give the same model.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megalith.config.data import TokenizerConfig
from megalith.config.fields import Plain
from megalith.config.model import EQUAL_LAYERS, LayersConfig, ModelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import differences, from_dict
from megalith.errors import CheckpointError, ConfigError, raise_all
from megalith.hf.family import canonical
from megalith.kernels.rope import attention_factor
from megalith.megatron.data import read_tokenizer_settings
from megalith.megatron.layers import LOSSES, PATH, TEXT
from megalith.megatron.model import translate_model
from megalith.megatron.parse import (
    Arguments,
    Draft,
    MegatronFlag,
    list_refused,
    parse_arguments,
    read_flag_table,
)
from megalith.megatron.stored_arguments import (
    MAX_SIZE,
    ArgumentWords,
    drop_computed_fields,
    find_unknown_fields,
    is_integer,
    read_fields,
)
from megalith.megatron.translate import translate
from megalith.rules.model import network_problems

LAYOUT_SETTINGS = ("parallel.", "kernels.", "recompute.", "offload.", "checkpoint.", "observe.")
"""Settings that do not follow a checkpoint to other machines: its layout, memory and folders."""

UNSUPPORTED = (
    "--experimental-attention-variant",
    "--linear-attention-type",
    "--apply-residual-connection-post-layernorm",
    "--enable-mhc-connections",
    "--mtp-hsm",
    "--mtp-hybrid-override-pattern",
    "--mtp-use-repeated-layer",
    "--hybrid-attention-ratio",
    "--hybrid-layer-pattern",
    "--hybrid-mlp-ratio",
    "--hybrid-override-pattern",
    "--is-hybrid-model",
    "--spec",
    "--enable-gpt-oss",
)
"""Flags without a setting that change the parameters or the forward pass."""

# --- translation


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingProgress:
    """Training progress of a checkpoint and its learning-rate schedule; unset: not stored."""

    step: int
    """Iteration of the checkpoint; 0 in a release."""

    consumed_samples: int | None
    consumed_valid_samples: int | None
    skipped_samples: int | None
    global_batch_size: int | None
    seq_length: int | None
    train_steps: int | None
    train_samples: int | None
    checkpoint_version: float
    schedule: Mapping[str, Plain]
    """Learning-rate and weight-decay arguments (`lr`, `min_lr`, `lr_decay_style`, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedArgs:
    """Model, tokenizer and run that the arguments of a checkpoint describe."""

    model: ModelConfig | None
    """None: see `problems`."""

    tokenizer: TokenizerConfig | None
    """None: the arguments name none that is supported; see `tokenizer_problem`."""

    tokenizer_problem: str
    run: TrainRun | None
    """Run with the same training settings, without layout and folders; None: see
    `run_problems`."""

    run_problems: tuple[str, ...]
    progress: TrainingProgress
    problems: tuple[str, ...]
    """Why there is no model: each names an argument."""

    notes: tuple[str, ...]
    """What a user should know about the model, such as settings that are implemented
    differently."""

    unknown: tuple[str, ...]
    """Names of arguments that are not false and that no flag of Megatron has: not used."""

    words: tuple[str, ...]
    """Words of a command line with the same arguments, without layout and folders."""

    def require_model(self, source: str) -> ModelConfig:
        """Return the model.

        Raises:
            CheckpointError: the arguments do not describe a model that can be built.
        """
        if self.model is not None:
            return self.model
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        raise CheckpointError(f"{source}: its args describe no supported model:\n{lines}")


SCHEDULE_FIELDS = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)
"""Arguments of the learning-rate and weight-decay schedule."""


def translate_args(
    args: object,
    *,
    common: Mapping[str, Any] | None = None,  # of a parsed pickle
    name: str = "megatron",
    tokenizer_vocab: int | None = None,
) -> TranslatedArgs:
    """Translate the arguments of a checkpoint.

    common: the other values of the checkpoint, such as `iteration`; tokenizer_vocab: vocabulary
    size of the tokenizer, if known. Without it and `vocab_size`, every row of the embedding is a
    token.

    Raises:
        CheckpointError: `args` is not a record of arguments. All other messages are in the result.
    """
    fields = read_fields(args)
    word_list, training_problems = _collect_words(drop_computed_fields(fields))
    problems = [*word_list.problems, *_find_unsupported(word_list)]
    vocab = _find_vocabulary(word_list, tokenizer_vocab, problems)
    arguments = parse_arguments(word_list.words)
    draft = Draft(arguments)
    translate_model(draft)
    problems += [*arguments.problems, *draft.problems, *list_refused(draft.entries, strict=False)]
    settings = {**draft.settings, **vocab}
    model = None
    if not problems:
        model = _build_model(settings, problems)
    tokenizer, tokenizer_problem = _read_tokenizer(arguments)
    run, run_problems = None, [*problems, *training_problems]
    if model is not None:
        extra = ["--vocab-size", str(model.vocab_size), "--padded-vocab-size"]
        extra.append(str(model.padded_vocab_size()))
        translation = translate([*word_list.words, *extra], name=name)
        run, run_problems = translation.run, list(translation.refusals(strict=False))
        run_problems = [*training_problems, *run_problems]
        run = run if run is None else replace(run, model=model)
    return TranslatedArgs(
        model=model,
        tokenizer=tokenizer,
        tokenizer_problem=tokenizer_problem,
        run=run,
        run_problems=tuple(f"{problem:.1000}" for problem in run_problems),
        progress=_read_progress(fields, common or {}),
        problems=tuple(f"{problem:.1000}" for problem in problems),
        notes=tuple(
            f"{entry.flag}: {entry.text}" for entry in draft.entries if entry.verdict == "explained"
        ),
        unknown=find_unknown_fields(fields),
        words=tuple(word_list.words),
    )


def _collect_words(fields: Mapping[str, Any]) -> tuple[ArgumentWords, list[str]]:
    """Return the words of all arguments of the model and its training, and the problems of those of
    training: their words are left out, because they do not affect the model."""
    word_list = ArgumentWords(fields, [], [])
    training_problems: list[str] = []
    for flag in read_flag_table():
        if not _follows_checkpoint(flag):
            continue
        if any(one.startswith("model.") for one in flag.setting):
            word_list.add(flag)
            continue
        own = ArgumentWords(fields, [], [])
        own.add(flag)
        problems = [*own.problems, *(parse_arguments(own.words).problems if own.words else ())]
        training_problems += problems
        word_list.words += [] if problems else own.words
    return word_list, training_problems


def _follows_checkpoint(flag: MegatronFlag) -> bool:
    """Return whether the argument of a flag belongs to the model or its training."""
    is_mapped = (flag.verdict, flag.program) == ("mapped", "train") and flag.type != "file"
    return is_mapped and not all(one.startswith(LAYOUT_SETTINGS) for one in flag.setting)


def _build_model(settings: Mapping[str, Plain], problems: list[str]) -> ModelConfig | None:
    """Return the model of settings; None, and problems, if they contradict each other."""
    tree: dict[str, Plain] = {}
    for path, value in settings.items():
        first, *sections = path.split(".")
        if first != "model":
            continue
        node = tree
        for section in sections[:-1]:
            node = node.setdefault(section, {})
        node[sections[-1]] = value
    try:
        model = from_dict(ModelConfig, tree)
    except ConfigError as error:
        problems.append(str(error))
        return None
    problems += network_problems(model, trains=False)
    return None if problems else model


def _find_vocabulary(
    word_list: ArgumentWords, tokenizer_vocab: int | None, problems: list[str]
) -> dict[str, Plain]:
    """Return the settings of the vocabulary; its number of tokens may be smaller than the number of
    rows."""
    sizes = {}
    for name in ("vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"):
        value = word_list.fields.get(name)
        if value is None:
            continue
        if not is_integer(value) or not 1 <= value <= MAX_SIZE:
            if not any(text.startswith(f"args.{name}=") for text in problems):
                problems.append(
                    f"args.{name}={value!r:.80}: expected a size from 1 to {MAX_SIZE}. Correct "
                    "the args."
                )
            return {}
        sizes[name] = value
    padded = sizes.get("padded_vocab_size")
    size = sizes.get("vocab_size") or tokenizer_vocab or padded
    if size is None:
        problems.append(
            "args.padded_vocab_size is missing, and so is args.vocab_size: the size of the "
            "vocabulary is not known. Pass a checkpoint that contains one of them."
        )
        return {}
    if padded is None:
        tp = word_list.fields.get("tensor_model_parallel_size")
        multiple = sizes.get("make_vocab_size_divisible_by", 128) * (tp if is_integer(tp) else 1)
        return {"model.vocab_size": size, "model.pad_vocab_to_multiple_of": multiple}
    if size > padded:
        problems.append(
            f"args.vocab_size={size} tokens need more rows than args.padded_vocab_size={padded}. "
            "Correct the args."
        )
    return {"model.vocab_size": size, "model.pad_vocab_to_multiple_of": padded}


def _find_unsupported(word_list: ArgumentWords) -> list[str]:
    """Return messages about arguments that change the model and have no setting."""
    by_name = {flag.flag: flag for flag in read_flag_table()}
    problems = []
    for name in UNSUPPORTED:
        key, value = word_list.find(name)
        requires = by_name[name].requires
        is_read = requires is None or bool(word_list.find(requires)[1])
        if is_read and value and str(value) not in ("0", "0.0"):
            reason = by_name[name].reason
            problems.append(f"args.{key}={value!r:.80}: {reason}.")
    path, text = (word_list.find(flag)[1] for flag in (PATH, TEXT))
    if path and not text:
        problems.append(
            f"args.heterogeneous_layers_config_path={path!r:.80}: the layers are described by that "
            "file, and args.heterogeneous_layers_config_encoded_json is empty. Pass a checkpoint "
            "that contains its text."
        )
        word_list.words = [word for word in word_list.words if not word.startswith(f"{PATH}=")]
    return problems


def _read_tokenizer(arguments: Arguments) -> tuple[TokenizerConfig | None, str]:
    """Return the tokenizer that the arguments name, or why there is none."""
    kind = arguments.value("--tokenizer-type")
    if kind == "NullTokenizer":
        size = arguments.value("--vocab-size")
        return TokenizerConfig(kind="null", vocab_size=size if is_integer(size) else None), ""
    settings = {name: value for name, (_, value) in read_tokenizer_settings(arguments).items()}
    if not isinstance(settings.get("path"), str):
        return None, (
            f"args.tokenizer_type={kind} has no files that are supported. Set tokenizer.path to "
            "the tokenizer's files"
        )
    if settings.get("kind") == "tiktoken" and not arguments.given("--vocab-size"):
        settings.pop("vocab_size", None)
    try:
        return from_dict(TokenizerConfig, settings), ""
    except ConfigError as error:
        return None, str(error)


def _read_progress(fields: Mapping[str, Any], common: Mapping[str, Any]) -> TrainingProgress:
    """Return the progress; values of another type than a number are unset."""

    def count(name: str) -> int | None:
        value = fields.get(name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
        return value if is_count else None

    iteration = common.get("iteration", fields.get("iteration"))
    version = common.get("checkpoint_version", fields.get("checkpoint_version", 0))
    return TrainingProgress(
        step=iteration if is_integer(iteration) and iteration >= 0 else 0,
        consumed_samples=count("consumed_train_samples"),
        consumed_valid_samples=count("consumed_valid_samples"),
        skipped_samples=count("skipped_train_samples"),
        global_batch_size=count("global_batch_size"),
        seq_length=count("seq_length"),
        train_steps=count("train_iters"),
        train_samples=count("train_samples"),
        checkpoint_version=_read_version(version),
        schedule={
            name: value
            for name in SCHEDULE_FIELDS
            if isinstance(value := fields.get(name), str | int | float)
        },
    )


def _read_version(version: object) -> float:
    """Return the checkpoint version; 0 if it is none."""
    is_version = isinstance(version, int | float) and 0 <= version < 1 << 31
    return float(version) if is_version else 0.0  # type: ignore[arg-type]  # checked above


# --- arguments of a model


def model_to_args(model: ModelConfig) -> dict[str, Plain]:
    """Return the arguments of a model, as Megatron-LM's training script stores them.

    Sizes of the embedding are those of our padded vocabulary.

    Raises:
        ConfigError: Megatron's arguments cannot express some settings; each is named.
    """
    args: dict[str, Plain] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "group_query_attention": model.mla is None and model.num_kv_heads != model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_size(),
        "ffn_hidden_size": model.ffn_hidden_size,
        "max_position_embeddings": model.max_seq_len,
        "seq_length": model.max_seq_len,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size(),
        "make_vocab_size_divisible_by": model.pad_vocab_to_multiple_of,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "apply_layernorm_1p": model.zero_centered_gamma,
        "fp32_residual_connection": model.fp32_residual,
        "attention_dropout": model.dropout.attention,
        "hidden_dropout": model.dropout.residual,
        "init_method_std": model.init_std,
        "embedding_init_method_std": model.embedding_init_std,
        "init_method_xavier_uniform": model.init == "xavier_uniform",
        "mtp_num_layers": model.mtp.num_layers or None,
        "mtp_loss_scaling_factor": model.mtp.loss_weight,
    }
    args |= _mlp_args(model) | _attention_args(model) | _position_args(model) | _moe_args(model)
    args |= _mup_args(model) | _block_args(model)
    check_model_is_expressed(args, model)
    return args


def check_model_is_expressed(args: Mapping[str, Plain], model: ModelConfig) -> None:
    """Check that the arguments describe this model.

    Raises:
        ConfigError: some settings differ; each is named.
    """
    translated = translate_args(args)
    if translated.model is None:
        raise_all([f"convert --to megatron: {problem}" for problem in translated.problems])
        return
    changes = differences(_canonical(translated.model), _canonical(model))
    raise_all(
        [
            f"model.{field}={value!r}: the arguments of Megatron-LM cannot express this setting; "
            f"it would be {stored!r}. Keep the model as a Megalith checkpoint."
            for field, stored, value in changes
        ]
    )


def _canonical(model: ModelConfig) -> ModelConfig:
    """Return the canonical form of a model: without biases of MLPs that it does not have, and with
    the sizes of each layer."""
    moe = model.moe
    has_mlp = moe is None or moe.shared_ffn_hidden_size or not _has_experts_everywhere(model)
    layers = EQUAL_LAYERS
    if model.layers != EQUAL_LAYERS:
        sizes = [model.at(layer) for layer in range(model.num_layers)]
        attention = tuple(model.attention_part(layer) for layer in range(model.num_layers))
        mlp = tuple(model.mlp_part(layer) for layer in range(model.num_layers))
        layers = LayersConfig(
            attention=attention,
            mlp=mlp,
            num_kv_heads=tuple(
                own.num_kv_heads if part == "full" else model.num_kv_heads
                for own, part in zip(sizes, attention, strict=True)
            ),
            ffn_hidden_size=tuple(
                own.ffn_hidden_size if part == "full" else model.ffn_hidden_size
                for own, part in zip(sizes, mlp, strict=True)
            ),
        )
    mlp_bias = model.mlp_bias and bool(has_mlp)
    return canonical(replace(model, mlp_bias=mlp_bias, layers=layers))


def _has_experts_everywhere(model: ModelConfig) -> bool:
    """Return whether every layer has experts in place of an MLP."""
    return all(model.has_experts(layer) for layer in range(model.num_layers))


def _mlp_args(model: ModelConfig) -> dict[str, Plain]:
    """Return the activation, and biases of all linear layers."""
    all_biases = model.output_bias or model.mlp_bias or bool(model.moe and model.moe.biases)
    return {
        "swiglu": model.gated and model.activation == "silu",
        "quick_geglu": model.gated and model.activation == "quick_gelu",
        "squared_relu": not model.gated and model.activation == "squared_relu",
        "bias_gelu_fusion": all_biases and model.activation == "gelu_tanh",
        "activation_func_clamp_value": model.activation_clamp,
        "glu_linear_offset": model.up_offset,
        "add_bias_linear": all_biases,
        "add_qkv_bias": model.qkv_bias,
    }


def _block_args(model: ModelConfig) -> dict[str, Plain]:
    """Return the block configs of layers that differ; Megatron reads the text if both arguments
    are set."""
    if model.layers == EQUAL_LAYERS:
        return {}
    blocks = []
    for layer in range(model.num_layers):
        sizes = model.at(layer)
        attention, mlp = model.attention_part(layer), model.mlp_part(layer)
        num_groups = sizes.num_kv_heads if attention == "full" else None
        ffn_size = sizes.ffn_hidden_size if mlp == "full" else None
        blocks.append(
            {
                "attention": {**_write_part(attention), "num_query_groups": num_groups},
                "mlp": {**_write_part(mlp), "ffn_hidden_size": ffn_size},
            }
        )
    return {
        "heterogeneous_layers_config_path": "block_configs.json",
        "heterogeneous_layers_config_encoded_json": json.dumps({"block_configs": blocks}),
    }


def _write_part(part: str) -> dict[str, bool]:
    return {"no_op": part == "none", "replace_with_linear": part == "linear"}


def _attention_args(model: ModelConfig) -> dict[str, Plain]:
    """Return scores, masks, norms and gates of attention."""
    attention, mla = model.attention, model.mla
    softmax = "learnable" if attention.sinks else "vanilla"
    args: dict[str, Plain] = {
        "softmax_type": "off-by-one" if attention.off_by_one else softmax,
        "qk_layernorm": attention.qk_norm == "head" if mla is None else mla.norms,
        "qk_l2_norm": attention.qk_norm == "l2",
        "attention_output_gate": attention.gated,
        "multi_latent_attention": mla is not None,
    }
    if attention.window is not None:
        windows = [int(model.has_window(layer)) for layer in range(model.num_layers)]
        args["window_size"] = [attention.window - 1, 0]
        if not all(windows):
            args["window_attn_skip_freq"] = windows
    if mla is not None:
        args |= {
            "kv_lora_rank": mla.kv_rank,
            "q_lora_rank": mla.q_rank,
            "qk_head_dim": mla.nope_dim,
            "qk_pos_emb_head_dim": mla.rope_dim,
            "v_head_dim": mla.value_dim,
        }
    return args


def _position_args(model: ModelConfig) -> dict[str, Plain]:
    """Return the positions, and the context extension of rotary ones."""
    rope = model.rope
    if model.positions != "rope":
        kind = "learned_absolute" if model.positions == "learned" else "none"
        return {"position_embedding_type": kind}
    args: dict[str, Plain] = {
        "position_embedding_type": "mrope" if rope.sections else "rope",
        "rotary_base": rope.theta,
        "rotary_percent": rope.fraction,
        "rotary_interleaved": rope.interleaved and model.mla is None,
        "use_rope_scaling": rope.scaling == "llama3",
        "mrope_section": list(rope.sections) or None,
    }
    if rope.scaling == "llama3":
        args["rope_scaling_factor"] = rope.factor
    if rope.scaling == "linear":
        args["rotary_seq_len_interpolation_factor"] = rope.factor
    layers_without_rope = [int(not model.uses_rope(layer)) for layer in range(model.num_layers)]
    if any(layers_without_rope):
        args["no_rope_freq"] = layers_without_rope
    if model.mla is not None:
        args["rope_type"] = "yarn" if rope.scaling == "yarn" else "rope"
    if rope.scaling == "yarn":
        args |= _yarn_args(model)
    return args


def _yarn_args(model: ModelConfig) -> dict[str, Plain]:
    """Return the arguments of YaRN: Megatron multiplies rotated features by g(mscale) /
    g(mscale_all_dim), where g(m) is 0.1 m ln(factor) + 1, and scores of MLA by g(mscale_all_dim)
    squared."""
    rope, mla = model.rope, model.mla
    all_dim = 0.0 if mla is None or mla.yarn_mscale is None else mla.yarn_mscale
    slope = 0.1 * math.log(rope.factor) if rope.factor > 1 else 0.0
    mscale = (attention_factor(rope) * (slope * all_dim + 1) - 1) / slope if slope else 1.0
    args: dict[str, Plain] = {
        "rotary_scaling_factor": rope.factor,
        "mscale": round(mscale, 12),
        "mscale_all_dim": all_dim,
    }
    if mla is None:
        args |= {
            "position_embedding_type": "yarn",
            "yarn_original_max_position_embeddings": rope.original_max_position,
            "yarn_beta_fast": rope.beta_fast,
            "yarn_beta_slow": rope.beta_slow,
            "yarn_correction_range_round_to_int": rope.whole_pairs,
        }
    return args


def _moe_args(model: ModelConfig) -> dict[str, Plain]:
    """Return experts, router and aux losses."""
    moe = model.moe
    if moe is None:
        return {"num_experts": None}
    router, losses = moe.router, moe.aux_loss
    has_experts = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    coeffs = {name: getattr(losses, setting) for name, setting in LOSSES.items()}
    used = {name: value for name, value in coeffs.items() if value} or {"aux_loss": 0.0}
    kinds: list[Plain] = list(used)
    if losses.sinkhorn or losses.quantile:
        kinds = ["sinkhorn" if losses.sinkhorn else "quantile_balancing"]
    score = "sqrtsoftplus" if router.score == "sqrt_softplus" else router.score
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": 1 if all(has_experts) else list(has_experts),
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_latent_size": moe.latent_size,
        "moe_apply_probs_on_input": moe.apply_router_weight_on_input,
        "moe_router_score_function": score,
        "moe_router_pre_softmax": router.score == "softmax" and not router.norm_topk_prob,
        "moe_router_topk_scaling_factor": None
        if router.routed_scaling_factor == 1
        else router.routed_scaling_factor,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.topk_groups,
        "moe_router_dtype": None if router.dtype == "model" else router.dtype,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": router.expert_bias_update_rate,
        "moe_router_load_balancing_type": kinds[0] if len(kinds) == 1 else kinds,
        "moe_aux_loss_coeff": next(iter(used.values())) if len(used) == 1 else list(used.values()),
        "moe_router_quantile_balancing_ema": losses.quantile_ema,
        "moe_z_loss_coeff": losses.z_loss_coeff or None,
        "moe_input_jitter_eps": router.jitter or None,
        "moe_expert_capacity_factor": moe.capacity.factor,
        "moe_token_drop_policy": "position" if moe.capacity.drop == "last" else "probs",
        "moe_pad_expert_input_to_capacity": moe.capacity.pad,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _mup_args(model: ModelConfig) -> dict[str, Plain]:
    """Return muP, and the factors that Megatron has only with muP."""
    if model.mup is None:
        return {"use_mup": False}
    mup = model.mup
    return {
        "use_mup": True,
        "mup_base_hidden_size": mup.base_hidden_size,
        "mup_base_head_dim": mup.base_head_dim,
        "mup_attn_scale_power": mup.attention_scale_power,
        "mup_embedding_mult": model.embedding_scale,
        "mup_output_mult": 1.0
        if model.logit_scale == 1
        else model.logit_scale / model.width_factor(),
    }

"""Fields of config.json: a reader that rejects unknown fields, and the table entries that map
fields to settings in both directions.

A family (`hf/families.py`) lists its entries; those that several families share are here.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megalith.config.model import Activation, ModelConfig, RopeConfig
from megalith.errors import raise_all

T = TypeVar("T")

FIELDS_WITHOUT_EFFECT = frozenset(
    (
        "architectures",
        "model_type",
        "transformers_version",
        "name_or_path",
        "torch_dtype",
        "dtype",
        "use_cache",
        "tokenizer_class",
        "prefix",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "output_scores",
        "return_dict_in_generate",
        "torchscript",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "remove_invalid_values",
        "suppress_tokens",
        "begin_suppress_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "exponential_decay_length_penalty",
        "is_llama_config",
        "unsloth_fixed",
        "unsloth_version",
        "transformers.js_config",
        "pretraining_tp",
        "cache_implementation",
        "gradient_checkpointing",
        "auto_map",  # checked when the family is selected
    )
)
"""Fields that do not change the forward pass. pretraining_tp only changes the order of the sums in
a matmul."""

ALLOWED_FALSE = frozenset(
    (
        "is_encoder_decoder",
        "is_decoder",
        "add_cross_attention",
        "tie_encoder_decoder",
        "use_bfloat16",
        "tf_legacy_loss",
        "attention_bias",
        "qkv_bias",
        "mlp_bias",
        "lm_head_bias",
        "use_qk_norm",
        "qk_layernorm",
        "use_sliding_window",
        "use_mrope",
        "use_bidirectional_attention",
        "output_router_logits",
        "rope_interleaved",
    )
)
"""Fields that may be false in any family. Unknown fields are rejected even if false, because they
may be on by default."""

ACTIVATIONS: Mapping[object, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Hugging Face activation -> Megalith activation; of several names the first is written."""


class Fields:
    """Reader of the fields of a config.json; fields that are not read are rejected unless they have
    no effect.

    Every method returns a value of the right type; problems are collected in `problems` and raised
    by `raise_problems`. `defaults`: the family's values of missing fields, which take precedence
    over those of table entries.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],  # JSON
        defaults: Mapping[str, Any] | None = None,  # JSON
    ) -> None:
        self.raw, self.defaults, self.problems = raw, defaults or {}, list[str]()
        self._asked = set(FIELDS_WITHOUT_EFFECT)
        self.require("chunk_size_feed_forward", 0)
        self.require("pruned_heads", {})
        self.require("is_causal", True)

    def read_int(self, name: str, default: int | None = None) -> int:
        """Return a whole number above 0; with a default, the field may be missing or null."""
        if default is None and name not in self.raw:
            self.problems.append(
                f"{name} is missing, expected a whole number. Use the config.json that came with "
                "the weights."
            )
        elif default is None and self.raw[name] is None:
            self.problems.append(f"{name}=None: expected a whole number above 0.")
        return self.read_optional_int(name) or default or 1

    def read_optional_int(self, name: str) -> int | None:
        """Return a whole number above 0, or None if the field is missing or null."""
        value = self.read_value(name)
        if value is None or (type(value) is int and value > 0):
            return value
        self.problems.append(f"{name}={value!r}: expected a whole number above 0.")
        return None

    def read_number(self, name: str, default: float, *, zero: bool = False) -> float:
        """Return a number above 0, or at least 0 with `zero`; `default` if the field is missing."""
        if name not in self.raw:
            return default
        value = self.read_value(name)
        if type(value) in (int, float) and (value > 0 or (zero and value == 0)):
            return float(value)
        self.problems.append(
            f"{name}={value!r}: expected a number {'of at least' if zero else 'above'} 0."
        )
        return default

    def read_number_from_zero(self, name: str, default: float) -> float:
        """Return a number of at least 0; `default` if the field is missing."""
        return self.read_number(name, default, zero=True)

    def read_int_or_null(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number above 0, None if the field is null, or `default` if it is
        missing."""
        return self.read_optional_int(name) if name in self.raw else default

    def read_optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a number above 0, None if the field is null, or `default` if it is missing."""
        if self.read_value(name) is None:
            return None if name in self.raw else default
        return self.read_number(name, 1.0)

    def read_flag(self, name: str, default: bool = False) -> bool:
        """Return true or false; null and a missing field give the default."""
        value = self.read_value(name)
        if value is None:
            return default
        if value not in (True, False):
            self.problems.append(f"{name}={value!r}: expected true or false.")
        return bool(value)

    def read_choice(self, name: str, choices: Mapping[object, T], default: object) -> T:
        """Return the value of one of the allowed words; null and a missing field mean the word
        `default`."""
        value = self.read_value(name)
        value = default if value is None else value
        if isinstance(value, str | int | float | bool) and value in choices:
            return choices[value]
        expected = ", ".join(map(repr, choices))
        self.problems.append(
            f"{name}={value!r:.60} is not supported: it must be one of {expected}."
        )
        return next(iter(choices.values()))

    def read_activation(self, name: str = "hidden_act", default: str = "silu") -> Activation:
        """Return the activation of the MLP."""
        return self.read_choice(name, ACTIVATIONS, default)

    def require(self, name: str, *allowed: object) -> None:
        """Report a problem if the field has a value that is neither allowed nor null."""
        value = self.read_value(name)
        if value is not None and value not in allowed:
            self.problems.append(
                f"{name}={value!r:.60} is not supported: it must be {allowed[0]!r}."
            )

    def read_layer_flags(
        self, name: str, layers: int, words: Mapping[object, bool]
    ) -> tuple[bool, ...] | None:
        """Return a flag for each layer from a list of words, or None if the field is missing or
        null."""
        value = self.read_value(name)
        if value is None:
            return None
        is_valid = isinstance(value, list) and all(
            isinstance(word, str | int) and word in words for word in value
        )
        if not is_valid or len(value) < layers:
            expected = " or ".join(map(repr, words))
            self.problems.append(
                f"{name}={value!r:.90}: expected {expected} for each of {layers} layers."
            )
            return None
        return tuple(words[word] for word in value[:layers])

    def read_value(self, name: str) -> Any:  # JSON
        """Return the unchecked value of a field, or None if it is missing."""
        self._asked.add(name)
        return self.raw.get(name)

    def ignore(self, *names: str) -> None:
        """Accept fields that do not change the forward pass or that repeat other fields."""
        self._asked.update(names)

    def raise_problems(self) -> None:
        """Raise an error if any problem was found.

        Raises:
            ConfigError: fields are missing, of the wrong type, unknown or not supported; all of
                them are reported together.
        """
        for name, value in self.raw.items():
            # A null field is treated as missing.
            known = (
                name in self._asked
                or name.startswith("_")
                or (value is False and name in ALLOWED_FALSE)
            )
            if known or value is None:
                continue
            if name == "quantization_config":
                self.problems.append(
                    f"{name}={value!r:.60}: quantized weights are not supported here. "
                    "Use the model's bf16 weights, or save them with transformers' "
                    "dequantize() first."
                )
            else:
                self.problems.append(
                    f"{name}={value!r:.60}: unknown field, which may change what the model "
                    "computes. "
                    f"Remove it from config.json if it does not."
                )
        raise_all(list(dict.fromkeys(self.problems)))


# --- entries of the table of families


Settings = dict[str, Any]
"""Dotted setting of ModelConfig -> value. Any: the type depends on the setting."""


@dataclass(frozen=True, slots=True)
class ConfigField:
    """A field of config.json with the value of one setting, or of several settings that are equal.

    `read_value` is a method of Fields, called with the name and the default; `decode` converts the
    field's value to the setting's, and `encode` returns the field's value for a model.
    """

    name: str
    setting: str | tuple[str, ...]
    read_value: Callable[[Fields, str, Any], Any]
    default: Any = None  # JSON; None: the field is required, or null by default
    decode: Callable[[Any], Any] | None = None
    encode: Callable[[ModelConfig], Any] | None = None

    def read(self, fields: Fields, settings: Settings) -> Settings:
        """Return the settings that the field determines."""
        value = self.read_value(fields, self.name, fields.defaults.get(self.name, self.default))
        names = (self.setting,) if isinstance(self.setting, str) else self.setting
        return dict.fromkeys(names, self.decode(value) if self.decode else value)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the field with its value for a model."""
        if self.encode is not None:
            return {self.name: self.encode(config)}
        setting = self.setting if isinstance(self.setting, str) else self.setting[0]
        return {self.name: read_setting(config, setting)}


def read_nothing(fields: Fields, settings: Settings) -> Settings:
    """Return no settings: for fields that are only written."""
    return {}


@dataclass(frozen=True, slots=True)
class FieldGroup:
    """Fields of config.json that are converted together.

    `read` returns settings, given the reader and the settings read before; `write` returns the
    fields of a model.
    """

    name: str
    read: Callable[[Fields, Settings], Settings]
    write: Callable[[ModelConfig], dict[str, Any]]


FieldSpec = ConfigField | FieldGroup


def constant(name: str, value: object) -> FieldGroup:
    """Return an entry that writes one value and reads nothing."""
    return FieldGroup(name, read_nothing, lambda config: {name: value})


def read_setting(config: object, setting: str) -> Any:  # of the setting's type
    """Return the value of a dotted setting, or None if its section is unset."""
    for name in setting.split("."):
        config = None if config is None else getattr(config, name)
    return config


# --- names of fields in messages

HF_FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn_hidden_size": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    "init_std": ("initializer_range",),
    "attention.window": ("sliding_window", "attention_chunk_size"),
    "rope.theta": ("rope_theta", "rotary_emb_base"),
    "rope.fraction": ("partial_rotary_factor", "rotary_pct"),
    "rope.scaling": ("rope_type", "type"),
    "rope.factor": ("factor",),
    "rope.original_max_position": ("original_max_position_embeddings",),
    "rope.low_freq_factor": ("low_freq_factor",),
    "rope.high_freq_factor": ("high_freq_factor",),
    "rope.beta_fast": ("beta_fast",),
    "rope.beta_slow": ("beta_slow",),
    "rope.attention_factor": ("attention_factor",),
    "rope.short_factors": ("short_factor",),
    "rope.long_factors": ("long_factor",),
    "mla.kv_rank": ("kv_lora_rank",),
    "mla.q_rank": ("q_lora_rank",),
    "mla.nope_dim": ("qk_nope_head_dim",),
    "mla.rope_dim": ("qk_rope_head_dim",),
    "mla.value_dim": ("v_head_dim",),
    "moe.num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.ffn_hidden_size": ("moe_intermediate_size", "intermediate_size"),
    "moe.router.num_groups": ("n_group",),
    "moe.router.topk_groups": ("topk_group",),
    "moe.router.routed_scaling_factor": ("routed_scaling_factor",),
    "moe.router.norm_topk_prob": ("norm_topk_prob",),
}
"""Field of ModelConfig with the same value as a Hugging Face field -> the names of that field."""

SECTIONS = ("rope_parameters", "rope_scaling")
"""Fields that contain a mapping with fields of rotary embeddings."""


def translate_field_names(text: str, raw: Mapping[str, Any]) -> str:
    """Replace names of settings in a message by the names of the fields in a config.json.

    >>> text = "model.moe.top_k=9 is more than model.moe.num_experts=8."
    >>> translate_field_names(text, {"num_experts": 8})
    'num_experts_per_tok=9 is more than num_experts=8.'
    """
    return re.sub(
        r"\bmodel\.([a-z_]+(?:\.[a-z_]+)*)",
        lambda match: _translate_field_name(match[0], match[1], raw),
        text,
    )


def _translate_field_name(text: str, setting: str, raw: Mapping[str, Any]) -> str:
    names = HF_FIELD_NAMES.get(setting, (text,))
    sections = [section for section in SECTIONS if isinstance(raw.get(section), Mapping)]
    present = [name for name in names if name in raw]
    present += [
        f"{section}.{name}" for section in sections for name in names if name in raw[section]
    ]
    return present[0] if present else names[0]


def hf_activation_name(activation: Activation) -> str:
    """Return the Hugging Face name of an activation."""
    return next(str(hf_name) for hf_name, name in ACTIVATIONS.items() if name == activation)


# --- fields of config.json that several families share: those of Llama, rotary embeddings, and
# layers with a sliding window
#
# Rotary embeddings are read in the format of transformers 4 or 5, and written in both.

# --- fields of Llama, which most families share


def activation_field(name: str, default: str) -> ConfigField:
    """Return the entry of the activation of the MLP."""
    return ConfigField(
        name,
        "activation",
        Fields.read_activation,
        default,
        encode=lambda config: hf_activation_name(config.activation),
    )


def _read_kv_heads(fields: Fields, settings: Settings) -> Settings:
    """A null field means num_attention_heads, a missing one the family's default."""
    name, heads = "num_key_value_heads", settings["num_heads"]
    default = heads if name in fields.raw else fields.defaults.get(name, heads)
    return {"num_kv_heads": fields.read_int(name, default)}


def _read_head_dim(fields: Fields, settings: Settings) -> Settings:
    """Unset: hidden_size / num_attention_heads."""
    head_dim = fields.read_optional_int("head_dim") or fields.defaults.get("head_dim")
    is_standard = head_dim is None or head_dim * settings["num_heads"] == settings["hidden_size"]
    return {"head_dim": None if is_standard else head_dim}


def _read_rope(fields: Fields, settings: Settings) -> Settings:
    theta = fields.defaults.get("rope_theta", 10_000.0)
    return {"rope": read_rope(fields, max_position=settings["max_seq_len"], theta=theta)}


ARCHITECTURE = FieldGroup("architectures", read_nothing, lambda config: {})
"""Place of `architectures` and `model_type`, which the family writes."""

ATTENTION_BIAS = ConfigField(
    "attention_bias",
    ("qkv_bias", "output_bias"),
    Fields.read_flag,
    False,
    encode=lambda config: config.qkv_bias or config.output_bias,
)
"""One field for the biases of queries, keys, values and output; missing ones are exported as
zeros."""

SIZES = (
    ConfigField("vocab_size", "vocab_size", Fields.read_int),
    ConfigField("hidden_size", "hidden_size", Fields.read_int),
    ConfigField("intermediate_size", "ffn_hidden_size", Fields.read_int),
    ConfigField("num_hidden_layers", "num_layers", Fields.read_int),
    ConfigField("num_attention_heads", "num_heads", Fields.read_int),
)
"""Sizes that every config.json must have."""

KV_HEADS = FieldGroup(
    "num_key_value_heads",
    _read_kv_heads,
    lambda config: {"num_key_value_heads": config.num_kv_heads},
)
HEAD_DIM = FieldGroup("head_dim", _read_head_dim, lambda config: {"head_dim": config.head_size()})
MAX_POSITION = ConfigField("max_position_embeddings", "max_seq_len", Fields.read_int, 2048)
NORM_EPS = ConfigField("rms_norm_eps", "norm_eps", Fields.read_number, 1e-6)
INIT_STD = ConfigField("initializer_range", "init_std", Fields.read_number_from_zero, 0.02)
ACTIVATION = activation_field("hidden_act", "silu")
TIED = ConfigField("tie_word_embeddings", "tied_embeddings", Fields.read_flag, False)
ATTENTION_DROPOUT = ConfigField(
    "attention_dropout", "dropout.attention", Fields.read_number_from_zero, 0.0
)
ROPE = FieldGroup("rope", _read_rope, lambda config: write_rope(config.rope))
USE_CACHE = constant("use_cache", True)

LLAMA_FIELDS: tuple[FieldSpec, ...] = (
    ATTENTION_BIAS,
    ARCHITECTURE,
    *SIZES,
    KV_HEADS,
    HEAD_DIM,
    MAX_POSITION,
    NORM_EPS,
    INIT_STD,
    ACTIVATION,
    TIED,
    ATTENTION_DROPOUT,
    ROPE,
    USE_CACHE,
)

# --- other fields that several families share

MLP_BIAS = ConfigField("mlp_bias", "mlp_bias", Fields.read_flag, False)
SLIDING_WINDOW = ConfigField("sliding_window", "attention.window", Fields.read_int_or_null)


def llama_fields(
    *entries: FieldSpec, without: Collection[str] = (), activation: str = "hidden_act"
) -> tuple[FieldSpec, ...]:
    """Return the fields of Llama, changed and extended by `entries`.

    An entry with the name of a field of Llama replaces it; the others follow. `without`: fields of
    Llama that the family does not have; `activation`: name of that field.
    """
    changed = {entry.name: entry for entry in entries}
    if activation != ACTIVATION.name:
        changed[ACTIVATION.name] = activation_field(activation, "gelu_pytorch_tanh")
    names = [entry.name for entry in LLAMA_FIELDS]
    return (
        *(changed.get(entry.name, entry) for entry in LLAMA_FIELDS if entry.name not in without),
        *(entry for entry in entries if entry.name not in names),
    )


# --- layers with a sliding window

SLIDING, FULL = "sliding_attention", "full_attention"
SWITCH_REMEDY = ", or use_sliding_window to true and sliding_window to a number of tokens"
SIZE_REMEDY = ", or sliding_window to a number of tokens"


def read_windows(
    fields: Fields, settings: Settings, default: Sequence[bool], *, remedy: str = ""
) -> Settings:
    """Return the sliding-window settings: the layers of layer_types or, if that is missing,
    `default` have the window `attention.window`.

    Sliding layers without a window are reported as a problem: some attention backends of
    transformers fail for them and others ignore the window. `remedy` is a further suggestion for
    the message.
    """
    layers, window = settings["num_layers"], settings["attention.window"]
    layer_types = fields.read_layer_flags("layer_types", layers, {SLIDING: True, FULL: False})
    sliding_layers = tuple(default) if layer_types is None else layer_types
    if window is None and any(sliding_layers):
        names = ("use_sliding_window", "sliding_window")
        values = " and ".join(
            f"{name}={fields.raw[name]!r}" for name in names if name in fields.raw
        )
        fields.problems.append(
            f"layer_types has {SLIDING!r} for {sum(sliding_layers)} of {layers} layers"
            f"{' by default' if layer_types is None else ''}, and "
            f"{values or f'{names[0]} and {names[1]} are missing'}, so no window size is set. "
            "Set layer_types to "
            f"{FULL!r} for every layer{remedy}."
        )
    arguments = window_arguments(window, shortest_pattern(sliding_layers))
    return {f"attention.{name}": value for name, value in arguments.items()}


def write_windows(config: ModelConfig) -> list[str]:
    """Return layer_types: the kind of attention of each layer."""
    return [SLIDING if config.has_window(layer) else FULL for layer in range(config.num_layers)]


def _read_switched_window(fields: Fields, settings: Settings) -> Settings:
    window = fields.read_int_or_null("sliding_window", fields.defaults.get("sliding_window"))
    return {"attention.window": window if fields.read_flag("use_sliding_window") else None}


SWITCHED_WINDOW = FieldGroup(
    "sliding_window",
    _read_switched_window,
    lambda config: {
        "use_sliding_window": config.attention.window is not None,
        "sliding_window": config.attention.window,
    },
)
"""A sliding window that use_sliding_window must switch on."""


def layer_types(
    default: Callable[[Fields, Settings], Sequence[bool]], remedy: str = SIZE_REMEDY
) -> FieldGroup:
    """Return the entry of layer_types; `default` returns which layers have a window if it is
    missing."""
    return FieldGroup(
        "layer_types",
        lambda fields, settings: read_windows(
            fields, settings, default(fields, settings), remedy=remedy
        ),
        lambda config: {"layer_types": write_windows(config)},
    )


def every_other_layer(fields: Fields, settings: Settings) -> list[bool]:
    """Return true for every other layer, from the first."""
    return [layer % 2 == 0 for layer in range(settings["num_layers"])]


def _read_qwen_windows(fields: Fields, settings: Settings) -> Settings:
    """Return the sliding-window settings of Qwen: use_sliding_window, sliding_window,
    max_window_layers and layer_types.

    max_window_layers is the number of bottom layers without a window, contrary to its name and to
    older documentation.
    """
    first = (
        0
        if fields.read_value("max_window_layers") == 0
        else fields.read_optional_int("max_window_layers")
    )
    first = 28 if first is None else first
    window = _read_switched_window(fields, settings)["attention.window"]
    default = [window is not None and layer >= first for layer in range(settings["num_layers"])]
    return read_windows(
        fields, settings | {"attention.window": window}, default, remedy=SWITCH_REMEDY
    )


def _write_qwen_windows(config: ModelConfig) -> dict[str, Any]:
    first = next(
        (layer for layer in range(config.num_layers) if config.has_window(layer)), config.num_layers
    )
    return {
        "use_sliding_window": first < config.num_layers,
        "sliding_window": config.attention.window if first < config.num_layers else None,
        "max_window_layers": first,  # the only field that transformers before 4.53 reads
        "layer_types": write_windows(config),
    }


QWEN_WINDOWS = FieldGroup("sliding_window", _read_qwen_windows, _write_qwen_windows)


def shortest_pattern(flags: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the shortest pattern whose repetition gives `flags`.

    >>> shortest_pattern((True, False, True, False, True))
    (True, False)
    """
    return next(
        flags[:n]
        for n in range(1, len(flags) + 1)
        if all(flag == flags[i % n] for i, flag in enumerate(flags))
    )


def window_arguments(window: int | None, layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return the sliding-window arguments of AttentionConfig; no window if no layer has it."""
    if window is None or not any(layers):
        return {"window": None, "window_layers": ()}
    return {"window": window, "window_layers": () if all(layers) else layers}


# --- rotary embeddings

LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""llama3 scaling: Hugging Face field -> RopeConfig field; all are required."""

YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "whole_pairs",
    "attention_factor": "attention_factor",
}
"""yarn: Hugging Face field -> RopeConfig field; mscale and mscale_all_dim also determine
attention_factor."""

LONGROPE_KEYS = {
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "original_max_position_embeddings": "original_max_position",
    "factor": "factor",
    "attention_factor": "attention_factor",
}
"""longrope: Hugging Face field -> RopeConfig field; factor defaults to the context length over the
original one."""

WANTED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": tuple(LLAMA3_KEYS),
    "yarn": ("factor",),
    "longrope": tuple(LONGROPE_KEYS)[:3],
}
"""Kind of scaling -> required fields."""

ALLOWED = {kind: frozenset(wanted) for kind, wanted in WANTED.items()} | {
    "yarn": frozenset((*YARN_KEYS, "mscale", "mscale_all_dim")),
    "longrope": frozenset(LONGROPE_KEYS),
    # Models that had another scaling before keep their original context length.
    "dynamic": frozenset(("factor", "original_max_position_embeddings")),
}
"""Kind of scaling -> allowed fields."""


def read_rope(
    fields: Fields,
    *,
    max_position: int,
    theta: float = 10_000.0,
    theta_name: str = "rope_theta",
    fraction: float | None = None,
    fraction_name: str = "partial_rotary_factor",
    layer: str | None = None,
    scaled: bool = True,
) -> RopeConfig:
    """Return the RopeConfig from `rope_theta` and `rope_scaling` (transformers 4) or
    `rope_parameters` (5).

    `theta` and `fraction` are defaults; without `fraction` the family rotates all features.
    `layer`: the kind of layer, if rope_parameters has a mapping for each; `scaled`: whether
    `rope_scaling` applies to that kind.
    """
    old, new = _mappings(fields, layer, scaled)
    outer = {
        "rope_theta": fields.read_value(theta_name),
        "partial_rotary_factor": fields.read_value(fraction_name),
    }
    mappings = [
        {key: value for key, value in mapping.items() if value is not None}
        for mapping in (outer, old, new)
    ]
    kinds = {
        str(mapping.get("rope_type", mapping.get("type", "default")))
        for mapping in (old, new)
        if mapping
    }
    values: dict[str, Any] = {}
    has_conflict = len(kinds) > 1
    for mapping in mappings:
        has_conflict |= any(
            key in values and values[key] != value
            for key, value in mapping.items()
            if key not in KIND
        )
        values |= {key: value for key, value in mapping.items() if key not in KIND}
    if has_conflict:
        fields.problems.append(
            f"{theta_name}={outer['rope_theta']}, rope_scaling={dict(old)} and "
            f"rope_parameters={dict(new)} disagree. "
            f"Remove the wrong ones."
        )
        return RopeConfig()
    if fraction is None and values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    kind = kinds.pop() if kinds else "default"
    base: dict[str, Any] = {"theta": values.pop("rope_theta", theta)}
    if fraction is not None:
        base["fraction"] = values.pop("partial_rotary_factor", fraction)
    if not _is_valid(kind, values) or not _above_zero(base) or base.get("fraction", 1) > 1:
        fields.problems.append(_describe_problem(kind, values, base))
        return RopeConfig()
    numbers: dict[str, Any] = {name: float(value) for name, value in base.items()}
    return RopeConfig(**numbers, **_scaling(kind, values, max_position))


KIND = ("rope_type", "type")


def _mappings(
    fields: Fields, layer: str | None, scaled: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return rope_scaling and rope_parameters, the latter for one kind of layer."""
    mappings: list[Mapping[str, Any]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.read_value(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            fields.problems.append(f"{name}={value!r}: expected a mapping, or null.")
            value = {}
        if layer is not None and layer in value:
            value = value[layer] if isinstance(value[layer], Mapping) else {}
        elif name == "rope_scaling" and not scaled:
            value = {}
        mappings.append(value)
    return mappings[0], mappings[1]


PER_PAIR = ("short_factor", "long_factor")


def _is_valid(kind: str, values: Mapping[str, Any]) -> bool:
    """Return whether the values are valid for the kind of scaling."""
    if (
        kind not in WANTED
        or not set(WANTED[kind]) <= values.keys()
        or not values.keys() <= ALLOWED[kind]
    ):
        return False
    is_length_int = type(values.get("original_max_position_embeddings", 1)) is int
    not_scalars = ("truncate", "mscale", "mscale_all_dim", *PER_PAIR)
    numbers = {name: value for name, value in values.items() if name not in not_scalars}
    pairs = [values[name] for name in PER_PAIR if name in values]
    if not all(
        isinstance(factors, Sequence)
        and _above_zero({str(i): factor for i, factor in enumerate(factors)})
        for factors in pairs
    ):
        return False
    are_mscales_numbers = all(
        type(values.get(name, 0)) in (int, float) for name in ("mscale", "mscale_all_dim")
    )
    return (
        is_length_int
        and are_mscales_numbers
        and type(values.get("truncate", True)) is bool
        and _above_zero(numbers)
    )


def _above_zero(values: Mapping[str, Any]) -> bool:
    return all(type(value) in (int, float) and value > 0 for value in values.values())


def _describe_problem(kind: str, values: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    hf_names = {"theta": "rope_theta", "fraction": "partial_rotary_factor"}
    shown = dict(values) | {hf_names[name]: value for name, value in base.items()}
    return (
        f"rotary positions of rope_type={kind!r} with {shown!s:.200} are not supported: rope_type "
        "must be 'default' with only rope_theta, 'linear' or 'dynamic' with factor, "
        "'yarn' with factor and its optional fields, "
        f"'llama3' with {', '.join(LLAMA3_KEYS)}, or 'longrope' with "
        f"{', '.join(WANTED['longrope'])}."
    )


def _scaling(kind: str, values: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Return the fields of RopeConfig for a kind of scaling."""
    match kind:
        case "linear":
            return {"scaling": kind, "factor": float(values["factor"])}
        # transformers scales beyond max_position_embeddings, whatever the original length is
        case "dynamic":
            return {
                "scaling": kind,
                "factor": float(values["factor"]),
                "original_max_position": max_position,
            }
        case "llama3":
            numbers = {ours: float(values[hf_name]) for hf_name, ours in LLAMA3_KEYS.items()}
            return {
                "scaling": kind,
                **numbers,
                "original_max_position": values["original_max_position_embeddings"],
            }
        case "yarn":
            ours = {
                ours: values[hf_name] for hf_name, ours in YARN_KEYS.items() if hf_name in values
            }
            return {
                "scaling": kind,
                "original_max_position": max_position,
                **ours,
                **_attention_factor(values),
            }
        case "longrope":
            ours = {
                ours: values[hf_name]
                for hf_name, ours in LONGROPE_KEYS.items()
                if hf_name in values
            }
            ours |= {
                name: tuple(map(float, ours[name])) for name in ("short_factors", "long_factors")
            }
            return {"scaling": kind, "factor": max_position / ours["original_max_position"], **ours}
        case _:
            return {}


def _attention_factor(values: Mapping[str, Any]) -> dict[str, float]:
    """Return attention_factor of yarn from mscale and mscale_all_dim, if both are given.

    transformers ignores one without the other, unlike the original code.
    """
    if "attention_factor" in values or not (values.get("mscale") and values.get("mscale_all_dim")):
        return {}
    log_factor = math.log(max(float(values["factor"]), 1.0))
    return {
        "attention_factor": (0.1 * values["mscale"] * log_factor + 1)
        / (0.1 * values["mscale_all_dim"] * log_factor + 1)
    }


def write_rope(rope: RopeConfig, *, fraction: bool = False) -> dict[str, Any]:
    """Return the fields for transformers 4 and 5. `fraction`: for families that rotate a part of
    the features."""
    kind, values = rope_values(rope)
    part = {"partial_rotary_factor": rope.fraction} if fraction else {}
    return {
        "rope_theta": rope.theta,
        **part,
        "rope_scaling": {"rope_type": kind, **values} if values else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **part, **values},
    }


def rope_values(rope: RopeConfig) -> tuple[str, dict[str, Any]]:
    """Return rope_type and its other fields."""
    match rope.scaling:
        case "none":
            return "default", {}
        case "linear" | "dynamic":
            return rope.scaling, {"factor": rope.factor}
        case "llama3":
            return rope.scaling, {
                hf_name: getattr(rope, name) for hf_name, name in LLAMA3_KEYS.items()
            }
        case "yarn":
            values = {hf_name: getattr(rope, name) for hf_name, name in YARN_KEYS.items()}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }
        case "longrope":
            values = {hf_name: getattr(rope, name) for hf_name, name in LONGROPE_KEYS.items()}
            values |= {name: list(values[name]) for name in PER_PAIR}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }

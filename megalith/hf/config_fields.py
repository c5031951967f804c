"""Fields of config.json: a reader that rejects unknown fields, and the table entries that map
fields to settings in both directions.

A family (`hf/families.py`) lists its entries; those of several families are in
`hf/shared_fields.py`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megalith.config.model import Activation, ModelConfig
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

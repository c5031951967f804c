"""A Hugging Face architecture as one row of a table (`hf/families.py`), which reads and writes its
config.json and maps its tensors.

A model is exported only if reading its config.json back gives the same model.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megalith.config.model import (
    AttentionConfig,
    DropoutConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.tree import differences
from megalith.errors import ConfigError, raise_all
from megalith.hf.config_fields import (
    ARCHITECTURE,
    Fields,
    FieldSpec,
    Settings,
    rope_values,
    shortest_pattern,
    window_arguments,
)
from megalith.hf.tensor_rules import (
    HEAD,
    ROTARY_BUFFERS,
    TensorRule,
    TensorTable,
    build_copy_rules,
    build_rules,
)
from megalith.kernels.rope import attention_factor


@dataclass(frozen=True, slots=True)
class WrapperFamily:
    """A multimodal architecture that contains a supported text model; its other parts are not
    read."""

    architecture: str
    """Name in `architectures` of config.json."""

    model_type: str
    """model_type, used for configs without `architectures`."""

    section: str
    """Field of config.json that contains the config of the text model."""

    prefix: str
    """Prefix of the tensor names of the text model."""

    others: re.Pattern[str]
    """Names of the tensors that are not read."""


def keep_config(config: ModelConfig, names: Collection[str] = ()) -> ModelConfig:
    """Return the config unchanged."""
    return config


def keep_fields(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a config.json unchanged."""
    return raw


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """A Hugging Face architecture: how its config and tensors are read and written."""

    architecture: str
    """Name in `architectures` of config.json."""

    model_type: str
    """model_type, used for configs without `architectures`."""

    fields: tuple[FieldSpec, ...]
    """Fields of config.json, in the order in which they are written."""

    tensors: TensorTable
    """Tensors of the published files."""

    fused_tensors: TensorTable | None = None
    """Tensors with fused experts, as in transformers 5; None: no experts, or no such format."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # JSON
    """Values of missing fields in transformers, where they differ from those of the entries."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # of each setting's type
    """Settings that all models of the family have; a function returns the value from the settings
    that were read."""

    required: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # JSON
    """Fields of which only some values are supported; the first one is suggested."""

    ignored: tuple[str, ...] = ()
    """Fields that do not change the forward pass, or repeat others."""

    normalize_fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = keep_fields
    """Return a config.json with old or ambiguous fields replaced."""

    check_fields: Callable[[Fields, Settings], None] | None = None
    """Report problems that several fields have together."""

    export_checks: tuple[Callable[[ModelConfig, str], str | None], ...] = ()
    """Return the problem that prevents the export of a model, given the architecture's name."""

    normalize_model: Callable[[ModelConfig], ModelConfig] = keep_config
    """Return an equal model with the settings that reading its config.json gives."""

    ignored_tensors: re.Pattern[str] = ROTARY_BUFFERS
    """Tensors without parameters in old files."""

    head: str = HEAD
    """The head tensor, which files of models with tied embeddings may contain or omit."""

    prefix: str = ""
    """Prefix of most tensor names, which some files omit."""

    in_transformers: bool = True
    """Whether `from_pretrained` loads exported folders without custom code."""

    wrapper: WrapperFamily | None = None
    """A multimodal architecture whose folders can be read as this one; never written."""

    adjust_config: Callable[[ModelConfig, Collection[str]], ModelConfig] = keep_config
    """Correct a config by the tensors that the folder contains."""

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        """Return the ModelConfig of a config.json.

        Raises:
            ConfigError: fields are missing, of the wrong type, unknown or not supported; all of
                them are reported together.
        """
        fields = Fields(self.normalize_fields(raw), self.defaults)
        settings: Settings = {}
        for entry in self.fields:
            settings |= entry.read(fields, settings)
        for name, allowed in self.required.items():
            fields.require(name, *allowed)
        fields.ignore(*self.ignored)
        if self.check_fields is not None:
            self.check_fields(fields, settings)
        fields.raise_problems()
        for name, value in self.settings.items():
            settings[name] = value(settings) if callable(value) else value
        return build_model_config(settings)

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """Return the config.json of a model, readable by transformers 4 and 5.

        Raises:
            ConfigError: the family cannot express the model.
        """
        for check in self.export_checks:
            if problem := check(config, self.architecture):
                raise ConfigError(problem)
        raw: dict[str, Any] = {}
        for entry in self.fields:
            if entry is ARCHITECTURE:
                raw |= {"architectures": [self.architecture], "model_type": self.model_type}
            raw |= entry.write(config)
        check_all_fields_exported(raw, self.normalize_model(config), self)
        return raw

    def rules(self, config: ModelConfig, *, fused: bool = False) -> list[TensorRule]:
        """Return the rules of all tensors, in the order of the forward pass; `fused`: with fused
        experts, if the family has that format."""
        return build_rules(
            self.fused_tensors if fused and self.fused_tensors else self.tensors, config
        )

    def copies(self, config: ModelConfig) -> list[TensorRule]:
        """Return the rules of tensors that repeat a parameter: optional when reading, always
        written."""
        return build_copy_rules(self.tensors, config)

    def select_rules(self, config: ModelConfig, names: Collection[str]) -> list[TensorRule]:
        """Return the rules of a folder, which depend on whether its expert tensors are fused."""
        fused = any(name.endswith(".experts.gate_up_proj") for name in names)
        return self.rules(config, fused=fused)


SECTIONS: Mapping[str, type] = {
    "attention": AttentionConfig,
    "dropout": DropoutConfig,
    "mla": MLAConfig,
    "moe": MoEConfig,
    "moe.aux_loss": AuxLossConfig,
    "moe.router": RouterConfig,
    "mtp": MTPConfig,
}
"""Sections of ModelConfig that are built from their settings."""


def build_model_config(settings: Settings) -> ModelConfig:
    """Return the ModelConfig with dotted settings; settings of a section follow the section if it
    is given as a whole (`rope`)."""
    return ModelConfig(**_build_sections(settings, ""))


def _build_sections(settings: Settings, prefix: str) -> Settings:
    """Return the arguments of a section's class."""
    arguments: Settings = {}
    for name, value in settings.items():
        if not name.startswith(prefix):
            continue
        first, _, rest = name.removeprefix(prefix).partition(".")
        section = prefix + first
        if not rest:
            arguments[first] = value
        elif first not in arguments:
            arguments[first] = SECTIONS[section](**_build_sections(settings, f"{section}."))
        elif section not in SECTIONS:
            arguments[first] = replace(arguments[first], **{rest: value})
    return arguments


# --- check that every setting is exported


def check_head_sizes(config: ModelConfig, architecture: str) -> str | None:
    """Return a problem if the number of heads does not divide hidden_size, which transformers
    requires in most families."""
    if config.hidden_size % config.num_heads == 0:
        return None
    return (
        f"model.hidden_size={config.hidden_size} is not a multiple of "
        f"model.num_heads={config.num_heads}, which transformers does not support for this "
        f"family. Keep the model as a Megalith checkpoint."
    )


class UnexportedFieldsError(ConfigError):
    """Settings of a model that cannot be expressed in the config.json of a family."""

    def __init__(self, text: str, settings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.settings = tuple(settings)


def check_all_fields_exported(
    raw: Mapping[str, Any],  # JSON
    config: ModelConfig,
    family: Family,
) -> None:
    """Check that reading the exported config.json `raw` gives the same model.

    Raises:
        UnexportedFieldsError: some settings cannot be expressed; each is named.
    """
    if (biases := raw.get("attention_bias")) is not None:  # one field for all four biases
        config = replace(config, qkv_bias=biases, output_bias=biases)
    changes = differences(canonical(family.read_config(raw)), canonical(config))
    try:
        raise_all(
            [
                f"model.{field}={value!r}: {family.architecture} cannot express this setting; it "
                f"would be exported as {exported!r}. Keep the model as a Megalith checkpoint."
                for field, exported, value in changes
            ]
        )
    except ConfigError as error:
        raise UnexportedFieldsError(str(error), [field for field, _, _ in changes]) from None


def canonical(config: ModelConfig) -> ModelConfig:
    """Return the canonical form of a config: equal configs compute the same outside of training.

    Settings without effect get their default values, and patterns are as short as possible.
    """
    head_dim, attention, rope = config.head_size(), config.attention, RopeConfig()
    windows = tuple(config.has_window(layer) for layer in range(config.num_layers))
    window = window_arguments(attention.window, shortest_pattern(windows))
    if config.positions == "rope":
        layers_without_rope = shortest_pattern(
            tuple(not config.uses_rope(layer) for layer in range(config.num_layers))
        )
        rope = canonical_rope(
            config.rope,
            windows=any(windows),
            skip=layers_without_rope if any(layers_without_rope) else (),
        )
    scale = head_dim**-0.5 if attention.scale is None and config.mla is None else attention.scale
    layers_with_qk_norm = tuple(
        config.at(layer).attention.qk_norm != "none" for layer in range(config.num_layers)
    )
    attention = replace(
        attention,
        qk_norm=attention.qk_norm if any(layers_with_qk_norm) else "none",
        chunked=attention.chunked and any(windows),
        qk_norm_layers=shortest_pattern(layers_with_qk_norm)
        if any(layers_with_qk_norm) and not all(layers_with_qk_norm)
        else (),
    )
    qk_norm_eps = (
        attention.qk_norm_eps
        if attention.qk_norm != "none" and attention.qk_norm_eps != config.norm_eps
        else None
    )
    scale = scale and float(f"{scale:.12g}")
    result = replace(
        config,
        pad_vocab_to_multiple_of=1,
        dropout=DropoutConfig(),
        rope=rope,
        attention=replace(attention, qk_norm_eps=qk_norm_eps, scale=scale, **window),
        logit_scale=float(f"{config.logit_scale:.12g}"),
        mtp=MTPConfig(num_layers=config.mtp.num_layers),
        init="normal",
        embedding_init_std=None,
        init_overrides=(),
        fp32_residual=False,
    )
    result = canonical_experts(result)
    if config.mla is not None:
        return replace(result, head_dim=None, num_kv_heads=config.num_heads)
    return replace(result, head_dim=head_dim)


def canonical_rope(rope: RopeConfig, *, windows: bool, skip: tuple[bool, ...]) -> RopeConfig:
    """Return `rope` with defaults for all settings that its scaling does not use."""
    kind, values = rope_values(rope)
    settings: dict[str, Any] = {
        "scaling": rope.scaling,
        "theta": rope.theta,
        "fraction": rope.fraction,
        "interleaved": rope.interleaved,
        "sections": rope.sections,
        "skip": skip,
    }
    if windows and (rope.local_theta != rope.theta or values):
        settings["local_theta"] = rope.local_theta
    if skip and rope.skip_growth:
        settings |= {"skip_growth": rope.skip_growth, "skip_step": rope.skip_step}
    used_names = ["factor"] if values else []
    if kind in ("dynamic", "llama3", "yarn", "longrope"):
        used_names.append("original_max_position")
    if kind == "llama3":
        used_names += ["low_freq_factor", "high_freq_factor"]
    if kind == "yarn":
        used_names += ["beta_fast", "beta_slow", "whole_pairs"]
        settings["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    if kind == "longrope":
        used_names = ["original_max_position", "short_factors", "long_factors"]
        settings["attention_factor"] = float(f"{attention_factor(rope):.12g}")
    return RopeConfig(**settings, **{name: getattr(rope, name) for name in used_names})


def canonical_experts(config: ModelConfig) -> ModelConfig:
    """Return a config whose expert settings have canonical form: equal settings compute the same
    outside of training."""
    moe = config.moe
    flags = tuple(config.has_experts(layer) for layer in range(config.num_layers))
    if moe is None or not any(flags):
        return replace(config, moe=None)
    router = replace(
        moe.router,
        dtype="fp32",
        jitter=0.0,
        force_load_balancing=False,
        force_biased=0.0,
        expert_bias_update_rate=1e-3,
    )
    # The offsets of quantile balancing also select experts outside of training.
    aux_loss = AuxLossConfig(quantile=moe.aux_loss.quantile)
    canonical_moe = replace(
        moe,
        layers=() if all(flags) else flags,
        aux_loss=aux_loss,
        capacity=CapacityConfig(),
        router=router,
    )
    return replace(
        config,
        moe=canonical_moe,
        ffn_hidden_size=moe.ffn_hidden_size if all(flags) else config.ffn_hidden_size,
    )

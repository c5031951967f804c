"""Hugging Face format of Phi-3 and Phi-4: Llama with fused projections and a sliding window in all
layers.

Long-context variants scale each rotary frequency by a factor (longrope), and by another one in
documents longer than the original context. Source: Abdin et al. 2024, arXiv:2404.14219.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.hf.config_fields import (
    HEAD,
    NORMS,
    ROTARY_BUFFERS,
    check_all_fields_exported,
    check_head_sizes,
    read_common_fields,
    write_common_fields,
)
from megalith.hf.fields import Fields
from megalith.hf.rope import KIND, PER_PAIR, read_rope, write_rope
from megalith.hf.tensor_rules import Family, TensorRule, piece, rule


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the ModelConfig of a config.json.

    Raises:
        ConfigError: fields are missing, of the wrong type, unknown or not supported; all of them
            are reported together.
    """
    fields = Fields(_normalize_longrope(raw))
    common_fields = read_common_fields(fields, max_seq_len=4096, norm_eps=1e-5, switch=False)
    rope = read_rope(fields, max_position=common_fields["max_seq_len"], fraction=1.0)
    if rope.scaling not in ("none", "longrope"):  # transformers rejects all others
        fields.problems.append(
            f"rotary positions with rope_type={rope.scaling!r} are not supported in Phi-3: "
            f"rope_type must be 'default' or 'longrope'."
        )
    window = fields.read_optional_int("sliding_window")
    embedding, residual = (
        fields.read_number("embd_pdrop", 0.0, zero=True),
        fields.read_number("resid_pdrop", 0.0, zero=True),
    )
    common_fields["dropout"] = replace(
        common_fields["dropout"], embedding=embedding, residual=residual
    )
    fields.require("attention_bias", False)
    fields.ignore("original_max_position_embeddings")
    fields.require("full_attn_mod", 1)
    fields.require("lm_head_bias", False)
    fields.require("interpolate_factor", 1)
    fields.raise_problems()
    return ModelConfig(**common_fields, rope=rope, attention=AttentionConfig(window=window))


def _normalize_longrope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with current names of longrope, and the original context length beside its
    factors."""
    config = dict(raw)
    original_length = {name: raw[name] for name in (ROWS,) if name in raw}
    for section in ("rope_scaling", "rope_parameters"):
        mapping = config.get(section)
        if isinstance(mapping, Mapping) and "short_factor" in mapping:
            names = {name: "longrope" for name in KIND if mapping.get(name) in ("su", "yarn")}
            config[section] = original_length | dict(mapping) | names
    return config


ROWS = "original_max_position_embeddings"


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of a model, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be expressed as Phi-3.
    """
    check_head_sizes(config)
    raw = {
        **write_common_fields(config, PHI3, switch=False),
        **_write_rope(config.rope),
        "sliding_window": config.attention.window,
        ROWS: config.rope.original_max_position
        if config.rope.scaling == "longrope"
        else config.max_seq_len,
        "embd_pdrop": config.dropout.embedding,
        "resid_pdrop": config.dropout.residual,
    }
    return check_all_fields_exported(raw, config, read_config, PHI3)


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the fields of rotary embeddings; for longrope rope_scaling has only the factors, as
    transformers 4 requires."""
    written = write_rope(rope, fraction=True)
    if rope.scaling == "longrope":
        written["rope_scaling"] = {
            "type": "longrope",
            **{name: written["rope_scaling"][name] for name in PER_PAIR},
        }
        for name in ("factor", "attention_factor"):  # derived from the context lengths
            written["rope_parameters"].pop(name, None)
    return written


def rules(config: ModelConfig) -> list[TensorRule]:
    """Return the tensor rules, in the order of the forward pass."""
    v, h, f = config.vocab_size, config.hidden_size, config.ffn_hidden_size
    rules = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        hf_layer, layer_name = f"model.layers.{layer}", f"layers.{layer}"
        norms = {
            name: rule(
                f"{hf_layer}.{NORMS[name]}.weight", f"{layer_name}.{name}.weight", (h,), shape=(h,)
            )
            for name in NORMS
        }
        rules += [
            norms["attention_norm"],
            *_attention_rules(config, f"{hf_layer}.self_attn", f"{layer_name}.attention"),
        ]
        rules += [
            norms["mlp_norm"],
            rule(
                f"{hf_layer}.mlp.gate_up_proj.weight",
                f"{layer_name}.mlp.gate_up",
                (2, f, h),
                shape=(2 * f, h),
            ),
            rule(
                f"{hf_layer}.mlp.down_proj.weight", f"{layer_name}.mlp.down", (h, f), shape=(h, f)
            ),
        ]
    rules.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        rules.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return rules


def _attention_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """qkv_proj [(n + 2 g) d, h]: all queries, then all keys, then all values."""
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()
    name, view, rest = f"{hf_name}.qkv_proj.weight", (n + 2 * g, d, h), ((0, d), (0, h))
    shape = (view[0] * d, h)
    kv_rules = [
        piece(
            name,
            f"{parameter}.kv",
            ((part, part + 1), (0, g), *rest),
            shape=shape,
            view=view,
            at=((n + part * g, n + (part + 1) * g), *rest),
            dims=(None, 0, 1, 2),
        )
        for part in range(2)
    ]
    return [
        piece(name, f"{parameter}.q", ((0, n), *rest), shape=shape, view=view, at=((0, n), *rest)),
        *kv_rules,
        rule(f"{hf_name}.o_proj.weight", f"{parameter}.o", (h, n, d), shape=(h, n * d)),
    ]


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

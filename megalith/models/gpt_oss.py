"""gpt-oss as Hugging Face knows it, as far as it is dense: attention with sinks, windows in every other layer, biases,
yarn, and the clamped gate of its experts. The experts themselves are refused by name.

Source: OpenAI 2025, arXiv:2508.10925.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.errors import raise_all
from megalith.models.fields import Fields
from megalith.models.names import Family, TensorRule, rule
from megalith.models.rope import read_rope
from megalith.models.usual import HEAD, NORMS, ROTARY_BUFFERS, attention_rules, read_usual, read_windows, windowed

OF_EXPERTS = ("num_experts_per_tok", "experts_per_token", "router_aux_loss_coef", "output_router_logits", "num_experts")
"""Fields about the experts beside their number."""


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: always, since every model of this family has experts; with whatever else is wrong.
    """
    fields = Fields(raw)
    found = read_dense(fields)
    fields.problems.append(
        f"num_local_experts={raw.get('num_local_experts', 128)!r}: layers with a mixture of experts are not supported "
        f"yet. Use a dense model, such as one of Qwen3ForCausalLM."
    )
    fields.finish()
    return found


def read_dense(fields: Fields) -> ModelConfig:
    """Everything but the experts, each of which is an MLP of the kind that is given here."""
    usual = read_usual(fields, max_seq_len=131_072, norm_eps=1e-5, head_dim=64, switch=False)
    layers = usual["num_layers"]
    fields.only("hidden_act", "silu")  # which is not what the experts compute, whatever the config says
    fields.only("swiglu_alpha", 1.702)
    windows = read_windows(fields, layers, [layer % 2 == 0 for layer in range(layers)])
    biases = fields.flag("attention_bias", True)
    fields.value("num_local_experts")
    fields.ignore("initial_context_length", *OF_EXPERTS)
    return ModelConfig(
        **usual | {"activation": "quick_gelu"},
        rope=_read_rope(fields, usual["max_seq_len"]),
        attention=AttentionConfig(sinks=True, **windowed(fields.whole("sliding_window", 128), windows)),
        activation_clamp=fields.number("swiglu_limit", 7.0),
        up_offset=1.0,
        qkv_bias=biases,
        output_bias=biases,
        mlp_bias=True,
    )


def _read_rope(fields: Fields, length: int) -> RopeConfig:
    """Rotary positions; a config that says nothing means those of the release."""
    if fields.raw.get("rope_parameters") is None and fields.raw.get("rope_scaling") is None:
        theta = fields.number("rope_theta", 150_000.0)
        return RopeConfig(theta=theta, scaling="yarn", factor=32.0, original_max_position=4096, whole_pairs=False)
    return read_rope(fields, max_position=length, theta=150_000.0)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Refuse any model: one without experts is none of this family.

    Raises:
        ConfigError: always.
    """
    raise_all(
        [
            f"a model of {config.num_layers} dense layers cannot be a GptOssForCausalLM, all of whose layers have a "
            f"mixture of experts. Use a Megalith checkpoint for this model."
        ]
    )
    return {}


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of theirs that is not of a router or of experts, in the order of the forward pass."""
    v, h, n = config.vocab_size, config.hidden_size, config.num_heads
    found = [rule("model.embed_tokens.weight", "embed.weight", (v, h), shape=(v, h))]
    for layer in range(config.num_layers):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        found += [
            rule(f"{theirs}.{NORMS['attention_norm']}.weight", f"{ours}.attention_norm.weight", (h,), shape=(h,)),
            *attention_rules(config, f"{theirs}.self_attn", f"{ours}.attention", all_biases=True),
            rule(f"{theirs}.self_attn.sinks", f"{ours}.attention.sinks", (n,), shape=(n,)),
            rule(f"{theirs}.{NORMS['mlp_norm']}.weight", f"{ours}.mlp_norm.weight", (h,), shape=(h,)),
        ]
    found.append(rule("model.norm.weight", "norm.weight", (h,), shape=(h,)))
    if not config.tied_embeddings:
        found.append(rule(HEAD, "head.weight", (v, h), shape=(v, h)))
    return found


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

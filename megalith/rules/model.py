"""Rules of the model config: numbers out of range, and settings that conflict."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase

from megalith.config.fields import range_problems
from megalith.config.model import AttentionConfig, CrossConfig, LayersConfig, ModelConfig
from megalith.plan.grid import divisors
from megalith.plan.parameters import held_parameters
from megalith.rules.moe import moe_problems
from megalith.rules.no_effect import shown, unread_problems

# Rules of cross-layer attention: which layers attend to the source layer, and unsupported
# combinations.


def cross_problems(model: ModelConfig) -> list[str]:
    """Return one error text for each broken rule of cross-layer attention."""
    if model.cross is None:
        return []
    return [*_pattern_problems(model.cross, model.num_layers)] or [
        *_kind_problems(model, model.cross)
    ]


def _pattern_problems(own: CrossConfig, num_layers: int) -> Iterator[str]:
    if not 0 <= own.memory < num_layers:
        yield (
            f"model.cross.memory={own.memory} must be from 0 to {num_layers - 1}: later layers "
            f"attend to it, and model.num_layers={num_layers}. Set model.cross.memory to "
            f"{num_layers // 2}."
        )
        return
    later = num_layers - own.memory
    if len(own.layers) > later:
        yield (
            f"model.cross.layers has {len(own.layers)} values for the {later} layers from "
            "model.cross.memory="
            f"{own.memory} on: the rest would have no effect. Use {later} values or fewer."
        )
    elif own.layers and not any(own.layers):
        yield (
            f"model.cross.layers={shown(own.layers)}: no layer attends to the source layer. Remove "
            "model.cross, or set "
            f"model.cross.layers to [true, false] for every other layer."
        )


def _kind_problems(model: ModelConfig, own: CrossConfig) -> Iterator[str]:
    given = f"model.cross.memory={own.memory}"
    if model.block != "sequential":
        yield (
            f"{given} with model.block={model.block}: a layer attends to the source layer after "
            "its "
            "attention and before its "
            f"MLP. Set model.block=sequential, or remove model.cross."
        )
    if model.mla is not None:
        yield (
            f"{given} with model.mla.kv_rank={model.mla.kv_rank}: cross attention has keys and "
            "values per head. Remove "
            f"model.mla, or model.cross."
        )
    if model.mtp.num_layers > 0:
        yield (
            f"{given} with model.mtp.num_layers={model.mtp.num_layers}: MTP layers "
            "read other tokens "
            "than the source layer. Set model.mtp.num_layers=0, or remove model.cross."
        )
    incomplete_layers = [
        layer
        for layer in range(own.memory, model.num_layers)
        if model.uses_cross_layer_source(layer)
        and "none" in (model.attention_part(layer), model.mlp_part(layer))
    ]
    if incomplete_layers:
        yield (
            f"{given} with model.layers.attention={shown(model.layers.attention)} and "
            "model.layers.mlp="
            f"{shown(model.layers.mlp)}: layer {incomplete_layers[0]} attends to the source "
            "layer and has no "
            "attention or MLP. Set both "
            f"to full or linear there, or set its value in model.cross.layers to false."
        )


Rule = Callable[[ModelConfig], str | None]


def network_problems(model: ModelConfig, *, trains: bool = True) -> list[str]:
    """Return an error text for each broken rule; rules across settings are checked only if all
    counts are positive.

    `trains=False`: for a pretrained model, only the rules that inference needs.
    """
    counts = range_problems(model, "model", kinds=(int,))
    related = [] if counts else relation_problems(model, trains=trains)
    return counts + related + range_problems(model, "model", kinds=(float,))


def relation_problems(model: ModelConfig, *, trains: bool = True) -> list[str]:
    """Return the errors of rules across settings, for positive counts; `trains` as in
    `network_problems`."""
    rules = RULES if trains else [rule for rule in RULES if rule not in OF_TRAINING]
    broken = [text for rule in rules if (text := rule(model)) is not None]
    unread = unread_problems(model) if trains else []
    return unread + broken + moe_problems(model, trains=trains) + cross_problems(model)


# --- heads


def check_kv_heads_divide_heads(model: ModelConfig) -> str | None:
    """Check that num_kv_heads divides num_heads."""
    heads, keys = model.num_heads, model.num_kv_heads
    if model.mla is not None or heads % keys == 0:
        return None
    fits = divisors(heads)
    return (
        f"model.num_kv_heads={keys} does not divide model.num_heads={heads}: every KV head "
        "serves equally many "
        f"query heads. Set model.num_kv_heads to one of {fits}."
    )


def check_head_dim(model: ModelConfig) -> str | None:
    """Check that num_heads divides hidden_size if head_dim is not set."""
    hidden, heads = model.hidden_size, model.num_heads
    if model.mla is not None or model.head_dim is not None or hidden % heads == 0:
        return None
    below = hidden // heads * heads
    return (
        f"model.hidden_size={hidden} is not a multiple of model.num_heads={heads}. Set "
        "model.hidden_size to "
        f"{below or heads} or {below + heads}, or set model.head_dim."
    )


def check_whole_qk_norm_is_rms(model: ModelConfig) -> str | None:
    """Check that qk_norm=whole is used with RMSNorm: means over the heads of all ranks are not
    computed."""
    if model.attention.qk_norm != "whole" or model.norm == "rms":
        return None
    return (
        f"model.attention.qk_norm={model.attention.qk_norm} with model.norm={model.norm}: QK "
        "norms "
        "over all heads "
        "support RMSNorm only. Set model.attention.qk_norm=head, or model.norm=rms."
    )


def check_sinks_or_off_by_one(model: ModelConfig) -> str | None:
    """Check that attention sinks and off-by-one softmax are not combined."""
    if not (model.attention.sinks and model.attention.off_by_one):
        return None
    return (
        "model.attention.sinks=true with model.attention.off_by_one=true: softmax has one extra "
        "logit, which is either learned or 0. Set one of them to false."
    )


def check_mla_options(model: ModelConfig) -> str | None:
    """Check that latent attention is not combined with settings of attention with keys and values
    per head."""
    if model.mla is None:
        return None
    attention, defaults = model.attention, AttentionConfig()
    given = {
        "attention.qk_norm": (attention.qk_norm, defaults.qk_norm),
        "rope.skip_growth": (model.rope.skip_growth, 0.0),
        "attention.sinks": (attention.sinks, False),
        "attention.gated": (attention.gated, False),
        "qkv_bias": (model.qkv_bias, False),
        "head_dim": (model.head_dim, None),
        "rope.fraction": (model.rope.fraction, 1.0),
        "num_kv_heads": (model.num_kv_heads, model.num_heads),
    }
    conflicts = [name for name, (value, fits) in given.items() if value != fits]
    if not conflicts:
        return None
    settings = ", ".join(f"model.{name}={shown(given[name][0])}" for name in conflicts)
    fits = ", ".join(f"model.{name}={shown(given[name][1])}" for name in conflicts)
    return (
        f"{settings} with model.mla: latent attention has its own sizes and norms, and as many "
        f"KV heads as query heads. Set {fits}, or remove model.mla."
    )


# --- positions


def check_mla_positions(model: ModelConfig) -> str | None:
    """Check that latent attention is used with RoPE or without positions."""
    if model.mla is None or model.positions not in ("learned", "relative"):
        return None
    return (
        f"model.positions={model.positions} with model.mla: latent attention supports rotary "
        "positions only. "
        f"Set model.positions to rope or none, or remove model.mla."
    )


def check_relative_buckets(model: ModelConfig) -> str | None:
    """Check that small distances have one bucket each, and larger distances share as many; per
    direction without a causal mask."""
    buckets, max_distance, causal = (
        model.relative.buckets,
        model.relative.max_distance,
        model.attention.causal,
    )
    if model.positions != "relative":
        return None
    least = 2 if causal else 4
    if buckets < least or buckets % least:
        why = (
            "half of them are for small distances"
            if causal
            else "half of them are for later tokens, and half of each"
        )
        why += "" if causal else "  for small distances"
        return (
            f"model.relative.buckets={buckets} must be a multiple of {least}, because {why}. "
            f"Set model.relative.buckets to {max(buckets // least, 1) * least} or 32."
        )
    if max_distance > buckets // least:
        return None
    return (
        f"model.relative.max_distance={max_distance} must be more than the {buckets // least} "
        "distances that have one bucket "
        f"each with model.relative.buckets={buckets}. Set model.relative.max_distance to "
        f"{4 * buckets} or so."
    )


def check_rotary_size_is_even(model: ModelConfig) -> str | None:
    """Check that the number of rotary features is even."""
    fraction = model.rope.fraction
    size = model.rotary_size() if 0 < fraction <= 1 else 2
    if model.positions != "rope" or (size > 0 and size % 2 == 0):
        return None
    reason = "and RoPE rotates pairs of features"
    if model.mla is not None:
        return f"model.mla.rope_dim={size} is odd, {reason}. Set model.mla.rope_dim to {size + 1}."
    head = model.head_size()
    if size == head:
        return f"model.head_dim={size} is odd, {reason}. Set model.head_dim to {size + 1}."
    even = max(2, size + 1 if size + 1 <= head else size - 1)
    if even > head:
        return (
            f"model.head_dim={head} has no pair of features, {reason}. Set model.head_dim to 2 "
            "or more."
        )
    return (
        f"model.rope.fraction={fraction} of {head} features per head is {size}, which are no "
        f"pairs, {reason}. "
        f"Set model.rope.fraction to {_fraction(even, head)}, which is {even} features."
    )


def check_llama3_bands(model: ModelConfig) -> str | None:
    """Check that low_freq_factor of llama3 scaling is at most high_freq_factor."""
    low, high = model.rope.low_freq_factor, model.rope.high_freq_factor
    if model.rope.scaling != "llama3" or low <= high:
        return None
    return (
        f"model.rope.low_freq_factor={low} must be at most model.rope.high_freq_factor={high}: "
        "between the two, "
        "scaling is interpolated. Use 1.0 and 4.0."
    )


def check_yarn_bands(model: ModelConfig) -> str | None:
    """Check that beta_slow of YaRN is at most beta_fast; they may be equal, as in Kimi K2."""
    fast, slow = model.rope.beta_fast, model.rope.beta_slow
    if model.rope.scaling != "yarn" or slow <= fast:
        return None
    return (
        f"model.rope.beta_slow={slow} must be at most model.rope.beta_fast={fast}: feature "
        "pairs with fewer rotations than beta_slow are scaled, with more than beta_fast are not. "
        "Use 1.0 and 32.0."
    )


def check_rope_factor(model: ModelConfig) -> str | None:
    """Check that the RoPE scaling factor is at least 1."""
    rope = model.rope
    if rope.scaling == "none" or rope.factor >= 1 or not rope.factor > 0:
        return None
    return (
        f"model.rope.factor={rope.factor} with model.rope.scaling={rope.scaling} must be at least "
        "1: it multiplies the context length. Use 8.0, or set model.rope.scaling=none."
    )


def check_dynamic_scaling_length(model: ModelConfig) -> str | None:
    """Check that dynamic scaling starts at a length of at most max_seq_len, as in transformers."""
    first, limit = model.rope.original_max_position, model.max_seq_len
    if model.rope.scaling != "dynamic" or first <= limit:
        return None
    return (
        f"model.rope.scaling=dynamic with model.rope.original_max_position={first} and "
        f"model.max_seq_len={limit}: it "
        "affects only sequences longer than those of pretraining. Set "
        "model.rope.original_max_position to their length, at most "
        f"{limit}, or model.rope.scaling=none."
    )


def check_yarn_theta(model: ModelConfig) -> str | None:
    """Check that theta is above 1 with YaRN, which divides by its logarithm."""
    rope = model.rope
    if rope.scaling != "yarn" or rope.theta > 1 or not rope.theta > 0:
        return None
    return (
        f"model.rope.theta={rope.theta} with model.rope.scaling={rope.scaling} must be above 1: at "
        "1 all feature pairs have the same frequency. Use 10000.0, or set "
        "model.rope.scaling=linear."
    )


def check_dynamic_scaling_pairs(model: ModelConfig) -> str | None:
    """Check that dynamic scaling, which raises theta to size / (size - 2), has more than one
    feature pair."""
    fraction = model.rope.fraction
    if model.rope.scaling != "dynamic" or not 0 < fraction <= 1 or model.rotary_size() != 2:
        return None
    return (
        f"model.rope.scaling={model.rope.scaling} with {model.rotary_size()} rotary "
        "features: the only pair rotates by one radian per token for any theta. Set "
        "model.rope.scaling=linear, or use 4 rotary features or more."
    )


def check_longrope_factors(model: ModelConfig) -> str | None:
    """Check that LongRoPE has one factor per feature pair."""
    rope, fraction = model.rope, model.rope.fraction
    pairs = model.rotary_size() // 2 if 0 < fraction <= 1 else len(rope.short_factors)
    given = {"short_factors": rope.short_factors, "long_factors": rope.long_factors}
    wrong = [name for name, some in given.items() if len(some) != pairs]
    if rope.scaling != "longrope" or not wrong:
        return None
    settings = ", ".join(f"model.rope.{name}={shown(given[name])}" for name in wrong)
    return (
        f"{settings} with model.rope.scaling={rope.scaling} must be {pairs} numbers, "
        "one for each rotary feature pair. Use those of the published model, or set "
        "model.rope.scaling=yarn."
    )


def check_longrope_length(model: ModelConfig) -> str | None:
    """Check the pretraining length of LongRoPE, which divides by its logarithm."""
    first, limit = model.rope.original_max_position, model.max_seq_len
    if model.rope.scaling != "longrope" or 1 < first <= limit:
        return None
    return (
        f"model.rope.scaling=longrope with model.rope.original_max_position={first} and "
        f"model.max_seq_len={limit}: "
        "documents longer than those of pretraining use long_factors. Set "
        f"model.rope.original_max_position to the pretraining length, from 2 to {limit}."
    )


def check_rope_sections(model: ModelConfig) -> str | None:
    """Check that the sections of multimodal RoPE sum to the number of feature pairs."""
    sections, fraction = model.rope.sections, model.rope.fraction
    pairs = model.rotary_size() // 2 if 0 < fraction <= 1 else sum(sections)
    if not sections or (len(sections) == 3 and min(sections) >= 0 and sum(sections) == pairs):
        return None
    third = pairs // 3
    return (
        f"model.rope.sections={list(sections)} must be three counts of feature "
        f"pairs with sum {pairs}. Use [{pairs - 2 * third}, {third}, {third}]."
    )


# --- layers


def check_pattern_lengths(model: ModelConfig) -> str | None:
    """Check that a repeating layer pattern is not longer than the number of layers."""
    patterns: dict[str, Sequence[object]] = {
        "attention.window_layers": model.attention.window_layers,
        "rope.skip": model.rope.skip,
        "attention.qk_norm_layers": model.attention.qk_norm_layers,
    }
    patterns |= {
        f"layers.{one.name}": getattr(model.layers, one.name) for one in fields(LayersConfig)
    }
    patterns |= {} if model.moe is None else {"moe.layers": model.moe.layers}
    long = [
        f"model.{name} has {len(pattern)}"
        for name, pattern in patterns.items()
        if len(pattern) > model.num_layers
    ]
    if not long:
        return None
    return (
        f"{' and '.join(long)} values for model.num_layers={model.num_layers}: the rest would have "
        f"no effect. Use {model.num_layers} values or fewer."
    )


def check_window_right(model: ModelConfig) -> str | None:
    """Check that window_right is only used with sliding windows."""
    right = model.attention.window_right
    if right is None or not model.attention.chunked:
        return None
    return (
        f"model.attention.window_right={right} with model.attention.chunked=true: all tokens of a "
        "chunk see up to its end. Set model.attention.chunked=false, or remove "
        "model.attention.window_right."
    )


def check_patterns_select_a_layer(model: ModelConfig) -> str | None:
    """Check that a layer pattern does not exclude every layer."""
    if model.positions == "rope" and model.rope.skip and all(model.rope.skip):
        return (
            f"model.rope.skip={shown(model.rope.skip)} leaves every layer without positions. "
            f"Set model.positions=none, or remove model.rope.skip."
        )
    norms = model.attention.qk_norm_layers
    if norms and not any(norms):
        return (
            f"model.attention.qk_norm_layers={shown(norms)} leaves every layer without norms of "
            "queries and keys. "
            f"Set model.attention.qk_norm=none, or remove model.attention.qk_norm_layers."
        )
    window, layers = model.attention.window, model.attention.window_layers
    if window is None or not layers or any(layers):
        return None
    return (
        f"model.attention.window={window} with model.attention.window_layers={shown(layers)}: no "
        "layer has the "
        "window. Remove both, or set model.attention.window_layers to [true, false] for every "
        "other layer."
    )


def check_layer_sizes(model: ModelConfig) -> str | None:
    """Check that the model's size is the maximum of its layers' sizes."""
    sizes = {
        "num_kv_heads": model.layers.num_kv_heads,
        "ffn_hidden_size": model.layers.ffn_hidden_size,
    }
    for name, pattern in sizes.items():
        if pattern and max(pattern) != getattr(model, name):
            return (
                f"model.{name}={getattr(model, name)} with model.layers.{name}={shown(pattern)} "
                "must be the largest of "
                f"them. Set model.{name} to {max(pattern)}."
            )
    return None


def check_layer_kv_heads(model: ModelConfig) -> str | None:
    """Check that num_kv_heads of every layer divides num_heads."""
    heads, keys = model.num_heads, model.layers.num_kv_heads
    if model.mla is not None and keys:
        return (
            f"model.layers.num_kv_heads={shown(keys)} with model.mla: latent attention has as many "
            "key/value heads as "
            f"query heads. Remove model.layers.num_kv_heads."
        )
    if all(heads % count == 0 for count in keys):
        return None
    return (
        f"model.layers.num_kv_heads={shown(keys)} does not divide model.num_heads={heads} "
        "everywhere: every key/value "
        f"head serves equally many query heads. Use {divisors(heads)}."
    )


def check_layers_have_parts(model: ModelConfig) -> str | None:
    """Check that every layer has attention or an MLP; with one norm for both, both."""
    parts = [
        (model.attention_part(layer), model.mlp_part(layer)) for layer in range(model.num_layers)
    ]
    given = (
        f"model.layers.attention={shown(model.layers.attention)} and "
        f"model.layers.mlp={shown(model.layers.mlp)}"
    )
    if ("none", "none") in parts:
        return (
            f"{given} leave layer {parts.index(('none', 'none'))} without either. Set one of the "
            "two to full or linear "
            f"there, or leave the layer out of model.num_layers={model.num_layers}."
        )
    if model.block != "parallel_one_norm" or not any("none" in pair for pair in parts):
        return None
    return (
        f"{given} with model.block={model.block}: attention and MLP share one norm. Set "
        "model.block "
        "to sequential or "
        f"parallel, or use linear in place of none."
    )


def check_shared_norm_placement(model: ModelConfig) -> str | None:
    """Check that parallel_one_norm has its norm before attention and MLP."""
    if model.block != "parallel_one_norm" or model.norm_placement != "after":
        return None
    return (
        f"model.block={model.block} with model.norm_placement={model.norm_placement}: the "
        "shared norm "
        "is the input of "
        "attention and MLP. Set model.norm_placement=before, or model.block=parallel."
    )


# --- first weights


def check_init_override_patterns(model: ModelConfig) -> str | None:
    """Check that every pattern of init_overrides matches a parameter."""
    if not model.init_overrides:
        return None
    held = held_parameters(model)
    idle = [
        pattern
        for pattern, _ in model.init_overrides
        if not any(fnmatchcase(one.name, pattern) for one in held)
    ]
    if not idle:
        return None
    return (
        f"model.init_overrides={shown(model.init_overrides)}: no parameter is called "
        f"{' or '.join(idle)}. Use patterns "
        f"of names such as {held[0].name} or layers.*.{held[-3].name.split('.', 2)[-1]}."
    )


def check_mup_init(model: ModelConfig) -> str | None:
    """Check that muP is not combined with xavier_uniform: both scale the initial values with the
    width."""
    if model.init == "normal" or model.mup is None:
        return None
    return (
        f"model.init={model.init} with model.mup: both set the scale of initial values. Set "
        "model.init=normal, or "
        f"remove model.mup."
    )


def _fraction(features: int, head: int) -> float:
    """Return a short number that gives `features` rotary features of a head."""
    digits = next(
        n for n in range(1, 17) if int(head * round((features + 0.5) / head, n)) == features
    )
    exact = round(features / head, digits)
    return exact if int(head * exact) == features else round((features + 0.5) / head, digits)


RULES: tuple[Rule, ...] = (
    check_kv_heads_divide_heads,
    check_head_dim,
    check_whole_qk_norm_is_rms,
    check_sinks_or_off_by_one,
    check_mla_options,
    check_mla_positions,
    check_relative_buckets,
    check_rotary_size_is_even,
    check_llama3_bands,
    check_yarn_bands,
    check_yarn_theta,
    check_rope_factor,
    check_dynamic_scaling_length,
    check_dynamic_scaling_pairs,
    check_longrope_factors,
    check_longrope_length,
    check_rope_sections,
    check_pattern_lengths,
    check_window_right,
    check_patterns_select_a_layer,
    check_layer_sizes,
    check_layer_kv_heads,
    check_layers_have_parts,
    check_shared_norm_placement,
    check_init_override_patterns,
    check_mup_init,
)

OF_TRAINING: tuple[Rule, ...] = (
    check_rope_factor,
    check_pattern_lengths,
    check_patterns_select_a_layer,
    check_init_override_patterns,
    check_mup_init,
)
"""Rules for training only: a pretrained model that breaks them works."""

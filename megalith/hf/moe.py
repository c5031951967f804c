"""Config fields and tensor rules that families with a mixture of experts share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import ConfigError
from megalith.hf.fields import Fields
from megalith.hf.tensor_rules import TensorRule, piece, rule

LayerRules = Callable[[ModelConfig, str, str], list[TensorRule]]
"""Function that returns the rules of an MoE layer, given the config, the Hugging Face prefix and
the parameter prefix."""

OF_TRAINING = ("router_aux_loss_coef", "output_router_logits")
"""Fields of the aux loss, for families to which transformers adds none."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the parts of a mixture of experts in a family."""

    block: str = "mlp"
    """Name of the module in place of the MLP."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


def read_num_experts(
    fields: Fields, default: int, *, names: Sequence[str] = ("num_experts", "num_local_experts")
) -> int:
    """Return the number of experts of a layer, under any of the names that transformers accepts."""
    counts = {name: fields.read_int(name, default) for name in names if name in fields.raw}
    if len(set(counts.values())) > 1:
        fields.problems.append(
            f"{counts}: these numbers of experts differ. Remove one of the fields, or set both "
            "to the same."
        )
    return next(iter(counts.values()), default)


def read_moe(
    fields: Fields,
    layers: int,
    *,
    experts: int,
    top_k: int,
    width: int,
    sparse: bool = True,
    coefficient: float = 0.001,
    **others: Any,
) -> MoEConfig:
    """Return the MoEConfig of families with the fields of Qwen; `experts`, `top_k` and
    `coefficient` (of the aux loss) are defaults.

    `width`: hidden size of an expert; `sparse`: whether some layers may be dense; others: arguments
    of MoEConfig.
    """
    moe_layers = read_moe_layers(fields, layers) if sparse else (True,) * layers
    num_chosen = fields.read_int("num_experts_per_tok", top_k)
    return MoEConfig(
        num_experts=read_num_experts(fields, experts),
        top_k=num_chosen,
        ffn_hidden_size=width,
        layers=flags_or_empty(moe_layers),
        router=RouterConfig(norm_topk_prob=fields.read_flag("norm_topk_prob")),
        aux_loss=read_aux_loss(
            fields, top_k=num_chosen, layers=sum(moe_layers), default=coefficient
        ),
        **others,
    )


def write_moe(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the config fields of `read_moe`, without width and layers."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.router.norm_topk_prob,
        **write_aux_loss(config, moe),
    }


def read_aux_loss(
    fields: Fields, *, top_k: int, layers: int, default: float = 0.001
) -> AuxLossConfig:
    """Return the aux loss that transformers adds if output_router_logits is true, divided among the
    `layers` with experts.

    With balanced experts the loss of transformers is top_k and pools all layers; ours is 1 in each
    layer, and summed.
    """
    name = "router_aux_loss_coef"
    none = name in fields.raw and fields.read_value(name) is None
    weight = 0.0 if none else fields.read_number(name, default, zero=True)
    if not fields.read_flag("output_router_logits") or not layers:
        return AuxLossConfig()
    return AuxLossConfig(batch_coeff=float(f"{weight * top_k / layers:.12g}"))


def write_aux_loss(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the config fields of the aux loss; without one output_router_logits is false."""
    layers, weight = (
        sum(config.has_experts(layer) for layer in range(config.num_layers)),
        moe.aux_loss.batch_coeff,
    )
    coefficient = (
        {"router_aux_loss_coef": float(f"{weight * layers / moe.top_k:.10g}")} if weight else {}
    )
    return {"output_router_logits": weight > 0, **coefficient}


def read_moe_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every decoder_sparse_step-th layer that is not in
    mlp_only_layers."""
    step = fields.read_int("decoder_sparse_step", 1)
    dense = fields.read_value("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in dense
    ):
        fields.problems.append(
            f"mlp_only_layers={dense!r}: expected numbers of layers, from 0 to {layers - 1}, or an "
            "empty list."
        )
        dense = []
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def write_moe_layers(config: ModelConfig) -> dict[str, Any]:
    """Return the config fields of `read_moe_layers`."""
    dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def flags_or_empty(flags: Sequence[bool]) -> tuple[bool, ...]:
    """Return `MoEConfig.layers` for one flag per layer: empty for all."""
    return () if all(flags) else tuple(flags)


def require_moe(config: ModelConfig, architecture: str) -> MoEConfig:
    """Return the mixture of experts of a model.

    Raises:
        ConfigError: it has none.
    """
    if config.moe is None:
        raise ConfigError(
            f"model.moe=null: {architecture} needs a mixture of experts. Use another "
            f"family, such as LlamaForCausalLM, for this model."
        )
    return config.moe


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
    aux_loss = AuxLossConfig(
        quantile=moe.aux_loss.quantile
    )  # its offsets also select experts outside of training
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


# --- tensors


def moe_rules(words: ExpertNames) -> LayerRules:
    """Return the rules of layers with separate tensors for each expert."""
    return lambda config, hf_layer, parameter: [
        *router_rules(config, f"{hf_layer}.{words.block}.{words.router}", parameter),
        *expert_rules(config, f"{hf_layer}.{words.block}.experts", f"{parameter}.experts", words),
        *shared_rules(config, f"{hf_layer}.{words.block}", parameter, words),
    ]


def fused_moe_rules(words: ExpertNames) -> LayerRules:
    """Return the rules of layers whose experts are fused into two tensors, as in transformers 5."""
    return lambda config, hf_layer, parameter: [
        *router_rules(config, f"{hf_layer}.mlp.{words.router}", parameter),
        *fused_expert_rules(config, f"{hf_layer}.mlp.experts", f"{parameter}.experts"),
        *shared_rules(config, f"{hf_layer}.mlp", parameter, words),
    ]


def router_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of the router weight, its bias, and the expert bias."""
    moe, h = _experts(config), config.hidden_size
    rules = [
        rule(
            f"{hf_name}.weight",
            f"{parameter}.router",
            (moe.num_experts, h),
            shape=(moe.num_experts, h),
        )
    ]
    if moe.router.bias:
        rules.append(
            rule(
                f"{hf_name}.bias",
                f"{parameter}.router_bias",
                (moe.num_experts,),
                shape=(moe.num_experts,),
            )
        )
    if moe.router.expert_bias:
        name = f"{hf_name}.e_score_correction_bias"
        rules.append(
            rule(name, f"{parameter}.balancing_bias", (moe.num_experts,), shape=(moe.num_experts,))
        )
    return rules


def expert_rules(
    config: ModelConfig, hf_name: str, parameter: str, words: ExpertNames
) -> list[TensorRule]:
    """Return the rules of gate, up and down of every expert."""
    moe, h = _experts(config), config.hidden_size
    f, rules = moe.ffn_hidden_size, []
    for e in range(moe.num_experts):
        for index, word in enumerate((words.gate, words.up)):
            box = ((e, e + 1), (index, index + 1), (0, f), (0, h))
            name = f"{hf_name}.{e}.{word}.weight"
            rules.append(
                piece(
                    name,
                    f"{parameter}.gate_up",
                    box,
                    shape=(f, h),
                    view=(f, h),
                    dims=(None, None, 0, 1),
                )
            )
        box_down = ((e, e + 1), (0, h), (0, f))
        name = f"{hf_name}.{e}.{words.down}.weight"
        rules.append(
            piece(name, f"{parameter}.down", box_down, shape=(h, f), view=(h, f), dims=(None, 0, 1))
        )
    return rules


def fused_expert_rules(config: ModelConfig, hf_name: str, parameter: str) -> list[TensorRule]:
    """Return the rules of fused gate_up and down tensors of all experts."""
    moe, h = _experts(config), config.hidden_size
    e, f = moe.num_experts, moe.ffn_hidden_size
    box = ((0, e), (0, 2), (0, f), (0, h))
    return [
        piece(
            f"{hf_name}.gate_up_proj",
            f"{parameter}.gate_up",
            box,
            shape=(e, 2 * f, h),
            view=(e, 2, f, h),
        ),
        rule(f"{hf_name}.down_proj", f"{parameter}.down", (e, h, f), shape=(e, h, f)),
    ]


def shared_rules(
    config: ModelConfig, hf_name: str, parameter: str, words: ExpertNames
) -> list[TensorRule]:
    """Return the rules of the shared expert and its gate."""
    moe, h = _experts(config), config.hidden_size
    f = moe.shared_ffn_hidden_size
    if f is None:
        return []
    block = f"{hf_name}.{words.shared}"
    rules = [
        rule(
            f"{block}.{words.gate}.weight",
            f"{parameter}.shared.gate_up",
            (f, h),
            shape=(f, h),
            part=0,
        ),
        rule(
            f"{block}.{words.up}.weight",
            f"{parameter}.shared.gate_up",
            (f, h),
            shape=(f, h),
            part=1,
        ),
        rule(f"{block}.{words.down}.weight", f"{parameter}.shared.down", (h, f), shape=(h, f)),
    ]
    if moe.shared_gate:
        rules.append(
            rule(
                f"{hf_name}.{words.shared_gate}.weight",
                f"{parameter}.shared_gate",
                (1, h),
                shape=(1, h),
            )
        )
    return rules


def _experts(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None, "called for a layer without experts"
    return config.moe

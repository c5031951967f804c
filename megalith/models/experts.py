"""What families with a mixture of experts have in common: fields of config.json, and the tensors of
a layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import ConfigError
from megalith.models.fields import Fields
from megalith.models.names import TensorRule, piece, rule

LayerRules = Callable[[ModelConfig, str, str], list[TensorRule]]
"""Of a layer's experts: their name of the block, and ours."""

OF_TRAINING = ("router_aux_loss_coef", "output_router_logits")
"""Fields about a loss that is added while training, where transformers adds none whatever they
say."""


@dataclass(frozen=True, slots=True)
class Words:
    """What a family calls the parts of a mixture."""

    block: str = "mlp"
    """What stands in the place of the MLP."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"


def read_count(
    fields: Fields, default: int, *, names: Sequence[str] = ("num_experts", "num_local_experts")
) -> int:
    """Experts of a layer, by any of the names that transformers has for it."""
    found = {name: fields.whole(name, default) for name in names if name in fields.raw}
    if len(set(found.values())) > 1:
        fields.problems.append(
            f"{found}: two numbers of experts. Remove one of the two, or set both to the same."
        )
    return next(iter(found.values()), default)


def read_mixture(
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
    """The mixture of families that spell it as Qwen does; `experts`, `top_k` and `coefficient`, of
    the loss of balance, are those of a config without them.

    `width`: features inside an expert; `sparse`: whether some layers may have none; others: of
    MoEConfig.
    """
    having = sparse_layers(fields, layers) if sparse else (True,) * layers
    chosen = fields.whole("num_experts_per_tok", top_k)
    return MoEConfig(
        num_experts=read_count(fields, experts),
        top_k=chosen,
        ffn_hidden_size=width,
        layers=pattern(having),
        router=RouterConfig(norm_topk_prob=fields.flag("norm_topk_prob")),
        aux_loss=read_balance(fields, top_k=chosen, layers=sum(having), default=coefficient),
        **others,
    )


def write_mixture(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """The same in the other direction, but for width and layers."""
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.router.norm_topk_prob,
        **write_balance(config, moe),
    }


def read_balance(
    fields: Fields, *, top_k: int, layers: int, default: float = 0.001
) -> AuxLossConfig:
    """The loss that transformers adds while training, if output_router_logits says so: each of so
    many `layers` with experts has its share.

    Theirs is K where experts are equally busy, and pools the layers; ours is 1 in each, and added
    up.
    """
    name = "router_aux_loss_coef"
    none = name in fields.raw and fields.value(name) is None
    weight = 0.0 if none else fields.number(name, default, zero=True)
    if not fields.flag("output_router_logits") or not layers:
        return AuxLossConfig()
    return AuxLossConfig(batch_coeff=float(f"{weight * top_k / layers:.12g}"))


def write_balance(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """The same in the other direction; their default where there is none, which
    output_router_logits turns off."""
    layers, weight = (
        sum(config.has_experts(layer) for layer in range(config.num_layers)),
        moe.aux_loss.batch_coeff,
    )
    coefficient = (
        {"router_aux_loss_coef": float(f"{weight * layers / moe.top_k:.10g}")} if weight else {}
    )
    return {"output_router_logits": weight > 0, **coefficient}


def sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every so many, and none of those that are listed."""
    step = fields.whole("decoder_sparse_step", 1)
    dense = fields.value("mlp_only_layers") or []
    if not isinstance(dense, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in dense
    ):
        fields.problems.append(
            f"mlp_only_layers={dense!r}: expected numbers of layers, from 0 to {layers - 1}, or an "
            "empty list."
        )
        dense = []
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))


def write_sparse_layers(config: ModelConfig) -> dict[str, Any]:
    """The same in the other direction."""
    dense = [layer for layer in range(config.num_layers) if not config.has_experts(layer)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def pattern(flags: Sequence[bool]) -> tuple[bool, ...]:
    """`MoEConfig.layers` for one flag per layer: empty for all."""
    return () if all(flags) else tuple(flags)


def experts_of(config: ModelConfig, architecture: str) -> MoEConfig:
    """The model's mixture.

    Raises:
        ConfigError: it has none.
    """
    if config.moe is None:
        raise ConfigError(
            f"model.moe=null: {architecture} has a mixture of experts in its layers. Use another "
            f"family, such as LlamaForCausalLM, for this model."
        )
    return config.moe


def canonical_experts(config: ModelConfig) -> ModelConfig:
    """The same mathematics outside of training with every setting of experts in one way."""
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
    balance = AuxLossConfig(
        quantile=moe.aux_loss.quantile
    )  # whose offsets choose outside of training, too
    kept = replace(
        moe,
        layers=() if all(flags) else flags,
        aux_loss=balance,
        capacity=CapacityConfig(),
        router=router,
    )
    return replace(
        config,
        moe=kept,
        ffn_hidden_size=moe.ffn_hidden_size if all(flags) else config.ffn_hidden_size,
    )


# --- tensors


def mixture_rules(words: Words) -> LayerRules:
    """Rules of layers whose experts have a tensor of every kind each."""
    return lambda config, theirs, ours: [
        *router_rules(config, f"{theirs}.{words.block}.{words.router}", ours),
        *expert_rules(config, f"{theirs}.{words.block}.experts", f"{ours}.experts", words),
        *shared_rules(config, f"{theirs}.{words.block}", ours, words),
    ]


def joined_rules(words: Words) -> LayerRules:
    """The same as transformers 5 has it in memory, and in some folders: all experts in two
    tensors."""
    return lambda config, theirs, ours: [
        *router_rules(config, f"{theirs}.mlp.{words.router}", ours),
        *joined_expert_rules(config, f"{theirs}.mlp.experts", f"{ours}.experts"),
        *shared_rules(config, f"{theirs}.mlp", ours, words),
    ]


def router_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """The gate, and the bias that balances."""
    moe, h = _experts(config), config.hidden_size
    found = [
        rule(f"{theirs}.weight", f"{ours}.router", (moe.num_experts, h), shape=(moe.num_experts, h))
    ]
    if moe.router.bias:
        found.append(
            rule(
                f"{theirs}.bias",
                f"{ours}.router_bias",
                (moe.num_experts,),
                shape=(moe.num_experts,),
            )
        )
    if moe.router.expert_bias:
        name = f"{theirs}.e_score_correction_bias"
        found.append(
            rule(name, f"{ours}.balancing_bias", (moe.num_experts,), shape=(moe.num_experts,))
        )
    return found


def expert_rules(config: ModelConfig, theirs: str, ours: str, words: Words) -> list[TensorRule]:
    """Gate, up and down of every expert."""
    moe, h = _experts(config), config.hidden_size
    f, found = moe.ffn_hidden_size, []
    for e in range(moe.num_experts):
        for half, word in enumerate((words.gate, words.up)):
            box = ((e, e + 1), (half, half + 1), (0, f), (0, h))
            name = f"{theirs}.{e}.{word}.weight"
            found.append(
                piece(
                    name, f"{ours}.gate_up", box, shape=(f, h), view=(f, h), dims=(None, None, 0, 1)
                )
            )
        box_down = ((e, e + 1), (0, h), (0, f))
        name = f"{theirs}.{e}.{words.down}.weight"
        found.append(
            piece(name, f"{ours}.down", box_down, shape=(h, f), view=(h, f), dims=(None, 0, 1))
        )
    return found


def joined_expert_rules(config: ModelConfig, theirs: str, ours: str) -> list[TensorRule]:
    """The same in two tensors."""
    moe, h = _experts(config), config.hidden_size
    e, f = moe.num_experts, moe.ffn_hidden_size
    every = ((0, e), (0, 2), (0, f), (0, h))
    return [
        piece(
            f"{theirs}.gate_up_proj",
            f"{ours}.gate_up",
            every,
            shape=(e, 2 * f, h),
            view=(e, 2, f, h),
        ),
        rule(f"{theirs}.down_proj", f"{ours}.down", (e, h, f), shape=(e, h, f)),
    ]


def shared_rules(config: ModelConfig, theirs: str, ours: str, words: Words) -> list[TensorRule]:
    """The MLP for all tokens, and its gate."""
    moe, h = _experts(config), config.hidden_size
    f = moe.shared_ffn_hidden_size
    if f is None:
        return []
    block = f"{theirs}.{words.shared}"
    found = [
        rule(
            f"{block}.{words.gate}.weight", f"{ours}.shared.gate_up", (f, h), shape=(f, h), part=0
        ),
        rule(f"{block}.{words.up}.weight", f"{ours}.shared.gate_up", (f, h), shape=(f, h), part=1),
        rule(f"{block}.{words.down}.weight", f"{ours}.shared.down", (h, f), shape=(h, f)),
    ]
    if moe.shared_gate:
        found.append(
            rule(
                f"{theirs}.{words.shared_gate}.weight", f"{ours}.shared_gate", (1, h), shape=(1, h)
            )
        )
    return found


def _experts(config: ModelConfig) -> MoEConfig:
    assert config.moe is not None, "asked for a layer with experts"
    return config.moe

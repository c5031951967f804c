"""Rules of MoE models: settings by themselves, and expert parallel layouts."""

from collections.abc import Callable

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, has_aux_losses
from megalith.config.parallel import ParallelConfig
from megalith.plan.grid import (
    Grid,
    dense_grid,
    divisors,
    expert_grid,
    expert_problems,
    stage_problems,
)
from megalith.plan.layers.moe import transport_problems

Rule = Callable[[MoEConfig], str | None]


def moe_problems(model: ModelConfig, *, trains: bool = True) -> list[str]:
    """Return one error text for each broken rule across a model's MoE settings, whose numbers are
    in range. `trains=False`: only the rules that inference needs."""
    moe = model.moe
    if moe is None:
        return []
    rules = RULES if trains else [rule for rule in RULES if rule not in OF_TRAINING]
    return [text for rule in rules if (text := rule(moe)) is not None]


# --- choosing


def check_top_k(moe: MoEConfig) -> str | None:
    """Check that top_k is at most the number of experts."""
    if moe.top_k <= moe.num_experts:
        return None
    return (
        f"model.moe.top_k={moe.top_k} is more than model.moe.num_experts={moe.num_experts}. Set "
        "model.moe.top_k to "
        f"{moe.num_experts} or less."
    )


def check_single_expert_weight(moe: MoEConfig) -> str | None:
    """Check that the weight of a single expert is not normalized: it would be 1, without a
    gradient."""
    if moe.top_k > 1 or not moe.router.norm_topk_prob:
        return None
    return (
        f"model.moe.top_k={moe.top_k} with model.moe.router.norm_topk_prob=true: the weight of a "
        "single expert would always be 1, and the router would have no gradient. Set "
        "model.moe.router.norm_topk_prob=false."
    )


def check_expert_bias_score(moe: MoEConfig) -> str | None:
    """Check that the expert bias is used with scores that are independent of each other."""
    if not moe.router.expert_bias or moe.router.score != "softmax":
        return None
    return (
        f"model.moe.router.expert_bias=true with model.moe.router.score={moe.router.score}: a "
        "bias is added to each "
        f"expert's own score. Set model.moe.router.score to one of sigmoid, sqrt_softplus, or "
        f"model.moe.router.expert_bias=false."
    )


def check_expert_groups(moe: MoEConfig) -> str | None:
    """Check the number of expert groups and of selected groups."""
    groups, chosen = moe.router.num_groups, moe.router.topk_groups
    if groups is None and chosen is None:
        return None
    if groups is None or chosen is None:
        return (
            f"model.moe.router.num_groups={_null(groups)} with "
            f"model.moe.router.topk_groups={_null(chosen)}: set both, as 8 "
            f"and 4, or neither."
        )
    if moe.num_experts % groups:
        return (
            f"model.moe.router.num_groups={groups} does not divide "
            f"model.moe.num_experts={moe.num_experts}: "
            "groups have equally "
            f"many experts. Set model.moe.router.num_groups to one of {divisors(moe.num_experts)}."
        )
    if chosen > groups:
        return (
            f"model.moe.router.topk_groups={chosen} is more than "
            f"model.moe.router.num_groups={groups}. "
            f"Set it to {groups} or less."
        )
    return _groups_have_enough(moe, groups, chosen)


def _groups_have_enough(moe: MoEConfig, groups: int, chosen: int) -> str | None:
    each = moe.num_experts // groups
    if chosen * each < moe.top_k:
        return (
            f"model.moe.top_k={moe.top_k} is more than the experts of "
            f"model.moe.router.topk_groups={chosen} "
            f"groups of {each}. "
            f"Set model.moe.router.topk_groups to {-(-moe.top_k // each)} or more."
        )
    if moe.router.group_score == "top" and moe.top_k % chosen:
        fits = [n for n in divisors(moe.top_k) if n <= groups and n * each >= moe.top_k]
        return (
            f"model.moe.router.topk_groups={chosen} does not divide model.moe.top_k={moe.top_k}: a "
            "group's score is the sum of "
            "its best top_k / topk_groups experts. Set model.moe.router.topk_groups to one of "
            f"{fits}, or model.moe.router.group_score=max."
        )
    return None


def check_exclusive_balancers(moe: MoEConfig) -> str | None:
    """Check that Sinkhorn and quantile balancing are not combined with other load balancing."""
    balancers = [name for name in ("sinkhorn", "quantile") if getattr(moe.aux_loss, name)]
    if not balancers:
        return None
    losses = {
        f"aux_loss.{name}": getattr(moe.aux_loss, name)
        for name in ("sequence_coeff", "batch_coeff", "global_batch_coeff")
    }
    conflicts = {name: value for name, value in losses.items() if value}
    conflicts |= {"aux_loss.quantile": "true"} if len(balancers) > 1 else {}
    conflicts |= (
        {"router.num_groups": moe.router.num_groups} if moe.router.num_groups is not None else {}
    )
    conflicts |= {"router.expert_bias": "true"} if moe.router.expert_bias else {}
    conflicts |= {"capacity.factor": moe.capacity.factor} if moe.capacity.factor is not None else {}
    if not conflicts:
        return None
    given = ", ".join(f"model.moe.{name}={value}" for name, value in conflicts.items())
    return (
        f"{given} with model.moe.aux_loss.{balancers[0]}=true, which balances all experts by "
        "itself. "
        f"Remove {'them' if len(conflicts) > 1 else 'it'}, or set "
        f"model.moe.aux_loss.{balancers[0]}=false."
    )


def check_quantile_top_k(moe: MoEConfig) -> str | None:
    """Check that quantile balancing has fewer choices than experts."""
    if not moe.aux_loss.quantile or moe.top_k < moe.num_experts:
        return None
    return (
        f"model.moe.aux_loss.quantile=true with model.moe.top_k={moe.top_k} of "
        f"model.moe.num_experts={moe.num_experts}: tokens "
        "go to all experts already. Set model.moe.aux_loss.quantile=false, or model.moe.top_k to "
        "less."
    )


def check_input_weight_top_k(moe: MoEConfig) -> str | None:
    """Check that the router weight is applied to the input only with top_k=1."""
    if not moe.apply_router_weight_on_input or moe.top_k == 1:
        return None
    return (
        f"model.moe.apply_router_weight_on_input=true with model.moe.top_k={moe.top_k}: a token is "
        "multiplied by "
        "the router weight of a single expert. Set model.moe.top_k=1, or "
        "model.moe.apply_router_weight_on_input=false."
    )


def check_random_routing(moe: MoEConfig) -> str | None:
    """Check that force_load_balancing and force_biased are not combined."""
    if not moe.router.force_load_balancing or moe.router.force_biased == 0:
        return None
    return (
        "model.moe.router.force_load_balancing=true with "
        f"model.moe.router.force_biased={moe.router.force_biased}: one balances the random "
        "choices, the other does not. Set model.moe.router.force_biased=0, or "
        "force_load_balancing=false."
    )


def check_some_layer_has_experts(moe: MoEConfig) -> str | None:
    """Check that some layer has experts."""
    if not moe.layers or any(moe.layers):
        return None
    return (
        f"model.moe.layers={list(moe.layers)}: no layer has experts. Set one of them to true, "
        "or model.moe=null."
    )


RULES: tuple[Rule, ...] = (
    check_some_layer_has_experts,
    check_top_k,
    check_single_expert_weight,
    check_expert_bias_score,
    check_expert_groups,
    check_exclusive_balancers,
    check_quantile_top_k,
    check_input_weight_top_k,
    check_random_routing,
)

OF_TRAINING: tuple[Rule, ...] = (
    check_single_expert_weight,
    check_exclusive_balancers,
    check_quantile_top_k,
    check_random_routing,
)
"""Rules for training only: inference works without them."""


# --- ranks


def expert_layout_problems(
    model: ModelConfig, parallel: ParallelConfig, world: int, *, trains: bool
) -> list[str]:
    """Return one error text for each broken rule of the expert parallel layout on `world` ranks."""
    p, moe = parallel, model.moe
    if moe is None:
        return _find_moe_settings_without_moe(p)
    etp = p.tp if p.etp is None else p.etp
    problems = expert_problems(world=world, etp=etp, ep=p.ep, pp=p.pp, order=p.order)
    if problems:
        return problems
    grid = expert_grid(world=world, etp=etp, ep=p.ep, pp=p.pp, order=p.order)
    results = [
        _check_ep_divides_experts(moe, p.ep),
        _check_etp_size(moe, etp),
        _check_biases_without_etp(moe, etp),
    ]
    results += [_check_padding_dispatcher(moe, p), *transport_problems(p.dispatcher)]
    results += [_check_replicas_divide_edp(p, grid)] if p.dp_replicate > 1 else []
    results += [_check_tp_needs_sp(p)] if trains else []
    problems = [text for text in results if text is not None]
    if world % (p.tp * p.cp * p.pp):
        return problems  # another rule reports this
    return problems + stage_problems(
        dense_grid(world=world, tp=p.tp, cp=p.cp, pp=p.pp, order=p.order), grid
    )


def _find_moe_settings_without_moe(p: ParallelConfig) -> list[str]:
    given = {"ep": (p.ep, 1), "etp": (p.etp, None), "dispatcher": (p.dispatcher, "alltoall")}
    changed = [
        f"parallel.{name}={value}" for name, (value, default) in given.items() if value != default
    ]
    if not changed:
        return []
    return [
        f"{', '.join(changed)} with model.moe=null: the model has no experts. Set model.moe, or "
        f"remove {'them' if len(changed) > 1 else 'it'}."
    ]


def _check_ep_divides_experts(moe: MoEConfig, ep: int) -> str | None:
    if moe.num_experts % ep == 0:
        return None
    return (
        f"parallel.ep={ep} does not divide model.moe.num_experts={moe.num_experts}: every rank has "
        "equally "
        f"many. Set parallel.ep to one of {divisors(moe.num_experts)}."
    )


def _check_etp_size(moe: MoEConfig, etp: int) -> str | None:
    if etp <= moe.ffn_hidden_size:
        return None
    return (
        f"parallel.etp={etp} is more than model.moe.ffn_hidden_size={moe.ffn_hidden_size}: every "
        f"rank has some. Set parallel.etp to {moe.ffn_hidden_size} or less."
    )


def _check_biases_without_etp(moe: MoEConfig, etp: int) -> str | None:
    if not moe.biases or etp == 1:
        return None
    return (
        f"parallel.etp={etp} with model.moe.biases=true: an expert's output bias would be added by "
        "every rank that has "
        f"a part of the expert. Set parallel.etp=1 and parallel.ep to divide experts instead."
    )


def _check_padding_dispatcher(moe: MoEConfig, p: ParallelConfig) -> str | None:
    if not moe.capacity.pad or p.dispatcher == "alltoall":
        return None
    return (
        f"parallel.dispatcher={p.dispatcher} with model.moe.capacity.pad=true: only alltoall pads "
        "experts to their capacity. Set parallel.dispatcher=alltoall, or "
        "model.moe.capacity.pad=false."
    )


def _check_replicas_divide_edp(p: ParallelConfig, grid: Grid) -> str | None:
    edp = grid.size("edp")
    if edp % p.dp_replicate == 0:
        return None
    return (
        f"parallel.dp_replicate={p.dp_replicate} does not divide the {edp} ranks that hold the "
        "same "
        "experts (edp). "
        f"Set parallel.dp_replicate to one of {divisors(edp)}, or parallel.ep to less than {p.ep}."
    )


def _check_tp_needs_sp(p: ParallelConfig) -> str | None:
    if p.tp == 1 or p.sp:
        return None
    return (
        f"parallel.tp={p.tp} with parallel.sp=false and model.moe: every tensor-parallel rank "
        "would send the same "
        f"tokens, whose gradients would count {p.tp} times. Set parallel.sp=true."
    )


FEW_EXPERTS = 32
"""Heuristic: with at least this many experts, bf16 logits are often equal."""


def balance_notes(model: ModelConfig) -> list[str]:
    """Return notes on random routing, bf16 routers, a constant router weight and missing load
    balancing."""
    moe = model.moe
    if moe is None:
        return []
    return [
        *_random_routing_notes(moe),
        *_router_dtype_notes(moe),
        *_single_expert_notes(moe),
        *_no_balancing_notes(moe),
    ]


def _random_routing_notes(moe: MoEConfig) -> list[str]:
    options = {
        "force_load_balancing=true": moe.router.force_load_balancing,
        "force_biased": moe.router.force_biased > 0,
    }
    active = [
        name if "=" in name else f"{name}={moe.router.force_biased}"
        for name, given in options.items()
        if given
    ]
    return [
        f"model.moe.router.{name}: experts are chosen at random, for speed measurements only; the "
        "trained model is not usable"
        for name in active
    ]


def _router_dtype_notes(moe: MoEConfig) -> list[str]:
    if moe.router.dtype != "model" or moe.num_experts < FEW_EXPERTS:
        return []
    return [
        f"model.moe.router.dtype=model: in bf16 logits of {moe.num_experts} experts are often "
        "equal, and the choice then depends on their order: set model.moe.router.dtype=fp32"
    ]


def _single_expert_notes(moe: MoEConfig) -> list[str]:
    if moe.num_experts == 1 or check_single_expert_weight(moe) is None:
        return []
    return [
        "model.moe.top_k=1 with model.moe.router.norm_topk_prob=true: the weight of a single "
        "expert "
        "is always 1, as in other implementations of such a model, and the LM loss gives routers "
        "no gradient: only aux_loss.* losses train them"
    ]


def _no_balancing_notes(moe: MoEConfig) -> list[str]:
    is_random = moe.router.force_load_balancing or moe.router.force_biased > 0
    is_balanced = (
        moe.router.expert_bias
        or moe.aux_loss.sinkhorn
        or moe.aux_loss.quantile
        or has_aux_losses(moe.aux_loss)
    )
    if moe.num_experts == 1 or is_random or is_balanced:
        return []
    return [
        "no load balancing of experts: few of them may receive all tokens. Set "
        "model.moe.aux_loss.batch_coeff=0.01, or with router.score=sigmoid "
        "model.moe.router.expert_bias=true"
    ]


# --- in words


def router_text(moe: MoEConfig) -> str:
    """Describe how tokens choose experts, the load balancing, and token dropping by the capacity
    factor (dropless without one).

    >>> from megalith.config.moe import AuxLossConfig
    >>> balanced = AuxLossConfig(batch_coeff=0.01)
    >>> router_text(MoEConfig(num_experts=8, ffn_hidden_size=4, aux_loss=balanced)).split("; ")[1]
    'balanced by aux_loss.batch_coeff=0.01'
    """
    router, capacity = moe.router, moe.capacity
    parts = [
        f"{router.score} scores in "
        f"{'the dtype of the model' if router.dtype == 'model' else router.dtype}"
    ]
    parts += (
        [f"of the best {router.topk_groups} of {router.num_groups} groups"]
        if router.num_groups is not None
        else []
    )
    parts += ["weights renormalized" if router.norm_topk_prob else "weights as scored"]
    parts[-1] += (
        f" times {router.routed_scaling_factor:g}" if router.routed_scaling_factor != 1.0 else ""
    )
    parts += [
        f"{name}={value:g}"
        for name in ("jitter", "force_biased")
        if (value := getattr(router, name)) > 0
    ]
    parts += ["at random (force_load_balancing)"] if router.force_load_balancing else []
    dropping = "dropless"
    if capacity.factor is not None:
        dropped = "those of least weight" if capacity.drop == "least" else "the last tokens"
        dropping = f"capacity factor {capacity.factor:g}, drops {dropped}"
    return (
        f"{', '.join(parts)}; balanced by "
        f"{', '.join(_list_load_balancing(moe)) or 'nothing'}; {dropping}"
    )


def _list_load_balancing(moe: MoEConfig) -> list[str]:
    losses = {
        name: getattr(moe.aux_loss, name)
        for name in ("sequence_coeff", "batch_coeff", "global_batch_coeff")
    }
    names = [f"aux_loss.{name}={weight:g}" for name, weight in losses.items() if weight > 0]
    names += [
        f"aux_loss.{name}" for name in ("sinkhorn", "quantile") if getattr(moe.aux_loss, name)
    ]
    return names + (["router.expert_bias"] if moe.router.expert_bias else [])


def _null(value: int | None) -> str:
    return "null" if value is None else str(value)

"""Megatron's description of a mixture of experts as our `model.moe` and `parallel` settings."""

from megalith.megatron.draft import Draft
from megalith.megatron.patterns import pattern_of

LOSSES = {
    "aux_loss": "batch_coeff",
    "seq_aux_loss": "sequence_coeff",
    "global_aux_loss": "global_batch_coeff",
}
"""Megatron's names of the losses that keep experts busy, and ours."""

_TYPES, _WEIGHTS = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"


def translate_experts(draft: Draft) -> None:
    """Everything about experts, which Megatron reads with --num-experts only."""
    if not draft.arguments.value("--num-experts"):
        return
    draft.copy("--num-experts")
    for flag in (
        "--moe-router-topk",
        "--moe-router-topk-scaling-factor",
        "--moe-router-num-groups",
        "--moe-router-group-topk",
        "--moe-z-loss-coeff",
        "--moe-input-jitter-eps",
        "--moe-shared-expert-intermediate-size",
        "--moe-latent-size",
        "--expert-model-parallel-size",
        "--expert-tensor-parallel-size",
    ):
        draft.copy(flag)
    _width(draft)
    _layers(draft)
    _router(draft)
    _balance(draft)
    _capacity(draft)
    _switches(draft)
    kind = str(draft.arguments.value("--moe-token-dispatcher-type"))
    how = "" if kind != "flex" else "the same numbers: how messages travel is the machine's affair"
    draft.put(
        "--moe-token-dispatcher-type",
        "parallel.dispatcher",
        "allgather" if kind == "allgather" else "alltoall",
        how,
    )


def _width(draft: Draft) -> None:
    """Inner features of an expert: those of the MLP, unless they are given."""
    flag = "--moe-ffn-hidden-size"
    if draft.arguments.value(flag) is not None:
        draft.copy(flag)
    else:
        dense = "model.ffn_hidden_size"
        draft.put(
            flag,
            "model.moe.ffn_hidden_size",
            draft.settings.get(dense),
            "as wide as an MLP",
            of=(dense,),
        )


def _layers(draft: Draft) -> None:
    """Which layers have experts: a number counts from the first layer on."""
    flag = "--moe-layer-freq"
    typed = draft.arguments.value(flag)
    marks = pattern_of(draft, flag)
    if marks is None:
        return
    if str(typed).isdecimal():
        marks = [True, *[False] * (int(str(typed)) - 1)][: draft.number("--num-layers")]
    if not all(marks):
        draft.put(flag, "model.moe.layers", list(marks))


def _router(draft: Draft) -> None:
    arguments = draft.arguments
    score, chosen = (
        arguments.value("--moe-router-score-function"),
        draft.number("--moe-router-topk"),
    )
    if _words(arguments.value(_TYPES)) == ["sinkhorn"]:
        score = "sigmoid" if chosen == 1 else "softmax"
        draft.put(
            _TYPES, "model.moe.router.score", score, "sinkhorn's weights are scores of all experts"
        )
        draft.put(_TYPES, "model.moe.router.norm_topk_prob", False)
    else:
        ours = "sqrt_softplus" if score == "sqrtsoftplus" else score
        draft.put("--moe-router-score-function", "model.moe.router.score", ours)
        bare = score == "softmax" and bool(arguments.value("--moe-router-pre-softmax"))
        draft.put(
            "--moe-router-pre-softmax" if score == "softmax" else "--moe-router-score-function",
            "model.moe.router.norm_topk_prob",
            not bare and not (score != "softmax" and chosen == 1),
        )
    if arguments.value("--moe-router-group-topk") is not None and score == "softmax":
        draft.say(
            "already",
            "--moe-router-group-topk",
            "groups are judged by the sum of their best experts",
        )
    dtype = arguments.value("--moe-router-dtype")
    text = "" if dtype else "Megatron's router computes in the model's dtype; fp32 is safer"
    draft.put("--moe-router-dtype", "model.moe.router.dtype", dtype or "model", text)
    if arguments.value("--moe-router-enable-expert-bias"):
        draft.put("--moe-router-enable-expert-bias", "model.moe.router.expert_bias", True)
        draft.copy("--moe-router-bias-update-rate")
    devices = "--moe-router-topk-limited-devices"
    if arguments.value(devices) is not None:
        draft.put(
            devices,
            "model.moe.router.num_groups",
            draft.number("--expert-model-parallel-size"),
            "one per ep rank",
        )
        draft.put(devices, "model.moe.router.topk_groups", arguments.value(devices))


def _balance(draft: Draft) -> None:
    """One loss, several with a weight each, a plan, or nothing."""
    kinds = _words(draft.arguments.value(_TYPES)) or ["aux_loss"]
    weights = _words(draft.arguments.value(_WEIGHTS)) or ["0"]
    if kinds == ["sinkhorn"]:
        draft.put(_TYPES, "model.moe.aux_loss.sinkhorn", True)
        return
    if kinds == ["quantile_balancing"]:
        draft.put(_TYPES, "model.moe.aux_loss.quantile", True)
        if draft.arguments.value("--moe-router-quantile-balancing-ema"):
            draft.copy("--moe-router-quantile-balancing-ema")
        return
    unknown = [kind for kind in kinds if kind not in (*LOSSES, "none")]
    if unknown:
        draft.say(
            "not mapped", _TYPES, f"{', '.join(unknown)} is not built here. Use aux_loss", "model"
        )
        return
    named = [kind for kind in kinds if kind in LOSSES]
    if len(weights) != max(len(named), 1) or (len(named) != len(kinds) and len(kinds) > 1):
        draft.problems.append(
            f"{_TYPES} {' '.join(kinds)} with {_WEIGHTS} {' '.join(weights)}: expected one weight "
            f"for each loss. Use {_WEIGHTS} with {len(named)} numbers."
        )
        return
    for kind, weight in zip(named, weights, strict=False):
        try:
            value = float(weight)
        except ValueError:
            draft.problems.append(f"{_WEIGHTS} {weight} must be a number. Use {_WEIGHTS} 0.01.")
            return
        draft.put(_WEIGHTS, f"model.moe.aux_loss.{LOSSES[kind]}", value, kind)
    if not any(map(float, weights[: len(named)])):
        draft.say("already", _TYPES, "no loss keeps experts busy")


def _capacity(draft: Draft) -> None:
    flag = "--moe-expert-capacity-factor"
    factor = draft.arguments.value(flag)
    if not isinstance(factor, int | float) or factor < 0:
        return
    draft.put(
        flag, "model.moe.capacity.factor", factor, "of a microbatch over all ranks that share it"
    )
    policy = draft.arguments.value("--moe-token-drop-policy")
    draft.put(
        "--moe-token-drop-policy",
        "model.moe.capacity.drop",
        "last" if policy == "position" else "least",
    )
    if draft.arguments.value("--moe-pad-expert-input-to-capacity"):
        draft.put("--moe-pad-expert-input-to-capacity", "model.moe.capacity.pad", True)


def _switches(draft: Draft) -> None:
    """What stands alone, and the biases that Megatron gives to all its matrices."""
    for flag, setting in (
        ("--moe-router-force-load-balancing", "model.moe.router.force_load_balancing"),
        ("--moe-apply-probs-on-input", "model.moe.apply_router_weight_on_input"),
        ("--moe-shared-expert-gate", "model.moe.shared_gate"),
        ("--overlap-moe-expert-parallel-comm", "parallel.overlap_experts"),
        ("--moe-per-layer-logging", "observe.per_layer"),
    ):
        if draft.arguments.value(flag):
            draft.put(flag, setting, True)
    every = "--save-tokens-per-expert-interval"
    if draft.arguments.value(every):
        draft.put(
            every,
            "observe.per_layer",
            True,
            "in metrics.jsonl, of all ranks, every train.log_every steps",
        )
    skew = draft.arguments.value("--moe-router-force-biased")
    if isinstance(skew, int | float) and skew:
        text = "" if skew < 0 else "the same numbers in every step, as with a number below 0"
        draft.put("--moe-router-force-biased", "model.moe.router.force_biased", abs(skew), text)
    dense, shared = "model.mlp_bias", draft.arguments.value("--moe-shared-expert-intermediate-size")
    if (
        not draft.settings.get("model.moe.layers") and not shared
    ):  # nothing that such a bias would belong to
        draft.settings[dense] = False
        draft.entries = [entry for entry in draft.entries if entry.setting != dense]
    linear = not draft.arguments.value("--disable-bias-linear")
    for setting in ("model.moe.biases", "model.moe.router.bias"):
        draft.put("--disable-bias-linear", setting, linear)


CAPTURES = {
    "--moe-routing-trace-capture-hidden-states": "hidden",
    "--moe-routing-trace-capture-logits": "logits",
    "--moe-routing-trace-dump-weights": "routers",
}


def translate_trace(draft: Draft) -> None:
    """What routers choose, written in the first steps or, as Megatron does by default, in
    all; and beside it what they read and made of it."""
    path, most = "--moe-routing-trace-path", "--moe-routing-trace-max-training-iters"
    if not draft.arguments.value("--num-experts") or draft.arguments.value(path) is None:
        for flag in (path, most, *CAPTURES):
            if draft.arguments.given(flag):
                needed = (
                    path
                    if flag != path and draft.arguments.value("--num-experts")
                    else "--num-experts"
                )
                draft.say("already", flag, f"is read with {needed} only")
        return
    asked = {flag: kind for flag, kind in CAPTURES.items() if draft.arguments.value(flag)}
    for flag in asked:
        draft.put(flag, "observe.routing_captures", list(asked.values()))
    steps = "train.steps"
    if not draft.arguments.value(most):  # left out, or 0, which Megatron takes for left out
        draft.put(
            path, "observe.routing_trace", draft.settings.get(steps), "every step", of=(steps,)
        )
        if draft.arguments.given(most):
            draft.say("already", most, "0 is every step, too")
        return
    draft.put(
        path,
        "observe.routing_trace",
        draft.arguments.value(most),
        "to routing/ of the run's folder",
    )
    draft.put(most, "observe.routing_trace", draft.arguments.value(most))


def _words(value: object) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value).split()

"""Translate what differs between layers: layer patterns, block configs, and MoE layers."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.config.block_configs import BlockModelSizes, read_blocks
from megalith.config.fields import Plain
from megalith.megatron.parse import Draft, FlagReport

MAX_PATTERN_LAYERS = 10_000
"""Longest layer list that is expanded. Heuristic: far above any model."""


def read_layer_pattern(draft: Draft, flag: str) -> list[bool] | None:
    """Return the layers that a flag marks, as a repeating pattern; None if it is left out or
    cannot be parsed, which is a problem.

    The value is a number N, which marks every Nth layer, or a list of ones and zeros.
    """
    value = draft.arguments.value(flag)
    if value is None:
        return None
    text, num_layers = str(value), draft.number("--num-layers")
    if text.isdecimal() and int(text) > 0:
        every = int(text)
        return [False] * (every - 1) + [True] if every <= num_layers else [False]
    marks = _parse_layer_list(text)
    if marks is None or len(marks) != num_layers:
        draft.problems.append(
            f"{flag} {text} must be a number above 0, or a list of {num_layers} ones and zeros, "
            f"one for each layer. Use {flag} 4 for every fourth layer."
        )
        return None
    return _find_shortest_period(marks)


def _parse_layer_list(text: str) -> list[bool] | None:
    """Parse a list such as `([0]*3+[1])*4`; only sums and products are evaluated."""
    try:
        values = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not isinstance(values, list) or not set(values) <= {0, 1}:
        return None
    return [value == 1 for value in values]


def _evaluate(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            numbers = [_evaluate(element) for element in elements]
            if all(isinstance(number, int) for number in numbers):
                return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _evaluate(left), _evaluate(right)
            if not isinstance(first, list) or not isinstance(second, int):
                raise ValueError(f"{ast.unparse(node)} must be a list times a number")
            if len(first) * second <= MAX_PATTERN_LAYERS:
                return first * second
    raise ValueError(f"{ast.unparse(node)} must be ones and zeros in a list")


def _find_shortest_period(marks: list[bool]) -> list[bool]:
    """Return the shortest pattern that repeats to this one.

    >>> _find_shortest_period([False, True, False, True]), _find_shortest_period([True, False])
    ([False, True], [True, False])
    """
    for length in range(1, len(marks)):
        if all(mark == marks[layer % length] for layer, mark in enumerate(marks)):
            return marks[:length]
    return marks


# --- block configs

PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
GROUPS, FFN_SIZE = "--num-query-groups", "--ffn-hidden-size"
SIZE_FLAGS = ("--num-layers", "--num-attention-heads", "--hidden-size")
LAYER_SETTINGS = ("attention", "mlp", "num_kv_heads", "ffn_hidden_size")

REQUIRED_FLAGS: tuple[tuple[str, object, str], ...] = (
    ("model.activation", "silu", "--swiglu"),
    ("model.gated", True, "--swiglu"),
    ("model.norm", "rms", "--normalization RMSNorm"),
    ("model.positions", "rope", "--position-embedding-type rope"),
    ("model.rope.fraction", 1.0, "--rotary-percent 1.0"),
)
"""(setting, value, flag that sets it): what Megatron requires with block configs."""

FILE_FIELDS: tuple[tuple[str, str, str], ...] = (
    ("num_hidden_layers", "--num-layers", "model.num_layers"),
    ("hidden_size", "--hidden-size", "model.hidden_size"),
    ("num_attention_heads", "--num-attention-heads", "model.num_heads"),
    ("rope_theta", "--rotary-base", "model.rope.theta"),
)
"""(field of the file, flag, setting) that must agree if the file has the field."""

TEXT_WITHOUT_FILE = (
    "layers are built from it. Megatron compares it with the other arguments, but builds equal "
    f"layers unless {PATH} is also given. Use {PATH} with a file of this text"
)
"""Report on block configs that are given as text only."""


def translate_block_configs(draft: Draft) -> None:
    """Translate block configs, which give each layer its own sizes, from a file or from text.

    Megatron reads the text if both are given, and builds unequal layers only if a file is given.
    """
    flag = PATH if draft.arguments.value(TEXT) is None else TEXT
    if draft.arguments.value(flag) is None:
        return
    document = _read_document(draft, flag)
    if document is None:
        return
    if flag == TEXT and draft.arguments.given(PATH):
        draft.report("already", PATH, f"{TEXT} takes precedence")
    problems = (*_find_missing_flags(draft), *_find_disagreements(draft, document))
    draft.problems += [f"{flag}: {text}" for text in problems]
    if all(draft.sure(name) for name in SIZE_FLAGS):
        _translate_blocks(draft, flag, document)


def _translate_blocks(draft: Draft, flag: str, document: Mapping[str, Any]) -> None:
    num_layers, num_heads, hidden_size = (draft.number(name) for name in SIZE_FLAGS)
    kv_heads, ffn_size = (draft.settings.get(f"model.{name}") for name in LAYER_SETTINGS[2:])
    sizes = BlockModelSizes(
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
        num_kv_heads=kv_heads if isinstance(kv_heads, int) else None,
        ffn_hidden_size=ffn_size if isinstance(ffn_size, int) else None,
    )
    blocks = read_blocks(document.get("block_configs"), sizes)
    if blocks.problems:
        draft.problems += [f"{flag}: {text} Correct the file." for text in blocks.problems]
        return
    kv_problems = _compare_kv_heads(draft, document, blocks.num_kv_heads)
    draft.problems += [f"{flag}: {text}" for text in kv_problems]
    patterns = {
        f"model.layers.{name}": list(getattr(blocks.layers, name)) for name in LAYER_SETTINGS
    }
    for setting, pattern in patterns.items():
        if pattern:
            draft.put(flag, setting, pattern)
    kv_changed = _override(
        draft, flag, "model.num_kv_heads", blocks.num_kv_heads, "the maximum over the layers"
    )
    ffn_changed = _override(
        draft, flag, "model.ffn_hidden_size", blocks.ffn_hidden_size, "the maximum over the layers"
    )
    if ffn_changed and draft.arguments.given(FFN_SIZE):
        draft.report("already", FFN_SIZE, f"applies only to layers without this size in {flag}")
    is_heterogeneous = kv_changed or ffn_changed or any(patterns.values())
    if flag == TEXT and not draft.arguments.given(PATH) and is_heterogeneous:
        draft.entries.append(
            FlagReport(verdict="explained", flag=TEXT, text=TEXT_WITHOUT_FILE, effect="numbers")
        )


def _override(draft: Draft, flag: str, setting: str, value: int, text: str) -> bool:
    """Replace the value of a setting, with its reports, and return whether it changed."""
    if draft.settings.get(setting) == value:
        return False
    draft.entries = [entry for entry in draft.entries if entry.setting != setting]
    draft.put(flag, setting, value, text)
    return True


def _read_document(draft: Draft, flag: str) -> Mapping[str, Any] | None:
    """Return the JSON object in the file or text of a flag; None, and a problem, if there is
    none."""
    value = str(draft.arguments.value(flag))
    try:
        text = storage.read_text(Path(value), allow_pipe=True) if flag == PATH else value
        document = storage.parse_json(text)
    except (OSError, ValueError) as error:
        draft.problems.append(
            f"{flag} {value:.60}: {error}. Pass a JSON object with block_configs."
        )
        return None
    if isinstance(document, dict):
        return document
    draft.problems.append(
        f"{flag} {value:.60} contains {document!r:.40}, expected a JSON object with block_configs."
    )
    return None


def _find_missing_flags(draft: Draft) -> list[str]:
    """Return messages about arguments that Megatron does not accept with block configs."""
    settings = draft.settings
    problems = [
        f"these layers need {flag}, and {setting} would be {settings[setting]!r}. Pass {flag}."
        for setting, value, flag in REQUIRED_FLAGS
        if settings.get(setting, value) != value
    ]
    for flag in ("--multi-latent-attention", "--num-experts"):
        if draft.arguments.value(flag):
            typed = draft.arguments.typed(flag)
            problems.append(
                f"block configs do not support {typed}. Remove {flag}, or the block configs."
            )
    return problems


def _find_disagreements(draft: Draft, document: Mapping[str, Any]) -> list[str]:
    """Return messages about fields of the file that differ from the other arguments."""
    settings = draft.settings
    problems = [
        f"{field}={document[field]!r}, and {flag} makes it {settings[setting]!r}. Set {flag} "
        f"to {document[field]!r}."
        for field, flag, setting in FILE_FIELDS
        if document.get(field) is not None
        and setting in settings
        and settings[setting] != document[field]
    ]
    field, flag = "tie_word_embeddings", "--untie-embeddings-and-output-weights"
    tied, file_tied = settings.get("model.tied_embeddings"), document.get(field)
    if isinstance(file_tied, bool) and file_tied != tied:
        verb = "Remove" if tied is False else "Pass"
        problems.append(f"{field}={file_tied}, and it would be {tied}. {verb} {flag}.")
    return problems + _compare_rope_scaling(draft, document.get("rope_scaling"))


def _compare_kv_heads(draft: Draft, document: Mapping[str, Any], num_kv_heads: int) -> list[str]:
    """Return a message if the other arguments have the same query heads, but not as many KV
    heads."""
    setting, num_heads = "model.num_kv_heads", draft.settings["model.num_heads"]
    ours, file_heads = draft.settings.get(setting), document.get("num_attention_heads")
    if not draft.sure(setting) or ours == num_kv_heads or file_heads not in (None, num_heads):
        return []
    if draft.arguments.value("--group-query-attention"):
        advice = f"and {GROUPS} makes it {ours}. Set {GROUPS} to {num_kv_heads}."
    else:
        advice = f"and it would be {ours}. Pass --group-query-attention {GROUPS} {num_kv_heads}."
    return [f"block_configs has {num_kv_heads} KV heads, {advice}"]


def _compare_rope_scaling(draft: Draft, scaling: object) -> list[str]:
    """Return a message if rope scaling is not llama3 with the factor of the file."""
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    kind, ours = draft.settings.get("model.rope.scaling"), draft.settings.get("model.rope.factor")
    if factor is None or (kind == "llama3" and ours == factor):
        return []
    current = "not scaled" if kind is None else f"scaled by {kind}, {ours}"
    return [
        f"rope_scaling.factor={factor!r}, and positions would be {current}. Pass "
        f"--use-rope-scaling --rope-scaling-factor {factor}."
    ]


# --- mixture of experts

LOSSES = {
    "aux_loss": "batch_coeff",
    "seq_aux_loss": "sequence_coeff",
    "global_aux_loss": "global_batch_coeff",
}
"""Megatron's names of aux losses, and ours."""

CAPTURES = {
    "--moe-routing-trace-capture-hidden-states": "hidden",
    "--moe-routing-trace-capture-logits": "logits",
    "--moe-routing-trace-dump-weights": "routers",
}
"""Flags for what a routing trace contains, and our names."""

_TYPES, _COEFFS = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff"


def translate_moe(draft: Draft) -> None:
    """Translate MoE settings, which Megatron reads only with --num-experts."""
    if not draft.arguments.value("--num-experts"):
        return
    for flag in (
        "--num-experts",
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
    _translate_expert_size(draft)
    _translate_moe_layers(draft)
    _translate_router_score(draft)
    _translate_router(draft)
    _translate_aux_loss(draft)
    _translate_capacity(draft)
    _translate_moe_switches(draft)
    _translate_moe_biases(draft)
    kind = str(draft.arguments.value("--moe-token-dispatcher-type"))
    text = "" if kind != "flex" else "the same results with another transport"
    dispatcher = "allgather" if kind == "allgather" else "alltoall"
    draft.put("--moe-token-dispatcher-type", "parallel.dispatcher", dispatcher, text)


def _translate_expert_size(draft: Draft) -> None:
    """Translate the ffn_hidden_size of an expert: that of the MLP, unless it is given."""
    flag, dense = "--moe-ffn-hidden-size", "model.ffn_hidden_size"
    if draft.arguments.value(flag) is not None:
        draft.copy(flag)
        return
    size = draft.settings.get(dense)
    draft.put(flag, "model.moe.ffn_hidden_size", size, "that of an MLP", of=(dense,))


def _translate_moe_layers(draft: Draft) -> None:
    """Translate which layers have experts; a number counts from the first layer."""
    flag = "--moe-layer-freq"
    value, pattern = draft.arguments.value(flag), read_layer_pattern(draft, flag)
    if pattern is None:
        return
    if str(value).isdecimal():
        pattern = [True, *[False] * (int(str(value)) - 1)][: draft.number("--num-layers")]
    if not all(pattern):
        draft.put(flag, "model.moe.layers", list(pattern))


def _translate_router_score(draft: Draft) -> None:
    """Translate the score function of the router, and whether weights are renormalized."""
    arguments, top_k = draft.arguments, draft.number("--moe-router-topk")
    flag, pre_softmax = "--moe-router-score-function", "--moe-router-pre-softmax"
    score_setting, norm_setting = "model.moe.router.score", "model.moe.router.norm_topk_prob"
    score = arguments.value(flag)
    if _split_words(arguments.value(_TYPES)) == ["sinkhorn"]:
        score = "sigmoid" if top_k == 1 else "softmax"
        draft.put(_TYPES, score_setting, score, "with sinkhorn, weights are scores of all experts")
        draft.put(_TYPES, norm_setting, False)
    else:
        name = "sqrt_softplus" if score == "sqrtsoftplus" else score
        draft.put(flag, score_setting, name)
        if score == "softmax":
            draft.put(pre_softmax, norm_setting, not arguments.value(pre_softmax))
        else:
            draft.put(flag, norm_setting, top_k != 1)
    if arguments.value("--moe-router-group-topk") is not None and score == "softmax":
        text = "groups are ranked by the sum of their best experts"
        draft.report("already", "--moe-router-group-topk", text)


def _translate_router(draft: Draft) -> None:
    arguments = draft.arguments
    dtype = arguments.value("--moe-router-dtype")
    text = "" if dtype else "Megatron's router computes in the dtype of the model; fp32 is safer"
    draft.put("--moe-router-dtype", "model.moe.router.dtype", dtype or "model", text)
    if arguments.value("--moe-router-enable-expert-bias"):
        draft.put("--moe-router-enable-expert-bias", "model.moe.router.expert_bias", True)
        draft.copy("--moe-router-bias-update-rate")
    devices = "--moe-router-topk-limited-devices"
    if arguments.value(devices) is not None:
        ep = draft.number("--expert-model-parallel-size")
        draft.put(devices, "model.moe.router.num_groups", ep, "one per ep rank")
        draft.put(devices, "model.moe.router.topk_groups", arguments.value(devices))
    bias = arguments.value("--moe-router-force-biased")
    if isinstance(bias, int | float) and bias:
        text = "" if bias < 0 else "the same bias in every step, as with a negative number"
        draft.put("--moe-router-force-biased", "model.moe.router.force_biased", abs(bias), text)


def _translate_aux_loss(draft: Draft) -> None:
    """Translate load balancing: aux losses with one coefficient each, sinkhorn, quantiles or
    none."""
    kinds = _split_words(draft.arguments.value(_TYPES)) or ["aux_loss"]
    coeffs = _split_words(draft.arguments.value(_COEFFS)) or ["0"]
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
        text = f"{', '.join(unknown)} is not implemented. Use aux_loss"
        draft.report("not mapped", _TYPES, text, "model")
        return
    losses = [kind for kind in kinds if kind in LOSSES]
    if len(coeffs) != max(len(losses), 1) or (len(losses) != len(kinds) and len(kinds) > 1):
        draft.problems.append(
            f"{_TYPES} {' '.join(kinds)} with {_COEFFS} {' '.join(coeffs)}: expected one "
            f"coefficient for each loss. Use {_COEFFS} with {len(losses)} numbers."
        )
        return
    _translate_coefficients(draft, dict(zip(losses, coeffs, strict=False)))


def _translate_coefficients(draft: Draft, coeffs: Mapping[str, str]) -> None:
    """Set the coefficient of each aux loss."""
    values: list[float] = []
    for kind, text in coeffs.items():
        try:
            values.append(float(text))
        except ValueError:
            draft.problems.append(f"{_COEFFS} {text} must be a number. Use {_COEFFS} 0.01.")
            return
        draft.put(_COEFFS, f"model.moe.aux_loss.{LOSSES[kind]}", values[-1], kind)
    if not any(values):
        draft.report("already", _TYPES, "there is no aux loss")


def _translate_capacity(draft: Draft) -> None:
    flag, policy, pad = (
        "--moe-expert-capacity-factor",
        "--moe-token-drop-policy",
        "--moe-pad-expert-input-to-capacity",
    )
    factor = draft.arguments.value(flag)
    if not isinstance(factor, int | float) or factor < 0:
        return
    text = "of a microbatch over all ranks that share it"
    draft.put(flag, "model.moe.capacity.factor", factor, text)
    drop = "last" if draft.arguments.value(policy) == "position" else "least"
    draft.put(policy, "model.moe.capacity.drop", drop)
    if draft.arguments.value(pad):
        draft.put(pad, "model.moe.capacity.pad", True)


def _translate_moe_switches(draft: Draft) -> None:
    for flag, setting in (
        ("--moe-router-force-load-balancing", "model.moe.router.force_load_balancing"),
        ("--moe-apply-probs-on-input", "model.moe.apply_router_weight_on_input"),
        ("--moe-shared-expert-gate", "model.moe.shared_gate"),
        ("--overlap-moe-expert-parallel-comm", "parallel.overlap_experts"),
        ("--moe-per-layer-logging", "observe.per_layer"),
    ):
        if draft.arguments.value(flag):
            draft.put(flag, setting, True)
    interval = "--save-tokens-per-expert-interval"
    if draft.arguments.value(interval):
        text = "written to metrics.jsonl every train.log_every steps, summed over all ranks"
        draft.put(interval, "observe.per_layer", True, text)


def _translate_moe_biases(draft: Draft) -> None:
    """Translate biases, which Megatron gives to all matrices; without dense MLPs and shared experts
    model.mlp_bias would have no effect."""
    dense, shared = "model.mlp_bias", "--moe-shared-expert-intermediate-size"
    if not draft.settings.get("model.moe.layers") and not draft.arguments.value(shared):
        draft.settings[dense] = False
        draft.entries = [entry for entry in draft.entries if entry.setting != dense]
    has_biases = not draft.arguments.value("--disable-bias-linear")
    for setting in ("model.moe.biases", "model.moe.router.bias"):
        draft.put("--disable-bias-linear", setting, has_biases)


def translate_routing_trace(draft: Draft) -> None:
    """Translate the routing trace: of the first steps or, by default in Megatron, of all."""
    arguments, setting = draft.arguments, "observe.routing_trace"
    path, max_steps = "--moe-routing-trace-path", "--moe-routing-trace-max-training-iters"
    has_experts = bool(arguments.value("--num-experts"))
    if not has_experts or arguments.value(path) is None:
        for flag in (path, max_steps, *CAPTURES):
            if arguments.given(flag):
                required = path if flag != path and has_experts else "--num-experts"
                draft.report("already", flag, f"takes effect only with {required}")
        return
    captures = {flag: kind for flag, kind in CAPTURES.items() if arguments.value(flag)}
    for flag in captures:
        draft.put(flag, "observe.routing_captures", list(captures.values()))
    steps: Plain = arguments.value(max_steps)
    if steps:
        draft.put(path, setting, steps, "written to routing/ in the run folder")
        draft.put(max_steps, setting, steps)
        return
    all_steps = draft.settings.get("train.steps")
    draft.put(path, setting, all_steps, "every step", of=("train.steps",))
    if arguments.given(max_steps):
        draft.report("already", max_steps, "0 means every step")


def _split_words(value: Plain) -> list[str]:
    if value is None:
        return []
    return [str(word) for word in value] if isinstance(value, list | tuple) else str(value).split()

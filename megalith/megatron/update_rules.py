"""Translate the optimizer of a Megatron run, and its flags, to our update rules."""

from megalith.config.fields import Plain
from megalith.megatron.parse import Draft

_ADAM = ("--adam-beta1", "--adam-beta2", "--adam-eps")
_COUPLED = "--no-decoupled-weight-decay"
_SGD = ("--sgd-momentum",)
_LION = ("--lion-beta1", "--lion-beta2")
_SOAP = ("--soap-shampoo-beta", "--soap-precondition-frequency", "--no-soap-use-kl-shampoo")
_NESTEROV = ("--muon-nesterov", "--muon-use-nesterov")
_NO_NESTEROV = "--muon-no-use-nesterov"
_MUON = (
    "--muon-momentum",
    "--muon-num-ns-steps",
    "--muon-extra-scale-factor",
    "--muon-coefficient-type",
)
_MUON_CHOICES = ("--muon-scale-mode", "--muon-fp32-matmul-prec", "--muon-scalar-optimizer")
_ADAPTIVE = ("--adaptive-muon-moment2-method", "--adaptive-muon-beta2", "--adaptive-muon-eps")

_FLAGS = {
    "adam": (*_ADAM, _COUPLED),
    "sgd": _SGD,
    "lion": _LION,
    "soap": _SOAP,
    "muon": (*_MUON, *_MUON_CHOICES, *_NESTEROV, _NO_NESTEROV, "--muon-no-split-qkv"),
    "adaptive_muon": _ADAPTIVE,
}
"""Flags of each value of --optimizer."""

_SCALES = {"spectral": "spectral", "unit_rms_norm": "unit_rms", "shape_scaling": "shape"}
_DTYPES = {"low": "bf16", "medium": "bf16", "high": "fp32"}
"""Precision of fp32 matmuls in torch -> optim.muon.dtype; medium and low multiply in bf16."""

_SCALARS = {"adam": "adamw", "lion": "lion"}


def translate_update_rule(draft: Draft) -> None:
    """Translate --optimizer and the flags of the update rule."""
    optimizer = str(draft.arguments.value("--optimizer"))
    used = {optimizer}
    if optimizer == "sgd":
        draft.put("--optimizer", "optim.kind", "sgd")
        draft.copy("--sgd-momentum")
    elif optimizer == "adam":
        _translate_adam(draft)
    elif optimizer == "lion":
        draft.put("--optimizer", "optim.kind", "lion")
        for flag in _LION:
            draft.copy(flag)
    elif optimizer == "soap":
        used |= {"adam"}
        _translate_soap(draft)
    else:
        used |= _translate_muon(draft, optimizer)
    for other in _FLAGS.keys() - used:
        for flag in _FLAGS[other]:
            if draft.arguments.given(flag):
                draft.report("already", flag, f"takes effect only with --optimizer {other}")


def _translate_adam(draft: Draft) -> None:
    for flag in _ADAM:
        draft.copy(flag)
    if draft.arguments.value(_COUPLED):
        draft.put(_COUPLED, "optim.decoupled_weight_decay", False)


def _translate_soap(draft: Draft) -> None:
    """Translate SOAP, whose moments have the betas and the epsilon of Adam."""
    draft.put("--optimizer", "optim.kind", "soap")
    _translate_adam(draft)
    for flag, name in zip(_ADAM, ("beta1", "beta2", "eps"), strict=True):
        draft.put(flag, f"optim.soap.{name}", draft.arguments.value(flag))
    for flag in _SOAP[:2]:
        draft.copy(flag)
    kl = not draft.arguments.value("--no-soap-use-kl-shampoo")
    draft.put("--no-soap-use-kl-shampoo", "optim.soap.kl", kl)
    _add_router_group(draft, "soap")


def _translate_muon(draft: Draft, optimizer: str) -> set[str]:
    """Translate Muon and its variants; return the values of --optimizer whose flags it reads."""
    arguments = draft.arguments
    draft.put("--optimizer", "optim.kind", "muon")
    if optimizer == "dist_muon":
        draft.put("--optimizer", "parallel.zero", 1)
        if not draft.settings.get("model.moe.num_experts"):
            # the experts of a layer are one unit of a bucket, often longer than a slice may be
            draft.put("--optimizer", "parallel.bucket_alignment", "matrices")
    for flag in _MUON:
        draft.copy(flag)
    nesterov = any(arguments.value(flag) for flag in _NESTEROV)
    given = next((flag for flag in _NESTEROV if arguments.given(flag)), _NO_NESTEROV)
    draft.put(given, "optim.muon.nesterov", nesterov and not arguments.value(_NO_NESTEROV))
    scale = str(arguments.value("--muon-scale-mode"))
    draft.put("--muon-scale-mode", "optim.muon.scale", _SCALES.get(scale, scale))
    precision = str(arguments.value("--muon-fp32-matmul-prec"))
    draft.put("--muon-fp32-matmul-prec", "optim.muon.dtype", _DTYPES.get(precision, precision))
    split = "fused" if arguments.value("--muon-no-split-qkv") else "matrices"
    draft.put("--muon-no-split-qkv", "optim.muon.split", split)
    if draft.settings.get("model.gated", True):
        text = (
            "gate and up are orthogonalized separately (optim.muon.split); Megatron orthogonalizes "
            "both as one matrix"
        )
        draft.report("explained", "--optimizer", text, "numbers")
    scalar = str(arguments.value("--muon-scalar-optimizer"))
    setting = "optim.scalar_optimizer"
    draft.put("--muon-scalar-optimizer", setting, _SCALARS.get(scalar, scalar))
    used = {"muon", "adam" if scalar == "adam" else "lion"}
    if scalar == "adam":
        _translate_adam(draft)
    for flag in _LION if scalar == "lion" else ():
        draft.copy(flag)
    _add_router_group(draft, "muon")
    if optimizer != "adaptive_muon":
        return used
    for flag in _ADAPTIVE:
        draft.copy(flag)
    return used | {"adaptive_muon"}


def _add_router_group(draft: Draft, rule: str) -> None:
    """Add a group of the routers, which Megatron updates by the rule of matrices."""
    if not draft.settings.get("model.moe.num_experts"):
        return
    group: dict[str, Plain] = {"name": "routers", "match": ["*.moe.router"], "kind": rule}
    text = "Megatron's matrices include routers"
    add_parameter_group(draft, "--optimizer", group, text)


def add_parameter_group(draft: Draft, flag: str, group: dict[str, Plain], text: str = "") -> None:
    """Append a parameter group to optim.groups."""
    groups = [*(draft.settings.get("optim.groups") or ()), group]
    draft.put(flag, "optim.groups", groups, text)

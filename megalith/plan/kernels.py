"""The ways in which each operation can be computed: what each takes, and which of them a run will
use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalith.config.kernels import (
    OPS,
    BackendName,
    KernelSetting,
    Op,
    is_explicit_backend,
    kernels_of,
    switch_of,
)
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun

CPU, GPU = "cpu", "cuda"  # lint: allow cuda-literal: names of devices, nothing is put on one
NARROW = ("fp32", "bf16")
HALVES = ("bf16", "fp16")
ALL = (*NARROW, "fp16")
SIGMOIDS = ("silu", "gelu_tanh", "quick_gelu")
"""Activations that compiled loops know, in a gate."""

WIDEST = 1 << 16
"""Features of a row that a Triton program of a norm can hold."""


def takes_all(model: ModelConfig) -> str | None:
    """Every model has it."""
    return None


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One way to compute an operation."""

    name: BackendName
    device: str | None
    """Kind of device; None: any."""

    dtypes: tuple[str, ...] = ()
    """Empty: all."""

    limits: str = ""
    """What else it wants of what it is given, in words."""

    deterministic: bool = True
    """The same bits whenever the same comes in."""

    why_not: Callable[[ModelConfig], str | None] = takes_all
    """What of a model it does not know; None: it knows all of it."""

    def takes(self) -> str:
        """In words."""
        parts = [f"on {'GPUs' if self.device == GPU else 'CPUs'}"] if self.device else []
        parts = ([", ".join(self.dtypes)] if self.dtypes else []) + parts
        return "; ".join([" ".join(parts) or "everything", *([self.limits] if self.limits else [])])


def _no_loop_of_layer_norm(model: ModelConfig) -> str | None:
    return None if model.norm == "rms" else f"model.norm={model.norm} has no compiled loop"


def _too_wide(model: ModelConfig) -> str | None:
    h = model.hidden_size
    return (
        None
        if h <= WIDEST
        else f"model.hidden_size={h} is more than the {WIDEST} features that a program holds"
    )


def _no_loop_of_activation(model: ModelConfig) -> str | None:
    if model.gated and model.activation in SIGMOIDS:
        return None
    return (
        f"model.activation={model.activation} with model.gated={str(model.gated).lower()} has "
        "no compiled loop"
    )


def _no_program_without_gate(model: ModelConfig) -> str | None:
    return None if model.gated else "model.gated=false: an activation alone is one pass of torch"


def _strange_scores(model: ModelConfig) -> list[str]:
    """What torch's kernel does not know of scores, but for windows."""
    a = model.attention
    found = [f"model.attention.softcap={a.softcap}"] if a.softcap is not None else []
    found += ["model.attention.sinks=true"] if a.sinks else []
    found += ["model.attention.off_by_one=true"] if a.off_by_one else []
    found += (
        [f"model.dropout.attention={model.dropout.attention}"]
        if model.dropout.attention > 0
        else []
    )
    return found + (["model.positions=relative"] if model.positions == "relative" else [])


def _not_plain(model: ModelConfig) -> str | None:
    window = model.attention.window
    found = _strange_scores(model) + (
        [f"model.attention.window={window}"] if window is not None else []
    )
    return f"{', '.join(found)}: it knows plain scores only" if found else None


def _not_windowed(model: ModelConfig) -> str | None:
    found = _strange_scores(model)
    return f"{', '.join(found)}: it knows windows and plain scores only" if found else None


def _not_flexible(model: ModelConfig) -> str | None:
    found = [
        one
        for one in _strange_scores(model)
        if one.startswith(("model.dropout", "model.positions"))
    ]
    return f"{', '.join(found)}: it drops no weights, and knows no biases" if found else None


def _biased(model: ModelConfig) -> str | None:
    return "model.positions=relative: it knows no biases" if model.positions == "relative" else None


def _unequal_groups(model: ModelConfig) -> str | None:
    padded = model.moe is not None and model.moe.capacity.pad
    return (
        None
        if padded
        else "experts have as many rows as tokens choose; with model.moe.capacity.pad=true all "
        "alike"
    )


def _one_pass(loops: BackendSpec, triton: BackendSpec) -> tuple[BackendSpec, ...]:
    return loops, triton, BackendSpec("torch", None), BackendSpec("reference", None)


BACKENDS: Mapping[Op, tuple[BackendSpec, ...]] = {
    "norm": _one_pass(
        BackendSpec(
            "numba",
            CPU,
            NARROW,
            "RMSNorm, all tensors of one dtype",
            why_not=_no_loop_of_layer_norm,
        ),
        BackendSpec("triton", GPU, ALL, f"rows of up to {WIDEST} features", why_not=_too_wide),
    ),
    "rope": _one_pass(BackendSpec("numba", CPU, NARROW), BackendSpec("triton", GPU, ALL)),
    "activation": _one_pass(
        BackendSpec(
            "numba", CPU, NARROW, f"gates of {', '.join(SIGMOIDS)}", why_not=_no_loop_of_activation
        ),
        BackendSpec(
            "triton",
            GPU,
            ALL,
            "gates, and squared ReLU times a weight",
            why_not=_no_program_without_gate,
        ),
    ),
    "dropout": (
        BackendSpec("numba", CPU, NARROW),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
    "attention": (
        BackendSpec(
            "cpu_tiled",
            CPU,
            (),
            "whole documents without a cache or masks, plain scores",
            why_not=_not_plain,
        ),
        BackendSpec(
            "varlen",
            GPU,
            HALVES,
            "heads of at most 256 features, 8 by 8; no masks",
            False,
            _not_windowed,
        ),
        BackendSpec("flex", GPU, ALL, "heads of 16 features or more", False, _not_flexible),
        BackendSpec("sdpa", None, (), "plain scores, or masks of pairs", False, _not_plain),
        BackendSpec("split_kv", None, (), "no masks but those of tokens", why_not=_biased),
        BackendSpec("torch", None, deterministic=False),
        BackendSpec("reference", None),
    ),
    "experts": (
        BackendSpec("grouped", None, NARROW, "rows of a multiple of 16 bytes; on GPUs bf16"),
        BackendSpec(
            "batched", None, (), "equally many rows for every expert", why_not=_unequal_groups
        ),
        BackendSpec("loop", None),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
    "cross_entropy": _one_pass(BackendSpec("numba", CPU, NARROW), BackendSpec("triton", GPU, ALL)),
    "matmul": (
        BackendSpec("upcast", CPU, ("bf16",), "fp32 on upcast operands"),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
}
"""Of every operation, what is fastest where it can be had first."""


def find_backend_spec(op: Op, form: BackendName) -> BackendSpec:
    """The row of the table."""
    return next(backend for backend in BACKENDS[op] if backend.name == form)


UNCOMPILED: tuple[Op, ...] = ("cross_entropy", "matmul")
"""Operations that train.compile=true leaves as they are."""


def used_ops(model: ModelConfig, *, bf16_on_cpu: bool = False) -> tuple[Op, ...]:
    """Operations that a model has; of matmuls only those of bf16 on CPUs can be computed in several
    ways."""
    absent: dict[Op, bool] = {
        "rope": model.positions != "rope",
        "dropout": not model.dropout.drops(),
        "experts": model.moe is None,
        "matmul": not bf16_on_cpu,
    }
    return tuple(op for op in OPS if not absent.get(op, False))


def why_not(
    backend: BackendSpec, dtype: str, device: str | None, missing: Mapping[str, str]
) -> str | None:
    """Why a run cannot use it, whatever its model; None: it can. `device`: None where that is
    not known yet; `missing`: what this machine lacks, by the name of a way."""
    if device is not None and backend.device not in (None, device):
        return (
            f"it works on {'GPUs' if backend.device == GPU else 'CPUs'}, and this run is on "
            f"{device}"
        )
    if backend.dtypes and dtype not in backend.dtypes:
        return f"it takes {', '.join(backend.dtypes)}, and precision.params={dtype}"
    return None if device is None else missing.get(backend.name)


def explicit_backend_problems(
    run: TrainRun, device: str | None = None, missing: Mapping[str, str] | None = None
) -> list[str]:
    """Ways that are asked for by name and cannot be had, as messages for the user, each with one
    that can."""
    config, found = kernels_of(run.kernels), []
    for op in OPS:
        form = config.of(op)
        reason = (
            _refused(op, form, run, device, missing or {}) if is_explicit_backend(form) else None
        )
        if reason is not None:
            found.append(f"kernels.{op}={form}: {reason}. Set kernels.{op} to {_works(op, run)}.")
    return found


def _refused(
    op: Op, form: BackendName, run: TrainRun, device: str | None, missing: Mapping[str, str]
) -> str | None:
    backend, shared = find_backend_spec(op, form), run.parallel.cp
    if absent := _absent(op, run):
        return absent
    if op == "attention" and shared > 1 and form != "split_kv":
        return (
            f"ranks of parallel.cp={shared} share tokens, and compute attention by intervals "
            "of keys"
        )
    if op not in UNCOMPILED and run.train.compile:
        return "train.compile=true compiles layers from plain definitions"
    reason = backend.why_not(run.model) or (
        _meets_padding(run) if form in ("cpu_tiled", "varlen") else None
    )
    return reason or why_not(backend, run.precision.params, device, missing)


def _meets_padding(run: TrainRun) -> str | None:
    """Why a way that knows no masks cannot read all rows of a run."""
    if run.model.attention.causal or not run.data.keep_partial_valid:
        return None
    return (
        "data.keep_partial_valid=true with model.attention.causal=false: the last row ends with "
        "padding, which is "
        "hidden by a mask, and it knows none"
    )


def _absent(op: Op, run: TrainRun) -> str | None:
    """Why a run has nothing to compute so; None: it has."""
    model = run.model
    if op == "experts" and model.moe is None:
        return "model.moe=null: there are none"
    if op == "rope" and model.positions != "rope":
        return f"model.positions={model.positions}: nothing is rotated"
    if (
        op == "dropout"
        and not model.dropout.drops()
        and (run.lora is None or run.lora.dropout == 0)
    ):
        return (
            f"model.dropout.residual={model.dropout.residual}, and all else is 0: nothing is "
            "dropped"
        )
    return None


def _works(op: Op, run: TrainRun) -> str:
    """What to set instead."""
    if op == "attention" and run.parallel.cp > 1 and not run.train.compile:
        return "split_kv, or to auto"
    return (
        "auto" if run.train.compile or op == "experts" or _absent(op, run) else "torch, or to auto"
    )


NO_BF16_KERNELS = "torch has no bf16 kernels for this CPU, so bf16 matmuls are computed in fp32"


def describe_kernels(
    run: TrainRun, device: str, missing: Mapping[str, str], *, bf16_kernels: bool = True
) -> list[str]:
    """Which way every operation takes, in one line; and one for every reason why it is not the
    fastest there is.

    `bf16_kernels`: whether torch has bf16 kernels for this CPU.
    """
    config, words, reasons = kernels_of(run.kernels), [], dict[str, list[str]]()
    bf16_on_cpu = device == CPU and run.precision.params == "bf16"
    for op in used_ops(run.model, bf16_on_cpu=bf16_on_cpu):
        form = config.of(op)
        if form == "auto" and op == "matmul":
            chosen, told = ("torch", {}) if bf16_kernels else ("upcast", {"torch": NO_BF16_KERNELS})
        else:
            chosen, told = (form, {}) if form != "auto" else _automatic(op, run, device, missing)
        words.append(f"{op} {chosen}")
        for reason in told.values():
            reasons.setdefault(reason, []).append(op)
    switch = switch_of(run.kernels)
    compiled = " (layers compiled by torch)" if run.train.compile else ""
    lines = [f"kernels: {switch}{compiled}: {', '.join(words)}"]
    return lines + [
        f"kernels: {', '.join(ops)} fall back: {reason}" for reason, ops in reasons.items()
    ]


def _automatic(
    op: Op, run: TrainRun, device: str, missing: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """What auto takes, and why nothing faster for this kind of device. Of attention and experts,
    lengths and sizes of every call choose among several."""
    if run.train.compile and op not in UNCOMPILED:
        return "compiled", {}
    found, told = [], dict[str, str]()
    for backend in BACKENDS[op]:
        if backend.device not in (None, device) or backend.name in ("torch", "reference"):
            continue
        reason = why_not(backend, run.precision.params, device, missing) or backend.why_not(
            run.model
        )
        if reason is None:
            found.append(backend.name)
        elif op not in ("attention", "experts"):
            told[backend.name] = f"{backend.name}: {reason}"
    if op == "attention" and run.parallel.cp > 1:
        return "split_kv across ranks", {}
    return " or ".join(found) or "torch", told


def list_backend_specs() -> list[tuple[Op, BackendName, str, str]]:
    """Operation, way, what it takes, and whether the same bits come out every time: for people."""
    return [
        (op, backend.name, backend.takes(), "yes" if backend.deterministic else "no promise")
        for op, backends in BACKENDS.items()
        for backend in backends
        if is_explicit_backend(backend.name)
    ]


def describe_kernel_setting(setting: KernelSetting) -> str:
    """As one would write it: `reference`, or `auto, norm=numba`."""
    config = kernels_of(setting)
    own = [f"{op}={getattr(config, op)}" for op in OPS if getattr(config, op) != "auto"]
    return ", ".join([config.all, *own])

"""Backends of each operation: what each supports, and which of them a run uses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megalith.config.kernels import (
    OPS,
    BackendName,
    KernelSetting,
    Op,
    default_backend,
    expand_kernel_setting,
    is_explicit_backend,
)
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.plan.costs import num_parameters
from megalith.plan.update_rules import uses_adamw

CPU, GPU = "cpu", "cuda"  # lint: allow cuda-literal: names of devices, nothing is put on one
NARROW = ("fp32", "bf16")
HALVES = ("bf16", "fp16")
ALL = (*NARROW, "fp16")
SIGMOIDS = ("silu", "gelu_tanh", "quick_gelu")
"""Gate activations that the Numba kernels support."""

WIDEST = 1 << 16
"""Largest number of features per row of the Triton norm kernels."""


def supports_all(model: ModelConfig) -> str | None:
    """Return None: the backend supports every model."""
    return None


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend of an operation and the inputs that it supports."""

    name: BackendName
    device: str | None
    """Device type; None: any."""

    dtypes: tuple[str, ...] = ()
    """Supported dtypes; empty: all."""

    limits: str = ""
    """Other limits on its inputs, as text."""

    deterministic: bool = True
    """Whether equal inputs give bitwise equal results."""

    why_not: Callable[[ModelConfig], str | None] = supports_all
    """Why it does not support a model, as text; None: it supports it."""

    def describe_inputs(self) -> str:
        """Describe the supported inputs."""
        parts = [f"on {'GPUs' if self.device == GPU else 'CPUs'}"] if self.device else []
        parts = ([", ".join(self.dtypes)] if self.dtypes else []) + parts
        return "; ".join([" ".join(parts) or "everything", *([self.limits] if self.limits else [])])


def _no_numba_norm(model: ModelConfig) -> str | None:
    return None if model.norm == "rms" else f"model.norm={model.norm} has no Numba kernel"


def _too_wide(model: ModelConfig) -> str | None:
    h = model.hidden_size
    return (
        None
        if h <= WIDEST
        else f"model.hidden_size={h} is more than the {WIDEST} features that the Triton kernel "
        "supports"
    )


def _no_numba_activation(model: ModelConfig) -> str | None:
    if model.gated and model.activation in SIGMOIDS:
        return None
    return (
        f"model.activation={model.activation} with model.gated={str(model.gated).lower()} has "
        "no Numba kernel"
    )


def _no_triton_activation(model: ModelConfig) -> str | None:
    return None if model.gated else "model.gated=false: an ungated activation is one torch kernel"


def _list_score_options(model: ModelConfig) -> list[str]:
    """Return the settings of attention scores that torch's kernel does not support, except
    windows."""
    a = model.attention
    options = [f"model.attention.softcap={a.softcap}"] if a.softcap is not None else []
    options += ["model.attention.sinks=true"] if a.sinks else []
    options += ["model.attention.off_by_one=true"] if a.off_by_one else []
    options += (
        [f"model.dropout.attention={model.dropout.attention}"]
        if model.dropout.attention > 0
        else []
    )
    return options + (["model.positions=relative"] if model.positions == "relative" else [])


def _not_plain(model: ModelConfig) -> str | None:
    window = model.attention.window
    options = _list_score_options(model) + (
        [f"model.attention.window={window}"] if window is not None else []
    )
    return f"{', '.join(options)}: it supports plain scores only" if options else None


def _not_windowed(model: ModelConfig) -> str | None:
    options = _list_score_options(model)
    return f"{', '.join(options)}: it supports windows and plain scores only" if options else None


def _not_flexible(model: ModelConfig) -> str | None:
    options = [
        one
        for one in _list_score_options(model)
        if one.startswith(("model.dropout", "model.positions"))
    ]
    return (
        f"{', '.join(options)}: it supports neither attention dropout nor biases"
        if options
        else None
    )


def _biased(model: ModelConfig) -> str | None:
    return (
        "model.positions=relative: it does not support biases"
        if model.positions == "relative"
        else None
    )


def _no_paged_cache(model: ModelConfig) -> str | None:
    return "it reads the paged KV cache of the inference engine, and training has none"


def _unequal_groups(model: ModelConfig) -> str | None:
    padded = model.moe is not None and model.moe.capacity.pad
    return (
        None
        if padded
        else "experts have different numbers of rows without model.moe.capacity.pad=true"
    )


def _elementwise_backends(numba: BackendSpec, triton: BackendSpec) -> tuple[BackendSpec, ...]:
    return numba, triton, BackendSpec("torch", None), BackendSpec("reference", None)


BACKENDS: Mapping[Op, tuple[BackendSpec, ...]] = {
    "norm": _elementwise_backends(
        BackendSpec(
            "numba",
            CPU,
            NARROW,
            "RMSNorm, all tensors of one dtype",
            why_not=_no_numba_norm,
        ),
        BackendSpec("triton", GPU, ALL, f"rows of up to {WIDEST} features", why_not=_too_wide),
    ),
    "rope": _elementwise_backends(
        BackendSpec("numba", CPU, NARROW), BackendSpec("triton", GPU, ALL)
    ),
    "activation": _elementwise_backends(
        BackendSpec(
            "numba", CPU, NARROW, f"gates of {', '.join(SIGMOIDS)}", why_not=_no_numba_activation
        ),
        BackendSpec(
            "triton",
            GPU,
            ALL,
            "gates, and squared ReLU times a weight",
            why_not=_no_triton_activation,
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
        BackendSpec(
            "paged",
            CPU,
            NARROW,
            "decoding with a paged KV cache; no biases or masks of pairs",
            why_not=_no_paged_cache,
        ),
        BackendSpec(
            "triton",
            GPU,
            ALL,
            "decoding with a paged KV cache; heads of at most 512 features; no biases or masks of "
            "pairs",
            why_not=_no_paged_cache,
        ),
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
    "cross_entropy": _elementwise_backends(
        BackendSpec("numba", CPU, NARROW), BackendSpec("triton", GPU, ALL)
    ),
    "optimizer": (
        BackendSpec("numba", CPU, NARROW, "AdamW; automatic for models of 2^20 parameters or more"),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
    "matmul": (
        BackendSpec("upcast", CPU, ("bf16",), "fp32 on upcast operands"),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
    "small_batch_matmul": (
        BackendSpec("numba", CPU, NARROW, "inference; weights also int8"),
        BackendSpec("triton", GPU, ALL, "inference; weights also int8"),
        BackendSpec("torch", None),
        BackendSpec("reference", None),
    ),
}
"""Backends of every operation, the fastest first."""


MIN_COMPILED_UPDATE = 1 << 20
"""Parameters of a model from which on `kernels.optimizer=auto` selects the compiled loop (measured:
below, it saves less than 0.1 ms per step, and importing numba takes half a second)."""


def select_optimizer_backend(run: TrainRun) -> BackendName:
    """Return the backend of AdamW's update; auto: the compiled loop wherever it supports the
    tensors.

    It depends on the size of the model, not on that of a rank's slices, because ranks that hold
    replicas of a weight, such as a tied table in two pipeline stages, must use one backend: results
    differ by rounding.
    """
    name = expand_kernel_setting(run.kernels).backend_name("optimizer")
    return "torch" if name == "auto" and num_parameters(run.model) < MIN_COMPILED_UPDATE else name


def find_backend_spec(op: Op, form: BackendName) -> BackendSpec:
    """Return the table entry of a backend."""
    return next(backend for backend in BACKENDS[op] if backend.name == form)


UNCOMPILED: tuple[Op, ...] = ("cross_entropy", "optimizer", "matmul", "small_batch_matmul")
"""Operations that train.compile=true does not compile."""


def used_ops(
    model: ModelConfig, *, bf16_on_cpu: bool = False, has_adamw: bool = False
) -> tuple[Op, ...]:
    """Return the operations of a run that have a choice of backends; matmuls only in bf16 on CPUs,
    the optimizer only if parameters are updated by AdamW."""
    absent: dict[Op, bool] = {
        "rope": model.positions != "rope",
        "dropout": not model.dropout.is_enabled(),
        "experts": model.moe is None,
        "optimizer": not has_adamw,
        "matmul": not bf16_on_cpu,
        "small_batch_matmul": True,  # the inference engine selects it
    }
    return tuple(op for op in OPS if not absent.get(op, False))


def why_not(
    backend: BackendSpec, dtype: str, device: str | None, missing: Mapping[str, str]
) -> str | None:
    """Return why no model of a run can use the backend; None: some can. `device`: None if
    not known yet; `missing`: the reasons that this machine gives, by backend name."""
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
    """Return one error text for each backend that is set by name and cannot be used, with one that
    can."""
    config, problems = expand_kernel_setting(run.kernels), []
    for op in OPS:
        backend_name = config.backend_name(op)
        reason = (
            _find_obstacle(op, backend_name, run, device, missing or {})
            if is_explicit_backend(backend_name)
            else None
        )
        if reason is not None:
            problems.append(
                f"kernels.{op}={backend_name}: {reason}. Set kernels.{op} to "
                f"{_suggest_backend(op, run)}."
            )
    return problems


def _find_obstacle(
    op: Op, backend_name: BackendName, run: TrainRun, device: str | None, missing: Mapping[str, str]
) -> str | None:
    backend, cp = find_backend_spec(op, backend_name), run.parallel.cp
    if absent := _explain_unused_op(op, run):
        return absent
    if op == "attention" and cp > 1 and backend_name != "split_kv":
        return (
            f"with parallel.cp={cp}, attention over the tokens of other ranks is computed in "
            "chunks of keys"
        )
    if op not in UNCOMPILED and run.train.compile:
        return "train.compile=true compiles layers from plain definitions"
    reason = backend.why_not(run.model) or (
        _needs_padding_mask(run) if backend_name in ("cpu_tiled", "varlen") else None
    )
    return reason or why_not(backend, run.precision.params, device, missing)


def _needs_padding_mask(run: TrainRun) -> str | None:
    """Return why a backend without masks cannot compute all rows of a run; None if it can."""
    if run.model.attention.causal or not (run.data.keep_partial_valid or run.evaluate):
        return None
    setting = "data.keep_partial_valid=true" if run.data.keep_partial_valid else "evaluate"
    return (
        f"{setting} with model.attention.causal=false: the last row ends with padding, which needs "
        "an attention mask, and it does not support masks"
    )


def _explain_unused_op(op: Op, run: TrainRun) -> str | None:
    """Return why a run does not use the operation; None if it does."""
    model = run.model
    if op == "small_batch_matmul":
        return "only the inference engine has matmuls of few rows"
    if op == "optimizer" and not uses_adamw(run.optim):
        return f"optim.kind={run.optim.kind}: only AdamW has several backends"
    if op == "experts" and model.moe is None:
        return "model.moe=null: there are none"
    if op == "rope" and model.positions != "rope":
        return f"model.positions={model.positions}: nothing is rotated"
    if (
        op == "dropout"
        and not model.dropout.is_enabled()
        and (run.lora is None or run.lora.dropout == 0)
    ):
        return (
            f"model.dropout.residual={model.dropout.residual}, and all else is 0: nothing is "
            "dropped"
        )
    return None


def _suggest_backend(op: Op, run: TrainRun) -> str:
    if op == "attention" and run.parallel.cp > 1 and not run.train.compile:
        return "split_kv, or to auto"
    return (
        "auto"
        if run.train.compile or op == "experts" or _explain_unused_op(op, run)
        else "torch, or to auto"
    )


NO_BF16_KERNELS = "torch has no bf16 kernels for this CPU, so bf16 matmuls are computed in fp32"


def describe_kernels(
    run: TrainRun, device: str, missing: Mapping[str, str], *, bf16_kernels: bool = True
) -> list[str]:
    """Return one line with the backend of every operation, and one line for each reason why an
    operation does not use its fastest backend.

    `bf16_kernels`: whether torch has bf16 kernels for this CPU.
    """
    config, words, reasons = expand_kernel_setting(run.kernels), [], dict[str, list[str]]()
    bf16_on_cpu = device == CPU and run.precision.params == "bf16"
    ops = used_ops(run.model, bf16_on_cpu=bf16_on_cpu, has_adamw=uses_adamw(run.optim))
    for op in ops:
        backend_name = config.backend_name(op)
        if backend_name == "auto" and op == "matmul":
            chosen, op_reasons = (
                ("torch", {}) if bf16_kernels else ("upcast", {"torch": NO_BF16_KERNELS})
            )
        else:
            chosen, op_reasons = (
                (backend_name, {})
                if backend_name != "auto"
                else _select_automatic(op, run, device, missing)
            )
        words.append(f"{op}={chosen}")
        for name, reason in op_reasons.items():
            reasons.setdefault(f"not use {name}: {reason}", []).append(op)
    switch = default_backend(run.kernels)
    compiled = ", layers compiled by torch" if run.train.compile else ""
    lines = [f"kernels ({switch}{compiled}): {', '.join(words)}"]
    return lines + [
        f"kernels: {', '.join(ops)} {'does' if len(ops) == 1 else 'do'} {reason}"
        for reason, ops in reasons.items()
    ]


def _select_automatic(
    op: Op, run: TrainRun, device: str, missing: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Return the backend that `auto` selects and why faster ones for this device do not apply. For
    attention and experts, the backend is selected per call, by lengths and sizes."""
    if run.train.compile and op not in UNCOMPILED:
        return "compiled", {}
    usable, op_reasons = [], dict[str, str]()
    for backend in BACKENDS[op]:
        if backend.device not in (None, device) or backend.name in ("torch", "reference"):
            continue
        reason = why_not(backend, run.precision.params, device, missing) or backend.why_not(
            run.model
        )
        if reason is None:
            usable.append(backend.name)
        elif op not in ("attention", "experts"):
            op_reasons[backend.name] = reason
    if op == "attention" and run.parallel.cp > 1:
        return "split_kv with context parallelism", {}
    if op == "optimizer" and num_parameters(run.model) < MIN_COMPILED_UPDATE:
        return "torch", op_reasons
    if len(usable) < 2:
        return (usable or ["torch"])[0], op_reasons
    varies = "document length" if op == "attention" else "number of tokens"
    return f"{', '.join(usable[:-1])} or {usable[-1]} by {varies}", op_reasons


def list_backend_specs() -> list[tuple[Op, BackendName, str, str]]:
    """Return the rows of the table of backends: operation, backend, supported inputs,
    deterministic."""
    return [
        (
            op,
            backend.name,
            backend.describe_inputs(),
            "yes" if backend.deterministic else "not guaranteed",
        )
        for op, backends in BACKENDS.items()
        for backend in backends
        if is_explicit_backend(backend.name)
    ]


def describe_kernel_setting(setting: KernelSetting) -> str:
    """Return the setting as a user writes it: `reference`, or `auto, norm=numba`."""
    config = expand_kernel_setting(setting)
    own = [f"{op}={getattr(config, op)}" for op in OPS if getattr(config, op) != "auto"]
    return ", ".join([config.all, *own])

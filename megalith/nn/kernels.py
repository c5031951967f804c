"""Kernel backend selection for a whole model: modules hold the operations that they call, and each
operation can be bound to a backend.

Matmuls of bf16 on CPUs are selected for the whole process. Embedding lookup and expert permutation
have a single implementation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from megalith.config.kernels import (
    BackendName,
    KernelsConfig,
    KernelSetting,
    Op,
    expand_kernel_setting,
)
from megalith.kernels.attention.split_kv import reference_span_attention
from megalith.kernels.linear import select_bf16_matmul
from megalith.parallel.context import AllGatherAttend, RingAttend, UlyssesAttend, UlyssesRingAttend
from megalith.parallel.mesh import Mesh

Held = Any  # any attribute of a module


OPERATIONS: Mapping[str, Op] = {
    "norm": "norm",
    "rope": "rope",
    "swiglu": "activation",
    "activation": "activation",
    "weighted": "activation",
    "dropout": "dropout",
    "attention": "attention",
    "experts": "experts",
    "cross_entropy": "cross_entropy",
}
"""Operation of each module of kernels/ that has several backends."""


def use_kernels(models: Iterable[nn.Module], kernels: KernelSetting, mesh: Mesh) -> None:
    """Bind every module's operations to the backends of `kernels`; auto is the default. `matmul` is
    selected for the process."""
    config = expand_kernel_setting(kernels)
    select_bf16_matmul(config.of("matmul"))
    if config == KernelsConfig():
        return
    for model in models:
        for module in model.modules():
            for name, held in list(vars(module).items()):
                vars(module)[name] = with_kernel(held, config, mesh)


def with_kernel(held: Held, config: KernelsConfig, mesh: Mesh) -> Held:
    """Return an attribute with every operation in it, however deep, bound to its backend; the
    attribute itself without any.

    An operation is a function of kernels/ with a keyword `kernel`. Context-parallel attention has
    no backends: with torch or reference it is replaced by the reference over the keys of all ranks.
    """
    if isinstance(held, nn.Module):  # a module that is not registered, for example in a tuple
        use_kernels([held], config, mesh)
        return held
    if isinstance(held, RingAttend | AllGatherAttend | UlyssesAttend | UlyssesRingAttend):
        plain = config.of("attention") in ("torch", "reference")
        return AllGatherAttend(mesh.cp, reference_span_attention) if plain else held
    if isinstance(held, FunctionType):
        return _bind_backend(held, config)
    parts = _parts(held)
    rebound = {name: with_kernel(part, config, mesh) for name, part in parts.items()}
    changed = {name: part for name, part in rebound.items() if part is not parts[name]}
    if not changed:
        return held
    if isinstance(held, partial):
        words = {word: rebound[word] for word in held.keywords}
        return partial(
            rebound[""], *(rebound[str(place)] for place in range(len(held.args))), **words
        )
    return tuple(rebound.values()) if isinstance(held, tuple) else replace(held, **changed)


def _bind_backend(function: FunctionType, config: KernelsConfig) -> Held:
    """Bind an operation to its backend; return any other function unchanged."""
    if "kernel" not in (function.__kwdefaults__ or {}):
        return function
    form: BackendName = config.of(OPERATIONS[function.__module__.rpartition(".")[2]])
    return function if form == "auto" else partial(function, kernel=form)


def _parts(held: Held) -> dict[str, Held]:
    """Return the components of a tuple, a partial function or a dataclass under unique names."""
    if isinstance(held, partial):
        return {"": held.func, **_numbered(held.args), **held.keywords}
    if type(held) is tuple:
        return _numbered(held)
    if is_dataclass(held) and not isinstance(held, type):
        return {field.name: getattr(held, field.name) for field in fields(held) if field.init}
    return {}


def _numbered(values: tuple[Held, ...]) -> dict[str, Held]:
    return {str(place): value for place, value in enumerate(values)}

"""How a whole model computes: its layers hold the operations that they compute with, and each can
be told how to.

Matmuls of bf16 on CPUs are selected for the whole process. CrossLayerState up embeddings and moving
rows to experts have one form, and stay as they are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from megalith.config.kernels import BackendName, KernelsConfig, KernelSetting, Op, kernels_of
from megalith.kernels.matmul import select_bf16_matmul
from megalith.kernels.span_attention import reference_span_attention
from megalith.parallel.context import AllGatherAttend, HeadExchange, HeadsThenRing, Ring
from megalith.parallel.mesh import Mesh

Held = Any  # whatever an attribute of a layer is


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
"""What the files of kernels/ that have several forms compute."""


def use_kernels(models: Iterable[nn.Module], kernels: KernelSetting, mesh: Mesh) -> None:
    """Let every layer compute by `kernels`; auto is how layers are built. `matmul` is selected for
    the process."""
    config = kernels_of(kernels)
    select_bf16_matmul(config.of("matmul"))
    if config == KernelsConfig():
        return
    for model in models:
        for module in model.modules():
            for name, held in list(vars(module).items()):
                vars(module)[name] = with_kernel(held, config, mesh)


def with_kernel(held: Held, config: KernelsConfig, mesh: Mesh) -> Held:
    """The same with every operation in it, however deep, computed as `config` says; itself, where
    there is none in it.

    An operation is a function of kernels/ with a keyword `kernel`. Attention across ranks has none:
    it becomes the plain definition over the keys of all ranks.
    """
    if isinstance(held, nn.Module):  # one that its owner has not registered, as steps of a tuple
        use_kernels([held], config, mesh)
        return held
    if isinstance(held, Ring | AllGatherAttend | HeadExchange | HeadsThenRing):
        plain = config.of("attention") in ("torch", "reference")
        return AllGatherAttend(mesh.cp, reference_span_attention) if plain else held
    if isinstance(held, FunctionType):
        return _told(held, config)
    parts = _parts(held)
    made = {name: with_kernel(part, config, mesh) for name, part in parts.items()}
    changed = {name: part for name, part in made.items() if part is not parts[name]}
    if not changed:
        return held
    if isinstance(held, partial):
        words = {word: made[word] for word in held.keywords}
        return partial(made[""], *(made[str(place)] for place in range(len(held.args))), **words)
    return tuple(made.values()) if isinstance(held, tuple) else replace(held, **changed)


def _told(function: FunctionType, config: KernelsConfig) -> Held:
    """An operation with its form; any other function as it is."""
    if "kernel" not in (function.__kwdefaults__ or {}):
        return function
    form: BackendName = config.of(OPERATIONS[function.__module__.rpartition(".")[2]])
    return function if form == "auto" else partial(function, kernel=form)


def _parts(held: Held) -> dict[str, Held]:
    """What a tuple, a partial function or a dataclass consists of, by names of which none comes
    twice."""
    if isinstance(held, partial):
        return {"": held.func, **_numbered(held.args), **held.keywords}
    if type(held) is tuple:
        return _numbered(held)
    if is_dataclass(held) and not isinstance(held, type):
        return {field.name: getattr(held, field.name) for field in fields(held) if field.init}
    return {}


def _numbered(values: tuple[Held, ...]) -> dict[str, Held]:
    return {str(place): value for place, value in enumerate(values)}

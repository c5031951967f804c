"""Typing rules of our autograd functions, in the form that the checker calls.

Only this file and verify/types.py use the checker library, `spmd_types`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import spmd_types as checker
import torch
from spmd_types import I, MeshAxis, P, R, SpmdTypeError, V, rules
from spmd_types import PerMeshAxisLocalSpmdType as Type
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from megalith.parallel.context import RingAttention
from megalith.parallel.cross_entropy import LossSumFunction, TokenLossesFunction
from megalith.parallel.group import Group

TYPES: Mapping[str, Type] = {"R": R, "I": I, "V": V, "P": P}
IN_WORDS: Mapping[Type | None, str] = {
    R: "R (replicated, used for different work)",
    I: "I (replicated, used for the same work)",
    V: "V (varying: every rank has its own)",
    P: "P (partial sum)",
    None: "? (created outside of the check)",
}
HINTS: Mapping[tuple[Type, Type | None], str] = {
    (
        P,
        V,
    ): "Use `mark_partial` in the line that contracts a sharded dimension, or the group of the "
    "axis that shards it.",
    (P, R): "Every rank has the full value: a sum would count it once per rank.",
    (P, I): "Every rank has the full value: a sum would count it once per rank.",
    (I, R): "It was passed to `copy_to_tp` already: use it unchanged.",
    (I, V): "Use gather, since each rank has a shard.",
    (V, P): "Use reduce_from_tp or reduce_scatter first, which sum it.",
    (V, R): "It is replicated: use it unchanged.",
    (V, I): "It is replicated: use split, or copy_to_tp and no gather.",
    (R, V): "Use gather first.",
    (R, I): "Use copy_to_tp first, whose backward sums the gradient.",
}


def find_types(x: Tensor) -> dict[str, Type]:
    """Return the type of `x` along every axis of more than one rank; axes without a type are
    missing."""
    known = checker.get_local_type(x)
    return {name: known[axis] for name, axis in axes_here().items() if axis in known}


def move(out: Tensor, x: Tensor, group: Group, *, before: Type, after: Type, function: str) -> None:
    """Check a collective: along the axes of `group`, x must have type `before`, and out gets type
    `after`.

    R and I are interchangeable where no gradient flows. Types of another factorization of the ranks
    are converted to the current one if possible.
    """
    rules.ignore(x)  # this rule checks x itself
    types = _types_here(x)
    for axis in _axes_of(group):
        _require_type(types.get(axis), before, x, axis, function)
        types[axis] = after
    checker.assert_type(out, types)


def vocabulary_loss(
    outs: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    group: Group,
    *,
    before: Type,
    after: Type,
    function: str,
) -> None:
    """Check a vocabulary-parallel loss: x R, weight `before`, labels R -> all outputs `after`.

    Each rank computes the logits of the same tokens for its vocabulary shard, so its gradient of x
    is a partial sum; the loss itself is summed inside. Along all other axes it is an ordinary
    product.
    """
    axes = _axes_of(group)
    for axis in axes:
        for name, tensor, wanted in (
            ("x", x, R),
            ("weight", weight, before),
            ("labels", labels, R),
        ):
            _require_type(
                _types_here(tensor).get(axis), wanted, tensor, axis, f"{function}, {name}"
            )
    for out in outs:
        scores = rules.einsum("th,vh,t->t" if out.dim() else "th,vh,t->", x, weight, labels)
        # The keys are those of the checker's own type.
        types: dict[Any, Type] = {
            **checker.get_local_type(scores),
            **dict.fromkeys(axes, after),
        }
        checker.assert_type(out, types)


def shared_attention(
    out: Tensor,
    inputs: Mapping[str, Tensor],
    learned: Mapping[str, Tensor | None],
    group: Group,
    *,
    before: Type,
    after: Type,
    function: str,
) -> None:
    """Check context-parallel attention: along the axes of `group`, q, k and v have type `before`,
    out has `after`.

    Gradients of keys and values are sent back to the rank that owns them, so they are not partial
    sums. Per-head parameters `learned` [n, ...] are R, and their gradients are partial sums. Along
    all other axes it is an ordinary product.
    """
    axes, given = (
        _axes_of(group),
        {name: tensor for name, tensor in learned.items() if tensor is not None},
    )
    for axis in axes:
        for name, tensor in {**inputs, **given}.items():
            wanted = R if name in given else before
            _require_type(
                _types_here(tensor).get(axis), wanted, tensor, axis, f"{function}, {name}"
            )
    others = "".join(",n" if tensor.dim() == 1 else ",nb" for tensor in given.values())
    product = rules.einsum(f"tnd,tgd,tge{others}->tne", *inputs.values(), *given.values())
    # The keys are those of the checker's own type.
    types: dict[Any, Type] = {
        **checker.get_local_type(product),
        **dict.fromkeys(axes, after),
    }
    checker.assert_type(out, types)


def typed_by(reference: Callable[..., Any]) -> Callable[[type[Function]], type[Function]]:
    """Return a class decorator that types an autograd function by its plain PyTorch composition."""

    def register(cls: type[Function]) -> type[Function]:
        checker.register_decomposition(cls, functools.partial(_for_its_types, reference))
        return cls

    return register


def _for_its_types(reference: Callable[..., Any], *given: Any) -> Any:
    """Run a composition without recording its saved tensors, which must not count as those of a
    recomputed region."""
    with saved_tensors_hooks(_identity, _identity):
        return reference(*given)


def _identity(saved: Tensor) -> Tensor:
    return saved


@dataclass(eq=False)
class Rule:
    """Typing rule of one autograd function, called by the checker; counts its calls."""

    cls: type[Function]
    counts: Counter[str]

    def __post_init__(self) -> None:
        moves: tuple[str, str] = self.cls.moves  # type: ignore[attr-defined]  # rules are created only for classes with `moves`
        self.before, self.after = TYPES[moves[0]], TYPES[moves[1]]
        self.function = re.sub(
            r"(?<=[a-z])([A-Z])", r"_\1", self.cls.__name__.removesuffix("Function")
        ).lower()

    def count(self, group: Group) -> None:
        """Count one call, except of declarations and of the end of an asynchronous operation."""
        if self.after is not P and not hasattr(self.cls, "ends"):
            self.counts[f"{self.function} over {'_'.join(group.axes)}"] += 1


class MoveRule(Rule):
    """Applies `move` to the functions of parallel/collectives.py."""

    def __call__(self, out: Tensor, *, x: Tensor, group: Group) -> None:
        """Check types after `cls.apply` has returned `out`."""
        self.count(group)
        move(out, x, group, before=self.before, after=self.after, function=self.function)


class VocabularyRule(Rule):
    """Applies `vocabulary_loss` to the functions of parallel/cross_entropy.py."""

    def __call__(
        self, outs: tuple[Tensor, ...], *, x: Tensor, weight: Tensor, labels: Tensor, group: Group
    ) -> None:
        """Check types after `cls.apply` has returned `outs`."""
        self.count(group)
        vocabulary_loss(
            outs,
            x,
            weight,
            labels,
            group,
            before=self.before,
            after=self.after,
            function=self.function,
        )


class ContextRule(Rule):
    """Applies `shared_attention` to ring attention of parallel/context.py."""

    def __call__(
        self,
        out: Tensor,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        sinks: Tensor | None,
        values: Tensor | None,
    ) -> None:
        """Check types after `cls.apply` has returned `out`."""
        self.count(group)
        shared_attention(
            out,
            {"q": q, "k": k, "v": v},
            {"sinks": sinks, "values": values},
            group,
            before=self.before,
            after=self.after,
            function=self.function,
        )


RULES: Mapping[type[Function], type[VocabularyRule | ContextRule]] = {
    LossSumFunction: VocabularyRule,
    TokenLossesFunction: VocabularyRule,
    RingAttention: ContextRule,
}
"""Functions with their own rule; the others map one tensor."""


def our_functions() -> list[type[Function]]:
    """Return every imported autograd function of this package."""
    return [cls for cls in Function.__subclasses__() if cls.__module__.startswith("megalith.")]


@contextmanager
def installed_rules(counts: Counter[str]) -> Iterator[None]:
    """Install the rules of all our autograd functions in this context.

    The checker rejects calls of a function that has neither `moves` nor a `reference`.
    """
    with ExitStack() as undo:
        for cls in our_functions():
            if hasattr(cls, "moves"):
                rule = RULES.get(cls, MoveRule)(cls, counts)
                setattr(cls, "spmd_typecheck", rule)  # noqa: B010  # an attribute that mypy does not know
                undo.callback(delattr, cls, "spmd_typecheck")
            elif hasattr(cls, "reference"):
                typed_by(cls.reference)(cls)
                undo.callback(delattr, cls, "typecheck_forward")
        yield


def axes_here() -> Mapping[str, MeshAxis]:
    """Return the axes of more than one rank of the current mesh by name."""
    return checker.current_mesh_names() or {}


def _axes_of(group: Group) -> list[MeshAxis]:
    """Return the checker's axes that `group` spans; none for a group of one rank."""
    axes = (
        [axes_here()[name] for name in group.axes if name in axes_here()] if group.size > 1 else []
    )
    if prod(axis.size() for axis in axes) != group.size:
        raise SpmdTypeError(
            f"{group!r} has {group.size} ranks, but its axes do not. Pass a group of the mesh."
        )
    return axes


def _types_here(x: Tensor) -> dict[MeshAxis, Type]:
    """Return the types of `x` in the current mesh."""
    mesh, types = checker.current_mesh(), checker.get_local_type(x)
    if mesh is not None and not types.keys() <= mesh:
        types = checker.get_local_type(checker.reinterpret_mesh(x, mesh))
    return {axis: kind for axis, kind in types.items() if isinstance(axis, MeshAxis)}


def _require_type(
    actual: Type | None, expected: Type, x: Tensor, axis: MeshAxis, function: str
) -> None:
    no_gradient = not (torch.is_grad_enabled() and x.requires_grad)
    if actual is expected or (no_gradient and {actual, expected} == {R, I}):
        return
    raise SpmdTypeError(
        f"{function} over {axis!r} expects {IN_WORDS[expected]}, but got {IN_WORDS[actual]}. "
        + HINTS.get((expected, actual), "")
    )

"""The typing rule of every autograd function of ours, in the form in which the checker calls it.

Beside verify/types.py this is the only file that knows the checker library, `spmd_types`.
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

from megalith.kernels.cross_entropy import LossSumFunction, TokenLossesFunction
from megalith.parallel.context import RingAttention
from megalith.parallel.group import Group

TYPES: Mapping[str, Type] = {"R": R, "I": I, "V": V, "P": P}
IN_WORDS: Mapping[Type | None, str] = {
    R: "R (the same on every rank, for different work)",
    I: "I (the same on every rank, for the same work)",
    V: "V (every rank has its own)",
    P: "P (parts of a sum that is still to be taken)",
    None: "? (made outside the check)",
}
HINTS: Mapping[tuple[Type, Type | None], str] = {
    (
        P,
        V,
    ): "Use `partial` in the line that contracts a cut dimension, or the group of the axis that "
    "was cut.",
    (P, R): "Every rank has the whole already: a sum would count it once per rank.",
    (P, I): "Every rank has the whole already: a sum would count it once per rank.",
    (I, R): "It has entered divided work already: use it as it is.",
    (I, V): "Use gather for what each rank has its own part of.",
    (V, P): "Use leave or reduce_scatter first, which take the sum.",
    (V, R): "Every rank has the same: use it as it is.",
    (V, I): "Every rank has the same: use split, or enter and no gather.",
    (R, V): "Use gather first.",
    (R, I): "Use enter first, whose backward takes the sum.",
}


def types_of(x: Tensor) -> dict[str, Type]:
    """The type of `x` along every axis of more than one rank, by our names; axes on which it has
    none are missing."""
    known = checker.get_local_type(x)
    return {name: known[axis] for name, axis in axes_here().items() if axis in known}


def move(out: Tensor, x: Tensor, group: Group, *, before: Type, after: Type, function: str) -> None:
    """The rule of every collective: along the axes of `group`, x has to be `before` and out becomes
    `after`.

    R and I may stand for each other where no gradient flows. What comes from another factorization
    of the ranks is read in the current one, where that has a meaning.
    """
    rules.ignore(x)  # which is to say: looked after, here
    types = _types_here(x)
    for axis in _axes_of(group):
        _demand(types.get(axis), before, x, axis, function)
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
    """The rule of the loss over a vocabulary that `group` divides, and of what it measures: x R,
    weight `before`, labels R -> all `after`.

    Each rank scores the same tokens against other rows, so its gradient of x is a part of a sum;
    the loss itself is summed inside. Along all other axes it is an ordinary product.
    """
    axes = _axes_of(group)
    for axis in axes:
        for name, tensor, wanted in (
            ("x", x, R),
            ("weight", weight, before),
            ("labels", labels, R),
        ):
            _demand(_types_here(tensor).get(axis), wanted, tensor, axis, f"{function}, {name}")
    for out in outs:
        scores = rules.einsum("th,vh,t->t" if out.dim() else "th,vh,t->", x, weight, labels)
        types: dict[Any, Type] = {
            **checker.get_local_type(scores),
            **dict.fromkeys(axes, after),
        }  # keys: as it has them
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
    """The rule of attention to tokens that `group` shares: along its axes q, k and v are `before`
    and out is `after`.

    What other ranks find about my keys and values comes back to me, so their gradients are my own,
    not parts of a sum; of what was `learned` for each head [n, ...], which is R there, each rank
    finds a part. Along all other axes it is an ordinary product.
    """
    axes, given = (
        _axes_of(group),
        {name: tensor for name, tensor in learned.items() if tensor is not None},
    )
    for axis in axes:
        for name, tensor in {**inputs, **given}.items():
            wanted = R if name in given else before
            _demand(_types_here(tensor).get(axis), wanted, tensor, axis, f"{function}, {name}")
    others = "".join(",n" if tensor.dim() == 1 else ",nb" for tensor in given.values())
    product = rules.einsum(f"tnd,tgd,tge{others}->tne", *inputs.values(), *given.values())
    types: dict[Any, Type] = {
        **checker.get_local_type(product),
        **dict.fromkeys(axes, after),
    }  # keys: as it has them
    checker.assert_type(out, types)


def typed_by(reference: Callable[..., Any]) -> Callable[[type[Function]], type[Function]]:
    """Class decorator: an autograd function has the types of the plain composition that it stands
    for."""

    def give(cls: type[Function]) -> type[Function]:
        checker.register_decomposition(cls, functools.partial(_for_its_types, reference))
        return cls

    return give


def _for_its_types(reference: Callable[..., Any], *given: Any) -> Any:
    """What a composition gives. What it saves for a backward that nobody runs is its own affair:
    a region that is computed again must not count it among what it saved the first time."""
    with saved_tensors_hooks(_itself, _itself):
        return reference(*given)


def _itself(saved: Tensor) -> Tensor:
    return saved


@dataclass(eq=False)
class Rule:
    """The typing rule of one autograd function, in the form in which the checker calls it; counts
    its calls."""

    cls: type[Function]
    counts: Counter[str]

    def __post_init__(self) -> None:
        moves: tuple[str, str] = self.cls.moves  # type: ignore[attr-defined]  # that it has them is what chose this rule
        self.before, self.after = TYPES[moves[0]], TYPES[moves[1]]
        self.function = re.sub(
            r"(?<!^)([A-Z])", r"_\1", self.cls.__name__.removesuffix("Function")
        ).lower()

    def count(self, group: Group) -> None:
        """One more call, unless it only declares something, or ends what was counted when it
        began."""
        if self.after is not P and not hasattr(self.cls, "ends"):
            self.counts[f"{self.function} over {'_'.join(group.axes)}"] += 1


class MoveRule(Rule):
    """`move`, for the functions of parallel/autograd.py."""

    def __call__(self, out: Tensor, *, x: Tensor, group: Group) -> None:
        """After `cls.apply` has returned `out`."""
        self.count(group)
        move(out, x, group, before=self.before, after=self.after, function=self.function)


class VocabularyRule(Rule):
    """`vocabulary_loss`, for those of kernels/cross_entropy.py."""

    def __call__(
        self, outs: tuple[Tensor, ...], *, x: Tensor, weight: Tensor, labels: Tensor, group: Group
    ) -> None:
        """After `cls.apply` has returned `outs`."""
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
    """`shared_attention`, for the ring of parallel/context.py."""

    def __call__(
        self,
        out: Tensor,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: Group,
        spans: object,
        scores: object,
        sinks: Tensor | None,
        dropped: object,
        values: Tensor | None,
    ) -> None:
        """After `cls.apply` has returned `out`."""
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
"""Of the functions that have a rule of their own; the others move one tensor."""


def our_functions() -> list[type[Function]]:
    """Every autograd function of this package that has been imported."""
    return [cls for cls in Function.__subclasses__() if cls.__module__.startswith("megalith.")]


@contextmanager
def installed_rules(counts: Counter[str]) -> Iterator[None]:
    """Give every autograd function of ours its rule, and take it away again.

    One that has neither `moves` nor a `reference` is refused by the checker when it is called.
    """
    with ExitStack() as undo:
        for cls in our_functions():
            if hasattr(cls, "moves"):
                rule = RULES.get(cls, MoveRule)(cls, counts)
                setattr(cls, "spmd_typecheck", rule)  # noqa: B010  # a name that mypy does not know there
                undo.callback(delattr, cls, "spmd_typecheck")
            elif hasattr(cls, "reference"):
                typed_by(cls.reference)(cls)
                undo.callback(delattr, cls, "typecheck_forward")
        yield


def axes_here() -> Mapping[str, MeshAxis]:
    """The axes of more than one rank of the mesh that is being checked, by name."""
    return checker.current_mesh_names() or {}


def _axes_of(group: Group) -> list[MeshAxis]:
    """The checker's axes that `group` spans. A group of one rank spans none, whatever it is
    called."""
    axes = (
        [axes_here()[name] for name in group.axes if name in axes_here()] if group.size > 1 else []
    )
    if prod(axis.size() for axis in axes) != group.size:
        raise SpmdTypeError(
            f"{group!r} has {group.size} ranks, which its axes do not. Pass the mesh's own group."
        )
    return axes


def _types_here(x: Tensor) -> dict[MeshAxis, Type]:
    """The types of `x`, read in the current mesh."""
    mesh, types = checker.current_mesh(), checker.get_local_type(x)
    if mesh is not None and not types.keys() <= mesh:
        types = checker.get_local_type(checker.reinterpret_mesh(x, mesh))
    return {axis: kind for axis, kind in types.items() if isinstance(axis, MeshAxis)}


def _demand(found: Type | None, wanted: Type, x: Tensor, axis: MeshAxis, function: str) -> None:
    no_gradient = not (torch.is_grad_enabled() and x.requires_grad)
    if found is wanted or (no_gradient and {found, wanted} == {R, I}):
        return
    raise SpmdTypeError(
        f"{function} over {axis!r} expects {IN_WORDS[wanted]}, but was given {IN_WORDS[found]}. "
        + HINTS.get((wanted, found), "")
    )

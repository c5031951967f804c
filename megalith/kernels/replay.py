"""Routing replay: the experts that tokens chose once, chosen again, by this model or another of the
same layers.

Rollouts and training disagree by rounding alone, and an expert that is chosen by one and not by the
other makes that large. Source: Ma et al. 2025, arXiv:2510.11370.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import DataError


class RoutingCapture(NamedTuple):
    """What a router read of one microbatch, and what it made of it: of my own tokens."""

    layer: str
    """As its parameters are named."""

    microbatch: int
    hidden: Tensor
    """[t, h], before any noise."""

    logits: Tensor
    """[t, E], by which experts were chosen."""

    weights: Tensor
    """[t, k], what answers count, best choice first; 0 where the expert refused."""

    routers: Mapping[str, Tensor]
    """The router's own: weight [E, h], and what it adds to logits or scores, [E] each."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The choices of all routers of this rank in a step's microbatches."""

    choices: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By layer, as its parameters are named, and microbatch: int64 [t, k], of my own tokens, before
    experts refuse."""

    followed: bool = False
    """Routers choose what is here; otherwise they write down what they choose."""

    watch: Callable[[RoutingCapture], None] | None = None
    """Who is shown what routers read and make of it, once more in recomputation; None: nobody."""

    def again(self) -> "Routing":
        """The same choices, to be followed."""
        return Routing(self.choices, followed=True)

    def microbatches(self, layer: str) -> Iterator[int]:
        """Those that a layer has choices of."""
        return (number for name, number in self.choices if name == layer)


@dataclass(frozen=True, slots=True)
class Decided:
    """What routers decided in a part of the model that backward runs once more: there they decide
    the same again.

    Where input comes back with other roundings, as after sums in no fixed order, a tie could
    otherwise fall the other way, and backward would look for a token's gradient at an expert that
    never had it.
    """

    found: dict[str, Tensor] = field(default_factory=dict)
    """By layer: int32 [t, k], the expert, or -1 - its number where it refused."""

    def note(self, layer: str, chosen: Tensor, kept: Tensor) -> None:
        """Write down what was chosen, and what of it experts took: experts [t, k], the latter
        negative elsewhere."""
        self.found[layer] = chosen.where(kept >= 0, -1 - chosen).detach().to(torch.int32)

    def chosen(self, layer: str) -> Tensor | None:
        """What was chosen, int64 [t, k], if this has been decided."""
        found = self.found.get(layer)
        return None if found is None else found.where(found >= 0, -1 - found).to(torch.int64)

    def taken(self, layer: str) -> Tensor | None:
        """Which of it experts took, bool [t, k]."""
        found = self.found.get(layer)
        return None if found is None else found >= 0


class Route(NamedTuple):
    """What routers do with one microbatch. A microbatch that comes again, in recomputation, does
    the same again."""

    routing: Routing
    microbatch: int

    def note(self, layer: str, experts: Tensor) -> None:
        """Write down what a layer chose, experts [t, k]."""
        self.routing.choices[layer, self.microbatch] = experts.detach()

    def show(
        self,
        layer: str,
        hidden: Tensor,
        logits: Tensor,
        weights: Tensor,
        routers: Mapping[str, Tensor],
    ) -> None:
        """Show a watcher what a layer's router read and made of it, as in `Seen`."""
        if self.routing.watch is not None:
            self.routing.watch(
                RoutingCapture(layer, self.microbatch, hidden, logits, weights, routers)
            )

    def recall(self, layer: str, shape: tuple[int, int]) -> Tensor:
        """What a layer chose, int64 [t, k].

        Raises:
            DataError: nothing was written down for this microbatch, or for other tokens.
        """
        experts = self.routing.choices.get((layer, self.microbatch))
        if experts is None:
            there = sorted(self.routing.microbatches(layer)) or "none"
            raise DataError(
                f"microbatch {self.microbatch}: no choices of {layer} to replay (there are: "
                f"{there}). Record the same "
                f"microbatches first, with the same layers on this rank."
            )
        if experts.shape != shape:
            raise DataError(
                f"microbatch {self.microbatch}: choices of {layer} are {list(experts.shape)}, "
                f"expected {list(shape)}. "
                f"Use the microbatches, model.moe.top_k and layout that they were recorded with."
            )
        return experts

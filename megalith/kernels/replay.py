"""Routing replay: record the experts that tokens were routed to, and route them to the same experts
again, in this or another model with the same layers.

Rollouts and training differ by rounding only, but a different expert choice makes that difference
large. Source: Ma et al. 2025, arXiv:2510.11370.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.errors import DataError


class RoutingCapture(NamedTuple):
    """Input and output of a router for one microbatch, of the local tokens."""

    layer: str
    """Name prefix of the layer's parameters."""

    microbatch: int
    hidden: Tensor
    """[t, h], before jitter noise."""

    logits: Tensor
    """[t, E], from which experts were chosen."""

    weights: Tensor
    """[t, k], weights of the experts' outputs, best choice first; 0 where the choice was
    dropped."""

    routers: Mapping[str, Tensor]
    """The router's parameters: weight [E, h], and what it adds to logits or scores, [E] each."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """The routing choices of all local routers in the microbatches of a step."""

    choices: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """By layer (name prefix of its parameters) and microbatch: int64 [t, k], of the local tokens,
    before token dropping."""

    followed: bool = False
    """Whether routers replay these choices instead of recording theirs."""

    watch: Callable[[RoutingCapture], None] | None = None
    """Callback that receives the input and output of every router, also during recomputation; None:
    no callback."""

    def for_replay(self) -> "RoutingRecord":
        """Return the same choices for replay."""
        return RoutingRecord(self.choices, followed=True)

    def microbatches(self, layer: str) -> Iterator[int]:
        """Yield the microbatches for which a layer has choices."""
        return (number for name, number in self.choices if name == layer)


@dataclass(frozen=True, slots=True)
class RoutingDecisions:
    """Routing decisions of a part of the model that is recomputed in backward; recomputation reuses
    them.

    If recomputed inputs differ by rounding, for example after sums in no fixed order, a tie could
    be decided differently, and backward would look for a token's gradient at an expert that did not
    process it.
    """

    decisions: dict[str, Tensor] = field(default_factory=dict)
    """By layer: int32 [t, k], the expert, or -1 - its number where it dropped the token."""

    def record(self, layer: str, chosen: Tensor, kept: Tensor) -> None:
        """Record the chosen experts [t, k] and those that keep the token after dropping, negative
        elsewhere."""
        self.decisions[layer] = chosen.where(kept >= 0, -1 - chosen).detach().to(torch.int32)

    def chosen(self, layer: str) -> Tensor | None:
        """Return the chosen experts, int64 [t, k], or None if nothing is recorded."""
        decisions = self.decisions.get(layer)
        return (
            None
            if decisions is None
            else decisions.where(decisions >= 0, -1 - decisions).to(torch.int64)
        )

    def kept(self, layer: str) -> Tensor | None:
        """Return which choices are kept after token dropping, bool [t, k], or None if nothing is
        recorded."""
        decisions = self.decisions.get(layer)
        return None if decisions is None else decisions >= 0


class MicrobatchRouting(NamedTuple):
    """Routing record or replay of one microbatch, also for its recomputation."""

    routing: RoutingRecord
    microbatch: int

    def record(self, layer: str, experts: Tensor) -> None:
        """Record the choices of a layer, experts [t, k]."""
        self.routing.choices[layer, self.microbatch] = experts.detach()

    def show(
        self,
        layer: str,
        hidden: Tensor,
        logits: Tensor,
        weights: Tensor,
        routers: Mapping[str, Tensor],
    ) -> None:
        """Pass the input and output of a layer's router to the callback, as a `RoutingCapture`."""
        if self.routing.watch is not None:
            self.routing.watch(
                RoutingCapture(layer, self.microbatch, hidden, logits, weights, routers)
            )

    def recall(self, layer: str, shape: tuple[int, int]) -> Tensor:
        """Return the recorded choices of a layer, int64 [t, k].

        Raises:
            DataError: no choices were recorded for this microbatch, or for other tokens.
        """
        experts = self.routing.choices.get((layer, self.microbatch))
        if experts is None:
            recorded = sorted(self.routing.microbatches(layer)) or "none"
            raise DataError(
                f"microbatch {self.microbatch}: no choices of {layer} to replay (recorded: "
                f"{recorded}). Record the same "
                f"microbatches first, with the same layers on this rank."
            )
        if experts.shape != shape:
            raise DataError(
                f"microbatch {self.microbatch}: choices of {layer} are {list(experts.shape)}, "
                f"expected {list(shape)}. "
                f"Use the microbatches, model.moe.top_k and layout that they were recorded with."
            )
        return experts

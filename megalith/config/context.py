"""How the tokens of a row divide over ranks, and how attention sees those of other ranks."""

from dataclasses import dataclass
from typing import Literal

ContextKind = Literal["ring", "gather", "a2a", "a2a+ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Slices and exchange of context parallelism; nothing here matters with parallel.cp=1."""

    kind: ContextKind = "ring"
    """ring: keys and values go round; gather: every rank gets them all; a2a: each rank gets all
    tokens of some heads; a2a+ring: a2a among neighbors, a ring across them."""

    layers: tuple[ContextKind, ...] = ()
    """Kind of each layer, where they differ; empty: `kind` for all."""

    a2a: int | None = None
    """a2a+ring: neighbors that exchange heads; the ring has cp / a2a members. Unset: no kind is
    a2a+ring."""

    slicing: Literal["row", "document"] = "row"
    """Each rank gets an early and a late chunk, so that all have equal work: of each row, or of
    each document."""

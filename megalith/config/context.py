"""Context parallelism: how tokens are split over ranks, and how attention communicates."""

from dataclasses import dataclass
from typing import Literal

ContextKind = Literal["ring", "gather", "a2a", "a2a+ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Context parallelism settings; ignored with parallel.cp=1."""

    kind: ContextKind = "ring"
    """Communication of attention. ring: ring attention, keys and values are sent around the
    ring; gather: keys and values are all-gathered; a2a: all-to-all of heads (Ulysses);
    a2a+ring: a2a among neighboring ranks, ring across them."""

    layers: tuple[ContextKind, ...] = ()
    """Kind of each layer, if layers differ. Empty: `kind` for all."""

    a2a: int | None = None
    """a2a+ring: number of neighboring ranks in the all-to-all; the ring has cp / a2a ranks.
    Unset: a2a+ring is not used."""

    slicing: Literal["row", "document"] = "row"
    """Load-balanced (zig-zag) split: each rank gets an early and a late chunk of each row, or of
    each document."""

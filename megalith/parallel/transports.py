"""Other ways for tokens to reach their experts: the seam for packages that bring one, and a plain
one to prove it.

The plain one knows all ranks that hold experts as one group. A row goes to each of the ranks that
have a part of its expert, and each sends its part of the answer back to where the row came from, so
that nothing is left to do along etp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalith.config.parallel import DispatcherName
from megalith.errors import ConfigError
from megalith.kernels.grouped_linear import Groups
from megalith.kernels.permute import (
    Order,
    expert_major,
    order_choices,
    permute,
    sort_chunks,
    undone,
    unpermute,
)
from megalith.kernels.permute import weights_of_rows as weights_of
from megalith.kernels.rebuilt import LayerInput, output_tensor
from megalith.kernels.routing import NOWHERE, Choice
from megalith.parallel.autograd import all_to_all, regather
from megalith.parallel.expert import (
    CompletedDispatch,
    DispatchedTokens,
    Dispatcher,
    ExpertCapacity,
    PendingDispatch,
    build_dispatcher,
    on_host,
    steps_in_both,
)
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh
from megalith.plan.transports import BUILT_IN, installed_transports


class Transport(Protocol):
    """Makes a dispatcher; what an entry point of the group `megalith.transports` is."""

    def __call__(
        self, *, num_experts: int, ep: Group, etp: Group, both: Group, drops_tokens: bool
    ) -> Dispatcher:
        """For layers of so many experts, in order: rank r along `ep` has the r-th part of them, and
        ranks along `etp` a part of each. `both`: the ranks that together hold every expert once;
        there are several.

        `drops_tokens`: choices may be -1, of experts that took no more.
        """


def build_transport(
    name: DispatcherName,
    mesh: Mesh,
    num_experts: int,
    *,
    drops_tokens: bool = False,
    room: ExpertCapacity | None = None,
) -> Dispatcher:
    """The dispatcher of that name, of this library or of another package: see `build_dispatcher`.

    Raises:
        ConfigError: the package that brings it cannot be loaded.
    """
    ep, etp, both = mesh.over("ep"), mesh.over("etp"), mesh.over("ep", "etp")
    if both.size == 1 or name in ("alltoall", "allgather"):
        return build_dispatcher(name, mesh, num_experts, drops_tokens=drops_tokens, room=room)
    assert room is None, "only an exchange sends filler: plan/experts.py refuses others"
    make = ReferenceDispatcher if name in BUILT_IN else load_transport(name)
    return make(num_experts=num_experts, ep=ep, etp=etp, both=both, drops_tokens=drops_tokens)


def load_transport(name: str) -> Transport:
    """What a package brings under that name.

    Raises:
        ConfigError: it is not there, or its code does not load.
    """
    point = installed_transports().get(name)
    if point is None:
        raise ConfigError(
            f"parallel.dispatcher={name}: no installed package brings it. Use one of {BUILT_IN}."
        )
    try:
        made: Transport = point.load()
    except Exception as error:  # a stranger's code may fail in any way, and this names it
        raise ConfigError(
            f"parallel.dispatcher={name}: {point.value} does not load ({type(error).__name__}: "
            f"{error}). Install what "
            f"it needs, or set parallel.dispatcher=alltoall."
        ) from error
    return made


# --- the plain one


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceDispatcher:
    """One all-to-all over all ranks that hold experts, with a copy of each row for every rank along
    etp.

    It moves etp times what an exchange does, along ep too; so it is for proofs.
    """

    num_experts: int
    ep: Group
    etp: Group
    both: Group
    drops_tokens: bool

    def __call__(self, x: LayerInput, choice: Choice) -> PendingDispatch:
        """A message with counts, one with rows, and one with their weights."""
        x = output_tensor(x)
        each, ranks, me = self.num_experts // self.ep.size, self.both.size, self.both.rank
        places = self.places(choice.experts, each)
        known = None if self.drops_tokens and not x.is_meta else places.numel()
        order = order_choices(places, ranks * each, num_rows=known)
        sent = self._counts(order)
        own = slice(me * each, (me + 1) * each)
        chunks = [count for row in sent for count in row[own]]
        way = ReferenceCombiner(
            self.both,
            order,
            chunks,
            expert_major(ranks=ranks, experts=each),
            [sum(sent[me][rank * each : (rank + 1) * each]) for rank in range(ranks)],
            [sum(row[own]) for row in sent],
        )
        copies = choice.weights.repeat_interleave(self.etp.size, dim=1)
        counts = tuple(sum(chunks[expert::each]) for expert in range(each))
        return CompletedDispatch(
            DispatchedTokens(
                way.there(permute(x, order)), way.there(weights_of(copies, order)), Groups(counts)
            ),
            way,
        )

    def places(self, experts: Tensor, each: int) -> Tensor:
        """Where choices [t, k] go: [t, k etp], which of `each` experts on which member of the
        group, in one number."""
        along_ep, along_etp = steps_in_both(self.ep, self.etp)
        copies = torch.arange(self.etp.size, device=experts.device) * along_etp * each
        first = experts // each * along_ep * each + experts % each
        spread = (first.unsqueeze(2) + copies).flatten(1)
        return torch.where(experts.repeat_interleave(self.etp.size, dim=1) >= 0, spread, NOWHERE)

    def _counts(self, order: Order) -> list[Sequence[int]]:
        """By the rank that sends: how many rows for each expert of each member, on the host."""
        if order.counts.is_meta:
            return [on_host(order.counts, len(order.choices))] * self.both.size
        found: list[Sequence[int]] = (
            regather(order.counts, self.both).view(self.both.size, -1).tolist()
        )
        return found


@dataclass(frozen=True, slots=True)
class ReferenceCombiner:
    """The way back of a `ReferenceDispatcher`."""

    both: Group
    order: Order
    chunks: list[int]
    """Rows as they came: by the rank that sent them, by expert."""

    sorting: list[int]
    """The order of chunks in which experts have theirs together."""

    sent: list[int]
    received: list[int]

    def there(self, rows: Tensor) -> Tensor:
        """Rows as `order` has them -> those of my experts, expert after expert."""
        rows = all_to_all(rows, self.both, send=self.sent, receive=self.received)
        return sort_chunks(rows, self.chunks, self.sorting)

    def combine(self, rows: Tensor) -> Tensor:
        """The other way round; a token's answers, and the parts of each, are one sum."""
        rows = sort_chunks(rows, *undone(self.chunks, self.sorting))
        return unpermute(
            all_to_all(rows, self.both, send=self.received, receive=self.sent), self.order
        )

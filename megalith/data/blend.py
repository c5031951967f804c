"""Blends: several datasets read in fixed proportions, in Megatron's order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.data.cache import Arrays
from megalith.data.documents import DocumentDataset
from megalith.data.loops import fill_exhaustive_order, fill_weighted_order, loop_for
from megalith.data.sample import Dataset, Indexed, Row
from megalith.errors import DataError

MAX_MEMBERS = 32766  # the member of each sample is an int16


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Which sample of which member each sample of a blend is."""

    members: NDArray[np.int16]  # [n]
    samples: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class MemberSizes:
    """How many samples each member of a weighted blend gives, and how many it is built for."""

    targets: tuple[int, ...]
    built_for: tuple[int, ...]  # with the surplus, against rounding

    @property
    def total(self) -> int:
        """Samples of the blend: the sum of the targets, slightly more than was asked for."""
        return sum(self.targets)


def normalized(weights: Sequence[float]) -> list[float]:
    """The weights as shares of 1, in float64."""
    values = np.array(weights, np.float64)
    shares: list[float] = (values / values.sum()).tolist()
    return shares


def member_sizes(weights: Sequence[float], num_samples: int, surplus: float) -> MemberSizes:
    """Samples per member: its share rounded up.

    >>> member_sizes([0.5, 0.5], 101, 0.005)
    MemberSizes(targets=(51, 51), built_for=(52, 52))
    """
    targets = [math.ceil(num_samples * share) for share in normalized(weights)]
    return MemberSizes(
        tuple(targets), tuple(math.ceil(target * (1 + surplus)) for target in targets)
    )


def weighted_order(weights: Sequence[float], num_samples: int) -> BlendOrder:
    """At each step the member furthest behind its share, the first of equals: no randomness, and no
    end in view."""
    order = _empty_order(num_samples)
    fill = loop_for(fill_weighted_order, rounds=num_samples * len(weights))
    shares = np.array(normalized(weights), np.float64)
    fill(shares, np.zeros(len(weights), np.int64), order.members, order.samples)
    return order


def exhaustive_order(sizes: Sequence[int]) -> BlendOrder:
    """Every sample of every member once, with even shares until members run out."""
    order = _empty_order(sum(sizes))
    fill = loop_for(fill_exhaustive_order, rounds=sum(sizes) * len(sizes))
    fill(np.array(sizes, np.int64), np.zeros(len(sizes), np.int64), order.members, order.samples)
    return order


def _empty_order(num_samples: int) -> BlendOrder:
    return BlendOrder(np.empty(num_samples, np.int16), np.empty(num_samples, np.int64))


def order_arrays(order: BlendOrder) -> Arrays:
    """The order as named arrays, for the cache."""
    return {"members": order.members, "samples": order.samples}


class BlendedDataset:
    """Samples of several datasets in the order of a blend."""

    def __init__(
        self, members: Sequence[Dataset], names: Sequence[str], order: BlendOrder, fingerprint: str
    ) -> None:
        """`names` are the members' names for messages.

        Raises:
            DataError: too many members, or one has fewer samples than the order takes from it.
        """
        self.num_samples = len(order.members)
        self.fingerprint = fingerprint
        self._members = members
        self._order = order
        if len(members) > MAX_MEMBERS:
            raise DataError(
                f"a blend of {len(members)} members: use at most {MAX_MEMBERS}; merge small stores "
                "first."
            )
        taken = np.bincount(order.members, minlength=len(members)).tolist()
        for name, member, count in zip(names, members, taken):
            if count > member.num_samples:
                raise DataError(
                    f"{name} has {member.num_samples} samples, and the blend takes {count} of "
                    f"them. Set data.mid_level_dataset_surplus higher than its current value."
                )

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Row:
        """Return sample k of the blend.

        Raises:
            DataError: there is no sample k.
        """
        self._check(k)
        return self._members[int(self._order.members[k])].sample(int(self._order.samples[k]))

    def _check(self, k: int) -> None:
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the blend has {self.num_samples} samples, and sample {k} was asked for. "
                "Use more data, or set train.steps, or train.eval_steps, to a value that needs "
                "fewer."
            )


class BlendedDocuments(BlendedDataset):
    """The same of members that read whole documents."""

    @property
    def reports(self) -> tuple[str, ...]:
        """What became of each member's documents, for people."""
        return tuple(
            f"{one.name}: {one.report}" for one in self._members if isinstance(one, DocumentDataset)
        )

    def lengths_of(self, k: int) -> tuple[int, ...]:
        """Tokens that are read of document k.

        Raises:
            DataError: there is no document k.
        """
        self._check(k)
        member = self._members[int(self._order.members[k])]
        assert isinstance(member, Indexed), "members of one kind"
        return member.lengths_of(int(self._order.samples[k]))

"""Comparison of tensors that several ranks must hold with equal bits: which differ, and which ranks
are faulty; no torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalith.plan.shards import Box


class ReplicaKey(NamedTuple):
    """Identifies a tensor; the ranks that have the same key hold replicas of it."""

    name: str
    """Name of the parameter."""

    role: str
    """What the tensor is: param, master, or a moment of the optimizer; `weight`: the copy that
    forward reads, if each rank updates only a slice of it."""

    box: Box
    flat: tuple[int, int] | None
    coordinates: tuple[int, ...] = ()
    """Coordinates of the rank along axes whose ranks need not have equal bits."""

    def describe(self) -> str:
        """Return the parameter and, unless it is the parameter itself, the role.

        >>> ReplicaKey("head", "exp_avg", (), None).describe()
        'head (exp_avg)'
        """
        return self.name if self.role in ("param", "weight") else f"{self.name} ({self.role})"


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A tensor whose replicas are not equal."""

    key: ReplicaKey
    checksums: Mapping[int, int]
    """Checksum of each replica, by rank."""

    @property
    def correct_ranks(self) -> tuple[int, ...]:
        """Ranks of the replicas that more than half agree on; empty if there is no majority.

        >>> key = ReplicaKey("head", "param", (), None)
        >>> ReplicaDifference(key, {0: 7, 1: 9, 2: 7}).correct_ranks
        (0, 2)
        >>> ReplicaDifference(key, {0: 7, 1: 9}).correct_ranks
        ()
        """
        ((checksum, count),) = Counter(self.checksums.values()).most_common(1)
        if 2 * count <= len(self.checksums):
            return ()
        return tuple(rank for rank, value in self.checksums.items() if value == checksum)

    @property
    def representatives(self) -> tuple[int, ...]:
        """The first rank of each distinct replica.

        >>> key = ReplicaKey("head", "param", (), None)
        >>> ReplicaDifference(key, {0: 7, 1: 9, 2: 7}).representatives
        (0, 1)
        """
        first: dict[int, int] = {}
        for rank, value in self.checksums.items():
            first.setdefault(value, rank)
        return tuple(first.values())

    def list_ranks(self, representative: int) -> tuple[int, ...]:
        """Return the ranks whose replica equals that of one of them."""
        value = self.checksums[representative]
        return tuple(rank for rank, other in self.checksums.items() if other == value)


def find_differences(tables: Sequence[Mapping[ReplicaKey, int]]) -> list[ReplicaDifference]:
    """Return the tensors whose replicas differ, in order of their keys.

    tables: checksums of the tensors of each rank.

    >>> key = ReplicaKey("head", "param", ((0, 4),), None)
    >>> [each.checksums for each in find_differences([{key: 7}, {}, {key: 8}])]
    [{0: 7, 2: 8}]
    """
    replicas: dict[ReplicaKey, dict[int, int]] = {}
    for rank, table in enumerate(tables):
        for key, checksum in table.items():
            replicas.setdefault(key, {})[rank] = checksum
    return [
        ReplicaDifference(key, checksums)
        for key, checksums in sorted(replicas.items(), key=lambda item: repr(item[0]))
        if len(set(checksums.values())) > 1
    ]


def find_correct_replica(
    values: Mapping[int, Sequence[float]], recomputed: Sequence[float]
) -> int | None:
    """Return the rank whose values are closest to recomputed ones; None if two are equally close.

    values: elements at which replicas differ, by rank. After a fault, the gradients of all ranks
    contain its effect, so the correct replica may differ from the recomputed one as well.

    >>> find_correct_replica({0: [1.0, 2.0], 1: [1.0, 512.0]}, [1.0, 2.0])
    0
    >>> find_correct_replica({0: [1.0], 1: [float("nan")]}, [1.1])
    0
    """
    distances = {rank: _distance(each, recomputed) for rank, each in values.items()}
    nearest = sorted(distances, key=lambda rank: distances[rank])
    if len(nearest) > 1 and distances[nearest[0]] == distances[nearest[1]]:
        return None
    return nearest[0]


def _distance(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the sum of the differences; infinite if one of them is NaN."""
    total = sum(
        0.0 if repr(value) == repr(other) else abs(value - other)
        for value, other in zip(values, others, strict=True)
    )
    return total if total == total else float("inf")

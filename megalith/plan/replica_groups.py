"""Division of a step over replica groups (fault tolerance): the share of each group in the global
batch, and the samples that are computed again after a group was lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from megalith.plan.batch_assignment import ANY_COUNTS, MicrobatchCounts, SampleAssignment


@dataclass(frozen=True, slots=True)
class GroupShare:
    """Position of a replica group among those that divide each global batch."""

    index: int
    num_groups: int


SINGLE_GROUP = GroupShare(0, 1)
"""Share of a job that trains alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAssignment:
    """Samples of one step that the groups of an epoch compute.

    Samples whose gradients a group has kept from an earlier epoch of the same step are not computed
    again.
    """

    samples: tuple[int, ...]
    """Samples to compute, counted from the start of the batch."""
    share: GroupShare
    micro_batch_size: int
    dp: int
    """Data-parallel ranks of each group."""
    counts: MicrobatchCounts = ANY_COUNTS

    def list_own_samples(self) -> list[int]:
        """Return the samples that this group computes, over all of its ranks.

        >>> share = GroupShare(1, 2)
        >>> GroupAssignment(
        ...     samples=(0, 1, 5, 6, 7), share=share, micro_batch_size=1, dp=1
        ... ).list_own_samples()
        [1, 6]
        """
        assignment = SampleAssignment(
            num_samples=len(self.samples),
            micro_batch_size=self.micro_batch_size,
            num_ranks=self.share.num_groups * self.dp,
            counts=self.counts,
        )
        return [
            self.samples[number]
            for rank in range(self.share.index * self.dp, (self.share.index + 1) * self.dp)
            for microbatch in assignment.list_microbatches(rank)
            for number in microbatch
        ]


def list_missing_samples(kept: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of a step of which no group has kept the gradients.

    `kept`: number of groups that have kept each sample: 0 or 1.

    >>> list_missing_samples([1, 0, 1, 0])
    (1, 3)
    """
    assert all(count in (0, 1) for count in kept), f"a sample was computed twice: {kept}"
    return tuple(number for number, count in enumerate(kept) if not count)


class GroupSlot(NamedTuple):
    """What a group has at the start of an epoch."""

    has_state: float
    """1 if it has the newest state, else 0; the others as well."""
    needs_source: float
    offers_state: float
    data: float
    """Digest of the data; 0 without the newest state."""
    tokenizer: float


def read_slots(values: Sequence[float], groups: Sequence[str]) -> dict[str, GroupSlot]:
    """Return the slot of each group, from values that begin with those of all slots."""
    size = len(GroupSlot._fields)
    return {
        name: GroupSlot(*values[number * size : (number + 1) * size])
        for number, name in enumerate(groups)
    }


def hash_to_number(text: str) -> float:
    """Return a digest of 52 bits, which a float64 holds exactly."""
    return float(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 12)

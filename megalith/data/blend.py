"""Blended datasets: several datasets sampled by weight, in Megatron's order."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalith.data.cache import Arrays
from megalith.data.index_loops import (
    compile_if_long,
    compute_exhaustive_order,
    compute_weighted_order,
)
from megalith.data.pretrain import DocumentDataset
from megalith.data.sample import Dataset, HasDocumentLengths, Row
from megalith.errors import DataError

MAX_MEMBERS = 32766  # the member of each sample is an int16


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Maps each sample of a blend to a member dataset and one of its samples."""

    members: NDArray[np.int16]  # [n]
    samples: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class MemberSizes:
    """Number of samples that a weighted blend takes from each member, and that the member is built
    with."""

    targets: tuple[int, ...]
    built_for: tuple[int, ...]  # target plus the margin, against rounding

    @property
    def total(self) -> int:
        """Number of samples of the blend: the sum of the targets, which are rounded up."""
        return sum(self.targets)


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in float64."""
    values = np.array(weights, np.float64)
    shares: list[float] = (values / values.sum()).tolist()
    return shares


def compute_member_sizes(weights: Sequence[float], num_samples: int, margin: float) -> MemberSizes:
    """Return the number of samples per member: its share of `num_samples`, rounded up.

    `margin` is the relative number of samples that each member is built with in addition.

    >>> member_sizes([0.5, 0.5], 101, 0.005)
    MemberSizes(targets=(51, 51), built_for=(52, 52))
    """
    targets = [math.ceil(num_samples * share) for share in normalize_weights(weights)]
    return MemberSizes(
        tuple(targets), tuple(math.ceil(target * (1 + margin)) for target in targets)
    )


def build_weighted_order(weights: Sequence[float], num_samples: int) -> BlendOrder:
    """Return an order in which each sample comes from the member furthest behind its share.

    Ties go to the first member. The order is deterministic, and does not depend on `num_samples`
    except for its length.
    """
    order = _empty_order(num_samples)
    compute_order = compile_if_long(compute_weighted_order, rounds=num_samples * len(weights))
    shares = np.array(normalize_weights(weights), np.float64)
    compute_order(shares, np.zeros(len(weights), np.int64), order.members, order.samples)
    return order


def build_exhaustive_order(sizes: Sequence[int]) -> BlendOrder:
    """Return an order that contains every sample of every member once, in proportion to their
    sizes."""
    order = _empty_order(sum(sizes))
    compute_order = compile_if_long(compute_exhaustive_order, rounds=sum(sizes) * len(sizes))
    compute_order(
        np.array(sizes, np.int64), np.zeros(len(sizes), np.int64), order.members, order.samples
    )
    return order


def _empty_order(num_samples: int) -> BlendOrder:
    return BlendOrder(np.empty(num_samples, np.int16), np.empty(num_samples, np.int64))


def order_arrays(order: BlendOrder) -> Arrays:
    """Return the order as named arrays for the cache."""
    return {"members": order.members, "samples": order.samples}


class BlendedDataset:
    """Dataset that reads its samples from several datasets in the order of a blend."""

    def __init__(
        self, members: Sequence[Dataset], names: Sequence[str], order: BlendOrder, fingerprint: str
    ) -> None:
        """Check that each member has the samples that `order` takes from it.

        `names` identify the members in error messages.

        Raises:
            DataError: there are too many members, or one has too few samples.
        """
        self.num_samples = len(order.members)
        self.fingerprint = fingerprint
        self._members = members
        self._order = order
        if len(members) > MAX_MEMBERS:
            raise DataError(
                f"the blend has {len(members)} datasets, and the maximum is {MAX_MEMBERS}. Merge "
                "small "
                "stores with `megalith data merge`."
            )
        counts = np.bincount(order.members, minlength=len(members)).tolist()
        for name, member, count in zip(names, members, counts):
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
                f"sample {k} was requested, and the blend has {self.num_samples} samples. "
                "Use more data, or set train.steps or train.eval_steps to a lower value."
            )


class BlendedDocuments(BlendedDataset):
    """Blended dataset whose samples are whole documents."""

    @property
    def reports(self) -> tuple[str, ...]:
        """Per member: how many documents are read, truncated and dropped."""
        return tuple(
            f"{member.name}: {member.report}"
            for member in self._members
            if isinstance(member, DocumentDataset)
        )

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of document k.

        Raises:
            DataError: there is no document k.
        """
        self._check(k)
        member = self._members[int(self._order.members[k])]
        assert isinstance(member, HasDocumentLengths), (
            "all members of a document blend are DocumentDatasets"
        )
        return member.document_lengths(int(self._order.samples[k]))

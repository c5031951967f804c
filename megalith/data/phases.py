"""Data phases: a run reads its samples from another blend of stores from a number of samples on."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from megalith.data.sample import Dataset, HasDocumentLengths, Row
from megalith.errors import DataError


def count_phase_samples(starts: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Return the sample counts with which the dataset of each phase is built, of the phases that
    are reached.

    starts: first sample of each phase, 0 first. counts: samples of the run, then of its extensions,
    ascending. A phase that another one follows is built for all of its samples, so that its order
    does not depend on the length of the run.

    >>> count_phase_samples([0, 10, 15], [12])
    [[10], [5]]
    >>> count_phase_samples([0, 10, 15], [12, 20, 30])
    [[10], [5], [5, 15]]
    """
    whole = [[end - start] for start, end in pairwise(starts)]
    last = [count - starts[-1] for count in counts if count > starts[-1]]
    reached = bisect_right(starts, max(counts) - 1)
    return [*whole, last][:reached]


_NEXT_PHASE = "\n  and from sample "


def select_read_phases(fingerprint: str, consumed: int) -> list[str]:
    """Return the parts of a dataset's fingerprint that describe the phases read before sample
    `consumed`; data without phases is one phase.

    >>> select_read_phases("a\\n  and from sample 8: b\\n  and from sample 20: c", 9)
    ['a', '8: b']
    """
    first, *others = fingerprint.split(_NEXT_PHASE)
    return [first, *(text for text in others if int(text.partition(":")[0]) < consumed)]


class PhasedDataset:
    """Dataset whose samples come from one dataset per phase, each read from its own start."""

    def __init__(self, phases: Sequence[Dataset], starts: Sequence[int]) -> None:
        """Check that each phase has the samples up to the next one. `starts`: first sample of each
        phase; there may be one more, at which the last phase ends.

        Raises:
            DataError: a phase has too few samples.
        """
        self._phases, self._starts = phases, tuple(starts[: len(phases)])
        ends = starts[1 : len(phases) + 1]
        for number, (phase, start, end) in enumerate(zip(phases, starts, ends)):
            if phase.num_samples < end - start:
                raise DataError(
                    f"the training data has {phase.num_samples} samples from sample {start} on, "
                    f"and data.phases[{number}] begins at sample {end}. Set data.phases[{number}]."
                    f"samples to {start + phase.num_samples} or less, or set weights in front of "
                    "the prefixes so that stores repeat."
                )
        is_limited = len(starts) > len(phases)
        self.num_samples = starts[-1] if is_limited else starts[-1] + phases[-1].num_samples
        first, *others = (phase.fingerprint for phase in phases)
        self.fingerprint = first + "".join(
            f"{_NEXT_PHASE}{start}: {text}"
            for start, text in zip(self._starts[1:], others, strict=True)
        )

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Row:
        """Return sample k of the run.

        Raises:
            DataError: there is no sample k.
        """
        phase, number = self._locate(k)
        return phase.sample(number)

    def _locate(self, k: int) -> tuple[Dataset, int]:
        """Return the phase of sample k, and its number in the phase."""
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"sample {k} was requested, and the data has {self.num_samples} samples. Use more "
                "data, or set train.steps to a lower value."
            )
        phase = bisect_right(self._starts, k) - 1
        return self._phases[phase], k - self._starts[phase]


class PhasedDocuments(PhasedDataset):
    """Dataset with phases whose samples are whole documents."""

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of document k.

        Raises:
            DataError: there is no document k.
        """
        phase, number = self._locate(k)
        assert isinstance(phase, HasDocumentLengths), "all phases are of documents"
        return phase.document_lengths(number)

"""DiLoCo between replica groups: when which part of the model is synchronized, and what it costs;
no torch.

Each group runs inner steps on its own samples. Every H steps the groups exchange how far their
weights have moved, and an outer optimizer moves the common start point by the mean.
Sources: Douillard et al. 2023, arXiv:2311.08105 (DiLoCo); Douillard et al. 2025, arXiv:2501.18512
(streaming: the model is divided into fragments that are synchronized at different steps).
"""

import re
from dataclasses import dataclass

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def find_fragment(name: str, num_fragments: int) -> int:
    """Return the fragment of a parameter: layers are assigned in turn (strided); what belongs to
    no layer is in the last fragment.

    >>> [find_fragment(name, 2) for name in ("layers.0.mlp.down", "layers.3.norm", "embed.weight")]
    [0, 1, 1]
    """
    match = _LAYER.search(name)
    return num_fragments - 1 if match is None else int(match[1]) % num_fragments


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Steps at which fragments are synchronized.

    Fragment p of P is sent after step (p + 1) H / P, and then every H steps; the result is applied
    `delay` steps later. After the last step of the run all fragments are synchronized at once, and
    what is in flight is applied before.
    """

    sync_every: int
    """Inner steps H between two synchronizations of a fragment."""

    num_fragments: int
    delay: int
    num_steps: int
    """Steps of the run."""

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.sync_every // self.num_fragments

    def list_sends(self, step: int) -> list[int]:
        """Return the fragments that are sent after a step.

        >>> schedule = SyncSchedule(sync_every=4, num_fragments=2, delay=1, num_steps=9)
        >>> {step: schedule.list_sends(step) for step in range(1, 10) if schedule.list_sends(step)}
        {2: [0], 4: [1], 6: [0], 8: [1], 9: [0, 1]}
        """
        if step == self.num_steps:
            return [*range(self.num_fragments)]
        return [
            fragment
            for fragment in range(self.num_fragments)
            if step >= self._offset(fragment)
            and (step - self._offset(fragment)) % self.sync_every == 0
        ]

    def find_apply_step(self, step: int) -> int:
        """Return the step after which the fragments sent after `step` are applied."""
        return step if step == self.num_steps else min(step + self.delay, self.num_steps)

    def count_rounds(self, step: int) -> int:
        """Return the number of synchronizations that are applied after `step` steps; each has one
        vote. `step` is before the last.

        >>> schedule = SyncSchedule(sync_every=4, num_fragments=2, delay=1, num_steps=100)
        >>> [schedule.count_rounds(step) for step in range(8)]
        [0, 0, 0, 1, 1, 2, 2, 3]
        """
        applied = step - self.delay
        return sum(
            (applied - self._offset(fragment)) // self.sync_every + 1
            for fragment in range(self.num_fragments)
            if applied >= self._offset(fragment)
        )

    def find_sent_step(self, step: int) -> int:
        """Return the step after which the fragments were sent that are applied after `step`."""
        return step - self.delay


BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.0}
"""Bits of an element of a delta, without the scales of int8 blocks."""


def sync_nbytes(
    *, numel: int, delta_dtype: str, num_groups: int, num_fragments: int, block_size: int
) -> float:
    """Return the bytes that a group sends in one synchronization of a fragment of average size.

    numel: parameters of the model. fp32 deltas are summed by a ring all-reduce, which sends 2 (G -
    1) / G of the bytes; others are all-gathered, because their sums would be rounded.

    >>> sync_nbytes(numel=1000, delta_dtype="fp32", num_groups=2, num_fragments=1, block_size=256)
    4000.0
    >>> sync_nbytes(numel=1024, delta_dtype="int8", num_groups=3, num_fragments=1, block_size=256)
    2080.0
    """
    nbytes = numel * BITS[delta_dtype] / 8 / num_fragments
    if delta_dtype == "fp32":
        return nbytes * 2 * (num_groups - 1) / num_groups
    if delta_dtype == "int8":
        nbytes += 4 * numel / block_size / num_fragments
    return nbytes * (num_groups - 1)

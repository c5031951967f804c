"""KV cache groups: attentions with equal views share block tables; one pool serves all groups."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

UNLIMITED = sys.maxsize
"""Length of a sequence that no pool limits."""


@dataclass(frozen=True, slots=True)
class AttentionView:
    """Which preceding tokens a layer attends to."""

    window: int | None = None
    """Number of latest tokens, including the query itself; None: all."""

    chunked: bool = False
    """Attend only to the chunk of `window` tokens that contains the query."""

    def before(self, count: int) -> int:
        """Return how many of the first `count` tokens of a document the next token attends to.

        >>> views = [AttentionView(4), AttentionView(4, chunked=True), AttentionView()]
        >>> [view.before(6) for view in views]
        [3, 2, 6]
        """
        if self.window is None:
            return count
        return count % self.window if self.chunked else min(count, self.window - 1)

    def first_needed(self, position: int) -> int:
        """Return the first token that a query at `position`, or at any later one, attends to.

        It is `position` itself if no earlier token is needed. It never decreases with `position`,
        so the keys and values before it can be freed.

        >>> views = [AttentionView(4), AttentionView(4, chunked=True), AttentionView()]
        >>> [view.first_needed(6) for view in views]
        [3, 4, 0]
        """
        return position - self.before(position)


@dataclass(frozen=True, slots=True)
class TokenShard:
    """Which tokens of every sequence a rank stores under decode context parallelism: those whose
    position modulo `num_ranks` is `rank`.

    A block of T tokens has T / num_ranks of them on every rank, so block tables, prefix hits and
    copies of blocks are the same on all ranks.

    >>> shard = TokenShard(rank=1, num_ranks=3)
    >>> [shard.count_before(position) for position in range(6)]
    [0, 0, 1, 1, 1, 2]
    """

    rank: int = 0
    num_ranks: int = 1

    def count_before(self, position: int) -> int:
        """Return how many tokens before `position` the rank stores; also of arrays of positions."""
        return (position - self.rank + self.num_ranks - 1) // self.num_ranks


ALL_TOKENS = TokenShard()


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where each attention of a model stores its keys and values in a shared pool of blocks.

    Every group has its own block table per sequence. A block of any group has storage for
    `num_slots` attentions, so that all blocks have the same number of bytes.
    """

    groups: tuple[AttentionView, ...]
    """Attention view of each KV cache group."""

    slots: tuple[tuple[int, int], ...]
    """(group, slot in the group's blocks) of each attention of the model."""

    num_slots: int
    """Number of attentions that a block stores; some groups of a view may leave the last one
    unused."""


def plan_cache_layout(views: Sequence[AttentionView]) -> CacheLayout:
    """Divide the attentions of a model into KV cache groups of equal size and equal view.

    `views` has one entry per attention of the model, in order. The group size is the number of
    attentions of the rarest view. A model without attention has no groups.

    >>> local = AttentionView(512)
    >>> layout = plan_cache_layout([local, local, AttentionView(), local])
    >>> [view.window for view in layout.groups], layout.slots, layout.num_slots
    ([512, 512, None, 512], ((0, 0), (1, 0), (2, 0), (3, 0)), 1)
    """
    counts: dict[AttentionView, int] = {}
    for view in views:
        counts[view] = counts.get(view, 0) + 1
    num_slots = min(counts.values(), default=0)

    # Consecutive attentions of a view take turns in its groups, so that those of a pipeline stage
    # have consecutive slots.
    groups: list[AttentionView] = []
    slots: list[tuple[int, int]] = []
    groups_of_view: dict[AttentionView, list[int]] = {view: [] for view in counts}
    seen = dict.fromkeys(counts, 0)
    for view in views:
        own, index = groups_of_view[view], seen[view]
        num_groups = -(-counts[view] // num_slots)
        if index < num_groups:
            own.append(len(groups))
            groups.append(view)
        slots.append((own[index % num_groups], index // num_groups))
        seen[view] += 1
    return CacheLayout(tuple(groups), tuple(slots), num_slots)


def count_required_blocks(
    groups: Sequence[AttentionView], block_size: int, num_tokens: int, *, chunk: int
) -> int:
    """Return the largest number of blocks that a sequence of `num_tokens` tokens holds at a time,
    if it is processed in chunks of at most `chunk` tokens.

    >>> count_required_blocks([AttentionView(), AttentionView(4)], 2, 100, chunk=1)
    53
    """
    num_blocks = -(-num_tokens // block_size)
    total = 0
    for view in groups:
        if view.window is None:
            total += num_blocks
            continue
        num_needed = view.window - 1 + chunk
        is_aligned = view.chunked and view.window % block_size == 0
        # without alignment, the first and the last block may each contain one needed token
        offset = 0 if is_aligned else block_size - 1
        total += min(num_blocks, -(-(num_needed + offset) // block_size))
    return total


def find_longest_sequence(
    groups: Sequence[AttentionView],
    block_size: int,
    *,
    num_blocks: int,
    chunk: int,
    longest: int = UNLIMITED,
) -> int:
    """Return how many tokens of one sequence, at most `longest`, fit into a pool of `num_blocks`
    blocks.

    >>> groups = [AttentionView(), AttentionView(4)]
    >>> find_longest_sequence(groups, 2, num_blocks=53, chunk=1)
    100
    >>> find_longest_sequence(groups[1:], 2, num_blocks=3, chunk=1) == UNLIMITED
    True
    """
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if count_required_blocks(groups, block_size, middle, chunk=chunk) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low

"""Block allocator of the KV cache: free stack, reference counts, and cached blocks.

Every block of the pool is in one of three states. A *used* block is referenced by one or more
sequences (or by a pending copy). A *cached* block is referenced by none, but registered in the
prefix cache, which may evict it. All other blocks are *free*.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of a block: all layers, keys and values."""

    source: int
    destination: int


class Evictor(Protocol):
    """What the allocator needs of a prefix cache."""

    def on_cached(self, block: int) -> None:
        """Record that the last reference to a registered block was released."""

    def evict(self) -> int:
        """Remove one cached block from the index and return it."""


class BlockAllocator:
    """Pool of `num_blocks` KV cache blocks with reference counts.

    `evictor` decides which cached block is evicted when no block is free; a prefix cache sets it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictor: Evictor | None = None
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._registered = [False] * num_blocks
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can return: free and cached ones."""
        return len(self._free) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Number of blocks that only the prefix cache holds."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Number of blocks that are referenced."""
        return self.num_blocks - len(self._free) - self._num_cached

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each; evicts cached blocks if too few are free.

        Raises:
            RuntimeError: fewer than `count` blocks are available. Nothing is allocated.
        """
        if count > self.num_available:
            raise RuntimeError(
                f"{count} KV cache blocks were requested, but only {self.num_available} of "
                f"{self.num_blocks} are available. Compare with num_available first."
            )
        while len(self._free) < count:
            self._evict()
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block.

        Raises:
            RuntimeError: the block is free, so its content is undefined.
        """
        if self._ref_counts[block] == 0:
            if not self._registered[block]:
                raise RuntimeError(f"KV cache block {block} is free and cannot be shared.")
            self._num_cached -= 1
        self._ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Remove a reference; without references the block becomes cached if it is registered,
        otherwise free.

        Raises:
            RuntimeError: the block has no references.
        """
        if self._ref_counts[block] <= 0:
            raise RuntimeError(
                f"KV cache block {block} has no references and cannot be released again."
            )
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        if self._registered[block]:
            self._num_cached += 1
            if self.evictor is not None:
                self.evictor.on_cached(block)
        else:
            self._free.append(block)

    def ref_count(self, block: int) -> int:
        """Return the number of references to a block."""
        return self._ref_counts[block]

    def list_stored(self) -> list[int]:
        """Return the blocks that are used or cached, in ascending order."""
        return [
            block
            for block, (ref_count, is_registered) in enumerate(
                zip(self._ref_counts, self._registered, strict=True)
            )
            if ref_count or is_registered
        ]

    def is_registered(self, block: int) -> bool:
        """Return whether the block is in the index of the prefix cache."""
        return self._registered[block]

    def register(self, block: int) -> None:
        """Keep a used block as cached when its last reference is released."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"KV cache block {block} is not used and cannot be registered.")
        self._registered[block] = True

    def unregister(self, block: int) -> None:
        """Undo `register`: the block becomes free at once if it is cached, otherwise when it is
        released."""
        if self._registered[block] and self._ref_counts[block] == 0:
            self._num_cached -= 1
            self._free.append(block)
        self._registered[block] = False

    def check(self, references: Iterable[int] | None = None) -> None:
        """Verify the invariants: free, used and cached blocks partition the pool, and reference
        counts equal the number of `references` (one entry per reference; None: not compared).

        Raises:
            AssertionError: an invariant is violated; the message names the block.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"a block is twice in the free stack: {self._free}"
        num_cached = 0
        for block, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block} has {count} references"
            is_cached = count == 0 and self._registered[block]
            num_cached += is_cached
            is_free = count == 0 and not is_cached
            assert is_free == (block in free), (
                f"block {block} with {count} references is {'not ' * is_free}in the free stack"
            )
        assert num_cached == self._num_cached, (
            f"{num_cached} blocks are cached, {self._num_cached} are counted"
        )
        if references is not None:
            counts = Counter(references)
            for block, count in enumerate(self._ref_counts):
                assert count == counts[block], (
                    f"block {block} has {counts[block]} references, but {count} are counted"
                )

    def _evict(self) -> None:
        assert self.evictor is not None, "blocks are cached without an evictor"
        self.unregister(self.evictor.evict())

"""Host tier of the prefix cache: blocks that were evicted from the device, in host memory.

A block that the prefix cache evicts is copied to host memory (offloaded) before the step that
overwrites it, and copied back (loaded) when a sequence hits it. It stays in host memory then, so
that its next eviction copies nothing. A block in transfer is neither free nor cached: it is not
hit, and its place is not reused. Of the others the least recently used leaf is dropped first.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from megalith.plan.serving.block_allocator import BlockCopy

MAX_STALE_ENTRIES = 64
"""Outdated heap entries, beyond one per block, before they are removed (heuristic)."""


@dataclass(slots=True, eq=False)
class HostBlock:
    """A block in host memory."""

    number: int
    group: int
    key: int
    """Key of the block hash in the index of the device, which may belong to other content too."""

    digest: bytes
    """Digest of the block hash, by which the block is found."""

    parent: bytes
    """Digest of the block before it; empty for the first, and in windowed groups."""

    last_used: int
    is_stored: bool = False
    """Whether the copy to host memory is complete."""

    num_transfers: int = 0
    """Copies of the step that is planned, to or from this block."""


class HostCache:
    """Index (group, digest) -> block over `num_blocks` blocks of host memory; with 0 blocks nothing
    is offloaded.

    A block is dropped only when none of its children is in host memory: they could not be hit
    without it, once it is evicted from the device. Children arrive before their parents, because
    the device evicts leaves first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_offloaded_blocks = 0
        """Completed copies to host memory."""

        self.on_drop: Callable[[HostBlock], None] | None = None
        """Called when a block leaves host memory."""

        self._free = list(range(num_blocks - 1, -1, -1))
        self._slots: list[HostBlock | None] = [None] * num_blocks
        self._index: dict[tuple[int, bytes], HostBlock] = {}
        self._num_children: dict[tuple[int, bytes], int] = {}
        """Children in host memory, by the group and the digest of their parent."""

        self._heap: list[tuple[int, int]] = []
        self._offloads: list[tuple[BlockCopy, HostBlock]] = []

    @property
    def num_used(self) -> int:
        """Number of blocks that are stored or in transfer."""
        return len(self._index)

    @property
    def pending_offloads(self) -> tuple[BlockCopy, ...]:
        """Copies to host memory of the step that is planned; destinations are blocks of the
        host."""
        return tuple(copy for copy, _ in self._offloads)

    def list_keys(self, group: int) -> list[int]:
        """Return the keys of the blocks of a group."""
        return [block.key for block in self._index.values() if block.group == group]

    def contains(self, group: int, digest: bytes) -> bool:
        """Return whether a block is stored, or is being offloaded."""
        return (group, digest) in self._index

    def find(self, group: int, digest: bytes) -> HostBlock | None:
        """Return the stored block with a digest; None if there is none, or it is being
        offloaded."""
        block = self._index.get((group, digest))
        return block if block is not None and block.is_stored else None

    def offload(
        self, source: int, group: int, *, key: int, digest: bytes, parent: bytes, last_used: int
    ) -> None:
        """Plan the copy of block `source`, which leaves the device, unless host memory has its
        content, or all of its blocks are in transfer."""
        if not self.num_blocks:
            return
        block = self._index.get((group, digest))
        if block is not None:
            block.last_used = max(block.last_used, last_used)
            self._push_if_evictable(block)
            return
        if not self._free and not self._evict():
            return
        block = HostBlock(self._free.pop(), group, key, digest, parent, last_used, num_transfers=1)
        self._slots[block.number] = block
        self._index[group, digest] = block
        if parent:
            self._num_children[group, parent] = self._num_children.get((group, parent), 0) + 1
        self._offloads.append((BlockCopy(source, block.number), block))

    def pin(self, block: HostBlock, *, time: int) -> None:
        """Keep a block for a planned load."""
        block.num_transfers += 1
        block.last_used = time

    def unpin(self, block: HostBlock) -> None:
        """Undo `pin`, also of a block that was dropped since."""
        block.num_transfers -= 1
        self._push_if_evictable(block)

    def finish_offloads(self) -> None:
        """Make the offloaded blocks available for hits, after the copies were executed."""
        for _, block in self._offloads:
            block.is_stored = True
            self.unpin(block)
        self.num_offloaded_blocks += len(self._offloads)
        self._offloads.clear()

    def undo_offloads(self) -> None:
        """Drop the blocks whose copies are planned, because they may not have been executed."""
        for _, block in self._offloads:
            self.drop(block)
        self._offloads.clear()

    def drop(self, block: HostBlock) -> None:
        """Remove a block whose content cannot be used; it may have been removed before."""
        if self._slots[block.number] is block:
            self._remove(block)

    def reset(self) -> None:
        """Drop all blocks."""
        for block in list(self._index.values()):
            self._remove(block)
        self._heap.clear()

    def check(self) -> None:
        """Verify that blocks, index, children and evictable blocks are consistent.

        Raises:
            AssertionError: an invariant is violated; the message names the block.
        """
        blocks = [block for block in self._slots if block is not None]
        assert len(blocks) + len(set(self._free)) == self.num_blocks == len(self._slots), (
            "a block of the host is neither free nor used"
        )
        num_children: dict[tuple[int, bytes], int] = {}
        heap = set(self._heap)
        for block in blocks:
            place = block.group, block.parent
            assert self._index.get((block.group, block.digest)) is block, f"unknown {block}"
            if block.parent:
                num_children[place] = num_children.get(place, 0) + 1
        assert num_children == self._num_children, "children of blocks of the host are miscounted"
        for block in blocks:
            is_pending = any(block is pending for _, pending in self._offloads)
            assert block.is_stored != is_pending, f"{block} is neither stored nor in transfer"
            assert block.num_transfers >= is_pending, f"{block} is in transfer, but not pinned"
            if self._is_evictable(block):
                assert (block.last_used, block.number) in heap, f"{block} is never dropped"

    def _evict(self) -> bool:
        """Drop the least recently used leaf; return whether there is one."""
        while self._heap:
            last_used, number = heapq.heappop(self._heap)
            block = self._slots[number]
            if block is None or block.last_used != last_used:
                continue  # an outdated entry
            if self._is_evictable(block):
                self._remove(block)
                return True
        return False

    def _remove(self, block: HostBlock) -> None:
        self._slots[block.number] = None
        self._free.append(block.number)
        del self._index[block.group, block.digest]
        if block.parent:
            place = block.group, block.parent
            self._num_children[place] -= 1
            if not self._num_children[place]:
                del self._num_children[place]
                parent = self._index.get(place)
                if parent is not None:
                    self._push_if_evictable(parent)
        if self.on_drop is not None:
            self.on_drop(block)

    def _is_evictable(self, block: HostBlock) -> bool:
        return (
            self._slots[block.number] is block
            and not block.num_transfers
            and (block.group, block.digest) not in self._num_children
        )

    def _push_if_evictable(self, block: HostBlock) -> None:
        if not self._is_evictable(block):
            return
        heapq.heappush(self._heap, (block.last_used, block.number))
        if len(self._heap) > self.num_blocks + MAX_STALE_ENTRIES:
            blocks = [each for each in self._slots if each is not None and self._is_evictable(each)]
            self._heap = [(each.last_used, each.number) for each in blocks]
            heapq.heapify(self._heap)

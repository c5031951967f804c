"""Prefix cache: an index of full KV cache blocks by a hash chain, with leaf-only LRU eviction.

The digest of a block covers all tokens from the start of the sequence, so equal digests mean equal
prefixes. The root of the chain depends on a salt (weight version, adapter, tenant) and on the
rotary frequencies. A hit is verified with the full digest and the tokens of the block.
"""

import heapq
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.host_cache import HostBlock, HostCache

DIGEST_BYTES = 32
NO_BLOCK = -1
"""Entry of a block table, or parent of a block, that refers to no block."""

MAX_STALE_ENTRIES = 64
"""Outdated heap entries, beyond one per block, before they are removed (heuristic)."""


class BlockHash(NamedTuple):
    """Identity of the content of a full block: its tokens and all tokens before them."""

    key: int
    """63-bit key of the index, in 1 .. 2^63 - 1; two digests may have the same key."""

    digest: bytes
    tokens: bytes
    """Token ids of the block, as little-endian int64."""


class HostHit(NamedTuple):
    """A block of a hit that is in host memory."""

    group: int
    number: int
    """Number of the block in the sequence."""

    block: HostBlock


class PrefixHit(NamedTuple):
    """Cached blocks of the longest usable prefix of a sequence."""

    num_blocks: int
    """Length of the prefix in blocks; every block table has this length."""

    block_tables: list[list[int]]
    """Blocks of each group, -1 where no later query attends to the block, or it is in host
    memory."""

    host_hits: tuple[HostHit, ...] = ()
    """Blocks that are in host memory only."""

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks in the tables, all of them on the device."""
        return sum(block != NO_BLOCK for table in self.block_tables for block in table)


@dataclass(slots=True)
class RegisteredBlock:
    """Index entry of a block, used or cached."""

    group: int
    block_hash: BlockHash
    parent: int
    """Block of the same group that precedes it, -1 for none; windowed groups have no parents."""

    num_children: int = 0
    last_used: int = 0
    """Logical time of the last use, which orders evictions."""


def compute_salt(
    salt: bytes = b"", *, cache_salt: str | None = None, adapter_fingerprint: bytes | None = None
) -> bytes:
    """Return the salt of a request: that of the engine, with the salt of a tenant and the
    fingerprint of an adapter's weights."""
    if cache_salt is not None:
        salt = b"\0".join([salt, cache_salt.encode("utf-8", "surrogatepass")])
    return salt if adapter_fingerprint is None else b"adapter" + adapter_fingerprint + salt


def compute_root_digest(salt: bytes, *, long_rope: bool = False) -> bytes:
    """Return the digest that precedes the first block: 32 zero bytes without a salt.

    The hashed strings of roots have 33 bytes and those of blocks 32 + 8 · block_size, so a chosen
    salt cannot make a root equal to the digest of a block. `long_rope`: keys have the rotary
    frequencies beyond the original context.
    """
    if not salt and not long_rope:
        return bytes(DIGEST_BYTES)
    return sha256((b"L" if long_rope else b"S") + sha256(salt).digest()).digest()


def block_key(digest: bytes) -> int:
    """Return the 63-bit key of a digest: (first 8 bytes, little-endian, mod (2^63 - 1)) + 1."""
    return int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1


def hash_block(parent_digest: bytes, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of a full block, chained to the digest of the block before it.

    >>> root = compute_root_digest(b"")
    >>> first = hash_block(root, [0, 1, 2, 3])
    >>> first.key, hash_block(first.digest, [4, 5, 6, 7]).key
    (4832768347186360981, 8533535913844734714)
    """
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    digest = sha256(parent_digest + tokens).digest()
    return BlockHash(block_key(digest), digest, tokens)


def extend_block_hashes(
    block_hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: bytes
) -> None:
    """Append the hashes of all full blocks of `token_ids` that the list does not contain yet."""
    digest = block_hashes[-1].digest if block_hashes else root
    for start in range(len(block_hashes) * block_size, len(token_ids), block_size):
        if start + block_size > len(token_ids):
            return
        block_hashes.append(hash_block(digest, token_ids[start : start + block_size]))
        digest = block_hashes[-1].digest


class PrefixCache:
    """Index (group, block hash) -> block over the blocks of an allocator.

    Blocks are registered after the forward pass that computed them. A registered block of a group
    with full attention has a registered parent, and a sequence that references it references all of
    its ancestors; therefore eviction starts at the leaves. Blocks of windowed groups are
    independent. Evicted blocks are offloaded to `host`, by default without blocks.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        block_size: int,
        groups: Sequence[AttentionView],
        host: HostCache | None = None,
    ) -> None:
        self.time = 0
        """Logical time of uses, advanced by the caller; blocks released at the same time are
        evicted by block id."""
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._changes: dict[int, bool] | None = None
        """Keys that were stored (True) or removed since the last report; None: not recorded."""
        self._reported_group = next(
            (index for index, view in enumerate(groups) if view.window is None), 0
        )
        self._allocator = allocator
        self._block_size = block_size
        self._groups = tuple(groups)
        self._index: list[dict[int, int]] = [{} for _ in groups]
        self._entries: dict[int, RegisteredBlock] = {}
        self._heap: list[tuple[int, int]] = []
        self._host = HostCache(0) if host is None else host
        self._host.on_drop = self._on_host_drop
        allocator.evictor = self

    def match(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> PrefixHit:
        """Return the longest prefix of a sequence of `num_tokens` tokens that is cached on the
        device or in host memory.

        At least one token remains to be computed, so that its logits exist. A prefix of n blocks
        needs all n blocks of every group with full attention, and of a windowed group those with
        tokens that a query at position n · block_size or later attends to. Does not pin the blocks.
        """
        num_blocks = min(len(block_hashes), (num_tokens - 1) // self._block_size)
        if not self._groups:
            num_blocks = 0
        for group, view in enumerate(self._groups):
            if view.window is None:
                num_blocks = self._count_leading_blocks(group, block_hashes[:num_blocks])

        is_complete = False
        while not is_complete:
            is_complete = True
            for group, view in enumerate(self._groups):
                missing = self._find_missing(group, view, block_hashes, num_blocks)
                if missing is not None:
                    num_blocks, is_complete = missing, False
        return self._read_hit(block_hashes, num_blocks)

    def pin(self, hit: PrefixHit) -> None:
        """Add a reference to every block of a hit."""
        for table in hit.block_tables:
            for block in table:
                if block != NO_BLOCK:
                    self._allocator.share(block)

    def count_query(self, *, num_tokens: int, num_hit_tokens: int) -> None:
        """Add a sequence that looked up its prefix to the counters."""
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += num_hit_tokens

    def register(self, group: int, block: int, block_hash: BlockHash, *, parent: int) -> int:
        """Register a full block whose forward pass succeeded; return the registered block.

        `parent`: the registered block before it in the sequence, -1 for the first. If the same
        content is registered already, return that block: the caller replaces its own by it, so that
        a sequence references the ancestors of each of its registered blocks. Return -1 if the key
        belongs to other content, or an ancestor is not registered.
        """
        registered = self._index[group].get(block_hash.key)
        if registered is not None:
            return registered if self._has_content(registered, block_hash) else NO_BLOCK
        if self._groups[group].window is not None:
            parent = NO_BLOCK
        if parent != NO_BLOCK:
            if parent not in self._entries:
                return NO_BLOCK
            self._entries[parent].num_children += 1
        self._allocator.register(block)
        self._entries[block] = RegisteredBlock(group, block_hash, parent, last_used=self.time)
        self._index[group][block_hash.key] = block
        self._record(group, block_hash.key, is_stored=True)
        return block

    def on_cached(self, block: int) -> None:
        """Make a registered block evictable: its last reference was released."""
        entry = self._entries[block]
        entry.last_used = self.time
        self._push_if_evictable(block, entry)

    def evict(self) -> int:
        """Remove the least recently used leaf from the index, plan to offload it, and return its
        block.

        Raises:
            RuntimeError: no block is evictable.
        """
        while self._heap:
            last_used, block = heapq.heappop(self._heap)
            entry = self._entries.get(block)
            if entry is None or entry.last_used != last_used:
                continue  # an outdated entry
            if self._is_evictable(block, entry):
                self._offload(block, entry)
                self._remove(block, entry)
                return block
        raise RuntimeError("the prefix cache has no block that can be evicted")

    def reset(self) -> None:
        """Remove all blocks from the index and from host memory, for example after a weight update.

        The caller must not register blocks whose content was computed before the reset.
        """
        self._host.reset()
        for block, entry in self._entries.items():
            self._allocator.unregister(block)
            self._record(entry.group, entry.block_hash.key, is_stored=False)
        self._entries.clear()
        self._heap.clear()
        for index in self._index:
            index.clear()

    def start_recording(self) -> list[int]:
        """Record the keys that are stored and removed from now on; returns those that are stored,
        on the device or in host memory. Of several groups, one with full attention is recorded."""
        self._changes = {}
        if not self._index:
            return []
        keys = [*self._index[self._reported_group], *self._host.list_keys(self._reported_group)]
        return list(dict.fromkeys(keys))

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Return the keys that were stored, and those that were removed, since the last call."""
        assert self._changes is not None, "start_recording was not called"
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]

    def check(self) -> None:
        """Verify that index, entries, parents and evictable blocks are consistent.

        Raises:
            AssertionError: an invariant is violated; the message names the block.
        """
        num_children = dict.fromkeys(self._entries, 0)
        for block, entry in self._entries.items():
            assert self._index[entry.group].get(entry.block_hash.key) == block, (
                f"block {block} is not in the index"
            )
            assert self._allocator.is_registered(block), f"block {block} is not registered"
            if entry.parent == NO_BLOCK:
                continue
            assert entry.parent in self._entries, (
                f"block {block} is registered, but its parent {entry.parent} was evicted"
            )
            num_children[entry.parent] += 1
            if self._allocator.ref_count(block):
                assert self._allocator.ref_count(entry.parent), (
                    f"block {block} is used, but its parent {entry.parent} is not"
                )
        assert sum(map(len, self._index)) == len(self._entries), "the index has unknown blocks"
        heap = set(self._heap)
        for block, entry in self._entries.items():
            assert entry.num_children == num_children[block], (
                f"block {block} has {num_children[block]} children, not {entry.num_children}"
            )
            if self._is_evictable(block, entry):
                assert (entry.last_used, block) in heap, f"block {block} is never evicted"

    def _record(self, group: int, key: int, *, is_stored: bool) -> None:
        if self._changes is not None and group == self._reported_group:
            self._changes[key] = is_stored

    def _has_content(self, block: int, block_hash: BlockHash) -> bool:
        """Return whether a block with the same key has the same tokens and prefix."""
        entry = self._entries[block]
        return (
            entry.block_hash.digest == block_hash.digest
            and entry.block_hash.tokens == block_hash.tokens
        )

    def _find_block(self, group: int, block_hash: BlockHash) -> int:
        """Return the registered block with this content, -1 if there is none."""
        block = self._index[group].get(block_hash.key)
        if block is None or not self._has_content(block, block_hash):
            return NO_BLOCK
        return block

    def _is_cached(self, group: int, block_hash: BlockHash) -> bool:
        """Return whether this content is on the device or in host memory."""
        if self._find_block(group, block_hash) != NO_BLOCK:
            return True
        return self._host.find(group, block_hash.digest) is not None

    def _count_leading_blocks(self, group: int, block_hashes: Sequence[BlockHash]) -> int:
        for count, block_hash in enumerate(block_hashes):
            if not self._is_cached(group, block_hash):
                return count
        return len(block_hashes)

    def _find_missing(
        self, group: int, view: AttentionView, block_hashes: Sequence[BlockHash], num_blocks: int
    ) -> int | None:
        """Return the last missing block that a prefix of `num_blocks` blocks needs in a windowed
        group. A longer prefix than that number of blocks cannot be hit either."""
        if view.window is None:
            return None
        first = view.first_needed(num_blocks * self._block_size) // self._block_size
        for index in range(num_blocks - 1, first - 1, -1):
            if not self._is_cached(group, block_hashes[index]):
                return index
        return None

    def _read_hit(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> PrefixHit:
        tables: list[list[int]] = []
        host_hits: list[HostHit] = []
        for group, view in enumerate(self._groups):
            first = view.first_needed(num_blocks * self._block_size) // self._block_size
            table = [NO_BLOCK] * min(first, num_blocks)
            for number in range(first, num_blocks):
                block_hash = block_hashes[number]
                block = self._find_block(group, block_hash)
                if block == NO_BLOCK:
                    host_block = self._host.find(group, block_hash.digest)
                    assert host_block is not None, "the block is cached"
                    host_hits.append(HostHit(group, number, host_block))
                table.append(block)
            tables.append(table)
        return PrefixHit(num_blocks, tables, tuple(host_hits))

    def _offload(self, block: int, entry: RegisteredBlock) -> None:
        parent = self._entries.get(entry.parent)
        self._host.offload(
            block,
            entry.group,
            key=entry.block_hash.key,
            digest=entry.block_hash.digest,
            parent=b"" if parent is None else parent.block_hash.digest,
            last_used=entry.last_used,
        )

    def _on_host_drop(self, block: HostBlock) -> None:
        if block.key not in self._index[block.group]:
            self._record(block.group, block.key, is_stored=False)

    def _is_evictable(self, block: int, entry: RegisteredBlock) -> bool:
        return entry.num_children == 0 and self._allocator.ref_count(block) == 0

    def _push_if_evictable(self, block: int, entry: RegisteredBlock) -> None:
        if not self._is_evictable(block, entry):
            return
        heapq.heappush(self._heap, (entry.last_used, block))
        if len(self._heap) > self._allocator.num_blocks + MAX_STALE_ENTRIES:
            self._heap = [
                (entry.last_used, block)
                for block, entry in self._entries.items()
                if self._is_evictable(block, entry)
            ]
            heapq.heapify(self._heap)

    def _remove(self, block: int, entry: RegisteredBlock) -> None:
        del self._entries[block]
        del self._index[entry.group][entry.block_hash.key]
        if not self._host.contains(entry.group, entry.block_hash.digest):
            self._record(entry.group, entry.block_hash.key, is_stored=False)
        parent = self._entries.get(entry.parent)
        if parent is not None:
            parent.num_children -= 1
            self._push_if_evictable(entry.parent, parent)

"""Prefix cache: hash chain, hits of several groups, verification and eviction."""

import random
from collections.abc import Sequence

import pytest

from megalith.plan.serving import prefix_cache
from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.prefix_cache import (
    BlockHash,
    PrefixCache,
    compute_root_digest,
    extend_block_hashes,
    hash_block,
)
from tests.cases import loop_over

FULL = AttentionView()


def hash_tokens(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[BlockHash]:
    """Return the hashes of the full blocks."""
    block_hashes: list[BlockHash] = []
    extend_block_hashes(block_hashes, tokens, block_size, compute_root_digest(salt))
    return block_hashes


def make_cache(
    *groups: AttentionView, block_size: int = 4, num_blocks: int = 64
) -> tuple[BlockAllocator, PrefixCache]:
    allocator = BlockAllocator(num_blocks)
    return allocator, PrefixCache(allocator, block_size=block_size, groups=groups)


def store(allocator: BlockAllocator, cache: PrefixCache, hashes: Sequence[BlockHash]) -> list[int]:
    """Register blocks of group 0 for a sequence and release them; return them."""
    blocks = allocator.allocate(len(hashes))
    for index, block_hash in enumerate(hashes):
        parent = blocks[index - 1] if index else -1
        registered = cache.register(0, blocks[index], block_hash, parent=parent)
        if registered != blocks[index]:
            allocator.release(blocks[index])
            allocator.share(registered)
            blocks[index] = registered
    for block in reversed(blocks):
        allocator.release(block)
    cache.check()
    return blocks


def test_keys_of_the_golden_example() -> None:
    hashes = hash_tokens(range(10), 4)
    assert [block.key for block in hashes] == [4832768347186360981, 8533535913844734714]


def test_hashes_are_extended_in_any_steps() -> None:
    tokens = list(range(100, 150))
    hashes: list[BlockHash] = []
    for end in (0, 3, 4, 5, 17, 17, 50):
        extend_block_hashes(hashes, tokens[:end], 4, compute_root_digest(b"x"))
        assert len(hashes) == end // 4
    assert hashes == hash_tokens(tokens, 4, b"x")


def test_salts_and_rotary_frequencies_change_every_key() -> None:
    roots = [compute_root_digest(salt) for salt in (b"", b"a", b"b", bytes(32))]
    roots += [compute_root_digest(salt, long_rope=True) for salt in (b"", b"a", b"along")]
    roots.append(compute_root_digest(b"along"))
    assert len({hash_block(root, [1, 2]).key for root in roots}) == len(roots)


def test_salt_cannot_continue_the_hash_chain_of_other_sequences() -> None:
    first = hash_block(compute_root_digest(b""), [1, 2, 3, 4])
    assert compute_root_digest(bytes(32) + first.tokens) != first.digest


def test_match_leaves_one_token_to_compute() -> None:
    allocator, cache = make_cache(FULL)
    hashes = hash_tokens(range(12), 4)
    blocks = store(allocator, cache, hashes)
    for num_tokens, num_blocks in ((1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        hit = cache.match(hash_tokens(range(num_tokens), 4), num_tokens)
        assert hit.num_blocks == num_blocks, num_tokens
        assert hit.block_tables == [blocks[:num_blocks]]
        assert hit.num_held_blocks == num_blocks


def test_match_ends_at_the_first_different_block() -> None:
    allocator, cache = make_cache(FULL)
    blocks = store(allocator, cache, hash_tokens(range(16), 4))
    tokens = [*range(8), 99, *range(9, 20)]
    assert cache.match(hash_tokens(tokens, 4), 20).block_tables == [blocks[:2]]
    assert cache.match(hash_tokens(range(20), 4, b"tenant"), 20).num_blocks == 0


def test_pinned_hit_is_not_evicted() -> None:
    allocator, cache = make_cache(FULL, num_blocks=5)
    hashes = hash_tokens(range(16), 4)
    store(allocator, cache, hashes)
    hit = cache.match(hashes[:3], 13)
    cache.pin(hit)
    assert allocator.num_available == 2
    allocator.allocate(2)
    assert cache.match(hashes, 17) == hit
    cache.check()


def test_forced_collision_of_keys_does_not_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "block_key", lambda digest: 1)
    allocator, cache = make_cache(FULL)
    block = store(allocator, cache, hash_tokens([1, 2, 3, 4], 4))[0]
    other = hash_tokens([5, 6, 7, 8], 4)
    assert cache.match(hash_tokens([1, 2, 3, 4], 4), 5).block_tables == [[block]]
    assert cache.match(other, 5).num_blocks == 0
    own = allocator.allocate(1)[0]
    assert cache.register(0, own, other[0], parent=-1) == -1
    assert cache.register(0, own, hash_tokens([1, 2, 3, 4], 4)[0], parent=-1) == block


def test_least_recently_used_leaf_is_evicted_first() -> None:
    """The tree A(1) -> {B(2) -> {C(5), F(3)}, D(3) -> E(5)}: evicting 3 removes F, C, B."""
    allocator, cache = make_cache(FULL, block_size=1, num_blocks=6)
    paths = {"A": "a", "B": "ab", "C": "abc", "D": "ad", "E": "ade", "F": "abf"}
    hashes = {name: hash_tokens([*path.encode()], 1)[-1] for name, path in paths.items()}
    names = dict(zip("ABCDEF", allocator.allocate(6), strict=True))
    for name, path in paths.items():
        parent = names[path[-2].upper()] if len(path) > 1 else -1
        cache.register(0, names[name], hashes[name], parent=parent)
    for time, released in ((1, "A"), (2, "B"), (3, "FD"), (5, "EC")):
        cache.time = time
        for name in released:
            allocator.release(names[name])
    evicted = [cache.evict() for _ in range(3)]
    assert evicted == [names[name] for name in "FCB"]


def test_all_cached_blocks_can_be_evicted_children_first() -> None:
    allocator, cache = make_cache(FULL, block_size=1, num_blocks=40)
    rng = random.Random(0)
    for time in range(30):
        cache.time = time
        num_tokens = rng.randrange(1, min(6, allocator.num_available))
        hashes = hash_tokens([rng.randrange(2) for _ in range(num_tokens)], 1)
        store(allocator, cache, hashes)
        allocator.check([])
    while allocator.num_cached:
        block = cache.evict()
        allocator.unregister(block)
        cache.check()
    assert allocator.num_available == 40


def test_eviction_heap_stays_small_when_one_prefix_is_hit_often() -> None:
    allocator, cache = make_cache(FULL, num_blocks=8)
    hashes = hash_tokens(range(8), 4)
    for time in range(1000):
        cache.time = time
        store(allocator, cache, hashes)
    assert len(cache._heap) <= 8 + prefix_cache.MAX_STALE_ENTRIES
    cache.check()


def test_reset_empties_the_index_and_frees_cached_blocks() -> None:
    allocator, cache = make_cache(FULL)
    hashes = hash_tokens(range(16), 4)
    store(allocator, cache, hashes)
    used = cache.match(hashes[:1], 5)
    cache.pin(used)
    cache.reset()
    assert (allocator.num_cached, allocator.num_used) == (0, 1)
    assert cache.match(hashes, 17).num_blocks == 0
    allocator.release(used.block_tables[0][0])
    assert allocator.num_available == allocator.num_blocks
    cache.check()


def test_block_whose_parent_is_not_registered_is_not_registered() -> None:
    allocator, cache = make_cache(FULL)
    hashes = hash_tokens(range(8), 4)
    parent, child = allocator.allocate(2)
    assert cache.register(0, child, hashes[1], parent=parent) == -1
    cache.check()


def brute_force_match(
    stored: list[set[int]], groups: Sequence[AttentionView], num_tokens: int, block_size: int
) -> int:
    """Return the longest usable prefix: every token that a later query attends to is stored."""
    for num_blocks in range((num_tokens - 1) // block_size, 0, -1):
        start = num_blocks * block_size
        if all(
            token // block_size in blocks
            for view, blocks in zip(groups, stored)
            for query in range(start, num_tokens + 50)
            for token in range(query - view.before(query), start)
        ):
            return num_blocks
    return 0


@loop_over("seed", range(30))
def test_match_of_several_groups_is_the_longest_usable_prefix(seed: int) -> None:
    rng = random.Random(seed)
    views = [FULL, AttentionView(3), AttentionView(7), AttentionView(6, chunked=True)]
    groups = rng.choices(views, k=rng.randrange(1, 4))
    block_size = rng.choice([1, 2, 4])
    tokens = [rng.randrange(5) for _ in range(block_size * 9 + rng.randrange(block_size))]
    hashes = hash_tokens(tokens, block_size)
    allocator, cache = make_cache(*groups, block_size=block_size)
    stored: list[set[int]] = []
    tables: list[dict[int, int]] = []
    for group, view in enumerate(groups):
        if view.window is None:
            numbers = list(range(rng.randrange(len(hashes) + 1)))
        else:
            numbers = [number for number in range(len(hashes)) if rng.random() < 0.8]
        table = dict(zip(numbers, allocator.allocate(len(numbers))))
        for number, block in table.items():
            parent = table.get(number - 1, -1)
            assert cache.register(group, block, hashes[number], parent=parent) == block
        stored.append(set(numbers))
        tables.append(table)

    hit = cache.match(hashes, len(tokens))
    assert hit.num_blocks == brute_force_match(stored, groups, len(tokens), block_size)
    for view, table, expected in zip(groups, hit.block_tables, tables):
        first = view.first_needed(hit.num_blocks * block_size) // block_size
        assert len(table) == hit.num_blocks
        for number, block in enumerate(table):
            assert block == (expected[number] if number >= first else -1)

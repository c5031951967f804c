"""Host tier of the prefix cache: offloading of evicted blocks, hits, leaf-first LRU, failures."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megalith.plan.serving.block_allocator import BlockAllocator, BlockCopy
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.host_cache import HostBlock, HostCache
from megalith.plan.serving.prefix_cache import BlockHash, PrefixCache
from megalith.plan.serving.scheduler import Scheduler, SchedulerConfig
from tests.plan.serving.test_prefix_cache import hash_tokens, store
from tests.plan.serving.test_scheduler import add, spans, step

FULL = AttentionView()
BASE = SchedulerConfig(
    num_blocks=6,
    block_size=4,
    groups=(FULL,),
    max_num_seqs=4,
    max_num_batched_tokens=64,
    min_prefill_chunk_tokens=4,
    num_host_blocks=8,
)


def make_caches(
    *groups: AttentionView, num_blocks: int, num_host_blocks: int
) -> tuple[BlockAllocator, PrefixCache, HostCache]:
    allocator, host = BlockAllocator(num_blocks), HostCache(num_host_blocks)
    return allocator, PrefixCache(allocator, block_size=4, groups=groups, host=host), host


def offload(host: HostCache, hashes: Sequence[BlockHash], indices: Sequence[int]) -> None:
    """Offload blocks of a sequence in this order, one step and one unit of time for each."""
    for index in indices:
        parent = hashes[index - 1].digest if index else b""
        key, digest = hashes[index].key, hashes[index].digest
        host.offload(index, 0, key=key, digest=digest, parent=parent, last_used=index)
        host.check()
        host.finish_offloads()
        host.check()


def list_stored(host: HostCache, hashes: Sequence[BlockHash]) -> list[int]:
    return [index for index, block in enumerate(hashes) if host.find(0, block.digest)]


def check_leaves_are_dropped_first() -> None:
    """Blocks 1 and 2 arrive before their parent 0, which is used least recently."""
    host, hashes, other = HostCache(4), hash_tokens(range(12), 4), hash_tokens(range(50, 54), 4)
    offload(host, hashes, [2, 1, 0])
    for number in range(3):
        last_used = 10 + number
        digest = bytes([number]) * 32
        host.offload(9, 0, key=number, digest=digest, parent=b"", last_used=last_used)
        host.finish_offloads()
        assert list_stored(host, hashes) == [[0, 1, 2], [0, 1], [0]][number]
        host.check()
    assert not list_stored(host, other)


def test_least_recently_used_leaf_is_dropped_first() -> None:
    check_leaves_are_dropped_first()


def test_fault_of_dropping_a_parent_before_its_child_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_evictable(self: HostCache, block: HostBlock) -> bool:
        return self._slots[block.number] is block and not block.num_transfers

    monkeypatch.setattr(HostCache, "_is_evictable", is_evictable)
    with pytest.raises(AssertionError):
        check_leaves_are_dropped_first()


def test_block_in_transfer_is_neither_hit_nor_dropped() -> None:
    host, hashes = HostCache(2), hash_tokens(range(16), 4)
    for index in (0, 1, 2):
        key, digest = hashes[index].key, hashes[index].digest
        host.offload(index, 0, key=key, digest=digest, parent=b"", last_used=index)
        assert host.find(0, digest) is None
        host.check()
    assert host.pending_offloads == (BlockCopy(0, 0), BlockCopy(1, 1))  # no place for the third
    host.finish_offloads()
    assert list_stored(host, hashes) == [0, 1]
    block = host.find(0, hashes[0].digest)
    assert block is not None
    host.pin(block, time=0)
    offload(host, hashes, [3])
    assert list_stored(host, hashes) == [0, 3]
    host.unpin(block)
    host.check()
    assert host.num_offloaded_blocks == 3


def test_content_in_host_memory_is_not_copied_again() -> None:
    host, hashes = HostCache(2), hash_tokens(range(8), 4)
    offload(host, hashes, [0, 0, 1, 0])
    assert (host.num_offloaded_blocks, host.num_used) == (2, 2)


def test_offloads_of_a_discarded_plan_are_dropped() -> None:
    host, hashes = HostCache(2), hash_tokens(range(4), 4)
    key, digest = hashes[0].key, hashes[0].digest
    host.offload(0, 0, key=key, digest=digest, parent=b"", last_used=0)
    host.undo_offloads()
    host.check()
    assert (host.num_used, host.pending_offloads) == (0, ())


def test_heap_stays_small_when_one_block_is_loaded_often() -> None:
    host, hashes = HostCache(4), hash_tokens(range(4), 4)
    offload(host, hashes, [0])
    block = host.find(0, hashes[0].digest)
    assert block is not None
    for time in range(1000):
        host.pin(block, time=time)
        host.unpin(block)
    assert len(host._heap) <= 4 + 64 + 1
    host.check()


def test_hit_continues_in_host_memory() -> None:
    allocator, cache, host = make_caches(FULL, num_blocks=4, num_host_blocks=4)
    hashes = hash_tokens(range(16), 4)
    blocks = store(allocator, cache, hashes)
    allocator.allocate(2)  # evicts the last two blocks
    assert cache.match(hashes, 17).num_blocks == 2
    host.finish_offloads()
    hit = cache.match(hashes, 17)
    assert (hit.num_blocks, hit.block_tables) == (4, [[*blocks[:2], -1, -1]])
    assert [(one.group, one.number, one.block.is_stored) for one in hit.host_hits] == [
        (0, 2, True),
        (0, 3, True),
    ]
    assert hit.num_held_blocks == 2
    cache.reset()
    assert cache.match(hashes, 17).num_blocks == host.num_used == 0


def test_forced_collision_of_keys_is_not_hit_in_host_memory() -> None:
    _, cache, host = make_caches(FULL, num_blocks=4, num_host_blocks=4)
    stored, other = hash_tokens([1, 2, 3, 4], 4)[0], hash_tokens([5, 6, 7, 8], 4)[0]
    host.offload(0, 0, key=stored.key, digest=stored.digest, parent=b"", last_used=0)
    host.finish_offloads()
    assert cache.match([stored], 5).num_blocks == 1
    assert cache.match([other._replace(key=stored.key)], 5).num_blocks == 0


def test_offloaded_blocks_are_reported_as_stored_until_host_memory_drops_them() -> None:
    """The router sends requests to replicas that need not compute a prefix."""
    allocator, cache, host = make_caches(FULL, num_blocks=2, num_host_blocks=1)
    cache.start_recording()
    first, second = hash_tokens([1, 2, 3, 4], 4), hash_tokens([5, 6, 7, 8], 4)
    store(allocator, cache, first)
    store(allocator, cache, second)
    assert cache.take_changes() == ([first[0].key, second[0].key], [])
    held = allocator.allocate(1)  # evicts the first
    host.finish_offloads()
    assert cache.take_changes() == ([], [])
    assert sorted(cache.start_recording()) == sorted([first[0].key, second[0].key])
    held += allocator.allocate(1)
    host.finish_offloads()
    assert cache.take_changes() == ([], [first[0].key])
    assert cache.start_recording() == [second[0].key]
    cache.reset()
    assert cache.take_changes() == ([], [second[0].key])


def test_block_on_the_device_is_reported_when_host_memory_drops_it() -> None:
    allocator, cache, host = make_caches(FULL, num_blocks=2, num_host_blocks=1)
    hashes = hash_tokens([1, 2, 3, 4], 4)
    cache.start_recording()
    store(allocator, cache, hashes)
    offload(host, hashes, [0])
    offload(host, hash_tokens([5, 6, 7, 8], 4), [0])
    assert cache.take_changes()[1] == []
    assert hashes[0].key in cache.start_recording()


def fill(scheduler: Scheduler) -> None:
    """Process a sequence of 16 tokens, then one that evicts its blocks."""
    add(scheduler, 0, range(16), total=17)
    step(scheduler)
    scheduler.finish(0)
    add(scheduler, 1, range(100, 123), total=24)
    plan = step(scheduler)
    assert len(plan.offloads) == 4
    scheduler.finish(1)


def test_evicted_prefix_is_loaded_and_counted() -> None:
    scheduler = Scheduler(BASE)
    fill(scheduler)
    state = add(scheduler, 2, range(18), total=20)
    plan = step(scheduler)
    assert spans(plan) == [(2, 16, 2)]
    assert [copy.destination for copy in plan.loads] == plan.rows[0].block_tables[0][:4]
    assert state.num_cached_tokens == 16
    stats = scheduler.make_stats()
    assert (stats.num_offloaded_blocks, stats.num_loaded_blocks) == (4 + len(plan.offloads), 4)
    assert (stats.host_hit_tokens, stats.prefix_hit_tokens) == (16, 16)
    assert stats.num_used_host_blocks == stats.num_offloaded_blocks
    assert stats.num_host_blocks == 8
    # loaded blocks are in the prefix cache of the device again
    add(scheduler, 3, range(18), total=20)
    plan = step(scheduler)
    assert (spans(plan)[-1], plan.loads) == ((3, 16, 2), ())


def test_loaded_block_is_not_copied_to_host_memory_again() -> None:
    scheduler = Scheduler(replace(BASE, num_host_blocks=20))
    fill(scheduler)
    add(scheduler, 2, range(18), total=20)
    step(scheduler)
    scheduler.finish(2)
    num_offloaded = scheduler.make_stats().num_offloaded_blocks
    add(scheduler, 3, range(200, 223), total=24)
    plan = step(scheduler)
    assert scheduler.make_stats().num_offloaded_blocks == num_offloaded + len(plan.offloads)
    assert scheduler.cache.prefix_cache.match(scheduler._states[3].block_hashes, 24).num_blocks == 5
    add_again = hash_tokens(range(16), 4)
    assert len(scheduler.cache.prefix_cache.match(add_again, 18).host_hits) == 4


def test_failed_load_is_a_miss() -> None:
    scheduler = Scheduler(BASE)
    fill(scheduler)
    before = scheduler.make_stats()
    state = add(scheduler, 2, range(18), total=20)
    other = add(scheduler, 3, [50, 51], total=4)
    plan = scheduler.schedule()
    assert [row.seq_id for row in plan.rows] == [2, 3]
    plan = scheduler.fail_loads(plan, [plan.loads[1]])
    assert [row.seq_id for row in plan.rows] == [3]
    scheduler.check()
    scheduler.complete(plan)
    scheduler.check()
    scheduler.append_token(3, 7)
    assert (other.num_computed_tokens, state.num_computed_tokens, state.is_running) == (2, 0, False)
    stats = scheduler.make_stats()
    assert stats.prefix_hit_tokens == before.prefix_hit_tokens
    assert stats.num_loaded_blocks == stats.host_hit_tokens == 0
    scheduler.finish(3)
    plan = step(scheduler)  # the first block is still in host memory
    assert spans(plan) == [(2, 4, 14)]
    assert state.num_cached_tokens == 4
    stats = scheduler.make_stats()
    assert stats.prefix_query_tokens - before.prefix_query_tokens == 18 + 2
    assert (stats.num_loaded_blocks, stats.host_hit_tokens) == (1, 4)


def check_no_leak(end: Callable[[Scheduler], None]) -> None:
    """End a request between `schedule` and the end of the step that loads its prefix."""
    scheduler = Scheduler(BASE)
    fill(scheduler)
    add(scheduler, 2, range(18), total=20)
    assert scheduler.schedule().loads
    end(scheduler)
    scheduler.check()
    assert scheduler.make_stats().num_used_blocks == 0
    transfers = [block.num_transfers for block in scheduler.cache.host_cache._index.values()]
    assert transfers == [0] * len(transfers)
    add(scheduler, 4, range(18), total=20)
    assert spans(step(scheduler))[0][1] == 16


def test_abort_during_a_load_leaves_no_block() -> None:
    def abort(scheduler: Scheduler) -> None:
        plan = scheduler._plan
        scheduler.finish(2)
        assert plan is not None
        scheduler.complete(plan)

    check_no_leak(abort)


def test_discarded_load_is_planned_again() -> None:
    def discard(scheduler: Scheduler) -> None:
        plan = scheduler._plan
        assert plan is not None
        scheduler.discard(plan)
        assert scheduler.make_stats().num_waiting == 1
        scheduler.finish(2)

    check_no_leak(discard)


def test_windowed_groups_load_the_blocks_that_queries_attend_to() -> None:
    groups = (FULL, AttentionView(5))
    scheduler = Scheduler(replace(BASE, groups=groups, num_blocks=12, num_host_blocks=30))
    add(scheduler, 0, range(16), total=17)
    step(scheduler)
    scheduler.finish(0)
    add(scheduler, 1, range(100, 123), total=24)
    step(scheduler)
    scheduler.finish(1)
    add(scheduler, 2, range(18), total=20)
    plan = step(scheduler)
    assert spans(plan) == [(2, 16, 2)]
    full, windowed = plan.rows[0].block_tables
    destinations = {copy.destination for copy in plan.loads}
    assert set(full[:4]) | set(windowed[3:4]) >= destinations > set()
    assert windowed[:3] == [-1] * 3
    assert scheduler.make_stats().host_hit_tokens <= 16

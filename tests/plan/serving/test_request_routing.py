"""Request routing over replicas: scores, ties, load, removal and lost reports."""

import pytest

from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.prefix_cache import PrefixCache, compute_salt
from megalith.plan.serving.request_routing import RequestRouter, compute_block_keys
from tests.plan.serving.test_prefix_cache import hash_tokens, make_cache, store

PROMPT = [11, 12, 13, 14]


def make_router(num_replicas: int = 2, *, max_num_seqs: int = 8) -> RequestRouter:
    router = RequestRouter()
    for index in range(num_replicas):
        router.register(index, max_num_seqs=max_num_seqs)
    return router


@pytest.mark.parametrize(
    "stored, num_sequences, scores, chosen",
    [
        ([[], []], [0, 0], {0: 0.5, 1: 0.5}, 0),
        ([[11, 12], []], [0, 0], {0: 0.75, 1: 0.5}, 0),
        ([[], [11, 12, 13, 14]], [0, 0], {0: 0.5, 1: 1.0}, 1),
        ([[12, 13, 14], []], [1, 0], {0: 0.4375, 1: 0.5}, 1),  # no block from the start
        ([[11, 13, 14], [11]], [0, 0], {0: 0.625, 1: 0.625}, 0),  # up to the first gap
        ([[11, 12], []], [4, 0], {0: 0.5, 1: 0.5}, 0),
        ([[11, 12], []], [5, 0], {0: 0.4375, 1: 0.5}, 1),
        ([[11], []], [20, 9], {0: 0.125, 1: 0.0}, 0),  # more sequences than rows
    ],
)
def test_score_is_the_cached_share_and_the_free_share(
    stored: list[list[int]], num_sequences: list[int], scores: dict[int, float], chosen: int
) -> None:
    router = make_router()
    for index in range(2):
        assert not router.update_blocks(index, 0, stored[index], [])
        router.assign(index, index, num_sequences=num_sequences[index], num_tokens=0)
    assert router.compute_scores(PROMPT) == scores
    assert router.choose_replica(PROMPT) == chosen


def test_alpha_weighs_the_cached_share() -> None:
    router = RequestRouter(alpha=0.25)
    router.register(0, max_num_seqs=4)
    router.update_blocks(0, 0, [11, 12], [])
    assert router.compute_scores(PROMPT) == {0: 0.25 * 0.5 + 0.75}


def test_ties_go_to_the_least_recently_chosen_replica_then_to_the_first() -> None:
    router = make_router(3)
    assert [router.choose_replica([]) for _ in range(5)] == [0, 1, 2, 0, 1]
    router.update_blocks(1, 0, PROMPT, [])
    assert [router.choose_replica(PROMPT) for _ in range(2)] == [1, 1]
    assert [router.choose_replica([]) for _ in range(3)] == [2, 0, 1]


def test_full_replicas_of_equal_scores_are_ranked_by_load() -> None:
    router = make_router(3, max_num_seqs=2)
    for index, num_tokens in enumerate((30, 10, 20)):
        router.assign(index, index, num_sequences=2, num_tokens=num_tokens)
    assert [router.choose_replica([]) for _ in range(2)] == [1, 1]
    router.update_blocks(0, 0, PROMPT[:1], [])
    assert router.choose_replica(PROMPT) == 0  # by score
    router.finish_prefill(0)
    assert router.choose_replica([]) == 0


def test_load_is_waiting_tokens_and_active_blocks() -> None:
    router = make_router()
    router.assign(7, 0, num_sequences=3, num_tokens=100)
    router.assign(8, 0, num_sequences=1, num_tokens=20)
    state = router.replicas[0]
    state.num_active_blocks = 5
    assert (state.load, state.num_sequences, state.free_share) == (125, 4, 0.5)
    router.finish_prefill(7)
    router.finish_prefill(7)  # counted once
    assert state.load == 25
    router.finish(8)
    assert (state.load, state.num_sequences) == (5, 3)
    for request in (7, 8, 99):
        router.finish(request)
    assert (state.load, state.num_sequences) == (5, 0)
    assert router.find_replica(7) is None


def test_hot_replica_gets_no_request_because_of_its_cache() -> None:
    router = make_router(max_num_seqs=256)
    router.update_blocks(0, 0, PROMPT, [])
    for index, num_blocks in ((0, 151), (1, 100)):
        router.replicas[index].num_active_blocks = num_blocks
    router.assign(1, 0, num_sequences=65, num_tokens=0)
    assert router.choose_replica(PROMPT) == 1
    router.replicas[0].num_active_blocks = 150  # not more than 1.5 times the lowest
    assert router.choose_replica(PROMPT) == 0
    router.replicas[0].num_active_blocks = 151
    router.assign(2, 1, num_sequences=1, num_tokens=0)  # not more than 64 requests above it
    assert router.choose_replica(PROMPT) == 0


def test_removed_replica_loses_its_requests_and_its_blocks() -> None:
    router = make_router()
    router.update_blocks(0, 0, PROMPT, [])
    router.assign(1, 0, num_sequences=1, num_tokens=4)
    router.assign(2, 1, num_sequences=1, num_tokens=4)
    assert router.remove(0) == [1] and router.remove(0) == []
    assert router.find_replica(1) is None and router.find_replica(2) == 1
    assert router.choose_replica(PROMPT) == 1
    router.finish(1)  # a request without a replica
    router.register(0, max_num_seqs=8)  # it was restarted
    assert router.replicas[0].cached_share(PROMPT) == 0 and router.replicas[0].load == 0
    assert not router.update_blocks(0, 0, [11], [])
    assert router.choose_replica(PROMPT) == 0
    router.remove(0)
    router.remove(1)
    assert router.choose_replica(PROMPT) is None


def test_drained_replica_gets_no_requests() -> None:
    router = make_router()
    router.update_blocks(0, 0, PROMPT, [])
    router.drain(0)
    assert [router.choose_replica(PROMPT) for _ in range(2)] == [1, 1]
    router.drain(0, is_draining=False)
    assert router.choose_replica(PROMPT) == 0
    router.drain(0)
    router.drain(1)
    assert router.choose_replica(PROMPT) is None


def test_lost_report_requests_a_complete_list_once() -> None:
    router = make_router()
    assert not router.update_blocks(0, 0, [11, 12], [])
    assert not router.update_blocks(0, 1, [13], [12])
    assert router.replicas[0].block_keys == {11, 13}
    assert router.update_blocks(0, 3, [14], [])
    assert router.replicas[0].block_keys == set()  # unknown until then
    assert not router.update_blocks(0, 4, [15], [])
    router.resynchronize(0, 5, [11, 14, 15])
    assert not router.update_blocks(0, 5, [12], [15])
    assert router.replicas[0].block_keys == {11, 12, 14}


def test_keys_of_a_prompt_are_those_that_the_prefix_cache_reports() -> None:
    allocator, cache = make_cache(AttentionView(), num_blocks=3)
    tokens = list(range(13))
    salt = compute_salt(cache_salt="tenant", adapter_fingerprint=b"f" * 32)
    keys = compute_block_keys(tokens, 4, salt)
    assert keys == [block.key for block in hash_tokens(tokens, 4, salt)]
    assert compute_block_keys(tokens[:12], 4, salt) == keys[:2]  # the last token is computed
    assert compute_block_keys(tokens, 4, b"") != keys
    assert cache.start_recording() == []
    store(allocator, cache, hash_tokens(tokens, 4, salt))
    assert cache.take_changes() == (keys, [])
    assert cache.take_changes() == ([], [])
    allocator.allocate(1)  # evicts the last block
    assert cache.take_changes() == ([], keys[2:])
    assert cache.start_recording() == keys[:2]
    cache.reset()
    assert cache.take_changes() == ([], keys[:2])


def test_first_group_with_full_attention_is_reported() -> None:
    windowed, full = AttentionView(window=4), AttentionView()
    allocator = BlockAllocator(8)
    cache = PrefixCache(allocator, block_size=4, groups=[windowed, full])
    cache.start_recording()
    (first, second) = hash_tokens(range(8), 4)
    blocks = allocator.allocate(2)
    cache.register(0, blocks[0], first, parent=-1)
    cache.register(1, blocks[1], second, parent=-1)
    assert cache.take_changes() == ([second.key], [])


def test_salts_of_adapters_and_tenants_differ() -> None:
    salts = {
        compute_salt(base, cache_salt=tenant, adapter_fingerprint=adapter)
        for base in (b"", b"weights=1")
        for tenant in (None, "", "a")
        for adapter in (None, b"f" * 32)
    }
    assert len(salts) == 12 and compute_salt() == b""

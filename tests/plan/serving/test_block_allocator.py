"""Block allocator: states of a block, reference counts, errors."""

import random

import pytest

from megalith.plan.serving.block_allocator import BlockAllocator
from tests.cases import loop_over


class FirstCached:
    """Evictor that evicts cached blocks in the order of their release."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    def on_cached(self, block: int) -> None:
        self.blocks.append(block)

    def evict(self) -> int:
        return self.blocks.pop(0)


def test_released_block_is_allocated_again() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    assert sorted(blocks) == [0, 1, 2]
    assert (allocator.num_available, allocator.num_used) == (0, 3)
    allocator.release(blocks[1])
    assert allocator.allocate(1) == [blocks[1]]
    allocator.check(blocks)


def test_shared_block_is_free_after_its_last_release() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate(1)[0]
    allocator.share(block)
    allocator.check([block, block])
    allocator.release(block)
    assert allocator.num_available == 1
    allocator.release(block)
    assert allocator.num_available == 2
    allocator.check([])


def test_release_below_zero_is_an_error() -> None:
    allocator = BlockAllocator(2)
    block = allocator.allocate(1)[0]
    allocator.release(block)
    with pytest.raises(RuntimeError, match=f"block {block} has no references"):
        allocator.release(block)
    allocator.check([])


def test_allocation_of_more_blocks_than_available_allocates_none() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(2)
    with pytest.raises(RuntimeError, match="3 KV cache blocks were requested, but only 2 of 4"):
        allocator.allocate(3)
    assert allocator.num_available == 2


def test_free_block_cannot_be_shared_or_registered() -> None:
    allocator = BlockAllocator(1)
    with pytest.raises(RuntimeError, match="block 0 is free"):
        allocator.share(0)
    with pytest.raises(RuntimeError, match="block 0 is not used"):
        allocator.register(0)


def test_registered_block_is_cached_and_evicted_only_when_no_block_is_free() -> None:
    allocator = BlockAllocator(3)
    allocator.evictor = FirstCached()
    first, second = allocator.allocate(2)
    allocator.register(first)
    allocator.release(first)
    assert (allocator.num_cached, allocator.num_available, allocator.num_used) == (1, 2, 1)
    third = allocator.allocate(1)[0]
    assert third != first
    assert allocator.allocate(1) == [first]
    assert not allocator.is_registered(first)
    allocator.check([first, second, third])


def test_cached_block_that_is_unregistered_becomes_free() -> None:
    allocator = BlockAllocator(1)
    allocator.allocate(1)
    allocator.register(0)
    allocator.release(0)
    allocator.unregister(0)
    assert (allocator.num_cached, allocator.num_available) == (0, 1)
    allocator.check([])


@pytest.mark.parametrize(
    ("field", "value"), [("_free", [2, 0]), ("_ref_counts", [1, 2, 0]), ("_num_cached", 1)]
)
def test_check_detects_a_damaged_pool(field: str, value: object) -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.check(blocks)
    setattr(allocator, field, value)
    with pytest.raises(AssertionError):
        allocator.check(blocks)


@loop_over("seed", range(5))
def test_random_operations_keep_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    allocator = BlockAllocator(7)
    evictor = FirstCached()
    allocator.evictor = evictor
    references: list[int] = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.4 and allocator.num_available:
            references += allocator.allocate(rng.randrange(1, allocator.num_available + 1))
        elif choice < 0.5 and references:
            references.append(rng.choice(references))
            allocator.share(references[-1])
        elif choice < 0.6 and references:
            allocator.register(rng.choice(references))
        elif choice < 0.65 and evictor.blocks:
            references.append(evictor.blocks.pop())
            allocator.share(references[-1])
        elif references:
            allocator.release(references.pop(rng.randrange(len(references))))
        allocator.check(references)

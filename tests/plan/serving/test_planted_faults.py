"""Planted faults of block management and prefix caching: each is detected by the random workload.

The invariants of the scheduler are not checked here, so that the simulated block pool, which sees
only plans, must detect each fault.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megalith.plan.serving import kv_cache_manager, prefix_cache
from megalith.plan.serving.block_allocator import BlockAllocator, BlockCopy
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.host_cache import HostBlock, HostCache
from megalith.plan.serving.kv_cache_manager import KVCacheManager
from megalith.plan.serving.prefix_cache import BlockHash, PrefixCache
from megalith.plan.serving.scheduler import Scheduler, SequenceState, StepPlan
from tests.plan.serving.executor import Workload, WrongPlanError, make_config

DETECTED = (WrongPlanError, RuntimeError)
"""Errors by which a fault is detected: a wrong plan, or a block that is released twice."""


def run_workload(
    name: str = "full",
    *,
    block_size: int = 3,
    scheduler: type[Scheduler] = Scheduler,
    num_tokens: int = 90,
    num_operations: int = 150,
) -> None:
    """Run the random workload with several seeds."""
    for seed in range(6):
        config = make_config(name, block_size=block_size, num_tokens=num_tokens)
        workload = Workload(config, seed, scheduler=scheduler)
        workload.checks_blocks = False
        workload.run(num_operations)


def test_workload_of_the_planted_faults_passes_without_a_fault() -> None:
    for name, block_size in (("full", 3), ("full", 1), ("window", 1)):
        run_workload(name, block_size=block_size, num_operations=60)


def test_fault_1_block_freed_while_a_row_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockAllocator.release

    def release_at_once(self: BlockAllocator, block: int) -> None:
        release(self, block)
        if self._ref_counts[block] and not self._registered[block]:
            self._free.append(block)

    monkeypatch.setattr(BlockAllocator, "release", release_at_once)
    with pytest.raises(DETECTED):
        run_workload()


def test_fault_2_reference_count_one_too_low_after_a_prefix_hit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin = PrefixCache.pin

    def pin_without_count(self: PrefixCache, hit: prefix_cache.PrefixHit) -> None:
        pin(self, hit)
        for table in hit.block_tables:
            for block in table:
                if block >= 0:
                    self._allocator.release(block)

    monkeypatch.setattr(PrefixCache, "pin", pin_without_count)
    with pytest.raises(DETECTED):
        run_workload()


class RegistersBeforeForward(Scheduler):
    """Registers full blocks when they are planned."""

    def schedule(self, **options: Any) -> StepPlan:
        plan = super().schedule(**options)
        for state, row in zip(self._planned, plan.rows, strict=True):
            state.num_computed_tokens = row.start + row.count - len(row.draft_ids)
            if state.registers_blocks:
                self.cache._register_blocks(state)
            state.num_computed_tokens = row.start
        return plan


def test_fault_3_block_registered_before_its_forward() -> None:
    with pytest.raises(DETECTED):
        run_workload(scheduler=RegistersBeforeForward)


def test_fault_4_hash_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    hash_block = prefix_cache.hash_block
    monkeypatch.setattr(
        prefix_cache, "hash_block", lambda parent, tokens: hash_block(bytes(32), tokens)
    )
    with pytest.raises(DETECTED):
        run_workload()


def plant_root(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes, bool], object]) -> None:
    """Compute the root of the hash chain from the (salt, long_rope) that `change` returns."""
    compute_root_digest = prefix_cache.compute_root_digest

    def compute(salt: bytes, *, long_rope: bool = False) -> bytes:
        changed_salt, changed_rope = change(salt, long_rope)  # type: ignore[misc]  # a pair
        return compute_root_digest(changed_salt, long_rope=changed_rope)

    monkeypatch.setattr(kv_cache_manager, "compute_root_digest", compute)


def test_fault_5_hash_without_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_root(monkeypatch, lambda salt, long: (salt.replace(b"adapter=a", b""), long))
    with pytest.raises(DETECTED):
        run_workload()


def test_fault_5_hash_without_weight_version(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_root(monkeypatch, lambda salt, long: (salt.replace(b"weights=1", b""), long))
    with pytest.raises(DETECTED):
        run_workload()


def test_fault_5_hash_without_rope_regime(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_root(monkeypatch, lambda salt, long: (salt, False))
    with pytest.raises(DETECTED):
        run_workload()


def test_fault_6_hit_not_verified_on_a_forced_collision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "block_key", lambda digest: digest[0] % 8)
    run_workload(num_operations=60)  # collisions alone are harmless

    def has_content(self: PrefixCache, block: int, block_hash: BlockHash) -> bool:
        return True

    monkeypatch.setattr(PrefixCache, "_has_content", has_content)
    with pytest.raises(DETECTED):
        run_workload()


def test_fault_7_parent_evicted_before_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache stays correct but keeps blocks that cannot be hit: only the invariants show it."""

    def is_evictable(self: PrefixCache, block: int, entry: prefix_cache.RegisteredBlock) -> bool:
        return self._allocator.ref_count(block) == 0

    monkeypatch.setattr(PrefixCache, "_is_evictable", is_evictable)
    workload = Workload(make_config("full", block_size=1), 0)
    with pytest.raises(AssertionError, match="parent|children"):
        workload.run(300)


class ShortLastChunk(Scheduler):
    """Processes one token too few in the last chunk of a prefill."""

    def _add_row(self, state: SequenceState, count: int) -> None:
        super()._add_row(state, count)
        state_rows = self._prefills
        if state_rows and state_rows[-1][0] is state and state_rows[-1][1].samples:
            row = state_rows[-1][1]
            changed = type(row)(row.seq_id, row.start, count - 1, True, row.block_tables)
            state_rows[-1] = (state, changed)


def test_fault_8_boundary_of_the_last_chunk_off_by_one() -> None:
    with pytest.raises(WrongPlanError, match="samples is wrong"):
        run_workload(scheduler=ShortLastChunk)


def test_fault_11_sliding_window_block_freed_one_token_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_needed = AttentionView.first_needed
    monkeypatch.setattr(
        AttentionView,
        "first_needed",
        lambda view, position: first_needed(view, position) + (view.window is not None),
    )
    for block_size in (1, 3):
        with pytest.raises(WrongPlanError, match="attends to freed token"):
            run_workload("window", block_size=block_size)


def test_fault_12_copy_on_write_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy_nothing(self: KVCacheManager, state: SequenceState) -> None:
        state.shares_last_block = False

    monkeypatch.setattr(KVCacheManager, "_copy_shared_blocks", copy_nothing)
    with pytest.raises(WrongPlanError, match="wrong value"):
        run_workload()


class KeepsRejectedDrafts(Scheduler):
    """Advances a sequence over all of its drafts, and never back."""

    def complete(self, plan: StepPlan) -> None:
        planned = list(self._planned)
        super().complete(plan)
        for state, row in zip(planned, plan.rows, strict=True):
            if row.draft_ids and state.is_running:
                state.num_computed_tokens = row.start + row.count

    def append_token(self, seq_id: int, token: int, *, is_cached: bool = False) -> None:
        super().append_token(seq_id, token)


def test_fault_16_cached_length_not_rolled_back_after_rejected_drafts() -> None:
    with pytest.raises(WrongPlanError, match="rejected drafts|does not advance"):
        run_workload(scheduler=KeepsRejectedDrafts)


class KeepsBlocksOfRejectedDrafts(Scheduler):
    """Releases no blocks when drafts are rejected."""

    def append_token(self, seq_id: int, token: int, *, is_cached: bool = False) -> None:
        trim = self.cache.trim
        self.cache.trim = lambda state, num_tokens: None  # type: ignore[method-assign]  # planted
        super().append_token(seq_id, token, is_cached=is_cached)
        self.cache.trim = trim  # type: ignore[method-assign]  # restored


def test_fault_16_blocks_of_rejected_drafts_not_freed() -> None:
    with pytest.raises(WrongPlanError, match="keeps blocks of rejected drafts"):
        run_workload(scheduler=KeepsBlocksOfRejectedDrafts)


class FreesForRejectedDrafts(Scheduler):
    """Frees the blocks that no query after all drafts attends to before the drafts are verified."""

    def complete(self, plan: StepPlan) -> None:
        planned = list(self._planned)
        super().complete(plan)
        for state, row in zip(planned, plan.rows, strict=True):
            if row.draft_ids and state.is_running:
                state.registers_blocks = False
                self.cache.advance(state, row.start + row.count)
                state.num_computed_tokens = row.start + 1


def test_sliding_window_blocks_freed_before_drafts_are_verified() -> None:
    with pytest.raises(WrongPlanError, match="attends to freed token"):
        run_workload("window", block_size=1, scheduler=FreesForRejectedDrafts)


class AbortKeepsBlocks(Scheduler):
    """Removes an aborted sequence from the queues only."""

    def finish(self, seq_id: int) -> None:
        state = self._states.pop(seq_id)
        (self._running if state.is_running else self._waiting).remove(state)
        state.is_running = False


def test_fault_26_blocks_of_an_aborted_row_not_freed() -> None:
    with pytest.raises(WrongPlanError, match="blocks are never freed"):
        run_workload(scheduler=AbortKeepsBlocks, num_tokens=2000)


def run_offloading_workload(
    scheduler: type[Scheduler] = Scheduler, *, num_host_blocks: int = 12
) -> None:
    """Run the random workload with pools so small that many blocks are offloaded and loaded."""
    for seed in range(6):
        config = make_config(
            "full", block_size=3, num_tokens=62, num_host_blocks=num_host_blocks, max_num_seqs=4
        )
        workload = Workload(config, seed, scheduler=scheduler)
        workload.checks_blocks = False
        workload.run(150)


def test_workload_with_kv_offloading_passes_without_a_fault() -> None:
    run_offloading_workload()


class OffloadsAfterTheStep(Scheduler):
    """Executes offloads with the next step, when their blocks may be overwritten."""

    delayed: tuple[BlockCopy, ...] = ()

    def schedule(self, **options: Any) -> StepPlan:
        plan = super().schedule(**options)
        self._plan = replace(plan, offloads=self.delayed)
        self.delayed = plan.offloads
        return self._plan


def test_block_offloaded_after_it_is_overwritten() -> None:
    with pytest.raises(DETECTED):
        run_offloading_workload(OffloadsAfterTheStep)


class LoadsAfterTheStep(OffloadsAfterTheStep):
    """Executes loads with the next step."""

    def schedule(self, **options: Any) -> StepPlan:
        plan = Scheduler.schedule(self, **options)
        self._plan = replace(plan, loads=self.delayed)
        self.delayed = plan.loads
        return self._plan


def test_load_not_awaited() -> None:
    with pytest.raises(DETECTED):
        run_offloading_workload(LoadsAfterTheStep)


def test_load_of_the_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    find = HostCache.find

    def find_another(self: HostCache, group: int, digest: bytes) -> HostBlock | None:
        block = find(self, group, digest)
        return None if block is None else replace(block, number=(block.number + 1) % 12)

    monkeypatch.setattr(HostCache, "find", find_another)
    with pytest.raises(DETECTED):
        run_offloading_workload()


def test_block_in_transfer_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    pin, unpin = HostCache.pin, HostCache.unpin

    def pin_nothing(self: HostCache, block: HostBlock, *, time: int) -> None:
        pin(self, block, time=time)
        unpin(self, block)

    def unpin_nothing(self: HostCache, block: HostBlock) -> None:
        block.num_transfers = max(block.num_transfers - 1, 0)
        self._push_if_evictable(block)

    monkeypatch.setattr(HostCache, "pin", pin_nothing)
    monkeypatch.setattr(HostCache, "unpin", unpin_nothing)
    with pytest.raises(WrongPlanError, match="loaded and overwritten"):
        run_offloading_workload(num_host_blocks=6)


def test_host_memory_kept_after_a_weight_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "reset", lambda self: None)
    with pytest.raises(WrongPlanError, match="wrong value"):
        run_offloading_workload()


def test_loads_of_a_preempted_sequence_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their blocks may have other content by then: two writes of one block in any order."""
    monkeypatch.setattr(KVCacheManager, "_cancel_loads", lambda self, state: None)
    with pytest.raises(WrongPlanError, match="two transfers have one destination"):
        run_offloading_workload()

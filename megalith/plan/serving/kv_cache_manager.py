"""KV cache manager: the blocks of each sequence, from prefix hit to release."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megalith.plan.serving.block_allocator import BlockAllocator, BlockCopy
from megalith.plan.serving.cache_layout import (
    UNLIMITED,
    AttentionView,
    count_required_blocks,
    find_longest_sequence,
)
from megalith.plan.serving.host_cache import HostBlock, HostCache
from megalith.plan.serving.prefix_cache import (
    NO_BLOCK,
    HostHit,
    PrefixCache,
    PrefixHit,
    compute_root_digest,
    extend_block_hashes,
)
from megalith.plan.serving.sequence_state import SequenceState


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A planned copy; the source stays referenced until the forward pass succeeded."""

    state: SequenceState
    table: list[int]
    index: int
    copy: BlockCopy


@dataclass(frozen=True, slots=True)
class PendingLoad:
    """A planned copy of a block from host memory, into the table of a sequence."""

    state: SequenceState
    index: int
    source: HostBlock
    copy: BlockCopy


class KVCacheManager:
    """Blocks of all sequences: allocation, prefix hits, copy-on-write, registration and release.

    `groups`: attention view of each KV cache group. All block tables of a sequence have the same
    length. Without groups (a model without attention) no blocks are needed.
    `num_host_blocks`: blocks in host memory for those that the prefix cache evicts.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[AttentionView],
        prefix_caching: bool,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.allocator = BlockAllocator(num_blocks)
        self.host_cache = HostCache(num_host_blocks)
        self.prefix_cache = PrefixCache(
            self.allocator, block_size=block_size, groups=groups, host=self.host_cache
        )
        self.num_loaded_blocks = 0
        """Completed copies from host memory."""

        self.num_host_hit_tokens = 0
        """Tokens of prefix hits whose blocks were loaded, all or some of them."""

        self._groups = tuple(groups)
        self._prefix_caching = prefix_caching and bool(groups)
        self._windowed = [
            (view, [group for group, other in enumerate(groups) if other == view])
            for view in dict.fromkeys(groups)
            if view.window is not None
        ]
        self._pending: list[PendingCopy] = []
        self._loads: list[PendingLoad] = []

    @property
    def pending_copies(self) -> tuple[BlockCopy, ...]:
        """Copies of the step that is planned. No destination is a source or occurs twice, so they
        may be executed in any order."""
        return tuple(pending.copy for pending in self._pending)

    @property
    def pending_loads(self) -> tuple[BlockCopy, ...]:
        """Copies from host memory of the step that is planned; sources are blocks of the host."""
        return tuple(load.copy for load in self._loads)

    def count_required_blocks(self, num_tokens: int, chunk: int) -> int:
        """Return the largest number of blocks that a sequence of `num_tokens` tokens holds at a
        time, if it is processed in chunks of at most `chunk` tokens."""
        return count_required_blocks(self._groups, self.block_size, num_tokens, chunk=chunk)

    def find_longest_sequence(self) -> int:
        """Return how many tokens of one sequence fit into an empty pool."""
        return find_longest_sequence(
            self._groups, self.block_size, num_blocks=self.allocator.num_blocks, chunk=1
        )

    def initialize(self, state: SequenceState) -> None:
        """Set the fields of a sequence that holds no blocks."""
        state.block_tables = [[] for _ in self._groups]
        state.num_computed_tokens = 0
        state.capacity = 0 if self._groups else UNLIMITED
        state.shares_last_block = False
        state.num_registered_blocks = 0
        state.registers_blocks = self._prefix_caching and not state.one_token_after_prompt
        state.num_freed_blocks = [0] * len(self._windowed)

    def count_held_blocks(self, state: SequenceState) -> int:
        """Return the number of blocks that a sequence references, shared ones included."""
        if not self._groups:
            return 0
        num_held = len(self._groups) * len(state.block_tables[0])
        for (_, groups), num_freed in zip(self._windowed, state.num_freed_blocks, strict=True):
            num_held -= num_freed * len(groups)
        return num_held

    def reads_prefix_cache(self, state: SequenceState) -> bool:
        """Return whether a sequence without blocks looks up its prefix."""
        return state.registers_blocks and state.reads_prefix_cache

    def find_hit(self, state: SequenceState) -> PrefixHit:
        """Return the cached prefix of a sequence that holds no blocks, without pinning it."""
        if not self.reads_prefix_cache(state):
            return PrefixHit(0, [[] for _ in self._groups])
        self._extend_hashes(state)
        return self.prefix_cache.match(state.block_hashes, len(state.token_ids))

    def count_evictable(self, hit: PrefixHit) -> int:
        """Return how many blocks of a hit are cached: pinning them makes them unavailable."""
        return sum(
            block != NO_BLOCK and self.allocator.ref_count(block) == 0
            for table in hit.block_tables
            for block in table
        )

    def fits(self, hit: PrefixHit) -> bool:
        """Return whether the available blocks suffice to use a hit."""
        return len(hit.host_hits) + self.count_evictable(hit) <= self.allocator.num_available

    def use_hit(self, state: SequenceState, hit: PrefixHit) -> None:
        """Pin a hit and continue the sequence after it. Blocks in host memory are loaded into new
        ones."""
        num_tokens = hit.num_blocks * self.block_size
        self.prefix_cache.pin(hit)
        if not hit.num_blocks:
            return
        state.block_tables = hit.block_tables
        state.num_computed_tokens = state.capacity = num_tokens
        state.num_registered_blocks = hit.num_blocks
        if hit.host_hits:
            self._plan_loads(state, hit.host_hits)
        state.num_freed_blocks = [
            view.first_needed(num_tokens) // self.block_size for view, _ in self._windowed
        ]

    def count_fitting_tokens(self, state: SequenceState) -> int:
        """Return how many more tokens of a sequence the available blocks can store."""
        spare = self.allocator.num_available
        if not self._groups:
            return UNLIMITED
        if state.shares_last_block:
            spare -= len(self._find_shared_groups(state))
            if spare < 0:
                return 0
        num_new_blocks = spare // len(self._groups)
        return state.capacity + num_new_blocks * self.block_size - state.num_computed_tokens

    def allocate(self, state: SequenceState, end: int) -> None:
        """Allocate blocks for the tokens before `end` and plan the copy of a shared last block."""
        if state.shares_last_block:
            self._copy_shared_blocks(state)
        num_groups = len(self._groups)
        num_new_blocks = -(-(end - state.capacity) // self.block_size)
        if num_new_blocks <= 0 or not num_groups:
            return
        blocks = self.allocator.allocate(num_new_blocks * num_groups)
        for group, table in enumerate(state.block_tables):
            table.extend(blocks[group::num_groups])
        state.capacity += num_new_blocks * self.block_size

    def trim(self, state: SequenceState, num_tokens: int) -> None:
        """Release the blocks after those of the first `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self._groups or state.capacity <= num_blocks * self.block_size:
            return
        for table in state.block_tables:
            for block in reversed(table[num_blocks:]):
                self.allocator.release(block)
            del table[num_blocks:]
        state.capacity = num_blocks * self.block_size

    def share(self, parent: SequenceState, child: SequenceState) -> None:
        """Let a new sequence reference the blocks of all computed tokens of `parent`."""
        num_tokens = parent.num_computed_tokens
        num_blocks = -(-num_tokens // self.block_size)
        child.block_tables = [table[:num_blocks] for table in parent.block_tables]
        for table in child.block_tables:
            for block in table:
                if block != NO_BLOCK:
                    self.allocator.share(block)
        if self._groups:
            child.capacity = num_blocks * self.block_size
            has_partial_block = num_tokens % self.block_size != 0
            child.shares_last_block = has_partial_block
            parent.shares_last_block = parent.shares_last_block or has_partial_block
        child.num_computed_tokens = num_tokens
        child.block_hashes = parent.block_hashes[: num_tokens // self.block_size]
        child.registers_blocks = child.registers_blocks and parent.registers_blocks
        child.num_registered_blocks = parent.num_registered_blocks
        child.num_freed_blocks = list(parent.num_freed_blocks)

    def release(self, state: SequenceState) -> None:
        """Release all blocks of a sequence; registered ones stay cached.

        The old tables are replaced, not changed, because a plan may refer to them.
        """
        if self._loads:
            self._cancel_loads(state)
        for table in state.block_tables:
            for block in reversed(table):
                if block != NO_BLOCK:
                    self.allocator.release(block)
        self.initialize(state)

    def advance(self, state: SequenceState, end: int) -> None:
        """Record that the tokens before `end` are in the cache: register full blocks, free blocks
        that no later query attends to."""
        state.num_computed_tokens = end
        if state.registers_blocks and end >= (state.num_registered_blocks + 1) * self.block_size:
            self._register_blocks(state)
        for number, (view, groups) in enumerate(self._windowed):
            first = view.first_needed(end) // self.block_size
            if first > state.num_freed_blocks[number]:
                self._free_blocks(state, groups, range(state.num_freed_blocks[number], first))
                state.num_freed_blocks[number] = first

    def finish_copies(self) -> None:
        """Release the sources of the planned copies, after the forward pass succeeded."""
        for pending in self._pending:
            self.allocator.release(pending.copy.source)
        self._pending.clear()

    def undo_copies(self) -> None:
        """Restore the shared blocks of sequences that still exist, after the forward pass failed:
        the copies may not have been executed."""
        for pending in self._pending:
            state, copy = pending.state, pending.copy
            if not any(table is pending.table for table in state.block_tables):
                self.allocator.release(copy.source)
                continue
            pending.table[pending.index] = copy.source
            self.allocator.release(copy.destination)
            state.shares_last_block = True
        self._pending.clear()

    def finish_transfers(self) -> None:
        """Make loaded and offloaded blocks available, after the copies were executed."""
        self.host_cache.finish_offloads()
        for load in self._loads:
            self.host_cache.unpin(load.source)
        self.num_loaded_blocks += len(self._loads)
        loaded = {(load.state.seq_id, load.index) for load in self._loads}
        self.num_host_hit_tokens += len(loaded) * self.block_size
        self._loads.clear()

    def fail_loads(self, failed: Collection[BlockCopy]) -> list[SequenceState]:
        """Drop the blocks of the host that could not be loaded; return the sequences that need
        them."""
        loads = [load for load in self._loads if load.copy in failed]
        for load in loads:
            self.host_cache.drop(load.source)
        return list(dict.fromkeys(load.state for load in loads))

    def undo_transfers(self) -> list[SequenceState]:
        """Drop the blocks that are offloaded, because the copies may not have been executed; return
        the sequences with planned loads."""
        self.host_cache.undo_offloads()
        return list(dict.fromkeys(load.state for load in self._loads))

    def reset_prefix_cache(self, running: Iterable[SequenceState]) -> None:
        """Empty the prefix cache; blocks that running sequences hold never enter it."""
        self.prefix_cache.reset()
        for state in running:
            state.registers_blocks = False

    def check(self, states: Iterable[SequenceState]) -> None:
        """Verify all invariants; `states` are all sequences that hold blocks.

        Raises:
            AssertionError: an invariant is violated; the message names the block.
        """
        references = [pending.copy.source for pending in self._pending]
        for state in states:
            num_blocks = sum(block != NO_BLOCK for table in state.block_tables for block in table)
            assert num_blocks == self.count_held_blocks(state), (
                f"request {state.seq_id} holds {num_blocks} blocks"
            )
            references += [
                block for table in state.block_tables for block in table if block != NO_BLOCK
            ]
        self.allocator.check(references)
        self.prefix_cache.check()
        self.host_cache.check()

    def _plan_loads(self, state: SequenceState, host_hits: Sequence[HostHit]) -> None:
        """Allocate the blocks of a hit that are in host memory. They enter the prefix cache again
        with the next blocks of the sequence."""
        for hit in host_hits:  # first, because allocations may drop others
            self.host_cache.pin(hit.block, time=self.prefix_cache.time)
        destinations = self.allocator.allocate(len(host_hits))
        for hit, destination in zip(host_hits, destinations, strict=True):
            state.block_tables[hit.group][hit.number] = destination
            copy = BlockCopy(hit.block.number, destination)
            self._loads.append(PendingLoad(state, hit.number, hit.block, copy))
        state.num_registered_blocks = min(hit.number for hit in host_hits)

    def _cancel_loads(self, state: SequenceState) -> None:
        """Forget the planned loads of a sequence whose blocks are released."""
        for load in self._loads:
            if load.state is state:
                self.host_cache.unpin(load.source)
        self._loads = [load for load in self._loads if load.state is not state]

    def _extend_hashes(self, state: SequenceState) -> None:
        root = compute_root_digest(state.salt, long_rope=state.uses_long_rope)
        extend_block_hashes(state.block_hashes, state.token_ids, self.block_size, root)

    def _find_shared_groups(self, state: SequenceState) -> list[int]:
        """Return the groups whose block of the next token has other references.

        A pending copy does not count: its source may be written after the copy.
        """
        index = state.num_computed_tokens // self.block_size
        groups = []
        for group, table in enumerate(state.block_tables):
            num_pending = sum(pending.copy.source == table[index] for pending in self._pending)
            if self.allocator.ref_count(table[index]) - num_pending > 1:
                groups.append(group)
        return groups

    def _copy_shared_blocks(self, state: SequenceState) -> None:
        index = state.num_computed_tokens // self.block_size
        for group in self._find_shared_groups(state):
            table = state.block_tables[group]
            copy = BlockCopy(table[index], self.allocator.allocate(1)[0])
            table[index] = copy.destination
            self._pending.append(PendingCopy(state, table, index, copy))
        state.shares_last_block = False

    def _register_blocks(self, state: SequenceState) -> None:
        self._extend_hashes(state)
        num_full_blocks = state.num_computed_tokens // self.block_size
        for index in range(state.num_registered_blocks, num_full_blocks):
            for group, table in enumerate(state.block_tables):
                if table[index] != NO_BLOCK and not self._register_block(state, group, index):
                    state.registers_blocks = False
                    return
            state.num_registered_blocks = index + 1

    def _register_block(self, state: SequenceState, group: int, index: int) -> bool:
        """Register a block, or replace it by the registered one with the same content; return
        whether the prefix cache contains it."""
        table = state.block_tables[group]
        block, parent = table[index], table[index - 1] if index else NO_BLOCK
        registered = self.prefix_cache.register(
            group, block, state.block_hashes[index], parent=parent
        )
        if registered == NO_BLOCK:
            return False
        if registered != block:
            self.allocator.share(registered)
            self.allocator.release(block)
            table[index] = registered
        return True

    def _free_blocks(self, state: SequenceState, groups: list[int], indices: range) -> None:
        for group in groups:
            table = state.block_tables[group]
            for index in indices:
                self.allocator.release(table[index])
                table[index] = NO_BLOCK

"""Scheduler: which tokens of which sequences the next forward pass processes.

Continuous batching, decode-first: a step contains the next token of every decoding sequence, and
the rest of the token budget goes to prefills in the order of service, (priority, arrival). When
blocks run out, the youngest sequence of the lowest priority is preempted: its blocks are released,
and its tokens, generated ones included, are prefilled again later. The first sequence in the order
of service is never preempted, and every step processes a token of it unless it awaits a sampled
token. Draft tokens of speculative decoding get the budget and the blocks that are left, so they
change no other row of the plan.
"""

from bisect import insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from megalith.errors import DataError, PlanError
from megalith.plan.serving.block_allocator import BlockCopy
from megalith.plan.serving.cache_layout import AttentionView
from megalith.plan.serving.graph_buckets import (
    BatchDimensions,
    add_prefill,
    match_bucket,
    snap_chunk,
)
from megalith.plan.serving.kv_cache_manager import KVCacheManager
from megalith.plan.serving.prefix_cache import PrefixHit
from megalith.plan.serving.sequence_state import SequenceState

__all__ = [
    "BlockCopy",
    "PlannedRow",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerStats",
    "SequenceState",
    "StepPlan",
]

NO_DRAFTS: Mapping[int, Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Sizes of the KV cache and of a step, and the batching policy.

    Raises:
        PlanError: a size is below 1, or a step cannot hold one token per sequence.
    """

    num_blocks: int
    """Blocks of the pool, shared by all KV cache groups."""

    block_size: int
    """Tokens per block."""

    groups: tuple[AttentionView, ...]
    """Attention view of each KV cache group."""

    max_num_seqs: int
    """Largest number of sequences in a step."""

    max_num_batched_tokens: int
    """Largest number of tokens in a step."""

    min_prefill_chunk_tokens: int = 16
    """Smallest chunk of a prompt, unless it is the last one or belongs to the first sequence."""

    prefix_caching: bool = True
    num_host_blocks: int = 0
    """Blocks in host memory, for those that the prefix cache evicts."""

    batching: Literal["continuous", "static"] = "continuous"
    """static: new sequences are admitted only when no sequence has a row."""

    buckets: tuple[BatchDimensions, ...] = ()
    """Buckets of graphs that steps with prefills are planned for; empty: none."""

    def __post_init__(self) -> None:
        sizes = {
            "cache.num_blocks": self.num_blocks,
            "cache.block_size": self.block_size,
            "engine.max_num_seqs": self.max_num_seqs,
            "engine.max_num_batched_tokens": self.max_num_batched_tokens,
            "engine.min_prefill_chunk_tokens": self.min_prefill_chunk_tokens,
        }
        for name, value in sizes.items():
            if value < 1:
                raise PlanError(f"{name}={value} is less than 1. Set it to 1 or more.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise PlanError(
                f"engine.max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"engine.max_num_seqs={self.max_num_seqs}, but a step has one token of every "
                f"sequence. Set engine.max_num_batched_tokens to {self.max_num_seqs} or more."
            )


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Tokens of one sequence in a step."""

    seq_id: int
    start: int
    """Position of the first token; tokens start .. start + count - 1 are processed."""

    count: int
    """Number of tokens, drafts included."""

    samples: bool
    """Whether the last token is the last known one, so that the next token is sampled."""

    block_tables: list[list[int]]
    """Blocks of each KV cache group, for at least start + count tokens, -1 for freed ones. The
    lists of the scheduler: read-only, and valid until `complete` or `discard`."""

    draft_ids: tuple[int, ...] = ()
    """Draft tokens that a decode row processes after its last known token. A token is sampled at
    each position, and a draft is accepted if it equals the token sampled before it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one forward pass computes.

    Before it, blocks are copied: first `offloads`, then `loads` and `copies`, each in any order.
    """

    rows: tuple[PlannedRow, ...]
    """Decode rows (one token and drafts, samples) first, then prefills; each in the order of
    service."""

    copies: tuple[BlockCopy, ...]
    preempted: tuple[int, ...]
    """Requests whose blocks were released by this plan."""

    offloads: tuple[BlockCopy, ...] = ()
    """Copies of blocks that the step overwrites to blocks in host memory."""

    loads: tuple[BlockCopy, ...] = ()
    """Copies from blocks in host memory, none of them a destination of `offloads`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step processes."""
        return sum(row.count for row in self.rows)

    def select_sampling_rows(self, excluded: Collection[int]) -> list[PlannedRow]:
        """Return the rows after which a token is sampled, without the sequences `excluded`."""
        return [row for row in self.rows if row.samples and row.seq_id not in excluded]


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Load of the scheduler, and counters since its start."""

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_used_blocks: int
    """Blocks that sequences reference; cached blocks are not used."""

    num_blocks: int
    prefix_query_tokens: int
    """Tokens of admitted sequences that looked up the prefix cache."""

    prefix_hit_tokens: int
    """Tokens of them that were not computed."""

    num_used_host_blocks: int = 0
    num_host_blocks: int = 0
    num_offloaded_blocks: int = 0
    """Blocks that were copied to host memory."""

    num_loaded_blocks: int = 0
    """Blocks that were copied from host memory."""

    host_hit_tokens: int = 0
    """Tokens among `prefix_hit_tokens` whose blocks were loaded from host memory."""

    num_drafts: int = 0
    """Rows with draft tokens."""

    num_draft_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens by their position among the drafts of the row."""

    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Accepted draft tokens by position."""

    num_deferred_prefills: int = 0
    """Times that a prompt was not admitted because no graph has a bucket for its batch."""

    @property
    def num_draft_tokens(self) -> int:
        """Number of draft tokens."""
        return sum(self.num_draft_tokens_per_pos)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return sum(self.num_accepted_tokens_per_pos)


class Scheduler:
    """Queue of sequences, and the blocks and rows of those that run.

    A step is `schedule`, a forward pass, and `complete` or `discard`; then `append_token` for each
    accepted draft and for the token sampled after them, `finish` or `fork`. Other steps may be
    scheduled and completed before the sampled tokens of a step are appended. `finish` may be called
    at any time.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = KVCacheManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            groups=config.groups,
            prefix_caching=config.prefix_caching,
            num_host_blocks=config.num_host_blocks,
        )
        self._states: dict[int, SequenceState] = {}
        self._running: list[SequenceState] = []  # in the order of service, as _waiting
        self._waiting: list[SequenceState] = []
        self._num_arrivals = 0
        self._num_forks = 0
        self._num_preemptions = 0
        self._num_drafts = 0
        self._num_deferred = 0
        self._num_drafted: list[int] = []  # by position among the drafts of a row
        self._num_accepted: list[int] = []
        self.holds_new = False
        """Whether only sequences that have started are scheduled, so that these finish."""
        self._plan: StepPlan | None = None
        self._planned: list[SequenceState] = []  # states of the rows of _plan
        self._decodes: list[tuple[SequenceState, PlannedRow]] = []
        self._prefills: list[tuple[SequenceState, PlannedRow]] = []
        self._preempted: list[SequenceState] = []
        self._admitted: dict[int, bool] = {}
        """Sequences that the plan admits; whether it is for the first time."""

        self._num_reserved_tokens = 0  # one per decoding sequence
        self._num_prefill_tokens = 0
        self._max_prefill_tokens = 0
        self._max_rows = 0

    def add(self, state: SequenceState, *, max_total_tokens: int) -> None:
        """Append a sequence to the queue; `max_total_tokens`: prompt and generated tokens.

        Raises:
            DataError: the sequence has no tokens, has more than `max_total_tokens`, or could never
                fit into the KV cache.
            ValueError: the request id is in use.
        """
        self._check_new_state(state)
        num_tokens = len(state.token_ids)
        if not num_tokens:
            raise DataError(
                f"request {state.seq_id} has an empty prompt. A prompt has at least one token."
            )
        if num_tokens > max_total_tokens:
            raise DataError(
                f"request {state.seq_id} has {num_tokens} tokens, but at most "
                f"{max_total_tokens} are allowed for prompt and output. Shorten the prompt or "
                f"increase the maximum to {num_tokens + 1} or more."
            )
        self._check_fits(state, max_total_tokens)
        state.order = (state.priority, self._num_arrivals, 0)
        self._num_arrivals += 1
        self._set_rope_regime(state)
        self._enqueue(state)

    def schedule(
        self,
        *,
        max_prefill_tokens: int | None = None,
        max_rows: int | None = None,
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> StepPlan:
        """Plan the next step. The plan has no rows if no sequence has a token to process; one that
        awaits a sampled token has none.

        `max_prefill_tokens`: a smaller limit of the prefill tokens, at least 1, for example after a
        forward pass ran out of memory; `max_rows`: a smaller limit of the rows, at least 1, for
        pipeline stages that process several steps at a time; `drafts`: draft tokens by sequence, of
        which the first ones are planned as far as budget and blocks are left.

        Raises:
            RuntimeError: the previous plan was neither completed nor discarded.
        """
        if self._plan is not None:
            raise RuntimeError("The previous plan is neither completed nor discarded.")
        self._decodes, self._prefills, self._preempted = [], [], []
        self._admitted = {}
        self._num_reserved_tokens = sum(map(self._is_decode, self._running))
        self._num_prefill_tokens = 0
        self._max_prefill_tokens = self.config.max_num_batched_tokens
        if max_prefill_tokens is not None:
            self._max_prefill_tokens = max(max_prefill_tokens, 1)
        self._max_rows = self.config.max_num_seqs if max_rows is None else max(max_rows, 1)
        self.cache.prefix_cache.time += 1

        self._plan_all()
        if drafts:
            self._add_drafts(drafts)

        self._preempted.sort(key=_get_order)
        for state in self._preempted:
            insort(self._waiting, state, key=_get_order)
        rows = self._decodes + self._prefills
        self._planned = [state for state, _ in rows]
        self._plan = StepPlan(
            rows=tuple(row for _, row in rows),
            copies=self.cache.pending_copies,
            preempted=tuple(state.seq_id for state in self._preempted),
            offloads=self.cache.host_cache.pending_offloads,
            loads=self.cache.pending_loads,
        )
        return self._plan

    def complete(self, plan: StepPlan) -> None:
        """Advance the sequences after the forward pass succeeded: register full blocks in the
        prefix cache and free blocks that no later query attends to.

        Drafts do not advance their sequence here, but in `append_token` if they are accepted.

        Raises:
            RuntimeError: `plan` is not the plan of the latest `schedule`.
        """
        self._close(plan)
        self.cache.finish_copies()
        self.cache.finish_transfers()
        for state, row in zip(self._planned, plan.rows, strict=True):
            if state.is_running:  # not aborted since
                self.cache.advance(state, row.start + row.count - len(row.draft_ids))
        self._planned = []

    def discard(self, plan: StepPlan) -> None:
        """Drop a plan after the forward pass failed: no sequence advances, no block is registered.

        Sequences keep the blocks that were allocated for the plan, except for drafts, and use them
        in a later step.

        Raises:
            RuntimeError: `plan` is not the plan of the latest `schedule`.
        """
        self._close(plan)
        self.cache.undo_copies()
        for state, row in zip(self._planned, plan.rows, strict=True):
            if row.draft_ids and state.is_running:
                self.cache.trim(state, row.start + 1)
        for state in self.cache.undo_transfers():
            self._requeue(state)
        self._planned = []

    def fail_loads(self, plan: StepPlan, failed: Collection[BlockCopy]) -> StepPlan:
        """Drop the blocks of the host that could not be loaded. The sequences that need them are
        queued again, as if the prefix cache did not contain these blocks. Returns the plan without
        their rows, which replaces `plan`.

        Raises:
            RuntimeError: `plan` is not the plan of the latest `schedule`.
        """
        self._close(plan)
        for state in self.cache.fail_loads(failed):
            self._requeue(state)
        planned = zip(self._planned, plan.rows, strict=True)
        kept = [(state, row) for state, row in planned if state.is_running]
        self._planned = [state for state, _ in kept]
        self._plan = replace(plan, rows=tuple(row for _, row in kept))
        return self._plan

    def append_token(self, seq_id: int, token: int, *, is_cached: bool = False) -> None:
        """Append a sampled token to a sequence; `is_cached`: it is the next draft of the completed
        step, so its keys and values are in the cache.

        A token that is not cached is the last one of a step: the blocks of later drafts, which are
        rejected, are released.
        """
        state = self._states[seq_id]
        state.token_ids.append(token)
        if not state.uses_long_rope and self._set_rope_regime(state):
            self.cache.release(state)
        elif is_cached:
            self.cache.advance(state, state.num_computed_tokens + 1)
        else:
            self.cache.trim(state, state.num_computed_tokens)

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of a row, of which the first `num_accepted` were accepted."""
        while len(self._num_drafted) < num_drafts:
            self._num_drafted.append(0)
            self._num_accepted.append(0)
        self._num_drafts += 1
        for position in range(num_drafts):
            self._num_drafted[position] += 1
            self._num_accepted[position] += position < num_accepted

    def finish(self, seq_id: int) -> None:
        """Remove a sequence that generated its last token or is aborted, in any state, also between
        `schedule` and `complete`; its full blocks stay cached.

        Raises:
            KeyError: no sequence has this id.
        """
        self._remove(seq_id)

    def fork(self, parent_id: int, child: SequenceState) -> None:
        """Add another choice for the prompt of a running sequence (n > 1).

        It is called after the step that computed the prompt. The child references the parent's
        blocks and continues after the prompt, in the order of service right after the parent. If no
        row is free, it waits and is prefilled as after a preemption.

        Raises:
            ValueError: the parent is not running with exactly its prompt computed, the child has
                another prompt or salt, or its request id is in use.
        """
        parent = self._states[parent_id]
        self._check_new_state(child)
        num_prompt_tokens = parent.num_prompt_tokens
        if not parent.is_running or parent.num_computed_tokens != num_prompt_tokens:
            raise ValueError(
                f"request {parent_id} has {parent.num_computed_tokens} computed tokens and a "
                f"prompt of {num_prompt_tokens}. Fork it after the step that computes its prompt."
            )
        if (
            child.num_prompt_tokens != num_prompt_tokens
            or child.token_ids[:num_prompt_tokens] != parent.token_ids[:num_prompt_tokens]
            or child.salt != parent.salt
        ):
            raise ValueError(
                f"request {child.seq_id} has another prompt or salt than request {parent_id} "
                "and cannot share its blocks. Add it as a new sequence."
            )
        self._num_forks += 1
        child.order = (child.priority, parent.order[1], self._num_forks)
        child.was_admitted = True  # its num_cached_tokens stays 0: the parent reports the hit
        is_long = self._set_rope_regime(child)
        self._enqueue(child)
        if is_long == parent.uses_long_rope and len(self._running) < self.config.max_num_seqs:
            self._start(child)
            self.cache.share(parent, child)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, for example after a weight update.

        Sequences keep their blocks, but blocks computed before the reset never enter the cache.
        """
        self.cache.reset_prefix_cache(self._running)

    @property
    def has_started(self) -> bool:
        """Whether a sequence has started and is not finished."""
        return any(state.was_admitted for state in self._states.values())

    def preempt_all(self) -> None:
        """Release the blocks of all sequences: those that have started are prefilled again.

        Raises:
            RuntimeError: a plan is neither completed nor discarded.
        """
        if self._plan is not None:
            raise RuntimeError("The previous plan is neither completed nor discarded.")
        for state in self._running:
            assert not state.awaits_token, "its sampled token would be appended to released blocks"
            state.is_running = False
            self.cache.release(state)
            state.num_preemptions += 1
            self._num_preemptions += 1
            insort(self._waiting, state, key=_get_order)
        self._running.clear()

    def make_stats(self) -> SchedulerStats:
        """Return the present load and the counters."""
        prefix_cache = self.cache.prefix_cache
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            num_used_blocks=self.cache.allocator.num_used,
            num_blocks=self.config.num_blocks,
            prefix_query_tokens=prefix_cache.num_query_tokens,
            prefix_hit_tokens=prefix_cache.num_hit_tokens,
            num_used_host_blocks=self.cache.host_cache.num_used,
            num_host_blocks=self.config.num_host_blocks,
            num_offloaded_blocks=self.cache.host_cache.num_offloaded_blocks,
            num_loaded_blocks=self.cache.num_loaded_blocks,
            host_hit_tokens=self.cache.num_host_hit_tokens,
            num_drafts=self._num_drafts,
            num_draft_tokens_per_pos=tuple(self._num_drafted),
            num_accepted_tokens_per_pos=tuple(self._num_accepted),
            num_deferred_prefills=self._num_deferred,
        )

    def check(self) -> None:
        """Verify all invariants of queue, blocks and prefix cache.

        Raises:
            AssertionError: an invariant is violated.
        """
        for queue in (self._running, self._waiting):
            assert queue == sorted(queue, key=_get_order), "a queue is not in the order of service"
        assert len(self._running) <= self.config.max_num_seqs, "too many sequences run"
        assert sorted(self._states) == sorted(
            state.seq_id for state in self._running + self._waiting
        ), "a sequence is in no queue, or in two"
        for state in self._waiting:
            assert not self.cache.count_held_blocks(state), (
                f"request {state.seq_id} waits, but holds blocks"
            )
        self.cache.check(self._running)

    def _check_new_state(self, state: SequenceState) -> None:
        if state.seq_id in self._states:
            raise ValueError(f"request id {state.seq_id} is in use. Choose another one.")

    def _check_fits(self, state: SequenceState, max_total_tokens: int) -> None:
        # the last token is sampled, but never processed
        num_stored = max(len(state.token_ids), max_total_tokens - 1)
        num_required = self.cache.count_required_blocks(num_stored, 1)
        if num_required <= self.config.num_blocks:
            return
        num_fitting = self.cache.find_longest_sequence() + 1
        raise DataError(
            f"request {state.seq_id}: {max_total_tokens} tokens (prompt of "
            f"{state.num_prompt_tokens} and output) require {num_required} KV cache blocks of "
            f"{self.config.block_size} tokens, but the pool has {self.config.num_blocks}. Limit "
            f"prompt and output to {num_fitting} tokens, or increase cache.num_blocks to "
            f"{num_required} or more."
        )

    def _set_rope_regime(self, state: SequenceState) -> bool:
        """Set and return whether a sequence has reached the length of other rotary frequencies."""
        length = state.recompute_length
        state.uses_long_rope = length is not None and len(state.token_ids) >= length
        if state.uses_long_rope:
            state.block_hashes = []
        return state.uses_long_rope

    def _enqueue(self, state: SequenceState) -> None:
        self._states[state.seq_id] = state
        self.cache.initialize(state)
        insort(self._waiting, state, key=_get_order)

    def _start(self, state: SequenceState) -> None:
        """Give a waiting sequence a row."""
        self._waiting.remove(state)
        insort(self._running, state, key=_get_order)
        state.is_running = True
        state.failed_headroom = -1

    def _remove(self, seq_id: int) -> None:
        state = self._states.pop(seq_id)
        (self._running if state.is_running else self._waiting).remove(state)
        state.is_running = False
        self.cache.release(state)

    def _requeue(self, state: SequenceState) -> None:
        """Undo the admission of a sequence whose prefix could not be loaded."""
        if state.seq_id in self._admitted and self.cache.reads_prefix_cache(state):
            self.cache.prefix_cache.count_query(
                num_tokens=-len(state.token_ids), num_hit_tokens=-state.num_computed_tokens
            )
        if self._admitted.get(state.seq_id, False):
            state.was_admitted = False
            state.num_cached_tokens = 0
        self._running.remove(state)
        state.is_running = False
        self.cache.release(state)
        insort(self._waiting, state, key=_get_order)

    def _close(self, plan: StepPlan) -> None:
        if plan is not self._plan:
            raise RuntimeError("The plan is not the one of the latest schedule().")
        self._plan = None

    def _is_decode(self, state: SequenceState) -> bool:
        """Return whether the next step of a sequence processes one token by necessity."""
        num_computed = state.num_computed_tokens
        num_remaining = len(state.token_ids) - num_computed
        if state.one_token_after_prompt and num_computed >= state.num_prompt_tokens:
            return num_remaining > 0
        return num_remaining == 1

    def _plan_all(self) -> None:
        """Plan running and waiting sequences in the order of service.

        A sequence is preempted only by one before it, so planned rows are never withdrawn.
        """
        running = self._running
        admits = self.config.batching == "continuous" or not running
        state = self._find_candidate() if admits else None
        number = 0
        while len(self._decodes) + len(self._prefills) < self._max_rows:
            if number < len(running) and (state is None or running[number].order < state.order):
                self._plan_running(running[number])
                number += 1
            elif state is None:
                return
            elif self._admit(state):
                self._plan_chunk(state, is_reserved=False)
                number += 1
                state = self._find_candidate()
            else:
                state = None

    def _find_candidate(self) -> SequenceState | None:
        """Return the first waiting sequence that may be admitted."""
        if not self.holds_new:
            return self._waiting[0] if self._waiting else None
        return next((state for state in self._waiting if state.was_admitted), None)

    def _plan_running(self, state: SequenceState) -> None:
        start = state.num_computed_tokens
        num_tokens = len(state.token_ids)
        if start + 1 == num_tokens and start < state.capacity and not state.shares_last_block:
            self._add_row(state, 1)  # the common case, kept short
        elif start < num_tokens:
            is_decode = self._is_decode(state)
            if not start and not state.capacity:  # its cache was dropped at recompute_length
                hit = self.cache.find_hit(state)
                if self.cache.fits(hit):
                    self.cache.use_hit(state, hit)
            self._plan_chunk(state, is_reserved=is_decode)

    def _plan_chunk(self, state: SequenceState, *, is_reserved: bool) -> None:
        """Plan as many tokens of a running sequence as budget and blocks allow, or none.

        `is_reserved`: one token is already subtracted from the budget.
        """
        limit = self._find_chunk_limit(state, state.num_computed_tokens)
        wanted = min(limit, 1 if is_reserved else self._prefill_budget)
        smallest = self._find_smallest_chunk(limit)
        if wanted < smallest:
            return
        if self.config.buckets and not is_reserved and wanted < limit:
            wanted = snap_chunk(
                self.config.buckets, self._dimensions, smallest=smallest, largest=wanted
            )
        while (num_fitting := self.cache.count_fitting_tokens(state)) < smallest:
            victim = self._running[-1]
            if (victim is state and num_fitting > 0) or victim.awaits_token:
                return  # wait for more blocks than a small chunk, or until it can be preempted
            assert len(self._running) > 1, (
                f"request {state.seq_id} has more tokens than its max_total_tokens"
            )
            self._preempt(victim)
            if victim is state:
                return
        count = min(wanted, num_fitting)
        self.cache.allocate(state, state.num_computed_tokens + count)
        if not is_reserved:
            self._num_prefill_tokens += count
        self._add_row(state, count)

    def _add_row(self, state: SequenceState, count: int) -> None:
        start = state.num_computed_tokens
        samples = start + count == len(state.token_ids)
        row = PlannedRow(state.seq_id, start, count, samples, state.block_tables)
        rows = self._decodes if samples and count == 1 else self._prefills
        rows.append((state, row))

    def _add_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Append drafts to the decode rows, in the order of service."""
        rows = self._decodes + self._prefills
        budget = self.config.max_num_batched_tokens - sum(row.count for _, row in rows)
        for index, (state, row) in enumerate(self._decodes):
            draft_ids = drafts.get(state.seq_id, ())
            count = min(len(draft_ids), budget, self._find_draft_limit(state))
            if count <= 0:
                continue
            budget -= count
            self.cache.allocate(state, row.start + 1 + count)
            row = replace(
                row,
                count=1 + count,
                draft_ids=tuple(draft_ids[:count]),
            )
            self._decodes[index] = (state, row)

    def _find_draft_limit(self, state: SequenceState) -> int:
        """Return how many drafts a decode row may process: as many as fit into the available
        blocks, and have the rotary frequencies that they have one by one."""
        if not state.accepts_drafts:
            return 0
        limit = self.cache.count_fitting_tokens(state) - 1
        if state.recompute_length is not None and not state.uses_long_rope:
            limit = min(limit, state.recompute_length - 1 - len(state.token_ids))
        return limit

    def _find_chunk_limit(self, state: SequenceState, num_computed: int) -> int:
        """Return how many tokens one step may process after `num_computed` tokens."""
        num_remaining = len(state.token_ids) - num_computed
        if state.one_token_after_prompt:
            return min(num_remaining, max(state.num_prompt_tokens - num_computed, 1))
        return num_remaining

    def _find_smallest_chunk(self, limit: int) -> int:
        return min(limit, self.config.min_prefill_chunk_tokens) if self._has_rows else 1

    @property
    def _has_rows(self) -> bool:
        """Whether a sequence is planned; the first one that awaits no token always is."""
        return bool(self._decodes or self._prefills)

    @property
    def _prefill_budget(self) -> int:
        """Prefill tokens that the step may still process."""
        budget = self.config.max_num_batched_tokens - self._num_reserved_tokens
        return min(budget, self._max_prefill_tokens) - self._num_prefill_tokens

    def _preempt(self, state: SequenceState) -> None:
        """Release the blocks and the row of a running sequence."""
        assert not state.awaits_token, "its sampled token would be appended to released blocks"
        self._num_reserved_tokens -= self._is_decode(state)
        self._running.remove(state)
        state.is_running = False
        self.cache.release(state)
        state.num_preemptions += 1
        self._num_preemptions += 1
        self._preempted.append(state)

    def _admit(self, state: SequenceState) -> bool:
        """Start a waiting sequence if a row, budget and the blocks for all of its known tokens are
        available; return whether it started. Those before it are held.

        To make room, it preempts sequences of a lower priority; if it is the first in the order of
        service, any.
        """
        if self._preempted and state.order > min(map(_get_order, self._preempted)):
            return False
        victims = self._list_victims(state)
        has_row = len(self._running) < self.config.max_num_seqs
        if not has_row and not victims:
            return False
        kept = [each for each in self._running if each not in victims] if victims else self._running
        headroom = self._count_free_blocks(kept) + sum(map(self.cache.count_held_blocks, victims))
        if self._has_rows and headroom <= state.failed_headroom:
            return False  # as before: spare the lookup in the prefix cache
        hit = self.cache.find_hit(state)
        if not self._has_budget(state, hit):
            return False
        if self._has_rows and not self._has_bucket(state, hit):
            self._num_deferred += 1
            return False
        if self._count_missing_blocks(state, hit) > headroom:
            state.failed_headroom = headroom
            return False

        for victim in reversed(victims):
            if has_row and self._fits(state, hit):
                break
            self._preempt(victim)
            has_row = True
        if not self._fits(state, hit):
            return False
        self._start(state)
        self.cache.use_hit(state, hit)
        if self.cache.reads_prefix_cache(state):
            self.cache.prefix_cache.count_query(
                num_tokens=len(state.token_ids), num_hit_tokens=state.num_computed_tokens
            )
        self._admitted[state.seq_id] = not state.was_admitted
        if not state.was_admitted:
            state.num_cached_tokens = state.num_computed_tokens
            state.was_admitted = True
        return True

    def _list_victims(self, state: SequenceState) -> list[SequenceState]:
        """Return the running sequences that a waiting one may preempt: the last of the order."""
        if self.config.batching == "static":
            return []
        return [
            victim
            for victim in self._running
            if victim.order > state.order
            and not victim.awaits_token
            and (not self._has_rows or victim.priority > state.priority)
        ]

    def _has_budget(self, state: SequenceState, hit: PrefixHit) -> bool:
        if not self._has_rows or self.config.batching == "static":
            return True
        limit = self._find_chunk_limit(state, hit.num_blocks * self.config.block_size)
        return min(limit, self._prefill_budget) >= self._find_smallest_chunk(limit)

    @property
    def _dimensions(self) -> BatchDimensions:
        """The decodes of the step, without drafts, and the prefills that are planned so far."""
        num_decodes = self._num_reserved_tokens
        num_tokens = num_decodes + self._num_prefill_tokens
        return BatchDimensions(num_tokens, len(self._prefills), num_decodes)

    def _has_bucket(self, state: SequenceState, hit: PrefixHit) -> bool:
        """Return whether a graph covers the step with a waiting sequence; without graphs of
        prefills, True."""
        buckets = self.config.buckets
        if not buckets:
            return True
        limit = self._find_chunk_limit(state, hit.num_blocks * self.config.block_size)
        count = min(limit, max(self._prefill_budget, 1))
        match = match_bucket(buckets, add_prefill(self._dimensions, count))
        return not isinstance(match, str)

    def _fits(self, state: SequenceState, hit: PrefixHit) -> bool:
        return self._count_missing_blocks(state, hit) <= self._count_free_blocks(self._running)

    def _count_missing_blocks(self, state: SequenceState, hit: PrefixHit) -> int:
        """Return how many available blocks the known tokens of a waiting sequence take."""
        chunk = max(self._prefill_budget, 1) if self._has_rows else 1
        num_required = self.cache.count_required_blocks(len(state.token_ids), chunk)
        return num_required - hit.num_held_blocks + self.cache.count_evictable(hit)

    def _count_free_blocks(self, running: list[SequenceState]) -> int:
        """Return the available blocks, without those that `running` needs for its known tokens."""
        num_free = self.cache.allocator.num_available
        if not self._has_rows:
            return num_free  # the first sequence may preempt all others
        for state in running:
            num_tokens = len(state.token_ids)
            if num_tokens - state.num_computed_tokens > 1:
                chunk = self.config.max_num_batched_tokens
                num_required = self.cache.count_required_blocks(num_tokens, chunk)
                num_free -= max(num_required - self.cache.count_held_blocks(state), 0)
        return num_free


def _get_order(state: SequenceState) -> tuple[int, int, int]:
    return state.order

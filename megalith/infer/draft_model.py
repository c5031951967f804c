"""Draft tokens of a small model with the same vocabulary, which has KV blocks of its own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.infer.cache import PagedKVCache
from megalith.infer.runner import ModelRunner
from megalith.infer.sample import SampleRow, sample_tokens
from megalith.infer.speculative import DraftRow
from megalith.infer.suspend import DeviceMemory
from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.kv_cache_manager import KVCacheManager
from megalith.plan.serving.scheduler import PlannedRow, SequenceState, StepPlan


class DraftCache:
    """Blocks of the sequences in the KV cache of a draft model.

    The computed tokens of a sequence are always known ones: drafts are processed after them without
    being counted, and again once they are accepted. So nothing is rolled back, and no block of a
    sliding window is freed too early.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._manager = KVCacheManager(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            groups=cache.plan.layout.groups,
            prefix_caching=False,
        )
        self.states: dict[int, SequenceState] = {}

    @property
    def allocator(self) -> BlockAllocator:
        """The blocks in use."""
        return self._manager.allocator

    def open(self, seq_id: int) -> SequenceState:
        """Return the state of a sequence, which is new or continued."""
        if seq_id not in self.states:
            self.states[seq_id] = SequenceState(seq_id=seq_id, token_ids=[], num_prompt_tokens=0)
            self._manager.initialize(self.states[seq_id])
        return self.states[seq_id]

    def release(self, seq_id: int) -> None:
        """Release the blocks of a sequence; it may be unknown."""
        state = self.states.pop(seq_id, None)
        if state is not None:
            self._manager.release(state)

    def reserve(self, state: SequenceState, num_tokens: int) -> bool:
        """Allocate blocks for the first `num_tokens` tokens; False if too few are free."""
        num_new_tokens = num_tokens - state.num_computed_tokens
        if self._manager.count_fitting_tokens(state) < num_new_tokens:
            return False
        self._manager.allocate(state, num_tokens)
        return True

    def advance(self, state: SequenceState, end: int) -> None:
        """Record that the tokens before `end`, all of them known, are in the cache."""
        self._manager.advance(state, end)


class DraftModelProposer:
    """Proposes the tokens that a small model samples with the parameters and the noise of the
    request, so that they agree with those of the large model where its distribution does.

    The first forward pass processes the tokens that are new since the previous proposal, each later
    one a draft.
    """

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, max_num_batched_tokens: int
    ) -> None:
        """`vocab_size`: that of the large model; `max_num_batched_tokens`: largest number of tokens
        of a forward pass."""
        vocab = runner.vocab
        self._runner = runner
        # the ids that both models have; the others pad the vocabulary
        self._vocab = replace(vocab, vocab_size=min(vocab.vocab_size, vocab_size))
        self._max_num_batched_tokens = max_num_batched_tokens
        self._cache = DraftCache(runner.cache)

    def observe(self, rows: Sequence[PlannedRow], hidden: Tensor) -> None:
        """Hidden states of the large model are not used."""

    def release(self, seq_id: int) -> None:
        """Release the blocks of a sequence."""
        self._cache.release(seq_id)

    def list_memory(self) -> DeviceMemory:
        """Return the tensors of the draft model and its KV cache."""
        return self._runner.list_memory(self._cache.allocator)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row; none where the context or the KV cache of the draft model
        is too short."""
        drafts: dict[int, list[int]] = {row.seq_id: [] for row in rows}
        active = [row for row in rows if self._prepare(row)]
        logits = self._process_known_tokens([self._cache.states[row.seq_id] for row in active])
        while active:
            sample_rows = [
                without_logprobs(row.make_sample_row(drafts[row.seq_id])) for row in active
            ]
            sampled = sample_tokens(logits, sample_rows, self._vocab)
            unfinished = []
            for row, result in zip(active, sampled, strict=True):
                if result.error is not None:
                    continue
                drafts[row.seq_id].append(result.token)
                if len(drafts[row.seq_id]) < row.num_drafts:
                    self._cache.states[row.seq_id].token_ids.append(result.token)
                    unfinished.append(row)
            active = unfinished
            if active:
                logits = self._process_drafts([self._cache.states[row.seq_id] for row in active])
        return [drafts[row.seq_id] for row in rows]

    @property
    def _num_embeddings(self) -> int:
        return self._runner.model.config.vocab_size

    def _prepare(self, row: DraftRow) -> bool:
        """Set the known tokens of a sequence and allocate blocks; False if it gets no drafts."""
        state = self._cache.open(row.seq_id)
        num_computed = state.num_computed_tokens
        new_ids = row.token_ids[num_computed:]
        # the last draft is not processed
        end = len(row.token_ids) + row.num_drafts - 1
        if end > self._runner.model.config.max_seq_len or max(new_ids) >= self._num_embeddings:
            return False
        state.token_ids[num_computed:] = new_ids
        return self._cache.reserve(state, end)

    def _process_known_tokens(self, states: Sequence[SequenceState]) -> Tensor:
        """Process the known tokens in chunks; return the logits [rows, v] of the next token."""
        next_token: dict[int, Tensor] = {}
        while len(next_token) < len(states):
            rows: list[PlannedRow] = []
            budget = self._max_num_batched_tokens
            for state in states:
                num_remaining = len(state.token_ids) - state.num_computed_tokens
                count = min(num_remaining, budget)
                if count > 0:
                    rows.append(plan_row(state, count))
                    budget -= count
            logits = self._execute(rows)
            for row in rows:
                self._cache.advance(self._cache.states[row.seq_id], row.start + row.count)
            sampling = [row.seq_id for row in rows if row.samples]
            next_token |= zip(sampling, logits, strict=True)
        if not states:
            return torch.empty(0)
        return torch.stack([next_token[state.seq_id] for state in states])

    def _process_drafts(self, states: Sequence[SequenceState]) -> Tensor:
        """Process the last token of each sequence, a draft; return logits [rows, v]."""
        return self._execute(
            [
                replace(plan_row(state, 1), start=len(state.token_ids) - 1, samples=True)
                for state in states
            ]
        )

    def _execute(self, rows: Sequence[PlannedRow]) -> Tensor:
        logits = self._runner.execute(StepPlan(tuple(rows), (), ()), self._cache.states)
        assert logits is not None, "a draft model has one stage"
        return logits.next_token


def plan_row(state: SequenceState, count: int) -> PlannedRow:
    """Return the row that processes the next `count` tokens of a sequence."""
    start = state.num_computed_tokens
    samples = start + count == len(state.token_ids)
    return PlannedRow(state.seq_id, start, count, samples, state.block_tables)


def without_logprobs(row: SampleRow) -> SampleRow:
    """Return the same row without log-probs, which drafts do not need."""
    if row.params.logprobs is None:
        return row
    return replace(row, params=replace(row.params, logprobs=None))


def check_same_vocabulary(tokenizer: Tokenizer, draft_tokenizer: Tokenizer, source: str) -> None:
    """Check that the ids of a draft model mean the same tokens.

    Raises:
        ConfigError: they do not; `source` names the draft model.
    """
    if tokenizer.fingerprint == draft_tokenizer.fingerprint:
        return
    size, draft_size = tokenizer.vocab_size, draft_tokenizer.vocab_size
    reason = f"its tokenizer has {draft_size} tokens, that of the model has {size}"
    if size == draft_size:
        other = next((i for i in range(size) if not _is_same(tokenizer, draft_tokenizer, i)), None)
        if other is None and dict(tokenizer.specials) == dict(draft_tokenizer.specials):
            return
        reason = "its special tokens are not those of the model"
        if other is not None:
            texts = [each.decode([other]) for each in (draft_tokenizer, tokenizer)]
            reason = f"its token {other} is {texts[0]!r}, that of the model is {texts[1]!r}"
    raise ConfigError(
        f"speculation.draft_model={source}: {reason}. Use a draft model with the same tokenizer, "
        "or set speculation.method to ngram."
    )


def _is_same(tokenizer: Tokenizer, other: Tokenizer, token: int) -> bool:
    return tokenizer.decode([token]) == other.decode([token])

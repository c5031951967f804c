"""Draft tokens of the MTP layers of a model, which have KV blocks of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.serve import KVCacheDtype
from megalith.errors import ConfigError
from megalith.infer.cache import (
    CachePlan,
    PagedKVCache,
    StepBlocks,
    attention_views,
    kv_bytes_per_token,
    plan_token_shardings,
)
from megalith.infer.draft_model import DraftCache, plan_row, without_logprobs
from megalith.infer.runner import ModelRunner
from megalith.infer.sample import SampleRow, sample_tokens
from megalith.infer.speculative import DraftRow
from megalith.infer.suspend import DeviceMemory
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear_small_batch import small_batch_matmul
from megalith.kernels.packed import seq_params_from_queries
from megalith.plan.serving.cache_layout import plan_cache_layout
from megalith.plan.serving.scheduler import PlannedRow


def plan_mtp_cache(
    model: ModelConfig,
    *,
    num_layers: int,
    tp: int,
    element_size: int,
    dtype: KVCacheDtype = "auto",
    replicate_kv_heads: bool = False,
) -> CachePlan:
    """Plan the KV cache of the first `num_layers` MTP layers, which have the attention of the last
    layer; arguments as of `plan_cache`.

    Raises:
        ConfigError: the model has fewer MTP layers, or they cannot generate.
    """
    if num_layers > model.mtp.num_layers:
        raise ConfigError(
            f"speculation.method=mtp with num_draft_tokens={num_layers}: the model has "
            f"{model.mtp.num_layers} MTP layers, or was loaded without them. Set num_draft_tokens "
            "to at most their number, and pass the same speculation settings to load_generator; "
            "for a model without MTP layers set method to ngram."
        )
    view = attention_views(model)[-1]
    if view is None or model.uses_cross_layer_source(model.num_layers - 1):
        raise ConfigError(
            "speculation.method=mtp: the MTP layers are like the last layer of the model, which "
            "has no attention, or attends to an earlier layer. Set speculation.method to ngram."
        )
    layout = plan_cache_layout([view] * num_layers)
    sharding = plan_token_shardings(model, tp=tp, replicate_kv_heads=replicate_kv_heads)[-1]
    size = kv_bytes_per_token(
        model,
        tp=tp,
        element_size=element_size,
        dtype=dtype,
        replicate_kv_heads=replicate_kv_heads,
    )[-1]
    return CachePlan(
        layout,
        layout.slots,
        size * num_layers,
        has_states=False,
        dtype=dtype,
        shardings=(sharding,) * num_layers,
        block_multiple=sharding.num_ranks,
    )


@dataclass(slots=True)
class _HiddenStates:
    """Hidden states of the last layer at the positions of a sequence that the MTP layers have not
    processed, or process again."""

    first: int
    """Position of the first token in the KV cache of the MTP layers: tokens of a cached prefix
    have no hidden states."""

    start: int
    """Position of the first hidden state."""

    parts: list[Tensor] = field(default_factory=list)
    """[t, h] each; only the last part may contain rejected drafts."""

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.parts))

    def continues_at(self, position: int) -> bool:
        """Return whether a step that starts at a position follows the previous one."""
        return bool(self.parts) and self.end - len(self.parts[-1]) <= position <= self.end

    def truncate(self, end: int) -> None:
        """Drop the hidden states from position `end` on."""
        if self.end > end:
            self.parts[-1] = self.parts[-1][: len(self.parts[-1]) - (self.end - end)]


@dataclass(slots=True)
class _MTPJob:
    """Positions of a sequence that a forward pass of the MTP layers processes."""

    row: DraftRow
    states: _HiddenStates
    token_ids: list[int]
    """Known tokens and drafts."""

    count: int
    """Number of positions after `states.start`."""

    drafts: list[int] = field(default_factory=list)
    is_sampling: bool = True

    def make_sample_row(self) -> SampleRow:
        return without_logprobs(self.row.make_sample_row(self.drafts))


class MTPProposer:
    """Proposes one token per MTP layer: layer j takes the output of layer j - 1 and the token
    j + 1 positions later, which is a draft at the last position.

    Keys and values of layer j at a position depend on that token. So after a verification the last
    positions are processed again with the accepted tokens.
    """

    def __init__(self, runner: ModelRunner, cache: PagedKVCache, *, max_tokens: int) -> None:
        """`runner`: of the model; `max_tokens`: about the largest number of tokens of a sequence in
        a forward pass."""
        self._runner, self._model, self._kv_cache = runner, runner.model, cache
        self._device = next(runner.model.parameters()).device
        self._vocab = runner.vocab
        self._num_layers = len(cache.plan.slots)
        self._max_tokens = max(max_tokens, 2 * self._num_layers)
        self._cache = DraftCache(cache)
        self._hidden_states: dict[int, _HiddenStates] = {}

    def observe(self, rows: Sequence[PlannedRow], hidden: Tensor) -> None:
        """Keep the hidden states [t, h] of a step."""
        first = 0
        for row in rows:
            states = self._hidden_states.get(row.seq_id)
            if states is None or not states.continues_at(row.start):
                self.release(row.seq_id)
                states = _HiddenStates(row.start, row.start)
                self._hidden_states[row.seq_id] = states
            states.truncate(row.start)
            states.parts.append(hidden[first : first + row.count])
            first += row.count

    def release(self, seq_id: int) -> None:
        """Forget a sequence and release its blocks."""
        self._hidden_states.pop(seq_id, None)
        self._cache.release(seq_id)

    def list_memory(self) -> DeviceMemory:
        """Return the KV cache of the MTP layers, whose weights are those of the model, and the
        hidden states."""
        parts = [part for states in self._hidden_states.values() for part in states.parts]
        return DeviceMemory(caches=[(self._kv_cache, self._cache.allocator)], states=parts)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return the drafts of each row; none where hidden states or blocks are missing. Collective
        over the ranks that share experts: all execute as many forward passes."""
        jobs = [job for row in rows for job in [self._prepare(row)] if job is not None]
        num_passes = sum(self._count_chunks(job.count) for job in jobs) + bool(jobs)
        num_dummy_passes = self._runner.reduce_max(num_passes) - num_passes
        if jobs:
            for job in jobs:
                self._process_prompt(job)
            self._process(jobs, samples=True)
            for job in jobs:
                # layer j has seen the known tokens up to j + 1 positions later
                self._advance(job, max(job.count - (self._num_layers - 1), 0))
        for _ in range(num_dummy_passes):
            self._process([], samples=False)
        drafts = {job.row.seq_id: job.drafts for job in jobs}
        return [drafts.get(row.seq_id, [])[: row.num_drafts] for row in rows]

    def _prepare(self, row: DraftRow) -> _MTPJob | None:
        """Return the positions to process: those whose next token is known."""
        states, end = self._hidden_states.get(row.seq_id), len(row.token_ids) - 1
        if states is None or states.end < end or states.start >= end:
            return None
        states.truncate(end)
        states.parts = [torch.cat(states.parts)]
        if not self._cache.reserve(self._cache.open(row.seq_id), end - states.first):
            return None
        return _MTPJob(row, states, list(row.token_ids), end - states.start)

    def _count_chunks(self, count: int) -> int:
        """Return how many chunks of a prompt are processed before its last positions."""
        num_chunks = 0
        while count > self._max_tokens:
            count -= self._chunk_size(count)
            num_chunks += 1
        return num_chunks

    def _chunk_size(self, count: int) -> int:
        # the tokens after these positions are known for every layer
        return min(self._max_tokens, count - self._num_layers)

    def _process_prompt(self, job: _MTPJob) -> None:
        """Process all but the last positions of a long prompt in chunks."""
        while job.count > self._max_tokens:
            remaining = job.count
            job.count = self._chunk_size(remaining)
            self._process([job], samples=False)
            processed = job.count
            job.count = remaining
            self._advance(job, processed)

    def _advance(self, job: _MTPJob, count: int) -> None:
        """Drop the hidden states of the first `count` positions, which are in the cache."""
        states = job.states
        states.parts = [states.parts[0][count:]]
        states.start += count
        job.count -= count
        self._cache.advance(self._cache.states[job.row.seq_id], states.start - states.first)

    def _process(self, jobs: Sequence[_MTPJob], *, samples: bool) -> None:
        """Run the MTP layers on the next positions of the jobs and on padding, and sample a draft
        per layer."""
        sequences = [self._cache.states[job.row.seq_id] for job in jobs]
        counts = [job.count for job in jobs]
        num_tokens = sum(counts)
        num_padding = self._runner.count_padding(num_tokens)
        planned = [
            replace(plan_row(sequence, count), samples=True)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        planned += [self._kv_cache.make_padding_row() for _ in range(num_padding)]
        parts = [job.states.parts[0][: job.count] for job in jobs]
        size = num_padding, self._model.config.hidden_size
        padding = torch.zeros(size, dtype=self._model.dtype, device=self._device)
        x = self._runner.shard_tokens(torch.cat([*parts, padding]))
        groups, block_size = self._kv_cache.plan.layout.groups, self._kv_cache.block_size
        caches = self._kv_cache.layers(StepBlocks(planned, groups, block_size, self._device))
        inputs = self._make_inputs(planned)
        last = torch.tensor(counts, device=self._device).cumsum(0) - 1
        with small_batch_matmul(self._runner.limits):
            for depth, cache in enumerate(caches):
                tokens = self._select_tokens(jobs, depth, num_padding)
                x = self._model.mtp.layers[depth](x, tokens, replace(inputs, cache=cache))
                if samples:
                    hidden = self._runner.gather_tokens(x, num_tokens)
                    self._sample(jobs, self._model.head.logits(hidden[last]))

    def _select_tokens(self, jobs: Sequence[_MTPJob], depth: int, num_padding: int) -> Tensor:
        """Return the ids [t] that an MTP layer processes: `depth` + 1 positions later."""
        ids: list[int] = []
        for job in jobs:
            begin = job.states.start + 1 + depth
            ids += job.token_ids[begin : begin + job.count]
        return torch.tensor([*ids, *[0] * num_padding], device=self._device)

    def _make_inputs(self, rows: Sequence[PlannedRow]) -> LayerInputs:
        seq_params = seq_params_from_queries(
            [(row.count, row.start + row.count) for row in rows], device=self._device
        )
        model = self._model
        return model.relative.add_to(model.rotations.add_to(LayerInputs(seq_params)))

    def _sample(self, jobs: Sequence[_MTPJob], logits: Tensor) -> None:
        """Append a draft to each job."""
        rows = [job.make_sample_row() for job in jobs]
        sampled = sample_tokens(logits, rows, self._vocab)
        for job, result in zip(jobs, sampled, strict=True):
            job.is_sampling = job.is_sampling and result.error is None
            if job.is_sampling:
                job.drafts.append(result.token)
            # without a draft, later layers process any token; their drafts are not used
            job.token_ids.append(max(result.token, 0))

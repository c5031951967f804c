"""Executes the planned steps of the scheduler: one forward pass over the tokens of all rows."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.infer.adapters import AdapterManager
from megalith.infer.cache import PagedKVCache, StepBlocks
from megalith.infer.outputs import StepResults
from megalith.infer.pipeline import PipelineLink
from megalith.infer.suspend import DeviceMemory, list_weights
from megalith.infer.vocab_slice import VocabSlice
from megalith.kernels.cpu_threads import loops_of_any_size
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear_small_batch import (
    ALL_ROW_COUNTS,
    NO_ROW_COUNTS,
    SmallBatchLimits,
    small_batch_matmul,
)
from megalith.kernels.packed import seq_params_from_queries
from megalith.models.decoder import NOTHING_RECEIVED, Decoder, StageTensors
from megalith.parallel.collectives import all_gather
from megalith.parallel.group import SINGLE_RANK, Group, all_reduce_max_
from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.scheduler import PlannedRow, SequenceState, StepPlan
from megalith.plan.stages import HIDDEN

MAX_LOGIT_ROWS = 1024
"""Rows of hidden states that the output head projects at a time, to bound memory (heuristic)."""


class PromptOutputs(NamedTuple):
    """Sequences whose prompt logits or hidden states a step returns."""

    logits: frozenset[int] = frozenset()
    """Log-probs of the prompt are requested."""

    hidden: frozenset[int] = frozenset()
    """An embedding is requested, and no token."""


NO_PROMPT_OUTPUTS = PromptOutputs()


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits and hidden states of a step, in the dtype of the model."""

    rows: tuple[PlannedRow, ...]
    """The rows that sample, as they were executed, in the order of the plan."""

    next_token: Tensor
    """[n, v_local], the columns of `ModelRunner.vocab`: logits of the token after the last known
    one and after each draft, row after row; sequences in `PromptOutputs.hidden` have none."""

    prompt: Mapping[int, Tensor]
    """By sequence in `PromptOutputs.logits`: logits [k, v_local] of the prompt tokens after the k
    processed ones."""

    prompt_hidden: Mapping[int, Tensor]
    """By sequence in `PromptOutputs.hidden`: hidden states [k, h] of the k processed tokens after
    the final norm."""

    hidden: Tensor | None = None
    """[t, h]: hidden states of all tokens; None if rows were executed one by one."""


class ModelRunner:
    """Runs the model, or a pipeline stage of it, on this rank; every rank executes the same
    plans."""

    def __init__(
        self,
        model: Decoder,
        cache: PagedKVCache,
        *,
        limits: SmallBatchLimits = NO_ROW_COUNTS,
        link: PipelineLink | None = None,
        adapters: AdapterManager | None = None,
        expert_group: Group = SINGLE_RANK,
    ) -> None:
        """`limits`: numbers of rows for which matmuls use the small-batch kernel; all of them if
        results must not depend on the batch; `link`: to the other pipeline stages; `adapters`: of
        its requests; `expert_group`: ranks of this stage, if some have other requests and share
        experts."""
        self._expert_group = expert_group
        self.model, self.cache, self._link, self.adapters = model, cache, link, adapters
        self.num_stages = 1 if link is None else link.num_stages
        self.is_last_stage = model.stage.loss
        # with sequence parallelism a rank has a part of the tokens between layers
        self._num_token_shards = 1 if model.tp_comm.invariant else model.tp_comm.group.size
        self.limits = ALL_ROW_COUNTS if cache.batch_invariant else limits
        self._device = next(model.parameters()).device

    @property
    def vocab(self) -> VocabSlice:
        """The columns of the logits."""
        return VocabSlice.from_head(self.model.head)

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        states: Mapping[int, SequenceState],
        needs: PromptOutputs = NO_PROMPT_OUTPUTS,
    ) -> StepLogits | None:
        """Process the tokens of a plan. Keys and values are stored in the blocks of the plan. A
        pipeline stage receives the hidden states of the previous one; all but the last one send
        theirs to the next, and return None.

        A plan without rows is a dummy forward pass of padding, for the other ranks that share the
        experts."""
        self.cache.copy_blocks([(copy.source, copy.destination) for copy in plan.copies])
        try:
            with (
                small_batch_matmul(self.limits),
                # also of few tokens: faster than several torch operations in inference mode
                loops_of_any_size(True),
            ):
                tensors = self._forward(plan.rows, states)
                logits = None
                if self.is_last_stage:
                    hidden = self._gather_tokens(tensors[HIDDEN], plan.num_tokens)
                    logits = self._logits(hidden, plan.rows, states, needs)
        except BaseException:
            self.cache.commit_states(succeeded=False)
            raise
        self.cache.commit_states(succeeded=True)
        if self._link is not None and logits is None:
            self._link.send(tensors)
        return logits

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in the steps."""
        return self.num_stages > 1 or self.model.tp_comm.group.size > 1 or self.shares_experts

    @property
    def shares_experts(self) -> bool:
        """Whether ranks with other requests compute experts for this one."""
        return self._expert_group.size > 1

    def reduce_step_flags(self, *, is_busy: bool, has_rows: bool) -> tuple[bool, bool]:
        """Return whether any rank that shares experts with this one has unfinished requests, and
        whether any has rows in the next step, which then all execute. Collective."""
        if not self.shares_experts:
            return False, has_rows
        flags = all_reduce_max_(torch.tensor([int(is_busy), int(has_rows)]), self._expert_group)
        busy, rows = flags.tolist()
        return bool(busy), bool(rows)

    def is_any_rank_busy(self, is_busy: bool) -> bool:
        """Return whether this rank or one that shares experts with it is busy. Collective."""
        flag = torch.tensor([int(is_busy)])
        return bool(all_reduce_max_(flag, self._expert_group).item())

    def list_memory(self, allocator: BlockAllocator) -> DeviceMemory:
        """Return the tensors in device memory; `allocator`: of the blocks of the cache."""
        adapters = [] if self.adapters is None else self.adapters.list_tensors()
        weights = [*list_weights(self.model), *adapters]
        return DeviceMemory(weights, [(self.cache, allocator)], self.cache.list_states())

    def close(self) -> None:
        """Wait until everything is sent to other stages, before the process group is destroyed."""
        if self._link is not None:
            self._link.close()

    def send_results(self, results: StepResults) -> None:
        """Send the results of a step to the other pipeline stages; the last stage does."""
        if self._link is not None:
            self._link.send_results(results)

    def receive_results(self) -> StepResults:
        """Wait for the results of the oldest step whose results were not received."""
        assert self._link is not None, "one stage has its results"
        return self._link.receive_results()

    def _forward(
        self, rows: Sequence[PlannedRow], states: Mapping[int, SequenceState]
    ) -> StageTensors:
        """Return the outputs [t, h] of this stage for all tokens of the rows."""
        ids: list[int] = []
        for row in rows:
            ids += states[row.seq_id].token_ids[row.start : row.start + row.count]
            ids += row.draft_ids
        num_padding = self._count_padding(len(ids))
        padding = [self.cache.make_padding_row() for _ in range(num_padding)]
        ids += [0] * len(padding)
        padded_rows = [*rows, *padding]
        seq_params = seq_params_from_queries(
            [(row.count, row.start + row.count) for row in padded_rows],
            reach=[*(_rope_length(row, states[row.seq_id]) for row in rows), *(1 for _ in padding)],
            device=self._device,
        )
        groups = self.cache.plan.layout.groups
        step = StepBlocks(padded_rows, groups, self.cache.block_size, self._device)
        received = NOTHING_RECEIVED
        if self._link is not None:
            received = self._link.receive(len(ids) // self._num_token_shards)
        apply = nullcontext() if self.adapters is None else self.adapters.apply(rows, states)
        with apply:
            outputs: StageTensors = self.model(
                torch.tensor(ids, device=self._device),
                LayerInputs(seq_params),
                self.cache.layers(step),
                received=received,
            )
        return outputs

    def _count_padding(self, num_tokens: int) -> int:
        """Return how many tokens of padding follow the tokens of a step: with sequence parallelism
        all ranks have equally many, and at least one."""
        shards = self._num_token_shards
        return -(-max(num_tokens, 1) // shards) * shards - num_tokens

    def _gather_tokens(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Return the hidden states [num_tokens, h] of all ranks, without those of padding."""
        if self._num_token_shards > 1:
            hidden = all_gather(hidden, self.model.tp_comm.group)
        return hidden[:num_tokens]

    def _logits(
        self,
        hidden: Tensor,
        rows: Sequence[PlannedRow],
        states: Mapping[int, SequenceState],
        needs: PromptOutputs,
    ) -> StepLogits:
        last: list[int] = []
        prompt: dict[int, Tensor] = {}
        pooled: dict[int, Tensor] = {}
        first = 0
        for row in rows:
            if row.seq_id in needs.hidden:
                pooled[row.seq_id] = hidden[first : first + row.count]
            elif row.samples:
                last += range(first + row.count - 1 - len(row.draft_ids), first + row.count)
            # The logits after the last prompt token are those of the first generated token.
            num_prompt = states[row.seq_id].num_prompt_tokens - 1 - row.start
            count = min(row.count, num_prompt)
            if row.seq_id in needs.logits and count > 0:
                prompt[row.seq_id] = self._project(hidden[first : first + count])
            first += row.count
        sampling = tuple(row for row in rows if row.samples and row.seq_id not in needs.hidden)
        return StepLogits(sampling, self._project(hidden[last]), prompt, pooled, hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        """Return logits [k, v_local] of hidden states [k, h], some rows at a time."""
        parts = [self.model.head.logits(part) for part in hidden.split(MAX_LOGIT_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rope_length(row: PlannedRow, state: SequenceState) -> int:
    """Return the length that determines the rotary frequencies of a row's tokens.

    A sequence that is recomputed at a length (LongRoPE) has the frequencies of its current length;
    with dynamic NTK scaling a token keeps those of the length at which it was first processed.
    """
    if state.recompute_length is not None:
        return len(state.token_ids)  # that of drafts is not in another range of lengths
    return max(state.num_prompt_tokens, row.start + row.count)

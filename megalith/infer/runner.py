"""Executes the planned steps of the scheduler: one forward pass over the tokens of all rows."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.infer.adapters import AdapterManager
from megalith.infer.cache import PagedKVCache, StepBlocks
from megalith.infer.graphs import GraphPlan, StageOutputs, StepGraphs, StepInputs
from megalith.infer.kv_offload import HostBlockPool
from megalith.infer.outputs import StepResults
from megalith.infer.pipeline import PipelineLink
from megalith.infer.recorded_forward import MAX_TOKENS, RecordedForwards
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
from megalith.models.decoder import NOTHING_RECEIVED, CachedLayersRunner, Decoder
from megalith.parallel.group import SINGLE_RANK, Group, all_reduce_max_
from megalith.plan.serving.block_allocator import BlockAllocator, BlockCopy
from megalith.plan.serving.graph_buckets import BatchDimensions
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
        host_pool: HostBlockPool | None = None,
        graphs: GraphPlan | None = None,
        is_recorded: bool = True,
    ) -> None:
        """`limits`: numbers of rows for which matmuls use the small-batch kernel; all of them if
        results must not depend on the batch; `link`: to the other pipeline stages; `adapters`: of
        its requests; `expert_group`: ranks of this stage, if some have other requests and share
        experts; `host_pool`: blocks of the cache in host memory; `graphs`: steps that are
        replayed; `is_recorded`: record and repeat forward passes, on CPUs in one process."""
        self._expert_group = expert_group
        self.model, self.cache, self._link, self.adapters = model, cache, link, adapters
        self._host_pool = host_pool
        self.num_stages = 1 if link is None else link.num_stages
        self.is_last_stage = model.stage.loss
        # with sequence parallelism a rank has a part of the tokens between layers
        self._num_token_shards = 1 if model.tp_comm.invariant else model.tp_comm.group.size
        self.limits = ALL_ROW_COUNTS if cache.batch_invariant else limits
        self._device = next(model.parameters()).device
        self.recorded: RecordedForwards | None = None
        """Recorded forward passes; None: collectives and kernels on GPUs are not recorded."""
        if is_recorded and self._device.type == "cpu" and not self.is_distributed:
            self.recorded = RecordedForwards(list_weights(model))
        self.graphs: StepGraphs | None = None
        """Captured steps; None: all steps run eagerly."""
        if graphs is not None:
            self.graphs = StepGraphs(
                graphs, model, cache, self._compute, link=link, expert_group=expert_group
            )

    @property
    def vocab(self) -> VocabSlice:
        """The columns of the logits."""
        return VocabSlice.from_head(self.model.head)

    @property
    def num_host_blocks(self) -> int:
        """Number of blocks in host memory."""
        return 0 if self._host_pool is None else self._host_pool.num_blocks

    def transfer_blocks(self, plan: StepPlan) -> list[BlockCopy]:
        """Copy the blocks of a plan to and from host memory, before its forward pass. Returns the
        loads that failed on any rank of the model; collective if there are loads."""
        if self._host_pool is None:
            return []
        failed = self._host_pool.transfer(plan.offloads, plan.loads)
        groups = [self.model.tp_comm.group]
        if self._link is not None:
            groups.append(self._link.group)
        if not plan.loads or all(group.size == 1 for group in groups):
            return failed
        flags = torch.tensor([copy in failed for copy in plan.loads], dtype=torch.int32)
        for group in groups:
            all_reduce_max_(flags, group)
        return [copy for copy, flag in zip(plan.loads, flags.tolist(), strict=True) if flag]

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
            with self._use_small_batch_matmul():
                sampled = _find_sampled_tokens(plan.rows, needs)
                outputs = self._forward(plan.rows, states, sampled)
                logits = None
                if outputs.logits is not None:
                    logits = self._select_logits(outputs, plan.rows, states, needs)
        except BaseException:
            self.cache.commit_states(succeeded=False)
            raise
        self.cache.commit_states(succeeded=True)
        if self._link is not None and logits is None:
            self._link.send(outputs.tensors)
        return logits

    @property
    def planned_buckets(self) -> tuple[BatchDimensions, ...]:
        """The buckets that steps with prompts are planned for; none if such steps may run
        eagerly."""
        if self.graphs is None or not self.graphs.plan.gates_prefills:
            return ()
        return self.graphs.plan.buckets

    def describe_graphs(self) -> str:
        """Describe which steps are replayed."""
        if self.graphs is None:
            return "none" if self.recorded is None else f"recorded, up to {MAX_TOKENS} tokens"
        plan = self.graphs.plan
        largest = max(plan.buckets)
        return f"{plan.mode}, {len(plan.buckets)} buckets of up to {largest.num_tokens} tokens"

    def count_graph_steps(self) -> dict[str, dict[str, int]]:
        """Return the numbers of replayed steps by bucket and of other steps by reason."""
        if self.recorded is not None:
            return {"graph_steps": {"recorded": self.recorded.num_replays}}
        if self.graphs is None:
            return {}
        replays = {str(bucket): count for bucket, count in self.graphs.num_replays.items()}
        return {"graph_steps": replays, "eager_steps": dict(self.graphs.num_eager_steps)}

    def reset_graphs(self) -> None:
        """Drop captured and recorded steps, which hold addresses of weights and of the KV cache;
        later steps capture and record them again."""
        if self.graphs is not None:
            self.graphs.reset()
        if self.recorded is not None:
            self.recorded.reset()

    def capture_graphs(self) -> None:
        """Capture the steps that are replayed, if there are any that are not captured. Collective
        over the ranks of the model."""
        if self.graphs is not None and not self.graphs.is_captured:
            with self._use_small_batch_matmul():
                self.graphs.capture()

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
        return bool(self.reduce_max(int(is_busy)))

    def reduce_max(self, value: int) -> int:
        """Return the largest value of the ranks that share experts. Collective."""
        if not self.shares_experts:
            return value
        return int(all_reduce_max_(torch.tensor([value]), self._expert_group).item())

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

    @contextmanager
    def _use_small_batch_matmul(self) -> Iterator[None]:
        """Compute matmuls of few rows as `limits` says, inside a `with` block."""
        # compiled loops also of few tokens: faster than several torch operations in inference mode
        with small_batch_matmul(self.limits), loops_of_any_size(True):
            yield

    def _forward(
        self,
        rows: Sequence[PlannedRow],
        states: Mapping[int, SequenceState],
        sampled: Sequence[int],
    ) -> StageOutputs:
        """Return the outputs of this stage for all tokens of the rows, and on the last stage the
        logits of the tokens `sampled`; by a graph if there is one."""
        ids: list[int] = []
        for row in rows:
            ids += states[row.seq_id].token_ids[row.start : row.start + row.count]
            ids += row.draft_ids
        rope_lengths = [_rope_length(row, states[row.seq_id]) for row in rows]
        bucket = None if self.graphs is None else self.graphs.match(rows, states)
        if self.graphs is not None and bucket is not None:
            return self.graphs.run(bucket, rows, ids, sampled, rope_lengths)
        inputs = self._make_inputs(rows, ids, sampled, rope_lengths)
        inputs = inputs._replace(run_cached_layers=self._find_recordings(rows, states))
        apply = nullcontext() if self.adapters is None else self.adapters.apply(rows, states)
        with apply:
            outputs = self._compute(inputs)
        if outputs.hidden is None:
            return outputs
        return outputs._replace(hidden=outputs.hidden[: len(ids)])

    def _make_inputs(
        self,
        rows: Sequence[PlannedRow],
        ids: Sequence[int],
        sampled: Sequence[int],
        rope_lengths: Sequence[int],
    ) -> StepInputs:
        """Return the inputs of a step that runs eagerly."""
        num_padding = self.count_padding(len(ids))
        padding = [self.cache.make_padding_row() for _ in range(num_padding)]
        padded_rows = [*rows, *padding]
        seq_params = seq_params_from_queries(
            [(row.count, row.start + row.count) for row in padded_rows],
            reach=[*rope_lengths, *(1 for _ in padding)],
            device=self._device,
        )
        groups = self.cache.plan.layout.groups
        step = StepBlocks(padded_rows, groups, self.cache.block_size, self._device)
        num_tokens = len(ids) + num_padding
        received = NOTHING_RECEIVED
        if self._link is not None:
            received = self._link.receive(num_tokens // self._num_token_shards)
        return StepInputs(
            torch.tensor([*ids, *[0] * num_padding], device=self._device),
            LayerInputs(seq_params),
            self.cache.layers(step),
            received,
            torch.tensor(sampled, dtype=torch.int64, device=self._device),
        )

    def _find_recordings(
        self, rows: Sequence[PlannedRow], states: Mapping[int, SequenceState]
    ) -> CachedLayersRunner | None:
        """Return the recorded forward passes if they are those of the rows: without adapters."""
        if self.recorded is None or any(states[row.seq_id].adapter is not None for row in rows):
            return None
        return self.recorded.run

    def count_padding(self, num_tokens: int) -> int:
        """Return how many tokens of padding follow the tokens of a step: with sequence parallelism
        all ranks have equally many, and at least one."""
        shards = self._num_token_shards
        return -(-max(num_tokens, 1) // shards) * shards - num_tokens

    def gather_tokens(self, hidden: Tensor, num_tokens: int) -> Tensor:
        """Return the hidden states [num_tokens, h] of all ranks, without those of padding."""
        return self.model.tp_comm.prepare_input(hidden)[:num_tokens]

    def shard_tokens(self, hidden: Tensor) -> Tensor:
        """Return this rank's part of the hidden states [t, h] of all tokens and padding."""
        if self._num_token_shards == 1:
            return hidden
        return hidden.chunk(self._num_token_shards)[self.model.tp_comm.group.rank]

    def _compute(self, step: StepInputs) -> StageOutputs:
        """Run this stage on the tokens of a step, padding included; a graph captures it."""
        outputs = self.model(
            step.ids,
            step.inputs,
            step.caches,
            received=step.received,
            run_cached_layers=step.run_cached_layers,
        )
        if not self.is_last_stage:
            return StageOutputs(outputs)
        hidden = self.gather_tokens(outputs[HIDDEN], len(step.ids))
        return StageOutputs(outputs, hidden, self._project(hidden[step.sampled]))

    def _select_logits(
        self,
        outputs: StageOutputs,
        rows: Sequence[PlannedRow],
        states: Mapping[int, SequenceState],
        needs: PromptOutputs,
    ) -> StepLogits:
        """Return the outputs by sequence, with the logits of prompts if they are requested."""
        hidden, next_token = outputs.hidden, outputs.logits
        assert hidden is not None and next_token is not None, "the last stage has them"
        prompt: dict[int, Tensor] = {}
        pooled: dict[int, Tensor] = {}
        first = 0
        for row in rows:
            if row.seq_id in needs.hidden:
                pooled[row.seq_id] = hidden[first : first + row.count]
            # The logits after the last prompt token are those of the first generated token.
            num_prompt = states[row.seq_id].num_prompt_tokens - 1 - row.start
            count = min(row.count, num_prompt)
            if row.seq_id in needs.logits and count > 0:
                prompt[row.seq_id] = self._project(hidden[first : first + count])
            first += row.count
        sampling = tuple(row for row in rows if row.samples and row.seq_id not in needs.hidden)
        return StepLogits(sampling, next_token, prompt, pooled, hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        """Return logits [k, v_local] of hidden states [k, h], some rows at a time."""
        parts = [self.model.head.logits(part) for part in hidden.split(MAX_LOGIT_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _find_sampled_tokens(rows: Sequence[PlannedRow], needs: PromptOutputs) -> list[int]:
    """Return the tokens of a step after which one is sampled: the last known one of each row that
    samples, and its drafts."""
    sampled: list[int] = []
    first = 0
    for row in rows:
        if row.samples and row.seq_id not in needs.hidden:
            sampled += range(first + row.count - 1 - len(row.draft_ids), first + row.count)
        first += row.count
    return sampled


def _rope_length(row: PlannedRow, state: SequenceState) -> int:
    """Return the length that determines the rotary frequencies of a row's tokens.

    A sequence that is recomputed at a length (LongRoPE) has the frequencies of its current length;
    with dynamic NTK scaling a token keeps those of the length at which it was first processed.
    """
    if state.recompute_length is not None:
        return len(state.token_ids)  # that of drafts is not in another range of lengths
    return max(state.num_prompt_tokens, row.start + row.count)

"""Planted faults of the engine are caught by the comparison with one forward pass."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.infer import requests, step_results
from megalith.infer import runner as runner_module
from megalith.infer.engine import InferenceEngine
from megalith.infer.logprobs import prompt_logprobs
from megalith.infer.outputs import PromptLogprobs
from megalith.infer.requests import Request, RequestChoice
from megalith.infer.runner import PromptOutputs
from megalith.infer.sample import TokenCounts
from megalith.infer.step_execution import StepExecutor
from megalith.infer.vocab_slice import VocabSlice
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.plan.serving.kv_cache_manager import KVCacheManager
from megalith.plan.serving.scheduler import Scheduler, StepPlan
from tests.infer.engines import (
    SAMPLED,
    ReferenceProposer,
    build,
    check_logprobs,
    count_accepted,
    run,
)

Plant = Callable[[pytest.MonkeyPatch], None]


def check_engine(model: Decoder) -> None:
    """Chunked prompts, prefix hits, preemption and prompt log-probs, each at least once."""
    shared = [3 * number % 37 for number in range(20)]
    scored = replace(SAMPLED, prompt_logprobs=0, seed=3)
    requests: list[tuple[list[int], SamplingParams]] = [
        (shared, SAMPLED),
        ([*shared, 7, 8], SAMPLED),
        ([5, *shared], scored),
        ([9, *shared[:11]], scored),
        ([4, 2], replace(SAMPLED, n=2)),
    ]
    engine = build(
        model,
        num_blocks=22,
        max_model_len=64,
        max_num_batched_tokens=9,
        max_num_seqs=6,
        min_prefill_chunk_tokens=1,
    )
    outputs = run(engine, requests, {1: 6, 3: 2})
    for output, (_, params) in zip(outputs, requests, strict=True):
        assert [len(one.token_ids) for one in output.outputs] == [20] * params.n
        check_logprobs(model, output)
    assert sum(output.num_preemptions for output in outputs if output.prompt_logprobs) > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0


def emit_token_of_a_middle_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 9."""
    schedule = Scheduler.schedule

    def planted(self: Scheduler, **options: Any) -> StepPlan:
        plan = schedule(self, **options)
        rows = tuple(replace(row, samples=True) for row in plan.rows)
        self._plan = replace(plan, rows=rows)
        return self._plan

    monkeypatch.setattr(Scheduler, "schedule", planted)


def restart_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 10: after a prefix hit, a chunk or a preemption."""
    plain = runner_module.seq_params_from_queries

    def planted(lengths: list[tuple[int, int]], **options: Any) -> PackedSeqParams:
        seq_params = plain(lengths, **options)
        positions = torch.cat([torch.arange(queries) for queries, _ in lengths])
        return replace(seq_params, position_ids=positions)

    monkeypatch.setattr(runner_module, "seq_params_from_queries", planted)


def repeat_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 18: those of a preempted request are added again."""

    def compute(
        plan: StepPlan, choice: RequestChoice, logits: torch.Tensor, vocab: VocabSlice
    ) -> PromptLogprobs:
        start = next(row.start for row in plan.rows if row.seq_id == choice.state.seq_id)
        prompt = choice.request.output.prompt_token_ids
        next_tokens = prompt[start + 1 : start + 1 + len(logits)]
        return PromptLogprobs(start, prompt_logprobs(logits, next_tokens, 0, vocab))

    def add(self: InferenceEngine, request: Request, prompt: PromptLogprobs) -> list[Any]:
        assert request.output.prompt_logprobs is not None
        request.output.prompt_logprobs += prompt.values
        return []

    def always(self: StepExecutor, plan: StepPlan) -> PromptOutputs:
        states = {row.seq_id: self._choices[row.seq_id] for row in plan.rows}
        logits = frozenset(n for n, one in states.items() if not one.state.reads_prefix_cache)
        return PromptOutputs(logits)

    monkeypatch.setattr(step_results, "_compute_prompt", compute)
    monkeypatch.setattr(InferenceEngine, "_add_prompt_logprobs", add)
    monkeypatch.setattr(StepExecutor, "find_prompt_outputs", always)


def score_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 17: prompt log-probs of a chunk are those of the row after."""

    def planted(logits: torch.Tensor, *rest: Any, **options: Any) -> list[Any]:
        return prompt_logprobs(logits.roll(-1, 0), *rest, **options)

    monkeypatch.setattr(step_results, "prompt_logprobs", planted)


def lose_a_token_in_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 18: a preempted sequence is prefilled without its last token."""
    preempt = Scheduler._preempt

    def planted(self: Scheduler, state: Any) -> None:
        preempt(self, state)
        if len(state.token_ids) > state.num_prompt_tokens:
            state.token_ids.pop()

    monkeypatch.setattr(Scheduler, "_preempt", planted)


def key_noise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 13, in the engine: all choices of a request have the noise of the first."""
    row = requests.SampleRow
    monkeypatch.setattr(requests, "SampleRow", lambda **fields: row(**fields | {"choice": 0}))


def check_choices(model: Decoder) -> None:
    """Choices of one prompt differ."""
    (output,) = run(build(model), [([4, 2], replace(SAMPLED, n=3))])
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3


def check_drafts(model: Decoder) -> None:
    """Accepted and rejected drafts, with penalties, in blocks of 3 tokens."""
    params = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.4)
    requests = [([3, 1, number], replace(params, seed=number)) for number in range(3)]
    reference = run(build(model), requests)
    engine = build(model, proposer=ReferenceProposer(reference), block_size=3)
    outputs = run(engine, requests)
    for output, expected in zip(outputs, reference, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        check_logprobs(model, output)
    num_drafts, num_accepted = count_accepted(engine)
    assert 0 < num_accepted < num_drafts


def count_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 15: penalties count rejected drafts."""

    def planted(self: TokenCounts, draft_ids: list[int]) -> TokenCounts:
        self._add(draft_ids)
        self.num_output -= len(draft_ids)
        copy = TokenCounts(self.ids)
        copy._counts[: len(self._slots)] = self.output_counts
        copy.num_output = self.num_output + len(draft_ids)
        return copy

    monkeypatch.setattr(TokenCounts, "with_drafts", planted)


def keep_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 16: the cached length is that of all drafts."""
    complete = Scheduler.complete

    def planted(self: Scheduler, plan: StepPlan) -> None:
        complete(self, plan)
        for row in plan.rows:
            if row.draft_ids:
                self._states[row.seq_id].num_computed_tokens = row.start + row.count

    monkeypatch.setattr(Scheduler, "complete", planted)


def check_weight_update(model: Decoder) -> None:
    """Requests after an update reuse no keys and values of the old weights: neither those of
    finished requests, nor of one in flight that keeps its KV cache."""
    prompts = [list(range(1, 14)), list(range(20, 33))]
    new = {
        spec.shard.name: getattr(module, name).detach().reshape(spec.shard.shape) * 0.8
        for spec, module, name in iter_parameter_specs(model)
    }
    # chunks of 3 tokens, so that the first block of the running request is not full
    engine = build(model, max_num_batched_tokens=3, max_num_seqs=2, min_prefill_chunk_tokens=1)
    run(engine, [(prompts[0], SAMPLED)])
    engine.add_request(prompts[1], SAMPLED)
    engine.step()
    engine.update_weights(new, mode="keep")
    while engine.has_unfinished:
        engine.step()
    for output in run(engine, [(prompt, SAMPLED) for prompt in prompts]):
        assert output.num_cached_tokens == 0
        check_logprobs(model, output)


def keep_the_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: after a weight update."""
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self: None)


def register_old_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 24: blocks of a running sequence enter the prefix cache after a weight update."""
    reset = KVCacheManager.reset_prefix_cache
    monkeypatch.setattr(KVCacheManager, "reset_prefix_cache", lambda self, running: reset(self, ()))


FAULTS: dict[str, tuple[Plant, Callable[[Decoder], None]]] = {
    "token of a middle chunk emitted": (emit_token_of_a_middle_chunk, check_engine),
    "position restarted": (restart_positions, check_engine),
    "prompt log-probs duplicated by preemption": (repeat_prompt_logprobs, check_engine),
    "prompt log-probs of the next row": (score_the_next_row, check_engine),
    "token lost in a preemption": (lose_a_token_in_a_preemption, check_engine),
    "noise of the first choice": (key_noise_by_row, check_choices),
    "penalties count rejected drafts": (count_rejected_drafts, check_drafts),
    "cached length of rejected drafts": (keep_rejected_drafts, check_drafts),
    "prefix cache kept after a weight update": (keep_the_prefix_cache, check_weight_update),
    "old blocks registered after a weight update": (register_old_blocks, check_weight_update),
}


@pytest.mark.parametrize("check", [check_engine, check_choices, check_drafts, check_weight_update])
def test_without_a_fault_the_checks_pass(
    check: Callable[[Decoder], None], tiny: SimpleNamespace
) -> None:
    check(tiny.model(tiny.config(), dtype=torch.float64))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(
    fault: str, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, check = FAULTS[fault]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tiny.model(tiny.config(), dtype=torch.float64))

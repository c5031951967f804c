"""Engines of tiny models, and the forward pass without a cache that they must agree with."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig
from megalith.config.serve import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    KVCacheDtype,
    SpeculationConfig,
)
from megalith.infer.build import build_speculator, plan_draft_cache
from megalith.infer.cache import (
    CachePlan,
    PagedKVCache,
    StepBlocks,
    plan_cache,
    plan_pool,
    token_groups,
)
from megalith.infer.engine import InferenceEngine
from megalith.infer.graphs import plan_graphs
from megalith.infer.kv_offload import HostBlockPool
from megalith.infer.load import TextGenerator
from megalith.infer.outputs import EngineCallback, RequestOutput
from megalith.infer.pipeline import PipelineLink
from megalith.infer.refit import WeightUpdater
from megalith.infer.runner import ModelRunner
from megalith.infer.speculative import (
    DraftLengthController,
    DraftProposer,
    DraftRow,
    Speculator,
    check_speculation,
)
from megalith.infer.suspend import DeviceMemory
from megalith.infer.vocab_slice import VocabSlice
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from megalith.parallel.group import SINGLE_RANK, Group, single_rank_group
from megalith.plan.serving.cache_layout import AttentionView, plan_cache_layout
from megalith.plan.serving.scheduler import PlannedRow

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)
MAX_DRAFT_TOKENS = 5
SAMPLED = SamplingParams(max_new_tokens=20, seed=7, logprobs=0)


def whole_vocab(size: int) -> VocabSlice:
    """Return the vocabulary of one process."""
    return VocabSlice(single_rank_group("tp"), 0, size, size)


def build(
    model: Decoder,
    *,
    block_size: int = 4,
    num_blocks: int | None = None,
    num_host_blocks: int = 0,
    eos: frozenset[int] = frozenset(),
    prefix_caching: bool = True,
    cache_dtype: KVCacheDtype = "auto",
    tokenizer: Any = None,
    speculation: str = "none",
    proposer: DraftProposer | None = None,
    draft_model: Decoder | None = None,
    draft_config: ModelConfig | None = None,
    link: PipelineLink | None = None,
    expert_group: Group = SINGLE_RANK,
    dp: Group = SINGLE_RANK,
    callbacks: Sequence[EngineCallback] = (),
    replicate_kv_heads: bool = False,
    graphs: GraphConfig | None = None,
    updater: WeightUpdater | None = None,
    **engine: Any,
) -> InferenceEngine:
    """Return an engine of a model; `speculation`: source of draft tokens, or `proposer`, or
    `draft_model`, of which pipeline stages before the last one have the `draft_config`; `link`: to
    the other pipeline stages; `expert_group`: ranks that share experts; `dp`:
    data-parallel ranks;
    `replicate_kv_heads`: of the parallel layout; `updater`: of the weights; `engine`: fields of
    EngineConfig."""
    cache = CacheConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        dtype=cache_dtype,
    )
    if draft_model is not None:
        draft_config = draft_model.config
    method: Any = speculation if draft_config is None else "draft_model"
    drafts = SpeculationConfig(method=method)
    config = EngineConfig(cache=cache, speculation=drafts, graphs=graphs or GraphConfig(), **engine)
    tp = model.tp_comm.group.size
    plan = plan_cache(
        model.config,
        tp=tp,
        element_size=model.dtype.itemsize,
        dtype=config.cache.dtype,
        replicate_kv_heads=replicate_kv_heads,
        layers=model.stage.layers,
    )
    # as many blocks on all stages
    size = plan_pool(model.config, config, replace(plan, bytes_per_token=64), free_bytes=1 << 26)
    graph_plan = plan_graphs(
        config,
        model,
        plan,
        max_model_len=size.max_model_len,
        num_drafts=0 if method == "none" and proposer is None else MAX_DRAFT_TOKENS,
        expert_group=expert_group,
    )
    pool = PagedKVCache(
        plan,
        num_blocks=size.num_blocks,
        block_size=block_size,
        batch_invariant=config.batch_invariant,
        has_padding=graph_plan is not None or not model.tp_comm.invariant or expert_group.size > 1,
        groups=token_groups(model),
    )
    check_speculation(config, plan)
    host_pool = HostBlockPool(pool, num_host_blocks, CPU) if num_host_blocks else None
    runner = ModelRunner(
        model,
        pool,
        link=link,
        expert_group=expert_group,
        host_pool=host_pool,
        graphs=graph_plan,
        is_recorded=config.graphs.mode in ("auto", "recorded"),
    )
    generator = TextGenerator(
        model,
        tokenizer,
        eos,
        draft_model=draft_model,
        draft_config=draft_config,
        expert_group=expert_group,
        replicate_kv_heads=replicate_kv_heads,
    )
    speculator = build_speculator(generator, config, runner, plan_draft_cache(generator, config))
    lengths = DraftLengthController(MAX_DRAFT_TOKENS, measures_time=False)
    if speculator is not None:  # the number of drafts does not depend on measured times
        speculator.lengths = lengths
    if proposer is not None:
        speculator = Speculator(proposer, lengths)
    return InferenceEngine(
        runner,
        config,
        max_model_len=size.max_model_len,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        speculator=speculator,
        dp=dp,
        callbacks=callbacks,
        updater=updater,
    )


class ReferenceProposer:
    """Proposes the tokens of a run without drafts, sometimes with a wrong one."""

    def __init__(self, outputs: Sequence[RequestOutput], *, seed: int = 0) -> None:
        self._texts = {
            (tuple(output.prompt_token_ids), completion.index, completion.token_ids[0]): completion
            for output in outputs
            for completion in output.outputs
            if completion.token_ids
        }
        self._draw = random.Random(seed)

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return the next tokens of each reference."""
        return [self._propose_row(row) for row in rows]

    def observe(self, rows: Sequence[PlannedRow], hidden: Tensor) -> None:
        """Hidden states are not used."""

    def release(self, seq_id: int) -> None:
        """Nothing is stored."""

    def list_memory(self) -> DeviceMemory:
        """Return no tensors."""
        return DeviceMemory()

    def _propose_row(self, row: DraftRow) -> list[int]:
        sample_row = row.make_sample_row(())
        key = (tuple(sample_row.prompt_ids), sample_row.choice, sample_row.output_ids[0])
        text, num_output = self._texts[key].token_ids, len(sample_row.output_ids)
        drafts = text[num_output : num_output + self._draw.randint(1, row.num_drafts)]
        if drafts and self._draw.random() < 0.4:
            wrong = self._draw.randrange(len(drafts))
            drafts[wrong] = (drafts[wrong] + 1) % 7
        return drafts


def count_accepted(engine: InferenceEngine) -> tuple[int, int]:
    """Return the numbers of draft tokens and of accepted ones."""
    stats = engine.scheduler.make_stats()
    return stats.num_draft_tokens, stats.num_accepted_tokens


def run(
    engine: InferenceEngine,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    arrivals: Mapping[int, int] | None = None,
    adapters: Sequence[str | None] | None = None,
) -> list[RequestOutput]:
    """Run requests to their end; request i arrives before step `arrivals[i]`, by default 0, and has
    the adapter `adapters[i]`, by default none."""
    arrivals, adapters = arrivals or {}, adapters or [None] * len(requests)
    results: dict[int, RequestOutput] = {}
    step = 0
    while len(results) < len(requests) or engine.has_unfinished:
        for index, (prompt, params) in enumerate(requests):
            if index not in results and arrivals.get(index, 0) <= step:
                number = engine.add_request(prompt, params, adapter=adapters[index])
                results[index] = engine.output_of(number)
        engine.step()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return [results[index] for index in range(len(requests))]


@torch.no_grad()
def forward_logprobs(
    model: Decoder, ids: Sequence[int], caches: Sequence[LayerCache] | None = None
) -> Tensor:
    """Log-probs [t, v] after each token, from one forward pass over the sequence; `caches`: of each
    attention."""
    inputs = LayerInputs(seq_params_from_rows(1, len(ids)))
    hidden = model.hidden_states(torch.tensor(list(ids)), inputs, caches)
    return model.head.logits(hidden).log_softmax(-1)


def check_logprobs(
    model: Decoder,
    output: RequestOutput,
    *,
    tolerance: float = 1e-9,
    by_prefix: bool = False,
    forward: Callable[[Decoder, Sequence[int]], Tensor] = forward_logprobs,
) -> None:
    """Check that the log-prob of every generated token, and of every prompt token if requested, is
    that of one forward pass over the whole sequence; `by_prefix`: over the tokens before it, for
    rotary frequencies that depend on the length; `forward`: returns the log-probs."""
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        ids = [*prompt, *completion.token_ids]
        expected = forward(model, ids)
        if by_prefix:
            rows = [forward(model, ids[: end + 1])[end] for end in range(len(ids))]
            expected = torch.stack(rows)
        assert len(completion.logprobs) == len(completion.token_ids)
        for index, (token, logprobs) in enumerate(
            zip(completion.token_ids, completion.logprobs, strict=True)
        ):
            value = float(expected[len(prompt) - 1 + index, token])
            assert abs(value - logprobs.logprob) <= tolerance, (index, value, logprobs.logprob)
        if output.prompt_logprobs is not None:
            assert [one.token for one in output.prompt_logprobs] == prompt[1:]
            for index, one in enumerate(output.prompt_logprobs):
                assert abs(float(expected[index, one.token]) - one.logprob) <= tolerance


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """Return the parameters with a seed."""
    return replace(params, seed=seed)


class SequenceCache:
    """Paged cache of one sequence whose steps a test makes itself."""

    def __init__(self, views: Sequence[AttentionView | None], *, block_size: int = 4) -> None:
        layout = plan_cache_layout([view for view in views if view is not None])
        remaining = iter(layout.slots)
        slots = tuple(None if view is None else next(remaining) for view in views)
        plan = CachePlan(layout, slots, bytes_per_token=0, has_states=True)
        self._num_blocks = 16
        self._cache = PagedKVCache(
            plan, num_blocks=self._num_blocks * len(layout.groups), block_size=block_size
        )

    def layers(self, start: int, count: int) -> list[LayerCache]:
        """Return the layer caches of a step over `count` tokens after the first `start`."""
        self._cache.commit_states(succeeded=True)  # of the previous step
        groups, size = self._cache.plan.layout.groups, self._num_blocks
        tables = [
            list(range(group * size, (group + 1) * size))[::-1] for group in range(len(groups))
        ]
        row = PlannedRow(0, start, count, samples=True, block_tables=tables)
        blocks = StepBlocks([row], groups, self._cache.block_size, torch.device("cpu"))
        return self._cache.layers(blocks)

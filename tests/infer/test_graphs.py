"""Model steps that are replayed from fixed buffers, padded to a bucket, compute what they compute
eagerly."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import KernelsConfig
from megalith.config.model import MLAConfig, ModelConfig, RelativeConfig, RopeConfig
from megalith.config.moe import MoEConfig
from megalith.config.serve import (
    EngineConfig,
    GraphConfig,
    InferenceParallelConfig,
    engine_problems,
)
from megalith.errors import ConfigError
from megalith.infer.cache import PagedKVCache, plan_cache, token_groups
from megalith.infer.engine import InferenceEngine
from megalith.infer.graphs import (
    GraphPlan,
    StaticReplay,
    StepBuffers,
    StepGraphs,
    find_experts_limitation,
    plan_graphs,
)
from megalith.infer.layout import generation_layout
from megalith.infer.load import connect_stages, find_expert_group
from megalith.infer.quantize import build_int8_grouped_matmul_ops
from megalith.infer.runner import ModelRunner, PromptOutputs, StepLogits
from megalith.kernels.linear_small_batch import ALL_ROW_COUNTS, NO_ROW_COUNTS
from megalith.models.decoder import Decoder
from megalith.nn.moe import Router
from megalith.parallel.collectives import PROCESS_GROUP
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import model_grid
from megalith.plan.serving.graph_buckets import (
    BatchDimensions,
    BatchLimits,
    BucketPolicy,
    Prefills,
    plan_graph_buckets,
)
from megalith.plan.serving.scheduler import PlannedRow, SequenceState, StepPlan
from megalith.testing.ranks import run_ranks
from tests.infer.engines import (
    GREEDY,
    SAMPLED,
    ReferenceProposer,
    build,
    check_logprobs,
    count_accepted,
    run,
)
from tests.infer.test_engine import KINDS, LONG, random_requests, tokens_of
from tests.infer.test_parallel_layouts import EXPERTS, SETTINGS
from tests.infer.test_pipeline import make_requests, values_of

STATIC = GraphConfig(mode="static_replay")


def mark_slow(kinds: Sequence[str], quick: Sequence[str]) -> list[Any]:
    """Test cases of which only some are quick."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in kinds]


REPLAYED_KINDS = [name for name in KINDS if name != "relative"]
LIMITS = BatchLimits(max_rows=6, max_tokens=16, max_model_len=64, num_drafts=2)
BLOCK_SIZE, NUM_BLOCKS = 4, 64


def graphs_of(runner: ModelRunner) -> StepGraphs:
    assert runner.graphs is not None
    return runner.graphs


# --- single steps of two runners with equal caches


def make_runner(
    model: Decoder, buckets: Sequence[BatchDimensions] | None, limits: BatchLimits = LIMITS
) -> ModelRunner:
    """A runner, which replays steps of the buckets, or none."""
    plan = plan_cache(model.config, tp=1, element_size=model.dtype.itemsize)
    cache = PagedKVCache(
        plan,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        has_padding=True,
        groups=token_groups(model),
    )
    graphs = None
    if buckets is not None:
        graphs = GraphPlan("static_replay", tuple(buckets), limits)
    is_compiled = model.dtype == torch.float32
    small = ALL_ROW_COUNTS if is_compiled else NO_ROW_COUNTS
    return ModelRunner(model, cache, limits=small, graphs=graphs)


def draw_step(
    draw: random.Random, batch: BatchDimensions, num_groups: int, vocab: int
) -> tuple[StepPlan, dict[int, SequenceState]]:
    """A step of these dimensions, of sequences with some tokens in the cache."""
    free = list(range(NUM_BLOCKS))
    draw.shuffle(free)
    num_extra = batch.num_tokens - batch.num_rows
    rows, states = [], {}
    for number in range(batch.num_rows):
        is_decode = number < batch.num_decodes
        count = 1
        if num_extra:
            is_last = number == batch.num_rows - 1
            limit = min(num_extra, LIMITS.num_drafts) if is_decode else num_extra
            extra = (
                limit
                if is_last or (not is_decode and draw.random() < 0.5)
                else draw.randint(0, limit)
            )
            count, num_extra = 1 + extra, num_extra - extra
        start = draw.randint(1, 12)
        num_blocks = -(-(start + count) // BLOCK_SIZE)
        tables = [[free.pop() for _ in range(num_blocks)] for _ in range(num_groups)]
        drafts = tuple(draw.randrange(vocab) for _ in range(count - 1)) if is_decode else ()
        known = start + count - len(drafts)
        # a prompt that ends with this chunk samples, another one does not
        samples = is_decode or (count > 1 and draw.random() < 0.5)
        tokens = [draw.randrange(vocab) for _ in range(known + (not samples))]
        rows.append(PlannedRow(number, start, count, samples, tables, drafts))
        num_prompt = known - 1 if is_decode else len(tokens)
        states[number] = SequenceState(
            seq_id=number, token_ids=tokens, num_prompt_tokens=num_prompt
        )
    return StepPlan(tuple(rows), (), ()), states


@torch.inference_mode()
def fill_caches(runners: Sequence[ModelRunner], seed: int) -> None:
    """Fill the blocks of all runners with the same keys and values."""
    for runner in runners:
        generator = torch.Generator().manual_seed(seed)
        for tensor in runner.cache.tensors.values():
            tensor.normal_(generator=generator)


def compare_steps(actual: StepLogits | None, expected: StepLogits | None) -> None:
    assert actual is not None and expected is not None
    assert actual.rows == expected.rows
    assert expected.hidden is not None and actual.hidden is not None
    torch.testing.assert_close(actual.hidden, expected.hidden, rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.next_token, expected.next_token, rtol=0, atol=1e-9)
    assert actual.prompt.keys() == expected.prompt.keys()
    for number, logits in expected.prompt.items():
        torch.testing.assert_close(actual.prompt[number], logits, rtol=0, atol=1e-9)


def largest_batches(bucket: BatchDimensions, draw: random.Random) -> list[BatchDimensions]:
    """The batch that fills a bucket, and a smaller one that needs padding."""
    num_prefills, num_decodes = bucket.num_prefills, bucket.num_decodes
    if num_prefills:
        num_prefills = draw.randint(1, num_prefills)
    num_decodes = draw.randint(0 if num_prefills else 1, num_decodes) if num_decodes else 0
    most = num_decodes * (LIMITS.num_drafts + 1) + num_prefills * 12
    fewest = num_prefills + num_decodes
    num_tokens = draw.randint(fewest, min(bucket.num_tokens, most))
    return [bucket, BatchDimensions(num_tokens, num_prefills, num_decodes)]


@pytest.mark.parametrize(
    "kind", mark_slow(REPLAYED_KINDS, ["window with sinks and softcap", "MLA", "experts"])
)
def test_steps_of_every_bucket_equal_eager_steps(kind: str, tiny: SimpleNamespace) -> None:
    """Also the logits of prompts; and the keys and values of all blocks but that of padding."""
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64).eval()
    prefills: Prefills = "none" if kind == "MLA" else "all"
    buckets = plan_graph_buckets(LIMITS, BucketPolicy(prefills=prefills, num_buckets=2))
    eager, replayed = make_runner(model, None), make_runner(model, buckets)
    graphs_of(replayed).capture()
    num_groups, draw = len(eager.cache.plan.layout.groups), random.Random(len(kind))
    plan, states = draw_step(draw, buckets[0], num_groups, 37)
    eager.execute(plan, states)  # allocates its blocks
    used = set[BatchDimensions]()
    for number, bucket in enumerate(buckets):
        for batch in largest_batches(bucket, draw):
            plan, states = draw_step(draw, batch, num_groups, 37)
            fill_caches((eager, replayed), number)
            needs = PromptOutputs(logits=frozenset(row.seq_id for row in plan.rows))
            compare_steps(replayed.execute(plan, states, needs), eager.execute(plan, states, needs))
            used |= graphs_of(replayed).num_replays.keys()
            for name, blocks in eager.cache.tensors.items():
                stored = replayed.cache.tensors[name][:NUM_BLOCKS]
                torch.testing.assert_close(stored, blocks[:NUM_BLOCKS], rtol=0, atol=1e-9)
    assert used == set(buckets) and not graphs_of(replayed).num_eager_steps


def test_bits_do_not_depend_on_the_padding(tiny: SimpleNamespace) -> None:
    """With matmuls whose rows do not depend on each other, of the same rows in several buckets."""
    model = tiny.model(tiny.config(hidden_size=24)).eval()
    batch = BatchDimensions(3, 0, 2)
    sizes = [BatchDimensions(tokens, 0, rows) for tokens, rows in ((3, 2), (6, 2), (18, 6))]
    results = []
    for bucket in sizes:
        runner = make_runner(model, [bucket])
        graphs_of(runner).capture()
        fill_caches([runner], 0)
        plan, states = draw_step(random.Random(1), batch, 1, 37)
        results.append(runner.execute(plan, states))
        assert graphs_of(runner).num_replays == {bucket: 1}
    for result in results[1:]:
        assert result is not None and results[0] is not None
        assert torch.equal(result.next_token, results[0].next_token)


def test_padding_does_not_change_the_experts_of_tokens(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding is not valid, so that statistics of experts do not count it."""
    model = tiny.model(tiny.config(moe=EXPERTS), dtype=torch.float64).eval()
    eager, replayed = make_runner(model, None), make_runner(model, [BatchDimensions(12, 0, 4)])
    graphs_of(replayed).capture()
    counts: list[Tensor] = []
    forward = Router.forward

    def record(router: Router, x: Tensor, inputs: Any) -> Any:
        choice = forward(router, x, inputs)
        chosen = choice.experts[inputs.seq_params.valid].flatten()
        counts.append(torch.bincount(chosen, minlength=EXPERTS.num_experts))
        return choice

    monkeypatch.setattr(Router, "forward", record)
    plan, states = draw_step(random.Random(3), BatchDimensions(5, 0, 3), 1, 37)
    eager.execute(plan, states)
    fill_caches((eager, replayed), 0)
    counts.clear()
    compare_steps(replayed.execute(plan, states), eager.execute(plan, states))
    num_layers = len(counts) // 2
    assert num_layers == 2
    for ours, expected in zip(counts[:num_layers], counts[num_layers:], strict=True):
        assert torch.equal(ours, expected)
        assert int(ours.sum()) == 5 * EXPERTS.top_k


# --- engines


@pytest.mark.parametrize("kind", mark_slow(REPLAYED_KINDS, ["full", "MLA"]))
def test_an_engine_with_replayed_steps_generates_the_same(kind: str, tiny: SimpleNamespace) -> None:
    """With prefix hits, drafts, preemptions, several choices and log-probs of prompts."""
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64).eval()
    requests = random_requests(len(kind), 37, count=6)
    settings: dict[str, Any] = {
        "max_model_len": 64,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 5,
        "num_blocks": 40,
    }
    expected = run(build(model, **settings), requests, {3: 4})
    prefills: Prefills = "none" if kind == "MLA" else "all"
    graphs = replace(STATIC, prefills=prefills, num_buckets=3)
    engine = build(model, graphs=graphs, proposer=ReferenceProposer(expected), **settings)
    outputs = run(engine, requests, {3: 4})
    assert tokens_of(outputs) == tokens_of(expected)
    for output in outputs:
        check_logprobs(model, output)
    steps = graphs_of(engine.runner)
    assert len(steps.num_replays) > 1
    assert set(steps.num_eager_steps) == (set() if prefills == "all" else {"prefill"})
    drafted, accepted = count_accepted(engine)
    assert 0 < accepted < drafted


def test_ngram_drafts_are_verified_in_replayed_steps(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(init_std=0.1), dtype=torch.float64).eval()
    request = [([3, 1, 4, 1, 5] * 4, replace(GREEDY, logprobs=0))]
    expected = run(build(model), request)
    engine = build(model, graphs=STATIC, speculation="ngram", max_num_seqs=2)
    outputs = run(engine, request)
    assert tokens_of(outputs) == tokens_of(expected)
    assert count_accepted(engine)[1] > 0
    assert max(graphs_of(engine.runner).num_replays).num_tokens > 1


def test_longrope_and_dynamic_frequencies_are_written_before_a_replay(
    tiny: SimpleNamespace,
) -> None:
    """They depend on the length of each row, which differs from step to step."""
    dynamic = RopeConfig(scaling="dynamic", factor=4.0, original_max_position=6)
    for rope in (dynamic, LONG):
        model = tiny.model(tiny.config(rope=rope, head_dim=4), dtype=torch.float64).eval()
        requests = [(list(range(1, 12)), SAMPLED), ([4, 2], SAMPLED)]
        expected = run(build(model), requests)
        engine = build(model, graphs=replace(STATIC, prefills="all"), max_num_seqs=4)
        outputs = run(engine, requests)
        assert tokens_of(outputs) == tokens_of(expected)
        assert not graphs_of(engine.runner).num_eager_steps
        for output in outputs:
            if rope is LONG:
                check_logprobs(model, output, by_prefix=True)


def test_weights_are_updated_below_captured_steps(tiny: SimpleNamespace) -> None:
    old, new = (tiny.model(tiny.config(), dtype=torch.float64).eval() for _ in range(2))
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(0.8)
    requests = [([5, 17, 36], SAMPLED)]
    expected = run(build(new), requests)
    engine = build(old, graphs=STATIC, max_num_seqs=2)
    assert tokens_of(run(engine, requests)) != tokens_of(expected)
    with torch.no_grad():
        for weight, new_weight in zip(old.parameters(), new.parameters(), strict=True):
            weight.copy_(new_weight)
    engine.scheduler.reset_prefix_cache()
    assert tokens_of(run(engine, requests)) == tokens_of(expected)


# --- planned faults: what a graph would compute wrongly is detected


def reallocate_weight(engine: InferenceEngine) -> None:
    weight = next(engine.runner.model.parameters())
    weight.data = weight.data.clone()


def reallocate_blocks(engine: InferenceEngine) -> None:
    pool = engine.runner.cache._pool
    for name, blocks in pool.items():
        pool[name] = blocks._replace(data=blocks.data.clone())


def reallocate_rope(engine: InferenceEngine) -> None:
    buffers = graphs_of(engine.runner).buffers
    buffers.rope = tuple(table.clone() for table in buffers.rope)


def reallocate_ids(engine: InferenceEngine) -> None:
    parts = graphs_of(engine.runner).buffers.parts
    parts["ids"] = parts["ids"]._replace(device=parts["ids"].device.clone())


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (reallocate_weight, "embed.weight"),
        (reallocate_blocks, r"KV cache slot 0 k data \(.*\)"),
        (reallocate_rope, "rope 0"),
        (reallocate_ids, "ids"),
    ],
)
def test_a_tensor_that_is_allocated_again_is_detected(
    fault: Callable[[InferenceEngine], None], name: str, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    engine = build(model, graphs=STATIC, max_num_seqs=2)
    run(engine, [([1, 2, 3], SAMPLED)])
    fault(engine)
    (output,) = run(engine, [([1, 2, 3], SAMPLED)])
    error = output.outputs[0].finish_reason
    assert error == "error"
    graphs = graphs_of(engine.runner)
    with pytest.raises(
        AssertionError, match=rf"{name} was captured at .* a graph would use the old"
    ):
        graphs.run(graphs.plan.buckets[-1], (), (), (), ())
    graphs.reset()
    (output,) = run(engine, [([1, 2, 3], SAMPLED)])
    assert output.outputs[0].finish_reason == "length"


def test_collectives_are_reset_before_and_at_the_end_of_replays(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank replays the buffers of the capture, whatever was called between two replays."""
    events: list[str] = []
    collectives = PROCESS_GROUP._replace(reset_buffers=lambda: events.append("reset"))
    model = tiny.model(tiny.config(), collectives=collectives)
    replay = StaticReplay.replay
    run_step = ModelRunner._compute
    monkeypatch.setattr(
        StaticReplay, "replay", lambda self: (events.append("replay"), replay(self))
    )
    monkeypatch.setattr(
        ModelRunner,
        "_compute",
        lambda self, inputs: (events.append("layers"), run_step(self, inputs))[1],
    )
    engine = build(model, graphs=STATIC, max_num_seqs=1)
    graphs_of(engine.runner).capture()
    # layers run once to allocate the outputs, and once to be captured
    assert events == ["layers", "reset", "layers", "reset"]
    events.clear()
    run(engine, [([3, 1], GREEDY)])
    replays = events[events.index("reset") :]
    assert replays == ["reset", "replay", "layers", "reset"] * (len(replays) // 4) and replays


def test_a_capture_that_fails_is_repeated_completely(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    requests = [([4, 2, 7], SAMPLED)]
    expected = run(build(model), requests)
    engine = build(model, graphs=STATIC, max_num_seqs=4)
    plain, calls = model.forward, list[int]()

    def fails(ids: Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(len(ids))
        if len(calls) == 4:  # the prompt, the shapes of outputs, and the largest bucket succeed
            raise RuntimeError("once")
        return plain(ids, *rest, **options)

    model.forward = fails  # type: ignore[method-assign]
    outputs = run(engine, requests)
    del model.forward
    assert tokens_of(outputs) == tokens_of(expected)
    assert graphs_of(engine.runner).num_replays and len(calls) > 5


def test_padding_that_is_stored_in_the_block_of_a_sequence_is_detected(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    runner = make_runner(model, [BatchDimensions(4, 0, 4)])
    plan, states = draw_step(random.Random(0), BatchDimensions(2, 0, 2), 1, 37)
    runner.execute(plan, states)
    padding_slots = StepBuffers.padding_slots
    monkeypatch.setattr(
        StepBuffers, "padding_slots", lambda *arguments: padding_slots(*arguments) - BLOCK_SIZE
    )
    with pytest.raises(AssertionError, match="padding of KV cache group 0 would be stored in a"):
        runner.execute(plan, states)


def test_lengths_that_are_captured_as_python_values_are_detected(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the length of the longest row is read on the host during the capture."""
    from megalith.kernels.attention import paged

    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    request = [([1, 2, 3], SAMPLED)]
    expected = run(build(model), request)
    attend, lengths = paged._torch_static, list[Tensor]()

    def read_on_host(keys: Any, metadata: Any, *arguments: Any, **options: Any) -> Tensor:
        if len(lengths) < 1:
            lengths.append(metadata.kv_lengths.clone())
        fixed = lengths[0][:1].expand(len(metadata.kv_lengths))
        return attend(keys, replace(metadata, kv_lengths=fixed), *arguments, **options)

    monkeypatch.setattr(paged, "_torch_static", read_on_host)
    assert tokens_of(run(build(model, graphs=STATIC, max_num_seqs=2), request)) != tokens_of(
        expected
    )


# --- ranks


def run_rank(
    rank: int,
    world: int,
    config: ModelConfig,
    make: Any,
    parallel: InferenceParallelConfig,
    prefills: Prefills,
) -> tuple[list[Any], dict[str, dict[str, int]]]:
    """Outputs of the requests of this rank, and its numbers of steps."""
    layout = generation_layout(config, world, parallel)
    mesh = build_mesh(model_grid(layout, config, world), rank=rank)
    model = make(config, mesh, parallel=layout, dtype=torch.float64).eval()
    engine = build(
        model,
        link=connect_stages(model, mesh.pp, torch.device("cpu")),
        expert_group=find_expert_group(layout, mesh),
        graphs=replace(STATIC, prefills=prefills, num_buckets=3),
        **SETTINGS,
    )
    requests, arrivals = make_requests(world)
    own = range(mesh.dp.rank, len(requests), mesh.dp.size)
    outputs = run(
        engine,
        [requests[index] for index in own],
        {number: arrivals[index] * (1 + mesh.dp.rank) for number, index in enumerate(own)},
    )
    return list(zip(own, outputs, strict=True)), engine.runner.count_graph_steps()


@pytest.mark.parametrize(
    ("parallel", "changes", "prefills"),
    [
        pytest.param(InferenceParallelConfig(), {}, "all", marks=pytest.mark.slow),
        (InferenceParallelConfig(), {"num_kv_heads": 1}, "all"),  # with a sharded KV cache
        pytest.param(
            InferenceParallelConfig(sp=True), {"moe": EXPERTS}, "all", marks=pytest.mark.slow
        ),
        pytest.param(InferenceParallelConfig(pp=2), {}, "mixed", marks=pytest.mark.slow),
        (InferenceParallelConfig(dp=2), {"moe": EXPERTS}, "all"),
    ],
)
def test_ranks_replay_the_steps_of_one_process(
    parallel: InferenceParallelConfig,
    changes: dict[str, Any],
    prefills: Prefills,
    tiny: SimpleNamespace,
) -> None:
    config = tiny.config(**changes)
    model = tiny.model(config, dtype=torch.float64).eval()
    expected = run(build(model), make_requests(2)[0])
    results = run_ranks(run_rank, 2, config, tiny.model, parallel, prefills)
    for outputs, steps in results:
        for index, output in outputs:
            assert values_of(output) == values_of(expected[index]), index
        assert len(steps["graph_steps"]) > 1
        # ranks that share experts run eagerly where one of them has a prefill
        assert set(steps["eager_steps"]) <= {"prefill", "oversize", "no_bucket"}
    assert ("prefill" in results[0][1]["eager_steps"]) == (parallel.dp > 1)


# --- planning with the scheduler


def test_chunks_of_prompts_fill_the_buckets(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    engine = build(
        model,
        graphs=replace(STATIC, prefills="all", num_buckets=2),
        max_num_batched_tokens=24,
        max_num_seqs=4,
        min_prefill_chunk_tokens=1,
    )
    requests = [([1, 2, 3], replace(SAMPLED, max_new_tokens=30)), (list(range(1, 37)) * 2, SAMPLED)]
    outputs = run(engine, requests, {1: 3})
    for output in outputs:
        check_logprobs(model, output)
    assert not graphs_of(engine.runner).num_eager_steps
    # one decode and 23 tokens of the prompt, as the budget allows, several times
    assert graphs_of(engine.runner).num_replays[BatchDimensions(24, 1, 3)] >= 3


def test_a_prompt_waits_while_no_bucket_covers_its_batch(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of one prefill: two prompts that arrive together start one after the other; the first
    one never waits."""
    model = tiny.model(tiny.config(), dtype=torch.float64).eval()
    monkeypatch.setattr(
        "megalith.infer.graphs.plan_graph_buckets",
        lambda limits, policy: (BatchDimensions(24, 1, 3), BatchDimensions(4, 0, 4)),
    )
    engine = build(
        model,
        graphs=replace(STATIC, prefills="all"),
        max_num_batched_tokens=24,
        max_num_seqs=4,
    )
    outputs = run(engine, [([1, 2, 3], SAMPLED), ([4, 5, 6], SAMPLED), ([7] * 9, SAMPLED)])
    for output in outputs:
        check_logprobs(model, output)
    assert engine.scheduler.make_stats().num_deferred_prefills >= 2
    assert not graphs_of(engine.runner).num_eager_steps


# --- settings


def plan_for(model: Decoder, **settings: Any) -> GraphPlan | None:
    """Plan the graphs of an engine for a model."""
    kernels = KernelsConfig(attention=settings.pop("kernel", "auto"))
    config = EngineConfig(graphs=GraphConfig(**settings.pop("graphs")), **settings)
    cache_plan = plan_cache(model.config, tp=1, element_size=4)
    return plan_graphs(config, model, cache_plan, max_model_len=64, num_drafts=0, kernels=kernels)


MLA = MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            {},
            {"graphs": {"mode": "cuda_graph"}},
            "graphs.mode=cuda_graph: the model is on cpu, and only NVIDIA GPUs have CUDA graphs. "
            "Set graphs.mode to auto, or to static_replay",
        ),
        (
            {"positions": "relative", "relative": RelativeConfig(buckets=8)},
            {"graphs": {"mode": "static_replay"}},
            "graphs.mode=static_replay: relative position biases gather the keys, whose number "
            "differs from step to step. Set graphs.mode to none.",
        ),
        (
            {},
            {"graphs": {"mode": "static_replay"}, "kernel": "paged"},
            "graphs.mode=static_replay: kernels.attention=paged reads the lengths of the sequences "
            "on the host. Set graphs.mode to none.",
        ),
        (
            {"mla": MLA, "num_kv_heads": 6},
            {"graphs": {"mode": "static_replay", "prefills": "mixed"}},
            "graphs.prefills=mixed with model.mla: prompts expand the latent vectors of their "
            "tokens, whose number differs from step to step. Set graphs.prefills to none.",
        ),
    ],
)
def test_graphs_that_a_model_does_not_support_are_rejected(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tiny: SimpleNamespace
) -> None:
    model = tiny.model(tiny.config(**changes))
    with pytest.raises(ConfigError) as error:
        plan_for(model, **settings)
    assert str(error.value).startswith(message)


ALIGNED_EXPERTS = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)


@pytest.mark.parametrize(
    ("changes", "kernel", "reason"),
    [
        ({}, "auto", None),
        ({}, "grouped", None),
        ({}, "loop", "kernels.experts=loop reads the numbers of rows of experts on the host"),
        ({"dtype": torch.float32}, "auto", "is one kernel in bf16 only"),
        ({"ffn_hidden_size": 20}, "auto", "only if rows have a multiple of 16 bytes"),
        ({"int8": True}, "auto", "quantized experts read their numbers of rows on the host"),
    ],
)
def test_experts_whose_rows_are_counted_on_the_host_have_no_graphs(
    changes: dict[str, Any], kernel: Any, reason: str | None, tiny: SimpleNamespace
) -> None:
    fields = {"build_grouped_matmul_ops": build_int8_grouped_matmul_ops}
    moe = replace(ALIGNED_EXPERTS, ffn_hidden_size=changes.get("ffn_hidden_size", 16))
    model = tiny.model(
        tiny.config(moe=moe, hidden_size=48),
        dtype=changes.get("dtype", torch.bfloat16),
        **(fields if "int8" in changes else {}),
    )
    limitation = find_experts_limitation(model, kernel)
    assert limitation is None if reason is None else reason in str(limitation)


def test_cpus_have_no_graphs_by_default(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    assert plan_for(model, graphs={}) is plan_for(model, graphs={"mode": "none"}) is None
    plan = plan_for(model, graphs={"mode": "static_replay"}, max_num_seqs=8)
    assert plan is not None and [bucket.num_tokens for bucket in plan.buckets] == [8, 4, 2, 1]
    engine = build(model, graphs=STATIC, max_num_seqs=8)
    assert engine.describe().endswith("graphs: static_replay, 4 buckets of up to 8 tokens")
    assert build(model).describe().endswith("graphs: recorded, up to 64 tokens")
    assert build(model).runner.count_graph_steps() == {"graph_steps": {"recorded": 0}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            EngineConfig(graphs=STATIC, batch_invariant=True),
            "graphs.mode=static_replay with batch_invariant=true: replayed steps use another "
            "attention kernel than prefills, whose results differ by rounding. Set graphs.mode to "
            "none, or batch_invariant to false.",
        ),
        (
            EngineConfig(graphs=replace(STATIC, max_tokens=64)),
            "graphs.max_tokens=64 with graphs.prefills=none: it limits the buckets with prompts. "
            "Set graphs.prefills to mixed, or leave graphs.max_tokens unset.",
        ),
        (
            EngineConfig(graphs=GraphConfig(num_buckets=0)),
            "graphs.num_buckets=0 must be at least 1",
        ),
    ],
)
def test_invalid_settings_of_graphs_are_reported(config: EngineConfig, message: str) -> None:
    (problem,) = engine_problems(config)
    assert problem.startswith(message)


# --- CUDA graphs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CUDA graphs")
@pytest.mark.parametrize("kind", ["full", "window with sinks and softcap", "MLA", "chunks"])
def test_cuda_graphs_compute_what_eager_steps_do(kind: str, tiny: SimpleNamespace) -> None:
    """Captured, replayed, dropped and captured again."""
    model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64).to("cuda").eval()
    requests = random_requests(len(kind), 37, count=6)
    settings: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 5}
    expected = run(build(model, graphs=GraphConfig(mode="none"), **settings), requests)
    prefills: Prefills = "none" if kind == "MLA" else "all"
    graphs = GraphConfig(mode="cuda_graph", prefills=prefills, num_buckets=3)
    engine = build(model, graphs=graphs, proposer=ReferenceProposer(expected), **settings)
    for _ in range(2):
        outputs = run(engine, requests)
        assert tokens_of(outputs) == tokens_of(expected)
        steps = graphs_of(engine.runner)
        assert len(steps.num_replays) > 1
        steps.reset()
        assert not steps.is_captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CUDA graphs")
def test_cuda_graphs_of_experts_in_bf16_replay_the_routing_of_each_step(
    tiny: SimpleNamespace,
) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16)
    config = tiny.config(moe=moe, hidden_size=48)
    model = tiny.model(config, dtype=torch.bfloat16).to("cuda").eval()
    requests = [(list(range(1, 9)), GREEDY), ([4, 2], GREEDY)]
    results = []
    for mode in ("none", "static_replay", "cuda_graph"):
        engine = build(model, graphs=GraphConfig(mode=mode), max_num_seqs=2)
        results.append(tokens_of(run(engine, requests)))
    assert results[2] == results[1]
    assert [tokens[0][0] for tokens in results[0]] == [tokens[0][0] for tokens in results[1]]

"""Metrics of the engine: graphs, and blocks in host memory."""

from pathlib import Path

from megalith.config.generation import SamplingParams
from megalith.config.serve import CacheConfig, EngineConfig, GraphConfig
from megalith.infer.llm import LLM
from megalith.serve.metrics import AccessLog, EngineMetrics


def test_metrics_count_replayed_steps_by_bucket_and_others_by_reason(run: Path) -> None:
    metrics = EngineMetrics("tiny", AccessLog(log_prompts=False))
    config = EngineConfig(graphs=GraphConfig(mode="static_replay"), max_num_seqs=4)
    llm = LLM(run, config=config, callbacks=[metrics])
    graphs = llm.engine.runner.graphs
    assert graphs is not None and graphs.is_captured  # before the first request
    for number in (1, 2):  # counters go on
        llm.generate([[1, 2]], SamplingParams(max_new_tokens=6, ignore_eos=True))
        steps = llm.engine.runner.count_graph_steps()
        text = metrics.render(llm.engine.scheduler.make_stats(), graph_steps=steps)
        samples = [line for line in text.splitlines() if "_steps_total{" in line]
        assert samples == [
            f'megalith_graph_steps_total{{bucket="1x0x1",model_name="tiny"}} {5.0 * number}',
            f'megalith_eager_steps_total{{model_name="tiny",reason="prefill"}} {1.0 * number}',
        ]


def test_metrics_count_blocks_in_host_memory(run: Path) -> None:
    metrics = EngineMetrics("tiny", AccessLog(log_prompts=False))
    cache = CacheConfig(num_blocks=6, block_size=4, host_gb=0.001)
    llm = LLM(run, config=EngineConfig(cache=cache, max_model_len=20), callbacks=[metrics])
    prompts = [[1, 2] * 8, [2, 1] * 8]
    cached = []
    for prompt in prompts * 2:
        (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=1))
        cached.append(output.num_cached_tokens)
        text = metrics.render(llm.engine.scheduler.make_stats())
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def value(name: str) -> float:
        return float(samples[f'megalith_{name}{{model_name="tiny"}}'])

    assert cached == [0, 0, 12, 12]
    stats = llm.engine.scheduler.make_stats()
    assert value("external_prefix_cache_hits_total") == stats.host_hit_tokens
    assert 0 < stats.host_hit_tokens <= value("prefix_cache_hits_total") == 24
    assert value("kv_offload_loaded_blocks_total") == stats.host_hit_tokens / 4
    assert value("kv_offload_stored_blocks_total") == stats.num_used_host_blocks
    usage = stats.num_used_host_blocks / stats.num_host_blocks
    assert value("kv_offload_cpu_cache_usage_perc") == usage > 0

"""Prometheus metrics of the server, with vLLM's names after the prefix `megalith_`, and its access
log."""

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from megalith.plan.serving.engine_state import EngineState
from megalith.plan.serving.scheduler import SchedulerStats, StepPlan

if TYPE_CHECKING:  # the HTTP process does not import torch
    from megalith.infer.outputs import RequestOutput, TokenOutput

_logger = logging.getLogger(__name__)

PREFIX = "megalith_"
RUNNING = EngineState()
# Bucket limits in seconds and in tokens, as common in dashboards of servers (heuristic).
LATENCY = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 200_000)

HISTOGRAMS = {
    "time_to_first_token_seconds": ("Arrival of a request to its first token.", LATENCY),
    "inter_token_latency_seconds": ("Time between two tokens of a choice.", LATENCY),
    "e2e_request_latency_seconds": ("Arrival of a request to its end.", LATENCY),
    "request_queue_time_seconds": ("Arrival of a request to its first step.", LATENCY),
    "request_prefill_time_seconds": ("First step of a request to its first token.", LATENCY),
    "request_decode_time_seconds": ("First token of a request to its end.", LATENCY),
    "request_prompt_tokens": ("Prompt tokens of a request.", LENGTHS),
    "request_generation_tokens": ("Generated tokens of a request, all choices.", LENGTHS),
    "iteration_tokens_total": ("Tokens processed by a step.", LENGTHS),
}
GAUGES = {
    "num_requests_running": "Sequences that have a row in the batch.",
    "num_requests_waiting": "Sequences that wait for a row, preempted ones included.",
    "engine_paused": "1 between POST /pause or /suspend and POST /resume, else 0.",
    "engine_suspended": "1 between POST /suspend and POST /wake_up, else 0.",
    "kv_cache_usage_perc": "Fraction of the KV cache blocks that sequences use, 0 to 1.",
    "kv_offload_cpu_cache_usage_perc": (
        "Fraction of the KV cache blocks in host memory that are used, 0 to 1."
    ),
}
COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests.",
    "generation_tokens": "Generated tokens.",
}
SCHEDULER_COUNTERS = {
    "num_preemptions": ("Preemptions of sequences.", "num_preemptions"),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        "prefix_query_tokens",
    ),
    "prefix_cache_hits": (
        "Prompt tokens whose keys and values were reused.",
        "prefix_hit_tokens",
    ),
    "external_prefix_cache_hits": (
        "Prompt tokens among prefix_cache_hits whose keys and values were in host memory.",
        "host_hit_tokens",
    ),
    "kv_offload_stored_blocks": (
        "KV cache blocks that were copied to host memory.",
        "num_offloaded_blocks",
    ),
    "kv_offload_loaded_blocks": (
        "KV cache blocks that were copied back from host memory.",
        "num_loaded_blocks",
    ),
    "spec_decode_num_drafts": ("Sequences with draft tokens, over all steps.", "num_drafts"),
    "spec_decode_num_draft_tokens": ("Draft tokens.", "num_draft_tokens"),
    "spec_decode_num_accepted_tokens": ("Accepted draft tokens.", "num_accepted_tokens"),
    "num_deferred_prefills": (
        "Times that a prompt waited because no graph has a bucket for its batch.",
        "num_deferred_prefills",
    ),
}
"""Counters that are attributes of `SchedulerStats`: explanation and attribute."""
GRAPH_COUNTERS = {
    "graph_steps": ("Steps replayed by a graph.", "bucket"),
    "eager_steps": ("Steps without a bucket, where others are replayed.", "reason"),
}
"""Counters of steps: explanation and label."""
NO_GRAPH_STEPS: Mapping[str, Mapping[str, int]] = MappingProxyType({})


class _Metric(Protocol):
    """A labeled metric of prometheus-client."""

    def inc(self, amount: float = 1) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, amount: float) -> None: ...
    def labels(self, *values: str) -> "_Metric": ...


class MetricSet:
    """Metrics of one registry, all with the label model_name, and for a replica of the engine with
    the label engine.

    Raises:
        ImportError: prometheus-client is not installed.
    """

    def __init__(self, model_name: str, replica: int | None = None) -> None:
        import prometheus_client

        self._client = prometheus_client
        self._registry = prometheus_client.CollectorRegistry()
        self._labels = {"model_name": model_name}
        if replica is not None:
            self._labels["engine"] = str(replica)

    def counter(self, name: str, text: str, *labels: str) -> _Metric:
        """Add a counter; its name gets the suffix _total."""
        metric: Any = self._client.Counter(
            PREFIX + name, text, [*self._labels, *labels], registry=self._registry
        )
        return self._first(metric, labels)

    def gauge(self, name: str, text: str) -> _Metric:
        """Add a gauge."""
        metric: Any = self._client.Gauge(
            PREFIX + name, text, list(self._labels), registry=self._registry
        )
        return self._first(metric, ())

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> _Metric:
        """Add a histogram."""
        metric: Any = self._client.Histogram(
            PREFIX + name, text, list(self._labels), buckets=buckets, registry=self._registry
        )
        return self._first(metric, ())

    def render(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        return self._client.generate_latest(self._registry).decode()

    def _first(self, metric: Any, labels: tuple[str, ...]) -> _Metric:
        values = tuple(self._labels.values())
        bound: _Metric = _LabeledMetric(metric, values) if labels else metric.labels(*values)
        return bound


class _LabeledMetric:
    """A metric with labels after those of its set."""

    def __init__(self, metric: Any, first: tuple[str, ...]) -> None:
        self._metric, self._first = metric, first

    def labels(self, *values: str) -> Any:
        return self._metric.labels(*self._first, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)


class AccessLog:
    """Engine callback that logs one line per finished request."""

    def __init__(self, *, log_prompts: bool) -> None:
        self._log_prompts = log_prompts
        self._names: dict[int, str] = {}

    def name(self, number: int, uid: str) -> None:
        """Set the name of a request in the log."""
        self._names[number] = uid

    def on_request(self, request: "RequestOutput") -> None:
        """Requests are logged when they end."""

    def on_step(self, plan: StepPlan, stats: SchedulerStats, seconds: float) -> None:
        """Steps are not logged."""

    def on_token(self, output: "TokenOutput") -> None:
        """Tokens are not logged."""

    def on_finish(self, request: "RequestOutput") -> None:
        """Log the request, its tokens, latencies and finish reasons."""
        timings = request.timings
        ttft = "-" if timings.ttft is None else f"{timings.ttft * 1000:.0f}ms"
        seconds = (timings.finished or timings.arrival_time) - timings.arrival_time
        reasons = ",".join(str(completion.finish_reason) for completion in request.outputs)
        _logger.info(
            "request %s: prompt_tokens=%d cached_tokens=%d completion_tokens=%d ttft=%s e2e=%.3fs "
            "finish_reason=%s%s",
            self._names.pop(request.request_id, request.request_id),
            len(request.prompt_token_ids),
            request.num_cached_tokens,
            sum(len(completion.token_ids) for completion in request.outputs),
            ttft,
            seconds,
            reasons,
            f" prompt_token_ids={request.prompt_token_ids}" if self._log_prompts else "",
        )


class EngineMetrics:
    """Engine callback that counts requests, tokens and latencies.

    A request with n choices counts n times in request_success, once in the other metrics.
    """

    def __init__(
        self, model_name: str, access_log: AccessLog, *, replica: int | None = None
    ) -> None:
        """`replica`: index of the engine; None: there is one."""
        self.access_log = access_log
        self._set = MetricSet(model_name, replica)
        self._gauges = {name: self._set.gauge(name, text) for name, text in GAUGES.items()}
        self._counters = {name: self._set.counter(name, text) for name, text in COUNTERS.items()}
        self._scheduler_counters = {
            name: self._set.counter(name, text) for name, (text, _) in SCHEDULER_COUNTERS.items()
        }
        self._accepted_per_pos = self._set.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position among the drafts of a step.",
            "position",
        )
        self._graph_counters = {
            name: self._set.counter(name, text, label)
            for name, (text, label) in GRAPH_COUNTERS.items()
        }
        self._reported_graphs: dict[str, dict[str, int]] = {name: {} for name in GRAPH_COUNTERS}
        self._histograms = {
            name: self._set.histogram(name, text, buckets)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._success = self._set.counter(
            "request_success", "Finished choices by reason.", "finished_reason"
        )
        self._last_tokens: dict[tuple[int, int], float] = {}
        """Time of the last token by (request, choice)."""
        self._reported = SchedulerStats(0, 0, 0, 0, 0, 0, 0)
        """Statistics that the counters contain."""

    def on_request(self, request: "RequestOutput") -> None:
        """A request is counted when it ends."""

    def on_step(self, plan: StepPlan, stats: SchedulerStats, seconds: float) -> None:
        """Count the tokens of a step."""
        self._histograms["iteration_tokens_total"].observe(plan.num_tokens)

    def on_token(self, output: "TokenOutput") -> None:
        """Count a token and the time since the one before it."""
        key = (output.request_id, output.choice)
        if output.token is not None:
            now = time.monotonic()
            self._counters["generation_tokens"].inc()
            if key in self._last_tokens:
                self._histograms["inter_token_latency_seconds"].observe(
                    now - self._last_tokens[key]
                )
            self._last_tokens[key] = now
        if output.finish_reason is not None:
            self._last_tokens.pop(key, None)

    def on_finish(self, request: "RequestOutput") -> None:
        """Count a request and its latencies."""
        timings, observe = request.timings, self._observe
        assert timings.finished is not None, "the engine sets it before"
        num_generated = sum(len(completion.token_ids) for completion in request.outputs)
        self._counters["prompt_tokens"].inc(len(request.prompt_token_ids))
        observe("request_prompt_tokens", len(request.prompt_token_ids))
        observe("request_generation_tokens", num_generated)
        observe("e2e_request_latency_seconds", timings.finished - timings.arrival_time)
        if timings.scheduled is not None:
            observe("request_queue_time_seconds", timings.scheduled - timings.arrival_time)
        if timings.ttft is not None:
            observe("time_to_first_token_seconds", timings.ttft)
        if timings.first_token is not None:
            observe("request_decode_time_seconds", timings.finished - timings.first_token)
            if timings.scheduled is not None:
                observe("request_prefill_time_seconds", timings.first_token - timings.scheduled)
        for completion in request.outputs:
            self._success.labels(str(completion.finish_reason)).inc()

    def render(
        self,
        stats: SchedulerStats,
        state: EngineState = RUNNING,
        *,
        graph_steps: Mapping[str, Mapping[str, int]] = NO_GRAPH_STEPS,
    ) -> str:
        """Return all metrics in the text format of Prometheus; `graph_steps`: number of steps by
        label for each of `GRAPH_COUNTERS`."""
        for name, counts in graph_steps.items():
            counted = self._reported_graphs[name]
            for label, number in counts.items():
                self._graph_counters[name].labels(label).inc(number - counted.get(label, 0))
            self._reported_graphs[name] = dict(counts)
        self._gauges["num_requests_running"].set(stats.num_running)
        self._gauges["num_requests_waiting"].set(stats.num_waiting)
        self._gauges["kv_cache_usage_perc"].set(stats.num_used_blocks / max(stats.num_blocks, 1))
        self._gauges["kv_offload_cpu_cache_usage_perc"].set(
            stats.num_used_host_blocks / max(stats.num_host_blocks, 1)
        )
        self._gauges["engine_paused"].set(state.is_paused)
        self._gauges["engine_suspended"].set(state.suspension is not None)
        before, self._reported = self._reported, stats
        for name, (_, attribute) in SCHEDULER_COUNTERS.items():
            increase = getattr(stats, attribute) - getattr(before, attribute)
            self._scheduler_counters[name].inc(increase)
        pairs = zip_longest(
            stats.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, fillvalue=0
        )
        for position, (count, reported) in enumerate(pairs):
            self._accepted_per_pos.labels(str(position)).inc(count - reported)
        return self._set.render()

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


def merge_metrics(texts: Sequence[str]) -> str:
    """Merge metrics of several processes in the text format of Prometheus, in which all samples of
    a metric are one group."""
    groups: dict[str, list[str]] = {}
    for text in texts:
        lines = list[str]()
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                lines = groups.setdefault(name, [])
            if line not in lines:
                lines.append(line)
    return "".join(line for lines in groups.values() for line in lines)


class HttpMetrics:
    """Metrics of the HTTP process: errors and rejected requests."""

    def __init__(self, model_name: str) -> None:
        self._set = MetricSet(model_name)
        self._errors = self._set.counter("request_errors", "Error responses by status.", "code")
        self._rejected = self._set.counter(
            "requests_rejected", "Requests rejected before they reached the engine.", "reason"
        )
        self._disconnects = self._set.counter(
            "client_disconnects", "Clients that disconnected before their response was complete."
        )
        self._ignored = self._set.counter(
            "ignored_fields", "Fields of requests that their endpoint does not know."
        )

    def count_error(self, status: int) -> None:
        """Count an error response."""
        self._errors.labels(str(status)).inc()

    def count_rejected(self, reason: str) -> None:
        """Count a request that was rejected because of load."""
        self._rejected.labels(reason).inc()

    def count_disconnect(self) -> None:
        """Count a client that disconnected."""
        self._disconnects.inc()

    def count_ignored(self, count: int) -> None:
        """Count unknown fields of a request."""
        self._ignored.inc(count)

    def render(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        return self._set.render()

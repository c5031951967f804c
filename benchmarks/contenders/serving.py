"""Decoding with and without graphs: time of a step, and the rate at which it reads weights and keys
and values."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from paired import take_turns, times_as_fast

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig
from megalith.config.serve import CacheConfig, EngineConfig, GraphConfig
from megalith.data.tokenizer import ByteTokenizer
from megalith.infer.build import build_engine
from megalith.infer.engine import InferenceEngine
from megalith.infer.load import TextGenerator
from megalith.models.decoder import Decoder, allocate, build_chunks
from megalith.nn.build import build_context
from megalith.observe.machine import measured_bandwidth
from megalith.parallel.mesh import build_single_rank_mesh

BAR_BANDWIDTH, BAR_GRAPHS = 0.7, 1.3
"""Fraction of the bandwidth at the largest batch, and how many times as fast as eager steps graphs
are at batch 1: the bars of inference on GPUs."""


@dataclass(frozen=True, slots=True)
class ServingCase:
    """A model, and the batches whose decode steps are measured."""

    model: Callable[[], ModelConfig]
    dtype: torch.dtype
    batches: tuple[int, ...] = (1, 64)
    context: int = 1000
    """Tokens of each sequence when the measurement starts."""

    steps_per_round: int = 8


def describe(case: ServingCase, *, rounds: int) -> str:
    """Describe what is measured, without a model or a device."""
    model = case.model()
    return (
        f"{model.num_layers} layers of h {model.hidden_size}, vocabulary of {model.vocab_size}, "
        f"{str(case.dtype).removeprefix('torch.')}; batches of "
        f"{', '.join(map(str, case.batches))} sequences of {case.context} tokens, "
        f"{rounds} rounds of {case.steps_per_round} decode steps"
    )


@torch.no_grad()
def build_random_model(case: ServingCase, device: torch.device) -> Decoder:
    """Build the model with normally distributed weights, which only have to be finite."""
    context = build_context(case.model(), build_single_rank_mesh(), dtype=case.dtype)
    (model,) = build_chunks(context)
    allocate(model, device)
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
    return model.eval()


def build_contender(
    model: Decoder, case: ServingCase, batch: int, graphs: GraphConfig, max_steps: int
) -> InferenceEngine:
    """Build an engine with a batch of sequences that have about `context` tokens, and decode."""
    tokens_per_step = max(512, 2 * batch)
    # the first sequences decode while the prompts of the others are processed
    max_steps += 2 * batch * case.context // tokens_per_step + 2
    length = case.context + max_steps + 1
    num_blocks = batch * -(-length // 16)
    config = EngineConfig(
        cache=CacheConfig(num_blocks=num_blocks, prefix_caching=False),
        graphs=graphs,
        max_num_seqs=batch,
        max_num_batched_tokens=tokens_per_step,
        max_model_len=length,
    )
    engine = build_engine(TextGenerator(model, ByteTokenizer(), frozenset()), config)
    params = SamplingParams(temperature=0.0, max_new_tokens=max_steps, ignore_eos=True)
    for index in range(batch):
        engine.add_request([index % 200] * case.context, params)
    while len(engine.step()) < batch:  # until all of them decode
        pass
    return engine


def bytes_per_step(engine: InferenceEngine, case: ServingCase, batch: int) -> int:
    """Return the bytes of weights, keys and values that a decode step reads."""
    model, plan = engine.runner.model, engine.runner.cache.plan
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    if not model.config.tied_embeddings:
        del weights[model.embed.weight.data_ptr()]  # only rows of it are read
    return sum(weights.values()) + batch * case.context * plan.bytes_per_token


def decode(engine: InferenceEngine, num_steps: int) -> None:
    """Execute decode steps."""
    for _ in range(num_steps):
        engine.step()


def compare_graphs(case: ServingCase, device: torch.device, *, rounds: int) -> Iterator[str]:
    """Yield a line for each batch and contender, and the bars."""
    model, bandwidth = build_random_model(case, device), measured_bandwidth(device=str(device))
    mode = "static_replay" if device.type == "cpu" else "cuda_graph"
    yield f"bandwidth of a copy: {bandwidth / 1e9:.0f} GB/s; graphs: {mode}"
    num_steps = case.steps_per_round * (rounds + 2)
    for batch in case.batches:
        graphs = GraphConfig(num_buckets=1)
        engines = {
            name: build_contender(
                model, case, batch, replace(graphs, mode=graph_mode), num_steps * 2
            )
            for name, graph_mode in (("eager", "none"), ("graphs", mode))
        }
        turns = take_turns(
            {
                name: lambda engine=engine: decode(engine, case.steps_per_round)
                for name, engine in engines.items()
            },
            rounds=rounds,
            warmup=1,
        )
        moved = bytes_per_step(engines["graphs"], case, batch)
        fractions = {}
        for name, times in turns.seconds.items():
            seconds = statistics.median(times) / case.steps_per_round
            fractions[name] = moved / seconds / bandwidth
            yield (
                f"batch {batch:3} {name:6} {1e3 * seconds:9.3f} ms per step, "
                f"{batch / seconds:10,.0f} tokens/s, {moved / 2**30:.2f} GiB moved, "
                f"{100 * fractions[name]:.1f} % of the bandwidth"
            )
        ratio = times_as_fast(turns.seconds["graphs"], turns.seconds["eager"])
        yield f"batch {batch:3} graphs / eager: {ratio}"
        if device.type != "cpu":  # a rehearsal has no bars
            yield from compare_with_bars(turns.seconds, fractions["graphs"], batch, case)


def compare_with_bars(
    seconds: Mapping[str, Sequence[float]], fraction: float, batch: int, case: ServingCase
) -> Iterator[str]:
    """Yield whether a batch reaches its bar: `fraction` of the bandwidth, or the ratio of the times
    of eager and replayed steps."""
    if batch == max(case.batches):
        verdict = "holds " if fraction >= BAR_BANDWIDTH else "MISSED"
        yield f"{verdict} batch {batch} >= {BAR_BANDWIDTH} of the bandwidth"
    if batch == 1:
        medians = [statistics.median(seconds[name]) for name in ("eager", "graphs")]
        verdict = "holds " if medians[0] / medians[1] >= BAR_GRAPHS else "MISSED"
        yield f"{verdict} batch 1 graphs / eager >= {BAR_GRAPHS}"

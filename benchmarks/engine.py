"""Inference engine beside the continuous batching of transformers, and ctranslate2 where installed,
on this CPU, with the same weights.

    python benchmarks/engine.py [--models 29m,110m] [--requests 1,4,8,16,64] [--threads 2]
    python benchmarks/engine.py --speculation ngram   # beside the engine without draft tokens

Requests have mixed prompt lengths, arrive together and generate greedily without stopping at an end
token. All contenders take turns in one process. A line shows output tokens per second and how many
times as fast the engine is: the median over the rounds of the ratio of two times of the same round,
and its quartiles. Before, the tokens are compared in fp32. ctranslate2 has the ways of
`CTranslate2Llama.generate` and is compared in fp32 at 1 and 8 requests.

"Computing" is the same ratio of CPU times, for busy machines; read it with --threads 1, since
waiting threads spin.

The last lines of a model are the time to the first token (TTFT) of a prompt of 2,000 tokens, of
which the prefix cache holds 90 %, against the same without a hit; and of one that was evicted from
the device, loaded from host memory against computed.

With --speculation the peer is the engine without draft tokens, on greedy text that repeats itself
and on sampled text, which is random.
"""

import argparse
import math
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders.ctranslate2_llama import CTranslate2Llama, is_installed
from paired import take_turns, times_as_fast
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from megalith.config.generation import SamplingParams
from megalith.config.serve import CacheConfig, EngineConfig, SpeculationConfig
from megalith.infer.llm import LLM, load_generator
from megalith.kernels.cpu_threads import keep_freed_memory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    "29m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8},
    "110m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12},
}
VOCAB = {"tiny": 512, "29m": 8192, "110m": 32000}
CTRANSLATE2_REQUESTS = (1, 8)
PREFIX_TOKENS, SUFFIX_TOKENS = 1800, 200
BAR_CTRANSLATE2, BAR_PREFIX = 0.9, 5.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one measurement."""

    prompts: list[list[int]]
    new_tokens: int


def save_llama(name: str, folder: str, init_std: float = 0.08) -> None:
    """Save a Llama with random weights; a small `init_std` makes its greedy text repeat itself."""
    heads = SIZES[name]["hidden_size"] // 64
    config = LlamaConfig(
        **SIZES[name],
        vocab_size=VOCAB[name],
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=init_std,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def build_load(name: str, num_requests: int, new_tokens: int) -> Load:
    """Return requests with prompts of 16 to 256 tokens."""
    draw = random.Random(num_requests)
    lengths = [
        round(math.exp(draw.uniform(math.log(16), math.log(256)))) for _ in range(num_requests)
    ]
    prompts = [[draw.randrange(1, VOCAB[name]) for _ in range(length)] for length in lengths]
    return Load(prompts, new_tokens)


def engine_contender(
    llm: LLM, load: Load, temperature: float = 0.0
) -> Callable[[], list[list[int]]]:
    """Return a call that generates with the engine."""
    params = SamplingParams(
        temperature=temperature, seed=7, max_new_tokens=load.new_tokens, ignore_eos=True
    )

    def generate() -> list[list[int]]:
        llm.engine.scheduler.reset_prefix_cache()  # each round computes all prompts
        return [one.outputs[0].token_ids for one in llm.generate(load.prompts, params)]

    return generate


def sequential_contender(llm: LLM, load: Load) -> Callable[[], list[list[int]]]:
    """Return a call that generates one request after the other with the engine."""
    one_by_one = [engine_contender(llm, Load([prompt], load.new_tokens)) for prompt in load.prompts]
    return lambda: [generate()[0] for generate in one_by_one]


def transformers_contender(model: Any, load: Load) -> Callable[[], list[list[int]]]:
    """Return a call of transformers' continuous batching."""
    config = GenerationConfig(
        max_new_tokens=load.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    batching = ContinuousBatchingConfig(max_memory_percent=0.05)  # of the machine's memory

    def generate() -> list[list[int]]:
        results = model.generate_batch(
            load.prompts,
            generation_config=config,
            continuous_batching_config=batching,
            persistent_manager=True,
        )
        by_prompt = {tuple(one.prompt_ids): one.generated_tokens for one in results.values()}
        return [list(by_prompt[tuple(prompt)]) for prompt in load.prompts]

    return generate


def main() -> None:
    """Print a line for every model and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="29m,110m")
    parser.add_argument("--requests", default="1,4,8,16,64")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtypes", default="fp32,bf16", help="the peer uses its faster one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speculation", choices=("ngram",))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    ratios = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            save_llama(name, folder, 0.08 if options.speculation is None else 0.02)
            for count in map(int, options.requests.split(",")):
                if options.speculation is not None:
                    measure_speculation(name, folder, count, options)
                    continue
                ratios.append(measure(name, folder, count, options))
            if options.speculation is None:
                measure_host_hits(folder, VOCAB[name], rounds=options.rounds)
                measure_prefix(folder, VOCAB[name], rounds=options.rounds)
    if ratios:
        print(f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.2f}")


def measure(name: str, folder: str, count: int, options: argparse.Namespace) -> float:
    """Measure one number of requests; returns how many times as fast the engine's faster dtype is
    as the dtype in which transformers is faster."""
    load = build_load(name, count, options.new_tokens)
    contenders = build_contenders(name, folder, load, options)
    if "engine fp32" in contenders:
        expected = contenders["engine fp32"]()
        others = [key for key in contenders if key.startswith(("transformers fp32", "ctranslate2"))]
        same = all(contenders[key]() == expected for key in others)
        print(f"{name}, {count} requests: {'the same' if same else 'OTHER'} tokens")
    turns = take_turns(contenders, rounds=options.rounds, warmup=1)
    seconds, cpu_seconds = turns.seconds, turns.cpu_seconds
    num_tokens = count * options.new_tokens
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    for key, median in medians.items():
        print(f"  {key:22} {num_tokens / median:9.1f} tokens/s")

    def fastest(prefix: str) -> str:
        names = [key for key in medians if key.startswith(f"{prefix} ")]
        return min(names, key=medians.__getitem__)

    engine, peer = fastest("engine"), fastest("transformers")
    ratio = times_as_fast(seconds[engine], seconds[peer])
    print(f"  {engine} / {peer}: {ratio}")
    print(f"    computing: {times_as_fast(cpu_seconds[engine], cpu_seconds[peer])}")
    if "engine, one by one" in medians:
        speedup = times_as_fast(seconds["engine fp32"], seconds["engine, one by one"])
        print(f"  batched / one by one: {speedup}")
    if any(key.startswith("ctranslate2") for key in medians):
        peer = fastest("ctranslate2")
        against = times_as_fast(seconds["engine fp32"], seconds[peer])
        verdict = "holds " if against.median >= BAR_CTRANSLATE2 else "MISSED"
        print(f"  engine fp32 / {peer}: {against}, {verdict} >= {BAR_CTRANSLATE2}")
        computing = times_as_fast(cpu_seconds["engine fp32"], cpu_seconds[peer])
        print(f"    computing: {computing}")
    return ratio.median


def build_contenders(
    name: str, folder: str, load: Load, options: argparse.Namespace
) -> dict[str, Callable[[], list[list[int]]]]:
    """Return the contenders for one number of requests."""
    count = len(load.prompts)
    contenders: dict[str, Callable[[], list[list[int]]]] = {}
    for dtype_name in options.dtypes.split(","):
        dtype = DTYPES[dtype_name]
        llm = LLM(load_generator(folder, dtype=dtype), config=EngineConfig(max_num_seqs=64))
        contenders[f"engine {dtype_name}"] = engine_contender(llm, load)
        if count == 16 and dtype_name == "fp32":
            contenders["engine, one by one"] = sequential_contender(llm, load)
        peer = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        contenders[f"transformers {dtype_name}"] = transformers_contender(peer, load)
    if "fp32" in options.dtypes and count in CTRANSLATE2_REQUESTS and is_installed():
        model = CTranslate2Llama(Path(folder), VOCAB[name], threads=options.threads)
        arguments = load.prompts, load.new_tokens
        contenders["ctranslate2 batch"] = lambda: model.generate(*arguments, batched=True)
        if count > 1:
            contenders["ctranslate2 workers"] = lambda: model.generate(*arguments, batched=False)
    return contenders


def measure_prefix(folder: str, vocab_size: int, *, rounds: int) -> None:
    """Print how many times as early the first token of a long prompt is with a prefix hit."""
    llm = LLM(load_generator(folder, dtype=torch.float32))
    draw = random.Random(0)
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    prefix = [draw.randrange(1, vocab_size) for _ in range(PREFIX_TOKENS)]

    def generate(*, is_hit: bool) -> None:
        if not is_hit:
            llm.engine.scheduler.reset_prefix_cache()
        suffix = [draw.randrange(1, vocab_size) for _ in range(SUFFIX_TOKENS)]
        (output,) = llm.generate([prefix + suffix], params)
        assert (output.num_cached_tokens >= PREFIX_TOKENS - 16) == is_hit, output.num_cached_tokens

    generate(is_hit=False)
    contenders = {"hit": lambda: generate(is_hit=True), "miss": lambda: generate(is_hit=False)}
    seconds = take_turns(contenders, rounds=rounds, warmup=1).seconds
    ratio = times_as_fast(seconds["hit"], seconds["miss"])
    verdict = "holds " if ratio.median >= BAR_PREFIX else "MISSED"
    print(f"  TTFT without / with a prefix hit: {ratio}, {verdict} >= {BAR_PREFIX}")


def measure_host_hits(folder: str, vocab_size: int, *, rounds: int) -> None:
    """Print how many times as early the first token of a prompt is when its keys and values are
    loaded from host memory, against computing them. Two prompts evict each other from a pool that
    holds one."""
    draw = random.Random(1)
    size = PREFIX_TOKENS + SUFFIX_TOKENS
    prompts = [[draw.randrange(1, vocab_size) for _ in range(size)] for _ in range(2)]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    generator = load_generator(folder, dtype=torch.float32)

    def make_contender(host_gb: float) -> Callable[[], list[list[int]]]:
        cache = CacheConfig(num_blocks=size // 16 + 8, host_gb=host_gb)
        llm = LLM(generator, config=EngineConfig(cache=cache, max_model_len=size + 1))
        num_calls = 0

        def generate() -> list[list[int]]:
            nonlocal num_calls
            num_calls += 1
            (output,) = llm.generate([prompts[num_calls % 2]], params)
            is_hit = host_gb > 0 and num_calls > 2
            # without host memory a few leading blocks may remain
            assert (output.num_cached_tokens > size - 17) == is_hit, output.num_cached_tokens
            return [output.outputs[0].token_ids]

        return generate

    contenders = {"host": make_contender(1.0), "computed": make_contender(0.0)}
    for contender in contenders.values():
        contender()
    turns = take_turns(contenders, rounds=rounds, warmup=2)
    ratio = times_as_fast(turns.seconds["host"], turns.seconds["computed"])
    computing = times_as_fast(turns.cpu_seconds["host"], turns.cpu_seconds["computed"])
    print(f"  TTFT computed / loaded from host memory: {ratio}; computing: {computing}")


def measure_speculation(name: str, folder: str, count: int, options: argparse.Namespace) -> None:
    """Measure the engine with draft tokens beside the one without, on repeated and on random
    text."""
    load = build_load(name, count, options.new_tokens)
    speculation = SpeculationConfig(method=options.speculation)
    configs = {"drafts": EngineConfig(speculation=speculation), "none": EngineConfig()}
    generator = load_generator(folder, dtype=DTYPES[options.dtypes.split(",")[0]])
    for text, temperature in (("repeated", 0.0), ("random", 1.0)):
        llms = {key: LLM(generator, config=config) for key, config in configs.items()}
        contenders = {key: engine_contender(llm, load, temperature) for key, llm in llms.items()}
        same = contenders["drafts"]() == contenders["none"]()
        turns = take_turns(contenders, rounds=options.rounds, warmup=1)
        stats = llms["drafts"].engine.scheduler.make_stats()
        print(
            f"{name}, {count} requests, {text} text, {'the same' if same else 'OTHER'} tokens: "
            f"{options.speculation} / none: "
            f"{times_as_fast(turns.seconds['drafts'], turns.seconds['none'])}; "
            f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} drafts accepted"
        )


if __name__ == "__main__":
    main()

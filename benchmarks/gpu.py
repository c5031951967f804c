"""Everything worth knowing about a machine with GPUs, in one command of at most about 8 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --case 125m-bf16 --rounds 21
    python benchmarks/gpu.py serve                                inference only
    python benchmarks/gpu.py serve --plan                         what it would measure
    python benchmarks/gpu.py --device cpu --case tiny-bf16        a rehearsal without a GPU
    python benchmarks/gpu.py --device cpu --case tiny-layouts     the same of two ranks
    python benchmarks/gpu.py --device cpu --case tiny-mixture     and of a layer of experts

Prints what the machine has and how fast it is (`megalith doctor`), whether every kernel computes on
it what its plain reference computes in float64 on the CPU, how long each way of each kernel takes,
also of the inference engine's kernels (paged attention, matmuls of few rows), and then, case by
case, tokens/s, utilization of the peak rate and memory of our training step beside transformers'
Llama, both eager and with compiled layers, small models with CUDA graphs, too.
Contenders take turns in each round; ratios are by round. Where a device cannot hold all of them,
eager and compiled ones run one after the other. With two GPUs the case `layouts` compares ways to
overlap tensor parallelism's messages (plain, behind matmuls, rings of messages, fused products) and
a pipeline over NCCL. The case `mixture` is one layer of experts of Qwen3 30B-A3B on 8192 tokens,
forward and backward in bf16, beside transformers' block with each way it has for experts (both
eager), and the experts' matmuls alone: all of them, and those forward, of inputs' and of weights'
gradients, each as a fraction of the peak rate. The case `serve` decodes with the shape of Llama 3
8B in bf16, at 1 and 64 sequences, with CUDA graphs and without, and compares the bytes that a step
reads with the bandwidth of a copy. A case is begun only while there is time for it.

Written without a GPU at hand: the rehearsal is tested, the rest of it has not run on hardware yet.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from contenders import inference
from contenders.kernels import LARGE, SMALL, contests
from contenders.layouts import RANKS, compare_layouts
from contenders.mixture import AS_THEIRS, DTYPE, Layer, Mixture, qwen3_moe, tiny_moe, unlike
from contenders.one_device import alike, build, extra_memory_gib, groups, until_done
from contenders.ours import random_step, with_precision
from contenders.parity import compare_kernels
from contenders.serving import ServingCase, compare_graphs, describe
from paired import take_turns, times_as_fast
from train import LOSS_TOLERANCE, tiny

from megalith.cli.doctor import print_report
from megalith.config.train import TrainRun
from megalith.launch.launcher import in_worker, run_workers, worker_main
from megalith.observe.machine import advise, capabilities, device_peak_tflops, measure, read_machine
from megalith.plan.costs import flops_per_token
from megalith.recipes import recipes
from megalith.testing.tolerance import BF16
from megalith.train.trainer import DTYPES

LIMIT_SECONDS = 480.0
GUESSED_SECONDS = 75.0
"""A case's share of the time when none has run yet: building and compiling, mostly. A guess."""


BAR, BAR_CASE = 1.3, "1b-bf16"
MIXTURE_BAR, MIXTURE_CASE = 2.0, "mixture"
ALONE = "matmuls alone"


@dataclass(frozen=True, slots=True)
class Case:
    """One model in one precision, with a step of one microbatch."""

    recipe: Callable[[], TrainRun]
    params: Literal["fp32", "bf16"]
    graphs: bool = False
    """Whether CUDA graphs are tried: they save launches, which small models wait for."""


def resized(
    recipe: Callable[[], TrainRun], *, rows: int, seq_len: int | None = None, microbatches: int = 1
) -> Callable[[], TrainRun]:
    """The recipe with a step of so many rows."""

    def changed() -> TrainRun:
        run = recipe()
        train = replace(run.train, global_batch_size=rows, micro_batch_size=rows // microbatches)
        return replace(run, train=replace(train, seq_len=seq_len or run.train.seq_len))

    return changed


CASES: Mapping[str, Case] = {
    "1b-bf16": Case(resized(recipes()["llama3_1b"], rows=2, seq_len=4096), "bf16"),
    "29m-bf16": Case(resized(recipes()["llama_29m"], rows=32), "bf16", graphs=True),
    "125m-bf16": Case(resized(recipes()["llama_125m"], rows=16), "bf16", graphs=True),
    "350m-bf16": Case(resized(recipes()["llama_350m"], rows=8), "bf16"),
    "29m-fp32": Case(resized(recipes()["llama_29m"], rows=32), "fp32"),
    "125m-fp32": Case(resized(recipes()["llama_125m"], rows=16), "fp32"),
}
TINY: Mapping[str, Case] = {
    "tiny-bf16": Case(tiny, "bf16", graphs=True),
    "tiny-fp32": Case(tiny, "fp32"),
}


def in_bf16(recipe: Callable[[], TrainRun]) -> Callable[[], TrainRun]:
    """The recipe with weights in bf16."""
    return lambda: with_precision(recipe(), "bf16")


LAYOUT_CASES: Mapping[str, Callable[[], TrainRun]] = {
    "layouts": in_bf16(resized(recipes()["llama_350m"], rows=16, microbatches=4)),
    "tiny-layouts": in_bf16(resized(tiny, rows=4, microbatches=4)),
}
MIXTURES: Mapping[str, Mixture] = {
    "mixture": Mixture(qwen3_moe, tokens=8192),
    "tiny-mixture": Mixture(tiny_moe, tokens=50),
}
SERVING_CASES: Mapping[str, ServingCase] = {
    "serve": ServingCase(lambda: recipes()["llama3_8b"]().model, torch.bfloat16),
    "tiny-serve": ServingCase(
        lambda: tiny().model, torch.float32, batches=(1, 4), context=20, steps_per_round=2
    ),
}
ORDER = (
    "1b-bf16",
    "mixture",
    "serve",
    "125m-bf16",
    "layouts",
    "29m-bf16",
    "350m-bf16",
    "29m-fp32",
    "125m-fp32",
)
"""The most telling ones first."""


def doctor() -> None:
    """What `megalith doctor` prints."""
    machine, result = read_machine(), capabilities()
    rates = [measure("cpu"), *(measure(f"cuda:{i}") for i in range(len(machine.gpus)))]
    print_report(machine, result, rates, advise(machine, result, rates))


def parity(device: torch.device) -> bool:
    """Print how far every kernel is from its reference; whether all are close enough."""
    print(
        f"kernels on {device} against float64 references on the CPU (largest relative error, "
        "gradients included)"
    )
    holds = True
    for error in compare_kernels(device):
        print(
            f"  {'holds ' if error.holds else 'MISSED'} {error.kernel:24} {error.dtype:9} "
            f"{error.relative:.1e}"
        )
        holds = holds and error.holds
    return holds


def compare_kernels_of_training(device: torch.device, *, rounds: int) -> None:
    """Print what each kernel takes, forward and backward in bf16, and how many times as fast as
    other backends that is."""
    sizes = SMALL if device.type == "cpu" else LARGE
    print(
        f"kernels on {device}, bf16, forward and backward of {sizes.tokens} tokens, "
        f"{rounds} rounds",
        flush=True,
    )
    for name, backends in contests(device, torch.bfloat16, sizes):
        turns = take_turns(
            {backend: until_done(run, device) for backend, run in backends.items()},
            rounds=rounds,
            warmup=2,
        )
        ours = turns.seconds["auto"]
        others = "; ".join(
            f"{backend} {times_as_fast(ours, taken)}"
            for backend, taken in turns.seconds.items()
            if backend != "auto"
        )
        print(
            f"  {name:22} {1e3 * statistics.median(ours):8.2f} ms, times as fast as: {others}",
            flush=True,
        )


@torch.inference_mode()
def compare_kernels_of_inference(device: torch.device, *, rounds: int) -> bool:
    """Print what each kernel of the inference engine takes, in bf16, and how many times as fast as
    other backends that is; whether it computes what torch computes."""
    sizes = inference.SMALL if device.type == "cpu" else inference.LARGE
    print(f"kernels of inference on {device}, bf16, {rounds} rounds", flush=True)
    holds = True
    for name, backends in inference.list_inference_backends(device, torch.bfloat16, sizes):
        error = inference.largest_error(backends)
        holds = holds and error <= BF16.relative
        turns = take_turns(
            {backend: until_done(run, device) for backend, run in backends.items()},
            rounds=rounds,
            warmup=2,
        )
        ours = turns.seconds["auto"]
        others = "; ".join(
            f"{backend} {times_as_fast(ours, taken)}"
            for backend, taken in turns.seconds.items()
            if backend != "auto"
        )
        print(
            f"  {'holds ' if error <= BF16.relative else 'MISSED'} {name:28} "
            f"{1e6 * statistics.median(ours):9.1f} us, error {error:.1e}, times as fast as: "
            f"{others}",
            flush=True,
        )
    return holds


def throughput(name: str, device: torch.device, *, rounds: int, compiled: bool) -> None:
    """Print one case: every contender's rate, utilization and memory, the ratios, and the bar."""
    case = {**CASES, **TINY}[name]
    run = with_precision(case.recipe(), case.params)
    batches = random_step(run, device)
    print(
        f"{name}: {run.train.global_batch_size} rows of {run.train.seq_len} tokens, "
        f"{rounds} rounds",
        flush=True,
    )
    peak, seconds = device_peak_tflops(device, DTYPES[case.params]), dict[str, list[float]]()
    for names in groups(run, device, compiled=compiled, graphs=case.graphs):
        contenders, left_out = alike(
            build(names, run, batches, device), LOSS_TOLERANCE[case.params]
        )
        for text in left_out:
            print(f"  {text}")
        extra = {
            each: extra_memory_gib(contender.step, device) for each, contender in contenders.items()
        }
        steps = {each: until_done(contender.step, device) for each, contender in contenders.items()}
        turns = take_turns(steps, rounds=rounds, warmup=2)
        for each, times in turns.seconds.items():
            memory = f"{contenders[each].held_gib:.2f} GiB held, {extra[each]:.2f} more in a step"
            print(f"  {each:22} {rate(run, times, peak)}, {memory}")
        show_ratios(turns.seconds)
        seconds |= turns.seconds
        del contenders, steps, turns  # before the next ones are built
        free(device)
    if name == BAR_CASE:
        print(f"  {verdict(seconds)}")


def rate(run: TrainRun, times: Sequence[float], peak: float | None) -> str:
    """PackedSeqParams per second and what that is of the device's peak."""
    tokens = run.train.global_batch_size * run.train.seq_len / statistics.median(times)
    tflops = tokens * flops_per_token(run.model, run.train.seq_len) / 1e12
    return f"{tokens:12,.0f} tokens/s {of_peak(tflops, peak)}"


def of_peak(tflops: float, peak: float | None) -> str:
    """A rate, and what it is of the device's peak."""
    used = f"{100 * tflops / peak:5.1f} % of {peak:.3g}" if peak else "peak rate unknown"
    return f"{tflops:8.1f} TFLOP/s ({used})"


def free(device: torch.device) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()


def show_ratios(seconds: Mapping[str, list[float]]) -> None:
    """Ours against theirs, round by round; and what compiling and graphs bring us."""
    ours, reference = (
        [name for name in seconds if name.startswith("ours") == actual] for actual in (True, False)
    )
    pairs = [(actual, other) for actual in ours for other in reference]
    pairs += [(faster, slower) for slower, faster in pairwise(ours)]
    for actual, other in pairs:
        print(f"  {actual} / {other}: {times_as_fast(seconds[actual], seconds[other])}")


def verdict(seconds: Mapping[str, Sequence[float]], bar: float = BAR) -> str:
    """The fastest of ours against the fastest of theirs, by medians: they need not have taken
    turns."""
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ours, reference = (
        min(
            (name for name in medians if name.startswith("ours") == actual),
            key=lambda name: medians[name],
        )
        for actual in (True, False)
    )
    times = medians[reference] / medians[ours]
    return f"{'holds ' if times >= bar else 'MISSED'} {ours} / {reference} >= {bar}: {times:.3f}"


def mixture(name: str, device: torch.device, *, rounds: int) -> bool:
    """Print one layer of experts: each contender's time, rate and memory, the ratios, the bar, and
    its matmuls alone.

    Whether all contenders compute the same.
    """
    layer = Layer(MIXTURES[name], device)
    print(f"{name}: {layer.words()}, {rounds} rounds", flush=True)
    steps = layer.steps()
    wrong = unlike(steps)
    for text in wrong:
        print(f"  MISSED {text}")
    extra = {
        each: f", {extra_memory_gib(step, device):.2f} more GiB in a step"
        for each, step in steps.items()
    }
    matmuls = layer.matmuls()
    parts = matmuls.parts()
    racing = {
        each: until_done(step, device)
        for each, step in {**steps, ALONE: matmuls.step, **parts}.items()
    }
    turns, peak = take_turns(racing, rounds=rounds, warmup=2), device_peak_tflops(device, DTYPE)
    for each, times in turns.seconds.items():
        seconds, operations = (
            statistics.median(times),
            matmuls.operations / (len(parts) if each in parts else 1),
        )
        used = of_peak(operations / seconds / 1e12, peak)
        print(f"  {each:24} {1e3 * seconds:9.3f} ms {used}{extra.get(each, '')}")
    layers = {each: turns.seconds[each] for each in steps}
    show_ratios(layers)
    print(f"  ours reaches {times_as_fast(layers['ours'], turns.seconds[ALONE])} of its {ALONE}")
    if name == MIXTURE_CASE:
        del layers[AS_THEIRS]  # runs compute it in fp32
        print(f"  {verdict(layers, MIXTURE_BAR)}")
    return not wrong


def serving(name: str, device: torch.device, *, rounds: int) -> None:
    """Print how fast decode steps are, with graphs and without."""
    print(f"{name}: {describe(SERVING_CASES[name], rounds=rounds)}", flush=True)
    for line in compare_graphs(SERVING_CASES[name], device, rounds=rounds):
        print(f"  {line}", flush=True)


def layouts(name: str, device: torch.device, *, rounds: int) -> None:
    """Start the ranks that compare layouts; they print."""
    run = LAYOUT_CASES[name]()
    gpus = torch.cuda.device_count() if device.type != "cpu" else RANKS
    if gpus < RANKS:
        print(f"{name}: left out, it needs {RANKS} GPUs and there is {gpus}.")
        return
    print(
        f"{name}: {run.train.global_batch_size} rows of {run.train.seq_len} tokens on {RANKS} "
        f"ranks, {rounds} rounds"
    )
    sys.stdout.flush()
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device.type == "cpu" else {}
    command = sys.executable, str(Path(__file__).resolve()), "--case", name
    run_workers(
        ["--rounds", str(rounds)], RANKS, command=command, environment={**os.environ, **hidden}
    )


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["all", "serve"], default="all", help="serve: inference only"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--plan", action="store_true", help="only print what serve measures")
    known = [*CASES, *LAYOUT_CASES, *MIXTURES, *SERVING_CASES, *TINY]
    parser.add_argument(
        "--case", action="append", choices=known, help="again for more; all but tiny ones if unset"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument(
        "--no-compiled", action="store_true", help="leave the compiled contenders out"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=LIMIT_SECONDS / 60,
        help="begin no case that would end later",
    )
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if in_worker(os.environ):
        (name,) = options.case
        return worker_main(
            lambda: compare_layouts(LAYOUT_CASES[name](), rounds=options.rounds), os.environ
        )
    if options.plan:
        print(f"serve: {describe(SERVING_CASES['serve'], rounds=options.rounds)}")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "There is no NVIDIA GPU here that torch can use: nothing was measured. Use --device "
            "cpu to rehearse."
        )
        return 0
    started, longest = time.monotonic(), GUESSED_SECONDS
    device = torch.device(options.device)
    if device.type == "cuda":
        doctor()
    holds = parity(device)
    if options.part == "all":
        compare_kernels_of_training(device, rounds=options.rounds)
        holds = compare_kernels_of_inference(device, rounds=options.rounds) and holds
        free(device)
    for name in options.case or (ORDER if options.part == "all" else ("serve",)):
        began = time.monotonic()
        if began - started + longest > 60 * options.minutes:
            print(f"{name}: left out, no time. Use --case {name}, or more --minutes.")
            continue
        if name in LAYOUT_CASES:
            layouts(name, device, rounds=options.rounds)
        elif name in SERVING_CASES:
            serving(name, device, rounds=options.rounds)
            free(device)
        elif name in MIXTURES:
            holds = mixture(name, device, rounds=options.rounds) and holds
            free(device)
        else:
            throughput(name, device, rounds=options.rounds, compiled=not options.no_compiled)
        # no other is as large
        longest = max(longest, time.monotonic() - began) if name != BAR_CASE else longest
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

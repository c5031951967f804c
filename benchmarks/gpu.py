"""Everything worth knowing about one GPU, in one command of at most about 8 minutes.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --case 125m-bf16 --rounds 21
    python benchmarks/gpu.py --device cpu --case tiny-bf16        a rehearsal without a GPU

Prints what the machine has and how fast it is (`megalith doctor`), whether every kernel computes on it what its plain
reference computes in float64 on the CPU, and then, case by case, tokens/s, utilisation of the peak rate and memory of
our training step (eager and with compiled layers) beside transformers' Llama (eager and compiled). Contenders take
turns in each round; ratios are by round. A case is begun only while there is time for it.

Written without a GPU at hand: the rehearsal is tested, the rest of it has not run on hardware yet.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from contenders.ours import Ours, random_step, with_precision
from contenders.parity import compare_kernels
from contenders.transformers_llama import TransformersLlama
from paired import take_turns, times_as_fast
from train import LOSS_TOLERANCE, check_losses, tiny

from megalith.cli.doctor import print_report
from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.observe.capabilities import capabilities
from megalith.observe.checkup import advise, measure
from megalith.observe.machine import device_peak_tflops, read_machine
from megalith.plan.costs import flops_per_token
from megalith.recipes.small import llama_29m, llama_125m, llama_350m
from megalith.train.build import DTYPES

LIMIT_SECONDS = 480.0
GUESSED_SECONDS = 75.0
"""A case's share of the time when none has run yet: building and compiling, mostly. A guess."""


def one_microbatch(recipe: Callable[[], TrainRun], *, rows: int) -> Callable[[], TrainRun]:
    """The recipe with a step of one microbatch of `rows` rows."""

    def shortened() -> TrainRun:
        run = recipe()
        return replace(run, train=replace(run.train, global_batch_size=rows, micro_batch_size=rows))

    return shortened


CASES: Mapping[str, tuple[Callable[[], TrainRun], str]] = {
    "29m-bf16": (one_microbatch(llama_29m, rows=32), "bf16"),
    "125m-bf16": (one_microbatch(llama_125m, rows=16), "bf16"),
    "350m-bf16": (one_microbatch(llama_350m, rows=8), "bf16"),
    "29m-fp32": (one_microbatch(llama_29m, rows=32), "fp32"),
    "125m-fp32": (one_microbatch(llama_125m, rows=16), "fp32"),
}
TINY: Mapping[str, tuple[Callable[[], TrainRun], str]] = {"tiny-bf16": (tiny, "bf16"), "tiny-fp32": (tiny, "fp32")}


def doctor() -> None:
    """What `megalith doctor` prints."""
    machine, found = read_machine(), capabilities()
    rates = [measure("cpu"), *(measure(f"cuda:{i}") for i in range(len(machine.gpus)))]
    print_report(machine, found, rates, advise(machine, found, rates))


def parity(device: torch.device) -> bool:
    """Print how far every kernel is from its reference; whether all are close enough."""
    print(f"kernels on {device} against float64 references on the CPU (largest relative error, gradients included)")
    holds = True
    for error in compare_kernels(device):
        print(f"  {'holds ' if error.holds else 'MISSED'} {error.kernel:24} {error.dtype:9} {error.relative:.1e}")
        holds = holds and error.holds
    return holds


def throughput(name: str, device: torch.device, *, rounds: int, compiled: bool) -> None:
    """Print one case: every contender's rate, utilisation and memory, and the ratios."""
    recipe, params = {**CASES, **TINY}[name]
    run = with_precision(recipe(), params)
    batches = random_step(run, device)
    contenders = build(run, batches, device, compiled=compiled)
    losses = {contender: step() for contender, step in contenders.items()}
    check_losses(losses, LOSS_TOLERANCE[params])
    memory = {contender: _extra_memory_gib(step, device) for contender, step in contenders.items()}
    turns = take_turns(
        {contender: _until_done(step, device) for contender, step in contenders.items()}, rounds=rounds, warmup=3
    )
    tokens = run.train.global_batch_size * run.train.seq_len
    peak = device_peak_tflops(device, DTYPES[params])
    print(f"{name}: {run.train.global_batch_size} rows of {run.train.seq_len} tokens, {rounds} rounds")
    for contender, seconds in turns.seconds.items():
        rate = tokens / times_as_fast([1.0] * len(seconds), seconds).median
        tflops = rate * flops_per_token(run.model, run.train.seq_len) / 1e12
        used = f"{100 * tflops / peak:5.1f} % of {peak:.3g}" if peak else "peak rate unknown"
        print(
            f"  {contender:22} {rate:12,.0f} tokens/s {tflops:8.1f} TFLOP/s ({used}), {memory[contender]:.2f} GiB more"
        )
    for mine in (contender for contender in contenders if contender.startswith("ours")):
        for theirs in (contender for contender in contenders if not contender.startswith("ours")):
            print(f"  {mine} / {theirs}: {times_as_fast(turns.seconds[mine], turns.seconds[theirs])}")


def build(
    run: TrainRun, batches: StepBatches, device: torch.device, *, compiled: bool
) -> dict[str, Callable[[], float]]:
    """One training step per contender, all from the same weights."""
    ours = Ours(run, batches, device)
    steps = {"ours": ours.step, "transformers": TransformersLlama(run, batches, ours.weights(), compiled=False).step}
    if compiled:
        with_compiled_layers = replace(run, train=replace(run.train, compile=True))
        steps["ours compiled"] = Ours(with_compiled_layers, batches, device).step
        steps["transformers compiled"] = TransformersLlama(run, batches, ours.weights(), compiled=True).step
    return steps


def _until_done(step: Callable[[], float], device: torch.device) -> Callable[[], None]:
    """The step with a wait for the device at its end: an optimizer update may still be running when it returns."""

    def whole() -> None:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return whole


def _extra_memory_gib(step: Callable[[], float], device: torch.device) -> float:
    """The most that a step holds beyond what all contenders keep between steps; 0 on a CPU, where nobody counts."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--case", action="append", choices=[*CASES, *TINY], help="again for more; all if unset")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-compiled", action="store_true", help="leave the compiled contenders out")
    parser.add_argument("--minutes", type=float, default=LIMIT_SECONDS / 60, help="begin no case that would end later")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no NVIDIA GPU here that torch can use: nothing was measured. Use --device cpu to rehearse.")
        return 0
    started, longest = time.monotonic(), GUESSED_SECONDS
    device = torch.device(options.device)
    if device.type == "cuda":
        doctor()
    holds = parity(device)
    for name in options.case or CASES:
        began = time.monotonic()
        if began - started + longest > 60 * options.minutes:
            print(f"{name}: left out, no time. Use --case {name}, or more --minutes.")
            continue
        throughput(name, device, rounds=options.rounds, compiled=not options.no_compiled)
        longest = max(longest, time.monotonic() - began)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

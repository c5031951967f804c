"""AdamW's one-pass update against torch's fused AdamW and a rounding copy, 6M and 29M parameters.

    python benchmarks/update.py                          31 rounds, 1 and 2 threads
    python benchmarks/update.py --rounds 61 --json

All start from the same weights, gradients and states, must reach the same weights, and then take
turns: every figure is a ratio of two times of the same round; "computing" is the time of all
threads, which other jobs on the machine disturb less. Weights are bf16 with fp32 master weights;
"remainders": bf16 moments, and bf16 weights with 16-bit remainders.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from paired import Spread, take_turns, times_as_fast
from torch import Tensor

from megalith.kernels.adamw import (
    AdamWScalars,
    AdamWTensors,
    RemainderTensors,
    update_adamw,
    update_remainder_adamw,
)
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.plan.parameters import held_parameters
from megalith.recipes import build_recipe

BARS = {"fp32": 1.1, "remainders": 0.9}
DIVISOR = 1.25
"""Inverse of the clip factor."""

TOLERANCE = 2.0**-7
"""Largest difference of the weights after one update, relative to the largest weight: one unit in
the last place of bf16. fp32 states agree bitwise up to the end of each slice."""

RECIPES = {"6M": "llama_6m", "29M": "llama_29m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times of one model and one number of threads."""

    model: str
    parameters: int
    threads: int
    rounds: int
    load: float
    """Load of the machine over the last minute, before the rounds."""

    wall: dict[str, Spread]
    """How many times as fast as torch each state format is."""

    computing: dict[str, Spread]
    """The same by computing time."""

    milliseconds: dict[str, float]
    """Medians by the clock."""

    holds: bool


def draw_slots(numels: Sequence[int]) -> list[AdamWTensors]:
    """Return gradients, master weights, states and bf16 weights, the same in every call."""
    generator = torch.Generator().manual_seed(0)

    def draw(numel: int, scale: float) -> Tensor:
        return torch.randn(numel, generator=generator) * scale

    slots = []
    for numel in numels:
        master, mean = draw(numel, 0.02), draw(numel, 1e-3)
        square = draw(numel, 1e-3).square_().add_(1e-6)
        slots.append(AdamWTensors(draw(numel, 1e-3), master, mean, square, master.bfloat16()))
    return slots


def build_scalars(updates: int) -> AdamWScalars:
    """Return the scalars of an update."""
    return AdamWScalars(
        lr=1e-3,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        updates=updates,
        gradient_divisor=DIVISOR,
    )


class OnePass:
    """The compiled loop with fp32 states."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.slots = draw_slots(numels)
        self.weights = [slot.weight for slot in self.slots]
        self.updates = 0

    def step(self) -> None:
        """Update all weights once."""
        self.updates += 1
        update_adamw(self.slots, build_scalars(self.updates))


class OnePassRemainders:
    """The compiled loop with bf16 moments and remainders."""

    def __init__(self, numels: Sequence[int]) -> None:
        self.slots = [
            RemainderTensors(
                slot.gradient,
                slot.weight,
                slot.mean.bfloat16(),
                slot.square.bfloat16(),
                slot.master.view(torch.int32).to(torch.int16),
            )
            for slot in draw_slots(numels)
        ]
        self.weights = [slot.weight for slot in self.slots]
        self.updates = 0

    def step(self) -> None:
        """Update all weights once."""
        self.updates += 1
        update_remainder_adamw(self.slots, build_scalars(self.updates))


class TorchFused:
    """torch's fused AdamW, then the rounding copy."""

    def __init__(self, numels: Sequence[int]) -> None:
        slots = draw_slots(numels)
        self.gradients = [slot.gradient for slot in slots]
        self.master_weights = [slot.master for slot in slots]
        self.means = [slot.mean for slot in slots]
        self.squares = [slot.square for slot in slots]
        self.weights = [slot.weight for slot in slots]
        self.updates = 0

    def step(self) -> None:
        """Update all weights once; this scales the gradients in place."""
        self.updates += 1
        scalars = build_scalars(self.updates)
        torch._fused_adamw_(
            self.master_weights,
            self.gradients,
            self.means,
            self.squares,
            [],
            [torch.tensor(float(self.updates))] * len(self.master_weights),
            lr=scalars.lr,
            beta1=scalars.beta1,
            beta2=scalars.beta2,
            weight_decay=scalars.weight_decay,
            eps=scalars.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(scalars.gradient_divisor),
        )
        torch._foreach_copy_(self.weights, self.master_weights)


def measure(model: str, *, threads: int, rounds: int, warmup: int) -> Report:
    """Compare the weights of all contenders after one update, then let them take turns."""
    torch.set_num_threads(threads)
    held = held_parameters(build_recipe(RECIPES[model]).model)
    numels = [one.numel for one in held if one.counts]
    reference = TorchFused(numels)
    ours: dict[str, OnePass | OnePassRemainders] = {
        "fp32": OnePass(numels),
        "remainders": OnePassRemainders(numels),
    }
    steps: dict[str, Callable[[], object]] = {"torch": reference.step}
    reference.step()
    for name, contender in ours.items():
        contender.step()
        check_weights(name, contender.weights, reference.weights)
        steps[name] = contender.step

    load = os.getloadavg()[0]
    turns = take_turns(steps, rounds=rounds, warmup=warmup)
    seconds, cpu_seconds = turns.seconds, turns.cpu_seconds
    wall = {name: times_as_fast(seconds[name], seconds["torch"]) for name in ours}
    return Report(
        model=model,
        parameters=sum(numels),
        threads=threads,
        rounds=rounds,
        load=load,
        wall=wall,
        computing={name: times_as_fast(cpu_seconds[name], cpu_seconds["torch"]) for name in ours},
        milliseconds={name: 1e3 * statistics.median(taken) for name, taken in seconds.items()},
        holds=all(wall[name].median >= bar for name, bar in BARS.items()),
    )


def check_weights(name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Exit with an error unless the weights agree."""
    for number, (weight, other) in enumerate(zip(ours, theirs, strict=True)):
        largest = float(other.float().abs().max())
        error = float((weight.float() - other.float()).abs().max()) / max(largest, 1e-30)
        if error > TOLERANCE:
            raise SystemExit(
                f"{name}: weights of slot {number} differ from torch's by {error:.2g} of the "
                f"largest, expected at most {TOLERANCE:.2g}"
            )


def show(report: Report) -> None:
    """Print a report for people."""
    times = ", ".join(f"{name} {taken:.1f} ms" for name, taken in report.milliseconds.items())
    print(
        f"{report.model} ({report.parameters / 1e6:.1f}M parameters), {report.threads} threads, "
        f"{report.rounds} rounds, load {report.load:.1f}: {times}"
    )
    for name, wall in report.wall.items():
        print(
            f"  {name}: {wall} times as fast as torch, bar {BARS[name]}; by computing time "
            f"{report.computing[name]}"
        )
    print(f"  {'holds' if report.holds else 'MISSED'}")


def main() -> int:
    """Measure, print, and return 0 if the bars hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    # as `megalith train` does; torch's optimizer shares the process, so it gains from it too
    keep_freed_memory()
    reports = []
    for model in options.models:
        for threads in options.threads:
            report = measure(model, threads=threads, rounds=options.rounds, warmup=options.warmup)
            reports.append(report)
            if not options.json:
                show(report)
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))
    return int(not all(report.holds for report in reports))


if __name__ == "__main__":
    sys.exit(main())

"""PackedSeqParams per second of our training step, of transformers' Llama (eager and compiled), and
of the step's own matmuls.

    python benchmarks/train.py                                  all cases, 11 rounds, 2 threads
    python benchmarks/train.py --case 29m-bf16 --rounds 21      one case
    python benchmarks/train.py --json

One process holds all contenders; they take turns in each round, one step each, and every figure is
a ratio of two times of the same round. Before that, ours and the peers must compute the same loss
on the same weights. All figures of the table are medians; "computing" is the time of all threads
together, which other jobs on the machine disturb less.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from contenders.limit import Attention, Matmuls
from contenders.ours import Ours, random_step, with_precision
from contenders.transformers_llama import TransformersLlama
from paired import Spread, Turns, take_turns, times_as_fast

from megalith.config.train import TrainRun
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.observe.machine import cpp_compiler
from megalith.recipes import build_recipe, recipes

PEERS = ("eager", "compiled")
BAR_PEER, BAR_PEER_QUARTILE = 1.0, 0.97
BAR_LIMIT = {"fp32": 0.80, "bf16": 0.75}
GOAL_BF16 = 1.25
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Relative: rounding of a mean over thousands of tokens, in sums of another order."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape in one precision."""

    name: str
    params: Literal["fp32", "bf16"]
    recipe: Callable[[], TrainRun]


def tiny() -> TrainRun:
    """A model of a few thousand weights, to see that everything runs; its figures mean nothing."""
    run = build_recipe("llama_6m")
    model = replace(
        run.model,
        vocab_size=128,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=48,
    )
    return replace(
        run,
        model=model,
        train=replace(run.train, global_batch_size=2, micro_batch_size=1, seq_len=48),
    )


CASES = (
    Case("6m-fp32", "fp32", recipes()["llama_6m"]),
    Case("6m-bf16", "bf16", recipes()["llama_6m"]),
    Case("29m-fp32", "fp32", recipes()["llama_29m"]),
    Case("29m-bf16", "bf16", recipes()["llama_29m"]),
)
TINY = (Case("tiny-fp32", "fp32", tiny), Case("tiny-bf16", "bf16", tiny))


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one case showed."""

    case: str
    rounds: int
    tokens_per_second: dict[str, float]
    cpu_seconds: dict[str, float]
    best_peer: str
    against_peer: Spread
    against_limit: Spread
    attention: str
    """Whose attention the limit counts: the faster one."""

    losses: dict[str, float]
    holds: dict[str, bool]


def measure(case: Case, *, rounds: int, warmup: int, compiled: bool) -> Report:
    """Build all contenders of a case, compare their losses, let them take turns."""
    run = with_precision(case.recipe(), case.params)
    device = torch.device("cpu")
    batches = random_step(run, device)
    ours = Ours(run, batches, device)
    peers = {
        name: TransformersLlama(run, batches, ours.weights(), compiled=name == "compiled")
        for name in PEERS[: 1 + compiled]
    }
    losses = {"ours": ours.step(), **{name: peer.step() for name, peer in peers.items()}}
    check_losses(losses, LOSS_TOLERANCE[case.params])
    turns = take_turns(
        {
            "ours": ours.step,
            **{name: peer.step for name, peer in peers.items()},
            "matmuls": Matmuls(run, device).step,
            "attention": Attention(run, device, ours=True).step,
            "sdpa": Attention(run, device, ours=False).step,
        },
        rounds=rounds,
        warmup=warmup,
    )
    return evaluate(case, turns, losses, tokens=run.train.global_batch_size * run.train.seq_len)


def check_losses(losses: dict[str, float], tolerance: float) -> None:
    """Every contender computed the same loss, or the comparison means nothing."""
    for name, loss in losses.items():
        if abs(loss - losses["ours"]) > tolerance * abs(losses["ours"]):
            sys.exit(
                f"loss of {name} is {loss}, of ours {losses['ours']}: expected the same. Use equal "
                "weights and labels."
            )


def evaluate(case: Case, turns: Turns, losses: dict[str, float], *, tokens: int) -> Report:
    """From times to ratios and bars."""
    seconds = dict(turns.seconds)
    kernel = min("attention", "sdpa", key=lambda name: statistics.median(seconds[name]))
    seconds["limit"] = [a + b for a, b in zip(seconds["matmuls"], seconds[kernel], strict=True)]
    best = min(
        (name for name in PEERS if name in seconds),
        key=lambda name: statistics.median(seconds[name]),
    )
    peer, limit = (
        times_as_fast(seconds["ours"], seconds[best]),
        times_as_fast(seconds["ours"], seconds["limit"]),
    )
    holds = {
        f"ours/best peer >= {BAR_PEER}": peer.median >= BAR_PEER,
        f"its lower quartile >= {BAR_PEER_QUARTILE}": peer.lower >= BAR_PEER_QUARTILE,
        f"ours/limit >= {BAR_LIMIT[case.params]}": limit.median >= BAR_LIMIT[case.params],
    }
    if case.params == "bf16":
        holds[f"goal: ours/best peer >= {GOAL_BF16}"] = peer.median >= GOAL_BF16
    return Report(
        case=case.name,
        rounds=len(seconds["ours"]),
        tokens_per_second={
            name: tokens / statistics.median(taken) for name, taken in seconds.items()
        },
        cpu_seconds={name: statistics.median(taken) for name, taken in turns.cpu_seconds.items()},
        best_peer=best,
        against_peer=peer,
        against_limit=limit,
        attention=kernel,
        losses=losses,
        holds=holds,
    )


def show(report: Report) -> None:
    """For people."""
    print(f"{report.case}: {report.rounds} rounds")
    for name, rate in report.tokens_per_second.items():
        cpu = (
            f", {report.cpu_seconds[name]:.3f} s of computing" if name in report.cpu_seconds else ""
        )
        loss = f", first loss {report.losses[name]:.5f}" if name in report.losses else ""
        print(f"  {name:9} {rate:12,.0f} tokens/s{cpu}{loss}")
    print(f"  ours / {report.best_peer}: {report.against_peer}")
    print(f"  ours / limit (matmuls + {report.attention}): {report.against_limit}")
    for bar, holds in report.holds.items():
        print(f"  {'holds ' if holds else 'MISSED'} {bar}")


def parse() -> argparse.Namespace:
    names = [case.name for case in (*CASES, *TINY)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        action="append",
        choices=names,
        help="again for more; all but the tiny ones if unset",
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compiled", action="store_true", help="leave the compiled peer out")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    # as `megalith train` does; the peers share the process, so they gain from it too
    keep_freed_memory()
    compiled = not options.no_compiled
    if compiled and cpp_compiler() is None:
        print("no C++ compiler on this machine: the compiled peer is left out", file=sys.stderr)
        compiled = False
    wanted = options.case or [case.name for case in CASES]
    reports = []
    for case in (*CASES, *TINY):
        if case.name in wanted:
            reports.append(
                measure(case, rounds=options.rounds, warmup=options.warmup, compiled=compiled)
            )
            if not options.json:
                show(reports[-1])
    if options.json:
        print(json.dumps([asdict(report) for report in reports], indent=2))


if __name__ == "__main__":
    main()

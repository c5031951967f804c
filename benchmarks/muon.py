"""Muon's update of the matrices of a 29M Llama against torch.optim.Muon: same coefficients, steps
and scale.

    python benchmarks/muon.py                    11 rounds, 2 threads
    python benchmarks/muon.py --rounds 21 --json

Both start from the same weights and gradients, must reach the same weights, and then take turns:
every figure is a ratio of two times of the same round; "computing" is the time of all threads,
which other jobs on the machine disturb less. torch.optim.Muon always computes in bf16, and so does
ours; --fp32 adds ours in fp32, plain and with Gram matrices.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from paired import Spread, take_turns, times_as_fast
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.optim import MuonConfig, OptimConfig
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.optim.muon import Muon
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import build_slot
from megalith.plan.shards import Shard
from megalith.recipes import build_recipe

BAR, GOAL = 1.0, 1.3
LR, WEIGHT_DECAY = 1e-3, 0.1
TOLERANCE = 1e-3
"""Largest difference of the weights after one update, relative to the largest weight. torch sums
the norm in fp32; where that rounds to another bf16 number than ours, in float64, updates differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times of ours and torch's."""

    matrices: int
    parameters: int
    rounds: int
    wall: dict[str, Spread]
    """How many times as fast each of ours is as torch.optim.Muon."""

    computing: dict[str, Spread]
    """The same by computing time."""

    milliseconds: dict[str, float]
    """Medians."""

    holds: bool


def list_shapes(model: ModelConfig) -> list[tuple[int, int]]:
    """Return the shapes of all matrices of a dense Llama."""
    h, ffn = model.hidden_size, model.ffn_hidden_size
    kv = h // model.num_heads * model.num_kv_heads
    layer = [(h, h), (kv, h), (kv, h), (h, h), (ffn, h), (ffn, h), (h, ffn)]
    return layer * model.num_layers


class Ours:
    """Our rule on whole matrices; those of one shape are computed together."""

    def __init__(self, weights: Sequence[Tensor], config: MuonConfig) -> None:
        self.rule = Muon(OptimConfig(muon=config))
        self.slots = [
            build_slot(Shard.full(f"w{i}", tuple(w.shape)), w.clone(), self.rule.roles)
            for i, w in enumerate(weights)
        ]
        shapes = sorted({tuple(w.shape) for w in weights})
        self.batches = [
            [i for i, w in enumerate(weights) if tuple(w.shape) == shape] for shape in shapes
        ]
        self.updates = 0

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update all matrices once; overwrites the gradients."""
        self.updates += 1
        scalars = UpdateScalars(LR, WEIGHT_DECAY, self.updates)
        inputs = self.rule.prepare(self.slots, gradients, scalars)
        dtype = self.rule.message_dtype(torch.float32)
        for batch in self.batches:
            rows, columns = inputs[batch[0]].shape
            matrices = torch.empty(len(batch), rows, columns, dtype=dtype)
            for matrix, i in zip(matrices, batch, strict=True):
                matrix.copy_(inputs[i])
            directions = self.rule.compute_direction(matrices, {}, self.updates)
            master_weights = [self.slots[i].master for i in batch]
            self.rule.apply(master_weights, list(directions.unbind()), (rows, columns), scalars)


class TorchMuon:
    """torch.optim.Muon with the learning rates of AdamW."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.parameters = [torch.nn.Parameter(w.clone()) for w in weights]
        self.optimizer = torch.optim.Muon(
            self.parameters, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update all matrices once."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()


def measure(recipe: str, *, rounds: int, warmup: int, fp32: bool) -> Report:
    """Compare the weights of all contenders after one update, then let them take turns."""
    shapes = list_shapes(build_recipe(recipe).model)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    gradients = [torch.randn(shape, generator=generator) * 1e-3 for shape in shapes]
    config = MuonConfig(coefficients="simple", dtype="bf16")
    configs = {"bf16": config}
    if fp32:
        configs["fp32"] = replace(config, dtype="fp32")
        configs["fp32 gram"] = replace(config, dtype="fp32", newton_schulz="gram")

    reference = TorchMuon(weights)
    ours = {name: Ours(weights, config) for name, config in configs.items()}
    reference.step(gradients)
    for name, contender in ours.items():
        contender.step([gradient.clone() for gradient in gradients])
        check_weights(name, contender, reference)

    contenders = {name: partial(contender.step, gradients) for name, contender in ours.items()}
    turns = take_turns(
        {"torch": partial(reference.step, gradients), **contenders}, rounds=rounds, warmup=warmup
    )
    seconds, cpu_seconds = turns.seconds, turns.cpu_seconds
    wall = {name: times_as_fast(seconds[name], seconds["torch"]) for name in ours}
    return Report(
        matrices=len(shapes),
        parameters=sum(rows * columns for rows, columns in shapes),
        rounds=rounds,
        wall=wall,
        computing={name: times_as_fast(cpu_seconds[name], cpu_seconds["torch"]) for name in ours},
        milliseconds={name: 1e3 * statistics.median(taken) for name, taken in seconds.items()},
        holds=wall["bf16"].median >= BAR,
    )


def check_weights(name: str, ours: Ours, reference: TorchMuon) -> None:
    """Exit with an error unless the weights agree."""
    for slot, parameter in zip(ours.slots, reference.parameters, strict=True):
        error = float(
            (slot.master - parameter.detach()).abs().max() / parameter.detach().abs().max()
        )
        if error > TOLERANCE:
            raise SystemExit(
                f"{name}: the weights of {slot.shard.name} differ from torch.optim.Muon's by "
                f"{error:.2g}, expected at most {TOLERANCE:g}"
            )


def show(report: Report) -> None:
    """Print a report for people."""
    times = ", ".join(f"{name} {taken:.0f} ms" for name, taken in report.milliseconds.items())
    print(
        f"{report.matrices} matrices, {report.parameters / 1e6:.1f}M parameters, "
        f"{report.rounds} rounds: {times}"
    )
    for name, wall in report.wall.items():
        print(f"  ours in {name} / torch {wall}; by computing time {report.computing[name]}")
    print(f"  {'holds ' if report.holds else 'MISSED'} bf16 median >= {BAR}, goal {GOAL}")


def main() -> int:
    """Measure, print, and return 0 if the bar holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="llama_29m", help="a dense Llama")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--fp32", action="store_true", help="ours in fp32 too")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # as `megalith train` does; torch's optimizer shares the process, so it gains from it too
    keep_freed_memory()
    report = measure(
        options.recipe, rounds=options.rounds, warmup=options.warmup, fp32=options.fp32
    )
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        show(report)
    return int(not report.holds)


if __name__ == "__main__":
    sys.exit(main())

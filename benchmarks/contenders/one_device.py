"""Training steps that take turns on one device: ours and transformers', eager and with compiled
layers."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from contenders.ours import Ours
from contenders.transformers_llama import TransformersLlama

from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.plan.costs import num_parameters

HELD_PER_PARAMETER = {"fp32": 16, "bf16": 20}
"""Bytes a contender holds between steps: weights, master weights, gradients and two moments in
fp32."""

SHARE_OF_MEMORY = 0.6
"""Of a device, that contenders may hold between steps; the rest is for what a step needs. A
guess."""

CHECKED_STEPS, LATER_TOLERANCE = 4, 2e-2
"""Losses after updates differ by rounding that Adam has enlarged."""

GRAPHS = "ours compiled, graphs"


@dataclass(frozen=True, slots=True)
class Contender:
    """A training step, and what it costs to have it."""

    step: Callable[[], float]
    held_gib: float
    """Memory between steps; 0 on a CPU, where nobody counts."""


def groups(run: TrainRun, device: torch.device, *, compiled: bool, graphs: bool) -> list[list[str]]:
    """Names of contenders that take turns: all, or those of a kind where the device cannot hold all
    of them."""
    eager, others = ["ours", "transformers"], ["ours compiled", "transformers compiled"]
    if graphs:
        others.append(GRAPHS)
    if not compiled:
        return [eager]
    held = (2 + len(others)) * num_parameters(run.model) * HELD_PER_PARAMETER[run.precision.params]
    return (
        [[*eager, *others]] if held <= SHARE_OF_MEMORY * total_memory(device) else [eager, others]
    )


def total_memory(device: torch.device) -> float:
    """Bytes; no bound on a CPU, whose models are tiny here."""
    return (
        float("inf")
        if device.type == "cpu"
        else float(torch.cuda.get_device_properties(device).total_memory)
    )


def build(
    names: Sequence[str], run: TrainRun, batches: StepBatches, device: torch.device
) -> dict[str, Contender]:
    """One training step per name, all from the same weights: those of the first, which must be
    ours."""
    built: dict[str, Contender] = {}
    compiled_run = replace(run, train=replace(run.train, compile=True))
    first: Ours | None = None
    for name in names:
        before, compiled = _allocated(device), "compiled" in name
        if name.startswith("ours"):
            ours = Ours(compiled_run if compiled else run, batches, device)
            first = first or ours
            step = _with_graphs(ours) if name == GRAPHS else ours.step
        else:
            assert first is not None, names
            step = TransformersLlama(run, batches, first.weights(), compiled=compiled).step
        built[name] = Contender(step, (_allocated(device) - before) / 2**30)
    return built


def _with_graphs(ours: Ours) -> Callable[[], float]:
    """Its layers compiled once more, now with CUDA graphs, which torch makes where it can; on a CPU
    without."""
    for chunk in ours.trainer.pipeline_model.chunks:
        for layer in chunk.layers:
            layer.compile(mode="reduce-overhead")

    def step() -> float:
        torch.compiler.cudagraph_mark_step_begin()
        return ours.step()

    return step


def alike(
    contenders: Mapping[str, Contender], tolerance: float
) -> tuple[dict[str, Contender], list[str]]:
    """Those that compute the same losses as the first, step after step; and why others are left
    out.

    CUDA graphs are recorded in the second step and replayed from the third on. Only they may fail,
    because torch decides what it can record; any other difference ends the benchmark.
    """
    expected: list[float] = []
    same, wrong = {}, []
    for name, contender in contenders.items():
        try:
            losses = [contender.step() for _ in range(CHECKED_STEPS)]
        except RuntimeError as error:
            if name != GRAPHS:
                raise
            wrong.append(f"{name}: left out, {str(error).splitlines()[0]}")
            continue
        expected = expected or losses
        apart = [
            abs(actual - reference) / abs(reference)
            for actual, reference in zip(losses, expected, strict=True)
        ]
        if apart[0] <= tolerance and max(apart) <= LATER_TOLERANCE:
            same[name] = contender
        elif name == GRAPHS:
            wrong.append(f"{name}: left out, it computes losses {losses} instead of {expected}")
        else:
            sys.exit(
                f"losses of {name} are {losses}, expected {expected}. Use equal weights and labels."
            )
    return same, wrong


def extra_memory_gib(step: Callable[[], object], device: torch.device) -> float:
    """The most that a step holds beyond what contenders keep between steps; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = _allocated(device)
    step()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**30


def until_done(step: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The step with a wait for the device at its end: an optimizer update may still be running when
    it returns."""

    def whole() -> None:
        step()
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    return whole


def _allocated(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.memory_allocated(device)

"""Pipeline parallel executor: each rank runs the list of actions of its schedule.

The same executor runs every schedule, including one rank without a pipeline, for training and,
under `no_grad`, evaluation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.parallel.dual_batch import DualBatchOverlap
from megalith.parallel.link import (
    PendingReceive,
    PipelineGroups,
    Specs,
    StageLink,
    StageMessage,
    Tensors,
)
from megalith.parallel.weight_grad_store import WeightGradStore
from megalith.plan.pairs import concurrent_actions
from megalith.plan.schedule import Action, Schedule
from megalith.plan.transfers import Direction, neighbor

Boundary = Callable[[int, int], Specs]
"""(stage, microbatch) -> specs of the tensors that are sent across the boundary before that
stage."""


class Chunk(Protocol):
    """Model chunk as the executor calls it."""

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """Tensors from the previous stage (none for the first) -> tensors for the next one.

        The last stage returns the loss, one scalar, or nothing in evaluation. An output must not
        share memory with anything that is written to later.
        """


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pipeline executor of one rank."""

    rank: int
    """Rank within the pipeline-parallel group."""

    handles: PipelineGroups | None
    """Process groups of the messages; None for a pipeline of one rank."""

    device: torch.device
    boundary: Boundary | None = None
    """Specs of the messages; None: every message is sent with a header."""

    announce: bool = False
    """Send headers and compare them with `boundary`."""

    weights: Sequence[WeightGradStore] = ()
    """By chunk: the deferred weight gradients of schedules with W actions."""

    dual_batch: DualBatchOverlap = field(default_factory=DualBatchOverlap)
    """Dual-batch overlap of a forward and a backward that run together; the `overlap_fn` of their
    exchanges."""

    def run(
        self, schedule: Schedule, chunks: Sequence[Chunk], boundary: Boundary | None = None
    ) -> None:
        """Run one step: forward and, unless the schedule is forward-only, backward of every
        microbatch through this rank's chunks.

        Raises:
            DataError: another stage sent tensors of other shapes than expected; with headers only.
        """
        boundary = boundary or self.boundary
        announce = self.announce or boundary is None
        with StageLink(
            self.handles,
            num_microbatches=schedule.num_microbatches,
            announce=announce,
            device=self.device,
        ) as link:
            step = _Step(schedule, self.rank, chunks, self.weights, link, boundary)
            for actions in concurrent_actions(schedule, self.rank):
                if len(actions) == 1:
                    step.run_action(*actions)
                else:
                    forward, backward = (partial(step.run_action, action) for action in actions)
                    self.dual_batch.both(forward, backward)
        step.check_done()


@dataclass(slots=True)
class _MicrobatchState:
    """State of one microbatch between its forward and its backward through a chunk.

    Keeps only the graph edges of the outputs, so that their memory is freed as soon as they have
    been sent.
    """

    received: Tensors
    edges: tuple[GradientEdge | None, ...]
    start: Tensors
    """Initial gradients, on the last stage."""


@dataclass(slots=True)
class _Step:
    """State of one rank during a step; keys are (direction, chunk, microbatch)."""

    schedule: Schedule
    rank: int
    chunks: Sequence[Chunk]
    weights: Sequence[WeightGradStore]
    link: StageLink
    boundary: Boundary | None
    in_progress: dict[tuple[int, int], _MicrobatchState] = field(default_factory=dict)
    posted: dict[tuple[Direction, int, int], PendingReceive] = field(default_factory=dict)
    computed: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results that have not been sent yet."""
    local_results: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results for another chunk of this rank, by that chunk."""

    def run_action(self, action: Action) -> None:
        """Run one action."""
        kind, chunk, microbatch, peer = action
        match kind:
            case "F":
                self._forward(chunk, microbatch)
            case "B":
                self._backward(chunk, microbatch, defer_weight_grads=False)
            case "I":
                self._backward(chunk, microbatch, defer_weight_grads=True)
            case "W":
                self.weights[chunk].run_deferred(microbatch)
            case "send_forward":
                self._send("forward", chunk, microbatch, peer)
            case "send_backward":
                self._send("backward", chunk, microbatch, peer)
            case "recv_forward":
                self._receive("forward", chunk, microbatch, peer)
            case "recv_backward":
                self._receive("backward", chunk, microbatch, peer)

    def check_done(self) -> None:
        """Assert that the schedule has consumed everything."""
        remaining = [
            *self.in_progress,
            *self.posted,
            *self.computed,
            *self.local_results,
            *(w.microbatches for w in self.weights),
        ]
        assert not any(remaining), remaining

    # --- computing

    def _forward(self, chunk: int, microbatch: int) -> None:
        received = self._take_input("forward", chunk, microbatch)
        training = torch.is_grad_enabled()
        if training:
            received = tuple(x.requires_grad_() if x.is_floating_point() else x for x in received)
        outputs = self.chunks[chunk](microbatch, received)
        last = neighbor(self.schedule, self.rank, chunk, "forward") is None
        if training:
            edges = tuple(
                get_gradient_edge(y) if y.requires_grad else None
                for y in outputs
                if y.is_floating_point()
            )
            start = tuple(torch.ones_like(y) for y in outputs) if last else ()
            self.in_progress[chunk, microbatch] = _MicrobatchState(received, edges, start)
        if not last:
            self._store_result("forward", chunk, microbatch, tuple(y.detach() for y in outputs))

    def _backward(self, chunk: int, microbatch: int, *, defer_weight_grads: bool) -> None:
        state = self.in_progress.pop((chunk, microbatch))
        gradients = state.start or self._take_input("backward", chunk, microbatch)
        roots = [
            (edge, dy) for edge, dy in zip(state.edges, gradients, strict=True) if edge is not None
        ]
        with self.weights[chunk].defer(microbatch) if defer_weight_grads else nullcontext():
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [dy for _, dy in roots])
        inputs = [x for x in state.received if x.is_floating_point()]
        input_grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        self._store_result("backward", chunk, microbatch, input_grads)

    # --- messages

    def _store_result(
        self, direction: Direction, chunk: int, microbatch: int, tensors: Tensors
    ) -> None:
        """Store a result for its send, or for another chunk of this rank."""
        target = neighbor(self.schedule, self.rank, chunk, direction)
        if target is not None and target[0] == self.rank:
            self.local_results[direction, target[1], microbatch] = tensors
        elif target is not None:
            self.computed[direction, chunk, microbatch] = tensors

    def _take_input(self, direction: Direction, chunk: int, microbatch: int) -> Tensors:
        """Return the input of a chunk, from this rank or received from another one; empty at the
        ends of the pipeline."""
        key = (direction, chunk, microbatch)
        if key in self.local_results:
            return self.local_results.pop(key)
        return self.posted.pop(key).wait() if key in self.posted else ()

    def _send(self, direction: Direction, chunk: int, microbatch: int, peer: int) -> None:
        stage = self.schedule.stage_of(self.rank, chunk) + (1 if direction == "forward" else -1)
        tensors = self.computed.pop((direction, chunk, microbatch))
        self.link.send(StageMessage(direction, stage, microbatch), tensors, peer)

    def _receive(self, direction: Direction, chunk: int, microbatch: int, peer: int) -> None:
        stage = self.schedule.stage_of(self.rank, chunk)
        message = StageMessage(direction, stage, microbatch)
        after = stage if direction == "forward" else stage + 1
        specs = None if self.boundary is None else self.boundary(after, microbatch)
        if specs is not None and direction == "backward":
            specs = tuple(spec for spec in specs if spec.dtype.is_floating_point)
        self.posted[direction, chunk, microbatch] = self.link.post(message, specs, peer)

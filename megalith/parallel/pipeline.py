"""The pipeline executor: a rank obeys its list of actions, deciding nothing.

One executor for every schedule, one rank without a pipeline included, for training and, under
`no_grad`, evaluation.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.parallel.link import Handles, Posted, Specs, StageLink, StageMessage, Tensors
from megalith.parallel.postpone import WeightGradStore
from megalith.parallel.turns import DualBatchOverlap
from megalith.plan.pairs import concurrent_actions
from megalith.plan.schedule import Action, Schedule
from megalith.plan.transfers import Direction, neighbor

Boundary = Callable[[int, int], Specs]
"""By stage and microbatch: the tensors that cross the boundary before that stage."""


class Chunk(Protocol):
    """One chunk of the model as the executor calls it."""

    def __call__(self, microbatch: int, received: Tensors) -> Tensors:
        """What the stage before sent (nothing to the first) -> what the next one needs.

        The last stage gives what backward starts from, one scalar, or nothing in evaluation. An
        output must not share memory with anything that is written to later.
        """


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One rank's place in a pipeline."""

    rank: int
    """Its number within the pipeline."""

    handles: Handles | None
    """What messages travel through; None for a pipeline of one rank."""

    device: torch.device
    boundary: Boundary | None = None
    """What messages look like; None: every message announces it."""

    announce: bool = False
    """Announce and compare it anyway."""

    weights: Sequence[WeightGradStore] = ()
    """By chunk: the weight gradients that schedules with a W put aside."""

    dual_batch: DualBatchOverlap = field(default_factory=DualBatchOverlap)
    """How a forward and a backward that are computed together take turns: what their exchanges call
    meanwhile."""

    def run(
        self, schedule: Schedule, chunks: Sequence[Chunk], boundary: Boundary | None = None
    ) -> None:
        """Run one step: every microbatch through my chunks, forward and, unless the schedule is
        forward-only, backward.

        Raises:
            DataError: another stage sent tensors of other shapes than were expected; with
            announcements only.
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
                    step.obey(*actions)
                else:
                    forward, backward = (partial(step.obey, action) for action in actions)
                    self.dual_batch.both(forward, backward)
        step.check_done()


@dataclass(slots=True)
class _Alive:
    """One microbatch between its forward and its backward through a chunk.

    Of the outputs only the edges of the graph are kept, so that their memory goes as soon as they
    have been sent.
    """

    received: Tensors
    edges: tuple[GradientEdge | None, ...]
    start: Tensors
    """Gradients to start with, on the last stage."""


@dataclass(slots=True)
class _Step:
    """What one rank has at hand in the middle of a step; keys are (direction, chunk,
    microbatch)."""

    schedule: Schedule
    rank: int
    chunks: Sequence[Chunk]
    weights: Sequence[WeightGradStore]
    link: StageLink
    boundary: Boundary | None
    alive: dict[tuple[int, int], _Alive] = field(default_factory=dict)
    posted: dict[tuple[Direction, int, int], Posted] = field(default_factory=dict)
    computed: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results that their send has not taken yet."""
    here: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results for another chunk of this rank, by that chunk."""

    def obey(self, action: Action) -> None:
        """Do one thing."""
        kind, chunk, microbatch, peer = action
        match kind:
            case "F":
                self._forward(chunk, microbatch)
            case "B":
                self._backward(chunk, microbatch, put_aside=False)
            case "I":
                self._backward(chunk, microbatch, put_aside=True)
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
        """A schedule that leaves something over is our own mistake."""
        left = [
            *self.alive,
            *self.posted,
            *self.computed,
            *self.here,
            *(w.microbatches for w in self.weights),
        ]
        assert not any(left), left

    # --- computing

    def _forward(self, chunk: int, microbatch: int) -> None:
        received = self._take("forward", chunk, microbatch)
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
            self.alive[chunk, microbatch] = _Alive(received, edges, start)
        if not last:
            self._hand_on("forward", chunk, microbatch, tuple(y.detach() for y in outputs))

    def _backward(self, chunk: int, microbatch: int, *, put_aside: bool) -> None:
        one = self.alive.pop((chunk, microbatch))
        gradients = one.start or self._take("backward", chunk, microbatch)
        roots = [
            (edge, dy) for edge, dy in zip(one.edges, gradients, strict=True) if edge is not None
        ]
        with self.weights[chunk].defer(microbatch) if put_aside else nullcontext():
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [dy for _, dy in roots])
        inputs = [x for x in one.received if x.is_floating_point()]
        found = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        self._hand_on("backward", chunk, microbatch, found)

    # --- messages

    def _hand_on(self, direction: Direction, chunk: int, microbatch: int, tensors: Tensors) -> None:
        """Keep a result for its send, or for another chunk of this rank."""
        place = neighbor(self.schedule, self.rank, chunk, direction)
        if place is not None and place[0] == self.rank:
            self.here[direction, place[1], microbatch] = tensors
        elif place is not None:
            self.computed[direction, chunk, microbatch] = tensors

    def _take(self, direction: Direction, chunk: int, microbatch: int) -> Tensors:
        """What a chunk computes from: of this rank, or of another as soon as it is there; nothing
        at the ends."""
        key = (direction, chunk, microbatch)
        if key in self.here:
            return self.here.pop(key)
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

"""Pipeline parallel executor: each rank runs the list of actions of its schedule; dual-batch
overlap of two microbatches.

The same executor runs every schedule, including one rank without a pipeline, for training and,
under `no_grad`, evaluation.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal, Protocol
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.kernels.grouped_linear import GroupedGradAccumulator, GroupedMatmulOps, Groups
from megalith.kernels.linear import MatmulOps
from megalith.observe.flight import BACKWARD_LANE
from megalith.observe.timers import Timers
from megalith.parallel.p2p import (
    PendingReceive,
    PipelineGroups,
    Specs,
    StageLink,
    StageMessage,
    Tensors,
    tensor_specs,
)
from megalith.plan.schedule import Action, Direction, Schedule, concurrent_actions, neighbor

# Deferred weight gradients for zero-bubble pipeline schedules.
#
# The input-gradient pass (I) of a microbatch stores what each weight gradient is computed from, and
# the weight-gradient pass (W) computes and adds it later, when the rank would be idle. Source: Qi
# et al. 2024, arXiv:2401.10241, section 2.


class WeightGradStore:
    """Weight gradients of one model chunk: added at once, or deferred to the W pass of their
    microbatch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        self._current: list[Callable[[], None]] | None = None

    def wrap(self, grad_accumulator: GroupedGradAccumulator) -> "DeferredGradAccumulator":
        """Return a gradient accumulator of a layer whose contributions can be deferred."""
        return DeferredGradAccumulator(grad_accumulator, self)

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Defer the weight gradients computed inside the context; a parameter counts as ready only
        after `run_deferred`."""
        self._current = self._deferred[microbatch] = []
        try:
            yield
        finally:
            self._current = None

    def run_deferred(self, microbatch: int) -> None:
        """Compute and add the deferred weight gradients of a microbatch, and free their inputs."""
        with torch.no_grad():
            for add in self._deferred.pop(microbatch):
                add()

    def accumulate(self, add: Callable[[], None]) -> None:
        """Call `add` now, or store it if inside `defer`."""
        if self._current is None:
            add()
        else:
            self._current.append(add)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches whose W pass has not run."""
        return tuple(self._deferred)


class DeferredGradAccumulator:
    """Gradient accumulator that passes each contribution of one layer through a
    `WeightGradStore`."""

    def __init__(self, grad_accumulator: GroupedGradAccumulator, store: WeightGradStore) -> None:
        self.grad_accumulator, self.store = grad_accumulator, store

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        """Add `dy.T @ x`, now or later: x [t, i], dy [t, o]."""
        # detached, so that the autograd graph of x can be freed
        x, dy = x.detach(), dy.detach()
        self.store.accumulate(partial(self.grad_accumulator.product, x, dy, matmul_ops))

    def grouped_product(
        self, x: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps | None
    ) -> None:
        """Add each expert's `dy.T @ x`, now or later: x [r, i], dy [r, o]."""
        x, dy = x.detach(), dy.detach()
        add = partial(self.grad_accumulator.grouped_product, x, dy, groups, matmul_ops)
        self.store.accumulate(add)

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready, now or later: dw [o, i]."""
        self.store.accumulate(partial(self.grad_accumulator.gradient, dw))

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`, now or later."""
        self.store.accumulate(partial(self.grad_accumulator.rows, rows, dy))


# Dual-batch overlap (1F1B all-to-all overlap): one rank runs the forward of one microbatch and the
# backward of another alternately.
#
# A pass that has started a message switches to the other pass, and waits for the message when it
# runs again. Exactly one pass runs at a time, and the switch points are fixed in the program, so
# that every rank starts the collectives of both passes in the same order. On accelerators both
# passes issue their work to one stream.

DualBatchThread = Literal["forward", "backward"]
OTHER: dict[DualBatchThread, DualBatchThread] = {"forward": "backward", "backward": "forward"}
PATIENCE_SECONDS = 5.0
"""Time that a failed pass waits for the other one to stop; it may hang in a collective that other
ranks have left."""


class PassAborted(BaseException):
    """Stops a pass because the other one failed; not visible to callers, and not caught by `except
    Exception`."""


class DualBatchOverlap:
    """Runs a forward and a backward pass alternately; a call from one of them switches to the other
    and returns when it is its turn again.

    Outside of `both` a call does nothing. The forward pass runs on the caller's thread. The
    backward pass has its own persistent thread, and on accelerators those of autograd: every thread
    that is not the forward thread belongs to the backward pass.
    """

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        self._work: SimpleQueue[Callable[[], None] | None] | None = None

    def __call__(self) -> None:
        """Switch to the other pass, if there is one."""
        if self._pair is not None:
            self._pair.switch()

    def both(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both passes to their ends, `forward` first until it switches.

        An exception in one pass stops the other, and is raised here with its own traceback.
        """
        assert self._pair is None, "both() within both(), or after one that did not end"
        pair = self._pair = _Pair()
        self._thread().put(partial(pair.run, "backward", backward, _stream_of_caller()))
        try:
            pair.run("forward", forward, nullcontext())
            pair.join()
        # Ctrl-C is raised in this thread, whichever pass is running
        except BaseException as error:
            pair.fail(error)
            pair.over.add("forward")
        if pair.error is None or pair.join(PATIENCE_SECONDS):
            self._pair = None
        try:
            if pair.error is not None:
                raise pair.error
        finally:
            del pair  # otherwise its error keeps it and all frames alive

    def _thread(self) -> "SimpleQueue[Callable[[], None] | None]":
        """Return the work queue of the backward thread, which ends with this object."""
        if self._work is None:
            self._work = SimpleQueue()
            finalize(self, self._work.put, None)
            threading.Thread(
                target=_run_work, args=(self._work,), name=BACKWARD_LANE, daemon=True
            ).start()
        return self._work


@dataclass(slots=True, eq=False)
class _Pair:
    """State of two passes that run alternately."""

    change: threading.Condition = field(default_factory=threading.Condition)
    forward_thread: int = field(default_factory=threading.get_ident)
    turn: DualBatchThread = "forward"
    over: set[DualBatchThread] = field(default_factory=set)
    error: BaseException | None = None
    """Exception of the first pass that failed."""

    def run(
        self,
        name: DualBatchThread,
        work: Callable[[], None],
        stream: AbstractContextManager[object],
    ) -> None:
        """Run one pass from its first turn to its end."""
        try:
            with stream:
                self._wait_turn(name)
                work()
        except PassAborted:
            pass
        except BaseException as error:  # raised again by `both`, in the caller's thread
            self.fail(error)
        with self.change:
            self.over.add(name)
            self._set_turn(OTHER[name])

    def switch(self) -> None:
        """Switch to the other pass, until it switches back or ends."""
        name: DualBatchThread = (
            "forward" if threading.get_ident() == self.forward_thread else "backward"
        )
        with self.change:
            if OTHER[name] not in self.over:
                self._set_turn(OTHER[name])
        self._wait_turn(name)

    def fail(self, error: BaseException) -> None:
        """Record the first exception; the other pass stops at its next switch or ends."""
        with self.change:
            self.error = error if self.error is None else self.error
            self.change.notify_all()

    def join(self, patience: float | None = None) -> bool:
        """Wait until both passes have ended (True), or one fails; with `patience`, only for that
        many seconds."""
        with self.change:
            return self.change.wait_for(
                lambda: len(self.over) == 2 or (patience is None and self._failed()), patience
            )

    def _failed(self) -> bool:
        return self.error is not None

    def _set_turn(self, name: DualBatchThread) -> None:
        self.turn = name
        self.change.notify_all()

    def _wait_turn(self, name: DualBatchThread) -> None:
        with self.change:
            self.change.wait_for(lambda: self.turn == name or self._failed())
            if self._failed():
                raise PassAborted


def _run_work(queue: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (run_pass := queue.get()) is not None:
        run_pass()
        del run_pass  # frees the tensors that it references


def _stream_of_caller() -> AbstractContextManager[object]:
    """Return a context with the caller's current stream and device, for another thread, whose
    defaults are those of GPU 0."""
    return (
        torch.cuda.stream(torch.cuda.current_stream())
        if torch.cuda.is_initialized()
        else nullcontext()
    )


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

    after_microbatch: Callable[[int], None] | None = None
    """Called with a microbatch after its last backward through the chunks of this rank."""

    timers: Timers = field(default_factory=Timers)
    """Timers of the actions. A schedule with pairs has none: each pass of a pair includes parts of
    the other one."""

    def run(
        self, schedule: Schedule, chunks: Sequence[Chunk], boundary: Boundary | None = None
    ) -> None:
        """Run one step: forward and, unless the schedule is forward-only, backward of every
        microbatch through this rank's chunks.

        Raises:
            DataError: another stage sent tensors of other shapes than expected; with headers only.
        """
        boundary = boundary or self.boundary
        with self._open_link(schedule, boundary) as link:
            timers = Timers() if schedule.pairs else self.timers
            step = _Step(schedule, self.rank, chunks, self.weights, link, boundary, timers)
            single_actions = zip(schedule.ranks[self.rank], strict=True)
            for actions in (
                concurrent_actions(schedule, self.rank) if schedule.pairs else single_actions
            ):
                if len(actions) == 1:
                    step.run_action(*actions)
                else:
                    forward, backward = (partial(step.run_action, action) for action in actions)
                    self.dual_batch.both(forward, backward)
                if self.after_microbatch is not None:
                    for microbatch in step.take_finished(actions):
                        self.after_microbatch(microbatch)
        step.check_done()

    def _open_link(
        self, schedule: Schedule, boundary: Boundary | None
    ) -> AbstractContextManager[StageLink | None]:
        """Return the messages of a step; None on a pipeline of one rank, which has none."""
        if self.handles is None:
            return nullcontext()
        return StageLink(
            self.handles,
            num_microbatches=schedule.num_microbatches,
            announce=self.announce or boundary is None,
            device=self.device,
        )


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
    link: StageLink | None
    boundary: Boundary | None
    timers: Timers
    in_progress: dict[tuple[int, int], _MicrobatchState] = field(default_factory=dict)
    posted: dict[tuple[Direction, int, int], PendingReceive] = field(default_factory=dict)
    computed: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results that have not been sent yet."""
    local_results: dict[tuple[Direction, int, int], Tensors] = field(default_factory=dict)
    """Results for another chunk of this rank, by that chunk."""
    num_backwards: Counter[int] = field(default_factory=Counter)
    """By microbatch: number of chunks whose gradients are complete."""

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
                with self.timers.section("weight_grads"):
                    self.weights[chunk].run_deferred(microbatch)
            case "send_forward":
                self._send("forward", chunk, microbatch, peer)
            case "send_backward":
                self._send("backward", chunk, microbatch, peer)
            case "recv_forward":
                self._receive("forward", chunk, microbatch, peer)
            case "recv_backward":
                self._receive("backward", chunk, microbatch, peer)

    def take_finished(self, actions: Sequence[Action]) -> list[int]:
        """Return the microbatches whose backward these actions complete on this rank."""
        done = [action.microbatch for action in actions if action.kind in ("B", "W")]
        self.num_backwards.update(done)
        return [number for number in done if self.num_backwards[number] == len(self.chunks)]

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
        stage = self.schedule.stages[self.rank][chunk]
        if training:
            for x in self._select_differentiable(received, stage, microbatch):
                x.requires_grad_()
        with self.timers.section("forward"):
            outputs = self.chunks[chunk](microbatch, received)
        last = self._neighbor(chunk, "forward") is None
        if training:
            ends = outputs if last else self._select_differentiable(outputs, stage + 1, microbatch)
            edges = tuple(get_gradient_edge(y) if y.requires_grad else None for y in ends)
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
        deferred = self.weights[chunk].defer(microbatch) if defer_weight_grads else nullcontext()
        with self.timers.section("backward"), deferred:
            if roots:
                torch.autograd.backward([edge for edge, _ in roots], [dy for _, dy in roots])
        stage = self.schedule.stages[self.rank][chunk]
        inputs = self._select_differentiable(state.received, stage, microbatch)
        input_grads = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        self._store_result("backward", chunk, microbatch, input_grads)

    def _select_differentiable(self, tensors: Tensors, stage: int, microbatch: int) -> Tensors:
        """Return the tensors of the boundary before a stage whose gradients are sent back; without
        known specs, all of a floating-point dtype."""
        if not tensors:
            return ()
        if self.boundary is None:
            specs = tensor_specs(tensors)
        else:
            specs = self.boundary(stage, microbatch)
        return tuple(x for x, spec in zip(tensors, specs, strict=True) if spec.requires_grad)

    # --- messages

    def _neighbor(self, chunk: int, direction: Direction) -> tuple[int, int] | None:
        """Return (rank, chunk) of the next stage in a direction; None at the end."""
        if self.link is None and len(self.chunks) == 1:
            return None
        return neighbor(self.schedule, self.rank, chunk, direction)

    def _store_result(
        self, direction: Direction, chunk: int, microbatch: int, tensors: Tensors
    ) -> None:
        """Store a result for its send, or for another chunk of this rank."""
        target = self._neighbor(chunk, direction)
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
        if key not in self.posted:
            return ()
        with self.timers.section("pipeline_receive"):
            return self.posted.pop(key).wait()

    def _send(self, direction: Direction, chunk: int, microbatch: int, peer: int) -> None:
        stage = self.schedule.stages[self.rank][chunk] + (1 if direction == "forward" else -1)
        tensors = self.computed.pop((direction, chunk, microbatch))
        assert self.link is not None, "a pipeline of one rank has no messages"
        with self.timers.section("pipeline_send"):
            self.link.send(StageMessage(direction, stage, microbatch), tensors, peer)

    def _receive(self, direction: Direction, chunk: int, microbatch: int, peer: int) -> None:
        stage = self.schedule.stages[self.rank][chunk]
        message = StageMessage(direction, stage, microbatch)
        after = stage if direction == "forward" else stage + 1
        assert self.link is not None, "a pipeline of one rank has no messages"
        specs = None if self.boundary is None else self.boundary(after, microbatch)
        if specs is not None and direction == "backward":
            specs = tuple(spec for spec in specs if spec.requires_grad)
        self.posted[direction, chunk, microbatch] = self.link.post(message, specs, peer)

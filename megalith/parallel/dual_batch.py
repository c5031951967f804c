"""Dual-batch overlap (1F1B all-to-all overlap): one rank runs the forward of one microbatch and the
backward of another alternately.

A pass that has started a message switches to the other pass, and waits for the message when it runs
again. Exactly one pass runs at a time, and the switch points are fixed in the program, so that
every rank starts the collectives of both passes in the same order. On accelerators both passes
issue their work to one stream.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Literal
from weakref import finalize

import torch

from megalith.observe.flight import BACKWARD_LANE

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

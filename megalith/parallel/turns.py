"""Two lanes of work on one rank that take turns: forward of one microbatch, and backward of
another.

A lane that has sent something off hands over, and waits for the answer when it is its turn again.
Exactly one lane runs at a time, and where they hand over is written in the program, not left to
chance: so every rank enters the collectives of both lanes in the same order, whatever arrives
first. On accelerators both lanes issue their work to one stream.
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
"""How long a lane that failed waits for the other to stop; it may hang in a collective that other
ranks have left."""


class Stopped(BaseException):
    """Ends a lane because the other one failed; nobody outside sees it, and no `except Exception`
    holds it up."""


class DualBatchOverlap:
    """Runs pairs of lanes; called by a lane, it hands over, and returns when it is that lane's turn
    again.

    Outside of a pair a call does nothing. The forward lane is the caller's thread. Backward has one
    of its own, which is kept, and on accelerators those of autograd besides: whatever is not the
    forward lane is the backward lane.
    """

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        self._work: SimpleQueue[Callable[[], None] | None] | None = None

    def __call__(self) -> None:
        """Hand over, if there is someone to hand over to."""
        if self._pair is not None:
            self._pair.hand_over()

    def both(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both to their ends, `forward` first until it hands over.

        What one of them raises ends the other, and is raised here with its own traceback.
        """
        assert self._pair is None, "a pair within a pair, or after one whose lanes did not end"
        pair = self._pair = _Pair()
        self._thread().put(partial(pair.run, "backward", backward, _stream_of_caller()))
        try:
            pair.run("forward", forward, nullcontext())
            pair.join()
        except (
            BaseException
        ) as error:  # while it waited: Ctrl-C comes to this thread, whichever lane the rank is in
            pair.fail(error)
            pair.over.add("forward")
        if pair.error is None or pair.join(PATIENCE_SECONDS):
            self._pair = None
        try:
            if pair.error is not None:
                raise pair.error
        finally:
            del pair  # else its error keeps it, and all frames, alive

    def _thread(self) -> "SimpleQueue[Callable[[], None] | None]":
        """What the thread of backward takes its work from; it ends when nobody needs these turns
        any more."""
        if self._work is None:
            self._work = SimpleQueue()
            finalize(self, self._work.put, None)
            threading.Thread(
                target=_obey, args=(self._work,), name=BACKWARD_LANE, daemon=True
            ).start()
        return self._work


@dataclass(slots=True, eq=False)
class _Pair:
    """Two lanes at work."""

    change: threading.Condition = field(default_factory=threading.Condition)
    forward_thread: int = field(default_factory=threading.get_ident)
    turn: DualBatchThread = "forward"
    over: set[DualBatchThread] = field(default_factory=set)
    error: BaseException | None = None
    """What the first lane that failed raised."""

    def run(
        self,
        lane: DualBatchThread,
        work: Callable[[], None],
        stream: AbstractContextManager[object],
    ) -> None:
        """One lane from its first turn to its end."""
        try:
            with stream:
                self._await(lane)
                work()
        except Stopped:
            pass
        except BaseException as error:  # raised again by `both`, in the caller's thread
            self.fail(error)
        with self.change:
            self.over.add(lane)
            self._give_to(OTHER[lane])

    def hand_over(self) -> None:
        """Let the other lane go on, until it hands back or is over."""
        lane: DualBatchThread = (
            "forward" if threading.get_ident() == self.forward_thread else "backward"
        )
        with self.change:
            if OTHER[lane] not in self.over:
                self._give_to(OTHER[lane])
        self._await(lane)

    def fail(self, error: BaseException) -> None:
        """SpanHook what went wrong first; the other lane stops where it hands over, or is over."""
        with self.change:
            self.error = error if self.error is None else self.error
            self.change.notify_all()

    def join(self, patience: float | None = None) -> bool:
        """Wait until both lanes are over, which is the answer, or one fails, or with some patience
        even then."""
        with self.change:
            return self.change.wait_for(
                lambda: len(self.over) == 2 or (patience is None and self._failed()), patience
            )

    def _failed(self) -> bool:
        return self.error is not None

    def _give_to(self, lane: DualBatchThread) -> None:
        self.turn = lane
        self.change.notify_all()

    def _await(self, lane: DualBatchThread) -> None:
        with self.change:
            self.change.wait_for(lambda: self.turn == lane or self._failed())
            if self._failed():
                raise Stopped


def _obey(work: "SimpleQueue[Callable[[], None] | None]") -> None:
    while (lane := work.get()) is not None:
        lane()
        del lane  # with all that it holds on to


def _stream_of_caller() -> AbstractContextManager[object]:
    """The caller's current stream, and with it its device, for another thread, which else has those
    of GPU 0."""
    return (
        torch.cuda.stream(torch.cuda.current_stream())
        if torch.cuda.is_initialized()
        else nullcontext()
    )

"""Ranks of one replica group: agree on the outcome of what each does with other groups, and receive
the answers that the coordinator gives to rank 0."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch

from megalith.errors import RankError, UserError
from megalith.launch.coordinator_client import CoordinatorInterrupted
from megalith.launch.heartbeat import RankHeartbeat, record_waits
from megalith.parallel.group import Group, all_reduce_, gather_objects
from megalith.parallel.group_exchange import GroupExchangeError
from megalith.plan.quorum import Decision, Epoch

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time after which the ranks of a group that wait for rank 0 begin a new collective, so that the
watchdog detects no hang while rank 0 waits for the coordinator (heuristic)."""

T = TypeVar("T")


class Coordinator(Protocol):
    """Connection of rank 0 to the coordinator."""

    def join(
        self,
        *,
        group: str,
        addresses: Sequence[str],
        committed_step: int,
        settings: Mapping[str, str],
        state_addresses: Sequence[str],
    ) -> Epoch:
        """Wait for an epoch."""

    def vote(self, *, epoch: int, step: int, ok: bool, last: bool, has_state: bool) -> Decision:
        """Vote about a step, and wait for the decision; `last`: this group ends after the step;
        `has_state`: this group has the state of the step before."""

    def leave(self) -> None:
        """Leave the run, and close the connection."""

    def close(self) -> None:
        """Close the connection without a message: this group counts as lost."""


class FinishedRunError(Exception):
    """The other groups have finished the run while this one waited for them."""


class GroupRanks:
    """The ranks of this group. While one waits for other groups or for the coordinator, its
    heartbeat shows that it does not hang."""

    def __init__(
        self, world: Group, coordinator: Coordinator | None, heartbeat: RankHeartbeat
    ) -> None:
        """`coordinator`: set on rank 0."""
        self.world, self.coordinator = world, coordinator
        self._threads = ThreadPoolExecutor(1) if world.size > 1 else None
        self._waits = ExitStack()
        self._is_waiting = False
        self._waits.enter_context(record_waits(heartbeat, lambda: self._is_waiting))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Record that this rank waits for other groups or the coordinator inside the context."""
        before, self._is_waiting = self._is_waiting, True
        try:
            yield
        finally:
            self._is_waiting = before

    def all_agree(self, value: bool) -> bool:
        """Return whether a value is true on all ranks. Collective."""
        return not all_reduce_(torch.tensor([float(not value)]), self.world).item()

    def succeeds(self, work: Callable[[], None], on_failure: Callable[[], None]) -> bool:
        """Run `work` on every rank, and `on_failure` where it fails; return whether no group was
        lost on any rank. Collective."""
        is_complete = True
        try:
            with self.waiting():
                work()
        except GroupExchangeError as error:
            _log.warning("%s", error)
            is_complete = False
            on_failure()
        return self.all_agree(is_complete)

    def ask_coordinator(self, request: Callable[[Coordinator], T]) -> T:
        """Return rank 0's result of a request on all ranks. Collective.

        Raises:
            FinishedRunError: the run has ended in the meantime.
            UserError: the coordinator rejects this group.
            RankError: of a group of several ranks: another error of rank 0.
        """
        with self.waiting():
            if self._threads is None:
                assert self.coordinator is not None, "rank 0 is connected to the coordinator"
                try:
                    return request(self.coordinator)
                except CoordinatorInterrupted as error:
                    raise FinishedRunError from error
            return self._wait_for_rank_0(request, self._threads)

    def _wait_for_rank_0(
        self, request: Callable[[Coordinator], T], threads: ThreadPoolExecutor
    ) -> T:
        future: Future[T] | None = None
        if self.coordinator is not None:
            future = threads.submit(request, self.coordinator)
        outcome: tuple[T | None, Exception | None] = None, None
        while True:
            is_done = future is not None and bool(wait([future], POLL_SECONDS).done)
            if future is not None and is_done:
                outcome = _read_outcome(future)
            if all_reduce_(torch.tensor([float(is_done)]), self.world).item():
                break
        # tuple[Any, ...]: the outcome on rank 0
        gathered = gather_objects(outcome, self.world)[0]
        value, failure = cast(tuple[Any, Exception | None], gathered)
        if failure is not None:
            raise failure
        return cast(T, value)

    def close(self) -> None:
        """Close the connection with the coordinator without a message."""
        if self.coordinator is not None:
            self.coordinator.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._waits.close()


def _read_outcome(future: "Future[Any]") -> tuple[Any, Exception | None]:  # Any: the result
    """Return the result of a finished request to the coordinator, or the error that all ranks
    raise."""
    error = future.exception()
    if error is None:
        return future.result(), None
    if isinstance(error, CoordinatorInterrupted):
        return None, FinishedRunError()
    if isinstance(error, UserError):
        return None, error
    return None, RankError(f"rank 0: {type(error).__name__}: {error}")

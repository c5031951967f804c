"""Replica groups (fault tolerance): jobs that train together, each with the full model.

A step of several groups is a step of one job whose samples are divided over the groups. After its
own gradient reduction, rank r of each group sums its gradient shards with rank r of the others,
then the groups vote. If a group is lost before the vote, the step is discarded before any weight
has changed: the other groups keep the gradients of their samples, compute those of the lost group,
and sum again. The set of participants is constant for an epoch, which the coordinator begins.
"""

import json
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from megalith.checkpoint.state_transfer import (
    ReceivedState,
    StateServer,
    fetch_state,
)
from megalith.config.train import TrainRun
from megalith.data.loader import Loader, StepBatches
from megalith.errors import CheckpointError, DataError, UserError
from megalith.launch.heartbeat import RankHeartbeat
from megalith.parallel.group import gather_objects
from megalith.parallel.group_exchange import (
    GroupExchangeError,
    PeerListener,
    RingExchange,
    RingMember,
    broadcast_json,
    connect_ring,
)
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_schedule import largest_batch_size
from megalith.plan.quorum import Epoch
from megalith.plan.replica_groups import (
    SINGLE_GROUP,
    GroupShare,
    GroupSlot,
    hash_to_number,
    list_missing_samples,
    read_slots,
)
from megalith.train.replica_group_ranks import Coordinator, GroupRanks
from megalith.train.replica_group_settings import find_own_host, list_compared_settings
from megalith.train.synchronizer import BuildLoader, GroupState, StepSums

_log = logging.getLogger(__name__)

NUM_SHARED_REQUESTS = 2
"""Kinds of requests that are sent to all groups (`train/step.py`)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupSums(StepSums):
    """Sums of a step over the groups, for one rank, with what the next step needs."""

    counts: Sequence[float] = ()
    """Counts of the global batch of the next step."""
    last_updated: bool | None = None
    """Whether the step before has changed the weights; None: unknown in all groups."""
    scale: float = 1.0
    """Loss scale of the gradients."""
    joins: Collection[str] = ()
    """Groups that have caught up, and compute from the next step on."""


@dataclass(slots=True)
class _UncommittedStep:
    """What this group has computed of a step that was not committed yet."""

    samples: set[int] = field(default_factory=set)
    """Samples whose gradients are in `gradients`."""
    gradients: list[Tensor] = field(default_factory=list)
    """Gradients, and routing statistics."""
    losses: Tensor | None = None
    max_logit: Tensor | None = None


@dataclass(slots=True)
class _MissedStep:
    """A step that the other groups have committed while this one loads its state."""

    gradients: list[Tensor]
    scale: float
    updated: bool | None = None
    """Whether it has changed the weights; None: not known yet."""


@dataclass(slots=True)
class _CatchUp:
    """Progress of a group that loads the state of another one while the others train."""

    future: Future[ReceivedState]
    source: str
    cancelled: threading.Event
    """Ends the transfer when it is set."""
    missed_steps: list[_MissedStep] = field(default_factory=list)
    is_loaded: bool = False


class ReplicaGroups:
    """Participation of this rank in the epochs of a run with replica groups. All methods are
    collective over the group's mesh."""

    def __init__(
        self,
        run: TrainRun,
        mesh: Mesh,
        coordinator: Coordinator | None,
        print_line: Callable[[str], None],
        *,
        heartbeat: RankHeartbeat | None = None,
    ) -> None:
        """`coordinator`: set on rank 0. `heartbeat`: records that this rank waits for others."""
        config = run.replica_group
        assert config is not None, "replica_group is set"
        self.run, self.config, self.mesh = run, config, mesh
        self._print_line = print_line
        self._ranks = GroupRanks(mesh.world, coordinator, heartbeat or RankHeartbeat())
        self._settings = list_compared_settings(run, mesh.world.size)
        host = find_own_host(config)
        self._listener = PeerListener.open(host)
        self._server = StateServer(host, self._digest.hex(), torch.device("cpu"))
        self._loading = ThreadPoolExecutor(1)
        self._catch_up: _CatchUp | None = None
        """Set while this group loads the state of another one."""
        self._is_complete = True
        """Whether the tensors are those of the step of this group."""
        self._active: tuple[str, ...] = ()
        """Participants that have the newest state, and compute."""
        self._joins: set[str] = set()
        """Participants that have caught up, and compute from the next step on."""
        self._step = 0
        """Number of committed steps."""
        self._last_updated: bool | None = None
        """Whether the last committed step has changed the weights; None: this group has not taken
        part in it."""
        self._exchange: RingExchange | None = None
        self._exchange_thread: ThreadPoolExecutor | None = None
        self._epoch: Epoch | None = None
        self._next_epoch: Epoch | None = None
        self._counts: list[float] | None = None
        """Counts of the global batch of the next step; None: unknown."""
        self._sums: GroupSums | None = None
        """Result of the present step."""
        self._kept = _UncommittedStep()
        self._attempt = _UncommittedStep()
        self._offers_state = True
        """Whether this group can serve its state to others."""
        self._spare: list[Tensor] = []
        self._loader: Loader | None = None
        self.share = SINGLE_GROUP
        self.samples: tuple[int, ...] | None = None
        """Samples of the next step that no group has computed yet; None: all."""

    @property
    def is_diloco(self) -> bool:
        """Whether groups train on their own between synchronizations of the weights."""
        return self.config.mode == "diloco"

    @property
    def num_committed(self) -> int:
        """Number of committed steps, or rounds of DiLoCo."""
        return self._step

    @property
    def changes_epoch(self) -> bool:
        """Whether other groups compute the next step, for which `enter` must be called."""
        return self._exchange is None or self._next_epoch is not None or bool(self._joins)

    @property
    def is_writer(self) -> bool:
        """Whether this group writes the checkpoints."""
        return self.share.index == 0

    # --- epochs

    def enter(self, state: GroupState) -> None:
        """Begin the next epoch: connect to the other participants. If this group has missed steps,
        it first loads the state of another one, while the others train. Waits until there are
        enough groups.

        Raises:
            ConfigError: the other groups have other settings.
            FinishedRunError: the other groups have finished the run.
        """
        while True:
            if self._exchange is not None and self._next_epoch is None:
                succeeds = self._admit(state) if self._joins else True
            else:
                self._epoch = self._take_epoch(state.step)
                self._close_exchange()
                succeeds = self._open_epoch(self._epoch, state)
            if succeeds and self._catch_up is not None and self.is_diloco:
                succeeds = self._load_state(self._catch_up, state)
            elif succeeds and self._catch_up is not None:
                succeeds = self._catch_up_while_others_train(self._catch_up, state)
            if not succeeds:
                self._vote(self._step + 1, ok=False)
            elif self._catch_up is None and not self.changes_epoch:
                break
        assert self._epoch is not None, "an epoch has begun"
        names = self._epoch.participants if self.is_diloco else self._active
        self._print_line(
            f"{'round' if self.is_diloco else 'step'} {state.step}: epoch {self._epoch.number} "
            f"with {len(names)} replica group{'s' * (len(names) > 1)}: {', '.join(names)}"
        )

    def _take_epoch(self, step: int) -> Epoch:
        """Return the epoch that the coordinator has announced, or join."""
        if self._next_epoch is not None:
            epoch, self._next_epoch = self._next_epoch, None
            return epoch
        # the others may have computed the samples of this group in the meantime
        self._kept = _UncommittedStep()
        gathered = gather_objects((self._listener.address, self._server.address), self.mesh.world)
        pairs = cast(list[tuple[str, str]], gathered)
        if not self._is_complete:
            step = 0
        return self._ranks.ask_coordinator(
            lambda coordinator: coordinator.join(
                group=self.config.id,
                addresses=[address for address, _ in pairs],
                state_addresses=[address for _, address in pairs],
                committed_step=step,
                settings=self._settings,
            )
        )

    def _open_epoch(self, epoch: Epoch, state: GroupState) -> bool:
        """Connect the ring and exchange what each group has; offer the state of this group to
        others, or begin to load one. Return whether this succeeded on all ranks.

        Raises:
            CheckpointError: no group has the newest state any more.
            DataError: this group has other data than the others.
        """
        if self._step != epoch.step and self._catch_up is not None:
            self._abandon_catch_up()  # it has not received all steps since the snapshot
        self._step, self._joins = epoch.step, set()
        member = RingMember(
            epoch.number, epoch.participants, self.config.id, self.mesh.world.rank, self._digest
        )
        holdings: list[float] = []

        def connect() -> None:
            address = epoch.addresses[member.next_group][member.rank]
            self._exchange = connect_ring(
                self._listener, member, address, timeout_seconds=self.config.timeout_seconds
            )
            holdings.extend(self._exchange_holdings(self._exchange, state))

        if not self._succeeds_on_all_ranks(connect):
            return False
        self._set_shares(holdings, epoch, state)
        sources = self._choose_sources(holdings, epoch)
        if self.config.id in sources.values():
            self._offer_state(state)
        if self.config.id in sources:
            self._begin_catch_up(epoch, sources[self.config.id], state)
        return True

    def _choose_sources(self, holdings: Sequence[float], epoch: Epoch) -> dict[str, str]:
        """Return from which group each group that needs it loads its state.

        Raises:
            CheckpointError: this group needs it, and no group can serve its state.
        """
        slots = read_slots(holdings, epoch.participants)
        serving = [name for name in self._active if slots[name].offers_state]
        needs_source = [name for name in epoch.participants if slots[name].needs_source]
        if serving:
            return {name: serving[n % len(serving)] for n, name in enumerate(needs_source)}
        if self.config.id in needs_source:
            raise CheckpointError(
                "no replica group has memory for a copy of its state, which this group would load; "
                "their logs have the reason. Free host memory on one of their machines, and start "
                "all groups again from the newest checkpoint."
            )
        return {}

    def _offer_state(self, state: GroupState) -> None:
        """Serve the state of this group to others; it trains on if a rank has no memory for the
        copy: others need the copies of all ranks."""
        problem = ""
        try:
            self._server.offer(state.step, state.entries(), state.export())
        except OSError as error:
            world = self.mesh.world
            problem = f"rank {world.rank}: {error}" if world.size > 1 else str(error)
        problems = [each for each in gather_objects(problem, self.mesh.world) if each]
        if problems:
            self._server.release()
            self._server.decline(state.step)
            self._offers_state = False
            self._print_line(
                f"step {state.step}: this group cannot serve its state to a group that joins: "
                f"{problems[0]}. Another group is used instead, if there is one"
            )

    def _exchange_holdings(self, exchange: RingExchange, state: GroupState) -> list[float]:
        """Return what the groups have, summed: a `GroupSlot` per group, the counts of the next
        step (number of groups, then values), and its samples (per sample)."""
        has_state = self._has_state(state)
        slot = GroupSlot(
            has_state=float(has_state),
            needs_source=float(not has_state and self._catch_up is None),
            offers_state=float(has_state and self._offers_state),
            data=hash_to_number(state.fingerprints["data"]) if has_state else 0.0,
            tokenizer=hash_to_number(state.fingerprints["tokenizer"]) if has_state else 0.0,
        )
        empty = [0.0] * len(slot)
        slots = [
            value
            for number in range(exchange.num_groups)
            for value in (slot if number == exchange.index else empty)
        ]
        known = self._counts if has_state else None
        counts = [0.0] * (1 + state.num_counts) if known is None else [1.0, *known]
        samples = self._kept.samples if has_state else set()
        kept = [float(number in samples) for number in range(self._max_batch_size)]
        vector = torch.tensor([*slots, *counts, *kept], dtype=torch.float64)
        exchange.all_reduce_([vector])
        return [*vector.tolist()]

    def _has_state(self, state: GroupState) -> bool:
        """Return whether this group has the newest state."""
        return self._is_complete and self._catch_up is None and state.step == self._step

    def _set_shares(self, holdings: Sequence[float], epoch: Epoch, state: GroupState) -> None:
        """Set the groups that compute the next step, and their samples."""
        groups, slots = len(epoch.participants), read_slots(holdings, epoch.participants)
        active = [name for name in epoch.participants if slots[name].has_state]
        if not active:
            raise CheckpointError(
                f"no replica group has the state of step {self._step} any more. Start this group "
                "again: it continues from the newest checkpoint."
            )
        self._active = tuple(active)
        if self.config.id in active:
            self._check_same_data(slots)
        if len(active) == groups:
            self._server.release()  # no group loads it any more
        num_known, *rest = holdings[len(GroupSlot._fields) * groups :]
        counts = rest[: state.num_counts]
        self._counts = [value / num_known for value in counts] if num_known else None
        if self.is_diloco:  # a group that loads a state trains from here on, too
            self.share = GroupShare(epoch.participants.index(self.config.id), groups)
        elif self.config.id in active:
            self.share = GroupShare(active.index(self.config.id), len(active))
            kept = rest[state.num_counts :][: state.batch_size]
            self.samples = list_missing_samples(kept) if any(kept) else None

    def _check_same_data(self, slots: Mapping[str, GroupSlot]) -> None:
        """Check that this group has the data of the first active group.

        Raises:
            DataError: it has not.
        """
        first, own = slots[self._active[0]], slots[self.config.id]
        for name, one, two in zip(GroupSlot._fields, first, own):
            if name in ("data", "tokenizer") and one != two:
                raise DataError(
                    f"replica_group.id={self.config.id}: the {name} of this group is not that of "
                    f"replica group {self._active[0]}, with which it would train step "
                    f"{self._step + 1}. Use the same files for {name}.* in all groups."
                )

    # --- a group that joins

    def _begin_catch_up(self, epoch: Epoch, source: str, state: GroupState) -> None:
        """Begin to load the state of another group, from a thread."""
        self._is_complete = False
        entries, cancelled = state.entries(), threading.Event()
        future = self._loading.submit(
            fetch_state,
            epoch.state_addresses[source],
            entries,
            run=self._digest.hex(),
            step=epoch.step,
            timeout_seconds=self.config.timeout_seconds,
            rank=self.mesh.world.rank,
            is_cancelled=cancelled.is_set,
        )
        self._catch_up = _CatchUp(future, source, cancelled)

    def _abandon_catch_up(self) -> None:
        """Wait until the thread writes no tensors any more."""
        if self._catch_up is not None:
            self._catch_up.cancelled.set()
            with self._ranks.waiting():
                wait([self._catch_up.future])
            self._catch_up = None

    def _catch_up_while_others_train(self, progress: _CatchUp, state: GroupState) -> bool:
        """Receive the gradients of the steps that the others compute, until this group has loaded
        the snapshot and repeated them. Return False if a group was lost.

        It takes part in the exchange and votes, without samples.
        """
        if self._counts is None and not self._exchange_counts([0.0] * state.num_counts):
            return False
        while True:
            if not progress.is_loaded and self._ranks.all_agree(progress.future.done()):
                if not self._ranks.all_agree(progress.future.exception() is None):
                    _log.warning("state transfer failed: %s", progress.future.exception())
                    self._catch_up = None
                    return self._leave_epoch(state)
                state.adopt(progress.future.result().state)
                progress.is_loaded = True
                self._print_line(
                    f"step {self._step}: loaded the state of step {state.step} from replica group "
                    f"{progress.source}"
                )
            if progress.is_loaded:
                self._replay(progress, state)
            is_ready = progress.is_loaded and len(progress.missed_steps) <= 1
            summed = self._sum_without_samples(state, is_ready=is_ready)
            if summed is None:
                return False
            gradients, sums = summed
            if progress.missed_steps and sums.last_updated is None:
                self._print_line(f"step {self._step}: the state is loaded again")
                if self._vote(self._step + 1, ok=True, last=True):
                    self._note_commit(sums)
                self._abandon_catch_up()
                return True
            if not self._vote(self._step + 1, ok=True):
                return True
            self._note_commit(sums)
            if progress.missed_steps:
                progress.missed_steps[-1].updated = sums.last_updated
            progress.missed_steps.append(_MissedStep(gradients, sums.scale))
            if self._exchange is None or self._next_epoch is not None:
                return True
            if self._joins:
                return self._admit(state)

    def _leave_epoch(self, state: GroupState) -> bool:
        """Take part in one more step without samples, and end the epoch after it, so that the other
        groups discard no step when this one joins again. Return False if a group was lost."""
        summed = self._sum_without_samples(state)
        if summed is None:
            return False
        if self._vote(self._step + 1, ok=True, last=True):
            self._note_commit(summed[1])
        return True

    def _sum_without_samples(
        self,
        state: GroupState,
        *,
        is_ready: bool = False,
        requests: Sequence[float] = (0.0,) * NUM_SHARED_REQUESTS,
        counts: Sequence[float] | None = None,
    ) -> tuple[list[Tensor], GroupSums] | None:
        """Return the gradients and sums of a step that the other groups compute, or that is
        skipped; None: a group was lost."""
        gradients, losses, max_logit = state.create_zero_sums()
        counts = [0.0] * state.num_counts if counts is None else counts
        sums: list[GroupSums] = []

        def exchange() -> None:
            values = gradients, losses, requests, max_logit, counts
            sums.append(self._sum_over_groups(*values, scale=0.0, is_ready=is_ready))

        if not self._succeeds_on_all_ranks(exchange):
            return None
        return gradients, sums[0]

    def _replay(self, progress: _CatchUp, state: GroupState) -> None:
        """Repeat the steps of which it is known whether they have changed the weights."""
        while progress.missed_steps and progress.missed_steps[0].updated is not None:
            missed = progress.missed_steps.pop(0)
            state.replay(missed.gradients, scale=missed.scale, updated=bool(missed.updated))

    def _admit(self, state: GroupState) -> bool:
        """Let groups that have caught up compute from the next step on; return whether no group was
        lost. They receive counters and the states of callbacks from the first active group."""
        epoch, exchange, progress = self._epoch, self._exchange, self._catch_up
        assert epoch is not None and exchange is not None, "an epoch has begun"
        joins, self._joins = self._joins, set()
        sent = state.export() if self.config.id == self._active[0] else None
        received: list[dict[str, Any]] = []  # Any: JSON
        last_update = torch.tensor(self._describe_last_update())

        def receive() -> None:
            exchange.all_reduce_([last_update])
            received.append(broadcast_json(exchange, sent))

        if not self._succeeds_on_all_ranks(receive):
            return False
        self._last_updated = _read_last_update(last_update.tolist())
        if progress is not None and self.config.id in joins:
            if progress.missed_steps:
                progress.missed_steps[-1].updated = self._last_updated
            self._replay(progress, state)
            assert not progress.missed_steps, "active groups record whether a step has an update"
            state.adopt(received[0])
            self._catch_up, self._is_complete, self._kept = None, True, _UncommittedStep()
        holdings: list[float] = []
        if not self._succeeds_on_all_ranks(
            lambda: holdings.extend(self._exchange_holdings(exchange, state))
        ):
            return False
        self._set_shares(holdings, epoch, state)
        return True

    def build_loader(self, build: BuildLoader) -> bool:
        """Build the loader of the steps of this epoch; return False if another epoch must be
        entered first."""
        self._loader = build(self.share, self.samples)
        if self._counts is not None or self.is_diloco:
            return True
        if self._exchange_counts(self._loader.peek_counts()):
            return True
        self._vote(self._step + 1, ok=False)
        return False

    def _exchange_counts(self, counts: Sequence[float]) -> bool:
        """Sum the counts of the next step over the groups, in which they are not known; return
        whether no group was lost."""
        vector, exchange = torch.tensor(counts, dtype=torch.float64), self._exchange
        assert exchange is not None, "an epoch has begun"
        if not self._succeeds_on_all_ranks(lambda: exchange.all_reduce_([vector])):
            return False
        self._counts = vector.tolist()
        return True

    @property
    def loader(self) -> Loader:
        """Loader of the samples of this group in the present epoch."""
        assert self._loader is not None, "build_loader has been called"
        return self._loader

    # --- steps

    def read_batches(self) -> StepBatches:
        """Return the batches of this group in the next step, with the counts of the global
        batch."""
        batches = self.loader.next()
        self._attempt = _UncommittedStep({*self.loader.group_samples} | self._kept.samples)
        assert self._counts is not None, "the counts were exchanged in the step before"
        return self.loader.with_counts(batches, self._counts)

    def sum_step(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        scale: float,
    ) -> GroupSums:
        """Sum gradients and routing statistics in place, losses and requests over the groups, after
        adding what this group has kept of the step. Not collective over the mesh.

        max_logit: float64 [1]; scale: loss scale of the gradients. The message also has the counts
        of the next step.
        """
        self._sums, kept = None, self._kept
        for gradient, tensor in zip(gradients, kept.gradients):
            gradient.add_(tensor)
        if kept.losses is not None:
            losses = losses + kept.losses
        if max_logit is not None and kept.max_logit is not None:
            max_logit = torch.maximum(max_logit, kept.max_logit)
        self._attempt.gradients = self._copy(gradients)
        self._attempt.losses, self._attempt.max_logit = losses, max_logit
        counts = self.loader.peek_counts()
        try:
            with self._ranks.waiting():
                self._sums = self._sum_over_groups(
                    gradients, losses, requests, max_logit, counts, scale
                )
            return self._sums
        except GroupExchangeError as error:
            _log.warning("the gradients were not summed over the replica groups: %s", error)
            for gradient, tensor in zip(gradients, self._attempt.gradients, strict=True):
                gradient.copy_(tensor)
            return GroupSums(losses, requests, max_logit, failed=True)

    def _sum_over_groups(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        counts: Sequence[float],
        scale: float,
        *,
        is_ready: bool = False,
    ) -> GroupSums:
        """Sum gradients in place, and the other values, over the groups.

        Raises:
            GroupExchangeError: a group was lost.
        """
        exchange = self._exchange
        if exchange is None:
            raise GroupExchangeError("the connections of the epoch are closed")
        groups, index = exchange.num_groups, exchange.index
        logits = [0.0] * (0 if max_logit is None else groups)
        if max_logit is not None and self._catch_up is None:
            logits[index] = max_logit.item()
        ready = [float(is_ready and number == index) for number in range(groups)]
        is_first = self.config.id == self._active[0]
        status = [*self._describe_last_update(), scale if is_first else 0.0]
        host = losses.to("cpu", torch.float64)
        numbers = [*requests, *counts, *status, *ready, *logits]
        vector = torch.cat([host, torch.tensor(numbers, dtype=torch.float64)])
        exchange.all_reduce_([*gradients, vector])
        sums, shared, summed_counts, summed_status, joins, largest = _split_values(
            vector.tolist(), len(host), len(requests), len(counts), 3, groups
        )
        active = [
            value
            for name, value in zip(exchange.member.participants, largest)
            if name in self._active
        ]
        return GroupSums(
            losses.new_tensor(sums),
            shared,
            None if max_logit is None else max_logit.new_tensor([max(active)]),
            failed=False,
            counts=summed_counts,
            last_updated=_read_last_update(summed_status),
            scale=summed_status[2],
            joins={name for name, value in zip(exchange.member.participants, joins) if value > 0},
        )

    def _describe_last_update(self) -> list[float]:
        """Return whether this group's last step has changed the weights, and whether this is known;
        all groups in which it is known agree."""
        knows = self.config.id in self._active and self._last_updated is not None
        return [float(knows and bool(self._last_updated)), float(knows)]

    def _note_commit(self, sums: GroupSums) -> None:
        """Continue after a committed step."""
        self._step += 1
        self._counts, self._joins = list(sums.counts), set(sums.joins)

    # --- rounds of DiLoCo

    def start_exchange(self, work: Callable[[RingExchange], T]) -> "Future[T]":
        """Start an exchange of this rank with the same rank of the other groups on a thread. Not
        collective; one at a time."""
        exchange = self._exchange
        assert exchange is not None, "an epoch has begun"
        if self._exchange_thread is None:
            self._exchange_thread = ThreadPoolExecutor(1, thread_name_prefix="group-exchange")
        return self._exchange_thread.submit(work, exchange)

    def finish_exchange(self, future: "Future[T]") -> T | None:
        """Return the result of an exchange; None if a group was lost on any rank."""
        results: list[T] = []
        is_complete = self._succeeds_on_all_ranks(lambda: results.append(future.result()))
        return results[0] if is_complete else None

    def commit_round(self, number: int, *, ok: bool) -> bool:
        """Vote about synchronization `number`, and return whether all participants apply it."""
        is_committed = self._vote(number, ok=ok)
        self._step += is_committed
        return is_committed

    def _load_state(self, progress: _CatchUp, state: GroupState) -> bool:
        """Wait for the state of another group, and continue from it; return False if it was
        lost."""
        with self._ranks.waiting():
            wait([progress.future])
        self._catch_up = None
        if not self._ranks.all_agree(progress.future.exception() is None):
            _log.warning("state transfer failed: %s", progress.future.exception())
            self._close_exchange()
            return False
        before = state.step
        state.adopt(progress.future.result().state)
        self._is_complete = True
        self._print_line(
            f"round {before}: loaded the state of round {state.step} from replica group "
            f"{progress.source}"
        )
        return True

    def _copy(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the gradients, in memory that is used again after a commit."""
        copies, self._spare = self._spare, []
        if len(copies) != len(gradients):
            copies = [torch.empty_like(gradient) for gradient in gradients]
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.copy_(gradient)
        return copies

    def commit(self, step: int, *, ok: bool, last: bool = False) -> bool:
        """Vote about step number `step`, and return whether all participants apply its update.

        After a discarded step the next epoch begins, in which the samples of lost groups are
        computed again. `last`: this group ends after the step.
        """
        if self._vote(step, ok=ok, last=last):
            self._spare = self._attempt.gradients
            self._kept, self.samples = _UncommittedStep(), None
            assert self._sums is not None, "the step was committed, so it was summed"
            self._note_commit(self._sums)
            return True
        self._kept = self._attempt
        return False

    def skip_step(self, state: GroupState, requests: Sequence[float]) -> Sequence[float] | None:
        """Agree with the other groups on a step without samples, after the loader of the next step
        was built; return the number of groups with each kind of shared request, or None if the
        step was discarded."""
        self._kept = self._attempt = _UncommittedStep()
        counts = self.loader.peek_counts()
        summed = self._sum_without_samples(state, requests=requests, counts=counts)
        if summed is None:
            self.commit(self._step + 1, ok=False)
            return None
        self._sums = summed[1]
        if not self.commit(self._step + 1, ok=True):
            return None
        self.note_update(updated=False)
        return summed[1].requests

    def note_update(self, *, updated: bool) -> None:
        """Note whether the committed step has changed the weights."""
        self._last_updated = updated

    def _vote(self, step: int, *, ok: bool, last: bool = False) -> bool:
        epoch, has_state = self._epoch, self._is_complete and self._catch_up is None
        assert epoch is not None, "an epoch has begun"
        decision = self._ranks.ask_coordinator(
            lambda coordinator: coordinator.vote(
                epoch=epoch.number, step=step, ok=ok, last=last, has_state=has_state
            )
        )
        if not decision.commit:
            self._print_line(f"step {step}: discarded in epoch {epoch.number}: {decision.reason}")
        self._next_epoch = decision.epoch
        if decision.epoch is None and (decision.rejoin or not decision.commit):
            self._close_exchange()  # `enter` joins again
        return decision.commit

    def leave(self) -> None:
        """End the participation of this group, whose run has ended."""
        if self._ranks.coordinator is not None:
            with suppress(UserError, OSError):
                self._ranks.coordinator.leave()
        self.close()

    def close(self) -> None:
        """Close all connections: for the other groups, this one is lost."""
        if self._catch_up is not None:  # its thread would delay the exit of the process
            self._catch_up.cancelled.set()
        self._close_exchange()
        self._listener.close()
        self._server.close()
        self._loading.shutdown(wait=False, cancel_futures=True)
        self._ranks.close()
        if self._exchange_thread is not None:
            self._exchange_thread.shutdown(wait=False, cancel_futures=True)

    # --- within the group

    def _succeeds_on_all_ranks(self, work: Callable[[], None]) -> bool:
        """Run `work` on every rank of the group; return whether no group was lost on any. Where one
        was, the exchange is closed, so that the peers fail at once."""
        return self._ranks.succeeds(work, self._close_exchange)

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    @property
    def _digest(self) -> bytes:
        return blake2b(json.dumps(self._settings).encode(), digest_size=16).digest()

    @property
    def _max_batch_size(self) -> int:
        return largest_batch_size(self.run.train)


def _read_last_update(sums: Sequence[float]) -> bool | None:
    """Return whether the last step has changed the weights, from the sums over groups of
    `_describe_last_update`; None: unknown in all groups."""
    return sums[0] > 0 if sums[1] > 0 else None


def _split_values(values: list[float], *sizes: int) -> tuple[list[float], ...]:
    """Return consecutive parts of these sizes, and the rest."""
    parts, start = [], 0
    for size in sizes:
        parts.append(values[start : start + size])
        start += size
    return (*parts, values[start:])


class ReplicaGroupSync:
    """Sums the gradients of each step over replica groups; see `StepSynchronizer`."""

    allows_reruns = allows_rollbacks = False
    """A rerun would compare the ranks of one group only, and committed steps are final."""

    def __init__(self, groups: ReplicaGroups, state: GroupState) -> None:
        self._groups, self._state = groups, state

    @property
    def is_writer(self) -> bool:
        """Whether this group writes the checkpoints."""
        return self._groups.is_writer

    @property
    def changes_epoch(self) -> bool:
        """Whether other groups compute the next step."""
        return self._groups.changes_epoch

    def enter(self) -> None:
        """Begin the next epoch; see `ReplicaGroups.enter`."""
        self._groups.enter(self._state)

    def build_loader(self, build: BuildLoader) -> Loader:
        """Return the loader of this group's samples in the epoch."""
        while not self._groups.build_loader(build):
            self.enter()
        return self._groups.loader

    def read_batches(self, loader: Loader) -> StepBatches:
        """Return the batches of this group, with the counts of the global batch."""
        return self._groups.read_batches()

    def sum_step(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        scale: float,
    ) -> StepSums:
        """Sum the values of a step over the groups."""
        summed = [*gradients, *self._state.list_routing_sums()]
        return self._groups.sum_step(summed, losses, requests, max_logit, scale)

    def commit(self, step: int, *, ok: bool, last: bool = False) -> bool:
        """Vote about a step; return whether all groups apply its update."""
        return self._groups.commit(step, ok=ok, last=last)

    def note_update(self, *, updated: bool) -> None:
        """Note whether the committed step has changed the weights."""
        self._groups.note_update(updated=updated)

    def skip_step(self, requests: Sequence[float]) -> Sequence[float] | None:
        """Agree with the other groups on a step without samples."""
        return self._groups.skip_step(self._state, requests)

    def after_step(self) -> bool:
        """Return False: the next step begins with the same samples."""
        return False

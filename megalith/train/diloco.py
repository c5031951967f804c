"""DiLoCo between replica groups: synchronizes weights every `replica_group.diloco.sync_every` inner
steps.

A round has one exchange and one vote. A group that is lost before the vote is left out of the mean:
the others sum their deltas again. A group that joins loads the state of another one.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.replica_group import DilocoConfig
from megalith.data.loader import Loader, StepBatches
from megalith.optim.diloco import OuterOptimizer, decode, encode, encoded_nbytes
from megalith.parallel.group_exchange import RingExchange
from megalith.plan.diloco import SyncSchedule
from megalith.train.replica_groups import ReplicaGroups
from megalith.train.step import Trainer
from megalith.train.synchronizer import BuildLoader, GroupState, StepSums
from megalith.train.trainer import all_gather_loaded_params

ROUNDS = "diloco_rounds"
"""Key of the number of rounds in the state that a group sends to another."""


@dataclass(slots=True)
class RoundState:
    """State of this group, whose steps are rounds for the coordinator."""

    state: GroupState
    rounds: int
    """Rounds that are applied."""
    count_rounds: Callable[[int], int]
    """Returns the rounds that are applied after a number of inner steps."""
    outer: OuterOptimizer

    @property
    def step(self) -> int:
        """Number of finished rounds."""
        return self.rounds

    @property
    def batch_size(self) -> int:
        """Global batch size of the next step."""
        return self.state.batch_size

    @property
    def num_counts(self) -> int:
        """Number of label counts of a global batch."""
        return self.state.num_counts

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of what must be equal in all groups."""
        return self.state.fingerprints

    def entries(self) -> Sequence[CheckpointEntry]:
        """Return this rank's tensors."""
        return self.state.entries()

    def export(self) -> dict[str, Any]:  # Any: JSON
        """Return the state besides tensors, with the number of rounds."""
        return self.state.export() | {ROUNDS: self.rounds}

    def list_routing_sums(self) -> list[Tensor]:
        """Return the routing statistics of the last step."""
        return self.state.list_routing_sums()

    def create_zero_sums(self) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Return zeros in place of gradients, losses and largest logit."""
        return self.state.create_zero_sums()

    def replay(self, gradients: Sequence[Tensor], *, scale: float, updated: bool) -> None:
        """Apply a step that other groups have computed."""
        self.state.replay(gradients, scale=scale, updated=updated)

    def adopt(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        """Continue from the state of another group, without what rounding has removed from the
        deltas of that one: it sends that itself."""
        self.state.adopt(state)
        self.outer.clear_residuals()
        self.rounds = int(state[ROUNDS])


class DeltaSums(NamedTuple):
    """Sums of the deltas of a round over the groups."""

    deltas: list[Tensor]
    """Weighted sums."""
    total: float
    """Sum of the weights."""
    weight: float
    """Weight of this group."""


@dataclass(slots=True)
class _Round:
    """Fragments that are being synchronized."""

    slots: list[int]
    deltas: list[Tensor]
    payload: Tensor
    """Encoded deltas; empty if they are sent in their own dtype."""
    weight: float
    """0 for a group that has just joined, whose weights are a copy of another group's."""
    apply_step: int
    future: "Future[DeltaSums]"


class DilocoSync:
    """Rounds of one rank; see `StepSynchronizer`. All methods are collective over the group's
    mesh, except `sum_step`."""

    allows_reruns, allows_rollbacks = True, False
    """Steps belong to this group alone; a rollback would repeat rounds that others have applied."""

    def __init__(self, trainer: Trainer, groups: ReplicaGroups, state: GroupState) -> None:
        assert trainer.outer is not None, "replica_group.mode=diloco"
        run = trainer.run
        self._trainer, self._outer, self._groups = trainer, trainer.outer, groups
        self._config: DilocoConfig = groups.config.diloco
        self._schedule = SyncSchedule(
            self._config.sync_every,
            self._config.num_fragments,
            self._config.fragment_delay,
            run.train.steps,
        )
        count = self._schedule.count_rounds
        self.state = RoundState(state, count(state.step), count, self._outer)
        self._round: _Round | None = None

    @property
    def is_writer(self) -> bool:
        """Whether this group writes the checkpoints."""
        return self._groups.is_writer

    @property
    def changes_epoch(self) -> bool:
        """Whether other groups train from now on, for which `enter` must be called."""
        return self._groups.changes_epoch

    def enter(self) -> None:
        """Begin the next epoch, and take part in the round that the other groups are in."""
        self._groups.enter(self.state)
        self.catch_up()

    def build_loader(self, build: BuildLoader) -> Loader:
        """Return the loader of this group's samples."""
        self._groups.build_loader(build)
        return self._groups.loader

    def read_batches(self, loader: Loader) -> StepBatches:
        """Return the batches of this group, whose losses are normalized by its own labels."""
        return replace(loader.next(), num_microbatches=None)

    def sum_step(
        self,
        gradients: Sequence[Tensor],
        losses: Tensor,
        requests: Sequence[float],
        max_logit: Tensor | None,
        scale: float,
    ) -> StepSums:
        """Return the values of this group."""
        return StepSums(losses, requests, max_logit)

    def commit(self, step: int, *, ok: bool, last: bool = False) -> bool:
        """Return True: groups vote about rounds only."""
        return True

    def note_update(self, *, updated: bool) -> None:
        """Do nothing."""

    def skip_step(self, requests: Sequence[float]) -> Sequence[float] | None:
        """Return the requests of this group."""
        return requests

    def catch_up(self) -> None:
        """Take part in the round that the other groups are in, after the state of one of them was
        loaded before it was applied."""
        step = self.state.state.step
        if self.state.rounds >= self._schedule.count_rounds(step):
            return
        fragments = self._schedule.list_sends(self._schedule.find_sent_step(step))
        self._round = self._send(fragments, step, weight=0.0)
        self._apply()

    def after_step(self) -> bool:
        """Send and apply the fragments that are due after a finished inner step; return whether
        another epoch has begun, with other shares of the samples."""
        with self._trainer.timers.section("grad_reduce"):
            return self._synchronize()

    def _synchronize(self) -> bool:
        step, has_entered = self.state.state.step, False
        fragments = self._schedule.list_sends(step)
        if self._round is not None and step >= self._round.apply_step:
            has_entered = self._apply()
            if fragments and self._groups.changes_epoch:  # since the vote about that round
                self.enter()
                has_entered = True
        if fragments and self.state.state.step == step:
            self._round = self._send(fragments, self._schedule.find_apply_step(step))
            if self._round.apply_step == step:
                has_entered = self._apply() or has_entered
        return has_entered

    def _send(self, fragments: Sequence[int], apply_step: int, weight: float = 1.0) -> _Round:
        """Compute the deltas of some fragments and start their exchange."""
        config = self._config
        slots = self._outer.list_slots(fragments)
        deltas = self._outer.compute_deltas(slots)
        payload = torch.empty(0, dtype=torch.uint8)
        if config.delta_dtype != "fp32":
            dtype, block = config.delta_dtype, config.int8_block_size
            payload = torch.cat([payload, *(encode(delta, dtype, block) for delta in deltas)])
        future = self._groups.start_exchange(self._build_exchange(deltas, payload, weight))
        return _Round(slots, deltas, payload, weight, apply_step, future)

    def _build_exchange(
        self, deltas: Sequence[Tensor], payload: Tensor, weight: float
    ) -> Callable[[RingExchange], DeltaSums]:
        """Return the exchange of deltas.

        If all groups have just joined, because those that they have loaded were lost, they have
        equal weights.
        """

        def exchange(ring: RingExchange) -> DeltaSums:
            gathered = torch.zeros(ring.num_groups, dtype=torch.float64)
            gathered[ring.index] = weight
            ring.all_reduce_([gathered])
            weights = gathered.tolist() if any(gathered) else [1.0] * ring.num_groups
            own = weights[ring.index]
            if self._config.delta_dtype == "fp32":
                sums = [delta * own for delta in deltas]
                ring.all_reduce_(sums)
                return DeltaSums(sums, sum(weights), own)
            sums = [torch.zeros_like(delta) for delta in deltas]
            for data, factor in zip(ring.all_gather(payload), weights, strict=True):
                for total_delta, values in zip(sums, self._decode(data, deltas), strict=True):
                    total_delta.add_(values, alpha=factor)
            return DeltaSums(sums, sum(weights), own)

        return exchange

    def _decode(self, data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        dtype, block = self._config.delta_dtype, self._config.int8_block_size
        sizes = [encoded_nbytes(tensor.numel(), dtype, block) for tensor in like]
        parts = data.split(sizes)
        return [decode(part, each, dtype, block) for part, each in zip(parts, like, strict=True)]

    def _apply(self) -> bool:
        """Wait for the exchange of a round, vote, and apply the outer step. If a group was lost,
        the remaining ones begin another epoch and exchange again; return whether they did."""
        this_round, self._round = self._round, None
        has_entered = False
        assert this_round is not None, "a round was sent"
        groups, state, step = self._groups, self.state, self.state.state.step
        while True:
            result = groups.finish_exchange(this_round.future)
            if groups.commit_round(state.rounds + 1, ok=result is not None):
                break
            groups.enter(state)
            has_entered = True
            if state.state.step != step:  # this group was behind, and has loaded another state
                self.catch_up()
                return has_entered
            this_round.future = groups.start_exchange(
                self._build_exchange(this_round.deltas, this_round.payload, this_round.weight)
            )
        assert result is not None, "the round was committed"
        state.rounds += 1
        self._trainer.write_guard.wait()
        self._trainer.data.wait_params()
        if this_round.payload.numel() and result.weight:
            sent = self._decode(this_round.payload, this_round.deltas)
            self._outer.keep_residuals(this_round.slots, this_round.deltas, sent)
        self._outer.apply(this_round.slots, [each / result.total for each in result.deltas])
        all_gather_loaded_params(self._trainer)
        return has_entered

"""Quorum of replica groups: properties over random histories of joins, deaths, restarts of the
coordinator, lost, repeated and delayed messages."""

import heapq
import json
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import pytest

from megalith.plan.quorum import (
    Answer,
    Decision,
    Epoch,
    JoinRequest,
    QuorumLimits,
    QuorumReply,
    QuorumState,
    Rejection,
    Sender,
    Vote,
)

TIMEOUT = 5.0


@dataclass(eq=False)
class SimulatedGroup:
    """A process of a replica group: computes steps, votes, recovers; may be killed at any time."""

    name: str
    incarnation: int
    history: tuple[int, ...]
    """Epoch in which each committed step was committed: stands for the weights."""

    request: int = 0
    is_alive: bool = True
    is_partitioned: bool = False
    is_hanging: bool = False
    """It sends heartbeats, but does not vote."""

    has_taken_part: bool = False
    missed: list[int] | None = None
    """Epochs of the steps committed since it began to recover; None: it has the newest state."""

    epoch: Epoch | None = None
    message: JoinRequest | Vote | None = None
    """Request that is sent again until it is answered."""

    asked_at: float = 0.0

    @property
    def step(self) -> int:
        return len(self.history)


@dataclass(kw_only=True)
class Rates:
    """How often faults occur in one history."""

    loss: float
    delay: float
    repeat: float
    bad_vote: float
    crash: float
    """Probability that the coordinator dies while it handles a message."""


@dataclass(eq=False)
class Simulation:
    """Coordinator, groups and network in simulated time; every property is checked on the way."""

    rng: random.Random
    limits: QuorumLimits
    rates: Rates
    now: float = 0.0
    queue: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    count: int = 0
    groups: dict[str, SimulatedGroup] = field(default_factory=dict)
    state: QuorumState | None = field(default_factory=QuorumState)
    record: dict = field(default_factory=lambda: QuorumState().to_record())
    later_commits: list[tuple[int, int, list[str]]] = field(default_factory=list)
    version: int = 0
    checkpoint: tuple[int, ...] = ()
    newest_epoch: int = 0
    epoch_weights: dict[int, tuple[int, ...]] = field(default_factory=dict)
    ok_votes: dict[tuple[str, int, int, int], bool] = field(default_factory=dict)
    """Votes for a step; whether the group had the state of the step before."""

    commits: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    discards: set[tuple[int, int]] = field(default_factory=set)
    check_json: bool = False

    # -- time and network ----------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.queue, (self.now + delay, self.count, action))

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self.queue)
            action()
        self.now = until

    def transmit(self, group: SimulatedGroup, action: Callable[[], None]) -> None:
        """Deliver a message once, several times or never, after a random time."""
        if group.is_partitioned or self.rng.random() < self.rates.loss:
            return
        for _ in range(2 if self.rng.random() < self.rates.repeat else 1):
            self.at(0.01 + self.rng.expovariate(1 / self.rates.delay), action)

    # -- coordinator ---------------------------------------------------------------------------

    def handle(self, call: Callable[[QuorumState], list[QuorumReply]]) -> None:
        """Run one method of the coordinator, store its record, and send its replies."""
        if self.state is None:
            return
        before = self.state.committed_step
        number = self.state.epoch.number if self.state.epoch else 0
        replies = call(self.state)
        if self.state.version != self.version or self.state.committed_step != before:
            if self.rng.random() < self.rates.crash:
                self.crash()
                return
            self.store(self.state)
            self.check_stored(before, number)
            if self.rng.random() < self.rates.crash:
                self.crash()
                return
        for reply in replies:
            group = self.groups.get(reply.to.group)
            if group is not None and group.incarnation == reply.to.incarnation:
                self.transmit(group, partial(self.receive, group, reply.to.request, reply.answer))

    def store(self, state: QuorumState) -> None:
        """Store the record, or only a commit, as the coordinator does."""
        if state.version == self.version:
            assert state.epoch is not None and state.committed_step is not None
            commit = (state.epoch.number, state.committed_step, state.list_without_state())
            self.later_commits.append(commit)
            return
        self.version = state.version
        self.record, self.later_commits = state.to_record(), []
        if self.check_json:
            self.record = json.loads(json.dumps(self.record))

    def crash(self) -> None:
        self.state = None
        self.at(self.rng.uniform(0.1, 2 * TIMEOUT), self.restart_coordinator)

    def restart_coordinator(self) -> None:
        if self.state is None:
            self.state = QuorumState.from_record(self.record, self.now)
            for commit in self.later_commits:
                self.state.restore_commit(*commit)
            self.version = self.state.version

    def check_stored(self, before: int | None, number: int) -> None:
        """Check the commits and epochs that the coordinator has stored."""
        state = self.state
        assert state is not None
        for entry in state.history[-2:]:
            for step in range(entry.first, entry.last + 1):
                key = (entry.epoch, step)
                if key in self.commits:
                    continue
                # never two epochs at once: a step is committed in the newest epoch only
                assert entry.epoch == number == self.newest_epoch, (key, number, self.newest_epoch)
                participants = self.participants[entry.epoch]
                for group, incarnation in participants.items():
                    vote = (group, incarnation, *key)
                    assert vote in self.ok_votes, f"{key} was committed without a vote of {group}"
                assert key not in self.discards, f"{key} was discarded before"
                self.commits[key] = {
                    group: incarnation
                    for group, incarnation in participants.items()
                    if self.ok_votes[(group, incarnation, *key)]
                }
        if state.epoch is not None and state.epoch.number != self.newest_epoch:
            assert state.epoch.number > self.newest_epoch
            self.newest_epoch = state.epoch.number
            self.participants[state.epoch.number] = {
                group: sender.incarnation for group, sender in state.admitted.items()
            }
            for group in self.groups.values():
                newest = self.newest_step(group) if group.has_taken_part else 0
                assert newest <= state.epoch.step, (
                    f"epoch {state.epoch.number} begins at step {state.epoch.step}, but group "
                    f"{group.name} is alive and has committed step {newest}"
                )

            if before is not None and state.epoch.step < before:
                self.remove_lost_steps(state.epoch)

    participants: dict[int, dict[str, int]] = field(default_factory=dict)

    def remove_lost_steps(self, epoch: Epoch) -> None:
        """Remove the checkpoint, and processes that have loaded but not joined, if all groups that
        had the newest steps are dead and the others continue from an older state."""
        source = self.groups[next(g for g in epoch.participants if g not in epoch.recover_from)]
        for group in self.groups.values():
            if not group.has_taken_part and group.history != source.history[: group.step]:
                group.is_alive, group.message = False, None
        if self.checkpoint != source.history[: len(self.checkpoint)]:
            self.checkpoint = source.history

    def newest_step(self, group: SimulatedGroup) -> int:
        """Committed steps of a live process, with one whose decision it has not received yet."""
        if not group.is_alive:
            return -1
        vote = group.message
        in_doubt = isinstance(vote, Vote) and (vote.epoch, vote.step) in self.commits
        return group.step + int(in_doubt and group.missed is None)

    def tick(self) -> None:
        for group in self.groups.values():
            if group.is_alive:
                beat = partial(self.beat, group.name, group.incarnation)
                self.transmit(group, beat)
                if self.now - group.asked_at > 1:
                    self.send(group)
        self.handle(lambda state: state.update(self.now))
        self.at(1.0, self.tick)

    def beat(self, name: str, incarnation: int) -> None:
        if self.state is not None:
            self.state.record_heartbeat(name, incarnation, self.now)

    # -- groups --------------------------------------------------------------------------------

    def start_group(self, name: str) -> None:
        if (name in self.groups and self.groups[name].is_alive) or self.state is None:
            return
        numbers: list[int] = []

        def register(state: QuorumState) -> list[QuorumReply]:
            numbers.append(state.register())
            return []

        self.handle(register)
        if self.state is not None:
            group = SimulatedGroup(name, numbers[0], self.checkpoint)
            self.groups[name] = group
            self.ask(group, self.join_request(group))

    def kill_group(self, name: str) -> None:
        group = self.groups.get(name)
        if group is None or not group.is_alive:
            return
        group.is_alive, group.message = False, None
        if self.state is not None and self.rng.random() < 0.5:  # else the host has disappeared
            self.state.record_disconnect(name, group.incarnation, self.now)

    def leave(self, name: str) -> None:
        group = self.groups.get(name)
        if group is not None and group.is_alive and not isinstance(group.message, Vote):
            group.request += 1
            sender = Sender(group=name, incarnation=group.incarnation, request=group.request)
            self.kill_group(name)
            self.transmit(group, partial(self.handle, lambda state: state.leave(sender, self.now)))

    def set_fault(self, name: str, fault: str, is_active: bool) -> None:
        if name in self.groups:
            setattr(self.groups[name], fault, is_active)

    def join_request(self, group: SimulatedGroup) -> JoinRequest:
        return JoinRequest(committed_step=group.step, limits=self.limits)

    def ask(self, group: SimulatedGroup, message: JoinRequest | Vote) -> None:
        group.request += 1
        group.message, group.asked_at = message, self.now
        self.send(group)

    def send(self, group: SimulatedGroup) -> None:
        message = group.message
        if message is None:
            return
        sender = Sender(group=group.name, incarnation=group.incarnation, request=group.request)
        if isinstance(message, Vote):
            call = partial(self.handle, lambda state: state.vote(sender, message, self.now))
        else:
            call = partial(self.handle, lambda state: state.join(sender, message, self.now))
        self.transmit(group, call)

    def receive(self, group: SimulatedGroup, request: int, answer: Answer) -> None:
        if not group.is_alive or group.request != request or group.message is None:
            return
        message, group.message = group.message, None
        if isinstance(answer, Rejection):
            assert answer.retry, answer.reason
            self.at(1.0, partial(self.ask_again, group, request, message))
        elif isinstance(answer, Epoch):
            self.enter_epoch(group, answer)
        elif isinstance(answer, Decision):
            assert isinstance(message, Vote)
            self.apply_decision(group, message, answer)

    def ask_again(self, group: SimulatedGroup, request: int, message: JoinRequest | Vote) -> None:
        if group.is_alive and group.request == request:
            self.ask(group, message)

    def apply_decision(self, group: SimulatedGroup, vote: Vote, decision: Decision) -> None:
        key = (vote.epoch, vote.step)
        if decision.commit:
            assert key in self.commits and key not in self.discards, f"{key}: commit is wrong"
            assert vote.ok
            if group.missed is not None:
                group.missed.append(vote.epoch)
            else:
                assert group.step == vote.step - 1
                group.history = (*group.history, vote.epoch)
            if vote.step % 3 == 0 and self.rng.random() < 0.5:
                self.checkpoint = group.history
        else:
            assert key not in self.commits, f"{key} is committed, but {group.name} discards it"
            self.discards.add(key)
        if decision.epoch is not None:
            self.enter_epoch(group, decision.epoch)
        elif decision.rejoin:
            group.missed = None
            self.ask(group, self.join_request(group))
        else:
            assert decision.commit and group.epoch is not None
            self.compute(group, group.epoch)

    def enter_epoch(self, group: SimulatedGroup, epoch: Epoch) -> None:
        group.epoch = epoch
        group.has_taken_part |= epoch.has(group.name)
        group.missed = None
        if not epoch.has(group.name):
            self.at(self.rng.uniform(0.5, 4), partial(self.recover, group, epoch))
        elif group.name in epoch.recover_from and self.rng.random() < 0.5:
            group.missed = []
            self.at(self.rng.uniform(0.5, 4), partial(self.load_during_epoch, group, epoch))
            self.compute(group, epoch)
        elif group.name in epoch.recover_from:
            self.at(self.rng.uniform(0.1, 1), partial(self.recover, group, epoch))
        else:
            self.begin(group, epoch)

    def begin(self, group: SimulatedGroup, epoch: Epoch) -> None:
        """Check that all participants begin an epoch with the same weights."""
        assert group.step == epoch.step, (group, epoch)
        weights = self.epoch_weights.setdefault(epoch.number, group.history)
        assert group.history == weights, f"{group.name} begins epoch {epoch} with other weights"
        self.compute(group, epoch)

    def recover(self, group: SimulatedGroup, epoch: Epoch) -> None:
        """Copy the state of the source, as the transfer of a snapshot does."""
        if not group.is_alive or group.epoch is not epoch or group.message is not None:
            return
        source = self.groups[epoch.recover_from[group.name]]
        if source.is_alive and source.step >= max(epoch.step, group.step):
            group.history = source.history
        if not epoch.has(group.name):
            self.ask(group, self.join_request(group))
        elif group.step == epoch.step:
            self.begin(group, epoch)
        else:
            step = epoch.step + 1
            self.ask(group, Vote(epoch=epoch.number, step=step, ok=False))

    def load_during_epoch(self, group: SimulatedGroup, epoch: Epoch) -> None:
        """Load the snapshot of the first step of the epoch, and repeat the steps since then, of
        which the group has received the gradients."""
        weights = self.epoch_weights.get(epoch.number)
        if not group.is_alive or group.epoch is not epoch or group.missed is None:
            return
        if group.message is not None or weights is None:  # between two votes only
            self.at(0.1, partial(self.load_during_epoch, group, epoch))
            return
        group.history, group.missed = (*weights, *group.missed), None

    def compute(self, group: SimulatedGroup, epoch: Epoch) -> None:
        self.at(self.rng.uniform(0.2, 1.2), partial(self.cast_vote, group, epoch))

    def cast_vote(self, group: SimulatedGroup, epoch: Epoch) -> None:
        if not group.is_alive or group.epoch is not epoch or group.message is not None:
            return
        if group.is_hanging:
            self.at(1.0, partial(self.cast_vote, group, epoch))
            return
        ok = self.rng.random() >= self.rates.bad_vote
        has_state = group.missed is None
        step = group.step if group.missed is None else epoch.step + len(group.missed)
        vote = Vote(epoch=epoch.number, step=step + 1, ok=ok, has_state=has_state)
        if ok:
            self.ok_votes[group.name, group.incarnation, vote.epoch, vote.step] = has_state
        self.ask(group, vote)


def run_history(seed: int) -> Simulation:
    """Run one random history, then end all faults and require progress."""
    rng = random.Random(seed)
    names = "abcd"[: rng.randint(1, 4)]
    limits = QuorumLimits(
        min_groups=rng.randint(1, min(2, len(names))),
        max_groups=rng.choice([None, 2, 3]),
        timeout_seconds=TIMEOUT,
        max_lag=rng.choice([1, 1, 3]),
    )
    rates = Rates(
        loss=rng.choice([0, 0.05, 0.3]),
        delay=rng.choice([0.01, 0.2, 2.0]),
        repeat=rng.choice([0, 0.2]),
        bad_vote=rng.choice([0, 0.05, 0.3]),
        crash=rng.choice([0, 0.01, 0.1]),
    )
    simulation = Simulation(rng, limits, rates, check_json=seed % 20 == 0)
    simulation.at(1.0, simulation.tick)
    for name in names:
        simulation.at(rng.uniform(0, 3), partial(simulation.start_group, name))
    duration = rng.uniform(5, 20)
    for _ in range(rng.randint(0, 12)):
        name = rng.choice(names)
        fault = rng.choice(["kill_group", "is_partitioned", "is_hanging", "crash", "leave"])
        moment = rng.uniform(1, duration)
        if fault == "crash":
            simulation.at(moment, simulation.crash)
            continue
        if fault in ("is_partitioned", "is_hanging"):
            end = moment + rng.uniform(0.5, 2 * TIMEOUT)
            simulation.at(moment, partial(simulation.set_fault, name, fault, True))
            simulation.at(end, partial(simulation.set_fault, name, fault, False))
            continue
        simulation.at(moment, partial(getattr(simulation, fault), name))
        simulation.at(moment + rng.uniform(0.1, 8), partial(simulation.start_group, name))
    simulation.run(duration)
    require_progress(simulation, names)
    return simulation


def require_progress(simulation: Simulation, names: str) -> None:
    """End all faults; require that steps are committed and that all participants have them."""
    simulation.rates = Rates(loss=0, delay=0.01, repeat=0, bad_vote=0, crash=0)
    simulation.restart_coordinator()
    for name in names:
        simulation.set_fault(name, "is_partitioned", False)
        simulation.set_fault(name, "is_hanging", False)
    for name in names:
        simulation.start_group(name)
    number = len(simulation.commits)
    deadline = simulation.now + 12 * TIMEOUT
    while len(simulation.commits) < number + 2:
        assert simulation.state is not None
        assert simulation.now < deadline, f"no progress: {simulation.state.reason}"
        simulation.run(simulation.now + 1)
    for (epoch, step), participants in simulation.commits.items():
        for group in simulation.groups.values():
            if group.is_alive and participants.get(group.name) == group.incarnation:
                assert group.step >= step - 1, f"{group.name} lost step {step}"
                if group.step >= step:
                    assert group.history[step - 1] == epoch


def run_histories(seeds: range) -> None:
    for seed in seeds:
        try:
            run_history(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_commits_are_atomic_and_never_lost_over_random_histories() -> None:
    run_histories(range(300))


@pytest.mark.slow
def test_commits_are_atomic_and_never_lost_over_many_random_histories() -> None:
    """All 10^5 seeds, in two processes."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        starts = range(300, 100_300, 1000)
        list(pool.map(run_histories, [range(start, start + 1000) for start in starts]))

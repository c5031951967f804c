"""Quorum of replica groups: properties over random histories of joins, deaths, restarts of the
coordinator, lost, repeated and delayed messages, and the rules one by one."""

import heapq
import json
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context

import pytest

from megalith.errors import ConfigError, PlanError
from megalith.plan import quorum
from megalith.plan.quorum import (
    Answer,
    Decision,
    Epoch,
    JoinRequest,
    Left,
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
            self.state.note_heartbeat(name, incarnation, self.now)

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
            self.state.note_disconnect(name, group.incarnation, self.now)

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


# --- rules one by one

BOTH = QuorumLimits(min_groups=2, timeout_seconds=TIMEOUT)


def sender(group: str, request: int, incarnation: int | None = None) -> Sender:
    return Sender(
        group=group,
        incarnation=ord(group) - 96 if incarnation is None else incarnation,
        request=request,
    )


def request(step: int = 0, limits: QuorumLimits = BOTH, **settings: str) -> JoinRequest:
    return JoinRequest(committed_step=step, limits=limits, settings=settings)


def ballot(epoch: int, step: int, *, ok: bool = True, last: bool = False) -> Vote:
    return Vote(epoch=epoch, step=step, ok=ok, last=last)


def answers(replies: list[QuorumReply]) -> dict[str, Answer]:
    return {f"{reply.to.group}{reply.to.request}": reply.answer for reply in replies}


def start_groups(names: str, limits: QuorumLimits, *, now: float = 0.0) -> QuorumState:
    """A coordinator whose groups train in epoch 1 from step 0, after request 1 of each."""
    state = QuorumState()
    for _ in "abcdefgh":
        state.register()
    for name in names:
        state.join(sender(name, 1), request(limits=limits), now)
    state.update(now + limits.timeout_seconds)
    for name in names:
        state.note_heartbeat(name, ord(name) - 96, now + limits.timeout_seconds)
    assert state.is_open and state.epoch is not None
    assert state.epoch.participants == tuple(names)
    return state


def test_first_epoch_waits_for_more_groups_until_the_timeout() -> None:
    state = QuorumState()
    for _ in range(3):
        state.register()
    assert state.join(sender("a", 1), request(), 0) == []
    assert state.join(sender("b", 1), request(), 1) == []
    state.note_heartbeat("a", 1, 4)
    assert state.update(TIMEOUT - 0.1) == []
    assert list(answers(state.update(TIMEOUT))) == ["a1", "b1"]
    state = QuorumState()
    limits = QuorumLimits(min_groups=2, max_groups=2, timeout_seconds=TIMEOUT)
    for _ in range(3):
        state.register()
    assert state.join(sender("a", 1), request(limits=limits), 0) == []
    assert list(answers(state.join(sender("b", 1), request(limits=limits), 0))) == ["a1", "b1"]


def test_group_that_does_not_vote_is_excluded_after_the_timeout() -> None:
    state = start_groups("abc", BOTH)
    for name in "ab":
        assert state.vote(sender(name, 2), ballot(1, 1, ok=False), 10) == []
    for now in (12, 14, 16):
        for name in "abc":  # all are connected
            state.note_heartbeat(name, ord(name) - 96, now)
    assert state.update(15) == []
    replies = answers(state.update(15.1))
    assert list(replies) == ["a2", "b2"]
    decision = replies["a2"]
    assert isinstance(decision, Decision) and decision.epoch is not None
    assert not decision.commit
    assert decision.epoch.participants == ("a", "b")
    assert "group c did not vote" in decision.reason
    late = answers(state.vote(sender("c", 2), ballot(1, 1), 16))["c2"]
    assert late == Decision(
        commit=False, rejoin=True, reason="epoch 1 ended without a commit of step 1"
    )


def test_lost_groups_are_excluded_without_waiting_for_the_timeout() -> None:
    state = start_groups("abc", BOTH)
    state.note_disconnect("c", 3, 5)
    for name in "ab":
        assert state.vote(sender(name, 2), ballot(1, 1, ok=False), 5.1) == []
    assert list(answers(state.update(5.4))) == []
    assert list(answers(state.update(5.6))) == ["a2", "b2"]


def test_no_group_continues_alone_below_min_groups() -> None:
    state = start_groups("ab", BOTH)
    state.note_disconnect("b", 2, 5)
    decision = answers([*state.vote(sender("a", 2), ballot(1, 1), 5), *state.update(6)])["a2"]
    assert isinstance(decision, Decision)
    assert (decision.commit, decision.epoch, decision.rejoin) == (False, None, True)
    assert state.join(sender("a", 3), request(), 7) == []
    assert state.reason == "1 of at least replica_group.min_groups=2 groups are ready at step 0"


def test_repeated_and_late_messages_have_no_effect() -> None:
    state = start_groups("ab", BOTH)
    vote = ballot(1, 1)
    state.vote(sender("a", 2), vote, 5)
    assert state.join(sender("a", 1), request(), 5) == []  # older than the vote
    assert state.vote(sender("a", 2), vote, 5) == []
    assert answers(state.vote(sender("b", 2), vote, 5)) == {
        "a2": Decision(commit=True),
        "b2": Decision(commit=True),
    }
    assert answers(state.vote(sender("b", 2), vote, 5)) == {"b2": Decision(commit=True)}
    assert state.committed_step == 1


def test_process_that_was_replaced_is_rejected() -> None:
    state = start_groups("ab", BOTH)
    state.note_disconnect("a", 1, 5)
    state.join(sender("a", 1, incarnation=8), request(), 6)
    for replies in (
        state.vote(sender("a", 2), ballot(1, 1), 6),
        state.join(sender("a", 3), request(), 6),
    ):
        assert answers(replies).popitem()[1] == Rejection(
            reason="another process has joined with replica_group.id=a. Use another id."
        )


def test_group_that_joins_instead_of_voting_ends_the_step() -> None:
    state = start_groups("ab", BOTH)
    state.vote(sender("a", 2), ballot(1, 1), 5)
    assert state.join(sender("a", 3), request(), 5) == []  # it may have lost its gradients
    replies = answers(state.vote(sender("b", 2), ballot(1, 1), 5))
    assert isinstance(replies["a3"], Epoch)
    assert isinstance(replies["b2"], Decision)
    assert not replies["b2"].commit
    assert state.committed_step == 0


def test_vote_about_a_later_step_is_rejected() -> None:
    state = start_groups("ab", BOTH)
    assert answers(state.vote(sender("a", 2), ballot(1, 2), 5)) == {
        "a2": Rejection(reason="a vote about step 2 in epoch 1, which is at step 1")
    }


def test_group_may_leave_after_a_step() -> None:
    state = start_groups("abc", BOTH)
    state.vote(sender("a", 2), ballot(1, 1), 5)
    state.vote(sender("b", 2), ballot(1, 1), 5)
    replies = answers(state.vote(sender("c", 2), ballot(1, 1, last=True), 5))
    assert replies["c2"] == Decision(commit=True, rejoin=True, reason="group c leaves")
    assert isinstance(replies["a2"], Decision) and replies["a2"].epoch is not None
    assert replies["a2"].epoch.participants == ("a", "b")
    assert answers(state.leave(sender("c", 3), 5)) == {"c3": Left()}
    assert state.list_newest() == ["a", "b"]


def test_spare_group_replaces_a_lost_one() -> None:
    limits = QuorumLimits(min_groups=1, max_groups=2, timeout_seconds=TIMEOUT)
    state = start_groups("ab", limits)
    assert state.join(sender("c", 1), request(limits=limits), 5) == []
    for step in (1, 2, 3):  # it waits, although it misses steps
        state.vote(sender("a", 1 + step), ballot(1, step), 5)
        replies = answers(state.vote(sender("b", 1 + step), ballot(1, step), 5))
        assert replies == {f"{name}{1 + step}": Decision(commit=True) for name in "ab"}
    state.note_disconnect("b", 2, 5)
    replies = answers([*state.vote(sender("a", 5), ballot(1, 4, ok=False), 6), *state.update(6)])
    recovery = replies["c1"]
    assert isinstance(recovery, Epoch)
    assert recovery.recover_from == {"c": "a"} and not recovery.has("c")


def test_newest_step_is_waited_for_until_it_is_forgotten() -> None:
    limits = QuorumLimits(min_groups=1, timeout_seconds=TIMEOUT)
    state = start_groups("ab", limits)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    state = QuorumState.from_record(state.to_record(), 100)
    assert state.join(sender("c", 1), request(limits=limits), 100) == []
    state.note_heartbeat("c", 3, 111)
    assert state.update(111) == []  # closes the epoch of the lost groups
    assert state.reason == (
        "step 1 was committed by groups a, b, and none of them has joined again; the newest state "
        "of the other groups is step 0"
    )
    with pytest.raises(ConfigError) as error:
        state.forget(["c"], 111)
    assert str(error.value) == (
        "--forget=c: the newest committed step does not depend on this group. It depends on: a, b."
    )
    assert state.forget(["a"], 111) == []
    replies = answers(state.forget(["b"], 111))
    assert isinstance(replies["c1"], Epoch)
    assert replies["c1"].step == 0


def test_restarted_groups_continue_from_their_newest_checkpoint() -> None:
    state = start_groups("ab", BOTH)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    for name in "ab":
        state.note_disconnect(name, ord(name) - 96, 6)
    state.update(20)
    assert state.join(sender("a", 1, incarnation=7), request(0), 20) == []
    assert state.join(sender("b", 1, incarnation=8), request(0), 20) == []
    state.note_heartbeat("a", 7, 25)
    state.note_heartbeat("b", 8, 25)
    replies = answers(state.update(25))
    assert isinstance(replies["a1"], Epoch)
    assert replies["a1"].step == 0


def test_settings_may_change_when_no_group_is_connected() -> None:
    state = start_groups("ab", BOTH)
    rejection = answers(state.join(sender("c", 1), request(seed="1"), 5))["c1"]
    assert isinstance(rejection, Rejection)
    assert "seed: 1 here, unset in the others" in rejection.reason
    assert state.join(sender("c", 2), request(seed="1"), 100) == []
    assert state.settings == {"seed": "1"}


def test_state_of_another_run_is_rejected() -> None:
    state = start_groups("ab", BOTH)
    rejection = answers(state.join(sender("c", 1), request(40), 5))["c1"]
    assert rejection == Rejection(
        reason="group c has state of step 40, but the groups that train are at step 0. Let it load "
        "the checkpoint of this run, or give the other run a coordinator of its own."
    )


def test_number_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quorum, "MAX_MEMBERS", 3)
    state = start_groups("abc", BOTH)
    assert answers(state.join(sender("d", 1), request(), 5)) == {
        "d1": Rejection(reason="3 groups have joined; there cannot be more.")
    }
    for name in "abc":
        state.leave(sender(name, 2), 6)
    assert state.join(sender("d", 2), request(), 7) == []


def test_record_is_restored_exactly() -> None:
    state = start_groups("ab", BOTH)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    record = json.loads(json.dumps(state.to_record()))
    assert QuorumState.from_record(record, 0).to_record() == record
    for damaged in ({}, record | {"members": 3}, record | {"epoch": {}}, record | {"history": [1]}):
        with pytest.raises(PlanError, match="the state of the coordinator is damaged"):
            QuorumState.from_record(damaged, 0)


def test_new_process_replaces_one_that_has_not_connected_after_a_restart() -> None:
    state = start_groups("ab", BOTH)
    state = QuorumState.from_record(state.to_record(), 10)
    assert state.describe_member("a", 10) == "disconnected"
    assert state.join(sender("a", 1, incarnation=7), request(), 10) == []  # not rejected
    replies = answers(state.vote(sender("b", 2), ballot(1, 1), 10))  # not lost yet
    assert isinstance(replies["b2"], Decision) and replies["b2"].epoch == replies["a1"]


def test_older_step_of_a_live_group_is_kept_when_later_ones_are_lost() -> None:
    """A regression test: the state of a group that was excluded before the newest commit."""
    limits = QuorumLimits(min_groups=1, timeout_seconds=TIMEOUT)
    state = start_groups("ab", limits)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    state.vote(sender("a", 3), ballot(1, 2), 5)
    state.note_heartbeat("a", 1, 9)
    assert list(answers(state.update(10.1))) == ["a3"]  # without b, which does not answer
    state.vote(sender("a", 4), ballot(2, 2), 10.1)
    assert (state.committed_step, state.list_newest()) == (2, ["a"])
    state.note_disconnect("a", 1, 10.1)
    state.update(16)
    assert state.join(sender("a", 1, incarnation=7), request(limits=limits), 16) == []
    state.note_heartbeat("a", 7, 21)
    assert state.update(21) == []
    assert state.reason.startswith("step 1 was committed by groups b, and none of them has joined")
    replies = answers(state.join(sender("b", 4), request(1, limits=limits), 21))
    epoch = replies["b4"]
    assert isinstance(epoch, Epoch)
    assert (epoch.step, epoch.recover_from) == (1, {"a": "b"})


def test_group_that_recovers_during_an_epoch_does_not_keep_commits() -> None:
    limits = QuorumLimits(min_groups=1, timeout_seconds=TIMEOUT, max_lag=100)
    state = start_groups("a", limits)
    state.vote(sender("a", 2), ballot(1, 1), 5)
    state.join(sender("b", 1), request(limits=limits), 5)
    epoch = answers(state.vote(sender("a", 3), ballot(1, 2), 5))["b1"]
    assert isinstance(epoch, Epoch)
    assert epoch.recover_from == {"b": "a"}
    recovering = Vote(epoch=2, step=3, ok=True, has_state=False)
    state.vote(sender("b", 2), recovering, 5)
    assert answers(state.vote(sender("a", 4), ballot(2, 3), 5))["b2"] == Decision(commit=True)
    assert state.list_without_state() == ["b"]
    restored = QuorumState.from_record(state.to_record(), 5)
    assert restored.list_without_state() == ["b"]

    state.note_disconnect("a", 1, 5)  # b does not continue from a state that it does not have
    state.vote(sender("b", 3), Vote(epoch=2, step=4, ok=False, has_state=False), 6)
    decision = answers([*state.update(6), *state.vote(sender("b", 3), ballot(2, 4), 6)])["b3"]
    assert isinstance(decision, Decision)
    assert (decision.commit, decision.rejoin) == (False, True)
    assert state.join(sender("b", 4), request(limits=limits), 6) == []
    assert state.reason.startswith("step 3 was committed by groups a, and none of them has joined")

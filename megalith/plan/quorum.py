"""Quorum of replica groups (fault tolerance): which groups train together in an epoch, which steps
are committed, and from which group another one recovers its state.

A two-phase commit per step: every participant of the epoch votes after its gradients are reduced
over the groups, and the step is committed if all of them voted for it. A participant that voted for
a step keeps what it needs to apply the update until it receives the decision. Every discarded step
ends the epoch, so that (epoch, step) names one vote.

`QuorumState` contains the whole state of the coordinator and performs no input or output: its
methods take messages and the time in seconds of any monotonic clock, and return replies. Before it
sends them, the caller stores `to_record()` if `version` has changed, or else the epoch and the
committed step if that has changed; a restarted coordinator continues with `from_record` and
`restore_commit`. These properties hold for any order, loss or delay
of messages and any restart of the coordinator (tests/plan/test_quorum.py):

- a step is committed by all participants of its epoch or by none;
- there are never two epochs in which steps can be committed;
- a committed step is never lost while one of its participants is alive, where alive means that the
  newest process of a group id still runs. A group that does not answer is not assumed to have lost
  its state: a new epoch without a group that has the newest step waits for one.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.errors import ConfigError, PlanError

MAX_EPOCHS = 1000
"""Epochs whose committed steps are known for late votes. Heuristic: a group that missed more
recovers its state from a peer, so their decisions have no effect."""

MAX_MEMBERS = 1024
"""Groups of a run. Heuristic: a bound for untrusted input."""

MAX_DIFFERENCES = 20
"""Differing settings that a message lists. Heuristic: more are not read."""

DISCONNECT_FRACTION = 0.1
"""Part of `timeout_seconds` within which a group whose connection ended may connect again.
Heuristic: the connection of a killed process ends at once, so its loss is detected early. Its
vote is not awaited if another participant has voted against the step and enough groups are left."""


@dataclass(frozen=True, kw_only=True)
class QuorumLimits:
    """Limits of the quorum, equal for all groups of a run."""

    min_groups: int = 1
    """Groups that an epoch needs."""

    max_groups: int | None = None
    """Groups that an epoch may have; others wait as spares. None: no limit."""

    timeout_seconds: float = 60.0
    """Time without a heartbeat after which a group is considered lost, and time that groups wait
    for the vote of the others."""

    max_lag: int = 1
    """Committed steps that a joining group may miss when it is admitted, at least 1, since the
    others commit a step before the next epoch begins. It receives them from `Epoch.recover_from`
    after the start of the epoch."""


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """A period in which the same groups train together, or, if the group that reads it is not one
    of the participants, the source of the state that it has to load before it joins again."""

    number: int
    participants: tuple[str, ...]
    """Sorted group ids; the position is the index in the assignment of samples and all-reduces."""

    step: int
    """Number of committed steps; the participants compute step `step + 1` next."""

    addresses: Mapping[str, tuple[str, ...]]
    """Per group: address of each rank, for the gradient all-reduce."""

    state_addresses: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per group: address of each rank, for the transfer of its state."""

    recover_from: Mapping[str, str] = field(default_factory=dict)
    """Group that has missed committed steps -> group that has them."""

    def has(self, group: str) -> bool:
        """Return whether a group is a participant."""
        return group in self.participants


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Result of the vote about one step."""

    commit: bool
    """Whether the group applies the update; otherwise it discards the step."""

    epoch: Epoch | None = None
    """Next epoch of this group. None: the present one continues, unless `rejoin`."""

    rejoin: bool = False
    """The group is not a participant any more, and calls `join` to continue."""

    reason: str = ""
    """Why the step was discarded or the epoch ended."""


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A request that cannot be executed, for the user of that group."""

    reason: str
    retry: bool = False
    """A retry within `timeout_seconds` may succeed."""


@dataclass(frozen=True, kw_only=True)
class LeaveConfirmation:
    """Confirmation that a group has left."""


Answer = Epoch | Decision | Rejection | LeaveConfirmation


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Sender of a request: a process of a group, and the number of its request."""

    group: str
    incarnation: int
    """Number of the process, from `QuorumState.register`; a later process has a larger one."""

    request: int
    """Increases with every request of the process; a message that is sent again keeps it."""


@dataclass(frozen=True, kw_only=True)
class JoinRequest:
    """Request of a group to train in the next epoch."""

    committed_step: int
    """Steps that the state of the group contains."""

    limits: QuorumLimits
    addresses: tuple[str, ...] = ()
    state_addresses: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that have to be equal in all groups, as text."""


@dataclass(frozen=True, kw_only=True)
class Vote:
    """Vote of a participant about one step."""

    epoch: int
    step: int
    """Number of the step, beginning with 1: the committed steps if this one is committed too."""

    ok: bool
    last: bool = False
    """The group leaves after this step; it repeats a discarded one."""

    has_state: bool = True
    """Whether the group has the state of the step before; otherwise it still recovers that, and its
    vote confirms only that it has received the data of the step. Such a group does not preserve a
    committed step."""


@dataclass(frozen=True, kw_only=True)
class QuorumReply:
    """Answer to one request."""

    to: Sender
    answer: Answer


@dataclass(kw_only=True)
class GroupMember:
    """State of a group that has joined, as known to the coordinator."""

    group: str
    incarnation: int
    committed_step: int
    addresses: tuple[str, ...]
    state_addresses: tuple[str, ...]
    last_seen: float
    last_request: int = 0
    is_connected: bool = True
    disconnected_at: float | None = None
    """Set when a connection has ended; None too after a restart of the coordinator, until the group
    connects again."""

    waiting_since: float | None = None
    """Set while a join request waits for its epoch."""

    is_recovering: bool = False
    """The group loads the state of another one."""

    def is_live(self, now: float, limits: QuorumLimits) -> bool:
        """Return whether the group has sent a heartbeat in time and is connected."""
        timeout = limits.timeout_seconds
        if now - self.last_seen > timeout:
            return False
        ended = self.disconnected_at
        return ended is None or now - ended <= DISCONNECT_FRACTION * timeout

    @property
    def sender(self) -> Sender:
        """Sender of the newest request."""
        return Sender(group=self.group, incarnation=self.incarnation, request=self.last_request)


@dataclass(kw_only=True)
class CommittedRange:
    """Steps that were committed in one epoch."""

    epoch: int
    first: int
    last: int


@dataclass(kw_only=True)
class OpenVote:
    """Votes about the step that the open epoch computes."""

    votes: dict[str, Vote] = field(default_factory=dict)
    requests: dict[str, Sender] = field(default_factory=dict)
    first_at: float | None = None
    """Time of the first vote."""

    @property
    def is_rejected(self) -> bool:
        """Whether some participant could not complete the step."""
        return any(not vote.ok for vote in self.votes.values())


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Groups of a new epoch."""

    participants: tuple[str, ...]
    step: int


@dataclass(frozen=True, kw_only=True)
class NoQuorum:
    """Reason for which no epoch can begin."""

    reason: str


def choose_quorum(
    candidates: Mapping[str, int],
    *,
    known_steps: Mapping[str, int],
    previous: Sequence[str],
    limits: QuorumLimits,
) -> Quorum | NoQuorum:
    """Choose the participants of a new epoch.

    Args:
        candidates: groups that are ready, with the number of steps that their state contains.
        known_steps: groups that are not known to be dead, with the committed steps that their state
            may contain; no epoch begins before the newest of them.
        previous: participants of the last epoch, which precede other groups.

    >>> choose_quorum(
    ...     {"b": 7, "a": 7, "c": 3},
    ...     known_steps={"a": 7, "b": 7},
    ...     previous=["a", "b"],
    ...     limits=QuorumLimits(min_groups=2),
    ... )
    Quorum(participants=('a', 'b'), step=7)
    """
    if not candidates:
        return NoQuorum(reason="no group is ready")
    step = max(candidates.values())
    newest = max(known_steps.values(), default=step)
    if step < newest:
        names = ", ".join(sorted(group for group, has in known_steps.items() if has == newest))
        return NoQuorum(
            reason=f"step {newest} was committed by groups {names}, and none of them has joined "
            f"again; the newest state of the other groups is step {step}"
        )
    current = [group for group, has in candidates.items() if step - has <= limits.max_lag]
    if len(current) < limits.min_groups:
        return NoQuorum(
            reason=f"{len(current)} of at least replica_group.min_groups={limits.min_groups} "
            f"groups are ready at step {step}"
        )
    current.sort(key=lambda group: (candidates[group] != step, group not in previous, group))
    return Quorum(participants=tuple(sorted(current[: limits.max_groups])), step=step)


def assign_sources(
    behind: Iterable[str], sources: Sequence[str], *, offset: int = 0
) -> dict[str, str]:
    """Assign the group from which each group recovers its state, as evenly as possible.

    >>> assign_sources(["c", "d", "e"], ["a", "b"])
    {'c': 'a', 'd': 'b', 'e': 'a'}
    """
    ordered = sorted(sources)
    return {
        group: ordered[(offset + index) % len(ordered)]
        for index, group in enumerate(sorted(behind))
    }


@dataclass(frozen=True)
class MemberState:
    """Committed steps that the state of a process may contain."""

    incarnation: int
    step: int


@dataclass(kw_only=True)
class QuorumState:
    """State of the coordinator."""

    limits: QuorumLimits = field(default_factory=QuorumLimits)
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the groups; those of the first one that joined."""

    members: dict[str, GroupMember] = field(default_factory=dict)
    epoch: Epoch | None = None
    """Newest epoch; `is_open`: whether steps can be committed in it."""

    is_open: bool = False
    admitted: dict[str, Sender] = field(default_factory=dict)
    """Participants of the newest epoch with the request that was answered with it."""

    committed_step: int | None = None
    states: dict[str, MemberState] = field(default_factory=dict)
    """State of each group that was a participant or recovered, and is not known to be dead."""

    history: list[CommittedRange] = field(default_factory=list)
    next_incarnation: int = 1
    version: int = 0
    """Increases with every change, other than a commit, that has to be stored before the replies
    are sent."""

    open_vote: OpenVote = field(default_factory=OpenVote)
    reason: str = "no group is ready"
    """Why no epoch is open, or why the last one ended."""

    num_discarded: int = 0

    # -- requests ------------------------------------------------------------------------------

    def register(self) -> int:
        """Return the number of a new process of a group."""
        number = self.next_incarnation
        self.next_incarnation += 1
        self.version += 1
        return number

    def join(self, sender: Sender, request: JoinRequest, now: float) -> list[QuorumReply]:
        """Handle a join request; its reply follows when the group is admitted or has to recover."""
        member = self.members.get(sender.group)
        if member is not None and sender.incarnation < member.incarnation:
            return [_reject_replaced(sender)]
        if member is not None and self._is_late(member, sender):
            return []
        if rejection := self._check_join(sender, request, member, now):
            return [QuorumReply(to=sender, answer=rejection)]
        if self.is_open and self.admitted.get(sender.group) == sender:
            self._record_message(sender, now)
            return self._reply_epoch([sender])
        self.limits, self.settings = request.limits, dict(request.settings)
        self._reset_state(sender, request.committed_step)
        waiting_since = now
        is_repeated = member is not None and member.last_request == sender.request
        if member is not None and is_repeated and member.waiting_since is not None:
            waiting_since = member.waiting_since
        self.members[sender.group] = GroupMember(
            group=sender.group,
            incarnation=sender.incarnation,
            committed_step=request.committed_step,
            addresses=request.addresses,
            state_addresses=request.state_addresses,
            last_seen=now,
            last_request=sender.request,
            waiting_since=waiting_since,
        )
        self.version += 1
        return self.update(now)

    def vote(self, sender: Sender, vote: Vote, now: float) -> list[QuorumReply]:
        """Handle the vote of a participant; its reply follows when the step is decided."""
        member = self.members.get(sender.group)
        if member is not None and sender.incarnation < member.incarnation:
            return [_reject_replaced(sender)]
        if member is not None and self._is_late(member, sender):
            return []
        self._record_message(sender, now)
        if self._counts_in_open_vote(sender, vote):
            assert member is not None, "a participant is a member"
            step = (self.committed_step or 0) + 1
            if vote.step != step:
                reason = (
                    f"a vote about step {vote.step} in epoch {vote.epoch}, which is at step {step}"
                )
                return [QuorumReply(to=sender, answer=Rejection(reason=reason))]
            member.last_request, member.waiting_since = sender.request, None
            if vote.ok and vote.has_state:  # it has received the steps that it missed
                member.committed_step = step - 1
            self.open_vote.votes[sender.group] = vote
            self.open_vote.requests[sender.group] = sender
            if self.open_vote.first_at is None:
                self.open_vote.first_at = now
            return self.update(now)
        if member is not None and member.incarnation == sender.incarnation:
            member.last_request, member.waiting_since = sender.request, None
        return [QuorumReply(to=sender, answer=self._decide_late(sender, vote))]

    def leave(self, sender: Sender, now: float) -> list[QuorumReply]:
        """Remove a group that ends; its state is not available any more."""
        member = self.members.get(sender.group)
        if member is not None and member.incarnation == sender.incarnation:
            del self.members[sender.group]
            self.version += 1
        state = self.states.get(sender.group)
        if state is not None and state.incarnation == sender.incarnation:
            del self.states[sender.group]
            self.version += 1
        return [QuorumReply(to=sender, answer=LeaveConfirmation()), *self.update(now)]

    def record_heartbeat(self, group: str, incarnation: int, now: float) -> None:
        """Record that a process is alive and connected."""
        self._record_message(Sender(group=group, incarnation=incarnation, request=0), now)

    def record_disconnect(self, group: str, incarnation: int, now: float) -> None:
        """Record that the connection of a process has ended."""
        member = self.members.get(group)
        if member is not None and member.incarnation == incarnation:
            member.is_connected, member.disconnected_at = False, now

    def remove_lost_groups(self, groups: Iterable[str], now: float) -> list[QuorumReply]:
        """Remove groups whose state the user declares lost.

        Raises:
            ConfigError: the newest step does not depend on a group.
        """
        for group in groups:
            if group not in self.states:
                names = ", ".join(self.list_newest()) or "none"
                raise ConfigError(
                    f"--lost-groups={group}: the newest committed step does not depend on this "
                    f"group. It depends on: {names}."
                )
            del self.states[group]
            self.members.pop(group, None)
            self.version += 1
        return self.update(now)

    def list_newest(self) -> list[str]:
        """Return the groups that may have the newest committed step."""
        newest = max((state.step for state in self.states.values()), default=0)
        return sorted(group for group, state in self.states.items() if state.step == newest)

    def list_without_state(self) -> list[str]:
        """Return the participants that do not have the newest committed step."""
        return sorted(
            group
            for group in self.admitted
            if (member := self._find_participant(group)) is None
            or member.committed_step != self.committed_step
        )

    def describe_member(self, group: str, now: float) -> str:
        """Return the state of a group for the status page."""
        member = self.members[group]
        if not member.is_live(now, self.limits):
            return "lost"
        if not member.is_connected:
            return "disconnected"
        if member.waiting_since is not None:
            return "waiting"
        if member.is_recovering:
            return "recovering"
        if self.is_open and self._is_admitted(member.sender):
            return "voted" if group in self.open_vote.votes else "training"
        return "idle"

    # -- decisions -----------------------------------------------------------------------------

    def update(self, now: float) -> list[QuorumReply]:
        """Decide what can be decided at this time; call it after every message and regularly."""
        replies: list[QuorumReply] = []
        if self.is_open:
            replies += self._close_vote(now)
        if not self.is_open and self._can_form_epoch(now):
            replies += self._form_epoch({}, now)
        return replies + self._assign_recovery(now)

    def _close_vote(self, now: float) -> list[QuorumReply]:
        """Commit or discard the step of the open epoch if its votes are complete."""
        votes = self.open_vote.votes
        missing = [group for group in self.admitted if group not in votes]
        if not missing and all(vote.ok for vote in votes.values()):
            return self._commit(now)
        lost = [group for group in missing if not self._may_vote(group, now)]
        if len(lost) < len(missing):
            return []
        failed = sorted(group for group, vote in votes.items() if not vote.ok)
        texts = [f"group {group} did not vote" for group in sorted(lost)]
        texts += [f"group {group} voted against it" for group in failed]
        reason = f"step {(self.committed_step or 0) + 1} was discarded: {', '.join(texts)}"
        self.num_discarded += bool(votes)  # without a vote, the last groups have ended
        return self._close_epoch(commit=False, reason=reason, now=now)

    def _commit(self, now: float) -> list[QuorumReply]:
        """Commit the step of the open epoch, and continue the epoch or begin the next one."""
        votes = self.open_vote.votes
        self._advance([group for group, vote in votes.items() if not vote.has_state])
        if reason := self._describe_membership_change(now):
            return self._close_epoch(commit=True, reason=reason, now=now)
        requests = self.open_vote.requests.values()
        self.open_vote = OpenVote()
        return [QuorumReply(to=sender, answer=Decision(commit=True)) for sender in requests]

    def _advance(self, without_state: Collection[str]) -> None:
        """Increase the committed step by one, as the participants of the open epoch do that have
        the state."""
        assert self.epoch is not None and self.committed_step is not None, "an epoch is open"
        self.committed_step += 1
        for group, sender in self.admitted.items():
            self.states[group] = MemberState(sender.incarnation, self.committed_step)
        if self.history and self.history[-1].epoch == self.epoch.number:
            self.history[-1].last = self.committed_step
        else:
            step = self.committed_step
            self.history.append(CommittedRange(epoch=self.epoch.number, first=step, last=step))
            del self.history[:-MAX_EPOCHS]
        for group in self.admitted:
            member = self._find_participant(group)
            if member is not None and group not in without_state:
                member.committed_step = self.committed_step

    def _describe_membership_change(self, now: float) -> str:
        """Describe why the participants change after a committed step; empty: they do not."""
        ends = sorted(group for group, vote in self.open_vote.votes.items() if vote.last)
        lost = sorted(group for group in self.admitted if not self._is_connected(group, now))
        joining = sorted(self._ready_groups(now))
        assert self.epoch is not None and self.committed_step is not None, "an epoch is open"
        limit = self.limits.max_groups
        if limit is not None and len(self.admitted) - len({*ends, *lost}) >= limit:
            joining = []
        lag = self.limits.max_lag
        joining = [
            g for g in joining if self.committed_step - self.members[g].committed_step <= lag
        ]
        texts = [f"group {group} leaves" for group in ends]
        texts += [f"group {group} is lost" for group in lost if group not in ends]
        texts += [f"group {group} joins" for group in joining]
        return ", ".join(texts)

    def _close_epoch(self, *, commit: bool, reason: str, now: float) -> list[QuorumReply]:
        """End the open epoch and begin the next one if there is a quorum of voters and joining
        groups; other voters have to join again."""
        votes, requests = self.open_vote.votes, dict(self.open_vote.requests)
        self.is_open, self.open_vote, self.reason = False, OpenVote(), reason
        self.version += 1
        voters: dict[str, Sender] = {}
        for group, sender in requests.items():
            if votes[group].last and commit:  # else it repeats the step
                self.members.pop(group, None)
            elif self._is_connected(group, now):
                voters[group] = sender
        replies = self._form_epoch(voters, now)
        epoch = self.epoch if self.is_open else None
        for group, sender in requests.items():
            next_epoch = epoch if epoch is not None and self.admitted.get(group) == sender else None
            decision = Decision(
                commit=commit, epoch=next_epoch, rejoin=next_epoch is None, reason=reason
            )
            replies.append(QuorumReply(to=sender, answer=decision))
        return replies

    def _form_epoch(self, voters: Mapping[str, Sender], now: float) -> list[QuorumReply]:
        """Begin an epoch with voters of the last one and groups whose join request waits; return
        the replies to the join requests of its participants."""
        senders = dict(voters)
        senders |= {group: self.members[group].sender for group in self._ready_groups(now)}
        candidates = {group: self.members[group].committed_step for group in senders}
        known_steps = {group: state.step for group, state in self.states.items()}
        newest = max([*known_steps.values(), *candidates.values()], default=0)
        if candidates and newest != self.committed_step:
            self.committed_step = newest  # smaller if all groups that had the last steps are dead
            self.version += 1
        quorum = choose_quorum(
            candidates,
            known_steps=known_steps,
            previous=() if self.epoch is None else self.epoch.participants,
            limits=self.limits,
        )
        if isinstance(quorum, NoQuorum):
            self.reason = quorum.reason
            return []
        for group in quorum.participants:
            self.states[group] = MemberState(self.members[group].incarnation, quorum.step)
        self.admitted = {group: senders[group] for group in quorum.participants}
        sources = [group for group in quorum.participants if candidates[group] == quorum.step]
        behind = [group for group in quorum.participants if candidates[group] < quorum.step]
        self.epoch = Epoch(
            number=1 if self.epoch is None else self.epoch.number + 1,
            participants=quorum.participants,
            step=quorum.step,
            addresses={group: self.members[group].addresses for group in quorum.participants},
            state_addresses={
                group: self.members[group].state_addresses for group in quorum.participants
            },
            recover_from=assign_sources(behind, sources),
        )
        self.is_open, self.open_vote, self.reason = True, OpenVote(), ""
        self.version += 1
        for group in quorum.participants:
            member = self.members[group]
            member.waiting_since, member.is_recovering = None, False
        joined = [senders[group] for group in quorum.participants if group not in voters]
        return self._reply_epoch(joined)

    def _can_form_epoch(self, now: float) -> bool:
        """Return whether an epoch may begin without waiting for more groups: all that are expected
        are ready, or the first one has waited for `timeout_seconds`."""
        ready = self._ready_groups(now)
        since = [self.members[group].waiting_since for group in ready]
        waited = max((now - start for start in since if start is not None), default=math.inf)
        if waited >= self.limits.timeout_seconds:
            return True
        if self.limits.max_groups is not None and len(ready) >= self.limits.max_groups:
            return True
        if not any(self._is_admitted(self.members[group].sender) for group in ready):
            return False  # a start, or a restart of all groups: others are starting too
        return not any(
            member.is_live(now, self.limits) and not member.is_recovering
            for group, member in self.members.items()
            if group not in ready
        )

    def _assign_recovery(self, now: float) -> list[QuorumReply]:
        """Answer the waiting groups that miss too many steps with a source of the newest state."""
        limit = self.limits.max_groups
        is_full = self.is_open and limit is not None and len(self.admitted) >= limit
        if self.committed_step is None or is_full:
            return []
        step = self.committed_step
        ready = self._ready_groups(now)
        behind = [g for g in ready if step - self.members[g].committed_step > self.limits.max_lag]
        sources = [
            group
            for group, member in self.members.items()
            if member.committed_step == step and member.is_live(now, self.limits)
        ]
        if not behind or not sources:
            return []
        replies = []
        busy = sum(member.is_recovering for member in self.members.values())
        for group, source in assign_sources(behind, sources, offset=busy).items():
            member = self.members[group]
            member.waiting_since, member.is_recovering = None, True
            self.states[group] = MemberState(member.incarnation, step)
            self.version += 1
            participants = self.epoch.participants if self.epoch and self.is_open else ()
            answer = Epoch(
                number=0 if self.epoch is None else self.epoch.number,
                participants=tuple(name for name in participants if name != group),
                step=step,
                addresses={source: self.members[source].addresses},
                state_addresses={source: self.members[source].state_addresses},
                recover_from={group: source},
            )
            replies.append(QuorumReply(to=member.sender, answer=answer))
        return replies

    def _decide_late(self, sender: Sender, vote: Vote) -> Decision:
        """Return the decision about a step that is not the one of the open epoch."""
        commit = any(
            entry.epoch == vote.epoch and entry.first <= vote.step <= entry.last
            for entry in self.history
        )
        if self.epoch is not None and self.is_open:
            if self.admitted.get(sender.group) == sender:
                return Decision(commit=commit, epoch=self.epoch)
            is_participant = self._is_admitted(sender) and self.epoch.number == vote.epoch
            if commit and is_participant:
                return Decision(commit=True)
        reason = "" if commit else f"epoch {vote.epoch} ended without a commit of step {vote.step}"
        return Decision(commit=commit, rejoin=True, reason=reason)

    # -- conditions ----------------------------------------------------------------------------

    def _check_join(
        self, sender: Sender, request: JoinRequest, member: GroupMember | None, now: float
    ) -> Rejection | None:
        """Return why a group cannot join; None: it can."""
        if member is not None and self._is_other_process(member, sender, now):
            return Rejection(
                reason=f"replica_group.id={sender.group} is already used by a connected group. Use "
                "another id, or stop that group.",
                retry=True,
            )
        if len(self.members) >= MAX_MEMBERS and member is None:
            self._remove_lost_members(now)
            if len(self.members) >= MAX_MEMBERS:
                return Rejection(reason=f"{MAX_MEMBERS} groups have joined; there cannot be more.")
        if reason := self._compare_settings(sender, request, now):
            return Rejection(reason=reason)
        if self.is_open and request.committed_step > (self.committed_step or 0):
            return Rejection(
                reason=f"group {sender.group} has state of step {request.committed_step}, but the "
                f"groups that train are at step {self.committed_step}. Let it load the checkpoint "
                "of this run, or give the other run a coordinator of its own."
            )
        return None

    def _is_other_process(self, member: GroupMember, sender: Sender, now: float) -> bool:
        """Return whether a connected process uses the id of a group that another one joins."""
        is_connected = member.is_live(now, self.limits) and member.is_connected
        return is_connected and member.incarnation != sender.incarnation

    def _compare_settings(self, sender: Sender, request: JoinRequest, now: float) -> str:
        """Return how the settings of a group differ from those of the others that are live."""
        others = [
            group
            for group, member in self.members.items()
            if group != sender.group and member.is_live(now, self.limits)
        ]
        if not others or (request.limits, request.settings) == (self.limits, self.settings):
            return ""
        expected = self.settings | _limits_as_settings(self.limits)
        joining = dict(request.settings) | _limits_as_settings(request.limits)
        names = sorted(
            name for name in {*expected, *joining} if expected.get(name) != joining.get(name)
        )
        if not names:
            return ""
        texts = [
            f"  {name}: {joining.get(name, 'unset')} here, "
            f"{expected.get(name, 'unset')} in the others"
            for name in names[:MAX_DIFFERENCES]
        ]
        if len(names) > MAX_DIFFERENCES:
            texts.append(f"  and {len(names) - MAX_DIFFERENCES} more")
        return (
            f"group {sender.group} has settings that differ from the connected groups "
            f"({', '.join(sorted(others)[:MAX_DIFFERENCES])}). Use the same values:\n"
            + "\n".join(texts)
        )

    def _reset_state(self, sender: Sender, committed_step: int) -> None:
        """Reset the recorded state of a group that joins: the state of a previous process is lost,
        a new process has that of a checkpoint, and an undecided vote is withdrawn."""
        state = self.states.pop(sender.group, None)
        if state is not None and state.incarnation == sender.incarnation:
            self.states[sender.group] = MemberState(sender.incarnation, committed_step)
        self.open_vote.votes.pop(sender.group, None)
        self.open_vote.requests.pop(sender.group, None)

    def _remove_lost_members(self, now: float) -> None:
        """Remove the groups that are not live, unless their state may be needed."""
        for group, member in list(self.members.items()):
            is_needed = group in self.states or (self.is_open and group in self.admitted)
            if not is_needed and not member.is_live(now, self.limits):
                del self.members[group]

    def _is_late(self, member: GroupMember, sender: Sender) -> bool:
        """Return whether a message is older than one that the same process sent later."""
        return sender.incarnation == member.incarnation and sender.request < member.last_request

    def _counts_in_open_vote(self, sender: Sender, vote: Vote) -> bool:
        """Return whether a vote is about the step of the open epoch, or about a later one, which is
        an error."""
        if not self.is_open or self.epoch is None or self.epoch.number != vote.epoch:
            return False
        member = self._find_participant(sender.group)
        return (
            self._is_admitted(sender)
            and member is not None
            and vote.step > (self.committed_step or 0)
        )

    def _is_admitted(self, sender: Sender) -> bool:
        """Return whether a process is a participant of the newest epoch."""
        admitted = self.admitted.get(sender.group)
        return admitted is not None and admitted.incarnation == sender.incarnation

    def _find_participant(self, group: str) -> GroupMember | None:
        """Return a participant of the newest epoch, unless its process was replaced or left."""
        member = self.members.get(group)
        if member is None or member.incarnation != self.admitted[group].incarnation:
            return None
        return member

    def _is_connected(self, group: str, now: float) -> bool:
        """Return whether the process of a participant is live."""
        member = self._find_participant(group)
        return member is not None and member.is_live(now, self.limits)

    def _may_vote(self, group: str, now: float) -> bool:
        """Return whether the vote of a participant can be waited for."""
        first_at = self.open_vote.first_at
        if first_at is not None and now - first_at > self.limits.timeout_seconds:
            return False
        member = self._find_participant(group)
        if member is None or member.waiting_since is not None:
            return False  # it has joined again instead of voting
        if member.disconnected_at is not None and self._can_exclude_disconnected(now):
            return False  # its connections to the coordinator and to another group have ended
        return member.is_live(now, self.limits)

    def _can_exclude_disconnected(self, now: float) -> bool:
        """Return whether participants whose connections have ended are excluded at once: the step
        is rejected, and the next epoch can begin without them. If it cannot, the others would wait
        anyway, and would have to join without the gradients that they keep."""
        connected = {
            group
            for group in self.admitted
            if (member := self._find_participant(group)) and member.disconnected_at is None
        }
        groups = connected | {*self._ready_groups(now)}
        return self.open_vote.is_rejected and len(groups) >= self.limits.min_groups

    def _ready_groups(self, now: float) -> list[str]:
        """Return the connected groups whose join request waits."""
        return [
            group
            for group, member in self.members.items()
            if member.waiting_since is not None and member.is_live(now, self.limits)
        ]

    def _record_message(self, sender: Sender, now: float) -> None:
        member = self.members.get(sender.group)
        if member is not None and member.incarnation == sender.incarnation:
            member.last_seen = now
            member.is_connected, member.disconnected_at = True, None

    def _reply_epoch(self, senders: Iterable[Sender]) -> list[QuorumReply]:
        assert self.epoch is not None, "an epoch is open"
        return [QuorumReply(to=sender, answer=self.epoch) for sender in senders]

    # -- record --------------------------------------------------------------------------------

    def to_record(self) -> dict[str, Any]:  # Any: JSON
        """Return what a restarted coordinator needs, as a JSON document."""
        return {
            "limits": dict(vars(self.limits)),
            "settings": dict(self.settings),
            "members": [
                {
                    "group": member.group,
                    "incarnation": member.incarnation,
                    "committed_step": member.committed_step,
                    "addresses": list(member.addresses),
                    "state_addresses": list(member.state_addresses),
                    "last_request": member.last_request,
                }
                for member in self.members.values()
            ],
            "epoch": None if self.epoch is None else epoch_to_record(self.epoch),
            "is_open": self.is_open,
            "admitted": [dict(vars(sender)) for sender in self.admitted.values()],
            "committed_step": self.committed_step,
            "states": {g: [state.incarnation, state.step] for g, state in self.states.items()},
            "history": [[entry.epoch, entry.first, entry.last] for entry in self.history],
            "next_incarnation": self.next_incarnation,
            "reason": self.reason,
            "num_discarded": self.num_discarded,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], now: float) -> "QuorumState":  # Any: JSON
        """Return the state of a restarted coordinator; its groups have `timeout_seconds` to
        connect again.

        Raises:
            PlanError: the record is damaged.
        """
        try:
            members = [
                GroupMember(
                    group=str(entry["group"]),
                    incarnation=int(entry["incarnation"]),
                    committed_step=int(entry["committed_step"]),
                    addresses=tuple(map(str, entry["addresses"])),
                    state_addresses=tuple(map(str, entry["state_addresses"])),
                    last_seen=now,
                    last_request=int(entry["last_request"]),
                    is_connected=False,
                )
                for entry in record["members"]
            ]
            senders = [Sender(**entry) for entry in record["admitted"]]
            step = record["committed_step"]
            return cls(
                limits=QuorumLimits(**record["limits"]),
                settings={str(name): str(text) for name, text in record["settings"].items()},
                members={member.group: member for member in members},
                epoch=None if record["epoch"] is None else epoch_from_record(record["epoch"]),
                is_open=bool(record["is_open"]),
                admitted={sender.group: sender for sender in senders},
                committed_step=None if step is None else int(step),
                states={
                    str(group): MemberState(int(incarnation), int(has))
                    for group, (incarnation, has) in record["states"].items()
                },
                history=[
                    CommittedRange(epoch=int(epoch), first=int(first), last=int(last))
                    for epoch, first, last in record["history"]
                ],
                next_incarnation=int(record["next_incarnation"]),
                reason=str(record["reason"]),
                num_discarded=int(record["num_discarded"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"the state of the coordinator is damaged: {error!r}.") from None

    def restore_commit(self, epoch: int, step: int, without_state: Collection[str] = ()) -> None:
        """Apply a commit that was stored after the record.

        Raises:
            PlanError: the step does not follow the committed step of the open epoch.
        """
        number = None if self.epoch is None or not self.is_open else self.epoch.number
        if number != epoch or step != (self.committed_step or 0) + 1:
            raise PlanError(
                f"the state of the coordinator is damaged: a commit of step {step} in epoch "
                f"{epoch} follows step {self.committed_step} in epoch {number}."
            )
        self._advance(without_state)


def _limits_as_settings(limits: QuorumLimits) -> dict[str, str]:
    return {f"replica_group.{name}": str(value) for name, value in vars(limits).items()}


def _reject_replaced(sender: Sender) -> QuorumReply:
    """Return the reply to a process of a group that a newer process has replaced."""
    reason = f"another process has joined with replica_group.id={sender.group}. Use another id."
    return QuorumReply(to=sender, answer=Rejection(reason=reason))


def epoch_to_record(epoch: Epoch) -> dict[str, Any]:  # Any: JSON
    """Return an epoch as a JSON document."""
    return {
        "number": epoch.number,
        "participants": list(epoch.participants),
        "step": epoch.step,
        "addresses": {group: list(texts) for group, texts in epoch.addresses.items()},
        "state_addresses": {group: list(texts) for group, texts in epoch.state_addresses.items()},
        "recover_from": dict(epoch.recover_from),
    }


def epoch_from_record(record: Mapping[str, Any]) -> Epoch:  # Any: JSON
    """Return the epoch of a JSON document.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is not one.
    """
    return Epoch(
        number=int(record["number"]),
        participants=tuple(map(str, record["participants"])),
        step=int(record["step"]),
        addresses={str(g): tuple(map(str, a)) for g, a in record["addresses"].items()},
        state_addresses={str(g): tuple(map(str, a)) for g, a in record["state_addresses"].items()},
        recover_from={str(g): str(source) for g, source in record["recover_from"].items()},
    )

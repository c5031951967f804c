"""Rules of the quorum of replica groups, one by one."""

import json

import pytest

from megalith.errors import ConfigError, PlanError
from megalith.plan import quorum
from megalith.plan.quorum import (
    Answer,
    Decision,
    Epoch,
    JoinRequest,
    LeaveConfirmation,
    QuorumLimits,
    QuorumReply,
    QuorumState,
    Rejection,
    Sender,
    Vote,
)

TIMEOUT = 5.0


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
        state.record_heartbeat(name, ord(name) - 96, now + limits.timeout_seconds)
    assert state.is_open and state.epoch is not None
    assert state.epoch.participants == tuple(names)
    return state


def test_first_epoch_waits_for_more_groups_until_the_timeout() -> None:
    state = QuorumState()
    for _ in range(3):
        state.register()
    assert state.join(sender("a", 1), request(), 0) == []
    assert state.join(sender("b", 1), request(), 1) == []
    state.record_heartbeat("a", 1, 4)
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
            state.record_heartbeat(name, ord(name) - 96, now)
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
    state.record_disconnect("c", 3, 5)
    for name in "ab":
        assert state.vote(sender(name, 2), ballot(1, 1), 5.1) == []
    assert list(answers(state.update(5.4))) == []
    assert list(answers(state.update(5.6))) == ["a2", "b2"]


def test_rejected_step_does_not_wait_for_groups_whose_connections_have_ended() -> None:
    state = start_groups("abc", BOTH)
    state.record_disconnect("c", 3, 5)
    assert state.vote(sender("a", 2), ballot(1, 1, ok=False), 5.01) == []  # b has not voted
    decisions = answers(state.vote(sender("b", 2), ballot(1, 1, ok=False), 5.02))
    assert list(decisions) == ["a2", "b2"]
    for decision in decisions.values():
        assert isinstance(decision, Decision) and decision.epoch is not None
        assert (decision.commit, decision.epoch.participants) == (False, ("a", "b"))
    assert state.join(sender("c", 2), request(), 5.05) == []  # it is alive and joins again
    for name in "ab":
        answer = answers(state.vote(sender(name, 3), ballot(2, 1), 5.1))
    joined = answer["b3"]
    assert isinstance(joined, Decision) and joined.epoch is not None
    assert joined.epoch.participants == ("a", "b", "c")


def test_rejected_step_waits_for_a_group_without_which_no_epoch_can_begin() -> None:
    state = start_groups("ab", BOTH)
    state.record_disconnect("b", 2, 5)
    assert state.vote(sender("a", 2), ballot(1, 1, ok=False), 5.01) == []
    answer = answers(state.join(sender("b", 1, incarnation=8), request(), 5.3))["a2"]
    assert isinstance(answer, Decision) and answer.epoch is not None
    assert answer.epoch.participants == ("a", "b")  # a keeps its gradients


def test_groups_that_are_lost_together_are_awaited_if_too_few_are_left() -> None:
    state = start_groups("abc", BOTH)
    for name in "bc":
        state.record_disconnect(name, ord(name) - 96, 5)
    assert state.vote(sender("a", 2), ballot(1, 1, ok=False), 5.01) == []
    assert state.join(sender("b", 1, incarnation=8), request(), 5.2) != []


def test_group_that_leaves_after_a_step_repeats_it_if_it_is_discarded() -> None:
    state = start_groups("ab", BOTH)
    assert state.vote(sender("a", 2), ballot(1, 1, last=True), 5.1) == []
    decision = answers(state.vote(sender("b", 2), ballot(1, 1, ok=False), 5.2))["a2"]
    assert isinstance(decision, Decision) and decision.epoch is not None
    assert (decision.commit, decision.epoch.participants) == (False, ("a", "b"))


def test_no_group_continues_alone_below_min_groups() -> None:
    state = start_groups("ab", BOTH)
    state.record_disconnect("b", 2, 5)
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
    state.record_disconnect("a", 1, 5)
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
    assert answers(state.leave(sender("c", 3), 5)) == {"c3": LeaveConfirmation()}
    assert state.list_newest() == ["a", "b"]


def test_spare_group_replaces_a_lost_one() -> None:
    limits = QuorumLimits(min_groups=1, max_groups=2, timeout_seconds=TIMEOUT)
    state = start_groups("ab", limits)
    assert state.join(sender("c", 1), request(limits=limits), 5) == []
    for step in (1, 2, 3):  # it waits, although it misses steps
        state.vote(sender("a", 1 + step), ballot(1, step), 5)
        replies = answers(state.vote(sender("b", 1 + step), ballot(1, step), 5))
        assert replies == {f"{name}{1 + step}": Decision(commit=True) for name in "ab"}
    state.record_disconnect("b", 2, 5)
    replies = answers([*state.vote(sender("a", 5), ballot(1, 4, ok=False), 6), *state.update(6)])
    recovery = replies["c1"]
    assert isinstance(recovery, Epoch)
    assert recovery.recover_from == {"c": "a"} and not recovery.has("c")


def test_groups_wait_for_the_newest_step_until_its_state_is_declared_lost() -> None:
    limits = QuorumLimits(min_groups=1, timeout_seconds=TIMEOUT)
    state = start_groups("ab", limits)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    state = QuorumState.from_record(state.to_record(), 100)
    assert state.join(sender("c", 1), request(limits=limits), 100) == []
    state.record_heartbeat("c", 3, 111)
    assert state.update(111) == []  # closes the epoch of the lost groups
    assert state.reason == (
        "step 1 was committed by groups a, b, and none of them has joined again; the newest state "
        "of the other groups is step 0"
    )
    with pytest.raises(ConfigError) as error:
        state.remove_lost_groups(["c"], 111)
    assert str(error.value) == (
        "--lost-groups=c: the newest committed step does not depend on this group. "
        "It depends on: a, b."
    )
    assert state.remove_lost_groups(["a"], 111) == []
    replies = answers(state.remove_lost_groups(["b"], 111))
    assert isinstance(replies["c1"], Epoch)
    assert replies["c1"].step == 0


def test_restarted_groups_continue_from_their_newest_checkpoint() -> None:
    state = start_groups("ab", BOTH)
    for name in "ab":
        state.vote(sender(name, 2), ballot(1, 1), 5)
    for name in "ab":
        state.record_disconnect(name, ord(name) - 96, 6)
    state.update(20)
    assert state.join(sender("a", 1, incarnation=7), request(0), 20) == []
    assert state.join(sender("b", 1, incarnation=8), request(0), 20) == []
    state.record_heartbeat("a", 7, 25)
    state.record_heartbeat("b", 8, 25)
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
    state.record_heartbeat("a", 1, 9)
    assert list(answers(state.update(10.1))) == ["a3"]  # without b, which does not answer
    state.vote(sender("a", 4), ballot(2, 2), 10.1)
    assert (state.committed_step, state.list_newest()) == (2, ["a"])
    state.record_disconnect("a", 1, 10.1)
    state.update(16)
    assert state.join(sender("a", 1, incarnation=7), request(limits=limits), 16) == []
    state.record_heartbeat("a", 7, 21)
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

    state.record_disconnect("a", 1, 5)  # b does not continue from a state that it does not have
    state.vote(sender("b", 3), Vote(epoch=2, step=4, ok=False, has_state=False), 6)
    decision = answers([*state.update(6), *state.vote(sender("b", 3), ballot(2, 4), 6)])["b3"]
    assert isinstance(decision, Decision)
    assert (decision.commit, decision.rejoin) == (False, True)
    assert state.join(sender("b", 4), request(limits=limits), 6) == []
    assert state.reason.startswith("step 3 was committed by groups a, and none of them has joined")

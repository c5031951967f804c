"""Faults between stages change what goes over a border, and in the direction that they are for."""

from types import SimpleNamespace

import pytest
import torch

from megalith.parallel.p2p import StageMessage, Tensors
from megalith.testing.inject import patched
from megalith.verify.faults import pipeline
from megalith.verify.faults.pipeline import (
    depths_in_other_order,
    gradient_of_memory_stays,
    never_added,
    other_microbatch,
    skip_middle_replica,
    stale_memory,
    watched_inputs,
)

DispatchedTokens = list[tuple[StageMessage, Tensors]]
ONWARD, BACK = StageMessage("forward", 1, 0), StageMessage("backward", 0, 0)


@pytest.fixture
def link() -> SimpleNamespace:
    return SimpleNamespace(num_microbatches=3)


def sent(
    fault: object, link: SimpleNamespace, messages: list[tuple[StageMessage, Tensors]]
) -> DispatchedTokens:
    """What would have gone over the border."""
    found: DispatchedTokens = []
    with patched(
        pipeline,
        "ORIGINAL_SEND",
        lambda _, message, tensors, target: found.append((message, tensors)),
    ):
        for message, tensors in messages:
            fault(link, message, tensors, 1)  # type: ignore[operator]  # one of the functions
    return found


def test_neighboring_microbatches_change_places_onward_and_a_last_one_alone_does_not(
    link: SimpleNamespace,
) -> None:
    messages = [(ONWARD._replace(microbatch=m), ()) for m in range(3)] + [(BACK, ())]
    assert [one.microbatch for one, _ in sent(other_microbatch, link, messages)] == [1, 0, 2, 0]


def test_of_what_goes_back_the_first_tensor_alone_says_something(link: SimpleNamespace) -> None:
    both = torch.ones(2), torch.ones(2)
    (_, back), (_, onward) = sent(gradient_of_memory_stays, link, [(BACK, both), (ONWARD, both)])
    assert back[0] is both[0] and not back[1].any() and onward is both


def test_a_memory_comes_one_microbatch_late(link: SimpleNamespace) -> None:
    first, second = ((torch.full((1,), 2.0 * m), torch.full((1,), 2.0 * m + 1)) for m in range(2))
    messages = [(ONWARD, first), (BACK, second), (ONWARD._replace(microbatch=1), second)]
    assert [[float(x) for x in tensors] for _, tensors in sent(stale_memory(), link, messages)] == [
        [0, 1],
        [2, 3],
        [2, 1],
    ]


def test_weights_that_wait_are_forgotten() -> None:
    deferred = SimpleNamespace(_deferred={0: [1], 1: [2]})
    never_added(deferred, 0)  # type: ignore[arg-type]  # has what is read
    assert deferred._deferred == {1: [2]}


def test_middle_of_three_replicas_is_not_summed() -> None:
    found: list[list[int]] = []
    with patched(pipeline, "ORIGINAL_SUM", lambda x, group, members: found.append(members)):
        for rank in (0, 2, 3):
            skip_middle_replica(torch.ones(1), SimpleNamespace(rank=rank), (0, 2, 3))  # type: ignore[arg-type]  # has what is read
    assert found == [[0, 3], [2], [0, 3]]


def test_what_depths_hand_onward_changes_places(link: SimpleNamespace) -> None:
    states = tuple(torch.full((1,), float(number)) for number in range(3))
    onward, back = sent(depths_in_other_order, link, [(ONWARD, states), (BACK, states)])
    assert [float(x) for x in onward[1]] == [0, 2, 1] and [float(x) for x in back[1]] == [0, 1, 2]


def test_what_norms_read_is_noted_only_while_watched() -> None:
    norm, seen = torch.nn.LayerNorm(3), list[torch.Tensor]()
    with watched_inputs(norm, seen):
        norm(x := torch.randn(2, 3))
    norm(torch.randn(2, 3))
    assert len(seen) == 1 and seen[0] is x

"""Messages: every one has its own number, keeps its shape, and may be taken in any order on
gloo."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.errors import DataError, RankError
from megalith.parallel import p2p
from megalith.parallel.group import Group, single_rank_group, start_receive, start_send
from megalith.parallel.p2p import (
    PendingReceive,
    Spec,
    StageLink,
    StageMessage,
    _build_header,
    _parse_header,
    create_pipeline_groups,
    open_channels,
    tensor_specs,
)
from megalith.plan.schedule import build_schedule, channels
from megalith.testing.ranks import run_ranks, world_group

CPU = torch.device("cpu")


def test_every_message_of_a_step_has_its_own_tag() -> None:
    messages = [
        StageMessage(direction, stage, microbatch)
        for direction, stage, microbatch in itertools.product(
            ("forward", "backward"), range(6), range(7)
        )
    ]
    tags = [message.tag(7) for message in messages]
    assert len(set(tags)) == len(tags) and min(tags) >= 0


@pytest.mark.parametrize(
    "tensors",
    [
        (),
        (torch.zeros(3, 4),),
        (torch.zeros((), dtype=torch.bfloat16), torch.zeros(2, 0, 5, dtype=torch.bool)),
    ],
    ids=lambda tensors: f"{len(tensors)} tensors",
)
def test_header_encodes_shapes_and_dtypes(tensors: tuple[Tensor, ...]) -> None:
    assert _parse_header(_build_header(tensor_specs(tensors))) == tensor_specs(tensors)


def test_spec_is_printed_as_dtype_and_shape() -> None:
    assert str(Spec((2, 3), torch.bfloat16)) == "bfloat16 [2, 3]"


def test_one_rank_needs_no_process_group() -> None:
    assert create_pipeline_groups(single_rank_group("pp"), tags=True) is None


def _any_order(rank: int, world: int, announce: bool) -> list[float]:
    handles = create_pipeline_groups(world_group(rank, world, "pp"), tags=True)
    messages = [StageMessage("forward", 1, microbatch) for microbatch in range(4)]
    with StageLink(handles, num_microbatches=4, announce=announce, device=CPU) as p2p:
        if rank == 0:
            for message in messages:
                p2p.send(message, (torch.full((3,), float(message.microbatch)), torch.zeros(2)), 1)
            return []
        specs = (Spec((3,), torch.float32), Spec((2,), torch.float32))
        posted = [p2p.post(message, specs, 0) for message in reversed(messages)]
        return [float(receive.wait()[0][2]) for receive in posted]


@pytest.mark.parametrize("announce", [False, True])
def test_messages_may_be_received_out_of_order(announce: bool) -> None:
    assert run_ranks(_any_order, 2, announce)[1] == [3.0, 2.0, 1.0, 0.0]


def _both_at_once(rank: int, world: int) -> bool:
    """Both ranks send much before either receives, in both directions."""
    handles = create_pipeline_groups(world_group(rank, world, "pp"), tags=False)
    other, data = 1 - rank, torch.full((1 << 20,), float(rank))
    ways = ("forward", "backward") if rank == 0 else ("backward", "forward")
    with StageLink(handles, num_microbatches=1, announce=False, device=CPU) as p2p:
        for way in ways:
            p2p.send(StageMessage(way, other, 0), (data,), other)
        results = [
            p2p.post(StageMessage(way, rank, 0), tensor_specs([data]), other).wait()
            for way in reversed(ways)
        ]
    return all(bool((x == other).all()) for (x,) in results)


def test_two_ranks_that_send_to_each_other_at_once_do_not_block() -> None:
    assert run_ranks(_both_at_once, 2) == [True, True]


def _opened(rank: int, world: int) -> list[tuple[str, int]]:
    """(what, with whom) of a rank, in order."""
    handles = create_pipeline_groups(world_group(rank, world, "pp"), tags=False)
    assert handles is not None
    seen: list[tuple[str, int]] = []

    def noting(name: str, start: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        def started(x: Tensor, group: Group, peer: int, **others: Any) -> dist.Work:
            seen.append((name, peer))
            return start(x, group, peer, **others)

        return started

    with (
        patch.object(p2p, "start_send", noting("to", start_send)),
        patch.object(p2p, "start_receive", noting("from", start_receive)),
    ):
        schedule = build_schedule("zb-v", num_ranks=world, num_chunks=2, num_microbatches=1)
        open_channels(handles, channels(schedule), CPU)
    return seen


def test_every_channel_is_opened_before_the_first_step_and_both_ends_keep_one_order() -> None:
    """In a V ranks 0 and 1 have four channels, two each way."""
    first, middle, last = run_ranks(_opened, 3)
    assert Counter(first) == Counter({("to", 1): 2, ("from", 1): 2})
    assert Counter(last) == Counter({("to", 1): 2, ("from", 1): 2})
    for rank, seen in ((0, first), (2, last)):
        turned = {"to": "from", "from": "to"}
        assert [turned[what] for what, peer in middle if peer == rank] == [what for what, _ in seen]


def _dies_while_sending(rank: int, world: int) -> None:
    handles = create_pipeline_groups(world_group(rank, world, "pp"), tags=True)
    with StageLink(handles, num_microbatches=1, announce=False, device=CPU) as p2p:
        if rank == 0:
            p2p.send(StageMessage("forward", 1, 0), (torch.zeros(1 << 22),), 1)
        else:
            raise RuntimeError("rank 1 gives up")


def test_send_to_a_killed_rank_raises_an_error() -> None:
    with pytest.raises(RankError, match="rank 1 gives up"):
        run_ranks(_dies_while_sending, 2)


def _posted(*expected: Spec) -> PendingReceive:
    """A receive of the forward message of microbatch 4 to stage 2, from pipeline rank 1; nothing
    travels."""
    nobody: Any = None
    return PendingReceive(
        StageMessage("forward", 2, 4),
        1,
        single_rank_group("pp"),
        nobody,
        tag=0,
        specs=expected,
        device=CPU,
    )


def test_unexpected_shapes_are_rejected_with_both_specs() -> None:
    expected_spec = Spec((3, 5), torch.bfloat16)
    _posted(expected_spec)._compare((expected_spec,))
    with pytest.raises(DataError) as caught:
        _posted(expected_spec)._compare((Spec((4, 5), torch.bfloat16), Spec((), torch.int64)))
    assert str(caught.value) == (
        "pipeline rank 1 sends bfloat16 [4, 5], int64 [] forward to stage 2 for microbatch 4, but "
        "bfloat16 [3, 5] was expected: the stages read different rows. Use the same "
        "data and settings on every rank."
    )
    with pytest.raises(
        DataError, match=r"sends nothing forward to stage 2 .* but bfloat16 \[3, 5\] was expected"
    ):
        _posted(expected_spec)._compare(())

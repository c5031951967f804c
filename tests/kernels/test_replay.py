"""Expert choices are recorded by layer and microbatch, and replayed for the same tokens only."""

import pytest
import torch

from megalith.errors import DataError
from megalith.kernels.layer_inputs import MicrobatchRouting, RoutingRecord

CHOSEN = torch.tensor([[0, 2], [1, 0], [2, 1]])


def test_recorded_choices_are_replayed_by_layer_and_microbatch() -> None:
    routing = RoutingRecord()
    for microbatch in (0, 1):
        MicrobatchRouting(routing, microbatch).record("layers.3", CHOSEN + microbatch)
    MicrobatchRouting(routing, 0).record("mtp.0.layer", CHOSEN + 5)
    again = routing.for_replay()
    assert again.followed and not routing.followed
    assert torch.equal(MicrobatchRouting(again, 1).recall("layers.3", (3, 2)), CHOSEN + 1)
    assert torch.equal(MicrobatchRouting(again, 0).recall("mtp.0.layer", (3, 2)), CHOSEN + 5)


def test_missing_choices_are_reported() -> None:
    routing = RoutingRecord({("layers.3", 0): CHOSEN}, followed=True)
    with pytest.raises(
        DataError,
        match=r"^microbatch 2: no choices of layers.3 to replay \(recorded: \[0\]\). Rec",
    ):
        MicrobatchRouting(routing, 2).recall("layers.3", (3, 2))
    with pytest.raises(DataError, match=r"no choices of layers.4 to replay \(recorded: none\)"):
        MicrobatchRouting(routing, 0).recall("layers.4", (3, 2))
    with pytest.raises(
        DataError,
        match=r"choices of layers.3 are \[3, 2\], expected \[4, 2\]. Use the microbatches",
    ):
        MicrobatchRouting(routing, 0).recall("layers.3", (4, 2))

"""Weight updates of the loop of an engine process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import CheckpointError
from megalith.hf.folder import Weights
from megalith.infer.refit import WeightUpdater
from megalith.serve.protocol import (
    EngineCall,
    Reply,
    StepOutputs,
    TokenUpdate,
)
from tests.serve.peers import Peer, request


def test_requests_that_arrive_during_a_drained_update_start_after_it(
    peer: Peer, new_run: Path
) -> None:
    peer.send(request(1, max_new_tokens=40))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(EngineCall(2, "update_weights", {"path": str(new_run), "mode": "drain"}))
    peer.send(request(3))
    order: list[object] = []
    while len(order) < 42 + 1:
        message = peer.receive()
        if isinstance(message, StepOutputs):
            order += [TokenUpdate(*item).request_id for item in message.updates]
        else:
            order.append(message)
    assert order == [1] * 39 + [Reply(2, {"weight_version": 1})] + [3] * 3


def test_held_requests_start_after_an_update_that_failed(peer: Peer) -> None:
    peer.send(request(1, max_new_tokens=40))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(EngineCall(2, "update_weights", {"path": "runs/absent", "mode": "drain"}))
    peer.send(request(3))
    message = peer.receive()
    while not isinstance(message, Reply):
        message = peer.receive()
    assert message.result["status"] == 400 and "no such folder" in message.result["error"]
    prompt, updates = peer.read_request()
    assert prompt.request_id == 3 and len(updates) == 3


def test_later_update_replaces_one_that_waits_for_requests(
    peer: Peer, run: Path, new_run: Path
) -> None:
    weights = peer.server.engine.runner.model.head.weight
    old = weights.clone()
    peer.send(request(1, max_new_tokens=60))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(EngineCall(2, "update_weights", {"path": str(new_run), "mode": "drain"}))
    peer.send(EngineCall(3, "update_weights", {"path": str(run), "mode": "keep"}))
    peer.send(request(4))
    replies: list[Reply] = []
    last = dict[int, str | None]()
    while len(replies) < 2 or last.get(4) is None or last.get(1) is None:
        message = peer.receive()
        if isinstance(message, Reply):
            replies.append(message)
        else:
            assert isinstance(message, StepOutputs)
            for update in (TokenUpdate(*item) for item in message.updates):
                last[update.request_id] = update.finish_reason
    assert [each.call_id for each in replies] == [2, 3]
    assert replies[0].result["status"] == 409
    assert "update_weights: a later update replaces this one" in replies[0].result["error"]
    assert replies[1].result == {"weight_version": 1} and torch.equal(weights, old)


def test_requests_of_a_paused_engine_end_if_an_update_fails_in_the_middle(
    peer: Peer, new_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.send(request(1, max_new_tokens=60))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(EngineCall(2, "pause"))
    while not isinstance(peer.receive(), Reply):
        pass

    def fail(self: WeightUpdater, weights: Weights) -> None:
        raise CheckpointError("weights.safetensors: the file has changed")

    monkeypatch.setattr(WeightUpdater, "_write", fail)
    peer.send(EngineCall(3, "update_weights", {"path": str(new_run), "mode": "keep"}))
    message = peer.receive()
    assert isinstance(message, StepOutputs)
    assert TokenUpdate(*message.updates[0]).finish_reason == "error"
    reply = peer.receive()
    assert isinstance(reply, Reply) and reply.result["has_mixed_weights"] is True


def test_paused_engine_does_not_drain(peer: Peer, new_run: Path) -> None:
    peer.send(request(1, max_new_tokens=200))
    assert isinstance(peer.receive(), StepOutputs)
    peer.send(EngineCall(2, "pause"))
    for mode in ("drain", "keep"):
        arguments = {"path": str(new_run), "mode": mode}
        peer.send(EngineCall(3, "update_weights", arguments))
    replies: list[dict[str, Any]] = []
    while len(replies) < 3:
        message = peer.receive()
        if isinstance(message, Reply):
            replies.append(message.result)
    assert replies[1]["status"] == 400
    assert "mode=drain: the server is paused, so the requests in flight" in replies[1]["error"]
    assert replies[2] == {"weight_version": 1}

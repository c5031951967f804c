"""Two lanes take turns in a fixed order, one at a time, and what one of them raises ends both."""

import gc
import signal
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.parallel.pipeline import DualBatchOverlap


def saying(
    log: list[str], dual_batch: DualBatchOverlap, name: str, times: int
) -> Callable[[], None]:
    """A lane that hands over between its words."""

    def lane() -> None:
        for word in range(times):
            log.append(f"{name}{word}")
            dual_batch()

    return lane


@pytest.mark.parametrize(
    ("forward", "backward", "order"),
    [
        (2, 2, "f0 b0 f1 b1"),
        (1, 3, "f0 b0 b1 b2"),
        (4, 1, "f0 b0 f1 f2 f3"),
        (0, 2, "b0 b1"),
        (2, 0, "f0 f1"),
    ],
)
def test_passes_switch_in_a_fixed_order_until_they_end(
    forward: int, backward: int, order: str
) -> None:
    dual_batch, log = DualBatchOverlap(), list[str]()
    for _ in range(3):  # the thread of the backward lane is kept
        log.clear()
        dual_batch.both(
            saying(log, dual_batch, "f", forward), saying(log, dual_batch, "b", backward)
        )
        assert log == order.split()


def test_only_one_pass_runs_at_a_time() -> None:
    dual_batch, running, most = DualBatchOverlap(), list[int](), list[int]()

    def lane() -> None:
        for _ in range(20):
            running.append(1)
            time.sleep(0.0005)
            most.append(len(running))
            running.pop()
            dual_batch()

    dual_batch.both(lane, lane)
    assert len(most) == 40 and set(most) == {1}


def test_switch_outside_a_pair_does_nothing() -> None:
    dual_batch = DualBatchOverlap()
    dual_batch()
    dual_batch.both(dual_batch, dual_batch)
    dual_batch()


def failing_at_once() -> None:
    raise ValueError("no such expert")


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("where", ["at once", "later", "at the end"])
def test_error_in_one_pass_stops_both_and_keeps_its_traceback(which: str, where: str) -> None:
    dual_batch, log = DualBatchOverlap(), list[str]()

    def failing() -> None:
        for _ in range({"at once": 0, "later": 2, "at the end": 9}[where]):
            dual_batch()
        failing_at_once()

    other = saying(log, dual_batch, "o", 5)
    with pytest.raises(ValueError, match="no such expert") as caught:
        dual_batch.both(*((failing, other) if which == "forward" else (other, failing)))
    assert "failing_at_once" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert len(log) < 5 or where == "at the end"
    dual_batch.both(saying(log, dual_batch, "f", 1), saying(log, dual_batch, "b", 1))
    assert log[-2:] == ["f0", "b0"], "the next pair runs as ever"


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_both_passes() -> None:
    dual_batch, log = DualBatchOverlap(), list[str]()
    main = threading.main_thread().ident
    assert main is not None

    def backward() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)  # the forward lane waits for its turn meanwhile
        dual_batch()
        log.append("went on")

    with pytest.raises(KeyboardInterrupt):
        dual_batch.both(dual_batch, backward)
    assert log == []
    dual_batch.both(saying(log, dual_batch, "f", 1), saying(log, dual_batch, "b", 1))


class Passing(torch.autograd.Function):
    """Hands over in forward and in backward, and says so."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dual_batch: DualBatchOverlap, log: list[str], name: str
    ) -> Tensor:
        ctx.given = dual_batch, log, name
        log.append(f"{name} forward")
        dual_batch()
        return x * 3

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dual_batch, log, name = ctx.given
        log.append(f"{name} backward")
        dual_batch()
        return dy * 3, None, None, None


def two_layers(dual_batch: DualBatchOverlap, log: list[str], x: Tensor, name: str) -> Tensor:
    y: Tensor = Passing.apply(Passing.apply(x, dual_batch, log, name).sin(), dual_batch, log, name)
    return y


NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU, which runs on streams"
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_forward_and_backward_of_two_graphs_alternate(device: str) -> None:
    dual_batch, log = DualBatchOverlap(), list[str]()
    first, second = (
        torch.full((2,), value, device=device, requires_grad=True) for value in (0.5, 0.7)
    )
    y = two_layers(dual_batch, log, first, "first")
    log.clear()
    results = list[Tensor]()
    with torch.no_grad():
        kept = torch.ones_like(y)
    dual_batch.both(
        lambda: results.append(two_layers(dual_batch, log, second, "second")),
        lambda: torch.autograd.backward([y], [kept]),
    )
    assert log == ["second forward", "first backward", "second forward", "first backward"]
    for x in (first, second):
        expected = x.detach().clone().requires_grad_()
        ((expected * 3).sin() * 3).sum().backward()
        if x is second:
            results[0].sum().backward()
        assert (
            x.grad is not None and expected.grad is not None and torch.equal(x.grad, expected.grad)
        )


def test_error_in_backward_pass_is_raised() -> None:
    dual_batch, log = DualBatchOverlap(), list[str]()
    x = torch.ones(2, requires_grad=True)
    y = two_layers(dual_batch, log, x, "first")
    y.register_hook(lambda grad: failing_at_once())
    with pytest.raises(ValueError, match="no such expert"):
        dual_batch.both(lambda: saying(log, dual_batch, "f", 3)(), lambda: y.sum().backward())


def test_backward_thread_ends_with_its_owner() -> None:
    before, dual_batch = set(threading.enumerate()), DualBatchOverlap()
    dual_batch.both(dual_batch, dual_batch)
    (lane,) = set(threading.enumerate()) - before
    assert lane.name == "backward-lane"
    del dual_batch
    gc.collect()
    lane.join(5)
    assert not lane.is_alive()


def test_both_passes_use_the_callers_number_of_threads() -> None:
    dual_batch, result = DualBatchOverlap(), list[int]()
    dual_batch.both(
        lambda: result.append(torch.get_num_threads()),
        lambda: result.append(torch.get_num_threads()),
    )
    assert result[0] == result[1]

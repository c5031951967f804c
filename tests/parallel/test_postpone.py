"""Weight gradients that wait: nothing is added before its W, and then the same in the same
order."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megalith.kernels.linear import Sink
from megalith.parallel.postpone import Postponed


@dataclass
class Log:
    """A sink that notes what it is given."""

    seen: list[tuple[str, float]] = field(default_factory=list)

    def product(self, x: Tensor, dy: Tensor) -> None:
        self.seen.append(("product", float(x.sum() + dy.sum())))

    def gradient(self, dw: Tensor) -> None:
        self.seen.append(("gradient", float(dw.sum())))

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        self.seen.append(("rows", float(rows.sum() + dy.sum())))


@dataclass(eq=False)
class Layer:
    sink: Sink | None


def give_everything(sink: Sink | None) -> None:
    assert sink is not None
    sink.product(torch.ones(1, 2), torch.ones(1, 3))
    sink.gradient(torch.ones(2, 2))
    sink.rows(torch.ones(1, dtype=torch.int64), torch.ones(1))


ALL = [("product", 5.0), ("gradient", 4.0), ("rows", 2.0)]


def test_outside_of_putting_aside_everything_is_added_at_once() -> None:
    log = Log()
    layer = Layer(log)
    Postponed([layer])
    give_everything(layer.sink)
    assert log.seen == ALL


def test_what_was_put_aside_is_added_once_in_order_when_its_microbatch_is_due() -> None:
    log = Log()
    layer = Layer(log)
    chunk = Postponed([layer])
    for microbatch in (0, 1):
        with chunk.putting_aside(microbatch):
            give_everything(layer.sink)
    assert log.seen == [] and chunk.microbatches == (0, 1)
    chunk.add_up(1)
    assert log.seen == ALL and chunk.microbatches == (0,)
    with pytest.raises(KeyError):
        chunk.add_up(1)


def test_a_failed_backward_leaves_nothing_put_aside_by_accident() -> None:
    log = Log()
    layer = Layer(log)
    chunk = Postponed([layer])
    with pytest.raises(ZeroDivisionError), chunk.putting_aside(0):
        _ = 1 / 0
    give_everything(layer.sink)
    assert log.seen == ALL


def test_a_layer_without_a_sink_keeps_none() -> None:
    layer = Layer(None)
    Postponed([layer])
    assert layer.sink is None

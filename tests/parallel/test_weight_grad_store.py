"""Weight gradients that wait: nothing is added before its W, and then the same in the same
order."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from megalith.kernels.linear import PLAIN, GradAccumulator, MatmulOps
from megalith.parallel.pipeline import WeightGradStore


@dataclass
class Log:
    """A sink that notes what it is given."""

    seen: list[tuple[str, float]] = field(default_factory=list)

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        self.seen.append(("product", float(x.sum() + dy.sum())))

    def gradient(self, dw: Tensor) -> None:
        self.seen.append(("gradient", float(dw.sum())))

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        self.seen.append(("rows", float(rows.sum() + dy.sum())))


def give_everything(grad_accumulator: GradAccumulator) -> None:
    grad_accumulator.product(torch.ones(1, 2), torch.ones(1, 3), PLAIN)
    grad_accumulator.gradient(torch.ones(2, 2))
    grad_accumulator.rows(torch.ones(1, dtype=torch.int64), torch.ones(1))


ALL = [("product", 5.0), ("gradient", 4.0), ("rows", 2.0)]


def test_weight_gradients_outside_defer_are_added_at_once() -> None:
    log = Log()
    give_everything(WeightGradStore().wrap(log))
    assert log.seen == ALL


def test_deferred_weight_gradients_are_added_once_in_order() -> None:
    log, store = Log(), WeightGradStore()
    grad_accumulator = store.wrap(log)
    for microbatch in (0, 1):
        with store.defer(microbatch):
            give_everything(grad_accumulator)
    assert log.seen == [] and store.microbatches == (0, 1)
    store.run_deferred(1)
    assert log.seen == ALL and store.microbatches == (0,)
    with pytest.raises(KeyError):
        store.run_deferred(1)


def test_failed_backward_ends_defer() -> None:
    log, store = Log(), WeightGradStore()
    grad_accumulator = store.wrap(log)
    with pytest.raises(ZeroDivisionError), store.defer(0):
        _ = 1 / 0
    give_everything(grad_accumulator)
    assert log.seen == ALL

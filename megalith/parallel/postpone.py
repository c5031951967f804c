"""Weight gradients that wait: what zero-bubble schedules put between a layer and where its gradient
goes.

Backward towards the input (I) puts aside what each weight gradient is made of, and the weights'
part (W) adds it up later, when the rank would have nothing else to do. Source: Qi et al. 2024,
arXiv:2401.10241, section 2.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from megalith.kernels.grouped_linear import GroupedGradAccumulator, Groups


class HasGradAccumulator(Protocol):
    """A layer whose weight gradients go to a sink."""

    grad_accumulator: GroupedGradAccumulator | None


class WeightGradStore:
    """The weight gradients of one chunk: added at once, or put aside for their microbatch's W."""

    def __init__(self, layers: Iterable[HasGradAccumulator]) -> None:
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        self._now: list[Callable[[], None]] | None = None
        for layer in layers:
            if layer.grad_accumulator is not None:
                layer.grad_accumulator = DeferredGradAccumulator(layer.grad_accumulator, self)

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Inside, nothing is added; parameters count as ready only when it is."""
        self._now = self._deferred[microbatch] = []
        try:
            yield
        finally:
            self._now = None

    def run_deferred(self, microbatch: int) -> None:
        """Add what was put aside for a microbatch, and let go of it."""
        with torch.no_grad():
            for add in self._deferred.pop(microbatch):
                add()

    def accumulate(self, add: Callable[[], None]) -> None:
        """Add now, or put it aside."""
        if self._now is None:
            add()
        else:
            self._now.append(add)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Those that still wait for their W."""
        return tuple(self._deferred)


class DeferredGradAccumulator:
    """Stands before the sink of one layer."""

    def __init__(self, grad_accumulator: GroupedGradAccumulator, chunk: WeightGradStore) -> None:
        self.grad_accumulator, self.chunk = grad_accumulator, chunk

    def product(self, x: Tensor, dy: Tensor) -> None:
        """Add `dy.T @ x`, now or later: x [t, i], dy [t, o]."""
        self.chunk.accumulate(
            partial(self.grad_accumulator.product, x.detach(), dy.detach())
        )  # the graph that made x may go

    def grouped_product(self, x: Tensor, dy: Tensor, groups: Groups) -> None:
        """Add each expert's `dy.T @ x`, now or later: x [r, i], dy [r, o]."""
        self.chunk.accumulate(
            partial(self.grad_accumulator.grouped_product, x.detach(), dy.detach(), groups)
        )

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready, now or later: dw [o, i]."""
        self.chunk.accumulate(partial(self.grad_accumulator.gradient, dw))

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`, now or later."""
        self.chunk.accumulate(partial(self.grad_accumulator.rows, rows, dy))

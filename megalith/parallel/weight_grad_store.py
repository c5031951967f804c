"""Deferred weight gradients for zero-bubble pipeline schedules.

The input-gradient pass (I) of a microbatch stores what each weight gradient is computed from, and
the weight-gradient pass (W) computes and adds it later, when the rank would be idle. Source: Qi et
al. 2024, arXiv:2401.10241, section 2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from megalith.kernels.grouped_linear import GroupedGradAccumulator, GroupedMatmulOps, Groups
from megalith.kernels.linear import MatmulOps


class WeightGradStore:
    """Weight gradients of one model chunk: added at once, or deferred to the W pass of their
    microbatch."""

    def __init__(self) -> None:
        self._deferred: dict[int, list[Callable[[], None]]] = {}
        self._current: list[Callable[[], None]] | None = None

    def wrap(self, grad_accumulator: GroupedGradAccumulator) -> "DeferredGradAccumulator":
        """Return a gradient accumulator of a layer whose contributions can be deferred."""
        return DeferredGradAccumulator(grad_accumulator, self)

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Defer the weight gradients computed inside the context; a parameter counts as ready only
        after `run_deferred`."""
        self._current = self._deferred[microbatch] = []
        try:
            yield
        finally:
            self._current = None

    def run_deferred(self, microbatch: int) -> None:
        """Compute and add the deferred weight gradients of a microbatch, and free their inputs."""
        with torch.no_grad():
            for add in self._deferred.pop(microbatch):
                add()

    def accumulate(self, add: Callable[[], None]) -> None:
        """Call `add` now, or store it if inside `defer`."""
        if self._current is None:
            add()
        else:
            self._current.append(add)

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Microbatches whose W pass has not run."""
        return tuple(self._deferred)


class DeferredGradAccumulator:
    """Gradient accumulator that passes each contribution of one layer through a
    `WeightGradStore`."""

    def __init__(self, grad_accumulator: GroupedGradAccumulator, store: WeightGradStore) -> None:
        self.grad_accumulator, self.store = grad_accumulator, store

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        """Add `dy.T @ x`, now or later: x [t, i], dy [t, o]."""
        # detached, so that the autograd graph of x can be freed
        x, dy = x.detach(), dy.detach()
        self.store.accumulate(partial(self.grad_accumulator.product, x, dy, matmul_ops))

    def grouped_product(
        self, x: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps | None
    ) -> None:
        """Add each expert's `dy.T @ x`, now or later: x [r, i], dy [r, o]."""
        x, dy = x.detach(), dy.detach()
        add = partial(self.grad_accumulator.grouped_product, x, dy, groups, matmul_ops)
        self.store.accumulate(add)

    def gradient(self, dw: Tensor) -> None:
        """Add a gradient that is ready, now or later: dw [o, i]."""
        self.store.accumulate(partial(self.grad_accumulator.gradient, dw))

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]`, now or later."""
        self.store.accumulate(partial(self.grad_accumulator.rows, rows, dy))

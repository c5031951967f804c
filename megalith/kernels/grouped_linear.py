"""`grouped_linear`: a grouped matmul, one matmul for the rows of each expert; any number of rows,
also none.

An expert without rows gets a gradient of zeros instead of None: which experts have rows differs
between ranks, but gradient collectives must not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import (
    HAS_ONEDNN,
    Context,
    GradAccumulator,
    add_product_,
    bmm,
    forward,
    grouped_mm,
    input_grad,
    is_upcast,
    mm,
    save,
    saved_input,
)

HAS_GROUPED_MM = hasattr(torch.nn.functional, "grouped_mm")
ALIGNED = 16
"""Alignment in bytes that torch's grouped matmul requires of a row of features."""
MIN_ONEDNN_COPY_MULTIPLICATIONS = 1 << 24
"""Multiplications of an fp32 matmul on CPUs from which oneDNN plus a copy of its output is faster
than MKL.

oneDNN takes 0.88 of MKL's time but cannot write to a given output. Measured, AMD Zen 4 with
AVX-512, torch 2.13, one thread, 64 matrices of 512 x 512: MKL takes 1.09 (forward) and 1.05 (dx) of
oneDNN's time with 256 rows each, copies included, and 0.99 and 0.89 with 32 rows.
"""


@dataclass(frozen=True, slots=True)
class Groups:
    """Number of rows of each expert. Rows are sorted by expert, and there are no others."""

    counts: tuple[int, ...] | None = None
    """[e], if known on the host."""

    ends: Tensor | None = None
    """[e] int32: end of each expert's rows, on the device; unset: derived from `counts`."""

    equal: bool = False
    """Whether all experts always have the same number of rows."""

    @property
    def experts(self) -> int:
        """Number of experts."""
        return (
            len(self.ends)
            if self.counts is None and self.ends is not None
            else len(self.counts or ())
        )

    def on_host(self) -> tuple[int, ...]:
        """Return the counts [e]; synchronizes with the GPU if only `ends` is known."""
        if self.counts is not None:
            return self.counts
        assert self.ends is not None
        ends = self.ends.tolist()
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))

    def on_device(self, device: torch.device) -> Tensor:
        """Return `ends` on `device`."""
        if self.ends is not None:
            return self.ends
        return (
            torch.tensor(self.on_host(), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        )

    def known_on_host(self) -> "Groups":
        """Return the groups with `counts` set."""
        return self if self.counts is not None else replace(self, counts=self.on_host())

    def known_on(self, device: torch.device) -> "Groups":
        """Return the groups with `ends` set on `device`, so that the copy to a GPU, which
        synchronizes, happens once."""
        return replace(self, ends=self.on_device(device))


def build_groups(counts: Sequence[int] | Tensor) -> Groups:
    """Return groups of these sizes [e]: numbers, or an int64 tensor, which stays on its device."""
    if not isinstance(counts, Tensor):
        return Groups(tuple(counts))
    ends = counts.cumsum(0, dtype=torch.int32)
    return Groups(tuple(counts.tolist()) if counts.device.type == "cpu" else None, ends)


def equal_groups(experts: int, rows: int) -> Groups:
    """Return groups of `rows` rows for every expert."""
    return Groups((rows,) * experts, equal=True)


# --- three grouped matmuls, each with three implementations


class GroupedMatmulOps(Protocol):
    """Forward, input-gradient and weight-gradient grouped matmuls.

    Precision recipes replace this object instead of the layer; it may hold state, for example
    scales, if each matrix of experts has its own object.
    """

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """x [r, i], w [e o, i] -> y [r, o]."""

    def input_grad(self, dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """dy [r, o], w [e o, i] -> dx [r, i]."""

    def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """dy [r, o], x [r, i] -> dw [e o, i]."""


def by_expert(w: Tensor, e: int) -> Tensor:
    """View a tensor that is equally divided among experts by expert: [e n, i] -> [e, n, i]."""
    return w.unflatten(0, (e, w.shape[0] // e))


def _busy(counts: Sequence[int], *of_experts: Iterable[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors of each expert that has rows: decoding a single token uses only a few of
    hundreds of experts."""
    return (
        expert_tensors
        for count, expert_tensors in zip(counts, zip(*of_experts, strict=True), strict=True)
        if count
    )


def _onednn_copy_pays(part: Tensor, weight: Tensor) -> bool:
    if is_upcast(part):
        return True
    wanted = part.dtype == torch.float32 and part.device.type == "cpu" and HAS_ONEDNN
    return wanted and part.shape[0] * weight.numel() >= MIN_ONEDNN_COPY_MULTIPLICATIONS


class LoopMatmulOps(GroupedMatmulOps):
    """Grouped matmuls as one matmul per expert."""

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Forward, one matmul per expert, each written into its rows of y."""
        counts = groups.on_host()
        weights = by_expert(w, len(counts))
        y = x.new_empty(x.shape[0], weights.shape[1])
        for rows, weight, out in _busy(counts, x.split(counts), weights, y.split(counts)):
            if _onednn_copy_pays(rows, weight):
                out.copy_(forward(rows, weight))
            else:
                torch.mm(rows, weight.t(), out=out)
        return y

    def input_grad(self, dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Input gradient, one matmul per expert, each written into its rows of dx."""
        counts = groups.on_host()
        dx = dy.new_empty(dy.shape[0], w.shape[1])
        for rows, weight, out in _busy(
            counts, dy.split(counts), by_expert(w, len(counts)), dx.split(counts)
        ):
            if _onednn_copy_pays(rows, weight):
                out.copy_(input_grad(rows, weight))
            else:
                torch.mm(rows, weight, out=out)
        return dx

    def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Weight gradient, one matmul per expert, each written into its part of dw; zeros without
        rows."""
        counts = groups.on_host()
        dw = dy.new_empty(len(counts) * dy.shape[1], x.shape[1])
        for part, inputs, out in _each(dw, dy, x, counts):
            mm(part.t(), inputs, out=out)
        return dw


def _each(
    total: Tensor, dy: Tensor, x: Tensor, counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield each expert's rows of dy and of x, and its matrix [o, i] in `total`."""
    return zip(dy.split(counts), x.split(counts), by_expert(total, len(counts)), strict=True)


LOOP = LoopMatmulOps()
"""Supports every device and dtype."""


class BatchedMatmulOps(GroupedMatmulOps):
    """Grouped matmuls as one batched matmul, for groups of equal size."""

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Forward of all experts as one batched matmul."""
        e = groups.experts
        weights, y = by_expert(w, e), x.new_empty(x.shape[0], w.shape[0] // e)
        bmm(by_expert(x, e), weights.transpose(1, 2), out=by_expert(y, e))
        return y

    def input_grad(self, dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Input gradient of all experts as one batched matmul."""
        e, dx = groups.experts, dy.new_empty(dy.shape[0], w.shape[1])
        bmm(by_expert(dy, e), by_expert(w, e), out=by_expert(dx, e))
        return dx

    def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Weight gradient of all experts as one batched matmul."""
        e = groups.experts
        dw = dy.new_empty(e * dy.shape[1], x.shape[1])
        bmm(by_expert(dy, e).transpose(1, 2), by_expert(x, e), out=by_expert(dw, e))
        return dw


BATCHED = BatchedMatmulOps()
"""Supports groups of equal size."""


class FusedMatmulOps(GroupedMatmulOps):
    """Grouped matmuls by torch's kernel."""

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Forward by torch's grouped matmul."""
        ends = groups.on_device(x.device)
        return grouped_mm(x, by_expert(w, len(ends)).transpose(1, 2), offs=ends)

    def input_grad(self, dy: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Input gradient by torch's grouped matmul."""
        ends = groups.on_device(dy.device)
        return grouped_mm(dy, by_expert(w, len(ends)), offs=ends)

    def weight_grad(self, dy: Tensor, x: Tensor, groups: Groups) -> Tensor:
        """Weight gradient by torch's grouped matmul, which may leave parts of experts without rows
        unwritten; these are set to 0."""
        ends = groups.on_device(dy.device)
        dw = grouped_mm(dy.t(), x, offs=ends)
        return (
            dw if dy.device.type == "cpu" else zero_experts_without_rows_(dw, groups, ends)
        ).flatten(0, 1)


def zero_experts_without_rows_(dw: Tensor, groups: Groups, ends: Tensor) -> Tensor:
    """Set dw [e, o, i] of experts without rows to 0 in place; if counts are known on the host, only
    these are written."""
    if groups.counts is None:
        empty = ends.diff(prepend=ends.new_zeros(1)) == 0
        return dw.masked_fill_(empty.view(-1, 1, 1), 0.0)
    for expert, count in enumerate(groups.counts):
        if count == 0:
            dw[expert].zero_()
    return dw


FUSED = FusedMatmulOps()
"""On GPUs one kernel, which reads the group sizes on the device; on CPUs the same loop as `LOOP`,
but not in Python."""


BUILT_IN = LOOP, BATCHED, FUSED
"""Grouped matmuls among which a gradient accumulator chooses the fastest for itself."""


def select_grouped_matmul_ops(x: Tensor, w: Tensor, groups: Groups) -> GroupedMatmulOps:
    """Return the fastest grouped matmuls for x [r, i], w [e o, i]."""
    if groups.equal:
        return BATCHED
    outputs, inputs = w.shape[0] // groups.experts, w.shape[1]
    aligned = all(features * x.element_size() % ALIGNED == 0 for features in (outputs, inputs))
    if not (HAS_GROUPED_MM and aligned) or is_upcast(x):
        # the loop upcasts only the matrices of experts that have rows
        return LOOP
    if x.device.type == "cpu":
        large = (
            x.shape[0] * outputs * inputs >= MIN_ONEDNN_COPY_MULTIPLICATIONS * groups.experts
            and HAS_ONEDNN
        )
        return (
            FUSED if x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and not large) else LOOP
        )
    return FUSED if x.is_cuda and x.dtype == torch.bfloat16 else LOOP


def fused_takes(x: Tensor, w: Tensor, groups: Groups) -> bool:
    """Return whether torch's grouped matmul supports these tensors, whether or not it is the
    fastest."""
    features = w.shape[0] // groups.experts, w.shape[1]
    aligned = all(count * x.element_size() % ALIGNED == 0 for count in features)
    dtypes = (torch.float32, torch.bfloat16) if x.device.type == "cpu" else (torch.bfloat16,)
    return HAS_GROUPED_MM and aligned and x.dtype in dtypes


# --- gradient accumulators


class GroupedGradAccumulator(GradAccumulator, Protocol):
    """Gradient accumulator of all experts' matrices as one parameter [e o, i]."""

    def grouped_product(
        self, x: Tensor, dy: Tensor, groups: Groups, matmul_ops: GroupedMatmulOps | None
    ) -> None:
        """Add each expert's `dy.T @ x`: x [r, i], dy [r, o], computed by `matmul_ops`; None: by the
        fastest. Also called for groups without rows."""


def accumulate_grouped_product_(
    total: Tensor,
    x: Tensor,
    dy: Tensor,
    groups: Groups,
    *,
    fresh: bool,
    matmul_ops: GroupedMatmulOps | None = None,
) -> Tensor:
    """Compute `total += each expert's dy.T @ x` in place, or `total =` if `fresh`: total [e o, i],
    of any dtype.

    Default implementation of gradient accumulators. On CPUs each expert's product is added while it
    is in the cache.
    """
    if matmul_ops is None:
        matmul_ops = (
            LOOP
            if total.device.type == "cpu" and not groups.equal
            else select_grouped_matmul_ops(x, total, groups)
        )
    if matmul_ops is not LOOP:
        dw = matmul_ops.weight_grad(dy, x, groups)
        return total.copy_(dw) if fresh else total.add_(dw)
    for part, inputs, out in _each(total, dy, x, groups.on_host()):
        if not fresh:
            add_product_(out, inputs, part)
        elif out.dtype == part.dtype:
            mm(part.t(), inputs, out=out)
        else:
            out.copy_(mm(part.t(), inputs))
    return total


# --- autograd function


def grouped_linear(
    x: Tensor,
    w: Tensor,
    groups: Groups,
    *,
    grad_accumulator: GroupedGradAccumulator | None = None,
    matmul_ops: GroupedMatmulOps | None = None,
) -> Tensor:
    """Multiply each expert's rows by its matrix: x [r, i], w [e o, i] (the experts' matrices
    concatenated) -> [r, o].

    Backward computes dx first. With a gradient accumulator it then passes (x, dy) on once, and
    autograd gets no gradient. If x is recomputed in backward, what it is recomputed from is
    saved instead of it; if w requires no gradient, nothing is. `matmul_ops`: unset: the fastest for
    x.
    """
    assert groups.counts is None or sum(groups.counts) == len(x), (groups, x.shape)
    matmul_ops = matmul_ops or select_grouped_matmul_ops(x, w, groups)
    # one synchronization for the three matmuls
    groups = groups.known_on_host() if matmul_ops is LOOP else groups
    y: Tensor = GroupedLinearFunction.apply(x, groups, grad_accumulator, matmul_ops, w)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_grouped_linear(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """Reference implementation of `grouped_linear` in plain PyTorch operations."""
    if groups.equal:
        e = groups.experts
        return (by_expert(x, e) @ by_expert(w, e).transpose(1, 2)).flatten(0, 1)
    counts = groups.on_host()
    pairs = zip(x.split(counts), by_expert(w, len(counts)), strict=True)
    return torch.cat([part @ weight.t() for part, weight in pairs])


class GroupedLinearFunction(Function):
    """Autograd function of `grouped_linear`."""

    reference = staticmethod(
        lambda x, groups, grad_accumulator, matmul_ops, w: reference_grouped_linear(x, w, groups)
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        groups: Groups,
        grad_accumulator: GroupedGradAccumulator | None,
        matmul_ops: GroupedMatmulOps,
        w: Tensor,
    ) -> Tensor:
        """x [r, i] -> y [r, o]."""
        save(ctx, x, [w], ctx.needs_input_grad[4:])
        ctx.groups, ctx.grad_accumulator, ctx.matmul_ops = groups, grad_accumulator, matmul_ops
        return matmul_ops.forward(x, w, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [r, o] -> dx [r, i], and dw to the gradient accumulator or to w."""
        w, *inputs = ctx.saved_tensors
        dy = dy.contiguous()
        dx = ctx.matmul_ops.input_grad(dy, w, ctx.groups) if ctx.needs_input_grad[0] else None
        x = saved_input(ctx, ctx.needs_input_grad[4:], inputs)
        dw = None
        if x is not None and ctx.grad_accumulator is not None:
            chosen = None if ctx.matmul_ops in BUILT_IN else ctx.matmul_ops
            ctx.grad_accumulator.grouped_product(x, dy, ctx.groups, chosen)
        elif x is not None:
            dw = ctx.matmul_ops.weight_grad(dy, x, ctx.groups)
        return dx, None, None, None, dw

"""The MLPs of all experts: grouped matmul, activation times the row's router weight, grouped
matmul.

A row's weight multiplies its activation, which is narrower than the output and is recomputed in
backward anyway. So backward saves only the rows, the output of `up` and the weights. Bias and
weight of an output `w (W a + b)` are then `W (w a) + w b`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels.backend import raise_unsupported
from megalith.kernels.grouped_linear import (
    BATCHED,
    FUSED,
    LOOP,
    GroupedGradAccumulator,
    GroupedMatmulOps,
    Groups,
    by_expert,
    fused_takes,
    grouped_linear,
    select_grouped_matmul_ops,
)
from megalith.kernels.linear import Context
from megalith.kernels.recomputed import RegisterRecompute, register_recompute

COLUMNS = 8
"""Number of columns to which row weights are repeated, so that matmuls with them are aligned."""

Inner = Callable[[Tensor, Tensor], Tensor]
"""Weighted activation between the matmuls: [r, 2 f] with a gate, or [r, f] without, and the rows'
weights [r] -> [r, f]."""


class Matrix(NamedTuple):
    """One weight matrix of every expert, with its bias and gradient accumulator."""

    weight: Tensor
    """[e o, i], the experts' matrices concatenated along the rows."""

    bias: Tensor | None = None
    """[e o]."""

    grad_accumulator: GroupedGradAccumulator | None = None
    """Takes the weight's gradient (fused weight-gradient accumulation); unset: autograd does."""

    matmul_ops: GroupedMatmulOps | None = None
    """Computes its matmuls; None: the fastest for the rows, or those of the selected backend."""


def experts(
    rows: Tensor,
    weights: Tensor,
    groups: Groups,
    up: Matrix,
    down: Matrix,
    inner: Inner,
    *,
    register: RegisterRecompute | None = register_recompute,
    kernel: BackendName = "auto",
) -> Tensor:
    """Compute `down(inner(up(row), weight))` with the expert of each row: rows [r, h], weights [r]
    -> [r, h].

    `again`: how backward recomputes the activation; None: it is saved. kernel="reference": each
    expert as a plain MLP in a loop; backward saves every intermediate.
    """
    if kernel == "reference":
        return reference_experts(
            rows,
            weights,
            groups,
            _accumulate_grad(up),
            _accumulate_grad(down),
            inner,
        )
    up_ops = up.matmul_ops or grouped_matmul_ops_by_name(kernel, rows, up.weight, groups)
    if up_ops is LOOP:
        groups = groups.known_on_host()  # one device synchronization instead of one per matmul
    pre_activation = with_bias(
        grouped_linear(
            rows, up.weight, groups, grad_accumulator=up.grad_accumulator, matmul_ops=up_ops
        ),
        up.bias,
        groups,
    )
    activated = inner(pre_activation, weights)
    if register is not None:
        activated = register(activated, inner, (pre_activation, weights))
    down_ops = down.matmul_ops or grouped_matmul_ops_by_name(kernel, activated, down.weight, groups)
    return with_bias(
        grouped_linear(
            activated,
            down.weight,
            groups,
            grad_accumulator=down.grad_accumulator,
            matmul_ops=down_ops,
        ),
        down.bias,
        groups,
        weights,
    )


def grouped_matmul_ops_by_name(
    kernel: BackendName, x: Tensor, w: Tensor, groups: Groups
) -> GroupedMatmulOps:
    """Return the grouped matmuls that `kernel` names for x [r, i] and w [e o, i]; else the fastest.

    Raises:
        ConfigError: the named backend does not support these rows.
    """
    if kernel == "loop":
        return LOOP
    if kernel == "batched":
        return BATCHED if groups.equal else _reject(kernel, x)
    if kernel == "grouped":
        return FUSED if fused_takes(x, w, groups) else _reject(kernel, x)
    return select_grouped_matmul_ops(x, w, groups)


def _reject(kernel: BackendName, x: Tensor) -> GroupedMatmulOps:
    raise_unsupported("experts", kernel, x, works="loop")
    raise AssertionError(f"kernels.experts={kernel} must have raised an error")


def reference_experts(
    rows: Tensor, weights: Tensor, groups: Groups, up: Matrix, down: Matrix, inner: Inner
) -> Tensor:
    """Reference implementation of `experts` in plain PyTorch operations: a loop over experts;
    weights multiply the outputs."""
    e, out = groups.experts, []
    matrices = zip(*(by_expert(each.weight, e) for each in (up, down)), strict=True)
    biases = [None if each.bias is None else each.bias.view(e, -1) for each in (up, down)]
    parts = zip(rows.split(groups.on_host()), weights.split(groups.on_host()), strict=True)
    for expert, ((x, w), (w_up, w_down)) in enumerate(zip(parts, matrices, strict=True)):
        b_up, b_down = (None if bias is None else bias[expert] for bias in biases)
        inside = inner(torch.nn.functional.linear(x, w_up, b_up), torch.ones_like(w))
        out.append(torch.nn.functional.linear(inside, w_down, b_down) * w.unsqueeze(1).to(x.dtype))
    return torch.cat(out)


def _accumulate_grad(matrix: Matrix) -> Matrix:
    """Return the matrix with its gradient accumulator as an autograd function, for plain PyTorch
    operations."""
    if matrix.grad_accumulator is None:
        return matrix
    return Matrix(AccumulateGradFunction.apply(matrix.weight, matrix.grad_accumulator), matrix.bias)  # type: ignore[no-untyped-call]  # torch's own


class AccumulateGradFunction(Function):
    """Autograd function that returns a weight unchanged and passes its gradient to the gradient
    accumulator."""

    reference = staticmethod(lambda weight, grad_accumulator: weight)

    @staticmethod
    def forward(ctx: Context, weight: Tensor, grad_accumulator: GroupedGradAccumulator) -> Tensor:
        """[e o, i], the same memory."""
        ctx.grad_accumulator = grad_accumulator
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dw: Tensor) -> tuple[None, None]:
        """dw [e o, i] -> the gradient accumulator."""
        ctx.grad_accumulator.gradient(dw)
        return None, None


def with_bias(
    y: Tensor, bias: Tensor | None, groups: Groups, weights: Tensor | None = None
) -> Tensor:
    """Add the bias of each row's expert to y [r, o], times the row's weight [r] if weights are
    given; without bias, return y.

    y is overwritten, so it must not be saved for any backward, as the output of a matmul.
    """
    if bias is None:
        return y
    sum_: Tensor = BiasFunction.apply(y, bias, groups, weights)  # type: ignore[no-untyped-call]  # torch's own
    return sum_


def reference_with_bias(y: Tensor, bias: Tensor, groups: Groups, weights: Tensor | None) -> Tensor:
    """Reference implementation of `with_bias` in plain PyTorch operations."""
    each = bias.view(groups.experts, -1)[row_experts(groups, y)]
    return y + (each if weights is None else each * weights.unsqueeze(1).to(y.dtype))


def row_experts(groups: Groups, rows: Tensor) -> Tensor:
    """Return the expert of each row: rows [r, ...] -> [r] int64."""
    ends = groups.on_device(rows.device)
    return torch.searchsorted(
        ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True
    )


class BiasFunction(Function):
    """Autograd function of `with_bias`."""

    reference = staticmethod(reference_with_bias)

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, bias: Tensor, groups: Groups, weights: Tensor | None
    ) -> Tensor:
        """[r, o], in place."""
        ctx.mark_dirty(y)
        ctx.save_for_backward(bias, weights)
        ctx.groups = groups
        each = bias.view(groups.experts, -1).index_select(0, row_experts(groups, y))
        return (
            y.add_(each) if weights is None else y.addcmul_(each, weights.unsqueeze(1).to(y.dtype))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [r, o] -> dy, and the gradients of biases and weights."""
        bias, weights = ctx.saved_tensors
        groups: Groups = ctx.groups
        dbias = dweights = None
        if ctx.needs_input_grad[1]:
            dbias = _weighted_sums(dy, weights, groups).view_as(bias)
        if ctx.needs_input_grad[3]:
            each = bias.view(groups.experts, -1).index_select(0, row_experts(groups, dy))
            wide = torch.promote_types(dy.dtype, torch.float32)
            dweights = torch.linalg.vecdot(each.to(wide), dy.to(wide)).to(weights.dtype)
        return dy, dbias, None, dweights


def _weighted_sums(dy: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
    """Return each expert's weighted sum of its rows: dy [r, o], weights [r] -> [e o]; a matmul, so
    it accumulates in fp32 and in a fixed order."""
    column = dy.new_ones(len(dy)) if weights is None else weights.to(dy.dtype)
    columns = column.unsqueeze(1).expand(-1, COLUMNS).contiguous()
    sums = select_grouped_matmul_ops(
        columns, dy.new_empty(groups.experts * dy.shape[1], COLUMNS), groups
    )
    return sums.weight_grad(dy.contiguous(), columns, groups)[:, 0]

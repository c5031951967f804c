"""The MLPs of all experts at once: up, an activation times each row's weight, and down.

A row's weight multiplies its activation, which is narrower than what comes out and is computed
again in backward anyway: so backward keeps the rows, what `up` gave and the weights, and nothing
else. Bias and weight of an output `w (W a + b)` are then `W (w a) + w b`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels.engine import refuse
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
from megalith.kernels.rebuilt import (
    LayerInput,
    RecomputedOutput,
    RecomputedOutputFactory,
    output_tensor,
)

COLUMNS = 8
"""What weights of rows are repeated to, so that matmuls with them are aligned."""

Inner = Callable[[Tensor, Tensor], Tensor]
"""What lies between the matmuls: of [r, 2 f] with a gate, or [r, f] without, and the rows' weights
[r] -> [r, f]."""


class Matrix(NamedTuple):
    """One matrix of every expert, and where its gradient goes."""

    weight: Tensor
    """[e o, i], the experts' matrices one below the other."""

    bias: Tensor | None = None
    """e o numbers."""

    grad_accumulator: GroupedGradAccumulator | None = None
    """Takes the weight's gradient; unset: autograd does."""


def experts(
    rows: LayerInput,
    weights: Tensor,
    groups: Groups,
    up: Matrix,
    down: Matrix,
    inner: Inner,
    *,
    again: RecomputedOutputFactory | None = RecomputedOutput,
    kernel: BackendName = "auto",
) -> Tensor:
    """`down(inner(up(row), weight))` by the expert of each row: rows [r, h], weights [r] -> [r, h].

    `again`: how backward gets the activation; None: it is kept. kernel="reference": expert after
    expert, each a plain MLP, of which backward keeps every step.
    """
    if kernel == "reference":
        return reference_experts(
            output_tensor(rows),
            weights,
            groups,
            _accumulate_grad(up),
            _accumulate_grad(down),
            inner,
        )
    first = grouped_matmul_ops_by_name(kernel, output_tensor(rows), up.weight, groups)
    if first is LOOP:
        groups = groups.known_on_host()  # a GPU is waited for once, not by every product
    wide = with_bias(
        grouped_linear(
            rows, up.weight, groups, grad_accumulator=up.grad_accumulator, matmul_ops=first
        ),
        up.bias,
        groups,
    )
    narrow = inner(wide, weights)
    kept: LayerInput = narrow if again is None else again(narrow, inner, (wide, weights))
    last = grouped_matmul_ops_by_name(kernel, narrow, down.weight, groups)
    return with_bias(
        grouped_linear(
            kept, down.weight, groups, grad_accumulator=down.grad_accumulator, matmul_ops=last
        ),
        down.bias,
        groups,
        weights,
    )


def grouped_matmul_ops_by_name(
    kernel: BackendName, x: Tensor, w: Tensor, groups: Groups
) -> GroupedMatmulOps:
    """The matmuls of experts that are asked for, of x [r, i] and w [e o, i]; the fastest unless by
    name.

    Raises:
        ConfigError: these do not take such rows.
    """
    if kernel == "loop":
        return LOOP
    if kernel == "batched":
        return BATCHED if groups.equal else _refused(kernel, x)
    if kernel == "grouped":
        return FUSED if fused_takes(x, w, groups) else _refused(kernel, x)
    return select_grouped_matmul_ops(x, w, groups)


def _refused(kernel: BackendName, x: Tensor) -> GroupedMatmulOps:
    refuse("experts", kernel, x, works="loop")
    raise AssertionError(f"{kernel} was refused")


def reference_experts(
    rows: Tensor, weights: Tensor, groups: Groups, up: Matrix, down: Matrix, inner: Inner
) -> Tensor:
    """What `experts` computes, in plain operations, if `inner` is one: a loop in which weights meet
    outputs."""
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
    """The same for plain operations: what autograd finds of the weight's gradient goes to its
    sink."""
    if matrix.grad_accumulator is None:
        return matrix
    return Matrix(AccumulateGradFunction.apply(matrix.weight, matrix.grad_accumulator), matrix.bias)  # type: ignore[no-untyped-call]  # torch's own


class AccumulateGradFunction(Function):
    """A weight as it is, whose gradient a sink takes."""

    reference = staticmethod(lambda weight, grad_accumulator: weight)

    @staticmethod
    def forward(ctx: Context, weight: Tensor, grad_accumulator: GroupedGradAccumulator) -> Tensor:
        """[e o, i], the same memory."""
        ctx.grad_accumulator = grad_accumulator
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dw: Tensor) -> tuple[None, None]:
        """dw [e o, i] -> the sink."""
        ctx.grad_accumulator.gradient(dw)
        return None, None


def with_bias(
    y: Tensor, bias: Tensor | None, groups: Groups, weights: Tensor | None = None
) -> Tensor:
    """y [r, o] plus each row's expert's bias, times the row's weight [r] if there are weights; y
    itself without bias.

    y is overwritten, so it must be a result that no backward keeps, such as a matmul's.
    """
    if bias is None:
        return y
    sum_: Tensor = BiasFunction.apply(y, bias, groups, weights)  # type: ignore[no-untyped-call]  # torch's own
    return sum_


def reference_with_bias(y: Tensor, bias: Tensor, groups: Groups, weights: Tensor | None) -> Tensor:
    """What `with_bias` computes, in plain operations."""
    each = bias.view(groups.experts, -1)[experts_of_rows(groups, y)]
    return y + (each if weights is None else each * weights.unsqueeze(1).to(y.dtype))


def experts_of_rows(groups: Groups, rows: Tensor) -> Tensor:
    """The expert of each row: rows [r, ...] -> [r] int64."""
    ends = groups.on_device(rows.device)
    return torch.searchsorted(
        ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True
    )


class BiasFunction(Function):
    """`with_bias` as autograd sees it."""

    reference = staticmethod(reference_with_bias)

    @staticmethod
    def forward(
        ctx: Context, y: Tensor, bias: Tensor, groups: Groups, weights: Tensor | None
    ) -> Tensor:
        """[r, o], in place."""
        ctx.mark_dirty(y)
        ctx.save_for_backward(bias, weights)
        ctx.groups = groups
        each = bias.view(groups.experts, -1).index_select(0, experts_of_rows(groups, y))
        return (
            y.add_(each) if weights is None else y.addcmul_(each, weights.unsqueeze(1).to(y.dtype))
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [r, o] -> itself, each bias's gradient, and the weights'."""
        bias, weights = ctx.saved_tensors
        groups: Groups = ctx.groups
        dbias = dweights = None
        if ctx.needs_input_grad[1]:
            dbias = _weighted_sums(dy, weights, groups).view_as(bias)
        if ctx.needs_input_grad[3]:
            each = bias.view(groups.experts, -1).index_select(0, experts_of_rows(groups, dy))
            wide = torch.promote_types(dy.dtype, torch.float32)
            dweights = torch.linalg.vecdot(each.to(wide), dy.to(wide)).to(weights.dtype)
        return dy, dbias, None, dweights


def _weighted_sums(dy: Tensor, weights: Tensor | None, groups: Groups) -> Tensor:
    """Each expert's sum of its rows: dy [r, o], weights [r] -> [e o]; a matmul, so it adds in fp32
    and in order."""
    column = dy.new_ones(len(dy)) if weights is None else weights.to(dy.dtype)
    columns = column.unsqueeze(1).expand(-1, COLUMNS).contiguous()
    sums = select_grouped_matmul_ops(
        columns, dy.new_empty(groups.experts * dy.shape[1], COLUMNS), groups
    )
    return sums.weight_grad(dy.contiguous(), columns, groups)[:, 0]

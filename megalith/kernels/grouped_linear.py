"""`grouped_linear`: a grouped matmul, one matmul for the rows of each expert (possibly none); and
the MLPs of experts, which consist of two.

An expert without rows gets a gradient of zeros instead of None: which experts have rows differs
between ranks, but gradient collectives must not.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels.backend import raise_unsupported
from megalith.kernels.linear import (
    HAS_ONEDNN,
    Context,
    GradAccumulator,
    RegisterRecompute,
    SmallBatchKernel,
    add_product_,
    bmm,
    find_small_batch_kernel,
    forward,
    grouped_mm,
    input_grad,
    is_upcast,
    mm,
    register_recompute,
    runs_inference,
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


class SmallBatchMatmulOps(LoopMatmulOps):
    """Grouped matmuls whose forward is the small-batch kernel, for experts with few rows; used
    without gradients."""

    def __init__(self, kernel: SmallBatchKernel) -> None:
        self._kernel = kernel

    def forward(self, x: Tensor, w: Tensor, groups: Groups) -> Tensor:
        """Forward of all experts in one launch of the kernel."""
        return self._kernel.grouped_linear(x, w, groups.on_host())


BUILT_IN = LOOP, BATCHED, FUSED
"""Grouped matmuls among which a gradient accumulator chooses the fastest for itself."""


def select_grouped_matmul_ops(x: Tensor, w: Tensor, groups: Groups) -> GroupedMatmulOps:
    """Return the fastest grouped matmuls for x [r, i], w [e o, i]."""
    kernel = find_small_batch_kernel(x, w, max(groups.counts)) if groups.counts else None
    if kernel is not None:
        return SmallBatchMatmulOps(kernel)
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
    if runs_inference():
        return matmul_ops.forward(x, w, groups)
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


# --- the MLPs of all experts: grouped matmul, activation times the row's router weight, grouped
# matmul
#
# A row's weight multiplies its activation, which is narrower than the output and is recomputed in
# backward anyway. So backward saves only the rows, the output of `up` and the weights. Bias and
# weight of an output `w (W a + b)` are then `W (w a) + w b`.

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

"""`linear`: every dense weight matmul, as three plain functions and one autograd function that
calls them; and outputs that are recomputed in backward instead of saved.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from megalith.config.kernels import BackendName

# --- recomputed outputs: tensors that need not be saved for backward, because they can be
# recomputed from others
#
# Examples: a norm's output from its input, which the norm saves anyway; all tokens from each rank's
# part; a full tensor from its shards. The function that computes such a tensor registers how; a
# function that saves the tensor for backward calls `tensors_to_save` and gets the inputs of the
# recomputation instead. It saves them with `save_for_backward`, so hooks on saved tensors (memory
# statistics, activation offload) see what is saved. Source of the idea: Korthikanti et al. 2022,
# arXiv:2205.05198, section 4.2.2.


class RecomputeRecipe(NamedTuple):
    """How to recompute a tensor bit by bit."""

    function: Callable[..., Tensor]
    """Recomputes the tensor from `inputs`; may call collectives, on all ranks alike."""

    inputs: tuple[Tensor, ...]
    """Tensors to save for the recomputation."""


# An entry lives as long as its tensor. It is no attribute of the tensor, because copies and views
# must not inherit it.
_recipes = WeakTensorKeyDictionary()

RegisterRecompute = Callable[[Tensor, Callable[..., Tensor], tuple[Tensor, ...]], Tensor]
"""`register_recompute` or `register_checked_recompute`."""


def register_recompute(
    x: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Tensor:
    """Let backward recompute x as `function(*inputs)` instead of saving it; returns x.

    Without gradients nothing is registered; torch.compile decides itself what it recomputes.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _recipes[x] = RecomputeRecipe(function, inputs)
    return x


def register_checked_recompute(
    x: Tensor, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Tensor:
    """`register_recompute` that compares the bits of each recomputation with those of x."""
    return register_recompute(x, BitwiseComparison(function, fingerprint(x)), inputs)


def derive_recompute(x: Tensor, y: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Let backward recompute y, which is `function(x)`, from x or from what x is recomputed from;
    returns y."""
    if y is x:
        return y
    recipe = recompute_recipe(x)
    if recipe is None:
        return register_recompute(y, function, (x,))
    return register_recompute(y, partial(_compose, recipe.function, function), recipe.inputs)


def pass_recompute(x: Tensor, y: Tensor) -> Tensor:
    """Let backward recompute y, which has the values of x, as it recomputes x; returns y."""
    recipe = recompute_recipe(x)
    return y if recipe is None or y is x else register_recompute(y, *recipe)


def recompute_recipe(x: Tensor) -> RecomputeRecipe | None:
    """Return how x is recomputed in backward; None: it has to be saved."""
    if torch.compiler.is_compiling() or not _recipes:
        return None
    recipe: RecomputeRecipe | None = _recipes.get(x)
    return recipe


@contextmanager
def save_entirely(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside this context, functions save these tensors themselves, not what they are recomputed
    from."""
    recipes = [(x, recipe) for x in tensors if (recipe := recompute_recipe(x)) is not None]
    for x, _ in recipes:
        del _recipes[x]
    try:
        yield
    finally:
        for x, recipe in recipes:
            _recipes[x] = recipe


class SavedInput(NamedTuple):
    """How backward obtains a tensor of forward from the tensors that were saved instead of it."""

    function: Callable[..., Tensor] | None
    """Recomputes the tensor; None: it was saved itself."""

    shape: torch.Size
    dtype: torch.dtype

    def restore(self, saved: Sequence[Tensor]) -> Tensor:
        """Return the tensor; raises RuntimeError if its shape or dtype differs from forward."""
        if self.function is None:
            return saved[0]
        with torch.no_grad():
            x = self.function(*saved)
        if (x.shape, x.dtype) != (self.shape, self.dtype):
            raise RuntimeError(
                f"backward recomputed {x.dtype} {list(x.shape)} where forward computed "
                f"{self.dtype} {list(self.shape)}: {self.function} must return the same tensor "
                "whenever it is called with the same inputs."
            )
        return x


def tensors_to_save(x: Tensor) -> tuple[SavedInput, tuple[Tensor, ...]]:
    """Return the tensors to save for backward instead of x, and how x is restored from them."""
    recipe = recompute_recipe(x)
    if recipe is None:
        return SavedInput(None, x.shape, x.dtype), (x,)
    return SavedInput(recipe.function, x.shape, x.dtype), recipe.inputs


def split_rows(x: Tensor, count: int) -> Sequence[Tensor]:
    """Split x [t, ...] along the rows into `count` parts, the first of them one row longer if they
    do not divide evenly.

    Each part of a recomputed output recomputes the entire output.
    """
    each, longer = divmod(x.shape[0], count)
    sizes = [each + (number < longer) for number in range(count)]
    parts = x.split(sizes)
    if recompute_recipe(x) is None:
        return parts
    starts = [sum(sizes[:number]) for number in range(count)]
    return [
        derive_recompute(x, part, partial(torch.narrow, dim=0, start=start, length=size))
        for part, start, size in zip(parts, starts, sizes, strict=True)
    ]


def fingerprint(x: Tensor) -> Tensor:
    """Return two sums over the bits of x, int64 [2]: they detect any change of one value, and
    nearly any change of several."""
    int_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.detach().contiguous().view(-1).view(int_dtype).to(torch.int64)
    place = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack([bits.sum(), (bits * place).sum()])


@dataclass(frozen=True, slots=True)
class BitwiseComparison:
    """A function whose results must have the same bits as the first result."""

    function: Callable[..., Tensor]
    expected: Tensor
    """Fingerprint of the first result."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the result; synchronizes with the device."""
        y = self.function(*inputs)
        if not torch.equal(fingerprint(y), self.expected):
            raise RuntimeError(
                f"recompute.check: {self.function} of {[list(x.shape) for x in inputs]} did not "
                "give the same bits a second time. It is not deterministic, or its inputs were "
                "modified, so gradients would be wrong. Set recompute.granularity=none until that "
                "is fixed."
            )
        return y


def _compose(
    first: Callable[..., Tensor], second: Callable[[Tensor], Tensor], *inputs: Tensor
) -> Tensor:
    return second(first(*inputs))


# --- matmuls of bf16 operands on CPUs: by torch's bf16 kernels, or in fp32 on upcast operands
#
# oneDNN has bf16 kernels for AVX-512 and newer, and for arm with bf16. On other CPUs torch falls
# back to scalar loops. There the operands are upcast to fp32 and the result is rounded to bf16
# once, as bf16 kernels do, which also accumulate in fp32.
#
# Measured: Zen 5 restricted to AVX2, torch 2.13, one thread, 512 tokens, a weight of 1536 x 512,
# GFLOP/s of bf16 kernels and upcast: forward 24 and 80, weight gradient 36 and 77, input gradient
# 1.7 and 66. Restricted to AVX-512 without bf16 instructions, bf16 kernels take 0.8 to 1.2 of the
# time of upcast operands, and less for few tokens, so they are used.


def _probe_bf16_kernels() -> bool:
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return torch.backends.mkldnn.is_available() and probe is not None and bool(probe())


HAS_BF16_KERNELS = _probe_bf16_kernels()
"""Whether oneDNN has fast bf16 kernels for this CPU."""


class _Selection:
    """Whether bf16 operands are upcast: one choice per process, like
    torch.set_float32_matmul_precision."""

    upcast = not HAS_BF16_KERNELS


def select_bf16_matmul(form: BackendName) -> None:
    """Select how this process computes matmuls of bf16 operands on CPUs.

    auto: upcast where this CPU has no bf16 kernels; upcast: always; any other: torch's own kernels.
    """
    _Selection.upcast = not HAS_BF16_KERNELS if form == "auto" else form == "upcast"


@contextmanager
def bf16_matmul(form: BackendName) -> Iterator[None]:
    """`select_bf16_matmul` inside a `with` block."""
    before = _Selection.upcast
    select_bf16_matmul(form)
    try:
        yield
    finally:
        _Selection.upcast = before


def is_upcast(x: Tensor) -> bool:
    """Whether a matmul of this operand is computed in fp32 on upcast operands."""
    return _Selection.upcast and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.mm` with upcast if selected: a [t, k], b [k, m] -> [t, m]."""
    if not is_upcast(a):
        return torch.mm(a, b, out=out)
    return _rounded(torch.mm(a.float(), b.float()), a.dtype, out)


def bmm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.bmm` with upcast if selected: a [b, t, k], b [b, k, m] -> [b, t, m]."""
    if not is_upcast(a):
        return torch.bmm(a, b, out=out)
    return _rounded(torch.bmm(a.float(), b.float()), a.dtype, out)


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """torch's `grouped_mm` with upcast if selected."""
    if not is_upcast(a):
        return torch.nn.functional.grouped_mm(a, b, offs=offs)
    return torch.nn.functional.grouped_mm(a.float(), b.float(), offs=offs).to(a.dtype)


def einsum(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum` of two operands with upcast if selected."""
    if not is_upcast(a):
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:  # Any: torch's own options, passed on
    """torch's SDPA with upcast if selected, also in backward."""
    attend = torch.nn.functional.scaled_dot_product_attention
    if not is_upcast(q):
        return attend(q, k, v, attn_mask=attn_mask, **options)
    mask = (
        attn_mask.float() if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
    )
    return attend(q.float(), k.float(), v.float(), attn_mask=mask, **options).to(q.dtype)


def _rounded(product: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return product.to(dtype) if out is None else out.copy_(product)


Context = Any  # autograd's `ctx`, which accepts any attribute


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
MIN_ONEDNN_MULTIPLICATIONS = 1 << 23
"""Minimum multiplications of a matmul for oneDNN; below, its overhead exceeds its gain."""


class SmallBatchKernel(Protocol):
    """Matmuls that replace torch's for few rows in `torch.inference_mode`, on CPUs: implemented in
    `kernels/linear_small_batch.py`."""

    def should_use(self, x: Tensor, w: Tensor, rows: int) -> bool:
        """Return whether it supports `x @ w.T` with at most `rows` rows per weight matrix and is
        faster."""

    def linear(self, x: Tensor, w: Tensor, scales: Tensor | None = None) -> Tensor:
        """x [t, i], w [o, i] -> y [t, o]; int8 weights have the scale of each output."""

    def grouped_linear(
        self, x: Tensor, w: Tensor, counts: Sequence[int], scales: Tensor | None = None
    ) -> Tensor:
        """x [r, i], sorted by expert, w [e o, i], rows of each expert [e] -> y [r, o]; int8 weights
        have the scale of each output [e o]."""


class _SmallBatchSelection(threading.local):
    """The small-batch kernel of a thread."""

    kernel: SmallBatchKernel | None = None


_small_batch = _SmallBatchSelection()


@contextmanager
def small_batch_kernel(kernel: SmallBatchKernel | None) -> Iterator[None]:
    """Use a kernel for matmuls of few rows inside a `with` block, in this thread and without
    gradients. Without it nothing changes, so training is not affected."""
    before = _small_batch.kernel
    _small_batch.kernel = kernel
    try:
        yield
    finally:
        _small_batch.kernel = before


def find_small_batch_kernel(x: Tensor, w: Tensor, rows: int) -> SmallBatchKernel | None:
    """Return the small-batch kernel of this thread if it should compute `x @ w.T` with at most
    `rows` rows per weight matrix."""
    kernel = _small_batch.kernel
    if kernel is None or not runs_inference() or w.dtype not in (x.dtype, torch.int8):
        return None
    return kernel if kernel.should_use(x, w, rows) else None


def forward(x: Tensor, w: Tensor) -> Tensor:
    """`y = x @ w.T`: x [t, i], w [o, i] -> y [t, o]; of few rows by the small-batch kernel, if one
    is selected and no gradients are needed."""
    kernel = find_small_batch_kernel(x, w, x.shape[0])
    return _product(x, w) if kernel is None else kernel.linear(x, w)


def runs_inference() -> bool:
    """Whether matmuls run in `torch.inference_mode`, which torch.compile cannot trace."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


class _NoBackward:
    """Context of an autograd function in inference mode: nothing is saved for backward."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Save nothing."""


def apply_function(
    function: type[Function], *arguments: object
) -> Any:  # Tensor or a tuple of tensors
    """Call an autograd function; in inference mode only its forward, without autograd, which takes
    longer than an operation on a few rows (measured: 0.6 of 21 ms per token of a 29M Llama)."""
    if runs_inference():
        return function.forward(_NoBackward(), *arguments)
    return function.apply(*arguments)


def torch_forward(x: Tensor, w: Tensor) -> Tensor:
    """`forward` by torch, whatever is selected: x [t, i], w [o, i] -> y [t, o]."""
    return _product(x, w)


def input_grad(dy: Tensor, w: Tensor) -> Tensor:
    """Input gradient: dy [t, o], w [o, i] -> dx [t, i]."""
    return _product(dy, w.t())


def weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    """Weight gradient: dy [t, o], x [t, i] -> dw [o, i]."""
    return mm(dy.t(), x)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T`: a [t, k], b [m, k], any strides -> [t, m].

    For fp32 on x86, torch uses MKL. oneDNN, which every such torch build includes, takes 0.88 of
    MKL's time (AMD Zen 4 with AVX-512, torch 2.13, 2048 tokens, weights of 256 x 512 to 3072 x
    512). It gains nothing for weight gradients, whose operands are both transposed, so these use
    `torch.mm`. bf16 uses oneDNN anyway, or is upcast where oneDNN has no bf16 kernels; except for
    one row, where torch is limited by reading `b`.
    """
    if is_upcast(a) and not (a.shape[0] == 1 and b.is_contiguous()):
        return _product(a.float(), b.float()).to(a.dtype)
    onednn_pays = (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.shape[0] * b.numel() >= MIN_ONEDNN_MULTIPLICATIONS
    )
    if onednn_pays and HAS_ONEDNN and not torch.compiler.is_compiling():
        product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
        return product
    return torch.mm(a, b.t())


class MatmulOps:
    """Forward, input-gradient and weight-gradient matmuls of a linear layer.

    Precision recipes replace this object instead of the layer. A subclass may hold state, for
    example scales; each layer then has its own object.
    """

    dtype: torch.dtype | None = None
    """Dtype that operands are converted to; None: they are not."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x [t, i], w [o, i] -> y [t, o]."""
        return forward(x, w)

    def input_grad(self, dy: Tensor, w: Tensor) -> Tensor:
        """dy [t, o], w [o, i] -> dx [t, i]."""
        return input_grad(dy, w)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy [t, o], x [t, i] -> dw [o, i]."""
        return weight_grad(dy, x)


PLAIN = MatmulOps()
"""Matmuls in the dtype of their operands."""


class CastMatmulOps(MatmulOps):
    """Matmuls whose operands are converted to a dtype first, such as those of routers in fp32.

    Outputs and weight gradients have this dtype, input gradients that of the weight.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """x [t, i], w [o, i] -> y [t, o]."""
        return x.to(self.dtype) @ w.to(self.dtype).t()

    def input_grad(self, dy: Tensor, w: Tensor) -> Tensor:
        """dy [t, o], w [o, i] -> dx [t, i]."""
        return (dy @ w.to(self.dtype)).to(w.dtype)

    def weight_grad(self, dy: Tensor, x: Tensor) -> Tensor:
        """dy [t, o], x [t, i] -> dw [o, i]."""
        return dy.t() @ x.to(self.dtype)


class GradAccumulator(Protocol):
    """Accumulates the gradient of one weight matrix (fused weight-gradient accumulation, Megatron's
    main_grad) instead of autograd's `.grad`.

    An accumulator may store its inputs and add them later, so callers must not modify these tensors
    afterwards.
    """

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        """Add `dy.T @ x`, computed by `matmul_ops`: x [t, i], dy [t, o] for a weight [o, i]."""

    def gradient(self, dw: Tensor) -> None:
        """Add a computed gradient: dw [o, i]."""

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        """Add row i of dy [t, i] to row `rows[i]` of the gradient: rows [t] int64, may repeat."""


def add_product_(total: Tensor, x: Tensor, dy: Tensor, matmul_ops: MatmulOps = PLAIN) -> Tensor:
    """Compute `total += dy.T @ x` in place: total [o, i], of any dtype. Default implementation of
    gradient accumulators.

    If all dtypes are equal, a plain matmul accumulates into `total` directly, which saves a pass
    over a matrix of the weight's size.
    """
    if matmul_ops is PLAIN and total.dtype == dy.dtype == x.dtype:
        return (
            total.add_(torch.mm(dy.float().t(), x.float()))
            if is_upcast(dy)
            else total.addmm_(dy.t(), x)
        )
    return total.add_(matmul_ops.weight_grad(dy, x))


def stacked(parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all `parameters`: a view if they are adjacent in memory, else a
    copy."""
    if len(parameters) == 1:
        return parameters[0]
    first = parameters[0]
    if not _are_adjacent_in_memory(parameters):
        return torch.cat(list(parameters))
    rows = sum(p.shape[0] for p in parameters)
    return first.as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())


def _are_adjacent_in_memory(parameters: Sequence[Tensor]) -> bool:
    """Return whether each contiguous matrix starts where the previous one ends, in one storage."""
    if torch.compiler.is_compiling():  # torch.compile does not expose storages
        return False
    first = parameters[0]
    storage, offset = first.untyped_storage()._cdata, first.storage_offset()
    for p in parameters:
        if (
            not p.is_contiguous()
            or p.untyped_storage()._cdata != storage
            or p.storage_offset() != offset
        ):
            return False
        offset += p.numel()
    return True


def linear(
    x: Tensor,
    parameters: Sequence[Tensor],
    *,
    grad_accumulator: GradAccumulator | None = None,
    matmul_ops: MatmulOps = PLAIN,
) -> Tensor:
    """`x @ W.T`, where W is the concatenation of `parameters` along the rows (for example Q, K and
    V).

    x [t, i], parameters [o_1, i], [o_2, i] ... -> [t, o_1 + o_2 ...]. Backward computes dx first.
    With a gradient accumulator it then passes (x, dy) on once for all parameters if any requires a
    gradient, and autograd gets none; without one, each parameter gets its rows of dw. If x is
    recomputed in backward, what it is recomputed from is saved instead of it; if no parameter
    requires a gradient, nothing is. In inference mode no autograd function is called, which would
    take longer than a small matmul.
    """
    if runs_inference():
        return matmul_ops.forward(x, stacked(parameters))
    y: Tensor = LinearFunction.apply(x, grad_accumulator, matmul_ops, *parameters)  # type: ignore[no-untyped-call]  # torch's own
    return y


def save(ctx: Context, x: Tensor, parameters: Sequence[Tensor], wanted: Sequence[bool]) -> None:
    """Save the parameters and, if any of them requires a gradient, x [t, i] or what it is
    recomputed from, for `saved_input`."""
    if any(wanted):
        ctx.saved_x, inputs = tensors_to_save(x)
        ctx.save_for_backward(*parameters, *inputs)
    else:
        ctx.save_for_backward(*parameters)


def saved_input(ctx: Context, wanted: Sequence[bool], inputs: Sequence[Tensor]) -> Tensor | None:
    """Return x in backward, from the saved tensors after the parameters; None if no parameter
    requires a gradient."""
    return ctx.saved_x.restore(inputs) if any(wanted) else None


def weight_gradients(
    ctx: Context, parameters: Sequence[Tensor], wanted: Sequence[bool], x: Tensor | None, dy: Tensor
) -> list[Tensor | None]:
    """Pass x [t, i] and dy [t, o] to the gradient accumulator, or return each parameter's rows of
    dw; None for each without x."""
    if x is None:
        return [None] * len(parameters)
    if ctx.grad_accumulator is not None:
        ctx.grad_accumulator.product(x, dy, ctx.matmul_ops)
        return [None] * len(parameters)
    parts = ctx.matmul_ops.weight_grad(dy, x).split([p.shape[0] for p in parameters])
    return [part if want else None for part, want in zip(parts, wanted, strict=True)]


class WeightMatmul(NamedTuple):
    """The matmul of one linear layer: its weights, and how it is computed."""

    parameters: Sequence[Tensor]
    grad_accumulator: GradAccumulator | None = None
    matmul_ops: MatmulOps = PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        """Return `linear` of x [t, i] -> [t, o]."""
        return linear(
            x,
            self.parameters,
            grad_accumulator=self.grad_accumulator,
            matmul_ops=self.matmul_ops,
        )


def reference_linear(
    x: Tensor, parameters: Sequence[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Reference implementation of `linear` in plain PyTorch operations; `dtype`: that of the
    products, unset: of x."""
    if dtype is not None:
        x, parameters = x.to(dtype), [p.to(dtype) for p in parameters]
    return torch.cat([x @ p.t() for p in parameters], dim=-1)


class LinearFunction(Function):
    """Autograd function of `linear`."""

    reference = staticmethod(
        lambda x, grad_accumulator, matmul_ops, *parameters: reference_linear(
            x, parameters, matmul_ops.dtype
        )
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        grad_accumulator: GradAccumulator | None,
        matmul_ops: MatmulOps,
        *parameters: Tensor,
    ) -> Tensor:
        """x [t, i] -> y [t, o]."""
        save(ctx, x, parameters, ctx.needs_input_grad[3:])
        ctx.grad_accumulator, ctx.matmul_ops = grad_accumulator, matmul_ops
        return matmul_ops.forward(x, stacked(parameters))

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dx [t, i], and dw to the gradient accumulator or to the parameters."""
        wanted = ctx.needs_input_grad[3:]
        saved = ctx.saved_tensors
        parameters, inputs = saved[: len(wanted)], saved[len(wanted) :]
        dx = ctx.matmul_ops.input_grad(dy, stacked(parameters)) if ctx.needs_input_grad[0] else None
        x = saved_input(ctx, wanted, inputs)
        return dx, None, None, *weight_gradients(ctx, parameters, wanted, x, dy)

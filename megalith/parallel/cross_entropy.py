"""Fused output head and cross entropy over a vocabulary-parallel weight: logits exist for one chunk
of tokens at a time; also greedy decoding and logit statistics.

Two small collectives per chunk: the ranks of the vocabulary reduce each token's largest logit, and
then its sum of exponentials and its target logit. Source of the parallel form: Shoeybi et al. 2019,
arXiv:1909.08053, sec. 3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels import cpu_threads
from megalith.kernels.backend import FusedBackend, select_backend
from megalith.kernels.linear import (
    PLAIN,
    Context,
    GradAccumulator,
    MatmulOps,
    add_product_,
    linear,
)
from megalith.parallel.collectives import mark_partial, reduce_from_tp
from megalith.parallel.group import Group, all_reduce_, all_reduce_max_
from megalith.plan.costs import loss_chunk


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Transform of the output head's products to logits: s = scale * product, then softcap * tanh(s
    / softcap). Computed in fp32 or float64, unless it is the identity."""

    scale: float = 1.0
    softcap: float | None = None
    """Upper limit of |logit|; unset: none. Source: Gemma Team 2024, arXiv:2408.00118, section 2."""

    def scores(self, products: Tensor) -> Tensor:
        """Return the logits of products [t, v] -> [t, v], in place where the dtype allows."""
        if self == IDENTITY_LOGITS:
            return products
        wide = products.to(torch.promote_types(products.dtype, torch.float32)).mul_(self.scale)
        return wide if self.softcap is None else wide.div_(self.softcap).tanh_().mul_(self.softcap)

    def slopes(self, scores: Tensor) -> Tensor | float | None:
        """Return the derivative of the logits [t, v] with respect to the products: 0 where a logit
        is infinite; None: 1."""
        if self.softcap is not None:
            return (scores / self.softcap).square_().neg_().add_(1).clamp_(min=0).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


IDENTITY_LOGITS = LogitTransform()


class CrossEntropyResult(NamedTuple):
    """Cross entropy and statistics of each token's logits over the whole vocabulary."""

    loss: Tensor
    """A scalar, or [t]."""

    logsumexp: Tensor
    """[t]: log of the sum of exp(logit), also of tokens without a label."""

    largest: Tensor
    """[t]: the largest logit; not differentiable."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The rows of a vocabulary-parallel weight that this rank holds, and how logits are computed
    from them."""

    group: Group
    """The ranks over which the vocabulary is sharded."""

    first_row: int
    """Token id of the first local row."""

    vocab_size: int
    """Rows of the padded vocabulary from there on are padding and are ignored."""

    logit_transform: LogitTransform = IDENTITY_LOGITS
    grad_accumulator: GradAccumulator | None = None
    """Receives the weight gradient; unset: autograd."""

    matmul_ops: MatmulOps = PLAIN


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """Sum over labeled tokens of -log softmax(logits(x @ W.T))[label] over the whole vocabulary W:
    a scalar in fp32 or fp64.

    x [t, h], replicated over `vocab.group`; weight [v_local, h], the rows of `vocab`; labels [t]
    int64, negative where the loss mask excludes a token. The loss is the same on every rank of
    `vocab.group`; dx is a partial sum over it.

    With label `smoothing` a label has probability 1 - smoothing, and the other tokens of the
    vocabulary share the rest evenly: see `to_torch_label_smoothing`. With `z_loss` a labeled
    token adds z_loss * logsumexp(logits)^2, which keeps the softmax close to normalized (Chowdhery
    et al. 2022, arXiv:2204.02311, section 5).

    The required gradients are computed in forward, while a chunk's logits exist, and backward only
    scales them. Until then they occupy one dw [v_local, h] in fp32 and one dx [t, h]. `chunk`:
    tokens per chunk; kernel="reference" uses a single chunk.
    """
    head = HeadShard.build(
        weight, vocab, smoothing=smoothing, z_loss=z_loss, chunk=chunk, kernel=kernel
    )
    return _sum_losses(x, weight, labels, head, measures=False).loss


def linear_cross_entropy_with_stats(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> CrossEntropyResult:
    """Return `linear_cross_entropy` together with logit statistics of each token, which are not
    differentiable."""
    head = HeadShard.build(
        weight, vocab, smoothing=smoothing, z_loss=z_loss, chunk=chunk, kernel=kernel
    )
    return _sum_losses(x, weight, labels, head, measures=True)


def recomputed_cross_entropy_with_stats(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> CrossEntropyResult:
    """Return `recomputed_cross_entropy` together with logit statistics of each token; logsumexp is
    differentiable."""
    each = token_losses_with_stats(
        x, weight, labels, vocab, smoothing=smoothing, chunk=chunk, kernel=kernel
    )
    return each._replace(loss=_with_z_loss(each, labels, z_loss).sum())


def recomputed_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """`linear_cross_entropy` whose backward recomputes the logits: one matmul more, but no
    gradients are stored between forward and backward."""
    return recomputed_cross_entropy_with_stats(
        x, weight, labels, vocab, smoothing=smoothing, z_loss=z_loss, chunk=chunk, kernel=kernel
    ).loss


def _sum_losses(
    x: Tensor, weight: Tensor, labels: Tensor, head: "HeadShard", *, measures: bool
) -> CrossEntropyResult:
    if head.kernel == "reference":
        measured = _plain_losses(x, weight, labels, head)
        return measured._replace(loss=_with_z_loss(measured, labels, head.z_loss).sum())
    grad = torch.is_grad_enabled()
    wanted = RequiredOutputs(
        x=grad and x.requires_grad, weight=grad and weight.requires_grad, measures=measures
    )
    losses = LossSumFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
        x, weight, labels, head.vocab.group, head, wanted
    )
    return CrossEntropyResult(*losses)


def _with_z_loss(each: CrossEntropyResult, labels: Tensor, z_loss: float) -> Tensor:
    """Return each token's loss including its z-loss: [t]."""
    if not z_loss:
        return each.loss
    return each.loss + z_loss * each.logsumexp.square().masked_fill(labels < 0, 0.0)


def token_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """Return the cross entropy of each token: [t], 0 where a token has no label; fp32 or float64.

    The weight gradient of a weighted sum of losses does not factor by token, so backward recomputes
    each chunk's logits (one matmul more than `linear_cross_entropy`).
    """
    return token_losses_with_stats(
        x, weight, labels, vocab, smoothing=smoothing, chunk=chunk, kernel=kernel
    ).loss


def token_losses_with_stats(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabShard,
    *,
    smoothing: float = 0.0,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> CrossEntropyResult:
    """Return `token_losses` together with logit statistics of each token; losses and logsumexp are
    differentiable."""
    head = HeadShard.build(weight, vocab, smoothing=smoothing, chunk=chunk, kernel=kernel)
    if kernel == "reference":
        return _plain_losses(x, weight, labels, head)
    losses = TokenLossesFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
        x, weight, labels, vocab.group, head
    )
    return CrossEntropyResult(*losses)


def to_torch_label_smoothing(smoothing: float, vocab_size: int) -> float:
    """Return torch's label_smoothing, the probability that all tokens share evenly, for `smoothing`
    shared by all tokens except the label.

    Source: Szegedy et al. 2015, arXiv:1512.00567, section 7.

    >>> to_torch_label_smoothing(0.1, 5)
    0.125
    """
    return smoothing * vocab_size / (vocab_size - 1) if smoothing else 0.0


def reference_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    logit_transform: LogitTransform = IDENTITY_LOGITS,
    smoothing: float = 0.0,
) -> Tensor:
    """Reference implementation of `token_losses` on one rank with the whole vocabulary, in plain
    PyTorch operations: [t]."""
    logits = (x @ weight[:vocab_size].t()).to(
        torch.promote_types(x.dtype, torch.float32)
    ) * logit_transform.scale
    if logit_transform.softcap is not None:
        logits = logit_transform.softcap * torch.tanh(logits / logit_transform.softcap)
    spread = to_torch_label_smoothing(smoothing, vocab_size)
    return torch.nn.functional.cross_entropy(
        logits, labels.clamp(min=-1), ignore_index=-1, reduction="none", label_smoothing=spread
    )


def _plain_losses(
    x: Tensor, weight: Tensor, labels: Tensor, head: "HeadShard"
) -> CrossEntropyResult:
    """`reference_cross_entropy` with logit statistics, for a vocabulary that is sharded over ranks,
    or with a gradient accumulator."""
    transform, group = head.vocab.logit_transform, head.vocab.group
    products = linear(
        x,
        [weight],
        grad_accumulator=head.vocab.grad_accumulator,
        matmul_ops=head.vocab.matmul_ops,
    )
    logits = products.to(torch.promote_types(x.dtype, torch.float32)) * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    padding = torch.arange(weight.shape[0], device=x.device) >= head.rows
    logits = logits.masked_fill(padding, float("-inf"))
    largest = all_reduce_max_(logits.detach().amax(-1), group)
    total = reduce_from_tp(
        mark_partial((logits - largest.unsqueeze(1)).exp().sum(-1), group), group
    )
    rows, is_local = head.target(labels)
    target = (
        torch.where(is_local, logits.gather(1, rows), largest.unsqueeze(1)).squeeze(1) - largest
    )
    if head.spread:
        logit_sums = (logits - largest.unsqueeze(1)).masked_fill(padding, 0.0).sum(-1)
        target = (1 - head.spread) * target + head.spread_each * logit_sums
    losses = total.log() - reduce_from_tp(mark_partial(target, group), group)
    return CrossEntropyResult(losses.masked_fill(labels < 0, 0.0), largest + total.log(), largest)


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The local shard of the output head, and the settings of its loss."""

    vocab: VocabShard

    rows: int
    """Number of local rows that are not padding; may be 0."""

    chunk: int
    """Tokens per chunk."""

    kernel: BackendName

    spread: float
    """Label smoothing: the probability that all tokens share evenly."""

    spread_each: float
    """The part of `spread` that each token gets."""

    z_loss: float
    """Coefficient of the square of a labeled token's logsumexp."""

    @staticmethod
    def build(
        weight: Tensor,
        vocab: VocabShard,
        *,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
        chunk: int | None = None,
        kernel: BackendName = "auto",
    ) -> "HeadShard":
        """Return the head of the local rows `weight` [v_local, h]."""
        rows = max(0, min(weight.shape[0], vocab.vocab_size - vocab.first_row))
        # The chunk size depends only on values that are equal on all ranks, not on the local rows:
        # every chunk runs collectives.
        default_chunk = loss_chunk(vocab.vocab_size, ranks=vocab.group.size)
        spread = to_torch_label_smoothing(smoothing, vocab.vocab_size)
        return HeadShard(
            vocab,
            rows,
            default_chunk if chunk is None else chunk,
            kernel,
            spread,
            spread / vocab.vocab_size,
            z_loss,
        )

    def engine(self, logits: Tensor) -> FusedBackend:
        """Return the backend for these logits."""
        return select_backend(self.kernel if self.rows else "torch", logits, op="cross_entropy")

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the local rows without padding; one padding row if there are no others, so that
        every rank takes part in the collectives."""
        return weight[: max(1, self.rows)]

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [c, h] -> logits [c, rows], products rounded to x's dtype; -inf on a rank that has only
        padding."""
        products = self.vocab.matmul_ops.forward(x, self.matrix(weight))
        logits = self.vocab.logit_transform.scores(products)
        return logits if self.rows else logits.fill_(float("-inf"))

    def target(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each label's local row [c, 1] (0 if it is not local), and whether it is local [c,
        1]."""
        local = (labels - self.vocab.first_row).unsqueeze(1)
        is_local = (local >= 0) & (local < self.rows) & (labels >= 0).unsqueeze(1)
        return local * is_local, is_local


class RequiredOutputs(NamedTuple):
    """The gradients and statistics to compute in forward."""

    x: bool
    weight: bool

    measures: bool = False
    """Whether each token's logsumexp and largest logit are required."""


class Softmax(NamedTuple):
    """Softmax statistics of each token over the whole vocabulary, in fp32 or float64."""

    largest: Tensor
    """[c]: the largest logit."""

    total: Tensor
    """[c]: sum of exp(logit - largest)."""

    target: Tensor
    """[c]: the label's logit - largest, 0 without a label; with label smoothing, the expected value
    over the target distribution."""

    def losses(self, labels: Tensor) -> Tensor:
        """Return the loss [c]: -log p(label), or its expected value over the target distribution; 0
        without a label."""
        return (self.total.log() - self.target).masked_fill_(labels < 0, 0.0)

    def logsumexp(self) -> Tensor:
        """Return log of the sum of exp(logit) over the whole vocabulary: [c]."""
        return self.largest + self.total.log()


def softmax_over_ranks(logits: Tensor, labels: Tensor, head: HeadShard) -> Softmax:
    """Return the softmax statistics with two small collectives over the vocabulary's ranks,
    for any labels; logits are not modified."""
    local_largest, local_total = ROW_SUMS[head.engine(logits)](logits)
    largest = all_reduce_max_(local_largest.clone(), head.vocab.group)
    rows, is_local = head.target(labels)
    target = (logits.gather(1, rows).squeeze(1) - largest).masked_fill_(~is_local.squeeze(1), 0.0)
    if head.spread and head.rows:
        logit_sums = (logits.to(target.dtype) - largest.unsqueeze(1)).sum(-1)
        target.mul_(1 - head.spread).add_(logit_sums, alpha=head.spread_each)
    sums = all_reduce_(
        torch.stack([local_total.mul_((local_largest - largest).exp_()), target]), head.vocab.group
    )
    return Softmax(largest, sums[0], sums[1])


def logit_gradient(
    logits: Tensor,
    labels: Tensor,
    softmax: Softmax,
    weights: Tensor,
    head: HeadShard,
    more: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the products: ((weights + more) * p - weights * target distribution) *
    slopes, [c, rows], in the logits' memory if possible.

    weights [c]: gradient of each token's loss, 0 without a label; more [c]: gradient of its
    logsumexp. The entry at the label is computed separately: in bf16, subtracting 1 would lose the
    last digits of p.
    """
    rows, is_local = head.target(labels)
    label_probability = _label_logits(logits, rows, softmax, head).exp() / softmax.total
    at_label = label_probability - 1
    at_label = (at_label.add_(head.spread - head.spread_each) if head.spread else at_label).mul_(
        weights
    )
    at_label = at_label if more is None else at_label.addcmul_(label_probability, more)
    factor = (weights if more is None else weights + more) / softmax.total
    smoothing_grad = weights * head.spread_each if head.spread and head.rows else None
    backend = head.engine(logits)
    if backend == "triton":
        row = torch.where(is_local, rows, -1).squeeze(1)
        return _triton_gradient(
            logits,
            softmax.largest,
            factor,
            row,
            at_label,
            smoothing_grad,
            head.vocab.logit_transform,
        )
    slopes = head.vocab.logit_transform.slopes(logits)  # before the gradient overwrites the logits
    gradient = (_loop_scaled_exp if backend == "numba" else _scaled_exp)(
        logits, softmax.largest, factor
    )
    gradient = (
        gradient
        if smoothing_grad is None
        else gradient.sub_(smoothing_grad.unsqueeze(1).to(gradient.dtype))
    )
    at_label = at_label.unsqueeze(1).to(gradient.dtype)
    gradient.scatter_(1, rows, torch.where(is_local, at_label, gradient.gather(1, rows)))
    return gradient if slopes is None else gradient.mul_(slopes)


def _label_logits(logits: Tensor, rows: Tensor, softmax: Softmax, head: HeadShard) -> Tensor:
    """Return each label's logit - largest, [c]; with label smoothing, only of local labels."""
    if not head.spread:
        return softmax.target
    return logits.gather(1, rows).squeeze(1).to(softmax.largest.dtype) - softmax.largest


def _row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each row of [c, rows] and the sum of exp(logit - largest): [c]
    each, in fp32 or float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(-1)
    # A row of -inf (a rank that has only padding) sums to 0, not to the NaN of inf - inf.
    return largest, (wide - largest.clamp(min=torch.finfo(wide.dtype).min).unsqueeze(1)).exp_().sum(
        -1
    )


def _loop_row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    largest, total = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
    cpu_threads.run(
        "row_sums", logits.dtype, *logits.shape, logits, largest, total, elements=logits.numel()
    )
    return largest, total


def _scaled_exp(logits: Tensor, largest: Tensor, factor: Tensor) -> Tensor:
    """Return factor * exp(logit - largest), [c, rows] in the logits' dtype."""
    wide = logits.to(factor.dtype)
    return wide.sub_(largest.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1)).to(logits.dtype)


def _loop_scaled_exp(logits: Tensor, largest: Tensor, factor: Tensor) -> Tensor:
    """Compute `_scaled_exp` in place."""
    cpu_threads.run(
        "logit_gradients",
        logits.dtype,
        *logits.shape,
        largest.contiguous(),
        factor.contiguous(),
        logits,
        elements=logits.numel(),
    )
    return logits


def _triton_row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    from megalith.kernels.triton import cross_entropy

    return cross_entropy.row_sums(logits)


ROW_SUMS: Mapping[FusedBackend, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "torch": _row_sums,
    "numba": _loop_row_sums,
    "triton": _triton_row_sums,
}


def _triton_gradient(
    logits: Tensor,
    largest: Tensor,
    factor: Tensor,
    row: Tensor,
    at_label: Tensor,
    even: Tensor | None,
    logit_transform: LogitTransform,
) -> Tensor:
    """Compute `logit_gradient` in place."""
    from megalith.kernels.triton import cross_entropy

    scale, cap = logit_transform.scale, logit_transform.softcap
    return cross_entropy.gradient_(
        logits, largest, factor, row, at_label, even, scale=scale, softcap=cap
    )


def _add_gradients(
    dlogits: Tensor,
    x: Tensor,
    weight: Tensor,
    head: HeadShard,
    dx: Tensor | None,
    dw: Tensor | None,
) -> None:
    """Write the gradient of x to dx [c, h] and add that of the weight to dw [v_local, h], from a
    chunk's logit gradient [c, rows]."""
    dlogits = dlogits.to(x.dtype)
    if dx is not None:
        dx.copy_(head.vocab.matmul_ops.input_grad(dlogits, head.matrix(weight)))
    if dw is not None:
        add_product_(head.matrix(dw), x, dlogits, head.vocab.matmul_ops)


class LossSumFunction(Function):
    """Autograd function of `linear_cross_entropy`."""

    moves: ClassVar[tuple[str, str]] = ("V", "I")

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        head: HeadShard,
        wanted: RequiredOutputs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h] -> the scalar loss, and logsumexp and largest logit of each token (empty unless
        required); saves dx and dw for a gradient of 1."""
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = x.new_zeros((), dtype=wide)
        logit_stats = x.new_empty(2, x.shape[0] if wanted.measures else 0, dtype=wide)
        dx = torch.empty_like(x) if wanted.x else None
        dw = x.new_zeros(weight.shape, dtype=wide) if wanted.weight else None
        for start in range(0, x.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            logits = head.logits(x[rows], weight)
            softmax = softmax_over_ranks(logits, labels[rows], head)
            loss += softmax.losses(labels[rows]).sum()
            dlogsumexp = None
            if head.z_loss:
                dlogsumexp = (
                    2 * head.z_loss * softmax.logsumexp().masked_fill_(labels[rows] < 0, 0.0)
                )
                loss += (dlogsumexp * softmax.logsumexp()).sum() / 2
            if wanted.measures:
                torch.stack([softmax.logsumexp(), softmax.largest], out=logit_stats[:, rows])
            if wanted.x or wanted.weight:
                weights = (labels[rows] >= 0).to(wide)
                dlogits = logit_gradient(logits, labels[rows], softmax, weights, head, dlogsumexp)
                _add_gradients(dlogits, x[rows], weight, head, None if dx is None else dx[rows], dw)
        ctx.save_for_backward(dx, dw)
        ctx.grad_accumulator, ctx.dtype = head.vocab.grad_accumulator, weight.dtype
        logsumexp, largest = logit_stats
        ctx.mark_non_differentiable(logsumexp, largest)
        return loss, logsumexp, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dloss: Tensor, *nothing: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the saved gradients in place, because dw may be the largest tensor; a second
        backward raises an error."""
        dx, dw = (None if saved is None else saved.mul_(dloss) for saved in ctx.saved_tensors)
        return dx, _deliver(dw, ctx.grad_accumulator, ctx.dtype), None, None, None, None


class TokenLossesFunction(Function):
    """Autograd function of `token_losses`."""

    moves: ClassVar[tuple[str, str]] = ("V", "I")

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        head: HeadShard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h] -> three tensors [t], as in `CrossEntropyResult`; saves x and three numbers per
        token."""
        softmax_stats = x.new_empty(
            3, x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32)
        )
        for start in range(0, x.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            softmax = softmax_over_ranks(head.logits(x[rows], weight), labels[rows], head)
            torch.stack(softmax, out=softmax_stats[:, rows])
        ctx.save_for_backward(x, weight, labels, softmax_stats)
        ctx.head = head
        ctx.set_materialize_grads(False)  # dlogsumexp is None if logsumexp is unused
        softmax = Softmax(*softmax_stats)
        largest = softmax.largest.clone()  # an output must not be a view of a saved tensor
        ctx.mark_non_differentiable(largest)
        return softmax.losses(labels), softmax.logsumexp(), largest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, dlosses: Tensor | None, dlogsumexp: Tensor | None, nothing: None
    ) -> tuple[Tensor | None, ...]:
        """dlosses, dlogsumexp [t] -> dx [t, h] and dw; recomputes the logits chunk by chunk,
        without collectives."""
        x, weight, labels, softmax_stats = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = (
            x.new_zeros(weight.shape, dtype=softmax_stats.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        weights = softmax_stats.new_zeros(len(x)) if dlosses is None else dlosses * (labels >= 0)
        for start in range(0, x.shape[0], ctx.head.chunk):
            rows = slice(start, start + ctx.head.chunk)
            logits = ctx.head.logits(x[rows], weight)
            more = None if dlogsumexp is None else dlogsumexp[rows]
            dlogits = logit_gradient(
                logits,
                labels[rows],
                Softmax(*softmax_stats[:, rows]),
                weights[rows],
                ctx.head,
                more,
            )
            _add_gradients(dlogits, x[rows], weight, ctx.head, None if dx is None else dx[rows], dw)
        accumulator = ctx.head.vocab.grad_accumulator
        return dx, _deliver(dw, accumulator, weight.dtype), None, None, None


def _deliver(
    dw: Tensor | None, grad_accumulator: GradAccumulator | None, dtype: torch.dtype
) -> Tensor | None:
    """Pass dw to the gradient accumulator if there is one; else return it to autograd."""
    if dw is None:
        return None
    if grad_accumulator is None:
        return dw.to(dtype)
    grad_accumulator.gradient(dw)
    return None


# --- greedy decoding over a vocabulary-parallel output head: no rank materializes the logits of the
# whole vocabulary


def greedy_tokens(x: Tensor, weight: Tensor, vocab: VocabShard) -> Tensor:
    """Return the token with the largest logit for each x: int64 [t], the same on every rank of
    `vocab.group`; of equal logits, the lowest token.

    x [t, h], replicated; weight [v_local, h], the rows of `vocab`. Logit scaling and soft caps are
    monotonic and are not applied.
    """
    weight = weight[: max(0, vocab.vocab_size - vocab.first_row)]
    parts = x.split(loss_chunk(vocab.vocab_size, ranks=vocab.group.size))
    return torch.cat([_argmax_tokens(part, weight, vocab) for part in parts])


def _argmax_tokens(x: Tensor, weight: Tensor, vocab: VocabShard) -> Tensor:
    if len(weight):
        largest, row = vocab.matmul_ops.forward(x, weight).max(-1)
    else:  # this rank has only padding rows
        largest, row = (
            x.new_full((len(x),), float("-inf")),
            torch.zeros(len(x), dtype=torch.int64, device=x.device),
        )
    overall = all_reduce_max_(largest.clone(), vocab.group)
    candidate = torch.where(largest == overall, row + vocab.first_row, vocab.vocab_size)
    return -all_reduce_max_(-candidate, vocab.group)


# --- loss over the vocabulary that also records logit statistics: the largest logit and the z-loss


@dataclass(slots=True)
class LogitStats:
    """Logit statistics of labeled tokens since the last call of `pop`, on the device of the
    head."""

    z: Tensor | None = None
    """float64: sum of z_loss * logsumexp^2; None: no microbatch yet."""

    largest: Tensor | None = None
    """float64: the largest logit, -inf without labels."""

    def record(self, measured: CrossEntropyResult, labels: Tensor, z_loss: float) -> None:
        """Add the statistics of a microbatch."""
        is_unlabeled = labels < 0
        z = (
            z_loss
            * measured.logsumexp.detach().double().square().masked_fill(is_unlabeled, 0.0).sum()
        )
        largest = measured.largest.detach().double().masked_fill(is_unlabeled, float("-inf"))
        # -inf is appended because a microbatch may have no tokens.
        largest = torch.cat([largest, largest.new_full((1,), float("-inf"))]).amax()
        self.z = z if self.z is None else self.z + z
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def pop(self) -> tuple[Tensor | None, Tensor | None]:
        """Return z and the largest logit, and reset both."""
        stats, self.z, self.largest = (self.z, self.largest), None, None
        return stats


@dataclass(frozen=True, slots=True)
class LossWithLogitStats:
    """Summed loss that records logit statistics; calls `compute` and returns its loss only."""

    compute: Callable[..., CrossEntropyResult]
    z_loss: float = 0.0
    logit_stats: LogitStats = field(default_factory=LogitStats)

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard) -> Tensor:
        """Sum over labeled tokens of -log p(label) + z_loss * logsumexp^2."""
        measured = self.compute(x, weight, labels, vocab, z_loss=self.z_loss)
        with torch.no_grad():
            self.logit_stats.record(measured, labels, self.z_loss)
        return measured.loss

"""The output head and its cross entropy in one: logits exist only chunk by chunk, over a vocabulary
split by rows.

The two collectives are small: per chunk of tokens, the ranks of the vocabulary agree on each
token's largest logit, and sum its exponentials and its target's logit. Source of the parallel form:
Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels import cpu
from megalith.kernels.engine import FusedBackend, select_backend
from megalith.kernels.linear import Context, GradAccumulator, add_product_, input_grad, linear
from megalith.kernels.linear import forward as linear_forward
from megalith.parallel.autograd import mark_partial, reduce_from_tp
from megalith.parallel.group import Group, all_reduce_, all_reduce_max_
from megalith.plan.costs import loss_chunk


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """How the products of hidden states and vocabulary become scores: s = scale * product, then
    softcap * tanh(s / softcap). In fp32 or float64, unless nothing is to be done."""

    scale: float = 1.0
    softcap: float | None = None
    """The largest score there can be; unset: none. Source: Gemma Team 2024, arXiv:2408.00118,
    section 2."""

    def scores(self, matmul_ops: Tensor) -> Tensor:
        """What they become, in their memory where the dtype allows: [t, v] -> [t, v]."""
        if self == AS_THEY_ARE:
            return matmul_ops
        wide = matmul_ops.to(torch.promote_types(matmul_ops.dtype, torch.float32)).mul_(self.scale)
        return wide if self.softcap is None else wide.div_(self.softcap).tanh_().mul_(self.softcap)

    def slopes(self, scores: Tensor) -> Tensor | float | None:
        """The derivative of scores by products, from the scores [t, v]: 0 where a score is
        infinite; None: 1."""
        if self.softcap is not None:
            return (scores / self.softcap).square_().neg_().add_(1).clamp_(min=0).mul_(self.scale)
        return None if self.scale == 1.0 else self.scale


AS_THEY_ARE = LogitTransform()


class Measured(NamedTuple):
    """Cross entropy, and what it saw of each token's scores over the whole vocabulary."""

    loss: Tensor
    """One number, or [t]."""

    logsumexp: Tensor
    """[t]: log of the sum of exp(score), also of tokens without a label."""

    largest: Tensor
    """[t]: the largest score. Nothing flows back through it."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """Sum over labeled tokens of -log softmax(readout(x @ W.T))[label], for the whole vocabulary
    W: one fp32 or fp64.

    x [t, h], whole on every rank of `vocab`; weight [v_local, h], rows first_row ... of the padded
    vocabulary; labels [t] int64, negative where a token has no loss, else below `vocab_size` (rows
    from there on are padding and take no part). The loss is the same on every rank of `vocab`; dx
    is this rank's part of a sum over them.

    With `smoothing` a label is 1 - smoothing likely, and all other tokens of the vocabulary share
    the rest evenly: see `spread_of`. With `z_loss` a labeled token adds z_loss *
    logsumexp(scores)^2, which keeps scores near those of a normalized distribution (Chowdhery et
    al. 2022, arXiv:2204.02311, section 5).

    The gradients that are wanted are formed here, while a chunk's logits are at hand; backward only
    scales them. StopFilter then they take one dw [v_local, h] in fp32 and one dx [t, h]. `chunk`:
    tokens at a time; kernel="reference" has all of them at once.
    """
    return _sum_of_losses(
        x,
        weight,
        labels,
        vocab,
        first_row,
        vocab_size,
        logit_transform,
        smoothing,
        z_loss,
        grad_accumulator,
        chunk,
        kernel,
        measures=False,
    ).loss


def measured_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Measured:
    """`linear_cross_entropy`, and with it what it saw of each token, through which nothing flows
    back."""
    return _sum_of_losses(
        x,
        weight,
        labels,
        vocab,
        first_row,
        vocab_size,
        logit_transform,
        smoothing,
        z_loss,
        grad_accumulator,
        chunk,
        kernel,
        measures=True,
    )


def recomputed_measures(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Measured:
    """`recomputed_cross_entropy`, and with it what it saw of each token; logsumexp may be
    differentiated."""
    each = token_measures(
        x,
        weight,
        labels,
        vocab=vocab,
        first_row=first_row,
        vocab_size=vocab_size,
        logit_transform=logit_transform,
        smoothing=smoothing,
        grad_accumulator=grad_accumulator,
        chunk=chunk,
        kernel=kernel,
    )
    return each._replace(loss=_with_z_loss(each, labels, z_loss).sum())


def recomputed_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """`linear_cross_entropy` whose backward computes logits again: one matmul more, and no
    gradients wait for it."""
    return recomputed_measures(
        x,
        weight,
        labels,
        vocab=vocab,
        first_row=first_row,
        vocab_size=vocab_size,
        logit_transform=logit_transform,
        smoothing=smoothing,
        z_loss=z_loss,
        grad_accumulator=grad_accumulator,
        chunk=chunk,
        kernel=kernel,
    ).loss


def _sum_of_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform,
    smoothing: float,
    z_loss: float,
    grad_accumulator: GradAccumulator | None,
    chunk: int | None,
    kernel: BackendName,
    *,
    measures: bool,
) -> Measured:
    head = Head.of(
        weight,
        vocab,
        first_row,
        vocab_size,
        chunk,
        loops=kernel != "torch",
        logit_transform=logit_transform,
    )
    head = replace(head.smoothed(smoothing, vocab_size), z_loss=z_loss, form=kernel)
    if kernel == "reference":
        each = _plain_losses(x, weight, labels, head, grad_accumulator)
        return each._replace(loss=_with_z_loss(each, labels, z_loss).sum())
    grad = torch.is_grad_enabled()
    wanted = Wanted(
        x=grad and x.requires_grad, weight=grad and weight.requires_grad, measures=measures
    )
    losses = LossSumFunction.apply(  # type: ignore[no-untyped-call]  # torch's own
        x, weight, labels, vocab, head, wanted, grad_accumulator
    )
    return Measured(*losses)


def _with_z_loss(each: Measured, labels: Tensor, z_loss: float) -> Tensor:
    """What every token adds to the loss: [t]."""
    if not z_loss:
        return each.loss
    return each.loss + z_loss * each.logsumexp.square().masked_fill(labels < 0, 0.0)


def token_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Tensor:
    """The same loss of each token: [t], 0 where a token has none; fp32 or float64.

    The weight gradient of a weighted sum of losses does not factor by token, so backward computes
    each chunk's logits again (one matmul more than `linear_cross_entropy`).
    """
    return token_measures(
        x,
        weight,
        labels,
        vocab=vocab,
        first_row=first_row,
        vocab_size=vocab_size,
        logit_transform=logit_transform,
        smoothing=smoothing,
        grad_accumulator=grad_accumulator,
        chunk=chunk,
        kernel=kernel,
    ).loss


def token_measures(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
    grad_accumulator: GradAccumulator | None = None,
    chunk: int | None = None,
    kernel: BackendName = "auto",
) -> Measured:
    """`token_losses`, and what they saw of each token; losses and logsumexp may both be
    differentiated."""
    head = Head.of(
        weight,
        vocab,
        first_row,
        vocab_size,
        chunk,
        loops=kernel != "torch",
        logit_transform=logit_transform,
    )
    head = replace(head.smoothed(smoothing, vocab_size), form=kernel)
    if kernel == "reference":
        return _plain_losses(x, weight, labels, head, grad_accumulator)
    return Measured(*TokenLossesFunction.apply(x, weight, labels, vocab, head, grad_accumulator))  # type: ignore[no-untyped-call]  # torch's own


def spread_of(smoothing: float, vocab_size: int) -> float:
    """What all tokens, the label included, share evenly, where the others share `smoothing` of what
    labels are sure of.

    It is what torch calls label_smoothing. Source: Szegedy et al. 2015, arXiv:1512.00567, section
    7.

    >>> spread_of(0.1, 5)
    0.125
    """
    return smoothing * vocab_size / (vocab_size - 1) if smoothing else 0.0


def reference_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    logit_transform: LogitTransform = AS_THEY_ARE,
    smoothing: float = 0.0,
) -> Tensor:
    """What `token_losses` computes where one rank has the whole vocabulary, in plain operations:
    [t]."""
    logits = (x @ weight[:vocab_size].t()).to(
        torch.promote_types(x.dtype, torch.float32)
    ) * logit_transform.scale
    if logit_transform.softcap is not None:
        logits = logit_transform.softcap * torch.tanh(logits / logit_transform.softcap)
    spread = spread_of(smoothing, vocab_size)
    return torch.nn.functional.cross_entropy(
        logits, labels.clamp(min=-1), ignore_index=-1, reduction="none", label_smoothing=spread
    )


def _plain_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    head: "Head",
    grad_accumulator: GradAccumulator | None,
) -> Measured:
    """`reference_cross_entropy` where ranks share the vocabulary, or the weight's gradient goes
    to a sink, and what it saw of each token."""
    logits = (
        linear(x, [weight], grad_accumulator=grad_accumulator).to(
            torch.promote_types(x.dtype, torch.float32)
        )
        * head.logit_transform.scale
    )
    if head.logit_transform.softcap is not None:
        logits = head.logit_transform.softcap * torch.tanh(logits / head.logit_transform.softcap)
    padding = torch.arange(weight.shape[0], device=x.device) >= head.rows
    logits = logits.masked_fill(padding, float("-inf"))
    largest = all_reduce_max_(logits.detach().amax(-1), head.group)
    total = reduce_from_tp(
        mark_partial((logits - largest.unsqueeze(1)).exp().sum(-1), head.group), head.group
    )
    rows, mine = head.target(labels)
    target = torch.where(mine, logits.gather(1, rows), largest.unsqueeze(1)).squeeze(1) - largest
    if head.spread:
        every = (logits - largest.unsqueeze(1)).masked_fill(padding, 0.0).sum(-1)
        target = (1 - head.spread) * target + head.spread_each * every
    losses = total.log() - reduce_from_tp(mark_partial(target, head.group), head.group)
    return Measured(losses.masked_fill(labels < 0, 0.0), largest + total.log(), largest)


@dataclass(frozen=True, slots=True)
class Head:
    """What one rank has of the output head, and how it goes about it."""

    group: Group
    """The ranks that hold the vocabulary."""

    first_row: int
    """Token number of my first row."""

    rows: int
    """My rows that are not padding; 0 on a rank that has only those."""

    chunk: int
    """PackedSeqParams at a time."""

    loops: bool
    """Use compiled loops or Triton programs where they serve."""

    logit_transform: LogitTransform

    spread: float = 0.0
    """Of what labels say, the part that all tokens share evenly."""

    spread_each: float = 0.0
    """What each of them gets of it."""

    form: BackendName = "auto"
    """Which loops or programs."""

    z_loss: float = 0.0
    """What the square of a labeled token's logsumexp counts."""

    def smoothed(self, smoothing: float, vocab_size: int) -> "Head":
        """The same head where other tokens share `smoothing` of what labels say."""
        spread = spread_of(smoothing, vocab_size)
        return replace(self, spread=spread, spread_each=spread / vocab_size) if spread else self

    @staticmethod
    def of(
        weight: Tensor,
        group: Group,
        first_row: int,
        vocab_size: int,
        chunk: int | None,
        *,
        loops: bool,
        logit_transform: LogitTransform = AS_THEY_ARE,
    ) -> "Head":
        """The head whose matrix is `weight` [v_local, h]."""
        rows = max(0, min(weight.shape[0], vocab_size - first_row))
        # From what all ranks know alike, not from my rows, which may be more than theirs: every
        # chunk is a collective.
        fitting = loss_chunk(vocab_size, ranks=group.size)
        return Head(
            group,
            first_row,
            rows,
            chunk if chunk is not None else fitting,
            loops and rows > 0,
            logit_transform,
        )

    def engine(self, logits: Tensor) -> FusedBackend:
        """What works on them."""
        return select_backend(self.form if self.loops else "torch", logits, op="cross_entropy")

    def matrix(self, weight: Tensor) -> Tensor:
        """My rows without padding; one row of padding if there is only that, so that no rank leaves
        out a sum."""
        return weight[: max(1, self.rows)]

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [c, h] -> [c, rows], products rounded to x's dtype; -inf where there is only
        padding."""
        logits = self.logit_transform.scores(linear_forward(x, self.matrix(weight)))
        return logits if self.rows else logits.fill_(float("-inf"))

    def target(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label as a row of mine [c, 1] (0 if it is not), and whether it is mine [c, 1]."""
        local = (labels - self.first_row).unsqueeze(1)
        mine = (local >= 0) & (local < self.rows) & (labels >= 0).unsqueeze(1)
        return local * mine, mine


class Wanted(NamedTuple):
    """Which gradients to form."""

    x: bool
    weight: bool

    measures: bool = False
    """And whether each token's logsumexp and largest score are of interest."""


class Softmax(NamedTuple):
    """What is left of each token's logits over the whole vocabulary, in fp32 or float64."""

    largest: Tensor
    """[c]: the largest logit."""

    total: Tensor
    """[c]: sum of exp(logit - largest)."""

    target: Tensor
    """[c]: the label's logit - largest, 0 without a label; smoothed, the mean of what labels say of
    all logits."""

    def losses(self, labels: Tensor) -> Tensor:
        """[c]: -log p(label), or the mean of it over what labels say, 0 without one."""
        return (self.total.log() - self.target).masked_fill_(labels < 0, 0.0)

    def logsumexp(self) -> Tensor:
        """[c]: log of the sum of exp(logit), over the whole vocabulary."""
        return self.largest + self.total.log()


def softmax_over_ranks(logits: Tensor, labels: Tensor, head: Head) -> Softmax:
    """Two small collectives over the ranks that hold the vocabulary, whatever the labels are;
    leaves logits alone."""
    own_largest, own_total = ROW_SUMS[head.engine(logits)](logits)
    largest = all_reduce_max_(own_largest.clone(), head.group)
    rows, mine = head.target(labels)
    target = (logits.gather(1, rows).squeeze(1) - largest).masked_fill_(~mine.squeeze(1), 0.0)
    if head.spread and head.rows:
        every = (logits.to(target.dtype) - largest.unsqueeze(1)).sum(-1)
        target.mul_(1 - head.spread).add_(every, alpha=head.spread_each)
    sums = all_reduce_(
        torch.stack([own_total.mul_((own_largest - largest).exp_()), target]), head.group
    )
    return Softmax(largest, sums[0], sums[1])


def logit_gradient(
    logits: Tensor,
    labels: Tensor,
    softmax: Softmax,
    weights: Tensor,
    head: Head,
    more: Tensor | None = None,
) -> Tensor:
    """What products get: ((weights + more) * p - weights * what labels say) * slopes, [c, rows],
    where possible in logits' memory.

    weights [c]: what each token's loss counts, 0 without a label; more [c]: what its logsumexp
    does. The entry at the label is computed apart: in bf16, 1 would swallow the last digits of p.
    """
    rows, mine = head.target(labels)
    likely = _scores_of_labels(logits, rows, softmax, head).exp() / softmax.total
    at_label = likely - 1
    at_label = (at_label.add_(head.spread - head.spread_each) if head.spread else at_label).mul_(
        weights
    )
    at_label = at_label if more is None else at_label.addcmul_(likely, more)
    factor = (weights if more is None else weights + more) / softmax.total
    even = weights * head.spread_each if head.spread and head.rows else None
    engine = head.engine(logits)
    if engine == "triton":
        row = torch.where(mine, rows, -1).squeeze(1)
        return _triton_gradient(
            logits, softmax.largest, factor, row, at_label, even, head.logit_transform
        )
    slopes = head.logit_transform.slopes(logits)  # before the gradient takes their place
    gradient = (_loop_scaled_exp if engine == "numba" else _scaled_exp)(
        logits, softmax.largest, factor
    )
    gradient = gradient if even is None else gradient.sub_(even.unsqueeze(1).to(gradient.dtype))
    at_label = at_label.unsqueeze(1).to(gradient.dtype)
    gradient.scatter_(1, rows, torch.where(mine, at_label, gradient.gather(1, rows)))
    return gradient if slopes is None else gradient.mul_(slopes)


def _scores_of_labels(logits: Tensor, rows: Tensor, softmax: Softmax, head: Head) -> Tensor:
    """[c]: each label's logit - largest; where labels are smoothed, only of those that are mine."""
    if not head.spread:
        return softmax.target
    return logits.gather(1, rows).squeeze(1).to(softmax.largest.dtype) - softmax.largest


def _row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest of each row of [c, rows], and the sum of exp(logit - largest): [c] each, in fp32 or
    float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(-1)
    # A row of -inf (a rank that has only padding) sums to 0, not to the NaN of inf - inf.
    return largest, (wide - largest.clamp(min=torch.finfo(wide.dtype).min).unsqueeze(1)).exp_().sum(
        -1
    )


def _loop_row_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`_row_sums` in one pass."""
    largest, total = logits.new_empty(2, logits.shape[0], dtype=torch.float32)
    cpu.run(
        "row_sums", logits.dtype, *logits.shape, logits, largest, total, elements=logits.numel()
    )
    return largest, total


def _scaled_exp(logits: Tensor, largest: Tensor, factor: Tensor) -> Tensor:
    """factor * exp(logit - largest), [c, rows] in the logits' dtype."""
    wide = logits.to(factor.dtype)
    return wide.sub_(largest.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1)).to(logits.dtype)


def _loop_scaled_exp(logits: Tensor, largest: Tensor, factor: Tensor) -> Tensor:
    """`_scaled_exp` in one pass, in place."""
    cpu.run(
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
    """`_row_sums` in one pass."""
    from megalith.kernels import triton_loss  # imports Triton

    return triton_loss.row_sums(logits)


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
    """All of `logit_gradient` in one pass, in place."""
    from megalith.kernels import triton_loss

    scale, cap = logit_transform.scale, logit_transform.softcap
    return triton_loss.gradient_(
        logits, largest, factor, row, at_label, even, scale=scale, softcap=cap
    )


def _add_gradients(
    dlogits: Tensor, x: Tensor, weight: Tensor, head: Head, dx: Tensor | None, dw: Tensor | None
) -> None:
    """What a chunk's logits gradient [c, rows] gives x: written to dx [c, h]; and weight: added to
    dw [v_local, h]."""
    dlogits = dlogits.to(x.dtype)
    if dx is not None:
        dx.copy_(input_grad(dlogits, head.matrix(weight)))
    if dw is not None:
        add_product_(head.matrix(dw), x, dlogits)


class LossSumFunction(Function):
    """`linear_cross_entropy` as autograd sees it."""

    moves: ClassVar[tuple[str, str]] = ("V", "I")

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        head: Head,
        wanted: Wanted,
        grad_accumulator: GradAccumulator | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h] -> scalar, and of each token, if measures are wanted, logsumexp and largest
        score, else empty ones; keeps dx and dw for a gradient of one."""
        wide = torch.promote_types(x.dtype, torch.float32)
        loss = x.new_zeros((), dtype=wide)
        seen = x.new_empty(2, x.shape[0] if wanted.measures else 0, dtype=wide)
        dx = torch.empty_like(x) if wanted.x else None
        dw = x.new_zeros(weight.shape, dtype=wide) if wanted.weight else None
        for start in range(0, x.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            logits = head.logits(x[rows], weight)
            softmax = softmax_over_ranks(logits, labels[rows], head)
            loss += softmax.losses(labels[rows]).sum()
            more = None
            if head.z_loss:
                more = 2 * head.z_loss * softmax.logsumexp().masked_fill_(labels[rows] < 0, 0.0)
                loss += (more * softmax.logsumexp()).sum() / 2
            if wanted.measures:
                torch.stack([softmax.logsumexp(), softmax.largest], out=seen[:, rows])
            if wanted.x or wanted.weight:
                weights = (labels[rows] >= 0).to(wide)
                dlogits = logit_gradient(logits, labels[rows], softmax, weights, head, more)
                _add_gradients(dlogits, x[rows], weight, head, None if dx is None else dx[rows], dw)
        ctx.save_for_backward(dx, dw)
        ctx.grad_accumulator, ctx.dtype = grad_accumulator, weight.dtype
        logsumexp, largest = seen
        ctx.mark_non_differentiable(logsumexp, largest)
        return loss, logsumexp, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dloss: Tensor, *nothing: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward left, in place: dw may be the largest tensor there is. A second
        backward is refused."""
        dx, dw = (None if saved is None else saved.mul_(dloss) for saved in ctx.saved_tensors)
        return dx, _deliver(dw, ctx.grad_accumulator, ctx.dtype), None, None, None, None, None


class TokenLossesFunction(Function):
    """`token_losses` as autograd sees it."""

    moves: ClassVar[tuple[str, str]] = ("V", "I")

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        group: Group,
        head: Head,
        grad_accumulator: GradAccumulator | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [t, h] -> three times [t], as in `Measured`; keeps three numbers per token."""
        kept = x.new_empty(3, x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
        for start in range(0, x.shape[0], head.chunk):
            rows = slice(start, start + head.chunk)
            softmax = softmax_over_ranks(head.logits(x[rows], weight), labels[rows], head)
            torch.stack(softmax, out=kept[:, rows])
        ctx.save_for_backward(x, weight, labels, kept)
        ctx.head, ctx.grad_accumulator = head, grad_accumulator
        ctx.set_materialize_grads(False)  # None says that nobody asked for a logsumexp
        softmax = Softmax(*kept)
        largest = softmax.largest.clone()  # an output is no view of what is kept
        ctx.mark_non_differentiable(largest)
        return softmax.losses(labels), softmax.logsumexp(), largest

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, dlosses: Tensor | None, dlogsumexp: Tensor | None, nothing: None
    ) -> tuple[Tensor | None, ...]:
        """dlosses, dlogsumexp [t] -> dx [t, h] and dw, logits computed again chunk by chunk; no
        collective."""
        x, weight, labels, kept = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = x.new_zeros(weight.shape, dtype=kept.dtype) if ctx.needs_input_grad[1] else None
        weights = kept.new_zeros(len(x)) if dlosses is None else dlosses * (labels >= 0)
        for start in range(0, x.shape[0], ctx.head.chunk):
            rows = slice(start, start + ctx.head.chunk)
            logits = ctx.head.logits(x[rows], weight)
            more = None if dlogsumexp is None else dlogsumexp[rows]
            dlogits = logit_gradient(
                logits, labels[rows], Softmax(*kept[:, rows]), weights[rows], ctx.head, more
            )
            _add_gradients(dlogits, x[rows], weight, ctx.head, None if dx is None else dx[rows], dw)
        return dx, _deliver(dw, ctx.grad_accumulator, weight.dtype), None, None, None, None


def _deliver(
    dw: Tensor | None, grad_accumulator: GradAccumulator | None, dtype: torch.dtype
) -> Tensor | None:
    """Hand dw to the sink, if there is one, else to autograd."""
    if dw is None:
        return None
    if grad_accumulator is None:
        return dw.to(dtype)
    grad_accumulator.gradient(dw)
    return None

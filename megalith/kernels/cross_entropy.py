"""The output head and its cross entropy in one: logits exist only chunk by chunk, over a vocabulary split by rows.

The two collectives are small: per chunk of tokens, the ranks of the vocabulary agree on each token's largest logit, and
sum its exponentials and its target's logit. Source of the parallel form: Shoeybi et al. 2019, arXiv:1909.08053, sec. 3.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.kernels.linear import Context, Sink, add_product_
from megalith.parallel.group import Group, all_reduce_, all_reduce_max_

CHUNK_LOGITS = 1 << 20  # logits held at once when `chunk` is unset: 4 MiB in fp32, so that they stay in cache


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    sink: Sink | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Sum over labelled tokens of -log softmax(x @ W.T)[label], W being the whole vocabulary: one fp32 or fp64.

    x [t, h], whole on every rank of `vocab`; weight [v_local, h], rows first_row ... of the padded vocabulary; labels
    [t] int64, negative where a token has no loss, else below `vocab_size` (rows from there on are padding and take no
    part). The loss is the same on every rank of `vocab`; dx is this rank's part of a sum over them.

    Both gradients are formed here, while a chunk's logits are at hand, if a gradient is wanted at all; backward only
    scales them. Holds one dw [v_local, h] in fp32 and one dx [t, h] until then. `chunk`: tokens at a time.
    """
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = LossSumFunction.apply(x, weight, labels, vocab, first_row, vocab_size, sink, chunk, wanted)  # type: ignore[no-untyped-call]  # torch's own
    return loss


def token_losses(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab: Group,
    first_row: int,
    vocab_size: int,
    sink: Sink | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The same loss of each token: [t], 0 where a token has none; fp32 or float64.

    The weight gradient of a weighted sum of losses does not factor by token, so backward computes each chunk's logits
    again (one matmul more than `linear_cross_entropy`).
    """
    losses: Tensor = TokenLossesFunction.apply(x, weight, labels, vocab, first_row, vocab_size, sink, chunk)  # type: ignore[no-untyped-call]  # torch's own
    return losses


def reference_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, *, vocab_size: int) -> Tensor:
    """What `token_losses` computes where one rank has the whole vocabulary, in plain operations: [t]."""
    logits = (x @ weight[:vocab_size].t()).to(torch.promote_types(x.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits, labels.clamp(min=-1), ignore_index=-1, reduction="none")


@dataclass(frozen=True, slots=True)
class _Part:
    """My rows of the vocabulary, without padding: the head as one rank sees it."""

    weight: Tensor
    """[rows, h]; one masked row where all my rows are padding, so that no rank leaves the others alone in a sum."""

    group: Group
    first_row: int
    only_padding: bool

    def logits(self, x: Tensor) -> Tensor:
        """x [c, h] -> [c, rows] in fp32 or float64, a fresh tensor."""
        logits = torch.mm(x, self.weight.t()).to(torch.promote_types(x.dtype, torch.float32))
        return logits.fill_(float("-inf")) if self.only_padding else logits

    def target(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label as a row of mine [c, 1] (0 if it is not), and whether it is mine [c, 1]."""
        local = (labels - self.first_row).unsqueeze(1)
        mine = (local >= 0) & (local < (0 if self.only_padding else self.weight.shape[0])) & (labels >= 0).unsqueeze(1)
        return local * mine, mine


def _part(weight: Tensor, group: Group, first_row: int, vocab_size: int) -> _Part:
    rows = min(weight.shape[0], vocab_size - first_row)
    return _Part(weight[: max(rows, 1)], group, first_row, only_padding=rows < 1)


def _tokens_at_a_time(chunk: int | None, part: _Part) -> int:
    return chunk if chunk is not None else max(64, CHUNK_LOGITS // part.weight.shape[0] // 64 * 64)


def _exponentials(logits: Tensor, labels: Tensor, part: _Part) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overwrite logits [c, rows] by exp(logit - largest); with it return, each [c] and over the whole vocabulary,

    the sum of those exponentials, the target's logit minus the largest, and the largest.
    """
    largest = all_reduce_max_(logits.amax(-1), part.group)
    logits.sub_(largest.unsqueeze(1))
    rows, mine = part.target(labels)
    target = logits.gather(1, rows).masked_fill_(~mine, 0.0)
    exponentials = logits.exp_()
    sums = all_reduce_(torch.cat([exponentials.sum(-1, keepdim=True), target], dim=1), part.group)
    return exponentials, sums[:, 0], sums[:, 1], largest


def _logit_gradient(probabilities: Tensor, labels: Tensor, weights: Tensor, part: _Part) -> Tensor:
    """weights * (probabilities - one hot at the label), in place: [c, rows]; weights [c] already on the former."""
    rows, mine = part.target(labels)
    return probabilities.scatter_add_(1, rows, -(weights.unsqueeze(1) * mine))


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
        first_row: int,
        vocab_size: int,
        sink: Sink | None,
        chunk: int | None,
        wanted: bool,
    ) -> Tensor:
        """x [t, h] -> scalar; keeps dx and dw for a gradient of one."""
        part = _part(weight, group, first_row, vocab_size)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = x.new_zeros((), dtype=wide)
        dx = torch.empty_like(x) if wanted else None
        dw = x.new_zeros(weight.shape, dtype=wide) if wanted else None
        step = _tokens_at_a_time(chunk, part)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            total += _chunk_loss(
                x[rows], labels[rows], part, None if dx is None else dx[rows], None if dw is None else dw
            )
        ctx.save_for_backward(dx, dw)
        ctx.sink, ctx.dtype = sink, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """Scale what forward left, in place: dw may be the largest tensor there is. A second backward is refused."""
        dx, dw = (saved.mul_(dloss) for saved in ctx.saved_tensors)
        none = (None,) * 7
        return dx if ctx.needs_input_grad[0] else None, _deliver(ctx, dw), *none


def _deliver(ctx: Context, dw: Tensor) -> Tensor | None:
    """Hand dw to the sink, if there is one, else to autograd."""
    if not ctx.needs_input_grad[1]:
        return None
    if ctx.sink is None:
        return dw.to(ctx.dtype)
    ctx.sink.gradient(dw)
    return None


def _chunk_loss(x: Tensor, labels: Tensor, part: _Part, dx: Tensor | None, dw: Tensor | None) -> Tensor:
    """The loss of a chunk of tokens; where asked, writes their dx [c, h] and adds to dw [v_local, h]."""
    exponentials, total, target, _ = _exponentials(part.logits(x), labels, part)
    labelled = (labels >= 0).to(total.dtype)
    loss = (total.log() - target).mul_(labelled).sum()
    if dx is not None and dw is not None:
        probabilities = exponentials.mul_((labelled / total).unsqueeze(1))
        dlogits = _logit_gradient(probabilities, labels, labelled, part).to(x.dtype)
        torch.mm(dlogits, part.weight, out=dx)
        add_product_(dw[: part.weight.shape[0]], x, dlogits)
    return loss


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
        first_row: int,
        vocab_size: int,
        sink: Sink | None,
        chunk: int | None,
    ) -> Tensor:
        """x [t, h] -> [t]; keeps the logarithm of each token's sum of exponentials."""
        part = _part(weight, group, first_row, vocab_size)
        step = _tokens_at_a_time(chunk, part)
        losses = x.new_empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32))
        normaliser = torch.empty_like(losses)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            _, total, target, largest = _exponentials(part.logits(x[rows]), labels[rows], part)
            torch.sub(total.log_(), target, out=losses[rows]).mul_(labels[rows] >= 0)
            torch.add(total, largest, out=normaliser[rows])
        ctx.save_for_backward(x, weight, labels, normaliser)
        ctx.group, ctx.first_row, ctx.vocab_size = group, first_row, vocab_size
        ctx.sink, ctx.step, ctx.dtype = sink, step, weight.dtype
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        """dlosses [t] -> dx [t, h] and dw, logits computed again chunk by chunk; no collective."""
        x, weight, labels, normaliser = ctx.saved_tensors
        part = _part(weight, ctx.group, ctx.first_row, ctx.vocab_size)
        dx, dw = torch.empty_like(x), x.new_zeros(weight.shape, dtype=normaliser.dtype)
        weights = dlosses * (labels >= 0)
        for start in range(0, x.shape[0], ctx.step):
            rows = slice(start, start + ctx.step)
            probabilities = part.logits(x[rows]).sub_(normaliser[rows].unsqueeze(1)).exp_()
            probabilities.mul_(weights[rows].unsqueeze(1))
            dlogits = _logit_gradient(probabilities, labels[rows], weights[rows], part).to(x.dtype)
            torch.mm(dlogits, part.weight, out=dx[rows])
            add_product_(dw[: part.weight.shape[0]], x[rows], dlogits)
        none = (None,) * 6
        return dx if ctx.needs_input_grad[0] else None, _deliver(ctx, dw), *none

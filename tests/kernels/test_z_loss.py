"""Cross entropy with logit statistics and z-loss is exact for every backend and chunk size."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel
from megalith.parallel.cross_entropy import (
    CrossEntropyResult,
    LogitTransform,
    VocabShard,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    recomputed_cross_entropy,
    recomputed_cross_entropy_with_stats,
    token_losses_with_stats,
)
from megalith.parallel.group import Group, single_rank_group
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import FP64, assert_equals

T, H, V, PADDED = 13, 5, 11, 14
# borders of parts of 14 rows over 2 and 3 ranks
LABELS = torch.tensor([1, 2, -1, 0, 10, 5, 4, -100, 3, 7, 9, 6, 5])
FORMS = {"kept": linear_cross_entropy_with_stats, "recomputed": recomputed_cross_entropy_with_stats}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    weight[V:] = 1e6  # padding, which takes no part
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def by_hand(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    logit_transform: LogitTransform,
    smoothing: float = 0.0,
) -> CrossEntropyResult:
    scores = (x @ weight[:V].T) * logit_transform.scale
    if logit_transform.softcap is not None:
        scores = logit_transform.softcap * torch.tanh(scores / logit_transform.softcap)
    total, largest = scores.logsumexp(-1), scores.amax(-1)
    spread = smoothing * V / (V - 1)
    losses = torch.nn.functional.cross_entropy(
        scores, labels.clamp(min=-1), ignore_index=-1, reduction="none", label_smoothing=spread
    )
    return CrossEntropyResult(
        (losses + z_loss * total.square() * (labels >= 0)).sum(), total, largest
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("chunk", [1, 7, T])
@pytest.mark.parametrize("logit_transform", [LogitTransform(), LogitTransform(1.5, 3.0)])
def test_every_backend_and_chunk_matches_the_formula(
    form: str, kernel: Kernel, chunk: int, logit_transform: LogitTransform
) -> None:
    x, weight = inputs()
    words = {
        "vocab": VocabShard(single_rank_group("tp"), 0, V, logit_transform=logit_transform),
        "smoothing": 0.1,
    }
    ours = FORMS[form](x, weight, LABELS, z_loss=0.3, chunk=chunk, kernel=kernel, **words)
    reference = by_hand(x, weight, LABELS, 0.3, logit_transform, 0.1)
    for actual, expected in zip(ours, reference, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not (form == "kept" and kernel == "auto" and ours.logsumexp.requires_grad)
    for actual, expected in zip(
        *(torch.autograd.grad(3 * each.loss, (x, weight)) for each in (ours, reference))
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_logit_statistics_do_not_change_the_loss() -> None:
    x, weight = inputs(torch.float32)
    words = {"vocab": VocabShard(single_rank_group("tp"), 0, V), "chunk": 4}
    plain, measured = (
        linear_cross_entropy(x, weight, LABELS, **words),
        linear_cross_entropy_with_stats(x, weight, LABELS, **words),
    )
    again = recomputed_cross_entropy(x, weight, LABELS, **words)
    assert torch.equal(plain, measured.loss) and measured.logsumexp.shape == (T,)
    torch.testing.assert_close(again, plain)
    actual, reference, others = (
        torch.autograd.grad(each, (x, weight)) for each in (plain, measured.loss, again)
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, reference, strict=True))
    torch.testing.assert_close(others, actual)


def test_gradients_of_logsumexp_and_token_losses_match_finite_differences() -> None:
    x, weight = inputs()
    with torch.no_grad():
        weight[V:] = 0
    words = {"vocab": VocabShard(single_rank_group("tp"), 0, V), "chunk": 4}

    def both(*leaves: Tensor) -> Tensor:
        result = token_losses_with_stats(*leaves, LABELS, **words)
        return result.loss + result.logsumexp.square()

    assert torch.autograd.gradcheck(both, (x, weight))
    assert torch.autograd.gradcheck(
        lambda *a: token_losses_with_stats(*a, LABELS, **words).logsumexp, (x, weight)
    )
    assert torch.autograd.gradcheck(
        lambda *a: recomputed_cross_entropy(*a, LABELS, **words, z_loss=0.2), (x, weight)
    )


@pytest.mark.parametrize("form", FORMS)
def test_without_labels_loss_and_gradients_are_zero(form: str) -> None:
    x, weight = inputs()
    none = torch.full((T,), -1)
    result = FORMS[form](
        x,
        weight,
        none,
        vocab=VocabShard(single_rank_group("tp"), 0, V),
        z_loss=0.3,
        chunk=4,
    )
    assert result.loss.item() == 0 and bool(result.largest.isfinite().all())
    assert all(not gradient.any() for gradient in torch.autograd.grad(result.loss, (x, weight)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_numba_backend_matches_the_reference(
    form: str, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 33, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(320, 33, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(-50, 301, (60,), generator=generator)
    results = []
    for kernel in ("auto", "reference"):
        result = FORMS[form](
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, 301),
            chunk=40,
            z_loss=0.1,
            kernel=kernel,
        )
        results.append((*result, *torch.autograd.grad(result.loss, (x, weight))))
    for actual, reference in zip(*results, strict=True):
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


def on_ranks(rank: int, world: int) -> None:
    """Every form, with and without plain operations."""
    kernels: tuple[Kernel, ...] = "auto", "reference"
    for form, kernel in product(FORMS, kernels):
        one_form(rank, world, form, kernel)


def one_form(rank: int, world: int, form: str, kernel: Kernel) -> None:
    """Labels on the borders of parts, a padded vocabulary, and every rank with the same loss and
    measures."""
    group: Group = world_group(rank, world, "tp")
    x, weight = inputs()
    rows = [len(part) for part in torch.arange(PADDED).tensor_split(world)]
    first = sum(rows[:rank])
    actual = weight.detach()[first : first + rows[rank]].clone().requires_grad_()
    reference = by_hand(x, weight, LABELS, 0.3, LogitTransform())
    ours = FORMS[form](
        x,
        actual,
        LABELS,
        vocab=VocabShard(group, first, V),
        z_loss=0.3,
        chunk=4,
        kernel=kernel,
    )
    for name, result, expected in zip(CrossEntropyResult._fields, ours, reference, strict=True):
        assert_equals(name, result.detach(), expected.detach(), FP64)
    dx, dw = torch.autograd.grad(ours.loss, (x, actual))
    whole_dx, whole_dw = torch.autograd.grad(reference.loss, (x, weight))
    torch.distributed.all_reduce(dx)
    assert_equals("dx", dx, whole_dx, FP64)
    assert_equals("dw", dw, whole_dw[first : first + rows[rank]], FP64)


@pytest.mark.parametrize("world", [2, 3])
def test_vocabulary_parallel_statistics_match_one_rank(world: int) -> None:
    run_ranks(on_ranks, world)

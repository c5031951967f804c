"""Triton cross entropy matches its reference, with logit transforms and vocabulary shards."""

import pytest
import torch
from torch import Tensor

from megalith.kernels.triton import launch
from megalith.parallel.cross_entropy import (
    LogitTransform,
    VocabShard,
    linear_cross_entropy,
    reference_cross_entropy,
    token_losses,
)
from megalith.parallel.group import single_rank_group
from megalith.testing.tiny import triton_device

DEVICE = triton_device()
if DEVICE is None:
    pytest.skip(
        "needs an NVIDIA GPU; tests/kernels/test_gpu.py interprets these", allow_module_level=True
    )
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

from megalith.kernels.triton.cross_entropy import gradient_, row_sums  # noqa: E402  # where Triton is missing, there is none

TOKENS, HIDDEN = 7, 24
READOUTS = [LogitTransform(), LogitTransform(scale=0.5), LogitTransform(scale=1.3, softcap=2.0)]


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the programs would not be asked."""
    monkeypatch.setattr(launch, "can_use", lambda *tensors: True)
    monkeypatch.setattr("megalith.kernels.cpu_threads.should_use", lambda *tensors: False)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("vocab", [37, 2100])
@pytest.mark.parametrize("logit_transform", READOUTS)
def test_losses_and_gradients_equal_the_reference(
    logit_transform: LogitTransform, vocab: int, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = (
        seeded(TOKENS, HIDDEN, dtype=dtype).requires_grad_(),
        seeded(vocab + 3, HIDDEN, seed=1, dtype=dtype),
    )
    weight.requires_grad_()
    labels = torch.randint(0, vocab, (TOKENS,), generator=torch.Generator().manual_seed(2))
    labels[4] = -1
    labels = labels.to(DEVICE)
    factors = seeded(TOKENS, seed=3).abs()
    reference = reference_cross_entropy(
        x, weight, labels, vocab_size=vocab, logit_transform=logit_transform
    )
    total, single = (
        loss(
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, vocab, logit_transform=logit_transform),
            chunk=3,
        )
        for loss in (linear_cross_entropy, token_losses)
    )
    for actual, expected in (
        (total, reference.sum()),
        ((single * factors).sum(), (reference * factors).sum()),
    ):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        for a, b in zip(
            torch.autograd.grad(actual, (x, weight)),
            torch.autograd.grad(expected, (x, weight), retain_graph=True),
            strict=True,
        ):
            assert (a - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("logit_transform", READOUTS)
def test_smoothed_labels_equal_the_reference(logit_transform: LogitTransform) -> None:
    x, weight = seeded(TOKENS, HIDDEN).requires_grad_(), seeded(40, HIDDEN, seed=1).requires_grad_()
    labels = torch.tensor([0, 36, -1, 5, 7, 9, 11], device=DEVICE)
    vocab = VocabShard(single_rank_group("tp"), 0, 37, logit_transform)
    actual = linear_cross_entropy(x, weight, labels, vocab, smoothing=0.1, chunk=3)
    reference = reference_cross_entropy(
        x, weight, labels, vocab_size=37, logit_transform=logit_transform, smoothing=0.1
    ).sum()
    for a, b in zip(
        *(torch.autograd.grad(each, (x, weight)) for each in (actual, reference)), strict=True
    ):
        assert (a - b).abs().max() <= 5e-6 * b.abs().max()


def test_row_of_padding_sums_to_zero() -> None:
    logits = seeded(3, 70)
    logits[1] = float("-inf")
    largest, total = row_sums(logits)
    assert total[1] == 0 and largest.isfinite().all()
    torch.testing.assert_close(largest + total.log(), logits.logsumexp(-1).clamp(min=-torch.inf))


def test_nan_propagates() -> None:
    logits = seeded(3, 70)
    logits[1, 5] = float("nan")
    largest, total = row_sums(logits)
    assert (largest + total).isnan().tolist() == [False, True, False]


def test_labels_of_other_ranks_do_not_change_local_columns() -> None:
    logits, label = seeded(4, 70), torch.tensor([69, -1, 0, -1], device=DEVICE)
    largest, factor, at_label = logits.amax(-1) + 1, seeded(4, seed=1).abs(), seeded(4, seed=2)
    expected = factor[:, None] * (logits - largest[:, None]).exp()
    expected[0, 69], expected[2, 0] = at_label[0], at_label[2]
    torch.testing.assert_close(gradient_(logits, largest, factor, label, at_label), expected)

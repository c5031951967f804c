"""Chunked vocabulary-parallel cross entropy is exact for any chunk size, padding and loss mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.config.kernels import Kernel
from megalith.kernels.linear import MatmulOps
from megalith.parallel.cross_entropy import (
    HeadShard,
    LogitTransform,
    VocabShard,
    linear_cross_entropy,
    reference_cross_entropy,
    token_losses,
)
from megalith.parallel.group import Group, single_rank_group

T, H, V, PADDED = 11, 5, 13, 16
LABELS = torch.tensor([1, 2, -1, 0, 12, 5, 5, -100, 3, 7, 12])
FORMS = "sum", "tokens"


class Recorder:
    """A sink that keeps gradients."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def product(self, x: Tensor, dy: Tensor, matmul_ops: MatmulOps) -> None:
        raise AssertionError("the loss hands over gradients")

    def gradient(self, dw: Tensor) -> None:
        self.given.append(dw)

    def rows(self, rows: Tensor, dy: Tensor) -> None:
        raise AssertionError("the loss hands over gradients")


class Largest(TorchDispatchMode):
    """Notes the largest result of any operation."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # torch's own hook
        out = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))]
        )
        return out


def inputs(*, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = scale * torch.randn(T, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


def loss(
    form: str,
    x: Tensor,
    weight: Tensor,
    labels: Tensor = LABELS,
    *,
    grad_accumulator: Recorder | None = None,
    chunk: int | None = None,
    vocab_size: int = V,
) -> Tensor:
    whole = linear_cross_entropy if form == "sum" else token_losses
    return whole(
        x,
        weight,
        labels,
        vocab=VocabShard(single_rank_group("tp"), 0, vocab_size, grad_accumulator=grad_accumulator),
        chunk=chunk,
    ).sum()


def torch_loss(x: Tensor, weight: Tensor, labels: Tensor = LABELS) -> Tensor:
    return torch.nn.functional.cross_entropy(
        x @ weight[:V].t(), labels.clamp(min=-1), ignore_index=-1, reduction="sum"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk", [None, 1, 4, T, 100])
def test_loss_and_gradients_equal_torch_for_any_chunk(form: str, chunk: int | None) -> None:
    x, weight = inputs()
    ours, reference = loss(form, x, weight, chunk=chunk), torch_loss(x, weight)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    for actual, expected in zip(
        torch.autograd.grad(3 * ours, (x, weight)), torch.autograd.grad(3 * reference, (x, weight))
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_losses_of_single_tokens_equal_the_reference() -> None:
    x, weight = inputs()
    ours = token_losses(x, weight, LABELS, vocab=VocabShard(single_rank_group("tp"), 0, V), chunk=4)
    reference = reference_cross_entropy(x, weight, LABELS, vocab_size=V)
    torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)
    assert ours[2] == ours[7] == 0
    weights = torch.arange(T, dtype=torch.float64)
    actual, expected = (
        torch.autograd.grad((each * weights).sum(), (x, weight)) for each in (ours, reference)
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_token_losses_are_those_of_finite_differences() -> None:
    x, weight = inputs()
    whole = {"vocab": VocabShard(single_rank_group("tp"), 0, V), "chunk": 4}
    assert torch.autograd.gradcheck(lambda *a: token_losses(*a, LABELS, **whole), (x, weight))


@pytest.mark.parametrize("form", FORMS)
def test_padding_rows_do_not_affect_the_loss_and_get_no_gradient(form: str) -> None:
    x, weight = inputs()
    with torch.no_grad():
        weight[V:] = 1e6
    ours = loss(form, x, weight)
    torch.testing.assert_close(ours, torch_loss(x, weight), rtol=1e-12, atol=1e-12)
    _, dw = torch.autograd.grad(ours, (x, weight))
    assert torch.equal(dw[V:], torch.zeros(PADDED - V, H, dtype=torch.float64))
    assert bool((dw[:V] != 0).any(1).all())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits_stay_finite(form: str, dtype: torch.dtype) -> None:
    x, weight = inputs(dtype=dtype, scale=1e4)
    ours = loss(form, x, weight)
    torch.testing.assert_close(
        ours.double(), torch_loss(x.double(), weight.double()), rtol=1e-5, atol=0
    )
    for grad in torch.autograd.grad(ours, (x, weight)):
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_without_labels_are_zero(form: str) -> None:
    x, weight = inputs()
    ours = loss(form, x, weight, torch.full((T,), -1))
    assert ours.item() == 0
    assert all(
        torch.equal(grad, torch.zeros_like(grad)) for grad in torch.autograd.grad(ours, (x, weight))
    )


@pytest.mark.parametrize("form", FORMS)
def test_vocabulary_shard_of_padding_does_not_affect_softmax(form: str) -> None:
    x, weight = inputs()
    whole = linear_cross_entropy if form == "sum" else token_losses
    last = whole(x, weight[:3], LABELS, vocab=VocabShard(single_rank_group("tp"), V, V))
    # its value means nothing without the other parts
    assert last.shape == (() if form == "sum" else (T,))


@pytest.mark.parametrize("form", FORMS)
def test_gradient_accumulator_gets_the_scaled_gradient_and_autograd_none(form: str) -> None:
    x, weight = inputs()
    grad_accumulator = Recorder()
    (loss(form, x, weight, grad_accumulator=grad_accumulator, chunk=4) / 7).backward()
    assert weight.grad is None
    [given] = grad_accumulator.given
    _, expected = torch.autograd.grad(torch_loss(x, weight) / 7, (x, weight))
    torch.testing.assert_close(given[:V], expected[:V], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_gives_an_fp32_loss_and_adds_the_weight_gradient_in_fp32(form: str) -> None:
    x, weight = inputs(dtype=torch.bfloat16)
    grad_accumulator = Recorder()
    ours = loss(form, x, weight, grad_accumulator=grad_accumulator, chunk=3)
    assert ours.dtype == torch.float32
    exact = torch_loss(x.double(), weight.double())
    # logits are rounded to bf16, 8 bits
    torch.testing.assert_close(ours.double(), exact, rtol=5e-3, atol=0)
    dx_exact, dw_exact = torch.autograd.grad(exact, (x, weight))
    (dx,) = torch.autograd.grad(ours, x)
    assert dx.dtype == torch.bfloat16
    assert grad_accumulator.given[0].dtype == torch.float32
    assert (dx - dx_exact).abs().max() <= 2e-2 * dx_exact.abs().max()
    assert (grad_accumulator.given[0] - dw_exact).abs().max() <= 2e-2 * dw_exact.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_saved_when_no_gradient_is_required(form: str) -> None:
    x, weight = inputs()
    with torch.no_grad():
        ours = loss(form, x, weight)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, torch_loss(x, weight).detach(), rtol=1e-12, atol=1e-12)


def test_second_backward_raises_an_error() -> None:
    x, weight = inputs()
    ours = loss("sum", x, weight)
    torch.autograd.grad(2 * ours, (x, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(ours, (x, weight))


@pytest.mark.parametrize("form", FORMS)
def test_frozen_head_gets_no_gradient(form: str) -> None:
    x, weight = inputs()
    ours = loss(form, x, weight.detach())
    (dx,) = torch.autograd.grad(ours, x)
    torch.testing.assert_close(
        dx, torch.autograd.grad(torch_loss(x, weight), x)[0], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("form", FORMS)
def test_full_logits_are_never_materialized(form: str) -> None:
    t, v = 64, 40
    x, weight = torch.randn(t, 8, requires_grad=True), torch.randn(v, 8, requires_grad=True)
    with Largest() as largest:
        loss(form, x, weight, torch.zeros(t, dtype=torch.int64), chunk=8, vocab_size=v).backward()
    assert largest.numel <= max(8 * v, t * 8)


@pytest.mark.parametrize("form", FORMS)
def test_shapes_on_meta_device(form: str) -> None:
    x = torch.empty(T, H, device="meta", requires_grad=True)
    weight = torch.empty(PADDED, H, device="meta", requires_grad=True)
    ours = loss(form, x, weight, LABELS.to("meta"))
    assert ours.shape == ()
    ours.backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


def large(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """More logits than the compiled loops ask for, with some tokens unlabeled and padding rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 33, generator=generator).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(320, 33, generator=generator)).to(dtype).requires_grad_()
    return x, weight, torch.randint(-50, 301, (60,), generator=generator)


READOUTS = (
    LogitTransform(),
    LogitTransform(0.0625),
    LogitTransform(softcap=2.0),
    LogitTransform(1.5, 3.0),
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("logit_transform", READOUTS)
def test_all_backends_match_the_reference(
    form: str, dtype: torch.dtype, tolerance: float, kernel: Kernel, logit_transform: LogitTransform
) -> None:
    x, weight, labels = large(dtype)
    whole = linear_cross_entropy if form == "sum" else token_losses
    results = []
    for each in (kernel, "reference"):
        loss_sum = whole(
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, 301, logit_transform=logit_transform),
            chunk=40,
            kernel=each,
        ).sum()
        results.append((loss_sum, *torch.autograd.grad(loss_sum, (x, weight))))
    for actual, reference in zip(*results):
        assert actual.dtype == reference.dtype
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("logit_transform", READOUTS)
def test_label_smoothing_matches_torch_without_padding_rows(
    kernel: Kernel, chunk: int | None, logit_transform: LogitTransform
) -> None:
    x, weight = inputs()
    with torch.no_grad():
        weight[V:] = 1e6
    whole = {"vocab": VocabShard(single_rank_group("tp"), 0, V, logit_transform=logit_transform)}
    ours = linear_cross_entropy(
        x, weight, LABELS, **whole, smoothing=0.1, chunk=chunk, kernel=kernel
    )
    reference = reference_cross_entropy(
        x, weight, LABELS, vocab_size=V, logit_transform=logit_transform, smoothing=0.1
    ).sum()
    scores = logit_transform.scores(x @ weight[:V].T).log_softmax(-1)
    says = torch.full_like(scores, 0.1 / (V - 1)).scatter(1, LABELS.clamp(min=0).unsqueeze(1), 0.9)
    torch.testing.assert_close(
        ours, -(says * scores).sum(-1)[LABELS >= 0].sum(), rtol=1e-12, atol=1e-12
    )
    for actual, expected in zip(
        *(torch.autograd.grad(3 * each, (x, weight)) for each in (ours, reference)), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_numba_backend_supports_label_smoothing(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, labels = large(dtype)
    results = []
    for kernel in ("auto", "reference"):
        total = linear_cross_entropy(
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, 301),
            chunk=40,
            smoothing=0.2,
            kernel=kernel,
        )
        results.append((total, *torch.autograd.grad(total, (x, weight))))
    for actual, reference in zip(*results, strict=True):
        assert (actual - reference).abs().max() <= tolerance * reference.abs().max()


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_a_confident_bf16_token_keeps_its_small_gradient(kernel: Kernel) -> None:
    _, weight, labels = large(torch.bfloat16)
    sure = weight.detach()[labels.clamp(min=0)].mul(1.5).requires_grad_()
    exact = [a.detach().double().requires_grad_() for a in (sure, weight)]
    whole = {"vocab": VocabShard(single_rank_group("tp"), 0, 301)}
    (actual,) = torch.autograd.grad(
        linear_cross_entropy(sure, weight, labels, **whole, kernel=kernel), sure
    )
    (reference,) = torch.autograd.grad(linear_cross_entropy(*exact, labels, **whole), exact[0])
    assert float(reference.norm(dim=1)[labels >= 0].min()) < 1e-2  # some are sure indeed
    assert (actual - reference).norm() <= 3e-2 * reference.norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_nan_and_inf_propagate_to_the_loss(form: str, kernel: Kernel, bad: float) -> None:
    x, weight, labels = large(torch.float32)
    labels[3] = 5
    with torch.no_grad():
        x[3, 4] = bad
    whole = linear_cross_entropy if form == "sum" else token_losses
    assert (
        not whole(
            x,
            weight,
            labels,
            vocab=VocabShard(single_rank_group("tp"), 0, 301),
            kernel=kernel,
        )
        .sum()
        .isfinite()
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("logit_transform", READOUTS)
def test_gradients_of_scaled_and_soft_capped_logits_match_torch(
    form: str, logit_transform: LogitTransform
) -> None:
    for scale in (1.0, 1e3):
        x, weight = inputs(scale=scale)
        with torch.no_grad():
            weight[V:] = 1e6
        scores = x @ weight[:V].t() * logit_transform.scale
        scores = (
            scores
            if logit_transform.softcap is None
            else logit_transform.softcap * torch.tanh(scores / logit_transform.softcap)
        )
        reference = torch.nn.functional.cross_entropy(
            scores, LABELS.clamp(min=-1), ignore_index=-1, reduction="sum"
        )
        whole = linear_cross_entropy if form == "sum" else token_losses
        ours = whole(
            x,
            weight,
            LABELS,
            vocab=VocabShard(single_rank_group("tp"), 0, V, logit_transform=logit_transform),
            chunk=4,
        ).sum()
        torch.testing.assert_close(ours, reference, rtol=1e-11, atol=1e-11)
        for actual, expected in zip(
            torch.autograd.grad(ours, (x, weight)), torch.autograd.grad(reference, (x, weight))
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_identity_logit_transform_returns_its_input() -> None:
    matmul_ops = torch.randn(4, 5).bfloat16()
    assert (
        LogitTransform().scores(matmul_ops) is matmul_ops
        and LogitTransform().slopes(matmul_ops) is None
    )


def test_soft_capped_logits_are_computed_in_fp32() -> None:
    matmul_ops = 30 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = LogitTransform(softcap=30.0).scores(matmul_ops)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, 30 * torch.tanh(matmul_ops.float() / 30))


@pytest.mark.parametrize("logit_transform", READOUTS)
def test_a_rank_that_has_only_padding_gets_no_gradient_and_no_nan(
    logit_transform: LogitTransform,
) -> None:
    x, weight = inputs()
    vocab = VocabShard(single_rank_group("tp"), V, V, logit_transform)
    head = HeadShard.build(weight[:3], vocab)
    slopes = logit_transform.slopes(head.logits(x, weight[:3]))
    assert slopes is None or isinstance(slopes, float) or bool((slopes == 0).all())


def test_ranks_with_uneven_vocabulary_shards_use_equal_chunks() -> None:
    ranks = [Group(axes=("tp",), ranks=(0, 1, 2), rank=rank) for rank in range(3)]
    parts = [torch.zeros(rows, 4) for rows in (16384, 16383, 16383)]
    heads = [
        HeadShard.build(part, VocabShard(group, 0, 49150)) for part, group in zip(parts, ranks)
    ]
    assert len({head.chunk for head in heads}) == 1
    padding_only = HeadShard.build(parts[2], VocabShard(ranks[2], 49150, 49150), kernel="numba")
    assert (padding_only.rows, padding_only.chunk) == (0, heads[0].chunk)
    assert padding_only.engine(torch.zeros(2, 1)) == "torch"

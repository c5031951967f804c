"""flex_attention matches the reference with documents, windows, soft caps, sinks and masks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.kernels.attention.dispatch import attention, reference_attention
from megalith.kernels.attention.flex import (
    block_mask,
    can_use,
    flexible_attention,
    intervals,
    plan_blocks,
)
from megalith.kernels.attention.scores import AttentionMask, PairMask, Scores, WeightDropout
from megalith.kernels.attention.sdpa import Lengths
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_queries,
    with_masks,
    with_padding,
)
from megalith.testing.tolerance import relative_error

LENGTHS: tuple[Lengths, ...] = (
    ((150, 150), (3, 3), (40, 90), (1, 130)),
    ((7, 7),),
    ((128, 128), (256, 256)),
)
SCORES = [
    Scores(),
    Scores(window=33),
    Scores(softcap=1.5, window=70),
    Scores(off_by_one=True, scale=0.3),
    Scores(causal=False, window=20),
    Scores(causal=False),
]


def inputs_of(
    lengths: Lengths, dtype: torch.dtype, device: str = "cpu", size: int = 16
) -> list[Tensor]:
    """q, k, v, sinks of 4 heads that share 2, values of another width."""
    draw = torch.Generator().manual_seed(0)
    queries, keys = (sum(count) for count in zip(*lengths, strict=True))
    shapes = [(queries, 4, size), (keys, 2, size), (keys, 2, size + 8), (4,)]
    return [
        torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes
    ]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("scores", "sinks"),
    [
        (each, sinks)
        for each in SCORES
        for sinks in (False, True)
        if not (sinks and each.off_by_one)
    ],
)
def test_values_and_gradients_match_the_reference(
    scores: Scores, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch refuses gradients on CPUs before it looks whether it must compile; what it would then do
    # serves here.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    q, k, v, sink = inputs_of(LENGTHS[0], torch.float32)
    inputs = [q, k, v, sink][: 4 if sinks else 3]
    actual = flexible_attention(
        q, k, v, LENGTHS[0], scores, sink if sinks else None, compiled=False
    )
    tokens = seq_params_from_queries(list(LENGTHS[0]))
    reference = reference_attention(q, k, v, tokens, scores, sink if sinks else None)
    dy = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    assert relative_error(actual, reference) <= 1e-5
    for a, b in zip(
        torch.autograd.grad(actual, inputs, dy),
        torch.autograd.grad(reference, inputs, dy),
        strict=True,
    ):
        assert relative_error(a, b) <= 1e-5


def masked(device: str = "cpu", *, alone: bool = False) -> PackedSeqParams:
    """With masks that hide all keys from some queries, and padding; beside causality the second
    document has none."""
    draw, tokens = (
        torch.Generator().manual_seed(2),
        seq_params_from_queries(list(LENGTHS[0]), device=device),
    )
    masks = [
        (
            (torch.rand(size, generator=draw) < 0.6)
            & (torch.rand(size[0], 1, generator=draw) < 0.9)
        ).to(device)
        for size in LENGTHS[0]
    ]
    if alone:
        return with_masks(tokens, masks, alone=True)
    text = torch.rand(sum(keys for _, keys in LENGTHS[0]), generator=draw) < 0.8
    return with_padding(with_masks(tokens, [masks[0], None, *masks[2:]]), text.to(device))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["beside", "alone", "padding"])
def test_attention_masks_match_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    tokens = masked(alone=kind == "alone")
    assert tokens.visible is not None
    tokens = (
        tokens if kind != "padding" else replace(tokens, visible=AttentionMask(tokens.visible.keys))
    )
    for scores in (SCORES[0], SCORES[2], SCORES[3]):
        q, k, v, sink = inputs_of(LENGTHS[0], torch.float32)
        sinks = None if scores.off_by_one else sink
        inputs = [q, k, v] if sinks is None else [q, k, v, sink]
        assert tokens.visible is not None
        seen = PairMask(tokens.visible, torch.arange(len(q)), torch.arange(len(k)))
        actual = flexible_attention(
            q, k, v, LENGTHS[0], tokens.visible.scores(scores), sinks, seen, compiled=False
        )
        reference = reference_attention(q, k, v, tokens, scores, sinks)
        dy = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
        assert relative_error(actual, reference) <= 1e-5
        for a, b in zip(
            torch.autograd.grad(actual, inputs, dy),
            torch.autograd.grad(reference, inputs, dy),
            strict=True,
        ):
            assert bool(torch.isfinite(a).all()) and relative_error(a, b) <= 1e-5


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [16, 128])
def test_block_mask_covers_all_visible_pairs(
    lengths: Lengths, window: int | None, causal: bool, block: int
) -> None:
    seen, num_keys = (
        intervals(lengths, window, Scores(window=window, causal=causal).after),
        sum(keys for _, keys in lengths),
    )
    plan = plan_blocks(seen, num_keys, block)
    key = np.arange(num_keys)
    visible = (key >= seen[:, :1]) & (key < seen[:, 1:])
    for row in range(len(plan.mixed)):
        rows = slice(row * block, (row + 1) * block)
        mixed, whole = (
            set(keys[row, :count].tolist())
            for count, keys in zip(
                (plan.mixed[row], plan.whole[row]), (plan.mixed_keys, plan.whole_keys), strict=True
            )
        )
        assert not mixed & whole
        for place in range(-(-num_keys // block)):
            pairs = visible[rows, place * block : (place + 1) * block]
            assert place in mixed | whole or not pairs.any(), "a visible pair is in no block"
            assert place not in whole or (pairs.all() and pairs.shape == (block, block))
        assert sorted(plan.mixed_keys[row].tolist()) == list(range(-(-num_keys // block)))


@pytest.mark.parametrize("scores", SCORES)
def test_intervals_match_the_reference_mask(scores: Scores) -> None:
    from megalith.kernels.attention.scores import build_scores_mask

    for lengths in LENGTHS:
        seen, row, start = intervals(lengths, scores.window, scores.after), 0, 0
        for queries, keys in lengths:
            mask = build_scores_mask(queries, keys, scores, device=torch.device("cpu"))
            key = np.arange(keys) + start
            is_visible = (key >= seen[row : row + queries, :1]) & (
                key < seen[row : row + queries, 1:]
            )
            assert (is_visible == (True if mask is None else mask.numpy())).all()
            row, start = row + queries, start + keys


def test_block_mask_is_cached_for_all_layers() -> None:
    device = torch.device("cpu")
    assert block_mask(LENGTHS[0], 5, 0, device) is block_mask(LENGTHS[0], 5, 0, device)


def test_cpu_tensors_and_attention_dropout_are_not_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.empty(3, 2, 16)
    assert not can_use(q, q, Scores(softcap=2.0))
    monkeypatch.setattr("megalith.kernels.attention.flex.has_triton", lambda: True)
    there = torch.empty(3, 2, 16, device="meta")
    assert not can_use(there, there, Scores(softcap=2.0))
    assert not can_use(q, q, Scores(dropout=WeightDropout(0.1, 1, 0)))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU: compiled flex_attention"
)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("masks", [None, "beside", "alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_kernel_on_gpu_matches_the_reference(
    scores: Scores, dtype: torch.dtype, masks: str | None
) -> None:
    q, k, v, sink = inputs_of(LENGTHS[0], dtype, "cuda", size=64)
    sinks = None if scores.off_by_one else sink
    inputs = [q, k, v] if sinks is None else [q, k, v, sink]
    tokens = seq_params_from_queries(list(LENGTHS[0]), device="cuda")
    tokens = tokens if masks is None else masked("cuda", alone=masks == "alone")
    actual = attention(q, k, v, tokens, scores, sinks)
    reference = reference_attention(q.double(), k.double(), v.double(), tokens, scores, sinks)
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-4
    assert relative_error(actual, reference) <= allowed
    dy = torch.randn_like(actual)
    for a, b in zip(
        torch.autograd.grad(actual, inputs, dy), torch.autograd.grad(reference, inputs, dy.double())
    ):
        assert relative_error(a, b) <= 2 * allowed

"""Every attention backend records the largest visible score of each query head, scaled, before soft
cap, bias, sinks and softmax."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.kernels.attention.dispatch import attention, sdpa_supports
from megalith.kernels.attention.flex import flexible_attention
from megalith.kernels.attention.scores import MaxScores, Scores, build_scores_mask
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_lengths,
    with_masks,
    with_padding,
)
from megalith.testing.tolerance import FP32, FP64, assert_equals
from tests.cases import loop_over

LENGTHS = ([70, 5, 21], [17, 17], [130], [3])
SCORES = (
    Scores(),
    Scores(scale=0.7, window=6),
    Scores(window=8, chunked=True),
    Scores(softcap=1.5),
    Scores(off_by_one=True),
    Scores(causal=False),
    Scores(causal=False, window=5, right=2),
    Scores(relative=16),
)


def draw_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v, sinks and biases of 4 heads that share 2, with values of another width."""
    draw = torch.Generator().manual_seed(5)
    shapes = [(num_tokens, 4, 6), (num_tokens, 2, 6), (num_tokens, 2, 5), (4,), (8, 4)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def list_visible(tokens: PackedSeqParams, scores: Scores) -> Tensor:
    """Return which pairs are visible, bool [t, t], document by document."""
    visible = torch.zeros(tokens.num_tokens, tokens.num_tokens, dtype=torch.bool)
    start = 0
    for (length, _), mask in zip(tokens.lengths, _masks(tokens), strict=True):
        own = build_scores_mask(length, length, scores, device=torch.device("cpu"))
        block = torch.ones(length, length, dtype=torch.bool) if own is None else own
        place = slice(start, start + length)
        visible[place, place] = block if mask is None else block & mask
        start += length
    return visible


def _masks(tokens: PackedSeqParams) -> Iterator[Tensor | None]:
    if tokens.visible is None:
        yield from [None] * len(tokens.lengths)
    else:
        yield from tokens.visible.of_documents(tokens.lengths, tokens.lengths)


def expected_scores(q: Tensor, k: Tensor, tokens: PackedSeqParams, scores: Scores) -> Tensor:
    """Return the largest scores from all pairs at once."""
    visible = list_visible(tokens, scores) & tokens.valid[:, None]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.einsum("qnd,knd->nqk", q, k) * scores.factor(q.shape[2])
    return s.masked_fill(~visible, -math.inf).flatten(1).amax(1)


def backends_of(scores: Scores, tokens: PackedSeqParams, *, sinks: bool) -> list[BackendName]:
    names: list[BackendName] = ["auto", "reference", "torch"]
    if scores.relative is None:
        names.append("split_kv")
    plain = sdpa_supports(scores, torch.ones(1) if sinks else None)
    if plain or (scores.chunked and not sinks):
        names += [] if scores.chunked else ["sdpa"]
        names += [] if tokens.visible is not None or scores.chunked else ["cpu_tiled"]
    return names


def check_all_backends(tokens: PackedSeqParams, scores: Scores, *, sinks: bool) -> None:
    q, k, v, sink, table = draw_inputs(tokens.num_tokens)
    expected = expected_scores(q, k, tokens, scores)
    given = {"sinks": sink if sinks else None, "attention_bias": table}
    for backend in backends_of(scores, tokens, sinks=sinks):
        recorded = MaxScores(torch.full((4,), -math.inf, dtype=torch.float64))
        arguments = (q.requires_grad_(), k, v, tokens, scores)
        plain = attention(*arguments, kernel=backend, **given)
        measured = attention(*arguments, kernel=backend, max_scores=recorded, **given)
        assert_equals(f"{backend} {scores}", recorded.largest, expected, FP64)
        assert torch.equal(plain, measured), (backend, scores)
        assert not recorded.largest.requires_grad


@loop_over("scores", SCORES)
def test_all_backends_record_the_largest_visible_score(scores: Scores) -> None:
    for lengths in LENGTHS:
        for sinks in (False, True):
            check_all_backends(seq_params_from_lengths(lengths), scores, sinks=sinks)


@loop_over("scores", (Scores(), Scores(window=6), Scores(softcap=1.5), Scores(relative=16)))
def test_masked_pairs_and_padding_queries_do_not_count(scores: Scores) -> None:
    lengths = [17, 5, 17]
    draw = torch.Generator().manual_seed(1)
    masks = [torch.rand(n, n, generator=draw) < 0.6 for n in lengths]
    text = torch.rand(sum(lengths), generator=draw) < 0.7
    tokens = seq_params_from_lengths(lengths)
    for masked in (
        with_masks(tokens, [None, *masks[1:]]),
        with_padding(tokens, text),
        with_padding(with_masks(tokens, masks), text),
    ):
        check_all_backends(masked, scores, sinks=False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_records_the_largest_score_with_and_without_a_soft_cap() -> None:
    lengths = [40, 7, 90]
    tokens = seq_params_from_lengths(lengths)
    q, k, v, sinks, _ = (x.float() for x in draw_inputs(sum(lengths)))
    for scores in (Scores(), Scores(window=6), Scores(softcap=1.5), Scores(causal=False)):
        recorded = MaxScores(torch.full((4,), -math.inf))
        flexible_attention(
            q, k, v, tokens.lengths, scores, sinks, max_scores=recorded, compiled=False
        )
        expected = expected_scores(q, k, tokens, scores)
        assert_equals(f"flex {scores}", recorded.largest, expected, FP32)


def test_calls_accumulate_and_half_precision_is_recorded_in_fp32() -> None:
    tokens = seq_params_from_lengths([20])
    recorded = MaxScores(torch.full((4,), -math.inf))
    rows = []
    for seed in range(3):
        q, k, v, *_ = (x.roll(seed, 0).bfloat16() for x in draw_inputs(20))
        attention(q * (1 + seed), k, v, tokens, max_scores=recorded)
        rows.append(expected_scores((q * (1 + seed)).float(), k.float(), tokens, Scores()))
    assert recorded.largest.dtype == torch.float32
    assert_equals("largest", recorded.largest, torch.stack(rows).amax(0), FP32)


def test_head_without_visible_pairs_has_no_largest_score() -> None:
    tokens = with_padding(seq_params_from_lengths([4]), torch.zeros(4, dtype=torch.bool))
    q, k, v, *_ = draw_inputs(4)
    for backend in ("auto", "reference", "split_kv"):
        recorded = MaxScores(torch.full((4,), -math.inf, dtype=torch.float64))
        attention(q, k, v, tokens, max_scores=recorded, kernel=backend)
        assert bool((recorded.largest == -math.inf).all())

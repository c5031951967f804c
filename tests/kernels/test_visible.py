"""Tiles of attention masks are slices of them, in every row and for any rank's tokens."""

import pytest
import torch

from megalith.kernels.attention.scores import (
    PLAIN,
    AttentionMask,
    PairMask,
    Scores,
    build_scores_mask,
)
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_lengths,
    seq_params_from_queries,
    with_masks,
    with_padding,
)
from megalith.plan.context import plan_length_spans

RAGGED = seq_params_from_queries([(3, 3), (4, 9), (0, 0), (2, 2), (1, 70)])
ROWS = seq_params_from_lengths([9] * 3)


def masked(tokens: PackedSeqParams) -> AttentionMask:
    """Masks of all documents but the second, and padding."""
    draw = torch.Generator().manual_seed(0)
    masks = [
        None if n == 1 else torch.rand(size, generator=draw) < 0.5
        for n, size in enumerate(tokens.lengths)
    ]
    text = torch.rand(sum(keys for _, keys in tokens.lengths), generator=draw) < 0.8
    visible = with_padding(with_masks(tokens, masks), text).visible
    assert visible is not None
    return visible


def of_all(tokens: PackedSeqParams) -> PairMask:
    keys = torch.arange(sum(keys for _, keys in tokens.lengths))
    return PairMask(masked(tokens), torch.arange(tokens.num_tokens), keys)


def expected(tokens: PackedSeqParams) -> torch.Tensor:
    """bool [t, t_kv]: what each query may see of its own document."""
    blocks = masked(tokens).of_documents(tokens.lengths, tokens.lengths)
    filled = [
        torch.ones(size, dtype=torch.bool) if mask is None else mask.expand(size)
        for size, mask in zip(tokens.lengths, blocks)
    ]
    return torch.block_diag(*(block.float() for block in filled)).bool()


@pytest.mark.parametrize("tokens", [RAGGED, ROWS])
def test_tiles_and_rows_are_slices_of_the_masks(tokens: PackedSeqParams) -> None:
    spans, seen, whole = (
        plan_length_spans(tokens.lengths, causal=False),
        of_all(tokens),
        expected(tokens),
    )
    heads, rows = 2 * spans.repeats, spans.repeats
    q = torch.empty(heads, 2, tokens.num_tokens // rows, 4)
    inside = torch.block_diag(*(torch.ones(size) for size in tokens.lengths)).bool()
    length, keys = tokens.num_tokens // rows, len(seen.keys) // rows
    for tile in spans.tiles:
        for some in (slice(0, heads), slice(1, heads), slice(heads - 1, heads)):
            result = seen.of_tile(spans, tile, some, q)
            for found_of_head, head in zip(result, range(heads)[some], strict=True):
                queries = slice(head // 2 * length + tile.start, head // 2 * length + tile.stop)
                columns = slice(head // 2 * keys + tile.first, head // 2 * keys + tile.last)
                own = inside[queries, columns]  # of other documents a tile knows itself
                assert torch.equal(found_of_head[0] & own, whole[queries, columns])
    for row in range(rows):
        queries, columns = (
            slice(row * length, (row + 1) * length),
            slice(row * keys, (row + 1) * keys),
        )
        assert torch.equal(
            seen.of_row(row, rows) & inside[queries, columns], whole[queries, columns]
        )


def test_queries_and_keys_may_be_any_subset() -> None:
    whole = expected(RAGGED)
    queries, keys = torch.tensor([0, 2, 4, 8, 9]), torch.tensor([1, 2, 5, 13, 40, 83])
    inside = torch.block_diag(*(torch.ones(size) for size in RAGGED.lengths)).bool()[queries][
        :, keys
    ]
    result = PairMask(masked(RAGGED), queries, keys).of_row(0, 1)
    assert torch.equal(result & inside, whole[queries][:, keys])


def test_the_last_keys_of_a_document_have_the_last_columns() -> None:
    left = tuple((queries, min(keys, queries + 2)) for queries, keys in RAGGED.lengths)
    visible = masked(RAGGED)
    both = zip(
        visible.of_documents(RAGGED.lengths, RAGGED.lengths),
        visible.of_documents(RAGGED.lengths, left),
        left,
    )
    for mask, part, (_, keys) in both:
        assert (
            mask is not None
            and part is not None
            and torch.equal(part, mask[:, mask.shape[1] - keys :])
        )


def test_only_masks_with_alone_replace_causality() -> None:
    beside, alone = AttentionMask(), AttentionMask(alone=True)
    for scores in (
        PLAIN,
        Scores(window=3),
        Scores(window=3, chunked=True),
        Scores(causal=False, window=3),
    ):
        assert beside.scores(scores) == scores
    device = torch.device("cpu")
    assert build_scores_mask(4, 6, alone.scores(PLAIN), device=device) is None
    windowed = build_scores_mask(4, 6, alone.scores(Scores(window=3)), device=device)
    before = build_scores_mask(4, 6, Scores(window=3), device=device)
    assert windowed is not None and before is not None and torch.equal(windowed, before)
    chunks = build_scores_mask(4, 6, alone.scores(Scores(window=3, chunked=True)), device=device)
    assert (
        chunks is not None
        and chunks.tolist() == [[True] * 3 + [False] * 3] + [[False] * 3 + [True] * 3] * 3
    )
    bidirectional = Scores(causal=False, window=3, right=1)
    assert alone.scores(bidirectional) == bidirectional

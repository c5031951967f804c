"""Slices of tokens: each token on exactly one rank, equal work, and what a query sees on any rank
is one interval."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.errors import PlanError
from megalith.plan.context import (
    TILE_ROWS,
    Slices,
    Slicing,
    context_problems,
    layer_context_kind,
    plan_length_spans,
    plan_slices,
    plan_spans,
    restore_token_order,
    zigzag,
)
from tests.cases import loop_over

MODEL = ModelConfig(
    vocab_size=61, hidden_size=24, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=20
)
RAGGED = {
    "rows": ([12, 12, 12], 12),
    "one row": ([24], 24),
    "documents": ([5, 7, 1, 11, 12], 12),
    "long and short": ([1, 1, 20, 2, 24], 24),
    "an empty one": ([5, 0, 3, 16], 12),
}


@pytest.mark.parametrize(
    ("ranks", "chunks"),
    [
        (1, [(0, 1)]),
        (2, [(0, 3), (1, 2)]),
        (3, [(0, 5), (1, 4), (2, 3)]),
        (4, [(0, 7), (1, 6), (2, 5), (3, 4)]),
    ],
)
def test_each_rank_has_an_early_and_a_late_chunk(ranks: int, chunks: list[tuple[int, int]]) -> None:
    expected = [[3 * chunk + i for chunk in pair for i in range(3)] for pair in chunks]
    assert zigzag(6 * ranks, ranks).tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_causal_work_is_the_same_on_every_rank(ranks: int) -> None:
    """In pairs of chunks: 2 · ranks + 1 for each rank, those on the diagonal counted whole."""
    chunk = 4
    work = [
        int((numbers // chunk + 1)[::chunk].sum()) for numbers in zigzag(2 * ranks * chunk, ranks)
    ]
    assert work == [2 * ranks + 1] * ranks


@pytest.mark.parametrize("by", ["row", "document"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch", RAGGED)
def test_every_token_is_on_one_rank_and_undo_restores_the_order(
    batch: str, ranks: int, by: str
) -> None:
    lengths, row = RAGGED[batch]
    slices = plan_slices(lengths, row=row, slicing=Slicing(ranks=ranks, by=by, multiple=3))  # type: ignore[arg-type]
    assert np.sort(slices.numbers.reshape(-1)).tolist() == list(range(slices.num_tokens))
    assert (np.diff(slices.numbers, axis=1) > 0).all()  # ascending on every rank
    values = np.random.default_rng(0).integers(0, 99, (sum(lengths), 2))
    parts = [
        np.where(read[:, None] >= 0, values[read], -7) for read in map(slices.as_read, range(ranks))
    ]
    assert (restore_token_order(np.stack(parts), slices) == values).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slicing_by_document_gives_each_rank_two_chunks_of_every_padded_document(
    ranks: int,
) -> None:
    slices = plan_slices([5, 3, 8, 1], row=17, slicing=Slicing(ranks=ranks, by="document"))
    assert all(length % (2 * ranks) == 0 for length in slices.lengths)
    for rank in range(ranks):
        held = np.bincount(slices.document()[slices.numbers[rank]])
        # prefix sums of a rank are those of all, divided
        assert (held * ranks == slices.lengths).all()
    sources = [slices.as_read(rank) for rank in range(ranks)]
    assert sorted(n for read in sources for n in read.tolist() if n >= 0) == list(range(17))


def test_packed_documents_have_the_partition_of_the_formula() -> None:
    """Padded lengths 8 and 16 at 2 ranks: chunks of 2 and 4 tokens, [r q, (r + 1) q) and [(3 - r)
    q, (4 - r) q)."""
    slices = plan_slices([8, 16], row=24, slicing=Slicing(ranks=2, by="document"))
    assert slices.source is None
    assert slices.numbers.tolist() == [
        [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23],
        [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19],
    ]
    assert slices.starts().tolist() == [0] * 8 + [8] * 16


def test_neighbors_together_have_the_slices_of_a_coarser_ring() -> None:
    slices = plan_slices([24, 24], row=24, slicing=Slicing(ranks=6))
    coarse = plan_slices([24, 24], row=24, slicing=Slicing(ranks=2))
    assert (slices.joined(3) == coarse.numbers).all()
    assert slices.joined(6).tolist() == [list(range(48))]


def visible_by_rule(
    slices: Slices, queries: list[int], keys: list[int], window: int | None
) -> NDArray[np.bool_]:
    """Which keys each query sees, pair by pair."""
    document = slices.document()
    return np.array(
        [
            [
                document[i] == document[j] and j <= i and (window is None or i - j < window)
                for j in keys
            ]
            for i in queries
        ]
    )


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(
    "lengths",
    [
        ((5, 5), (1, 1), (70, 70)),
        ((4, 4), (4, 4)),
        ((2, 5), (1, 70), (0, 3)),
        ((1, 6), (1, 6)),
        ((0, 0),),
    ],
)
def test_queries_of_documents_are_the_last_of_their_keys(
    lengths: tuple[tuple[int, int], ...], window: int | None
) -> None:
    spans = plan_length_spans(lengths, window)
    every, start = [], 0
    for queries, keys in lengths:
        for own in range(start + keys - queries, start + keys):
            every.append([start if window is None else max(start, own - window + 1), own + 1])
        start += keys
    row = len(every) // spans.repeats
    assert spans.visible.tolist() == every[:row]
    assert spans.repeats == (len(lengths) if len(set(lengths)) == 1 else 1)
    assert plan_length_spans(lengths, window) is spans, "layers after the first plan nothing"


@pytest.mark.parametrize(
    ("window", "right"), [(None, None), (1, None), (3, None), (3, 0), (2, 4), (99, 1)]
)
@pytest.mark.parametrize(
    "lengths", [((5, 5), (1, 1), (70, 70)), ((4, 4), (4, 4)), ((2, 5), (1, 70)), ((1, 1),)]
)
def test_bidirectional_query_sees_its_document_or_a_symmetric_window(
    lengths: tuple[tuple[int, int], ...], window: int | None, right: int | None
) -> None:
    spans, start, every = plan_length_spans(lengths, window, causal=False, right=right), 0, []
    after = window - 1 if window is not None and right is None else right
    for queries, keys in lengths:
        for own in range(start + keys - queries, start + keys):
            near = range(start, start + keys)
            seen = [
                j
                for j in near
                if window is None or after is None or own - window < j <= own + after
            ]
            every.append([seen[0], seen[-1] + 1])
        start += keys
    assert spans.visible.tolist() == every[: len(every) // spans.repeats]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("by", ["row", "document"])
def test_query_sees_its_attention_chunk_on_any_rank(
    by: Literal["row", "document"], causal: bool
) -> None:
    slices = plan_slices([13, 24, 1, 10], row=48, slicing=Slicing(ranks=2, by=by))
    starts, ends, document = slices.starts(), slices.ends(), slices.document()
    runs = (np.arange(len(starts)) - starts) // 5
    for queries in slices.numbers:
        for keys in slices.numbers:
            given: dict[str, Any] = {"ends": None if causal else ends, "window": 5, "chunked": True}
            visible = plan_spans(queries, keys, starts, **given).visible
            for i, (first, last) in zip(queries, visible, strict=True):
                seen = [
                    j
                    for j in keys
                    if document[i] == document[j]
                    and runs[i] == runs[j]
                    and (j <= i if causal else j < ends[j])
                ]
                assert seen == keys[first:last].tolist()


def test_bidirectional_attention_may_have_more_queries_than_keys() -> None:
    spans = plan_length_spans(((3, 2), (0, 4), (2, 0), (40, 1), (40, 90)), causal=False)
    assert spans.visible[:5].tolist() == [[0, 2], [0, 2], [0, 2], [6, 6], [6, 6]]
    assert spans.visible[5:].tolist() == [[6, 7]] * 40 + [[7, 97]] * 40
    assert sum(tile.stop - tile.start for tile in spans.tiles) in (83, 85)


def test_documents_with_a_cache_share_no_mostly_masked_tile() -> None:
    lengths = tuple((1, 400 + 7 * n) for n in range(64))
    tiles = plan_length_spans(lengths).tiles
    assert sum((tile.stop - tile.start) * (tile.last - tile.first) for tile in tiles) < 5 * sum(
        k for _, k in lengths
    )
    short = plan_length_spans(((20, 20),) * 9 + ((3, 3),)).tiles
    assert [tile.stop - tile.start for tile in short] == [64, 64, 55], (
        "short documents still fill tiles"
    )


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("by", ["row", "document"])
@pytest.mark.parametrize("batch", RAGGED)
def test_intervals_and_tiles_contain_the_visible_keys_of_every_query(
    batch: str, by: str, window: int | None
) -> None:
    lengths, row = RAGGED[batch]
    slices = plan_slices(lengths, row=row, slicing=Slicing(ranks=3, by=by))  # type: ignore[arg-type]
    for queries in slices.numbers:
        for keys in slices.numbers:
            spans = plan_spans(queries, keys, slices.starts(), window=window)
            expected = visible_by_rule(slices, queries.tolist(), keys.tolist(), window)
            place = np.arange(len(keys))
            assert (
                (place >= spans.visible[:, :1]) & (place < spans.visible[:, 1:]) == expected
            ).all()
            result = np.zeros_like(expected)
            for tile in spans.tiles:
                inside = np.arange(tile.last - tile.first)
                seen = slice(tile.start, tile.stop), slice(tile.first, tile.last)
                rows = tile.visible
                result[seen] = (
                    True if rows is None else (inside >= rows[:, :1]) & (inside < rows[:, 1:])
                )
            assert (result == expected).all()


@loop_over("seed", range(20))
def test_last_token_attends_to_its_whole_document(seed: int) -> None:
    """Over all ranks together, each query finds exactly its document's earlier tokens and
    itself."""
    draw = np.random.default_rng(seed)
    ranks = int(draw.integers(1, 5))
    row = 2 * ranks * int(draw.integers(2, 12))
    cuts = np.sort(draw.choice(np.arange(1, 2 * row), size=int(draw.integers(0, 9)), replace=False))
    lengths = np.diff([0, *cuts.tolist(), 2 * row])
    by = "document" if draw.integers(2) else "row"
    slices = plan_slices(lengths, row=row, slicing=Slicing(ranks=ranks, by=by))  # type: ignore[arg-type]
    starts = slices.starts()
    for queries in slices.numbers:
        seen = sum(
            np.diff(plan_spans(queries, keys, starts).visible)[:, 0] for keys in slices.numbers
        )
        assert (seen == queries - starts[queries] + 1).all()


def test_no_token_attends_to_padding() -> None:
    slices = plan_slices([5, 3, 9, 7], row=24, slicing=Slicing(ranks=2, by="document", multiple=2))
    assert slices.source is not None
    padding = slices.source < 0
    for queries in slices.numbers:
        for keys in slices.numbers:
            spans = plan_spans(queries, keys, slices.starts())
            for query, (first, last) in zip(queries, spans.visible):
                assert padding[query] or not padding[keys[first:last]].any()


def test_equal_rows_are_planned_once_and_masked_tiles_are_skipped() -> None:
    slices = plan_slices([512] * 3, row=512, slicing=Slicing(ranks=2))
    first, second = (
        plan_spans(slices.numbers[1], keys, slices.starts(), repeats=3) for keys in slices.numbers
    )
    assert slices.repeats == 3 and len(first.visible) == 256
    # Chunks 1 and 2 see all of chunk 0 and nothing of chunk 3: half of the keys of rank 0, without
    # any mask.
    assert {(tile.first, tile.last, tile.visible is None) for tile in first.tiles} == {
        (0, 128, True)
    }
    assert all(tile.stop - tile.start == TILE_ROWS for tile in first.tiles + second.tiles)
    # only the diagonal is masked
    assert sum(tile.visible is not None for tile in second.tiles) == 4


def test_a_row_that_does_not_divide_is_rejected_with_the_next_length() -> None:
    with pytest.raises(PlanError, match=r"length=10 does not divide into 2 \* 2 chunks.* Use 12\."):
        plan_slices([10], row=10, slicing=Slicing(ranks=2))
    with pytest.raises(PlanError, match=r"documents of 13 tokens do not fill rows of 12. Pass"):
        plan_slices([13], row=12, slicing=Slicing(ranks=2))


def problems(
    seq_len: int = 24,
    model: ModelConfig = MODEL,
    tp: int = 1,
    sp: bool = False,
    cp: int = 4,
    **c: object,
) -> str:
    context = replace(ContextConfig(), **c)  # type: ignore[arg-type]
    return "\n".join(
        context_problems(
            ParallelConfig(tp=tp, sp=sp, cp=cp, context=context), model, seq_len=seq_len
        )
    )


def test_valid_layouts_have_no_problems() -> None:
    assert problems(cp=1, seq_len=7, kind="a2a") == ""
    assert (
        problems() == "" and problems(kind="a2a") == "" and problems(kind="a2a+ring", a2a=2) == ""
    )
    assert problems(seq_len=30, slicing="document") == ""
    assert problems(layers=("ring", "a2a")) == ""
    assert problems(kind="a2a+ring", a2a=2, layers=("a2a+ring", "gather")) == ""


def test_each_violated_rule_names_the_field_and_a_valid_value() -> None:
    assert "train.seq_len=30 does not divide by 2 * 4 = 8" in problems(30)
    assert "Set train.seq_len to 32 or 24, or parallel.context.slicing to document" in problems(30)
    assert "2 * parallel.cp * parallel.tp = 2 * 4 * 2 = 16" in problems(24, tp=2, sp=True)
    assert "Set train.seq_len to 32 or 16" in problems(24, tp=2, sp=True)
    assert problems(24, tp=2) == ""
    assert (
        "parallel.cp=3 with a2a: model.num_heads=4 over parallel.tp=1 are 4 heads on a rank"
        in problems(cp=3, kind="a2a")
    )
    assert "or model.num_heads to 6" in problems(cp=3, kind="a2a")
    assert "a2a+ring with parallel.context.a2a in [2]" in problems(tp=2, kind="a2a")
    assert "parallel.context.a2a=4: model.num_heads=4 over parallel.tp=2 are 2 heads" in problems(
        tp=2, kind="a2a+ring", a2a=4
    )
    assert "parallel.context.a2a=3 does not divide parallel.cp=4" in problems(
        kind="a2a+ring", a2a=3
    )
    assert "Set parallel.context.a2a to one of [2]." in problems(kind="a2a+ring")
    assert "names 3 kinds for model.num_layers=2 layers. Use one for each" in problems(
        layers=("ring",) * 3
    )
    assert "a2a+ring, but parallel.context.kind=ring has no all-to-all groups" in problems(
        layers=("ring", "a2a+ring")
    )
    assert (
        "parallel.context.a2a=2 is for parallel.context.kind=a2a+ring, which ring is not"
        in problems(a2a=2)
    )
    assert (
        "parallel.context.layers[1]=rings is not a known kind of context parallelism. "
        "Did you mean ring" in problems(layers=("ring", "rings"))
    )
    assert len(problems(30, layers=("ring",) * 3).splitlines()) == 2


def test_a_layer_has_its_own_kind_where_kinds_are_listed() -> None:
    listed = ContextConfig(layers=("ring", "a2a"))
    assert [layer_context_kind(listed, layer) for layer in range(2)] == ["ring", "a2a"]
    assert layer_context_kind(ContextConfig(kind="gather"), 7) == "gather"

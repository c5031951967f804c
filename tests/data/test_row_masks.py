"""Masks of rows reach the tokens document by document, on every rank, and what does not fit is
named."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megalith.config.data import DataConfig
from megalith.config.model import AttentionConfig, ModelConfig
from megalith.data.loader import MaskSettings, build_batch, build_mask_settings
from megalith.data.packs import join_masks, pack_documents, with_row_masks
from megalith.data.sample import PackedSample, RowMask, Sample
from megalith.errors import DataError
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import PairMask, Scores
from megalith.kernels.packed import PackedSeqParams, seq_params_from_lengths
from megalith.plan.batch_assignment import TokenBudget
from megalith.plan.context import Slicing

CPU = torch.device("cpu")
DRAW = np.random.default_rng(0)
PAIRS = [RowMask(DRAW.random((12, 12)) < 0.5) for _ in range(2)]
TEXT = RowMask(np.arange(12) < 7)


def sample(mask: RowMask | None, k: int = 0) -> Sample:
    return Sample(np.random.default_rng(k).integers(1, 50, 13), 13, mask=mask)


def seen(tokens: PackedSeqParams) -> NDArray[np.bool_]:
    """[t, t]: what the masks let each token see of its own document."""
    visible, whole = tokens.whole.visible, tokens.whole
    assert visible is not None
    every = torch.arange(whole.num_tokens)
    result = PairMask(visible, every, every).of_row(0, 1).expand(whole.num_tokens, -1)
    own: NDArray[np.bool_] = (result & (whole.document_ids == whole.document_ids[:, None])).numpy()
    return own


def test_row_mask_determines_visible_tokens_at_any_document_boundary() -> None:
    rows = [sample(PAIRS[0], 1), sample(TEXT, 2), sample(None, 3), sample(PAIRS[1], 4)]
    rows[3].ids[4] = 0  # ends a document
    for masks, lengths in (
        (MaskSettings(), [12] * 4),
        (MaskSettings(eod=0, documents=True), [12, 12, 12, 5, 7]),
    ):
        batch = build_batch(rows, masks, device=CPU)
        assert [keys for _, keys in batch.seq_params.lengths] == lengths
        result = seen(batch.seq_params)
        for n, mask in enumerate(
            (PAIRS[0].seen, np.tile(TEXT.seen, (12, 1)), np.ones((12, 12), bool), PAIRS[1].seen)
        ):
            here = slice(12 * n, 12 * (n + 1))
            own = batch.seq_params.document_ids[here] == batch.seq_params.document_ids[here, None]
            assert np.array_equal(result[here, here], mask & own.numpy())
        assert batch.seq_params.valid.tolist() == [True] * 12 + TEXT.seen.tolist() + [True] * 24


def test_padding_of_rows_is_masked_for_bidirectional_models() -> None:
    short = replace(sample(None, 1), num_valid=9)
    rows = [
        sample(None, 2),
        short,
        replace(sample(PAIRS[0], 3), num_valid=5),
        replace(sample(TEXT, 4), num_valid=4),
    ]
    batch, text = build_batch(rows, MaskSettings(padding=True), device=CPU), np.arange(12)
    result = seen(batch.seq_params)
    for n, mask in enumerate((text < 12, text < 9, PAIRS[0].seen & (text < 5), text < 4)):
        here = slice(12 * n, 12 * (n + 1))
        assert np.array_equal(result[here, here], np.broadcast_to(mask, (12, 12)))
    assert batch.seq_params.valid.tolist() == [*[True] * 12, *(text < 9), *(text < 5), *(text < 4)]
    assert build_batch([rows[0], short], MaskSettings(), device=CPU).seq_params.visible is None
    assert (
        build_batch([rows[0], rows[0]], MaskSettings(padding=True), device=CPU).seq_params.visible
        is None
    )
    whole = replace(short, num_valid=12)  # only the last label is padding
    assert build_batch([whole], MaskSettings(padding=True), device=CPU).seq_params.visible is None


def test_rows_that_fill_up_a_batch_require_no_backend_with_masks() -> None:
    tokens = build_batch(
        [sample(None, 1), sample(None, 2).blank()], MaskSettings(padding=True), device=CPU
    ).seq_params
    assert tokens.visible is None
    x = torch.randn(24, 2, 8)
    assert attention(x, x, x, tokens, Scores(causal=False), kernel="cpu_tiled").isfinite().all()


def test_whether_padding_is_hidden_follows_from_the_model() -> None:
    model = ModelConfig(
        vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=8
    )
    bidirectional = replace(model, attention=AttentionConfig(causal=False))
    data = DataConfig(mock=True, document_masking=True, eod_mask_loss=True)
    assert build_mask_settings(data, model, 3) == MaskSettings(
        eod=3, documents=True, eod_mask_loss=True
    )
    assert build_mask_settings(data, bidirectional, None) == MaskSettings(
        documents=True, eod_mask_loss=True, padding=True
    )


def test_rows_without_masks_are_as_before() -> None:
    batch = build_batch([sample(None, 1), sample(None, 2)], MaskSettings(), device=CPU)
    assert batch.seq_params.visible is None


@pytest.mark.parametrize("by", ["row", "document"])
def test_context_parallel_ranks_have_the_masks_of_whole_rows(
    by: Literal["row", "document"],
) -> None:
    rows, masks = [sample(PAIRS[0], 1), sample(TEXT, 2)], MaskSettings(eod=0, documents=True)
    rows[0].ids[4] = 0
    alone = build_batch(rows, masks, device=CPU).seq_params
    for rank in range(2):
        tokens = build_batch(
            rows, masks, device=CPU, slicing=Slicing(ranks=2, rank=rank, by=by)
        ).seq_params
        assert tokens.visible is None and tokens.context is not None
        source = tokens.context.slices.source
        read = np.arange(24) if source is None else np.flatnonzero(source >= 0)
        result = seen(tokens)
        assert np.array_equal(result[read][:, read], seen(alone))
        if source is not None:
            assert not result[:, source < 0].any(), "padding that slicing needs is seen by none"
        local = tokens.context.slices.as_read(rank)
        assert tokens.valid.tolist() == [bool(at >= 0 and alone.valid[at]) for at in local]


def test_packed_rows_have_separate_masks_and_padding_attends_to_nothing() -> None:
    documents = [
        PackedSample(np.arange(n), np.arange(n), (n,), n, mask=mask)
        for n, mask in (
            (3, RowMask(np.eye(3, dtype=bool))),
            (2, None),
            (4, RowMask(np.arange(4) != 1)),
        )
    ]
    row = pack_documents(documents, TokenBudget(capacity=12, longest=8))
    assert row.mask is not None and not row.mask.alone
    expected = np.zeros((12, 12), bool)
    expected[:3, :3], expected[3:5, 3:5], expected[5:9, 5:9] = np.eye(3), True, np.arange(4) != 1
    assert np.array_equal(row.mask.seen, expected)
    assert (
        pack_documents(
            [replace(document, mask=None) for document in documents],
            TokenBudget(capacity=12, longest=8),
        ).mask
        is None
    )
    assert row.mask.text is not None and row.mask.text.tolist() == [
        *[True] * 6,
        False,
        True,
        True,
        *[False] * 3,
    ]
    every = join_masks([RowMask(np.ones((2, 2), bool), alone=True)] * 2, [2, 2], 5)
    assert every is not None and every.alone and every.seen.sum() == 8 and every.text is None


def test_padding_in_packed_rows_equals_padding_in_separate_rows() -> None:
    text, rest = np.arange(4) != 1, np.arange(8) < 7
    row = join_masks([RowMask(text), None], [4, 3], 8)
    assert row is not None and row.seen.tolist() == [*text, *[True] * 3, False], (
        "no [8, 8] for what [8] says"
    )
    pairs = join_masks([RowMask(np.eye(4, dtype=bool), text=text), None], [4, 3], 8)
    assert (
        pairs is not None
        and pairs.text is not None
        and pairs.text.tolist() == [*text, *[True] * 3, False]
    )
    for mask in (row, pairs):
        tokens = with_row_masks(seq_params_from_lengths([4, 3, 1]), [mask], [4, 3, 1])
        assert tokens.valid.tolist() == [*text, *rest[4:]] and not seen(tokens)[:, [1, 7]].any()


def test_empty_rows_keep_the_kind_of_mask() -> None:
    for mask in (RowMask(PAIRS[0].seen, alone=True), TEXT):
        blank, packed = (
            sample(mask).blank(),
            PackedSample(np.ones(12), np.ones(12), (12,), 12, mask=mask).blank(),
        )
        for row in (blank, packed):
            assert row.mask is not None and row.mask.alone == mask.alone and not row.mask.seen.any()
        batch = build_batch([sample(mask), blank], MaskSettings(), device=CPU)
        assert not seen(batch.seq_params)[12:].any()
    assert sample(None).blank().mask is None


MISTAKES = {
    "shape": (
        [RowMask(np.ones((3, 4), bool))],
        "the mask of row 0 has shape [3, 4]: a row of 4 tokens needs [4, 4], or [4]",
    ),
    "padding": (
        [RowMask(np.ones((4, 4), bool), text=np.ones(3, bool))],
        "the padding mask of row 0 has shape [3]: a row of 4 tokens needs",
    ),
    "numbers": (
        [RowMask(np.ones(4))],
        "the mask of row 0 has dtype float64: expected bool, True where a token may be attended",
    ),  # type: ignore[arg-type]  # the mistake
    "two kinds": (
        [RowMask(np.ones((4, 4), bool), alone=True), None],
        "rows of one microbatch have alone=[True, False]: masks that replace the causal mask need "
        "shape [s, s]",
    ),
    "padding alone": (
        [RowMask(np.ones(4, bool), alone=True)],
        "in every row of the microbatch. Use np.tril",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_row_masks_are_reported(mistake: str) -> None:
    rows, text = MISTAKES[mistake]
    with pytest.raises(DataError) as excinfo:
        with_row_masks(seq_params_from_lengths([4] * len(rows)), rows, [4] * len(rows))
    assert text in str(excinfo.value)
    with pytest.raises(DataError):
        join_masks(rows, [4] * len(rows), 8)

"""Attention masks are validated, and stored for whole documents under context parallelism."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.errors import DataError
from megalith.kernels.attention.scores import NO_MASK
from megalith.kernels.packed import (
    PackedSeqParams,
    mask_row_starts,
    seq_params_from_lengths,
    seq_params_from_queries,
    seq_params_from_slices,
    with_masks,
    with_padding,
)
from megalith.plan.context import Slicing, plan_slices

THREE = seq_params_from_queries([(2, 3), (3, 3), (1, 4)])


def masks() -> list[Tensor | None]:
    return [torch.eye(3).bool()[1:], None, torch.tensor([[True, False, True, False]])]


def of_documents(tokens: PackedSeqParams) -> list[Tensor | None]:
    assert tokens.whole.visible is not None
    return tokens.whole.visible.of_documents(tokens.whole.lengths, tokens.whole.lengths)


def test_each_document_has_its_mask() -> None:
    first, second, third = of_documents(with_masks(THREE, masks()))
    assert first is not None and first.tolist() == [[False, True, False], [False, False, True]]
    assert second is None
    assert third is not None and third.tolist() == [[True, False, True, False]]


def test_masks_and_padding_combine_in_any_order() -> None:
    text = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1, 0, 0]).bool()
    for tokens in (
        with_padding(with_masks(THREE, masks()), text),
        with_masks(with_padding(THREE, text), masks()),
    ):
        first, second, third = of_documents(tokens)
        assert first is not None and first.tolist() == [[False, True, False], [False, False, False]]
        assert second is not None and second.tolist() == [[True, False, True]]
        assert third is not None and third.tolist() == [[True, False, False, False]]
    less = of_documents(with_padding(with_padding(THREE, text), torch.arange(10) != 3))[1]
    assert less is not None and less.tolist() == [[False, False, True]]


def test_masks_without_hidden_keys_are_removed_and_new_masks_replace_old_ones() -> None:
    assert with_masks(THREE, [None] * 3).visible is None
    empty = seq_params_from_lengths([0, 0])
    assert with_masks(empty, [torch.ones(0, 0).bool(), None]).visible is None
    assert with_masks(with_masks(THREE, masks()), [None] * 3).visible is None


def test_padding_of_whole_documents_is_not_valid() -> None:
    text = torch.tensor([True, True, False, True, False])
    tokens = with_padding(seq_params_from_lengths([3, 2]), text)
    assert torch.equal(tokens.valid, text)
    assert with_padding(THREE, torch.zeros(10).bool()).valid.all(), (
        "of which some tokens were read before"
    )


def test_mask_row_starts() -> None:
    lengths, starts = [(2, 3), (3, 3), (0, 2), (1, 4)], [0, None, None, 6]
    rows = mask_row_starts(lengths, starts)
    assert rows.tolist() == [0, 3, NO_MASK, NO_MASK, NO_MASK, 6 - 8]
    assert mask_row_starts([], []).tolist() == []


MISTAKES: dict[str, tuple[Any, str]] = {
    "too few": (
        lambda: with_masks(THREE, masks()[:2]),
        "masks: got 2 masks for 3 documents. Pass one mask for each document, or None",
    ),
    "shape": (
        lambda: with_masks(THREE, [masks()[0], None, torch.ones(4, 1).bool()]),
        "masks[2] has the shape [4, 1]: document 2 requires [1, 4] (1 queries, 4 keys). Pass a "
        "tensor of that shape.",
    ),
    "added to scores": (
        lambda: with_masks(THREE, [torch.zeros(2, 3), None, None]),
        "masks[0] is torch.float32: expected torch.bool, True where a query may see a key. Pass "
        "masks[0].bool(), or masks[0] == 0 if it is an additive mask.",
    ),
    "elsewhere": (
        lambda: with_masks(
            THREE, [masks()[0], None, torch.ones(1, 4, dtype=torch.bool, device="meta")]
        ),
        "masks[2] is on meta, but the tokens are on cpu. Pass masks[2].to('cpu').",
    ),
    "none of one document": (
        lambda: with_masks(THREE, masks(), alone=True),
        "masks[1]=None with alone=True: the masks replace causality, so each document needs one. "
        "For a causal mask pass torch.ones(3, 3, dtype=torch.bool).tril(0).",
    ),
    "padding of queries alone": (
        lambda: with_padding(THREE, torch.ones(6).bool()),
        "text has the shape [6]: padding of 3 documents requires [10]. Pass a tensor of that "
        "shape.",
    ),
    "padding as numbers": (
        lambda: with_padding(THREE, torch.ones(10, dtype=torch.int64)),
        "text is torch.int64: expected torch.bool",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_masks_are_reported(mistake: str) -> None:
    run, text = MISTAKES[mistake]
    with pytest.raises(DataError) as excinfo:
        run()
    assert text in str(excinfo.value)


def test_suggested_mask_is_causal() -> None:
    assert torch.ones(1, 4, dtype=torch.bool).tril(3).all()  # one query, the last of four keys
    assert torch.ones(2, 3, dtype=torch.bool).tril(1).tolist() == [
        [True, True, False],
        [True, True, True],
    ]


def test_context_parallel_masks_cover_whole_documents_and_padding() -> None:
    slicing = Slicing(ranks=2, rank=1, by="document")
    slices = plan_slices([5, 3], row=8, slicing=slicing)
    given = [torch.rand(n, n, generator=torch.Generator().manual_seed(n)) < 0.5 for n in (5, 3)]
    tokens = with_masks(seq_params_from_slices(slices, slicing), list(given), alone=True)
    assert tokens.visible is None, "what ranks share, the whole has"
    first, second = of_documents(tokens)
    assert (
        first is not None
        and second is not None
        and first.shape == (8, 8)
        and second.shape == (4, 4)
    )
    assert torch.equal(first[:5, :5], given[0]) and torch.equal(second[:3, :3], given[1])
    assert first.sum() == given[0].sum() and second.sum() == given[1].sum()
    text = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1]).bool()
    padded = with_padding(seq_params_from_slices(slices, slicing), text)
    read = torch.from_numpy(slices.as_read(1))
    assert padded.valid.tolist() == [bool(at >= 0 and text[at]) for at in read.tolist()]
    assert padded.whole.visible is not None and padded.whole.visible.keys is not None
    assert padded.whole.visible.keys.tolist() == [
        *text[:5].tolist(),
        *[False] * 3,
        *text[5:].tolist(),
        False,
    ]
    with pytest.raises(
        DataError, match=r"masks\[0\] has the shape \[8, 8\]: document 0 requires \[5, 5\]"
    ):
        with_masks(tokens, [torch.ones(8, 8).bool(), None])


def test_context_parallel_rows_keep_their_lengths() -> None:
    slicing = Slicing(ranks=2, rank=0)
    tokens = seq_params_from_slices(plan_slices([3, 5], row=8, slicing=slicing), slicing)
    text = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1]).bool()
    assert with_padding(tokens, text).valid.tolist() == text[[0, 1, 6, 7]].tolist()
    masked = of_documents(with_masks(tokens, [torch.eye(3).bool(), None]))
    assert (
        masked[0] is not None and torch.equal(masked[0], torch.eye(3).bool()) and masked[1] is None
    )


PAGE = Path(__file__).parents[2] / "docs/concepts/layers.md"


def test_example_of_the_docs_prints_its_output(capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Masks and padding")[1].split("\n## ")[0]
    code, printed = section.split("```python\n")[1].split("```\n")[0], section.split("```\n")[2]
    exec(code, {})  # lint: allow eval-exec: our own page
    assert capsys.readouterr().out == printed


def test_other_fields_are_unchanged() -> None:
    tokens = replace(seq_params_from_lengths([3]), reach=(9,))
    assert with_masks(tokens, [torch.eye(3).bool()]).reach == (9,)
    assert np.array_equal(
        with_masks(tokens, [torch.eye(3).bool()]).position_ids, tokens.position_ids
    )

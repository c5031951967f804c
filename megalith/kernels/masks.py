"""Masks that a user gives to tokens: which keys of its document each query may see at most, and
which are padding."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import DataError
from megalith.kernels.tokens import PackedSeqParams
from megalith.kernels.visible import FREE, Visible

Lengths = Sequence[tuple[int, int]]
"""(queries, keys) of each document."""


def with_masks(
    tokens: PackedSeqParams, masks: Sequence[Tensor | None], *, alone: bool = False
) -> PackedSeqParams:
    """The tokens with a mask for each document: bool [queries, keys], True where a query may see a
    key; None: all.

    Beside the masks layers hide what they hide without them: later tokens, if causal, and what is
    outside a window. With `alone` masks say all but the window, so that a causal layer sees later
    tokens where they let it; then each document needs one. A query that may see nothing finds 0.
    Masks are of documents as they were read, on every rank alike: those that share tokens take
    their own part.

    Raises:
        DataError: masks of another number, shape, type or device than the documents ask for.
    """
    read, device = _as_read(tokens), tokens.position_ids.device
    if len(masks) != len(read):
        raise DataError(
            f"masks: {len(masks)} for {len(read)} documents. Pass one for each, or None where no "
            "more is to be hidden."
        )
    for number, mask in enumerate(masks):
        if mask is not None:
            _check(mask, f"masks[{number}]", read[number], f"document {number}", device)
        elif alone:
            raise DataError(
                f"masks[{number}]=None with alone=True: masks take the place of causality, so each "
                "document must have "
                f"one. Pass torch.ones({read[number][0]}, {read[number][1]}, "
                "dtype=torch.bool).tril("
                f"{read[number][1] - read[number][0]}) for one that is causal."
            )
    lengths = tokens.whole.lengths
    masks = [
        None if mask is None else _extended(mask, *whole)
        for mask, whole in zip(masks, lengths, strict=True)
    ]
    given = [mask.reshape(-1) for mask in masks if mask is not None]
    before = replace(
        tokens.whole.visible or Visible(), found={}
    )  # what was found is for other masks
    if sum(map(len, given)) == 0:
        return _given(tokens, replace(before, pairs=None, rows=None, starts=(), alone=False))
    starts, end = list[int | None](), 0
    for mask in masks:
        starts.append(None if mask is None else end)
        end += 0 if mask is None else mask.numel()
    rows = torch.from_numpy(rows_of(lengths, starts)).to(device)
    return _given(
        tokens,
        replace(before, pairs=torch.cat(given), rows=rows, starts=tuple(starts), alone=alone),
    )


def with_padding(tokens: PackedSeqParams, text: Tensor) -> PackedSeqParams:
    """The tokens of which those are padding where `text`, bool [t_kv], is False: no query sees
    them.

    Of documents that are read whole they are not `valid` either, so that they count as no expert's
    work, and full experts refuse them first. `text` is of all keys as they were read, document
    after document, on every rank alike.

    Raises:
        DataError: `text` is of another length, type or device than the keys.
    """
    read, device = _as_read(tokens), tokens.position_ids.device
    _check(
        text, "text", (sum(keys for _, keys in read),), f"all keys of {len(read)} documents", device
    )
    whole, context = tokens.whole, tokens.context
    if context is not None and context.slices.source is not None:
        source = torch.from_numpy(context.slices.source).to(device)
        text = (source >= 0) & text[source.clamp(min=0)]
    before = replace(whole.visible or Visible(), found={})
    tokens = _given(
        tokens, replace(before, keys=text if before.keys is None else before.keys & text)
    )
    if any(queries != keys for queries, keys in whole.lengths):
        return tokens
    mine = text
    if context is not None:
        mine = text[torch.from_numpy(context.slices.numbers[context.rank]).to(device)]
    return replace(tokens, valid=tokens.valid & mine)


def for_one_pass(tokens: PackedSeqParams) -> PackedSeqParams:
    """The same tokens, for one way through some layers and back: what is made of their masks on
    it, as large as all pairs, lasts no longer. Microbatches themselves are there for the whole
    step."""
    visible = tokens.whole.visible
    return tokens if visible is None else _given(tokens, replace(visible, found={}))


def rows_of(lengths: Lengths, starts: Sequence[int | None]) -> NDArray[np.int64]:
    """[t]: where each query's row of a mask would begin, if it were of all keys; masks begin at
    `starts`.

    >>> rows_of([(2, 2), (1, 3), (1, 4)], [0, None, 4])[[0, 1, 3]].tolist()
    [0, 2, -1]
    """
    queries, keys = np.array(lengths, dtype=np.int64).reshape(-1, 2).T
    document = np.repeat(np.arange(len(queries)), queries)
    place = np.arange(len(document)) - (np.cumsum(queries) - queries)[document]
    first = (np.cumsum(keys) - keys)[document]
    start = np.array([FREE if start is None else start for start in starts], dtype=np.int64)[
        document
    ]
    return np.where(start == FREE, FREE, start + place * keys[document] - first)


def _as_read(tokens: PackedSeqParams) -> Lengths:
    """Documents of the microbatch, all ranks together, without the padding of those that ranks
    share."""
    context = tokens.context
    if context is None or context.slices.source is None:
        return tokens.whole.lengths
    document = context.slices.document()[context.slices.source >= 0]
    counts = np.bincount(document, minlength=len(context.slices.lengths)).tolist()
    return [(count, count) for count in counts]


def _check(given: Tensor, name: str, shape: tuple[int, ...], of: str, device: torch.device) -> None:
    """Refuse what is not bool, of that shape and there."""
    if given.dtype != torch.bool:
        raise DataError(
            f"{name} is {given.dtype}: expected torch.bool, True where a key may be seen. Pass "
            f"{name}.bool(), or "
            f"{name} == 0 if it was made to be added to scores."
        )
    if tuple(given.shape) != shape:
        what = f" ({shape[0]} queries, {shape[1]} keys)" if len(shape) == 2 else ""
        raise DataError(
            f"{name} is {list(given.shape)}: {of} must have {list(shape)}{what}. Pass one of that "
            "shape."
        )
    if given.device != device:
        raise DataError(
            f"{name} is on {given.device}: expected it where the tokens are. Pass "
            f"{name}.to('{device}')."
        )


def _extended(mask: Tensor, queries: int, keys: int) -> Tensor:
    """The mask of a document with padding behind it, which sees nothing and is seen by none."""
    if mask.shape == (queries, keys):
        return mask
    whole = mask.new_zeros(queries, keys)
    whole[: mask.shape[0], : mask.shape[1]] = mask
    return whole


def _given(tokens: PackedSeqParams, visible: Visible) -> PackedSeqParams:
    """The tokens with these masks, if they say anything; with all of them where ranks share
    tokens."""
    found = None if visible.pairs is None and visible.keys is None else visible
    if tokens.context is None:
        return replace(tokens, visible=found)
    whole = replace(tokens.context.whole, visible=found)
    return replace(tokens, context=replace(tokens.context, whole=whole))

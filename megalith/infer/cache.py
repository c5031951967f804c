"""KV cache: keys and values of processed tokens, so that each is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from megalith.kernels.layer_inputs import Attend, AttendOptions, LayerCache, StateStep
from megalith.kernels.packed import PackedSeqParams


@dataclass(frozen=True, slots=True)
class AttentionView:
    """Which preceding tokens a layer attends to."""

    window: int | None = None
    """Number of latest tokens, including the query itself; None: all."""

    chunked: bool = False
    """Attend only to the chunk of `window` tokens that contains the query."""

    def before(self, count: int) -> int:
        """Return how many of the first `count` tokens of a document the next token attends to.

        >>> views = [AttentionView(4), AttentionView(4, chunked=True), AttentionView()]
        >>> [view.before(6) for view in views]
        [3, 2, 6]
        """
        if self.window is None:
            return count
        return count % self.window if self.chunked else min(count, self.window - 1)


EVERYTHING = AttentionView()

INITIAL_CAPACITY = 64
"""Tokens that a new buffer has room for (heuristic); the capacity doubles, so each token is copied
about once."""


class GrowingBuffer:
    """Keys or values of one document in one layer: appended at the end, read as one tensor [rows,
    g, d].

    Rows that no later token attends to may be dropped: with a window all but the last.
    """

    def __init__(self, view: AttentionView = EVERYTHING) -> None:
        self._view = view
        self._rows: Tensor | None = None
        self._end = 0  # stored rows; with a window the last ones
        self._count = 0  # all rows of the document

    def append(self, rows: Tensor) -> Tensor:
        """Append rows [t, g, d] and return those that the new tokens attend to: a view, valid until
        the next call."""
        before = self._view.before(self._count)
        if self._rows is None or self._end + len(rows) > len(self._rows):
            self._rows, self._end = self._reallocate(rows, before), before
        self._rows[self._end : self._end + len(rows)] = rows
        self._end += len(rows)
        self._count += len(rows)
        return self._rows[self._end - len(rows) - before : self._end]

    @property
    def used(self) -> bool:
        """Whether rows were appended; layers without attention have none."""
        return self._rows is not None

    def holds(self, count: int) -> bool:
        """Return whether the rows needed to continue the document after its first `count` rows are
        present."""
        first = count - self._view.before(count)
        return count <= self._count and first >= self._count - self._end

    def cut(self, count: int) -> None:
        """Drop the rows after the first `count`, which must be held."""
        self._end -= self._count - count
        self._count = count

    def _reallocate(self, rows: Tensor, before: int) -> Tensor:
        """Return a larger buffer that starts with the last `before` rows."""
        wanted = before + len(rows)
        if not self._view.chunked and before + 1 == self._view.window:
            wanted += before  # so that a window moves once per length
        capacity = INITIAL_CAPACITY
        while capacity < wanted:
            capacity *= 2
        buffer = rows.new_empty(capacity, *rows.shape[1:])
        if self._rows is not None:
            buffer[:before] = self._rows[self._end - before : self._end]
        return buffer


@dataclass(slots=True)
class DocumentState:
    """What one layer keeps of one document: keys and values, or a recurrent state."""

    keys: GrowingBuffer
    values: GrowingBuffer
    state: Tensor | None = None
    num_tokens: int = 0
    """Number of tokens that `state` contains."""

    @property
    def used(self) -> bool:
        """Whether anything is stored; layers without attention and state have nothing."""
        return self.keys.used or self.state is not None

    def holds(self, count: int) -> bool:
        """Return whether the document can be continued after its first `count` tokens."""
        if self.state is not None:
            return count == self.num_tokens
        return self.keys.holds(count)

    def cut(self, count: int) -> None:
        """Drop what follows the first `count` tokens, which must be held."""
        if self.keys.used:
            self.keys.cut(count)
            self.values.cut(count)


class PackedCache:
    """Cache of one layer for the packed documents of one forward pass; a `LayerCache`."""

    def __init__(self, documents: Sequence[DocumentState]) -> None:
        self._documents = documents

    def attend(
        self,
        core: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Append k, v [t, g, d]; return the attention of q to all stored tokens."""
        queries = [length for length, _ in seq_params.lengths]
        k = _append([document.keys for document in self._documents], k, queries)
        v = _append([document.values for document in self._documents], v, queries)
        return core(q, k, v, seq_params, **options)

    def state(
        self, step: StateStep, x: Tensor, seq_params: PackedSeqParams, *, shape: tuple[int, ...]
    ) -> Tensor:
        """Return y of `step(x, state)` and store the new state of each document."""
        states = [
            x.new_zeros(shape) if document.state is None else document.state
            for document in self._documents
        ]
        y, new_states = step(x, torch.stack(states))
        for document, state, (_, keys) in zip(
            self._documents, new_states, seq_params.lengths, strict=True
        ):
            document.state, document.num_tokens = state, keys
        return y


def _append(buffers: Sequence[GrowingBuffer], rows: Tensor, queries: Sequence[int]) -> Tensor:
    parts = [
        buffer.append(part) for buffer, part in zip(buffers, rows.split(list(queries)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class KVCache:
    """KV cache, or recurrent state, of several sequences in all layers, by sequence number.

    `views`: the attention range of each layer, which bounds its cache; unset: all tokens.
    """

    def __init__(self, num_layers: int, views: Sequence[AttentionView] = ()) -> None:
        self._views = list(views) or [EVERYTHING] * num_layers
        self._documents: dict[int, list[DocumentState]] = {}

    def layers(self, sequences: Sequence[int]) -> list[LayerCache]:
        """Return the layer caches for a forward pass over these sequences, in this order."""
        for sequence in sequences:
            if sequence not in self._documents:
                self._documents[sequence] = [
                    DocumentState(GrowingBuffer(view), GrowingBuffer(view)) for view in self._views
                ]
        by_layer = zip(*(self._documents[sequence] for sequence in sequences), strict=True)
        return [PackedCache(documents) for documents in by_layer]

    def drop(self, sequence: int) -> None:
        """Remove a finished sequence."""
        self._documents.pop(sequence, None)

    def cut(self, sequence: int, count: int) -> bool:
        """Truncate a sequence to its first `count` tokens; if some layer lacks rows for that, drop
        it and return False."""
        documents = [one for one in self._documents.get(sequence, []) if one.used]
        if not count or not documents or not all(one.holds(count) for one in documents):
            self.drop(sequence)
            return False
        for document in documents:
            document.cut(count)
        return True


class PrefixState:
    """KV cache of one text, reused for the common prefix of the next text."""

    def __init__(self, num_layers: int, views: Sequence[AttentionView] = ()) -> None:
        self.cache = KVCache(num_layers, views)
        self._ids: list[int] = []

    def resume(self, ids: Sequence[int], *, sequence: int) -> int:
        """Truncate the cache to the common prefix with `ids` and return its length.

        At least one token remains to be processed, because its logits give the next token.
        """
        pairs = zip(self._ids, ids[:-1], strict=False)
        common = next(
            (n for n, (old, new) in enumerate(pairs) if old != new),
            min(len(self._ids), len(ids) - 1),
        )
        self.forget()
        return common if self.cache.cut(sequence, common) else 0

    def clear(self, *, sequence: int) -> None:
        """Drop the cache."""
        self.forget()
        self.cache.drop(sequence)

    def forget(self) -> None:
        """Invalidate the prefix; called before a forward pass, which may fail after some layers."""
        self._ids = []

    def record_ids(self, ids: Sequence[int]) -> None:
        """Record the tokens that are in the cache of every layer."""
        self._ids = list(ids)

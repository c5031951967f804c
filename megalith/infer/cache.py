"""Keys and values of the tokens that were read, so that each is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.kernels.tokens import PackedSeqParams
from megalith.nn.attention import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionView:
    """How many tokens a layer sees."""

    window: int | None = None
    """The last so many, the token itself included; None: all."""

    chunked: bool = False
    """Those of its own run of `window` tokens."""

    def before(self, count: int) -> int:
        """How many of a document's first `count` tokens the next one sees.

        >>> [AttentionView(4).before(6), AttentionView(4, chunked=True).before(6), AttentionView().before(6)]
        [3, 2, 6]
        """
        if self.window is None:
            return count
        return count % self.window if self.chunked else min(count, self.window - 1)


EVERYTHING = AttentionView()

FIRST_ROOM = 64
"""PackedSeqParams that a new buffer has room for (guess); it doubles when they are used up, so
each is copied about once."""


class GrowingBuffer:
    """Rows of one document at one layer, keys or values: appended at the end, read as one tensor
    [rows, g, d].

    Only what later tokens see is sure to stay: with a window the last rows.
    """

    def __init__(self, sight: AttentionView = EVERYTHING) -> None:
        self._sight = sight
        self._rows: Tensor | None = None
        self._end = 0  # rows that are here; with a window the last ones of all
        self._count = 0  # rows of the document

    def append(self, rows: Tensor) -> Tensor:
        """Add rows [t, g, d] and return all that the new tokens may see: a view, good until the
        next call."""
        before = self._sight.before(self._count)
        if self._rows is None or self._end + len(rows) > len(self._rows):
            self._rows, self._end = self._grown(rows, before), before
        self._rows[self._end : self._end + len(rows)] = rows
        self._end += len(rows)
        self._count += len(rows)
        return self._rows[self._end - len(rows) - before : self._end]

    @property
    def used(self) -> bool:
        """Whether rows ever came; none do in a layer without attention."""
        return self._rows is not None

    def holds(self, count: int) -> bool:
        """Whether a document that goes on after its first `count` rows finds here all that it
        sees."""
        first = count - self._sight.before(count)
        return count <= self._count and first >= self._count - self._end

    def cut(self, count: int) -> None:
        """Forget what comes after the first `count` rows, which must be held."""
        self._end -= self._count - count
        self._count = count

    def _grown(self, rows: Tensor, before: int) -> Tensor:
        """More room, and at its start as many of the last rows."""
        wanted = before + len(rows)
        if not self._sight.chunked and before + 1 == self._sight.window:
            wanted += before  # so that a window moves once per length
        room = FIRST_ROOM
        while room < wanted:
            room *= 2
        buffer = rows.new_empty(room, *rows.shape[1:])
        if self._rows is not None:
            buffer[:before] = self._rows[self._end - before : self._end]
        return buffer


class PackedCache:
    """One layer's keys and values of the documents read in one forward; a `LayerCache`."""

    def __init__(self, keys: Sequence[GrowingBuffer], values: Sequence[GrowingBuffer]) -> None:
        self._keys, self._values = keys, values

    def extend(self, k: Tensor, v: Tensor, tokens: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Keep k, v [t, g, d] of the tokens read now; give back those that they may see [t_kv, g,
        d]."""
        queries = [length for length, _ in tokens.lengths]
        return _extend(self._keys, k, queries), _extend(self._values, v, queries)


def _extend(buffers: Sequence[GrowingBuffer], rows: Tensor, queries: Sequence[int]) -> Tensor:
    parts = [
        buffer.append(part) for buffer, part in zip(buffers, rows.split(list(queries)), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class KVCache:
    """Keys and values of several sequences at all layers, by the sequences' numbers.

    `sights`: what each layer sees, and so keeps; unset: all see everything.
    """

    def __init__(self, num_layers: int, sights: Sequence[AttentionView] = ()) -> None:
        self._sights = list(sights) or [EVERYTHING] * num_layers
        self._buffers: dict[int, list[tuple[GrowingBuffer, GrowingBuffer]]] = {}

    def layers(self, sequences: Sequence[int]) -> list[LayerCache]:
        """What the layers need to read some tokens of each of these sequences, in this order."""
        for number in sequences:
            if number not in self._buffers:
                self._buffers[number] = [
                    (GrowingBuffer(sight), GrowingBuffer(sight)) for sight in self._sights
                ]
        chosen = [self._buffers[number] for number in sequences]
        return [
            PackedCache([layers[i][0] for layers in chosen], [layers[i][1] for layers in chosen])
            for i in range(len(self._sights))
        ]

    def drop(self, sequence: int) -> None:
        """Forget a sequence that is finished."""
        self._buffers.pop(sequence, None)

    def cut(self, sequence: int, count: int) -> bool:
        """Keep the first `count` tokens of a sequence; False, and nothing of it is left, where
        some layer holds too little for that."""
        buffers = [
            buffer for pair in self._buffers.get(sequence, []) for buffer in pair if buffer.used
        ]
        if not count or not buffers or not all(buffer.holds(count) for buffer in buffers):
            self.drop(sequence)
            return False
        for buffer in buffers:
            buffer.cut(count)
        return True


class PrefixState:
    """What was read of one text, so that another which begins alike costs its other tokens only."""

    def __init__(self, num_layers: int, sights: Sequence[AttentionView] = ()) -> None:
        self.cache = KVCache(num_layers, sights)
        self._ids: list[int] = []

    def resume(self, ids: Sequence[int], *, sequence: int) -> int:
        """Keep what a text has in common with the one before and forget the rest; how many of its
        tokens are read.

        At least one is not, because a text is written on by what is seen at its last token.
        """
        pairs = zip(self._ids, ids[:-1], strict=False)
        common = next(
            (n for n, (old, new) in enumerate(pairs) if old != new),
            min(len(self._ids), len(ids) - 1),
        )
        self.forget()
        return common if self.cache.cut(sequence, common) else 0

    def clear(self, *, sequence: int) -> None:
        """Keep nothing."""
        self.forget()
        self.cache.drop(sequence)

    def forget(self) -> None:
        """Trust nothing that was read; said before reading, which may end halfway through the
        layers."""
        self._ids = []

    def note(self, ids: Sequence[int]) -> None:
        """These tokens are read now, at every layer."""
        self._ids = list(ids)

"""Keys and values of the tokens that were read, so that each is computed once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megalith.kernels.tokens import Tokens
from megalith.nn.attention import LayerCache

FIRST_ROOM = 64
"""Tokens that a new buffer has room for (guess); it doubles when they are used up, so each is copied about once."""


class GrowingBuffer:
    """Rows of one document at one layer, keys or values: appended at the end, read as one tensor [rows, g, d]."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self.num_rows = 0

    def append(self, rows: Tensor) -> Tensor:
        """Add rows [t, g, d] and return all: a view, good until the next call."""
        total = self.num_rows + rows.shape[0]
        if self._rows is None or total > self._rows.shape[0]:
            self._rows = self._grown(rows, total)
        self._rows[self.num_rows : total] = rows
        self.num_rows = total
        return self._rows[:total]

    def _grown(self, rows: Tensor, total: int) -> Tensor:
        """More room, with what is there already."""
        room = FIRST_ROOM
        while room < total:
            room *= 2
        buffer = rows.new_empty(room, *rows.shape[1:])
        if self._rows is not None:
            buffer[: self.num_rows] = self._rows[: self.num_rows]
        return buffer


class PackedCache:
    """One layer's keys and values of the documents read in one forward; a `LayerCache`."""

    def __init__(self, keys: Sequence[GrowingBuffer], values: Sequence[GrowingBuffer]) -> None:
        self._keys, self._values = keys, values

    def extend(self, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Keep k, v [t, g, d] of the tokens read now; give back those of all tokens of each document [t_kv, g, d]."""
        queries = [length for length, _ in tokens.lengths]
        return _extend(self._keys, k, queries), _extend(self._values, v, queries)


def _extend(buffers: Sequence[GrowingBuffer], rows: Tensor, queries: Sequence[int]) -> Tensor:
    parts = [buffer.append(part) for buffer, part in zip(buffers, rows.split(list(queries)), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class KeyValueCache:
    """Keys and values of several sequences at all layers, by the sequences' numbers."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._buffers: dict[int, list[tuple[GrowingBuffer, GrowingBuffer]]] = {}

    def layers(self, sequences: Sequence[int]) -> list[LayerCache]:
        """What the layers need to read some tokens of each of these sequences, in this order."""
        for number in sequences:
            if number not in self._buffers:
                self._buffers[number] = [(GrowingBuffer(), GrowingBuffer()) for _ in range(self._num_layers)]
        chosen = [self._buffers[number] for number in sequences]
        return [
            PackedCache([layers[i][0] for layers in chosen], [layers[i][1] for layers in chosen])
            for i in range(self._num_layers)
        ]

    def drop(self, sequence: int) -> None:
        """Forget a sequence that is finished."""
        self._buffers.pop(sequence, None)

"""Rotary positions of a model: the angles of every token, computed once per forward and shared by all layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.kernels.rope import apply_rope, attention_factor, rope_frequencies, rope_tables
from megalith.kernels.tokens import Tokens

Turn = Callable[[Tensor, Tokens], Tensor]
"""What a layer does to its queries and keys [t, n, d] -> [t, n, d], so that they know their places."""


class Rotations:
    """Gives tokens the tables that layers turn by: one pair, and a second where windowed layers have their own."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.size, self.dtype = config.rotary_size(), dtype
        self.kinds = [config.rope] if config.positions == "rope" else []
        if self.kinds and config.rope.local_theta is not None:
            self.kinds.append(replace(config.rope, theta=config.rope.local_theta, scaling="none"))
        self._known: dict[RopeConfig, Tensor] = {}

    def given_to(self, tokens: Tokens) -> Tokens:
        """The tokens with (cos, sin) [t, pairs] for every kind of layer; `dynamic` scaling looks at the length of each
        document, as far as it has been read."""
        tables: list[Tensor] = []
        for rope in self.kinds:
            frequencies = self._frequencies(rope, tokens).to(tokens.positions.device)
            factor = attention_factor(rope)
            tables += rope_tables(tokens.positions, frequencies, self.dtype, factor=factor, sections=rope.sections)
        return replace(tokens, rotary=tuple(tables))

    def _frequencies(self, rope: RopeConfig, tokens: Tokens) -> Tensor:
        """Radians per token of each pair: [pairs], or [t, pairs] where long documents turn by angles of their own."""
        longest = [keys if keys > rope.original_max_position else 0 for _, keys in tokens.lengths]
        if rope.scaling != "dynamic" or not any(longest) or tokens.document.is_meta:
            return self._of_length(rope, 0)
        return torch.stack([self._of_length(rope, length) for length in longest])[tokens.document.long().cpu()]

    def _of_length(self, rope: RopeConfig, length: int) -> Tensor:
        """Radians per token of each pair, for documents of a length."""
        if length:
            return rope_frequencies(rope, self.size, length=length)
        if rope not in self._known:
            self._known[rope] = rope_frequencies(rope, self.size)
        return self._known[rope]


@dataclass(frozen=True, slots=True)
class Turned:
    """Turns queries and keys by one pair of the tables."""

    first: int
    """Where the pair begins among them."""

    interleaved: bool

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, n, d] -> [t, n, d]."""
        cos, sin = tokens.rotary[self.first : self.first + 2]
        return apply_rope(x, cos, sin, interleaved=self.interleaved)


def unturned(x: Tensor, tokens: Tokens) -> Tensor:
    """A layer that knows no positions."""
    return x


def turn_of_layer(config: ModelConfig, layer: int) -> Turn:
    """How a layer, numbered over all stages, turns its queries and keys."""
    if not config.turns(layer):
        return unturned
    own = config.rope.local_theta is not None and config.has_window(layer)
    return Turned(2 if own else 0, config.rope.interleaved)

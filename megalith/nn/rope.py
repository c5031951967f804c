"""Rotary positions of a model: the angles of every token, looked up once per forward and shared by
all layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.errors import DataError
from megalith.kernels.rope import (
    apply_rope,
    attention_factor,
    rope_frequencies,
    rope_length,
    rope_tables,
)
from megalith.kernels.tokens import PackedSeqParams

ApplyRope = Callable[[Tensor, PackedSeqParams], Tensor]
"""What a layer does to its queries and keys [t, n, d] -> [t, n, d], so that they know their
places."""


class Angles(NamedTuple):
    """How documents of one kind turn, on the device where tokens are."""

    length: int
    """What `rope_length` says about the documents."""

    frequencies: Tensor
    """Radians per token of each pair: [pairs]."""

    cos: Tensor
    """Of every position so far asked for: [positions, pairs]."""

    sin: Tensor
    """The same."""


class RotaryEmbedding:
    """Gives tokens the tables that layers turn by: one pair, and a second where windowed layers
    have their own.

    Cosines and sines of all positions are made once and stay where tokens are; they are no part of
    a checkpoint.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.size, self.dtype = config.rotary_size(), dtype
        self.sections = config.rope.sections
        self.kinds = [config.rope] if config.positions == "rope" else []
        if self.kinds and config.rope.local_theta is not None:
            self.kinds.append(replace(config.rope, theta=config.rope.local_theta, scaling="none"))
        # For each kind of layers, one of short documents and one of long ones, so that nothing
        # piles up.
        self._made: dict[tuple[RopeConfig, bool], Angles] = {}

    def given_to(self, tokens: PackedSeqParams) -> PackedSeqParams:
        """The tokens with (cos, sin) [t, pairs] for every kind of layer, unless they have them.

        `dynamic` and `longrope` look at the length of each document, as far as it is known.

        Raises:
            DataError: tokens have places in time, height and width, which this model does not know.
        """
        if tokens.rotary:
            return tokens
        if tokens.position_ids.ndim == 2 and len(tokens.position_ids) != len(self.sections):
            raise DataError(
                f"tokens with {len(tokens.position_ids)} positions each for "
                f"model.rope.sections={list(self.sections)}: "
                "set model.rope.sections to one count of pairs for each, or give tokens one "
                "position each."
            )
        pairs = [self._pair(rope, tokens) for rope in self.kinds]
        return replace(tokens, rotary=tuple(table for pair in pairs for table in pair))

    def _pair(self, rope: RopeConfig, tokens: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """(cos, sin) [t, pairs] of one kind of layers."""
        lengths = [
            rope_length(rope, end) for end in tokens.reach or (keys for _, keys in tokens.lengths)
        ]
        if len(set(lengths)) > 1:
            each = torch.stack(
                [rope_frequencies(rope, self.size, length=length) for length in lengths]
            )
            return self._computed(
                rope,
                tokens.position_ids,
                each.to(tokens.document_ids.device)[tokens.document_ids.long()],
            )
        angles = self._angles(rope, lengths[0], tokens)
        if tokens.position_ids.ndim == 2:
            return self._computed(rope, tokens.position_ids, angles.frequencies)
        return angles.cos[tokens.position_ids], angles.sin[tokens.position_ids]

    def _angles(self, rope: RopeConfig, length: int, tokens: PackedSeqParams) -> Angles:
        """As made before, if they reach as far as these tokens, on the same device."""
        made, device = self._made.get((rope, length > 0)), tokens.position_ids.device
        room = 0
        if made is not None and made.length == length and made.cos.device == device:
            if len(made.cos) >= tokens.max_seqlen_kv:
                return made
            room = 2 * len(made.cos)  # documents that grow token by token make few tables
        frequencies = rope_frequencies(rope, self.size, length=length).to(device)
        positions = torch.arange(max(tokens.max_seqlen_kv, room), device=device)
        made = Angles(length, frequencies, *self._computed(rope, positions, frequencies))
        self._made[rope, length > 0] = made
        return made

    def _computed(
        self, rope: RopeConfig, positions: Tensor, frequencies: Tensor
    ) -> tuple[Tensor, Tensor]:
        factor = attention_factor(rope)
        return rope_tables(
            positions, frequencies, self.dtype, factor=factor, sections=rope.sections
        )


@dataclass(frozen=True, slots=True)
class LayerRope:
    """DualBatchOverlap queries and keys by one pair of the tables."""

    first: int
    """Where the pair begins among them."""

    interleaved: bool
    rotate: Callable[..., Tensor] = apply_rope

    def __call__(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, n, d] -> [t, n, d]."""
        cos, sin = tokens.rotary[self.first : self.first + 2]
        return self.rotate(x, cos, sin, interleaved=self.interleaved)


def no_rope(x: Tensor, tokens: PackedSeqParams) -> Tensor:
    """A layer that knows no positions."""
    return x


def build_apply_rope(config: ModelConfig, layer: int) -> ApplyRope:
    """How a layer, numbered over all stages, turns its queries and keys."""
    if not config.uses_rope(layer):
        return no_rope
    own = config.rope.local_theta is not None and config.has_window(layer)
    return LayerRope(2 if own else 0, config.rope.interleaved)


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Multiplies queries by what grows with their position, so that attention among many tokens
    stays sharp.

    Source: Nakanishi 2025, arXiv:2501.19399; in steps: Meta 2025, the Llama 4 release.
    """

    growth: float
    step: int
    """PackedSeqParams."""

    def __call__(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, n, d] -> [t, n, d]: times 1 + growth * ln(1 + floor((position + 1) / step))."""
        time = tokens.position_ids.view(-1, tokens.num_tokens)[
            0
        ]  # of tokens of pictures, that in time
        steps = torch.div(time + 1, self.step, rounding_mode="floor")
        factor = 1 + self.growth * torch.log1p(
            steps.to(torch.promote_types(x.dtype, torch.float32))
        )
        return (x * factor[:, None, None]).to(x.dtype)


def build_attention_temperature(config: ModelConfig, layer: int) -> ApplyRope:
    """How a layer, numbered over all stages, has_attention_temperature its queries."""
    if not config.has_attention_temperature(layer):
        return no_rope
    return AttentionTemperature(config.rope.skip_growth, config.rope.skip_step)

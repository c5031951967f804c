"""Rotary position embedding (RoPE) of a model: cosines and sines of every token, looked up once per
forward and shared by all layers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig, RopeConfig
from megalith.errors import DataError
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import PackedSeqParams
from megalith.kernels.rope import (
    apply_rope,
    attention_factor,
    rope_frequencies,
    rope_length,
    rope_tables,
)
from megalith.nn.build import BuildContext

ApplyRope = Callable[[Tensor, LayerInputs], Tensor]
"""Applies a layer's position embedding to queries or keys: [t, n, d] -> [t, n, d]."""


class RopeTables(NamedTuple):
    """Cached RoPE tables for one kind of document lengths, on the tokens' device."""

    length: int
    """`rope_length` of the documents."""

    frequencies: Tensor
    """Radians per token of each pair: [pairs]."""

    cos: Tensor
    """Cosines of all positions so far: [positions, pairs]."""

    sin: Tensor
    """Sines of all positions so far: [positions, pairs]."""


class RotaryEmbedding:
    """Adds RoPE tables to the layers' inputs: one (cos, sin) pair, and a second if windowed layers
    have their own theta.

    Cosines and sines of all positions are computed once and cached on the tokens' device; they are
    not part of a checkpoint.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.size, self.dtype = config.rotary_size(), dtype
        self.sections = config.rope.sections
        self.kinds = [config.rope] if config.positions == "rope" else []
        if self.kinds and config.rope.local_theta is not None:
            self.kinds.append(replace(config.rope, theta=config.rope.local_theta, scaling="none"))
        # One table of short and one of long documents for each kind of layers, so that the cache
        # stays bounded.
        self._made: dict[tuple[RopeConfig, bool], RopeTables] = {}

    def add_to(self, inputs: LayerInputs) -> LayerInputs:
        """Return the inputs with (cos, sin) [t, pairs] for every kind of layer, unless they have
        them.

        `dynamic` and `longrope` depend on the length of each document, as far as it is known.

        Raises:
            DataError: the number of position ids per token does not match model.rope.sections.
        """
        if inputs.rope:
            return inputs
        seq_params = inputs.seq_params
        if seq_params.position_ids.ndim == 2 and len(seq_params.position_ids) != len(self.sections):
            raise DataError(
                f"model.rope.sections={list(self.sections)}, but tokens have "
                f"{len(seq_params.position_ids)} position ids each. Set model.rope.sections to one "
                "number of pairs for each of them, or pass one position id per token."
            )
        pairs = [self._pair(rope, seq_params) for rope in self.kinds]
        return replace(inputs, rope=tuple(table for pair in pairs for table in pair))

    def _pair(self, rope: RopeConfig, seq_params: PackedSeqParams) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) [t, pairs] of one kind of layers."""
        lengths = [
            rope_length(rope, end)
            for end in seq_params.reach or (keys for _, keys in seq_params.lengths)
        ]
        if len(set(lengths)) > 1:
            each = torch.stack(
                [rope_frequencies(rope, self.size, length=length) for length in lengths]
            )
            return self._computed(
                rope,
                seq_params.position_ids,
                each.to(seq_params.document_ids.device)[seq_params.document_ids.long()],
            )
        angles = self._angles(rope, lengths[0], seq_params)
        if seq_params.position_ids.ndim == 2:
            return self._computed(rope, seq_params.position_ids, angles.frequencies)
        return angles.cos[seq_params.position_ids], angles.sin[seq_params.position_ids]

    def _angles(self, rope: RopeConfig, length: int, seq_params: PackedSeqParams) -> RopeTables:
        """Return the cached tables if they cover these tokens on the same device, else new ones."""
        made, device = self._made.get((rope, length > 0)), seq_params.position_ids.device
        room = 0
        if made is not None and made.length == length and made.cos.device == device:
            if len(made.cos) >= seq_params.max_seqlen_kv:
                return made
            room = 2 * len(made.cos)  # doubled, so that decoding rebuilds few tables
        frequencies = rope_frequencies(rope, self.size, length=length).to(device)
        positions = torch.arange(max(seq_params.max_seqlen_kv, room), device=device)
        made = RopeTables(length, frequencies, *self._computed(rope, positions, frequencies))
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
    """Rotates queries or keys by one (cos, sin) pair of the inputs."""

    first: int
    """Index of the pair's cosines in `LayerInputs.rope`."""

    interleaved: bool
    rotate: Callable[..., Tensor] = apply_rope

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, n, d] -> [t, n, d]."""
        cos, sin = inputs.rope[self.first : self.first + 2]
        return self.rotate(x, cos, sin, interleaved=self.interleaved)


def no_rope(x: Tensor, inputs: LayerInputs) -> Tensor:
    """Return x unchanged, in a layer without position embedding."""
    return x


def build_apply_rope(config: ModelConfig, context: BuildContext) -> ApplyRope:
    """Build the RoPE of a layer."""
    if not config.uses_rope(context.layer):
        return no_rope
    own = config.rope.local_theta is not None and config.has_window(context.layer)
    rotate = context.backends.bind("rope", apply_rope)
    return LayerRope(2 if own else 0, config.rope.interleaved, rotate)


@dataclass(frozen=True, slots=True)
class AttentionTemperature:
    """Attention temperature: multiplies queries by a factor that grows with their position, so that
    attention over many tokens stays sharp.

    Source: Nakanishi 2025, arXiv:2501.19399; in steps: Meta 2025, the Llama 4 release.
    """

    growth: float
    step: int
    """Tokens per step."""

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, n, d] -> [t, n, d]: times 1 + growth * ln(1 + floor((position + 1) / step))."""
        seq_params = inputs.seq_params
        # for multimodal RoPE, the time
        time = seq_params.position_ids.view(-1, seq_params.num_tokens)[0]
        steps = torch.div(time + 1, self.step, rounding_mode="floor")
        factor = 1 + self.growth * torch.log1p(
            steps.to(torch.promote_types(x.dtype, torch.float32))
        )
        return (x * factor[:, None, None]).to(x.dtype)


def build_attention_temperature(config: ModelConfig, layer: int) -> ApplyRope:
    """Build the attention temperature of a layer, numbered over all stages."""
    if not config.has_attention_temperature(layer):
        return no_rope
    return AttentionTemperature(config.rope.skip_growth, config.rope.skip_step)

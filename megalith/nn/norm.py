"""Normalization of each token's features."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megalith.kernels.rebuilt import LayerInput, RecomputedOutputFactory
from megalith.parallel.tensor import ONES, ZEROS, ParameterSpec, register_param
from megalith.plan.shards import Shard


class Norm(nn.Module):
    """What all norms do: x [t, h] -> x [t, h], alone or after the residual addition before it."""

    norm: Callable[..., Tensor]
    """(x, *affine) -> normed."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    """(x, residual, *affine) -> their sum, normed."""

    weight: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        *,
        invariant: frozenset[str],
        dtype: torch.dtype,
        zero_centered: bool,
        again: RecomputedOutputFactory | None,
    ) -> None:
        """`again`: the layer that reads the result computes it again in backward instead of keeping
        it."""
        super().__init__()
        self.again = again
        shard = Shard.full(f"{name}.weight", (size,), invariant=invariant, inputs=0)
        register_param(
            self, "weight", ParameterSpec(shard, ZEROS if zero_centered else ONES), dtype=dtype
        )

    def affine(self) -> tuple[Tensor, ...]:
        """What normed features are multiplied by, and what is added to them."""
        return (self.weight,)

    def forward(self, x: Tensor) -> LayerInput:
        """x [t, h] -> [t, h]."""
        return self._result(self.norm(x, *self.affine()), x)

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, LayerInput]:
        """x, residual [t, h] -> their sum, and the norm of the sum; in one function, backward has
        one pass less."""
        total, normed = self.add_norm(x, residual, *self.affine())
        return total, self._result(normed, total)

    def _result(self, normed: Tensor, x: Tensor) -> LayerInput:
        if self.again is None:
            return normed
        return self.again(normed, self.norm, (x, *self.affine()))


class RMSNorm(Norm):
    """Divide each token by the root of its mean square, then scale its features: x [t, h] -> x [t,
    h].

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(
        self,
        name: str,
        size: int,
        *,
        eps: float,
        invariant: frozenset[str],
        dtype: torch.dtype,
        zero_centered: bool = False,
        again: RecomputedOutputFactory | None = None,
    ) -> None:
        """`zero_centered`: scale by 1 + weight, which starts at 0."""
        super().__init__(
            name, size, invariant=invariant, dtype=dtype, zero_centered=zero_centered, again=again
        )
        self.norm = partial(rms_norm, eps=eps, zero_centered=zero_centered)
        self.add_norm = partial(add_rms_norm, eps=eps, zero_centered=zero_centered)


class LayerNorm(Norm):
    """Take each token's mean away, divide by its standard deviation, then scale and shift: x [t, h]
    -> x [t, h].

    Source: Ba et al. 2016, arXiv:1607.06450.
    """

    bias: nn.Parameter

    def __init__(
        self,
        name: str,
        size: int,
        *,
        eps: float,
        invariant: frozenset[str],
        dtype: torch.dtype,
        zero_centered: bool = False,
        again: RecomputedOutputFactory | None = None,
    ) -> None:
        """`zero_centered`: scale by 1 + weight, which starts at 0."""
        super().__init__(
            name, size, invariant=invariant, dtype=dtype, zero_centered=zero_centered, again=again
        )
        shard = Shard.full(f"{name}.bias", (size,), invariant=invariant, inputs=0)
        register_param(self, "bias", ParameterSpec(shard, ZEROS), dtype=dtype)
        self.norm = partial(layer_norm, eps=eps, zero_centered=zero_centered)
        self.add_norm = partial(add_layer_norm, eps=eps, zero_centered=zero_centered)

    def affine(self) -> tuple[Tensor, ...]:
        """Scale and shift."""
        return self.weight, self.bias


def build_norm(
    name: str,
    size: int,
    config: ModelConfig,
    *,
    invariant: frozenset[str],
    dtype: torch.dtype,
    again: RecomputedOutputFactory | None = None,
    eps: float | None = None,
) -> Norm:
    """The norm that a model uses everywhere, over `size` features; `eps`: unless its own. See
    `Norm` about the rest."""
    kind = {"rms": RMSNorm, "layer": LayerNorm}[config.norm]
    norm = kind(
        name,
        size,
        eps=config.norm_eps if eps is None else eps,
        invariant=invariant,
        dtype=dtype,
        zero_centered=config.zero_centered_gamma,
        again=again,
    )
    if config.fp32_residual:
        norm.norm, norm.add_norm = Narrowed(norm.norm, dtype), NarrowedSum(norm.add_norm, dtype)
    return norm


def stream_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """What the residual stream is in, between layers that compute in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype


@dataclass(frozen=True, slots=True)
class Narrowed:
    """A norm of a wide stream, as what reads it computes."""

    norm: Callable[..., Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor, *affine: Tensor) -> Tensor:
        """x [t, h] -> [t, h] in `dtype`."""
        return self.norm(x, *affine).to(self.dtype)


@dataclass(frozen=True, slots=True)
class NarrowedSum:
    """The same after an addition, whose sum stays wide."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    dtype: torch.dtype

    def __call__(self, x: Tensor, residual: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> their sum, and its norm in `dtype`."""
        total, normed = self.add_norm(x, residual, *affine)
        return total, normed.to(self.dtype)

"""RMSNorm and LayerNorm modules."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megalith.kernels.recomputed import LayerInput, RecomputedOutputFactory
from megalith.parallel.tensor import ONES, ZEROS, ParameterSpec, register_param
from megalith.plan.shards import Shard


class Norm(nn.Module):
    """Base of norms: x [t, h] -> x [t, h], alone or fused with the residual addition before it."""

    norm: Callable[..., Tensor]
    """(x, *affine) -> normalized x."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    """(x, residual, *affine) -> their sum, and the normalized sum."""

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
        """`again`: the output is recomputed in backward instead of saved by the next layer."""
        super().__init__()
        self.again = again
        shard = Shard.full(f"{name}.weight", (size,), invariant=invariant, inputs=0)
        register_param(
            self, "weight", ParameterSpec(shard, ZEROS if zero_centered else ONES), dtype=dtype
        )

    def affine(self) -> tuple[Tensor, ...]:
        """Return the parameters: scale, and shift if there is one."""
        return (self.weight,)

    def forward(self, x: Tensor) -> LayerInput:
        """x [t, h] -> [t, h]."""
        return self._result(self.norm(x, *self.affine()), x)

    def add_and_normalize(self, x: Tensor, residual: Tensor) -> tuple[Tensor, LayerInput]:
        """x, residual [t, h] -> their sum, and the normalized sum; fused, which saves one pass in
        backward."""
        total, normed = self.add_norm(x, residual, *self.affine())
        return total, self._result(normed, total)

    def _result(self, normed: Tensor, x: Tensor) -> LayerInput:
        if self.again is None:
            return normed
        return self.again(normed, self.norm, (x, *self.affine()))


class RMSNorm(Norm):
    """RMSNorm: divide each token by its root mean square, then scale its features: x [t, h] -> x
    [t, h].

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
    """LayerNorm: subtract each token's mean, divide by its standard deviation, then scale and
    shift: x [t, h] -> x [t, h].

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
        """Return scale and shift."""
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
    """Build the model's norm over `size` features; `eps`: default that of the model. Other
    arguments: see `Norm`."""
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
        norm.norm, norm.add_norm = (
            NormWithCast(norm.norm, dtype),
            AddNormWithCast(norm.add_norm, dtype),
        )
    return norm


def stream_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the residual stream between layers that compute in `dtype`."""
    return torch.promote_types(dtype, torch.float32) if config.fp32_residual else dtype


@dataclass(frozen=True, slots=True)
class NormWithCast:
    """A norm that converts its output from the residual stream's dtype to that of the layer."""

    norm: Callable[..., Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor, *affine: Tensor) -> Tensor:
        """x [t, h] -> [t, h] in `dtype`."""
        return self.norm(x, *affine).to(self.dtype)


@dataclass(frozen=True, slots=True)
class AddNormWithCast:
    """A norm with fused residual addition that converts its output, but not the sum, to the layer's
    dtype."""

    add_norm: Callable[..., tuple[Tensor, Tensor]]
    dtype: torch.dtype

    def __call__(self, x: Tensor, residual: Tensor, *affine: Tensor) -> tuple[Tensor, Tensor]:
        """x, residual [t, h] -> their sum, and its norm in `dtype`."""
        total, normed = self.add_norm(x, residual, *affine)
        return total, normed.to(self.dtype)

"""LoRA: two thin trained matrices beside each frozen one, under every layout.

A takes the features of a token to r features, B takes these to the outputs. Only the r features cross tensor-parallel
ranks: whatever lies on the side of the adapter that no axis cuts is computed outside divided work, by `invariant` ranks
alike or by each for its own tokens, as a norm is.
Source: Hu et al. 2021, arXiv:2106.09685, section 4.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalith.config.lora import STACKED, LoraConfig, lora_targets
from megalith.config.model import ModelConfig
from megalith.kernels.linear import linear
from megalith.kernels.rebuilt import Input, value_of
from megalith.kernels.tokens import Tokens
from megalith.parallel.autograd import partial
from megalith.parallel.tensor import ZEROS, ColumnLinear, Declared, Init, Region, RowLinear, declare
from megalith.plan.shards import Shard


class ColumnLora(nn.Module):
    """A `ColumnLinear` with adapters beside some of its matrices: x [t, i] -> y [t, f_tp].

    A is whole on every rank and multiplies what the region has outside divided work; B is cut as the matrix's rows.
    The r features enter divided work between them.
    """

    def __init__(self, base: ColumnLinear, targets: Sequence[str], lora: LoraConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.region, self.scale, self.rank = base, base.region, lora.scale, lora.rank
        self.names = [name for name in base.weight_names if name in targets]
        for name in self.names:
            a, b = column_adapter(_shard_of(base, name), lora, base.region)
            _declare_pair(self, name, a, b, dtype=dtype)

    def forward(self, x: Input) -> Tensor:
        """x [t, i], as the region has it -> [t, f_tp]."""
        y = self.base(x)
        z = linear(x, [getattr(self, f"{name}_lora_a") for name in self.names]) * self.scale
        features = value_of(self.region.enter(z)).split(self.rank, dim=-1)
        return y + self._outputs(list(features), like=y)

    def _outputs(self, features: list[Tensor], *, like: Tensor) -> Tensor:
        """r features of every adapted matrix -> the outputs of all matrices, in the order of the base's."""
        found = []
        for name, weight in zip(self.base.weight_names, self.base.sunk(), strict=True):
            if name not in self.names:
                found.append(like.new_zeros(like.shape[0], weight.shape[0]))
                continue
            for b in getattr(self, f"{name}_lora_b").chunk(STACKED.get(name, 1)):
                found.append(linear(features.pop(0), [b]))
        return torch.cat(found, dim=-1)


class RowLora(nn.Module):
    """A `RowLinear` with an adapter: x [t, i_tp] -> y [t, o] as the region has tokens.

    A is cut as the matrix's columns, so its r features are partial sums, which leave divided work; B is whole.
    """

    def __init__(self, base: RowLinear, lora: LoraConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.region, self.scale, self.name = base, base.region, lora.scale, base.weight_name
        a, b = row_adapter(_shard_of(base, self.name), lora, base.region)
        _declare_pair(self, self.name, a, b, dtype=dtype)

    def forward(self, x: Input) -> Tensor:
        """x [t, i_tp] -> [t, o]."""
        y = self.base(x)
        z = self.region.leave(partial(linear(x, [getattr(self, f"{self.name}_lora_a")]), self.region.group))
        return y + linear(z * self.scale, [getattr(self, f"{self.name}_lora_b")])


class Start(nn.Module):
    """What enters the layers, as the place where backward ends: frozen embeddings give nothing that wants a gradient,
    and stages without an adapter, and regions that are computed again, would have no backward."""

    def __init__(self, entrance: nn.Module) -> None:
        super().__init__()
        self.entrance = entrance

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """x [t, h] -> [t, h]."""
        x = self.entrance(x, tokens)
        return x.requires_grad_() if torch.is_grad_enabled() else x


def column_adapter(weight: Shard, lora: LoraConfig, region: Region) -> tuple[Shard, Shard]:
    """A [r, i] or [2, r, i], whole, and B [*outputs, r], cut as the outputs of `weight`.

    Ranks that all have all tokens repeat each other's work with A, and have its whole gradient.
    """
    outputs = len(weight.shape) - weight.inputs
    count = STACKED.get(weight.name.rsplit(".", 1)[1])
    a_shape = (*((count,) if count else ()), lora.rank, *weight.shape[outputs:])
    a = replace(
        weight, name=f"{weight.name}.lora_a", shape=a_shape, box=tuple((0, n) for n in a_shape), cut=(),
        invariant=region.invariant,
    )  # fmt: skip
    b = replace(
        weight, name=f"{weight.name}.lora_b", shape=(*weight.shape[:outputs], lora.rank),
        box=(*weight.box[:outputs], (0, lora.rank)), inputs=1,
    )  # fmt: skip
    return a, b


def row_adapter(weight: Shard, lora: LoraConfig, region: Region) -> tuple[Shard, Shard]:
    """A [r, *inputs], cut as the inputs of `weight`, and B [o, r], whole."""
    outputs = len(weight.shape) - weight.inputs
    a = replace(
        weight, name=f"{weight.name}.lora_a", shape=(lora.rank, *weight.shape[outputs:]),
        box=((0, lora.rank), *weight.box[outputs:]),
    )  # fmt: skip
    shape = (*weight.shape[:outputs], lora.rank)
    b = replace(
        weight, name=f"{weight.name}.lora_b", shape=shape, box=tuple((0, n) for n in shape), cut=(),
        invariant=region.invariant, inputs=1,
    )  # fmt: skip
    return a, b


def attach_adapters(chunks: Sequence[nn.Module], model: ModelConfig, lora: LoraConfig | None) -> None:
    """Freeze what the chunks of a model on the meta device have, and put adapters beside the matrices of their layers;
    None: leave them as they are. Layers that predict further ahead get none."""
    if lora is None:
        return
    targets = lora_targets(lora, model)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        for parent in list(chunk.get_submodule("layers").modules()):
            for name, child in list(parent.named_children()):
                if (adapted := _adapted(child, targets, lora)) is not None:
                    setattr(parent, name, adapted)
        if hasattr(chunk, "entrance"):
            chunk.entrance = Start(chunk.get_submodule("entrance"))


def _adapted(module: nn.Module, targets: Sequence[str], lora: LoraConfig) -> nn.Module | None:
    """The module with adapters; None: it gets none."""
    if isinstance(module, ColumnLinear) and any(name in targets for name in module.weight_names):
        return ColumnLora(module, targets, lora, dtype=module.sunk()[0].dtype)
    if isinstance(module, RowLinear) and module.weight_name in targets:
        return RowLora(module, lora, dtype=module.sunk()[0].dtype)
    return None


def _shard_of(layer: nn.Module, name: str) -> Shard:
    declared: dict[str, Declared] = layer.__dict__["declared"]
    return declared[name].shard


def _declare_pair(module: nn.Module, name: str, a: Shard, b: Shard, *, dtype: torch.dtype) -> None:
    """A starts normal with the variance that torch's linear layers (uniform in ±1/sqrt(inputs)) start with; B at zero.

    PEFT starts A as those layers are; its `gaussian` has another variance.
    """
    inputs = math.prod(a.shape[len(a.shape) - a.inputs :])
    declare(module, f"{name}_lora_a", Declared(a, Init(1 / math.sqrt(3 * inputs))), dtype=dtype)
    declare(module, f"{name}_lora_b", Declared(b, ZEROS), dtype=dtype)

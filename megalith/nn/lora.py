"""LoRA: two trained low-rank matrices in addition to each frozen one, under every parallel layout.

A maps the features of a token to r features, B maps these to the outputs. Only the r features are
communicated over tensor-parallel ranks: the matrix of the adapter that no axis shards is computed
outside the tensor-parallel region, replicated on `invariant` ranks or by each rank for its own
tokens, as a norm. Source: Hu et al. 2021, arXiv:2106.09685, section 4.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial as with_arguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.lora import STACKED, LoraConfig
from megalith.kernels.backend import AUTO, Backends
from megalith.kernels.dropout import dropout, key_of
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import Context, derive_recompute, linear
from megalith.parallel.tensor import (
    ZEROS,
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    ReplicatedLinear,
    RowParallelLinear,
    TPComm,
    register_param,
)
from megalith.plan.shards import Shard


class ColumnLora(nn.Module):
    """A `ColumnParallelLinear` with adapters of some of its matrices: x [t, i] -> y [t, f_tp].

    A is replicated and multiplies x outside the tensor-parallel region; B is sharded like the
    matrix's rows. The r features enter the tensor-parallel region in between.
    """

    def __init__(
        self,
        base: ColumnParallelLinear,
        names: Sequence[str],
        lora: LoraConfig,
        backends: Backends,
        *,
        dtype: torch.dtype,
    ) -> None:
        """`names`: the matrices with adapters, in the base's order."""
        super().__init__()
        self.base, self.tp_comm, self.scale, self.rank, self.names = (
            base,
            base.tp_comm,
            lora.scale,
            lora.rank,
            names,
        )
        for name in names:
            a, b = column_adapter(_find_shard(base, name), lora, base.tp_comm)
            _register_adapter(self, name, a, b, dtype=dtype)
        self.drop = InputDropout(
            _find_shard(base, names[0]).name, lora.dropout, base.tp_comm.select_local, backends
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i], in the layout of `tp_comm` -> [t, f_tp]."""
        y = self.base(x)
        z = (
            linear(self.drop(x), [getattr(self, f"{name}_lora_a") for name in self.names])
            * self.scale
        )
        features = iter(self.tp_comm.prepare_input(z).split(self.rank, dim=-1))
        starts, added, end = [], [], 0
        for name, weight in zip(
            self.base.weight_names, self.base.accumulated_parameters(), strict=True
        ):
            start, end = end, end + weight.shape[0]
            if name in self.names:
                parts = getattr(self, f"{name}_lora_b").chunk(STACKED.get(name, 1))
                starts += [start + number * len(part) for number, part in enumerate(parts)]
                added += [linear(next(features), [part]) for part in parts]
        adapted_y: Tensor = AddColumnsFunction.apply(y, starts, *added)  # type: ignore[no-untyped-call]  # torch's own
        return adapted_y

    def accumulated_parameters(self) -> list[Tensor]:
        """Return the local rows of every merged matrix, W + scale · B · A, for absorbed
        projections."""
        merged: list[Tensor] = []
        for name, weight in zip(
            self.base.weight_names, self.base.accumulated_parameters(), strict=True
        ):
            if name not in self.names:
                merged.append(weight)
                continue
            count = STACKED.get(name, 1)
            a, b = (getattr(self, f"{name}_lora_{word}").chunk(count) for word in "ab")
            products = torch.cat([right @ left for left, right in zip(a, b, strict=True)])
            merged.append(weight + self.scale * products)
        return merged


def reference_add_columns(y: Tensor, starts: Sequence[int], *added: Tensor) -> Tensor:
    """Reference implementation of `AddColumnsFunction` in plain PyTorch operations."""
    parts, end = [], 0
    for start, part in zip(starts, added, strict=True):
        parts += [y[:, end:start], y[:, start : start + part.shape[1]] + part]
        end = start + part.shape[1]
    return torch.cat([*parts, y[:, end:]], dim=-1)


class AddColumnsFunction(Function):
    """Adds tensors to the columns of y [t, o] that begin at `starts`, in place."""

    reference = staticmethod(reference_add_columns)

    @staticmethod
    def forward(ctx: Context, y: Tensor, starts: Sequence[int], *added: Tensor) -> Tensor:
        """y [t, o], added [t, o_1], [t, o_2] ... -> y."""
        ctx.mark_dirty(y)
        ctx.places = [(start, part.shape[1]) for start, part in zip(starts, added, strict=True)]
        for start, part in zip(starts, added, strict=True):
            y.narrow(-1, start, part.shape[1]).add_(part)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, o] -> dy, and its columns for each added tensor."""
        return dy, None, *(dy.narrow(-1, start, length) for start, length in ctx.places)


class RowLora(nn.Module):
    """A `RowParallelLinear` with an adapter: x [t, i_tp] -> y [t, o] in the layout of `tp_comm`.

    A is sharded like the matrix's columns, so its r features are partial sums that are reduced; B
    is replicated.
    """

    def __init__(
        self, base: RowParallelLinear, lora: LoraConfig, backends: Backends, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.base, self.tp_comm, self.scale, self.name = (
            base,
            base.tp_comm,
            lora.scale,
            base.weight_name,
        )
        weight = _find_shard(base, self.name)
        a, b = row_adapter(weight, lora, base.tp_comm)
        _register_adapter(self, self.name, a, b, dtype=dtype)
        self.drop = InputDropout(
            weight.name,
            lora.dropout,
            _all_tokens,
            backends,
            first_feature=first_input_feature(weight),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i_tp] -> [t, o]."""
        y = self.base(x)
        z = linear(self.drop(x), [getattr(self, f"{self.name}_lora_a")])
        z = self.tp_comm.reduce_output(z)
        return y + linear(z * self.scale, [getattr(self, f"{self.name}_lora_b")])


class ReplicatedLora(nn.Module):
    """A `ReplicatedLinear` with an adapter: x [t, i], in the layout of `tp_comm` -> y [t, o].

    A, B and W are replicated.
    """

    def __init__(
        self,
        base: ReplicatedLinear,
        tp_comm: TPComm,
        lora: LoraConfig,
        backends: Backends,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.base, self.scale, self.name = base, lora.scale, base.weight_name
        weight = _find_shard(base, self.name)
        _register_adapter(self, self.name, *whole_adapter(weight, lora), dtype=dtype)
        self.drop = InputDropout(weight.name, lora.dropout, tp_comm.select_local, backends)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, i] -> [t, o]."""
        y = self.base(x)
        z = linear(self.drop(x), [getattr(self, f"{self.name}_lora_a")]) * self.scale
        return y + linear(z, [getattr(self, f"{self.name}_lora_b")])


class InputDropout(nn.Module):
    """Dropout of an adapter's input in training: x [t, i] -> [t, i].

    Adapters of one matmul share it. Masks are equal under every layout, as in `nn/dropout.py`.
    """

    def __init__(
        self,
        place: str,
        p: float,
        local_part: Callable[[Tensor], Tensor],
        backends: Backends = AUTO,
        *,
        first_feature: int = 0,
    ) -> None:
        """`local_part`: selects the local tokens; `first_feature`: index of x's first feature among
        all."""
        super().__init__()
        self.place, self.p = place, p
        self.local_part, self.first_feature = local_part, first_feature
        self.drop = backends.bind("dropout", dropout)
        self.inputs: LayerInputs | None = None
        # Set by a hook of the enclosing attention or MLP: linear layers do not receive it.

    def forward(self, x: Tensor) -> Tensor:
        """Return x itself outside training. Backward recomputes the mask, and x if it is a
        recomputed output."""
        if self.p == 0.0:
            return x
        assert self.inputs is not None, f"{self.place}: the hook did not set the inputs"
        dropout_key = self.inputs.dropout_key
        if dropout_key is None:
            return x
        again = with_arguments(
            self.drop,
            p=self.p,
            key=key_of(dropout_key.seed, "adapter dropout", self.place),
            numbers=self.local_part(dropout_key.numbers),
            first_feature=self.first_feature,
        )
        return derive_recompute(x, again(x), again)


def column_adapter(weight: Shard, lora: LoraConfig, tp_comm: TPComm) -> tuple[Shard, Shard]:
    """Return the shards of A [r, i] or [2, r, i], replicated, and B [*outputs, r], sharded like the
    outputs of `weight`.

    Ranks that hold all tokens compute A redundantly and have its full gradient.
    """
    outputs = len(weight.shape) - weight.inputs
    count = STACKED.get(weight.name.rsplit(".", 1)[1])
    a_shape = (*((count,) if count else ()), lora.rank, *weight.shape[outputs:])
    a = replace(
        weight,
        name=f"{weight.name}.lora_a",
        shape=a_shape,
        box=tuple((0, n) for n in a_shape),
        cut=(),
        invariant=tp_comm.invariant,
    )
    b = replace(
        weight,
        name=f"{weight.name}.lora_b",
        shape=(*weight.shape[:outputs], lora.rank),
        box=(*weight.box[:outputs], (0, lora.rank)),
        inputs=1,
    )
    return a, b


def row_adapter(weight: Shard, lora: LoraConfig, tp_comm: TPComm) -> tuple[Shard, Shard]:
    """Return the shards of A [r, *inputs], sharded like the inputs of `weight`, and B [o, r],
    replicated."""
    outputs = len(weight.shape) - weight.inputs
    a = replace(
        weight,
        name=f"{weight.name}.lora_a",
        shape=(lora.rank, *weight.shape[outputs:]),
        box=((0, lora.rank), *weight.box[outputs:]),
    )
    shape = (*weight.shape[:outputs], lora.rank)
    b = replace(
        weight,
        name=f"{weight.name}.lora_b",
        shape=shape,
        box=tuple((0, n) for n in shape),
        cut=(),
        invariant=tp_comm.invariant,
        inputs=1,
    )
    return a, b


def whole_adapter(weight: Shard, lora: LoraConfig) -> tuple[Shard, Shard]:
    """Return the shards of A [r, i] and B [o, r], both replicated like `weight`."""
    (outputs, inputs), rank = weight.shape, lora.rank
    a, b = (
        replace(
            weight, name=f"{weight.name}.lora_{word}", shape=shape, box=tuple((0, n) for n in shape)
        )
        for word, shape in (("a", (rank, inputs)), ("b", (outputs, rank)))
    )
    return a, b


def first_input_feature(weight: Shard) -> int:
    """Return the flat index of the first local input among all inputs."""
    sizes, starts = (
        weight.shape[-weight.inputs :],
        [start for start, _ in weight.box[-weight.inputs :]],
    )
    return sum(start * math.prod(sizes[dim + 1 :]) for dim, start in enumerate(starts))


HeadsFn = Callable[..., Tensor]
"""Latent attention after the down projections: (latent vectors of queries, those of keys and
values, the shared key, tokens) -> outputs of the heads [t, n, value_dim]."""


def connect_adapter_dropout(part: nn.Module) -> nn.Module:
    """Return an attention or MLP whose call passes its inputs to the dropout of its adapters,
    because linear layers do not receive them."""
    if drops := _adapter_dropout(part):
        part.register_forward_pre_hook(with_arguments(_set_inputs, drops))
    return part


def pass_inputs_to_adapter_dropout(
    around: Callable[[HeadsFn], HeadsFn], part: nn.Module
) -> Callable[[HeadsFn], HeadsFn]:
    """Return a wrapper of a part of latent attention that also passes the inputs to the dropout of
    its adapters when backward recomputes this part alone."""
    drops = _adapter_dropout(part)
    return with_arguments(_around_with_inputs, around, drops) if drops else around


def _adapter_dropout(part: nn.Module) -> list[InputDropout]:
    return [
        module for module in part.modules() if isinstance(module, InputDropout) and module.p > 0
    ]


def _set_inputs(drops: Sequence[InputDropout], part: nn.Module, arguments: tuple[Any, ...]) -> None:
    for drop in drops:
        drop.inputs = arguments[1]


def _around_with_inputs(
    around: Callable[[HeadsFn], HeadsFn], drops: Sequence[InputDropout], find: HeadsFn
) -> HeadsFn:
    return around(with_arguments(_set_inputs_and_find, drops, find))


def _set_inputs_and_find(
    drops: Sequence[InputDropout],
    find: HeadsFn,
    short: Tensor,
    latent: Tensor,
    k_rotated: Tensor,
    inputs: LayerInputs,
) -> Tensor:
    for drop in drops:
        drop.inputs = inputs
    return find(short, latent, k_rotated, inputs)


def _all_tokens(values: Tensor) -> Tensor:
    """Return all values: inside the tensor-parallel region every rank has all tokens."""
    return values


def _find_shard(layer: nn.Module, name: str) -> Shard:
    specs: dict[str, ParameterSpec] = layer.__dict__["param_specs"]
    return specs[name].shard


def _register_adapter(
    module: nn.Module, name: str, a: Shard, b: Shard, *, dtype: torch.dtype
) -> None:
    """Register A and B: A is normal with the variance of torch's linear layers (uniform in
    ±1/sqrt(inputs)), B is 0.

    PEFT initializes A uniformly like these layers; its `gaussian` has another variance.
    """
    inputs = math.prod(a.shape[len(a.shape) - a.inputs :])
    register_param(
        module, f"{name}_lora_a", ParameterSpec(a, Init(1 / math.sqrt(3 * inputs))), dtype=dtype
    )
    register_param(module, f"{name}_lora_b", ParameterSpec(b, ZEROS), dtype=dtype)

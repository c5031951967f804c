"""Weight-only quantization of a model for inference: weights are quantized while they are loaded,
some rows at a time."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from megalith.config.kernels import KernelsConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.folder import Weights
from megalith.kernels.grouped_linear import GroupedMatmulOps
from megalith.kernels.linear import PLAIN, MatmulOps, stacked
from megalith.models.decoder import Decoder
from megalith.parallel.tensor import VocabParallelHead
from megalith.plan.kernels import CPU, GPU
from megalith.plan.shards import Box, Shard, split_range_into_boxes
from megalith.precision.int8 import Int8GroupedMatmulOps, Int8MatmulOps, quantize_int8

UNQUANTIZED = ("embed.*", "*.router", "*.kv_up")
"""Weights that keep their dtype: tables that are also read by row (also as a tied output head),
routers, whose rounding would change which experts are chosen, and the up projection of MLA, which
decoding multiplies with queries and outputs instead of latent vectors."""

PIECE_ELEMENTS = 1 << 22
"""Elements that are quantized at a time (heuristic)."""


def build_int8_matmul_ops(weight: str) -> MatmulOps:
    """Return the matmuls of a linear layer, by the name of its first weight."""
    if any(fnmatchcase(weight, pattern) for pattern in UNQUANTIZED):
        return PLAIN
    return Int8MatmulOps()


def build_int8_grouped_matmul_ops(weight: str) -> GroupedMatmulOps:
    """Return the matmuls of one weight of all experts."""
    return Int8GroupedMatmulOps()


class QuantizedWeights(NamedTuple):
    """The weights that one matmul reads as the rows of a matrix, and its matmuls."""

    module: nn.Module
    names: Sequence[str]
    """Attributes of the module."""

    shards: Sequence[Shard]
    matmul_ops: Int8MatmulOps | Int8GroupedMatmulOps


def iter_quantized_weights(model: Decoder) -> Iterator[QuantizedWeights]:
    """Yield the weights of every layer with int8 matmuls."""
    for module in model.modules():
        if isinstance(module, VocabParallelHead):
            matmul_ops: object = module.vocab.matmul_ops
        else:
            matmul_ops = getattr(module, "matmul_ops", None)
        if isinstance(matmul_ops, Int8MatmulOps | Int8GroupedMatmulOps):
            specs = module.__dict__["param_specs"]
            names = [name for name, spec in specs.items() if spec.shard.inputs]
            yield QuantizedWeights(module, names, [specs[name].shard for name in names], matmul_ops)


def set_int8_dtype(weights: Sequence[QuantizedWeights]) -> None:
    """Set the dtype of quantized weights on the meta device, before they are allocated."""
    for quantized in weights:
        for name, shard in zip(quantized.names, quantized.shards, strict=True):
            empty = torch.empty(shard.matrix_shape, dtype=torch.int8, device="meta")
            setattr(quantized.module, name, nn.Parameter(empty, requires_grad=False))


def load_int8_weights(quantized_weights: Sequence[QuantizedWeights], weights: Weights) -> None:
    """Load all quantized weights.

    Raises:
        CheckpointError: a weight is NaN or infinite, or cannot be read.
    """
    for quantized in quantized_weights:
        _load_matmul(quantized, weights)


def _load_matmul(quantized: QuantizedWeights, weights: Weights) -> None:
    """Load the int8 values of one matmul, and set its scales.

    The scale of an output channel is that of all its inputs, so it does not depend on the parallel
    layout.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    values = stacked([getattr(quantized.module, name) for name in quantized.names])
    scales = quantized.matmul_ops.scales
    if len(scales) != len(values):  # in place for new weights of the same model
        scales = torch.empty(len(values), device=values.device)
    first = 0
    for shard in quantized.shards:
        for box in iter_row_boxes(shard, PIECE_ELEMENTS):
            weight = weights.read(shard.name, box, torch.float32)
            num_rows = math.prod(weight.shape[: -shard.inputs])
            try:
                piece = quantize_int8(weight.reshape(num_rows, -1))
            except ValueError as error:
                raise CheckpointError(
                    f"{shard.name}: {error}, so it cannot be quantized to int8. Use a checkpoint "
                    "with finite weights."
                ) from None
            inputs = tuple(slice(*span) for span in shard.box[-shard.inputs :])
            local = piece.values.view(num_rows, *shard.shape[-shard.inputs :])[:, *inputs]
            values.data[first : first + num_rows] = local.reshape(num_rows, -1)
            scales[first : first + num_rows] = piece.scales
            first += num_rows
    quantized.matmul_ops.scales = scales


def iter_row_boxes(shard: Shard, max_elements: int) -> Iterator[Box]:
    """Yield boxes of about `max_elements` elements that divide the rows of a shard, in order, with
    all inputs of the full tensor."""
    inputs = tuple((0, size) for size in shard.shape[-shard.inputs :])
    outputs = shard.box[: -shard.inputs]
    num_rows = shard.matrix_shape[0]
    step = max(1, max_elements // max(1, math.prod(size for _, size in inputs)))
    for start in range(0, num_rows, step):
        sizes = tuple(stop - first for first, stop in outputs)
        for box in split_range_into_boxes(sizes, start, min(start + step, num_rows)):
            rows = tuple((o + a, o + b) for (o, _), (a, b) in zip(outputs, box, strict=True))
            yield (*rows, *inputs)


def check_int8_supported(device: torch.device, kernels: KernelsConfig) -> None:
    """Check that int8 weights can be used.

    Raises:
        ConfigError: the device or the kernels do not support them.
    """
    if device.type not in (CPU, GPU):
        raise ConfigError(
            f"quantization=int8 is supported on CPUs and NVIDIA GPUs, not on {device.type}. Set "
            "quantization to none."
        )
    if kernels.backend_name("experts") == "reference":
        raise ConfigError(
            "quantization=int8 with kernels.experts=reference: it has no int8 weights. Set kernels "
            "to auto or torch."
        )

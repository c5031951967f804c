"""Quantized weights of Hugging Face folders, dequantized while they are read: block-wise FP8 and
MXFP4.

Sources: DeepSeek-AI 2024, arXiv:2412.19437, section 3.3 (FP8, a scale for each 128 x 128 block);
Open Compute Project 2023, Microscaling Formats (MX) 1.0, section 5.3 (MXFP4, an exponent for each
32 values).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.safetensors import TensorInfo, read_box, show_names
from megalith.errors import CheckpointError

FIELD = "quantization_config"
"""Field of config.json that describes the quantization."""

FP8, MXFP4 = "fp8", "mxfp4"
"""Supported values of quant_method."""

RUN = 32  # values that share an exponent in MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of four bits."""

FIELDS_WITHOUT_EFFECT = (
    "modules_to_not_convert",
    "activation_scheme",
    "scale_fmt",
    "dequantize",
    "quant_method",
)
"""Fields that do not change the dequantized values: the dtypes of the tensors show which layers are
quantized and how scales are stored."""


@dataclass(frozen=True, slots=True)
class DequantizedTensor:
    """A quantized tensor that is dequantized when a box of it is read."""

    name: str
    kind: str
    shape: tuple[int, ...]
    values: TensorInfo
    scales: TensorInfo
    block: tuple[int, int] = (1, RUN)
    """Rows and columns of the stored matrix that share a scale."""

    dtype: str = "BF16"
    """Dtype that transformers dequantizes to, as named by safetensors."""

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """Return a box in fp32, without rounding: the product of value and scale is exact."""
        spans = [span.indices(size)[:2] for span, size in zip(part, self.shape, strict=True)]
        if self.kind == FP8:
            return self._read_fp8(*spans)
        return self._read_mxfp4(*spans)

    def _read_fp8(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        values = read_box(self.name, self.values, (slice(*rows), slice(*columns)))
        (first_row, row), (first_column, column) = (
            _blocks(span, size) for span, size in zip((rows, columns), self.block, strict=True)
        )
        scales = read_box(self.name, self.scales, (first_row, first_column)).float()
        return values.float().mul_(scales[row][:, column])

    def _read_mxfp4(
        self, experts: tuple[int, int], columns: tuple[int, int], rows: tuple[int, int]
    ) -> Tensor:
        """Stored as [e, rows, columns / 32, 16], returned as [e, columns, rows], the layout of
        transformers."""
        runs, column = _blocks(columns, RUN)
        stored = (slice(*experts), slice(*rows), runs)
        blocks = read_box(self.name, self.values, (*stored, slice(None)))
        values = mxfp4_values(blocks, read_box(self.name, self.scales, stored))
        first = columns[0] - runs.start * RUN
        return values[..., first : first + len(column)].transpose(1, 2)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the fp32 values [..., 32 r] of packed bytes [..., r, 16] and exponents [..., r].

    The lower four bits are the first value. Exponents are stored with a bias of 127.
    """
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1)[pairs.int()]
    return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).flatten(-2)


def _blocks(span: tuple[int, int], size: int) -> tuple[slice, Tensor]:
    """Return the blocks of `size` that overlap a span, and the block index of each of its
    elements."""
    first, stop = span[0] // size, -(-span[1] // size)
    return slice(first, stop), torch.arange(*span) // size - first


def dequantize(
    raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path
) -> dict[str, TensorInfo | DequantizedTensor]:
    """Return the tensors of a folder, with each quantized tensor and its scales as one; `raw` is
    config.json.

    Raises:
        CheckpointError: the format is not supported, or scales are missing or have a wrong shape.
    """
    config = raw.get(FIELD)
    if config is None:
        return dict(tensors)
    kind = config.get("quant_method") if isinstance(config, dict) else None
    if kind not in (FP8, MXFP4):
        raise CheckpointError(
            f"{path}: {FIELD}.quant_method={kind!r:.60}: this quantization is not supported, only "
            f"{FP8!r} and {MXFP4!r} "
            "are. Use the model's bf16 weights, or save them with transformers' dequantize() "
            "first."
        )
    problems = _config_problems(config)
    find_tensor: Callable[
        [str, Mapping[str, TensorInfo], Mapping[str, Any]], DequantizedTensor | str | None
    ]
    find_tensor = _find_fp8_tensor if kind == FP8 else _find_mxfp4_tensor
    result: dict[str, TensorInfo | DequantizedTensor] = dict(tensors)
    for name in [] if problems else sorted(tensors):
        tensor = find_tensor(name, tensors, config)
        if isinstance(tensor, str):
            problems.append(tensor)
        elif tensor is not None:
            for stored in _stored_names(tensor.name, kind):
                result.pop(stored, None)
            result[tensor.name] = tensor
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems[:4])}. Copy the folder again, or use its bf16 weights."
        )
    return result


def _stored_names(name: str, kind: str) -> tuple[str, str]:
    """Return the names of the stored values and scales of a quantized tensor."""
    return (name, f"{name}_scale_inv") if kind == FP8 else (f"{name}_blocks", f"{name}_scales")


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the settings of the quantization that are not supported."""
    block_size, fp8 = config.get("weight_block_size"), config["quant_method"] == FP8
    sizes = block_size if isinstance(block_size, list) else []
    problems = []
    if fp8 and (len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes)):
        problems.append(
            f"{FIELD}.weight_block_size={block_size!r:.60}, expected two whole numbers, as [128, "
            "128]"
        )
    if fp8 and config.get("fmt", "e4m3") != "e4m3":
        problems.append(
            f"{FIELD}.fmt={config['fmt']!r:.60}, which is not supported: it must be 'e4m3'"
        )
    known_fields = {*FIELDS_WITHOUT_EFFECT, *(("weight_block_size", "fmt") if fp8 else ())}
    unknown = sorted(
        name for name, value in config.items() if name not in known_fields and value is not None
    )
    if unknown:
        problems.append(f"{FIELD} has the unknown fields {show_names(unknown)}")
    return problems


def _find_fp8_tensor(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> DequantizedTensor | str | None:
    """Return the FP8 tensor `name`, a problem with it, or None if it is not FP8."""
    values = tensors[name]
    if values.dtype != "F8_E4M3":
        return None
    block = tuple(config["weight_block_size"])
    if len(values.shape) != 2:
        return f"{name} is {list(values.shape)}, expected a matrix"
    scales_shape = tuple(
        -(-size // length) for size, length in zip(values.shape, block, strict=True)
    )
    return _add_scales(
        DequantizedTensor(name, FP8, values.shape, values, values, block),
        tensors,
        scales_shape,
        ("F32", "BF16"),
    )


def _find_mxfp4_tensor(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> DequantizedTensor | str | None:
    """Return the MXFP4 tensor whose values are `name`, a problem with it, or None."""
    tensor_name, values = name.removesuffix("_blocks"), tensors[name]
    if tensor_name == name or values.dtype != "U8":
        return None
    if len(values.shape) != 4 or values.shape[3] * 2 != RUN:
        return f"{name} is {list(values.shape)}, expected [experts, rows, runs, {RUN // 2}]"
    experts, rows, runs, _ = values.shape
    tensor = DequantizedTensor(tensor_name, MXFP4, (experts, runs * RUN, rows), values, values)
    return _add_scales(tensor, tensors, (experts, rows, runs), ("U8",))


def _add_scales(
    tensor: DequantizedTensor,
    tensors: Mapping[str, TensorInfo],
    expected: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> DequantizedTensor | str:
    """Return the tensor with its scales, or a problem with them."""
    name = _stored_names(tensor.name, tensor.kind)[1]
    scales = tensors.get(name)
    if scales is None:
        return f"{name} is missing: the scales of {tensor.name}, expected {list(expected)}"
    if scales.shape != expected or scales.dtype not in dtypes:
        return (
            f"{name} is {list(scales.shape)} {scales.dtype}, expected {list(expected)} "
            f"{' or '.join(dtypes)}"
        )
    return replace(tensor, scales=scales)

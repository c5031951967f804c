"""Weights that a folder stores in few bits, read as what they stand for: FP8 in blocks, MXFP4 in
runs of 32.

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
"""Of config.json."""

FP8, MXFP4 = "fp8", "mxfp4"
"""Kinds that are read, as quant_method names them."""

RUN = 32  # values that share an exponent in MXFP4
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 16 numbers of four bits stand for."""

HARMLESS = (
    "modules_to_not_convert",
    "activation_scheme",
    "scale_fmt",
    "dequantize",
    "quant_method",
)
"""Fields that say which layers are stored otherwise, how activations were, and that scales are
powers of two: the tensors themselves show the first and the last."""


@dataclass(frozen=True, slots=True)
class DequantizedTensor:
    """A tensor in few bits: what it would be in bf16, and how to read a box of it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    values: TensorInfo
    scales: TensorInfo
    block: tuple[int, int] = (1, RUN)
    """Rows and columns of the matrix as stored that share a scale."""

    dtype: str = "BF16"
    """What trainers and transformers make of it; the word of safetensors."""

    def read(self, part: tuple[slice, ...]) -> Tensor:
        """A box of it in fp32, rounded nowhere: few bits times a scale of few bits, or times a
        power of two."""
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
        """Stored [e, rows, columns / 32, 16] and read [e, columns, rows], as transformers has
        experts."""
        runs, column = _blocks(columns, RUN)
        stored = (slice(*experts), slice(*rows), runs)
        blocks = read_box(self.name, self.values, (*stored, slice(None)))
        values = mxfp4_values(blocks, read_box(self.name, self.scales, stored))
        first = columns[0] - runs.start * RUN
        return values[..., first : first + len(column)].transpose(1, 2)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """What bytes of two numbers each [..., r, 16] and exponents [..., r] stand for, in fp32: [...,
    32 r].

    The lower four bits are the first number. Exponents are stored with 127 added.
    """
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.tensor(E2M1)[pairs.int()]
    return torch.ldexp(values, (scales.int() - 127).unsqueeze(-1)).flatten(-2)


def _blocks(span: tuple[int, int], size: int) -> tuple[slice, Tensor]:
    """The blocks of `size` that a span touches, and for each element of it which of these it is
    in."""
    first, stop = span[0] // size, -(-span[1] // size)
    return slice(first, stop), torch.arange(*span) // size - first


def dequantize(
    raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo], path: Path
) -> dict[str, TensorInfo | DequantizedTensor]:
    """A folder's tensors, those in few bits with their scales as one each; `raw` is its
    config.json.

    Raises:
        CheckpointError: they are stored in a way that is not read, or scales are missing or of
        another shape.
    """
    config = raw.get(FIELD)
    if config is None:
        return dict(tensors)
    kind = config.get("quant_method") if isinstance(config, dict) else None
    if kind not in (FP8, MXFP4):
        raise CheckpointError(
            f"{path}: {FIELD}.quant_method={kind!r:.60}: weights stored so are not read, only "
            f"{FP8!r} and {MXFP4!r} "
            "are. Use the model's bf16 weights, or save them with transformers' dequantize() "
            "first."
        )
    problems = _config_problems(config)
    find: Callable[
        [str, Mapping[str, TensorInfo], Mapping[str, Any]], DequantizedTensor | str | None
    ]
    find = _fp8_of if kind == FP8 else _mxfp4_of
    found: dict[str, TensorInfo | DequantizedTensor] = dict(tensors)
    for name in [] if problems else sorted(tensors):
        one = find(name, tensors, config)
        if isinstance(one, str):
            problems.append(one)
        elif one is not None:
            for stored in _names(one.name, kind):
                found.pop(stored, None)
            found[one.name] = one
    if problems:
        raise CheckpointError(
            f"{path}: {'; '.join(problems[:4])}. Copy the folder again, or use its bf16 weights."
        )
    return found


def _names(name: str, kind: str) -> tuple[str, str]:
    """Of the values and the scales that make one tensor."""
    return (name, f"{name}_scale_inv") if kind == FP8 else (f"{name}_blocks", f"{name}_scales")


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    """What it says beside the kind, and we do not compute."""
    block, fp8 = config.get("weight_block_size"), config["quant_method"] == FP8
    sizes = block if isinstance(block, list) else []
    problems = []
    if fp8 and (len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes)):
        problems.append(
            f"{FIELD}.weight_block_size={block!r:.60}, expected two whole numbers, as [128, 128]"
        )
    if fp8 and config.get("fmt", "e4m3") != "e4m3":
        problems.append(f"{FIELD}.fmt={config['fmt']!r:.60}, which is not read: it must be 'e4m3'")
    known = {*HARMLESS, *(("weight_block_size", "fmt") if fp8 else ())}
    unknown = sorted(
        name for name, value in config.items() if name not in known and value is not None
    )
    if unknown:
        problems.append(
            f"{FIELD} has {show_names(unknown)}, which nobody here knows, expected none"
        )
    return problems


def _fp8_of(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> DequantizedTensor | str | None:
    """The tensor that FP8 numbers make with their scales; or what is wrong with it; None for any
    other."""
    values = tensors[name]
    if values.dtype != "F8_E4M3":
        return None
    block = tuple(config["weight_block_size"])
    if len(values.shape) != 2:
        return f"{name} is {list(values.shape)}, expected a matrix"
    wanted = tuple(-(-size // length) for size, length in zip(values.shape, block, strict=True))
    return _joined(
        DequantizedTensor(name, FP8, values.shape, values, values, block),
        tensors,
        wanted,
        ("F32", "BF16"),
    )


def _mxfp4_of(
    name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> DequantizedTensor | str | None:
    """The experts that blocks make with their scales."""
    whole, values = name.removesuffix("_blocks"), tensors[name]
    if whole == name or values.dtype != "U8":
        return None
    if len(values.shape) != 4 or values.shape[3] * 2 != RUN:
        return f"{name} is {list(values.shape)}, expected [experts, rows, runs, {RUN // 2}]"
    experts, rows, runs, _ = values.shape
    one = DequantizedTensor(whole, MXFP4, (experts, runs * RUN, rows), values, values)
    return _joined(one, tensors, (experts, rows, runs), ("U8",))


def _joined(
    one: DequantizedTensor,
    tensors: Mapping[str, TensorInfo],
    wanted: tuple[int, ...],
    dtypes: tuple[str, ...],
) -> DequantizedTensor | str:
    """With its scales; or what is wrong with them."""
    name = _names(one.name, one.kind)[1]
    scales = tensors.get(name)
    if scales is None:
        return (
            f"{name} is missing: nobody knows how large the numbers of {one.name} are, "
            f"expected {list(wanted)}"
        )
    if scales.shape != wanted or scales.dtype not in dtypes:
        return (
            f"{name} is {list(scales.shape)} {scales.dtype}, expected {list(wanted)} "
            f"{' or '.join(dtypes)}"
        )
    return replace(one, scales=scales)

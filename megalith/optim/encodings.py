"""Encodings of optimizer states and master weights: bf16, fp16, fp8 and int8 in blocks of 256
elements, and bf16 weights with 16-bit remainders.

An encoded tensor holds plain tensors. An update decodes some blocks to fp32, computes, and encodes
them. Decoding, encoding and decoding again gives the first values bitwise, so that a checkpoint
needs only the decoded values.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from megalith.config.optim import MomentDtype
from megalith.errors import ConfigError
from megalith.kernels.dropout import hash_numbers
from megalith.plan.shards import Shard
from megalith.plan.state_encodings import BLOCK_DTYPES, BLOCK_NUMEL

SMALLEST_SCALE = 2.0**-100
"""Smallest magnitude of a scale, so that no product of code and scale is rounded by underflow.
Heuristic: the square of a gradient of 1e-15 is larger."""

FP16_LIMIT = 65504 / 2
"""Largest magnitude of scaled fp16 values: half the largest of the format."""

FP8_LIMIT = 448.0
"""Largest magnitude of e4m3."""

_NAN_HIGH = 0x7FC0
"""High half of the NaN that replaces all others."""


class EncodedTensor(Protocol):
    """fp32 values of a slice, stored in another form. Starts of ranges are multiples of
    `BLOCK_NUMEL`, and stops too, except at the end."""

    numel: int
    """Number of values."""

    tensors: Mapping[str, Tensor]
    """The tensors that are stored, by name."""

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) in fp32."""

    def encode(self, values: Tensor, start: int) -> None:
        """Store values from element `start` on."""


def list_nbytes(encoded: EncodedTensor) -> int:
    """Return the bytes of the tensors that are stored, without weights that belong to the model."""
    return sum(tensor.nbytes for name, tensor in encoded.tensors.items() if name != "weight")


class BF16Tensor:
    """Values rounded to bf16, to nearest even."""

    def __init__(self, values: Tensor) -> None:
        self.numel = values.numel()
        self._values = values.reshape(-1).to(torch.bfloat16)
        self.tensors: Mapping[str, Tensor] = {"values": self._values}

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) in fp32."""
        return self._values[start:stop].float()

    def encode(self, values: Tensor, start: int) -> None:
        """Round values to nearest even."""
        self._values[start : start + values.numel()].copy_(values.reshape(-1))


class BlockTensor:
    """Codes of one or two bytes, and one fp32 scale per block of 256 values.

    fp16 and fp8: scales are powers of two. int8: the scale is the value of largest magnitude, with
    its sign, which the code of 1 represents exactly. Positive second moments are never rounded to
    zero, because the update divides by their root.
    """

    def __init__(self, values: Tensor, dtype: MomentDtype, *, is_unsigned: bool) -> None:
        """`is_unsigned`: values are at least 0 (second moments)."""
        self.numel = values.numel()
        num_blocks = -(-self.numel // BLOCK_NUMEL)
        self._dtype, self._is_unsigned = dtype, is_unsigned
        codes = torch.empty(self.numel, dtype=CODE_DTYPES[dtype], device=values.device)
        scales = torch.empty(num_blocks, dtype=torch.float32, device=values.device)
        self._codes, self._scales = codes, scales
        self.tensors: Mapping[str, Tensor] = {"codes": codes, "scales": scales}
        self.encode(values, 0)

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the values [start, stop) in fp32."""
        codes, scales = self._codes[start:stop], self._scales[start // BLOCK_NUMEL :]
        if self._dtype == "int8":
            table = build_code_values(is_unsigned=self._is_unsigned).to(codes.device)
            values = table[codes.int()]
        else:
            values = codes.float()
        return values * _repeat_scales(scales, values.numel())

    def encode(self, values: Tensor, start: int) -> None:
        """Store values from element `start`, a multiple of `BLOCK_NUMEL`, on."""
        assert start % BLOCK_NUMEL == 0, start
        flat = values.reshape(-1).float()
        stop, first = start + flat.numel(), start // BLOCK_NUMEL
        assert flat.numel() % BLOCK_NUMEL == 0 or stop == self.numel, (start, stop, self.numel)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_NUMEL))
        blocks = blocks.view(-1, BLOCK_NUMEL)
        quantize = _quantize_int8 if self._dtype == "int8" else _quantize_scaled
        codes, scales = quantize(blocks, self._dtype, is_unsigned=self._is_unsigned)
        self._codes[start:stop].copy_(codes.reshape(-1)[: flat.numel()])
        self._scales[first : first + len(scales)].copy_(scales)


CODE_DTYPES: Mapping[str, torch.dtype] = {
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.uint8,
}
"""Dtype of the codes of each block encoding."""


def _repeat_scales(scales: Tensor, numel: int) -> Tensor:
    num_blocks = -(-numel // BLOCK_NUMEL)
    return scales[:num_blocks].repeat_interleave(BLOCK_NUMEL)[:numel]


def _quantize_scaled(
    blocks: Tensor, dtype: MomentDtype, *, is_unsigned: bool
) -> tuple[Tensor, Tensor]:
    """Return codes [n, 256] and scales [n]: largest magnitude over the limit of the format, rounded
    up to a power of two."""
    limit = FP16_LIMIT if dtype == "fp16" else FP8_LIMIT
    largest = blocks.abs().amax(dim=1)
    mantissa, exponent = torch.frexp(largest / limit)
    scales = torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())
    scales = torch.where(largest > 0, scales.clamp(min=SMALLEST_SCALE), 1.0)
    codes = (blocks / scales.unsqueeze(1)).to(CODE_DTYPES[dtype])
    if is_unsigned:
        smallest = 2.0**-24 if dtype == "fp16" else 2.0**-9
        is_lost = (codes.float() == 0) & (blocks > 0)
        codes = torch.where(is_lost, smallest, codes.float()).to(CODE_DTYPES[dtype])
    return codes, scales


def _quantize_int8(
    blocks: Tensor, dtype: MomentDtype, *, is_unsigned: bool
) -> tuple[Tensor, Tensor]:
    """Return indices [n, 256] in the map and scales [n]: the value of largest magnitude, with its
    sign."""
    scales = blocks.gather(1, blocks.abs().argmax(dim=1, keepdim=True))
    scales = torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales)
    # a block of zeros has scale 1
    divisors = torch.where(blocks.any(dim=1, keepdim=True), scales, 1.0)
    relative = blocks / divisors
    midpoints = build_code_midpoints(is_unsigned=is_unsigned).to(blocks.device)
    codes = torch.bucketize(relative, midpoints, out_int32=True)
    if is_unsigned:
        codes = torch.where((codes == 0) & (relative > 0), 1, codes)
    return codes.to(torch.uint8), divisors.squeeze(1)


@cache
def build_code_values(*, is_unsigned: bool) -> Tensor:
    """Return the 256 values of the dynamic exponent map in ascending order, fp32: seven decades
    below 1, each with twice as many values as the one below, and 0 and 1.

    Unsigned maps have twice as many values per decade, and no negative ones. Source: Dettmers et
    al. 2021, arXiv:2110.02861, section 2.2 (dynamic tree quantization) and appendix F.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        num_values = 2 ** (decade + is_unsigned)
        width = 0.9 / num_values
        for index in range(num_values):
            magnitude = 10.0 ** (decade - 6) * (0.1 + width * (index + 0.5))
            values += [magnitude] if is_unsigned else [magnitude, -magnitude]
    assert len(values) == 256, len(values)
    return torch.tensor(sorted(values), dtype=torch.float64).float()


@cache
def build_code_midpoints(*, is_unsigned: bool) -> Tensor:
    """Return the 255 boundaries between neighboring values of the map."""
    values = build_code_values(is_unsigned=is_unsigned).double()
    return ((values[:-1] + values[1:]) / 2).float()


def check_block_boundaries(shard: Shard, dtype: MomentDtype) -> None:
    """Check that a slice contains whole blocks, so that codes do not depend on the sharding.

    Raises:
        ConfigError: it begins or ends inside of a block.
    """
    start, stop = shard.flat or (0, shard.numel)
    is_split = start % BLOCK_NUMEL or (stop % BLOCK_NUMEL and stop != shard.numel)
    if dtype in BLOCK_DTYPES and is_split and start < stop:
        raise ConfigError(
            f"precision.optimizer_states with {dtype} moments: this rank holds elements {start} to "
            f"{stop} of {shard.numel} of {shard.name}, and blocks of {BLOCK_NUMEL} elements must "
            "not be split. Set precision.optimizer_states.first_moment and second_moment to bf16, "
            "or parallel.zero to 2 or less (0 if it is 1 or 2), or use sizes of which each rank's "
            f"rows are a multiple of {BLOCK_NUMEL} elements."
        )


def encode_moment(values: Tensor, dtype: MomentDtype, *, is_unsigned: bool) -> EncodedTensor:
    """Return values encoded in a dtype other than fp32."""
    if dtype == "bf16":
        return BF16Tensor(values)
    return BlockTensor(values, dtype, is_unsigned=is_unsigned)


# --- master weights


class RemainderTensor:
    """fp32 master weights as bf16 weights, which belong to the model, and int16 remainders: their
    low 16 bits.

    The weight is the high half, plus one in its last place if the remainder is negative: master
    weights rounded to nearest, with ties away from zero. Rounding ties to even could not be
    decoded.
    """

    def __init__(self, weight: Tensor) -> None:
        """`weight`: bf16, contiguous; remainders begin at zero."""
        assert weight.dtype == torch.bfloat16, weight.dtype
        self.numel = weight.numel()
        self._high = weight.detach().view(-1).view(torch.int16)
        self._low = torch.zeros(self.numel, dtype=torch.int16, device=weight.device)
        self.tensors: Mapping[str, Tensor] = {
            "weight": weight.detach().view(-1),
            "remainder": self._low,
        }

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the master weights [start, stop) in fp32."""
        return join_remainders(self._high[start:stop], self._low[start:stop])

    def encode(self, values: Tensor, start: int) -> None:
        """Store master weights; this writes the weights too."""
        high, low = split_remainders(values.reshape(-1))
        self._high[start : start + high.numel()].copy_(high)
        self._low[start : start + low.numel()].copy_(low)


def split_remainders(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bits of bf16 weights and the remainders of fp32 values, both int16.

    >>> high, low = split_remainders(torch.tensor([0.1, 1.00390625]))
    >>> high.view(torch.bfloat16).tolist(), low.tolist()
    ([0.10009765625, 1.0078125], [-13107, -32768])
    """
    bits = values.contiguous().view(torch.int32)
    is_nan = values.isnan()
    low = bits.to(torch.int16).masked_fill_(is_nan, 0)
    high = ((bits + 0x8000) >> 16).to(torch.int16).masked_fill_(is_nan, _NAN_HIGH)
    return high, low


def join_remainders(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 values of `split_remainders`."""
    upper = high.int() - (low < 0).int()
    return ((upper << 16) | (low.int() & 0xFFFF)).view(torch.float32)


UPDATE = "stochastic rounding"
"""Purpose of the rounding of the optimizer's update; part of a random key."""

BuildRoundingKey = Callable[[str], int]
"""Returns the key of a rounding in the current update from its purpose."""


class StochasticWeights:
    """Weights without master weights: updates are rounded stochastically to bf16.

    The random bits depend on a key of seed, parameter name and step, and on the element of the
    whole parameter, so that they are equal under every layout and after a resume. Several roundings
    of one step have separate bits: with the same ones their errors would be correlated, and their
    mean not zero.
    """

    def __init__(self, weight: Tensor, shard: Shard, build_key: BuildRoundingKey) -> None:
        """`build_key`: returns the key of the current update for a purpose."""
        assert weight.dtype == torch.bfloat16, weight.dtype
        self.numel = weight.numel()
        self._weight, self._shard, self._build_key = weight.detach().view(-1), shard, build_key
        self.tensors: Mapping[str, Tensor] = {"weight": self._weight}

    def decode(self, start: int, stop: int) -> Tensor:
        """Return the weights [start, stop) in fp32."""
        return self._weight[start:stop].float()

    def encode(self, values: Tensor, start: int, purpose: str = UPDATE) -> None:
        """Round values to weights stochastically."""
        stop = start + values.numel()
        elements = list_global_elements(self._shard, start, stop, values.device)
        rounded = round_stochastically(values.reshape(-1), elements, self._build_key(purpose))
        self._weight[start:stop].copy_(rounded)


def list_global_elements(shard: Shard, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the row-major indices in the whole parameter of elements [start, stop) of a slice:
    int64."""
    first = 0 if shard.flat is None else shard.flat[0]
    inside = torch.arange(first + start, first + stop, device=device)
    if shard.box_shape == shard.shape:
        return inside
    indices = torch.zeros_like(inside)
    stride = 1
    for (begin, end), size in zip(reversed(shard.box), reversed(shard.shape), strict=True):
        indices += (inside % (end - begin) + begin) * stride
        inside = inside // (end - begin)
        stride *= size
    return indices


def round_stochastically(values: Tensor, elements: Tensor, key: int) -> Tensor:
    """Round fp32 values to bf16, up in magnitude with the probability of the part that rounding
    removes.

    elements: int64 indices, which together with `key` give the random bits. NaN and infinite values
    stay as they are.
    """
    bits = values.contiguous().view(torch.int32)
    noise = (hash_numbers(elements, key) & 0xFFFF).to(torch.int32)
    rounded = torch.where(values.isfinite(), bits + noise, bits) >> 16
    high = rounded.to(torch.int16).masked_fill_(values.isnan(), _NAN_HIGH)
    return high.view(torch.bfloat16)

"""Dropout with hashed masks: no random generator, and only the token numbers are saved for
backward.

Whether a feature is dropped depends on a key (seed, place, layer), the token's number in the run,
and the feature. So a mask is reproducible on any rank of any layout, in backward and after a
resume. Source of dropout: Srivastava et al. 2014, JMLR 15(56). Of the mixers: Steele et al. 2014,
"Fast splittable pseudorandom number generators", section 2 (64 bits), and Appleby's MurmurHash3 (32
bits).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megalith.config.kernels import BackendName
from megalith.kernels import cpu_threads
from megalith.kernels.attention.scores import WeightDropout
from megalith.kernels.backend import select_backend
from megalith.kernels.linear import Context
from megalith.plan.context import KeySpans, KeyTile
from megalith.plan.keys import key as integer_key


def key_of(seed: int, purpose: str, name: str, *indices: int) -> int:
    """Return `plan.keys.key` of the arguments, as a constant for torch.compile."""
    return integer_key(seed, purpose, name, *indices)


# What torch.compiler.assume_constant_result sets, without its import of torch._dynamo, which takes
# as long as that of all of Megalith (measured: 1.2 s, one CPU core, torch 2.13).
key_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # read by torch._dynamo

STEP_64, MIX_64 = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
STEP_32, MIX_32 = 0x9E3779B9, (0x85EBCA6B, 0xC2B2AE35)


class DropoutKey(NamedTuple):
    """Key of dropout masks: the run's seed and the number of each token."""

    seed: int
    """Seed of the run."""

    numbers: Tensor
    """int64 [t]: number of each token in the run: (row, counted from the run's first) * seq_len +
    position in the row; -1 for padding. A number occurs once in a run, so it also identifies the
    step."""

    keys: Tensor | None = None
    """int64 [t_kv]: numbers of the keys, if these are other tokens than the queries: under context
    parallelism all tokens of the microbatch, in natural order."""

    @property
    def key_numbers(self) -> Tensor:
        """Numbers of the keys: int64 [t_kv]."""
        return self.numbers if self.keys is None else self.keys


def dropout(
    x: Tensor,
    p: float,
    key: int,
    numbers: Tensor,
    *,
    first_feature: int = 0,
    kernel: BackendName = "auto",
) -> Tensor:
    """Set each feature to 0 with probability p and divide the others by 1 - p: x [t, h], numbers
    int64 [t] -> [t, h].

    key: 63 bits for this place and layer (`plan/keys.py`); numbers: the number of each token in the
    run; first_feature: index of the first column among all features. Backward recomputes the mask.
    """
    assert 0.0 <= p < 1.0
    if p == 0.0:
        return x
    if kernel == "reference" or torch.compiler.is_compiling():
        return reference_dropout(x, p, key, numbers, first_feature)
    loops = select_backend(kernel, x, op="dropout", triton=False) == "numba"
    y: Tensor = DropoutFunction.apply(x, p, key, numbers, first_feature, loops)  # type: ignore[no-untyped-call]  # torch's own
    return y


def reference_dropout(
    x: Tensor, p: float, key: int, numbers: Tensor, first_feature: int = 0
) -> Tensor:
    """Reference implementation of `dropout` in plain PyTorch operations."""
    return (x * (1 / (1 - p))).masked_fill(
        dropped_features(p, key, numbers, first_feature, x.shape[-1]), 0.0
    )


def dropped_features(
    p: float, key: int, numbers: Tensor, first_feature: int, features: int
) -> Tensor:
    """Return the dropout mask of features: numbers int64 [t] -> bool [t, features], True where
    dropped."""
    places = torch.arange(first_feature, first_feature + features, device=numbers.device)
    hashes = _mix(hash_numbers(numbers, key).unsqueeze(-1), (places * STEP_32).to(torch.int32))
    return hashes < _threshold(p)


def dropped_weights(p: float, key: int, queries: Tensor, keys: Tensor, heads: range) -> Tensor:
    """Return the dropout mask of attention weights: token numbers int64 [t_q] and [t_k] -> bool
    [heads, t_q, t_k], True where dropped.

    heads: indices of these query heads in the model.
    """
    rows = torch.stack([hash_numbers(queries, key + head) for head in heads])
    return _mix(rows.unsqueeze(-1), hash_numbers(keys, ~key).to(torch.int32)) < _threshold(p)


@dataclass(frozen=True, slots=True)
class DroppedWeights:
    """Attention dropout between some queries and some keys."""

    dropout: WeightDropout
    queries: Tensor
    """int64 [t_q]: number of each query's token in the run."""

    keys: Tensor
    """int64 [t_k]: number of each key's token in the run."""

    def factors(self, spans: KeySpans, tile: KeyTile, heads: slice, q: Tensor) -> Tensor:
        """Return the factors of a tile's attention weights, [heads of the tile, shared * rows,
        keys].

        q [heads, shared, length, d] in the layout of kernels/attention/split_kv.py: key/value heads
        of row after row, and the query heads that share each.
        """
        head_factors, num_kv_heads, shared = [], q.shape[0] // spans.repeats, q.shape[1]
        for head in range(*heads.indices(q.shape[0])):
            first = self.dropout.first_head + head % num_kv_heads * shared
            queries, keys = self._row(head // num_kv_heads, spans.repeats)
            queries, keys = queries[tile.start : tile.stop], keys[tile.first : tile.last]
            head_factors.append(
                weight_factors(
                    self.dropout, queries, keys, range(first, first + shared), q.dtype
                ).flatten(0, 1)
            )
        return torch.stack(head_factors)

    def of_row(self, row: int, rows: int, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the factors of all pairs of one of `rows` equal rows, [heads, queries, keys]."""
        first = self.dropout.first_head
        return weight_factors(
            self.dropout, *self._row(row, rows), range(first, first + heads), dtype
        )

    def _row(self, row: int, rows: int) -> tuple[Tensor, Tensor]:
        return self.queries.view(rows, -1)[row], self.keys.view(rows, -1)[row]


def weight_factors(
    dropout: WeightDropout, queries: Tensor, keys: Tensor, heads: range, dtype: torch.dtype
) -> Tensor:
    """Return the factors of attention weights, 0 where dropped, else 1 / (1 - p), in fp32 or
    float64: numbers [t_q], [t_k] -> [heads, t_q, t_k]."""
    kept = ~dropped_weights(dropout.p, dropout.key, queries, keys, heads)
    return kept.to(torch.promote_types(dtype, torch.float32)).div_(1 - dropout.p)


class DropoutFunction(Function):
    """Autograd function of `dropout`; backward applies the same function to dy."""

    reference = staticmethod(
        lambda x, p, key, numbers, first, loops: reference_dropout(x, p, key, numbers, first)
    )

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        p: float,
        key: int,
        numbers: Tensor,
        first_feature: int,
        loops: bool,
    ) -> Tensor:
        """x [t, h] -> [t, h]."""
        ctx.save_for_backward(numbers)
        ctx.arguments, ctx.function = (p, key, first_feature), _loop if loops else _torch
        y: Tensor = ctx.function(x, numbers, *ctx.arguments)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        """dy [t, h] -> dx [t, h]."""
        return ctx.function(dy, *ctx.saved_tensors, *ctx.arguments), None, None, None, None, None


def _torch(x: Tensor, numbers: Tensor, p: float, key: int, first_feature: int) -> Tensor:
    dropped = dropped_features(p, key, numbers, first_feature, x.shape[-1])
    return torch.mul(x, 1 / (1 - p)).masked_fill_(dropped, 0.0)


def _loop(x: Tensor, numbers: Tensor, p: float, key: int, first_feature: int) -> Tensor:
    x = x.contiguous()
    y, hashes = torch.empty_like(x), hash_numbers(numbers, key)
    cpu_threads.run(
        "dropout",
        x.dtype,
        *x.shape,
        first_feature,
        _threshold(p),
        1 / (1 - p),
        hashes,
        x,
        y,
        elements=x.numel(),
    )
    return y


def hashed_uniform(key: int, numbers: Tensor, features: int) -> Tensor:
    """Draw uniform numbers from -1 to 1 that depend on key, token and feature only: numbers int64
    [t] -> fp32 [t, features]."""
    places = torch.arange(features, device=numbers.device)
    return (
        _mix(hash_numbers(numbers, key).unsqueeze(-1), (places * STEP_32).to(torch.int32)).float()
        / 2**31
    )


def _threshold(p: float) -> int:
    """Return the 32-bit signed integer below which a share p of all values lies."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def hash_numbers(numbers: Tensor, key: int) -> Tensor:
    """Return a 64-bit hash of each of numbers [t]: int64 [t]. Integer overflow wraps, as the mixer
    requires."""
    z = numbers * _signed(STEP_64, 64) + _signed(key, 64)
    for shift, factor in zip((30, 27), MIX_64, strict=True):
        z = (z ^ _shifted(z, shift, 64)) * _signed(factor, 64)
    return z ^ _shifted(z, 31, 64)


def _mix(hashes: Tensor, places: Tensor) -> Tensor:
    """Return a 32-bit hash of each feature of each row: hashes int64 [..., 1], places int32 [h] ->
    int32 [..., h].

    The low half of the row's hash is the start of the sequence; the high half is mixed in between
    the two rounds, so that rows with close starts differ.
    """
    low, high = hashes.to(torch.int32), (hashes >> 32).to(torch.int32)
    z = low + places
    z = z.bitwise_xor_(_shifted(z, 16, 32)).mul_(_signed(MIX_32[0], 32)).bitwise_xor_(high)
    z = z.bitwise_xor_(_shifted(z, 15, 32)).mul_(_signed(MIX_32[1], 32))
    return z.bitwise_xor_(_shifted(z, 16, 32))


def _shifted(z: Tensor, by: int, bits: int) -> Tensor:
    """Logical right shift of z."""
    return (z >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(value: int, bits: int) -> int:
    """Return the signed integer with the same bits."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value

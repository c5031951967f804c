"""What a decoder costs: its parameters and its floating-point operations, as closed formulas; memory is plan/memory.py.

In the formulas: h hidden_size, L layers, n heads, g key/value heads, d head size, f ffn_hidden_size, v vocabulary.
"""

from dataclasses import dataclass

from megalith.config.model import ModelConfig
from megalith.plan.shards import split_evenly, split_heads


def num_parameters(config: ModelConfig) -> int:
    """Weights of the whole model as they are stored, padded vocabulary rows included.

    v·h (twice if the head is not tied) + L·(h·(n + 2g)·d + n·d·h + 3·h·f + 2·h) + h, and biases where there are any.
    """
    return num_parameters_per_rank(config, tp=1)


def num_parameters_per_rank(config: ModelConfig, *, tp: int) -> int:
    """Weights on the rank that holds most: matrices are split over tp, norms and output biases are whole on each."""
    h, d, part = config.hidden_size, config.head_size(), _largest_part(config, tp)
    qkv = (part.heads + 2 * part.kv_heads) * d
    attention = h * qkv + part.heads * d * h + config.qkv_bias * qkv + config.output_bias * h
    mlp = 3 * h * part.ffn + config.mlp_bias * (2 * part.ffn + h)
    tables = 1 if config.tied_embeddings else 2
    return tables * part.vocab * h + config.num_layers * (attention + mlp + 2 * h) + h


@dataclass(frozen=True, slots=True)
class _Part:
    """The largest share that any tensor-parallel rank has of what is split."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int


def _largest_part(config: ModelConfig, tp: int) -> _Part:
    heads = split_heads(config.num_heads, config.num_kv_heads, tp)
    return _Part(
        heads=max(heads.queries),
        kv_heads=max(heads.keys),
        ffn=max(split_evenly(config.ffn_hidden_size, tp)),
        vocab=max(split_evenly(config.padded_vocab_size(), tp)),
    )


def step_flops(config: ModelConfig, *, tokens: int, squared_lengths: int) -> int:
    """Useful floating-point operations of forward and backward for some documents; recomputation does not count.

    tokens: sum of the documents' lengths; squared_lengths: sum of their squares. A multiply-add is two operations and
    backward costs twice the forward, hence the sixes: 6·tokens·(L·(h·(n + 2g)·d + n·d·h + 3·h·f) + h·v) for the weight
    matrices and 6·squared_lengths·L·n·d for attention, of which causality leaves half.
    Source: Narayanan et al. 2021, arXiv:2104.04473, appendix; there attention is counted whole.
    """
    h, n, g, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_size()
    layer = h * (n + 2 * g) * d + n * d * h + 3 * h * config.ffn_hidden_size
    matrices = config.num_layers * layer + h * config.vocab_size  # padded rows take no part in the head's product
    return 6 * tokens * matrices + 6 * squared_lengths * config.num_layers * n * d


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """`step_flops` of a row that is one document of `seq_len` tokens, divided by its tokens."""
    return step_flops(config, tokens=seq_len, squared_lengths=seq_len * seq_len) // seq_len


def tflops_per_device(flops: float, *, seconds: float, devices: int) -> float:
    """Rate of each device, in 10^12 useful operations per second, when all of them need `seconds` for `flops`."""
    return flops / (seconds * devices * 1e12)


def model_flops_utilisation(flops: float, *, seconds: float, devices: int, peak_tflops: float) -> float:
    """MFU: the part of the devices' peak rate that went into useful operations.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.
    """
    return tflops_per_device(flops, seconds=seconds, devices=devices) / peak_tflops


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes per parameter or activation of one number format."""

    value: int  # weights and activations
    sums: int  # gradients, each moment, and the statistics and logits that are summed over
    master: int


WIDTHS = {"fp32": _Widths(4, 4, 0), "bf16": _Widths(2, 4, 4), "fp16": _Widths(2, 4, 4), "fp64": _Widths(8, 8, 0)}


CHUNK_LOGITS = 1 << 21
"""Logits that the head of one rank forms at once: 8 MiB in fp32, which stay in cache."""

CHUNK_TOKENS = 512
"""Tokens that it takes at once at least, because each chunk passes once over dw, which is as large as the head.

Measured at vocabularies of 4,096 and 32,000 on one core: within 2 % of the best chunk, and 11 to 31 % faster than 64
tokens.
"""


def loss_chunk(vocab_size: int, *, ranks: int) -> int:
    """Tokens whose logits the head forms at once, its vocabulary split over `ranks`; the same number on all of them."""
    return max(CHUNK_TOKENS, CHUNK_LOGITS * ranks // vocab_size)

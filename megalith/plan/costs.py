"""What a decoder costs: its parameters, its floating-point operations and its memory on one rank, as closed formulas.

In the formulas: h hidden_size, L layers, n heads, g key/value heads, d head size, f ffn_hidden_size, v vocabulary,
s tokens per row, t tokens of a microbatch.
"""

from dataclasses import dataclass
from typing import Literal

from megalith.config.model import ModelConfig
from megalith.plan.shards import split_evenly, split_heads

Dtype = Literal["fp32", "bf16", "fp64"]


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
class RankMemory:
    """What one rank holds at the height of a step, in bytes; an estimate, without the allocator's and library's own."""

    weights: int
    gradients: int
    master: int
    """fp32 copies of 16-bit weights."""

    moments: int
    """AdamW's two running means."""

    activations: int
    """Kept by the layers from forward to backward."""

    loss: int
    """Kept by the output head: the gradients it forms in the forward pass, and one chunk of logits."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.master + self.moments + self.activations + self.loss


@dataclass(frozen=True, slots=True)
class _Widths:
    """Bytes per parameter or activation of one number format."""

    value: int  # weights and activations
    sums: int  # gradients, and the statistics and logits that are summed over
    master: int
    moments: int


WIDTHS = {"fp32": _Widths(4, 4, 0, 8), "bf16": _Widths(2, 4, 4, 8), "fp64": _Widths(8, 8, 0, 16)}


def memory_per_rank(
    config: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    dtype: Dtype = "fp32",
    tp: int = 1,
    sp: bool = False,
    optimizer_shards: int = 1,
) -> RankMemory:
    """Memory of training with AdamW on the rank that holds most; plain attention memory, no recomputation.

    optimizer_shards: ranks that each keep an equal part of master weights and moments, dp of them under ZeRO-1
    (Rajbhandari et al. 2019, arXiv:1910.02054). Per parameter: 16 bytes in fp32; 18 in bf16, or 6 + 12 / shards.
    """
    parameters, width = num_parameters_per_rank(config, tp=tp), WIDTHS[dtype]
    owned = -(-parameters // optimizer_shards)
    tokens = micro_batch_size * seq_len
    return RankMemory(
        weights=width.value * parameters,
        gradients=width.sums * parameters,
        master=width.master * owned,
        moments=width.moments * owned,
        activations=tokens * activation_bytes_per_token(config, dtype=dtype, tp=tp, sp=sp),
        loss=_loss_bytes(config, tokens=tokens, dtype=dtype, tp=tp),
    )


def activation_bytes_per_token(config: ModelConfig, *, dtype: Dtype, tp: int = 1, sp: bool = False) -> int:
    """What the layers keep of each token until its backward, on the rank that holds most.

    With e bytes per value, and n, g, f of this rank, a layer keeps

    - the two norms' inputs, 2·h·e, and one statistic for each: divided by tp under sp;
    - the same after the norm, as the inputs of the query/key/value and of the first MLP product: 2·h·e, always whole,
      because under sp it is the gathered input that stays;
    - queries, keys and values: (n + 2g)·d·e, and again (n + g)·d·e, because rotated queries and keys are new while the
      values keep the product they are part of alive;
    - attention's output n·d·e with the log-sum-exp of each head's scores, n (torch's own kernel; on CPUs rows of up to
      512 tokens may keep their probabilities instead, about n·s/2·e, see kernels/attention.py);
    - gate and up, 2·f·e, and their product, f·e.

    The last norm keeps its input; its output is the head's. Once for all layers: the token's number (8 bytes) and the
    cosines and sines of its position, d·e. Source of the method: Korthikanti et al. 2022, arXiv:2205.05198, section 4.
    """
    h, d, part, width = config.hidden_size, config.head_size(), _largest_part(config, tp), WIDTHS[dtype]
    n, g, f = part.heads, part.kv_heads, part.ffn
    norm_input = -(-(h * width.value + width.sums) // (tp if sp else 1))
    heads = ((n + 2 * g) + (n + g) + n) * d * width.value + n * width.sums
    layer = 2 * norm_input + 2 * h * width.value + heads + 3 * f * width.value
    return config.num_layers * layer + norm_input + 8 + d * width.value


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


def _loss_bytes(config: ModelConfig, *, tokens: int, dtype: Dtype, tp: int) -> int:
    """The head's input [t, h] and its gradient, the weight's gradient [v, h], and a chunk of logits, raw and wide."""
    h, rows, width = config.hidden_size, _largest_part(config, tp).vocab, WIDTHS[dtype]
    chunk = min(tokens, loss_chunk(config.vocab_size, ranks=tp)) * rows
    return 2 * tokens * h * width.value + rows * h * width.sums + chunk * (width.value + width.sums)

"""What a decoder costs: its parameters and its floating-point operations, as closed formulas;
memory is plan/memory.py.

In the formulas: h hidden_size, L layers, n heads, g key/value heads, d head size, f
ffn_hidden_size, v vocabulary.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.plan.parameters import (
    HeldParameter,
    bias_table,
    distinct_ranks,
    held_parameters,
    layer_parameters,
    memory_norm,
)


def num_parameters(config: ModelConfig) -> int:
    """Weights of the whole model as they are stored, padded vocabulary rows included; published
    numbers have none.

    By default v·h (twice if the head is not tied) + L·(h·(n + 2g)·d + n·d·h + 3·h·f + 2·h) + h;
    plan/parameters.py has the terms of everything else.
    """
    return num_parameters_per_rank(config, tp=1)


def num_parameters_per_rank(config: ModelConfig, *, tp: int) -> int:
    """Weights on the rank that holds most: matrices are split over tp, norms and output biases are
    whole on each."""
    return max(_held(config, tp, rank) for rank in distinct_ranks(config, tp=tp))


def _held(config: ModelConfig, tp: int, rank: int) -> int:
    ends = held_parameters(config, tp=tp, tp_rank=rank, layers=(), embedding=True, loss=True)
    numel = sum(one.numel for one in ends if one.counts)
    if config.positions == "relative" and not config.mtp.num_layers:  # else it is among the ends
        numel += bias_table(config, tp=tp, tp_rank=rank).numel
    numel += sum(one.numel for one in memory_norm(config))
    for first, count in _kinds(config).items():
        held = layer_parameters(config, first, tp=tp, tp_rank=rank)
        numel += count * sum(one.numel for one in held if one.counts)
    return numel


def active_parameters(config: ModelConfig) -> int:
    """Of all parameters those that one token meets: of E experts K, and everything else."""
    moe, last = config.moe, config.num_layers - 1
    if moe is None:
        return num_parameters(config)
    layers = [*range(config.num_layers), *[last] * config.mtp.num_layers]
    routed = sum(
        one.numel
        for layer in layers
        for one in layer_parameters(config, layer)
        if one.grid == "expert"
    )
    return num_parameters(config) - routed // moe.num_experts * (moe.num_experts - moe.top_k)


def _kinds(config: ModelConfig) -> dict[int, int]:
    """How many layers have the same parameters, by the first of them."""
    firsts: dict[tuple[ModelConfig, bool, bool], int] = {}
    counts: Counter[int] = Counter()
    for layer in range(config.num_layers):
        kind = config.at(layer), config.has_experts(layer), config.uses_cross_layer_source(layer)
        counts[firsts.setdefault(kind, layer)] += 1
    return counts


# --- operations


def step_flops(
    config: ModelConfig, *, tokens: int, squared_lengths: int, windowed: int | None = None
) -> int:
    """Useful floating-point operations of forward and backward for some documents; recomputation
    does not count.

    tokens: sum of the documents' lengths; squared_lengths: sum of their squares; windowed: sum of
    `pairs_in_window` over them, of use to models with windows only; unset: as for documents that
    are all equally long. A multiply-add is two operations and backward costs twice the forward,
    hence the sixes: 6·tokens for each element of a matrix, which by default are L·(h·(n + 2g)·d +
    n·d·h + 3·h·f) + h·v, and 6·squared_lengths·L·n·d for attention, of which causality leaves half
    (12 where it looks both ways). Of experts a token meets K: K·3·h·f in place of 3·h·f, and E·h of
    the router. Each depth of multi-token prediction adds a layer as the last one, 2·h·h, and the
    head once more. Norms, biases, positions and activations are not counted. All of it is trained
    here: a frozen matrix has no gradient of its own, and costs 4·tokens, or 2·tokens where nothing
    before it is trained (plan/adapters.py). Source: Narayanan et al. 2021, arXiv:2104.04473,
    appendix; there attention is counted whole.
    """
    seen = _DocumentCounts(tokens, squared_lengths, windowed)
    layers = sum(_layer_flops(config, layer, seen) for layer in range(config.num_layers))
    return layers + _mtp_flops(config, seen) + head_flops(config, tokens)


def layer_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """The same of one layer, numbered over all stages."""
    return _layer_flops(config, layer, _DocumentCounts(tokens, squared_lengths, windowed))


def head_flops(config: ModelConfig, tokens: int) -> int:
    """The same of the product with the vocabulary, in which padded rows take no part."""
    return 6 * tokens * config.hidden_size * config.vocab_size


def attention_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """The same of one layer's scores and their products with values: 6 · pairs · n · (d + d_v);
    once more, without a window, in a layer that looks at the memory."""
    return _core_flops(config, layer, _DocumentCounts(tokens, squared_lengths, windowed))


def latent_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """The same of a latent attention from its short vectors up to what heads find."""
    pairs = attention_flops(
        config, layer, tokens=tokens, squared_lengths=squared_lengths, windowed=windowed
    )
    queries = "q" if config.mla is None or config.mla.q_rank is None else "q_up"
    up = sum(_matrices(config, layer, f"attention.{word}") for word in (queries, "kv_up"))
    return 6 * tokens * up + pairs


def mlp_flops(config: ModelConfig, layer: int, tokens: int) -> int:
    """The same of one layer's MLP, or of its router, the experts that a token goes to, and those
    for all tokens."""
    return 6 * tokens * (_matrices(config, layer, "mlp.") + _matrices(config, layer, "moe."))


def shared_flops(config: ModelConfig, layer: int, tokens: int) -> int:
    """The same of the experts for all tokens alone."""
    return 6 * tokens * _matrices(config, layer, "moe.shared")


def pairs_in_window(length: int, window: int, *, chunked: bool = False) -> int:
    """Twice the (query, key) pairs of a document in which each token sees at most `window` tokens,
    itself included; or, where it is `chunked`, those before it in its own run of so many.

    Twice, so that it compares with length², which counts a token's own pair half; it is never more.
    Where tokens look both ways there are twice as many.

    >>> [pairs_in_window(5, window) for window in (1, 2, 4, 5, 9)]
    [10, 18, 25, 25, 25]
    >>> [pairs_in_window(5, window, chunked=True) for window in (1, 2, 4, 5, 9)]
    [5, 9, 17, 25, 25]
    """
    inside = min(window, length)
    if chunked:
        return length // inside * inside**2 + (length % inside) ** 2
    return min(length**2, inside * (inside + 1) + 2 * inside * (length - inside))


def pairs_seen(length: int, kind: AttentionConfig) -> int:
    """The same for a layer with the window; where it reaches further to one side, the mean of both
    sides."""
    if kind.window is None:
        return length**2
    before = pairs_in_window(length, kind.window, chunked=kind.chunked)
    if kind.causal or kind.window_right is None:
        return before
    return (before + pairs_in_window(length, kind.window_right + 1)) // 2


class _DocumentCounts(NamedTuple):
    """Some documents."""

    tokens: int
    squared_lengths: int
    windowed: int | None

    def doubled_pairs(self, kind: AttentionConfig | None) -> int:
        """Of queries and keys, twice; None: of a layer without a window."""
        if kind is None or self.tokens == 0 or self.squared_lengths == 0:
            return self.squared_lengths
        if self.windowed is not None:
            return self.windowed
        typical = max(1, round(self.squared_lengths / self.tokens))
        pairs = pairs_seen(typical, kind)
        return min(self.squared_lengths, round(pairs * self.tokens / typical))


def _layer_flops(config: ModelConfig, layer: int, seen: _DocumentCounts) -> int:
    return 6 * seen.tokens * _matrices(config, layer) + _core_flops(config, layer, seen)


def _mtp_flops(config: ModelConfig, seen: _DocumentCounts) -> int:
    """What multi-token prediction adds."""
    h, last = config.hidden_size, config.num_layers - 1
    own = 6 * seen.tokens * 2 * h * h + head_flops(config, seen.tokens)
    return config.mtp.num_layers * (own + _layer_flops(config, last, seen))


def _matrices(config: ModelConfig, layer: int, inside: str = "") -> int:
    """Elements of all matrices of a layer that a token is multiplied by, or of those in one part of
    it."""
    held, name = layer_parameters(config, layer), f"layers.{layer}.{inside}"
    return sum(met(config, one) for one in held if one.matrix and one.name.startswith(name))


def met(config: ModelConfig, one: HeldParameter) -> int:
    """Elements of a whole matrix that a token is multiplied by: of experts, those that it goes
    to."""
    if config.moe is None or one.grid == "dense":
        return one.numel
    return one.numel // config.moe.num_experts * config.moe.top_k


def _core_flops(config: ModelConfig, layer: int, seen: _DocumentCounts) -> int:
    own = seen.doubled_pairs(config.attention if config.has_window(layer) else None)
    pairs = own * (config.attention_part(layer) == "full") + seen.doubled_pairs(
        None
    ) * config.uses_cross_layer_source(layer)
    pairs = pairs if config.attention.causal else 2 * pairs
    return 3 * pairs * config.num_heads * (config.key_size() + config.value_size())


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """`step_flops` of a row that is one document of `seq_len` tokens, divided by its tokens."""
    return step_flops(config, tokens=seq_len, squared_lengths=seq_len * seq_len) // seq_len


def tflops_per_device(flops: float, *, seconds: float, devices: int) -> float:
    """Rate of each device, in 10^12 useful operations per second, when all of them need `seconds`
    for `flops`."""
    return flops / (seconds * devices * 1e12)


def model_flops_utilization(
    flops: float, *, seconds: float, devices: int, peak_tflops: float
) -> float:
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


WIDTHS = {
    "fp32": _Widths(4, 4, 0),
    "bf16": _Widths(2, 4, 4),
    "fp16": _Widths(2, 4, 4),
    "fp64": _Widths(8, 8, 0),
}


CHUNK_LOGITS = 1 << 21
"""Logits that the head of one rank forms at once: 8 MiB in fp32, which stay in cache."""

CHUNK_TOKENS = 512
"""PackedSeqParams that it takes at once at least, because each chunk passes once over dw, which is
as large as the head.

Measured at vocabularies of 4,096 and 32,000 on one core: within 2 % of the best chunk, and 11 to 31
% faster than 64 tokens.
"""


def loss_chunk(vocab_size: int, *, ranks: int) -> int:
    """PackedSeqParams whose logits the head forms at once, its vocabulary split over `ranks`;
    the same number on all of them."""
    return max(CHUNK_TOKENS, CHUNK_LOGITS * ranks // vocab_size)


def tokens_of_loss(run: TrainRun) -> int:
    """PackedSeqParams whose logits a run has at a time."""
    chunk = run.train.loss_chunk
    return loss_chunk(run.model.vocab_size, ranks=run.parallel.tp) if chunk is None else chunk

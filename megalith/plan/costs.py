"""Parameter counts and FLOPs of a decoder, as closed formulas; memory is in estimate/memory.py.

In the formulas: h hidden_size, L layers, n heads, g KV heads, d head dim, f ffn_hidden_size, v
vocabulary.
"""

from functools import cache

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.plan.layers import branches
from megalith.plan.layers.attention import source_norm_parameters
from megalith.plan.layers.base import DocumentCounts, HeldParameter, LayerRank
from megalith.plan.layers.embedding import bias_table, head_flops, mtp_projection_flops
from megalith.plan.parameters import (
    count_equal_layers,
    distinct_ranks,
    held_parameters,
    layer_parameters,
)
from megalith.plan.stages import single_stage


def num_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the whole model, padded vocabulary rows included.

    By default v·h (twice if the head is not tied) + L·(h·(n + 2g)·d + n·d·h + 3·h·f + 2·h) + h;
    plan/parameters.py has the terms of other settings.
    """
    return num_parameters_per_rank(config, tp=1)


def num_parameters_per_rank(config: ModelConfig, *, tp: int) -> int:
    """Return the parameters of the largest tensor-parallel rank: matrices are split over tp, norms
    and output biases are replicated."""
    return max(_held(config, tp, rank) for rank in distinct_ranks(config, tp=tp))


def _held(config: ModelConfig, tp: int, rank: int) -> int:
    ends = held_parameters(config, single_stage(0, config.mtp.num_layers), LayerRank(tp, rank))
    numel = sum(parameter.numel for parameter in ends if parameter.counts)
    if config.positions == "relative" and not config.mtp.num_layers:
        # With MTP layers, `ends` contains the table of relative position biases.
        numel += bias_table(config, LayerRank(tp, rank)).numel
    numel += sum(parameter.numel for parameter in source_norm_parameters(config))
    for first, count in count_equal_layers(config).items():
        held = layer_parameters(config, first, tp=tp, tp_rank=rank)
        numel += count * sum(parameter.numel for parameter in held if parameter.counts)
    return numel


def active_parameters(config: ModelConfig) -> int:
    """Return the number of active parameters per token: K of E experts, and everything else."""
    moe, last = config.moe, config.num_layers - 1
    if moe is None:
        return num_parameters(config)
    layers = [*range(config.num_layers), *[last] * config.mtp.num_layers]
    routed = sum(
        parameter.numel
        for layer in layers
        for parameter in layer_parameters(config, layer)
        if parameter.grid == "expert"
    )
    return num_parameters(config) - routed // moe.num_experts * (moe.num_experts - moe.top_k)


# --- operations


def step_flops(
    config: ModelConfig, *, tokens: int, squared_lengths: int, windowed: int | None = None
) -> int:
    """Return the model FLOPs of forward and backward for some documents, without recomputation.

    tokens: sum of the documents' lengths; squared_lengths: sum of their squares; windowed: sum of
    `pairs_in_window` over them, for models with windows only; unset: as if all documents had equal
    lengths. A multiply-add is two operations and backward costs twice the forward, hence the sixes:
    6·tokens for each matrix element, by default L·(h·(n + 2g)·d + n·d·h + 3·h·f) + h·v, and
    6·squared_lengths·L·n·d for attention, half of the full matrix because of the causal mask (12
    without). With experts: K·3·h·f in place of 3·h·f, and E·h of the router. Each MTP layer adds a
    layer like the last one, 2·h·h, and the head once more. Norms, biases, positions and activations
    are not counted. All parameters count as trained: a frozen matrix has no weight gradient and
    costs 4·tokens, or 2·tokens if no parameter before it is trained (plan/frozen.py). Source:
    Narayanan et al. 2021, arXiv:2104.04473, appendix; there attention is counted without the causal
    mask.
    """
    counts = DocumentCounts(tokens, squared_lengths, windowed)
    layers = sum(_layer_flops(config, layer, counts) for layer in range(config.num_layers))
    return layers + _mtp_flops(config, counts) + head_flops(config, tokens)


def layer_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the model FLOPs of one layer, by its global number."""
    return _layer_flops(config, layer, DocumentCounts(tokens, squared_lengths, windowed))


def attention_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the model FLOPs of a layer's core attention, with that of cross-layer attention."""
    return core_flops(config, layer, DocumentCounts(tokens, squared_lengths, windowed))


def latent_flops(
    config: ModelConfig,
    layer: int,
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the model FLOPs of latent attention from its compressed vectors to the heads'
    outputs."""
    pairs = attention_flops(
        config, layer, tokens=tokens, squared_lengths=squared_lengths, windowed=windowed
    )
    queries = "q" if config.mla is None or config.mla.q_rank is None else "q_up"
    up = sum(
        _active_matrix_elements(config, layer, f"attention.{word}") for word in (queries, "kv_up")
    )
    return 6 * tokens * up + pairs


def mlp_flops(config: ModelConfig, layer: int, tokens: int) -> int:
    """Return the model FLOPs of a layer's MLP, or of its router, selected experts and shared
    experts."""
    return (
        6
        * tokens
        * (
            _active_matrix_elements(config, layer, "mlp.")
            + _active_matrix_elements(config, layer, "moe.")
        )
    )


def shared_flops(config: ModelConfig, layer: int, tokens: int) -> int:
    """Return the model FLOPs of a layer's shared experts."""
    return 6 * tokens * _active_matrix_elements(config, layer, "moe.shared")


def _layer_flops(config: ModelConfig, layer: int, counts: DocumentCounts) -> int:
    matrices = 6 * counts.tokens * _active_matrix_elements(config, layer)
    return matrices + core_flops(config, layer, counts)


def core_flops(config: ModelConfig, layer: int, counts: DocumentCounts) -> int:
    """Return the model FLOPs of a layer other than those of its matrices: of core attention."""
    return sum(branch.kind.core_flops(branch, counts) for branch in branches(config, layer))


def _mtp_flops(config: ModelConfig, counts: DocumentCounts) -> int:
    """Return the model FLOPs of the MTP layers."""
    own = mtp_projection_flops(config, counts.tokens) + head_flops(config, counts.tokens)
    last = _layer_flops(config, config.num_layers - 1, counts)
    return config.mtp.num_layers * (own + last)


def _active_matrix_elements(config: ModelConfig, layer: int, inside: str = "") -> int:
    """Return the active matrix elements per token of a layer, or of one part of it."""
    held, name = layer_parameters(config, layer), f"layers.{layer}.{inside}"
    return sum(
        active_numel(config, parameter)
        for parameter in held
        if parameter.matrix and parameter.name.startswith(name)
    )


def active_numel(config: ModelConfig, parameter: HeldParameter) -> int:
    """Return the matrix elements that a token is multiplied by: for experts, those of the selected
    ones."""
    if config.moe is None or parameter.grid == "dense":
        return parameter.numel
    return parameter.numel // config.moe.num_experts * config.moe.top_k


def flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """Return `step_flops` per token of one document of `seq_len` tokens."""
    return step_flops(config, tokens=seq_len, squared_lengths=seq_len * seq_len) // seq_len


def tflops_per_device(flops: float, *, seconds: float, devices: int) -> float:
    """Return the TFLOP/s of each device if all need `seconds` for `flops`."""
    return flops / (seconds * devices * 1e12)


def model_flops_utilization(
    flops: float, *, seconds: float, devices: int, peak_tflops: float
) -> float:
    """Return the model FLOPs utilization (MFU): model FLOP/s as a fraction of the devices' peak
    rate.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.
    """
    return tflops_per_device(flops, seconds=seconds, devices=devices) / peak_tflops


CHUNK_LOGITS = 1 << 21
"""Logits of one chunk of the head on one rank: 8 MiB in fp32, which fit in the cache."""

CHUNK_TOKENS = 512
"""Minimum number of tokens per chunk of the head, because each chunk reads and writes dw once,
which is as large as the head.

Measured at vocabularies of 4,096 and 32,000 on one core: within 2 % of the best chunk, and 11 to 31
% faster than 64 tokens.
"""


@cache
def loss_chunk(vocab_size: int, *, ranks: int) -> int:
    """Return the tokens per chunk of the head, with the vocabulary split over `ranks`; the same on
    all of them."""
    return max(CHUNK_TOKENS, CHUNK_LOGITS * ranks // vocab_size)


def loss_chunk_size(run: TrainRun) -> int:
    """Return the number of tokens whose logits a run computes at a time."""
    chunk = run.train.loss_chunk
    return loss_chunk(run.model.vocab_size, ranks=run.parallel.tp) if chunk is None else chunk

"""Gemma 1, 2 and 3 in some of their published sizes.

Source: Gemma Team 2024, arXiv:2403.08295; 2024, arXiv:2408.00118; 2025, arXiv:2503.19786. Learning
rates are ours: the first report gives none, and the later models up to 9B were distilled.
"""

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.recipes.small import pretraining, warmed_cosine

_FIVE_OF_SIX = (True, True, True, True, True, False)


def gemma_2b() -> TrainRun:
    """Gemma 2B: multi-query attention, tied embeddings (a fifth of the weights)."""
    model = _gemma(hidden=2048, layers=18, heads=8, kv_heads=1, ffn=16_384)
    return pretraining("gemma_2b", model, warmed_cosine(4e-4), seq_len=8192)


def gemma_7b() -> TrainRun:
    """Gemma 7B on 4 GPUs (tp 4): 16 heads of size 256, together larger than hidden_size."""
    model = _gemma(hidden=3072, layers=28, heads=16, kv_heads=16, ffn=24_576)
    parallel = ParallelConfig(tp=4, sp=True)
    return pretraining("gemma_7b", model, warmed_cosine(3e-4), seq_len=8192, parallel=parallel)


def gemma2_2b() -> TrainRun:
    """Gemma 2 2B: sliding window of 4096 tokens in every other layer, logit soft caps, norms
    before and after."""
    return pretraining(
        "gemma2_2b",
        _gemma2(hidden=2304, layers=26, heads=8, kv_heads=4, ffn=9216),
        warmed_cosine(4e-4),
    )


def gemma2_9b() -> TrainRun:
    """Gemma 2 9B on 4 GPUs (tp 4)."""
    model = _gemma2(hidden=3584, layers=42, heads=16, kv_heads=8, ffn=14_336)
    return pretraining(
        "gemma2_9b", model, warmed_cosine(3e-4), parallel=ParallelConfig(tp=4, sp=True)
    )


def gemma3_270m() -> TrainRun:
    """Gemma 3 270M: sliding window of 512 tokens in five of six layers; embeddings are more than
    half of the weights."""
    return pretraining("gemma3_270m", _gemma3(hidden=640, layers=18, ffn=2048), warmed_cosine(1e-3))


def gemma3_1b() -> TrainRun:
    """Gemma 3 1B."""
    return pretraining("gemma3_1b", _gemma3(hidden=1152, layers=26, ffn=6912), warmed_cosine(6e-4))


def _gemma(*, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=256_000,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        ffn_hidden_size=ffn,
        max_seq_len=8192,
        norm_eps=1e-6,
        zero_centered_gamma=True,
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        tied_embeddings=True,
    )


def _gemma2(*, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=256_000,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=256,
        ffn_hidden_size=ffn,
        max_seq_len=8192,
        norm_eps=1e-6,
        zero_centered_gamma=True,
        norm_placement="around",
        attention=AttentionConfig(softcap=50.0, window=4096, window_layers=(True, False)),
        logit_softcap=30.0,
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        tied_embeddings=True,
    )


def _gemma3(*, hidden: int, layers: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=262_144,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        ffn_hidden_size=ffn,
        max_seq_len=32_768,
        norm_eps=1e-6,
        zero_centered_gamma=True,
        norm_placement="around",
        attention=AttentionConfig(qk_norm="head", window=512, window_layers=_FIVE_OF_SIX),
        rope=RopeConfig(theta=1_000_000.0, local_theta=10_000.0),
        activation="gelu_tanh",
        embedding_scale=hidden**0.5,
        tied_embeddings=True,
    )

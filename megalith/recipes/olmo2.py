"""OLMo 2 in three of its published sizes. Source: OLMo Team 2024, arXiv:2501.00656.

Rows, batch sizes, learning rates and the warmup over 8.4 billion tokens are those of the configs
released with the weights.
"""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def olmo2_1b() -> TrainRun:
    """OLMo 2 1B: 2 million tokens per step."""
    model = _model(hidden=2048, layers=16, heads=16, ffn=8192)
    return pretraining("olmo2_1b", model, warmed_cosine(4e-4, warmup=4000), global_batch_size=512)


def olmo2_7b() -> TrainRun:
    """OLMo 2 7B on 2 GPUs (tp 2): 4 million tokens per step."""
    model = _model(hidden=4096, layers=32, heads=32, ffn=11_008)
    parallel = ParallelConfig(tp=2, sp=True)
    return pretraining(
        "olmo2_7b", model, warmed_cosine(3e-4), global_batch_size=1024, parallel=parallel
    )


def olmo2_13b() -> TrainRun:
    """OLMo 2 13B on 4 GPUs (tp 4): 8 million tokens per step."""
    model = _model(hidden=5120, layers=40, heads=40, ffn=13_824)
    parallel = ParallelConfig(tp=4, sp=True)
    return pretraining(
        "olmo2_13b",
        model,
        warmed_cosine(3e-4, warmup=1000),
        global_batch_size=2048,
        parallel=parallel,
    )


def _model(*, hidden: int, layers: int, heads: int, ffn: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=100_352,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_hidden_size=ffn,
        max_seq_len=4096,
        norm_eps=1e-6,
        norm_placement="after",
        rope=RopeConfig(theta=500_000.0),
        attention=AttentionConfig(qk_norm="whole"),
    )

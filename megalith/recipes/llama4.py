"""Llama 4 Scout (text model) with the sizes of its release. Source: Meta 2025, "The Llama 4
herd"."""

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rope import RopeConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine

_THREE_OF_FOUR = (True, True, True, False)


def llama4_scout() -> TrainRun:
    """Llama 4 Scout without its vision encoder, on 64 GPUs: tp 4, ep 16 with one expert of each
    layer per GPU, and 4 pipeline stages.

    17.2B of 107.8B parameters are active per token. Rows have the length of an attention chunk.
    Training settings are not published: the learning rate and the aux loss are ours.
    """
    model = ModelConfig(
        vocab_size=202_048,
        hidden_size=5120,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=None,
        ffn_hidden_size=16_384,
        max_seq_len=10_485_760,
        rope=RopeConfig(
            theta=500_000.0,
            interleaved=True,
            skip=(False, False, False, True),
            skip_growth=0.1,
            scaling="llama3",
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position=8192,
        ),
        attention=AttentionConfig(
            qk_norm="l2",
            qk_norm_layers=_THREE_OF_FOUR,
            window=8192,
            window_layers=_THREE_OF_FOUR,
            chunked=True,
        ),
        moe=MoEConfig(
            num_experts=16,
            top_k=1,
            ffn_hidden_size=8192,
            shared_ffn_hidden_size=8192,
            apply_router_weight_on_input=True,
            router=RouterConfig(score="sigmoid", norm_topk_prob=False),
            aux_loss=AuxLossConfig(batch_coeff=0.001),
        ),
    )
    parallel = ParallelConfig(tp=4, sp=True, ep=16, etp=1, pp=4, zero=1)
    return pretraining("llama4_scout", model, warmed_cosine(3e-4), seq_len=8192, parallel=parallel)

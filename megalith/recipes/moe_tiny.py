"""A small mixture of experts on two processes; trains in minutes on two CPU cores."""

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import LoopConfig, TrainRun


def moe_tiny() -> TrainRun:
    """Eight experts and a shared expert, with ep 2: run with `--nproc 2`.

    Uses mock data; docs/howto/experts.md shows how to train on the corpus of `megalith quickstart`.
    """
    vocab_size = 4096
    return TrainRun(
        name="moe_tiny",
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=384,
            max_seq_len=512,
            tied_embeddings=True,
            moe=MoEConfig(
                num_experts=8,
                top_k=2,
                ffn_hidden_size=128,
                shared_ffn_hidden_size=128,
                shared_gate=True,  # as in Qwen2-MoE, to which it can be exported
                layers=(
                    False,
                    True,
                    True,
                    True,
                ),  # as in DeepSeek-V3, the first layer is dense
                aux_loss=AuxLossConfig(batch_coeff=0.01, z_loss_coeff=1e-3),
            ),
        ),
        parallel=ParallelConfig(ep=2),
        data=DataConfig(mock=True, mock_num_documents=2000),
        tokenizer=TokenizerConfig(kind="null", vocab_size=vocab_size),
        train=LoopConfig(
            steps=400,
            global_batch_size=4,
            micro_batch_size=2,
            seq_len=256,
            eval_every=200,
            eval_steps=8,
        ),
        schedule=ScheduleConfig(lr=2.5e-3, min_lr=1e-4, warmup_steps=0.1),
        checkpoint=CheckpointConfig(every=200),
    )

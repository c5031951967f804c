"""GPT-2 in its smallest size. Source: Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners"."""

from megalith.config.dropout import DropoutConfig
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.recipes.published import pretraining, warmed_cosine


def gpt2_124m() -> TrainRun:
    """GPT-2 small: learned position embeddings, LayerNorm, biases, dropout.

    The learning rate is not in the paper; it is that of the same size in Brown et al. 2020,
    arXiv:2005.14165, table 2.1.
    """
    model = ModelConfig(
        vocab_size=50_257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        ffn_hidden_size=3072,
        max_seq_len=1024,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        dropout=DropoutConfig(embedding=0.1, residual=0.1, attention=0.1),
        tied_embeddings=True,
    )
    return pretraining("gpt2_124m", model, warmed_cosine(6e-4), seq_len=1024)

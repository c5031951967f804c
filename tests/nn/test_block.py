from types import SimpleNamespace

from torch.nn.functional import rms_norm

from megalith.nn.attention import Attention
from megalith.nn.block import Block
from megalith.nn.mlp import SwiGLU
from megalith.testing.tolerance import FP64, assert_equals


def test_a_layer_adds_attention_and_then_the_mlp_each_to_its_own_normalised_input(layers: SimpleNamespace) -> None:
    config = layers.config()
    block = layers.build(Block, config)
    x, tokens = layers.inputs(9), layers.tokens(config, [5, 4])
    w = layers.weights(block)
    middle = x + block.attention(rms_norm(x, (18,), w["attention_norm.weight"], config.norm_eps), tokens)
    expected = middle + block.mlp(rms_norm(middle, (18,), w["mlp_norm.weight"], config.norm_eps))
    assert_equals("block", block(x, tokens), expected, FP64)


def test_its_parameters_are_named_after_their_place(layers: SimpleNamespace) -> None:
    block = layers.build(Block, layers.config(qkv_bias=False, output_bias=False, mlp_bias=False))
    assert list(layers.weights(block)) == [
        "attention_norm.weight", "attention.q", "attention.kv", "attention.o",
        "mlp_norm.weight", "mlp.gate_up", "mlp.down",
    ]  # fmt: skip
    assert isinstance(block.attention, Attention) and isinstance(block.mlp, SwiGLU)

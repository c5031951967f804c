from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.errors import ConfigError
from megalith.kernels.tokens import tokens_of_rows
from megalith.models.decoder import declared_parameters
from megalith.models.fields import Fields
from megalith.models.gpt_oss import GPT_OSS, read_dense
from megalith.models.names import by_parameter, in_our_order
from megalith.nn.attention import Attention
from megalith.nn.mlp import build_mlp
from megalith.nn.rope import Rotations
from megalith.parallel.mesh import mesh_of_one
from megalith.parallel.tensor import WholeTokens
from megalith.testing.tolerance import PARITY, assert_close, assert_equals

PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "gpt_oss",
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_the_published_config_is_understood_but_for_its_experts() -> None:
    with pytest.raises(ConfigError, match="num_local_experts=32: layers with a mixture of experts are not") as refused:
        GPT_OSS.read_config(PUBLISHED)
    assert "1 setting" in str(refused.value) or "\n  2." not in str(refused.value)
    config = read_dense(Fields(PUBLISHED))
    assert [config.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert (config.rope.theta, config.rope.whole_pairs, config.attention.window) == (150_000.0, False, 128)
    bare = {name: value for name, value in PUBLISHED.items() if not name.startswith(("rope", "layer_types"))}
    assert read_dense(Fields(bare)) == config


def test_what_else_is_wrong_is_told_too() -> None:
    with pytest.raises(ConfigError, match="swiglu_alpha=1.5 is not supported: it must be 1.702"):
        GPT_OSS.read_config(PUBLISHED | {"swiglu_alpha": 1.5})
    with pytest.raises(ConfigError, match="quantization_config=.* Use the model's bf16 weights"):
        GPT_OSS.read_config(PUBLISHED | {"quantization_config": {"quant_method": "mxfp4"}})


def test_no_dense_model_is_written_as_one(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="a model of 2 dense layers cannot be a GptOssForCausalLM"):
        GPT_OSS.write_config(tiny.config())


def tiny_model() -> Any:  # GptOssForCausalLM, loaded lazily
    """Two layers with random weights, a window smaller than a row, and yarn at work."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 4.0, "original_max_position_embeddings": 8}
    config = transformers.GptOssConfig(
        vocab_size=37, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, sliding_window=4, num_local_experts=1, num_experts_per_tok=1,
        max_position_embeddings=64, rope_parameters={**rope, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        attn_implementation="eager", swiglu_limit=0.7,
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
    return model


def filled(layer: nn.Module, theirs: dict[str, Tensor], config: ModelConfig) -> nn.Module:
    """Our layer with their weights, by the family's rules."""
    layer.to_empty(device="cpu")
    rules = by_parameter(GPT_OSS.rules(config))
    with torch.no_grad():
        for declared, module, name in declared_parameters(layer):
            whole = torch.empty(declared.shard.shape)
            for one in rules[declared.shard.name]:
                part = theirs[one.name].view(one.view)[tuple(slice(a, b) for a, b in one.at)]
                whole[tuple(slice(a, b) for a, b in one.box)] = in_our_order(one, part)
            getattr(module, name).copy_(whole.view(getattr(module, name).shape))
    return layer


@pytest.mark.parametrize("layer", [0, 1])
def test_its_attention_and_every_gradient_of_it_are_those_of_transformers(layer: int) -> None:
    model = tiny_model()
    config = read_dense(Fields(model.config.to_dict()))
    mesh = mesh_of_one()
    made = Attention(f"layers.{layer}.attention", config, mesh, WholeTokens(mesh.tp), dtype=torch.float32, index=layer)
    ours = filled(made, dict(model.state_dict()), config)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(1))
    y = ours(x, Rotations(config, torch.float32).given_to(tokens_of_rows(1, 9)))
    ago = torch.arange(9)[:, None] - torch.arange(9)
    hidden = (ago < 0) | (ago >= (4 if layer == 0 else 9))
    mask = torch.zeros(1, 1, 9, 9).masked_fill(hidden, -torch.inf)
    theirs = model.model.layers[layer].self_attn
    expected, _ = theirs(x[None], model.model.rotary_emb(x, torch.arange(9)[None]), mask)
    assert_equals("attention", y, expected[0], PARITY)
    y.square().sum().backward()
    expected.square().sum().backward()
    found = {declared.shard.name.rpartition(".")[2]: getattr(m, n).grad for declared, m, n in declared_parameters(ours)}
    wanted = {"q": theirs.q_proj.weight.grad, "o": theirs.o_proj.weight.grad, "sinks": theirs.sinks.grad}
    wanted |= {"kv": torch.cat([theirs.k_proj.weight.grad, theirs.v_proj.weight.grad])}
    wanted |= {"q_bias": theirs.q_proj.bias.grad, "o_bias": theirs.o_proj.bias.grad}
    wanted |= {"kv_bias": torch.cat([theirs.k_proj.bias.grad, theirs.v_proj.bias.grad])}
    assert_close(found, wanted, PARITY)


def test_its_clamped_gate_is_that_of_an_expert() -> None:
    model = tiny_model()
    config = read_dense(Fields(model.config.to_dict()))
    experts, mesh = model.model.layers[0].mlp.experts, mesh_of_one()
    ours = build_mlp("layers.0.mlp", config, mesh, WholeTokens(mesh.tp), dtype=torch.float32)
    ours.to_empty(device="cpu")
    with torch.no_grad():
        weight, bias = experts.gate_up_proj[0].T, experts.gate_up_proj_bias[0]  # rows: gate, up, gate, up ...
        parts = {
            "gate_up": torch.cat([weight[0::2], weight[1::2]]), "gate_up_bias": torch.cat([bias[0::2], bias[1::2]]),
            "down": experts.down_proj[0].T, "down_bias": experts.down_proj_bias[0],
        }  # fmt: skip
        for declared, module, name in declared_parameters(ours):
            getattr(module, name).copy_(parts[declared.shard.name.rpartition(".")[2]])
    x = 3 * torch.randn(9, 24, generator=torch.Generator().manual_seed(1))
    chosen, sure = torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1)
    assert_equals("mlp", ours(x), experts(x, chosen, sure), PARITY)

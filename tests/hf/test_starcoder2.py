"""StarCoder2's config.json and tensors."""

from types import SimpleNamespace
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.starcoder2 import STARCODER2, read_config, write_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": True,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(STARCODER2, RAW, 3_030_371_328)  # starcoder2-3b


@pytest.mark.parametrize("biased", [False, True])
def test_its_rules_cover_everything_once(biased: bool) -> None:
    changes = {"num_hidden_layers": 2, "use_bias": biased, "tie_word_embeddings": biased}
    check_rules(STARCODER2, read_config(RAW | changes))


def test_another_norm_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match="norm_type='rms_norm' is not supported: it must be 'layer_norm'"
    ):
        read_config(RAW | {"norm_type": "rms_norm"})


def test_a_model_that_is_no_starcoder_is_not_written_as_one(tiny: SimpleNamespace) -> None:
    with pytest.raises(
        ConfigError, match=r"model.norm='rms': Starcoder2ForCausalLM cannot express this setting"
    ):
        write_config(tiny.config())

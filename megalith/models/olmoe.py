"""OLMoE as Hugging Face knows it: queries and keys normed over all heads, and a mixture of experts in every layer.

Source: Muennighoff et al. 2024, arXiv:2409.02060.
"""

from collections.abc import Mapping
from typing import Any

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.models.experts import OF_TRAINING, Words, experts_of, joined_rules, mixture_rules, read_count
from megalith.models.fields import Fields
from megalith.models.names import Family, TensorRule
from megalith.models.rope import read_rope
from megalith.models.usual import HEAD, ROTARY_BUFFERS, read_usual, said, usual_rules, whole_heads, write_usual


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Contents of a config.json -> our config.

    Raises:
        ConfigError: fields that are missing, of the wrong kind, unknown, or not supported; all of them together.
    """
    fields = Fields(raw)
    usual = read_usual(fields, max_seq_len=4096, norm_eps=1e-5)
    rope = read_rope(fields, max_position=usual["max_seq_len"])
    fields.only("clip_qkv", None)
    moe = MoEConfig(
        experts=read_count(fields, 64), top_k=fields.whole("num_experts_per_tok", 8),
        ffn_hidden_size=usual["ffn_hidden_size"], router=RouterConfig(renormalise=fields.flag("norm_topk_prob")),
    )  # fmt: skip
    fields.ignore(*OF_TRAINING)
    fields.finish()
    return ModelConfig(**usual, rope=rope, attention=AttentionConfig(qk_norm="whole"), moe=moe)


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Our config -> contents of a config.json, readable by transformers 4 and 5.

    Raises:
        ConfigError: the model cannot be an OLMoE of theirs.
    """
    moe = experts_of(config, OLMOE.architecture)
    whole_heads(config)
    raw = {
        **write_usual(config, OLMOE), "intermediate_size": moe.ffn_hidden_size, "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k, "norm_topk_prob": moe.router.renormalise,
    }  # fmt: skip
    return said(raw, config, read_config, OLMOE)


def rules(config: ModelConfig) -> list[TensorRule]:
    """Every tensor of theirs, in the order of the forward pass."""
    return usual_rules(config, experts=mixture_rules(Words()))


def joined(config: ModelConfig) -> list[TensorRule]:
    """The same with all experts of a layer in two tensors."""
    return usual_rules(config, experts=joined_rules(Words()))


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    read_config=read_config,
    write_config=write_config,
    rules=rules,
    joined=joined,
    ignored=ROTARY_BUFFERS,
    tied=HEAD,
)

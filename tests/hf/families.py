"""Every family's tiny models: configs for transformers, and the same weights in a Megalith model.

A family is one entry of CASES or several; the first of them is the one that every test takes. Sizes
are odd, heads share keys, windows are smaller than a row, norms and biases are random, so that
every mistake of layout shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.hf.folder import HuggingFaceFolder
from megalith.hf.tensor_rules import group_by_parameter, to_parameter_layout
from megalith.models.decoder import Decoder, allocate, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh


@dataclass(frozen=True)
class Case:
    """A config of theirs: its class, and what differs from SIZES."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    std: float = 0.2
    """Of all weights: large enough to matter."""


SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# So that the blend of kept and stretched wavelengths, and its rounding, fall among the few pairs
# that there are.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 30.0,
    "factor": 4.0,
    "original_max_position_embeddings": 200,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 3.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1_000.0, "factor": 3.0}
# A bias of the keys alone shifts all scores of a query alike and has no gradient; fast rotations
# change that.
FAST = {"rope_type": "default", "rope_theta": 3.0}
TWO_THETAS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 30.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.25, 8.0],
}
WINDOW, WHOLE = "sliding_attention", "full_attention"
HALF_WINDOWED = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 6.0,
}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

SHARP, RATIO = {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 0.4}
LATENT = {
    "first_k_dense_replace": 2,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "hidden_size": 25,
    "n_routed_experts": 4,
}

# 16 bytes in bf16, or torch refuses
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
}

CASES: dict[str, Case] = {
    "llama": Case("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, tied": Case("LlamaConfig", {"tie_word_embeddings": True, "vocab_size": 64}),
    "llama, biases": Case(
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "rope_parameters": FAST}
    ),
    "llama, head_dim": Case("LlamaConfig", {"head_dim": 10, "num_key_value_heads": 3}),
    "llama, one key/value head": Case("LlamaConfig", {"num_key_value_heads": 1, "hidden_size": 36}),
    "llama, every head its own": Case(
        "LlamaConfig", {"num_key_value_heads": 6, "rope_parameters": LINEAR}
    ),
    "llama, dynamic": Case(
        "LlamaConfig", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}
    ),
    "mistral": Case("MistralConfig", {"sliding_window": 4, "head_dim": 6}),
    "mistral, no window": Case("MistralConfig", {"sliding_window": None, "hidden_act": "gelu"}),
    "qwen2": Case("Qwen2Config", {"rope_parameters": FAST, **HALF_WINDOWED}),
    "qwen2, yarn": Case("Qwen2Config", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": Case("Qwen3Config", {"head_dim": 10, "rope_parameters": YARN}),
    "qwen3, biases": Case("Qwen3Config", {"head_dim": 4, "attention_bias": True, **HALF_WINDOWED}),
    "gemma": Case(
        "GemmaConfig", {"head_dim": 10, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "gemma2": Case(
        "Gemma2Config",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            **CAPS,
        },
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {
            "head_dim": 6,
            "sliding_window": 4,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "rope_parameters": TWO_THETAS,
            "layer_types": [WINDOW, WHOLE],
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3, five of six": Case(
        "Gemma3TextConfig",
        {"head_dim": 4, "sliding_window": 3, "num_hidden_layers": 7, "attention_bias": True},
    ),
    "olmo2": Case("Olmo2Config"),
    "smollm3": Case("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "smollm3, every fourth": Case(
        "SmolLM3Config",
        {"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 4, "mlp_bias": True},
    ),
    "granite": Case("GraniteConfig", SCALES),
    "phi3": Case(
        "Phi3Config",
        {"sliding_window": 4, "rope_parameters": {**FAST, "partial_rotary_factor": 0.5}},
    ),
    "phi3, tied": Case("Phi3Config", {"tie_word_embeddings": True}),
    "phi3, below the first length": Case(
        "Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 11}
    ),
    "phi3, above the first length": Case(
        "Phi3Config", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 10}
    ),
    "starcoder2": Case("Starcoder2Config", {"sliding_window": 4, "rope_parameters": FAST}),
    "starcoder2, no biases": Case(
        "Starcoder2Config", {"use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": True}
    ),
    "gpt2": Case("GPT2Config", {"n_inner": 20, "tie_word_embeddings": True}),
    "gpt2, untied": Case("GPT2Config", {"n_head": 3, "activation_function": "relu"}),
    "gpt_neox": Case("GPTNeoXConfig", {"num_attention_heads": 3}),
    "gpt_neox, one after the other": Case(
        "GPTNeoXConfig",
        {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5},
    ),
    "deepseek_v3": Case(
        "DeepseekV3Config", {"q_lora_rank": 9, "rope_parameters": {**YARN, **SHARP}, **LATENT}
    ),
    "deepseek_v3, a ratio": Case(
        "DeepseekV3Config", {"q_lora_rank": 9, "rope_parameters": {**YARN, **RATIO}, **LATENT}
    ),
    "deepseek_v3, one scale": Case(
        "DeepseekV3Config",
        {"q_lora_rank": 9, "rope_parameters": {**YARN, **RATIO, "mscale_all_dim": 0}, **LATENT},
    ),
    "deepseek_v3, queries from x": Case(
        "DeepseekV3Config",
        {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True, **LATENT},
    ),
    "mixtral": Case(
        "MixtralConfig", {"num_local_experts": 5, "rope_parameters": FAST, "intermediate_size": 16}
    ),
    "mixtral, window": Case(
        "MixtralConfig",
        {
            "intermediate_size": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "head_dim": 6,
        },
    ),
    "qwen3_moe": Case(
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 10, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3_moe, scores": Case(
        "Qwen3MoeConfig",
        {**EXPERTS, "head_dim": 4, "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen2_moe": Case(
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 11, "rope_parameters": FAST},
    ),
    "qwen2_moe, no biases": Case(
        "Qwen2MoeConfig",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 11,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": Case(
        "OlmoeConfig", {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 16}
    ),
    "gpt_oss": Case(
        "GptOssConfig",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "head_dim": 6,
            "swiglu_limit": 1.0,
            "intermediate_size": 16,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "llama4": Case(
        "Llama4TextConfig",
        {
            "num_local_experts": 5,
            "intermediate_size": 16,
            "intermediate_size_mlp": 20,
            "head_dim": 6,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 0],
            "floor_scale": 3,
            "attn_scale": 0.5,
            "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},
        },
    ),
    "llama4, every other layer": Case(
        "Llama4TextConfig",
        {
            "num_local_experts": 3,
            "intermediate_size": 8,
            "intermediate_size_mlp": 11,
            "head_dim": 4,
            "attention_chunk_size": 4,
            "num_hidden_layers": 5,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
            "no_rope_layers": [1] * 5,
            "rope_parameters": FAST,
            "layer_types": [
                "chunked_attention",
                "chunked_attention",
                WHOLE,
                "chunked_attention",
                WHOLE,
            ],
        },
    ),
    "deepseek_v3, experts": Case(
        "DeepseekV3Config",
        {
            "q_lora_rank": 9,
            **LATENT,
            "first_k_dense_replace": 1,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 8,
            "hidden_size": 40,
            "num_mtp_layers": 0,
        },
    ),
    "deepseek_v2, experts": Case(
        "DeepseekV2Config",
        {
            "q_lora_rank": None,
            **LATENT,
            "qk_nope_head_dim": 6,
            "kv_lora_rank": 8,
            "first_k_dense_replace": 0,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "hidden_size": 40,
            "topk_method": "group_limited_greedy",
            "moe_intermediate_size": 8,
            "routed_scaling_factor": 1.7,
        },
    ),
    "deepseek_v2": Case(
        "DeepseekV2Config",
        {"q_lora_rank": None, **LATENT, "qk_nope_head_dim": 6, "kv_lora_rank": 8},
    ),
}

FIRST = [
    name
    for name, case in CASES.items()
    if name == next(n for n, c in CASES.items() if c.kind == case.kind)
]
"""One of every family."""


def their_model(
    case: Case, *, std: float | None = None
) -> Any:  # of a class that is imported lazily
    """A model of theirs, its weights, norms and biases random; norms around what they start
    from."""
    import transformers

    known = getattr(transformers, case.kind)()
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    config = getattr(transformers, case.kind)(**sizes | dict(case.fields))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            start = (
                float(parameter.flatten()[0])
                if parameter.ndim == 1 and len(parameter.unique()) == 1
                else 0.0
            )
            parameter.normal_(start, case.std if std is None else std, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    return model


def our_model(folder: HuggingFaceFolder, **changes: Any) -> Decoder:
    """The same weights in a model of ours, with settings changed."""
    model = Decoder(
        build_context(replace(folder.model_config, **changes), build_single_rank_mesh())
    )
    allocate(model, torch.device("cpu"))
    folder.fill(
        [
            CheckpointEntry(d.shard, "param", getattr(module, name))
            for d, module, name in iter_parameter_specs(model)
        ]
    )
    return model


def saved(case: Case, path: Path, *, std: float | None = None) -> tuple[Any, HuggingFaceFolder]:
    """A model of theirs, and the folder that it is saved in."""
    reference = their_model(case, std=std)
    reference.save_pretrained(path)
    return reference, HuggingFaceFolder(path)


def batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids [3, 11] and the next ids as labels, some masked."""
    text = torch.randint(0, vocab_size, (3, 12), generator=torch.Generator().manual_seed(5))
    labels = text[:, 1:].clone()
    labels[1, 2:6] = -100
    return text[:, :-1], labels


def our_gradients(model: Decoder, folder: HuggingFaceFolder) -> dict[str, Tensor]:
    """Gradients under their names, in their shapes."""
    # as in their memory
    every = (
        folder.family.rules(folder.model_config, fused=True)
        if folder.family.fused_tensors
        else folder.rules
    )
    rules, result = group_by_parameter(every), dict[str, Tensor]()
    for declared, module, name in iter_parameter_specs(model):
        if not getattr(module, name).requires_grad:
            continue  # the balancing bias
        gradient = getattr(module, name).grad.view(declared.shard.shape)
        for rule in rules[declared.shard.name]:
            box = tuple(slice(start, stop) for start, stop in rule.box)
            reference = result.setdefault(rule.name, torch.zeros(rule.shape))
            place = reference.view(rule.view)[tuple(slice(start, stop) for start, stop in rule.at)]
            to_parameter_layout(rule, place).copy_(gradient[box])
    return result

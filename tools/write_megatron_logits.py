"""Writes the weights and logits of small models of megatron-core, with which the tests of
`tests/hf/test_megatron_logits.py` compare ours.

Run it with a Python that has torch and megatron-core 0.16 (no GPU):

    python tools/write_megatron_logits.py tests/hf/megatron_logits [NAME ...]

Each file has the tensors that a checkpoint would store, under the keys that it would have, the
logits of `tokens`, and the arguments as JSON in its metadata.
"""

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any  # megatron-core has no annotations that could be checked here

import torch
import torch.distributed as dist
import torch.nn.functional as F

VOCAB_SIZE = 40
NUM_TOKENS = 12
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
LLAMA = {"swiglu": True, "position_embedding_type": "rope", "rotary_base": 10000}
MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_router_dtype": "fp32",
}
MLA = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "num_query_groups": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "num_query_groups": 4,
        "bias_gelu_fusion": False,
        "tied": True,
    },
    "llama": {**LLAMA, "add_qkv_bias": True, "qk_layernorm": True},
    "mtp": {**LLAMA, "mtp_num_layers": 1},
    "interleaved": {
        **LLAMA,
        "rotary_interleaved": True,
        "rotary_percent": 0.5,
        "softmax_type": "learnable",
    },
    "gate": {**LLAMA, "attention_output_gate": True, "qk_layernorm": True},
    "squared_relu": {**LLAMA, "swiglu": False, "squared_relu": True, "use_rope_scaling": True},
    "moe": {
        **LLAMA,
        **MOE,
        "moe_layer_freq": [0, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 20,
        "moe_shared_expert_gate": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "mixtral": {**LLAMA, **MOE},
    "mla": {**LLAMA, **MLA, "rope_type": "rope"},
    "mla_yarn": {
        **LLAMA,
        **MLA,
        "rope_type": "yarn",
        "rotary_scaling_factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "qk_layernorm": False,
        "q_lora_rank": None,
    },
}
SCRIPT_ONLY = (
    "swiglu",
    "squared_relu",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "use_rope_scaling",
    "num_experts",
    "bias_gelu_fusion",
    "tied",
)
"""Arguments that are no fields of TransformerConfig."""


def make_args(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Megatron-LM's training script would store."""
    args = {**SIZES, **case, "norm_epsilon": 1e-5, "max_position_embeddings": 64}
    args["group_query_attention"] = args["num_query_groups"] < args["num_attention_heads"]
    args["padded_vocab_size"] = VOCAB_SIZE
    args["vocab_size"] = VOCAB_SIZE - 3
    args["untie_embeddings_and_output_weights"] = not args.pop("tied", False)
    args["attention_dropout"] = args["hidden_dropout"] = 0.0
    return args


class Attention(torch.nn.Module):
    """Causal attention with the arguments that MLA passes, which the local one does not accept."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        """q, k [s, b, n, d], v [s, b, n, dv] -> [s, b, n dv]."""
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def build(case: dict[str, Any]) -> Any:
    """Return the model of a case."""
    from megatron.core.activations import squared_relu
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        multi_latent_attention,
    )

    # without TransformerEngine its layers are None, which MLA passes to isinstance
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, Attention)
    is_mla = "multi_latent_attention" in case
    gated = bool(case.get("swiglu"))
    activation = F.silu if gated else F.gelu
    if case.get("squared_relu"):
        activation = squared_relu
    options = {
        **{key: value for key, value in {**SIZES, **case}.items() if key not in SCRIPT_ONLY},
        "num_moe_experts": case.get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": activation,
        "rotary_interleaved": case.get("rotary_interleaved", False),
        "moe_token_dispatcher_type": "allgather",
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if is_mla:
        options |= {"rotary_base": case["rotary_base"]}
    config = (MLATransformerConfig if is_mla else TransformerConfig)(**options)
    layers: Any = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    for layer in layers.layer_specs if is_mla else []:
        layer.submodules.self_attention.submodules.core_attention = Attention
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=mtp,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=64,
        share_embeddings_and_output_weights=case.get("tied", False),
        position_embedding_type=case["position_embedding_type"],
        rotary_base=case.get("rotary_base", 10000),
        rotary_percent=case.get("rotary_percent", 1.0),
        rope_scaling=case.get("use_rope_scaling", False),
    )


def initialize(model: Any) -> None:
    """Fill parameters and expert biases with random values."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or "inv_freq" in name or "tokens_per" in name:
            continue
        values = torch.randn(tensor.shape, generator=generator)
        tensor.data = 1 + values / 8 if "norm" in name and "bias" not in name else values / 4


def stored_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors under the keys of a checkpoint."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = model.sharded_state_dict(metadata=groups)
    apply_factories(state)
    tensors: dict[str, torch.Tensor] = {}
    for part in nested_values(state):
        if not isinstance(part, ShardedTensor):
            continue
        full = tensors.setdefault(part.key, torch.zeros(part.global_shape))
        leading = (1,) * part.prepend_axis_num
        values = part.data.detach().reshape(*leading, *part.local_shape)
        box = zip(part.global_offset, values.shape, strict=True)
        full[tuple(slice(start, start + size) for start, size in box)] = values
    return tensors


def save_safetensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write tensors of fp32 and int64, without the library, which megatron-core does not need."""
    header: dict[str, Any] = {"__metadata__": metadata}
    contents = b""
    for name, tensor in tensors.items():
        dtype = {torch.float32: "F32", torch.int64: "I64"}[tensor.dtype]
        end = len(contents) + tensor.nbytes
        offsets = [len(contents), end]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        contents += bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + contents)


def write_case(name: str, folder: Path) -> None:
    """Write the file of one case."""
    case = CASES[name]
    model = build(case).eval()
    initialize(model)
    tokens = torch.randint(
        VOCAB_SIZE - 3, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(1)
    )
    positions = torch.arange(NUM_TOKENS).unsqueeze(0)
    mask = torch.ones(1, 1, NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    outputs: list[torch.Tensor] = []  # logits of MTP layers, then those of the model
    model.output_layer.register_forward_hook(lambda *values: outputs.append(values[-1][0].clone()))
    with torch.no_grad():
        model(tokens, positions, mask, labels=tokens)
    tensors = {key: value.contiguous() for key, value in stored_tensors(model).items()}
    *mtp_logits, logits = (output[:, 0].contiguous() for output in outputs)
    tensors |= {"logits": logits, "tokens": tokens[0]}
    tensors |= {f"mtp_logits.{depth}": values for depth, values in enumerate(mtp_logits)}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    save_safetensors(path, tensors, {"args": json.dumps(make_args(case))})
    sys.stdout.write(f"{path}: {path.stat().st_size} bytes, {len(tensors)} tensors\n")


def main() -> None:
    """Write the files of all cases, or of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(CASES)}")
    options = parser.parse_args()
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # a stub
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment, misc]  # as above
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29791"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # defined only with TransformerEngine
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    for name in options.names or CASES:
        write_case(name, options.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

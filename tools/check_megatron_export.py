"""Check that megatron-core loads a checkpoint of `megalith convert --to megatron`, on CPUs.

    python tools/check_megatron_export.py FOLDER [--tp 2]

It is run by hand in an environment with torch and megatron-core (tested: 0.16.0), and needs nothing
of Megalith. The model and its distributed optimizer are built from the checkpoint's arguments and
loaded with `dist_checkpointing.load`. Every parameter, master weight and moment must equal the
values that `torch.distributed.checkpoint` reads from the same folder, bit for bit, and the folder
has exactly the names that megatron-core requests (`strict="raise_all"`).
`load_plain_tensors` must return them, too.

megatron-core expects a GPU: what it asks of one is answered for the CPU, on the lines below.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.multiprocessing.spawn import spawn

# Objects of megatron-core are Any: it is not installed where types are checked.


def main(argv: list[str]) -> int:
    """Check one folder; returns 0 if everything is equal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args(argv)
    folder = find_checkpoint(options.folder)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29655")
    spawn(check_on_rank, (folder, options.tp), nprocs=options.tp)
    return 0


def find_checkpoint(folder: Path) -> Path:
    """Return the folder that the tracker file names."""
    name = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    return folder / (name if name == "release" else f"iter_{int(name):07d}")


def check_on_rank(rank: int, folder: Path, tp: int) -> None:
    """Load the checkpoint on one rank, compare all tensors, and print the counts."""
    replace_gpu_functions()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=tp)
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    checkpointing = importlib.import_module("megatron.core.dist_checkpointing")

    common = checkpointing.load_common_state_dict(str(folder))
    metadata = checkpointing.load_content_metadata(preloaded_state_dict=common)
    stored = read_plainly(folder)
    model = build_model(common["args"], tp)
    wanted: dict[str, Any] = {"model": model.sharded_state_dict(metadata=metadata)}
    shards = list_shards(drop_extra_state(wanted["model"]))
    optimizer = None
    if "optimizer" in common:
        optimizer = build_optimizer(common["args"], model)
        wanted["optimizer"] = optimizer.sharded_state_dict(
            wanted, is_loading=True, metadata=metadata
        )
    loaded = checkpointing.load(wanted, str(folder), strict="raise_all")
    compare_weights(drop_extra_state(loaded["model"]), shards, stored)
    counts = [f"{len(shards)} boxes of weights"]
    if optimizer is not None:
        optimizer.load_state_dict(loaded["optimizer"])
        counts.append(f"{compare_optimizer(optimizer, shards, stored)} of optimizer state")
        step = loaded["optimizer"]["optimizer"]["param_groups"][0]["step"]
        counts.append(f"step {step}")
    loaded_plainly = checkpointing.load_plain_tensors(str(folder))
    plain = {name: loaded_plainly[name] for name in loaded_plainly.keys() - common.keys()}
    assert plain.keys() == stored.keys(), plain.keys() ^ stored.keys()
    for name, tensor in plain.items():
        check_equal(name, tensor, stored[name])
    counts.append(f"{len(plain)} plain tensors")
    if rank == 0:
        scheduler = common.get("opt_param_scheduler")
        print(f"iteration {common['iteration']}, schedule {scheduler}")
    print(f"rank {rank} of {tp}: equal: {', '.join(counts)}", flush=True)
    torch.distributed.destroy_process_group()


def read_plainly(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the folder, read by torch without megatron-core."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


# --- comparison


def list_shards(state: Mapping[str, Any]) -> dict[str, list["ParameterPart"]]:
    """Return the parts of the stored tensors that each parameter consists of, by its name."""
    mapping = importlib.import_module("megatron.core.dist_checkpointing.mapping")
    utilities = importlib.import_module("megatron.core.dist_checkpointing.dict_utils")
    shards = {}
    for name, entry in state.items():
        parts = [entry]
        if isinstance(entry, mapping.ShardedTensorFactory):
            parts = list(utilities.nested_values(entry.build()))
        shards[name] = [ParameterPart(part.key, locate(part), entry.data) for part in parts]
    return shards


class ParameterPart(NamedTuple):
    """A part of a parameter."""

    key: str
    """Name of the stored tensor."""

    place: tuple[slice, ...]
    """Index of the part in the stored tensor."""

    parameter: Tensor


def locate(shard: Any) -> tuple[slice, ...]:
    """Return the index of a shard in its full tensor; stacked layers and experts are indices."""
    prepended = shard.prepend_axis_num
    first = [int(offset) for offset in shard.global_offset[:prepended]]
    rest = zip(shard.global_offset[prepended:], shard.local_shape, strict=True)
    return (
        *(slice(offset, offset + 1) for offset in first),
        *(slice(offset, offset + size) for offset, size in rest),
    )


def expected_values(
    parts: Sequence[ParameterPart], stored: Mapping[str, Tensor], prefix: str = ""
) -> Tensor:
    """Return the stored values of a parameter; its parts, such as gate and up, follow one
    another."""
    values = [stored[f"{prefix}{part.key}"][part.place].flatten() for part in parts]
    return torch.cat(values).view(parts[0].parameter.shape)


def compare_weights(
    loaded: Mapping[str, Tensor],
    shards: Mapping[str, Sequence[ParameterPart]],
    stored: Mapping[str, Tensor],
) -> None:
    """Check that the loaded tensors are those stored."""
    assert loaded.keys() == shards.keys(), loaded.keys() ^ shards.keys()
    for name, parts in shards.items():
        check_equal(name, loaded[name], expected_values(parts, stored).to(loaded[name].dtype))


def compare_optimizer(
    optimizer: Any, shards: Mapping[str, Sequence[ParameterPart]], stored: Mapping[str, Tensor]
) -> int:
    """Check master weights and moments of every parameter, and return their number."""
    by_parameter = {id(parts[0].parameter): (name, parts) for name, parts in shards.items()}
    count = 0
    for inner in optimizer.chained_optimizers:
        for parameter in inner.model_param_group_index_map:
            name, parts = by_parameter[id(parameter)]
            states = inner._get_main_param_and_optimizer_states(parameter)
            for role in ("param", "exp_avg", "exp_avg_sq"):
                expected = expected_values(parts, stored, f"optimizer.state.{role}.")
                check_equal(f"{role} of {name}", states[role].view(parameter.shape), expected)
                count += 1
    trained = sum(parts[0].parameter.requires_grad for parts in shards.values())
    assert count == 3 * trained, (count, trained)
    return count


def check_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Check that two tensors have the same dtype, shape and bits."""
    assert actual.dtype == expected.dtype, (name, actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert torch.equal(actual, expected), f"{name} differs"


# --- model and optimizer of megatron-core


def build_model(args: argparse.Namespace, tp: int) -> Any:
    """Return the GPTModel that the arguments describe."""
    core = "megatron.core.transformer"
    transformer_config = importlib.import_module(f"{core}.transformer_config")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    gpt = importlib.import_module("megatron.core.models.gpt.gpt_model")
    is_mla = getattr(args, "multi_latent_attention", False)
    cls = (
        transformer_config.MLATransformerConfig if is_mla else transformer_config.TransformerConfig
    )
    values = {name: getattr(args, name) for name in cls.__dataclass_fields__ if hasattr(args, name)}
    values |= {
        "num_moe_experts": getattr(args, "num_experts", None),
        "layernorm_epsilon": args.norm_epsilon,
        "layernorm_zero_centered_gamma": getattr(args, "apply_layernorm_1p", False),
        "gated_linear_unit": getattr(args, "swiglu", False),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "sequence_parallel": False,
        "pipeline_dtype": args.params_dtype,
        "use_cpu_initialization": True,
        "bias_activation_fusion": False,
        "moe_grouped_gemm": False,  # needs a GPU; experts have the same stored names
    }
    if getattr(args, "swiglu", False):
        values["activation_func"] = torch.nn.functional.silu
    if not getattr(args, "group_query_attention", False):
        values["num_query_groups"] = None
    config = cls(**values)
    spec = specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=args.normalization
    )
    for layer in spec.layer_specs:
        name_as_transformer_engine(layer, is_mla=is_mla)
    model = gpt.GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
    )
    return model.to(args.params_dtype)


def name_as_transformer_engine(layer: Any, *, is_mla: bool) -> None:
    """Give the norms of a layer without Transformer Engine, which needs a GPU, the stored names of
    a layer with it: those that Megatron writes by default."""
    names = {}
    if is_mla:
        names["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        names["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if "MoE" not in layer.submodules.mlp.module.__name__:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    layer.submodules.sharded_state_dict_keys_map = names


def drop_extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without that of Transformer Engine's fp8 recipes, which is not part of the
    weights."""
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def build_optimizer(args: argparse.Namespace, model: Any) -> Any:
    """Return the distributed optimizer of a model, with moments of zero."""
    distributed = importlib.import_module("megatron.core.distributed")
    optimizers = importlib.import_module("megatron.core.optimizer")
    settings = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = distributed.DistributedDataParallel(model.config, settings, model)
    config = optimizers.OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=args.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = optimizers.get_megatron_optimizer(config, [wrapped])
    for inner in optimizer.chained_optimizers:
        inner._init_optimizer_states_with_dummy_values()
        inner._set_main_param_and_optimizer_states = partial(set_states, inner)
    return optimizer


def set_states(optimizer: Any, parameter: Any, tensors: dict[str, Tensor]) -> None:
    """Set the state of one parameter. torch's Adam counts steps per parameter, unlike the fused
    ones; the checkpoint's count is in its parameter groups, and is set already."""
    steps = optimizer._get_main_param_and_optimizer_states(parameter)["step"]
    type(optimizer)._set_main_param_and_optimizer_states(
        optimizer, parameter, {**tensors, "step": steps}
    )


def replace_gpu_functions() -> None:
    """Let megatron-core run without a GPU: its current device is the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]  # any device works
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment,misc]  # on purpose
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]  # on purpose
    torch.tensor = partial(create_on_cpu, torch.tensor)
    tensor_type = torch.Tensor.type

    def name_type(tensor: Tensor, *words: Any, **named: Any) -> Any:
        result = tensor_type(tensor, *words, **named)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    torch.Tensor.type = name_type  # type: ignore[assignment,method-assign]  # on purpose
    attention = importlib.import_module("megatron.core.transformer.dot_product_attention")
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    initialize = attention.DotProductAttention.__init__

    def ignore_channels(
        self: Any, *words: Any, k_channels: Any = None, v_channels: Any = None, **named: Any
    ) -> None:
        initialize(self, *words, **named)

    attention.DotProductAttention.__init__ = ignore_channels
    latent.TELinear = type("TELinear", (), {})


def create_on_cpu(create: Callable[..., Tensor], *words: Any, **named: Any) -> Tensor:
    """Create a tensor without the requested device."""
    named.pop("device", None)
    return create(*words, **named)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Writes the archives of `tests/checkpoint/megatron/`: small checkpoints of megatron-core.

Run it with a Python that has torch and megatron-core 0.16 (no GPU; gloo processes):

    python tools/write_megatron_fixtures.py tests/checkpoint/megatron [NAME ...]

Each fixture is a real `GPTModel` with a real `DistributedOptimizer` after two updates, saved by
`megatron.core.dist_checkpointing.save` from tp 2 x pp 2 processes. Next to the checkpoint,
`reference.safetensors` has the full tensors, assembled from the modules and the optimizer of every
process and not from the checkpoint: `NAME`, and `optimizer.{master,exp_avg,exp_avg_sq}.NAME`, where
NAME is the canonical name of Megatron with one entry per layer, and experts along the first axis
(`decoder.layers.0.mlp.experts.experts.linear_fc1.weight`).
"""

import argparse
import io
import json
import math
import socket
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any  # megatron-core has no annotations that could be checked here

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.overrides import TorchFunctionMode

TRACKER = "latest_checkpointed_iteration.txt"
ITERATION = 2
NUM_LAYERS = 4
TP = 2
PP = 2


@dataclass(frozen=True)
class Case:
    """One checkpoint: the differences from a dense, untied model with GQA."""

    sharding_type: str
    dp: int = 2
    num_layers: int = NUM_LAYERS
    tied: bool = False
    vocab_size: int = 24
    ep: int = 1
    bucket_size: int | None = None
    singleton_local_shards: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 6,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
}
MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 4,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
    "num_query_groups": 4,
    "qk_layernorm": True,
}
CASES = {
    # kv groups 1 < tp 2; several buckets per stage
    "dense_dp_reshardable": Case("dp_reshardable", bucket_size=800),
    # megatron-core 0.16 shifts the values of `fully_reshardable` after a bucket whose length is not
    # a multiple of 128 (tied embeddings have their own bucket); with these sizes all are
    "dense_tied_fully_reshardable": Case(
        "fully_reshardable", num_layers=2, tied=True, vocab_size=32, config={"kv_channels": 4}
    ),
    "moe_fully_reshardable": Case(
        "fully_reshardable",
        dp=2,
        num_layers=2,
        ep=2,
        config=MOE,
        spec={"num_experts": 4, "moe_grouped_gemm": False},
    ),
    "moe_dp_reshardable": Case(
        "dp_reshardable",
        dp=2,
        num_layers=2,
        ep=2,
        config=MOE,
        spec={"num_experts": 4, "moe_grouped_gemm": False},
    ),
    "mla_dp_reshardable": Case(
        "dp_reshardable",
        dp=1,
        num_layers=2,
        config=MLA,
        spec={"multi_latent_attention": True, "qk_layernorm": True},
    ),
    "dense_singleton": Case("fully_reshardable", dp=1, num_layers=2, singleton_local_shards=True),
}
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": 2,
}


class HostTensors(TorchFunctionMode):
    """Lets megatron-core run on a CPU: tensors that it puts on a GPU stay in host memory, and
    report the type that they would have there."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return TYPES[args[0].dtype]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


TYPES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def run_rank(rank: int, port: int, name: str, folder: Path, scratch: Path) -> None:
    """Build, train and save one process's part of a case."""
    with HostTensors():
        save_rank(rank, port, name, folder, scratch)


def save_rank(rank: int, port: int, name: str, folder: Path, scratch: Path) -> None:
    """Do the work of `run_rank` in the mode that keeps tensors in host memory."""
    case = CASES[name]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # a stub
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None  # type: ignore[assignment, misc]  # as above
    torch.set_num_threads(1)
    world = TP * PP * case.dp
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1 if case.ep > 1 else None,
        create_gloo_process_groups=True,
    )
    model, optimizer, args = build(case)
    for step in range(ITERATION):
        train_step(model, optimizer, step)
    metadata = {
        "distrib_optim_sharding_type": case.sharding_type,
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": case.singleton_local_shards,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model_state = model.module.sharded_state_dict(metadata=metadata)
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
        "model": model_state,
        "optimizer": optimizer.sharded_state_dict(model_state, metadata=metadata),
        "opt_param_scheduler": {
            "max_lr": 0.01,
            "lr_warmup_steps": 0,
            "num_steps": ITERATION * 8,
            "lr_decay_style": "cosine",
            "lr_decay_steps": 800,
            "min_lr": 0.001,
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_incr_style": "constant",
            "wd_incr_steps": 800,
        },
        "num_floating_point_operations_so_far": 123456,
    }
    stored = {key: value for key, value in metadata.items() if key != "dp_cp_group"}
    path = folder / f"iter_{ITERATION:07d}"
    if rank == 0:
        path.mkdir(parents=True)
    dist.barrier()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    dist_checkpointing.save(state, str(path), strategy, content_metadata=stored)
    torch.save(list(local_parts(model, optimizer)), scratch / f"{rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / TRACKER).write_text(str(ITERATION))
    dist.destroy_process_group()


class NoAttention(torch.nn.Module):
    """Attention without parameters, which is never called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def build(case: Case) -> tuple[Any, Any, argparse.Namespace]:
    """Return the DDP-wrapped part of the model of this process, its optimizer, and `args`."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        multi_latent_attention,
    )

    # without TransformerEngine its layers are not types, and MLA passes them to isinstance
    for name in ("TELinear", "TEColumnParallelLinear"):
        setattr(multi_latent_attention, name, NoAttention)
    options = {
        **SIZES,
        "num_layers": case.num_layers,
        "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": PP,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": 1 if case.ep > 1 else None,
        "sequence_parallel": False,  # torch.nn.RMSNorm does not support it
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "bf16": True,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **case.config,
    }
    make = MLATransformerConfig if options.get("multi_latent_attention") else TransformerConfig
    config = make(**options)
    torch.manual_seed(7)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = get_gpt_layer_local_spec(normalization="RMSNorm", **case.spec)
    # it has no parameters, and the local one does not accept the arguments of MLA
    layers.submodules.self_attention.submodules.core_attention = NoAttention
    module = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=case.vocab_size,
        max_sequence_length=16,
        pre_process=stage == 0,
        post_process=stage == PP - 1,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=10000,
    ).bfloat16()
    initialize(module)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=case.bucket_size is not None,
        bucket_size=case.bucket_size,
    )
    model = DistributedDataParallel(config, ddp, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    return model, optimizer, make_args(case, options)


def make_args(case: Case, options: dict[str, Any]) -> argparse.Namespace:
    """Return the arguments that Megatron-LM's training script would store."""
    plain = {key: value for key, value in options.items() if key != "activation_func"}
    renamed = {"num_moe_experts": "num_experts"}
    values = {renamed.get(key, key): value for key, value in plain.items()}
    return argparse.Namespace(
        **values,
        seq_length=16,
        max_position_embeddings=16,
        padded_vocab_size=case.vocab_size,
        vocab_size=case.vocab_size - 3,
        make_vocab_size_divisible_by=4,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        swiglu=True,
        group_query_attention=not options.get("multi_latent_attention"),
        untie_embeddings_and_output_weights=not case.tied,
        disable_bias_linear=True,
        norm_epsilon=1e-5,
        data_parallel_size=case.dp,
        world_size=TP * PP * case.dp,
        use_distributed_optimizer=True,
        ddp_bucket_size=case.bucket_size,
        overlap_grad_reduce=case.bucket_size is not None,
        ckpt_format="torch_dist",
        optimizer="adam",
        lr=0.01,
        min_lr=0.001,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_eps=1e-8,
        clip_grad=0.0,
        lr_decay_style="cosine",
        train_iters=100,
        micro_batch_size=1,
        global_batch_size=8,
        consumed_train_samples=ITERATION * 8,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        transformer_impl="local",
        seed=1234,
    )


def initialize(module: Any) -> None:
    """Fill the parameters with values that depend on the global name and tp rank only, so that
    replicas are equal."""
    with torch.no_grad():
        for name, param in named_parameters(module):
            values = random_like(param, f"init {name}", param)
            param.copy_(1 + values / 8 if "norm" in name else values / 4)


def named_parameters(module: Any) -> Iterator[tuple[str, Any]]:  # Megatron sets attributes
    """Yield parameters by global names: global numbers of layers and experts, and the tied output
    layer under the name of the embedding."""
    from megatron.core import parallel_state

    for name, param in module.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(module.decoder.layers[int(parts[2])].layer_number - 1)
        if "local_experts" in parts:
            where = parts.index("local_experts") + 1
            count = module.config.num_moe_experts // module.config.expert_model_parallel_size
            first = parallel_state.get_expert_model_parallel_rank() * count
            parts[where] = str(first + int(parts[where]))
        name = ".".join(parts)
        if name == "output_layer.weight" and module.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield name, param


def random_like(tensor: torch.Tensor, key: str, param: torch.nn.Parameter) -> torch.Tensor:
    """Return normal values that depend on `key`, and on the tp rank if `param` is split."""
    from megatron.core import parallel_state

    is_split = getattr(param, "tensor_model_parallel", False)
    rank = parallel_state.get_tensor_model_parallel_rank() if is_split else 0
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {rank}".encode()))
    return torch.randn(tensor.shape, generator=generator)


def train_step(model: Any, optimizer: Any, step: int) -> None:
    """Update the weights once, with gradients that are equal on replicas."""
    optimizer.zero_grad()
    for name, param in named_parameters(model.module):
        param.main_grad.copy_(random_like(param.main_grad, f"gradient {step} {name}", param))
    success, _, _ = optimizer.step()
    if not success:
        raise RuntimeError("the optimizer skipped the step")


def local_parts(model: Any, optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield this process's part of each parameter and of its optimizer state, with its position."""
    from megatron.core import parallel_state

    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    for name, param in named_parameters(model.module):
        is_split = getattr(param, "tensor_model_parallel", False)
        part: dict[str, Any] = {
            "name": name,
            "values": param.detach().clone(),
            "dim": param.partition_dim if is_split else None,
            "tp_rank": tp_rank,
            "states": {},
            "range": None,
        }
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            if param not in inner.model_param_gbuf_map:
                continue
            if param not in inner.model_param_group_index_map:
                continue  # another dp rank owns all of it
            states = inner._get_main_param_and_optimizer_states(param)
            owned = inner._get_model_param_range_map(param)["param"]
            part["range"] = (owned.start, owned.end)
            part["states"] = {
                {"param": "master"}.get(role, role): values.detach().clone()
                for role, values in states.items()
                if role in ("param", "exp_avg", "exp_avg_sq")
            }
        yield part


def assemble(parts: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the full tensors of all processes' parts under the names of the files."""
    names = {part["name"]: part for part in parts}
    ranks: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for part in parts:
        ranks.setdefault(("", part["name"]), {})[part["tp_rank"]] = part["values"]
        for role, values in part["states"].items():
            local = ranks.setdefault((role, part["name"]), {}).setdefault(
                part["tp_rank"], torch.full(part["values"].shape, math.nan)
            )
            local.view(-1)[slice(*part["range"])] = values.view(-1)
    full = {}
    for (role, name), by_rank in ranks.items():
        dim = names[name]["dim"]
        shards = [by_rank[rank] for rank in sorted(by_rank)]
        tensor = join(shards, dim, gated="linear_fc1.weight" in name)
        if tensor.isnan().any():
            raise RuntimeError(f"no process has all of {role} {name}")
        prefix = f"optimizer.{role}." if role else ""
        full[prefix + canonical_name(name, names)] = tensor
    return stack_experts(full)


def stack_experts(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with those of the experts of a layer stacked along a leading axis."""
    experts: dict[str, dict[int, torch.Tensor]] = {}
    others = {}
    for name, tensor in full.items():
        head, separator, tail = name.partition(".experts.experts.")
        number, _, rest = tail.partition(".")
        if separator:
            experts.setdefault(f"{head}{separator}{rest}", {})[int(number)] = tensor
        else:
            others[name] = tensor
    stacked = {name: [by[n] for n in sorted(by)] for name, by in experts.items()}
    return others | {name: torch.stack(tensors) for name, tensors in stacked.items()}


def join(local: list[torch.Tensor], dim: int | None, *, gated: bool) -> torch.Tensor:
    """Return the full tensor of the tp ranks' parts; gate and up halves are joined apart."""
    if dim is None or len(local) == 1:
        if not all(torch.equal(local[0], other) for other in local):
            raise RuntimeError("replicas differ")
        return local[0]
    if gated and dim == 0:
        halves = [part.chunk(2, dim=0) for part in local]
        return torch.cat([half[index] for index in range(2) for half in halves])
    return torch.cat(local, dim=dim)


def canonical_name(name: str, names: dict[str, Any]) -> str:
    """Return the canonical name, per layer and expert, of a parameter of local modules."""
    is_mla = any("linear_kv_up_proj" in other for other in names)
    layer = ".".join(name.split(".")[:3])
    is_moe = f"{layer}.mlp.router.weight" in names
    if not is_mla:
        name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    name = name.replace(".q_layernorm.", ".linear_q_up_proj.layer_norm_") if is_mla else name
    name = name.replace(".kv_layernorm.", ".linear_kv_up_proj.layer_norm_")
    if not is_moe:
        name = name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    return name.replace(".experts.local_experts.", ".experts.experts.")


SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors in the safetensors format, without the package."""
    header = {}
    data = io.BytesIO()
    for name, tensor in sorted(tensors.items()):
        start = data.tell()
        data.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, data.tell()],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.getvalue())


def write_case(name: str, out: Path) -> None:
    """Write the archive of one fixture: a folder NAME with the checkpoint and its reference."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        world = TP * PP * CASES[name].dp
        folder = Path(scratch) / name
        start_processes(
            run_rank, (port, name, folder, Path(scratch)), nprocs=world, start_method="spawn"
        )
        saved = [
            torch.load(Path(scratch) / f"{rank}.pt", weights_only=True) for rank in range(world)
        ]
        parts = [part for rank in saved for part in rank]
        write_safetensors(assemble(parts), folder / "reference.safetensors")
        write_archive(folder, out / f"{name}.tar.xz")


def write_archive(folder: Path, archive: Path) -> None:
    """Write a folder into an archive whose bytes depend on names and contents only."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in files:
            info = tarfile.TarInfo(str(path.relative_to(folder.parent)))
            info.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(info, file)
    nbytes = sum(path.stat().st_size for path in files)
    print(f"{archive}: {len(files)} files, {nbytes:,} bytes in {archive.stat().st_size:,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=f"default: {', '.join(CASES)}")
    options = parser.parse_args()
    for name in options.names or CASES:
        write_case(name, options.out)


if __name__ == "__main__":
    main()

"""Capabilities of this installation, detected by attributes, because version numbers do not
identify builds."""

import shutil
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist

from megalith.kernels import cpu, gpu
from megalith.kernels.matmul import HAS_BF16_KERNELS
from megalith.kernels.varlen_attention import has_varlen


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A feature of torch, the machine or an optional package, and whether it is available."""

    present: bool

    purpose: str
    """What it is used for."""

    fix: str
    """How to install it."""


def capabilities() -> dict[str, Capability]:
    """Return everything that the package uses from torch, the machine and optional packages, by
    name."""
    return _torch_capabilities() | _kernel_capabilities() | _tool_capabilities()


def cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses on a CPU; None if there is
    none."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def cpu_features() -> dict[str, object]:
    """Return torch's CPU capabilities by name; empty if this torch version has no such function."""
    read = getattr(torch.cpu, "get_capabilities", None)
    return dict(read()) if read is not None else {}


def has_symmetric_memory() -> bool:
    """Return whether torch has symmetric memory and matmuls fused with collectives."""
    name = "torch.distributed._symmetric_memory"
    if not dist.is_available() or not torch.cuda.is_available() or find_spec(name) is None:
        return False
    module, operators = import_module(name), torch.ops.symm_mem
    wanted = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    backend = getattr(
        module, "get_backend", lambda device: "unknown"
    )  # older versions do not have it
    return all(hasattr(operators, operator) for operator in wanted) and backend("cuda") is not None


def _torch_capabilities() -> dict[str, Capability]:
    other_torch = "install a torch build that has it"
    distributed = dist.is_available()
    return {
        "gloo": Capability(
            present=distributed and dist.is_gloo_available(),
            purpose="several ranks on CPUs",
            fix=other_torch,
        ),
        "nccl": Capability(
            present=distributed and dist.is_nccl_available(),
            purpose="several ranks on NVIDIA GPUs",
            fix=other_torch,
        ),
        "NVIDIA GPU": Capability(
            present=torch.cuda.is_available(),
            purpose="training on NVIDIA GPUs",
            fix="use a machine with one",
        ),
        "functional collectives": Capability(
            present=hasattr(torch.ops, "_c10d_functional")
            and hasattr(torch.ops._c10d_functional, "all_gather_into_tensor"),
            purpose="tensor-parallel layers",
            fix=other_torch,
        ),
        "fused AdamW": Capability(
            present=hasattr(torch, "_fused_adamw_"),
            purpose="one pass over the weights per step",
            fix=other_torch,
        ),
        "symmetric memory": Capability(
            present=has_symmetric_memory(),
            purpose="parallel.collective_matmul=fused, on GPUs that read each other's memory",
            fix="use parallel.collective_matmul=ring_exchange, or a CUDA build of torch on a "
            "machine with "
            "GPUs",
        ),
        "bf16 instructions": Capability(
            present=torch.cuda.is_available()
            or any(bool(on) for key, on in cpu_features().items() if "bf16" in key),
            purpose="bf16 faster than fp32",
            fix="use precision.params=fp32 on this machine",
        ),
        "bf16 CPU kernels": Capability(
            present=HAS_BF16_KERNELS,
            purpose="bf16 matmuls on CPUs; without them they are computed in fp32 "
            "(kernels.matmul=upcast)",
            fix="use precision.params=fp32 on this machine",
        ),
    }


def _kernel_capabilities() -> dict[str, Capability]:
    return {
        "compiled loops": Capability(
            present=cpu.openmp() is not None,
            purpose="norms, gates, rotations and losses in one pass over memory on CPUs",
            fix="use a torch build that brings GNU's OpenMP, as those for Linux do",
        ),
        "Triton": Capability(
            present=gpu.has_triton(),
            purpose="the same on GPUs, and flex_attention for caps and sinks",
            fix="install torch's CUDA build, or run `pip install triton`",
        ),
        "varlen attention": Capability(
            present=has_varlen(),
            purpose="documents of many lengths, and windows, in one call on GPUs",
            fix="use a newer torch, whose varlen_attn takes windows",
        ),
    }


def _tool_capabilities() -> dict[str, Capability]:
    packages = {
        "spmd_types": (
            "the type check of `megalith verify`",
            "run `pip install spmd_types==0.3.1`",
        ),
        "transformers": ("comparison with Hugging Face models", "run `pip install 'megalith[hf]'`"),
        "tensorboard": (
            "TensorBoard events beside metrics.jsonl",
            "run `pip install 'megalith[tensorboard]'`",
        ),
    }
    optional = {
        name: Capability(present=find_spec(name) is not None, purpose=purpose, fix=fix)
        for name, (purpose, fix) in packages.items()
    }
    compiler = Capability(
        present=cpp_compiler() is not None,
        purpose="train.compile=true on CPUs",
        fix="install one, for example `apt install g++`",
    )
    return {"C++ compiler": compiler} | optional

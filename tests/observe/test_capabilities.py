"""What the installation can do."""

import importlib

import pytest
import torch

from megalith.observe import machine as probes
from megalith.observe.machine import capabilities, cpp_compiler, has_symmetric_memory


def test_every_capability_has_purpose_and_fix() -> None:
    for name, capability in capabilities().items():
        assert capability.purpose, name
        assert capability.fix, name


def test_presence_follows_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert capabilities()["gloo"].present
    assert capabilities()["fused AdamW"].present == hasattr(torch, "_fused_adamw_")
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    monkeypatch.delattr(torch, "_fused_adamw_")
    monkeypatch.setattr(probes, "find_spec", lambda name: None)
    result = capabilities()
    assert not result["gloo"].present
    assert not result["fused AdamW"].present
    assert not result["transformers"].present


def test_a_compiler_is_one_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probes.shutil, "which", lambda name: "/opt/clang++" if name == "clang++" else None
    )
    assert cpp_compiler() == "/opt/clang++"
    monkeypatch.setattr(probes.shutil, "which", lambda name: None)
    assert cpp_compiler() is None
    assert not capabilities()["C++ compiler"].present


def test_bf16_instructions_are_read_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for features, present in (
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": False, "avx2": True}, False),
        ({}, False),
    ):
        monkeypatch.setattr(probes, "cpu_features", lambda features=features: features)
        assert capabilities()["bf16 instructions"].present is present


@pytest.mark.parametrize("present", [True, False])
def test_bf16_kernels_of_the_cpu_are_reported_with_what_replaces_them(
    present: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "HAS_BF16_KERNELS", present)
    capability = capabilities()["bf16 CPU kernels"]
    assert capability.present is present and "kernels.matmul=upcast" in capability.purpose


def test_symmetric_memory_needs_a_gpu_the_operators_and_a_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = importlib.import_module("torch.distributed._symmetric_memory")
    for gpu, backend, present in (
        (True, "CUDA", True),
        (False, "CUDA", False),
        (True, None, False),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(memory, "get_backend", lambda device, backend=backend: backend)
        assert has_symmetric_memory() is present
    monkeypatch.delattr(memory, "get_backend")
    assert has_symmetric_memory(), "a torch that does not tell its backend"
    monkeypatch.setattr(probes, "find_spec", lambda name: None)
    assert not has_symmetric_memory()

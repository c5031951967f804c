"""Backend selection of fused operations."""

import pytest
import torch

from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.backend import select_backend, unavailable_backends
from megalith.kernels.triton import launch


def test_numba_is_selected_on_cpus_if_supported() -> None:
    x = torch.ones(200, 200)
    assert select_backend("auto", x, op="norm") == (
        "torch" if cpu_threads.openmp() is None else "numba"
    )
    assert select_backend("auto", x, op="norm", loops=False) == "torch"
    assert select_backend("auto", x.double(), op="norm") == "torch"
    assert select_backend("torch", x, op="norm") == "torch"


def test_triton_is_selected_on_gpus_if_supported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_threads, "should_use", lambda *tensors: False)
    monkeypatch.setattr(launch, "can_use", lambda *tensors: True)
    x = torch.ones(2, 2)
    assert select_backend("auto", x, op="norm") == "triton"
    assert select_backend("auto", x, op="norm", triton=False) == "torch"
    assert select_backend("torch", x, op="norm") == "torch"


def test_explicit_backend_is_selected_or_rejected_with_an_alternative(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(3, 5)
    if cpu_threads.openmp() is not None:
        assert select_backend("numba", x, op="rope") == "numba"  # however small
        with pytest.raises(
            ConfigError,
            match="kernels.rope=numba: supported inputs: fp32, bf16 on CPUs; this input: float64",
        ):
            select_backend("numba", x.double(), op="rope")
        with pytest.raises(
            ConfigError,
            match="gates of silu.* Set kernels.activation to torch, which supports this",
        ):
            select_backend("numba", x, op="activation", loops=False)
    with pytest.raises(
        ConfigError,
        match="kernels.norm=triton: .* Set kernels.norm to torch, which supports this input, or to",
    ):
        select_backend("triton", x, op="norm")
    monkeypatch.setattr(cpu_threads, "openmp", lambda: None)
    with pytest.raises(ConfigError, match="kernels.norm=numba: torch's OpenMP library on this"):
        select_backend("numba", x, op="norm")


def test_unavailable_backends_are_listed_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "openmp", lambda: None)
    monkeypatch.setattr(launch, "has_triton", lambda: False)
    assert {"numba", "triton", "flex"} <= set(unavailable_backends())
    monkeypatch.setattr(cpu_threads, "openmp", lambda: object())
    monkeypatch.setattr(launch, "has_triton", lambda: True)
    assert not {"numba", "triton", "flex"} & set(unavailable_backends())

"""Which form of an operation serves: never a fast one where the plain or torch's is asked for."""

import pytest
import torch

from megalith.errors import ConfigError
from megalith.kernels import cpu, gpu
from megalith.kernels.engine import select_backend, unavailable_backends


def test_loops_serve_on_cpus_and_torch_where_they_do_not_or_is_asked_for() -> None:
    x = torch.ones(200, 200)
    assert select_backend("auto", x, op="norm") == ("torch" if cpu.openmp() is None else "numba")
    assert select_backend("auto", x, op="norm", loops=False) == "torch"
    assert select_backend("auto", x.double(), op="norm") == "torch"
    assert select_backend("torch", x, op="norm") == "torch"


def test_programs_serve_on_gpus_unless_there_is_none_for_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "takes", lambda *tensors: False)
    monkeypatch.setattr(gpu, "takes", lambda *tensors: True)
    x = torch.ones(2, 2)
    assert select_backend("auto", x, op="norm") == "triton"
    assert select_backend("auto", x, op="norm", triton=False) == "torch"
    assert select_backend("torch", x, op="norm") == "torch"


def test_a_form_that_is_asked_for_by_name_is_had_or_refused_with_one_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(3, 5)
    if cpu.openmp() is not None:
        assert select_backend("numba", x, op="rope") == "numba"  # however small
        with pytest.raises(
            ConfigError,
            match="kernels.rope=numba: it supports fp32, bf16 on CPUs, but the input is float64",
        ):
            select_backend("numba", x.double(), op="rope")
        with pytest.raises(
            ConfigError,
            match="gates of silu.* Set kernels.activation to torch, which supports this",
        ):
            select_backend("numba", x, op="activation", loops=False)
    with pytest.raises(
        ConfigError,
        match="kernels.norm=triton: .* Set kernels.norm to torch, which supports this, or to",
    ):
        select_backend("triton", x, op="norm")
    monkeypatch.setattr(cpu, "openmp", lambda: None)
    with pytest.raises(ConfigError, match="kernels.norm=numba: torch has no OpenMP library here"):
        select_backend("numba", x, op="norm")


def test_what_a_machine_lacks_is_named_by_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "openmp", lambda: None)
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    assert {"numba", "triton", "flex"} <= set(unavailable_backends())
    monkeypatch.setattr(cpu, "openmp", lambda: object())
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    assert not {"numba", "triton", "flex"} & set(unavailable_backends())

"""Which form of an operation serves: never a fast one where the plain or torch's is asked for."""

import pytest
import torch

from megalith.errors import ConfigError
from megalith.kernels import cpu, gpu
from megalith.kernels.engine import engine_for, missing_here


def test_loops_serve_on_cpus_and_torch_where_they_do_not_or_is_asked_for() -> None:
    x = torch.ones(200, 200)
    assert engine_for("auto", x, op="norm") == ("torch" if cpu.openmp() is None else "loops")
    assert engine_for("auto", x, op="norm", loops=False) == "torch"
    assert engine_for("auto", x.double(), op="norm") == "torch"
    assert engine_for("torch", x, op="norm") == "torch"


def test_programs_serve_on_gpus_unless_there_is_none_for_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "takes", lambda *tensors: False)
    monkeypatch.setattr(gpu, "takes", lambda *tensors: True)
    x = torch.ones(2, 2)
    assert engine_for("auto", x, op="norm") == "triton"
    assert engine_for("auto", x, op="norm", triton=False) == "torch"
    assert engine_for("torch", x, op="norm") == "torch"


def test_a_form_that_is_asked_for_by_name_is_had_or_refused_with_one_that_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.ones(3, 5)
    if cpu.openmp() is not None:
        assert engine_for("loops", x, op="rope") == "loops"  # however small
        with pytest.raises(
            ConfigError,
            match="kernels.rope=loops: it takes fp32, bf16 on CPUs; it was given float64",
        ):
            engine_for("loops", x.double(), op="rope")
        with pytest.raises(
            ConfigError, match="gates of silu.* Set kernels.activation to torch, which takes this"
        ):
            engine_for("loops", x, op="activation", loops=False)
    with pytest.raises(
        ConfigError,
        match="kernels.norm=triton: .* Set kernels.norm to torch, which takes this, or to",
    ):
        engine_for("triton", x, op="norm")
    monkeypatch.setattr(cpu, "openmp", lambda: None)
    with pytest.raises(ConfigError, match="kernels.norm=loops: torch has no OpenMP library here"):
        engine_for("loops", x, op="norm")


def test_what_a_machine_lacks_is_named_by_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "openmp", lambda: None)
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    assert {"loops", "triton", "flex"} <= set(missing_here())
    monkeypatch.setattr(cpu, "openmp", lambda: object())
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    assert not {"loops", "triton", "flex"} & set(missing_here())

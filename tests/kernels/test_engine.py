"""Which form of an operation serves: never a fast one where the plain or torch's is asked for."""

import pytest
import torch

from megalith.kernels import cpu, gpu
from megalith.kernels.engine import engine_for, kernels_in_use


def test_loops_serve_on_cpus_and_torch_where_they_do_not_or_is_asked_for() -> None:
    x = torch.ones(200, 200)
    assert engine_for("auto", x) == ("torch" if cpu.openmp() is None else "loops")
    assert engine_for("auto", x, loops=False) == "torch"
    assert engine_for("auto", x.double()) == "torch"
    assert engine_for("torch", x) == "torch"


def test_programs_serve_on_gpus_unless_there_is_none_for_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "takes", lambda *tensors: False)
    monkeypatch.setattr(gpu, "takes", lambda *tensors: True)
    x = torch.ones(2, 2)
    assert engine_for("auto", x) == "triton"
    assert engine_for("auto", x, triton=False) == "torch"
    assert engine_for("torch", x) == "torch"


def test_a_run_says_what_it_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(cpu, "openmp", lambda: object())
    monkeypatch.setattr(gpu, "has_triton", lambda: False)
    assert kernels_in_use("auto", here) == "auto (compiled loops and torch operations)"
    assert kernels_in_use("auto", there) == "auto (torch operations)"
    assert kernels_in_use("auto", here, compiled=True) == "auto (layers compiled by torch)"
    monkeypatch.setattr(gpu, "has_triton", lambda: True)
    assert kernels_in_use("auto", there) == "auto (Triton programs and torch operations)"
    assert kernels_in_use("reference", here, compiled=True).startswith("reference (plain definitions")
    assert kernels_in_use("torch", there).startswith("torch (")

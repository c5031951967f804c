"""The GPU benchmark says so where there is none, and its rehearsal on the CPU runs."""

import importlib
import subprocess
from collections.abc import Callable

import pytest
import torch

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_every_kernel_computes_what_its_reference_does(beside_benchmarks: None) -> None:
    parity = importlib.import_module("contenders.parity")
    errors = list(parity.compare_kernels(torch.device("cpu")))
    assert len({error.kernel for error in errors}) == 10
    assert [error for error in errors if not error.holds] == []


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_ends_with_a_plain_message(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("There is no NVIDIA GPU here that torch can use: nothing was measured.")


@pytest.mark.slow
def test_the_rehearsal_runs(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py", "--device", "cpu", "--case", "tiny-bf16", "--rounds", "1", "--no-compiled")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours / transformers: " in done.stdout
    assert "MISSED" not in done.stdout


@pytest.mark.slow
def test_a_case_without_time_is_left_out_by_name(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py", "--device", "cpu", "--case", "tiny-bf16", "--minutes", "0")
    assert "tiny-bf16: left out, no time. Use --case tiny-bf16, or more --minutes." in done.stdout

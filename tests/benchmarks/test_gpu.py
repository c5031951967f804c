"""The GPU benchmark says so where there is none, and its rehearsal on the CPU runs."""

import importlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from megalith.rules.run import run_problems

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_every_kernel_computes_what_its_reference_does(beside_benchmarks: None) -> None:
    parity = importlib.import_module("contenders.parity")
    errors = list(parity.compare_kernels(torch.device("cpu")))
    assert len({error.kernel for error in errors}) == 15
    assert [error for error in errors if not error.holds] == []


def test_every_backend_of_every_kernel_runs(beside_benchmarks: None) -> None:
    kernels = importlib.import_module("contenders.kernels")
    results = dict(kernels.contests(torch.device("cpu"), torch.bfloat16, kernels.SMALL))
    assert len(results) == 11
    for name, backends in results.items():
        assert {"auto", *backends} == set(backends) and len(backends) > 1, name
        for run in backends.values():
            run()


def test_kernels_of_inference_compute_what_torch_computes(beside_benchmarks: None) -> None:
    inference = importlib.import_module("contenders.inference")
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    with torch.inference_mode():
        results = dict(inference.list_inference_backends(cpu, bf16, inference.SMALL))
        assert len(results) == 4
        for name, backends in results.items():
            assert inference.largest_error(backends) <= 2e-2, name
            for run in backends.values():
                assert run().isfinite().all()
    halved = {"auto": lambda: torch.ones(2), "torch": lambda: torch.full((2,), 2.0)}
    assert inference.largest_error(halved) == 0.5


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_benchmark_without_a_gpu_ends_with_a_message(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "There is no NVIDIA GPU here that torch can use: nothing was measured."
    )


@pytest.mark.slow
def test_the_rehearsal_runs(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark(
        "gpu.py", "--device", "cpu", "--case", "tiny-bf16", "--rounds", "1", "--no-compiled"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ours / transformers: " in done.stdout
    assert "MISSED" not in done.stdout


@pytest.mark.slow
def test_the_rehearsal_of_serving_decodes_with_and_without_graphs(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    arguments = "serve", "--device", "cpu", "--case", "tiny-serve", "--rounds", "1"
    done = run_benchmark("gpu.py", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch   1 graphs / eager: " in done.stdout
    assert "batch   4 graphs" in done.stdout and "% of the bandwidth" in done.stdout


def test_plan_of_serving_is_printed_without_a_gpu(
    beside_benchmarks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr("sys.argv", ["gpu.py", "serve", "--plan", "--rounds", "5"])
    assert gpu.main() == 0
    assert capsys.readouterr().out.startswith(
        "serve: 32 layers of h 4096, vocabulary of 128256, bfloat16; batches of 1, 64 sequences of "
        "1000 tokens, 5 rounds of 8 decode steps"
    )


@pytest.mark.slow
def test_the_rehearsal_of_two_ranks_computes_one_loss_in_every_layout(
    run_benchmark: Run, beside_benchmarks: None
) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py", "--device", "cpu", "--case", "tiny-layouts", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    layouts = importlib.import_module("contenders.layouts").LAYOUTS
    rows = [line.split("loss ") for line in done.stdout.splitlines() if ", loss " in line]
    assert [row[0].strip().startswith(name) for row, name in zip(rows, layouts, strict=True)] == [
        True
    ] * len(layouts)
    assert len({row[1][:5] for row in rows}) == 1, "bf16 adds up in other orders"
    assert "a rehearsal on CPUs" in done.stdout


def contender(
    modules: tuple[ModuleType, ModuleType], *losses: float, fails: bool = False
) -> Any:  # of a script
    """One that computes these losses, or cannot be recorded."""
    one_device, _ = modules
    left = list(losses)

    def step() -> float:
        if fails:
            raise RuntimeError("cannot be captured\nand so on")
        return left.pop(0)

    return one_device.Contender(step, 0.0)


@pytest.fixture
def scripts(beside_benchmarks: None) -> tuple[ModuleType, ModuleType]:
    """contenders/one_device.py and gpu.py."""
    pytest.importorskip("transformers")
    return importlib.import_module("contenders.one_device"), importlib.import_module("gpu")


def test_contenders_are_interleaved_only_if_they_fit_on_the_device_together(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_device, gpu = scripts
    run, device = gpu.CASES["1b-bf16"].recipe(), torch.device("cpu")
    assert (run.train.global_batch_size, run.train.micro_batch_size, run.train.seq_len) == (
        2,
        2,
        4096,
    )
    for gib, count in ((80, 2), (141, 2), (180, 1)):
        monkeypatch.setattr(one_device, "total_memory", lambda device, gib=gib: gib * 2.0**30)
        result = one_device.groups(run, device, compiled=True, graphs=False)
        assert len(result) == count, gib
        assert [names[0] for names in result][:2] == ["ours", "ours compiled"][:count]
    assert one_device.groups(run, device, compiled=False, graphs=True) == [["ours", "transformers"]]


def test_only_graphs_may_fail_or_differ(scripts: tuple[ModuleType, ModuleType]) -> None:
    one_device, _ = scripts
    good, near = contender(scripts, 4.0, 3.0, 2.0, 1.0), contender(scripts, 4.0, 3.0, 2.0, 1.01)
    same, wrong = one_device.alike({"ours": good, "transformers": near}, 1e-5)
    assert list(same) == ["ours", "transformers"] and wrong == []
    good, stale = contender(scripts, 4.0, 3.0, 2.0, 1.0), contender(scripts, 4.0, 4.0, 4.0, 4.0)
    same, wrong = one_device.alike({"ours": good, one_device.GRAPHS: stale}, 1e-5)
    assert (
        list(same) == ["ours"] and "it computes losses [4.0, 4.0, 4.0, 4.0] instead of" in wrong[0]
    )
    good = contender(scripts, 4.0, 3.0, 2.0, 1.0)
    same, wrong = one_device.alike(
        {"ours": good, one_device.GRAPHS: contender(scripts, fails=True)}, 1e-5
    )
    assert wrong == ["ours compiled, graphs: left out, cannot be captured"]
    good, other = contender(scripts, 4.0, 3.0, 2.0, 1.0), contender(scripts, 5.0, 3.0, 2.0, 1.0)
    with pytest.raises(SystemExit, match="losses of transformers are"):
        one_device.alike({"ours": good, "transformers": other}, 1e-5)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        one_device.alike({"ours": contender(scripts, fails=True)}, 1e-5)


def test_the_verdict_compares_the_fastest_of_both(scripts: tuple[ModuleType, ModuleType]) -> None:
    _, gpu = scripts
    seconds = {
        "ours": [2.0, 2.0],
        "transformers": [3.0],
        "ours compiled": [1.0],
        "transformers compiled": [1.5, 1.7],
    }
    assert gpu.verdict(seconds) == "holds  ours compiled / transformers compiled >= 1.3: 1.600"
    assert gpu.verdict({"ours": [1.0], "transformers": [1.2]}).startswith(
        "MISSED ours / transformers"
    )
    assert (
        gpu.verdict({"ours": [1.0], "transformers": [1.9]}, 2.0)
        == "MISSED ours / transformers >= 2.0: 1.900"
    )


def test_every_case_is_in_the_order_and_builds_a_valid_run(
    scripts: tuple[ModuleType, ModuleType],
) -> None:
    _, gpu = scripts
    assert set(gpu.ORDER) == {*gpu.CASES, "layouts", "mixture", "serve"} and gpu.ORDER[:2] == (
        gpu.BAR_CASE,
        gpu.MIXTURE_CASE,
    )
    for case in (*gpu.CASES.values(), *gpu.TINY.values()):
        assert run_problems(case.recipe(), 1) == []
    layouts = importlib.import_module("contenders.layouts").LAYOUTS
    for recipe in gpu.LAYOUT_CASES.values():
        for parallel in layouts.values():
            assert run_problems(replace(recipe(), parallel=parallel), 2) == []


def test_moe_has_the_sizes_of_qwen3(scripts: tuple[ModuleType, ModuleType]) -> None:
    _, gpu = scripts
    case = gpu.MIXTURES[gpu.MIXTURE_CASE]
    model = case.model()
    moe = model.moe
    assert (case.tokens, model.hidden_size, moe.num_experts, moe.top_k, moe.ffn_hidden_size) == (
        8192,
        2048,
        128,
        8,
        768,
    )
    assert (moe.router.score, moe.router.norm_topk_prob, model.gated, model.activation) == (
        "softmax",
        True,
        True,
        "silu",
    )


def test_differing_contenders_of_a_moe_are_reported(
    scripts: tuple[ModuleType, ModuleType],
) -> None:
    mixture = importlib.import_module("contenders.mixture")
    layer = mixture.Layer(mixture.Mixture(mixture.tiny_moe, tokens=50), torch.device("cpu"))
    chosen = layer.layer.router(layer.x, layer.tokens).experts
    assert torch.equal(chosen.sort().values, layer.chosen.sort().values)
    assert layer.matmuls().operations == 6 * 50 * 2 * 3 * 40 * 24
    steps = layer.steps()
    assert list(steps) == [
        "ours",
        mixture.AS_THEIRS,
        "transformers grouped_mm",
        "transformers eager",
    ]
    assert mixture.unlike(steps) == []

    def wrong() -> list[torch.Tensor]:
        results = steps["ours"]()
        return [*results[:3], 1.1 * results[3], torch.full_like(results[4], torch.nan)]

    result = mixture.unlike({"ours": steps["ours"], "wrong": wrong})
    assert [text.split(" is off by ")[0] for text in result] == ["dup of wrong", "ddown of wrong"]


def test_rehearsal_of_a_moe_prints_ratios_the_bar_and_its_matmuls(
    scripts: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, gpu = scripts
    monkeypatch.setattr(gpu, "device_peak_tflops", lambda device, dtype: 0.25)
    monkeypatch.setitem(gpu.MIXTURES, gpu.MIXTURE_CASE, gpu.MIXTURES["tiny-mixture"])
    assert gpu.mixture(gpu.MIXTURE_CASE, torch.device("cpu"), rounds=1)
    first, *lines, verdict = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "mixture: 50 tokens of h 40, 6 experts of f 24, 2 for each token, the busiest with 2.0 "
        "times"
    )
    timed = [line.split("  ")[1] for line in lines if "% of 0.25" in line]
    assert timed[-4:] == [
        "matmuls alone",
        "matmuls, forward",
        "matmuls, of inputs",
        "matmuls, of weights",
    ]
    assert any(line.startswith("  ours / transformers grouped_mm: ") for line in lines)
    assert any(line.startswith("  ours reaches ") for line in lines)
    assert verdict.split(" / ")[0][2:] in ("holds  ours", "MISSED ours") and " >= 2.0: " in verdict
    monkeypatch.setattr(gpu, "unlike", lambda steps: ["y of transformers is off"])
    assert not gpu.mixture("tiny-mixture", torch.device("cpu"), rounds=1)
    output = capsys.readouterr().out
    assert "  MISSED y of transformers is off\n" in output and ">= 2.0" not in output


@pytest.mark.slow
def test_command_rehearses_a_moe(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py", "--device", "cpu", "--case", "tiny-mixture", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  ours / transformers grouped_mm: " in done.stdout and "MISSED" not in done.stdout


@pytest.mark.slow
def test_case_without_time_is_skipped_and_named(run_benchmark: Run) -> None:
    pytest.importorskip("transformers")
    done = run_benchmark("gpu.py", "--device", "cpu", "--case", "tiny-bf16", "--minutes", "0")
    assert "tiny-bf16: left out, no time. Use --case tiny-bf16, or more --minutes." in done.stdout

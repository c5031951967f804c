"""Which way every operation takes: by what each declares, and refused with a reason and one that
works."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.kernels import OPS, KernelsConfig
from megalith.config.model import AttentionConfig
from megalith.config.train import SuiteConfig, TrainRun
from megalith.kernels.activation import SIGMOIDS as SIGMOIDS_OF_LOOPS
from megalith.kernels.triton.launch import WIDEST as WIDEST_OF_PROGRAMS
from megalith.plan.kernels import (
    BACKENDS,
    SIGMOIDS,
    WIDEST,
    describe_kernel_setting,
    describe_kernels,
    explicit_backend_problems,
    list_backend_specs,
    select_optimizer_backend,
    used_ops,
)
from megalith.testing.tiny import tiny_run


def run_with(
    settings: dict[str, str] | None = None, **kernels: Any
) -> TrainRun:  # ways by operation
    return replace(tiny_run(settings or {}), kernels=KernelsConfig(**kernels))


def test_backend_table_matches_the_kernels() -> None:
    assert set(BACKENDS) == set(OPS)
    assert (set(SIGMOIDS), WIDEST) == (set(SIGMOIDS_OF_LOOPS), WIDEST_OF_PROGRAMS)
    for op, backends in BACKENDS.items():
        names = [backend.name for backend in backends]
        hint = KernelsConfig.__annotations__[op]
        assert len(set(names)) == len(names) and all(
            f"{name}" in str(hint) or op != "dropout" for name in names
        )
        assert names[-2:] == ["torch", "reference"]


REFUSED: list[tuple[dict[str, str], dict[str, str], str | None, str]] = [
    (
        {"precision.params": "fp64"},
        {"norm": "numba"},
        None,
        "kernels.norm=numba: it takes fp32, bf16, and precision.p",
    ),
    (
        {"model.norm": "layer"},
        {"norm": "numba"},
        None,
        "kernels.norm=numba: model.norm=layer has no Numba kernel.",
    ),
    (
        {"model.activation": "gelu"},
        {"activation": "numba"},
        None,
        "model.activation=gelu with model.gated=true has no",
    ),
    (
        {},
        {"norm": "triton"},
        "cpu",
        "kernels.norm=triton: it works on GPUs, and this run is on cpu. Set kernels",
    ),
    (
        {},
        {"attention": "triton"},
        "cuda",
        "kernels.attention=triton: it reads the paged KV cache of the inference engine, and",
    ),
    (
        {},
        {"rope": "numba"},
        "cuda",
        "kernels.rope=numba: it works on CPUs, and this run is on cuda",
    ),
    (
        {"train.compile": "true"},
        {"rope": "numba"},
        None,
        "train.compile=true compiles layers from plain definitions",
    ),
    (
        {"parallel.cp": "2"},
        {"attention": "cpu_tiled"},
        None,
        "attention over the tokens of other ranks is computed in chunks of keys. S",
    ),
    (
        {},
        {"matmul": "upcast"},
        None,
        "kernels.matmul=upcast: it takes bf16, and precision.params=fp32. Set kernels.m",
    ),
    (
        {"precision.params": "fp64"},
        {"optimizer": "numba"},
        "cpu",
        "kernels.optimizer=numba: it takes fp32, bf16, and precision.params=fp64. Set kernels.opti",
    ),
    (
        {"optim.kind": "sgd"},
        {"optimizer": "numba"},
        "cpu",
        "kernels.optimizer=numba: optim.kind=sgd: only AdamW has several backends. Set kernels.o",
    ),
    (
        {},
        {"experts": "loop"},
        None,
        "kernels.experts=loop: model.moe=null: there are none. Set kernels.experts to",
    ),
]


@pytest.mark.parametrize(("settings", "kernels", "device", "text"), REFUSED)
def test_unavailable_backend_is_rejected_with_the_reason(
    settings: dict[str, str], kernels: dict[str, str], device: str | None, text: str
) -> None:
    (problem,) = explicit_backend_problems(run_with(settings, **kernels), device)
    assert text in problem and "Set kernels." in problem


def test_missing_capability_is_the_reason() -> None:
    run = run_with(rope="numba")
    assert explicit_backend_problems(run) == [] and explicit_backend_problems(run, "cpu", {}) == []
    (problem,) = explicit_backend_problems(run, "cpu", {"numba": "it has no OpenMP"})
    assert problem == "kernels.rope=numba: it has no OpenMP. Set kernels.rope to torch, or to auto."


def test_attention_scores_unsupported_by_a_backend_are_named() -> None:
    run = run_with(attention="cpu_tiled")
    capped = replace(
        run, model=replace(run.model, attention=AttentionConfig(softcap=2.0, window=4))
    )
    (problem,) = explicit_backend_problems(capped)
    assert (
        "model.attention.softcap=2.0, model.attention.window=4: it supports plain scores only"
        in problem
    )
    assert (
        explicit_backend_problems(replace(capped, kernels=KernelsConfig(attention="split_kv")))
        == []
    )
    (other,) = explicit_backend_problems(replace(capped, kernels=KernelsConfig(attention="varlen")))
    assert "model.attention.window" not in other


def test_backend_without_masks_is_rejected_if_padding_must_be_masked() -> None:
    run = run_with({"data.keep_partial_valid": "true"}, attention="cpu_tiled")
    both = replace(run, model=replace(run.model, attention=AttentionConfig(causal=False)))
    (problem,) = explicit_backend_problems(both)
    assert (
        "data.keep_partial_valid=true with model.attention.causal=false: the last row ends with "
        "padding" in problem
    )
    assert problem.endswith("Set kernels.attention to torch, or to auto.")
    whole = replace(both, data=replace(both.data, keep_partial_valid=False))
    suites = replace(whole, evaluate={"code": SuiteConfig(split="test")})
    (problem,) = explicit_backend_problems(suites)  # they read the last, incomplete row too
    assert "evaluate with model.attention.causal=false: the last row ends with " in problem
    named = replace(both, kernels=KernelsConfig(attention="sdpa"))
    assert [explicit_backend_problems(other) for other in (run, whole, named)] == [[], [], []]


def test_backend_of_each_operation_is_described_with_reasons_for_fallback() -> None:
    run = run_with({"model.norm": "layer"})
    summary, reason = describe_kernels(run, "cpu", {})
    assert summary == (
        "kernels (auto): norm=torch, rope=numba, activation=numba, attention=cpu_tiled, sdpa or "
        "split_kv by document length, cross_entropy=numba, optimizer=torch"
    )
    assert reason == "kernels: norm does not use numba: model.norm=layer has no Numba kernel"
    lines = describe_kernels(run_with({"precision.params": "fp64"}), "cpu", {})
    assert "rope=torch" in lines[0] and lines[1].startswith(
        "kernels: norm, rope, activation, cross_entropy, optimizer do not use numba: it takes fp32"
    )
    assert describe_kernels(run_with(all="reference", norm="torch"), "cpu", {})[0].startswith(
        "kernels (reference): norm=torch, rope=reference"
    )
    compiled = describe_kernels(run_with({"train.compile": "true"}), "cpu", {})[0]
    assert "norm=compiled" in compiled and "cross_entropy=numba" in compiled


def test_a_bf16_run_on_a_cpu_reports_how_its_matmuls_are_computed() -> None:
    run = run_with({"precision.params": "bf16"})
    assert describe_kernels(run, "cpu", {})[0].endswith(", matmul=torch")
    line, reason = describe_kernels(run, "cpu", {}, bf16_kernels=False)
    assert line.endswith(", matmul=upcast")
    assert reason == (
        "kernels: matmul does not use torch: torch has no bf16 kernels for this CPU, so bf16 "
        "matmuls are computed in fp32"
    )
    (forced,) = describe_kernels(
        run_with({"precision.params": "bf16"}, matmul="torch"), "cpu", {}, bf16_kernels=False
    )
    assert forced.endswith(", matmul=torch")
    for other, device in ((run_with(), "cpu"), (run, "cuda")):
        assert "matmul" not in describe_kernels(other, device, {}, bf16_kernels=False)[0]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"kernels.experts": "loop"}, "kernels.experts=loop: model.moe=null"),
        ({"kernels.dropout": "numba"}, "kernels.dropout=numba: model.dropout.residual=0.0"),
        (
            {"kernels.rope": "numba", "model.positions": "none"},
            "kernels.rope=numba: model.positions=none",
        ),
    ],
)
def test_backend_of_an_absent_operation_is_rejected(settings: dict[str, str], part: str) -> None:
    (problem,) = explicit_backend_problems(tiny_run(settings))
    assert part in problem and problem.endswith(" to auto."), problem
    assert (
        explicit_backend_problems(
            tiny_run({"kernels.dropout": "numba", "model.dropout.residual": "0.1"})
        )
        == []
    )


def test_backend_of_the_update_depends_on_the_size_of_the_model() -> None:
    large = {"model.vocab_size": "32768", "model.hidden_size": "64"}
    layouts = ({}, {"parallel.pp": "2"}, {"parallel.dp": "8", "parallel.zero": "1"})
    for layout in layouts:
        assert select_optimizer_backend(run_with({**layout})) == "torch"
        assert select_optimizer_backend(run_with({**large, **layout})) == "auto"
    assert select_optimizer_backend(run_with(optimizer="numba")) == "numba"
    assert select_optimizer_backend(run_with({**large}, optimizer="torch")) == "torch"
    assert select_optimizer_backend(run_with(all="reference")) == "reference"
    assert "optimizer=numba" in describe_kernels(run_with({**large}), "cpu", {})[0]


def test_only_operations_of_the_model_are_described() -> None:
    assert used_ops(tiny_run().model) == (
        "norm",
        "rope",
        "activation",
        "attention",
        "cross_entropy",
    )
    assert "rope" not in used_ops(replace(tiny_run().model, positions="none"))
    assert used_ops(tiny_run().model, has_adamw=True)[-1] == "optimizer"
    sgd = run_with({"optim.kind": "sgd"})
    assert "optimizer" not in describe_kernels(sgd, "cpu", {})[0]


def test_backend_list_has_every_selectable_backend() -> None:
    rows = list_backend_specs()
    assert ("rope", "numba", "fp32, bf16 on CPUs", "yes") in rows
    assert (
        "attention",
        "flex",
        "fp32, bf16, fp16 on GPUs; heads of 16 features or more",
        "not guaranteed",
    ) in rows
    assert describe_kernel_setting("torch") == "torch"
    assert describe_kernel_setting(KernelsConfig(all="torch", norm="numba")) == "torch, norm=numba"

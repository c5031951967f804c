"""Kernel backend selection: every operation is bound to its backend, and training results match."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from megalith.config.kernels import OPS, Kernel, KernelsConfig
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import ConfigError
from megalith.kernels import activation, dropout, grouped_linear, norm, rope
from megalith.kernels import activation as swiglu
from megalith.kernels import activation as weighted
from megalith.kernels.activation import swiglu as swiglu_function
from megalith.kernels.attention import split_kv
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.split_kv import reference_span_attention
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.norm import rms_norm
from megalith.kernels.packed import tokens_of_rows
from megalith.nn.kernels import OPERATIONS, use_kernels, with_kernel
from megalith.nn.layer import RecomputedCore
from megalith.nn.lora import InputDropout
from megalith.nn.rope import LayerRope
from megalith.parallel import cross_entropy
from megalith.parallel.context import AllGatherAttend, RingAttend
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import (
    LayoutCase,
    compare_results,
    compare_with_one_process,
    join_ranks,
    layout_case,
    run_case,
)
from megalith.verify.ranks import _loader as loader_of
from megalith.verify.tiny_models import PLAIN, VARIANTS

EXPERTS = MoEConfig(num_experts=5, top_k=2, ffn_hidden_size=7)
KINDS: dict[str, ModelConfig] = {"plain": PLAIN, "experts": replace(PLAIN, moe=EXPERTS), **VARIANTS}

FAST = [
    norm.RMSNormFunction,
    norm.AddRMSNormFunction,
    norm.LayerNormFunction,
    norm.AddLayerNormFunction,
    rope.RopeFunction,
    swiglu.SwigluFunction,
    activation.GatedFunction,
    activation.ActivationFunction,
    weighted.WeightedGatedFunction,
    weighted.WeightedActivationFunction,
    dropout.DropoutFunction,
    cross_entropy.LossSumFunction,
    cross_entropy.TokenLossesFunction,
    split_kv.SpanAttention,
    grouped_linear.GroupedLinearFunction,
]
"""What each operation computes with where it may choose."""


def losses_of(
    kernel: Kernel, **changes: Any
) -> tuple[list[float], list[Tensor]]:  # fields of the tiny run
    """Losses of three steps of the tiny run, and the weights after them."""
    run = replace(tiny_run({"data.document_masking": "true"}), kernels=kernel, **changes)
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    loader = loader_of(run, trainer.mesh, consumed=0, steps=3)
    losses = [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1).loss for _ in range(3)]
    return losses, [parameter.detach().float() for parameter in trainer.model.parameters()]


def forbid(*arguments: object) -> Tensor:
    raise AssertionError("a fast form runs where plain definitions are asked for")


@pytest.mark.parametrize("kind", KINDS)
def test_reference_setting_binds_every_operation(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for function in FAST:
        monkeypatch.setattr(function, "apply", forbid)
    for name in ("tiled_attention", "sdpa_attention", "span_attention"):
        monkeypatch.setattr(f"megalith.kernels.attention.dispatch.{name}", forbid)
    run = layout_case(KINDS[kind], ParallelConfig(), 1).run
    with pytest.raises(AssertionError, match="a fast form"):
        one_step(run)
    assert one_step(replace(run, kernels="reference")) > 0


def one_step(run: Any) -> float:  # a TrainRun
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    batches = loader_of(run, trainer.mesh, consumed=0, steps=1).next()
    return train_step(trainer, batches, lr=1e-2, weight_decay=0.1).loss


@pytest.mark.parametrize(
    ("dtype", "tolerance", "drift"), [("fp32", 2e-6, 1e-5), ("bf16", 2e-2, 2e-3)]
)
def test_training_matches_for_all_kernel_settings(
    dtype: Literal["fp32", "bf16"], tolerance: float, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "megalith.kernels.cpu_threads.MIN_LOOP_ELEMENTS", 1
    )  # so that loops take part in so small a model
    changes = {"precision": replace(tiny_run().precision, params=dtype)}
    losses, weights = losses_of("auto", **changes)
    for kernel in ("torch", "reference"):
        others, other_weights = losses_of(kernel, **changes)
        assert others == pytest.approx(losses, rel=tolerance)
        for mine, theirs in zip(weights, other_weights, strict=True):
            # On average: Adam's first steps are as long as the rate, 1e-2, even where a gradient is
            # all rounding.
            assert (mine - theirs).abs().mean() <= drift


@pytest.mark.slow
def test_parallel_training_with_reference_kernels_matches_one_rank(
    tmp_path: Path,
) -> None:
    parallel = ParallelConfig(tp=2, cp=2, sp=True)
    case = layout_case(VARIANTS["sinks"], parallel, 4, seq_len=24, documents=True)
    plain = replace(case, run=replace(case.run, kernels="reference"))
    result = join_ranks(run_ranks(run_case, 4, plain, str(tmp_path / "ranks"), timeout=120.0))
    one = replace(case.run, parallel=ParallelConfig(bucket_numel=2000))
    reference = run_case(0, 1, LayoutCase(one, 1), str(tmp_path / "alone"))
    assert [
        difference for difference in compare_results(result, reference) if not difference.holds
    ] == []


def test_fsdp_weights_are_gathered_for_reference_backward() -> None:
    case = layout_case(PLAIN, ParallelConfig(dp=2, zero=3), 2)
    plain = replace(case, run=replace(case.run, kernels="reference"))
    assert [
        difference for difference in compare_with_one_process(plain) if not difference.holds
    ] == []
    forms: dict[Kernel, bool] = {"auto": False, "torch": False, "reference": True}
    for kernels, reads in forms.items():
        run = replace(layout_case(PLAIN, ParallelConfig(), 1).run, kernels=kernels)
        trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
        assert trainer.pipeline_model.chunks[0].head.reads_table_again is reads


class Layer(nn.Module):
    """Holds operations in every way in which layers do."""

    def __init__(self, **held: object) -> None:
        super().__init__()
        for name, value in held.items():
            setattr(self, name, value)


def test_nested_operations_are_bound() -> None:
    def wrap(function: Callable[..., Tensor], other: str) -> str:
        return other

    layer = Layer(
        norm=partial(rms_norm, eps=1e-5),
        nested=partial(wrap, swiglu_function, other="x"),
        turn=LayerRope(0, True),
        core=RecomputedCore(attention, False),
        several=(swiglu_function, 3),
        number=5,
        words=("a", "b"),
        group=single_rank_group("tp"),
    )
    before = dict(vars(layer))
    use_kernels([layer], "torch", build_single_rank_mesh())
    held: dict[str, Any] = vars(layer)
    assert (
        held["norm"].keywords == {"eps": 1e-5, "kernel": "torch"} and held["norm"].func is rms_norm
    )
    assert held["nested"].func is wrap and held["nested"].args[0].keywords == {"kernel": "torch"}
    assert (
        isinstance(held["turn"], LayerRope)
        and isinstance(held["turn"].rotate, partial)
        and held["turn"].interleaved
    )
    assert isinstance(held["core"], RecomputedCore) and isinstance(held["core"].core, partial)
    assert isinstance(held["several"][0], partial) and held["several"][1] == 3
    assert all(held[name] is before[name] for name in ("number", "words", "group"))


def test_adapter_dropout_is_bound_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout.DropoutFunction, "apply", forbid)
    drop, x = InputDropout("layers.0.mlp.down", 0.5, lambda known: known), torch.ones(4, 6)
    drop.inputs = LayerInputs(tokens_of_rows(1, 4), dropout_key=DropoutKey(3, torch.arange(4)))
    with pytest.raises(AssertionError, match="a fast form"):
        drop(x)
    use_kernels([drop], "reference", build_single_rank_mesh())
    assert set(drop(x).flatten().tolist()) == {0.0, 2.0}


def test_context_parallel_attention_becomes_the_reference() -> None:
    mesh = build_single_rank_mesh()
    made = with_kernel(
        RecomputedCore(RingAttend(mesh.cp), True), KernelsConfig(all="reference"), mesh
    )
    assert made == RecomputedCore(AllGatherAttend(mesh.cp, reference_span_attention), True)
    ring = RecomputedCore(RingAttend(mesh.cp), True)
    assert with_kernel(ring, KernelsConfig(all="reference", attention="split_kv"), mesh) is ring


def test_each_operation_has_its_own_backend_setting() -> None:
    layer = Layer(norm=rms_norm, gate=swiglu_function, core=attention)
    use_kernels(
        [layer],
        KernelsConfig(all="torch", norm="reference", attention="split_kv"),
        build_single_rank_mesh(),
    )
    held: dict[str, Any] = vars(layer)
    forms = {name: held[name].keywords["kernel"] for name in ("norm", "gate", "core")}
    assert forms == {"norm": "reference", "gate": "torch", "core": "split_kv"}
    other = Layer(norm=rms_norm, gate=swiglu_function)
    use_kernels([other], KernelsConfig(norm="numba"), build_single_rank_mesh())
    assert other.gate is swiglu_function and vars(other)["norm"].keywords == {"kernel": "numba"}


def test_every_operation_with_backends_has_a_setting() -> None:
    """A function of kernels/ with a keyword `kernel` is in a file that the table of operations
    knows; matmuls of bf16 are selected for the process."""
    folder = Path(cross_entropy.__file__).parent
    files = {
        file.stem
        for file in folder.glob("*.py")
        if 'kernel: BackendName = "auto"' in file.read_text()
    }
    assert files == set(OPERATIONS) and set(OPERATIONS.values()) | {"matmul"} == set(OPS)


@pytest.mark.parametrize("form", ["cpu_tiled", "sdpa", "split_kv", "loop", "grouped"])
def test_training_with_one_explicit_backend_matches(form: Any) -> None:
    op = "attention" if form in ("cpu_tiled", "sdpa", "split_kv") else "experts"
    model = replace(PLAIN, moe=replace(EXPERTS, ffn_hidden_size=8)) if op == "experts" else PLAIN
    run = replace(
        layout_case(model, ParallelConfig(), 1).run,
        precision=replace(tiny_run().precision, params="fp32"),
    )
    plain, explicit = one_step(run), one_step(replace(run, kernels=KernelsConfig(**{op: form})))
    assert explicit == pytest.approx(plain, rel=1e-5)


def test_unsupported_backend_is_rejected_when_the_model_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = layout_case(PLAIN, ParallelConfig(), 1).run
    with pytest.raises(
        ConfigError, match="kernels.norm=numba: it takes fp32, bf16, and precision.params=fp64. Set"
    ):
        one_step(replace(run, kernels=KernelsConfig(norm="numba")))
    with pytest.raises(
        ConfigError, match="kernels.attention=flex: it works on GPUs, and this run is on cpu. Set"
    ):
        one_step(
            replace(
                run,
                precision=replace(run.precision, params="fp32"),
                kernels=KernelsConfig(attention="flex"),
            )
        )
    monkeypatch.setattr("megalith.kernels.cpu_threads.openmp", lambda: None)
    with pytest.raises(ConfigError, match="kernels.rope=numba: torch's OpenMP library on this"):
        one_step(
            replace(
                run,
                precision=replace(run.precision, params="fp32"),
                kernels=KernelsConfig(rope="numba"),
            )
        )


def test_auto_changes_nothing() -> None:
    layer = Layer(norm=rms_norm)
    use_kernels([layer], "auto", build_single_rank_mesh())
    assert layer.norm is rms_norm

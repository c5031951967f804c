"""Kernel backend selection: every operation is bound to its backend, and training results match."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megalith.config.kernels import Kernel, KernelsConfig, KernelSetting, expand_kernel_setting
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import ConfigError
from megalith.kernels import activation, dropout, grouped_linear, norm, rope
from megalith.kernels import activation as swiglu
from megalith.kernels import activation as weighted
from megalith.kernels.attention import split_kv
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.split_kv import reference_span_attention
from megalith.kernels.backend import Backends
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.norm import rms_norm
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from megalith.nn.build import build_context
from megalith.nn.lora import InputDropout
from megalith.parallel import cross_entropy
from megalith.parallel.context import AllGatherAttend, RingAttend, build_attend
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import PLAIN, VARIANTS
from megalith.verify.ranks import (
    LayoutCase,
    compare_results,
    compare_with_one_process,
    join_ranks,
    layout_case,
    run_case,
)
from megalith.verify.ranks import _loader as loader_of

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
    # so that loops take part in so small a model
    monkeypatch.setattr("megalith.kernels.cpu_threads.MIN_LOOP_ELEMENTS", 1)
    changes = {"precision": replace(tiny_run().precision, params=dtype)}
    losses, weights = losses_of("auto", **changes)
    for kernel in ("torch", "reference"):
        others, other_weights = losses_of(kernel, **changes)
        assert others == pytest.approx(losses, rel=tolerance)
        for actual, reference in zip(weights, other_weights, strict=True):
            # On average: Adam's first steps are as long as the rate, 1e-2, even where a gradient is
            # all rounding.
            assert (actual - reference).abs().mean() <= drift


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


def decoder_of(kernels: KernelSetting, model: ModelConfig = PLAIN, **fields: Any) -> Decoder:
    backends = Backends(expand_kernel_setting(kernels))
    return Decoder(build_context(model, build_single_rank_mesh(), backends=backends, **fields))


def test_auto_binds_nothing() -> None:
    layer = decoder_of("auto").layers[0]
    assert layer.attention.core is attention
    assert layer.attention_norm.norm.func is rms_norm
    assert "kernel" not in layer.attention_norm.norm.keywords


def test_each_operation_has_its_own_backend_setting() -> None:
    kernels = KernelsConfig(all="torch", norm="reference", attention="split_kv")
    decoder = decoder_of(kernels)
    layer, head = decoder.layers[0], decoder.head
    operations = {
        "norm": layer.attention_norm.norm,
        "rope": layer.attention.apply_rope.rotate,
        "activation": layer.mlp.activation,
        "attention": layer.attention.core,
        "loss": head.summed_loss,
        "eval_loss": head.eval_loss,
        "token_losses": head.single_losses,
    }
    backends = {name: function.keywords["kernel"] for name, function in operations.items()}
    assert backends == dict.fromkeys(operations, "torch") | {
        "norm": "reference",
        "attention": "split_kv",
    }


def test_experts_are_bound_to_their_backends() -> None:
    experts = decoder_of("torch", KINDS["experts"]).layers[0].mlp.experts
    assert experts.compute.keywords == {"kernel": "torch"}
    assert experts.inner.keywords["kernel"] == "torch"


def test_adapter_dropout_is_bound_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout.DropoutFunction, "apply", forbid)
    inputs = LayerInputs(seq_params_from_rows(1, 4), dropout_key=DropoutKey(3, torch.arange(4)))
    x = torch.ones(4, 6)
    drop = InputDropout("layers.0.mlp.down", 0.5, lambda known: known)
    drop.inputs = inputs
    with pytest.raises(AssertionError, match="a fast form"):
        drop(x)
    reference = Backends(KernelsConfig(all="reference"))
    drop = InputDropout("layers.0.mlp.down", 0.5, lambda known: known, reference)
    drop.inputs = inputs
    assert set(drop(x).flatten().tolist()) == {0.0, 2.0}


def test_context_parallel_attention_has_a_reference() -> None:
    config, parallel = KernelsConfig(all="reference"), ParallelConfig(cp=2)
    mesh = build_meta_mesh(model_grid(parallel, PLAIN, 2), rank=0)
    reference = build_attend(parallel.context, 0, mesh, backends=Backends(config))
    assert reference == AllGatherAttend(mesh.cp, reference_span_attention)
    split_kv_only = Backends(replace(config, attention="split_kv"))
    ring = build_attend(parallel.context, 0, mesh, backends=split_kv_only)
    assert isinstance(ring, RingAttend)


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

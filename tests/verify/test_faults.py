"""Planted faults: the result of the type check for each, and that patches are removed."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.errors import ConfigError
from megalith.nn.build import NO_RECOMPUTE
from megalith.verify.faults import layers, moe, plant, training
from megalith.verify.faults.plant import Fault, find_fault, load_faults, plant_fault
from megalith.verify.faults.table import (
    EXPERT_NEEDS,
    fault_lora_config,
    memory_settings,
    with_attention,
    with_experts,
)
from megalith.verify.types import TrainingSettings, TypeReport, type_check

MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=24,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=40,
    output_bias=True,
)

REFUSALS = {
    "column_enter_removed": (
        "layers.0.attention.qkv",
        "Found types: [I, V]",
        "copy_to_tp over tp_copy on the Invariant",
    ),
    "row_sum_removed": (
        "layers.0.attention.out",
        "Found types: [P, ",
        "over tp_copy on the Partial operand",
    ),
    "row_sum_over_dp": (
        "layers.0.attention.out",
        "over dp expects P",
        "got V (varying: every rank has its own). Use",
    ),
    "embedding_not_summed": (
        "layers.0",
        "hidden states before layers.0 must be",
        "over tp_kv, but they are P",
    ),
    "bias_before_sum": (
        "layers.0.attention.out",
        "Found types: [P, ",
        "over tp_copy on the Partial operand",
    ),
    "sp_gather_removed": (
        "layers.0.attention",
        "shape mismatch",
        "should be broadcastable to [8, 1, 3]",
    ),
    "sp_norm_invariant": (
        "layers.0.attention_norm",
        "Found types: [V, I]",
        "bf16[24] {dp: R, tp_kv: I, tp_copy: I}",
    ),
    "vocab_loss_local": (
        "loss",
        "losses must be I",
        "over tp_kv, but they are V (varying: every rank has its own)",
    ),
    "second_sum_removed": (
        "layers.0.attention.out",
        "Found types: [P, ",
        "over tp_copy on the Partial operand",
    ),
    "whole_norm_local": (
        "layers.0.attention.norms.q_norm",
        "Found types: [P, ",
        "over tp_copy on the Partial operand",
    ),
    "latent_key_not_entered": (
        "layers.0.attention",
        "Found types: [V, I]",
        "copy_to_tp over tp on the Invariant operand",
    ),
    "adapter_invariant": (
        "layers.0.attention.qkv",
        "Found types: [V, I]",
        "args[1]: bf16[24, 3] {",
    ),
    "router_invariant": (
        "layers.0.mlp.router.gate",
        "Found types: [V, I]",
        "copy_to_tp over tp_copy on the Invariant",
    ),
    "etp_sum_removed": (
        "layers.0.mlp",
        "Found types: [P]",
        "reduce_from_tp over etp on the Partial operand",
    ),
    "etp_part_not_declared": (
        "layers.0.mlp",
        "reduce_scatter over etp expects P",
        "got V (varying: every rank has its",
    ),
    "loss_not_partial": (
        "backward",
        "Varying loss on axis dp",
        "Use mark_partial over dp to declare",
    ),
}
"""Per fault found by types or shapes: location and two parts of the text."""


def check(
    *,
    sp: bool,
    recompute: RecomputeConfig = NO_RECOMPUTE,
    model: ModelConfig = MODEL,
    lora: LoraConfig | None = None,
) -> TypeReport:
    """Two ranks per KV head and dp 2, so that every axis of the grid has more than one rank."""
    training = TrainingSettings(recompute=recompute, lora=lora)
    return type_check(model, ParallelConfig(tp=4, sp=sp), world=8, ranks=(5,), training=training)


def regions(fault: Fault) -> list[bool]:
    """Values of sp under which the fault has an effect."""
    experts = bool(EXPERT_NEEDS & {*fault.needs})  # which tensor-parallel ranks have under sp alone
    return [
        sp
        for sp in (False, True)
        if ("whole tokens" if sp else "sp") not in fault.needs and (sp or not experts)
    ]


CASES = [(fault, sp) for fault in load_faults() for sp in regions(fault)]


@pytest.mark.parametrize("sp", [False, True])
def test_type_check_passes_without_a_fault(sp: bool) -> None:
    with plant_fault(None):
        assert check(sp=sp).problems == ()


@pytest.mark.parametrize(
    ("fault", "sp"), CASES, ids=[f"{fault.name}-{'sp' if sp else 'whole'}" for fault, sp in CASES]
)
def test_type_check_rejects_faults_of_types_and_shapes(fault: Fault, sp: bool) -> None:
    with plant_fault(fault.name):
        report = check(
            sp=sp,
            recompute=memory_settings(fault)[0],
            model=with_experts(with_attention(MODEL, fault), fault),
            lora=fault_lora_config(fault),
        )
    if fault.found_by == "numbers":
        assert report.ok
        return
    where, *texts = REFUSALS[fault.name]
    (problem,) = report.problems
    assert problem.where == where and problem.ranks == (5,)
    for text in texts:
        assert text in str(problem)
    assert "MeshAxis" not in str(problem)


def test_error_text_of_every_fault_of_types_and_shapes_is_tested() -> None:
    assert {fault.name for fault in load_faults() if fault.found_by != "numbers"} == set(REFUSALS)
    assert len({fault.name for fault in load_faults()}) == len(load_faults())


def test_patched_functions_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    replacements: list[tuple[Any, str, Any]] = []
    original = plant.patched

    def noted(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
        replacements.append((owner, name, getattr(owner, name)))
        return original(owner, name, value)

    for module in (plant, layers, moe, training):
        monkeypatch.setattr(module, "patched", noted)
    for fault in load_faults():
        replacements.clear()
        with pytest.raises(KeyError), fault.context():
            assert replacements, fault.name
            assert all(
                getattr(owner, name) is not before for owner, name, before in replacements
            ), fault.name
            raise KeyError
        assert all(getattr(owner, name) == before for owner, name, before in replacements), (
            fault.name
        )


def test_unknown_fault_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="fault=row_sum: unknown fault. Did you mean row_sum_"):
        plant_fault("row_sum")
    with pytest.raises(ConfigError, match="fault=zzz: .* Use one of column_enter_removed, "):
        find_fault("zzz")

"""Planted faults: what the type check says of each, and that nothing is left of them afterwards."""

from contextlib import AbstractContextManager
from typing import Any

import pytest

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.errors import ConfigError
from megalith.models.decoder import KEEP_ALL
from megalith.verify.faults import model as attention_faults
from megalith.verify.faults import moe, optimizer, pipeline, plant
from megalith.verify.faults.plant import FAULTS, Fault, find_fault, plant_fault
from megalith.verify.faults.table import (
    EXPERT_NEEDS,
    adapters_of,
    memory_settings,
    with_attention,
    with_experts,
)
from megalith.verify.types import TypeReport, type_check

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
"""Of each fault that types or shapes find: where, and two parts of the text."""


def check(
    *,
    sp: bool,
    recompute: RecomputeConfig = KEEP_ALL,
    model: ModelConfig = MODEL,
    lora: LoraConfig | None = None,
) -> TypeReport:
    """Two ranks for each of two key/value heads, two of data: every axis of the grid has more than
    one rank."""
    return type_check(
        model, ParallelConfig(tp=4, sp=sp), world=8, ranks=(5,), recompute=recompute, lora=lora
    )


def regions(fault: Fault) -> list[bool]:
    """With and without sp, as far as the fault matters there."""
    experts = bool(EXPERT_NEEDS & {*fault.needs})  # which tensor-parallel ranks have under sp alone
    return [
        sp
        for sp in (False, True)
        if ("whole tokens" if sp else "sp") not in fault.needs and (sp or not experts)
    ]


CASES = [(fault, sp) for fault in FAULTS for sp in regions(fault)]


@pytest.mark.parametrize("sp", [False, True])
def test_without_a_fault_nothing_is_refused(sp: bool) -> None:
    with plant_fault(None):
        assert check(sp=sp).problems == ()


@pytest.mark.parametrize(
    ("fault", "sp"), CASES, ids=[f"{fault.name}-{'sp' if sp else 'whole'}" for fault, sp in CASES]
)
def test_a_fault_is_refused_by_the_type_check_if_types_or_shapes_can_show_it(
    fault: Fault, sp: bool
) -> None:
    with plant_fault(fault.name):
        report = check(
            sp=sp,
            recompute=memory_settings(fault)[0],
            model=with_experts(with_attention(MODEL, fault), fault),
            lora=adapters_of(fault),
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


def test_every_fault_of_types_and_shapes_has_its_text_tested() -> None:
    assert {fault.name for fault in FAULTS if fault.found_by != "numbers"} == set(REFUSALS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_nothing_is_left_of_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    replacements: list[tuple[Any, str, Any]] = []
    original = plant.patched

    def noted(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
        replacements.append((owner, name, getattr(owner, name)))
        return original(owner, name, value)

    for module in (plant, attention_faults, moe, optimizer, pipeline):
        monkeypatch.setattr(module, "patched", noted)
    for fault in FAULTS:
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


def test_an_unknown_fault_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="fault=row_sum: unknown fault. Did you mean row_sum_"):
        plant_fault("row_sum")
    with pytest.raises(ConfigError, match="fault=zzz: .* Use one of column_enter_removed, "):
        find_fault("zzz")
